// SPDX-License-Identifier: Apache-2.0
//! What is done about the rules of other programs, once ours are in place. Rules that flannel or the other mode of weft left are removed.
//! Accepts are written where iptables-nft drops pods ([`iptables_forward`]). What the agent cannot change is reported with a remedy.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::traffic_rules::{FamilyRules, Rules, Test};
use weft_cni::iptables::Saved;
use weft_netlink::nftables::{BaseChain, Hook, base_chains};
use weft_netlink::socket::Netlink;
use weft_subnet::cidr::Family;
use weft_subnet::source::Local;

use super::choice::Mode;
use super::error::{FirewallError, ProgramError};
use super::foreign_chains::{self, DroppingChain};
use super::forward_chain::Ending;
use super::iptables::{self, Flavour, Iptables, render};
use super::iptables_forward;
use super::nft::generation::{Cached, generation};
use super::nft::table;
use super::nft::tables::{TableName, tables};
use super::nft::{self, Nft, connection};
use super::packet_filter::PacketFilter;
use super::reconciler::Others;
use crate::instance::Instance;
use crate::observe::problem::{Problem, ProblemKind};
use crate::processes::{AgentProcess, agent_processes};

/// The kernel passes bridged packets to the rules only when this module is loaded. It creates the directory
/// (net/bridge/br_netfilter_hooks.c).
const BR_NETFILTER: &str = "/proc/sys/net/bridge";
/// The command that loads it.
const LOAD_BR_NETFILTER: &str = "modprobe br_netfilter";

/// How long what was read from iptables-legacy is valid. To read it runs a program.
const LEGACY_VALID: Duration = Duration::from_secs(60);

/// How long until the removal of old rules is tried again.
const REMOVE_AGAIN: Duration = Duration::from_secs(60);

/// Something that is wrong although our rules are in place. Each is a sentence, with the remedy where one is known.
#[derive(Debug, thiserror::Error)]
enum Warning {
    #[error(
        "br_netfilter is not loaded: packets between pods of one node pass no rules, and answers of services get lost; run: \
         {LOAD_BR_NETFILTER}"
    )]
    NoBrNetfilter,
    #[error("the traffic rules in the packet filter that is not in use could not be removed: {0}")]
    OtherMode(FirewallError),
    #[error("the tables of flannel in nftables could not be removed: {0}")]
    FlannelTables(FirewallError),
    #[error("the chains of flannel in iptables could not be removed: {0}")]
    FlannelChains(FirewallError),
    #[error("{0} runs beside weft, so its rules are not removed; stop it")]
    FlannelRuns(AgentProcess),
    #[error("chains of nftables may drop packets of pods, and cannot be read or written: {0}")]
    Nftables(FirewallError),
    #[error(
        "a rule of chain FORWARD drops all packets before pods are accepted, and is not changed; see: {program} -S FORWARD"
    )]
    Blocked { program: &'static str },
    #[error("chain {chain} of table {family} {table} drops forwarded packets of pods; run: {command}")]
    Chain { family: &'static str, table: String, chain: String, command: String },
    #[error(
        "chain FORWARD of {program} drops forwarded packets of pods; with --firewall=iptables, the agent accepts them itself; run: {command}"
    )]
    Legacy { program: &'static str, command: String },
    #[error(
        "chain FORWARD of {program} may drop packets of pods, and cannot be read because the program is not installed here; see on \
         the node: {program} -S FORWARD; if it drops packets, run: {command}"
    )]
    LegacyUnread { program: &'static str, command: String },
}

