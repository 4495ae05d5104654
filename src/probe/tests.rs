// SPDX-License-Identifier: Apache-2.0
//! Tests of the turns: who is asked when, and how many packets that costs.

use super::samples::Loss;
use super::*;

fn target(place: usize) -> Target {
    let [_, _, high, low] = (place as u32).to_be_bytes();
    let published = Some([192, 168, high, low].into());
    Target {
        place,
        family: Family::V4,
        tag: 1 + place as u32,
        address: [10, high, low, 0].into(),
        published,
        mtu: 1450,
    }
}

const ANSWERED: Answer = Answer { round_trip: Some(Duration::from_micros(200)), heard: false };
const LOST: Answer = Answer { round_trip: None, heard: false };

/// A cluster of peers for a prober, with a clock of its own.
struct Cluster<'a> {
    prober: Prober,
    peers: usize,
    now: Instant,
    /// Says what an address answers to a packet of this size.
    path: &'a dyn Fn(&Outgoing) -> Answer,
    /// Answers that are on their way.
    open: VecDeque<(Instant, Outgoing, Answer)>,
    /// All packets, with their time.
    sent: Vec<(Instant, usize)>,
}

impl<'a> Cluster<'a> {
    fn new(peers: usize, path: &'a dyn Fn(&Outgoing) -> Answer) -> Cluster<'a> {
        let now = Instant::now();
        Cluster { prober: Prober::new(now), peers, now, path, open: VecDeque::new(), sent: Vec::new() }
    }

    fn send(&mut self) -> Option<Outgoing> {
        let peers = self.peers;
        let gone = |(place, _): Slot| (place < peers).then(|| target(place));
        if let Some(outgoing) = self.prober.examine(self.now, gone) {
            return Some(outgoing);
        }
        let place = match self.prober.turn(peers, self.now)? {
            Turn::Changed(id) => id.parse().unwrap(),
            Turn::Next => {
                self.prober.cursor = (self.prober.cursor + 1) % peers;
                self.prober.cursor
            }
        };
        self.prober.ask(target(place), self.now)
    }

    /// Lets the time pass in steps of 100 ms.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            while let Some((_, outgoing, answer)) = self.open.pop_front_if(|(at, ..)| *at <= self.now) {
                self.prober.ended(&outgoing, answer, self.now);
            }
            while let Some(outgoing) = self.send() {
                self.sent.push((self.now, outgoing.target.place));
                let answer = (self.path)(&outgoing);
                let took = if answer.round_trip.is_some() { Duration::ZERO } else { outgoing.echo.wait };
                self.open.push_back((self.now + took, outgoing, answer));
                self.open.make_contiguous().sort_by_key(|(at, ..)| *at);
            }
            self.now += Duration::from_millis(100);
        }
    }
}

#[test]
fn packets_are_at_most_five_a_second_and_every_peer_gets_its_turn() {
    for (peers, round) in [(3, 31), (150, 40), (300, 65), (3000, 610)] {
        let mut cluster = Cluster::new(peers, &|_| ANSWERED);
        cluster.run(Duration::from_secs(round + 5));
        let seconds = cluster.now - cluster.sent[0].0;
        assert!(cluster.sent.len() as f64 <= seconds.as_secs_f64() * 5.0 + 5.0, "{} packets", cluster.sent.len());
        let asked: std::collections::BTreeSet<usize> = cluster.sent.iter().map(|(_, place)| *place).collect();
        assert_eq!(asked.len(), peers, "of {peers} peers");
    }
}

#[test]
fn packets_are_sent_together_once_a_second() {
    let path = |outgoing: &Outgoing| if outgoing.target.place.is_multiple_of(2) { LOST } else { ANSWERED };
    for peers in [150, 5000] {
        let mut cluster = Cluster::new(peers, &path);
        cluster.run(Duration::from_secs(100));
        let times: std::collections::BTreeSet<Instant> = cluster.sent.iter().map(|(at, _)| *at).collect();
        assert!(times.len() <= 100, "{} times", times.len());
        let gaps = times.iter().zip(times.iter().skip(1)).map(|(one, other)| *other - *one);
        assert!(gaps.min().is_some_and(|gap| gap >= BURST_PAUSE));
        assert!(cluster.sent.len() > 400, "{} packets", cluster.sent.len());
    }
}

