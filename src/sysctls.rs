// SPDX-License-Identifier: Apache-2.0
//! The sysctls without which packets do not pass: read, written where allowed and needed, else named with the command.

use weft_backends::state::Name;

use crate::kernel::observe::has_advertised_routes;
use crate::kernel::sysctl::{self, Change, NeedsHelp};
use crate::plan::Plan;

const FORWARDING_V6: &str = "net/ipv6/conf/all/forwarding";

/// Looks at each; returns what a person has to do.
pub fn ensure(plan: &Plan, write: bool) -> Vec<String> {
    let mut problems = Vec::new();
    let want = |path: &str, value: &str| match sysctl::ensure(path, value, write) {
        Ok(Change::Changed) => {
            tracing::info!(sysctl = path, value, "sysctl written");
            None
        }
        Ok(Change::Same) => None,
        Err(NeedsHelp { name, cause, command }) => Some(format!("sysctl {name}: {cause}; run: {command}")),
    };
    let uplink = plan.host().uplink.name;
    if plan.network().networks.v4.is_some() {
        problems.extend(want("net/ipv4/ip_forward", "1"));
    }
    if plan.network().networks.v6.is_some() {
        // Forwarding drops the default route that router advertisements brought and lets the others expire, unless accept_ra is 2.
        let accept_ra = format!("net/ipv6/conf/{uplink}/accept_ra");
        if is(&accept_ra, "1") {
            let problem = want(&accept_ra, "2");
            // Where forwarding is on already, as on nodes with kube-proxy, it matters only to routes of router advertisements.
            let problem = problem.filter(|_| !is(FORWARDING_V6, "1") || advertised(uplink));
            problems.extend(problem.map(|text| {
                format!(
                    "{text} (forwarding makes the kernel ignore router advertisements: IPv6 routes from them are lost)"
                )
            }));
        }
        problems.extend(want(FORWARDING_V6, "1"));
    }
    if plan.is_mixed() {
        // Several backends at once make asymmetric paths, which strict reverse path filtering (1) drops. The kernel takes
        // the larger of "all" and the interface's own value.
        problems.extend(plan.devices().chain([uplink]).filter_map(|name| loosen(name, want)));
    }
    problems
}

fn loosen(name: Name, want: impl Fn(&str, &str) -> Option<String>) -> Option<String> {
    let own = format!("net/ipv4/conf/{name}/rp_filter");
    let strict = is(&own, "1") || (is("net/ipv4/conf/all/rp_filter", "1") && !is(&own, "2"));
    if strict { want(&own, "2") } else { None }
}

fn advertised(uplink: Name) -> bool {
    has_advertised_routes(uplink).unwrap_or_else(|error| {
        tracing::debug!(%error, "look for routes of router advertisements");
        false
    })
}

fn is(path: &str, value: &str) -> bool {
    std::fs::read_to_string(format!("/proc/sys/{path}")).is_ok_and(|text| text.trim() == value)
}
