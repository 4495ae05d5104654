// SPDX-License-Identifier: Apache-2.0
//! ICMP echo requests of both families, their answers, and the sockets for them. The tunnel sends none: the probes of the agent and `weft doctor` do.
//! The code that both use is here, because this crate computes the checksum. Which requests they send, and which answers they believe, differs.

use std::net::IpAddr;
use std::os::fd::OwnedFd;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};

pub use super::icmp::HEADER;
use super::icmp::put_checksum;

/// Returns the type of an echo request.
pub fn request_type(is_ipv4: bool) -> u8 {
    if is_ipv4 { 8 } else { 128 }
}

/// Returns the type of an answer to an echo request.
pub fn answer_type(is_ipv4: bool) -> u8 {
    if is_ipv4 { 0 } else { 129 }
}

/// Returns an echo request. `content` is what follows the checksum: the identifier and the sequence number of two bytes each, and the data. For
/// IPv6, and for any socket that is not raw, the kernel computes the checksum.
pub fn request(is_ipv4: bool, content: &[u8]) -> Vec<u8> {
    let mut message = [&[request_type(is_ipv4), 0, 0, 0], content].concat();
    if is_ipv4 {
        put_checksum(&mut message, 2);
    }
    message
}

/// Opens a socket for ICMP packets of the family of this address.
///
/// # Errors
/// The process may not have such a socket, or has too many.
pub fn open(like: IpAddr, kind: SockType, flags: SockFlag) -> nix::Result<OwnedFd> {
    let (family, protocol) = match like {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6),
    };
    socket(family, kind, flags, protocol)
}

/// Returns the ICMP message in what a raw socket hands out. For IPv4, the header of the packet precedes it.
pub fn message(packet: &[u8], is_ipv4: bool) -> Option<&[u8]> {
    let header = if is_ipv4 { usize::from(packet.first()? & 15) * 4 } else { 0 };
    packet.get(header..)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::checksum;

    #[test]
    fn a_request_has_a_checksum_only_where_the_kernel_computes_none() {
        let content = [0, 7, 0, 1, 0xff, 0xfe];
        let four = request(true, &content);
        assert_eq!((four[0], &four[4..], checksum(&four)), (8, &content[..], 0));
        assert_eq!(request(false, &content), [&[128, 0, 0, 0], &content[..]].concat());
    }

    #[test]
    fn the_header_of_ipv4_is_left_out_with_its_options() {
        let packet = |first: u8, len: usize| [&[first][..], &vec![0; len - 1], &[8, 0]].concat();
        assert_eq!(message(&packet(0x45, 20), true), Some(&[8, 0][..]));
        assert_eq!(message(&packet(0x4f, 60), true), Some(&[8, 0][..]));
        assert_eq!(message(&packet(0x4f, 20), true), None, "it is shorter than its header says");
        assert_eq!(message(&[], true), None);
        assert_eq!(message(&[129, 0], false), Some(&[129, 0][..]));
    }
}
