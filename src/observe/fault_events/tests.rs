// SPDX-License-Identifier: Apache-2.0
//! Tests of what is written, and when. Time is paused, and advances only while a test waits.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use tokio::task::LocalSet;
use tokio::time::sleep;

use super::*;
use crate::log::tests::{Output, text_of};

const PATIENCE: Duration = Duration::from_secs(60);
/// By then a fault is written, whatever the random part of the wait is.
const LATEST: u64 = 180;

/// The notices that the store took, with the second in which each one came.
type Received = Rc<RefCell<Vec<(u64, FaultNotice)>>>;

/// Starts a task whose store refuses the first `refusals` notices.
fn reporter(refusals: usize) -> (Running, Received) {
    let (received, left, began) = (Received::default(), RefCell::new(refusals), Instant::now());
    let log = received.clone();
    let write = async move |notice: FaultNotice| {
        if *left.borrow() > 0 {
            *left.borrow_mut() -= 1;
            return Err(Error::Unavailable { what: "create event".into(), source: None });
        }
        log.borrow_mut().push((began.elapsed().as_secs(), notice));
        Ok(())
    };
    (Running::new(write, PATIENCE), received)
}

/// Returns an `EventReporter` whose store takes every notice.
pub(in crate::observe) fn event_reporter() -> (EventReporter, Received) {
    let (running, received) = reporter(0);
    (EventReporter { running: Some(running) }, received)
}

fn fault(kind: FaultKind, text: &str) -> Fault {
    Fault { kind, text: text.to_owned() }
}

fn uplink() -> [Fault; 1] {
    [fault(FaultKind::Uplink, "no address")]
}

async fn seconds(n: u64) {
    sleep(Duration::from_secs(n)).await;
}

async fn local(test: impl Future<Output = ()>) {
    LocalSet::new().run_until(test).await;
}

/// Takes what was received, as reason and text.
fn take(received: &Received) -> Vec<(String, String)> {
    received.borrow_mut().drain(..).map(|(_, notice)| (notice.reason(), notice.text)).collect()
}

