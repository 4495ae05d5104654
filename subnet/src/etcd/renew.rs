// SPDX-License-Identifier: Apache-2.0
//! Renews the etcd lease of our key. The key is not written, so other nodes get no event.
//!
//! An operator, or a flannel that ran here, may have attached the key to another etcd lease. So the key is read before a renewal, unless
//! the watch would have reported that.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::evidence::Evidence;
use crate::lease::{Lease, Record};
use crate::retry::{Backoff, Failures, jitter};
use crate::source::{Error, Event, RecordChange};

use super::EtcdStore;

const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// The shortest pause. Leases of a few seconds occur in tests, and must not cause a busy loop.
const SHORTEST: Duration = Duration::from_millis(200);

/// The result of one renewal of our key.
enum Renewal {
    /// The key is missing, or its etcd lease has expired. Nothing was renewed.
    Gone,
    /// The key has the lease of another node. Nothing was renewed.
    OfAnotherNode(Box<Record>),
    /// The key has no etcd lease and never expires: it is a reservation.
    Permanent,
    /// The key expires after this time, unless it is renewed again.
    For(Duration),
}

/// What was read under our key.
enum OwnKeyRead {
    Missing,
    /// The etcd lease that the key is attached to.
    Ours(i64),
    OfAnotherNode(Box<Record>),
}

impl EtcdStore {
    /// Renews an etcd lease. Returns its new time to live, or `None` if the etcd lease does not exist any more.
    pub(super) async fn keep_alive_once(&self, id: i64) -> Result<Option<Duration>, Error> {
        // etcd-client does not return the time to live with the answer, and it is always the one that was granted.
        let granted = self.own_key.granted_ttl(id).and_then(|ttl| i64::try_from(ttl.as_secs()).ok());
        let ttl = self
            .pool
            .call("keep the lease alive", |mut client| async move {
                match client.lease_keep_alive(id).await {
                    Ok(_) => {}
                    // The client reports an expired lease in this way.
                    Err(etcd_client::Error::LeaseKeepAliveError(_)) => return Ok(0),
                    Err(error) => return Err(error),
                }
                match granted {
                    Some(ttl) => Ok(ttl),
                    None => Ok(client.lease_time_to_live(id, None).await?.ttl()),
                }
            })
            .await?;
        let ttl = u64::try_from(ttl).ok().filter(|seconds| *seconds > 0).map(Duration::from_secs);
        if let Some(ttl) = ttl {
            self.own_key.kept_alive(id, ttl);
        }
        Ok(ttl)
    }

    /// Renews the etcd lease that our key is attached to now.
    async fn renew(&self, lease: &Lease) -> Result<Renewal, Error> {
        let etcd_lease = match self.own_key.etcd_lease(&lease.id) {
            Some(known) => known,
            None => match self.read_own(lease).await? {
                OwnKeyRead::Ours(etcd_lease) => etcd_lease,
                OwnKeyRead::OfAnotherNode(record) => return Ok(Renewal::OfAnotherNode(record)),
                OwnKeyRead::Missing => return Ok(Renewal::Gone),
            },
        };
        if etcd_lease == 0 {
            return Ok(Renewal::Permanent);
        }
        if let Some(ttl) = self.keep_alive_once(etcd_lease).await? {
            return Ok(Renewal::For(ttl));
        }
        // The etcd lease has expired, and etcd has deleted the key, or is about to. [`run`] reports that, and the key is created again.
        // Only if another node has created it since, its record must not be reported as gone.
        Ok(match self.read_own(lease).await? {
            OwnKeyRead::OfAnotherNode(record) => Renewal::OfAnotherNode(record),
            // Somebody has attached the key to another etcd lease, and the watch has not told it yet.
            OwnKeyRead::Ours(0) => Renewal::Permanent,
            OwnKeyRead::Ours(now) if now != etcd_lease => {
                self.keep_alive_once(now).await?.map_or(Renewal::Gone, Renewal::For)
            }
            OwnKeyRead::Ours(_) | OwnKeyRead::Missing => Renewal::Gone,
        })
    }

    /// Reads our key.
    async fn read_own(&self, lease: &Lease) -> Result<OwnKeyRead, Error> {
        let Some(stored) = self.read_one(&lease.id).await?.0 else { return Ok(OwnKeyRead::Missing) };
        if stored.lease().is_some() && !stored.belongs_to(&Evidence::of(self.types, lease.subnets, &lease.attrs)) {
            return Ok(OwnKeyRead::OfAnotherNode(Box::new(stored.record)));
        }
        self.own_key.set(&stored);
        Ok(OwnKeyRead::Ours(stored.etcd_lease))
    }
}

