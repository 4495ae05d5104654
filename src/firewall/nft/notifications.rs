// SPDX-License-Identifier: Apache-2.0
//! Notifications of nftables about changes, whichever program made them.

use std::io;
use std::os::fd::AsRawFd;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use tokio::io::unix::AsyncFd;

use crate::async_socket::wait_on;
use weft_netlink::nftables::{NFGENMSG, TABLE_NAME};
use weft_netlink::socket::force_buffer;
use weft_netlink::wire::{Message, attr_after, messages, text};

/// NFNLGRP_NFTABLES.
const GROUP: u32 = 7;
/// In bytes. kube-proxy rewrites thousands of rules at once, and the kernel notifies about each.
const BUFFER: usize = 8 << 20;
const DATAGRAM: usize = 64 << 10;

/// A socket that receives a message about every change.
#[derive(Debug)]
pub struct Notifications {
    socket: AsyncFd<Socket>,
    buffer: Vec<u8>,
}

impl Notifications {
    /// Opens the socket in the network namespace of this thread. Must be called inside a tokio runtime with I/O.
    ///
    /// # Errors
    /// The kernel has no nftables, or there are too many open files.
    pub fn open() -> io::Result<Notifications> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        force_buffer(&socket, BUFFER);
        socket.set_non_blocking(true)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        socket.add_membership(GROUP)?;
        Ok(Notifications { socket: wait_on(socket)?, buffer: vec![0; DATAGRAM] })
    }

    /// Waits for notifications. Cancel-safe.
    ///
    /// # Errors
    /// The runtime ends.
    pub async fn ready(&self) -> io::Result<()> {
        // Cleared before the socket is read: a message that arrives meanwhile is read, or sets the readiness again.
        self.socket.readable().await?.clear_ready();
        Ok(())
    }

    /// Passes every queued message to `handle`. Returns true if messages were lost because the buffer was full.
    ///
    /// # Errors
    /// The socket cannot be read.
    pub fn drain(&mut self, mut handle: impl FnMut(&Message<'_>)) -> io::Result<bool> {
        let mut lost = false;
        loop {
            match recv(self.socket.get_ref().as_raw_fd(), &mut self.buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(n) => messages(&self.buffer[..n]).for_each(|message| handle(&message)),
                Err(Errno::EAGAIN) => return Ok(lost),
                Err(Errno::EINTR) => {}
                Err(Errno::ENOBUFS) => lost = true,
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// Returns true for a message about a table of this name.
pub fn is_about(message: &Message<'_>, table: &str) -> bool {
    attr_after(message.payload, NFGENMSG, TABLE_NAME).is_some_and(|name| text(name) == table)
}
