// SPDX-License-Identifier: Apache-2.0
//! What is told, and when; time is paused and moves only where a test waits.

use std::cell::RefCell;

use tokio::task::LocalSet;
use tokio::time::sleep;

use super::*;

const PATIENCE: Duration = Duration::from_secs(30);

/// What the store heard, with the second in which it did.
type Heard = Rc<RefCell<Vec<(u64, Option<String>)>>>;

/// A teller whose store refuses the first calls.
fn teller(refusals: usize) -> (Teller, Heard) {
    let (heard, left, began) = (Heard::default(), RefCell::new(refusals), Instant::now());
    let ear = heard.clone();
    let tell = async move |fault: Option<String>| {
        if *left.borrow() > 0 {
            *left.borrow_mut() -= 1;
            return Err(Error::Unavailable { what: "patch node n1".into(), source: None });
        }
        ear.borrow_mut().push((began.elapsed().as_secs(), fault));
        Ok(())
    };
    (Teller::with(tell, PATIENCE), heard)
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
async fn a_fault_is_told_when_it_has_lasted_and_recovery_at_once() {
    local(async {
        let (teller, heard) = teller(0);
        teller.set(Health::Well);
        seconds(10).await;
        teller.set(unwell("device"));
        seconds(29).await;
        assert_eq!(*heard.borrow(), [(0, None)], "not yet");
        seconds(31).await;
        assert_eq!(*heard.borrow(), [(0, None), down(40, "device")], "after 30 s, once");
        teller.set(Health::Well);
        seconds(200).await;
        assert_eq!(*heard.borrow(), [(0, None), down(40, "device"), (70, None)]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn what_others_may_overwrite_is_told_again_now_and_then() {
    local(async {
        let (teller, heard) = teller(0);
        teller.set(Health::Well);
        seconds(3600).await;
        let told = heard.borrow().clone();
        assert!((7..=13).contains(&told.len()) && told.iter().all(|(_, fault)| fault.is_none()), "{told:?}");
        let gaps: Vec<u64> = told.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
        assert!(gaps.iter().all(|gap| (299..=601).contains(gap)), "within ten minutes, not together: {gaps:?}");
        teller.set(unwell("device"));
        seconds(31).await;
        heard.borrow_mut().clear();
        seconds(601).await;
        assert!(heard.borrow().iter().all(|(_, fault)| fault.as_deref() == Some("device")), "{heard:?}");
        assert!(!heard.borrow().is_empty());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_goes_in_time_is_nobodys_business() {
    local(async {
        let (teller, heard) = teller(0);
        teller.set(Health::Well);
        seconds(1).await;
        for _ in 0..9 {
            teller.set(unwell("device"));
            seconds(29).await;
            teller.set(Health::Well);
            seconds(1).await;
        }
        assert_eq!(*heard.borrow(), [(0, None)]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn while_the_store_is_away_nothing_is_said_and_no_time_counts() {
    local(async {
        let (teller, heard) = teller(0);
        teller.set(unwell("no uplink"));
        seconds(20).await;
        teller.set(Health::Unknown);
        seconds(3600).await;
        teller.set(unwell("no uplink"));
        seconds(29).await;
        assert!(heard.borrow().is_empty());
        seconds(2).await;
        assert_eq!(*heard.borrow(), [down(20 + 3600 + 30, "no uplink")]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_fault_may_change_its_face() {
    local(async {
        let (teller, heard) = teller(0);
        for second in 0..40 {
            teller.set(unwell(&format!("fault {second}")));
            seconds(1).await;
        }
        let at: Vec<u64> = heard.borrow().iter().map(|(at, _)| *at).collect();
        assert_eq!(at, [30], "time counts from the first face");
        seconds(60).await;
        assert_eq!(heard.borrow()[1..], [down(60, "fault 39")], "the last one, once");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn what_the_store_refused_is_tried_again() {
    local(async {
        let (teller, heard) = teller(2);
        teller.set(Health::Well);
        seconds(14).await;
        assert!(heard.borrow().is_empty());
        seconds(2).await;
        assert_eq!(*heard.borrow(), [(15, None)], "after 5 and 10 s more");
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_lease_taken_again_is_told_again() {
    local(async {
        let (teller, heard) = teller(0);
        teller.set(Health::Well);
        seconds(5).await;
        teller.again();
        seconds(5).await;
        assert_eq!(*heard.borrow(), [(0, None), (5, None)]);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_end_says_nothing() {
    local(async {
        let (teller, heard) = teller(0);
        teller.set(unwell("device"));
        seconds(29).await;
        drop(teller);
        seconds(100).await;
        assert!(heard.borrow().is_empty());
    })
    .await;
}
