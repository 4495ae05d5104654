// SPDX-License-Identifier: Apache-2.0
//! The rows of one place, which is a backend with a number of peers. First comes the floor, then each program, each on a fresh node.

mod floor;
mod steady;
pub mod subject;

use std::time::Duration;

use anyhow::{Context, Result};

use crate::measure::{Cell, Run, Who, quantile};
use crate::options::Options;
use crate::peers::{Backend, MOST, Peer};
use crate::process::Program;
use crate::site::Node;
use crate::store::Store;
use crate::table;
use subject::Start;

/// The number of events one after the other.
const EVENTS: usize = 200;
/// The number of events at once.
const BURST: usize = 1000;
/// The number of faults of each kind.
const REPAIRS: usize = 50;

/// A backend with a number of peers, and the store that holds them.
pub struct Place<'a> {
    backend: Backend,
    peers: usize,
    options: &'a Options,
    store: Store,
    run: &'a mut Run,
    nodes: &'a mut usize,
}

/// Measures everything at one place.
///
/// # Errors
/// A namespace, etcd or an agent fails. A row that takes too long is no error.
pub fn all(backend: Backend, peers: usize, options: &Options, (run, nodes): (&mut Run, &mut usize)) -> Result<()> {
    anyhow::ensure!(peers + EVENTS + BURST <= MOST, "at most {} peers", MOST - EVENTS - BURST);
    let mut store = Store::start(backend)?;
    store.put((0..peers).map(Peer::new))?;
    let mut place = Place { backend, peers, options, store, run, nodes };
    let weft = Program::Weft(options.weft.clone(), options.agent_flags.clone());
    let (floors, starts) = earlier(&mut place, &weft)?;
    let floor = floor::all(&mut place, floors).context("the floor")?;
    subject::all(&mut place, &weft, starts).context("weft")?;
    floor::again(&mut place, floor).context("the floor")?;
    if let Some(path) = &options.flanneld {
        subject::all(&mut place, &Program::Flanneld(path.clone()), Vec::new()).context("flanneld")?;
    }
    Ok(())
}

/// Measures all cold starts but the last ones, of floor and weft in turns, so that a machine that is slow for a while slows both.
fn earlier(place: &mut Place<'_>, weft: &Program) -> Result<(Vec<Duration>, Vec<Start>)> {
    let dir = place.store.dir.path().to_owned();
    let (mut floors, mut starts) = (Vec::new(), Vec::new());
    for _ in 1..place.options.repeat {
        let mut node = place.node()?;
        floors.push(floor::fill(place, &mut node).context("the floor")?);
        drop(node);
        let node = place.node()?;
        let (agent, start) = subject::cold(weft, &node, (&dir, place.peers), place.limit()).context("weft")?;
        // The agent must end before its node is deleted.
        drop(agent);
        let cut = start.took.is_none();
        starts.push(start);
        if cut {
            break;
        }
    }
    Ok((floors, starts))
}

impl Place<'_> {
    fn note(&mut self, what: &str, who: Who, cell: Cell) {
        table::tell(self.run, (self.backend.name(), self.peers), (what, who), cell);
    }

    /// Adds the median and the 99th percentile of some times. A series that was cut has none.
    fn note_times(&mut self, what: &str, who: Who, times: &[Duration], cut: Option<Duration>) {
        for (name, part) in [("p50", 0.5), ("p99", 0.99)] {
            let cell = match (cut, quantile(times, part)) {
                (Some(limit), _) => Cell::Cut(limit.as_secs_f64()),
                (None, Some(time)) => Cell::Value(time.as_secs_f64() * 1e3),
                (None, None) => Cell::None("nothing measured".to_owned()),
            };
            self.note(&format!("{what} {name}"), who, cell);
        }
    }

    fn limit(&self) -> Duration {
        Duration::from_secs(self.options.limit)
    }

    fn node(&mut self) -> Result<Node> {
        *self.nodes += 1;
        Node::new(&format!("n{}", self.nodes), self.backend)
    }

    /// Returns the numbers of the peers that are added and removed one by one.
    fn singles(&self) -> std::ops::Range<usize> {
        self.peers..self.peers + EVENTS
    }

    /// Returns the numbers of the peers that are added and removed together.
    fn crowd(&self) -> std::ops::Range<usize> {
        self.peers + EVENTS..self.peers + EVENTS + BURST
    }

    /// Returns the peers whose entries are deleted, spread evenly over all peers, each once.
    fn victims(&self, kind: usize) -> impl Iterator<Item = usize> + use<> {
        let (peers, step) = (self.peers, (self.peers / REPAIRS).max(1));
        (0..REPAIRS.min(peers)).map(move |n| (n * step + kind) % peers)
    }
}
