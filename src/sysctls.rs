// SPDX-License-Identifier: Apache-2.0
//! The sysctls without which packets do not pass: read, written where allowed and needed, else named with the command.

use weft_backends::state::Name;

use crate::kernel::sysctl::{self, Change, NeedsHelp};
use crate::plan::Plan;

/// Looks at each; returns what a person has to do.
pub fn ensure(plan: &Plan, write: bool) -> Vec<String> {
    let mut problems = Vec::new();
    let mut want = |path: &str, value: &str| match sysctl::ensure(path, value, write) {
        Ok(Change::Changed) => tracing::info!(sysctl = path, value, "sysctl written"),
        Ok(Change::Same) => {}
        Err(NeedsHelp { name, cause, command }) => problems.push(format!("sysctl {name}: {cause}; run: {command}")),
    };
    let uplink = plan.host().uplink.name;
    if plan.network().networks.v4.is_some() {
        want("net/ipv4/ip_forward", "1");
    }
    if plan.network().networks.v6.is_some() {
        // Forwarding drops the default route that router advertisements brought, unless accept_ra is 2.
        let accept_ra = format!("net/ipv6/conf/{uplink}/accept_ra");
        if read(&accept_ra).as_deref() == Some("1") {
            want(&accept_ra, "2");
        }
        want("net/ipv6/conf/all/forwarding", "1");
    }
    if plan.is_mixed() {
        // Several backends at once make asymmetric paths, which strict reverse path filtering (1) drops. The kernel takes
        // the larger of "all" and the interface's own value.
        for name in plan.devices().chain([uplink]) {
            loosen(name, &mut want);
        }
    }
    problems
}

fn loosen(name: Name, want: &mut impl FnMut(&str, &str)) {
    let own = format!("net/ipv4/conf/{name}/rp_filter");
    let strict = |path: &str| read(path).as_deref() == Some("1");
    if strict(&own) || (strict("net/ipv4/conf/all/rp_filter") && read(&own).as_deref() != Some("2")) {
        want(&own, "2");
    }
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(format!("/proc/sys/{path}")).ok().map(|text| text.trim().to_owned())
}
