// SPDX-License-Identifier: Apache-2.0
//! How a lease is acquired, taken again and released. The order is flannel's, and every write is a transaction that fails if the key
//! is not as it was read.
//!
//! If two nodes create the same key, the transaction lets one of them through. If they create different keys that overlap (other lengths,
//! or dual-stack keys with one half in common), both transactions succeed. So each node then reads what was created between its list and
//! its own key, and the younger one deletes its key and chooses again. A comparison over the whole range inside the transaction would
//! also work, but then all but one of the nodes that start together would fail in each round.

use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, PutOptions, Txn, TxnOp, TxnOpResponse};
use tokio::time::sleep;

use crate::attrs::Attrs;
use crate::cidr::Subnets;
use crate::evidence::Evidence;
use crate::lease::{Id, Lease};
use crate::retry::Backoff;
use crate::source::{Error, LeaseRequest};

use super::EtcdStore;
use super::call_failure::may_be_done;
use super::keys::{LeaseList, Stored};
use super::leases::Leases;

/// How many times another node may be faster before an operation fails.
const ATTEMPTS: u32 = 30;

/// How many times in a row another node may have taken the chosen subnet before everything is read again.
const LOST_RACES: u32 = 3;

/// How many leases of ours one transaction replaces. A transaction of etcd has at most 128 operations by default.
const MAX_REPLACED: usize = 16;

/// Returns the delays between these attempts.
fn backoff() -> Backoff {
    Backoff::new(Duration::from_millis(25), Duration::from_millis(200))
}

/// An etcd lease that was granted and is not known to be attached to a key. All attempts of one operation share it.
pub(super) type Granted = Option<i64>;

/// The outcome of one attempt to write our key.
enum Attempt {
    /// The key is ours, with this content.
    Won(Box<Stored>),
    /// Another node has created this key first.
    Taken(Box<Stored>),
    /// Another node was faster: the keys are not as they were read. They must be read again.
    Lost,
}

impl Attempt {
    /// Returns the lease that was won.
    fn lease(&self) -> Option<&Lease> {
        match self {
            Attempt::Won(own) => own.lease(),
            Attempt::Taken(_) | Attempt::Lost => None,
        }
    }
}

/// What a new key is based on.
struct Basis<'a> {
    /// Which leases are ours.
    evidence: &'a Evidence,
    /// The revision at which the other keys were read.
    revision: i64,
    /// The leases of ours that the new key replaces. The same transaction deletes them.
    replaced: &'a [&'a Stored],
}

fn contended(what: &str) -> Error {
    Error::Unavailable { what: format!("{what}: other nodes changed it {ATTEMPTS} times in a row"), source: None }
}

impl EtcdStore {
    pub(super) async fn find_own(&self, evidence: &Evidence) -> Result<Option<Lease>, Error> {
        let all = match self.config_list.take() {
            Some(all) => all,
            None => self.read_all().await?,
        };
        let own = all.ours(evidence).first().and_then(|stored| stored.lease()).cloned();
        self.last_list.set(all);
        Ok(own)
    }

    pub(super) async fn acquire_subnet(&self, request: &LeaseRequest) -> Result<Lease, Error> {
        let mut granted = self.unanswered.take();
        let result = self.acquire_attempts(request, &mut granted).await;
        self.keep_or_revoke(granted, result.as_ref().err()).await;
        result
    }

