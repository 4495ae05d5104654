// SPDX-License-Identifier: Apache-2.0
//! A change of the node's key while the agent runs: `weft rotate-key` (docs/adr/017-wireguard.md).
//!
//! 1. Our lease is written once as it is. So the store answers, and accepts our writes. No file has the new key yet, so a restart forgets it.
//! 2. The new key is kept beside the one in use, and the device gets it. The kernel goes on receiving in the sessions of the old key, but
//!    sends nothing in them any more, and holds back up to 128 packets for each peer.
//! 3. Our lease names the new key. Each peer moves our subnet to it, and begins a session, in which the packets that were held back go.
//! 4. When the store has accepted the lease, the new key replaces the old one in its files.
//!
//! If the agent ends after step 2, the next start uses the key that our lease names, and ends the change when the store has accepted the lease.
//!
//! In any other order packets are lost: a peer believes only one key at a time for our subnet, and it must not begin a session with a key
//! that our device does not have yet.

use std::fmt;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use weft_backends::host::Host;
use weft_backends::identity::Identities;
use weft_backends::register::TYPES;
use weft_backends::state::Key;
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::Lease;

use super::Node;
use super::change::NoIdentities;
use crate::kernel::{Kernel, Machine, MachineError};
use crate::lease::acquire::identities;
use crate::observe::socket::NoNewKey;
use crate::pass::{Cause, Trigger};

/// Time for which the store may take to accept our lease.
const LIMIT: Duration = Duration::from_secs(10);

/// The way to whoever asked for the change: the new public key, or why there is none.
pub(super) type Reply = oneshot::Sender<Result<String, NoNewKey>>;

/// A change that is under way.
pub(super) struct KeyChange {
    step: Step,
    /// Until when the store may answer before the person who asked hears that it does not.
    due: Option<Instant>,
    reply: Option<Reply>,
}

enum Step {
    /// An earlier run kept these identities and ended. The store has not accepted our lease since, so it may name them or those before.
    Left(Identities),
    /// Our lease is written as it is. The next identities are not in use yet.
    Asking(Identities),
    /// The devices get the identities. Our lease must not name them before that has succeeded.
    Trying,
    /// The identities are in use, and our lease is written with them.
    Publishing,
}

impl KeyChange {
    /// Returns when [`Node::key_change_due`] has something to do.
    pub(super) fn next(&self) -> Option<Instant> {
        self.due
    }

    fn answer(&mut self, answer: Result<String, NoChange>) {
        match &answer {
            Ok(key) => tracing::info!(key, "this node has a new key"),
            Err(reason) => tracing::warn!("the key of this node is not changed as asked: {reason}"),
        }
        self.due = None;
        // The person may have given up waiting.
        let _ = self.reply.take().map(|reply| reply.send(answer.map_err(NoNewKey::from)));
    }
}

/// Why a change of the key does not begin, or does not end.
#[derive(Debug, thiserror::Error)]
enum NoChange {
    #[error("a change of the key is under way already")]
    UnderWay,
    #[error("the backend changes (weft status): change the key when that has ended")]
    BackendChanges,
    #[error("the own lease is being written, or is lost (weft status): try again when the node is ready")]
    Lease,
    #[error("the store does not answer: {0}. The key stays as it is")]
    Store(String),
    #[error("the backend {0} has no key; only wireguard has one")]
    NoKey(String),
    #[error("the store has not accepted the own lease within {} s. The key stays as it is", LIMIT.as_secs())]
    Refused,
    #[error("there is no new key: {0}. The key stays as it is")]
    Make(#[from] NoIdentities),
    #[error("the kernel has not accepted the new key: {0}. The key stays as it is")]
    Kernel(String),
    #[error(
        "the new key is in use, but the store has not accepted it within {} s. The agent goes on trying; until then the other nodes do not \
         reach this one by new sessions",
        LIMIT.as_secs()
    )]
    Late,
}

impl From<NoChange> for NoNewKey {
    fn from(reason: NoChange) -> NoNewKey {
        NoNewKey::NoChange(Box::new(reason))
    }
}

