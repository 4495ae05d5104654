// SPDX-License-Identifier: Apache-2.0
//! Reads files and the kernel's tables, without drawing conclusions.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use serde_json::Value;
use weft_cni::hostlocal::{self, Reservation};
use weft_cni::record::{self, Record};
use weft_cni::veth::ALIAS;
use weft_netlink::rtnl::Rtnl;

use crate::known_links::BRIDGE;
use crate::namespaces::{self, Namespace};
use crate::processes::{self, Processes};

/// What is examined.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The directory of host-local, which has a subdirectory for each network.
    pub networks: PathBuf,
    /// The directory of the CNI plugin's records.
    pub records: PathBuf,
    /// The runtime's cache of CNI results. The directory may be missing.
    pub results: PathBuf,
    /// The directory of named network namespaces.
    pub netns: PathBuf,
    /// The value of CNI_PATH, for the plugins that remove what a record describes.
    pub plugins: String,
    /// The age from which a file counts as left behind. A younger one may belong to a pod that is being started.
    pub min_age: Duration,
}

/// An address that host-local reserves.
#[derive(Debug, Clone)]
pub struct AddressFile {
    /// Name of the network.
    pub network: String,
    /// The file and its content.
    pub reservation: Reservation,
    /// Time since the file was written, if it is known.
    pub age: Option<Duration>,
}

/// A record of the CNI plugin.
#[derive(Debug, Clone)]
pub struct RecordFile {
    /// The file and its content.
    pub record: Record,
    /// Time since the file was written, if it is known.
    pub age: Option<Duration>,
}

/// A container in the runtime's cache whose network namespace exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedContainer {
    /// ID of the container.
    pub container: String,
    /// True if a process is in its namespace.
    pub has_processes: bool,
}

/// The veth pair of a pod, seen from the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VethPair {
    /// Name of the host's end.
    pub name: String,
    /// Interface index of the host's end.
    pub index: u32,
    /// ID of the container, if the alias of the link contains it.
    pub container: Option<String>,
    /// ID of the namespace of the other end; `None` if the other end is in our namespace, too.
    pub nsid: Option<i32>,
}

/// Everything that was read.
#[derive(Debug, Default)]
pub struct Facts {
    /// The addresses that host-local reserves.
    pub addresses: Vec<AddressFile>,
    /// The records of the CNI plugin.
    pub records: Vec<RecordFile>,
    /// The runtime's cache.
    pub cached: Vec<CachedContainer>,
    /// The veth pairs of pods.
    pub veth_pairs: Vec<VethPair>,
    /// The network namespaces.
    pub namespaces: Vec<Namespace>,
    /// The control groups and the command line of each process, as one text.
    pub process_texts: Vec<String>,
    /// What could not be read. If there is anything, no conclusion is certain.
    pub unreadable: Vec<String>,
}

/// Reads everything.
///
/// # Errors
/// A file or directory that exists cannot be read, or the kernel's tables cannot.
pub fn read(sources: &Sources) -> anyhow::Result<Facts> {
    let mut facts = Facts::default();
    // The files are read first. A pod that is started meanwhile is missing in the files then, so nothing of it can look
    // like a leak.
    let records = record::list(&sources.records)?;
    // A record may name another bridge than the usual one.
    let bridges: BTreeSet<String> = records.iter().filter_map(bridge).chain([BRIDGE.to_owned()]).collect();
    facts.records = records.into_iter().map(|record| RecordFile { age: age(&record.path), record }).collect();
    facts.addresses = addresses(&sources.networks)?;
    let results = results(&sources.results).with_context(|| format!("read {}", sources.results.display()))?;
    let processes = processes::read().context("read /proc")?;
    facts.cached = cached(&results, &processes);
    facts.unreadable.extend(processes::unreadable());
    let paths: Vec<PathBuf> = results.into_iter().flat_map(|(_, paths)| paths).collect();
    let (namespaces, unreadable) = namespaces::read(&sources.netns, &processes, &paths)?;
    (facts.namespaces, facts.process_texts) = (namespaces, processes.texts);
    facts.unreadable.extend(unreadable);
    facts.veth_pairs = veth_pairs(&bridges)?;
    for pair in &facts.veth_pairs {
        if pair.nsid.is_some_and(|nsid| !facts.namespaces.iter().any(|namespace| namespace.nsid == Some(nsid))) {
            facts.unreadable.push(format!(
                "the network namespace at the other end of {}: it has no name and no process",
                pair.name
            ));
        }
    }
    Ok(facts)
}

