// SPDX-License-Identifier: Apache-2.0
//! Watches the directory. inotify says which files to read again. In addition, all files are read every 30 s, because inotify does not
//! notice changes that another host makes on NFS. Only differences to what was reported before are reported.
//!
//! If the host has no inotify instance left (`fs.inotify.max_user_instances`), the directory is polled until there is one.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::cidr::Subnets;
use crate::lease::{Id, Record};
use crate::retry::{Failures, RECOVERED};
use crate::source::{Error, Event, RecordChange};

use super::DirStore;
use super::files::{self, Files, Look};

/// How often all files are read.
const READ_ALL_EVERY: Duration = Duration::from_secs(30);
/// Without inotify, how often to check whether the directory changed.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// Without inotify, all files are read after each change. The pause afterwards is this many times as long as the reading took.
const PAUSE_FACTOR: u32 = 10;

const DELETED: AddWatchFlags = AddWatchFlags::IN_DELETE.union(AddWatchFlags::IN_MOVED_FROM);

struct Fd(Inotify);

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Device and inode of both directories. If they change, this is another store.
type Inodes = [(u64, u64); 2];

fn inodes(files: &Files) -> Result<Inodes, Error> {
    let of = |path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino())).map_err(unavailable(files));
    Ok([of(files.path())?, of(files.subnets())?])
}

fn unavailable(files: &Files) -> impl Fn(io::Error) -> Error {
    let what = format!("watch {}", files.path().display());
    move |error| Error::Unavailable { what: what.clone(), source: Some(Box::new(error)) }
}

/// An inotify instance that watches both directories.
struct Watch {
    inotify: AsyncFd<Fd>,
    /// The descriptor in events of `subnets/`.
    subnets: WatchDescriptor,
}

impl Watch {
    fn new((inotify, subnets): (Inotify, WatchDescriptor)) -> io::Result<Watch> {
        // tokio's replacement for `new` is an unsafe function. The condition of `new` holds: `Fd` owns its descriptor and never changes it.
        #[allow(deprecated)]
        let inotify = AsyncFd::new(Fd(inotify))?;
        Ok(Watch { inotify, subnets })
    }
}

/// How changes of the directory are noticed.
enum Changes {
    Inotify(Watch),
    Polling(Poll),
}

/// Returns true if the host lacks inotify instances, watches or memory. It may have them again at any time.
fn is_exhausted(errno: Errno) -> bool {
    matches!(errno, Errno::EMFILE | Errno::ENFILE | Errno::ENOSPC | Errno::ENOMEM)
}

/// The state of polling without inotify.
struct Poll {
    /// The modification time of `subnets/` at the last check.
    modified: SystemTime,
    /// True if it had changed at the last check. Then all files are read once more, because a later change within the same tick of the
    /// file system's clock leaves the modification time as it is.
    once_more: bool,
    next: Instant,
}

impl Poll {
    /// Begins to poll. All files are about to be read.
    fn new(modified: SystemTime) -> Poll {
        Poll { modified, once_more: true, next: Instant::now() + POLL_EVERY }
    }

    /// Takes the present modification time. Returns whether all files must be read.
    fn must_read(&mut self, modified: SystemTime) -> bool {
        let has_changed = std::mem::replace(&mut self.modified, modified) != modified;
        std::mem::replace(&mut self.once_more, has_changed) || has_changed
    }

    /// Sets the time of the next check. `reading` is how long the files were read after this one.
    fn pause(&mut self, reading: Duration) {
        self.next = Instant::now() + POLL_EVERY.max(reading * PAUSE_FACTOR);
    }
}

/// Returns the modification time of `subnets/`, which changes when files are created, deleted or replaced.
fn modified(files: &Files) -> Result<SystemTime, Error> {
    fs::metadata(files.subnets()).and_then(|meta| meta.modified()).map_err(unavailable(files))
}

