// SPDX-License-Identifier: Apache-2.0
//! The bench that CI runs, in at most 60 s. It fails only because of how costs grow, or because of work where there should be none.
//!
//! Costs are CPU time of the agent, which other load on the machine changes much less than the elapsed time. The cheapest of several runs
//! counts. A growth that is too large is measured again before it counts as a failure.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::measure::quantile;
use crate::options::ShapeOptions;
use crate::peers::{Backend, Peer};
use crate::process::{Agent, Program};
use crate::rows::subject::cold;
use crate::say;
use crate::site::{Node, build, pause};
use crate::store::Store;
use crate::targets::memory_bound;

/// Numbers of peers.
const SIZES: [usize; 3] = [5_000, 10_000, 20_000];
/// The number of cold starts at each size.
const RUNS: usize = 2;
const LIMIT: Duration = Duration::from_secs(30);
/// The bound for (t20k - t10k) / (t10k - t5k). Linear growth gives 2, and plain routes of one device gave 4.6.
const MOST_GROWTH: f64 = 3.0;
/// The bound for t20k / t5k. Linear growth gives 4, and plain routes gave 18. The difference of small times is noisy, and this ratio is not.
/// So a growth counts as too large only if both are.
const MOST_RATIO: f64 = 8.0;
/// The bound for the memory of a peer in kB. Tables grow by doubling, so at 20,000 peers they are half empty, and a peer needs 1.1.
const MOST_PER_PEER: f64 = 1.3;
/// How often a growth that is too large is measured again.
const AGAIN: usize = 2;
/// The bounds for an idle node: its share of a core, including audits and probes, and how often it wakes up. Five probes a second wake it
/// about twenty times, because each of these peers is silent.
const IDLE: Duration = Duration::from_secs(12);
const MOST_CPU: f64 = 0.05;
const MOST_WAKEUPS: f64 = 30.0;
/// If nothing was written for this time, everything is done. It is longer than the kernel checks the link-local address of a new uplink.
const CALM: Duration = Duration::from_millis(2500);

/// The store and the node that are measured.
struct Bed {
    program: Program,
    store: Store,
    filled: usize,
    nodes: usize,
}

/// Measures, and returns true if every cost grows as it should.
///
/// # Errors
/// A program does not run.
pub fn run(options: &ShapeOptions) -> Result<bool> {
    let begin = Instant::now();
    build()?;
    let mut right = true;
    let program = Program::Weft(options.weft.clone(), options.agent_flags.clone());
    let mut bed = Bed { program, store: Store::start(Backend::Vxlan)?, filled: 0, nodes: 0 };
    let (mut costs, mut memory, mut last) = (Vec::new(), Vec::new(), None);
    for peers in SIZES {
        drop(last.take());
        bed.fill(peers)?;
        let (cost, agent, node) = bed.starts(peers, RUNS)?;
        node.watch.quiet(CALM, LIMIT)?;
        memory.push(agent.memory()?.0);
        costs.push(cost);
        last = Some((agent, node));
    }
    let few = SIZES[0] as f64;
    let many = SIZES[2] as f64 - few;
    right &= judge(&format!("memory of {few} peers, MB"), memory[0], memory_bound(few));
    right &= judge("memory of each further peer, kB", (memory[2] - memory[0]) * 1024.0 / many, MOST_PER_PEER);
    let (agent, node) = last.context("nothing ran")?;
    right &= idle(&agent, &node)?;
    right &= restart(&bed, agent, &node)?;
    drop(node);
    for _ in 0..AGAIN {
        if is_linear(&costs) {
            break;
        }
        say(&format!("growth {:.2}: measured again", grows(&costs)));
        for (peers, cost) in SIZES.into_iter().zip(&mut costs) {
            bed.fill(peers)?;
            *cost = bed.starts(peers, RUNS)?.0.min(*cost);
        }
    }
    let (linear, growth, ratio) = (is_linear(&costs), grows(&costs), ratio(&costs));
    let word = if linear { "ok" } else { "TOO MUCH" };
    say(&format!("kernel phase, (t20k - t10k) / (t10k - t5k): {growth:.2}, t20k / t5k: {ratio:.2}: {word}"));
    right &= linear;
    say(&format!("shape: {}, {:.0} s", if right { "ok" } else { "FAILED" }, begin.elapsed().as_secs_f64()));
    Ok(right)
}

