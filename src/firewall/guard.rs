// SPDX-License-Identifier: Apache-2.0
//! The tunnel guard: tunnel packets are accepted only from the addresses of peers. As long as the address of one peer is unknown,
//! nothing is dropped.

use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;

use weft_backends::host::Host;
use weft_backends::link::Outer;
use weft_backends::state::{Guard, Key, State, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::{Id, Lease};

pub mod table;

/// The peers whose packets the guard lets in.
#[derive(Debug, Default)]
pub struct TunnelPeers {
    /// Leases that say where their tunnel packets come from.
    stated: HashSet<Id>,
    /// Leases that do not say it: those of flannel, and of weft without the guard.
    silent: HashSet<Id>,
    /// A list of all leases has arrived. Before that, every peer is unknown.
    listed: bool,
}

impl TunnelPeers {
    /// Takes notice that a list of all leases has arrived.
    pub fn listed(&mut self) {
        self.listed = true;
    }

    /// Returns the addresses from which this peer's packets may come: the address of its tunnel device, and its published address. Behind a
    /// 1:1 address translation the packets come from the published address, and on the near side of it from the address of the device.
    pub fn peer(&mut self, lease: &Lease) -> State {
        let Attrs { public_ip, public_ipv6, tunnel_ip, tunnel_ipv6, .. } = &lease.attrs;
        let is_stated =
            (public_ip.is_none() || tunnel_ip.is_some()) && (public_ipv6.is_none() || tunnel_ipv6.is_some());
        self.forget(&lease.id);
        if is_stated {
            self.stated.insert(lease.id.clone())
        } else {
            self.silent.insert(lease.id.clone())
        };
        let v4 = [tunnel_ip, public_ip].into_iter().flatten().copied().map(IpAddr::V4);
        let v6 = [tunnel_ipv6, public_ipv6].into_iter().flatten().copied().map(IpAddr::V6);
        v4.chain(v6).map(|ip| (Key::Peer(ip), Value::Peer)).collect()
    }

    /// Forgets a peer whose lease is gone.
    pub fn forget(&mut self, id: &Id) {
        self.stated.remove(id);
        self.silent.remove(id);
    }

    /// Forgets all peers, because every lease is planned again from the start.
    pub fn forget_all(&mut self) {
        self.stated.clear();
        self.silent.clear();
    }

    /// Returns the chains that guard these devices. There are none while packets of a peer could be dropped by mistake.
    pub fn chains(&self, links: impl Iterator<Item = Value>) -> State {
        if !self.listed || !self.silent.is_empty() {
            return State::new();
        }
        let mut state = State::new();
        for link in links {
            let Value::Link(link) = link else { continue };
            let Some((family, outer)) = link.kind.outer() else { continue };
            let mut guard = match state.get(&Key::Guard(family)) {
                Some(Value::Guard(guard)) => *guard,
                _ => Guard::default(),
            };
            match outer {
                Outer::Ipip => guard.ipip = true,
                Outer::Udp(port) if guard.ports.contains(&port) => {}
                // A node uses at most two ports: the one of its own configuration, and the default one.
                Outer::Udp(port) => guard.ports[0] = port,
            }
            guard.ports.sort_unstable();
            state.insert(Key::Guard(family), Value::Guard(guard));
        }
        state
    }
}

impl fmt::Display for TunnelPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.silent.len() {
            _ if !self.listed => f.write_str("off: no list of leases yet"),
            0 => write!(f, "on: tunnel packets are taken from peers alone ({} of them)", self.stated.len()),
            many => write!(
                f,
                "off: {many} of {} leases do not say where their tunnel packets come from; run weft with --guard-tunnel \
                 on every node",
                many + self.stated.len()
            ),
        }
    }
}

