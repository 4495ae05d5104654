// SPDX-License-Identifier: Apache-2.0
//! Reading a NodeList as it comes: one Node is held at a time, not the 16 kB of each of them.

use futures_util::AsyncBufReadExt;
use serde::Deserialize;
use tokio::time::timeout;

use super::client::{Api, CALL_LIMIT, Fault};
use super::node::Node;

/// Nodes of one answer; servers whose answer comes from their watch cache may ignore it.
const PAGE: usize = 500;

/// Takes the elements out of a list: whatever stands inside its second level's arrays; the rest is its head.
#[derive(Default)]
struct Splitter {
    depth: usize,
    /// The second level is an array.
    array: bool,
    string: bool,
    escaped: bool,
    element: Vec<u8>,
    head: Vec<u8>,
}

impl Splitter {
    fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(&[u8]) -> Result<(), Fault>) -> Result<(), Fault> {
        for byte in bytes {
            let (depth, array) = (self.depth, self.array);
            self.step(*byte);
            let within = array && depth >= 3 || self.array && self.depth >= 3;
            if within {
                self.element.push(*byte);
                if self.depth == 2 {
                    each(&self.element)?;
                    self.element.clear();
                }
            } else if !(array && depth == 2 && self.depth == 2) {
                // Commas between elements belong to nobody.
                self.head.push(*byte);
            }
        }
        Ok(())
    }

    fn step(&mut self, byte: u8) {
        if self.string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.string = false,
                _ => {}
            }
            return;
        }
        match byte {
            b'"' => self.string = true,
            b'{' | b'[' => {
                self.depth += 1;
                if self.depth == 2 {
                    self.array = byte == b'[';
                }
            }
            b'}' | b']' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 1 {
                    self.array = false;
                }
            }
            _ => {}
        }
    }
}

#[derive(Deserialize)]
struct Head {
    metadata: ListMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
    #[serde(default)]
    r#continue: String,
}

/// Every node, and the version of the whole. `from`: not older than this; any version of the server's cache when empty.
pub(super) async fn all(api: &Api, from: &str, mut each: impl FnMut(Node)) -> Result<String, Fault> {
    let version = if from.is_empty() { "0" } else { from };
    let first = format!("/api/v1/nodes?limit={PAGE}&resourceVersion={version}&resourceVersionMatch=NotOlderThan");
    let mut path = first;
    loop {
        let head = page(api, &path, &mut each).await?;
        if head.metadata.r#continue.is_empty() {
            return Ok(head.metadata.resource_version);
        }
        path = format!("/api/v1/nodes?limit={PAGE}&continue={}", head.metadata.r#continue);
    }
}

/// The version that the cluster is at now, not one that a server remembers.
pub(super) async fn version(api: &Api) -> Result<String, Fault> {
    let head: Head = api.get("/api/v1/nodes?limit=1").await?;
    Ok(head.metadata.resource_version)
}

async fn page(api: &Api, path: &str, each: &mut impl FnMut(Node)) -> Result<Head, Fault> {
    let broken = |error: &dyn std::fmt::Display| Fault::Stream(format!("the list is no list of nodes: {error}"));
    let mut body = api.stream(path).await?;
    let mut splitter = Splitter::default();
    loop {
        let chunk = timeout(CALL_LIMIT, body.fill_buf()).await.map_err(|_| Fault::Silent)?;
        let chunk = chunk.map_err(|error| Fault::Stream(error.to_string()))?;
        if chunk.is_empty() {
            return serde_json::from_slice(&splitter.head).map_err(|error| broken(&error));
        }
        splitter.feed(chunk, |element| {
            each(serde_json::from_slice(element).map_err(|error| broken(&error))?);
            Ok(())
        })?;
        let read = chunk.len();
        body.as_mut().consume(read);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIST: &str = r#"{"kind":"NodeList","metadata":{"resourceVersion":"7","continue":"a]}"},
        "items":[ {"a":"}\"]","b":[1,[2]]} , {"c":{}} ,{}], "tail":"[{" }"#;

    #[test]
    fn elements_do_not_depend_on_how_the_bytes_arrive() {
        for size in 1..LIST.len() + 1 {
            let (mut splitter, mut found) = (Splitter::default(), Vec::new());
            for chunk in LIST.as_bytes().chunks(size) {
                let each = |element: &[u8]| {
                    found.push(String::from_utf8(element.to_vec()).unwrap());
                    Ok(())
                };
                splitter.feed(chunk, each).unwrap();
            }
            assert_eq!(found, [r#"{"a":"}\"]","b":[1,[2]]}"#, r#"{"c":{}}"#, "{}"], "in pieces of {size}");
            let head: Head = serde_json::from_slice(&splitter.head).unwrap();
            assert_eq!((head.metadata.resource_version.as_str(), head.metadata.r#continue.as_str()), ("7", "a]}"));
        }
    }

    #[test]
    fn a_list_that_was_cut_off_is_no_list() {
        let mut splitter = Splitter::default();
        splitter.feed(&LIST.as_bytes()[..LIST.len() - 20], |_| Ok(())).unwrap();
        assert!(serde_json::from_slice::<Head>(&splitter.head).is_err());
    }
}
