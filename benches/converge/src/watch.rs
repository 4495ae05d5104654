// SPDX-License-Identifier: Apache-2.0
//! Watches the kernel with a netlink monitor of the bench. It knows when the last of many entries is there, or a certain one. The clock is
//! read when a notification arrives, and nothing is polled.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use weft::kernel::encode::{RTM_DELNEXTHOP, RTM_NEWNEXTHOP};
use weft::kernel::wire::{Message, messages};
use weft::kernel::{decode, socket::force_buffer};

use crate::peers::{MOST, TABLES, Table, by_inner, by_mac};

/// RTNLGRP_LINK, NEIGH, IPV4_IFADDR, IPV4_ROUTE, IPV6_IFADDR, IPV6_ROUTE, NEXTHOP.
const GROUPS: [u32; 7] = [1, 3, 5, 7, 9, 11, 32];
/// Holds the notifications of 50,000 dual-stack peers while this process waits for a processor.
const BUFFER: usize = 256 << 20;
const DATAGRAM: usize = 64 << 10;

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    /// Any entry of a peer is written.
    First,
    /// This number of peers have their entry in each of the tables.
    Peers(usize),
    /// This entry is written (again).
    Written(Table, usize),
}

/// What the notifications have shown so far.
#[derive(Debug)]
struct Observed {
    tables: &'static [Table],
    there: Vec<[bool; TABLES.len()]>,
    count: [usize; TABLES.len()],
    writes: usize,
    last: Instant,
    link_gone: Option<Instant>,
    lost: bool,
    goal: Option<Goal>,
    reached: Option<Instant>,
}

#[derive(Debug)]
struct Shared {
    seen: Mutex<Observed>,
    changed: Condvar,
    stop: AtomicBool,
}

/// A monitor in the network namespace of the thread that opened it. It ends when it is dropped.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<Shared>,
    reader: Option<JoinHandle<()>>,
}

impl Watch {
    /// Opens a monitor of the namespace of the calling thread.
    ///
    /// # Errors
    /// There is no netlink socket, or a group cannot be joined.
    pub fn open(tables: &'static [Table]) -> Result<Watch> {
        let socket = listen(BUFFER)?;
        let now = Instant::now();
        let there = vec![[false; TABLES.len()]; MOST];
        let (count, reached) = ([0; TABLES.len()], None);
        let seen =
            Observed { tables, there, count, writes: 0, last: now, link_gone: None, lost: false, goal: None, reached };
        let shared = Arc::new(Shared { seen: Mutex::new(seen), changed: Condvar::new(), stop: AtomicBool::new(false) });
        let twin = Arc::clone(&shared);
        let reader = std::thread::Builder::new().name("watch".into()).spawn(move || read(&socket, &twin));
        Ok(Watch { shared, reader: Some(reader.context("start the watch")?) })
    }

    /// Sets what is waited for next. What happened before does not count, except for [`Goal::Peers`].
    pub fn expect(&self, goal: Goal) {
        let mut seen = self.lock();
        (seen.goal, seen.reached) = (Some(goal), None);
        if seen.fulfilled() {
            seen.reached = Some(Instant::now());
        }
    }

    /// Waits until the goal is reached, and returns when that was. `None` if it was not reached in time.
    ///
    /// # Errors
    /// Notifications were lost, so the counts are wrong.
    pub fn wait(&self, limit: Duration) -> Result<Option<Instant>> {
        let seen = self.lock();
        let open = |seen: &mut Observed| seen.reached.is_none() && !seen.lost;
        let (seen, _) =
            self.shared.changed.wait_timeout_while(seen, limit, open).unwrap_or_else(PoisonError::into_inner);
        anyhow::ensure!(!seen.lost, "the bench's own netlink monitor lost notifications");
        Ok(seen.reached)
    }

    /// Waits until nothing was written for the time `calm`. Returns when the last write was, if there was one.
    ///
    /// # Errors
    /// As [`Watch::wait`].
    pub fn quiet(&self, calm: Duration, limit: Duration) -> Result<Option<Instant>> {
        let begin = Instant::now();
        loop {
            let (writes, last) = self.writes();
            let since = if writes > 0 { last.max(begin) } else { begin };
            let idle = since.elapsed();
            if idle >= calm || begin.elapsed() >= limit {
                return Ok((writes > 0).then_some(last));
            }
            self.expect(Goal::First);
            self.wait(calm - idle)?;
        }
    }

    /// Forgets which entries are there. When their device is deleted, the kernel does not announce each entry.
    pub fn forget(&self, tables: &[Table]) {
        let mut seen = self.lock();
        for table in tables.iter().map(|table| *table as usize) {
            seen.there.iter_mut().for_each(|flags| flags[table] = false);
            seen.count[table] = 0;
        }
    }

    /// Sets the count of writes to zero.
    pub fn reset_writes(&self) {
        self.lock().writes = 0;
    }

    /// Returns the number of writes so far, and when the last one was.
    pub fn writes(&self) -> (usize, Instant) {
        let seen = self.lock();
        (seen.writes, seen.last)
    }

    /// Returns when the kernel last announced that a link was deleted.
    pub fn link_gone(&self) -> Option<Instant> {
        self.lock().link_gone
    }

