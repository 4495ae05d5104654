// SPDX-License-Identifier: Apache-2.0

use std::sync::Arc;

use tokio::time::{advance, sleep};
use tracing::subscriber::DefaultGuard;

use super::*;
use crate::log::Format;
use crate::log::tests::{Output, text_of};

const SECOND: Duration = Duration::from_secs(1);

/// A log of this thread, whose repeats are reported by a task.
struct Log {
    output: Output,
    repeats: Arc<Repeats>,
    _installed: DefaultGuard,
}

impl Log {
    fn new() -> Log {
        let (output, repeats) = (Output::default(), Arc::<Repeats>::default());
        let lines = crate::log::subscriber(0, Format::Text, Some(repeats.clone()), output.writer());
        let log = Log { output, repeats: repeats.clone(), _installed: tracing::subscriber::set_default(lines) };
        tokio::spawn(async move { repeats.report().await });
        log
    }

    /// Takes what was logged, without the times.
    fn take(&self) -> Vec<String> {
        text_of(&self.output).lines().map(|line| line.split_once(' ').unwrap().1.trim().to_owned()).collect()
    }
}

fn warn(reason: &str) {
    tracing::warn!(reason, "kernel refused");
}

#[tokio::test(start_paused = true)]
async fn repeats_are_counted_and_one_line_says_how_many_there_were() {
    let log = Log::new();
    for _ in 0..5 {
        warn("no buffer");
        sleep(SECOND).await;
    }
    assert_eq!(log.take(), [r#"WARN kernel refused reason="no buffer""#]);
    sleep(6 * SECOND).await;
    let wanted = r#"WARN kernel refused reason="no buffer" (logged 4 more times within 10 s, the last time 6 s ago)"#;
    assert_eq!(log.take(), [wanted]);
}

#[tokio::test(start_paused = true)]
async fn each_window_is_twice_as_long_up_to_ten_minutes() {
    let log = Log::new();
    for _ in 0..3600 {
        warn("no buffer");
        sleep(SECOND).await;
    }
    let lines = log.take();
    let windows: Vec<&str> =
        lines.iter().filter_map(|line| line.split_once(" within ")?.1.split_once(',')).map(|(time, _)| time).collect();
    let wanted = ["10 s", "20 s", "40 s", "80 s", "2 minutes", "5 minutes", "10 minutes"];
    let wanted: Vec<&str> = wanted.into_iter().chain(["10 minutes"; 3]).collect();
    assert_eq!(windows, wanted, "{lines:#?}");
    assert_eq!(lines.len(), 1 + wanted.len());
    assert!(lines[9].contains("(logged 600 more times within 10 minutes, the last time "), "{lines:#?}");
}

#[tokio::test(start_paused = true)]
async fn a_message_that_comes_once_a_minute_is_counted_after_a_while() {
    let log = Log::new();
    for _ in 0..60 {
        warn("no buffer");
        sleep(60 * SECOND).await;
    }
    let lines = log.take();
    let plain = lines.iter().take_while(|line| !line.contains("(logged")).count();
    assert!(plain == 4 && lines.len() < 15, "{lines:#?}");
}

#[tokio::test(start_paused = true)]
async fn only_a_message_with_the_same_fields_of_the_same_place_is_a_repeat() {
    let log = Log::new();
    warn("no buffer");
    warn("busy");
    tracing::warn!(reason = "no buffer", "kernel refused");
    tracing::info!(reason = "no buffer", "kernel refused");
    assert_eq!(log.take().len(), 4);
    warn("busy");
    assert!(log.take().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_message_that_was_quiet_for_ten_minutes_is_new() {
    let log = Log::new();
    let wanted = [r#"WARN kernel refused reason="no buffer""#];
    warn("no buffer");
    assert_eq!(log.take(), wanted);
    for _ in 0..5 {
        advance(LONGEST_WINDOW).await;
        warn("no buffer");
        assert_eq!(log.take(), wanted);
        warn("no buffer");
        sleep(11 * SECOND).await;
        assert_eq!(log.take().len(), 1, "the window is the first one again");
    }
}

#[tokio::test(start_paused = true)]
async fn what_came_last_is_counted_last() {
    let log = Log::new();
    for _ in 0..3 {
        warn("down");
        warn("up");
        sleep(SECOND).await;
    }
    warn("down");
    log.take();
    sleep(10 * SECOND).await;
    let lines = log.take();
    assert!(lines[0].contains("up") && lines[1].contains("down") && lines.len() == 2, "{lines:#?}");
}

#[tokio::test(start_paused = true)]
async fn the_end_of_the_agent_loses_no_count() {
    let log = Log::new();
    warn("no buffer");
    warn("no buffer");
    log.take();
    log.repeats.log_all();
    assert_eq!(
        log.take(),
        [r#"WARN kernel refused reason="no buffer" (logged 1 more time within 0 s, the last time 0 s ago)"#]
    );
    log.repeats.log_all();
    assert!(log.take().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_number_of_messages_and_the_length_of_their_texts_are_bounded() {
    let log = Log::new();
    warn("first");
    warn("first");
    advance(SECOND).await;
    let long = "ä".repeat(10_000);
    warn(&long);
    warn(&long);
    log.take();
    for key in 0..10_000 {
        advance(Duration::from_millis(1)).await;
        log.repeats.remember(key, Level::INFO, Instant::now());
    }
    assert_eq!(log.repeats.messages().len(), MAX_MESSAGES);
    let lines = log.take();
    assert!(
        lines[0].contains("first") && lines[0].contains("logged 1 more time"),
        "a count is logged before it is forgotten"
    );
    assert!(lines[1].len() < MAX_TEXT + 100 && lines.len() == 2, "{lines:#?}");
}

/// Programs that watch the log ask for the level.
#[tokio::test(start_paused = true)]
async fn a_count_has_the_level_of_its_message() {
    let log = Log::new();
    for _ in 0..2 {
        tracing::error!("no device");
        tracing::warn!("no buffer");
        tracing::info!("written");
    }
    log.take();
    log.repeats.log_all();
    let lines = log.take();
    for begin in ["ERROR no device (logged 1 more", "WARN no buffer (logged 1 more", "INFO written (logged 1 more"] {
        assert!(lines.iter().any(|line| line.starts_with(begin)), "{begin}: {lines:#?}");
    }
}

/// A hundred lines of one place may be logged at once, and then one in six seconds.
#[tokio::test(start_paused = true)]
async fn a_message_that_was_left_out_is_no_repeat_when_it_comes_again() {
    let log = Log::new();
    (0..100).for_each(|number| warn(&format!("peer {number}")));
    assert_eq!(log.take().len(), 100);
    for _ in 0..3 {
        warn("no buffer");
    }
    assert!(log.take().is_empty());
    advance(7 * SECOND).await;
    warn("no buffer");
    assert_eq!(log.take(), [r#"WARN kernel refused reason="no buffer""#]);
}

/// All counts come from one place in the program, and a place may log a hundred lines at once.
#[tokio::test(start_paused = true)]
async fn the_counts_of_many_messages_are_all_logged() {
    let log = Log::new();
    let places: [fn(u32); 2] =
        [|number| tracing::warn!(number, "no buffer"), |number| tracing::warn!(number, "no device")];
    for _ in 0..2 {
        places.iter().for_each(|place| (0..75_u32).for_each(place));
    }
    assert_eq!(log.take().len(), 150);
    log.repeats.log_all();
    assert_eq!(log.take().len(), 150);
}
