// SPDX-License-Identifier: Apache-2.0
//! The mesh of all nodes, put together from the rows of each: the answer to `weft mesh --all`.
//!
//! A row is a claim of the node that sent it. Which node it is about is decided by whom we asked, and its text is cut and cleaned
//! before it is shown.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::io;
use std::net::SocketAddr;

use hyper::StatusCode;
use serde::Serialize;
use serde::ser::SerializeStruct;
use weft_subnet::text::sentence;

use crate::log::text::wrapped;
use crate::observe::mesh::quality::{self, Quality};
use crate::observe::mesh::row::{Row, RowWay};
use crate::observe::status::{PeerState, Status};

/// Largest cluster for which the table of all pairs is shown as text.
const MAX_TABLE: usize = 40;
/// Number of pairs that are shown one by one.
const MAX_PAIRS: usize = 20;
/// Number of nodes that did not answer and are shown one by one.
const MAX_SILENT: usize = 10;

/// The mesh of all nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cluster {
    /// The nodes, in the order of their subnets.
    pub nodes: Vec<ClusterNode>,
    /// The place of each subnet in [`Cluster::nodes`]. Each answer is taken when it comes, so this is not made again for each of them.
    places: HashMap<String, u32>,
}

/// A node of the mesh.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct ClusterNode {
    /// Its subnets, as our agent knows them.
    pub subnet: String,
    /// The addresses that its lease names, separated by commas.
    pub public: String,
    /// Why nothing is known from it. `None` if it has answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Its host name, as it says. Empty if it has not answered.
    pub name: String,
    /// The version of its agent, as it says.
    pub version: String,
    /// The type of its backend, as it says.
    pub backend: String,
    /// The largest packet that its pods may send, in bytes.
    pub mtu: u32,
    /// True if it says that it is ready.
    pub ready: bool,
    /// Its problems, as it says.
    pub problems: Vec<String>,
    /// Number of ways that it knows. There may be fewer [`ClusterNode::ways`], because a row has a bounded size.
    pub known: usize,
    /// The ways from it to other nodes, by their places in [`Cluster::nodes`].
    #[serde(skip)]
    pub ways: BTreeMap<u32, Quality>,
    /// The reasons of the worst ways.
    #[serde(skip)]
    pub reasons: BTreeMap<u32, String>,
}

/// A way with its ends.
#[derive(Debug, Clone, Copy)]
pub struct Pair<'a> {
    /// The node that sends.
    pub from: &'a ClusterNode,
    /// The place of the node that receives.
    pub to: u32,
    /// The way.
    pub way: Quality,
}

/// A node to be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownNode {
    /// Its subnets.
    pub subnet: String,
    /// The addresses that its lease names, separated by commas.
    pub public: String,
}

impl KnownNode {
    /// Returns the nodes that an agent knows, without its own one. A lease that is set aside is left out.
    pub fn peers_of(status: &Status) -> Vec<KnownNode> {
        let peers = status.peers.iter().filter(|peer| peer.has_way());
        peers.map(|peer| KnownNode { subnet: peer.subnet.clone(), public: peer.public.clone() }).collect()
    }
}

/// Why a node has no row.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// The lease names no address.
    #[error("its lease names no address")]
    NoAddress,
    /// No connection.
    #[error("connect to {0}: {1}; is --healthz-port on there, and --healthz-ip an address that other nodes reach?")]
    Connect(SocketAddr, io::Error),
    /// No answer within the time limit for one node.
    #[error("{0} has not answered within 2 s")]
    Timeout(SocketAddr),
    /// What answers does not speak HTTP, or its answer is too large.
    #[error("{0} has no answer that can be read: {1}")]
    Http(SocketAddr, Box<dyn std::error::Error + Send + Sync>),
    /// Another answer than 200.
    #[error("{0} answers {1}: {2}")]
    Refused(SocketAddr, StatusCode, String),
    /// The body is not a row.
    #[error("{0} does not answer as weft does: {1}")]
    NoRow(SocketAddr, serde_json::Error),
    /// The time limit for all nodes is over.
    #[error("not asked: the time limit of 60 s was reached")]
    NoTime,
}

