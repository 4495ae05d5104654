// SPDX-License-Identifier: Apache-2.0
//! Looks after the rules, beside the loop: brings them to what is wanted, again whenever someone may have touched them and
//! every `--iptables-resync`. The node says what is wanted and hears how it stands; packets and passes wait for neither.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use weft_backends::masq::Rules;
use weft_subnet::source::Local;

use super::{Ensured, Failed, Firewall};
use crate::say::Patience;

/// Whoever changes our rules more often than this in a minute is not fought at wire speed: the resync mends it.
const MENDED_A_MINUTE: usize = 20;
const MINUTE: Duration = Duration::from_secs(60);
/// How long rules that were in place count as such, though nobody could look.
const UNSEEN: Duration = Duration::from_secs(180);
/// The pause between two looks is this many times what the last one took, at most [`MINUTE`]: with kube-proxy's rules in iptables
/// one may take a second.
const SHARE: u32 = 10;

/// How the rules stand.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// What carries them, for people.
    pub carrier: String,
    /// What is in place; `None`: nothing is known to be.
    pub in_place: Option<Rules>,
    /// Why what is wanted is not in place.
    pub trouble: Option<String>,
    /// Degraded, though the rules are in place: sentences.
    pub remarks: Vec<String>,
    /// How often they were written.
    pub writes: u64,
    /// How many of these because others had changed them.
    pub mended: u64,
}

/// The node's end: what is wanted, and how it stands.
#[derive(Debug)]
pub struct Desk {
    /// `None`: not known yet.
    pub wanted: watch::Sender<Option<Rules>>,
    /// How it stands.
    pub state: watch::Receiver<State>,
}

/// The keeper's end.
#[derive(Debug)]
pub struct Post {
    wanted: watch::Receiver<Option<Rules>>,
    state: watch::Sender<State>,
}

impl Desk {
    /// Both ends.
    pub fn new() -> (Desk, Post) {
        let (wanted, asked) = watch::channel(None);
        let (state, told) = watch::channel(State::default());
        (Desk { wanted, state: told }, Post { wanted: asked, state })
    }
}

impl Post {
    /// The same again is no news.
    fn tell(&self, state: &State) {
        self.state.send_if_modified(|now| {
            let changed = now != state;
            if changed {
                now.clone_from(state);
            }
            changed
        });
    }
}

/// What is done around the rules: others' chains that drop what ours accept, and what earlier programs left.
pub trait Surroundings {
    /// After the rules are in, and at every look: remarks for people. Removals only here, never before ours are in.
    fn settle<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Vec<String>>;
}

/// Nothing is around them.
#[derive(Debug)]
pub struct Alone;

impl Surroundings for Alone {
    fn settle<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Vec<String>> {
        Box::pin(async { Vec::new() })
    }
}

/// Runs until the desk is gone. What an earlier keeper of the same desk counted goes on.
pub async fn keep(
    mut firewall: Box<dyn Firewall>,
    mut around: Box<dyn Surroundings>,
    post: &mut Post,
    resync: Duration,
) {
    let mut watch = Watch::default();
    let before = post.state.borrow().clone();
    let mut state = State { carrier: firewall.describe(), in_place: None, trouble: None, ..before };
    loop {
        let wanted = post.wanted.borrow_and_update().clone();
        let mut pause = resync;
        if let Some(rules) = &wanted {
            let start = Instant::now();
            let outcome = firewall.ensure(rules).await;
            state.carrier = firewall.describe();
            let unseen = watch.note(&mut state, rules, outcome);
            // The rules are in, or not: subnet.env waits for that, not for what is done around them.
            post.tell(&state);
            if state.in_place.is_some() {
                let remarks: Vec<String> = unseen.into_iter().chain(around.settle(rules).await).collect();
                remarks.iter().filter(|text| !state.remarks.contains(text)).for_each(|text| tracing::warn!("{text}"));
                state.remarks = remarks;
                post.tell(&state);
            }
            pause = resync.max((start.elapsed() * SHARE).min(MINUTE));
        }
        let well = state.trouble.is_none() && state.remarks.is_empty();
        let idle = wanted.as_ref().is_none_or(Rules::is_empty) && well;
        let calm = watch.is_calm();
        tokio::select! {
            changed = post.wanted.changed() => if changed.is_err() {
                return;
            },
            () = firewall.disturbed(), if calm => {}
            () = tokio::time::sleep(pause), if !idle => {}
        }
    }
}

/// What is remembered from look to look.
#[derive(Debug, Default)]
struct Watch {
    /// When others' changes were mended, the last minute.
    mended: VecDeque<Instant>,
    /// Since when nothing could be seen.
    unseen: Option<Instant>,
    said: Patience,
}

