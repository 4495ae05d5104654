// SPDX-License-Identifier: Apache-2.0
//! The results as a page of the documentation.

use std::fmt::Write as _;

use super::results::{MOST_REQUESTS, MOST_WAIT, Phase, Results, Run, Who};
use crate::table::figure;

/// What the first lines say. The rest is computed.
const INTRODUCTION: &str = "\
<!-- Written by `make bench-storm`. -->
# Storms: many nodes that do the same at once

All nodes start, renew their leases, reboot, or leave at the same moment, with one real etcd. [method.md](method.md#storms) says how this is
measured, and [scale.md](../scale.md) what it means for a cluster of 10,000 nodes. Requests, bytes and events do not depend on how busy the
machine is, unless calls reach their time limit of 3 s and are made again. Times and CPU do, and etcd and all nodes share its processors.

";

/// Returns the page.
pub fn render(results: &Results) -> String {
    let mut page = INTRODUCTION.to_owned();
    for (name, value) in &results.about {
        let _ = writeln!(page, "- {name}: {value}");
    }
    page += &promises(results);
    for size in results.sizes() {
        let runs: Vec<&Run> = results.runs.iter().filter(|run| run.size == size && run.who != Who::Crowded).collect();
        let _ = write!(page, "\n## {size} nodes\n");
        page += &requests(&runs);
        page += &volume(&runs);
        page += &times(&runs);
        page += &events(&runs);
    }
    page += &crowded(results);
    page += &node_api(results);
    page
}

fn promises(results: &Results) -> String {
    let broken = results.broken();
    let mut text = format!(
        "\nAt most {MOST_REQUESTS} times the requests of bare clients are promised, and that no node waits {MOST_WAIT} s longer for its \
         lease than a bare client. "
    );
    text += if broken.is_empty() { "This run kept both.\n" } else { "This run missed:\n\n" };
    for promise in broken {
        let _ = writeln!(text, "- {promise}");
    }
    text
}

/// The names of all phases, in order.
const PHASES: [&str; 5] = ["start", "idle", "renew", "reboot", "leave"];

/// Writes a table with one row for each phase, and the cells that `cells` returns for each run.
fn table(title: &str, runs: &[&Run], columns: &[&str], cells: impl Fn(&Phase) -> Vec<String>) -> String {
    let mut text = format!("\n{title}\n\n| phase |");
    for run in runs {
        for column in columns {
            let _ = write!(text, " {}{column} |", run.who.name());
        }
    }
    text += "\n|---|";
    runs.iter().for_each(|_| columns.iter().for_each(|_| text += "--:|"));
    for name in PHASES {
        let _ = write!(text, "\n| {name} |");
        for run in runs {
            let row = run.phase(name).map_or_else(|| vec![String::new(); columns.len()], &cells);
            text += &row.iter().map(|cell| format!(" {cell} |")).collect::<String>();
        }
    }
    text + "\n"
}

fn requests(runs: &[&Run]) -> String {
    let mut text =
        table("Requests of each node that acts (all nodes, in `leave` those that leave):", runs, &[""], |phase| {
            vec![figure(phase.requests_per_node())]
        });
    text += "\nThe requests of weft in each phase, all nodes together:\n\n";
    let weft = runs.iter().filter(|run| run.who == Who::Weft).flat_map(|run| &run.phases);
    for phase in weft.filter(|phase| !phase.requests.is_empty()) {
        let all: Vec<_> = phase.requests.iter().map(|(method, count)| format!("{count} {method}")).collect();
        let _ = writeln!(text, "- {}: {}", phase.name, all.join(", "));
    }
    text
}

fn volume(runs: &[&Run]) -> String {
    table(
        "Bytes, and CPU time of etcd, divided by the number of nodes that act:",
        runs,
        &[", kB to etcd", ", kB from etcd", ", ms"],
        |phase| {
            let nodes = phase.nodes as f64;
            let kb = |bytes: u64| figure(bytes as f64 / 1000.0 / nodes);
            vec![kb(phase.received), kb(phase.sent), figure(phase.etcd_cpu * 1000.0 / nodes)]
        },
    )
}

fn times(runs: &[&Run]) -> String {
    let both = |times: Option<(f64, f64)>| {
        times.map_or_else(String::new, |(half, all)| format!("{} / {}", figure(half), figure(all)))
    };
    table(
        "Seconds until half of the nodes and until all nodes have their lease, and what the phase is about (all peers, or the \
           renewed lease):",
        runs,
        &[", lease", ", complete"],
        |phase| {
            let complete = both(phase.complete);
            let missing = phase.expected.saturating_sub(phase.reached);
            let complete = if missing == 0 { complete } else { format!("{complete}, {missing} never") };
            let again = if phase.restarts > 0 { format!(", {} started again", phase.restarts) } else { String::new() };
            vec![both(phase.lease), complete + &again]
        },
    )
}

/// What an event costs that one watcher hears.
fn events(runs: &[&Run]) -> String {
    let mut text = String::new();
    for run in runs {
        let Some(phase) = run.phase("leave").filter(|phase| phase.events > 0) else { continue };
        let each = |value: f64| figure(value / phase.events as f64);
        let _ = write!(
            text,
            "\n{}: {} events were sent to watchers when {} nodes left. Each cost etcd {} us of CPU time and {} bytes",
            run.who.name(),
            phase.events,
            phase.nodes,
            each(phase.etcd_cpu * 1e6),
            each(phase.sent as f64),
        );
        text += &match run.who {
            Who::Flanneld => ".\n".to_owned(),
            _ => format!(", and the node {} us.\n", each(phase.own_cpu * 1e6)),
        };
    }
    for (run, memory) in runs.iter().filter_map(|run| Some((run, run.memory_mb?))) {
        if run.who == Who::Weft {
            let _ =
                writeln!(text, "\nEach node took {} MB of memory, together with its kernel in memory.", figure(memory));
        }
    }
    text
}

fn crowded(results: &Results) -> String {
    let Some(run) = results.runs.iter().find(|run| run.who == Who::Crowded) else { return String::new() };
    let Some(phase) = run.phases.first() else { return String::new() };
    let (half, all) = phase.lease.unwrap_or_default();
    format!(
        "\n## Hardly more subnets than nodes\n\n{} agents of weft started together in a network of {} subnets. They made {} requests \
         each. Half of them had their lease after {} s, and all after {} s.\n",
        run.size,
        run.size * 5 / 4,
        figure(phase.requests_per_node()),
        figure(half),
        figure(all),
    )
}

fn node_api(results: &Results) -> String {
    let Some(api) = &results.node_api else { return String::new() };
    format!(
        "\n## The API server of Kubernetes\n\nA real kube-apiserver with Nodes of {} kB of JSON, and {} clients that watch all Nodes. An \
         update of a Node's status cost the server {} ms of CPU time without a watcher, and {} ms with all of them ({} updates each). So \
         each event cost {} us for each watcher, and {} kB.\n",
        figure(api.node as f64 / 1000.0),
        api.watchers,
        figure(api.alone),
        figure(api.watched),
        api.updates,
        figure(api.per_event()),
        figure(api.event / 1000.0),
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn run(who: Who, requests: u64) -> Run {
        let phase = |name: &str, nodes| Phase {
            name: name.into(),
            nodes,
            expected: 100,
            reached: 100,
            lease: Some((0.5, 1.0)),
            complete: Some((1.0, 2.0)),
            requests: BTreeMap::from([("Txn".to_owned(), requests)]),
            events: 900,
            etcd_cpu: 0.0045,
            ..Phase::default()
        };
        Run { who, size: 100, phases: vec![phase("start", 100), phase("leave", 10)], memory_mb: Some(1.0) }
    }

    #[test]
    fn the_page_names_what_was_missed_and_leaves_out_what_was_not_measured() {
        let mut results =
            Results { about: Vec::new(), runs: vec![run(Who::Floor, 400), run(Who::Weft, 600)], node_api: None };
        let page = render(&results);
        assert!(page.contains("This run kept both."), "{page}");
        assert!(page.contains("| start | 4.00 | 6.00 |") && page.contains("Each cost etcd 5.00 us"), "{page}");
        assert!(!page.contains("flanneld"), "{page}");
        results.runs[1] = run(Who::Weft, 700);
        results.runs[1].phases[0].lease = Some((0.5, 7.0));
        let page = render(&results);
        assert!(
            page.contains("- 100 nodes, weft, start: 1.75 times the requests of bare clients, at most 1.5"),
            "{page}"
        );
        assert!(page.contains("- 100 nodes, weft, start: a node waits 6.0 s longer for its lease"), "{page}");
    }
}
