// SPDX-License-Identifier: Apache-2.0
//! Commands that several findings, or findings and steps of `weft explain`, propose.

use std::net::IpAddr;

use ipnet::IpNet;
use weft_backends::register::device_kind;
use weft_backends::{ipip, vxlan};

use crate::known_links::BRIDGE;

/// Returns the command that makes the route of the subnet over the bridge, as the kernel makes it for the address of the bridge.
pub(crate) fn connect(subnet: IpNet, address: IpAddr) -> String {
    match address {
        IpAddr::V4(_) => format!("ip route replace {subnet} dev {BRIDGE} proto kernel scope link src {address}"),
        IpAddr::V6(_) => format!("ip -6 route replace {subnet} dev {BRIDGE} proto kernel metric 256"),
    }
}

/// Returns the command that adds the rule for the main table as the kernel makes it. `family` is an option of the command, with a space.
pub(crate) fn main_rule(family: &str) -> String {
    format!("ip {family}rule add lookup main pref 32766; then find the program that deleted this rule")
}

/// Returns what makes the packets between nodes have addresses of nodes alone. `backend` is that of the agent; empty if it is not known.
pub fn without_addresses_of_pods(backend: &str) -> &'static str {
    match device_kind(backend) {
        // They send packets without a tunnel only with this option.
        Some(vxlan::DEVICE_KIND | ipip::DEVICE_KIND) => "set DirectRouting to false in net-conf",
        _ => "choose the backend vxlan without DirectRouting",
    }
}
