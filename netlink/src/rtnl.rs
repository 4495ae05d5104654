// SPDX-License-Identifier: Apache-2.0
//! Reads and changes links, addresses, routes and neighbours of one network namespace. Several changes go into one
//! datagram where possible.

mod decode;
mod entries;
mod link;
mod refused;

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, setns};

use super::rt::{PLAIN, family, ifaddrmsg, ifinfomsg};
use super::socket::{NLM_F_ACK, Netlink};
use super::wire::{Writer, attr_after, i32_at, messages};
use decode::{addr, qdisc};
pub use decode::{bridge_entries, links, neighbours, routes};
pub use entries::{Addr, BridgeEntry, Neigh, Qdisc, Route, RouteKind};
pub use link::{BridgePort, Link, Vxlan, mac_text};
pub use refused::Refused;

/// Attributes of RTM_GETNSID (linux/net_namespace.h).
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It could not be sent, or its answer was lost.
    // The cause is part of the text, so it is no source: it would be printed twice.
    #[error("{what}: {error}")]
    Io {
        /// What was tried, as a verb phrase: "open netlink".
        what: String,
        /// The cause.
        error: io::Error,
    },
    /// The kernel refused it.
    #[error(transparent)]
    Refused(#[from] Refused),
}

impl Error {
    fn io(what: impl Into<String>, error: io::Error) -> Error {
        Error::Io { what: what.into(), error }
    }
}

/// An rtnetlink socket in one network namespace.
#[derive(Debug)]
pub struct Rtnl {
    socket: Netlink,
}

