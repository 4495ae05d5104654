// SPDX-License-Identifier: Apache-2.0
//! `weft mesh`: shows which peers packets reach.

use std::process::ExitCode;

use crate::cli;
use crate::cli::questions::Question;
use crate::observe::mesh::{self, Mesh};
use crate::observe::socket;

/// Asks the agent. Returns the text to be printed, and the exit code, which says whether a way is broken.
///
/// # Errors
/// No agent answers.
pub async fn run(question: &Question) -> anyhow::Result<(String, ExitCode)> {
    let mesh = Mesh::of(socket::ask_status(&question.socket).await?);
    let text = if question.json { serde_json::to_string_pretty(&mesh)? + "\n" } else { mesh::render(&mesh) };
    let code = if mesh.is_broken() { ExitCode::from(cli::DIFFERENCE) } else { ExitCode::SUCCESS };
    Ok((text, code))
}
