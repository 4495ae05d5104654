// SPDX-License-Identifier: Apache-2.0
//! `weft-sim`: runs simulations. Each runs in a process of its own, so that its seed alone decides what happens.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Parser, Subcommand};
use weft_sim::run::{self, Outcome};
use weft_sim::scenario::{Scenario, StoreKind};
use weft_sim::{shrink, timeline};

/// How many simulations a shrinking may run.
const SHRINK_RUNS: usize = 150;

#[derive(Parser)]
#[command(about = "deterministic simulation of whole clusters: docs/simulation.md")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run one seed, and print its timeline.
    Seed {
        /// The seed.
        seed: u64,
        /// Print only what is wrong.
        #[arg(long)]
        quiet: bool,
    },
    /// Run the seeds one after the other until this time is over or one fails. A failure is shrunk and printed.
    For {
        /// Seconds of real time.
        seconds: u64,
        /// The first seed.
        #[arg(long, default_value_t = 1)]
        first: u64,
        /// The last seed.
        #[arg(long)]
        last: Option<u64>,
    },
    /// Run a scenario that was printed before.
    Play {
        /// The file with the scenario as JSON. Without a file it is read from the standard input.
        file: Option<PathBuf>,
        /// Print the outcome as JSON instead of the timeline.
        #[arg(long)]
        outcome: bool,
    },
    /// Run a cluster of this size, and print how long it took and how much memory it needed.
    Size {
        /// Number of machines.
        machines: usize,
        /// Seconds of virtual time in which events happen.
        seconds: u64,
        /// End as soon as the cluster is at rest, without events. The time given is a limit.
        #[arg(long)]
        until_rest: bool,
        /// Number of other nodes that only publish a lease.
        #[arg(long, default_value_t = 0)]
        publishers: usize,
        /// The store is an API server.
        #[arg(long)]
        kube: bool,
        /// Events per minute.
        #[arg(long, default_value_t = 2)]
        events: u64,
        /// The seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

fn main() -> ExitCode {
    match carry_out(Cli::parse().task) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            say(&format!("weft-sim: {error:#}"));
            ExitCode::from(2)
        }
    }
}

fn say(text: &str) {
    // Whoever reads the output may have enough of it.
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn carry_out(task: Task) -> anyhow::Result<bool> {
    match task {
        Task::Seed { seed, quiet } => {
            let scenario = Scenario::of_seed(seed);
            let outcome = run::run_in_new_directory(&scenario, tracing::Level::INFO)?;
            if !quiet {
                say(&timeline::lines());
            }
            say(&report(&scenario, &outcome));
            Ok(outcome.wrong.is_empty())
        }
        Task::For { seconds, first, last } => search(seconds, first, last.unwrap_or(u64::MAX)),
        Task::Play { file, outcome: only_outcome } => {
            let text = match file {
                Some(file) => std::fs::read_to_string(&file).with_context(|| file.display().to_string())?,
                None => std::io::read_to_string(std::io::stdin())?,
            };
            let scenario: Scenario = serde_json::from_str(&text).context("the scenario")?;
            let level = if only_outcome { tracing::Level::ERROR } else { tracing::Level::INFO };
            let outcome = run::run_in_new_directory(&scenario, level)?;
            if only_outcome {
                say(&serde_json::to_string(&outcome)?);
            } else {
                say(&timeline::lines());
                say(&report(&scenario, &outcome));
            }
            Ok(outcome.wrong.is_empty())
        }
        Task::Size { machines, seconds, until_rest, publishers, kube, events, seed } => {
            let store = if kube { StoreKind::Kube } else { StoreKind::Etcd };
            let events = if until_rest { 0 } else { events };
            let of_size = Scenario::of_size(seed, machines, seconds, events);
            let scenario = Scenario { until_rest, publishers, store, ..of_size };
            let outcome = run::run_in_new_directory(&scenario, tracing::Level::ERROR)?;
            say(&report(&scenario, &outcome));
            Ok(outcome.wrong.is_empty())
        }
    }
}

fn report(scenario: &Scenario, outcome: &Outcome) -> String {
    let Outcome { wrong, fingerprint, virtual_s, real_ms, peak_mib, files_mib } = outcome;
    let Scenario { seed, machines, publishers, backend, events, .. } = scenario;
    let others = if *publishers > 0 { format!(" and {publishers} that only publish") } else { String::new() };
    let memory = format!("{peak_mib} MiB of memory, {files_mib} MiB of files");
    let size = format!(
        "{machines} machines with {backend}{others}, {} events, {virtual_s} s in {real_ms} ms, {memory}",
        events.len()
    );
    let verdict =
        if wrong.is_empty() { "all invariants held".to_owned() } else { format!("FAILED: {}", wrong.join("\n  ")) };
    format!("seed {seed}: {size}, timeline {fingerprint:016x}: {verdict}")
}

/// Runs a scenario in another process.
fn in_process(scenario: &Scenario) -> anyhow::Result<Outcome> {
    let program = std::env::current_exe().context("find this program")?;
    let mut child = Command::new(program)
        .args(["play", "--outcome"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("start another process")?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(serde_json::to_string(scenario)?.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().unwrap_or_default();
    // A panic of an agent ends the process without an outcome.
    Ok(serde_json::from_str(last).unwrap_or_else(|_| Outcome {
        wrong: vec![format!("the process ended with {}: {last}", output.status)],
        fingerprint: 0,
        virtual_s: 0,
        real_ms: 0,
        peak_mib: 0,
        files_mib: 0,
    }))
}

/// Returns the invariant that an outcome names, without its numbers.
fn kind(outcome: &Outcome) -> Option<String> {
    let first = outcome.wrong.first()?;
    Some(first.chars().filter(|c| c.is_alphabetic() || *c == ' ').take(60).collect())
}

fn search(seconds: u64, first: u64, last: u64) -> anyhow::Result<bool> {
    let (began, limit) = (Instant::now(), Duration::from_secs(seconds));
    let mut virtual_s = 0;
    for seed in first..=last {
        if began.elapsed() >= limit {
            say(&format!("seeds {first} to {}: {virtual_s} s of virtual time, all invariants held", seed - 1));
            return Ok(true);
        }
        let scenario = Scenario::of_seed(seed);
        let outcome = in_process(&scenario)?;
        virtual_s += outcome.virtual_s;
        if outcome.wrong.is_empty() {
            continue;
        }
        say(&report(&scenario, &outcome));
        say("The list of events is made shorter ...");
        let wanted = kind(&outcome);
        let same = |scenario: &Scenario| in_process(scenario).is_ok_and(|outcome| kind(&outcome) == wanted);
        let small = shrink::shrink(scenario, SHRINK_RUNS, same);
        let file = std::env::temp_dir().join(format!("weft-sim-{seed}.json"));
        std::fs::write(&file, serde_json::to_string_pretty(&small)?)?;
        let program = std::env::current_exe()?;
        Command::new(program).arg("play").arg(&file).status()?;
        say(&format!("Events: {}", serde_json::to_string(&small.events)?));
        say(&format!("The whole list: make sim SEED={seed}. The short one: weft-sim play {}", file.display()));
        return Ok(false);
    }
    say(&format!("seeds {first} to {last}: {virtual_s} s of virtual time, all invariants held"));
    Ok(true)
}
