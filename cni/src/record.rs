// SPDX-License-Identifier: Apache-2.0
//! Records: the configurations that were given to delegates, kept until the delegate's DEL has succeeded.
//!
//! There is one file for each attachment. The file of `eth0` is named by the container ID, as in flannel's plugin, so
//! that each plugin can clean up after the other. The file of any other interface is named `ID:IFNAME`.
//!
//! The member `weft` of a record contains what DEL needs if the runtime does not call it. Delegates ignore unknown
//! members.
//!
//! A lock on the file means that a call for this attachment is running. The delegate inherits the lock. If the plugin
//! is killed, the lock therefore remains until the delegate ends.

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

/// The interface whose record is named as in flannel's plugin.
const FLANNEL_IFNAME: &str = "eth0";
/// The member of a record that flannel's plugin does not write.
const WEFT_MEMBER: &str = "weft";
/// How long to wait for another call for the same attachment. Such a call has usually lost its runtime, and ends on its
/// own.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Age at which a temporary file counts as left behind. Writing one takes milliseconds.
const ABANDONED: Duration = Duration::from_secs(1);

/// The parameters of ADD, for a DEL or GC that does not get them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caller {
    /// CNI_IFNAME: name of the interface.
    pub ifname: String,
    /// CNI_NETNS: path of the pod's network namespace.
    #[serde(default)]
    pub netns: String,
    /// CNI_ARGS: `KEY=VALUE` pairs, separated by semicolons.
    #[serde(default)]
    pub args: String,
}

/// The content of a record.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Path of the file.
    pub path: PathBuf,
    /// ID of the container.
    pub container: String,
    /// The parameters of ADD; `None` if flannel's plugin wrote the record.
    pub caller: Option<Caller>,
    /// The delegate's configuration; `None` if the file is not valid JSON.
    pub conf: Option<Map<String, Value>>,
}

impl Record {
    /// Returns the name of the network, or an empty string if the record is not valid.
    pub fn network(&self) -> &str {
        self.conf.as_ref().and_then(|conf| conf.get("name")?.as_str()).unwrap_or_default()
    }

    /// Returns true unless the record names another interface.
    fn may_belong_to(&self, ifname: &str) -> bool {
        self.caller.as_ref().is_none_or(|caller| caller.ifname == ifname)
    }
}

/// A record whose lock this process holds.
#[derive(Debug)]
pub struct Locked {
    /// The content.
    pub record: Record,
    /// True if this ADD created the record. The delegate's DEL then removes only what this ADD created.
    pub is_new: bool,
    _lock: Flock<File>,
}

impl Locked {
    /// Removes the record, after the delegate's DEL has succeeded.
    ///
    /// # Errors
    /// [`code::IO`] if the file cannot be removed. A missing file is not an error.
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
    if ifname == FLANNEL_IFNAME { container.to_owned() } else { format!("{container}:{ifname}") }
}

/// Writes the record of an attachment and locks it. If there is one already, it is locked first and then replaced.
///
/// The record is on disk when this function returns. Otherwise a power loss could leave addresses reserved for ever.
///
/// # Errors
/// [`code::IO`] if the file cannot be written; [`code::TRY_AGAIN`] if another call for this attachment does not end in
/// time.
pub fn write(dir: &Path, request: &Request, conf: &Map<String, Value>) -> Result<Locked, Error> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|error| Error::io(format!("create {}", dir.display()), error))?;
    let name = file_name(&request.container, &request.ifname);
    let (path, temporary) = (dir.join(&name), dir.join(format!(".{name}~{}", std::process::id())));
    // This lock is held until the new file has replaced the old one.
    let previous = lock(&path, LOCK_TIMEOUT)?;
    let caller = Caller { ifname: request.ifname.clone(), netns: request.netns.clone(), args: request.args.clone() };
    let mut all = conf.clone();
    all.insert(WEFT_MEMBER.to_owned(), json!(caller));
    let failed = |error: io::Error| Error::io(format!("write {}", path.display()), error);
    let replace = || -> io::Result<Flock<File>> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(&serde_json::to_vec(&all)?)?;
        publish(file, &temporary, &path)
    };
    let lock = replace().map_err(failed)?;
    let is_new = previous.is_none();
    drop(previous);
    let record = Record { path, container: request.container.clone(), caller: Some(caller), conf: Some(conf.clone()) };
    Ok(Locked { record, is_new, _lock: lock })
}