fn pair(reason: &str, text: &str) -> (String, String) {
    (reason.to_owned(), text.to_owned())
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_lasts_is_written_once_and_its_end_at_once() {
    local(async {
        let (reporter, received) = reporter(0);
        reporter.set(&uplink());
        seconds(60).await;
        assert!(received.borrow().is_empty());
        seconds(LATEST - 60).await;
        let at = received.borrow()[0].0;
        assert!((90..=LATEST).contains(&at), "{at}");
        assert_eq!(take(&received), [pair("UplinkFault", "no address")]);
        reporter.set(&[fault(FaultKind::Uplink, "another text")]);
        seconds(300).await;
        assert!(take(&received).is_empty(), "one notice for each kind");
        reporter.set(&[]);
        seconds(1).await;
        assert_eq!(take(&received), [pair("UplinkFaultEnded", "no address")]);
        seconds(10_000).await;
        assert!(take(&received).is_empty());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_is_over_soon_is_not_written() {
    local(async {
        let (reporter, received) = reporter(0);
        for _ in 0..100 {
            reporter.set(&uplink());
            seconds(59).await;
            reporter.set(&[]);
            seconds(1).await;
        }
        assert!(take(&received).is_empty());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_comes_back_is_written_again_after_ten_minutes() {
    local(async {
        let (reporter, received) = reporter(0);
        for _ in 0..2 {
            reporter.set(&uplink());
            seconds(LATEST).await;
            reporter.set(&[]);
            seconds(10).await;
        }
        assert_eq!(take(&received).len(), 2, "the fault and its end");
        reporter.set(&uplink());
        seconds(700).await;
        let notices = received.borrow().clone();
        assert!(notices.len() == 1 && notices[0].1.count == 3, "{notices:?}");
        assert!(notices[0].0 >= LATEST + 600, "the end was written after {LATEST} s: {notices:?}");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_lasts_for_days_is_written_every_half_hour() {
    local(async {
        let (reporter, received) = reporter(0);
        reporter.set(&uplink());
        seconds(86_400).await;
        let notices = received.borrow().clone();
        assert!((46..=48).contains(&notices.len()), "{}", notices.len());
        assert!(notices.iter().zip(1..).all(|((_, notice), count)| notice.count == count && !notice.is_over));
    })
    .await;
}

/// All kinds of faults come and go, each as often as it can be written.
#[tokio::test(start_paused = true)]
async fn all_faults_together_are_five_notices_at_once_and_ten_an_hour() {
    use FaultKind::{Device, Extension, Kernel, LeaseContested, LeaseLost, SubnetFile, TrafficRules, Tunnel, Uplink};
    local(async {
        let (reporter, received) = reporter(0);
        let kinds = [Device, Kernel, SubnetFile, TrafficRules, Uplink, LeaseLost, LeaseContested, Tunnel, Extension];
        for round in 0..100 {
            reporter.set(&kinds.map(|kind| fault(kind, &format!("round {round}"))));
            seconds(LATEST).await;
            if round == 0 {
                assert_eq!(take(&received).len(), 5);
            }
            reporter.set(&[]);
            seconds(180).await;
        }
        let count = received.borrow().len();
        assert!((90..=100).contains(&count), "{count} in ten hours");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_notice_that_failed_is_written_later() {
    local(async {
        let (reporter, received) = reporter(1);
        reporter.set(&uplink());
        seconds(LATEST + 200).await;
        assert!(take(&received).is_empty());
        seconds(100).await;
        assert_eq!(take(&received), [pair("UplinkFault", "no address")]);
    })
    .await;
}

/// The text of a fault may contain a number that changes all the time.
#[tokio::test(start_paused = true)]
async fn a_text_that_changes_does_not_begin_the_wait_again_and_the_newest_one_is_written() {
    local(async {
        let (reporter, received) = reporter(0);
        for second in 0..LATEST {
            reporter.set(&[fault(FaultKind::Uplink, &second.to_string())]);
            seconds(1).await;
        }
        let notices = received.borrow().clone();
        let [(at, notice)] = &notices[..] else { panic!("{notices:?}") };
        let said: u64 = notice.text.parse().unwrap();
        // The write may come at the same moment as another text.
        assert!(said == *at || said + 1 == *at, "{notices:?}");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_lasts_is_written_again_and_ends_with_its_newest_text() {
    local(async {
        let (reporter, received) = reporter(0);
        reporter.set(&uplink());
        seconds(LATEST).await;
        assert_eq!(take(&received), [pair("UplinkFault", "no address")]);
        reporter.set(&[fault(FaultKind::Uplink, "no carrier")]);
        seconds(1700).await;
        assert!(take(&received).is_empty());
        seconds(200).await;
        assert_eq!(take(&received), [pair("UplinkFault", "no carrier")]);
        reporter.set(&[]);
        seconds(1).await;
        assert_eq!(take(&received), [pair("UplinkFaultEnded", "no carrier")]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_comes_back_after_hours_must_last_before_it_is_written_again() {
    local(async {
        let (reporter, received) = reporter(0);
        reporter.set(&uplink());
        seconds(LATEST).await;
        reporter.set(&[]);
        seconds(7200).await;
        assert_eq!(take(&received).len(), 2, "the fault and its end");
        for _ in 0..10 {
            reporter.set(&uplink());
            seconds(60).await;
            reporter.set(&[]);
            seconds(600).await;
        }
        assert!(take(&received).is_empty());
        reporter.set(&uplink());
        seconds(LATEST).await;
        assert_eq!(take(&received), [pair("UplinkFault", "no address")]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn of_two_faults_of_one_kind_the_first_one_is_written_and_another_kind_beside_it() {
    local(async {
        let (reporter, received) = reporter(0);
        let [first, second] = ["no address", "no carrier"].map(|text| fault(FaultKind::Uplink, text));
        reporter.set(&[first, second, fault(FaultKind::Device, "it is down")]);
        seconds(LATEST).await;
        let mut notices = take(&received);
        notices.sort();
        assert_eq!(notices, [pair("DeviceFault", "it is down"), pair("UplinkFault", "no address")]);
    })
    .await;
}

/// All nodes may have one fault at the same moment, and the API server would get the Events of all of them at once.
#[tokio::test(start_paused = true)]
async fn nodes_with_the_same_fault_do_not_write_at_the_same_moment() {
    local(async {
        let nodes: Vec<(Running, Received)> = (0..20).map(|_| reporter(0)).collect();
        nodes.iter().for_each(|(reporter, _)| reporter.set(&uplink()));
        seconds(LATEST).await;
        let at: BTreeSet<u64> = nodes.iter().map(|(_, received)| received.borrow()[0].0).collect();
        assert!(at.len() > 1, "{at:?}");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_notices_is_one_line_in_the_log() {
    let output = Output::default();
    let lines = tracing_subscriber::fmt().with_writer(output.writer()).finish();
    let _guard = tracing::subscriber::set_default(lines);
    local(async {
        let (reporter, received) = reporter(3);
        reporter.set(&uplink());
        seconds(LATEST + 4 * 300).await;
        assert_eq!(take(&received), [pair("UplinkFault", "no address")]);
    })
    .await;
    let text = text_of(&output);
    assert_eq!(text.matches("write an event about this node: create event").count(), 1, "{text}");
}

/// Months may lie between two outages of the API server.
#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_again_later_is_logged_again() {
    let output = Output::default();
    let lines = tracing_subscriber::fmt().with_writer(output.writer()).finish();
    let _guard = tracing::subscriber::set_default(lines);
    local(async {
        let is_away = Rc::new(Cell::new(true));
        let chosen = is_away.clone();
        let write = async move |_: FaultNotice| {
            let refusal = Error::Unavailable { what: "create event".into(), source: None };
            if chosen.get() { Err(refusal) } else { Ok(()) }
        };
        let reporter = Running::new(write, PATIENCE);
        reporter.set(&uplink());
        seconds(LATEST + 1).await;
        is_away.set(false);
        seconds(301).await;
        is_away.set(true);
        reporter.set(&[]);
        seconds(1).await;
    })
    .await;
    let text = text_of(&output);
    assert_eq!(text.matches("write an event about this node: create event").count(), 2, "{text}");
}
