// SPDX-License-Identifier: Apache-2.0
//! Calls to the store for the own lease: renewal, taking it again, and rewriting it. They run in tasks beside the agent's
//! loop, so that a store that hangs delays no repair.

use std::rc::Rc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use weft_subnet::attrs::Attrs;
use weft_subnet::lease::Lease;
use weft_subnet::retry::Backoff;
use weft_subnet::source::{Error, Event, LeaseRequest, Source};

use crate::log::chain;

/// First delay between two attempts. It doubles up to the maximum.
const RETRY_DELAY: Duration = Duration::from_millis(100);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(5);

/// An answer to a call for the own lease.
#[derive(Debug)]
pub enum LeaseAnswer {
    /// This node holds this lease.
    Held(Lease),
    /// Another node owns the subnet. The text says which one.
    Taken(String),
    /// The call failed for this reason, and is repeated.
    Failed(String),
}

/// The calls that run: at most one renewal, and at most one other call.
pub struct LeaseTasks {
    store: Rc<dyn Source>,
    events: mpsc::Sender<Event>,
    answers: mpsc::UnboundedSender<LeaseAnswer>,
    renewal: Option<JoinHandle<()>>,
    call: Option<JoinHandle<()>>,
    /// The final answer of `call` has not been handled yet.
    is_call_open: bool,
}

impl LeaseTasks {
    /// Creates the caller without any call. Renewals and net-conf are reported to `events`. The returned receiver gets the answers
    /// to all other calls.
    pub fn new(
        store: Rc<dyn Source>,
        events: mpsc::Sender<Event>,
    ) -> (LeaseTasks, mpsc::UnboundedReceiver<LeaseAnswer>) {
        let (answers, receiver) = mpsc::unbounded_channel();
        (LeaseTasks { store, events, answers, renewal: None, call: None, is_call_open: false }, receiver)
    }

    /// Renews this lease from now on, instead of the one before.
    pub fn renew(&mut self, lease: Lease) {
        let (store, events) = (self.store.clone(), self.events.clone());
        let task = tokio::task::spawn_local(async move { store.keep(&lease, events).await });
        if let Some(before) = self.renewal.replace(task) {
            before.abort();
        }
    }

    /// Takes the same subnet again, or replaces what the lease says by `attrs`.
    pub fn rewrite(&mut self, lease: Lease, attrs: Attrs) {
        let store = self.store.clone();
        self.start(async move |answers| {
            until_answered(answers, async || store.retake(&lease.subnets, &lease.attrs, &attrs).await).await;
        });
    }

    /// Takes any free subnet, because the own one belongs to another node.
    pub fn acquire(&mut self, request: LeaseRequest) {
        let store = self.store.clone();
        self.start(async move |answers| until_answered(answers, async || store.acquire(&request).await).await);
    }

    /// Reads net-conf and acquires the lease, after a start without the store. net-conf may have changed meanwhile, and a
    /// watch that begins later does not report that. The watch may report a newer one while an older one waits to be handled. So both go the same
    /// way, which keeps their order.
    pub fn acquire_after_resume(&mut self, request: LeaseRequest) {
        let (store, events) = (self.store.clone(), self.events.clone());
        self.start(async move |answers| {
            let call = async || {
                match store.config().await {
                    Ok(text) => drop(events.send(Event::Config(text)).await),
                    // The watch goes on with the last one, too.
                    Err(Error::NoNetConf { .. }) => {}
                    Err(error) => return Err(error),
                }
                store.acquire(&request).await
            };
            until_answered(answers, call).await;
        });
    }

    /// Returns true until [`LeaseTasks::close_call`]. That the task has ended is not enough: while its answer waits in the
    /// queue, the node knows less about its lease than the store.
    pub fn is_call_open(&self) -> bool {
        self.is_call_open
    }

    /// Takes notice that the final answer of the call has been handled.
    pub fn close_call(&mut self) {
        self.is_call_open = false;
    }

    fn start(&mut self, call: impl AsyncFnOnce(&mpsc::UnboundedSender<LeaseAnswer>) + 'static) {
        self.is_call_open = true;
        let answers = self.answers.clone();
        let task = tokio::task::spawn_local(async move { call(&answers).await });
        if let Some(before) = self.call.replace(task) {
            before.abort();
        }
    }
}

impl Drop for LeaseTasks {
    fn drop(&mut self) {
        for task in [self.renewal.take(), self.call.take()].into_iter().flatten() {
            task.abort();
        }
    }
}

