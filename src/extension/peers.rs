// SPDX-License-Identifier: Apache-2.0
//! Which command is the next one for each peer. Nothing is run here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::time::Instant;
use weft_backends::commands::CommandPeer;
use weft_subnet::cidr::Subnets;
use weft_subnet::retry::Backoff;

use super::CommandError;

/// The longest pause.
const LAST_PAUSE: Duration = Duration::from_secs(300);
/// The pauses after failures of the command for one peer.
const BACKOFF: Backoff = Backoff::without_jitter(Duration::from_secs(1), LAST_PAUSE);
/// A command for a peer that has left is tried this often. Then it is given up, so that peers that left do not become more and more.
pub const MAX_REMOVALS: u32 = 10;

/// What is to be done for a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// The command for a peer that is there.
    Add(Arc<CommandPeer>),
    /// The command for a peer that has left, or whose lease has changed.
    Remove(Arc<CommandPeer>),
}

/// Numbers of peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Those whose command has not ended yet.
    pub pending: usize,
    /// Those whose command failed.
    pub failed: usize,
}

/// How far a peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Nothing is to be done.
    Done,
    /// Its command has not ended yet.
    Pending,
    /// Its command failed, and will be tried again.
    Failed,
}

#[derive(Debug, Default)]
struct Peer {
    /// What its lease says. `None` if it has left.
    wanted: Option<Arc<CommandPeer>>,
    /// What was given to the last command that succeeded. Before that, what was given to the first one, which may have done a part.
    made: Option<Arc<CommandPeer>>,
    /// The command has succeeded with `made`, in this run of the agent and since the last repetition.
    is_done: bool,
    is_running: bool,
    failures: u32,
    problem: Option<String>,
    /// When its next command begins.
    due: Option<Instant>,
}

impl Peer {
    fn progress(&self) -> Progress {
        match (&self.wanted, &self.problem) {
            (_, Some(_)) => Progress::Failed,
            (Some(_), None) if !self.is_up_to_date() => Progress::Pending,
            _ => Progress::Done,
        }
    }

    fn is_up_to_date(&self) -> bool {
        self.is_done && self.made == self.wanted
    }

    /// Lets a command run at this time, unless one runs now. The end of that one leads to the next one.
    fn schedule(&mut self, at: Instant) {
        if !self.is_running {
            self.due = Some(at);
        }
    }

    fn begin(&mut self) -> Option<Step> {
        self.due = None;
        let step = match (&self.wanted, &self.made) {
            (Some(_), _) if self.is_up_to_date() => return None,
            // A command that cannot change what an earlier one made succeeds when that is gone.
            (Some(wanted), Some(made)) if wanted != made && self.failures > 0 => Step::Remove(made.clone()),
            (Some(wanted), _) => Step::Add(wanted.clone()),
            (None, Some(made)) => Step::Remove(made.clone()),
            (None, None) => return None,
        };
        if let (Step::Add(wanted), None) = (&step, &self.made) {
            self.made = Some(wanted.clone());
        }
        (self.is_running, self.is_done) = (true, false);
        Some(step)
    }

    /// Returns true if the result is worth a line in the log.
    fn end(&mut self, step: Step, result: Result<(), CommandError>, now: Instant) -> bool {
        self.is_running = false;
        let had = self.problem.take();
        let mut at = now;
        match (step, result) {
            (Step::Add(with), Ok(())) => {
                (self.made, self.is_done, self.failures) = (Some(with), true, 0);
            }
            // If the lease has changed, the next command decides.
            (Step::Remove(_), Err(_)) if self.wanted.is_some() => self.made = None,
            (Step::Remove(_), Ok(())) => self.made = None,
            (step, Err(problem)) => {
                at = now + BACKOFF.nth(self.failures);
                self.failures += 1;
                if matches!(step, Step::Remove(_)) && self.failures >= MAX_REMOVALS {
                    self.made = None;
                } else {
                    self.problem = Some(problem.to_string());
                }
            }
        }
        if !self.is_up_to_date() && (self.wanted.is_some() || self.made.is_some()) {
            self.due = Some(at);
        }
        had != self.problem
    }
}

