// SPDX-License-Identifier: Apache-2.0
//! The files of CNI on this node: configurations, plugins, and the addresses that host-local gave to pods.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use weft_cni::conf_dir::is_conf;
use weft_cni::veth;

use super::cni_plugins;
use crate::processes::ProcessList;
use crate::sources::CniSources;

/// Why a configuration is not known, or cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadConf {
    /// This process may not read it. A container runtime may.
    #[error("permission denied")]
    Denied,
    /// It is a link to a file that does not exist.
    #[error("it is a link that leads nowhere")]
    DeadLink,
    /// It cannot be read, or is not JSON. The text says why.
    #[error("{0}")]
    Unreadable(String),
    /// A plugin in it has no type.
    #[error("a plugin in it has no `type`")]
    NoType,
    /// It has no plugins.
    #[error("it has no plugins")]
    NoPlugins,
}

/// A configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conf {
    /// Name of the file.
    pub name: String,
    /// The plugins that it needs, those of delegates included; or why they are not known.
    pub plugins: Result<Vec<String>, BadConf>,
    /// True if it is a link to another file.
    pub is_link: bool,
    /// True if it says that pods of one node must not reach each other.
    pub isolates: bool,
    /// The subnet files that plugins of weft and flannel read.
    pub subnet_files: Vec<PathBuf>,
    /// True if one of these files is that of the agent.
    pub reads_ours: bool,
}

/// Plugins that are on this node, and not where containerd looks for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Misplaced {
    /// The file of containerd.
    pub file: PathBuf,
    /// The directories in which it looks.
    pub dirs: Vec<PathBuf>,
    /// The plugins. If they are in several directories, those of the first one.
    pub plugins: Vec<String>,
    /// Where they are.
    pub place: PathBuf,
    /// A directory that has all plugins of the configuration.
    pub complete: Option<PathBuf>,
}

/// A plugin that cannot run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenPlugin {
    /// The file.
    pub path: PathBuf,
    /// Why it cannot run.
    pub why: String,
}

/// The addresses that host-local reserves in a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// Name of the network.
    pub network: String,
    /// The addresses.
    pub addrs: Vec<IpAddr>,
}

/// Everything that was read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct CniFiles {
    /// The directory of configurations.
    pub conf_dir: PathBuf,
    /// The configurations, in the order in which runtimes use them.
    pub confs: Vec<Conf>,
    /// The directory, or the configurations, that this process may not read.
    pub denied: Vec<PathBuf>,
    /// The plugins of the first configuration that are in none of the directories. Empty if none of the directories exists.
    pub missing: Vec<String>,
    /// The plugins of the first configuration that are there and cannot run.
    pub broken: Vec<BrokenPlugin>,
    /// The directories of plugins, for people.
    pub path: String,
    /// The addresses that host-local reserves.
    pub reserved: Vec<Reserved>,
    /// True if a kubelet runs in this network namespace.
    pub has_kubelet: bool,
}

/// Reads the files. What does not exist is empty. `subnet_file` is that of the agent.
pub(super) fn read(sources: &CniSources, subnet_file: &Path, processes: &ProcessList) -> CniFiles {
    let conf = |name: String| {
        let path = sources.conf_dir.join(&name);
        let list = plugin_list(&path);
        let subnet_files: Vec<PathBuf> = list.iter().flatten().filter_map(cni_plugins::subnet_file).collect();
        let reads_ours = subnet_files.iter().any(|file| is_same(file, subnet_file));
        let isolates = list.iter().flatten().any(isolates);
        let is_link = fs::symlink_metadata(&path).is_ok_and(|about| about.is_symlink());
        Conf { plugins: list.and_then(|list| plugins(&list)), is_link, isolates, subnet_files, reads_ours, name }
    };
    let confs: Vec<Conf> = names(&sources.conf_dir).into_iter().filter(|name| is_conf(name)).map(conf).collect();
    let denied_dir = fs::read_dir(&sources.conf_dir).is_err_and(|error| is_denied(&error));
    let denied_confs = confs.iter().filter(|conf| conf.plugins == Err(BadConf::Denied));
    let denied = denied_confs.map(|conf| sources.conf_dir.join(&conf.name));
    let denied = denied_dir.then(|| sources.conf_dir.clone()).into_iter().chain(denied).collect();
    let wanted = || confs.first().and_then(|first| first.plugins.as_ref().ok()).into_iter().flatten();
    let has_dir = sources.path.iter().any(|dir| dir.is_dir());
    let is_missing = |plugin: &&String| !sources.path.iter().any(|dir| is_program(&dir.join(plugin)));
    let place = |plugin: &String| sources.path.iter().map(|dir| dir.join(plugin)).find(|path| is_program(path));
    let broken = |path: PathBuf| cni_plugins::why_not(&path).map(|why| BrokenPlugin { path, why });
    CniFiles {
        conf_dir: sources.conf_dir.clone(),
        missing: wanted().filter(|_| has_dir).filter(is_missing).cloned().collect(),
        broken: wanted().filter_map(place).filter_map(broken).collect(),
        denied,
        confs,
        path: sources.path.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(":"),
        reserved: reserved(&sources.networks),
        has_kubelet: !processes.here(&["kubelet"]).is_empty(),
    }
}

