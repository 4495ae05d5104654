// SPDX-License-Identifier: Apache-2.0
//! ADD: creates and configures the pod's network. The IPAM plugin runs while the kernel creates the pair. One datagram
//! then configures the pod, and another one the host.

use std::fs::{self, File};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nix::errno::Errno;
use weft_netlink::rtnl::{self, Link, Refused, Rtnl, in_netns, links, mac_text};

use super::params::{Params, joined};
use super::{GATEWAY, GATEWAY6, encode};
use crate::env::Verb;
use crate::spec::{Error, Interface, Ip, Route, Success, code};
use crate::wait::pause_for;

/// How long to wait until an address is usable. The kernel needs microseconds for it, but seconds on an overloaded machine: its worker
/// waits for the processor, and for the RTNL lock, which everything takes that changes links. An ADD that fails costs much more time than the
/// wait, because the container runtime then begins the pod again.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(10);

/// An existing veth pair.
struct Pair {
    /// Interface index of the host's end.
    host: u32,
    /// Interface index of the pod's end.
    pod: u32,
    /// MTU in bytes.
    mtu: u32,
    /// Netlink socket in the pod's namespace.
    inside: Rtnl,
}

/// Connects a pod. What an earlier ADD has configured is kept and completed.
pub fn add(params: &Params<'_>) -> Result<Vec<u8>, Error> {
    params.request.check_netns()?;
    let netns =
        File::open(&params.request.netns).map_err(|e| Error::io(format!("open {}", params.request.netns), e))?;
    let mut host = Rtnl::open()?;
    let existing = match host.link(&params.host)? {
        None => None,
        Some(link) => resume(params, &mut host, &netns, &link)?,
    };
    let new = existing.is_none();
    let (mut pair, ipam) = match existing {
        Some(existing) => existing,
        None => create_with_addresses(params, &mut host, &netns)?,
    };
    let result = pod_result(params, ipam).and_then(|success| {
        configure(params, &mut host, &mut pair, &netns, &success)?;
        enable_forwarding(&success.ips);
        Ok(render(params, &pair, success))
    });
    // If an earlier call has connected the pod, it may be running. It keeps its network then.
    result.inspect_err(|_| {
        if new {
            undo(params, &mut host);
        }
    })
}

/// Creates a new pair and reserves new addresses.
fn create_with_addresses(params: &Params<'_>, host: &mut Rtnl, netns: &File) -> Result<(Pair, Success), Error> {
    let (pair, addresses) = std::thread::scope(|scope| {
        let ipam = scope.spawn(|| params.ipam(Verb::Add));
        let pair = create_pair(params, host, netns);
        (pair, joined(ipam))
    });
    let pair = match pair {
        Ok(pair) => pair,
        Err(error) => {
            // Otherwise this call has reserved nothing, and what an earlier one has reserved may be in use.
            if addresses.is_ok() {
                release(params);
            }
            return Err(error);
        }
    };
    // An earlier call may have been killed after it reserved the addresses and before it created the pair. The
    // addresses then belong to this attachment, but count as taken: release them and try once more.
    let addresses = addresses.or_else(|error| {
        if params.ipam(Verb::Del).is_err() {
            return Err(error);
        }
        params.ipam(Verb::Add).map_err(|_| error)
    });
    let addresses = addresses.and_then(|text| Success::parse(&text)).inspect_err(|_| undo(params, host))?;
    Ok((pair, addresses))
}

fn create_pair(params: &Params<'_>, host: &mut Rtnl, netns: &File) -> Result<Pair, Error> {
    let made = send_pair(params, host, netns, true)?.or_else(|refused| match refused.errno {
        // The kernel does not support IPv6.
        Errno::EAFNOSUPPORT => {
            host.remove_link_named(&params.host)?;
            send_pair(params, host, netns, false)?.map_err(Error::from)
        }
        Errno::EEXIST => Err(Error::new(
            code::OTHER,
            format!("the pod already has an interface {} that weft-veth did not create", params.request.ifname),
        )),
        _ => Err(refused.into()),
    });
    // The pair may exist although the kernel refused the rest of the datagram.
    let link = made.inspect_err(|_| drop(host.remove_link_named(&params.host)))?;
    let pair =
        Rtnl::open_in(netns.as_fd()).map(|inside| Pair { host: link.index, pod: link.peer, mtu: link.mtu, inside });
    ignore_router_advertisements(&params.host);
    pair.inspect_err(|_| drop(host.remove_link(link.index))).map_err(Error::from)
}

