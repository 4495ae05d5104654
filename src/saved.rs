// SPDX-License-Identifier: Apache-2.0
//! The file of last-known-good peers: looked for when the store is away at the start, and written, now and then, while it is not.
//! It is made in pieces between other work, and each goes to another thread at once: no route waits for a disk, and unless the disk
//! hangs there is no second copy of all peers in memory.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use weft_subnet::cache::{self, FIRST_LINE, Head, Saved, Writer};
use weft_subnet::peers::Peers;

use crate::files;
use crate::instance;

/// Between two savings, at least.
const EVERY: Duration = Duration::from_secs(30);
/// After this time it is written again although nothing changed: its age tells how long ago the store was heard. A quarter of what
/// it may be, see `start/resume.rs`.
const REFRESH: Duration = Duration::from_secs(6 * 3600);
/// So long the loop waits for the removal of the file, which goes on afterwards: the disk may hang.
const REMOVE_LIMIT: Duration = Duration::from_secs(2);
/// Leases that are written between two looks at the rest of the world: a fraction of a millisecond.
const SLICE: usize = 128;

/// Where the file of an instance is, and of which store it may be.
#[derive(Debug, Clone)]
pub struct SavedFile {
    file: PathBuf,
    store: String,
}

impl SavedFile {
    /// Of the instance with this subnet file. `None` where the store needs none, or nobody wants one.
    pub fn new(state_dir: Option<&Path>, subnet_file: &Path, store: Option<String>) -> Option<SavedFile> {
        Some(SavedFile { file: file(state_dir?, subnet_file), store: store? })
    }

    /// What was saved; the error is a sentence, `Ok(None)`: there is no such file.
    pub fn read(&self) -> Result<Option<Saved>, String> {
        let unusable = |error: &dyn std::fmt::Display| format!("saved peers: {}: {error}", self.file.display());
        match std::fs::read(&self.file) {
            Ok(text) => cache::read(&text, &self.store).map(Some).map_err(|error| unusable(&error)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unusable(&error)),
        }
    }

    /// What was saved without the peers: a large file is not taken apart for that. `None` where there is nothing usable.
    pub fn read_head(&self) -> Option<Head> {
        cache::read_head(&std::fs::read(&self.file).ok()?, &self.store).ok()
    }

    /// The file, for people.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The store's identity.
    pub fn store(&self) -> &str {
        &self.store
    }
}

/// The file of an instance: two agents of one machine have two.
pub fn file(state_dir: &Path, subnet_file: &Path) -> PathBuf {
    state_dir.join(format!("peers-{:016x}", instance::hash(subnet_file)))
}

/// Removes the file of an instance; one that is not there is no failure.
pub fn remove(state_dir: &Path, subnet_file: &Path) -> io::Result<()> {
    remove_file(&file(state_dir, subnet_file))
}

fn remove_file(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        // The removal outlives a power cut only once the directory is on the disk.
        Ok(()) => file.parent().map_or(Ok(()), |dir| File::open(dir)?.sync_all()),
    }
}

/// Writes the file when it is due.
#[derive(Debug, Default)]
pub struct Saver {
    saved_file: Option<SavedFile>,
    /// Something changed since the last saving began.
    dirty: bool,
    not_before: Option<Instant>,
    stage: Stage,
    /// The last writing failed, and it was said.
    failing: Arc<AtomicBool>,
}

#[derive(Debug, Default)]
enum Stage {
    #[default]
    Idle,
    Making(Box<Making>),
    Storing(JoinHandle<()>),
}

#[derive(Debug)]
struct Making {
    writer: Writer,
    pieces: Sender<Piece>,
    thread: JoinHandle<()>,
    /// The place of the next lease.
    from: usize,
}

/// For the thread that writes.
#[derive(Debug)]
enum Piece {
    Text(Vec<u8>),
    /// Nothing follows; here is what goes before all.
    First(String),
}

impl Saver {
    /// Nothing is to be saved yet.
    pub fn new(saved_file: Option<SavedFile>) -> Saver {
        Saver { saved_file, ..Saver::default() }
    }

    /// Peers, net-conf or our own lease are others than those saved.
    pub fn changed(&mut self) {
        self.dirty = self.saved_file.is_some();
    }

    /// The last saving was long ago.
    pub fn is_old(&self, now: Instant) -> bool {
        self.not_before.is_some_and(|at| at + REFRESH <= now)
    }

    /// When to call [`Saver::step`].
    pub fn next(&self, now: Instant) -> Option<Instant> {
        match (&self.stage, self.dirty) {
            (Stage::Making(_), _) => Some(now),
            (_, true) => Some(self.not_before.unwrap_or(now)),
            (_, false) => None,
        }
    }

