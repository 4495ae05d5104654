// SPDX-License-Identifier: Apache-2.0
//! Files that are locked for too long. All programs that change rules by iptables wait for one of them, and each pod that starts waits for that of
//! host-local.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::stat::{major, minor};

use crate::processes::Process;

/// The lock of iptables (XT_LOCK_NAME of its sources).
pub(crate) const XTABLES: &str = "/run/xtables.lock";
/// A lock is reported if the same process holds it for this time.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// The pause between two looks at a lock that is held.
const STEP: Duration = Duration::from_millis(100);

/// A file that a process keeps locked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldLock {
    /// The file.
    pub path: PathBuf,
    /// The process ID. 0 is that of a process in another PID namespace.
    pub pid: u32,
    /// The process for people, with its ID.
    pub holder: String,
    /// How many others wait for the lock.
    pub waiting: usize,
}

/// Returns the locks that are held for too long. `networks` is the directory of host-local. This takes [`PATIENCE`] if one is held, and no
/// time otherwise.
pub(super) fn read(networks: &Path) -> Vec<HeldLock> {
    let of_networks = fs::read_dir(networks).into_iter().flatten().flatten().map(|network| network.path().join("lock"));
    let paths: Vec<PathBuf> = [PathBuf::from(XTABLES)].into_iter().chain(of_networks).collect();
    let mut held = held(&paths);
    let began = Instant::now();
    while !held.is_empty() && began.elapsed() < PATIENCE {
        pause();
        let now = self::held(&paths);
        let of_same = |before: &HeldLock| now.iter().find(|lock| lock.path == before.path && lock.pid == before.pid);
        held = held.iter().filter_map(of_same).cloned().collect();
    }
    held
}

#[expect(clippy::disallowed_methods, reason = "the pause between two looks at a lock that another program holds")]
fn pause() {
    thread::sleep(STEP);
}

/// Returns those of these files that are locked now.
fn held(paths: &[PathBuf]) -> Vec<HeldLock> {
    let text = fs::read_to_string("/proc/locks").unwrap_or_default();
    let one = |path: &PathBuf| {
        let about = fs::metadata(path).ok()?;
        let file = format!("{:02x}:{:02x}:{}", major(about.dev()), minor(about.dev()), about.ino());
        let (pid, waiting) = holder(&text, &file)?;
        let process = Process { pid, dir: Path::new("/proc").join(pid.to_string()) };
        let holder = if pid == 0 { "a process of another container".to_owned() } else { process.to_string() };
        Some(HeldLock { path: path.clone(), pid, holder, waiting })
    };
    paths.iter().filter_map(one).collect()
}

/// Returns the process that holds the lock of a file, and how many wait for it. `text` is /proc/locks, of which each line is `NUMBER: FLOCK
/// ADVISORY WRITE PID FILE FIRST LAST`. Those that wait have `->` behind the number (Documentation/filesystems/locks.rst of the kernel).
fn holder(text: &str, file: &str) -> Option<(u32, usize)> {
    let (mut holder, mut waiting) = (None, 0);
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let waits = words.get(1) == Some(&"->");
        let Some([_, _, _, pid, of_file, ..]) = words.get(1 + usize::from(waits)..) else { continue };
        if *of_file != file {
            continue;
        }
        if waits {
            waiting += 1;
        } else {
            holder = pid.parse().ok();
        }
    }
    Some((holder?, waiting))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_told_from_those_that_wait_and_from_other_files() {
        let text = "1: FLOCK  ADVISORY  WRITE 4711 fd:00:131 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 12 fd:00:131 0 EOF\n\
                    1: -> FLOCK  ADVISORY  WRITE 13 fd:00:131 0 EOF\n2: POSIX  ADVISORY  READ 99 fd:00:1310 128 128\n3: broken\n";
        assert_eq!(holder(text, "fd:00:131"), Some((4711, 2)));
        assert_eq!(holder(text, "fd:00:1310"), Some((99, 0)));
        assert_eq!(holder(text, "fd:00:13"), None);
    }
}
