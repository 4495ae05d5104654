// SPDX-License-Identifier: Apache-2.0
//! The audit of WireGuard devices. The kernel announces no change of peers and allowed IPs, so they are read often and by themselves.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::state::{Key, Name};
use weft_subnet::outside::wall_clock;

use super::{Node, audit};
use crate::kernel::{Kernel, Session};
use crate::observe::status::{Failure, PeerSession};
use crate::pass::PassReport;

/// Time between two audits if one is cheap.
const INTERVAL: Duration = Duration::from_secs(3);
/// Audits may use at most one part in this many of a core.
const SHARE: u32 = 1000;
/// The interval is stretched at most to this time.
const MAX_INTERVAL: Duration = Duration::from_secs(300);

/// When the WireGuard devices are compared next.
#[derive(Debug)]
pub(super) struct WireguardAudit {
    /// `None` while there is no such device.
    due: Option<Instant>,
    /// Time between two audits.
    interval: Duration,
}

impl Default for WireguardAudit {
    fn default() -> WireguardAudit {
        WireguardAudit { due: None, interval: INTERVAL }
    }
}

impl WireguardAudit {
    /// Returns when [`Node::audit_wireguard`] has something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due
    }

    /// Returns the time between two audits, if there is such a device.
    pub(super) fn interval(&self) -> Option<Duration> {
        self.due.map(|_| self.interval)
    }
}

/// Returns the time between two audits if one costs this CPU time.
fn interval(cost: Duration) -> Duration {
    (cost * SHARE).clamp(INTERVAL, MAX_INTERVAL)
}

impl<K: Kernel> Node<K> {
    /// Compares the peers and allowed IPs of WireGuard devices with the plan, if it is time, and repairs them.
    pub(super) async fn audit_wireguard(&mut self, now: Instant) {
        if self.plan.wireguard_devices().next().is_none() {
            self.wireguard.due = None;
            return;
        }
        if now < *self.wireguard.due.get_or_insert(now + INTERVAL) {
            return;
        }
        let cost = audit::Cost::begin();
        let report = self.passer.wireguard(&self.plan).await;
        // Writes are not a cost of auditing, unless the kernel refuses them again and again.
        let wrote =
            |report: &Option<PassReport>| report.as_ref().is_some_and(|report| report.writes() > report.failed());
        if !report.as_ref().is_ok_and(wrote) {
            self.wireguard.interval = interval(cost.so_far());
        }
        self.wireguard.due = Some(Instant::now() + self.wireguard.interval);
        match report {
            Ok(report) => report
                .into_iter()
                .for_each(|report| self.record(report, "WireGuard peers are not as this agent wrote them")),
            // The next full pass meets the same error. If it is lasting, that pass or its writes show it as a problem of this node.
            Err(error) => self.statistics.last_error = Some(Failure::now(format!("read WireGuard devices: {error}"))),
        }
        self.audit_after_conflict();
    }

    /// Reads the traffic with the peers of WireGuard devices, for `weft status`.
    pub(super) fn sessions(&mut self) -> Sessions {
        let devices: Vec<Name> = self.plan.wireguard_devices().collect();
        if devices.is_empty() {
            return Sessions::default();
        }
        let now = wall_clock();
        match self.passer.kernel().sessions(&devices) {
            Ok(all) => all.into_iter().map(|s| (Key::WgPeer(s.device, s.peer), shown(s, now))).collect(),
            Err(error) => {
                tracing::debug!(%error, "read the sessions of WireGuard devices");
                Sessions::default()
            }
        }
    }
}

/// What `weft status` shows of the traffic with a peer, by the key of the peer's entry.
pub(super) type Sessions = HashMap<Key, PeerSession>;

fn shown(session: Session, now: Duration) -> PeerSession {
    PeerSession {
        device: session.device.to_string(),
        endpoint: session.endpoint.map(|endpoint| endpoint.to_string()),
        handshake_s: session.handshake.map(|at| now.saturating_sub(at).as_secs()),
        handshake_ahead_s: session.handshake.map_or(0, |at| at.saturating_sub(now).as_secs()),
        received: session.received,
        sent: session.sent,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_missed_for_at_most_five_seconds_unless_the_audit_is_costly() {
        let (ms, s) = (Duration::from_millis, Duration::from_secs);
        assert_eq!(interval(ms(1)), s(3));
        assert_eq!(interval(ms(5)), s(5));
        assert_eq!(interval(ms(20)), s(20));
        assert_eq!(interval(s(1)), s(300), "the interval has a limit");
    }
}
