// SPDX-License-Identifier: Apache-2.0
//! Clear text where the backend of our lease encrypts (docs/adr/020-live-change.md).
//!
//! While net-conf changes the backend to one that encrypts, packets to peers that have not followed yet still go the earlier way. That is
//! so for a limited time, which the node measures, and for peers that were reached before the change alone. Otherwise whoever may write
//! a lease could choose that packets go out in clear text.

use std::collections::{BTreeSet, HashMap};

use weft_backends::backend::{Backend, Skip};
use weft_backends::diff::Op;
use weft_backends::state::{Key, Value};
use weft_backends::wireguard::WireGuardLink;
use weft_subnet::lease::{Id, Lease};

use super::{FirstLeases, Plan};

/// Returns why packets must not go by a backend of this type: `ours` encrypts, and the other one does not. `kind` may also be the
/// `BackendType` of a lease. Returns `None` if they may, because `ours` does not encrypt or net-conf allows clear text.
pub(super) fn refusal(ours: &dyn Backend, kind: &str) -> Option<Skip> {
    ours.refuses(kind).filter(|_| !ours.serves(kind))
}

/// How far the node of a lease has followed a change to a backend that encrypts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Its lease has named only the earlier way so far.
    Waiting,
    /// Its lease has named the backend of our lease.
    Followed,
}

/// Which leases may be, and which must not be, reached in clear text.
#[derive(Debug, Default)]
pub(super) struct ClearText {
    /// The leases that were reached in clear text when our lease changed to a backend that encrypts. Empty without such a change.
    before: HashMap<Id, Progress>,
    /// The believed leases that are not reached, because that would be in clear text.
    refused: BTreeSet<Id>,
    /// The time for clear text is over. What would carry it is removed even if nothing else is.
    is_over: bool,
}

impl ClearText {
    /// Begins a change of our lease to a backend that encrypts. These leases are reached in clear text.
    fn begin(&mut self, reached: impl Iterator<Item = Id>) {
        self.before = reached.map(|id| (id, Progress::Waiting)).collect();
        self.is_over = false;
    }

    fn end(&mut self) {
        self.before = HashMap::new();
    }

    fn at(&self, progress: Progress) -> impl Iterator<Item = &Id> {
        self.before.iter().filter(move |(_, reached)| **reached == progress).map(|(id, _)| id)
    }

    /// Forgets a lease that is not believed any more. If it comes back, it is a new lease.
    pub(super) fn forget(&mut self, id: &Id) {
        self.before.remove(id);
        self.refused.remove(id);
    }

    /// Forgets the refusals, because all leases will be planned again.
    pub(super) fn forget_refusals(&mut self) {
        self.refused.clear();
    }

    pub(super) fn refuse(&mut self, id: &Id) {
        self.refused.insert(id.clone());
    }

    pub(super) fn allow(&mut self, id: &Id) {
        self.refused.remove(id);
    }

    /// Takes notice that the lease names the backend of our lease.
    pub(super) fn followed(&mut self, id: &Id) {
        if let Some(progress) = self.before.get_mut(id) {
            *progress = Progress::Followed;
        }
    }
}

impl Plan {
    /// Returns true if packets to this lease may go by an earlier backend of this type. `follows` says whether the lease names the backend
    /// of ours. [`ClearText::followed`] must have been called if so.
    pub(super) fn may_send_by(&self, kind: &str, lease: &Lease, follows: bool) -> bool {
        if refusal(&*self.backend, kind).is_none() {
            return true;
        }
        match self.clear_text.before.get(&lease.id) {
            Some(Progress::Waiting) => true,
            // A lease that has followed and names the earlier way alone again was changed back by somebody.
            Some(Progress::Followed) => follows && self.sends_earlier(),
            None => false,
        }
    }

    /// Returns true if packets from this lease by an earlier backend of this type are accepted, where the agent itself decides this. A
    /// peer that has followed may still send by it for some moments.
    pub(super) fn may_receive_by(&self, kind: &str, lease: &Lease) -> bool {
        refusal(&*self.backend, kind).is_none() || self.clear_text.before.contains_key(&lease.id)
    }

