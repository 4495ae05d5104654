// SPDX-License-Identifier: Apache-2.0
//! Repairs a bridge that was created for another subnet or MTU.
//!
//! The bridge plugin refuses every pod as long as its bridge has a gateway address of another subnet. As long as no pod
//! is connected to the bridge, this plugin may change it.

use ipnet::IpNet;
use serde_json::{Map, Value};
use weft_netlink::rtnl::{Addr, Link, Rtnl};

use crate::render::{BRIDGE, kind};
use crate::spec::{Error, code};
use crate::subnet_env::CheckedSubnetEnv;

/// The bridge plugin's default for `bridge`.
const CNI0: &str = "cni0";

/// Repairs the bridge if the delegate is the bridge plugin and no pod is connected to the bridge.
///
/// # Errors
/// [`code::OTHER`] if the bridge has an address of another subnet and pods are connected to it. The message names the
/// bridge, both subnets and the remedy.
pub fn repair(delegate: &Map<String, Value>, env: &CheckedSubnetEnv) -> Result<(), Error> {
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

/// Returns the addresses of the bridge that are gateways of an earlier subnet.
///
/// In a family in which the bridge has its present gateway, nothing is stale: the bridge plugin accepts other addresses
/// beside it. Without the gateway, what is inside the cluster's networks or looks like a gateway is stale. Other addresses
/// were added by somebody else, for example for a DNS cache of the node.
fn stale_addrs(
    delegate: &Map<String, Value>,
    env: &CheckedSubnetEnv,
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
    let mut addrs = rtnl.addrs()?;
    addrs.retain(|addr| addr.index == link.index && addr.global);
    let has_no_gateway = |net: &&IpNet| !addrs.iter().any(|addr| is_gateway(net, addr));
    let without_gateway: Vec<&IpNet> = env.subnets.iter().filter(has_no_gateway).collect();
    addrs.retain(|addr| {
        let same_family = |net: &&IpNet| net.addr().is_ipv4() == addr.addr.is_ipv4();
        let in_a_network = env.networks.iter().any(|net| net.contains(&addr.addr));
        without_gateway.iter().any(same_family) && (in_a_network || is_any_gateway(addr))
    });
    Ok(addrs)
}

fn is_gateway(net: &IpNet, addr: &Addr) -> bool {
    // For IPv6, `hosts` also yields the first address of the network.
    let mut first = net.hosts().take(if net.addr().is_ipv6() { 2 } else { 1 });
    net.prefix_len() == addr.len && first.any(|host| host == addr.addr)
}

/// Returns true for an address that is the gateway of its own subnet, whatever that subnet is.
fn is_any_gateway(addr: &Addr) -> bool {
    let net = IpNet::new(addr.addr, addr.len).map(|net| net.trunc());
    net.is_ok_and(|net| net.prefix_len() + 2 <= net.max_prefix_len() && is_gateway(&net, addr))
}

fn refuse_if_stale(name: &str, pods: usize, stale: &[Addr], env: &CheckedSubnetEnv) -> Result<(), Error> {
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