#[test]
fn a_broken_peer_is_found_within_a_minute_and_its_recovery_too() {
    let broken = std::cell::Cell::new(true);
    let path = |outgoing: &Outgoing| {
        let is_lost = outgoing.target.place == 77 && outgoing.packet != Packet::Published && broken.get();
        if is_lost { LOST } else { ANSWERED }
    };
    let mut cluster = Cluster::new(150, &path);
    cluster.run(Duration::from_secs(60));
    let found: Vec<_> = cluster.prober.unreachable().map(|(target, cause)| (target.place, cause)).collect();
    assert_eq!(found, [(77, Cause::Tunnel)]);
    broken.set(false);
    cluster.run(Duration::from_secs(20));
    assert_eq!(cluster.prober.unreachable().count(), 0);
    let loss = cluster.prober.sample(&target(77)).unwrap().loss();
    assert!(loss.lost == 0 && loss.asked > 0, "what got lost before does not make the way a bad one: {loss:?}");
}

/// The size of the packets is what finds out how much some link of the path carries.
#[test]
fn the_largest_packet_that_arrives_is_found_with_packets_of_all_sizes() {
    let path = |outgoing: &Outgoing| {
        let is_lost = outgoing.target.place == 7 && outgoing.echo.size > 1300;
        if is_lost { LOST } else { ANSWERED }
    };
    let mut cluster = Cluster::new(10, &path);
    cluster.run(Duration::from_secs(180));
    let found: Vec<_> = cluster.prober.unreachable().map(|(target, cause)| (target.place, cause)).collect();
    assert_eq!(found, [(7, Cause::Mtu(1300))]);
    assert_eq!(cluster.prober.smallest_mtu(), Some(1300), "of all peers");
}

#[test]
fn many_broken_peers_cost_no_more_packets_and_others_are_still_asked() {
    let path = |outgoing: &Outgoing| if outgoing.target.place.is_multiple_of(2) { LOST } else { ANSWERED };
    let mut cluster = Cluster::new(400, &path);
    cluster.run(Duration::from_secs(300));
    assert!(cluster.sent.len() <= 1500, "{} packets", cluster.sent.len());
    assert!(cluster.prober.is_full() && cluster.prober.unreachable().count() > MAX_EXAMINED / 2);
    let healthy = cluster.sent.iter().filter(|(_, place)| place % 2 == 1).count();
    assert!(healthy > 200, "{healthy} packets went to healthy peers");
}

#[test]
fn while_nobody_answers_no_peer_is_blamed() {
    let mut cluster = Cluster::new(20, &|_| LOST);
    cluster.run(Duration::from_secs(90));
    assert_eq!((cluster.prober.unreachable().count(), cluster.prober.silence(Family::V4)), (0, Some(20)));
    let one = |outgoing: &Outgoing| if outgoing.target.place == 3 { ANSWERED } else { LOST };
    cluster.path = &one;
    cluster.run(Duration::from_secs(60));
    assert_eq!((cluster.prober.unreachable().count(), cluster.prober.silence(Family::V4)), (19, None));
}

#[test]
fn a_node_that_nobody_has_answered_asks_less_often_until_somebody_does() {
    let mut cluster = Cluster::new(400, &|_| LOST);
    let packets = |cluster: &mut Cluster<'_>| {
        cluster.sent.clear();
        cluster.run(Duration::from_secs(100));
        cluster.sent.len()
    };
    packets(&mut cluster);
    assert!(cluster.prober.is_full());
    let rarely = packets(&mut cluster);
    assert!((90..=105).contains(&rarely), "{rarely} packets, five are sent every 5 s");
    cluster.path = &|outgoing| if outgoing.target.place == 3 { LOST } else { ANSWERED };
    let often = packets(&mut cluster);
    assert!(often > 400, "{often} packets after the first answer");
    cluster.path = &|_| LOST;
    let still = packets(&mut cluster);
    assert!(still > 400, "{still} packets: somebody has answered, so silent peers are faults");
}

#[test]
fn a_peer_whose_lease_changed_is_asked_soon_and_few_wait_for_that() {
    let mut cluster = Cluster::new(3000, &|_| ANSWERED);
    for place in 2000..3000 {
        cluster.prober.lease_changed(&place.to_string().into(), cluster.now);
    }
    cluster.run(Duration::from_secs(20));
    let asked = cluster.sent.iter().filter(|(_, place)| *place >= 2000).count();
    assert_eq!(asked, MAX_CHANGED);
}