impl Cluster {
    /// Creates the mesh of these nodes, of which none has answered yet. They are sorted by subnet.
    pub fn new(mut known: Vec<KnownNode>) -> Cluster {
        known.sort_by_cached_key(|node| (order(&node.subnet), node.subnet.clone()));
        let unanswered = |KnownNode { subnet, public }| ClusterNode {
            subnet,
            public,
            error: Some("was not asked".to_owned()),
            ..ClusterNode::default()
        };
        let nodes: Vec<ClusterNode> = known.into_iter().map(unanswered).collect();
        let places = nodes.iter().map(|node| node.subnet.clone()).zip(0..).collect();
        Cluster { nodes, places }
    }

    /// Takes what the nodes answered, by subnet. A node whose answer cannot be used gets the reason as text, because it is shown and goes into
    /// the answer as JSON. It may quote what answered, so it is cut and cleaned.
    pub fn answered(&mut self, rows: Vec<(String, Result<Row, AskError>)>) {
        for (subnet, row) in rows {
            let Some(place) = self.places.get(&subnet) else { continue };
            let Some(node) = self.nodes.get_mut(*place as usize) else { continue };
            match row {
                Ok(row) if row.subnet == subnet => node.fill(row, *place, &self.places),
                Ok(row) => {
                    node.error = Some(format!("another node answers at this address: {}", Row::bounded(row).whose()))
                }
                Err(reason) => node.error = Some(sentence(&reason.to_string())),
            }
        }
    }

    /// Returns all known ways, the worst first.
    pub fn pairs(&self) -> Vec<Pair<'_>> {
        let mut all: Vec<Pair<'_>> = self.nodes.iter().flat_map(ClusterNode::pairs).collect();
        all.sort_by_cached_key(|pair| pair.way.rank());
        all
    }

    /// Returns true if packets do not reach some node from another one.
    pub fn is_broken(&self) -> bool {
        self.nodes.iter().any(|node| node.ways.values().any(|way| way.state == PeerState::Unreachable))
    }

    /// Returns the label of the node at this place: its host name and its subnets.
    pub fn label(&self, place: u32) -> String {
        self.nodes.get(place as usize).map(ClusterNode::label).unwrap_or_default()
    }
}

impl Row {
    fn whose(&self) -> String {
        if self.subnet.is_empty() {
            format!("{} without a lease", self.node)
        } else {
            format!("{} ({})", self.node, self.subnet)
        }
    }
}

impl ClusterNode {
    fn fill(&mut self, row: Row, own: u32, places: &HashMap<String, u32>) {
        let Row { node, version, backend, mtu, ready, problems, known, ways, .. } = row.bounded();
        (self.error, self.name, self.version, self.backend) = (None, node, version, backend);
        (self.mtu, self.ready, self.problems, self.known) = (mtu, ready, problems, known);
        for RowWay { to, state, loss, rtt_us, mtu, reason } in ways {
            // A node may know a lease that our agent does not know, or not any more.
            let Some(place) = places.get(&to).filter(|place| **place != own) else { continue };
            let way = Quality { state, loss: loss.map(|loss| loss.min(100)), rtt_us, mtu };
            // If a way is there twice, the first one is the worse one.
            if *self.ways.entry(*place).or_insert(way) == way
                && let Some(reason) = reason
            {
                self.reasons.entry(*place).or_insert(reason);
            }
        }
    }

    fn pairs(&self) -> impl Iterator<Item = Pair<'_>> {
        self.ways.iter().map(move |(to, way)| Pair { from: self, to: *to, way: *way })
    }

    fn label(&self) -> String {
        if self.name.is_empty() { self.subnet.clone() } else { format!("{} {}", self.name, self.subnet) }
    }
}

impl Quality {
    /// Returns the way as one phrase.
    pub fn describe(&self) -> String {
        let [loss, trip, mtu] = self.cells();
        format!("{}, loss {loss}, {trip}, MTU {mtu}", self.state.word())
    }

    fn symbol(&self) -> char {
        match (self.state, self.loss) {
            (PeerState::Unreachable, _) => 'X',
            (PeerState::Programmed, None) => '.',
            (PeerState::Programmed, Some(0)) => '+',
            (PeerState::Programmed, Some(_)) => '%',
            _ => '!',
        }
    }
}

/// A node with its ways as objects that name their ends, the worst first.
#[derive(Serialize)]
struct ShownNode<'a> {
    #[serde(flatten)]
    node: &'a ClusterNode,
    ways: Vec<RowWay>,
}

/// All nodes of a mesh. The texts of one node at a time are made.
struct ShownNodes<'a>(&'a Cluster);

