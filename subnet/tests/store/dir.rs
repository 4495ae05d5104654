// SPDX-License-Identifier: Apache-2.0
//! What only the directory store does: the exact bytes of a file, and a directory that vanishes and returns.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::Mode;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use weft_backends::register::TYPES;
use weft_subnet::dir::DirStore;
use weft_subnet::evidence::Evidence;
use weft_subnet::net_conf::Range;
use weft_subnet::retry::chain;
use weft_subnet::source::{Error, Event, LeaseRequest, RecordChange, Source};

use super::contract::{PATIENCE, any, attrs, next_within, request, subnet, until, within};

/// The time limit of a step. It is long enough for a busy machine, and shorter than the limit of the store for work that hangs and than
/// the interval at which it reads all files.
pub const LIMIT: Duration = Duration::from_secs(20);

async fn next(events: &mut mpsc::Receiver<Event>) -> Event {
    next_within(events, LIMIT).await
}

fn is_failure(event: &Event) -> bool {
    matches!(event, Event::Unreachable(_))
}

#[tokio::test]
async fn a_file_contains_the_value_of_etcd_and_its_age() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made/by/us");
    let store = DirStore::new(path.clone(), TYPES);
    let lease = store.acquire(&LeaseRequest { previous: Some(subnet("10.5.52.0/24")), ..request(3) }).await.unwrap();
    let file = path.join("subnets/10.5.52.0-24.json");
    let wire = attrs(3).to_wire();
    let expected = format!("{},\"Created\":{}}}\n", wire.strip_suffix('}').unwrap(), lease.age.stamp);
    assert_eq!(fs::read_to_string(&file).unwrap(), expected);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
    assert_eq!(fs::read_dir(path.join("subnets")).unwrap().count(), 1, "nothing is left aside");
}

#[tokio::test]
async fn hidden_and_unrelated_files_are_not_leases() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let lease = store.acquire(&request(1)).await.unwrap();
    for name in [".10.5.9.0-24.json", "10.5.9.0-24.json~", "README"] {
        fs::write(dir.path().join("subnets").join(name), "{}").unwrap();
    }
    let ids: Vec<_> = store.list().await.unwrap().into_iter().map(|record| record.id).collect();
    assert_eq!(ids, [lease.id]);
    assert!(matches!(store.remove("../config").await, Err(Error::Invalid(_))));
}

#[tokio::test]
async fn a_file_larger_than_the_memory_is_set_aside_without_being_read() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let lease = store.acquire(&request(1)).await.unwrap();
    // The file is sparse and takes no space on the disk. To read all of it would take a terabyte of memory.
    let sparse = |name: &str| fs::File::create(dir.path().join(name)).unwrap().set_len(1 << 40).unwrap();
    sparse("subnets/10.5.200.0-24.json");
    sparse("subnets/two\nlines.json");
    let records = store.list().await.unwrap();
    let (good, bad): (Vec<_>, Vec<_>) = records.into_iter().partition(|record| record.lease.is_ok());
    assert_eq!(good.len(), 1);
    assert_eq!(good[0].id, lease.id);
    assert_eq!(bad.len(), 1, "a name of two lines is no lease's");
    assert_eq!(bad[0].lease.as_ref().unwrap_err().as_str(), "value is not a lease: it is larger than 4096 bytes");
    sparse("config.json");
    let config = store.config().await.unwrap();
    assert!(
        weft_subnet::net_conf::NetConf::parse(&config).unwrap_err().to_string().contains("larger than 65536 bytes")
    );
}

/// Other programs write files without an age. Such a lease counts as the youngest one until its node writes it again.
#[tokio::test]
async fn a_file_without_an_age_gets_one_when_it_is_rewritten() {
    let dir = tempfile::tempdir().unwrap();
    let (store, ours) = (DirStore::new(dir.path().into(), TYPES), subnet("10.5.7.0/24"));
    fs::create_dir(dir.path().join("subnets")).unwrap();
    fs::write(dir.path().join("subnets/10.5.7.0-24.json"), attrs(1).to_wire()).unwrap();
    let now = || u64::try_from(UNIX_EPOCH.elapsed().unwrap().as_nanos()).unwrap();
    let before = now();
    let lease = store.retake(&ours, &attrs(1), &attrs(2)).await.unwrap();
    assert!((before..=now()).contains(&lease.age.stamp), "{:?}", lease.age);
    assert_eq!(store.retake(&ours, &attrs(2), &attrs(1)).await.unwrap().age, lease.age, "it stays that old");
}

