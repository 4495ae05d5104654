// SPDX-License-Identifier: Apache-2.0
//! To whom the record under our key belongs, and until when the own lease is ours.

use std::time::Duration;

use tokio::time::Instant;
use weft_backends::state::{Key, Name};
use weft_subnet::lease::{Lease, Record};
use weft_subnet::source::{Event, RecordChange};

use super::saved::save_all;
use super::tick::wake_ups;
use super::{TestNode, lease, local, machine, put, removed};
use crate::kernel::{AddrInfo, LinkInfo};
use crate::lease::tasks::LeaseAnswer;
use crate::node::NextStep;
use crate::node::own_lease::SavedEnd;
use crate::observe::problem::{Problem, ProblemKind};
use crate::options::OnLostLease;
use crate::pass::Cause;

const MAC: &str = r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}"#;
const OTHER: &str = r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:02"}"#;

/// A lease under our key with this address and this BackendData.
fn own(ip: &str, data: &str) -> Lease {
    let mut own = lease("10.5.1.0-24", ip);
    (own.attrs.backend_type, own.attrs.backend_data) = ("vxlan".into(), Some(data.into()));
    own
}

fn written(lease: Lease) -> Vec<Event> {
    vec![Event::Changes(vec![RecordChange::Written(Record { id: lease.id.clone(), lease: Ok(lease) })])]
}

/// A node that holds a lease with a VTEP MAC.
async fn holding() -> TestNode {
    let mut test = TestNode::of_vxlan(own("192.168.0.1", MAC), OnLostLease::Hold);
    let records = vec![Record { id: "10.5.1.0-24".into(), lease: Ok(own("192.168.0.1", MAC)) }];
    test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
    test
}

#[tokio::test]
async fn a_lease_with_our_address_and_another_mac_belongs_to_another_node() {
    local(async {
        let mut test = holding().await;
        *test.store.taken.borrow_mut() = true;
        test.node.store_changed(written(own("192.168.0.1", OTHER))).await;
        assert!(test.asked(1).await, "the store must be asked");
        let [mac, _] = test.node.plan.host().identities.public();
        assert_eq!(mac.unwrap().to_string(), "02:00:00:00:00:01", "the device must keep its MAC");
        assert_eq!(test.answer().await, NextStep::Continue);
        assert!(test.node.own_lease.lost.is_some());
        let (at, ttl) = test.node.own_lease.ttl.unwrap();
        assert!(at + ttl <= Instant::now(), "a start without the store must not use the lease");
        test.node.store_changed(written(own("192.168.0.1", OTHER))).await;
        assert!(test.asked(1).await, "the store must not be asked again while the lease is lost");
        test.kernel.set_machine(machine("192.168.0.3"));
        test.node.full_pass(Cause::Kernel).await;
        assert!(test.asked(1).await, "another address of this node is no reason either");
    })
    .await;
}

/// A key of WireGuard cannot be compared with our MAC, so the subnet and the address say that this is our lease. Whoever may write our key must
/// not choose the MAC of our device in this way.
#[tokio::test]
async fn what_looks_like_a_mac_in_a_lease_of_another_type_does_not_change_ours() {
    local(async {
        let mut test = holding().await;
        let data = r#"{"PublicKey":"B6N8vBQgk8i3VdwbEOhstCY3StFqqFPtC9/AsrhtHHw=","VtepMAC":"02:00:00:00:00:02"}"#;
        let mut other = own("192.168.0.1", data);
        other.attrs.backend_type = "wireguard".into();
        test.node.store_changed(written(other)).await;
        assert!(test.asked(1).await, "our value must be written again");
        let [mac, _] = test.node.plan.host().identities.public();
        assert_eq!(mac.unwrap().to_string(), "02:00:00:00:00:01", "the device must keep its MAC");
    })
    .await;
}

