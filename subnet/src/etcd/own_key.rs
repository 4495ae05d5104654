// SPDX-License-Identifier: Apache-2.0
//! What is known about our own key without reading it. While the watch reports every change of the key, a renewal does not read the key first.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::lease::Id;

use super::keys::{LeaseList, Stored};

/// A lease that was granted or renewed within this time need not be renewed when the renewals begin.
const RECENT: Duration = Duration::from_secs(10);

/// The key as it was read or written last.
#[derive(Debug)]
struct Known {
    id: Id,
    /// `mod_revision`.
    modified: i64,
    etcd_lease: i64,
}

/// An etcd lease that was granted or renewed.
#[derive(Debug, Clone, Copy)]
struct Alive {
    etcd_lease: i64,
    /// The time to live that it was granted. Each renewal begins it again.
    ttl: Duration,
    at: Instant,
}

/// Our own key.
#[derive(Debug, Default)]
pub(super) struct OwnKey {
    known: RefCell<Option<Known>>,
    alive: Cell<Option<Alive>>,
    /// The key whose lease is renewed.
    renewed: RefCell<Option<Id>>,
    /// Wakes the task that renews the lease, because the key has changed.
    changed: Notify,
    is_watched: Cell<bool>,
}

/// The watch runs until this is dropped.
pub(super) struct Watched<'a>(&'a OwnKey);

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.0.is_watched.set(false);
    }
}

