// SPDX-License-Identifier: Apache-2.0
//! The ICMP messages with which the tunnel answers a packet that it cannot forward.

use std::net::Ipv4Addr;

use super::packet::{Header, ICMP, MIN_HEADER, checksum};

/// The TTL of an answer, as flannel's udp backend has it.
const TTL: u8 = 8;
/// The number of payload bytes that an answer repeats after the header (RFC 792).
const REPEATED: usize = 8;
/// The number of bytes in the header of a message, which includes the identifier and the sequence number of an echo request.
pub const HEADER: usize = 8;

/// Why a packet was not forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// No peer has the destination: type 3, code 0.
    NetworkUnreachable,
    /// The TTL is used up: type 11, code 0.
    TimeExceeded,
}

impl Answer {
    fn kind(self) -> u8 {
        match self {
            Answer::NetworkUnreachable => 3,
            Answer::TimeExceeded => 11,
        }
    }

    /// Builds the answer to a parsed packet, from the address `from` to the packet's sender. Its bytes are those of
    /// flannel's udp backend. There is none for an ICMP error, for a later fragment, and for a packet whose sender is no
    /// single host (RFC 1812, section 4.3.2.7).
    pub fn to(self, packet: &[u8], header: &Header, from: Ipv4Addr) -> Option<Vec<u8>> {
        if !may_be_answered(packet, header) {
            return None;
        }
        let repeated = packet.get(..header.total_length.min(header.header_length + REPEATED))?;
        let length = u16::try_from(MIN_HEADER + HEADER + repeated.len()).ok()?;
        let mut answer = Vec::with_capacity(usize::from(length));
        answer.extend([0x45, 0]);
        answer.extend(length.to_be_bytes());
        // Identification, flags and offset are 0. The checksum follows when all is written.
        answer.extend([0, 0, 0, 0, TTL, ICMP, 0, 0]);
        answer.extend(from.octets());
        answer.extend(header.source.octets());
        answer.extend([self.kind(), 0, 0, 0, 0, 0, 0, 0]);
        answer.extend(repeated);
        put_checksum(&mut answer[..MIN_HEADER], 10);
        put_checksum(&mut answer[MIN_HEADER..], 2);
        Some(answer)
    }
}

/// Writes the checksum of bytes into them, where zeros are.
pub(super) fn put_checksum(bytes: &mut [u8], at: usize) {
    let sum = checksum(bytes);
    bytes[at..at + 2].copy_from_slice(&sum.to_be_bytes());
}

fn may_be_answered(packet: &[u8], header: &Header) -> bool {
    let source = header.source;
    let no_host = source.is_unspecified() || source.is_multicast() || source.is_broadcast() || source.is_loopback();
    let many = header.destination.is_multicast() || header.destination.is_broadcast();
    let error = header.protocol == ICMP && is_error(packet, header);
    header.fragment_offset == 0 && !(no_host || many || error)
}

/// Returns true if an ICMP message reports an error. One that has no type counts as an error.
fn is_error(packet: &[u8], header: &Header) -> bool {
    let kind = packet.get(header.header_length..header.total_length).and_then(|payload| payload.first());
    // Destination unreachable, source quench, redirect, time exceeded, parameter problem.
    !matches!(kind, Some(kind) if ![3, 4, 5, 11, 12].contains(kind))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::checksum_is_right;

    fn packet(protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut packet = vec![0x45, 0, 0, 0, 0x12, 0x34, 0x40, 0, 64, protocol, 0, 0, 10, 5, 1, 2, 10, 5, 9, 9];
        packet.extend(payload);
        let length = (packet.len() as u16).to_be_bytes();
        packet[2..4].copy_from_slice(&length);
        let sum = checksum(&packet[..20]);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet
    }

    fn answer(packet: &[u8]) -> Option<Vec<u8>> {
        Answer::NetworkUnreachable.to(packet, &Header::parse(packet).unwrap(), Ipv4Addr::new(10, 5, 1, 0))
    }

    #[test]
    fn the_answer_has_the_bytes_of_flannels() {
        let packet = packet(17, b"\x10\x00\x20\x00\x00\x0c\x00\x00data");
        let mut expected = vec![0x45, 0, 0, 56, 0, 0, 0, 0, 8, 1, 0x9c, 0xc0, 10, 5, 1, 0, 10, 5, 1, 2];
        expected.extend([3, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend(&packet[..28]);
        let sum = checksum(&expected[20..]);
        expected[22..24].copy_from_slice(&sum.to_be_bytes());
        let answer = answer(&packet).unwrap();
        assert!(checksum_is_right(&answer, &Header::parse(&answer).unwrap()));
        assert_eq!(checksum(&answer[20..]), 0);
        expected[10..12].copy_from_slice(&answer[10..12]);
        assert_eq!(answer, expected);
    }

    #[test]
    fn errors_and_fragments_and_strange_senders_get_no_answer() {
        assert!(answer(&packet(ICMP, &[8, 0, 0, 0, 0, 0, 0, 0])).is_some());
        for kind in [3, 4, 5, 11, 12] {
            assert_eq!(answer(&packet(ICMP, &[kind, 0, 0, 0, 0, 0, 0, 0])), None);
        }
        assert_eq!(answer(&packet(ICMP, &[])), None);
        let changed = |at: usize, bytes: &[u8]| {
            let mut packet = packet(17, &[0; 8]);
            packet[at..at + bytes.len()].copy_from_slice(bytes);
            answer(&packet)
        };
        assert_eq!(changed(6, &[0x20, 1]), None);
        assert!(changed(6, &[0x20, 0]).is_some());
        for source in [[0, 0, 0, 0], [224, 0, 0, 1], [255, 255, 255, 255], [127, 0, 0, 1]] {
            assert_eq!(changed(12, &source), None);
        }
        for destination in [[224, 0, 0, 1], [255, 255, 255, 255]] {
            assert_eq!(changed(16, &destination), None);
        }
    }

    #[test]
    fn a_short_payload_and_a_long_header_are_repeated_whole() {
        assert_eq!(answer(&packet(17, &[1, 2])).unwrap().len(), 20 + 8 + 22);
        let mut long = packet(17, &[0; 48]);
        long[0] = 0x4f;
        assert_eq!(answer(&long).unwrap().len(), 20 + 8 + 68);
        let answer = Answer::TimeExceeded.to(&long, &Header::parse(&long).unwrap(), Ipv4Addr::LOCALHOST).unwrap();
        assert_eq!(answer[20], 11);
    }
}
