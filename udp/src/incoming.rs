// SPDX-License-Identifier: Apache-2.0
//! From the peers to the TUN device.

use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::sync::Arc;

use ipnet::Ipv4Net;
use nix::poll::PollFlags;
use quinn_udp::{RecvMeta, UdpSockRef};
use tun_rs::{GROTable, VIRTIO_NET_HDR_LEN};

use super::counters::Reason;
use super::device::takes_udp_segments;
use super::error::Error;
use super::outgoing::reason_of;
use super::packet::{Header, checksum_is_right};
use super::routes::Routes;
use super::shared::{Shared, Socket};

/// The number of buffers that one receive call fills.
const BUFFERS: usize = 8;
/// The size of a buffer in bytes. It takes one datagram, or several that the kernel joined.
const BUFFER: usize = 65_536;
/// How many packets are collected before they are written, so that those of one flow can be joined.
const BURST: usize = 64;
/// Marks a packet that must not be written, because tun-rs has joined it with another one. Every packet begins with this value in the
/// place of its virtio header. tun-rs overwrites it in the packets that are to be written, and no valid header has this value.
const JOINED: [u8; VIRTIO_NET_HDR_LEN] = [0xff; VIRTIO_NET_HDR_LEN];
/// The number of receive calls that may fail in a row before the tunnel ends.
const FAILURES: usize = 100;

/// A thread that receives from one socket.
pub(crate) struct Incoming {
    shared: Arc<Shared>,
    socket: Arc<Socket>,
    received: Vec<u8>,
    writer: Writer,
}

impl Incoming {
    pub(crate) fn new(shared: Arc<Shared>, socket: Arc<Socket>) -> Incoming {
        Incoming { shared, socket, received: vec![0; BUFFERS * BUFFER], writer: Writer::new() }
    }

    /// Forwards packets until the tunnel has to end.
    pub(crate) fn run(&mut self) -> Result<(), Error> {
        let (shared, socket) = (self.shared.clone(), self.socket.clone());
        let mut failures = 0;
        while shared.wait(socket.socket.as_fd(), PollFlags::POLLIN)? {
            match self.receive() {
                Ok(()) => failures = 0,
                Err(Error::SocketLost(_)) if failures < FAILURES => failures += 1,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Receives once, and writes everything that is believed.
    fn receive(&mut self) -> Result<(), Error> {
        let Incoming { shared, socket, received, writer } = self;
        let mut meta = [RecvMeta::default(); BUFFERS];
        let mut buffers: Vec<_> = received.chunks_mut(BUFFER).map(IoSliceMut::new).collect();
        let count = match socket.state.recv(UdpSockRef::from(&socket.socket), &mut buffers, &mut meta) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(Error::SocketLost(error)),
        };
        drop(buffers);
        let routes = shared.routes();
        let counts = &shared.counters.received;
        for (bytes, meta) in received.chunks(BUFFER).zip(&meta).take(count) {
            let IpAddr::V4(sender) = meta.addr.ip() else { continue };
            if meta.len == 0 {
                counts.drop_packets(Reason::Malformed, 1);
                continue;
            }
            for datagram in bytes[..meta.len.min(BUFFER)].chunks(meta.stride.max(1)) {
                match judge(datagram, sender, &routes, shared.subnet, shared.mtu) {
                    Ok(packet) => writer.add(packet, shared),
                    Err(reason) => counts.drop_packets(reason, 1),
                }
            }
        }
        writer.write(shared);
        Ok(())
    }
}

/// Decides about a datagram that came from the address `sender`: returns the inner packet, or why it is dropped.
///
/// # Errors
/// The reason for which the datagram is dropped.
pub fn judge<'a>(
    datagram: &'a [u8],
    sender: Ipv4Addr,
    routes: &Routes,
    own: Ipv4Net,
    mtu: u16,
) -> Result<&'a [u8], Reason> {
    if !routes.has_sender(sender) {
        return Err(Reason::Stranger);
    }
    let header = Header::parse(datagram).map_err(reason_of)?;
    let packet = &datagram[..header.total_length];
    if !checksum_is_right(packet, &header) {
        return Err(Reason::Malformed);
    }
    if packet.len() > usize::from(mtu) {
        return Err(Reason::TooLong);
    }
    if header.ttl == 0 {
        return Err(Reason::TtlExpired);
    }
    if !routes.believes(sender, header.source) {
        return Err(Reason::ForeignSource);
    }
    if !own.contains(&header.destination) {
        return Err(Reason::ForeignDestination);
    }
    Ok(packet)
}