/// Returns what the kernel lacks of the guard: its chains, or addresses of peers. `failures` are the entries that could not be written, and
/// why.
pub fn missing<'a>(failures: impl Iterator<Item = (&'a Key, &'a str)>) -> Option<String> {
    let (mut peers, mut first) = (0, "");
    for (key, reason) in failures {
        match key {
            Key::Guard(_) => return Some(format!("off: anyone may send tunnel packets: {reason}")),
            Key::Peer(_) => {
                first = if peers == 0 { reason } else { first };
                peers += 1;
            }
            _ => {}
        }
    }
    (peers > 0).then(|| format!("incomplete: tunnel packets from {peers} addresses of peers may be dropped: {first}"))
}

/// Returns true for an entry of the guard or of the fence. A failure of such an entry does not mean that a peer cannot be reached.
pub fn is_of_guard_or_fence(key: &Key) -> bool {
    key.is_of_guard() || key.is_of_fence()
}

/// Returns the attributes of our lease, with the addresses that our tunnel packets come from.
pub fn with_tunnel_addresses(attrs: Attrs, host: &Host) -> Attrs {
    let tunnel_ip = host.uplink.v4.filter(|_| attrs.public_ip.is_some());
    let tunnel_ipv6 = host.uplink.v6.filter(|_| attrs.public_ipv6.is_some());
    Attrs { tunnel_ip, tunnel_ipv6, ..attrs }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use weft_backends::host::Uplink;
    use weft_backends::ipip::IpipLink;
    use weft_backends::link::Link;
    use weft_backends::state::Name;
    use weft_backends::vxlan::VxlanLink;
    use weft_subnet::cidr::Family;
    use weft_subnet::cidr::Subnets;
    use weft_subnet::lease::Age;

    use super::*;

    fn lease(id: &str, public: &str, tunnel: Option<&str>) -> Lease {
        let (public_ip, tunnel_ip) = (public.parse().ok(), tunnel.map(|ip| ip.parse().unwrap()));
        let attrs = Attrs { public_ip, tunnel_ip, backend_type: "vxlan".into(), ..Attrs::default() };
        Lease { id: id.into(), subnets: Subnets::default(), attrs, age: Age::default() }
    }

    #[test]
    fn a_guard_that_the_kernel_refused_is_not_reported_as_on() {
        let route = Key::Route("10.5.1.0/24".parse().unwrap(), 0);
        let peers = ["10.0.0.2", "10.0.0.3"].map(|ip| Key::Peer(ip.parse().unwrap()));
        let guard = Key::Guard(Family::V4);
        let said = |failures: &[(&Key, &'static str)]| missing(failures.iter().copied());
        assert_eq!(said(&[]), None);
        assert_eq!(said(&[(&route, "no carrier")]), None, "a route is not part of the guard");
        let text = said(&[(&route, "no carrier"), (&peers[0], "no room"), (&peers[1], "no memory")]).unwrap();
        assert_eq!(text, "incomplete: tunnel packets from 2 addresses of peers may be dropped: no room");
        let text = said(&[(&peers[0], "no room"), (&guard, "not supported")]).unwrap();
        assert_eq!(text, "off: anyone may send tunnel packets: not supported");
    }

    fn vxlan(local: &str, port: u16) -> Value {
        let parent = Name::new("eth0").unwrap();
        let kind = Arc::new(VxlanLink {
            vni: 1,
            port,
            parent,
            local: local.parse().unwrap(),
            gbp: false,
            learning: false,
            ttl: 0,
        });
        Value::link(Link { kind, mtu: 1450, mac: None, up: true })
    }

    fn addresses(ips: &[&str]) -> State {
        ips.iter().map(|ip| (Key::Peer(ip.parse().unwrap()), Value::Peer)).collect()
    }

    #[test]
    fn nothing_is_dropped_until_every_lease_says_where_its_packets_come_from() {
        let mut peers = TunnelPeers::default();
        let chains = |peers: &TunnelPeers| peers.chains([vxlan("10.0.0.1", 8472)].into_iter());
        assert_eq!(chains(&peers), State::new(), "before the list");
        peers.listed();
        assert_eq!(chains(&peers).len(), 1);
        // Behind an address translation the packets come from the published address.
        let both = addresses(&["10.0.0.2", "198.51.100.1"]);
        assert_eq!(peers.peer(&lease("a", "198.51.100.1", Some("10.0.0.2"))), both);
        assert_eq!(peers.peer(&lease("b", "198.51.100.2", None)), addresses(&["198.51.100.2"]));
        assert_eq!(chains(&peers), State::new());
        assert!(peers.to_string().starts_with("off: 1 of 2 leases"), "{peers}");
        peers.peer(&lease("b", "198.51.100.2", Some("198.51.100.2")));
        assert_eq!(chains(&peers).len(), 1);
        let v6 = "2001:db8::3".parse().ok();
        let mut dual = lease("c", "198.51.100.3", Some("198.51.100.3"));
        dual.attrs.public_ipv6 = v6;
        peers.peer(&dual);
        assert_eq!(chains(&peers), State::new(), "it does not say where its packets over IPv6 come from");
        dual.attrs.tunnel_ipv6 = "2001:db8::33".parse().ok();
        let of_both_families = addresses(&["198.51.100.3", "2001:db8::3", "2001:db8::33"]);
        assert_eq!(peers.peer(&dual), of_both_families);
        assert_eq!(chains(&peers).len(), 1);
        peers.peer(&lease("c", "198.51.100.3", None));
        peers.forget(&"c".into());
        assert_eq!(peers.to_string(), "on: tunnel packets are taken from peers alone (2 of them)");
    }

    #[test]
    fn every_tunnel_device_is_guarded() {
        let mut peers = TunnelPeers::default();
        peers.listed();
        let kind = Arc::new(IpipLink { local: "10.0.0.1".parse().unwrap(), bound: false });
        let ipip = Value::link(Link { kind, mtu: 1480, mac: None, up: true });
        let links = [vxlan("10.0.0.1", 8472), vxlan("10.0.0.1", 4789), vxlan("fd00::1", 4789), ipip];
        let expected = State::from([
            (Key::Guard(Family::V4), Value::Guard(Guard { ports: [4789, 8472], ipip: true })),
            (Key::Guard(Family::V6), Value::Guard(Guard { ports: [0, 4789], ipip: false })),
        ]);
        assert_eq!(peers.chains(links.into_iter()), expected);
    }

    /// A peer lets in the packets of the addresses that our lease names. One of a family that the lease does not use is not named.
    #[test]
    fn our_lease_says_from_which_address_of_each_family_our_packets_come() {
        let (v4, v6) = (Some("192.168.0.9".parse().unwrap()), Some("fd77::9".parse().unwrap()));
        let host = Host::new(Uplink { name: Name::new("eth0").unwrap(), mtu: 1500, v4, v6 });
        let (public_ip, public_ipv6) = (Some("203.0.113.9".parse().unwrap()), Some("2001:db8::9".parse().unwrap()));
        for (public_ip, public_ipv6, tunnel_ip, tunnel_ipv6) in [
            (public_ip, None, v4, None),
            (None, public_ipv6, None, v6),
            (public_ip, public_ipv6, v4, v6),
            (None, None, None, None),
        ] {
            let attrs = Attrs { public_ip, public_ipv6, ..Attrs::default() };
            let wanted = Attrs { tunnel_ip, tunnel_ipv6, ..attrs.clone() };
            assert_eq!(with_tunnel_addresses(attrs, &host), wanted);
        }
    }

    #[test]
    fn an_entry_of_the_guard_or_of_the_fence_says_nothing_about_how_a_peer_is_reached() {
        let ip = "10.0.0.2".parse().unwrap();
        for key in [Key::Guard(Family::V4), Key::Peer(ip), Key::Fence(Family::V6), Key::Open(ip)] {
            assert!(is_of_guard_or_fence(&key), "{key:?}");
        }
        let name = Name::new("flannel.1").unwrap();
        for key in [Key::Route("10.5.1.0/24".parse().unwrap(), 0), Key::Link(name)] {
            assert!(!is_of_guard_or_fence(&key), "{key:?}");
        }
    }
}
