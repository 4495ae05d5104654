// SPDX-License-Identifier: Apache-2.0
//! The module of the kernel that the backend needs.

use std::fs;
use std::path::Path;

use weft_backends::register::device_kind;
use weft_backends::{ipip, vxlan, wireguard};
use weft_subnet::net_conf::NetConf;

use crate::processes;
use crate::sources::{NodeSources, StoreAnswer};

/// The modules that are in /sys/module also if they are built in, because they have parameters or a version.
const SHOWN: [&str; 3] = [vxlan::DEVICE_KIND, ipip::DEVICE_KIND, wireguard::DEVICE_KIND];

/// The first process of the host.
const INIT: u32 = 1;

/// The module of the kernel that the backend needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeededModule {
    /// The type of the backend.
    pub backend: String,
    /// Its name.
    pub name: &'static str,
    /// Whether the kernel has it.
    pub state: ModuleState,
}

/// Whether the kernel has a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModuleState {
    /// It is loaded, built in, or can be loaded.
    There,
    /// The kernel that runs has no such module.
    Missing,
    /// It is not loaded, and the modules of the kernel that runs are gone. Those of other kernels are there, as after an upgrade.
    Gone {
        /// The release of the kernel that runs.
        running: String,
        /// The releases whose modules include it.
        others: Vec<String>,
    },
    /// This is not known.
    Unknown,
}

/// Reads what the kernel has for the backend of net-conf, or for that of the agent. `None` if the backend is not known, or needs no module.
pub(super) fn read(sources: &NodeSources) -> Option<NeededModule> {
    let backend = match &sources.store.answer {
        StoreAnswer::Answered { net_conf, .. } => NetConf::parse(net_conf).ok()?.backend_type,
        _ => sources.backend.clone(),
    };
    let name = device_kind(&backend)?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    // A container may have modules of its own, which are none of this kernel, even if it sees the processes of the host.
    let is_host = processes::unreadable().is_none() && processes::has_our_root(INIT);
    Some(NeededModule { backend, name, state: state(Path::new("/"), release.trim(), name, is_host) })
}

fn state(root: &Path, release: &str, name: &str, is_host: bool) -> ModuleState {
    let all = root.join("lib/modules");
    if root.join("sys/module").join(name).exists() {
        return ModuleState::There;
    }
    match includes(&all.join(release), name) {
        Some(true) => return ModuleState::There,
        Some(false) => return ModuleState::Missing,
        None => {}
    }
    if !is_host || release.is_empty() || all.join(release).exists() || !SHOWN.contains(&name) {
        return ModuleState::Unknown;
    }
    let names = fs::read_dir(&all).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let mut others: Vec<String> = names.filter(|other| includes(&all.join(other), name) == Some(true)).collect();
    others.sort_unstable();
    if others.is_empty() { ModuleState::Unknown } else { ModuleState::Gone { running: release.to_owned(), others } }
}

/// Returns true if the modules in this directory, or the kernel to which it belongs, include this one. `None` means that its lists are not
/// readable, as in a container.
fn includes(dir: &Path, name: &str) -> Option<bool> {
    let read = |file: &str| fs::read_to_string(dir.join(file));
    let (built_in, loadable) = (read("modules.builtin").ok()?, read("modules.dep").ok()?);
    // The lines are paths, such as kernel/drivers/net/vxlan/vxlan.ko.xz: ...
    let file = format!("/{name}.ko");
    let mut lines = built_in.lines().chain(loadable.lines());
    Some(lines.any(|line| line.split(':').next().is_some_and(|path| path.contains(&file))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, release: &str, built_in: &str, loadable: &str) {
        let modules = root.join("lib/modules").join(release);
        fs::create_dir_all(&modules).unwrap();
        fs::write(modules.join("modules.builtin"), built_in).unwrap();
        fs::write(modules.join("modules.dep"), loadable).unwrap();
    }

    #[test]
    fn a_module_is_loaded_built_in_or_loadable() {
        let root = tempfile::tempdir().unwrap();
        let of = |name: &str| state(root.path(), "6.1", name, true);
        assert_eq!(of("vxlan"), ModuleState::Unknown, "nothing is readable");
        write(
            root.path(),
            "6.1",
            "kernel/drivers/net/tun.ko\n",
            "kernel/net/ipv4/ipip.ko.xz: kernel/net/ipv4/tunnel4.ko.xz\n",
        );
        assert_eq!(["tun", "ipip"].map(of), [ModuleState::There, ModuleState::There]);
        assert_eq!(["vxlan", "tunnel4"].map(of), [ModuleState::Missing, ModuleState::Missing]);
        fs::create_dir_all(root.path().join("sys/module/vxlan")).unwrap();
        assert_eq!(of("vxlan"), ModuleState::There);
    }

    /// Some distributions remove the modules of the kernel that runs when they install a newer one.
    #[test]
    fn modules_that_went_with_an_upgrade_are_told_from_those_that_cannot_be_seen() {
        let root = tempfile::tempdir().unwrap();
        let of = |name: &str, is_host| state(root.path(), "6.1.21-v8+", name, is_host);
        let dep = "kernel/drivers/net/vxlan/vxlan.ko.xz: kernel/net/ipv4/udp_tunnel.ko.xz\n";
        write(root.path(), "6.6.20-rpt-rpi-v8", "", dep);
        write(root.path(), "5.10.0-without", "", "");
        fs::create_dir_all(root.path().join("lib/modules/empty")).unwrap();
        let others = vec!["6.6.20-rpt-rpi-v8".to_owned()];
        assert_eq!(of("vxlan", true), ModuleState::Gone { running: "6.1.21-v8+".to_owned(), others });
        assert_eq!(of("vxlan", false), ModuleState::Unknown, "a container has modules of another kernel");
        assert_eq!(of("ipip", true), ModuleState::Unknown, "no kernel here has it, so a restart changes nothing");
        assert_eq!(of("tun", true), ModuleState::Unknown, "it may be built in");
        fs::create_dir_all(root.path().join("lib/modules/6.1.21-v8+")).unwrap();
        assert_eq!(of("vxlan", true), ModuleState::Unknown, "the directory is there, and its lists are not");
        fs::create_dir_all(root.path().join("sys/module/vxlan")).unwrap();
        assert_eq!(of("vxlan", true), ModuleState::There);
    }
}
