// SPDX-License-Identifier: Apache-2.0
//! Runs the commands of the backend extension, which net-conf names: one before the lease, one after it, and one for each peer that comes
//! or leaves. Everything that they make is theirs, and no other part of the agent touches it.
//!
//! Whoever may write net-conf decides what is run here as the user of the agent. So nothing is run without `--allow-extension`.

pub mod memory;
pub mod peers;
mod process;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use weft_backends::backend::Backend;
use weft_backends::commands::{CommandLine, CommandPeer, Commands, Variable};
use weft_subnet::retry::Backoff;

use crate::files;
use crate::options::NetConfCommands;
use peers::{PeerTable, Step};
pub use process::CommandError;

/// A command that has not ended after this time is killed.
pub const LIMIT: Duration = Duration::from_secs(30);
/// Maximum number of commands for peers that run at the same time.
const MAX_AT_ONCE: usize = 8;
/// The longest pause before the command after the lease is tried again.
const LAST_OWN_PAUSE: Duration = Duration::from_secs(30);
const OWN_BACKOFF: Backoff = Backoff::without_jitter(Duration::from_secs(1), LAST_OWN_PAUSE);
/// The pause between two lists of peers, as a multiple of the time that it took to compare one.
const LIST_PAUSE: u32 = 9;
/// The shortest time between two writes of the file with the peers.
const SAVE_PAUSE: Duration = Duration::from_secs(1);
/// The same while writes fail.
const FAILING_SAVE_PAUSE: Duration = Duration::from_secs(30);
/// How long the end of the agent waits for the disk.
const STOP_LIMIT: Duration = Duration::from_secs(2);

/// Why a node cannot start with the commands of its net-conf.
#[derive(Debug, thiserror::Error)]
pub enum FirstError {
    /// The flag is missing.
    #[error(
        "net-conf: the backend extension runs the commands of net-conf on every node as the user of the agent, so whoever may write \
         net-conf could run any program here: start the agent with --allow-extension if that is wanted, or choose another backend"
    )]
    NotAllowed,
    /// The command failed.
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// The command that runs before there is a lease.
#[derive(Debug, Default)]
pub struct FirstCommand {
    is_allowed: bool,
    /// The command that has succeeded, and what it printed.
    ran: Option<(CommandLine, Vec<u8>)>,
}

impl FirstCommand {
    /// Returns a command that has not run. `commands` says whether it may.
    pub fn new(commands: NetConfCommands) -> FirstCommand {
        FirstCommand { is_allowed: commands == NetConfCommands::Run, ran: None }
    }

    /// Runs the command of this backend, if it has one that has not succeeded yet.
    ///
    /// # Errors
    /// The backend has commands and the flag does not allow them, or the command failed.
    pub async fn run(&mut self, backend: &dyn Backend) -> Result<(), FirstError> {
        let Some(commands) = backend.commands() else { return Ok(()) };
        if !self.is_allowed {
            return Err(FirstError::NotAllowed);
        }
        let Some(line) = &commands.before_lease else { return Ok(()) };
        if self.ran.as_ref().is_some_and(|(ran, _)| ran == line) {
            return Ok(());
        }
        let printed = process::run(line, &[], "", LIMIT).await?;
        tracing::info!(output = %process::text(&printed), "the command before the lease has run: its output is published");
        self.ran = Some((line.clone(), printed));
        Ok(())
    }

    /// Returns what the command printed, if it has run.
    pub fn printed(&self) -> Option<&[u8]> {
        self.ran.as_ref().map(|(_, printed)| &printed[..])
    }
}

/// What the commands are to do.
pub struct Wanted<'a> {
    /// The commands.
    pub commands: &'a Arc<Commands>,
    /// The variables of the command after the lease.
    pub own: Vec<Variable>,
    /// The version of the peers. Only if it is another one than before, the peers are asked for.
    pub version: u64,
    /// Returns the peers. `None` if they are not known yet.
    pub peers: Option<&'a dyn Fn() -> Vec<CommandPeer>>,
    /// True if a peer that is not among them has left.
    pub may_remove: bool,
}

/// The command that runs when the node has its lease.
#[derive(Debug, Default)]
struct Own {
    /// The variables with which it has succeeded, if it has not failed since.
    done: Option<Vec<Variable>>,
    /// It has not succeeded with the variables that are wanted now.
    is_awaited: bool,
    is_running: bool,
    failures: u32,
    retry_at: Option<Instant>,
    problem: Option<String>,
}

/// A command that has ended.
enum Ended {
    Own(Vec<Variable>, Result<Vec<u8>, CommandError>),
    Peer(Step, Result<Vec<u8>, CommandError>),
}

