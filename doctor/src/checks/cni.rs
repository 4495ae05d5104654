// SPDX-License-Identifier: Apache-2.0
//! CNI configurations or plugins are missing, broken, or not those of weft.

use weft_cni::conf_dir::is_multus;

use crate::facts::NodeFacts;
use crate::facts::cni_files::{BadConf, BrokenPlugin, Conf, Misplaced};
use crate::facts::cni_plugins::OURS;
use crate::facts::other_pods::OtherPod;
use crate::finding::{MAX_NAMED, NodeFinding, counted, finding, some_of};
use crate::sources::AgentAnswer;
use crate::subnet_file::SubnetFile;

/// New pods cannot be connected, or are connected to another network; or there are pods that were.
pub(super) fn check(facts: &NodeFacts) -> Vec<NodeFinding> {
    configurations(facts).into_iter().chain(misplaced(facts)).chain(other_pods(facts)).collect()
}

/// Returns true if these plugins call other configurations, among them weft's.
fn calls_others(plugins: &[String]) -> bool {
    plugins.iter().any(|plugin| is_multus(plugin))
}

/// Pods are connected to another network. With Multus somebody may have chosen that.
fn other_pods(facts: &NodeFacts) -> Option<NodeFinding> {
    let pods = &facts.other_pods;
    if pods.is_empty() {
        return None;
    }
    if facts.cni.confs.iter().any(|conf| conf.plugins.as_ref().is_ok_and(|plugins| calls_others(plugins))) {
        return None;
    }
    let names: Vec<String> = pods.iter().map(|OtherPod { bridge, addr }| format!("{addr} over {bridge}")).collect();
    let evidence = format!(
        "{} connected to another network than weft's ({}); probably they were started while another configuration came first: pods of \
         other nodes do not reach them",
        counted(pods.len(), "pod is", "pods are"),
        some_of(names.iter().map(String::as_str))
    );
    // Each node may have the same addresses there.
    let select = pods.iter().take(MAX_NAMED).map(|OtherPod { addr, .. }| {
        format!("`kubectl get pods -A -o wide --field-selector status.podIP={addr},spec.nodeName=NODE`")
    });
    let remedy = format!(
        "delete them, so that they are made again; with the name of this node for NODE, they are shown by {}",
        select.collect::<Vec<_>>().join(", ")
    );
    Some(finding(evidence, remedy))
}

/// The files of CNI are wrong.
fn configurations(facts: &NodeFacts) -> Vec<NodeFinding> {
    let files = &facts.cni;
    // The container runtime may read what decides here: the first configuration, or the names of all.
    let is_denied = |first: &Conf| first.plugins == Err(BadConf::Denied);
    if files.confs.first().map_or(!files.denied.is_empty(), is_denied) {
        return Vec::new();
    }
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
        Err(_) if !matches!(&facts.agent, AgentAnswer::Problems(problems) if problems.is_empty()) && first.is_link => {
            return Vec::new();
        }
        Err(why) => {
            let evidence = format!("{dir}/{}, the first CNI configuration, cannot be used: {why}", first.name);
            return vec![finding(evidence, format!("correct {dir}/{}, or remove it", first.name))];
        }
    };
    let mut findings = Vec::new();
    let is_ours = |plugins: &Vec<String>| plugins.iter().any(|plugin| OURS.contains(&plugin.as_str()));
    let later = files.confs.iter().skip(1).find(|conf| conf.plugins.as_ref().is_ok_and(is_ours));
    if let Some(later) = later.filter(|_| !is_ours(plugins) && !calls_others(plugins)) {
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
    findings.extend(broken(facts));
    findings.extend(other_subnet_file(facts));
    findings
}

/// containerd looks for plugins in another directory.
fn misplaced(facts: &NodeFacts) -> Option<NodeFinding> {
    let Misplaced { file, dirs, plugins, place, complete } = facts.misplaced.as_ref()?;
    let (file, names) = (file.display(), plugins.join(", "));
    let dirs: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    let evidence = format!(
        "containerd looks for CNI plugins in {} ({file}), and {names} {} not there, but in {}: no pod can start",
        dirs.join(", "),
        if plugins.len() == 1 { "is" } else { "are" },
        place.display()
    );
    let remedy = match complete {
        Some(dir) => format!(
            "name {} as the directory of plugins in {file} (`bin_dir`, or `bin_dirs` in newer versions), and `systemctl restart containerd`, which \
             stops no pod",
            dir.display()
        ),
        None => {
            format!("copy {names} from {} to {}, so that all plugins are in one directory", place.display(), dirs[0])
        }
    };
    Some(finding(evidence, remedy))
}

/// Plugins that cannot run.
fn broken(facts: &NodeFacts) -> Vec<NodeFinding> {
    let one = |BrokenPlugin { path, why }: &BrokenPlugin| {
        let remedy = "install it again, for the architecture of this node; if the file system is mounted with noexec, mount it without; \
                      `CNI_COMMAND=VERSION` and that program show the error";
        finding(format!("{} cannot run: {why}: no pod can start", path.display()), remedy.to_owned())
    };
    facts.cni.broken.iter().map(one).collect()
}

/// The plugins of weft and flannel read another subnet file than the one that the agent writes.
fn other_subnet_file(facts: &NodeFacts) -> Option<NodeFinding> {
    let runs = matches!(facts.agent, AgentAnswer::Problems(_)) && matches!(facts.subnet_file, SubnetFile::Good(_));
    let own = facts.path.as_path();
    let first = facts.cni.confs.iter().find(|conf| !conf.subnet_files.is_empty())?;
    if !runs || facts.cni.confs.iter().any(|conf| conf.reads_ours) {
        return None;
    }
    let (dir, name, file) = (facts.cni.conf_dir.display(), &first.name, first.subnet_files.first()?.display());
    let evidence = format!(
        "{dir}/{name}: the plugin reads {file}, the agent writes {}: new pods get no address, or one of another subnet",
        own.display()
    );
    let remedy = format!(
        "set `subnetFile` of the plugin in that file to {}, or start the agent with --subnet-file={file}",
        own.display()
    );
    Some(finding(evidence, remedy))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::facts::cni_files::CniFiles;

    fn conf(bad: BadConf) -> Conf {
        Conf {
            name: "10-flannel.conflist".to_owned(),
            plugins: Err(bad),
            is_link: false,
            isolates: false,
            subnet_files: Vec::new(),
            reads_ours: false,
        }
    }

    /// Many clusters let root alone read these files.
    #[test]
    fn a_configuration_that_only_others_may_read_is_no_finding() {
        let agent = AgentAnswer::Problems(Vec::new());
        let files = |confs, denied: Option<&str>| CniFiles {
            confs,
            denied: denied.into_iter().map(PathBuf::from).collect(),
            has_kubelet: true,
            ..CniFiles::default()
        };
        for (confs, denied, found) in [
            (vec![conf(BadConf::NoPlugins)], None, 1),
            (vec![conf(BadConf::Denied)], Some("/etc/cni/net.d/10-flannel.conflist"), 0),
            (vec![conf(BadConf::NoPlugins), conf(BadConf::Denied)], Some("/etc/cni/net.d/20-other.conf"), 1),
            (Vec::new(), None, 1),
            (Vec::new(), Some("/etc/cni/net.d"), 0),
        ] {
            let facts = NodeFacts { cni: files(confs, denied), agent: agent.clone(), ..NodeFacts::default() };
            assert_eq!(check(&facts).len(), found, "{:?}", facts.cni);
        }
    }
}
