// SPDX-License-Identifier: Apache-2.0
//! The leases of the simulated etcd: keys are attached to them, and go when they end.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use super::{Etcd, Refused};
use crate::pb::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveResponse, LeaseTimeToLiveRequest, LeaseTimeToLiveResponse,
};

/// A lease, to which keys are attached.
#[derive(Debug, Clone)]
pub(super) struct Lease {
    ttl: Duration,
    expires: Instant,
    pub(super) keys: BTreeSet<Vec<u8>>,
}

impl Etcd {
    /// Gives every lease its whole time again, as etcd does when a member starts from a backup.
    pub fn restart_leases(&mut self, now: Instant) {
        self.leases.values_mut().for_each(|lease| lease.expires = now + lease.ttl);
    }

    /// Returns true if this key was deleted because its lease had ended.
    pub fn has_ended(&self, key: &str) -> bool {
        self.ended.contains(key.as_bytes())
    }

    /// Returns when the next lease expires.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.leases.values().map(|lease| lease.expires).min()
    }

    /// Deletes the leases that have expired, and their keys.
    pub fn expire(&mut self, now: Instant) {
        let expired: Vec<i64> =
            self.leases.iter().filter(|(_, lease)| lease.expires <= now).map(|(id, _)| *id).collect();
        for id in expired {
            self.ended.extend(self.leases.get(&id).into_iter().flat_map(|lease| lease.keys.clone()));
            let _ = self.revoke(id);
        }
    }

    /// The request `LeaseGrant`.
    pub fn grant(&mut self, request: &LeaseGrantRequest, now: Instant) -> Result<LeaseGrantResponse, Refused> {
        let id = match request.id {
            0 => {
                self.next_lease += 1;
                self.next_lease
            }
            id if self.leases.contains_key(&id) => return Err(Refused::LeaseExists),
            id => id,
        };
        let ttl = Duration::from_secs(u64::try_from(request.ttl).unwrap_or(0).max(1));
        self.leases.insert(id, Lease { ttl, expires: now + ttl, keys: BTreeSet::new() });
        Ok(LeaseGrantResponse { header: self.header(), id, ttl: request.ttl, error: String::new() })
    }

    /// The request `LeaseRevoke`: deletes the lease and its keys.
    pub fn revoke(&mut self, id: i64) -> Result<(), Refused> {
        let lease = self.leases.remove(&id).ok_or(Refused::NoLease)?;
        if !lease.keys.is_empty() {
            self.revision += 1;
            let revision = self.revision;
            lease.keys.iter().for_each(|key| self.delete_key(key, revision));
        }
        Ok(())
    }

    /// One message of `LeaseKeepAlive`. The TTL is 0 if there is no such lease.
    pub fn keep_alive(&mut self, id: i64, now: Instant) -> LeaseKeepAliveResponse {
        let ttl = self.leases.get_mut(&id).map_or(0, |lease| {
            lease.expires = now + lease.ttl;
            seconds(lease.ttl)
        });
        LeaseKeepAliveResponse { header: self.header(), id, ttl }
    }

    /// The request `LeaseTimeToLive`.
    pub fn time_to_live(&self, request: &LeaseTimeToLiveRequest, now: Instant) -> LeaseTimeToLiveResponse {
        let (ttl, granted_ttl, keys) = match self.leases.get(&request.id) {
            Some(lease) => {
                let keys = if request.keys { lease.keys.iter().cloned().collect() } else { Vec::new() };
                (seconds(lease.expires - now), seconds(lease.ttl), keys)
            }
            None => (-1, 0, Vec::new()),
        };
        LeaseTimeToLiveResponse { header: self.header(), id: request.id, ttl, granted_ttl, keys }
    }
}

fn seconds(time: Duration) -> i64 {
    i64::try_from(time.as_secs()).unwrap_or(i64::MAX)
}
