// SPDX-License-Identifier: Apache-2.0
//! Keeps the traffic rules in place, in a task beside the loop of the agent. It compares the rules in the kernel with the wanted ones,
//! and writes the difference: whenever the wanted rules change, whenever another program may have changed them, and every
//! `--iptables-resync`. The node sends the wanted rules and receives the state. Neither packets nor passes wait for this task.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use weft_backends::traffic_rules::Rules;
use weft_subnet::source::Local;

use super::packet_filter::{EnsureError, Ensured, PacketFilter};
use crate::log::Reminder;
use crate::observe::problem::{Problem, ProblemKind};

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
    /// The name of the packet filter that they are in, for people.
    pub filter: String,
    /// The rules that are in place. `None` if it is not known that any are.
    pub in_place: Option<Rules>,
    /// Why the wanted rules are not in place.
    pub error: Option<String>,
    /// What is wrong although the rules are in place.
    pub warnings: Vec<Problem>,
    /// How often rules were written.
    pub writes: u64,
    /// How many of these writes restored rules that another program had changed.
    pub restored: u64,
}

/// The end of the node: it sends the wanted rules, and receives the state.
#[derive(Debug)]
pub struct Handle {
    /// The wanted rules. `None` while they are not known.
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
    /// Returns both ends.
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
    /// Removes rules of other programs. This is called after every comparison that found or brought our rules in place, and never before.
    /// Returns warnings for the operator.
    fn settle<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Vec<Problem>>;
}

/// There are no other programs.
#[derive(Debug)]
pub struct NoOthers;

impl Others for NoOthers {
    fn settle<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Vec<Problem>> {
        Box::pin(async { Vec::new() })
    }
}

/// Runs until the handle is dropped. The counters of the state go on from those of an earlier run with the same port.
pub async fn run(mut filter: Box<dyn PacketFilter>, mut others: Box<dyn Others>, port: &mut Port, resync: Duration) {
    let mut history = History::default();
    let before = port.state.borrow().clone();
    let mut state = State { filter: filter.describe(), in_place: None, error: None, ..before };
    loop {
        let wanted = port.wanted.borrow_and_update().clone();
        let mut pause = resync;
        if let Some(rules) = &wanted {
            let start = Instant::now();
            let outcome = filter.ensure(rules).await;
            state.filter = filter.describe();
            let unread = history.record(&mut state, rules, outcome);
            // subnet.env waits until the rules are in place. It does not wait for what is done about other programs.
            port.send(&state);
            if state.in_place.is_some() {
                let unread = Problem::each(ProblemKind::Rules, unread);
                let warnings: Vec<Problem> = unread.chain(others.settle(rules).await).collect();
                warnings.iter().filter(|new| !state.warnings.contains(new)).for_each(|new| tracing::warn!("{new}"));
                state.warnings = warnings;
                // The log has it already.
                state.warnings.extend(history.fight());
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
            () = filter.changed(), if is_calm => {}
            () = tokio::time::sleep(pause), if !idle => {}
        }
    }
}

/// What is remembered from one comparison to the next.
#[derive(Debug, Default)]
struct History {
    /// When the rules were restored, within the last minute.
    restored: VecDeque<Instant>,
    /// Other programs changed the rules all the time, and since then at least once a minute.
    is_fight: bool,
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
        let filter = &state.filter;
        if state.error.take().is_some() {
            tracing::info!(filter, rules = rules.len(), "the traffic rules can be written again");
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
                    tracing::warn!(filter, restored = state.restored, "{text}");
                }
            } else {
                tracing::info!(filter, rules = rules.len(), "traffic rules written");
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

    /// Returns a warning from the time at which other programs change the rules all the time until they have left them alone for a minute.
    fn fight(&mut self) -> Option<Problem> {
        self.is_fight = !self.is_calm() || self.is_fight && !self.restored.is_empty();
        let text = "another program changes the traffic rules all the time: a resync restores them";
        self.is_fight.then(|| Problem::new(ProblemKind::Fight, text))
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
    // Nobody looks for them again before the rules are in place.
    state.warnings.clear();
    if state.error.as_deref() != Some(error) {
        tracing::warn!("rules: {error}");
    }
    state.error = Some(error.to_owned());
}

#[cfg(test)]
mod tests;