/// The commands of this node, and what is known of their failures.
#[derive(Debug, Default)]
pub struct Extension {
    file: Option<PathBuf>,
    is_loaded: bool,
    own: Own,
    peers: PeerTable,
    /// Version of the peers in the table, and whether peers could be removed then.
    seen: Option<(u64, bool)>,
    next_list: Option<Instant>,
    repeat_at: Option<Instant>,
    tasks: JoinSet<Ended>,
    ended: Arc<Notify>,
    saving: Option<JoinHandle<()>>,
    /// The last write failed, which was logged. It is tried again even if nothing changes.
    save_fails: Arc<AtomicBool>,
    save_at: Option<Instant>,
}

impl Extension {
    /// Returns a state in which nothing has run. `file` is where peers are remembered for the next start ([`memory::file`]).
    pub fn new(file: Option<PathBuf>) -> Extension {
        Extension { file, ..Extension::default() }
    }

    /// Starts the commands that are due. This costs little while nothing has changed.
    pub fn update(&mut self, wanted: &Wanted<'_>, now: Instant) {
        self.collect(now);
        self.update_own(wanted, now);
        self.own.is_awaited = self.own.done.as_ref() != Some(&wanted.own);
        if self.own.is_awaited {
            return;
        }
        if wanted.commands.concern_peers() {
            self.load();
            self.update_peers(wanted, now);
            self.start_due(wanted.commands, now);
            self.save(now);
        }
    }

    /// Returns when to call [`Extension::update`], besides after every event.
    pub fn next(&self) -> Option<Instant> {
        // Nothing is done for peers before.
        if self.own.is_awaited {
            return self.own.retry_at;
        }
        let has_room = self.tasks.len() < MAX_AT_ONCE;
        let due = self.peers.next().filter(|_| has_room);
        [self.own.retry_at, due, self.next_list, self.repeat_at, self.save_at].into_iter().flatten().min()
    }

    /// Returns what is notified when a command has ended. Call [`Extension::update`] then.
    pub fn ended(&self) -> Arc<Notify> {
        self.ended.clone()
    }

    /// Returns why pods must not start yet: the command after the lease has not succeeded.
    pub fn problem(&self, wanted: &[Variable]) -> Option<String> {
        if self.own.done.as_deref() == Some(wanted) {
            return None;
        }
        let waits = || "PostStartupCommand: it has not ended yet".to_owned();
        Some(self.own.problem.clone().unwrap_or_else(waits))
    }

    /// Returns the state of the peers.
    pub fn peers(&self) -> &PeerTable {
        &self.peers
    }

    /// Describes what is wrong with commands for peers that have left.
    pub fn removal_problem(&self) -> Option<String> {
        let mut failed = self.peers.failed_removals();
        let (subnets, reason) = failed.next()?;
        let more = failed.count();
        let more = if more > 0 { format!(", and {more} more") } else { String::new() };
        Some(format!("the command for peers that have left failed, and is tried again: {subnets}: {reason}{more}"))
    }

    /// Ends the commands that run, and writes the file. What the commands made stays.
    pub async fn stop(&mut self) {
        self.tasks.abort_all();
        while self.tasks.join_next().await.is_some() {}
        self.wait_for_disk().await;
        self.save_at = None;
        self.save(Instant::now());
        self.wait_for_disk().await;
    }

    async fn wait_for_disk(&mut self) {
        if let Some(saving) = self.saving.take() {
            let _ = tokio::time::timeout(STOP_LIMIT, saving).await;
        }
    }

    fn load(&mut self) {
        if std::mem::replace(&mut self.is_loaded, true) {
            return;
        }
        let Some(file) = &self.file else { return };
        match memory::read(file) {
            Ok(peers) => self.peers.remember(peers),
            Err(error) => {
                let file = file.display();
                tracing::warn!(
                    "extension: read {file}: {error}; peers that left while the agent was down get no SubnetRemoveCommand"
                );
            }
        }
    }

    fn collect(&mut self, now: Instant) {
        while let Some(ended) = self.tasks.try_join_next() {
            match ended {
                Ok(Ended::Own(variables, result)) => self.own_ended(variables, result, now),
                Ok(Ended::Peer(step, result)) => {
                    self.peers.end(step, result.map(drop), now);
                }
                Err(_) => {}
            }
        }
    }

