// SPDX-License-Identifier: Apache-2.0
//! The reservations of the `host-local` plugin: a file for each address, `CONTAINER\r\nIFNAME` in it, a lock beside them.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde_json::{Map, Value};

use crate::spec::Error;

/// Its directory, unless `dataDir` of `ipam` says otherwise.
const DIR: &str = "/var/lib/cni/networks";

/// An address that is taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    /// Its file.
    pub path: PathBuf,
    /// The address.
    pub addr: IpAddr,
    /// Who has it; empty when host-local was killed before it wrote that.
    pub container: String,
    /// `None` in files of old versions.
    pub ifname: Option<String>,
}

/// Where the reservations of a network are; `None` when another plugin gives its addresses.
pub fn dir(ipam: &Map<String, Value>, network: &str) -> Option<PathBuf> {
    let text = |key: &str| ipam.get(key).and_then(Value::as_str).filter(|text| !text.is_empty());
    (text("type").unwrap_or("host-local") == "host-local")
        .then(|| Path::new(text("dataDir").unwrap_or(DIR)).join(network))
}

/// All reservations, in the order of addresses; a missing directory has none.
///
/// # Errors
/// [`crate::spec::code::IO`].
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

/// Gives back every address that `stale` says so of, and those nobody can have; what was given back. host-local waits meanwhile.
///
/// # Errors
/// [`crate::spec::code::IO`].
pub fn release(dir: &Path, stale: impl Fn(&Reservation) -> bool) -> Result<Vec<Reservation>, Error> {
    if !dir.is_dir() {
        return Ok(Vec::new());
    }
    let _lock = lock(dir).map_err(|error| Error::io(format!("lock {}", dir.display()), error))?;
    let mut gone = list(dir)?;
    gone.retain(|reservation| reservation.container.is_empty() || stale(reservation));
    for reservation in &gone {
        fs::remove_file(&reservation.path)
            .map_err(|error| Error::io(format!("remove {}", reservation.path.display()), error))?;
    }
    Ok(gone)
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
    use serde_json::json;

    use super::*;

    #[test]
    fn reads_what_host_local_writes_and_gives_back_what_is_stale() {
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
        let gone = release(&dir, |reservation| reservation.container == "old").unwrap();
        let gone: Vec<_> = gone.into_iter().map(|r| r.addr.to_string()).collect();
        assert_eq!(gone, ["10.5.1.7", "fd05::2"], "the empty one belongs to nobody");
        assert!(dir.join("last_reserved_ip.0").exists() && dir.join("10.5.1.9").exists());
        let other = json!({"type": "static"});
        assert_eq!(super::dir(other.as_object().unwrap(), "cbr0"), None);
    }
}
