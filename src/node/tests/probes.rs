// SPDX-License-Identifier: Apache-2.0
//! Whom a node asks with its probes, and what it says of the answers. No packet is sent: the tests give the answers.

use std::net::IpAddr;

use tokio::time::Instant;

use super::*;
use crate::kernel::Outcome;
use crate::node::probes::Probed;
use crate::observe::mesh::row::MAX_WAYS;
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::status::{PeerState, Suspect};
use crate::probe::Outgoing;
use crate::probe::echo::{Answer, EchoError};

const ANSWERED: Answer = Answer { round_trip: Some(Duration::from_micros(200)), heard: false };
const LOST: Answer = Answer { round_trip: None, heard: false };

/// A node with three peers, 192.168.0.2 to 192.168.0.4, which sends probes.
async fn probing() -> TestNode {
    with_peers_up_to(4).await
}

/// A node with the peers from 192.168.0.2 up to this one, which sends probes.
async fn with_peers_up_to(last: u8) -> TestNode {
    let mut test = TestNode::new(OnLostLease::Hold);
    test.node.context.options.probe = true;
    let all = (1..=last).map(|number| stored(&format!("10.5.{number}.0-24"), &format!("192.168.0.{number}")));
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
        // All are on their way before the first one is answered, as in a real network.
        let together: Vec<Outgoing> = std::iter::from_fn(|| test.node.next_packet(*now)).collect();
        for sent in together {
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
        test.node.probe(Instant::now());
        assert_eq!(test.node.unreachable_count(), 1, "it is known while it is not time for the next packet");
        let gone = (2..=4).map(|number| removed(&format!("10.5.{number}.0-24"))).collect();
        test.node.context.options.hold_removals = Duration::ZERO;
        test.node.peers.hold = weft_subnet::hold::Hold::new(Duration::ZERO);
        test.node.store_changed(vec![Event::Changes(gone)]).await;
        assert_eq!(test.node.next_probe(), None, "there is nobody to ask");
        assert!(gauge(&test).is_some_and(|line| line.ends_with(" 1")), "{:?}", gauge(&test));
        test.node.probe(now);
        assert_eq!(test.node.unreachable_count(), 0);
        assert!(gauge(&test).is_some_and(|line| line.ends_with(" 0")), "an alert must end: {:?}", gauge(&test));
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

/// No packet of this node could reach it, whatever the network does.
#[tokio::test]
async fn a_lease_that_cannot_be_planned_is_no_way_of_the_row() {
    local(async {
        let mut test = probing().await;
        let mut without_data = lease("10.5.2.0-24", "192.168.0.2");
        without_data.attrs.backend_type = "vxlan".into();
        let record = Record { id: without_data.id.clone(), lease: Ok(without_data) };
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(record)])]).await;
        assert_eq!((test.node.plan.peers().len(), test.node.plan.unplanned_count()), (3, 1));
        let row = test.node.mesh_row().row;
        let ways: Vec<&str> = row.ways.iter().map(|way| way.to.as_str()).collect();
        assert_eq!((row.known, &ways[..]), (2, &["10.5.3.0/24", "10.5.4.0/24"][..]));
    })
    .await;
}

/// The row of a large cluster leaves out the ways that work best.
#[tokio::test]
async fn the_row_of_a_large_cluster_has_the_worst_ways() {
    local(async {
        let all = MAX_WAYS + 5;
        // A subnet of 16 addresses for each node.
        let key = |place: usize| format!("10.5.{}.{}-28", place / 16, place % 16 * 16);
        let config = r#"{"Network":"10.5.0.0/16","SubnetLen":28,"Backend":{"Type":"host-gw"}}"#;
        let start = (config, lease(&key(0), "192.168.0.1"));
        let mut test = TestNode::of(start, OnLostLease::Hold, RuleOptions::default());
        let refused = key(all / 2).replace('-', "/");
        let outcome = Outcome::Fatal("the kernel does not take it".to_owned());
        test.kernel.fail(Key::Route(refused.parse().unwrap(), 0), Some(outcome));
        let ip = |place: usize| format!("192.168.0.{}", 2 + place % 250);
        let peers = (1..=all).map(|place| stored(&key(place), &ip(place)));
        test.node.start(vec![Event::Snapshot { records: peers.collect(), reset: false }]).await;
        let row = test.node.mesh_row().row;
        assert_eq!((row.ways[0].to.as_str(), row.ways[0].state), (refused.as_str(), PeerState::Failed));
        assert_eq!((row.ways.len(), row.known), (MAX_WAYS, all));
    })
    .await;
}

