// SPDX-License-Identifier: Apache-2.0
//! The network namespaces of this machine: their addresses, and whether anything runs in them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use weft_cni::rtnl::Rtnl;

use super::processes::{Id, Processes, id};

/// A network namespace, not our own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Space {
    /// Its name under /run/netns, if it has one.
    pub name: Option<PathBuf>,
    /// Threads are in it.
    pub runs: bool,
    /// The runtime's cache speaks of it.
    pub cached: bool,
    /// Addresses that are valid beyond a link.
    pub addrs: BTreeSet<IpAddr>,
    /// Its id in our namespace, if it has one: links say it of their other end.
    pub number: Option<i32>,
}

/// Every namespace that has a name or a process; and those that could not be looked into.
///
/// # Errors
/// The directory of names cannot be read; a missing one has none.
pub fn read(dir: &Path, processes: &Processes, cached: &[PathBuf]) -> anyhow::Result<(Vec<Space>, Vec<String>)> {
    let ours = id(Path::new("/proc/thread-self/ns/net"))?;
    let names = names(dir)?;
    let cached: BTreeSet<Id> = cached.iter().filter_map(|path| id(path).ok()).collect();
    let mut paths: BTreeMap<Id, &Path> = processes.netns.iter().map(|(id, path)| (*id, path.as_path())).collect();
    paths.extend(names.iter().map(|(id, path)| (*id, path.as_path())));
    let (mut spaces, mut blind) = (Vec::new(), Vec::new());
    let mut host = Rtnl::open()?;
    for (id, path) in paths.into_iter().filter(|(id, _)| *id != ours) {
        let mut space = Space {
            name: names.get(&id).cloned(),
            runs: processes.netns.contains_key(&id),
            cached: cached.contains(&id),
            ..Space::default()
        };
        match look_into(path, &mut host, &mut space) {
            Ok(()) => spaces.push(space),
            // Its last process may have ended meanwhile.
            Err(_) if space.name.is_none() && !path.exists() => {}
            Err(error) => blind.push(format!("{}: {error}", path.display())),
        }
    }
    Ok((spaces, blind))
}

fn look_into(path: &Path, host: &mut Rtnl, space: &mut Space) -> anyhow::Result<()> {
    let netns = File::open(path)?;
    let addrs = Rtnl::open_in(netns.as_fd())?.addrs()?;
    space.addrs =
        addrs.into_iter().filter(|addr| addr.global && !addr.addr.is_loopback()).map(|addr| addr.addr).collect();
    space.number = host.netns_id(netns.as_fd())?;
    Ok(())
}

fn names(dir: &Path) -> io::Result<BTreeMap<Id, PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        entries => entries?,
    };
    // A name whose mount is gone is an ordinary file: on another device than namespaces are.
    let device = id(Path::new("/proc/thread-self/ns/net"))?.0;
    let named = entries.flatten().filter_map(|entry| Some((id(&entry.path()).ok()?, entry.path())));
    Ok(named.filter(|(id, _)| id.0 == device).collect())
}
