// SPDX-License-Identifier: Apache-2.0
//! Lets the rules of iptables and of nftables judge a packet.

use std::io;
use std::net::IpAddr;

use weft_cni::iptables::{Flavour, Saved, builtin_chain};
use weft_netlink::nftables::{self, BaseChain, Hook, base_chains, is_unsupported, link_chains};
use weft_subnet::cidr::Family;

use super::explanation::{State, Step};
use super::facts::{DeviceKind, Hop, Packet, Pod, Proto, Way};
use super::legacy_tables::Examined;
use crate::kernel::links::{Drops, Point, drops};
use crate::kernel::nft;
use crate::kernel::rules::{Connection, Fate, Outcome, follow, new_destination};
use crate::saved_rules::{SIDE, is_of_iptables};

/// Why the rules of a flavour are not known. It is the error of the program that lists them, which the caller runs.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotListed(pub Box<dyn std::error::Error + Send + Sync>);

/// The rules of iptables of one family, as its programs list them. The tables other than filter and nat are read from nftables, or are in
/// [`Examined`].
#[derive(Debug, Default)]
pub struct Listed {
    /// The rules of each flavour whose program is installed, or why they are not known.
    pub flavours: Vec<(Flavour, Result<Saved, NotListed>)>,
    /// The kernel has tables of iptables-legacy.
    pub has_legacy_tables: bool,
}

impl Listed {
    /// Returns the rules that could be read.
    fn read(&self) -> impl Iterator<Item = (Flavour, &Saved)> {
        self.flavours.iter().filter_map(|(flavour, saved)| Some((*flavour, saved.as_ref().ok()?)))
    }

    /// Returns true if a program was read that lists the tables of this flavour. The plain program may be of either.
    fn includes(&self, wanted: Flavour) -> bool {
        self.read().any(|(flavour, _)| flavour == wanted || flavour == Flavour::Plain)
    }
}

/// Returns what all firewalls of this node do with the packet of a way. `instance` is the name of our own tables.
pub fn of(way: &Way, listed: &Listed, legacy: Examined, instance: &str) -> Vec<Step> {
    let mut steps = Vec::new();
    let family = Family::of(way.packet.to);
    let untracked = Way { connection: Connection::Untracked, ..way.clone() };
    let way = if legacy.untracked || is_untracked(way, family) { &untracked } else { way };
    for (flavour, saved) in &listed.flavours {
        match saved {
            Ok(saved) => steps.extend(of_iptables(way, saved, &flavour.program(family))),
            Err(error) => steps.push(Step::unknown("rules", format!("{flavour}: {error}"))),
        }
    }
    if !listed.includes(Flavour::Legacy) && listed.has_legacy_tables {
        let text = "the kernel has tables of iptables-legacy, and the program that lists them is not installed";
        steps.push(Step::unknown("rules", text));
    }
    steps.extend(legacy.steps);
    match of_nftables(way, family, instance, listed.includes(Flavour::Nft)) {
        Ok(found) => steps.extend(found),
        Err(error) if is_unsupported(&error) => {}
        Err(error) => steps.push(Step::unknown("rules", format!("nftables cannot be read: {error}"))),
    }
    // If nftables cannot be read, there is a step about that already.
    steps.extend(of_links(way).unwrap_or_default());
    if steps.is_empty() {
        steps.push(Step::ok("rules", "no rule of a firewall concerns the packet"));
    }
    steps
}

