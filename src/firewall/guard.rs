// SPDX-License-Identifier: Apache-2.0
//! Who may send us tunnel packets: the peers' addresses, and whether all of them are known, without which nothing is dropped.

use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;

use weft_backends::host::Host;
use weft_backends::link::Outer;
use weft_backends::state::{Guard, Key, State, Value};
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::{Id, Lease};

use crate::pass::Pendings;

pub mod table;

/// The peers, as the guard sees them.
#[derive(Debug, Default)]
pub struct Roster {
    stated: HashSet<Id>,
    /// Leases that do not say where their tunnel packets come from: flannel's, or of weft without the guard.
    silent: HashSet<Id>,
    /// A list of leases was seen: before it, everyone is unknown.
    listed: bool,
}

impl Roster {
    /// Leases are known now.
    pub fn listed(&mut self) {
        self.listed = true;
    }

    /// The addresses from which this peer's packets may come. That of its tunnel device, and its public one: where an address
    /// translation of 1:1 stands between us they come from the public one, and inside of it from the device's.
    pub fn peer(&mut self, lease: &Lease) -> State {
        let Attrs { public_ip, public_ipv6, tunnel_ip, tunnel_ipv6, .. } = &lease.attrs;
        let says = (public_ip.is_none() || tunnel_ip.is_some()) && (public_ipv6.is_none() || tunnel_ipv6.is_some());
        self.forget(&lease.id);
        if says {
            self.stated.insert(lease.id.clone())
        } else {
            self.silent.insert(lease.id.clone())
        };
        let v4 = [tunnel_ip, public_ip].into_iter().flatten().copied().map(IpAddr::V4);
        let v6 = [tunnel_ipv6, public_ipv6].into_iter().flatten().copied().map(IpAddr::V6);
        v4.chain(v6).map(|ip| (Key::Peer(ip), Value::Peer)).collect()
    }

    /// This peer is gone.
    pub fn forget(&mut self, id: &Id) {
        self.stated.remove(id);
        self.silent.remove(id);
    }

    /// All peers are planned anew.
    pub fn forget_all(&mut self) {
        self.stated.clear();
        self.silent.clear();
    }

    /// The chains that guard these devices; none while anybody's packets could be dropped by mistake.
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
                // Our own port and the default of the others: more there are not.
                Outer::Udp(port) => guard.ports[0] = port,
            }
            guard.ports.sort_unstable();
            state.insert(Key::Guard(family), Value::Guard(guard));
        }
        state
    }
}

impl fmt::Display for Roster {
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

/// What is wrong with the guard in the kernel: its chains, or peers that are not in its set.
pub fn trouble(pending: &Pendings) -> Option<String> {
    if pending.is_empty() {
        return None;
    }
    let reason = |wanted: fn(&Key) -> bool| pending.iter().find(|(key, _)| wanted(key)).map(|(_, entry)| &entry.reason);
    if let Some(reason) = reason(|key| matches!(key, Key::Guard(_))) {
        return Some(format!("off: anyone may send tunnel packets: {reason}"));
    }
    let reason = reason(|key| matches!(key, Key::Peer(_)))?;
    let count = pending.iter().filter(|(key, _)| matches!(key, Key::Peer(_))).count();
    Some(format!("incomplete: tunnel packets from {count} addresses of peers may be dropped: {reason}"))
}

/// Whether this entry is the guard's or the fence's: what becomes of it says nothing of a peer's routes.
pub fn is_no_peers(key: &Key) -> bool {
    matches!(key, Key::Guard(_) | Key::Peer(_) | Key::Fence(_) | Key::Open(_))
}

/// What our lease says, with the source of our tunnel packets.
pub fn stated(attrs: Attrs, host: &Host) -> Attrs {
    let tunnel_ip = host.uplink.v4.filter(|_| attrs.public_ip.is_some());
    let tunnel_ipv6 = host.uplink.v6.filter(|_| attrs.public_ipv6.is_some());
    Attrs { tunnel_ip, tunnel_ipv6, ..attrs }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
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
    fn what_the_kernel_refused_is_not_said_to_be_on() {
        let mut pending = Pendings::default();
        let now = std::time::Instant::now();
        assert_eq!(trouble(&pending), None);
        pending.failed(Key::Route("10.5.1.0/24".parse().unwrap(), 0), "no carrier".into(), true, now);
        assert_eq!(trouble(&pending), None, "a route is none of its");
        pending.failed(Key::Peer("10.0.0.2".parse().unwrap()), "no room".into(), true, now);
        let text = trouble(&pending).unwrap();
        assert!(text.starts_with("incomplete: tunnel packets from 1 addresses") && text.ends_with("no room"), "{text}");
        pending.failed(Key::Guard(Family::V4), "not supported".into(), false, now);
        let text = trouble(&pending).unwrap();
        assert!(text.starts_with("off: ") && text.ends_with("not supported"), "{text}");
    }

    fn vxlan(local: &str, port: u16) -> Value {
        let parent = Name::new("eth0").unwrap();
        let kind =
            Arc::new(VxlanLink { vni: 1, port, parent, local: local.parse().unwrap(), gbp: false, learning: false });
        Value::link(Link { kind, mtu: 1450, mac: None, up: true })
    }

    fn peers(ips: &[&str]) -> State {
        ips.iter().map(|ip| (Key::Peer(ip.parse().unwrap()), Value::Peer)).collect()
    }

    #[test]
    fn nothing_is_dropped_until_every_lease_says_where_its_packets_come_from() {
        let mut roster = Roster::default();
        let chains = |roster: &Roster| roster.chains([vxlan("10.0.0.1", 8472)].into_iter());
        assert_eq!(chains(&roster), State::new(), "before the list");
        roster.listed();
        assert_eq!(chains(&roster).len(), 1);
        // Beyond its address translation the packets come from the public address.
        let both = peers(&["10.0.0.2", "198.51.100.1"]);
        assert_eq!(roster.peer(&lease("a", "198.51.100.1", Some("10.0.0.2"))), both);
        assert_eq!(roster.peer(&lease("b", "198.51.100.2", None)), peers(&["198.51.100.2"]));
        assert_eq!(chains(&roster), State::new());
        assert!(roster.to_string().starts_with("off: 1 of 2 leases"), "{roster}");
        roster.peer(&lease("b", "198.51.100.2", Some("198.51.100.2")));
        assert_eq!(chains(&roster).len(), 1);
        roster.peer(&lease("c", "198.51.100.3", None));
        roster.forget(&"c".into());
        assert_eq!(roster.to_string(), "on: tunnel packets are taken from peers alone (2 of them)");
    }

    #[test]
    fn every_tunnel_in_use_is_guarded() {
        let mut roster = Roster::default();
        roster.listed();
        let parent = Name::new("eth0").unwrap();
        let kind = Arc::new(IpipLink { parent, local: "10.0.0.1".parse().unwrap() });
        let ipip = Value::link(Link { kind, mtu: 1480, mac: None, up: true });
        let links = [vxlan("10.0.0.1", 8472), vxlan("10.0.0.1", 4789), vxlan("fd00::1", 4789), ipip];
        let expected = State::from([
            (Key::Guard(Family::V4), Value::Guard(Guard { ports: [4789, 8472], ipip: true })),
            (Key::Guard(Family::V6), Value::Guard(Guard { ports: [0, 4789], ipip: false })),
        ]);
        assert_eq!(roster.chains(links.into_iter()), expected);
    }
}
