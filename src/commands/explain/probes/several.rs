// SPDX-License-Identifier: Apache-2.0
//! Several requests of the same size, or of some sizes, and how many of them are answered.

use std::time::Duration;

use tokio::task::JoinSet;

use crate::probe::echo::EchoError;

/// The time between two requests. A short interruption would lose all requests that leave at once.
const PAUSE: Duration = Duration::from_millis(50);

/// What came of the requests of one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Answers {
    /// Number of requests.
    pub sent: u32,
    /// Number of answers.
    pub answered: u32,
    /// The time until the fastest answer, if there is one.
    pub fastest: Option<Duration>,
}

impl Answers {
    /// Returns the number of requests without an answer.
    pub(super) fn lost(self) -> u32 {
        self.sent.saturating_sub(self.answered)
    }

    /// Adds one request and the time until its answer, if there was one.
    fn add(&mut self, round_trip: Option<Duration>) {
        let (sent, answered) = (1, u32::from(round_trip.is_some()));
        self.extend(Answers { sent, answered, fastest: round_trip });
    }

    /// Adds what came of other requests.
    pub(super) fn extend(&mut self, other: Answers) {
        self.sent += other.sent;
        self.answered += other.answered;
        self.fastest = [self.fastest, other.fastest].into_iter().flatten().min();
    }
}

/// Sends so many requests of each size, one after the other with a short pause, without waiting for the answers in between. Returns what came of
/// each size, in the order of the sizes. `send` sends one request, and returns the time until its answer.
///
/// # Errors
/// That of the first request that cannot be sent.
pub(super) async fn several<F>(sizes: &[u16], times: u32, send: impl Fn(u16) -> F) -> Result<Vec<Answers>, EchoError>
where
    F: Future<Output = Result<Option<Duration>, EchoError>> + Send + 'static,
{
    let mut waiting = JoinSet::new();
    let requests = (0..times).flat_map(|_| sizes.iter().copied().enumerate());
    for (turn, (place, size)) in (0_u32..).zip(requests) {
        let request = send(size);
        waiting.spawn(async move {
            tokio::time::sleep(PAUSE * turn).await;
            (place, request.await)
        });
    }
    let mut all = vec![Answers::default(); sizes.len()];
    while let Some(ended) = waiting.join_next().await {
        if let Ok((place, answer)) = ended {
            all[place].add(answer?);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Mutex};

    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn each_size_is_sent_several_times_and_its_answers_are_counted() {
        let sent = Arc::new(AtomicU32::new(0));
        let send = |size: u16| {
            let sent = sent.clone();
            async move {
                let number = sent.fetch_add(1, Ordering::Relaxed);
                // Of the largest size nothing arrives, and of the others every second packet, each faster than the one before.
                let arrives = size < 1500 && number.is_multiple_of(2);
                Ok(arrives.then(|| Duration::from_millis(u64::from(100 - number))))
            }
        };
        assert_eq!(
            several(&[84], 5, send).await.unwrap(),
            [Answers { sent: 5, answered: 3, fastest: Some(Duration::from_millis(96)) }]
        );
        let of_sizes = several(&[84, 1500], 2, send).await.unwrap();
        let numbers: Vec<(u32, u32, u32)> = of_sizes.iter().map(|one| (one.sent, one.answered, one.lost())).collect();
        assert_eq!((sent.load(Ordering::Relaxed), numbers.len()), (9, 2));
        assert_eq!((numbers[0].0, numbers[1]), (2, (2, 0, 2)));
        assert_eq!(several(&[], 5, send).await.unwrap(), []);
    }

    #[tokio::test]
    async fn a_request_that_cannot_be_sent_is_an_error_and_no_loss() {
        let refused = several(&[84], 5, |_| async { Err(EchoError::NotAllowed) }).await;
        assert!(matches!(refused, Err(EchoError::NotAllowed)), "{refused:?}");
    }

    #[test]
    fn requests_that_are_sent_later_are_added() {
        let mut all = Answers { sent: 1, answered: 0, fastest: None };
        all.extend(Answers { sent: 4, answered: 4, fastest: Some(Duration::from_millis(3)) });
        assert_eq!((all.sent, all.answered, all.lost()), (5, 4, 1));
        all.add(Some(Duration::from_millis(2)));
        assert_eq!((all.sent, all.fastest), (6, Some(Duration::from_millis(2))));
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_a_pause_between_two_requests() {
        let (left, begin) = (Arc::new(Mutex::new(Vec::new())), Instant::now());
        let send = |size: u16| {
            let left = left.clone();
            async move {
                left.lock().unwrap().push((size, begin.elapsed()));
                Ok(None)
            }
        };
        several(&[84, 1500], 2, send).await.unwrap();
        let left = left.lock().unwrap();
        let sizes: Vec<u16> = left.iter().map(|(size, _)| *size).collect();
        assert_eq!(sizes, [84, 1500, 84, 1500]);
        assert!(left.windows(2).all(|pair| pair[1].1 - pair[0].1 >= PAUSE), "{left:?}");
    }
}
