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

    /// When to renew a lease that has this long to live.
    fn renew_in(&self, ttl: Duration) -> Duration {
        let third = ttl / 3;
        let margin = ttl.checked_sub(self.renew_margin).filter(|left| !left.is_zero()).unwrap_or(third);
        jitter(third.min(margin)).max(SHORTEST)
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
                store.renew_in(ttl.unwrap_or(store.lease_ttl))
            }
            Ok(None) => {
                (retry, expires) = (RETRY_FIRST, None);
                store.renew_in(store.lease_ttl)
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
                // Ever closer tries while the lease still lives: never asleep when it ends.
                let left =
                    expires.map(|at| at.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero());
                left.map_or(delay, |left| delay.min(left / 4)).max(SHORTEST)
            }
        };
        tokio::select! {
            () = sleep(next) => {}
            () = store.wake.notified() => {}
            () = out.closed() => return,
        }
    }
}
