// SPDX-License-Identifier: Apache-2.0
//! The tunnel through which the agent itself carries packets, if a backend has one ([`crate::data_path`] runs it).

use weft_backends::backend::Backend;
use weft_backends::host::Host;
use weft_backends::tunnel::{Tunnel, TunnelPeer};
use weft_subnet::lease::Lease;

use super::Plan;

/// A tunnel of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlannedTunnel {
    /// The tunnel.
    pub tunnel: Tunnel,
    /// Our lease does not name its backend yet.
    pub is_next: bool,
}

impl Plan {
    /// Returns the tunnel of the own backend, or of one beside it while the backend changes. There is only one device for tunnels.
    pub fn tunnel(&self) -> Option<PlannedTunnel> {
        self.tunnel_backend().map(|(_, _, planned)| planned)
    }

    /// Returns the UDP port on which this node receives the packets of its own backend, if the links of the kernel do not show it.
    pub fn hidden_port(&self) -> Option<u16> {
        let of_agent = self.backend.tunnel(&self.host, &self.own).map(|tunnel| tunnel.port);
        let of_links = self.backend.listen_ports(&self.host, &self.own).into_iter().next();
        of_agent.or_else(|| of_links.map(|(name, wanted)| *self.host.kept_ports.get(&name).unwrap_or(&wanted)))
    }

    /// Iterates over the peers of that tunnel. They are computed from the believed leases, and cost no memory until then.
    pub fn tunnel_peers(&self) -> impl Iterator<Item = TunnelPeer> {
        let found = self.tunnel_backend();
        let leases = self.peers.believed().filter_map(move |lease| Some((found?, lease)));
        let leases = leases.filter(|((backend, ..), lease)| self.may_receive_by(backend.kind(), lease));
        leases.filter_map(|((backend, host, _), lease)| {
            if backend.understands(&lease.attrs) {
                return backend.tunnel_peer(host, lease);
            }
            let way = lease.attrs.other_ways().into_iter().find(|way| backend.understands(way))?;
            backend.tunnel_peer(host, &Lease { attrs: way, ..(**lease).clone() })
        })
    }

    /// Returns a number that grows whenever a lease is planned or leaves the plan. [`Plan::tunnel_peers`] changes only with it.
    pub fn peers_version(&self) -> u64 {
        self.peers_version
    }

    /// Returns the type of the backend that has the tunnel.
    pub(super) fn tunnel_kind(&self) -> Option<&'static str> {
        self.tunnel_backend().map(|(backend, ..)| backend.kind())
    }

    /// Returns the first backend that has a tunnel, with the facts of the host for it.
    fn tunnel_backend(&self) -> Option<(&dyn Backend, &Host, PlannedTunnel)> {
        self.all_backends().find_map(|(backend, host, is_next)| {
            let tunnel = backend.tunnel(host, &self.own)?;
            Some((backend, host, PlannedTunnel { tunnel, is_next }))
        })
    }
}
