// SPDX-License-Identifier: Apache-2.0
//! A packet filter writes the traffic rules into the kernel: nftables or iptables. What the rules say is decided in
//! [`weft_backends::traffic_rules`], and when they are compared with the kernel in [`super::reconciler`].

use weft_backends::traffic_rules::Rules;
use weft_subnet::source::Local;

use super::error::FirewallError;

/// Writes and removes the rules of one agent. No method blocks the loop.
pub trait PacketFilter {
    /// Returns its name for people: `nftables, table weft`, or `iptables-legacy, chains WEFT-POSTRTG and WEFT-FWD`.
    fn describe(&self) -> String;
    /// Compares what is in the kernel with these rules, and replaces it in one transaction when it differs, so that packets never meet
    /// an incomplete set of rules. A family or chain that the value does not have is removed.
    fn ensure<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Result<Ensured, EnsureError>>;
    /// Removes all rules of this agent. Returns true if there were some.
    fn remove(&mut self) -> Local<'_, Result<bool, FirewallError>>;
    /// Waits until another program may have changed our rules. Waits forever if the kernel sends no notifications. Cancel-safe.
    fn changed(&mut self) -> Local<'_, ()>;
}

/// What [`PacketFilter::ensure`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ensured {
    /// All rules were in place, and nothing was written.
    Unchanged,
    /// The rules were written.
    Written,
}

/// Why [`PacketFilter::ensure`] did not bring the rules to what is wanted.
#[derive(Debug, thiserror::Error)]
pub enum EnsureError {
    /// The rules in the kernel could not be read. All of them may well be in place.
    #[error(transparent)]
    Read(FirewallError),
    /// Rules are missing and could not be written.
    #[error(transparent)]
    Write(FirewallError),
}

impl From<EnsureError> for FirewallError {
    fn from(error: EnsureError) -> FirewallError {
        match error {
            EnsureError::Read(error) | EnsureError::Write(error) => error,
        }
    }
}
