// SPDX-License-Identifier: Apache-2.0
//! The commands that do not run the agent, a file each. They return what is to be printed. [`crate::cli`] reads their flags.

use std::process::ExitCode;

use serde::Serialize;

use crate::log::text::printable_json;

pub mod cleanup;
pub mod copy;
pub mod docker_options;
pub mod doctor;
pub mod explain;
pub mod history;
pub mod install_cni;
pub mod leases;
pub mod mesh;
mod other_agents;
pub mod plan;
pub mod status;
pub mod ui;
pub mod version;

/// What a command has to say.
#[derive(Debug, Clone)]
pub struct Answer {
    /// What is printed to standard output.
    pub text: String,
    /// The exit code, if the text could be printed.
    pub code: ExitCode,
}

/// Returns an answer as JSON for people and programs, with a line break at its end.
fn pretty(answer: &impl Serialize) -> serde_json::Result<String> {
    Ok(printable_json(&serde_json::to_string_pretty(answer)?) + "\n")
}

impl Answer {
    /// Returns the answer of a command that has succeeded.
    pub fn success(text: impl Into<String>) -> Answer {
        Answer { text: text.into(), code: ExitCode::SUCCESS }
    }
}
