// SPDX-License-Identifier: Apache-2.0
//! Asks the kernel about single entries. No table is dumped but that of the links, and that of the routes if a route of another program
//! was chosen, or one of type local: a node may have 50,000 peers.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use nix::errno::Errno;
use nix::libc;
use weft_netlink::rt::{PLAIN, family};
use weft_netlink::rtnl::{self, Neigh};
use weft_netlink::socket::{Netlink, Refusal};
use weft_netlink::wire::Writer;

use super::entries::{Device, LOCAL, LocalRoute, Lookup, MAIN, Mac, Neighbour, Packet, Proto, Read, Route, RouteKind};

/// Flags of RTM_GETROUTE: name the routing table; name the entry of the table instead of the result for this destination.
const RTM_F_LOOKUP_TABLE: u32 = 0x1000;
const RTM_F_FIB_MATCH: u32 = 0x2000;
/// Attributes of RTM_GETROUTE (linux/rtnetlink.h). The crate libc does not have all of them for musl.
const RTA_IP_PROTO: u16 = 27;
const RTA_DPORT: u16 = 29;
/// The bridge that has an FDB entry (linux/neighbour.h).
const NDA_MASTER: u16 = 9;
/// Sizes of `struct ndmsg` and `struct ifinfomsg`.
const NDMSG: usize = 12;
const IFINFOMSG: usize = 16;

/// A socket for these questions, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Kernel {
    netlink: Netlink,
}

