// SPDX-License-Identifier: Apache-2.0
//! Problems that the agent reports, or no agent answers.

use crate::facts::NodeFacts;
use crate::facts::memory_kills::MemoryKill;
use crate::finding::{NodeFinding, counted, finding};
use crate::sources::{AgentAnswer, AgentProblem, Hint, LossyPeer};

/// flannel's program. weft may run under this name, too.
const FLANNELD: &str = "flanneld";
/// The packets that VMware NSX takes for its own: before 6.2.3, and since then.
const TAKEN_BY_NSX: [&str; 2] = ["UDP port 8472", "UDP port 4789"];
/// The programs that undo again and again what the agent writes.
const FIND: &str = "find the program that does it: cron, networkd, NetworkManager, a VPN, a firewall, a second agent";

pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = match &facts.agent {
        AgentAnswer::None => absent(facts).into_iter().collect::<Vec<_>>(),
        AgentAnswer::Failed { why, stopped } => {
            let remedy = match stopped {
                Some(pid) => format!(
                    "kill -CONT {pid}; then find out who stopped it (SIGSTOP, a debugger); pods keep their network meanwhile"
                ),
                None => "read the log of the agent, and restart it if this lasts; pods keep their network".to_owned(),
            };
            vec![finding(format!("the agent does not show its status: {why}"), remedy)]
        }
        AgentAnswer::Problems(problems) => {
            problems.iter().map(|problem| reported(problem, facts.on_vmware)).chain(lossy(facts)).collect()
        }
    };
    findings.extend(killed(facts));
    findings
}

/// Returns the finding about a problem that the agent reports.
fn reported(problem: &AgentProblem, on_vmware: bool) -> NodeFinding {
    let mut remedy = remedy(&problem.hint);
    if on_vmware && matches!(&problem.hint, Hint::Dropped(packets) if TAKEN_BY_NSX.contains(&packets.as_str())) {
        remedy.push_str(
            "; if VMware NSX carries the network of this machine, it takes such a port for itself: choose another Port in net-conf, \
             neither 8472 nor 4789",
        );
    }
    finding(format!("the agent reports: {}", problem.text), remedy)
}

/// Returns what to do about a problem.
fn remedy(hint: &Hint) -> String {
    match hint {
        Hint::None => "look for this text in docs/messages.md; `weft status` shows the whole state".to_owned(),
        Hint::Command(command) => command.clone(),
        Hint::Store => "weft doctor --check-store, with the agent's flags of the store, finds out why".to_owned(),
        Hint::Unreachable => "weft mesh shows which ways are broken, and why".to_owned(),
        Hint::Fight => format!(
            "`ip monitor link address route neigh` (`bridge monitor fdb` for FDB entries, `nft monitor` for rules) shows when; {FIND}"
        ),
        Hint::Silent(address) => format!(
            "ping -c 3 {address}; if that node is up: weft status and weft doctor there, and compare its addresses with {address}"
        ),
        Hint::Dropped(packets) => format!(
            "weft doctor --only firewall on both nodes names the rule; if there is none, let {packets} pass between the nodes (security group, switch)"
        ),
        Hint::SmallMtu { uplink, mtu } => {
            // The uplink of another node may have another name.
            format!(
                "ip link set {uplink} mtu {mtu} on this node, and the same with its own uplink on every other one; or raise the MTU of the \
                 link between them"
            )
        }
    }
}

/// Packets to some peers get lost now and then.
fn lossy(facts: &NodeFacts) -> impl Iterator<Item = NodeFinding> {
    let uplink = facts.path_links.links.iter().find(|link| link.is_uplink);
    let link = uplink.map(|link| format!(" show {}", link.name)).unwrap_or_default();
    facts.lossy.iter().map(move |LossyPeer { name, lost, asked }| {
        let remedy = format!(
            "`ip -s link{link}` on both nodes shows errors and dropped packets of the card, then look at the switch; weft doctor --only \
             firewall,traffic-control names what drops packets at random"
        );
        finding(format!("packets to {name} get lost: {lost} of the last {asked}"), remedy)
    })
}

/// Returns what shows that an agent of weft ran here: one of its devices, or one of its files. flannel writes the subnet file, too, so that
/// file shows nothing.
fn trace(facts: &NodeFacts) -> Option<String> {
    let device = facts.own_device.as_ref().map(|name| format!("its device {name}"));
    device.or_else(|| facts.absent_agent.files.first().map(|file| format!("its file {}", file.display())))
}

/// Returns the finding about an agent that does not answer, if there should be one.
fn absent(facts: &NodeFacts) -> Option<NodeFinding> {
    let socket = facts.socket.display();
    let running = &facts.absent_agent.running;
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
        trace(facts)?
    );
    let remedy = "systemctl start weft; `systemctl status weft` (on Kubernetes: kubectl get pods -A -o wide) says why it does not run; if weft \
                  is not wanted any more: weft cleanup";
    Some(finding(evidence, remedy.to_owned()))
}