/// Returns when to renew a lease that has `ttl` to live: after a third of it, so that two renewals may fail, and at the latest
/// `margin` before its end.
fn renew_in(ttl: Duration, margin: Duration) -> Duration {
    let third = ttl / 3;
    let before_margin = ttl.checked_sub(margin).filter(|left| !left.is_zero()).unwrap_or(third);
    jitter(third.min(before_margin)).max(SHORTEST)
}

/// Returns when to try again after a renewal that failed. `left` is the remaining life of the lease, if it is known. The attempts come
/// closer together towards the end of the lease, so that one of them always comes before it.
fn retry_in(delay: Duration, left: Option<Duration>) -> Duration {
    let left = left.filter(|left| !left.is_zero());
    left.map_or(delay, |left| delay.min(left / 4)).max(SHORTEST)
}

/// Implements [`crate::source::Source::keep`].
pub(super) async fn run(store: &EtcdStore, lease: &Lease, out: mpsc::Sender<Event>) {
    store.own_key.begin(&lease.id);
    // The start of the agent has granted or renewed the lease a moment ago.
    let mut recent = store.own_key.recently_kept_alive(&lease.id);
    let mut failures = Failures::with_backoff(Backoff::new(RETRY_FIRST, RETRY_MAX));
    let mut expires: Option<Instant> = None;
    loop {
        let renewal = match recent.take() {
            Some(left) => Ok(Renewal::For(left)),
            None => store.renew(lease).await,
        };
        let pause = match renewal {
            Ok(renewal) => {
                failures.reset();
                let ttl = if let Renewal::For(ttl) = renewal { Some(ttl) } else { None };
                expires = ttl.map(|ttl| Instant::now() + ttl);
                // A watch that was interrupted while the store was replaced may not know this of our key.
                let event = match renewal {
                    Renewal::Gone => Event::Changes(vec![RecordChange::Removed(lease.id.clone())]),
                    Renewal::OfAnotherNode(record) => Event::Changes(vec![RecordChange::Written(*record)]),
                    Renewal::Permanent | Renewal::For(_) => Event::Renewed(ttl),
                };
                if out.send(event).await.is_err() {
                    return;
                }
                renew_in(ttl.unwrap_or(store.lease_ttl), store.renew_margin)
            }
            Err(error) => {
                let Some(delay) = failures.report(&error, 1, Event::NotRenewed, &out).await else { return };
                retry_in(delay, expires.map(|at| at.saturating_duration_since(Instant::now())))
            }
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = store.own_key.changed() => {}
            () = out.closed() => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_lease_is_renewed_after_a_third_of_its_time_and_before_the_margin() {
        // TTL and margin in seconds, and the longest wait.
        for (ttl, margin, most) in [
            (86_400, 3_600, 28_800),
            (86_400, 0, 28_800),
            (86_400, 80_000, 6_400),
            // A margin that leaves nothing of the TTL is ignored.
            (86_400, 86_400, 28_800),
            (60, 3_600, 20),
            (3, 0, 1),
        ] {
            for _ in 0..100 {
                let wait = renew_in(SECOND * ttl, SECOND * margin);
                assert!(wait <= SECOND * most && wait >= SECOND * most / 2, "{ttl} {margin}: {wait:?}");
            }
        }
        assert_eq!(renew_in(Duration::from_millis(10), Duration::ZERO), SHORTEST);
    }

    #[test]
    fn attempts_come_closer_together_towards_the_end_of_the_lease() {
        assert_eq!(retry_in(SECOND * 30, None), SECOND * 30, "the end of the lease is unknown");
        assert_eq!(retry_in(SECOND * 30, Some(SECOND * 3600)), SECOND * 30);
        assert_eq!(retry_in(SECOND * 30, Some(Duration::ZERO)), SECOND * 30, "the lease has ended");
        let (mut left, mut attempts) = (SECOND * 60, 0);
        while left > SHORTEST {
            let wait = retry_in(RETRY_MAX, Some(left));
            assert!(wait <= (left / 4).max(SHORTEST), "{wait:?} of {left:?}");
            (left, attempts) = (left.saturating_sub(wait), attempts + 1);
        }
        assert!((10..40).contains(&attempts), "{attempts} attempts in the last minute");
    }
}
