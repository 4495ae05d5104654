// SPDX-License-Identifier: Apache-2.0
//! Another UDP port of our devices in net-conf: when this node takes it, and when its lease names it (docs/adr/020-live-change.md).
//!
//! 1. The node waits for its turn, a moment that its lease decides. All nodes read net-conf at once, and two nodes that change their ports in the
//!    same moment do not hear from each other where they are now.
//! 2. The device gets the port, and the kernel sends a packet from there to each peer (`src/kernel/wireguard_port.rs`).
//! 3. Our lease names the port. A peer that reads it earlier would send to a port on which nobody listens.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::backend::Backend;

use super::Node;
use super::net_conf::{NET_CONF, NetConfChange, SETTLING};
use crate::kernel::Kernel;

/// A net-conf that waits for the turn of this node.
#[derive(Debug)]
pub(super) struct Turn {
    at: Instant,
    text: String,
}

impl Turn {
    /// Returns when [`Node::take_turn`] has something to do.
    pub(super) fn at(&self) -> Instant {
        self.at
    }

    /// Returns the net-conf that waits.
    pub(super) fn text(&self) -> &str {
        &self.text
    }
}

/// Returns how long the node with this lease waits for its turn, at most this long.
fn wait(id: &str, most: Duration) -> Duration {
    let mut hasher = DefaultHasher::new();
    id.hash(&mut hasher);
    let part = u32::try_from(hasher.finish() >> 32).unwrap_or_default();
    most.mul_f64(f64::from(part) / f64::from(u32::MAX))
}

impl<K: Kernel> Node<K> {
    /// Returns true if this net-conf gives a device another port, and it is not the turn of this node yet. Then it is applied later.
    pub(super) fn waits_for_turn(&mut self, text: &str, backend: &dyn Backend) -> bool {
        let wait = wait(&self.plan.own().id, self.context.options.change_grace / SETTLING);
        if wait.is_zero() || self.plan.moved_port(backend).is_none() {
            return false;
        }
        if self.change.turn.is_none() {
            tracing::info!(in_ms = wait.as_millis(), "net-conf changes the port: this node follows in a moment");
            self.change.turn = Some(Turn { at: Instant::now() + wait, text: text.to_owned() });
        }
        true
    }

    /// Applies the net-conf that has waited for the turn of this node, if it is its turn.
    pub(super) fn take_turn(&mut self, now: Instant) {
        if let Some(turn) = self.change.turn.take_if(|turn| turn.at <= now) {
            self.end_turn(&turn, now);
        }
    }

    /// Applies the net-conf that has waited.
    pub(super) fn end_turn(&mut self, turn: &Turn, now: Instant) {
        if self.apply(&turn.text, false) == NetConfChange::Applied {
            self.schedule.audit_by(now, NET_CONF);
        }
    }

    /// Lets our lease name the ports on which our devices listen after a full pass: those of net-conf, if the kernel has accepted them.
    pub(super) fn publish_ports(&mut self) {
        if self.kernel_problem.is_some() {
            return;
        }
        let kept = self.plan.ports_after_pass(self.passer.listening());
        if kept != self.plan.host().kept_ports {
            self.plan.keep_ports(kept);
            self.update_own_lease();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_leases_have_their_turns_at_different_moments() {
        let most = Duration::from_secs(6);
        let mut turns: Vec<Duration> = (0..100).map(|third| wait(&format!("10.5.{third}.0-24"), most)).collect();
        turns.sort_unstable();
        assert!(turns.iter().all(|turn| *turn <= most));
        // Of 100 nodes, about 9 have their turn in each tenth of the time.
        for tenth in 0..10 {
            let here = turns.iter().filter(|turn| turn.as_millis() / 601 == tenth).count();
            assert!((2..=20).contains(&here), "{here} turns: {turns:?}");
        }
        assert_eq!(wait("10.5.1.0-24", Duration::ZERO), Duration::ZERO);
    }
}