impl From<&Warning> for Problem {
    fn from(warning: &Warning) -> Problem {
        let problem = Problem::new(ProblemKind::Rules, warning.to_string());
        match warning {
            Warning::NoBrNetfilter => problem.with_command(LOAD_BR_NETFILTER),
            Warning::Chain { command, .. } | Warning::Legacy { command, .. } => problem.with_command(command),
            // What helps is not known before a person has looked.
            Warning::OtherMode(_)
            | Warning::FlannelTables(_)
            | Warning::FlannelChains(_)
            | Warning::FlannelRuns(_)
            | Warning::Nftables(_)
            | Warning::Blocked { .. }
            | Warning::LegacyUnread { .. } => problem,
        }
    }
}

/// What is known of the other programs on this node.
#[derive(Debug)]
pub struct OtherPrograms {
    mode: Mode,
    instance: Instance,
    netlink: Option<Netlink>,
    /// The warnings about chains of nftables, for these rules.
    nftables: Cached<(Rules, Vec<Problem>)>,
    /// The warnings about iptables-legacy, for these forward rules, and when it was read.
    legacy: Option<(Instant, Vec<FamilyRules>, Vec<Problem>)>,
    /// The warnings about rules of the other mode and of flannel that could not be removed, and when that was tried. Once all of them
    /// are removed, nobody writes them again.
    removal: Option<(Instant, Vec<Problem>)>,
}

impl OtherPrograms {
    /// Returns a state in which nothing was read or removed yet.
    pub fn new(mode: Mode, instance: Instance) -> OtherPrograms {
        OtherPrograms { mode, instance, netlink: None, nftables: Cached::default(), legacy: None, removal: None }
    }

    /// Writes our accepts into FORWARD of iptables-nft where they are needed, and warns of all other chains that drop packets of pods.
    fn settle_nftables(&mut self, rules: &Rules) -> Vec<Problem> {
        let netlink = match connection::open_once(&mut self.netlink) {
            Ok(netlink) => netlink,
            Err(error) => return unread(error.into()),
        };
        let generation = generation(netlink);
        if let Some((then, warnings)) = self.nftables.at(generation)
            && then == rules
        {
            return warnings.clone();
        }
        // To list the chains costs the kernel a visit of every chain. It is done once for both families, and only when a chain that
        // drops packets matters.
        let is_needed = rules.families.iter().any(|part| !part.forward.is_empty());
        let present = table::head(netlink, Family::V4, &self.instance.name);
        let chains = present.and_then(|_| if is_needed { base_chains(netlink, Hook::Forward) } else { Ok(Vec::new()) });
        let chains = match chains {
            Ok(chains) => chains,
            Err(error) => return unread(error.into()),
        };
        let (mut warnings, mut is_complete) = (Vec::new(), true);
        for family in Family::BOTH {
            let part = rules.of(family).filter(|part| !part.forward.is_empty());
            match settle_family(netlink, (family, part), &chains, (self.mode, &self.instance)) {
                Ok(found) => warnings.extend(found.iter().map(Problem::from)),
                Err(error) => {
                    is_complete = false;
                    warnings.push(Problem::from(&Warning::Nftables(error)));
                }
            }
        }
        if is_complete {
            self.nftables.keep(generation, (rules.clone(), warnings.clone()));
        }
        warnings
    }

    /// Warns of chains of iptables-legacy that drop packets of pods. Rules of nftables do not take effect there.
    async fn check_legacy(&mut self, rules: &Rules) -> Vec<Problem> {
        // The masquerade rules do not matter here, and may change with every node that joins.
        let forward = forward_rules_of(rules);
        if let Some((at, then, warnings)) = &self.legacy
            && at.elapsed() < LEGACY_VALID
            && *then == forward
        {
            return warnings.clone();
        }
        let mut warnings = Vec::new();
        for part in &forward {
            if !iptables::has_legacy_table(part.family, "filter") {
                continue;
            }
            let warning = match iptables::save(Flavour::Legacy, part.family).await {
                Ok(saved) => legacy_warning(&saved, part, self.mode),
                Err(ProgramError::Missing { .. }) => {
                    Some(Warning::LegacyUnread { program: legacy_program(part), command: legacy_command(part) })
                }
                Err(ProgramError::Failed { .. } | ProgramError::NotRun { .. }) => None,
            };
            warnings.extend(warning.iter().map(Problem::from));
        }
        self.legacy = Some((Instant::now(), forward, warnings.clone()));
        warnings
    }

