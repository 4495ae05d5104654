// SPDX-License-Identifier: Apache-2.0
//! The answer to `GET /mesh` on the health port: what one node knows of its ways to others (docs/adr/028-mesh-over-all-nodes.md).
//!
//! The answer has a bounded size. It has no secret: what it says of leases is in the store, where each node can read it.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::log::text::one_line;
use crate::observe::mesh::quality::Quality;
use crate::observe::mesh::{Mesh, Way};
use crate::observe::status::{PeerProbe, PeerState, Status};

/// Maximum number of ways in an answer. Of more peers, the worst ways are in it.
pub const MAX_WAYS: usize = 1024;
/// Maximum number of ways whose reason is in the answer.
const MAX_REASONS: usize = 32;
/// Maximum number of problems of the node.
const MAX_PROBLEMS: usize = 16;
/// Maximum length of a text in characters.
const MAX_TEXT: usize = 400;

/// What one node knows of its ways to others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The host name of the node.
    pub node: String,
    /// The version of its agent.
    pub version: String,
    /// Its subnets. Empty before it has a lease.
    pub subnet: String,
    /// The type of its backend.
    pub backend: String,
    /// The largest packet that its pods may send, in bytes.
    pub mtu: u32,
    /// True if /readyz answers 200.
    pub ready: bool,
    /// What is wrong with the node, one sentence each.
    pub problems: Vec<String>,
    /// Number of ways that the node knows. Larger than the number of [`Row::ways`] if there are more than [`MAX_WAYS`].
    pub known: usize,
    /// The ways, the worst first.
    pub ways: Vec<RowWay>,
}

/// A way in a [`Row`]. Unlike a [`Way`], it is short, because a row may have a thousand of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowWay {
    /// The subnets of the peer.
    pub to: String,
    /// The state of the peer.
    #[serde(default = "programmed", skip_serializing_if = "is_programmed")]
    pub state: PeerState,
    /// How many of a hundred requests were not answered. `None` if the peer was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss: Option<u8>,
    /// The last round trip in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rtt_us: Option<u32>,
    /// The largest packet in bytes that reached the peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// The reason for the state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A [`Row`], and who may read it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RowAnswer {
    /// The row.
    pub row: Row,
    /// The addresses of the nodes, sorted. Nobody else may read the row, except from the node itself.
    pub readers: Vec<IpAddr>,
}

