// SPDX-License-Identifier: Apache-2.0
//! Commands that several findings, or findings and steps of `weft explain`, propose.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_backends::register::device_kind;
use weft_backends::{ipip, vxlan};

use crate::known_links::BRIDGE;

/// Returns the program with which entries for an address are changed, with the option for its family.
pub(crate) fn ip(of: IpAddr) -> &'static str {
    if of.is_ipv4() { "ip" } else { "ip -6" }
}

/// Returns how a sysctl is set, now and at each boot.
pub(crate) fn set_sysctl(setting: &str) -> String {
    format!("sysctl -w {setting}; write it into a file in /etc/sysctl.d, too")
}

/// Returns how to remove a rule from a chain of nftables, given by its family, its table and its name.
pub(crate) fn remove_nft_rule(chain: &str) -> String {
    format!("`nft -a list chain {chain}` shows the rule with its handle: remove it with `nft delete rule`")
}

/// Returns how a bridge is replaced that pods use.
pub(crate) fn replace_bridge() -> String {
    format!("drain the node, `ip link del {BRIDGE}`, and let its pods be made again")
}

/// Returns the command that makes the route of the subnet over the bridge, as the kernel makes it for the address of the bridge.
pub(crate) fn connect(subnet: IpNet, address: IpAddr) -> String {
    match address {
        IpAddr::V4(_) => format!("ip route replace {subnet} dev {BRIDGE} proto kernel scope link src {address}"),
        IpAddr::V6(_) => format!("ip -6 route replace {subnet} dev {BRIDGE} proto kernel metric 256"),
    }
}

/// Returns the command that adds the rule for the main table as the kernel makes it, for the family of this address.
pub(crate) fn main_rule(family_of: IpAddr) -> String {
    format!("{} rule add lookup main pref 32766; then find the program that deleted this rule", ip(family_of))
}

/// Returns how a policy rule that refuses packets is found and deleted, for the family of this address.
pub(crate) fn refusing_rule(family_of: IpAddr) -> String {
    let ip = ip(family_of);
    format!("`{ip} rule` shows the rules and their tables; {ip} rule del with the preference of the one that is wrong")
}

/// Returns the command that adds a policy rule. With it, the kernel asks the main table first for packets to this network.
pub(crate) fn ask_main_first(to: IpNet) -> String {
    format!("{} rule add to {to} lookup main pref 100", ip(to.addr()))
}

/// Returns what to do about a size that a router has said for packets to an address. Nobody has configured it, and the message may be forged, so the
/// rest of the cluster must not follow it.
pub(crate) fn learned_mtu(to: IpAddr, needed: u32) -> String {
    format!(
        "`tracepath -n {to}` shows where the way becomes smaller: raise the MTU there to {needed}; if it does not, the message was wrong or \
         forged, and `{} route flush cache` forgets it",
        ip(to)
    )
}

/// Returns what makes the packets between nodes have addresses of nodes alone. `backend` is that of the agent; empty if it is not known.
pub fn without_addresses_of_pods(backend: &str) -> &'static str {
    match device_kind(backend) {
        // They send packets without a tunnel only with this option.
        Some(vxlan::DEVICE_KIND | ipip::DEVICE_KIND) => "set DirectRouting to false in net-conf",
        _ => "choose the backend vxlan without DirectRouting",
    }
}