impl<K: Kernel> Node<K> {
    /// Begins to change the key of this node.
    pub(super) fn begin_key_change(&mut self, reply: Reply) {
        match self.next_key() {
            Ok(next) => {
                tracing::info!("the key of this node is to be changed");
                let own = self.plan.own().clone();
                self.own_lease.requested = Some(own.attrs.clone());
                self.own_lease.tasks.rewrite(own.clone(), own.attrs);
                let due = Some(Instant::now() + LIMIT);
                self.key_change = Some(KeyChange { step: Step::Asking(next), due, reply: Some(reply) });
            }
            // The person may have given up waiting.
            Err(error) => drop(reply.send(Err(error.into()))),
        }
    }

    /// Finds a change that an earlier run began and did not end.
    pub(super) fn find_left_key_change(&mut self) {
        let left = self.passer.kernel().machine().map_err(|error| MachineError(error).into());
        match left.and_then(|machine| self.left_identities(&machine)) {
            Ok(left) => self.key_change = left.map(|left| KeyChange { step: Step::Left(left), due: None, reply: None }),
            Err(error) => log_files(&error),
        }
    }

    fn left_identities(&self, machine: &Machine) -> Result<Option<Identities>, NoIdentities> {
        Ok(identities::next(self.plan.backend(), machine, &self.context.secrets)?)
    }

    /// Returns what our lease in the store may say besides what the plan has, because an earlier run did not end a change of the key.
    pub(super) fn left_lease(&self) -> Option<Attrs> {
        let Step::Left(left) = &self.key_change.as_ref()?.step else { return None };
        if *left == self.plan.host().identities {
            return None;
        }
        self.plan.advertise(&Host { identities: left.clone(), ..self.plan.host().clone() }).ok()
    }

    /// Ends a change that an earlier run left. The store has our lease as it is in the plan now.
    pub(super) fn end_left_key_change(&mut self) {
        let left = self.key_change.take_if(|change| matches!(change.step, Step::Left(_)));
        if let Some(KeyChange { step: Step::Left(left), .. }) = left {
            self.end_key_change(names(self.plan.own(), &left));
        }
    }

    /// Makes the next key, if it can be changed now.
    fn next_key(&mut self) -> Result<Identities, NoChange> {
        if self.key_change.is_some() {
            return Err(NoChange::UnderWay);
        }
        if self.plan.is_changing() || self.change.wanted.is_some() {
            return Err(NoChange::BackendChanges);
        }
        if let Some(error) = &self.store.error {
            return Err(NoChange::Store(error.clone()));
        }
        // In the pause of a contest, our lease could not name the new key, which the device has by then.
        let is_contested = self.contest_problem().is_some();
        if is_contested || self.own_lease.has_problem() || self.own_lease.tasks.is_call_open() {
            return Err(NoChange::Lease);
        }
        self.make_identities()?.ok_or_else(|| NoChange::NoKey(self.plan.net_conf().backend_type.clone()))
    }

    fn make_identities(&mut self) -> Result<Option<Identities>, NoIdentities> {
        let machine = self.passer.kernel().machine().map_err(MachineError)?;
        let (backend, secrets) = (self.plan.backend(), &self.context.secrets);
        // An earlier change could not write all files. Then the file of the change may be the only one with the key in use.
        if let Some(left) = self.left_identities(&machine)? {
            identities::end_change(backend, &machine, secrets, names(self.plan.own(), &left))?;
        }
        Ok(identities::new_identities(backend, &machine, secrets)?)
    }

    /// Keeps these identities where a start finds them.
    fn keep_identities(&mut self, next: &Identities) -> Result<(), NoIdentities> {
        let machine = self.passer.kernel().machine().map_err(MachineError)?;
        Ok(identities::begin_change(self.plan.backend(), &machine, &self.context.secrets, next)?)
    }

    /// Does the next step of a change of the key. The store has our lease as it is in the plan now.
    pub(super) async fn continue_key_change(&mut self) {
        let Some(mut change) = self.key_change.take() else { return };
        match &change.step {
            Step::Left(_) => {
                self.key_change = Some(change);
                self.end_left_key_change();
                self.apply_postponed();
            }
            Step::Asking(next) => {
                let next = next.clone();
                self.begin_publishing(change, next).await;
            }
            Step::Publishing if names(self.plan.own(), &self.plan.host().identities) => {
                self.end_key_change(true);
                let key = self.plan.host().identities.public().into_iter().flatten().next();
                change.answer(Ok(key.map(|key| key.to_string()).unwrap_or_default()));
                self.apply_postponed();
            }
            Step::Trying | Step::Publishing => self.key_change = Some(change),
        }
    }

