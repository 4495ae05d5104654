// SPDX-License-Identifier: Apache-2.0
//! The steps of a packet through the tables of the kernel: route, neighbour, FDB, and the way of the outer packet of a tunnel.

use std::net::IpAddr;

use ipnet::IpNet;
use nix::errno::Errno;
use nix::libc;
use weft_backends::register::makes_routes;

use super::explanation::{State, Step};
use super::facts::{
    Agent, Device, DeviceKind, Facts, Hop, Lookup, Neighbour, Place, Read, Route, RouteKind, Tunnel, Way,
};
use super::mtu_steps::{fits, sized};
use super::read::leads_to_pods;
use super::route_text::{is_usual, removal, text};
use super::shared_steps::{REWRITE, down, no_device, planned, publics};
use crate::remedies::{ask_main_first, ip, refusing_rule};

/// The kernel's answer to the question for a route, and whether it is the route that should be there.
pub(super) fn route(facts: &Facts, way: &Way, to: &Place) -> Step {
    let destination = way.packet.to;
    let is_pod = to.is_remote_pod(destination) && !has_no_routes(facts);
    let step = match &way.hop.lookup {
        Lookup::Unreadable(why) => return Step::unknown("route", format!("the kernel does not answer: {why}")),
        Lookup::Refused(Errno::EHOSTUNREACH | Errno::ENETUNREACH)
            if *to == Place::Pod && facts.forwarding != Some(false) =>
        {
            no_device(facts, "route", destination)
        }
        Lookup::Refused(errno) => refused(facts, way, *errno, is_pod),
        Lookup::Route(route)
            if *to == Place::Pod
                && route.kind == RouteKind::Unicast
                && !leads_to_pods(route, &facts.subnet_file, facts.bridge.as_ref()) =>
        {
            by_policy(facts, way, route).unwrap_or_else(|| no_device(facts, "route", destination))
        }
        Lookup::Route(route) if *to == Place::Pod && leads_past_pod(facts, way, route) => past_pod(way, route),
        Lookup::Route(route) => found(facts, way, route, is_pod),
    };
    match (is_pod, to) {
        (true, Place::Peer(peer)) if step.state == State::Broken => {
            let subnet = peer.subnet(destination.is_ipv4());
            let text = subnet.and_then(|net| planned(facts, &format!("route {net}")));
            let subnet = subnet.map_or_else(|| destination.to_string(), ToString::to_string);
            step.should_be(text.unwrap_or_else(|| format!("a route of weft for {subnet}, to {}", publics(peer))))
        }
        (true, _) if step.state == State::Broken => step.should_be("a route of weft for the subnet of that node"),
        _ => step,
    }
}

fn has_no_routes(facts: &Facts) -> bool {
    matches!(&facts.agent, Agent::Answers(agent) if !makes_routes(&agent.backend))
}

/// The kernel would not send the packet at all.
fn refused(facts: &Facts, way: &Way, errno: Errno, is_pod: bool) -> Step {
    let (from, to) = (way.packet.from, way.packet.to);
    let step = Step::ok("route", format!("refused: {}", errno.desc()));
    if let Some(device) = facts.down.first().filter(|_| is_pod) {
        return down(step, device);
    }
    let arrives = way.arrives.as_ref().map_or("", |device| device.name.as_str());
    match errno {
        Errno::EHOSTUNREACH | Errno::ENETUNREACH if way.arrives.is_some() && facts.forwarding == Some(false) => {
            let (name, remedy) = if to.is_ipv4() {
                ("net.ipv4.ip_forward", "sysctl -w net.ipv4.ip_forward=1")
            } else {
                // This may end routes of router advertisements. The check names a command that prevents it.
                ("net.ipv6.conf.all.forwarding", "`weft doctor --only forwarding` names the command")
            };
            step.broken(format!("this node does not forward packets: {name} is 0"), remedy)
        }
        Errno::EXDEV | Errno::EINVAL if way.arrives.is_some() => step.broken(
            format!("the kernel does not accept packets from {from} on {arrives}: its reverse path filter, or an address of this node"),
            // In the form with dots, a dot in the name of a link would separate words.
            format!(
                "`ip route get {from}` shows the link on which they should arrive; if {arrives} is right, too: sysctl -w \
                 net/ipv4/conf/{arrives}/rp_filter=2"
            ),
        ),
        _ => {
            let remedy = match is_pod {
                true => REWRITE.to_owned(),
                false => format!(
                    "{} route add {to} via GATEWAY; or let the program that manages the uplink write the route (DHCP)",
                    ip(to)
                ),
            };
            step.broken(format!("the kernel has no route to {to}: {}", errno.desc()), remedy)
        }
    }
}

