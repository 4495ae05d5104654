// SPDX-License-Identifier: Apache-2.0
//! A clock that is certainly wrong: what it says was before weft existed. A machine without a clock that goes on while it is off begins
//! in 1970, or when its system was made.

use std::time::{Duration, SystemTime};

/// The beginning of the year in which weft was made, in seconds since 1970.
const FIRST_YEAR: u64 = 1_767_225_600;

/// Returns what the clock says, in seconds since 1970, if that cannot be.
pub(super) fn read() -> Option<u64> {
    // A time before 1970 is none either.
    impossible(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO))
}

fn impossible(since_1970: Duration) -> Option<u64> {
    Some(since_1970.as_secs()).filter(|now| *now < FIRST_YEAR)
}

#[cfg(test)]
mod tests {
    use super::super::certificates::date;
    use super::*;

    #[test]
    fn only_a_time_before_weft_is_impossible() {
        assert_eq!(date(FIRST_YEAR), "2026-01-01T00:00:00Z");
        assert_eq!(impossible(Duration::from_secs(200)), Some(200));
        assert_eq!(impossible(Duration::from_secs(FIRST_YEAR - 1)), Some(FIRST_YEAR - 1));
        assert_eq!(impossible(Duration::from_secs(FIRST_YEAR)), None);
    }
}
