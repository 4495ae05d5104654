// SPDX-License-Identifier: Apache-2.0
//! The content of a simulated etcd: keys with all their versions, leases, and the history of changes. `tests/etcd.rs`
//! compares it with a real etcd.

mod lease;

use std::collections::{BTreeMap, BTreeSet};

use crate::pb::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, Event, KeyValue, PutRequest, PutResponse, RangeRequest,
    RangeResponse, RequestOp, ResponseHeader, ResponseOp, TxnRequest, TxnResponse, compare, request_op, response_op,
};
use lease::Lease;

/// Why etcd refuses a request. The texts are etcd's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The revision is older than the last compaction.
    #[error("etcdserver: mvcc: required revision has been compacted")]
    Compacted,
    /// The revision does not exist yet.
    #[error("etcdserver: mvcc: required revision is a future revision")]
    Future,
    /// There is no such lease.
    #[error("etcdserver: requested lease not found")]
    NoLease,
    /// The lease exists already.
    #[error("etcdserver: lease already exists")]
    LeaseExists,
    /// `ignore_lease` was given for a key that does not exist.
    #[error("etcdserver: key not found")]
    NoKey,
}

/// One version of a key: the revision in which it was written, and `None` if it was deleted.
type Version = (i64, Option<KeyValue>);

/// The content of an etcd. A clone is a backup.
#[derive(Debug, Clone)]
pub struct Etcd {
    /// The cluster id.
    pub cluster: u64,
    revision: i64,
    compacted: i64,
    keys: BTreeMap<Vec<u8>, Vec<Version>>,
    history: Vec<(i64, Event)>,
    leases: BTreeMap<i64, Lease>,
    next_lease: i64,
    /// Keys that were deleted because their lease had ended, and not written since.
    ended: BTreeSet<Vec<u8>>,
}

impl Etcd {
    /// Returns an empty etcd.
    pub fn new(cluster: u64) -> Etcd {
        let (keys, leases, ended) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Etcd { cluster, revision: 1, compacted: 0, keys, history: Vec::new(), leases, next_lease: 7_587_000, ended }
    }

    /// Returns the header of an answer.
    pub fn header(&self) -> Option<ResponseHeader> {
        Some(ResponseHeader { cluster_id: self.cluster, member_id: 1, revision: self.revision, raft_term: 2 })
    }

    /// Returns the present revision.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// Returns the revision before which nothing can be read.
    pub fn compacted(&self) -> i64 {
        self.compacted
    }

    /// Forgets all versions before the present revision.
    pub fn compact(&mut self) {
        self.compacted = self.revision;
        self.history.retain(|(revision, _)| *revision > self.compacted);
        for versions in self.keys.values_mut() {
            let last = versions.len().saturating_sub(1);
            versions.drain(..last);
        }
        self.keys.retain(|_, versions| versions.iter().any(|(_, value)| value.is_some()));
    }

    /// Puts a key without a lease, as an administrator does.
    pub fn write(&mut self, key: &str, value: &str) {
        let request = PutRequest { key: key.into(), value: value.into(), ..PutRequest::default() };
        let _ = self.put(request);
    }

    /// Puts a key with a value that need not be text.
    pub fn write_bytes(&mut self, key: &str, value: Vec<u8>) {
        let _ = self.put(PutRequest { key: key.into(), value, ..PutRequest::default() });
    }

    /// Deletes a key.
    pub fn remove(&mut self, key: &str) {
        self.delete(&DeleteRangeRequest { key: key.into(), range_end: Vec::new() });
    }

    /// Deletes all keys with this prefix.
    pub fn delete_prefix(&mut self, prefix: &str) {
        let mut end = prefix.as_bytes().to_vec();
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        self.delete(&DeleteRangeRequest { key: prefix.into(), range_end: end });
    }

    /// Returns all keys and values with this prefix.
    pub fn all(&self, prefix: &str) -> Vec<(String, String)> {
        let live = self.keys.iter().filter_map(|(key, versions)| Some((key, versions.last()?.1.as_ref()?)));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        live.filter(|(key, _)| key.starts_with(prefix.as_bytes()))
            .map(|(key, kv)| (text(key), text(&kv.value)))
            .collect()
    }

