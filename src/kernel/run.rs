// SPDX-License-Identifier: Apache-2.0
//! One call of `apply` on its way: which message belongs to which operation, and what became of each.

use std::collections::HashSet;

use nix::errno::Errno;
use weft_backends::diff::Op;
use weft_backends::state::Key;

use super::socket::{Netlink, Refusal};
use super::wire::Writer;
use super::{Outcome, errno};

/// Which message of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Clears the way; its refusal means nothing.
    Clear,
    /// Creates the nexthop.
    Nexthop,
    /// The operation itself.
    Main,
    /// The operation itself once more: in the place of another route.
    Replace,
}

/// A route that changes its nexthop: what to delete afterwards.
#[derive(Debug, Clone, Copy)]
pub(super) struct Move {
    pub(super) op: usize,
    pub(super) key: Key,
    pub(super) new: Option<u32>,
    pub(super) old: Option<u32>,
}

/// One call of `apply` on its way.
#[derive(Debug)]
pub(super) struct Run<'a> {
    pub(super) ops: &'a [Op],
    pub(super) outcomes: Vec<Outcome>,
    pub(super) moves: Vec<Move>,
    /// Operations whose nexthop id turned out to be taken.
    pub(super) taken: Vec<usize>,
    /// Operations in whose place another route stands.
    pub(super) standing: Vec<usize>,
    /// Those of them whose route the kernel refuses while the other one stands, so that it cannot be replaced in place.
    pub(super) blocked: HashSet<usize>,
    /// Where the kernel's own routes are, once that was asked.
    pub(super) kernels: Option<HashSet<Key>>,
    pub(super) writer: Writer,
    /// Of each message in the datagram: its number, operation and step.
    pub(super) owners: Vec<(u32, usize, Step)>,
}

impl Run<'_> {
    /// Ends the message begun last and notes whose it is.
    pub(super) fn push(&mut self, netlink: &mut Netlink, op: usize, step: Step) {
        let seq = netlink.next_seq();
        self.writer.end(seq);
        self.owners.push((seq, op, step));
    }

    /// The first refusal of an operation is its cause; the others follow from it.
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
                self.standing.push(op);
                return;
            }
        }
        self.outcomes[op] = errno::outcome(&self.ops[op], refusal);
    }
}
