// SPDX-License-Identifier: Apache-2.0
//! The traffic rules of the node (masquerading, accepting forwarded packets) and the tunnel guard.
//!
//! What the rules say is decided in [`weft_backends::traffic_rules`]. Here they are written: [`choice`] chooses nftables or iptables,
//! [`reconciler`] keeps the rules in place, and [`other_programs`] deals with what other programs' rules do to ours.
//!
//! Invariant: nothing here imports the kernel adapter, the plan or the options. These import this module. `tests/layers.rs` checks this.

pub mod choice;
pub mod error;
pub mod fake;
pub mod foreign_chains;
pub mod forward_chain;
pub mod guard;
pub mod iptables;
pub mod iptables_forward;
pub mod nft;
pub mod other_programs;
pub mod packet_filter;
pub mod reconciler;

use std::time::Duration;

use crate::instance::Instance;
use choice::{Choice, Chosen, Mode, Survey};
use error::FirewallError;
use iptables::Iptables;
use nft::Nft;
use other_programs::OtherPrograms;
use packet_filter::PacketFilter;
use reconciler::Port;

/// The task that writes and repairs the traffic rules of an agent.
#[derive(Debug)]
pub struct Task {
    /// Whose rules they are.
    pub instance: Instance,
    /// `--firewall`.
    pub choice: Choice,
    /// How often the rules are compared with the kernel.
    pub resync: Duration,
    /// What the node uses, for `--firewall=auto`.
    pub survey: Survey,
}

impl Task {
    /// Chooses nftables or iptables, and writes and repairs the rules until the other end of the port is dropped. `nftables`:
    /// `EnableNFTables`, where net-conf has it.
    pub async fn run(self, nftables: Option<bool>, mut port: Port) {
        let mut chosen = Chosen::now(self.choice, nftables, self.survey).await;
        loop {
            let mode = chosen.mode();
            let filter: Box<dyn PacketFilter> = match mode {
                Mode::Nft => Box::new(Nft::new(&self.instance)),
                Mode::Iptables => Box::new(Iptables::new(&self.instance)),
            };
            let others = Box::new(OtherPrograms::new(mode, self.instance.clone()));
            // What the other mode wrote stays until the rules of the new mode are in place.
            tokio::select! {
                () = reconciler::run(filter, others, &mut port, self.resync) => return,
                () = chosen.changed(self.resync) => {}
            }
        }
    }
}

/// Removes all traffic rules of an agent from nftables and iptables. Returns true if some were removed, and an error for each part that
/// could not be removed. The other parts are removed anyway. For `weft cleanup`.
pub async fn remove_rules(instance: &Instance) -> (bool, Vec<FirewallError>) {
    let (mut removed, mut errors) = (false, Vec::new());
    let mut note = |done: Result<bool, FirewallError>| match done {
        Ok(some) => removed |= some,
        Err(error) => errors.push(error),
    };
    let forward = iptables_forward::remove(instance);
    // A kernel without nftables has no rules in it.
    if !forward.as_ref().is_err_and(FirewallError::is_unsupported) {
        note(forward);
        note(Nft::new(instance).remove().await);
    }
    note(Iptables::new(instance).remove().await);
    (removed, errors)
}

/// Removes the tunnel guard of an agent. Returns true if there was one. For `weft cleanup`.
///
/// # Errors
/// The kernel refused.
pub fn remove_guard(instance: &Instance) -> Result<bool, FirewallError> {
    match guard::table::remove(instance) {
        Err(error) if error.is_unsupported() => Ok(false),
        done => done,
    }
}
