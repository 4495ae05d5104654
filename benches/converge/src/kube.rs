// SPDX-License-Identifier: Apache-2.0
//! The rows over Node objects: a real API server with nodes of realistic size, weft and flanneld one after the other on fresh nodes.

pub mod cluster;
mod strain;

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::measure::{Cell, Run, Who, quantile};
use crate::options::KubeOptions;
use crate::options::Row;
use crate::peers::Backend;
use crate::process::{Agent, Program};
use crate::site::{Node, build, pause};
use crate::targets::{self, Judged, RUNS, Verdict};
use crate::watch::Goal;
use crate::{about, say, table};

use cluster::{Cluster, OWN};

/// The file of the results, in the directory of all results.
pub const RESULTS: &str = "results-kube.json";
/// The number of nodes that are added one by one.
const EVENTS: usize = 100;
/// The number of status updates of other nodes, and how many of them there are per second.
const UPDATES: usize = 1000;
const RATE: u32 = 100;
/// How long to wait at most for one event.
const EVENT: Duration = Duration::from_secs(10);
/// An agent that uses less CPU time than this in 2 s has finished its work.
const CALM_CPU: Duration = Duration::from_millis(20);
/// If nothing is written for this time, everything is done.
const CALM: Duration = Duration::from_secs(2);

/// Measures, measures again what missed its bound, and prints the results. Returns true if every promise is kept.
///
/// # Errors
/// The API server or an agent does not run. A start that takes too long is no error.
pub fn run(options: &KubeOptions) -> Result<bool> {
    build()?;
    let mut run = Run { about: about::of(&options.weft, options.flanneld.as_deref())?, ..Run::default() };
    eprintln!("== {} Node objects", options.nodes);
    let mut cluster = Cluster::start(&options.binaries)?;
    let size = cluster.fill(0..options.nodes)?;
    run.about.push(("a Node object".to_owned(), format!("{:.1} kB of JSON", size as f64 / 1000.0)));
    let mut bench = Bench { options, cluster, run, nodes: 0 };
    if options.flanneld.is_none() {
        eprintln!("flanneld: skipped: no FLANNELD");
    }
    bench.subjects()?;
    let mut run = std::mem::take(&mut bench.run);
    while !targets::open(&judged(&run, options.nodes)).is_empty() && run.again.len() + 1 < RUNS {
        eprintln!("== missed, measured again");
        bench.subjects()?;
        run.again.push(std::mem::take(&mut bench.run));
    }
    fs::create_dir_all(&options.out).with_context(|| format!("create {}", options.out.display()))?;
    let text = serde_json::to_string_pretty(&run).context("write the results")?;
    let path = options.out.join(RESULTS);
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    let judged = judged(&run, options.nodes);
    say(&format!("{}\n{}", table::text(&run), table::targets(&judged)));
    say(&format!("results: {}", path.display()));
    Ok(crate::all_kept(&judged))
}

struct Bench<'a> {
    options: &'a KubeOptions,
    cluster: Cluster,
    run: Run,
    nodes: usize,
}

