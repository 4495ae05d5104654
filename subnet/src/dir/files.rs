// SPDX-License-Identifier: Apache-2.0
//! The files of the directory store: their names, how they are read and atomically written, and the lock.
//!
//! Everything that touches the disk runs on another thread ([`Files::work`]), because a file system that hangs, such as NFS, must not
//! block the agent's only thread.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use tempfile::NamedTempFile;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout_at};

use crate::attrs::{Attrs, BadAttrs, MAX_VALUE_BYTES};
use crate::cidr::Subnets;
use crate::lease::{self, Age, Id, Lease, Record};
use crate::net_conf::{EXAMPLE, MAX_NET_CONF_BYTES, net_conf_text};
use crate::retry::jitter;
use crate::source::Error;
use crate::text::Shown;

/// How long to wait for the lock.
const LOCK_LIMIT: Duration = Duration::from_secs(5);
/// The longest pause between two attempts to take the lock.
const LOCK_EVERY: Duration = Duration::from_millis(20);
/// Time limit of one piece of work, including the time until it begins. To read 50,000 files at 1 ms each takes less.
const LIMIT: Duration = Duration::from_secs(60);
const SUFFIX: &str = ".json";

/// A directory with leases.
#[derive(Debug)]
pub(super) struct Files {
    path: PathBuf,
    subnets: PathBuf,
    /// True once the directory exists. It is not created a second time: if it vanishes later, its file system may be unmounted.
    made: AtomicBool,
    /// Allows one piece of work at a time, so that threads do not accumulate while one hangs.
    turn: Arc<Semaphore>,
}

fn failed(op: &str, path: &Path, error: std::io::Error) -> Error {
    Error::Unavailable { what: format!("{op} {}", path.display()), source: Some(Box::new(error)) }
}

/// Writes a lease, which was created at this time, into a file and to the disk.
fn write_lease(file: &mut File, attrs: &Attrs, created: u64) -> io::Result<()> {
    let value = attrs.to_wire();
    let open = value.strip_suffix('}').unwrap_or(&value);
    writeln!(file, "{open},\"Created\":{created}}}")?;
    file.sync_all()
}

#[derive(serde::Deserialize)]
struct Created {
    #[serde(rename = "Created", default)]
    created: Option<u64>,
}

/// Returns the id of a file name. Returns `None` for temporary, hidden and unrelated files, and for names that no lease can have
/// ([`lease::id`]).
pub(super) fn id(name: &str) -> Option<Id> {
    if name.starts_with('.') { None } else { name.strip_suffix(SUFFIX).and_then(lease::id) }
}

/// Checks that this is a regular file. The error says what it is instead.
fn check_regular(meta: &fs::Metadata) -> io::Result<()> {
    let kind = meta.file_type();
    let what = match () {
        () if kind.is_file() => return Ok(()),
        () if kind.is_dir() => "directory",
        () if kind.is_fifo() => "FIFO",
        () if kind.is_socket() => "socket",
        () => "device",
    };
    let text = format!("it is a {what} and not a regular file: remove it");
    Err(io::Error::new(ErrorKind::InvalidInput, text))
}

/// Reads a regular file, or the first `most` + 1 bytes of a larger one.
///
/// To open a FIFO would wait for its writer, to open a device may have an effect, and to read one may never end. So the type of the
/// file is checked first. The file is opened without blocking, because it may be replaced after the check.
fn read_at_most(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    check_regular(&fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
    check_regular(&file.metadata()?)?;
    let mut content = Vec::new();
    file.take(most as u64 + 1).read_to_end(&mut content)?;
    Ok(content)
}

/// What was seen in a file.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) record: Record,
    /// The file is there, and the disk or the server of a network file system could not read it. So nothing is known about its lease.
    pub(super) has_failed: bool,
}

