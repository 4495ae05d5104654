// SPDX-License-Identifier: Apache-2.0
//! Requests to a WireGuard device as messages.

use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use nix::libc::{AF_INET, AF_INET6};
use weft_netlink::generic;
use weft_netlink::socket::NLM_F_ACK;
use weft_netlink::wire::Writer;

use super::{DeviceChange, NOBODY, PeerChange, PublicKey, Secret};

const NLM_F_REQUEST: u16 = 1;
pub(super) const VERSION: u8 = 1;
pub(super) const GET_DEVICE: u8 = 0;
pub(super) const SET_DEVICE: u8 = 1;

pub(super) const WGDEVICE_A_IFNAME: u16 = 2;
pub(super) const WGDEVICE_A_PRIVATE_KEY: u16 = 3;
pub(super) const WGDEVICE_A_PUBLIC_KEY: u16 = 4;
pub(super) const WGDEVICE_A_LISTEN_PORT: u16 = 6;
pub(super) const WGDEVICE_A_PEERS: u16 = 8;

pub(super) const WGPEER_A_PUBLIC_KEY: u16 = 1;
pub(super) const WGPEER_A_PRESHARED_KEY: u16 = 2;
pub(super) const WGPEER_A_FLAGS: u16 = 3;
pub(super) const WGPEER_A_ENDPOINT: u16 = 4;
pub(super) const WGPEER_A_KEEPALIVE: u16 = 5;
pub(super) const WGPEER_A_LAST_HANDSHAKE: u16 = 6;
pub(super) const WGPEER_A_RX_BYTES: u16 = 7;
pub(super) const WGPEER_A_TX_BYTES: u16 = 8;
pub(super) const WGPEER_A_ALLOWEDIPS: u16 = 9;
const WGPEER_F_REMOVE_ME: u32 = 1;
const WGPEER_F_UPDATE_ONLY: u32 = 4;

pub(super) const WGALLOWEDIP_A_FAMILY: u16 = 1;
pub(super) const WGALLOWEDIP_A_IPADDR: u16 = 2;
pub(super) const WGALLOWEDIP_A_CIDR_MASK: u16 = 3;
const WGALLOWEDIP_A_FLAGS: u16 = 4;
const WGALLOWEDIP_F_REMOVE_ME: u32 = 1;

/// Maximum length of the attribute PEERS in bytes: the length is a number of 16 bits, and everything is padded to four.
pub(super) const MAX_PEERS: usize = 65_532;
/// Maximum number of prefixes that one part of a peer carries. With IPv6 they take 40 bytes each.
const MAX_PREFIXES: usize = 1_000;
/// Maximum number of peers that one message removes.
pub(super) const MAX_REMOVALS: usize = 16;
/// Room for a message: a full attribute PEERS, and all that stands before it.
const MESSAGE: usize = MAX_PEERS + 256;

/// One message. Its memory is overwritten when it is dropped.
pub(super) struct Batch(Writer);

impl Batch {
    /// Builds a message for a device; `inner` writes its attributes.
    fn new(family: u16, device: &str, inner: impl FnOnce(&mut Writer)) -> Batch {
        let mut w = Writer::with_capacity(MESSAGE);
        w.begin(family, NLM_F_REQUEST | NLM_F_ACK, &generic::header(SET_DEVICE, VERSION));
        w.attr_str(WGDEVICE_A_IFNAME, device);
        inner(&mut w);
        Batch(w)
    }

    /// Sets the sequence number, and returns the message.
    pub(super) fn finish(&mut self, seq: u32) -> &[u8] {
        self.0.end(seq);
        self.0.bytes()
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.0.wipe();
    }
}

/// A part of a peer's change that fits into one message: the change, whether it is the first part, and its prefixes.
type Part<'a> = (&'a PeerChange<'a>, bool, &'a [IpNet]);

/// Writes a request for a dump of the device.
pub(super) fn get(w: &mut Writer, family: u16, flags: u16, device: &str) {
    w.begin(family, flags, &generic::header(GET_DEVICE, VERSION));
    w.attr_str(WGDEVICE_A_IFNAME, device);
}

