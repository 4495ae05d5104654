// SPDX-License-Identifier: Apache-2.0
//! A blocking netlink socket. It sends datagrams, matches errors to messages by sequence number, and reads complete
//! dumps.
//!
//! The kernel handles a request during `send`, so all replies are queued when `send` returns. Only the rest of a dump
//! has to be waited for. If replies were lost (ENOBUFS), the caller is told so; a lost reply never counts as success.

use std::io;
use std::os::fd::AsRawFd;

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv, send, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use zeroize::Zeroize;

use super::wire::{HEADER, Writer, attr, i32_at, messages, text, u32_at};

const NLM_F_REQUEST: u16 = 0x1;
/// The flag that asks for an acknowledgement.
pub const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Size of the socket's receive buffer in bytes. Errors are small, but every message of a batch may cause one.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Size of the buffer for one datagram in bytes. The kernel limits a dump datagram to 32 KiB, but a single link message
/// may be longer than a page.
const DATAGRAM: usize = 64 << 10;
/// Maximum number of attempts for a dump that is interrupted by changes.
const DUMP_TRIES: u32 = 8;

/// Why the kernel refused one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Sequence number of the message.
    pub seq: u32,
    /// The error number.
    pub errno: Errno,
    /// The same number as the kernel sent it, without its sign. It also tells those apart that only one subsystem has, as ipset does.
    pub code: i32,
    /// The kernel's explanation (NLMSGERR_ATTR_MSG); may be empty.
    pub text: String,
}

/// The replies to a datagram.
#[derive(Debug, Default)]
pub struct Replies {
    /// The refused messages, in the order of the replies.
    pub refused: Vec<Refusal>,
    /// True if the last message was answered and no reply was lost. All messages that are not in `refused` were then
    /// carried out.
    pub complete: bool,
    /// The replies with content; read them with [`messages`].
    pub data: Vec<u8>,
}

/// A blocking socket for requests, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    seq: u32,
    /// Buffer for one received datagram.
    buffer: Box<[u8]>,
}

impl Netlink {
    /// Opens an rtnetlink socket and sets its options.
    ///
    /// # Errors
    /// The socket cannot be opened. Socket options that an old kernel does not support are not errors; strict checking,
    /// for example, needs Linux 4.20.
    pub fn open() -> io::Result<Netlink> {
        Netlink::open_on(NETLINK_ROUTE)
    }

