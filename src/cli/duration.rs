// SPDX-License-Identifier: Apache-2.0
//! Parses durations and booleans in the form of Go.

use std::time::Duration;

/// The longest duration that is accepted: a hundred years. The agent adds durations to the time, which has an end, too.
pub const LONGEST: Duration = Duration::from_hours(100 * 365 * 24);

/// Why a value on the command line cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadValue {
    /// It is not a duration.
    #[error("{0:?} is not a duration: write 10 (seconds), 10s, 500ms, 5m or 1h30m")]
    Duration(String),
    /// It is longer than a hundred years.
    #[error("{0:?} is too long: give at most 876000h, which is a hundred years")]
    TooLong(String),
    /// It is not a boolean.
    #[error("{0:?} is neither true nor false")]
    Boolean(String),
}

/// Parses a duration such as `10` (seconds), `10s`, `5m`, `24h`, `1h30m`, `500ms` or `0`.
///
/// # Errors
/// The text is not a duration, or the duration is longer than a hundred years.
pub fn duration(text: &str) -> Result<Duration, BadValue> {
    let parsed = parse(text)?;
    if parsed > LONGEST { Err(BadValue::TooLong(text.to_owned())) } else { Ok(parsed) }
}

fn parse(text: &str) -> Result<Duration, BadValue> {
    let bad = || BadValue::Duration(text.to_owned());
    if let Ok(seconds) = text.parse::<u64>() {
        return Ok(Duration::from_secs(seconds));
    }
    let mut total = Duration::ZERO;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
        let number: u64 = rest[..digits].parse().map_err(|_| bad())?;
        let unit_end = rest[digits..].find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |at| digits + at);
        let millis: u64 = match &rest[digits..unit_end] {
            "ms" => 1,
            "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(bad()),
        };
        let part = number.checked_mul(millis).map(Duration::from_millis).ok_or_else(bad)?;
        total = total.checked_add(part).ok_or_else(bad)?;
        rest = &rest[unit_end..];
    }
    if text.is_empty() { Err(bad()) } else { Ok(total) }
}

/// Parses a boolean as Go's strconv.ParseBool does.
///
/// # Errors
/// The text is not a boolean.
pub fn boolean(text: &str) -> Result<bool, BadValue> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(BadValue::Boolean(text.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_the_form_of_go() {
        let ok = [("10", 10_000), ("10s", 10_000), ("5m", 300_000), ("1h30m", 5_400_000), ("500ms", 500), ("0", 0)];
        for (text, millis) in ok {
            assert_eq!(duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "s", "10x", "-1", "1.5s", "10s5", "99999999999999999999h", "18446744073709551615h"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }

    /// The agent would panic when it adds such a duration to the time.
    #[test]
    fn a_duration_of_more_than_a_hundred_years_is_refused() {
        assert_eq!(duration("876000h"), Ok(LONGEST));
        for text in ["876000h1ms", "3153600001", "18446744073709551615", "18446744073709551615ms"] {
            assert_eq!(duration(text), Err(BadValue::TooLong(text.to_owned())), "{text}");
        }
    }

    #[test]
    fn booleans_have_the_form_of_go() {
        for (words, wanted) in
            [(["1", "t", "T", "true", "TRUE", "True"], true), (["0", "f", "F", "false", "FALSE", "False"], false)]
        {
            assert!(words.iter().all(|word| boolean(word) == Ok(wanted)), "{wanted}");
        }
        for word in ["yes", "", "2", "tRUE"] {
            assert!(boolean(word).is_err(), "{word}");
        }
    }
}