    async fn acquire_attempts(&self, request: &LeaseRequest, granted: &mut Granted) -> Result<Lease, Error> {
        // A list that was read a moment ago may be used, because every write checks that its key has not changed.
        let mut recent = self.last_list.take();
        let is_start = recent.is_some();
        recent = recent.or_else(|| self.config_list.take());
        let (mut backoff, mut lost_races) = (backoff(), 0);
        for _ in 0..ATTEMPTS {
            let mut all = match recent.take() {
                Some(all) => all,
                None => self.read_all().await?,
            };
            let attempt = self.acquire_once(request, &all, granted).await?;
            let lease = attempt.lease().cloned();
            match (attempt, lease) {
                (Attempt::Won(own), Some(lease)) => {
                    self.own_key.set(&own);
                    if is_start {
                        all.replace(*own);
                        self.last_list.set(all);
                    }
                    return Ok(lease);
                }
                // The list with this lease is as good as a new one. When many nodes start together, all new lists would be a heavy load.
                (Attempt::Taken(other), _) if lost_races < LOST_RACES => {
                    lost_races += 1;
                    all.replace(*other);
                    recent = Some(all);
                }
                _ => {
                    lost_races = 0;
                    sleep(backoff.next_delay()).await;
                }
            }
        }
        Err(contended("acquire a subnet"))
    }

    /// Makes one attempt: confirms a lease that is ours, or replaces those that cannot be used by a new one. If no subnet is free, ours stay:
    /// the pods of this node may still use one of them.
    async fn acquire_once(
        &self,
        request: &LeaseRequest,
        all: &LeaseList,
        granted: &mut Granted,
    ) -> Result<Attempt, Error> {
        let evidence = request.evidence(self.types);
        let leases = Leases::new(request, all, &evidence);
        if let Some(own) = leases.usable() {
            return self.rewrite(own, &request.attrs, granted).await;
        }
        let subnets = leases.choose()?;
        let (replaced, surplus) = leases.ours.split_at(leases.ours.len().min(MAX_REPLACED));
        for own in surplus {
            if !self.delete_unchanged(own).await? {
                return Ok(Attempt::Lost);
            }
        }
        let basis = Basis { evidence: &evidence, revision: all.revision, replaced };
        self.create(&subnets, &request.attrs, &basis, granted).await
    }

