// SPDX-License-Identifier: Apache-2.0
//! From the TUN device to the peers.

use std::io;
use std::net::{SocketAddr, SocketAddrV4, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::PollFlags;
use quinn_udp::{Transmit, UdpSockRef};
use tun_rs::{VIRTIO_NET_HDR_GSO_UDP_L4, VIRTIO_NET_HDR_LEN, VirtioNetHdr, gso_split};

use super::counters::Reason;
use super::error::Error;
use super::icmp::Answer;
use super::packet::{Header, Malformed, checksum, decrement_ttl};
use super::routes::Routes;
use super::shared::{Shared, Socket};

/// The largest frame that the kernel hands over.
const FRAME: usize = VIRTIO_NET_HDR_LEN + 65_536;
/// The largest payload of a UDP datagram over IPv4. All segments of one call together may not be larger.
const MAX_PAYLOAD: usize = 65_535 - 28;
/// The number of frames that are read before the collected packets are sent, and the table of peers is read again.
const BURST: usize = 64;
/// How long a packet waits for room in the buffer of its socket. The buffer of an uplink that works is half empty much earlier. Datagrams to peers
/// whose link addresses are unknown keep their room for seconds, and must not hold up those to others.
const ROOM_WAIT: Duration = Duration::from_millis(100);
/// How long a tunnel that has to end waits for room in the buffer of its socket. The packets that it has read are in no queue of the kernel any
/// more, so no later tunnel can send them. But the owner waits for the end, and what peers send meanwhile waits in buffers of limited size. So the
/// wait is short: one peer whose link address is unknown must not hold up the others.
const LAST_WAIT: Duration = Duration::from_millis(200);
const NEEDS_CHECKSUM: u8 = 1;
const NO_SEGMENTS: u8 = 0;

/// The thread that sends.
pub(crate) struct Outgoing {
    shared: Arc<Shared>,
    frame: Vec<u8>,
    /// The segments of one frame, one after the other.
    segments: Vec<u8>,
    batch: Batch,
    /// True after a wait in vain. Until there is room again, packets that find none are dropped at once.
    is_stuck: bool,
    /// When the last wait for room in the socket's buffer ends. `None` as long as the tunnel has not had to end during such a wait.
    last_wait: Option<Instant>,
}

/// Packets of equal length for one peer, which one call sends.
#[derive(Default)]
struct Batch {
    peer: Option<SocketAddrV4>,
    /// Length of each packet but the last, which may be shorter.
    segment: usize,
    bytes: Vec<u8>,
}

impl Batch {
    fn takes(&self, peer: SocketAddrV4, length: usize) -> bool {
        self.peer == Some(peer)
            && length <= self.segment
            && self.bytes.len().is_multiple_of(self.segment)
            && self.bytes.len() + length <= MAX_PAYLOAD
    }
}

impl Outgoing {
    pub(crate) fn new(shared: Arc<Shared>) -> Outgoing {
        Outgoing {
            shared,
            frame: vec![0; FRAME],
            segments: Vec::new(),
            batch: Batch::default(),
            is_stuck: false,
            last_wait: None,
        }
    }

    /// Forwards packets until the tunnel has to end.
    pub(crate) fn run(&mut self) -> Result<(), Error> {
        let shared = self.shared.clone();
        while shared.wait(shared.device.as_fd(), PollFlags::POLLIN)? {
            let routes = shared.routes();
            for _ in 0..BURST {
                // What is not read waits in the device's queue for the next tunnel.
                if self.last_wait.is_some() {
                    break;
                }
                match shared.device.read(&mut self.frame) {
                    Ok(length) => self.forward(length, &routes)?,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(shared.device_lost(error)),
                }
            }
            self.flush()?;
        }
        Ok(())
    }

    /// Forwards the frame that was read.
    fn forward(&mut self, length: usize, routes: &Routes) -> Result<(), Error> {
        let frame = &mut self.frame[..length.min(FRAME)];
        let sent = &self.shared.counters.sent;
        let Some((virtio, packet)) = split_frame(frame) else {
            sent.drop_packets(Reason::Malformed, 1);
            return Ok(());
        };
        let header = match Header::parse(packet) {
            Ok(header) => header,
            Err(malformed) => {
                sent.drop_packets(reason_of(malformed), 1);
                return Ok(());
            }
        };
        if !complete_checksum(&virtio, packet) {
            sent.drop_packets(Reason::Malformed, 1);
            return Ok(());
        }
        let refused = match routes.peer_of(header.destination) {
            None => (Reason::NoRoute, Answer::NetworkUnreachable),
            Some(_) if header.ttl <= 1 => (Reason::TtlExpired, Answer::TimeExceeded),
            Some(peer) => {
                decrement_ttl(packet);
                return self.send_frame(virtio, header.total_length, peer);
            }
        };
        sent.drop_packets(refused.0, 1);
        if let Some(answer) = refused.1.to(packet, &header, self.shared.subnet.trunc().addr()) {
            let mut frame = vec![0; VIRTIO_NET_HDR_LEN];
            frame.extend(answer);
            // If the kernel refuses the answer, the sender hears nothing, as if there were no answer.
            let _ = self.shared.device.write(&frame);
        }
        Ok(())
    }

    /// Sends a frame whose TTL is decremented.
    fn send_frame(&mut self, virtio: VirtioNetHdr, length: usize, peer: SocketAddrV4) -> Result<(), Error> {
        let packet = &mut self.frame[VIRTIO_NET_HDR_LEN..][..length];
        if virtio.gso_type != NO_SEGMENTS {
            let Some(segment) = split(packet, virtio, &mut self.segments) else {
                self.shared.counters.sent.drop_packets(Reason::Malformed, 1);
                return Ok(());
            };
            // Packets that were read before this frame must be sent before it.
            self.flush()?;
            let segments = std::mem::take(&mut self.segments);
            let result = self.send(peer, &segments, segment);
            self.segments = segments;
            return result;
        }
        if !self.batch.takes(peer, length) {
            self.flush()?;
            self.batch.peer = Some(peer);
            self.batch.segment = length;
        }
        self.batch.bytes.extend_from_slice(&self.frame[VIRTIO_NET_HDR_LEN..][..length]);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        let mut bytes = std::mem::take(&mut self.batch.bytes);
        if let Some(peer) = self.batch.peer.take() {
            self.send(peer, &bytes, self.batch.segment)?;
        }
        bytes.clear();
        self.batch.bytes = bytes;
        Ok(())
    }

    /// Sends packets that lie one after the other, each of `segment` bytes but the last.
    fn send(&mut self, peer: SocketAddrV4, bytes: &[u8], segment: usize) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        let socket = shared.socket_for(peer.port());
        let at_once = socket.state.max_gso_segments().min(MAX_PAYLOAD / segment).max(1);
        for chunk in bytes.chunks(at_once * segment) {
            if let Err(error) = self.send_once((socket, peer), chunk, segment)? {
                if chunk.len() <= segment {
                    self.count_failure(&error);
                    continue;
                }
                // The driver may not support segmentation, or a segment may be too long. So each packet is sent by itself.
                for packet in chunk.chunks(segment) {
                    if let Err(error) = self.send_once((socket, peer), packet, segment)? {
                        self.count_failure(&error);
                    }
                }
            }
        }
        Ok(())
    }

    /// Sends with one call, and waits for a moment if the socket's buffer is full. The inner result is that of the call.
    fn send_once(
        &mut self,
        (socket, peer): (&Socket, SocketAddrV4),
        bytes: &[u8],
        segment: usize,
    ) -> Result<io::Result<()>, Error> {
        let destination = SocketAddr::V4(peer);
        let transmit = Transmit { destination, ecn: None, contents: bytes, segment_size: Some(segment), src_ip: None };
        loop {
            match socket.state.try_send(UdpSockRef::from(&socket.socket), &transmit) {
                Ok(()) => {
                    self.shared.counters.sent.forward(bytes.len().div_ceil(segment), bytes.len());
                    return Ok(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !self.wait_for_room(&socket.socket)? {
                        return Ok(Err(error));
                    }
                }
                Err(error) => return Ok(Err(error)),
            }
        }
    }

    /// Waits until the socket's buffer has room, for [`ROOM_WAIT`] at most, or for [`LAST_WAIT`] if the tunnel has to end. Returns false if there
    /// is still none then.
    fn wait_for_room(&mut self, socket: &UdpSocket) -> Result<bool, Error> {
        let socket = socket.as_fd();
        if self.last_wait.is_none() {
            let limit = if self.is_stuck { Duration::ZERO } else { ROOM_WAIT };
            if let Some(has_room) = self.shared.wait_at_most(socket, PollFlags::POLLOUT, limit)? {
                self.is_stuck = !has_room;
                return Ok(has_room);
            }
        }
        let deadline = *self.last_wait.get_or_insert_with(|| Instant::now() + LAST_WAIT);
        Shared::wait_until(socket, PollFlags::POLLOUT, deadline)
    }

    fn count_failure(&self, error: &io::Error) {
        let too_big = error.raw_os_error() == Some(Errno::EMSGSIZE as i32);
        let reason = if too_big { Reason::TooBig } else { Reason::SendFailed };
        self.shared.counters.sent.drop_packets(reason, 1);
    }
}

/// Returns the reason for which a packet with a malformed header is dropped.
pub(crate) fn reason_of(malformed: Malformed) -> Reason {
    match malformed {
        Malformed::NotIpv4(_) => Reason::NotIpv4,
        Malformed::TooShort(_) | Malformed::HeaderLength(_) | Malformed::TotalLength(_) => Reason::Malformed,
    }
}

fn split_frame(frame: &mut [u8]) -> Option<(VirtioNetHdr, &mut [u8])> {
    let (virtio, packet) = frame.split_at_mut_checked(VIRTIO_NET_HDR_LEN)?;
    Some((VirtioNetHdr::decode(virtio).ok()?, packet))
}

/// Computes the transport checksum of a single packet, which the kernel leaves to the device. The field holds the sum of
/// the pseudo header. Returns false if the field lies outside the packet.
fn complete_checksum(virtio: &VirtioNetHdr, packet: &mut [u8]) -> bool {
    if virtio.gso_type != NO_SEGMENTS || virtio.flags & NEEDS_CHECKSUM == 0 {
        return true;
    }
    let start = usize::from(virtio.csum_start);
    let at = start + usize::from(virtio.csum_offset);
    let Some(sum) = packet.get(start..).map(checksum) else { return false };
    let Some(field) = packet.get_mut(at..at + 2) else { return false };
    // 0 would mean that a UDP packet has no checksum; both mean the same for other protocols.
    field.copy_from_slice(&if sum == 0 { 0xffff } else { sum }.to_be_bytes());
    true
}

/// Splits a packet into its segments, and returns the length of each but the last.
fn split(packet: &mut [u8], mut virtio: VirtioNetHdr, segments: &mut Vec<u8>) -> Option<usize> {
    let start = usize::from(virtio.csum_start);
    let transport = match virtio.gso_type {
        VIRTIO_NET_HDR_GSO_UDP_L4 => 8,
        _ => usize::from(packet.get(start + 12)? >> 4) * 4,
    };
    virtio.hdr_len = u16::try_from(start + transport).ok()?;
    let payload = packet.len().checked_sub(start + transport)?;
    let count = payload.div_ceil(usize::from(virtio.gso_size).max(1));
    let length = start + transport + usize::from(virtio.gso_size);
    segments.resize(count * length, 0);
    let mut outputs: Vec<&mut [u8]> = segments.chunks_mut(length).collect();
    let mut sizes = vec![0; outputs.len()];
    let made = gso_split(packet, virtio, &mut outputs, &mut sizes, 0, false).ok()?;
    segments.truncate(sizes.get(..made)?.iter().sum());
    (made > 0).then_some(length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::checksum_is_right;

    /// The kernel hands over several packets of one flow as one.
    #[test]
    fn a_flow_of_udp_is_split_into_its_packets() {
        let data: Vec<u8> = (0..250).collect();
        let mut packet = vec![0x45, 0, 1, 22, 0, 1, 0x40, 0, 64, 17, 0, 0, 10, 5, 1, 2, 10, 5, 2, 3];
        packet.extend([0x10, 0, 0x20, 0, 1, 2, 0, 0]);
        packet.extend(&data);
        let virtio = VirtioNetHdr {
            flags: NEEDS_CHECKSUM,
            gso_type: VIRTIO_NET_HDR_GSO_UDP_L4,
            gso_size: 100,
            csum_start: 20,
            csum_offset: 6,
            ..VirtioNetHdr::default()
        };
        let mut segments = Vec::new();
        assert_eq!(split(&mut packet.clone(), virtio, &mut segments), Some(128));
        assert_eq!(segments.chunks(128).map(<[u8]>::len).collect::<Vec<_>>(), [128, 128, 78]);
        let mut received = Vec::new();
        for segment in segments.chunks(128) {
            let header = Header::parse(segment).unwrap();
            assert!(checksum_is_right(segment, &header) && header.total_length == segment.len());
            let length = (segment.len() as u16 - 20).to_be_bytes();
            let pseudo_header = [&segment[12..20], &[0, 17], &length].concat();
            assert_eq!(segment[24..26], length);
            assert_eq!(checksum(&[&pseudo_header[..], &segment[20..]].concat()), 0);
            received.extend_from_slice(&segment[28..]);
        }
        assert_eq!(received, data);
        assert_eq!(split(&mut packet[..27], virtio, &mut segments), None, "it ends before its UDP header does");
    }

    /// The kernel cuts what one call sends into packets of equal length. Only the last one may be shorter.
    #[test]
    fn packets_are_sent_together_only_where_the_kernel_cuts_them_apart_again() {
        let [peer, other, moved]: [SocketAddrV4; 3] =
            ["192.168.0.2:8285", "192.168.0.3:8285", "192.168.0.2:8286"].map(|text| text.parse().unwrap());
        let batch = |bytes: usize| Batch { peer: Some(peer), segment: 100, bytes: vec![0; bytes] };
        assert!(batch(100).takes(peer, 100) && batch(300).takes(peer, 40));
        assert!(!batch(100).takes(peer, 101), "a longer one would be cut");
        assert!(!batch(140).takes(peer, 100), "after a shorter one the cuts would be wrong");
        assert!(!batch(100).takes(other, 100) && !batch(100).takes(moved, 100) && !Batch::default().takes(peer, 100));
        let full = MAX_PAYLOAD / 100 * 100;
        assert!(batch(full - 100).takes(peer, 100) && !batch(full).takes(peer, 100));
    }

    #[test]
    fn a_checksum_of_zero_is_written_as_ones() {
        let virtio = VirtioNetHdr { flags: NEEDS_CHECKSUM, csum_start: 20, csum_offset: 6, ..VirtioNetHdr::default() };
        // The words of the payload and the pseudo header sum up to 0xffff, whose complement is zero.
        let mut packet = vec![0; 28];
        packet[20..22].copy_from_slice(&[0xff, 0xff]);
        assert!(complete_checksum(&virtio, &mut packet));
        assert_eq!(packet[26..28], [0xff, 0xff], "zero would mean that there is no checksum");
        let outside = VirtioNetHdr { csum_offset: 7, ..virtio };
        assert!(!complete_checksum(&outside, &mut packet));
    }
}
