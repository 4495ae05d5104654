// SPDX-License-Identifier: Apache-2.0
//! The sysctls that packets need. They are read, and written if necessary. If the agent may not write one, it is reported with the command
//! that sets it.

pub mod loosened;

use std::path::{Path, PathBuf};

use weft_backends::state::Name;

use crate::kernel::observe::has_advertised_routes;
use crate::kernel::sysctl::{self, Change};
use crate::observe::problem::{Problem, ProblemKind};
use crate::plan::Plan;

const FORWARDING_V6: &str = "net/ipv6/conf/all/forwarding";

/// Checks each sysctl, and writes it if `write` is true. Returns what the operator must do.
pub fn ensure(plan: &Plan, write: bool) -> Vec<Problem> {
    let mut problems = Vec::new();
    let want = |path: &Path, value: &str| set(path, value, write);
    let uplink = plan.host().uplink.name;
    if plan.net_conf().networks.v4.is_some() {
        problems.extend(want(Path::new("net/ipv4/ip_forward"), "1"));
        for (name, link) in plan.links() {
            for (setting, value) in link.kind.ipv4_settings() {
                let path = sysctl::of_interface("ipv4", name, setting);
                // The problem of a device that is not there is shown elsewhere.
                let exists = sysctl::read(&path).is_ok();
                problems.extend(exists.then(|| want(&path, value)).flatten());
            }
        }
    }
    if plan.net_conf().networks.v6.is_some() {
        // If forwarding is on, the kernel removes the default route of router advertisements and lets their other routes expire, unless
        // accept_ra is 2.
        let accept_ra = sysctl::of_interface("ipv6", uplink, "accept_ra");
        if is(&accept_ra, "1") {
            let problem = want(&accept_ra, "2");
            // If forwarding is on already, as on nodes with kube-proxy, this matters only if there are routes of router advertisements.
            let problem = problem.filter(|_| !is(Path::new(FORWARDING_V6), "1") || advertised(uplink));
            problems.extend(problem.map(lost));
        }
        if !is(Path::new(FORWARDING_V6), "1") {
            // The default route may be on another link than the uplink, and forwarding concerns all of them.
            for path in other_links_with_advertised_routes(uplink) {
                problems.extend(want(&path, "2").map(lost));
            }
        }
        problems.extend(want(Path::new(FORWARDING_V6), "1"));
    }
    problems
}

/// Says what is lost if `accept_ra` is not set.
fn lost(problem: Problem) -> Problem {
    let why = "(forwarding makes the kernel ignore router advertisements: IPv6 routes from them are lost)";
    Problem { text: format!("{problem} {why}"), ..problem }
}

/// Returns `accept_ra` of each link but the uplink that would lose routes of router advertisements if forwarding was turned on. Our own
/// devices accept no router advertisements.
fn other_links_with_advertised_routes(uplink: Name) -> Vec<PathBuf> {
    let links = sysctl::interfaces("ipv6").into_iter().filter(|name| *name != uplink);
    let accepting = links.map(|name| (name, sysctl::of_interface("ipv6", name, "accept_ra")));
    accepting.filter(|(name, path)| is(path, "1") && advertised(*name)).map(|(_, path)| path).collect()
}

/// Sets one sysctl, or only checks it if `write` is false. Returns what the operator must do.
fn set(path: &Path, value: &str, write: bool) -> Option<Problem> {
    match sysctl::ensure(path, value, write) {
        Ok(Change::Changed) => {
            tracing::info!(sysctl = sysctl::shown(path), value, "sysctl written");
            None
        }
        Ok(Change::Same) => None,
        Err(help) => Some(Problem::new(ProblemKind::Sysctl, help.to_string()).with_command(help.command)),
    }
}

fn advertised(link: Name) -> bool {
    has_advertised_routes(link).unwrap_or_else(|error| {
        tracing::debug!(%error, "look for routes of router advertisements");
        false
    })
}

fn is(path: &Path, value: &str) -> bool {
    sysctl::read(path).is_ok_and(|text| text == value)
}
