// SPDX-License-Identifier: Apache-2.0
//! The answer to `weft mesh`: what probes found about the ways from this node to its peers, the worst first.

pub mod cluster;
pub mod quality;
pub mod row;
pub mod svg;

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::log::text::{one_line, wrapped};
use crate::observe::mesh::quality::Quality;
use crate::observe::problem::ProblemKind;
use crate::observe::status::{Peer, PeerProbe, PeerState, Status};

/// Number of ways without a fault that are shown.
const MAX_HEALTHY: usize = 20;

/// The ways from one node to its peers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    /// The host name of the node.
    pub node: String,
    /// Its subnets.
    pub subnet: String,
    /// The largest packet that pods may send, in bytes.
    pub mtu: u32,
    /// What concerns all ways, such as that no probe can be sent.
    pub problems: Vec<String>,
    /// The ways, the worst first. Leases that are set aside have none.
    pub ways: Vec<Way>,
    /// Number of leases that are set aside.
    #[serde(default)]
    pub set_aside: usize,
}

/// The way to one peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    /// The subnets of the peer.
    pub to: String,
    /// The addresses that its lease names.
    pub public: String,
    /// The state of the peer.
    pub state: PeerState,
    /// The reason for the state.
    pub reason: Option<String>,
    /// What probes found. `None` if the peer was not asked yet.
    pub probe: Option<PeerProbe>,
}

impl Mesh {
    /// Takes what concerns the ways from the status of an agent.
    pub fn of(status: Status) -> Mesh {
        let set_aside = status.peers.iter().filter(|peer| !peer.has_way()).count();
        let way = |Peer { subnet, public, state, reason, probe, .. }| Way { to: subnet, public, state, reason, probe };
        let mut ways: Vec<Way> = status.peers.into_iter().filter(Peer::has_way).map(way).collect();
        ways.sort_by_key(|way| way.quality().rank());
        let of_probes = status.problems.into_iter().filter(|problem| problem.kind == ProblemKind::Probes);
        let problems = of_probes.map(|problem| problem.text).collect();
        Mesh { node: status.node, subnet: status.subnet, mtu: status.mtu, problems, ways, set_aside }
    }

    /// Returns true if packets do not reach a peer.
    pub fn is_broken(&self) -> bool {
        self.ways.iter().any(|way| way.state == PeerState::Unreachable)
    }
}

impl Peer {
    /// Returns true if packets may go to the peer. They do not if its lease is set aside.
    fn has_way(&self) -> bool {
        self.state != PeerState::SetAside
    }
}

impl Way {
    fn quality(&self) -> Quality {
        Quality::new(self.state, self.probe.as_ref())
    }
}

/// What is known of a way on which ICMP is dropped.
const SILENT: &str =
    "it answers TCP connections, and no echo requests: a firewall drops ICMP, so loss and path MTU are not known";

