// SPDX-License-Identifier: Apache-2.0
//! Removes masquerade rules that the bridge and ptp plugins leave behind. These plugins find the rules to remove by the
//! addresses in the pod's namespace. They remove nothing if the namespace is gone, or if they were killed in between.
//!
//! The comment of a rule names the network and the container. This module finds the rules by it, in iptables and
//! nftables.

use std::io;
use std::process::{Command, ExitStatus, Output};

use serde_json::Value;

use crate::iptables::{value, words};

/// Family, table and chain of the rules that the plugins write with nftables.
const NFT_CHAIN: [&str; 3] = ["inet", "cni_plugins_masquerade", "masq_checks"];

/// Why a command failed that lists or removes rules.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The program exists, but cannot be started.
    #[error("{command}: {source}")]
    Start {
        /// The program with its arguments.
        command: String,
        /// The cause.
        source: io::Error,
    },
    /// The program reported an error.
    #[error("{command}: {status}: {stderr}")]
    Failed {
        /// The program with its arguments.
        command: String,
        /// How it ended.
        status: ExitStatus,
        /// What it wrote to standard error.
        stderr: String,
    },
}

/// Removes the rules of all containers of a network for which `is_alive` returns false.
/// Returns everything that failed. A missing program is not an error, because then there are no rules of it.
pub fn remove_stale(network: &str, is_alive: &dyn Fn(&str) -> bool) -> Vec<CommandError> {
    let mut failed = Vec::new();
    for program in ["iptables", "ip6tables"] {
        failed.extend(iptables(program, network, is_alive).err());
    }
    failed.extend(nftables(network, is_alive).err());
    failed
}

fn iptables(program: &str, network: &str, is_alive: &dyn Fn(&str) -> bool) -> Result<(), CommandError> {
    let Some(text) = run(program, &["-w", "-t", "nat", "-S"])? else { return Ok(()) };
    for command in removals(&text, network, is_alive) {
        let words: Vec<&str> = ["-w", "-t", "nat"].into_iter().chain(command.iter().map(String::as_str)).collect();
        note!("{program} {}", words.join(" "));
        run(program, &words)?;
    }
    Ok(())
}

/// Returns the arguments of the iptables calls that remove the stale rules of a listing. The jumps come first, then the
/// chains that they led to.
fn removals(listing: &str, network: &str, is_alive: &dyn Fn(&str) -> bool) -> Vec<Vec<String>> {
    let mut jumps = Vec::new();
    let mut chains: Vec<String> = Vec::new();
    for line in listing.lines() {
        let words = words(line);
        let [add, chain, rest @ ..] = words.as_slice() else { continue };
        let Some(comment) = value(rest, "--comment").filter(|_| add == "-A") else { continue };
        let id = comment.strip_prefix(&format!("name: \"{network}\" id: \"")).and_then(|rest| rest.strip_suffix('"'));
        if id.is_none_or(is_alive) {
            continue;
        }
        let (own, jump) = (chain.starts_with("CNI-"), value(rest, "-j").filter(|target| target.starts_with("CNI-")));
        if let Some(target) = jump.filter(|_| !own) {
            jumps.push(["-D".to_owned(), chain.clone()].into_iter().chain(rest.iter().cloned()).collect());
            chains.push(target.to_owned());
        } else if own {
            chains.push(chain.clone());
        }
    }
    chains.sort();
    chains.dedup();
    let delete = chains.iter().flat_map(|chain| ["-F", "-X"].map(|verb| vec![verb.to_owned(), chain.clone()]));
    jumps.into_iter().chain(delete).collect()
}

fn nftables(network: &str, is_alive: &dyn Fn(&str) -> bool) -> Result<(), CommandError> {
    let [family, table, chain] = NFT_CHAIN;
    let Some(text) = run("nft", &["-j", "-a", "list", "chain", family, table, chain])? else { return Ok(()) };
    for handle in stale_handles(&text, network, is_alive) {
        run("nft", &["delete", "rule", family, table, chain, "handle", &handle.to_string()])?;
    }
    Ok(())
}

/// Returns the handles of the rules whose comment names a container that is not alive. The comment is `HASH, net:
/// NETWORK, if: IFNAME, id: CONTAINER`.
fn stale_handles(listing: &str, network: &str, is_alive: &dyn Fn(&str) -> bool) -> Vec<u64> {
    let all: Value = serde_json::from_str(listing).unwrap_or_default();
    let rules = all["nftables"].as_array().into_iter().flatten().map(|entry| &entry["rule"]);
    let stale = |rule: &&Value| {
        let comment = rule["comment"].as_str().unwrap_or_default();
        // A comment has at most 128 bytes, so the container ID of a longer one may be truncated. Such a rule is kept.
        let is_complete = comment.len() < 128;
        let rest = comment.split_once(", ").map(|(_, rest)| rest.strip_prefix(&format!("net: {network}, if: ")));
        let id = rest.flatten().and_then(|rest| rest.split_once(", id: ")).map(|(_, id)| id);
        is_complete && id.is_some_and(|id| !is_alive(id))
    };
    rules.filter(stale).filter_map(|rule| rule["handle"].as_u64()).collect()
}

