// SPDX-License-Identifier: Apache-2.0
//! The routes, FDB entries and neighbours of one network namespace: read, and deleted as a fault.

use std::fmt;
use std::net::IpAddr;
use std::pin::pin;

use anyhow::{Context, Result};
use futures_util::TryStreamExt;
use ipnet::IpNet;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
};

use super::Network;

/// A link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// Name of the interface.
    pub name: String,
    /// True for a vxlan device.
    pub vxlan: bool,
}

/// A route of the main table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Destination; the prefix length 0 is the default route.
    pub destination: IpNet,
    /// True if an administrator or a program added the route, and not the kernel.
    pub added: bool,
    /// All that the kernel says about the route, except IDs of nexthop objects, counters and the state of links.
    text: String,
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// An FDB entry of a tunnel device: packets to a MAC address are sent to a remote address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FdbEntry {
    /// Name of the device.
    pub device: String,
    /// The MAC address.
    pub mac: Vec<u8>,
    /// The remote address.
    pub destination: IpAddr,
    /// True for an entry that does not expire.
    permanent: bool,
}

impl fmt::Display for FdbEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.permanent { "permanent" } else { "learned" };
        write!(f, "{} dev {} dst {} {state}", mac_text(&self.mac), self.device, self.destination)
    }
}

/// A permanent entry of the neighbour table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// Name of the device.
    pub device: String,
    /// The neighbour's IP address.
    pub address: IpAddr,
    /// The neighbour's MAC address; may be empty.
    pub mac: Vec<u8>,
}

impl fmt::Display for Neighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} dev {} lladdr {} permanent", self.address, self.device, mac_text(&self.mac))
    }
}

impl Network {
    /// Returns all links.
    ///
    /// # Errors
    /// The links cannot be read.
    pub async fn links(&self) -> Result<Vec<Link>> {
        let messages: Vec<_> = self.handle.link().get().execute().try_collect().await.context("read the links")?;
        let mut links = Vec::new();
        for message in messages {
            let mut link = Link { index: message.header.index, name: String::new(), vxlan: false };
            for attribute in message.attributes {
                match attribute {
                    LinkAttribute::IfName(name) => link.name = name,
                    LinkAttribute::LinkInfo(infos) => {
                        link.vxlan = infos.contains(&LinkInfo::Kind(InfoKind::Vxlan));
                    }
                    _ => {}
                }
            }
            links.push(link);
        }
        Ok(links)
    }

