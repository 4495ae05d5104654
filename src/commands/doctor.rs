// SPDX-License-Identifier: Apache-2.0
//! `weft doctor`: examines this node, and asks its agent if there is one.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use weft_doctor::node::{AgentAnswer, NodeSources};
use weft_doctor::node_findings::CHECKS;

use crate::cli::doctor::{DoctorTask, FINDINGS};
use crate::log::text::printable;
use crate::observe::socket;

/// Examines this node. Returns what to print, and the exit code: 0 without findings, else [`FINDINGS`].
///
/// # Errors
/// The kernel's tables or /proc cannot be read, so that nothing is known.
pub async fn run(task: DoctorTask) -> anyhow::Result<(String, ExitCode)> {
    let agent = ask_agent(&task.socket).await;
    let sources = NodeSources { subnet_file: task.subnet_file, socket: task.socket, port: task.port, agent };
    let report = weft_doctor::examine_node(&sources, &task.only).context("examine this node")?;
    let text =
        if task.json { serde_json::to_string_pretty(&report.as_json())? + "\n" } else { printable(&report.render()) };
    Ok((text, if report.findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FINDINGS) }))
}

/// An agent that does not show its status must not keep the node from being examined.
async fn ask_agent(socket: &Path) -> AgentAnswer {
    if !socket::answers(socket) {
        return AgentAnswer::None;
    }
    match socket::ask_status(socket).await {
        Ok(status) => AgentAnswer::Problems(status.problems),
        Err(error) => AgentAnswer::Failed(format!("{error:#}")),
    }
}

/// Returns the name of every check with what it looks for, a line each.
pub fn list() -> String {
    CHECKS.iter().map(|check| format!("{:<14} {}\n", check.name, check.about)).collect()
}
