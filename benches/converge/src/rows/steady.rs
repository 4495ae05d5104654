// SPDX-License-Identifier: Apache-2.0
//! Rows of a node that is up: what leases and faults cost with each program.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Place;
use crate::floor::{Batcher, delete_link, write};
use crate::measure::{Cell, Who};
use crate::options::Row;
use crate::peers::{Backend, Peer, Table};
use crate::site::Node;
use crate::watch::Goal;

/// For how long others renew their leases.
pub const RENEWALS: Duration = Duration::from_secs(10);
/// How long to wait at most for one event.
const EVENT: Duration = Duration::from_secs(10);
/// How long to wait at most for one repair. The loop of flanneld repairs a host-gw route within 10 s.
const REPAIR: Duration = Duration::from_secs(12);

/// How long the events of each kind took so far.
pub type Times = BTreeMap<&'static str, Vec<Duration>>;

/// Adds, changes and removes leases one by one, if that row is wanted. The noted times include those of earlier calls.
///
/// # Errors
/// etcd or the watch fails.
pub fn events(place: &mut Place<'_>, node: &Node, who: Who, times: &mut Times) -> Result<()> {
    if !place.options.wants(Row::Event) {
        return Ok(());
    }
    let (base, singles) = (place.peers, place.singles());
    let all = |number: usize| Goal::Peers(number + 1);
    let first = if place.backend == Backend::HostGw { Table::Route } else { Table::Fdb };
    let changed = move |number| Goal::Written(first, number);
    let gone = |number: usize| Goal::Peers(2 * base + super::EVENTS - number - 1);
    one_by_one(
        place,
        node,
        (who, "add", times.entry("add").or_default()),
        |store, number| store.put(std::iter::once(Peer::new(number))).map(|()| all(number)),
        all,
    )?;
    one_by_one(
        place,
        node,
        (who, "change", times.entry("change").or_default()),
        |store, number| store.put(std::iter::once(Peer { number, moved: true })).map(|()| changed(number)),
        changed,
    )?;
    one_by_one(
        place,
        node,
        (who, "remove", times.entry("remove").or_default()),
        |store, number| store.delete(std::iter::once(Peer::new(number))).map(|()| gone(number)),
        gone,
    )?;
    // A series that was cut leaves leases behind, which must not disturb the next rows.
    place.store.delete(singles.map(Peer::new))?;
    node.watch.expect(Goal::Peers(base));
    node.watch.wait(EVENT)?;
    Ok(())
}

/// Adds and removes many leases at once, if that row is wanted.
///
/// # Errors
/// etcd or the watch fails.
pub fn bursts(place: &mut Place<'_>, node: &Node, who: Who) -> Result<()> {
    if !place.options.wants(Row::Burst) {
        return Ok(());
    }
    let (base, crowd, limit) = (place.peers, place.crowd(), place.limit());
    node.watch.expect(Goal::Peers(base + crowd.len()));
    let begin = Instant::now();
    place.store.put(crowd.clone().map(Peer::new))?;
    let end = node.watch.wait(limit)?;
    place.note("1,000 adds at once", who, Cell::time(end.map(|at| at - begin), limit));
    node.watch.expect(Goal::Peers(base));
    let begin = Instant::now();
    place.store.delete(crowd.map(Peer::new))?;
    let end = node.watch.wait(limit)?;
    place.note("1,000 removals at once", who, Cell::time(end.map(|at| at - begin), limit));
    Ok(())
}

fn one_by_one(
    place: &mut Place<'_>,
    node: &Node,
    (who, what, times): (Who, &str, &mut Vec<Duration>),
    act: impl Fn(&mut crate::store::Store, usize) -> Result<Goal>,
    goal: impl Fn(usize) -> Goal,
) -> Result<()> {
    let mut cut = None;
    for number in place.singles() {
        node.watch.expect(goal(number));
        let begin = Instant::now();
        act(&mut place.store, number)?;
        match node.watch.wait(EVENT)? {
            Some(at) => times.push(at - begin),
            None => {
                eprintln!("   {what} of peer {number} not seen within {} s: {}", EVENT.as_secs(), node.watch.counts());
                cut = Some(EVENT);
                break;
            }
        }
    }
    // If an earlier call measured a whole series, its times count.
    let cut = cut.filter(|_| times.len() < super::EVENTS);
    place.note_times(what, who, times, cut);
    Ok(())
}

/// Deletes entries of the agent, and measures their repair.
///
/// # Errors
/// The deletion fails.
pub fn repairs(place: &mut Place<'_>, node: &mut Node, who: Who) -> Result<()> {
    let mut batcher = Batcher::new(node, place.backend)?;
    let kinds = [(Table::Route, "route repaired"), (Table::Fdb, "FDB repaired"), (Table::Neigh, "neighbour repaired")];
    for (kind, (table, what)) in kinds.into_iter().enumerate() {
        if !place.backend.tables().contains(&table) {
            continue;
        }
        let (mut times, mut cut) = (Vec::new(), None);
        for number in place.victims(kind) {
            batcher.break_entry(Peer::new(number), table)?;
            let fault = batcher.take();
            node.watch.expect(Goal::Written(table, number));
            let begin = Instant::now();
            let made = write(&mut node.netlink, &fault).context("make a fault");
            if let (Err(error), Who::Flanneld) = (&made, who) {
                // flanneld has lost this entry by itself, so there is nothing to repair. If it has lost all of them, the row shows it.
                eprintln!("   flanneld, {what}: {error:#}");
                continue;
            }
            made?;
            match node.watch.wait(REPAIR)? {
                Some(at) => times.push(at - begin),
                None => {
                    cut = Some(REPAIR);
                    break;
                }
            }
        }
        place.note_times(what, who, &times, cut);
    }
    Ok(())
}

/// Deletes the IPv4 device, and measures the time from the deletion until everything is back.
///
/// # Errors
/// The device cannot be deleted.
pub fn device(place: &mut Place<'_>, node: &mut Node, who: Who) -> Result<()> {
    let index = node.index("flannel.1")?;
    node.watch.forget(&[Table::Fdb, Table::Neigh, Table::Route]);
    node.watch.expect(Goal::Peers(place.peers));
    // The command may return after the repair. So the time begins with the notification.
    delete_link(&mut node.netlink, index)?;
    // flanneld makes the device again without its peers, and they never come back. So there is no need to wait long.
    let limit = if who == Who::Flanneld { REPAIR } else { place.limit() };
    let end = node.watch.wait(limit)?;
    let begin = node.watch.link_gone().context("the kernel did not announce that the device was deleted")?;
    place.note("device deleted", who, Cell::time(end.map(|at| at - begin), limit));
    Ok(())
}
