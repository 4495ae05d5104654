// SPDX-License-Identifier: Apache-2.0
//! Another vxlan device takes the packets of weft's.

use std::collections::BTreeSet;

use weft_backends::vxlan::USUAL_VNI;

use crate::facts::NodeFacts;
use crate::facts::tunnel::may_be_vxlan;
use crate::finding::{NodeFinding, finding};

/// Another vxlan device that receives what belongs to ours: the kernel lets no two devices share a VNI and a port.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let devices = &facts.ways.vxlan;
    let mut wanted: BTreeSet<(u32, u16)> =
        devices.iter().filter(|device| device.ours).map(|device| (device.vxlan.vni, device.vxlan.port)).collect();
    // Before the first start weft has no device yet. With another backend it makes none.
    if wanted.is_empty() && may_be_vxlan(&facts.backend) {
        wanted.insert((USUAL_VNI, facts.port));
    }
    let mut findings = Vec::new();
    for other in devices.iter().filter(|device| !device.ours) {
        let (name, vni, port) = (&other.name, other.vxlan.vni, other.vxlan.port);
        let what = if other.vxlan.external { "every VNI".to_owned() } else { format!("VNI {vni}") };
        let collides = |&(our_vni, our_port): &(u32, u16)| our_port == port && (other.vxlan.external || our_vni == vni);
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

#[cfg(test)]
mod tests {
    use weft_netlink::rtnl::Vxlan;

    use super::*;
    use crate::facts::ways::VxlanDevice;

    #[test]
    fn a_vxlan_device_collides_by_vni_and_port_or_by_port_if_it_takes_every_vni() {
        for (vni, port, external, found) in
            [(1, 8472, false, true), (2, 8472, false, false), (1, 4789, false, false), (0, 8472, true, true)]
        {
            let vxlan = Vxlan { vni, port, external };
            let other = VxlanDevice { name: "vx0".to_owned(), vxlan, ours: false };
            let mut facts = NodeFacts::of_a_node();
            facts.ways.vxlan.push(other.clone());
            assert_eq!(check(&facts).len(), usize::from(found), "before the first start: {other:?}");
            let wireguard = NodeFacts { backend: "wireguard".to_owned(), ..facts.clone() };
            assert_eq!(check(&wireguard), [], "this backend has no vxlan device: {other:?}");
            // With a device of our own, its VNI counts.
            let vxlan = Vxlan { vni: 2, port: 8472, external: false };
            facts.ways.vxlan.push(VxlanDevice { name: "flannel.2".to_owned(), vxlan, ours: true });
            let found = port == 8472 && (vni == 2 || external);
            assert_eq!(check(&facts).len(), usize::from(found), "beside flannel.2: {other:?}");
        }
    }
}