    /// Returns the routes of the main table of both families.
    ///
    /// # Errors
    /// The routes cannot be read.
    pub async fn routes(&self) -> Result<Vec<Route>> {
        let links = self.links().await?;
        let mut routes = Vec::new();
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut wanted = RouteMessage::default();
            wanted.header.address_family = family;
            let found: Vec<_> =
                self.handle.route().get(wanted).execute().try_collect().await.context("read the routes")?;
            let listed = |route: &&RouteMessage| {
                route.header.table == RouteHeader::RT_TABLE_MAIN && !route.header.flags.contains(RouteFlags::Cloned)
            };
            routes.extend(found.iter().filter(listed).filter_map(|route| read_route(route, &links)));
        }
        Ok(routes)
    }

    /// Returns the destination of the route that the kernel uses for an address.
    ///
    /// # Errors
    /// There is no route to the address.
    pub async fn route_to(&self, address: IpAddr) -> Result<IpNet> {
        let mut wanted = RouteMessage::default();
        wanted.header.address_family = family_of(address);
        wanted.header.destination_prefix_length = if address.is_ipv4() { 32 } else { 128 };
        wanted.header.flags = RouteFlags::FibMatch;
        wanted.attributes.push(RouteAttribute::Destination(address.into()));
        let found = self.handle.route().get(wanted).execute();
        let route = pin!(found).try_next().await.with_context(|| format!("read the route to {address}"))?;
        route.as_ref().and_then(destination).with_context(|| format!("no route to {address}"))
    }

    /// Deletes the route with this destination from the main table, whatever else it says.
    ///
    /// # Errors
    /// There is no such route.
    pub async fn delete_route(&self, destination: IpNet) -> Result<()> {
        let mut route = RouteMessage::default();
        route.header.address_family = family_of(destination.addr());
        route.header.destination_prefix_length = destination.prefix_len();
        route.header.table = RouteHeader::RT_TABLE_MAIN;
        route.header.scope = RouteScope::NoWhere;
        route.attributes.push(RouteAttribute::Destination(destination.addr().into()));
        self.handle.route().del(route).execute().await.with_context(|| format!("delete the route {destination}"))
    }

    /// Returns the FDB entries with a remote address.
    ///
    /// # Errors
    /// The entries cannot be read.
    pub async fn fdb(&self) -> Result<Vec<FdbEntry>> {
        let links = self.links().await?;
        let request = self.handle.neighbours().get().set_address_family(AddressFamily::Bridge);
        let found: Vec<_> = request.execute().try_collect().await.context("read the FDB")?;
        Ok(found.iter().filter_map(|message| read_fdb_entry(message, &links)).collect())
    }

    /// Deletes an FDB entry.
    ///
    /// # Errors
    /// There is no such entry.
    pub async fn delete_fdb_entry(&self, entry: &FdbEntry) -> Result<()> {
        let mut message = NeighbourMessage::default();
        message.header.family = AddressFamily::Bridge;
        message.header.ifindex = self.link_index(&entry.device).await?;
        message.header.flags = NeighbourFlags::Own;
        message.attributes.push(NeighbourAttribute::LinkLayerAddress(entry.mac.clone()));
        message.attributes.push(NeighbourAttribute::Destination(entry.destination.into()));
        self.handle.neighbours().del(message).execute().await.with_context(|| format!("delete the FDB entry {entry}"))
    }

    /// Returns the permanent entries of the neighbour table of both families.
    ///
    /// # Errors
    /// The entries cannot be read.
    pub async fn permanent_neighbours(&self) -> Result<Vec<Neighbour>> {
        let links = self.links().await?;
        let found: Vec<_> =
            self.handle.neighbours().get().execute().try_collect().await.context("read the neighbours")?;
        Ok(found
            .iter()
            .filter(|message| is_permanent(message))
            .filter_map(|message| read_neighbour(message, &links))
            .collect())
    }
}

fn read_route(message: &RouteMessage, links: &[Link]) -> Option<Route> {
    let header = &message.header;
    let destination = destination(message)?;
    let mut words = vec![destination.to_string(), format!("{:?}", header.kind).to_lowercase()];
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Gateway(gateway) => words.push(format!("via {}", address(gateway)?)),
            RouteAttribute::Oif(index) => words.push(format!("dev {}", name_of(*index, links))),
            RouteAttribute::Priority(priority) => words.push(format!("metric {priority}")),
            RouteAttribute::PrefSource(source) => words.push(format!("src {}", address(source)?)),
            RouteAttribute::MultiPath(hops) => words.push(format!("{hops:?}")),
            _ => {}
        }
    }
    words.push(format!("proto {}", header.protocol));
    words.push(format!("scope {}", header.scope));
    if header.flags.contains(RouteFlags::Onlink) {
        words.push("onlink".to_owned());
    }
    let added = !matches!(header.protocol, RouteProtocol::Kernel | RouteProtocol::Ra);
    Some(Route { destination, added, text: words.join(" ") })
}

fn destination(message: &RouteMessage) -> Option<IpNet> {
    let found = message.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(found) => address(found),
        _ => None,
    });
    // The kernel leaves the destination of a default route out.
    let default = match message.header.address_family {
        AddressFamily::Inet => IpAddr::from([0; 4]),
        _ => IpAddr::from([0; 16]),
    };
    IpNet::new(found.unwrap_or(default), message.header.destination_prefix_length).ok()
}

