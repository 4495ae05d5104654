// SPDX-License-Identifier: Apache-2.0
//! ADD. The IPAM plugin runs while the kernel makes the pair; then one datagram in the pod and one on the host.

use std::fs::{self, File};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use nix::errno::Errno;

use super::plan::{Plan, joined, mac_text};
use super::{GATEWAY, GATEWAY6, encode};
use crate::env::Verb;
use crate::rtnl::{Link, Refused, Rtnl, links, within};
use crate::spec::{Error, Interface, Ip, Route, Success, code};

/// A work of the kernel takes microseconds, and longer on a machine that is out of breath.
const SETTLED: Duration = Duration::from_secs(2);

/// A pair that is there.
struct Pair {
    host: u32,
    pod: u32,
    mtu: u32,
    /// Netlink in the pod.
    inside: Rtnl,
}

/// Wires a pod. What is there already from an earlier call is kept and completed.
pub fn add(plan: &Plan<'_>) -> Result<Vec<u8>, Error> {
    plan.request.check_netns()?;
    let netns = File::open(&plan.request.netns).map_err(|e| Error::io(format!("open {}", plan.request.netns), e))?;
    let mut host = Rtnl::open()?;
    let there = match host.link(&plan.host)? {
        None => None,
        Some(link) => again(plan, &mut host, &netns, &link)?,
    };
    let new = there.is_none();
    let (mut pair, ipam) = match there {
        Some(there) => there,
        None => fresh(plan, &mut host, &netns)?,
    };
    let wired = desired(plan, ipam).and_then(|success| {
        wire(plan, &mut host, &mut pair, &netns, &success)?;
        forward(&success.ips);
        Ok(render(plan, &pair, success))
    });
    // A pod that an earlier call wired may live: it keeps what it has.
    wired.inspect_err(|_| {
        if new {
            undo(plan, &mut host);
        }
    })
}

/// A new pair and new addresses.
fn fresh(plan: &Plan<'_>, host: &mut Rtnl, netns: &File) -> Result<(Pair, Success), Error> {
    let (pair, addresses) = std::thread::scope(|scope| {
        let ipam = scope.spawn(|| plan.ipam(Verb::Add));
        let pair = make(plan, host, netns);
        (pair, joined(ipam))
    });
    let pair = match pair {
        Ok(pair) => pair,
        Err(error) => {
            release(plan);
            return Err(error);
        }
    };
    // An earlier call may have died between the address and the pair: its address is ours, and counts as taken.
    let addresses = addresses.or_else(|error| {
        if plan.ipam(Verb::Del).is_err() {
            return Err(error);
        }
        plan.ipam(Verb::Add).map_err(|_| error)
    });
    let addresses = addresses.and_then(|text| Success::parse(&text)).inspect_err(|_| undo(plan, host))?;
    Ok((pair, addresses))
}

fn make(plan: &Plan<'_>, host: &mut Rtnl, netns: &File) -> Result<Pair, Error> {
    let made = create(plan, host, netns, true)?.or_else(|refused| match refused.errno {
        // The kernel has no IPv6.
        Errno::EAFNOSUPPORT => {
            host.remove_link_named(&plan.host)?;
            create(plan, host, netns, false)?.map_err(Error::from)
        }
        Errno::EEXIST => Err(Error::new(
            code::OTHER,
            format!("there is an interface {} in the pod already, which weft-veth did not make", plan.request.ifname),
        )),
        _ => Err(refused.into()),
    });
    // The pair may be there though the rest of the datagram was refused.
    let link = made.inspect_err(|_| drop(host.remove_link_named(&plan.host)))?;
    let pair =
        Rtnl::open_in(netns.as_fd()).map(|inside| Pair { host: link.index, pod: link.peer, mtu: link.mtu, inside });
    quiet(&plan.host);
    pair.inspect_err(|_| drop(host.remove_link(link.index)))
}

/// The pair in one datagram, and what became of it.
fn create(plan: &Plan<'_>, host: &mut Rtnl, netns: &File, ipv6: bool) -> Result<Result<Link, Refused>, Error> {
    let mut batch = host.batch();
    encode::pair(&mut batch, plan, netns.as_raw_fd());
    encode::host_up(&mut batch, plan, ipv6);
    encode::read(&mut batch, &plan.host);
    batch.send()?.map_or_else(
        |refused| Ok(Err(refused)),
        |data| {
            let link = links(&data).find(|link| link.name == plan.host && link.peer != 0);
            link.map(Ok).ok_or_else(|| Error::new(code::OTHER, "the kernel does not show the new veth pair"))
        },
    )
}

