// SPDX-License-Identifier: Apache-2.0
//! [`Kernel`] on Linux: operations become messages, 128 in a datagram, and each refusal is matched to its operation.
//!
//! Invariant: an old nexthop is deleted only after its route has moved, because the kernel removes the routes of a nexthop that is
//! deleted.
//!
//! A route is first created, which the kernel refuses if there is one already. Only then is that route read, and replaced unless the
//! kernel created it for an address of this host.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use weft_backends::diff::Op;
use weft_backends::state::{Key, Name, Observed, Route, Value};
use weft_backends::wireguard_key::DeviceSecrets;

use super::batch::{Batch, Move, Step};
use super::encode::{self, Exit, NewNexthop};
use super::linux::{BATCH, LinuxKernel};
use super::nexthop::Bound;
use super::socket::NLM_F_ACK;
use super::{Kernel, Machine, Outcome, RouteLookup, Session, errno};

/// The most messages that one operation needs.
const PER_OP: usize = 6;

impl LinuxKernel {
    /// Adds the messages of one operation to the datagram.
    fn queue(&mut self, batch: &mut Batch<'_>, i: usize) -> Result<(), Outcome> {
        let op = &batch.ops[i];
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
                encode::fdb(&mut batch.writer, index, mac, add.then_some(*dst));
            }
            (Key::Neigh(name, ip), Value::Neigh(mac)) => {
                let index = self.resolve(op, name)?;
                encode::neighbour(&mut batch.writer, index, ip, add.then_some(*mac));
            }
            (Key::Open(ip), _) => self.fence.open(&mut batch.writer, ip, add),
            (Key::Route(..), Value::Route(route)) if add => return self.put_route(batch, i, *route),
            (Key::Route(..), Value::Route(route)) => return self.remove_route(batch, i, *route),
            _ => return Err(errno::fatal(op, "the value does not fit the key")),
        }
        batch.push(&mut self.netlink, i, Step::Main);
        Ok(())
    }

    fn put_route(&mut self, batch: &mut Batch<'_>, i: usize, route: Route) -> Result<(), Outcome> {
        let op = &batch.ops[i];
        let key = &op.key();
        let Key::Route(net, metric) = *key else { return Err(errno::fatal(op, "not a route")) };
        let mut exit = self.exit(op, route)?;
        if matches!(exit, Exit::Any) {
            return Err(errno::fatal(op, "not a route that weft writes"));
        }
        let protocol = self.options.protocol;
        // This may fail, so it comes before the messages that remove the old routes.
        let (nexthop, old) = match exit {
            Exit::Gateway { via, index, onlink } if self.nexthops && net.addr().is_ipv4() => {
                let bound = self.index.borrow_mut().bind(*key);
                let Some(Bound { id, before }) = bound else { return Err(errno::retry(op, "no free nexthop id")) };
                (Some(NewNexthop { id, protocol, via, index, onlink }), before)
            }
            _ => (None, self.index.borrow().of(key)),
        };
        let doubled = self.doubled.remove(key).unwrap_or(0);
        for _ in 0..doubled.min(PER_OP - 2) {
            encode::route(&mut batch.writer, net, metric, Exit::Any, None);
            batch.push(&mut self.netlink, i, Step::Clear);
        }
        if let Some(nexthop) = &nexthop {
            encode::new_nexthop(&mut batch.writer, nexthop);
            batch.push(&mut self.netlink, i, Step::Nexthop);
            exit = Exit::Nexthop(nexthop.id);
        }
        encode::new_route(&mut batch.writer, net, metric, exit, protocol);
        batch.push(&mut self.netlink, i, Step::Main);
        let new = nexthop.map(|nexthop| nexthop.id);
        if new.is_some() || old.is_some() {
            batch.moves.push(Move { op: i, key: *key, new, old });
        }
        Ok(())
    }

    fn remove_route(&mut self, batch: &mut Batch<'_>, i: usize, route: Route) -> Result<(), Outcome> {
        let op = &batch.ops[i];
        let key = &op.key();
        let Key::Route(net, metric) = *key else { return Err(errno::fatal(op, "not a route")) };
        let old = self.index.borrow().of(key);
        // The kernel finds a route with a nexthop object only by its id, and another route never by an id.
        let exit = match old {
            Some(id) => Exit::Nexthop(id),
            None => self.exit(op, route)?,
        };
        if self.shared_with_kernel.contains(key) {
            encode::delete_route_of(&mut batch.writer, net, metric, exit, self.options.protocol);
        } else {
            encode::route(&mut batch.writer, net, metric, exit, None);
        }
        batch.push(&mut self.netlink, i, Step::Main);
        if old.is_some() {
            batch.moves.push(Move { op: i, key: *key, new: None, old });
        }
        Ok(())
    }

    /// Sends the queued messages, and then those that replace the routes which were in their place.
    fn flush(&mut self, batch: &mut Batch<'_>) {
        self.send_batch(batch);
        if !batch.occupied.is_empty() {
            self.queue_replacements(batch);
            self.send_batch(batch);
        }
    }

    /// Sends the queued messages, and records the answers.
    fn send_batch(&mut self, batch: &mut Batch<'_>) {
        let Some(last) = batch.owners.last().map(|owner| owner.seq) else { return };
        batch.writer.flag_last(NLM_F_ACK);
        let answer = self.netlink.exchange(batch.writer.bytes(), last);
        let owners = std::mem::take(&mut batch.owners);
        batch.writer.clear();
        let lost = match answer {
            Ok(replies) => {
                for refusal in &replies.refused {
                    if let Some(owner) = owners.iter().find(|owner| owner.seq == refusal.seq) {
                        batch.refuse(owner.op, owner.step, refusal);
                    }
                }
                (!replies.complete).then(|| "acknowledgement lost".to_owned())
            }
            Err(e) => Some(e.to_string()),
        };
        if let Some(cause) = lost {
            batch.lose(&owners, &cause);
        }
    }

    /// Deletes the nexthops that no route needs any more: the old ones of routes that moved, and the new ones of routes that did not.
    fn delete_unused_nexthops(&mut self, batch: &mut Batch<'_>) {
        let mut unused = Vec::new();
        for m in std::mem::take(&mut batch.moves) {
            let mut shared = self.index.borrow_mut();
            let taken = batch.taken.contains(&m.op);
            match (m.new, &batch.outcomes[m.op]) {
                (_, Outcome::Done) => {
                    if m.new.is_none() && shared.of(&m.key) == m.old {
                        shared.saw_plain(&m.key);
                    }
                    unused.extend(m.old.filter(|id| shared.owns(*id)));
                }
                (Some(new), _) => {
                    shared.unbind(m.key, new, m.old);
                    if taken { shared.reserve(new) } else { unused.push(new) }
                }
                (None, _) => {}
            }
        }
        self.delete_nexthops(&unused);
    }

    /// Carries out operations in order. Also returns those for which another program already uses the nexthop id.
    fn write(&mut self, ops: &[Op]) -> (Vec<Outcome>, Vec<usize>) {
        let mut batch = Batch::new(ops);
        self.devices.clear();
        let mut written = 0;
        for (i, op) in ops.iter().enumerate() {
            let key = op.key();
            if i < written {
                continue;
            }
            // Removals come last. A route that replaces another one is written in the second exchange of a flush. The neighbour and the FDB
            // entry over which the other route leads must stay until then.
            if matches!(op, Op::Remove(..)) && i > 0 && !matches!(ops[i - 1], Op::Remove(..)) {
                self.flush(&mut batch);
            }
            if key.is_of_guard() {
                // Consecutive operations on the guard are one transaction. It comes before what follows, because a peer must be
                // let in before packets are sent to it.
                self.flush(&mut batch);
                let several = run(&ops[i..], Key::is_of_guard);
                written = i + several.len();
                batch.outcomes[i..written].clone_from_slice(&self.guard.apply(several));
                continue;
            }
            if key.is_of_wireguard() {
                self.flush(&mut batch);
                let several = run(&ops[i..], Key::is_of_wireguard);
                written = i + several.len();
                batch.outcomes[i..written].clone_from_slice(&self.apply_wireguard(several));
                continue;
            }
            if matches!(key, Key::Link(_) | Key::Addr(..) | Key::Fence(_)) {
                self.flush(&mut batch);
                batch.outcomes[i] = self.apply_one(op);
                if matches!(key, Key::Link(_)) {
                    self.devices.clear();
                }
                continue;
            }
            if batch.owners.len() + PER_OP > BATCH {
                self.flush(&mut batch);
            }
            if let Err(outcome) = self.queue(&mut batch, i) {
                batch.outcomes[i] = outcome;
            }
        }
        self.flush(&mut batch);
        self.delete_unused_nexthops(&mut batch);
        (batch.outcomes, batch.taken)
    }
}

