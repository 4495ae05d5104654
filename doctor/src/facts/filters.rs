// SPDX-License-Identifier: Apache-2.0
//! Filters of tc at the links of pods that drop packets, or may do so.

use std::io;

use nix::libc;
use weft_netlink::rtnl::{Link, Qdisc};
use weft_netlink::socket::Netlink;
use weft_netlink::wire::{attr, attr_after, attrs, i32_at, messages, text, u8_at, u32_at};

use crate::known_links::{bridge, is_of_routed_pod};

/// Maximum number of links whose filters are read.
const MAX_LINKS: usize = 64;

/// The places of filters: for packets that arrive and for those that leave, as the kernel and as the program tc name them
/// (linux/pkt_sched.h).
const PLACES: [(u32, &str, &str); 2] =
    [(0xffff_fff2, "ingress", "that arrive on it"), (0xffff_fff3, "egress", "that leave by it")];

/// Size of `struct tcmsg`.
const TCMSG: usize = 20;
/// Attributes of filters and actions (linux/rtnetlink.h, linux/pkt_cls.h, linux/tc_act/tc_gact.h).
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_U32_SEL: u16 = 5;
const TCA_U32_ACT: u16 = 7;
const TCA_MATCHALL_ACT: u16 = 2;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;
const TCA_ACT_KIND: u16 = 1;
const TCA_ACT_OPTIONS: u16 = 2;
const TCA_GACT_PARMS: u16 = 2;
const TCA_POLICE_TBF: u16 = 1;
const TC_ACT_SHOT: i32 = 2;
/// Size of `struct tc_u32_sel` without its keys, and of a key.
const SEL: usize = 16;
const KEY: usize = 16;
/// The protocols of filters for all packets of pods: ETH_P_ALL, ETH_P_IP, ETH_P_IPV6.
const PROTOCOLS: [u16; 3] = [0x0003, 0x0800, 0x86dd];

/// What a filter does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    /// It drops every packet.
    Drops,
    /// It drops what is beyond a rate.
    Polices,
    /// It is a program, and what that does with a packet cannot be read.
    Program,
}

/// A filter at a link of pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFilter {
    /// Name of the link.
    pub link: String,
    /// The queueing discipline that carries the filter.
    pub qdisc: &'static str,
    /// The place, as tc names it.
    pub place: &'static str,
    /// The place, as the end of a sentence about packets.
    pub packets: &'static str,
    /// What the filter does.
    pub harm: Harm,
}

/// Reads the filters at the bridge of pods, its ports and the links of routed pods.
///
/// # Errors
/// The kernel does not answer.
pub(super) fn read(links: &[Link], qdiscs: &[Qdisc]) -> io::Result<Vec<PodFilter>> {
    let bridge = bridge(links).map(|link| link.index);
    let is_of_pods = |link: &&Link| {
        is_of_routed_pod(link) || bridge.is_some_and(|bridge| link.index == bridge || link.master == bridge)
    };
    let filtered = |link: &Link| {
        let is_there = |kind: &&str| qdiscs.iter().any(|qdisc| qdisc.index == link.index && qdisc.kind == **kind);
        ["clsact", "ingress"].into_iter().find(is_there)
    };
    let with_filters = links.iter().filter(is_of_pods).filter_map(|link| Some((link, filtered(link)?)));
    let mut netlink = Netlink::open()?;
    let mut found = Vec::new();
    for (link, qdisc) in with_filters.take(MAX_LINKS) {
        for (parent, place, packets) in PLACES {
            let harms = harms(&mut netlink, link.index, parent)?;
            found.extend(harms.into_iter().map(|harm| PodFilter {
                link: link.name.clone(),
                qdisc,
                place,
                packets,
                harm,
            }));
        }
    }
    Ok(found)
}

fn harms(netlink: &mut Netlink, index: u32, parent: u32) -> io::Result<Vec<Harm>> {
    let mut fixed = [0; TCMSG];
    fixed[4..8].copy_from_slice(&index.to_ne_bytes());
    fixed[12..16].copy_from_slice(&parent.to_ne_bytes());
    let data = netlink.dump(libc::RTM_GETTFILTER, |w, kind, flags| w.begin(kind, flags, &fixed))?;
    Ok(messages(&data).filter(|m| m.kind == libc::RTM_NEWTFILTER).filter_map(|m| harm(m.payload)).collect())
}