/// Messages of iptables which mean that the kernel does not have the table, so that there is nothing to list. [`run`]
/// knows those of nft.
const NO_TABLE: [&str; 5] = [
    "does not exist",
    "do you need to insmod",
    "Protocol not supported",
    "Operation not supported",
    "Address family not supported",
];

/// Runs a program and returns its standard output. Returns `None` if the program is not installed, or if it was to list
/// a table that does not exist.
fn run(program: &str, words: &[&str]) -> Result<Option<String>, CommandError> {
    let command = || format!("{program} {}", words.join(" "));
    let Output { status, stdout, stderr } = match Command::new(program).args(words).env("LC_ALL", "C").output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        output => output.map_err(|source| CommandError::Start { command: command(), source })?,
    };
    if status.success() {
        return Ok(Some(String::from_utf8_lossy(&stdout).into_owned()));
    }
    let listing = words.contains(&"list") || words.contains(&"-S");
    let stderr = String::from_utf8_lossy(&stderr);
    // All other failures, such as a held lock or a missing right, are errors: there may be rules, and the next GC must
    // try again.
    let no_table = NO_TABLE.iter().any(|message| stderr.contains(message));
    // iptables prints the same message if its lock file is missing.
    let no_chain = program == "nft" && stderr.contains("No such file or directory");
    if listing && (no_table || no_chain) {
        return Ok(None);
    }
    Err(CommandError::Failed { command: command(), status, stderr: stderr.trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removals_match_only_rules_of_dead_containers() {
        let listing = r#"-P POSTROUTING ACCEPT
-N CNI-aaaaaaaaaaaaaaaaaaaaaaaa
-N CNI-bbbbbbbbbbbbbbbbbbbbbbbb
-A POSTROUTING -s 10.5.1.2/32 -m comment --comment "name: \"cbr0\" id: \"dead\"" -j CNI-aaaaaaaaaaaaaaaaaaaaaaaa
-A POSTROUTING -s 10.5.1.3/32 -m comment --comment "name: \"cbr0\" id: \"lives\"" -j CNI-cccccccccccccccccccccccc
-A POSTROUTING -s 10.5.1.4/32 -m comment --comment "name: \"other\" id: \"dead\"" -j CNI-dddddddddddddddddddddddd
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A CNI-aaaaaaaaaaaaaaaaaaaaaaaa -d 10.5.1.0/24 -m comment --comment "name: \"cbr0\" id: \"dead\"" -j ACCEPT
-A CNI-bbbbbbbbbbbbbbbbbbbbbbbb ! -d 224.0.0.0/4 -m comment --comment "name: \"cbr0\" id: \"gone\"" -j MASQUERADE
"#;
        let commands: Vec<_> = removals(listing, "cbr0", &|id| id == "lives").iter().map(|c| c.join(" ")).collect();
        let wanted = [
            "-D POSTROUTING -s 10.5.1.2/32 -m comment --comment name: \"cbr0\" id: \"dead\" -j CNI-aaaaaaaaaaaaaaaaaaaaaaaa",
            "-F CNI-aaaaaaaaaaaaaaaaaaaaaaaa",
            "-X CNI-aaaaaaaaaaaaaaaaaaaaaaaa",
            "-F CNI-bbbbbbbbbbbbbbbbbbbbbbbb",
            "-X CNI-bbbbbbbbbbbbbbbbbbbbbbbb",
        ];
        assert_eq!(commands, wanted);
    }

    #[test]
    fn stale_handles_are_found_by_comment() {
        let rule = |handle: u64, comment: &str| serde_json::json!({"rule": {"handle": handle, "comment": comment}});
        let long = format!("0123-4567, net: cbr0, if: eth0, id: {}", "x".repeat(92));
        let listing = serde_json::json!({"nftables": [
            {"metainfo": {}},
            rule(1, "0123-4567, net: cbr0, if: eth0, id: dead"),
            rule(2, "0123-4567, net: cbr0, if: eth0, id: lives"),
            rule(3, "0123-4567, net: other, if: eth0, id: dead"),
            rule(4, &long),
            {"rule": {"handle": 5}},
        ]});
        assert_eq!(stale_handles(&listing.to_string(), "cbr0", &|id| id == "lives"), [1]);
    }
}