/// Sends the datagram that creates the pair, and returns the host's end or the kernel's refusal.
fn send_pair(params: &Params<'_>, host: &mut Rtnl, netns: &File, ipv6: bool) -> Result<Result<Link, Refused>, Error> {
    let mut batch = host.batch();
    encode::pair(&mut batch, params, netns.as_raw_fd());
    encode::host_up(&mut batch, params, ipv6);
    encode::read(&mut batch, &params.host);
    batch.send()?.map_or_else(
        |refused| Ok(Err(refused)),
        |data| {
            let link = links(&data).find(|link| link.name == params.host && link.peer != 0);
            link.map(Ok).ok_or_else(|| Error::new(code::OTHER, "the kernel does not show the new veth pair"))
        },
    )
}

/// Continues after an earlier ADD. Returns its pair and the addresses in the pod. If that ADD did not get so far, new
/// addresses are reserved.
///
/// Returns `None` if the pair belonged to a namespace that is no longer the pod's. That pair is removed.
fn resume(params: &Params<'_>, host: &mut Rtnl, netns: &File, link: &Link) -> Result<Option<(Pair, Success)>, Error> {
    if link.alias != params.alias {
        let text = format!("{} exists, but does not belong to this pod: its alias is {:?}", params.host, link.alias);
        return Err(Error::new(code::OTHER, text));
    }
    let mut inside = Rtnl::open_in(netns.as_fd())?;
    let pod = inside.link(&params.request.ifname)?.filter(|pod| pod.index == link.peer && pod.peer == link.index);
    let Some(pod) = pod else {
        host.remove_link(link.index)?;
        return Ok(None);
    };
    ignore_router_advertisements(&params.host);
    let mut batch = host.batch();
    encode::host_up(&mut batch, params, false);
    batch.send()??;
    let addrs = inside.addrs()?.into_iter().filter(|addr| addr.index == pod.index && addr.global);
    let ips = addrs.map(|addr| ip(addr.addr)).collect::<Vec<_>>();
    let pair = Pair { host: link.index, pod: pod.index, mtu: link.mtu, inside };
    if !ips.is_empty() {
        return Ok(Some((pair, Success { ips, ..Success::default() })));
    }
    params.ipam(Verb::Del)?;
    let addresses = Success::parse(&params.ipam(Verb::Add)?)?;
    Ok(Some((pair, addresses)))
}

/// Returns the address as one of the pod's interface, which is the second one in the result.
fn ip(addr: IpAddr) -> Ip {
    Ip { address: IpNet::from(addr), gateway: Some(gateway(addr)), interface: Some(1) }
}

/// Converts the result of the IPAM plugin to the pod's addresses and routes. The addresses become /32 or /128, because
/// the pod has no neighbour but the gateway.
fn pod_result(params: &Params<'_>, ipam: Success) -> Result<Success, Error> {
    let ips: Vec<Ip> = ipam.ips.iter().map(|given| ip(given.address.addr())).collect();
    if ips.is_empty() {
        return Err(Error::new(code::OTHER, "the IPAM plugin returned no address"));
    }
    let routes = if params.default_route {
        gateways(&ips).filter_map(default_route).collect()
    } else {
        let has_gateway = |route: &Route| ips.iter().any(|ip| ip.gateway == Some(gateway(route.dst.addr())));
        let via_host =
            |route: Route| Route { dst: route.dst.trunc(), gw: Some(gateway(route.dst.addr())), more: route.more };
        ipam.routes.into_iter().filter(has_gateway).map(via_host).collect()
    };
    Ok(Success { ips, routes, ..ipam })
}

fn gateway(of: IpAddr) -> IpAddr {
    if of.is_ipv6() { GATEWAY6 } else { GATEWAY }
}

