// SPDX-License-Identifier: Apache-2.0
//! Routes in the words of `ip route`.

use std::net::IpAddr;

use nix::libc;

use super::facts::{Device, Route, RouteKind};
use crate::kernel::entries::MAIN;
use crate::remedies::ip;

/// Returns a route in the words of `ip route`.
pub(super) fn text(route: &Route, device: Option<&Device>) -> String {
    let mut text = match route.prefix {
        Some(net) if net.prefix_len() == 0 => "default".to_owned(),
        Some(net) => net.to_string(),
        None => "(no prefix is known)".to_owned(),
    };
    if let RouteKind::Refuses(kind) = route.kind {
        text = format!("{} {text}", refusal(kind));
    }
    if let Some(gateway) = route.gateway {
        text.push_str(&format!(" via {gateway}"));
    }
    if let Some(device) = device {
        text.push_str(&format!(" dev {}", device.name));
    }
    text.push_str(&format!(" proto {}", protocol(route.protocol)));
    if !is_usual(route) {
        text.push_str(&format!(" table {}", route.table));
    }
    text
}

/// Returns the word of `ip route` for a route that refuses packets.
fn refusal(kind: u8) -> &'static str {
    match kind {
        libc::RTN_BLACKHOLE => "blackhole",
        libc::RTN_UNREACHABLE => "unreachable",
        _ => "prohibit",
    }
}

/// Returns the protocol as `ip route` takes it. It has no name for that of weft.
fn protocol(number: u8) -> String {
    match number {
        libc::RTPROT_KERNEL => "kernel".to_owned(),
        libc::RTPROT_BOOT => "boot".to_owned(),
        libc::RTPROT_STATIC => "static".to_owned(),
        number => number.to_string(),
    }
}

/// Returns the command that removes a route that packets to this address take.
pub(super) fn removal(route: &Route, device: Option<&Device>, to: IpAddr) -> String {
    let ip = ip(to);
    match route.prefix {
        Some(_) => format!("{ip} route del {}", text(route, device)),
        None => format!("remove the route that `{ip} route show table all` shows"),
    }
}

/// Returns true for a route of the main table. A kernel that does not name the table is believed to mean that one.
pub(super) fn is_usual(route: &Route) -> bool {
    route.table == MAIN || route.table == 0
}
