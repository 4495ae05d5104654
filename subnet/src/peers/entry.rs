// SPDX-License-Identifier: Apache-2.0
//! A record and the judgement on it.

use std::sync::Arc;

use super::Queue;
use super::claims::Slot;
use crate::lease::{Lease, Unreadable};

/// What a slot contains.
#[derive(Debug)]
pub(super) enum Entry {
    /// Nothing.
    Free,
    /// A record that is not a lease.
    Unread(Unreadable),
    /// A lease.
    Read(Arc<Lease>, Judgement),
}

/// Whether a lease is believed, or why not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Judgement {
    /// It is our own lease.
    Own,
    /// The lease is not possible. It has no claim.
    Impossible(Box<Reason>),
    /// The claim conflicts with that of this slot, which is believed. `None` while the claim waits to be judged.
    Beaten(Option<Box<(Slot, Reason)>>),
    /// The subnet contains published addresses of several other leases.
    Covers(Box<Reason>),
    /// The claim conflicts with no older one that is believed.
    Believed,
}

/// The reason of a judgement. It is in a box of its own, because few leases need one and each entry has room for the pointer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reason(pub(super) Box<str>);

impl Entry {
    /// Returns why the record is not believed, and the lease if it is readable.
    pub(super) fn why_not_believed(&self) -> Option<(&str, Option<&Lease>)> {
        match self {
            Entry::Unread(reason) => Some((reason.as_str(), None)),
            Entry::Read(lease, Judgement::Impossible(reason) | Judgement::Covers(reason)) => {
                Some((&reason.0, Some(lease)))
            }
            Entry::Read(lease, Judgement::Beaten(Some(by))) => Some((&by.1.0, Some(lease))),
            Entry::Free | Entry::Read(..) => None,
        }
    }

    pub(super) fn new(lease: Result<Lease, Unreadable>) -> Entry {
        match lease {
            Ok(lease) => Entry::Read(Arc::new(lease), Judgement::Beaten(None)),
            Err(reason) => Entry::Unread(reason),
        }
    }

    /// Returns true if the lease has a claim, whether it is believed or not.
    pub(super) fn has_claim(&self) -> bool {
        matches!(self, Entry::Read(_, Judgement::Beaten(_) | Judgement::Covers(_) | Judgement::Believed))
    }

    pub(super) fn believed(&self) -> Option<&Arc<Lease>> {
        match self {
            Entry::Read(lease, Judgement::Believed) => Some(lease),
            _ => None,
        }
    }

    pub(super) fn is_believed(&self) -> bool {
        self.believed().is_some()
    }

    pub(super) fn beaten_by(&self) -> Option<Slot> {
        match self {
            Entry::Read(_, Judgement::Beaten(Some(by))) => Some(by.0),
            _ => None,
        }
    }

    pub(super) fn queue(&self, slot: Slot, queue: &mut Queue) {
        if let Entry::Read(lease, _) = self {
            queue.insert((lease.age.clone(), lease.id.clone(), slot));
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_entry_stays_small() {
        assert_eq!(size_of::<super::Entry>(), 24);
    }
}
