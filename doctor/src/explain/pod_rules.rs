// SPDX-License-Identifier: Apache-2.0
//! Lets the rules inside of a pod of this node judge its packets: a script in it, a sidecar or a CNI plugin behind weft's may have written them. Those of
//! nftables and iptables-nft are read from the kernel, and the programs of this node list those of iptables-legacy.

use std::fs::{self, File};
use std::net::IpAddr;
use std::os::fd::AsFd;

use weft_cni::iptables::legacy_tables_file;
use weft_netlink::nftables::is_unsupported;
use weft_netlink::rtnl::in_netns;
use weft_subnet::cidr::Family;

use super::explanation::{State, Step};
use super::facts::{Hop, Lookup, Packet, Pod, Route, RouteKind, Way};
use super::legacy_tables::follow_all;
use super::rules::of_nftables;
use crate::kernel::queues::readers;
use crate::kernel::rules::Connection;
use crate::programs::ProgramError;
use crate::saved_rules;

/// The name of the steps.
const STEP: &str = "pod rules";

/// Returns what is not in order with the rules inside of the pods that send and get the packet of a way. `asked` is the packet that the operator asked
/// about. If a service translates it, the way is that to its endpoint, and the pod that uses the service sees the address and the port of the service.
pub fn of(way: &Way, asked: Packet) -> Vec<Step> {
    let (sent, received) = seen_by_pods(way, asked);
    let sends = way.from_pod.iter().flat_map(|pod| inside(pod, sent.from, &sent_by(pod, way, sent)));
    let gets = way.to_pod.iter().flat_map(|pod| inside(pod, received.to, &received_by(pod, way, received)));
    sends.chain(gets).collect()
}

/// Returns the packet of a way as the pod that sends it sees it, and as the pod that gets it sees it.
fn seen_by_pods(way: &Way, asked: Packet) -> (Packet, Packet) {
    match way.connection {
        // This is the answer: the pod that used the service gets it.
        Connection::Established => (way.packet, asked.answer()),
        _ => (asked, way.packet),
    }
}

/// The way of the packet inside of the pod that sends it.
fn sent_by(pod: &Pod, way: &Way, packet: Packet) -> Way {
    let hop = Hop { lookup: pod.route.clone(), device: Some(pod.link.clone()), nexthop: None, neighbour: None };
    Way { packet, arrives: None, hop, tunnel: None, ..way.clone() }
}

/// The way of the packet inside of the pod that gets it.
fn received_by(pod: &Pod, way: &Way, packet: Packet) -> Way {
    let local = Route { kind: RouteKind::Local, ..Route::default() };
    let hop = Hop { lookup: Lookup::Route(local), device: None, nexthop: None, neighbour: None };
    Way { packet, arrives: Some(pod.link.clone()), hop, tunnel: None, ..way.clone() }
}

fn inside(pod: &Pod, address: IpAddr, way: &Way) -> Vec<Step> {
    let judge = || {
        // The queues of the pod are not those of this host.
        let (way, family) = (Way { queues: readers(), ..way.clone() }, Family::of(way.packet.to));
        (of_nftables(&way, family, "", false), of_iptables_legacy(&way, family))
    };
    // A pod that may not be entered is a step of its own.
    let judged = File::open(&pod.netns).ok().and_then(|netns| in_netns(netns.as_fd(), judge).ok());
    let Some((of_nftables, of_legacy)) = judged else { return Vec::new() };
    let unread = |what: &str, why: String| format!("{what} in the pod {address} cannot be read: {why}");
    let of_nftables = of_nftables.or_else(|error| match is_unsupported(&error) {
        // A kernel without nftables has no such rules.
        true => Ok(Vec::new()),
        false => Err(unread("nftables", error.to_string())),
    });
    let of_legacy = of_legacy.map_err(|error| unread("iptables-legacy", error.to_string()));
    let enter = pod.enter();
    let of_pod = |step: Step| Step {
        step: STEP.to_owned(),
        because: step.because.map(|because| format!("inside of the pod {address}, {because}")),
        remedy: step.remedy.map(|remedy| remedy.replace("look at `", &format!("look at `{enter} "))),
        ..step
    };
    let matters = |step: &Step| matches!(step.state, State::Broken | State::Doubt);
    let steps = |read: Result<Vec<Step>, String>| match read {
        Ok(steps) => steps.into_iter().filter(matters).map(of_pod).collect(),
        Err(unread) => vec![Step::unknown(STEP, unread)],
    };
    [of_nftables, of_legacy].into_iter().flat_map(steps).collect()
}

/// Follows the packet through the tables of iptables-legacy of this network namespace that filter packets.
fn of_iptables_legacy(way: &Way, family: Family) -> Result<Vec<Step>, ProgramError> {
    let present = fs::read_to_string(legacy_tables_file(family)).unwrap_or_default();
    if present.trim().is_empty() {
        return Ok(Vec::new());
    }
    match saved_rules::read(family, Some(&present)) {
        Ok(saved) => Ok(follow_all(way, saved.filters(), &saved.program).steps),
        // Many kernels have these tables in each namespace, whether somebody has written rules into them or not.
        Err(ProgramError::NotInstalled(_)) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}