#[tokio::test]
async fn a_lease_with_our_mac_and_another_address_is_ours() {
    local(async {
        let mut test = holding().await;
        test.node.store_changed(written(own("192.168.0.9", MAC))).await;
        assert!(test.asked(1).await, "it must be written again");
        test.answer().await;
        assert!(test.node.own_lease.lost.is_none());
        assert_eq!(test.node.plan.own().attrs.public_ip, "192.168.0.1".parse().ok());
    })
    .await;
}

/// What the other one of two agents with one subnet and one MAC writes.
fn rival() -> Vec<Event> {
    written(own("192.168.0.9", MAC))
}

/// The store lets the node write, and reports this write.
async fn write_accepted(test: &mut TestNode) {
    test.answer().await;
    let ours = test.node.plan.own().clone();
    test.node.store_changed(written(ours)).await;
}

/// A node in a contest: the rival wrote sixty times without a pause, and last.
async fn in_contest() -> TestNode {
    let mut test = holding().await;
    for _ in 0..60 {
        let before = test.store.retakes.borrow().len();
        test.node.store_changed(rival()).await;
        test.node.tick().await;
        if test.asked(before + 1).await {
            write_accepted(&mut test).await;
        }
    }
    test
}

/// The clock stands still, so a busy machine cannot end a pause.
#[tokio::test(start_paused = true)]
async fn a_lease_that_two_agents_write_in_turn_is_written_more_and_more_rarely() {
    local(async {
        let mut test = in_contest().await;
        assert_eq!(test.store.retakes.borrow().len(), 3, "the first three writes are made at once");
        let status = test.node.status();
        let says = "192.168.0.9 writes our lease of 10.5.1.0/24 again and again";
        let names = |problem: &Problem| problem.kind == ProblemKind::Lease && problem.text.starts_with(says);
        assert!(!status.ready && status.problems.iter().any(names), "{:?}", status.problems);
        assert!(test.node.own_lease.lost.is_none());
        // During the pause, it is not written for another reason either.
        test.kernel.set_machine(machine("192.168.0.3"));
        test.node.full_pass(Cause::Kernel).await;
        assert!(test.asked(3).await);
        let due = test.node.next_wake().unwrap();
        assert!(due <= Instant::now() + Duration::from_secs(5), "the node must wake up at the end of the pause");
        test.node.continue_contest(due.max(Instant::now() + Duration::from_secs(5)));
        assert!(test.asked(4).await, "it must be written after the pause");
        assert_eq!(test.store.retakes.borrow().last().unwrap().public_ip, "192.168.0.3".parse().ok());
        test.answer().await;
        test.node.continue_contest(Instant::now() + Duration::from_secs(600));
        assert!(!test.node.status().problems.iter().any(names), "the problem must end when the other agent is silent");
        // When our record is gone, no other agent holds it.
        for _ in 0..2 {
            test.node.store_changed(rival()).await;
        }
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.1.0-24")])]).await;
        assert!(test.asked(5).await, "it must be written again at once");
    })
    .await;
}

/// The rival writes after the end of the pause and before the node has noticed that it is over.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_pause_causes_one_write() {
    local(async {
        let mut test = in_contest().await;
        tokio::time::advance(Duration::from_secs(5)).await;
        test.node.store_changed(rival()).await;
        test.node.tick().await;
        assert!(test.asked(4).await, "the pause is over");
        write_accepted(&mut test).await;
        assert!(!test.asked(5).await, "nothing happened since this write");
        test.node.store_changed(rival()).await;
        assert!(!test.asked(5).await, "the next pause has begun");
        let due = test.node.next_wake().unwrap();
        assert!(due > Instant::now() + Duration::from_secs(4), "the next pause is longer");
    })
    .await;
}

