// SPDX-License-Identifier: Apache-2.0
//! What the tunnel counts. Every counter is an atomic number that only grows.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! reasons {
    ($($(#[doc = $doc:literal])* $name:ident = $label:literal,)*) => {
        /// Why a packet was dropped.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Reason { $($(#[doc = $doc])* $name,)* }

        impl Reason {
            /// Every reason.
            pub const ALL: &[Reason] = &[$(Reason::$name,)*];

            /// Returns the name for a metric's label.
            pub fn label(self) -> &'static str {
                match self { $(Reason::$name => $label,)* }
            }
        }
    };
}

reasons! {
    /// The packet is not IPv4.
    NotIpv4 = "not_ipv4",
    /// The IPv4 header contradicts itself, the packet's length or its checksum.
    Malformed = "malformed",
    /// The TTL was used up.
    TtlExpired = "ttl_expired",
    /// Sending: no peer has the destination.
    NoRoute = "no_route",
    /// Sending: the datagram is larger than the uplink's MTU (EMSGSIZE).
    TooBig = "too_big",
    /// Sending: the kernel refused the datagram for another reason.
    SendFailed = "send_failed",
    /// Receiving: no peer sends from the address from which the datagram came.
    Stranger = "stranger",
    /// Receiving: the source of the inner packet is outside the subnet of the peer.
    ForeignSource = "foreign_source",
    /// Receiving: the destination of the inner packet is outside the own subnet.
    ForeignDestination = "foreign_destination",
    /// Receiving: the inner packet is larger than the MTU of the device.
    TooLong = "too_long",
    /// Receiving: the kernel refused the packet, for example because the device is down.
    DeviceRefused = "device_refused",
}

/// The counters of one direction.
#[derive(Debug, Default)]
pub struct Direction {
    packets: AtomicU64,
    bytes: AtomicU64,
    drops: [AtomicU64; Reason::ALL.len()],
}

impl Direction {
    /// Returns the number of inner packets that were sent, or that were received and believed.
    pub fn packets(&self) -> u64 {
        self.packets.load(Ordering::Relaxed)
    }

    /// Returns the number of bytes of these packets, with their IP headers.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of packets that were dropped for one reason.
    pub fn dropped(&self, reason: Reason) -> u64 {
        self.drops[reason as usize].load(Ordering::Relaxed)
    }

    /// Counts packets that were carried, and their bytes.
    pub fn forward(&self, packets: usize, bytes: usize) {
        self.packets.fetch_add(packets as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts packets that were dropped for this reason.
    pub fn drop_packets(&self, reason: Reason, packets: usize) {
        self.drops[reason as usize].fetch_add(packets as u64, Ordering::Relaxed);
    }
}

/// The counters of a tunnel.
#[derive(Debug, Default)]
pub struct Counters {
    /// Packets from the TUN device to peers.
    pub sent: Direction,
    /// Packets from peers to the TUN device.
    pub received: Direction,
}