fn programmed() -> PeerState {
    PeerState::Programmed
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_programmed(state: &PeerState) -> bool {
    *state == PeerState::Programmed
}

impl Row {
    /// Returns the row of a node from its status.
    pub fn of(status: Status) -> Row {
        let (version, backend, ready) = (status.version.clone(), status.backend.clone(), status.ready);
        let problems = status.problems.iter().map(|problem| problem.text.clone()).collect();
        let Mesh { node, subnet, mtu, ways, .. } = Mesh::of(status);
        let known = ways.len();
        let ways = ways.into_iter().map(RowWay::from).collect();
        Row { node, version, subnet, backend, mtu, ready, problems, known, ways }.bounded()
    }

    /// Sorts the ways, the worst first, and cuts off whatever is too long.
    #[must_use]
    pub fn bounded(mut self) -> Row {
        self.ways.sort_by_cached_key(|way| way.quality().rank());
        self.ways.truncate(MAX_WAYS);
        for (position, way) in self.ways.iter_mut().enumerate() {
            way.reason = way.reason.take().filter(|_| position < MAX_REASONS).map(|text| short(&text));
        }
        self.problems.truncate(MAX_PROBLEMS);
        self.problems.iter_mut().for_each(|text| *text = short(text));
        for text in [&mut self.node, &mut self.version, &mut self.subnet, &mut self.backend] {
            *text = short(text);
        }
        self
    }
}

impl RowWay {
    /// Creates a way from what a node knows of a peer.
    pub fn new(to: String, state: PeerState, reason: Option<String>, probe: Option<&PeerProbe>) -> RowWay {
        let Quality { state, loss, rtt_us, mtu } = Quality::new(state, probe);
        RowWay { to, state, loss, rtt_us, mtu, reason }
    }

    /// Returns what is known of the way.
    pub fn quality(&self) -> Quality {
        Quality { state: self.state, loss: self.loss, rtt_us: self.rtt_us, mtu: self.mtu }
    }
}

impl From<Way> for RowWay {
    fn from(way: Way) -> RowWay {
        RowWay::new(way.to, way.state, way.reason, way.probe.as_ref())
    }
}

/// Returns a text without control characters and of bounded length.
fn short(text: &str) -> String {
    let plain = one_line(text);
    if plain.chars().count() <= MAX_TEXT {
        return plain;
    }
    plain.chars().take(MAX_TEXT).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::problem::{Problem, ProblemKind};
    use crate::observe::status::Peer;

    #[test]
    fn a_row_has_a_bounded_size_and_keeps_the_worst_ways() {
        let way = |number: usize| {
            let state = if number >= 2000 { PeerState::Unreachable } else { PeerState::Programmed };
            let to = format!("10.{}.{}.0/24,fd00:10:244:{number:x}::/64", number / 250, number % 250);
            let probe =
                PeerProbe { round_trip_us: Some(999_999), asked: 8, lost: 1, mtu: Some(1450), ..PeerProbe::default() };
            RowWay::new(to, state, Some("x".repeat(10_000)), Some(&probe))
        };
        let problems = vec!["a problem\nof two lines".repeat(1000); 1000];
        let node = "n\u{1b}[31m".to_owned() + &"n".repeat(100_000);
        let row = Row { node, problems, ways: (0..2100).map(way).collect(), known: 2100, ..Row::default() }.bounded();
        assert_eq!((row.ways.len(), row.known), (MAX_WAYS, 2100));
        assert!(row.ways[..100].iter().all(|way| way.state == PeerState::Unreachable));
        assert!(!row.node.contains('\u{1b}') && !row.problems[0].contains('\n'));
        let text = serde_json::to_string(&row).unwrap();
        assert!(text.len() < 160_000, "{} bytes", text.len());
        assert_eq!(serde_json::from_str::<Row>(&text).unwrap(), row);
    }

    #[test]
    fn a_row_says_of_its_node_what_the_status_says() {
        let peer = |subnet: &str, state, reason: Option<&str>| Peer {
            subnet: subnet.to_owned(),
            state,
            reason: reason.map(str::to_owned),
            ..Peer::unreadable(&"x".into(), String::new())
        };
        let status = Status {
            node: "n1".into(),
            version: "1.2.3".into(),
            subnet: "10.5.1.0/24".into(),
            backend: "vxlan".into(),
            mtu: 1450,
            ready: true,
            problems: vec![Problem::new(ProblemKind::Uplink, "eth0 is down")],
            peers: vec![
                peer("10.5.2.0/24", PeerState::Programmed, None),
                peer("10.5.3.0/24", PeerState::Failed, Some("no buffer")),
                peer("10.5.4.0/24", PeerState::SetAside, Some("a reserved address")),
            ],
            ..Status::default()
        };
        let way =
            |to: &str, state, reason: Option<&str>| RowWay::new(to.to_owned(), state, reason.map(str::to_owned), None);
        let wanted = Row {
            node: "n1".into(),
            version: "1.2.3".into(),
            subnet: "10.5.1.0/24".into(),
            backend: "vxlan".into(),
            mtu: 1450,
            ready: true,
            problems: vec!["eth0 is down".into()],
            known: 2,
            ways: vec![
                way("10.5.3.0/24", PeerState::Failed, Some("no buffer")),
                way("10.5.2.0/24", PeerState::Programmed, None),
            ],
        };
        assert_eq!(Row::of(status), wanted, "a lease that is set aside has no way");
    }

    #[test]
    fn a_way_without_a_fault_is_short() {
        let probe = PeerProbe { round_trip_us: Some(250), asked: 8, mtu: Some(1450), ..PeerProbe::default() };
        let way = RowWay::new("10.5.2.0/24".into(), PeerState::Programmed, None, Some(&probe));
        let text = serde_json::to_string(&way).unwrap();
        assert_eq!(text, r#"{"to":"10.5.2.0/24","loss":0,"rtt_us":250,"mtu":1450}"#);
    }
}
