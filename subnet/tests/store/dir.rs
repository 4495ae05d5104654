// SPDX-License-Identifier: Apache-2.0
//! What is the directory's alone: the file's bytes, a directory that goes and comes back.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use tokio::sync::mpsc;
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