    /// Opens a socket of another netlink protocol.
    ///
    /// # Errors
    /// As [`Netlink::open`].
    pub fn open_on(protocol: isize) -> io::Result<Netlink> {
        let mut socket = Socket::new(protocol)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        force_buffer(&socket, RECEIVE_BUFFER);
        // Older kernels do not support these options. The code therefore reads both formats of an answer, and filters
        // dumps itself.
        let _ = socket.set_cap_ack(true);
        let _ = socket.set_ext_ack(true);
        let _ = socket.set_netlink_get_strict_chk(true);
        // The rest of a dump may never come. The agent must not hang then.
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(5))?;
        Ok(Netlink { socket, seq: 0, buffer: vec![0; DATAGRAM].into() })
    }

    /// Returns the next sequence number. It is never 0, because notifications have the number 0.
    pub fn next_seq(&mut self) -> u32 {
        self.seq = self.seq.wrapping_add(1).max(1);
        self.seq
    }

    /// Returns the sequence number that was returned last.
    pub fn last_seq(&self) -> u32 {
        self.seq
    }

    /// Sends a datagram and reads all replies. Its last message must have the number `last` and ask for an
    /// acknowledgement.
    ///
    /// # Errors
    /// The datagram cannot be sent, or the replies cannot be read. It is then unknown which messages were carried out.
    pub fn exchange(&mut self, datagram: &[u8], last: u32) -> io::Result<Replies> {
        let fd = self.socket.as_raw_fd();
        match send(fd, datagram, MsgFlags::empty()) {
            // A datagram must fit into the send buffer, and the usual size of that is 208 KiB.
            Err(Errno::EMSGSIZE) => {
                force_send_buffer(&self.socket, datagram.len());
                send(fd, datagram, MsgFlags::empty())?
            }
            sent => sent?,
        };
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
        collect_replies(last, &mut self.buffer, |buffer| recv(fd, buffer, flags))
    }

    /// Sends one message, and returns the content of its reply.
    ///
    /// # Errors
    /// Inner: the kernel refused the message. Outer: the reply was lost or cannot be read.
    pub fn request(&mut self, build: impl FnOnce(&mut Writer)) -> io::Result<Result<Vec<u8>, Refusal>> {
        let mut w = Writer::default();
        build(&mut w);
        self.request_written(w)
    }

    /// Sends the message that was written. This part of [`Netlink::request`] is the same for all messages, so it is in the agent's file once.
    fn request_written(&mut self, mut w: Writer) -> io::Result<Result<Vec<u8>, Refusal>> {
        self.discard_replies();
        w.flag_last(NLM_F_ACK | NLM_F_REQUEST);
        let seq = self.next_seq();
        w.end(seq);
        let mut replies = self.exchange(w.bytes(), seq)?;
        if let Some(refusal) = replies.refused.pop() {
            return Ok(Err(refusal));
        }
        if !replies.complete {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "netlink acknowledgement lost"));
        }
        Ok(Ok(replies.data))
    }

    /// Requests a dump and returns the complete one; read it with [`messages`]. A dump that is interrupted by changes,
    /// or whose replies were lost, is repeated.
    ///
    /// # Errors
    /// The kernel refused the dump (the error may be inside NLMSG_DONE), or it was interrupted each time. A partial
    /// dump is never returned.
    pub fn dump(&mut self, kind: u16, build: impl Fn(&mut Writer, u16, u16)) -> io::Result<Vec<u8>> {
        self.dump_bytes(kind, &build)
    }

    /// Does the same as [`Netlink::dump`]. There are many kinds of dumps, and all of them use this one copy of the code.
    fn dump_bytes(&mut self, kind: u16, build: &dyn Fn(&mut Writer, u16, u16)) -> io::Result<Vec<u8>> {
        self.dump_into(kind, build, |all: &mut Vec<u8>, datagram| all.extend_from_slice(datagram))
    }

    /// Requests a dump as [`Netlink::dump`] does, but passes each datagram to `take` instead of copying it. A dump that
    /// is repeated begins with a new `T`, so the result never mixes two attempts.
    ///
    /// # Errors
    /// As [`Netlink::dump`].
    pub fn dump_into<T: Default>(
        &mut self,
        kind: u16,
        build: impl Fn(&mut Writer, u16, u16),
        mut take: impl FnMut(&mut T, &[u8]),
    ) -> io::Result<T> {
        for attempt in 0..DUMP_TRIES {
            // The kernel refuses a dump (EBUSY) while the one before has not been read to its end.
            self.discard_replies();
            let mut result = T::default();
            let mut w = Writer::default();
            build(&mut w, kind, NLM_F_REQUEST | NLM_F_DUMP);
            let seq = self.next_seq();
            w.end(seq);
            let fd = self.socket.as_raw_fd();
            send(fd, w.bytes(), MsgFlags::empty())?;
            let receive = |buffer: &mut [u8]| recv(fd, buffer, MsgFlags::MSG_TRUNC);
            match read_dump(seq, &mut self.buffer, receive, |datagram| take(&mut result, datagram)) {
                Ok(true) => return Ok(result),
                Ok(false) => {}
                // The kernel had broken off the one before for lack of memory. To read this refusal made it go on, so the rest can be discarded.
                Err(error) if attempt == 0 && error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::new(io::ErrorKind::Interrupted, "netlink dump kept changing while it was read"))
    }

    /// Discards the replies to earlier messages that nobody has read, such as the rest of a dump that failed.
    pub(crate) fn discard_replies(&mut self) {
        let mut receive = || recv(self.socket.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_DONTWAIT);
        while matches!(receive(), Ok(_) | Err(Errno::EINTR | Errno::ENOBUFS)) {}
    }

    /// Overwrites the receive buffer with zeros, so that secrets of the last answer do not stay in memory.
    pub fn wipe(&mut self) {
        self.buffer.zeroize();
    }
}