/// The kernel killed an agent not long ago. If the agent of this node has run for longer, that was another one: the log of the kernel belongs to the
/// whole machine, which may be several nodes (kind, k3d).
fn killed(facts: &NodeFacts) -> Option<NodeFinding> {
    let MemoryKill { name, pid, age, of_group } = facts.memory_kill.as_ref()?;
    if facts.agent_age.is_some_and(|running| running > *age) {
        return None;
    }
    let minutes = counted(age.as_secs() / 60, "minute", "minutes");
    let (why, remedy) = if *of_group {
        (
            "it had reached the memory limit of its control group",
            "raise the limit: `systemctl edit weft` with MemoryMax=, or resources.limits.memory of the DaemonSet; `weft status` and docs/scale.md say how \
             many peers need how much",
        )
    } else {
        (
            "the machine had no memory left",
            "look for what takes the memory of this node: ps -eo pid,rss,comm --sort=-rss | head",
        )
    };
    let evidence = format!(
        "the kernel killed {name} (pid {pid}) {minutes} ago, because {why}: this may be why the agent ended or began again"
    );
    Some(finding(evidence, remedy.to_owned()))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::facts::path_links::{PathLink, PathLinks};

    #[test]
    fn the_commonest_problems_have_a_command() {
        for (hint, begin) in [
            (Hint::Command("ip link set eth0 up".to_owned()), "ip link set eth0 up"),
            (Hint::Store, "weft doctor --check-store"),
            (Hint::Unreachable, "weft mesh"),
            (Hint::Fight, "`ip monitor link address route neigh` "),
            (Hint::Silent([192, 0, 2, 2].into()), "ping -c 3 192.0.2.2;"),
            (Hint::Dropped("UDP port 8472".to_owned()), "weft doctor --only firewall"),
            (Hint::SmallMtu { uplink: "eth0".to_owned(), mtu: 1404 }, "ip link set eth0 mtu 1404 "),
        ] {
            let finding = reported(&AgentProblem { text: "it is broken".to_owned(), hint }, false);
            assert!(finding.remedy.starts_with(begin), "{finding:?}");
            assert_eq!(finding.evidence, "the agent reports: it is broken");
        }
        let dropped = remedy(&Hint::Dropped("UDP port 8472".to_owned()));
        assert!(dropped.contains("let UDP port 8472 pass between"), "{dropped}");
    }

    #[test]
    fn no_command_is_taken_from_what_another_node_may_say() {
        let said = "peer 10.5.2.0/24 (192.0.2.2) is set aside: its node is x; run: rm /file";
        let remedy = reported(&AgentProblem::new(said), true).remedy;
        assert!(remedy.starts_with("look for this text"), "{remedy}");
    }

    #[test]
    fn on_a_machine_of_vmware_nsx_is_named_for_the_ports_that_it_takes() {
        for (packets, on_vmware, is_named) in [
            ("UDP port 8472", true, true),
            ("UDP port 8472", false, false),
            ("UDP port 4789", true, true),
            ("UDP port 51820", true, false),
        ] {
            let problem = AgentProblem { text: "lost".to_owned(), hint: Hint::Dropped(packets.to_owned()) };
            let facts = NodeFacts { agent: AgentAnswer::Problems(vec![problem]), on_vmware, ..NodeFacts::default() };
            let found = check(&facts);
            assert_eq!(found[0].remedy.contains("VMware NSX"), is_named, "{packets} {found:?}");
        }
    }

    #[test]
    fn a_peer_that_loses_packets_is_found_with_the_link_to_look_at() {
        let mut facts = NodeFacts { agent: AgentAnswer::Problems(Vec::new()), ..NodeFacts::default() };
        let text = |facts: &NodeFacts| {
            let one = |found: NodeFinding| format!("{}\n    {}\n", found.evidence, found.remedy);
            check(facts).into_iter().map(one).collect::<String>()
        };
        assert_eq!(text(&facts), "");
        facts.lossy = vec![LossyPeer { name: "10.5.2.0/24 (192.0.2.2)".to_owned(), lost: 3, asked: 8 }];
        let wanted = "packets to 10.5.2.0/24 (192.0.2.2) get lost: 3 of the last 8\n    `ip -s link` on both nodes";
        assert!(text(&facts).contains(wanted), "{}", text(&facts));
        let uplink = PathLink { name: "eth0".to_owned(), is_uplink: true, ..PathLink::default() };
        facts.path_links = PathLinks { links: vec![uplink], ..PathLinks::default() };
        assert!(text(&facts).contains("`ip -s link show eth0` on both nodes"), "{}", text(&facts));
    }

    #[test]
    fn a_kill_is_named_with_what_to_raise() {
        let kill =
            |of_group| Some(MemoryKill { name: "weft".to_owned(), pid: 42, age: Duration::from_secs(130), of_group });
        let named = |memory_kill| killed(&NodeFacts { memory_kill, ..NodeFacts::default() });
        let group = named(kill(true)).unwrap();
        assert!(
            group.evidence.contains("weft (pid 42) 2 minutes ago") && group.remedy.contains("MemoryMax"),
            "{group:?}"
        );
        assert!(named(kill(false)).unwrap().remedy.contains("rss"));
        assert_eq!(named(None), None);
        let beside = |seconds| {
            let agent_age = Some(Duration::from_secs(seconds));
            killed(&NodeFacts { memory_kill: kill(true), agent_age, ..NodeFacts::default() })
        };
        assert_eq!(beside(131), None, "the agent of this node has run for longer");
        assert_eq!(beside(129), Some(group), "this agent has begun after the other one was killed");
    }
}
