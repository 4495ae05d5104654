// SPDX-License-Identifier: Apache-2.0
//! Saved peers: a file with the last answer of the store. A start while the store is away reads it, and the agent writes it now and then
//! while the store answers.
//!
//! Another thread writes the file, because the disk may hang. The loop only copies a pointer to each lease for it. There is never more than
//! one such thread.

use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;
use weft_subnet::lease::Lease;
use weft_subnet::peers::Peers;
use weft_subnet::saved_peers::{self, BadSavedPeers, Head, Saved};
use weft_subnet::source::Source;

use crate::files;
use crate::instance;

/// Minimum time between two writes.
const EVERY: Duration = Duration::from_secs(30);
/// The file is written again after this time although nothing changed, because it says when the store answered last. This is a quarter of
/// the age up to which a start uses the file (`src/lease/acquire/resume.rs`).
const REFRESH: Duration = Duration::from_secs(6 * 3600);
/// How long the loop waits for the removal of the file. If the disk hangs, the removal goes on afterwards.
const REMOVE_LIMIT: Duration = Duration::from_secs(2);
/// While a write lasts, the next one is tried again after this time.
const BUSY: Duration = Duration::from_secs(1);

/// Why saved peers cannot be read. The display is a sentence for the log.
#[derive(Debug, thiserror::Error)]
#[error("saved peers: {}: {cause}", file.display())]
pub struct SavedFileError {
    file: PathBuf,
    cause: Cause,
}

#[derive(Debug, thiserror::Error)]
#[error(transparent)]
enum Cause {
    Io(io::Error),
    Contents(BadSavedPeers),
}

/// The file of an instance, and the store to which it must belong.
#[derive(Debug, Clone)]
pub struct SavedFile {
    file: PathBuf,
    store: String,
}

impl SavedFile {
    /// Returns the file of the instance with this subnet file. Returns `None` if `state_dir` is not set, or if the store has no identity
    /// because its leases are on the local disk anyway.
    pub fn new(state_dir: Option<&Path>, subnet_file: &Path, store: Option<String>) -> Option<SavedFile> {
        Some(SavedFile { file: file(state_dir?, subnet_file), store: store? })
    }

    /// Does the same as [`SavedFile::new`], and asks the store for its identity.
    pub async fn of(store: &dyn Source, state_dir: Option<&Path>, subnet_file: &Path) -> Option<SavedFile> {
        SavedFile::new(state_dir, subnet_file, store.fingerprint().await)
    }

    /// Reads the saved peers. Returns `None` if there is no file.
    ///
    /// # Errors
    /// The file cannot be read, it is damaged, or it belongs to another store.
    pub fn read(&self) -> Result<Option<Saved>, SavedFileError> {
        let failed = |cause| SavedFileError { file: self.file.clone(), cause };
        match self.contents() {
            Ok(text) => saved_peers::read(&text, &self.store).map(Some).map_err(|error| failed(Cause::Contents(error))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed(Cause::Io(error))),
        }
    }

    /// Reads what was saved besides the peers. Returns `None` if there is no usable file.
    pub fn read_head(&self) -> Option<Head> {
        saved_peers::read_head(&self.contents().ok()?, &self.store).ok()
    }

    fn contents(&self) -> io::Result<Vec<u8>> {
        let mut contents = Vec::new();
        files::open(&self.file)?.read_to_end(&mut contents)?;
        Ok(contents)
    }

    /// Returns the path of the file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the fingerprint of the store.
    pub fn store(&self) -> &str {
        &self.store
    }
}

/// Returns the path of the file of an instance.
pub fn file(state_dir: &Path, subnet_file: &Path) -> PathBuf {
    instance::state_file(state_dir, "peers", subnet_file)
}

/// Removes the file of an instance, if there is one.
///
/// # Errors
/// The file cannot be removed.
pub fn remove(state_dir: &Path, subnet_file: &Path) -> io::Result<()> {
    files::remove(&file(state_dir, subnet_file))
}

/// Writes the file when that is due.
#[derive(Debug, Default)]
pub struct Saver {
    saved_file: Option<SavedFile>,
    /// The state changed since the last write began.
    changed: bool,
    not_before: Option<Instant>,
    /// The write or the removal that was started last.
    task: Option<JoinHandle<()>>,
    /// A write goes on only while this value exists.
    wanted: Arc<()>,
    /// The last write failed, which was logged. It is tried again even if nothing changes.
    failing: Arc<AtomicBool>,
}

impl Saver {
    /// Returns a saver that has nothing to write yet. Without a file it never writes.
    pub fn new(saved_file: Option<SavedFile>) -> Saver {
        Saver { saved_file, ..Saver::default() }
    }

