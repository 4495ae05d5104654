// SPDX-License-Identifier: Apache-2.0
//! Keeps the traffic rules in place, in a task beside the loop of the agent. It compares the rules in the kernel with the wanted ones,
//! and writes the difference: whenever the wanted rules change, whenever another program may have changed them, and every
//! `--iptables-resync`. The node sends the wanted rules and receives the state. Neither packets nor passes wait for this task.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use weft_backends::masq::Rules;
use weft_subnet::source::Local;

use super::carrier::{Carrier, EnsureError, Ensured};
use crate::log::Reminder;

/// When other programs change our rules more often than this in a minute, the rules are restored by the resync and no longer at once.
const RESTORED_A_MINUTE: usize = 20;
const MINUTE: Duration = Duration::from_secs(60);
/// Rules that were in place count as in place for this time, even when they cannot be read.
const UNREAD: Duration = Duration::from_secs(180);
/// The pause between two comparisons is at least this many times what the last one took, but at most [`MINUTE`]. With kube-proxy's
/// rules in iptables, a comparison may take a second.
const PAUSE: u32 = 10;

/// The state of the rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// What carries them, for people.
    pub carrier: String,
    /// The rules that are in place; `None`: it is not known that any are.
    pub in_place: Option<Rules>,
    /// Why the wanted rules are not in place.
    pub error: Option<String>,
    /// What is wrong although the rules are in place, one sentence each.
    pub warnings: Vec<String>,
    /// How often rules were written.
    pub writes: u64,
    /// How many of these writes restored rules that another program had changed.
    pub restored: u64,
}

/// The end of the node: it sends the wanted rules, and receives the state.
#[derive(Debug)]
pub struct Handle {
    /// The wanted rules; `None`: not known yet.
    pub wanted: watch::Sender<Option<Rules>>,
    /// The state.
    pub state: watch::Receiver<State>,
}

/// The end of the task.
#[derive(Debug)]
pub struct Port {
    wanted: watch::Receiver<Option<Rules>>,
    state: watch::Sender<State>,
}

impl Handle {
    /// Both ends.
    pub fn new() -> (Handle, Port) {
        let (wanted, asked) = watch::channel(None);
        let (state, received) = watch::channel(State::default());
        (Handle { wanted, state: received }, Port { wanted: asked, state })
    }
}

impl Port {
    /// Sends the state, unless it is the same as before.
    fn send(&self, state: &State) {
        self.state.send_if_modified(|now| {
            let changed = now != state;
            if changed {
                now.clone_from(state);
            }
            changed
        });
    }
}

/// What is done about the rules of other programs, once ours are in place: chains that drop what our rules accept, and rules that an
/// earlier program left.
pub trait Others {
    /// Called after every comparison that found or brought our rules in place, and never before, because rules are removed here.
    /// Returns warnings for the operator, one sentence each.
    fn settle<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Vec<String>>;
}

/// There are no other programs.
#[derive(Debug)]
pub struct NoOthers;

impl Others for NoOthers {
    fn settle<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Vec<String>> {
        Box::pin(async { Vec::new() })
    }
}

/// Runs until the handle is dropped. The counters of the state go on from those of an earlier run with the same port.
pub async fn run(mut carrier: Box<dyn Carrier>, mut others: Box<dyn Others>, port: &mut Port, resync: Duration) {
    let mut history = History::default();
    let before = port.state.borrow().clone();
    let mut state = State { carrier: carrier.describe(), in_place: None, error: None, ..before };
    loop {
        let wanted = port.wanted.borrow_and_update().clone();
        let mut pause = resync;
        if let Some(rules) = &wanted {
            let start = Instant::now();
            let outcome = carrier.ensure(rules).await;
            state.carrier = carrier.describe();
            let unread = history.record(&mut state, rules, outcome);
            // subnet.env waits until the rules are in place. It does not wait for what is done about other programs.
            port.send(&state);
            if state.in_place.is_some() {
                let warnings: Vec<String> = unread.into_iter().chain(others.settle(rules).await).collect();
                warnings.iter().filter(|text| !state.warnings.contains(text)).for_each(|text| tracing::warn!("{text}"));
                state.warnings = warnings;
                port.send(&state);
            }
            pause = resync.max((start.elapsed() * PAUSE).min(MINUTE));
        }
        let is_well = state.error.is_none() && state.warnings.is_empty();
        let idle = wanted.as_ref().is_none_or(Rules::is_empty) && is_well;
        let is_calm = history.is_calm();
        tokio::select! {
            changed = port.wanted.changed() => if changed.is_err() {
                return;
            },
            () = carrier.changed(), if is_calm => {}
            () = tokio::time::sleep(pause), if !idle => {}
        }
    }
}

