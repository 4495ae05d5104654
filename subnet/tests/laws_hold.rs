// SPDX-License-Identifier: Apache-2.0
//! Sudden emptiness: what is let through, what is held, and for how long.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use weft_subnet::hold::Hold;
use weft_subnet::lease::Id;

const GRACE: Duration = Duration::from_secs(300);

fn ids(range: std::ops::Range<u32>) -> Vec<Id> {
    range.map(|n| format!("n{n:03}").into()).collect()
}

fn id(n: u32) -> Id {
    format!("n{n:03}").into()
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn a_wipe_is_held_and_runs_out() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    assert_eq!(hold.next(), None);
    assert_eq!(hold.remove(ids(0..49), 49, t), ids(0..0));
    assert_eq!(hold.held().cloned().collect::<Vec<_>>(), ids(0..49));
    assert_eq!(hold.next(), Some(t + GRACE));
    // Two nodes write their leases back.
    assert!(hold.back(&id(7)) && hold.back(&id(8)));
    assert!(!hold.back(&id(7)));
    assert_eq!(hold.due(t + GRACE - ms(1)), ids(0..0));
    let due = hold.due(t + GRACE);
    assert_eq!(due.len(), 47);
    assert!(!due.contains(&id(7)));
    assert_eq!((hold.held().count(), hold.next()), (0, None));
    assert_eq!(hold.due(t + GRACE * 2), ids(0..0));
}

#[test]
fn half_is_let_through_more_is_held() {
    let t = Instant::now();
    assert_eq!(Hold::new(GRACE).remove(ids(0..25), 50, t).len(), 25);
    assert_eq!(Hold::new(GRACE).remove(ids(0..26), 50, t).len(), 0);
}

#[test]
fn fewer_than_three_pass_at_once() {
    let t = Instant::now();
    assert_eq!(Hold::new(GRACE).remove(ids(0..1), 1, t), ids(0..1));
    assert_eq!(Hold::new(GRACE).remove(ids(0..2), 2, t), ids(0..2));
    assert_eq!(Hold::new(GRACE).remove(ids(0..3), 3, t), ids(0..0));
    let mut one_by_one = Hold::new(GRACE);
    assert_eq!(one_by_one.remove(ids(0..1), 3, t), ids(0..1));
    assert_eq!(one_by_one.remove(ids(1..2), 2, t), ids(1..2));
    assert_eq!(one_by_one.remove(ids(2..3), 1, t), ids(0..0), "the third within 2 s, of three");
}

#[test]
fn a_flood_of_single_deletions_is_stopped_halfway() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    let (mut peers, mut passed) = (50, 0);
    for n in 0..50 {
        // Every 30 ms: all fifty within 1.5 s.
        let now = hold.remove(vec![id(n)], peers, t + ms(30) * n).len();
        (peers, passed) = (peers - now, passed + now);
    }
    assert_eq!((passed, hold.held().count()), (25, 25));
}

#[test]
fn a_flood_stays_stopped_until_it_pauses() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    assert_eq!(hold.remove(ids(0..60), 100, t).len(), 0);
    // The flood goes on slowly: alone these would pass.
    for n in 0..10 {
        assert_eq!(hold.remove(vec![id(60 + n)], 100, t + ms(1900) * (n + 1)).len(), 0);
    }
    // A node that leaves later, on its own, is let go at once, with the others still held.
    assert_eq!(hold.remove(vec![id(80)], 100, t + ms(1900) * 10 + ms(2000)), [id(80)]);
    assert_eq!(hold.held().count(), 70);
}

#[test]
fn slow_leaving_is_never_held() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    for n in 0..50 {
        assert_eq!(hold.remove(vec![id(n)], 50 - n as usize, t + ms(1001) * n).len(), 1, "{n}");
    }
}

#[test]
fn asked_again_while_held_keeps_its_time() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    hold.remove(ids(0..10), 10, t);
    assert_eq!(hold.remove(ids(0..10), 10, t + ms(60_000)), ids(0..0));
    assert_eq!(hold.remove(vec![id(3), id(3)], 10, t + ms(60_000)), ids(0..0));
    assert_eq!(hold.next(), Some(t + GRACE));
    assert_eq!(hold.due(t + GRACE).len(), 10);
}

#[test]
fn grace_zero_is_off() {
    let (mut hold, t) = (Hold::new(Duration::ZERO), Instant::now());
    assert_eq!(hold.remove(ids(0..50), 50, t).len(), 50);
    assert_eq!((hold.held().count(), hold.next()), (0, None));
}

#[test]
fn a_doubtful_store_holds_even_few_for_a_while() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    hold.suspect(t);
    assert_eq!(hold.remove(ids(0..2), 2, t), ids(0..0), "a wiped store of three nodes");
    assert!(hold.back(&id(0)) && hold.back(&id(1)));
    assert_eq!(hold.remove(ids(0..1), 2, t + ms(4_000)), ids(0..1), "an ordinary removal later");
    let mut off = Hold::new(Duration::ZERO);
    off.suspect(t);
    assert_eq!(off.remove(ids(0..2), 2, t), ids(0..2), "grace 0 is off");
}

proptest! {
    /// Nothing is lost, nothing is carried out twice: what was asked for either passed, is held, came back, or fell due.
    #[test]
    fn every_removal_has_one_end(steps in proptest::collection::vec((0u32..30, 1u32..8, 0u64..3000, any::<bool>()), 1..40)) {
        let (mut hold, mut now) = (Hold::new(ms(10_000)), Instant::now());
        let mut alive: BTreeSet<Id> = ids(0..30).into_iter().collect();
        let mut asked = BTreeSet::new();
        for (from, count, pause, back) in steps {
            now += ms(pause);
            for id in hold.due(now) {
                prop_assert!(asked.remove(&id) && alive.remove(&id));
            }
            if back {
                prop_assert_eq!(hold.back(&id(from)), asked.remove(&id(from)));
                alive.insert(id(from));
            } else {
                let wanted: Vec<Id> = ids(from..from + count).into_iter().filter(|id| alive.contains(id)).collect();
                let passed = hold.remove(wanted.clone(), alive.len(), now);
                asked.extend(wanted);
                for id in passed {
                    prop_assert!(asked.remove(&id) && alive.remove(&id));
                }
            }
            prop_assert_eq!(hold.held().cloned().collect::<BTreeSet<_>>(), asked.clone());
            prop_assert_eq!(hold.next().is_some(), !asked.is_empty());
        }
    }
}
