// SPDX-License-Identifier: Apache-2.0
//! Events that arrive in pieces of any size, that are cut off, or that are not events.

use std::io;
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::*;

fn event(kind: &str, object: &Value) -> Vec<u8> {
    format!("{}\n", json!({"type": kind, "object": object})).into_bytes()
}

fn node(name: &str) -> Value {
    let annotations = json!({"a.b/public-ip": "192.0.2.1", "other": "ä{[\"\\\n"});
    json!({
        "kind": "Node", "apiVersion": "v1", "status": {"images": [[], {}]},
        "metadata": {"name": name, "resourceVersion": "9", "annotations": annotations},
    })
}

fn watch(bytes: &[u8], size: usize) -> WatchStream {
    let pieces: Vec<_> = bytes.chunks(size).map(|piece| Ok::<_, io::Error>(piece.to_vec())).collect();
    WatchStream::new(Box::pin(stream::iter(pieces).into_async_read()))
}

#[tokio::test]
async fn events_may_arrive_in_pieces_of_any_size() {
    let metadata = json!({"resourceVersion": "8", "annotations": {"k8s.io/initial-events-end": "true"}});
    let bookmark = json!({"kind": "Node", "apiVersion": "v1", "metadata": metadata});
    let bytes = [event("ADDED", &node("n1")), event("BOOKMARK", &bookmark)].concat();
    for size in 1..=bytes.len() {
        let mut watch = watch(&bytes, size);
        let Some(WatchEvent::Added(node)) = watch.next().await.unwrap() else { panic!("no Node") };
        assert_eq!((&*node.metadata.name, &*node.metadata.resource_version), ("n1", "9"));
        assert_eq!(node.annotation("a.b/public-ip"), Some("192.0.2.1"));
        let Some(WatchEvent::Bookmark(bookmark)) = watch.next().await.unwrap() else { panic!("no bookmark") };
        assert_eq!(bookmark.metadata.resource_version, "8");
        assert_eq!(bookmark.metadata.annotations["k8s.io/initial-events-end"], "true");
        assert!(watch.next().await.unwrap().is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_stops_waiting_loses_nothing() {
    let bytes = event("DELETED", &node("n1"));
    let (first, second) = bytes.split_at(20);
    let pause = stream::once(tokio::time::sleep(Duration::from_secs(60))).map(|()| Ok(Vec::new()));
    let pieces = [first, second].map(|piece| stream::iter([Ok::<_, io::Error>(piece.to_vec())]));
    let [first, second] = pieces;
    let pieces = Box::pin(first.chain(pause.filter(|_| std::future::ready(false))).chain(second));
    let mut watch = WatchStream::new(Box::pin(pieces.into_async_read()));
    for _ in 0..3 {
        assert!(timeout(Duration::from_secs(10), watch.next()).await.is_err());
    }
    assert!(matches!(watch.next().await, Ok(Some(WatchEvent::Deleted(node))) if &*node.metadata.name == "n1"));
}

#[tokio::test]
async fn an_event_that_was_cut_off_is_an_error() {
    let bytes = event("ADDED", &node("n1"));
    for end in 1..bytes.len() {
        assert!(matches!(watch(&bytes[..end], 7).next().await, Err(ApiError::CutOff)), "after {end} bytes");
    }
}

#[tokio::test]
async fn what_is_not_an_event_is_an_error() {
    for (text, words) in [
        ("<html>\n", "expected value"),
        ("{\"type\":\"RENAMED\",\"object\":{}}\n", "unknown variant `RENAMED`"),
        ("{\"type\":\"ADDED\",\"object\":{\"metadata\":{}}}\n", "missing field `name`"),
    ] {
        let error = watch(text.as_bytes(), 5).next().await.expect_err("an error");
        assert!(error.to_string().contains(words), "{error}");
    }
    let status = json!({"status": "Failure", "message": "too old", "reason": "Expired", "code": 410});
    let bytes = event("ERROR", &status);
    let Ok(Some(WatchEvent::Error(status))) = watch(&bytes, 64).next().await else { panic!("no status") };
    assert_eq!((&*status.message, &*status.reason, status.code), ("too old", "Expired", 410));
}

#[tokio::test]
async fn memory_for_a_line_is_bounded_and_freed() {
    let huge = event("ADDED", &json!({"metadata": {"name": "n1"}, "status": "x".repeat(1_000_000)}));
    let mut stream = watch(&huge, 16_384);
    assert!(stream.next().await.unwrap().is_some());
    assert!(stream.line.capacity() <= KEPT, "{} bytes are kept", stream.line.capacity());
    // The largest object that etcd takes by default. Go writes this character with six bytes.
    let text = event("MODIFIED", &json!({"metadata": {"name": "n1"}, "status": "<"})).into_iter();
    let text = String::from_utf8(text.collect()).unwrap().replace('<', &"\\u003c".repeat(3 << 19));
    let mut stream = watch(text.as_bytes(), 1 << 20);
    assert!(matches!(stream.next().await, Ok(Some(WatchEvent::Modified(node))) if &*node.metadata.name == "n1"));
    assert!(stream.line.capacity() <= KEPT, "{} bytes are kept", stream.line.capacity());
    let endless = stream::repeat_with(|| Ok::<_, io::Error>(vec![b'x'; 1 << 20]));
    let mut stream = WatchStream::new(Box::pin(endless.into_async_read()));
    assert!(matches!(stream.next().await, Err(ApiError::TooLarge)));
    assert_eq!(stream.line.len(), MAX_LINE);
}
