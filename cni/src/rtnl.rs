// SPDX-License-Identifier: Apache-2.0
//! Links, addresses, routes and neighbours of one network namespace, in as few datagrams as possible.

mod decode;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, setns};
use weft_netlink::rt::{PLAIN, family, ifaddrmsg, ifinfomsg};
use weft_netlink::socket::{NLM_F_ACK, Netlink};
use weft_netlink::wire::{Writer, attrs_after, i32_at, messages, u8_at};

use crate::spec::Error;
pub use decode::links;
use decode::{addr, neigh, route};

/// linux/net_namespace.h.
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;

/// Netlink in one network namespace.
#[derive(Debug)]
pub struct Rtnl {
    socket: Netlink,
}

/// Why a batch failed: the first message that the kernel refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// What the message was for.
    pub what: &'static str,
    /// The error.
    pub errno: Errno,
    /// The kernel's words, perhaps empty.
    pub text: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.errno.desc())?;
        if self.text.is_empty() { Ok(()) } else { write!(f, " ({})", self.text) }
    }
}

impl std::error::Error for Refused {}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Error {
        Error::new(crate::spec::code::OTHER, refused.to_string())
    }
}

/// A link, as the kernel describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// Interface index.
    pub index: u32,
    /// Name.
    pub name: String,
    /// `veth`, `bridge`, ...; empty for a device of hardware.
    pub kind: String,
    /// Bytes.
    pub mtu: u32,
    /// Index of the bridge it is a port of, or 0.
    pub master: u32,
    /// Index of a veth's other end, in the namespace of that end.
    pub peer: u32,
    /// Id of the namespace of the other end, if it is another one.
    pub peer_netns: Option<i32>,
    /// Alias, or empty.
    pub alias: String,
    /// Ethernet address.
    pub mac: Option<[u8; 6]>,
    /// IFF_UP.
    pub up: bool,
}

/// An address on a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addr {
    /// Interface index.
    pub index: u32,
    /// Address.
    pub addr: IpAddr,
    /// Length of the prefix.
    pub len: u8,
    /// True when it is valid beyond the link.
    pub global: bool,
}

/// A route of the main table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Destination; `None` for the default route.
    pub dst: Option<IpAddr>,
    /// Length of the prefix.
    pub len: u8,
    /// True for IPv6.
    pub v6: bool,
    /// Interface index, 0 when there is none.
    pub index: u32,
    /// Next hop.
    pub gateway: Option<IpAddr>,
}

/// A neighbour.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neigh {
    /// Interface index.
    pub index: u32,
    /// Address.
    pub addr: IpAddr,
    /// Ethernet address.
    pub mac: Vec<u8>,
    /// NUD_PERMANENT.
    pub permanent: bool,
}

impl Rtnl {
    /// Netlink in the namespace of this thread.
    ///
    /// # Errors
    /// No socket.
    pub fn open() -> Result<Rtnl, Error> {
        let socket = Netlink::open().map_err(|error| Error::io("open netlink", error))?;
        Ok(Rtnl { socket })
    }

    /// Netlink in another namespace. The thread is back in its own afterwards; a socket stays where it was opened.
    ///
    /// # Errors
    /// No such namespace, no permission, no socket.
    pub fn open_in(netns: BorrowedFd<'_>) -> Result<Rtnl, Error> {
        within(netns, || Netlink::open().map_err(|error| Error::io("open netlink", error)))?
            .map(|socket| Rtnl { socket })
    }

