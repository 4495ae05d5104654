// SPDX-License-Identifier: Apache-2.0
//! [`Kernel`] on Linux: operations become messages, 128 to a datagram, and refusals find their way back to the operation.
//!
//! Invariant: an old nexthop is deleted only after its route was seen to have moved, since the kernel takes the routes of a
//! deleted nexthop along.
//!
//! A route is first created, which is refused where one stands already; only then is that one looked at, and replaced unless the
//! kernel made it for an address of this host.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::rc::Rc;

use nix::errno::Errno;
use nix::libc;
use nix::net::if_::if_nametoindex;
use weft_backends::diff::Op;
use weft_backends::state::{Key, Name, Observed, Route, Value};

use super::encode::{self, Exit, NewNexthop};
use super::fence::FenceTable;
use super::guard::GuardTable;
use super::links::MADE_ANEW;
use super::nexthop::{Index, Shared};
use super::run::{Move, Run, Step};
use super::socket::{NLM_F_ACK, Netlink};
use super::wire::Writer;
use super::{Kernel, Machine, Outcome, errno, nexthop};

/// Messages per datagram: the flat part of the measured curve, far from what the send buffer holds.
const BATCH: usize = 128;
/// The most messages that one operation needs.
const PER_OP: usize = 6;

/// What the adapter must be told.
#[derive(Debug, Clone)]
pub struct LinuxOptions {
    /// Send IPv4 routes through nexthop objects where the kernel has them.
    pub nexthop_objects: bool,
    /// Which agent of this host: separates the ranges of nexthop ids.
    pub instance: u8,
    /// `rtm_protocol` and `nh_protocol` of what we write.
    pub protocol: u8,
    /// ifalias of the links that we create.
    pub alias: String,
}

/// The kernel of the network namespace in which it was opened.
#[derive(Debug)]
pub struct LinuxKernel {
    pub(super) netlink: Netlink,
    pub(super) options: LinuxOptions,
    pub(super) index: Shared,
    /// True when routes go through nexthop objects: wanted and supported.
    pub(super) nexthops: bool,
    /// Whether the nexthops of an earlier run have been adopted.
    pub(super) adopted: bool,
    /// Routes that were observed more than once under their key: how often.
    pub(super) doubled: HashMap<Key, usize>,
    /// Routes that were observed under their key together with one of the kernel's own, which must stay.
    pub(super) beside_kernels: HashSet<Key>,
    devices: HashMap<Name, u32>,
    /// Devices as they were last observed, or made by us since: by name, which index.
    pub(super) known: HashMap<Name, u32>,
    /// Indexes of the devices that this agent made, or that bore its alias at some look. An index is not used twice.
    pub(super) made: HashSet<u32>,
    /// The tunnel guard, in nftables.
    pub(super) guard: GuardTable,
    /// The fence for forwarded packets, in policy rules.
    pub(super) fence: FenceTable,
}