/// Packets that wait to be written to the device, each behind room for a virtio header.
struct Writer {
    packets: Vec<Vec<u8>>,
    used: usize,
    table: GROTable,
    joins_udp: bool,
}

impl Writer {
    fn new() -> Writer {
        // The crate joins packets only where the buffer has room for them. Pages that no packet needs take no memory.
        let packets = (0..BURST).map(|_| Vec::with_capacity(BUFFER + 2 * VIRTIO_NET_HDR_LEN)).collect();
        Writer { packets, used: 0, table: GROTable::new(), joins_udp: takes_udp_segments() }
    }

    fn add(&mut self, packet: &[u8], shared: &Shared) {
        if self.used == self.packets.len() {
            self.write(shared);
        }
        let slot = &mut self.packets[self.used];
        slot.clear();
        slot.extend_from_slice(&JOINED);
        slot.extend_from_slice(packet);
        self.used += 1;
        shared.counters.received.forward(1, packet.len());
    }

    /// Writes what was collected. If the device is gone, the thread that reads from it notices that, and ends the tunnel.
    fn write(&mut self, shared: &Shared) {
        let packets = &mut self.packets[..std::mem::take(&mut self.used)];
        if let Err(_error) = self.table.apply_gro(packets, VIRTIO_NET_HDR_LEN, self.joins_udp) {
            shared.counters.received.drop_packets(Reason::Malformed, packets.len());
            return;
        }
        for packet in packets.iter().filter(|packet| packet[..VIRTIO_NET_HDR_LEN] != JOINED) {
            if shared.device.write(packet).is_err() {
                shared.counters.received.drop_packets(Reason::DeviceRefused, 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddrV4;

    use super::*;
    use crate::packet::checksum;
    use crate::routes::Peer;

    const PEER: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 2);

    /// Returns a packet of this length in bytes, whose header has a right checksum.
    fn packet(length: u16, ttl: u8, source: [u8; 4], destination: [u8; 4]) -> Vec<u8> {
        let mut packet = vec![0; usize::from(length)];
        packet[0] = 0x45;
        packet[2..4].copy_from_slice(&length.to_be_bytes());
        packet[8] = ttl;
        packet[12..16].copy_from_slice(&source);
        packet[16..20].copy_from_slice(&destination);
        let sum = checksum(&packet[..20]);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet
    }

    #[test]
    fn each_datagram_is_delivered_or_dropped_for_its_own_reason() {
        let (theirs, ours) = ([10, 5, 2, 9], [10, 5, 1, 7]);
        let subnet = |text: &str| text.parse::<Ipv4Net>().unwrap();
        let address = SocketAddrV4::new(PEER, 8285);
        let routes = Routes::new([Peer { subnet: subnet("10.5.2.0/24"), address, sends_from: None }]);
        let judged = |datagram: &[u8], sender: Ipv4Addr| {
            judge(datagram, sender, &routes, subnet("10.5.1.0/24"), 1472).map(<[u8]>::len)
        };
        let good = packet(84, 64, theirs, ours);
        assert_eq!(judged(&good, Ipv4Addr::new(192, 168, 0, 77)), Err(Reason::Stranger));
        let (mut broken, mut ipv6) = (good.clone(), good.clone());
        broken[11] ^= 1;
        ipv6[0] = 0x60;
        for (datagram, wanted) in [
            (good.clone(), Ok(84)),
            // What follows the packet is not delivered.
            ([&good[..], &[0; 6]].concat(), Ok(84)),
            (good[..83].to_vec(), Err(Reason::Malformed)),
            (broken, Err(Reason::Malformed)),
            (ipv6, Err(Reason::NotIpv4)),
            (packet(1472, 64, theirs, ours), Ok(1472)),
            (packet(1473, 64, theirs, ours), Err(Reason::TooLong)),
            (packet(84, 1, theirs, ours), Ok(84)),
            (packet(84, 0, theirs, ours), Err(Reason::TtlExpired)),
            (packet(84, 64, [10, 5, 3, 9], ours), Err(Reason::ForeignSource)),
            (packet(84, 64, ours, ours), Err(Reason::ForeignSource)),
            (packet(84, 64, theirs, [10, 5, 3, 7]), Err(Reason::ForeignDestination)),
        ] {
            assert_eq!(judged(&datagram, PEER), wanted, "{:?}", &datagram[..20]);
        }
    }
}
