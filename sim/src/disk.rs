// SPDX-License-Identifier: Apache-2.0
//! The disks of the machines: how long a write takes, whether there is room, and what a power loss leaves. The files themselves are real files in
//! memory, in the directories `n0/run`, `n0/state` and so on.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use weft_subnet::outside::{self, FileStep};

use crate::timeline;

/// A disk.
#[derive(Debug, Default)]
struct Disk {
    /// How long a write takes.
    slow: Duration,
    /// There is no room.
    full: bool,
    /// For how long the loop of the agent waits for writes that it has made itself.
    blocked: Duration,
    /// What each file of the state directory contains after a power loss.
    durable: BTreeMap<PathBuf, Vec<u8>>,
}

thread_local! {
    static DISKS: RefCell<BTreeMap<usize, Disk>> = const { RefCell::new(BTreeMap::new()) };
    /// Inodes of files whose contents were synced.
    static SYNCED: RefCell<BTreeSet<u64>> = const { RefCell::new(BTreeSet::new()) };
}

fn with<T>(machine: usize, function: impl FnOnce(&mut Disk) -> T) -> T {
    DISKS.with_borrow_mut(|disks| function(disks.entry(machine).or_default()))
}

/// Returns the machine to which a path belongs.
fn machine_of(path: &Path) -> Option<usize> {
    path.components().next()?.as_os_str().to_str()?.strip_prefix('n')?.parse().ok()
}

/// Sets how long a write takes.
pub fn set_slow(machine: usize, slow: Duration) {
    with(machine, |disk| disk.slow = slow);
}

/// Sets whether the disk is full.
pub fn set_full(machine: usize, full: bool) {
    with(machine, |disk| disk.full = full);
}

/// Returns for how long the agent must wait now for writes of its own loop.
pub fn take_blocked(machine: usize) -> Duration {
    with(machine, |disk| std::mem::take(&mut disk.blocked))
}

/// Returns how long a write beside the loop of the present agent takes.
pub fn write_time() -> Duration {
    timeline::machine().map_or(Duration::ZERO, |machine| with(machine, |disk| disk.slow))
}

/// Carries out a step of a write.
///
/// # Errors
/// There is no room.
pub fn step(step: FileStep<'_>) -> io::Result<()> {
    match step {
        FileStep::Begin(path) => {
            let Some(machine) = machine_of(path) else { return Ok(()) };
            with(machine, |disk| {
                if disk.full {
                    return Err(io::ErrorKind::StorageFull.into());
                }
                if !outside::is_blocking_task() {
                    disk.blocked += disk.slow;
                }
                Ok(())
            })
        }
        FileStep::Synced(file) => {
            let inode = file.metadata()?.ino();
            SYNCED.with_borrow_mut(|synced| synced.insert(inode));
            Ok(())
        }
        FileStep::DirectorySynced(dir) => match machine_of(dir).filter(|_| dir.ends_with("state")) {
            Some(machine) => {
                let present = contents(dir, |inode| SYNCED.with_borrow(|synced| synced.contains(&inode)))?;
                with(machine, |disk| disk.durable = present);
                Ok(())
            }
            None => Ok(()),
        },
    }
}

/// Returns the files of a directory. Those that were not synced are empty.
fn contents(dir: &Path, synced: impl Fn(u64) -> bool) -> io::Result<BTreeMap<PathBuf, Vec<u8>>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let text = if synced(entry.metadata()?.ino()) { fs::read(entry.path())? } else { Vec::new() };
        all.insert(entry.path(), text);
    }
    Ok(all)
}

/// Counts everything in this state directory as synced.
///
/// # Errors
/// The directory cannot be read.
pub fn sync_all(machine: usize, state_dir: &Path) -> io::Result<()> {
    let present = contents(state_dir, |_| true)?;
    with(machine, |disk| disk.durable = present);
    Ok(())
}

/// Loses what was not synced in this state directory. Returns the files whose names begin like this and whose writes had ended.
///
/// # Errors
/// The directory cannot be read or written.
pub fn lose_power(machine: usize, state_dir: &Path, important: &str) -> io::Result<Vec<String>> {
    let before = contents(state_dir, |_| true)?;
    let durable = with(machine, |disk| disk.durable.clone());
    let is_important = |path: &&PathBuf| {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(important))
    };
    let names: BTreeSet<&PathBuf> = before.keys().chain(durable.keys()).filter(is_important).collect();
    let lost = names.into_iter().filter(|path| before.get(*path) != durable.get(*path));
    let lost = lost.map(|path| path.display().to_string()).collect();
    before.keys().try_for_each(fs::remove_file)?;
    durable.iter().try_for_each(|(path, text)| fs::write(path, text))?;
    Ok(lost)
}
