// SPDX-License-Identifier: Apache-2.0
//! What was given to the delegate, kept until the delegate has taken it back.
//!
//! A record's key is container id and interface name. The file of `eth0` has flannel's own name, the container id, so that
//! either plugin cleans up after the other; any other interface has `ID:NAME`. Our records say in a member `weft` what DEL will
//! need without its caller; delegates overlook it. A lock on the file says that a call for this pod is running; the delegate
//! inherits it, so a plugin that is killed leaves no delegate at work unseen.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, Flock, FlockArg, fcntl};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::env::{Request, is_name};
use crate::spec::{Error, code};
use crate::wait::pause;

/// The interface whose record has flannel's name.
const FLANNELS: &str = "eth0";
/// Our member of a record.
const OURS: &str = "weft";
/// Another call for the same pod may take so long: its runtime is gone, and it ends by itself.
const PATIENCE: Duration = Duration::from_secs(10);

/// A file that is not in its place after this time will never be: writing it takes milliseconds.
const ABANDONED: Duration = Duration::from_secs(1);

/// What the caller of ADD said, for a DEL without a caller.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// CNI_IFNAME.
    pub ifname: String,
    /// CNI_NETNS.
    #[serde(default)]
    pub netns: String,
    /// CNI_ARGS.
    #[serde(default)]
    pub args: String,
}

/// A record, read.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Its file.
    pub path: PathBuf,
    /// The container.
    pub container: String,
    /// `None`: flannel's plugin wrote it.
    pub caller: Option<Caller>,
    /// The delegate's configuration; `None` when the file is no JSON.
    pub conf: Option<Map<String, Value>>,
}

impl Record {
    /// Name of the network; empty when it cannot be read.
    pub fn network(&self) -> &str {
        self.conf.as_ref().and_then(|conf| conf.get("name")?.as_str()).unwrap_or_default()
    }

    /// True when this is the record of that interface, as far as it says.
    fn is_of(&self, ifname: &str) -> bool {
        self.caller.as_ref().is_none_or(|caller| caller.ifname == ifname)
    }
}

/// A record that no other call works on.
#[derive(Debug)]
pub struct Locked {
    /// What it says.
    pub record: Record,
    /// True when an ADD wrote it in the place of none: what the delegate makes now is all that there is.
    pub first: bool,
    _lock: Flock<File>,
}

impl Locked {
    /// Removes the file: nothing is left to be taken back.
    ///
    /// # Errors
    /// [`code::IO`].
    pub fn remove(self) -> Result<(), Error> {
        match fs::remove_file(&self.record.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(format!("remove {}", self.record.path.display()), error))
            }
            _ => Ok(()),
        }
    }
}

fn file_name(container: &str, ifname: &str) -> String {
    if ifname == FLANNELS { container.to_owned() } else { format!("{container}:{ifname}") }
}

/// Writes the record of an attachment, and holds its lock. A record that is there is replaced, once nobody works on it.
///
/// The data is on disk before this returns: after a power loss addresses would be taken for ever otherwise.
///
/// # Errors
/// [`code::IO`]; [`code::TRY_AGAIN`] when another call for this pod does not end.
pub fn write(dir: &Path, request: &Request, conf: &Map<String, Value>) -> Result<Locked, Error> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| Error::io(format!("create {}", dir.display()), error))?;
    let name = file_name(&request.container, &request.ifname);
    let (path, aside) = (dir.join(&name), dir.join(format!(".{name}~{}", std::process::id())));
    // Held until ours is in its place.
    let before = lock(&path, PATIENCE)?;
    let caller = Caller { ifname: request.ifname.clone(), netns: request.netns.clone(), args: request.args.clone() };
    let mut all = conf.clone();
    all.insert(OURS.to_owned(), json!(caller));
    let failed = |error: io::Error| Error::io(format!("write {}", path.display()), error);
    let put = || -> io::Result<Flock<File>> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
        file.write_all(&serde_json::to_vec(&all)?)?;
        let lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| io::Error::from(errno))?;
        inherit(&*lock)?;
        fs::rename(&aside, &path)?;
        // After the rename: one journal commit makes both durable.
        lock.sync_all()?;
        Ok(lock)
    };
    let lock = put().map_err(failed)?;
    let first = before.is_none();
    drop(before);
    let record = Record { path, container: request.container.clone(), caller: Some(caller), conf: Some(conf.clone()) };
    Ok(Locked { record, first, _lock: lock })
}