/// The state of all peers.
#[derive(Debug, Default)]
pub struct PeerTable {
    peers: BTreeMap<Subnets, Peer>,
    due: BTreeSet<(Instant, Subnets)>,
    /// Peers that have left, each with the new peer that has one of its subnets. The new one waits until the command for the other one has
    /// ended, which could take away what its own command makes.
    replaced: BTreeMap<Subnets, Subnets>,
    failed: usize,
    pending: usize,
    /// [`PeerTable::made`] has changed.
    pub is_changed: bool,
}

impl PeerTable {
    /// Takes over peers for which an earlier run of the agent has run commands.
    pub fn remember(&mut self, peers: Vec<CommandPeer>) {
        for peer in peers {
            self.modify(peer.subnets, |known| known.made = Some(Arc::new(peer)));
        }
        self.is_changed = false;
    }

    /// Takes over what the leases say now. Peers that they do not name have left, if `may_remove`.
    pub fn set_wanted(&mut self, peers: Vec<CommandPeer>, may_remove: bool, now: Instant) {
        let mut gone: BTreeSet<Subnets> = self.peers.keys().copied().collect();
        for peer in &peers {
            gone.remove(&peer.subnets);
            self.replaced.remove(&peer.subnets);
        }
        self.note_replaced(&peers, &gone);
        // A peer that was replaced has left, whatever else the list may lack.
        gone.retain(|subnets| may_remove || self.replaced.contains_key(subnets));
        let waiting: BTreeSet<Subnets> = self.replaced.values().copied().collect();
        for peer in peers {
            if self.peers.get(&peer.subnets).and_then(|known| known.wanted.as_deref()) == Some(&peer) {
                continue;
            }
            let waits = waiting.contains(&peer.subnets);
            self.modify(peer.subnets, |known| {
                (known.wanted, known.failures) = (Some(Arc::new(peer)), 0);
                if !waits {
                    known.schedule(now);
                }
            });
        }
        for subnets in gone {
            let is_replaced = self.replaced.contains_key(&subnets);
            self.modify(subnets, |known| {
                let is_new = known.wanted.take().is_some() || (known.failures == 0 && known.due.is_none());
                if is_new || is_replaced {
                    (known.failures, known.problem) = (0, None);
                    known.schedule(now);
                }
            });
            self.release(subnets, now);
        }
    }

    /// Notes which of the peers that are `gone` have a subnet that one of these peers has, which is new. So it is when a node gets a subnet
    /// of another family, too, or loses one.
    fn note_replaced(&mut self, peers: &[CommandPeer], gone: &BTreeSet<Subnets>) {
        let owners: BTreeMap<IpNet, Subnets> =
            gone.iter().flat_map(|subnets| subnets.iter().map(move |net| (net, *subnets))).collect();
        for peer in peers.iter().filter(|peer| !self.peers.contains_key(&peer.subnets)) {
            let before = peer.subnets.iter().filter_map(|net| owners.get(&net));
            self.replaced.extend(before.map(|before| (*before, peer.subnets)));
        }
    }

    /// Lets the command begin for the peer that waited for this one to be gone.
    fn release(&mut self, subnets: Subnets, now: Instant) {
        if !self.peers.contains_key(&subnets)
            && let Some(next) = self.replaced.remove(&subnets)
        {
            self.modify(next, |known| known.schedule(now));
        }
    }

    /// Lets the command run again for all peers.
    pub fn repeat(&mut self, now: Instant) {
        let all: Vec<Subnets> = self.peers.keys().copied().collect();
        for subnets in all {
            self.modify(subnets, |known| {
                if known.is_up_to_date() {
                    known.is_done = false;
                    known.schedule(now);
                }
            });
        }
    }

    /// Returns the next command that is due. [`PeerTable::end`] must be called when it has ended.
    pub fn begin(&mut self, now: Instant) -> Option<Step> {
        loop {
            let (_, subnets) = *self.due.first().filter(|(at, _)| *at <= now)?;
            if let Some(step) = self.modify(subnets, Peer::begin) {
                return Some(step);
            }
        }
    }