/// The files may be those of another store, which an operator copied. A lease that stayed the youngest would give way to every new one.
#[tokio::test]
async fn a_file_without_an_age_gets_one_although_nothing_else_changes() {
    let dir = tempfile::tempdir().unwrap();
    let (store, ours) = (DirStore::new(dir.path().into(), TYPES), subnet("10.5.7.0/24"));
    let file = dir.path().join("subnets/10.5.7.0-24.json");
    fs::create_dir(dir.path().join("subnets")).unwrap();
    for starts in [false, true] {
        fs::write(&file, attrs(1).to_wire()).unwrap();
        let lease = if starts {
            store.acquire(&LeaseRequest { previous: Some(ours), ..request(1) }).await.unwrap()
        } else {
            store.retake(&ours, &attrs(1), &attrs(1)).await.unwrap()
        };
        assert_ne!(lease.age.stamp, u64::MAX, "{starts}");
        let written = fs::read_to_string(&file).unwrap();
        assert!(written.contains(&format!("\"Created\":{}", lease.age.stamp)), "{written}");
    }
}

/// It may be our own lease, which somebody has put there and removed.
#[tokio::test]
async fn a_record_that_was_written_and_deleted_between_two_readings_is_reported_as_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let file = |name: &str| dir.path().join("subnets").join(name);
    fs::create_dir(dir.path().join("subnets")).unwrap();
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        // The watch does not run between these operations, because this thread does not wait for anything.
        for name in ["10.5.1.0-24.json", "10.5.2.0-24.json", "garbage.json"] {
            fs::write(file(name), attrs(1).to_wire()).unwrap();
            fs::remove_file(file(name)).unwrap();
        }
        fs::write(file("10.5.2.0-24.json"), attrs(2).to_wire()).unwrap();
        let Event::Changes(changes) = next(&mut events).await else { panic!("changes") };
        let (gone, put): (Vec<_>, Vec<_>) = changes.into_iter().partition(|change| change.removed().is_some());
        assert_eq!(gone, [RecordChange::Removed("10.5.1.0-24".into())]);
        assert_eq!(
            put.iter().filter_map(RecordChange::written).map(|record| &*record.id).collect::<Vec<_>>(),
            ["10.5.2.0-24"]
        );
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

/// The watch may see two writes as one. Then the file is as it was reported last, but our own write between them is lost.
#[tokio::test]
async fn a_value_that_replaces_our_own_write_is_reported_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let lease = store.acquire(&request(1)).await.unwrap();
    let file = dir.path().join("subnets").join(format!("{}.json", lease.id));
    // This lease has another address, and our MAC.
    let theirs = weft_subnet::attrs::Attrs { public_ip: attrs(9).public_ip, ..attrs(1) };
    let overwrite = || {
        let aside = dir.path().join("aside");
        fs::write(&aside, theirs.to_wire()).unwrap();
        fs::rename(aside, &file).unwrap();
    };
    let (out, mut events) = mpsc::channel(64);
    let mut watch = store.watch(out);
    for round in 0..3 {
        let told = async {
            loop {
                match next(&mut events).await {
                    Event::Changes(changes) => {
                        return changes
                            .iter()
                            .filter_map(RecordChange::written)
                            .next_back()
                            .unwrap()
                            .lease
                            .clone()
                            .unwrap();
                    }
                    // This is the first event. The file is overwritten only now.
                    Event::Snapshot { .. } => overwrite(),
                    event => panic!("{event:?}"),
                }
            }
        };
        let told = tokio::select! {
            () = &mut watch => panic!("the watch ended"),
            told = told => told,
        };
        assert_eq!(told.attrs, theirs, "round {round}");
        // The watch does not run meanwhile.
        store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.unwrap();
        overwrite();
    }
}

