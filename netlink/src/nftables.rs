// SPDX-License-Identifier: Apache-2.0
//! What all readers and writers of nftables share: the kinds of messages, numbers in attributes, and the base chains of the kernel
//! (linux/netfilter/nf_tables.h). Numbers in attributes are big-endian.

pub mod attributes;

use std::io;

use attributes::{CHAIN_HOOK, CHAIN_NAME, CHAIN_POLICY, CHAIN_TYPE, HOOK_NUMBER, HOOK_PRIORITY, POLICY_DROP};

use crate::socket::Netlink;
use crate::wire::{attr, attr_after, messages, text};

/// NFNL_SUBSYS_NFTABLES, in the upper byte of each kind of message.
pub const SUBSYSTEM: u16 = 10 << 8;
/// NFT_MSG_NEWTABLE.
pub const NEWTABLE: u16 = SUBSYSTEM;
/// NFT_MSG_GETTABLE.
pub const GETTABLE: u16 = SUBSYSTEM | 1;
/// NFT_MSG_DELTABLE.
pub const DELTABLE: u16 = SUBSYSTEM | 2;
/// NFT_MSG_NEWCHAIN.
pub const NEWCHAIN: u16 = SUBSYSTEM | 3;
/// NFT_MSG_GETCHAIN.
pub const GETCHAIN: u16 = SUBSYSTEM | 4;
/// NFT_MSG_DELCHAIN.
pub const DELCHAIN: u16 = SUBSYSTEM | 5;
/// NFT_MSG_NEWRULE.
pub const NEWRULE: u16 = SUBSYSTEM | 6;
/// NFT_MSG_GETRULE.
pub const GETRULE: u16 = SUBSYSTEM | 7;
/// NFT_MSG_DELRULE.
pub const DELRULE: u16 = SUBSYSTEM | 8;
/// NFT_MSG_NEWSET.
pub const NEWSET: u16 = SUBSYSTEM | 9;
/// NFT_MSG_GETSET.
pub const GETSET: u16 = SUBSYSTEM | 10;
/// NFT_MSG_NEWSETELEM.
pub const NEWSETELEM: u16 = SUBSYSTEM | 12;
/// NFT_MSG_GETSETELEM.
pub const GETSETELEM: u16 = SUBSYSTEM | 13;
/// NFT_MSG_DELSETELEM.
pub const DELSETELEM: u16 = SUBSYSTEM | 14;
/// NFT_MSG_NEWGEN.
pub const NEWGEN: u16 = SUBSYSTEM | 15;
/// NFT_MSG_GETGEN.
pub const GETGEN: u16 = SUBSYSTEM | 16;

/// Length of `struct nfgenmsg` in bytes.
pub const NFGENMSG: usize = 4;
/// The attribute that names the table, the same in every kind of message.
pub const TABLE_NAME: u16 = 1;
/// NFTA_DATA_VALUE.
pub const DATA_VALUE: u16 = 1;
/// NFTA_DATA_VERDICT.
pub const DATA_VERDICT: u16 = 2;

/// A point in the kernel that packets pass (`enum nf_inet_hooks`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// Before the routing decision.
    Prerouting = 0,
    /// Packets for this host.
    Input = 1,
    /// Forwarded packets.
    Forward = 2,
    /// Packets of this host.
    Output = 3,
    /// After the routing decision.
    Postrouting = 4,
}

/// A base chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseChain {
    /// `ip`, `ip6` or `inet`.
    pub family: &'static str,
    /// The family as the kernel numbers it (`NFPROTO_*`).
    pub number: u8,
    /// The name of its table.
    pub table: String,
    /// Its name.
    pub name: String,
    /// It translates addresses, and sees only the first packet of a connection.
    pub is_nat: bool,
    /// Chains with a smaller number come first.
    pub priority: i32,
    /// Its policy is drop.
    pub drops: bool,
}

impl BaseChain {
    /// Returns true if packets of this family pass the chain.
    pub fn sees(&self, is_ipv4: bool) -> bool {
        self.family != if is_ipv4 { "ip6" } else { "ip" }
    }

    /// Returns family, table and name, as the program `nft` takes them.
    pub fn path(&self) -> String {
        format!("{} {} {}", self.family, self.table, self.name)
    }
}

/// Returns the base chains of a hook, in the order in which packets pass them. The kernel visits every chain of the network namespace for this.
///
/// # Errors
/// The chains cannot be listed.
pub fn base_chains(netlink: &mut Netlink, hook: Hook) -> io::Result<Vec<BaseChain>> {
    let data = netlink.dump(GETCHAIN, |w, kind, flags| w.begin(kind, flags, &[0; NFGENMSG]))?;
    let chain = |payload: &[u8]| {
        let number = *payload.first()?;
        let family = match number {
            1 => "inet",
            2 => "ip",
            10 => "ip6",
            _ => return None,
        };
        let get = |kind: u16| attr_after(payload, NFGENMSG, kind);
        let position = get(CHAIN_HOOK)?;
        let of_hook = |kind: u16| attr(position, kind).map(be32_of);
        (of_hook(HOOK_NUMBER)? == hook as u32).then(|| BaseChain {
            family,
            number,
            table: get(TABLE_NAME).map(text).unwrap_or_default().to_owned(),
            name: get(CHAIN_NAME).map(text).unwrap_or_default().to_owned(),
            is_nat: get(CHAIN_TYPE).map(text) == Some("nat"),
            priority: of_hook(HOOK_PRIORITY).unwrap_or(0).cast_signed(),
            drops: get(CHAIN_POLICY).is_some_and(|policy| be32_of(policy) == POLICY_DROP),
        })
    };
    let chains = messages(&data).filter(|message| message.kind == NEWCHAIN);
    let mut chains: Vec<BaseChain> = chains.filter_map(|message| chain(message.payload)).collect();
    chains.sort_by_key(|chain| chain.priority);
    Ok(chains)
}

/// Reads a big-endian number. 0 if the value has another length.
pub fn be32_of(value: &[u8]) -> u32 {
    value.try_into().map_or(0, u32::from_be_bytes)
}

/// Reads the handle of a rule: the number by which the kernel knows it in its table.
pub fn handle_of(value: &[u8]) -> u64 {
    value.first_chunk::<8>().map_or_else(|| u64::from(be32_of(value)), |bytes| u64::from_be_bytes(*bytes))
}