#[tokio::test]
async fn the_end_of_the_old_lease_says_nothing_about_another_subnet() {
    local(async {
        let mut test = TestNode::of_vxlan(own("192.168.0.1", MAC), OnLostLease::Reacquire);
        let records = vec![Record { id: "10.5.1.0-24".into(), lease: Ok(own("192.168.0.1", MAC)) }];
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        *test.store.taken.borrow_mut() = true;
        test.node.store_changed(written(own("192.168.0.1", OTHER))).await;
        assert!(test.asked(1).await);
        test.answer().await;
        assert!(test.node.own_lease.ttl.is_some(), "the lost lease has ended");
        assert_eq!(test.renewals().await, (1, Some("10.5.1.0-24".to_owned())));
        test.answer().await;
        assert_eq!(test.node.plan.own().subnets.to_key(), "10.5.9.0-24");
        assert_eq!(
            test.renewals().await,
            (1, Some("10.5.9.0-24".to_owned())),
            "the new lease is renewed instead of the old one"
        );
        assert_eq!((test.node.own_lease.ttl, test.node.own_lease.saved_end), (None, SavedEnd::Unknown));
    })
    .await;
}

#[tokio::test]
async fn nothing_is_saved_before_the_end_of_the_lease_is_known() {
    local(async {
        let mut test = holding().await;
        let kept = |seconds| vec![Event::Renewed(Some(Duration::from_secs(seconds)))];
        assert_eq!(test.node.next_saving(Instant::now()), None);
        test.node.store_changed(kept(900)).await;
        let first = test.node.own_lease.saved_end;
        assert!(matches!(first, SavedEnd::At(_)));
        // An early renewal, because something wrote the key, changes little, so it is not saved.
        test.node.store_changed(kept(1000)).await;
        assert_eq!(test.node.own_lease.saved_end, first);
        test.node.store_changed(kept(1300)).await;
        assert!(
            matches!((test.node.own_lease.saved_end, first), (SavedEnd::At(now), SavedEnd::At(before)) if now > before)
        );
        test.node.store_changed(vec![Event::Renewed(None)]).await;
        assert_eq!(
            (test.node.own_lease.saved_end, test.node.own_lease.ttl),
            (SavedEnd::Never, None),
            "the lease has become a reservation"
        );
    })
    .await;
}

/// A node that lost its lease must not choose a network of its host as its next subnet.
#[tokio::test]
async fn a_lost_lease_is_replaced_by_one_outside_the_networks_of_the_host() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Reacquire).await;
        let mut with = machine("192.168.0.1");
        with.links.push(LinkInfo { index: 3, name: Name::new("eth1").unwrap(), ..with.links[0].clone() });
        with.addrs.push(AddrInfo { index: 3, net: "10.5.8.9/24".parse().unwrap(), scope: 0, flags: 0x80 });
        test.kernel.set_machine(with);
        test.node.full_pass(Cause::Kernel).await;
        *test.store.taken.borrow_mut() = true;
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        test.answer().await;
        test.answer().await;
        let asked = test.store.requests.borrow()[0].clone();
        let overlapping = |net: &str| asked.connected.overlapping(net.parse().unwrap()).is_some();
        assert!(overlapping("10.5.8.0/24") && !overlapping("10.5.7.0/24"), "{:?}", asked.connected);
        assert_eq!(asked.was, None, "the lease that was ours is that of another node");
        let previous = asked.previous.map(|subnets| subnets.to_key());
        assert_eq!(previous.as_deref(), Some("10.5.1.0-24"), "it is taken again if it is free by then");
    })
    .await;
}

/// The file of saved peers says that the lease is ours. Where leases do not end by themselves, nothing else would take that back.
#[tokio::test]
async fn nothing_is_saved_while_a_lease_without_an_end_is_lost() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.store.expires.set(false);
        drop(test.saves());
        test.node.save_later();
        assert!(test.node.next_saving(Instant::now()).is_some(), "the lease is ours");
        *test.store.taken.borrow_mut() = true;
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        test.answer().await;
        assert!(test.node.own_lease.lost.is_some());
        test.node.save_later();
        assert_eq!(test.node.next_saving(Instant::now()), None);
    })
    .await;
}

