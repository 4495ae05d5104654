// SPDX-License-Identifier: Apache-2.0
//! Removes what flannel left: routes for nodes that are gone, and devices of a backend that is no longer used.
//!
//! Such an entry is on no device of ours and bears no mark, so no other rule of ownership covers it. It is identified once, when weft
//! reads the kernel for the first time after flannel ran. An entry of the same form that appears later belongs to another program.

use std::collections::{BTreeSet, HashMap};
use std::io;

use weft_backends::diff::Op;
use weft_backends::owner::{self, PROTOCOL};
use weft_backends::state::{Key, Name, Observed, ObservedValue, Value};
use weft_subnet::cidr::family;
use weft_subnet::old_defects::{Defect, is_back};

use crate::kernel::Kernel;
use crate::plan::Plan;
use crate::subnet_file::Author;

/// What flannel left and what is not removed yet.
#[derive(Debug, Default)]
pub enum Takeover {
    /// The kernel was not read yet. `certain` is true if another program wrote the subnet file after weft. Otherwise entries of ours
    /// in the kernel show that weft ran here last.
    Undecided {
        /// The mark of the subnet file says that another program wrote it.
        certain: bool,
    },
    /// Routes and devices that were there at the first reading, that no lease needs, and that are still there.
    Left(HashMap<Key, Value>),
    /// There is nothing to remove, or everything is removed.
    #[default]
    Over,
}

impl Takeover {
    /// Returns the state at the start of the agent. `author` wrote the subnet file that was found there.
    pub fn new(author: Author) -> Takeover {
        match author {
            _ if is_back(Defect::ForeignRoutesRemoved) => Takeover::Undecided { certain: true },
            Author::Weft => Takeover::Over,
            Author::Unknown => Takeover::Undecided { certain: false },
            Author::Another => Takeover::Undecided { certain: true },
        }
    }

    /// Returns the devices that must be observed for [`Takeover::update`] besides those of the plan.
    ///
    /// # Errors
    /// The links of the host cannot be read.
    pub fn devices<K: Kernel>(&self, kernel: &mut K) -> io::Result<Vec<Name>> {
        let of_flannel = |name: &Name| owner::is_flannels_device(*name);
        Ok(match self {
            Takeover::Undecided { .. } => {
                kernel.machine()?.links.iter().map(|link| link.name).filter(of_flannel).collect()
            }
            Takeover::Left(left) => {
                left.keys().filter_map(|key| if let Key::Link(name) = key { Some(*name) } else { None }).collect()
            }
            Takeover::Over => Vec::new(),
        })
    }

    /// Compares what flannel left with what the kernel and the plan contain now.
    ///
    /// The first call identifies flannel's entries. Later calls forget those that are gone, that another program changed, or that a
    /// lease needs: if such an entry comes back, it is not flannel's.
    pub fn update(&mut self, observed: &Observed, plan: &Plan) {
        match self {
            Takeover::Undecided { certain } => {
                // Beside a backend that makes no routes, an administrator's routes look like flannel's.
                *self = if !plan.makes_routes() || (!*certain && weft_ran_here(observed, plan)) {
                    Takeover::Over
                } else {
                    Takeover::Left(left_by_flannel(observed, plan))
                };
            }
            Takeover::Left(left) => left.retain(|key, value| {
                plan.desired(key).is_none() && observed.get(key).is_some_and(|seen| seen.value == *value)
            }),
            Takeover::Over => return,
        }
        self.end_if_empty();
    }

    /// Returns true for an entry that flannel left and that has not changed since.
    pub fn contains(&self, key: &Key, seen: &ObservedValue) -> bool {
        matches!(self, Takeover::Left(left) if left.get(key) == Some(&seen.value))
    }

    /// Takes notice that the kernel has carried out `op`. If it removed an entry of flannel, that entry is logged and forgotten.
    pub fn applied(&mut self, op: &Op) {
        if let (Takeover::Left(left), Op::Remove(key, _)) = (&mut *self, op)
            && left.remove(key).is_some()
        {
            tracing::info!(%op, "flannel left this entry, and no lease asks for it");
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
    let networks = &plan.net_conf().networks;
    let inside = |net: &ipnet::IpNet| networks.of(family(net)).is_some_and(|all| all.contains(net));
    observed.iter().any(|(key, seen)| match key {
        Key::Link(_) => seen.mark,
        Key::Route(net, _) => seen.protocol == PROTOCOL && inside(net),
        // `old_routes.rs` writes these in the place of routes of an earlier version.
        Key::Fence(_) | Key::Open(_) => true,
        _ => false,
    })
}

fn left_by_flannel(observed: &Observed, plan: &Plan) -> HashMap<Key, Value> {
    let (net_conf, own, on_link) = (plan.net_conf(), plan.own().subnets, &plan.host().routes);
    // A device with flannel's name could be that of another network. The address shows that it was this node's.
    let address = |(key, _): (&Key, &ObservedValue)| match key {
        Key::Addr(name, net) if owner::is_address_of_flannels_device(&own, net) => Some(*name),
        _ => None,
    };
    let with_own_address: BTreeSet<Name> = observed.iter().filter_map(address).collect();
    let of_flannel = |(key, seen): (&Key, &ObservedValue)| match key {
        Key::Link(name) => {
            let is_marked = seen.mark || seen.protocol == PROTOCOL;
            !is_marked && owner::is_flannels_device(*name) && with_own_address.contains(name)
        }
        _ => {
            owner::is_flannels(net_conf, &own, on_link, (key, seen))
                || owner::is_over_flannels_device(net_conf, &own, (key, seen))
        }
    };
    let left = observed.iter().filter(|(key, seen)| plan.desired(key).is_none() && of_flannel((key, seen)));
    left.map(|(key, seen)| (*key, seen.value.clone())).collect()
}
