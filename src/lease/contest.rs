// SPDX-License-Identifier: Apache-2.0
//! Detects that somebody else writes the record of our lease again and again, as a clone of this machine does: it has our
//! subnet and our VTEP MAC, so each of the two takes the lease for its own and writes its own address into it. Without a
//! limit the two would rewrite one key as fast as the store allows, and every write is an event for every node.
//!
//! The first takebacks are made at once. Then each next one waits for a pause that doubles up to a maximum. The caller
//! passes the time, so that tests need no clock.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;
use weft_subnet::retry::jitter;

/// Number of takebacks within [`WINDOW`] that are made at once.
const MAX_TAKEBACKS: usize = 3;
/// Takebacks within this time are counted together. It is several times [`LAST_PAUSE`], so that an agent that was started
/// again notices another one that has reached the longest pause.
const WINDOW: Duration = Duration::from_secs(1800);
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LAST_PAUSE: Duration = Duration::from_secs(300);
/// The other agent's write may take this time longer than its pause.
const SLACK: Duration = Duration::from_secs(10);

/// What somebody else did to the record of our lease. Its size is limited.
#[derive(Debug, Default)]
pub struct Contest {
    /// When our record was taken back within the window.
    takebacks: VecDeque<Instant>,
    /// The last pause. It is kept until the window is empty, so that a contest that goes on does so at its slow pace.
    pause: Option<Duration>,
    /// Nothing is written before this time. At this time our record is written again.
    due: Option<Instant>,
    /// Since when our record stands in the store as it should be.
    stands_since: Option<Instant>,
    /// How long it stood there before somebody else wrote it the last time: the pause that the other agent makes now.
    their_pause: Duration,
    /// The contest is over at this time unless somebody else writes our record before.
    ends: Option<Instant>,
    /// Who writes it, for people. `None` if there is no contest.
    rival: Option<String>,
}

impl Contest {
    /// Takes notice that somebody else wrote our record, and that it is ours to take back. Returns true if a contest begins with this write.
    pub fn overwritten(&mut self, by: &str, now: Instant) -> bool {
        if let Some(rival) = &mut self.rival {
            by.clone_into(rival);
        }
        self.ends = None;
        if let Some(since) = self.stands_since.take() {
            self.their_pause = now.saturating_duration_since(since);
        }
        // Our next write is planned. Further writes of others before it do not make it later.
        if self.due.is_some() {
            return false;
        }
        while self.takebacks.front().is_some_and(|first| now - *first >= WINDOW) {
            self.takebacks.pop_front();
        }
        if self.takebacks.is_empty() {
            self.pause = None;
        }
        if self.takebacks.len() < MAX_TAKEBACKS {
            self.takebacks.push_back(now);
            return false;
        }
        self.takebacks.pop_front();
        self.takebacks.push_back(now);
        let pause = self.pause.map_or(FIRST_PAUSE, |pause| (pause * 2).min(LAST_PAUSE));
        (self.pause, self.due) = (Some(pause), Some(now + jitter(pause)));
        self.rival.replace(by.to_owned()).is_none()
    }

    /// Takes notice that the store has accepted our record. If somebody else wrote it afterwards, our next write stays planned.
    pub fn written(&mut self, now: Instant) {
        if self.due.is_some() {
            return;
        }
        self.stands_since.get_or_insert(now);
        if self.rival.is_some() {
            // Jitter may have halved their last pause, and the next one is twice as long. Before that they were as fast as we.
            let theirs = (self.their_pause * 4).max(self.pause.unwrap_or(FIRST_PAUSE) * 2).min(LAST_PAUSE);
            self.ends.get_or_insert(now + theirs + SLACK);
        }
    }

    /// Takes notice that the store shows our record as it should be, so that it need not be written.
    pub fn stands(&mut self, now: Instant) {
        self.due = None;
        self.written(now);
    }

    /// Returns true if our record may be written now.
    pub fn may_write(&self, now: Instant) -> bool {
        self.due.is_none_or(|due| due <= now)
    }

    /// Takes notice that our record is being written now, so that the planned write is done.
    pub fn write_begun(&mut self) {
        self.due = None;
    }

    /// Takes notice that our record is gone. Nobody holds it, so it is taken again at once.
    pub fn gone(&mut self) {
        self.due = None;
    }

    /// Returns true once when a pause is over: our record is to be written now.
    pub fn is_due(&mut self, now: Instant) -> bool {
        self.due.take_if(|due| *due <= now).is_some()
    }

    /// Returns the last rival once when the contest is over.
    pub fn ended(&mut self, now: Instant) -> Option<String> {
        self.ends.take_if(|ends| *ends <= now)?;
        self.rival.take()
    }

    /// Returns when [`Contest::is_due`] or [`Contest::ended`] has news.
    pub fn next(&self) -> Option<Instant> {
        self.due.into_iter().chain(self.ends).min()
    }

