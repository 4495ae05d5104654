// SPDX-License-Identifier: Apache-2.0
//! The queues in which netfilter hands packets to programs (the target NFQUEUE of iptables, `queue` of nftables). The kernel drops every packet
//! for a queue that no program reads, unless the rule says "bypass" (`nf_queue` in net/netfilter/nf_queue.c).

use std::fs;
use std::io;
use std::path::Path;

/// The queues that programs read, one on each line, of this network namespace. The first word is the number of the queue.
const READERS: &str = "/proc/thread-self/net/netfilter/nfnetlink_queue";

/// What is said about a rule whose queue no program reads.
pub const UNREAD: &str = " (no program reads this queue)";

/// The queues to which a rule sends packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queue {
    /// The first one.
    pub first: u16,
    /// The last one. Each connection has one of them.
    pub last: u16,
    /// Without a program, the packet goes on behind the chain.
    pub bypass: bool,
}

/// Returns the numbers of the queues that programs read. `None` if they are not known.
pub fn readers() -> Option<Vec<u16>> {
    let has_netfilter = Path::new(READERS).parent().is_some_and(Path::is_dir);
    numbers(fs::read_to_string(READERS), has_netfilter)
}

/// Returns the numbers in the list. `has_netfilter` says whether its directory is there.
fn numbers(list: io::Result<String>, has_netfilter: bool) -> Option<Vec<u16>> {
    match list {
        Ok(text) => Some(text.lines().filter_map(number).collect()),
        // Without the module that hands packets to programs, the rest of netfilter is there.
        Err(error) if error.kind() == io::ErrorKind::NotFound && has_netfilter => Some(Vec::new()),
        // Only root may read the list.
        Err(_) => None,
    }
}

fn number(line: &str) -> Option<u16> {
    line.split_whitespace().next()?.parse().ok()
}

impl Queue {
    /// Reads the options of a rule of iptables. The target QUEUE is NFQUEUE with queue 0.
    pub fn of_words(target: &str, spec: &[String]) -> Option<Queue> {
        let behind = |option: &str| spec.iter().skip_while(|word| *word != option).nth(1);
        let (first, last) = match (target, behind("--queue-balance"), behind("--queue-num")) {
            ("QUEUE", ..) => (0, 0),
            ("NFQUEUE", Some(range), _) => {
                let (first, last) = range.split_once(':')?;
                (first.parse().ok()?, last.parse().ok()?)
            }
            ("NFQUEUE", None, Some(number)) => (number.parse().ok()?, number.parse().ok()?),
            ("NFQUEUE", None, None) => (0, 0),
            _ => return None,
        };
        Some(Queue { first, last, bypass: spec.iter().any(|word| word == "--queue-bypass") })
    }

    /// Reads `struct xt_NFQ_info`, whose later versions have more members: the first queue, the number of queues, and flags.
    pub fn of_target(info: &[u8]) -> Option<Queue> {
        let member = |at: usize| Some(u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?));
        let first = member(0)?;
        let count = member(2).unwrap_or(1).max(1);
        Some(Queue { first, last: first.checked_add(count - 1)?, bypass: member(4).unwrap_or(0) & 1 != 0 })
    }

    /// Returns whether the kernel drops the packet, or `None` if a program decides about it. `readers` are the queues that programs read, if they are
    /// known.
    pub fn drops(self, readers: Option<&[u16]>) -> Option<bool> {
        let is_read = readers?.iter().any(|number| (self.first..=self.last).contains(number));
        (!is_read).then_some(!self.bypass)
    }
}

#[cfg(test)]
mod tests {
    use weft_cni::iptables::words;

    use super::*;

    #[test]
    fn the_queues_of_a_rule_are_read_from_its_words_and_from_its_bytes() {
        let of = |rule: &str| Queue::of_words(if rule.contains("NFQUEUE") { "NFQUEUE" } else { "QUEUE" }, &words(rule));
        for (rule, wanted) in [
            ("-p udp -j NFQUEUE --queue-num 5", Some((5, 5, false))),
            ("-j NFQUEUE --queue-num 5 --queue-bypass", Some((5, 5, true))),
            ("-j NFQUEUE --queue-balance 2:4 --queue-cpu-fanout", Some((2, 4, false))),
            ("-j NFQUEUE", Some((0, 0, false))),
            ("-j QUEUE", Some((0, 0, false))),
            ("-j NFQUEUE --queue-num many", None),
        ] {
            let wanted = wanted.map(|(first, last, bypass)| Queue { first, last, bypass });
            assert_eq!(of(rule), wanted, "{rule}");
        }
        let bytes = |members: &[u16]| members.iter().flat_map(|one| one.to_ne_bytes()).collect::<Vec<u8>>();
        assert_eq!(Queue::of_target(&bytes(&[7])), Some(Queue { first: 7, last: 7, bypass: false }));
        assert_eq!(Queue::of_target(&bytes(&[7, 3, 1])), Some(Queue { first: 7, last: 9, bypass: true }));
        assert_eq!(Queue::of_target(&bytes(&[7, 1, 2])), Some(Queue { first: 7, last: 7, bypass: false }));
        assert_eq!(Queue::of_target(&[7]), None);
    }

    #[test]
    fn a_list_that_may_not_be_read_says_nothing() {
        let list =
            "    5   4213     0 2 65535     0     0        0  1\n    7   4213     0 2 65535     0     0        0  1\n";
        assert_eq!(numbers(Ok(list.to_owned()), true), Some(vec![5, 7]));
        let failed = |kind: io::ErrorKind, has_netfilter| numbers(Err(kind.into()), has_netfilter);
        assert_eq!(failed(io::ErrorKind::NotFound, true), Some(Vec::new()), "the module is not loaded");
        assert_eq!(failed(io::ErrorKind::NotFound, false), None);
        assert_eq!(failed(io::ErrorKind::PermissionDenied, true), None);
    }

    #[test]
    fn only_a_queue_that_is_known_to_have_no_reader_decides() {
        let queue = Queue { first: 2, last: 4, bypass: false };
        assert_eq!(queue.drops(None), None, "the readers are not known");
        assert_eq!(queue.drops(Some(&[1, 5])), Some(true));
        assert_eq!(Queue { bypass: true, ..queue }.drops(Some(&[])), Some(false));
        assert_eq!(queue.drops(Some(&[3])), None, "a program decides");
        assert_eq!(number("    5   4213     0 2 65535     0     0        0  1"), Some(5));
    }
}