impl Kernel {
    /// Opens the socket.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> io::Result<Kernel> {
        Ok(Kernel { netlink: Netlink::open()? })
    }

    /// Returns all devices.
    ///
    /// # Errors
    /// The dump fails.
    pub fn devices(&mut self) -> io::Result<Vec<Device>> {
        let data = self.netlink.dump(libc::RTM_GETLINK, |w, kind, flags| w.begin(kind, flags, &[0; IFINFOMSG]))?;
        Ok(rtnl::links(&data).map(Device::from).collect())
    }

    /// Returns what the kernel does with a packet that arrives by this device, or that this host sends if there is none.
    pub fn route(&mut self, packet: &Packet, arrives: Option<u32>) -> Lookup {
        // The first answer names the entry of the table, the second one the MTU and the source address for this destination.
        let entry = match self.get_route(packet, arrives, RTM_F_FIB_MATCH) {
            Ok(Ok(route)) => Some(route),
            Ok(Err(_)) => None,
            Err(error) => return Lookup::Unreadable(error.to_string()),
        };
        match (self.get_route(packet, arrives, 0), entry) {
            (Ok(Ok(result)), Some(entry)) => Lookup::Route(Route {
                prefix: entry.prefix,
                protocol: entry.protocol,
                table: entry.table,
                mtu_is_learned: result.mtu.is_some() && result.mtu != entry.mtu,
                ..result
            }),
            (Ok(Ok(result)), None) => Lookup::Route(Route { prefix: None, ..result }),
            // The entry refuses packets, and its kind says how.
            (Ok(Err(_)), Some(entry)) if matches!(entry.kind, RouteKind::Refuses(_)) => Lookup::Route(entry),
            (Ok(Err(errno)), _) => Lookup::Refused(errno),
            (Err(error), _) => Lookup::Unreadable(error.to_string()),
        }
    }

    fn get_route(&mut self, packet: &Packet, arrives: Option<u32>, flags: u32) -> io::Result<Result<Route, Errno>> {
        let answer = self.netlink.request(|w| get_route(w, packet, arrives, flags))?;
        let data = match answer {
            Ok(data) => data,
            Err(refusal) => return Ok(Err(refusal.errno)),
        };
        let found = rtnl::routes(&data).next().map(Route::from);
        found.map(Ok).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the answer contains no route"))
    }

    /// Returns the longest unicast route of weft in the main table that leads to this address.
    ///
    /// # Errors
    /// The dump fails.
    pub fn route_of_weft(&mut self, to: IpAddr) -> io::Result<Option<Route>> {
        let routes = self.main_table(to.is_ipv4())?.into_iter();
        Ok(longest(routes.filter(|route| route.of_weft() && route.kind == RouteKind::Unicast), to))
    }

    /// Returns the longest route of the main table for this address, whatever it does.
    ///
    /// # Errors
    /// The dump fails.
    pub fn route_of_main(&mut self, to: IpAddr) -> io::Result<Option<Route>> {
        Ok(longest(self.main_table(to.is_ipv4())?.into_iter(), to))
    }

    /// Returns the routes of one family in the main table.
    ///
    /// # Errors
    /// The dump fails.
    pub fn main_table(&mut self, is_ipv4: bool) -> io::Result<Vec<Route>> {
        self.table(is_ipv4, MAIN)
    }

    /// Corrects the tables of local routes that answers named. As long as nobody has changed the policy rules of IPv4, the kernel keeps the tables
    /// local and main as one, and its answers name main for the routes of both (`fib_lookup` in include/net/ip_fib.h). A dump tells them apart.
    ///
    /// # Errors
    /// The dump fails.
    pub fn correct_tables<'a>(&mut self, routes: impl IntoIterator<Item = &'a mut LocalRoute>) -> io::Result<()> {
        let is_ipv4 = |route: &LocalRoute| route.prefix.is_some_and(|net| net.addr().is_ipv4());
        let mut unsure = routes.into_iter().filter(|route| route.table == MAIN && is_ipv4(route)).peekable();
        if unsure.peek().is_none() {
            return Ok(());
        }
        let main = self.main_table(true)?.into_iter().filter(|route| route.kind == RouteKind::Local);
        let of_main: Vec<Option<IpNet>> = main.map(|route| route.prefix).collect();
        unsure.filter(|route| !of_main.contains(&route.prefix)).for_each(|route| route.table = LOCAL);
        Ok(())
    }

    /// Returns the routes of one family in a table.
    ///
    /// # Errors
    /// The dump fails.
    pub fn table(&mut self, is_ipv4: bool, table: u32) -> io::Result<Vec<Route>> {
        let family = if is_ipv4 { libc::AF_INET } else { libc::AF_INET6 };
        let fixed = [family as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let data = self.netlink.dump(libc::RTM_GETROUTE, |w, kind, flags| w.begin(kind, flags, &fixed))?;
        Ok(of_table(&data, is_ipv4, table))
    }

    /// Returns the neighbour with this address on a device.
    pub fn neighbour(&mut self, device: u32, address: IpAddr) -> Read<Neighbour> {
        let answer = self.netlink.request(|w| {
            w.begin(libc::RTM_GETNEIGH, PLAIN, &ndmsg(family(address), device));
            w.attr_ip(libc::NDA_DST, address);
        });
        one_entry(answer, |entry| Neighbour { mac: entry.mac.try_into().ok().map(Mac), state: entry.state })
    }

    /// Returns where a vxlan device sends frames for this MAC address.
    pub fn fdb(&mut self, device: u32, mac: Mac) -> Read<IpAddr> {
        let answer = self.netlink.request(|w| {
            let mut fixed = ndmsg(libc::AF_BRIDGE as u8, device);
            // The entries of the device itself. Without this flag, the kernel wants the port of a bridge.
            fixed[10] = libc::NTF_SELF;
            w.begin(libc::RTM_GETNEIGH, PLAIN, &fixed);
            w.attr(libc::NDA_LLADDR, &mac.0);
        });
        one_entry(answer, |entry| entry.addr)
    }

    /// Returns the port behind which a bridge has this MAC address, if somebody wrote that down. What the bridge has learned itself it corrects itself.
    pub fn written_port(&mut self, bridge: u32, mac: Mac) -> Option<u32> {
        let answer = self.netlink.request(|w| {
            w.begin(libc::RTM_GETNEIGH, PLAIN, &ndmsg(libc::AF_BRIDGE as u8, 0));
            w.attr_u32(NDA_MASTER, bridge);
            w.attr(libc::NDA_LLADDR, &mac.0);
        });
        let entry = rtnl::bridge_entries(&answer.ok()?.ok()?).next()?;
        entry.is_written().then_some(entry.port)
    }
}

/// Returns the routes of one family and one table in a dump. A kernel without IPv6 answers the question for its routes with those of all
/// other families.
fn of_table(data: &[u8], is_ipv4: bool, table: u32) -> Vec<Route> {
    rtnl::routes(data).filter(|route| route.v6 != is_ipv4 && route.table == table).map(Route::from).collect()
}

