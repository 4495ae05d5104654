// SPDX-License-Identifier: Apache-2.0
//! [`Monitor`] on Linux: a socket that receives the notifications of the kernel, and passes on only those that matter to the agent.
//!
//! The kernel also notifies of the agent's own writes. They cannot be recognised by the port id, which is 0 for FDB entries and links.
//! The agent compares them with the desired values instead.

mod changes;

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;

use ipnet::IpNet;
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv};
use tokio::io::unix::AsyncFd;
use weft_backends::state::{Key, ObservedValue, Value};

use super::decode;
use super::encode::{RT_SCOPE_LINK, RTM_DELNEXTHOP, RTM_NEWNEXTHOP};
use super::fence::Numbers;
use super::guard::GuardMonitor;
use super::link_messages::{self, LinkFacts, Links};
use super::nexthop::Shared;
use super::observe;
use super::socket::{Netlink, force_buffer};
use super::wire::{Message, messages};
use super::{Monitor, Notice};
use crate::async_socket::wait_on;
use changes::Changes;

/// RTNLGRP_LINK, NEIGH, IPV4_IFADDR, IPV4_ROUTE, IPV4_RULE, IPV6_IFADDR, IPV6_ROUTE, IPV6_RULE.
const GROUPS: [u32; 8] = [1, 3, 5, 7, 8, 9, 11, 19];
/// RTNLGRP_NEXTHOP (Linux 5.3).
const GROUP_NEXTHOP: u32 = 32;
/// Size of the buffer for one datagram in bytes. A notification of a link may be longer than a page.
const DATAGRAM: usize = 64 << 10;
/// The protocol of the routes to pods of this host. No peer is reached by such a route.
const POD_ROUTES: u8 = weft_cni::veth::PROTOCOL;
/// Maximum number of datagrams in one call, so that many notifications do not keep the agent from its other work.
const AT_ONCE: usize = 4096;

/// The options of [`LinuxMonitor::open`].
#[derive(Debug, Clone)]
pub struct MonitorOptions {
    /// The `rtm_protocol` of the agent's routes.
    pub protocol: u8,
    /// Size of the receive buffer in bytes. It overflows when thousands of entries are written at once. The agent then compares
    /// everything once, which is cheaper than to read all these notifications from a larger buffer.
    pub buffer: usize,
    /// The index of nexthops, which the writer shares ([`super::LinuxKernel::shared`]).
    pub shared: Shared,
    /// The alias of the agent's links, if its tunnel guard is to be watched.
    pub guard: Option<String>,
    /// The numbers of the agent's fence, if it is to be watched.
    pub fence: Option<Numbers>,
    /// Report the policy rules of other programs, and their routes in all tables, too.
    pub policy: bool,
}

impl MonitorOptions {
    /// Returns options without a guard and a fence, and with the routes of the main table only.
    pub fn new(protocol: u8, shared: Shared) -> MonitorOptions {
        MonitorOptions { protocol, buffer: 2 << 20, shared, guard: None, fence: None, policy: false }
    }

    /// Also watches the tunnel guard of the agent whose links have this alias.
    pub fn watch_guard(self, alias: &str) -> MonitorOptions {
        MonitorOptions { guard: Some(alias.to_owned()), ..self }
    }

    /// Also watches the fence of the agent whose links have this alias.
    pub fn watch_fence(self, alias: &str) -> MonitorOptions {
        MonitorOptions { fence: Some(Numbers::of_alias(alias)), ..self }
    }

    /// Also reports changes of policy rules, and of routes in other tables than the main one, as [`Notice::Routes`].
    pub fn watch_policy(self) -> MonitorOptions {
        MonitorOptions { policy: true, ..self }
    }
}

/// The notifications of the network namespace in which this was opened.
#[derive(Debug)]
pub struct LinuxMonitor {
    socket: AsyncFd<Socket>,
    dumps: Netlink,
    options: MonitorOptions,
    links: Links,
    addrs: HashMap<(u32, IpNet), (u8, u32)>,
    /// True if notifications were lost, and the links and addresses could not be read since then.
    stale: bool,
    buffer: Vec<u8>,
    more: bool,
    guard: Option<GuardMonitor>,
}

