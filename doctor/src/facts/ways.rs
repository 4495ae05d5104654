// SPDX-License-Identifier: Apache-2.0
//! Reads what concerns packets between nodes: devices, addresses and routes, the programs that manage links, and counters.

use std::fs;
use std::io;
use std::path::Path;

use ipnet::IpNet;
use nix::errno::Errno;
use nix::libc;
use weft_backends::owner::PROTOCOL;
use weft_netlink::rtnl::{Link, Route, Vxlan};

use super::policy_rules::{Marked, RouteOfWeft};
use super::tables::Tables;
use crate::kernel::Kernel;
use crate::kernel::entries::{LOCAL, LocalRoute, Lookup, MAIN, Packet, RouteKind, unspecified};
use crate::known_links::{BRIDGE, bridge, is_of_routed_pod, is_ours};
use crate::sysctl;

/// A vxlan device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VxlanDevice {
    /// Its name.
    pub name: String,
    /// What tells it from other vxlan devices.
    pub vxlan: Vxlan,
    /// True if weft or flannel made it.
    pub ours: bool,
}

/// A route of the main table, or the network of an address, over a link that is not for pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherRoute {
    /// The destination.
    pub dst: IpNet,
    /// Name of the link.
    pub link: String,
    /// True if the next hop is another host.
    pub has_gateway: bool,
    /// What wrote the route, as /etc/iproute2/rt_protos names it.
    pub protocol: u8,
}

/// What packets meet instead of a route of weft.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instead {
    /// A policy rule asks another table first.
    Table {
        /// Its number, as `ip rule` names it.
        table: u32,
        /// Name of the link by which the packets leave, or `None` if they are refused.
        link: Option<String>,
    },
    /// A policy rule refuses them.
    Rule,
    /// No policy rule asks the main table.
    NoRule,
    /// A route of type local keeps them on this node, and no link has the address.
    Local(LocalRoute),
}

/// Routes of weft that packets do not take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bypass {
    /// What decides instead.
    pub instead: Instead,
    /// True if only packets of pods are concerned, and not those of this host.
    pub of_pods: bool,
    /// The destination of the first of these routes.
    pub example: IpNet,
    /// Number of these routes.
    pub count: usize,
}

/// A link and a family by which packets to peers leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WayToPeers {
    /// Name of the link.
    pub link: String,
    /// The destination of one of the routes of weft over it.
    pub example: IpNet,
}

/// A route of another program that refuses packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefusingRoute {
    /// Its destination.
    pub dst: IpNet,
    /// What wrote it, as /etc/iproute2/rt_protos names it.
    pub protocol: u8,
}

/// A link of weft that a program manages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ManagedLink {
    /// Name of the link.
    pub link: String,
    /// Name of the program.
    pub program: &'static str,
}

/// The rp_filter of a link over which routes lead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReversePath {
    /// Name of the link.
    pub link: String,
    /// The larger one of the values of the link and of `all`, which is the one that counts.
    pub value: u64,
}

/// Everything that was read.
#[derive(Debug, Default, Clone)]
pub struct WayFacts {
    /// The vxlan devices.
    pub vxlan: Vec<VxlanDevice>,
    /// The routes that neither weft wrote nor lead to pods of this node.
    pub other_routes: Vec<OtherRoute>,
    /// The links over which routes of weft lead, for each family.
    pub to_peers: Vec<WayToPeers>,
    /// The routes of weft that packets do not take.
    pub bypasses: Vec<Bypass>,
    /// The routes to peers that packets with a mark take.
    pub marked: Vec<Marked>,
    /// Routes of others that refuse packets.
    pub refusals: Vec<RefusingRoute>,
    /// The rp_filter of the links over which weft's routes lead.
    pub reverse_path: Vec<ReversePath>,
    /// The links of weft that a program manages.
    pub managed: Vec<ManagedLink>,
}

impl WayFacts {
    /// Returns the UDP port of weft's vxlan device, if there is one.
    pub fn port(&self) -> Option<u16> {
        self.vxlan.iter().find(|device| device.ours).map(|device| device.vxlan.port)
    }
}

