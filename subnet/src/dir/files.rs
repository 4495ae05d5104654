// SPDX-License-Identifier: Apache-2.0
//! The files of the directory store: names, reading, atomic writing, the lock.
//!
//! What touches the disk does so on a thread of its own ([`Files::work`]): a file system that hangs (NFS) must not hold up the
//! agent's only thread.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::libc::O_NONBLOCK;
use tempfile::NamedTempFile;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};

use crate::attrs::{Attrs, MOST_OF_A_VALUE};
use crate::cidr::Subnets;
use crate::lease::{self, Age, Id, Lease, Record};
use crate::network::{MOST_OF_A_NET_CONF, net_conf_text};
use crate::source::{Error, random};
use crate::text::Shown;

const LOCK_LIMIT: Duration = Duration::from_secs(5);
const LOCK_EVERY: Duration = Duration::from_millis(10);
/// One piece of work waits so long for its turn and its end: 50,000 files at 1 ms each are less.
const LIMIT: Duration = Duration::from_secs(60);
const SUFFIX: &str = ".json";

/// A directory with leases.
#[derive(Debug)]
pub(super) struct Files {
    path: PathBuf,
    subnets: PathBuf,
    /// Created once only: a directory that vanished later may be an unmounted file system, and must not be made anew.
    made: AtomicBool,
    /// One piece of work at a time: while one hangs, no others pile up behind it.
    turn: Arc<Semaphore>,
}

fn failed(op: &str, path: &Path, error: std::io::Error) -> Error {
    Error::Unavailable { what: format!("{op} {}", path.display()), source: Some(Box::new(error)) }
}

#[derive(serde::Deserialize)]
struct Created {
    #[serde(rename = "Created", default)]
    created: Option<u64>,
}

/// The id that a file name stands for; `None` for temporary, hidden and foreign files, and names that no lease can have
/// ([`lease::id`]).
pub(super) fn id(name: &str) -> Option<Id> {
    if name.starts_with('.') { None } else { name.strip_suffix(SUFFIX).and_then(lease::id) }
}

/// Fails unless this is a regular file, and says what it is instead.
fn regular(meta: &fs::Metadata) -> io::Result<()> {
    let kind = meta.file_type();
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "directory",
        () if kind.is_fifo() => "FIFO",
        () if kind.is_socket() => "socket",
        () => "device",
    };
    Err(io::Error::other(format!("it is a {what} and no regular file: remove it")))
}

