// SPDX-License-Identifier: Apache-2.0
//! Agents that the kernel killed because there was no memory left, as the log of the kernel says (`__oom_kill_process` in mm/oom_kill.c). The next agent
//! knows nothing of it, and goes on as if nothing had happened.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use nix::libc;
use nix::time::{ClockId, clock_gettime};

/// The names under which an agent of weft runs.
pub(super) const AGENTS: [&str; 2] = ["weft", "flanneld"];
/// What happened longer ago is no news.
const RECENT: Duration = Duration::from_secs(3600);
/// The log of the kernel. Each read returns one record.
const LOG: &str = "/dev/kmsg";
/// The longest record, and the number of records that are read. The log has fewer.
const MAX_RECORD: usize = 8192;
const MAX_RECORDS: usize = 1 << 20;
/// The texts before the process ID: of a limit of a control group, and of the machine.
const OF_GROUP: &str = "Memory cgroup out of memory: Killed process ";
const OF_MACHINE: &str = "Out of memory: Killed process ";

/// A process that the kernel killed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryKill {
    /// Its name.
    pub name: String,
    /// Its process ID.
    pub pid: u32,
    /// How long ago.
    pub age: Duration,
    /// True if it had reached the limit of its control group, and false if the machine had no memory left.
    pub of_group: bool,
}

/// Returns the last process with one of these names that the kernel killed in the last hour, on the whole machine.
///
/// # Errors
/// There is no log, or this process may not read it.
pub fn read(names: &[&str]) -> io::Result<Option<MemoryKill>> {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_MONOTONIC)?);
    let mut log = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(LOG)?;
    let (mut record, mut last) = (vec![0; MAX_RECORD], None);
    for _ in 0..MAX_RECORDS {
        match log.read(&mut record) {
            Ok(size) => last = killed(&String::from_utf8_lossy(&record[..size]), names, now).or(last),
            // Records were overwritten before they were read (EPIPE), or one is too long (EINVAL). The next one follows.
            Err(error) if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::InvalidInput) => {}
            Err(_) => break,
        }
    }
    Ok(last.filter(|kill| kill.age < RECENT))
}

/// Reads a record such as `3,1234,5678901,-;Out of memory: Killed process 42 (weft) total-vm:...`. The third number is its time in microseconds since
/// the boot.
fn killed(record: &str, names: &[&str], now: Duration) -> Option<MemoryKill> {
    let (head, text) = record.split_once(';')?;
    let of_group = text.strip_prefix(OF_GROUP);
    let (pid, rest) = of_group.or_else(|| text.strip_prefix(OF_MACHINE))?.split_once(" (")?;
    let (name, _) = rest.split_once(')')?;
    let at = Duration::from_micros(head.split(',').nth(2)?.parse().ok()?);
    names.contains(&name).then_some(MemoryKill {
        name: name.to_owned(),
        pid: pid.parse().ok()?,
        age: now.saturating_sub(at),
        of_group: of_group.is_some(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_of_the_kernel_says_who_was_killed_and_why() {
        let now = Duration::from_secs(100);
        let of = |text: &str| killed(&format!("3,812,40000000,-;{text}"), &AGENTS, now);
        let wanted = MemoryKill { name: "weft".to_owned(), pid: 42, age: Duration::from_secs(60), of_group: true };
        let group = "Memory cgroup out of memory: Killed process 42 (weft) total-vm:81234kB, anon-rss:20000kB";
        assert_eq!(of(group), Some(wanted.clone()));
        let machine = "Out of memory: Killed process 42 (weft) total-vm:81234kB, anon-rss:20000kB";
        assert_eq!(of(machine), Some(MemoryKill { of_group: false, ..wanted }));
        for other in [
            "Memory cgroup out of memory: Killed process 42 (java) total-vm:81234kB",
            "oom_reaper: reaped process 42 (weft), now anon-rss:0kB",
            "weft: Out of memory: Killed process 42 (weft)",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }
}
