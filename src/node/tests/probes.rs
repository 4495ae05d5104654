// SPDX-License-Identifier: Apache-2.0
//! Whom a node asks with its probes, and what it says of the answers. No packet is sent: the tests give the answers.

use std::net::IpAddr;

use tokio::time::Instant;

use super::*;
use crate::kernel::Outcome;
use crate::node::probes::Probed;
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::status::{PeerState, Suspect};
use crate::probe::Outgoing;
use crate::probe::echo::{Answer, EchoError};

const ANSWERED: Answer = Answer { round_trip: Some(Duration::from_micros(200)), heard: false };
const LOST: Answer = Answer { round_trip: None, heard: false };

/// A node with three peers, 192.168.0.2 to 192.168.0.4, which sends probes.
async fn probing() -> TestNode {
    let mut test = TestNode::new(OnLostLease::Hold);
    test.node.context.options.probe = true;
    let all = (1..=4).map(|number| stored(&format!("10.5.{number}.0-24"), &format!("192.168.0.{number}")));
    test.node.start(vec![Event::Snapshot { records: all.collect(), reset: false }]).await;
    drop(test.node.start_probes());
    test
}

fn peer(number: u8) -> IpAddr {
    [192, 168, 0, number].into()
}

/// Gives the next packets answers, as long as `steps` allows. The clock is that of the test.
fn answer_all(test: &mut TestNode, now: &mut Instant, steps: usize, answer: impl Fn(&Outgoing) -> Answer) {
    for _ in 0..steps {
        *now += Duration::from_secs(20);
        while let Some(sent) = test.node.next_packet(*now) {
            test.node.probe_ended(Probed { sent, answer: Ok(answer(&sent)) });
        }
    }
}

fn only_lost(number: u8) -> impl Fn(&Outgoing) -> Answer {
    move |sent: &Outgoing| if sent.target.address == peer(number) { LOST } else { ANSWERED }
}

#[tokio::test]
async fn peers_are_asked_in_turn_from_a_place_of_this_node_on() {
    local(async {
        let mut test = probing().await;
        assert!(test.node.next_probe().is_some());
        assert!(test.node.next_wake() <= test.node.next_probe(), "the node wakes up for the next packet");
        // The own lease has the place 0, so the peers have the places 1 to 3.
        test.node.probes.as_mut().unwrap().begin = Some(3 + 2);
        let (mut asked, mut now) = (Vec::new(), Instant::now());
        for _ in 0..6 {
            now += Duration::from_secs(20);
            asked.push(test.node.next_packet(now).unwrap().echo.to);
        }
        assert_eq!(asked, [3, 4, 2, 3, 4, 2].map(peer));
    })
    .await;
}

#[tokio::test]
async fn a_peer_whose_lease_changed_is_asked_before_its_turn() {
    local(async {
        let mut test = probing().await;
        test.node.probes.as_mut().unwrap().begin = Some(3);
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.4.0-24", "192.168.0.44")])]).await;
        let sent = test.node.next_packet(Instant::now() + Duration::from_secs(20)).unwrap();
        assert_eq!(sent.echo.to, peer(44));
    })
    .await;
}