/// Returns what a filter does, if it drops packets or may do so. A filter for some packets only is the choice of somebody.
fn harm(payload: &[u8]) -> Option<Harm> {
    let options = attr_after(payload, TCMSG, TCA_OPTIONS)?;
    let option = |wanted: u16| attr(options, wanted);
    let actions = match attr_after(payload, TCMSG, TCA_KIND).map(text)? {
        "bpf" if option(TCA_BPF_FLAGS).is_some_and(|flags| u32_at(flags, 0) & TCA_BPF_FLAG_ACT_DIRECT != 0) => {
            return Some(Harm::Program);
        }
        "u32" if option(TCA_U32_SEL).is_some_and(matches_all) => option(TCA_U32_ACT)?,
        "matchall" => option(TCA_MATCHALL_ACT)?,
        _ => return None,
    };
    // The lower half of tcm_info is the protocol in network byte order.
    let protocol = u16::from_be((u32_at(payload, 16) & 0xffff) as u16);
    let (_, action) = attrs(actions).next().filter(|_| PROTOCOLS.contains(&protocol))?;
    let parameter = |wanted: u16| attr(attr(action, TCA_ACT_OPTIONS)?, wanted);
    match attr(action, TCA_ACT_KIND).map(text)? {
        "gact" => (i32_at(parameter(TCA_GACT_PARMS)?, 8) == TC_ACT_SHOT).then_some(Harm::Drops),
        "police" => (i32_at(parameter(TCA_POLICE_TBF)?, 4) == TC_ACT_SHOT).then_some(Harm::Polices),
        _ => None,
    }
}

/// Returns true if the keys of a filter of the kind u32 leave no packet out.
fn matches_all(sel: &[u8]) -> bool {
    let keys = usize::from(u8_at(sel, 2));
    sel.len() >= SEL + keys * KEY && (0..keys).all(|key| u32_at(sel, SEL + key * KEY) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_netlink::wire::Writer;

    /// Returns a filter of this kind as the kernel describes it: for these packets, and with this action.
    fn filter(kind: &str, protocol: u16, key: u32, (action, parms, at): (&str, u16, usize)) -> Vec<u8> {
        let mut fixed = [0; TCMSG];
        fixed[16..].copy_from_slice(&u32::from(protocol.to_be()).to_ne_bytes());
        let mut sel = vec![0; SEL + KEY];
        sel[2] = 1;
        sel[SEL..SEL + 4].copy_from_slice(&key.to_be_bytes());
        let mut values = vec![0; at + 4];
        values[at..].copy_from_slice(&TC_ACT_SHOT.to_ne_bytes());
        let mut w = Writer::default();
        w.begin(libc::RTM_NEWTFILTER, 0, &fixed);
        w.attr_str(TCA_KIND, kind);
        w.nest(TCA_OPTIONS, |w| {
            let of_actions = if kind == "u32" { TCA_U32_ACT } else { TCA_MATCHALL_ACT };
            if kind == "u32" {
                w.attr(TCA_U32_SEL, &sel);
            }
            w.attr_u32(TCA_BPF_FLAGS, TCA_BPF_FLAG_ACT_DIRECT);
            w.nest(of_actions, |w| {
                w.nest(1, |w| {
                    w.attr_str(TCA_ACT_KIND, action);
                    w.nest(TCA_ACT_OPTIONS, |w| w.attr(parms, &values));
                });
            });
        });
        w.end(1);
        messages(w.bytes()).next().unwrap().payload.to_vec()
    }

    #[test]
    fn a_filter_that_drops_every_packet_is_told_from_one_for_some_packets() {
        let (drop, police, mirred) = (("gact", TCA_GACT_PARMS, 8), ("police", TCA_POLICE_TBF, 4), ("mirred", 2, 8));
        for (kind, protocol, key, action, wanted) in [
            ("u32", 3, 0, drop, Some(Harm::Drops)),
            ("u32", 0x0800, 0, drop, Some(Harm::Drops)),
            ("u32", 0x0806, 0, drop, None),
            ("u32", 3, 0xff00_0000, drop, None),
            ("u32", 3, 0, police, Some(Harm::Polices)),
            // The CNI plugin bandwidth sends packets to another link so.
            ("u32", 3, 0, mirred, None),
            ("matchall", 3, 0, drop, Some(Harm::Drops)),
            ("flower", 3, 0, drop, None),
            ("bpf", 3, 0, drop, Some(Harm::Program)),
        ] {
            assert_eq!(harm(&filter(kind, protocol, key, action)), wanted, "{kind} {protocol:#x} {key:#x}");
        }
    }
}