    /// Removes the rules of flannel, and those of an earlier start in the other mode, until all of them are gone. Warns of those that
    /// could not be removed.
    async fn remove_old_rules(&mut self) -> Vec<Problem> {
        match &self.removal {
            Some((_, warnings)) if warnings.is_empty() => return Vec::new(),
            Some((at, warnings)) if at.elapsed() < REMOVE_AGAIN => return warnings.clone(),
            _ => {}
        }
        let mut warnings = Vec::new();
        let other_mode = match self.mode {
            Mode::Nft => Iptables::new(&self.instance).remove().await,
            Mode::Iptables if nft::is_absent() => Ok(false),
            Mode::Iptables => Nft::new(&self.instance).remove().await,
        };
        match other_mode {
            Ok(true) => tracing::info!("removed the traffic rules from the packet filter that is not in use"),
            Ok(false) => {}
            Err(error) => warnings.push(Warning::OtherMode(error)),
        }
        warnings.extend(remove_rules_of_flannel().await);
        let warnings: Vec<Problem> = warnings.iter().map(Problem::from).collect();
        self.removal = Some((Instant::now(), warnings.clone()));
        warnings
    }
}

/// Removes the rules of flannel, unless it runs.
async fn remove_rules_of_flannel() -> Vec<Warning> {
    // All processes are examined only where flannel can have left rules.
    let nftables = tables().await.ok();
    let has_no_tables = nftables.as_ref().is_some_and(|tables| !tables.iter().any(TableName::is_of_flannel));
    if has_no_tables && !iptables::has_tables(nftables.as_deref()) {
        return Vec::new();
    }
    if let Ok(Ok(agents)) = tokio::task::spawn_blocking(agent_processes).await
        && let Some(agent) = agents.into_iter().find(AgentProcess::is_flanneld)
    {
        return vec![Warning::FlannelRuns(agent)];
    }
    let (mut removed, mut warnings) = (Vec::new(), Vec::new());
    let tables = tokio::task::spawn_blocking(nft::remove_flannel_tables).await;
    match tables.unwrap_or_else(|error| Err(io::Error::other(error).into())) {
        Ok(tables) => removed.extend(tables),
        Err(error) if error.is_unsupported() => {}
        Err(error) => warnings.push(Warning::FlannelTables(error)),
    }
    match iptables::remove_flannel_chains().await {
        Ok(chains) => removed.extend(chains),
        Err(error) => warnings.push(Warning::FlannelChains(error)),
    }
    if !removed.is_empty() {
        tracing::info!(removed = removed.join(", "), "removed the rules of flannel");
    }
    warnings
}

/// Does one family of [`OtherPrograms::settle_nftables`].
fn settle_family(
    netlink: &mut Netlink,
    (family, part): (Family, Option<&FamilyRules>),
    chains: &[BaseChain],
    (mode, instance): (Mode, &Instance),
) -> Result<Vec<Warning>, FirewallError> {
    // In the other mode a chain of our own, written by iptables, accepts the packets.
    let wanted = part.filter(|_| mode == Mode::Nft);
    if iptables_forward::ensure(netlink, family, wanted, instance)? {
        tracing::info!(?family, wanted = wanted.is_some(), "changed our rules in chain FORWARD of iptables-nft");
    }
    let Some(part) = part else { return Ok(Vec::new()) };
    let dropping = foreign_chains::dropping(netlink, chains, part, instance)?;
    // In FORWARD of iptables-nft our rules accept the packets, unless a rule stands before them.
    let matters = |chain: &&DroppingChain| !chain.is_iptables() || chain.blocked;
    Ok(dropping.iter().filter(matters).map(|chain| chain_warning(chain, part)).collect())
}

