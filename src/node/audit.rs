// SPDX-License-Identifier: Apache-2.0
//! The time between two audits, which grows with their cost (docs/adr/002-audits.md).

use std::time::Duration;

use nix::time::ClockId;
use weft_subnet::outside::is_simulated;

/// Audits may use at most one part in this many of a core.
const SHARE: u32 = 5000;
/// The interval is not stretched for an audit that costs at most this CPU time, which is that share of the default
/// interval of 10 s.
const CHEAP: Duration = Duration::from_millis(2);
/// The interval is stretched at most to this time.
const MAX_INTERVAL: Duration = Duration::from_secs(300);

/// Measures the CPU time of this thread. The time on the clock would include the waiting for a busy CPU.
pub(super) struct Cost(Option<Duration>);

impl Cost {
    pub(super) fn begin() -> Cost {
        Cost(now())
    }

    /// Returns the CPU time since [`Cost::begin`].
    pub(super) fn so_far(&self) -> Duration {
        self.0.zip(now()).map_or(Duration::ZERO, |(begin, end)| end.saturating_sub(begin))
    }
}

fn now() -> Option<Duration> {
    if is_simulated() {
        return None;
    }
    ClockId::CLOCK_THREAD_CPUTIME_ID.now().ok().map(Duration::from)
}

/// Returns the time between two audits if one costs this CPU time. `resync` is what the flags ask for.
pub(super) fn interval(resync: Duration, cost: Duration) -> Duration {
    let stretched = if cost <= CHEAP { Duration::ZERO } else { (cost * SHARE).min(MAX_INTERVAL) };
    resync.max(stretched)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn costly_audits_run_less_often() {
        let (ms, s) = (Duration::from_millis, Duration::from_secs);
        assert_eq!(interval(s(10), ms(2)), s(10));
        assert_eq!(interval(s(1), ms(2)), s(1), "a shorter interval is the choice of the operator");
        assert_eq!(interval(s(10), ms(30)), s(150));
        assert_eq!(interval(s(10), ms(900)), s(300), "the interval has a limit");
        assert_eq!(interval(s(3600), ms(900)), s(3600));
    }

    #[test]
    fn waiting_is_no_cost() {
        let (cost, (_silent, news)) = (Cost::begin(), mpsc::channel::<()>());
        let _ = news.recv_timeout(Duration::from_millis(50));
        assert!(cost.so_far() < Duration::from_millis(40), "a sleeping thread uses no CPU time");
        while cost.so_far() < Duration::from_millis(2) {
            std::hint::spin_loop();
        }
    }
}
