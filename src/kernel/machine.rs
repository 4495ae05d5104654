// SPDX-License-Identifier: Apache-2.0
//! A snapshot of the links, addresses and routes of the host, and the facts about it by which leases are judged and backends plan.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_backends::host::{OnLink, Reach};
use weft_backends::owner::KERNEL_PROTOCOL;
use weft_backends::state::{Mac, Name};
use weft_subnet::cidr::Subnets;
use weft_subnet::connected::Connected;

/// Which program created a link, as its alias says. Every program that may change the link can write its alias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Creator {
    /// This agent, or an earlier run with the same subnet file.
    ThisAgent,
    /// Another weft agent of this host, with another subnet file.
    AnotherAgent,
    /// Any other program, or a person.
    Unknown,
}

/// A link of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkInfo {
    /// Interface index. Only the code with side effects uses it.
    pub index: u32,
    /// The name.
    pub name: Name,
    /// The MTU in bytes.
    pub mtu: u32,
    /// The MAC, if it is an Ethernet device.
    pub mac: Option<Mac>,
    /// It is administratively up (IFF_UP).
    pub up: bool,
    /// It has a carrier (IFF_LOWER_UP).
    pub carrier: bool,
    /// It is the loopback interface (IFF_LOOPBACK).
    pub loopback: bool,
    /// Which program created it, as its alias says.
    pub creator: Creator,
}

/// An address of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddrInfo {
    /// The index of its link.
    pub index: u32,
    /// The address with its prefix length.
    pub net: IpNet,
    /// The scope (`ifa_scope`): 0 is global, 253 is link.
    pub scope: u8,
    /// The flags (`IFA_F_*`).
    pub flags: u32,
}

/// A route of the host that the agent did not write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteInfo {
    /// The prefix, without host bits. The default route has 0.0.0.0/0.
    pub net: IpNet,
    /// The priority. The kernel prefers the route with the lowest one.
    pub metric: u32,
    /// The outgoing interface, if there is one.
    pub dev: Option<Name>,
    /// The gateway, if there is one.
    pub via: Option<IpAddr>,
    /// How packets reach the prefix.
    pub reach: Reach,
    /// The program that wrote it (`rtm_protocol`).
    pub protocol: u8,
}

/// The answer of the kernel to the question how it sends packets to one address, by all its policy rules and routing tables (`ip route get`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteLookup {
    /// The index of the outgoing link.
    pub index: u32,
    /// The source address that the kernel chooses for packets that have none yet.
    pub source: Option<IpAddr>,
}

/// The links, the addresses and the routes of other programs, as they were read at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Machine {
    /// All links.
    pub links: Vec<LinkInfo>,
    /// All addresses.
    pub addrs: Vec<AddrInfo>,
    /// The routes of the main table that do not have the agent's protocol.
    pub routes: Vec<RouteInfo>,
    /// The answer about the address that [`Kernel::machine_towards`](super::Kernel::machine_towards) was called with. `None` if the kernel
    /// has no route to it.
    pub lookup: Option<RouteLookup>,
}

impl Machine {
    /// Returns the addresses and the directly connected networks of the machine that lie inside Network.
    pub fn connected(&self, networks: &Subnets) -> Connected {
        let name = |index: u32| self.links.iter().find(|link| link.index == index).map(|link| link.name);
        let addrs = self.addrs.iter().filter(|addr| networks.iter().any(|all| all.contains(&addr.net.addr())));
        let addrs = addrs.filter_map(|addr| Some((addr.net, name(addr.index)?)));
        let of_addrs = addrs.flat_map(|(net, link)| [(net, link), (IpNet::from(net.addr()), link)]);
        let of_routes = self.routes.iter().filter_map(|route| match route.reach {
            Reach::Link(link) if route.protocol == KERNEL_PROTOCOL => Some((route.net, link)),
            Reach::Link(_) | Reach::Gateway => None,
        });
        Connected::new(networks, of_addrs.chain(of_routes).map(|(net, link)| (net, link.text().into())))
    }

    /// Returns which addresses the machine reaches directly on a link, and which through a gateway.
    pub fn on_link(&self) -> OnLink {
        OnLink::new(self.routes.iter().map(|route| (route.net, route.metric, route.reach)))
    }
}

/// Links, addresses or routes of this machine could not be read.
#[derive(Debug, thiserror::Error)]
#[error("read links and routes: {0}")]
pub struct MachineError(pub io::Error);

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    fn link(index: u32, text: &str) -> LinkInfo {
        let (up, carrier, loopback, creator) = (true, true, false, Creator::Unknown);
        LinkInfo { index, name: name(text), mtu: 1500, mac: None, up, carrier, loopback, creator }
    }

    /// The addresses of the host and the networks on its links are not free for pods. What a routing daemon or a person routes is: such a route
    /// may be the one to a peer.
    #[test]
    fn the_host_occupies_its_addresses_and_what_the_kernel_connected() {
        let addr = |index, net: &str| AddrInfo { index, net: net.parse().unwrap(), scope: 0, flags: 0x80 };
        let route = |net: &str, dev, reach, protocol| {
            let (net, dev, via) = (net.parse().unwrap(), Some(name(dev)), None);
            RouteInfo { net, metric: 0, dev, via, reach, protocol }
        };
        let on = |dev| Reach::Link(name(dev));
        let machine = Machine {
            links: vec![link(2, "eth0"), link(3, "lan0")],
            addrs: vec![
                addr(2, "192.0.2.1/24"),
                addr(3, "10.5.7.9/24"),
                addr(3, "fd05:0:0:7::9/64"),
                addr(9, "10.5.9.9/24"),
            ],
            routes: vec![
                route("10.5.8.0/24", "lan0", on("lan0"), KERNEL_PROTOCOL),
                route("fd05:0:0:8::/64", "lan0", on("lan0"), KERNEL_PROTOCOL),
                route("10.5.20.0/24", "lan0", on("lan0"), 4),
                route("10.5.21.0/24", "lan0", Reach::Gateway, KERNEL_PROTOCOL),
            ],
            lookup: None,
        };
        let networks = Subnets { v4: "10.5.0.0/16".parse().ok(), v6: "fd05::/48".parse().ok() };
        let connected = machine.connected(&networks);
        let net = |text: &str| text.parse::<IpNet>().unwrap();
        let mut all: Vec<IpNet> = connected.iter().collect();
        all.sort();
        let v4 = ["10.5.7.0/24", "10.5.7.9/32", "10.5.8.0/24"].map(net);
        let v6 = ["fd05:0:0:7::/64", "fd05:0:0:7::9/128", "fd05:0:0:8::/64"].map(net);
        let mut wanted = [v4, v6].concat();
        wanted.sort();
        assert_eq!(all, wanted, "nothing outside Network, nothing of a link that is gone");
        assert_eq!(connected.overlapping(net("10.5.7.0/25")).map(|(_, link)| link), Some("lan0"));
        let only_v4 = machine.connected(&Subnets { v6: None, ..networks });
        assert!(only_v4.iter().all(|net| net.addr().is_ipv4()));
    }
}
