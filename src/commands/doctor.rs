// SPDX-License-Identifier: Apache-2.0
//! `weft doctor`: examines this node, and asks its agent if there is one. `weft doctor pods` examines what pods left behind.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::time::timeout;
use weft_doctor::node::{AgentAnswer, NodeSources};
use weft_doctor::node_findings::CHECKS;
use weft_doctor::store::{StoreAnswer, StoreSources};
use weft_subnet::source::{Error, Source};

use super::Answer;
use crate::agent;
use crate::cli;
use crate::cli::doctor::{DoctorTask, FINDINGS};
use crate::log::text::printable;
use crate::observe::socket;
use crate::observe::status::{Peer, PeerState, Status};
use crate::options::Store;

/// How long the store may take for its answers.
const STORE_TIMEOUT: Duration = Duration::from_secs(15);
/// As many broken peers are described one by one.
const MAX_PEERS: usize = 8;

/// Examines this node. The exit code is 0 without findings, else [`FINDINGS`].
///
/// # Errors
/// The kernel's tables or /proc cannot be read, so that nothing is known.
pub async fn run(task: DoctorTask) -> anyhow::Result<Answer> {
    let (agent, backend) = ask_agent(&task.socket).await;
    let store = match &task.store {
        Some(store) => examine_store(store).await,
        None => StoreSources::default(),
    };
    let sources =
        NodeSources { subnet_file: task.subnet_file, socket: task.socket, port: task.port, agent, backend, store };
    let report = weft_doctor::examine_node(&sources, &task.only).context("examine this node")?;
    let text =
        if task.json { serde_json::to_string_pretty(&report.as_json())? + "\n" } else { printable(&report.render()) };
    let code = if report.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FINDINGS) };
    Ok(Answer { text, code })
}

/// Returns the problems of the agent and its backend. An agent that does not show its status must not keep the node from being examined.
async fn ask_agent(socket: &Path) -> (AgentAnswer, String) {
    if !socket::answers(socket) {
        return (AgentAnswer::None, String::new());
    }
    match socket::ask_status(socket).await {
        Ok(status) => {
            let (store, peers) = (store_problem(&status), broken_peers(&status.peers));
            let problems = status.problems.into_iter().chain(store).chain(peers).collect();
            (AgentAnswer::Problems(problems), status.backend)
        }
        Err(error) => (AgentAnswer::Failed(format!("{error:#}")), String::new()),
    }
}

/// Reads net-conf and the leases, as the agent does at its start.
async fn examine_store(store: &Store) -> StoreSources {
    let certificates = match store {
        Store::Etcd(options) => {
            let files = [("client certificate", &options.cert_file), ("CA certificate", &options.ca_file)];
            files.into_iter().filter_map(|(purpose, file)| Some((purpose, file.clone()?))).collect()
        }
        _ => Vec::new(),
    };
    let source = match agent::open_existing_store(store) {
        Ok(source) => source,
        Err(error) => {
            let answer = StoreAnswer::Failed(format!("{error:#}"));
            return StoreSources { place: "the store".to_owned(), answer, certificates };
        }
    };
    let answer = match timeout(STORE_TIMEOUT, ask_store(&*source)).await {
        Ok(Ok((net_conf, slowest))) => StoreAnswer::Answered { slowest, net_conf },
        Ok(Err(Error::NoNetConf { place, remedy })) => StoreAnswer::NoNetConf { place, remedy },
        Ok(Err(error)) => StoreAnswer::Failed(format!("{:#}", anyhow::Error::new(error))),
        Err(_) => StoreAnswer::Failed(format!("no answer within {} s", STORE_TIMEOUT.as_secs())),
    };
    StoreSources { place: source.describe(), answer, certificates }
}

/// Returns net-conf, and how long the slower one of the two answers took.
async fn ask_store(store: &dyn Source) -> Result<(String, Duration), Error> {
    let begin = Instant::now();
    let net_conf = store.config().await?;
    let first = begin.elapsed();
    store.list().await?;
    Ok((net_conf, first.max(begin.elapsed().saturating_sub(first))))
}

/// Describes a store that fails, and until when the own lease lives without it.
fn store_problem(status: &Status) -> Option<String> {
    let (error, silence) = (status.store_trouble.as_ref()?, status.store_silent_s);
    let until = status.lease_ttl_s.map_or_else(String::new, |ttl| {
        format!(", and the own lease ends in {ttl} s unless it is renewed: then another node may take the subnet")
    });
    Some(format!("store: {error}; its last answer was {silence} s ago{until}"))
}

/// Describes the peers that this node does not reach, each with its reason. The problems of the status only count some of them,
/// and name none of the reasons.
fn broken_peers(peers: &[Peer]) -> Vec<String> {
    let is_broken =
        |peer: &&Peer| matches!(peer.state, PeerState::SetAside | PeerState::Failed | PeerState::Unreachable);
    let broken: Vec<&Peer> = peers.iter().filter(is_broken).collect();
    let describe = |peer: &&Peer| {
        let reason = peer.reason.as_deref().unwrap_or("no reason is known");
        format!("peer {} ({}) is {}: {reason}", peer.subnet, peer.public, peer.state.word())
    };
    let mut texts: Vec<String> = broken.iter().take(MAX_PEERS).map(describe).collect();
    if broken.len() > MAX_PEERS {
        texts.push(format!("{} more peers are not reached", broken.len() - MAX_PEERS));
    }
    texts
}

/// Returns the name of every check with what it looks for, a line each.
pub fn list() -> String {
    CHECKS.iter().map(|check| format!("{:<14} {}\n", check.name, check.about)).collect()
}

/// `weft doctor pods`: finds what pods left behind on this node, and removes with `fix` what certainly belongs to no pod.
///
/// # Errors
/// The files of the container runtime cannot be read. If something cannot be removed, it is named on standard error, and the exit code is
/// that of a failure.
pub fn pods(sources: &weft_doctor::pods::Sources, fix: bool) -> anyhow::Result<Answer> {
    let report = weft_doctor::pods::examine(sources).context("examine pods")?;
    let mut text = printable(&report.render(sources));
    let mut left = report.leaks().count();
    if fix {
        let done = weft_doctor::pods::fix(&report, sources);
        left = done.iter().filter(|done| done.is_err()).count();
        for done in &done {
            match done {
                Ok(removed) => text += &printable(&format!("{removed}\n")),
                Err(error) => eprintln!("weft: {}", printable(&error.to_string())),
            }
        }
    }
    Ok(Answer { text, code: if left == 0 { ExitCode::SUCCESS } else { ExitCode::from(cli::FAILURE) } })
}
