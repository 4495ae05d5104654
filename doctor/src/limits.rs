// SPDX-License-Identifier: Apache-2.0
//! Limits of the whole machine, and room on its disks. When one of them is reached, programs fail with messages that do not name it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use super::base::{Fill, unwritable};
use super::finding::{NodeFinding, finding};
use super::node::NodeFacts;
use super::processes;

/// A limit is reported from this share, in percent.
const FULL: u64 = 95;

/// Everything that was read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The inotify instances of root. Programs that watch files, such as the kubelet, need some.
    pub inotify: Option<Fill>,
    /// The files and directories that root watches with these instances.
    pub watches: Option<Fill>,
    /// The open files of the machine.
    pub files: Option<Fill>,
    /// The threads of the machine. Each process has at least one.
    pub threads: Option<Fill>,
    /// For each directory that the agent or a CNI plugin writes, why it cannot.
    pub unwritable: Vec<(PathBuf, String)>,
}

/// Reads the limits. `dirs` contains directories that are written; those that do not exist are left out.
pub fn read(dirs: &[&Path]) -> Limits {
    let (instances, watches) = inotify().unzip();
    let fill = |max: &str, entries: Option<u64>| Some(Fill { entries: entries?, max: number(max)? });
    let text = fs::read_to_string("/proc/sys/fs/file-nr").unwrap_or_default();
    let words: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let files = match words[..] {
        [entries, _, max] => Some(Fill { entries, max }),
        _ => None,
    };
    // Another user than root may write none of them.
    let written = dirs.iter().filter(|dir| geteuid().is_root() && dir.is_dir());
    let unwritable = written.filter_map(|dir| Some((dir.to_path_buf(), unwritable(&dir.join("file"))?)));
    Limits {
        inotify: fill("/proc/sys/fs/inotify/max_user_instances", instances),
        watches: fill("/proc/sys/fs/inotify/max_user_watches", watches),
        files,
        threads: threads(),
        unwritable: unwritable.collect(),
    }
}

/// Returns the number in a file.
fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Counts the inotify instances of root's processes, and what they watch. Each watch is a line of `/proc/PID/fdinfo/FD`
/// (Documentation/filesystems/proc.rst of the kernel).
fn inotify() -> Option<(u64, u64)> {
    let (mut instances, mut watches) = (0, 0);
    for process in processes::all().ok()? {
        if !process.dir.metadata().is_ok_and(|about| about.uid() == 0) {
            continue;
        }
        for (number, _) in process.numbered_files().filter(|(_, file)| file == Path::new("anon_inode:inotify")) {
            let about = fs::read_to_string(process.dir.join("fdinfo").join(number)).unwrap_or_default();
            instances += 1;
            watches += about.lines().filter(|line| line.starts_with("inotify ")).count() as u64;
        }
    }
    Some((instances, watches))
}

/// Counts all threads of the machine: the fourth word of /proc/loadavg is `RUNNING/ALL`. Each needs a number up to `kernel.pid_max`.
fn threads() -> Option<Fill> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    let (_, all) = text.split_whitespace().nth(3)?.split_once('/')?;
    let max = number("/proc/sys/kernel/pid_max")?.min(number("/proc/sys/kernel/threads-max")?);
    Some(Fill { entries: all.parse().ok()?, max })
}

/// A limit of the machine is nearly reached.
pub(super) fn limits(facts: &NodeFacts) -> Vec<NodeFinding> {
    let Limits { inotify, watches, files, threads, .. } = &facts.limits;
    let is_full = |fill: &Fill| fill.max > 0 && fill.entries * 100 >= fill.max * FULL;
    let inotify = inotify.filter(is_full).map(|Fill { entries, max }| {
        let evidence = format!(
            "root has {entries} of {max} inotify instances: programs that watch files fail with \"too many open files\" (the kubelet, \
             container runtimes), and weft checks its files every second instead"
        );
        let remedy = format!("sysctl -w fs.inotify.max_user_instances={}, and in /etc/sysctl.d", max.saturating_mul(4));
        finding(evidence, remedy)
    });
    let watches = watches.filter(is_full).map(|Fill { entries, max }| {
        let evidence = format!(
            "root watches {entries} of {max} files by inotify: programs that watch files fail with \"no space left on device\" (the \
             kubelet, container runtimes), and weft checks its files every second instead"
        );
        finding(evidence, format!("sysctl -w fs.inotify.max_user_watches={}, and in /etc/sysctl.d", max.saturating_mul(4)))
    });
    let files = files.filter(is_full).map(|Fill { entries, max }| {
        let evidence = format!(
            "{entries} of {max} files of this machine are open: soon no program can open a file or a connection"
        );
        let remedy = format!(
            "find the program (`ls /proc/*/fd | wc -l`, by process) and restart it; sysctl -w fs.file-max={} helps for a while",
            max.saturating_mul(2)
        );
        finding(evidence, remedy)
    });
    let threads = threads.filter(is_full).map(|Fill { entries, max }| {
        let evidence = format!(
            "{entries} of {max} threads of this machine run: soon no program can be started, and CNI plugins and probes of the kubelet \
             fail with \"resource temporarily unavailable\""
        );
        let remedy = format!(
            "find the program (`ps -eo nlwp,pid,comm --sort=-nlwp | head`) and restart it; sysctl -w kernel.pid_max={0} \
             kernel.threads-max={0} helps for a while",
            max.saturating_mul(2)
        );
        finding(evidence, remedy)
    });
    [inotify, watches, files, threads].into_iter().flatten().collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Selects one of the limits.
    type Select = fn(&mut Limits) -> &mut Option<Fill>;

    #[test]
    fn each_limit_is_named_from_95_percent_on_with_the_sysctl_that_raises_it() {
        let findings = |select: Select, entries: u64| {
            let mut limits = Limits::default();
            *select(&mut limits) = Some(Fill { entries, max: 1000 });
            self::limits(&NodeFacts { limits, ..NodeFacts::default() })
        };
        let all: [(Select, &str); 4] = [
            (|limits| &mut limits.inotify, "fs.inotify.max_user_instances=4000"),
            (|limits| &mut limits.watches, "fs.inotify.max_user_watches=4000"),
            (|limits| &mut limits.files, "fs.file-max=2000"),
            (|limits| &mut limits.threads, "kernel.pid_max=2000 kernel.threads-max=2000"),
        ];
        for (select, sysctl) in all {
            let found = findings(select, 950);
            assert!(found.len() == 1 && found[0].remedy.contains(sysctl), "{found:?}");
            assert_eq!(findings(select, 949), []);
        }
    }
}
