// SPDX-License-Identifier: Apache-2.0
//! One record and what was judged of it.

use std::sync::Arc;

use super::Dirty;
use super::claims::Slot;
use crate::lease::{Lease, Unreadable};

/// What is known of one record.
#[derive(Debug)]
pub(super) enum Entry {
    Free,
    Unread(Unreadable),
    Read(Arc<Lease>, Verdict),
}

/// Whether a lease is believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is our own lease.
    Own,
    /// Not possible: has no claim.
    Impossible(Box<Reason>),
    /// Has a claim that this older one beats; `None` only while it waits for its judgement.
    Beaten(Option<Box<(Slot, Reason)>>),
    /// Has a claim that covers the public addresses of several others.
    Covers(Box<Reason>),
    /// Has a claim, and no older one that is believed overlaps it.
    Believed,
}

/// In a box of its own: few leases need one, and each of them has room for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reason(pub(super) Box<str>);

impl Entry {
    /// Why it is not believed, and the lease when it could be read.
    pub(super) fn aside(&self) -> Option<(&str, Option<&Lease>)> {
        match self {
            Entry::Unread(reason) => Some((reason.as_str(), None)),
            Entry::Read(lease, Verdict::Impossible(reason) | Verdict::Covers(reason)) => Some((&reason.0, Some(lease))),
            Entry::Read(lease, Verdict::Beaten(Some(by))) => Some((&by.1.0, Some(lease))),
            Entry::Free | Entry::Read(..) => None,
        }
    }

    pub(super) fn new(lease: Result<Lease, Unreadable>) -> Entry {
        match lease {
            Ok(lease) => Entry::Read(Arc::new(lease), Verdict::Beaten(None)),
            Err(reason) => Entry::Unread(reason),
        }
    }

    /// Whether it has a place among the claims, believed or not.
    pub(super) fn has_claim(&self) -> bool {
        matches!(self, Entry::Read(_, Verdict::Beaten(_) | Verdict::Covers(_) | Verdict::Believed))
    }

    pub(super) fn believed(&self) -> Option<&Arc<Lease>> {
        match self {
            Entry::Read(lease, Verdict::Believed) => Some(lease),
            _ => None,
        }
    }

    pub(super) fn is_believed(&self) -> bool {
        self.believed().is_some()
    }

    pub(super) fn beaten_by(&self) -> Option<Slot> {
        match self {
            Entry::Read(_, Verdict::Beaten(Some(by))) => Some(by.0),
            _ => None,
        }
    }

    pub(super) fn queue(&self, slot: Slot, dirty: &mut Dirty) {
        if let Entry::Read(lease, _) = self {
            dirty.insert((lease.age.clone(), lease.id.clone(), slot));
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn small() {
        assert_eq!(size_of::<super::Entry>(), 24);
    }
}