/// Returns no problem for a kernel without nftables, because it drops nothing there.
fn unread(error: FirewallError) -> Vec<Problem> {
    if error.is_unsupported() { Vec::new() } else { vec![Problem::from(&Warning::Nftables(error))] }
}

/// Returns the forward rules of each family that has some.
fn forward_rules_of(rules: &Rules) -> Vec<FamilyRules> {
    let of = |part: &FamilyRules| {
        let forward = part.forward.clone();
        (!forward.is_empty()).then_some(FamilyRules { family: part.family, masquerade: Vec::new(), forward })
    };
    rules.families.iter().filter_map(of).collect()
}

/// Returns the networks whose packets the forward rules accept.
fn networks(part: &FamilyRules) -> String {
    let networks = part.forward.iter().flat_map(|rule| &rule.tests).filter_map(|test| match test {
        Test::From(net) => Some(net.to_string()),
        _ => None,
    });
    networks.collect::<Vec<_>>().join(",")
}

fn chain_warning(chain: &DroppingChain, part: &FamilyRules) -> Warning {
    let v4 = part.family == Family::V4;
    if chain.is_iptables() {
        return Warning::Blocked { program: if v4 { "iptables-nft" } else { "ip6tables-nft" } };
    }
    let networks = networks(part);
    let DroppingChain { family, table, chain: name, .. } = chain;
    let command = if chain.is_firewalld() {
        format!("firewall-cmd --permanent --zone=trusted --add-source={networks} && firewall-cmd --reload")
    } else {
        let ip = if v4 { "ip" } else { "ip6" };
        let insert = |side| format!("nft insert rule {family} {table} {name} {ip} {side} {networks} accept");
        format!("{} && {}", insert("saddr"), insert("daddr"))
    };
    Warning::Chain { family, table: table.clone(), chain: name.clone(), command }
}

/// Returns the command that accepts packets of pods in iptables-legacy.
fn legacy_command(part: &FamilyRules) -> String {
    let insert = |accept: &String| format!("{} -I FORWARD {accept}", legacy_program(part));
    render::accepts(part).iter().map(insert).collect::<Vec<_>>().join(" && ")
}

fn legacy_program(part: &FamilyRules) -> &'static str {
    if part.family == Family::V4 { "iptables-legacy" } else { "ip6tables-legacy" }
}

/// Returns what FORWARD of iptables-legacy does to packets of pods, when it does not accept them.
fn legacy_warning(saved: &Saved, part: &FamilyRules, mode: Mode) -> Option<Warning> {
    let program = legacy_program(part);
    let rules = &saved.table("filter")?.get("FORWARD")?.rules;
    let ending = iptables::forward_ending(saved);
    if let Ending::Block(_) = ending {
        return Some(Warning::Blocked { program });
    }
    let reached = &rules[..ending.reach(rules.len())];
    let is_accepted = |accept: &String| reached.iter().any(|rule| render::is_same(rule, accept));
    if mode == Mode::Iptables || !iptables::forward_drops(saved) || render::accepts(part).iter().all(is_accepted) {
        return None;
    }
    Some(Warning::Legacy { program, command: legacy_command(part) })
}

