// SPDX-License-Identifier: Apache-2.0
//! What systemd is told: READY, STATUS, WATCHDOG. Without NOTIFY_SOCKET every call does nothing.
//!
//! The agent's loop pings, not a task of its own: a watchdog that another task feeds would not notice a stuck loop. The loop in
//! turn never waits for systemd, whose queue holds ten datagrams: what finds it full is told later.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

/// A text that changes with every lease is told so often.
const STATUS_EVERY: Duration = Duration::from_secs(1);

/// The line to systemd.
#[derive(Debug, Default)]
pub struct Notify {
    line: Option<(UnixDatagram, SocketAddr)>,
    ready_told: bool,
    told: String,
    /// The status that waits, and until when.
    waiting: Option<(String, Instant)>,
    quiet_until: Option<Instant>,
}

impl Notify {
    /// The line that NOTIFY_SOCKET names: a path, or an abstract address after `@`.
    pub fn new() -> Notify {
        let line = std::env::var_os("NOTIFY_SOCKET").and_then(|name| {
            let opened = open(name.as_bytes());
            opened.inspect_err(|error| tracing::warn!(socket = ?name, %error, "NOTIFY_SOCKET")).ok()
        });
        Notify { line, ..Notify::default() }
    }

    /// READY=1, once.
    pub fn ready(&mut self) {
        if !self.ready_told {
            self.ready_told = self.send(NotifyState::Ready);
        }
    }

    /// STATUS=, only when the text is another than last time, and at most once a second.
    pub fn status(&mut self, text: &str) {
        let now = Instant::now();
        if self.told == text {
            self.waiting = None;
        } else if let Some(until) = self.quiet_until.filter(|until| now < *until) {
            self.waiting = Some((text.to_owned(), until));
        } else {
            self.quiet_until = Some(now + STATUS_EVERY);
            if self.send(NotifyState::Status(text)) {
                (self.told, self.waiting) = (text.to_owned(), None);
            } else {
                self.waiting = Some((text.to_owned(), now + STATUS_EVERY));
            }
        }
    }

    /// When a status that waits is to be told again.
    pub fn next(&self) -> Option<Instant> {
        self.waiting.as_ref().map(|(_, until)| *until)
    }

    /// STOPPING=1: the end is wanted, not a crash.
    pub fn stopping(&self) {
        self.send(NotifyState::Stopping);
    }

    /// WATCHDOG=1.
    pub fn ping(&self) {
        self.send(NotifyState::Watchdog);
    }

    /// How often to [`Notify::ping`]: half of WATCHDOG_USEC, `None` when systemd does not watch this process.
    pub fn watchdog_interval(&self) -> Option<Duration> {
        sd_notify::watchdog_enabled().map(|limit| limit / 2)
    }

    /// False when it must be sent again.
    fn send(&self, state: NotifyState<'_>) -> bool {
        let Some((socket, to)) = &self.line else { return true };
        match socket.send_to_addr(format!("{state}\n").as_bytes(), to) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
            Err(error) => {
                tracing::debug!(%error, "tell systemd");
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
    fn a_full_queue_holds_nobody_up_and_the_last_status_wins() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let reader = UnixDatagram::bind(&path).unwrap();
        reader.set_nonblocking(true).unwrap();
        let mut notify = Notify { line: Some(open(path.as_os_str().as_bytes()).unwrap()), ..Notify::default() };
        // More than any queue holds: sending must return all the same.
        for _ in 0..4096 {
            notify.ping();
        }
        notify.ready();
        assert!(!notify.ready_told, "the queue is full");
        notify.status("1 peer");
        notify.status("2 peers");
        assert!(notify.next().is_some());
        let mut buffer = [0; 64];
        while reader.recv(&mut buffer).is_ok() {}
        notify.ready();
        notify.quiet_until = None;
        notify.status("3 peers");
        assert!(notify.ready_told && notify.next().is_none());
        let mut heard = Vec::new();
        while let Ok(n) = reader.recv(&mut buffer) {
            heard.push(String::from_utf8_lossy(&buffer[..n]).trim().to_owned());
        }
        assert_eq!(heard, ["READY=1", "STATUS=3 peers"]);
    }
}
