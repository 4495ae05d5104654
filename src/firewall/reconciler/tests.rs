// SPDX-License-Identifier: Apache-2.0
use std::cell::RefCell;
use std::rc::Rc;

use tokio::task::LocalSet;
use weft_backends::traffic_rules::{Masquerade, Policy, rules};
use weft_subnet::cidr::Subnets;

use super::*;
use crate::firewall::error::FirewallError;
use crate::firewall::fake::FakeFilter;

const RESYNC: Duration = Duration::from_secs(5);
/// How long a state is waited for. The clock is paused, so this takes no time.
const LIMIT: Duration = Duration::from_secs(600);

fn some(own: &str) -> Rules {
    let networks = Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: None };
    let own = Subnets { v4: Some(own.parse().unwrap()), v6: None };
    rules(&networks, &own, &Policy { masquerade: Some(Masquerade::default()), forward: true })
}

/// Runs the reconciler with a fake packet filter. The clock moves only when all tasks wait.
async fn with(test: impl AsyncFnOnce(FakeFilter, &mut Handle)) {
    tokio::time::pause();
    let (mut handle, mut port) = Handle::new();
    let fake = FakeFilter::default();
    let filter = Box::new(fake.clone());
    let local = LocalSet::new();
    local.spawn_local(async move { run(filter, Box::new(NoOthers), &mut port, RESYNC).await });
    local.run_until(test(fake, &mut handle)).await;
}

/// Waits for another state. `what` did not come if the test fails.
async fn next_state(handle: &mut Handle, what: &str) -> State {
    let changed = tokio::time::timeout(LIMIT, handle.state.changed()).await;
    changed.unwrap_or_else(|_| panic!("{what} did not come within {LIMIT:?}")).unwrap();
    handle.state.borrow_and_update().clone()
}

/// Waits until this is true of the state.
async fn until(handle: &mut Handle, what: &str, is: impl FnMut(&State) -> bool) {
    let reached = tokio::time::timeout(LIMIT, handle.state.wait_for(is)).await;
    reached.unwrap_or_else(|_| panic!("{what} did not come within {LIMIT:?}")).unwrap();
}

