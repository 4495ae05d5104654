// SPDX-License-Identifier: Apache-2.0
//! WireGuard devices over generic netlink (linux/wireguard.h): keys, peers and allowed IPs are written and read.
//!
//! The link itself is made by rtnetlink, as for every other kind. The kernel sends no notification about anything in
//! this file, so only a dump shows what somebody else has changed.
//!
//! A device's private key and the preshared keys come back in clear. Every buffer that held them is overwritten.

mod decode;
mod encode;
mod error;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use ipnet::IpNet;
use weft_netlink::generic;
use weft_netlink::socket::Netlink;
use weft_netlink::wire::Writer;

pub use error::WireGuardError;
pub use weft_backends::wireguard_key::{KEY, PublicKey, Secret};

/// The key of the peer through which an old kernel loses an allowed IP. No node can have it: no private key belongs to it.
const NOBODY: PublicKey = PublicKey([0; KEY]);

/// An endpoint with a handshake younger than this works. WireGuard refuses a session that is older (REJECT_AFTER_TIME).
const LIVE: Duration = Duration::from_secs(180);

/// What to write to the device itself. `None` leaves a value as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceChange<'a> {
    /// The private key. A different one ends all sessions.
    pub private: Option<&'a Secret>,
    /// The UDP port; 0 lets the kernel choose.
    pub port: Option<u16>,
}

/// What to write to one peer. The kernel adds a peer that it does not have. `None` leaves a value as it is.
#[derive(Debug, Clone)]
pub struct PeerChange<'a> {
    /// The peer.
    pub key: PublicKey,
    /// Where packets to it are sent.
    pub endpoint: Option<SocketAddr>,
    /// Seconds between two keepalive packets; 0 turns them off.
    pub keepalive: Option<u16>,
    /// The preshared key; 32 zeros mean that there is none.
    pub preshared: Option<&'a Secret>,
    /// Does not add a peer that the kernel does not have.
    pub update_only: bool,
    /// Prefixes that this peer gets. The peer that had one of them loses it in the same step.
    pub allowed: Vec<IpNet>,
}

impl PeerChange<'_> {
    /// A change that leaves everything about the peer as it is.
    pub fn of(key: PublicKey) -> Self {
        PeerChange { key, endpoint: None, keepalive: None, preshared: None, update_only: false, allowed: Vec::new() }
    }
}

/// A device as the kernel describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// The private key, if there is one.
    pub private: Option<Secret>,
    /// The public key that belongs to it.
    pub public: Option<PublicKey>,
    /// The UDP port.
    pub port: u16,
    /// The peers.
    pub peers: BTreeMap<PublicKey, Peer>,
}

impl Device {
    /// Adds what one datagram of a dump says. `family` is the number of the family `wireguard` in this dump.
    pub fn add(&mut self, family: u16, datagram: &[u8]) {
        decode::datagram(self, family, datagram);
    }
}

/// A peer as the kernel describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Peer {
    /// The preshared key, if there is one.
    pub preshared: Option<Secret>,
    /// Where it was heard last, or else what was written.
    pub endpoint: Option<SocketAddr>,
    /// Seconds between two keepalive packets; 0 is off.
    pub keepalive: u16,
    /// The time of the last handshake since 1970; `None` if there was none.
    pub handshake: Option<Duration>,
    /// Received bytes.
    pub received: u64,
    /// Sent bytes.
    pub sent: u64,
    /// Its prefixes, in the kernel's order.
    pub allowed: Vec<IpNet>,
}

impl Peer {
    /// Returns true if the last handshake is so recent that there is a session with the peer, and its endpoint works. `now` is the time since
    /// 1970.
    pub fn is_live(&self, now: Duration) -> bool {
        self.handshake.is_some_and(|at| now.abs_diff(at) < LIVE)
    }
}

/// A socket of the family `wireguard`, in the network namespace of the thread that opened it.
pub struct WireGuard {
    netlink: Netlink,
    /// The number of the family. It is another one after the module was removed and loaded again.
    family: u16,
    /// False once the kernel has refused to remove a single allowed IP (before Linux 6.16).
    removes_allowed: bool,
}

impl fmt::Debug for WireGuard {
    /// Leaves the socket out: its receive buffer may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WireGuard")
            .field("family", &self.family)
            .field("removes_allowed", &self.removes_allowed)
            .finish_non_exhaustive()
    }
}

