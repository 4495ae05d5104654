// SPDX-License-Identifier: Apache-2.0
//! Writes notices of lasting faults of this node into the store, for people who look at the cluster (docs/adr/031-events.md). In
//! Kubernetes they are Events about the Node.
//!
//! A fault is written after it has lasted for some time, its end at once. The task waits for the store, and nothing waits for the task.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use weft_subnet::retry::jitter;
use weft_subnet::source::{Error, FaultNotice, Source};

use crate::debt::Debt;
use crate::log::chain;
use crate::observe::fault::{Fault, FaultKind};

/// A fault that ended and came back is written again after this time at the earliest.
const PAUSE: Duration = Duration::from_secs(600);
/// A fault that lasts is written again after this time, because an API server forgets Events after an hour.
const RENEWAL: Duration = Duration::from_secs(1800);
/// Time after a failed write.
const RETRY: Duration = Duration::from_secs(300);
/// Number of writes that are allowed at once.
const AT_ONCE: u32 = 5;
/// After these, one more write is allowed in this time: ten an hour.
const ONE_IN: Duration = Duration::from_secs(360);

/// A fault that the node has now.
#[derive(Debug, Clone)]
struct Lasting {
    text: String,
    /// When it has lasted for long enough.
    due: Instant,
}

type Faults = BTreeMap<FaultKind, Lasting>;

/// Writes notices in a task of its own. Dropping it ends the task.
#[derive(Debug)]
pub struct EventReporter {
    /// `None` if the store takes no notices.
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    faults: watch::Sender<Faults>,
    /// A fault is written after this time at the earliest.
    patience: Duration,
    task: JoinHandle<()>,
}

impl EventReporter {
    /// Starts writing into this store, if it takes notices. This must run in a `LocalSet`.
    pub fn new(store: Rc<dyn Source>) -> EventReporter {
        let patience = store.notices_after();
        let write = async move |notice: FaultNotice| store.write_notice(&notice).await;
        EventReporter { running: patience.map(|patience| Running::new(write, patience)) }
    }

    /// Sets which faults the node has now. Of several faults of one kind the first one counts.
    pub fn set(&self, now: &[Fault]) {
        if let Some(running) = &self.running {
            running.set(now);
        }
    }
}

impl Running {
    fn new(write: impl AsyncFn(FaultNotice) -> Result<(), Error> + 'static, patience: Duration) -> Running {
        let (faults, receiver) = watch::channel(Faults::new());
        Running { faults, patience, task: tokio::task::spawn_local(run(write, receiver)) }
    }

    fn set(&self, now: &[Fault]) {
        let mut texts = BTreeMap::new();
        for fault in now {
            texts.entry(fault.kind).or_insert(&fault.text);
        }
        self.faults.send_if_modified(|faults| {
            if faults.iter().map(|(kind, fault)| (kind, &fault.text)).eq(texts.iter().map(|(kind, text)| (kind, *text)))
            {
                return false;
            }
            faults.retain(|kind, _| texts.contains_key(kind));
            for (kind, text) in texts {
                // If all nodes have the same fault, they do not write at the same time.
                let due = || Instant::now() + jitter(self.patience * 3);
                faults.entry(kind).or_insert_with(|| Lasting { text: String::new(), due: due() }).text.clone_from(text);
            }
            true
        });
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The last notice of one kind.
#[derive(Debug)]
struct Written {
    text: String,
    at: Instant,
    /// True until the end of the fault is written.
    is_open: bool,
    /// How often the fault was written.
    count: u64,
}

/// What was written, by kind.
#[derive(Debug, Default)]
struct Ledger(BTreeMap<FaultKind, Written>);

impl Ledger {
    /// Returns what is written next and when, or `None` if there is nothing to write.
    fn next(&self, faults: &Faults) -> Option<(Instant, FaultKind)> {
        let lasting = faults.iter().map(|(kind, fault)| match self.0.get(kind) {
            None => (fault.due, *kind),
            Some(written) if written.is_open => (written.at + RENEWAL, *kind),
            Some(written) => (fault.due.max(written.at + PAUSE), *kind),
        });
        let ended = self.0.iter().filter(|(kind, written)| written.is_open && !faults.contains_key(kind));
        lasting.chain(ended.map(|(kind, written)| (written.at, *kind))).min()
    }

    /// Returns the notice of this kind as the faults are now.
    fn notice(&self, kind: FaultKind, faults: &Faults) -> FaultNotice {
        let (fault, written) = (faults.get(&kind), self.0.get(&kind));
        let text = fault.map(|fault| &fault.text).or(written.map(|written| &written.text)).cloned();
        let count = written.map_or(0, |written| written.count) + 1;
        FaultNotice { fault: kind.reason(), text: text.unwrap_or_default(), is_over: fault.is_none(), count }
    }

    fn written(&mut self, kind: FaultKind, notice: FaultNotice, at: Instant) {
        let FaultNotice { text, is_over, count, .. } = notice;
        self.0.insert(kind, Written { text, at, is_open: !is_over, count });
    }
}

async fn run(write: impl AsyncFn(FaultNotice) -> Result<(), Error>, mut receiver: watch::Receiver<Faults>) {
    let (mut ledger, mut failed) = (Ledger::default(), None);
    let mut debt = Debt::default();
    let mut earliest = Instant::now();
    loop {
        let faults = receiver.borrow_and_update().clone();
        let Some((at, kind)) = ledger.next(&faults) else {
            if receiver.changed().await.is_err() {
                return;
            }
            continue;
        };
        tokio::select! {
            changed = receiver.changed() => match changed {
                Ok(()) => continue,
                Err(_) => return,
            },
            () = sleep_until(debt.allowed_at(ONE_IN * (AT_ONCE - 1)).into_iter().fold(at.max(earliest), Instant::max)) => {}
        }
        debt.charge(ONE_IN, Instant::now());
        let notice = ledger.notice(kind, &faults);
        match write(notice.clone()).await {
            Ok(()) => {
                ledger.written(kind, notice, Instant::now());
                failed = None;
            }
            Err(error) => {
                let text = chain(&error);
                if failed.as_ref() != Some(&text) {
                    tracing::warn!("write an event about this node: {text}");
                }
                failed = Some(text);
                earliest = Instant::now() + RETRY;
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
