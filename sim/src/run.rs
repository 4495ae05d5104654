// SPDX-License-Identifier: Apache-2.0
//! Runs one simulation. A process runs one and no second one (see `chance.rs`).

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep};

use crate::chance::{self, Chance};
use crate::check::{self, Watcher};
use crate::cluster::Cluster;
use crate::disk;
use crate::lossless::Lossless;
use crate::scenario::Scenario;
use crate::timeline;

/// After the last event, everything recovers, and so many seconds pass before the cluster counts as at rest. It is longer than
/// `--hold-removals`.
const SETTLE: u64 = 660;
/// How often packets are followed where none may be lost.
const LOOK: Duration = Duration::from_millis(50);
/// How often a cluster is examined that runs until it is at rest, in seconds.
const REST_EVERY: u64 = 5;
/// A cluster at rest must write nothing for this many seconds.
const QUIET: u64 = 60;

/// What came of a simulation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome {
    /// Which invariants did not hold, and when. Empty if all did.
    pub wrong: Vec<String>,
    /// A hash of the whole timeline.
    pub fingerprint: u64,
    /// The virtual time in seconds.
    pub virtual_s: u64,
    /// The real time in milliseconds.
    pub real_ms: u64,
    /// The most memory that the process had, in MiB. The files of the machines are not in it.
    #[serde(default)]
    pub peak_mib: u64,
    /// The size of the files of the machines at the end, in MiB.
    #[serde(default)]
    pub files_mib: u64,
}

/// Runs the simulation in the present directory, which must be empty.
pub fn run(scenario: &Scenario, level: tracing::Level) -> anyhow::Result<Outcome> {
    chance::begin(scenario.seed);
    weft_subnet::old_defects::bring_back(scenario.defect);
    let began = std::time::Instant::now();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    let wrong = runtime.block_on(LocalSet::new().run_until(async {
        timeline::begin(disk::step, disk::write_time);
        timeline::collect_logs(level);
        simulate(scenario).await
    }))?;
    let lines = timeline::lines();
    let fold = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    let fingerprint = lines.bytes().fold(0xcbf2_9ce4_8422_2325, fold);
    let (virtual_s, real_ms) = runtime.block_on(async { (timeline::elapsed().as_secs(), began.elapsed().as_millis()) });
    let (real_ms, peak_mib, files_mib) = (u64::try_from(real_ms).unwrap_or(u64::MAX), peak_mib(), files_mib()?);
    Ok(Outcome { wrong, fingerprint, virtual_s, real_ms, peak_mib, files_mib })
}

/// Returns the most memory that this process had.
fn peak_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// Returns the size of all files below the present directory.
fn files_mib() -> std::io::Result<u64> {
    let (mut directories, mut bytes) = (vec![PathBuf::from(".")], 0);
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let metadata = entry.metadata()?;
            match metadata.is_dir() {
                true => directories.push(entry.path()),
                false => bytes += metadata.len(),
            }
        }
    }
    Ok(bytes >> 20)
}

/// As [`run`], in a temporary directory that is removed afterwards.
pub fn run_in_new_directory(scenario: &Scenario, level: tracing::Level) -> anyhow::Result<Outcome> {
    // The files of the machines are synced all the time, so they are in memory.
    let memory = Path::new("/dev/shm");
    let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
    let directory = tempfile::Builder::new().prefix("weft-sim-").tempdir_in(parent).context("make a directory")?;
    std::env::set_current_dir(directory.path())?;
    let outcome = run(scenario, level);
    std::env::set_current_dir("/")?;
    outcome
}

async fn simulate(scenario: &Scenario) -> anyhow::Result<Vec<String>> {
    let mut cluster = Cluster::new(scenario)?;
    let mut chance = Chance::new(scenario.seed, 4);
    // All machines of a site start together.
    for number in 0..cluster.machines.len() {
        cluster.machines[number].start(&cluster.store)?;
        sleep(Duration::from_millis(chance.between(0, 2000 / scenario.machines as u64))).await;
    }
    let (mut watcher, mut events) = (Watcher::default(), scenario.events.iter().peekable());
    let mut lossless = scenario.lossless.then(Lossless::default);
    let last = scenario.seconds.max(scenario.events.last().map_or(0, |timed| timed.at));
    for now in 0..=last {
        let wrong = watcher.step(now, &cluster);
        if !wrong.is_empty() {
            return Ok(noted(wrong));
        }
        cluster.recover(now)?;
        while let Some(timed) = events.next_if(|timed| timed.at <= now) {
            cluster.event(now, &timed.event)?;
        }
        cluster.attack();
        cluster.publish();
        if scenario.until_rest && now.is_multiple_of(REST_EVERY) && is_at_rest(&cluster) {
            return Ok(Vec::new());
        }
        // Not always the same moment between two timers of the agents.
        let wrong = wait(Duration::from_millis(chance.between(900, 1100)), lossless.as_mut(), &cluster).await;
        if !wrong.is_empty() {
            return Ok(noted(wrong));
        }
    }
    if scenario.until_rest {
        return Ok(noted(check::at_rest(&cluster)));
    }
    timeline::note("everything recovers");
    cluster.recover_all()?;
    for now in last + 1..last + SETTLE {
        let wrong = watcher.step(now, &cluster);
        if !wrong.is_empty() {
            return Ok(noted(wrong));
        }
        let wrong = wait(Duration::from_secs(1), lossless.as_mut(), &cluster).await;
        if !wrong.is_empty() {
            return Ok(noted(wrong));
        }
    }
    let mut wrong = check::at_rest(&cluster);
    if wrong.is_empty() {
        wrong = writes_at_rest(&cluster).await;
    }
    for machine in &cluster.machines {
        if let Some(status) = machine.status().await.filter(|_| !wrong.is_empty()) {
            timeline::note(&format!("n{}: {status:?}", machine.number));
        }
    }
    Ok(noted(wrong))
}

/// Returns true if the cluster is at rest. The costly checks are made only if the cheap ones hold.
fn is_at_rest(cluster: &Cluster) -> bool {
    check::may_be_at_rest(cluster) && check::at_rest(cluster).is_empty()
}

/// Lets time pass. Returns which packets were lost meanwhile, where none may be.
async fn wait(time: Duration, lossless: Option<&mut Lossless>, cluster: &Cluster) -> Vec<String> {
    let Some(lossless) = lossless else {
        sleep(time).await;
        return Vec::new();
    };
    let end = Instant::now() + time;
    while Instant::now() < end {
        sleep(LOOK.min(end - Instant::now())).await;
        let lost = lossless.look(cluster);
        if !lost.is_empty() {
            return lost;
        }
    }
    Vec::new()
}

/// Returns which machines write to their kernels although nothing happens.
async fn writes_at_rest(cluster: &Cluster) -> Vec<String> {
    let writes = || cluster.machines.iter().map(|machine| machine.kernel.writes()).collect::<Vec<_>>();
    let before = writes();
    sleep(Duration::from_secs(QUIET)).await;
    let changed = before.into_iter().zip(writes()).enumerate().filter(|(_, (before, after))| before != after);
    changed.map(|(number, (before, after))| format!("n{number} wrote {} times at rest", after - before)).collect()
}

fn noted(wrong: Vec<String>) -> Vec<String> {
    wrong.iter().for_each(|text| timeline::note(&format!("WRONG: {text}")));
    wrong
}
