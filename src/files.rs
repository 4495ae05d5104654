// SPDX-License-Identifier: Apache-2.0
//! Files that other programs read or edit. A file is written under a temporary name, synced and renamed, so that no reader sees a part of
//! it. [`FileWatch`] notices when another program deletes or edits a file.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};
use weft_subnet::outside::{self, FileStep, is_simulated};

/// Maximum size of a file that [`read`] accepts, in bytes. The files in question have a few lines.
const MAX_SIZE: u64 = 1 << 20;

/// Opens a file for reading, without waiting for another program. Opening a FIFO would wait for its writer, so only a regular file is
/// accepted.
///
/// # Errors
/// The file cannot be opened, or it is not a regular file.
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).custom_flags(OFlag::O_NONBLOCK.bits() | OFlag::O_NOCTTY.bits()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file: remove it")) }
}

/// Reads a small file, as [`open`] opens it.
///
/// # Errors
/// The file cannot be opened or read, or it is larger than 1 MiB.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut contents = Vec::new();
    open(path)?.take(MAX_SIZE + 1).read_to_end(&mut contents)?;
    if contents.len() as u64 > MAX_SIZE {
        return Err(io::Error::other("it is larger than 1 MiB: remove it"));
    }
    Ok(contents)
}

/// As [`read`], for a file of text.
///
/// # Errors
/// The file cannot be read, or its contents are not UTF-8.
pub fn read_text(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|_| io::Error::other("it is not UTF-8"))
}

/// Writes `contents` into the file, unless it has these contents already. The file gets the mode 0644, and a missing directory is made
/// with the mode 0755. Returns true if the file was written.
///
/// # Errors
/// The directory or the file cannot be written.
pub fn write(path: &Path, contents: &[u8]) -> io::Result<bool> {
    if read(path).is_ok_and(|present| present == contents) {
        return Ok(false);
    }
    replace(path, contents, 0o644)?;
    Ok(true)
}

/// Replaces the file with a new one that has these contents and this mode. A missing directory is made with the mode 0755. A reader sees
/// either the old file or the whole new one, also after a power cut.
///
/// # Errors
/// The directory or the file cannot be written.
pub fn replace(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    replace_with(path, mode, |file| file.write_all(contents))
}

/// As [`replace`], with the contents that `write` writes into a temporary file.
///
/// # Errors
/// The directory or the file cannot be written, or `write` fails. Then the old file stays.
pub fn replace_with(path: &Path, mode: u32, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let dir = directory(path);
    outside::file_step(FileStep::Begin(path))?;
    make_directory(path)?;
    let mut temporary = tempfile::Builder::new().prefix(".weft-").tempfile_in(dir)?;
    write(temporary.as_file_mut())?;
    temporary.as_file().set_permissions(Permissions::from_mode(mode))?;
    temporary.as_file().sync_all()?;
    outside::file_step(FileStep::Synced(temporary.as_file()))?;
    temporary.persist(path).map_err(|failed| failed.error)?;
    // The rename survives a power cut only if the directory was synced.
    sync_directory(path)
}

/// Syncs the names in the directory of this file.
///
/// # Errors
/// The directory cannot be opened or synced.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    let dir = directory(path);
    File::open(dir)?.sync_all()?;
    outside::file_step(FileStep::DirectorySynced(dir))
}

/// Makes the directory of this file with the mode 0755, if it is missing.
///
/// # Errors
/// The directory cannot be made.
pub fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(directory(path))
}

/// Runs a function that reads or writes files in another thread, because a disk may hang. In the simulator it runs in this thread, after the time
/// that a write takes there.
pub fn beside<T: Send + 'static>(function: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    if !is_simulated() {
        return tokio::task::spawn_blocking(function);
    }
    let time = outside::write_time();
    task(async move {
        if !time.is_zero() {
            sleep(time).await;
        }
        outside::beside(function)
    })
}

/// Starts a task that waits for files. In the simulator it ends with its agent, as the threads of a process do.
pub fn task<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    if is_simulated() { tokio::task::spawn_local(future) } else { tokio::spawn(future) }
}

/// Returns what an operator can do if root may not write into a directory. The text is empty for other errors.
pub fn remedy(error: &io::Error, dir: &Path) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            format!(
                " (another user than root owns it: chown root {}, or give the container DAC_OVERRIDE)",
                dir.display()
            )
        }
        _ => String::new(),
    }
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