    /// Takes notice that peers, net-conf or the own lease changed.
    pub fn changed(&mut self) {
        self.changed = self.saved_file.is_some();
    }

    /// Takes notice of a change that is to be written at once, even if the last write was a moment ago.
    pub fn changed_now(&mut self) {
        self.changed();
        self.not_before = None;
    }

    /// Returns true if the last write was long ago.
    pub fn is_old(&self, now: Instant) -> bool {
        self.not_before.is_some_and(|at| at + REFRESH <= now)
    }

    /// Returns the time at which [`Saver::save`] has something to do.
    pub fn next(&self, now: Instant) -> Option<Instant> {
        self.must_write().then(|| self.not_before.unwrap_or(now))
    }

    fn must_write(&self) -> bool {
        self.changed || self.failing.load(Ordering::Relaxed)
    }

    /// Removes the file, because what it says is no longer true. A write that has begun is given up, so that it does not bring the file
    /// back. Returns when the file is gone, or after two seconds. Then the removal goes on, and there is a line in the log.
    pub async fn forget(&mut self) {
        let Some(saved_file) = &self.saved_file else { return };
        self.wanted = Arc::default();
        let (before, file) = (self.task.take(), saved_file.file.clone());
        let mut removal = files::task(async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            let path = file.clone();
            let removed = files::spawn_blocking(move || files::remove(&path)).await.map_err(io::Error::other);
            if let Err(error) = removed.flatten() {
                tracing::error!(
                    "saved peers: remove {}: {error}; it names a lease that is lost: remove it by hand",
                    file.display()
                );
            }
        });
        if tokio::time::timeout(REMOVE_LIMIT, &mut removal).await.is_err() {
            let file = saved_file.file.display();
            tracing::error!(
                "saved peers: {file} is not removed yet: does its disk hang? It names a lease that is lost"
            );
            self.task = Some(removal);
        }
    }

    /// Starts a write if one is due and none is running.
    pub fn save(&mut self, now: Instant, peers: &Peers, head: impl FnOnce(&SavedFile) -> Head) {
        let Some(saved_file) = &self.saved_file else { return };
        if !self.must_write() || self.not_before.is_some_and(|at| now < at) {
            return;
        }
        if self.task.as_ref().is_some_and(|task| !task.is_finished()) {
            self.not_before = Some(now + BUSY);
            return;
        }
        (self.changed, self.not_before) = (false, Some(now + EVERY));
        let (file, head) = (saved_file.file.clone(), head(saved_file));
        let leases: Vec<Arc<Lease>> = peers.believed_unordered().cloned().collect();
        let (wanted, failing) = (Arc::downgrade(&self.wanted), self.failing.clone());
        self.task = Some(files::spawn_blocking(move || {
            let written = write(&file, &head, leases, &wanted);
            log_result(&file, written, &failing);
        }));
    }
}

