// SPDX-License-Identifier: Apache-2.0
//! The watch of a directory: inotify says which files to read again, a slow poll of all of them is the net (NFS, synchronised
//! trees), and what is reported is the difference to what was reported before.
//!
//! A host may have no inotify instance left (`fs.inotify.max_user_instances`). Then the directory is polled until there is one.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::cidr::Subnets;
use crate::lease::{Id, Record};
use crate::retry::{RECOVERED, Trouble};
use crate::source::{Error, Event};

use super::DirStore;
use super::files::{self, Files};

/// The slow poll: everything is read so often.
const POLL: Duration = Duration::from_secs(30);
/// Without inotify it is looked so often whether the directory changed.
const LOOK: Duration = Duration::from_secs(1);
/// Without inotify every change costs a look at everything: the pause after one is so many times as long as the look took.
const REST: u32 = 10;

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

/// Both directories, watched.
struct Watch {
    inotify: AsyncFd<Fd>,
    /// Events of `subnets/` have this number.
    subnets: WatchDescriptor,
}

impl Watch {
    fn new((inotify, subnets): (Inotify, WatchDescriptor)) -> io::Result<Watch> {
        // tokio's replacement for `new` is an unsafe function; what `new` asks is kept: `Fd` owns its descriptor and never swaps it.
        #[allow(deprecated)]
        let inotify = AsyncFd::new(Fd(inotify))?;
        Ok(Watch { inotify, subnets })
    }
}

/// How it is noticed that the directory changed.
enum Eyes {
    Inotify(Watch),
    Polling(Poll),
}

/// What the host lacks when nothing can be watched: instances, watches or memory. It may have them again at any time.
fn exhausted(errno: Errno) -> bool {
    matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOSPC | Errno::ENOMEM)
}

/// A directory without inotify.
struct Poll {
    /// When `subnets/` changed last, as far as it was seen: seconds and nanoseconds.
    changed: (i64, i64),
    /// It had changed at the last look. What came in the same tick of the file system's clock is seen by one look more.
    again: bool,
    next: Instant,
}

impl Poll {
    /// Everything is about to be read.
    fn new(changed: (i64, i64)) -> Poll {
        Poll { changed, again: true, next: Instant::now() + LOOK }
    }

    /// What there is to look at: everything where files came, went or were replaced.
    fn seen(&mut self, changed: (i64, i64)) -> bool {
        let other = std::mem::replace(&mut self.changed, changed) != changed;
        std::mem::replace(&mut self.again, other) || other
    }
}

/// When `subnets/` changed last.
fn changed(files: &Files) -> Result<(i64, i64), Error> {
    let meta = fs::metadata(files.subnets()).map_err(unavailable(files))?;
    Ok((meta.mtime(), meta.mtime_nsec()))
}

/// Watches both directories, or begins to poll where that cannot be.
async fn open_eyes(store: &DirStore) -> Result<Eyes, Error> {
    let opened = store.files.work(|files| {
        files.make()?;
        match open(files) {
            Err(errno) if exhausted(errno) => Ok(Err((errno, changed(files)?))),
            opened => opened.map(Ok).map_err(|errno| unavailable(files)(errno.into())),
        }
    });
    match opened.await? {
        Ok(opened) => {
            store.watched(None);
            Watch::new(opened).map(Eyes::Inotify).map_err(unavailable(&store.files))
        }
        Err((errno, changed)) => {
            store.watched(Some(errno));
            Ok(Eyes::Polling(Poll::new(changed)))
        }
    }
}

fn open(files: &Files) -> Result<(Inotify, WatchDescriptor), Errno> {
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
    let subnets = inotify.add_watch(files.subnets(), flags)?;
    Ok((inotify, subnets))
}

/// What inotify told of, or that everything is to be looked at.
#[derive(Default)]
struct News {
    /// Ids of the files under `subnets/` that were touched; true: deleted, perhaps written again.
    touched: BTreeMap<Id, bool>,
    /// The slow poll is due, or events were lost.
    all: bool,
}

/// Waits until there is something to look at; at the latest for the slow poll.
async fn wait(store: &DirStore, eyes: &mut Eyes, slow: Instant) -> Result<News, Error> {
    let poll = match eyes {
        Eyes::Inotify(watch) => return told(watch, slow).await.map_err(unavailable(&store.files)),
        Eyes::Polling(poll) => poll,
    };
    sleep_until(poll.next.min(slow)).await;
    poll.next = Instant::now() + LOOK;
    let opened = store.files.work(|files| Ok((open(files).ok(), changed(files)?)));
    let (opened, changed) = opened.await?;
    let mut news = News { all: poll.seen(changed) || Instant::now() >= slow, ..News::default() };
    if let Some(opened) = opened {
        *eyes = Eyes::Inotify(Watch::new(opened).map_err(unavailable(&store.files))?);
        store.watched(None);
        // Watched first, then looked at: nothing falls between.
        news.all = true;
    }
    Ok(news)
}