    /// Takes notice that a command has ended.
    pub fn end(&mut self, step: Step, result: Result<(), CommandError>, now: Instant) {
        let (Step::Add(peer) | Step::Remove(peer)) = &step;
        let subnets = peer.subnets;
        let problem = result.as_ref().err().map(ToString::to_string);
        let is_removal = matches!(step, Step::Remove(_));
        let is_last = is_removal && self.replaced.contains_key(&subnets);
        let is_news = self.modify(subnets, |known| {
            let is_news = known.end(step, result, now);
            // Another attempt could take away what the command for the new peer makes.
            if is_last && known.wanted.is_none() {
                (known.made, known.problem) = (None, None);
            }
            is_news
        });
        self.release(subnets, now);
        match problem {
            Some(problem) if is_removal && !self.peers.contains_key(&subnets) => {
                tracing::warn!(%subnets, "the command for a peer that has left is given up: {problem}");
            }
            Some(problem) if is_news => {
                tracing::warn!(%subnets, "the command for a peer failed, and is tried again: {problem}");
            }
            Some(_) => {}
            None => tracing::debug!(%subnets, is_removal, "the command for a peer has ended"),
        }
    }

    /// Returns when [`PeerTable::begin`] has something to return.
    pub fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Returns the peers for which a command has run.
    pub fn made(&self) -> Vec<Arc<CommandPeer>> {
        self.peers.values().filter_map(|peer| peer.made.clone()).collect()
    }

    /// Returns how far the peer with these subnets is, and why its command failed.
    pub fn progress(&self, subnets: &Subnets) -> (Progress, Option<&str>) {
        self.peers.get(subnets).map_or((Progress::Done, None), |peer| (peer.progress(), peer.problem.as_deref()))
    }

    /// Returns how many peers wait.
    pub fn counts(&self) -> Counts {
        Counts { pending: self.pending, failed: self.failed }
    }

    /// Returns the peers that have left and whose command failed, each with the reason.
    pub fn failed_removals(&self) -> impl Iterator<Item = (&Subnets, &str)> {
        let left = self.peers.iter().filter(|(_, peer)| self.failed > 0 && peer.wanted.is_none());
        left.filter_map(|(subnets, peer)| Some((subnets, peer.problem.as_deref()?)))
    }

