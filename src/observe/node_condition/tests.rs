// SPDX-License-Identifier: Apache-2.0
//! Tests of what is reported, and when. Time is paused, and advances only while a test waits.

use std::cell::{Cell, RefCell};

use tokio::task::LocalSet;
use tokio::time::sleep;

use super::*;

const PATIENCE: Duration = Duration::from_secs(30);

/// The reports that the store received, with the second in which each one came.
type Received = Rc<RefCell<Vec<(u64, Option<String>)>>>;

/// Creates a `ConditionReporter` whose store refuses the first `refusals` reports.
pub(in crate::observe) fn condition(refusals: usize) -> (ConditionReporter, Received) {
    let (received, left, began) = (Received::default(), RefCell::new(refusals), Instant::now());
    let log = received.clone();
    let send = async move |fault: Option<String>| {
        if *left.borrow() > 0 {
            *left.borrow_mut() -= 1;
            return Err(Error::Unavailable { what: "patch node n1".into(), source: None });
        }
        log.borrow_mut().push((began.elapsed().as_secs(), fault));
        Ok(())
    };
    (ConditionReporter::with(send, PATIENCE), received)
}

/// What the store answers.
type Answer = fn() -> Result<(), Error>;

fn accepts() -> Result<(), Error> {
    Ok(())
}

fn is_away() -> Result<(), Error> {
    Err(Error::Unavailable { what: "patch node n1".into(), source: None })
}

fn refuses() -> Result<(), Error> {
    Err(Error::Refused { what: "patch node n1".into(), source: "forbidden".into() })
}

/// The second of each try.
type Tries = Rc<RefCell<Vec<u64>>>;

/// Creates a `ConditionReporter` of a network that works. Its store answers what the test chooses. Returns the tries, too.
fn answered_by(first: Answer) -> (ConditionReporter, Rc<Cell<Answer>>, Tries) {
    let (answer, tries, began) = (Rc::new(Cell::new(first)), Tries::default(), Instant::now());
    let (chosen, log) = (answer.clone(), tries.clone());
    let send = async move |_: Option<String>| {
        log.borrow_mut().push(began.elapsed().as_secs());
        (chosen.get())()
    };
    let condition = ConditionReporter::with(send, PATIENCE);
    condition.set(Health::Well);
    (condition, answer, tries)
}

fn unwell(text: &str) -> Health {
    Health::Unwell(text.to_owned())
}

async fn seconds(n: u64) {
    sleep(Duration::from_secs(n)).await;
}

async fn local(test: impl Future<Output = ()>) {
    LocalSet::new().run_until(test).await;
}

fn down(at: u64, text: &str) -> (u64, Option<String>) {
    (at, Some(text.to_owned()))
}