#[test]
fn a_lease_that_changes_all_the_time_is_asked_once_after_a_pause_and_delays_no_other() {
    let mut cluster = Cluster::new(3000, &|_| ANSWERED);
    let begin = cluster.now;
    for _ in 0..2 * MAX_CHANGED {
        cluster.prober.lease_changed(&"2500".into(), begin);
    }
    cluster.prober.lease_changed(&"2600".into(), begin);
    cluster.run(Duration::from_secs(20));
    for place in [2500, 2600] {
        let times: Vec<Duration> =
            cluster.sent.iter().filter(|(_, to)| *to == place).map(|(at, _)| *at - begin).collect();
        assert!(times.len() == 1 && times[0] >= AFTER_CHANGE, "{place}: {times:?}");
    }
}

/// Returns the next packet for a peer that is examined. Before that, another peer has its turn.
fn next_examined(prober: &mut Prober, peer: Target, now: &mut Instant) -> Outgoing {
    *now += BURST_PAUSE;
    prober.turn(1, *now);
    prober.examine(*now, |_| Some(peer)).unwrap()
}

/// Lets this peer give one answer after the other until its cause is known. Returns the last packet.
fn examined_until_known(prober: &mut Prober, peer: Target, answer: Answer, now: &mut Instant) -> Outgoing {
    let mut sent = prober.ask(peer, *now).unwrap();
    for _ in 0..10 {
        prober.ended(&sent, answer, *now);
        if prober.examined[&peer.slot()].examination.is_over() {
            return sent;
        }
        sent = next_examined(prober, peer, now);
    }
    panic!("no cause is found: {prober:?}");
}

/// A prober to which another peer has answered, so that it blames those that do not.
fn with_an_answer(now: &mut Instant) -> Prober {
    let mut prober = Prober::new(*now);
    let other = prober.ask(target(9), *now).unwrap();
    prober.ended(&other, ANSWERED, *now);
    *now += BURST_PAUSE;
    prober
}

#[test]
fn a_peer_whose_lease_is_gone_is_examined_no_more_and_its_late_answer_is_not_that_of_the_next_one() {
    let now = Instant::now();
    let (old, mut prober) = (target(1), Prober::new(now));
    let next = Target { tag: 77, address: [10, 9, 9, 0].into(), ..old };
    let of_old = prober.ask(old, now).unwrap();
    prober.ended(&of_old, LOST, now);
    assert_eq!(prober.examine(now, |_| Some(next)), None, "the lease that had the place is gone");
    let of_next = prober.ask(next, now).unwrap();
    prober.ended(&of_next, LOST, now);
    prober.ended(&of_old, ANSWERED, now);
    let examined = prober.examine(now, |_| Some(next)).map(|sent| (sent.target, sent.packet));
    let first = Examination::new(next.mtu, true).packet();
    assert_eq!(examined, Some((next, first)), "the answer of another lease changes nothing");
}

#[test]
fn a_peer_whose_cause_is_known_is_asked_seldom_and_waited_for_long_enough_to_hear_it() {
    let mut now = Instant::now();
    let (peer, mut prober) = (target(1), with_an_answer(&mut now));
    let last = examined_until_known(&mut prober, peer, LOST, &mut now);
    assert_eq!(prober.unreachable().map(|(_, cause)| cause).collect::<Vec<_>>(), [Cause::Underlay]);
    // Its published address was asked, while requests from its tunnel address were noticed.
    assert_eq!((Some(last.echo.to), last.echo.listen), (peer.published, Some(peer.address)));
    assert_eq!(prober.ask(peer, now), None, "it is asked by its examination alone");
    let sent = next_examined(&mut prober, peer, &mut now);
    assert!(sent.echo.wait >= LONG_WAIT, "{sent:?}");
    prober.turn(1, now + BURST_PAUSE);
    now += BURST_PAUSE;
    assert_eq!(prober.examine(now, |_| Some(peer)), None, "one packet at a time");
}

