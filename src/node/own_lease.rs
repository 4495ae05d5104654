// SPDX-License-Identifier: Apache-2.0
//! The own lease. At most one call to the store for it is open. If the lease or the host changes meanwhile, this is
//! checked when the answer arrives, so that no deletion and no change of an address is missed.

use std::time::Duration;

use tokio::time::Instant;
use weft_backends::backend::Skip;
use weft_backends::register::TYPES;
use weft_subnet::attrs::Attrs;
use weft_subnet::evidence::Evidence;
use weft_subnet::lease::{Id, Lease, Record};
use weft_subnet::source::LeaseRequest;

use super::{NextStep, Node};
use crate::kernel::Kernel;
use crate::lease::contest::Contest;
use crate::lease::tasks::{LeaseAnswer, LeaseTasks};
use crate::observe::status::Failure;
use crate::options::OnLostLease;
use crate::pass::{Cause, Trigger};

/// Until when the own lease is ours, as far as it was saved for the next start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SavedEnd {
    /// The store has not told it yet.
    Unknown,
    /// The lease does not end.
    Never,
    /// The lease ends at this time unless it is renewed.
    At(Instant),
}

/// What the node knows about its own lease. The lease itself is in the plan.
pub(super) struct OwnLease {
    pub(super) tasks: LeaseTasks,
    /// What the open call asks the store to write.
    pub(super) requested: Option<Attrs>,
    /// The lease changed while a call was open, so its answer may be out of date.
    must_recheck: bool,
    /// Whether another agent writes our lease again and again.
    contest: Contest,
    /// Why the lease is lost: another node owns the subnet.
    pub(super) lost: Option<String>,
    /// The store has no record of the lease, and has not accepted it again yet.
    pub(super) missing: Option<&'static str>,
    /// Why the backend cannot say in the lease how this node is reached, with the facts of the host as they are.
    pub(super) unwritable: Option<String>,
    /// Why the last call failed.
    pub(super) error: Option<String>,
    /// Why the lease was not renewed, until it is.
    pub(super) not_renewed: Option<String>,
    /// The time to live that the store has given, and when. `None` if it is unlimited or not known yet.
    pub(super) ttl: Option<(Instant, Duration)>,
    pub(super) saved_end: SavedEnd,
}

impl OwnLease {
    pub(super) fn new(tasks: LeaseTasks) -> OwnLease {
        OwnLease {
            tasks,
            requested: None,
            must_recheck: false,
            contest: Contest::default(),
            lost: None,
            missing: None,
            unwritable: None,
            error: None,
            not_renewed: None,
            ttl: None,
            saved_end: SavedEnd::Unknown,
        }
    }

    /// Returns when [`Node::continue_contest`] has something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        self.contest.next()
    }

    pub(super) fn has_problem(&self) -> bool {
        self.lost.is_some() || self.missing.is_some() || self.error.is_some()
    }

    fn clear_problems(&mut self) {
        (self.lost, self.missing, self.error) = (None, None, None);
    }
}