impl Rtnl {
    /// Opens a socket in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> Result<Rtnl, Error> {
        let socket = Netlink::open().map_err(|error| Error::io("open netlink", error))?;
        Ok(Rtnl { socket })
    }

    /// Opens a socket in another network namespace. The socket stays in that namespace; the thread returns to its own.
    ///
    /// # Errors
    /// The namespace cannot be entered, or the socket cannot be opened.
    pub fn open_in(netns: BorrowedFd<'_>) -> Result<Rtnl, Error> {
        in_netns(netns, Rtnl::open)?
    }

    /// Starts an empty batch.
    pub fn batch(&mut self) -> Batch<'_> {
        Batch { rtnl: self, writer: Writer::default(), sent: Vec::new() }
    }

    /// Returns the link with this name, or `None` if there is none.
    ///
    /// # Errors
    /// The kernel refuses or does not answer.
    pub fn link(&mut self, name: &str) -> Result<Option<Link>, Error> {
        let mut batch = self.batch();
        batch.push("read the link", |w| link_by_name(w, libc::RTM_GETLINK, PLAIN, name, LinkFlags::default()));
        match batch.send()? {
            Ok(data) => Ok(links(&data).next()),
            Err(refused) if refused.errno == Errno::ENODEV => Ok(None),
            Err(refused) => Err(refused.into()),
        }
    }

    /// Returns all links.
    ///
    /// # Errors
    /// The dump fails.
    pub fn links(&mut self) -> Result<Vec<Link>, Error> {
        let data = self.dump("links", libc::RTM_GETLINK, &[0; 16])?;
        Ok(links(&data).collect())
    }

    /// Returns the ports of a bridge.
    ///
    /// # Errors
    /// The dump fails.
    pub fn ports(&mut self, master: u32) -> Result<Vec<Link>, Error> {
        Ok(self.links()?.into_iter().filter(|link| link.master == master).collect())
    }

    /// Returns all addresses of both families.
    ///
    /// # Errors
    /// The dump fails.
    pub fn addrs(&mut self) -> Result<Vec<Addr>, Error> {
        let data = self.dump("addresses", libc::RTM_GETADDR, &[0; 8])?;
        Ok(messages(&data).filter(|m| m.kind == libc::RTM_NEWADDR).filter_map(|m| addr(m.payload)).collect())
    }

    /// Returns all unicast routes of the main table, of both families.
    ///
    /// # Errors
    /// The dump fails.
    pub fn routes(&mut self) -> Result<Vec<Route>, Error> {
        Ok(self.main_table()?.into_iter().filter(|route| !route.refuses()).collect())
    }

    /// Returns the unicast routes of the main table and those that refuse packets, of both families.
    ///
    /// # Errors
    /// The dump fails.
    pub fn main_table(&mut self) -> Result<Vec<Route>, Error> {
        let data = self.dump("routes", libc::RTM_GETROUTE, &[0; 12])?;
        let is_read = |route: &Route| {
            let is_main = route.table == u32::from(libc::RT_TABLE_MAIN);
            is_main && matches!(route.kind, RouteKind::Unicast | RouteKind::Refuses(_))
        };
        Ok(routes(&data).filter(is_read).collect())
    }

    /// Returns all neighbours of both families.
    ///
    /// # Errors
    /// The dump fails.
    pub fn neighbours(&mut self) -> Result<Vec<Neigh>, Error> {
        let data = self.dump("neighbours", libc::RTM_GETNEIGH, &[0; 12])?;
        Ok(neighbours(&data).collect())
    }

    /// Returns the queueing disciplines of all links.
    ///
    /// # Errors
    /// The dump fails.
    pub fn qdiscs(&mut self) -> Result<Vec<Qdisc>, Error> {
        let data = self.dump("queueing disciplines", libc::RTM_GETQDISC, &[0; 20])?;
        Ok(messages(&data).filter(|m| m.kind == libc::RTM_NEWQDISC).filter_map(|m| qdisc(m.payload)).collect())
    }

    /// Returns true if the kernel delivers packets to this address locally. For a new IPv6 address the kernel arranges
    /// that asynchronously.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub fn is_local(&mut self, addr: IpAddr) -> Result<bool, Error> {
        let len = if addr.is_ipv4() { 32 } else { 128 };
        let mut batch = self.batch();
        batch.push("look up a route", |w| {
            w.begin(libc::RTM_GETROUTE, PLAIN, &[family(addr), len, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            w.attr_ip(libc::RTA_DST, addr);
        });
        let local = |data: &[u8]| routes(data).any(|route| route.kind == RouteKind::Local);
        Ok(batch.send()?.is_ok_and(|data| local(&data)))
    }

    /// Returns the ID by which links of this namespace refer to another namespace, or `None` if no link does.
    ///
    /// # Errors
    /// The kernel refuses or does not answer.
    pub fn netns_id(&mut self, netns: BorrowedFd<'_>) -> Result<Option<i32>, Error> {
        let mut batch = self.batch();
        batch.push("read the id of a netns", |w| {
            w.begin(libc::RTM_GETNSID, PLAIN, &[0; 4]);
            w.attr_u32(NETNSA_FD, netns.as_raw_fd().cast_unsigned());
        });
        let data = batch.send()??;
        let mut answers = messages(&data).filter(|m| m.kind == libc::RTM_NEWNSID);
        let id = answers.find_map(|m| attr_after(m.payload, 4, NETNSA_NSID));
        Ok(id.map(|value| i32_at(value, 0)).filter(|id| *id >= 0))
    }

    /// Sets the MTU of a link, in bytes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_mtu(&mut self, index: u32, mtu: u32) -> Result<(), Error> {
        self.request("set the MTU", |w| {
            w.begin(libc::RTM_NEWLINK, PLAIN, &ifinfomsg(index, 0, 0));
            w.attr_u32(libc::IFLA_MTU, mtu);
        })
    }

    /// Removes a link. If it does not exist, that is success.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_link(&mut self, index: u32) -> Result<(), Error> {
        self.remove("remove the link", |w| w.begin(libc::RTM_DELLINK, PLAIN, &ifinfomsg(index, 0, 0)))
    }

    /// Removes the link with this name. If it does not exist, that is success.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_link_named(&mut self, name: &str) -> Result<(), Error> {
        self.remove("remove the link", |w| link_by_name(w, libc::RTM_DELLINK, PLAIN, name, LinkFlags::default()))
    }

    /// Removes an address. If it or its link does not exist, that is success.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_addr(&mut self, addr: &Addr) -> Result<(), Error> {
        self.remove("remove the address", |w| {
            w.begin(libc::RTM_DELADDR, PLAIN, &ifaddrmsg(addr.addr, addr.len, addr.index));
            w.attr_ip(libc::IFA_LOCAL, addr.addr);
        })
    }

    /// Sends one message and waits for its acknowledgement.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn request(&mut self, what: &'static str, build: impl FnOnce(&mut Writer)) -> Result<(), Error> {
        let mut batch = self.batch();
        batch.push(what, build);
        batch.send()?.map(drop).map_err(Error::from)
    }

    fn remove(&mut self, what: &'static str, build: impl FnOnce(&mut Writer)) -> Result<(), Error> {
        let mut batch = self.batch();
        batch.push(what, build);
        match batch.send()? {
            Err(refused) if !matches!(refused.errno, Errno::ENODEV | Errno::EADDRNOTAVAIL) => Err(refused.into()),
            _ => Ok(()),
        }
    }

    fn dump(&mut self, what: &str, kind: u16, fixed: &[u8]) -> Result<Vec<u8>, Error> {
        let read = self.socket.dump(kind, |w, kind, flags| w.begin(kind, flags, fixed));
        read.map_err(|error| Error::io(format!("read {what}"), error))
    }
}