/// Returns the facts about the links, addresses and routes of these tables, and about what /run and /proc contain. `subnets` are those of this
/// node.
///
/// # Errors
/// The kernel does not answer what it does with packets to peers.
pub(super) fn read(tables: &Tables<'_>, subnets: &[IpNet]) -> io::Result<WayFacts> {
    let Tables { links, addrs, routes, .. } = *tables;
    let mut facts = WayFacts { vxlan: vxlan_devices(links), ..WayFacts::default() };
    let (refusing, routes): (Vec<&Route>, Vec<&Route>) = routes.iter().partition(|route| route.refuses());
    let others = refusing.into_iter().filter(|route| route.protocol != PROTOCOL);
    facts.refusals =
        others.filter_map(|route| Some(RefusingRoute { dst: destination(route)?, protocol: route.protocol })).collect();
    for route in routes.iter().copied() {
        let (Some(dst), Some(link)) = (destination(route), tables.link(route.index)) else { continue };
        if route.protocol == PROTOCOL {
            add_path(&mut facts.reverse_path, &link.name, dst);
            add_way(&mut facts.to_peers, &link.name, dst);
        } else if !is_for_pods(link) {
            let has_gateway = route.gateway.is_some();
            facts.other_routes.push(OtherRoute { dst, link: link.name.clone(), has_gateway, protocol: route.protocol });
        }
    }
    for addr in addrs.iter().filter(|addr| addr.global) {
        let Some(link) = tables.link(addr.index).filter(|link| !is_for_pods(link)) else { continue };
        let Ok(dst) = IpNet::new(addr.addr, addr.len).map(|net| net.trunc()) else { continue };
        let known = facts.other_routes.iter().any(|route| route.dst == dst && route.link == link.name);
        if !known {
            let (link, protocol) = (link.name.clone(), libc::RTPROT_KERNEL);
            facts.other_routes.push(OtherRoute { dst, link, has_gateway: false, protocol });
        }
    }
    let of_weft = routes.iter().filter(|route| route.protocol == PROTOCOL && route.index != 0);
    let of_weft = of_weft.filter_map(|route| Some(RouteOfWeft { dst: destination(route)?, route }));
    let of_weft: Vec<RouteOfWeft<'_>> = of_weft.collect();
    let bridge = bridge(links).filter(|link| link.up).map(|link| link.index);
    facts.bypasses = bypasses(tables, &of_weft, subnets, bridge)?;
    facts.marked = tables.policy.marked(&of_weft, |index| tables.link(index).map(|link| link.name.clone()))?;
    facts.managed = managed(links, Path::new("/run"));
    Ok(facts)
}

/// A question to the kernel: does this packet take this route of weft?
struct Asked<'a> {
    packet: Packet,
    /// The bridge of the pods for a packet of one of them, and `None` for a packet of this host.
    arrives: Option<u32>,
    route: &'a Route,
}

