// SPDX-License-Identifier: Apache-2.0
//! The attributes of tables, chains, rules and sets in messages of nftables (linux/netfilter/nf_tables.h). The one that names the table
//! is the same for all of them: [`super::TABLE_NAME`].

/// NFTA_TABLE_FLAGS.
pub const TABLE_FLAGS: u16 = 2;
/// Number of chains and sets of the table.
pub const TABLE_USE: u16 = 3;
/// NFTA_TABLE_USERDATA.
pub const TABLE_USERDATA: u16 = 6;

/// NFTA_CHAIN_NAME.
pub const CHAIN_NAME: u16 = 3;
/// NFTA_CHAIN_HOOK: hook and priority of a base chain.
pub const CHAIN_HOOK: u16 = 4;
/// NFTA_CHAIN_POLICY: the verdict on packets that reach the end of a base chain.
pub const CHAIN_POLICY: u16 = 5;
/// NFTA_CHAIN_TYPE: `filter`, `nat` or `route`.
pub const CHAIN_TYPE: u16 = 7;
/// NFTA_HOOK_HOOKNUM, inside [`CHAIN_HOOK`].
pub const HOOK_NUMBER: u16 = 1;
/// NFTA_HOOK_PRIORITY, inside [`CHAIN_HOOK`].
pub const HOOK_PRIORITY: u16 = 2;
/// NFTA_HOOK_DEV, inside [`CHAIN_HOOK`]: the link of a chain that is at one link.
pub const HOOK_DEVICE: u16 = 3;
/// NFTA_HOOK_DEVS, inside [`CHAIN_HOOK`]: the list of links.
pub const HOOK_DEVICES: u16 = 4;
/// NFTA_DEVICE_NAME, inside [`HOOK_DEVICES`].
pub const HOOK_DEVICE_NAME: u16 = 1;
/// The policy NF_DROP.
pub const POLICY_DROP: u32 = 0;
/// The policy NF_ACCEPT.
pub const POLICY_ACCEPT: u32 = 1;

/// NFTA_RULE_CHAIN.
pub const RULE_CHAIN: u16 = 2;
/// NFTA_RULE_HANDLE.
pub const RULE_HANDLE: u16 = 3;
/// NFTA_RULE_EXPRESSIONS.
pub const RULE_EXPRESSIONS: u16 = 4;
/// The handle of the rule before which the rule is inserted.
pub const RULE_POSITION: u16 = 6;
/// NFTA_RULE_USERDATA.
pub const RULE_USERDATA: u16 = 7;

/// NFTA_SET_NAME.
pub const SET_NAME: u16 = 2;
/// NFTA_SET_FLAGS.
pub const SET_FLAGS: u16 = 3;
/// NFTA_SET_KEY_TYPE.
pub const SET_KEY_TYPE: u16 = 4;
/// NFTA_SET_KEY_LEN.
pub const SET_KEY_LENGTH: u16 = 5;
/// Identifies a new set within its transaction.
pub const SET_ID: u16 = 10;

/// The name of the set, in a message about its elements.
pub const ELEMENTS_SET: u16 = 2;
/// NFTA_SET_ELEM_LIST_ELEMENTS.
pub const ELEMENTS_LIST: u16 = 3;
/// One element, inside [`ELEMENTS_LIST`].
pub const ELEMENT: u16 = 1;
/// Inside [`ELEMENT`].
pub const ELEMENT_KEY: u16 = 1;
