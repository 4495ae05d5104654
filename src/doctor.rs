// SPDX-License-Identifier: Apache-2.0
//! `weft doctor pods`: what pods that are gone left behind, and the command that clears each of it.
//!
//! For runtimes that never call GC. Three kinds of things leak: addresses of host-local, records of the CNI plugin, and veth
//! pairs. What lives is told by the kernel first (addresses and processes in network namespaces), then by the runtime's cache
//! and by processes that bear a container's id. Invariant: what might live is listed, never removed.

mod judge;
mod look;
mod processes;
mod spaces;

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};
use weft_cni::env::{Request, Verb};
use weft_cni::rtnl::Rtnl;
use weft_cni::{flannel, hostlocal, plugin};

pub use judge::{Finding, Verdict, judge};
pub use look::{Cached, Facts, Pair, Reserved, Written};
pub use spaces::Space;

/// What to look at.
#[derive(Debug, Clone)]
pub struct Places {
    /// host-local's directory, one of each network in it.
    pub networks: PathBuf,
    /// The CNI plugin's records.
    pub records: PathBuf,
    /// The runtime's cache of results, where it has one.
    pub results: PathBuf,
    /// Named network namespaces.
    pub netns: PathBuf,
    /// CNI_PATH for the delegates of records that are cleared.
    pub plugins: String,
    /// Younger files may belong to a pod that is just being started.
    pub age: Duration,
}

/// What leaks, in the order in which it is to be cleared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leak {
    /// A record: the plugin's own DEL takes back what it speaks of.
    Record {
        /// Its file.
        path: PathBuf,
        /// Network.
        network: String,
        /// Container.
        container: String,
        /// Interface.
        ifname: String,
    },
    /// A veth pair.
    Pair {
        /// Name of the host's end.
        name: String,
        /// Its index.
        index: u32,
    },
    /// An address.
    Address {
        /// Its file.
        path: PathBuf,
        /// Who had it.
        container: String,
    },
}

/// What was found, and how much was looked at.
#[derive(Debug)]
pub struct Report {
    /// Everything that is not plainly alive.
    pub findings: Vec<Finding>,
    /// Why nothing can be said for sure.
    pub blind: Vec<String>,
    looked_at: String,
}

/// Looks, and compares.
///
/// # Errors
/// A directory or the kernel cannot be read: then nothing is known.
pub fn examine(places: &Places) -> anyhow::Result<Report> {
    let facts = look::look(places)?;
    let count = |n: usize, one: &str, many: &str| format!("{n} {}", if n == 1 { one } else { many });
    let looked_at = [
        count(facts.reserved.len(), "address", "addresses"),
        count(facts.written.len(), "record", "records"),
        count(facts.pairs.len(), "veth pair", "veth pairs"),
        count(facts.spaces.len(), "network namespace", "network namespaces"),
    ];
    Ok(Report { findings: judge(&facts, places.age), looked_at: looked_at.join(", "), blind: facts.blind })
}

impl Report {
    /// Leaks that are sure.
    pub fn leaks(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.verdict == Verdict::Leak)
    }

    /// For people.
    pub fn render(&self, places: &Places) -> String {
        let mut text = String::new();
        for (verdict, title) in [(Verdict::Leak, "leaked"), (Verdict::Doubt, "in doubt (look before you clear it)")] {
            let found: Vec<_> = self.findings.iter().filter(|finding| finding.verdict == verdict).collect();
            if found.is_empty() {
                continue;
            }
            let _ = writeln!(text, "{title}:");
            for finding in found {
                let _ = writeln!(text, "  {}: {}", finding.what, finding.why);
                let _ = writeln!(text, "    {}", command(&finding.leak, places));
            }
        }
        for why in &self.blind {
            let _ = writeln!(text, "not everything can be seen: {why}");
        }
        let (leaks, doubts) = (self.leaks().count(), self.findings.len() - self.leaks().count());
        let _ = writeln!(text, "{leaks} leaked, {doubts} in doubt; looked at {}", self.looked_at);
        text
    }
}

/// The command that clears it.
fn command(leak: &Leak, places: &Places) -> String {
    match leak {
        Leak::Record { network, container, ifname, .. } => {
            let program = places.plugins.split(':').next().unwrap_or_default();
            format!(
                "echo '{}' | CNI_COMMAND=DEL CNI_CONTAINERID={container} CNI_IFNAME={ifname} CNI_PATH={} {program}/flannel",
                Value::Object(conf(network, &places.records)),
                places.plugins
            )
        }
        Leak::Pair { name, .. } => format!("ip link del {name}"),
        Leak::Address { path, .. } => format!("rm {}", path.display()),
    }
}

/// Clears every sure leak; what was done, or why not. A later one does not wait for an earlier one.
pub fn fix(report: &Report, places: &Places) -> Vec<Result<String, String>> {
    let clear = |finding: &Finding| match clear(&finding.leak, places) {
        Ok(()) => Ok(format!("cleared {}", finding.what)),
        Err(error) => Err(format!("{}: {error}", finding.what)),
    };
    report.leaks().map(clear).collect()
}

fn clear(leak: &Leak, places: &Places) -> Result<(), weft_cni::spec::Error> {
    match leak {
        Leak::Record { network, container, ifname, .. } => {
            let request = Request {
                verb: Verb::Del,
                container: container.clone(),
                netns: String::new(),
                ifname: ifname.clone(),
                args: String::new(),
                path: places.plugins.clone(),
                netns_override: false,
            };
            plugin::within(request, &Value::Object(conf(network, &places.records)), flannel::answer).map(drop)
        }
        Leak::Pair { name, index } => {
            let mut host = Rtnl::open()?;
            // The index may be another link's by now.
            match host.link(name)?.filter(|link| link.index == *index) {
                Some(link) => host.remove_link(link.index),
                None => Ok(()),
            }
        }
        Leak::Address { path, container } => {
            let dir = path.parent().unwrap_or(Path::new("/"));
            // Under host-local's lock, and only if it is still the same container's.
            hostlocal::release(dir, |now| now.path == *path && now.container == *container).map(drop)
        }
    }
}

fn conf(network: &str, records: &Path) -> Map<String, Value> {
    let conf = json!({"cniVersion": "0.4.0", "name": network, "type": "flannel", "dataDir": records});
    conf.as_object().cloned().unwrap_or_default()
}
