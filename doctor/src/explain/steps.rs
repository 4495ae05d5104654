// SPDX-License-Identifier: Apache-2.0
//! Decides from the facts, without side effects, where a packet is lost.

use std::net::IpAddr;

use super::explanation::{Explanation, State, Step, Verdict};
use super::facts::{Agent, Device, DeviceKind, Facts, Peer, Place, RouteKind, Way};
use super::shared_steps::{down, no_device, publics};
use super::{pod_steps, port_steps, route_steps};

/// The step of what the agent's probes found.
const PROBES: &str = "agent's probes";

/// Makes the explanation. `rules` contains what the firewall does with the packet of each way, and `probes` the results of packets that were sent.
pub fn decide(facts: &Facts, rules: &[Vec<Step>], probes: Vec<Step>) -> Explanation {
    let mut steps = Vec::new();
    for (number, way) in facts.ways.iter().enumerate() {
        let rules = rules.get(number).map(Vec::as_slice).unwrap_or_default();
        let of_way = one_way(facts, way, rules, number == 0);
        let is_answer = number > 0;
        steps.extend(of_way.into_iter().map(|step| match is_answer {
            true => Step { step: format!("answer: {}", step.step), ..step },
            false => step,
        }));
    }
    if !facts.ways.is_empty() {
        steps.extend(reported(facts));
    }
    steps.extend(probes);
    let (verdict, sentence, remedy) = end(facts, &steps);
    Explanation {
        from: facts.packet.from.to_string(),
        from_is: describe(&facts.from, facts.packet.from),
        to: facts.packet.to.to_string(),
        to_is: describe(&facts.to, facts.packet.to),
        steps,
        verdict,
        sentence,
        remedy,
    }
}

fn end(facts: &Facts, steps: &[Step]) -> (Verdict, String, Option<String>) {
    if facts.ways.is_empty() {
        let node = match (&facts.from, &facts.to) {
            (Place::Peer(peer), _) | (_, Place::Peer(peer)) => format!("on the node {}", publics(peer)),
            _ => "on the node of one of the two addresses".to_owned(),
        };
        let sentence = "cannot be decided here, because neither address belongs to this node".to_owned();
        return (Verdict::Unknown, sentence, Some(format!("run {node}: weft explain {}", facts.packet.arguments())));
    }
    // What the probes found is a guess about the cause. A step that shows the cause comes first.
    let broken = || steps.iter().filter(|step| step.state == State::Broken);
    if let Some(step) = broken().find(|step| step.step != PROBES).or_else(|| broken().next()) {
        let because = step.because.clone().unwrap_or_else(|| step.is.clone());
        return (Verdict::Broken, format!("broken here, because {because}"), step.remedy.clone());
    }
    if let Some(step) = steps.iter().find(|step| step.state == State::Doubt) {
        let because = step.because.clone().unwrap_or_else(|| step.is.clone());
        return (Verdict::Unknown, format!("cannot be decided here, because {because}"), step.remedy.clone());
    }
    (Verdict::Works, "works as far as this node can tell".to_owned(), None)
}

fn describe(place: &Place, address: IpAddr) -> String {
    match place {
        Place::Host => "this node".to_owned(),
        Place::Pod => "pod of this node".to_owned(),
        Place::Peer(peer) if peer.has_pod(address) => format!("pod of the node {}", publics(peer)),
        Place::Peer(_) => "another node".to_owned(),
        Place::Network => "inside the network of the pods, on no node that is known here".to_owned(),
        Place::Outside => "outside of the network of the pods".to_owned(),
    }
}

/// Returns the steps of one way. The lease, and an address that no pod has, are steps of the first way only.
fn one_way(facts: &Facts, way: &Way, rules: &[Step], with_lease: bool) -> Vec<Step> {
    let mut steps = Vec::new();
    let place = |address| if address == facts.packet.from { &facts.from } else { &facts.to };
    let (from, to) = (place(way.packet.from), place(way.packet.to));
    let absent = |address| pod_steps::absent(facts, address).filter(|_| with_lease);
    steps.extend(absent(way.packet.from));
    steps.extend(pod_steps::sends(facts, way));
    steps.extend(port_steps::small_link(way));
    steps.extend(port_steps::no_arp(way));
    steps.extend(source(facts, way, from));
    if with_lease {
        steps.extend(lease(facts));
    }
    steps.push(route_steps::route(facts, way, to));
    if way.hop.route().is_some_and(|route| matches!(route.kind, RouteKind::Unicast | RouteKind::Local)) {
        steps.extend(rules.iter().cloned());
        steps.extend(pod_steps::not_masqueraded(facts, way, (from, to), rules));
    }
    steps.extend(route_steps::device(&way.hop));
    steps.extend(route_steps::neighbour(facts, &way.hop));
    steps.extend(absent(way.packet.to));
    steps.extend(pod_steps::gets(way));
    steps.extend(port_steps::isolated(way));
    steps.extend(port_steps::other_port(way));
    if let (Some(tunnel), Some(device)) = (&way.tunnel, &way.hop.device) {
        steps.extend(route_steps::tunnel(facts, way, device, tunnel, to));
    }
    steps
}

