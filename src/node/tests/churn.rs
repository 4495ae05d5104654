// SPDX-License-Identifier: Apache-2.0
//! Leases that change all the time: how often everything is looked at for them, and whether honest leases wait.

use std::time::{Duration, Instant};

use weft_backends::state::{Key, Name};
use weft_subnet::lease::{Id, Record};
use weft_subnet::source::Event;

use super::{Bench, lease, local, put};
use crate::kernel::{Notice, Outcome};
use crate::node::churn::Churn;
use crate::options::OnLostLease;

/// A lease of a vxlan node: in a host-gw network it brings a device of its own.
pub(super) fn vxlan(key: &str, vni: u32) -> Record {
    let mut lease = lease(key, "192.168.0.77");
    lease.attrs.backend_type = "vxlan".into();
    let third = lease.subnets.v4.unwrap().addr().octets()[2];
    lease.attrs.backend_data = Some(format!(r#"{{"VNI":{vni},"VtepMAC":"02:00:00:00:77:{third:02x}"}}"#).into());
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

async fn tell(bench: &mut Bench, change: Result<Record, Id>) {
    bench.node.stored(vec![Event::Changes(vec![change])]).await;
}

/// An honest lease changes, and its route is there at once.
async fn honest(bench: &mut Bench, n: usize) {
    let (third, last) = (2 + n % 20, 100 + n % 100);
    tell(bench, put(&format!("10.5.{third}.0-24"), &format!("192.168.0.{last}"))).await;
    let net = format!("10.5.{third}.0/24");
    assert_eq!(bench.via(&net), format!("192.168.0.{last}").parse().ok(), "change {n}");
}

#[tokio::test]
async fn a_lease_of_ever_another_vni_costs_a_few_looks_and_nobody_waits_for_it() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let before = bench.kernel.observations();
        for n in 0..500 {
            tell(&mut bench, Ok(vxlan("10.5.77.0-24", 1000 + n as u32))).await;
            honest(&mut bench, n).await;
        }
        let looks = bench.kernel.observations() - before;
        assert!(looks <= 30, "{looks} looks at everything");
        // A lease that is gone waits for nothing.
        tell(&mut bench, Err("10.5.77.0-24".into())).await;
        assert_eq!(bench.node.churn.next(Instant::now()), None);
        assert_eq!(bench.node.plan.devices().count(), 0);
    })
    .await;
}

#[tokio::test]
async fn many_leases_of_ever_another_vni_share_one_allowance() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let before = bench.kernel.observations();
        // None of them for itself changes too often.
        for n in 0..15 * 9 {
            let key = format!("10.5.{}.0-24", 50 + n % 15);
            tell(&mut bench, Ok(vxlan(&key, 1000 + n as u32))).await;
            honest(&mut bench, n).await;
        }
        let looks = bench.kernel.observations() - before;
        assert!(looks <= 60, "{looks} looks at everything");
        // A device that had to wait is made when its time has come.
        tell(&mut bench, Ok(vxlan("10.5.99.0-24", 7))).await;
        let due = bench.node.churn.look_due().expect("the look waits");
        bench.node.let_in(due).await;
        assert!(bench.kernel.entries().contains_key(&Key::Link(Name::new("flannel.7").unwrap())));
        assert_eq!(bench.node.churn.look_due(), None);
    })
    .await;
}

#[tokio::test]
async fn a_cluster_that_changes_its_vni_once_is_followed_at_once() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        for vni in [1, 2] {
            for third in 10..250 {
                tell(&mut bench, Ok(vxlan(&format!("10.5.{third}.0-24"), vni))).await;
            }
            assert_eq!(bench.node.churn.next(Instant::now()), None, "nothing waits");
            assert!(bench.kernel.entries().contains_key(&Key::Link(Name::new(&format!("flannel.{vni}")).unwrap())));
            assert!(bench.via("10.5.249.0/24").is_some());
        }
    })
    .await;
}

