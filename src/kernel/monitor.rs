// SPDX-License-Identifier: Apache-2.0
//! [`Monitor`] on Linux: a multicast socket, and as little as possible of what it says passed on.
//!
//! Echoes of our own writes cannot be told by port id (the kernel sends 0 for FDB entries and links): the agent compares.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv};
use tokio::io::unix::AsyncFd;
use weft_backends::state::{Key, Seen, Value};

use ipnet::IpNet;

use super::decode::{self, LinkFacts, Links};
use super::dump;
use super::encode::{RT_SCOPE_LINK, RTM_DELNEXTHOP, RTM_NEWNEXTHOP};
use super::fence::Numbers;
use super::guard::GuardMonitor;
use super::nexthop::Shared;
use super::socket::{Netlink, force_buffer};
use super::wire::{Message, messages};
use super::{Monitor, Notice};
use crate::async_socket::wait_on;

/// RTNLGRP_LINK, NEIGH, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE.
const GROUPS: [u32; 8] = [1, 3, 5, 7, 8, 9, 11, 19];
/// RTNLGRP_NEXTHOP (Linux 5.3).
const GROUP_NEXTHOP: u32 = 32;
/// One notification is small, a link's perhaps a page or two.
const DATAGRAM: usize = 64 << 10;
/// Routes to pods of this machine: no peer is reached by one.
const POD_ROUTES: u8 = weft_cni::veth::PROTOCOL;
/// Datagrams per call: a flood must not keep the agent from everything else.
const AT_ONCE: usize = 4096;

/// What the monitor must be told.
#[derive(Debug, Clone)]
pub struct MonitorOptions {
    /// Our `rtm_protocol`.
    pub protocol: u8,
    /// Receive buffer, bytes. More than the default would cost memory and time and gain nothing: who writes thousands of entries
    /// overflows it and looks at everything once afterwards, and the kernel need not queue the echoes.
    pub buffer: usize,
    /// The writer's index: [`super::LinuxKernel::shared`].
    pub shared: Shared,
    /// ifalias of the agent's links, when its tunnel guard is to be watched.
    pub guard: Option<String>,
    /// The agent's fence.
    pub fence: Option<Numbers>,
}

impl MonitorOptions {
    /// The usual ones.
    pub fn new(protocol: u8, shared: Shared) -> MonitorOptions {
        MonitorOptions { protocol, buffer: 2 << 20, shared, guard: None, fence: None }
    }

    /// With the tunnel guard of the agent whose links bear this alias.
    pub fn watch_guard(self, alias: &str) -> MonitorOptions {
        MonitorOptions { guard: Some(alias.to_owned()), ..self }
    }

    /// With the fence of the agent whose links bear this alias.
    pub fn watch_fence(self, alias: &str) -> MonitorOptions {
        MonitorOptions { fence: Some(Numbers::of_alias(alias)), ..self }
    }
}

/// Notifications of the network namespace in which it was opened.
#[derive(Debug)]
pub struct LinuxMonitor {
    socket: AsyncFd<Socket>,
    dumps: Netlink,
    options: MonitorOptions,
    links: Links,
    addrs: HashMap<(u32, IpNet), (u8, u32)>,
    buffer: Vec<u8>,
    more: bool,
    guard: Option<GuardMonitor>,
}

/// Notices of one batch: each key once, with its last state, where it was first seen.
#[derive(Debug, Default)]
struct Batch {
    entries: Vec<(Key, Option<Seen>)>,
    at: HashMap<Key, usize>,
    links: bool,
    tables: Tables,
    lost: bool,
}

/// Which routing tables changed, but for entries that are told one by one.
#[derive(Debug, Default)]
struct Tables {
    /// Foreign routes of the main table.
    main: bool,
    fence: bool,
}

