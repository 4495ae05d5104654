// SPDX-License-Identifier: Apache-2.0
//! Whether the kernel forwards the packets of pods: for each link by which they arrive, a sysctl can forbid it.

use weft_netlink::rtnl::{Link, Route};

use super::base::{BRIDGE, sysctl};
use super::finding::{NodeFinding, finding};
use super::node::NodeFacts;
use super::ways::is_ours;

/// The sysctls of forwarding.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Forwarding {
    /// net.ipv4.ip_forward.
    pub v4: Option<u64>,
    /// net.ipv6.conf.all.forwarding.
    pub v6: Option<u64>,
    /// The entries below net.ipv4.conf by which packets of pods arrive, and where the value is 0.
    pub off: Vec<String>,
}

/// Reads the sysctls for the links of pods, for those of weft, and for those of default routes.
pub fn read(links: &[Link], routes: &[Route]) -> Forwarding {
    let is_default = |link: &Link| routes.iter().any(|route| route.dst.is_none() && route.index == link.index);
    let wanted = links.iter().filter(|link| link.name == BRIDGE || is_ours(link) || is_default(link));
    let names = wanted.map(|link| link.name.as_str()).chain(["default"]);
    let is_off = |name: &&str| sysctl(&format!("ipv4/conf/{name}/forwarding")) == Some(0);
    Forwarding {
        v4: sysctl("ipv4/ip_forward"),
        v6: sysctl("ipv6/conf/all/forwarding"),
        off: names.filter(is_off).map(str::to_owned).collect(),
    }
}

/// The kernel drops packets of pods instead of forwarding them.
pub(super) fn forwarding(facts: &NodeFacts) -> Vec<NodeFinding> {
    let Some(env) = facts.subnet_file.env() else { return Vec::new() };
    let found = |name: &str, what: &str| {
        let evidence = format!("{name} is 0: {what}");
        finding(
            evidence,
            format!("sysctl -w {name}=1, and in /etc/sysctl.d; then find the file there that sets it to 0"),
        )
    };
    let mut findings = Vec::new();
    let forwarding = &facts.forwarding;
    if env.subnets.v4.is_some() && forwarding.v4 == Some(0) {
        findings.push(found("net.ipv4.ip_forward", "this node forwards no packet of a pod"));
    } else if env.subnets.v4.is_some() {
        findings.extend(forwarding.off.iter().map(|link| {
            let what = match link.as_str() {
                "default" => "links that are made later, such as those of pods, forward no packets".to_owned(),
                link => format!("packets that arrive by {link} are not forwarded, although net.ipv4.ip_forward is 1"),
            };
            // Names of links may contain a dot. With slashes, sysctl keeps it.
            found(&format!("net/ipv4/conf/{link}/forwarding"), &what)
        }));
    }
    if env.subnets.v6.is_some() && forwarding.v6 == Some(0) {
        findings.push(found("net.ipv6.conf.all.forwarding", "this node forwards no IPv6 packet of a pod"));
    }
    findings
}
