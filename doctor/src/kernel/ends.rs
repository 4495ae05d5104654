// SPDX-License-Identifier: Apache-2.0
//! The addresses of this node in the packets of a tunnel.

use std::net::IpAddr;

use weft_netlink::rtnl::Addr;

/// Two addresses of this node, which may be the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    /// The one from which its packets leave.
    pub from: IpAddr,
    /// The one at which the packets of a peer arrive.
    pub at: IpAddr,
}

impl Ends {
    /// Returns the addresses in the packets between this node and a peer. `None` if they are not known.
    ///
    /// Peers send to the `published` address. Behind a NAT, no link of this node has it, and the packets arrive at the source of our own ones. That
    /// is the address of the `uplink`, also if another one is published: the devices of vxlan and ipip, and the socket of the agent for udp, have it
    /// as their local address. If the agent has not named it, the source that the kernel has `chosen` is taken, which is usually the same.
    ///
    /// WireGuard has no local address: it begins with the source that the kernel chooses, answers from the address to which the peer sent, and a
    /// peer answers to where packets came from. If these are two addresses, packets may have either, and no rule about one of them is certain.
    pub fn new(
        is_wireguard: bool,
        uplink: Option<IpAddr>,
        published: Option<IpAddr>,
        chosen: Option<IpAddr>,
    ) -> Option<Ends> {
        let from = uplink.filter(|_| !is_wireguard).or(chosen)?;
        let at = published.unwrap_or(from);
        (!is_wireguard || from == at).then_some(Ends { from, at })
    }
}

/// Returns the first of the addresses `own` that has the family of `like`, and that a link of this node has. `addrs` are the addresses of the links.
/// An address of the other side of a NAT belongs to no link.
pub(crate) fn first_here(addrs: &[Addr], own: &[IpAddr], like: IpAddr) -> Option<IpAddr> {
    let is_here = |own: &IpAddr| addrs.iter().any(|addr| addr.addr == *own);
    own.iter().copied().find(|own| own.is_ipv4() == like.is_ipv4() && is_here(own))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_source_is_that_of_the_uplink_and_peers_send_to_the_published_address() {
        let ip = |last: u8| Some(IpAddr::from([192, 0, 2, last]));
        for (is_wireguard, uplink, published, chosen, ends) in [
            (false, ip(5), ip(7), ip(1), Some((ip(5), ip(7)))),
            (false, ip(5), None, ip(1), Some((ip(5), ip(5)))),
            (false, None, ip(7), ip(1), Some((ip(1), ip(7)))),
            (false, ip(5), None, None, Some((ip(5), ip(5)))),
            (false, None, ip(7), None, None),
            (true, ip(5), ip(1), ip(1), Some((ip(1), ip(1)))),
            (true, ip(5), None, ip(1), Some((ip(1), ip(1)))),
            (true, ip(1), ip(7), ip(1), None),
        ] {
            let found = Ends::new(is_wireguard, uplink, published, chosen);
            assert_eq!(found.map(|ends| (Some(ends.from), Some(ends.at))), ends, "{uplink:?} {published:?} {chosen:?}");
        }
    }

    #[test]
    fn an_address_that_no_link_has_is_none_of_this_node() {
        let addr = |text: &str| text.parse::<IpAddr>().unwrap();
        let link = |text: &str| Addr { index: 2, addr: addr(text), len: 24, global: true, duplicate: false };
        let own = [addr("203.0.113.9"), addr("fd00::1"), addr("192.0.2.5")];
        let addrs = [link("192.0.2.5"), link("fd00::1")];
        assert_eq!(first_here(&addrs, &own, addr("198.51.100.1")), Some(addr("192.0.2.5")));
        assert_eq!(first_here(&addrs, &own, addr("fd00:9::1")), Some(addr("fd00::1")));
        assert_eq!(first_here(&addrs[1..], &own, addr("198.51.100.1")), None);
    }
}
