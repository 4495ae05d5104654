// SPDX-License-Identifier: Apache-2.0
//! The rules of iptables, as its programs list them. Nothing is changed: `iptables-legacy-save` would create a table that does not exist, so it is
//! called only if the kernel has that table.

use weft_cni::iptables::{Flavour, Saved, Table};
use weft_netlink::nftables::BaseChain;
use weft_subnet::cidr::Family;

use crate::programs::{LIMIT, ProgramError, run};

/// The tables of iptables that its programs list.
const LISTED: [&str; 2] = ["filter", "nat"];
/// The table of filters.
pub(crate) const FILTER: &str = "filter";
/// The tables in which filters are rare, in the order in which packets pass them at a hook.
pub(crate) const SIDE: [&str; 3] = ["raw", "mangle", "security"];

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
    pub(crate) fn filters(&self) -> impl Iterator<Item = (&'static str, &Table)> {
        let names = ["raw", "mangle", FILTER, "security"];
        names.into_iter().filter_map(|name| Some((name, self.tables.table(name)?)))
    }
}

#[cfg(test)]
impl SavedRules {
    /// Returns rules of the table nat that iptables-nft has.
    pub(crate) fn of_nat(program: &str, nat: &str) -> SavedRules {
        let tables = Saved::parse(&format!("*nat\n{nat}\n"));
        SavedRules { program: program.to_owned(), in_nftables: true, tables }
    }
}

/// Lists the tables of one family: those of iptables-nft, or these of iptables-legacy. Where the program with the flavour in its name is
/// missing, the plain one may be of this flavour.
pub(crate) fn read(family: Family, legacy: Option<&str>) -> Result<SavedRules, ProgramError> {
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

/// Lists those of the tables in [`SIDE`] that exist. `present` contains the names of the tables of the kernel, one on each line: to list a table
/// that does not exist would create it.
pub(crate) fn side_tables(program: &str, present: &str) -> Result<String, ProgramError> {
    let existing = SIDE.into_iter().filter(|name| present.lines().any(|table| table == *name));
    existing.map(|name| run(&format!("{program}-save"), &["-t", name], LIMIT)).collect()
}

/// Returns true if this is a chain of a table that iptables-nft lists.
pub(crate) fn is_of_iptables(chain: &BaseChain) -> bool {
    chain.family != "inet" && LISTED.contains(&chain.table.as_str())
}

/// Returns true if a program of iptables has listed the table of this chain.
pub(crate) fn is_listed(iptables: &[SavedRules], chain: &BaseChain) -> bool {
    let lists = |saved: &SavedRules| saved.in_nftables && saved.program.starts_with("ip6") == (chain.family == "ip6");
    is_of_iptables(chain) && iptables.iter().any(lists)
}
