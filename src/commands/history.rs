// SPDX-License-Identifier: Apache-2.0
//! `weft history`: shows what the agent changed in the kernel.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use crate::cli::questions::HistoryTask;
use crate::log::text::printable_json;
use crate::observe::history::{self, HistoryRecord, Query};
use crate::observe::socket;

/// How often `--follow` asks for new records.
const INTERVAL: Duration = Duration::from_secs(1);

/// Prints the records that the task asks for. With `--follow` this ends only when standard output is closed. It goes on when the agent
/// is restarted.
///
/// # Errors
/// No agent answers at the first question, or standard output cannot be written.
pub async fn run(task: &HistoryTask) -> anyhow::Result<ExitCode> {
    let mut query = task.since.map(Query::of_last).unwrap_or_default();
    let mut records = socket::ask_history(&task.socket, query).await?;
    let mut was_away = false;
    loop {
        if let Some(last) = records.last() {
            query.after = last.seq;
        }
        if let Err(error) = print(&records, task.json) {
            let closed = error.kind() == io::ErrorKind::BrokenPipe;
            return if closed { Ok(ExitCode::SUCCESS) } else { Err(error.into()) };
        }
        if !task.follow {
            note_empty(task, &records);
            return Ok(ExitCode::SUCCESS);
        }
        tokio::time::sleep(INTERVAL).await;
        records = match socket::ask_history(&task.socket, query).await {
            Ok(records) => {
                was_away = false;
                records
            }
            Err(error) => {
                if !std::mem::replace(&mut was_away, true) {
                    eprintln!("weft: {error:#}; waiting for it");
                }
                Vec::new()
            }
        };
    }
}

/// Says on standard error that nothing was changed, because an empty answer looks like a failure. Programs read the other output.
fn note_empty(task: &HistoryTask, records: &[HistoryRecord]) {
    if records.is_empty() && !task.json {
        let text = match task.since {
            Some(_) => "no changes are recorded in this time: without --since all of them are shown",
            None => "no changes are recorded yet",
        };
        eprintln!("weft: {text}");
    }
}

fn print(records: &[HistoryRecord], json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for record in records {
        if json {
            writeln!(out, "{}", printable_json(&serde_json::to_string(record)?))?;
        } else {
            out.write_all(history::render(record).as_bytes())?;
        }
    }
    out.flush()
}
