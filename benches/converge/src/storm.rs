// SPDX-License-Identifier: Apache-2.0
//! Storms: many nodes that do the same at once, with one real etcd. The nodes are agents of weft with kernels in memory, all in this
//! process. Beside them run bare clients that make only the requests that nobody can avoid, and real flannelds.

mod agent;
mod bare;
mod counters;
mod flanneld;
mod fleet;
mod kernel;
mod node_api;
mod page;
mod results;

use std::fs;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::options::StormOptions;
use crate::peers::Backend;
use crate::site::{build, pause};
use crate::store::Store;
use crate::{about, say};
use counters::Counters;
use flanneld::Flanneld;
use fleet::{Fleet, Member, Order, Reached};
use results::{Phase, Results, Run, Who};

/// The first subnet of the Network that the nodes share: 10.0.1.0.
const FIRST_SUBNET: u32 = 0x0a00_0100;
/// The number of subnets in it, up to 10.255.255.0.
const SUBNETS: u32 = 65_535;
/// No node makes a request for so long: the phase is over. It is shorter than the time after which a node that hears nothing asks etcd
/// whether it is alive.
const CALM: Duration = Duration::from_millis(700);
/// This part of the nodes leaves at once: 100 of 1,000.
const LEAVING: usize = 10;
/// A network with a quarter more subnets than nodes, in which nodes that start together must often choose the same subnet.
const CROWDED: usize = 200;

/// Measures, and writes the page. Returns whether every promise is kept.
///
/// # Errors
/// etcd or a node does not work, or a node does not come to its end within the limit.
pub fn run(options: &StormOptions) -> Result<bool> {
    build()?;
    // On a busy machine, calls reach their time limit and are made again. So a promise is broken when two of three runs miss it.
    let (mut kept, mut missed) = (0, 0);
    loop {
        let results = measure(options)?;
        write(&results, options)?;
        let broken = results.broken();
        for promise in &broken {
            eprintln!("weft-bench: {promise}");
        }
        if broken.is_empty() {
            kept += 1
        } else {
            missed += 1
        }
        if missed == 0 || kept == 2 {
            return Ok(true);
        }
        if missed == 2 {
            return Ok(false);
        }
        eprintln!("== measured again");
    }
}

/// Measures everything once.
fn measure(options: &StormOptions) -> Result<Results> {
    let mut results = Results { about: about::host(options.flanneld.as_deref())?, runs: Vec::new(), node_api: None };
    let small = options.flannelds.min(options.size);
    let mut sizes = vec![small, options.size];
    sizes.dedup();
    for size in sizes {
        results.runs.push(fleet::<bare::Bare>(Who::Floor, size, options)?);
        results.runs.push(fleet::<agent::Agent>(Who::Weft, size, options)?);
        if size == small && options.flanneld.is_some() {
            results.runs.push(flannelds(size, options)?);
        }
    }
    let crowded = CROWDED.min(options.size);
    results.runs.push(fleet::<agent::Agent>(Who::Crowded, crowded, options)?);
    if let Some(binaries) = &options.binaries {
        results.node_api = Some(node_api::measure(binaries, options.watchers)?);
    }
    results.about.push(("load at the end".to_owned(), about::load()));
    Ok(results)
}

/// Writes the results and the page.
fn write(results: &Results, options: &StormOptions) -> Result<()> {
    fs::create_dir_all(&options.out).with_context(|| format!("create {}", options.out.display()))?;
    let path = options.out.join("results-storm.json");
    let text = serde_json::to_string_pretty(results).context("write the results")?;
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    let page = page::render(results);
    fs::write(&options.page, &page).with_context(|| format!("write {}", options.page.display()))?;
    say(&page);
    Ok(())
}

/// One etcd, and what is measured on it.
struct Bed {
    store: Store,
    limit: Duration,
    idle: Duration,
    phases: Vec<Phase>,
}

impl Bed {
    fn new(who: Who, size: usize, options: &StormOptions) -> Result<Bed> {
        let mut store = Store::start(Backend::Vxlan)?;
        store.set_net_conf(&net_conf(who, size))?;
        let (limit, idle) = (Duration::from_secs(options.limit), Duration::from_secs(options.idle));
        Ok(Bed { store, limit, idle, phases: Vec::new() })
    }

    /// Measures what happens while `act` runs, and until all is calm after it.
    fn phase(
        &mut self,
        (name, nodes): (&str, usize),
        act: impl FnOnce(&mut Store, Limit) -> Result<Times>,
    ) -> Result<()> {
        let etcd = self.store.pid();
        let before = Counters::read(etcd)?;
        let begin = Instant::now();
        let times = act(&mut self.store, Limit { begin, most: self.limit })?;
        let mut after = Counters::read(etcd)?;
        loop {
            pause(CALM);
            let now = Counters::read(etcd)?;
            if now.storm() == after.storm() {
                break;
            }
            after = now;
            ensure!(begin.elapsed() < self.limit, "{name}: etcd still gets requests");
        }
        let phase = Phase::new((name, nodes), &times, after.since(&before));
        eprintln!("  {}", phase.line());
        self.phases.push(phase);
        Ok(())
    }

    /// Measures for a while in which nothing happens.
    fn idle(&mut self, nodes: usize) -> Result<()> {
        let before = Counters::read(self.store.pid())?;
        pause(self.idle);
        let phase = Phase::new(("idle", nodes), &Times::default(), Counters::read(self.store.pid())?.since(&before));
        eprintln!("  {}", phase.line());
        self.phases.push(phase);
        Ok(())
    }
}

