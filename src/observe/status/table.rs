// SPDX-License-Identifier: Apache-2.0
//! `weft status` for people, with at most 100 columns. Problems come first.

use std::fmt::Write;

use super::{Peer, PeerSession, PeerState, RuleStatus, Status, TunnelCounts, TunnelStatus, joined};
use crate::log::text::{one_line, wrapped};

/// Number of programmed peers that are shown. All others are shown.
const MAX_PROGRAMMED: usize = 20;

/// Returns the status as text. `now_ms` is the current time in milliseconds since 1970.
pub fn render(status: &Status, now_ms: u64) -> String {
    let mut out = String::new();
    let or_none = |text: &str| if text.is_empty() { "none yet".to_owned() } else { text.to_owned() };
    let ready = if status.ready { "ready" } else { "NOT READY" };
    line(&mut out, "node", &format!("{}, {ready}, weft {}", status.node, status.version));
    for problem in &status.problems {
        line(&mut out, "problem", &problem.text);
    }
    for remark in &status.remarks {
        line(&mut out, "remark", remark);
    }
    let ttl = match (status.subnet.is_empty(), status.lease_ttl_s) {
        (true, _) => String::new(),
        (false, Some(seconds)) => format!(", ends in {} unless renewed", duration(seconds)),
        (false, None) => ", does not expire".to_owned(),
    };
    line(&mut out, "lease", &format!("{}{ttl}", or_none(&status.subnet)));
    if status.subnet.is_empty() {
        // Nothing else is known before there is a lease.
        line(&mut out, "store", &status.store);
        return out;
    }
    let others: String = status.other_ways.iter().map(|kind| format!(" (still reached by {kind}, too)")).collect();
    line(&mut out, "network", &format!("{} by {}{others}, MTU {}", status.network, status.backend, status.mtu));
    line(&mut out, "uplink", &or_none(&status.uplink));
    line(&mut out, "public", &or_none(&joined(status.public.iter().copied(), ", ")));
    line(&mut out, "store", &format!("{}, last answer {} ago", status.store, duration(status.store_silent_s)));
    if let Some(trouble) = &status.store_trouble {
        line(&mut out, "", trouble);
    }
    let pass = match &status.last_pass {
        None => "none yet".to_owned(),
        Some(pass) => {
            let (ago, took) = (duration(now_ms.saturating_sub(pass.at_ms) / 1000), short_duration(pass.took_us));
            let writes = if pass.writes == 1 { "write" } else { "writes" };
            format!("{ago} ago, {}: {} {writes}, {} failed, took {took}", pass.cause, pass.writes, pass.failed)
        }
    };
    let peers_audit = status.wireguard_audit_s.map(|seconds| format!(", of WireGuard peers every {seconds:.0} s"));
    let audits = format!("audit every {:.0} s{}", status.audit_interval_s, peers_audit.unwrap_or_default());
    line(&mut out, "last pass", &format!("{pass}; {audits}"));
    if let Some(error) = &status.last_error {
        let ago = duration(now_ms.saturating_sub(error.at_ms) / 1000);
        line(&mut out, "last error", &format!("{ago} ago: {}", error.text));
    }
    if status.held > 0 {
        let wait = if status.held == 1 { "removal waits" } else { "removals wait" };
        line(&mut out, "held", &format!("{} {wait}, because many leases vanished at once", status.held));
    }
    if let Some(tunnel) = &status.tunnel {
        tunnel_lines(&mut out, tunnel);
    }
    rules_line(&mut out, &status.rules);
    peers(&mut out, &status.peers);
    out
}

/// Returns the text of `weft status rules`.
pub fn rules(status: &Status) -> String {
    let mut out = String::new();
    rules_line(&mut out, &status.rules);
    for problem in &status.problems {
        line(&mut out, "problem", &problem.text);
    }
    if !status.rules.rules.is_empty() {
        out.push('\n');
    }
    for rule in &status.rules.rules {
        wrapped(&mut out, "", "    ", rule);
    }
    out
}

fn rules_line(out: &mut String, rules: &RuleStatus) {
    let many = rules.rules.len();
    let text = match (rules.filter.is_empty(), many, rules.in_place) {
        (true, ..) => "none yet".to_owned(),
        (false, 0, true) => "none wanted".to_owned(),
        (false, _, true) => format!("{many} in place by {}", rules.filter),
        (false, _, false) => format!("NOT IN PLACE by {}", rules.filter),
    };
    let mended = match rules.mended {
        0 => String::new(),
        1 => ", mended once after others changed them".to_owned(),
        times => format!(", mended {times} times after others changed them"),
    };
    line(out, "rules", &format!("{text}{mended}"));
    if let Some(guard) = &rules.guard {
        line(out, "guard", guard);
    }
    if let Some(fence) = &rules.fence {
        line(out, "fence", fence);
    }
}