/// Reads replies up to NLMSG_DONE, and passes each datagram to `take`. Returns false if the dump must be repeated. `receive` reads the next
/// datagram into the buffer and returns its whole size.
fn read_dump(
    seq: u32,
    buffer: &mut [u8],
    mut receive: impl FnMut(&mut [u8]) -> nix::Result<usize>,
    mut take: impl FnMut(&[u8]),
) -> io::Result<bool> {
    let mut consistent = true;
    loop {
        let n = match receive(buffer) {
            Ok(n) => n,
            Err(Errno::EINTR) => continue,
            Err(Errno::ENOBUFS) => {
                consistent = false;
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        let Some(datagram) = buffer.get(..n) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "netlink dump exceeds the buffer"));
        };
        let (mut done, mut stale) = (false, false);
        for m in messages(datagram) {
            if m.seq != seq {
                stale = true;
                continue;
            }
            consistent &= m.flags & NLM_F_DUMP_INTR == 0;
            match m.kind {
                NLMSG_DONE => {
                    done = true;
                    let code = i32_at(m.payload, 0);
                    if code < 0 {
                        return Err(io::Error::from_raw_os_error(-code));
                    }
                }
                NLMSG_ERROR => match refusal(m.payload, m.flags, m.seq) {
                    Some(r) => return Err(r.errno.into()),
                    None => done = true,
                },
                _ => {}
            }
        }
        if !stale {
            take(datagram);
        }
        if done {
            return Ok(consistent);
        }
    }
}

/// Reads all replies that are queued. `receive` reads the next datagram into the buffer and returns its whole size. `last` is the sequence
/// number of the last message that was sent.
fn collect_replies(
    last: u32,
    buffer: &mut [u8],
    mut receive: impl FnMut(&mut [u8]) -> nix::Result<usize>,
) -> io::Result<Replies> {
    let mut replies = Replies::default();
    let (mut answered, mut lost) = (false, false);
    loop {
        let n = match receive(buffer) {
            Ok(n) => n,
            Err(Errno::EAGAIN) => break,
            Err(Errno::EINTR) => continue,
            Err(Errno::ENOBUFS) => {
                lost = true;
                continue;
            }
            Err(e) => return Err(e.into()),
        };
        let Some(datagram) = buffer.get(..n) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "netlink answer exceeds the buffer"));
        };
        for m in messages(datagram) {
            if m.kind != NLMSG_ERROR {
                continue;
            }
            answered |= m.seq == last;
            if let Some(refusal) = refusal(m.payload, m.flags, m.seq) {
                replies.refused.push(refusal);
            }
        }
        replies.data.extend_from_slice(datagram);
    }
    replies.complete = answered && !lost;
    Ok(replies)
}

/// Sets the size of the receive buffer. Without CAP_NET_ADMIN the system's limit (`net.core.rmem_max`) applies.
pub fn force_buffer(socket: &Socket, bytes: usize) {
    if setsockopt(socket, sockopt::RcvBufForce, &bytes).is_err() {
        let _ = setsockopt(socket, sockopt::RcvBuf, &bytes);
    }
}

/// Sets the size of the send buffer. Without CAP_NET_ADMIN the system's limit (`net.core.wmem_max`) applies.
fn force_send_buffer(socket: &Socket, bytes: usize) {
    if setsockopt(socket, sockopt::SndBufForce, &bytes).is_err() {
        let _ = setsockopt(socket, sockopt::SndBuf, &bytes);
    }
}

/// Parses an NLMSG_ERROR. Returns `None` for an acknowledgement. With NETLINK_CAP_ACK the kernel does not echo the
/// request.
fn refusal(payload: &[u8], flags: u16, seq: u32) -> Option<Refusal> {
    let code = i32_at(payload, 0);
    if code == 0 {
        return None;
    }
    let echoed = if flags & NLM_F_CAPPED == 0 { usize::try_from(u32_at(payload, 4)).ok()? } else { HEADER };
    let tlvs = (flags & NLM_F_ACK_TLVS != 0).then(|| payload.get(4 + ((echoed + 3) & !3)..)).flatten();
    let message = tlvs.and_then(|tlvs| attr(tlvs, NLMSGERR_ATTR_MSG));
    Some(Refusal {
        seq,
        errno: Errno::from_raw(code.saturating_neg()),
        code: code.saturating_neg(),
        text: message.map(|message| text(message).to_owned()).unwrap_or_default(),
    })
}

/// Returns true if a dump failed because its family or table does not exist. This means that it is empty.
pub fn absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EAFNOSUPPORT | libc::EOPNOTSUPP))
}

/// Returns what a dump returned, or nothing if its family or table does not exist.
///
/// # Errors
/// The dump failed for another reason.
pub fn empty_if_absent(dump: io::Result<Vec<u8>>) -> io::Result<Vec<u8>> {
    match dump {
        Err(error) if absent(&error) => Ok(Vec::new()),
        dump => dump,
    }
}

#[cfg(test)]
pub(crate) mod tests;