impl LinuxMonitor {
    /// Joins the groups, then takes down what links and addresses there are. To be called inside a tokio runtime with I/O.
    ///
    /// # Errors
    /// No netlink socket, a group that cannot be joined, or a failed dump. Nexthops may be missing: older kernels.
    pub fn open(options: MonitorOptions) -> io::Result<LinuxMonitor> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        force_buffer(&socket, options.buffer);
        socket.set_non_blocking(true)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        for group in GROUPS {
            socket.add_membership(group)?;
        }
        if let Err(e) = socket.add_membership(GROUP_NEXTHOP) {
            tracing::debug!(error = %e, "no notifications of nexthop objects");
        }
        let (socket, dumps) = (wait_on(socket)?, Netlink::open()?);
        let (links, addrs, buffer) = (Links::new(), HashMap::new(), vec![0; DATAGRAM]);
        let guard =
            options.guard.as_deref().and_then(|alias| GuardMonitor::open(alias).inspect_err(left_to_the_audit).ok());
        let mut monitor = LinuxMonitor { socket, dumps, options, links, addrs, buffer, more: false, guard };
        monitor.take_down()?;
        Ok(monitor)
    }

    fn take_down(&mut self) -> io::Result<()> {
        self.links = dump::links(&mut self.dumps)?;
        self.links.values_mut().for_each(forget_mac);
        self.addrs =
            dump::addresses(&mut self.dumps)?.into_iter().map(|a| ((a.index, a.net), (a.scope, a.flags))).collect();
        Ok(())
    }

    /// Everything that is queued now; true when there may be more.
    fn drain(&mut self, batch: &mut Batch) -> io::Result<bool> {
        let fd = self.socket.get_ref().as_raw_fd();
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut result = Ok(true);
        for _ in 0..AT_ONCE {
            match recv(fd, &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(n) => messages(&buffer[..n]).for_each(|m| self.hear(&m, batch)),
                Err(Errno::EAGAIN) => {
                    result = Ok(false);
                    break;
                }
                Err(Errno::EINTR) => {}
                Err(Errno::ENOBUFS) => batch.lost = true,
                Err(e) => {
                    result = Err(e.into());
                    break;
                }
            }
        }
        self.buffer = buffer;
        if batch.lost {
            self.take_down()?;
        }
        result
    }

    fn drain_guard(&mut self) -> Vec<Notice> {
        let Some(guard) = &mut self.guard else { return Vec::new() };
        guard.notices().unwrap_or_else(|error| {
            left_to_the_audit(&error);
            self.guard = None;
            vec![Notice::Guard]
        })
    }

    fn hear(&mut self, m: &Message<'_>, batch: &mut Batch) {
        match m.kind {
            libc::RTM_NEWLINK | libc::RTM_DELLINK => self.hear_link(m, batch),
            libc::RTM_NEWADDR | libc::RTM_DELADDR => self.hear_address(m, batch),
            libc::RTM_NEWNEIGH | libc::RTM_DELNEIGH => self.hear_neighbour(m, batch),
            libc::RTM_NEWROUTE | libc::RTM_DELROUTE => self.hear_route(m, batch),
            RTM_NEWNEXTHOP => {
                let n = decode::nexthop(m.payload);
                let mut shared = self.options.shared.borrow_mut();
                if shared.in_range(n.id) && n.protocol != self.options.protocol {
                    shared.reserve(n.id);
                }
            }
            RTM_DELNEXTHOP => {
                let n = decode::nexthop(m.payload);
                if let Some(key) = self.options.shared.borrow_mut().forget(n.id) {
                    batch.put(key, None);
                }
            }
            _ => batch.tables.fence |= self.options.fence.is_some_and(|fence| fence.has_rule(m)),
        }
    }

    /// Most link messages (statistics, carrier counters) change nothing that matters here; nor do the pods' links.
    fn hear_link(&mut self, m: &Message<'_>, batch: &mut Batch) {
        let Some(mut link) = decode::link(m.payload) else { return };
        forget_mac(&mut link);
        let index = link.info.index;
        let bystander = self.is_bystander(&link);
        if m.kind == libc::RTM_DELLINK {
            self.links.remove(&index);
            self.addrs.retain(|(i, _), _| *i != index);
            batch.links |= !bystander;
        } else if self.links.get(&index) != Some(&link) {
            self.links.insert(index, link);
            batch.links |= !bystander;
        }
    }

    /// A pod's end of a pair, with no address of its own: it is neither uplink nor device of ours, and pods come and go all day.
    fn is_bystander(&self, link: &LinkFacts) -> bool {
        let addressed = |((index, _), (scope, _)): (&(u32, IpNet), &(u8, u32))| {
            *index == link.info.index && *scope != RT_SCOPE_LINK
        };
        link.veth && !self.addrs.iter().any(addressed)
    }

    /// A router advertisement that only renews a lifetime is no news.
    fn hear_address(&mut self, m: &Message<'_>, batch: &mut Batch) {
        let Some(a) = decode::address(m.payload) else { return };
        let now = (a.scope, a.flags);
        let bystander =
            a.scope == RT_SCOPE_LINK && self.links.get(&a.index).is_some_and(|link| self.is_bystander(link));
        let news = if m.kind == libc::RTM_DELADDR {
            self.addrs.remove(&(a.index, a.net)).is_some()
        } else {
            self.addrs.insert((a.index, a.net), now) != Some(now)
        };
        batch.links |= news && !bystander;
    }

    fn hear_neighbour(&mut self, m: &Message<'_>, batch: &mut Batch) {
        let Some(n) = decode::neighbour(m.payload) else { return };
        let Some(link) = self.links.get(&n.index).filter(|l| l.has_fdb()) else { return };
        let name = link.info.name;
        let here = m.kind == libc::RTM_NEWNEIGH && n.lasting;
        if !n.fdb {
            let Some(dst) = n.dst.filter(|d| !d.is_multicast()) else { return };
            let value = n.mac.filter(|_| here).map(Value::Neigh);
            return batch.put(Key::Neigh(name, dst), value.map(|value| Seen { value, protocol: 0, mark: false }));
        }
        let Some(mac) = n.mac else { return };
        let known = self.options.shared.borrow().fdb.contains(&(n.index, mac));
        match (here, m.kind == libc::RTM_DELNEIGH) {
            (true, _) => {
                let value = n.dst.map(Value::Fdb);
                batch.put(Key::Fdb(name, mac), value.map(|value| Seen { value, protocol: 0, mark: false }));
            }
            // Learned, not written: of interest only where it took the place of an entry that we know.
            (false, false) if !known => {}
            (false, _) => batch.put(Key::Fdb(name, mac), None),
        }
    }

    fn hear_route(&mut self, m: &Message<'_>, batch: &mut Batch) {
        let Some((table, r)) = decode::route_of_any_table(m.payload) else { return };
        if table != u32::from(libc::RT_TABLE_MAIN) {
            batch.tables.fence |= self.options.fence.is_some_and(|fence| fence.has_table(table));
            return;
        }
        let key = Key::Route(r.net, r.metric);
        let foreign = r.protocol != self.options.protocol && r.protocol != POD_ROUTES;
        batch.tables.main |= foreign && !is_local(&r.net);
        if m.kind == libc::RTM_DELROUTE {
            return batch.put(key, None);
        }
        // With nexthop_compat_mode off the message has the id alone; one that we bound to this route is as we wrote it.
        if r.nexthop != 0 && r.index == 0 && self.options.shared.borrow().of(&key) == Some(r.nexthop) {
            return;
        }
        match self.links.get(&r.index) {
            // A link whose own message is still to come: it will lead to a look at everything.
            None if r.index != 0 => {}
            link => {
                let value = Value::Route(r.value(link.map(|l| l.info.name)));
                batch.put(key, Some(Seen { value, protocol: r.protocol, mark: r.nexthop != 0 }));
            }
        }
    }
}

