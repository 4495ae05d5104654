// SPDX-License-Identifier: Apache-2.0
//! Files that others read: written aside, synced, renamed, so that no reader ever sees half of one; and a watch that notices when
//! somebody deletes or edits one.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until};

/// Makes the file say exactly this: mode 0644, its directory made with 0755 when missing. True when it was written,
/// false when it said so already.
pub fn write(path: &Path, contents: &[u8]) -> io::Result<bool> {
    match fs::read(path) {
        Ok(there) if there == contents => return Ok(false),
        _ => {}
    }
    replace(path, contents, 0o644)?;
    Ok(true)
}

/// Puts a new file with this content and mode in the place of whatever stands there; its directory is made with 0755 when missing.
pub fn replace(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    replace_with(path, mode, |file| file.write_all(contents))
}

/// The same, with what this writes; its error leaves everything as it was.
pub fn replace_with(path: &Path, mode: u32, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let dir = directory(path);
    make_directory(path)?;
    let mut aside = tempfile::Builder::new().prefix(".weft-").tempfile_in(dir)?;
    write(aside.as_file_mut())?;
    aside.as_file().set_permissions(Permissions::from_mode(mode))?;
    aside.as_file().sync_all()?;
    aside.persist(path).map_err(|failed| failed.error)?;
    // The rename itself is on disk only when the directory is.
    File::open(dir)?.sync_all()
}

/// Makes the directory of this file with 0755 when it is missing.
pub fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o755).create(directory(path))
}

/// What to do where even root may not write into a directory; empty for other errors.
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

/// A file is looked at so often without being told to: nothing is told of a directory further up that was moved, or mounted over.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// The same where inotify cannot be had.
const LOOK_BLIND: Duration = Duration::from_secs(1);

/// What tells one state of a file from another: inode, size, change time in seconds and nanoseconds.
type Look = Option<(u64, u64, i64, i64)>;

/// A watch of one file. inotify only says when to look; what counts is that the file is another than at the last look. So our own
/// writes are reported too: compare the content, it is cheap. A host may have no inotify instance left: then the file is looked at
/// every second until there is one.
pub struct FileWatch {
    path: PathBuf,
    inotify: Option<Told>,
    last: Look,
    /// inotify told of something since the last look.
    told: bool,
    /// The next look if nothing is told.
    due: Instant,
    /// That inotify cannot be had was said.
    said: bool,
}

/// An inotify instance, and what it watches.
struct Told {
    fd: AsyncFd<Watcher>,
    watched: Option<(WatchDescriptor, PathBuf)>,
}

impl FileWatch {
    /// Watches from now on; the file and its directory need not exist. Needs a tokio runtime.
    pub fn new(path: impl Into<PathBuf>) -> FileWatch {
        let mut watch =
            FileWatch { path: path.into(), inotify: None, last: None, told: false, due: Instant::now(), said: false };
        watch.arm();
        watch.looked();
        watch.last = look(&watch.path);
        watch
    }

    /// Returns when the file was deleted, edited, replaced or created since the last return. Cancel-safe.
    pub async fn changed(&mut self) {
        loop {
            if self.told || self.due <= Instant::now() {
                // Armed before the look, so that nothing falls between them.
                let elsewhere = self.arm();
                let now = look(&self.path);
                self.looked();
                // Written and gone with its directory since the last look: it looks as before.
                if now != self.last || elsewhere {
                    self.last = now;
                    return;
                }
            }
            let told = tokio::select! {
                told = next(&mut self.inotify) => told,
                () = sleep_until(self.due) => continue,
            };
            match told {
                Ok(told) => self.told |= told,
                Err(error) => self.blind(&error),
            }
        }
    }

    fn looked(&mut self) {
        let pause = if self.inotify.is_some() { LOOK_EVERY } else { LOOK_BLIND };
        (self.told, self.due) = (false, Instant::now() + pause);
    }

