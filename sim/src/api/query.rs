// SPDX-License-Identifier: Apache-2.0
//! What a request about all Nodes asks for.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::nodes::{BAD_REQUEST, INVALID, Refused};

/// How long a watch lasts that does not say so itself.
const WATCH_TIME: Duration = Duration::from_secs(1800);

/// A request about all Nodes.
pub(super) enum Question {
    List(List),
    Watch(Watch),
}

/// Which version of the Nodes is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    /// That of etcd.
    Newest,
    /// Any that is not older than this one.
    AtLeast(u64),
    /// This one.
    Exactly(u64),
}

/// A list.
pub(super) struct List {
    pub(super) version: Version,
    /// The most Nodes of a page.
    pub(super) limit: usize,
    /// The last name of the page before.
    pub(super) after: String,
}

/// A watch.
pub(super) struct Watch {
    pub(super) begin: Begin,
    /// The name of the only Node that it asks for.
    pub(super) only: Option<String>,
    pub(super) bookmarks: bool,
    pub(super) time: Duration,
}

/// With what a watch begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begin {
    /// With the changes after this version.
    Changes(u64),
    /// With all Nodes.
    Nodes(Version),
    /// With all Nodes, and a bookmark behind the last one: a streaming list.
    List(Version),
}

impl Question {
    /// Reads the query of a request.
    ///
    /// # Errors
    /// If the parameters do not fit together.
    pub(super) fn of(query: &str) -> Result<Question, Refused> {
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let all: BTreeMap<&str, String> = pairs.map(|(key, value)| (key, value.replace("%3D", "="))).collect();
        let is_true = |key| all.get(key).is_some_and(|value| value == "true");
        let text = |key| all.get(key).map(String::as_str).filter(|value: &&str| !value.is_empty());
        let number = |key| text(key).map(|text| text.parse::<u64>().map_err(|_| BAD_REQUEST)).transpose();
        let (version, matching) = (number("resourceVersion")?, text("resourceVersionMatch"));
        if is_true("watch") {
            let bookmarks = is_true("allowWatchBookmarks");
            let initial = text("sendInitialEvents").map(|text| text == "true");
            let begin = match begin(version, matching, initial)? {
                // As the server did before there were streaming lists.
                Begin::Nodes(version) if bookmarks => Begin::List(version),
                begin => begin,
            };
            let only = text("fieldSelector").and_then(|text| Some(text.split_once('=')?.1.to_owned()));
            let time = number("timeoutSeconds")?.map_or(WATCH_TIME, Duration::from_secs);
            return Ok(Question::Watch(Watch { begin, only, bookmarks, time }));
        }
        let limit = number("limit")?.and_then(|limit| usize::try_from(limit).ok()).filter(|limit| *limit > 0);
        let limit = limit.unwrap_or(usize::MAX);
        if let Some(token) = text("continue") {
            let (version, after) = token.split_once('.').ok_or(BAD_REQUEST)?;
            let version = Version::Exactly(version.parse().map_err(|_| BAD_REQUEST)?);
            return Ok(Question::List(List { version, limit, after: after.to_owned() }));
        }
        let version = match (version, matching) {
            (None, None) => Version::Newest,
            (Some(version), Some("Exact")) if version > 0 => Version::Exactly(version),
            // So it was before a request could say how its version must match.
            (Some(version), None) if version > 0 && limit < usize::MAX => Version::Exactly(version),
            (Some(version), None | Some("NotOlderThan")) => Version::AtLeast(version),
            _ => return Err(INVALID),
        };
        Ok(Question::List(List { version, limit, after: String::new() }))
    }
}

/// Returns with what a watch of these parameters begins.
fn begin(version: Option<u64>, matching: Option<&str>, initial: Option<bool>) -> Result<Begin, Refused> {
    let at_least = version.map_or(Version::Newest, Version::AtLeast);
    match (initial, matching) {
        (Some(true), Some("NotOlderThan")) => Ok(Begin::List(at_least)),
        (None, None) => Ok(version.filter(|version| *version > 0).map_or(Begin::Nodes(at_least), Begin::Changes)),
        _ => Err(INVALID),
    }
}
