// SPDX-License-Identifier: Apache-2.0
//! Reads rules of other programs, with the programs that list them. Nothing is changed: `iptables-legacy-save` would create a table
//! that does not exist, so it is called only if the kernel has that table.

use std::fs;
use std::io;
use std::path::Path;

use super::arp_rules;
use super::base::BRIDGE;
use super::explain::ipvs::LINK;
use super::kernel::entries::Packet;
use super::kernel::nft;
use super::kernel::rules::{Fate, Tested};
use super::legacy_tables::side_tables;
use super::processes::{self, Process, net_namespace};
use super::programs::{LIMIT, ProgramError, run};
use ipnet::IpNet;
use weft_cni::iptables::{Flavour, Saved, Table, legacy_tables_file};
use weft_netlink::nftables::{self, BaseChain, Hook, base_chains};
use weft_netlink::rtnl::{Addr, Link};
use weft_subnet::cidr::Family;

/// The tables of iptables that its programs list.
const LISTED: [&str; 2] = ["filter", "nat"];

/// The table of filters.
pub(super) const FILTER: &str = "filter";

/// The rules of one flavour and one family of iptables.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct SavedRules {
    /// The program that changes them, such as `iptables-nft`.
    pub program: String,
    /// True if its tables are in nftables, too.
    pub in_nftables: bool,
    /// The tables nat and filter, and those of the tables raw, mangle and security that are not in nftables, if they exist.
    pub tables: Saved,
}

impl SavedRules {
    /// Returns the tables that filter packets, with their names, in the order in which packets pass them.
    pub(super) fn filters(&self) -> impl Iterator<Item = (&'static str, &Table)> {
        let names = ["raw", "mangle", FILTER, "security"];
        names.into_iter().filter_map(|name| Some((name, self.tables.table(name)?)))
    }
}

/// A rule of nftables.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NftRule {
    /// Family, table and name of the base chain that leads to it.
    pub chain: String,
    /// The rule as text, with its handle.
    pub rule: String,
}

/// Everything that was read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct RuleFacts {
    /// The rules of iptables, for each flavour and family that could be read.
    pub iptables: Vec<SavedRules>,
    /// What `nft list ruleset` prints; `None` if there is no such program.
    pub nft: Option<String>,
    /// What `arptables-legacy-save` prints; empty without its table or the program.
    pub arptables: String,
    /// The rules of nftables that replace the source address of packets to pods of other nodes.
    pub nft_masquerades: Vec<NftRule>,
    /// kube-proxy with its process ID, if it runs in this network namespace.
    pub kube_proxy: Option<String>,
    /// True if kube-proxy carries services by IPVS.
    pub ipvs: bool,
    /// True if services have addresses for IPVS, and its table is empty.
    pub ipvs_is_empty: bool,
    /// What could not be read.
    pub unreadable: Option<String>,
}

/// Reads the rules. `links` and `addrs` are all of this node, `subnets` are its subnets, and `to_peers` contains a destination for each link by
/// which packets to pods of other nodes leave.
pub fn read((links, addrs): (&[Link], &[Addr]), subnets: &[IpNet], to_peers: &[(String, IpNet)]) -> RuleFacts {
    let mut facts = RuleFacts {
        kube_proxy: kube_proxy(),
        ipvs: links.iter().any(|link| link.name == LINK),
        ipvs_is_empty: ipvs_is_empty(links, addrs),
        arptables: arp_rules::read_legacy(),
        ..RuleFacts::default()
    };
    for family in [Family::V4, Family::V6] {
        let legacy = fs::read_to_string(legacy_tables_file(family)).unwrap_or_default();
        for tables in [None, Some(legacy.as_str())] {
            match saved(family, tables) {
                Ok(saved) => facts.iptables.push(saved),
                Err(error) => facts.unreadable = Some(error.to_string()),
            }
        }
    }
    match run("nft", &["--stateless", "list", "ruleset"], LIMIT) {
        Ok(text) => facts.nft = Some(text),
        Err(error) => facts.unreadable = Some(error.to_string()),
    }
    match nft_masquerades(subnets, to_peers, &facts.iptables) {
        Ok(rules) => facts.nft_masquerades = rules,
        // A kernel without nftables has no such rules.
        Err(error) if weft_netlink::socket::absent(&error) => {}
        Err(error) => facts.unreadable = Some(format!("nftables cannot be read: {error}")),
    }
    facts
}

