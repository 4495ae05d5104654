// SPDX-License-Identifier: Apache-2.0
//! Leases, the network configuration, and the stores that hold them.
//!
//! Without features this crate is pure: wire formats, the judgement of what a store says, the choice of a free subnet.
//! The stores themselves stand behind the features `etcd`, `dir` and `kube`, all behind [`source::Source`].

pub mod attrs;
pub mod cache;
pub mod cidr;
pub mod env;
pub mod hold;
pub mod lease;
pub mod network;
pub mod peers;
pub mod pick;
#[cfg(feature = "source")]
pub mod retry;
#[cfg(feature = "source")]
pub mod source;

#[cfg(feature = "dir")]
pub mod dir;
#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(feature = "kube")]
pub mod kube;
