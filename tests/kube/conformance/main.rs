// SPDX-License-Identifier: Apache-2.0
//! `make kube-conformance`: Kubernetes' own network tests (`[sig-network]` of its e2e.test) in a cluster of three nodes with weft as
//! deploy/ ships it. Each cluster of the matrix is started, tested and removed. The results are kept as JSON in target/conformance, from which
//! docs/conformance.md is written.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "it says what it expected, and ends")]
#![allow(clippy::disallowed_methods, reason = "binaries are named by the environment; pauses between two looks")]
#![allow(clippy::print_stdout, reason = "it talks to its user")]
#![allow(dead_code, reason = "tests use more of the cluster")]

#[path = "../cluster.rs"]
mod cluster;
#[path = "../install.rs"]
mod install;
mod page;
#[path = "../../common/places.rs"]
mod places;
mod report;
mod run;
mod selection;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};

use cluster::Family;
use selection::Selection;

/// Runs Kubernetes' own network tests in clusters with weft.
#[derive(Debug, Parser)]
struct Args {
    /// The tests to run.
    #[arg(long, value_enum, default_value_t = Selection::All)]
    tests: Selection,
    /// The tests whose names match this regular expression, instead of those of --tests.
    #[arg(long)]
    only: Option<String>,
    /// Only clusters whose names contain these words, such as "ipv4 vxlan" [default: all].
    #[arg(long)]
    cluster: Option<String>,
    /// Number of tests that run at the same time.
    #[arg(long, default_value_t = 6)]
    procs: usize,
    /// Directory of the results.
    #[arg(long, default_value = "target/conformance")]
    out: PathBuf,
    /// Run nothing, and write the results of earlier runs as a page into this file.
    #[arg(long)]
    page: Option<PathBuf>,
}

/// How pods are connected to their node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Pods {
    /// The CNI plugin bridge connects them.
    Bridge,
    /// weft-veth connects them, without a bridge.
    Routed,
}

/// One cluster of the matrix.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// The families of the addresses of nodes, pods and Services.
    pub family: Family,
    /// `Backend.Type` of net-conf.
    pub backend: &'static str,
    /// How pods are connected.
    pub pods: Pods,
    /// The mode of kube-proxy.
    pub proxy: &'static str,
}

impl Kind {
    /// Returns its name on the command line and in the page, such as `ipv4 vxlan bridge iptables`.
    pub fn name(&self) -> String {
        let pods = if self.pods == Pods::Bridge { "bridge" } else { "routed" };
        format!("{} {} {pods} {}", self.family.as_str(), self.backend, self.proxy)
    }
}

/// The clusters. Together they have each family with both backends, both ways to connect pods, and both modes of kube-proxy.
const MATRIX: [Kind; 6] = [
    Kind { family: Family::V4, backend: "vxlan", pods: Pods::Bridge, proxy: "iptables" },
    Kind { family: Family::V4, backend: "host-gw", pods: Pods::Routed, proxy: "nftables" },
    Kind { family: Family::Dual, backend: "vxlan", pods: Pods::Routed, proxy: "nftables" },
    Kind { family: Family::Dual, backend: "host-gw", pods: Pods::Bridge, proxy: "iptables" },
    Kind { family: Family::V6, backend: "vxlan", pods: Pods::Bridge, proxy: "nftables" },
    Kind { family: Family::V6, backend: "host-gw", pods: Pods::Routed, proxy: "iptables" },
];

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(page) = &args.page {
        page::write(&args.out, page);
        return ExitCode::SUCCESS;
    }
    let wanted = |kind: &&Kind| args.cluster.as_ref().is_none_or(|name| kind.name().contains(name.as_str()));
    let kinds: Vec<&Kind> = MATRIX.iter().filter(wanted).collect();
    assert!(!kinds.is_empty(), "no cluster has {:?} in its name", args.cluster);
    let mut good = true;
    for kind in kinds {
        println!("== {}", kind.name());
        let report = run::run(
            kind,
            &args.out,
            &run::Wanted { tests: args.tests, only: args.only.as_deref(), procs: args.procs },
        );
        good &= report.judge(args.tests);
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
