// SPDX-License-Identifier: Apache-2.0
//! The files of CNI on this node: configurations, plugins, and the addresses that host-local gave to pods.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::cni_plugins;
use super::finding::{NodeFinding, finding};
use super::node::{AgentAnswer, NodeFacts};
use super::pod_addresses;

/// Files with these endings are configurations.
const ENDINGS: [&str; 3] = ["conf", "conflist", "json"];
/// The plugins that connect pods to weft's network.
pub(super) const OURS: [&str; 2] = ["flannel", "weft-veth"];
/// A network is reported from this share of its addresses, in percent.
const FULL: usize = 95;

/// Where the files are.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct CniSources {
    /// The directory of configurations.
    pub conf_dir: PathBuf,
    /// The directories of plugins.
    pub path: Vec<PathBuf>,
    /// The directory of host-local.
    pub networks: PathBuf,
}

/// A configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conf {
    /// Name of the file.
    pub name: String,
    /// The plugins that it needs, those of delegates included; or why it cannot be used.
    pub plugins: Result<Vec<String>, String>,
    /// The subnet files that plugins of weft and flannel read.
    pub subnet_files: Vec<PathBuf>,
}

/// Everything that was read.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct CniFiles {
    /// The directory of configurations.
    pub conf_dir: PathBuf,
    /// The configurations, in the order in which runtimes use them.
    pub confs: Vec<Conf>,
    /// The plugins of the first configuration that are in none of the directories. Empty if none of the directories exists.
    pub missing: Vec<String>,
    /// The plugins of the first configuration that are there and cannot run, each with the reason.
    pub broken: Vec<(PathBuf, String)>,
    /// The directories of plugins, for people.
    pub path: String,
    /// For each network of host-local its name, and the reserved addresses.
    pub reserved: Vec<(String, Vec<IpAddr>)>,
    /// True if a kubelet runs on this machine.
    pub has_kubelet: bool,
}

/// Reads the files. What does not exist is empty.
pub fn read(sources: &CniSources) -> CniFiles {
    let names = |dir: &Path| -> Vec<String> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort_unstable();
        names
    };
    let is_conf =
        |name: &String| Path::new(name).extension().is_some_and(|kind| ENDINGS.iter().any(|ending| kind == *ending));
    let conf = |name: String| {
        let list = plugin_list(&sources.conf_dir.join(&name));
        let subnet_files = list.iter().flatten().filter_map(cni_plugins::subnet_file).collect();
        Conf { plugins: list.and_then(|list| plugins(&list)), subnet_files, name }
    };
    let confs: Vec<Conf> = names(&sources.conf_dir).into_iter().filter(is_conf).map(conf).collect();
    let wanted = || confs.first().and_then(|first| first.plugins.as_ref().ok()).into_iter().flatten();
    let has_dir = sources.path.iter().any(|dir| dir.is_dir());
    let is_missing = |plugin: &&String| !sources.path.iter().any(|dir| is_program(&dir.join(plugin)));
    let place = |plugin: &String| sources.path.iter().map(|dir| dir.join(plugin)).find(|path| is_program(path));
    let broken = wanted().filter_map(place).filter_map(|path| Some((path.clone(), cni_plugins::why_not(&path)?)));
    let reserved = |network: String| {
        let addrs = names(&sources.networks.join(&network)).iter().filter_map(|name| name.parse().ok()).collect();
        (network, addrs)
    };
    CniFiles {
        conf_dir: sources.conf_dir.clone(),
        missing: wanted().filter(|_| has_dir).filter(is_missing).cloned().collect(),
        broken: broken.collect(),
        confs,
        path: sources.path.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(":"),
        reserved: names(&sources.networks).into_iter().map(reserved).collect(),
        has_kubelet: super::processes::is_running(&["kubelet"]),
    }
}

fn is_program(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
}

/// Returns the plugins of a configuration, as it describes them.
fn plugin_list(path: &Path) -> Result<Vec<Value>, String> {
    let text = fs::read(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => "it is a link that leads nowhere".to_owned(),
        _ => error.to_string(),
    })?;
    let value: Value = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    Ok(match &value["plugins"] {
        Value::Array(list) => list.clone(),
        _ => vec![value],
    })
}

/// Returns the names of these plugins, and of those that they call.
fn plugins(list: &[Value]) -> Result<Vec<String>, String> {
    let mut found: Vec<String> = Vec::new();
    for plugin in list {
        let kind = plugin["type"].as_str().filter(|kind| !kind.is_empty()).ok_or("a plugin in it has no `type`")?;
        let mut add = |value: &Value, default: Option<&str>| {
            let named = value["type"].as_str().or(default).filter(|name| !name.is_empty() && !name.contains('/'));
            found.extend(named.map(str::to_owned).filter(|name| !found.contains(name)));
        };
        add(plugin, None);
        if kind == "flannel" {
            // These are the defaults of flannel's plugin.
            add(&plugin["delegate"], Some("bridge"));
            add(&plugin["delegate"]["ipam"], Some("host-local"));
        } else {
            add(&plugin["ipam"], None);
        }
    }
    if found.is_empty() { Err("it has no plugins".to_owned()) } else { Ok(found) }
}

