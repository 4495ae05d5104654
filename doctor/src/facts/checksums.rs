// SPDX-License-Identifier: Apache-2.0
//! Packets that arrive with wrong checksums, by the counters of the kernel. They begin with the network namespace, so an old fault stays in them.

use std::fs;

/// Fewer packets with a wrong checksum than this are not many.
const MIN_WRONG: u64 = 10;
/// Packets with a wrong checksum are many from one in this number.
const ONE_WRONG_IN: u64 = 1000;

/// Packets of a protocol that were received with a wrong checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChecksumErrors {
    /// The protocol, as /proc/net/snmp names it.
    pub protocol: &'static str,
    /// Number of packets with a wrong checksum since the start.
    pub wrong: u64,
    /// Number of packets since the start.
    pub received: u64,
    /// Number of packets with a wrong checksum that arrived during the examination.
    pub recent: u64,
}

impl ChecksumErrors {
    /// Returns true if many packets since the start had a wrong checksum.
    pub(crate) fn are_many(&self) -> bool {
        self.wrong >= MIN_WRONG && self.wrong * ONE_WRONG_IN >= self.received
    }

    /// Returns true if there were many, and none arrived during the examination.
    pub(crate) fn are_old(&self) -> bool {
        self.are_many() && self.recent == 0
    }
}

/// Reads the counters.
pub(super) fn read() -> Vec<ChecksumErrors> {
    counters(&fs::read_to_string("/proc/thread-self/net/snmp").unwrap_or_default())
}

/// Returns the later counters, with what has arrived since the first ones.
pub(super) fn since(first: &[ChecksumErrors], later: Vec<ChecksumErrors>) -> Vec<ChecksumErrors> {
    let recent = |later: &ChecksumErrors| {
        let before = first.iter().find(|first| first.protocol == later.protocol);
        before.map_or(0, |before| later.wrong.saturating_sub(before.wrong))
    };
    later.into_iter().map(|one| ChecksumErrors { recent: recent(&one), ..one }).collect()
}

/// Reads the counters of /proc/net/snmp: for each protocol a line with names, and one with values.
fn counters(text: &str) -> Vec<ChecksumErrors> {
    let counter = |protocol: &str, name: &str| {
        let mut lines = text.lines().filter(|line| line.split(':').next() == Some(protocol));
        let (names, values) = (lines.next()?, lines.next()?);
        let at = names.split_whitespace().position(|word| word == name)?;
        values.split_whitespace().nth(at)?.parse::<u64>().ok()
    };
    let one = |(protocol, received): (&'static str, &str)| {
        let (wrong, received) = (counter(protocol, "InCsumErrors")?, counter(protocol, received)?);
        Some(ChecksumErrors { protocol, wrong, received, recent: 0 })
    };
    [("Icmp", "InMsgs"), ("Tcp", "InSegs"), ("Udp", "InDatagrams")].into_iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_wrong_checksums_are_read_for_each_protocol() {
        let text = "Ip: Forwarding InReceives\nIp: 1 9\nIcmp: InMsgs InErrors InCsumErrors\nIcmp: 100 20 7\n\
                    Tcp: InSegs InCsumErrors\nTcp: 5 0\nUdp: InDatagrams\nUdp: 3\n";
        let icmp = ChecksumErrors { protocol: "Icmp", wrong: 7, received: 100, recent: 0 };
        let wanted = [icmp.clone(), ChecksumErrors { protocol: "Tcp", wrong: 0, received: 5, recent: 0 }];
        assert_eq!(counters(text), wanted, "an old kernel has no counter for udp");
        assert_eq!(counters(""), []);
        let later = counters(&text.replace("100 20 7", "104 20 9"));
        assert_eq!(since(&wanted, later)[0], ChecksumErrors { wrong: 9, received: 104, recent: 2, ..icmp });
    }

    #[test]
    fn wrong_checksums_are_many_from_one_in_a_thousand() {
        for (wrong, received, many) in [(9, 9, false), (10, 10_000, true), (10, 10_001, false), (5000, 6000, true)] {
            for recent in [0, 1] {
                let errors = ChecksumErrors { protocol: "Icmp", wrong, received, recent };
                assert_eq!((errors.are_many(), errors.are_old()), (many, many && recent == 0), "{errors:?}");
            }
        }
    }
}
