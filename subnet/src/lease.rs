// SPDX-License-Identifier: Apache-2.0
//! A lease: who owns which subnet, and how to reach it; and its key on the wire (flannel-compat.md section 1).

use std::sync::Arc;

use crate::attrs::Attrs;
use crate::cidr::Subnets;

/// Identity of a record in its store: the last element of the etcd key, the file name, or the node name.
pub type Id = Arc<str>;

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
