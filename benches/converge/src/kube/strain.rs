// SPDX-License-Identifier: Apache-2.0
//! Memory where it is highest: the list that is read again, and a node that fills its own Node object as fast as the server lets it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::measure::{Cell, Who};
use crate::process::{Agent, Program};
use crate::site::{Node, pause};
use crate::watch::Goal;

use super::{Bench, CALM};

/// Rows of peaks.
pub(super) const LISTED: &str = "memory, peak of a list read again";
pub(super) const ATTACKED: &str = "memory, peak under attack";
pub(super) const STARTED: &str = "memory, peak of a start after the attack";
/// What the agent logs when the server has forgotten the version that the agent knows.
const FORGOTTEN: &str = "the API server no longer has the version of the Nodes that we know";
/// Updates of one Node object of each kind.
const UPDATES: usize = 150;
/// Bytes of one annotation; the server takes 256 KiB for all annotations of an object.
const ANNOTATION: usize = 200_000;
/// Bytes of a status; the server's etcd takes 1.5 MB for an object.
const STATUS: usize = 1_000_000;
/// The node that belongs to the attacker.
const ATTACKER: usize = 0;
/// Longest wait for a list that is read again: the server starts, and the agent waits up to 10 s between its attempts.
const AGAIN: Duration = Duration::from_secs(60);

impl Bench<'_> {
    /// Memory of a standing agent whose watch cannot go on, and of one whose neighbour attacks; then of a start beside that neighbour.
    /// `peers` of them are known to the agent.
    pub(super) fn strain(&mut self, mut agent: Agent, node: Node, program: &Program, peers: usize) -> Result<()> {
        self.list_again(&agent, &node, peers)?;
        self.attack(&agent, &node)?;
        agent.check()?;
        agent.stop()?;
        drop(node);
        // The attacker's own lease cannot be read.
        let (agent, node, took, _) = self.cold_among(program, peers - 1)?;
        ensure!(took.is_some(), "an agent does not start beside the attacker's node");
        node.watch.quiet(CALM, self.limit())?;
        self.note(STARTED, Who::Weft, Cell::Value(agent.memory()?.1));
        agent.stop()?;
        self.cluster.calm(ATTACKER)
    }

    /// The server starts again with a newer version than the agent's: it refuses the old one (410), and the agent lists again.
    fn list_again(&mut self, agent: &Agent, node: &Node, peers: usize) -> Result<()> {
        let lists = agent.logged(FORGOTTEN)?;
        agent.forget_peak()?;
        let before = agent.cpu()?;
        self.cluster.restart()?;
        node.watch.expect(Goal::Peers(peers + 1));
        self.cluster.create(peers)?;
        node.watch.wait(AGAIN)?.context("a new node is not in the kernel after the list was read again")?;
        ensure!(agent.logged(FORGOTTEN)? > lists, "the agent went on without a new list");
        let cpu = agent.cpu()? - before;
        self.note(LISTED, Who::Weft, Cell::Value(agent.memory()?.1));
        self.note("a list read again, CPU", Who::Weft, Cell::Value(cpu.as_secs_f64() * 1e3));
        node.watch.expect(Goal::Peers(peers));
        self.cluster.remove(peers..peers + 1)?;
        node.watch.wait(AGAIN)?.context("a deleted node stays in the kernel").map(drop)
    }

    fn attack(&mut self, agent: &Agent, node: &Node) -> Result<()> {
        agent.forget_peak()?;
        let (before, log, begin) = (agent.cpu()?, agent.log_size()?, Instant::now());
        for update in 0..UPDATES {
            self.cluster.fill_annotations(ATTACKER, update, ANNOTATION)?;
        }
        for update in 0..UPDATES {
            self.cluster.fill_status(ATTACKER, update, STATUS)?;
        }
        eprintln!("   {} updates within {:.1} s", 2 * UPDATES, begin.elapsed().as_secs_f64());
        // The last ones are still on their way.
        pause(Duration::from_secs(1));
        node.watch.quiet(CALM, self.limit())?;
        let (now, peak) = agent.memory()?;
        let each = (agent.cpu()? - before).as_secs_f64() * 1e3 / (2 * UPDATES) as f64;
        self.note(ATTACKED, Who::Weft, Cell::Value(peak));
        self.note("memory after the attack", Who::Weft, Cell::Value(now));
        self.note("CPU for a huge update of another node", Who::Weft, Cell::Value(each));
        let written = (agent.log_size()? - log) as f64 / 1000.0;
        self.note("log of the attack, kB", Who::Weft, Cell::Value(written));
        Ok(())
    }
}
