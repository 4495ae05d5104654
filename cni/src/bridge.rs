// SPDX-License-Identifier: Apache-2.0
//! Repairs a bridge that was created for another subnet or MTU.
//!
//! The bridge plugin refuses every pod as long as its bridge has a gateway address of another subnet. As long as no pod
//! is connected to the bridge, this plugin may change it.

use ipnet::IpNet;
use serde_json::{Map, Value};

use crate::render::{BRIDGE, kind};
use crate::rtnl::{Addr, Link, Rtnl};
use crate::spec::{Error, code};
use crate::subnet_env::SubnetEnv;

/// The bridge plugin's default for `bridge`.
const CNI0: &str = "cni0";

/// Repairs the bridge if the delegate is the bridge plugin and no pod is connected to the bridge.
///
/// # Errors
/// [`code::OTHER`] if the bridge has an address of another subnet and pods are connected to it. The message names the
/// bridge, both subnets and the remedy.
pub fn repair(delegate: &Map<String, Value>, env: &SubnetEnv) -> Result<(), Error> {
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
            // The pods that exist keep working with that MTU, so this is no reason to refuse another one.
            let command = format!("ip link set {name} mtu {mtu}");
            note!(
                "{name} has MTU {}, subnet.env says {mtu}, and {pods} pods are connected to it; run: {command}",
                link.mtu
            );
        }
        return refuse_if_stale(name, pods, &stale, env);
    }
    for addr in &stale {
        rtnl.remove_addr(addr)?;
        note!("{name}: removed the address {}/{} of another subnet; no pod is connected", addr.addr, addr.len);
    }
    if old_mtu {
        rtnl.set_mtu(link.index, mtu)?;
        note!("{name}: changed the MTU from {} to {mtu}; no pod is connected", link.mtu);
    }
    Ok(())
}

/// Returns the global addresses of the bridge that are not the gateway of the node's subnet in their family.
fn stale_addrs(
    delegate: &Map<String, Value>,
    env: &SubnetEnv,
    link: &Link,
    rtnl: &mut Rtnl,
) -> Result<Vec<Addr>, Error> {
    let is_true = |key: &str| delegate.get(key).and_then(Value::as_bool).unwrap_or(false);
    let gateways = is_true("isGateway") || is_true("isDefaultGateway");
    let host_local = delegate.get("ipam").is_some_and(|ipam| ipam["type"] == "host-local");
    // In all other cases the bridge has no address, another IPAM plugin chooses it, or the bridge plugin replaces it
    // (`forceAddress`).
    if !gateways || !host_local || is_true("forceAddress") {
        return Ok(Vec::new());
    }
    let same_family = |net: &IpNet, addr: &Addr| net.addr().is_ipv4() == addr.addr.is_ipv4();
    let is_gateway = |net: &IpNet, addr: &Addr| {
        net.hosts().next() == Some(addr.addr) && net.prefix_len() == addr.len
            // For IPv6, `hosts` also yields the first address of the network.
            || net.hosts().nth(1) == Some(addr.addr) && addr.addr.is_ipv6() && net.prefix_len() == addr.len
    };
    let mut addrs = rtnl.addrs()?;
    addrs.retain(|addr| {
        let mut ours = env.subnets.iter().filter(|net| same_family(net, addr)).peekable();
        addr.index == link.index && addr.global && ours.peek().is_some() && !ours.any(|net| is_gateway(net, addr))
    });
    Ok(addrs)
}

fn refuse_if_stale(name: &str, pods: usize, stale: &[Addr], env: &SubnetEnv) -> Result<(), Error> {
    // The bridge plugin accepts another IPv6 address beside its own.
    let Some(addr) = stale.iter().find(|addr| addr.addr.is_ipv4()) else { return Ok(()) };
    let subnets: Vec<_> = env.subnets.iter().map(IpNet::to_string).collect();
    let text = format!(
        "{name} has {}/{}, this node's subnet is {} now, and {pods} pods are still connected: drain the node, then run: \
         ip link del {name}",
        addr.addr,
        addr.len,
        subnets.join(",")
    );
    Err(Error::new(code::OTHER, text))
}