fn source(facts: &Facts, way: &Way, from: &Place) -> Option<Step> {
    let from_text = way.packet.from;
    let Some(device) = &way.arrives else {
        return match from {
            Place::Host => Some(Step::ok("source", format!("this node sends from its address {from_text}"))),
            Place::Pod => Some(no_device(facts, "source", from_text)),
            _ => {
                Some(Step::unknown("source", format!("no route leads back to {from_text}, so its device is not known")))
            }
        };
    };
    let step = Step::ok("source", format!("packets from {from_text} arrive on {}", device.name)).mtu(device.mtu);
    Some(if is_usable(device) { step } else { down(step, device) })
}

fn is_usable(device: &Device) -> bool {
    // A device without a carrier is a bridge without ports, or a cable that is not connected. Tunnels always have one.
    device.up && (device.carrier || !matches!(device.kind, DeviceKind::Ethernet | DeviceKind::Bridge))
}

/// The lease of the address that does not belong to this node.
fn lease(facts: &Facts) -> Option<Step> {
    let (remote, place) = match (&facts.from, &facts.to) {
        (from, to) if from.is_here() && !to.is_here() => (facts.packet.to, to),
        (from, to) if to.is_here() && !from.is_here() => (facts.packet.from, from),
        _ => return None,
    };
    match (place, &facts.agent) {
        (Place::Peer(peer), _) => Some(lease_of(peer, remote)),
        (Place::Network, Agent::Silent(why)) => {
            Some(Step::unknown("lease", format!("not known, because the agent does not answer: {why}")))
        }
        (Place::Network, Agent::Answers(_)) => Some(Step::ok("lease", format!("no lease contains {remote}")).broken(
            format!("no node has a lease for {remote}"),
            "`weft lease ls` shows all leases; see whether the agent of that node runs, and whether the address is right",
        )),
        (Place::Outside, Agent::Silent(why)) => {
            Some(Step::unknown("lease", format!("whether it is a peer is not known, because the agent does not answer: {why}")))
        }
        _ => None,
    }
}

fn lease_of(peer: &Peer, remote: IpAddr) -> Step {
    let subnets: Vec<String> = peer.subnets.iter().map(ToString::to_string).collect();
    // A lease of the backend udp names no type.
    let backend = if peer.backend.is_empty() { String::new() } else { format!(" ({})", peer.backend) };
    let text = format!("{} belongs to {}{backend}, {}", subnets.join(", "), publics(peer), peer.state);
    let step = Step::ok("lease", text);
    let reason = peer.reason.clone().unwrap_or_else(|| "no reason is known".to_owned());
    match peer.state.as_str() {
        // The node itself is reached without entries of weft.
        _ if !peer.has_pod(remote) => step,
        "set-aside" => step.broken(
            format!("the lease of {remote} is not believed: {reason}"),
            "look for the reason in docs/messages.md; it is the lease of that node that must change",
        ),
        "failed" | "pending" => step.broken(
            format!("entries for {remote} could not be written: {reason}"),
            "look for the reason in docs/messages.md; `weft plan` shows the entries",
        ),
        _ => step,
    }
}

/// What the probes of the running agent have found.
fn reported(facts: &Facts) -> Option<Step> {
    let both = [(&facts.to, facts.packet.to), (&facts.from, facts.packet.from)];
    let peer = both.into_iter().find_map(|(place, address)| match place {
        Place::Peer(peer) if peer.state == "unreachable" && peer.has_pod(address) => Some(peer),
        _ => None,
    })?;
    let reason = peer.reason.clone().unwrap_or_else(|| "packets do not reach the peer".to_owned());
    let step = Step::ok(PROBES, reason.clone());
    Some(step.broken(reason, "look for this text in docs/messages.md; `weft mesh` on both nodes tells the direction"))
}
