// SPDX-License-Identifier: Apache-2.0
//! The figures of the storms, and what is promised of them.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Times;
use super::counters::Counters;
use super::node_api::NodeApi;
use crate::measure::quantile;

/// Requests of a phase: at most this many times those of the bare clients.
pub const MOST_REQUESTS: f64 = 1.5;
/// Seconds: no node waits longer for its lease because others want one, too.
pub const MOST_WAIT: f64 = 5.0;

/// Who the nodes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Who {
    /// Bare clients.
    Floor,
    /// Agents of weft.
    Weft,
    /// Agents of weft whose network has hardly more subnets than they need.
    Crowded,
    /// Real flannelds.
    Flanneld,
}

impl Who {
    /// For messages and tables.
    pub fn name(self) -> &'static str {
        match self {
            Who::Floor => "floor",
            Who::Weft => "weft",
            Who::Crowded => "weft, few subnets",
            Who::Flanneld => "flanneld",
        }
    }
}

/// One phase of a run.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct Phase {
    /// `start`, `idle`, `renew`, `reboot` or `leave`.
    pub name: String,
    /// How many nodes act.
    pub nodes: usize,
    /// Seconds until a node has its lease: half of the nodes, and all.
    pub lease: Option<(f64, f64)>,
    /// Seconds until a node has what the phase is about: half of the nodes, and all.
    pub complete: Option<(f64, f64)>,
    /// How many nodes were to reach it.
    pub expected: usize,
    /// How many nodes reached it.
    pub reached: usize,
    /// How often a node ended by itself and was started again.
    pub restarts: usize,
    /// Requests of all nodes, by method.
    pub requests: BTreeMap<String, u64>,
    /// Bytes that etcd received.
    pub received: u64,
    /// Bytes that etcd sent.
    pub sent: u64,
    /// Events that etcd sent, counted once for each watcher.
    pub events: u64,
    /// Seconds of CPU time of etcd.
    pub etcd_cpu: f64,
    /// Seconds of CPU time of all nodes in this process.
    pub own_cpu: f64,
}

impl Phase {
    /// Puts the figures of a phase together.
    pub(super) fn new((name, nodes): (&str, usize), times: &Times, counters: Counters) -> Phase {
        let both = |times: &[Duration]| {
            let at = |part| quantile(times, part).map(|time| time.as_secs_f64());
            at(0.5).zip(at(1.0))
        };
        Phase {
            name: name.to_owned(),
            nodes,
            lease: both(&times.leases),
            complete: both(&times.complete),
            expected: times.expected,
            restarts: times.restarts,
            reached: times.complete.len(),
            received: counters.bytes_received,
            sent: counters.bytes_sent,
            events: counters.events,
            etcd_cpu: counters.etcd_cpu.as_secs_f64(),
            own_cpu: counters.own_cpu.as_secs_f64(),
            requests: counters.requests,
        }
    }

    /// Returns the requests of each node.
    pub fn requests_per_node(&self) -> f64 {
        self.requests.values().sum::<u64>() as f64 / self.nodes as f64
    }

    /// Describes the phase on one line, for the terminal.
    pub fn line(&self) -> String {
        let time =
            |times: Option<(f64, f64)>| times.map_or_else(String::new, |(half, all)| format!("{half:.2}/{all:.2} s"));
        format!(
            "{}: leases {}, complete {}, requests per node {:.2} {:?}, etcd {:.2} s CPU, {} events",
            self.name,
            time(self.lease),
            time(self.complete),
            self.requests_per_node(),
            self.requests,
            self.etcd_cpu,
            self.events
        )
    }
}

/// All phases with nodes of one kind.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Run {
    /// Who the nodes are.
    pub who: Who,
    /// How many there are.
    pub size: usize,
    /// What was measured, in order.
    pub phases: Vec<Phase>,
    /// Resident memory for each node, with its kernel in memory, in MB.
    pub memory_mb: Option<f64>,
}

impl Run {
    /// Returns the phase of this name.
    pub fn phase(&self, name: &str) -> Option<&Phase> {
        self.phases.iter().find(|phase| phase.name == name)
    }
}

/// Everything that was measured.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Results {
    /// On which machine, with which versions.
    pub about: Vec<(String, String)>,
    /// The runs, in order.
    pub runs: Vec<Run>,
    /// The API server of Kubernetes, if it was measured.
    pub node_api: Option<NodeApi>,
}

impl Results {
    /// Returns the run with these nodes.
    pub fn run(&self, who: Who, size: usize) -> Option<&Run> {
        self.runs.iter().find(|run| run.who == who && run.size == size)
    }

    /// Returns the sizes at which weft was measured beside the floor.
    pub fn sizes(&self) -> Vec<usize> {
        self.runs.iter().filter(|run| run.who == Who::Weft).map(|run| run.size).collect()
    }

    /// Returns each promise that is not kept, as a sentence.
    pub fn broken(&self) -> Vec<String> {
        let mut broken = Vec::new();
        for run in self.runs.iter().filter(|run| matches!(run.who, Who::Weft | Who::Crowded)) {
            let floor = self.run(Who::Floor, run.size);
            for phase in run.phases.iter().filter(|phase| phase.name != "idle") {
                let place = format!("{} nodes, {}, {}", run.size, run.who.name(), phase.name);
                if let Some(floor) = floor.and_then(|floor| floor.phase(&phase.name)).filter(|_| run.who == Who::Weft) {
                    let ratio = phase.requests_per_node() / floor.requests_per_node();
                    if ratio > MOST_REQUESTS {
                        broken.push(format!(
                            "{place}: {ratio:.2} times the requests of bare clients, at most {MOST_REQUESTS}"
                        ));
                    }
                }
                // With many nodes on one machine, the wait for a processor is longer than that for others. So the floor's is subtracted.
                let waited = |phase: &Phase| phase.lease.map(|(_, all)| all);
                let bare = floor.and_then(|floor| floor.phase(&phase.name)).and_then(waited).unwrap_or(0.0);
                if let Some(wait) = waited(phase).map(|all| all - bare).filter(|wait| *wait > MOST_WAIT) {
                    broken.push(format!("{place}: a node waits {wait:.1} s longer for its lease than a bare client"));
                }
            }
        }
        broken
    }
}

/// Returns the resident memory of this process in MB.
///
/// # Errors
/// /proc cannot be read.
pub fn memory_mb() -> Result<f64> {
    let text = fs::read_to_string("/proc/self/status").context("read /proc/self/status")?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kb: f64 = line.trim().trim_end_matches(" kB").parse().context("read VmRSS")?;
    Ok(kb / 1024.0)
}
