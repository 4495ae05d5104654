// SPDX-License-Identifier: Apache-2.0
//! Messages to systemd (sd_notify(3)): READY, STATUS, STOPPING and WATCHDOG. Without NOTIFY_SOCKET nothing is sent.
//!
//! The agent's main loop sends the watchdog messages, because a separate task would hide that the loop is stuck. The
//! loop never waits for systemd, whose queue holds ten datagrams. A message that finds the queue full is sent later.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use sd_notify::NotifyState;
use tokio::time::Instant;

/// Minimum time between two STATUS messages, because the text may change with every lease.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// The connection to systemd.
#[derive(Debug, Default)]
pub struct Notify {
    /// The socket, and systemd's address; `None` without NOTIFY_SOCKET.
    peer: Option<(UnixDatagram, SocketAddr)>,
    ready_sent: bool,
    /// The last STATUS that was sent.
    status_sent: String,
    /// A STATUS that could not be sent yet, and the time at which to send it.
    waiting: Option<(String, Instant)>,
    /// No STATUS is sent before this time.
    next_status: Option<Instant>,
}

impl Notify {
    /// Connects to the socket that NOTIFY_SOCKET names: a path, or an abstract address after `@`.
    pub fn new() -> Notify {
        let peer = std::env::var_os("NOTIFY_SOCKET").and_then(|name| {
            let opened = open(name.as_bytes());
            opened
                .inspect_err(
                    |error| tracing::warn!(socket = ?name, %error, "cannot open systemd's socket (NOTIFY_SOCKET)"),
                )
                .ok()
        });
        Notify { peer, ..Notify::default() }
    }

    /// Sends READY=1 unless it has been sent.
    pub fn ready(&mut self) {
        if !self.ready_sent {
            self.ready_sent = self.send(NotifyState::Ready);
        }
    }

    /// Sends STATUS=, if the text has changed and at most once a second. Otherwise the text is kept and sent later.
    pub fn status(&mut self, text: &str) {
        let now = Instant::now();
        if self.status_sent == text {
            self.waiting = None;
        } else if let Some(until) = self.next_status.filter(|until| now < *until) {
            self.waiting = Some((text.to_owned(), until));
        } else {
            self.next_status = Some(now + STATUS_INTERVAL);
            if self.send(NotifyState::Status(text)) {
                (self.status_sent, self.waiting) = (text.to_owned(), None);
            } else {
                self.waiting = Some((text.to_owned(), now + STATUS_INTERVAL));
            }
        }
    }

    /// Returns the time at which to call [`Notify::status`] again, because a text could not be sent.
    pub fn next(&self) -> Option<Instant> {
        self.waiting.as_ref().map(|(_, until)| *until)
    }

    /// Sends STOPPING=1, so that systemd does not take the end for a crash.
    pub fn stopping(&self) {
        self.send(NotifyState::Stopping);
    }

    /// Sends WATCHDOG=1.
    pub fn ping(&self) {
        self.send(NotifyState::Watchdog);
    }

    /// Returns how often to call [`Notify::ping`]: half of WATCHDOG_USEC, or `None` if systemd does not watch this
    /// process.
    pub fn watchdog_interval(&self) -> Option<Duration> {
        sd_notify::watchdog_enabled().map(|limit| limit / 2)
    }

    /// Sends a message. Returns false if the queue is full, so that the message must be sent again.
    fn send(&self, state: NotifyState<'_>) -> bool {
        let Some((socket, to)) = &self.peer else { return true };
        match socket.send_to_addr(format!("{state}\n").as_bytes(), to) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            Err(error) => {
                tracing::debug!(%error, "send to systemd");
                true
            }
            Ok(_) => true,
        }
    }
}

fn open(name: &[u8]) -> io::Result<(UnixDatagram, SocketAddr)> {
    let to = match name.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name))?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    Ok((socket, to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_does_not_block_and_only_the_last_status_is_sent_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let reader = UnixDatagram::bind(&path).unwrap();
        reader.set_nonblocking(true).unwrap();
        let mut notify = Notify { peer: Some(open(path.as_os_str().as_bytes()).unwrap()), ..Notify::default() };
        // This is more than any queue holds, and sending must not block.
        for _ in 0..4096 {
            notify.ping();
        }
        notify.ready();
        assert!(!notify.ready_sent, "the queue is full, so READY cannot have been sent");
        notify.status("1 peer");
        notify.status("2 peers");
        assert!(notify.next().is_some());
        let mut buffer = [0; 64];
        while reader.recv(&mut buffer).is_ok() {}
        notify.ready();
        notify.next_status = None;
        notify.status("3 peers");
        assert!(notify.ready_sent && notify.next().is_none());
        let mut received = Vec::new();
        while let Ok(n) = reader.recv(&mut buffer) {
            received.push(String::from_utf8_lossy(&buffer[..n]).trim().to_owned());
        }
        assert_eq!(received, ["READY=1", "STATUS=3 peers"]);
        notify.status("4 peers");
        assert!(reader.recv(&mut buffer).is_err() && notify.next().is_some(), "one a second is enough");
    }
}