impl LinuxMonitor {
    /// Joins the multicast groups, and then reads all links and addresses. Must be called inside a tokio runtime with I/O.
    ///
    /// # Errors
    /// The socket cannot be opened, a group cannot be joined, or a dump failed. It is no error if an old kernel has no group for
    /// nexthops.
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
        let mut monitor =
            LinuxMonitor { socket, dumps, options, links, addrs, stale: false, buffer, more: false, guard };
        monitor.read_links()?;
        Ok(monitor)
    }

    /// Reads all links and addresses.
    fn read_links(&mut self) -> io::Result<()> {
        self.links = observe::links(&mut self.dumps)?;
        self.links.values_mut().for_each(forget_mac);
        self.addrs =
            observe::addresses(&mut self.dumps)?.into_iter().map(|a| ((a.index, a.net), (a.scope, a.flags))).collect();
        Ok(())
    }

    /// Reads the notifications that are queued now. Returns true if there may be more. If the links cannot be read after notifications were
    /// lost, the next call tries that again.
    fn drain(&mut self, changes: &mut Changes) -> io::Result<bool> {
        let fd = self.socket.get_ref().as_raw_fd();
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut result = Ok(true);
        for _ in 0..AT_ONCE {
            match recv(fd, &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(n) => messages(&buffer[..n]).for_each(|m| self.note(&m, changes)),
                Err(Errno::EAGAIN) => {
                    result = Ok(false);
                    break;
                }
                Err(Errno::EINTR) => {}
                Err(Errno::ENOBUFS) => changes.lost = true,
                Err(e) => {
                    result = Err(e.into());
                    break;
                }
            }
        }
        self.buffer = buffer;
        self.stale |= changes.lost;
        if self.stale {
            self.read_links()?;
            self.stale = false;
            // Notifications about links that were unknown until now were left out.
            changes.lost = true;
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

    fn note(&mut self, m: &Message<'_>, changes: &mut Changes) {
        match m.kind {
            libc::RTM_NEWLINK | libc::RTM_DELLINK => self.note_link(m, changes),
            libc::RTM_NEWADDR | libc::RTM_DELADDR => self.note_address(m, changes),
            libc::RTM_NEWNEIGH | libc::RTM_DELNEIGH => self.note_neighbour(m, changes),
            libc::RTM_NEWROUTE | libc::RTM_DELROUTE => self.note_route(m, changes),
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
                    changes.put(key, None);
                }
            }
            libc::RTM_NEWRULE | libc::RTM_DELRULE => {
                let ours = self.options.fence.is_some_and(|fence| fence.has_rule(m));
                changes.tables.note(ours, self.options.policy);
            }
            _ => {}
        }
    }

    /// Most notifications of links are about statistics or carrier counters, or about links of pods, and do not matter here.
    fn note_link(&mut self, m: &Message<'_>, changes: &mut Changes) {
        let Some(mut link) = link_messages::read_link(m.payload) else { return };
        forget_mac(&mut link);
        let index = link.info.index;
        let of_pod = self.is_pod_link(&link);
        if m.kind == libc::RTM_DELLINK {
            // The kernel has announced the removal of its addresses before.
            self.links.remove(&index);
            changes.links |= !of_pod;
        } else if self.links.get(&index) != Some(&link) {
            self.links.insert(index, link);
            changes.links |= !of_pod;
        }
    }

    /// Returns true for one end of a veth pair that has no address. It belongs to a pod: it is neither an uplink nor a device of ours,
    /// and such links come and go all day.
    fn is_pod_link(&self, link: &LinkFacts) -> bool {
        let addressed = |((index, _), (scope, _)): (&(u32, IpNet), &(u8, u32))| {
            *index == link.info.index && *scope != RT_SCOPE_LINK
        };
        link.veth && !self.addrs.iter().any(addressed)
    }

    /// A router advertisement that only renews a lifetime changes nothing.
    fn note_address(&mut self, m: &Message<'_>, changes: &mut Changes) {
        let Some(a) = link_messages::read_address(m.payload) else { return };
        let now = (a.scope, a.flags);
        let of_pod = a.scope == RT_SCOPE_LINK && self.links.get(&a.index).is_some_and(|link| self.is_pod_link(link));
        let changed = if m.kind == libc::RTM_DELADDR {
            // The kernel announces a new IPv6 address later, and never if it goes before. So one that is not known here may be ours.
            self.addrs.remove(&(a.index, a.net));
            true
        } else {
            self.addrs.insert((a.index, a.net), now) != Some(now)
        };
        changes.links |= changed && !of_pod;
    }

    fn note_neighbour(&mut self, m: &Message<'_>, changes: &mut Changes) {
        let Some(n) = decode::neighbour(m.payload) else { return };
        let Some(link) = self.links.get(&n.index).filter(|l| l.has_fdb()) else { return };
        let name = link.info.name;
        let here = m.kind == libc::RTM_NEWNEIGH && n.lasting;
        if !n.fdb {
            let Some(dst) = n.dst.filter(|d| !d.is_multicast()) else { return };
            let value = n.mac.filter(|_| here).map(Value::Neigh);
            return changes.put(Key::Neigh(name, dst), value.map(ObservedValue::from));
        }
        let Some(mac) = n.mac else { return };
        let known = self.options.shared.borrow().fdb.contains(&(n.index, mac));
        match (here, m.kind == libc::RTM_DELNEIGH) {
            (true, _) => {
                let value = n.dst.map(Value::Fdb);
                changes.put(Key::Fdb(name, mac), value.map(ObservedValue::from));
            }
            // The device learned it. This matters only if it replaced an entry that the agent knows.
            (false, false) if !known => {}
            (false, _) => changes.put(Key::Fdb(name, mac), None),
        }
    }

    fn note_route(&mut self, m: &Message<'_>, changes: &mut Changes) {
        let Some((table, r)) = decode::route_of_any_table(m.payload) else { return };
        if table != u32::from(libc::RT_TABLE_MAIN) {
            let ours = self.options.fence.is_some_and(|fence| fence.has_table(table));
            // The kernel writes the table of local addresses itself, when an address changes.
            changes.tables.note(ours, self.options.policy && table != u32::from(libc::RT_TABLE_LOCAL));
            return;
        }
        let key = Key::Route(r.net, r.metric);
        let foreign = r.protocol != self.options.protocol && r.protocol != POD_ROUTES;
        changes.tables.foreign |= foreign && !is_local(&r.net);
        if m.kind == libc::RTM_DELROUTE {
            return changes.put(key, None);
        }
        // If the sysctl nexthop_compat_mode is 0, the notification has only the id. The id that we bound to this route shows that
        // the route is as we wrote it.
        if r.nexthop != 0 && r.index == 0 && self.options.shared.borrow().of(&key) == Some(r.nexthop) {
            return;
        }
        match self.links.get(&r.index) {
            // The notification of this link is still queued, and will cause a comparison of everything.
            None if r.index != 0 => {}
            link => {
                let value = Value::Route(r.value(link.map(|l| l.info.name)));
                changes.put(key, Some(ObservedValue { value, protocol: r.protocol, mark: r.nexthop != 0 }));
            }
        }
    }
}

