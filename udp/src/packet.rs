// SPDX-License-Identifier: Apache-2.0
//! The IPv4 header of a packet that another host sent, and the two things that a router does to it.

use std::net::Ipv4Addr;

/// The number of bytes in an IPv4 header without options.
pub const MIN_HEADER: usize = 20;
/// The protocol number of ICMP.
pub const ICMP: u8 = 1;

const TTL: usize = 8;
const CHECKSUM: usize = 10;

/// The fields of an IPv4 header on which the tunnel decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Sender of the packet.
    pub source: Ipv4Addr,
    /// Receiver of the packet.
    pub destination: Ipv4Addr,
    /// Remaining hops.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Length of the header in bytes: 20 to 60. It is at most the length of the buffer.
    pub header_length: usize,
    /// Length of header and payload in bytes. It is at least `header_length`, and at most the length of the buffer.
    pub total_length: usize,
    /// The place of the payload in the original packet, in units of 8 bytes. It is 0 for a packet that is not fragmented, and for a first
    /// fragment.
    pub fragment_offset: u16,
}

/// Why bytes are not an IPv4 packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes end before the header does.
    #[error("the packet has {0} bytes, which is shorter than its IPv4 header")]
    TooShort(usize),
    /// The first four bits are not 4.
    #[error("the packet has IP version {0}, and not 4")]
    NotIpv4(u8),
    /// The header length field is smaller than 20 bytes.
    #[error("the IPv4 header says that it has {0} bytes, and needs at least 20")]
    HeaderLength(usize),
    /// The total length field is smaller than the header, or larger than the buffer.
    #[error("the IPv4 header says that the packet has {0} bytes")]
    TotalLength(usize),
}

impl Header {
    /// Reads the header at the start of untrusted bytes. The checksum is not verified: see [`checksum_is_right`].
    ///
    /// # Errors
    /// The bytes do not start with a whole IPv4 header, or are fewer than the header says.
    pub fn parse(bytes: &[u8]) -> Result<Header, Malformed> {
        let Some(fixed) = bytes.first_chunk::<MIN_HEADER>() else {
            return Err(match bytes.first() {
                Some(first) if first >> 4 != 4 => Malformed::NotIpv4(first >> 4),
                _ => Malformed::TooShort(bytes.len()),
            });
        };
        if fixed[0] >> 4 != 4 {
            return Err(Malformed::NotIpv4(fixed[0] >> 4));
        }
        let header_length = usize::from(fixed[0] & 0x0f) * 4;
        if header_length < MIN_HEADER {
            return Err(Malformed::HeaderLength(header_length));
        }
        if header_length > bytes.len() {
            return Err(Malformed::TooShort(bytes.len()));
        }
        let total_length = usize::from(u16::from_be_bytes([fixed[2], fixed[3]]));
        if total_length < header_length || total_length > bytes.len() {
            return Err(Malformed::TotalLength(total_length));
        }
        Ok(Header {
            source: Ipv4Addr::new(fixed[12], fixed[13], fixed[14], fixed[15]),
            destination: Ipv4Addr::new(fixed[16], fixed[17], fixed[18], fixed[19]),
            ttl: fixed[TTL],
            protocol: fixed[9],
            header_length,
            total_length,
            fragment_offset: u16::from_be_bytes([fixed[6], fixed[7]]) & 0x1fff,
        })
    }
}

/// Returns the Internet checksum of bytes (RFC 1071). An odd number of bytes counts as if a zero followed.
pub fn checksum(bytes: &[u8]) -> u16 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let sum = pairs.iter().map(|pair| u64::from(u16::from_be_bytes(*pair))).sum::<u64>();
    !fold(sum + rest.first().map_or(0, |last| u64::from(*last) << 8))
}

/// Returns true if the checksum of a parsed packet's header is right.
pub fn checksum_is_right(packet: &[u8], header: &Header) -> bool {
    packet.get(..header.header_length).is_some_and(|bytes| checksum(bytes) == 0)
}

