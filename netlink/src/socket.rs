// SPDX-License-Identifier: Apache-2.0
//! One netlink socket: datagrams out, errors by sequence number and complete dumps in.
//!
//! The kernel handles a request inside `send`, so every reply is queued when `send` returns: reading never waits for
//! anything but the rest of a dump. A reply that was lost (ENOBUFS) is said to be lost, never taken for success.

use std::io;
use std::os::fd::AsRawFd;

use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{MsgFlags, recv, send, setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};

use super::wire::{HEADER, Writer, attrs, i32_at, messages, text, u32_at};

const NLM_F_REQUEST: u16 = 0x1;
/// Ask for an acknowledgement.
pub const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSGERR_ATTR_MSG: u16 = 1;

/// Receive buffer of the writing socket, bytes: errors of a batch are small, but a whole batch may fail.
const WRITER_BUFFER: usize = 4 << 20;
/// The kernel caps a dump datagram at 32 KiB; a single link message may exceed a page.
const DATAGRAM: usize = 64 << 10;
/// How often an interrupted dump is repeated.
const DUMP_TRIES: u32 = 8;

/// Why the kernel refused one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Which message.
    pub seq: u32,
    /// The error.
    pub errno: Errno,
    /// The kernel's own words (NLMSGERR_ATTR_MSG), perhaps empty.
    pub text: String,
}

/// What came back for a datagram.
#[derive(Debug, Default)]
pub struct Replies {
    /// Messages refused, in order.
    pub refused: Vec<Refusal>,
    /// The last message was answered and nothing was lost: what is not refused is done.
    pub complete: bool,
    /// Answers with content, to be walked with [`messages`].
    pub data: Vec<u8>,
}

/// A blocking request socket, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    seq: u32,
    /// For answers: one datagram.
    buffer: Box<[u8]>,
}

impl Netlink {
    /// Opens and tunes the socket.
    ///
    /// # Errors
    /// No netlink, or out of descriptors. Options that an old kernel lacks (strict checking: 4.20) are not errors.
    pub fn open() -> io::Result<Netlink> {
        Netlink::open_on(NETLINK_ROUTE)
    }

