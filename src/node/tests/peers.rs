// SPDX-License-Identifier: Apache-2.0
//! What becomes of leases that come, go, and are held, and what the node says meanwhile.

use std::sync::Arc;

use std::time::{Duration, Instant};

use weft_backends::link::{Foreign, Link};
use weft_backends::state::{Key, Name, Value};
use weft_subnet::hold::Hold;
use weft_subnet::lease::{Id, Record};
use weft_subnet::source::Event;

use super::{Bench, churn, local, put};
use crate::kernel::Outcome;
use crate::options::OnLostLease;
use crate::pass::Cause;

fn key(third: usize) -> String {
    format!("10.5.{third}.0-24")
}

/// A list with our own lease and these peers.
fn list(peers: impl Iterator<Item = usize>) -> Vec<Event> {
    let own: Result<Record, Id> = put("10.5.1.0-24", "192.168.0.1");
    let peers = peers.map(|n| put(&key(n), &format!("192.168.0.{n}")));
    vec![Event::Snapshot { records: [own].into_iter().chain(peers).map(Result::unwrap).collect(), reset: false }]
}

/// A node with the peers 2 to 21.
async fn twenty() -> Bench {
    let mut bench = Bench::new(OnLostLease::Hold);
    bench.node.begin(list(2..22)).await;
    assert!(bench.via("10.5.21.0/24").is_some());
    bench
}

#[tokio::test]
async fn held_removals_are_carried_out_when_the_grace_time_is_over() {
    local(async {
        let mut bench = twenty().await;
        bench.node.hold = Hold::new(Duration::from_millis(1));
        bench.node.stored(list(0..0)).await;
        let due = bench.node.hold.next().expect("so many at once are held");
        assert!(bench.via("10.5.9.0/24").is_some());
        let looks = bench.kernel.observations();
        tokio::time::sleep_until(due.into()).await;
        while bench.node.hold.next().is_some() {
            bench.node.tick().await;
        }
        assert_eq!((bench.via("10.5.9.0/24"), bench.kernel.observations()), (None, looks), "no audit is needed");
    })
    .await;
}

/// This lease has changed so often that its next record waits.
fn indebt(bench: &mut Bench, third: usize) {
    let link = Link { kind: Arc::new(Foreign), mtu: 1450, mac: None, up: true };
    let change = (Key::Link(Name::new("flannel.9").unwrap()), None, Some(Value::link(link)));
    for _ in 0..12 {
        bench.node.churn.charge(&key(third).as_str().into(), std::slice::from_ref(&change), Instant::now());
    }
}

#[tokio::test]
async fn a_record_that_waits_goes_with_its_lease() {
    local(async {
        let mut bench = twenty().await;
        for gone in [list(2..9), vec![Event::Changes(vec![Err(key(9).as_str().into())])]] {
            indebt(&mut bench, 9);
            bench.node.stored(vec![Event::Changes(vec![put(&key(9), "192.168.0.99")])]).await;
            assert!(bench.node.churn.next(Instant::now()).is_some(), "it waits");
            bench.node.stored(gone).await;
            assert_eq!(bench.node.churn.next(Instant::now()), None, "it must not come back when its time has come");
        }
    })
    .await;
}

#[tokio::test]
async fn the_first_list_ends_the_use_of_saved_peers() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        bench.node.resumed = Some("the store is away: peers are those that were saved".into());
        bench.node.stored(vec![Event::Word]).await;
        assert!(bench.node.resumed.is_some(), "a word is no list");
        bench.node.stored(list(2..4)).await;
        assert_eq!(bench.node.resumed, None);
    })
    .await;
}

#[tokio::test]
async fn a_held_lease_that_comes_back_too_often_is_kept_all_the_same() {
    local(async {
        let mut bench = twenty().await;
        bench.node.stored(list(0..0)).await;
        let held = bench.node.hold.len();
        indebt(&mut bench, 9);
        bench.node.stored(vec![Event::Changes(vec![put(&key(9), "192.168.0.99")])]).await;
        assert_eq!(bench.via("10.5.9.0/24"), "192.168.0.9".parse().ok(), "its newest record waits");
        assert_eq!(bench.node.hold.len(), held - 1, "but it is there, so nothing removes it later");
    })
    .await;
}