impl Others for OtherPrograms {
    fn settle<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Vec<Problem>> {
        Box::pin(async move {
            let mut warnings = self.remove_old_rules().await;
            if rules.masquerades() && !Path::new(BR_NETFILTER).exists() {
                warnings.push(Problem::from(&Warning::NoBrNetfilter));
            }
            warnings.extend(self.settle_nftables(rules));
            warnings.extend(self.check_legacy(rules).await);
            warnings
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::errno::Errno;
    use weft_backends::traffic_rules::{Masquerade, Policy, rules};
    use weft_subnet::cidr::Subnets;

    fn forward_rules() -> Rules {
        let networks = Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: Some("fd00:5::/48".parse().unwrap()) };
        let own = Subnets { v4: Some("10.5.7.0/24".parse().unwrap()), v6: Some("fd00:5:0:7::/64".parse().unwrap()) };
        rules(&networks, &own, &Policy { masquerade: None, forward: true })
    }

    #[test]
    fn a_kernel_without_nftables_is_no_warning_and_one_that_refuses_is() {
        let warnings = |errno: Errno| unread(io::Error::from(errno).into()).len();
        assert_eq!([Errno::EPROTONOSUPPORT, Errno::EAFNOSUPPORT].map(warnings), [0, 0]);
        assert_eq!([Errno::EPERM, Errno::EMFILE].map(warnings), [1, 1]);
    }

    /// With each node that joins, the masquerade rules may change. To read iptables-legacy runs a program.
    #[tokio::test(start_paused = true)]
    async fn what_was_read_of_iptables_legacy_is_valid_for_a_minute_and_for_its_forward_rules() {
        let with = |network: &str, policy: Policy| {
            let networks = Subnets { v4: network.parse().ok(), v6: "fd00:5::/48".parse().ok() };
            let own = Subnets { v4: "10.5.7.0/24".parse().ok(), v6: "fd00:5:0:7::/64".parse().ok() };
            rules(&networks, &own, &policy)
        };
        let masquerade = || Some(Masquerade::default());
        let then = with("10.5.0.0/16", Policy { masquerade: None, forward: true });
        let joined = with("10.5.0.0/16", Policy { masquerade: masquerade(), forward: true });
        let wider = with("10.4.0.0/15", Policy { masquerade: None, forward: true });
        let forward = forward_rules_of(&then);
        assert_eq!(forward.iter().map(|part| part.family).collect::<Vec<_>>(), Family::BOTH);
        assert_eq!(forward_rules_of(&with("10.5.0.0/16", Policy { masquerade: masquerade(), forward: false })), []);
        // Nothing that this host has leads to this warning.
        let warned = vec![Problem::new(ProblemKind::Rules, "read before")];
        let mut others = OtherPrograms::new(Mode::Nft, Instance::new(Path::new("/run/x/subnet.env")));
        let read = (Instant::now(), forward, warned.clone());
        others.legacy = Some(read.clone());
        tokio::time::advance(LEGACY_VALID - Duration::from_secs(1)).await;
        assert_eq!(
            (others.check_legacy(&then).await, others.check_legacy(&joined).await),
            (warned.clone(), warned.clone())
        );
        assert_ne!(others.check_legacy(&wider).await, warned, "the command in the warning names the networks");
        others.legacy = Some(read);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_ne!(others.check_legacy(&then).await, warned, "it is long ago");
    }

    /// Returns the warning about a legacy FORWARD with this policy and these rules.
    fn warning(policy: &str, forward: &[&str], mode: Mode) -> Option<Problem> {
        let lines: String = forward.iter().map(|rule| format!("-A FORWARD {rule}\n")).collect();
        let saved = Saved::parse(&format!("*filter\n:FORWARD {policy} [0:0]\n{lines}COMMIT\n"));
        legacy_warning(&saved, forward_rules().of(Family::V4).unwrap(), mode).map(|warning| Problem::from(&warning))
    }

    #[test]
    fn only_accepts_of_exactly_our_packets_end_the_warning() {
        let (from, to) = ("-s 10.5.0.0/16 -j ACCEPT", "-d 10.5.0.0/16 -j ACCEPT");
        let commented = "-d 10.5.0.0/16 -m comment --comment pods -j ACCEPT";
        for accepts in [&[from, to][..], &[from, commented], &["-i eth1 -j DROP", to, from]] {
            assert_eq!(warning("DROP", accepts, Mode::Nft), None, "{accepts:?}");
        }
        for others in [
            &[][..],
            &[from],
            &[to],
            &["-s 110.5.0.0/16 -j ACCEPT", "-d 110.5.0.0/16 -j ACCEPT"],
            &["-s 10.5.0.0/16 -p tcp -m tcp --dport 443 -j ACCEPT", to],
            &["-i eth1 -j DROP", "-j REJECT"],
        ] {
            let problem = warning("DROP", others, Mode::Nft).unwrap_or_else(|| panic!("{others:?} end it"));
            let command = "iptables-legacy -I FORWARD -s 10.5.0.0/16 -j ACCEPT && iptables-legacy -I FORWARD -d 10.5.0.0/16 -j ACCEPT";
            assert!(problem.text.ends_with(&format!("; run: {command}")), "{problem}");
            assert_eq!(problem.command.as_deref(), Some(command));
        }
        assert_eq!(warning("ACCEPT", &[], Mode::Nft), None);
        assert_eq!(warning("DROP", &[], Mode::Iptables), None, "our own chain accepts");
        for mode in [Mode::Nft, Mode::Iptables] {
            let problem = warning("ACCEPT", &["-j DROP", "-j WEFT-FWD"], mode).unwrap();
            assert!(problem.text.contains("is not changed; see: iptables-legacy -S FORWARD"), "{problem}");
            assert_eq!(problem.command, None);
        }
    }

    #[test]
    fn a_warning_about_a_chain_names_the_command_that_helps() {
        let said = |family: &'static str, (table, chain): (&str, &str), part| {
            let blocked = (table, chain) == ("filter", "FORWARD");
            let chain = DroppingChain { family, table: table.to_owned(), chain: chain.to_owned(), blocked };
            chain_warning(&chain, forward_rules().of(part).unwrap()).to_string()
        };
        for (part, ip, network) in [(Family::V4, "ip", "10.5.0.0/16"), (Family::V6, "ip6", "fd00:5::/48")] {
            let insert = |side| format!("nft insert rule inet fw way {ip} {side} {network} accept");
            let command = format!("{} && {}", insert("saddr"), insert("daddr"));
            let text = format!("chain way of table inet fw drops forwarded packets of pods; run: {command}");
            assert_eq!(said("inet", ("fw", "way"), part), text);
            let firewalld = said("inet", ("firewalld", "filter_FORWARD"), part);
            assert!(firewalld.contains(&format!("--zone=trusted --add-source={network} && ")), "{firewalld}");
        }
        assert!(said("ip", ("filter", "FORWARD"), Family::V4).ends_with("see: iptables-nft -S FORWARD"));
        assert!(said("ip6", ("filter", "FORWARD"), Family::V6).ends_with("see: ip6tables-nft -S FORWARD"));
    }

    #[test]
    fn a_warning_about_iptables_legacy_names_the_program_of_the_family() {
        let saved = |rules: &str| Saved::parse(&format!("*filter\n:FORWARD DROP [0:0]\n{rules}COMMIT\n"));
        let rules = forward_rules();
        let said = |rules_there: &str| {
            let part = rules.of(Family::V6).unwrap();
            let warning = legacy_warning(&saved(rules_there), part, Mode::Nft);
            warning.map(|warning| warning.to_string())
        };
        let insert = |side| format!("ip6tables-legacy -I FORWARD {side} fd00:5::/48 -j ACCEPT");
        let text = said("").unwrap();
        assert!(text.starts_with("chain FORWARD of ip6tables-legacy drops"), "{text}");
        assert!(text.ends_with(&format!("; run: {} && {}", insert("-s"), insert("-d"))), "{text}");
        assert!(said("-A FORWARD -j DROP\n").unwrap().ends_with("see: ip6tables-legacy -S FORWARD"));
        let accepts = "-A FORWARD -s fd00:5::/48 -j ACCEPT\n-A FORWARD -d fd00:5::/48 -j ACCEPT\n";
        assert_eq!(said(accepts), None);
    }
}
