// SPDX-License-Identifier: Apache-2.0
//! Our own lease: kept alive, taken again when it is lost, rewritten when what we publish changes. Calls to the store run beside
//! the loop, so that a store that hangs delays no repair.

use std::rc::Rc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::Lease;
use weft_subnet::source::{Claim, Error, Event, Source};

use weft_subnet::retry::jitter;

use crate::log::chain;

const FIRST_WAIT: Duration = Duration::from_millis(100);
const LAST_WAIT: Duration = Duration::from_secs(5);

/// How a call to the store for our lease ended.
#[derive(Debug)]
pub enum Answer {
    /// We hold this lease.
    Held(Lease),
    /// Another node owns the subnet: for people.
    Taken(String),
    /// What net-conf says; the answer proper comes later.
    Config(String),
    /// The store does not answer, and is asked again.
    Trouble(String),
}

/// The calls that run, one of each kind at most.
pub struct Keeper {
    store: Rc<dyn Source>,
    events: mpsc::Sender<Event>,
    answers: mpsc::UnboundedSender<Answer>,
    keeping: Option<JoinHandle<()>>,
    taking: Option<JoinHandle<()>>,
    /// The answer of `taking` was not handed in yet: from the store's view anything may be true.
    open: bool,
}

impl Keeper {
    /// Renewals are reported to `events`; the receiver gets the answers of the other calls.
    pub fn new(store: Rc<dyn Source>, events: mpsc::Sender<Event>) -> (Keeper, mpsc::UnboundedReceiver<Answer>) {
        let (answers, receiver) = mpsc::unbounded_channel();
        (Keeper { store, events, answers, keeping: None, taking: None, open: false }, receiver)
    }

    /// Keeps this lease alive from now on.
    pub fn keep(&mut self, lease: Lease) {
        let (store, events) = (self.store.clone(), self.events.clone());
        let task = tokio::task::spawn_local(async move { store.keep(&lease, events).await });
        if let Some(before) = self.keeping.replace(task) {
            before.abort();
        }
    }

    /// Takes the same subnet again, or rewrites what the lease says.
    pub fn retake(&mut self, lease: Lease, attrs: Attrs) {
        let store = self.store.clone();
        self.take(async move |answers| {
            until_answered(answers, async || store.retake(&lease.subnets, &lease.attrs, &attrs).await).await;
        });
    }

    /// Takes any subnet: ours belongs to somebody else.
    pub fn acquire(&mut self, claim: Claim) {
        let store = self.store.clone();
        self.take(async move |answers| until_answered(answers, async || store.acquire(&claim).await).await);
    }

    /// The same after a start without the store: net-conf may say something else by now, which no watch tells as a change.
    pub fn catch_up(&mut self, claim: Claim) {
        let store = self.store.clone();
        self.take(async move |answers| {
            let call = async || {
                match store.config().await {
                    Ok(text) => drop(answers.send(Answer::Config(text))),
                    Err(Error::Missing(_)) => {}
                    Err(error) => return Err(error),
                }
                store.acquire(&claim).await
            };
            until_answered(answers, call).await;
        });
    }

    /// True until the answer of the last call was handed to [`Keeper::settled`]. A finished task is not enough: while its answer
    /// waits in the queue, what we believe of our own lease is older than the store.
    pub fn busy(&self) -> bool {
        self.open
    }

    /// The last answer of the call was read.
    pub fn settled(&mut self) {
        self.open = false;
    }

    fn take(&mut self, call: impl AsyncFnOnce(&mpsc::UnboundedSender<Answer>) + 'static) {
        self.open = true;
        let answers = self.answers.clone();
        let task = tokio::task::spawn_local(async move { call(&answers).await });
        if let Some(before) = self.taking.replace(task) {
            before.abort();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        for task in [self.keeping.take(), self.taking.take()].into_iter().flatten() {
            task.abort();
        }
    }
}

async fn until_answered(answers: &mpsc::UnboundedSender<Answer>, call: impl AsyncFn() -> Result<Lease, Error>) {
    let mut wait = FIRST_WAIT;
    loop {
        let answer = match call().await {
            Ok(lease) => Answer::Held(lease),
            Err(Error::Taken { subnet, owner }) => Answer::Taken(format!("subnet {subnet} belongs to {owner} now")),
            Err(error) => Answer::Trouble(chain(&error)),
        };
        let last = !matches!(answer, Answer::Trouble(_));
        if answers.send(answer).is_err() || last {
            return;
        }
        tokio::time::sleep(jitter(wait)).await;
        wait = (wait * 2).min(LAST_WAIT);
    }
}
