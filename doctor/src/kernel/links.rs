// SPDX-License-Identifier: Apache-2.0
//! Chains of nftables at a link (family netdev) and in bridges (family bridge). Packets pass them before or after the chains of the IP layer.

use std::io;

use weft_netlink::nftables::LinkChain;
use weft_netlink::socket::Netlink;

use super::nft;
use crate::kernel::rules::{Fate, Tested};
use crate::remedies::remove_nft_rule;

/// A place where such chains may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Point {
    /// A link by which the packet arrives.
    Arrives(String),
    /// A link by which it leaves.
    Leaves(String),
    /// A hook of the bridge.
    Bridge {
        /// The hook.
        hook: &'static str,
        /// The port by which the packet arrives.
        input: Option<String>,
        /// The port by which it leaves.
        output: Option<String>,
    },
}

impl Point {
    /// Returns the places that a packet from a pod passes between the port of the pod and the IP layer.
    pub fn from_port(port: &str) -> Vec<Point> {
        let bridge = |hook| Point::Bridge { hook, input: Some(port.to_owned()), output: None };
        vec![Point::Arrives(port.to_owned()), bridge("prerouting"), bridge("input")]
    }

    /// Returns the places that a packet passes between the IP layer and the port of a pod.
    pub fn to_port(port: &str) -> Vec<Point> {
        let bridge = |hook| Point::Bridge { hook, input: None, output: Some(port.to_owned()) };
        vec![bridge("output"), bridge("postrouting"), Point::Leaves(port.to_owned())]
    }

    fn has(&self, chain: &LinkChain) -> bool {
        let is_bridge = chain.chain.family == "bridge";
        match self {
            Point::Arrives(link) => !is_bridge && chain.hook == "ingress" && chain.links.contains(link),
            Point::Leaves(link) => !is_bridge && chain.hook == "egress" && chain.links.contains(link),
            Point::Bridge { hook, .. } => is_bridge && chain.hook == *hook,
        }
    }

    /// Returns the place as the end of a sentence about packets.
    fn place(&self) -> String {
        match self {
            Point::Arrives(link) => format!("that arrive on {link}"),
            Point::Leaves(link) => format!("that leave by {link}"),
            Point::Bridge { .. } => "in the bridge cni0".to_owned(),
        }
    }

    fn tested<'a>(&'a self, tested: Tested<'a>) -> Tested<'a> {
        let (input, output) = match self {
            Point::Arrives(link) => (Some(link.as_str()), None),
            Point::Leaves(link) => (None, Some(link.as_str())),
            Point::Bridge { input, output, .. } => (input.as_deref(), output.as_deref()),
        };
        Tested { input, output, ..tested }
    }
}

/// A chain that certainly drops a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drops {
    /// Family, table and name of the chain.
    pub chain: String,
    /// Where, as the end of a sentence about packets.
    pub place: String,
    /// The rule or the policy.
    pub rule: String,
    /// What lets the packet pass.
    pub remedy: String,
}

/// Returns the chains that certainly drop a packet at one of these places. Each is named once.
///
/// # Errors
/// The rules cannot be read.
pub fn drops(
    netlink: &mut Netlink,
    chains: &[LinkChain],
    tested: Tested<'_>,
    points: &[Point],
) -> io::Result<Vec<Drops>> {
    let mut found: Vec<Drops> = Vec::new();
    for point in points {
        for at in chains.iter().filter(|chain| point.has(chain)) {
            let path = at.chain.path();
            if found.iter().any(|known| known.chain == path) {
                continue;
            }
            let outcome = nft::follow(netlink, &at.chain, point.tested(tested))?;
            let is_certain = outcome.lets_none_pass();
            let (rule, remedy) = match outcome.fate {
                Some((Fate::Dropped, rule)) => (rule, remove_nft_rule(&path)),
                None if at.chain.drops => {
                    ("policy drop".to_owned(), format!("nft add chain {path} '{{ policy accept; }}'"))
                }
                _ => continue,
            };
            if is_certain {
                found.push(Drops { chain: path, place: point.place(), rule, remedy });
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use weft_netlink::nftables::BaseChain;

    use super::*;

    #[test]
    fn a_packet_passes_a_chain_only_at_its_own_link_and_hook() {
        let (arrives, leaves) = (Point::Arrives("eth0".to_owned()), Point::Leaves("eth0".to_owned()));
        let bridge = Point::Bridge { hook: "forward", input: None, output: None };
        for (point, family, hook, link, has) in [
            (&arrives, "netdev", "ingress", "eth0", true),
            (&arrives, "netdev", "ingress", "eth1", false),
            (&arrives, "netdev", "egress", "eth0", false),
            (&leaves, "netdev", "egress", "eth0", true),
            (&leaves, "netdev", "egress", "eth1", false),
            (&leaves, "netdev", "ingress", "eth0", false),
            (&bridge, "bridge", "forward", "", true),
            (&bridge, "bridge", "input", "", false),
            (&bridge, "netdev", "ingress", "eth0", false),
        ] {
            let (table, name) = ("f".to_owned(), "c".to_owned());
            let chain = BaseChain { family, number: 0, table, name, is_nat: false, priority: 0, drops: true };
            let chain = LinkChain { chain, hook, links: vec![link.to_owned()] };
            assert_eq!(point.has(&chain), has, "{point:?} {chain:?}");
        }
    }
}
