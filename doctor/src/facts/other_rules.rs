// SPDX-License-Identifier: Apache-2.0
//! The rules of other programs, as the programs that list them print them, and as the kernel has them.

use std::fs;
use std::io;

use ipnet::IpNet;
use weft_cni::iptables::legacy_tables_file;
use weft_netlink::nftables::{self, Hook, base_chains};
use weft_subnet::cidr::Family;

use super::arp_tables;
use super::tables::Tables;
use super::unserved::{self, Unserved};
use super::ways::WayToPeers;
use crate::kernel::entries::Packet;
use crate::kernel::ipvs;
use crate::kernel::nft;
use crate::kernel::rules::{Fate, Tested};
use crate::known_links::{BRIDGE, KUBE_IPVS};
use crate::processes::{self, ProcessList};
use crate::programs::{LIMIT, run};
use crate::saved_rules::{self, SavedRules, is_listed};

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
    /// A service that pods use, and that nothing carries.
    pub unserved: Option<Unserved>,
    /// What could not be read, each once.
    pub unreadable: Vec<String>,
}

impl RuleFacts {
    /// Returns true if rules of kube-proxy carry services: packets are led to its chain of iptables, or nftables has its table.
    pub(crate) fn carry_services(&self) -> bool {
        let in_iptables = |saved: &SavedRules| {
            let chain = saved.tables.table("nat").and_then(|nat| nat.get("PREROUTING"));
            chain.is_some_and(|chain| chain.rules.iter().any(|rule| rule.ends_with("-j KUBE-SERVICES")))
        };
        let is_table = |line: &str| line.starts_with("table ") && line.ends_with(" kube-proxy {");
        self.nft.iter().flat_map(|nft| nft.lines()).any(is_table) || self.iptables.iter().any(in_iptables)
    }

    /// Returns true if everything was read, and there are neither rules of kube-proxy nor IPVS.
    pub(crate) fn carry_certainly_none(&self) -> bool {
        self.unreadable.is_empty() && self.nft.is_some() && !self.ipvs && !self.carry_services()
    }

    fn could_not_read(&mut self, what: String) {
        if !self.unreadable.contains(&what) {
            self.unreadable.push(what);
        }
    }
}

/// Reads the rules. `subnets` are those of this node.
pub(super) fn read(
    tables: &Tables<'_>,
    subnets: &[IpNet],
    to_peers: &[WayToPeers],
    processes: &ProcessList,
) -> RuleFacts {
    let mut facts = RuleFacts {
        kube_proxy: processes.here(&["kube-proxy"]).first().map(ToString::to_string),
        ipvs: tables.links.iter().any(|link| link.name == KUBE_IPVS),
        ipvs_is_empty: ipvs_is_empty(tables),
        arptables: arp_tables::read(),
        ..RuleFacts::default()
    };
    for family in Family::BOTH {
        let legacy = fs::read_to_string(legacy_tables_file(family)).unwrap_or_default();
        for tables in [None, Some(legacy.as_str())] {
            match saved_rules::read(family, tables) {
                Ok(saved) => facts.iptables.push(saved),
                Err(error) => facts.could_not_read(error.to_string()),
            }
        }
    }
    match run("nft", &["--stateless", "list", "ruleset"], LIMIT) {
        Ok(text) => facts.nft = Some(text),
        Err(error) => facts.could_not_read(error.to_string()),
    }
    match nft_masquerades(subnets, to_peers, &facts.iptables) {
        Ok(rules) => facts.nft_masquerades = rules,
        // A kernel without nftables has no such rules.
        Err(error) if weft_netlink::socket::absent(&error) => {}
        Err(error) => facts.could_not_read(format!("nftables cannot be read: {error}")),
    }
    if facts.carry_certainly_none() && processes::unreadable().is_none() {
        facts.unserved = unserved::read(processes);
    }
    facts
}

/// Follows a packet from a pod of this node to one of another node through the chains that translate source addresses. The tables that iptables-nft
/// has listed are left out.
fn nft_masquerades(subnets: &[IpNet], to_peers: &[WayToPeers], iptables: &[SavedRules]) -> io::Result<Vec<NftRule>> {
    let mut netlink = nftables::open()?;
    let mut found = Vec::new();
    let chains = base_chains(&mut netlink, Hook::Postrouting)?;
    for chain in chains.iter().filter(|chain| chain.is_nat && !is_listed(iptables, chain)) {
        for WayToPeers { link, example: dst } in to_peers {
            let of_family = |subnet: &&IpNet| subnet.addr().is_ipv4() == dst.addr().is_ipv4();
            let sees = chain.sees(dst.addr().is_ipv4());
            let Some(own) = subnets.iter().find(of_family).filter(|_| sees) else { continue };
            let (Some(from), Some(to)) = (own.trunc().hosts().last(), dst.hosts().last()) else { continue };
            let packet = Packet { from, to, proto: None, port: None };
            let tested = Tested::new(&packet, Some(BRIDGE), Some(link));
            let outcome = nft::follow(&mut netlink, chain, tested)?;
            if let Some((Fate::SourceTranslated, rule)) = outcome.certain() {
                found.push(NftRule { chain: chain.path(), rule });
            }
        }
    }
    found.dedup();
    Ok(found)
}

/// Returns true if the link of kube-proxy has addresses of services, and IPVS carries none.
fn ipvs_is_empty(tables: &Tables<'_>) -> bool {
    let link = tables.links.iter().find(|link| link.name == KUBE_IPVS);
    let has_services = link.is_some_and(|link| tables.addrs.iter().any(|addr| addr.index == link.index && addr.global));
    has_services && ipvs::table().is_ok_and(|table| lists_no_service(&table))
}

fn lists_no_service(table: &str) -> bool {
    let is_service = |line: &str| ["TCP ", "UDP ", "SCTP ", "FWM "].iter().any(|begin| line.starts_with(begin));
    !table.lines().any(is_service)
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
