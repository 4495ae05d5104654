// SPDX-License-Identifier: Apache-2.0
//! The commands that are questions to the running agent: `weft status`, `weft plan`, `weft history` and `weft mesh`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};

use super::duration;
use super::flags::InstanceFlags;

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

/// A question to the agent: `weft plan`, `weft mesh`.
#[derive(Debug)]
pub struct Question {
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
    pub(super) part: Option<String>,
    #[command(flatten)]
    pub(super) instance: InstanceFlags,
    /// Form of the answer.
    #[arg(long, short = 'o', default_value = "text", value_parser = ["text", "json"], value_name = "FORM")]
    pub(super) output: String,
}

/// Flags of `weft plan` and `weft mesh`.
#[derive(Args)]
pub(super) struct QuestionFlags {
    #[command(flatten)]
    instance: InstanceFlags,
    /// Form of the answer.
    #[arg(long, short = 'o', default_value = "text", value_parser = ["text", "json"], value_name = "FORM")]
    output: String,
}

/// Flags of `weft history`.
#[derive(Args)]
pub(super) struct HistoryFlags {
    #[command(flatten)]
    instance: InstanceFlags,
    /// Form of the answer; json = one record a line.
    #[arg(long, short = 'o', default_value = "text", value_parser = ["text", "json"], value_name = "FORM")]
    output: String,
    /// Go on, and show new records when they come.
    #[arg(long, short = 'f', action = ArgAction::SetTrue)]
    follow: bool,
    /// Show only records of this time before now, such as 10m.
    #[arg(long, value_parser = duration::duration, value_name = "DURATION")]
    since: Option<Duration>,
}

impl From<QuestionFlags> for Question {
    fn from(flags: QuestionFlags) -> Question {
        Question { socket: flags.instance.socket(), json: flags.output == "json" }
    }
}

impl From<HistoryFlags> for HistoryTask {
    fn from(flags: HistoryFlags) -> HistoryTask {
        HistoryTask {
            socket: flags.instance.socket(),
            json: flags.output == "json",
            follow: flags.follow,
            since: flags.since,
        }
    }
}