struct Watcher(Inotify);

impl AsRawFd for Watcher {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// The file is checked after this time even if inotify reported nothing, because inotify does not report that a directory further up was
/// moved, or that a file system was mounted over it.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// The same interval while inotify does not work.
const CHECK_INTERVAL_WITHOUT_INOTIFY: Duration = Duration::from_secs(1);

/// Identifies one state of a file: its inode, its size, and the time of the last change in seconds and nanoseconds. `None` means that
/// there is no file.
type FileState = Option<(u64, u64, i64, i64)>;

/// Watches one file. inotify only says when to check: a change is reported if the state of the file differs from the last one. Writes of
/// this process are reported as well. If the host has no inotify instance left, the file is checked every second.
pub struct FileWatch {
    path: PathBuf,
    inotify: Option<DirectoryWatch>,
    last: FileState,
    /// inotify has reported something since the last check.
    notified: bool,
    /// The time of the next check if inotify reports nothing.
    due: Instant,
    /// A warning was logged that inotify does not work.
    warned: bool,
}

/// An inotify instance, and the directory that it watches.
struct DirectoryWatch {
    fd: AsyncFd<Watcher>,
    watched: Option<(WatchDescriptor, PathBuf)>,
}

impl FileWatch {
    /// Begins to watch. The file and its directory need not exist.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub fn new(path: impl Into<PathBuf>) -> FileWatch {
        let mut watch = FileWatch {
            path: path.into(),
            inotify: None,
            last: None,
            notified: false,
            due: Instant::now(),
            warned: false,
        };
        watch.arm();
        watch.schedule_check();
        watch.last = state(&watch.path);
        watch
    }

    /// Waits until the file was deleted, edited, replaced or created since this function returned last. This is cancel-safe.
    pub async fn changed(&mut self) {
        loop {
            if self.notified || self.due <= Instant::now() {
                // The watch is set before the check, so that no change between them is lost.
                let moved = self.arm();
                let now = state(&self.path);
                self.schedule_check();
                // The file may have been written and then removed with its directory. Then its state is the same as before.
                if now != self.last || moved {
                    self.last = now;
                    return;
                }
            }
            let notified = tokio::select! {
                notified = next(&mut self.inotify) => notified,
                () = sleep_until(self.due) => continue,
            };
            match notified {
                Ok(notified) => self.notified |= notified,
                Err(error) => self.go_on_without_inotify(&error),
            }
        }
    }

    fn schedule_check(&mut self) {
        let pause =
            if self.inotify.is_some() || is_simulated() { CHECK_INTERVAL } else { CHECK_INTERVAL_WITHOUT_INOTIFY };
        (self.notified, self.due) = (false, Instant::now() + pause);
    }

    /// Sets the watch of inotify. Returns true if it watches another directory than before.
    fn arm(&mut self) -> bool {
        if is_simulated() {
            return false;
        }
        let armed = match self.inotify.take() {
            Some(inotify) => Ok(inotify),
            None => DirectoryWatch::new(),
        };
        let armed = armed.and_then(|mut inotify| inotify.arm(&self.path).map(|moved| (inotify, moved)));
        match armed {
            Ok((inotify, moved)) => {
                if std::mem::take(&mut self.warned) {
                    tracing::info!(file = %self.path.display(), "watched by inotify again");
                }
                self.inotify = Some(inotify);
                moved
            }
            Err(error) => {
                self.go_on_without_inotify(&error);
                false
            }
        }
    }

    fn go_on_without_inotify(&mut self, error: &io::Error) {
        self.inotify = None;
        self.due = self.due.min(Instant::now() + CHECK_INTERVAL_WITHOUT_INOTIFY);
        if !std::mem::replace(&mut self.warned, true) {
            let file = self.path.display();
            tracing::warn!(
                "watch {file}: {error}: the agent checks it every second instead; raise fs.inotify.max_user_instances"
            );
        }
    }
}

