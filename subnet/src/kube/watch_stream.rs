// SPDX-License-Identifier: Apache-2.0
//! The events of a watch, one line of JSON each.
//!
//! `Client::request_events` of the crate kube does the same, but it ends a stream silently if the connection breaks or a line was cut off.
//! The watch has to know: after such an end it checks that the server still has the same history.

use futures_util::{AsyncBufReadExt, AsyncReadExt};
use kube::core::WatchEvent;

use super::client::{ApiError, Body, MAX_LINE};
use super::node::Node;

/// The most memory that is kept for the next line, bytes. A usual Node has 16 kB.
const KEPT: usize = 64 << 10;

/// An open watch.
pub(super) struct WatchStream {
    body: Body,
    /// What was read of the next line.
    line: Vec<u8>,
}

impl WatchStream {
    pub(super) fn new(body: Body) -> WatchStream {
        WatchStream { body, line: Vec::new() }
    }

    /// Returns the next event, or `None` after the last one. If the future is dropped before it is ready, nothing is lost.
    ///
    /// # Errors
    /// If the connection breaks, or if a line is cut off, too long or no event.
    pub(super) async fn next(&mut self) -> Result<Option<WatchEvent<Node>>, ApiError> {
        let room = MAX_LINE - self.line.len();
        (&mut self.body).take(room as u64).read_until(b'\n', &mut self.line).await?;
        if !self.line.ends_with(b"\n") {
            return match self.line.len() {
                0 => Ok(None),
                MAX_LINE => Err(ApiError::TooLarge),
                _ => Err(ApiError::CutOff),
            };
        }
        let event = serde_json::from_slice(&self.line);
        self.line.clear();
        self.line.shrink_to(KEPT);
        Ok(Some(event?))
    }
}

#[cfg(test)]
mod tests;