impl OwnKey {
    /// Notes that the watch reports all changes of the key from now on, until the returned value is dropped.
    pub(super) fn watched(&self) -> Watched<'_> {
        self.is_watched.set(true);
        Watched(self)
    }

    /// Notes the content of our key after it was read or written.
    pub(super) fn set(&self, stored: &Stored) {
        let known = Known { id: stored.record.id.clone(), modified: stored.modified, etcd_lease: stored.etcd_lease };
        *self.known.borrow_mut() = Some(known);
    }

    /// Forgets the content of our key, so that it is read before the next renewal, and has the lease renewed at once.
    pub(super) fn renew_now(&self) {
        *self.known.borrow_mut() = None;
        self.changed.notify_one();
    }

    /// Takes the report of the watch that a key was written or deleted at this revision. A change of our key that we did not make has the
    /// lease renewed at once.
    pub(super) fn event(&self, id: &Id, revision: i64) {
        let is_known = self.known.borrow().as_ref().is_some_and(|known| known.id == *id && known.modified >= revision);
        if !is_known && self.renewed.borrow().as_ref() == Some(id) {
            self.renew_now();
        }
    }

    /// Compares our key with the list after which the watch begins, because the watch does not report earlier changes.
    pub(super) fn listed(&self, all: &LeaseList) {
        let is_as_known = self.known.borrow().as_ref().is_none_or(|known| {
            let listed = all.stored.iter().find(|stored| stored.record.id == known.id).map(|stored| stored.modified);
            listed == Some(known.modified) || all.revision < known.modified
        });
        if !is_as_known {
            self.renew_now();
        }
    }

    /// Notes the key whose lease is renewed from now on.
    pub(super) fn begin(&self, id: &Id) {
        *self.renewed.borrow_mut() = Some(id.clone());
    }

    /// Waits until the key has changed.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Returns the etcd lease that this key is attached to now, if that is known.
    pub(super) fn etcd_lease(&self, id: &Id) -> Option<i64> {
        let known = self.known.borrow();
        known.as_ref().filter(|known| self.is_watched.get() && known.id == *id).map(|known| known.etcd_lease)
    }

    /// Notes that an etcd lease was granted or renewed now, for this time.
    pub(super) fn kept_alive(&self, etcd_lease: i64, ttl: Duration) {
        self.alive.set(Some(Alive { etcd_lease, ttl, at: Instant::now() }));
    }

    /// Returns the time to live that was granted to an etcd lease, if that is known.
    pub(super) fn granted_ttl(&self, etcd_lease: i64) -> Option<Duration> {
        self.alive.get().filter(|alive| alive.etcd_lease == etcd_lease).map(|alive| alive.ttl)
    }

    /// Returns how long this key still lives, if its etcd lease was granted or renewed a moment ago.
    pub(super) fn recently_kept_alive(&self, id: &Id) -> Option<Duration> {
        let known = self.known.borrow();
        let known = known.as_ref().filter(|known| known.id == *id)?;
        let alive = self.alive.get().filter(|alive| alive.etcd_lease == known.etcd_lease)?;
        let age = alive.at.elapsed();
        alive.ttl.checked_sub(age).filter(|left| age < RECENT && !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::{advance, timeout};

    use super::super::keys::ListRead;
    use super::*;
    use crate::lease::Record;

    fn stored(id: &str, modified: i64) -> Stored {
        let record = Record::new(id.into(), Err("its content does not matter here"));
        Stored { record, subnets: None, created: 5, modified, etcd_lease: 9 }
    }

    #[tokio::test]
    async fn only_a_later_change_of_our_key_has_the_lease_renewed() {
        for (id, revision, renews) in [("ours", 6, false), ("ours", 7, false), ("ours", 8, true), ("theirs", 8, false)]
        {
            let own = OwnKey::default();
            let _watched = own.watched();
            own.set(&stored("ours", 7));
            own.begin(&"ours".into());
            own.event(&id.into(), revision);
            let is_woken = timeout(Duration::ZERO, own.changed()).await.is_ok();
            assert_eq!(is_woken, renews, "{id} at revision {revision}");
            assert_eq!(own.etcd_lease(&"ours".into()), (!renews).then_some(9), "{id} at revision {revision}");
        }
    }

    /// The watch does not report what happened before its list.
    #[tokio::test]
    async fn a_list_that_contradicts_what_we_know_of_our_key_has_the_lease_renewed() {
        for (what, listed, revision, renews) in [
            ("as it is known", Some(7), 9, false),
            ("written since", Some(8), 9, true),
            ("deleted since", None, 9, true),
            ("not in a list that is older than our write", None, 6, false),
        ] {
            let own = OwnKey::default();
            own.set(&stored("ours", 7));
            let ours = listed.map(|modified| stored("ours", modified));
            let stored = std::iter::once(stored("theirs", 4)).chain(ours).collect();
            own.listed(&LeaseList {
                stored,
                revision,
                cluster: 1,
                term: 2,
                config: None,
                read: ListRead { at: Instant::now(), endpoint: 0 },
            });
            assert_eq!(timeout(Duration::ZERO, own.changed()).await.is_ok(), renews, "{what}");
        }
    }

    #[test]
    fn the_etcd_lease_of_our_key_is_known_while_the_key_is_watched() {
        let (own, ours) = (OwnKey::default(), Id::from("ours"));
        own.set(&stored("ours", 7));
        assert_eq!(own.etcd_lease(&ours), None, "nobody would report a change");
        let watched = own.watched();
        assert_eq!((own.etcd_lease(&ours), own.etcd_lease(&"theirs".into())), (Some(9), None));
        drop(watched);
        assert_eq!(own.etcd_lease(&ours), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_was_renewed_ten_seconds_ago_is_renewed_again() {
        let seconds = Duration::from_secs;
        let (own, ours) = (OwnKey::default(), Id::from("ours"));
        own.set(&stored("ours", 7));
        own.kept_alive(8, seconds(60));
        assert_eq!(own.recently_kept_alive(&ours), None, "the key is not attached to that one");
        own.kept_alive(9, seconds(60));
        assert_eq!((own.granted_ttl(9), own.granted_ttl(8)), (Some(seconds(60)), None));
        advance(seconds(4)).await;
        assert_eq!(own.recently_kept_alive(&ours), Some(seconds(56)));
        assert_eq!(own.recently_kept_alive(&"theirs".into()), None);
        advance(seconds(6)).await;
        assert_eq!(own.recently_kept_alive(&ours), None);
        own.kept_alive(9, seconds(3));
        advance(seconds(3)).await;
        assert_eq!(own.recently_kept_alive(&ours), None, "it has ended");
    }
}