/// Locks a record that was written under a temporary name, gives it its name, and writes it to the disk.
fn publish(file: File, temporary: &Path, path: &Path) -> io::Result<Flock<File>> {
    let lock = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| io::Error::from(errno))?;
    inherit(&*lock)?;
    fs::rename(temporary, path)?;
    // Syncing after the rename is cheaper: one journal commit makes the data and the rename durable.
    lock.sync_all()?;
    Ok(lock)
}

/// Finds and locks the record of an attachment: the one with the interface's own name, else the one with the name that
/// flannel's plugin uses. Returns `None` if there is neither.
///
/// # Errors
/// [`code::IO`] if a file cannot be read; [`code::TRY_AGAIN`] if another call for this attachment does not end in time.
pub fn find(dir: &Path, container: &str, ifname: &str) -> Result<Option<Locked>, Error> {
    sweep(dir, &format!(".{}~", file_name(container, ifname)));
    for name in [file_name(container, ifname), container.to_owned()] {
        let found = take(&dir.join(&name), LOCK_TIMEOUT)?;
        if let Some(locked) = found.filter(|locked| locked.record.may_belong_to(ifname)) {
            return Ok(Some(locked));
        }
    }
    Ok(None)
}

/// Removes temporary files that killed ADDs left behind. Their delegates never ran. `prefix` selects the files by name.
pub fn sweep(dir: &Path, prefix: &str) {
    let Ok(files) = fs::read_dir(dir) else { return };
    for file in files.flatten().filter(|file| file.file_name().to_string_lossy().starts_with(prefix)) {
        // A locked file is being written.
        let free = File::open(file.path()).is_ok_and(|f| Flock::lock(f, FlockArg::LockExclusiveNonblock).is_ok());
        let written = file.metadata().and_then(|about| about.modified()).ok().and_then(|time| time.elapsed().ok());
        if free && written.is_some_and(|age| age >= ABANDONED) {
            let _ = fs::remove_file(file.path());
        }
    }
}

/// Returns all records, sorted by file name. The files are read without a lock.
///
/// # Errors
/// [`code::IO`] if the directory cannot be read. A missing directory means that there are no records.
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

/// Locks and reads a record. Returns `None` if the file does not exist or is not a record.
///
/// # Errors
/// [`code::IO`] if the file cannot be read; [`code::TRY_AGAIN`] if another call for this attachment does not end within
/// `limit`.
pub fn take(path: &Path, limit: Duration) -> Result<Option<Locked>, Error> {
    let Some(mut lock) = lock(path, limit)? else { return Ok(None) };
    let mut text = Vec::new();
    lock.read_to_end(&mut text).map_err(|error| Error::io(format!("read {}", path.display()), error))?;
    inherit(&*lock).map_err(|error| Error::io(format!("keep {} open", path.display()), error))?;
    Ok(parse(path, &text).map(|record| Locked { record, is_new: false, _lock: lock }))
}

fn lock(path: &Path, limit: Duration) -> Result<Option<Flock<File>>, Error> {
    let failed = |error: io::Error| Error::io(format!("lock {}", path.display()), error);
    let deadline = Instant::now() + limit;
    loop {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(failed)?,
        };
        if let Some(lock) = try_lock(file, path).map_err(failed)? {
            return Ok(Some(lock));
        }
        if Instant::now() >= deadline {
            let text = format!("another call for this pod is still running: {} is locked", path.display());
            return Err(Error::new(code::TRY_AGAIN, text));
        }
        pause();
    }
}

/// Locks a file that was opened at this path. Returns `None` if another call holds the lock, or has removed or replaced the file since it
/// was opened.
fn try_lock(file: File, path: &Path) -> io::Result<Option<Flock<File>>> {
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock).filter(|lock| is_at(lock, path))),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno.into()),
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let same = |(a, b): (fs::Metadata, fs::Metadata)| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().ok().zip(fs::metadata(path).ok()).is_some_and(same)
}

