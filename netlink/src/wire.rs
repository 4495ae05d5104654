// SPDX-License-Identifier: Apache-2.0
//! Netlink messages and attributes at the byte level. They are written into one buffer, and read without copying. This
//! module knows nothing about particular message types.
//!
//! Numbers are in host byte order, unless a field is said to be big-endian. Everything is padded to four bytes (RFC
//! 3549, linux/netlink.h).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use zeroize::Zeroize;

/// Length of `struct nlmsghdr` in bytes.
pub const HEADER: usize = 16;

const NLA_F_NESTED: u16 = 0x8000;
const NLA_TYPE_MASK: u16 = 0x3fff;

/// A buffer in which one or more messages are built.
#[derive(Debug, Default)]
pub struct Writer {
    bytes: Vec<u8>,
    start: usize,
}

impl Writer {
    /// Returns an empty buffer with room for this many bytes. Up to this size the buffer does not move, so a secret in
    /// it has no second copy in memory.
    pub fn with_capacity(bytes: usize) -> Writer {
        Writer { bytes: Vec::with_capacity(bytes), start: 0 }
    }

    /// Begins a message with the fixed header that follows `nlmsghdr` (`ifinfomsg`, `rtmsg`, ...).
    pub fn begin(&mut self, kind: u16, flags: u16, fixed: &[u8]) {
        self.start = self.bytes.len();
        self.bytes.extend_from_slice(&0u32.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        self.bytes.extend_from_slice(&[0; 8]);
        self.bytes.extend_from_slice(fixed);
        self.pad();
    }

    /// Ends the current message and sets its sequence number.
    pub fn end(&mut self, seq: u32) {
        let len = u32::try_from(self.bytes.len() - self.start).unwrap_or(u32::MAX);
        self.bytes[self.start..self.start + 4].copy_from_slice(&len.to_ne_bytes());
        self.bytes[self.start + 8..self.start + 12].copy_from_slice(&seq.to_ne_bytes());
    }

    /// Adds flags to the message that was begun last. In a batch, only the last message asks for an acknowledgement.
    pub fn flag_last(&mut self, flags: u16) {
        if self.bytes.len() >= self.start + HEADER {
            let at = self.start + 6;
            let all = u16_at(&self.bytes, at) | flags;
            self.bytes[at..at + 2].copy_from_slice(&all.to_ne_bytes());
        }
    }

    /// Appends an attribute.
    pub fn attr(&mut self, kind: u16, value: &[u8]) {
        let len = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.bytes.extend_from_slice(&len.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
    }

    /// Appends a number in host byte order.
    pub fn attr_u32(&mut self, kind: u16, value: u32) {
        self.attr(kind, &value.to_ne_bytes());
    }

    /// Appends an address of four or sixteen bytes.
    pub fn attr_ip(&mut self, kind: u16, ip: IpAddr) {
        match ip {
            IpAddr::V4(v4) => self.attr(kind, &v4.octets()),
            IpAddr::V6(v6) => self.attr(kind, &v6.octets()),
        }
    }

    /// Appends a string with a terminating zero.
    pub fn attr_str(&mut self, kind: u16, text: &str) {
        let mut value = text.as_bytes().to_vec();
        value.push(0);
        self.attr(kind, &value);
    }

    /// Appends an attribute that contains other attributes, which `inner` writes.
    pub fn nest(&mut self, kind: u16, inner: impl FnOnce(&mut Writer)) {
        let at = self.bytes.len();
        self.attr(kind | NLA_F_NESTED, &[]);
        inner(self);
        let len = u16::try_from(self.bytes.len() - at).unwrap_or(u16::MAX);
        self.bytes[at..at + 2].copy_from_slice(&len.to_ne_bytes());
    }

    /// Appends a fixed header inside an attribute, such as the `ifinfomsg` of a veth's other end.
    pub fn fixed(&mut self, header: &[u8]) {
        self.bytes.extend_from_slice(header);
        self.pad();
    }

    /// Returns the messages.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Removes all messages, but keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.start = 0;
    }

    /// Removes all messages, and overwrites the memory with zeros.
    pub fn wipe(&mut self) {
        self.bytes.zeroize();
        self.start = 0;
    }

    fn pad(&mut self) {
        self.bytes.resize(align(self.bytes.len()), 0);
    }
}

/// A received message.
#[derive(Debug, Clone, Copy)]
pub struct Message<'a> {
    /// `nlmsg_type`.
    pub kind: u16,
    /// `nlmsg_flags`.
    pub flags: u16,
    /// `nlmsg_seq`.
    pub seq: u32,
    /// The bytes that follow `nlmsghdr`.
    pub payload: &'a [u8],
}

