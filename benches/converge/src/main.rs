// SPDX-License-Identifier: Apache-2.0
//! The convergence bench: how fast and how small weft is, beside what kernel and store cost anybody, and beside flanneld.
//!
//! Everything runs in network namespaces of this process' own. Nothing here fails because something is slow: `run` measures,
//! `shape` looks at how costs grow.

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
mod table;
mod targets;
mod watch;

use std::fs;
use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use measure::Run;
use options::{Cli, Options, Task};

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Run(options) => run(&options).map(|()| true),
        Task::Shape(options) => shape::run(&options),
        Task::Kube(options) => kube::run(&options).map(|()| true),
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

/// Measures what was asked for, and tells it in every form.
fn run(options: &Options) -> Result<()> {
    site::build()?;
    let binary_mb = about::bare_mb(options.bare.as_ref().unwrap_or(&options.weft))?;
    let mut run = Run { about: about::machine(options)?, binary_mb, lines: Vec::new() };
    if options.flanneld.is_none() {
        eprintln!("flanneld: skipped: no FLANNELD");
    }
    fs::create_dir_all(&options.out).with_context(|| format!("create {}", options.out.display()))?;
    let mut nodes = 0;
    for (backend, peers) in options.sites() {
        rows::all(backend, peers, options, (&mut run, &mut nodes))?;
        // A run that is ended half-way leaves what it has measured.
        let text = serde_json::to_string_pretty(&run).context("write the results")?;
        let path = options.out.join("results.json");
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    plots::draw(&run, &options.out)?;
    say(&format!("{}\n{}", table::text(&run), table::targets(&targets::check(&run))));
    say(&format!("results and plots: {}", options.out.display()));
    Ok(())
}

/// Prints to standard output; a reader that went away is no reason to fail.
pub fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}
