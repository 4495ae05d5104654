// SPDX-License-Identifier: Apache-2.0
//! Looks after the rules, beside the loop: brings them to what is wanted, again whenever someone may have touched them and
//! every `--iptables-resync`. The node says what is wanted and hears how it stands; packets and passes wait for neither.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use weft_backends::masq::Rules;
use weft_subnet::source::Local;

use super::{Ensured, Firewall};

/// Whoever changes our rules more often than this in a minute is not fought at wire speed: the resync mends it.
const MENDED_A_MINUTE: usize = 20;
const MINUTE: Duration = Duration::from_secs(60);

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

/// Runs until the desk is gone.
pub async fn keep(
    mut firewall: Box<dyn Firewall>,
    mut around: Box<dyn Surroundings>,
    mut post: Post,
    resync: Duration,
) {
    let mut mended: VecDeque<Instant> = VecDeque::new();
    let mut state = State { carrier: firewall.describe(), ..State::default() };
    loop {
        let wanted = post.wanted.borrow_and_update().clone();
        if let Some(rules) = &wanted {
            let by_others = state.in_place.as_ref() == Some(rules);
            let outcome = firewall.ensure(rules).await;
            state.carrier = firewall.describe();
            match outcome {
                Ok(done) => written(&mut state, rules, done, by_others, &mut mended),
                Err(trouble) => failed(&mut state, rules, &trouble.0),
            }
            // The rules are in, or not: subnet.env waits for that, not for what is done around them.
            post.tell(&state);
            if state.in_place.is_some() {
                let remarks = around.settle(rules).await;
                remarks.iter().filter(|text| !state.remarks.contains(text)).for_each(|text| tracing::warn!("{text}"));
                state.remarks = remarks;
                post.tell(&state);
            }
        }
        let idle = wanted.as_ref().is_none_or(Rules::is_empty) && state.trouble.is_none();
        let calm = fights(&mut mended);
        tokio::select! {
            changed = post.wanted.changed() => if changed.is_err() {
                return;
            },
            () = firewall.disturbed(), if calm => {}
            () = tokio::time::sleep(resync), if !idle => {}
        }
    }
}

/// True while changes by others are rare enough to be mended at once.
fn fights(mended: &mut VecDeque<Instant>) -> bool {
    let now = Instant::now();
    while mended.front().is_some_and(|at| now.duration_since(*at) > MINUTE) {
        mended.pop_front();
    }
    mended.len() < MENDED_A_MINUTE
}

fn written(state: &mut State, rules: &Rules, done: Ensured, by_others: bool, mended: &mut VecDeque<Instant>) {
    let carrier = &state.carrier;
    if state.trouble.take().is_some() {
        tracing::info!(carrier, rules = rules.len(), "the rules can be written again");
    }
    if done == Ensured::Written {
        state.writes += 1;
        if by_others {
            state.mended += 1;
            mended.push_back(Instant::now());
            match mended.len() {
                MENDED_A_MINUTE => {
                    tracing::warn!(carrier, "someone changes the rules all the time: left to the resync")
                }
                _ => tracing::warn!(carrier, "someone changed the rules: written again"),
            }
        } else {
            tracing::info!(carrier, rules = rules.len(), "rules written");
        }
    }
    if !by_others {
        state.in_place = Some(rules.clone());
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
    use crate::rules::fake::FakeFirewall;

    const RESYNC: Duration = Duration::from_secs(5);

    fn some(own: &str) -> Rules {
        let networks = Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: None };
        let own = Subnets { v4: Some(own.parse().unwrap()), v6: None };
        rules(&networks, &own, &Policy { masquerade: Some(Masquerade::default()), forward: true })
    }

    /// A keeper of a fake, time that moves only when everyone waits.
    async fn with(test: impl AsyncFnOnce(FakeFirewall, &mut Desk)) {
        tokio::time::pause();
        let (mut desk, post) = Desk::new();
        let fake = FakeFirewall::default();
        let firewall = Box::new(fake.clone());
        let local = LocalSet::new();
        local.spawn_local(keep(firewall, Box::new(Alone), post, RESYNC));
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
