// SPDX-License-Identifier: Apache-2.0
//! Bytes as a server sends them, in any pieces, and bytes that it does not.

use futures_util::stream;
use http_body::Frame;
use http_body_util::StreamBody;

use super::super::fake::field;
use super::*;

fn wrapped(object: &[u8]) -> Vec<u8> {
    let kind = field(1, &[field(1, b"v1"), field(2, b"Node")].concat());
    [MAGIC, &kind, &field(2, object), &field(3, b""), &field(4, b"")].concat()
}

/// With 300 bytes of labels and a status that are not ours.
fn node(name: &str) -> Vec<u8> {
    let annotation = [field(1, b"a.b/public-ip"), field(2, b"192.0.2.1")].concat();
    let meta = [
        field(1, name.as_bytes()),
        field(5, b"u1"),
        field(6, b"9"),
        vec![7 << 3, 1],
        field(8, &[1 << 3, 100]),
        field(11, &[b'x'; 300]),
        field(12, &annotation),
        field(12, &[field(1, b"bad"), field(2, &[0xff])].concat()),
    ];
    [
        field(1, &meta.concat()),
        field(2, &[field(1, b"10.5.1.0/24"), field(7, b"10.5.1.0/24")].concat()),
        field(3, b"status"),
    ]
    .concat()
}

fn list() -> Vec<u8> {
    let meta = [field(2, b"77"), field(3, b"more"), vec![4 << 3, 1]].concat();
    wrapped(&[field(1, &meta), field(2, &node("n1")), field(2, &node("n2"))].concat())
}

fn event(kind: &str, object: &[u8]) -> Vec<u8> {
    let event = [field(1, kind.as_bytes()), field(2, &field(1, &wrapped(object)))].concat();
    [&u32::try_from(event.len()).unwrap().to_be_bytes()[..], &event].concat()
}

fn reader(bytes: &[u8], size: usize) -> Reader<impl HttpBody<Data = Bytes, Error = kube::Error> + Unpin> {
    let pieces: Vec<_> = bytes.chunks(size).map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece)))).collect();
    Reader::new(StreamBody::new(stream::iter(pieces)))
}

async fn read(bytes: &[u8], size: usize) -> Result<(Vec<String>, ListMeta), Garbled> {
    let mut reader = reader(bytes, size);
    let length = reader.list().await?;
    let (mut names, mut head) = (Vec::new(), ListMeta::default());
    while let Some(part) = reader.part(length).await? {
        match part {
            Part::Head(meta) => head = meta,
            Part::Node(node) => names.push(node.metadata.unwrap_or_default().name),
        }
    }
    Ok((names, head))
}

#[tokio::test]
async fn a_list_does_not_depend_on_how_its_bytes_arrive() {
    let list = list();
    for size in 1..=list.len() {
        let (names, head) = read(&list, size).await.unwrap();
        assert_eq!(names, ["n1", "n2"], "in pieces of {size}");
        assert_eq!((head.resource_version.as_str(), head.r#continue.as_str()), ("77", "more"));
    }
}

#[tokio::test]
async fn neither_do_the_events_of_a_watch() {
    let bytes = [event("ADDED", &node("n1")), event("BOOKMARK", &field(1, &field(6, b"8")))].concat();
    for size in 1..=bytes.len() {
        let mut reader = reader(&bytes, size);
        let added = reader.event().await.unwrap().unwrap();
        let meta = added.object::<Node>().unwrap().metadata.unwrap();
        assert_eq!((added.r#type.as_str(), meta.name.as_str(), meta.resource_version.as_str()), ("ADDED", "n1", "9"));
        assert_eq!(meta.annotations().collect::<Vec<_>>(), [("a.b/public-ip", "192.0.2.1")], "what is no text is none");
        let mark = reader.event().await.unwrap().unwrap();
        assert_eq!(
            (mark.r#type.as_str(), mark.object::<Node>().unwrap().metadata.unwrap().resource_version),
            ("BOOKMARK", "8".into())
        );
        assert!(reader.event().await.unwrap().is_none());
    }
}

#[tokio::test]
async fn what_was_cut_off_is_not_whole() {
    let (list, event) = (list(), event("ADDED", &node("n1")));
    // Behind the list only empty fields of its envelope follow.
    for end in 0..list.len() - 4 {
        assert!(read(&list[..end], 7).await.is_err(), "{end} bytes of a list");
    }
    for end in 1..event.len() {
        assert!(matches!(reader(&event[..end], 7).event().await, Err(Garbled::CutOff)), "{end} bytes of an event");
    }
}

#[tokio::test]
async fn what_is_something_else_is_named() {
    assert!(matches!(read(br#"{"kind":"NodeList"}"#, 5).await, Err(Garbled::Foreign)));
    assert!(matches!(object::<Node>(Bytes::from_static(b"{}")), Err(Garbled::Foreign)));
    assert!(matches!(reader(&[0xff; 64], 5).event().await, Err(Garbled::Huge(0xffff_ffff))));
    let huge = [MAGIC, &[2 << 3 | 2, 0x7f], &[2 << 3 | 2, 0xff, 0xff, 0xff, 0xff, 0x0f]].concat();
    assert!(matches!(read(&huge, 5).await, Err(Garbled::Huge(0xffff_ffff))));
    // A refusal in the middle of a watch.
    let status = [field(3, b"too old"), field(4, b"Expired"), vec![6 << 3, 0x9a, 0x03]].concat();
    let event = reader(&event("ERROR", &status), 64).event().await.unwrap().unwrap();
    let status = event.object::<Status>().unwrap();
    assert_eq!((status.message.as_str(), status.reason.as_str(), status.code), ("too old", "Expired", 410));
}
