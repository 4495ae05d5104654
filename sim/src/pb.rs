// SPDX-License-Identifier: Apache-2.0
//! etcd's protocol, which `build.rs` makes from `proto/etcd.proto`.
#![allow(missing_docs, clippy::all, clippy::too_many_lines)]

tonic::include_proto!("etcdserverpb");
