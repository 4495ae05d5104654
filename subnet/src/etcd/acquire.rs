// SPDX-License-Identifier: Apache-2.0
//! Taking, re-taking and giving back a lease: flannel's order, every write fenced by what was read.
//!
//! Two nodes that race for one key: the transaction lets one through. Two that create different keys which overlap
//! (dual-stack keys that share one half, other lengths) are both let through; each then reads what was created between
//! its list and its own key, and the younger deletes its own and picks again. A guard over the whole range inside the
//! transaction would do the same, but then of N nodes that start together N-1 fail in each round.

use std::time::Duration;

use etcd_client::{Compare, CompareOp, GetOptions, PutOptions, TxnOp, TxnOpResponse};
use tokio::time::sleep;

use crate::attrs::Attrs;
use crate::cidr::Subnets;
use crate::evidence::Evidence;
use crate::lease::{Id, Lease};
use crate::pick;
use crate::retry::jitter;
use crate::source::{Claim, Error};

use super::EtcdStore;
use super::keys::{All, Stored};

/// Conflicts with other nodes before giving up.
const ATTEMPTS: u32 = 30;

/// An etcd lease that was granted and is not attached to a key yet: one for all attempts.
type Granted = Option<i64>;

async fn back_off(attempt: u32) {
    sleep(jitter(Duration::from_millis(20 * u64::from(attempt.min(10)) + 5))).await;
}

fn contended(what: &str) -> Error {
    Error::Unavailable { what: format!("{what}: other nodes changed it {ATTEMPTS} times in a row"), source: None }
}

impl EtcdStore {
    pub(super) async fn find_own(&self, evidence: &Evidence) -> Result<Option<Lease>, Error> {
        let all = self.read_all().await?;
        let own = all.ours(evidence).first().and_then(|stored| stored.lease()).cloned();
        self.listed.keep(all);
        Ok(own)
    }

    pub(super) async fn acquire_fenced(&self, claim: &Claim) -> Result<Lease, Error> {
        let mut granted = None;
        let result = self.acquire_attempts(claim, &mut granted).await;
        self.give_up(granted).await;
        result
    }

    async fn acquire_attempts(&self, claim: &Claim, granted: &mut Granted) -> Result<Lease, Error> {
        // What was read a moment ago will do: every write is fenced by it.
        let mut fresh = self.listed.take();
        let starting = fresh.is_some();
        for attempt in 1..=ATTEMPTS {
            let mut all = match fresh.take() {
                Some(all) => all,
                None => self.read_all().await?,
            };
            let own = self.acquire_once(claim, &all, granted).await?;
            if let Some((own, lease)) = own.and_then(|own| Some((own.clone(), own.lease()?.clone()))) {
                if starting {
                    all.put(own);
                    self.listed.keep(all);
                }
                return Ok(lease);
            }
            back_off(attempt).await;
        }
        Err(contended("acquire a subnet"))
    }

    /// `None` = someone was faster: read again.
    async fn acquire_once(&self, claim: &Claim, all: &All, granted: &mut Granted) -> Result<Option<Stored>, Error> {
        let fits = |stored: &Stored| stored.subnets.is_some_and(|subnets| pick::compatible(&claim.network, &subnets));
        let evidence = claim.evidence();
        let ours = all.ours(&evidence);
        let is_ours = |stored: &Stored| ours.iter().any(|own| own.record.id == stored.record.id);
        // An older lease of another node over the same addresses: ours came second in a race and its deletion was cut off.
        let beaten = |own: &Stored| {
            all.stored.iter().any(|other| {
                other.created < own.created
                    && fits(other)
                    && other.lease().is_some()
                    && overlap(own, other)
                    && !is_ours(other)
            })
        };
        if let Some(own) = ours.iter().find(|own| fits(own) && !beaten(own)) {
            return self.rewrite(own, &claim.attrs, granted).await;
        }
        for own in &ours {
            if !self.delete_fenced(own).await? {
                return Ok(None);
            }
        }
        let others = || all.stored.iter().filter(|stored| !is_ours(stored));
        let taken = others().filter_map(|stored| stored.subnets).collect();
        let nodes = others().filter_map(Stored::lease).map(|lease| &lease.attrs);
        let chosen = claim.choose(taken, nodes)?;
        self.create(&chosen, &claim.attrs, (&evidence, all.revision), granted).await
    }