/// Returns the operations at the beginning whose keys belong together, as this function says.
fn run(ops: &[Op], belongs: impl Fn(&Key) -> bool) -> &[Op] {
    &ops[..ops.iter().take_while(|op| belongs(&op.key())).count()]
}

impl Kernel for LinuxKernel {
    fn machine(&mut self) -> io::Result<Machine> {
        self.observe_machine()
    }

    fn look_up_route(&mut self, to: IpAddr) -> io::Result<Option<RouteLookup>> {
        self.ask_for_route(to)
    }

    fn observe(&mut self, devices: &[Name]) -> io::Result<Observed> {
        self.observe_entries(devices)
    }

    fn set_secrets(&mut self, secrets: Option<DeviceSecrets>) {
        self.secrets = secrets;
    }

    fn wireguard(&mut self, devices: &[Name]) -> io::Result<Observed> {
        let mut found = Vec::new();
        for name in devices {
            found.extend(self.observe_wireguard(*name)?.1);
        }
        Ok(found.into_iter().collect())
    }

    fn listen_ports(&mut self, devices: &[Name]) -> io::Result<BTreeMap<Name, u16>> {
        let mut ports = BTreeMap::new();
        for name in devices {
            ports.extend(self.observe_port(*name)?.map(|port| (*name, port)));
        }
        Ok(ports)
    }

