// SPDX-License-Identifier: Apache-2.0
//! A change to a backend that encrypts: how long packets may go in clear text to nodes that do not follow, and what is shown meanwhile.

use std::time::Duration;

use tokio::time::Instant;
use weft_backends::state::{Key, Name, Route, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::{Lease, Record};
use weft_subnet::outside::wall_clock;
use weft_subnet::saved_peers::{ClearText, Saved};
use weft_subnet::source::{Event, RecordChange};

use super::tick::wake_ups;
use super::wireguard::{head, rotate};
use super::{TestNode, VXLAN, acquire, lease, local};
use crate::node::change::Change;
use crate::node::clear_text::ClearTextTime;
use crate::observe::status::PeerState;
use crate::options::{OnLostLease, RuleOptions};
use crate::plan::{ExtraBackend, ParsedConf};

const WIREGUARD: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard"}}"#;
const ALLOWED: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard","AllowPlaintext":true}}"#;
const GRACE: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(600);

/// A lease as flannel writes it with vxlan: type, VNI and VtepMAC, and nothing else.
fn of_flannel(number: u8) -> Lease {
    let wire = format!(
        r#"{{"PublicIP":"192.168.0.{number}","PublicIPv6":null,"BackendType":"vxlan","BackendData":{{"VNI":1,"VtepMAC":"02:00:00:00:00:0{number}"}}}}"#
    );
    let attrs = Attrs::from_wire(wire.as_bytes()).unwrap();
    Lease { attrs, ..lease(&format!("10.5.{number}.0-24"), "192.168.0.9") }
}

fn record(lease: Lease) -> Record {
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

/// A node with vxlan, with files for its WireGuard key and for saved peers. It has not started.
fn with_vxlan() -> TestNode {
    let mut test = TestNode::of_vxlan(of_flannel(1), OnLostLease::Hold);
    let dir = test.file.parent().unwrap().to_owned();
    test.node.context.secrets =
        acquire::SecretFiles::new(Some(&dir.join("state"))).with_wireguard_keys(&dir.join("wgkey"), &test.file);
    test.node.context.options.change_grace = GRACE;
    test
}

/// The leases of that node, and of a peer of flannel.
fn both() -> Event {
    Event::Snapshot { records: vec![record(of_flannel(1)), record(of_flannel(2))], reset: false }
}

/// That node beside a peer of flannel.
async fn with_flannel() -> TestNode {
    let mut test = with_vxlan();
    test.node.start(vec![both()]).await;
    test
}

impl TestNode {
    /// Our lease names wireguard, the store has accepted it, and peers had the time to learn of it.
    async fn changes_to(&mut self, conf: &str) {
        let before = self.store.retakes.borrow().len();
        self.node.store_changed(vec![Event::Config(conf.to_owned())]).await;
        self.node.tick().await;
        assert!(self.asked(before + 1).await, "{:?}", self.node.net_conf.not_applied);
        self.answer().await;
        for passed in [0, 6] {
            self.node.continue_change(Instant::now() + Duration::from_secs(passed));
            self.node.tick().await;
        }
        assert!(!self.node.plan.sends_earlier());
    }

    /// Returns true if packets to the subnet with this number go over flannel.1 in the kernel.
    fn goes_in_clear_text(&self, number: u8) -> bool {
        let key = Key::Route(format!("10.5.{number}.0/24").parse().unwrap(), 0);
        let seen = self.kernel.entries().get(&key).map(|seen| seen.value.clone());
        matches!(seen, Some(Value::Route(Route::Unicast { dev, .. })) if dev.text() == "flannel.1")
    }

    fn problems(&mut self) -> String {
        let texts: Vec<String> = self.node.status().problems.into_iter().map(|problem| problem.text).collect();
        texts.join("\n")
    }
}

#[tokio::test]
async fn a_node_of_flannel_is_reached_in_clear_text_for_ten_grace_times_and_named() {
    local(async {
        let mut test = with_flannel().await;
        test.changes_to(WIREGUARD).await;
        assert!(test.goes_in_clear_text(2));
        let row = test.node.status().peers.remove(0);
        assert_eq!((row.not_encrypted, row.state), (true, PeerState::Programmed));
        let problems = test.problems();
        for words in ["1 nodes still need the earlier vxlan: 10.5.2.0-24 (192.168.0.2). Packets to them are NOT ENCRYPTED, and they \
                       are set aside in 10 min", "replace flannel by weft"] {
            assert!(problems.contains(words), "{problems}");
        }
        // A lease that somebody writes now is not reached that way.
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record(of_flannel(3)))])]).await;
        assert!(!test.goes_in_clear_text(3));
        assert!(test.problems().contains("1 nodes are set aside, because"), "{}", test.problems());
        // The end is a reason to wake up, and nothing happens before it.
        let end = test.node.clear_text_end(Instant::now()).unwrap();
        assert!(test.node.next_step_of_change().is_some_and(|next| next <= end));
        test.node.continue_change(end - Duration::from_secs(1));
        test.node.tick().await;
        assert!(test.goes_in_clear_text(2));
        let asked = test.store.retakes.borrow().len();
        test.node.continue_change(end);
        assert!(test.node.schedule.next_audit <= end, "a full pass follows at once");
        assert!(test.asked(asked + 1).await, "our lease names the earlier way no more");
        assert!(test.store.retakes.borrow()[asked].other_ways().is_empty());
        test.node.full_pass(crate::pass::Cause::Audit).await;
        let link = Key::Link(Name::new("flannel.1").unwrap());
        assert!(!test.goes_in_clear_text(2) && !test.kernel.entries().contains_key(&link));
        let (status, problems) = (test.node.status(), test.problems());
        assert!(status.peers.iter().all(|peer| !peer.not_encrypted && peer.state == PeerState::SetAside));
        for words in ["2 nodes are set aside", "10.5.2.0-24 (192.168.0.2)", "Replace flannel there by weft", "Backend.AllowPlaintext"] {
            assert!(problems.contains(words), "{words}: {problems}");
        }
        assert_eq!((test.node.plan.is_changing(), test.node.clear_text_end(end)), (false, None));
    })
    .await;
}

