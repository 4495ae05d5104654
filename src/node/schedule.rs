// SPDX-License-Identifier: Apache-2.0
//! When the next audit is due, how soon a change in the kernel may lead to a full pass, and when systemd's watchdog wants
//! to hear from the agent.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Number of full passes within [`WINDOW`] that follow changes in the kernel at once. After that, the next one waits
/// [`PAUSE`] times as long as the last one took. So a program that rewrites links or routes all the time costs at most a
/// fifth of a core.
pub(super) const MAX_IN_WINDOW: usize = 6;
const WINDOW: Duration = Duration::from_secs(10);
/// The time between a conflict with another program and the audit that follows it. The next conflict within [`CALM`] waits twice as long.
const CONFLICT_PAUSE: Duration = Duration::from_secs(1);
/// If there was no conflict for this time after the audit, the pause is the first one again.
const CALM: Duration = Duration::from_secs(60);
/// The pause after a full pass, as a multiple of its duration.
pub(super) const PAUSE: u32 = 4;

/// The timers of a node.
#[derive(Debug)]
pub(super) struct Schedule {
    /// Time between two audits.
    pub(super) audit_interval: Duration,
    pub(super) next_audit: Instant,
    /// Why the next audit comes earlier than usual.
    early: Option<&'static str>,
    /// When full passes ended, within the window.
    pub(super) recent: VecDeque<Instant>,
    /// Changes in the kernel lead to no full pass before this time.
    pub(super) paused_until: Instant,
    /// How long the audit after the next conflict waits, if that conflict comes before this time.
    conflict: Option<(Instant, Duration)>,
    /// How often to send systemd's watchdog a message, and when to send the next one.
    watchdog: Option<(Duration, Instant)>,
}

impl Schedule {
    /// Returns a schedule in which an audit is due at once.
    pub(super) fn new(audit_interval: Duration, watchdog_interval: Option<Duration>, now: Instant) -> Schedule {
        let watchdog = watchdog_interval.map(|interval| (interval, now));
        Schedule {
            audit_interval,
            next_audit: now,
            early: None,
            recent: VecDeque::new(),
            paused_until: now,
            conflict: None,
            watchdog,
        }
    }

    /// Returns when something is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.watchdog.map(|(_, at)| at).into_iter().chain([self.next_audit]).min()
    }

    pub(super) fn audit_due(&self, now: Instant) -> bool {
        self.next_audit <= now
    }

    /// Plans the next usual audit. An event that an earlier one was for is forgotten, because everything has been compared since.
    pub(super) fn plan_audit(&mut self, now: Instant) {
        (self.next_audit, self.early) = (now + self.audit_interval, None);
    }

    /// Lets the next audit come at this time at the latest. `event` is what it is for.
    pub(super) fn audit_by(&mut self, at: Instant, event: &'static str) {
        if at < self.next_audit {
            (self.next_audit, self.early) = (at, Some(event));
        }
    }

    /// Lets an audit come soon after entries were left to it, because another program repeatedly changed them. That program may have ended:
    /// `ip route flush` goes on until it finds no route any more. If it goes on, the pauses grow to the usual time between two audits.
    pub(super) fn audit_after_conflict(&mut self, now: Instant) {
        let goes_on = |(until, _): &(Instant, Duration)| now < *until;
        let pause = self.conflict.filter(goes_on).map_or(CONFLICT_PAUSE, |(_, pause)| pause);
        let is_earlier = now + pause < self.next_audit;
        self.audit_by(now + pause, "another program repeatedly changed entries");
        // The program may change entries only after the audit has repaired them.
        self.conflict = Some((self.next_audit + CALM, if is_earlier { pause * 2 } else { pause }));
    }

    /// Lets the next audit come at this time and not before, because the kernel could not be read now.
    pub(super) fn retry_audit(&mut self, at: Instant) {
        (self.next_audit, self.early) = (at, Some("the kernel's tables could not be read before"));
    }

    /// Returns what the audit that is due now is for, if it is not a usual one.
    pub(super) fn take_event(&mut self) -> Option<&'static str> {
        self.early.take()
    }

    /// Returns true if a message to the watchdog is due, and plans the next one.
    pub(super) fn ping_due(&mut self, now: Instant) -> bool {
        let Some((interval, at)) = &mut self.watchdog else { return false };
        let due = *at <= now;
        if due {
            *at = now + *interval;
        }
        due
    }

    /// Takes notice that everything was compared, which has taken the time since `started`.
    pub(super) fn full_pass_ended(&mut self, started: Instant) {
        let now = Instant::now();
        self.recent.retain(|at| now - *at < WINDOW);
        self.recent.push_back(now);
        self.paused_until = if self.recent.len() > MAX_IN_WINDOW { now + (now - started) * PAUSE } else { now };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_each_conflict_the_audit_waits_twice_as_long_until_there_was_none_for_a_minute() {
        let second = Duration::from_secs(1);
        let mut now = Instant::now();
        let mut schedule = Schedule::new(200 * second, None, now);
        for pause in [1, 2, 4, 8, 16, 32, 64, 128, 200, 200] {
            schedule.plan_audit(now);
            schedule.audit_after_conflict(now);
            assert_eq!(schedule.next_audit, now + pause * second);
            let event = schedule.early;
            // The program changes entries until the audit comes.
            schedule.audit_after_conflict(now + second / 2);
            assert_eq!((schedule.next_audit, schedule.early), (now + pause * second, event), "one audit is enough");
            assert_eq!(event.is_some(), pause < 200);
            now = schedule.next_audit;
        }
        now += CALM;
        schedule.plan_audit(now);
        schedule.audit_after_conflict(now);
        assert_eq!(schedule.next_audit, now + second);
    }

    #[test]
    fn the_watchdog_is_pinged_once_in_its_interval() {
        let (now, interval) = (Instant::now(), Duration::from_secs(5));
        let hour = Duration::from_secs(3600);
        let mut schedule = Schedule::new(hour, Some(interval), now);
        schedule.plan_audit(now);
        assert!(schedule.ping_due(now));
        assert_eq!(schedule.next(), Some(now + interval), "the node wakes up for it");
        assert!(!schedule.ping_due(now + Duration::from_secs(4)));
        assert!(schedule.ping_due(now + interval));
        assert_eq!(schedule.next(), Some(now + 2 * interval));
        let mut without = Schedule::new(hour, None, now);
        without.plan_audit(now);
        assert!(!without.ping_due(now));
        assert_eq!(without.next(), Some(now + hour));
    }
}