/// The file was removed when the lease was lost, and no peer changes meanwhile.
#[tokio::test]
async fn the_file_of_saved_peers_is_written_again_when_a_lost_lease_is_back() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.store.expires.set(false);
        let _file = test.saves();
        save_all(&mut test).await;
        *test.store.taken.borrow_mut() = true;
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        test.answer().await;
        *test.store.taken.borrow_mut() = false;
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.1.0-24")])]).await;
        assert_eq!(test.node.next_saving(Instant::now()), None, "the lease is not ours yet");
        test.answer().await;
        assert_eq!(test.node.own_lease.lost, None);
        assert!(test.node.next_saving(Instant::now()).is_some());
    })
    .await;
}

#[tokio::test]
async fn an_error_of_the_store_does_not_count_as_an_answer() {
    local(async {
        let mut test = holding().await;
        let before = test.node.store.last_answer;
        // A renewal that failed, and one without an end, may be reported without a word of the store.
        for silent in
            [Event::Unreachable("no answer".into()), Event::NotRenewed("no leader".into()), Event::Renewed(None)]
        {
            let what = format!("{silent:?}");
            test.node.store_changed(vec![silent]).await;
            assert_eq!(test.node.store.last_answer, before, "{what}");
        }
        for word in [Event::Renewed(Some(Duration::from_secs(60))), Event::Answered] {
            let (before, what) = (test.node.store.last_answer, format!("{word:?}"));
            test.node.store_changed(vec![word]).await;
            assert!(test.node.store.last_answer > before, "{what}");
        }
    })
    .await;
}

#[tokio::test]
async fn a_lease_that_is_deleted_during_a_call_is_written_again_after_the_call() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let gone = || vec![Event::Changes(vec![removed("10.5.1.0-24")])];
        test.node.store_changed(gone()).await;
        assert!(test.asked(1).await, "the lease must be written again at once");
        assert!(test.node.state().lease_missing.is_some());
        test.node.store_changed(gone()).await;
        assert!(test.asked(1).await, "only one call may be open");
        test.answer().await;
        assert!(test.asked(2).await, "the first call may have ended before the second deletion");
        test.answer().await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert!(test.asked(2).await, "no further call is needed");
        assert_eq!(test.node.state().lease_missing, None);
    })
    .await;
}

#[tokio::test]
async fn an_address_that_changes_and_changes_back_is_published_as_it_is() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        for ip in ["192.168.0.3", "192.168.0.1"] {
            test.kernel.set_machine(machine(ip));
            test.node.full_pass(Cause::Kernel).await;
        }
        assert!(test.asked(1).await);
        // The notification of our own write comes before its answer. It is not a write of another node.
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.3")])]).await;
        test.answer().await;
        assert!(test.asked(2).await, "the address has changed back");
        let asked: Vec<_> = test.store.retakes.borrow().iter().map(|attrs| attrs.public_ip.unwrap()).collect();
        assert_eq!(asked.iter().map(ToString::to_string).collect::<Vec<_>>(), ["192.168.0.3", "192.168.0.1"]);
        test.answer().await;
        assert_eq!(test.node.plan.own().attrs.public_ip, "192.168.0.1".parse().ok());
        assert!(test.node.own_lease.lost.is_none());
    })
    .await;
}

#[tokio::test]
async fn the_node_that_took_our_subnet_becomes_a_peer_when_we_have_another_subnet() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Reacquire).await;
        *test.store.taken.borrow_mut() = true;
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        assert_eq!(test.answer().await, NextStep::Continue);
        assert!(test.node.own_lease.lost.is_some());
        assert_eq!(test.via("10.5.1.0/24"), None, "there is no route to the lost subnet yet");
        test.answer().await;
        assert_eq!(*test.store.acquires.borrow(), 1);
        assert_eq!(test.via("10.5.1.0/24"), "192.168.0.7".parse().ok());
        assert_eq!(test.via("10.5.2.0/24"), "192.168.0.2".parse().ok(), "the routes to other peers must stay");
        let env = std::fs::read_to_string(&test.file).unwrap();
        assert!(env.contains("FLANNEL_SUBNET=10.5.9.1/24"), "{env}");
    })
    .await;
}

