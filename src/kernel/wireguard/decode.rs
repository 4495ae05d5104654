// SPDX-License-Identifier: Apache-2.0
//! The dump of a WireGuard device as values.

use std::time::Duration;

use ipnet::IpNet;
use weft_netlink::generic;
use weft_netlink::wire::{attrs, attrs_after, ip, messages, u8_at, u16_at};

use super::encode::{
    GET_DEVICE, WGALLOWEDIP_A_CIDR_MASK, WGALLOWEDIP_A_IPADDR, WGDEVICE_A_LISTEN_PORT, WGDEVICE_A_PEERS,
    WGDEVICE_A_PRIVATE_KEY, WGDEVICE_A_PUBLIC_KEY, WGPEER_A_ALLOWEDIPS, WGPEER_A_ENDPOINT, WGPEER_A_KEEPALIVE,
    WGPEER_A_LAST_HANDSHAKE, WGPEER_A_PRESHARED_KEY, WGPEER_A_PUBLIC_KEY, WGPEER_A_RX_BYTES, WGPEER_A_TX_BYTES,
    endpoint,
};
use super::{Device, KEY, PublicKey, Secret};

/// Adds what one datagram of a dump says. Only the first message has the device's own values. A peer may be split over
/// two messages; its later parts have only the key and more prefixes.
pub(super) fn datagram(device: &mut Device, family: u16, datagram: &[u8]) {
    for message in messages(datagram).filter(|m| m.kind == family && u8_at(m.payload, 0) == GET_DEVICE) {
        for (kind, value) in attrs_after(message.payload, generic::HEADER) {
            match kind {
                WGDEVICE_A_PRIVATE_KEY => device.private = secret(value),
                WGDEVICE_A_PUBLIC_KEY => device.public = public(value),
                WGDEVICE_A_LISTEN_PORT => device.port = u16_at(value, 0),
                WGDEVICE_A_PEERS => attrs(value).for_each(|(_, value)| peer(device, value)),
                _ => {}
            }
        }
    }
}

fn peer(device: &mut Device, bytes: &[u8]) {
    let Some(key) = attrs(bytes).find(|(kind, _)| *kind == WGPEER_A_PUBLIC_KEY).and_then(|(_, v)| public(v)) else {
        return;
    };
    let peer = device.peers.entry(key).or_default();
    for (kind, value) in attrs(bytes) {
        match kind {
            WGPEER_A_PRESHARED_KEY => peer.preshared = secret(value),
            WGPEER_A_ENDPOINT => peer.endpoint = endpoint(value),
            WGPEER_A_KEEPALIVE => peer.keepalive = u16_at(value, 0),
            WGPEER_A_LAST_HANDSHAKE => peer.handshake = time(value),
            WGPEER_A_RX_BYTES => peer.received = u64_at(value, 0),
            WGPEER_A_TX_BYTES => peer.sent = u64_at(value, 0),
            WGPEER_A_ALLOWEDIPS => peer.allowed.extend(attrs(value).filter_map(|(_, value)| prefix(value))),
            _ => {}
        }
    }
}

fn prefix(bytes: &[u8]) -> Option<IpNet> {
    let (mut address, mut length) = (None, None);
    for (kind, value) in attrs(bytes) {
        match kind {
            WGALLOWEDIP_A_IPADDR => address = ip(value),
            WGALLOWEDIP_A_CIDR_MASK => length = value.first().copied(),
            _ => {}
        }
    }
    IpNet::new(address?, length?).ok()
}

/// A secret; 32 zeros mean that there is none.
fn secret(bytes: &[u8]) -> Option<Secret> {
    let key = Secret::new(bytes.try_into().ok()?);
    (key.expose() != &[0; KEY]).then_some(key)
}

fn public(bytes: &[u8]) -> Option<PublicKey> {
    bytes.try_into().ok().map(PublicKey)
}

/// Parses `struct __kernel_timespec`; zero means never.
fn time(bytes: &[u8]) -> Option<Duration> {
    let (seconds, nanoseconds) = (u64_at(bytes, 0), u32::try_from(u64_at(bytes, 8)).ok()?);
    // A negative time is nonsense, and so is a nanosecond beyond its second.
    let plausible = i64::try_from(seconds).is_ok() && nanoseconds < 1_000_000_000;
    (plausible && (seconds, nanoseconds) != (0, 0)).then(|| Duration::new(seconds, nanoseconds))
}

/// Returns the number at an offset in host byte order, or 0 past the end.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes)
}