#[tokio::test]
async fn a_lease_that_is_deleted_and_written_again_at_once_is_there() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let (gone, back) = (Err(key(2).as_str().into()), put(&key(2), "192.168.0.22"));
        bench.node.stored(vec![Event::Changes(vec![gone, back])]).await;
        assert_eq!(bench.via("10.5.2.0/24"), "192.168.0.22".parse().ok());
        let (gone, back) = (Err(key(2).as_str().into()), put(&key(2), "192.168.0.2"));
        bench.node.stored(vec![Event::Changes(vec![back, gone])]).await;
        assert_eq!(bench.via("10.5.2.0/24"), None, "in the other order it is gone");
    })
    .await;
}

#[tokio::test]
async fn a_list_without_our_own_lease_is_a_lost_lease() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let records = vec![put(&key(2), "192.168.0.2").unwrap()];
        bench.node.stored(vec![Event::Snapshot { records, reset: false }]).await;
        assert!(bench.asked(1).await, "it is taken again");
    })
    .await;
}

#[tokio::test]
async fn trouble_of_the_store_ends_with_its_next_word() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        bench.node.stored(vec![Event::Trouble("no answer".into())]).await;
        assert_eq!(bench.node.store_trouble.as_deref(), Some("no answer"));
        bench.node.stored(vec![Event::Kept(Some(Duration::from_secs(60)))]).await;
        assert!(bench.node.store_trouble.is_some(), "an old answer of another connection");
        bench.node.stored(vec![Event::Word]).await;
        assert_eq!(bench.node.store_trouble, None);
    })
    .await;
}

#[tokio::test]
async fn subnet_env_of_an_earlier_run_stays_until_the_peers_are_known() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        // With a vxlan peer the MTU was smaller.
        let then = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n";
        std::fs::write(&bench.file, then).unwrap();
        bench.node.begin(vec![]).await;
        assert_eq!(std::fs::read_to_string(&bench.file).unwrap(), then);
        bench.node.stored(list(2..4)).await;
        assert_eq!(std::fs::read_to_string(&bench.file).unwrap(), then.replace("1450", "1500"));
        // Another subnet than ours is never left.
        std::fs::write(&bench.file, then.replace("10.5.1.1", "10.5.8.1")).unwrap();
        bench.node.next_sysctls = Instant::now();
        bench.node.tick().await;
        assert_eq!(std::fs::read_to_string(&bench.file).unwrap(), then.replace("1450", "1500"), "by the clock");
    })
    .await;
}

#[tokio::test]
async fn filters_are_loosened_for_a_lease_whose_entries_are_in_the_kernel_and_stay_so() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let dev = Key::Link(Name::new("flannel.7").unwrap());
        bench.kernel.fail(dev, Some(Outcome::Retry("EADDRINUSE".into())));
        bench.node.stored(vec![Event::Changes(vec![Ok(churn::vxlan(&key(7), 7))])]).await;
        assert_eq!(bench.node.loosened_by, None, "it is merely in the store");
        bench.kernel.fail(dev, None);
        bench.node.full(Cause::Kernel).await;
        let id: Id = key(7).as_str().into();
        assert_eq!(bench.node.loosened_by.as_ref(), Some(&id));
        // Its entries wait for a retry, and another such lease, which comes first in the order of keys, is programmed.
        bench.node.stored(vec![Event::Changes(vec![Ok(churn::vxlan(&key(6), 8))])]).await;
        bench.kernel.disturb(dev, None, false);
        bench.kernel.fail(dev, Some(Outcome::Retry("EADDRINUSE".into())));
        bench.node.full(Cause::Kernel).await;
        assert_eq!(bench.node.loosened_by.as_ref(), Some(&id), "the lease that is named does not change");
        bench.node.stored(vec![Event::Changes(vec![Err(id)])]).await;
        bench.node.full(Cause::Audit).await;
        assert_eq!(bench.node.loosened_by, Some(key(6).as_str().into()));
    })
    .await;
}

#[tokio::test]
async fn what_a_pass_writes_is_no_cost_of_an_audit() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        let resync = Duration::from_millis(1);
        (bench.node.world.options.resync, bench.node.audit_interval) = (resync, resync);
        let peers = (0..6000).map(|n| put(&format!("10.5.{}.{}-30", 10 + n / 64, n % 64 * 4), "192.168.0.2"));
        let records = [put("10.5.1.0-24", "192.168.0.1")].into_iter().chain(peers).map(Result::unwrap).collect();
        bench.node.stored(vec![Event::Snapshot { records, reset: false }]).await;
        assert!(bench.kernel.entries().len() > 1000, "{}", bench.kernel.entries().len());
        assert_eq!(bench.node.audit_interval, resync, "a start is no audit");
        bench.node.full(Cause::Audit).await;
        assert!(bench.node.audit_interval > resync, "a look at so much is put off");
    })
    .await;
}