/// Takes one from the TTL of a packet and corrects the header checksum (RFC 1624, equation 3). Bytes that are shorter
/// than a header, and a TTL of 0, stay as they are.
pub fn decrement_ttl(packet: &mut [u8]) {
    let Some(header) = packet.first_chunk_mut::<MIN_HEADER>() else { return };
    if header[TTL] == 0 {
        return;
    }
    let before = u16::from_be_bytes([header[TTL], header[TTL + 1]]);
    header[TTL] -= 1;
    let after = u16::from_be_bytes([header[TTL], header[TTL + 1]]);
    let old = u16::from_be_bytes([header[CHECKSUM], header[CHECKSUM + 1]]);
    let new = !fold(u64::from(!old) + u64::from(!before) + u64::from(after));
    header[CHECKSUM..CHECKSUM + 2].copy_from_slice(&new.to_be_bytes());
}

/// Adds the carries of a sum of 16-bit words back to it.
fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_parsed_header_lies_inside_the_bytes(mut bytes in prop::collection::vec(any::<u8>(), 0..200), ihl in 0u8..16) {
            if let Some(first) = bytes.first_mut() {
                *first = 0x40 | ihl;
            }
            if let Ok(header) = Header::parse(&bytes) {
                prop_assert!(header.header_length >= MIN_HEADER && header.header_length <= header.total_length);
                prop_assert!(header.total_length <= bytes.len());
            }
        }

        #[test]
        fn a_smaller_ttl_leaves_a_right_checksum(mut bytes in prop::array::uniform20(any::<u8>()), ttl in 1u8..) {
            bytes[0] = 0x45;
            bytes[2..4].copy_from_slice(&20u16.to_be_bytes());
            bytes[TTL] = ttl;
            bytes[10..12].fill(0);
            let sum = checksum(&bytes);
            bytes[10..12].copy_from_slice(&sum.to_be_bytes());
            decrement_ttl(&mut bytes);
            let header = Header::parse(&bytes).unwrap();
            prop_assert_eq!(header.ttl, ttl - 1);
            prop_assert!(checksum_is_right(&bytes, &header));
        }
    }

    #[test]
    fn every_malformed_header_is_named() {
        let packet = |first: u8, length: u16, bytes: usize| {
            let mut packet = vec![0; bytes];
            packet[0] = first;
            packet[2..4].copy_from_slice(&length.to_be_bytes());
            Header::parse(&packet)
        };
        assert_eq!(packet(0x45, 19, 19), Err(Malformed::TooShort(19)));
        assert_eq!(packet(0x60, 40, 40), Err(Malformed::NotIpv4(6)));
        assert_eq!(packet(0x44, 40, 40), Err(Malformed::HeaderLength(16)));
        assert_eq!(packet(0x4f, 40, 40), Err(Malformed::TooShort(40)));
        assert_eq!(packet(0x45, 19, 40), Err(Malformed::TotalLength(19)));
        assert_eq!(packet(0x45, 41, 40), Err(Malformed::TotalLength(41)));
        assert!(packet(0x45, 20, 20).is_ok());
        assert!(packet(0x4f, 60, 60).is_ok());
    }

    /// The example of RFC 1071, and the same bytes without the last one.
    #[test]
    fn an_odd_number_of_bytes_counts_as_if_a_zero_followed() {
        let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
        assert_eq!(checksum(&bytes), !0xddf2);
        assert_eq!(checksum(&bytes[..7]), !0xdcfb);
        assert_eq!(checksum(&[]), 0xffff);
    }

    #[test]
    fn a_ttl_of_zero_does_not_wrap() {
        let mut packet = [0x45; 20];
        packet[TTL] = 0;
        let before = packet;
        decrement_ttl(&mut packet);
        assert_eq!(packet, before);
    }
}
