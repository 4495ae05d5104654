// SPDX-License-Identifier: Apache-2.0
//! Follows the store: reads all leases, then opens one etcd watch for net-conf and leases at the next revision. If the watch breaks, it
//! is resumed on another endpoint. If events may have been missed, everything is read again.
//!
//! One watch serves both net-conf and leases, so that a single revision says where to resume.

use std::time::Duration;

use etcd_client::{EventType, GetOptions, GetResponse, KeyValue, WatchOptions, WatchResponse, WatchStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::net_conf::net_conf_text;
use crate::retry::{Failures, jitter};
use crate::source::{Error, Event, RecordChange};

use super::EtcdStore;
use super::call_failure::{CallFailure, message_too_large, store_error};
use super::client::{ChosenEndpoint, MESSAGE_LIMIT, kv, limited};
use super::keys::{ListRead, MAX_AGE};

/// If the server sends nothing for this time, it is asked whether it is alive. A stopped process keeps its connections open. In a
/// cluster with many nodes the time is longer (see [`patience`]).
const SHORTEST_PATIENCE: Duration = Duration::from_secs(5);
/// The longest such time, whatever the number of nodes.
const LONGEST_PATIENCE: Duration = Duration::from_secs(60);
/// How often all nodes together ask at most in a second, up to 6,000 nodes. Beyond these, the longest time counts.
const MOST_QUESTIONS: u64 = 100;
/// A watch that has sent no message for this time may be dead, although its server answers. etcd sends a progress notification when there was no
/// event for 10 to 22 minutes. (Some proxies send none.)
const SILENCE_LIMIT: Duration = Duration::from_secs(1800);
/// A message that is larger than this, in bytes, may be a fragment of a larger one.
const PERHAPS_FRAGMENT: usize = 128 << 10;

/// Where to resume the watch, and how to recognise the store.
#[derive(Debug, Clone)]
struct Position {
    revision: i64,
    cluster: u64,
    /// The raft term of the last answer of a majority. It never falls, and begins with 1 in an etcd that was wiped or restored from a snapshot.
    term: u64,
    /// If it differs at the same revision, this is another store. (A wiped etcd with the same member names has the same cluster id.)
    net_conf: Option<Version>,
    /// How the list was read, until the first watch has begun.
    listed: Option<ListRead>,
    /// The number of leases: that of the list, and the changes since. An event that is reported twice is counted twice.
    leases: u64,
}

/// The version of net-conf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    create_revision: i64,
    mod_revision: i64,
}

impl Version {
    fn of(kv: &KeyValue) -> Version {
        Version { create_revision: kv.create_revision(), mod_revision: kv.mod_revision() }
    }
}

/// Why a watch ended.
enum End {
    /// Nobody receives the events any more.
    Closed,
    /// Events may have been missed, so everything must be read again. `reset` says that it is another store.
    Relist { reset: bool },
    /// The watch can be resumed after the last revision.
    Broken { what: String, failure: CallFailure },
    /// The same. The watch sent nothing for very long, which is no failure if a proxy sends no progress notifications.
    Silent,
}

/// How long a watch has sent nothing.
struct Silence {
    since: Instant,
    /// When the watch is given up. It is chosen after [`SILENCE_LIMIT`].
    ends: Option<Instant>,
}

impl Silence {
    /// Returns the state of a watch that has just sent something.
    fn begin() -> Silence {
        Silence { since: Instant::now(), ends: None }
    }

    /// Returns true if the watch is to be given up. The watches of many nodes may have begun together, so each has a time of its own, which is up
    /// to twice [`SILENCE_LIMIT`].
    fn is_too_long(&mut self) -> bool {
        let now = Instant::now();
        let choose = || now + jitter(SILENCE_LIMIT * 2) - SILENCE_LIMIT;
        now - self.since >= SILENCE_LIMIT && now >= *self.ends.get_or_insert_with(choose)
    }
}

/// Implements [`crate::source::Source::watch`].
pub(super) async fn run(store: &EtcdStore, out: mpsc::Sender<Event>) {
    let _watched = store.own_key.watched();
    tokio::select! {
        () = out.closed() => {}
        () = follow(store, &out) => {}
    }
}