#[tokio::test]
async fn a_directory_that_vanished_is_not_created_again_and_is_watched_when_it_returns() {
    let dir = tempfile::tempdir().unwrap();
    let (path, away) = (dir.path().join("store"), dir.path().join("away"));
    let store = DirStore::new(path.clone(), TYPES);
    let lease = store.acquire(&request(1)).await.unwrap();
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        fs::rename(&path, &away).unwrap();
        until(&mut events, "the report that the directory is gone", is_failure).await;
        assert!(matches!(store.list().await, Err(Error::Unavailable { .. })), "gone is not empty");
        assert!(matches!(store.config().await, Err(Error::Unavailable { .. })), "gone is not empty");
        assert!(!path.exists());
        fs::rename(&away, &path).unwrap();
        let Event::Snapshot { records, reset } = next(&mut events).await else { panic!("looks again as a whole") };
        assert_eq!((records.len(), reset), (1, false));
        fs::rename(&path, &away).unwrap();
        fs::create_dir_all(path.join("subnets")).unwrap();
        assert_eq!(next(&mut events).await, Event::Snapshot { records: Vec::new(), reset: true });
        let again = store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.unwrap();
        assert_eq!(again.subnets, lease.subnets);
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

#[tokio::test]
async fn a_file_that_is_moved_away_or_back_is_noticed_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let lease = store.acquire(&request(1)).await.unwrap();
    let (file, away) = (dir.path().join(format!("subnets/{}.json", lease.id)), dir.path().join("away"));
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        fs::rename(&file, &away).unwrap();
        assert_eq!(next(&mut events).await, Event::Changes(vec![RecordChange::Removed(lease.id.clone())]));
        fs::rename(&away, &file).unwrap();
        let Event::Changes(changes) = next(&mut events).await else { panic!("changes") };
        assert_eq!(changes[0].written().unwrap().lease.as_ref(), Ok(&lease));
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

#[tokio::test]
async fn a_net_conf_that_was_deleted_stays_in_force_until_there_is_another() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let config = dir.path().join("config.json");
    let net_conf = |number: u8| format!(r#"{{"Network":"10.{number}.0.0/16"}}"#);
    let write = |text: String| {
        let aside = dir.path().join("aside");
        fs::write(&aside, text).unwrap();
        fs::rename(aside, &config).unwrap();
    };
    write(net_conf(1));
    assert_eq!(store.config().await.unwrap(), net_conf(1));
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        fs::remove_file(&config).unwrap();
        until(&mut events, "the answer after the removal", |event| *event == Event::Answered).await;
        write(net_conf(1));
        store.acquire(&request(1)).await.unwrap();
        assert!(matches!(next(&mut events).await, Event::Changes(_)), "the same text is no change");
        write(net_conf(2));
        assert_eq!(next(&mut events).await, Event::Config(net_conf(2)));
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

/// Another host, or a program that hangs, holds the lock.
#[tokio::test(start_paused = true)]
async fn a_lock_is_waited_for_but_not_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let lease = store.acquire(&request(1)).await.unwrap();
    let lock = OpenOptions::new().write(true).open(dir.path().join(".lock")).unwrap();
    let held = Flock::lock(lock, FlockArg::LockExclusiveNonblock).unwrap_or_else(|(_, errno)| panic!("{errno}"));
    let begin = Instant::now();
    let error = store.acquire(&request(2)).await.unwrap_err();
    assert!(matches!(error, Error::Unavailable { .. }) && error.to_string().starts_with("lock "), "{error}");
    assert!((5..7).contains(&begin.elapsed().as_secs()), "{:?}", begin.elapsed());
    let others = [
        store.retake(&lease.subnets, &attrs(1), &attrs(2)).await.err(),
        store.release(&lease).await.err(),
        store.remove(&lease.id).await.err(),
    ];
    for error in others {
        let text = error.map(|error| error.to_string());
        assert!(text.as_ref().is_some_and(|text| text.starts_with("lock ")), "{text:?}");
    }
    let left = store.list().await.unwrap();
    assert_eq!(left.iter().map(|record| record.lease.as_ref().ok()).collect::<Vec<_>>(), [Some(&lease)]);
    let ends = async {
        sleep(Duration::from_secs(2)).await;
        drop(held);
    };
    let request = request(2);
    let (lease, ()) = tokio::join!(store.acquire(&request), ends);
    lease.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_lease_of_a_directory_is_reported_as_kept_each_minute() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let lease = store.acquire(&request(1)).await.unwrap();
    let (out, mut keeps) = mpsc::channel(1);
    let begin = Instant::now();
    let body = async {
        for minutes in 0..3 {
            assert_eq!(any(&mut keeps).await, Event::Renewed(None));
            assert_eq!(begin.elapsed().as_secs(), minutes * 60);
        }
    };
    tokio::select! {
        () = store.keep(&lease, out) => panic!("the keeper ended"),
        () = body => {}
    }
}

/// Everything that may have the name of a lease file but is not a regular file. To read a FIFO would wait for a writer forever.
#[tokio::test]
async fn what_is_not_a_regular_file_is_set_aside_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let lease = store.acquire(&request(1)).await.unwrap();
    let file = |number: u8| dir.path().join(format!("subnets/10.6.{number}.0-24.json"));
    nix::unistd::mkfifo(&file(1), Mode::S_IRWXU).unwrap();
    fs::create_dir(file(2)).unwrap();
    let _socket = UnixListener::bind(file(3)).unwrap();
    symlink(file(4), file(4)).unwrap();
    symlink("/dev/zero", file(5)).unwrap();
    symlink(file(1), file(6)).unwrap();
    let records = timeout(LIMIT, store.list()).await.expect("a reader that waits for a FIFO's writer").unwrap();
    let reason = |number: u8| {
        let id = format!("10.6.{number}.0-24");
        let record = records.iter().find(|record| *record.id == *id).unwrap_or_else(|| panic!("{id}: {records:?}"));
        record.lease.clone().unwrap_err().to_string()
    };
    let rows = ["a FIFO", "a directory", "a socket", "Too many levels of symbolic links", "a device", "a FIFO"];
    for (number, what) in (1..).zip(rows) {
        assert!(reason(number).contains(what), "{number}: {}", reason(number));
        assert!(reason(number).contains(&file(number).display().to_string()), "{}", reason(number));
    }
    assert_eq!(records.iter().filter(|record| record.lease.is_ok()).count(), 1, "the lease beside them is read");
    // Leases can still be written, and a FIFO can be removed by its id.
    let again = timeout(LIMIT, store.retake(&lease.subnets, &attrs(1), &attrs(2))).await.unwrap().unwrap();
    assert_eq!(again.attrs, attrs(2));
    // No disk has failed, so one of them gives way to our own lease.
    let taken = timeout(LIMIT, store.retake(&subnet("10.6.6.0/24"), &attrs(1), &attrs(1))).await.unwrap().unwrap();
    assert_eq!((taken.subnets, &taken.attrs), (subnet("10.6.6.0/24"), &attrs(1)));
    timeout(LIMIT, store.remove("10.6.1.0-24")).await.unwrap().unwrap();
    assert!(!file(1).exists(), "it can be removed by its id");
}

