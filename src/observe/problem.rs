// SPDX-License-Identifier: Apache-2.0
//! What is wrong with a node, for people and for programs.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::observe::fault::FaultKind;

/// What a problem concerns. Programs may rely on these words (docs/operations.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProblemKind {
    /// The start: there is no lease yet.
    Start,
    /// The list of leases from the store.
    PeerList,
    /// The own device.
    Device,
    /// The kernel.
    Kernel,
    /// subnet.env.
    SubnetFile,
    /// The traffic rules, and rules of other programs.
    Rules,
    /// The uplink.
    Uplink,
    /// The own lease.
    Lease,
    /// The tunnel of the backend udp.
    Tunnel,
    /// The commands of the backend extension.
    Extension,
    /// The CNI configuration.
    Cni,
    /// The store.
    Store,
    /// net-conf, and changes of it.
    NetConf,
    /// A sysctl.
    Sysctl,
    /// The checksum offload of the tunnel devices.
    Offload,
    /// What flags or net-conf ask for, but this node does not do.
    LeftOut,
    /// Another program that undoes again and again what the agent writes.
    Fight,
    /// The fence.
    Fence,
    /// The tunnel guard.
    Guard,
    /// Leases that claim the same.
    Claims,
    /// Probes: what keeps them from finding anything out.
    Probes,
    /// Peers that packets do not reach.
    Unreachable,
    /// A word that this version does not know.
    #[serde(other)]
    Other,
}

impl From<FaultKind> for ProblemKind {
    fn from(kind: FaultKind) -> ProblemKind {
        match kind {
            FaultKind::Device => ProblemKind::Device,
            FaultKind::Kernel => ProblemKind::Kernel,
            FaultKind::SubnetFile => ProblemKind::SubnetFile,
            FaultKind::TrafficRules => ProblemKind::Rules,
            FaultKind::Uplink => ProblemKind::Uplink,
            FaultKind::NoLease | FaultKind::LeaseLost | FaultKind::LeaseMissing | FaultKind::LeaseContested => {
                ProblemKind::Lease
            }
            FaultKind::Tunnel => ProblemKind::Tunnel,
            FaultKind::Extension => ProblemKind::Extension,
        }
    }
}

/// Something that is wrong with a node. It is shown as its text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// What it concerns.
    pub kind: ProblemKind,
    /// What is wrong, in one sentence. If there is a command, the sentence contains it, too.
    pub text: String,
    /// The command that ends it, to be pasted into a shell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl Problem {
    /// Returns a problem for which no command is known.
    pub fn new(kind: ProblemKind, text: impl Into<String>) -> Problem {
        Problem { kind, text: text.into(), command: None }
    }

    /// Returns a problem of this kind for each text.
    pub fn each(kind: ProblemKind, texts: impl IntoIterator<Item = String>) -> impl Iterator<Item = Problem> {
        texts.into_iter().map(move |text| Problem::new(kind, text))
    }

    /// Returns the same problem with the command that ends it. `weft doctor` shows it to be pasted, so it must not contain what another node
    /// says of itself.
    #[must_use]
    pub fn with_command(self, command: impl Into<String>) -> Problem {
        Problem { command: Some(command.into()), ..self }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_reads_the_kind_and_the_command() {
        let down = Problem::new(ProblemKind::Uplink, "eth0 is down; run: ip link set eth0 up");
        let down = down.with_command("ip link set eth0 up");
        let json =
            r#"{"kind":"uplink","text":"eth0 is down; run: ip link set eth0 up","command":"ip link set eth0 up"}"#;
        assert_eq!(serde_json::to_string(&down).unwrap(), json);
        let other = Problem::new(ProblemKind::NetConf, "not applied");
        assert_eq!(serde_json::to_string(&other).unwrap(), r#"{"kind":"net-conf","text":"not applied"}"#);
        assert_eq!(serde_json::from_str::<Problem>(json).unwrap(), down);
    }

    /// The reason of an Event is an interface: programs that collect Events search for it.
    #[test]
    fn each_fault_has_its_reason_and_is_a_problem_of_its_kind() {
        let page = include_str!("../../docs/messages.md");
        for (fault, reason, kind) in [
            (FaultKind::NoLease, "NoLease", ProblemKind::Lease),
            (FaultKind::Device, "DeviceFault", ProblemKind::Device),
            (FaultKind::Kernel, "KernelFault", ProblemKind::Kernel),
            (FaultKind::SubnetFile, "SubnetFileFault", ProblemKind::SubnetFile),
            (FaultKind::TrafficRules, "TrafficRulesFault", ProblemKind::Rules),
            (FaultKind::Uplink, "UplinkFault", ProblemKind::Uplink),
            (FaultKind::LeaseLost, "LeaseLost", ProblemKind::Lease),
            (FaultKind::LeaseMissing, "LeaseMissing", ProblemKind::Lease),
            (FaultKind::LeaseContested, "LeaseContested", ProblemKind::Lease),
            (FaultKind::Tunnel, "TunnelFault", ProblemKind::Tunnel),
            (FaultKind::Extension, "ExtensionFault", ProblemKind::Extension),
        ] {
            assert_eq!((fault.reason(), ProblemKind::from(fault)), (reason, kind));
            assert!(page.contains(&format!("`{reason}`")), "{reason}");
        }
    }

    #[test]
    fn the_page_for_operators_lists_the_kinds_as_they_are_written() {
        let page = include_str!("../../docs/operations.md");
        let (_, table) = page.split_once("| kind | concerns |\n|---|---|\n").unwrap();
        let rows = table.lines().map_while(|line| line.strip_prefix("| `")?.split('`').next());
        let kinds: Vec<&str> = rows.collect();
        assert!(kinds.len() > 20, "{kinds:?}");
        for kind in kinds {
            let json = format!("\"{kind}\"");
            let known: ProblemKind = serde_json::from_str(&json).unwrap();
            assert_eq!(serde_json::to_string(&known).unwrap(), json);
            assert_ne!(known, ProblemKind::Other);
        }
    }

    /// The agent may be of a later version than the program that asks it.
    #[test]
    fn a_kind_of_a_later_version_is_no_error() {
        let read: Problem = serde_json::from_str(r#"{"kind":"of-the-future","text":"new"}"#).unwrap();
        assert_eq!(read, Problem::new(ProblemKind::Other, "new"));
    }
}