fn addresses(networks: &Path) -> anyhow::Result<Vec<AddressFile>> {
    let mut addresses = Vec::new();
    for dir in subdirs(networks).with_context(|| format!("read {}", networks.display()))? {
        let network = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let file = |reservation: Reservation| AddressFile {
            network: network.clone(),
            age: age(&reservation.path),
            reservation,
        };
        addresses.extend(hostlocal::list(&dir)?.into_iter().map(file));
    }
    Ok(addresses)
}

fn cached(results: &[(String, Vec<PathBuf>)], processes: &Processes) -> Vec<CachedContainer> {
    let mut cached = Vec::new();
    for (container, paths) in results {
        let ids: Vec<_> = paths.iter().filter_map(|path| processes::id(path).ok()).collect();
        if !ids.is_empty() {
            let has_processes = ids.iter().any(|id| processes.netns.contains_key(id));
            cached.push(CachedContainer { container: container.clone(), has_processes });
        }
    }
    cached
}

/// Returns the veth pairs that the alias of the routed pods marks, or whose host's end is a port of one of the bridges.
fn veth_pairs(bridges: &BTreeSet<String>) -> anyhow::Result<Vec<VethPair>> {
    let links = Rtnl::open()?.links()?;
    let of_pods = links.iter().filter(|link| link.kind == "bridge" && bridges.contains(&link.name));
    let masters: Vec<u32> = of_pods.map(|link| link.index).collect();
    let mut pairs = Vec::new();
    for link in links.into_iter().filter(|link| link.kind == "veth") {
        let mut words = link.alias.split(' ');
        let routed = words.next() == Some(ALIAS);
        if routed || masters.contains(&link.master) {
            let container = routed.then(|| words.nth(1)).flatten().map(str::to_owned);
            pairs.push(VethPair { name: link.name.clone(), index: link.index, container, nsid: link.peer_netns });
        }
    }
    Ok(pairs)
}

/// Returns the name of the bridge that a record mentions.
fn bridge(record: &Record) -> Option<String> {
    record.conf.as_ref()?.get("bridge")?.as_str().map(str::to_owned)
}

/// Reads libcni's cache. Returns for each attachment the container's ID and the paths of the namespaces in its result.
/// Files in another format belong to another program and are ignored.
fn results(dir: &Path) -> io::Result<Vec<(String, Vec<PathBuf>)>> {
    let files = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        files => files?,
    };
    let mut all = Vec::new();
    for file in files {
        let text = match fs::read(file?.path()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            text => text?,
        };
        let Ok(value) = serde_json::from_slice::<Value>(&text) else { continue };
        let Some(container) = value["containerId"].as_str().map(str::to_owned) else { continue };
        let interfaces = value["result"]["interfaces"].as_array().cloned().unwrap_or_default();
        let named =
            interfaces.iter().filter_map(|interface| interface["sandbox"].as_str()).chain(value["netns"].as_str());
        all.push((container, named.filter(|path| !path.is_empty()).map(PathBuf::from).collect()));
    }
    Ok(all)
}

fn subdirs(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut dirs = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            dirs.push(entry.path());
        }
    }
    dirs.sort_unstable();
    Ok(dirs)
}

/// Returns the time since a file was written. It is unknown if that time is in the future.
fn age(path: &Path) -> Option<Duration> {
    let written = fs::metadata(path).and_then(|about| about.modified()).ok()?;
    SystemTime::now().duration_since(written).ok()
}