impl Serialize for ShownNodes<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let nodes = &self.0.nodes;
        let name = |place: u32| nodes.get(place as usize).map(|node| node.subnet.clone()).unwrap_or_default();
        serializer.collect_seq(nodes.iter().map(|node| {
            let way = |Pair { to, way: Quality { state, loss, rtt_us, mtu }, .. }: Pair<'_>| RowWay {
                to: name(to),
                state,
                loss,
                rtt_us,
                mtu,
                reason: node.reasons.get(&to).cloned(),
            };
            let mut ways: Vec<RowWay> = node.pairs().map(way).collect();
            ways.sort_by_cached_key(|way| way.quality().rank());
            ShownNode { node, ways }
        }))
    }
}

impl Serialize for Cluster {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct("Cluster", 1)?;
        object.serialize_field("nodes", &ShownNodes(self))?;
        object.end()
    }
}

/// Returns what nodes are sorted by: the address of their first subnet.
fn order(subnet: &str) -> Option<std::net::IpAddr> {
    subnet.split(['/', ',']).next()?.parse().ok()
}

/// Returns the mesh as text for people: a table of all pairs if the cluster is small, and the worst pairs.
pub fn render(cluster: &Cluster) -> String {
    let (mut out, pairs) = (String::new(), cluster.pairs());
    let nodes = &cluster.nodes;
    let answered = nodes.iter().filter(|node| node.error.is_none()).count();
    let broken = pairs.iter().filter(|pair| pair.way.state == PeerState::Unreachable).count();
    let all = nodes.len() * nodes.len().saturating_sub(1);
    let (count, known) = (nodes.len(), pairs.len());
    let _ = writeln!(out, "{count} nodes, {answered} answered; {all} ways, {known} known, {broken} broken");
    silent(&mut out, cluster);
    if nodes.len() <= MAX_TABLE && answered > 0 {
        table(&mut out, cluster);
    }
    list(&mut out, cluster, &pairs);
    out
}

fn silent(out: &mut String, cluster: &Cluster) {
    let silent: Vec<&ClusterNode> = cluster.nodes.iter().filter(|node| node.error.is_some()).collect();
    for node in silent.iter().take(MAX_SILENT) {
        let reason = node.error.as_deref().unwrap_or_default();
        wrapped(out, "  ", "  ", &format!("no row of {} ({}): {reason}", node.subnet, node.public));
    }
    if silent.len() > MAX_SILENT {
        let _ =
            writeln!(out, "  no rows of {} more nodes: weft mesh --all -o json names them", silent.len() - MAX_SILENT);
    }
}

fn table(out: &mut String, cluster: &Cluster) {
    let labels: Vec<String> = (0..).take(cluster.nodes.len()).map(|place| cluster.label(place)).collect();
    let widest = labels.iter().map(|label| label.chars().count()).max().unwrap_or(0);
    let head: String = (1..=labels.len()).map(|number| format!("{number:>3}")).collect();
    let _ = writeln!(out, "\n{:>3} {:widest$} {head}", "", "FROM \\ TO");
    for (from, (node, label)) in (0_u32..).zip(cluster.nodes.iter().zip(&labels)) {
        let cell = |to: u32| match node.ways.get(&to) {
            _ if to == from => ' ',
            None => '?',
            Some(way) => way.symbol(),
        };
        let cells: String = (0..).take(labels.len()).map(|to| format!("  {}", cell(to))).collect();
        let _ = writeln!(out, "{:>3} {label:widest$} {}", from + 1, cells.trim_end());
    }
    let _ = writeln!(out, "+ reached  % loses packets  X broken  ! not in the kernel  . not asked yet  ? unknown");
}