impl Look {
    /// Returns the record.
    ///
    /// # Errors
    /// Nothing is known about it, because the disk failed.
    pub(super) fn known(self) -> Result<Record, Error> {
        match &self.record.lease {
            Err(reason) if self.has_failed => Err(Error::Unavailable { what: reason.to_string(), source: None }),
            _ => Ok(self.record),
        }
    }
}

/// Why a file is not a lease.
#[derive(Debug, thiserror::Error)]
enum BadFile {
    #[error("file {}{SUFFIX} is not named after a subnet", Shown(.0))]
    Name(Id),
    #[error(transparent)]
    Value(#[from] BadAttrs),
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
}

fn parse(id: &Id, value: &[u8]) -> Result<Lease, BadFile> {
    let subnets = Subnets::from_key(id).ok_or_else(|| BadFile::Name(id.clone()))?;
    let attrs = Attrs::from_wire(value)?;
    let created = serde_json::from_slice::<Created>(value).ok().and_then(|file| file.created);
    // A lease of unknown age counts as the youngest, so that it does not push an older one aside.
    let age = match created {
        Some(stamp) => Age { stamp, tie: Arc::default() },
        None => Age { stamp: u64::MAX, tie: id.clone() },
    };
    Ok(Lease { id: id.clone(), subnets, attrs, age })
}

impl Files {
    pub(super) fn new(path: PathBuf) -> Files {
        let subnets = path.join("subnets");
        Files { path, subnets, made: AtomicBool::new(false), turn: Arc::new(Semaphore::new(1)) }
    }

    /// Runs `work` on a thread where it may block. Work that has begun is completed even if the returned future is dropped.
    ///
    /// # Errors
    /// The error of `work`, or [`Error::Unavailable`] if the file system does not answer in time.
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
        let place = self.config_file().display().to_string();
        let remedy = format!("write it, for example: echo '{EXAMPLE}' >{place}");
        Error::NoNetConf { place, remedy }
    }

    /// Creates the directory at the first use.
    pub(super) fn make(&self) -> Result<(), Error> {
        if !self.made.load(Ordering::Relaxed) {
            let made = DirBuilder::new().recursive(true).mode(0o755).create(&self.subnets);
            made.map_err(|error| failed("create", &self.subnets, error))?;
            self.made.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Takes the lock, which is held until the result is dropped. Waits for other processes, at most 5 s.
    pub(super) async fn lock(self: &Arc<Files>) -> Result<Flock<File>, Error> {
        let path = self.path.join(".lock");
        let at = path.clone();
        let open = move |files: &Files| {
            files.make()?;
            let there = match fs::metadata(&at) {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
                meta => meta.and_then(|meta| check_regular(&meta)),
            };
            let mut options = OpenOptions::new();
            options.create(true).truncate(false).write(true).custom_flags(O_NONBLOCK | O_NOFOLLOW);
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
            sleep(jitter(LOCK_EVERY)).await;
        }
    }

    /// Reads net-conf. Returns `None` if there is none.
    pub(super) fn config(&self) -> Result<Option<String>, Error> {
        self.make()?;
        let path = self.config_file();
        match read_at_most(&path, MAX_NET_CONF_BYTES) {
            Ok(value) => Ok(Some(net_conf_text(&value))),
            Err(error) if error.kind() == ErrorKind::NotFound && self.subnets.is_dir() => Ok(None),
            Err(error) => Err(failed("read", &path, error)),
        }
    }

    /// Reads one record. Returns `None` if there is no such file. A file whose content is no lease is an unreadable record.
    ///
    /// # Errors
    /// The disk failed, so nothing is known about the lease.
    pub(super) fn read(&self, id: &str) -> Result<Option<Record>, Error> {
        self.look(id).map(Look::known).transpose()
    }

    /// Reads one record, and says whether the disk failed. A file that cannot be read is an unreadable record then, because it says nothing
    /// about the others.
    pub(super) fn look(&self, id: &str) -> Option<Look> {
        let (path, id) = (self.file(id), Id::from(id));
        let (lease, has_failed) = match read_at_most(&path, MAX_VALUE_BYTES) {
            Ok(value) => (parse(&id, &value), false),
            Err(error) if error.kind() == ErrorKind::NotFound => return None,
            Err(source) => {
                let has_failed = source.kind() != ErrorKind::InvalidInput;
                (Err(BadFile::Read { path, source }), has_failed)
            }
        };
        Some(Look { record: Record::new(id, lease), has_failed })
    }

    /// Reads all records, sorted by id.
    ///
    /// # Errors
    /// The directory cannot be listed.
    pub(super) fn scan(&self) -> Result<Vec<Record>, Error> {
        Ok(self.look_at_all()?.into_iter().map(|look| look.record).collect())
    }

    /// Reads all records as [`Files::scan`] does, and says for each whether the disk failed.
    ///
    /// # Errors
    /// As [`Files::scan`].
    pub(super) fn look_at_all(&self) -> Result<Vec<Look>, Error> {
        self.make()?;
        let entries = fs::read_dir(&self.subnets).map_err(|error| failed("list", &self.subnets, error))?;
        let mut looks = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| failed("list", &self.subnets, error))?;
            let Some(id) = id(&entry.file_name().to_string_lossy()) else { continue };
            looks.extend(self.look(&id));
        }
        looks.sort_by(|one, other| one.record.id.cmp(&other.record.id));
        Ok(looks)
    }