    /// Changes a peer, and keeps the queue and the counts.
    fn modify<T>(&mut self, subnets: Subnets, change: impl FnOnce(&mut Peer) -> T) -> T {
        let peer = self.peers.entry(subnets).or_default();
        let (due, progress, made) = (peer.due, peer.progress(), peer.made.clone());
        let result = change(peer);
        self.is_changed |= peer.made != made;
        for (due, progress, is_after) in [(due, progress, false), (peer.due, peer.progress(), true)] {
            if let Some(at) = due {
                if is_after {
                    self.due.insert((at, subnets))
                } else {
                    self.due.remove(&(at, subnets))
                };
            }
            let count = match progress {
                Progress::Done => continue,
                Progress::Pending => &mut self.pending,
                Progress::Failed => &mut self.failed,
            };
            *count = if is_after { *count + 1 } else { count.saturating_sub(1) };
        }
        if peer.wanted.is_none() && peer.made.is_none() && !peer.is_running {
            if let Some(at) = peer.due {
                self.due.remove(&(at, subnets));
            }
            self.peers.remove(&subnets);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(pending: usize, failed: usize) -> Counts {
        Counts { pending, failed }
    }

    fn peer(number: u8, host: u8) -> CommandPeer {
        CommandPeer {
            subnets: Subnets::from_key(&format!("10.5.{number}.0-24")).unwrap(),
            public_ip: Some([192, 0, 2, host].into()),
            public_ipv6: None,
            data: "".into(),
        }
    }

    fn add(number: u8, host: u8) -> Step {
        Step::Add(Arc::new(peer(number, host)))
    }

    fn remove(number: u8, host: u8) -> Step {
        Step::Remove(Arc::new(peer(number, host)))
    }

    fn failure() -> Result<(), CommandError> {
        let source = std::io::ErrorKind::NotFound.into();
        Err(CommandError::NotStarted { key: "SubnetAddCommand", program: "x".into(), source })
    }

    #[test]
    fn each_peer_gets_its_command_once_and_another_one_when_it_leaves() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        table.set_wanted(vec![peer(1, 1), peer(2, 2)], true, now);
        assert_eq!((table.begin(now), table.begin(now), table.begin(now)), (Some(add(1, 1)), Some(add(2, 2)), None));
        assert_eq!(table.counts(), counts(2, 0));
        table.end(add(1, 1), Ok(()), now);
        table.end(add(2, 2), Ok(()), now);
        table.set_wanted(vec![peer(1, 1), peer(2, 2)], true, now);
        assert_eq!((table.begin(now), table.counts(), table.next()), (None, counts(0, 0), None));
        table.set_wanted(vec![peer(2, 2)], true, now);
        assert_eq!(table.begin(now), Some(remove(1, 1)));
        table.end(remove(1, 1), Ok(()), now);
        assert_eq!((table.begin(now), table.made().len()), (None, 1));
        table.repeat(now);
        assert_eq!((table.begin(now), table.begin(now)), (Some(add(2, 2)), None));
    }

    #[test]
    fn a_failure_is_tried_again_after_a_pause_that_grows() {
        let (mut table, mut now) = (PeerTable::default(), Instant::now());
        table.set_wanted(vec![peer(1, 1)], true, now);
        for seconds in [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300] {
            assert_eq!(table.begin(now), Some(add(1, 1)));
            table.end(add(1, 1), failure(), now);
            let reason = failure().unwrap_err().to_string();
            assert_eq!(table.progress(&peer(1, 1).subnets), (Progress::Failed, Some(reason.as_str())));
            // A list with the same lease changes nothing.
            table.set_wanted(vec![peer(1, 1)], true, now);
            assert_eq!((table.begin(now), table.counts()), (None, counts(0, 1)));
            assert_eq!(table.next(), Some(now + Duration::from_secs(seconds)));
            now += Duration::from_secs(seconds);
        }
        assert_eq!(table.begin(now), Some(add(1, 1)));
        table.end(add(1, 1), Ok(()), now);
        assert_eq!((table.progress(&peer(1, 1).subnets), table.counts()), ((Progress::Done, None), counts(0, 0)));
    }

    #[test]
    fn a_lease_that_changes_leads_to_the_command_with_the_new_values() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        table.set_wanted(vec![peer(1, 1)], true, now);
        table.begin(now);
        // While the command runs, the lease changes.
        table.set_wanted(vec![peer(1, 2)], true, now);
        assert_eq!(table.begin(now), None);
        table.end(add(1, 1), Ok(()), now);
        assert_eq!(table.begin(now), Some(add(1, 2)));
        // The command cannot replace what stands: that is removed first.
        table.end(add(1, 2), failure(), now);
        let later = now + Duration::from_secs(1);
        assert_eq!(table.begin(later), Some(remove(1, 1)));
        table.end(remove(1, 1), failure(), later);
        assert_eq!(table.begin(later), Some(add(1, 2)));
        table.end(add(1, 2), Ok(()), later);
        assert_eq!((table.begin(later), table.made()), (None, vec![Arc::new(peer(1, 2))]));
    }

