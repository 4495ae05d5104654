// SPDX-License-Identifier: Apache-2.0
//! The etcd v3 store, byte-compatible with flannel (flannel-compat.md section 1).

use std::path::PathBuf;
use std::time::Duration;

/// How to reach etcd.
#[derive(Debug, Clone)]
pub struct EtcdOptions {
    /// `--etcd-endpoints`.
    pub endpoints: Vec<String>,
    /// `--etcd-prefix`.
    pub prefix: String,
    /// `--etcd-keyfile`.
    pub key_file: Option<PathBuf>,
    /// `--etcd-certfile`.
    pub cert_file: Option<PathBuf>,
    /// `--etcd-cafile`.
    pub ca_file: Option<PathBuf>,
    /// `--etcd-username`.
    pub username: Option<String>,
    /// `--etcd-password`.
    pub password: Option<String>,
    /// TTL of our lease: 24 h, as flannel's.
    pub lease_ttl: Duration,
    /// `--subnet-lease-renew-margin`: renewed at the latest this long before expiry.
    pub renew_margin: Duration,
}