/// A file that cannot be read for a moment, and the value that it has before and afterwards.
struct Failing {
    path: PathBuf,
    value: Vec<u8>,
}

impl Failing {
    /// Makes the file one that cannot be read: a symbolic link that leads to itself.
    fn begin(path: PathBuf) -> Failing {
        let value = fs::read(&path).unwrap();
        fs::remove_file(&path).unwrap();
        symlink(path.file_name().unwrap(), &path).unwrap();
        Failing { path, value }
    }

    fn end(self) {
        let aside = self.path.with_file_name(".aside");
        fs::write(&aside, self.value).unwrap();
        fs::rename(aside, &self.path).unwrap();
    }
}

#[tokio::test]
async fn a_disk_that_fails_for_a_moment_costs_the_node_no_lease() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let lease = store.acquire(&request(1)).await.unwrap();
    let failing = Failing::begin(dir.path().join(format!("subnets/{}.json", lease.id)));
    let restarted = LeaseRequest { previous: Some(lease.subnets), was: Some(attrs(1)), ..request(1) };
    let evidence = Evidence::of(TYPES, lease.subnets, &lease.attrs);
    let errors = [
        ("own", store.own(&evidence).await.unwrap_err()),
        ("acquire", store.acquire(&restarted).await.unwrap_err()),
        ("retake", store.retake(&lease.subnets, &attrs(1), &attrs(2)).await.unwrap_err()),
        ("release", store.release(&lease).await.unwrap_err()),
    ];
    for (what, error) in errors {
        assert!(matches!(error, Error::Unavailable { .. }), "{what}: {error:?}");
        let text = format!("cannot read {}: Too many levels of symbolic links", failing.path.display());
        assert!(error.to_string().contains(&text), "{what}: {error}");
    }
    // A node that knows no subnet takes another one.
    let other = store.acquire(&request(2)).await.unwrap();
    assert_ne!(other.subnets, lease.subnets);
    failing.end();
    assert_eq!(store.own(&evidence).await.unwrap().as_ref(), Some(&lease));
    assert_eq!(store.acquire(&restarted).await.unwrap(), lease, "with its age");
}