#[tokio::test(start_paused = true)]
async fn a_fault_is_reported_after_30_seconds_and_recovery_at_once() {
    local(async {
        let (condition, received) = condition(0);
        condition.set(Health::Well);
        seconds(10).await;
        condition.set(unwell("device"));
        seconds(29).await;
        assert_eq!(*received.borrow(), [(0, None)], "a fault of 29 s must not be reported");
        seconds(31).await;
        assert_eq!(*received.borrow(), [(0, None), down(40, "device")], "a fault must be reported once, after 30 s");
        condition.set(Health::Well);
        seconds(200).await;
        assert_eq!(*received.borrow(), [(0, None), down(40, "device"), (70, None)]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_state_is_reported_again_within_ten_minutes() {
    local(async {
        let (condition, received) = condition(0);
        condition.set(Health::Well);
        seconds(3600).await;
        let reports = received.borrow().clone();
        assert!((7..=13).contains(&reports.len()) && reports.iter().all(|(_, fault)| fault.is_none()), "{reports:?}");
        let gaps: Vec<u64> = reports.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
        assert!(
            gaps.iter().all(|gap| (299..=601).contains(gap)),
            "the time between reports must vary, up to ten minutes: {gaps:?}"
        );
        assert!(gaps.iter().any(|gap| *gap != gaps[0]), "all nodes would report at once: {gaps:?}");
        condition.set(unwell("device"));
        seconds(31).await;
        received.borrow_mut().clear();
        seconds(601).await;
        assert!(received.borrow().iter().all(|(_, fault)| fault.as_deref() == Some("device")), "{received:?}");
        assert!(!received.borrow().is_empty());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_ends_within_30_seconds_is_not_reported() {
    local(async {
        let (condition, received) = condition(0);
        condition.set(Health::Well);
        seconds(1).await;
        for _ in 0..9 {
            condition.set(unwell("device"));
            seconds(29).await;
            condition.set(Health::Well);
            seconds(1).await;
        }
        assert_eq!(*received.borrow(), [(0, None)]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn an_unknown_state_is_not_reported_and_restarts_the_30_seconds() {
    local(async {
        let (condition, received) = condition(0);
        condition.set(unwell("no uplink"));
        seconds(20).await;
        condition.set(Health::Unknown);
        seconds(3600).await;
        condition.set(unwell("no uplink"));
        seconds(29).await;
        assert!(received.borrow().is_empty());
        seconds(2).await;
        assert_eq!(*received.borrow(), [down(20 + 3600 + 30, "no uplink")]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_changing_fault_is_reported_after_30_seconds() {
    local(async {
        let (condition, received) = condition(0);
        for second in 0..40 {
            condition.set(unwell(&format!("fault {second}")));
            seconds(1).await;
        }
        let at: Vec<u64> = received.borrow().iter().map(|(at, _)| *at).collect();
        assert_eq!(at, [30], "the 30 s must begin with the first fault");
        seconds(60).await;
        assert_eq!(received.borrow()[1..], [down(60, "fault 39")], "the last fault must be reported once");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_refused_report_is_repeated() {
    local(async {
        let (condition, received) = condition(2);
        condition.set(Health::Well);
        seconds(14).await;
        assert!(received.borrow().is_empty());
        seconds(2).await;
        assert_eq!(*received.borrow(), [(15, None)], "the delays must be 5 s and 10 s");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_state_is_reported_again_after_the_lease_was_acquired_again() {
    local(async {
        let (condition, received) = condition(0);
        condition.set(Health::Well);
        seconds(5).await;
        condition.again();
        seconds(5).await;
        assert_eq!(*received.borrow(), [(0, None), (5, None)]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_dropped_reporter_reports_nothing() {
    local(async {
        let (condition, received) = condition(0);
        condition.set(unwell("device"));
        seconds(29).await;
        drop(condition);
        seconds(100).await;
        assert!(received.borrow().is_empty());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_recovery_is_reported_after_a_report_of_a_fault_that_may_have_arrived() {
    local(async {
        let (log, began) = (Received::default(), Instant::now());
        let copy = log.clone();
        // The store writes the fault, and its answer is lost.
        let send = async move |fault: Option<String>| {
            let is_lost = fault.is_some();
            copy.borrow_mut().push((began.elapsed().as_secs(), fault));
            if is_lost { Err(Error::Unavailable { what: "patch node n1".into(), source: None }) } else { Ok(()) }
        };
        let condition = ConditionReporter::with(send, PATIENCE);
        condition.set(Health::Well);
        seconds(1).await;
        condition.set(unwell("device"));
        seconds(31).await;
        assert_eq!(log.borrow().last(), Some(&down(31, "device")));
        condition.set(Health::Well);
        seconds(61).await;
        assert_eq!(log.borrow().last().map(|(_, fault)| fault.clone()), Some(None), "{:?}", log.borrow());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_repeated_report_is_not_tried_again_at_once_while_the_store_is_away() {
    local(async {
        let (tries, copy) = (Rc::new(RefCell::new(0)), Rc::new(RefCell::new(0)));
        let counted = tries.clone();
        let away = copy.clone();
        let send = async move |_: Option<String>| {
            *counted.borrow_mut() += 1;
            if *away.borrow() == 0 {
                return Ok(());
            }
            Err(Error::Unavailable { what: "patch node n1".into(), source: None })
        };
        let condition = ConditionReporter::with(send, PATIENCE);
        condition.set(Health::Well);
        seconds(1).await;
        *copy.borrow_mut() = 1;
        seconds(3600).await;
        assert!((7..=13).contains(&*tries.borrow()), "{} tries in an hour", tries.borrow());
    })
    .await;
}

/// What was reported for the old lease may be lost, as when the Node was deleted and made again.
#[tokio::test(start_paused = true)]
async fn a_report_for_a_new_lease_is_tried_again_until_the_store_has_it() {
    local(async {
        let (condition, answer, tries) = answered_by(accepts);
        seconds(5).await;
        answer.set(is_away);
        condition.again();
        seconds(14).await;
        assert_eq!(*tries.borrow(), [0, 5, 10]);
        answer.set(accepts);
        seconds(30).await;
        assert_eq!(*tries.borrow(), [0, 5, 10, 20], "the store has it");
    })
    .await;
}

/// Somebody took a right away while the agent runs. The log says so, as for the first report.
#[tokio::test(start_paused = true)]
async fn a_repeated_report_that_is_refused_is_no_silence_of_the_store() {
    local(async {
        let (_condition, answer, tries) = answered_by(accepts);
        seconds(1).await;
        answer.set(refuses);
        seconds(620).await;
        let tries = tries.borrow();
        assert!((299..=601).contains(&tries[1]), "{tries:?}");
        assert_eq!(tries[2] - tries[1], 5, "{tries:?}");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_delay_doubles_up_to_a_minute_and_is_short_again_after_a_report() {
    local(async {
        let (condition, answer, tries) = answered_by(is_away);
        seconds(600).await;
        let delays: Vec<u64> = tries.borrow().windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_eq!(delays[..6], [5, 10, 20, 40, 60, 60]);
        assert!(delays[6..].iter().all(|delay| *delay == 60), "{delays:?}");
        answer.set(accepts);
        seconds(60).await;
        answer.set(is_away);
        condition.again();
        seconds(6).await;
        let tries = tries.borrow();
        assert_eq!(tries[tries.len() - 1] - tries[tries.len() - 2], 5, "{tries:?}");
    })
    .await;
}