/// Waits for a notification of the guard's table. Waits forever if there is no guard.
async fn guard_changed(guard: Option<&GuardMonitor>) {
    match guard {
        // An error will occur again when the notification is read.
        Some(guard) => drop(guard.ready().await),
        None => std::future::pending().await,
    }
}

fn left_to_the_audit(error: &io::Error) {
    tracing::warn!(%error, "cannot read the notifications of nftables: the audit repairs the tunnel guard");
}

/// Forgets the MAC of a link that cannot be ours. The MAC of a bridge, for example, changes with every pod.
fn forget_mac(link: &mut LinkFacts) {
    if link.link_type.is_none() {
        link.info.mac = None;
    }
}

/// Returns true for link-local and multicast routes, which every IPv6 link has.
fn is_local(net: &IpNet) -> bool {
    matches!(net, IpNet::V6(net) if net.addr().is_unicast_link_local() || net.addr().is_multicast())
}

impl Monitor for LinuxMonitor {
    async fn next(&mut self) -> io::Result<Vec<Notice>> {
        loop {
            // This is the only await, so no notification is lost if the caller drops the future. Readiness is cleared before reading.
            // A notification that arrives in between is read, or sets readiness again.
            if !self.more {
                tokio::select! {
                    ready = self.socket.readable() => ready?.clear_ready(),
                    () = guard_changed(self.guard.as_ref()) => {}
                }
            }
            self.more = true;
            let mut changes = Changes::default();
            self.more = self.drain(&mut changes)?;
            let mut notices = changes.notices();
            notices.extend(self.drain_guard());
            if !notices.is_empty() {
                return Ok(notices);
            }
        }
    }
}

#[cfg(test)]
mod tests;