/// The store named another backend than our lease when the agent started, and sends its list a moment after the first pass.
#[tokio::test]
async fn a_change_that_begins_at_a_start_finds_the_leases_that_were_reached_before() {
    local(async {
        let mut test = with_vxlan();
        test.node.change = Change::at_start(Some(WIREGUARD.to_owned()), None);
        test.node.start(Vec::new()).await;
        test.node.store_changed(vec![both()]).await;
        test.node.tick().await;
        assert!(test.asked(1).await);
        assert_eq!(test.node.net_conf.text, WIREGUARD);
        assert!(test.goes_in_clear_text(2), "it cannot have followed");
        assert_eq!(test.node.plan.waiting_in_clear_text().count(), 1);
    })
    .await;
}

/// Lets the time for clear text end in a second, and the node go on for a while.
async fn nothing_is_left_when_clear_text_ends(test: &mut TestNode) {
    let since = wall_clock().as_secs() - 599;
    let saved = ClearText { since, leases: Vec::new(), followed: Vec::new() };
    test.node.change.clear_text = Some(ClearTextTime::resume(&saved, Instant::now()));
    wake_ups(test, Duration::from_secs(20)).await;
    assert_eq!((test.node.plan.is_changing(), test.node.next_step_of_change()), (false, None));
}

#[tokio::test(start_paused = true)]
async fn clear_text_that_ends_before_packets_go_the_new_way_leaves_nothing_to_wake_up_for() {
    local(async {
        let mut test = with_flannel().await;
        test.node.store_changed(vec![Event::Config(WIREGUARD.to_owned())]).await;
        test.node.tick().await;
        assert!(test.asked(1).await);
        test.answer().await;
        assert!(test.node.plan.sends_earlier(), "packets go the new way after 6 s");
        nothing_is_left_when_clear_text_ends(&mut test).await;
    })
    .await;
}

