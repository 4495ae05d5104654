// SPDX-License-Identifier: Apache-2.0
//! The sysctls without which packets do not pass: read, written where allowed and needed, else named with the command.

pub mod loosened;

use std::path::Path;

use weft_backends::state::Name;

use crate::kernel::observe::has_advertised_routes;
use crate::kernel::sysctl::{self, Change, NeedsHelp};
use crate::plan::Plan;

const FORWARDING_V6: &str = "net/ipv6/conf/all/forwarding";

/// Looks at each; returns what a person has to do.
pub fn ensure(plan: &Plan, write: bool) -> Vec<String> {
    let mut problems = Vec::new();
    let want = |path: &Path, value: &str| match sysctl::ensure(path, value, write) {
        Ok(Change::Changed) => {
            tracing::info!(sysctl = sysctl::shown(path), value, "sysctl written");
            None
        }
        Ok(Change::Same) => None,
        Err(NeedsHelp { name, cause, command }) => Some(format!("sysctl {name}: {cause}; run: {command}")),
    };
    let uplink = plan.host().uplink.name;
    if plan.network().networks.v4.is_some() {
        problems.extend(want(Path::new("net/ipv4/ip_forward"), "1"));
    }
    if plan.network().networks.v6.is_some() {
        // Forwarding drops the default route that router advertisements brought and lets the others expire, unless accept_ra is 2.
        let accept_ra = sysctl::of_interface("ipv6", uplink, "accept_ra");
        if is(&accept_ra, "1") {
            let problem = want(&accept_ra, "2");
            // Where forwarding is on already, as on nodes with kube-proxy, it matters only to routes of router advertisements.
            let problem = problem.filter(|_| !is(Path::new(FORWARDING_V6), "1") || advertised(uplink));
            problems.extend(problem.map(|text| {
                format!(
                    "{text} (forwarding makes the kernel ignore router advertisements: IPv6 routes from them are lost)"
                )
            }));
        }
        problems.extend(want(Path::new(FORWARDING_V6), "1"));
    }
    problems
}

fn advertised(uplink: Name) -> bool {
    has_advertised_routes(uplink).unwrap_or_else(|error| {
        tracing::debug!(%error, "look for routes of router advertisements");
        false
    })
}

fn is(path: &Path, value: &str) -> bool {
    sysctl::read(path).is_ok_and(|text| text == value)
}