    /// Creates the key, unless anyone else did or an older one overlaps it.
    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &Attrs,
        (evidence, listed): (&Evidence, i64),
        granted: &mut Granted,
    ) -> Result<Option<Stored>, Error> {
        let id: Id = subnets.to_key().into();
        let key = self.keys.lease(&id);
        let etcd_lease = self.grant(granted).await?;
        let put = TxnOp::put(key.as_str(), attrs.to_wire(), Some(PutOptions::new().with_lease(etcd_lease)));
        let free = Compare::create_revision(key.as_str(), CompareOp::Equal, 0);
        let Some(own) = self.put_fenced(&format!("create {key}"), &key, free, put).await? else { return Ok(None) };
        *granted = None;
        let (first, end) = self.keys.leases();
        let between = GetOptions::new()
            .with_range(end)
            .with_min_create_revision(listed + 1)
            .with_max_create_revision(own.created - 1);
        let older = self.pool.get(&format!("check {key}"), first, Some(between)).await?;
        let rival = older.kvs().iter().filter_map(|kv| self.keys.stored(kv)).any(|other| {
            other.lease().is_some_and(|lease| lease.subnets.overlaps(subnets)) && !other.belongs_to(evidence)
        });
        if !rival {
            return Ok(Some(own));
        }
        if self.delete_fenced(&own).await? {
            *granted = Some(etcd_lease);
        }
        Ok(None)
    }

    /// Writes a key if it is as it was read, and gives back what stands there then. `None` = it is not.
    async fn put_fenced(&self, what: &str, key: &str, when: Compare, put: TxnOp) -> Result<Option<Stored>, Error> {
        let answer = self.pool.swap(what, when, vec![put, TxnOp::get(key, None)]).await?;
        if !answer.succeeded() {
            return Ok(None);
        }
        let read = answer.op_responses().into_iter().find_map(|part| match part {
            TxnOpResponse::Get(read) => read.kvs().first().and_then(|kv| self.keys.stored(kv)),
            _ => None,
        });
        let none = || Error::Unavailable { what: format!("{what}: etcd does not say what it wrote"), source: None };
        read.map(Some).ok_or_else(none)
    }

    /// Our key as it stands gets our value; nothing is written when it says the same. Its etcd lease stays (`ignore_lease`), and
    /// so a key without one stays a reservation. `None` = it changed meanwhile.
    async fn rewrite(&self, own: &Stored, attrs: &Attrs, granted: &mut Granted) -> Result<Option<Stored>, Error> {
        // Written by a call whose answer was lost: what was granted is in use.
        if *granted == Some(own.etcd_lease) {
            *granted = None;
        }
        let alive = own.etcd_lease == 0 || self.keep_alive_once(own.etcd_lease).await?.is_some();
        if alive && own.lease().is_some_and(|lease| lease.attrs == *attrs) {
            return Ok(Some(own.clone()));
        }
        let options = if alive {
            PutOptions::new().with_ignore_lease()
        } else {
            PutOptions::new().with_lease(self.grant(granted).await?)
        };
        let key = self.keys.lease(&own.record.id);
        let unchanged = Compare::mod_revision(key.as_str(), CompareOp::Equal, own.modified);
        let put = TxnOp::put(key.as_str(), attrs.to_wire(), Some(options));
        let written = self.put_fenced(&format!("rewrite {key}"), &key, unchanged, put).await?;
        if written.is_some() && !alive {
            *granted = None;
        }
        Ok(written)
    }

    /// True when the key as it was read is gone.
    async fn delete_fenced(&self, stored: &Stored) -> Result<bool, Error> {
        let key = self.keys.lease(&stored.record.id);
        let unchanged = Compare::mod_revision(key.as_str(), CompareOp::Equal, stored.modified);
        let delete = TxnOp::delete(key.as_str(), None);
        Ok(self.pool.swap(&format!("delete {key}"), unchanged, vec![delete]).await?.succeeded())
    }

    async fn grant(&self, granted: &mut Granted) -> Result<i64, Error> {
        if let Some(id) = *granted {
            return Ok(id);
        }
        let ttl = i64::try_from(self.lease_ttl.as_secs().max(1)).unwrap_or(i64::MAX);
        let answer =
            self.pool.call("grant a lease", |mut client| async move { client.lease_grant(ttl, None).await }).await?;
        *granted = Some(answer.id());
        Ok(answer.id())
    }

    /// An etcd lease that nothing was attached to would only linger; failure to revoke it harms nobody.
    async fn give_up(&self, granted: Granted) {
        if let Some(id) = granted {
            let revoked =
                self.pool.call("revoke a lease", |mut client| async move { client.lease_revoke(id).await }).await;
            if let Err(error) = revoked {
                tracing::debug!(%error, "an unused etcd lease is left to expire");
            }
        }
    }

    pub(super) async fn retake_fenced(&self, subnets: &Subnets, was: &Attrs, attrs: &Attrs) -> Result<Lease, Error> {
        let mut granted = None;
        let result = self.retake_attempts(subnets, was, attrs, &mut granted).await;
        self.give_up(granted).await;
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
        let evidence = Evidence::of(*subnets, was).or(attrs);
        for attempt in 1..=ATTEMPTS {
            let done = match self.read_one(&id).await? {
                // A value that nobody can read belongs to nobody, and the key was ours.
                (Some(own), _) if own.belongs_to(&evidence) || own.lease().is_none() => {
                    self.rewrite(&own, attrs, granted).await?
                }
                (Some(other), _) => return Err(Error::Taken { subnet: *subnets, owner: other.owner(&evidence) }),
                (None, revision) => {
                    self.refuse_overlap(subnets, &evidence).await?;
                    self.create(subnets, attrs, (&evidence, revision), granted).await?
                }
            };
            if let Some(lease) = done.as_ref().and_then(Stored::lease) {
                return Ok(lease.clone());
            }
            back_off(attempt).await;
        }
        Err(contended(&format!("retake {subnets}")))
    }

    /// Another key may have taken our addresses while ours was gone.
    async fn refuse_overlap(&self, subnets: &Subnets, evidence: &Evidence) -> Result<(), Error> {
        let all = self.read_all().await?;
        let rival = all.stored.iter().filter_map(|stored| Some((stored, stored.lease()?))).find(|(_, lease)| {
            // Only equals: a stray key over a whole range is set aside by every node and must not keep us out.
            let same_length =
                lease.subnets.iter().map(|net| net.prefix_len()).eq(subnets.iter().map(|net| net.prefix_len()));
            same_length && !evidence.proves(lease) && lease.subnets.overlaps(subnets)
        });
        match rival {
            Some((stored, _)) => Err(Error::Taken { subnet: *subnets, owner: stored.owner(evidence) }),
            None => Ok(()),
        }
    }

    pub(super) async fn release_fenced(&self, lease: &Lease) -> Result<(), Error> {
        let evidence = Evidence::of(lease.subnets, &lease.attrs);
        for attempt in 1..=ATTEMPTS {
            let Some(stored) = self.read_one(&lease.id).await?.0 else {
                return Err(Error::Missing(self.keys.lease(&lease.id)));
            };
            if !stored.belongs_to(&evidence) {
                return Err(Error::Taken { subnet: lease.subnets, owner: stored.owner(&evidence) });
            }
            if self.delete_fenced(&stored).await? {
                return Ok(());
            }
            back_off(attempt).await;
        }
        Err(contended(&format!("release {}", lease.subnets)))
    }
}

fn overlap(one: &Stored, other: &Stored) -> bool {
    matches!((one.subnets, other.subnets), (Some(one), Some(other)) if one.overlaps(&other))
}
