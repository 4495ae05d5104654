// SPDX-License-Identifier: Apache-2.0
//! The format of saved peers: the last answer of the store (net-conf, own lease, peers) as a file. An agent that starts while the store
//! is away uses it, and compares it with the store when that answers.
//!
//! The first line is `weft-peers VERSION CHECKSUM` and has a fixed length. JSON values follow: a head, and one value for each lease. The
//! checksum is written last, so a file that was not completed is never believed. A file that is damaged, has another version or belongs to
//! another store is refused as a whole.

use std::io::{self, BufWriter, Seek, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::attrs::Attrs;
use crate::cidr::Subnets;
use crate::lease::{Age, Lease};

/// Version of the format.
const VERSION: u32 = 1;
const MAGIC: &str = "weft-peers";

/// When the own lease ends if it is not renewed, as the store said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// It does not end: it is a reservation, or leases of this store do not expire.
    Never,
    /// It ends at this time, in seconds since 1970.
    At(u64),
    /// The file does not say it, because an older weft wrote it.
    Unknown,
}

/// What is saved besides the peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// The fingerprint of the store, from [`crate::source::Source::fingerprint`].
    pub store: String,
    /// When the store answered last before this was saved, in seconds since 1970.
    pub saved: u64,
    /// When the own lease ends.
    pub expires: Expiry,
    /// The text of the net-conf that was in force.
    pub config: String,
    /// The texts of earlier net-confs whose backends peers still needed, because the backend changed. Packets preferred them in this order.
    pub earlier: Vec<String>,
    /// Packets preferred all of `earlier` to the backend of `config`, because peers had not had the time to learn of that one.
    pub sends_earlier: bool,
    /// The own lease.
    pub own: Lease,
    /// Public IPv4 and IPv6 address of the uplink. If they differ at the next start, this is another machine or another network.
    pub public: (Option<Ipv4Addr>, Option<Ipv6Addr>),
    /// The answer of [`crate::source::Source::chosen`].
    pub chosen: [Option<IpAddr>; 2],
    /// The uplink that was in use. `None` if an older weft wrote the file, because it did not save the uplink.
    pub uplink: Option<Uplink>,
    /// Set while packets may go out in clear text although the backend of our lease encrypts, because net-conf changed the backend.
    pub clear_text: Option<ClearText>,
}

/// To which leases packets may go in clear text for the time of a change to a backend that encrypts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearText {
    /// When our lease changed, in seconds since 1970.
    pub since: u64,
    /// The ids of the leases that were reached in clear text before, and have not followed yet.
    pub leases: Vec<String>,
    /// The ids of the leases that were reached in clear text before, and have followed, while packets to them still go the earlier way. The first
    /// versions neither wrote nor read this member.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub followed: Vec<String>,
}

/// The uplink that was in use when a state was saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uplink {
    /// The name of the interface.
    pub name: String,
    /// Its IPv4 address. The published address may differ from it (`--public-ip`).
    pub v4: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub v6: Option<Ipv6Addr>,
    /// The flags by which the interface was chosen. With other flags, the next start chooses again.
    pub flags: String,
}

/// Saved peers that were read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// Everything except the peers.
    pub head: Head,
    /// The leases of other nodes that were believed.
    pub peers: Vec<Lease>,
}

/// Why a file cannot be used. The display is a sentence for the log.
#[derive(Debug, thiserror::Error)]
pub enum BadSavedPeers {
    /// It was not completed, it was changed, or it is another kind of file.
    #[error("it is damaged")]
    Damaged,
    /// It has another version of the format.
    #[error("it has version {0}, not {VERSION}")]
    Version(String),
    /// It belongs to another store.
    #[error("it was saved for another store: {0}")]
    Store(String),
}

#[derive(Serialize, Deserialize)]
struct WireHead {
    store: String,
    saved: u64,
    /// Seconds since 1970, or 0 for a lease that does not end. The first versions neither wrote nor read this member.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    expires: Option<u64>,
    config: String,
    /// The first versions neither wrote nor read this member.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    earlier: Vec<String>,
    /// The first versions neither wrote nor read this member.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    sends_earlier: bool,
    own: Entry,
    public: (Option<Ipv4Addr>, Option<Ipv6Addr>),
    chosen: [Option<IpAddr>; 2],
    /// The first versions neither wrote nor read this member.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    uplink: Option<Uplink>,
    /// The first versions neither wrote nor read this member.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    clear_text: Option<ClearText>,
}

impl WireHead {
    /// Returns `None` if the own lease cannot be represented.
    fn new(head: &Head) -> Option<WireHead> {
        let own = Entry::new(&head.own)?;
        let Head { store, saved, expires, config, earlier, sends_earlier, public, chosen, uplink, clear_text, .. } =
            head.clone();
        let expires = match expires {
            Expiry::Never => Some(0),
            Expiry::At(seconds) => Some(seconds.max(1)),
            Expiry::Unknown => None,
        };
        Some(WireHead {
            store,
            saved,
            expires,
            config,
            earlier,
            sends_earlier,
            own,
            public,
            chosen,
            uplink,
            clear_text,
        })
    }
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
    /// The value of the lease, as in etcd.
    value: Box<RawValue>,
}

