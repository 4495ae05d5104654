// SPDX-License-Identifier: Apache-2.0
//! net-conf in Kubernetes mode: a file, mounted from a ConfigMap.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::json::Members;
use crate::net_conf::NetConf;
use crate::source::{Error, Event, LastNetConf};

/// How often the file is read. The kubelet updates a ConfigMap by swapping symbolic links, which inotify does not follow well.
const READ_INTERVAL: Duration = Duration::from_secs(5);

/// Keys that say which subnets an agent may choose. Kubernetes assigns the subnets, and flannel does not check these keys either.
const IGNORED: [&str; 6] = ["SubnetLen", "SubnetMin", "SubnetMax", "IPv6SubnetLen", "IPv6SubnetMin", "IPv6SubnetMax"];

/// What to do if the file does not exist. The names are those of the manifests and of the chart.
const REMEDY: &str = "the manifest mounts it from the key net-conf.json of a ConfigMap; look whether that is there: \
                      kubectl -n kube-flannel get configmap kube-flannel-cfg -o yaml";

/// The file with net-conf.
pub(super) struct Conf {
    path: PathBuf,
    last: LastNetConf,
}

impl Conf {
    pub(super) fn new(path: PathBuf) -> Conf {
        Conf { path, last: LastNetConf::default() }
    }

    /// Reads the file and removes the ignored keys.
    fn read_file(&self) -> io::Result<String> {
        std::fs::read_to_string(&self.path).map(|text| without_ignored(&text).unwrap_or(text))
    }

    /// Reads net-conf. It is then what [`Conf::follow`] compares with.
    pub(super) fn read(&self) -> Result<String, Error> {
        match self.read_file() {
            Ok(text) => {
                self.last.set(&text);
                Ok(text)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let place = format!("{} (--net-config-path)", self.path.display());
                Err(Error::NoNetConf { place, remedy: REMEDY.to_owned() })
            }
            Err(error) => {
                let what = format!("read {}", self.path.display());
                Err(Error::Unavailable { what, source: Some(Box::new(error)) })
            }
        }
    }

    /// Reads net-conf as it is now. [`Conf::follow`] reports a change anyway. Returns `None` if it cannot be read or is not valid.
    pub(super) fn net_conf(&self) -> Option<NetConf> {
        NetConf::parse(&self.read_file().ok()?).ok()
    }

    /// Reports every change of the text as [`Event::Config`]. Returns when nobody receives the events any more.
    pub(super) async fn follow(&self, out: &mpsc::Sender<Event>) {
        loop {
            // While it is replaced, the file may be missing or empty. The old text stays in force then.
            if let Ok(text) = self.read_file()
                && !text.trim().is_empty()
                && !self.last.report(text, out).await
            {
                return;
            }
            sleep(READ_INTERVAL).await;
        }
    }
}

/// Returns the object without the ignored keys; `None` if it has none of them or is not a JSON object.
fn without_ignored(text: &str) -> Option<String> {
    let mut members: Members = serde_json::from_str(text).ok()?;
    if members.remove(&IGNORED) { serde_json::to_string(&members).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file is read on this thread, so the paused clock moves on by itself.
    #[tokio::test(start_paused = true)]
    async fn a_changed_text_is_reported_once_and_a_half_written_one_never() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("net-conf.json");
        let conf = Conf::new(file.clone());
        assert!(matches!(conf.read(), Err(Error::NoNetConf { place, .. }) if place.contains("--net-config-path")));
        let unreadable = Conf::new(dir.path().to_owned()).read();
        assert!(matches!(unreadable, Err(Error::Unavailable { .. })), "something is there: {unreadable:?}");
        std::fs::write(&file, r#"{"Network":"10.5.0.0/16"}"#).unwrap();
        conf.read().unwrap();
        let (out, mut events) = mpsc::channel(8);
        let quiet = sleep(READ_INTERVAL * 3);
        tokio::select! { () = conf.follow(&out) => panic!("it ended"), () = quiet => {} }
        std::fs::write(&file, "").unwrap();
        tokio::select! { () = conf.follow(&out) => panic!("it ended"), () = sleep(READ_INTERVAL * 3) => {} }
        std::fs::remove_file(&file).unwrap();
        tokio::select! { () = conf.follow(&out) => panic!("it ended"), () = sleep(READ_INTERVAL * 3) => {} }
        assert!(events.try_recv().is_err(), "an empty or missing file must not be reported");
        std::fs::write(&file, r#"{"Network":"10.6.0.0/16"}"#).unwrap();
        tokio::select! { () = conf.follow(&out) => panic!("it ended"), () = sleep(READ_INTERVAL * 3) => {} }
        assert_eq!(events.try_recv(), Ok(Event::Config(r#"{"Network":"10.6.0.0/16"}"#.to_owned())));
        assert!(events.try_recv().is_err(), "the new text must be reported once");
    }

    #[test]
    fn keys_about_the_choice_of_a_subnet_are_removed() {
        let text = r#"{"Network":"10.244.0.0/16","subnetlen":99,"SubnetMin":"192.0.2.1","Backend":{"Type":"vxlan", "Port":1}}"#;
        assert!(NetConf::parse(text).is_err());
        let kept = without_ignored(text).unwrap();
        let net_conf = NetConf::parse(&kept).unwrap();
        assert_eq!(&*net_conf.backend, r#"{"Type":"vxlan", "Port":1}"#);
        assert_eq!(without_ignored(&kept), None, "a text without these keys must stay as it is");
        assert_eq!(without_ignored("no json"), None);
        // The last of two members with one name counts, before and afterwards.
        let text = r#"{"network":"10.5.0.0/16","Network":"10.6.0.0/16","SubnetLen":24,"Backend":{"Type":"vxlan"}}"#;
        let networks = |text: &str| NetConf::parse(text).unwrap().networks.to_string();
        assert_eq!(
            (networks(text), networks(&without_ignored(text).unwrap())),
            ("10.6.0.0/16".into(), "10.6.0.0/16".into())
        );
    }
}