    /// What failed were the old values. Nothing is removed before the new ones were tried.
    #[test]
    fn a_lease_that_changes_after_a_failure_is_tried_at_once() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        table.set_wanted(vec![peer(1, 1)], true, now);
        table.begin(now);
        table.end(add(1, 1), failure(), now);
        assert_eq!(table.begin(now), None);
        table.set_wanted(vec![peer(1, 2)], true, now);
        assert_eq!(table.begin(now), Some(add(1, 2)));
        table.end(add(1, 2), failure(), now);
        assert_eq!(table.next(), Some(now + Duration::from_secs(1)), "the pauses begin again");
    }

    #[test]
    fn a_peer_that_leaves_or_comes_back_while_a_command_runs_gets_the_other_one_afterwards() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        table.set_wanted(vec![peer(1, 1)], true, now);
        table.begin(now);
        table.set_wanted(Vec::new(), true, now);
        assert_eq!(table.begin(now), None);
        table.end(add(1, 1), Ok(()), now);
        assert_eq!(table.begin(now), Some(remove(1, 1)));
        table.set_wanted(vec![peer(1, 1)], true, now);
        assert_eq!(table.begin(now), None);
        table.end(remove(1, 1), Ok(()), now);
        assert_eq!(table.begin(now), Some(add(1, 1)));
        table.end(add(1, 1), Ok(()), now);
        assert_eq!((table.begin(now), table.counts(), table.made()), (None, counts(0, 0), vec![Arc::new(peer(1, 1))]));
    }

    #[test]
    fn a_remembered_peer_that_left_gets_its_command_when_the_list_is_known() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        table.remember(vec![peer(1, 1), peer(2, 2)]);
        table.set_wanted(vec![peer(2, 2)], false, now);
        assert_eq!((table.begin(now), table.begin(now)), (Some(add(2, 2)), None));
        table.set_wanted(vec![peer(2, 2)], true, now);
        assert_eq!((table.begin(now), table.begin(now)), (Some(remove(1, 1)), None));
        table.end(remove(1, 1), Ok(()), now);
        assert!(table.is_changed && table.made() == [Arc::new(peer(2, 2))]);
    }

    /// Both commands name the IPv4 subnet. The one for the peer that left would take away what the other one makes.
    #[test]
    fn a_peer_that_gets_a_second_subnet_waits_for_the_end_of_the_command_for_the_first_one_alone() {
        let subnets = Subnets::from_key("10.5.1.0-24&fd05:0:0:1::-64").unwrap();
        let both = Arc::new(CommandPeer { subnets, ..peer(1, 1) });
        for (may_remove, removed) in [(true, Ok(())), (true, failure()), (false, Ok(()))] {
            let (mut table, now) = (PeerTable::default(), Instant::now());
            table.remember(vec![peer(1, 1), peer(2, 2)]);
            table.set_wanted(vec![peer(2, 2), (*both).clone()], may_remove, now);
            assert_eq!(
                (table.begin(now), table.begin(now), table.begin(now)),
                (Some(remove(1, 1)), Some(add(2, 2)), None)
            );
            // A list in between changes nothing.
            table.set_wanted(vec![peer(2, 2), (*both).clone()], may_remove, now);
            assert_eq!((table.begin(now), table.next()), (None, None));
            table.end(remove(1, 1), removed, now);
            assert_eq!((table.begin(now), table.begin(now)), (Some(Step::Add(both.clone())), None));
            table.end(Step::Add(both.clone()), Ok(()), now);
            table.end(add(2, 2), Ok(()), now);
            assert_eq!((table.begin(now), table.next(), table.counts()), (None, None, counts(0, 0)));
            assert_eq!(table.made(), [both.clone(), Arc::new(peer(2, 2))]);
        }
    }

    /// The pause after a failure may be minutes, and the new peer must not wait so long.
    #[test]
    fn a_removal_that_failed_is_tried_at_once_when_a_new_peer_has_one_of_the_subnets() {
        let (mut table, now) = (PeerTable::default(), Instant::now());
        table.remember(vec![peer(1, 1)]);
        table.set_wanted(Vec::new(), true, now);
        table.begin(now);
        table.end(remove(1, 1), failure(), now);
        assert_eq!(table.begin(now), None);
        let subnets = Subnets::from_key("10.5.1.0-24&fd05:0:0:1::-64").unwrap();
        let both = CommandPeer { subnets, ..peer(1, 1) };
        table.set_wanted(vec![both.clone()], true, now);
        assert_eq!((table.begin(now), table.begin(now)), (Some(remove(1, 1)), None));
        table.end(remove(1, 1), failure(), now);
        assert_eq!((table.begin(now), table.begin(now)), (Some(Step::Add(Arc::new(both))), None));
        assert_eq!(table.counts(), counts(1, 0));
    }

    #[test]
    fn a_removal_that_always_fails_is_shown_and_then_given_up() {
        let (mut table, mut now) = (PeerTable::default(), Instant::now());
        table.remember(vec![peer(1, 1)]);
        for _ in 0..MAX_REMOVALS {
            table.set_wanted(Vec::new(), true, now);
            assert_eq!(table.begin(now), Some(remove(1, 1)));
            table.end(remove(1, 1), failure(), now);
            now += LAST_PAUSE;
        }
        assert_eq!((table.begin(now), table.next(), table.counts(), table.made().len()), (None, None, counts(0, 0), 0));
        table.remember(vec![peer(1, 1)]);
        table.set_wanted(Vec::new(), true, now);
        table.begin(now);
        table.end(remove(1, 1), failure(), now);
        assert_eq!(table.failed_removals().count(), 1);
        // It comes back in the same place.
        table.set_wanted(vec![peer(1, 1)], true, now);
        assert_eq!(table.begin(now), Some(add(1, 1)));
    }
}
