// SPDX-License-Identifier: Apache-2.0
//! An agent that ran on this node, and answers no more.

use std::path::PathBuf;

use weft_backends::owner;
use weft_netlink::rtnl::Link;

use super::finding::{NodeFinding, finding};
use super::node::{AgentAnswer, NodeSources};

/// flannel's program. weft may run under this name, too.
const FLANNELD: &str = "flanneld";

/// What is known about an agent that does not answer.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct AbsentAgent {
    /// The agents that run with the same subnet file, for people: name and process ID.
    pub running: Vec<String>,
    /// Files that an agent of weft with this subnet file has left in its directory of state.
    pub files: Vec<PathBuf>,
}

/// Returns what shows that an agent of weft ran here: one of its devices, or one of its files. flannel writes the subnet file, too, so that
/// file shows nothing.
fn trace(sources: &NodeSources, links: &[Link]) -> Option<String> {
    let alias = format!("{}{}", owner::ALIAS, sources.subnet_file.display());
    let device = links.iter().find(|link| link.alias == alias).map(|link| format!("its device {}", link.name));
    device.or_else(|| sources.absent_agent.files.first().map(|file| format!("its file {}", file.display())))
}

/// Returns the finding about an agent that does not answer, if there should be one.
pub(super) fn absent_agent(sources: &NodeSources, links: &[Link]) -> Option<NodeFinding> {
    if sources.agent != AgentAnswer::None {
        return None;
    }
    let socket = sources.socket.display();
    let running = &sources.absent_agent.running;
    // Without its socket, weft under flannel's name cannot be told from flannel.
    if running.iter().any(|agent| agent.starts_with(FLANNELD)) {
        return None;
    }
    if let Some(agent) = running.first() {
        let evidence =
            format!("{agent} runs, and no agent answers on {socket}: its socket was removed, or it has another one");
        let remedy =
            "systemctl restart weft, which makes the socket again; or name the agent's own socket with --socket";
        return Some(finding(evidence, remedy.to_owned()));
    }
    let evidence = format!(
        "no agent answers on {socket}, although one has run here ({} is there): nothing is repaired, no new node is reached, and the lease \
         is not renewed",
        trace(sources, links)?
    );
    let remedy = "systemctl start weft; `systemctl status weft` (on Kubernetes: kubectl get pods -A -o wide) says why it does not run; if weft \
                  is not wanted any more: weft cleanup";
    Some(finding(evidence, remedy.to_owned()))
}
