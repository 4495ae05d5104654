// SPDX-License-Identifier: Apache-2.0
//! The command line.

use std::ops::RangeInclusive;
use std::path::PathBuf;

use crate::peers::Backend;

/// The numbers of peers with which agents with udp are measured. A cold start reaches 32 of them.
const UDP: RangeInclusive<usize> = 32..=5000;
/// The number of peers with which wireguard is measured: that of tests/vm/wireguard-many.sh.
const WIREGUARD: usize = 1000;

/// Measures weft beside the kernel's floor and flanneld, with a real etcd, in network namespaces of its own. Needs root.
#[derive(Debug, clap::Parser)]
#[command(name = "weft-bench")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub task: Task,
}

/// Subcommands.
#[derive(Debug, clap::Subcommand)]
pub enum Task {
    /// Measure; table on the terminal, JSON and plots into a directory. Fails when a promise is broken or was not measured
    Run(Options),
    /// Measure with the Node objects of a real API server
    Kube(KubeOptions),
    /// Check how costs grow, in at most 60 s; no time is judged
    Shape(ShapeOptions),
    /// Many nodes that start, renew, reboot and leave at once, with one etcd. Fails when a promise is broken
    Storm(StormOptions),
    /// Write the last run's table and plots as documents
    Docs {
        /// Where the last run is
        #[arg(long, default_value = "target/bench")]
        out: PathBuf,
        /// Where the documents go
        #[arg(long, default_value = "docs/bench")]
        docs: PathBuf,
        /// The project's first page, which shows an excerpt
        #[arg(long, default_value = "README.md")]
        readme: PathBuf,
    },
}

/// A row, or a group of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Row {
    /// From exec to the last entry; memory after it. Measured whatever was asked for.
    Cold,
    /// Start with everything in place, after an end by SIGTERM.
    Restart,
    /// One lease: add, change, remove.
    Event,
    /// 1,000 leases at once: add, remove.
    Burst,
    /// A route, FDB entry, neighbour deleted.
    Repair,
    /// The device deleted.
    Device,
    /// CPU with nothing to do.
    Idle,
    /// CPU while others renew their leases.
    Renewals,
    /// What the tunnel of udp carries, beside flannel's and vxlan.
    Packets,
    /// CPU of a comparison of WireGuard peers with the plan.
    Audit,
    /// wireguard in a virtual machine.
    Vm,
}

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// weft's binary
    #[arg(long, env = "WEFT_BIN", value_name = "FILE")]
    pub weft: PathBuf,
    /// weft's binary without Kubernetes, for its size alone
    #[arg(long, value_name = "FILE")]
    pub bare: Option<PathBuf>,
    /// flanneld's binary; without it there are no figures of flanneld
    #[arg(long, env = "FLANNELD", value_name = "FILE")]
    pub flanneld: Option<PathBuf>,
    /// Numbers of peers
    #[arg(long, value_delimiter = ',', default_value = "1000,5000,20000,50000")]
    pub sizes: Vec<usize>,
    /// Backends; vxlan-dual runs with 5,000 peers, or with the smallest size; udp runs with up to 5,000, and wireguard with 1,000
    #[arg(long, value_enum, value_delimiter = ',', default_value = "vxlan,host-gw,vxlan-dual,udp,wireguard")]
    pub backends: Vec<Backend>,
    /// Rows; all when none is given
    #[arg(long, value_enum, value_delimiter = ',')]
    pub rows: Vec<Row>,
    /// Cold starts of weft and of the floor: the median counts
    #[arg(long, default_value_t = 5)]
    pub repeat: usize,
    /// Seconds for which an idle agent is watched at least; longer where its audits come less often
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub idle: u64,
    /// Seconds after which a row is cut
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    pub limit: u64,
    /// More flags for weft, e.g. --no-nexthop-objects
    #[arg(long = "agent-flag", value_name = "FLAG", allow_hyphen_values = true)]
    pub agent_flags: Vec<String>,
    /// Where the results go
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    pub out: PathBuf,
}

impl Options {
    /// Returns true if this row is wanted.
    pub fn wants(&self, row: Row) -> bool {
        self.rows.is_empty() || self.rows.contains(&row)
    }

