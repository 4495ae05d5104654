// SPDX-License-Identifier: Apache-2.0
//! Answers that arrive in pieces of any size, that are cut off, or that are not lists.

use std::time::Duration;

use futures_util::{TryStreamExt, stream};
use serde_json::json;

use super::*;

/// A body that arrives in these pieces.
pub(in super::super) fn body(pieces: impl Iterator<Item = Vec<u8>> + 'static) -> Body {
    Box::pin(stream::iter(pieces.map(Ok::<_, io::Error>)).into_async_read())
}

fn pieces(bytes: &[u8], size: usize) -> impl Iterator<Item = Vec<u8>> + use<> {
    bytes.chunks(size).map(<[u8]>::to_vec).collect::<Vec<_>>().into_iter()
}

/// Returns a list of two Nodes with fields that are not ours.
fn list() -> Vec<u8> {
    let node =
        |name: &str| json!({"metadata": {"name": name, "labels": {"a": "ä{[\"\\"}}, "status": {"images": [[], {}]}});
    let metadata = json!({"resourceVersion": "77", "continue": "next", "remainingItemCount": 5});
    let list = json!({"kind": "NodeList", "metadata": metadata, "items": [node("n1"), node("n2")]});
    list.to_string().into_bytes()
}

#[tokio::test]
async fn a_list_may_arrive_in_pieces_of_any_size() {
    let bytes = list();
    for size in 1..=bytes.len() {
        let NodeList { metadata, items } = read(body(pieces(&bytes, size))).await.unwrap();
        let names: Vec<_> = items.iter().flatten().map(|node| &*node.metadata.name).collect();
        assert_eq!(names, ["n1", "n2"], "in pieces of {size} bytes");
        assert_eq!((&*metadata.resource_version, &*metadata.r#continue), ("77", "next"));
    }
}

#[tokio::test]
async fn a_list_that_was_cut_off_is_an_error() {
    let bytes = list();
    for end in 0..bytes.len() {
        let error = read(body(pieces(&bytes[..end], 7))).await.err().expect("an error");
        assert!(matches!(error, ApiError::CutOff), "after {end} bytes: {error}");
    }
}

#[tokio::test]
async fn a_broken_connection_is_the_error_of_its_list() {
    let pieces = [Ok(list()[..20].to_vec()), Err(io::Error::other("connection reset"))];
    let error = read(Box::pin(stream::iter(pieces).into_async_read())).await.err().expect("an error");
    assert_eq!(error.to_string(), "connection reset");
}

#[tokio::test]
async fn an_answer_that_is_not_a_list_is_an_error() {
    for (text, words) in [("<html>", "expected value"), ("{}", "missing field `metadata`"), ("[1]", "invalid")] {
        // A parser that has given up does not hold up the rest of the answer.
        let endless = std::iter::repeat_n(vec![b' '; 1000], 1000);
        let error = read(body([text.as_bytes().to_vec()].into_iter().chain(endless))).await.err().expect("an error");
        assert!(error.to_string().contains(words) && matches!(error, ApiError::Json(_)), "{text}: {error}");
    }
    let empty = json!({"metadata": {"resourceVersion": "1"}, "items": null}).to_string().into_bytes();
    assert!(read(body([empty].into_iter())).await.unwrap().items.is_none());
}

#[tokio::test]
async fn no_more_of_an_answer_is_read_than_the_parser_can_take() {
    use std::cell::Cell;
    use std::rc::Rc;
    let read = Rc::new(Cell::new(0));
    let counter = Rc::clone(&read);
    let body = body(std::iter::repeat_with(move || {
        counter.set(counter.get() + 1);
        b" ".to_vec()
    }));
    // The parser does not take anything from this queue.
    let (sender, _receiver) = mpsc::channel(QUEUE);
    let mut receiving = Box::pin(receive(body, sender));
    for _ in 0..100 {
        assert!(timeout(Duration::ZERO, &mut receiving).await.is_err());
    }
    assert!(read.get() <= QUEUE + 1, "{} pieces", read.get());
}

#[tokio::test]
async fn an_answer_that_stands_still_is_given_up() {
    tokio::time::pause();
    let pieces = stream::iter([Ok::<_, io::Error>(list()[..20].to_vec())]);
    let body: Body = Box::pin(futures_util::StreamExt::chain(pieces, stream::pending()).into_async_read());
    let (sender, _receiver) = mpsc::channel(QUEUE);
    assert!(matches!(receive(body, sender).await, Err(ApiError::NoAnswer)));
}
