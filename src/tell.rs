// SPDX-License-Identifier: Apache-2.0
//! Tells the store whether the network of this node works; in Kubernetes that is the condition NetworkUnavailable. A fault is told
//! once it has lasted, recovery at once. Only what is wrong with this node itself is a fault: a peer's is not, nor is a store that
//! is away. The end of the agent tells nothing, for the data path stays.

use std::rc::Rc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use weft_subnet::retry::jitter;
use weft_subnet::source::{Error, Source};

use crate::say::{Patience, chain};

/// What was told may be overwritten: a cloud's controller sets the condition of a node whose routes it has not made. So it is told
/// again after this time, or up to half of it sooner, for nodes must not ask all at once; the store writes only what differs.
const LOOK_AGAIN: Duration = Duration::from_secs(600);
/// Between attempts, doubled each time.
const AGAIN: Duration = Duration::from_secs(5);
const AGAIN_MAX: Duration = Duration::from_secs(60);

/// How the network of this node is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Health {
    /// Nothing can be said: the agent starts, or waits for its store.
    #[default]
    Unknown,
    /// It works.
    Well,
    /// It lacks its device, lease or rules: why.
    Unwell(String),
}

#[derive(Debug, Clone)]
struct State {
    health: Health,
    /// Since when it is unwell without a break, or not unwell.
    since: Instant,
    /// What was told before this number changed may be lost.
    lease: u64,
}

/// The line to the store. Dropped, it says nothing more.
#[derive(Debug)]
pub struct Teller {
    state: watch::Sender<State>,
    task: JoinHandle<()>,
}

impl Teller {
    /// Tells this store, of a fault only when it has lasted for so long. Needs a `LocalSet`.
    pub fn new(store: Rc<dyn Source>, patience: Duration) -> Teller {
        Teller::with(async move |fault: Option<String>| store.health(fault.as_deref()).await, patience)
    }

    fn with(tell: impl AsyncFn(Option<String>) -> Result<(), Error> + 'static, patience: Duration) -> Teller {
        let (state, seen) = watch::channel(State { health: Health::Unknown, since: Instant::now(), lease: 0 });
        Teller { state, task: tokio::task::spawn_local(run(tell, seen, patience)) }
    }

    /// It is so now; the same again is no news.
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

    /// The lease was taken again: what was told of this node may be lost, so it is told again.
    pub fn again(&self) {
        self.state.send_modify(|state| state.lease += 1);
    }
}

impl Drop for Teller {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What is to be told, and when, after this was told.
fn due(state: &State, told: Option<&Told>, patience: Duration) -> Option<(Instant, Option<String>)> {
    let told = told.filter(|told| told.lease == state.lease);
    match (&state.health, told) {
        (Health::Unknown, _) => None,
        (Health::Well, Some(Told { fault: None, again, .. })) => Some((*again, None)),
        (Health::Well, _) => Some((Instant::now(), None)),
        (Health::Unwell(text), Some(Told { fault: Some(said), again, .. })) if text == said => {
            Some((*again, Some(text.clone())))
        }
        // Another fault than the one that was told: also that only when it lasts.
        (Health::Unwell(text), Some(Told { fault: Some(_), at, .. })) => Some((*at + patience, Some(text.clone()))),
        (Health::Unwell(text), _) => Some((state.since + patience, Some(text.clone()))),
    }
}

struct Told {
    fault: Option<String>,
    lease: u64,
    at: Instant,
    again: Instant,
}

impl Told {
    fn now(fault: Option<String>, lease: u64) -> Told {
        let at = Instant::now();
        Told { fault, lease, at, again: at + jitter(LOOK_AGAIN) }
    }
}

async fn run(
    tell: impl AsyncFn(Option<String>) -> Result<(), Error>,
    mut state: watch::Receiver<State>,
    patience: Duration,
) {
    let (mut told, mut said) = (None, Patience::default());
    let (mut wait, mut not_before) = (AGAIN, Instant::now());
    loop {
        let now = state.borrow_and_update().clone();
        let Some((at, fault)) = due(&now, told.as_ref(), patience) else {
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
            () = sleep_until(at.max(not_before)) => {}
        }
        let known = told.as_ref().is_some_and(|told: &Told| told.fault == fault && told.lease == now.lease);
        match tell(fault.clone()).await {
            // What it knew already, or would if it answered: others say that it is away.
            Ok(()) | Err(Error::Unavailable { .. }) if known => told = Some(Told::now(fault, now.lease)),
            Ok(()) => {
                match &fault {
                    Some(fault) => tracing::warn!(fault, "told the store that the network of this node does not work"),
                    None => tracing::debug!("the store knows that the network works"),
                }
                told = Some(Told::now(fault, now.lease));
                wait = AGAIN;
            }
            Err(error) => {
                let text = chain(&error);
                if said.due(&text, std::time::Instant::now()) {
                    let word = if fault.is_some() { "does not work" } else { "works" };
                    tracing::warn!("tell the store that the network {word}: {text}");
                }
                // It may have been written all the same.
                told = None;
                not_before = Instant::now() + wait;
                wait = (wait * 2).min(AGAIN_MAX);
            }
        }
    }
}

#[cfg(test)]
#[path = "tell/tests.rs"]
mod tests;
