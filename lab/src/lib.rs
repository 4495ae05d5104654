// SPDX-License-Identifier: Apache-2.0
//! `weft lab`: a complete cluster in network namespaces on one machine, as a demonstration for users and as a harness
//! for tests.
//!
//! Nothing remains when its process ends: the namespaces belong to a private mount namespace, and the child processes
//! die with their parent. A lab needs root, and no programs but weft itself and `ping`; etcd, the CNI plugins and
//! iperf3 only when an option asks for them.

pub mod backend_kind;
pub mod change;
pub mod cluster;
pub mod cni;
pub mod fault;
pub mod measure;
pub mod netns;
pub mod network;
pub mod node;
pub mod options;
pub mod ping;
pub mod process;
pub mod report;
pub mod shell;
pub mod store;

use std::cell::Cell;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

pub use backend_kind::BackendKind;
pub use cluster::Lab;
pub use cni::{Pods, Wiring};
pub use options::{Families, LabOptions};
pub use shell::shell;
pub use store::StoreKind;

use report::print_line;

/// The port on which the agents tell each other of their ways. Each node has a network namespace of its own.
const HEALTH_PORT: &str = "--healthz-port=8081";

/// Arguments of `weft lab`.
#[derive(Debug, Clone, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct LabArgs {
    /// The options of the cluster.
    #[command(flatten)]
    pub options: LabOptions,
    /// Measure each backend and the bare underlay (iperf3, ping) instead of injecting faults
    #[arg(long, conflicts_with_all = ["nodes", "backend", "ipv6", "router", "direct_routing", "change_backend",
        "keep"])]
    pub measure: bool,
    /// A subcommand; without one, a lab is run.
    #[command(subcommand)]
    pub command: Option<LabCommand>,
}

/// Subcommands of `weft lab`.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum LabCommand {
    /// A shell inside a node (n1) or a pod (n1-p1) of a running lab
    Shell {
        /// Name of the node or pod
        node: String,
    },
    /// The ways between all nodes of a running lab, as `weft mesh --all` shows them
    Mesh {
        /// Form of the answer
        #[arg(long, short = 'o', default_value = "text", value_parser = ["text", "json", "svg"], value_name = "FORM")]
        output: String,
    },
    /// The page of `weft ui` for a running lab, on 127.0.0.1 of this machine
    Ui {
        /// Port of the page; 0 = any free one
        #[arg(long, default_value_t = 8471, value_name = "PORT")]
        port: u16,
    },
    /// Replaces this process with a program inside a namespace; this is how a lab starts every process
    #[command(hide = true)]
    Exec {
        /// ID of the process that starts this one
        parent: u32,
        /// Name of the namespace
        netns: String,
        /// The program and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        words: Vec<String>,
    },
}

/// Runs `weft lab` with these arguments. `shutdown` begins to listen for the signals that end a lab, and returns what waits for one. A signal
/// ends the other commands as it ends any program.
///
/// # Errors
/// As [`run`] and [`shell`].
pub async fn main<S: Future<Output = ()>>(args: LabArgs, shutdown: impl FnOnce() -> Result<S>) -> Result<ExitCode> {
    match args.command {
        Some(LabCommand::Shell { node }) => shell(&node),
        Some(LabCommand::Mesh { output }) => shell::mesh(&output),
        Some(LabCommand::Ui { port }) => shell::ui(port),
        Some(LabCommand::Exec { parent, netns, words }) => match netns::exec(parent, &netns, &words)? {},
        None if args.measure => {
            let shutdown = shutdown()?;
            tokio::select! {
                done = measure::run(&args.options) => done.map(|()| ExitCode::SUCCESS),
                () = shutdown => Ok(ExitCode::FAILURE),
            }
        }
        None => run(args.options, shutdown()?).await,
    }
}

/// Runs a lab: starts the nodes and pods, pings all pods, injects faults, and prints a report. Returns success only if
/// everything was repaired.
///
/// # Errors
/// The lab cannot be built, or a node does not become ready.
pub async fn run(mut options: LabOptions, shutdown: impl Future<Output = ()>) -> Result<ExitCode> {
    let mut shutdown = std::pin::pin!(shutdown);
    options.agent_flags.push(HEALTH_PORT.to_owned());
    // Dropping this future at any await ends the agents and etcd, and removes the directory.
    let kept = Cell::new(false);
    tokio::select! {
        code = run_until_done(&options, &kept) => code,
        () = &mut shutdown => {
            print_line("everything is taken down");
            Ok(if kept.get() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

/// `kept` becomes true if everything was repaired and the cluster keeps running for its user. A shutdown is then a
/// success.
async fn run_until_done(options: &LabOptions, kept: &Cell<bool>) -> Result<ExitCode> {
    let mut lab = Lab::build(options).await?;
    let _entry = shell::announce(&lab)?;
    let result = run_checks(&mut lab, options).await;
    if !matches!(result, Ok(true)) {
        lab.keep_dir();
        print_line(&format!("logs of the agents, kept in {}:\n{}", lab.dir().join("logs").display(), lab.logs(15)));
    }
    let healed = result?;
    if options.keep {
        kept.set(healed);
        print_line(
            "the cluster stays up: `weft lab shell n1` enters a node, `weft lab mesh` shows the ways between all, Ctrl-C ends it",
        );
        std::future::pending::<()>().await;
    }
    Ok(if healed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn run_checks(lab: &mut Lab, options: &LabOptions) -> Result<bool> {
    print_line(&format!(
        "{} nodes, backend {}, files in {}",
        options.nodes,
        options.backend.wire(),
        lab.dir().display()
    ));
    let begin = Instant::now();
    for node in &mut lab.nodes {
        node.start()?;
    }
    lab.settle().await?;
    for node in &lab.nodes {
        print_line(&report::node(node));
    }
    print_line(&format!("all agents ready, pods in place after {}", report::duration(begin.elapsed())));
    let matrix = lab.reach_all().await?;
    print_line(&report::matrix(&matrix));
    let mut repairs = Vec::new();
    for fault in fault::possible(lab).await? {
        print_line(&format!("breaking: {fault}"));
        let repair = fault::inject(lab, &fault).await?;
        let word =
            repair.took.map_or("not repaired".to_owned(), |took| format!("repaired in {}", report::duration(took)));
        print_line(&format!("          {word}"));
        repairs.push(repair);
    }
    print_line(&report::repairs(&repairs));
    let changed = change::to_other_backend_and_back(lab, options).await?;
    let again = lab.reach_all().await;
    let healed = again.is_ok() && changed && repairs.iter().all(fault::Repair::healed);
    print_line(if healed { "everything healed" } else { "NOT everything healed" });
    again.map(|_| healed)
}

/// Waits for a condition, which is checked every 10 ms.
///
/// # Errors
/// The condition does not hold within `limit`. The message contains `what`.
pub async fn wait_for(what: &str, limit: Duration, condition: impl AsyncFn() -> bool) -> Result<()> {
    let deadline = Instant::now() + limit;
    while !condition().await {
        if Instant::now() >= deadline {
            bail!("waited {} s for {what}", limit.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}
