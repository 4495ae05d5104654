// SPDX-License-Identifier: Apache-2.0
//! Sockets and other file descriptors that a task can wait on.

use std::io;
use std::os::fd::AsRawFd;

use tokio::io::unix::AsyncFd;

/// Registers a file descriptor with the runtime.
///
/// The successor of `AsyncFd::new` is unsafe, and this program forbids unsafe code. What the successor would make us promise is true
/// here: each type that is given owns its descriptor, closes it only when it is dropped, and nothing takes it out of the `AsyncFd`.
///
/// # Errors
/// The runtime cannot watch the descriptor.
#[expect(deprecated, reason = "the replacement needs an unsafe block")]
pub fn wait_on<F: AsRawFd>(descriptor: F) -> io::Result<AsyncFd<F>> {
    AsyncFd::new(descriptor)
}