    /// Returns the backends with numbers of peers, in the order in which they run.
    pub fn sites(&self) -> Vec<(Backend, usize)> {
        let sites = |backend: &Backend| self.sizes_of(*backend).into_iter().map(|n| (*backend, n)).collect::<Vec<_>>();
        self.backends.iter().flat_map(sites).collect()
    }

    /// Returns the backends that are not measured with any of these sizes.
    pub fn left_out(&self) -> impl Iterator<Item = &Backend> {
        self.backends.iter().filter(|backend| self.sizes_of(**backend).is_empty())
    }

    fn sizes_of(&self, backend: Backend) -> Vec<usize> {
        match backend {
            Backend::VxlanDual => {
                let dual = self.sizes.iter().copied().find(|n| *n == 5000).or(self.sizes.iter().copied().min());
                dual.into_iter().collect()
            }
            Backend::Vxlan | Backend::HostGw => self.sizes.clone(),
            // One peer is that to which packets are sent.
            Backend::Udp => std::iter::once(1).chain(self.sizes.iter().copied().filter(|n| UDP.contains(n))).collect(),
            Backend::Wireguard => self.sizes.iter().copied().filter(|n| *n == WIREGUARD).collect(),
        }
    }
}

/// What is measured over Node objects.
#[derive(Debug, Clone, clap::Args)]
pub struct KubeOptions {
    /// weft's binary
    #[arg(long, env = "WEFT_BIN", value_name = "FILE")]
    pub weft: PathBuf,
    /// flanneld's binary; without it there are no figures of flanneld
    #[arg(long, env = "FLANNELD", value_name = "FILE")]
    pub flanneld: Option<PathBuf>,
    /// Where kube-apiserver and etcd are (tools/kube-binaries)
    #[arg(long, value_name = "DIR")]
    pub binaries: PathBuf,
    /// Nodes
    #[arg(long, default_value_t = 5000)]
    pub nodes: usize,
    /// Cold starts of weft: the median counts
    #[arg(long, default_value_t = 3)]
    pub repeat: usize,
    /// Seconds after which a start is cut
    #[arg(long, default_value_t = 120, value_name = "SECONDS")]
    pub limit: u64,
    /// Where the results go
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    pub out: PathBuf,
}

/// What the shape is measured on.
#[derive(Debug, Clone, clap::Args)]
pub struct ShapeOptions {
    /// weft's binary
    #[arg(long, env = "WEFT_BIN", value_name = "FILE")]
    pub weft: PathBuf,
    /// More flags for weft: with --no-nexthop-objects this must fail
    #[arg(long = "agent-flag", value_name = "FLAG", allow_hyphen_values = true)]
    pub agent_flags: Vec<String>,
}

/// What the storms are measured with.
#[derive(Debug, Clone, clap::Args)]
pub struct StormOptions {
    /// Nodes. 200 took 0.1 GB of memory; each node knows all others, so the memory grows with the square of their number
    #[arg(long, default_value_t = 1000)]
    pub size: usize,
    /// flanneld's binary; without it there are no figures of flanneld
    #[arg(long, env = "FLANNELD", value_name = "FILE")]
    pub flanneld: Option<PathBuf>,
    /// Flannelds. Agents and bare clients are measured with this number of nodes, too
    #[arg(long, default_value_t = 100)]
    pub flannelds: usize,
    /// Where kube-apiserver and etcd are (tools/kube-binaries). Without them, the API server is not measured
    #[arg(long, value_name = "DIR")]
    pub binaries: Option<PathBuf>,
    /// Watchers of the API server
    #[arg(long, default_value_t = 100)]
    pub watchers: usize,
    /// Seconds for which nodes are watched that have nothing to do; more than the 10 s after which a lease is renewed on demand
    #[arg(long, default_value_t = 20, value_name = "SECONDS")]
    pub idle: u64,
    /// Seconds after which a storm has failed
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    pub limit: u64,
    /// Where the results go
    #[arg(long, default_value = "target/bench", value_name = "DIR")]
    pub out: PathBuf,
    /// The page that is written
    #[arg(long, default_value = "docs/bench/storm.md", value_name = "FILE")]
    pub page: PathBuf,
}
