// SPDX-License-Identifier: Apache-2.0
//! Reading a NodeList as it comes: one Node is held at a time, not all of them.

use tokio::time::timeout;

use super::client::{Api, CALL_LIMIT, Fault};
use super::node::Node;
use super::proto::{self, Garbled, ListMeta, Part};

/// Nodes of one answer; servers whose answer comes from their watch cache may ignore it.
const PAGE: usize = 500;

/// Every node, and the version of the whole. `from`: not older than this; any version of the server's cache when empty.
pub(super) async fn all(api: &Api, from: &str, mut each: impl FnMut(Node)) -> Result<String, Fault> {
    let version = if from.is_empty() { "0" } else { from };
    let first = format!("/api/v1/nodes?limit={PAGE}&resourceVersion={version}&resourceVersionMatch=NotOlderThan");
    let mut path = first;
    loop {
        let head = page(api, &path, &mut each).await?;
        if head.r#continue.is_empty() {
            return Ok(head.resource_version);
        }
        path = format!("/api/v1/nodes?limit={PAGE}&continue={}", head.r#continue);
    }
}

/// The version that the cluster is at now, not one that a server remembers.
pub(super) async fn version(api: &Api) -> Result<String, Fault> {
    Ok(page(api, "/api/v1/nodes?limit=1", &mut |_| {}).await?.resource_version)
}

async fn page(api: &Api, path: &str, each: &mut impl FnMut(Node)) -> Result<ListMeta, Fault> {
    let mut body = api.open(path, proto::LIST).await?;
    let length = within(body.list()).await?;
    let mut head = ListMeta::default();
    while let Some(part) = within(body.part(length)).await? {
        match part {
            Part::Head(meta) => head = meta,
            Part::Node(node) => each(node.into()),
        }
    }
    Ok(head)
}

/// A list that stands still is not waited for.
async fn within<T>(read: impl Future<Output = Result<T, Garbled>>) -> Result<T, Fault> {
    Ok(timeout(CALL_LIMIT, read).await.map_err(|_| Fault::Silent)??)
}
