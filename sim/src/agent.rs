// SPDX-License-Identifier: Apache-2.0
//! The agent of one machine: weft's own code as a task, which can be stopped and killed like a process.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, LocalSet};
use tokio::time::Sleep;
use weft::agent::{Surroundings, serve_in};
use weft::observe::metrics::Metrics;
use weft::observe::readiness::Readiness;
use weft::observe::socket::Request;
use weft::observe::status::Status;
use weft::options::Options;
use weft_subnet::source::Source;

use crate::disk;
use crate::kernel::SimKernel;
use crate::timeline;

/// How long an agent may take to answer, in virtual time.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Stops an agent as SIGSTOP does, and lets it go on.
#[derive(Debug, Default)]
struct Gate {
    closed: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

/// Runs a future as the agent of a machine.
struct OnMachine<F> {
    inner: Pin<Box<F>>,
    gate: Rc<Gate>,
    clock: Rc<Cell<i64>>,
    machine: usize,
    /// The agent waits for a disk.
    blocked: Option<Pin<Box<Sleep>>>,
}

impl<F: Future> Future for OnMachine<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        if self.gate.closed.get() {
            *self.gate.waker.borrow_mut() = Some(context.waker().clone());
            return Poll::Pending;
        }
        if let Some(blocked) = &mut self.blocked {
            std::task::ready!(blocked.as_mut().poll(context));
            self.blocked = None;
        }
        let (machine, wrong) = (self.machine, self.clock.get());
        let polled = timeline::on_machine(machine, wrong, || self.inner.as_mut().poll(context));
        let time = disk::take_blocked(machine);
        if polled.is_pending() && !time.is_zero() {
            let mut blocked = Box::pin(tokio::time::sleep(time));
            if blocked.as_mut().poll(context).is_pending() {
                self.blocked = Some(blocked);
            }
        }
        polled
    }
}

/// An agent that was started.
#[derive(Debug)]
pub struct Agent {
    task: JoinHandle<String>,
    requests: mpsc::Sender<Request>,
    readiness: Readiness,
    stop: oneshot::Sender<()>,
    gate: Rc<Gate>,
}

impl Agent {
    /// Starts an agent on a machine, of which the number and the error of the wall clock in seconds are given.
    pub fn start(
        (machine, clock): (usize, Rc<Cell<i64>>),
        options: Options,
        store: Rc<dyn Source>,
        kernel: SimKernel,
    ) -> Agent {
        let (requests, received) = mpsc::channel(4);
        let (readiness, metrics) = (Readiness::new(), Arc::new(Metrics::new()));
        let surroundings = Surroundings {
            requests: received,
            readiness: readiness.clone(),
            metrics,
            traffic_rules: false,
            was_killed: false,
        };
        let (stop, stopped) = oneshot::channel::<()>();
        let agent = async move {
            let shutdown = async move {
                if stopped.await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            let monitor = kernel.clone();
            let tasks = LocalSet::new();
            let ended = tasks.run_until(serve_in(surroundings, options, store, (kernel, monitor), shutdown));
            match ended.await {
                Ok(code) => format!("ended with {code:?}"),
                Err(error) => format!("failed: {error:#}"),
            }
        };
        let (gate, inner) = (Rc::<Gate>::default(), Box::pin(agent));
        let task = tokio::task::spawn_local(OnMachine { inner, gate: gate.clone(), clock, machine, blocked: None });
        Agent { task, requests, readiness, stop, gate }
    }

    /// Ends the agent as SIGKILL does.
    pub fn kill(self) {
        self.task.abort();
    }

    /// Ends the agent as SIGTERM does. It ends a moment later.
    pub fn terminate(self) {
        // The agent may have ended by itself.
        let _ = self.stop.send(());
    }

    /// Stops the agent as SIGSTOP does, or lets it go on.
    pub fn freeze(&self, frozen: bool) {
        self.gate.closed.set(frozen);
        if let Some(waker) = self.gate.waker.borrow_mut().take() {
            waker.wake();
        }
    }

    /// Returns true if the agent is stopped as by SIGSTOP.
    pub fn is_frozen(&self) -> bool {
        self.gate.closed.get()
    }

    /// Returns what the agent says of its readiness.
    pub fn readiness(&self) -> &Readiness {
        &self.readiness
    }

    /// Returns true if the agent has ended by itself.
    pub fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Asks the agent for its status.
    pub async fn status(&self) -> Option<Status> {
        let (reply, answer) = oneshot::channel();
        self.requests.try_send(Request::Status(reply)).ok()?;
        tokio::time::timeout(ANSWER_LIMIT, answer).await.ok()?.ok()
    }
}