/// Messages that are sent in one datagram. This takes one system call, and a killed process leaves either all of them
/// or none.
#[derive(Debug)]
pub struct Batch<'a> {
    rtnl: &'a mut Rtnl,
    writer: Writer,
    sent: Vec<(u32, &'static str)>,
}

impl Batch<'_> {
    /// Adds a message, which `build` writes. `what` says what the message is for.
    pub fn push(&mut self, what: &'static str, build: impl FnOnce(&mut Writer)) {
        build(&mut self.writer);
        let seq = self.rtnl.socket.next_seq();
        self.writer.end(seq);
        self.sent.push((seq, what));
    }

    /// Sends the batch and returns the answers that have content.
    ///
    /// The inner error is the first refusal. Messages after it may have been carried out.
    ///
    /// # Errors
    /// The batch could not be sent or the answers were lost, so it is unknown which messages were carried out.
    pub fn send(mut self) -> Result<Result<Vec<u8>, Refused>, Error> {
        let Some((last, _)) = self.sent.last().copied() else { return Ok(Ok(Vec::new())) };
        self.writer.flag_last(NLM_F_ACK);
        // What is left of a dump that failed would count among the answers.
        self.rtnl.socket.discard_replies();
        let replies = self.rtnl.socket.exchange(self.writer.bytes(), last).map_err(|e| Error::io("netlink", e))?;
        let purpose = |seq: u32| self.sent.iter().find(|(sent, _)| *sent == seq).map(|(_, what)| *what);
        for refusal in replies.refused {
            if let Some(what) = purpose(refusal.seq) {
                return Ok(Err(Refused { what, errno: refusal.errno, text: refusal.text }));
            }
        }
        if replies.complete {
            Ok(Ok(replies.data))
        } else {
            Err(Error::io("netlink", io::ErrorKind::WouldBlock.into()))
        }
    }
}

/// Runs `work` in another network namespace, and then returns to that of the calling thread.
///
/// # Errors
/// The namespace cannot be entered, or the thread cannot return to its own. In the second case the thread must not be
/// used any more.
pub fn in_netns<T>(netns: BorrowedFd<'_>, work: impl FnOnce() -> T) -> Result<T, Error> {
    let own = File::open("/proc/thread-self/ns/net").map_err(|error| Error::io("open our own netns", error))?;
    let enter = |netns: BorrowedFd<'_>, what: &str| {
        setns(netns, CloneFlags::CLONE_NEWNET).map_err(|errno| Error::io(what, io::Error::other(errno)))
    };
    enter(netns, "enter the pod's netns")?;
    let done = work();
    enter(own.as_fd(), "leave the pod's netns")?;
    Ok(done)
}

/// The flags of a link that a message changes. The default changes none.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinkFlags {
    /// Their values, as in `IFF_UP`.
    pub flags: u32,
    /// Which of them are changed.
    pub mask: u32,
}

/// Begins a message about the link with this name.
pub fn link_by_name(w: &mut Writer, kind: u16, flags: u16, name: &str, change: LinkFlags) {
    w.begin(kind, flags, &ifinfomsg(0, change.flags, change.mask));
    w.attr_str(libc::IFLA_IFNAME, name);
}

#[cfg(test)]
mod tests;
