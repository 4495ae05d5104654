// SPDX-License-Identifier: Apache-2.0
//! Counters of faults, which begin with the network namespace. Those that have many are read again, because only faults that go on are findings.

use std::thread;
use std::time::{Duration, Instant};

use super::checksums::{self, ChecksumErrors};
use super::clashes::{self, Clashes};

/// How long further faults are waited for, if there were many.
pub(super) const WAIT: Duration = Duration::from_secs(3);
/// How often the counters are read meanwhile.
const AGAIN: Duration = Duration::from_millis(200);

/// What the counters say.
#[derive(Debug)]
pub(super) struct Counters {
    /// Packets with a wrong checksum, for each protocol.
    pub checksums: Vec<ChecksumErrors>,
    /// Packets that were dropped because of a clash in the connection tracking table, if services are carried and this is known.
    pub clashes: Option<Clashes>,
}

impl Counters {
    /// Returns true if it is open whether faults go on, of which there were many.
    fn are_open(&self) -> bool {
        self.checksums.iter().any(ChecksumErrors::are_old) || self.clashes.is_some_and(Clashes::are_old)
    }
}

/// Reads the counters. If some have many faults, it waits once for further ones of all of them. Clashes matter only where rules of kube-proxy carry services.
#[expect(clippy::disallowed_methods, reason = "the pause between two readings of counters that nothing announces")]
pub(super) fn read(carry_services: bool) -> Counters {
    let read = || (checksums::read(), carry_services.then(clashes::read).flatten());
    let ((first, of_cpus), end) = (read(), Instant::now() + WAIT);
    let since = |(checksums, cpus): (Vec<ChecksumErrors>, Option<Vec<clashes::CpuCounters>>)| Counters {
        checksums: checksums::since(&first, checksums),
        clashes: of_cpus.as_ref().zip(cpus).map(|(first, now)| clashes::clashes(first, &now)),
    };
    let mut now = since((first.clone(), of_cpus.clone()));
    while now.are_open() && Instant::now() < end {
        thread::sleep(AGAIN);
        now = since(read());
    }
    now
}