/// The content of a regular file, but one byte more than `most` of a larger one. Opening a FIFO would wait for its writer, opening
/// a device may do something, and reading one may never end: so the file is looked at first, and opened without waiting in case it
/// is replaced between look and open.
fn read_at_most(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    regular(&fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
    regular(&file.metadata()?)?;
    let mut content = Vec::new();
    file.take(most as u64 + 1).read_to_end(&mut content)?;
    Ok(content)
}

fn record(id: Id, value: &[u8]) -> Record {
    let lease = match Subnets::from_key(&id) {
        None => Err(format!("file {}{SUFFIX} is not named after a subnet", Shown(&id))),
        Some(subnets) => Attrs::from_wire(value).map_err(|error| error.to_string()).map(|attrs| {
            let created = serde_json::from_slice::<Created>(value).ok().and_then(|file| file.created);
            // Of unknown age = the youngest: it must not push older leases aside.
            let age = match created {
                Some(stamp) => Age { stamp, tie: Arc::default() },
                None => Age { stamp: u64::MAX, tie: id.clone() },
            };
            Lease { id: id.clone(), subnets, attrs, age }
        }),
    };
    Record::new(id, lease)
}

impl Files {
    pub(super) fn new(path: PathBuf) -> Files {
        let subnets = path.join("subnets");
        Files { path, subnets, made: AtomicBool::new(false), turn: Arc::new(Semaphore::new(1)) }
    }

    /// Does this where it may block. Work that was begun goes on when nobody waits for it any more.
    pub(super) async fn work<T: Send + 'static>(
        self: &Arc<Files>,
        work: impl FnOnce(&Files) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let until = Instant::now() + LIMIT;
        let what = || format!("read and write {}", self.path.display());
        let silent = |_| Error::Unavailable {
            what: format!("{}: no answer within {} s: does its file system hang?", what(), LIMIT.as_secs()),
            source: None,
        };
        let ended = |error| Error::Unavailable { what: what(), source: Some(error) };
        let turn = timeout_at(until, Arc::clone(&self.turn).acquire_owned()).await.map_err(silent)?;
        let turn = turn.map_err(|closed| ended(closed.into()))?;
        let files = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || {
            let done = work(&files);
            drop(turn);
            done
        });
        timeout_at(until, done).await.map_err(silent)?.map_err(|error| ended(error.into()))?
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn subnets(&self) -> &Path {
        &self.subnets
    }

    fn file(&self, id: &str) -> PathBuf {
        self.subnets.join(format!("{id}{SUFFIX}"))
    }

    fn config_file(&self) -> PathBuf {
        self.path.join("config.json")
    }

    pub(super) fn missing(&self, id: &str) -> Error {
        Error::Missing(self.file(id).display().to_string())
    }

    pub(super) fn missing_config(&self) -> Error {
        Error::Missing(self.config_file().display().to_string())
    }

    /// Makes the directory with the first use.
    pub(super) fn make(&self) -> Result<(), Error> {
        if !self.made.load(Ordering::Relaxed) {
            let made = DirBuilder::new().recursive(true).mode(0o755).create(&self.subnets);
            made.map_err(|error| failed("create", &self.subnets, error))?;
            self.made.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Held until dropped; other processes wait, at most 5 s.
    pub(super) async fn lock(self: &Arc<Files>) -> Result<Flock<File>, Error> {
        let path = self.path.join(".lock");
        let at = path.clone();
        let open = move |files: &Files| {
            files.make()?;
            let there = match fs::metadata(&at) {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
                meta => meta.and_then(|meta| regular(&meta)),
            };
            let mut options = OpenOptions::new();
            options.create(true).truncate(false).write(true).custom_flags(O_NONBLOCK);
            there.and_then(|()| options.open(&at)).map_err(|error| failed("open", &at, error))
        };
        let mut file = self.work(open).await?;
        let until = Instant::now() + LOCK_LIMIT;
        loop {
            match self.work(|_| Ok(Flock::lock(file, FlockArg::LockExclusiveNonblock))).await? {
                Ok(lock) => return Ok(lock),
                Err((back, nix::errno::Errno::EWOULDBLOCK)) if Instant::now() < until => file = back,
                Err((_, errno)) => return Err(failed("lock", &path, errno.into())),
            }
            sleep(LOCK_EVERY + Duration::from_millis(random() % 10)).await;
        }
    }

    /// net-conf; `None` when there is none.
    pub(super) fn config(&self) -> Result<Option<String>, Error> {
        self.make()?;
        let path = self.config_file();
        match read_at_most(&path, MOST_OF_A_NET_CONF) {
            Ok(value) => Ok(Some(net_conf_text(&value))),
            Err(error) if error.kind() == ErrorKind::NotFound && self.subnets.is_dir() => Ok(None),
            Err(error) => Err(failed("read", &path, error)),
        }
    }

    /// One record; `None` when it is not there.
    pub(super) fn read(&self, id: &str) -> Result<Option<Record>, Error> {
        let path = self.file(id);
        match read_at_most(&path, MOST_OF_A_VALUE) {
            Ok(value) => Ok(Some(record(id.into(), &value))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            // A file that cannot be read says nothing about the others.
            Err(error) => {
                let reason = format!("cannot read {}: {error}", path.display());
                Ok(Some(Record::new(id.into(), Err::<Lease, _>(reason))))
            }
        }
    }

    /// All records, by id. Fails as a whole when the directory cannot be listed.
    pub(super) fn scan(&self) -> Result<Vec<Record>, Error> {
        self.make()?;
        let entries = fs::read_dir(&self.subnets).map_err(|error| failed("list", &self.subnets, error))?;
        let mut records = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| failed("list", &self.subnets, error))?;
            let Some(id) = id(&entry.file_name().to_string_lossy()) else { continue };
            records.extend(self.read(&id)?);
        }
        records.sort_by(|one, other| one.id.cmp(&other.id));
        Ok(records)
    }

    /// Writes aside; the file has no name yet that anyone reads.
    fn aside(&self, attrs: &Attrs, created: u64) -> Result<NamedTempFile, Error> {
        let write = || -> std::io::Result<NamedTempFile> {
            let mut file = tempfile::Builder::new()
                .prefix(".lease-")
                .permissions(Permissions::from_mode(0o644))
                .tempfile_in(&self.subnets)?;
            let value = attrs.to_wire();
            let open = value.strip_suffix('}').unwrap_or(&value);
            writeln!(file, "{open},\"Created\":{created}}}")?;
            file.as_file().sync_all()?;
            Ok(file)
        };
        write().map_err(|error| failed("write a lease in", &self.subnets, error))
    }

    fn written(&self, id: &str) -> Result<Lease, Error> {
        let synced = File::open(&self.subnets).and_then(|dir| dir.sync_all());
        synced.map_err(|error| failed("sync", &self.subnets, error))?;
        let lease = self.read(id)?.ok_or_else(|| self.missing(id))?.lease;
        lease.map_err(|reason| Error::Invalid(format!("{}: {reason}", self.file(id).display())))
    }

    /// Writes a new file; one that is there already is `Taken`, whoever put it without the lock.
    pub(super) fn create(&self, id: &str, attrs: &Attrs, created: u64) -> Result<Lease, Error> {
        match self.aside(attrs, created)?.persist_noclobber(self.file(id)) {
            Ok(_) => self.written(id),
            Err(error) if error.error.kind() == ErrorKind::AlreadyExists => Err(Error::Taken {
                subnet: Subnets::from_key(id).unwrap_or_default(),
                owner: "a file that was put there meanwhile".to_owned(),
            }),
            Err(error) => Err(failed("create", &self.file(id), error.error)),
        }
    }

    /// Replaces a file.
    pub(super) fn replace(&self, id: &str, attrs: &Attrs, created: u64) -> Result<Lease, Error> {
        let persisted = self.aside(attrs, created)?.persist(self.file(id));
        persisted.map_err(|error| failed("replace", &self.file(id), error.error))?;
        self.written(id)
    }

    /// Deletes a file.
    pub(super) fn delete(&self, id: &str) -> Result<(), Error> {
        let path = self.file(id);
        if id.contains('/') {
            return Err(Error::Invalid(format!("{id} is not the id of a lease")));
        }
        fs::remove_file(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => self.missing(id),
            _ => failed("delete", &path, error),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn a_file_system_that_hangs_holds_nothing_else_up() {
        let files = Arc::new(Files::new(PathBuf::from("/nonexistent")));
        let (answer, hangs) = mpsc::channel();
        let hanging = files.work(move |_| hangs.recv().map_err(|error| Error::Invalid(error.to_string())));
        // Runs on the same thread as the caller of the work, and ends what hangs.
        let elsewhere = async { answer.send("it answers again").unwrap() };
        let (done, ()) = tokio::join!(hanging, elsewhere);
        assert_eq!(done.unwrap(), "it answers again");
    }
}