    /// Starts a batch.
    pub fn batch(&mut self) -> Batch<'_> {
        Batch { rtnl: self, writer: Writer::default(), sent: Vec::new() }
    }

    /// The link of a name.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn link(&mut self, name: &str) -> Result<Option<Link>, Error> {
        let mut batch = self.batch();
        batch.push("read the link", |w| link_by_name(w, libc::RTM_GETLINK, PLAIN, name, (0, 0)));
        match batch.send()? {
            Ok(data) => Ok(links(&data).next()),
            Err(refused) if refused.errno == Errno::ENODEV => Ok(None),
            Err(refused) => Err(refused.into()),
        }
    }

    /// Every link.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn links(&mut self) -> Result<Vec<Link>, Error> {
        let data = self.dump("links", libc::RTM_GETLINK, &[0; 16])?;
        Ok(links(&data).collect())
    }

    /// The ports of a bridge.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn ports(&mut self, master: u32) -> Result<Vec<Link>, Error> {
        Ok(self.links()?.into_iter().filter(|link| link.master == master).collect())
    }

    /// Every address of both families.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn addrs(&mut self) -> Result<Vec<Addr>, Error> {
        let data = self.dump("addresses", libc::RTM_GETADDR, &[0; 8])?;
        Ok(messages(&data).filter(|m| m.kind == libc::RTM_NEWADDR).filter_map(|m| addr(m.payload)).collect())
    }

    /// Every unicast route of the main table, both families.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn routes(&mut self) -> Result<Vec<Route>, Error> {
        let data = self.dump("routes", libc::RTM_GETROUTE, &[0; 12])?;
        Ok(messages(&data).filter(|m| m.kind == libc::RTM_NEWROUTE).filter_map(|m| route(m.payload)).collect())
    }

    /// Every neighbour of both families.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn neighbours(&mut self) -> Result<Vec<Neigh>, Error> {
        let data = self.dump("neighbours", libc::RTM_GETNEIGH, &[0; 12])?;
        Ok(messages(&data).filter(|m| m.kind == libc::RTM_NEWNEIGH).filter_map(|m| neigh(m.payload)).collect())
    }

    /// True when packets to the address are taken in. Of a new IPv6 address the kernel sees to that in a work of its own.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn is_local(&mut self, addr: IpAddr) -> Result<bool, Error> {
        let len = if addr.is_ipv6() { 128 } else { 32 };
        let mut batch = self.batch();
        batch.push("look up a route", |w| {
            w.begin(libc::RTM_GETROUTE, PLAIN, &[family(addr), len, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            w.attr_ip(libc::RTA_DST, addr);
        });
        let local = |data: &[u8]| {
            let mut answers = messages(data).filter(|m| m.kind == libc::RTM_NEWROUTE);
            answers.any(|m| u8_at(m.payload, 7) == libc::RTN_LOCAL)
        };
        Ok(batch.send()?.is_ok_and(|data| local(&data)))
    }

    /// The id by which links of this namespace name another one; `None` when none of them does.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn netns_id(&mut self, netns: BorrowedFd<'_>) -> Result<Option<i32>, Error> {
        let mut batch = self.batch();
        batch.push("read the id of a netns", |w| {
            w.begin(libc::RTM_GETNSID, PLAIN, &[0; 4]);
            w.attr_u32(NETNSA_FD, netns.as_raw_fd().cast_unsigned());
        });
        let data = batch.send()??;
        let mut answers = messages(&data).filter(|m| m.kind == libc::RTM_NEWNSID);
        let id = answers.find_map(|m| attrs_after(m.payload, 4).find(|(kind, _)| *kind == NETNSA_NSID));
        Ok(id.map(|(_, value)| i32_at(value, 0)).filter(|id| *id >= 0))
    }

    /// Sets the MTU of a link, bytes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_mtu(&mut self, index: u32, mtu: u32) -> Result<(), Error> {
        self.one("set the MTU", |w| {
            w.begin(libc::RTM_NEWLINK, PLAIN, &ifinfomsg(index, 0, 0));
            w.attr_u32(libc::IFLA_MTU, mtu);
        })
    }

    /// Removes a link. One that is gone is success.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_link(&mut self, index: u32) -> Result<(), Error> {
        self.gone("remove the link", |w| w.begin(libc::RTM_DELLINK, PLAIN, &ifinfomsg(index, 0, 0)))
    }

    /// Removes a link by its name. One that is gone is success.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_link_named(&mut self, name: &str) -> Result<(), Error> {
        self.gone("remove the link", |w| link_by_name(w, libc::RTM_DELLINK, PLAIN, name, (0, 0)))
    }

    /// Removes an address. One that is gone is success.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_addr(&mut self, addr: &Addr) -> Result<(), Error> {
        self.gone("remove the address", |w| {
            w.begin(libc::RTM_DELADDR, PLAIN, &ifaddrmsg(addr.addr, addr.len, addr.index));
            w.attr_ip(libc::IFA_LOCAL, addr.addr);
        })
    }

    /// One acknowledged message.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn one(&mut self, what: &'static str, build: impl FnOnce(&mut Writer)) -> Result<(), Error> {
        let mut batch = self.batch();
        batch.push(what, build);
        batch.send()?.map(drop).map_err(Error::from)
    }

    fn gone(&mut self, what: &'static str, build: impl FnOnce(&mut Writer)) -> Result<(), Error> {
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

/// Messages for one datagram: one system call, and nobody sees half of it when we are killed.
#[derive(Debug)]
pub struct Batch<'a> {
    rtnl: &'a mut Rtnl,
    writer: Writer,
    sent: Vec<(u32, &'static str)>,
}

impl Batch<'_> {
    /// Adds a message, which `build` begins and fills.
    pub fn push(&mut self, what: &'static str, build: impl FnOnce(&mut Writer)) {
        build(&mut self.writer);
        let seq = self.rtnl.socket.next_seq();
        self.writer.end(seq);
        self.sent.push((seq, what));
    }

    /// Sends it; answers with content on success. The inner error is the first refusal: later messages may have been done.
    ///
    /// # Errors
    /// Nothing is known about what was done.
    pub fn send(mut self) -> Result<Result<Vec<u8>, Refused>, Error> {
        let Some((last, _)) = self.sent.last().copied() else { return Ok(Ok(Vec::new())) };
        self.writer.flag_last(NLM_F_ACK);
        let replies = self.rtnl.socket.exchange(self.writer.bytes(), last).map_err(|e| Error::io("netlink", e))?;
        let named = |seq: u32| self.sent.iter().find(|(sent, _)| *sent == seq).map(|(_, what)| *what);
        for refusal in replies.refused {
            if let Some(what) = named(refusal.seq) {
                return Ok(Err(Refused { what, errno: refusal.errno, text: refusal.text }));
            }
        }
        if replies.complete {
            Ok(Ok(replies.data))
        } else {
            Err(Error::io("netlink", io::Error::from(io::ErrorKind::WouldBlock)))
        }
    }
}

/// Runs `work` in another network namespace, and comes back.
///
/// # Errors
/// There or back could not be reached; the thread must do nothing more when it is back that failed.
pub fn within<T>(netns: BorrowedFd<'_>, work: impl FnOnce() -> T) -> Result<T, Error> {
    let own = std::fs::File::open("/proc/thread-self/ns/net").map_err(|error| Error::io("our own netns", error))?;
    setns(netns, CloneFlags::CLONE_NEWNET).map_err(|error| Error::io("enter the pod's netns", error))?;
    let done = work();
    setns(own.as_fd(), CloneFlags::CLONE_NEWNET).map_err(|error| Error::io("leave the pod's netns", error))?;
    Ok(done)
}

/// A message about the link of a name; `up` is flags and their mask.
pub fn link_by_name(w: &mut Writer, kind: u16, flags: u16, name: &str, up: (u32, u32)) {
    w.begin(kind, flags, &ifinfomsg(0, up.0, up.1));
    w.attr_str(libc::IFLA_IFNAME, name);
}