fn read_fdb_entry(message: &NeighbourMessage, links: &[Link]) -> Option<FdbEntry> {
    let (destination, mac) = addresses(message);
    Some(FdbEntry {
        device: name_of(message.header.ifindex, links),
        mac,
        destination: destination?,
        permanent: is_permanent(message),
    })
}

fn read_neighbour(message: &NeighbourMessage, links: &[Link]) -> Option<Neighbour> {
    let (address, mac) = addresses(message);
    Some(Neighbour { device: name_of(message.header.ifindex, links), address: address?, mac })
}

/// Returns true for an entry that does not expire. The state is a set of flags: an entry of `bridge fdb` has another
/// one, too.
fn is_permanent(message: &NeighbourMessage) -> bool {
    u16::from(message.header.state) & u16::from(NeighbourState::Permanent) != 0
}

/// Returns the IP address and the MAC address of an FDB entry or a neighbour.
fn addresses(message: &NeighbourMessage) -> (Option<IpAddr>, Vec<u8>) {
    let (mut ip, mut mac) = (None, Vec::new());
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(v4)) => ip = Some(IpAddr::from(*v4)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(v6)) => ip = Some(IpAddr::from(*v6)),
            // The family of an FDB entry is "bridge", so the crate cannot tell the family of its address.
            NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => ip = ip_from(bytes),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac.clone_from(bytes),
            _ => {}
        }
    }
    (ip, mac)
}

fn ip_from(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

fn address(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(v4) => Some(IpAddr::from(*v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::from(*v6)),
        _ => None,
    }
}

fn family_of(address: IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn name_of(index: u32, links: &[Link]) -> String {
    let link = links.iter().find(|link| link.index == index);
    link.map_or_else(|| format!("link {index}"), |link| link.name.clone())
}

fn mac_text(mac: &[u8]) -> String {
    mac.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(":")
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::route::RouteType;

    use super::*;

    #[test]
    fn the_nexthop_id_of_a_route_is_not_shown() {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.destination_prefix_length = 24;
        message.header.kind = RouteType::Unicast;
        message.header.protocol = RouteProtocol::Other(90);
        message.header.flags = RouteFlags::Onlink;
        let gateway: IpAddr = "10.1.2.0".parse().unwrap();
        message.attributes = vec![
            RouteAttribute::Destination(gateway.into()),
            RouteAttribute::NhId(77),
            RouteAttribute::Gateway(gateway.into()),
            RouteAttribute::Oif(5),
        ];
        let links = [Link { index: 5, name: "flannel.1".to_owned(), vxlan: true }];
        let route = read_route(&message, &links).unwrap();
        assert!(route.added);
        let text = route.to_string();
        assert!(text.starts_with("10.1.2.0/24 unicast via 10.1.2.0 dev flannel.1"), "{text}");
        assert!(text.ends_with(" onlink") && !text.contains("77"), "{text}");
    }

    #[test]
    fn an_fdb_entry_has_the_address_of_either_family() {
        let links = [Link { index: 5, name: "flannel.1".to_owned(), vxlan: true }];
        for address in ["192.168.1.2", "fd00::2"] {
            let address: IpAddr = address.parse().unwrap();
            let bytes = match address {
                IpAddr::V4(v4) => v4.octets().to_vec(),
                IpAddr::V6(v6) => v6.octets().to_vec(),
            };
            let mut message = NeighbourMessage::default();
            message.header.ifindex = 5;
            message.header.state = NeighbourState::Permanent;
            message.attributes = vec![
                NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)),
                NeighbourAttribute::LinkLayerAddress(vec![0x0a, 0, 0, 0, 0, 0x0b]),
            ];
            let entry = read_fdb_entry(&message, &links).unwrap();
            assert_eq!(entry.to_string(), format!("0a:00:00:00:00:0b dev flannel.1 dst {address} permanent"));
        }
        assert_eq!(
            read_fdb_entry(&NeighbourMessage::default(), &links),
            None,
            "an entry of a bridge has no remote address"
        );
    }
}