async fn follow(store: &EtcdStore, out: &mpsc::Sender<Event>) {
    let mut failures = Failures::default();
    let mut position: Option<Position> = None;
    let (mut reset, mut was_listed) = (false, false);
    loop {
        // An endpoint that fails is left, and then another one is in use.
        let url = store.pool.url();
        let error = match &mut position {
            None => match list(store, out, reset).await {
                Ok(Some(listed)) => {
                    failures.reset();
                    // A change of our key before a later list caused no event.
                    if std::mem::replace(&mut was_listed, true) {
                        store.own_key.renew_now();
                    }
                    (position, reset) = (Some(listed), false);
                    continue;
                }
                Ok(None) => return,
                Err(error) => error,
            },
            Some(at) => match session(store, out, at, &mut failures).await {
                End::Closed => return,
                End::Relist { reset: other } => {
                    (position, reset) = (None, other);
                    continue;
                }
                End::Broken { what, failure } => store_error(&what, url, failure),
                End::Silent => continue,
            },
        };
        if !failures.pause(&error, store.pool.len(), out).await {
            return;
        }
    }
}

/// Reads and reports all leases. Returns `None` if nobody receives the events any more.
async fn list(store: &EtcdStore, out: &mpsc::Sender<Event>, reset: bool) -> Result<Option<Position>, Error> {
    let all = match store.last_list.take() {
        Some(all) => all,
        None => store.read_all().await?,
    };
    store.own_key.listed(&all);
    let (listed, leases) = (Some(all.read), all.stored.len() as u64);
    let net_conf = all.config.as_ref().map(Version::of);
    let (revision, cluster, term) = (all.revision, all.cluster, all.term);
    let position = Position { revision, cluster, term, net_conf, listed, leases };
    let net_conf = all.config;
    let records = all.stored.into_iter().map(|stored| stored.record).collect();
    if out.send(Event::Snapshot { records, reset }).await.is_err() {
        return Ok(None);
    }
    if let Some(kv) = net_conf
        && !store.last_net_conf.report(net_conf_text(kv.value()), out).await
    {
        return Ok(None);
    }
    Ok(Some(position))
}

/// Opens a watch on the endpoint in use, and follows it until it ends.
async fn session(store: &EtcdStore, out: &mpsc::Sender<Event>, at: &mut Position, failures: &mut Failures) -> End {
    let to = match store.pool.connect().await {
        Ok(to) => to,
        Err(failure) => return End::Broken { what: "connect".into(), failure },
    };
    let index = to.index;
    let end = watch_on(store, out, (at, failures), to).await;
    if let End::Broken { .. } | End::Silent = end {
        store.pool.failed(index);
    }
    end
}

async fn watch_on(
    store: &EtcdStore,
    out: &mpsc::Sender<Event>,
    (at, failures): (&mut Position, &mut Failures),
    to: ChosenEndpoint,
) -> End {
    // Before its events are used, check that this server belongs to the store that we know. If it sent the list a moment ago, the first
    // sign of life checks this, too: when all nodes start together, etcd has enough to do.
    let is_just_listed = at.listed.take().is_some_and(|list| list.at.elapsed() < MAX_AGE && list.endpoint == to.index);
    if !is_just_listed {
        match is_other_store(store, &to, at).await {
            Ok(false) => {}
            Ok(true) => return End::Relist { reset: true },
            Err(end) => return end,
        }
    }
    let what = format!("watch {}", store.keys.prefix());
    // A resumed watch begins with the last revision that we know, and not with the next one. If the next one deleted a key and was compacted, etcd
    // before 3.4.34 and 3.5.16 would begin after it and never tell of the deletion (etcd issue 18089). Now it says that the revision is compacted.
    let known = at.revision;
    let first = known + i64::from(is_just_listed);
    let mut stream = match open(store, &to, first).await {
        Ok(stream) => stream,
        Err(failure) => return End::Broken { what, failure },
    };
    let mut silence = Silence::begin();
    loop {
        let message = match timeout(patience(at.leases), stream.message()).await {
            Ok(Ok(Some(message))) => message,
            Ok(Ok(None)) => {
                return End::Broken { what, failure: CallFailure::Stream("the server closed the watch".into()) };
            }
            // A resumed watch would send the same message again. A list can be read in smaller pages.
            Ok(Err(error)) if message_too_large(&error) => return End::Relist { reset: false },
            Ok(Err(error)) => return End::Broken { what, failure: CallFailure::Etcd(error) },
            Err(_) if silence.is_too_long() => return End::Silent,
            Err(_) => {
                if let Err(end) = ask_whether_it_lives(store, &to, at, &what).await {
                    return end;
                }
                if out.send(Event::Answered).await.is_err() {
                    return End::Closed;
                }
                continue;
            }
        };
        if message.canceled() {
            return canceled(&message, what, &to).await;
        }
        silence = Silence::begin();
        failures.reset();
        if !report(store, out, (&mut *at, known), &message).await {
            return End::Closed;
        }
    }
}