fn found(facts: &Facts, way: &Way, route: &Route, is_pod: bool) -> Step {
    let to = way.packet.to;
    let text = text(route, way.hop.device.as_ref());
    let step = Step::ok("route", text.clone());
    match route.kind {
        RouteKind::Local => return Step::ok("route", format!("{to} is an address of this node")),
        RouteKind::Refuses(_) if route.of_weft() => {
            return step.broken(
                format!("the kernel refuses packets to {to}, because weft has no route to it"),
                "`weft lease ls` shows whether a node has this subnet; `weft status` shows its state",
            );
        }
        RouteKind::Refuses(_) => {
            return step.broken(format!("the route {text} drops packets to {to}"), refusing_route(route, to));
        }
        RouteKind::Other(kind) => {
            return Step { state: State::Unknown, is: format!("a route of type {kind}: {text}"), ..step };
        }
        RouteKind::Unicast => {}
    }
    let step = sized(step, route, way.hop.device.as_ref());
    if is_pod && !route.of_weft() { foreign(facts, way, route, step) } else { step }
}

/// Returns true if a route inside of the own subnet does not lead to the pod: its device is not the link of the pod. What is wrong with the ports
/// of a bridge is a step of the pod. Of other kinds of links above that of the pod nothing is known.
fn leads_past_pod(facts: &Facts, way: &Way, route: &Route) -> bool {
    let Some(device) = way.hop.device.as_ref().filter(|_| route.kind == RouteKind::Unicast) else { return false };
    if device.kind == DeviceKind::Bridge {
        return false;
    }
    match &way.to_pod {
        Some(pod) => {
            let above = pod.host_link.master;
            let is_known = above == 0 || facts.bridge.as_ref().is_some_and(|bridge| bridge.index == above);
            is_known && device.index != pod.host_link.index
        }
        None => route.gateway.is_some(),
    }
}

/// A policy rule leads packets for a pod of this node to another table than the main one.
fn by_policy(facts: &Facts, way: &Way, route: &Route) -> Option<Step> {
    let (from, to) = (way.packet.from, way.packet.to);
    let subnet = facts.subnet_file.subnets().into_iter().find(|subnet| subnet.contains(&to))?.trunc();
    let text = text(route, way.hop.device.as_ref());
    let because =
        format!("a policy rule leads packets from {from} for the pod {to} of this node away, by the route {text}");
    (!is_usual(route)).then(|| Step::ok("route", text).broken(because, ask_main(subnet, to)))
}

/// Returns what makes the kernel ask the main table first for packets to this network, to which `to` belongs.
fn ask_main(network: IpNet, to: IpAddr) -> String {
    format!("{}; then find the program that makes the rule: `{} rule` shows it", ask_main_first(network), ip(to))
}

/// Returns what makes a route that a policy rule chose let packets of pods pass. A rule before the others that asks the main table would also send
/// packets there for which weft has no route yet, past its fence.
fn keep_network(route: &Route, to: IpAddr) -> String {
    let (ip, table) = (ip(to), route.table);
    format!(
        "exclude Network in the configuration of the program that makes the policy rule (a VPN): `{ip} rule` shows the rule, and `{ip} route show \
         table {table}` its routes"
    )
}

/// Returns what to do about a route that refuses packets. A policy rule may have chosen it on purpose, as that of a VPN without which no packet may
/// leave.
fn refusing_route(route: &Route, to: IpAddr) -> String {
    if is_usual(route) {
        format!("{}; then find the program that writes it", removal(route, None, to))
    } else {
        refusing_rule(to)
    }
}

fn past_pod(way: &Way, route: &Route) -> Step {
    let (to, device) = (way.packet.to, way.hop.device.as_ref());
    let text = text(route, device);
    Step::ok("route", text.clone()).broken(
        format!("the route {text} of another program leads packets for the pod {to} of this node elsewhere"),
        format!("{}; then find the program that writes it", removal(route, device, to)),
    )
}

