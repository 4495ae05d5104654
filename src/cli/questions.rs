// SPDX-License-Identifier: Apache-2.0
//! The commands that are questions to the running agent: `weft status`, `weft plan`, `weft history`, `weft mesh` and `weft ui`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, ValueEnum};

use super::duration;
use super::flags::{FormFlags, InstanceFlags};

/// `weft history`.
#[derive(Debug)]
pub struct HistoryTask {
    /// The socket of the agent.
    pub socket: PathBuf,
    /// Print each record as one line of JSON.
    pub json: bool,
    /// Wait for new records.
    pub follow: bool,
    /// Only records that are not older than this.
    pub since: Option<Duration>,
}

/// `weft status`.
#[derive(Debug)]
pub struct StatusTask {
    /// The socket of the agent.
    pub socket: PathBuf,
    /// Print JSON.
    pub json: bool,
    /// Print only the traffic rules.
    pub rules: bool,
}

/// `weft mesh`.
#[derive(Debug)]
pub struct MeshTask {
    /// The socket of the agent.
    pub socket: PathBuf,
    /// The form of the answer.
    pub output: Output,
    /// Ask all nodes.
    pub all: bool,
    /// The health port of the other nodes. `None` if it is that of this node.
    pub port: Option<u16>,
}

/// The form of the answer of `weft mesh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// For programs.
    Json,
    /// A picture of the ways between all nodes.
    Svg,
}

/// `weft plan`.
#[derive(Debug)]
pub struct PlanTask {
    /// The socket of the agent.
    pub socket: PathBuf,
    /// Print JSON.
    pub json: bool,
}

/// Flags of `weft status`.
#[derive(Args)]
pub(super) struct StatusFlags {
    /// Show the traffic rules one by one instead of everything.
    #[arg(value_parser = ["rules"], value_name = "rules")]
    part: Option<String>,
    #[command(flatten)]
    instance: InstanceFlags,
    #[command(flatten)]
    form: FormFlags,
}

/// Flags of `weft plan`.
#[derive(Args)]
pub(super) struct PlanFlags {
    #[command(flatten)]
    instance: InstanceFlags,
    #[command(flatten)]
    form: FormFlags,
}

/// Flags of `weft mesh`.
#[derive(Args)]
pub(super) struct MeshFlags {
    #[command(flatten)]
    instance: InstanceFlags,
    /// Ask all nodes, on their health ports, and show the ways between all of them.
    #[arg(long, action = ArgAction::SetTrue)]
    all: bool,
    /// With --all: health port of the other nodes [default: the one of this node].
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Form of the answer.
    #[arg(long, short = 'o', value_enum, default_value_t = Output::Text, value_name = "FORM")]
    output: Output,
}

/// `weft ui`.
#[derive(Debug)]
pub struct UiTask {
    /// The socket of the agent.
    pub socket: PathBuf,
    /// The subnet file of the agent.
    pub subnet_file: PathBuf,
    /// The port of the page.
    pub port: u16,
    /// The health port of the other nodes. `None` if it is that of this node.
    pub peer_port: Option<u16>,
    /// Standard input is the listening socket. `weft lab ui` opens it outside of the node's namespace.
    pub listen_stdin: bool,
}

/// Flags of `weft ui`.
#[derive(Args)]
pub(super) struct UiFlags {
    #[command(flatten)]
    instance: InstanceFlags,
    /// Port of the page on 127.0.0.1; 0 = any free one.
    #[arg(long, default_value_t = 8471, value_name = "PORT")]
    port: u16,
    /// Health port of the other nodes [default: the one of this node].
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    peer_port: Option<u16>,
    /// Standard input is the listening socket.
    #[arg(long, action = ArgAction::SetTrue, hide = true)]
    listen_stdin: bool,
}

impl From<UiFlags> for UiTask {
    fn from(flags: UiFlags) -> UiTask {
        let socket = flags.instance.socket();
        let subnet_file = flags.instance.subnet_file;
        UiTask { socket, subnet_file, port: flags.port, peer_port: flags.peer_port, listen_stdin: flags.listen_stdin }
    }
}

/// Flags of `weft history`.
#[derive(Args)]
pub(super) struct HistoryFlags {
    #[command(flatten)]
    instance: InstanceFlags,
    #[command(flatten)]
    form: FormFlags,
    /// Go on, and show new records when they come.
    #[arg(long, short = 'f', action = ArgAction::SetTrue)]
    follow: bool,
    /// Show only the records of the last DURATION, such as 10m.
    #[arg(long, value_parser = duration::duration, value_name = "DURATION")]
    since: Option<Duration>,
}

impl From<StatusFlags> for StatusTask {
    fn from(flags: StatusFlags) -> StatusTask {
        StatusTask { socket: flags.instance.socket(), json: flags.form.is_json(), rules: flags.part.is_some() }
    }
}

impl From<PlanFlags> for PlanTask {
    fn from(flags: PlanFlags) -> PlanTask {
        PlanTask { socket: flags.instance.socket(), json: flags.form.is_json() }
    }
}

impl From<MeshFlags> for MeshTask {
    fn from(flags: MeshFlags) -> MeshTask {
        let socket = flags.instance.socket();
        // A picture of one row would show little, so it always has all nodes.
        let all = flags.all || flags.output == Output::Svg;
        MeshTask { socket, output: flags.output, all, port: flags.port }
    }
}

impl From<HistoryFlags> for HistoryTask {
    fn from(flags: HistoryFlags) -> HistoryTask {
        HistoryTask {
            socket: flags.instance.socket(),
            json: flags.form.is_json(),
            follow: flags.follow,
            since: flags.since,
        }
    }
}
