// SPDX-License-Identifier: Apache-2.0
//! A lease: which node owns which subnet, and how to reach that node. The key of a lease is described in
//! docs/flannel-formats.md, "Leases in etcd".

use std::fmt;
use std::sync::Arc;

use crate::attrs::Attrs;
use crate::cidr::Subnets;
use crate::text;

/// The name of a lease in its store: the last element of the etcd key, the file name without `.json`, or the name of the Node.
pub type Id = Arc<str>;

/// The longest id in bytes. The name of a Kubernetes Node has at most 253 bytes, a file name without its suffix 250, and the longest
/// key that names an IPv4 and an IPv6 subnet 70.
pub const MAX_ID_BYTES: usize = 253;

/// Returns the id for the name of a key, a file or a Node. Returns `None` if the name is empty, too long, or has characters that are
/// not printable. No lease has such a name, and a store may contain a million of them, which would all be kept and printed.
pub fn id(name: &str) -> Option<Id> {
    let printable = || name.chars().all(text::is_printable);
    (!name.is_empty() && name.len() <= MAX_ID_BYTES && printable()).then(|| name.into())
}

/// When a lease was created, as its store says. A smaller value is older. Later writes do not change it.
///
/// In etcd this is `create_revision`. In Kubernetes it is `creationTimestamp` in seconds, then the uid. In a directory it is the member
/// `Created`, in nanoseconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Age {
    /// Revision or time.
    pub stamp: u64,
    /// Decides between equal stamps. It is empty if stamps are unique.
    pub tie: Arc<str>,
}

/// A lease. It was read without error, but nothing says yet that it is true: see [`crate::peers`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Name in the store.
    pub id: Id,
    /// The subnets that the node owns. Their host bits are zero.
    pub subnets: Subnets,
    /// What the node publishes about itself.
    pub attrs: Attrs,
    /// When it was created.
    pub age: Age,
}

/// Why a record is not a lease: one sentence for the operator.
///
/// The sentence may quote what a peer wrote, so it is made printable and has at most [`text::MAX_SENTENCE_CHARS`] characters. It is one
/// small allocation, because a damaged store may contain as many of these as leases. Each store has its own error type, from which the
/// sentence is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable(Box<str>);

impl Unreadable {
    /// Creates the reason from an error or a text of any length.
    pub fn new(reason: impl fmt::Display) -> Unreadable {
        Unreadable(text::sentence(&reason.to_string()).into())
    }

    /// Returns the sentence.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unreadable {}

/// One entry of a store. An entry that is not a lease is kept together with the reason, so that it can be shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Name in the store.
    pub id: Id,
    /// The lease, or why the entry is not one.
    pub lease: Result<Lease, Unreadable>,
}

impl Record {
    /// Creates a record as it comes from its store.
    pub fn new(id: Id, lease: Result<Lease, impl fmt::Display>) -> Record {
        Record { id, lease: lease.map_err(Unreadable::new) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_lease_can_have_is_not_an_id() {
        for name in ["10.5.1.0-24", "10.5.1.0-24&fd00:5:0:1::-64", "node-1.example.org", "no lease", &"n".repeat(253)] {
            assert_eq!(id(name).as_deref(), Some(name));
        }
        for name in ["", "a\u{1b}[2J", "two\nlines", "\u{202e}left", &"n".repeat(254)] {
            assert_eq!(id(name), None, "{name:?}");
        }
    }

    #[test]
    fn the_reason_of_an_unreadable_record_has_a_bounded_length() {
        let record = Record::new("x".into(), Err::<Lease, _>("\u{7}".repeat(1_000_000)));
        let reason = record.lease.unwrap_err();
        let reason = reason.as_str();
        assert!(reason.len() <= text::MAX_SENTENCE_CHARS && reason.ends_with(text::CUT), "{reason}");
    }
}