    /// Removes the file, because what it says is not true any more. A saving that has begun is given up or waited for, so that
    /// it does not bring the file back. Returns when the file is gone, or after [`REMOVE_LIMIT`].
    pub async fn forget(&mut self) {
        let Some(saved_file) = &self.saved_file else { return };
        let before = match std::mem::take(&mut self.stage) {
            Stage::Idle => None,
            // Without its last piece the thread leaves the file as it is.
            Stage::Making(making) => Some(making.thread),
            Stage::Storing(thread) => Some(thread),
        };
        let file = saved_file.file.clone();
        let mut removal = tokio::spawn(async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            let path = file.clone();
            let removed = tokio::task::spawn_blocking(move || remove_file(&path)).await.map_err(io::Error::other);
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
            self.stage = Stage::Storing(removal);
        }
    }

    /// Goes on a little. What changes while the leases are written makes it dirty again: each of them stands for itself.
    pub fn step(&mut self, now: Instant, peers: &Peers, head: impl FnOnce(&SavedFile) -> Head) {
        let Some(saved_file) = &self.saved_file else { return };
        self.stage = match std::mem::take(&mut self.stage) {
            Stage::Storing(task) if !task.is_finished() => {
                self.not_before = Some(now + Duration::from_secs(1));
                Stage::Storing(task)
            }
            Stage::Idle | Stage::Storing(_) => {
                if !self.dirty || self.not_before.is_some_and(|at| now < at) {
                    return;
                }
                (self.dirty, self.not_before) = (false, Some(now + EVERY));
                let Some(writer) = Writer::new(head(saved_file)) else { return };
                let (pieces, received) = mpsc::channel();
                let thread = store(saved_file.file.clone(), received, self.failing.clone());
                Stage::Making(Box::new(Making { writer, pieces, thread, from: 0 }))
            }
            Stage::Making(mut making) => {
                let from = making.from;
                for (next, lease) in peers.believed_from(from).take(SLICE) {
                    making.writer.peer(lease);
                    making.from = next;
                }
                // Nobody takes them after a failure, of which the thread has told.
                let _ = making.pieces.send(Piece::Text(making.writer.take()));
                if making.from > from {
                    Stage::Making(making)
                } else {
                    let Making { writer, pieces, thread, .. } = *making;
                    let _ = pieces.send(Piece::First(writer.finish()));
                    Stage::Storing(thread)
                }
            }
        };
    }
}

fn store(file: PathBuf, pieces: Receiver<Piece>, failing: Arc<AtomicBool>) -> JoinHandle<()> {
    tokio::task::spawn_blocking(move || match files::replace_with(&file, 0o600, |aside| put_together(aside, pieces)) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => tracing::debug!("peers not saved: the agent ends"),
        Ok(()) if failing.swap(false, Ordering::Relaxed) => {
            tracing::info!(file = %file.display(), "peers are saved again");
        }
        Ok(()) => tracing::debug!(file = %file.display(), "peers saved"),
        Err(error) if !failing.swap(true, Ordering::Relaxed) => tracing::warn!(
            "save peers: write {}: {error}; a start while the store is away will wait for it (--state-dir)",
            file.display()
        ),
        Err(_) => {}
    })
}

/// `Interrupted` when the last piece does not come.
fn put_together(file: &mut File, pieces: Receiver<Piece>) -> io::Result<()> {
    file.write_all(&[b' '; FIRST_LINE])?;
    for piece in pieces {
        match piece {
            Piece::Text(text) => file.write_all(&text)?,
            Piece::First(line) => {
                file.rewind()?;
                return file.write_all(line.as_bytes());
            }
        }
    }
    Err(io::ErrorKind::Interrupted.into())
}

