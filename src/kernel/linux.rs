// SPDX-License-Identifier: Apache-2.0
//! The kernel adapter: its socket, and what it knows about devices and nexthop objects. How it observes is in [`super::observe`],
//! how it writes in [`super::write`].

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use nix::errno::Errno;
use nix::libc;
use nix::net::if_::if_nametoindex;
use weft_backends::diff::Op;
use weft_backends::state::{Key, Name, Route};
use weft_backends::wireguard_key::{DeviceSecrets, PeerId};

use super::encode::{self, Exit};
use super::fence::FenceTable;
use super::guard::GuardTable;
use super::nexthop::{self, Nexthops, Shared};
use super::socket::{NLM_F_ACK, Netlink};
use super::wire::Writer;
use super::wireguard::WireGuard;
use super::{Outcome, errno};

/// Messages per datagram. With this number the measured speed no longer grows, and the send buffer holds many times more.
pub(super) const BATCH: usize = 128;
/// The cause of an operation that is tried again because its device was deleted and created again since it was observed.
pub(super) const CREATED_BY_ANOTHER: &str = "another program has just created a device with this name";

/// The options of [`LinuxKernel::open`].
#[derive(Debug, Clone)]
pub struct LinuxOptions {
    /// Send IPv4 routes through nexthop objects if the kernel has them.
    pub nexthop_objects: bool,
    /// Which agent of this host it is. Each agent has a range of nexthop ids.
    pub instance: u8,
    /// The `rtm_protocol` and `nh_protocol` of everything that is written.
    pub protocol: u8,
    /// The alias (ifalias) of the links that are created.
    pub alias: String,
}

/// The kernel of the network namespace in which this was opened.
#[derive(Debug)]
pub struct LinuxKernel {
    pub(super) netlink: Netlink,
    pub(super) options: LinuxOptions,
    pub(super) index: Shared,
    /// True if IPv4 routes go through nexthop objects: this is wanted, and the kernel has them.
    pub(super) nexthops: bool,
    /// True after the nexthops of an earlier run were read, until some of ours could not be deleted.
    pub(super) adopted: bool,
    /// The routes of which the kernel has several with the same key, and how many.
    pub(super) doubled: HashMap<Key, usize>,
    /// The routes with the same key as a route that the kernel itself created and that must stay.
    pub(super) shared_with_kernel: HashSet<Key>,
    /// The index of each device, as it was asked for during this `apply`.
    pub(super) devices: HashMap<Name, u32>,
    /// The index of each device, as it was observed last or created by this agent since then.
    pub(super) known: HashMap<Name, u32>,
    /// The indexes of the devices that this agent created, or that had its alias in an observation. The kernel does not use an index
    /// twice.
    pub(super) made: HashSet<u32>,
    /// The tunnel guard, in nftables.
    pub(super) guard: GuardTable,
    /// The fence for forwarded packets, in policy rules.
    pub(super) fence: FenceTable,
    /// The socket for WireGuard devices, if one was needed so far.
    pub(super) wireguard: Option<WireGuard>,
    /// The secrets of the WireGuard devices.
    pub(super) secrets: Option<DeviceSecrets>,
    /// The endpoint of each WireGuard peer that was written last.
    pub(super) endpoints: HashMap<(Name, PeerId), SocketAddr>,
}

impl LinuxKernel {
    /// Opens the writing socket in the network namespace of this thread, and asks the kernel once if it has nexthop objects.
    ///
    /// # Errors
    /// The socket cannot be opened, or the question cannot be asked.
    pub fn open(options: LinuxOptions) -> io::Result<LinuxKernel> {
        let mut netlink = Netlink::open()?;
        let mut ask = || netlink.dump(encode::RTM_GETNEXTHOP, |w, _, flags| encode::dump::nexthops(w, flags));
        let nexthops = options.nexthop_objects && nexthop::supported(ask().map(drop))?;
        let index = Rc::new(RefCell::new(Nexthops::new(options.instance)));
        let (adopted, doubled, shared_with_kernel) = (false, HashMap::new(), HashSet::new());
        let (devices, known, made) = Default::default();
        let guard = GuardTable::new(&options.alias);
        let fence = FenceTable::new(&options.alias, options.protocol);
        Ok(LinuxKernel {
            netlink,
            options,
            index,
            nexthops,
            adopted,
            doubled,
            shared_with_kernel,
            devices,
            known,
            made,
            guard,
            fence,
            wireguard: None,
            secrets: None,
            endpoints: HashMap::new(),
        })
    }

    /// Returns what the monitor of the same agent needs to know about nexthops.
    pub fn shared(&self) -> Shared {
        Rc::clone(&self.index)
    }

    /// Returns the index of a link. It is asked for once in each `apply`, because a link that is re-created gets another index.
    pub(super) fn device(&mut self, name: Name) -> io::Result<Option<u32>> {
        if let Some(index) = self.devices.get(&name) {
            return Ok(Some(*index));
        }
        // Not by netlink: its answer describes the whole link, which takes longer, and the events wait for it.
        match if_nametoindex(name.as_bytes()) {
            Ok(index) => {
                self.devices.insert(name, index);
                Ok(Some(index))
            }
            Err(Errno::ENODEV) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns the index of the device that an entry belongs to. It must be the device that was observed, not one that another program
    /// has created with the same name since then.
    pub(super) fn resolve(&mut self, op: &Op, name: Name) -> Result<u32, Outcome> {
        let known = self.known.get(&name).copied();
        match self.device(name) {
            Ok(Some(index)) if known.is_some_and(|known| known != index) => match op {
                Op::Remove(..) => Err(Outcome::Done),
                _ => Err(errno::retry(op, CREATED_BY_ANOTHER)),
            },
            Ok(Some(index)) => Ok(index),
            // The entries of a device are gone with it.
            Ok(None) if matches!(op, Op::Remove(..)) => Err(Outcome::Done),
            Ok(None) => Err(errno::retry(op, &format!("no link {name}"))),
            Err(e) => Err(errno::retry(op, &e.to_string())),
        }
    }

    /// Returns how packets leave the host on this route.
    pub(super) fn exit(&mut self, op: &Op, route: Route) -> Result<Exit, Outcome> {
        Ok(match route {
            Route::Unicast { via, dev, onlink } => Exit::Gateway { via, index: self.resolve(op, dev)?, onlink },
            Route::Device { dev } => Exit::Device(self.resolve(op, dev)?),
            Route::Blackhole => Exit::Type(libc::RTN_BLACKHOLE),
            Route::Unreachable => Exit::Type(libc::RTN_UNREACHABLE),
            Route::Other => Exit::Any,
        })
    }

    /// Deletes nexthops of this agent. One that the kernel refuses to delete is gone already. If the message cannot be sent, the next
    /// observation looks for nexthops that no route uses, because the index has forgotten them.
    pub(super) fn delete_nexthops(&mut self, ids: &[u32]) {
        for slice in ids.chunks(BATCH) {
            let (mut w, mut last) = (Writer::default(), 0);
            for id in slice {
                self.index.borrow_mut().forget(*id);
                encode::delete_nexthop(&mut w, *id);
                last = self.netlink.next_seq();
                w.end(last);
            }
            w.flag_last(NLM_F_ACK);
            if let Err(e) = self.netlink.exchange(w.bytes(), last) {
                tracing::debug!(error = %e, "delete nexthops");
                self.adopted = false;
            }
        }
    }
}
