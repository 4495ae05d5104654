// SPDX-License-Identifier: Apache-2.0
//! Leases that change all the time: how many full passes they cause, and whether other leases wait.

use std::time::Duration;

use tokio::time::Instant;
use weft_backends::state::{Key, Name};
use weft_subnet::lease::Record;
use weft_subnet::source::{Event, RecordChange};

use super::{TestNode, lease, local, put, removed};
use crate::kernel::{Notice, Outcome};
use crate::node::rate_limit::RateLimit;
use crate::options::OnLostLease;

/// A lease of a vxlan node. In a host-gw network, it needs a device of its own.
pub(super) fn vxlan(key: &str, vni: u32) -> Record {
    let mut lease = lease(key, "192.168.0.77");
    lease.attrs.backend_type = "vxlan".into();
    let third = lease.subnets.v4.unwrap().addr().octets()[2];
    lease.attrs.backend_data = Some(format!(r#"{{"VNI":{vni},"VtepMAC":"02:00:00:00:77:{third:02x}"}}"#).into());
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

async fn apply(test: &mut TestNode, change: RecordChange) {
    test.node.store_changed(vec![Event::Changes(vec![change])]).await;
}

/// Changes another lease, whose route must be written at once.
async fn change_another(test: &mut TestNode, n: usize) {
    let (third, last) = (2 + n % 20, 100 + n % 100);
    apply(test, put(&format!("10.5.{third}.0-24"), &format!("192.168.0.{last}"))).await;
    let net = format!("10.5.{third}.0/24");
    assert_eq!(test.via(&net), format!("192.168.0.{last}").parse().ok(), "change {n}");
}

#[tokio::test]
async fn a_lease_that_changes_its_vni_all_the_time_costs_few_full_passes_and_delays_no_other() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let before = test.kernel.observations();
        for n in 0..500 {
            apply(&mut test, RecordChange::Written(vxlan("10.5.77.0-24", 1000 + n as u32))).await;
            change_another(&mut test, n).await;
        }
        let passes = test.kernel.observations() - before;
        assert!(passes <= 30, "{passes} full passes");
        // Nothing waits for a lease that is gone.
        apply(&mut test, removed("10.5.77.0-24")).await;
        assert_eq!(test.node.peers.rate_limit.next(Instant::now()), None);
        assert_eq!(test.node.plan.devices().count(), 0);
    })
    .await;
}

#[tokio::test]
async fn leases_that_change_their_vni_share_one_allowance_of_full_passes() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let before = test.kernel.observations();
        // None of these leases alone changes too often.
        for n in 0..15 * 9 {
            let key = format!("10.5.{}.0-24", 50 + n % 15);
            apply(&mut test, RecordChange::Written(vxlan(&key, 1000 + n as u32))).await;
            change_another(&mut test, n).await;
        }
        let passes = test.kernel.observations() - before;
        assert!(passes <= 60, "{passes} full passes");
        // A device that had to wait is made when a full pass is allowed again.
        apply(&mut test, RecordChange::Written(vxlan("10.5.99.0-24", 7))).await;
        let due = test.node.peers.rate_limit.full_pass_due().expect("a full pass must be due");
        assert!(test.node.next_wake() <= Some(due), "the node wakes up for it");
        test.node.apply_delayed(due).await;
        assert!(test.kernel.entries().contains_key(&Key::Link(Name::new("flannel.7").unwrap())));
        assert_eq!(test.node.peers.rate_limit.full_pass_due(), None);
    })
    .await;
}

#[tokio::test]
async fn a_single_change_of_vni_of_all_leases_is_applied_at_once() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        for vni in [1, 2] {
            for third in 10..250 {
                apply(&mut test, RecordChange::Written(vxlan(&format!("10.5.{third}.0-24"), vni))).await;
            }
            assert_eq!(test.node.peers.rate_limit.next(Instant::now()), None, "nothing waits");
            assert!(test.kernel.entries().contains_key(&Key::Link(Name::new(&format!("flannel.{vni}")).unwrap())));
            assert!(test.via("10.5.249.0/24").is_some());
        }
    })
    .await;
}

