// SPDX-License-Identifier: Apache-2.0
//! `weft explain`: follows one packet through this node. The crate `weft-doctor` reads the kernel and decides; the agent is asked, the rules of
//! iptables are listed, and probes are sent here.

mod probes;
mod rules;

use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::Context;
use weft_doctor::explain::facts::{Agent, AgentFacts, Difference, Facts, Packet, Peer, Place};
use weft_doctor::explain::rules::Endpoint;
use weft_doctor::explain::{self, Explanation, Step, Verdict, ipvs, pod_rules};

use super::{Answer, pretty};
use crate::cli::exit::{FAILURE, FOUND};
use crate::cli::explain::ExplainTask;
use crate::log::text::printable;
use crate::observe::preview::Operation;
use crate::observe::{socket, status};

/// Explains what this node does with a packet. The exit code is 0 if it passes, [`FOUND`] if it is lost, and [`FAILURE`] otherwise.
///
/// # Errors
/// The kernel's links cannot be read.
pub async fn run(task: &ExplainTask) -> anyhow::Result<Answer> {
    let explanation = explanation(task).await?;
    let text = if task.json { pretty(&explanation)? } else { printable(&explanation.render()) };
    let code = match explanation.verdict {
        Verdict::Works => ExitCode::SUCCESS,
        Verdict::Broken => ExitCode::from(FOUND),
        Verdict::Unknown => ExitCode::from(FAILURE),
    };
    Ok(Answer { text, code })
}

/// Explains what this node does with a packet.
///
/// # Errors
/// The kernel's links cannot be read.
pub async fn explanation(task: &ExplainTask) -> anyhow::Result<Explanation> {
    let agent = ask_agent(task, &task.packet).await;
    let read = |packet, agent| explain::read(packet, &task.subnet_file, agent).context("read the kernel's links");
    let mut facts = read(task.packet, agent)?;
    let service = service(&facts).await?;
    if let Some((_, Some((to, port)))) = &service {
        let packet = Packet { to: *to, port: port.or(task.packet.port), ..task.packet };
        facts = read(packet, ask_agent(task, &packet).await)?;
    }
    let tunnel_port = match &facts.agent {
        Agent::Answers(agent) => agent.tunnel_port,
        Agent::Silent(_) => None,
    };
    let (mut rules, mut outer) = (Vec::new(), Vec::new());
    for way in &facts.ways {
        rules.push(rules::of(way, &task.subnet_file).await);
        outer.extend(rules::of_tunnel(way, &task.subnet_file, tunnel_port).await);
        outer.extend(pod_rules::of(way, task.packet));
    }
    let probes = if task.probe { probes::send(&facts).await } else { Vec::new() };
    let probes: Vec<Step> = outer.into_iter().chain(probes).collect();
    let mut explanation = explain::decide(&facts, &rules, probes.clone());
    // For its plan the agent reads the whole kernel, so it is asked only if something is wrong.
    if explanation.verdict == Verdict::Broken
        && let Agent::Answers(agent) = &mut facts.agent
    {
        agent.differences = differences(task).await;
        explanation = explain::decide(&facts, &rules, probes);
    }
    Ok(match service {
        Some((step, _)) => explanation.behind(step),
        None => explanation,
    })
}

/// Looks for what sends the packet on to an endpoint of a service, if its destination is not the address of a pod. A service may have a
/// port of this node itself.
async fn service(facts: &Facts) -> anyhow::Result<Option<(Step, Option<Endpoint>)>> {
    let Some(way) = facts.ways.first() else { return Ok(None) };
    Ok(match facts.to {
        Place::Outside | Place::Network => rules::service(way).await,
        Place::Host => match ipvs::service(&facts.packet).context("read the addresses of services")? {
            Some(found) => Some(found),
            None if facts.packet.port.is_some() => rules::service(way).await,
            None => None,
        },
        Place::Pod | Place::Peer(_) => None,
    })
}

/// Asks the agent for its peers. An agent that does not answer must not keep the packet from being explained.
async fn ask_agent(task: &ExplainTask, packet: &Packet) -> Agent {
    let place = task.socket.display();
    if !socket::answers(&task.socket) {
        return Agent::Silent(format!("no agent answers on {place}"));
    }
    let status = match socket::ask_status(&task.socket).await {
        Ok(status) => status,
        Err(error) => return Agent::Silent(format!("{error:#}")),
    };
    let peers = status.peers.iter().filter_map(|row| peer(row, packet)).collect();
    Agent::Answers(AgentFacts {
        peers,
        differences: None,
        tunnel_port: status.tunnel_port,
        published: status.public,
        uplink_addrs: status.uplink_addresses,
        backend: status.backend,
    })
}

/// Asks the agent what its next pass would write. Before it has a lease there is no plan.
async fn differences(task: &ExplainTask) -> Option<Vec<Difference>> {
    let plan = socket::ask_plan(&task.socket).await.ok()?;
    let difference = |operation: Operation| Difference { entry: operation.entry, should_be: operation.after };
    Some(plan.operations.into_iter().map(difference).collect())
}

/// Returns the lease of a peer if one of the two addresses belongs to it.
fn peer(row: &status::Peer, packet: &Packet) -> Option<Peer> {
    let peer = Peer {
        subnets: row.subnets().collect(),
        public: row.addresses().collect(),
        backend: row.backend.clone(),
        state: row.state.word().to_owned(),
        reason: row.reason.clone(),
        endpoint: row.sessions.iter().find_map(|session| {
            let address: SocketAddr = session.endpoint.as_ref()?.parse().ok()?;
            Some(address.ip())
        }),
    };
    let is_its = |address| peer.has_pod(address) || peer.public.contains(&address);
    (is_its(packet.from) || is_its(packet.to)).then_some(peer)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use weft_doctor::explain::facts::Proto;

    use super::*;
    use crate::observe::status::{PeerSession, PeerState};

    #[test]
    fn a_peer_is_known_by_an_address_of_its_pods_or_of_its_node() {
        let session = |endpoint: Option<&str>| PeerSession {
            device: "flannel-wg".to_owned(),
            endpoint: endpoint.map(str::to_owned),
            handshake_s: None,
            handshake_ahead_s: 0,
            received: 0,
            sent: 0,
        };
        let row = status::Peer {
            subnet: "10.5.2.0/24,fd00:2::/64".to_owned(),
            public: "192.0.2.2".to_owned(),
            backend: "wireguard".to_owned(),
            state: PeerState::Unreachable,
            sessions: vec![session(None), session(Some("203.0.113.2:51820"))],
            ..status::Peer::unreadable(&"10.5.2.0-24".into(), "it does not answer".to_owned())
        };
        let of = |from: &str, to: &str| {
            let [from, to] = [from, to].map(|ip| ip.parse::<IpAddr>().unwrap());
            peer(&row, &Packet { from, to, proto: Some(Proto::Tcp), port: None })
        };
        for (from, to) in
            [("10.5.1.2", "10.5.2.7"), ("10.5.2.7", "10.5.1.2"), ("192.0.2.1", "192.0.2.2"), ("fd00:1::2", "fd00:2::7")]
        {
            let known = of(from, to).unwrap_or_else(|| panic!("{from} to {to}"));
            assert_eq!((known.state.as_str(), known.reason.as_deref()), ("unreachable", Some("it does not answer")));
            assert_eq!((known.endpoint, known.backend.as_str()), ("203.0.113.2".parse().ok(), "wireguard"));
        }
        assert_eq!(of("10.5.1.2", "10.5.3.7"), None);
        assert_eq!(of("10.5.1.2", "203.0.113.2"), None, "what the kernel has learned is no address of the lease");
    }
}