impl Watch {
    /// Takes in the outcome of a look; the remark, when nothing could be seen for a while.
    fn note(&mut self, state: &mut State, rules: &Rules, outcome: Result<Ensured, Failed>) -> Option<String> {
        let there = state.in_place.as_ref() == Some(rules);
        match outcome {
            Ok(done) => {
                self.unseen = None;
                self.written(state, rules, done, there);
            }
            // They were there at the last look, and that nobody can look takes none of them away.
            Err(Failed::Look(trouble)) if there && self.unseen.get_or_insert_with(Instant::now).elapsed() < UNSEEN => {
                return Some(format!("rules: not looked at, they were in place at the last look: {trouble}"));
            }
            Err(trouble) => failed(state, rules, &trouble.to_string()),
        }
        None
    }

    fn written(&mut self, state: &mut State, rules: &Rules, done: Ensured, by_others: bool) {
        let carrier = &state.carrier;
        if state.trouble.take().is_some() {
            tracing::info!(carrier, rules = rules.len(), "the rules can be written again");
        }
        if done == Ensured::Written {
            state.writes += 1;
            if by_others {
                state.mended += 1;
                self.mended.push_back(Instant::now());
                let text = match self.mended.len() {
                    ..MENDED_A_MINUTE => "someone changed the rules: written again",
                    _ => "someone changes the rules all the time: left to the resync",
                };
                // Who does it every few seconds is named once a minute; status counts.
                if self.said.due(text, Instant::now().into_std()) {
                    tracing::warn!(carrier, mended = state.mended, "{text}");
                }
            } else {
                tracing::info!(carrier, rules = rules.len(), "rules written");
            }
        }
        if !by_others {
            state.in_place = Some(rules.clone());
        }
    }

    /// True while changes by others are rare enough to be mended at once.
    fn is_calm(&mut self) -> bool {
        let now = Instant::now();
        while self.mended.front().is_some_and(|at| now.duration_since(*at) > MINUTE) {
            self.mended.pop_front();
        }
        self.mended.len() < MENDED_A_MINUTE
    }
}

fn failed(state: &mut State, rules: &Rules, trouble: &str) {
    state.in_place = None;
    // Nothing is wanted, and nothing of ours can be where nothing can be written.
    if rules.is_empty() {
        tracing::debug!(trouble, "no rules are wanted");
        state.trouble = None;
        state.in_place = Some(rules.clone());
        return;
    }
    if state.trouble.as_deref() != Some(trouble) {
        tracing::warn!("rules: {trouble}");
    }
    state.trouble = Some(trouble.to_owned());
}

#[cfg(test)]
mod tests {
    use tokio::task::LocalSet;
    use weft_backends::masq::{Masquerade, Policy, rules};
    use weft_subnet::cidr::Subnets;

    use super::*;
    use crate::firewall::fake::FakeFirewall;

    const RESYNC: Duration = Duration::from_secs(5);