/// Watches both directories, or begins to poll if that is not possible.
async fn notice_changes(store: &DirStore) -> Result<Changes, Error> {
    let opened = store.files.work(|files| {
        files.make()?;
        match open(files) {
            Err(errno) if is_exhausted(errno) => Ok(Err((errno, modified(files)?))),
            opened => opened.map(Ok).map_err(|errno| unavailable(files)(errno.into())),
        }
    });
    match opened.await? {
        Ok(opened) => {
            store.set_polled(None);
            Watch::new(opened).map(Changes::Inotify).map_err(unavailable(&store.files))
        }
        Err((errno, modified)) => {
            store.set_polled(Some(errno));
            Ok(Changes::Polling(Poll::new(modified)))
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

/// Which files to read again.
#[derive(Default)]
struct ToRead {
    /// Ids of the files under `subnets/` that changed. True if the file was deleted, although it may have been written again.
    touched: BTreeMap<Id, bool>,
    /// All files must be read: it is time for that, or events were lost.
    all: bool,
}

/// Waits for a change, or until `read_all_at`.
async fn wait(store: &DirStore, changes: &mut Changes, read_all_at: Instant) -> Result<ToRead, Error> {
    let poll = match changes {
        Changes::Inotify(watch) => {
            return wait_for_inotify(watch, read_all_at).await.map_err(unavailable(&store.files));
        }
        Changes::Polling(poll) => poll,
    };
    sleep_until(poll.next.min(read_all_at)).await;
    let opened = store.files.work(|files| Ok((open(files).ok(), modified(files)?)));
    let (opened, modified) = opened.await?;
    let all = poll.must_read(modified) || Instant::now() >= read_all_at;
    let mut to_read = ToRead { all, ..ToRead::default() };
    if let Some(opened) = opened {
        *changes = Changes::Inotify(Watch::new(opened).map_err(unavailable(&store.files))?);
        store.set_polled(None);
        // All files are read after the watch exists, so that no change is missed.
        to_read.all = true;
    }
    Ok(to_read)
}

/// Waits for events, or until `read_all_at`, and takes all events that there are.
async fn wait_for_inotify(watch: &Watch, read_all_at: Instant) -> io::Result<ToRead> {
    let mut to_read = ToRead::default();
    let Ok(ready) = timeout_at(read_all_at, watch.inotify.readable()).await else {
        return Ok(ToRead { all: true, ..to_read });
    };
    let mut guard = ready?;
    loop {
        match watch.inotify.get_ref().0.read_events() {
            Ok(events) => events.into_iter().for_each(|event| add(&mut to_read, watch, &event)),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                guard.clear_ready();
                // Constant changes must not delay the reading of all files.
                to_read.all |= Instant::now() >= read_all_at;
                return Ok(to_read);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Adds the file of an event.
fn add(to_read: &mut ToRead, watch: &Watch, event: &InotifyEvent) {
    to_read.all |= event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
    let name = event.name.as_ref().and_then(|name| name.to_str()).filter(|_| event.wd == watch.subnets);
    if let Some(id) = name.and_then(files::id) {
        *to_read.touched.entry(id).or_default() |= event.mask.intersects(DELETED);
    }
}

/// What was reported so far.
#[derive(Default)]
struct Reported {
    /// The records. `None` for one that this agent wrote since: whatever the file contains now must be reported.
    records: BTreeMap<Id, Option<Record>>,
    inodes: Option<Inodes>,
}

/// Implements [`crate::source::Source::watch`].
pub(super) async fn run(store: &DirStore, out: mpsc::Sender<Event>) {
    tokio::select! {
        () = out.closed() => {}
        () = follow(store, &out) => {}
    }
}

async fn follow(store: &DirStore, out: &mpsc::Sender<Event>) {
    let mut reported = Reported::default();
    let mut failures = Failures::default();
    loop {
        let began = Instant::now();
        let error = match session(store, out, &mut reported).await {
            Ok(()) => return,
            Err(error) => error,
        };
        if began.elapsed() > RECOVERED {
            failures.reset();
        }
        if !failures.pause(&error, 1, out).await {
            return;
        }
    }
}

/// Follows the directory until an error occurs. Returns `Ok` if nobody receives the events any more.
///
/// The watch begins before the files are read, so that no change is missed.
async fn session(store: &DirStore, out: &mpsc::Sender<Event>, reported: &mut Reported) -> Result<(), Error> {
    let files = &store.files;
    let mut noticed = notice_changes(store).await?;
    store.wrote.borrow_mut().clear();
    let (looks, text, inodes) = files.work(|files| Ok((files.look_at_all()?, files.config()?, inodes(files)?))).await?;
    let reset = reported.inodes.is_some_and(|before| before != inodes);
    reported.inodes = Some(inodes);
    if reset {
        reported.records.clear();
    }
    let records = first_records(&reported.records, looks);
    reported.records = records.iter().map(|record| (record.id.clone(), Some(record.clone()))).collect();
    if out.send(Event::Snapshot { records, reset }).await.is_err() || !report_config(store, out, text).await {
        return Ok(());
    }
    let mut read_all_at = Instant::now() + READ_ALL_EVERY;
    loop {
        let to_read = wait(store, &mut noticed, read_all_at).await?;
        let (all, names) = (to_read.all, to_read.touched.keys().cloned().collect());
        let began = Instant::now();
        let Reading { found, net_conf, inodes: now } = files.work(move |files| read(files, all, names)).await?;
        if let Changes::Polling(poll) = &mut noticed {
            poll.pause(began.elapsed());
        }
        // The inodes are read last: if the directory was replaced meanwhile, nothing that was read from it counts.
        if now != inodes {
            let moved = io::Error::other("the directory was replaced");
            return Err(unavailable(files)(moved));
        }
        if all {
            read_all_at = Instant::now() + READ_ALL_EVERY;
        }
        // After a write of ours, the file is reported even if it is again as it was reported before: then another node has overwritten it.
        for id in std::mem::take(&mut *store.wrote.borrow_mut()) {
            reported.records.insert(id, None);
        }
        let changes = difference(&mut reported.records, found, &to_read.touched);
        if !changes.is_empty() && out.send(Event::Changes(changes)).await.is_err() {
            return Ok(());
        }
        if !report_config(store, out, net_conf).await || out.send(Event::Answered).await.is_err() {
            return Ok(());
        }
    }
}

/// Returns what the first event of a session reports. A lease whose file cannot be read any more stays as it was reported.
fn first_records(reported: &BTreeMap<Id, Option<Record>>, looks: Vec<Look>) -> Vec<Record> {
    let earlier = |look: &Look| stays(look, reported.get(&look.record.id)).cloned();
    looks.into_iter().map(|look| earlier(&look).unwrap_or(look.record)).collect()
}

/// Returns the lease that was reported before, if it stays because the disk fails for its file now.
fn stays<'a>(look: &Look, reported: Option<&'a Option<Record>>) -> Option<&'a Record> {
    reported?.as_ref().filter(|record| look.has_failed && record.lease.is_ok())
}

/// The files that were read.
enum Found {
    /// All files.
    All(Vec<Look>),
    /// The files that changed. `None` if the file does not exist.
    Some(Vec<(Id, Option<Look>)>),
}

/// What was read of the directory.
struct Reading {
    found: Found,
    net_conf: Option<String>,
    inodes: Inodes,
}

/// Reads all leases or those with these ids, net-conf, and the inodes of the directories.
fn read(files: &Files, all: bool, names: Vec<Id>) -> Result<Reading, Error> {
    let found = if all {
        Found::All(files.look_at_all()?)
    } else {
        Found::Some(names.into_iter().map(|id| (id.clone(), files.look(&id))).collect())
    };
    Ok(Reading { found, net_conf: files.config()?, inodes: inodes(files)? })
}

/// Updates `reported` with what was found, and returns the changes: first the records that were deleted, then those that were written.
///
/// A lease whose file cannot be read any more stays as it was reported. The file is read again with all others.
///
/// A record that was written and deleted between two readings is also reported as deleted, because it may be our own lease.
fn difference(
    reported: &mut BTreeMap<Id, Option<Record>>,
    found: Found,
    touched: &BTreeMap<Id, bool>,
) -> Vec<RecordChange> {
    let now = match found {
        Found::Some(now) => now,
        Found::All(looks) => {
            let mut now: BTreeMap<Id, Option<Look>> = reported.keys().map(|id| (id.clone(), None)).collect();
            now.extend(touched.keys().map(|id| (id.clone(), None)));
            now.extend(looks.into_iter().map(|look| (look.record.id.clone(), Some(look))));
            now.into_iter().collect()
        }
    };
    let (mut gone, mut put) = (Vec::new(), Vec::new());
    for (id, look) in now {
        if look.as_ref().is_some_and(|look| stays(look, reported.get(&id)).is_some()) {
            continue;
        }
        match look.map(|look| look.record) {
            Some(record) if reported.get(&id).is_some_and(|old| old.as_ref() == Some(&record)) => {}
            Some(record) => {
                reported.insert(id, Some(record.clone()));
                put.push(RecordChange::Written(record));
            }
            None => {
                let short_lived = touched.get(&id) == Some(&true) && Subnets::from_key(&id).is_some();
                if reported.remove(&id).is_some() || short_lived {
                    gone.push(RecordChange::Removed(id));
                }
            }
        }
    }
    gone.append(&mut put);
    gone
}

/// Reports net-conf if there is one, and it differs from the last one. Returns false if nobody receives the events any more.
async fn report_config(store: &DirStore, out: &mpsc::Sender<Event>, text: Option<String>) -> bool {
    match text {
        Some(text) => store.last_net_conf.report(text, out).await,
        None => true,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use tokio::time::sleep;

    use super::*;
    use crate::attrs::Attrs;
    use crate::lease::{Age, Lease, Unreadable};

    #[tokio::test]
    async fn all_files_are_read_after_a_change_and_once_more() {
        let at = |(seconds, nanoseconds)| SystemTime::UNIX_EPOCH + Duration::new(seconds, nanoseconds);
        let mut poll = Poll::new(at((1, 0)));
        let times = [(1, 0), (1, 0), (2, 0), (2, 0), (2, 0), (2, 1), (1, 0), (1, 0), (1, 0)].map(at);
        let wanted = [true, false, true, true, false, true, true, true, false];
        assert_eq!(times.map(|modified| poll.must_read(modified)), wanted);
    }

    #[test]
    fn a_lease_stays_while_the_disk_fails() {
        let id = Id::from("10.5.1.0-24");
        let lease = Lease {
            id: id.clone(),
            subnets: Subnets::from_key(&id).unwrap(),
            attrs: Attrs::default(),
            age: Age { stamp: 1, tie: Arc::default() },
        };
        let lease = Record { id: id.clone(), lease: Ok(lease) };
        let bad =
            |has_failed| Look { record: Record { id: id.clone(), lease: Err(Unreadable::new("EIO")) }, has_failed };
        let mut reported = BTreeMap::from([(id.clone(), Some(lease.clone()))]);
        let mut difference = |found| difference(&mut reported, found, &BTreeMap::new());
        assert_eq!(difference(Found::All(vec![bad(true)])), []);
        assert_eq!(difference(Found::Some(vec![(id.clone(), Some(bad(true)))])), []);
        assert_eq!(
            difference(Found::All(vec![bad(false)])),
            [RecordChange::Written(bad(false).record)],
            "its value is not one of a lease"
        );
        assert_eq!(
            difference(Found::All(vec![Look { record: lease.clone(), has_failed: false }])),
            [RecordChange::Written(lease)]
        );
        assert_eq!(difference(Found::All(Vec::new())), [RecordChange::Removed(id.clone())]);
    }

    #[test]
    fn only_what_the_host_may_have_again_leads_to_polling() {
        for errno in [Errno::EMFILE, Errno::ENFILE, Errno::ENOSPC, Errno::ENOMEM] {
            assert!(is_exhausted(errno), "{errno}");
        }
        for errno in [Errno::ENOENT, Errno::EACCES, Errno::ENOTDIR] {
            assert!(!is_exhausted(errno), "{errno}");
        }
    }

    /// Makes the store in this directory, and watches it.
    async fn watched(dir: &Path) -> Watch {
        let files = Files::new(dir.into());
        files.make().unwrap();
        let opened = loop {
            match open(&files) {
                // Other tests have all inotify instances at this moment.
                Err(errno) if is_exhausted(errno) => sleep(Duration::from_millis(10)).await,
                opened => break opened.unwrap(),
            }
        };
        Watch::new(opened).unwrap()
    }

    /// Events tell nothing of files that another host writes.
    #[tokio::test]
    async fn constant_changes_do_not_delay_the_reading_of_all_files() {
        let dir = tempfile::tempdir().unwrap();
        let watch = watched(dir.path()).await;
        for (left, all) in [(READ_ALL_EVERY, false), (Duration::ZERO, true)] {
            fs::write(dir.path().join("subnets/10.5.1.0-24.json"), "{}").unwrap();
            // The events are there before the wait begins, also if it has no time left.
            watch.inotify.readable().await.unwrap().retain_ready();
            let to_read = wait_for_inotify(&watch, Instant::now() + left).await.unwrap();
            assert_eq!((to_read.all, to_read.touched.len()), (all, 1), "{left:?}");
        }
    }

    /// If too many events wait, the kernel drops the others, and says so with an event that names no file.
    #[tokio::test]
    async fn all_files_are_read_after_events_were_lost() {
        let dir = tempfile::tempdir().unwrap();
        let watch = watched(dir.path()).await;
        let mut to_read = ToRead::default();
        let mut comes = |mask, name: Option<&str>| {
            let event = InotifyEvent { wd: watch.subnets, mask, cookie: 0, name: name.map(Into::into) };
            add(&mut to_read, &watch, &event);
            (to_read.all, to_read.touched.values().copied().collect::<Vec<_>>())
        };
        let file = Some("10.5.1.0-24.json");
        assert_eq!(comes(AddWatchFlags::IN_CLOSE_WRITE, Some("README")), (false, Vec::new()));
        assert_eq!(comes(AddWatchFlags::IN_CLOSE_WRITE, file), (false, vec![false]));
        assert_eq!(comes(AddWatchFlags::IN_DELETE, file), (false, vec![true]));
        assert_eq!(comes(AddWatchFlags::IN_CREATE, file), (false, vec![true]), "it was deleted, and is there again");
        assert!(comes(AddWatchFlags::IN_Q_OVERFLOW, None).0);
    }

    #[tokio::test(start_paused = true)]
    async fn the_pause_is_ten_times_as_long_as_the_reading_took() {
        let mut poll = Poll::new(SystemTime::UNIX_EPOCH);
        for (reading, pause) in [(0, 1_000), (99, 1_000), (700, 7_000)] {
            poll.pause(Duration::from_millis(reading));
            assert_eq!(poll.next - Instant::now(), Duration::from_millis(pause), "after {reading} ms");
        }
    }
}
