// SPDX-License-Identifier: Apache-2.0
//! Leases of peers that are written, removed and held.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::index::Changed;
use weft_backends::link::{Foreign, Link};
use weft_backends::state::{Key, Name, Value};
use weft_subnet::hold::Hold;
use weft_subnet::lease::{Id, Record};
use weft_subnet::source::{Event, RecordChange};

use super::{TestNode, VXLAN, lease, local, put, rate_limit, removed, start_with, stored, vxlan_lease};
use crate::kernel::Outcome;
use crate::observe::report::PeerList;
use crate::options::OnLostLease;
use crate::pass::Cause;
use crate::saved::{SavedFile, Saver};

fn key(third: usize) -> String {
    format!("10.5.{third}.0-24")
}

/// A list with our own lease and these peers.
fn list(peers: impl Iterator<Item = usize>) -> Vec<Event> {
    let own = stored("10.5.1.0-24", "192.168.0.1");
    let peers = peers.map(|n| stored(&key(n), &format!("192.168.0.{n}")));
    vec![Event::Snapshot { records: [own].into_iter().chain(peers).collect(), reset: false }]
}

/// A node with the peers 2 to 21.
async fn twenty() -> TestNode {
    let mut test = TestNode::new(OnLostLease::Hold);
    test.node.start(list(2..22)).await;
    assert!(test.via("10.5.21.0/24").is_some());
    test
}

#[tokio::test]
async fn status_shows_the_peers_sorted_by_subnet() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        let unreadable = Record::new("x".into(), Err("not a key"));
        let mut records = vec![stored("10.5.1.0-24", "192.168.0.1"), unreadable];
        records.extend([10, 2].map(|n| stored(&key(n), &format!("192.168.0.{n}"))));
        test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
        let peers = test.node.status().peers;
        let subnets: Vec<&str> = peers.iter().map(|peer| peer.subnet.as_str()).collect();
        assert_eq!(subnets, ["x", "10.5.2.0/24", "10.5.10.0/24"]);
    })
    .await;
}

#[tokio::test]
async fn held_peers_are_removed_when_the_grace_time_is_over() {
    local(async {
        let mut test = twenty().await;
        test.node.peers.hold = Hold::new(Duration::from_millis(1));
        test.node.store_changed(list(0..0)).await;
        assert_eq!(test.node.passer.keep_stale_until, None, "only a first list may be that of a wiped store");
        let due = test.node.peers.hold.next().expect("so many removals at once must be held");
        assert!(test.via("10.5.9.0/24").is_some());
        let passes = test.kernel.observations();
        let dir = tempfile::tempdir().unwrap();
        let file = SavedFile::new(Some(dir.path()), Path::new("/run/x/subnet.env"), Some("etcd x".into())).unwrap();
        test.node.context.saver = Saver::new(Some(file));
        test.node.save(Instant::now());
        assert_eq!(test.node.context.saver.next(Instant::now()), None);
        tokio::time::sleep_until(due.into()).await;
        while test.node.peers.hold.next().is_some() {
            test.node.tick().await;
        }
        assert_eq!((test.via("10.5.9.0/24"), test.kernel.observations()), (None, passes), "no full pass is needed");
        assert!(test.node.context.saver.next(Instant::now()).is_some(), "the next start must not know them");
    })
    .await;
}

/// Charges a lease so much that its next record waits.
fn use_up_allowance(test: &mut TestNode, third: usize) {
    let link = Link { kind: Arc::new(Foreign), mtu: 1450, mac: None, up: true };
    let key_of_link = Key::Link(Name::new("flannel.9").unwrap());
    let change = Changed { key: key_of_link, before: None, after: Some(Value::link(link)) };
    for _ in 0..12 {
        test.node.peers.rate_limit.charge(&key(third).as_str().into(), std::slice::from_ref(&change), Instant::now());
    }
}

#[tokio::test]
async fn a_waiting_record_is_forgotten_when_its_lease_is_removed() {
    local(async {
        let mut test = twenty().await;
        for gone in [list(2..9), vec![Event::Changes(vec![removed(&key(9))])]] {
            use_up_allowance(&mut test, 9);
            test.node.store_changed(vec![Event::Changes(vec![put(&key(9), "192.168.0.99")])]).await;
            assert!(test.node.peers.rate_limit.next(Instant::now()).is_some(), "the record must wait");
            test.node.store_changed(gone).await;
            assert_eq!(test.node.peers.rate_limit.next(Instant::now()), None, "the record must not be applied later");
        }
    })
    .await;
}