#[tokio::test]
async fn a_peer_that_does_not_answer_is_named_until_it_is_reached_or_gone() {
    local(async {
        let mut test = probing().await;
        let mut now = Instant::now();
        let gauge = |test: &TestNode| {
            let text = test.node.context.reporter.metrics.render_classic(Instant::now());
            text.lines().find(|line| line.contains("unreachable") && line.contains("underlay")).map(str::to_owned)
        };
        answer_all(&mut test, &mut now, 20, only_lost(3));
        let status = test.node.status();
        let states: Vec<PeerState> = status.peers.iter().map(|peer| peer.state).collect();
        assert_eq!(states, [PeerState::Programmed, PeerState::Unreachable, PeerState::Programmed], "{status:#?}");
        let says = "packets do not reach 1 of 3 peers: 10.5.3.0/24 (192.168.0.3)";
        let named = |problem: &Problem| problem.kind == ProblemKind::Unreachable && problem.text.starts_with(says);
        assert!(status.problems.iter().any(named), "{:?}", status.problems);
        let suspect = status.peers[1].probe.as_ref().and_then(|probe| probe.suspect.clone());
        assert_eq!(suspect, Some(Suspect::Silent(peer(3))));
        assert!(gauge(&test).is_some_and(|line| line.ends_with(" 1")), "{:?}", gauge(&test));
        answer_all(&mut test, &mut now, 20, |_| ANSWERED);
        assert_eq!((test.node.unreachable_count(), test.node.probe_warnings()), (0, Vec::new()));
        assert!(gauge(&test).is_some_and(|line| line.ends_with(" 0")), "{:?}", gauge(&test));
        answer_all(&mut test, &mut now, 20, only_lost(3));
        assert_eq!(test.node.unreachable_count(), 1);
        let gone = (2..=4).map(|number| removed(&format!("10.5.{number}.0-24"))).collect();
        test.node.context.options.hold_removals = Duration::ZERO;
        test.node.peers.hold = weft_subnet::hold::Hold::new(Duration::ZERO);
        test.node.store_changed(vec![Event::Changes(gone)]).await;
        assert_eq!(test.node.next_probe(), None, "there is nobody to ask");
        test.node.probe(now);
        assert_eq!(test.node.unreachable_count(), 0);
    })
    .await;
}

#[tokio::test]
async fn why_no_packet_can_be_sent_is_shown_until_one_can() {
    local(async {
        let mut test = probing().await;
        let mut now = Instant::now() + Duration::from_secs(20);
        let sent = test.node.next_packet(now).unwrap();
        test.node.probe_ended(Probed { sent, answer: Err(EchoError::NotAllowed) });
        let warnings = test.node.probe_warnings();
        assert!(warnings.len() == 1 && warnings[0].text.contains("--probe=off turns probes off"), "{warnings:?}");
        answer_all(&mut test, &mut now, 1, |_| ANSWERED);
        assert_eq!(test.node.probe_warnings(), []);
    })
    .await;
}

#[tokio::test]
async fn a_lease_that_is_not_in_the_kernel_is_not_asked() {
    local(async {
        let mut test = probing().await;
        let mut other = stored("10.5.3.0-24", "192.168.0.3");
        if let Ok(lease) = &mut other.lease {
            lease.attrs.backend_type = "a type of the future".into();
        }
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(other)])]).await;
        let (mut asked, mut now) = (Vec::new(), Instant::now());
        for _ in 0..8 {
            now += Duration::from_secs(20);
            asked.extend(test.node.next_packet(now).map(|sent| sent.echo.to));
        }
        assert!(asked.len() >= 4 && !asked.contains(&peer(3)), "{asked:?}");
    })
    .await;
}

#[tokio::test]
async fn each_node_may_read_the_row_of_this_one() {
    local(async {
        let test = probing().await;
        let answer = test.node.mesh_row();
        assert_eq!(answer.readers, [1, 2, 3, 4].map(peer));
        assert_eq!((answer.row.known, answer.row.ways.len()), (3, 3));
    })
    .await;
}

#[tokio::test]
async fn while_the_own_device_is_missing_probes_name_no_other_cause() {
    local(async {
        let mut own = lease("10.5.1.0-24", "192.168.0.1");
        own.attrs.backend_type = "vxlan".into();
        own.attrs.backend_data = Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}"#.into());
        let mut test = TestNode::of_vxlan(own, OnLostLease::Hold);
        test.node.context.options.probe = true;
        let link = Key::Link(Name::new("flannel.1").unwrap());
        test.kernel.fail(link, Some(Outcome::Fatal("the kernel has no vxlan".into())));
        test.node.start(vec![Event::Snapshot { records: Vec::new(), reset: false }]).await;
        drop(test.node.start_probes());
        test.node.probes.as_mut().unwrap().prober.problem = Some("no answer".to_owned());
        assert!(test.node.device_problem().is_some());
        assert_eq!(test.node.probe_warnings(), []);
        test.kernel.fail(link, None);
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(test.node.probe_warnings(), [Problem::new(ProblemKind::Probes, "probes: no answer")]);
    })
    .await;
}
