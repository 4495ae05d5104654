// SPDX-License-Identifier: Apache-2.0
//! The links by which this node reaches others, and what is on them: programs that see packets before the kernel does, simulated loss, limits.

use std::net::IpAddr;

use weft_netlink::rtnl::{Addr, Link, Qdisc};

use super::tables::Tables;
use crate::known_links::{BRIDGE, bridge, is_ours};
use crate::sysctl;

/// The queueing discipline that delays and drops packets, for tests.
const NETEM: &str = "netem";
/// The queueing disciplines that carry the filters of tc.
const FILTERED: [&str; 2] = ["clsact", "ingress"];
/// The queueing disciplines that limit the rate, and those that hold packets back or drop them.
const SHAPERS: [&str; 5] = ["tbf", "htb", "bfifo", "plug", "blackhole"];
/// The kinds of links that need ARP. Physical devices have none.
const WITH_ARP: [&str; 6] = ["", "veth", "bridge", "bond", "team", "vlan"];
/// The value of arp_ignore with which the kernel answers for no address.
pub(crate) const IGNORES_ALL: u64 = 8;
/// The sysctls of all links.
pub(crate) const ALL: &str = "all";

/// A link that takes the packets of another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Master {
    /// Its name.
    pub name: String,
    /// Its kind, such as `bridge`.
    pub kind: String,
}

/// An IPv6 address of this node that another host has, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DuplicateV6 {
    /// The address.
    pub addr: IpAddr,
    /// The link of this node that has it.
    pub link: String,
}

/// A link on the way of packets between nodes.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct PathLink {
    /// Its name.
    pub name: String,
    /// The link above it.
    pub master: Option<Master>,
    /// True if it has the published address or a default route, and neither weft nor a CNI plugin made it.
    pub is_uplink: bool,
    /// True if weft made it.
    pub is_of_weft: bool,
    /// What keeps the kernel from asking for MAC addresses or from answering on this link, of an uplink or the bridge of pods.
    pub arp: Option<ArpOff>,
    /// What may drop packets on it.
    pub suspects: Vec<Suspect>,
}

/// Why there is no ARP on a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArpOff {
    /// The flag IFF_NOARP: the kernel does not ask.
    Flag,
    /// The sysctl arp_ignore: the kernel does not answer. The name is that of the link, or `all`.
    Ignored(String),
}

/// Something on a link that may drop packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Suspect {
    /// The queueing discipline netem.
    Netem,
    /// An XDP program.
    Xdp,
    /// Filters of tc for packets that arrive or leave, in a queueing discipline of this kind.
    Filters(&'static str),
    /// A queueing discipline that limits or drops the packets that leave.
    Shaper {
        /// Its kind.
        kind: &'static str,
        /// The bytes a second that it lets pass, if it has one rate.
        rate: Option<u64>,
    },
}

/// Everything that was read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct PathLinks {
    /// The uplinks, weft's devices, the bridge of pods and its ports.
    pub links: Vec<PathLink>,
    /// The IPv6 addresses of this node that another host has, too.
    pub duplicates: Vec<DuplicateV6>,
}

impl PathLinks {
    /// Returns true for the name of an uplink.
    pub(crate) fn is_uplink(&self, name: &str) -> bool {
        self.links.iter().any(|link| link.is_uplink && link.name == name)
    }
}

