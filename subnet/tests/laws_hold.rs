// SPDX-License-Identifier: Apache-2.0
//! Tests of [`Hold`]: which removals are carried out, which are held, and for how long.

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
fn the_removal_of_all_leases_is_held_until_the_grace_time_ends() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    assert_eq!(hold.next(), None);
    assert_eq!(hold.remove(ids(0..49), 49, t), ids(0..0));
    assert_eq!(hold.held().cloned().collect::<Vec<_>>(), ids(0..49));
    assert_eq!((hold.len(), hold.is_empty()), (49, false));
    assert_eq!(hold.next(), Some(t + GRACE));
    // Two nodes write their leases again.
    assert!(hold.cancel(&id(7)) && hold.cancel(&id(8)));
    assert!(!hold.cancel(&id(7)));
    assert_eq!(hold.due(t + GRACE - ms(1)), ids(0..0));
    let due = hold.due(t + GRACE);
    assert_eq!(due.len(), 47);
    assert!(!due.contains(&id(7)));
    assert_eq!((hold.held().count(), hold.next()), (0, None));
    assert_eq!((hold.len(), hold.is_empty()), (0, true));
    assert_eq!(hold.due(t + GRACE * 2), ids(0..0));
}

#[test]
fn half_of_the_leases_may_be_removed_at_once() {
    let t = Instant::now();
    assert_eq!(Hold::new(GRACE).remove(ids(0..25), 50, t).len(), 25);
    assert_eq!(Hold::new(GRACE).remove(ids(0..26), 50, t).len(), 0);
}

#[test]
fn fewer_than_three_removals_are_never_held() {
    let t = Instant::now();
    assert_eq!(Hold::new(GRACE).remove(ids(0..1), 1, t), ids(0..1));
    assert_eq!(Hold::new(GRACE).remove(ids(0..2), 2, t), ids(0..2));
    assert_eq!(Hold::new(GRACE).remove(ids(0..3), 3, t), ids(0..0));
    let mut one_by_one = Hold::new(GRACE);
    assert_eq!(one_by_one.remove(ids(0..1), 3, t), ids(0..1));
    assert_eq!(one_by_one.remove(ids(1..2), 2, t), ids(1..2));
    assert_eq!(one_by_one.remove(ids(2..3), 1, t), ids(0..0), "the third of three removals within 2 s must be held");
}

#[test]
fn single_removals_are_held_after_half_of_the_leases() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    let (mut peers, mut passed) = (50, 0);
    for n in 0..50 {
        // One removal every 30 ms: all fifty come within 1.5 s.
        let now = hold.remove(vec![id(n)], peers, t + ms(30) * n).len();
        (peers, passed) = (peers - now, passed + now);
    }
    assert_eq!((passed, hold.held().count()), (25, 25));
}

#[test]
fn removals_are_held_until_none_came_for_2_seconds() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    assert_eq!(hold.remove(ids(0..60), 100, t).len(), 0);
    // More removals follow slowly. On their own they would not be held.
    for n in 0..10 {
        assert_eq!(hold.remove(vec![id(60 + n)], 100, t + ms(1900) * (n + 1)).len(), 0);
    }
    // A single removal later is carried out at once, while the others are still held.
    assert_eq!(hold.remove(vec![id(80)], 100, t + ms(1900) * 10 + ms(2000)), [id(80)]);
    assert_eq!(hold.held().count(), 70);
}

#[test]
fn slow_removals_are_never_held() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    for n in 0..50 {
        assert_eq!(hold.remove(vec![id(n)], 50 - n as usize, t + ms(1001) * n).len(), 1, "{n}");
    }
}

#[test]
fn a_repeated_request_does_not_extend_the_grace_time() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    hold.remove(ids(0..10), 10, t);
    assert_eq!(hold.remove(ids(0..10), 10, t + ms(60_000)), ids(0..0));
    assert_eq!(hold.remove(vec![id(3), id(3)], 10, t + ms(60_000)), ids(0..0));
    assert_eq!(hold.next(), Some(t + GRACE));
    assert_eq!(hold.due(t + GRACE).len(), 10);
}

#[test]
fn with_a_grace_time_of_zero_nothing_is_held() {
    let (mut hold, t) = (Hold::new(Duration::ZERO), Instant::now());
    assert_eq!(hold.remove(ids(0..50), 50, t).len(), 50);
    assert_eq!((hold.held().count(), hold.next()), (0, None));
}

#[test]
fn removals_are_held_after_suspect_even_if_they_are_few() {
    let (mut hold, t) = (Hold::new(GRACE), Instant::now());
    hold.suspect(t);
    assert_eq!(hold.remove(ids(0..2), 2, t), ids(0..0), "removals after suspect must be held");
    assert!(hold.cancel(&id(0)) && hold.cancel(&id(1)));
    assert_eq!(hold.remove(ids(0..1), 2, t + ms(4_000)), ids(0..1), "a removal 4 s later must not be held");
    let mut off = Hold::new(Duration::ZERO);
    off.suspect(t);
    assert_eq!(off.remove(ids(0..2), 2, t), ids(0..2), "with a grace time of zero, suspect must have no effect");
}

proptest! {
    /// Each requested removal is carried out exactly once, unless the lease comes back.
    #[test]
    fn each_removal_is_carried_out_once_or_cancelled(steps in proptest::collection::vec((0u32..30, 1u32..8, 0u64..3000, any::<bool>()), 1..40)) {
        let (mut hold, mut now) = (Hold::new(ms(10_000)), Instant::now());
        let mut alive: BTreeSet<Id> = ids(0..30).into_iter().collect();
        let mut asked = BTreeSet::new();
        for (from, count, pause, back) in steps {
            now += ms(pause);
            for id in hold.due(now) {
                prop_assert!(asked.remove(&id) && alive.remove(&id));
            }
            if back {
                prop_assert_eq!(hold.cancel(&id(from)), asked.remove(&id(from)));
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
