// SPDX-License-Identifier: Apache-2.0
//! Removes the routes that flannel left for nodes that are gone.
//!
//! Such a route is on no device of ours and bears no mark, so no other rule of ownership covers it. It is identified once, when weft
//! reads the kernel for the first time after flannel ran. A route of the same form that appears later belongs to another program.

use std::collections::HashMap;

use weft_backends::diff::Op;
use weft_backends::owner::{self, PROTOCOL};
use weft_backends::state::{Key, Observed, Seen, Value};
use weft_subnet::cidr::family;

use crate::plan::Plan;
use crate::subnet_file::Author;

/// The routes that flannel left and that are not removed yet.
#[derive(Debug, Default)]
pub enum Takeover {
    /// The kernel was not read yet. `certain` is true if another program wrote the subnet file after weft. Otherwise entries of ours
    /// in the kernel show that weft ran here last.
    Undecided {
        /// The mark of the subnet file says that another program wrote it.
        certain: bool,
    },
    /// Routes that were there at the first reading, that no lease needs, and that are still there.
    Left(HashMap<Key, Value>),
    /// There is nothing to remove, or everything is removed.
    #[default]
    Over,
}

impl Takeover {
    /// Returns the state at the start of the agent. `author` wrote the subnet file that was found there.
    pub fn new(author: Author) -> Takeover {
        match author {
            Author::Weft => Takeover::Over,
            Author::Unknown => Takeover::Undecided { certain: false },
            Author::Another => Takeover::Undecided { certain: true },
        }
    }

    /// Compares what flannel left with what the kernel and the plan contain now.
    ///
    /// The first call identifies flannel's routes. Later calls forget those that are gone, that another program changed, or that a
    /// lease needs: if such a route comes back, it is not flannel's.
    pub fn update(&mut self, observed: &Observed, plan: &Plan) {
        match self {
            Takeover::Undecided { certain } => {
                // Beside a backend that makes no routes, an administrator's routes look like flannel's.
                *self = if !plan.makes_routes() || (!*certain && weft_ran_here(observed, plan)) {
                    Takeover::Over
                } else {
                    Takeover::Left(routes_of_flannel(observed, plan))
                };
            }
            Takeover::Left(left) => left.retain(|key, value| {
                plan.desired(key).is_none() && observed.get(key).is_some_and(|seen| seen.value == *value)
            }),
            Takeover::Over => return,
        }
        self.end_if_empty();
    }

    /// Returns true for a route that flannel left and that has not changed since.
    pub fn contains(&self, key: &Key, seen: &Seen) -> bool {
        matches!(self, Takeover::Left(left) if left.get(key) == Some(&seen.value))
    }

    /// Takes notice that the kernel has carried out `op`. If it removed a route of flannel, that route is logged and forgotten.
    pub fn applied(&mut self, op: &Op) {
        if let (Takeover::Left(left), Op::Remove(key, _)) = (&mut *self, op)
            && left.remove(key).is_some()
        {
            tracing::info!(%op, "flannel left this route, and no lease asks for it");
            self.end_if_empty();
        }
    }

    fn end_if_empty(&mut self) {
        if matches!(self, Takeover::Left(left) if left.is_empty()) {
            *self = Takeover::Over;
        }
    }
}

/// Returns true if the kernel contains entries of weft. They show that weft ran here last, unless the subnet file is flannel's:
/// flannel leaves weft's entries where they are.
fn weft_ran_here(observed: &Observed, plan: &Plan) -> bool {
    let networks = &plan.network().networks;
    let inside = |net: &ipnet::IpNet| networks.of(family(net)).is_some_and(|all| all.contains(net));
    observed.iter().any(|(key, seen)| match key {
        Key::Link(_) => seen.mark,
        Key::Route(net, _) => seen.protocol == PROTOCOL && inside(net),
        // `old_routes.rs` writes these in the place of routes of an earlier version.
        Key::Fence(_) | Key::Open(_) => true,
        _ => false,
    })
}

fn routes_of_flannel(observed: &Observed, plan: &Plan) -> HashMap<Key, Value> {
    let (network, own, on_link) = (plan.network(), plan.own().subnets, &plan.host().routes);
    let of_flannel = |entry| {
        owner::is_flannels(network, &own, on_link, entry) || owner::is_over_flannels_device(network, &own, entry)
    };
    let left = observed.iter().filter(|(key, seen)| plan.desired(key).is_none() && of_flannel((key, seen)));
    left.map(|(key, seen)| (*key, seen.value.clone())).collect()
}
