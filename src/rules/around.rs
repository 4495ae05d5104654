// SPDX-License-Identifier: Apache-2.0
//! What is done around our rules: the other mode's and flannel's are removed once ours are in; what makes ours of no effect is
//! said with its remedy.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use weft_backends::masq::{FamilyRules, Rules, Test};
use weft_subnet::cidr::Family;
use weft_subnet::source::Local;

use super::auto::Mode;
use super::keeper::Surroundings;
use super::{Firewall, Instance};
use crate::cleanup;
use crate::kernel::guard;
use crate::kernel::iptables::{self, Flavour, Iptables};
use crate::kernel::nft::foreign::{self, Dropping};
use crate::kernel::nft::{self, Nft};
use crate::kernel::socket::Netlink;

/// Bridged packets pass the rules only with this module; net/bridge/br_netfilter_hooks.c makes the directory.
const BR_NETFILTER: &str = "/proc/sys/net/bridge";

/// How long what was found in iptables-legacy holds.
const LEGACY_AGAIN: Duration = Duration::from_secs(60);

/// The surroundings of one agent.
#[derive(Debug)]
pub struct Around {
    mode: Mode,
    instance: Instance,
    swept: bool,
    /// Kept open: closing one costs the kernel 16 ms.
    netlink: Option<Netlink>,
    /// What was found in iptables-legacy, and when: asking costs a process.
    legacy: Option<(Instant, Vec<String>)>,
}

impl Around {
    /// Nothing is removed yet.
    pub fn new(mode: Mode, instance: Instance) -> Around {
        Around { mode, instance, swept: false, netlink: None, legacy: None }
    }

    /// Accepts the pods' packets in chains of iptables-nft that drop by policy; names all others that do.
    fn open_forward(&mut self, rules: &Rules) -> io::Result<Vec<String>> {
        let netlink = match &mut self.netlink {
            Some(netlink) => netlink,
            none => none.insert(nft::socket()?),
        };
        let comment = comment(&self.instance);
        let mut remarks = Vec::new();
        for part in rules.families.iter().filter(|part| !part.forward.is_empty()) {
            let mut dropping = foreign::dropping(netlink, part, &self.instance.name)?;
            if dropping.iter().any(Dropping::is_iptables) {
                // In the other mode iptables itself accepts, at the end of the chain.
                if self.mode == Mode::Nft && foreign::accept(netlink, part, &comment)? {
                    tracing::info!("FORWARD of iptables drops what it does not know: pods accepted there");
                }
                dropping.retain(|chain| !chain.is_iptables());
            }
            remarks.extend(dropping.iter().map(|chain| remedy(chain, part)));
        }
        Ok(remarks)
    }

    /// Names chains of iptables-legacy that drop: nftables cannot reach into them.
    async fn look_at_legacy(&mut self, rules: &Rules) -> Vec<String> {
        if self.mode == Mode::Iptables {
            return Vec::new();
        }
        if let Some((at, remarks)) = &self.legacy
            && at.elapsed() < LEGACY_AGAIN
        {
            return remarks.clone();
        }
        let mut remarks = Vec::new();
        for part in rules.families.iter().filter(|part| !part.forward.is_empty()) {
            let (names, program) = match part.family {
                Family::V4 => ("/proc/net/ip_tables_names", "iptables-legacy"),
                Family::V6 => ("/proc/net/ip6_tables_names", "ip6tables-legacy"),
            };
            if !std::fs::read_to_string(names).is_ok_and(|text| text.lines().any(|line| line == "filter")) {
                continue;
            }
            let Ok(saved) = iptables::save(Flavour::Legacy, part.family).await else { continue };
            let Some(forward) = saved.table("filter").and_then(|table| table.get("FORWARD")) else { continue };
            let net = network(part);
            let known = forward.rules.iter().any(|rule| rule.contains(&net) && rule.contains("-j ACCEPT"));
            if forward.policy.as_deref() == Some("DROP") && !known {
                let insert = |side| format!("{program} -I FORWARD {side} {net} -j ACCEPT");
                remarks.push(format!(
                    "chain FORWARD of {program} drops packets of pods; run: {} && {}, or give --firewall=iptables",
                    insert("-s"),
                    insert("-d")
                ));
            }
        }
        self.legacy = Some((Instant::now(), remarks.clone()));
        remarks
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

/// What our rules in other people's chains are marked with.
fn comment(instance: &Instance) -> String {
    format!("{} forward", instance.name)
}

/// What the forward rules accept.
fn network(part: &FamilyRules) -> String {
    let nets = part.forward.iter().flat_map(|rule| &rule.tests).filter_map(|test| match test {
        Test::From(net) => Some(net.to_string()),
        _ => None,
    });
    nets.collect::<Vec<_>>().join(",")
}

/// The sentence for people, with the command.
fn remedy(chain: &Dropping, part: &FamilyRules) -> String {
    let Dropping { family, table, chain: name } = chain;
    let net = network(part);
    let run = if chain.is_firewalld() {
        format!("firewall-cmd --permanent --zone=trusted --add-source={net} && firewall-cmd --reload")
    } else {
        let ip = if part.family == Family::V4 { "ip" } else { "ip6" };
        let insert = |side| format!("nft insert rule {family} {table} {name} {ip} {side} {net} accept");
        format!("{} && {}", insert("saddr"), insert("daddr"))
    };
    format!("chain {name} of table {family} {table} drops forwarded packets of pods that it does not know; run: {run}")
}

/// Removes the rules of an agent, by whatever they are carried; true when there were some. For `weft cleanup`.
///
/// # Errors
/// What could not be removed: one sentence each.
pub async fn remove_all(instance: &Instance) -> Result<bool, Vec<String>> {
    let mut problems = Vec::new();
    let mut gone = false;
    let withdrawn = nft::socket().and_then(|mut netlink| foreign::withdraw(&mut netlink, &comment(instance)));
    match withdrawn {
        Ok(some) => {
            gone |= some;
            match guard::remove(instance) {
                Ok(some) => gone |= some,
                Err(error) => problems.push(nft::trouble(&error, "").0),
            }
            match Nft::new(instance).remove().await {
                Ok(some) => gone |= some,
                Err(trouble) => problems.push(trouble.0),
            }
        }
        // A kernel without nftables has no rules in it.
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
        Err(error) if error.raw_os_error() == Some(Errno::EPROTONOSUPPORT as i32) => {}
        Err(error) => problems.push(nft::trouble(&error, "").0),
    }
    match Iptables::open(instance).remove().await {
        Ok(some) => gone |= some,
        Err(trouble) => problems.push(trouble.0),
    }
    if problems.is_empty() { Ok(gone) } else { Err(problems) }
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
            match self.open_forward(rules) {
                Ok(more) => remarks.extend(more),
                // Where nftables cannot be asked it drops nothing.
                Err(error) => tracing::debug!(%error, "chains of forwarded packets"),
            }
            remarks.extend(self.look_at_legacy(rules).await);
            remarks
        })
    }
}
