// SPDX-License-Identifier: Apache-2.0
//! How often a node looks at everything though nobody told it to (docs/adr/002-audits.md).

use std::time::Duration;

use nix::time::ClockId;

/// Audits may use one part in this many of a core.
const SHARE: u32 = 2500;
/// An audit of this CPU time is not put off: once in the default interval of 10 s it is just this share.
const CHEAP: Duration = Duration::from_millis(4);
/// An audit is put off no longer than this, whatever it costs.
const LONGEST: Duration = Duration::from_secs(300);

/// CPU time of this thread, as it passes. (Time on the clock would count what others do to a busy machine.)
pub(super) struct Cost(Option<Duration>);

impl Cost {
    pub(super) fn begin() -> Cost {
        Cost(now())
    }

    /// Since [`Cost::begin`].
    pub(super) fn so_far(&self) -> Duration {
        self.0.zip(now()).map_or(Duration::ZERO, |(begin, end)| end.saturating_sub(begin))
    }
}

fn now() -> Option<Duration> {
    ClockId::CLOCK_THREAD_CPUTIME_ID.now().ok().map(Duration::from)
}

/// Until the next audit, when one of them costs so much CPU time.
pub(super) fn interval(resync: Duration, cost: Duration) -> Duration {
    let stretched = if cost <= CHEAP { Duration::ZERO } else { (cost * SHARE).min(LONGEST) };
    resync.max(stretched)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn what_audits_cost_stretches_the_interval() {
        let (ms, s) = (Duration::from_millis, Duration::from_secs);
        assert_eq!(interval(s(10), ms(4)), s(10));
        assert_eq!(interval(s(1), ms(4)), s(1), "whoever wants it more often gets it");
        assert_eq!(interval(s(10), ms(30)), s(75));
        assert_eq!(interval(s(10), ms(900)), s(300), "sooner or later");
        assert_eq!(interval(s(3600), ms(900)), s(3600));
    }

    #[test]
    fn only_work_costs() {
        let (cost, (_silent, news)) = (Cost::begin(), mpsc::channel::<()>());
        let _ = news.recv_timeout(Duration::from_millis(50));
        assert!(cost.so_far() < Duration::from_millis(40), "asleep");
        while cost.so_far() < Duration::from_millis(2) {
            std::hint::spin_loop();
        }
    }
}