/// Returns what a node asks for when net-conf has been given a range of IPv6.
fn dual(last: u8) -> LeaseRequest {
    let network = "fd00:12::/48".parse().unwrap();
    let mut dual = LeaseRequest { was: Some(attrs(last)), ..request(last) };
    dual.net_conf.networks.v6 = Some(network);
    let (min, max) = ("fd00:12:0:1::".parse().unwrap(), "fd00:12:0:ff::".parse().unwrap());
    dual.net_conf.v6 = Some(Range { network, len: 64, min, max });
    dual
}

/// The old lease cannot be deleted, because its file is the place of a mount. Leases of a directory do not end, so each attempt that left
/// its new lease behind would take one more subnet for ever.
#[test]
fn a_lease_that_cannot_be_replaced_leaves_no_second_one() {
    // A thread of its own, because the mount is in a namespace of its own.
    let test = std::thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let nothing = None::<&str>;
        mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let dir = tempfile::tempdir().unwrap();
            let store = DirStore::new(dir.path().into(), TYPES);
            let ids = async || store.list().await.unwrap().into_iter().map(|record| record.id).collect::<Vec<_>>();
            let single = store.acquire(&request(1)).await.unwrap();
            let file = dir.path().join(format!("subnets/{}.json", single.id));
            mount(Some(&file), &file, nothing, MsFlags::MS_BIND, nothing).unwrap();
            for _ in 0..3 {
                store.acquire(&dual(1)).await.unwrap_err();
                assert_eq!(ids().await, std::slice::from_ref(&single.id));
            }
            umount(&file).unwrap();
            let both = store.acquire(&dual(1)).await.unwrap();
            assert_eq!(ids().await, [both.id]);
        });
    });
    test.join().unwrap();
}