/// Writes the file.
///
/// # Errors
/// The file cannot be written. The error is `Interrupted` if `wanted` is gone; then the old file stays.
fn write(file: &Path, head: &Head, leases: Vec<Arc<Lease>>, wanted: &Weak<()>) -> io::Result<()> {
    files::replace_with(file, 0o600, |temporary| {
        saved_peers::write(temporary, head, leases.iter().map(|lease| &**lease))?;
        // The leases are not needed while the thread waits for the sync.
        drop(leases);
        if wanted.strong_count() == 0 { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    })
}

fn log_result(file: &Path, written: io::Result<()>, failing: &AtomicBool) {
    match written {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            tracing::debug!("peers not saved: no longer wanted")
        }
        Ok(()) if failing.swap(false, Ordering::Relaxed) => {
            tracing::info!(file = %file.display(), "peers are saved again");
        }
        Ok(()) => tracing::debug!(file = %file.display(), "peers saved"),
        Err(error) if !failing.swap(true, Ordering::Relaxed) => {
            let file = file.display();
            tracing::warn!(
                "save peers: write {file}: {error}; a start while the store is away will wait for it (--state-dir)"
            );
        }
        Err(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use weft_subnet::attrs::Attrs;
    use weft_subnet::cidr::Subnets;
    use weft_subnet::lease::{Age, Record};
    use weft_subnet::peers::Us;

    use super::*;

    fn lease(number: u32) -> Lease {
        let key = format!("10.{}.{}.0-24", number / 256, number % 256);
        let attrs = Attrs { public_ip: Some((0xc0a8_0000 + number).into()), ..Attrs::default() };
        let subnets = Subnets::from_key(&key).unwrap();
        Lease { id: key.into(), subnets, attrs, age: Age { stamp: 1, tie: "".into() } }
    }

    fn peers(count: u32) -> Peers {
        let networks = Subnets::from_key("10.0.0.0-8").unwrap();
        let mut peers = Peers::new(Us { networks, ..Us::default() });
        for number in 1..=count {
            let lease = lease(number);
            peers.put(Record { id: lease.id.clone(), lease: Ok(lease) });
        }
        assert_eq!(peers.len(), count as usize);
        peers
    }

    fn head(saved_file: &SavedFile) -> Head {
        let (public, chosen) = ((Some([192, 168, 0, 0].into()), None), [None, None]);
        let (saved, expires) = (0, saved_peers::Expiry::Never);
        Head {
            store: saved_file.store().into(),
            saved,
            expires,
            config: "{}".into(),
            own: lease(0),
            public,
            chosen,
            uplink: None,
            clear_text: None,
            earlier: Vec::new(),
            sends_earlier: false,
        }
    }

    fn saved_file(state_dir: &Path) -> SavedFile {
        SavedFile::new(Some(state_dir), Path::new("/run/x/subnet.env"), Some("etcd x".into())).unwrap()
    }

    /// Starts the write that is due, and waits until it is done.
    async fn save(saver: &mut Saver, now: Instant, peers: &Peers) {
        saver.save(now, peers, head);
        saver.task.take().expect("a write must be due").await.unwrap();
    }

    fn count(saved_file: &SavedFile) -> Option<usize> {
        saved_file.read().unwrap().map(|saved| saved.peers.len())
    }

    #[tokio::test]
    async fn all_peers_are_saved_at_most_every_thirty_seconds() {
        let dir = tempfile::tempdir().unwrap();
        let saved_file = saved_file(&dir.path().join("made/when/missing"));
        let (mut saver, now) = (Saver::new(Some(saved_file.clone())), Instant::now());
        assert_eq!(saver.next(now), None);
        assert_eq!(count(&saved_file), None);
        saver.changed();
        assert_eq!(saver.next(now), Some(now), "the first write is due at once");
        save(&mut saver, now, &peers(300)).await;
        assert_eq!(count(&saved_file), Some(300));
        saver.changed();
        assert_eq!(saver.next(now), Some(now + EVERY));
        saver.save(now, &peers(301), head);
        assert!(saver.task.is_none(), "the second write is not due yet");
        save(&mut saver, now + EVERY, &peers(301)).await;
        assert_eq!(count(&saved_file), Some(301));
        assert_eq!(saver.next(now), None, "nothing changed since");
        assert!(!saver.is_old(now + REFRESH) && saver.is_old(now + 2 * EVERY + REFRESH));
        std::fs::write(saved_file.file(), "damaged").unwrap();
        let reason = saved_file.read().unwrap_err().to_string();
        assert!(reason.starts_with("saved peers: ") && reason.ends_with(": it is damaged"), "{reason}");
    }

    #[tokio::test]
    async fn a_write_that_failed_is_tried_again_although_nothing_changed() {
        let dir = tempfile::tempdir().unwrap();
        let not_a_directory = dir.path().join("state");
        std::fs::write(&not_a_directory, "").unwrap();
        let saved_file = saved_file(&not_a_directory);
        let (mut saver, now) = (Saver::new(Some(saved_file.clone())), Instant::now());
        saver.changed();
        save(&mut saver, now, &peers(3)).await;
        assert_eq!(saver.next(now), Some(now + EVERY), "the write failed");
        std::fs::remove_file(&not_a_directory).unwrap();
        save(&mut saver, now + EVERY, &peers(3)).await;
        assert_eq!((count(&saved_file), saver.next(now + EVERY)), (Some(3), None));
    }

    /// The clock stands still, because a removal waits for a slow disk for two seconds only.
    #[tokio::test(start_paused = true)]
    async fn a_write_that_had_begun_does_not_bring_the_file_back() {
        let dir = tempfile::tempdir().unwrap();
        let saved_file = saved_file(dir.path());
        let (mut saver, mut now) = (Saver::new(Some(saved_file.clone())), Instant::now());
        saver.forget().await;
        let peers = peers(300);
        for begun in [false, true, true, true] {
            saver.changed();
            save(&mut saver, now, &peers).await;
            assert_eq!(count(&saved_file), Some(300));
            now += EVERY;
            if begun {
                saver.changed();
                saver.save(now, &peers, head);
                assert!(saver.task.is_some());
            }
            saver.forget().await;
            assert!(saver.task.is_none());
            assert_eq!(count(&saved_file), None);
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "no temporary file must be left behind");
            now += EVERY;
        }
        saver.changed();
        save(&mut saver, now, &peers).await;
        assert_eq!(count(&saved_file), Some(300), "it must be written again");
    }

    /// The sync of many leases to a slow disk would take longer than the removal may. The clock stands still, so this disk may be slow.
    #[tokio::test(start_paused = true)]
    async fn a_write_that_has_begun_is_given_up_when_the_file_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let saved_file = saved_file(dir.path());
        let mut saver = Saver::new(Some(saved_file.clone()));
        let (go_on, begun) = std::sync::mpsc::channel::<()>();
        let (done, written) = std::sync::mpsc::channel();
        let (file, head, wanted) = (saved_file.file().to_owned(), head(&saved_file), Arc::downgrade(&saver.wanted));
        saver.task = Some(tokio::task::spawn_blocking(move || {
            begun.recv().unwrap();
            done.send(write(&file, &head, vec![Arc::new(lease(1))], &wanted)).unwrap();
        }));
        tokio::join!(saver.forget(), async { go_on.send(()).unwrap() });
        assert_eq!(written.recv().unwrap().unwrap_err().kind(), io::ErrorKind::Interrupted);
        assert_eq!(count(&saved_file), None);
    }

    #[tokio::test]
    async fn a_write_that_is_no_longer_wanted_leaves_the_last_file() {
        let dir = tempfile::tempdir().unwrap();
        let saved_file = saved_file(dir.path());
        let (mut saver, now) = (Saver::new(Some(saved_file.clone())), Instant::now());
        saver.changed();
        save(&mut saver, now, &peers(1)).await;
        let leases = vec![Arc::new(lease(1)), Arc::new(lease(2))];
        let wanted = Arc::downgrade(&saver.wanted);
        drop(saver);
        let error = write(saved_file.file(), &head(&saved_file), leases, &wanted).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
        assert_eq!(count(&saved_file), Some(1));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file must be left behind");
    }

    /// A task that does not end stands for a write to a disk that hangs.
    #[tokio::test]
    async fn while_the_disk_hangs_no_second_write_begins_and_the_loop_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let saved_file = saved_file(dir.path());
        let (mut saver, now) = (Saver::new(Some(saved_file.clone())), Instant::now());
        let (end, hangs) = std::sync::mpsc::channel::<()>();
        saver.task = Some(tokio::task::spawn_blocking(move || hangs.recv().unwrap_or_default()));
        saver.changed();
        let peers = peers(3);
        for second in 0..60 {
            let now = now + Duration::from_secs(second);
            saver.save(now, &peers, head);
            assert_eq!(saver.next(now), Some(now + BUSY), "the loop must not wake up all the time");
        }
        assert!(peers.believed_unordered().all(|lease| Arc::strong_count(lease) == 1), "no copies wait for the disk");
        assert_eq!(count(&saved_file), None);
        drop(end);
        saver.task.take().unwrap().await.unwrap();
        save(&mut saver, now + Duration::from_secs(60), &peers).await;
        assert_eq!(count(&saved_file), Some(3));
    }

    /// The removal goes on when the loop no longer waits for it. A new file must not be written before it has ended.
    #[tokio::test(start_paused = true)]
    async fn no_write_begins_while_a_removal_that_takes_long_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let saved_file = saved_file(dir.path());
        let (mut saver, now) = (Saver::new(Some(saved_file.clone())), Instant::now());
        let (end, hangs) = std::sync::mpsc::channel::<()>();
        saver.task = Some(tokio::task::spawn_blocking(move || hangs.recv().unwrap_or_default()));
        tokio::join!(saver.forget(), tokio::time::advance(REMOVE_LIMIT));
        saver.changed();
        saver.save(now, &peers(3), head);
        assert_eq!((count(&saved_file), saver.next(now)), (None, Some(now + BUSY)));
        drop(end);
        saver.task.take().unwrap().await.unwrap();
        save(&mut saver, now + BUSY, &peers(3)).await;
        assert_eq!(count(&saved_file), Some(3));
    }

    #[tokio::test]
    async fn a_directory_that_cannot_be_written_costs_only_a_line_in_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let (mut saver, now) = (Saver::new(Some(saved_file(&file))), Instant::now());
        saver.changed();
        save(&mut saver, now, &peers(1)).await;
        assert!(saver.failing.load(Ordering::Relaxed));
        assert!(SavedFile::new(None, Path::new("x"), Some("etcd x".into())).is_none());
        assert!(SavedFile::new(Some(&file), Path::new("x"), None).is_none(), "this store has no identity");
        let mut off = Saver::new(None);
        off.changed();
        assert_eq!(off.next(now), None);
    }
}
