// SPDX-License-Identifier: Apache-2.0
//! The reservations of the `host-local` IPAM plugin. Each reserved address is a file that contains
//! `CONTAINER\r\nIFNAME`. A lock file beside them serialises changes.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde_json::{Map, Value};

use crate::spec::Error;

/// Default of host-local's `dataDir`.
const DIR: &str = "/var/lib/cni/networks";

/// A reserved address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// Path of the file.
    pub path: PathBuf,
    /// The address, which is also the name of the file.
    pub addr: IpAddr,
    /// ID of the container. It is empty if host-local was killed before it wrote the file.
    pub container: String,
    /// Name of the interface; `None` in files that old versions of host-local wrote.
    pub ifname: Option<String>,
}

/// Returns the directory of a network's reservations, or `None` if another IPAM plugin manages its addresses.
pub fn dir(ipam: &Map<String, Value>, network: &str) -> Option<PathBuf> {
    let text = |key: &str| ipam.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    (text("type").unwrap_or("host-local") == "host-local")
        .then(|| Path::new(text("dataDir").unwrap_or(DIR)).join(network))
}

/// Returns all reservations, sorted by address. A missing directory means that there are none.
///
/// # Errors
/// [`crate::spec::code::IO`] if the directory or a file cannot be read.
pub fn list(dir: &Path) -> Result<Vec<Reservation>, Error> {
    let failed = |error| Error::io(format!("read {}", dir.display()), error);
    let files = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        files => files.map_err(failed)?,
    };
    let mut all = Vec::new();
    for file in files {
        let file = file.map_err(failed)?;
        let Some(addr) = file.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        match fs::read_to_string(file.path()) {
            Ok(text) => all.push(parse(file.path(), addr, &text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io(format!("read {}", file.path().display()), error)),
        }
    }
    all.sort_by_key(|reservation| reservation.addr);
    Ok(all)
}

/// Removes all reservations for which `stale` returns true, and those without a container. Returns what was removed.
/// host-local's lock is held meanwhile.
///
/// # Errors
/// [`crate::spec::code::IO`] if the lock cannot be taken or a file cannot be read or removed.
pub fn release(dir: &Path, stale: impl Fn(&Reservation) -> bool) -> Result<Vec<Reservation>, Error> {
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let _lock = lock(dir).map_err(|error| Error::io(format!("lock {}", dir.display()), error))?;
    let mut removed = list(dir)?;
    removed.retain(|reservation| reservation.container.is_empty() || stale(reservation));
    for reservation in &removed {
        fs::remove_file(&reservation.path)
            .map_err(|error| Error::io(format!("remove {}", reservation.path.display()), error))?;
    }
    Ok(removed)
}

fn lock(dir: &Path) -> io::Result<Flock<File>> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(dir.join("lock"))?;
    Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno.into())
}

fn parse(path: PathBuf, addr: IpAddr, text: &str) -> Reservation {
    let mut lines = text.lines().map(|line| line.trim().to_owned());
    let container = lines.next().unwrap_or_default();
    Reservation { path, addr, container, ifname: lines.next().filter(|name| !name.is_empty()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::time::{Duration, Instant};

    use serde_json::json;

    use super::*;

    /// Returns true if somebody waits for a lock on this file. /proc/locks marks those who wait with an arrow.
    fn is_waited_for(file: &File) -> bool {
        let inode = format!(":{} ", file.metadata().unwrap().ino());
        let locks = fs::read_to_string("/proc/locks").unwrap();
        locks.lines().any(|line| line.contains("-> FLOCK") && line.contains(&inode))
    }

    /// host-local reserves an address under its lock. Between its file and what it writes into it, the file is empty.
    #[test]
    fn release_waits_for_the_lock_of_host_local() {
        let base = tempfile::tempdir().unwrap();
        let (dir, reserved) = (base.path().to_owned(), base.path().join("10.5.1.7"));
        let held = lock(&dir).unwrap();
        fs::write(&reserved, "").unwrap();
        let releases = std::thread::spawn(move || release(&dir, |_| false).unwrap());
        let end = Instant::now() + Duration::from_secs(60);
        while !is_waited_for(&held) {
            assert!(!releases.is_finished() && Instant::now() < end, "it must wait for the lock");
            std::thread::yield_now();
        }
        assert!(reserved.exists(), "the other program is not done yet");
        fs::write(&reserved, "c1\r\neth0").unwrap();
        drop(held);
        assert_eq!(releases.join().unwrap(), []);
        assert!(reserved.exists());
    }

    #[test]
    fn list_reads_the_files_of_host_local_and_release_removes_stale_ones() {
        let base = tempfile::tempdir().unwrap();
        let ipam = json!({"dataDir": base.path()});
        let dir = dir(ipam.as_object().unwrap(), "cbr0").unwrap();
        assert!(list(&dir).unwrap().is_empty() && release(&dir, |_| true).unwrap().is_empty(), "no directory yet");
        fs::create_dir(&dir).unwrap();
        let files = [
            ("10.5.1.10", "c1\r\neth0"),
            ("10.5.1.9", "c2\r\nnet1"),
            ("fd05::2", "old"),
            ("10.5.1.7", ""),
            ("last_reserved_ip.0", "10.5.1.10"),
        ];
        for (name, text) in files {
            fs::write(dir.join(name), text).unwrap();
        }
        let seen: Vec<_> =
            list(&dir).unwrap().into_iter().map(|r| (r.addr.to_string(), r.container, r.ifname)).collect();
        let row =
            |addr: &str, id: &str, ifname: Option<&str>| (addr.to_owned(), id.to_owned(), ifname.map(str::to_owned));
        let v4 = [row("10.5.1.7", "", None), row("10.5.1.9", "c2", Some("net1")), row("10.5.1.10", "c1", Some("eth0"))];
        assert_eq!(seen[..3], v4);
        assert_eq!(seen[3..], [row("fd05::2", "old", None)]);
        let removed = release(&dir, |reservation| reservation.container == "old").unwrap();
        let removed: Vec<_> = removed.into_iter().map(|r| r.addr.to_string()).collect();
        assert_eq!(removed, ["10.5.1.7", "fd05::2"], "a reservation without a container is always stale");
        assert!(dir.join("last_reserved_ip.0").exists() && dir.join("10.5.1.9").exists());
        let other = json!({"type": "static"});
        assert_eq!(super::dir(other.as_object().unwrap(), "cbr0"), None);
    }
}
