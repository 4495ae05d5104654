// SPDX-License-Identifier: Apache-2.0
//! Our own lease, as the store tells of it. One call for it is open at most; what happens meanwhile is looked at when it is
//! answered, so that neither a deletion nor a change of our address falls between a question and its answer.

use std::time::Instant;

use weft_backends::backend::TYPES;
use weft_subnet::attrs::Attrs;
use weft_subnet::evidence::Evidence;
use weft_subnet::lease::{Id, Lease, Record};
use weft_subnet::source::Claim;

use super::{Node, Verdict};
use crate::kernel::Kernel;
use crate::lease::acquire;
use crate::lease::contest::Contest;
use crate::lease::keep::Answer;
use crate::options::OnLostLease;
use crate::pass::Cause;

impl<K: Kernel> Node<K> {
    /// A call to the store for our lease was answered.
    pub async fn answered(&mut self, answer: Answer) -> Verdict {
        match answer {
            Answer::Held(lease) => {
                self.keeper.settled();
                self.held(lease).await;
            }
            Answer::Taken(text) => {
                self.keeper.settled();
                // Whoever had it may have left after the store looked.
                if std::mem::take(&mut self.look_again) {
                    self.retake();
                } else {
                    return self.lost(text).await;
                }
            }
            Answer::Config(text) => {
                if self.configured(&text) {
                    self.full(Cause::Start).await;
                }
            }
            Answer::Trouble(text) => {
                if self.trouble_said.due(&text, Instant::now()) {
                    tracing::warn!("own lease: {text}");
                }
                self.lease_trouble = Some(text);
            }
        }
        Verdict::Stay
    }

    async fn held(&mut self, lease: Lease) {
        let own = self.plan.own();
        let moved = lease.subnets != own.subnets;
        let same = !moved && lease.attrs == own.attrs && lease.id == own.id;
        if !same || self.lost.is_some() || self.lease_gone.is_some() || self.lease_trouble.is_some() {
            tracing::info!(subnet = %lease.subnets, moved, "own lease held");
        } else {
            tracing::debug!(subnet = %lease.subnets, "own lease held");
        }
        (self.lost, self.lease_gone, self.lease_trouble) = (None, None, None);
        if moved {
            self.contest = Contest::default();
        }
        self.contest.written(Instant::now());
        if moved {
            // The time of the old lease.
            (self.ttl, self.saved_expiry) = (None, None);
        }
        self.keeper.keep(lease.clone());
        self.world.condition.again();
        self.unsaved();
        if !same {
            self.rebase(lease);
            self.full(Cause::Start).await;
        }
        let stale =
            std::mem::take(&mut self.look_again) || self.asked.take().is_some_and(|asked| asked != self.wanted());
        if stale && !self.keeper.busy() {
            self.retake();
        }
    }

    /// Our own record is not in the store any more: written back at once, also where another node had it meanwhile.
    pub(super) fn own_gone(&mut self, id: &Id) {
        self.plan.remove(id);
        self.lease_gone = Some("own lease is gone from the store");
        // Who took ours away may take the others' too: theirs wait before they cost a packet.
        self.hold.suspect(Instant::now());
        if !self.keeper.busy() {
            tracing::warn!(subnet = %self.plan.own().subnets, "own lease is gone from the store: taking it again");
        }
        self.contest.gone();
        self.retake();
    }

    /// Someone put our own record: ourselves, an operator, or another node that owns it now.
    pub(super) fn own_put(&mut self, record: &Record) {
        let own = self.plan.own();
        let assigned = self.world.store.capabilities().assigned;
        let evidence =
            Evidence { id: assigned.then(|| own.id.clone()), ..Evidence::of(TYPES, own.subnets, &own.attrs) };
        let Ok(lease) = &record.lease else {
            self.overwritten("an unreadable value");
            return self.retake();
        };
        let (ours, as_held) = (evidence.proves(lease), lease.attrs == own.attrs && lease.subnets == own.subnets);
        // The echo of our own write says nothing new.
        let echo = self.keeper.busy() && self.asked.as_ref() == Some(&lease.attrs);
        // A lease that is not ours is not taken back: the store says that it is taken.
        if ours && !as_held && !echo {
            self.overwritten(&lease.attrs.owner());
        }
        if self.keeper.busy() {
            self.look_again |= !echo;
            return;
        }
        if as_held {
            self.contest.stands(Instant::now());
            (self.lost, self.lease_gone, self.lease_trouble) = (None, None, None);
            return;
        }
        // Only a store that knows its nodes says that this is still our lease. Elsewhere, another identity is another node's.
        if ours && self.device_follows(lease) {
            tracing::warn!("the identity of our device (VtepMAC) was changed in our own lease: the device follows it");
            self.rebase(lease.clone());
            self.next_audit = Instant::now();
            // Whatever else was changed is ours to say.
            self.republish();
        } else if self.lost.is_none() || ours {
            // Another owner, or other parameters: the store decides by compare-and-swap.
            self.retake();
        }
    }