    /// Returns who writes our record, while the contest lasts.
    pub fn rival(&self) -> Option<&str> {
        self.rival.as_deref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    /// An agent in a simulated time: it sees each write of the other one at once.
    #[derive(Default)]
    struct Agent {
        contest: Contest,
        writes: usize,
        noticed: usize,
    }

    impl Agent {
        /// The other agent wrote. Returns true if this one writes at once.
        fn sees_another(&mut self, now: Instant) -> bool {
            self.noticed += usize::from(self.contest.overwritten("10.0.0.2", now));
            self.contest.may_write(now)
        }

        fn writes(&mut self, now: Instant) {
            self.writes += 1;
            self.contest.stands(now);
        }
    }

    /// Two agents that write in turn from `start` until `end`. The first of them has just written.
    fn fight(agents: &mut [Agent; 2], start: Instant, end: Instant) {
        let mut now = start;
        let mut writer = 0;
        while now < end {
            let other = 1 - writer;
            if !agents[other].sees_another(now) {
                let due = agents[other].contest.next().unwrap();
                assert!(agents[other].contest.rival().is_some() && due > now);
                now = due;
                assert!(agents[other].contest.is_due(now));
            }
            assert_eq!(agents[writer].contest.ended(now), None, "the other one goes on");
            agents[other].writes(now);
            assert!(agents[other].writes < 10_000, "without any pause");
            writer = other;
        }
    }

    #[test]
    fn two_agents_that_write_in_turn_do_so_ever_more_rarely() {
        let (mut agents, start) = ([Agent::default(), Agent::default()], Instant::now());
        fight(&mut agents, start, start + Duration::from_secs(60));
        for agent in &agents {
            assert!((4..=13).contains(&agent.writes), "{} in the first minute", agent.writes);
            assert_eq!(agent.noticed, 1, "it is reported once");
        }
        let mut agents = [Agent::default(), Agent::default()];
        fight(&mut agents, start, start + 24 * HOUR);
        for agent in &agents {
            // The shortest pause at the end is half of LAST_PAUSE, and the agents take turns.
            assert!(agent.writes <= 24 * 3600 / 300 + 20, "{} in a day", agent.writes);
            assert!(agent.writes >= 24 * 3600 / 600, "{} in a day: it does not give up", agent.writes);
            assert_eq!((agent.noticed, agent.contest.rival()), (1, Some("10.0.0.2")));
        }
        // One of them is started again: it remembers nothing, and notices anyway.
        agents[1] = Agent::default();
        fight(&mut agents, start + 24 * HOUR, start + 26 * HOUR);
        assert!(agents[1].writes < 40 && agents[1].contest.rival().is_some(), "{}", agents[1].writes);
    }

    #[test]
    fn silence_of_the_other_one_ends_it() {
        let (mut agents, start) = ([Agent::default(), Agent::default()], Instant::now());
        let end = start + Duration::from_secs(60);
        fight(&mut agents, start, end);
        let [mut agent, _] = agents;
        let mut now = end + Duration::from_secs(60);
        agent.contest.overwritten("10.0.0.2", now);
        now += LAST_PAUSE;
        assert!(agent.contest.is_due(now) && !agent.contest.is_due(now));
        agent.writes(now);
        let ends = agent.contest.next().unwrap();
        assert!(ends > now + SLACK && ends <= now + LAST_PAUSE + SLACK);
        assert_eq!(agent.contest.ended(ends - Duration::from_secs(1)), None);
        assert_eq!(agent.contest.ended(ends).as_deref(), Some("10.0.0.2"));
        assert_eq!((agent.contest.rival(), agent.contest.next()), (None, None));
        // Much later, somebody edits the lease by hand.
        assert!(!agent.sees_another(ends + HOUR) || agent.contest.rival().is_none());
    }

    /// Two agents write in turn without a pause. Returns when the pause of this one is over.
    fn begun(contest: &mut Contest, now: Instant) -> Instant {
        for _ in 0..4 {
            contest.overwritten("10.0.0.2", now);
            if contest.may_write(now) {
                contest.stands(now);
            }
        }
        contest.next().unwrap()
    }

    #[test]
    fn the_end_is_awaited_for_the_longest_pause_at_most() {
        let (mut contest, start) = (Contest::default(), Instant::now());
        let due = begun(&mut contest, start);
        assert!(contest.is_due(due));
        contest.stands(due);
        // The other one wrote after ten minutes. Four times this is longer than any pause.
        let later = due + Duration::from_secs(600);
        contest.overwritten("10.0.0.2", later);
        let due = contest.next().unwrap();
        assert!(contest.is_due(due));
        contest.stands(due);
        assert_eq!(contest.next(), Some(due + LAST_PAUSE + SLACK));
    }

    #[test]
    fn a_contest_that_begins_much_later_begins_with_the_first_pause() {
        let (mut contest, start) = (Contest::default(), Instant::now());
        let mut now = start;
        for _ in 0..3 {
            now = begun(&mut contest, now);
            assert!(contest.is_due(now));
            contest.stands(now);
        }
        let later = now + WINDOW * 2;
        assert!(contest.ended(later).is_some());
        assert!(begun(&mut contest, later) <= later + FIRST_PAUSE);
    }

    #[test]
    fn a_few_edits_by_hand_are_taken_back_at_once() {
        let (mut contest, mut now) = (Contest::default(), Instant::now());
        for _ in 0..100 {
            assert!(!contest.overwritten("10.0.0.2", now) && contest.may_write(now));
            contest.written(now);
            assert_eq!((contest.rival(), contest.next()), (None, None));
            now += WINDOW / 3;
        }
    }

    #[test]
    fn writes_during_a_pause_change_nothing_but_the_name() {
        let (mut contest, now) = (Contest::default(), Instant::now());
        let begun = (0..4).filter(|_| contest.overwritten("10.0.0.2", now)).count();
        assert_eq!((begun, contest.may_write(now)), (1, false));
        let due = contest.next().unwrap();
        assert!(due >= now + FIRST_PAUSE / 2 && due <= now + FIRST_PAUSE);
        for _ in 0..100 {
            assert!(!contest.overwritten("10.0.0.3", now));
        }
        contest.written(now);
        assert_eq!((contest.next(), contest.rival()), (Some(due), Some("10.0.0.3")), "the planned write stays");
        contest.gone();
        assert!(contest.may_write(now), "nobody holds the lease");
    }
}