/// Of somebody who has used up what looks at everything may cost.
async fn out_of_looks() -> Bench {
    let mut bench = Bench::ready(OnLostLease::Hold).await;
    tell(&mut bench, Ok(vxlan("10.5.50.0-24", 5))).await;
    let now = Instant::now();
    bench.node.churn.looked(Duration::from_secs(1000), now);
    assert!(!bench.node.churn.may_look(now));
    bench
}

/// Lets everything be tried again that failed, as often as it takes until `done`.
async fn retry(bench: &mut Bench, done: impl Fn(&Bench) -> bool) {
    for _ in 0..10 {
        let due = bench.node.passer.next_retry().expect("something is to be tried again");
        tokio::time::sleep_until(due.into()).await;
        bench.node.tick().await;
        if done(bench) {
            return;
        }
    }
    panic!("it is not tried again");
}

#[tokio::test]
async fn a_peers_device_that_fails_is_tried_again_within_the_allowance() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let dev = Name::new("flannel.7").unwrap();
        bench.kernel.fail(Key::Link(dev), Some(Outcome::Retry("not now".into())));
        tell(&mut bench, Ok(vxlan("10.5.77.0-24", 7))).await;
        let (now, looks) = (Instant::now(), bench.kernel.observations());
        // All but one look at everything are used up.
        bench.node.churn = Churn::new(now);
        (0..19).for_each(|_| bench.node.churn.looked(Duration::ZERO, now));
        retry(&mut bench, |bench| bench.kernel.observations() == looks + 1).await;
        assert!(!bench.node.churn.may_look(now), "the look was paid for");
        bench.node.churn.looked(Duration::from_secs(1000), now);
        retry(&mut bench, |bench| bench.node.churn.look_due().is_some()).await;
        assert_eq!(bench.kernel.observations(), looks + 1, "no more looks than are allowed");
        // Our own device and what stands elsewhere wait for nothing; this one comes when its time has come.
        honest(&mut bench, 1).await;
        bench.kernel.fail(Key::Link(dev), None);
        let due = bench.node.churn.look_due().expect("the look waits");
        bench.node.let_in(due).await;
        assert!(bench.kernel.entries().contains_key(&Key::Link(dev)));
    })
    .await;
}

#[tokio::test]
async fn a_peer_that_goes_leaves_no_routes_though_its_device_waits_for_its_removal() {
    local(async {
        let mut bench = out_of_looks().await;
        assert!(bench.via("10.5.50.0/24").is_some());
        tell(&mut bench, Err("10.5.50.0-24".into())).await;
        assert_eq!(bench.via("10.5.50.0/24"), None);
        assert!(bench.node.churn.look_due().is_some(), "the device goes later");
    })
    .await;
}

#[tokio::test]
async fn nothing_is_written_onto_a_device_that_waits() {
    local(async {
        let mut bench = out_of_looks().await;
        tell(&mut bench, Ok(vxlan("10.5.99.0-24", 7))).await;
        bench.kernel.take_ops();
        // The kernel tells that the route is not there.
        let key = Key::Route("10.5.99.0/24".parse().unwrap(), 0);
        bench.node.noticed(vec![Notice::Entry(key, None)]).await;
        assert_eq!(bench.kernel.take_ops(), [], "news of the kernel");
        // It was refused before the device had to wait.
        tell(&mut bench, Ok(vxlan("10.5.98.0-24", 5))).await;
        let old = Key::Route("10.5.98.0/24".parse().unwrap(), 0);
        bench.kernel.fail(old, Some(Outcome::Retry("not now".into())));
        bench.kernel.disturb(old, None, false);
        bench.node.noticed(vec![Notice::Entry(old, None)]).await;
        bench.node.churn.want_look([Name::new("flannel.5").unwrap()]);
        bench.kernel.take_ops();
        let tried = |bench: &Bench| bench.node.passer.pending().version();
        let before = tried(&bench);
        for _ in 0..3 {
            let due = bench.node.passer.next_retry().expect("something is to be tried again");
            tokio::time::sleep_until(due.into()).await;
            bench.node.tick().await;
        }
        assert_eq!(tried(&bench), before);
        assert_eq!(bench.kernel.take_ops(), [], "what is tried again");
    })
    .await;
}
