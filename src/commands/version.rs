// SPDX-License-Identifier: Apache-2.0
//! `weft version`: what this program is.

use serde_json::json;

/// The version of weft.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Returns the version and what this build contains, as a JSON object in one line.
pub fn as_json() -> String {
    let stores: &[&str] = if cfg!(feature = "kube") { &["etcd", "dir", "kube"] } else { &["etcd", "dir"] };
    json!({"version": VERSION, "architecture": std::env::consts::ARCH, "stores": stores}).to_string()
}
