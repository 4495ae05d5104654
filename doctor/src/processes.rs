// SPDX-License-Identifier: Apache-2.0
//! The processes of this machine: which network namespaces they are in, and which ones mention a container.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};

/// The host's PID namespace, whose number is fixed in the kernel (PROC_PID_INIT_INO of linux/proc_ns.h). A process in
/// another PID namespace does not see every process.
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The process id.
    pub pid: u32,
    /// Its directory below /proc.
    pub dir: PathBuf,
}

impl Process {
    /// Returns the name of its command. It is empty if the process has ended.
    pub fn name(&self) -> String {
        fs::read_to_string(self.dir.join("comm")).unwrap_or_default().trim_end().to_owned()
    }

    /// Returns the words of its command line. They are empty if the process has ended.
    pub fn words(&self) -> Vec<String> {
        let line = fs::read(self.dir.join("cmdline")).unwrap_or_default();
        let words = line.strip_suffix(b"\0").unwrap_or(&line).split(|byte| *byte == 0);
        words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
    }

    /// Returns what its open files are, such as `socket:[4711]`. There are none if the process has ended or belongs to another user.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        self.numbered_files().map(|(_, file)| file)
    }

    /// Returns the same as [`Process::files`], with the number of each file in the process.
    pub fn numbered_files(&self) -> impl Iterator<Item = (OsString, PathBuf)> {
        let links = fs::read_dir(self.dir.join("fd")).into_iter().flatten().flatten();
        links.filter_map(|link| Some((link.file_name(), fs::read_link(link.path()).ok()?)))
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.name(), self.pid)
    }
}

/// Returns all processes of our PID namespace. Each of them may end before it is looked at.
///
/// # Errors
/// /proc cannot be read.
pub fn all() -> io::Result<Vec<Process>> {
    let mut all = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let dir = entry?.path();
        // `self` and `thread-self` would name the same processes again.
        let pid = dir.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse::<u32>().ok());
        all.extend(pid.map(|pid| Process { pid, dir }));
    }
    Ok(all)
}

/// The processes of our PID namespace and their names, as they were at one moment. Each of them may have ended since.
#[derive(Debug, Default)]
pub struct ProcessList(Vec<NamedProcess>);

/// A process with the name that it had.
#[derive(Debug)]
struct NamedProcess {
    process: Process,
    name: String,
}

impl ProcessList {
    /// Reads the list.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn read() -> io::Result<ProcessList> {
        Ok(ProcessList::of(all()?))
    }

    /// Makes a list of these processes with the names that they have now.
    pub fn of(processes: Vec<Process>) -> ProcessList {
        let named = |process: Process| NamedProcess { name: process.name(), process };
        ProcessList(processes.into_iter().map(named).collect())
    }

    /// Returns all processes.
    pub fn all(&self) -> impl Iterator<Item = &Process> {
        self.0.iter().map(|one| &one.process)
    }

    /// Returns the processes with one of these names.
    pub fn named(&self, names: &[&str]) -> impl Iterator<Item = &Process> {
        self.0.iter().filter(|one| names.contains(&one.name.as_str())).map(|one| &one.process)
    }

    /// Returns the processes with one of these names in the network namespace of the calling thread. A node that is a container (kind, k3d) has others.
    pub fn here(&self, names: &[&str]) -> Vec<&Process> {
        let Ok(own) = net_namespace(Path::new("/proc/thread-self")) else { return Vec::new() };
        self.named(names).filter(|process| net_namespace(&process.dir).is_ok_and(|netns| netns == own)).collect()
    }
}

/// Returns true if paths lead this process and the calling one to the same files. They do not if one of the two is in a container of its own, and
/// this is not known to other users than root.
pub fn has_our_root(pid: u32) -> bool {
    let theirs = id(Path::new(&format!("/proc/{pid}/root")));
    theirs.is_ok_and(|theirs| id(Path::new("/")).is_ok_and(|ours| ours == theirs))
}

/// Device and inode of a namespace, or of a directory.
pub type Id = (u64, u64);