/// Repeats a call until the store has decided, and sends each answer.
async fn until_answered(answers: &mpsc::UnboundedSender<LeaseAnswer>, call: impl AsyncFn() -> Result<Lease, Error>) {
    let mut backoff = Backoff::new(RETRY_DELAY, RETRY_DELAY_MAX);
    loop {
        let answer = match call().await {
            Ok(lease) => LeaseAnswer::Held(lease),
            Err(Error::Taken { subnet, owner }) => {
                LeaseAnswer::Taken(format!("subnet {subnet} belongs to {owner} now"))
            }
            Err(error) => LeaseAnswer::Failed(chain(&error)),
        };
        let is_final = !matches!(answer, LeaseAnswer::Failed(_));
        if answers.send(answer).is_err() || is_final {
            return;
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use weft_backends::register::TYPES;
    use weft_subnet::cidr::Subnets;
    use weft_subnet::connected::Connected;
    use weft_subnet::dir::DirStore;
    use weft_subnet::lease::Age;
    use weft_subnet::net_conf::NetConf;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_store_that_fails_is_asked_more_and_more_rarely() {
        let ((answers, _received), calls) = (mpsc::unbounded_channel(), Cell::new(0));
        let call = async || {
            calls.set(calls.get() + 1);
            Err(Error::Missing("nothing".into()))
        };
        let minute = tokio::time::timeout(Duration::from_secs(60), until_answered(&answers, call)).await;
        assert!(minute.is_err() && (15..=40).contains(&calls.get()), "{} calls in a minute", calls.get());
    }

    /// A subnet of another node stays its own, however often it is asked for.
    #[tokio::test(start_paused = true)]
    async fn the_answer_that_another_node_has_the_subnet_is_final() {
        let ((answers, mut received), calls) = (mpsc::unbounded_channel(), Cell::new(0));
        let call = async || {
            calls.set(calls.get() + 1);
            let subnet = Subnets::from_key("10.5.1.0-24").unwrap_or_default();
            Err(Error::Taken { subnet, owner: "192.0.2.9".into() })
        };
        let ends = tokio::time::timeout(Duration::from_secs(60), until_answered(&answers, call)).await;
        assert!(ends.is_ok() && calls.get() == 1, "{} calls", calls.get());
        let answer = received.recv().await.unwrap();
        assert!(
            matches!(&answer, LeaseAnswer::Taken(text) if text == "subnet 10.5.1.0/24 belongs to 192.0.2.9 now"),
            "{answer:?}"
        );
    }

    /// The earlier one is about another lease, or says what our lease was to be before.
    #[tokio::test]
    async fn a_renewal_ends_the_one_before_it_and_so_does_a_call() {
        let with_two_of_each = async {
            let dir = tempfile::tempdir().unwrap();
            let store: Rc<dyn Source> = Rc::new(DirStore::new(dir.path().into(), TYPES));
            let (events, _received) = mpsc::channel(8);
            let (mut tasks, _answers) = LeaseTasks::new(store.clone(), events);
            let held = Rc::new(());
            for key in ["10.5.1.0-24", "10.5.2.0-24"] {
                let subnets = Subnets::from_key(key).unwrap();
                tasks.renew(Lease { id: key.into(), subnets, attrs: Attrs::default(), age: Age::default() });
                let held = held.clone();
                tasks.start(async move |_| {
                    std::future::pending::<()>().await;
                    drop(held);
                });
            }
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(Rc::strong_count(&store), 3, "the test, the tasks and the second renewal");
            assert_eq!(Rc::strong_count(&held), 2, "the test and the second call");
            assert!(tasks.is_call_open());
        };
        tokio::task::LocalSet::new().run_until(with_two_of_each).await;
    }

    /// The subnet that is acquired must be one of the net-conf that the store has now.
    #[tokio::test]
    async fn after_a_start_without_the_store_nothing_is_acquired_before_net_conf_was_read() {
        let resuming = async {
            let dir = tempfile::tempdir().unwrap();
            let (path, subnets) = (dir.path().join("config.json"), dir.path().join("subnets"));
            let store: Rc<dyn Source> = Rc::new(DirStore::new(dir.path().into(), TYPES));
            // It cannot be read, and it is not missing.
            std::fs::create_dir(&path).unwrap();
            let (events, mut reported) = mpsc::channel(8);
            let (mut tasks, mut answers) = LeaseTasks::new(store, events);
            let text = r#"{"Network":"10.5.0.0/16"}"#;
            let (net_conf, attrs) = (NetConf::parse(text).unwrap(), Attrs::default());
            let connected = Connected::default();
            tasks.acquire_after_resume(LeaseRequest { net_conf, attrs, previous: None, was: None, connected });
            let answer = answers.recv().await.unwrap();
            assert!(matches!(answer, LeaseAnswer::Failed(_)) && std::fs::read_dir(subnets).unwrap().count() == 0);
            std::fs::remove_dir(&path).unwrap();
            std::fs::write(&path, text).unwrap();
            while !matches!(answers.recv().await.unwrap(), LeaseAnswer::Held(_)) {}
            // It is reported as the watch would do it, and before the answer.
            assert_eq!(reported.try_recv(), Ok(Event::Config(text.to_owned())));
        };
        tokio::task::LocalSet::new().run_until(resuming).await;
    }

    /// A call that goes on could write the lease after the agent has given it up.
    #[tokio::test]
    async fn no_call_goes_on_when_the_tasks_are_dropped() {
        let with_a_call = async {
            let dir = tempfile::tempdir().unwrap();
            let store: Rc<dyn Source> = Rc::new(DirStore::new(dir.path().into(), TYPES));
            let (events, _received) = mpsc::channel(8);
            let (mut tasks, _answers) = LeaseTasks::new(store.clone(), events);
            let subnets = Subnets::from_key("10.5.1.0-24").unwrap();
            tasks.renew(Lease { id: "10.5.1.0-24".into(), subnets, attrs: Attrs::default(), age: Age::default() });
            assert_eq!(Rc::strong_count(&store), 3, "the test, the tasks and the renewal");
            drop(tasks);
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(Rc::strong_count(&store), 1);
        };
        tokio::task::LocalSet::new().run_until(with_a_call).await;
    }
}