/// News of the guard's table; never, where there is none.
async fn guarded(guard: Option<&GuardMonitor>) {
    match guard {
        // What fails fails again when it is read.
        Some(guard) => drop(guard.ready().await),
        None => std::future::pending().await,
    }
}

fn left_to_the_audit(error: &io::Error) {
    tracing::warn!(%error, "cannot read the notifications of nftables: the audit repairs the tunnel guard");
}

/// The MAC of a link that cannot be ours is of no interest: that of a bridge changes with every pod.
fn forget_mac(link: &mut LinkFacts) {
    if link.told.is_none() {
        link.info.mac = None;
    }
}

/// Link-local and multicast routes come with every IPv6 link.
fn is_local(net: &IpNet) -> bool {
    matches!(net, IpNet::V6(net) if net.addr().is_unicast_link_local() || net.addr().is_multicast())
}

impl Batch {
    fn put(&mut self, key: Key, now: Option<Seen>) {
        match self.at.get(&key) {
            Some(at) => self.entries[*at].1 = now,
            None => {
                self.at.insert(key, self.entries.len());
                self.entries.push((key, now));
            }
        }
    }

    fn notices(self) -> Vec<Notice> {
        let mut notices = Vec::new();
        if self.lost {
            notices.push(Notice::Lost);
        }
        if self.links {
            notices.push(Notice::Links);
        }
        if self.tables.main {
            notices.push(Notice::Routes);
        }
        if self.tables.fence {
            notices.push(Notice::Fence);
        }
        notices.extend(self.entries.into_iter().map(|(key, now)| Notice::Entry(key, now)));
        notices
    }
}

impl Monitor for LinuxMonitor {
    async fn next(&mut self) -> io::Result<Vec<Notice>> {
        loop {
            // The only wait; what is read after it is returned without another. Readiness is cleared before the reading:
            // what arrives meanwhile is read or sets it again.
            if !self.more {
                tokio::select! {
                    ready = self.socket.readable() => ready?.clear_ready(),
                    () = guarded(self.guard.as_ref()) => {}
                }
            }
            self.more = true;
            let mut batch = Batch::default();
            self.more = self.drain(&mut batch)?;
            let mut notices = batch.notices();
            notices.extend(self.drain_guard());
            if !notices.is_empty() {
                return Ok(notices);
            }
        }
    }
}
