// SPDX-License-Identifier: Apache-2.0
//! The floor: what the kernel and the store cost any program. The same entries are written as prepared batches through a bare netlink
//! socket, and bare watchers write one batch for each notification.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use etcd_client::{EventType, WatchOptions};
use nix::libc;
use weft::kernel::encode::{self, Exit, NewNexthop};
use weft::kernel::rt::{PLAIN, ifinfomsg};
use weft::kernel::socket::{NLM_F_ACK, Netlink};
use weft::kernel::wire::{Writer, messages};

use crate::peers::{Backend, Peer, Table, by_inner};
use crate::process::cpu_of;
use crate::site::Node;
use crate::store::{connect, runtime};
use crate::watch;

/// Messages per datagram. More of them were not faster when this was measured.
const BATCH: usize = 128;
/// The most messages that one peer needs, with both families.
const PER_PEER: usize = 8;
/// The protocol of the routes, as the agents set it.
const PROTOCOL: u8 = 90;
const ID: u32 = 0x1000_0000;
/// The receive buffer of the bare monitor, in bytes.
const BUFFER: usize = 64 << 20;
const DATAGRAM: usize = 64 << 10;

/// A datagram and the number of its last message, which asks for the acknowledgement.
pub type Datagram = (Vec<u8>, u32);

/// Makes datagrams from peers.
pub struct Batcher {
    backend: Backend,
    /// The index of the outgoing device for each family.
    devices: [u32; 2],
    writer: Writer,
    queued: usize,
    seq: u32,
    done: Vec<Datagram>,
}

impl Batcher {
    /// Returns a batcher for a node that has its devices.
    ///
    /// # Errors
    /// A device is missing.
    pub fn new(node: &Node, backend: Backend) -> Result<Batcher> {
        let devices = match backend {
            Backend::HostGw | Backend::Udp | Backend::Wireguard => [node.index("eth0")?; 2],
            Backend::Vxlan => [node.index("flannel.1")?; 2],
            Backend::VxlanDual => [node.index("flannel.1")?, node.index("flannel-v6.1")?],
        };
        Ok(Batcher { backend, devices, writer: Writer::default(), queued: 0, seq: 0, done: Vec::new() })
    }

    /// Adds all entries of one peer.
    ///
    /// # Errors
    /// As [`Peer::subnet`].
    pub fn add(&mut self, peer: Peer) -> Result<()> {
        self.room();
        for v6 in self.backend.families().iter().copied() {
            for table in self.tables(v6) {
                self.entry(peer, *table)?;
            }
        }
        Ok(())
    }

    /// Adds the entries that change when the peer's published address changes.
    ///
    /// # Errors
    /// As [`Peer::subnet`].
    pub fn change(&mut self, peer: Peer) -> Result<()> {
        self.room();
        if self.backend == Backend::HostGw {
            self.entry(peer, Table::Route)?;
            encode::delete_nexthop(&mut self.writer, id(Peer { moved: !peer.moved, ..peer }));
            self.end();
            return Ok(());
        }
        for v6 in self.backend.families().iter().copied() {
            self.entry(peer, self.tables(v6)[0])?;
        }
        Ok(())
    }

    /// Removes all entries of a peer.
    ///
    /// # Errors
    /// As [`Peer::subnet`].
    pub fn remove(&mut self, peer: Peer) -> Result<()> {
        self.room();
        for v6 in self.backend.families().iter().copied() {
            let device = self.devices[usize::from(v6)];
            let (net, metric) = (peer.subnet(v6)?, if v6 { 1024 } else { 0 });
            let exit = if v6 {
                Exit::Gateway { via: peer.inner(v6), index: device, onlink: true }
            } else {
                Exit::Nexthop(id(peer))
            };
            encode::route(&mut self.writer, net, metric, exit, None);
            self.end();
            if !v6 {
                encode::delete_nexthop(&mut self.writer, id(peer));
                self.end();
            }
            if self.backend != Backend::HostGw {
                encode::neighbour(&mut self.writer, device, peer.inner(v6), None);
                self.end();
                encode::fdb(&mut self.writer, device, peer.mac(v6), None);
                self.end();
            }
        }
        Ok(())
    }

