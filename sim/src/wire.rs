// SPDX-License-Identifier: Apache-2.0
//! The network between one node and the server of its store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

/// How long a message takes from a node to the server, or back.
pub const LATENCY: Duration = Duration::from_millis(1);

/// What is wrong between a node and the server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Disorder {
    /// Nothing.
    #[default]
    None,
    /// No packet arrives, in either direction.
    Silence,
    /// The server's port is closed.
    Refused,
    /// Requests arrive and are carried out, but no answer comes back.
    AnswersLost,
}

/// The network between one node and the server.
#[derive(Debug, Clone, Default)]
pub struct Wire {
    disorder: watch::Sender<Disorder>,
    /// The server refuses requests, because there are too many.
    throttled: Arc<AtomicBool>,
    /// The server never sends anything over the watches that it opens.
    starved: Arc<AtomicBool>,
    /// How long the events of watches take in addition.
    lag: Arc<Mutex<Duration>>,
}

impl Wire {
    /// Changes what is wrong.
    pub fn set(&self, disorder: Disorder) {
        self.disorder.send_replace(disorder);
    }

    /// Returns what is wrong.
    pub fn disorder(&self) -> Disorder {
        *self.disorder.borrow()
    }

    /// Changes how long the events of watches take in addition.
    pub fn set_lag(&self, lag: Duration) {
        *self.lag.lock().unwrap_or_else(PoisonError::into_inner) = lag;
    }

    /// Returns how long the events of watches take in addition.
    pub fn lag(&self) -> Duration {
        *self.lag.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets whether the server refuses requests of this node, because there are too many.
    pub fn throttle(&self, throttled: bool) {
        self.throttled.store(throttled, Ordering::Relaxed);
    }

    /// Returns true if the server refuses requests of this node, because there are too many.
    pub fn is_throttled(&self) -> bool {
        self.throttled.load(Ordering::Relaxed)
    }

    /// Sets whether the server never sends anything over the watches of this node that it opens from now on.
    pub fn starve_watches(&self, starved: bool) {
        self.starved.store(starved, Ordering::Relaxed);
    }

    /// Returns true if the server never sends anything over the watches of this node that it opens.
    pub fn starves_watches(&self) -> bool {
        self.starved.load(Ordering::Relaxed)
    }

    /// Carries a request to the server. Returns false if its port is closed, and never returns if no packet arrives.
    pub async fn carry_request(&self) -> bool {
        sleep(LATENCY).await;
        match self.disorder() {
            Disorder::None | Disorder::AnswersLost => true,
            // The client gives up after its own time limit.
            Disorder::Silence => std::future::pending().await,
            Disorder::Refused => false,
        }
    }

    /// Carries an answer to the client, and never returns if no answer arrives.
    pub async fn carry_answer(&self) {
        sleep(LATENCY).await;
        if self.disorder() != Disorder::None {
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the network lets packets through.
    pub async fn passable(&self) {
        // The sender is a part of `self`, so the receiver waits as long as it must.
        let _ = self.disorder.subscribe().wait_for(|now| *now == Disorder::None).await;
    }
}
