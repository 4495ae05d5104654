// SPDX-License-Identifier: Apache-2.0
//! `weft history`: what is recorded of each pass, and with which cause.

use tokio::sync::oneshot;
use weft_backends::link::{Foreign, Link};
use weft_backends::state::ObservedValue;

use super::*;
use crate::kernel::{Notice, Outcome};
use crate::observe::history::{HistoryRecord, MAX_LISTED, Query};
use crate::observe::socket::Request;

/// Returns the records since the last call.
fn records(test: &mut TestNode, seen: &mut u64) -> Vec<HistoryRecord> {
    let (reply, mut answer) = oneshot::channel();
    test.node.answer(Request::History(Query { after: *seen, since_ms: 0 }, reply));
    let lines = answer.try_recv().unwrap();
    let records: Vec<HistoryRecord> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    *seen = records.last().map_or(*seen, |record| record.seq);
    records
}

/// A change as (entry, before, after).
type Changed = (String, Option<String>, Option<String>);

/// Returns the only record since the last call: its cause, its event, and its changes.
fn only(test: &mut TestNode, seen: &mut u64) -> (String, String, Vec<Changed>) {
    let mut all = records(test, seen);
    assert_eq!(all.len(), 1, "{all:#?}");
    let record = all.remove(0);
    let changes = record.changes.into_iter().map(|change| (change.entry, change.before, change.after)).collect();
    (record.cause, record.event, changes)
}

const ENTRY: &str = "route 10.5.2.0/24";
const VIA_2: &str = "via 192.168.0.2 dev eth0";

fn key() -> Key {
    Key::Route("10.5.2.0/24".parse().unwrap(), 0)
}

fn route(via: &str, protocol: u8) -> ObservedValue {
    let dev = Name::new("eth0").unwrap();
    let value = Value::Route(Route::Unicast { via: via.parse().unwrap(), dev, onlink: false });
    ObservedValue { value, protocol, mark: false }
}

fn text(text: &str) -> Option<String> {
    Some(text.to_owned())
}

#[tokio::test]
async fn changes_of_leases_are_recorded_with_their_names_and_the_values_before_and_after() {
    local(async {
        let (mut test, mut seen) = (TestNode::ready(OnLostLease::Hold).await, 0);
        let (cause, event, changes) = only(&mut test, &mut seen);
        assert_eq!((cause.as_str(), event.as_str()), ("start", "the store sent a list of 2 leases"));
        assert_eq!(changes, [(ENTRY.to_owned(), None, text(VIA_2))]);
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.2.0-24", "192.168.0.3")])]).await;
        let (cause, event, changes) = only(&mut test, &mut seen);
        assert_eq!((cause.as_str(), event.as_str()), ("lease", "lease 10.5.2.0-24 changed"));
        assert_eq!(changes, [(ENTRY.to_owned(), text(VIA_2), text("via 192.168.0.3 dev eth0"))]);
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.2.0-24")])]).await;
        let (_, event, changes) = only(&mut test, &mut seen);
        assert_eq!(event, "lease 10.5.2.0-24 was removed");
        assert_eq!(changes, [(ENTRY.to_owned(), text("via 192.168.0.3 dev eth0"), None)]);
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.2.0-24")])]).await;
        assert_eq!(records(&mut test, &mut seen), [], "an event that changes nothing is not recorded");
    })
    .await;
}

#[tokio::test]
async fn what_other_programs_did_is_recorded_with_the_protocol_of_their_route() {
    local(async {
        let (mut test, mut seen) = (TestNode::ready(OnLostLease::Hold).await, 0);
        records(&mut test, &mut seen);
        test.kernel.disturb(key(), None, false);
        test.node.kernel_changed(vec![Notice::Entry(key(), None)]).await;
        let record = records(&mut test, &mut seen).remove(0);
        assert_eq!((record.cause.as_str(), record.done, record.failed), ("kernel", 1, 0));
        assert_eq!(record.event, "entries are not as this agent wrote them");
        assert_eq!(record.changes[0].by, text("another program or the kernel had deleted it"));
        let foreign = route("192.168.0.9", 12);
        test.kernel.disturb(key(), Some(foreign.clone()), false);
        test.node.kernel_changed(vec![Notice::Entry(key(), Some(foreign))]).await;
        let (_, _, changes) = only(&mut test, &mut seen);
        assert_eq!(changes, [(ENTRY.to_owned(), text("via 192.168.0.9 dev eth0 protocol bird"), text(VIA_2))]);
    })
    .await;
}

#[tokio::test]
async fn full_passes_are_recorded_with_the_event_that_led_to_them() {
    local(async {
        let (mut test, mut seen) = (TestNode::ready(OnLostLease::Hold).await, 0);
        records(&mut test, &mut seen);
        for (notice, wanted) in
            [(Notice::Links, "a link or an address changed"), (Notice::Lost, "notifications of the kernel were lost")]
        {
            test.kernel.disturb(key(), None, false);
            test.node.kernel_changed(vec![notice]).await;
            let (cause, event, changes) = only(&mut test, &mut seen);
            assert_eq!((cause.as_str(), event.as_str()), ("kernel", wanted));
            assert_eq!(changes, [(ENTRY.to_owned(), None, text(VIA_2))]);
        }
        test.kernel.disturb(key(), None, false);
        test.node.full_pass(Cause::Audit).await;
        let (cause, event, _) = only(&mut test, &mut seen);
        assert_eq!((cause.as_str(), event.as_str()), ("audit", "the time of the audit came"));
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(records(&mut test, &mut seen), [], "an audit that finds no difference is not recorded");
    })
    .await;
}

