// SPDX-License-Identifier: Apache-2.0
//! Which plugin we are says the name we were started by: `weft-veth`, else flannel's.

use std::path::Path;
use std::process::ExitCode;

use weft_cni::{flannel, plugin, veth};

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    let routed = Path::new(&name).file_name().is_some_and(|name| name == "weft-veth");
    let version = env!("CARGO_PKG_VERSION");
    if routed {
        plugin::main(&format!("CNI plugin weft-veth {version} (routed pods)"), veth::answer)
    } else {
        plugin::main(&format!("CNI plugin weft-cni {version} (in place of flannel's)"), flannel::answer)
    }
}