/// Lists the tables of one family: those of iptables-nft, or these of iptables-legacy. Where the program with the flavour in its name is
/// missing, the plain one may be of this flavour.
fn saved(family: Family, legacy: Option<&str>) -> Result<SavedRules, ProgramError> {
    let in_nftables = legacy.is_none();
    let with = |program: String| {
        let mut text = String::new();
        for name in LISTED {
            if legacy.is_none_or(|tables| tables.lines().any(|table| table == name)) {
                text += &run(&format!("{program}-save"), &["-t", name], LIMIT)?;
            }
        }
        text += &side_tables(&program, legacy.unwrap_or_default())?;
        Ok(SavedRules { program, in_nftables, tables: Saved::parse(&text) })
    };
    let (flavour, plain) = (if in_nftables { Flavour::Nft } else { Flavour::Legacy }, Flavour::Plain.program(family));
    match with(flavour.program(family)) {
        // A program that is older than the flavours does not name its own.
        Err(ProgramError::NotInstalled(_))
            if run(&format!("{plain}-save"), &["--version"], LIMIT)
                .is_ok_and(|version| version.contains("(nf_tables)") == in_nftables) =>
        {
            with(plain)
        }
        read => read,
    }
}

/// Returns true if this is a chain of a table that iptables-nft lists.
pub(super) fn is_of_iptables(chain: &BaseChain) -> bool {
    chain.family != "inet" && LISTED.contains(&chain.table.as_str())
}

/// Returns true if a program of iptables has listed the table of this chain.
pub(super) fn is_listed(iptables: &[SavedRules], chain: &BaseChain) -> bool {
    let lists = |saved: &SavedRules| saved.in_nftables && saved.program.starts_with("ip6") == (chain.family == "ip6");
    is_of_iptables(chain) && iptables.iter().any(lists)
}

/// Follows a packet from a pod of this node to one of another node through the chains that translate source addresses. The tables that iptables-nft
/// has listed are left out.
fn nft_masquerades(
    subnets: &[IpNet],
    to_peers: &[(String, IpNet)],
    iptables: &[SavedRules],
) -> io::Result<Vec<NftRule>> {
    let mut netlink = nftables::open()?;
    let mut found = Vec::new();
    let chains = base_chains(&mut netlink, Hook::Postrouting)?;
    for chain in chains.iter().filter(|chain| chain.is_nat && !is_listed(iptables, chain)) {
        for (link, dst) in to_peers {
            let of_family = |subnet: &&IpNet| subnet.addr().is_ipv4() == dst.addr().is_ipv4();
            let sees = chain.sees(dst.addr().is_ipv4());
            let Some(own) = subnets.iter().find(of_family).filter(|_| sees) else { continue };
            let (Some(from), Some(to)) = (own.trunc().hosts().last(), dst.hosts().last()) else { continue };
            let packet = Packet { from, to, proto: None, port: None };
            let tested = Tested::new(&packet, Some(BRIDGE), Some(link));
            let outcome = nft::follow(&mut netlink, chain, tested)?;
            // The packet may never come to a rule behind one that is not evaluated.
            let is_certain = outcome.not_evaluated.is_none_or(|(fate, _)| fate == Fate::SourceTranslated);
            if let Some((Fate::SourceTranslated, rule)) = outcome.fate.filter(|_| is_certain) {
                found.push(NftRule { chain: chain.path(), rule });
            }
        }
    }
    found.dedup();
    Ok(found)
}

/// Returns true if the link of kube-proxy has addresses of services, and IPVS carries none.
fn ipvs_is_empty(links: &[Link], addrs: &[Addr]) -> bool {
    let link = links.iter().find(|link| link.name == LINK);
    let has_services = link.is_some_and(|link| addrs.iter().any(|addr| addr.index == link.index && addr.global));
    has_services && fs::read_to_string("/proc/thread-self/net/ip_vs").is_ok_and(|table| lists_no_service(&table))
}

fn lists_no_service(table: &str) -> bool {
    let is_service = |line: &str| ["TCP ", "UDP ", "SCTP ", "FWM "].iter().any(|begin| line.starts_with(begin));
    !table.lines().any(is_service)
}

fn kube_proxy() -> Option<String> {
    let own = net_namespace(Path::new("/proc/thread-self")).ok()?;
    let is_here = |process: &Process| net_namespace(&process.dir).is_ok_and(|netns| netns == own);
    let is_kube_proxy = |process: &Process| process.name() == "kube-proxy" && is_here(process);
    processes::all().ok()?.into_iter().find(is_kube_proxy).map(|process| process.to_string())
}

#[cfg(test)]
mod tests {
    use super::lists_no_service;

    #[test]
    fn a_table_of_ipvs_without_a_service_has_only_its_head() {
        let head = "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n";
        assert!(lists_no_service(head));
        assert!(!lists_no_service(&format!(
            "{head}TCP  0A600001:01BB rr\n  -> 0A050102:1F90      Masq    1      0          0\n"
        )));
    }
}
