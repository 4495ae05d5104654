// SPDX-License-Identifier: Apache-2.0
//! A program holds the lock of iptables or host-local.

use std::path::Path;

use crate::facts::NodeFacts;
use crate::facts::locks::{HeldLock, PATIENCE, XTABLES};
use crate::finding::{NodeFinding, finding};

/// A program holds a lock, so that others cannot go on.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |HeldLock { path, pid, holder, waiting }: &HeldLock| {
        let blocked = match path == Path::new(XTABLES) {
            true => {
                "no other program can change rules by iptables (kube-proxy, plugins like portmap, weft with --firewall=iptables)"
            }
            false => "host-local gives no pod an address, so no pod can start or end",
        };
        let path = path.display();
        let evidence = format!(
            "{holder} has held the lock {path} for more than {} s, and {waiting} others wait: {blocked}",
            PATIENCE.as_secs()
        );
        let remedy = match pid {
            0 => format!("find it on the host (`lsof {path}`), and end it if it hangs"),
            pid => {
                format!("see since when it runs (`ps -o etime,stat,args -p {pid}`), and end it if it hangs: kill {pid}")
            }
        };
        finding(evidence, remedy)
    };
    facts.locks.iter().map(one).collect()
}
