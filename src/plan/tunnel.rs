// SPDX-License-Identifier: Apache-2.0
//! The tunnel through which the agent itself carries packets, if a backend has one ([`crate::data_path`] runs it).

use weft_backends::backend::Backend;
use weft_backends::host::Host;
use weft_backends::tunnel::{Tunnel, TunnelPeer};
use weft_subnet::attrs::Attrs;
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

    /// Returns the other ports on which the tunnel receives. While the port changes, peers may send to the earlier ones, which our lease
    /// names, too.
    pub fn more_tunnel_ports(&self) -> Vec<u16> {
        let named = self.all_backends().filter(|(.., is_next)| !is_next);
        let mut ports: Vec<u16> =
            named.filter_map(|(backend, host, _)| Some(backend.tunnel(host, &self.own)?.port)).collect();
        ports.sort_unstable();
        ports.dedup();
        let own = self.tunnel().map(|planned| planned.tunnel.port);
        ports.retain(|port| Some(*port) != own);
        ports
    }

    /// Returns the tunnel of the next backend, if it has one.
    pub fn next_tunnel(&self) -> Option<Tunnel> {
        let (backend, host) = self.extra_backends.next.as_ref()?.planned();
        backend.tunnel(host, &self.own)
    }

    /// Iterates over the peers of that tunnel. They are computed from the believed leases, and cost no memory until then.
    pub fn tunnel_peers(&self) -> impl Iterator<Item = TunnelPeer> {
        let order = self.extra_backends.order().into_iter().filter_map(|which| self.backend_of(which));
        let tunnels: Vec<_> = order.filter(|(backend, host)| backend.tunnel(host, &self.own).is_some()).collect();
        self.peers.believed().filter_map(move |lease| self.tunnel_peer(&tunnels, lease))
    }

    /// Returns how the tunnel reaches a peer. These backends have the tunnel, in the order in which packets prefer them. The first one that
    /// understands a way of the lease decides about the port, or else the first one of its type, because flannel names no port.
    fn tunnel_peer(&self, tunnels: &[(&dyn Backend, &Host)], lease: &Lease) -> Option<TunnelPeer> {
        let ways = lease.attrs.other_ways();
        let by = |fits: &dyn Fn(&dyn Backend, &Attrs) -> bool| {
            tunnels.iter().filter(|(backend, _)| self.may_receive_by(backend.kind(), lease)).find_map(
                |(backend, host)| {
                    if fits(*backend, &lease.attrs) {
                        return Some(backend.tunnel_peer(host, lease));
                    }
                    let attrs = ways.iter().find(|way| fits(*backend, way))?.clone();
                    Some(backend.tunnel_peer(host, &Lease { attrs, ..lease.clone() }))
                },
            )
        };
        let understood = by(&|backend, way| backend.understands(way));
        understood.or_else(|| by(&|backend, way| backend.serves(&way.backend_type)))?
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