    /// Creates a key instead of those that it replaces. Deletes it again if an older key overlaps it.
    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &Attrs,
        basis: &Basis<'_>,
        granted: &mut Granted,
    ) -> Result<Attempt, Error> {
        let id: Id = subnets.to_key().into();
        let key = self.keys.lease(&id);
        let etcd_lease = self.grant(granted).await?;
        let put = TxnOp::put(key.as_str(), attrs.to_wire(), Some(PutOptions::new().with_lease(etcd_lease)));
        let mut when = vec![Compare::create_revision(key.as_str(), CompareOp::Equal, 0)];
        when.extend(basis.replaced.iter().map(|own| self.is_unchanged(own)));
        let delete = |own: &&Stored| TxnOp::delete(self.keys.lease(&own.record.id), None);
        let mut writes: Vec<TxnOp> = basis.replaced.iter().map(delete).collect();
        writes.push(put);
        let own = match self.write_if(&format!("create {key}"), &key, when, writes).await? {
            Attempt::Won(own) => own,
            // It may be ours, if the answer to an earlier attempt was lost.
            Attempt::Taken(other) if other.belongs_to(basis.evidence) => return Ok(Attempt::Lost),
            lost => return Ok(lost),
        };
        *granted = None;
        if !self.has_older_rival(&own, subnets, basis).await? {
            return Ok(Attempt::Won(own));
        }
        if self.delete_unchanged(&own).await? {
            *granted = Some(etcd_lease);
        }
        Ok(Attempt::Lost)
    }

    /// Returns true if another node created an overlapping key after the list was read and before our key.
    async fn has_older_rival(&self, own: &Stored, subnets: &Subnets, basis: &Basis<'_>) -> Result<bool, Error> {
        let (first, end) = self.keys.leases();
        let between = GetOptions::new()
            .with_range(end)
            .with_min_create_revision(basis.revision + 1)
            .with_max_create_revision(own.created - 1);
        let what = format!("check {}", self.keys.lease(&own.record.id));
        let older = self.pool.get(&what, first, Some(between)).await?;
        Ok(older.kvs().iter().filter_map(|kv| self.keys.stored(kv)).any(|other| {
            other.lease().is_some_and(|lease| lease.subnets.overlaps(subnets)) && !other.belongs_to(basis.evidence)
        }))
    }

    /// Makes these writes, one of which puts `key`, if all comparisons hold. Returns the new content of the key, or else what it contains
    /// instead.
    async fn write_if(
        &self,
        what: &str,
        key: &str,
        when: Vec<Compare>,
        mut writes: Vec<TxnOp>,
    ) -> Result<Attempt, Error> {
        let get = TxnOp::get(key, None);
        writes.push(get.clone());
        let txn = Txn::new().when(when).and_then(writes).or_else([get]);
        let answer = self.pool.transact(what, &txn).await?;
        let read = answer.op_responses().into_iter().find_map(|part| match part {
            TxnOpResponse::Get(read) => read.kvs().first().and_then(|kv| self.keys.stored(kv)),
            _ => None,
        });
        if !answer.succeeded() {
            return Ok(read.map_or(Attempt::Lost, |other| Attempt::Taken(Box::new(other))));
        }
        let none = || Error::Unavailable { what: format!("{what}: etcd does not return what it wrote"), source: None };
        read.map(|stored| Attempt::Won(Box::new(stored))).ok_or_else(none)
    }

    /// Writes our value to a key that is ours. Nothing is written if the key has this value already.
    ///
    /// The key stays attached to its etcd lease (`ignore_lease`), so a key without one stays a reservation.
    async fn rewrite(&self, own: &Stored, attrs: &Attrs, granted: &mut Granted) -> Result<Attempt, Error> {
        // An earlier write succeeded although its answer was lost. The etcd lease is in use.
        if *granted == Some(own.etcd_lease) {
            *granted = None;
        }
        let is_alive = own.etcd_lease == 0 || self.keep_alive_once(own.etcd_lease).await?.is_some();
        if is_alive && own.lease().is_some_and(|lease| lease.attrs == *attrs) {
            return Ok(Attempt::Won(Box::new(own.clone())));
        }
        let options = if is_alive {
            PutOptions::new().with_ignore_lease()
        } else {
            PutOptions::new().with_lease(self.grant(granted).await?)
        };
        let key = self.keys.lease(&own.record.id);
        let put = TxnOp::put(key.as_str(), attrs.to_wire(), Some(options));
        let when = vec![self.is_unchanged(own)];
        let attempt = self.write_if(&format!("rewrite {key}"), &key, when, vec![put]).await?;
        if matches!(attempt, Attempt::Won(_)) && !is_alive {
            *granted = None;
        }
        Ok(attempt)
    }

    /// Compares a key with what was read from it.
    fn is_unchanged(&self, stored: &Stored) -> Compare {
        Compare::mod_revision(self.keys.lease(&stored.record.id), CompareOp::Equal, stored.modified)
    }

    /// Deletes a key. Returns false if it is not as it was read.
    async fn delete_unchanged(&self, stored: &Stored) -> Result<bool, Error> {
        self.delete_if(&self.keys.lease(&stored.record.id), self.is_unchanged(stored)).await
    }

    /// Deletes a key if the comparison holds. Returns false if it does not.
    async fn delete_if(&self, key: &str, when: Compare) -> Result<bool, Error> {
        let txn = Txn::new().when([when]).and_then([TxnOp::delete(key, None)]);
        Ok(self.pool.transact(&format!("delete {key}"), &txn).await?.succeeded())
    }

    async fn grant(&self, granted: &mut Granted) -> Result<i64, Error> {
        if let Some(id) = *granted {
            return Ok(id);
        }
        let ttl = i64::try_from(self.lease_ttl.as_secs().max(1)).unwrap_or(i64::MAX);
        let answer =
            self.pool.call("grant a lease", |mut client| async move { client.lease_grant(ttl, None).await }).await?;
        *granted = Some(answer.id());
        if let Ok(seconds) = u64::try_from(answer.ttl()) {
            self.own_key.kept_alive(answer.id(), Duration::from_secs(seconds));
        }
        Ok(answer.id())
    }

    /// Revokes an etcd lease that is not attached to a key. If this fails, the etcd lease expires by itself.
    ///
    /// After this error our key may have been written with it, although no answer came: to revoke it would delete the key. Then the next
    /// operation uses it.
    async fn keep_or_revoke(&self, granted: Granted, error: Option<&Error>) {
        if error.is_some_and(may_be_done) {
            self.unanswered.set(granted);
            return;
        }
        if let Some(id) = granted {
            let revoked =
                self.pool.call("revoke a lease", |mut client| async move { client.lease_revoke(id).await }).await;
            if let Err(error) = revoked {
                tracing::debug!(%error, "an unused etcd lease was not revoked and will expire");
            }
        }
    }

    pub(super) async fn retake_subnet(&self, subnets: &Subnets, was: &Attrs, attrs: &Attrs) -> Result<Lease, Error> {
        let mut granted = self.unanswered.take();
        let result = self.retake_attempts(subnets, was, attrs, &mut granted).await;
        self.keep_or_revoke(granted, result.as_ref().err()).await;
        result
    }

    async fn retake_attempts(
        &self,
        subnets: &Subnets,
        was: &Attrs,
        attrs: &Attrs,
        granted: &mut Granted,
    ) -> Result<Lease, Error> {
        let id = subnets.to_key();
        let evidence = Evidence::of(self.types, *subnets, was).with_next(attrs);
        let mut backoff = backoff();
        for _ in 0..ATTEMPTS {
            let attempt = match self.read_one(&id).await? {
                // The key was ours, and an unreadable value does not say that it belongs to another node.
                (Some(own), _) if own.belongs_to(&evidence) || own.lease().is_none() => {
                    self.rewrite(&own, attrs, granted).await?
                }
                (Some(other), _) => return Err(Error::Taken { subnet: *subnets, owner: other.owner(&evidence) }),
                (None, revision) => {
                    self.refuse_overlap(subnets, &evidence).await?;
                    let basis = Basis { evidence: &evidence, revision, replaced: &[] };
                    self.create(subnets, attrs, &basis, granted).await?
                }
            };
            if let (Attempt::Won(own), Some(lease)) = (&attempt, attempt.lease()) {
                self.own_key.set(own);
                return Ok(lease.clone());
            }
            sleep(backoff.next_delay()).await;
        }
        Err(contended(&format!("retake {subnets}")))
    }

    /// Fails if another node took our addresses under a different key while ours was missing.
    async fn refuse_overlap(&self, subnets: &Subnets, evidence: &Evidence) -> Result<(), Error> {
        let all = self.read_all().await?;
        let rival = all.stored.iter().filter_map(Stored::lease).find(|lease| evidence.keeps_us_from(subnets, lease));
        match rival {
            Some(lease) => Err(Error::Taken { subnet: *subnets, owner: evidence.owner(lease) }),
            None => Ok(()),
        }
    }

    pub(super) async fn release_lease(&self, lease: &Lease) -> Result<(), Error> {
        // A record with exactly our content is ours. Only otherwise it must be read.
        let key = self.keys.lease(&lease.id);
        let is_ours = Compare::value(key.as_str(), CompareOp::Equal, lease.attrs.to_wire());
        if self.delete_if(&key, is_ours).await? {
            return Ok(());
        }
        let evidence = Evidence::of(self.types, lease.subnets, &lease.attrs);
        let mut backoff = backoff();
        for _ in 0..ATTEMPTS {
            let Some(stored) = self.read_one(&lease.id).await?.0 else {
                return Err(Error::Missing(self.keys.lease(&lease.id)));
            };
            if !stored.belongs_to(&evidence) {
                return Err(Error::Taken { subnet: lease.subnets, owner: stored.owner(&evidence) });
            }
            if self.delete_unchanged(&stored).await? {
                return Ok(());
            }
            sleep(backoff.next_delay()).await;
        }
        Err(contended(&format!("release {}", lease.subnets)))
    }
}
