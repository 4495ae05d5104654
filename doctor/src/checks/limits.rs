// SPDX-License-Identifier: Apache-2.0
//! inotify, open files or threads are at the limit.

use crate::facts::NodeFacts;
use crate::facts::limits::{Fill, Limits};
use crate::finding::{NodeFinding, finding};
use crate::remedies::set_sysctl;

/// A limit is reported from this share, in percent.
const FULL: u64 = 95;

/// A limit of the machine is nearly reached.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    let Limits { inotify, watches, files, threads, .. } = &facts.limits;
    let is_full = |fill: &Fill| fill.max > 0 && fill.has_reached(FULL);
    let inotify = inotify.filter(is_full).map(|Fill { entries, max }| {
        let evidence = format!(
            "root has {entries} of {max} inotify instances: programs that watch files fail with \"too many open files\" (the kubelet, \
             container runtimes), and weft checks its files every second instead"
        );
        finding(evidence, set_sysctl(&format!("fs.inotify.max_user_instances={}", max.saturating_mul(4))))
    });
    let watches = watches.filter(is_full).map(|Fill { entries, max }| {
        let evidence = format!(
            "root watches {entries} of {max} files by inotify: programs that watch files fail with \"no space left on device\" (the \
             kubelet, container runtimes), and weft checks its files every second instead"
        );
        finding(evidence, set_sysctl(&format!("fs.inotify.max_user_watches={}", max.saturating_mul(4))))
    });
    let files = files.filter(is_full).map(|Fill { entries, max }| {
        let evidence = format!(
            "{entries} of {max} files of this machine are open: soon no program can open a file or a connection"
        );
        let remedy = format!(
            "find the program (`for p in /proc/[0-9]*; do echo $(ls $p/fd | wc -l) $(cat $p/comm) $p; done | sort -rn | head`) and restart it; \
             sysctl -w fs.file-max={} helps for a while",
            max.saturating_mul(2)
        );
        finding(evidence, remedy)
    });
    let threads = threads.filter(is_full).map(|Fill { entries, max }| {
        let evidence = format!(
            "{entries} of {max} threads of this machine run: soon no program can be started, and CNI plugins and probes of the kubelet \
             fail with \"resource temporarily unavailable\""
        );
        let remedy = format!(
            "find the program (`ps -eo nlwp,pid,comm --sort=-nlwp | head`) and restart it; sysctl -w kernel.pid_max={0} \
             kernel.threads-max={0} helps for a while",
            max.saturating_mul(2)
        );
        finding(evidence, remedy)
    });
    [inotify, watches, files, threads].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Selects one of the limits.
    type Select = fn(&mut Limits) -> &mut Option<Fill>;

    #[test]
    fn each_limit_is_named_from_95_percent_on_with_the_sysctl_that_raises_it() {
        let findings = |select: Select, entries: u64| {
            let mut limits = Limits::default();
            *select(&mut limits) = Some(Fill { entries, max: 1000 });
            check(&NodeFacts { limits, ..NodeFacts::default() })
        };
        let all: [(Select, &str); 4] = [
            (|limits| &mut limits.inotify, "fs.inotify.max_user_instances=4000"),
            (|limits| &mut limits.watches, "fs.inotify.max_user_watches=4000"),
            (|limits| &mut limits.files, "fs.file-max=2000"),
            (|limits| &mut limits.threads, "kernel.pid_max=2000 kernel.threads-max=2000"),
        ];
        for (select, sysctl) in all {
            let found = findings(select, 950);
            assert!(found.len() == 1 && found[0].remedy.contains(sysctl), "{found:?}");
            assert_eq!(findings(select, 949), []);
        }
        // systemd raises the limit of open files to this number.
        let files = Some(Fill { entries: 20_000, max: i64::MAX.cast_unsigned() });
        let limits = Limits { files, ..Limits::default() };
        assert_eq!(check(&NodeFacts { limits, ..NodeFacts::default() }), [], "there is no limit in effect");
    }
}
