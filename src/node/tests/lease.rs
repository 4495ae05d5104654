// SPDX-License-Identifier: Apache-2.0
//! Whose is the record under our key? And until when is it ours?

use std::time::{Duration, Instant};

use weft_subnet::lease::{Lease, Record};
use weft_subnet::source::Event;

use super::{Bench, lease, local};
use crate::node::Verdict;
use crate::options::OnLostLease;

const MAC: &str = r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}"#;
const OTHER: &str = r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:02"}"#;

/// Our key with this address and data.
fn own(ip: &str, data: &str) -> Lease {
    let mut own = lease("10.5.1.0-24", ip);
    (own.attrs.backend_type, own.attrs.backend_data) = ("vxlan".into(), Some(data.into()));
    own
}

fn put(lease: Lease) -> Vec<Event> {
    vec![Event::Changes(vec![Ok(Record { id: lease.id.clone(), lease: Ok(lease) })])]
}

/// A node that holds a lease with a VTEP MAC.
async fn holding() -> Bench {
    let mut bench = Bench::of_vxlan(own("192.168.0.1", MAC), OnLostLease::Hold);
    let records = vec![Record { id: "10.5.1.0-24".into(), lease: Ok(own("192.168.0.1", MAC)) }];
    bench.node.stored(vec![Event::Snapshot { records, reset: false }]).await;
    bench
}

#[tokio::test]
async fn a_lease_with_our_address_and_another_mac_is_another_nodes() {
    local(async {
        let mut bench = holding().await;
        *bench.store.taken.borrow_mut() = true;
        bench.node.stored(put(own("192.168.0.1", OTHER))).await;
        assert!(bench.asked(1).await, "the store decides");
        let [mac, _] = bench.node.plan.host().identities.public();
        assert_eq!(mac.unwrap().to_string(), "02:00:00:00:00:01", "the device does not follow");
        assert_eq!(bench.answer().await, Verdict::Stay);
        assert!(bench.node.lost.is_some());
        let (at, ttl) = bench.node.ttl.unwrap();
        assert!(at + ttl <= Instant::now(), "a start that finds the store away must not go on with it");
        bench.node.stored(put(own("192.168.0.1", OTHER))).await;
        assert!(bench.asked(1).await, "and is not asked again while it is another's");
    })
    .await;
}

#[tokio::test]
async fn a_lease_with_our_mac_is_ours_whatever_its_address_says() {
    local(async {
        let mut bench = holding().await;
        bench.node.stored(put(own("192.168.0.9", MAC))).await;
        assert!(bench.asked(1).await, "it is written again");
        bench.answer().await;
        assert!(bench.node.lost.is_none());
        assert_eq!(bench.node.plan.own().attrs.public_ip, "192.168.0.1".parse().ok());
    })
    .await;
}

/// Two agents with one subnet and one MAC write one record in turn.
#[tokio::test]
async fn a_lease_that_two_agents_write_in_turn_is_written_ever_more_rarely() {
    local(async {
        let mut bench = holding().await;
        let (begun, rival) = (Instant::now(), || put(own("192.168.0.9", MAC)));
        for _ in 0..60 {
            let before = bench.store.retakes.borrow().len();
            bench.node.stored(rival()).await;
            bench.node.tick().await;
            if bench.asked(before + 1).await {
                bench.answer().await;
                let ours = bench.node.plan.own().clone();
                bench.node.stored(put(ours)).await;
            }
        }
        // Half of the first pause is 2.5 s.
        let (writes, pauses) = (bench.store.retakes.borrow().len(), begun.elapsed().as_millis() / 2500);
        assert!((3..=3 + pauses).contains(&(writes as u128)), "{writes} writes");
        let status = crate::observe::report::status(&bench.node);
        let names = |text: &&String| text.starts_with("192.168.0.9 writes our lease of 10.5.1.0/24 again and again");
        assert!(!status.ready && status.problems.iter().any(|text| names(&text)), "{:?}", status.problems);
        assert!(bench.node.lost.is_none());
        // Neither is it written for another reason meanwhile.
        bench.kernel.set_machine(super::machine("192.168.0.3"));
        bench.node.full(crate::pass::Cause::Kernel).await;
        assert!(bench.asked(writes).await);
        let due = bench.node.next_wake().unwrap();
        assert!(due <= Instant::now() + Duration::from_secs(5), "the pause ends");
        bench.node.contend(due.max(Instant::now() + Duration::from_secs(5)));
        assert!(bench.asked(writes + 1).await, "then it is written");
        assert_eq!(bench.store.retakes.borrow().last().unwrap().public_ip, "192.168.0.3".parse().ok());
        bench.answer().await;
        bench.node.contend(Instant::now() + Duration::from_secs(600));
        assert!(
            !crate::observe::report::status(&bench.node).problems.iter().any(|text| names(&text)),
            "the other one is silent"
        );
        // Once our record is gone, nobody else holds it.
        for _ in 0..2 {
            bench.node.stored(rival()).await;
        }
        bench.node.stored(vec![Event::Changes(vec![Err("10.5.1.0-24".into())])]).await;
        assert!(bench.asked(writes + 2).await, "it is taken again at once");
    })
    .await;
}

#[tokio::test]
async fn nothing_is_saved_before_it_is_known_when_the_lease_ends() {
    local(async {
        let mut bench = holding().await;
        let kept = |seconds| vec![Event::Kept(Some(Duration::from_secs(seconds)))];
        assert_eq!(bench.node.next_saving(Instant::now()), None);
        bench.node.stored(kept(900)).await;
        let first = bench.node.saved_expiry.unwrap().unwrap();
        // Renewed early, because something touched the key: no news worth a file.
        bench.node.stored(kept(1000)).await;
        assert_eq!(bench.node.saved_expiry, Some(Some(first)));
        bench.node.stored(kept(1300)).await;
        assert!(bench.node.saved_expiry.unwrap().unwrap() > first);
        bench.node.stored(vec![Event::Kept(None)]).await;
        assert_eq!((bench.node.saved_expiry, bench.node.ttl), (Some(None), None), "made a reservation");
    })
    .await;
}

#[tokio::test]
async fn trouble_is_no_word_of_the_store() {
    local(async {
        let mut bench = holding().await;
        let before = bench.node.last_word;
        bench.node.stored(vec![Event::Trouble("no answer".into())]).await;
        assert_eq!(bench.node.last_word, before);
        bench.node.stored(vec![Event::Word]).await;
        assert!(bench.node.last_word > before);
    })
    .await;
}
