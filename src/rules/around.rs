// SPDX-License-Identifier: Apache-2.0
//! What is done around our rules: the other mode's and flannel's are removed once ours are in; what makes ours of no effect is
//! said with its remedy.

use std::path::Path;

use weft_backends::masq::Rules;
use weft_subnet::source::Local;

use super::auto::Mode;
use super::keeper::Surroundings;
use super::{Firewall, Instance};
use crate::cleanup;
use crate::kernel::iptables::{self, Iptables};
use crate::kernel::nft::{self, Nft};

/// Bridged packets pass the rules only with this module; net/bridge/br_netfilter_hooks.c makes the directory.
const BR_NETFILTER: &str = "/proc/sys/net/bridge";

/// The surroundings of one agent.
#[derive(Debug)]
pub struct Around {
    mode: Mode,
    instance: Instance,
    swept: bool,
}

impl Around {
    /// Nothing is removed yet.
    pub fn new(mode: Mode, instance: Instance) -> Around {
        Around { mode, instance, swept: false }
    }

    /// Removes what an earlier start in the other mode, or flannel, left. Once: nobody writes it again.
    async fn sweep(&mut self) {
        self.swept = true;
        let other = match self.mode {
            Mode::Nft => Iptables::open(&self.instance).remove().await,
            Mode::Iptables => Nft::new(&self.instance).remove().await,
        };
        match other {
            Ok(true) => tracing::info!("rules of the other mode removed"),
            Ok(false) => {}
            Err(error) => tracing::debug!("rules of the other mode: {error}"),
        }
        if let Ok(Some(agent)) = cleanup::running_agent()
            && agent.starts_with("flanneld")
        {
            tracing::warn!("{agent} runs beside weft: its rules stay");
            return;
        }
        let mut gone = nft::remove_flannels().unwrap_or_else(|error| {
            tracing::debug!("flannel's tables: {error}");
            Vec::new()
        });
        match iptables::remove_flannels().await {
            Ok(chains) => gone.extend(chains),
            Err(error) => tracing::warn!("flannel's chains: {error}"),
        }
        if !gone.is_empty() {
            tracing::info!(removed = gone.join(", "), "flannel's rules removed");
        }
    }
}

impl Surroundings for Around {
    fn settle<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Vec<String>> {
        Box::pin(async move {
            if !self.swept && !rules.is_empty() {
                self.sweep().await;
            }
            let mut remarks = Vec::new();
            if rules.masquerades() && !Path::new(BR_NETFILTER).exists() {
                remarks.push(
                    "br_netfilter is not loaded: packets between pods of one node pass no rules, and answers of services \
                     get lost; run: modprobe br_netfilter"
                        .to_owned(),
                );
            }
            remarks
        })
    }
}