#[tokio::test]
async fn a_lost_subnet_is_taken_again_when_the_other_node_gives_it_back() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        *test.store.taken.borrow_mut() = true;
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        test.answer().await;
        assert!(test.node.own_lease.lost.is_some());
        *test.store.taken.borrow_mut() = false;
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.1.0-24")])]).await;
        test.answer().await;
        assert!(test.node.own_lease.lost.is_none());
    })
    .await;
}

#[tokio::test]
async fn a_subnet_that_is_given_back_during_the_call_is_not_lost() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Exit).await;
        *test.store.taken.borrow_mut() = true;
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.1.0-24")])]).await;
        assert_eq!(test.answer().await, NextStep::Continue);
        *test.store.taken.borrow_mut() = false;
        assert_eq!(test.answer().await, NextStep::Continue);
        assert!(test.node.own_lease.lost.is_none() && test.asked(2).await);
    })
    .await;
}

#[tokio::test]
async fn whoever_removed_our_lease_may_have_removed_those_of_the_peers_too() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let gone = ["10.5.1.0-24", "10.5.2.0-24"].map(removed).to_vec();
        test.node.store_changed(vec![Event::Changes(gone)]).await;
        assert_eq!(test.node.peers.hold.len(), 1, "one removal alone would be carried out");
        assert!(test.via("10.5.2.0/24").is_some());
    })
    .await;
}

#[tokio::test]
async fn a_lease_that_is_held_again_is_renewed_by_one_task_and_its_node_is_reported_again() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.report();
        while test.store.reports.get() == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(test.store.renewals.get(), 1);
        let own = test.node.plan.own().clone();
        test.node.lease_answered(LeaseAnswer::Held(own)).await;
        let again = async {
            while test.store.reports.get() == 1 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), again).await.expect("a second report");
        assert_eq!(test.store.renewals.get(), 1);
    })
    .await;
}

/// The node started from saved peers while the store was away. When the store answers, net-conf is missing.
#[tokio::test]
async fn without_net_conf_a_node_that_started_without_the_store_takes_its_lease_all_the_same() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let request = test.node.request(None);
        test.node.own_lease.tasks.acquire_after_resume(request);
        test.answer().await;
        assert_eq!((*test.store.acquires.borrow(), test.node.own_lease.error.clone()), (1, None));
    })
    .await;
}

#[tokio::test]
async fn an_address_that_an_administrator_chooses_again_and_again_is_no_contest() {
    local(async {
        let mut test = holding().await;
        test.store.is_assigned.set(true);
        for last in 1..=6 {
            let chosen = format!("203.0.113.{last}");
            test.store.overwrite.set(chosen.parse().ok());
            test.node.store_changed(written(own(&chosen, MAC))).await;
            assert!(test.asked(last).await, "the lease must be written with the address");
            // The watch may report the write before its answer arrives.
            test.node.store_changed(written(own(&chosen, MAC))).await;
            test.answer().await;
            assert_eq!(test.node.plan.own().attrs.public_ip, chosen.parse().ok());
        }
        assert_eq!(test.node.contest_problem(), None);
    })
    .await;
}

#[tokio::test]
async fn a_renewal_that_fails_is_shown_until_one_succeeds_whatever_else_the_store_answers() {
    local(async {
        let mut test = holding().await;
        let text = || "no leader".to_owned();
        test.node.store_changed(vec![Event::NotRenewed(text()), Event::Answered]).await;
        let shown = Problem::new(ProblemKind::Lease, "own lease is not renewed: no leader");
        let is_shown = |test: &TestNode| test.node.warnings().contains(&shown);
        assert!(is_shown(&test) && test.node.store.error.is_none());
        test.node.store_changed(vec![Event::Renewed(Some(Duration::from_secs(60)))]).await;
        assert!(!is_shown(&test));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_node_wakes_up_at_the_end_of_a_pause_and_at_the_end_of_a_contest() {
    local(async {
        let mut test = in_contest().await;
        assert!(test.asked(3).await);
        // The first pause is at most five seconds.
        wake_ups(&mut test, Duration::from_secs(6)).await;
        assert!(test.asked(4).await, "the lease is written");
        test.answer().await;
        assert!(test.node.contest_problem().is_some(), "the other one may write again");
        wake_ups(&mut test, Duration::from_secs(600)).await;
        assert_eq!(test.node.contest_problem(), None, "the other one is silent");
    })
    .await;
}

#[tokio::test]
async fn a_call_for_the_lease_that_fails_is_shown_until_one_succeeds() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let shown = Problem::new(ProblemKind::Lease, "own lease: permission denied");
        test.node.lease_answered(LeaseAnswer::Failed("permission denied".to_owned())).await;
        assert!(test.node.warnings().contains(&shown), "{:?}", test.node.warnings());
        let own = test.node.plan.own().clone();
        test.node.lease_answered(LeaseAnswer::Held(own)).await;
        assert!(!test.node.warnings().contains(&shown));
    })
    .await;
}