/// Splits a change into as few messages as the limit of PEERS allows. The device's own values stand in the first one.
pub(super) fn batches<'a>(
    family: u16,
    device: &'a str,
    change: DeviceChange<'a>,
    peers: &'a [PeerChange<'a>],
) -> impl Iterator<Item = Batch> + 'a {
    let mut parts = peers.iter().flat_map(parts).peekable();
    let mut first = true;
    std::iter::from_fn(move || {
        if !first && parts.peek().is_none() {
            return None;
        }
        let own = if std::mem::take(&mut first) { change } else { DeviceChange::default() };
        Some(Batch::new(family, device, |w| {
            device_values(w, own);
            if parts.peek().is_none() {
                return;
            }
            w.nest(WGDEVICE_A_PEERS, |w| {
                let mut length = 4;
                while let Some(part) = parts.next_if(|part| length + part_length(part) <= MAX_PEERS) {
                    length += part_length(&part);
                    w.nest(0, |w| peer(w, part));
                }
            });
        }))
    })
}

/// Messages that remove peers, a few in each.
pub(super) fn removals<'a>(family: u16, device: &'a str, peers: &'a [PublicKey]) -> impl Iterator<Item = Batch> + 'a {
    peers.chunks(MAX_REMOVALS).map(move |some| {
        Batch::new(family, device, |w| {
            w.nest(WGDEVICE_A_PEERS, |w| some.iter().for_each(|key| removal(w, *key)));
        })
    })
}

/// A message that removes one prefix from a peer, for Linux 6.16 and later.
pub(super) fn remove_allowed(family: u16, device: &str, key: PublicKey, prefix: IpNet) -> Batch {
    Batch::new(family, device, |w| {
        w.nest(WGDEVICE_A_PEERS, |w| {
            w.nest(0, |w| {
                w.attr(WGPEER_A_PUBLIC_KEY, &key.0);
                w.attr_u32(WGPEER_A_FLAGS, WGPEER_F_UPDATE_ONLY);
                w.nest(WGPEER_A_ALLOWEDIPS, |w| {
                    w.nest(0, |w| {
                        allowed(w, prefix);
                        w.attr_u32(WGALLOWEDIP_A_FLAGS, WGALLOWEDIP_F_REMOVE_ME);
                    });
                });
            });
        });
    })
}

/// A message that removes one prefix from whoever has it, for every kernel: it moves to a new peer, which is removed.
pub(super) fn remove_allowed_by_moving(family: u16, device: &str, prefix: IpNet) -> Batch {
    Batch::new(family, device, |w| {
        w.nest(WGDEVICE_A_PEERS, |w| {
            w.nest(0, |w| {
                w.attr(WGPEER_A_PUBLIC_KEY, &NOBODY.0);
                w.nest(WGPEER_A_ALLOWEDIPS, |w| w.nest(0, |w| allowed(w, prefix)));
            });
            removal(w, NOBODY);
        });
    })
}

fn device_values(w: &mut Writer, change: DeviceChange<'_>) {
    if let Some(key) = change.private {
        w.attr(WGDEVICE_A_PRIVATE_KEY, key.expose());
    }
    if let Some(port) = change.port {
        w.attr(WGDEVICE_A_LISTEN_PORT, &port.to_ne_bytes());
    }
}

fn removal(w: &mut Writer, key: PublicKey) {
    w.nest(0, |w| {
        w.attr(WGPEER_A_PUBLIC_KEY, &key.0);
        w.attr_u32(WGPEER_A_FLAGS, WGPEER_F_REMOVE_ME);
    });
}

/// Splits a peer with very many prefixes; everybody else is one part.
fn parts<'a>(change: &'a PeerChange<'a>) -> impl Iterator<Item = Part<'a>> + 'a {
    let (head, mut rest) = change.allowed.split_at(change.allowed.len().min(MAX_PREFIXES));
    let more = std::iter::from_fn(move || {
        let (some, others) = rest.split_at(rest.len().min(MAX_PREFIXES));
        rest = others;
        (!some.is_empty()).then_some((change, false, some))
    });
    std::iter::once((change, true, head)).chain(more)
}