    /// Returns the changes from this revision on, of keys in this range.
    pub fn changes(&self, from: i64, key: &[u8], end: &[u8]) -> Vec<Event> {
        let begin = self.history.partition_point(|(revision, _)| *revision < from);
        let is_in = |event: &&Event| event.kv.as_ref().is_some_and(|kv| is_in_range(&kv.key, key, end));
        self.history[begin..].iter().map(|(_, event)| event).filter(is_in).cloned().collect()
    }

    /// The request `Range`.
    pub fn range(&self, request: &RangeRequest) -> Result<RangeResponse, Refused> {
        let at = if request.revision > 0 { request.revision } else { self.revision };
        if at < self.compacted {
            return Err(Refused::Compacted);
        }
        if at > self.revision {
            return Err(Refused::Future);
        }
        let version = |versions: &Vec<Version>| {
            versions.iter().rev().find(|(revision, _)| *revision <= at).and_then(|(_, value)| value.clone())
        };
        let all = self
            .keys
            .range(request.key.clone()..)
            .take_while(|(key, _)| is_in_range(key, &request.key, &request.range_end));
        let mut kvs: Vec<KeyValue> = all.filter_map(|(_, versions)| version(versions)).collect();
        let count = i64::try_from(kvs.len()).unwrap_or(i64::MAX);
        let (min, max) = (request.min_create_revision, request.max_create_revision);
        kvs.retain(|kv| (min == 0 || kv.create_revision >= min) && (max == 0 || kv.create_revision <= max));
        let limit = usize::try_from(request.limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
        let more = kvs.len() > limit;
        kvs.truncate(limit);
        if request.keys_only {
            kvs.iter_mut().for_each(|kv| kv.value.clear());
        }
        if request.count_only {
            kvs.clear();
        }
        Ok(RangeResponse { header: self.header(), kvs, more: more && !request.count_only, count })
    }

    /// The request `Put`.
    pub fn put(&mut self, request: PutRequest) -> Result<PutResponse, Refused> {
        let revision = self.revision + 1;
        self.put_at(request, revision)?;
        self.revision = revision;
        Ok(PutResponse { header: self.header() })
    }

    fn current(&self, key: &[u8]) -> Option<&KeyValue> {
        self.keys.get(key)?.last()?.1.as_ref()
    }

    fn put_at(&mut self, request: PutRequest, revision: i64) -> Result<(), Refused> {
        let before = self.current(&request.key).cloned();
        let lease = match (&before, request.ignore_lease) {
            (Some(before), true) => before.lease,
            (None, true) => return Err(Refused::NoKey),
            (_, false) => request.lease,
        };
        if lease != 0 && !self.leases.contains_key(&lease) {
            return Err(Refused::NoLease);
        }
        if let Some(old) = before.as_ref().and_then(|before| self.leases.get_mut(&before.lease)) {
            old.keys.remove(&request.key);
        }
        if let Some(new) = self.leases.get_mut(&lease) {
            new.keys.insert(request.key.clone());
        }
        let (create_revision, version) = before.map_or((revision, 1), |kv| (kv.create_revision, kv.version + 1));
        let PutRequest { key, value, .. } = request;
        self.ended.remove(&key);
        let kv = KeyValue { key: key.clone(), create_revision, mod_revision: revision, version, value, lease };
        self.history.push((revision, Event { r#type: 0, kv: Some(kv.clone()) }));
        self.keys.entry(key).or_default().push((revision, Some(kv)));
        Ok(())
    }

    /// The request `DeleteRange`.
    pub fn delete(&mut self, request: &DeleteRangeRequest) -> DeleteRangeResponse {
        let revision = self.revision + 1;
        let deleted = self.delete_at(request, revision);
        if deleted > 0 {
            self.revision = revision;
        }
        DeleteRangeResponse { header: self.header(), deleted }
    }

    fn delete_at(&mut self, request: &DeleteRangeRequest, revision: i64) -> i64 {
        let in_range = self.keys.range(request.key.clone()..);
        let live: Vec<Vec<u8>> = in_range
            .take_while(|(key, _)| is_in_range(key, &request.key, &request.range_end))
            .filter(|(_, versions)| versions.last().is_some_and(|(_, value)| value.is_some()))
            .map(|(key, _)| key.clone())
            .collect();
        for key in &live {
            self.delete_key(key, revision);
        }
        i64::try_from(live.len()).unwrap_or(i64::MAX)
    }

    fn delete_key(&mut self, key: &[u8], revision: i64) {
        let Some(versions) = self.keys.get_mut(key) else { return };
        let lease = versions.last().and_then(|(_, kv)| kv.as_ref()).map_or(0, |kv| kv.lease);
        versions.push((revision, None));
        if let Some(lease) = self.leases.get_mut(&lease) {
            lease.keys.remove(key);
        }
        let kv = KeyValue { key: key.to_vec(), mod_revision: revision, ..KeyValue::default() };
        self.history.push((revision, Event { r#type: 1, kv: Some(kv) }));
    }

    /// The request `Txn`. Either all of its operations are carried out, or none.
    pub fn txn(&mut self, request: TxnRequest) -> Result<TxnResponse, Refused> {
        let succeeded = request.compare.iter().all(|compare| self.holds(compare));
        let ops = if succeeded { request.success } else { request.failure };
        let (backup, revision) = (self.clone_for(&ops), self.revision + 1);
        let mut responses = Vec::new();
        let mut wrote = false;
        for op in ops {
            match self.operation(op, revision, &mut wrote) {
                Ok(response) => responses.push(ResponseOp { response }),
                Err(refused) => {
                    if let Some(backup) = backup {
                        *self = backup;
                    }
                    return Err(refused);
                }
            }
        }
        if wrote {
            self.revision = revision;
        }
        Ok(TxnResponse { header: self.header(), succeeded, responses })
    }

    /// Returns a copy if one of the operations can be refused after another one was carried out.
    fn clone_for(&self, ops: &[RequestOp]) -> Option<Etcd> {
        let writes = |op: &&RequestOp| !matches!(op.request, Some(request_op::Request::RequestRange(_)) | None);
        (ops.iter().filter(writes).count() > 1).then(|| self.clone())
    }

    fn operation(
        &mut self,
        op: RequestOp,
        revision: i64,
        wrote: &mut bool,
    ) -> Result<Option<response_op::Response>, Refused> {
        Ok(Some(match op.request {
            Some(request_op::Request::RequestRange(range)) => {
                // A read in a transaction sees what the transaction has written.
                let before = self.revision;
                self.revision = if *wrote { revision } else { before };
                let read = self.range(&range);
                self.revision = before;
                response_op::Response::ResponseRange(read?)
            }
            Some(request_op::Request::RequestPut(put)) => {
                self.put_at(put, revision)?;
                *wrote = true;
                response_op::Response::ResponsePut(PutResponse { header: None })
            }
            Some(request_op::Request::RequestDeleteRange(delete)) => {
                let deleted = self.delete_at(&delete, revision);
                *wrote |= deleted > 0;
                response_op::Response::ResponseDeleteRange(DeleteRangeResponse { header: None, deleted })
            }
            None => return Ok(None),
        }))
    }

    fn holds(&self, compare: &Compare) -> bool {
        use compare::TargetUnion::{CreateRevision, Lease, ModRevision, Value, Version};
        let empty = KeyValue::default();
        let kv = self.current(&compare.key);
        let found = kv.unwrap_or(&empty);
        let order = match &compare.target_union {
            Some(Version(wanted)) => found.version.cmp(wanted),
            Some(CreateRevision(wanted)) => found.create_revision.cmp(wanted),
            Some(ModRevision(wanted)) => found.mod_revision.cmp(wanted),
            Some(Lease(wanted)) => found.lease.cmp(wanted),
            // A key that does not exist equals no value, not even the empty one.
            Some(Value(_)) if kv.is_none() => return false,
            Some(Value(wanted)) => found.value.cmp(wanted),
            // A field with its default value is not sent.
            None => match compare.target {
                0 => found.version.cmp(&0),
                1 => found.create_revision.cmp(&0),
                2 => found.mod_revision.cmp(&0),
                _ => found.lease.cmp(&0),
            },
        };
        match compare.result {
            0 => order.is_eq(),
            1 => order.is_gt(),
            2 => order.is_lt(),
            _ => order.is_ne(),
        }
    }
}

/// Returns true if the key is in the range of a request. Without an end, the range is one key.
fn is_in_range(key: &[u8], first: &[u8], end: &[u8]) -> bool {
    if end.is_empty() { key == first } else { key >= first && (end == b"\0" || key < end) }
}
