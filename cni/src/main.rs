// SPDX-License-Identifier: Apache-2.0
//! The program contains two plugins. It runs as `weft-veth` if it was started by that name, else as the replacement for
//! flannel's plugin.

use std::path::Path;
use std::process::ExitCode;

use weft_cni::{flannel, plugin, veth};

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    let is_veth = Path::new(&name).file_name().is_some_and(|name| name == "weft-veth");
    let version = env!("CARGO_PKG_VERSION");
    if is_veth {
        plugin::main(&format!("CNI plugin weft-veth {version} (routed pods)"), veth::answer)
    } else {
        plugin::main(&format!("CNI plugin weft-cni {version} (in place of flannel's)"), flannel::answer)
    }
}
