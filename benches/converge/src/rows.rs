// SPDX-License-Identifier: Apache-2.0
//! The rows of one place (a backend with a number of peers): first the floor, then each program, each on a fresh node.

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
use subject::Start;

/// Events, one after the other.
const EVENTS: usize = 200;
/// Events at once.
const BURST: usize = 1000;
/// Faults of each kind.
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
/// When namespaces, etcd or an agent fail; a row that takes too long is no error.
pub fn all(backend: Backend, peers: usize, options: &Options, (run, nodes): (&mut Run, &mut usize)) -> Result<()> {
    anyhow::ensure!(peers + EVENTS + BURST <= MOST, "at most {} peers", MOST - EVENTS - BURST);
    eprintln!("== {} with {peers} peers", backend.name());
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

/// All cold starts but the last ones, floor and weft in turns: what slows the machine down for a while slows both down.
fn earlier(place: &mut Place<'_>, weft: &Program) -> Result<(Vec<Duration>, Vec<Start>)> {
    let dir = place.store.dir.path().to_owned();
    let (mut floors, mut starts) = (Vec::new(), Vec::new());
    for _ in 1..place.options.repeat {
        let mut node = place.node()?;
        floors.push(floor::fill(place, &mut node).context("the floor")?);
        drop(node);
        let node = place.node()?;
        let (agent, start) = subject::cold(weft, &node, (&dir, place.peers), place.limit()).context("weft")?;
        // The agent goes before its node.
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
        let said = match &cell {
            Cell::Value(value) => format!("{value:.2}"),
            Cell::Cut(seconds) => format!("cut after {seconds} s"),
            Cell::None(why) => why.clone(),
        };
        eprintln!("   {:<9} {what}: {said}", format!("{who:?}").to_lowercase());
        self.run.note((self.backend.name(), self.peers), what, who, cell);
    }

    /// Half and hundredth slowest of some times; what was cut has none.
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

    /// Numbers of the peers that come and go one by one.
    fn singles(&self) -> std::ops::Range<usize> {
        self.peers..self.peers + EVENTS
    }

    /// Numbers of the peers that come and go together.
    fn crowd(&self) -> std::ops::Range<usize> {
        self.peers + EVENTS..self.peers + EVENTS + BURST
    }

    /// Existing peers, spread over all, each once: where faults hit.
    fn victims(&self, kind: usize) -> impl Iterator<Item = usize> + use<> {
        let (peers, step) = (self.peers, (self.peers / REPAIRS).max(1));
        (0..REPAIRS.min(peers)).map(move |n| (n * step + kind) % peers)
    }
}
