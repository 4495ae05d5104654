// SPDX-License-Identifier: Apache-2.0
//! The facts: files and the kernel, read without judging.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use serde_json::Value;
use weft_cni::hostlocal::{self, Reservation};
use weft_cni::record::{self, Record};
use weft_cni::rtnl::Rtnl;
use weft_cni::veth::ALIAS;

use super::spaces::{self, Space};
use super::{Places, processes};

/// The bridge of flannel's plugin, unless a record names another.
const BRIDGE: &str = "cni0";

/// An address of host-local.
#[derive(Debug, Clone)]
pub struct Reserved {
    /// Network.
    pub network: String,
    /// The file and what is in it.
    pub reservation: Reservation,
    /// Since it was written, if that is known.
    pub age: Option<Duration>,
}

/// A record of the CNI plugin.
#[derive(Debug, Clone)]
pub struct Written {
    /// What is in it.
    pub record: Record,
    /// Since it was written, if that is known.
    pub age: Option<Duration>,
}

/// An attachment in the runtime's cache whose namespace is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cached {
    /// Container.
    pub container: String,
    /// Something runs in its namespace.
    pub runs: bool,
}

/// A pod's veth pair, seen from the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// Name of the host's end.
    pub name: String,
    /// Its index.
    pub index: u32,
    /// Who has it, if its alias says so.
    pub container: Option<String>,
    /// Id of the namespace of the other end; `None` when it is ours too.
    pub number: Option<i32>,
}

/// Everything that is known.
#[derive(Debug, Default)]
pub struct Facts {
    /// Addresses.
    pub reserved: Vec<Reserved>,
    /// Records.
    pub written: Vec<Written>,
    /// The runtime's cache, as far as its namespaces are there.
    pub cached: Vec<Cached>,
    /// Veth pairs of pods.
    pub pairs: Vec<Pair>,
    /// Network namespaces.
    pub spaces: Vec<Space>,
    /// Control groups and command lines of processes.
    pub words: Vec<String>,
    /// What could not be seen: then nothing is sure.
    pub blind: Vec<String>,
}

/// Reads everything.
///
/// # Errors
/// Something that is there cannot be read.
pub fn look(places: &Places) -> anyhow::Result<Facts> {
    let mut facts = Facts::default();
    // Files first: a pod that starts meanwhile is then too new for the files, and no leak.
    let records = record::list(&places.records)?;
    let bridges: BTreeSet<String> = records.iter().filter_map(bridge).chain([BRIDGE.to_owned()]).collect();
    let written = |record: Record| Written { age: age(&record.path), record };
    facts.written = records.into_iter().map(written).collect();
    for dir in subdirs(&places.networks).with_context(|| format!("read {}", places.networks.display()))? {
        let network = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let reserved =
            |reservation: Reservation| Reserved { network: network.clone(), age: age(&reservation.path), reservation };
        facts.reserved.extend(hostlocal::list(&dir)?.into_iter().map(reserved));
    }
    let results = results(&places.results).with_context(|| format!("read {}", places.results.display()))?;
    let processes = processes::read().context("read /proc")?;
    let cached: Vec<PathBuf> = results.iter().flat_map(|(_, paths)| paths.clone()).collect();
    for (container, paths) in results {
        let ids: Vec<_> = paths.iter().filter_map(|path| processes::id(path).ok()).collect();
        if !ids.is_empty() {
            let runs = ids.iter().any(|id| processes.netns.contains_key(id));
            facts.cached.push(Cached { container, runs });
        }
    }
    facts.blind.extend(processes::blind());
    let (spaces, blind) = spaces::read(&places.netns, &processes, &cached)?;
    (facts.spaces, facts.words) = (spaces, processes.words);
    facts.blind.extend(blind);
    facts.pairs = pairs(&bridges)?;
    for pair in &facts.pairs {
        if pair.number.is_some_and(|number| !facts.spaces.iter().any(|space| space.number == Some(number))) {
            facts.blind.push(format!(
                "the network namespace at the other end of {}: it has no name and no process",
                pair.name
            ));
        }
    }
    Ok(facts)
}

fn pairs(bridges: &BTreeSet<String>) -> anyhow::Result<Vec<Pair>> {
    let links = Rtnl::open()?.links()?;
    let masters: BTreeSet<u32> = links
        .iter()
        .filter(|link| link.kind == "bridge" && bridges.contains(&link.name))
        .map(|link| link.index)
        .collect();
    let mut pairs = Vec::new();
    for link in links.into_iter().filter(|link| link.kind == "veth") {
        let mut words = link.alias.split(' ');
        let routed = words.next() == Some(ALIAS);
        if routed || masters.contains(&link.master) {
            let container = routed.then(|| words.nth(1)).flatten().map(str::to_owned);
            pairs.push(Pair { name: link.name.clone(), index: link.index, container, number: link.peer_netns });
        }
    }
    Ok(pairs)
}

fn bridge(record: &Record) -> Option<String> {
    record.conf.as_ref()?.get("bridge")?.as_str().map(str::to_owned)
}

/// libcni's cache: an attachment and the namespaces that its result names. Files of another form are of another program.
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
        let paths: BTreeSet<PathBuf> = named.filter(|path| !path.is_empty()).map(PathBuf::from).collect();
        all.push((container, paths.into_iter().collect()));
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
    dirs.sort();
    Ok(dirs)
}

fn age(path: &Path) -> Option<Duration> {
    let written = fs::metadata(path).and_then(|about| about.modified()).ok()?;
    // A time to come is no age.
    SystemTime::now().duration_since(written).ok()
}
