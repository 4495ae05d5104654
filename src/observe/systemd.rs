// SPDX-License-Identifier: Apache-2.0
//! Messages to systemd (sd_notify(3)): READY, STATUS, STOPPING and WATCHDOG, and descriptors that it keeps for the next process (FDSTORE). Without
//! NOTIFY_SOCKET nothing is sent.
//!
//! The agent's main loop sends the watchdog messages, because a separate task would hide that the loop is stuck. The
//! loop never waits for systemd, whose queue holds ten datagrams. A message that finds the queue full is sent later.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use sd_notify::NotifyState;
use tokio::time::Instant;

/// Minimum time between two STATUS messages, because the text may change with every lease.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// The descriptors that systemd kept of an earlier process are taken once.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The connection to systemd.
#[derive(Debug, Default)]
pub struct Notify {
    /// The descriptors that systemd kept of an earlier process, with their names.
    kept: Vec<(String, OwnedFd)>,
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
        Notify { peer, kept: kept(), ..Notify::default() }
    }

    /// Connects to the socket with this path.
    #[cfg(test)]
    pub(crate) fn to(path: &std::path::Path) -> io::Result<Notify> {
        Ok(Notify { peer: Some(open(path.as_os_str().as_bytes())?), ..Notify::default() })
    }

    /// Returns true if there is a systemd that may keep descriptors.
    pub fn is_connected(&self) -> bool {
        self.peer.is_some()
    }

    /// Returns the descriptor that systemd kept under this name, the first time.
    pub fn take_kept(&mut self, name: &str) -> Option<OwnedFd> {
        let at = self.kept.iter().position(|(other, _)| other == name)?;
        Some(self.kept.swap_remove(at).1)
    }

    /// Lets systemd keep a descriptor for the next process, in place of an earlier one with this name. It does so if the unit has
    /// `FileDescriptorStoreMax`. Returns false if the queue is full.
    pub fn keep(&self, name: &str, fd: BorrowedFd<'_>) -> bool {
        let Some((socket, to)) = &self.peer else { return true };
        // An error that waits in a socket, such as an ICMP message, is no reason to close it (FDPOLL).
        let text = format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n");
        let sent = self.forget(name).then(|| send_with(socket, to, &text, fd));
        match sent {
            None | Some(Err(Errno::EAGAIN)) => false,
            Some(Err(error)) => {
                tracing::debug!(%error, "send a descriptor to systemd");
                true
            }
            Some(Ok(_)) => true,
        }
    }

    /// Lets systemd close what it keeps under this name. Returns false if the queue is full.
    pub fn forget(&self, name: &str) -> bool {
        self.send(NotifyState::Custom(&format!("FDSTOREREMOVE=1\nFDNAME={name}")))
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

/// Takes the descriptors that systemd kept of an earlier process. Programs that this process starts do not get them.
fn kept() -> Vec<(String, OwnedFd)> {
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let all = sd_listen_fds::get()
        .inspect_err(|error| tracing::warn!(%error, "cannot take the descriptors that systemd kept"))
        .unwrap_or_default();
    // A copy is closed when another program is executed; the descriptor that systemd left open is not.
    all.into_iter().filter_map(|(name, fd)| Some((name?, fd.into_std().as_fd().try_clone_to_owned().ok()?))).collect()
}

fn send_with(socket: &UnixDatagram, to: &SocketAddr, text: &str, fd: BorrowedFd<'_>) -> nix::Result<usize> {
    let to = match (to.as_pathname(), to.as_abstract_name()) {
        (Some(path), _) => UnixAddr::new(path)?,
        (None, Some(name)) => UnixAddr::new_abstract(name)?,
        (None, None) => return Err(Errno::EINVAL),
    };
    let (parts, fds) = ([IoSlice::new(text.as_bytes())], [fd.as_raw_fd()]);
    sendmsg(socket.as_raw_fd(), &parts, &[ControlMessage::ScmRights(&fds)], MsgFlags::empty(), Some(&to))
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
        let mut notify = Notify::to(&path).unwrap();
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
        let sent = Instant::now();
        notify.status("3 peers");
        assert!(notify.ready_sent && notify.next().is_none());
        let mut received = Vec::new();
        while let Ok(n) = reader.recv(&mut buffer) {
            received.push(String::from_utf8_lossy(&buffer[..n]).trim().to_owned());
        }
        assert_eq!(received, ["READY=1", "STATUS=3 peers"]);
        notify.status("4 peers");
        let waits = reader.recv(&mut buffer).is_err() && notify.next().is_some();
        // The second may be over on a very busy machine.
        assert!(waits || sent.elapsed() >= STATUS_INTERVAL, "one a second is enough");
        notify.status("3 peers");
        assert!(!waits || notify.next().is_none(), "that is what systemd shows");
    }

    #[test]
    fn systemd_gets_a_descriptor_under_its_name_in_place_of_an_earlier_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let reader = UnixDatagram::bind(&path).unwrap();
        reader.set_nonblocking(true).unwrap();
        let notify = Notify { peer: Some(open(path.as_os_str().as_bytes()).unwrap()), ..Notify::default() };
        let (mut ours, theirs) = std::io::pipe().unwrap();
        assert!(notify.keep("tunnel", theirs.as_fd()));
        drop(theirs);
        let mut buffer = [0; 128];
        let length = reader.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"FDSTOREREMOVE=1\nFDNAME=tunnel\n");
        let mut space = nix::cmsg_space!([std::os::fd::RawFd; 1]);
        let mut parts = [std::io::IoSliceMut::new(&mut buffer)];
        let got = nix::sys::socket::recvmsg::<()>(reader.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::empty());
        let got = got.unwrap();
        let fds: Vec<_> = got.cmsgs().unwrap().collect();
        let [nix::sys::socket::ControlMessageOwned::ScmRights(fds)] = &fds[..] else { panic!("{fds:?}") };
        let length = got.bytes;
        // The pipe ends only when the copy that was sent is closed, too.
        nix::unistd::close(fds[0]).unwrap();
        assert_eq!(std::io::Read::read(&mut ours, &mut [0; 1]).unwrap(), 0);
        assert_eq!(&buffer[..length], b"FDSTORE=1\nFDNAME=tunnel\nFDPOLL=0\n");
        let alone = Notify::default();
        assert!(!alone.is_connected() && alone.forget("tunnel"));
    }

    /// A descriptor that counts as sent and is lost would be missing at the next start, and packets with it.
    #[test]
    fn a_descriptor_for_which_the_queue_has_no_room_is_sent_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let reader = UnixDatagram::bind(&path).unwrap();
        reader.set_nonblocking(true).unwrap();
        let notify = Notify::to(&path).unwrap();
        let (_ours, theirs) = std::io::pipe().unwrap();
        for _ in 0..4096 {
            notify.ping();
        }
        assert!(!notify.keep("tunnel", theirs.as_fd()) && !notify.forget("tunnel"), "the queue is full");
        let mut buffer = [0; 128];
        reader.recv(&mut buffer).unwrap();
        assert!(!notify.keep("tunnel", theirs.as_fd()), "there is room for the first one of two messages");
        while reader.recv(&mut buffer).is_ok() {}
        assert!(notify.keep("tunnel", theirs.as_fd()));
    }

    /// NOTIFY_SOCKET may be such an address, which has no file.
    #[test]
    fn systemd_is_told_at_an_abstract_address() {
        let name = format!("weft-notify-{}", std::process::id());
        let reader = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        reader.set_nonblocking(true).unwrap();
        let mut notify = Notify::to(std::path::Path::new(&format!("@{name}"))).unwrap();
        let (_ours, theirs) = std::io::pipe().unwrap();
        notify.ready();
        assert!(notify.ready_sent && notify.keep("tunnel", theirs.as_fd()));
        for wanted in ["READY=1\n", "FDSTOREREMOVE=1\nFDNAME=tunnel\n", "FDSTORE=1\nFDNAME=tunnel\nFDPOLL=0\n"] {
            let mut buffer = [0; 128];
            let length = reader.recv(&mut buffer).unwrap();
            assert_eq!(String::from_utf8_lossy(&buffer[..length]), wanted);
        }
    }

    /// Tells a test that it runs in a process of its own, with the variables of systemd.
    const WATCHED: &str = "WEFT_TEST_WATCHED";

    #[test]
    fn the_watchdog_is_pinged_twice_in_the_time_after_which_systemd_kills() {
        #[allow(clippy::disallowed_methods, reason = "the parent process sets it for this test")]
        if std::env::var(WATCHED).is_ok() {
            assert_eq!(Notify::default().watchdog_interval(), Some(Duration::from_secs(15)));
            return;
        }
        let this = "observe::systemd::tests::the_watchdog_is_pinged_twice_in_the_time_after_which_systemd_kills";
        let mut watched = std::process::Command::new(std::env::current_exe().unwrap());
        watched.args(["--exact", this]).env(WATCHED, "1").env("WATCHDOG_USEC", "30000000").env_remove("WATCHDOG_PID");
        let out = watched.output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn what_systemd_kept_is_taken_once_and_by_its_name() {
        let (_ours, theirs) = std::io::pipe().unwrap();
        let mut notify = Notify { kept: vec![("tunnel".to_owned(), theirs.into())], ..Notify::default() };
        assert!(notify.take_kept("other").is_none());
        assert!(notify.take_kept("tunnel").is_some());
        assert!(notify.take_kept("tunnel").is_none());
    }
}