    /// Adds one entry as it should be.
    ///
    /// # Errors
    /// As [`Peer::subnet`].
    pub fn entry(&mut self, peer: Peer, table: Table) -> Result<()> {
        let v6 = table.is_v6();
        let device = self.devices[usize::from(v6)];
        match table {
            Table::Fdb | Table::Fdb6 => encode::fdb(&mut self.writer, device, peer.mac(v6), Some(peer.outer(v6))),
            Table::Neigh | Table::Neigh6 => {
                encode::neighbour(&mut self.writer, device, peer.inner(v6), Some(peer.mac(v6)));
            }
            Table::Route => {
                let host_gw = self.backend == Backend::HostGw;
                let via = if host_gw { peer.outer(false) } else { peer.inner(false) };
                let new = NewNexthop { id: id(peer), protocol: PROTOCOL, via, index: device, onlink: !host_gw };
                encode::new_nexthop(&mut self.writer, &new);
                self.end();
                encode::route(&mut self.writer, peer.subnet(false)?, 0, Exit::Nexthop(id(peer)), Some(PROTOCOL));
            }
            Table::Route6 => {
                let exit = Exit::Gateway { via: peer.inner(true), index: device, onlink: true };
                encode::route(&mut self.writer, peer.subnet(true)?, 1024, exit, Some(PROTOCOL));
            }
        }
        self.end();
        Ok(())
    }

    /// Adds one entry that was deleted. The nexthop of a deleted route is still there.
    ///
    /// # Errors
    /// As [`Peer::subnet`].
    pub fn restore(&mut self, peer: Peer, table: Table) -> Result<()> {
        if table != Table::Route {
            return self.entry(peer, table);
        }
        encode::route(&mut self.writer, peer.subnet(false)?, 0, Exit::Nexthop(id(peer)), Some(PROTOCOL));
        self.end();
        Ok(())
    }

    /// Deletes one entry of any program, as a fault.
    ///
    /// # Errors
    /// As [`Peer::subnet`].
    pub fn break_entry(&mut self, peer: Peer, table: Table) -> Result<()> {
        let v6 = table.is_v6();
        let device = self.devices[usize::from(v6)];
        match table {
            Table::Fdb | Table::Fdb6 => encode::fdb(&mut self.writer, device, peer.mac(v6), None),
            Table::Neigh | Table::Neigh6 => encode::neighbour(&mut self.writer, device, peer.inner(v6), None),
            Table::Route | Table::Route6 => {
                encode::route(&mut self.writer, peer.subnet(v6)?, if v6 { 1024 } else { 0 }, Exit::Any, None);
            }
        }
        self.end();
        Ok(())
    }

    /// Takes the datagrams that were made so far.
    pub fn take(&mut self) -> Vec<Datagram> {
        self.close();
        std::mem::take(&mut self.done)
    }

    fn tables(&self, v6: bool) -> &'static [Table] {
        match (self.backend, v6) {
            (Backend::HostGw, _) => &[Table::Route],
            (Backend::Udp | Backend::Wireguard, _) => &[],
            (_, false) => &[Table::Fdb, Table::Neigh, Table::Route],
            (_, true) => &[Table::Fdb6, Table::Neigh6, Table::Route6],
        }
    }

    fn room(&mut self) {
        if self.queued + PER_PEER > BATCH {
            self.close();
        }
    }

    fn end(&mut self) {
        self.seq += 1;
        self.writer.end(self.seq);
        self.queued += 1;
    }

    fn close(&mut self) {
        if self.queued > 0 {
            self.writer.flag_last(NLM_F_ACK);
            self.done.push((self.writer.bytes().to_vec(), self.seq));
            self.writer.clear();
            self.queued = 0;
        }
    }
}

fn id(peer: Peer) -> u32 {
    ID + peer.number as u32 + if peer.moved { 1 << 20 } else { 0 }
}

/// Sends datagrams. The kernel must accept each message.
///
/// # Errors
/// The kernel refused a message.
pub fn write(netlink: &mut Netlink, datagrams: &[Datagram]) -> Result<()> {
    for (bytes, last) in datagrams {
        let replies = netlink.exchange(bytes, *last).context("write a batch")?;
        if let Some(refusal) = replies.refused.first() {
            bail!("the kernel refused an entry: {} {}", refusal.errno, refusal.text);
        }
        ensure!(replies.complete, "an acknowledgement was lost");
    }
    Ok(())
}

/// A bare watcher on a thread of its own. [`Bare::stop`] shows whether it failed.
pub struct Bare {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Duration>>,
}