impl Entry {
    /// Returns `None` if the backend data of the lease is not JSON. No lease that was read from a store has such data.
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

/// Length of the first line in bytes.
const FIRST_LINE: usize = MAGIC.len() + " 1 00000000\n".len();

fn first_line(checksum: u32) -> String {
    format!("{MAGIC} {VERSION} {checksum:08x}\n")
}

/// Writes to a file and computes the checksum of what was written.
struct Body<W: Write> {
    out: BufWriter<W>,
    checksum: crc32fast::Hasher,
}

impl<W: Write> Body<W> {
    fn value(&mut self, value: &impl Serialize) -> io::Result<()> {
        serde_json::to_writer(&mut *self, value)?;
        self.write_all(b"\n")
    }
}

impl<W: Write> Write for Body<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.checksum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Writes a file of saved peers. `file` must be empty.
///
/// # Errors
/// The file cannot be written, or the own lease cannot be represented.
pub fn write<'a>(
    mut file: impl Write + Seek,
    head: &Head,
    peers: impl IntoIterator<Item = &'a Lease>,
) -> io::Result<()> {
    // The first line is written when the checksum is known.
    file.write_all(&[b' '; FIRST_LINE])?;
    let mut body = Body { out: BufWriter::new(file), checksum: crc32fast::Hasher::new() };
    body.value(&WireHead::new(head).ok_or_else(|| io::Error::other("the own lease has data that is not JSON"))?)?;
    for entry in peers.into_iter().filter_map(Entry::new) {
        body.value(&entry)?;
    }
    let Body { out, checksum } = body;
    let mut file = out.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.rewind()?;
    file.write_all(first_line(checksum.finalize()).as_bytes())
}

/// Reads the contents of a file of saved peers, which must belong to this store.
///
/// # Errors
/// See [`BadSavedPeers`].
pub fn read(text: &[u8], store: &str) -> Result<Saved, BadSavedPeers> {
    let (head, rest) = split(text, store)?;
    let entries = serde_json::Deserializer::from_slice(rest).into_iter::<Entry>();
    let entries = entries.collect::<Result<Vec<_>, _>>().map_err(|_| BadSavedPeers::Damaged)?;
    let peers = entries.into_iter().map(Entry::lease).collect::<Option<Vec<_>>>().ok_or(BadSavedPeers::Damaged)?;
    Ok(Saved { head, peers })
}

/// Reads the contents of a file of saved peers without the peers.
///
/// # Errors
/// See [`BadSavedPeers`].
pub fn read_head(text: &[u8], store: &str) -> Result<Head, BadSavedPeers> {
    split(text, store).map(|(head, _)| head)
}

/// Checks the whole text and returns its head and the text of the peers.
fn split<'a>(text: &'a [u8], store: &str) -> Result<(Head, &'a [u8]), BadSavedPeers> {
    let end = text.iter().take(64).position(|byte| *byte == b'\n').ok_or(BadSavedPeers::Damaged)?;
    let line = std::str::from_utf8(&text[..end]).map_err(|_| BadSavedPeers::Damaged)?;
    let mut words = line.split(' ');
    let (magic, version) = (words.next(), words.next().ok_or(BadSavedPeers::Damaged)?);
    if magic != Some(MAGIC) {
        return Err(BadSavedPeers::Damaged);
    }
    if version != VERSION.to_string() {
        return Err(BadSavedPeers::Version(version.to_owned()));
    }
    let body = &text[end + 1..];
    if line.as_bytes() != first_line(crc32fast::hash(body)).trim_end().as_bytes() {
        return Err(BadSavedPeers::Damaged);
    }
    let mut values = serde_json::Deserializer::from_slice(body).into_iter::<WireHead>();
    let head = values.next().and_then(Result::ok).ok_or(BadSavedPeers::Damaged)?;
    if head.store != store {
        return Err(BadSavedPeers::Store(head.store));
    }
    let WireHead { store, saved, expires, config, earlier, sends_earlier, own, public, chosen, uplink, clear_text } =
        head;
    let expires = match expires {
        None => Expiry::Unknown,
        Some(0) => Expiry::Never,
        Some(seconds) => Expiry::At(seconds),
    };
    let own = own.lease().ok_or(BadSavedPeers::Damaged)?;
    let head = Head { store, saved, expires, config, earlier, sends_earlier, own, public, chosen, uplink, clear_text };
    Ok((head, &body[values.byte_offset()..]))
}

#[cfg(test)]
mod tests;