/// Returns the net-conf for this many nodes.
fn net_conf(who: Who, size: usize) -> String {
    let most = if who == Who::Crowded { size * 5 / 4 } else { SUBNETS as usize };
    let last = std::net::Ipv4Addr::from(FIRST_SUBNET + ((most as u32 - 1) << 8));
    format!(
        "{{\"Network\":\"10.0.0.0/8\",\"SubnetLen\":24,\"SubnetMin\":\"10.0.1.0\",\"SubnetMax\":\"{last}\",\
         \"Backend\":{{\"Type\":\"vxlan\"}}}}"
    )
}

/// When each node reached something, from the begin of a phase.
#[derive(Debug, Default)]
struct Times {
    /// It has its lease.
    leases: Vec<Duration>,
    /// It has what the phase is about: all peers, or a renewed lease.
    complete: Vec<Duration>,
    /// How many nodes are to be complete.
    expected: usize,
    /// How often a node ended by itself and was started again.
    restarts: usize,
}

/// How long is waited.
#[derive(Debug, Clone, Copy)]
struct Limit {
    begin: Instant,
    most: Duration,
}

/// Waits until so many members have reached each of these. Returns when, in the same order.
fn until<const N: usize>(fleet: &Fleet, wanted: [(Reached, usize); N], limit: Limit) -> Result<[Vec<Duration>; N]> {
    let mut times = [const { Vec::new() }; N];
    while times.iter().zip(wanted).any(|(times, (_, count))| times.len() < count) {
        let note = fleet.notes.recv_timeout(limit.most.saturating_sub(limit.begin.elapsed()));
        let note = note.with_context(|| {
            let reached = times.each_ref().map(Vec::len);
            format!("after {} s, {reached:?} of {wanted:?} was reached", limit.most.as_secs())
        })?;
        let what = note.what?;
        if let Some(at) = wanted.iter().position(|(one, _)| *one == what) {
            times[at].push(note.at.duration_since(limit.begin));
        }
    }
    Ok(times)
}

/// Starts this many members, and waits until all have a lease and all peers.
fn start(fleet: &Fleet, size: usize, limit: Limit) -> Result<Times> {
    fleet.start(0..size);
    let [leases, complete] = until(fleet, [(Reached::Lease, size), (Reached::Peers, size)], limit)?;
    Ok(Times { leases, complete, expected: size, ..Times::default() })
}

/// Measures all phases with members of this kind.
fn fleet<M: Member + 'static>(who: Who, size: usize, options: &StormOptions) -> Result<Run> {
    eprintln!("== {size} nodes, {}", who.name());
    let mut bed = Bed::new(who, size, options)?;
    let dir = bed.store.dir.path().join("nodes");
    fs::create_dir_all(&dir).context("create a directory")?;
    let empty = results::memory_mb()?;
    let fleet = Fleet::new::<M>(dir.clone())?;
    fleet.want(size - 1);
    bed.phase(("start", size), |_, limit| start(&fleet, size, limit))?;
    let memory_mb = Some((results::memory_mb()? - empty) / size as f64);
    if who != Who::Crowded {
        bed.idle(size)?;
        // After an event no node asks for some seconds whether etcd is alive.
        bed.store.set_net_conf(&net_conf(who, size))?;
        pause(CALM);
        bed.phase(("renew", size), |_, limit| {
            fleet.order(0..size, Order::Renew);
            let [complete] = until(&fleet, [(Reached::Renewal, size)], limit)?;
            Ok(Times { complete, expected: size, ..Times::default() })
        })?;
        fleet.stop(0..size);
        // A reboot takes the subnet files away.
        fs::remove_dir_all(&dir).and_then(|()| fs::create_dir(&dir)).context("empty a directory")?;
        fleet.notes.try_iter().for_each(drop);
        bed.phase(("reboot", size), |_, limit| start(&fleet, size, limit))?;
        let leaving = size / LEAVING;
        fleet.want(size - 1 - leaving);
        bed.phase(("leave", leaving), |_, limit| {
            fleet.order(0..leaving, Order::Leave);
            let stay = size - leaving;
            let [complete, _] = until(&fleet, [(Reached::Peers, stay), (Reached::End, leaving)], limit)?;
            Ok(Times { complete, expected: stay, ..Times::default() })
        })?;
    }
    fleet.stop(0..size);
    Ok(Run { who, size, phases: bed.phases, memory_mb })
}

/// Measures the phases that can be measured with real flannelds.
fn flannelds(size: usize, options: &StormOptions) -> Result<Run> {
    let Some(program) = &options.flanneld else { bail!("no flanneld") };
    eprintln!("== {size} nodes, flanneld");
    let mut bed = Bed::new(Who::Flanneld, size, options)?;
    let dir = bed.store.dir.path().join("flannelds");
    let mut all = (0..size).map(|n| Flanneld::new(program, n, &dir)).collect::<Result<Vec<_>>>()?;
    for name in ["start", "reboot"] {
        if name == "reboot" {
            all.iter_mut().try_for_each(Flanneld::reboot)?;
        }
        bed.phase((name, size), |_, limit| {
            all.iter_mut().try_for_each(Flanneld::start)?;
            flanneld::wait(&mut all, size - 1, limit)
        })?;
        if name == "start" {
            bed.idle(size)?;
        }
    }
    let leaving = size / LEAVING;
    let mut gone = all.drain(..leaving).collect::<Vec<_>>();
    gone.iter_mut().try_for_each(Flanneld::stop)?;
    let keys = gone.iter().map(Flanneld::key).collect::<Result<Vec<_>>>()?;
    let stay = all.len();
    bed.phase(("leave", leaving), |store, limit| {
        store.delete_keys(&keys)?;
        flanneld::wait(&mut all, stay - 1, limit)
    })?;
    Ok(Run { who: Who::Flanneld, size, phases: bed.phases, memory_mb: None })
}