/// What a record under the id of our lease means.
enum OwnRecord<'a> {
    /// Its value cannot be read.
    Unreadable,
    /// It is what the open call writes.
    OwnWrite,
    /// It is the lease as we hold it.
    AsHeld,
    /// It is our lease, and somebody has changed the VTEP MAC in it.
    OtherIdentity(&'a Lease),
    /// It is our lease, and the administrator has chosen another published address for it. That is no contest.
    OtherAddress,
    /// It is our lease, and somebody has changed something else in it.
    Changed(&'a Lease),
    /// It is the lease of another node.
    OfAnotherNode,
}

impl<K: Kernel> Node<K> {
    /// Handles the answer of the store to a call for the own lease.
    pub async fn lease_answered(&mut self, answer: LeaseAnswer) -> NextStep {
        match answer {
            LeaseAnswer::Held(lease) => {
                self.own_lease.tasks.close_call();
                self.lease_held(lease).await;
            }
            LeaseAnswer::Taken(text) => {
                self.own_lease.tasks.close_call();
                // The other node may have given the lease back since.
                if std::mem::take(&mut self.own_lease.must_recheck) {
                    self.write_own_lease();
                } else {
                    return self.lease_lost(text).await;
                }
            }
            LeaseAnswer::Failed(text) => {
                if self.store.log_limit.due(&text, Instant::now()) {
                    tracing::warn!("own lease: {text}");
                }
                self.own_lease.error = Some(text);
            }
        }
        NextStep::Continue
    }

    /// Takes over our lease as the store has it.
    async fn lease_held(&mut self, lease: Lease) {
        let own = self.plan.own();
        let has_moved = lease.subnets != own.subnets;
        let is_same = !has_moved && lease.attrs == own.attrs && lease.id == own.id;
        if !is_same || self.own_lease.has_problem() {
            tracing::info!(subnet = %lease.subnets, moved = has_moved, "own lease held");
        } else {
            tracing::debug!(subnet = %lease.subnets, "own lease held");
        }
        self.own_lease.clear_problems();
        if has_moved {
            self.own_lease.contest = Contest::default();
            // The time of the old lease says nothing about the new one.
            (self.own_lease.ttl, self.own_lease.saved_end) = (None, SavedEnd::Unknown);
        }
        self.own_lease.contest.written(Instant::now());
        self.own_lease.tasks.renew(lease.clone());
        self.context.reporter.condition.again();
        self.save_later();
        if !is_same {
            self.plan_with_lease(lease);
            // A start without the store continues with the lease in the file. The peers send as the one in the store says.
            self.save_now();
            self.full_pass(Trigger::new(Cause::Start, "the own lease changed")).await;
        }
        self.recheck_own_lease();
        // The time of peers to learn of our lease begins now, also if the lease was only written again.
        self.continue_change(Instant::now());
        self.continue_key_change().await;
    }

    /// Writes the own lease again if the answer that has just arrived is out of date.
    fn recheck_own_lease(&mut self) {
        let has_changed = std::mem::take(&mut self.own_lease.must_recheck);
        let requested = self.own_lease.requested.take();
        let is_outdated = has_changed || requested.is_some_and(|requested| requested != self.wanted_attrs());
        if is_outdated && !self.own_lease.tasks.is_call_open() {
            self.write_own_lease();
        }
    }

    /// The record of our own lease is gone from the store. It is written again at once. If another node has taken the
    /// subnet meanwhile, the store says so.
    pub(super) fn own_record_removed(&mut self, id: &Id) {
        self.plan.remove(id);
        self.own_lease.missing = Some("own lease is gone from the store");
        // Whoever has removed our lease may remove those of the peers, too, so their removal is held.
        self.peers.hold.suspect(Instant::now().into_std());
        if !self.own_lease.tasks.is_call_open() {
            tracing::warn!(subnet = %self.plan.own().subnets, "own lease is gone from the store: taking it again");
        }
        self.own_lease.contest.gone();
        self.write_own_lease();
    }

    /// The record of our own lease was written: by this node, by a person, or by another node that owns it now.
    pub(super) fn own_record_written(&mut self, record: &Record) {
        let meaning = self.own_record(record);
        match meaning {
            OwnRecord::Unreadable => self.log_overwritten("an unreadable value"),
            OwnRecord::OtherIdentity(lease) | OwnRecord::Changed(lease) => self.log_overwritten(&lease.attrs.owner()),
            OwnRecord::OwnWrite | OwnRecord::AsHeld | OwnRecord::OtherAddress | OwnRecord::OfAnotherNode => {}
        }
        match meaning {
            OwnRecord::OwnWrite => {}
            OwnRecord::Unreadable => self.write_own_lease(),
            _ if self.own_lease.tasks.is_call_open() => self.own_lease.must_recheck = true,
            OwnRecord::AsHeld => {
                self.own_lease.contest.stands(Instant::now());
                self.own_lease.clear_problems();
            }
            OwnRecord::OtherIdentity(lease) => {
                tracing::warn!(
                    "the identity of our device (VtepMAC) was changed in our own lease: the device follows it"
                );
                self.plan_with_lease(lease.clone());
                self.schedule.audit_by(Instant::now(), "the own lease names another identity of the device");
                // Everything else in the lease is ours to decide.
                self.update_own_lease();
            }
            OwnRecord::OtherAddress | OwnRecord::Changed(_) => self.write_own_lease(),
            // Only the store can tell by compare-and-swap whose lease it is. A lease that is known to be lost is not asked
            // for again.
            OwnRecord::OfAnotherNode if self.own_lease.lost.is_none() => self.write_own_lease(),
            OwnRecord::OfAnotherNode => {}
        }
    }

    /// Says what a record under the id of our lease means.
    fn own_record<'a>(&self, record: &'a Record) -> OwnRecord<'a> {
        let own = self.plan.own();
        let Ok(lease) = &record.lease else { return OwnRecord::Unreadable };
        if self.own_lease.tasks.is_call_open() && self.own_lease.requested.as_ref() == Some(&lease.attrs) {
            return OwnRecord::OwnWrite;
        }
        if lease.attrs == own.attrs && lease.subnets == own.subnets {
            return OwnRecord::AsHeld;
        }
        let assigned = self.context.store.capabilities().assigned;
        let evidence =
            Evidence { id: assigned.then(|| own.id.clone()), ..Evidence::of(TYPES, own.subnets, &own.attrs) };
        if !evidence.proves(lease) {
            return OwnRecord::OfAnotherNode;
        }
        // Such a store reports an address that another agent wrote as unreadable.
        if assigned && lease.subnets == own.subnets && lease.attrs.same_but_addresses(&own.attrs) {
            return OwnRecord::OtherAddress;
        }
        // Only a store that knows its nodes proves that a lease with another identity is still ours.
        if self.device_follows(lease) { OwnRecord::OtherIdentity(lease) } else { OwnRecord::Changed(lease) }
    }

    /// Returns true if our lease names other identities than before, and the devices of the backend get those of the lease.
    fn device_follows(&self, lease: &Lease) -> bool {
        let (now, new) = ((TYPES.identities)(&self.plan.own().attrs), (TYPES.identities)(&lease.attrs));
        let readable = now.iter().zip(&new).all(|(now, new)| now.is_some() == new.is_some());
        readable && new != now && self.plan.identities_after(&lease.attrs) != self.plan.host().identities
    }

    /// Logs that somebody else wrote our record. If that happens again and again, we write it back more and more rarely.
    fn log_overwritten(&mut self, by: &str) {
        if self.own_lease.contest.overwritten(by, Instant::now()) {
            tracing::warn!("{}", self.contest_problem().unwrap_or_default());
        } else if self.own_lease.contest.rival().is_none() {
            tracing::info!(subnet = %self.plan.own().subnets, by, "somebody else wrote our own lease: taking it back");
        }
    }

    /// Returns what is wrong while somebody else writes our lease again and again, and the remedy.
    pub(super) fn contest_problem(&self) -> Option<String> {
        let (rival, subnet) = (self.own_lease.contest.rival()?, self.plan.own().subnets);
        Some(format!(
            "{rival} writes our lease of {subnet} again and again, as a clone of this machine does. Let one machine keep {subnet}. \
             On the other one stop weft, run `weft cleanup`, and start weft when this message is gone from the first one"
        ))
    }

    /// Writes our lease again when the pause of a contest is over, and logs the end of a contest.
    pub(super) fn continue_contest(&mut self, now: Instant) {
        if self.own_lease.contest.is_due(now) && self.own_lease.lost.is_none() {
            self.write_own_lease();
        }
        if let Some(rival) = self.own_lease.contest.ended(now) {
            tracing::info!(subnet = %self.plan.own().subnets, rival, "nobody else writes our lease any more");
        }
    }

    /// Handles the loss of our subnet to another node. What follows is decided by `--on-lost-lease`.
    async fn lease_lost(&mut self, text: String) -> NextStep {
        let action = self.context.options.on_lost_lease;
        tracing::error!(?action, "own lease lost: {text}");
        self.statistics.last_error = Some(Failure::now(text.clone()));
        self.own_lease.lost = Some(text);
        self.own_lease.contest = Contest::default();
        self.forget_saved_lease().await;
        match action {
            OnLostLease::Exit => return NextStep::Exit,
            OnLostLease::Reacquire => {
                let request = self.request(None);
                self.own_lease.tasks.acquire(request);
            }
            OnLostLease::Hold => {}
        }
        NextStep::Continue
    }

    /// Returns what to ask the store for, and remembers it as requested. `was` is what the lease said before, if it may still be ours.
    pub(super) fn request(&mut self, was: Option<Attrs>) -> LeaseRequest {
        let attrs = self.wanted_attrs();
        self.own_lease.requested = Some(attrs.clone());
        // The subnet of our pods also tells our leases from those of other nodes.
        let previous = Some(self.plan.own().subnets);
        let (net_conf, connected) = (self.plan.net_conf().clone(), self.plan.host().connected.clone());
        LeaseRequest { net_conf, attrs, previous, was, connected }
    }

    /// Writes the own lease if the facts of the host ask for another content.
    pub(super) fn update_own_lease(&mut self) {
        let is_other = self.writable_attrs().is_some_and(|attrs| attrs != self.plan.own().attrs);
        // The answer of an open call is compared with what is wanted then.
        if is_other && self.own_lease.lost.is_none() && !self.is_key_tried() {
            self.write_own_lease();
        }
    }

    /// Returns what the own lease should say. If the backend cannot say it with the facts of the host, this is a fault until it can.
    pub(super) fn writable_attrs(&mut self) -> Option<Attrs> {
        match self.advertised() {
            Ok(attrs) => {
                self.own_lease.unwritable = None;
                Some(attrs)
            }
            Err(skip) => {
                let problem = skip.to_string();
                if self.own_lease.unwritable.as_ref() != Some(&problem) {
                    tracing::error!("{problem}");
                }
                self.own_lease.unwritable = Some(problem);
                None
            }
        }
    }

    /// Returns what the own lease should say. While the host does not tell, this is what it says now.
    pub(super) fn wanted_attrs(&self) -> Attrs {
        self.advertised().unwrap_or_else(|_| self.plan.own().attrs.clone())
    }

    fn advertised(&self) -> Result<Attrs, Skip> {
        self.plan.advertise(self.plan.host())
    }

    /// Asks the store to write the own lease as it should be. During the pause of a contest this is left to
    /// [`Node::continue_contest`], and while a call is open to its answer.
    fn write_own_lease(&mut self) {
        if !self.own_lease.contest.may_write(Instant::now()) {
            return;
        }
        if self.own_lease.tasks.is_call_open() {
            self.own_lease.must_recheck = true;
            return;
        }
        self.own_lease.contest.write_begun();
        let attrs = self.wanted_attrs();
        self.own_lease.requested = Some(attrs.clone());
        self.own_lease.tasks.rewrite(self.plan.own().clone(), attrs);
    }

    /// Plans again with another own lease.
    fn plan_with_lease(&mut self, own: Lease) {
        let mut host = self.plan.host().clone();
        host.identities = self.plan.identities_after(&own.attrs);
        self.plan.rebase_on(host, own);
    }
}