/// What is remembered from one comparison to the next.
#[derive(Debug, Default)]
struct History {
    /// When the rules were restored, within the last minute.
    restored: VecDeque<Instant>,
    /// Since when the rules could not be read.
    unread: Option<Instant>,
    /// Limits how often the same warning is logged.
    logged: Reminder,
}

impl History {
    /// Records the outcome of a comparison. Returns a warning when the rules could not be read but still count as in place.
    fn record(&mut self, state: &mut State, rules: &Rules, outcome: Result<Ensured, EnsureError>) -> Option<String> {
        let in_place = state.in_place.as_ref() == Some(rules);
        match outcome {
            Ok(done) => {
                self.unread = None;
                self.ensured(state, rules, done, in_place);
            }
            // The rules were in place at the last comparison, and a failed read does not remove any.
            Err(EnsureError::Read(error))
                if in_place && self.unread.get_or_insert_with(Instant::now).elapsed() < UNREAD =>
            {
                return Some(format!(
                    "rules: they were in place when they were read last, and cannot be read now: {error}"
                ));
            }
            Err(error) => failed(state, rules, &error.to_string()),
        }
        None
    }

    fn ensured(&mut self, state: &mut State, rules: &Rules, done: Ensured, by_others: bool) {
        let carrier = &state.carrier;
        if state.error.take().is_some() {
            tracing::info!(carrier, rules = rules.len(), "the traffic rules can be written again");
        }
        if done == Ensured::Written {
            state.writes += 1;
            if by_others {
                state.restored += 1;
                self.restored.push_back(Instant::now());
                let text = match self.restored.len() {
                    ..RESTORED_A_MINUTE => "another program changed the traffic rules: they are restored",
                    _ => "another program changes the traffic rules all the time: the next resync restores them",
                };
                // Some programs do this every few seconds. It is logged once a minute, and counted in the status.
                if self.logged.due(text, Instant::now()) {
                    tracing::warn!(carrier, restored = state.restored, "{text}");
                }
            } else {
                tracing::info!(carrier, rules = rules.len(), "traffic rules written");
            }
        }
        if !by_others {
            state.in_place = Some(rules.clone());
        }
    }

    /// Returns true while other programs change the rules rarely enough to restore them at once.
    fn is_calm(&mut self) -> bool {
        let now = Instant::now();
        while self.restored.front().is_some_and(|at| now.duration_since(*at) > MINUTE) {
            self.restored.pop_front();
        }
        self.restored.len() < RESTORED_A_MINUTE
    }
}

fn failed(state: &mut State, rules: &Rules, error: &str) {
    state.in_place = None;
    // No rules are wanted, and where nothing can be written there are none of ours.
    if rules.is_empty() {
        tracing::debug!(error, "no rules are wanted");
        state.error = None;
        state.in_place = Some(rules.clone());
        return;
    }
    if state.error.as_deref() != Some(error) {
        tracing::warn!("rules: {error}");
    }
    state.error = Some(error.to_owned());
}

#[cfg(test)]
mod tests {
    use tokio::task::LocalSet;
    use weft_backends::masq::{Masquerade, Policy, rules};
    use weft_subnet::cidr::Subnets;

    use super::*;
    use crate::firewall::fake::FakeCarrier;

    const RESYNC: Duration = Duration::from_secs(5);