/// Two nodes that examine each other ask in turns. If requests of the peer went unnoticed for a part of each turn, two nodes could miss each other's
/// requests for minutes.
#[test]
fn a_peer_whose_cause_is_known_is_listened_to_nearly_all_the_time() {
    for answer_of_published in [LOST, ANSWERED] {
        let mut now = Instant::now();
        let (peer, mut prober) = (target(1), with_an_answer(&mut now));
        examined_until_known(&mut prober, peer, LOST, &mut now);
        // One more turn is before the cause is known.
        let sent = next_examined(&mut prober, peer, &mut now);
        now += sent.echo.wait;
        prober.ended(&sent, LOST, now);
        for _ in 0..12 {
            prober.turn(1, now);
            let sent = prober.examine(now, |_| Some(peer)).expect("the next packet follows at once");
            now += sent.echo.wait.max(BURST_PAUSE);
            let is_published = sent.packet == Packet::Published;
            prober.ended(&sent, if is_published { answer_of_published } else { LOST }, now);
        }
    }
}

#[test]
fn an_answer_outside_of_the_tunnel_is_not_shown_as_its_round_trip() {
    let mut now = Instant::now();
    let (peer, mut prober) = (target(1), with_an_answer(&mut now));
    let mut sent = prober.ask(peer, now).unwrap();
    while sent.packet != Packet::Published {
        prober.ended(&sent, LOST, now);
        sent = next_examined(&mut prober, peer, &mut now);
    }
    prober.ended(&sent, ANSWERED, now);
    assert_eq!(prober.cause(&peer), Some(Cause::Tunnel));
    let sample = prober.sample(&peer).unwrap();
    assert_eq!(
        (sample.round_trip(), sample.loss().lost),
        (None, sample.loss().asked),
        "every packet of the tunnel was lost"
    );
}

#[test]
fn a_peer_is_blamed_only_when_something_was_heard_of_any_peer() {
    for (answer, is_blamed) in [(LOST, false), (Answer { heard: true, ..LOST }, true)] {
        let mut now = Instant::now();
        let (peer, mut prober) = (target(1), Prober::new(now));
        examined_until_known(&mut prober, peer, answer, &mut now);
        assert_eq!(
            (prober.cause(&peer).is_some(), prober.silence(Family::V4).is_none()),
            (is_blamed, is_blamed),
            "{answer:?}"
        );
    }
}

#[test]
fn a_packet_that_could_not_be_sent_is_tried_again_later() {
    let now = Instant::now();
    let (peer, mut prober) = (target(1), Prober::new(now));
    let lost = prober.ask(peer, now).unwrap();
    prober.ended(&lost, LOST, now);
    let small = prober.examine(now, |_| Some(peer)).unwrap();
    prober.not_sent(&small, "no socket".to_owned(), now);
    // Others have their turn meanwhile.
    assert_eq!(prober.turn(1, now + AFTER_CHANGE), Some(Turn::Next));
    assert_eq!(prober.examine(now + LONG_WAIT - PAUSE, |_| Some(peer)), None);
    assert_eq!(prober.examine(now + LONG_WAIT, |_| Some(peer)), Some(small), "nothing is known of it yet");
}

/// Another lease may get the place while the packet waits for a socket.
#[test]
fn a_packet_for_a_lease_that_is_gone_does_not_delay_the_next_lease_in_its_place() {
    let now = Instant::now();
    let (old, mut prober) = (target(1), Prober::new(now));
    let next = Target { tag: 77, address: [10, 9, 9, 0].into(), ..old };
    let [of_old, of_next] = [old, next].map(|target| prober.ask(target, now).unwrap());
    prober.ended(&of_next, LOST, now);
    prober.not_sent(&of_old, "no socket".to_owned(), now);
    assert!(prober.examine(now, |_| Some(next)).is_some(), "it is due at once");
}

/// The same peer in the other family.
fn over_ipv6(target: Target) -> Target {
    Target {
        family: Family::V6,
        tag: 1000 + target.tag,
        address: "fd00::1".parse().unwrap(),
        published: None,
        ..target
    }
}