/// A route of another program leads packets of pods away.
fn foreign(facts: &Facts, way: &Way, route: &Route, step: Step) -> Step {
    let (to, device) = (way.packet.to, way.hop.device.as_ref());
    let text = text(route, device);
    if let Some(own) = &way.route_of_weft {
        let own_prefix = own.prefix.map(|net| net.to_string()).unwrap_or_default();
        // A VPN needs the routes of its table for other packets.
        let (which, remedy) = if is_usual(route) {
            ("", format!("find the program that writes it; then {}", removal(route, device, to)))
        } else {
            (", chosen by a policy rule", keep_network(route, to))
        };
        return step.broken(
            format!("the route {text}{which} of another program is used instead of the route of weft for {own_prefix}"),
            remedy,
        );
    }
    if let Some(device) = facts.down.first() {
        return down(step, device);
    }
    step.broken(format!("there is no route of weft to {to}, and the route {text} leads elsewhere"), REWRITE)
}

/// A device that is down, although a route still uses it.
pub(super) fn device(hop: &Hop) -> Option<Step> {
    let device = hop.device.as_ref().filter(|device| !device.up)?;
    Some(down(Step::ok("device", device.name.clone()), device))
}

/// The neighbour of the next hop. Only on a tunnel it must be there before the first packet.
pub(super) fn neighbour(facts: &Facts, hop: &Hop) -> Option<Step> {
    let (device, nexthop) = (hop.device.as_ref()?, hop.nexthop?);
    let name = &device.name;
    let is_tunnel = device.kind.is_tunnel();
    Some(match hop.neighbour.as_ref()? {
        Read::Unreadable(why) => Step::unknown("neighbour", format!("{nexthop} on {name}: {why}")),
        Read::Missing if is_tunnel => no_neighbour(facts, nexthop, name),
        // The kernel itself makes such an entry when it does not know the MAC address.
        Read::Found(found) if is_tunnel && found.mac.is_none() => no_neighbour(facts, nexthop, name),
        Read::Missing => Step::ok("neighbour", format!("{nexthop} on {name} is not known yet: the kernel asks for it")),
        Read::Found(found) => known_neighbour(found, nexthop, name),
    })
}

fn no_neighbour(facts: &Facts, nexthop: IpAddr, name: &str) -> Step {
    let step = Step::ok("neighbour", format!("none for {nexthop} on {name}"));
    let wanted = planned(facts, &format!("neigh {nexthop} "));
    step.broken(
        format!("{name} has no neighbour entry for {nexthop}, so the MAC address of the peer's device is not known"),
        REWRITE,
    )
    .should_be(wanted.unwrap_or_else(|| "a permanent entry with the MAC address of the peer's lease".to_owned()))
}

fn known_neighbour(found: &Neighbour, nexthop: IpAddr, name: &str) -> Step {
    let has = |state: u16| found.state & state != 0;
    let word = match found.state {
        state if state & libc::NUD_PERMANENT != 0 => "permanent",
        state if state & libc::NUD_NOARP != 0 => "noarp",
        state if state & libc::NUD_REACHABLE != 0 => "reachable",
        state if state & libc::NUD_FAILED != 0 => "failed",
        state if state & libc::NUD_INCOMPLETE != 0 => "incomplete",
        _ => "stale",
    };
    let mac = found.mac.map_or_else(|| "no MAC address".to_owned(), |mac| mac.to_string());
    let step = Step::ok("neighbour", format!("{nexthop} on {name}: {mac}, {word}"));
    if has(libc::NUD_FAILED) {
        return step.broken(
            format!("{nexthop} does not answer on {name}"),
            format!("see whether {nexthop} is up and on the same link: ping {nexthop}"),
        );
    }
    let state = if has(libc::NUD_INCOMPLETE) { State::Unknown } else { State::Ok };
    Step { state, ..step }
}

/// The tunnel: its device, where it sends the packet, and the way of the outer packet.
pub(super) fn tunnel(facts: &Facts, way: &Way, device: &Device, tunnel: &Tunnel, to: &Place) -> Vec<Step> {
    let mut steps = Vec::new();
    if let (Some(fdb), Some(Read::Found(neighbour))) = (&tunnel.fdb, &way.hop.neighbour) {
        let mac = neighbour.mac.map(|mac| mac.to_string()).unwrap_or_default();
        steps.push(fdb_step(facts, device, &mac, fdb, to));
    }
    let Some(remote) = tunnel.remote else {
        if !matches!(device.kind, DeviceKind::Vxlan { .. }) {
            let text = format!("where {} sends the packet is not known without the agent", device.name);
            steps.push(Step::unknown("tunnel", text));
        }
        return steps;
    };
    steps.push(
        Step::ok("tunnel", format!("{}: {} to {remote}", device.name, encapsulation(&device.kind))).mtu(device.mtu),
    );
    let Some(outer) = &tunnel.outer else { return steps };
    steps.push(underlay(remote, device, outer));
    steps.extend(self::device(outer));
    let under = neighbour(facts, outer);
    steps.extend(under.map(|step| Step { step: "underlay neighbour".to_owned(), ..step }));
    steps
}