/// Returns the mesh as a table for people, with at most 100 columns except for addresses that are longer.
pub fn render(mesh: &Mesh) -> String {
    let mut out = String::new();
    let broken = mesh.ways.iter().filter(|way| way.state == PeerState::Unreachable).count();
    let asked = mesh.ways.iter().filter(|way| way.probe.is_some()).count();
    let _ = writeln!(
        out,
        "{} ({}): {} ways, {asked} probed, {broken} broken; MTU {}",
        one_line(&mesh.node),
        one_line(&mesh.subnet),
        mesh.ways.len(),
        mesh.mtu
    );
    mesh.problems.iter().for_each(|problem| wrapped(&mut out, "", "", problem));
    if mesh.set_aside > 0 {
        let are = if mesh.set_aside == 1 { "lease is set aside and has" } else { "leases are set aside and have" };
        let _ = writeln!(out, "{} {are} no way: weft status says why", mesh.set_aside);
    }
    let faulty = mesh.ways.iter().filter(|way| !way.quality().is_healthy()).count();
    // Ways with a fault stand before all others, so each of them is shown.
    let (shown, hidden) = mesh.ways.split_at(mesh.ways.len().min(faulty + MAX_HEALTHY));
    if shown.is_empty() {
        return out;
    }
    let widest =
        |of: fn(&Way) -> &str| shown.iter().map(|way| one_line(of(way)).chars().count()).max().unwrap_or(0).max(6);
    let (to, public) = (widest(|way| &way.to), widest(|way| &way.public));
    let _ = writeln!(out, "\n{:to$}  {:public$}  {}", "TO", "PUBLIC", quality::headings());
    for way in shown {
        let (subnet, address) = (one_line(&way.to), one_line(&way.public));
        let _ = writeln!(out, "{subnet:to$}  {address:public$}  {}", way.quality().columns());
        if let (PeerState::Unreachable, Some(reason)) = (way.state, &way.reason) {
            wrapped(&mut out, "    ", "    ", reason);
        }
        if way.state == PeerState::Programmed && way.probe.as_ref().is_some_and(|probe| probe.silent) {
            wrapped(&mut out, "    ", "    ", SILENT);
        }
    }
    if !hidden.is_empty() {
        let _ = writeln!(out, "... and {} more ways without a fault (all: weft mesh -o json)", hidden.len());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::problem::Problem;

    fn peer(number: u8, state: PeerState, probe: Option<PeerProbe>) -> Peer {
        let reason = (state == PeerState::Unreachable).then(|| "its published address does not answer".to_owned());
        let (subnet, public) = (format!("10.5.{number}.0/24"), format!("192.168.0.{number}"));
        Peer {
            subnet,
            public,
            backend: "vxlan".into(),
            state,
            not_encrypted: false,
            reason,
            sessions: Vec::new(),
            probe,
        }
    }

    fn probe(round_trip_us: Option<u64>, lost: u32, mtu: Option<u16>) -> Option<PeerProbe> {
        Some(PeerProbe { round_trip_us, lost, asked: 8, mtu, ..PeerProbe::default() })
    }

    fn mesh(peers: Vec<Peer>) -> Mesh {
        let (node, subnet) = ("n1".to_owned(), "10.5.1.0/24".to_owned());
        Mesh::of(Status { node, subnet, mtu: 1450, peers, ..Status::default() })
    }

    #[test]
    fn the_worst_ways_stand_first() {
        let peers = vec![
            peer(2, PeerState::Programmed, probe(Some(250), 0, Some(1450))),
            peer(3, PeerState::Programmed, None),
            peer(4, PeerState::SetAside, None),
            peer(5, PeerState::Unreachable, probe(None, 8, None)),
            peer(6, PeerState::Programmed, probe(Some(12_340), 0, Some(1450))),
            peer(7, PeerState::Programmed, probe(Some(100), 2, Some(1450))),
        ];
        let wanted = "\
n1 (10.5.1.0/24): 5 ways, 4 probed, 1 broken; MTU 1450
1 lease is set aside and has no way: weft status says why

TO           PUBLIC       STATE         LOSS        RTT    MTU
10.5.5.0/24  192.168.0.5  unreachable  100 %          -      -
    its published address does not answer
10.5.7.0/24  192.168.0.7  programmed    25 %    0.10 ms   1450
10.5.6.0/24  192.168.0.6  programmed     0 %   12.34 ms   1450
10.5.2.0/24  192.168.0.2  programmed     0 %    0.25 ms   1450
10.5.3.0/24  192.168.0.3  programmed       -          -      -
";
        let mesh = mesh(peers);
        assert_eq!(render(&mesh), wanted);
        assert!(mesh.is_broken());
    }

    #[test]
    fn a_way_on_which_icmp_is_dropped_has_no_fault_and_says_so() {
        let silent = Some(PeerProbe { round_trip_us: Some(400), silent: true, ..PeerProbe::default() });
        let mesh = mesh(vec![peer(2, PeerState::Programmed, silent)]);
        let text = render(&mesh);
        assert!(
            text.contains("10.5.2.0/24  192.168.0.2  programmed       -    0.40 ms      -\n    it answers TCP"),
            "{text}"
        );
        assert!(!mesh.is_broken());
    }

    #[test]
    fn every_way_with_a_fault_is_shown_and_what_keeps_probes_from_finding_faults() {
        let broken = (0..30).map(|n| peer(n, PeerState::Unreachable, probe(None, 8, None)));
        let healthy = (30..200).map(|n| peer(n, PeerState::Programmed, probe(Some(250), 0, Some(1450))));
        let problems = [(ProblemKind::Probes, "no probe can be sent"), (ProblemKind::Uplink, "eth0 is down")];
        let problems = problems.map(|(kind, text)| Problem::new(kind, text)).into();
        let text = render(&Mesh::of(Status { problems, peers: broken.chain(healthy).collect(), ..Status::default() }));
        assert_eq!(text.matches("  unreachable  ").count(), 30, "{text}");
        assert!(text.ends_with("... and 150 more ways without a fault (all: weft mesh -o json)\n"), "{text}");
        assert!(text.contains("\nno probe can be sent\n") && !text.contains("eth0"), "{text}");
    }

    #[test]
    fn only_some_ways_without_a_fault_are_shown() {
        let healthy = (0..200).map(|n| peer(n, PeerState::Programmed, probe(Some(250), 0, Some(1450))));
        let text = render(&mesh(healthy.collect()));
        assert!(text.ends_with("... and 180 more ways without a fault (all: weft mesh -o json)\n"), "{text}");
        assert!(!mesh(Vec::new()).is_broken() && render(&mesh(Vec::new())).lines().count() == 1);
    }
}