/// The pair of an earlier call, with the addresses in the pod, or new ones if that call did not come so far. `None` when the
/// pair belonged to a namespace that is not the pod's any more: it is removed.
fn again(plan: &Plan<'_>, host: &mut Rtnl, netns: &File, link: &Link) -> Result<Option<(Pair, Success)>, Error> {
    if link.alias != plan.alias {
        let text = format!("{} is there, but is not this pod's: its alias is {:?}", plan.host, link.alias);
        return Err(Error::new(code::OTHER, text));
    }
    let mut inside = Rtnl::open_in(netns.as_fd())?;
    let pod = inside.link(&plan.request.ifname)?.filter(|pod| pod.index == link.peer && pod.peer == link.index);
    let Some(pod) = pod else {
        host.remove_link(link.index)?;
        return Ok(None);
    };
    quiet(&plan.host);
    let mut batch = host.batch();
    encode::host_up(&mut batch, plan, false);
    batch.send()??;
    let held = inside.addrs()?.into_iter().filter(|addr| addr.index == pod.index && addr.global);
    let ips = held.filter_map(|addr| ip(addr.addr)).collect::<Vec<_>>();
    let pair = Pair { host: link.index, pod: pod.index, mtu: link.mtu, inside };
    if !ips.is_empty() {
        return Ok(Some((pair, Success { ips, ..Success::default() })));
    }
    plan.ipam(Verb::Del)?;
    let addresses = Success::parse(&plan.ipam(Verb::Add)?)?;
    Ok(Some((pair, addresses)))
}

fn ip(addr: IpAddr) -> Option<Ip> {
    let len = if addr.is_ipv6() { 128 } else { 32 };
    Some(Ip { address: IpNet::new(addr, len).ok()?, gateway: Some(gateway(addr)), interface: Some(1) })
}

/// What the pod gets, from what the IPAM plugin says: whole addresses, no neighbours but the gateway.
fn desired(plan: &Plan<'_>, ipam: Success) -> Result<Success, Error> {
    let ips: Vec<Ip> = ipam.ips.iter().filter_map(|given| ip(given.address.addr())).collect();
    if ips.is_empty() {
        return Err(Error::new(code::OTHER, "the IPAM plugin gave no address"));
    }
    let families = [GATEWAY, GATEWAY6].into_iter().filter(|gw| ips.iter().any(|ip| ip.gateway == Some(*gw)));
    let routes = if plan.default_route {
        families.filter_map(everywhere).collect()
    } else {
        let reached = |route: &Route| ips.iter().any(|ip| ip.gateway == Some(gateway(route.dst.addr())));
        let over_us =
            |route: Route| Route { dst: route.dst.trunc(), gw: Some(gateway(route.dst.addr())), more: route.more };
        ipam.routes.into_iter().filter(reached).map(over_us).collect()
    };
    Ok(Success { ips, routes, ..ipam })
}

fn gateway(of: IpAddr) -> IpAddr {
    if of.is_ipv6() { GATEWAY6 } else { GATEWAY }
}

fn everywhere(gateway: IpAddr) -> Option<Route> {
    let dst = if gateway.is_ipv6() { "::/0" } else { "0.0.0.0/0" };
    Some(Route { dst: dst.parse().ok()?, gw: Some(gateway), more: serde_json::Map::new() })
}

fn wire(plan: &Plan<'_>, host: &mut Rtnl, pair: &mut Pair, netns: &File, success: &Success) -> Result<(), Error> {
    let mut sent = inside(plan, pair, success)?;
    if sent.as_ref().is_err_and(disabled) {
        within(netns.as_fd(), || enable(&plan.request.ifname))?;
        sent = inside(plan, pair, success)?;
    }
    match sent {
        Err(refused) if refused.what == encode::POD_ROUTE && refused.errno == Errno::EEXIST => {
            known_routes(plan, pair, success)?;
        }
        done => drop(done?),
    }
    match outside(plan, host, pair, success)? {
        Err(refused) if disabled(&refused) => {
            enable(&plan.host);
            outside(plan, host, pair, success)??;
        }
        done => drop(done?),
    }
    settle(pair, success)
}

/// The pod's first packet shall not be its first loss. Mostly there is nothing to wait for.
fn settle(pair: &mut Pair, success: &Success) -> Result<(), Error> {
    let begin = Instant::now();
    for ip in success.ips.iter().filter(|ip| ip.address.addr().is_ipv6()) {
        while !pair.inside.is_local(ip.address.addr())? {
            if begin.elapsed() > SETTLED {
                return Err(Error::new(code::OTHER, format!("the kernel has not made {} usable", ip.address)));
            }
            moment();
        }
    }
    Ok(())
}

/// Sleeps, so that whoever shall do the work can: we may have a higher priority than the kernel's workers.
#[expect(clippy::disallowed_methods, reason = "the pause between two looks at a condition")]
fn moment() {
    std::thread::sleep(Duration::from_micros(100));
}

type Sent = Result<Result<Vec<u8>, Refused>, Error>;

