// SPDX-License-Identifier: Apache-2.0
//! Traffic rules: the seam to whatever carries them, and which one that is. What the rules say is decided in
//! [`weft_backends::masq`]; when they are looked at, in [`reconciler`].

pub mod choice;
pub mod fake;
pub mod forward_chain;
pub mod guard;
pub mod iptables;
pub mod nft;
pub mod other_programs;
pub mod reconciler;

use weft_backends::masq::Rules;
use weft_subnet::source::Local;

use crate::firewall::iptables::Iptables;
use crate::firewall::nft::Nft;
use crate::instance::Instance;
use crate::options::RuleOptions;
use choice::{Chosen, Mode};
use other_programs::Around;

/// What carries the rules: nftables or iptables. Blocks neither the loop nor a packet.
pub trait Firewall {
    /// For people: `nftables, table weft`, `iptables-legacy, chain WEFT-POSTRTG`.
    fn describe(&self) -> String;
    /// Brings our rules to this value, atomically: reads what is there, writes only when it differs. A part that the value
    /// lacks (a family, a chain) is removed. Never a moment without rules.
    fn ensure<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Result<Ensured, Failed>>;
    /// Removes all that is ours; true when something was there.
    fn remove(&mut self) -> Local<'_, Result<bool, Trouble>>;
    /// Ends when someone else may have touched our rules; never, where nothing tells. May be dropped at any time.
    fn disturbed(&mut self) -> Local<'_, ()>;
}

/// What [`Firewall::ensure`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ensured {
    /// All was in place: nothing was written.
    Same,
    /// Written.
    Written,
}

/// Why rules are not in place: one sentence, lower case, with the remedy where there is one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Trouble(pub String);

/// Why [`Firewall::ensure`] did not bring the rules to what is wanted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failed {
    /// What is there could not be read: all may well be in place.
    #[error("{0}")]
    Look(Trouble),
    /// What is missing could not be written.
    #[error("{0}")]
    Write(Trouble),
}

impl From<Failed> for Trouble {
    fn from(failed: Failed) -> Trouble {
        match failed {
            Failed::Look(trouble) | Failed::Write(trouble) => trouble,
        }
    }
}

/// `--firewall`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Choice {
    /// `EnableNFTables` where net-conf says it, else what kube-proxy and the node use.
    #[default]
    Auto,
    /// nftables.
    Nft,
    /// iptables.
    Iptables,
}

/// What carries the rules of an agent, once net-conf is known.
#[derive(Debug)]
pub struct Carrier {
    /// Names.
    pub instance: Instance,
    /// Flags.
    pub options: RuleOptions,
    /// What the node uses, for mode `auto`.
    pub look: choice::Look,
}

impl Carrier {
    /// Chooses nftables or iptables, and looks after the rules until the node is gone.
    pub async fn keep(self, nftables: Option<bool>, mut post: reconciler::Post) {
        let mut chosen = Chosen::now(self.options.firewall, nftables, self.look).await;
        loop {
            let mode = chosen.mode();
            let firewall: Box<dyn Firewall> = match mode {
                Mode::Nft => Box::new(Nft::new(&self.instance)),
                Mode::Iptables => Box::new(Iptables::open(&self.instance)),
            };
            let around = Box::new(Around::new(mode, self.instance.clone()));
            // What the other mode wrote stays until the next one's rules are in.
            tokio::select! {
                () = reconciler::keep(firewall, around, &mut post, self.options.resync) => return,
                () = chosen.changed(self.options.resync) => {}
            }
        }
    }
}