    /// Returns the number of peers with entries in each table, for messages.
    pub fn counts(&self) -> String {
        let seen = self.lock();
        let part = |table: &Table| format!("{} {table:?}", seen.count[*table as usize]);
        seen.tables.iter().map(part).collect::<Vec<_>>().join(", ")
    }

    fn lock(&self) -> MutexGuard<'_, Observed> {
        self.shared.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(reader) = self.reader.take() {
            // It panics only because of a bug of the bench, which the wait would have shown.
            let _ = reader.join();
        }
    }
}

/// Opens a monitor socket with a time limit for each read, so that its thread can end.
///
/// # Errors
/// As [`Watch::open`].
pub fn listen(buffer: usize) -> Result<Socket> {
    let mut socket = Socket::new(NETLINK_ROUTE).context("open a netlink monitor")?;
    force_buffer(&socket, buffer);
    socket.bind(&SocketAddr::new(0, 0)).context("bind a netlink monitor")?;
    for group in GROUPS {
        socket.add_membership(group).with_context(|| format!("join netlink group {group}"))?;
    }
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::milliseconds(50)).context("bound a netlink read")?;
    Ok(socket)
}

/// Reads the next datagram. Returns `Ok(None)` if none came in time.
///
/// # Errors
/// ENOBUFS if notifications were lost.
pub fn next<'a>(socket: &Socket, buffer: &'a mut [u8]) -> nix::Result<Option<&'a [u8]>> {
    match recv(socket.as_raw_fd(), buffer, MsgFlags::empty()) {
        Ok(n) => Ok(Some(&buffer[..n])),
        Err(Errno::EAGAIN | Errno::EINTR) => Ok(None),
        Err(e) => Err(e),
    }
}

fn read(socket: &Socket, shared: &Shared) {
    let mut buffer = vec![0; DATAGRAM];
    while !shared.stop.load(Ordering::Relaxed) {
        let got = next(socket, &mut buffer);
        let now = Instant::now();
        let mut seen = shared.seen.lock().unwrap_or_else(PoisonError::into_inner);
        match got {
            Ok(None) => continue,
            Ok(Some(bytes)) => messages(bytes).for_each(|m| seen.hear(&m, now)),
            Err(_) => seen.lost = true,
        }
        if seen.reached.is_some() || seen.lost {
            shared.changed.notify_all();
        }
    }
}

/// Returns the entry of a peer that a message is about, and whether it is there now. `None` for all other messages.
pub fn entry(m: &Message<'_>) -> Option<(Table, usize, bool)> {
    match m.kind {
        libc::RTM_NEWROUTE | libc::RTM_DELROUTE => {
            let route = decode::route(m.payload)?;
            let number = by_inner(route.net.network())?;
            let table = if route.net.addr().is_ipv4() { Table::Route } else { Table::Route6 };
            Some((table, number, m.kind == libc::RTM_NEWROUTE))
        }
        libc::RTM_NEWNEIGH | libc::RTM_DELNEIGH => {
            let neigh = decode::neighbour(m.payload)?;
            let here = m.kind == libc::RTM_NEWNEIGH && neigh.lasting;
            if neigh.fdb {
                let (number, v6) = by_mac(neigh.mac?)?;
                return Some((if v6 { Table::Fdb6 } else { Table::Fdb }, number, here));
            }
            let dst = neigh.dst?;
            let table = if dst.is_ipv4() { Table::Neigh } else { Table::Neigh6 };
            Some((table, by_inner(dst)?, here))
        }
        _ => None,
    }
}

/// Returns true for a change that a program made, and false for what the kernel learns or announces by itself.
fn is_write(m: &Message<'_>) -> bool {
    match m.kind {
        libc::RTM_NEWROUTE | libc::RTM_DELROUTE => decode::route(m.payload).is_some(),
        libc::RTM_NEWNEIGH | libc::RTM_DELNEIGH => entry(m).is_some(),
        libc::RTM_NEWLINK | libc::RTM_DELLINK | libc::RTM_NEWADDR | libc::RTM_DELADDR => true,
        RTM_NEWNEXTHOP | RTM_DELNEXTHOP => true,
        _ => false,
    }
}

impl Observed {
    fn hear(&mut self, m: &Message<'_>, now: Instant) {
        if is_write(m) {
            (self.writes, self.last) = (self.writes + 1, now);
        }
        if m.kind == libc::RTM_DELLINK {
            self.link_gone = Some(now);
        }
        let Some((table, number, there)) = entry(m) else { return };
        let flag = &mut self.there[number][table as usize];
        match (*flag, there) {
            (false, true) => self.count[table as usize] += 1,
            (true, false) => self.count[table as usize] -= 1,
            _ => {}
        }
        *flag = there;
        let hit = match self.goal {
            Some(Goal::First) => there,
            Some(Goal::Written(t, n)) => there && (t, n) == (table, number),
            Some(Goal::Peers(_)) => self.fulfilled(),
            None => false,
        };
        if hit && self.reached.is_none() {
            self.reached = Some(now);
        }
    }

    fn fulfilled(&self) -> bool {
        match self.goal {
            Some(Goal::Peers(n)) => self.tables.iter().all(|table| self.count[*table as usize] == n),
            _ => false,
        }
    }
}