#[tokio::test]
async fn the_first_list_ends_the_use_of_saved_peers() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        test.node.peers.list = PeerList::Saved("the store is away: peers are those that were saved".into());
        test.node.store_changed(vec![Event::Answered]).await;
        assert!(!test.node.has_list(), "an answer without a list is not enough");
        test.node.store_changed(list(2..4)).await;
        assert_eq!(test.node.peers.list, PeerList::Complete);
    })
    .await;
}

#[tokio::test]
async fn a_held_peer_whose_lease_comes_back_but_must_wait_is_kept() {
    local(async {
        let mut test = twenty().await;
        test.node.store_changed(list(0..0)).await;
        let held = test.node.peers.hold.len();
        use_up_allowance(&mut test, 9);
        test.node.store_changed(vec![Event::Changes(vec![put(&key(9), "192.168.0.99")])]).await;
        assert_eq!(test.via("10.5.9.0/24"), "192.168.0.9".parse().ok(), "its newest record must wait");
        assert_eq!(test.node.peers.hold.len(), held - 1, "the lease exists, so its peer must not be removed later");
    })
    .await;
}

#[tokio::test]
async fn the_last_of_two_changes_of_one_lease_counts() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let (gone, back) = (removed(&key(2)), put(&key(2), "192.168.0.22"));
        test.node.store_changed(vec![Event::Changes(vec![gone, back])]).await;
        assert_eq!(test.via("10.5.2.0/24"), "192.168.0.22".parse().ok());
        let (gone, back) = (removed(&key(2)), put(&key(2), "192.168.0.2"));
        test.node.store_changed(vec![Event::Changes(vec![back, gone])]).await;
        assert_eq!(test.via("10.5.2.0/24"), None, "in the other order the lease is gone");
    })
    .await;
}

#[tokio::test]
async fn our_own_lease_is_written_again_if_a_list_lacks_it() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let records = vec![stored(&key(2), "192.168.0.2")];
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        assert!(test.asked(1).await, "it must be written again");
    })
    .await;
}

#[tokio::test]
async fn an_error_of_the_store_ends_with_its_next_answer() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.store_changed(vec![Event::Unreachable("no answer".into())]).await;
        assert_eq!(test.node.store.error.as_deref(), Some("no answer"));
        test.node.store_changed(vec![Event::Renewed(Some(Duration::from_secs(60)))]).await;
        test.node.store_changed(vec![Event::NotRenewed("no leader".into())]).await;
        assert!(test.node.store.error.is_some(), "a renewal may be an old answer of another connection");
        test.node.store_changed(vec![Event::Answered]).await;
        assert_eq!(test.node.store.error, None);
    })
    .await;
}

#[tokio::test]
async fn rp_filter_stays_loosened_for_the_same_lease_while_it_is_planned() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let dev = Key::Link(Name::new("flannel.7").unwrap());
        test.kernel.fail(dev, Some(Outcome::Retry("EADDRINUSE".into())));
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(rate_limit::vxlan(&key(7), 7))])]).await;
        assert_eq!(test.node.sysctls.loosened_for, None, "a lease that is merely in the store is no reason");
        test.kernel.fail(dev, None);
        test.node.full_pass(Cause::Kernel).await;
        let id: Id = key(7).as_str().into();
        assert_eq!(test.node.sysctls.loosened_for.as_ref(), Some(&id));
        // Its entries wait for a retry. Meanwhile another such lease is programmed, which comes first in the order of keys.
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(rate_limit::vxlan(&key(6), 8))])]).await;
        test.kernel.disturb(dev, None, false);
        test.kernel.fail(dev, Some(Outcome::Retry("EADDRINUSE".into())));
        test.node.full_pass(Cause::Kernel).await;
        assert_eq!(test.node.sysctls.loosened_for.as_ref(), Some(&id), "the reason must stay the same");
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Removed(id)])]).await;
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(test.node.sysctls.loosened_for, Some(key(6).as_str().into()));
    })
    .await;
}

#[tokio::test]
async fn the_cost_of_writes_does_not_stretch_the_audit_interval_unless_the_kernel_refuses_them() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        let resync = Duration::from_millis(1);
        (test.node.context.options.resync, test.node.schedule.audit_interval) = (resync, resync);
        let peers = (0..6000).map(|n| stored(&format!("10.5.{}.{}-30", 10 + n / 64, n % 64 * 4), "192.168.0.2"));
        let records = [stored("10.5.1.0-24", "192.168.0.1")].into_iter().chain(peers).collect();
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        assert!(test.kernel.entries().len() > 1000, "{}", test.kernel.entries().len());
        assert_eq!(test.node.schedule.audit_interval, resync, "the first pass is not an audit");
        test.node.full_pass(Cause::Audit).await;
        assert!(test.node.schedule.audit_interval > resync, "an audit of so many entries must run less often");
        let refused = Key::Route("10.5.10.0/30".parse().unwrap(), 0);
        test.kernel.disturb(refused, None, false);
        test.kernel.fail(refused, Some(Outcome::Fatal("not permitted".into())));
        test.node.schedule.audit_interval = resync;
        test.node.full_pass(Cause::Audit).await;
        assert!(test.node.schedule.audit_interval > resync, "each audit tries that write again");
    })
    .await;
}