#[cfg(test)]
mod tests {
    use weft_subnet::attrs::Attrs;
    use weft_subnet::cidr::Subnets;
    use weft_subnet::lease::{Age, Lease, Record};
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
        let (saved, expires) = (0, cache::Expiry::Never);
        Head {
            store: saved_file.store().into(),
            saved,
            expires,
            config: "{}".into(),
            own: lease(0),
            public,
            chosen,
            uplink: None,
        }
    }

    async fn saved(saver: &mut Saver, now: Instant, peers: &Peers) {
        while !matches!(saver.stage, Stage::Idle) || saver.dirty {
            saver.step(now, peers, head);
            if let Stage::Storing(task) = &mut saver.stage {
                task.await.unwrap();
                saver.stage = Stage::Idle;
            }
        }
    }

    #[tokio::test]
    async fn all_peers_are_saved_and_not_too_often() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("made/when/missing");
        let saved_file = SavedFile::new(Some(&state), Path::new("/run/x/subnet.env"), Some("etcd x".into())).unwrap();
        let (mut saver, now) = (Saver::new(Some(saved_file.clone())), Instant::now());
        assert_eq!(saver.next(now), None);
        assert_eq!(saved_file.read(), Ok(None));
        saver.changed();
        assert_eq!(saver.next(now), Some(now), "the first time at once");
        saved(&mut saver, now, &peers(300)).await;
        assert_eq!(saved_file.read().unwrap().unwrap().peers.len(), 300);
        saver.changed();
        assert_eq!(saver.next(now), Some(now + EVERY));
        saver.step(now, &peers(301), head);
        assert!(matches!(saver.stage, Stage::Idle), "not yet");
        saved(&mut saver, now + EVERY, &peers(301)).await;
        assert_eq!(saved_file.read().unwrap().unwrap().peers.len(), 301);
        assert_eq!(saver.next(now), None, "nothing new");
        assert!(!saver.is_old(now + REFRESH) && saver.is_old(now + 2 * EVERY + REFRESH), "unless that lasts");
        std::fs::write(saved_file.file(), "damaged").unwrap();
        let reason = saved_file.read().unwrap_err();
        assert!(reason.starts_with("saved peers: ") && reason.ends_with(": it is damaged"), "{reason}");
    }

    #[tokio::test]
    async fn what_is_forgotten_does_not_come_back_from_a_saving_that_had_begun() {
        let dir = tempfile::tempdir().unwrap();
        let saved_file =
            SavedFile::new(Some(dir.path()), Path::new("/run/x/subnet.env"), Some("etcd x".into())).unwrap();
        let (mut saver, now) = (Saver::new(Some(saved_file.clone())), Instant::now());
        saver.forget().await;
        let peers = peers(300);
        // Idle after a saving; then after each number of steps of the next one, the last of which hands over to the thread.
        for steps in 0..6 {
            let at = now + EVERY * (2 * steps);
            saver.changed();
            saved(&mut saver, at, &peers).await;
            assert!(saved_file.read().unwrap().is_some(), "{steps} steps");
            saver.changed();
            for _ in 0..steps {
                saver.step(at + EVERY, &peers, head);
            }
            saver.forget().await;
            assert!(matches!(saver.stage, Stage::Idle), "{steps} steps");
            assert_eq!(saved_file.read(), Ok(None), "{steps} steps");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing half-made stays behind");
        }
        saver.changed();
        saved(&mut saver, now + EVERY * 20, &peers).await;
        assert!(saved_file.read().unwrap().is_some(), "it is written again");
    }

    #[tokio::test]
    async fn an_end_half_way_leaves_the_last_file() {
        let dir = tempfile::tempdir().unwrap();
        let saved_file =
            SavedFile::new(Some(dir.path()), Path::new("/run/x/subnet.env"), Some("etcd x".into())).unwrap();
        let (mut saver, now) = (Saver::new(Some(saved_file.clone())), Instant::now());
        saver.changed();
        saved(&mut saver, now, &peers(1)).await;
        saver.changed();
        saver.step(now + EVERY, &peers(300), head);
        saver.step(now + EVERY, &peers(300), head);
        let Stage::Making(making) = std::mem::take(&mut saver.stage) else { panic!("it has just begun") };
        let Making { pieces, thread, .. } = *making;
        drop(pieces);
        thread.await.unwrap();
        assert_eq!(saved_file.read().unwrap().unwrap().peers.len(), 1);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing half-made stays behind");
        assert!(!saver.failing.load(Ordering::Relaxed));
    }

    #[tokio::test]
    async fn a_directory_that_cannot_be_written_costs_nothing_but_a_word() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let saved_file = SavedFile::new(Some(&file), Path::new("/run/x/subnet.env"), Some("etcd x".into())).unwrap();
        let (mut saver, now) = (Saver::new(Some(saved_file.clone())), Instant::now());
        saver.changed();
        saved(&mut saver, now, &peers(1)).await;
        assert!(saver.failing.load(Ordering::Relaxed));
        assert!(SavedFile::new(None, Path::new("x"), Some("etcd x".into())).is_none());
        assert!(SavedFile::new(Some(&file), Path::new("x"), None).is_none(), "a store that needs none");
        let mut off = Saver::new(None);
        off.changed();
        assert_eq!(off.next(now), None);
    }
}
