// SPDX-License-Identifier: Apache-2.0
//! A bridge that was made for another subnet or MTU. The bridge plugin refuses every pod then, for ever; nothing but a restart of
//! the machine helps. While no pod is on it, it is ours to repair.

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::render::{BRIDGE, kind};
use crate::rtnl::{Addr, Link, Rtnl};
use crate::spec::{Error, code};
use crate::subnet_env::SubnetEnv;

/// The name that the bridge plugin takes when it is given none.
const CNI0: &str = "cni0";

/// Repairs what stands in the way of the delegate, when that is the bridge plugin.
///
/// # Errors
/// [`code::OTHER`] when pods are on the bridge: names it, both subnets and the way out.
pub fn mend(delegate: &Map<String, Value>, env: &SubnetEnv) -> Result<(), Error> {
    if kind(delegate) != BRIDGE {
        return Ok(());
    }
    let name = delegate.get("bridge").and_then(Value::as_str).filter(|name| !name.is_empty()).unwrap_or(CNI0);
    let mut rtnl = Rtnl::open()?;
    let Some(link) = rtnl.link(name)?.filter(|link| link.kind == BRIDGE) else { return Ok(()) };
    let stale = stale_addrs(delegate, env, &link, &mut rtnl)?;
    let mtu = delegate.get("mtu").and_then(Value::as_u64).and_then(|mtu| u32::try_from(mtu).ok()).unwrap_or(0);
    let old_mtu = mtu != 0 && mtu != link.mtu;
    if stale.is_empty() && !old_mtu {
        return Ok(());
    }
    let pods = rtnl.ports(link.index)?.len();
    if pods > 0 {
        if old_mtu {
            // Pods go on with it: no reason to refuse one more.
            let command = format!("ip link set {name} mtu {mtu}");
            note!("{name} has MTU {}, subnet.env says {mtu}, {pods} pods are on it; run: {command}", link.mtu);
        }
        return in_use(name, pods, &stale, env);
    }
    for addr in &stale {
        rtnl.remove_addr(addr)?;
        note!("{name}: removed {}/{}, which is not of this node's subnet; no pod is on it", addr.addr, addr.len);
    }
    if old_mtu {
        rtnl.set_mtu(link.index, mtu)?;
        note!("{name}: MTU {} is {mtu} now; no pod is on it", link.mtu);
    }
    Ok(())
}

/// Addresses of the bridge that are not the gateway's, in a family that has one.
fn stale_addrs(
    delegate: &Map<String, Value>,
    env: &SubnetEnv,
    link: &Link,
    rtnl: &mut Rtnl,
) -> Result<Vec<Addr>, Error> {
    let says = |key: &str| delegate.get(key).and_then(Value::as_bool).unwrap_or(false);
    let gateways = says("isGateway") || says("isDefaultGateway");
    let host_local = delegate.get("ipam").is_some_and(|ipam| ipam["type"] == "host-local");
    // Otherwise the bridge has no address, or another plugin says which; or the delegate repairs it itself.
    if !gateways || !host_local || says("forceAddress") {
        return Ok(Vec::new());
    }
    let same_family = |net: &IpNet, addr: &Addr| net.addr().is_ipv4() == addr.addr.is_ipv4();
    let is_gateway = |net: &IpNet, addr: &Addr| {
        net.hosts().next() == Some(addr.addr) && net.prefix_len() == addr.len
            // hosts() leaves the first address of an IPv6 network in.
            || net.hosts().nth(1) == Some(addr.addr) && addr.addr.is_ipv6() && net.prefix_len() == addr.len
    };
    let mut addrs = rtnl.addrs()?;
    addrs.retain(|addr| {
        let mut ours = env.subnets.iter().filter(|net| same_family(net, addr)).peekable();
        addr.index == link.index && addr.global && ours.peek().is_some() && !ours.any(|net| is_gateway(net, addr))
    });
    Ok(addrs)
}

fn in_use(name: &str, pods: usize, stale: &[Addr], env: &SubnetEnv) -> Result<(), Error> {
    // Another IPv6 address beside ours does no harm: the bridge plugin takes no offence.
    let Some(addr) = stale.iter().find(|addr| addr.addr.is_ipv4()) else { return Ok(()) };
    let subnets: Vec<_> = env.subnets.iter().map(IpNet::to_string).collect();
    let text = format!(
        "{name} has {}/{}, this node's subnet is {} now, and {pods} pods are still on it: drain the node, then run: \
         ip link del {name}",
        addr.addr,
        addr.len,
        subnets.join(",")
    );
    Err(Error::new(code::OTHER, text))
}