fn inside(plan: &Plan<'_>, pair: &mut Pair, success: &Success) -> Sent {
    let mut batch = pair.inside.batch();
    encode::pod_up(&mut batch, pair.pod);
    for ip in &success.ips {
        encode::address(&mut batch, pair.pod, ip.address.addr(), ip.address.prefix_len());
    }
    for gateway in gateways(success) {
        encode::neighbour(&mut batch, pair.pod, gateway, plan.host_mac);
    }
    for route in &success.routes {
        let dst = (route.dst.addr(), route.dst.prefix_len());
        encode::pod_route(&mut batch, pair.pod, dst, gateway(dst.0));
    }
    encode::read(&mut batch, &plan.request.ifname);
    batch.send()
}

fn outside(plan: &Plan<'_>, host: &mut Rtnl, pair: &Pair, success: &Success) -> Sent {
    let mut batch = host.batch();
    let ipv6 = gateways(success).any(|gateway| gateway == GATEWAY6);
    if ipv6 {
        encode::address(&mut batch, pair.host, GATEWAY6, 128);
    }
    for ip in &success.ips {
        encode::neighbour(&mut batch, pair.host, ip.address.addr(), plan.pod_mac);
        encode::host_route(&mut batch, pair.host, ip.address.addr());
    }
    encode::read(&mut batch, &plan.host);
    // The last: an earlier call may have added it, and only the first refusal is told.
    if ipv6 {
        encode::link_local(&mut batch, pair.host);
    }
    batch.send().map(|sent| match sent {
        Err(refused) if refused.what == encode::LINK_LOCAL && refused.errno == Errno::EEXIST => Ok(Vec::new()),
        sent => sent,
    })
}

fn gateways(success: &Success) -> impl Iterator<Item = IpAddr> {
    [GATEWAY, GATEWAY6].into_iter().filter(|gw| success.ips.iter().any(|ip| ip.gateway == Some(*gw)))
}

/// A route that is there already is ours from an earlier call, or another interface's, which is an error.
fn known_routes(plan: &Plan<'_>, pair: &mut Pair, success: &Success) -> Result<(), Error> {
    let index = pair.pod;
    let there = pair.inside.routes()?;
    for route in &success.routes {
        let same = |seen: &&crate::rtnl::Route| {
            let dst = seen.dst.unwrap_or(if seen.v6 { IpAddr::from([0; 16]) } else { IpAddr::from([0; 4]) });
            (dst, seen.len) == (route.dst.addr(), route.dst.prefix_len())
        };
        if !there.iter().filter(same).any(|seen| seen.index == index) {
            let text =
                format!("the pod has a route to {} over another interface than {}", route.dst, plan.request.ifname);
            let hint = "for a second interface of a pod set \"isDefaultGateway\": false in the delegate";
            return Err(Error::new(code::OTHER, text).details(hint));
        }
    }
    Ok(())
}

/// A link without IPv6 takes no IPv6 address: EACCES, and as a route's EINVAL or ENODEV before Linux 5.
fn disabled(refused: &Refused) -> bool {
    matches!(refused.errno, Errno::EACCES | Errno::EPERM)
}

/// The node forwards what its pods send, as after the plugins bridge and ptp; an agent in a container cannot see to that.
fn forward(ips: &[Ip]) {
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

/// For a node or a sandbox where `disable_ipv6` is the default, but the network has IPv6.
fn enable(link: &str) {
    let _ = fs::write(format!("/proc/sys/net/ipv6/conf/{link}/disable_ipv6"), "0");
}

/// No router advertisement of a pod moves the host's default route (CVE-2020-10749). Without IPv6 there is no such file.
fn quiet(link: &str) {
    let file = format!("/proc/sys/net/ipv6/conf/{link}/accept_ra");
    match fs::write(&file, "0") {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => note!("weft-veth: write {file}: {error}"),
        _ => {}
    }
}

/// The runtime calls DEL after a failed ADD, but not every one does.
fn undo(plan: &Plan<'_>, host: &mut Rtnl) {
    if let Err(error) = host.remove_link_named(&plan.host) {
        note!("weft-veth: remove {} after a failure: {error}", plan.host);
    }
    release(plan);
}

fn release(plan: &Plan<'_>) {
    if let Err(error) = plan.ipam(Verb::Del) {
        note!("weft-veth: give the addresses back after a failure: {error}");
    }
}

fn render(plan: &Plan<'_>, pair: &Pair, success: Success) -> Vec<u8> {
    let host = Interface {
        name: plan.host.clone(),
        mac: mac_text(plan.host_mac),
        mtu: Some(pair.mtu),
        ..Interface::default()
    };
    let pod = Interface {
        name: plan.request.ifname.clone(),
        mac: mac_text(plan.pod_mac),
        mtu: Some(pair.mtu),
        sandbox: plan.request.netns.clone(),
    };
    let mut success = Success { interfaces: vec![host, pod], ..success };
    if let Some(serde_json::Value::Object(dns)) = plan.conf.get("dns").filter(|dns| **dns != serde_json::json!({})) {
        success.dns = dns.clone();
    }
    success.render(plan.version).to_string().into_bytes()
}
