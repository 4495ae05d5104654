// SPDX-License-Identifier: Apache-2.0
//! What happens when another route is in the place of ours. It is replaced in one step, so that no packet is lost. The only exception
//! is a route that the kernel created for an address of this host: without it, the host reaches nothing in its own network, not even
//! after our route is removed.

use std::collections::HashSet;
use std::io;

use ipnet::IpNet;
use nix::libc;
use weft_backends::diff::Op;
use weft_backends::owner::KERNEL_PROTOCOL;
use weft_backends::state::{Key, Value};
use weft_subnet::cidr::Family;

use super::batch::{Batch, Step};
use super::encode::{self, Exit, dump};
use super::linux::LinuxKernel;
use super::socket::empty_if_absent;
use super::wire::{Writer, messages};
use super::{decode, errno};

/// Up to this many routes are asked for one by one. A dump visits every route of this host, also those that it leaves out.
const FEW: usize = 32;
/// The metric of a route that exists only while another one is replaced. It is the least preferred one, so that no other route has it.
const MOMENTARY: u32 = u32::MAX;

impl LinuxKernel {
    /// Queues the messages that replace other routes by ours, except routes of the kernel.
    pub(super) fn queue_replacements(&mut self, batch: &mut Batch<'_>) {
        let occupied = std::mem::take(&mut batch.occupied);
        let keys: Vec<Key> = occupied.iter().map(|i| batch.ops[*i].key()).collect();
        let of_these = if batch.kernels.is_none() { self.kernels_among(&keys) } else { None };
        if batch.kernels.is_none() && of_these.is_none() {
            match self.kernels_routes() {
                Ok(routes) => batch.kernels = Some(routes),
                Err(e) => {
                    for i in occupied {
                        let cause = format!("cannot read the route that is in its place: {e}");
                        batch.outcomes[i] = errno::retry(&batch.ops[i], &cause);
                    }
                    return;
                }
            }
        }
        for i in occupied {
            let op = &batch.ops[i];
            let key = op.key();
            let (Key::Route(net, metric), Op::Ensure(_, Value::Route(route))) = (key, op) else { continue };
            let kernels = of_these.as_ref().or(batch.kernels.as_ref());
            if kernels.is_some_and(|kernels| kernels.contains(&key)) {
                batch.outcomes[i] = errno::kernels_own(op);
                continue;
            }
            // The moves are in the order of the operations.
            let moved = batch.moves.binary_search_by_key(&i, |m| m.op).ok().and_then(|at| batch.moves[at].new);
            let exit = moved.map_or_else(|| self.exit(op, *route), |id| Ok(Exit::Nexthop(id)));
            match exit {
                Ok(exit) => self.queue_replacement(batch, i, (net, metric), exit),
                Err(outcome) => batch.outcomes[i] = outcome,
            }
        }
    }

    /// Queues one replacement. If the kernel refuses our route because the one in its place leads to the gateway over another device, the gateway
    /// gets a route of its own for this moment.
    fn queue_replacement(&mut self, batch: &mut Batch<'_>, i: usize, (net, metric): (IpNet, u32), exit: Exit) {
        let protocol = self.options.protocol;
        let gateway = match exit {
            Exit::Gateway { via, index, .. } if batch.blocked.contains(&i) => {
                Some((IpNet::from(via), Exit::Device(index)))
            }
            _ => None,
        };
        if let Some((via, device)) = gateway {
            encode::new_route(&mut batch.writer, via, MOMENTARY, device, protocol);
            batch.push(&mut self.netlink, i, Step::Clear);
        }
        encode::route(&mut batch.writer, net, metric, exit, Some(protocol));
        batch.push(&mut self.netlink, i, Step::Replace);
        if let Some((via, device)) = gateway {
            encode::delete_route_of(&mut batch.writer, via, MOMENTARY, device, protocol);
            batch.push(&mut self.netlink, i, Step::Clear);
        }
    }

    /// Returns those of these keys whose route the kernel itself created. Returns `None` if they are too many to ask for each of them, or if the
    /// kernel names another route than that with the key.
    fn kernels_among(&mut self, keys: &[Key]) -> Option<HashSet<Key>> {
        let mut found = HashSet::new();
        if keys.len() > FEW {
            return None;
        }
        for key in keys {
            let Key::Route(net, metric) = *key else { continue };
            // The kernel has two routes with this key, and may answer with the other one.
            if self.shared_with_kernel.contains(key) {
                return None;
            }
            let data = self.netlink.request(|w| encode::fib_entry(w, net.addr())).ok()?.ok()?;
            let reply = messages(&data).find(|m| m.kind == libc::RTM_NEWROUTE)?;
            let route = decode::route(reply.payload).filter(|route| (route.net, route.metric) == (net, metric))?;
            found.extend((route.protocol == KERNEL_PROTOCOL).then_some(*key));
        }
        Some(found)
    }

    /// Returns the keys of the routes that the kernel itself created. They come and go with the addresses of this host.
    fn kernels_routes(&mut self) -> io::Result<HashSet<Key>> {
        let mut keys = HashSet::new();
        for family in Family::BOTH.map(Family::number) {
            let build = |w: &mut Writer, _: u16, flags: u16| dump::routes_by(w, flags, family, KERNEL_PROTOCOL);
            let data = empty_if_absent(self.netlink.dump(libc::RTM_GETROUTE, build))?;
            let replies = messages(&data).filter(|m| m.kind == libc::RTM_NEWROUTE);
            let routes = replies.filter_map(|m| decode::route(m.payload));
            keys.extend(routes.filter(|r| r.protocol == KERNEL_PROTOCOL).map(|r| Key::Route(r.net, r.metric)));
        }
        Ok(keys)
    }
}