#[tokio::test]
async fn a_lease_stays_if_its_file_cannot_be_read_when_the_watch_begins_again() {
    let dir = tempfile::tempdir().unwrap();
    let (path, away) = (dir.path().join("store"), dir.path().join("away"));
    let store = DirStore::new(path.clone(), TYPES);
    let lease = store.acquire(&request(1)).await.unwrap();
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        fs::rename(&path, &away).unwrap();
        until(&mut events, "the report that the directory is gone", is_failure).await;
        let file = format!("subnets/{}.json", lease.id);
        Failing::begin(away.join(&file));
        fs::rename(&away, &path).unwrap();
        let Event::Snapshot { records, reset } = next(&mut events).await else { panic!("a snapshot") };
        assert_eq!((records.len(), reset), (1, false));
        assert_eq!(records[0].lease.as_ref(), Ok(&lease));
        // When the file is read again, what changed meanwhile is reported.
        Failing { path: path.join(&file), value: attrs(2).to_wire().into_bytes() }.end();
        let Event::Changes(changes) = next(&mut events).await else { panic!("changes") };
        assert_eq!(changes.last().unwrap().written().unwrap().lease.as_ref().unwrap().attrs, attrs(2));
        // Of another store nothing is known.
        let new = dir.path().join("new");
        fs::create_dir_all(new.join("subnets")).unwrap();
        fs::write(new.join(&file), attrs(2).to_wire()).unwrap();
        Failing::begin(new.join(&file));
        fs::rename(&path, &away).unwrap();
        fs::rename(&new, &path).unwrap();
        let Event::Snapshot { records, reset } = next(&mut events).await else { panic!("a snapshot") };
        assert!(reset && records[0].lease.is_err(), "{records:?}");
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

#[tokio::test]
async fn a_fifo_as_net_conf_or_lock_is_an_error_and_does_not_block() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    store.acquire(&request(1)).await.unwrap();
    for (name, what) in [("config.json", "read"), (".lock", "open")] {
        let path = dir.path().join(name);
        let _ = fs::remove_file(&path);
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        let answer = async {
            if name == ".lock" { store.acquire(&request(2)).await.map(drop) } else { store.config().await.map(drop) }
        };
        let error = chain(&timeout(LIMIT, answer).await.expect("it blocks").unwrap_err());
        assert!(error.contains(&format!("{what} {}", path.display())) && error.contains("a FIFO"), "{error}");
        fs::remove_file(&path).unwrap();
    }
    store.acquire(&request(2)).await.unwrap();
}

