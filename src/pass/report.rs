// SPDX-License-Identifier: Apache-2.0
//! What a pass did, for metrics and `weft status`.

use std::collections::HashMap;
use std::time::Duration;

use weft_backends::state::Key;

/// Why a pass ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// It is the first pass, or the own lease, the host or net-conf changed.
    Start,
    /// Leases changed.
    Lease,
    /// The kernel changed.
    Kernel,
    /// The time of the audit came.
    Audit,
    /// The time of a pending entry came.
    Retry,
}

impl Cause {
    /// Returns the word for this cause in metrics and in `weft status`.
    pub fn as_str(self) -> &'static str {
        match self {
            Cause::Start => "start",
            Cause::Lease => "lease",
            Cause::Kernel => "kernel",
            Cause::Audit => "audit",
            Cause::Retry => "retry",
        }
    }
}

/// What a pass did.
#[derive(Debug)]
pub struct Report {
    /// Why it ran.
    pub cause: Cause,
    /// How long it took.
    pub took: Duration,
    /// Number of operations by [`kind`] of entry and outcome. The outcome is true if the kernel carried the operation out.
    pub operations: HashMap<(&'static str, bool), usize>,
    /// What the kernel said to the last operation that failed.
    pub error: Option<String>,
}

impl Report {
    pub(super) fn new(cause: Cause) -> Report {
        Report { cause, took: Duration::ZERO, operations: HashMap::new(), error: None }
    }

    /// Returns how many operations were tried.
    pub fn writes(&self) -> usize {
        self.operations.values().sum()
    }

    /// Returns how many operations failed.
    pub fn failed(&self) -> usize {
        self.operations.iter().filter(|((_, done), _)| !done).map(|(_, count)| count).sum()
    }
}

/// Returns the word for this kind of entry in metrics.
pub fn kind(key: &Key) -> &'static str {
    match key {
        Key::Link(_) => "link",
        Key::Addr(..) => "address",
        Key::WgPeer(..) => "wireguard-peer",
        Key::AllowedIp(..) => "allowed-ip",
        Key::Fdb(..) => "fdb",
        Key::Neigh(..) => "neighbour",
        Key::Route(..) => "route",
        Key::Peer(_) | Key::Guard(_) => "guard",
        Key::Open(_) | Key::Fence(_) => "fence",
    }
}