#[tokio::test]
async fn rules_are_written_once_and_the_same_state_is_not_sent_again() {
    with(async |fake, handle| {
        tokio::time::sleep(RESYNC * 3).await;
        assert_eq!(fake.reads(), 0, "nothing is wanted yet");
        handle.wanted.send_replace(Some(some("10.5.1.0/24")));
        let state = next_state(handle, "the state with the first rules").await;
        assert_eq!(state.in_place, Some(some("10.5.1.0/24")));
        tokio::time::sleep(RESYNC * 21 / 2).await;
        assert!(!handle.state.has_changed().unwrap(), "the same state is not sent again");
        assert_eq!((fake.writes(), fake.reads()), (1, 11));
        handle.wanted.send_replace(Some(some("10.5.2.0/24")));
        let state = next_state(handle, "the state with other rules").await;
        assert_eq!((state.in_place, state.writes, state.restored), (Some(some("10.5.2.0/24")), 2, 0));
        handle.wanted.send_replace(Some(Rules::default()));
        next_state(handle, "the state without rules").await;
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
        next_state(handle, "the state with the rules").await;
        let mut last = Duration::ZERO;
        for n in 1..=30 {
            let start = tokio::time::Instant::now();
            fake.flush();
            while fake.rules().is_empty() {
                assert!(start.elapsed() < LIMIT, "flush {n}: the rules are not restored");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            last = start.elapsed();
            assert!(n > RESTORED_A_MINUTE || last <= Duration::from_millis(2), "{n}: {last:?}");
        }
        assert!(last > RESYNC / 2, "{last:?}");
        assert_eq!(handle.state.borrow().restored, 30);
        let text = "another program changes the traffic rules all the time: a resync restores them";
        let warning = Problem::new(ProblemKind::Fight, text);
        until(handle, "the warning", |state| state.warnings == [warning.clone()]).await;
        let stopped = tokio::time::Instant::now();
        until(handle, "the end of the warning", |state| state.warnings.is_empty()).await;
        assert!(
            stopped.elapsed() > MINUTE - RESYNC && stopped.elapsed() < MINUTE + RESYNC * 3,
            "{:?}",
            stopped.elapsed()
        );
    })
    .await;
}

#[tokio::test]
async fn an_error_is_in_the_state_until_it_ends() {
    with(async |fake, handle| {
        fake.fail_writes(Some("no"));
        handle.wanted.send_replace(Some(some("10.5.1.0/24")));
        let state = next_state(handle, "the state with the error").await;
        assert_eq!((state.in_place, state.error.as_deref()), (None, Some("run fake: no")));
        fake.fail_writes(None);
        let state = next_state(handle, "the state after the error").await;
        assert_eq!((state.in_place, state.error), (Some(some("10.5.1.0/24")), None));
    })
    .await;
}

/// A dump fails, or a program waits too long for a lock. Rules that were in place count as in place for a while.
#[tokio::test]
async fn rules_that_cannot_be_read_count_as_in_place_for_a_while() {
    with(async |fake, handle| {
        handle.wanted.send_replace(Some(some("10.5.1.0/24")));
        next_state(handle, "the state with the rules").await;
        fake.fail_reads(Some("busy"));
        let state = next_state(handle, "the state with a warning").await;
        let unread = tokio::time::Instant::now();
        assert_eq!((state.in_place, state.error), (Some(some("10.5.1.0/24")), None));
        let text = "rules: they were in place when they were read last, and cannot be read now: run fake: busy";
        assert_eq!(state.warnings, [Problem::new(ProblemKind::Rules, text)]);
        let state = next_state(handle, "the state with the error").await;
        assert_eq!((state.in_place, state.error.as_deref()), (None, Some("run fake: busy")));
        assert_eq!(state.warnings, [], "it is an error now");
        assert!(unread.elapsed() >= UNREAD && unread.elapsed() < UNREAD + RESYNC * 2, "{:?}", unread.elapsed());
        fake.fail_reads(None);
        let state = next_state(handle, "the state after the error").await;
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
        let state = next_state(handle, "the state with the error").await;
        assert_eq!((state.in_place, state.error.as_deref()), (None, Some("run fake: busy")));
    })
    .await;
}

/// What other programs left and could not be removed is removed later, even when no rules are wanted.
#[tokio::test]
async fn warnings_are_checked_again_even_without_rules() {
    struct Busy(u32);
    impl Others for Busy {
        fn settle<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Vec<Problem>> {
            self.0 = self.0.saturating_sub(1);
            let left =
                (self.0 > 0).then(|| Problem::new(ProblemKind::Rules, "rules of the other mode are still there"));
            let left = left.into_iter().collect();
            Box::pin(async { left })
        }
    }
    tokio::time::pause();
    let (mut handle, mut port) = Handle::new();
    let local = LocalSet::new();
    let fake = FakeFilter::default();
    let filter = Box::new(fake.clone());
    local.spawn_local(async move { run(filter, Box::new(Busy(3)), &mut port, RESYNC).await });
    local
        .run_until(async {
            handle.wanted.send_replace(Some(Rules::default()));
            until(&mut handle, "the warning", |state| !state.warnings.is_empty()).await;
            until(&mut handle, "the end of the warning", |state| state.warnings.is_empty()).await;
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
        let state = next_state(handle, "the state without rules").await;
        assert_eq!((state.in_place, state.error), (Some(Rules::default()), None));
    })
    .await;
}

/// The rules of flannel and of the other mode are removed only when ours are in place.
#[tokio::test]
async fn other_programs_are_dealt_with_only_once_the_rules_are_in_place() {
    struct Calls(std::rc::Rc<std::cell::Cell<u32>>);
    impl Others for Calls {
        fn settle<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Vec<Problem>> {
            self.0.set(self.0.get() + 1);
            Box::pin(async { Vec::new() })
        }
    }
    tokio::time::pause();
    let (mut handle, mut port) = Handle::new();
    let (fake, calls) = (FakeFilter::default(), std::rc::Rc::default());
    fake.fail_writes(Some("no"));
    let (filter, others) = (Box::new(fake.clone()), Box::new(Calls(std::rc::Rc::clone(&calls))));
    let local = LocalSet::new();
    local.spawn_local(async move { run(filter, others, &mut port, RESYNC).await });
    local
        .run_until(async {
            handle.wanted.send_replace(Some(some("10.5.1.0/24")));
            until(&mut handle, "the error", |state| state.error.is_some()).await;
            tokio::time::sleep(RESYNC * 3).await;
            assert_eq!(calls.get(), 0);
            fake.fail_writes(None);
            until(&mut handle, "the state with the rules", |state| state.in_place.is_some()).await;
            tokio::time::sleep(RESYNC).await;
            assert!(calls.get() > 0);
        })
        .await;
}

/// A packet filter whose comparison takes some time, and that notes when each begins.
struct Slow {
    takes: Duration,
    begun: Rc<RefCell<Vec<Instant>>>,
}

impl PacketFilter for Slow {
    fn describe(&self) -> String {
        "slow".to_owned()
    }
    fn ensure<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Result<Ensured, EnsureError>> {
        self.begun.borrow_mut().push(Instant::now());
        let takes = self.takes;
        Box::pin(async move {
            tokio::time::sleep(takes).await;
            Ok(Ensured::Unchanged)
        })
    }
    fn remove(&mut self) -> Local<'_, Result<bool, FirewallError>> {
        Box::pin(async { Ok(false) })
    }
    fn changed(&mut self) -> Local<'_, ()> {
        Box::pin(std::future::pending())
    }
}

