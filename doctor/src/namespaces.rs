// SPDX-License-Identifier: Apache-2.0
//! The network namespaces of this machine: their addresses, and whether any process is in them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use weft_netlink::rtnl::Rtnl;

use crate::processes::{Id, Processes, id};

/// Where container runtimes and other programs keep the names of network namespaces.
pub const NAMES: &str = "/run/netns";

/// A network namespace other than our own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Namespace {
    /// The path of its name below /run/netns, if it has one.
    pub name: Option<PathBuf>,
    /// True if threads are in it.
    pub has_processes: bool,
    /// True if the runtime's cache mentions it.
    pub cached: bool,
    /// Its addresses whose scope is wider than the link.
    pub addrs: BTreeSet<IpAddr>,
    /// Its ID as seen from our namespace, if it has one. A link reports the namespace of its other end by this ID.
    pub nsid: Option<i32>,
}

impl Namespace {
    /// Returns true if a pod may use the namespace. A runtime creates the namespace before the pod's first process, and
    /// mentions it in its cache until it has called DEL.
    pub fn in_use(&self) -> bool {
        self.has_processes || self.cached
    }
}

/// Returns every namespace that has a name or a process, and a sentence for each that could not be read. `cached` are
/// the paths of the namespaces that the runtime's cache mentions.
///
/// # Errors
/// The directory of names cannot be read. A missing directory is not an error.
pub fn read(dir: &Path, processes: &Processes, cached: &[PathBuf]) -> anyhow::Result<(Vec<Namespace>, Vec<String>)> {
    let ours = id(Path::new("/proc/thread-self/ns/net"))?;
    let names = names(dir)?;
    let cached: Vec<Id> = cached.iter().filter_map(|path| id(path).ok()).collect();
    let without_name = processes.netns.iter().filter(|(id, _)| !names.contains_key(*id));
    let (mut namespaces, mut unreadable) = (Vec::new(), Vec::new());
    let mut host = Rtnl::open()?;
    for (id, path) in names.iter().chain(without_name).filter(|(id, _)| **id != ours) {
        let mut namespace = Namespace {
            name: names.get(id).cloned(),
            has_processes: processes.netns.contains_key(id),
            cached: cached.contains(id),
            ..Namespace::default()
        };
        match read_addresses(path, &mut host, &mut namespace) {
            Ok(()) => namespaces.push(namespace),
            // The last process of the namespace may have ended meanwhile.
            Err(_) if namespace.name.is_none() && !path.exists() => {}
            Err(error) => unreadable.push(format!("{}: {error}", path.display())),
        }
    }
    Ok((namespaces, unreadable))
}

/// Reads the addresses and the ID of a namespace.
fn read_addresses(path: &Path, host: &mut Rtnl, namespace: &mut Namespace) -> anyhow::Result<()> {
    let netns = File::open(path)?;
    let addrs = Rtnl::open_in(netns.as_fd())?.addrs()?;
    namespace.addrs =
        addrs.into_iter().filter(|addr| addr.global && !addr.addr.is_loopback()).map(|addr| addr.addr).collect();
    namespace.nsid = host.netns_id(netns.as_fd())?;
    Ok(())
}

/// Returns the named namespaces.
pub(crate) fn names(dir: &Path) -> io::Result<BTreeMap<Id, PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        entries => entries?,
    };
    // A file on which no namespace is mounted any more is an ordinary file, which is on another device.
    let device = id(Path::new("/proc/thread-self/ns/net"))?.0;
    let named = entries.flatten().filter_map(|entry| Some((id(&entry.path()).ok()?, entry.path())));
    Ok(named.filter(|(id, _)| id.0 == device).collect())
}