/// Iterates over the messages of one or more datagrams. It ends at the first message with an invalid length.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let len = usize::try_from(u32_at(bytes, 0)).ok()?;
        if len < HEADER || len > bytes.len() {
            return None;
        }
        let message = Message {
            kind: u16_at(bytes, 4),
            flags: u16_at(bytes, 6),
            seq: u32_at(bytes, 8),
            payload: &bytes[HEADER..len],
        };
        bytes = bytes.get(align(len)..).unwrap_or_default();
        Some(message)
    })
}

/// Iterates over attributes. Each item is the type without its flag bits, and the value.
pub fn attrs(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(bytes, 0));
        if len < 4 || len > bytes.len() {
            return None;
        }
        let attr = (u16_at(bytes, 2) & NLA_TYPE_MASK, &bytes[4..len]);
        bytes = bytes.get(align(len)..).unwrap_or_default();
        Some(attr)
    })
}

/// Iterates over the attributes after a fixed header of `fixed` bytes.
pub fn attrs_after(payload: &[u8], fixed: usize) -> impl Iterator<Item = (u16, &[u8])> {
    attrs(payload.get(align(fixed)..).unwrap_or_default())
}

/// Returns the value of the first attribute of this type.
pub fn attr(bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    attrs(bytes).find(|(kind, _)| *kind == wanted).map(|(_, value)| value)
}

/// Returns the value of the first attribute of this type after a fixed header of `fixed` bytes.
pub fn attr_after(payload: &[u8], fixed: usize, wanted: u16) -> Option<&[u8]> {
    attr(payload.get(align(fixed)..).unwrap_or_default(), wanted)
}

/// Returns the byte at an offset, or 0 past the end.
pub fn u8_at(bytes: &[u8], at: usize) -> u8 {
    bytes.get(at).copied().unwrap_or(0)
}

/// Returns the number at an offset in host byte order, or 0 past the end.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..at + 2).and_then(|b| b.try_into().ok()).map_or(0, u16::from_ne_bytes)
}

/// Returns the number at an offset in host byte order, or 0 past the end.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

/// Returns the number at an offset in host byte order, or 0 past the end.
pub fn i32_at(bytes: &[u8], at: usize) -> i32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, i32::from_ne_bytes)
}

/// Parses an address of four or sixteen bytes.
pub fn ip(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(IpAddr::V4(Ipv4Addr::from(v4)));
    }
    <[u8; 16]>::try_from(bytes).ok().map(|v6| IpAddr::V6(Ipv6Addr::from(v6)))
}

/// Returns the four or sixteen bytes of an address.
pub fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// Parses a string up to its terminating zero. Text that is not UTF-8 yields an empty string.
pub fn text(bytes: &[u8]) -> &str {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    std::str::from_utf8(&bytes[..end]).unwrap_or_default()
}

fn align(len: usize) -> usize {
    (len + 3) & !3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_messages_are_read_back() {
        let mut w = Writer::default();
        w.begin(24, 5, &[2, 24, 0]);
        w.attr_str(3, "eth0");
        w.nest(18, |w| w.attr(1, b"vxlan"));
        w.end(7);
        w.begin(25, 1, &[9; 4]);
        w.flag_last(4);
        w.end(8);
        let all: Vec<Message<'_>> = messages(w.bytes()).collect();
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].kind, all[0].flags, all[0].seq), (24, 5, 7));
        assert_eq!((all[1].kind, all[1].flags, all[1].seq), (25, 5, 8));
        let got: Vec<(u16, &[u8])> = attrs_after(all[0].payload, 3).collect();
        assert_eq!(text(got[0].1), "eth0");
        assert_eq!(got[1].0, 18, "without the flag that says that it contains others");
        assert_eq!(attrs(got[1].1).next(), Some((1, &b"vxlan"[..])));
    }

    #[test]
    fn an_invalid_length_ends_the_iteration() {
        for bytes in [&[][..], &[1, 0, 0, 0][..], &[255; 20][..], &[0; 64][..]] {
            assert_eq!(messages(bytes).count(), 0);
            assert_eq!(attrs(bytes).count(), 0);
        }
    }
}