/// Makes child processes inherit the file descriptor, and with it the lock.
fn inherit(file: &impl AsFd) -> io::Result<()> {
    fcntl(file, FcntlArg::F_SETFD(FdFlag::empty())).map(drop).map_err(io::Error::from)
}

/// Parses a record. Returns `None` if the name of the file is not that of a record.
fn parse(path: &Path, text: &[u8]) -> Option<Record> {
    let name = path.file_name()?.to_str()?;
    let (container, ifname) = name.split_once(':').map_or((name, None), |(id, ifname)| (id, Some(ifname)));
    if !is_name(container) {
        return None;
    }
    let mut conf: Option<Map<String, Value>> = serde_json::from_slice(text).ok();
    let ours = conf.as_mut().and_then(|conf| conf.remove(WEFT_MEMBER));
    let written: Option<Caller> = ours.and_then(|ours| serde_json::from_value(ours).ok());
    let from_name = || ifname.map(|ifname| Caller { ifname: ifname.to_owned(), ..Caller::default() });
    Some(Record { path: path.to_owned(), container: container.to_owned(), caller: written.or_else(from_name), conf })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Between the opening of a file and its lock, the call that held the lock may end.
    #[test]
    fn a_lock_on_a_file_that_was_removed_or_replaced_is_not_one_on_the_record() {
        let dir = tempfile::tempdir().unwrap();
        let (path, new) = (dir.path().join("id"), dir.path().join(".id~1"));
        let open = || {
            fs::write(&path, "{}").unwrap();
            File::open(&path).unwrap()
        };
        let held = try_lock(open(), &path).unwrap().expect("nobody else has it");
        assert!(try_lock(File::open(&path).unwrap(), &path).unwrap().is_none(), "another call holds the lock");
        drop(held);
        let before = open();
        fs::remove_file(&path).unwrap();
        assert!(try_lock(before, &path).unwrap().is_none(), "removed");
        let before = open();
        fs::write(&new, "{}").unwrap();
        fs::rename(&new, &path).unwrap();
        assert!(try_lock(before, &path).unwrap().is_none(), "replaced");
        let now = File::open(&path).unwrap();
        assert!(try_lock(now, &path).unwrap().is_some());
    }

    /// The delegate of that call may still be creating what a DEL would not remove then.
    #[test]
    fn a_record_that_another_call_holds_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("id");
        fs::write(&path, "{}").unwrap();
        let held = Flock::lock(File::open(&path).unwrap(), FlockArg::LockExclusive).unwrap();
        let error = take(&path, Duration::ZERO).unwrap_err();
        assert_eq!(error.code, code::TRY_AGAIN);
        assert!(error.msg.starts_with("another call for this pod is still running"), "{error}");
        drop(held);
        assert!(take(&path, Duration::ZERO).unwrap().is_some());
        assert!(take(&dir.path().join("none"), Duration::ZERO).unwrap().is_none());
    }

    /// A pipe can be locked, and cannot be synced, so it stands for a disk that cannot take the record.
    #[test]
    fn a_record_that_cannot_be_synced_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (temporary, path) = (dir.path().join(".id~1"), dir.path().join("id"));
        fs::write(&temporary, "{}").unwrap();
        let (_reader, writer) = nix::unistd::pipe().unwrap();
        let error = publish(writer.into(), &temporary, &path).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::EINVAL as i32));
        assert!(path.exists(), "it is synced after the rename");
    }

    #[test]
    fn a_temporary_file_is_removed_once_it_is_old_and_nobody_writes_it() {
        let dir = tempfile::tempdir().unwrap();
        let now = std::time::SystemTime::now();
        let file = |name: &str, modified: std::time::SystemTime| {
            let file = File::create(dir.path().join(name)).unwrap();
            file.set_modified(modified).unwrap();
            file
        };
        let old = now - ABANDONED * 60;
        let written = Flock::lock(file(".id~1", old), FlockArg::LockExclusive).unwrap();
        // The second one stays young however long this test takes.
        let _others = [file(".id~2", now + ABANDONED * 600), file(".other~3", old), file("id", old)];
        let left = || {
            sweep(dir.path(), ".id~");
            let names = fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        };
        assert_eq!(left(), [".id~1", ".id~2", ".other~3", "id"]);
        drop(written);
        assert_eq!(left(), [".id~2", ".other~3", "id"]);
    }
}