/// Returns the route with the longest prefix that contains this address.
fn longest(routes: impl Iterator<Item = Route>, to: IpAddr) -> Option<Route> {
    let fits = routes.filter(|route| route.prefix.is_some_and(|net| net.contains(&to)));
    fits.max_by_key(|route| route.prefix.map(|net| net.prefix_len()))
}

fn get_route(w: &mut Writer, packet: &Packet, arrives: Option<u32>, flags: u32) {
    let bits = if packet.to.is_ipv4() { 32 } else { 128 };
    let mut fixed = [family(packet.to), bits, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    // IPv6 always names the table, and refuses the flag.
    let flags = if packet.to.is_ipv4() { flags | RTM_F_LOOKUP_TABLE } else { flags };
    fixed[8..].copy_from_slice(&flags.to_ne_bytes());
    w.begin(libc::RTM_GETROUTE, PLAIN, &fixed);
    w.attr_ip(libc::RTA_DST, packet.to);
    w.attr_ip(libc::RTA_SRC, packet.from);
    if let Some(index) = arrives {
        w.attr_u32(libc::RTA_IIF, index);
    }
    let number = match packet.proto {
        Some(Proto::Tcp) => libc::IPPROTO_TCP,
        Some(Proto::Udp) => libc::IPPROTO_UDP,
        Some(Proto::Icmp | Proto::Ipip) | None => return,
    };
    w.attr(RTA_IP_PROTO, &[number as u8]);
    if let Some(port) = packet.port {
        w.attr(RTA_DPORT, &port.to_be_bytes());
    }
}

fn ndmsg(family: u8, device: u32) -> [u8; NDMSG] {
    let mut fixed = [0; NDMSG];
    fixed[0] = family;
    fixed[4..8].copy_from_slice(&device.to_ne_bytes());
    fixed
}

/// Returns the entry of an answer, as `found` takes it from one.
fn one_entry<T>(answer: io::Result<Result<Vec<u8>, Refusal>>, found: impl Fn(Neigh) -> T) -> Read<T> {
    match answer {
        Ok(Ok(data)) => rtnl::neighbours(&data).next().map_or(Read::Missing, |entry| Read::Found(found(entry))),
        Ok(Err(refusal)) if refusal.errno == Errno::ENOENT => Read::Missing,
        Ok(Err(refusal)) => Read::Unreadable(refusal.errno.desc().to_owned()),
        Err(error) => Read::Unreadable(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_the_routes_that_contain_an_address_the_longest_counts() {
        let route = |prefix: &str| Route { prefix: Some(prefix.parse().unwrap()), ..Route::default() };
        let all = ["10.0.0.0/8", "10.5.2.0/24", "10.5.0.0/16", "10.5.3.0/25"].map(route);
        for (to, wanted) in
            [([10, 5, 2, 9], Some("10.5.2.0/24")), ([10, 5, 9, 9], Some("10.5.0.0/16")), ([192, 0, 2, 1], None)]
        {
            let found = longest(all.clone().into_iter(), IpAddr::from(to)).and_then(|route| route.prefix);
            assert_eq!(found.map(|net| net.to_string()).as_deref(), wanted, "{to:?}");
        }
    }

    /// A kernel that was booted with ipv6.disable=1 answers so.
    #[test]
    fn routes_of_ipv4_are_no_answer_to_the_question_for_those_of_ipv6() {
        let dump = |family: i32, bits: u8, dst: &[u8]| {
            let mut w = Writer::default();
            let fixed =
                [family as u8, bits, 0, 0, libc::RT_TABLE_MAIN, libc::RTPROT_STATIC, 0, libc::RTN_UNICAST, 0, 0, 0, 0];
            w.begin(libc::RTM_NEWROUTE, 0, &fixed);
            w.attr(libc::RTA_DST, dst);
            w.end(1);
            w.bytes().to_vec()
        };
        let four = dump(libc::AF_INET, 24, &[10, 5, 2, 0]);
        let six = dump(libc::AF_INET6, 16, &[0xfd; 16]);
        let number = |data: &[u8], is_ipv4, table| of_table(data, is_ipv4, table).len();
        assert_eq!((number(&four, true, MAIN), number(&four, false, MAIN)), (1, 0));
        assert_eq!((number(&six, true, MAIN), number(&six, false, MAIN)), (0, 1));
        assert_eq!(number(&four, true, MAIN + 1), 0, "another table");
    }
}
