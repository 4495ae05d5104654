// SPDX-License-Identifier: Apache-2.0
//! `weft status`: shows the state of the agent.

use super::{Answer, pretty};
use crate::cli::questions::StatusTask;
use crate::observe::socket;
use crate::observe::status::{now_ms, table};

/// Asks the agent.
///
/// # Errors
/// No agent answers.
pub async fn run(task: &StatusTask) -> anyhow::Result<Answer> {
    let status = socket::ask_status(&task.socket).await?;
    let text = match (task.json, task.rules) {
        (true, false) => pretty(&status)?,
        (true, true) => pretty(&status.rules)?,
        (false, false) => table::render(&status, now_ms()),
        (false, true) => table::rules(&status),
    };
    Ok(Answer::success(text))
}
