// SPDX-License-Identifier: Apache-2.0
//! Packets that were dropped because another packet took their entry in connection tracking at the same moment. With services, these are nearly always
//! queries of DNS: a pod asks for IPv4 and IPv6 at once, from one socket, and kube-proxy leads both packets to endpoints.
//!
//! A kernel that counts the clashes which it resolves (`clashres`, since Linux 5.10) loses no such query. What it still drops are other packets, such as
//! a second SYN of TCP, so nothing is known from its counters.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// Fewer dropped packets than this are not many.
const MANY: u64 = 10;
/// How long further ones are waited for, if there were many.
const WAIT: Duration = Duration::from_secs(3);
/// How often the counters are read meanwhile.
const AGAIN: Duration = Duration::from_millis(200);

/// Packets that were dropped because of a clash.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Clashes {
    /// Their number since the network namespace was made.
    pub lost: u64,
    /// Number of those during the examination.
    pub recent: u64,
}

impl Clashes {
    /// Returns true if there were many, and further ones come.
    pub(crate) fn go_on(self) -> bool {
        self.lost >= MANY && self.recent > 0
    }
}

/// Reads the counters. If there were many such packets, it waits for further ones. `None` if nothing is known.
#[expect(clippy::disallowed_methods, reason = "the pause between two readings of counters that nothing announces")]
pub(super) fn read() -> Option<Clashes> {
    let lost = || lost(&fs::read_to_string("/proc/thread-self/net/stat/nf_conntrack").ok()?);
    let (first, end) = (lost()?, Instant::now() + WAIT);
    let mut now = Clashes { lost: first, recent: 0 };
    while now.lost >= MANY && now.recent == 0 && Instant::now() < end {
        thread::sleep(AGAIN);
        let later = lost()?;
        now = Clashes { lost: later, recent: later.saturating_sub(first) };
    }
    Some(now)
}

/// Reads the number of dropped packets from the statistics: a line of names, and for each CPU one of hexadecimal numbers. Older kernels count a clash that
/// they resolve as `insert_failed`, too, and a full table as `drop`, so what both count is certain.
fn lost(text: &str) -> Option<u64> {
    let names: Vec<&str> = text.lines().next()?.split_whitespace().collect();
    let sum = |wanted: &str| {
        let at = names.iter().position(|name| *name == wanted)?;
        let number = |line: &str| u64::from_str_radix(line.split_whitespace().nth(at)?, 16).ok();
        Some(text.lines().skip(1).filter_map(number).sum::<u64>())
    };
    if names.contains(&"clashres") {
        return None;
    }
    Some(sum("insert_failed")?.min(sum("drop")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &str =
        "entries  searched found new invalid ignore delete delete_list insert insert_failed drop early_drop icmp_error";

    #[test]
    fn what_both_counters_of_all_cpus_have_was_certainly_dropped() {
        let line = |failed: &str, dropped: &str| format!("0000001f 0 0 0 0 0 0 0 0 {failed} {dropped} 0 0\n");
        let text = |lines: &str| format!("{NAMES}\n{lines}");
        assert_eq!(lost(&text(&[line("00000010", "00000002"), line("00000001", "00000008")].concat())), Some(10));
        assert_eq!(lost(&text(&line("00000003", "000000ff"))), Some(3), "the table was full");
        assert_eq!(lost(&text(&line("000000ff", "00000000"))), Some(0), "the kernel resolved them");
        let newer = text(&line("00000010", "00000010")).replace("searched", "clashres");
        assert_eq!(lost(&newer), None, "such a kernel loses no query");
        assert_eq!(lost(""), None);
    }

    #[test]
    fn only_many_that_go_on_count() {
        for (lost, recent, wanted) in [(9, 9, false), (10, 0, false), (10, 1, true)] {
            assert_eq!(Clashes { lost, recent }.go_on(), wanted, "{lost} {recent}");
        }
    }
}
