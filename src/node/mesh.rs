// SPDX-License-Identifier: Apache-2.0
//! The row of this node in the mesh of all nodes, for `GET /mesh`.

use std::collections::{BinaryHeap, HashSet};
use std::net::IpAddr;

use weft_subnet::lease::{Id, Lease};

use super::Node;
use super::status::PeerFailures;
use crate::kernel::Kernel;
use crate::observe::mesh::row::{MAX_WAYS, Row, RowAnswer, RowWay};
use crate::observe::report;
use crate::observe::status::PeerState;

impl<K: Kernel> Node<K> {
    /// Returns the row of this node, and who may read it. Texts are made only for the ways that are in it, so that a large cluster costs
    /// little memory.
    pub(super) fn mesh_row(&self) -> RowAnswer {
        let failures = self.peer_failures();
        let held: HashSet<&Id> = self.peers.hold.held().collect();
        let peers = self.plan.peers();
        let (mut known, mut worst) = (0, BinaryHeap::new());
        for (place, lease) in peers.believed_unordered().enumerate() {
            let way = self.way(lease, &failures, &held);
            if way.state == PeerState::SetAside {
                continue;
            }
            known += 1;
            // The order of all ways is that of the leases if nothing else tells them apart.
            worst.push((way.quality().rank(), place));
            if worst.len() > MAX_WAYS {
                worst.pop();
            }
        }
        let shown: HashSet<usize> = worst.into_iter().map(|(_, place)| place).collect();
        let shown = peers.believed_unordered().enumerate().filter(|(place, _)| shown.contains(place));
        let named = |lease: &Lease| RowWay { to: lease.subnets.to_string(), ..self.way(lease, &failures, &held) };
        let ways = shown.map(|(_, lease)| named(lease)).collect();
        let state = self.state();
        let (ready, problems) = self.problems(&state);
        let problems = problems.into_iter().map(|problem| problem.text).collect();
        let row = Row {
            node: report::node_name(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            subnet: state.subnets.to_string(),
            backend: state.backend,
            mtu: self.plan.mtu(),
            ready,
            problems,
            known,
            ways,
        };
        RowAnswer { row: row.bounded(), readers: self.node_addresses() }
    }

    /// Returns the way to a peer without its name.
    fn way(&self, lease: &Lease, failures: &PeerFailures, held: &HashSet<&Id>) -> RowWay {
        let (state, reason) = self.peer_state(lease, failures, held);
        RowWay::new(String::new(), state, reason, self.peer_probe(lease).as_ref())
    }

    /// Returns the published addresses of all nodes, sorted.
    fn node_addresses(&self) -> Vec<IpAddr> {
        let peers = self.plan.peers().believed_unordered().flat_map(|lease| lease.attrs.published());
        let mut all: Vec<IpAddr> = peers.chain(self.plan.own().attrs.published()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }
}
