// SPDX-License-Identifier: Apache-2.0
//! The names of the keys, and how leases are read. Each key and its value is judged alone, so that a bad one does no harm to others.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{GetOptions, GetResponse, KeyValue, Txn, TxnOp, TxnOpResponse};
use tokio::time::Instant;

use crate::attrs::{Attrs, BadAttrs};
use crate::cidr::Subnets;
use crate::evidence::Evidence;
use crate::lease::{self, Age, Id, Lease, Record};
use crate::source::{Error, UNREADABLE};
use crate::text::Shown;

use super::EtcdStore;
use super::call_failure::too_large;

/// Number of keys in the first page of a list. Each following page may have twice as many, up to [`LARGEST_PAGE`]. With short pages
/// we parse one page while etcd prepares the next. But for each page, etcd walks its index to the end of the range.
const FIRST_PAGE: i64 = 1_000;
const LARGEST_PAGE: i64 = 8_000;
/// The number of keys is divided by this if a page was larger than a message may be.
const DIVISOR: i64 = 8;
/// Number of records that are parsed before other tasks may run.
const PARSED_AT_ONCE: usize = 128;
/// How long a list may be used instead of a new one.
pub(super) const MAX_AGE: Duration = Duration::from_secs(10);

/// Why a key is not a lease.
#[derive(Debug, thiserror::Error)]
enum BadKey {
    #[error("key {} is not a subnet", Shown(.0))]
    Name(Id),
    #[error(transparent)]
    Value(#[from] BadAttrs),
}

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

    /// Returns the range of all leases: the first key, and the key after the last one. `0` is the character after `/`.
    pub(super) fn leases(&self) -> (&str, String) {
        (&self.subnets, format!("{}/subnets0", self.prefix))
    }

    /// Returns the id of a key. Returns `None` for a key outside the range of leases, and for one that no lease can have ([`lease::id`]).
    pub(super) fn id(&self, key: &[u8]) -> Option<Id> {
        let rest = key.strip_prefix(self.subnets.as_bytes())?;
        lease::id(std::str::from_utf8(rest).ok()?)
    }

    /// Reads a key and its value. Returns `None` if the key has no id.
    pub(super) fn stored(&self, kv: &KeyValue) -> Option<Stored> {
        let id = self.id(kv.key())?;
        let subnets = Subnets::from_key(&id);
        let age = Age { stamp: u64::try_from(kv.create_revision()).unwrap_or(0), tie: Arc::default() };
        let lease = match subnets {
            None => Err(BadKey::Name(id.clone())),
            Some(subnets) => Attrs::from_wire(kv.value())
                .map(|attrs| Lease { id: id.clone(), subnets, attrs, age })
                .map_err(BadKey::from),
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

/// A record, with what transactions on its key compare.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) record: Record,
    /// The subnets that the key names. They count as taken even if the value is unreadable.
    pub(super) subnets: Option<Subnets>,
    /// `create_revision`.
    pub(super) created: i64,
    /// `mod_revision`.
    pub(super) modified: i64,
    /// The etcd lease that the key is attached to. 0 if there is none: the key is a reservation.
    pub(super) etcd_lease: i64,
}

impl Stored {
    pub(super) fn lease(&self) -> Option<&Lease> {
        self.record.lease.as_ref().ok()
    }

    pub(super) fn belongs_to(&self, evidence: &Evidence) -> bool {
        self.lease().is_some_and(|lease| evidence.proves(lease))
    }

    /// Returns the name of the owner for messages. The owner is another node.
    pub(super) fn owner(&self, evidence: &Evidence) -> String {
        self.lease().map_or_else(|| UNREADABLE.to_owned(), |lease| evidence.owner(lease))
    }
}

/// How a list was read.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListRead {
    /// When it was read.
    pub(super) at: Instant,
    /// The number of the endpoint that answered.
    pub(super) endpoint: usize,
}

/// All leases at one revision.
#[derive(Debug)]
pub(super) struct LeaseList {
    pub(super) stored: Vec<Stored>,
    pub(super) revision: i64,
    pub(super) cluster: u64,
    /// The raft term of the answer.
    pub(super) term: u64,
    /// net-conf at the same revision.
    pub(super) config: Option<KeyValue>,
    pub(super) read: ListRead,
}

impl LeaseList {
    /// Returns true if the list may be used instead of a new one.
    fn is_recent(&self) -> bool {
        self.read.at.elapsed() < MAX_AGE
    }

    /// Returns the leases that are ours, the one with the best evidence first.
    pub(super) fn ours(&self, evidence: &Evidence) -> Vec<&Stored> {
        // Whoever may write leases may write many that look like ours.
        let ours = evidence.ours(self.stored.iter().filter_map(Stored::lease));
        let ranks: HashMap<&Id, usize> = ours.into_iter().map(|lease| &lease.id).zip(0..).collect();
        let ranked = self.stored.iter().filter_map(|stored| Some((*ranks.get(&stored.record.id)?, stored)));
        let mut ranked: Vec<(usize, &Stored)> = ranked.collect();
        ranked.sort_unstable_by_key(|(rank, _)| *rank);
        ranked.into_iter().map(|(_, stored)| stored).collect()
    }

