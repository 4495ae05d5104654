// SPDX-License-Identifier: Apache-2.0
//! The format of saved peers: what is written is read again, and everything else is refused.

use super::*;

const STORE: &str = "etcd http://10.0.0.1:2379 /coreos.com/network";

fn lease(number: u8) -> Lease {
    let attrs = Attrs {
        public_ip: Some([192, 0, 2, number].into()),
        backend_type: "vxlan".into(),
        // An annotation that a person wrote may contain white space.
        backend_data: Some("{\"VNI\":1,\n \"VtepMAC\":\"02:00:00:00:00:07\"}".into()),
        ..Attrs::default()
    };
    let subnets = Subnets { v4: format!("10.5.{number}.0/24").parse().ok(), v6: None };
    Lease { id: format!("node-{number}").into(), subnets, attrs, age: Age { stamp: 7, tie: "uid".into() } }
}

fn saved() -> Saved {
    let public = (Some([192, 0, 2, 1].into()), None);
    let only_v6 = Lease {
        subnets: Subnets { v4: None, v6: "fd00:5::/64".parse().ok() },
        attrs: Attrs { public_ipv6: "2001:db8::1".parse().ok(), ..Attrs::default() },
        age: Age::default(),
        ..lease(9)
    };
    let chosen = [None, Some("2001:db8::7".parse().unwrap())];
    let config = "{\"Network\":\"10.5.0.0/16\"}\n".to_owned();
    let (saved, expires) = (1_700_000_000, Expiry::At(1_700_086_400));
    let uplink = Some(Uplink {
        name: "eth0".into(),
        v4: Some([10, 0, 0, 1].into()),
        v6: None,
        flags: "--iface-regex ^10\\.".into(),
    });
    let head = Head {
        store: STORE.into(),
        saved,
        expires,
        config,
        own: lease(1),
        public,
        chosen,
        uplink,
        earlier: vec!["{}".into()],
        sends_earlier: true,
        clear_text: Some(ClearText {
            since: 1_700_000_000,
            leases: vec!["node-2".into()],
            followed: vec!["node-3".into()],
        }),
    };
    Saved { head, peers: vec![lease(2), lease(3), only_v6] }
}

fn text(saved: &Saved) -> Vec<u8> {
    let mut file = io::Cursor::new(Vec::new());
    write(&mut file, &saved.head, &saved.peers).unwrap();
    file.into_inner()
}

/// Users upgrade one node after the other, and sometimes go back: each version must read the files of the other.
#[test]
fn the_format_is_that_of_version_0_1_0() {
    let by_0_1_0 = include_bytes!("saved-by-0.1.0");
    let mut saved = saved();
    // These members are newer, and are not written when they are empty.
    saved.head.earlier.clear();
    saved.head.sends_earlier = false;
    saved.head.clear_text = None;
    assert_eq!(read(by_0_1_0, STORE).unwrap(), saved);
    assert_eq!(String::from_utf8(text(&saved)), String::from_utf8(by_0_1_0.to_vec()));
}

/// A disk that takes some bytes and then no more.
struct Full(io::Cursor<Vec<u8>>, usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.1.min(bytes.len());
        self.1 -= room;
        if room == 0 { Err(io::ErrorKind::StorageFull.into()) } else { self.0.write(&bytes[..room]) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Seek for Full {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

#[test]
fn a_file_that_was_not_completed_is_not_believed() {
    let whole = text(&saved()).len() + FIRST_LINE;
    for room in 0..whole {
        let mut disk = Full(io::Cursor::new(Vec::new()), room);
        assert!(write(&mut disk, &saved().head, &saved().peers).is_err(), "{room} of {whole} bytes");
        assert!(read(disk.0.get_ref(), STORE).is_err(), "{room} of {whole} bytes");
    }
}

#[test]
fn what_is_written_is_read() {
    assert_eq!(read(&text(&saved()), STORE).unwrap(), saved());
    let alone = Saved { peers: Vec::new(), ..saved() };
    assert_eq!(read(&text(&alone), STORE).unwrap(), alone);
    for expires in [Expiry::Never, Expiry::Unknown, Expiry::At(7)] {
        let mut other = saved();
        other.head.expires = expires;
        assert_eq!(read(&text(&other), STORE).unwrap(), other);
        assert_eq!(read_head(&text(&other), STORE).unwrap(), other.head);
    }
    let mut ended = saved();
    ended.head.expires = Expiry::At(0);
    let expires = read(&text(&ended), STORE).unwrap().head.expires;
    assert_eq!(expires, Expiry::At(1), "0 would mean that the lease never ends");
}

#[test]
fn members_that_an_older_version_did_not_write_are_optional() {
    let mut old = saved();
    (old.head.expires, old.head.uplink) = (Expiry::Unknown, None);
    old.head.clear_text.as_mut().unwrap().followed.clear();
    let written = text(&old);
    let words = String::from_utf8(written.clone()).unwrap();
    assert!(
        ["expires", "uplink", "followed"].iter().all(|member| !words.contains(member)),
        "the older version wrote none"
    );
    assert_eq!(read(&written, STORE).unwrap(), old);
}

#[test]
fn every_damage_is_found() {
    let good = text(&saved());
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x04;
        assert!(read(&bad, STORE).is_err(), "byte {at} changed");
        assert!(read(&good[..at], STORE).is_err(), "cut off after {at} bytes");
    }
    assert!(read(&[good.as_slice(), b"{}"].concat(), STORE).is_err(), "something added");
}

#[test]
fn another_version_and_another_store_are_named() {
    let good = String::from_utf8(text(&saved())).unwrap();
    let newer = good.replacen("weft-peers 1 ", "weft-peers 2 ", 1);
    assert_eq!(read(newer.as_bytes(), STORE).unwrap_err().to_string(), "it has version 2, not 1");
    let other = read(good.as_bytes(), "etcd http://10.0.0.2:2379 /x").unwrap_err();
    assert_eq!(other.to_string(), format!("it was saved for another store: {STORE}"));
}