    /// True when our lease names other identities than before, and the backend's devices get those of the lease.
    fn device_follows(&self, lease: &Lease) -> bool {
        let (now, new) = ((TYPES.identities)(&self.plan.own().attrs), (TYPES.identities)(&lease.attrs));
        let readable = now.iter().zip(&new).all(|(now, new)| now.is_some() == new.is_some());
        readable && new != now && self.plan.identities_after(&lease.attrs) != self.plan.host().identities
    }

    /// Somebody else wrote our record. If that happens again and again, it is written back ever more rarely.
    fn overwritten(&mut self, by: &str) {
        if self.contest.overwritten(by, Instant::now()) {
            tracing::warn!("{}", self.contest_problem().unwrap_or_default());
        } else if self.contest.rival().is_none() {
            tracing::info!(subnet = %self.plan.own().subnets, by, "somebody else wrote our own lease: taking it back");
        }
    }

    /// What is wrong while somebody else writes our lease again and again, with the remedy: for people.
    pub(crate) fn contest_problem(&self) -> Option<String> {
        let (rival, subnet) = (self.contest.rival()?, self.plan.own().subnets);
        Some(format!(
            "{rival} writes our lease of {subnet} again and again, as a clone of this machine does. Let one machine keep {subnet}. \
             On the other one stop weft, run `weft cleanup`, and start weft when this message is gone from the first one"
        ))
    }

    /// Takes our lease back when the pause of a contest is over, and says when the contest is.
    pub(super) fn contend(&mut self, now: Instant) {
        if self.contest.is_due(now) && self.lost.is_none() {
            self.retake();
        }
        if let Some(rival) = self.contest.ended(now) {
            tracing::info!(subnet = %self.plan.own().subnets, rival, "nobody else writes our lease any more");
        }
    }

    async fn lost(&mut self, text: String) -> Verdict {
        let action = self.world.options.on_lost_lease;
        tracing::error!(?action, "own lease lost: {text}");
        self.last_error = Some(crate::observe::report::failure(text.clone()));
        self.lost = Some(text);
        self.contest = Contest::default();
        self.not_ours_any_more().await;
        match action {
            OnLostLease::Exit => return Verdict::Exit,
            OnLostLease::Reacquire => {
                let (network, attrs) = (self.plan.network().clone(), self.wanted());
                self.asked = Some(attrs.clone());
                let connected = self.plan.host().connected.clone();
                // That our pods are in this subnet still tells our leases from those of others.
                let previous = Some(self.plan.own().subnets);
                self.keeper.acquire(Claim { network, attrs, previous, was: None, connected });
            }
            OnLostLease::Hold => {}
        }
        Verdict::Stay
    }

    /// What we publish follows the host: the lease is rewritten when it says something else.
    pub(super) fn republish(&mut self) {
        match self.plan.advertise(self.plan.host()) {
            Ok(attrs) if attrs != self.plan.own().attrs && self.lost.is_none() => self.retake(),
            // The answer of an open call is compared with what we want by then.
            Ok(_) => {}
            Err(skip) => {
                tracing::error!("{skip}");
                self.host_problem = Some(skip.to_string());
            }
        }
    }

    /// What our lease should say; while the host cannot tell, what it says.
    pub(super) fn wanted(&self) -> Attrs {
        self.plan.advertise(self.plan.host()).unwrap_or_else(|_| self.plan.own().attrs.clone())
    }

    /// Asks the store for our lease as it should be, unless a contest demands a pause: then [`Node::contend`] does so later.
    fn retake(&mut self) {
        if !self.contest.may_write(Instant::now()) {
            return;
        }
        if self.keeper.busy() {
            self.look_again = true;
            return;
        }
        let attrs = self.wanted();
        self.asked = Some(attrs.clone());
        self.keeper.retake(self.plan.own().clone(), attrs);
    }

    /// The lease says something else than the plan was made with: plan again.
    fn rebase(&mut self, own: Lease) {
        let mut host = self.plan.host().clone();
        host.identities = self.plan.identities_after(&own.attrs);
        // The text was parsed before: it cannot fail now.
        if let Ok((network, backend)) = acquire::parse(&self.config) {
            self.plan.rebase(network, backend, host, own);
        }
    }
}
