// SPDX-License-Identifier: Apache-2.0
//! The watch: a list, then one etcd watch over config and leases from the revision after it, resumed on another endpoint
//! when it breaks, and begun anew when events may have been missed.
//!
//! One watch, not two: the revision to resume at is then one number, and nothing between the two is lost.

use std::time::Duration;

use etcd_client::{EventType, WatchOptions, WatchResponse, WatchStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::lease::{Id, Record};
use crate::network::net_conf_text;
use crate::retry::Trouble;
use crate::source::{Error, Event};

use super::EtcdStore;
use super::client::{Connected, Fault, MESSAGE_LIMIT, failure, kv, limited, message_too_large};

/// After this long without a word the server is asked for one: a stopped process keeps its connections open.
const IDLE: Duration = Duration::from_secs(5);
/// A message of so many bytes may be a part of a larger one.
const PERHAPS_DIVIDED: usize = 128 << 10;

/// Up to where the store is known, and how it is told from another one.
#[derive(Debug, Clone, Default)]
struct Position {
    revision: i64,
    cluster: u64,
    /// create and mod revision of config: history is another when they differ at the same revision. (A wiped etcd with the
    /// same member names has the same cluster id.)
    config: (i64, i64),
}

/// Why a watch ended.
enum End {
    /// Nobody listens.
    Closed,
    /// Events may have been missed; `reset` = it is another store.
    Relist { reset: bool },
    /// Resume after the last revision.
    Broken { what: String, fault: Fault },
}

/// See [`crate::source::Source::watch`].
pub(super) async fn run(store: &EtcdStore, out: mpsc::Sender<Event>) {
    tokio::select! {
        () = out.closed() => {}
        () = follow(store, &out) => {}
    }
}

async fn follow(store: &EtcdStore, out: &mpsc::Sender<Event>) {
    let mut trouble = Trouble::default();
    let mut position: Option<Position> = None;
    let (mut reset, mut again) = (false, false);
    loop {
        let error = match &mut position {
            None => match list(store, out, reset).await {
                Ok(Some(listed)) => {
                    trouble.over();
                    // The keeper begins by looking; whatever happened to our key before a later list was not told.
                    if std::mem::replace(&mut again, true) {
                        store.wake.notify_one();
                    }
                    (position, reset) = (Some(listed), false);
                    continue;
                }
                Ok(None) => return,
                Err(error) => error,
            },
            Some(at) => match session(store, out, at, &mut trouble).await {
                End::Closed => return,
                End::Relist { reset: other } => {
                    (position, reset) = (None, other);
                    continue;
                }
                End::Broken { what, fault } => failure(&what, store.pool.url(), fault),
            },
        };
        if !trouble.pause(&error, store.pool.len(), out).await {
            return;
        }
    }
}

/// The complete set, or nothing at all. `None` = nobody listens.
async fn list(store: &EtcdStore, out: &mpsc::Sender<Event>, reset: bool) -> Result<Option<Position>, Error> {
    let all = match store.listed.take() {
        Some(all) => all,
        None => store.read_all().await?,
    };
    let key = store.keys.config();
    let pinned = etcd_client::GetOptions::new().with_revision(all.revision);
    let answer = store.pool.get(&format!("read {key}"), &key, Some(pinned)).await?;
    let mut position = Position { revision: all.revision, cluster: all.cluster, config: (0, 0) };
    let records = all.stored.into_iter().map(|stored| stored.record).collect();
    if out.send(Event::Snapshot { records, reset }).await.is_err() {
        return Ok(None);
    }
    if let Some(kv) = answer.kvs().first() {
        position.config = (kv.create_revision(), kv.mod_revision());
        if !config(store, out, kv.value()).await {
            return Ok(None);
        }
    }
    Ok(Some(position))
}

/// Reports net-conf when it is another than the one handed out. False = nobody listens.
async fn config(store: &EtcdStore, out: &mpsc::Sender<Event>, value: &[u8]) -> bool {
    let text = net_conf_text(value);
    let before = store.config_seen.borrow_mut().replace(text.clone());
    match before {
        Some(before) if before != text => out.send(Event::Config(text)).await.is_ok(),
        _ => true,
    }
}

/// Opens the watch and follows it until it ends.
async fn session(store: &EtcdStore, out: &mpsc::Sender<Event>, at: &mut Position, trouble: &mut Trouble) -> End {
    let to = match store.pool.connect().await {
        Ok(to) => to,
        Err(fault) => return End::Broken { what: "connect".into(), fault },
    };
    let index = to.index;
    let end = watch_on(store, out, (at, trouble), to).await;
    if let End::Broken { .. } = end {
        store.pool.failed(index);
    }
    end
}

async fn watch_on(
    store: &EtcdStore,
    out: &mpsc::Sender<Event>,
    (at, trouble): (&mut Position, &mut Trouble),
    to: Connected,
) -> End {
    // Before anything is believed of this server: is it the store that we know?
    match other_store(store, &to, at).await {
        Ok(false) => {}
        Ok(true) => return End::Relist { reset: true },
        Err(end) => return end,
    }
    let what = format!("watch {}", store.keys.prefix());
    let mut stream = match open(store, &to, at.revision + 1).await {
        Ok(stream) => stream,
        Err(fault) => return End::Broken { what, fault },
    };
    loop {
        let message = match timeout(IDLE, stream.message()).await {
            Ok(Ok(Some(message))) => message,
            Ok(Ok(None)) => return End::Broken { what, fault: Fault::Stream("the server closed the watch".into()) },
            // It would be as large again; a list comes in smaller parts.
            Ok(Err(error)) if message_too_large(&error) => return End::Relist { reset: false },
            Ok(Err(error)) => return End::Broken { what, fault: Fault::Etcd(error) },
            Err(_) => {
                if let Err(fault) = probe(store, &to).await {
                    return End::Broken { what, fault };
                }
                if out.send(Event::Word).await.is_err() {
                    return End::Closed;
                }
                continue;
            }
        };
        if message.canceled() {
            return canceled(&message, what, &to).await;
        }
        trouble.over();
        if !report(store, out, at, &message).await {
            return End::Closed;
        }
    }
}

async fn canceled(message: &WatchResponse, what: String, to: &Connected) -> End {
    if message.compact_revision() > 0 {
        tracing::info!(
            compact_revision = message.compact_revision(),
            "etcd has compacted past our revision: listing again"
        );
        return End::Relist { reset: false };
    }
    let reason = message.cancel_reason().to_owned();
    if reason.contains("auth token")
        && let Err(fault) = limited(to.client.refresh_token()).await
    {
        return End::Broken { what, fault };
    }
    End::Broken { what, fault: Fault::Stream(format!("canceled by the server: {reason}")) }
}

/// Asks with a quorum read (a lagging member would look like a store gone backwards).
async fn other_store(store: &EtcdStore, to: &Connected, at: &Position) -> Result<bool, End> {
    let key = store.keys.config();
    let answer = match limited(kv(&to.client).get(key.as_str(), None)).await {
        Ok(answer) => answer,
        Err(fault) => return Err(End::Broken { what: format!("read {key}"), fault }),
    };
    let Some(header) = answer.header() else { return Ok(false) };
    if header.cluster_id() != at.cluster || header.revision() < at.revision {
        return Ok(true);
    }
    // A config written after our revision is news that the watch will bring.
    Ok(match answer.kvs().first() {
        Some(config) => {
            config.mod_revision() <= at.revision && (config.create_revision(), config.mod_revision()) != at.config
        }
        None => false,
    })
}

/// A sign of life: answered by this member alone, so that 50,000 idle nodes do not cost etcd a quorum round each.
async fn probe(store: &EtcdStore, to: &Connected) -> Result<(), Fault> {
    let cheap = etcd_client::GetOptions::new().with_serializable().with_count_only();
    limited(kv(&to.client).get(store.keys.config(), Some(cheap))).await.map(|_| ())
}

async fn open(store: &EtcdStore, to: &Connected, from: i64) -> Result<WatchStream, Fault> {
    let (_, end) = store.keys.leases();
    // After a break etcd has everything since then in one answer, unless it may be divided.
    let options = WatchOptions::new().with_range(end).with_start_revision(from).with_progress_notify().with_fragment();
    let mut client = to.client.watch_client().max_decoding_message_size(MESSAGE_LIMIT);
    limited(client.watch(store.keys.config(), Some(options))).await
}

/// How far behind the last revision of this message the watch has to be resumed. etcd divides an answer of more than 512 KiB: what
/// belongs to its last revision may then come with the next message only, and is told of twice rather than never.
fn behind(message: &WatchResponse) -> i64 {
    let size = |kv: &etcd_client::KeyValue| kv.key().len() + kv.value().len() + 32;
    let bytes: usize = message.events().iter().filter_map(|event| event.kv()).map(size).sum();
    i64::from(bytes > PERHAPS_DIVIDED)
}

/// Hands one response on. False = nobody listens.
async fn report(store: &EtcdStore, out: &mpsc::Sender<Event>, at: &mut Position, message: &WatchResponse) -> bool {
    let mut changes: Vec<Result<Record, Id>> = Vec::new();
    let mut net_conf = None;
    let behind = behind(message);
    for event in message.events() {
        let Some(kv) = event.kv() else { continue };
        at.revision = at.revision.max(kv.mod_revision() - behind);
        let deleted = event.event_type() == EventType::Delete;
        if let Some(id) = store.keys.id(kv.key()) {
            if store.kept.borrow().as_ref() == Some(&id) {
                store.wake.notify_one();
            }
            match store.keys.stored(kv) {
                Some(stored) if !deleted => changes.push(Ok(stored.record)),
                _ => changes.push(Err(id)),
            }
        } else if kv.key() == store.keys.config().as_bytes() {
            at.config = if deleted { (0, 0) } else { (kv.create_revision(), kv.mod_revision()) };
            if deleted {
                tracing::warn!(key = %store.keys.config(), "net-conf was deleted: carrying on with the last one");
            } else {
                net_conf = Some(kv.value().to_vec());
            }
        }
    }
    // An answer without events is a progress notification: everything up to its revision was delivered.
    if message.events().is_empty()
        && !message.created()
        && let Some(header) = message.header()
    {
        at.revision = at.revision.max(header.revision());
    }
    if !changes.is_empty() && out.send(Event::Changes(changes)).await.is_err() {
        return false;
    }
    if let Some(value) = net_conf
        && !config(store, out, &value).await
    {
        return false;
    }
    out.send(Event::Word).await.is_ok()
}
