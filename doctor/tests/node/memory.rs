// SPDX-License-Identifier: Apache-2.0
//! A process that the kernel kills because its control group has no memory left. It has another name than an agent, because the log of the kernel
//! belongs to the whole machine.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use weft_doctor::facts::memory_kills;

use super::until;

/// A control group, which ends with this value.
pub(super) struct Group(PathBuf);

impl Group {
    pub(super) fn new(name: &str) -> Group {
        let one = Path::new("/sys/fs/cgroup/memory");
        let parent = if one.is_dir() { one } else { Path::new("/sys/fs/cgroup") };
        let group = Group(parent.join(name));
        fs::create_dir(&group.0).unwrap();
        group
    }

    /// Gives the group 16 MiB of memory.
    fn limit(&self) {
        let files = ["memory.limit_in_bytes", "memory.max"].map(|name| self.0.join(name));
        fs::write(files.iter().find(|file| file.exists()).unwrap(), "16777216").unwrap();
    }

    /// Moves a process into the group.
    pub(super) fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn a_process_that_was_killed_for_memory_is_found_in_the_log_of_the_kernel() {
    let name = format!("hungry{}", std::process::id());
    let group = Group::new(&name);
    group.limit();
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join(&name);
    // It wants to read a whole line before it prints anything.
    symlink("/usr/bin/tail", &program).unwrap();
    assert_eq!(memory_kills::read(&[&name]).unwrap(), None);
    let line = format!("echo $$ > {}/cgroup.procs && exec {} /dev/zero", group.0.display(), program.display());
    let began = Instant::now();
    let mut hungry = Command::new("setpriv").args(["--pdeathsig", "KILL", "sh", "-c", &line]).spawn().unwrap();
    let pid = hungry.id();
    assert!(!hungry.wait().unwrap().success(), "the kernel kills it");
    let mut found = None;
    until("the log to say so", || {
        found = memory_kills::read(&[&name]).unwrap();
        found.is_some()
    });
    let found = found.unwrap();
    assert_eq!((found.name, found.pid, found.of_group), (name, pid, true));
    // The log of the kernel has a clock of its own, which differs a little.
    assert!(found.age < began.elapsed() + Duration::from_secs(60), "{:?} of {:?}", found.age, began.elapsed());
    assert_eq!(memory_kills::read(&["another"]).unwrap(), None);
}
