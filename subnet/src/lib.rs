// SPDX-License-Identifier: Apache-2.0
//! Leases, the net-conf, and the stores that contain them.
//!
//! Without features this crate does no I/O: it contains the formats, the checks of what a store contains, and the
//! choice of a free subnet. The features `etcd`, `dir` and `kube` add the stores, which implement [`source::Source`].

pub mod allocate;
pub mod attrs;
pub mod backend_types;
pub mod cidr;
pub mod connected;
pub mod env;
pub mod evidence;
pub mod hold;
pub mod json;
pub mod lease;
pub mod net_conf;
pub mod old_defects;
pub mod outside;
pub mod peers;
#[cfg(feature = "source")]
pub mod retry;
pub mod saved_peers;
#[cfg(feature = "source")]
pub mod source;
pub mod text;

#[cfg(feature = "dir")]
pub mod dir;
#[cfg(feature = "etcd")]
pub mod etcd;
#[cfg(feature = "kube")]
pub mod kube;
