// SPDX-License-Identifier: Apache-2.0
//! What is done around our rules: the other mode's and flannel's are removed once ours are in; what makes ours of no effect is
//! said with its remedy.

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use weft_backends::masq::{FamilyRules, Rules, Test};
use weft_netlink::socket::Netlink;
use weft_subnet::cidr::Family;
use weft_subnet::source::Local;

use super::Firewall;
use super::choice::Mode;
use super::reconciler::Surroundings;
use crate::cleanup;
use crate::firewall::forward_chain::Closing;
use crate::firewall::guard::table as guard;
use crate::firewall::iptables::{self, Failure, Flavour, Iptables, Saved, render};
use crate::firewall::nft::foreign_chains::{self, Dropping};
use crate::firewall::nft::generation::{Known, generation};
use crate::firewall::nft::table::{self, ForwardChain};
use crate::firewall::nft::tables::{Table, tables};
use crate::firewall::nft::{self, Nft};
use crate::instance::Instance;

/// Bridged packets pass the rules only with this module; net/bridge/br_netfilter_hooks.c makes the directory.
const BR_NETFILTER: &str = "/proc/sys/net/bridge";

/// How long what was found in iptables-legacy holds.
const LEGACY_AGAIN: Duration = Duration::from_secs(60);

/// How long until it is tried again to remove what could not be removed.
const SWEEP_AGAIN: Duration = Duration::from_secs(60);

/// The surroundings of one agent.
#[derive(Debug)]
pub struct Around {
    mode: Mode,
    instance: Instance,
    netlink: Option<Netlink>,
    /// The remarks about chains of nftables while these rules are in.
    forward: Known<(Rules, Vec<String>)>,
    /// What was found in iptables-legacy, and when: asking costs a process.
    legacy: Option<(Instant, Vec<String>)>,
    /// What could not be removed of the other mode's and flannel's rules, and when that was tried. Nobody writes them again: once
    /// all are gone it is not looked again.
    left: Option<(Instant, Vec<String>)>,
}

impl Around {
    /// Nothing is removed yet.
    pub fn new(mode: Mode, instance: Instance) -> Around {
        Around { mode, instance, netlink: None, forward: Known::default(), legacy: None, left: None }
    }

    /// Brings our accepts in FORWARD of iptables-nft to what is wanted; names all other chains that drop.
    fn open_forward(&mut self, rules: &Rules) -> Vec<String> {
        let netlink = match nft::kept(&mut self.netlink) {
            Ok(netlink) => netlink,
            Err(error) => return unread(&error).into_iter().collect(),
        };
        let generation = generation(netlink);
        if let Some((then, remarks)) = self.forward.at(generation)
            && then == rules
        {
            return remarks.clone();
        }
        // Costs the kernel a look at every chain there is: once for both families, and only where a drop of others matters.
        let wanted = rules.families.iter().any(|part| !part.forward.is_empty());
        let there = table::look(netlink, Family::V4, &self.instance.name);
        let chains = there.and_then(|_| if wanted { table::forward_chains(netlink) } else { Ok(Vec::new()) });
        let chains = match chains {
            Ok(chains) => chains,
            Err(error) => return unread(&error).into_iter().collect(),
        };
        let (mut remarks, mut all) = (Vec::new(), true);
        for family in [Family::V4, Family::V6] {
            let part = rules.of(family).filter(|part| !part.forward.is_empty());
            match self::forward(netlink, (family, part), &chains, (self.mode, &self.instance)) {
                Ok(more) => remarks.extend(more),
                Err(error) => {
                    all = false;
                    remarks.push(trouble(&error));
                }
            }
        }
        if all {
            self.forward.keep(generation, (rules.clone(), remarks.clone()));
        }
        remarks
    }

    /// Names chains of iptables-legacy that drop: nftables cannot reach into them, and nothing of ours goes before what someone
    /// put first.
    async fn look_at_legacy(&mut self, rules: &Rules) -> Vec<String> {
        if let Some((at, remarks)) = &self.legacy
            && at.elapsed() < LEGACY_AGAIN
        {
            return remarks.clone();
        }
        let mut remarks = Vec::new();
        for part in rules.families.iter().filter(|part| !part.forward.is_empty()) {
            if !iptables::has_legacy_table(part.family, "filter") {
                continue;
            }
            match iptables::save(Flavour::Legacy, part.family).await {
                Ok(saved) => remarks.extend(legacy_remark(&saved, part, self.mode)),
                Err(Failure::Missing(_)) => remarks.push(unseen(part)),
                Err(Failure::Said(..) | Failure::Run(..)) => {}
            }
        }
        self.legacy = Some((Instant::now(), remarks.clone()));
        remarks
    }

