// SPDX-License-Identifier: Apache-2.0
//! Kubernetes' own encoding, for what comes by the thousand: lists and watches. A Node is half as large in it as in JSON, and what is
//! not ours is left out by its length, unread.
//!
//! Numbers of fields: `generated.proto` of k8s.io/api/core/v1, k8s.io/apimachinery/pkg/apis/meta/v1 and pkg/runtime. They never change.

use bytes::{Buf, Bytes, BytesMut};
use http_body::Body as HttpBody;
use http_body_util::BodyExt;
use kube::client::Body;
use prost::Message;

/// Asks for a list, or one object.
pub(super) const LIST: &str = "application/vnd.kubernetes.protobuf";
/// Asks for a watch.
pub(super) const WATCH: &str = "application/vnd.kubernetes.protobuf;stream=watch";

/// Before each object that stands alone.
const MAGIC: &[u8] = b"k8s\0";
/// No object of a server is larger (etcd takes 1.5 MB).
const MAX: usize = 8 << 20;
/// Field with a length before it.
const LENGTH_DELIMITED: u64 = 2;
/// `raw` of [`Unknown`].
const RAW: u64 = 2;
/// Fields of NodeList.
const METADATA: u64 = 1;
const ITEMS: u64 = 2;

/// Around each object: its kind is beside it.
#[derive(Message)]
struct Unknown {
    #[prost(bytes = "bytes", tag = "2")]
    raw: Bytes,
}

/// What we keep of a Node.
#[derive(Message)]
pub(super) struct Node {
    #[prost(message, optional, tag = "1")]
    pub(super) metadata: Option<Meta>,
    #[prost(message, optional, tag = "2")]
    pub(super) spec: Option<Spec>,
}

/// Of its ObjectMeta.
#[derive(Message)]
pub(super) struct Meta {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(string, tag = "5")]
    pub(super) uid: String,
    #[prost(string, tag = "6")]
    pub(super) resource_version: String,
    #[prost(message, optional, tag = "8")]
    pub(super) creation_timestamp: Option<Time>,
    #[prost(message, repeated, tag = "12")]
    annotations: Vec<Entry>,
}

/// Seconds since 1970.
#[derive(Message)]
pub(super) struct Time {
    #[prost(int64, tag = "1")]
    pub(super) seconds: i64,
}

/// Not read before it is known to be ours.
#[derive(Message)]
struct Entry {
    #[prost(bytes = "bytes", tag = "1")]
    name: Bytes,
    #[prost(bytes = "bytes", tag = "2")]
    value: Bytes,
}

/// Of its spec.
#[derive(Message)]
pub(super) struct Spec {
    #[prost(string, tag = "1")]
    pub(super) pod_cidr: String,
    #[prost(string, repeated, tag = "7")]
    pub(super) pod_cidrs: Vec<String>,
}

/// One event of a watch.
#[derive(Message)]
pub(super) struct WatchEvent {
    /// ADDED, MODIFIED, DELETED, BOOKMARK or ERROR.
    #[prost(string, tag = "1")]
    pub(super) r#type: String,
    #[prost(message, optional, tag = "2")]
    object: Option<RawExtension>,
}

#[derive(Message)]
struct RawExtension {
    #[prost(bytes = "bytes", tag = "1")]
    raw: Bytes,
}

/// What the server refused.
#[derive(Message)]
pub(super) struct Status {
    #[prost(string, tag = "3")]
    pub(super) message: String,
    #[prost(string, tag = "4")]
    pub(super) reason: String,
    #[prost(int32, tag = "6")]
    pub(super) code: i32,
}

/// Of the head of a list.
#[derive(Message)]
pub(super) struct ListMeta {
    #[prost(string, tag = "2")]
    pub(super) resource_version: String,
    /// Where the next page begins; empty behind the last.
    #[prost(string, tag = "3")]
    pub(super) r#continue: String,
}

impl Meta {
    /// All annotations that are text.
    pub(super) fn annotations(&self) -> impl Iterator<Item = (&str, &str)> {
        let text = std::str::from_utf8;
        self.annotations.iter().filter_map(move |entry| Some((text(&entry.name).ok()?, text(&entry.value).ok()?)))
    }
}

impl WatchEvent {
    /// What happened to whom.
    pub(super) fn object<T: Message + Default>(&self) -> Result<T, Garbled> {
        object(self.object.as_ref().map(|object| object.raw.clone()).unwrap_or_default())
    }
}

