// SPDX-License-Identifier: Apache-2.0
//! The CNI plugin: reads subnet.env, renders the configuration of a delegate (bridge, or our own routed pods) and calls it.
//!
//! It is started for every pod, so its own start is what matters: no runtime, no parser of arguments, no logger. What it
//! promises: nothing that a delegate made can be forgotten. The record is on disk before the delegate runs, and goes only
//! when the delegate has taken everything back.

use std::io::Write;

/// A line for the runtime's log: one write, for nothing buffers standard error; nobody there to read it is no failure.
macro_rules! note {
    ($($text:tt)*) => { $crate::write_note(format!($($text)*)) };
}

pub mod attachments;
pub mod bridge;
pub mod conf;
pub mod delegate;
pub mod env;
pub mod flannel;
pub mod gc;
pub mod hostlocal;
pub mod masquerade;
pub mod plugin;
pub mod record;
pub mod render;
pub mod rtnl;
pub mod spec;
pub mod status;
pub mod subnet_env;
pub mod veth;
pub mod wait;

/// Where the agent writes subnet.env, unless `subnetFile` says otherwise.
pub const SUBNET_FILE: &str = weft_subnet::env::USUAL_FILE;
/// Where records are kept, unless `dataDir` says otherwise.
pub const DATA_DIR: &str = "/var/lib/cni/flannel";

fn write_note(mut line: String) {
    line.push('\n');
    let _ = std::io::stderr().write_all(line.as_bytes());
}