#[test]
fn each_family_of_a_peer_is_known_by_itself_and_the_peer_counts_once() {
    let mut now = Instant::now();
    let (peer, mut prober) = (target(1), with_an_answer(&mut now));
    let of = |prober: &Prober| prober.unreachable().map(|(target, _)| target.slot()).collect::<Vec<_>>();
    let sent = prober.ask(peer, now).unwrap();
    prober.ended(&sent, ANSWERED, now);
    examined_until_known(&mut prober, over_ipv6(peer), LOST, &mut now);
    assert_eq!((of(&prober), prober.silence(Family::V6)), (Vec::new(), Some(1)), "nobody has answered over IPv6");
    let other = prober.ask(over_ipv6(target(9)), now).unwrap();
    prober.ended(&other, ANSWERED, now);
    assert_eq!((of(&prober), prober.silence(Family::V6)), (vec![(1, Family::V6)], None));
    assert!(prober.cause(&peer).is_none() && prober.cause(&over_ipv6(peer)).is_some());
    assert_eq!(prober.sample(&peer).unwrap().loss(), Loss { lost: 0, asked: 1 }, "the losses are those of IPv6");
    now += BURST_PAUSE;
    let mut sent = prober.ask(peer, now).unwrap();
    while prober.cause(&peer).is_none() {
        prober.ended(&sent, LOST, now);
        now += BURST_PAUSE;
        prober.turn(1, now);
        let next = |slot| if slot == peer.slot() { peer } else { over_ipv6(peer) };
        sent = prober.examine(now, |slot| Some(next(slot))).unwrap();
    }
    assert_eq!(of(&prober), [(1, Family::V4)], "in both families");
}

#[test]
fn the_families_take_turns_by_rounds() {
    let mut prober = Prober::new(Instant::now());
    prober.cursor = 7;
    let rounds = [(); 3].map(|()| {
        prober.begin_round();
        (prober.cursor, prober.family)
    });
    assert_eq!(rounds, [(0, Family::V6), (0, Family::V4), (0, Family::V6)]);
}

#[test]
fn a_peer_that_answers_connections_alone_is_asked_with_fewer_packets_once_that_is_known() {
    let mut now = Instant::now();
    let (peer, mut prober) = (target(1), with_an_answer(&mut now));
    let mut packets_of_a_round = || {
        let mut sent = prober.ask(peer, now).unwrap();
        for packets in 1..10 {
            let answer = if sent.packet == Packet::Connection { ANSWERED } else { LOST };
            prober.ended(&sent, answer, now);
            if prober.examined.is_empty() {
                return packets;
            }
            sent = next_examined(&mut prober, peer, &mut now);
        }
        panic!("the examination does not end: {prober:?}");
    };
    let (first, second) = (packets_of_a_round(), packets_of_a_round());
    assert!(second < first, "{first} packets, and {second} when it is known");
}

/// Each waits for requests of the other one while it waits for an answer, and for a moment between two packets it does not.
#[test]
fn two_nodes_that_examine_each_other_do_not_go_on_in_step() {
    let mut now = Instant::now();
    let (peer, mut prober) = (target(1), with_an_answer(&mut now));
    examined_until_known(&mut prober, peer, LOST, &mut now);
    let mut waits = BTreeSet::new();
    for _ in 0..9 {
        let sent = next_examined(&mut prober, peer, &mut now);
        waits.insert(sent.echo.wait);
        prober.ended(&sent, LOST, now);
    }
    assert!(waits.len() > 3, "each wait has another length: {waits:?}");
}

/// The node sleeps until then.
#[test]
fn the_next_packet_is_sent_when_the_first_peer_is_due_and_not_more_than_once_a_second() {
    let start = Instant::now();
    let mut prober = Prober::new(start);
    assert_eq!(prober.next(), start + AFTER_CHANGE);
    let now = start + AFTER_CHANGE;
    assert_eq!(prober.turn(1, now), Some(Turn::Next));
    let sent = prober.ask(target(1), now).unwrap();
    assert_eq!(prober.next(), now + MAX_PAUSE, "the turn of the next peer");
    prober.lease_changed(&"2".into(), now);
    assert_eq!(prober.next(), now + AFTER_CHANGE, "a lease has changed");
    prober.ended(&sent, LOST, now);
    assert_eq!(prober.next(), now + BURST_PAUSE, "a peer is examined");
    prober.examine(now + BURST_PAUSE, |_| Some(target(1))).unwrap();
    assert_eq!(prober.next(), now + AFTER_CHANGE, "its answer is waited for");
}
