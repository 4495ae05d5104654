// SPDX-License-Identifier: Apache-2.0
//! The rows of the floor.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::{Place, steady};
use crate::floor::{Bare, Batcher, write};
use crate::measure::{Cell, Who, quantile};
use crate::options::Row;
use crate::peers::{Backend, Peer};
use crate::site::{Node, pause};

/// Measures all rows that exist for the floor, after these cold starts. Returns the node and the times of the events for [`again`].
pub fn all(place: &mut Place<'_>, mut times: Vec<Duration>) -> Result<(Node, steady::Times)> {
    let lists: Vec<Duration> =
        (0..place.options.repeat.max(1)).map(|_| place.store.list_time()).collect::<Result<_>>()?;
    place.note("list", Who::Floor, Cell::time(quantile(&lists, 0.5), Duration::ZERO));
    // All nodes have the same address, so these must be gone before the next one is made.
    let is_dual = place.backend == Backend::VxlanDual;
    let one_device = if is_dual && place.options.wants(Row::Device) { Some(of_one_device(place)?) } else { None };
    let mut node = place.node()?;
    times.push(fill(place, &mut node)?);
    let cold = Cell::time(quantile(&times, 0.5), Duration::ZERO);
    place.note("cold start", Who::Floor, cold.clone());
    if place.options.wants(Row::Device) && place.backend != Backend::HostGw {
        place.note("device deleted", Who::Floor, one_device.unwrap_or(cold));
    }
    let mut events_took = steady::Times::new();
    let (events, burst) = (place.options.wants(Row::Event), place.options.wants(Row::Burst));
    if events || burst {
        let bare = Bare::of_store(&node, place.backend, place.peers)?;
        beside(bare, || {
            steady::events(place, &node, Who::Floor, &mut events_took)?;
            steady::bursts(place, &node, Who::Floor)
        })?;
    }
    if place.options.wants(Row::Renewals) {
        let bare = Bare::of_store(&node, place.backend, place.peers + super::EVENTS)?;
        place.store.renew(place.peers, 100, Duration::from_secs(1))?;
        bare.stop()?;
        let bare = Bare::of_store(&node, place.backend, place.peers + super::EVENTS)?;
        let begin = Instant::now();
        place.store.renew(place.peers, 100, steady::RENEWALS)?;
        let share = bare.stop()?.as_secs_f64() / begin.elapsed().as_secs_f64();
        place.note("CPU, 100 renewals/s", Who::Floor, Cell::Value(share * 100.0));
    }
    if place.options.wants(Row::Repair) {
        let bare = Bare::of_kernel(&node, place.backend)?;
        beside(bare, || steady::repairs(place, &mut node, Who::Floor))?;
    }
    node.on_fabric(false)?;
    Ok((node, events_took))
}

/// Measures the single events once more, so that half of them were measured before those of the program, and half after them.
pub fn again(place: &mut Place<'_>, (node, mut took): (Node, steady::Times)) -> Result<()> {
    if !place.options.wants(Row::Event) {
        return Ok(());
    }
    node.on_fabric(true)?;
    let bare = Bare::of_store(&node, place.backend, place.peers)?;
    beside(bare, || steady::events(place, &node, Who::Floor, &mut took))
}

/// Measures while the bare watcher works. If the watcher failed, its error is returned.
fn beside(bare: Bare, measure: impl FnOnce() -> Result<()>) -> Result<()> {
    let measured = measure();
    bare.stop().context("the bare watcher")?;
    measured
}

/// Returns the time for the entries of the IPv4 device alone. It is the only one that is deleted.
fn of_one_device(place: &mut Place<'_>) -> Result<Cell> {
    let mut times = Vec::new();
    for _ in 0..place.options.repeat.max(1) {
        let mut node = place.node()?;
        times.push(fill_as(place, &mut node, Backend::Vxlan)?);
    }
    Ok(Cell::time(quantile(&times, 0.5), Duration::ZERO))
}

/// Prepares the batches of all peers, writes them, and returns how long the writing took.
pub fn fill(place: &Place<'_>, node: &mut Node) -> Result<Duration> {
    fill_as(place, node, place.backend)
}

/// Does the same with the entries that this backend has.
fn fill_as(place: &Place<'_>, node: &mut Node, backend: Backend) -> Result<Duration> {
    node.add_devices(backend)?;
    let mut batcher = Batcher::new(node, backend)?;
    for number in 0..place.peers {
        batcher.add(Peer::new(number))?;
    }
    let datagrams = batcher.take();
    pause(Duration::from_millis(50));
    let begin = Instant::now();
    write(&mut node.netlink, &datagrams)?;
    let took = begin.elapsed();
    node.watch.quiet(Duration::from_millis(300), place.limit())?;
    Ok(took)
}
