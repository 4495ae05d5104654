// SPDX-License-Identifier: Apache-2.0
//! `weft doctor`: examines this node, and asks its agent if there is one. `weft doctor pods` examines what pods left behind.

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::time::timeout;
use weft_doctor::checks::CHECKS;
use weft_doctor::finding::counted;
use weft_doctor::processes;
use weft_doctor::sources::{
    AbsentAgent, AgentAnswer, AgentProblem, CertificateFile, Hint, LossyPeer, NodeSources, PeerAddress, StoreAlarm,
    StoreAnswer, StoreSources,
};
use weft_subnet::lease::Record;
use weft_subnet::source::{Error, Source};

use super::other_agents::{agents_with, flannel_agents};
use super::{Answer, pretty};
use crate::cli::doctor::DoctorTask;
use crate::cli::exit::{FAILURE, FOUND};
use crate::log::text::printable;
use crate::observe::history::recorder;
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::socket;
use crate::observe::status::{Peer, PeerState, Status, Suspect};
use crate::options::Store;
use crate::probe::samples::KEPT;
use crate::saved;

/// How long the store may take for its answers.
const STORE_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum number of broken peers that are described one by one.
const MAX_PEERS: usize = 8;
/// A peer is lossy from so many lost packets on, of the [`KEPT`] ones whose results its sample has. A single one may be an accident.
const MIN_LOST: u32 = 2;
/// Maximum number of other peers whose ways are examined.
const MAX_WAYS: usize = 64;

/// Examines this node. The exit code is 0 without findings, else [`FOUND`].
///
/// # Errors
/// The kernel's tables or /proc cannot be read, so that nothing is known.
pub async fn run(task: DoctorTask) -> anyhow::Result<Answer> {
    let mut sources = NodeSources {
        subnet_file: task.subnet_file,
        socket: task.socket,
        port: task.port,
        state_dir: task.state_dir,
        cni: task.cni,
        ..NodeSources::default()
    };
    ask_agent(&mut sources).await;
    if let Some(store) = &task.store {
        let leases = examine_store(store, &mut sources.store).await;
        if sources.peers.is_empty() {
            sources.peers = some_peers(&leases);
        }
    }
    let report = weft_doctor::examine_node(&sources, &task.only).context("examine this node")?;
    let text = if task.json { pretty(&report.as_json())? } else { printable(&report.render()) };
    let code = if report.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FOUND) };
    Ok(Answer { text, code })
}

/// Asks the agent for its problems, its backend and its peers. An agent that does not show its status must not keep the node from being
/// examined.
async fn ask_agent(sources: &mut NodeSources) {
    if !socket::answers(&sources.socket) {
        sources.absent_agent = absent_agent(sources);
        return;
    }
    let status = match socket::ask_status(&sources.socket).await {
        Ok(status) => status,
        Err(error) => {
            let stopped = socket::stopped_agent(&sources.socket);
            sources.agent = AgentAnswer::Failed { why: format!("{error:#}"), stopped };
            return;
        }
    };
    sources.other_agents = flannel_agents(&sources.socket, &sources.subnet_file);
    sources.agent_age = socket::agent_pid(&sources.socket).and_then(processes::age);
    take_status(sources, status);
}

/// Takes from the status of the agent what is examined.
fn take_status(sources: &mut NodeSources, status: Status) {
    sources.unreachable = status.peers.iter().filter(|peer| peer.state == PeerState::Unreachable).count();
    sources.handshake_ahead = handshake_ahead(&status.peers);
    sources.lossy = lossy_peers(&status.peers);
    sources.peers = addresses(&status.peers, 1).map(|peer| peer.addr).collect();
    sources.peer_addresses = addresses(&status.peers, MAX_WAYS).collect();
    sources.tunnel_port = status.tunnel_port;
    sources.has_peers = !status.peers.is_empty();
    sources.agent = AgentAnswer::Problems(problems(&status));
    (sources.published, sources.backend) = (status.public, status.backend);
    (sources.uplink, sources.uplink_addrs) = (status.uplink_name, status.uplink_addresses);
}

