// SPDX-License-Identifier: Apache-2.0
//! Limits of the kernel and of the whole machine, and room on its disks.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access, geteuid};
use weft_netlink::rtnl::Neigh;

use crate::processes::ProcessList;
use crate::sysctl;

/// How full a table of the kernel is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Fill {
    /// Number of entries that count against the limit.
    pub entries: u64,
    /// The limit.
    pub max: u64,
}

impl Fill {
    /// Returns true if this share of the limit is reached, in percent. The limit may be too large to be multiplied: that of open files often is.
    pub(crate) fn has_reached(&self, percent: u64) -> bool {
        self.entries.saturating_mul(100) >= self.max.saturating_mul(percent)
    }
}

/// A neighbour table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeighbourTable {
    /// Its family, as the sysctls name it: `ipv4` or `ipv6`.
    pub family: &'static str,
    /// How full it is.
    pub fill: Fill,
}

/// A directory that cannot be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnwritableDir {
    /// The directory.
    pub dir: PathBuf,
    /// Why it cannot be written.
    pub why: String,
}

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
    /// The directories that the agent or a CNI plugin writes, and that cannot be written.
    pub unwritable: Vec<UnwritableDir>,
}

/// Reads the limits. `dirs` contains directories that are written; those that do not exist are left out.
pub(super) fn read(dirs: &[&Path], processes: &ProcessList) -> Limits {
    let (instances, watches) = inotify(processes);
    let max_of = |what: &str| sysctl::number_in(&Path::new("/proc/sys/fs/inotify").join(what));
    let fill = |what: &str, entries: u64| Some(Fill { entries, max: max_of(what)? });
    let text = fs::read_to_string("/proc/sys/fs/file-nr").unwrap_or_default();
    let words: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let files = match words[..] {
        [entries, _, max] => Some(Fill { entries, max }),
        _ => None,
    };
    let written = dirs.iter().filter(|dir| dir.is_dir());
    let unwritable =
        written.filter_map(|dir| Some(UnwritableDir { dir: dir.to_path_buf(), why: unwritable(&dir.join("file"))? }));
    Limits {
        inotify: fill("max_user_instances", instances),
        watches: fill("max_user_watches", watches),
        files,
        threads: threads(),
        unwritable: unwritable.collect(),
    }
}

/// Counts the inotify instances of root's processes, and what they watch. Each watch is a line of `/proc/PID/fdinfo/FD`
/// (Documentation/filesystems/proc.rst of the kernel).
fn inotify(processes: &ProcessList) -> (u64, u64) {
    let (mut instances, mut watches) = (0, 0);
    for process in processes.all() {
        if !process.dir.metadata().is_ok_and(|about| about.uid() == 0) {
            continue;
        }
        for (number, _) in process.numbered_files().filter(|(_, file)| file == Path::new("anon_inode:inotify")) {
            let about = fs::read_to_string(process.dir.join("fdinfo").join(number)).unwrap_or_default();
            instances += 1;
            watches += about.lines().filter(|line| line.starts_with("inotify ")).count() as u64;
        }
    }
    (instances, watches)
}

/// Counts all threads of the machine: the fourth word of /proc/loadavg is `RUNNING/ALL`. Each needs a number up to `kernel.pid_max`.
fn threads() -> Option<Fill> {
    let text = fs::read_to_string("/proc/loadavg").ok()?;
    let (_, all) = text.split_whitespace().nth(3)?.split_once('/')?;
    let number = |name: &str| sysctl::number_in(&Path::new("/proc/sys/kernel").join(name));
    let max = number("pid_max")?.min(number("threads-max")?);
    Some(Fill { entries: all.parse().ok()?, max })
}

/// Returns why the agent could not write a file. It makes missing directories, so the nearest one that exists counts.
pub(super) fn unwritable(path: &Path) -> Option<String> {
    let mut dirs = path.ancestors().skip(1);
    let dir = dirs.find(|dir| dir.exists()).filter(|dir| !dir.as_os_str().is_empty())?;
    if !dir.is_dir() {
        return Some(format!("{} is not a directory", dir.display()));
    }
    // That another user than root may not write there says nothing about the agent.
    if let Err(error) = access(dir, AccessFlags::W_OK | AccessFlags::X_OK)
        && (geteuid().is_root() || error != Errno::EACCES)
    {
        return Some(format!("{}: {}", dir.display(), error.desc()));
    }
    let space = statvfs(dir).ok()?;
    // A file system without a limit, such as overlayfs on some hosts, reports no blocks and no files at all.
    // The agent runs as root, which may also use what is reserved for it.
    let is_full = space.blocks() > 0 && space.blocks_free() == 0;
    let lacks_files = space.files() > 0 && space.files_free() == 0;
    (is_full || lacks_files).then(|| format!("{}: the file system is full", dir.display()))
}

/// Returns how full the connection tracking table is, if the module is loaded.
pub(super) fn conntrack() -> Option<Fill> {
    let (entries, max) =
        sysctl::number("netfilter/nf_conntrack_count").zip(sysctl::number("netfilter/nf_conntrack_max"))?;
    Some(Fill { entries, max })
}

/// Counts the neighbours of both families in all network namespaces, which share the limit. Permanent ones, as weft writes them, do not count
/// against it (`neigh_alloc` in net/core/neighbour.c of the kernel, since Linux 5.0). `all` are those of this namespace.
pub(super) fn neighbour_tables(all: &[Neigh]) -> Vec<NeighbourTable> {
    let table = |family: &'static str, statistics: &str, v6: bool| {
        let max = sysctl::number(&format!("{family}/neigh/default/gc_thresh3"))?;
        let of_family = || all.iter().filter(move |neigh| neigh.addr.is_ipv6() == v6);
        let permanent = of_family().filter(|neigh| neigh.is_permanent()).count() as u64;
        let text = fs::read_to_string(Path::new("/proc/thread-self/net/stat").join(statistics)).unwrap_or_default();
        // Pods have no permanent neighbours of their own as a rule, so those of other namespaces are left.
        let entries = entries_of_all_namespaces(&text).unwrap_or_else(|| of_family().count() as u64);
        Some(NeighbourTable { family, fill: Fill { entries: entries.saturating_sub(permanent), max } })
    };
    [table("ipv4", "arp_cache", false), table("ipv6", "ndisc_cache", true)].into_iter().flatten().collect()
}

/// Reads the number of entries of a table from its statistics: a line of names, and for each CPU one of hexadecimal numbers, which begins with
/// the number of entries of the whole table.
fn entries_of_all_namespaces(text: &str) -> Option<u64> {
    u64::from_str_radix(text.lines().nth(1)?.split_whitespace().next()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::entries_of_all_namespaces;

    #[test]
    fn the_number_of_neighbours_of_all_namespaces_is_hexadecimal() {
        let text = "entries  allocs   destroys hash_grows lookups  hits     res_failed\n\
                    000003e9  00000002 00000001 00000000   00000000 00000000 00000000\n\
                    000003e9  00000000 00000000 00000000   00000000 00000000 00000000\n";
        assert_eq!(entries_of_all_namespaces(text), Some(1001));
        assert_eq!(entries_of_all_namespaces(""), None);
    }
}