/// A node whose allowance of full passes is used up.
async fn without_allowance() -> TestNode {
    let mut test = TestNode::ready(OnLostLease::Hold).await;
    apply(&mut test, RecordChange::Written(vxlan("10.5.50.0-24", 5))).await;
    let now = Instant::now();
    test.node.peers.rate_limit.full_pass_ended(Duration::from_secs(1000), now);
    assert!(!test.node.peers.rate_limit.allows_full_pass(now));
    test
}

/// Waits for retries until `done`, at most ten.
async fn retry(test: &mut TestNode, done: impl Fn(&TestNode) -> bool) {
    for _ in 0..10 {
        let due = test.node.passer.next_retry().expect("a retry must be due");
        tokio::time::sleep_until(due).await;
        test.node.tick().await;
        if done(test) {
            return;
        }
    }
    panic!("there was no retry");
}

#[tokio::test]
async fn retries_of_a_peers_device_count_towards_the_allowance() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let dev = Name::new("flannel.7").unwrap();
        test.kernel.fail(Key::Link(dev), Some(Outcome::Retry("not now".into())));
        apply(&mut test, RecordChange::Written(vxlan("10.5.77.0-24", 7))).await;
        let (now, passes) = (Instant::now(), test.kernel.observations());
        // One full pass is left of the allowance.
        test.node.peers.rate_limit = RateLimit::new(now);
        (0..19).for_each(|_| test.node.peers.rate_limit.full_pass_ended(Duration::ZERO, now));
        retry(&mut test, |test| test.kernel.observations() == passes + 1).await;
        assert!(!test.node.peers.rate_limit.allows_full_pass(now), "the full pass must be charged");
        test.node.peers.rate_limit.full_pass_ended(Duration::from_secs(1000), now);
        retry(&mut test, |test| test.node.peers.rate_limit.full_pass_due().is_some()).await;
        assert_eq!(test.kernel.observations(), passes + 1, "no further full pass is allowed");
        // Entries on other devices do not wait, and this device is made when a full pass is allowed again.
        change_another(&mut test, 1).await;
        test.kernel.fail(Key::Link(dev), None);
        let due = test.node.peers.rate_limit.full_pass_due().expect("a full pass must be due");
        test.node.apply_delayed(due).await;
        assert!(test.kernel.entries().contains_key(&Key::Link(dev)));
    })
    .await;
}

#[tokio::test]
async fn the_routes_of_a_removed_peer_go_at_once_though_its_device_is_removed_later() {
    local(async {
        let mut test = without_allowance().await;
        assert!(test.via("10.5.50.0/24").is_some());
        apply(&mut test, removed("10.5.50.0-24")).await;
        assert_eq!(test.via("10.5.50.0/24"), None);
        assert!(test.node.peers.rate_limit.full_pass_due().is_some(), "the device must be removed later");
    })
    .await;
}

#[tokio::test]
async fn no_entry_is_written_on_a_delayed_device() {
    local(async {
        let mut test = without_allowance().await;
        apply(&mut test, RecordChange::Written(vxlan("10.5.99.0-24", 7))).await;
        test.kernel.take_ops();
        // The kernel announces that the route does not exist.
        let key = Key::Route("10.5.99.0/24".parse().unwrap(), 0);
        test.node.kernel_changed(vec![Notice::Entry(key, None)]).await;
        assert_eq!(test.kernel.take_ops(), [], "no write because of the notification");
        // The kernel refused this route before its device had to wait.
        apply(&mut test, RecordChange::Written(vxlan("10.5.98.0-24", 5))).await;
        let old = Key::Route("10.5.98.0/24".parse().unwrap(), 0);
        test.kernel.fail(old, Some(Outcome::Retry("not now".into())));
        test.kernel.disturb(old, None, false);
        test.node.kernel_changed(vec![Notice::Entry(old, None)]).await;
        test.node.peers.rate_limit.request_full_pass([Name::new("flannel.5").unwrap()]);
        test.kernel.take_ops();
        let tried = |test: &TestNode| test.node.passer.pending().version();
        let before = tried(&test);
        for _ in 0..3 {
            let due = test.node.passer.next_retry().expect("a retry must be due");
            tokio::time::sleep_until(due).await;
            test.node.tick().await;
        }
        assert_eq!(tried(&test), before);
        assert_eq!(test.kernel.take_ops(), [], "no write because of the retry");
    })
    .await;
}
