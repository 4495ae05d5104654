// SPDX-License-Identifier: Apache-2.0
//! `weft plan`: shows what the agent would write.

use std::process::ExitCode;

use super::{Answer, pretty};
use crate::cli;
use crate::cli::questions::PlanTask;
use crate::observe::{preview, socket};

/// Asks the agent what its next full pass would write. The exit code says whether there is anything to write.
///
/// # Errors
/// No agent answers.
pub async fn run(task: &PlanTask) -> anyhow::Result<Answer> {
    let answer = socket::ask_plan(&task.socket).await?;
    let text = if task.json { pretty(&answer)? } else { preview::render(&answer) };
    let code = if answer.operations.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(cli::exit::FOUND) };
    Ok(Answer { text, code })
}