    /// Writes a lease to a temporary file.
    fn write_temporary(&self, attrs: &Attrs, created: u64) -> Result<NamedTempFile, Error> {
        let write = || -> std::io::Result<NamedTempFile> {
            let mut file = tempfile::Builder::new()
                .prefix(".lease-")
                .permissions(Permissions::from_mode(0o644))
                .tempfile_in(&self.subnets)?;
            write_lease(file.as_file_mut(), attrs, created)?;
            Ok(file)
        };
        write().map_err(|error| failed("write a lease in", &self.subnets, error))
    }

    /// Writes the directory to the disk, and reads the lease that was just written.
    fn read_back(&self, id: &str) -> Result<Lease, Error> {
        let synced = File::open(&self.subnets).and_then(|dir| dir.sync_all());
        synced.map_err(|error| failed("sync", &self.subnets, error))?;
        let lease = self.read(id)?.ok_or_else(|| self.missing(id))?.lease;
        lease.map_err(|reason| Error::Invalid(format!("{}: {reason}", self.file(id).display())))
    }

    /// Writes a new file.
    ///
    /// # Errors
    /// [`Error::Taken`] if the file exists already, because somebody created it without the lock.
    pub(super) fn create(&self, id: &str, attrs: &Attrs, created: u64) -> Result<Lease, Error> {
        match self.write_temporary(attrs, created)?.persist_noclobber(self.file(id)) {
            Ok(_) => self.read_back(id),
            Err(error) if error.error.kind() == ErrorKind::AlreadyExists => Err(Error::Taken {
                subnet: Subnets::from_key(id).unwrap_or_default(),
                owner: "a file that was put there meanwhile".to_owned(),
            }),
            Err(error) => Err(failed("create", &self.file(id), error.error)),
        }
    }