    /// Lets the devices and then our lease have these identities.
    async fn begin_publishing(&mut self, mut change: KeyChange, next: Identities) {
        if let Err(error) = self.keep_identities(&next) {
            change.answer(Err(NoChange::Make(error)));
            return;
        }
        let before = self.plan.host().identities.clone();
        // From now on the backend must not change, also not at the end of a pass.
        change.step = Step::Trying;
        self.key_change = Some(change);
        if let Err(error) = self.use_identities(next).await {
            let _ = self.use_identities(before).await;
            self.end_key_change(false);
            if let Some(mut change) = self.key_change.take() {
                change.answer(Err(error));
            }
            // The host or net-conf may have changed meanwhile.
            self.update_own_lease();
            self.apply_postponed();
            return;
        }
        if let Some(change) = &mut self.key_change {
            (change.step, change.due) = (Step::Publishing, Some(Instant::now() + LIMIT));
        }
        self.update_own_lease();
    }

    /// Returns true while our lease in the store may name one of two keys. The backend must not change in this time, because its devices and
    /// the files belong together.
    pub(super) fn is_key_uncertain(&self) -> bool {
        let is_uncertain = |step: &Step| matches!(step, Step::Left(_) | Step::Trying | Step::Publishing);
        self.key_change.as_ref().is_some_and(|change| is_uncertain(&change.step))
    }

    /// Returns true while it is not known whether our devices can have the identities of the plan.
    pub(super) fn is_key_tried(&self) -> bool {
        self.key_change.as_ref().is_some_and(|change| matches!(change.step, Step::Trying))
    }

    /// Gives up a change whose next key is not in use yet, because the backend changes.
    pub(super) fn give_up_key_change(&mut self) {
        if let Some(mut change) = self.key_change.take_if(|change| matches!(change.step, Step::Asking(_))) {
            change.answer(Err(NoChange::BackendChanges));
        }
    }

    /// Gives the devices these identities.
    async fn use_identities(&mut self, identities: Identities) -> Result<(), NoChange> {
        let mut host = self.plan.host().clone();
        host.identities = identities;
        let own = self.plan.own().clone();
        self.plan.rebase_on(host, own);
        self.full_pass(Trigger::new(Cause::Start, "the key of this node changes")).await;
        if let Some(problem) = &self.kernel_problem {
            return Err(NoChange::Kernel(problem.clone()));
        }
        let pending = self.passer.pending();
        // A device that works has the key, and lacks something else, such as its port.
        let failed = |name| pending.get(&Key::Link(name)).filter(|pending| !pending.works);
        match self.plan.wireguard_devices().find_map(failed).map(|pending| pending.reason.clone()) {
            Some(reason) => Err(NoChange::Kernel(reason)),
            None => Ok(()),
        }
    }

    fn end_key_change(&mut self, accepted: bool) {
        let machine = match self.passer.kernel().machine() {
            Ok(machine) => machine,
            Err(error) => {
                tracing::error!("{}", MachineError(error));
                return;
            }
        };
        if let Err(error) = identities::end_change(self.plan.backend(), &machine, &self.context.secrets, accepted) {
            log_files(&error);
        }
    }

    /// Says that the store takes too long.
    pub(super) fn key_change_due(&mut self, now: Instant) {
        let Some(mut change) = self.key_change.take_if(|change| change.due.is_some_and(|due| due <= now)) else {
            return;
        };
        match change.step {
            Step::Asking(_) => change.answer(Err(NoChange::Refused)),
            Step::Left(_) | Step::Trying | Step::Publishing => {
                change.answer(Err(NoChange::Late));
                self.key_change = Some(change);
            }
        }
    }
}

fn log_files(error: &dyn fmt::Display) {
    tracing::warn!(
        "the files with the key of this node are not up to date: {error}. The next start of the agent tries again"
    );
}

/// Returns true if this lease names these identities.
fn names(lease: &Lease, identities: &Identities) -> bool {
    (TYPES.identities)(&lease.attrs) == identities.public()
}