/// Returns the packets of a tunnel itself, to the other node and from it, as ways. `agent_port` is the UDP port of a tunnel whose device
/// does not show it.
pub fn ways_of_tunnel(way: &Way, agent_port: Option<u16>) -> Vec<Way> {
    let device = way.hop.device.as_ref();
    let tunnel = way.tunnel.as_ref().and_then(|tunnel| Some((tunnel.remote?, tunnel.outer.as_ref()?, tunnel.ends?)));
    let Some((remote, outer, ends)) = tunnel else { return Vec::new() };
    let (proto, port) = match (device.map(|device| &device.kind), agent_port) {
        (Some(DeviceKind::Vxlan { port, .. }), _) => (Proto::Udp, Some(*port)),
        (Some(DeviceKind::WireGuard | DeviceKind::Tun), Some(port)) => (Proto::Udp, Some(port)),
        (Some(DeviceKind::Ipip), _) => (Proto::Ipip, None),
        _ => return Vec::new(),
    };
    let packet = |from, to| Packet { from, to, proto: Some(proto), port };
    let one = |packet, arrives, hop| Way {
        packet,
        arrives,
        hop,
        tunnel: None,
        route_of_weft: None,
        connection: Connection::New,
        from_pod: None,
        to_pod: None,
        queues: way.queues.clone(),
    };
    let received = Hop { device: None, nexthop: None, neighbour: None, ..outer.clone() };
    let (sent, arrived) = (packet(ends.from, remote), packet(remote, ends.at));
    vec![one(sent, None, outer.clone()), one(arrived, outer.device.clone(), received)]
}

/// Returns the steps of the packets of a tunnel that are not in order.
pub fn faults_of_tunnel(mut steps: Vec<Step>) -> Vec<Step> {
    steps.retain(|step| matches!(step.state, State::Broken | State::Doubt));
    steps.into_iter().map(|step| Step { step: "tunnel rules".to_owned(), ..step }).collect()
}

/// Returns true if a rule takes the packet out of connection tracking before the filter.
fn is_untracked(way: &Way, family: Family) -> bool {
    let first = if way.arrives.is_some() { Hook::Prerouting } else { Hook::Output };
    let mut found = false;
    // If nftables cannot be read, a step about the rules says so.
    let _ = each_chain(&[first], way, family, true, |_, _, outcome| found |= outcome.untracked);
    found
}

/// Returns the chains at links and in bridges that drop the packet.
fn of_links(way: &Way) -> io::Result<Vec<Step>> {
    let mut netlink = nftables::open()?;
    let chains = link_chains(&mut netlink)?;
    if chains.is_empty() {
        return Ok(Vec::new());
    }
    let port = |pod: &Option<Pod>| {
        let link = pod.as_ref().map(|pod| &pod.host_link)?;
        (link.master != 0).then(|| link.name.clone())
    };
    let mut points: Vec<Point> = port(&way.from_pod).iter().flat_map(|port| Point::from_port(port)).collect();
    points.extend(way.arrives.iter().map(|device| Point::Arrives(device.name.clone())));
    points.extend(way.hop.device.iter().map(|device| Point::Leaves(device.name.clone())));
    points.extend(port(&way.to_pod).iter().flat_map(|port| Point::to_port(port)));
    let step = |found: Drops| {
        let text = format!("nft chain {} drops packets {}: {}", found.chain, found.place, found.rule);
        Step::ok("rules", text.clone()).broken(text, found.remedy)
    };
    Ok(drops(&mut netlink, &chains, way.tested(), &points)?.into_iter().map(step).collect())
}

fn of_iptables(way: &Way, saved: &Saved, program: &str) -> Vec<Step> {
    let tested = way.tested();
    let mut steps = Vec::new();
    if let Some(filter) = saved.table("filter") {
        let chain = builtin_chain(way.filter_hook());
        let remedy = format!("look at `{program} -S {chain}`; let the packets of pods pass, or remove the rule");
        steps.push(follow(filter, chain, tested).step(&format!("{program} {chain}"), &remedy));
    }
    // Chains that translate addresses see the first packet of a connection alone.
    if let Some(nat) = saved.table("nat")
        && way.hop.device.is_some()
        && way.connection == Connection::New
    {
        steps.push(follow(nat, "POSTROUTING", tested).nat_step(&format!("{program} nat POSTROUTING")));
    }
    steps
}

/// An address that the destination of a packet is translated to, and the port if that changes, too.
pub type Endpoint = (IpAddr, Option<u16>);

