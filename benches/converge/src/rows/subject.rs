// SPDX-License-Identifier: Apache-2.0
//! The rows of a program.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Place, steady};
use crate::measure::{Cell, Who, quantile};
use crate::options::Row;
use crate::peers::Backend;
use crate::process::{Agent, END, Program};
use crate::site::{Node, pause};
use crate::watch::Goal;

/// weft saves changes within this time.
const SAVED: Duration = Duration::from_secs(60);
/// If nothing is written for this time, everything is done.
const CALM: Duration = Duration::from_secs(1);
/// If flanneld has written nothing for this time, it has done everything. It does not announce that, and may wait longer before its first write.
const LONG_CALM: Duration = Duration::from_secs(5);

/// The result of a cold start.
#[derive(Debug, Default)]
pub struct Start {
    /// From exec to the last entry. `None` if it was cut.
    pub took: Option<Duration>,
    /// From exec to the first entry.
    pub first: Option<Duration>,
    /// CPU time until the last entry.
    pub cpu: Duration,
    /// CPU time between the first and the last entry.
    pub kernel_cpu: Duration,
}

/// Starts a program on a fresh node, and waits until all peers are in the kernel.
///
/// # Errors
/// It cannot be started, or it ends.
pub fn cold(program: &Program, node: &Node, (dir, peers): (&Path, usize), limit: Duration) -> Result<(Agent, Start)> {
    node.watch.expect(Goal::First);
    let mut agent = Agent::start(program, node, dir)?;
    let first = node.watch.wait(limit)?;
    let cpu_first = agent.cpu()?;
    node.watch.expect(Goal::Peers(peers));
    let end = node.watch.wait(limit.saturating_sub(agent.started.elapsed()))?;
    let cpu = agent.cpu()?;
    agent.check()?;
    let since = |at: Option<Instant>| at.map(|at| at - agent.started);
    let start = Start { took: since(end), first: since(first), cpu, kernel_cpu: cpu - cpu_first };
    Ok((agent, start))
}

/// Measures all rows of one program, after these cold starts.
///
/// # Errors
/// The program does not run. A row that takes too long is no error.
pub fn all(place: &mut Place<'_>, program: &Program, mut starts: Vec<Start>) -> Result<()> {
    let who = if matches!(program, Program::Weft(..)) { Who::Weft } else { Who::Flanneld };
    let dir = place.store.dir.path().to_owned();
    let mut node = place.node()?;
    let (agent, start) = cold(program, &node, (&dir, place.peers), place.limit())?;
    starts.push(start);
    let limit = place.limit();
    let median = |time: fn(&Start) -> Option<Duration>| {
        let all: Option<Vec<Duration>> = starts.iter().map(time).collect();
        Cell::time(all.and_then(|times| quantile(&times, 0.5)), limit)
    };
    let (took, first, cpu) = (median(|s| s.took), median(|s| s.first), median(|s| s.took.map(|_| s.cpu)));
    place.note("cold start", who, took.clone());
    place.note("cold start, first entry", who, first);
    place.note("cold start, CPU", who, cpu);
    if took.value().is_none() {
        eprintln!("   {}: {}", program.name(), node.watch.counts());
        return Ok(());
    }
    node.watch.quiet(CALM, place.limit())?;
    let (now, peak) = agent.memory()?;
    place.note("memory", who, Cell::Value(now));
    place.note("memory, peak", who, Cell::Value(peak));
    steady::events(place, &node, who, &mut steady::Times::new())?;
    steady::bursts(place, &node, who)?;
    work(place, (program, &agent, &node), who)?;
    let agent = if place.options.wants(Row::Restart) { restart(place, program, (agent, &node), who)? } else { agent };
    if place.options.wants(Row::Repair) {
        steady::repairs(place, &mut node, who)?;
    }
    if place.options.wants(Row::Device) && place.backend != Backend::HostGw {
        steady::device(place, &mut node, who)?;
    }
    agent.stop().map(drop)
}

/// Measures the CPU time of a node that has nothing to do.
fn work(place: &mut Place<'_>, (program, agent, node): (&Program, &Agent, &Node), who: Who) -> Result<()> {
    let share = |before: Duration, begin: Instant| -> Result<Cell> {
        Ok(Cell::Value(100.0 * (agent.cpu()? - before).as_secs_f64() / begin.elapsed().as_secs_f64()))
    };
    if place.options.wants(Row::Idle) {
        let usual = Duration::from_secs(place.options.idle);
        if who == Who::Weft {
            agent.saved(node.watch.writes().1, SAVED)?;
        }
        let (before, begin) = (agent.cpu()?, Instant::now());
        pause(usual);
        // Audits are part of what an idle node does. A whole number of intervals contains as many audits as intervals. What the first
        // audit costs may change the interval, so the agent is asked for it again. Its answer, the status with all peers, costs as much
        // as an audit, and an idle node gives none.
        let mut answers = Duration::ZERO;
        loop {
            let asked = agent.cpu()?;
            let interval = agent.audit_interval(program)?;
            answers += agent.cpu()? - asked;
            let Some(rest) = interval.and_then(|interval| until_whole(interval, usual, begin.elapsed())) else { break };
            pause(rest);
        }
        let cell = share(before + answers, begin)?;
        place.note("CPU idle", who, cell);
    }
    if place.options.wants(Row::Renewals) {
        let (before, begin) = (agent.cpu()?, Instant::now());
        place.store.renew(place.peers, 100, steady::RENEWALS)?;
        let cell = share(before, begin)?;
        place.note("CPU, 100 renewals/s", who, cell);
    }
    Ok(())
}

/// Returns how much longer to watch, so that the time is a whole number of intervals and at least `usual`. `None` if it was long enough.
fn until_whole(interval: Duration, usual: Duration, watched: Duration) -> Option<Duration> {
    let intervals = usual.as_secs_f64() / interval.as_secs_f64().max(0.001);
    interval.mul_f64(intervals.ceil().max(1.0)).checked_sub(watched).filter(|rest| !rest.is_zero())
}

/// Ends the agent, and starts it again with everything in place.
fn restart(place: &mut Place<'_>, program: &Program, (agent, node): (Agent, &Node), who: Who) -> Result<Agent> {
    let ended = agent.stop()?;
    place.note("end after SIGTERM", who, Cell::time(ended, END));
    node.watch.quiet(Duration::from_millis(200), place.limit())?;
    node.watch.reset_writes();
    let agent = Agent::start(program, node, place.store.dir.path())?;
    let took = if who == Who::Weft {
        let ready = agent.ready(place.limit())?;
        node.watch.quiet(CALM, place.limit())?;
        Cell::time(ready.map(|at| at - agent.started), place.limit())
    } else {
        match node.watch.quiet(LONG_CALM, place.limit())? {
            Some(last) => Cell::time(Some(last - agent.started), place.limit()),
            None => Cell::None("writes nothing".into()),
        }
    };
    place.note("restart in place", who, took);
    place.note("restart in place, writes", who, Cell::Value(node.watch.writes().0 as f64));
    Ok(agent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_node_is_watched_for_a_whole_number_of_intervals() {
        let seconds = Duration::from_secs;
        assert_eq!(until_whole(seconds(10), seconds(30), seconds(30)), None);
        assert_eq!(until_whole(seconds(20), seconds(30), seconds(30)), Some(seconds(10)));
        assert_eq!(until_whole(seconds(300), seconds(30), seconds(30)), Some(seconds(270)));
        assert_eq!(until_whole(seconds(300), seconds(30), seconds(301)), None);
    }
}
