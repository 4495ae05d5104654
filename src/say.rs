// SPDX-License-Identifier: Apache-2.0
//! Saying things to people: once, not once a second; an error with its causes on one line; a time as a date.

pub use weft_subnet::retry::{Patience, chain};

/// Text that may come from a peer, the store or a file, for a terminal: whatever would not be printed as itself (escape sequences,
/// marks that change the direction of writing) is shown as `\u{1b}`. Line breaks stay, and nothing is cut.
pub fn printable(text: &str) -> String {
    let escaped = |c: char| match c {
        '\n' | '"' | '\'' | '\\' => (Some(c), None),
        _ => (None, Some(c.escape_debug())),
    };
    text.chars().map(escaped).flat_map(|(plain, other)| plain.into_iter().chain(other.into_iter().flatten())).collect()
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