/// Returns the first address that the destination of a packet is translated to, with the rule as a step. Without such an address, the step says what
/// is not known about it.
pub fn service(way: &Way, listed: &Listed) -> Option<(Step, Option<Endpoint>)> {
    let family = Family::of(way.packet.to);
    let hook = if way.arrives.is_some() { Hook::Prerouting } else { Hook::Output };
    let chain = builtin_chain(hook);
    for (flavour, saved) in listed.read() {
        let Some(nat) = saved.table("nat") else { continue };
        let outcome = follow(nat, chain, way.tested());
        if let Some(found) = translated(outcome, &format!("{flavour} nat {chain}"), way.packet.to) {
            return Some(found);
        }
    }
    let mut found = None;
    let walked = each_chain(&[hook], way, family, listed.includes(Flavour::Nft), |chain, _, outcome| {
        if chain.is_nat && found.is_none() {
            found = translated(outcome, &name_of(chain), way.packet.to);
        }
    });
    match walked {
        Err(error) if !is_unsupported(&error) => {
            found.or_else(|| Some((Step::unknown("service", format!("nftables cannot be read: {error}")), None)))
        }
        _ => found,
    }
}

/// Returns the step of a service, and the translated address if it is known, if a chain translates the destination.
fn translated(outcome: Outcome, place: &str, to: IpAddr) -> Option<(Step, Option<Endpoint>)> {
    let mut all = [outcome.fate, outcome.not_evaluated].into_iter().flatten();
    let (_, rule) = all.find(|(fate, _)| *fate == Fate::DestinationTranslated)?;
    let target = new_destination(&rule).map(|new| (new.addr, new.port));
    let becomes = target.map_or_else(|| "another address".to_owned(), |(address, _)| address.to_string());
    let text = format!("{place}: {to} becomes {becomes}, one of its endpoints: {rule}");
    let step = if target.is_some() { Step::ok("service", text) } else { Step::unknown("service", text) };
    Some((step, target))
}

/// Follows the packet through the base chains of these hooks that concern its family, and hands each to `visit`. The tables that the program of
/// iptables-nft has read are left out.
fn each_chain(
    hooks: &[Hook],
    way: &Way,
    family: Family,
    has_read_iptables_nft: bool,
    mut visit: impl FnMut(&BaseChain, Hook, Outcome),
) -> io::Result<()> {
    let mut netlink = nftables::open()?;
    for hook in hooks {
        for chain in base_chains(&mut netlink, *hook)? {
            if !chain.sees(family == Family::V4) || (has_read_iptables_nft && is_of_iptables(&chain)) {
                continue;
            }
            let outcome = nft::follow(&mut netlink, &chain, way.tested().at(*hook))?;
            visit(&chain, *hook, outcome);
        }
    }
    Ok(())
}

fn name_of(chain: &BaseChain) -> String {
    format!("nft chain {}", chain.path())
}

/// Evaluates the chains of nftables that the packet passes.
pub(super) fn of_nftables(way: &Way, family: Family, instance: &str, has_iptables: bool) -> io::Result<Vec<Step>> {
    let decisive = way.filter_hook();
    let mut steps = Vec::new();
    each_chain(way.hooks(), way, family, has_iptables, |chain, hook, mut outcome| {
        let name = name_of(chain);
        if chain.is_nat && way.connection != Connection::New {
            return;
        }
        if chain.is_nat {
            let is_source = |decided: &Option<(Fate, String)>| {
                decided.as_ref().is_some_and(|(fate, _)| *fate == Fate::SourceTranslated)
            };
            let translates = is_source(&outcome.fate) || is_source(&outcome.not_evaluated);
            if hook == Hook::Postrouting && (chain.table == instance || translates) {
                steps.push(outcome.nat_step(&name));
            }
            return;
        }
        // Chains of other hooks than the one where filters usually are deserve a line only if they decide something.
        let is_side_table = chain.family != "inet" && SIDE.contains(&chain.table.as_str());
        if (hook != decisive || is_side_table)
            && outcome.fate.is_none()
            && outcome.not_evaluated.is_none()
            && !chain.drops
        {
            return;
        }
        outcome.fate = outcome.fate.or_else(|| {
            let policy = if chain.drops { (Fate::Dropped, "drop") } else { (Fate::Accepted, "accept") };
            Some((policy.0, format!("policy {}", policy.1)))
        });
        let remedy = format!("look at `nft -a list chain {}`; let the packets of pods pass there", chain.path());
        steps.push(outcome.step(&name, &remedy));
    })?;
    Ok(steps)
}
