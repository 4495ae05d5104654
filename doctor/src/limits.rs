// SPDX-License-Identifier: Apache-2.0
//! Limits of the whole machine, and room on its disks. When one of them is reached, programs fail with messages that do not name it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use super::node::{Fill, NodeFacts, unwritable};
use super::node_findings::{NodeFinding, finding};
use super::processes;

/// A limit is reported from this share, in percent.
const FULL: u64 = 95;

/// Everything that was read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The inotify instances of root. Programs that watch files, such as the kubelet, need some.
    pub inotify: Option<Fill>,
    /// The open files of the machine.
    pub files: Option<Fill>,
    /// For each directory that the agent or a CNI plugin writes, why it cannot.
    pub unwritable: Vec<(PathBuf, String)>,
}

/// Reads the limits. `dirs` contains directories that are written; those that do not exist are left out.
pub fn read(dirs: &[&Path]) -> Limits {
    let number = |path: &str| fs::read_to_string(path).ok()?.split_whitespace().next()?.parse::<u64>().ok();
    let instances = number("/proc/sys/fs/inotify/max_user_instances");
    let inotify = instances.zip(inotify_instances().ok()).map(|(max, entries)| Fill { entries, max });
    let text = fs::read_to_string("/proc/sys/fs/file-nr").unwrap_or_default();
    let words: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let files = match words[..] {
        [entries, _, max] => Some(Fill { entries, max }),
        _ => None,
    };
    // Another user than root may write none of them.
    let written = dirs.iter().filter(|dir| geteuid().is_root() && dir.is_dir());
    let unwritable = written.filter_map(|dir| Some((dir.to_path_buf(), unwritable(&dir.join("file"))?)));
    Limits { inotify, files, unwritable: unwritable.collect() }
}

/// Counts the inotify instances of root's processes.
fn inotify_instances() -> io::Result<u64> {
    let mut count = 0;
    for process in processes::all()? {
        if process.dir.metadata().is_ok_and(|about| about.uid() == 0) {
            count += process.files().filter(|file| file == Path::new("anon_inode:inotify")).count() as u64;
        }
    }
    Ok(count)
}

/// A limit of the machine is nearly reached.
pub(super) fn limits(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = Vec::new();
    let is_full = |fill: &Fill| fill.max > 0 && fill.entries * 100 >= fill.max * FULL;
    if let Some(Fill { entries, max }) = facts.limits.inotify.filter(is_full) {
        let evidence = format!(
            "root has {entries} of {max} inotify instances: programs that watch files fail with \"too many open files\" (the kubelet, \
             container runtimes), and weft checks its files every second instead"
        );
        findings.push(finding(
            evidence,
            format!("sysctl -w fs.inotify.max_user_instances={}, and in /etc/sysctl.d", max.saturating_mul(4)),
        ));
    }
    if let Some(Fill { entries, max }) = facts.limits.files.filter(is_full) {
        let evidence = format!(
            "{entries} of {max} files of this machine are open: soon no program can open a file or a connection"
        );
        let remedy = format!(
            "find the program (`ls /proc/*/fd | wc -l`, by process) and restart it; sysctl -w fs.file-max={} helps for a while",
            max.saturating_mul(2)
        );
        findings.push(finding(evidence, remedy));
    }
    findings
}

/// A directory that the agent or CNI plugins write is read-only or full.
pub(super) fn disk(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |(dir, why): &(PathBuf, String)| {
        let evidence = format!(
            "{} cannot be written ({why}): what it keeps over a restart is lost, or no pod can start",
            dir.display()
        );
        let remedy = format!("mount it read-write or make room: `df {0}`, `df -i {0}`", dir.display());
        finding(evidence, remedy)
    };
    facts.limits.unwritable.iter().map(one).collect()
}
