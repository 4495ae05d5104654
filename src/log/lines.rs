// SPDX-License-Identifier: Apache-2.0
//! Saying things to people: once, not once a second; an error with its causes on one line; a time as a date.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use weft_subnet::lease::Id;

pub use weft_subnet::retry::{Reminder, chain};

/// Text that may come from a peer, the store or a file, for a terminal: whatever would not be printed as itself (escape sequences,
/// marks that change the direction of writing) is shown as `\u{1b}`. Line breaks stay, and nothing is cut.
pub fn printable(text: &str) -> String {
    let escaped = |c: char| match c {
        '\n' | '"' | '\'' | '\\' => (Some(c), None),
        _ => (None, Some(c.escape_debug())),
    };
    text.chars().map(escaped).flat_map(|(plain, other)| plain.into_iter().chain(other.into_iter().flatten())).collect()
}

/// A lease has one line in this time, whatever is said of it.
const EVERY: Duration = Duration::from_secs(60);
/// Lines that may be said at once, and then one in this time.
const AT_ONCE: u32 = 100;
const ONE_IN: Duration = Duration::from_secs(6);

/// Lines that may be said: [`AT_ONCE`], then one in [`ONE_IN`].
#[derive(Debug, Default)]
pub struct Allowance {
    /// When all that was said is paid for.
    paid_at: Option<Instant>,
}

impl Allowance {
    /// Takes one line out; false when there is none.
    pub fn take(&mut self, now: Instant) -> bool {
        let owed = self.paid_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        if owed > ONE_IN * (AT_ONCE - 1) {
            return false;
        }
        self.paid_at = Some(now + owed + ONE_IN);
        true
    }
}

/// What was said of leases. A lease that gives reason for a line a thousand times a minute gets one, ten thousand leases get a few, and
/// the others are counted. Keeps no more leases than it has spoken of within a minute.
#[derive(Debug, Default)]
pub struct Lines {
    allowance: Allowance,
    said: HashMap<Id, Said>,
    /// Lines about leases that nothing was said of.
    left_out: u64,
    left_out_until: Option<Instant>,
}

/// Of one lease.
#[derive(Debug)]
struct Said {
    at: Instant,
    /// Lines that were left out since.
    repeats: u64,
}

impl Lines {
    /// May this lease have a line now? One that may not is counted.
    pub fn due(&mut self, id: &Id, now: Instant) -> bool {
        if let Some(said) = self.said.get_mut(id) {
            if now - said.at < EVERY {
                said.repeats += 1;
                return false;
            }
            // The number is said first.
            self.say_left_out(now);
        }
        if self.allowance.take(now) {
            self.said.retain(|_, said| said.repeats > 0 || now - said.at < EVERY);
            self.said.insert(id.clone(), Said { at: now, repeats: 0 });
            return true;
        }
        self.left_out += 1;
        self.left_out_until.get_or_insert(now + EVERY);
        false
    }

    /// Says that a lease is not believed.
    pub fn say_aside(&mut self, id: &Id, reason: &str) {
        if self.due(id, Instant::now()) {
            tracing::warn!(lease = %id, reason, "lease set aside");
        }
    }

    /// When to call [`Lines::say_left_out`].
    pub fn next(&self) -> Option<Instant> {
        let repeated = self.said.values().filter(|said| said.repeats > 0).map(|said| said.at + EVERY);
        repeated.chain(self.left_out_until).min()
    }

    /// Says how many lines were left out, when a minute is over.
    pub fn say_left_out(&mut self, now: Instant) {
        for (id, lines) in self.repeated(now) {
            tracing::warn!(lease = %id, lines, "more lines about this lease within a minute were not logged");
        }
        if let Some(lines) = self.others(now) {
            tracing::warn!(
                lines,
                "lines about other leases within a minute were not logged: weft status has all of them"
            );
        }
    }

    fn repeated(&mut self, now: Instant) -> Vec<(Id, u64)> {
        let due = |said: &Said| said.repeats > 0 && now - said.at >= EVERY;
        self.said.extract_if(|_, said| due(said)).map(|(id, said)| (id, said.repeats)).collect()
    }

    fn others(&mut self, now: Instant) -> Option<u64> {
        self.left_out_until.take_if(|at| *at <= now)?;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// A time of the wall clock, in seconds since 1970: `2026-11-21 19:05 UTC`.
pub fn date(seconds: u64) -> String {
    let (days, minutes) = (seconds / 86_400, seconds % 86_400 / 60);
    // Days are counted from 1 March of the year 0: the leap day is then the last of its year. Eras have 400 years.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    format!("{:04}-{month:02}-{day:02} {:02}:{:02} UTC", era * 400 + year, minutes / 60, minutes % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_reaches_a_terminal_is_no_command_to_it() {
        let text = "subnet 'a' of \"b\\c\" \u{1b}[2J\u{202e}\u{7f}\r\nnext";
        assert_eq!(printable(text), "subnet 'a' of \"b\\c\" \\u{1b}[2J\\u{202e}\\u{7f}\\r\nnext");
    }

    #[test]
    fn a_lease_has_one_line_a_minute_and_the_others_are_counted() {
        let (mut lines, start) = (Lines::default(), Instant::now());
        let id: Id = "restless".into();
        assert!(lines.due(&id, start));
        assert_eq!(lines.next(), None, "nothing was left out");
        let more = (1..1000).filter(|n| lines.due(&id, start + Duration::from_millis(59 * n))).count();
        assert_eq!((more, lines.next()), (0, Some(start + EVERY)));
        assert!(lines.due(&"another".into(), start));
        assert_eq!(lines.repeated(start + EVERY), [(id.clone(), 999)]);
        assert_eq!((lines.next(), lines.repeated(start + EVERY)), (None, vec![]));
        assert!(lines.due(&id, start + EVERY));
    }

    #[test]
    fn ten_thousand_leases_have_a_hundred_lines_and_the_others_are_counted() {
        let (mut lines, start) = (Lines::default(), Instant::now());
        let said =
            |lines: &mut Lines, now| (0..10_000).filter(|n| lines.due(&format!("lease {n}").into(), now)).count();
        assert_eq!(said(&mut lines, start), 100);
        assert_eq!(said(&mut lines, start), 0);
        let repeats: u64 = lines.said.values().map(|said| said.repeats).sum();
        assert_eq!((lines.left_out, repeats), (19_800, 100));
        let later = start + EVERY;
        assert_eq!((lines.next(), lines.others(later)), (Some(later), Some(19_800)));
        assert_eq!(lines.repeated(later).len(), 100);
        assert_eq!((said(&mut lines, later), lines.said.len()), (10, 10), "ten a minute from then on");
        assert_eq!(said(&mut lines, start + 100 * EVERY), 100, "and as many as before after a quiet time");
        assert!(lines.said.len() <= 110);
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, wanted) in [
            (0, "1970-01-01 00:00 UTC"),
            (951_782_399, "2000-02-28 23:59 UTC"),
            (951_782_400, "2000-02-29 00:00 UTC"),
            (951_868_800, "2000-03-01 00:00 UTC"),
            (1_795_288_000, "2026-11-21 19:06 UTC"),
            (4_107_542_400, "2100-03-01 00:00 UTC"),
        ] {
            assert_eq!(date(seconds), wanted);
        }
    }
}
