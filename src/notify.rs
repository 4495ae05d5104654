// SPDX-License-Identifier: Apache-2.0
//! What systemd is told: READY, STATUS, WATCHDOG. Without NOTIFY_SOCKET every call does nothing.
//!
//! The agent's loop pings, not a task of its own: a watchdog that another task feeds would not notice a stuck loop.

use std::time::Duration;

use sd_notify::NotifyState;

/// The line to systemd.
#[derive(Debug, Default)]
pub struct Notify {
    ready: bool,
    status: String,
}

impl Notify {
    /// Nothing is said before the first call.
    pub fn new() -> Notify {
        Notify::default()
    }

    /// READY=1, once.
    pub fn ready(&mut self) {
        if !self.ready {
            self.ready = true;
            send(NotifyState::Ready);
        }
    }

    /// STATUS=, only when the text is another than last time.
    pub fn status(&mut self, text: &str) {
        if self.status != text {
            self.status = text.to_owned();
            send(NotifyState::Status(text));
        }
    }

    /// STOPPING=1: the end is wanted, not a crash.
    pub fn stopping(&self) {
        send(NotifyState::Stopping);
    }

    /// WATCHDOG=1.
    pub fn ping(&self) {
        send(NotifyState::Watchdog);
    }

    /// How often to [`Notify::ping`]: half of WATCHDOG_USEC, `None` when systemd does not watch this process.
    pub fn watchdog_interval(&self) -> Option<Duration> {
        sd_notify::watchdog_enabled().map(|limit| limit / 2)
    }
}

fn send(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::debug!(%error, "tell systemd");
    }
}