/// Asks the server of a watch that has sent nothing for a while. Returns how the watch ends, unless the server is alive and has the store that we
/// know.
async fn ask_whether_it_lives(
    store: &EtcdStore,
    to: &ChosenEndpoint,
    at: &mut Position,
    what: &str,
) -> Result<(), End> {
    match probe(store, to, at).await {
        Ok(true) => Ok(()),
        Ok(false) => match is_other_store(store, to, at).await {
            Ok(false) => Ok(()),
            Ok(true) => Err(End::Relist { reset: true }),
            Err(end) => Err(end),
        },
        Err(failure) => Err(End::Broken { what: what.to_owned(), failure }),
    }
}

/// Returns how long the server may send nothing before it is asked whether it is alive. One event is sent to all nodes at the same
/// moment, so a part of the time is random.
fn patience(leases: u64) -> Duration {
    let shared = Duration::from_millis(leases.saturating_mul(1000 / MOST_QUESTIONS));
    // The average is the time itself.
    jitter(shared.clamp(SHORTEST_PATIENCE, LONGEST_PATIENCE) * 4 / 3)
}

async fn canceled(message: &WatchResponse, what: String, to: &ChosenEndpoint) -> End {
    if message.compact_revision() > 0 {
        tracing::info!(
            compact_revision = message.compact_revision(),
            "etcd has compacted past our revision: listing again"
        );
        return End::Relist { reset: false };
    }
    let reason = message.cancel_reason().to_owned();
    if reason.contains("auth token")
        && let Err(failure) = limited(to.client.refresh_token()).await
    {
        return End::Broken { what, failure };
    }
    End::Broken { what, failure: CallFailure::Stream(format!("canceled by the server: {reason}")) }
}

/// Returns true if the server belongs to another store, or the store was replaced. This is a quorum read, because a member that lags
/// behind would look like a store that was reset to an earlier revision.
async fn is_other_store(store: &EtcdStore, to: &ChosenEndpoint, at: &mut Position) -> Result<bool, End> {
    let key = store.keys.config();
    let answer = match limited(kv(&to.client).get(key.as_str(), None)).await {
        Ok(answer) => answer,
        Err(failure) => return Err(End::Broken { what: format!("read {key}"), failure }),
    };
    let is_other = contradicts(&answer, at);
    at.term = answer.header().map_or(at.term, |header| header.raft_term().max(at.term));
    Ok(is_other)
}

/// Returns true if this answer about net-conf does not come from the store of this position.
fn contradicts(answer: &GetResponse, at: &Position) -> bool {
    let Some(header) = answer.header() else { return false };
    // If net-conf was written after our revision, the watch will report it.
    let has_another_config = |kv: &KeyValue| kv.mod_revision() <= at.revision && Some(Version::of(kv)) != at.net_conf;
    // A member that has only just started may not know its term.
    let is_earlier_term = (1..at.term).contains(&header.raft_term());
    header.cluster_id() != at.cluster
        || header.revision() < at.revision
        || is_earlier_term
        || answer.kvs().first().is_some_and(has_another_config)
}

/// Checks that the server is alive. Returns false if it may belong to another store, or lags behind. This member answers alone, so that
/// 50,000 idle nodes do not each cost etcd a quorum round.
async fn probe(store: &EtcdStore, to: &ChosenEndpoint, at: &Position) -> Result<bool, CallFailure> {
    let cheap = GetOptions::new().with_serializable().with_keys_only();
    let answer = limited(kv(&to.client).get(store.keys.config(), Some(cheap))).await?;
    Ok(!contradicts(&answer, at))
}

async fn open(store: &EtcdStore, to: &ChosenEndpoint, from: i64) -> Result<WatchStream, CallFailure> {
    let (_, end) = store.keys.leases();
    // When a watch is resumed, etcd sends all missed events in one message, unless fragments are allowed.
    let options = WatchOptions::new().with_range(end).with_start_revision(from).with_progress_notify().with_fragment();
    let mut client = to.client.watch_client().max_decoding_message_size(MESSAGE_LIMIT);
    limited(client.watch(store.keys.config(), Some(options))).await
}