/// An object that stands alone.
pub(super) fn object<T: Message + Default>(mut bytes: Bytes) -> Result<T, Garbled> {
    if !bytes.starts_with(MAGIC) {
        return Err(Garbled::Foreign);
    }
    bytes.advance(MAGIC.len());
    Ok(T::decode(Unknown::decode(bytes)?.raw)?)
}

/// What cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum Garbled {
    #[error("the answer was cut off")]
    CutOff,
    #[error("the answer is not in Kubernetes' encoding")]
    Foreign,
    #[error("an object of {0} bytes")]
    Huge(u64),
    #[error(transparent)]
    Field(#[from] prost::DecodeError),
    #[error(transparent)]
    Body(#[from] kube::Error),
}

/// A body that is read as it comes. Whoever stops waiting for a piece of it loses nothing.
pub(super) struct Reader<B = Body> {
    body: B,
    buffer: BytesMut,
    taken: u64,
}

impl<B: HttpBody<Data = Bytes, Error = kube::Error> + Unpin> Reader<B> {
    pub(super) fn new(body: B) -> Reader<B> {
        Reader { body, buffer: BytesMut::new(), taken: 0 }
    }

    /// Waits until so many bytes are there; false at the end of the body.
    async fn fill(&mut self, bytes: usize) -> Result<bool, Garbled> {
        while self.buffer.len() < bytes {
            let Some(frame) = self.body.frame().await else { return Ok(false) };
            if let Ok(data) = frame?.into_data() {
                self.buffer.extend_from_slice(&data);
            }
        }
        Ok(true)
    }

    async fn take(&mut self, bytes: u64) -> Result<Bytes, Garbled> {
        let bytes = usize::try_from(bytes).ok().filter(|bytes| *bytes <= MAX).ok_or(Garbled::Huge(bytes))?;
        if !self.fill(bytes).await? {
            return Err(Garbled::CutOff);
        }
        self.taken += bytes as u64;
        Ok(self.buffer.split_to(bytes).freeze())
    }

    /// The next event of a watch; `None` at its end.
    pub(super) async fn event(&mut self) -> Result<Option<WatchEvent>, Garbled> {
        if !self.fill(4).await? {
            return if self.buffer.is_empty() { Ok(None) } else { Err(Garbled::CutOff) };
        }
        let length = (&self.buffer[..4]).get_u32();
        let whole =
            4 + usize::try_from(length).ok().filter(|bytes| *bytes <= MAX).ok_or(Garbled::Huge(length.into()))?;
        if !self.fill(whole).await? {
            return Err(Garbled::CutOff);
        }
        Ok(Some(WatchEvent::decode(self.buffer.split_to(whole).freeze().slice(4..))?))
    }

    async fn varint(&mut self) -> Result<u64, Garbled> {
        let mut bytes = Vec::with_capacity(2);
        loop {
            let byte = self.take(1).await?[0];
            bytes.push(byte);
            if byte < 0x80 || bytes.len() > 10 {
                return Ok(prost::encoding::decode_varint(&mut &*bytes)?);
            }
        }
    }

    /// Number and length of the next field; all that a list has on its two outer levels have a length.
    async fn field(&mut self) -> Result<(u64, u64), Garbled> {
        let key = self.varint().await?;
        if key & 7 != LENGTH_DELIMITED {
            return Err(Garbled::Foreign);
        }
        Ok((key >> 3, self.varint().await?))
    }

    /// Up to the beginning of the list inside its envelope: how long it is.
    pub(super) async fn list(&mut self) -> Result<u64, Garbled> {
        if self.take(MAGIC.len() as u64).await? != MAGIC {
            return Err(Garbled::Foreign);
        }
        loop {
            match self.field().await? {
                (RAW, length) => {
                    self.taken = 0;
                    return Ok(length);
                }
                (_, length) => drop(self.take(length).await?),
            }
        }
    }

    /// The next part of a list of this length; `None` at its end.
    pub(super) async fn part(&mut self, length: u64) -> Result<Option<Part>, Garbled> {
        while self.taken < length {
            let (number, bytes) = self.field().await?;
            let bytes = self.take(bytes).await?;
            match number {
                METADATA => return Ok(Some(Part::Head(ListMeta::decode(bytes)?))),
                ITEMS => return Ok(Some(Part::Node(Node::decode(bytes)?))),
                _ => {}
            }
        }
        Ok(None)
    }
}

/// Of a NodeList.
pub(super) enum Part {
    /// Comes first.
    Head(ListMeta),
    /// One of its items.
    Node(Node),
}

#[cfg(test)]
#[path = "proto/tests.rs"]
mod tests;
