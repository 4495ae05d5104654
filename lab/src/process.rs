// SPDX-License-Identifier: Apache-2.0
//! Sends signals to the lab's child processes and waits for their end. A process is always addressed through its
//! `Child`, never by name.

use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::Child;

/// How long a lab waits for a process to start or to end, and for what depends on it. It takes seconds at most, unless this machine is
/// busy with much else.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Sends a signal to a running child process.
///
/// # Errors
/// The process does not run.
pub fn signal(child: Option<&Child>, signal: Signal) -> Result<()> {
    let pid = child.and_then(Child::id).context("the process does not run")?;
    kill(Pid::from_raw(i32::try_from(pid)?), signal).with_context(|| format!("send {signal} to {pid}"))
}

/// Sends a signal and waits until the process has ended.
///
/// # Errors
/// The process does not run, or does not end in time; in the second case it is killed.
pub async fn end(child: &mut Option<Child>, with: Signal) -> Result<ExitStatus> {
    signal(child.as_ref(), with)?;
    let mut child = child.take().context("the process does not run")?;
    match tokio::time::timeout(PATIENCE, child.wait()).await {
        Ok(status) => status.context("wait for a process"),
        Err(_) => {
            child.kill().await.context("kill a process that did not end")?;
            anyhow::bail!("the process did not end within {} s of {with}", PATIENCE.as_secs())
        }
    }
}