    /// Removes what an earlier start in the other mode, or flannel, left, until all of it is gone. What is not: sentences.
    async fn sweep(&mut self) -> Vec<String> {
        match &self.left {
            Some((_, left)) if left.is_empty() => return Vec::new(),
            Some((at, left)) if at.elapsed() < SWEEP_AGAIN => return left.clone(),
            _ => {}
        }
        let mut left = Vec::new();
        let other = match self.mode {
            Mode::Nft => Iptables::open(&self.instance).remove().await,
            Mode::Iptables if nft::is_absent() => Ok(false),
            Mode::Iptables => Nft::new(&self.instance).remove().await,
        };
        match other {
            Ok(true) => tracing::info!("rules of the other mode removed"),
            Ok(false) => {}
            Err(error) => left.push(format!("rules of the other mode are still there: {error}")),
        }
        left.extend(remove_flannels().await);
        self.left = Some((Instant::now(), left.clone()));
        left
    }
}

/// Removes flannel's rules unless it runs; what is left, as sentences.
async fn remove_flannels() -> Vec<String> {
    // A walk over all processes only where flannel can have left anything.
    let none = tables().await.is_ok_and(|tables| !tables.iter().any(Table::is_flannels));
    if none && !iptables::has_tables().await {
        return Vec::new();
    }
    if let Ok(Ok(agents)) = tokio::task::spawn_blocking(cleanup::running_agents).await
        && let Some(agent) = agents.iter().find(|agent| agent.is_flanneld())
    {
        return vec![format!("{} runs beside weft: its rules stay; stop it", agent.what)];
    }
    let (mut gone, mut left) = (Vec::new(), Vec::new());
    let tables = tokio::task::spawn_blocking(nft::remove_flannels).await;
    match tables.unwrap_or_else(|error| Err(io::Error::other(error))) {
        Ok(tables) => gone.extend(tables),
        Err(error) if nft::lacks(&error) => {}
        Err(error) => left.push(format!("flannel's tables of nftables are still there: {error}")),
    }
    match iptables::remove_flannels().await {
        Ok(chains) => gone.extend(chains),
        Err(error) => left.push(format!("flannel's chains are still there: {error}")),
    }
    if !gone.is_empty() {
        tracing::info!(removed = gone.join(", "), "flannel's rules removed");
    }
    left
}

/// One family of [`Around::open_forward`].
fn forward(
    netlink: &mut Netlink,
    (family, part): (Family, Option<&FamilyRules>),
    chains: &[ForwardChain],
    (mode, instance): (Mode, &Instance),
) -> io::Result<Vec<String>> {
    let comment = comment(instance);
    // In the other mode iptables itself accepts, at the end of the chain.
    let wanted = part.filter(|_| mode == Mode::Nft);
    if foreign_chains::bring(netlink, family, wanted, &comment)? {
        tracing::info!(
            ?family,
            wanted = wanted.is_some(),
            "accepts of pods in FORWARD of iptables: brought to what is wanted"
        );
    }
    let Some(part) = part else { return Ok(Vec::new()) };
    let dropping = foreign_chains::dropping(netlink, chains, part, (&instance.name, &comment))?;
    let open = |chain: &&Dropping| !chain.is_iptables() || chain.will;
    Ok(dropping.iter().filter(open).map(|chain| remedy(chain, part)).collect())
}

/// Where nftables is not in the kernel it drops nothing.
fn unread(error: &io::Error) -> Option<String> {
    (!nft::lacks(error)).then(|| trouble(error))
}

fn trouble(error: &io::Error) -> String {
    format!("pods may be dropped where nftables forwards; its chains cannot be read or written: {error}")
}

/// What our rules in other people's chains are marked with.
fn comment(instance: &Instance) -> String {
    format!("{} forward", instance.name)
}

/// Whether a rule of FORWARD is one of ours, of any agent, as `iptables-save` prints it.
pub fn is_ours(rule: &str) -> bool {
    let Some((_, rest)) = rule.split_once("--comment \"weft") else { return false };
    rest.split_once('"').is_some_and(|(comment, _)| comment.ends_with(" forward"))
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
    let Dropping { family, table, chain: name, .. } = chain;
    if chain.is_iptables() {
        return cut_off(&format!("{}tables-nft", if part.family == Family::V4 { "ip" } else { "ip6" }));
    }
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

/// Somebody's will: it is named, and stays.
fn cut_off(program: &str) -> String {
    format!(
        "a rule of chain FORWARD drops everything before pods are accepted; it is left there; see: {program} -S FORWARD"
    )
}

/// As in a container without programs.
fn unseen(part: &FamilyRules) -> String {
    let program = legacy(part);
    format!(
        "FORWARD of {program} may drop pods and cannot be looked at from here; see on the node: {program} -S FORWARD; if it drops, run: {}",
        inserts(part)
    )
}

fn inserts(part: &FamilyRules) -> String {
    let insert = |accept: &String| format!("{} -I FORWARD {accept}", legacy(part));
    render::accepts(part).iter().map(insert).collect::<Vec<_>>().join(" && ")
}

fn legacy(part: &FamilyRules) -> &'static str {
    if part.family == Family::V4 { "iptables-legacy" } else { "ip6tables-legacy" }
}

