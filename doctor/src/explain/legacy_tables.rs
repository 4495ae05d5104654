// SPDX-License-Identifier: Apache-2.0
//! The tables of iptables-legacy in which filters are rare: raw, mangle and security. Those of iptables-nft are read from nftables.

use std::fs;

use weft_cni::iptables::{Flavour, Saved, Table, builtin_chain, legacy_tables_file};
use weft_subnet::cidr::Family;

use super::explanation::{State, Step};
use super::facts::Way;
use crate::kernel::rules::{Connection, follow};
use crate::programs::ProgramError;
use crate::saved_rules::{SIDE, side_tables};

/// What these tables do with a packet.
#[derive(Debug, Default)]
pub struct Examined {
    /// A rule takes the packet out of connection tracking.
    pub untracked: bool,
    /// The chains that drop the packet, or may drop it.
    pub steps: Vec<Step>,
}

/// Follows the packet of a way through these tables. This blocks until a program of iptables has ended.
pub fn examine(way: &Way) -> Examined {
    let family = Family::of(way.packet.to);
    let program = Flavour::Legacy.program(family);
    let tables = match side_tables(&program, &fs::read_to_string(legacy_tables_file(family)).unwrap_or_default()) {
        Ok(text) => Saved::parse(&text),
        Err(ProgramError::NotInstalled(_)) => return Examined::default(),
        Err(error) => {
            return Examined { steps: vec![Step::unknown("rules", error.to_string())], ..Examined::default() };
        }
    };
    follow_all(way, SIDE.into_iter().filter_map(|name| Some((name, tables.table(name)?))), &program)
}

/// Follows the packet of a way through these tables, which this program lists.
pub(super) fn follow_all<'a>(
    way: &Way,
    tables: impl Iterator<Item = (&'static str, &'a Table)>,
    program: &str,
) -> Examined {
    let (mut found, mut tested) = (Examined::default(), way.tested());
    for (name, table) in tables {
        for hook in way.hooks() {
            let chain = builtin_chain(*hook);
            if !table.contains_key(chain) {
                continue;
            }
            let outcome = follow(table, chain, tested.at(*hook));
            if outcome.untracked {
                found.untracked = true;
                tested.connection = Connection::Untracked;
            }
            let remedy =
                format!("look at `{program} -t {name} -S {chain}`; let the packets of pods pass, or remove the rule");
            let step = outcome.step(&format!("{program} {name} {chain}"), &remedy);
            if step.state != State::Ok {
                found.steps.push(step);
            }
        }
    }
    found
}
