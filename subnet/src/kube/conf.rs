// SPDX-License-Identifier: Apache-2.0
//! net-conf in Kubernetes mode: a file, mounted from a ConfigMap.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::source::{Error, Event};

/// How often the file is read: the kubelet renews a ConfigMap once a minute, by links that no inotify follows well.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Keys about which subnets an agent takes: here others assign them, and flannel does not even check these.
const IGNORED: [&str; 6] = ["SubnetLen", "SubnetMin", "SubnetMax", "IPv6SubnetLen", "IPv6SubnetMin", "IPv6SubnetMax"];

/// The file, and what it said when it was last handed out.
pub(super) struct Conf {
    path: PathBuf,
    seen: RefCell<Option<String>>,
}

impl Conf {
    pub(super) fn new(path: PathBuf) -> Conf {
        Conf { path, seen: RefCell::new(None) }
    }

    fn look(&self) -> io::Result<String> {
        std::fs::read_to_string(&self.path).map(|text| without_ignored(&text).unwrap_or(text))
    }

    pub(super) fn read(&self) -> Result<String, Error> {
        match self.look() {
            Ok(text) => {
                *self.seen.borrow_mut() = Some(text.clone());
                Ok(text)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(Error::Missing(format!("{} (--net-config-path)", self.path.display())))
            }
            Err(error) => {
                let what = format!("read {}", self.path.display());
                Err(Error::Unavailable { what, source: Some(Box::new(error)) })
            }
        }
    }

    /// Reports another text than the one handed out. Ends when nobody listens.
    pub(super) async fn follow(&self, out: &mpsc::Sender<Event>) {
        loop {
            // Missing for a moment (links are swapped) or empty (half written): the old one holds.
            if let Ok(text) = self.look()
                && !text.trim().is_empty()
            {
                let before = self.seen.borrow_mut().replace(text.clone());
                let news = before.is_some_and(|before| before != text);
                if news && out.send(Event::Config(text)).await.is_err() {
                    return;
                }
            }
            sleep(LOOK_EVERY).await;
        }
    }
}

/// The same object without the ignored keys; `None` when there is nothing to leave out.
fn without_ignored(text: &str) -> Option<String> {
    let members: BTreeMap<String, Box<RawValue>> = serde_json::from_str(text).ok()?;
    let ignored = |name: &String| IGNORED.iter().any(|key| key.eq_ignore_ascii_case(name));
    if !members.keys().any(ignored) {
        return None;
    }
    let kept: BTreeMap<_, _> = members.into_iter().filter(|(name, _)| !ignored(name)).collect();
    serde_json::to_string(&kept).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::Network;

    /// Paused time moves on by itself here: the file is read in the same thread.
    #[tokio::test(start_paused = true)]
    async fn another_text_is_told_once_and_a_half_written_file_never() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("net-conf.json");
        let conf = Conf::new(file.clone());
        assert!(matches!(conf.read(), Err(Error::Missing(what)) if what.contains("--net-config-path")));
        std::fs::write(&file, r#"{"Network":"10.5.0.0/16"}"#).unwrap();
        conf.read().unwrap();
        let (out, mut events) = mpsc::channel(8);
        let quiet = sleep(LOOK_EVERY * 3);
        tokio::select! { () = conf.follow(&out) => panic!("it ended"), () = quiet => {} }
        std::fs::write(&file, "").unwrap();
        tokio::select! { () = conf.follow(&out) => panic!("it ended"), () = sleep(LOOK_EVERY * 3) => {} }
        std::fs::remove_file(&file).unwrap();
        tokio::select! { () = conf.follow(&out) => panic!("it ended"), () = sleep(LOOK_EVERY * 3) => {} }
        assert!(events.try_recv().is_err(), "nothing to tell");
        std::fs::write(&file, r#"{"Network":"10.6.0.0/16"}"#).unwrap();
        tokio::select! { () = conf.follow(&out) => panic!("it ended"), () = sleep(LOOK_EVERY * 3) => {} }
        assert_eq!(events.try_recv(), Ok(Event::Config(r#"{"Network":"10.6.0.0/16"}"#.to_owned())));
        assert!(events.try_recv().is_err(), "and only once");
    }

    #[test]
    fn keys_about_allocation_are_not_even_checked() {
        let text = r#"{"Network":"10.244.0.0/16","subnetlen":99,"SubnetMin":"192.0.2.1","Backend":{"Type":"vxlan", "Port":1}}"#;
        assert!(Network::parse(text).is_err());
        let kept = without_ignored(text).unwrap();
        let network = Network::parse(&kept).unwrap();
        assert_eq!(&*network.backend, r#"{"Type":"vxlan", "Port":1}"#);
        assert_eq!(without_ignored(&kept), None, "left as it is written");
        assert_eq!(without_ignored("no json"), None);
    }
}
