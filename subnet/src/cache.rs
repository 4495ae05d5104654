// SPDX-License-Identifier: Apache-2.0
//! The last state of a store that was known to be good, as the text of a file: own lease, peers, net-conf. An agent that starts
//! while its store is away goes on from it, and compares when the store answers.
//!
//! First line: `weft-peers VERSION CHECKSUM`, of fixed length. Then JSON values: a head, and one for each lease. A text that is
//! damaged, of another version or of another store is refused as a whole.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::attrs::Attrs;
use crate::cidr::Subnets;
use crate::lease::{Age, Lease};

/// Of the format.
const VERSION: u32 = 1;
const MAGIC: &str = "weft-peers";

/// Until when our own lease lives without a renewal, as the store said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// It does not end by itself: a reservation, or a store whose leases do not expire.
    Never,
    /// It ends then, in seconds since 1970.
    At(u64),
    /// The file does not say: an older weft wrote it.
    Unknown,
}

/// All but the peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// Which store: [`crate::source::Source::identity`].
    pub store: String,
    /// When the store was last heard before this was saved, in seconds since 1970.
    pub saved: u64,
    /// Until when our own lease lives.
    pub expires: Expiry,
    /// The text of net-conf.
    pub config: String,
    /// Our own lease.
    pub own: Lease,
    /// Public addresses of the uplink, IPv4 and IPv6: others mean another machine, or another network around it.
    pub public: (Option<Ipv4Addr>, Option<Ipv6Addr>),
    /// [`crate::source::Source::chosen`].
    pub chosen: [Option<IpAddr>; 2],
    /// The uplink that was in use. `None`: an older weft wrote the file, which did not say it.
    pub uplink: Option<Uplink>,
}

/// The uplink that was in use when a state was saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uplink {
    /// The name of the interface.
    pub name: String,
    /// Its IPv4 address. The published one may be another (`--public-ip`).
    pub v4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub v6: Option<Ipv6Addr>,
    /// The flags by which the interface was chosen, empty without any: under other flags the interface is chosen anew.
    pub flags: String,
}

/// A state that was read back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// All but the peers.
    pub head: Head,
    /// Leases of the others that were believed.
    pub peers: Vec<Lease>,
}

/// Why a text is of no use. The display is a sentence for the log.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// Cut off, changed, or something else.
    #[error("it is damaged")]
    Damaged,
    /// Written by another version.
    #[error("it has version {0}, not {VERSION}")]
    Version(String),
    /// It is about another store.
    #[error("it was saved for another store: {0}")]
    Store(String),
}

#[derive(Serialize, Deserialize)]
struct WireHead {
    store: String,
    saved: u64,
    /// Seconds since 1970; 0 = never. A member of later versions that older ones do not read.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    expires: Option<u64>,
    config: String,
    own: Entry,
    public: (Option<Ipv4Addr>, Option<Ipv6Addr>),
    chosen: [Option<IpAddr>; 2],
    /// A member of later versions, which older ones skip.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    uplink: Option<Uplink>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    v4: Option<Ipv4Net>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    v6: Option<Ipv6Net>,
    stamp: u64,
    #[serde(skip_serializing_if = "String::is_empty", default)]
    tie: String,
    /// As in etcd.
    value: Box<RawValue>,
}

impl Entry {
    /// `None`: the lease says something that is no JSON, which no lease that was read does.
    fn new(lease: &Lease) -> Option<Entry> {
        let value = RawValue::from_string(lease.attrs.to_wire()).ok()?;
        let Subnets { v4, v6 } = lease.subnets;
        Some(Entry { id: lease.id.to_string(), v4, v6, stamp: lease.age.stamp, tie: lease.age.tie.to_string(), value })
    }

    fn lease(self) -> Option<Lease> {
        let attrs = Attrs::from_wire(self.value.get().as_bytes()).ok()?;
        let age = Age { stamp: self.stamp, tie: self.tie.into() };
        Some(Lease { id: self.id.into(), subnets: Subnets { v4: self.v4, v6: self.v6 }.trunc(), attrs, age })
    }
}

/// Length of the first line, bytes.
pub const FIRST_LINE: usize = MAGIC.len() + " 1 00000000\n".len();

fn first_line(checksum: u32) -> String {
    format!("{MAGIC} {VERSION} {checksum:08x}\n")
}

/// A text that grows lease by lease, and is taken away piece by piece.
#[derive(Debug, Default)]
pub struct Writer {
    text: Vec<u8>,
    taken: crc32fast::Hasher,
}

impl Writer {
    /// With the head alone.
    pub fn new(head: Head) -> Option<Writer> {
        let mut writer = Writer::default();
        let own = Entry::new(&head.own)?;
        let Head { store, saved, config, public, chosen, uplink, .. } = head;
        let expires = match head.expires {
            Expiry::Never => Some(0),
            Expiry::At(seconds) => Some(seconds.max(1)),
            Expiry::Unknown => None,
        };
        writer.push(&WireHead { store, saved, expires, config, own, public, chosen, uplink });
        Some(writer)
    }