impl Bare {
    /// Ends the watcher, and returns the CPU time of its thread.
    ///
    /// # Errors
    /// It had failed before.
    pub fn stop(self) -> Result<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().ok().context("a bare watcher panicked")?
    }

    /// Watches etcd, and writes one batch for each of its answers. The entries of peers below `first_new` are already in the kernel.
    ///
    /// # Errors
    /// etcd does not answer, or a device is missing.
    pub fn of_store(node: &Node, backend: Backend, first_new: usize) -> Result<Bare> {
        let stop = Arc::new(AtomicBool::new(false));
        let (twin, batcher) = (Arc::clone(&stop), Batcher::new(node, backend)?);
        let (ready, open) = std::sync::mpsc::sync_channel(1);
        let thread = node.run(move || {
            let netlink = Netlink::open();
            std::thread::spawn(move || runtime()?.block_on(follow((batcher, first_new), netlink?, &twin, ready)))
        })?;
        let bare = Bare { stop, thread };
        match open.recv() {
            Ok(()) => Ok(bare),
            Err(_) => Err(bare.stop().err().context("a bare watcher ended")?),
        }
    }

    /// Watches the kernel, and adds deleted entries again.
    ///
    /// # Errors
    /// A socket cannot be opened, or a device is missing.
    pub fn of_kernel(node: &Node, backend: Backend) -> Result<Bare> {
        let stop = Arc::new(AtomicBool::new(false));
        let (twin, mut batcher) = (Arc::clone(&stop), Batcher::new(node, backend)?);
        let thread = node.run(move || -> Result<JoinHandle<Result<Duration>>> {
            let (socket, mut netlink) = (watch::listen(BUFFER)?, Netlink::open()?);
            Ok(std::thread::spawn(move || {
                let mut buffer = vec![0; DATAGRAM];
                while !twin.load(Ordering::Relaxed) {
                    let Some(bytes) = watch::next(&socket, &mut buffer).context("read a monitor")? else { continue };
                    for (table, number, there) in messages(bytes).filter_map(|m| watch::entry(&m)) {
                        if !there {
                            batcher.restore(Peer::new(number), table)?;
                        }
                    }
                    write(&mut netlink, &batcher.take())?;
                }
                cpu_of("thread-self")
            }))
        })??;
        Ok(Bare { stop, thread })
    }
}

async fn follow(
    (mut batcher, first_new): (Batcher, usize),
    mut netlink: Netlink,
    stop: &AtomicBool,
    ready: std::sync::mpsc::SyncSender<()>,
) -> Result<Duration> {
    let mut client = connect().await?;
    let prefix = "/coreos.com/network/subnets/";
    let mut stream = client.watch(prefix, Some(WatchOptions::new().with_prefix())).await.context("watch leases")?;
    ready.send(()).ok().context("nobody waits")?;
    // The peers that this watcher has added, and whether their address has changed since then.
    let mut known: HashMap<usize, bool> = HashMap::new();
    while !stop.load(Ordering::Relaxed) {
        let Ok(message) = tokio::time::timeout(Duration::from_millis(50), stream.message()).await else { continue };
        let message = message.context("read a watch")?.context("the watch ended")?;
        for event in message.events() {
            let Some(kv) = event.kv() else { continue };
            let id = kv.key_str().context("read a key")?.trim_start_matches(prefix);
            let inner = id.split_once('-').and_then(|(ip, _)| ip.parse().ok());
            let Some(number) = inner.and_then(by_inner) else { continue };
            match (event.event_type(), known.get(&number)) {
                (EventType::Delete, moved) => {
                    // Of a host-gw peer only the nexthop changes with its address.
                    let moved = batcher.backend == Backend::HostGw && moved == Some(&true);
                    batcher.remove(Peer { number, moved })?;
                    known.remove(&number);
                }
                (EventType::Put, None) if number < first_new => {}
                (EventType::Put, None) => {
                    batcher.add(Peer::new(number))?;
                    known.insert(number, false);
                }
                (EventType::Put, Some(_)) => {
                    batcher.change(Peer { number, moved: true })?;
                    known.insert(number, true);
                }
            }
        }
        write(&mut netlink, &batcher.take())?;
    }
    cpu_of("thread-self")
}

/// Deletes a link, and returns when it is gone with everything that was on it.
///
/// # Errors
/// As [`write`].
pub fn delete_link(netlink: &mut Netlink, index: u32) -> Result<()> {
    let mut w = Writer::default();
    w.begin(libc::RTM_DELLINK, PLAIN | NLM_F_ACK, &ifinfomsg(index, 0, 0));
    w.end(1);
    write(netlink, &[(w.bytes().to_vec(), 1)])
}