impl Bench<'_> {
    fn note(&mut self, what: &str, who: Who, cell: Cell) {
        table::tell(&mut self.run, ("kube", self.options.nodes), (what, who), cell);
    }

    fn limit(&self) -> Duration {
        Duration::from_secs(self.options.limit)
    }

    /// Measures from exec to the entries of the last peer, and the CPU time.
    fn cold(&mut self, program: &Program) -> Result<(Agent, Node, Option<Duration>, Duration)> {
        self.cold_among(program, self.options.nodes)
    }

    /// Measures the same with this number of peers that can be believed.
    fn cold_among(&mut self, program: &Program, peers: usize) -> Result<(Agent, Node, Option<Duration>, Duration)> {
        self.nodes += 1;
        let node = Node::new(&format!("k{}", self.nodes), Backend::Vxlan)?;
        let (config, conf) = (self.cluster.kubeconfig.clone(), self.cluster.net_conf.clone());
        node.watch.expect(Goal::Peers(peers));
        let mut agent = Agent::start_with(program, &node, self.cluster.dir.path(), move |command: &mut Command| {
            command.arg("--kube-subnet-mgr").env("NODE_NAME", OWN);
            command.arg(format!("--kubeconfig-file={}", config.display()));
            command.arg(format!("--net-config-path={}", conf.display()));
        })?;
        let end = node.watch.wait(self.limit())?;
        let cpu = agent.cpu()?;
        agent.check()?;
        let took = end.map(|end| end - agent.started);
        Ok((agent, node, took, cpu))
    }

    fn subjects(&mut self) -> Result<()> {
        self.subject(Who::Weft, &Program::Weft(self.options.weft.clone(), Vec::new()))?;
        match self.options.flanneld.clone() {
            Some(path) => self.subject(Who::Flanneld, &Program::Flanneld(path)),
            None => Ok(()),
        }
    }

    fn subject(&mut self, who: Who, program: &Program) -> Result<()> {
        let repeat = if who == Who::Weft { self.options.repeat.max(1) } else { 1 };
        let (mut times, mut cpus, mut standing) = (Vec::new(), Vec::new(), None);
        for _ in 0..repeat {
            drop(standing.take());
            let (agent, node, took, cpu) = self.cold(program)?;
            times.extend(took);
            cpus.push(cpu);
            standing = Some((agent, node));
        }
        let limit = self.limit();
        let (agent, node) = standing.context("no start")?;
        self.note("cold start", who, Cell::time(quantile(&times, 0.5).filter(|_| times.len() == repeat), limit));
        self.note("cold start, CPU", who, Cell::time(quantile(&cpus, 0.5), limit));
        if times.len() < repeat {
            eprintln!("   {}: {}", program.name(), node.watch.counts());
            return Ok(());
        }
        node.watch.quiet(CALM, limit)?;
        let (now, peak) = agent.memory()?;
        self.note("memory", who, Cell::Value(now));
        self.note("memory, peak", who, Cell::Value(peak));
        self.events(&node, who)?;
        self.updates(&agent, who)?;
        if who == Who::Weft {
            self.strain(agent, node, program, self.options.nodes + EVENTS)?;
        } else {
            agent.stop()?;
        }
        // The next program must find what this one found.
        self.cluster.remove(self.options.nodes..self.options.nodes + EVENTS)
    }

    /// Measures the time from the creation of a complete Node object to its route.
    fn events(&mut self, node: &Node, who: Who) -> Result<()> {
        let mut times = Vec::new();
        for number in self.options.nodes..self.options.nodes + EVENTS {
            node.watch.expect(Goal::Peers(number + 1));
            let begin = Instant::now();
            self.cluster.create(number)?;
            let end = node.watch.wait(EVENT)?.with_context(|| format!("node {number} is not in the kernel"))?;
            times.push(end - begin);
        }
        for (name, part) in [("add p50", 0.5), ("add p99", 0.99)] {
            self.note(name, who, Cell::time(quantile(&times, part), EVENT));
        }
        Ok(())
    }

    /// Measures the cost of the status updates of other kubelets, which do not matter to a network agent.
    fn updates(&mut self, agent: &Agent, who: Who) -> Result<()> {
        // Work that earlier rows have left, such as garbage collection, must not count here.
        let begin = Instant::now();
        loop {
            let before = agent.cpu()?;
            pause(Duration::from_secs(2));
            if agent.cpu()? - before < CALM_CPU || begin.elapsed() >= self.limit() {
                break;
            }
        }
        let before = agent.cpu()?;
        self.cluster.heartbeats(self.options.nodes, UPDATES, RATE)?;
        // The last updates have not arrived yet.
        pause(Duration::from_millis(500));
        let each = (agent.cpu()? - before).as_secs_f64() * 1e3 / UPDATES as f64;
        self.note("CPU for a status update of another node", who, Cell::Value(each));
        Ok(())
    }
}

/// Returns the promises with the verdicts of all runs.
pub fn judged(run: &Run, nodes: usize) -> Vec<Judged> {
    let later: Vec<Vec<Verdict>> = run.again.iter().map(|again| promises(again, nodes)).collect();
    targets::judge(promises(run, nodes), &later)
}

/// Returns the highest peak of weft's memory. `None` if one was not measured.
fn highest(run: &Run, at: (&str, usize)) -> Option<f64> {
    let peaks = ["memory, peak", strain::LISTED, strain::ATTACKED, strain::STARTED];
    peaks.iter().map(|what| run.value(at, what, Who::Weft)).try_fold(0.0_f64, |most, peak| Some(most.max(peak?)))
}

/// Returns the promises of one run. Those that compare with flanneld exist only if flanneld was measured.
fn promises(run: &Run, nodes: usize) -> Vec<Verdict> {
    let at = ("kube", nodes);
    let compared = run.cell(at, "cold start", Who::Flanneld).is_some();
    let (ours, theirs) = (|what: &str| run.value(at, what, Who::Weft), |what: &str| run.value(at, what, Who::Flanneld));
    let times = |what: &str| theirs(what).zip(ours(what)).map(|(theirs, ours)| theirs / ours);
    let mut rows = vec![
        ("memory, MB", ours("memory"), Some(24.0), false),
        ("highest memory, attacked or listing again, MB", highest(run, at), Some(32.0), false),
    ];
    if compared {
        rows.push(("add p50, ms", ours("add p50"), theirs("add p50"), false));
        rows.push(("cold start, times faster than flanneld", times("cold start"), Some(8.0), true));
    }
    // 0.1 ms, where flanneld takes 0.68. Machines differ, so the ratio counts if both were measured.
    let beat = "CPU for a status update of another node";
    rows.push(if compared {
        ("CPU for a status update of another node, times less than flanneld", times(beat), Some(6.8), true)
    } else {
        ("CPU for a status update of another node, ms", ours(beat), Some(0.1), false)
    });
    let verdict = |(what, got, bound, at_least): (&str, Option<f64>, Option<f64>, bool)| Verdict {
        place: format!("kube {nodes}"),
        what: what.to_owned(),
        got,
        bound,
        at_least,
        again: Some((Row::Cold, Vec::new())),
    };
    rows.into_iter().map(verdict).collect()
}