/// The length of a part in bytes, as [`peer`] writes it, with the header of its list entry.
fn part_length((change, first, prefixes): &Part<'_>) -> usize {
    let key = 4 + 36;
    let values = if *first {
        let endpoint = change.endpoint.map_or(0, |e| if e.is_ipv4() { 20 } else { 32 });
        change.preshared.map_or(0, |_| 36) + endpoint + change.keepalive.map_or(0, |_| 8)
    } else {
        0
    };
    let list: usize = prefixes.iter().map(|p| if p.addr().is_ipv4() { 28 } else { 40 }).sum();
    key + values + 8 + if prefixes.is_empty() { 0 } else { 4 + list }
}

fn peer(w: &mut Writer, (change, first, prefixes): Part<'_>) {
    w.attr(WGPEER_A_PUBLIC_KEY, &change.key.0);
    if first {
        if let Some(key) = change.preshared.map(Secret::expose) {
            w.attr(WGPEER_A_PRESHARED_KEY, key);
        }
        if let Some(endpoint) = change.endpoint {
            sockaddr(w, endpoint);
        }
        if let Some(seconds) = change.keepalive {
            w.attr(WGPEER_A_KEEPALIVE, &seconds.to_ne_bytes());
        }
    }
    if change.update_only {
        w.attr_u32(WGPEER_A_FLAGS, WGPEER_F_UPDATE_ONLY);
    }
    if !prefixes.is_empty() {
        w.nest(WGPEER_A_ALLOWEDIPS, |w| prefixes.iter().for_each(|prefix| w.nest(0, |w| allowed(w, *prefix))));
    }
}

fn allowed(w: &mut Writer, prefix: IpNet) {
    let family = if prefix.addr().is_ipv4() { AF_INET } else { AF_INET6 };
    // The value is 2 or 10.
    w.attr(WGALLOWEDIP_A_FAMILY, &u16::try_from(family).unwrap_or_default().to_ne_bytes());
    w.attr_ip(WGALLOWEDIP_A_IPADDR, prefix.network());
    w.attr(WGALLOWEDIP_A_CIDR_MASK, &[prefix.prefix_len()]);
}

/// Appends `sockaddr_in` or `sockaddr_in6`: the family in host byte order, the port in network byte order.
fn sockaddr(w: &mut Writer, endpoint: SocketAddr) {
    let mut bytes = [0; 28];
    let port = endpoint.port().to_be_bytes();
    bytes[2..4].copy_from_slice(&port);
    let family = if endpoint.is_ipv4() { AF_INET } else { AF_INET6 };
    bytes[..2].copy_from_slice(&u16::try_from(family).unwrap_or_default().to_ne_bytes());
    match endpoint {
        SocketAddr::V4(v4) => {
            bytes[4..8].copy_from_slice(&v4.ip().octets());
            w.attr(WGPEER_A_ENDPOINT, &bytes[..16]);
        }
        SocketAddr::V6(v6) => {
            bytes[4..8].copy_from_slice(&v6.flowinfo().to_be_bytes());
            bytes[8..24].copy_from_slice(&v6.ip().octets());
            bytes[24..].copy_from_slice(&v6.scope_id().to_ne_bytes());
            w.attr(WGPEER_A_ENDPOINT, &bytes);
        }
    }
}

/// The address of an endpoint, for the decoder.
pub(super) fn endpoint(bytes: &[u8]) -> Option<SocketAddr> {
    use weft_netlink::wire::{ip, u16_at, u32_at};
    let port = u16::from_be_bytes(bytes.get(2..4)?.try_into().ok()?);
    match (i32::from(u16_at(bytes, 0)), bytes.len()) {
        (AF_INET, 16) => ip(bytes.get(4..8)?).map(|ip| SocketAddr::new(ip, port)),
        (AF_INET6, 28) => match ip(bytes.get(8..24)?)? {
            IpAddr::V6(ip) => {
                let flow = u32::from_be(u32_at(bytes, 4));
                Some(std::net::SocketAddrV6::new(ip, port, flow, u32_at(bytes, 24)).into())
            }
            IpAddr::V4(_) => None,
        },
        _ => None,
    }
}