fn default_route(gateway: IpAddr) -> Option<Route> {
    let dst = if gateway.is_ipv6() { "::/0" } else { "0.0.0.0/0" };
    Some(Route { dst: dst.parse().ok()?, gw: Some(gateway), more: serde_json::Map::new() })
}

fn configure(
    params: &Params<'_>,
    host: &mut Rtnl,
    pair: &mut Pair,
    netns: &File,
    success: &Success,
) -> Result<(), Error> {
    let mut sent = configure_pod(params, pair, success)?;
    if sent.as_ref().is_err_and(ipv6_is_disabled) {
        in_netns(netns.as_fd(), || enable_ipv6(&params.request.ifname))?;
        sent = configure_pod(params, pair, success)?;
    }
    match sent {
        Err(refused) if refused.what == encode::POD_ROUTE && refused.errno == Errno::EEXIST => {
            check_existing_routes(params, pair, success)?;
        }
        done => drop(done?),
    }
    match configure_host(params, host, pair, success)? {
        Err(refused) if ipv6_is_disabled(&refused) => {
            enable_ipv6(&params.host);
            configure_host(params, host, pair, success)??;
        }
        done => drop(done?),
    }
    wait_for_ipv6(pair, success)
}

/// Waits until the kernel delivers packets to the pod's IPv6 addresses, so that the pod's first packet is not lost.
/// There is usually nothing to wait for.
fn wait_for_ipv6(pair: &mut Pair, success: &Success) -> Result<(), Error> {
    let begin = Instant::now();
    for ip in success.ips.iter().filter(|ip| ip.address.addr().is_ipv6()) {
        while !pair.inside.is_local(ip.address.addr())? {
            if begin.elapsed() > ADDRESS_TIMEOUT {
                return Err(Error::new(
                    code::OTHER,
                    format!("the kernel did not make the address {} usable in time", ip.address),
                ));
            }
            // Spinning could keep the kernel's workers from the processor, if this process has a higher priority than they have.
            pause_for(Duration::from_micros(100));
        }
    }
    Ok(())
}

type Sent = Result<Result<Vec<u8>, Refused>, rtnl::Error>;

fn configure_pod(params: &Params<'_>, pair: &mut Pair, success: &Success) -> Sent {
    let mut batch = pair.inside.batch();
    encode::pod_up(&mut batch, pair.pod);
    for ip in &success.ips {
        encode::address(&mut batch, pair.pod, ip.address.addr(), ip.address.prefix_len());
    }
    for gateway in gateways(&success.ips) {
        encode::neighbour(&mut batch, pair.pod, gateway, params.host_mac);
    }
    for route in &success.routes {
        let dst = (route.dst.addr(), route.dst.prefix_len());
        encode::pod_route(&mut batch, pair.pod, dst, gateway(dst.0));
    }
    encode::read(&mut batch, &params.request.ifname);
    batch.send()
}

fn configure_host(params: &Params<'_>, host: &mut Rtnl, pair: &Pair, success: &Success) -> Sent {
    let mut batch = host.batch();
    let ipv6 = gateways(&success.ips).any(|gateway| gateway == GATEWAY6);
    if ipv6 {
        encode::address(&mut batch, pair.host, GATEWAY6, 128);
    }
    for ip in &success.ips {
        encode::neighbour(&mut batch, pair.host, ip.address.addr(), params.pod_mac);
        encode::host_route(&mut batch, pair.host, ip.address.addr());
    }
    encode::read(&mut batch, &params.host);
    // This message must be the last one: an earlier call may have added the route, and only the first refusal is
    // reported.
    if ipv6 {
        encode::link_local(&mut batch, pair.host);
    }
    batch.send().map(|sent| match sent {
        Err(refused) if refused.what == encode::LINK_LOCAL && refused.errno == Errno::EEXIST => Ok(Vec::new()),
        sent => sent,
    })
}

/// Returns the gateways of these addresses, one for each family.
fn gateways(ips: &[Ip]) -> impl Iterator<Item = IpAddr> {
    [GATEWAY, GATEWAY6].into_iter().filter(|gw| ips.iter().any(|ip| ip.gateway == Some(*gw)))
}