/// Returns how far before the last revision of this message the watch must be resumed: 0 or 1. etcd splits an answer of more than
/// 512 KiB, so the next message may contain more events of the same revision. It is better to report events twice than to miss them.
fn revisions_to_repeat(message: &WatchResponse) -> i64 {
    let size = |kv: &KeyValue| kv.key().len() + kv.value().len() + 32;
    let bytes: usize = message.events().iter().filter_map(|event| event.kv()).map(size).sum();
    i64::from(bytes > PERHAPS_FRAGMENT)
}

/// Returns the number of leases after one of them was deleted or written. `version` is 1 if it was not there before.
fn counted(leases: u64, deleted: bool, version: i64) -> u64 {
    match deleted {
        true => leases.saturating_sub(1),
        false => leases + u64::from(version == 1),
    }
}

/// Reports one message of the watch. The events up to the revision `known` were reported before. Returns false if nobody receives the events
/// any more.
async fn report(
    store: &EtcdStore,
    out: &mpsc::Sender<Event>,
    (at, known): (&mut Position, i64),
    message: &WatchResponse,
) -> bool {
    let mut changes: Vec<RecordChange> = Vec::new();
    let mut net_conf = None;
    let repeat = revisions_to_repeat(message);
    for event in message.events() {
        let Some(kv) = event.kv().filter(|kv| kv.mod_revision() > known) else { continue };
        at.revision = at.revision.max(kv.mod_revision() - repeat);
        let deleted = event.event_type() == EventType::Delete;
        if let Some(id) = store.keys.id(kv.key()) {
            store.own_key.event(&id, kv.mod_revision());
            at.leases = counted(at.leases, deleted, kv.version());
            match store.keys.stored(kv) {
                Some(stored) if !deleted => changes.push(RecordChange::Written(stored.record)),
                _ => changes.push(RecordChange::Removed(id)),
            }
        } else if kv.key() == store.keys.config().as_bytes() {
            at.net_conf = (!deleted).then(|| Version::of(kv));
            if deleted {
                tracing::warn!(key = %store.keys.config(), "net-conf was deleted: carrying on with the last one");
            } else {
                net_conf = Some(net_conf_text(kv.value()));
            }
        }
    }
    // A message without events is a progress notification: all events up to its revision were delivered.
    if message.events().is_empty()
        && !message.created()
        && let Some(header) = message.header()
    {
        at.revision = at.revision.max(header.revision());
    }
    if !changes.is_empty() && out.send(Event::Changes(changes)).await.is_err() {
        return false;
    }
    if let Some(text) = net_conf
        && !store.last_net_conf.report(text, out).await
    {
        return false;
    }
    out.send(Event::Answered).await.is_ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tokio::time::advance;

    use super::*;

    /// All nodes may have opened their watches at the same moment, as after a restart of etcd.
    #[tokio::test(start_paused = true)]
    async fn a_silent_watch_is_given_up_after_half_an_hour_to_an_hour_on_each_node_at_another_time() {
        let mut minutes = BTreeSet::new();
        for _ in 0..100 {
            let (begin, mut silence) = (Instant::now(), Silence::begin());
            while !silence.is_too_long() {
                advance(Duration::from_secs(60)).await;
            }
            minutes.insert(begin.elapsed().as_secs() / 60);
        }
        assert!(minutes.iter().all(|minutes| (30..=60).contains(minutes)), "{minutes:?}");
        assert!(minutes.len() > 10, "{minutes:?}");
    }

    #[test]
    fn all_nodes_together_do_not_ask_more_often_because_there_are_more_of_them() {
        for (leases, seconds) in [(0, 5), (500, 5), (1_000, 10), (5_000, 50), (50_000, 60), (u64::MAX, 60)] {
            for _ in 0..100 {
                let (patience, seconds) = (patience(leases).as_secs_f64(), f64::from(seconds));
                assert!(patience >= seconds * 0.66 && patience <= seconds * 1.34, "{leases}: {patience}");
            }
        }
    }
    #[test]
    fn a_lease_counts_from_its_first_write_until_it_is_deleted() {
        assert_eq!((counted(7, false, 1), counted(7, false, 2), counted(7, true, 0)), (8, 7, 6));
        assert_eq!(counted(0, true, 0), 0, "it was deleted twice in the same fragment");
    }
}