/// Asks the kernel for each of weft's routes whether a packet to the first address of its destination takes it: a packet of this host, and
/// one of a pod, if the pods have a bridge.
fn bypasses(
    tables: &Tables<'_>,
    of_weft: &[RouteOfWeft<'_>],
    subnets: &[IpNet],
    bridge: Option<u32>,
) -> io::Result<Vec<Bypass>> {
    let mut kernel = Kernel::open()?;
    let mut found: Vec<Bypass> = Vec::new();
    for RouteOfWeft { dst, route } in of_weft.iter().copied() {
        let Some(to) = dst.hosts().next() else { continue };
        let asked = |from, arrives| Asked { packet: Packet { from, to, proto: None, port: None }, arrives, route };
        let pod = subnets.iter().find(|subnet| subnet.addr().is_ipv4() == to.is_ipv4());
        let pod = pod.and_then(|subnet| subnet.trunc().hosts().nth(1));
        let of_pod = pod.zip(bridge).map(|(pod, bridge)| asked(pod, Some(bridge)));
        for asked in [asked(unspecified(to.is_ipv4()), None)].into_iter().chain(of_pod) {
            let of_pods = asked.arrives.is_some();
            let lookup = kernel.route(&asked.packet, asked.arrives);
            let Some(instead) = instead(tables, &asked, &lookup) else { continue };
            match found.iter_mut().find(|bypass| bypass.instead == instead) {
                Some(bypass) if bypass.of_pods == of_pods => bypass.count += 1,
                // It concerns all packets, and is known already.
                Some(_) => {}
                None => found.push(Bypass { instead, of_pods, example: dst, count: 1 }),
            }
        }
    }
    kernel.correct_tables(found.iter_mut().filter_map(|bypass| match &mut bypass.instead {
        Instead::Local(route) => Some(route),
        _ => None,
    }))?;
    Ok(found)
}

/// Returns what a packet meets instead of a route of weft, if it does not take that route. `lookup` is the answer of the kernel.
fn instead(tables: &Tables<'_>, asked: &Asked<'_>, lookup: &Lookup) -> Option<Instead> {
    let to = asked.packet.to;
    match lookup {
        Lookup::Route(taken) if taken.of_weft() => None,
        // An address of this node in the subnet of a peer is another finding.
        Lookup::Route(taken) if taken.kind == RouteKind::Local => {
            let is_address = tables.addrs.iter().any(|addr| addr.addr == to);
            (!is_address).then_some(Instead::Local(taken.into()))
        }
        Lookup::Route(taken) => {
            let is_usual = [MAIN, LOCAL].contains(&taken.table);
            let link = || {
                let device = tables.link(taken.device);
                device.filter(|_| taken.kind == RouteKind::Unicast).map(|link| link.name.clone())
            };
            (!is_usual).then(|| Instead::Table { table: taken.table, link: link() })
        }
        // A route of the main table that refuses packets to a part of a subnet is another finding.
        Lookup::Refused(_) if tables.refusing(to).is_some() => None,
        // `ip rule ... prohibit` and `blackhole`. What the reverse path filter refuses looks like the latter.
        Lookup::Refused(Errno::EACCES) => Some(Instead::Rule),
        Lookup::Refused(Errno::EINVAL) if asked.arrives.is_none() => Some(Instead::Rule),
        // `ip rule ... unreachable`, or no route is found at all. A route whose link does not run may be left out.
        Lookup::Refused(Errno::ENETUNREACH) if tables.runs(asked.route.index) => {
            Some(if tables.policy.asks_main(to.is_ipv4()) { Instead::Rule } else { Instead::NoRule })
        }
        Lookup::Refused(_) | Lookup::Unreadable(_) => None,
    }
}

/// Returns true for a link on the way to pods, of this node or of others.
fn is_for_pods(link: &Link) -> bool {
    is_ours(link) || link.name == BRIDGE || is_of_routed_pod(link)
}

fn vxlan_devices(links: &[Link]) -> Vec<VxlanDevice> {
    let device = |link: &Link| Some(VxlanDevice { name: link.name.clone(), vxlan: link.vxlan?, ours: is_ours(link) });
    links.iter().filter_map(device).collect()
}

/// Returns the destination of a route, unless it is a default route.
fn destination(route: &Route) -> Option<IpNet> {
    IpNet::new(route.dst?, route.len).ok()
}

/// Adds the link of a route to an IPv4 destination, if it is a new one.
fn add_path(all: &mut Vec<ReversePath>, link: &str, dst: IpNet) {
    if dst.addr().is_ipv4() && all.iter().all(|path| path.link != link) {
        let one = |name: &str| sysctl::number(&format!("ipv4/conf/{name}/rp_filter")).unwrap_or_default();
        all.push(ReversePath { link: link.to_owned(), value: one("all").max(one(link)) });
    }
}

/// Adds a route, if it is the first one over its link and of its family.
fn add_way(all: &mut Vec<WayToPeers>, link: &str, dst: IpNet) {
    let is_other = |way: &WayToPeers| way.link != link || way.example.addr().is_ipv4() != dst.addr().is_ipv4();
    if all.iter().all(is_other) {
        all.push(WayToPeers { link: link.to_owned(), example: dst });
    }
}

/// Returns the links of weft that NetworkManager or systemd-networkd manages. Each of the two has a file for every link that it
/// knows, whose name is the index of the link.
fn managed(links: &[Link], run: &Path) -> Vec<ManagedLink> {
    let mut found = Vec::new();
    for link in links.iter().filter(|link| is_ours(link) || link.name == BRIDGE) {
        let managed_by = |program: &'static str| ManagedLink { link: link.name.clone(), program };
        let has_line = |dir: &str, wanted: &dyn Fn(&str) -> bool| {
            let text = fs::read_to_string(run.join(dir).join(link.index.to_string())).unwrap_or_default();
            text.lines().any(wanted)
        };
        if has_line("NetworkManager/devices", &|line| line == "managed=true") {
            found.push(managed_by("NetworkManager"));
        }
        let is_managed = |line: &str| {
            line.strip_prefix("ADMIN_STATE=")
                .is_some_and(|state| !["unmanaged", "pending", "initialized", "linger"].contains(&state))
        };
        if has_line("systemd/netif/links", &is_managed) {
            found.push(managed_by("systemd-networkd"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_a_program_manages_are_read_from_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let link = |index: u32, name: &str| Link { index, name: name.to_owned(), ..Link::default() };
        let links = [link(2, "eth0"), link(7, "flannel.1"), link(8, "cni0"), link(9, "flannel-wg")];
        for (path, text) in [
            ("NetworkManager/devices/2", "[device]\nmanaged=true\n"),
            ("NetworkManager/devices/7", "[device]\nconnection-uuid=1\nmanaged=true\n"),
            ("NetworkManager/devices/8", "[device]\nmanaged=false\n"),
            ("systemd/netif/links/7", "# This is private data.\nADMIN_STATE=unmanaged\n"),
            ("systemd/netif/links/9", "ADMIN_STATE=configured\nOPER_STATE=routable\n"),
        ] {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let wanted = [("flannel.1", "NetworkManager"), ("flannel-wg", "systemd-networkd")]
            .map(|(link, program)| ManagedLink { link: link.to_owned(), program });
        assert_eq!(managed(&links, dir.path()), wanted);
    }

    /// Who installs weft's own file has no finding.
    #[test]
    fn the_file_for_networkmanager_names_every_link_that_must_not_be_managed() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/systemd/weft-unmanaged.conf");
        let text = fs::read_to_string(file).unwrap();
        let list = text.lines().find_map(|line| line.strip_prefix("unmanaged-devices+=")).unwrap();
        let is_left_alone = |name: &str| {
            let mut patterns = list.split(';').filter_map(|one| one.strip_prefix("interface-name:"));
            patterns.any(|one| one.strip_suffix('*').map_or(one == name, |begin| name.starts_with(begin)))
        };
        let names = ["flannel.1", "flannel-v6.1", "flannel.ipip", "flannel-wg", "flannel0", BRIDGE, "eth0"];
        let dir = tempfile::tempdir().unwrap();
        let devices = dir.path().join("NetworkManager/devices");
        fs::create_dir_all(&devices).unwrap();
        let link = |(index, name): (u32, &str)| {
            fs::write(devices.join(index.to_string()), "managed=true\n").unwrap();
            Link { index, name: name.to_owned(), ..Link::default() }
        };
        let links: Vec<Link> = (1..).zip(names).map(link).collect();
        let found: Vec<String> = managed(&links, dir.path()).into_iter().map(|managed| managed.link).collect();
        assert_eq!(found, names[..names.len() - 1], "all but the uplink");
        for name in found {
            assert!(is_left_alone(&name), "{name} is not in {list}");
        }
        assert!(!is_left_alone("eth0"));
    }
}