/// Checks that the routes that exist already lead through this interface. An earlier call may have added them. A route
/// over another interface is an error.
fn check_existing_routes(params: &Params<'_>, pair: &mut Pair, success: &Success) -> Result<(), Error> {
    let index = pair.pod;
    let existing = pair.inside.routes()?;
    for route in &success.routes {
        let same_destination = |seen: &&rtnl::Route| {
            let dst = seen.dst.unwrap_or(if seen.v6 { IpAddr::from([0; 16]) } else { IpAddr::from([0; 4]) });
            (dst, seen.len) == (route.dst.addr(), route.dst.prefix_len())
        };
        if !existing.iter().filter(same_destination).any(|seen| seen.index == index) {
            let text =
                format!("the pod has a route to {} over another interface than {}", route.dst, params.request.ifname);
            let hint = "for a second interface of a pod set \"isDefaultGateway\": false in the delegate";
            return Err(Error::new(code::OTHER, text).details(hint));
        }
    }
    Ok(())
}

/// Returns true if IPv6 is disabled on the link. The kernel then refuses an IPv6 address with EACCES. Before Linux 5 it
/// may also refuse a route with EINVAL or ENODEV.
fn ipv6_is_disabled(refused: &Refused) -> bool {
    matches!(refused.errno, Errno::EACCES | Errno::EPERM)
}

/// Enables IP forwarding for the families of the pod, as the bridge and ptp plugins do. An agent in a container may not
/// be able to do that.
fn enable_forwarding(ips: &[Ip]) {
    for (ipv6, file) in [(false, "net/ipv4/ip_forward"), (true, "net/ipv6/conf/all/forwarding")] {
        let file = format!("/proc/sys/{file}");
        if !ips.iter().any(|ip| ip.address.addr().is_ipv6() == ipv6) {
            continue;
        }
        let done = fs::read(&file).and_then(|value| if value == b"0\n" { fs::write(&file, "1") } else { Ok(()) });
        if let Err(error) = done {
            note!("weft-veth: write {file}: {error}");
        }
    }
}

/// Enables IPv6 on a link, for nodes and sandboxes where `disable_ipv6` is the default although the network has IPv6.
fn enable_ipv6(link: &str) {
    let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{link}/disable_ipv6"), "0");
}

/// Disables router advertisements on the host's end, so that a pod cannot change the host's default route
/// (CVE-2020-10749). Without IPv6 the file does not exist.
fn ignore_router_advertisements(link: &str) {
    let file = format!("/proc/sys/net/ipv6/conf/{link}/accept_ra");
    match fs::write(&file, "0") {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => note!("weft-veth: write {file}: {error}"),
        _ => {}
    }
}

/// Removes what a failed ADD created. The runtime should call DEL after a failed ADD, but not every runtime does.
fn undo(params: &Params<'_>, host: &mut Rtnl) {
    if let Err(error) = host.remove_link_named(&params.host) {
        note!("weft-veth: remove {} after a failure: {error}", params.host);
    }
    release(params);
}

fn release(params: &Params<'_>) {
    if let Err(error) = params.ipam(Verb::Del) {
        note!("weft-veth: release the addresses after a failure: {error}");
    }
}

fn render(params: &Params<'_>, pair: &Pair, success: Success) -> Vec<u8> {
    let host = Interface {
        name: params.host.clone(),
        mac: mac_text(&params.host_mac),
        mtu: Some(pair.mtu),
        ..Interface::default()
    };
    let pod = Interface {
        name: params.request.ifname.clone(),
        mac: mac_text(&params.pod_mac),
        mtu: Some(pair.mtu),
        sandbox: params.request.netns.clone(),
    };
    let mut success = Success { interfaces: vec![host, pod], ..success };
    if let Some(serde_json::Value::Object(dns)) = params.conf.get("dns").filter(|dns| **dns != serde_json::json!({})) {
        success.dns = dns.clone();
    }
    success.render(params.version).to_string().into_bytes()
}
