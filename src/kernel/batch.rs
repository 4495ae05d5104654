// SPDX-License-Identifier: Apache-2.0
//! The operations of one `apply` on their way to the kernel: which message belongs to which operation, and how the kernel answered.

use std::collections::HashSet;

use nix::errno::Errno;
use weft_backends::diff::Op;
use weft_backends::state::Key;

use super::socket::{Netlink, Refusal};
use super::wire::Writer;
use super::{Outcome, errno};

/// Which message of an operation it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Removes a route that is in the way, or adds or removes one that exists only for a moment. It does not matter if the kernel refuses it.
    Clear,
    /// Creates the nexthop.
    Nexthop,
    /// The operation itself.
    Main,
    /// The operation itself once more, now replacing the route that is there.
    Replace,
}

/// A route that changes its nexthop.
#[derive(Debug, Clone, Copy)]
pub(super) struct Move {
    pub(super) op: usize,
    pub(super) key: Key,
    pub(super) new: Option<u32>,
    /// Deleted when the route has moved.
    pub(super) old: Option<u32>,
}

/// The operations of one `apply`. Operations are numbered by their position in it.
#[derive(Debug, Default)]
pub(super) struct Batch<'a> {
    pub(super) ops: &'a [Op],
    pub(super) outcomes: Vec<Outcome>,
    pub(super) moves: Vec<Move>,
    /// The operations for which another program already uses the nexthop id.
    pub(super) taken: Vec<usize>,
    /// The operations whose place in the routing table is occupied by another route.
    pub(super) occupied: Vec<usize>,
    /// Those of them whose route the kernel refuses because the other route leads to its gateway over another device.
    pub(super) blocked: HashSet<usize>,
    /// The keys of the routes that the kernel itself created, after they were read.
    pub(super) kernels: Option<HashSet<Key>>,
    pub(super) writer: Writer,
    /// The sequence number, the operation and the step of each message in the datagram.
    pub(super) owners: Vec<(u32, usize, Step)>,
}

impl<'a> Batch<'a> {
    /// Begins an `apply` of these operations.
    pub(super) fn new(ops: &'a [Op]) -> Batch<'a> {
        Batch { ops, outcomes: vec![Outcome::Done; ops.len()], ..Batch::default() }
    }

    /// Ends the last message, and records which operation it belongs to.
    pub(super) fn push(&mut self, netlink: &mut Netlink, op: usize, step: Step) {
        let seq = netlink.next_seq();
        self.writer.end(seq);
        self.owners.push((seq, op, step));
    }

    /// Records that the kernel refused a message. The first refusal of an operation is its cause, and the later ones follow from it.
    pub(super) fn refuse(&mut self, op: usize, step: Step, refusal: &Refusal) {
        if step == Step::Clear || self.outcomes[op] != Outcome::Done {
            return;
        }
        if step == Step::Nexthop && refusal.errno == Errno::EEXIST {
            self.taken.push(op);
        }
        if step == Step::Main && matches!(self.ops[op], Op::Ensure(Key::Route(..), _)) {
            let blocked = errno::is_gateway_elsewhere(refusal);
            if blocked {
                self.blocked.insert(op);
            }
            if blocked || refusal.errno == Errno::EEXIST {
                self.occupied.push(op);
                return;
            }
        }
        self.outcomes[op] = errno::outcome(&self.ops[op], refusal);
    }
}