    fn sessions(&mut self, devices: &[Name]) -> io::Result<Vec<Session>> {
        let mut all = Vec::new();
        for name in devices {
            all.extend(self.observe_sessions(*name)?);
        }
        Ok(all)
    }

    fn guard(&mut self) -> io::Result<Observed> {
        Ok(self.guard.observe()?.into_iter().collect())
    }

    fn fence(&mut self) -> io::Result<Observed> {
        Ok(self.fence.observe(&mut self.netlink)?.into_iter().collect())
    }

    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let (mut outcomes, taken) = self.write(ops);
        // Another program uses an id of our range. The route now goes through its nexthop, so it is written again at once.
        if !taken.is_empty() {
            let again: Vec<Op> = taken.iter().map(|i| ops[*i].clone()).collect();
            let (second, _) = self.write(&again);
            for (i, outcome) in taken.into_iter().zip(second) {
                outcomes[i] = outcome;
            }
        }
        outcomes
    }
}

#[cfg(test)]
mod tests {
    use netlink_sys::protocols::{NETLINK_FIB_LOOKUP, NETLINK_USERSOCK};
    use weft_backends::owner::PROTOCOL;

    use super::super::linux::LinuxOptions;
    use super::super::socket::Netlink;
    use super::*;

    fn kernel() -> LinuxKernel {
        let (nexthop_objects, instance, alias) = (false, 0, "weft test".to_owned());
        LinuxKernel::open(LinuxOptions { nexthop_objects, instance, protocol: PROTOCOL, alias }).unwrap()
    }

    /// It is not known what the kernel has done. A route that counts as written would be missing until the next audit.
    #[test]
    fn an_operation_whose_answer_is_lost_is_tried_again() {
        let mut kernel = kernel();
        let key = Key::Route("10.5.2.0/24".parse().unwrap(), 0);
        // Nobody listens to the first one of these protocols. The kernel reads the messages of the second one, and acknowledges none.
        for (protocol, cause) in [(NETLINK_USERSOCK, "refused"), (NETLINK_FIB_LOOKUP, "acknowledgement lost")] {
            kernel.netlink = Netlink::open_on(protocol).unwrap();
            let outcome = kernel.apply(&[Op::Ensure(key, Value::Route(Route::Blackhole))]).remove(0);
            let is_tried_again = matches!(&outcome, Outcome::Retry(text) if text.contains(cause));
            assert!(is_tried_again, "{protocol}: {outcome:?}");
        }
    }

    /// The index has forgotten them by then, so nothing else would find them in the kernel.
    #[test]
    fn nexthops_that_could_not_be_deleted_are_looked_for_again() {
        let mut kernel = kernel();
        kernel.adopted = true;
        let key = Key::Route("10.5.2.0/24".parse().unwrap(), 0);
        let id = kernel.index.borrow_mut().bind(key).unwrap().id;
        // Nobody listens to this protocol, so the message cannot be sent.
        kernel.netlink = Netlink::open_on(NETLINK_USERSOCK).unwrap();
        kernel.delete_nexthops(&[id]);
        assert!(!kernel.index.borrow().owns(id) && !kernel.adopted);
    }

    /// The old routes carry packets until the new one can be written.
    #[test]
    fn a_doubled_route_stays_while_no_nexthop_id_is_free() {
        let mut kernel = kernel();
        kernel.nexthops = true;
        let key = Key::Route("10.5.2.0/24".parse().unwrap(), 0);
        kernel.doubled.insert(key, 2);
        let (via, dev) = ("192.0.2.1".parse().unwrap(), Name::new("lo").unwrap());
        let ops = [Op::Ensure(key, Value::Route(Route::Unicast { via, dev, onlink: true }))];
        let first = kernel.index.borrow_mut().bind(key).unwrap().id;
        let ids: Vec<u32> = (first..).take_while(|id| kernel.index.borrow().in_range(*id)).collect();
        ids.into_iter().for_each(|id| kernel.index.borrow_mut().reserve(id));
        let mut batch = Batch::new(&ops);
        let outcome = kernel.queue(&mut batch, 0);
        assert!(matches!(&outcome, Err(Outcome::Retry(text)) if text.contains("no free nexthop id")), "{outcome:?}");
        assert!(batch.owners.is_empty() && batch.moves.is_empty(), "no message is queued");
        assert_eq!(kernel.doubled.get(&key), Some(&2), "the next attempt removes them");
    }
}
