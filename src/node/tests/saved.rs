// SPDX-License-Identifier: Apache-2.0
//! When the node writes the file from which a start continues without the store.

use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;
use weft_subnet::lease::Record;
use weft_subnet::outside::wall_clock;
use weft_subnet::saved_peers::Expiry;
use weft_subnet::source::{Event, RecordChange};

use super::{CONFIG, TestNode, VXLAN, lease, local, machine, put, removed, stored, vxlan_lease};
use crate::options::{OnLostLease, RuleOptions};
use crate::pass::Cause;
use crate::plan::{ExtraBackend, ParsedConf};
use crate::saved::{SavedFile, Saver};

/// The file says when the store answered last, so it is written again from time to time. While the store is away that time stays the same.
#[tokio::test]
async fn the_file_is_not_written_again_while_the_store_is_away() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let dir = tempfile::tempdir().unwrap();
        let file = SavedFile::new(Some(dir.path()), Path::new("/run/x/subnet.env"), Some("etcd x".into())).unwrap();
        test.node.context.saver = Saver::new(Some(file));
        let now = Instant::now();
        test.node.lease_renewed(Some(Duration::from_secs(86_400)));
        test.node.save(now);
        let later = now + Duration::from_secs(7 * 3600);
        assert!(test.node.context.saver.is_old(later));
        test.node.store.error = Some("etcd is away".into());
        test.node.save(later);
        assert!(test.node.context.saver.is_old(later), "the file was written");
        test.node.store.error = None;
        test.node.save(later);
        // The write of a moment ago may still be running, then this one is postponed.
        assert!(!test.node.context.saver.is_old(later));
    })
    .await;
}

/// A start while the store is away would use the backend of the lease in the file, and the peers already use the one of the lease in the store.
#[tokio::test]
async fn a_lease_that_names_another_backend_is_saved_at_once() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let reader = test.saves();
        let saves = async |test: &mut TestNode, backend_type: &str| {
            // The next write would wait for half a minute.
            let deadline = Instant::now() + Duration::from_secs(25);
            while reader.read_head().is_none_or(|head| head.own.attrs.backend_type != backend_type) {
                assert!(Instant::now() < deadline, "no lease with {backend_type} is saved");
                test.node.tick().await;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        saves(&mut test, "host-gw").await;
        let vxlan = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#;
        test.node.store_changed(vec![Event::Config(vxlan.to_owned())]).await;
        test.node.tick().await;
        assert!(test.asked(1).await);
        test.answer().await;
        saves(&mut test, "vxlan").await;
    })
    .await;
}

/// The machine may be off when the lease ends. A start must then know when that was, and when the store was heard last: the time of the write
/// says neither.
#[tokio::test(start_paused = true)]
async fn the_file_says_when_the_lease_ends_and_when_the_store_was_heard() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let reader = test.saves();
        test.node.lease_renewed(Some(Duration::from_secs(3600)));
        tokio::time::advance(Duration::from_secs(600)).await;
        let before = wall_clock().as_secs();
        test.node.save(Instant::now());
        let head = async {
            loop {
                if let Some(head) = reader.read_head() {
                    return head;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let head = tokio::time::timeout(Duration::from_secs(60), head).await.expect("the file");
        let after = wall_clock().as_secs();
        let Expiry::At(end) = head.expires else { panic!("{:?}", head.expires) };
        assert!((before + 2999..=after + 3001).contains(&end), "{end} is not 50 minutes after {before}");
        assert!((before - 601..=after - 599).contains(&head.saved), "{} is not 10 minutes before {before}", head.saved);
    })
    .await;
}

/// A start without the store must know it, although nothing is written to the kernel for such a peer.
#[tokio::test]
async fn a_peer_without_entries_is_saved() {
    local(async {
        let conf = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"alloc"}}"#;
        let of_alloc = |key: &str, ip: &str| {
            let mut lease = lease(key, ip);
            lease.attrs.backend_type = String::new();
            Record { id: lease.id.clone(), lease: Ok(lease) }
        };
        let own = of_alloc("10.5.1.0-24", "192.168.0.1");
        let start = (conf, own.lease.clone().unwrap());
        let mut test = TestNode::of(start, OnLostLease::Hold, RuleOptions::default());
        let reader = test.saves();
        test.node.start(vec![Event::Snapshot { records: vec![own], reset: false }]).await;
        save_all(&mut test).await;
        let is_saved =
            |peers: usize| reader.read().is_ok_and(|saved| saved.is_some_and(|saved| saved.peers.len() == peers));
        until(|| is_saved(0)).await;
        let added = RecordChange::Written(of_alloc("10.5.2.0-24", "192.168.0.2"));
        test.node.store_changed(vec![Event::Changes(vec![added])]).await;
        assert!(test.node.next_saving(Instant::now()).is_some(), "the peer is to be saved");
        save_all(&mut test).await;
        until(|| is_saved(1)).await;
    })
    .await;
}

