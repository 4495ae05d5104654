// SPDX-License-Identifier: Apache-2.0
//! `weft doctor pods`: finds what deleted pods left behind on a node, and the command that removes each of it.
//!
//! A container runtime calls the CNI command GC for this purpose, but many runtimes do not. Three kinds of things can be
//! left behind: addresses of host-local, records of the CNI plugin, and veth pairs.
//!
//! [`facts`] reads the files and the kernel. [`findings`] compares them, without side effects. Whether a pod is running
//! is decided first by the kernel (addresses and processes in network namespaces), then by the runtime's cache and by
//! processes whose command line or control group contains the container's ID. Whatever may belong to a running pod is
//! listed, but never removed.

mod facts;
mod findings;

use std::borrow::Cow;
use std::fmt::Write;
use std::path::Path;

use serde_json::{Map, Value, json};
use weft_cni::env::{Request, Verb};
use weft_cni::{flannel, hostlocal, plugin};
use weft_netlink::rtnl::Rtnl;

use crate::finding::counted;
pub use facts::Sources;
pub use findings::{Certainty, Finding, Leak};

/// The result of an examination.
#[derive(Debug)]
pub struct Report {
    /// Everything that does not certainly belong to a running pod, in the order in which it should be removed.
    pub findings: Vec<Finding>,
    /// What could not be read. If there is anything, no finding is certain.
    pub unreadable: Vec<String>,
    /// How much was examined, in words.
    examined: String,
}

/// Examines this node.
///
/// # Errors
/// A directory or the kernel's tables cannot be read, so that nothing is known.
pub fn examine(sources: &Sources) -> anyhow::Result<Report> {
    let facts = facts::read(sources)?;
    let examined = [
        counted(facts.addresses.len(), "address", "addresses"),
        counted(facts.records.len(), "record", "records"),
        counted(facts.veth_pairs.len(), "veth pair", "veth pairs"),
        counted(facts.namespaces.len(), "network namespace", "network namespaces"),
    ];
    Ok(Report {
        findings: findings::findings(&facts, sources.min_age),
        examined: examined.join(", "),
        unreadable: facts.unreadable,
    })
}

impl Report {
    /// Returns the findings that are certain.
    pub fn leaks(&self) -> impl Iterator<Item = &Finding> {
        self.findings.iter().filter(|finding| finding.certainty == Certainty::Leak)
    }

    /// Formats the report for people.
    pub fn render(&self, sources: &Sources) -> String {
        let mut text = String::new();
        for (certainty, title) in
            [(Certainty::Leak, "leaked"), (Certainty::Doubt, "in doubt (check before you remove it)")]
        {
            let found: Vec<_> = self.findings.iter().filter(|finding| finding.certainty == certainty).collect();
            if found.is_empty() {
                continue;
            }
            let _ = writeln!(text, "{title}:");
            for finding in found {
                let _ = writeln!(text, "  {}: {}", finding.what, finding.why);
                let _ = writeln!(text, "    {}", command(&finding.leak, sources));
            }
        }
        for what in &self.unreadable {
            let _ = writeln!(text, "not everything can be read: {what}");
        }
        let (leaks, doubts) = (self.leaks().count(), self.findings.len() - self.leaks().count());
        let _ = writeln!(text, "{leaks} leaked, {doubts} in doubt; examined {}", self.examined);
        text
    }
}

/// Returns the shell command that removes a leak.
fn command(leak: &Leak, sources: &Sources) -> String {
    match leak {
        Leak::Record { network, container, ifname, .. } => {
            let program = format!("{}/flannel", sources.plugins.split(':').next().unwrap_or_default());
            let conf = Value::Object(conf(network, &sources.records)).to_string();
            // `echo` of some shells changes backslashes.
            format!(
                "printf %s {} | CNI_COMMAND=DEL CNI_CONTAINERID={} CNI_IFNAME={} CNI_PATH={} {}",
                quoted(&conf),
                quoted(container),
                quoted(ifname),
                quoted(&sources.plugins),
                quoted(&program)
            )
        }
        Leak::VethPair { name, .. } => format!("ip link del {}", quoted(name)),
        Leak::Address { path, .. } => format!("rm {}", quoted(&path.display().to_string())),
    }
}

/// Returns a word that a shell takes for exactly this text. Names of files and of networks come from other programs.
fn quoted(word: &str) -> Cow<'_, str> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@%+=,".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', r"'\''")).into()
}

/// Why a leak was not removed.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct FixError {
    /// The leak.
    what: String,
    source: weft_cni::spec::Error,
}

/// Removes every certain leak. Returns for each what was done, or why it failed. A failure does not stop the others.
pub fn fix(report: &Report, sources: &Sources) -> Vec<Result<String, FixError>> {
    let remove = |finding: &Finding| match remove(&finding.leak, sources) {
        Ok(()) => Ok(format!("cleared {}", finding.what)),
        Err(source) => Err(FixError { what: finding.what.to_string(), source }),
    };
    report.leaks().map(remove).collect()
}

fn remove(leak: &Leak, sources: &Sources) -> Result<(), weft_cni::spec::Error> {
    match leak {
        Leak::Record { network, container, ifname, .. } => {
            let request = Request {
                verb: Verb::Del,
                container: container.clone(),
                netns: String::new(),
                ifname: ifname.clone(),
                args: String::new(),
                path: sources.plugins.clone(),
                netns_override: false,
            };
            plugin::within(request, &Value::Object(conf(network, &sources.records)), flannel::answer).map(drop)
        }
        Leak::VethPair { name, index } => {
            let mut host = Rtnl::open()?;
            // Another link may have got the name since the examination.
            if let Some(link) = host.link(name)?.filter(|link| link.index == *index) {
                host.remove_link(link.index)?;
            }
            Ok(())
        }
        Leak::Address { path, container } => {
            let dir = path.parent().unwrap_or(Path::new("/"));
            // host-local's lock is held here. The address may have been given to another container since the examination.
            hostlocal::release(dir, |now| now.path == *path && now.container == *container).map(drop)
        }
    }
}

/// Returns a CNI configuration with which the plugin's DEL finds its record.
fn conf(network: &str, records: &Path) -> Map<String, Value> {
    let conf = json!({"cniVersion": "0.4.0", "name": network, "type": "flannel", "dataDir": records});
    conf.as_object().cloned().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(plugins: &str) -> Sources {
        let [networks, records, results, netns] = ["/networks", "/records", "/results", "/netns"].map(Into::into);
        let plugins = plugins.to_owned();
        Sources { networks, records, results, netns, plugins, min_age: std::time::Duration::ZERO }
    }

    #[test]
    fn a_shell_takes_names_of_files_for_what_they_are() {
        for (word, wanted) in [
            ("/var/lib/cni/networks/cbr0/10.5.7.2", "/var/lib/cni/networks/cbr0/10.5.7.2"),
            ("", "''"),
            ("a b", "'a b'"),
            ("$(reboot)", "'$(reboot)'"),
            ("it's;", r"'it'\''s;'"),
        ] {
            assert_eq!(quoted(word), wanted);
        }
        let leak = Leak::VethPair { name: "veth0;id".to_owned(), index: 7 };
        assert_eq!(command(&leak, &sources("/opt/cni/bin")), "ip link del 'veth0;id'");
        let address = Leak::Address { path: "/networks/a b/10.5.7.2".into(), container: "c".to_owned() };
        assert_eq!(command(&address, &sources("/opt/cni/bin")), "rm '/networks/a b/10.5.7.2'");
    }
}
