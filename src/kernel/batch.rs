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

/// What a message in a datagram belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner {
    /// The sequence number of the message.
    pub(super) seq: u32,
    pub(super) op: usize,
    pub(super) step: Step,
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
    /// One for each message in the datagram.
    pub(super) owners: Vec<Owner>,
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
        self.owners.push(Owner { seq, op, step });
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

    /// Records that the answers to these messages are lost, so that it is not known what the kernel has done.
    pub(super) fn lose(&mut self, owners: &[Owner], cause: &str) {
        let lost: HashSet<usize> = owners.iter().map(|owner| owner.op).collect();
        for op in &lost {
            if self.outcomes[*op] == Outcome::Done {
                self.outcomes[*op] = errno::retry(&self.ops[*op], cause);
            }
        }
        // It is not known which of the two nexthops the route has. Both stay, and the next observation finds the orphan.
        self.moves.retain(|route| !lost.contains(&route.op));
        // Without its move, a replacement would write the route without its new nexthop.
        self.occupied.retain(|op| !lost.contains(op));
    }
}

#[cfg(test)]
mod tests {
    use weft_backends::state::{Mac, Name, Route, Value};

    use super::*;

    /// The keys of two routes, and the operations that write them.
    fn two_routes() -> ([Key; 2], [Op; 2]) {
        let dev = Name::new("eth0").unwrap();
        let keys = ["10.5.2.0/24", "10.5.3.0/24"].map(|net| Key::Route(net.parse().unwrap(), 0));
        (keys, keys.map(|key| Op::Ensure(key, Value::Route(Route::Device { dev }))))
    }

    /// A nexthop that is deleted takes its routes along, so none may be deleted that a route perhaps has.
    #[test]
    fn a_lost_answer_keeps_both_nexthops_of_its_route_alone() {
        let (keys, ops) = two_routes();
        let mut batch = Batch::new(&ops);
        batch.moves =
            keys.iter().zip(0..).map(|(key, op)| Move { op, key: *key, new: Some(7), old: Some(6) }).collect();
        let owners = [(1, Step::Nexthop), (2, Step::Main)].map(|(seq, step)| Owner { seq, op: 0, step });
        batch.lose(&owners, "acknowledgement lost");
        assert!(matches!(&batch.outcomes[..], [Outcome::Retry(_), Outcome::Done]), "{:?}", batch.outcomes);
        assert_eq!(batch.moves.iter().map(|route| route.op).collect::<Vec<_>>(), [1]);
    }

    /// The refusal was read, and other answers of the same datagram were lost. A replacement would go by another way than the one that was
    /// prepared.
    #[test]
    fn a_route_whose_answers_are_partly_lost_replaces_no_other_route() {
        let (_, ops) = two_routes();
        let mut batch = Batch::new(&ops);
        (0..ops.len()).for_each(|op| batch.refuse(op, Step::Main, &refusal(Errno::EEXIST, "")));
        assert_eq!(batch.occupied, [0, 1]);
        batch.lose(&[Owner { seq: 1, op: 0, step: Step::Main }], "acknowledgement lost");
        assert_eq!(batch.occupied, [1]);
        assert!(matches!(&batch.outcomes[..], [Outcome::Retry(_), Outcome::Done]), "{:?}", batch.outcomes);
    }

    fn refusal(errno: Errno, text: &str) -> Refusal {
        Refusal { seq: 1, errno, code: errno as i32, text: text.to_owned() }
    }

    /// A place that another route occupies is looked at, and then replaced. What is refused for another reason fails, and what may be refused
    /// without harm does not.
    #[test]
    fn a_refusal_leads_to_what_its_step_and_its_cause_call_for() {
        let dev = Name::new("eth0").unwrap();
        let route = (Key::Route("10.5.2.0/24".parse().unwrap(), 0), Value::Route(Route::Device { dev }));
        let fdb = (Key::Fdb(dev, Mac([2; 6])), Value::Fdb("192.0.2.1".parse().unwrap()));
        let ops = [Op::Ensure(route.0, route.1.clone()), Op::Remove(route.0, route.1), Op::Ensure(fdb.0, fdb.1)];
        let elsewhere = "Nexthop has invalid gateway or device mismatch";
        let (put, remove, entry) = (0, 1, 2);
        for (op, step, errno, text, outcome, then) in [
            (put, Step::Main, Errno::EEXIST, "", "done", "occupied"),
            (put, Step::Main, Errno::EINVAL, elsewhere, "done", "occupied blocked"),
            (put, Step::Main, Errno::ENETDOWN, "", "retry", ""),
            (put, Step::Replace, Errno::EEXIST, "", "retry", ""),
            (put, Step::Replace, Errno::EINVAL, elsewhere, "fatal", ""),
            (put, Step::Nexthop, Errno::EEXIST, "", "retry", "taken"),
            (put, Step::Nexthop, Errno::ENETDOWN, "", "retry", ""),
            (put, Step::Clear, Errno::ESRCH, "", "done", ""),
            (put, Step::Clear, Errno::EPERM, "", "done", ""),
            (remove, Step::Main, Errno::ESRCH, "", "done", ""),
            (remove, Step::Main, Errno::EPERM, "", "fatal", ""),
            (entry, Step::Main, Errno::EEXIST, "", "retry", ""),
        ] {
            let mut batch = Batch::new(&ops);
            batch.refuse(op, step, &refusal(errno, text));
            let is = match batch.outcomes[op] {
                Outcome::Done => "done",
                Outcome::Retry(_) => "retry",
                Outcome::Fatal(_) | Outcome::Partly { .. } => "fatal",
            };
            let lists = [
                (batch.occupied == [op], "occupied"),
                (batch.blocked.contains(&op), "blocked"),
                (batch.taken == [op], "taken"),
            ];
            let found: Vec<&str> = lists.into_iter().filter(|(is_in, _)| *is_in).map(|(_, list)| list).collect();
            assert_eq!((is, found.join(" ").as_str()), (outcome, then), "{op} {step:?} {errno} {text}");
        }
    }

    /// Without its nexthop, the route is refused, too. That is no cause.
    #[test]
    fn the_first_refusal_of_an_operation_is_its_cause() {
        let dev = Name::new("eth0").unwrap();
        let key = Key::Route("10.5.2.0/24".parse().unwrap(), 0);
        let ops = [Op::Ensure(key, Value::Route(Route::Device { dev }))];
        let mut batch = Batch::new(&ops);
        batch.refuse(0, Step::Nexthop, &refusal(Errno::ENETDOWN, "Carrier for nexthop device is down"));
        batch.refuse(0, Step::Main, &refusal(Errno::EEXIST, ""));
        let cause = &batch.outcomes[0];
        assert!(matches!(cause, Outcome::Retry(text) if text.contains("Carrier for nexthop")), "{cause:?}");
        assert!(batch.occupied.is_empty(), "without its nexthop it replaces nothing");
    }
}
