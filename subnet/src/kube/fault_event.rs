// SPDX-License-Identifier: Apache-2.0
//! Kubernetes Events that say what is wrong with our Node (docs/adr/031-events.md).

use serde_json::{Value, json};

use crate::source::{Error, FaultNotice};

use super::KubeStore;
use super::client::{ApiError, CONFLICT};

/// Where the Events of objects without a namespace are, such as Nodes. The server accepts no other place.
const PATH: &str = "/apis/events.k8s.io/v1/namespaces/default/events";
/// The longest text of an Event that the server accepts is 1024 bytes.
const MAX_NOTE: usize = 1000;
/// The longest part of a Node's name in the name of an Event, which has at most 253 bytes.
const MAX_NAME: usize = 230;
/// The longest name of an instance that the server accepts.
const MAX_INSTANCE: usize = 128;

/// Returns the beginning of `text`, not longer than this number of bytes.
fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

/// Returns the name of the Event. The same notice has the same name, so an agent that is started again creates no second Event.
fn name(node: &str, notice: &FaultNotice) -> String {
    let hash = crc32fast::hash(format!("{} {}", notice.reason(), notice.text).as_bytes());
    format!("{}.weft-{hash:08x}", cut(node, MAX_NAME).trim_end_matches(|c: char| !c.is_ascii_alphanumeric()))
}

fn now() -> String {
    super::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string()
}

fn event(node: &str, uid: &str, notice: &FaultNotice) -> Value {
    let note = match notice.text.len() {
        ..=MAX_NOTE => notice.text.clone(),
        _ => format!("{} [cut]", cut(&notice.text, MAX_NOTE)),
    };
    json!({
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": name(node, notice), "namespace": "default"},
        "eventTime": now(),
        "reportingController": "weft",
        "reportingInstance": cut(&format!("weft-{node}"), MAX_INSTANCE),
        "action": "ReportFault",
        "type": if notice.is_over { "Normal" } else { "Warning" },
        "reason": notice.reason(),
        "note": note,
        "regarding": {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uid},
    })
}

impl KubeStore {
    /// Writes an Event about our Node, or counts one more time in the Event with the same text.
    pub(super) async fn write_event(&self, notice: &FaultNotice) -> Result<(), Error> {
        let node = self.own_name().await?;
        // The kubelet's own Events name the Node instead of its uid. `kubectl describe node` shows both.
        let uid = Some(self.own_uid.borrow().clone()).filter(|uid| !uid.is_empty());
        let event = event(node, uid.as_deref().unwrap_or(node), notice);
        let written = match self.api.create::<Value>(PATH, &event).await {
            Err(error) if error.code() == CONFLICT => self.count_event(&name(node, notice), notice.count).await,
            other => other.map(drop),
        };
        written.map_err(|error| self.api.error(&format!("event {}", notice.reason()), error))
    }

    /// Counts one more time in an Event. Nothing else of an Event can be changed, and the server accepts a series from two on.
    async fn count_event(&self, name: &str, count: u64) -> Result<(), ApiError> {
        let series = json!({"series": {"count": count.max(2), "lastObservedTime": now()}});
        self.api.patch::<Value>(&format!("{PATH}/{name}"), &series).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::fake::{Fake, FakeNode};
    use super::*;
    use crate::source::Source;

    fn notice(text: &str) -> FaultNotice {
        FaultNotice { fault: "UplinkFault", text: text.to_owned(), is_over: false, count: 1 }
    }

    #[test]
    fn long_names_and_texts_are_cut_to_what_the_server_accepts() {
        let node = format!("{}.x{}", "n".repeat(MAX_NAME - 1), "y".repeat(22));
        let event = event(&node, "uid", &notice(&"ü".repeat(2000)));
        let text = |key: &str| event[key].as_str().unwrap().to_owned();
        assert!(text("note").ends_with("ü [cut]") && text("note").len() <= 1024);
        assert!(text("reportingInstance").len() <= 128);
        let name = event["metadata"]["name"].as_str().unwrap();
        assert!(name.len() <= 253 && name.contains("n.weft-"), "{name}");
    }

    #[test]
    fn only_equal_notices_have_one_name() {
        let (fault, over) = (notice("no address"), FaultNotice { is_over: true, ..notice("no address") });
        assert_eq!(name("n1", &fault), name("n1", &FaultNotice { count: 7, ..notice("no address") }));
        assert!(name("n1", &fault) != name("n1", &over) && name("n1", &fault) != name("n1", &notice("two addresses")));
        let (fault, over) = (event("n1", "u", &fault), event("n1", "u", &over));
        assert_eq!((&fault["type"], &fault["reason"]), (&json!("Warning"), &json!("UplinkFault")));
        assert_eq!((&over["type"], &over["reason"]), (&json!("Normal"), &json!("UplinkFaultEnded")));
    }

    #[tokio::test]
    async fn a_notice_that_is_there_already_is_counted() {
        let mut fake = Fake::start().await;
        let store = fake.store();
        // After a restart, the agent counts from one again. The server accepts no series of one.
        for (count, written) in [(7, 7), (1, 2)] {
            let serve = async {
                let request = fake.expect("POST", PATH).await;
                assert_eq!(request.body["regarding"]["uid"], "n1", "the name stands for a uid that is not known yet");
                request.refuse(409, "AlreadyExists").await;
                let request = fake.expect("PATCH", &format!("{PATH}/n1.weft-")).await;
                assert_eq!(request.body["series"]["count"], written);
                request.json(&json!({})).await;
            };
            let again = FaultNotice { count, ..notice("no address") };
            let (result, ()) = tokio::join!(store.write_event(&again), serve);
            result.unwrap();
        }
    }

    #[tokio::test]
    async fn a_fault_is_written_after_the_time_of_the_flag() {
        let fake = Fake::start().await;
        let after = Some(Duration::from_secs(60));
        let store = KubeStore { events_after: after, ..fake.store() };
        assert_eq!((store.notices_after(), fake.store().notices_after()), (after, None));
    }

    #[tokio::test]
    async fn an_event_is_about_our_node() {
        let mut fake = Fake::start().await;
        let store = fake.store();
        let read = async { fake.expect("GET", "/api/v1/nodes/n1").await.json(&FakeNode::new(1, 5).json()).await };
        let (own, ()) = tokio::join!(store.find_own(), read);
        own.unwrap();
        let serve = async {
            let request = fake.expect("POST", PATH).await;
            assert_eq!(request.kind, "application/json");
            let regarding = json!({"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "uid-1"});
            assert_eq!(request.body["regarding"], regarding);
            assert_eq!(request.body["note"], "no address");
            request.json(&json!({})).await;
        };
        let notice = notice("no address");
        let (written, ()) = tokio::join!(store.write_notice(&notice), serve);
        written.unwrap();
    }

    #[tokio::test]
    async fn a_missing_right_names_the_switch_that_turns_events_off() {
        let mut fake = Fake::start().await;
        let store = fake.store();
        let text = r#"events.events.k8s.io is forbidden: cannot create resource "events" in API group "events.k8s.io""#;
        let serve = async { fake.expect("POST", PATH).await.refuse(403, text).await };
        let notice = notice("no address");
        let (written, ()) = tokio::join!(store.write_event(&notice), serve);
        let Err(Error::Refused { source, .. }) = written else { panic!("{written:?}") };
        let text = source.to_string();
        assert!(text.contains("events.k8s.io create and patch") && text.contains("--kube-events=off"), "{text}");
    }
}
