// SPDX-License-Identifier: Apache-2.0
//! Packets that were dropped because another packet took their entry in connection tracking at the same moment. With services, these are nearly always
//! queries of DNS: a pod asks for IPv4 and IPv6 at once, from one socket, and kube-proxy leads both packets to endpoints.
//!
//! A kernel that counts the clashes which it resolves (`clashres`, since Linux 5.10) loses no such query. What it still drops are other packets, such as
//! a second SYN of TCP, so nothing is known from its counters.

use std::fs;

/// Fewer dropped packets than this are not many.
const MANY: u64 = 10;

/// Packets that were dropped because of a clash.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Clashes {
    /// The largest number that there can be since the network namespace was made.
    pub lost: u64,
    /// Number of those during the examination.
    pub recent: u64,
}

impl Clashes {
    /// Returns true if there were many, and further ones come.
    pub(crate) fn go_on(self) -> bool {
        self.lost >= MANY && self.recent > 0
    }

    /// Returns true if there were many, and none came during the examination.
    pub(super) fn are_old(self) -> bool {
        self.lost >= MANY && self.recent == 0
    }
}

/// What one CPU has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CpuCounters {
    insert_failed: u64,
    dropped: u64,
}

impl CpuCounters {
    /// Returns how many packets a clash lost at most. The CPU that drops such a packet counts it in both counters. But each of them counts something else,
    /// too: `insert_failed` the clashes that an older kernel resolves, and `drop` a full table.
    fn lost(self) -> u64 {
        self.insert_failed.min(self.dropped)
    }

    /// Returns what was counted after `first`.
    fn since(self, first: CpuCounters) -> CpuCounters {
        CpuCounters {
            insert_failed: self.insert_failed.saturating_sub(first.insert_failed),
            dropped: self.dropped.saturating_sub(first.dropped),
        }
    }
}

/// Reads the counters of all CPUs. `None` if nothing is known from them.
pub(super) fn read() -> Option<Vec<CpuCounters>> {
    counters(&fs::read_to_string("/proc/thread-self/net/stat/nf_conntrack").ok()?)
}

/// Returns what the counters say that were read first and now.
pub(super) fn clashes(first: &[CpuCounters], now: &[CpuCounters]) -> Clashes {
    let recent = first.iter().zip(now).map(|(first, now)| now.since(*first).lost());
    Clashes { lost: now.iter().map(|cpu| cpu.lost()).sum(), recent: recent.sum() }
}

/// Reads the statistics: a line of names, and for each CPU one of hexadecimal numbers.
fn counters(text: &str) -> Option<Vec<CpuCounters>> {
    let names: Vec<&str> = text.lines().next()?.split_whitespace().collect();
    if names.contains(&"clashres") {
        return None;
    }
    let place = |wanted: &str| names.iter().position(|name| *name == wanted);
    let (insert_failed, dropped) = (place("insert_failed")?, place("drop")?);
    let cpu = |line: &str| {
        let number = |at: usize| u64::from_str_radix(line.split_whitespace().nth(at)?, 16).ok();
        Some(CpuCounters { insert_failed: number(insert_failed)?, dropped: number(dropped)? })
    };
    Some(text.lines().skip(1).filter_map(cpu).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &str =
        "entries  searched found new invalid ignore delete delete_list insert insert_failed drop early_drop icmp_error";

    fn text(cpus: &[(&str, &str)]) -> String {
        let line = |(failed, dropped): &(&str, &str)| format!("0000001f 0 0 0 0 0 0 0 0 {failed} {dropped} 0 0\n");
        format!("{NAMES}\n{}", cpus.iter().map(line).collect::<String>())
    }

    #[test]
    fn a_lost_packet_is_in_both_counters_of_one_cpu() {
        let lost = |cpus: &[(&str, &str)]| {
            let now = counters(&text(cpus)).unwrap();
            clashes(&now, &now).lost
        };
        assert_eq!(lost(&[("00000010", "00000002"), ("00000001", "00000008")]), 3);
        assert_eq!(lost(&[("00000003", "000000ff")]), 3, "the table was full");
        assert_eq!(lost(&[("000000ff", "00000000"), ("00000000", "000000ff")]), 0, "the kernel resolved them");
        let newer = text(&[("00000010", "00000010")]).replace("searched", "clashres");
        assert_eq!(counters(&newer), None, "such a kernel loses no query");
        assert_eq!(counters(""), None);
    }

    /// The table was full before, and only resolved clashes go on.
    #[test]
    fn what_only_one_counter_goes_on_to_count_is_not_recent() {
        let cpus = |failed: &str, dropped: &str| counters(&text(&[(failed, dropped)])).unwrap();
        let first = cpus("00000010", "000000ff");
        assert_eq!(clashes(&first, &cpus("00000020", "000000ff")), Clashes { lost: 32, recent: 0 });
        assert_eq!(clashes(&first, &cpus("00000020", "00000101")), Clashes { lost: 32, recent: 2 });
    }

    #[test]
    fn only_many_that_go_on_count() {
        for (lost, recent, go_on, are_old) in
            [(9, 9, false, false), (9, 0, false, false), (10, 0, false, true), (10, 1, true, false)]
        {
            let clashes = Clashes { lost, recent };
            assert_eq!((clashes.go_on(), clashes.are_old()), (go_on, are_old), "{clashes:?}");
        }
    }
}
