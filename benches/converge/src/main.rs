// SPDX-License-Identifier: Apache-2.0
//! The convergence bench measures how fast and how small weft is, compared with what the kernel and the store cost any program, and with
//! flanneld.
//!
//! Everything runs in network namespaces of this process. `run` and `kube` measure, and fail if a promise is broken (`targets.rs`). `shape`
//! checks how costs grow, and never asserts times.

mod about;
mod docs;
mod floor;
mod kube;
mod measure;
mod options;
mod peers;
mod plots;
mod process;
mod rows;
mod shape;
mod site;
mod store;
mod storm;
mod table;
mod targets;
mod udp;
mod watch;
mod wireguard;

use std::fs;
use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use measure::Run;
use options::{Cli, Options, Row, Task};
use peers::Backend;

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Run(options) => run(&options),
        Task::Shape(options) => shape::run(&options),
        Task::Kube(options) => kube::run(&options),
        Task::Storm(options) => storm::run(&options),
        Task::Docs { out, docs, readme } => docs::write(&out, &docs, &readme).map(|()| true),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("weft-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Measures what is wanted, measures again what missed its bound, and writes the results. Returns true if every promise is kept.
fn run(options: &Options) -> Result<bool> {
    site::build()?;
    let binary_mb = about::bare_mb(options.bare.as_ref().unwrap_or(&options.weft))?;
    let mut run = Run { about: about::machine(options)?, binary_mb, rows: options.rows.clone(), ..Run::default() };
    if options.flanneld.is_none() {
        eprintln!("flanneld: skipped: no FLANNELD");
    }
    for backend in options.left_out() {
        eprintln!("{}: skipped: it is not measured with these sizes", backend.name());
    }
    fs::create_dir_all(&options.out).with_context(|| format!("create {}", options.out.display()))?;
    let mut nodes = 0;
    for (backend, peers) in options.sites() {
        place(backend, peers, options, (&mut run, &mut nodes))?;
        // A run that is ended early leaves the results so far.
        save(&run, options)?;
    }
    while let Some(later) = again(&run, options, &mut nodes)? {
        run.again.push(later);
        save(&run, options)?;
    }
    plots::draw(&run, &options.out)?;
    let judged = targets::judged(&run);
    say(&format!("{}\n{}", table::text(&run), table::targets(&judged)));
    say(&format!("results and plots: {}", options.out.display()));
    Ok(all_kept(&judged))
}

/// Measures everything that is wanted with a backend and a number of peers.
fn place(backend: Backend, peers: usize, options: &Options, results: (&mut Run, &mut usize)) -> Result<()> {
    eprintln!("== {}, peers: {peers}", backend.name());
    match backend {
        Backend::Vxlan | Backend::HostGw | Backend::VxlanDual => rows::all(backend, peers, options, results),
        Backend::Udp => udp::all(peers, options, results).context("udp"),
        Backend::Wireguard => wireguard::all(peers, options, results.0).context("wireguard"),
    }
}

fn save(run: &Run, options: &Options) -> Result<()> {
    let text = serde_json::to_string_pretty(run).context("write the results")?;
    let path = options.out.join("results.json");
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))
}

/// Measures once more what is in doubt. Returns `None` if nothing is, or if it was measured often enough.
fn again(run: &Run, options: &Options, nodes: &mut usize) -> Result<Option<Run>> {
    let judged = targets::judged(run);
    let open = targets::open(&judged);
    if open.is_empty() || run.again.len() + 1 >= targets::RUNS {
        return Ok(None);
    }
    let doubtful: Vec<String> = open.iter().map(|verdict| verdict.name()).collect();
    eprintln!("== missed, measured again: {}", doubtful.join("; "));
    let mut later = Run { doubtful, ..Run::default() };
    for (backend, peers) in options.sites() {
        let here = format!("{} {peers}", backend.name());
        let needs = |verdict: &&&targets::Verdict| {
            verdict.place == here || verdict.again.as_ref().is_some_and(|(_, places)| places.contains(&here))
        };
        let rows: Vec<Row> = open.iter().filter(needs).filter_map(|v| v.again.as_ref().map(|(row, _)| *row)).collect();
        if rows.is_empty() {
            continue;
        }
        let compared = open.iter().filter(needs).any(|verdict| verdict.what.ends_with("than flanneld"));
        later.rows.extend(&rows);
        let flanneld = options.flanneld.clone().filter(|_| compared);
        place(backend, peers, &Options { rows, flanneld, ..options.clone() }, (&mut later, nodes))?;
    }
    Ok(Some(later))
}

/// Prints the promises that are broken or were not measured. Returns true if there are none.
pub fn all_kept(judged: &[targets::Judged]) -> bool {
    let complaints = targets::complaints(judged);
    for complaint in &complaints {
        eprintln!("weft-bench: {complaint}");
    }
    complaints.is_empty()
}

/// Prints to standard output. It is no error if nobody reads it.
pub fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}