/// Returns all addresses, of both families, of some peers that packets do not reach, and of at most `fine` others.
fn addresses(peers: &[Peer], fine: usize) -> impl Iterator<Item = PeerAddress> {
    let of_state = move |state: PeerState, max: usize| {
        let some = peers.iter().filter(move |peer| peer.state == state).take(max);
        let all = some.flat_map(|peer| peer.addresses().map(move |addr| (peer, addr)));
        all.map(move |(peer, addr)| {
            let endpoints = peer.sessions.iter().filter_map(|session| session.endpoint.as_ref());
            let mut endpoints = endpoints.filter_map(|at| at.parse::<SocketAddr>().ok());
            let port = endpoints.find(|at| at.ip() == addr).map(|at| at.port());
            PeerAddress { addr, reached: state == PeerState::Programmed, port }
        })
    };
    of_state(PeerState::Unreachable, MAX_PEERS).chain(of_state(PeerState::Programmed, fine))
}

/// Returns by how much the last handshake of WireGuard with a peer that packets do not reach is in the future.
fn handshake_ahead(peers: &[Peer]) -> Duration {
    let unreachable = peers.iter().filter(|peer| peer.state == PeerState::Unreachable);
    let sessions = unreachable.flat_map(|peer| &peer.sessions);
    Duration::from_secs(sessions.map(|session| session.handshake_ahead_s).max().unwrap_or(0))
}

/// Returns the first ones of the peers that packets reach, and to which some get lost.
fn lossy_peers(peers: &[Peer]) -> Vec<LossyPeer> {
    let lossy = |peer: &Peer| {
        let probe = peer.probe.as_ref().filter(|_| peer.state == PeerState::Programmed)?;
        let name = || format!("{} ({})", peer.subnet, peer.public);
        let is_lossy = probe.asked == KEPT && probe.lost >= MIN_LOST;
        is_lossy.then(|| LossyPeer { name: name(), lost: probe.lost, asked: probe.asked })
    };
    peers.iter().filter_map(lossy).take(MAX_PEERS).collect()
}

/// Returns what an agent that does not answer has left here.
fn absent_agent(sources: &NodeSources) -> AbsentAgent {
    let files = [saved::file, recorder::file].map(|file| file(&sources.state_dir, &sources.subnet_file));
    AbsentAgent {
        running: agents_with(&sources.subnet_file),
        // An empty `--state-dir` says that the agent saves nothing.
        files: files.into_iter().filter(|file| !sources.state_dir.as_os_str().is_empty() && file.exists()).collect(),
    }
}

/// Returns the published addresses of some leases.
fn some_peers(leases: &[Record]) -> Vec<IpAddr> {
    let attrs = leases.iter().filter_map(|record| record.lease.as_ref().ok()).map(|lease| &lease.attrs);
    attrs.filter_map(|attrs| attrs.published().next()).take(MAX_PEERS).collect()
}

/// Reads net-conf and the leases, as the agent does at its start. Returns the leases.
async fn examine_store(store: &Store, found: &mut StoreSources) -> Vec<Record> {
    let certificates = match store {
        Store::Etcd(options) => {
            let files = [("client certificate", &options.cert_file), ("CA certificate", &options.ca_file)];
            files
                .into_iter()
                .filter_map(|(purpose, file)| Some(CertificateFile { purpose, file: file.clone()? }))
                .collect()
        }
        _ => Vec::new(),
    };
    let source = match store.open_existing() {
        Ok(source) => source,
        Err(error) => {
            let answer = StoreAnswer::Failed(format!("{error:#}"));
            *found = StoreSources { place: "the store".to_owned(), answer, certificates, alarm: None };
            return Vec::new();
        }
    };
    let mut leases = Vec::new();
    let answer = match timeout(STORE_TIMEOUT, ask_store(&*source)).await {
        Ok(Ok((net_conf, records, slowest))) => {
            leases = records;
            StoreAnswer::Answered { slowest, net_conf }
        }
        Ok(Err(Error::NoNetConf { place, remedy })) => StoreAnswer::NoNetConf { place, remedy },
        Ok(Err(error)) => StoreAnswer::Failed(format!("{:#}", anyhow::Error::new(error))),
        Err(_) => StoreAnswer::Failed(format!("no answer within {} s", STORE_TIMEOUT.as_secs())),
    };
    let alarm = alarm(&*source, &answer).await;
    *found = StoreSources { place: source.describe(), answer, certificates, alarm };
    leases
}