/// The record of an attachment: ours, else flannel's; `None` when there is none.
///
/// # Errors
/// [`code::IO`]; [`code::TRY_AGAIN`] when another call for this pod does not end.
pub fn find(dir: &Path, container: &str, ifname: &str) -> Result<Option<Locked>, Error> {
    sweep(dir, &format!(".{}~", file_name(container, ifname)));
    for name in [file_name(container, ifname), container.to_owned()] {
        let found = take(&dir.join(&name), PATIENCE)?;
        if let Some(locked) = found.filter(|locked| locked.record.is_of(ifname)) {
            return Ok(Some(locked));
        }
    }
    Ok(None)
}

/// Removes what a killed ADD had not yet put in its place: its delegate never ran. `prefix` is that of the files' names.
pub fn sweep(dir: &Path, prefix: &str) {
    let Ok(files) = fs::read_dir(dir) else { return };
    for file in files.flatten().filter(|file| file.file_name().to_string_lossy().starts_with(prefix)) {
        // One that is locked is being written.
        let free = File::open(file.path()).is_ok_and(|f| Flock::lock(f, FlockArg::LockExclusiveNonblock).is_ok());
        let written = file.metadata().and_then(|about| about.modified()).ok().and_then(|time| time.elapsed().ok());
        if free && written.is_some_and(|age| age >= ABANDONED) {
            let _ = fs::remove_file(file.path());
        }
    }
}

/// All records, in the order of their files' names, read without a lock.
///
/// # Errors
/// [`code::IO`] when the directory cannot be read; a missing one has no records.
pub fn list(dir: &Path) -> Result<Vec<Record>, Error> {
    let failed = |error| Error::io(format!("read {}", dir.display()), error);
    let mut records = Vec::new();
    let files = match fs::read_dir(dir) {
        Ok(files) => files,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(records),
        Err(error) => return Err(failed(error)),
    };
    for file in files {
        let path = file.map_err(failed)?.path();
        match fs::read(&path) {
            Ok(text) => records.extend(parse(&path, &text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => note!("read {}: {error}", path.display()),
        }
    }
    records.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(records)
}

/// Takes the lock of a record; `None` when the file is gone.
///
/// # Errors
/// [`code::IO`]; [`code::TRY_AGAIN`] when a call for this pod does not end in time.
pub fn take(path: &Path, limit: Duration) -> Result<Option<Locked>, Error> {
    let Some(mut lock) = lock(path, limit)? else { return Ok(None) };
    let mut text = Vec::new();
    lock.read_to_end(&mut text).map_err(|error| Error::io(format!("read {}", path.display()), error))?;
    inherit(&*lock).map_err(|error| Error::io(format!("keep {} open", path.display()), error))?;
    Ok(parse(path, &text).map(|record| Locked { record, first: false, _lock: lock }))
}

fn lock(path: &Path, limit: Duration) -> Result<Option<Flock<File>>, Error> {
    let failed = |error: io::Error| Error::io(format!("lock {}", path.display()), error);
    let deadline = Instant::now() + limit;
    loop {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(failed)?,
        };
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) if is_at(&lock, path) => return Ok(Some(lock)),
            // Removed or replaced by the call that had the lock before: look again.
            Ok(_) => {}
            Err((_, Errno::EWOULDBLOCK)) => pause(),
            Err((_, errno)) => return Err(failed(errno.into())),
        }
        if Instant::now() >= deadline {
            let text = format!("another call for this pod is still running: {} is locked", path.display());
            return Err(Error::new(code::TRY_AGAIN, text));
        }
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let same = |(a, b): (fs::Metadata, fs::Metadata)| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().ok().zip(fs::metadata(path).ok()).is_some_and(same)
}

/// The delegate shall hold the lock too.
fn inherit(file: &impl AsFd) -> io::Result<()> {
    fcntl(file, FcntlArg::F_SETFD(FdFlag::empty())).map(drop).map_err(io::Error::from)
}

/// `None` when the file's name is none of a record.
fn parse(path: &Path, text: &[u8]) -> Option<Record> {
    let name = path.file_name()?.to_str()?;
    let (container, ifname) = name.split_once(':').map_or((name, None), |(id, ifname)| (id, Some(ifname)));
    if !is_name(container) {
        return None;
    }
    let mut conf: Option<Map<String, Value>> = serde_json::from_slice(text).ok();
    let ours = conf.as_mut().and_then(|conf| conf.remove(OURS));
    let said: Option<Caller> = ours.and_then(|ours| serde_json::from_value(ours).ok());
    let named = || ifname.map(|ifname| Caller { ifname: ifname.to_owned(), ..Caller::default() });
    Some(Record { path: path.to_owned(), container: container.to_owned(), caller: said.or_else(named), conf })
}
