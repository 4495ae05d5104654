// SPDX-License-Identifier: Apache-2.0
//! flanneld, or the flannel in k3s, runs beside the agent.

use std::path::Path;

use weft_subnet::env::USUAL_FILE;

use crate::facts::NodeFacts;
use crate::facts::k3s_flannel::FILE;
use crate::finding::{NodeFinding, finding};
use crate::sources::AgentAnswer;

/// flannel works on the same devices and routes as the running agent.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |agent: &String| {
        let evidence = format!(
            "{agent} runs beside the agent of weft with the same subnet file: each of them replaces devices, routes and rules of the other one"
        );
        let remedy = "stop one of them: `systemctl disable --now flanneld`, or remove its DaemonSet (docs/migrate.md)";
        finding(evidence, remedy.to_owned())
    };
    facts.other_agents.iter().map(one).chain(in_k3s(facts)).collect()
}

/// k3s has not been told to leave the network to weft. Its flannel always has the usual subnet file.
fn in_k3s(facts: &NodeFacts) -> Option<NodeFinding> {
    let k3s = facts.k3s_flannel.as_ref()?;
    let is_beside = matches!(facts.agent, AgentAnswer::Problems(_)) && facts.path == Path::new(USUAL_FILE);
    is_beside.then(|| {
        let evidence = format!(
            "{k3s} runs its own flannel beside the agent of weft, with the same subnet file: k3s has written {FILE} since it was started, which it \
             does for its flannel alone. Each of the two agents replaces devices, routes and rules of the other one"
        );
        let remedy = "set `flannel-backend: none` in /etc/rancher/k3s/config.yaml of all k3s servers, and restart k3s on every node; or stop the \
                      agent of weft";
        finding(evidence, remedy.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flannel_of_k3s_is_found_beside_an_agent_with_the_usual_subnet_file() {
        let k3s_flannel = Some("k3s-server (pid 7)".to_owned());
        let agent = AgentAnswer::Problems(Vec::new());
        let facts = NodeFacts { k3s_flannel, agent, path: USUAL_FILE.into(), ..NodeFacts::default() };
        let found = check(&facts);
        assert!(
            found.len() == 1 && found[0].evidence.starts_with("k3s-server (pid 7) runs its own flannel"),
            "{found:?}"
        );
        assert!(found[0].remedy.contains("`flannel-backend: none`"), "{found:?}");
        for other in [
            NodeFacts { k3s_flannel: None, ..facts.clone() },
            NodeFacts { agent: AgentAnswer::None, ..facts.clone() },
            NodeFacts { path: "/run/weft/b.env".into(), ..facts.clone() },
        ] {
            assert_eq!(check(&other), []);
        }
    }
}
