// SPDX-License-Identifier: Apache-2.0
//! Reports to the store whether the network of this node works. In Kubernetes the report is the condition
//! NetworkUnavailable.
//!
//! A fault is reported after it has lasted for some time, a recovery at once. Only a fault of this node itself counts:
//! not that of a peer, and not a store that cannot be reached. The end of the agent is not reported, because forwarding
//! continues.

use std::rc::Rc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use weft_subnet::retry::{Backoff, jitter};
use weft_subnet::source::{Error, Source};

use crate::log::{Reminder, chain};

/// Time after which the state is reported again, because other programs may overwrite it: a cloud's controller sets the
/// condition of nodes whose routes it has not created. The time is reduced by up to a half at random, so that the nodes
/// do not report all at once. The store writes only differences.
const REPORT_INTERVAL: Duration = Duration::from_secs(600);
/// First delay between attempts; it doubles up to the maximum.
const RETRY_DELAY: Duration = Duration::from_secs(5);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(60);

/// The state of this node's network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Health {
    /// Unknown: the agent is starting, or is waiting for its store.
    #[default]
    Unknown,
    /// The network works.
    Well,
    /// The node has no device, lease or rules, for this reason.
    Unwell(String),
}

#[derive(Debug, Clone)]
struct State {
    health: Health,
    /// When the network last changed between working (or unknown) and not working.
    since: Instant,
    /// Counts how often the lease was acquired. A report for an earlier lease may be lost.
    lease: u64,
}

/// Reports to the store in a task of its own. Dropping it ends the task without another report.
#[derive(Debug)]
pub struct ConditionReporter {
    state: watch::Sender<State>,
    task: JoinHandle<()>,
}

impl ConditionReporter {
    /// Starts reporting to this store. A fault is reported after it has lasted for `patience`. This must run in a
    /// `LocalSet`.
    pub fn new(store: Rc<dyn Source>, patience: Duration) -> ConditionReporter {
        ConditionReporter::with(async move |fault: Option<String>| store.health(fault.as_deref()).await, patience)
    }

    fn with(
        send: impl AsyncFn(Option<String>) -> Result<(), Error> + 'static,
        patience: Duration,
    ) -> ConditionReporter {
        let (state, receiver) = watch::channel(State { health: Health::Unknown, since: Instant::now(), lease: 0 });
        ConditionReporter { state, task: tokio::task::spawn_local(run(send, receiver, patience)) }
    }

    /// Sets the state. Setting the same state again has no effect.
    pub fn set(&self, health: Health) {
        self.state.send_if_modified(|state| {
            if state.health == health {
                return false;
            }
            let unwell = |health: &Health| matches!(health, Health::Unwell(_));
            if unwell(&state.health) != unwell(&health) {
                state.since = Instant::now();
            }
            state.health = health;
            true
        });
    }

    /// Reports the state again, because the lease was acquired again and the last report may be lost.
    pub fn again(&self) {
        self.state.send_modify(|state| state.lease += 1);
    }
}

impl Drop for ConditionReporter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns the next report and when it is due, or `None` if nothing is to be reported.
fn due(state: &State, last: Option<&Reported>, patience: Duration) -> Option<(Instant, Option<String>)> {
    let last = last.filter(|last| last.lease == state.lease);
    match (&state.health, last) {
        (Health::Unknown, _) => None,
        (Health::Well, Some(Reported { fault: None, again, .. })) => Some((*again, None)),
        (Health::Well, _) => Some((Instant::now(), None)),
        (Health::Unwell(text), Some(Reported { fault: Some(reported), again, .. })) if text == reported => {
            Some((*again, Some(text.clone())))
        }
        // A fault that replaces the reported one must also last before it is reported.
        (Health::Unwell(text), Some(Reported { fault: Some(_), at, .. })) => Some((*at + patience, Some(text.clone()))),
        (Health::Unwell(text), _) => Some((state.since + patience, Some(text.clone()))),
    }
}

/// A report that the store has received.
struct Reported {
    fault: Option<String>,
    lease: u64,
    at: Instant,
    again: Instant,
}

impl Reported {
    fn now(fault: Option<String>, lease: u64) -> Reported {
        let at = Instant::now();
        Reported { fault, lease, at, again: at + jitter(REPORT_INTERVAL) }
    }
}

async fn run(
    send: impl AsyncFn(Option<String>) -> Result<(), Error>,
    mut state: watch::Receiver<State>,
    patience: Duration,
) {
    let (mut last, mut log_limit) = (None, Reminder::default());
    let mut backoff = Backoff::without_jitter(RETRY_DELAY, RETRY_DELAY_MAX);
    let mut earliest = Instant::now();
    loop {
        let now = state.borrow_and_update().clone();
        let Some((at, fault)) = due(&now, last.as_ref(), patience) else {
            if state.changed().await.is_err() {
                return;
            }
            continue;
        };
        tokio::select! {
            changed = state.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
            () = sleep_until(at.max(earliest)) => {}
        }
        let is_repeated = last.as_ref().is_some_and(|last: &Reported| last.fault == fault && last.lease == now.lease);
        match send(fault.clone()).await {
            // A repeated report changes nothing. If the store cannot be reached, that is reported elsewhere.
            Ok(()) | Err(Error::Unavailable { .. }) if is_repeated => last = Some(Reported::now(fault, now.lease)),
            Ok(()) => {
                match &fault {
                    Some(fault) => {
                        tracing::warn!(fault, "reported to the store that the network of this node does not work");
                    }
                    None => tracing::debug!("the store knows that the network works"),
                }
                last = Some(Reported::now(fault, now.lease));
                backoff.reset();
            }
            Err(error) => {
                let text = chain(&error);
                if log_limit.due(&text, Instant::now()) {
                    let word = if fault.is_some() { "does not work" } else { "works" };
                    tracing::warn!("report to the store that the network {word}: {text}");
                }
                // The store may have written it although the request failed.
                last = None;
                earliest = Instant::now() + backoff.next_delay();
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