fn encapsulation(kind: &DeviceKind) -> String {
    match kind {
        DeviceKind::Vxlan { vni, port } => format!("vxlan, VNI {vni}, UDP port {port},"),
        DeviceKind::Ipip => "ipip,".to_owned(),
        DeviceKind::WireGuard => "WireGuard,".to_owned(),
        DeviceKind::Tun => "UDP by the agent,".to_owned(),
        DeviceKind::Ethernet | DeviceKind::Bridge | DeviceKind::Loopback => String::new(),
    }
}

fn fdb_step(facts: &Facts, device: &Device, mac: &str, fdb: &Read<IpAddr>, to: &Place) -> Step {
    let name = &device.name;
    let public = match to {
        Place::Peer(peer) => Some(peer).filter(|peer| !peer.public.is_empty()),
        _ => None,
    };
    let wanted = planned(facts, &format!("fdb {mac}"));
    let wanted = wanted.or_else(|| Some(publics(public?)));
    let wanted = wanted.unwrap_or_else(|| "the published address of the peer".to_owned());
    match fdb {
        Read::Unreadable(why) => Step::unknown("fdb", format!("{mac} on {name}: {why}")),
        Read::Missing => Step::ok("fdb", format!("no entry for {mac} on {name}"))
            .broken(format!("{name} has no FDB entry for {mac}, so it drops the packet"), REWRITE)
            .should_be(wanted),
        Read::Found(remote) => {
            let step = Step::ok("fdb", format!("{mac} on {name}: {remote}"));
            match public {
                Some(peer) if !peer.public.contains(remote) => step
                    .broken(
                        format!("{name} sends the packet to {remote}, and the lease names {}", publics(peer)),
                        REWRITE,
                    )
                    .should_be(wanted),
                _ => step,
            }
        }
    }
}

/// The route of the outer packet, and whether a packet of full size fits.
fn underlay(remote: IpAddr, device: &Device, outer: &Hop) -> Step {
    let name = "underlay route";
    let (route, through) = match (&outer.lookup, &outer.device) {
        (Lookup::Unreadable(why), _) => return Step::unknown(name, format!("the kernel does not answer: {why}")),
        (Lookup::Refused(errno), _) => {
            let (what, remedy) = match errno {
                // `ip rule ... prohibit` and `blackhole`, maybe for one address of this node alone.
                Errno::EACCES | Errno::EINVAL => {
                    ("a policy rule or a route of another table refuses packets of this node", refusing_rule(remote))
                }
                _ => ("this node has no route", "set the uplink up, or give it a route".to_owned()),
            };
            let because = format!("{what} to {remote}, the published address of the peer");
            return Step::ok(name, format!("refused: {}", errno.desc())).broken(because, remedy);
        }
        (Lookup::Route(route), through) => (route, through.as_ref()),
    };
    let step = Step::ok(name, text(route, through));
    if let RouteKind::Refuses(_) = route.kind {
        let because = format!("the route {} drops the packets of the tunnel to {remote}", text(route, None));
        return step.broken(because, refusing_route(route, remote));
    }
    let Some(through) = through else {
        return step.broken(
            format!("packets of the tunnel to {remote} do not leave this node"),
            format!("see `ip route get {remote}`; the lease of the peer may name a wrong address"),
        );
    };
    if through.index == device.index {
        return step.broken(
            format!("the route to {remote} leads back into {}", device.name),
            "the published address of the peer must not be inside a subnet of pods",
        );
    }
    if device.lower != 0 && device.lower != through.index {
        return Step {
            state: State::Doubt,
            because: Some(format!(
                "packets to {remote} leave over {}, and {} was made for another link, as after the start of a VPN",
                through.name, device.name
            )),
            remedy: Some(format!(
                "see `ip route get {remote}`; if the main table has the right route: {}",
                ask_main_first(remote.into())
            )),
            ..step
        };
    }
    fits(step, remote, device, route, through)
}
