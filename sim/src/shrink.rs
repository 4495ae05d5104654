// SPDX-License-Identifier: Apache-2.0
//! Finds a short list of events that still leads to the same failure.

use crate::scenario::Scenario;

/// Returns the scenario without events that the failure does not need. `fails` runs a scenario. It is called at most `budget` times.
///
/// First large parts of the list are left out, then smaller ones, at last single events.
pub fn shrink(scenario: Scenario, mut budget: usize, mut fails: impl FnMut(&Scenario) -> bool) -> Scenario {
    let mut best = scenario;
    let mut size = best.events.len().div_ceil(2);
    while size > 0 {
        let mut at = 0;
        let mut removed = false;
        while at < best.events.len() && budget > 0 {
            let mut candidate = best.clone();
            let end = (at + size).min(candidate.events.len());
            candidate.events.drain(at..end);
            budget -= 1;
            if fails(&candidate) {
                (best, removed) = (candidate, true);
            } else {
                at += size;
            }
        }
        if budget == 0 {
            break;
        }
        size = if size > 1 { size.div_ceil(2) } else { usize::from(removed) };
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;
    use crate::scenario::Timed;

    #[test]
    fn only_the_events_that_the_failure_needs_are_left() {
        let events = (0..40).map(|at| Timed { at, event: Event::Compact }).collect();
        let scenario = Scenario { events, ..Scenario::of_seed(1) };
        let needs = |scenario: &Scenario| [7, 31].iter().all(|at| scenario.events.iter().any(|timed| timed.at == *at));
        let small = shrink(scenario.clone(), 1000, needs);
        assert_eq!(small.events.iter().map(|timed| timed.at).collect::<Vec<_>>(), [7, 31]);
        assert_eq!(shrink(scenario.clone(), 0, needs), scenario, "without runs nothing is left out");
    }
}
