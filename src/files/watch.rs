// SPDX-License-Identifier: Apache-2.0
//! Notices when another program creates, edits or deletes a file.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};
use weft_subnet::outside::is_simulated;

use super::directory;
use crate::async_socket::wait_on;

/// An inotify instance as a file descriptor that the runtime can watch.
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

/// Identifies one state of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileState {
    inode: u64,
    size: u64,
    /// The time of the last change: seconds, and nanoseconds.
    changed: (i64, i64),
}

/// Watches one file. inotify only says when to check: a change is reported if the state of the file differs from the last one. Writes of
/// this process are reported as well. If the host has no inotify instance left, the file is checked every second.
pub struct FileWatch {
    path: PathBuf,
    inotify: Option<DirectoryWatch>,
    /// `None` means that there was no file.
    last: Option<FileState>,
    /// inotify has reported something since the last check.
    notified: bool,
    /// inotify has reported since the last check that the file was removed.
    removed: bool,
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
            removed: false,
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
                let removed = self.removed;
                self.schedule_check();
                // The file may have been written and then removed, alone or with its directory. Then its state is the same as before.
                if now != self.last || moved || removed {
                    self.last = now;
                    return;
                }
            }
            let notified = tokio::select! {
                notified = next(&mut self.inotify, self.path.file_name()) => notified,
                () = sleep_until(self.due) => continue,
            };
            match notified {
                Ok(Noticed::Nothing) => {}
                Ok(Noticed::Something { removed }) => {
                    self.notified = true;
                    self.removed |= removed;
                }
                Err(error) => self.go_on_without_inotify(&error),
            }
        }
    }

    fn schedule_check(&mut self) {
        let pause =
            if self.inotify.is_some() || is_simulated() { CHECK_INTERVAL } else { CHECK_INTERVAL_WITHOUT_INOTIFY };
        (self.notified, self.removed, self.due) = (false, false, Instant::now() + pause);
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
            let (file, remedy) = (self.path.display(), remedy(error));
            tracing::warn!("watch {file}: {error}: the agent checks it every second instead{remedy}");
        }
    }
}

/// Returns which limit of inotify was reached, as a remedy. The text is empty if the error has another cause.
fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EMFILE) => "; raise fs.inotify.max_user_instances",
        Some(Errno::ENOSPC) => "; raise fs.inotify.max_user_watches",
        _ => "",
    }
}

/// What inotify reported.
enum Noticed {
    Nothing,
    /// Something happened in the directory. `removed`: the file was deleted or got another name.
    Something {
        removed: bool,
    },
}

/// Waits for inotify, and waits forever without it. `name` is that of the file in the watched directory.
async fn next(inotify: &mut Option<DirectoryWatch>, name: Option<&OsStr>) -> io::Result<Noticed> {
    let Some(inotify) = inotify else { return std::future::pending().await };
    let mut ready = inotify.fd.readable().await?;
    match ready.get_inner().0.read_events() {
        // If the watched directory is removed, so is the watch. It must be set again.
        Ok(events) => {
            let watched = inotify.watched.as_ref().map(|(descriptor, _)| *descriptor);
            if events.iter().any(|event| event.mask.intersects(gone()) && Some(event.wd) == watched) {
                inotify.watched = None;
            }
            let removes = AddWatchFlags::IN_DELETE | AddWatchFlags::IN_MOVED_FROM;
            let removed = events.iter().any(|event| event.mask.intersects(removes) && event.name.as_deref() == name);
            Ok(Noticed::Something { removed })
        }
        Err(Errno::EAGAIN) => {
            ready.clear_ready();
            Ok(Noticed::Nothing)
        }
        Err(Errno::EINTR) => Ok(Noticed::Nothing),
        Err(errno) => Err(errno.into()),
    }
}

