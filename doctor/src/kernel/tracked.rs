// SPDX-License-Identifier: Apache-2.0
//! Entries of connection tracking (linux/netfilter/nfnetlink_conntrack.h). What an entry translates stays translated as long as packets come, also
//! after the rule that did it is gone.

use std::io;

use weft_netlink::nftables::{self, NFGENMSG};
use weft_netlink::rt::family;
use weft_netlink::wire::{attr, attr_after, ip, messages, u8_at};

use super::entries::{Packet, Proto};

/// NFNL_SUBSYS_CTNETLINK, in the upper byte of each kind of message. IPCTNL_MSG_CT_NEW is 0.
const NEW: u16 = 1 << 8;
/// IPCTNL_MSG_CT_GET.
const GET: u16 = NEW | 1;

const ATTR_ORIGINAL: u16 = 1;
const ATTR_REPLY: u16 = 2;
/// Of one direction: its addresses, and its protocol with ports.
const TUPLE_IP: u16 = 1;
const TUPLE_PROTO: u16 = 2;
/// The addresses of IPv4 and IPv6.
const SOURCE: [u16; 2] = [1, 3];
const DESTINATION: [u16; 2] = [2, 4];
const PROTO_NUMBER: u16 = 1;
const PROTO_DESTINATION_PORT: u16 = 3;

/// A connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tracked {
    /// Its packets before they are translated.
    pub packet: Packet,
    /// The answers that are expected.
    pub answer: Packet,
}

impl Tracked {
    fn is_translated(&self) -> bool {
        (self.answer.to, self.answer.from) != (self.packet.from, self.packet.to)
    }
}

/// Returns the connections with these packets that have another address behind this node. The table may have hundreds of thousands of entries, so
/// it is read once for each family that the packets have. The kernel loads connection tracking for the question, so only a host that has it should be asked.
///
/// # Errors
/// The table cannot be read, for example by another user than root.
pub fn translated(packets: &[Packet]) -> io::Result<Vec<Tracked>> {
    let mut netlink = nftables::open()?;
    let mut found = Vec::new();
    for is_ipv4 in [true, false] {
        let Some(first) = packets.iter().find(|packet| packet.to.is_ipv4() == is_ipv4) else { continue };
        let of_family = family(first.to);
        let matters = |one: &Tracked| one.is_translated() && packets.contains(&one.packet);
        let all = netlink.dump_into(
            GET,
            |w, kind, flags| w.begin(kind, flags, &[of_family, 0, 0, 0]),
            |all: &mut Vec<Tracked>, datagram| all.extend(entries(datagram).filter(matters)),
        )?;
        found.extend(all);
    }
    Ok(found)
}

/// Reads the connections of a datagram. Those of other protocols are left out.
fn entries(datagram: &[u8]) -> impl Iterator<Item = Tracked> {
    messages(datagram).filter(|message| message.kind == NEW).filter_map(|message| {
        let direction = |kind: u16| packet(attr_after(message.payload, NFGENMSG, kind)?);
        Some(Tracked { packet: direction(ATTR_ORIGINAL)?, answer: direction(ATTR_REPLY)? })
    })
}

fn packet(direction: &[u8]) -> Option<Packet> {
    let (addresses, protocol) = (attr(direction, TUPLE_IP)?, attr(direction, TUPLE_PROTO)?);
    let address = |kinds: [u16; 2]| kinds.into_iter().find_map(|kind| ip(attr(addresses, kind)?));
    let proto = match u8_at(attr(protocol, PROTO_NUMBER)?, 0) {
        1 | 58 => Proto::Icmp,
        4 => Proto::Ipip,
        6 => Proto::Tcp,
        17 => Proto::Udp,
        _ => return None,
    };
    let port = attr(protocol, PROTO_DESTINATION_PORT).and_then(|port| port.try_into().ok()).map(u16::from_be_bytes);
    let has_port = matches!(proto, Proto::Tcp | Proto::Udp);
    Some(Packet {
        from: address(SOURCE)?,
        to: address(DESTINATION)?,
        proto: Some(proto),
        port: port.filter(|_| has_port),
    })
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use weft_netlink::wire::Writer;

    use super::*;

    fn write(w: &mut Writer, packet: &Packet, number: u8) {
        let [source, destination] = if packet.from.is_ipv4() { [1, 2] } else { [3, 4] };
        w.nest(TUPLE_IP, |w| {
            w.attr_ip(source, packet.from);
            w.attr_ip(destination, packet.to);
        });
        w.nest(TUPLE_PROTO, |w| {
            w.attr(PROTO_NUMBER, &[number]);
            w.attr(PROTO_DESTINATION_PORT, &packet.port.unwrap_or(0).to_be_bytes());
        });
    }

    #[test]
    fn a_connection_is_read_in_both_directions() {
        let addr = |text: &str| text.parse::<IpAddr>().unwrap();
        for (own, peer, other, number, proto, port) in [
            ("192.0.2.1", "192.0.2.9", "192.0.2.66", 17, Proto::Udp, Some(8472)),
            ("2001:db8::1", "2001:db8::9", "2001:db8::66", 17, Proto::Udp, Some(8472)),
            ("192.0.2.1", "192.0.2.9", "192.0.2.66", 4, Proto::Ipip, None),
        ] {
            let packet = Packet { from: addr(own), to: addr(peer), proto: Some(proto), port };
            for (to, is_translated) in [(own, false), (other, true)] {
                let answer = Packet { from: packet.to, to: addr(to), ..packet };
                let mut w = Writer::default();
                w.begin(NEW, 0, &[2, 0, 0, 0]);
                w.nest(ATTR_ORIGINAL, |w| write(w, &packet, number));
                w.nest(ATTR_REPLY, |w| write(w, &answer, number));
                w.end(1);
                let found: Vec<Tracked> = entries(w.bytes()).collect();
                assert_eq!(found, [Tracked { packet, answer }]);
                assert_eq!(found[0].is_translated(), is_translated, "{found:?}");
            }
        }
    }
}
