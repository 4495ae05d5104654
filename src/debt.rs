// SPDX-License-Identifier: Apache-2.0
//! Limits how often something happens: many times at once, and after that once in a while.

use std::time::Duration;

use tokio::time::Instant;

/// What was used lately and is not paid for yet. Each use has a cost, which is a time, and time pays for it. Whoever limits the uses chooses a
/// credit: the next use is allowed while at most this much is owed. (This is the algorithm GCRA of ITU-T recommendation I.371.)
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Debt {
    /// Nothing is owed from this time on. `None`: nothing was used yet.
    paid_at: Option<Instant>,
}

impl Debt {
    /// Adds the cost of one use.
    pub fn charge(&mut self, cost: Duration, now: Instant) {
        self.paid_at = Some(self.paid_at.map_or(now, |at| at.max(now)) + cost);
    }

    /// Returns true if nothing is owed.
    pub fn is_paid(&self, now: Instant) -> bool {
        self.paid_at.is_none_or(|at| at <= now)
    }

    /// Returns since when the next use is allowed with this credit, or `None` if it was allowed from the beginning.
    pub fn allowed_at(&self, credit: Duration) -> Option<Instant> {
        self.paid_at.and_then(|at| at.checked_sub(credit))
    }

    /// Returns true if the next use is allowed now with this credit.
    pub fn allows(&self, credit: Duration, now: Instant) -> bool {
        self.allowed_at(credit).is_none_or(|at| at <= now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credit_can_be_used_at_once_and_comes_back_with_time() {
        let (second, start) = (Duration::from_secs(1), Instant::now());
        let (mut debt, credit) = (Debt::default(), 2 * second);
        assert!(debt.is_paid(start));
        for _ in 0..3 {
            assert!(debt.allows(credit, start));
            debt.charge(second, start);
        }
        assert!(!debt.allows(credit, start));
        assert_eq!(debt.allowed_at(credit), Some(start + second));
        assert!(debt.allows(credit, start + second));
        assert!(!debt.is_paid(start + 2 * second) && debt.is_paid(start + 3 * second));
        // A long time without a use does not give more than the credit.
        let later = start + 3600 * second;
        let uses = (0..10).take_while(|_| {
            debt.allows(credit, later) && {
                debt.charge(second, later);
                true
            }
        });
        assert_eq!(uses.count(), 3);
    }
}
