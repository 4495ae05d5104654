// SPDX-License-Identifier: Apache-2.0
//! Names of keys, and what stands under them. Each key and value is judged alone.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use etcd_client::{GetOptions, GetResponse, KeyValue};

use crate::attrs::Attrs;
use crate::cidr::Subnets;
use crate::evidence::Evidence;
use crate::lease::{self, Age, Id, Lease, Record};
use crate::source::{Error, UNREADABLE};
use crate::text::Shown;

use super::EtcdStore;
use super::client::too_large;

/// Keys in the first answer; each next one may have twice as many, up to [`LARGEST_PAGE`]. Short pages let reading overlap
/// with etcd's work, but etcd walks the index to the end of the range for each of them.
const FIRST_PAGE: i64 = 1_000;
const LARGEST_PAGE: i64 = 8_000;
/// A page that is larger than a message is asked for again with so many times fewer keys.
const SMALLER: i64 = 8;
/// So many records are read before the runtime may look at the connection.
const READ_AT_ONCE: usize = 128;
/// So long a list is as good as a new one.
const FRESH: Duration = Duration::from_secs(10);

/// The names of our keys.
pub(super) struct Keys {
    prefix: String,
    subnets: String,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Keys {
        let prefix = prefix.trim_end_matches('/').to_owned();
        let subnets = format!("{prefix}/subnets/");
        Keys { prefix, subnets }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn config(&self) -> String {
        format!("{}/config", self.prefix)
    }

    pub(super) fn lease(&self, id: &str) -> String {
        format!("{}{id}", self.subnets)
    }

    /// All leases: first key and the one after the last (`0` follows `/`).
    pub(super) fn leases(&self) -> (&str, String) {
        (&self.subnets, format!("{}/subnets0", self.prefix))
    }

    /// The record's id; `None` for keys that are no lease's, also those that no lease can have ([`lease::id`]).
    pub(super) fn id(&self, key: &[u8]) -> Option<Id> {
        let rest = key.strip_prefix(self.subnets.as_bytes())?;
        lease::id(std::str::from_utf8(rest).ok()?)
    }

    /// What stands under a key.
    pub(super) fn stored(&self, kv: &KeyValue) -> Option<Stored> {
        let id = self.id(kv.key())?;
        let subnets = Subnets::from_key(&id);
        let age = Age { stamp: u64::try_from(kv.create_revision()).unwrap_or(0), tie: Arc::default() };
        let lease = match subnets {
            None => Err(format!("key {} is not a subnet", Shown(&id))),
            Some(subnets) => Attrs::from_wire(kv.value())
                .map(|attrs| Lease { id: id.clone(), subnets, attrs, age })
                .map_err(|error| error.to_string()),
        };
        Some(Stored {
            record: Record::new(id, lease),
            subnets,
            created: kv.create_revision(),
            modified: kv.mod_revision(),
            etcd_lease: kv.lease(),
        })
    }
}

/// One record with all that its fences need.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) record: Record,
    /// What the key grants, whatever its value says.
    pub(super) subnets: Option<Subnets>,
    pub(super) created: i64,
    pub(super) modified: i64,
    /// 0 = none: a reservation.
    pub(super) etcd_lease: i64,
}

impl Stored {
    pub(super) fn lease(&self) -> Option<&Lease> {
        self.record.lease.as_ref().ok()
    }

    pub(super) fn belongs_to(&self, evidence: &Evidence) -> bool {
        self.lease().is_some_and(|lease| evidence.proves(lease))
    }

    /// The owner, which we are not, for people.
    pub(super) fn owner(&self, evidence: &Evidence) -> String {
        self.lease().map_or_else(|| UNREADABLE.to_owned(), |lease| evidence.owner(lease))
    }
}

/// Every lease at one revision.
#[derive(Debug)]
pub(super) struct All {
    pub(super) stored: Vec<Stored>,
    pub(super) revision: i64,
    pub(super) cluster: u64,
}