#[tokio::test]
async fn with_allow_plaintext_clear_text_does_not_end_and_is_shown() {
    local(async {
        let mut test = with_flannel().await;
        test.changes_to(ALLOWED).await;
        test.node.continue_change(Instant::now() + 2 * LIMIT);
        test.node.tick().await;
        assert!(test.goes_in_clear_text(2) && test.node.status().peers[0].not_encrypted);
        // Net-conf forbids it now, and nothing says since when it was allowed.
        test.node.store_changed(vec![Event::Config(WIREGUARD.to_owned())]).await;
        test.node.tick().await;
        assert!(!test.goes_in_clear_text(2));
        assert_eq!((test.node.plan.is_changing(), test.node.next_step_of_change()), (false, None));
    })
    .await;
}

#[tokio::test]
async fn the_beginning_and_the_leases_are_saved_at_once() {
    local(async {
        let mut test = with_flannel().await;
        let reader = test.saves();
        test.node.tick().await;
        let deadline = Instant::now() + Duration::from_secs(30);
        while reader.read_head().is_none() {
            assert!(Instant::now() < deadline, "nothing is saved");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // The last write was a moment ago, so the next one would wait for half a minute.
        let begin = wall_clock().as_secs();
        test.changes_to(WIREGUARD).await;
        let saved = loop {
            test.node.tick().await;
            if let Some(saved) = reader.read_head().and_then(|head| head.clear_text) {
                break saved;
            }
            assert!(Instant::now() < deadline, "the change is not saved");
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        assert_eq!(saved.leases, ["10.5.2.0-24"]);
        assert!((begin.saturating_sub(1)..=wall_clock().as_secs()).contains(&saved.since), "{saved:?}");
    })
    .await;
}

#[tokio::test]
async fn a_restart_goes_on_with_the_time_that_was_saved() {
    local(async {
        let (now, wall) = (Instant::now(), wall_clock().as_secs());
        // Seconds since the change as the file says it, and how much of the time is left.
        for (since, left) in [(wall - 200, 400), (wall - 600, 0), (0, 0), (wall + 3600, 600), (u64::MAX, 600)] {
            let saved = ClearText { since, leases: vec!["10.5.2.0-24".into()], followed: Vec::new() };
            let mut test = TestNode::restarted(&saved, GRACE);
            test.node.change = Change::at_start(None, Some(ClearTextTime::resume(&saved, now)));
            let end = test.node.clear_text_end(now).unwrap();
            let left = Duration::from_secs(left);
            assert!(end <= now + left && end + Duration::from_secs(60) >= now + left, "{since}: {:?}", end - now);
        }
    })
    .await;
}

/// The store had not accepted the lease of an earlier run with wireguard, so this run makes the same change again.
#[tokio::test]
async fn a_change_that_an_earlier_run_had_begun_does_not_get_the_whole_time_again() {
    local(async {
        let since = wall_clock().as_secs() - 400;
        // With another net-conf meanwhile, it is a new change.
        for (meanwhile, left) in [(Vec::new(), 200), (vec![Event::Config(VXLAN.to_owned())], 600)] {
            let mut test = with_vxlan();
            let saved = ClearText { since, leases: Vec::new(), followed: Vec::new() };
            let time = ClearTextTime::resume(&saved, Instant::now());
            test.node.change = Change::at_start(Some(WIREGUARD.to_owned()), Some(time));
            test.node.start(vec![both()].into_iter().chain(meanwhile).collect()).await;
            test.node.store_changed(vec![Event::Config(WIREGUARD.to_owned())]).await;
            test.node.tick().await;
            assert_eq!(test.node.net_conf.text, WIREGUARD);
            let now = Instant::now();
            let rest = test.node.clear_text_end(now).unwrap().saturating_duration_since(now).as_secs();
            assert!(rest.abs_diff(left) < 60, "{rest} instead of {left}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_restart_whose_time_is_over_sends_nothing_in_clear_text() {
    local(async {
        let saved =
            ClearText { since: wall_clock().as_secs() - 601, leases: vec!["10.5.2.0-24".into()], followed: Vec::new() };
        let mut test = TestNode::restarted(&saved, GRACE);
        let records = vec![record(of_flannel(2))];
        test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
        test.node.tick().await;
        assert!(!test.goes_in_clear_text(2) && !test.node.plan.is_changing());
        let recent = ClearText { since: wall_clock().as_secs(), ..saved };
        let mut test = TestNode::restarted(&recent, GRACE);
        test.node
            .start(vec![Event::Snapshot { records: vec![record(of_flannel(2)), record(of_flannel(3))], reset: false }])
            .await;
        assert!(test.goes_in_clear_text(2) && !test.goes_in_clear_text(3));
    })
    .await;
}

/// A start without the store removes nothing of peers, and the end of clear text does not wait for the store.
#[tokio::test]
async fn clear_text_ends_although_the_store_is_away() {
    local(async {
        let recent =
            ClearText { since: wall_clock().as_secs(), leases: vec!["10.5.2.0-24".into()], followed: Vec::new() };
        let mut test = TestNode::restarted_with(&recent, GRACE, Some(vec![of_flannel(2)]));
        test.node.start(Vec::new()).await;
        let link = Key::Link(Name::new("flannel.1").unwrap());
        assert!(test.goes_in_clear_text(2) && test.kernel.entries().contains_key(&link));
        let end = test.node.clear_text_end(Instant::now()).unwrap();
        test.node.continue_change(end);
        test.node.full_pass(crate::pass::Cause::Audit).await;
        assert!(!test.goes_in_clear_text(2) && !test.kernel.entries().contains_key(&link));
        assert!(test.problems().contains("1 nodes are set aside, because"), "{}", test.problems());
    })
    .await;
}

impl TestNode {
    /// A node with wireguard, and with vxlan as its earlier backend, that an earlier run left with this.
    fn restarted(saved: &ClearText, grace: Duration) -> TestNode {
        TestNode::restarted_with(saved, grace, None)
    }

    /// Does the same. If there are `peers`, they were saved, and the store is away.
    fn restarted_with(saved: &ClearText, grace: Duration, peers: Option<Vec<Lease>>) -> TestNode {
        let mut own = lease("10.5.1.0-24", "192.168.0.1");
        own.attrs.backend_type = "wireguard".into();
        TestNode::restarted_as(own, saved, grace, peers)
    }

    /// Does the same with another lease of ours.
    fn restarted_as(own: Lease, saved: &ClearText, grace: Duration, peers: Option<Vec<Lease>>) -> TestNode {
        let mut test = TestNode::altered((WIREGUARD, own), OnLostLease::Hold, RuleOptions::default(), |started| {
            let mac = weft_backends::state::Mac([2, 0, 0, 0, 0, 1]);
            let identities = weft_backends::vxlan::VtepMac::both(mac, mac);
            let host = weft_backends::host::Host { identities, ..started.host.clone() };
            started.earlier = vec![ExtraBackend::new(ParsedConf::parse(VXLAN).unwrap(), host)];
            started.clear_text = Some(saved.clone());
            started.saved = peers.map(|peers| Saved { head: head(&started.own), peers });
        });
        test.node.context.options.change_grace = grace;
        test
    }
}

#[tokio::test]
async fn another_option_of_the_backend_that_encrypts_does_not_begin_the_time_again() {
    local(async {
        let mut test = with_flannel().await;
        test.changes_to(WIREGUARD).await;
        let now = Instant::now();
        let since = wall_clock().as_secs() - 400;
        test.node.change.clear_text =
            Some(ClearTextTime::resume(&ClearText { since, leases: Vec::new(), followed: Vec::new() }, now));
        let end = test.node.clear_text_end(now).unwrap();
        let port = WIREGUARD.replace(r#""wireguard""#, r#""wireguard","ListenPort":51999"#);
        test.node.store_changed(vec![Event::Config(port.clone())]).await;
        test.node.take_turn(now + GRACE);
        assert_eq!((&test.node.net_conf.text, test.node.clear_text_end(now)), (&port, Some(end)));
        // Another mode of wireguard changes the lease.
        test.node.clear_text_after_change("wireguard", now);
        assert_eq!(test.node.clear_text_end(now), Some(end));
        test.node.clear_text_after_change("vxlan", now);
        assert!(test.node.clear_text_end(now) > Some(end));
    })
    .await;
}

/// The lease of a node that has followed, and that is reached by vxlan, too.
fn followed(number: u8) -> Lease {
    let before = of_flannel(number);
    let key = weft_backends::wireguard_key::PublicKey([number; 32]);
    let data = Some(format!(r#"{{"PublicKey":"{key}","Port":51820}}"#).into());
    let attrs = Attrs { backend_type: "wireguard".into(), backend_data: data, ..before.attrs.clone() };
    Lease { attrs: attrs.with_other_ways(std::slice::from_ref(&before.attrs)), ..before }
}

/// The store has not accepted our lease with wireguard, so no peer knows our key.
#[tokio::test]
async fn without_the_store_a_peer_that_has_followed_is_reached_the_earlier_way_until_it_can_know_our_key() {
    local(async {
        let id = String::from("10.5.2.0-24");
        let saved = ClearText { since: wall_clock().as_secs(), leases: Vec::new(), followed: vec![id] };
        let peers = vec![followed(2), followed(3)];
        let mut test = TestNode::restarted_as(of_flannel(1), &saved, GRACE, Some(peers));
        test.node.start(Vec::new()).await;
        assert!(test.goes_in_clear_text(2) && !test.goes_in_clear_text(3), "the second one is a new lease");
        // Somebody has changed its lease back.
        let mut test = TestNode::restarted_as(of_flannel(1), &saved, GRACE, Some(vec![of_flannel(2)]));
        test.node.start(Vec::new()).await;
        assert!(!test.goes_in_clear_text(2));
    })
    .await;
}

#[tokio::test]
async fn a_lease_that_has_followed_is_saved_while_packets_to_it_go_in_clear_text() {
    local(async {
        let mut test = with_flannel().await;
        let saved = |test: &TestNode| {
            let saved = test.node.saved_clear_text(Instant::now()).unwrap();
            (saved.leases, saved.followed)
        };
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record(of_flannel(3)))])]).await;
        test.node.store_changed(vec![Event::Config(WIREGUARD.to_owned())]).await;
        test.node.tick().await;
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record(followed(3)))])]).await;
        let (waiting, has_followed) = (vec!["10.5.2.0-24".to_owned()], vec!["10.5.3.0-24".to_owned()]);
        assert_eq!(saved(&test), (waiting.clone(), has_followed));
        assert!(test.goes_in_clear_text(3), "the store has not accepted our lease");
        test.node.plan.send_current();
        assert_eq!(saved(&test), (waiting, Vec::new()), "packets must not go in clear text again");
    })
    .await;
}

/// The grace time of the earlier backend had begun, because no node needs it, and it would end much later.
#[tokio::test(start_paused = true)]
async fn an_earlier_backend_that_goes_with_the_end_of_clear_text_leaves_nothing_to_wake_up_for() {
    local(async {
        let mut test = with_flannel().await;
        test.changes_to(WIREGUARD).await;
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record(followed(2)))])]).await;
        assert!(test.node.plan.is_changing(), "packets of this node may still come by vxlan");
        nothing_is_left_when_clear_text_ends(&mut test).await;
    })
    .await;
}

/// The devices and the files of the key belong together.
#[tokio::test]
async fn the_key_does_not_change_while_a_node_needs_the_earlier_backend() {
    local(async {
        let mut test = with_flannel().await;
        test.changes_to(WIREGUARD).await;
        assert!(test.node.plan.is_changing() && test.node.change.wanted.is_none());
        let said = rotate(&mut test).try_recv().expect("an answer").unwrap_err().to_string();
        assert!(said.contains("the backend changes"), "{said}");
    })
    .await;
}
