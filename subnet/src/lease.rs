// SPDX-License-Identifier: Apache-2.0
//! A lease: who owns which subnet, and how to reach it; and its key on the wire (docs/flannel-formats.md, "Leases in etcd").

use std::sync::Arc;

use crate::attrs::Attrs;
use crate::cidr::Subnets;
use crate::text;

/// Identity of a record in its store: the last element of the etcd key, the file name, or the node name.
pub type Id = Arc<str>;

/// The longest id, bytes. A Kubernetes Node has 253 at most, a file name without its suffix 250, and the longest key that names an
/// IPv4 and an IPv6 subnet has 70.
pub const MOST_OF_AN_ID: usize = 253;

/// The id that a key, a file or a Node of this name has. `None` for a name that no lease can have because it is too long or has
/// characters that are not printable: a store may hold a million of them, and each would be kept and printed.
pub fn id(name: &str) -> Option<Id> {
    let printable = || name.chars().all(text::is_printable);
    (!name.is_empty() && name.len() <= MOST_OF_AN_ID && printable()).then(|| name.into())
}

/// When a lease was created, in the store's own terms; smaller is older. Never the time of the last write.
/// etcd: create_revision; Kubernetes: creationTimestamp in seconds, then uid; directory: `Created` in nanoseconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Age {
    /// Revision or time.
    pub stamp: u64,
    /// Breaks ties (uid; empty where stamps are unique).
    pub tie: Arc<str>,
}

/// One lease, parsed. Nothing says yet that it may be believed: see [`crate::peers`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Identity in the store.
    pub id: Id,
    /// What it grants. Truncated networks.
    pub subnets: Subnets,
    /// What the owner says of itself.
    pub attrs: Attrs,
    /// Creation, by the store's reckoning.
    pub age: Age,
}

/// One entry of a store, each judged alone: what did not parse is carried along with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Identity in the store.
    pub id: Id,
    /// The lease, or why it could not be read.
    pub lease: Result<Lease, String>,
}

impl Record {
    /// A record as it comes from its store. This is the door: the reason, which may quote what a peer wrote, becomes a bounded sentence
    /// here ([`text::sentence`]); the bounds of a lease are [`crate::attrs`]'.
    pub fn new(id: Id, lease: Result<Lease, impl std::fmt::Display>) -> Record {
        let lease = lease.map_err(|reason| text::sentence(&reason.to_string()));
        Record { id, lease }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_lease_can_have_are_no_ids() {
        for name in ["10.5.1.0-24", "10.5.1.0-24&fd00:5:0:1::-64", "node-1.example.org", "no lease", &"n".repeat(253)] {
            assert_eq!(id(name).as_deref(), Some(name));
        }
        for name in ["", "a\u{1b}[2J", "two\nlines", "\u{202e}left", &"n".repeat(254)] {
            assert_eq!(id(name), None, "{name:?}");
        }
    }

    #[test]
    fn a_reason_is_bounded_where_the_record_enters() {
        let record = Record::new("x".into(), Err::<Lease, _>("\u{7}".repeat(1_000_000)));
        let reason = record.lease.unwrap_err();
        assert!(reason.len() <= text::MOST_OF_A_SENTENCE && reason.ends_with(text::CUT), "{reason}");
    }
}