    /// Replaces a file.
    pub(super) fn replace(&self, id: &str, attrs: &Attrs, created: u64) -> Result<Lease, Error> {
        let persisted = self.write_temporary(attrs, created)?.persist(self.file(id));
        persisted.map_err(|error| failed("replace", &self.file(id), error.error))?;
        self.read_back(id)
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
    use std::pin::pin;
    use std::sync::mpsc;

    use tokio::runtime::Builder;
    use tokio::time::advance;

    use super::*;

    #[tokio::test]
    async fn a_file_system_that_hangs_does_not_block_the_thread_of_the_agent() {
        let files = Arc::new(Files::new(PathBuf::from("/nonexistent")));
        let (answer, hangs) = mpsc::channel();
        let hanging = files.work(move |_| hangs.recv().map_err(|error| Error::Invalid(error.to_string())));
        // This runs on the thread that waits for the work, and lets the work end.
        let elsewhere = async { answer.send("it answers again").unwrap() };
        let (done, ()) = tokio::join!(hanging, elsewhere);
        assert_eq!(done.unwrap(), "it answers again");
    }

    /// One of the two threads hangs, and the other one does what it is given in order. So when a task has ended that it was given last, it has
    /// also done all other work that may begin.
    #[test]
    fn work_that_hangs_is_given_up_and_no_other_work_begins_meanwhile() {
        let mut runtime = Builder::new_current_thread();
        runtime.enable_time().start_paused(true).max_blocking_threads(2);
        runtime.build().unwrap().block_on(async {
            let files = Arc::new(Files::new(PathBuf::from("/nonexistent")));
            let (answer, hangs) = mpsc::channel();
            let begun = Arc::new(AtomicBool::new(false));
            let other_work = || {
                let begins = Arc::clone(&begun);
                files.work(move |_| {
                    begins.store(true, Ordering::Relaxed);
                    Ok("as before")
                })
            };
            let task = || async { tokio::task::spawn_blocking(|| ()).await.unwrap() };
            let mut first = pin!(files.work(move |_| hangs.recv().map_err(|error| Error::Invalid(error.to_string()))));
            let mut second = pin!(other_work());
            tokio::select! {
                biased;
                _ = &mut first => panic!("the first one hangs"),
                _ = &mut second => panic!("the second one does not wait for its turn"),
                () = task() => {}
            }
            assert!(!begun.load(Ordering::Relaxed), "threads must not accumulate");
            // While a piece of work hangs, the clock moves on only here.
            advance(2 * LIMIT).await;
            for error in [first.await.unwrap_err(), second.await.unwrap_err()] {
                assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
                assert!(error.to_string().ends_with("no answer within 60 s: does its file system hang?"), "{error}");
            }
            let mut third = pin!(other_work());
            tokio::select! {
                biased;
                _ = &mut third => panic!("the work that was given up still hangs"),
                () = task() => {}
            }
            assert!(!begun.load(Ordering::Relaxed), "threads must not accumulate after the first one was given up");
            answer.send("it answers again").unwrap();
            assert_eq!(third.await.unwrap(), "as before");
        });
    }

    /// A tool that synchronises directories may put a file there without the lock.
    #[test]
    fn a_new_lease_does_not_replace_a_file_that_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::new(dir.path().into());
        files.make().unwrap();
        let of = |kind: &str| Attrs { backend_type: kind.into(), ..Attrs::default() };
        let theirs = files.create("10.5.1.0-24", &of("vxlan"), 7).unwrap();
        let error = files.create("10.5.1.0-24", &of("host-gw"), 8).unwrap_err();
        assert!(matches!(&error, Error::Taken { subnet, .. } if *subnet == theirs.subnets), "{error}");
        assert_eq!(files.read("10.5.1.0-24").unwrap().unwrap().lease, Ok(theirs));
        assert_eq!(fs::read_dir(files.subnets()).unwrap().count(), 1, "no temporary file is left");
    }

    /// A pipe takes the lease and cannot be synced, so it stands for a disk that cannot take it.
    #[test]
    fn a_lease_that_cannot_be_synced_is_an_error() {
        let (_reader, writer) = nix::unistd::pipe().unwrap();
        let error = write_lease(&mut File::from(writer), &Attrs::default(), 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }

    /// The directories of procfs can be opened, and cannot be synced.
    #[test]
    fn a_directory_that_cannot_be_synced_is_an_error() {
        let files = Files { subnets: PathBuf::from("/proc/self"), ..Files::new(PathBuf::from("/proc")) };
        let error = files.read_back("10.5.1.0-24").unwrap_err().to_string();
        assert!(error.contains("sync /proc/self"), "{error}");
    }
}