impl WireGuard {
    /// Opens the socket. The kernel loads its module for this.
    ///
    /// # Errors
    /// [`WireGuardError::NoFamily`] if the kernel has no WireGuard, or an error of the socket.
    pub fn open() -> Result<WireGuard, WireGuardError> {
        let mut netlink = generic::open()?;
        let family = number(&mut netlink)?;
        Ok(WireGuard { netlink, family, removes_allowed: true })
    }

    /// Sends requests. If the kernel does not know the number of the family any more, it is asked for, and everything is sent once more:
    /// the kernel has carried nothing out then.
    fn with_number<T>(
        &mut self,
        send: impl Fn(&mut WireGuard) -> Result<T, WireGuardError>,
    ) -> Result<T, WireGuardError> {
        match send(self) {
            Err(error) if error.is_unknown_family() => {
                self.family = number(&mut self.netlink)?;
                send(self)
            }
            result => result,
        }
    }

    /// Writes the device and peers. Many peers take several messages. Writing what is there already disturbs nothing.
    ///
    /// # Errors
    /// The kernel refused a message. What came before in the same message, and in earlier ones, stays written.
    pub fn set(
        &mut self,
        device: &str,
        change: DeviceChange<'_>,
        peers: &[PeerChange<'_>],
    ) -> Result<(), WireGuardError> {
        self.with_number(|this| {
            encode::batches(this.family, device, change, peers).try_for_each(|batch| this.send(device, batch))
        })
    }

    /// Removes peers; a peer that is not there is no error. The kernel holds the lock of all network settings while it
    /// removes a peer, for milliseconds each, so a message removes only a few, and others may take the lock in between.
    ///
    /// # Errors
    /// As [`WireGuard::set`].
    pub fn remove_peers(&mut self, device: &str, peers: &[PublicKey]) -> Result<(), WireGuardError> {
        self.with_number(|this| {
            encode::removals(this.family, device, peers).try_for_each(|batch| this.send(device, batch))
        })
    }

    /// Removes one prefix from a peer, and leaves the others of the peer alone.
    ///
    /// Before Linux 6.16 the prefix is moved to a peer that nobody is, and this peer is removed, in one message. There
    /// the kernel does not check that `peer` still has the prefix: whoever has it, loses it.
    ///
    /// # Errors
    /// As [`WireGuard::set`].
    pub fn remove_allowed(&mut self, device: &str, peer: PublicKey, prefix: IpNet) -> Result<(), WireGuardError> {
        if self.removes_allowed {
            match self.with_number(|this| this.send(device, encode::remove_allowed(this.family, device, peer, prefix)))
            {
                // An old kernel refuses the unknown attribute, before it changes anything.
                Err(WireGuardError::Invalid { .. } | WireGuardError::NotWireGuard { .. }) => {}
                result => return result,
            }
        }
        self.with_number(|this| this.send(device, encode::remove_allowed_by_moving(this.family, device, prefix)))?;
        // A wrong device or prefix would have been refused here, too.
        self.removes_allowed = false;
        Ok(())
    }

    /// Reads the device and all its peers. A dump that was changed meanwhile is repeated.
    ///
    /// # Errors
    /// There is no such device, or the dump could not be read.
    pub fn get(&mut self, device: &str) -> Result<Device, WireGuardError> {
        self.with_number(|this| this.dump(device))
    }

    fn dump(&mut self, device: &str) -> Result<Device, WireGuardError> {
        let family = self.family;
        let build = |w: &mut Writer, kind: u16, flags: u16| encode::get(w, kind, flags, device);
        let result = self.netlink.dump_into(family, build, |found: &mut Device, datagram| found.add(family, datagram));
        self.netlink.wipe();
        result.map_err(|e| WireGuardError::of_io(device, e))
    }

    /// Sends one message, and overwrites it afterwards.
    fn send(&mut self, device: &str, mut message: encode::Batch) -> Result<(), WireGuardError> {
        let seq = self.netlink.next_seq();
        let replies = self.netlink.exchange(message.finish(seq), seq)?;
        // Replies to earlier messages may still be queued. Their errors do not concern this message.
        if let Some(refusal) = replies.refused.into_iter().find(|r| r.seq == seq) {
            return Err(WireGuardError::of(device, refusal.errno, refusal.text));
        }
        if !replies.complete {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "the kernel's acknowledgement was lost").into());
        }
        Ok(())
    }
}

/// Asks for the number of the family. The kernel loads its module for this.
fn number(netlink: &mut Netlink) -> Result<u16, WireGuardError> {
    generic::family(netlink, "wireguard")?.ok_or(WireGuardError::NoFamily)
}