/// Where kube-proxy has many thousand rules, a comparison takes long. It must not keep the machine busy all the time.
#[tokio::test(start_paused = true)]
async fn a_slow_comparison_is_followed_by_a_long_pause() {
    let (ms, s) = (Duration::from_millis, Duration::from_secs);
    for (takes, pause) in [(ms(100), RESYNC), (s(2), s(20)), (s(30), MINUTE)] {
        let (handle, mut port) = Handle::new();
        handle.wanted.send_replace(Some(some("10.5.1.0/24")));
        let begun = Rc::<RefCell<Vec<Instant>>>::default();
        let filter = Box::new(Slow { takes, begun: begun.clone() });
        let task = run(filter, Box::new(NoOthers), &mut port, RESYNC);
        assert!(tokio::time::timeout((takes + pause) * 3, task).await.is_err());
        let between = begun.borrow()[2] - begun.borrow()[1];
        assert!((takes + pause..takes + pause + ms(50)).contains(&between), "{takes:?}: {between:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_task_ends_with_its_node_and_the_rules_stay() {
    let (handle, mut port) = Handle::new();
    handle.wanted.send_replace(Some(some("10.5.1.0/24")));
    let fake = FakeFilter::default();
    let task = run(Box::new(fake.clone()), Box::new(NoOthers), &mut port, RESYNC);
    let node = async {
        tokio::time::sleep(RESYNC).await;
        drop(handle);
    };
    let both = async { tokio::join!(task, node) };
    tokio::time::timeout(RESYNC * 3, both).await.expect("the task ends");
    assert!(!fake.rules().is_empty());
}

/// When programs that start later change the choice, another packet filter goes on with the same port.
#[tokio::test(start_paused = true)]
async fn the_counters_go_on_when_something_else_carries_the_rules() {
    let (mut handle, mut port) = Handle::new();
    handle.wanted.send_replace(Some(some("10.5.1.0/24")));
    for writes in 1..=2 {
        let task = run(Box::new(FakeFilter::default()), Box::new(NoOthers), &mut port, RESYNC);
        assert!(tokio::time::timeout(RESYNC / 2, task).await.is_err());
        let state = handle.state.borrow_and_update().clone();
        assert_eq!((state.writes, state.restored), (writes, 0), "nobody else changed the rules");
        assert_eq!(state.in_place, Some(some("10.5.1.0/24")));
    }
}

/// Rules that can be read now and then are in place, however long ago the first failure was.
#[tokio::test(start_paused = true)]
async fn the_time_of_unread_rules_begins_again_when_they_are_read() {
    let wanted = some("10.5.1.0/24");
    let (mut history, mut state) = (History::default(), State::default());
    history.record(&mut state, &wanted, Ok(Ensured::Written));
    let unread = || Err(EnsureError::Read(FirewallError::Nftables(std::io::ErrorKind::TimedOut.into())));
    for _ in 0..3 {
        assert!(history.record(&mut state, &wanted, unread()).is_some());
        tokio::time::advance(UNREAD - Duration::from_secs(1)).await;
        assert!(history.record(&mut state, &wanted, unread()).is_some());
        assert_eq!((&state.in_place, &state.error), (&Some(wanted.clone()), &None));
        history.record(&mut state, &wanted, Ok(Ensured::Unchanged));
    }
}

/// subnet.env, and so the pods, wait for the rules. What is done about other programs may take long, because it runs programs.
#[tokio::test(start_paused = true)]
async fn rules_count_as_in_place_before_other_programs_are_dealt_with() {
    struct Endless;
    impl Others for Endless {
        fn settle<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Vec<Problem>> {
            Box::pin(std::future::pending())
        }
    }
    let (handle, mut port) = Handle::new();
    handle.wanted.send_replace(Some(some("10.5.1.0/24")));
    let task = run(Box::new(FakeFilter::default()), Box::new(Endless), &mut port, RESYNC);
    assert!(tokio::time::timeout(RESYNC, task).await.is_err(), "it waits for other programs");
    assert_eq!(handle.state.borrow().in_place, Some(some("10.5.1.0/24")));
}

/// The flavour of iptables is chosen when the rules are written first, and may be chosen again.
#[tokio::test(start_paused = true)]
async fn the_state_names_what_carries_the_rules_now() {
    struct Choosing(&'static str);
    impl PacketFilter for Choosing {
        fn describe(&self) -> String {
            self.0.to_owned()
        }
        fn ensure<'a>(&'a mut self, _: &'a Rules) -> Local<'a, Result<Ensured, EnsureError>> {
            self.0 = "iptables-legacy";
            Box::pin(async { Ok(Ensured::Written) })
        }
        fn remove(&mut self) -> Local<'_, Result<bool, FirewallError>> {
            Box::pin(async { Ok(false) })
        }
        fn changed(&mut self) -> Local<'_, ()> {
            Box::pin(std::future::pending())
        }
    }
    let (handle, mut port) = Handle::new();
    handle.wanted.send_replace(Some(some("10.5.1.0/24")));
    let task = run(Box::new(Choosing("iptables")), Box::new(NoOthers), &mut port, RESYNC);
    assert!(tokio::time::timeout(RESYNC / 2, task).await.is_err(), "it goes on");
    assert_eq!(handle.state.borrow().filter, "iptables-legacy");
}
