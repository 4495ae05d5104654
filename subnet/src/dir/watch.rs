// SPDX-License-Identifier: Apache-2.0
//! The watch of a directory: inotify says when to look again, a slow poll is the net (NFS, synchronised trees), and what is
//! reported is the difference of two complete looks.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::cidr::Subnets;
use crate::lease::{Id, Record};
use crate::retry::{RECOVERED, Trouble, chain};
use crate::source::{Error, Event};

use super::files::{self, Files};

const POLL: Duration = Duration::from_secs(30);

const DELETED: AddWatchFlags = AddWatchFlags::IN_DELETE.union(AddWatchFlags::IN_MOVED_FROM);

struct Fd(Inotify);

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Device and inode of both directories: others = another store.
type Identity = [(u64, u64); 2];

fn identity(files: &Files) -> Result<Identity, Error> {
    let of = |path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).map_err(unavailable(files));
    Ok([of(files.path())?, of(files.subnets())?])
}

fn unavailable(files: &Files) -> impl Fn(io::Error) -> Error {
    let what = format!("watch {}", files.path().display());
    move |error| Error::Unavailable { what: what.clone(), source: Some(Box::new(error)) }
}

// tokio's replacement for `new` is an unsafe function; what `new` asks is kept: `Fd` owns its descriptor and never swaps it.
#[allow(deprecated)]
fn open(files: &Files) -> io::Result<AsyncFd<Fd>> {
    let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
    let flags = AddWatchFlags::IN_CLOSE_WRITE
        | AddWatchFlags::IN_MOVED_TO
        | AddWatchFlags::IN_MOVED_FROM
        | AddWatchFlags::IN_CREATE
        | AddWatchFlags::IN_DELETE
        | AddWatchFlags::IN_DELETE_SELF
        | AddWatchFlags::IN_MOVE_SELF
        | AddWatchFlags::IN_ONLYDIR;
    inotify.add_watch(files.path(), flags)?;
    inotify.add_watch(files.subnets(), flags)?;
    AsyncFd::new(Fd(inotify))
}

/// Waits for events or the slow poll, and takes all that are there: each look is complete anyway. Returns the names deleted.
async fn wait(watch: &AsyncFd<Fd>) -> io::Result<Vec<OsString>> {
    let mut deleted = Vec::new();
    let Ok(ready) = timeout(POLL, watch.readable()).await else { return Ok(deleted) };
    let mut guard = ready?;
    loop {
        match watch.get_ref().0.read_events() {
            Ok(events) => {
                let gone = events.into_iter().filter(|event| event.mask.intersects(DELETED));
                deleted.extend(gone.filter_map(|event| event.name));
            }
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                guard.clear_ready();
                return Ok(deleted);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// What was reported so far.
#[derive(Default)]
struct Known {
    records: BTreeMap<Id, Record>,
    identity: Option<Identity>,
}

/// See [`crate::source::Source::watch`].
pub(super) async fn run(files: &Files, out: mpsc::Sender<Event>) {
    tokio::select! {
        () = out.closed() => {}
        () = follow(files, &out) => {}
    }
}

async fn follow(files: &Files, out: &mpsc::Sender<Event>) {
    let mut known = Known::default();
    let mut trouble = Trouble::default();
    loop {
        let began = Instant::now();
        let error = match session(files, out, &mut known).await {
            Ok(()) => return,
            Err(error) => error,
        };
        if began.elapsed() > RECOVERED {
            trouble.over();
        }
        let (say, delay) = trouble.more(1);
        if say && out.send(Event::Trouble(chain(&error))).await.is_err() {
            return;
        }
        sleep(delay).await;
    }
}

/// Watches first, then looks: nothing falls between. `Ok` = nobody listens.
async fn session(files: &Files, out: &mpsc::Sender<Event>, known: &mut Known) -> Result<(), Error> {
    files.make()?;
    let watch = open(files).map_err(unavailable(files))?;
    let mine = identity(files)?;
    let records = files.scan()?;
    let reset = known.identity.is_some_and(|before| before != mine);
    known.identity = Some(mine);
    known.records = records.iter().map(|record| (record.id.clone(), record.clone())).collect();
    if out.send(Event::Snapshot { records, reset }).await.is_err() || !config(files, out).await? {
        return Ok(());
    }
    loop {
        let deleted = wait(&watch).await.map_err(unavailable(files))?;
        if identity(files)? != mine {
            let moved = io::Error::other("the directory was replaced");
            return Err(unavailable(files)(moved));
        }
        let mut changes = difference(&mut known.records, files.scan()?);
        changes.extend(short_lived(&known.records, &changes, &deleted));
        if !changes.is_empty() && out.send(Event::Changes(changes)).await.is_err() {
            return Ok(());
        }
        if !config(files, out).await? || out.send(Event::Word).await.is_err() {
            return Ok(());
        }
    }
}

fn difference(known: &mut BTreeMap<Id, Record>, records: Vec<Record>) -> Vec<Result<Record, Id>> {
    let now: BTreeMap<Id, Record> = records.into_iter().map(|record| (record.id.clone(), record)).collect();
    let gone = known.keys().filter(|id| !now.contains_key(*id)).cloned().map(Err);
    let put = now.values().filter(|record| known.get(&record.id) != Some(record)).cloned().map(Ok);
    let changes = gone.chain(put).collect();
    *known = now;
    changes
}

/// Records that came and went between two looks: whoever wrote one (our own lease, taken again) must hear that it is gone.
fn short_lived(
    known: &BTreeMap<Id, Record>,
    changes: &[Result<Record, Id>],
    deleted: &[OsString],
) -> Vec<Result<Record, Id>> {
    let said: BTreeSet<&Id> = changes.iter().filter_map(|change| change.as_ref().err()).collect();
    let subnets = |id: &Id| Subnets::from_key(id).is_some();
    let ids = deleted.iter().filter_map(|name| files::id(name.to_str()?)).filter(subnets);
    let gone: BTreeSet<Id> = ids.filter(|id| !known.contains_key(id) && !said.contains(id)).collect();
    gone.into_iter().map(Err).collect()
}

/// Reports net-conf when it is another than the one handed out. False = nobody listens.
async fn config(files: &Files, out: &mpsc::Sender<Event>) -> Result<bool, Error> {
    let Some(text) = files.peek_config()? else { return Ok(true) };
    let before = files.config_seen.borrow_mut().replace(text.clone());
    Ok(match before {
        Some(before) if before != text => out.send(Event::Config(text)).await.is_ok(),
        _ => true,
    })
}
