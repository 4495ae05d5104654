// SPDX-License-Identifier: Apache-2.0
//! The tunnel guard for the kernel adapter: its results become [`Outcome`], and its notifications [`Notice`].

use std::io;

use weft_backends::diff::Op;
use weft_backends::state::{Key, ObservedValue, Value};

use super::{Notice, Outcome, errno};
use crate::firewall::guard::table::{self, Change, GuardError, GuardNotifications};

/// The guard of one agent.
#[derive(Debug)]
pub struct GuardTable(table::GuardTable);

impl GuardTable {
    /// Returns the guard of the agent whose devices have this alias.
    pub fn new(alias: &str) -> GuardTable {
        GuardTable(table::GuardTable::new(alias))
    }

    /// Returns the chains and peers that are in the kernel.
    ///
    /// # Errors
    /// As [`table::GuardTable::observe`].
    pub fn observe(&mut self) -> io::Result<Vec<(Key, ObservedValue)>> {
        self.0.observe()
    }

    /// Carries out operations on the guard. Returns one outcome for each, in order.
    pub fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let outcome = |(op, done): (&Op, Result<(), GuardError>)| match done {
            Ok(()) => Outcome::Done,
            Err(GuardError::Refused(refusal)) => errno::outcome(op, &refusal),
            Err(GuardError::Netlink(error)) => errno::retry(op, &error.to_string()),
        };
        ops.iter().zip(self.0.apply(ops)).map(outcome).collect()
    }
}

/// The notifications about the guard of one agent.
#[derive(Debug)]
pub struct GuardMonitor(GuardNotifications);

impl GuardMonitor {
    /// Opens the notifications about the guard of the agent whose devices have this alias.
    ///
    /// # Errors
    /// As [`GuardNotifications::open`].
    pub fn open(alias: &str) -> io::Result<GuardMonitor> {
        GuardNotifications::open(alias).map(GuardMonitor)
    }

    /// Waits for a notification. Cancel-safe.
    ///
    /// # Errors
    /// As [`GuardNotifications::ready`].
    pub async fn ready(&self) -> io::Result<()> {
        self.0.ready().await
    }

    /// Returns what changed, in order.
    ///
    /// # Errors
    /// As [`GuardNotifications::changes`].
    pub fn notices(&mut self) -> io::Result<Vec<Notice>> {
        let notice = |change| match change {
            Change::Peer(ip, added) => Notice::Entry(Key::Peer(ip), added.then(|| Value::Peer.into())),
            Change::Table => Notice::Guard,
        };
        Ok(self.0.changes()?.into_iter().map(notice).collect())
    }
}