    /// One peer more.
    pub fn peer(&mut self, lease: &Lease) {
        if let Some(entry) = Entry::new(lease) {
            self.push(&entry);
        }
    }

    fn push(&mut self, value: &impl Serialize) {
        // Writing to memory does not fail; a value cut off would be found by the reader.
        let _ = serde_json::to_writer(&mut self.text, value);
        self.text.push(b'\n');
    }

    /// What was added since the last piece. The first one belongs behind the first line.
    pub fn take(&mut self) -> Vec<u8> {
        self.taken.update(&self.text);
        std::mem::take(&mut self.text)
    }

    /// The first line, which is known last: of [`FIRST_LINE`] bytes. Everything was taken.
    pub fn finish(self) -> String {
        first_line(self.taken.finalize())
    }
}

/// Reads a text back, which must be about this store.
///
/// # Errors
/// See [`Unusable`].
pub fn read(text: &[u8], store: &str) -> Result<Saved, Unusable> {
    let (head, rest) = split(text, store)?;
    let entries = serde_json::Deserializer::from_slice(rest).into_iter::<Entry>();
    let entries = entries.collect::<Result<Vec<_>, _>>().map_err(|_| Unusable::Damaged)?;
    let peers = entries.into_iter().map(Entry::lease).collect::<Option<Vec<_>>>().ok_or(Unusable::Damaged)?;
    Ok(Saved { head, peers })
}

/// Reads the head alone.
///
/// # Errors
/// See [`Unusable`].
pub fn read_head(text: &[u8], store: &str) -> Result<Head, Unusable> {
    split(text, store).map(|(head, _)| head)
}

/// The head, and the text of the peers: the whole text was not changed since it was written.
fn split<'a>(text: &'a [u8], store: &str) -> Result<(Head, &'a [u8]), Unusable> {
    let end = text.iter().take(64).position(|byte| *byte == b'\n').ok_or(Unusable::Damaged)?;
    let line = std::str::from_utf8(&text[..end]).map_err(|_| Unusable::Damaged)?;
    let mut words = line.split(' ');
    let (magic, version) = (words.next(), words.next().ok_or(Unusable::Damaged)?);
    if magic != Some(MAGIC) {
        return Err(Unusable::Damaged);
    }
    if version != VERSION.to_string() {
        return Err(Unusable::Version(version.to_owned()));
    }
    let body = &text[end + 1..];
    if line.as_bytes() != first_line(crc32fast::hash(body)).trim_end().as_bytes() {
        return Err(Unusable::Damaged);
    }
    let mut values = serde_json::Deserializer::from_slice(body).into_iter::<WireHead>();
    let head = values.next().and_then(Result::ok).ok_or(Unusable::Damaged)?;
    if head.store != store {
        return Err(Unusable::Store(head.store));
    }
    let WireHead { store, saved, expires, config, own, public, chosen, uplink } = head;
    let expires = match expires {
        None => Expiry::Unknown,
        Some(0) => Expiry::Never,
        Some(seconds) => Expiry::At(seconds),
    };
    let own = own.lease().ok_or(Unusable::Damaged)?;
    Ok((Head { store, saved, expires, config, own, public, chosen, uplink }, &body[values.byte_offset()..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORE: &str = "etcd http://10.0.0.1:2379 /coreos.com/network";

    fn lease(number: u8) -> Lease {
        let attrs = Attrs {
            public_ip: Some([192, 0, 2, number].into()),
            backend_type: "vxlan".into(),
            // What an admin wrote into an annotation may have any white space.
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
        let head = Head { store: STORE.into(), saved, expires, config, own: lease(1), public, chosen, uplink };
        Saved { head, peers: vec![lease(2), lease(3), only_v6] }
    }

    fn text(saved: &Saved) -> Vec<u8> {
        let mut writer = Writer::new(saved.head.clone()).unwrap();
        let mut body = Vec::new();
        for lease in &saved.peers {
            writer.peer(lease);
            body.extend(writer.take());
        }
        body.extend(writer.take());
        let first = writer.finish();
        assert_eq!(first.len(), FIRST_LINE);
        [first.into_bytes(), body].concat()
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
    }

    #[test]
    fn a_file_of_an_older_version_is_read_without_what_it_does_not_say() {
        let mut old = saved();
        (old.head.expires, old.head.uplink) = (Expiry::Unknown, None);
        let written = text(&old);
        let words = String::from_utf8(written.clone()).unwrap();
        assert!(!words.contains("expires") && !words.contains("uplink"), "as the older version wrote it");
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
}
