// SPDX-License-Identifier: Apache-2.0
//! The CNI plugin: reads subnet.env, completes the configuration of a delegate (the bridge plugin or the built-in
//! `weft-veth`), and runs it.
//!
//! The runtime starts it for every pod, so it must start fast. It therefore has no async runtime, no argument parser
//! and no logger.
//!
//! Invariant: everything that a delegate created can be removed later. The record of an attachment is on disk before
//! the delegate runs, and it is removed only after the delegate's DEL has succeeded.

use std::io::Write;

/// Writes a line to standard error, which goes to the runtime's log. Standard error is not buffered, so one line is one
/// write. Write errors are ignored.
macro_rules! note {
    ($($text:tt)*) => { $crate::write_note(format!($($text)*)) };
}

pub mod attachments;
pub mod bridge;
pub mod conf;
pub mod conf_dir;
pub mod delegate;
pub mod env;
pub mod flannel;
pub mod gc;
pub mod hostlocal;
pub mod iptables;
pub mod masquerade;
pub mod plugin;
pub mod program;
pub mod record;
pub mod render;
pub mod spec;
pub mod status;
pub mod subnet_env;
pub mod veth;
pub mod wait;

/// Default of `subnetFile`.
pub const SUBNET_FILE: &str = weft_subnet::env::USUAL_FILE;
/// Default of `dataDir`.
pub const DATA_DIR: &str = "/var/lib/cni/flannel";

fn write_note(mut line: String) {
    line.push('\n');
    let _ = std::io::stderr().write_all(line.as_bytes());
}