/// A full pass that has to wait runs as an audit later. The event must not be forgotten meanwhile. The clock stands still, so a busy
/// machine cannot end the pause.
#[tokio::test(start_paused = true)]
async fn a_full_pass_that_was_put_off_is_recorded_with_its_event() {
    local(async {
        let (mut test, mut seen) = (TestNode::ready(OnLostLease::Hold).await, 0);
        records(&mut test, &mut seen);
        let pause = tokio::time::Instant::now() + Duration::from_millis(50);
        test.node.schedule.paused_until = pause;
        test.kernel.disturb(key(), None, false);
        test.node.kernel_changed(vec![Notice::Links]).await;
        assert_eq!(records(&mut test, &mut seen), [], "the pass must wait");
        tokio::time::sleep_until(pause).await;
        test.node.tick().await;
        let (cause, event, _) = only(&mut test, &mut seen);
        assert_eq!((cause.as_str(), event.as_str()), ("audit", "a link or an address changed"));
    })
    .await;
}

/// Another full pass came meanwhile and has compared everything. A usual audit much later must not be recorded with that event.
#[tokio::test]
async fn the_event_of_a_pass_that_was_put_off_is_forgotten_after_another_full_pass() {
    local(async {
        let (mut test, mut seen) = (TestNode::ready(OnLostLease::Hold).await, 0);
        test.node.schedule.paused_until = tokio::time::Instant::now() + Duration::from_secs(60);
        test.node.kernel_changed(vec![Notice::Links]).await;
        test.node.full_pass(Cause::Lease).await;
        records(&mut test, &mut seen);
        test.kernel.disturb(key(), None, false);
        test.node.schedule.next_audit = tokio::time::Instant::now();
        test.node.tick().await;
        let (cause, event, _) = only(&mut test, &mut seen);
        assert_eq!((cause.as_str(), event.as_str()), ("audit", "the time of the audit came"));
    })
    .await;
}

#[tokio::test]
async fn a_refused_entry_is_recorded_once_and_again_when_it_is_written() {
    local(async {
        let (mut test, mut seen) = (TestNode::ready(OnLostLease::Hold).await, 0);
        records(&mut test, &mut seen);
        test.kernel.fail(key(), Some(Outcome::Retry("no carrier".into())));
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.2.0-24", "192.168.0.3")])]).await;
        let record = records(&mut test, &mut seen).remove(0);
        assert_eq!((record.done, record.failed, record.changes[0].error.clone()), (0, 1, text("no carrier")));
        test.node.full_pass(Cause::Retry).await;
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(records(&mut test, &mut seen), [], "further refusals change nothing");
        test.kernel.fail(key(), None);
        test.node.full_pass(Cause::Audit).await;
        let (_, _, changes) = only(&mut test, &mut seen);
        assert_eq!(changes, [(ENTRY.to_owned(), text(VIA_2), text("via 192.168.0.3 dev eth0"))]);
    })
    .await;
}

#[tokio::test]
async fn a_pass_with_many_changes_is_one_record_with_numbers() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        let count = MAX_LISTED + 1;
        let records_of = |count: usize| {
            let key = |n: usize| format!("10.5.{}.0-24", n + 2);
            (0..count).map(|n| stored(&key(n), &format!("192.168.0.{}", n + 2))).collect()
        };
        test.node.start(vec![Event::Snapshot { records: records_of(count), reset: false }]).await;
        let mut all = records(&mut test, &mut 0);
        let record = all.remove(0);
        assert_eq!((all.len(), record.event.as_str(), record.done), (0, "first pass", count));
        assert_eq!((record.changes, record.counts), (vec![], [("route".to_owned(), count)].into()));
        let mut test = TestNode::new(OnLostLease::Hold);
        test.node.start(vec![Event::Snapshot { records: records_of(MAX_LISTED), reset: false }]).await;
        let record = records(&mut test, &mut 0).remove(0);
        assert_eq!((record.changes.len(), record.counts.len()), (MAX_LISTED, 0), "one change fewer is listed");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn what_is_recorded_is_written_a_moment_later_and_at_the_end() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let file = test.file.with_file_name("history");
        test.node.context.recorder = Recorder::open(Some(file.clone())).await;
        let changes = |ip: &str| vec![Event::Changes(vec![put("10.5.2.0-24", ip)])];
        test.node.store_changed(changes("192.168.0.3")).await;
        let due = test.node.context.recorder.next().expect("a write is due");
        assert_eq!(test.node.next_wake(), Some(due), "the node wakes up for it");
        tokio::time::sleep_until(due).await;
        test.node.tick().await;
        assert_eq!(test.node.context.recorder.next(), None, "the write has begun");
        test.node.store_changed(changes("192.168.0.4")).await;
        test.node.stopping().await;
        let text = std::fs::read_to_string(file).unwrap();
        assert!(text.contains("via 192.168.0.3") && text.contains("via 192.168.0.4"), "{text}");
    })
    .await;
}

/// A full pass that finds a device of another program under a name that a peer needs compares everything once more.
#[tokio::test]
async fn what_a_pass_wrote_before_it_compared_once_more_is_recorded() {
    local(async {
        let (mut test, mut seen) = (TestNode::ready(OnLostLease::Hold).await, 0);
        records(&mut test, &mut seen);
        let link = Value::link(Link { kind: Arc::new(Foreign), mtu: 1400, mac: None, up: true });
        let theirs = ObservedValue { value: link, protocol: 0, mark: false };
        test.kernel.disturb(Key::Link(Name::new("flannel.7").unwrap()), Some(theirs), false);
        test.kernel.disturb(key(), None, false);
        let peer = super::rate_limit::vxlan("10.5.77.0-24", 7);
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(peer)])]).await;
        let (_, _, changes) = only(&mut test, &mut seen);
        assert_eq!(changes, [(ENTRY.to_owned(), None, text(VIA_2))]);
    })
    .await;
}
