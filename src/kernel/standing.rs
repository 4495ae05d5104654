// SPDX-License-Identifier: Apache-2.0
//! Another route stands where ours should be. It is replaced in place, so that no packet is lost, unless the kernel made it for an
//! address of this host: without that one nothing in the LAN is reached, not even after ours is gone.

use std::collections::HashSet;
use std::io;

use nix::libc;
use weft_backends::diff::Op;
use weft_backends::owner::KERNEL_PROTOCOL;
use weft_backends::state::{Key, Value};

use super::encode::{self, Exit, dump};
use super::linux::LinuxKernel;
use super::run::{Run, Step};
use super::socket::absent;
use super::wire::messages;
use super::{decode, errno};

impl LinuxKernel {
    /// Puts our routes in the place of others, except of the kernel's own.
    pub(super) fn replace_standing(&mut self, run: &mut Run<'_>) {
        let standing = std::mem::take(&mut run.standing);
        if run.kernels.is_none() {
            match self.kernels_routes() {
                Ok(routes) => run.kernels = Some(routes),
                Err(e) => {
                    for i in standing {
                        run.outcomes[i] =
                            errno::retry(&run.ops[i], &format!("look at the route that stands there: {e}"));
                    }
                    return;
                }
            }
        }
        for i in standing {
            let op = &run.ops[i];
            let key = op.key();
            let (Key::Route(net, metric), Op::Ensure(_, Value::Route(route))) = (key, op) else { continue };
            if run.kernels.as_ref().is_some_and(|kernels| kernels.contains(&key)) {
                run.outcomes[i] = errno::kernels_own(op);
                continue;
            }
            // In the order of operations.
            let moved = run.moves.binary_search_by_key(&i, |m| m.op).ok().and_then(|at| run.moves[at].new);
            let exit = moved.map_or_else(|| self.exit(op, *route), |id| Ok(Exit::Nexthop(id)));
            match exit {
                Ok(exit) => {
                    if run.blocked.contains(&i) {
                        encode::route(&mut run.writer, net, metric, Exit::Any, None);
                        run.push(&mut self.netlink, i, Step::Clear);
                    }
                    encode::route(&mut run.writer, net, metric, exit, Some(self.options.protocol));
                    run.push(&mut self.netlink, i, Step::Replace);
                }
                Err(outcome) => run.outcomes[i] = outcome,
            }
        }
        self.flush(run);
    }

    /// Where the kernel's own routes are, which come and go with an address of this host.
    fn kernels_routes(&mut self) -> io::Result<HashSet<Key>> {
        let mut keys = HashSet::new();
        for family in [2, 10] {
            match self
                .netlink
                .dump(libc::RTM_GETROUTE, |w, _, flags| dump::routes_by(w, flags, family, KERNEL_PROTOCOL))
            {
                Ok(data) => {
                    let news = messages(&data).filter(|m| m.kind == libc::RTM_NEWROUTE);
                    let routes = news.filter_map(|m| decode::route(m.payload));
                    keys.extend(routes.filter(|r| r.protocol == KERNEL_PROTOCOL).map(|r| Key::Route(r.net, r.metric)));
                }
                Err(e) if absent(&e) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(keys)
    }
}
