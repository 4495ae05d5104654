// SPDX-License-Identifier: Apache-2.0
//! What the kernel refuses of a batch.

use std::fmt;

use nix::errno::Errno;

/// The first message of a batch that the kernel refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The purpose of the message, as a verb phrase: "add an address".
    pub what: &'static str,
    /// The error number.
    pub errno: Errno,
    /// The kernel's explanation; may be empty.
    pub text: String,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.errno.desc())?;
        if self.text.is_empty() { Ok(()) } else { write!(f, " ({})", self.text) }
    }
}

impl std::error::Error for Refused {}