/// The store may carry our call out before the other one writes.
#[tokio::test]
async fn what_somebody_else_writes_into_our_lease_during_a_call_is_taken_back_after_it() {
    local(async {
        let mut test = holding().await;
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.1.0-24")])]).await;
        assert!(test.asked(1).await);
        test.node.store_changed(rival()).await;
        assert!(test.asked(1).await, "only one call may be open");
        test.answer().await;
        assert!(test.asked(2).await, "our lease names the address of somebody else");
    })
    .await;
}

#[tokio::test]
async fn a_record_under_our_key_that_cannot_be_read_is_written_again() {
    local(async {
        let mut test = holding().await;
        let record = Record::new("10.5.1.0-24".into(), Err("no JSON"));
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record)])]).await;
        assert!(test.asked(1).await);
    })
    .await;
}

/// Somebody has restored it from a backup.
#[tokio::test]
async fn a_lost_lease_that_is_there_again_as_we_held_it_is_ours_without_a_write() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        *test.store.taken.borrow_mut() = true;
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        test.answer().await;
        assert!(test.node.own_lease.lost.is_some());
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.1")])]).await;
        assert_eq!(test.node.own_lease.lost, None);
        assert!(test.asked(1).await, "nothing is to be written");
    })
    .await;
}

/// Otherwise packets would go to a node that has left.
#[tokio::test]
async fn a_node_that_took_our_subnet_and_left_is_no_peer_when_we_have_another_subnet() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Reacquire).await;
        *test.store.taken.borrow_mut() = true;
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.1.0-24", "192.168.0.7")])]).await;
        test.answer().await;
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.1.0-24")])]).await;
        test.answer().await;
        assert_eq!(test.node.plan.own().subnets.to_key(), "10.5.9.0-24");
        assert_eq!(test.via("10.5.1.0/24"), None);
        assert!(test.via("10.5.2.0/24").is_some());
    })
    .await;
}

/// In Kubernetes the Node says whose lease it is, whatever it names. Peers send to the MAC that it names.
#[tokio::test]
async fn where_the_store_knows_its_nodes_the_device_gets_the_mac_that_our_lease_names() {
    local(async {
        let mut test = holding().await;
        test.store.is_assigned.set(true);
        test.node.store_changed(written(own("192.168.0.1", OTHER))).await;
        test.node.tick().await;
        let device = test.kernel.entries().get(&Key::Link(Name::new("flannel.1").unwrap())).cloned();
        let text = device.map(|seen| seen.value.to_string()).unwrap_or_default();
        assert!(text.contains("02:00:00:00:00:02"), "{text}");
        assert!(test.asked(0).await, "the lease says what it should");
    })
    .await;
}

/// The MAC alone is a reason for the device to follow.
#[tokio::test]
async fn where_the_store_knows_its_nodes_an_address_that_comes_with_another_mac_is_taken_back() {
    local(async {
        let mut test = holding().await;
        test.store.is_assigned.set(true);
        test.node.store_changed(written(own("192.168.0.9", OTHER))).await;
        assert!(test.asked(1).await, "the lease names an address that this node does not have");
        let asked = test.store.retakes.borrow()[0].clone();
        assert_eq!(asked, own("192.168.0.1", OTHER).attrs);
    })
    .await;
}