/// Waits until this holds.
pub(super) async fn until(holds: impl Fn() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Saves until nothing is left to save.
pub(super) async fn save_all(test: &mut TestNode) {
    while let Some(due) = test.node.next_saving(Instant::now()) {
        test.node.save(due);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Both change the peers without an event of the store.
#[tokio::test]
async fn changes_that_were_delayed_and_removals_that_were_held_are_saved() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let _file = test.saves();
        for number in 0..100 {
            let change = put("10.5.2.0-24", ["192.168.0.2", "192.168.0.3"][number % 2]);
            test.node.store_changed(vec![Event::Changes(vec![change])]).await;
        }
        save_all(&mut test).await;
        let now = Instant::now();
        let later = now + Duration::from_secs(3600);
        assert!(test.node.peers.rate_limit.next(now).is_some(), "the last change waits");
        test.node.apply_delayed(later).await;
        assert!(test.node.next_saving(later).is_some(), "the lease has another address now");
        save_all(&mut test).await;

        test.node.peers.hold.suspect(Instant::now().into_std());
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.2.0-24")])]).await;
        save_all(&mut test).await;
        assert_eq!(test.node.peers.hold.len(), 1);
        test.node.remove_held_peers(later).await;
        assert!(test.node.next_saving(later).is_some(), "the peer is gone");
    })
    .await;
}

/// The file says when the store was heard. A node that started without the store would make the leases of an earlier run look like new ones.
#[tokio::test]
async fn nothing_is_saved_before_the_store_has_sent_its_leases() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        let _file = test.saves();
        test.node.start(Vec::new()).await;
        test.kernel.set_machine(machine("192.168.0.3"));
        test.node.full_pass(Cause::Kernel).await;
        test.node.save_now();
        assert_eq!(test.node.next_saving(Instant::now()), None);
        let records = vec![stored("10.5.1.0-24", "192.168.0.1"), stored("10.5.2.0-24", "192.168.0.2")];
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        assert!(test.node.next_saving(Instant::now()).is_some());
    })
    .await;
}

/// A start without the store goes on with them, and refuses what was saved by a node with other addresses.
#[tokio::test]
async fn the_file_has_the_net_confs_and_the_addresses_of_this_node() {
    local(async {
        let mut own = vxlan_lease();
        own.attrs = own.attrs.with_other_ways(&[lease("10.5.1.0-24", "192.168.0.1").attrs]);
        let chosen = [Some([203, 0, 113, 7].into()), None];
        let start = (VXLAN, own.clone());
        let mut test = TestNode::altered(start, OnLostLease::Hold, RuleOptions::default(), |started| {
            started.earlier = vec![ExtraBackend::new(ParsedConf::parse(CONFIG).unwrap(), started.host.clone())];
            started.chosen = chosen;
        });
        let reader = test.saves();
        // The peer needs the earlier backend.
        let records = vec![Record { id: own.id.clone(), lease: Ok(own.clone()) }, stored("10.5.2.0-24", "192.168.0.2")];
        test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
        save_all(&mut test).await;
        until(|| reader.read_head().is_some()).await;
        let head = reader.read_head().unwrap();
        assert_eq!((head.own, head.config.as_str(), head.earlier), (own, VXLAN, vec![CONFIG.to_owned()]));
        assert_eq!((head.public, head.chosen), ((Some([192, 168, 0, 1].into()), None), chosen));
    })
    .await;
}

/// The next start looks for the uplink that was in use. With a published address of the flags, the lease does not say which one that was.
#[tokio::test]
async fn another_address_of_the_uplink_is_saved_although_the_lease_stays_the_same() {
    local(async {
        let mut own = vxlan_lease();
        own.attrs.public_ip = Some([203, 0, 113, 9].into());
        let public = own.attrs.public_ip;
        let start = (VXLAN, own.clone());
        let mut test = TestNode::altered(start, OnLostLease::Hold, RuleOptions::default(), |started| {
            started.host.public_v4 = public;
        });
        test.node.context.options.uplink.public_ip = public;
        let _file = test.saves();
        let records = vec![Record { id: own.id.clone(), lease: Ok(own) }];
        test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
        save_all(&mut test).await;
        test.kernel.set_machine(machine("192.168.0.3"));
        test.node.full_pass(Cause::Kernel).await;
        assert_eq!(test.node.plan.host().uplink.v4, Some([192, 168, 0, 3].into()));
        assert!(test.asked(0).await, "the lease names the address of the flags");
        assert!(test.node.next_saving(Instant::now()).is_some());
    })
    .await;
}
