// SPDX-License-Identifier: Apache-2.0
//! The rows over Node objects: a real API server with nodes of realistic size, weft and flanneld one after the other on fresh nodes.

mod cluster;
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

/// The results, in the directory of all results.
pub const RESULTS: &str = "results-kube.json";
/// Nodes that come one by one.
const EVENTS: usize = 100;
/// Status updates of other nodes, and how many of them a second.
const UPDATES: usize = 1000;
const RATE: u32 = 100;
/// Longest wait for one event.
const EVENT: Duration = Duration::from_secs(10);
/// An agent that uses less than this in 2 s has nothing left to do.
const CALM_CPU: Duration = Duration::from_millis(20);
/// Nothing is written for so long: all is done.
const CALM: Duration = Duration::from_secs(2);

/// Measures, what it missed again, and tells it. Whether every promise is kept.
///
/// # Errors
/// When the API server or an agent does not run; a start that takes too long is no error.
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
        eprintln!("   {:<9} {what}: {}", format!("{who:?}").to_lowercase(), table::shown(Some(&cell)));
        self.run.note(("kube", self.options.nodes), what, who, cell);
    }

    fn limit(&self) -> Duration {
        Duration::from_secs(self.options.limit)
    }

    /// From exec to the last peer's entries, and the CPU time of that.
    fn cold(&mut self, program: &Program) -> Result<(Agent, Node, Option<Duration>, Duration)> {
        self.cold_among(program, self.options.nodes)
    }

    /// The same with so many peers that can be believed.
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
        // The next one finds what this one found.
        self.cluster.remove(self.options.nodes..self.options.nodes + EVENTS)
    }

    /// A Node object, complete, from its creation to its route.
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

    /// What the kubelets of others write all the time and no network cares about.
    fn updates(&mut self, agent: &Agent, who: Who) -> Result<()> {
        // What the rows before have left to do (a garbage collector's work) is no cost of these.
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
        // The last ones are still on their way.
        pause(Duration::from_millis(500));
        let each = (agent.cpu()? - before).as_secs_f64() * 1e3 / UPDATES as f64;
        self.note("CPU for a status update of another node", who, Cell::Value(each));
        Ok(())
    }
}

/// The promises, with what all runs say of them.
pub fn judged(run: &Run, nodes: usize) -> Vec<Judged> {
    let later: Vec<Vec<Verdict>> = run.again.iter().map(|again| promises(again, nodes)).collect();
    targets::judge(promises(run, nodes), &later)
}

/// The highest peak of weft; `None` where one was not measured.
fn highest(run: &Run, at: (&str, usize)) -> Option<f64> {
    let peaks = ["memory, peak", strain::LISTED, strain::ATTACKED, strain::STARTED];
    peaks.iter().map(|what| run.value(at, what, Who::Weft)).try_fold(0.0_f64, |most, peak| Some(most.max(peak?)))
}

/// The promises of one run. Those that compare with flanneld are asked for where it was measured.
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
    // 0.1 ms where flanneld takes 0.68: machines differ, so what counts, where both were measured, is how they compare.
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