    fn some(own: &str) -> Rules {
        let networks = Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: None };
        let own = Subnets { v4: Some(own.parse().unwrap()), v6: None };
        rules(&networks, &own, &Policy { masquerade: Some(Masquerade::default()), forward: true })
    }

    /// Runs the reconciler with a fake carrier. The clock moves only when all tasks wait.
    async fn with(test: impl AsyncFnOnce(FakeCarrier, &mut Handle)) {
        tokio::time::pause();
        let (mut handle, mut port) = Handle::new();
        let fake = FakeCarrier::default();
        let carrier = Box::new(fake.clone());
        let local = LocalSet::new();
        local.spawn_local(async move { run(carrier, Box::new(NoOthers), &mut port, RESYNC).await });
        local.run_until(test(fake, &mut handle)).await;
    }

    #[tokio::test]
    async fn rules_are_written_once_and_the_same_state_is_not_sent_again() {
        with(async |fake, handle| {
            tokio::time::sleep(RESYNC * 3).await;
            assert_eq!(fake.reads(), 0, "nothing is wanted yet");
            handle.wanted.send_replace(Some(some("10.5.1.0/24")));
            handle.state.changed().await.unwrap();
            assert_eq!(handle.state.borrow_and_update().in_place, Some(some("10.5.1.0/24")));
            tokio::time::sleep(RESYNC * 21 / 2).await;
            assert!(!handle.state.has_changed().unwrap(), "the same state is not sent again");
            assert_eq!((fake.writes(), fake.reads()), (1, 11));
            handle.wanted.send_replace(Some(some("10.5.2.0/24")));
            handle.state.changed().await.unwrap();
            let state = handle.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.writes, state.restored), (Some(some("10.5.2.0/24")), 2, 0));
            handle.wanted.send_replace(Some(Rules::default()));
            handle.state.changed().await.unwrap();
            let reads = fake.reads();
            tokio::time::sleep(RESYNC * 10).await;
            assert_eq!(fake.reads(), reads, "where no rules are wanted, none are read");
        })
        .await;
    }

    #[tokio::test]
    async fn a_flush_is_restored_at_once_and_many_flushes_by_the_resync() {
        with(async |fake, handle| {
            handle.wanted.send_replace(Some(some("10.5.1.0/24")));
            handle.state.changed().await.unwrap();
            let mut last = Duration::ZERO;
            for n in 1..=30 {
                let start = tokio::time::Instant::now();
                fake.flush();
                while fake.rules().is_empty() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                last = start.elapsed();
                assert!(n > RESTORED_A_MINUTE || last <= Duration::from_millis(2), "{n}: {last:?}");
            }
            assert!(last > RESYNC / 2, "{last:?}");
            assert_eq!(handle.state.borrow().restored, 30);
        })
        .await;
    }

    #[tokio::test]
    async fn an_error_is_in_the_state_until_it_ends() {
        with(async |fake, handle| {
            fake.fail_writes(Some("no"));
            handle.wanted.send_replace(Some(some("10.5.1.0/24")));
            handle.state.changed().await.unwrap();
            let state = handle.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.error.as_deref()), (None, Some("run fake: no")));
            fake.fail_writes(None);
            handle.state.changed().await.unwrap();
            let state = handle.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.error), (Some(some("10.5.1.0/24")), None));
        })
        .await;
    }

    /// A dump fails, or a program waits too long for a lock. Rules that were in place count as in place for a while.
    #[tokio::test]
    async fn rules_that_cannot_be_read_count_as_in_place_for_a_while() {
        with(async |fake, handle| {
            handle.wanted.send_replace(Some(some("10.5.1.0/24")));
            handle.state.changed().await.unwrap();
            fake.fail_reads(Some("busy"));
            handle.state.changed().await.unwrap();
            let unread = tokio::time::Instant::now();
            let state = handle.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.error), (Some(some("10.5.1.0/24")), None));
            assert_eq!(
                state.warnings,
                ["rules: they were in place when they were read last, and cannot be read now: run fake: busy"]
            );
            handle.state.changed().await.unwrap();
            let state = handle.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.error.as_deref()), (None, Some("run fake: busy")));
            assert!(unread.elapsed() >= UNREAD && unread.elapsed() < UNREAD + RESYNC * 2, "{:?}", unread.elapsed());
            fake.fail_reads(None);
            handle.state.changed().await.unwrap();
            let state = handle.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.error, state.warnings.len()), (Some(some("10.5.1.0/24")), None, 0));
        })
        .await;
    }

    /// Rules that were never seen in place cannot count as in place.
    #[tokio::test]
    async fn rules_that_were_never_read_are_an_error_at_once() {
        with(async |fake, handle| {
            fake.fail_reads(Some("busy"));
            handle.wanted.send_replace(Some(some("10.5.1.0/24")));
            handle.state.changed().await.unwrap();
            let state = handle.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.error.as_deref()), (None, Some("run fake: busy")));
        })
        .await;
    }

    /// What other programs left and could not be removed is removed later, even when no rules are wanted.
    #[tokio::test]
    async fn warnings_are_checked_again_even_without_rules() {
        struct Busy(u32);
        impl Others for Busy {
            fn settle<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Vec<String>> {
                self.0 = self.0.saturating_sub(1);
                let left =
                    if self.0 > 0 { vec!["rules of the other mode are still there".to_owned()] } else { Vec::new() };
                Box::pin(async { left })
            }
        }
        tokio::time::pause();
        let (mut handle, mut port) = Handle::new();
        let local = LocalSet::new();
        let fake = FakeCarrier::default();
        let carrier = Box::new(fake.clone());
        local.spawn_local(async move { run(carrier, Box::new(Busy(3)), &mut port, RESYNC).await });
        local
            .run_until(async {
                handle.wanted.send_replace(Some(Rules::default()));
                handle.state.wait_for(|state| !state.warnings.is_empty()).await.unwrap();
                handle.state.wait_for(|state| state.warnings.is_empty()).await.unwrap();
                let reads = fake.reads();
                assert_eq!(reads, 3);
                tokio::time::sleep(RESYNC * 10).await;
                assert_eq!(fake.reads(), reads);
            })
            .await;
    }

    #[tokio::test]
    async fn an_error_does_not_matter_when_no_rules_are_wanted() {
        with(async |fake, handle| {
            fake.fail_writes(Some("no"));
            handle.wanted.send_replace(Some(Rules::default()));
            handle.state.changed().await.unwrap();
            let state = handle.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.error), (Some(Rules::default()), None));
        })
        .await;
    }

    /// The rules of flannel and of the other mode are removed only when ours are in place.
    #[tokio::test]
    async fn other_programs_are_dealt_with_only_once_the_rules_are_in_place() {
        struct Calls(std::rc::Rc<std::cell::Cell<u32>>);
        impl Others for Calls {
            fn settle<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Vec<String>> {
                self.0.set(self.0.get() + 1);
                Box::pin(async { Vec::new() })
            }
        }
        tokio::time::pause();
        let (mut handle, mut port) = Handle::new();
        let (fake, calls) = (FakeCarrier::default(), std::rc::Rc::default());
        fake.fail_writes(Some("no"));
        let (carrier, others) = (Box::new(fake.clone()), Box::new(Calls(std::rc::Rc::clone(&calls))));
        let local = LocalSet::new();
        local.spawn_local(async move { run(carrier, others, &mut port, RESYNC).await });
        local
            .run_until(async {
                handle.wanted.send_replace(Some(some("10.5.1.0/24")));
                handle.state.wait_for(|state| state.error.is_some()).await.unwrap();
                tokio::time::sleep(RESYNC * 3).await;
                assert_eq!(calls.get(), 0);
                fake.fail_writes(None);
                handle.state.wait_for(|state| state.in_place.is_some()).await.unwrap();
                tokio::time::sleep(RESYNC).await;
                assert!(calls.get() > 0);
            })
            .await;
    }
}