/// What FORWARD of iptables-legacy does to pods, if they are not let through.
fn legacy_remark(saved: &Saved, part: &FamilyRules, mode: Mode) -> Option<String> {
    let program = legacy(part);
    let rules = &saved.table("filter")?.get("FORWARD")?.rules;
    if let Closing::Will(_) = saved.forward_closing() {
        return Some(cut_off(program));
    }
    let wanted = render::accepts(part);
    let end = saved.forward_closing().end(rules.len());
    let known = wanted.iter().all(|accept| rules[..end].iter().any(|rule| render::is_same(rule, accept)));
    if mode == Mode::Iptables || known || !saved.forward_drops() {
        return None;
    }
    Some(format!(
        "chain FORWARD of {program} drops packets of pods; run: {}, or give --firewall=iptables",
        inserts(part)
    ))
}

/// Removes the rules of an agent, by whatever they are carried; true when there were some. For `weft cleanup`.
///
/// # Errors
/// What could not be removed: one sentence each.
pub async fn remove_all(instance: &Instance) -> Result<bool, Vec<String>> {
    let mut problems = Vec::new();
    let mut gone = false;
    let withdrawn = nft::socket().and_then(|mut netlink| {
        let mut withdraw = |family| foreign_chains::bring(&mut netlink, family, None, &comment(instance));
        Ok(withdraw(Family::V4)? | withdraw(Family::V6)?)
    });
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
        Err(error) if nft::lacks(&error) => {}
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
            let mut remarks = self.sweep().await;
            if rules.masquerades() && !Path::new(BR_NETFILTER).exists() {
                remarks.push(
                    "br_netfilter is not loaded: packets between pods of one node pass no rules, and answers of services \
                     get lost; run: modprobe br_netfilter"
                        .to_owned(),
                );
            }
            remarks.extend(self.open_forward(rules));
            remarks.extend(self.look_at_legacy(rules).await);
            remarks
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_backends::masq::{Policy, rules};
    use weft_subnet::cidr::Subnets;

    /// What is said of a legacy FORWARD with this policy and these rules.
    fn said(policy: &str, forward: &[&str], mode: Mode) -> Option<String> {
        let networks = Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: None };
        let own = Subnets { v4: Some("10.5.7.0/24".parse().unwrap()), v6: None };
        let rules = rules(&networks, &own, &Policy { masquerade: None, forward: true });
        let lines: String = forward.iter().map(|rule| format!("-A FORWARD {rule}\n")).collect();
        let saved = Saved::parse(&format!("*filter\n:FORWARD {policy} [0:0]\n{lines}COMMIT\n"));
        legacy_remark(&saved, rules.of(Family::V4).unwrap(), mode)
    }

    #[test]
    fn only_accepts_of_just_our_packets_silence_the_remark() {
        let (from, to) = ("-s 10.5.0.0/16 -j ACCEPT", "-d 10.5.0.0/16 -j ACCEPT");
        let commented = "-d 10.5.0.0/16 -m comment --comment pods -j ACCEPT";
        for accepts in [&[from, to][..], &[from, commented], &["-i eth1 -j DROP", to, from]] {
            assert_eq!(said("DROP", accepts, Mode::Nft), None, "{accepts:?}");
        }
        for others in [
            &[][..],
            &[from],
            &[to],
            &["-s 110.5.0.0/16 -j ACCEPT", "-d 110.5.0.0/16 -j ACCEPT"],
            &["-s 10.5.0.0/16 -p tcp -m tcp --dport 443 -j ACCEPT", to],
            &["-i eth1 -j DROP", "-j REJECT"],
        ] {
            let text = said("DROP", others, Mode::Nft).unwrap_or_else(|| panic!("{others:?} silence it"));
            assert!(
                text.contains("iptables-legacy -I FORWARD -s 10.5.0.0/16 -j ACCEPT && iptables-legacy -I FORWARD -d"),
                "{text}"
            );
        }
        assert_eq!(said("ACCEPT", &[], Mode::Nft), None);
        assert_eq!(said("DROP", &[], Mode::Iptables), None, "our own chain accepts");
        for mode in [Mode::Nft, Mode::Iptables] {
            let text = said("ACCEPT", &["-j DROP", "-j WEFT-FWD"], mode).unwrap();
            assert!(text.contains("it is left there; see: iptables-legacy -S FORWARD"), "{text}");
        }
    }
}