/// Waits for inotify, and waits forever without it. Returns true if inotify reported something.
async fn next(inotify: &mut Option<DirectoryWatch>) -> io::Result<bool> {
    let Some(inotify) = inotify else { return std::future::pending().await };
    let mut ready = inotify.fd.readable().await?;
    match ready.get_inner().0.read_events() {
        // If the watched directory is removed, so is the watch. It must be set again.
        Ok(events) => {
            let watched = inotify.watched.as_ref().map(|(descriptor, _)| *descriptor);
            if events.iter().any(|event| event.mask.intersects(gone()) && Some(event.wd) == watched) {
                inotify.watched = None;
            }
            Ok(true)
        }
        Err(Errno::EAGAIN) => {
            ready.clear_ready();
            Ok(false)
        }
        Err(Errno::EINTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

impl DirectoryWatch {
    fn new() -> io::Result<DirectoryWatch> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // The replacement is unsafe. Its precondition is true here: the Inotify owns one descriptor and keeps it open while it lives.
        #[allow(deprecated)]
        let fd = AsyncFd::with_interest(Watcher(inotify), Interest::READABLE)?;
        Ok(DirectoryWatch { fd, watched: None })
    }

    /// Watches the directory of the file, or the nearest directory above it that exists. Returns true if it is another one than before.
    fn arm(&mut self, path: &Path) -> io::Result<bool> {
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVE
            | AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_CLOSE_WRITE
            | AddWatchFlags::IN_ATTRIB
            | AddWatchFlags::IN_DELETE_SELF
            | AddWatchFlags::IN_MOVE_SELF
            | AddWatchFlags::IN_ONLYDIR;
        let mut dir = directory(path).to_owned();
        let before = self.watched.as_ref().map(|(descriptor, _)| *descriptor);
        loop {
            match self.fd.get_ref().0.add_watch(&dir, flags) {
                Ok(descriptor) => {
                    let old = self.watched.replace((descriptor, dir.clone()));
                    if let Some((old, _)) = old.filter(|(old, _)| *old != descriptor) {
                        let _ = self.fd.get_ref().0.rm_watch(old);
                    }
                    // A directory further down may have been made meanwhile.
                    if dir == directory(path) || !next_below(&dir, path).is_dir() {
                        return Ok(before != Some(descriptor));
                    }
                    dir = directory(path).to_owned();
                }
                Err(Errno::ENOENT | Errno::ENOTDIR) => match dir.parent() {
                    Some(up) if !up.as_os_str().is_empty() => dir = up.to_owned(),
                    _ => return Err(Errno::ENOENT.into()),
                },
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// Returns the ancestor of `path` that is directly in `dir`.
fn next_below(dir: &Path, path: &Path) -> PathBuf {
    let rest = path.strip_prefix(dir).unwrap_or(path);
    rest.components().next().map_or_else(|| path.to_owned(), |first| dir.join(first))
}

/// The events which mean that the watched directory is gone.
fn gone() -> AddWatchFlags {
    AddWatchFlags::IN_IGNORED | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_UNMOUNT
}

fn state(path: &Path) -> FileState {
    let meta = fs::metadata(path).ok()?;
    Some((meta.ino(), meta.size(), meta.ctime(), meta.ctime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_written_once_with_its_mode_and_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/flannel/subnet.env");
        assert!(write(&path, b"A=1\n").unwrap());
        assert!(!write(&path, b"A=1\n").unwrap(), "equal contents must not be written again");
        assert!(write(&path, b"A=2\n").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"A=2\n");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
        let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary file must be left behind");
    }

    /// Opening a FIFO for reading waits for a writer. The agent has one thread, so it would hang.
    #[test]
    fn a_file_that_is_not_regular_is_refused_at_once_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("subnet.env");
        let (send, receive) = std::sync::mpsc::channel();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
        let fifo = path.clone();
        std::thread::spawn(move || send.send((read(&fifo), write(&fifo, b"A=1\n"))));
        let (read_fifo, written) = receive.recv_timeout(Duration::from_secs(20)).expect("reading a FIFO must not wait");
        assert_eq!(read_fifo.unwrap_err().to_string(), "it is not a regular file: remove it");
        assert!(written.unwrap());
        assert_eq!(read(&path).unwrap(), b"A=1\n", "the FIFO must be replaced");
        assert_eq!(read(dir.path()).unwrap_err().to_string(), "it is not a regular file: remove it");
        fs::write(&path, vec![b'x'; MAX_SIZE as usize + 1]).unwrap();
        assert_eq!(read(&path).unwrap_err().to_string(), "it is larger than 1 MiB: remove it");
    }

    #[tokio::test]
    async fn the_watch_reports_every_kind_of_change() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("a/b");
        let path = home.join("subnet.env");
        let mut watch = FileWatch::new(&path);
        let seen = |what: &'static str| move |result: Result<(), _>| result.expect(what);
        let limit = Duration::from_secs(10);
        write(&path, b"A=1\n").unwrap();
        seen("created")(tokio::time::timeout(limit, watch.changed()).await);
        fs::write(&path, b"A=22\n").unwrap();
        seen("edited")(tokio::time::timeout(limit, watch.changed()).await);
        write(&path, b"A=3\n").unwrap();
        seen("replaced")(tokio::time::timeout(limit, watch.changed()).await);
        fs::remove_file(&path).unwrap();
        seen("deleted")(tokio::time::timeout(limit, watch.changed()).await);
        write(&path, b"A=4\n").unwrap();
        seen("again")(tokio::time::timeout(limit, watch.changed()).await);
        fs::remove_dir_all(dir.path().join("a")).unwrap();
        seen("directory removed")(tokio::time::timeout(limit, watch.changed()).await);
        write(&path, b"A=5\n").unwrap();
        seen("directory made again")(tokio::time::timeout(limit, watch.changed()).await);
        fs::write(home.join("other"), b"x").unwrap();
        let quiet = tokio::time::timeout(Duration::from_millis(50), watch.changed()).await;
        assert!(quiet.is_err(), "a change of another file must not be reported");
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_that_inotify_does_not_report_is_found_by_the_interval() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("run/flannel/subnet.env");
        fs::create_dir_all(home.path().join("run/flannel")).unwrap();
        fs::write(&path, "a").unwrap();
        let mut watch = FileWatch::new(&path);
        fs::rename(home.path().join("run"), home.path().join("gone")).unwrap();
        write(&path, b"b").unwrap();
        watch.changed().await;
        fs::remove_file(&path).unwrap();
        watch.changed().await;
        assert!(watch.due <= Instant::now() + CHECK_INTERVAL);
    }

    #[tokio::test]
    async fn a_file_that_was_made_and_removed_with_its_directory_is_reported() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("run/subnet.env");
        fs::create_dir(home.path().join("run")).unwrap();
        fs::write(&path, "a").unwrap();
        let mut watch = FileWatch::new(&path);
        fs::remove_file(&path).unwrap();
        watch.changed().await;
        fs::write(&path, "a").unwrap();
        fs::rename(home.path().join("run"), home.path().join("gone")).unwrap();
        let changed = tokio::time::timeout(Duration::from_secs(20), watch.changed()).await;
        changed.expect("the file was written, although its state is the same as at the last check");
    }

    /// Tells a test that it runs in its own user namespace, which has its own limits.
    const LIMITED: &str = "WEFT_TEST_LIMITED";

    #[test]
    fn without_an_inotify_instance_the_file_is_checked_every_second() {
        #[allow(clippy::disallowed_methods, reason = "the parent process sets it for this test")]
        if std::env::var(LIMITED).is_err() {
            let this = "files::tests::without_an_inotify_instance_the_file_is_checked_every_second";
            let mut unshare = std::process::Command::new("unshare");
            unshare.args(["--user", "--map-root-user"]).arg(std::env::current_exe().unwrap());
            let out = unshare.args(["--exact", this, "--nocapture"]).env(LIMITED, "1").output().unwrap();
            let said = String::from_utf8_lossy(&out.stdout);
            assert!(
                out.status.success() && said.contains("1 passed"),
                "{said}\n{}",
                String::from_utf8_lossy(&out.stderr)
            );
            return;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let instances = |free: &str| fs::write("/proc/sys/user/max_inotify_instances", free).unwrap();
            let limit = Duration::from_secs(20);
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("run/subnet.env");
            instances("0");
            let mut watch = FileWatch::new(&path);
            assert!(watch.inotify.is_none());
            for text in ["A=1\n", "A=2\n"] {
                write(&path, text.as_bytes()).unwrap();
                tokio::time::timeout(limit, watch.changed()).await.expect(text);
            }
            fs::remove_file(&path).unwrap();
            tokio::time::timeout(limit, watch.changed()).await.expect("deleted");
            instances("4");
            let again = async {
                while watch.inotify.is_none() {
                    watch.changed().await;
                }
            };
            tokio::time::timeout(limit, again).await.expect("it must use inotify again when that works");
        });
    }
}
