// SPDX-License-Identifier: Apache-2.0
//! What is known about the store: its answer, net-conf, the certificates, and what the kernel has for the backend of net-conf.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use weft_backends::register::device_kind;
use weft_subnet::cidr::Subnets;
use weft_subnet::net_conf::{BadNetConf, NetConf};

use super::certificates::{self, CertificateFact};
use crate::sources::{CertificateFile, StoreAlarm, StoreAnswer, StoreSources};

/// A module of the kernel that a backend needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module {
    /// Its name.
    pub name: &'static str,
    /// Whether the kernel has it. `None` means that this is not known.
    pub is_there: Option<bool>,
}

/// The part of net-conf that is examined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExaminedNetConf {
    /// The address ranges of all pods.
    pub networks: Subnets,
    /// The type of the backend.
    pub backend: String,
    /// The module of the kernel that the backend needs, if it needs one.
    pub module: Option<Module>,
}

/// Everything that was read.
#[derive(Debug, Default, Clone)]
pub struct StoreFacts {
    /// The store, for people.
    pub place: String,
    /// What it answered.
    pub answer: StoreAnswer,
    /// Why it refuses writes although it answers.
    pub alarm: Option<StoreAlarm>,
    /// net-conf, or why it is not valid; `None` if the store did not answer.
    pub net_conf: Option<Result<ExaminedNetConf, BadNetConf>>,
    /// The certificates.
    pub certificates: Vec<CertificateFact>,
    /// Why a certificate could not be read.
    pub unreadable: Vec<String>,
    /// Seconds since 1970, by the clock of this node.
    pub now: u64,
}

/// Reads the certificates, and what the kernel has.
pub(super) fn read(sources: &StoreSources) -> StoreFacts {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let (place, answer) = (sources.place.clone(), sources.answer.clone());
    let alarm = sources.alarm.clone();
    let mut facts = StoreFacts { place, answer, alarm, now, ..StoreFacts::default() };
    for CertificateFile { purpose, file } in &sources.certificates {
        match certificates::read(purpose, file) {
            Ok(certificates) => facts.certificates.extend(certificates),
            Err(why) => facts.unreadable.push(format!("{purpose}: {why}")),
        }
    }
    if let StoreAnswer::Answered { net_conf, .. } = &sources.answer {
        facts.net_conf = Some(parse(net_conf));
    }
    facts
}

fn parse(net_conf: &str) -> Result<ExaminedNetConf, BadNetConf> {
    let network = NetConf::parse(net_conf)?;
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let needed = device_kind(&network.backend_type);
    let module = needed.map(|name| Module { name, is_there: has_module(Path::new("/"), release.trim(), name) });
    Ok(ExaminedNetConf { networks: network.networks, backend: network.backend_type, module })
}

/// Returns true if a module is loaded, part of the kernel, or can be loaded. `None` means that the list of modules is not readable, as in a
/// container.
fn has_module(root: &Path, release: &str, name: &str) -> Option<bool> {
    if root.join("sys/module").join(name).exists() {
        return Some(true);
    }
    let dir = root.join("lib/modules").join(release);
    let read = |file: &str| fs::read_to_string(dir.join(file));
    let (built_in, loadable) = (read("modules.builtin").ok()?, read("modules.dep").ok()?);
    // The lines are paths, such as kernel/drivers/net/vxlan/vxlan.ko.xz: ...
    let file = format!("/{name}.ko");
    Some(
        built_in
            .lines()
            .chain(loadable.lines())
            .any(|line| line.split(':').next().is_some_and(|path| path.contains(&file))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_loaded_built_in_or_loadable() {
        let root = tempfile::tempdir().unwrap();
        let has = |name: &str| has_module(root.path(), "6.1", name);
        assert_eq!(has("vxlan"), None, "nothing is readable");
        let modules = root.path().join("lib/modules/6.1");
        fs::create_dir_all(&modules).unwrap();
        fs::write(modules.join("modules.builtin"), "kernel/drivers/net/tun.ko\n").unwrap();
        fs::write(modules.join("modules.dep"), "kernel/net/ipv4/ipip.ko.xz: kernel/net/ipv4/tunnel4.ko.xz\n").unwrap();
        assert_eq!(["vxlan", "tun", "ipip", "tunnel4"].map(has), [Some(false), Some(true), Some(true), Some(false)]);
        fs::create_dir_all(root.path().join("sys/module/vxlan")).unwrap();
        assert_eq!(has("vxlan"), Some(true));
    }
}