    fn some(own: &str) -> Rules {
        let networks = Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: None };
        let own = Subnets { v4: Some(own.parse().unwrap()), v6: None };
        rules(&networks, &own, &Policy { masquerade: Some(Masquerade::default()), forward: true })
    }

    /// A keeper of a fake, time that moves only when everyone waits.
    async fn with(test: impl AsyncFnOnce(FakeFirewall, &mut Desk)) {
        tokio::time::pause();
        let (mut desk, mut post) = Desk::new();
        let fake = FakeFirewall::default();
        let firewall = Box::new(fake.clone());
        let local = LocalSet::new();
        local.spawn_local(async move { keep(firewall, Box::new(Alone), &mut post, RESYNC).await });
        local.run_until(test(fake, &mut desk)).await;
    }

    #[tokio::test]
    async fn writes_once_and_equal_is_no_news() {
        with(async |fake, desk| {
            tokio::time::sleep(RESYNC * 3).await;
            assert_eq!(fake.looks(), 0, "nothing is wanted yet");
            desk.wanted.send_replace(Some(some("10.5.1.0/24")));
            desk.state.changed().await.unwrap();
            assert_eq!(desk.state.borrow_and_update().in_place, Some(some("10.5.1.0/24")));
            tokio::time::sleep(RESYNC * 21 / 2).await;
            assert!(!desk.state.has_changed().unwrap(), "equal is no news");
            assert_eq!((fake.writes(), fake.looks()), (1, 11));
            desk.wanted.send_replace(Some(some("10.5.2.0/24")));
            desk.state.changed().await.unwrap();
            let state = desk.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.writes, state.mended), (Some(some("10.5.2.0/24")), 2, 0));
            desk.wanted.send_replace(Some(Rules::default()));
            desk.state.changed().await.unwrap();
            let looks = fake.looks();
            tokio::time::sleep(RESYNC * 10).await;
            assert_eq!(fake.looks(), looks, "no rules need no looking after");
        })
        .await;
    }

    #[tokio::test]
    async fn a_flush_is_mended_at_once_a_fight_by_the_resync() {
        with(async |fake, desk| {
            desk.wanted.send_replace(Some(some("10.5.1.0/24")));
            desk.state.changed().await.unwrap();
            let mut last = Duration::ZERO;
            for n in 1..=30 {
                let start = tokio::time::Instant::now();
                fake.flush();
                while fake.rules().is_empty() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                last = start.elapsed();
                assert!(n > MENDED_A_MINUTE || last <= Duration::from_millis(2), "{n}: {last:?}");
            }
            assert!(last > RESYNC / 2, "{last:?}");
            assert_eq!(desk.state.borrow().mended, 30);
        })
        .await;
    }

    #[tokio::test]
    async fn trouble_is_said_and_ends() {
        with(async |fake, desk| {
            fake.fail(Some("no"));
            desk.wanted.send_replace(Some(some("10.5.1.0/24")));
            desk.state.changed().await.unwrap();
            let state = desk.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.trouble.as_deref()), (None, Some("no")));
            fake.fail(None);
            desk.state.changed().await.unwrap();
            let state = desk.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.trouble), (Some(some("10.5.1.0/24")), None));
        })
        .await;
    }

    /// A dump that fails, a program that waits too long: what was in place counts as such for a while.
    #[tokio::test]
    async fn rules_that_cannot_be_looked_at_are_no_trouble_for_a_while() {
        with(async |fake, desk| {
            desk.wanted.send_replace(Some(some("10.5.1.0/24")));
            desk.state.changed().await.unwrap();
            fake.blind(Some("busy"));
            desk.state.changed().await.unwrap();
            let blind = tokio::time::Instant::now();
            let state = desk.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.trouble), (Some(some("10.5.1.0/24")), None));
            assert_eq!(state.remarks, ["rules: not looked at, they were in place at the last look: busy"]);
            desk.state.changed().await.unwrap();
            let state = desk.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.trouble.as_deref()), (None, Some("busy")));
            assert!(blind.elapsed() >= UNSEEN && blind.elapsed() < UNSEEN + RESYNC * 2, "{:?}", blind.elapsed());
            fake.blind(None);
            desk.state.changed().await.unwrap();
            let state = desk.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.trouble, state.remarks.len()), (Some(some("10.5.1.0/24")), None, 0));
        })
        .await;
    }

    /// Never in place, and nobody can look: that is not well.
    #[tokio::test]
    async fn rules_that_were_never_seen_are_trouble_at_once() {
        with(async |fake, desk| {
            fake.blind(Some("busy"));
            desk.wanted.send_replace(Some(some("10.5.1.0/24")));
            desk.state.changed().await.unwrap();
            let state = desk.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.trouble.as_deref()), (None, Some("busy")));
        })
        .await;
    }

    /// What could not be removed at the first look is tried again, though no rules are wanted.
    #[tokio::test]
    async fn remarks_keep_the_looks_going_without_rules() {
        struct Busy(u32);
        impl Surroundings for Busy {
            fn settle<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Vec<String>> {
                self.0 = self.0.saturating_sub(1);
                let left =
                    if self.0 > 0 { vec!["rules of the other mode are still there".to_owned()] } else { Vec::new() };
                Box::pin(async { left })
            }
        }
        tokio::time::pause();
        let (mut desk, mut post) = Desk::new();
        let local = LocalSet::new();
        let fake = FakeFirewall::default();
        let firewall = Box::new(fake.clone());
        local.spawn_local(async move { keep(firewall, Box::new(Busy(3)), &mut post, RESYNC).await });
        local
            .run_until(async {
                desk.wanted.send_replace(Some(Rules::default()));
                desk.state.wait_for(|state| !state.remarks.is_empty()).await.unwrap();
                desk.state.wait_for(|state| state.remarks.is_empty()).await.unwrap();
                let looks = fake.looks();
                assert_eq!(looks, 3);
                tokio::time::sleep(RESYNC * 10).await;
                assert_eq!(fake.looks(), looks);
            })
            .await;
    }

    #[tokio::test]
    async fn no_rules_that_cannot_be_written_are_no_trouble() {
        with(async |fake, desk| {
            fake.fail(Some("no"));
            desk.wanted.send_replace(Some(Rules::default()));
            desk.state.changed().await.unwrap();
            let state = desk.state.borrow_and_update().clone();
            assert_eq!((state.in_place, state.trouble), (Some(Rules::default()), None));
        })
        .await;
    }
}