    /// The same for another netlink protocol.
    ///
    /// # Errors
    /// As [`Netlink::open`].
    pub fn open_on(protocol: isize) -> io::Result<Netlink> {
        let mut socket = Socket::new(protocol)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        force_buffer(&socket, WRITER_BUFFER);
        // Older kernels lack these; the code reads both shapes of an answer and filters dumps by itself.
        let _ = socket.set_cap_ack(true);
        let _ = socket.set_ext_ack(true);
        let _ = socket.set_netlink_get_strict_chk(true);
        // A bound on waiting for the rest of a dump: the agent must not hang on a kernel that lost it.
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(5))?;
        Ok(Netlink { socket, seq: 0, buffer: vec![0; DATAGRAM].into() })
    }

    /// The next sequence number, never 0 (0 marks notifications).
    pub fn next_seq(&mut self) -> u32 {
        self.seq = self.seq.wrapping_add(1).max(1);
        self.seq
    }

    /// The number given out last.
    pub fn last_seq(&self) -> u32 {
        self.seq
    }

    /// Sends a datagram whose last message, numbered `last`, asks for an acknowledgement, and reads all that came back.
    ///
    /// # Errors
    /// The datagram could not be sent or the answers not be read; nothing is known about its messages then.
    pub fn exchange(&mut self, datagram: &[u8], last: u32) -> io::Result<Replies> {
        let fd = self.socket.as_raw_fd();
        send(fd, datagram, MsgFlags::empty())?;
        let mut replies = Replies::default();
        let (mut answered, mut lost) = (false, false);
        loop {
            let n = match recv(fd, &mut self.buffer, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC) {
                Ok(n) => n,
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => continue,
                Err(Errno::ENOBUFS) => {
                    lost = true;
                    continue;
                }
                Err(e) => return Err(e.into()),
            };
            let Some(datagram) = self.buffer.get(..n) else {
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

    /// One message, acknowledged: its content on success.
    ///
    /// # Errors
    /// Inner: the kernel's refusal. Outer: the answer was lost or could not be read.
    pub fn request(&mut self, build: impl FnOnce(&mut Writer)) -> io::Result<Result<Vec<u8>, Refusal>> {
        let mut w = Writer::default();
        build(&mut w);
        w.flag_last(NLM_F_ACK | NLM_F_REQUEST);
        let seq = self.next_seq();
        w.end(seq);
        let mut replies = self.exchange(w.bytes(), seq)?;
        // The link or neighbour that was asked for has no place in the errors of an earlier exchange.
        replies.refused.retain(|r| r.seq == seq);
        if let Some(refusal) = replies.refused.pop() {
            return Ok(Err(refusal));
        }
        if !replies.complete {
            return Err(io::Error::new(io::ErrorKind::WouldBlock, "netlink acknowledgement lost"));
        }
        Ok(Ok(replies.data))
    }

    /// A complete dump, to be walked with [`messages`]. An interrupted or overflowed one is repeated.
    ///
    /// # Errors
    /// The kernel refused (also with an error inside NLMSG_DONE), or the dump stayed inconsistent: never a partial answer.
    pub fn dump(&mut self, kind: u16, build: impl Fn(&mut Writer, u16, u16)) -> io::Result<Vec<u8>> {
        for _ in 0..DUMP_TRIES {
            let mut w = Writer::default();
            build(&mut w, kind, NLM_F_REQUEST | NLM_F_DUMP);
            let seq = self.next_seq();
            w.end(seq);
            send(self.socket.as_raw_fd(), w.bytes(), MsgFlags::empty())?;
            if let Some(data) = self.read_dump(seq)? {
                return Ok(data);
            }
        }
        Err(io::Error::new(io::ErrorKind::Interrupted, "netlink dump kept changing while it was read"))
    }

    /// Reads up to NLMSG_DONE; `None` when the dump must be repeated.
    fn read_dump(&mut self, seq: u32) -> io::Result<Option<Vec<u8>>> {
        let mut data: Vec<u8> = Vec::new();
        let mut consistent = true;
        loop {
            let n = match recv(self.socket.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_TRUNC) {
                Ok(n) => n,
                Err(Errno::EINTR) => 0,
                Err(Errno::ENOBUFS) => {
                    consistent = false;
                    0
                }
                Err(e) => return Err(e.into()),
            };
            let Some(datagram) = self.buffer.get(..n) else {
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
                data.extend_from_slice(datagram);
            }
            if done {
                return Ok(consistent.then_some(data));
            }
        }
    }
}

/// The largest receive buffer that we may have: the forced one needs CAP_NET_ADMIN, else the system's limit holds.
pub fn force_buffer(socket: &Socket, bytes: usize) {
    if setsockopt(socket, sockopt::RcvBufForce, &bytes).is_err() {
        let _ = setsockopt(socket, sockopt::RcvBuf, &bytes);
    }
}

/// The error in an NLMSG_ERROR; `None` for an acknowledgement. With NETLINK_CAP_ACK the request is not echoed.
fn refusal(payload: &[u8], flags: u16, seq: u32) -> Option<Refusal> {
    let code = i32_at(payload, 0);
    if code == 0 {
        return None;
    }
    let echoed = if flags & NLM_F_CAPPED == 0 { usize::try_from(u32_at(payload, 4)).ok()? } else { HEADER };
    let tlvs = (flags & NLM_F_ACK_TLVS != 0).then(|| payload.get(4 + ((echoed + 3) & !3)..)).flatten();
    let said = tlvs.and_then(|t| attrs(t).find(|(kind, _)| *kind == NLMSGERR_ATTR_MSG));
    Some(Refusal {
        seq,
        errno: Errno::from_raw(code.saturating_neg()),
        text: said.map(|(_, v)| text(v).to_owned()).unwrap_or_default(),
    })
}

/// Whether a dump failed because its family or table is not there, which means: nothing is in it.
pub fn absent(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EAFNOSUPPORT | libc::EOPNOTSUPP))
}