impl Bed {
    fn fill(&mut self, peers: usize) -> Result<()> {
        self.store.put((self.filled..peers).map(Peer::new))?;
        self.store.delete((peers..self.filled).map(Peer::new))?;
        self.filled = peers;
        Ok(())
    }

    /// Returns the cheapest kernel phase of some cold starts, and the agent and the node of the last one.
    fn starts(&mut self, peers: usize, runs: usize) -> Result<(Duration, Agent, Node)> {
        let (mut costs, mut last) = (Vec::new(), None);
        for _ in 0..runs {
            drop(last.take());
            self.nodes += 1;
            let node = Node::new(&format!("n{}", self.nodes), Backend::Vxlan)?;
            let (agent, start) = cold(&self.program, &node, (self.store.dir.path(), peers), LIMIT)?;
            let took = start.took.with_context(|| {
                format!("{peers} peers not in the kernel after {} s: {}", LIMIT.as_secs(), node.watch.counts())
            })?;
            say(&format!("{peers} peers: cold start {} ms, kernel phase {} ms of CPU", ms(took), ms(start.kernel_cpu)));
            costs.push(start.kernel_cpu);
            last = Some((agent, node));
        }
        let (agent, node) = last.context("no run")?;
        Ok((quantile(&costs, 0.0).context("no run")?, agent, node))
    }
}

fn grows(costs: &[Duration]) -> f64 {
    let at = |n: usize| costs[n].as_secs_f64();
    // If the first step is zero or negative, no ratio can be computed. Then the second step must be small compared with the whole.
    (at(2) - at(1)) / (at(1) - at(0)).max(at(0) / 4.0)
}

fn ratio(costs: &[Duration]) -> f64 {
    costs[2].as_secs_f64() / costs[0].as_secs_f64()
}

fn is_linear(costs: &[Duration]) -> bool {
    grows(costs) <= MOST_GROWTH || ratio(costs) <= MOST_RATIO
}

/// Checks the work of a node on which nothing happens.
fn idle(agent: &Agent, node: &Node) -> Result<bool> {
    node.watch.quiet(CALM, LIMIT)?;
    let mut right = false;
    for _ in 0..2 {
        node.watch.reset_writes();
        let (cpu, wakeups, begin) = (agent.cpu()?, agent.wakeups()?, Instant::now());
        pause(if right { Duration::ZERO } else { IDLE });
        let time = begin.elapsed().as_secs_f64();
        let share = (agent.cpu()? - cpu).as_secs_f64() / time;
        let woken = (agent.wakeups()? - wakeups) as f64 / time;
        right = judge("idle: writes", node.watch.writes().0 as f64, 0.0);
        right &= judge("idle: share of a core, %", share * 100.0, MOST_CPU * 100.0);
        right &= judge("idle: wake-ups a second", woken, MOST_WAKEUPS);
        if right {
            break;
        }
    }
    Ok(right)
}

/// Checks a restart with everything in place.
fn restart(bed: &Bed, agent: Agent, node: &Node) -> Result<bool> {
    agent.stop()?;
    node.watch.quiet(Duration::from_millis(200), LIMIT)?;
    node.watch.reset_writes();
    let agent = Agent::start(&bed.program, node, bed.store.dir.path())?;
    ensure!(agent.ready(LIMIT)?.is_some(), "not ready {} s after a restart", LIMIT.as_secs());
    node.watch.quiet(CALM, LIMIT)?;
    agent.stop()?;
    Ok(judge("restart in place: writes", node.watch.writes().0 as f64, 0.0))
}

fn judge(what: &str, got: f64, most: f64) -> bool {
    let right = got <= most;
    let word = if right { "ok" } else { "TOO MUCH" };
    say(&format!("{what}: {got:.2}, at most {most:.2}: {word}"));
    right
}

fn ms(time: Duration) -> u128 {
    time.as_millis()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_of_plain_routes_is_too_much_and_a_noisy_line_is_not() {
        let costs = |ms: [u64; 3]| ms.map(Duration::from_millis);
        // First plain routes of one device on Linux 6.18, then a quiet and a busy machine with nexthop objects.
        for (ms, linear) in [([219, 1038, 4767], false), ([25, 50, 100], true), ([94, 205, 553], true)] {
            assert_eq!(is_linear(&costs(ms)), linear, "{ms:?}");
        }
    }
}
