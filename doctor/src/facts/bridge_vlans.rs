// SPDX-License-Identifier: Apache-2.0
//! The VLANs of the bridge of pods and of its ports, if the bridge filters packets by them.

use std::io;
use std::ops::RangeInclusive;

use nix::libc;
use weft_netlink::rt::ifinfomsg;
use weft_netlink::rtnl::Link;
use weft_netlink::socket::Netlink;
use weft_netlink::wire::{attr_after, attrs, messages, u16_at, u32_at};

use crate::known_links::bridge;

/// Size of `struct ifinfomsg`.
const IFINFOMSG: usize = 16;
/// Attributes of links, and the filter for the VLANs of bridges, with ranges of them (linux/rtnetlink.h, linux/if_link.h).
const IFLA_AF_SPEC: u16 = 26;
const IFLA_EXT_MASK: u16 = 29;
const RTEXT_FILTER_BRVLAN_COMPRESSED: u32 = 4;
/// A VLAN or an end of a range of them, and its flags (linux/if_bridge.h).
const IFLA_BRIDGE_VLAN_INFO: u16 = 2;
const BRIDGE_VLAN_INFO_PVID: u16 = 2;
const BRIDGE_VLAN_INFO_RANGE_BEGIN: u16 = 8;
const BRIDGE_VLAN_INFO_RANGE_END: u16 = 16;

/// The VLANs of a bridge or of a port.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Vlans {
    /// All of them.
    pub all: Vec<RangeInclusive<u16>>,
    /// The one of packets that arrive without a VLAN. Without it, they are dropped.
    pub of_untagged: Option<u16>,
}

impl Vlans {
    /// Returns true if packets without a VLAN, as pods send them, do not get from a port with these VLANs to one with the others. Somebody wants
    /// packets with a VLAN at a port that has VLANs and none for other packets.
    pub(crate) fn are_cut_off(&self, others: &Vlans) -> bool {
        match self.of_untagged {
            Some(vlan) => !others.all.iter().any(|range| range.contains(&vlan)),
            None => self.all.is_empty(),
        }
    }
}

/// The VLANs of a bridge that filters by them.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct BridgeVlans {
    /// Those of the bridge itself, which is a port of this host.
    pub own: Vlans,
    /// The names of its ports, each with its VLANs.
    pub ports: Vec<(String, Vlans)>,
}

/// Reads the VLANs of the bridge of pods. `None` if there is no such bridge, or if it does not filter.
///
/// # Errors
/// The kernel does not answer.
pub(super) fn read(links: &[Link]) -> io::Result<Option<BridgeVlans>> {
    let Some(bridge) = bridge(links).filter(|bridge| bridge.vlan_filtering) else { return Ok(None) };
    let mut fixed = ifinfomsg(0, 0, 0);
    fixed[0] = libc::AF_BRIDGE as u8;
    let data = Netlink::open()?.dump(libc::RTM_GETLINK, |w, kind, flags| {
        w.begin(kind, flags, &fixed);
        w.attr_u32(IFLA_EXT_MASK, RTEXT_FILTER_BRVLAN_COMPRESSED);
    })?;
    let of_link = |index: u32| {
        let mut found = messages(&data).filter(|m| m.kind == libc::RTM_NEWLINK && u32_at(m.payload, 4) == index);
        found.next().map(|m| vlans(m.payload))
    };
    let ports = links.iter().filter(|link| link.master == bridge.index);
    let ports = ports.filter_map(|port| Some((port.name.clone(), of_link(port.index)?))).collect();
    Ok(of_link(bridge.index).map(|own| BridgeVlans { own, ports }))
}

/// Returns the VLANs of an answer. A bridge or a port without any has no attribute for them.
fn vlans(payload: &[u8]) -> Vlans {
    let mut found = Vlans::default();
    let spec = attr_after(payload, IFINFOMSG, IFLA_AF_SPEC).unwrap_or_default();
    let mut begin = None;
    for (_, info) in attrs(spec).filter(|(kind, _)| *kind == IFLA_BRIDGE_VLAN_INFO) {
        let (flags, vlan) = (u16_at(info, 0), u16_at(info, 2));
        if flags & BRIDGE_VLAN_INFO_PVID != 0 {
            found.of_untagged = Some(vlan);
        }
        if flags & BRIDGE_VLAN_INFO_RANGE_BEGIN != 0 {
            begin = Some(vlan);
            continue;
        }
        let first = begin.take().filter(|_| flags & BRIDGE_VLAN_INFO_RANGE_END != 0);
        found.all.push(first.unwrap_or(vlan)..=vlan);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_netlink::wire::Writer;

    #[test]
    fn vlans_are_read_with_their_ranges() {
        let mut w = Writer::default();
        w.begin(libc::RTM_NEWLINK, 0, &[0; IFINFOMSG]);
        w.nest(IFLA_AF_SPEC, |w| {
            for (flags, vlan) in [(BRIDGE_VLAN_INFO_PVID, 1_u16), (8, 100), (16, 200), (0, 300)] {
                w.attr(IFLA_BRIDGE_VLAN_INFO, &[flags.to_ne_bytes(), vlan.to_ne_bytes()].concat());
            }
        });
        w.end(1);
        let found = vlans(messages(w.bytes()).next().unwrap().payload);
        assert_eq!(found, Vlans { all: vec![1..=1, 100..=200, 300..=300], of_untagged: Some(1) });
        assert_eq!(vlans(&[0; IFINFOMSG]), Vlans::default());
    }

    #[test]
    fn a_port_is_cut_off_without_any_vlan_or_without_one_of_the_bridge() {
        let with =
            |all: &[u16], of_untagged| Vlans { all: all.iter().map(|vlan| *vlan..=*vlan).collect(), of_untagged };
        let bridge = with(&[1], Some(1));
        for (port, cut_off) in [
            (with(&[1], Some(1)), false),
            (with(&[], None), true),
            (with(&[1, 7], Some(7)), true),
            // Packets with a VLAN are wanted here.
            (with(&[7], None), false),
        ] {
            assert_eq!(port.are_cut_off(&bridge), cut_off, "{port:?}");
        }
        assert!(with(&[1], Some(1)).are_cut_off(&Vlans::default()), "the bridge itself has none");
    }
}
