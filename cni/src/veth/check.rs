// SPDX-License-Identifier: Apache-2.0
//! CHECK: compares the pod's network with what ADD configured.

use std::fs::File;
use std::net::IpAddr;
use std::os::fd::AsFd;

use ipnet::IpNet;
use serde_json::Value;
use weft_netlink::rtnl::{Link, Rtnl, mac_text};

use super::params::Params;
use super::{GATEWAY, GATEWAY6};
use crate::env::Verb;
use crate::spec::{Error, Success, code};

/// Compares the kernel's state with `prevResult`, and calls CHECK of the IPAM plugin. One error names all differences.
pub fn check(params: &Params<'_>) -> Result<Vec<u8>, Error> {
    params.request.check_netns()?;
    let previous = params.conf.get("prevResult").filter(|previous| previous.is_object());
    let previous = previous.ok_or_else(|| Error::new(code::CONFIG, "weft-veth: CHECK needs `prevResult`"))?;
    let expected = expected(params, previous)?;
    let netns =
        File::open(&params.request.netns).map_err(|e| Error::io(format!("open {}", params.request.netns), e))?;
    let mut host = Rtnl::open()?;
    let mut pod = Rtnl::open_in(netns.as_fd())?;
    let mut wrong = Vec::new();
    match (host.link(&params.host)?, pod.link(&params.request.ifname)?) {
        (None, _) => wrong.push(format!("{} is missing on the host", params.host)),
        (_, None) => wrong.push(format!("{} is missing in the pod", params.request.ifname)),
        (Some(outer), Some(inner)) => {
            check_links(params, &outer, &inner, &mut wrong);
            check_pod(params, &mut pod, inner.index, &expected, &mut wrong)?;
            check_host(params, &mut host, outer.index, &expected, &mut wrong)?;
        }
    }
    if !wrong.is_empty() {
        return Err(
            Error::new(code::OTHER, "the pod's network differs from what ADD configured").details(wrong.join("; "))
        );
    }
    params.ipam(Verb::Check).map(|_| Vec::new())
}

/// Returns the addresses of this attachment's interface in the previous result.
fn expected(params: &Params<'_>, previous: &Value) -> Result<Vec<IpAddr>, Error> {
    let previous = Success::parse(previous.to_string().as_bytes())?;
    let ours = |index: Option<usize>| match index.and_then(|index| previous.interfaces.get(index)) {
        Some(interface) => interface.name == params.request.ifname && !interface.sandbox.is_empty(),
        None => true,
    };
    let ips = previous.ips.iter().filter(|ip| ours(ip.interface)).map(|ip| ip.address.addr());
    Ok(ips.collect())
}

fn check_links(params: &Params<'_>, outer: &Link, inner: &Link, wrong: &mut Vec<String>) {
    if outer.peer != inner.index || inner.peer != outer.index {
        wrong.push(format!("{} and {} are not the two ends of one pair", params.host, params.request.ifname));
    }
    for (link, mac) in [(outer, params.host_mac), (inner, params.pod_mac)] {
        if !link.up {
            wrong.push(format!("{} is down", link.name));
        }
        if link.mac != Some(mac) {
            wrong.push(format!("{} does not have the MAC address {}", link.name, mac_text(&mac)));
        }
        if let Some(mtu) = params.mtu.filter(|mtu| *mtu != link.mtu) {
            wrong.push(format!("{} has MTU {}, not {mtu}", link.name, link.mtu));
        }
    }
}

fn check_pod(
    params: &Params<'_>,
    pod: &mut Rtnl,
    index: u32,
    expected: &[IpAddr],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    let (addrs, routes, neighbours) = (pod.addrs()?, pod.routes()?, pod.neighbours()?);
    for ip in expected.iter().filter(|ip| !addrs.iter().any(|addr| addr.index == index && addr.addr == **ip)) {
        wrong.push(format!("{} does not have the address {ip}", params.request.ifname));
    }
    for gateway in [GATEWAY, GATEWAY6].into_iter().filter(|gw| expected.iter().any(|ip| ip.is_ipv6() == gw.is_ipv6())) {
        let over = |gw: Option<IpAddr>, at: u32| gw == Some(gateway) && at == index;
        if params.default_route && !routes.iter().any(|route| route.len == 0 && over(route.gateway, route.index)) {
            wrong.push(format!("the pod's default route via {gateway} is missing"));
        }
        let entry = neighbours.iter().find(|entry| entry.index == index && entry.addr == gateway);
        if !entry.is_some_and(|entry| entry.is_permanent() && entry.mac == params.host_mac) {
            wrong.push(format!("the pod's neighbour {gateway} is missing or wrong"));
        }
    }
    Ok(())
}

fn check_host(
    params: &Params<'_>,
    host: &mut Rtnl,
    index: u32,
    expected: &[IpAddr],
    wrong: &mut Vec<String>,
) -> Result<(), Error> {
    let (routes, neighbours) = (host.routes()?, host.neighbours()?);
    for ip in expected {
        let len = IpNet::from(*ip).prefix_len();
        if !routes.iter().any(|route| route.dst == Some(*ip) && route.len == len && route.index == index) {
            wrong.push(format!("the host's route to {ip} over {} is missing", params.host));
        }
        let entry = neighbours.iter().find(|entry| entry.index == index && entry.addr == *ip);
        if !entry.is_some_and(|entry| entry.is_permanent() && entry.mac == params.pod_mac) {
            wrong.push(format!("the host's neighbour {ip} is missing or wrong"));
        }
    }
    Ok(())
}
