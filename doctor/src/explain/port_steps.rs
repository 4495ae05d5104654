// SPDX-License-Identifier: Apache-2.0
//! The steps at the ports of the bridge, and between the two ends of the link of a pod.

use super::explanation::Step;
use super::facts::Way;

/// Two pods of one bridge whose ports are both isolated.
pub(super) fn isolated(way: &Way) -> Option<Step> {
    let (from, to) = (&way.from_pod.as_ref()?.host_link, &way.to_pod.as_ref()?.host_link);
    if !(from.isolated && to.isolated && from.master == to.master) {
        return None;
    }
    let because =
        format!("{} and {} are isolated ports of one bridge, which passes nothing between them", from.name, to.name);
    let remedy = format!(
        "bridge link set dev {} isolated off; or leave it, if pods of one node must not reach each other (`portIsolation` of the CNI \
         configuration)",
        to.name
    );
    Some(Step::ok("bridge", because.clone()).broken(because, remedy))
}

/// The pod sends larger packets than the other end of its link takes. The kernel drops them without an answer.
pub(super) fn small_link(way: &Way) -> Option<Step> {
    let pod = way.from_pod.as_ref()?;
    let (inside, host) = (&pod.link, &pod.host_link);
    if inside.mtu <= host.mtu {
        return None;
    }
    let step = Step::ok(
        "pod",
        format!("{} of the pod has MTU {}, and {} has {}", inside.name, inside.mtu, host.name, host.mtu),
    );
    let because = format!(
        "{} drops packets of the pod {} with more than {} bytes, which {} of the pod sends; smaller packets pass",
        host.name, way.packet.from, host.mtu, inside.name
    );
    let remedy = format!("{} ip link set {} mtu {}", pod.enter(), inside.name, host.mtu);
    Some(step.broken(because, remedy))
}

/// The bridge sends the packets for the pod to a port that somebody wrote down.
pub(super) fn other_port(way: &Way) -> Option<Step> {
    let pod = way.to_pod.as_ref()?;
    let (other, mac) = (pod.other_port.as_ref()?, pod.link.mac?);
    let because = format!(
        "the bridge has a static entry that leads packets for the pod {} ({mac}) to {}, and the pod is behind {}",
        way.packet.to, other.name, pod.host_link.name
    );
    Some(Step::ok("bridge", because.clone()).broken(because, format!("bridge fdb del {mac} dev {} master", other.name)))
}

/// The link inside of a pod is without ARP: the pod asks nobody for a MAC address, and answers nobody.
pub(super) fn no_arp(way: &Way) -> Option<Step> {
    let both = [(&way.from_pod, way.packet.from), (&way.to_pod, way.packet.to)];
    let mut pods = both.into_iter().filter_map(|(pod, address)| Some((pod.as_ref()?, address)));
    let (pod, address) = pods.find(|(pod, address)| pod.link.no_arp && address.is_ipv4())?;
    let name = &pod.link.name;
    let because = format!(
        "{name} of the pod {address} has the flag NOARP, so the pod asks nobody for a MAC address, and answers nobody"
    );
    let remedy = format!("{} ip link set {name} arp on", pod.enter());
    Some(Step::ok("pod", format!("{name} of the pod, over {}", pod.host_link.name)).broken(because, remedy))
}
