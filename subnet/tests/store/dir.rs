// SPDX-License-Identifier: Apache-2.0
//! What is the directory's alone: the file's bytes, a directory that goes and comes back.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::time::Duration;

use nix::libc::O_NONBLOCK;
use nix::sys::stat::Mode;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};
use weft_subnet::dir::DirStore;
use weft_subnet::source::{Claim, Error, Event, Source};

use super::contract::{attrs, claim, next, subnet};

#[tokio::test]
async fn file_is_the_wire_value_and_its_age() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("made/by/us");
    let store = DirStore::new(path.clone());
    let lease = store.acquire(&Claim { previous: Some(subnet("10.5.52.0/24")), ..claim(3) }).await.unwrap();
    let file = path.join("subnets/10.5.52.0-24.json");
    let wire = attrs(3).to_wire();
    let expected = format!("{},\"Created\":{}}}\n", wire.strip_suffix('}').unwrap(), lease.age.stamp);
    assert_eq!(fs::read_to_string(&file).unwrap(), expected);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
    assert_eq!(fs::read_dir(path.join("subnets")).unwrap().count(), 1, "nothing is left aside");
}

#[tokio::test]
async fn hidden_and_foreign_files_are_not_leases() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into());
    let lease = store.acquire(&claim(1)).await.unwrap();
    for name in [".10.5.9.0-24.json", "10.5.9.0-24.json~", "README"] {
        fs::write(dir.path().join("subnets").join(name), "{}").unwrap();
    }
    let ids: Vec<_> = store.list().await.unwrap().into_iter().map(|record| record.id).collect();
    assert_eq!(ids, [lease.id]);
    assert!(matches!(store.remove("../config").await, Err(Error::Invalid(_))));
}

#[tokio::test]
async fn vanished_directory_is_followed_and_not_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let (path, away) = (dir.path().join("store"), dir.path().join("away"));
    let store = DirStore::new(path.clone());
    let lease = store.acquire(&claim(1)).await.unwrap();
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        fs::rename(&path, &away).unwrap();
        while !matches!(events.recv().await.unwrap(), Event::Trouble(_)) {}
        assert!(matches!(store.list().await, Err(Error::Unavailable { .. })), "gone is not empty");
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
async fn a_file_system_that_hangs_holds_nothing_else_up() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into());
    let lease = store.acquire(&claim(1)).await.unwrap();
    // Opening it hangs until somebody writes.
    let fifo = dir.path().join("subnets/10.5.99.0-24.json");
    nix::unistd::mkfifo(&fifo, Mode::S_IRWXU).unwrap();
    let elsewhere = async {
        loop {
            match OpenOptions::new().write(true).custom_flags(O_NONBLOCK).open(&fifo) {
                Ok(writer) => break drop(writer),
                Err(nobody_reads) => assert_eq!(nobody_reads.raw_os_error(), Some(nix::libc::ENXIO)),
            }
            sleep(Duration::from_millis(1)).await;
        }
    };
    let (records, ()) = tokio::join!(store.list(), elsewhere);
    let records = records.unwrap();
    let ids: Vec<_> = records.iter().map(|record| (&record.id, record.lease.is_ok())).collect();
    let mut expected = [(&lease.id, true), (&"10.5.99.0-24".into(), false)];
    expected.sort();
    assert_eq!(ids, expected);
}

#[tokio::test(start_paused = true)]
async fn an_event_reads_the_files_it_names_and_the_slow_poll_all() {
    let dir = tempfile::tempdir().unwrap();
    let store = DirStore::new(dir.path().into());
    let file = |name: &str| dir.path().join("subnets").join(name);
    fs::create_dir(dir.path().join("subnets")).unwrap();
    fs::write(file("10.5.1.0-24.json"), attrs(1).to_wire()).unwrap();
    fs::write(file("10.5.2.0-24.json"), attrs(2).to_wire()).unwrap();
    let (out, mut events) = mpsc::channel(64);
    let body = async {
        assert!(matches!(next(&mut events).await, Event::Snapshot { .. }));
        // While it is open nobody is told that it changed, as with a file that another machine wrote.
        let quiet = OpenOptions::new().write(true).open(file("10.5.2.0-24.json")).unwrap();
        quiet.write_all_at(attrs(4).to_wire().as_bytes(), 0).unwrap();
        fs::write(file("10.5.1.0-24.json"), attrs(3).to_wire()).unwrap();
        let begin = Instant::now();
        assert_eq!(changed(&mut events).await, ["10.5.1.0-24"], "the file that was named");
        assert_eq!(changed(&mut events).await, ["10.5.2.0-24"], "everything");
        assert!(begin.elapsed() >= Duration::from_secs(20), "{:?} is no slow poll", begin.elapsed());
        drop(quiet);
    };
    tokio::select! {
        () = store.watch(out) => panic!("the watch ended"),
        () = body => {}
    }
}

/// The ids that come next, however long that takes.
async fn changed(events: &mut mpsc::Receiver<Event>) -> Vec<String> {
    loop {
        match events.recv().await.unwrap() {
            Event::Word => {}
            Event::Changes(changes) => {
                return changes.into_iter().map(|change| change.unwrap().id.to_string()).collect();
            }
            other => panic!("{other:?}"),
        }
    }
}