    fn own_ended(&mut self, variables: Vec<Variable>, result: Result<Vec<u8>, CommandError>, now: Instant) {
        self.own.is_running = false;
        match result {
            Ok(printed) => {
                tracing::info!(output = %process::text(&printed), "the command after the lease has run");
                self.own = Own { done: Some(variables), ..Own::default() };
            }
            Err(error) => {
                let error = error.to_string();
                if self.own.problem.as_ref() != Some(&error) {
                    tracing::error!("no pod may start, because a command failed, which is tried again: {error}");
                }
                // It may have done a part of its work, so what an earlier one has done counts no more.
                self.own.done = None;
                self.own.retry_at = Some(now + OWN_BACKOFF.nth(self.own.failures));
                self.own.failures += 1;
                self.own.problem = Some(error);
            }
        }
    }

    fn update_own(&mut self, wanted: &Wanted<'_>, now: Instant) {
        let Own { done, is_running, retry_at, .. } = &self.own;
        if *is_running || done.as_ref() == Some(&wanted.own) || retry_at.is_some_and(|at| now < at) {
            return;
        }
        self.own.retry_at = None;
        let Some(line) = wanted.commands.after_lease.clone() else {
            self.own.done = Some(wanted.own.clone());
            return;
        };
        self.own.is_running = true;
        let (ended, variables) = (self.ended.clone(), wanted.own.clone());
        self.tasks.spawn(async move {
            let result = process::run(&line, &variables, "", LIMIT).await;
            ended.notify_one();
            Ended::Own(variables, result)
        });
    }

    fn update_peers(&mut self, wanted: &Wanted<'_>, now: Instant) {
        let Some(peers) = wanted.peers else { return };
        let seen = (wanted.version, wanted.may_remove);
        if self.seen != Some(seen) && self.next_list.is_none_or(|at| at <= now) {
            let began = Instant::now();
            self.peers.set_wanted(peers(), wanted.may_remove, now);
            self.seen = Some(seen);
            self.next_list = Some(now + began.elapsed() * LIST_PAUSE);
        }
        // It is a reason to wake up only while a list waits.
        self.next_list = self.next_list.filter(|at| now < *at);
        if let Some(repeat) = wanted.commands.repeat {
            if self.repeat_at.is_some_and(|at| at <= now) {
                self.peers.repeat(now);
            }
            let at = self.repeat_at.filter(|at| now < *at);
            self.repeat_at = Some(at.unwrap_or(now + repeat));
        }
    }

    fn start_due(&mut self, commands: &Arc<Commands>, now: Instant) {
        while self.tasks.len() < MAX_AT_ONCE {
            let Some(step) = self.peers.begin(now) else { return };
            let (line, peer) = match &step {
                Step::Add(peer) => (&commands.add, peer),
                Step::Remove(peer) => (&commands.remove, peer),
            };
            // flannel runs nothing for a command that net-conf does not name.
            let Some(line) = line.clone() else {
                self.peers.end(step, Ok(()), now);
                continue;
            };
            let (ended, peer) = (self.ended.clone(), peer.clone());
            self.tasks.spawn(async move {
                let result = process::run(&line, &peer.variables(), &peer.data, LIMIT).await;
                ended.notify_one();
                Ended::Peer(step, result)
            });
        }
    }

    /// Writes the file on another thread, because the disk may hang.
    fn save(&mut self, now: Instant) {
        let Some(file) = self.file.clone() else { return };
        let is_saving = self.saving.as_ref().is_some_and(|saving| !saving.is_finished());
        let is_failing = self.save_fails.load(Ordering::Relaxed);
        // A write that is under way may fail.
        if !self.peers.is_changed && !is_saving && !is_failing {
            self.save_at = None;
            return;
        }
        if self.save_at.is_some_and(|at| now < at) {
            return;
        }
        self.save_at = Some(now + if is_failing { FAILING_SAVE_PAUSE } else { SAVE_PAUSE });
        if is_saving {
            return;
        }
        self.peers.is_changed = false;
        let (peers, fails) = (self.peers.made(), self.save_fails.clone());
        self.saving = Some(files::spawn_blocking(move || log_write(&file, memory::write(&file, &peers), &fails)));
    }
}

/// Notes in `fails` whether a write of the file failed, and logs when that changes.
fn log_write(file: &Path, written: io::Result<()>, fails: &AtomicBool) {
    let file = file.display();
    match written {
        Ok(()) if fails.swap(false, Ordering::Relaxed) => tracing::info!("extension: {file} is written again"),
        Err(error) if !fails.swap(true, Ordering::Relaxed) => tracing::warn!(
            "extension: write {file}: {error}; this is tried again, and until then peers that leave while the agent is down get no \
             SubnetRemoveCommand"
        ),
        Ok(()) | Err(_) => {}
    }
}

#[cfg(test)]
mod tests;