fn tunnel_lines(out: &mut String, tunnel: &TunnelStatus) {
    let state = if tunnel.running { format!("{} peers", tunnel.peers) } else { "NOT RUNNING".to_owned() };
    let starts = if tunnel.starts > 1 { format!(", started {} times", tunnel.starts) } else { String::new() };
    line(out, "tunnel", &format!("{} over {}, {state}{starts}", tunnel.device, tunnel.socket));
    for (direction, TunnelCounts { packets, bytes, dropped }) in
        [("sent", &tunnel.sent), ("received", &tunnel.received)]
    {
        let reasons: Vec<String> = dropped.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
        let dropped = if reasons.is_empty() { String::new() } else { format!("; dropped: {}", reasons.join(", ")) };
        line(out, "", &format!("{direction} {packets} packets, {bytes} bytes{dropped}"));
    }
}

fn peers(out: &mut String, peers: &[Peer]) {
    let states = [
        PeerState::Failed,
        PeerState::Unreachable,
        PeerState::Pending,
        PeerState::SetAside,
        PeerState::Held,
        PeerState::Programmed,
    ];
    let count = |state| peers.iter().filter(|peer| peer.state == state).count();
    let counts = states.iter().rev().map(|state| (count(*state), state.word())).filter(|(n, _)| *n > 0);
    let counts: Vec<String> = counts.map(|(n, word)| format!("{n} {word}")).collect();
    let in_clear_text = match peers.iter().filter(|peer| peer.not_encrypted).count() {
        0 => String::new(),
        count => format!("; {count} of them NOT ENCRYPTED"),
    };
    line(out, "peers", &if counts.is_empty() { "none".to_owned() } else { counts.join(", ") + &in_clear_text });
    if peers.is_empty() {
        return;
    }
    let mut rows: Vec<&Peer> = peers.iter().collect();
    rows.sort_by_key(|peer| {
        (states.iter().position(|state| *state == peer.state), !peer.not_encrypted, peer.reason.is_none())
    });
    let shown = rows.len().min(peers.len() - count(PeerState::Programmed) + MAX_PROGRAMMED);
    let widest = |of: fn(&Peer) -> &str, least: usize, most: usize| {
        rows[..shown].iter().map(|peer| of(peer).chars().count()).max().unwrap_or(0).clamp(least, most)
    };
    let (subnet, public, backend) =
        (widest(|p| &p.subnet, 6, 36), widest(|p| &p.public, 6, 32), widest(|p| &p.backend, 7, 10));
    let _ = writeln!(out, "\n{:subnet$}  {:public$}  {:backend$}  STATE", "SUBNET", "PUBLIC", "BACKEND");
    for peer in &rows[..shown] {
        let cell = |text: &str, width| cut(text, width);
        let row = format!(
            "{:subnet$}  {:public$}  {:backend$}  {}{}",
            cell(&peer.subnet, subnet),
            cell(&peer.public, public),
            cell(&peer.backend, backend),
            peer.state.word(),
            if peer.not_encrypted { ", NOT ENCRYPTED" } else { "" }
        );
        let _ = writeln!(out, "{}", row.trim_end());
        // The reason has lines of its own, so that it is not cut off.
        if let Some(reason) = &peer.reason {
            wrapped(out, "    ", "    ", reason);
        }
        for traffic in &peer.sessions {
            wrapped(out, "    ", "    ", &session(traffic));
        }
    }
    if shown < rows.len() {
        let _ = writeln!(out, "... and {} more, programmed (all: weft status -o json)", rows.len() - shown);
    }
}

fn session(session: &PeerSession) -> String {
    let handshake = match (session.handshake_s, session.handshake_ahead_s) {
        (None, _) => "never".to_owned(),
        (Some(seconds), 0) => format!("{} ago", duration(seconds)),
        (Some(_), ahead) => format!("{} in the future", duration(ahead)),
    };
    let (device, received, sent) = (&session.device, bytes(session.received), bytes(session.sent));
    let endpoint = session.endpoint.as_deref().unwrap_or("none");
    format!("{device}: last handshake {handshake}, received {received}, sent {sent}, endpoint {endpoint}")
}

fn bytes(count: u64) -> String {
    let units = [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    match units.into_iter().find(|(unit, _)| count >= *unit) {
        Some((unit, name)) => format!("{}.{} {name}", count / unit, count % unit * 10 / unit),
        None => format!("{count} B"),
    }
}

fn line(out: &mut String, label: &str, text: &str) {
    wrapped(out, &format!("{label:11} "), &" ".repeat(12), text);
}

fn cut(text: &str, width: usize) -> String {
    let text = one_line(text);
    if text.chars().count() <= width {
        return text;
    }
    text.chars().take(width.saturating_sub(1)).chain(['~']).collect()
}

/// Returns a time in seconds for people.
pub fn duration(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} days", seconds / 86_400),
    }
}

fn short_duration(micros: u64) -> String {
    if micros < 10_000 { format!("{micros} us") } else { format!("{} ms", micros / 1000) }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