/// Reads from the tables of the kernel. `published` contains the addresses that this node publishes, if they are known.
pub(super) fn read(tables: &Tables<'_>, qdiscs: &[Qdisc], published: &[IpAddr]) -> PathLinks {
    let Tables { links, addrs, routes, .. } = *tables;
    let bridge = bridge(links).map(|link| link.index);
    let of_link = |link: &Link| qdiscs.iter().filter(|qdisc| qdisc.index == link.index).collect::<Vec<_>>();
    let suspects = |link: &Link| {
        let qdiscs = of_link(link);
        let has_qdisc = |kind: &str| qdiscs.iter().any(|qdisc| qdisc.kind == kind);
        let filters = FILTERED.into_iter().map(|kind| (Suspect::Filters(kind), has_qdisc(kind)));
        let all = [(Suspect::Netem, has_qdisc(NETEM)), (Suspect::Xdp, link.xdp)].into_iter().chain(filters);
        let shaper = |qdisc: &&Qdisc| {
            let kind = SHAPERS.into_iter().find(|kind| qdisc.is_root && qdisc.kind == *kind)?;
            Some(Suspect::Shaper { kind, rate: qdisc.rate })
        };
        let found = all.filter(|(_, is_there)| *is_there).map(|(suspect, _)| suspect);
        found.chain(qdiscs.iter().filter_map(shaper)).collect()
    };
    let path_link = |link: &Link| {
        let is_default = routes.iter().any(|route| route.dst.is_none() && route.index == link.index);
        let is_published = addrs.iter().any(|addr| addr.index == link.index && published.contains(&addr.addr));
        let of_pods = bridge.is_some_and(|bridge| link.index == bridge || link.master == bridge);
        let is_uplink = (is_default || is_published) && !is_ours(link) && !of_pods;
        let master = tables.link(link.master).filter(|_| link.master != 0);
        (is_uplink || is_ours(link) || of_pods).then(|| PathLink {
            name: link.name.clone(),
            master: master
                .filter(|master| master.name != BRIDGE)
                .map(|master| Master { name: master.name.clone(), kind: master.kind.clone() }),
            is_uplink,
            is_of_weft: is_ours(link),
            arp: arp_off(link).filter(|_| is_uplink || link.name == BRIDGE),
            suspects: suspects(link),
        })
    };
    let duplicates = addrs.iter().filter(|addr| addr.duplicate);
    let named = |addr: &Addr| Some(DuplicateV6 { addr: addr.addr, link: tables.link(addr.index)?.name.clone() });
    PathLinks {
        links: links.iter().filter_map(path_link).collect(),
        duplicates: duplicates.filter_map(named).collect(),
    }
}

fn arp_off(link: &Link) -> Option<ArpOff> {
    if link.mac.is_none() || !WITH_ARP.contains(&link.kind.as_str()) {
        return None;
    }
    if link.is_without_arp() {
        return Some(ArpOff::Flag);
    }
    let ignores = |name: &&str| sysctl::number(&format!("ipv4/conf/{name}/arp_ignore")) == Some(IGNORES_ALL);
    [ALL, &link.name].into_iter().find(ignores).map(|name| ArpOff::Ignored(name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::super::policy_rules::PolicyRules;
    use super::*;

    #[test]
    fn links_that_never_need_arp_are_no_finding() {
        let flags = nix::libc::IFF_NOARP.cast_unsigned();
        let link = |kind: &str| Link { kind: kind.to_owned(), flags, mac: Some([2; 6]), ..Link::default() };
        assert_eq!(arp_off(&link("dummy")), None);
        assert_eq!(arp_off(&Link { mac: None, ..link("") }), None, "a tunnel");
        assert_eq!(arp_off(&link("vlan")), Some(ArpOff::Flag));
    }

    #[test]
    fn queueing_disciplines_belong_to_their_links() {
        let link = |index, name: &str| Link { index, name: name.to_owned(), ..Link::default() };
        let links = [link(2, "eth0"), link(3, "flannel.1"), link(4, "eth9")];
        let qdisc = |index, kind: &str| Qdisc { index, kind: kind.to_owned(), ..Qdisc::default() };
        let tbf = |is_root| Qdisc { is_root, rate: Some(1250), ..qdisc(2, "tbf") };
        let qdiscs =
            [qdisc(2, "fq_codel"), qdisc(2, "clsact"), tbf(false), tbf(true), qdisc(3, "netem"), qdisc(4, "netem")];
        let addr = Addr { index: 2, addr: [192, 0, 2, 1].into(), len: 24, global: true, duplicate: false };
        let (addrs, policy) = ([addr], PolicyRules::default());
        let tables = Tables { links: &links, addrs: &addrs, routes: &[], neighbours: &[], policy: &policy };
        let found = read(&tables, &qdiscs, &[addr.addr]);
        let named: Vec<_> = found.links.into_iter().map(|link| (link.name, link.suspects)).collect();
        let of_eth0 = vec![Suspect::Filters("clsact"), Suspect::Shaper { kind: "tbf", rate: Some(1250) }];
        let wanted = [("eth0".to_owned(), of_eth0), ("flannel.1".to_owned(), vec![Suspect::Netem])];
        assert_eq!(named, wanted, "eth9 is not on the way");
    }
}