    /// Watches with inotify, where it can be had. True: another directory than before.
    fn arm(&mut self) -> bool {
        let armed = match self.inotify.take() {
            Some(told) => Ok(told),
            None => Told::new(),
        };
        let armed = armed.and_then(|mut told| told.arm(&self.path).map(|elsewhere| (told, elsewhere)));
        match armed {
            Ok((told, elsewhere)) => {
                if std::mem::take(&mut self.said) {
                    tracing::info!(file = %self.path.display(), "watched by inotify again");
                }
                self.inotify = Some(told);
                elsewhere
            }
            Err(error) => {
                self.blind(&error);
                false
            }
        }
    }

    /// Goes on without inotify.
    fn blind(&mut self, error: &io::Error) {
        self.inotify = None;
        self.due = self.due.min(Instant::now() + LOOK_BLIND);
        if !std::mem::replace(&mut self.said, true) {
            let file = self.path.display();
            tracing::warn!(
                "watch {file}: {error}: the agent checks it every second instead; raise fs.inotify.max_user_instances"
            );
        }
    }
}

/// Waits for inotify; never ends without it. True: something happened.
async fn next(inotify: &mut Option<Told>) -> io::Result<bool> {
    let Some(told) = inotify else { return std::future::pending().await };
    let mut ready = told.fd.readable().await?;
    match ready.get_inner().0.read_events() {
        // A watched directory that goes away takes its watch along: forget it, so that it is set anew.
        Ok(events) => {
            let watched = told.watched.as_ref().map(|(descriptor, _)| *descriptor);
            if events.iter().any(|event| event.mask.intersects(gone()) && Some(event.wd) == watched) {
                told.watched = None;
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

impl Told {
    fn new() -> io::Result<Told> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        // Its successor is `unsafe`; the promise it asks for (one descriptor, open as long as its owner lives) is what Inotify keeps.
        #[allow(deprecated)]
        let fd = AsyncFd::with_interest(Watcher(inotify), Interest::READABLE)?;
        Ok(Told { fd, watched: None })
    }

    /// Watches the file's directory, or the nearest one above it that exists. True: another than before.
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
                    // A directory further down may have been made in between.
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

/// The element of `path` right below its ancestor `dir`.
fn next_below(dir: &Path, path: &Path) -> PathBuf {
    let rest = path.strip_prefix(dir).unwrap_or(path);
    rest.components().next().map_or_else(|| path.to_owned(), |first| dir.join(first))
}

fn gone() -> AddWatchFlags {
    AddWatchFlags::IN_IGNORED | AddWatchFlags::IN_DELETE_SELF | AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_UNMOUNT
}

fn look(path: &Path) -> Look {
    let meta = fs::metadata(path).ok()?;
    Some((meta.ino(), meta.size(), meta.ctime(), meta.ctime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_once_with_mode_and_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/flannel/subnet.env");
        assert!(write(&path, b"A=1\n").unwrap());
        assert!(!write(&path, b"A=1\n").unwrap(), "equal is not written");
        assert!(write(&path, b"A=2\n").unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"A=2\n");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
        let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no temporary file stays behind");
    }

    #[tokio::test]
    async fn the_watch_sees_every_kind_of_change() {
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
        assert!(quiet.is_err(), "another file is not ours");
    }

    #[tokio::test(start_paused = true)]
    async fn what_nothing_tells_of_is_seen_all_the_same() {
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
        assert!(watch.due <= Instant::now() + LOOK_EVERY);
    }

    #[tokio::test]
    async fn a_file_that_came_back_and_went_with_its_directory_has_changed() {
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
        changed.expect("it is not there, as at the last look, but was written between");
    }

    /// Tells a test that it runs in a user namespace of its own, whose limits are its own.
    const LIMITED: &str = "WEFT_TEST_LIMITED";

    #[test]
    fn without_an_inotify_instance_the_file_is_looked_at_all_the_same() {
        #[allow(clippy::disallowed_methods, reason = "a word from the parent to this very test")]
        if std::env::var(LIMITED).is_err() {
            let this = "files::tests::without_an_inotify_instance_the_file_is_looked_at_all_the_same";
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
            tokio::time::timeout(limit, again).await.expect("it watches again once it can");
        });
    }
}