/// Waits for events or the slow poll, and takes all that are there.
async fn told(watch: &Watch, poll: Instant) -> io::Result<News> {
    let mut news = News::default();
    let Ok(ready) = timeout_at(poll, watch.inotify.readable()).await else { return Ok(News { all: true, ..news }) };
    let mut guard = ready?;
    loop {
        match watch.inotify.get_ref().0.read_events() {
            Ok(events) => events.into_iter().for_each(|event| take(&mut news, watch, &event)),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                guard.clear_ready();
                // Where there is always news the poll is not put off.
                news.all |= Instant::now() >= poll;
                return Ok(news);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn take(news: &mut News, watch: &Watch, event: &InotifyEvent) {
    news.all |= event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
    let name = event.name.as_ref().and_then(|name| name.to_str()).filter(|_| event.wd == watch.subnets);
    if let Some(id) = name.and_then(files::id) {
        *news.touched.entry(id).or_default() |= event.mask.intersects(DELETED);
    }
}

/// What was reported so far.
#[derive(Default)]
struct Known {
    records: BTreeMap<Id, Record>,
    identity: Option<Identity>,
}

/// See [`crate::source::Source::watch`].
pub(super) async fn run(store: &DirStore, out: mpsc::Sender<Event>) {
    tokio::select! {
        () = out.closed() => {}
        () = follow(store, &out) => {}
    }
}

async fn follow(store: &DirStore, out: &mpsc::Sender<Event>) {
    let mut known = Known::default();
    let mut trouble = Trouble::default();
    loop {
        let began = Instant::now();
        let error = match session(store, out, &mut known).await {
            Ok(()) => return,
            Err(error) => error,
        };
        if began.elapsed() > RECOVERED {
            trouble.over();
        }
        if !trouble.pause(&error, 1, out).await {
            return;
        }
    }
}

/// Watches first, then looks: nothing falls between. `Ok` = nobody listens.
async fn session(store: &DirStore, out: &mpsc::Sender<Event>, known: &mut Known) -> Result<(), Error> {
    let files = &store.files;
    let mut eyes = open_eyes(store).await?;
    store.wrote.borrow_mut().clear();
    let (records, text, mine) = files.work(|files| Ok((files.scan()?, files.config()?, identity(files)?))).await?;
    let reset = known.identity.is_some_and(|before| before != mine);
    known.identity = Some(mine);
    known.records = records.iter().map(|record| (record.id.clone(), record.clone())).collect();
    if out.send(Event::Snapshot { records, reset }).await.is_err() || !config(store, out, text).await {
        return Ok(());
    }
    let mut poll = Instant::now() + POLL;
    loop {
        let news = wait(store, &mut eyes, poll).await?;
        let (all, names) = (news.all, news.touched.keys().cloned().collect());
        let began = Instant::now();
        let (found, text, now) = files.work(move |files| look(files, all, names)).await?;
        if let Eyes::Polling(poll) = &mut eyes {
            poll.next = Instant::now() + LOOK.max(began.elapsed() * REST);
        }
        // Looked at last: of a directory that went away meanwhile nothing is believed.
        if now != mine {
            let moved = io::Error::other("the directory was replaced");
            return Err(unavailable(files)(moved));
        }
        if all {
            poll = Instant::now() + POLL;
        }
        // Whatever stands there now is news after a write of ours: somebody else may have written again what was reported before it.
        for id in std::mem::take(&mut *store.wrote.borrow_mut()) {
            known.records.insert(id.clone(), Record::new(id, Err("written by this node".to_owned())));
        }
        let changes = difference(&mut known.records, found, &news.touched);
        if !changes.is_empty() && out.send(Event::Changes(changes)).await.is_err() {
            return Ok(());
        }
        if !config(store, out, text).await || out.send(Event::Word).await.is_err() {
            return Ok(());
        }
    }
}

/// What is there now.
enum Found {
    /// Everything.
    All(Vec<Record>),
    /// The files that were touched; `None`: not there.
    Some(Vec<(Id, Option<Record>)>),
}

fn look(files: &Files, all: bool, names: Vec<Id>) -> Result<(Found, Option<String>, Identity), Error> {
    let found = if all {
        Found::All(files.scan()?)
    } else {
        let read = |id: Id| files.read(&id).map(|record| (id, record));
        Found::Some(names.into_iter().map(read).collect::<Result<_, Error>>()?)
    };
    Ok((found, files.config()?, identity(files)?))
}

/// Brings `known` up to what was found; what went, then what came. Records that came and went between two looks are gone, too:
/// whoever wrote one (our own lease, taken again) must hear it.
fn difference(known: &mut BTreeMap<Id, Record>, found: Found, touched: &BTreeMap<Id, bool>) -> Vec<Result<Record, Id>> {
    let now = match found {
        Found::Some(now) => now,
        Found::All(records) => {
            let mut now: BTreeMap<Id, Option<Record>> = known.keys().map(|id| (id.clone(), None)).collect();
            now.extend(touched.keys().map(|id| (id.clone(), None)));
            now.extend(records.into_iter().map(|record| (record.id.clone(), Some(record))));
            now.into_iter().collect()
        }
    };
    let (mut gone, mut put) = (Vec::new(), Vec::new());
    for (id, record) in now {
        match record {
            Some(record) if known.get(&id) == Some(&record) => {}
            Some(record) => {
                known.insert(id, record.clone());
                put.push(Ok(record));
            }
            None => {
                let short_lived = touched.get(&id) == Some(&true) && Subnets::from_key(&id).is_some();
                if known.remove(&id).is_some() || short_lived {
                    gone.push(Err(id));
                }
            }
        }
    }
    gone.append(&mut put);
    gone
}

/// Reports net-conf when it is another than the one handed out. False = nobody listens.
async fn config(store: &DirStore, out: &mpsc::Sender<Event>, text: Option<String>) -> bool {
    let Some(text) = text else { return true };
    let before = store.config_seen.borrow_mut().replace(text.clone());
    match before {
        Some(before) if before != text => out.send(Event::Config(text)).await.is_ok(),
        _ => true,
    }
}
