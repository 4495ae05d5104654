// SPDX-License-Identifier: Apache-2.0
//! The output of `weft lab`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::time::Duration;

use super::fault::Repair;
use super::node::Node;
use super::ping::Ping;

/// Prints a line at once. Write errors are ignored, so that a closed pipe does not end the lab.
pub fn print_line(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// Formats a node as one line.
pub fn node(node: &Node) -> String {
    let list = |addrs: &[std::net::IpAddr]| addrs.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let pods = node.pods.iter().map(|pod| list(&pod.addrs)).collect::<Vec<_>>().join(" ");
    format!("{:<4} uplink {}  pods {pods}", node.name(), list(&node.uplink))
}

/// Formats the matrix. Rows are the senders, columns the receivers. A cell is `ok` only if all addresses were answered.
pub fn matrix(pings: &[Ping]) -> String {
    let mut cells: BTreeMap<(&str, &str), bool> = BTreeMap::new();
    let mut names: Vec<&str> = Vec::new();
    for ping in pings {
        *cells.entry((&ping.from, &ping.to)).or_insert(true) &= ping.ok;
        if !names.contains(&ping.from.as_str()) {
            names.push(&ping.from);
        }
    }
    let width = names.iter().map(|name| name.len()).max().unwrap_or(0) + 2;
    let mut text = format!("\n{:<width$}", "ping");
    names.iter().for_each(|name| text += &format!("{name:<width$}"));
    for from in &names {
        let _ = write!(text, "\n{from:<width$}");
        for to in &names {
            let cell = match cells.get(&(*from, *to)) {
                Some(true) => "ok",
                Some(false) => "LOST",
                None => "-",
            };
            let _ = write!(text, "{cell:<width$}");
        }
    }
    text + "\n"
}

/// Formats the table of faults.
pub fn repairs(repairs: &[Repair]) -> String {
    let rows: Vec<[String; 3]> = repairs.iter().map(row).collect();
    let width = rows.iter().map(|row| row[0].len()).max().unwrap_or(0).max(5);
    let mut text = format!("\n{:<width$}  {:>12}  packets lost of 100/s", "fault", "repaired in");
    for [fault, took, lost] in rows {
        let _ = write!(text, "\n{fault:<width$}  {took:>12}  {lost}");
    }
    text + "\n"
}

/// Formats a duration for people.
pub fn duration(time: Duration) -> String {
    match time.as_millis() {
        0..10 => format!("{:.1} ms", time.as_secs_f64() * 1000.0),
        10..10_000 => format!("{} ms", time.as_millis()),
        _ => format!("{:.1} s", time.as_secs_f64()),
    }
}

fn row(repair: &Repair) -> [String; 3] {
    let took = repair.took.map_or("NEVER".to_owned(), duration);
    let lost = repair.loss.map_or("ALL".to_owned(), |loss| format!("{} of {}", loss.lost, loss.sent));
    [repair.fault.to_string(), took, lost]
}