impl LinuxKernel {
    /// Opens the writing socket in the namespace of this thread and asks once whether the kernel has nexthop objects.
    ///
    /// # Errors
    /// No netlink socket, or the question could not be asked.
    pub fn open(options: LinuxOptions) -> io::Result<LinuxKernel> {
        let mut netlink = Netlink::open()?;
        let mut ask = || netlink.dump(encode::RTM_GETNEXTHOP, |w, _, flags| encode::dump::nexthops(w, flags));
        let nexthops = options.nexthop_objects && nexthop::supported(ask().map(drop))?;
        let index = Rc::new(RefCell::new(Index::new(options.instance)));
        let (adopted, doubled, beside_kernels) = (false, HashMap::new(), HashSet::new());
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
            beside_kernels,
            devices,
            known,
            made,
            guard,
            fence,
        })
    }

    /// What the monitor of the same agent needs to know of nexthops.
    pub fn shared(&self) -> Shared {
        Rc::clone(&self.index)
    }

    /// Index of a link, asked for once per `apply`: an index changes when a link is re-created.
    pub(super) fn device(&mut self, name: Name) -> io::Result<Option<u32>> {
        if let Some(index) = self.devices.get(&name) {
            return Ok(Some(*index));
        }
        // Not by netlink, whose answer describes the whole link: events would wait for that.
        match if_nametoindex(name.as_bytes()) {
            Ok(index) => {
                self.devices.insert(name, index);
                Ok(Some(index))
            }
            Err(Errno::ENODEV) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Index of the device that an entry is to stand on: the one that was observed, not one that somebody made anew since.
    pub(super) fn resolve(&mut self, op: &Op, name: Name) -> Result<u32, Outcome> {
        let known = self.known.get(&name).copied();
        match self.device(name) {
            Ok(Some(index)) if known.is_some_and(|known| known != index) => match op {
                Op::Remove(..) => Err(Outcome::Done),
                _ => Err(errno::retry(op, MADE_ANEW)),
            },
            Ok(Some(index)) => Ok(index),
            // Nothing can be on a device that is not there.
            Ok(None) if matches!(op, Op::Remove(..)) => Err(Outcome::Done),
            Ok(None) => Err(errno::retry(op, &format!("no link {name}"))),
            Err(e) => Err(errno::retry(op, &e.to_string())),
        }
    }

    fn queue(&mut self, run: &mut Run<'_>, i: usize) -> Result<(), Outcome> {
        let op = &run.ops[i];
        let (key, value, add) = match op {
            Op::Ensure(key, value) | Op::Recreate(key, value) => (*key, value, true),
            Op::Remove(key, value) => (*key, value, false),
        };
        match (key, value) {
            (Key::Fdb(name, mac), Value::Fdb(dst)) => {
                let index = self.resolve(op, name)?;
                let mut shared = self.index.borrow_mut();
                if add {
                    shared.fdb.insert((index, mac));
                } else {
                    shared.fdb.remove(&(index, mac));
                }
                encode::fdb(&mut run.writer, index, mac, add.then_some(*dst));
            }
            (Key::Neigh(name, ip), Value::Neigh(mac)) => {
                let index = self.resolve(op, name)?;
                encode::neighbour(&mut run.writer, index, ip, add.then_some(*mac));
            }
            (Key::Open(ip), _) => self.fence.open(&mut run.writer, ip, add),
            (Key::Route(..), Value::Route(route)) if add => return self.put_route(run, i, *route),
            (Key::Route(..), Value::Route(route)) => return self.remove_route(run, i, *route),
            _ => return Err(errno::fatal(op, "the value does not fit the key")),
        }
        run.push(&mut self.netlink, i, Step::Main);
        Ok(())
    }

    pub(super) fn exit(&mut self, op: &Op, route: Route) -> Result<Exit, Outcome> {
        Ok(match route {
            Route::Unicast { via, dev, onlink } => Exit::Gateway(via, self.resolve(op, dev)?, onlink),
            Route::Device { dev } => Exit::Device(self.resolve(op, dev)?),
            Route::Blackhole => Exit::Type(libc::RTN_BLACKHOLE),
            Route::Unreachable => Exit::Type(libc::RTN_UNREACHABLE),
            Route::Other => Exit::Any,
        })
    }

    fn put_route(&mut self, run: &mut Run<'_>, i: usize, route: Route) -> Result<(), Outcome> {
        let op = &run.ops[i];
        let (Op::Ensure(key, _) | Op::Recreate(key, _) | Op::Remove(key, _)) = op;
        let Key::Route(net, metric) = *key else { return Err(errno::fatal(op, "not a route")) };
        let mut exit = self.exit(op, route)?;
        if matches!(exit, Exit::Any) {
            return Err(errno::fatal(op, "not a route that weft writes"));
        }
        let doubled = self.doubled.remove(key).unwrap_or(0);
        for _ in 0..doubled.min(PER_OP - 2) {
            encode::route(&mut run.writer, net, metric, Exit::Any, None);
            run.push(&mut self.netlink, i, Step::Clear);
        }
        let protocol = self.options.protocol;
        let (mut new, mut old) = (None, self.index.borrow().of(key));
        if let (true, Exit::Gateway(via, index, onlink)) = (self.nexthops && net.addr().is_ipv4(), exit) {
            let bound = self.index.borrow_mut().bind(*key);
            let Some((id, before)) = bound else { return Err(errno::retry(op, "no free nexthop id")) };
            encode::new_nexthop(&mut run.writer, &NewNexthop { id, protocol, via, index, onlink });
            run.push(&mut self.netlink, i, Step::Nexthop);
            exit = Exit::Nexthop(id);
            (new, old) = (Some(id), before);
        }
        encode::new_route(&mut run.writer, net, metric, exit, protocol);
        run.push(&mut self.netlink, i, Step::Main);
        if new.is_some() || old.is_some() {
            run.moves.push(Move { op: i, key: *key, new, old });
        }
        Ok(())
    }

    fn remove_route(&mut self, run: &mut Run<'_>, i: usize, route: Route) -> Result<(), Outcome> {
        let op = &run.ops[i];
        let (Op::Ensure(key, _) | Op::Recreate(key, _) | Op::Remove(key, _)) = op;
        let Key::Route(net, metric) = *key else { return Err(errno::fatal(op, "not a route")) };
        let old = self.index.borrow().of(key);
        // The kernel matches a route with a nexthop by the id alone, and one without never by an id.
        let exit = match old {
            Some(id) => Exit::Nexthop(id),
            None => self.exit(op, route)?,
        };
        if self.beside_kernels.contains(key) {
            encode::delete_route_of(&mut run.writer, net, metric, exit, self.options.protocol);
        } else {
            encode::route(&mut run.writer, net, metric, exit, None);
        }
        run.push(&mut self.netlink, i, Step::Main);
        if old.is_some() {
            run.moves.push(Move { op: i, key: *key, new: None, old });
        }
        Ok(())
    }

    pub(super) fn flush(&mut self, run: &mut Run<'_>) {
        let Some((last, _, _)) = run.owners.last().copied() else { return };
        run.writer.flag_last(NLM_F_ACK);
        let answer = self.netlink.exchange(run.writer.bytes(), last);
        let owners = std::mem::take(&mut run.owners);
        run.writer.clear();
        let lost = match answer {
            Ok(replies) => {
                for refusal in &replies.refused {
                    if let Some((_, op, step)) = owners.iter().find(|o| o.0 == refusal.seq) {
                        run.refuse(*op, *step, refusal);
                    }
                }
                (!replies.complete).then(|| "acknowledgement lost".to_owned())
            }
            Err(e) => Some(e.to_string()),
        };
        if let Some(cause) = lost {
            for (_, op, _) in owners {
                if run.outcomes[op] == Outcome::Done {
                    run.outcomes[op] = errno::retry(&run.ops[op], &cause);
                }
                // The route may stand on the old nexthop or on the new one: both stay, the next look clears the orphan.
                run.moves.retain(|m| m.op != op);
            }
        }
        if !run.standing.is_empty() {
            self.replace_standing(run);
        }
    }

    /// Deletes the nexthops that no route needs any more: the old ones of what moved, the new ones of what did not.
    fn settle(&mut self, run: &mut Run<'_>) {
        let mut waste = Vec::new();
        for m in std::mem::take(&mut run.moves) {
            let mut shared = self.index.borrow_mut();
            let taken = run.taken.contains(&m.op);
            match (m.new, &run.outcomes[m.op]) {
                (_, Outcome::Done) => {
                    if m.new.is_none() && shared.of(&m.key) == m.old {
                        shared.saw_plain(&m.key);
                    }
                    waste.extend(m.old.filter(|id| shared.owns(*id)));
                }
                (Some(new), _) => {
                    shared.unbind(m.key, new, m.old);
                    if taken { shared.reserve(new) } else { waste.push(new) }
                }
                (None, _) => {}
            }
        }
        self.delete_nexthops(&waste);
    }

    /// Deletes nexthops of ours. What does not work is gone, or found again as an orphan by the next look.
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
            }
        }
    }

    fn run(&mut self, ops: &[Op]) -> (Vec<Outcome>, Vec<usize>) {
        let (writer, outcomes) = (Writer::default(), vec![Outcome::Done; ops.len()]);
        let (moves, taken, standing, blocked, owners) = Default::default();
        let mut run = Run { ops, outcomes, moves, taken, standing, blocked, kernels: None, writer, owners };
        self.devices.clear();
        let mut guarded = 0;
        for (i, op) in ops.iter().enumerate() {
            let (Op::Ensure(key, _) | Op::Recreate(key, _) | Op::Remove(key, _)) = op;
            if i < guarded {
                continue;
            }
            if is_guard(op) {
                // Together, before what follows: a peer is let in before it is sent to.
                self.flush(&mut run);
                let several = &ops[i..];
                let several = &several[..several.iter().take_while(|op| is_guard(op)).count()];
                guarded = i + several.len();
                run.outcomes[i..guarded].clone_from_slice(&self.guard.apply(several));
                continue;
            }
            if matches!(key, Key::Link(_) | Key::Addr(..) | Key::Fence(_)) {
                self.flush(&mut run);
                run.outcomes[i] = self.apply_one(op);
                if matches!(key, Key::Link(_)) {
                    self.devices.clear();
                }
                continue;
            }
            if run.owners.len() + PER_OP > BATCH {
                self.flush(&mut run);
            }
            if let Err(outcome) = self.queue(&mut run, i) {
                run.outcomes[i] = outcome;
            }
        }
        self.flush(&mut run);
        self.settle(&mut run);
        (run.outcomes, run.taken)
    }
}

/// An operation on the tunnel guard.
fn is_guard(op: &Op) -> bool {
    let (Op::Ensure(key, _) | Op::Recreate(key, _) | Op::Remove(key, _)) = op;
    matches!(key, Key::Peer(_) | Key::Guard(_))
}

impl Kernel for LinuxKernel {
    fn machine(&mut self) -> io::Result<Machine> {
        self.look_at_machine()
    }

    fn observe(&mut self, devices: &[Name]) -> io::Result<Observed> {
        self.look(devices)
    }

    fn guard(&mut self) -> io::Result<Observed> {
        Ok(self.guard.observe()?.into_iter().collect())
    }

    fn fence(&mut self) -> io::Result<Observed> {
        Ok(self.fence.observe(&mut self.netlink)?.into_iter().collect())
    }

    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let (mut outcomes, taken) = self.run(ops);
        // Someone has taken an id of our range: once more with others, at once, because the route now stands on his nexthop.
        if !taken.is_empty() {
            let again: Vec<Op> = taken.iter().map(|i| ops[*i].clone()).collect();
            let (second, _) = self.run(&again);
            for (i, outcome) in taken.into_iter().zip(second) {
                outcomes[i] = outcome;
            }
        }
        outcomes
    }
}