    /// Replaces what was read from the same key.
    pub(super) fn replace(&mut self, new: Stored) {
        self.stored.retain(|stored| stored.record.id != new.record.id);
        self.stored.push(new);
    }
}

/// The last list of all leases. When the agent starts, it looks for its own lease, acquires it, and then watches the others. With this
/// list, 50,000 leases are read once for all three. It is safe to use a list that is some seconds old: a transaction fails if its key
/// has changed, and the watch begins at the revision of the list.
#[derive(Debug, Default)]
pub(super) struct LastList(RefCell<Option<LeaseList>>);

impl LastList {
    pub(super) fn set(&self, all: LeaseList) {
        *self.0.borrow_mut() = Some(all);
    }

    /// Takes the list, if it is not too old.
    pub(super) fn take(&self) -> Option<LeaseList> {
        self.0.take().filter(LeaseList::is_recent)
    }
}

impl EtcdStore {
    /// Reads net-conf and all leases, in pages at one revision, because 50,000 leases do not fit into one message. A page is parsed
    /// while etcd prepares the next one. net-conf comes with the first page.
    pub(super) async fn read_all(&self) -> Result<LeaseList, Error> {
        self.read_all_for(format!("list {}", self.keys.leases().0)).await
    }

    /// Does the same as [`EtcdStore::read_all`]. `what` says in errors what is read.
    pub(super) async fn read_all_for(&self, what: String) -> Result<LeaseList, Error> {
        let (_, end) = self.keys.leases();
        let range = GetOptions::new().with_range(end);
        let mut limit = FIRST_PAGE;
        let (mut all, mut page) = self.first_page(&what, &range, &mut limit).await?;
        loop {
            let last = page.kvs().last().filter(|_| page.more()).map(|last| [last.key(), b"\0"].concat());
            // The memory of each value is released as soon as it is parsed, and is used again for the next record.
            let mut unparsed = page.take_kvs().into_iter();
            let Some(from) = last else {
                all.stored.extend(unparsed.filter_map(|kv| self.keys.stored(&kv)));
                return Ok(all);
            };
            limit = LARGEST_PAGE.min(2 * limit);
            let range = range.clone().with_revision(all.revision);
            let parse = async {
                while unparsed.len() > 0 {
                    tokio::task::yield_now().await;
                    all.stored.extend(unparsed.by_ref().take(PARSED_AT_ONCE).filter_map(|kv| self.keys.stored(&kv)));
                }
            };
            let (next, ()) = tokio::join!(self.page(&what, from, &range, &mut limit), parse);
            page = next?;
            if page.header().is_none_or(|header| header.cluster_id() != all.cluster) {
                let what = format!("{what}: another cluster answered in the middle of the list");
                return Err(Error::Unavailable { what, source: None });
            }
        }
    }

    /// Reads net-conf and the first keys of the range, in one transaction. Returns a list without leases, and the page.
    async fn first_page(
        &self,
        what: &str,
        range: &GetOptions,
        limit: &mut i64,
    ) -> Result<(LeaseList, GetResponse), Error> {
        let (mut range, mut has_values) = (range.clone(), true);
        loop {
            let read = [
                TxnOp::get(self.keys.config(), None),
                TxnOp::get(self.keys.leases().0, Some(range.clone().with_limit(*limit))),
            ];
            let answer = match self.pool.transact(what, &Txn::new().and_then(read)).await {
                Err(error) if *limit > 1 && too_large(&error) => {
                    *limit = (*limit / DIVISOR).max(1);
                    continue;
                }
                // As for later pages, see below. If the answer is still too large, net-conf is.
                Err(error) if has_values && too_large(&error) => {
                    (range, has_values) = (range.with_keys_only(), false);
                    continue;
                }
                answer => answer?,
            };
            let none =
                || Error::Unavailable { what: format!("{what}: etcd does not return what was read"), source: None };
            let header = answer.header().ok_or_else(none)?;
            let (revision, cluster, term) = (header.revision(), header.cluster_id(), header.raft_term());
            let mut parts = answer.op_responses().into_iter();
            let (Some(TxnOpResponse::Get(mut config)), Some(TxnOpResponse::Get(page))) = (parts.next(), parts.next())
            else {
                return Err(none());
            };
            let config = config.take_kvs().into_iter().next();
            let read = ListRead { at: Instant::now(), endpoint: self.pool.current() };
            return Ok((LeaseList { stored: Vec::new(), revision, cluster, term, config, read }, page));
        }
    }

    /// Reads at most `limit` keys, beginning with `from`. If the values are so large that the answer is refused, `limit` is reduced.
    async fn page(&self, what: &str, from: Vec<u8>, range: &GetOptions, limit: &mut i64) -> Result<GetResponse, Error> {
        loop {
            match self.pool.get(what, &from, Some(range.clone().with_limit(*limit))).await {
                Err(error) if *limit > 1 && too_large(&error) => *limit = (*limit / DIVISOR).max(1),
                // A single value is larger than any answer. The key is read without it, and becomes an unreadable record.
                Err(error) if too_large(&error) => {
                    return self.pool.get(what, &from, Some(range.clone().with_limit(1).with_keys_only())).await;
                }
                answer => return answer,
            }
        }
    }

    /// Reads one lease. Returns it with the revision of the answer.
    pub(super) async fn read_one(&self, id: &str) -> Result<(Option<Stored>, i64), Error> {
        let key = self.keys.lease(id);
        let answer = self.pool.get(&format!("read {key}"), &key, None).await?;
        let revision = answer.header().map_or(0, |header| header.revision());
        Ok((answer.kvs().first().and_then(|kv| self.keys.stored(kv)), revision))
    }
}