    /// Returns true if the backend of our lease encrypts, and peers may still be reached by an earlier one that does not.
    pub fn has_clear_text(&self) -> bool {
        self.extra_backends.earlier().any(|extra| refusal(&*self.backend, extra.kind()).is_some())
    }

    /// Returns true if this operation removes a route or a device by which packets would go in clear text, and the time for that is over. It
    /// must not wait until the store says which peers are gone.
    pub fn ends_clear_text(&self, op: &Op) -> bool {
        let Op::Remove(key, value) = op else { return false };
        if !self.clear_text.is_over || !self.refuses("") || self.has_clear_text() {
            return false;
        }
        match (key, value) {
            (Key::Link(_), Value::Link(link)) => link.kind.of::<WireGuardLink>().is_none(),
            (Key::Route(..), Value::Route(route)) => {
                route.dev().is_some_and(|dev| self.wireguard_devices().all(|ours| ours != dev))
            }
            _ => false,
        }
    }

    /// Returns true if packets must not go by a backend of this type, because the backend of our lease encrypts.
    pub fn refuses(&self, kind: &str) -> bool {
        refusal(&*self.backend, kind).is_some()
    }

    /// Returns true if packets to this believed lease go out in clear text although the backend of our lease encrypts.
    pub fn is_in_clear_text(&self, id: &Id) -> bool {
        self.backend.encrypts() && self.other_types.get(id).is_some()
    }

    /// Returns how many leases [`Plan::is_in_clear_text`] is true for.
    pub fn clear_text_count(&self) -> usize {
        if self.backend.encrypts() { self.other_types.len() } else { 0 }
    }

    /// Returns the believed leases that are not reached because that would be in clear text, of which at most so many are named.
    pub fn refused_clear_text(&self, most: usize) -> FirstLeases<'_> {
        let refused = &self.clear_text.refused;
        let first = refused.iter().take(most).filter_map(|id| Some(&**self.peers.get(id)?)).collect();
        FirstLeases { count: refused.len(), first }
    }

    /// Iterates over the leases that may still be reached in clear text until they follow.
    pub fn waiting_in_clear_text(&self) -> impl Iterator<Item = &Id> {
        self.clear_text.at(Progress::Waiting)
    }

    /// Iterates over the leases that have followed, and that are reached in clear text anyway until peers know our lease. There are none when
    /// packets go the way of our lease.
    pub fn followed_in_clear_text(&self) -> impl Iterator<Item = &Id> {
        self.clear_text.at(Progress::Followed).filter(|_| self.sends_earlier())
    }

    /// Lets the leases that wait be reached in clear text until they follow, and those that have followed until peers know our lease, as
    /// before the agent was started again. This must be called before the first [`Plan::put`].
    pub fn with_clear_text(mut self, waiting: impl Iterator<Item = Id>, followed: impl Iterator<Item = Id>) -> Plan {
        self.clear_text.begin(waiting);
        self.clear_text.before.extend(followed.map(|id| (id, Progress::Followed)));
        self
    }

    /// Ends clear text: removes the earlier backends that do not encrypt. A full pass is necessary afterwards.
    pub fn end_clear_text(&mut self) {
        let ours = &*self.backend;
        self.extra_backends.retain_earlier(|extra| refusal(ours, extra.kind()).is_none());
        self.clear_text.end();
        self.clear_text.is_over = true;
        self.plan_everything();
    }

    /// Remembers which peers are reached in clear text, because our lease is about to name `next` in place of the present backend.
    pub(super) fn begin_clear_text(&mut self, next: &dyn Backend) {
        if next.serves(self.backend.kind()) {
            // Only options change. What is allowed stays so.
            return;
        }
        if refusal(next, self.backend.kind()).is_none() {
            self.clear_text.end();
            return;
        }
        let is_reached = |id: &Id| {
            let kind = self.other_types.get(id).unwrap_or(self.backend.kind());
            let has_entries = || self.index.keys(id).iter().any(weft_backends::state::Key::reaches);
            !next.serves(kind) && (!self.unplanned.contains_key(id) || has_entries())
        };
        let reached: Vec<Id> =
            self.peers.believed().map(|lease| &lease.id).filter(|id| is_reached(id)).cloned().collect();
        self.clear_text.begin(reached.into_iter());
    }
}