/// New pods cannot be connected, or are connected to another network.
pub(super) fn cni(facts: &NodeFacts) -> Vec<NodeFinding> {
    let files = &facts.cni;
    let dir = files.conf_dir.display();
    let Some(first) = files.confs.first() else {
        let agent_works = matches!(&facts.agent, AgentAnswer::Problems(problems) if problems.is_empty());
        if !files.has_kubelet || !agent_works {
            return Vec::new();
        }
        let evidence =
            format!("a kubelet runs, and {dir} has no CNI configuration, so no pod can start (NetworkPluginNotReady)");
        let remedy = "let the agent publish it (--cni-conf), or copy it there: docs/cni.md shows one; if the runtime has another \
                      directory, name it with --cni-conf-dir";
        return vec![finding(evidence, remedy.to_owned())];
    };
    let plugins = match &first.plugins {
        Ok(plugins) => plugins,
        // The link of an earlier version leads nowhere on purpose before the agent is ready. A later version replaces it then.
        Err(_)
            if !matches!(&facts.agent, AgentAnswer::Problems(problems) if problems.is_empty())
                && is_link(facts, first) =>
        {
            return Vec::new();
        }
        Err(why) => {
            let evidence = format!("{dir}/{}, the first CNI configuration, cannot be used: {why}", first.name);
            return vec![finding(evidence, format!("correct {dir}/{}, or remove it", first.name))];
        }
    };
    let mut findings = Vec::new();
    let is_ours = |plugins: &Vec<String>| plugins.iter().any(|plugin| OURS.contains(&plugin.as_str()));
    // Multus calls other configurations, among them weft's.
    let calls_others = plugins.iter().any(|plugin| plugin.contains("multus"));
    let later = files.confs.iter().skip(1).find(|conf| conf.plugins.as_ref().is_ok_and(is_ours));
    if let Some(later) = later.filter(|_| !is_ours(plugins) && !calls_others) {
        let evidence = format!(
            "{dir}/{} comes before {} in the order of names, so new pods are connected to the network of {} and not to weft's",
            first.name,
            later.name,
            plugins.join(", ")
        );
        let remedy = format!(
            "mv {dir}/{name} {dir}/{name}.off, restart the container runtime, and delete the pods of this node",
            name = first.name
        );
        findings.push(finding(evidence, remedy));
    }
    if !files.missing.is_empty() {
        let evidence = format!(
            "{dir}/{} needs the plugins {}, and {} has no such program: no pod can start",
            first.name,
            files.missing.join(", "),
            files.path
        );
        let remedy = "install them: `flannel` and `weft-veth` come with weft (docs/cni.md), the others with the package \
                      containernetworking-plugins; if the runtime has another directory, name it with --cni-path";
        findings.push(finding(evidence, remedy.to_owned()));
    }
    findings.extend(cni_plugins::broken(facts));
    findings.extend(cni_plugins::other_subnet_file(facts));
    findings
}

fn is_link(facts: &NodeFacts, conf: &Conf) -> bool {
    fs::symlink_metadata(facts.cni.conf_dir.join(&conf.name)).is_ok_and(|about| about.is_symlink())
}

/// Pods share addresses, or host-local has given nearly all addresses of the own subnet to pods.
pub(super) fn addresses(facts: &NodeFacts) -> Vec<NodeFinding> {
    let mut findings = pod_addresses::found(facts);
    let Some(subnet) = facts.subnet_file.env().and_then(|env| env.subnets.v4) else { return findings };
    // The network, its broadcast address and the gateway are for no pod.
    let all = (1_usize << (32 - subnet.prefix_len())).saturating_sub(3);
    for (network, reserved) in &facts.cni.reserved {
        let taken = reserved.iter().filter(|addr| matches!(addr, IpAddr::V4(addr) if subnet.contains(addr))).count();
        if all > 0 && taken * 100 >= all * FULL {
            let evidence = format!(
                "{taken} of the {all} addresses of {} are reserved in network {network}: soon no pod can start",
                subnet.trunc()
            );
            let remedy = "`weft doctor pods` lists those that no pod has, and with --fix gives them back; else run fewer pods on this node, \
                          or give nodes larger subnets (SubnetLen; in Kubernetes --node-cidr-mask-size)";
            findings.push(finding(evidence, remedy.to_owned()));
        }
    }
    findings
}
