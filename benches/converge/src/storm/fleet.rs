// SPDX-License-Identifier: Apache-2.0
//! Many members in one process. Each thread has a part of them, and each member is a task. Members report what they reached, with the
//! time, so that nothing is polled.

use std::collections::HashMap;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc as report;
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result};
use tokio::sync::mpsc;
use tokio::task::LocalSet;

use crate::store::runtime;

/// What a member does on command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// It renews its lease now.
    Renew,
    /// It deletes its lease and ends.
    Leave,
}

/// What a member has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reached {
    /// It has a lease.
    Lease,
    /// It has exactly as many peers as are wanted.
    Peers,
    /// Its lease was renewed.
    Renewal,
    /// Its lease is deleted.
    End,
}

/// A message of a member.
pub struct Note {
    /// What was reached, or why the member ended.
    pub what: Result<Reached>,
    /// When.
    pub at: Instant,
}

/// What all members share.
#[derive(Clone)]
pub struct Shared {
    notes: report::Sender<Note>,
    /// The number of peers that a member must have.
    wanted: Arc<AtomicUsize>,
    /// Where members may keep files.
    pub dir: PathBuf,
}

impl Shared {
    /// Reports what was reached now.
    pub fn reached(&self, what: Reached) {
        // The bench may have given up.
        let _ = self.notes.send(Note { what: Ok(what), at: Instant::now() });
    }
}

/// Reports once when a member has the wanted number of peers.
pub struct PeerCount {
    shared: Shared,
    reported: Option<usize>,
}

impl PeerCount {
    /// Returns a counter that has not reported yet.
    pub fn new(shared: &Shared) -> PeerCount {
        PeerCount { shared: shared.clone(), reported: None }
    }

    /// The member has this many peers now.
    pub fn is(&mut self, peers: usize) {
        let wanted = self.shared.wanted.load(Ordering::Relaxed);
        if peers == wanted && self.reported != Some(wanted) {
            self.reported = Some(wanted);
            self.shared.reached(Reached::Peers);
        }
    }
}

/// A client of the store that is measured: an agent of weft, or a bare client.
pub trait Member {
    /// Runs the member with this number until it leaves.
    fn run(number: usize, shared: Shared, orders: mpsc::UnboundedReceiver<Order>) -> impl Future<Output = Result<()>>;
}

/// A command to a thread.
enum Command {
    Start(Vec<usize>),
    Order(Vec<usize>, Order),
    /// Ends these members as a crash does. The sender is dropped when they have ended.
    Stop(Vec<usize>, report::Sender<()>),
}

/// A thread with a part of the members. It ends when the sender is dropped.
struct Thread {
    commands: Option<mpsc::UnboundedSender<Command>>,
    handle: Option<JoinHandle<()>>,
}

/// All members of one kind.
pub struct Fleet {
    threads: Vec<Thread>,
    wanted: Arc<AtomicUsize>,
    /// What the members report.
    pub notes: report::Receiver<Note>,
}

impl Fleet {
    /// Starts the threads, without members.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn new<M: Member + 'static>(dir: PathBuf) -> Result<Fleet> {
        let (sender, notes) = report::channel();
        let wanted = Arc::<AtomicUsize>::default();
        let shared = Shared { notes: sender, wanted: wanted.clone(), dir };
        let count = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (0..count).map(|_| {
            let (commands, received) = mpsc::unbounded_channel();
            let shared = shared.clone();
            let thread = std::thread::Builder::new().name("members".into());
            let thread = thread.spawn(move || run_thread::<M>(&shared, received)).context("start a thread")?;
            Ok(Thread { commands: Some(commands), handle: Some(thread) })
        });
        Ok(Fleet { threads: threads.collect::<Result<_>>()?, wanted, notes })
    }

    /// Says how many peers each member is to have.
    pub fn want(&self, peers: usize) {
        self.wanted.store(peers, Ordering::Relaxed);
    }

    /// Starts these members at once.
    pub fn start(&self, numbers: impl Iterator<Item = usize>) {
        self.send(numbers, Command::Start);
    }

    /// Gives these members an order.
    pub fn order(&self, numbers: impl Iterator<Item = usize>, order: Order) {
        self.send(numbers, |numbers| Command::Order(numbers, order));
    }

    /// Ends these members as a crash does, and waits until they have ended.
    pub fn stop(&self, numbers: impl Iterator<Item = usize>) {
        let (ended, all_ended) = report::channel();
        self.send(numbers, |numbers| Command::Stop(numbers, ended.clone()));
        drop(ended);
        // An error says that the last sender is gone, so all have ended.
        let _ = all_ended.recv();
    }

    fn send(&self, numbers: impl Iterator<Item = usize>, command: impl Fn(Vec<usize>) -> Command) {
        let mut parts = vec![Vec::new(); self.threads.len()];
        numbers.for_each(|number| parts[number % self.threads.len()].push(number));
        for (thread, part) in self.threads.iter().zip(parts) {
            // A thread that has panicked is noticed when its members report nothing.
            let _ = thread.commands.as_ref().map(|commands| commands.send(command(part)));
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for thread in &mut self.threads {
            thread.commands = None;
            let _ = thread.handle.take().map(JoinHandle::join);
        }
    }
}

fn run_thread<M: Member + 'static>(shared: &Shared, commands: mpsc::UnboundedReceiver<Command>) {
    let done = runtime().map(|runtime| LocalSet::new().block_on(&runtime, obey::<M>(shared, commands)));
    if let Err(error) = done {
        let _ = shared.notes.send(Note { what: Err(error), at: Instant::now() });
    }
}

async fn obey<M: Member + 'static>(shared: &Shared, mut commands: mpsc::UnboundedReceiver<Command>) {
    let mut members = HashMap::new();
    while let Some(command) = commands.recv().await {
        match command {
            Command::Start(numbers) => members.extend(numbers.into_iter().map(|number| {
                let (orders, received) = mpsc::unbounded_channel();
                let shared = shared.clone();
                let task = async move {
                    if let Err(error) = M::run(number, shared.clone(), received).await {
                        let what = Err(error.context(format!("member {number}")));
                        let _ = shared.notes.send(Note { what, at: Instant::now() });
                    }
                };
                (number, (orders, tokio::task::spawn_local(task)))
            })),
            Command::Order(numbers, order) => {
                for (orders, _) in numbers.iter().filter_map(|number| members.get(number)) {
                    let _ = orders.send(order);
                }
            }
            Command::Stop(numbers, ended) => {
                let stopped: Vec<_> = numbers.iter().filter_map(|number| members.remove(number)).collect();
                stopped.iter().for_each(|(_, task)| task.abort());
                for (_, task) in stopped {
                    let _ = task.await;
                }
                drop(ended);
            }
        }
    }
}
