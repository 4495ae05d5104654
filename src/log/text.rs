// SPDX-License-Identifier: Apache-2.0
//! Text for people: foreign text made safe for a terminal, and dates.

use std::fmt::Write;

use jiff::Timestamp;
use weft_subnet::text::escaped;

/// Number of columns that every terminal has.
const WIDTH: usize = 100;

/// Makes text that may come from a peer, the store or a file safe for a terminal. Characters that a terminal would not show as
/// themselves (escape sequences, marks that change the direction of writing) become `\u{1b}` and the like. Line breaks stay, and nothing
/// is cut.
pub fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => printable.push(c),
            _ => printable.extend(escaped(c)),
        }
    }
    printable
}

/// As [`printable`], for JSON: the text stays the same JSON, because only strings contain such characters.
pub fn printable_json(json: &str) -> String {
    let mut printable = String::with_capacity(json.len());
    for c in json.chars() {
        if c == '\n' || escaped(c).eq([c]) {
            printable.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(printable, "\\u{unit:04x}");
            }
        }
    }
    printable
}

/// As [`printable`], on one line: foreign text must not begin a line of its own.
pub fn one_line(text: &str) -> String {
    printable(&text.replace(['\n', '\r', '\t'], " "))
}

/// Writes foreign text in lines of at most 100 columns. The first one begins with `first`, the others with `next`. A word that is too long
/// for a line is broken.
pub fn wrapped(out: &mut String, first: &str, next: &str, text: &str) {
    let begin = |line: usize| if line == 0 { first } else { next };
    let room = |line: usize| WIDTH - begin(line).chars().count();
    let mut current = String::new();
    let mut lines: Vec<String> = Vec::new();
    for word in one_line(text).split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        let used = current.chars().count();
        if used > 0 && used + 1 + word.len() > room(lines.len()) {
            lines.push(std::mem::take(&mut current));
        }
        while word.len() > room(lines.len()) {
            lines.push(word.drain(..room(lines.len())).collect());
        }
        if !current.is_empty() {
            current.push(' ');
        }
        current.extend(word);
    }
    lines.push(current);
    for (at, line) in lines.iter().enumerate() {
        let _ = writeln!(out, "{}", format!("{}{line}", begin(at)).trim_end());
    }
}

/// Formats a time of the wall clock as `2026-11-21 19:05 UTC`. `seconds` is counted from the start of 1970.
pub fn date(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    match time {
        Some(time) => time.strftime("%Y-%m-%d %H:%M UTC").to_string(),
        // The calendar ends with the year 9999. A damaged file may contain such a time.
        None => format!("{seconds} s after 1970"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_that_control_a_terminal_are_escaped() {
        let text = "subnet 'a' of \"b\\c\" \u{1b}[2J\u{202e}\u{7f}\r\nnext";
        assert_eq!(printable(text), "subnet 'a' of \"b\\c\" \\u{1b}[2J\\u{202e}\\u{7f}\\r\nnext");
    }

    #[test]
    fn characters_that_control_a_terminal_are_escaped_in_json_and_its_values_stay() {
        let value = serde_json::json!({"a \u{9b}2J": ["\u{202e}\u{7f}\u{e0001} \"quoted\" \\ ü 🦀", 1.5, null]});
        let json = printable_json(&serde_json::to_string_pretty(&value).unwrap());
        assert!(
            json.contains("ü 🦀") && json.contains("\\u009b2J") && json.contains("\\u202e\\u007f\\udb40\\udc01"),
            "{json}"
        );
        assert_eq!(serde_json::from_str::<serde_json::Value>(&json).unwrap(), value);
    }

    /// The lines of `weft status rules` begin with nothing, and go on with an indent.
    #[test]
    fn no_line_is_wider_than_a_terminal_whichever_of_its_two_beginnings_is_longer() {
        let (words, long) = ("rule ".repeat(100), "x".repeat(1000));
        for (first, next) in [("", "    "), ("problem     ", ""), ("    ", "    ")] {
            for text in [&words, &long] {
                let mut out = String::new();
                wrapped(&mut out, first, next, text);
                let widest = out.lines().map(|line| line.chars().count()).max();
                assert!(widest.is_some_and(|widest| (WIDTH - 5..=WIDTH).contains(&widest)), "{out}");
                let letters = |text: &str| text.split_whitespace().collect::<String>();
                assert_eq!(letters(&out), letters(&format!("{first}{text}")), "nothing is lost");
                assert!(out.lines().skip(1).all(|line| line.starts_with(next)), "{out}");
            }
        }
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
            (u64::MAX, "18446744073709551615 s after 1970"),
        ] {
            assert_eq!(date(seconds), wanted);
        }
    }
}