/// Returns the addresses that host-local reserves in each network. `networks` is its directory.
pub(super) fn reserved(networks: &Path) -> Vec<Reserved> {
    let of_network = |network: String| {
        let addrs = names(&networks.join(&network)).iter().filter_map(|name| name.parse().ok()).collect();
        Reserved { network, addrs }
    };
    names(networks).into_iter().map(of_network).collect()
}

/// Returns true if host-local reserves an address in one of these networks.
pub(crate) fn is_reserved(addr: IpAddr, networks: &[Reserved]) -> bool {
    networks.iter().any(|network| network.addrs.contains(&addr))
}

/// Returns the sorted names of what a directory contains. A directory that cannot be read counts as empty.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// Returns true for a file that can be executed.
pub(super) fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
}

/// Returns true if this process may not read what the container runtime may. That is also so for root in a user namespace, without capabilities, or where
/// SELinux confines it.
fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

/// Returns the plugins of a configuration, as it describes them.
fn plugin_list(path: &Path) -> Result<Vec<Value>, BadConf> {
    let text = fs::read(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => BadConf::DeadLink,
        _ if is_denied(&error) => BadConf::Denied,
        _ => BadConf::Unreadable(error.to_string()),
    })?;
    let value: Value = serde_json::from_slice(&text).map_err(|error| BadConf::Unreadable(error.to_string()))?;
    Ok(match &value["plugins"] {
        Value::Array(list) => list.clone(),
        _ => vec![value],
    })
}

/// Returns true if a plugin isolates the ports of its bridge, or lets its delegate do so.
fn isolates(plugin: &Value) -> bool {
    [&plugin["portIsolation"], &plugin["delegate"]["portIsolation"]]
        .into_iter()
        .any(|value| *value == Value::Bool(true))
}

/// Returns the names of these plugins, and of those that they call.
fn plugins(list: &[Value]) -> Result<Vec<String>, BadConf> {
    let mut found: Vec<String> = Vec::new();
    for plugin in list {
        let kind = plugin["type"].as_str().filter(|kind| !kind.is_empty()).ok_or(BadConf::NoType)?;
        let mut add = |value: &Value, default: Option<&str>| {
            let named = value["type"].as_str().or(default).filter(|name| !name.is_empty() && !name.contains('/'));
            found.extend(named.map(str::to_owned).filter(|name| !found.contains(name)));
        };
        add(plugin, None);
        if kind == "flannel" {
            // These are the defaults of flannel's plugin. weft's plugin contains weft-veth, which needs no file of its own then.
            if plugin["delegate"]["type"] != veth::TYPE {
                add(&plugin["delegate"], Some("bridge"));
            }
            add(&plugin["ipam"], Some("host-local"));
        } else {
            add(&plugin["ipam"], None);
        }
    }
    if found.is_empty() { Err(BadConf::NoPlugins) } else { Ok(found) }
}

/// Returns true for two paths of one file. /var/run is a link to /run.
fn is_same(one: &Path, other: &Path) -> bool {
    one == other || fs::canonicalize(one).is_ok_and(|one| fs::canonicalize(other).is_ok_and(|other| one == other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_not_even_root_may_read_here_is_not_called_unusable() {
        let error = |errno: i32| io::Error::from_raw_os_error(errno);
        assert!(is_denied(&error(nix::libc::EACCES)), "the tests run as root");
        assert!(!is_denied(&error(nix::libc::EISDIR)));
    }
}