impl DirectoryWatch {
    fn new() -> io::Result<DirectoryWatch> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        Ok(DirectoryWatch { fd: wait_on(Watcher(inotify))?, watched: None })
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

/// Returns the events which mean that the watched directory is gone.
fn gone() -> AddWatchFlags {
    AddWatchFlags::IN_IGNORED | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_UNMOUNT
}

fn state(path: &Path) -> Option<FileState> {
    let meta = fs::metadata(path).ok()?;
    Some(FileState { inode: meta.ino(), size: meta.size(), changed: (meta.ctime(), meta.ctime_nsec()) })
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;
    use crate::files::write;

    #[tokio::test]
    async fn the_watch_reports_every_kind_of_change() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().join("a/b");
        let path = home.join("subnet.env");
        let mut watch = FileWatch::new(&path);
        let seen = |what: &'static str| move |result: Result<(), _>| result.expect(what);
        let limit = Duration::from_secs(10);
        write(&path, b"A=1\n").unwrap();
        seen("created")(timeout(limit, watch.changed()).await);
        fs::write(&path, b"A=22\n").unwrap();
        seen("edited")(timeout(limit, watch.changed()).await);
        write(&path, b"A=3\n").unwrap();
        seen("replaced")(timeout(limit, watch.changed()).await);
        fs::remove_file(&path).unwrap();
        seen("deleted")(timeout(limit, watch.changed()).await);
        write(&path, b"A=4\n").unwrap();
        seen("again")(timeout(limit, watch.changed()).await);
        fs::remove_dir_all(dir.path().join("a")).unwrap();
        seen("directory removed")(timeout(limit, watch.changed()).await);
        write(&path, b"A=5\n").unwrap();
        seen("directory made again")(timeout(limit, watch.changed()).await);
        fs::write(home.join("other"), b"x").unwrap();
        fs::remove_file(home.join("other")).unwrap();
        let quiet = timeout(Duration::from_millis(50), watch.changed()).await;
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
        timeout(CHECK_INTERVAL * 2, watch.changed()).await.expect("the new file");
        fs::remove_file(&path).unwrap();
        timeout(CHECK_INTERVAL * 2, watch.changed()).await.expect("the removal of the file");
        assert!(watch.due <= Instant::now() + CHECK_INTERVAL);
    }

    /// The agent wrote the file, and somebody removed it before the agent noticed its own write.
    #[tokio::test]
    async fn a_file_that_was_made_and_removed_is_reported() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("subnet.env");
        let mut watch = FileWatch::new(&path);
        write(&path, b"a").unwrap();
        fs::remove_file(&path).unwrap();
        let changed = timeout(Duration::from_secs(20), watch.changed()).await;
        changed.expect("the file was removed, although there was none at the last check");
    }

    #[tokio::test]
    async fn a_file_that_was_made_and_removed_with_its_directory_is_reported() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("run/subnet.env");
        fs::create_dir(home.path().join("run")).unwrap();
        fs::write(&path, "a").unwrap();
        let mut watch = FileWatch::new(&path);
        fs::remove_file(&path).unwrap();
        timeout(Duration::from_secs(20), watch.changed()).await.expect("the removal of the file");
        fs::write(&path, "a").unwrap();
        fs::rename(home.path().join("run"), home.path().join("gone")).unwrap();
        let changed = timeout(Duration::from_secs(20), watch.changed()).await;
        changed.expect("the file was written, although its state is the same as at the last check");
    }

    #[test]
    fn only_a_limit_of_inotify_has_a_remedy() {
        let of = |errno: Errno| remedy(&errno.into());
        assert!(of(Errno::EMFILE).ends_with("max_user_instances"));
        assert!(of(Errno::ENOSPC).ends_with("max_user_watches"), "\"no space left\" does not mean the disk");
        assert_eq!(of(Errno::EACCES), "");
    }

    /// Tells a test that it runs in its own user namespace, which has its own limits.
    const LIMITED: &str = "WEFT_TEST_LIMITED";

    #[test]
    fn without_an_inotify_instance_the_file_is_checked_every_second() {
        #[allow(clippy::disallowed_methods, reason = "the parent process sets it for this test")]
        if std::env::var(LIMITED).is_err() {
            let this = "files::watch::tests::without_an_inotify_instance_the_file_is_checked_every_second";
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
                timeout(limit, watch.changed()).await.expect(text);
            }
            fs::remove_file(&path).unwrap();
            timeout(limit, watch.changed()).await.expect("deleted");
            instances("4");
            let again = async {
                while watch.inotify.is_none() {
                    watch.changed().await;
                }
            };
            timeout(limit, again).await.expect("it must use inotify again when that works");
        });
    }
}
