// SPDX-License-Identifier: Apache-2.0
//! What other networks for pods left behind on this node.
//!
//! Network policies that no program enforces are not looked for (docs/adr/023-explain-and-doctor.md). An object without an engine has no trace on a node,
//! the account of the agents may not read the objects, and an engine that is not known here would be a wrong alarm.

use weft_cni::iptables::{Saved, target, words};
use weft_netlink::rtnl::Link;

use crate::processes;
use crate::saved_rules::SavedRules;

/// The chains of the kernel, from which rules are reached.
const BUILT_IN: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// A network for pods, and how it is known.
struct Known {
    name: &'static str,
    /// The names of its processes, as /proc/PID/comm has them, which is at most 15 bytes.
    programs: &'static [&'static str],
    /// How its chains of iptables begin.
    chains: &'static [&'static str],
    /// Its links on the host.
    links: &'static [&'static str],
}

const KNOWN: [Known; 5] = [
    Known {
        name: "Calico",
        programs: &["calico-node", "calico-felix", "felix"],
        chains: &["cali-"],
        links: &["vxlan.calico", "wireguard.cali"],
    },
    Known {
        name: "Cilium",
        programs: &["cilium-agent"],
        chains: &["CILIUM_", "OLD_CILIUM_"],
        links: &["cilium_host", "cilium_vxlan"],
    },
    Known {
        name: "kube-router",
        // k3s has its network policies inside.
        programs: &["kube-router", "k3s-server", "k3s-agent", "k3s"],
        chains: &["KUBE-ROUTER-", "KUBE-POD-FW-", "KUBE-NWPLCY-"],
        links: &["kube-bridge"],
    },
    Known { name: "Weave Net", programs: &["weaver"], chains: &["WEAVE"], links: &["weave", "vxlan-6784"] },
    Known { name: "Antrea", programs: &["antrea-agent"], chains: &["ANTREA-"], links: &["antrea-gw0"] },
];

/// Rules of iptables that a network left behind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftRules {
    /// The program that shows them.
    pub program: String,
    /// The first rule that leads to them.
    pub rule: String,
    /// How the names of their chains begin.
    pub prefix: &'static str,
}

/// What a network left behind: its rules or links are here, and none of its programs runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover {
    /// The network.
    pub network: &'static str,
    /// Its rules of iptables.
    pub rules: Option<LeftRules>,
    /// Its links.
    pub links: Vec<String>,
}

/// Looks for what networks without a running program have left. Where not all processes are seen, nothing is certain.
pub(super) fn read(links: &[Link], iptables: &[SavedRules]) -> Vec<Leftover> {
    if processes::unreadable().is_some() {
        return Vec::new();
    }
    let left = |known: &Known| {
        let left = left_by(known, links, iptables);
        let is_there = left.rules.is_some() || !left.links.is_empty();
        // The processes are listed after the rules: a network that has started meanwhile must not look like one that is gone.
        (is_there && !processes::is_running(known.programs)).then_some(left)
    };
    KNOWN.iter().filter_map(left).collect()
}

fn left_by(known: &Known, links: &[Link], iptables: &[SavedRules]) -> Leftover {
    let names = links.iter().filter(|link| known.links.contains(&link.name.as_str()));
    let rules = iptables.iter().find_map(|saved| {
        let (rule, prefix) = jump(known, &saved.tables)?;
        Some(LeftRules { program: saved.program.clone(), rule, prefix })
    });
    Leftover { network: known.name, rules, links: names.map(|link| link.name.clone()).collect() }
}

/// Returns the first rule by which a chain of the kernel leads to one of this network, and how the name of that one begins.
fn jump(known: &Known, saved: &Saved) -> Option<(String, &'static str)> {
    for table in ["filter", "nat"].into_iter().filter_map(|name| saved.table(name)) {
        for chain in BUILT_IN {
            for rule in table.get(chain).into_iter().flat_map(|chain| &chain.rules) {
                let words = words(rule);
                let Some((target, _)) = target(&words) else { continue };
                if let Some(prefix) = known.chains.iter().find(|prefix| target.starts_with(**prefix)) {
                    return Some((format!("-A {chain} {rule}"), *prefix));
                }
            }
        }
    }
    None
}