impl All {
    /// Those that are ours, best first.
    pub(super) fn ours(&self, evidence: &Evidence) -> Vec<&Stored> {
        let ours = evidence.ours(self.stored.iter().filter_map(Stored::lease));
        let stored = |lease: &Lease| self.stored.iter().find(|stored| stored.record.id == lease.id);
        ours.into_iter().filter_map(stored).collect()
    }

    /// This one in place of what was read of its key.
    pub(super) fn put(&mut self, new: Stored) {
        self.stored.retain(|stored| stored.record.id != new.record.id);
        self.stored.push(new);
    }
}

/// The last list, for who comes next: a start looks for our lease, takes it and follows the others, and 50,000 leases are
/// not read three times for that. What changed meanwhile is told by the fences of a write and by the watch.
#[derive(Debug, Default)]
pub(super) struct Listed(RefCell<Option<(Instant, All)>>);

impl Listed {
    pub(super) fn keep(&self, all: All) {
        *self.0.borrow_mut() = Some((Instant::now(), all));
    }

    /// The list, when it was read within the last seconds.
    pub(super) fn take(&self) -> Option<All> {
        self.0.take().filter(|(at, _)| at.elapsed() < FRESH).map(|(_, all)| all)
    }
}

impl EtcdStore {
    /// All leases, in pages at one revision: 50,000 do not fit one message. A page is read while etcd makes the next.
    pub(super) async fn read_all(&self) -> Result<All, Error> {
        let (first, end) = self.keys.leases();
        let what = format!("list {first}");
        let mut all = All { stored: Vec::new(), revision: 0, cluster: 0 };
        let range = GetOptions::new().with_range(end);
        let mut limit = FIRST_PAGE;
        let mut page = self.page(&what, first.into(), &range, &mut limit).await?;
        loop {
            let header = page.header().map_or((0, 0), |header| (header.revision(), header.cluster_id()));
            if all.revision == 0 {
                (all.revision, all.cluster) = header;
            } else if all.cluster != header.1 {
                let what = format!("{what}: another cluster answered half-way");
                return Err(Error::Unavailable { what, source: None });
            }
            let last = page.kvs().last().filter(|_| page.more()).map(|last| [last.key(), b"\0"].concat());
            // A record's text goes as soon as it is read: the next one's is written in its place.
            let mut unread = page.take_kvs().into_iter();
            let Some(from) = last else {
                all.stored.extend(unread.filter_map(|kv| self.keys.stored(&kv)));
                return Ok(all);
            };
            limit = LARGEST_PAGE.min(2 * limit);
            let range = range.clone().with_revision(all.revision);
            let read = async {
                while unread.len() > 0 {
                    tokio::task::yield_now().await;
                    all.stored.extend(unread.by_ref().take(READ_AT_ONCE).filter_map(|kv| self.keys.stored(&kv)));
                }
            };
            let (next, ()) = tokio::join!(self.page(&what, from, &range, &mut limit), read);
            page = next?;
        }
    }

    /// At most `limit` keys from this one on; fewer, and `limit` says how many, where the values are so large that the answer is.
    async fn page(&self, what: &str, from: Vec<u8>, range: &GetOptions, limit: &mut i64) -> Result<GetResponse, Error> {
        loop {
            match self.pool.get(what, &from, Some(range.clone().with_limit(*limit))).await {
                Err(error) if *limit > 1 && too_large(&error) => *limit = (*limit / SMALLER).max(1),
                // One value that is larger than any answer: its key alone says that something is there.
                Err(error) if too_large(&error) => {
                    return self.pool.get(what, &from, Some(range.clone().with_limit(1).with_keys_only())).await;
                }
                answer => return answer,
            }
        }
    }

    /// One lease, and the revision of the answer.
    pub(super) async fn read_one(&self, id: &str) -> Result<(Option<Stored>, i64), Error> {
        let key = self.keys.lease(id);
        let answer = self.pool.get(&format!("read {key}"), &key, None).await?;
        let revision = answer.header().map_or(0, |header| header.revision());
        Ok((answer.kvs().first().and_then(|kv| self.keys.stored(kv)), revision))
    }
}