/// Asks a store that answered why it refuses writes. One that did not answer is not waited for a second time.
async fn alarm(store: &dyn Source, answer: &StoreAnswer) -> Option<StoreAlarm> {
    if !matches!(answer, StoreAnswer::Answered { .. } | StoreAnswer::NoNetConf { .. }) {
        return None;
    }
    // A store that does not answer this question has answered the others.
    let alarm = timeout(STORE_TIMEOUT, store.alarm()).await.ok()?.ok()??;
    Some(StoreAlarm { what: alarm.what, remedy: alarm.remedy })
}

/// Returns net-conf, the leases, and how long the slower one of the two answers took.
async fn ask_store(store: &dyn Source) -> Result<(String, Vec<Record>, Duration), Error> {
    let begin = Instant::now();
    let net_conf = store.config().await?;
    let first = begin.elapsed();
    let leases = store.list().await?;
    Ok((net_conf, leases, first.max(begin.elapsed().saturating_sub(first))))
}

/// Returns the problems that the agent reports, and those of its store and its peers.
fn problems(status: &Status) -> Vec<AgentProblem> {
    let hint = |problem: &Problem| match (&problem.command, problem.kind) {
        (Some(command), _) => Hint::Command(command.clone()),
        (None, ProblemKind::Unreachable) => Hint::Unreachable,
        (None, ProblemKind::Fight) => Hint::Fight,
        (None, _) => Hint::None,
    };
    let reported =
        status.problems.iter().map(|problem| AgentProblem { text: problem.text.clone(), hint: hint(problem) });
    let store = store_problem(status).map(|text| AgentProblem { text, hint: Hint::Store });
    reported.chain(store).chain(broken_peers(&status.peers, &status.uplink_name)).collect()
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
fn broken_peers(peers: &[Peer], uplink: &str) -> Vec<AgentProblem> {
    let is_broken =
        |peer: &&Peer| matches!(peer.state, PeerState::SetAside | PeerState::Failed | PeerState::Unreachable);
    let broken: Vec<&Peer> = peers.iter().filter(is_broken).collect();
    let describe = |peer: &&Peer| {
        let reason = peer.reason.as_deref().unwrap_or("no reason is known");
        let text = format!("peer {} ({}) is {}: {reason}", peer.subnet, peer.public, peer.state.word());
        AgentProblem { text, hint: peer_hint(peer, uplink) }
    };
    let mut problems: Vec<AgentProblem> = broken.iter().take(MAX_PEERS).map(describe).collect();
    if broken.len() > MAX_PEERS {
        let more = counted(broken.len() - MAX_PEERS, "more peer is", "more peers are");
        problems.push(AgentProblem::new(format!("{more} not reached")));
    }
    problems
}

/// Returns what probes suspect, if packets do not reach the peer.
fn peer_hint(peer: &Peer, uplink: &str) -> Hint {
    let suspect = peer.probe.as_ref().and_then(|probe| probe.suspect.clone());
    match suspect.filter(|_| peer.state == PeerState::Unreachable) {
        Some(Suspect::Silent(address)) => Hint::Silent(address),
        Some(Suspect::Dropped(packets)) => Hint::Dropped(packets),
        Some(Suspect::UplinkMtu(mtu)) if !uplink.is_empty() => Hint::SmallMtu { uplink: uplink.to_owned(), mtu },
        // An agent of an earlier version does not name its uplink.
        Some(Suspect::UplinkMtu(_)) | None => Hint::None,
    }
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
    Ok(Answer { text, code: if left == 0 { ExitCode::SUCCESS } else { ExitCode::from(FAILURE) } })
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::Ipv6Addr;

    use tokio::sync::mpsc;
    use weft_subnet::attrs::Attrs;
    use weft_subnet::cidr::Subnets;
    use weft_subnet::evidence::Evidence;
    use weft_subnet::lease::{Age, Lease, Unreadable};
    use weft_subnet::source::{Alarm, Capabilities, Event, LeaseRequest, Local};

    use super::*;
    use crate::observe::status::{PeerProbe, PeerSession};

    /// A store that has no space left. It counts how often it is asked for that.
    #[derive(Default)]
    struct FullStore(Cell<usize>);

    fn unused<T>() -> Local<'static, Result<T, Error>> {
        Box::pin(async { Err(Error::Missing("the test does not use this call".into())) })
    }

    impl Source for FullStore {
        fn describe(&self) -> String {
            "full".into()
        }
        fn capabilities(&self) -> Capabilities {
            Capabilities { expires: false, assigned: false }
        }
        fn config(&self) -> Local<'_, Result<String, Error>> {
            unused()
        }
        fn own<'a>(&'a self, _: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>> {
            unused()
        }
        fn acquire<'a>(&'a self, _: &'a LeaseRequest) -> Local<'a, Result<Lease, Error>> {
            unused()
        }
        fn retake<'a>(&'a self, _: &'a Subnets, _: &'a Attrs, _: &'a Attrs) -> Local<'a, Result<Lease, Error>> {
            unused()
        }
        fn release<'a>(&'a self, _: &'a Lease) -> Local<'a, Result<(), Error>> {
            unused()
        }
        fn list(&self) -> Local<'_, Result<Vec<Record>, Error>> {
            unused()
        }
        fn alarm(&self) -> Local<'_, Result<Option<Alarm>, Error>> {
            self.0.set(self.0.get() + 1);
            Box::pin(async { Ok(Some(Alarm { what: "no space".into(), remedy: "defrag".into() })) })
        }
        fn remove<'a>(&'a self, _: &'a str) -> Local<'a, Result<(), Error>> {
            unused()
        }
        fn watch(&self, _: mpsc::Sender<Event>) -> Local<'_, ()> {
            Box::pin(async {})
        }
    }

    #[tokio::test]
    async fn a_store_that_did_not_answer_is_not_asked_again() {
        let store = FullStore::default();
        let failed = StoreAnswer::Failed("no answer within 15 s".to_owned());
        assert_eq!((alarm(&store, &failed).await, store.0.get()), (None, 0));
        let lacks = StoreAnswer::NoNetConf { place: "full".to_owned(), remedy: "write it".to_owned() };
        let answered = StoreAnswer::Answered { slowest: Duration::ZERO, net_conf: "{}".to_owned() };
        for (answer, times) in [(lacks, 1), (answered, 2)] {
            let wanted = Some(StoreAlarm { what: "no space".to_owned(), remedy: "defrag".to_owned() });
            assert_eq!((alarm(&store, &answer).await, store.0.get()), (wanted, times));
        }
    }

    fn peer(public: &str, state: PeerState) -> Peer {
        Peer {
            subnet: "10.5.9.0/24".to_owned(),
            public: public.to_owned(),
            backend: "vxlan".to_owned(),
            state,
            not_encrypted: false,
            reason: None,
            sessions: Vec::new(),
            probe: None,
        }
    }

    #[test]
    fn what_the_agent_knows_of_a_problem_leads_to_its_remedy() {
        let probe = |suspect| Some(PeerProbe { suspect: Some(suspect), ..PeerProbe::default() });
        let (silent, small) = (Suspect::Silent([192, 0, 2, 2].into()), Suspect::UplinkMtu(1404));
        let unreachable = |suspect| Peer { probe: probe(suspect), ..peer("192.0.2.2", PeerState::Unreachable) };
        let failed = Peer { probe: probe(silent.clone()), ..peer("192.0.2.3", PeerState::Failed) };
        let status = Status {
            problems: vec![
                Problem::new(ProblemKind::Uplink, "eth0 is down").with_command("ip link set eth0 up"),
                Problem::new(ProblemKind::Unreachable, "packets do not reach 2 of 3 peers"),
                Problem::new(ProblemKind::Claims, "two nodes publish 192.0.2.9"),
            ],
            store_trouble: Some("no answer".to_owned()),
            peers: vec![unreachable(silent), unreachable(small), failed],
            uplink_name: "eth0".to_owned(),
            ..Status::default()
        };
        let hints: Vec<Hint> = problems(&status).into_iter().map(|problem| problem.hint).collect();
        let wanted = [
            Hint::Command("ip link set eth0 up".to_owned()),
            Hint::Unreachable,
            Hint::None,
            Hint::Store,
            Hint::Silent([192, 0, 2, 2].into()),
            Hint::SmallMtu { uplink: "eth0".to_owned(), mtu: 1404 },
            Hint::None,
        ];
        assert_eq!(hints, wanted, "another state of a peer has another reason than that of its probe");
    }

    #[test]
    fn what_the_agent_says_of_this_node_and_of_its_peers_is_examined() {
        use PeerState::{Programmed, SetAside, Unreachable};
        let peers = [(2, Programmed), (3, Unreachable), (4, Unreachable), (5, Programmed), (6, SetAside)];
        let ips = |list: &[&str]| list.iter().map(|ip| ip.parse().unwrap()).collect::<Vec<IpAddr>>();
        let status = Status {
            public: ips(&["192.0.2.1", "2001:db8::1"]),
            uplink: "a text for people".to_owned(),
            uplink_name: "eth0".to_owned(),
            uplink_addresses: ips(&["192.0.2.1", "2001:db8::7"]),
            backend: "udp".to_owned(),
            tunnel_port: Some(8285),
            peers: peers.map(|(number, state)| peer(&format!("192.0.2.{number}"), state)).into(),
            ..Status::default()
        };
        let mut sources = NodeSources::default();
        take_status(&mut sources, status);
        assert_eq!(sources.published, ips(&["192.0.2.1", "2001:db8::1"]));
        assert_eq!((sources.uplink.as_str(), sources.uplink_addrs), ("eth0", ips(&["192.0.2.1", "2001:db8::7"])));
        assert_eq!((sources.backend.as_str(), sources.tunnel_port), ("udp", Some(8285)));
        assert_eq!((sources.unreachable, sources.has_peers), (2, true));
        assert_eq!(sources.peers, ips(&["192.0.2.3", "192.0.2.4", "192.0.2.2"]), "one of those that are reached");
        let reached: Vec<(IpAddr, bool)> =
            sources.peer_addresses.iter().map(|peer| (peer.addr, peer.reached)).collect();
        let wanted = ips(&["192.0.2.3", "192.0.2.4", "192.0.2.2", "192.0.2.5"]).into_iter();
        assert_eq!(reached, wanted.zip([false, false, true, true]).collect::<Vec<_>>());
        let AgentAnswer::Problems(problems) = &sources.agent else { panic!("{:?}", sources.agent) };
        assert_eq!(problems.len(), 3, "the peers that are not reached: {problems:?}");
        let mut alone = NodeSources::default();
        take_status(&mut alone, Status::default());
        assert!(!alone.has_peers && alone.agent == AgentAnswer::Problems(Vec::new()), "{:?}", alone.agent);
    }

    #[test]
    fn each_broken_peer_is_described_with_its_reason_up_to_a_number() {
        use PeerState::{Failed, Held, Pending, Programmed, SetAside, Unreachable};
        let broken = |peers: &[Peer]| broken_peers(peers, "eth0").into_iter().map(|one| one.text).collect::<Vec<_>>();
        let of = |state| Peer { reason: Some("why".to_owned()), ..peer("192.0.2.2", state) };
        let wanted =
            ["set-aside", "failed", "unreachable"].map(|word| format!("peer 10.5.9.0/24 (192.0.2.2) is {word}: why"));
        assert_eq!(broken(&[Programmed, Pending, Held, SetAside, Failed, Unreachable].map(of)), wanted);
        assert_eq!(broken(&vec![of(Failed); MAX_PEERS]).len(), MAX_PEERS);
        let many = broken(&vec![of(Failed); MAX_PEERS + 2]);
        assert_eq!((many.len(), many[MAX_PEERS].as_str()), (MAX_PEERS + 1, "2 more peers are not reached"));
        let probe =
            Some(PeerProbe { suspect: Some(Suspect::Dropped("UDP port 8472".to_owned())), ..PeerProbe::default() });
        let hint = peer_hint(&Peer { probe, ..of(Unreachable) }, "eth0");
        assert_eq!(hint, Hint::Dropped("UDP port 8472".to_owned()));
    }

    #[test]
    fn a_peer_is_lossy_from_two_losses_among_the_last_eight_packets_on() {
        let lossy = |lost, asked, state| {
            let probe = Some(PeerProbe { lost, asked, ..PeerProbe::default() });
            lossy_peers(&[Peer { probe, ..peer("192.0.2.2", state) }])
        };
        let wanted = LossyPeer { name: "10.5.9.0/24 (192.0.2.2)".to_owned(), lost: 2, asked: 8 };
        assert_eq!(lossy(2, 8, PeerState::Programmed), [wanted]);
        for (lost, asked, state) in
            [(1, 8, PeerState::Programmed), (5, 7, PeerState::Programmed), (8, 8, PeerState::Unreachable)]
        {
            assert_eq!(lossy(lost, asked, state), [], "{lost} of {asked}, {state:?}");
        }
    }

    #[test]
    fn of_a_peer_of_wireguard_the_port_of_its_endpoint_and_a_handshake_in_the_future_are_taken() {
        let session = PeerSession {
            device: "flannel-wg".to_owned(),
            endpoint: Some("192.0.2.5:51821".to_owned()),
            handshake_s: None,
            handshake_ahead_s: 0,
            received: 0,
            sent: 0,
        };
        let ahead = |handshake_ahead_s, state| {
            let sessions = vec![PeerSession { handshake_ahead_s, ..session.clone() }];
            Peer { sessions, ..peer("192.0.2.7", state) }
        };
        let all =
            [ahead(600, PeerState::Programmed), ahead(70, PeerState::Unreachable), ahead(0, PeerState::Unreachable)];
        assert_eq!(handshake_ahead(&all), Duration::from_secs(70), "peers that are reached do not matter");
        let peers = [Peer { sessions: vec![session], ..peer("192.0.2.5, 192.0.2.6", PeerState::Unreachable) }];
        let ports: Vec<Option<u16>> = addresses(&peers, 1).map(|peer| peer.port).collect();
        assert_eq!(ports, [Some(51821), None], "the second address is not that of the endpoint");
    }

    #[test]
    fn both_addresses_of_a_peer_are_followed() {
        let peers = [
            peer("192.0.2.1, 2001:db8::1", PeerState::Programmed),
            peer("192.0.2.2,2001:db8::2", PeerState::Unreachable),
            peer("192.0.2.3", PeerState::Programmed),
            peer("192.0.2.4", PeerState::SetAside),
        ];
        let followed: Vec<String> = addresses(&peers, 1).map(|peer| peer.addr.to_string()).collect();
        assert_eq!(followed, ["192.0.2.2", "2001:db8::2", "192.0.2.1", "2001:db8::1"]);
    }

    /// They are asked if there is no agent that names its peers.
    #[test]
    fn of_the_leases_in_the_store_some_published_addresses_are_taken() {
        let of = |attrs: Attrs| {
            let subnets = Subnets::from_key("10.5.9.0-24").unwrap();
            Record { id: "x".into(), lease: Ok(Lease { id: "x".into(), subnets, attrs, age: Age::default() }) }
        };
        let six: Ipv6Addr = "2001:db8::2".parse().unwrap();
        let four = |last: u8| Attrs { public_ip: Some([192, 0, 2, last].into()), ..Attrs::default() };
        let leases = [
            Record { id: "y".into(), lease: Err(Unreadable::new("not a key")) },
            of(Attrs::default()),
            of(Attrs { public_ipv6: Some(six), ..Attrs::default() }),
            of(Attrs { public_ipv6: Some(six), ..four(3) }),
        ];
        assert_eq!(some_peers(&leases), [six.into(), IpAddr::from([192, 0, 2, 3])]);
        let many: Vec<Record> = (0..100).map(|last| of(four(last))).collect();
        assert_eq!(some_peers(&many).len(), MAX_PEERS);
    }
}