fn list(out: &mut String, cluster: &Cluster, pairs: &[Pair<'_>]) {
    let faulty = pairs.iter().filter(|pair| !pair.way.is_healthy()).count();
    let shown = pairs.get(..pairs.len().min(MAX_PAIRS)).unwrap_or_default();
    if shown.is_empty() {
        return;
    }
    let rows: Vec<(String, String)> = shown.iter().map(|pair| (pair.from.label(), cluster.label(pair.to))).collect();
    let from = rows.iter().map(|(from, _)| from.chars().count()).max().unwrap_or(0);
    let to = rows.iter().map(|(_, to)| to.chars().count()).max().unwrap_or(0);
    let _ = writeln!(out, "\n{:from$}  {:to$}  {}", "FROM", "TO", quality::headings());
    for (pair, (from_label, to_label)) in shown.iter().zip(&rows) {
        let _ = writeln!(out, "{from_label:from$}  {to_label:to$}  {}", pair.way.columns());
        if let (false, Some(reason)) = (pair.way.is_healthy(), pair.from.reasons.get(&pair.to)) {
            wrapped(out, "    ", "    ", reason);
        }
    }
    let hidden = pairs.len() - shown.len();
    if hidden > 0 {
        let faulty = faulty.saturating_sub(shown.len());
        let _ =
            writeln!(out, "... and {hidden} more ways, {faulty} of them with a fault (all: weft mesh --all -o json)");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(number: u8) -> KnownNode {
        KnownNode { subnet: format!("10.5.{number}.0/24"), public: format!("192.168.0.{number}") }
    }

    fn way(number: u8, state: PeerState, loss: u8) -> RowWay {
        let reason = (state == PeerState::Unreachable).then(|| "a firewall drops UDP port 8472".to_owned());
        let (to, mtu) = (format!("10.5.{number}.0/24"), (loss < 100).then_some(1450));
        RowWay { to, state, loss: Some(loss), rtt_us: mtu.map(|_| 250), mtu, reason }
    }

    fn row(number: u8, ways: Vec<RowWay>) -> (String, Result<Row, AskError>) {
        let KnownNode { subnet, .. } = known(number);
        let row = Row { node: format!("n{number}"), subnet: subnet.clone(), known: ways.len(), ways, ..Row::default() };
        (subnet, Ok(row))
    }

    #[test]
    fn the_table_and_the_worst_pairs_are_shown() {
        let mut cluster = Cluster::new(vec![known(10), known(2), known(1), known(3)]);
        let (good, bad) = (PeerState::Programmed, PeerState::Unreachable);
        cluster.answered(vec![
            row(1, vec![way(2, good, 0), way(3, bad, 100), way(10, good, 25)]),
            row(2, vec![way(1, good, 0), RowWay { loss: None, rtt_us: None, mtu: None, ..way(3, good, 0) }]),
            ("10.5.3.0/24".to_owned(), Err(AskError::NoAddress)),
            row(10, vec![way(1, PeerState::Pending, 0)]),
        ]);
        let wanted = "\
4 nodes, 3 answered; 12 ways, 6 known, 1 broken
  no row of 10.5.3.0/24 (192.168.0.3): its lease names no address

    FROM \\ TO          1  2  3  4
  1 n1 10.5.1.0/24        +  X  %
  2 n2 10.5.2.0/24     +     .  ?
  3 10.5.3.0/24        ?  ?     ?
  4 n10 10.5.10.0/24   !  ?  ?
+ reached  % loses packets  X broken  ! not in the kernel  . not asked yet  ? unknown

FROM              TO                STATE         LOSS        RTT    MTU
n1 10.5.1.0/24    10.5.3.0/24       unreachable  100 %          -      -
    a firewall drops UDP port 8472
n10 10.5.10.0/24  n1 10.5.1.0/24    pending        0 %    0.25 ms   1450
n1 10.5.1.0/24    n10 10.5.10.0/24  programmed    25 %    0.25 ms   1450
n1 10.5.1.0/24    n2 10.5.2.0/24    programmed     0 %    0.25 ms   1450
n2 10.5.2.0/24    n1 10.5.1.0/24    programmed     0 %    0.25 ms   1450
n2 10.5.2.0/24    10.5.3.0/24       programmed       -          -      -
";
        assert_eq!(render(&cluster), wanted);
        assert!(cluster.is_broken());
    }

    /// Programs read this, and the page of `weft ui` takes its texts from it.
    #[test]
    fn in_json_a_node_has_its_ways_with_their_ends_the_worst_first() {
        let mut cluster = Cluster::new(vec![known(1), known(2), known(3)]);
        let ways = vec![way(2, PeerState::Programmed, 0), way(3, PeerState::Unreachable, 100)];
        cluster.answered(vec![row(1, ways), ("10.5.3.0/24".to_owned(), Err(AskError::NoAddress))]);
        let json = serde_json::to_value(&cluster).unwrap();
        let reason = "a firewall drops UDP port 8472";
        let wanted = serde_json::json!([
            {"to": "10.5.3.0/24", "state": "unreachable", "loss": 100, "reason": reason},
            {"to": "10.5.2.0/24", "loss": 0, "rtt_us": 250, "mtu": 1450},
        ]);
        let nodes = &json["nodes"];
        assert_eq!((&nodes[0]["ways"], &nodes[0]["known"], &nodes[0]["name"]), (&wanted, &2.into(), &"n1".into()));
        let error = "its lease names no address";
        assert_eq!((&nodes[0]["error"], &nodes[2]["error"]), (&serde_json::Value::Null, &error.into()));
        assert_eq!((&nodes[1]["public"], nodes[1]["ways"].as_array().map(Vec::len)), (&"192.168.0.2".into(), Some(0)));
    }

    #[test]
    fn of_many_nodes_only_some_silent_ones_and_the_worst_ways_are_shown() {
        let mut cluster = Cluster::new((1..=50).map(known).collect());
        let of = |number| way(number, if number < 27 { PeerState::Unreachable } else { PeerState::Programmed }, 0);
        cluster.answered(vec![row(1, (2..32).map(of).collect())]);
        let text = render(&cluster);
        assert!(text.starts_with("50 nodes, 1 answered; 2450 ways, 30 known, 25 broken\n"), "{text}");
        assert_eq!(text.matches("  no row of ").count(), MAX_SILENT);
        assert!(text.contains("  no rows of 39 more nodes: weft mesh --all -o json names them\n"), "{text}");
        assert!(!text.contains("FROM \\ TO"), "a table of 50 columns is wider than a terminal: {text}");
        let end = "... and 10 more ways, 5 of them with a fault (all: weft mesh --all -o json)\n";
        assert!(text.ends_with(end), "{text}");
    }

    #[test]
    fn of_two_ways_to_one_node_the_worse_one_counts() {
        let mut cluster = Cluster::new(vec![known(1), known(2)]);
        let ways = vec![way(2, PeerState::Programmed, 0), way(2, PeerState::Unreachable, 100)];
        cluster.answered(vec![row(1, ways)]);
        assert!(cluster.is_broken() && cluster.nodes[0].ways.len() == 1, "{cluster:?}");
        assert_eq!(cluster.nodes[0].reasons[&1], "a firewall drops UDP port 8472");
    }

    #[test]
    fn a_row_of_another_node_and_ways_to_nobody_are_not_believed() {
        let mut cluster = Cluster::new(vec![known(1), known(2), known(3)]);
        let liar = Row { node: "n\u{1b}[31m1".to_owned(), ..row(1, Vec::new()).1.unwrap() };
        let mut strange = way(9, PeerState::Unreachable, 200);
        let own = way(3, PeerState::Unreachable, 100);
        let (subnet, Ok(mut good)) = row(3, vec![strange.clone(), own, way(1, PeerState::Programmed, 255)]) else {
            panic!()
        };
        strange.to = "x".repeat(10_000);
        good.ways.push(strange);
        let unknown = ("10.9.9.0/24".to_owned(), Ok(Row::default()));
        cluster.answered(vec![("10.5.2.0/24".to_owned(), Ok(liar)), unknown, (subnet, Ok(good))]);
        let [first, second, third] = &cluster.nodes[..] else { panic!("{cluster:?}") };
        assert_eq!(first.error.as_deref(), Some("was not asked"));
        let error = second.error.as_deref().unwrap();
        assert!(error.starts_with("another node answers at this address: n") && !error.contains('\u{1b}'), "{error}");
        assert_eq!(third.ways.keys().collect::<Vec<_>>(), [&0], "neither itself nor a node that nobody knows");
        assert_eq!(third.ways[&0].loss, Some(100));
        assert!(!cluster.is_broken());
    }

    /// Whatever is at the address of a lease can answer, and its answer is quoted.
    #[test]
    fn an_error_that_quotes_an_answer_is_cut_and_cleaned() {
        let at: SocketAddr = "192.168.0.2:10256".parse().unwrap();
        let hostile = format!("\u{1b}[2J\u{9b}{}", "x".repeat(100_000));
        let body = serde_json::json!({"to": "", "state": hostile}).to_string();
        let no_row = AskError::NoRow(at, serde_json::from_str::<RowWay>(&body).unwrap_err());
        for reason in [no_row, AskError::Refused(at, StatusCode::FORBIDDEN, hostile)] {
            let mut cluster = Cluster::new(vec![known(2)]);
            cluster.answered(vec![("10.5.2.0/24".to_owned(), Err(reason))]);
            let error = cluster.nodes[0].error.as_deref().unwrap();
            assert!(error.starts_with("192.168.0.2:10256 ") && error.contains("\\u{1b}"), "{error}");
            assert!(error.chars().count() <= 400 && !error.contains(char::is_control), "{error}");
        }
    }
}
