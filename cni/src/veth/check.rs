// SPDX-License-Identifier: Apache-2.0
//! CHECK: compares the pod's network with what ADD configured.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;

use ipnet::IpNet;
use serde_json::Value;
use weft_netlink::rtnl::{Link, Rtnl, mac_text};

use super::plan::Plan;
use super::{GATEWAY, GATEWAY6};
use crate::env::Verb;
use crate::spec::{Error, Success, code};

/// Compares the kernel's state with `prevResult`, and calls CHECK of the IPAM plugin. One error names all differences.
pub fn check(plan: &Plan<'_>) -> Result<Vec<u8>, Error> {
    plan.request.check_netns()?;
    let previous = plan.conf.get("prevResult").filter(|previous| previous.is_object());
    let previous = previous.ok_or_else(|| Error::new(code::CONFIG, "weft-veth: CHECK needs `prevResult`"))?;
    let expected = expected(plan, previous)?;
    let netns = File::open(&plan.request.netns).map_err(|e| Error::io(format!("open {}", plan.request.netns), e))?;
    let mut host = Rtnl::open()?;
    let mut pod = Rtnl::open_in(netns.as_fd())?;
    let mut wrong = Vec::new();
    match (host.link(&plan.host)?, pod.link(&plan.request.ifname)?) {
        (None, _) => wrong.push(format!("{} is missing on the host", plan.host)),
        (_, None) => wrong.push(format!("{} is missing in the pod", plan.request.ifname)),
        (Some(outer), Some(inner)) => {
            check_links(plan, &outer, &inner, &mut wrong);
            check_pod(plan, &mut pod, inner.index, &expected, &mut wrong)?;
            check_host(plan, &mut host, outer.index, &expected, &mut wrong)?;
        }
    }
    if !wrong.is_empty() {
        return Err(
            Error::new(code::OTHER, "the pod's network differs from what ADD configured").details(wrong.join("; "))
        );
    }
    plan.ipam(Verb::Check).map(|_| Vec::new())
}

/// Returns the addresses of this attachment's interface in the previous result.
fn expected(plan: &Plan<'_>, previous: &Value) -> Result<Vec<IpAddr>, Error> {
    let previous = Success::parse(previous.to_string().as_bytes())?;
    let ours = |index: Option<usize>| match index.and_then(|index| previous.interfaces.get(index)) {
        Some(interface) => interface.name == plan.request.ifname && !interface.sandbox.is_empty(),
        None => true,
    };
    let ips = previous.ips.iter().filter(|ip| ours(ip.interface)).map(|ip| ip.address.addr());
    Ok(ips.collect())
}

fn check_links(plan: &Plan<'_>, outer: &Link, inner: &Link, wrong: &mut Vec<String>) {
    if outer.peer != inner.index || inner.peer != outer.index {
        wrong.push(format!("{} and {} are not the two ends of one pair", plan.host, plan.request.ifname));
    }
    for (link, mac) in [(outer, plan.host_mac), (inner, plan.pod_mac)] {
        if !link.up {
            wrong.push(format!("{} is down", link.name));
        }
        if link.mac != Some(mac) {
            wrong.push(format!("{} does not have the MAC address {}", link.name, mac_text(&mac)));
        }
        if let Some(mtu) = plan.mtu.filter(|mtu| *mtu != link.mtu) {
            wrong.push(format!("{} has MTU {}, not {mtu}", link.name, link.mtu));
        }
    }
}

fn check_pod(
    plan: &Plan<'_>,
    pod: &mut Rtnl,
    index: u32,
    expected: &[IpAddr],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    let (addrs, routes, neighbours) = (pod.addrs()?, pod.routes()?, pod.neighbours()?);
    for ip in expected.iter().filter(|ip| !addrs.iter().any(|addr| addr.index == index && addr.addr == **ip)) {
        wrong.push(format!("{} does not have the address {ip}", plan.request.ifname));
    }
    for gateway in [GATEWAY, GATEWAY6].into_iter().filter(|gw| expected.iter().any(|ip| ip.is_ipv6() == gw.is_ipv6())) {
        let over = |gw: Option<IpAddr>, at: u32| gw == Some(gateway) && at == index;
        if plan.default_route && !routes.iter().any(|route| route.len == 0 && over(route.gateway, route.index)) {
            wrong.push(format!("the pod's default route via {gateway} is missing"));
        }
        let entry = neighbours.iter().find(|entry| entry.index == index && entry.addr == gateway);
        if !entry.is_some_and(|entry| entry.is_permanent() && entry.mac == plan.host_mac) {
            wrong.push(format!("the pod's neighbour {gateway} is missing or wrong"));
        }
    }
    Ok(())
}

fn check_host(
    plan: &Plan<'_>,
    host: &mut Rtnl,
    index: u32,
    expected: &[IpAddr],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    let (routes, neighbours) = (host.routes()?, host.neighbours()?);
    for ip in expected {
        let len = IpNet::from(*ip).prefix_len();
        if !routes.iter().any(|route| route.dst == Some(*ip) && route.len == len && route.index == index) {
            wrong.push(format!("the host's route to {ip} over {} is missing", plan.host));
        }
        let entry = neighbours.iter().find(|entry| entry.index == index && entry.addr == *ip);
        if !entry.is_some_and(|entry| entry.is_permanent() && entry.mac == plan.pod_mac) {
            wrong.push(format!("the host's neighbour {ip} is missing or wrong"));
        }
    }
    Ok(())
}