/// What all processes show together.
#[derive(Debug, Default)]
pub struct Processes {
    /// The network namespaces that have threads in them, each with a path to it.
    pub netns: BTreeMap<Id, PathBuf>,
    /// The control groups and the command line of each process, as one text. They contain the IDs of running
    /// containers.
    pub texts: Vec<String>,
}

/// Returns the network namespaces that have threads of these processes in them, each with a path to it.
pub fn netns<'a>(processes: impl IntoIterator<Item = &'a Process>) -> BTreeMap<Id, PathBuf> {
    let mut found = BTreeMap::new();
    for process in processes {
        // The threads of a process may be in different namespaces.
        for task in fs::read_dir(process.dir.join("task")).into_iter().flatten().flatten() {
            let netns = task.path().join("ns/net");
            if let Ok(id) = id(&netns) {
                found.entry(id).or_insert(netns);
            }
        }
    }
    found
}

/// Reads what all processes show. One that ends meanwhile is ignored.
///
/// # Errors
/// /proc cannot be read.
pub fn read() -> io::Result<Processes> {
    let all = all()?;
    let mut found = Processes { netns: netns(&all), ..Processes::default() };
    for process in all {
        // Our own command line may contain the ID that somebody asks about.
        if process.pid != std::process::id() {
            let text = |file: &str| fs::read(process.dir.join(file)).unwrap_or_default();
            let texts = [text("cgroup"), text("cmdline")].concat();
            found.texts.push(String::from_utf8_lossy(&texts).into_owned());
        }
    }
    Ok(found)
}

/// Returns the device and inode of a namespace file, or of a directory.
pub fn id(path: &Path) -> io::Result<Id> {
    fs::metadata(path).map(|about| (about.dev(), about.ino()))
}

/// Returns a number that stands for the network namespace of a process: the files below `net` are different ones in each namespace.
/// The link `ns/net` would say it, too, but the kernel shows that only to processes with all capabilities of the other process, which the
/// agent does not have under systemd.
///
/// # Errors
/// The process has ended, or belongs to another user.
pub fn net_namespace(process: &Path) -> io::Result<u64> {
    Ok(fs::metadata(process.join("net/dev"))?.ino())
}

/// Returns a sentence for people if this program does not see all processes of the host.
pub fn unreadable() -> Option<String> {
    let ours = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    (ours != Path::new(HOST_PID_NAMESPACE))
        .then(|| "processes of the host: run weft doctor on the host itself, or with hostPID".to_owned())
}

/// Returns how long a process has run: see `starttime` in proc_pid_stat(5).
pub fn age(pid: u32) -> Option<Duration> {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?);
    let start = start(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
    Some(now.saturating_sub(ticks(start)?))
}

/// Returns how long so many ticks are, in which the kernel tells times to programs.
pub(crate) fn ticks(number: u64) -> Option<Duration> {
    let per_second = u64::try_from(sysconf(SysconfVar::CLK_TCK).ok()??).ok().filter(|number| *number > 0)?;
    Some(Duration::from_millis(number.checked_mul(1000)? / per_second))
}

/// Returns when a process has started, in ticks since the boot. The name of the process may contain spaces and parentheses.
fn start(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

/// Returns true if one of these programs runs now in our PID namespace.
pub fn is_running(names: &[&str]) -> bool {
    ProcessList::read().is_ok_and(|list| list.named(names).next().is_some())
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_is_as_old_as_its_start_says() {
        let stat = "42 (a (b) c) S 1 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 8675309 1 2 3";
        assert_eq!(start(stat), Some(8_675_309));
        assert_eq!(start("42 (weft) S 1"), None);
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        // In this order, time that passes between the two makes only the older one older.
        let younger = age(child.id());
        let older = age(std::process::id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(younger.is_some() && older >= younger, "{older:?}, {younger:?}");
        assert_eq!(age(u32::MAX), None);
    }

    #[test]
    fn a_process_that_is_not_there_has_no_root() {
        assert!(has_our_root(std::process::id()) && !has_our_root(u32::MAX));
    }
}
