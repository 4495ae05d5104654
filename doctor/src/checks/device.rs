// SPDX-License-Identifier: Apache-2.0
//! Another vxlan device takes the packets of weft's.

use weft_backends::vxlan::USUAL_VNI;
use weft_netlink::rtnl::Vxlan;

use crate::facts::NodeFacts;
use crate::facts::tunnel::may_be_vxlan;
use crate::finding::{NodeFinding, finding};

/// What a vxlan device receives: the kernel lets no two devices share all of this.
#[derive(Clone, Copy)]
struct Received {
    vni: u32,
    port: u16,
    v6: bool,
}

/// Another vxlan device that receives what belongs to ours.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let devices = &facts.ways.vxlan;
    let ours = devices.iter().filter(|device| device.ours).map(|device| device.vxlan);
    let mut wanted: Vec<Received> = ours.map(|Vxlan { vni, port, v6, .. }| Received { vni, port, v6 }).collect();
    // Before the first start weft has no device yet. With another backend it makes none. While no agent answers, a device of weft shows that.
    if wanted.is_empty() && may_be_vxlan(&facts.backend) && facts.own_device.is_none() {
        wanted = families(facts).map(|v6| Received { vni: USUAL_VNI, port: facts.port, v6 }).collect();
    }
    let mut findings = Vec::new();
    for other in devices.iter().filter(|device| !device.ours) {
        let (name, vni, port) = (&other.name, other.vxlan.vni, other.vxlan.port);
        let what = if other.vxlan.external { "every VNI".to_owned() } else { format!("VNI {vni}") };
        let collides = |ours: &Received| {
            ours.port == port && (other.vxlan.external || (ours.vni == vni && ours.v6 == other.vxlan.v6))
        };
        if wanted.iter().any(collides) {
            let evidence = format!(
                "{name} is another vxlan device, and receives {what} on UDP port {port}: it and weft's device exclude each other"
            );
            let remedy = format!(
                "`ip link del {name}` if nobody needs it; else choose another VNI or Port in the net-conf of the whole cluster"
            );
            findings.push(finding(evidence, remedy));
        }
    }
    findings
}

/// Returns for each device that weft is going to make whether it is one of IPv6. Without a subnet, only that of IPv4 is certain.
fn families(facts: &NodeFacts) -> impl Iterator<Item = bool> {
    let subnets = facts.subnet_file.env().map(|env| env.subnets);
    let has_v4 = subnets.is_none_or(|subnets| subnets.v4.is_some());
    let has_v6 = subnets.is_some_and(|subnets| subnets.v6.is_some());
    [(has_v4, false), (has_v6, true)].into_iter().filter(|(has, _)| *has).map(|(_, v6)| v6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::ways::VxlanDevice;

    #[test]
    fn a_vxlan_device_collides_by_vni_and_port_or_by_port_if_it_takes_every_vni() {
        for (vni, port, external, found) in
            [(1, 8472, false, true), (2, 8472, false, false), (1, 4789, false, false), (0, 8472, true, true)]
        {
            let vxlan = Vxlan { vni, port, external, v6: false };
            let other = VxlanDevice { name: "vx0".to_owned(), vxlan, ours: false };
            let mut facts = NodeFacts::of_a_node();
            facts.ways.vxlan.push(other.clone());
            assert_eq!(check(&facts).len(), usize::from(found), "before the first start: {other:?}");
            let wireguard = NodeFacts { backend: "wireguard".to_owned(), ..facts.clone() };
            assert_eq!(check(&wireguard), [], "this backend has no vxlan device: {other:?}");
            let silent = NodeFacts { own_device: Some("flannel-wg".to_owned()), ..facts.clone() };
            assert_eq!(check(&silent), [], "a device of another backend, and no agent that answers: {other:?}");
            // With a device of our own, its VNI counts.
            let vxlan = Vxlan { vni: 2, port: 8472, external: false, v6: false };
            facts.ways.vxlan.push(VxlanDevice { name: "flannel.2".to_owned(), vxlan, ours: true });
            let found = port == 8472 && (vni == 2 || external);
            assert_eq!(check(&facts).len(), usize::from(found), "beside flannel.2: {other:?}");
        }
    }

    #[test]
    fn a_vxlan_device_of_the_other_family_does_not_collide_unless_it_takes_every_vni() {
        for (ours, theirs, external, found) in [
            (false, true, false, false),
            (true, false, false, false),
            (true, true, false, true),
            (true, false, true, true),
        ] {
            let device = |name: &str, v6, external, ours| {
                let vxlan = Vxlan { vni: 1, port: 8472, external, v6 };
                VxlanDevice { name: name.to_owned(), vxlan, ours }
            };
            let mut facts = NodeFacts::of_a_node();
            facts.ways.vxlan = vec![device("flannel", ours, false, true), device("vx0", theirs, external, false)];
            assert_eq!(check(&facts).len(), usize::from(found), "{:?}", facts.ways.vxlan);
        }
        let vxlan = Vxlan { vni: 1, port: 8472, external: false, v6: true };
        let mut facts = NodeFacts::of_a_node();
        facts.ways.vxlan = vec![VxlanDevice { name: "vx0".to_owned(), vxlan, ours: false }];
        assert_eq!(check(&facts), [], "before the first start of a node with IPv4 alone");
    }
}
