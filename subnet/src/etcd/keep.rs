// SPDX-License-Identifier: Apache-2.0
//! Keeping the etcd lease of our key alive: no put, hence no event for the other nodes.
//!
//! The key is read again before each renewal: an operator, or a flannel that ran here, may have put it under another lease.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use crate::evidence::Evidence;
use crate::lease::Lease;
use crate::retry::{chain, jitter};
use crate::source::{Error, Event};

use super::EtcdStore;

const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// A lease of a few seconds (tests) must not turn into a busy loop.
const SHORTEST: Duration = Duration::from_millis(200);

impl EtcdStore {
    /// Renews an etcd lease; what it has to live now, or `None` when it is gone.
    pub(super) async fn keep_alive_once(&self, id: i64) -> Result<Option<Duration>, Error> {
        let ttl = self
            .pool
            .call("keep the lease alive", |mut client| async move {
                match client.lease_keep_alive(id).await {
                    Ok(_) => {}
                    // How the client says that it expired.
                    Err(etcd_client::Error::LeaseKeepAliveError(_)) => return Ok(0),
                    Err(error) => return Err(error),
                }
                Ok(client.lease_time_to_live(id, None).await?.ttl())
            })
            .await?;
        Ok(u64::try_from(ttl).ok().filter(|seconds| *seconds > 0).map(Duration::from_secs))
    }

    /// Looks at the key and renews what it has. `Ok(None)`: nothing there is ours. Else how long it lives.
    async fn renew(&self, lease: &Lease) -> Result<Option<Option<Duration>>, Error> {
        let Some(stored) = self.read_one(&lease.id).await?.0 else { return Ok(None) };
        if stored.lease().is_some() && !stored.belongs_to(&Evidence::of(lease.subnets, &lease.attrs)) {
            return Ok(None);
        }
        if stored.etcd_lease == 0 {
            return Ok(Some(None));
        }
        Ok(self.keep_alive_once(stored.etcd_lease).await?.map(Some))
    }
}

/// Returns when to renew a lease that has `ttl` to live: after a third of it, so that two renewals may fail, and at the latest
/// `margin` before its end.
fn renew_in(ttl: Duration, margin: Duration) -> Duration {
    let third = ttl / 3;
    let before_margin = ttl.checked_sub(margin).filter(|left| !left.is_zero()).unwrap_or(third);
    jitter(third.min(before_margin)).max(SHORTEST)
}

/// Returns when to try again after a renewal that failed. `left` is what the lease still has to live, where that is known. The
/// tries come ever closer to its end, so that the keeper is never asleep when the lease ends.
fn retry_in(delay: Duration, left: Option<Duration>) -> Duration {
    let left = left.filter(|left| !left.is_zero());
    left.map_or(delay, |left| delay.min(left / 4)).max(SHORTEST)
}

/// See [`crate::source::Source::keep`].
pub(super) async fn run(store: &EtcdStore, lease: &Lease, out: mpsc::Sender<Event>) {
    *store.kept.borrow_mut() = Some(lease.id.clone());
    let mut retry = RETRY_FIRST;
    let mut expires: Option<Instant> = None;
    let mut said: Option<Instant> = None;
    loop {
        let next = match store.renew(lease).await {
            Ok(Some(ttl)) => {
                (retry, said) = (RETRY_FIRST, None);
                expires = ttl.map(|ttl| Instant::now() + ttl);
                if out.send(Event::Kept(ttl)).await.is_err() {
                    return;
                }
                renew_in(ttl.unwrap_or(store.lease_ttl), store.renew_margin)
            }
            Ok(None) => {
                (retry, expires) = (RETRY_FIRST, None);
                renew_in(store.lease_ttl, store.renew_margin)
            }
            Err(error) => {
                if said.is_none_or(|at| at.elapsed() >= RETRY_MAX) {
                    said = Some(Instant::now());
                    if out.send(Event::Trouble(chain(&error))).await.is_err() {
                        return;
                    }
                }
                let delay = jitter(retry);
                retry = (retry * 2).min(RETRY_MAX);
                retry_in(delay, expires.map(|at| at.saturating_duration_since(Instant::now())))
            }
        };
        tokio::select! {
            () = sleep(next) => {}
            () = store.wake.notified() => {}
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
            // A margin that leaves nothing of the TTL does not count.
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
    fn tries_come_ever_closer_to_the_end_of_the_lease() {
        assert_eq!(retry_in(SECOND * 30, None), SECOND * 30, "it is not known when the lease ends");
        assert_eq!(retry_in(SECOND * 30, Some(SECOND * 3600)), SECOND * 30);
        assert_eq!(retry_in(SECOND * 30, Some(Duration::ZERO)), SECOND * 30, "it has ended");
        let (mut left, mut tries) = (SECOND * 60, 0);
        while left > SHORTEST {
            let wait = retry_in(RETRY_MAX, Some(left));
            assert!(wait <= (left / 4).max(SHORTEST), "{wait:?} of {left:?}");
            (left, tries) = (left.saturating_sub(wait), tries + 1);
        }
        assert!((10..40).contains(&tries), "{tries} tries in the last minute");
    }
}