#[tokio::test]
async fn while_the_own_device_is_missing_probes_name_no_other_cause() {
    local(async {
        let mut test = TestNode::of_vxlan(vxlan_lease(), OnLostLease::Hold);
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

/// A dual-stack node of vxlan with the peers 2 and 3, which sends probes.
async fn dual_stack() -> TestNode {
    let config =
        r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48","Backend":{"Type":"vxlan"}}"#;
    let of = |number: u8| {
        let data: Option<Box<str>> = Some(format!(r#"{{"VNI":1,"VtepMAC":"02:00:00:00:00:{number:02x}"}}"#).into());
        let v4 = Some(format!("10.5.{number}.0/24").parse().unwrap());
        let subnets = Subnets { v4, v6: Some(format!("fd00:5:0:{number}::/64").parse().unwrap()) };
        let mut lease = lease(&subnets.to_key(), &format!("192.168.0.{number}"));
        lease.attrs = Attrs {
            public_ipv6: Some(format!("fd00:1::{number}").parse().unwrap()),
            backend_type: "vxlan".into(),
            backend_data: data.clone(),
            backend_v6_data: data,
            ..lease.attrs
        };
        lease
    };
    let mut test = TestNode::of((config, of(1)), OnLostLease::Hold, RuleOptions::default());
    test.node.context.options.probe = true;
    let all = (1..=3).map(of).map(|lease| Record { id: lease.id.clone(), lease: Ok(lease) });
    test.node.start(vec![Event::Snapshot { records: all.collect(), reset: false }]).await;
    drop(test.node.start_probes());
    test.node.probes.as_mut().unwrap().begin = Some(0);
    test
}

#[tokio::test]
async fn the_families_of_dual_stack_peers_are_asked_in_turn() {
    local(async {
        let mut test = dual_stack().await;
        let (mut asked, mut now) = (Vec::new(), Instant::now() + Duration::from_secs(3));
        for _ in 0..6 {
            // Half of the usual pause, because there are twice as many targets as peers.
            now += Duration::from_millis(7_500);
            asked.push(test.node.next_packet(now).unwrap().echo.to.to_string());
        }
        assert_eq!(asked, ["10.5.2.0", "10.5.3.0", "fd00:5:0:2::", "fd00:5:0:3::", "10.5.2.0", "10.5.3.0"]);
    })
    .await;
}

#[tokio::test]
async fn a_peer_of_which_one_family_is_lost_is_named_with_that_family() {
    local(async {
        let (mut test, mut now) = (dual_stack().await, Instant::now());
        let lost = |sent: &Outgoing| sent.target.address == "fd00:5:0:3::".parse::<IpAddr>().unwrap();
        answer_all(&mut test, &mut now, 40, |sent| {
            if lost(sent) && sent.echo.to == sent.target.address { LOST } else { ANSWERED }
        });
        let status = test.node.status();
        let peer = &status.peers[1];
        let probe = peer.probe.as_ref().unwrap();
        assert_eq!((probe.address.as_str(), probe.cause.as_deref()), ("fd00:5:0:3::", Some("tunnel")));
        assert_eq!(probe.suspect, Some(Suspect::Dropped("UDP port 8472 over IPv6".to_owned())));
        assert!(peer.reason.as_ref().is_some_and(|why| why.ends_with("drops UDP port 8472 over IPv6")), "{peer:#?}");
        assert_eq!((test.node.unreachable_count(), status.peers[0].state), (1, PeerState::Programmed));
        // A packet that gets lost now and then is shown, too, in whichever family it is.
        answer_all(&mut test, &mut now, 40, |_| ANSWERED);
        let mut count = 0;
        for _ in 0..12 {
            now += Duration::from_secs(20);
            while let Some(sent) = test.node.next_packet(now) {
                count += usize::from(lost(&sent));
                let answer = if lost(&sent) && count == 1 { LOST } else { ANSWERED };
                test.node.probe_ended(Probed { sent, answer: Ok(answer) });
            }
        }
        let probe = test.node.status().peers[1].probe.clone().unwrap();
        assert_eq!((probe.address.as_str(), probe.lost, probe.cause), ("fd00:5:0:3::", 1, None));
    })
    .await;
}

#[tokio::test]
async fn while_nobody_answers_over_ipv6_no_peer_is_blamed_for_it() {
    local(async {
        let (mut test, mut now) = (dual_stack().await, Instant::now());
        answer_all(&mut test, &mut now, 40, |sent| if sent.target.address.is_ipv6() { LOST } else { ANSWERED });
        let warnings = test.node.probe_warnings();
        let says = "no peer has answered an echo request over IPv6 since the start";
        assert!(warnings.len() == 1 && warnings[0].text.starts_with(says), "{warnings:?}");
        assert_eq!(test.node.unreachable_count(), 0);
    })
    .await;
}

#[tokio::test]
async fn of_many_peers_that_packets_do_not_reach_a_few_are_named_and_all_are_counted() {
    local(async {
        for (last, names) in [
            (5, "3 of 4 peers: 10.5.3.0/24 (192.168.0.3), 10.5.4.0/24 (192.168.0.4), 10.5.5.0/24 (192.168.0.5); "),
            (6, "4 of 5 peers: 10.5.3.0/24 (192.168.0.3), 10.5.4.0/24 (192.168.0.4), 10.5.5.0/24 (192.168.0.5), ...; "),
        ] {
            let (mut test, mut now) = (with_peers_up_to(last).await, Instant::now());
            answer_all(&mut test, &mut now, 60, |sent| if sent.target.address == peer(2) { ANSWERED } else { LOST });
            let warnings = test.node.probe_warnings();
            let [problem] = &warnings[..] else { panic!("{warnings:?}") };
            assert!(problem.text.starts_with(&format!("packets do not reach {names}")), "{problem}");
        }
    })
    .await;
}

/// What the operator is told to look at follows from the packets that are lost.
#[tokio::test]
async fn a_small_link_and_a_firewall_in_one_direction_are_told_apart() {
    local(async {
        let large = |sent: &Outgoing| if sent.echo.size > 1404 { LOST } else { ANSWERED };
        let heard = |_: &Outgoing| Answer { heard: true, ..LOST };
        type Network = fn(&Outgoing) -> Answer;
        let cases: [(Network, Suspect, &str); 2] = [
            (large, Suspect::UplinkMtu(1404), "or set the MTU of the uplink eth0 to 1404 on every node"),
            (heard, Suspect::Dropped("packets".to_owned()), "drops packets from this node to 192.168.0.3"),
        ];
        for (answer, suspect, says) in cases {
            let (mut test, mut now) = (probing().await, Instant::now());
            let of_peer = |sent: &Outgoing| if sent.target.address == peer(3) { answer(sent) } else { ANSWERED };
            answer_all(&mut test, &mut now, 100, of_peer);
            let shown = test.node.status().peers[1].clone();
            assert_eq!(shown.probe.as_ref().and_then(|probe| probe.suspect.clone()), Some(suspect), "{shown:#?}");
            assert!(shown.reason.as_ref().is_some_and(|reason| reason.ends_with(says)), "{shown:#?}");
        }
    })
    .await;
}