/// Whoever can write into the directory must not choose where the agent of each node creates a file.
#[tokio::test]
async fn a_symbolic_link_as_lock_is_an_error_and_is_not_followed() {
    let (dir, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (path, target) = (dir.path().join(".lock"), elsewhere.path().join("target"));
    symlink(&target, &path).unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let error = chain(&store.acquire(&request(1)).await.unwrap_err());
    let wanted = format!("open {}", path.display());
    assert!(error.contains(&wanted) && error.contains("Too many levels of symbolic links"), "{error}");
    assert!(!target.exists(), "the link was followed");
    fs::remove_file(&path).unwrap();
    store.acquire(&request(1)).await.unwrap();
}

/// Runs in a user namespace with its own limit of inotify instances.
#[test]
fn without_an_inotify_instance_the_directory_is_polled() {
    if std::env::var_os(LIMITED).is_none() {
        let this = "dir::without_an_inotify_instance_the_directory_is_polled";
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--user", "--map-root-user"]).arg(std::env::current_exe().unwrap());
        let out = unshare.args(["--exact", this, "--nocapture"]).env(LIMITED, "1").output().unwrap();
        assert!(
            out.status.success(),
            "{}\n{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
        assert!(String::from_utf8_lossy(&out.stdout).contains("1 passed"), "{out:?}");
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(limited());
}

/// The variable that tells the test above that it runs in its own user namespace.
const LIMITED: &str = "WEFT_TEST_LIMITED";

fn instances(free: u32) {
    fs::write("/proc/sys/user/max_inotify_instances", free.to_string()).unwrap();
}

async fn limited() {
    instances(0);
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    store.acquire(&request(1)).await.unwrap();
    let file = |name: &str| dir.path().join("subnets").join(name);
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        let first = timeout(LIMIT, events.recv()).await.expect("a list, although nothing can be watched");
        assert!(matches!(first, Some(Event::Snapshot { .. })), "{first:?}");
        let remark = store.remark().expect("a remark for status");
        assert!(remark.contains("fs.inotify.max_user_instances") && remark.contains("every second"), "{remark}");
        for number in [2, 3] {
            // Tools that synchronise files write in this way: the second file right after the first one was noticed.
            let aside = dir.path().join("aside");
            fs::write(&aside, attrs(number).to_wire()).unwrap();
            fs::rename(&aside, file(&format!("10.5.{number}.0-24.json"))).unwrap();
            let seen = timeout(LIMIT, changed(&mut events)).await.expect("a new file");
            assert_eq!(seen, [format!("10.5.{number}.0-24")]);
        }
        fs::remove_file(file("10.5.2.0-24.json")).unwrap();
        let gone = async {
            loop {
                if let Event::Changes(changes) = events.recv().await.unwrap() {
                    return changes;
                }
            }
        };
        assert_eq!(
            timeout(LIMIT, gone).await.expect("a file that went"),
            [RecordChange::Removed("10.5.2.0-24".into())]
        );
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        store.config().await.unwrap();
        let (begin, edited) = (Instant::now(), r#"{"Network":"10.0.0.0/8"}"#);
        fs::write(dir.path().join("config.json"), edited).unwrap();
        // The watch may have read the first text before the test did, and reported it, too.
        let config = async { while events.recv().await.unwrap() != Event::Config(edited.to_owned()) {} };
        timeout(LIMIT, config).await.expect("an edited net-conf");
        // Each check ends with an answer, and nothing has changed for these three, so the last one reads no lease.
        for _ in 0..3 {
            assert_eq!(timeout(LIMIT, events.recv()).await.expect("an answer"), Some(Event::Answered));
        }
        assert!(begin.elapsed() >= Duration::from_secs(2), "two pauses took {:?}", begin.elapsed());
        // A file that is edited in its place does not change the directory. It is read when the directory can be watched again.
        fs::write(file("10.5.3.0-24.json"), attrs(4).to_wire()).unwrap();
        instances(16);
        assert_eq!(timeout(LIMIT, changed(&mut events)).await.expect("a new look at all files"), ["10.5.3.0-24"]);
        let heard = async {
            while store.remark().is_some() {
                events.recv().await.unwrap();
            }
        };
        timeout(LIMIT, heard).await.expect("it watches again once it can");
        fs::write(file("10.5.9.0-24.json"), attrs(9).to_wire()).unwrap();
        assert_eq!(timeout(LIMIT, changed(&mut events)).await.expect("told by inotify"), ["10.5.9.0-24"]);
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

#[tokio::test(start_paused = true)]
async fn an_event_names_the_file_to_read_and_all_files_are_read_every_30_s() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into(), TYPES);
    let file = |name: &str| dir.path().join("subnets").join(name);
    fs::create_dir(dir.path().join("subnets")).unwrap();
    fs::write(file("10.5.1.0-24.json"), attrs(1).to_wire()).unwrap();
    fs::write(file("10.5.2.0-24.json"), attrs(2).to_wire()).unwrap();
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        // inotify reports a write when the file is closed. Until then this is like a file that another machine wrote.
        let quiet = OpenOptions::new().write(true).open(file("10.5.2.0-24.json")).unwrap();
        quiet.write_all_at(attrs(4).to_wire().as_bytes(), 0).unwrap();
        fs::write(file("10.5.1.0-24.json"), attrs(3).to_wire()).unwrap();
        let begin = Instant::now();
        assert_eq!(changed(&mut events).await, ["10.5.1.0-24"], "an event must lead to the file that it names");
        assert_eq!(changed(&mut events).await, ["10.5.2.0-24"], "all files must be read after 30 s");
        assert!(begin.elapsed() >= Duration::from_secs(20), "all files must not be read after {:?}", begin.elapsed());
        let begin = Instant::now();
        quiet.write_all_at(attrs(5).to_wire().as_bytes(), 0).unwrap();
        assert_eq!(changed(&mut events).await, ["10.5.2.0-24"], "and every 30 s after that");
        assert!(
            begin.elapsed() >= Duration::from_secs(20),
            "all files are read without a pause: {:?}",
            begin.elapsed()
        );
        drop(quiet);
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

/// Returns the ids of the next changes.
async fn changed(events: &mut mpsc::Receiver<Event>) -> Vec<String> {
    let wait = async {
        loop {
            match events.recv().await.unwrap() {
                Event::Answered => {}
                Event::Changes(changes) => {
                    return changes.iter().map(|change| change.written().unwrap().id.to_string()).collect();
                }
                other => panic!("{other:?}"),
            }
        }
    };
    within(PATIENCE, "a changed lease", wait).await
}
