// SPDX-License-Identifier: Apache-2.0
//! Why a start has no lease yet, and how this is reported.

use std::time::Duration;

use tokio::time::Instant;
use weft_backends::backend::Skip;
use weft_subnet::retry::Backoff;
use weft_subnet::source::Error;

use crate::extension::FirstError;
use crate::kernel::MachineError;
use crate::log::{Reminder, chain};
use crate::observe::fault::{Fault, FaultKind};
use crate::observe::fault_events::EventReporter;
use crate::observe::node_condition::{ConditionReporter, Health};
use crate::observe::readiness::Readiness;
use crate::observe::systemd::Notify;
use crate::plan::ConfError;
use crate::uplink::PickError;

const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// The longest pause between two attempts while the store is away. After a power cut all nodes of a site start at once, so each pause is
/// longer than the one before, and has a random part.
const STORE_AGAIN: Duration = Duration::from_secs(4);

/// Why an attempt to start did not lead to a lease.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    /// The store failed, or refused a request.
    #[error("{}{what}{}", if self.is_refused() { "the store refuses: " } else { "" }, chain(error))]
    Store {
        /// What was asked, as a prefix of the message.
        what: &'static str,
        error: Error,
        /// The net-conf, if it was read before the store failed.
        config: Option<String>,
    },
    #[error(transparent)]
    NetConf(#[from] ConfError),
    #[error(transparent)]
    Machine(#[from] MachineError),
    #[error("{}", chain(.0))]
    Uplink(#[from] PickError),
    #[error(transparent)]
    Identity(#[from] Skip),
    #[error(transparent)]
    FirstCommand(#[from] FirstError),
    #[error("own lease: it has another backend")]
    OtherBackend,
}

impl StartError {
    /// Returns a conversion for the errors of one call to the store.
    pub(super) fn store(what: &'static str, config: Option<&str>) -> impl FnOnce(Error) -> StartError {
        let config = config.map(str::to_owned);
        move |error| StartError::Store { what, error, config }
    }

    /// Returns true if the store refused the request, and will go on doing so until somebody changes something.
    fn is_refused(&self) -> bool {
        matches!(self, StartError::Store { error: Error::Refused { .. }, .. })
    }

    /// Returns true if the store cannot be reached. An unavailable store without a source answered itself: there is no pod CIDR yet, or there
    /// are too many writers.
    pub(super) fn is_store_away(&self) -> bool {
        matches!(self, StartError::Store { error: Error::Unavailable { source: Some(_), .. }, .. })
    }
}

/// Reports what the start waits for: in the log, to systemd, in /readyz and `weft status`, and to the store unless the store is away.
pub struct Waiting<'a> {
    patience: Reminder,
    notify: &'a mut Notify,
    readiness: Readiness,
    reports: (&'a ConditionReporter, &'a EventReporter),
    /// The pauses before the store is asked again.
    backoff: Backoff,
}

impl Waiting<'_> {
    /// Returns a state in which nothing is waited for yet.
    pub fn new<'a>(
        notify: &'a mut Notify,
        readiness: Readiness,
        reports: (&'a ConditionReporter, &'a EventReporter),
    ) -> Waiting<'a> {
        let backoff = Backoff::new(LOOK_AGAIN, STORE_AGAIN);
        Waiting { patience: Reminder::default(), notify, readiness, reports, backoff }
    }

    pub(super) async fn on(&mut self, error: StartError) {
        let text = error.to_string();
        let is_away = error.is_store_away();
        let health = if is_away { Health::Unknown } else { Health::Unwell(text.clone()) };
        // A store that refuses the lease may accept the report of the fault. It is asked as rarely as one that is away.
        if !is_away && !error.is_refused() && !matches!(error, StartError::FirstCommand(_)) {
            self.backoff.reset();
        }
        let (condition, events) = self.reports;
        let fault = matches!(health, Health::Unwell(_)).then(|| Fault { kind: FaultKind::NoLease, text: text.clone() });
        events.set(fault.as_slice());
        condition.set(health);
        if self.patience.due(&text, Instant::now()) {
            tracing::warn!("waiting: {text}");
        }
        self.notify.status(&format!("waiting: {text}"));
        self.readiness.set([format!("waiting: {text}")]);
        self.notify.ping();
        tokio::time::sleep(self.backoff.next_delay()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use weft_subnet::source::Source;

    use super::super::tests::{Memories, local};
    use super::*;

    /// In Kubernetes, whoever looks at the Node finds there why it has no lease. Nothing is written about a store that is away, because
    /// nothing can be written into it.
    #[tokio::test(start_paused = true)]
    async fn a_fault_that_prevents_the_lease_is_written_into_the_store_and_one_of_the_store_is_not() {
        local(async {
            let store = Rc::new(Memories { notices_after: Some(Duration::ZERO), ..Memories::default() });
            let source: Rc<dyn Source> = store.clone();
            let (condition, events) =
                (ConditionReporter::new(source.clone(), Duration::from_secs(60)), EventReporter::new(source.clone()));
            let mut notify = Notify::default();
            let mut waiting = Waiting::new(&mut notify, Readiness::new(), (&condition, &events));
            let away = source.config().await.unwrap_err();
            waiting.on(StartError::store("net-conf: ", None)(away)).await;
            assert_eq!(store.notices.borrow().len(), 0);
            waiting.on(StartError::OtherBackend).await;
            let written = store.notices.borrow();
            let texts: Vec<&str> = written.iter().map(|notice| notice.text.as_str()).collect();
            assert_eq!(texts, ["own lease: it has another backend"], "{written:?}");
        })
        .await;
    }

    /// A start goes on with what was saved only if nobody answers. A store that has no pod CIDR yet does answer.
    #[test]
    fn only_a_store_that_does_not_answer_is_away() {
        let is_away = |error| StartError::store("own lease: ", None)(error).is_store_away();
        let what = || "list leases".to_owned();
        assert!(is_away(Error::Unavailable { what: what(), source: Some("connection refused".into()) }));
        assert!(!is_away(Error::Unavailable { what: what(), source: None }));
        assert!(!is_away(Error::Refused { what: what(), source: "no rights".into() }));
        assert!(!StartError::OtherBackend.is_store_away());
    }

    /// After a power cut, all nodes of a site wait for the store.
    #[tokio::test(start_paused = true)]
    async fn the_pause_between_two_attempts_grows_while_the_store_is_away() {
        local(async {
            let store: Rc<dyn Source> = Rc::new(Memories::default());
            let condition = ConditionReporter::new(store.clone(), Duration::from_secs(60));
            let events = EventReporter::new(store.clone());
            let mut notify = Notify::default();
            let mut waiting = Waiting::new(&mut notify, Readiness::new(), (&condition, &events));
            for longest in [1, 2, 4, 4, 4].map(Duration::from_secs) {
                let (error, begin) = (store.config().await.unwrap_err(), Instant::now());
                waiting.on(StartError::store("net-conf: ", None)(error)).await;
                // Each pause has a random part of up to a half.
                let pause = begin.elapsed();
                assert!((longest / 2..=longest).contains(&pause), "{pause:?} of {longest:?}");
            }
            // A store that refuses is asked as rarely.
            let begin = Instant::now();
            let refusal = Error::Refused { what: "list leases".into(), source: "no rights".into() };
            waiting.on(StartError::store("net-conf: ", None)(refusal)).await;
            assert!(begin.elapsed() >= STORE_AGAIN / 2, "{:?}", begin.elapsed());
            // A command that fails may cost much each time, too.
            let begin = Instant::now();
            waiting.on(StartError::FirstCommand(FirstError::NotAllowed)).await;
            assert!(begin.elapsed() >= STORE_AGAIN / 2, "{:?}", begin.elapsed());
            // What this machine itself lacks is checked each second, because that costs nobody else anything.
            let begin = Instant::now();
            waiting.on(StartError::OtherBackend).await;
            assert!(begin.elapsed() <= LOOK_AGAIN * 2, "{:?}", begin.elapsed());
        })
        .await;
    }
}