#[tokio::test]
async fn a_lease_in_the_store_wins_over_one_that_is_only_held() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        // The store was wiped. The old owner of 10.5.2.0/24 is held, and another node gets that subnet under a wider key.
        let records = vec![stored("10.5.1.0-24", "192.168.0.1")];
        test.node.store_changed(vec![Event::Snapshot { records, reset: true }]).await;
        assert_eq!(test.via("10.5.2.0/24"), "192.168.0.2".parse().ok(), "held");
        let mut younger = lease("10.5.2.0-23", "192.168.0.3");
        younger.age.stamp = 2;
        let record = Record { id: younger.id.clone(), lease: Ok(younger) };
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record)])]).await;
        assert_eq!(test.via("10.5.2.0/23"), "192.168.0.3".parse().ok());
        assert_eq!(test.via("10.5.2.0/24"), None, "the held peer must be removed");
    })
    .await;
}

/// The store may report both at once, in any order.
#[tokio::test]
async fn a_lease_in_the_store_wins_over_one_whose_removal_comes_with_it_and_is_held() {
    local(async {
        for is_removal_first in [true, false] {
            let mut test = TestNode::ready(OnLostLease::Hold).await;
            test.node.peers.hold.suspect(Instant::now().into_std());
            let mut younger = lease("10.5.2.0-23", "192.168.0.3");
            younger.age.stamp = 2;
            let record = Record { id: younger.id.clone(), lease: Ok(younger) };
            let mut changes = vec![removed("10.5.2.0-24"), RecordChange::Written(record)];
            if !is_removal_first {
                changes.reverse();
            }
            test.node.store_changed(vec![Event::Changes(changes)]).await;
            assert_eq!(test.via("10.5.2.0/23"), "192.168.0.3".parse().ok());
            assert_eq!((test.via("10.5.2.0/24"), test.node.peers.hold.len()), (None, 0), "the held peer is removed");
        }
    })
    .await;
}

#[tokio::test]
async fn a_peer_that_cannot_be_planned_does_not_lower_the_mtu() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let mtu = test.node.plan.mtu();
        let of_type = |data: Option<Box<str>>| {
            let mut peer = lease("10.5.3.0-24", "192.168.0.4");
            (peer.attrs.backend_type, peer.attrs.backend_data) = ("vxlan".into(), data);
            vec![Event::Changes(vec![RecordChange::Written(Record { id: peer.id.clone(), lease: Ok(peer) })])]
        };
        test.node.store_changed(of_type(None)).await;
        assert_eq!(test.node.plan.mtu(), mtu, "a vxlan lease without a MAC must not count");
        test.node.store_changed(of_type(Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:04"}"#.into()))).await;
        assert_eq!(test.node.plan.mtu(), mtu - 50, "a vxlan lease with a MAC must count");
        test.node.store_changed(of_type(None)).await;
        assert_eq!(test.node.plan.mtu(), mtu, "it must not count any more without its MAC");
    })
    .await;
}

/// A node that comes back has its old lease where the store assigns subnets, and a newer one elsewhere.
#[tokio::test]
async fn of_two_nodes_with_one_mac_the_older_one_is_reached_only_where_the_store_assigns_subnets() {
    local(async {
        for is_assigned in [true, false] {
            let own = vxlan_lease();
            let before = TestNode::of_vxlan(own.clone(), OnLostLease::Hold);
            before.store.is_assigned.set(is_assigned);
            let started = start_with(VXLAN, before.node.plan.host().clone(), own.clone());
            let mut test = before.again(started);
            let of_mac = |number: u8| {
                let mut peer = lease(&key(number.into()), &format!("192.168.0.{number}"));
                peer.attrs.backend_type = "vxlan".into();
                peer.attrs.backend_data = Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:77"}"#.into());
                peer.age.stamp = number.into();
                peer
            };
            let records = [own, of_mac(2), of_mac(3)].map(|lease| Record { id: lease.id.clone(), lease: Ok(lease) });
            test.node.start(vec![Event::Snapshot { records: records.to_vec(), reset: false }]).await;
            let is_reached = ["10.5.2.0/24", "10.5.3.0/24"].map(|net| test.via(net).is_some());
            assert_eq!(is_reached, [is_assigned, !is_assigned]);
        }
    })
    .await;
}
