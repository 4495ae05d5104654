// SPDX-License-Identifier: Apache-2.0
//! Where containerd looks for CNI plugins. Packages of distributions name another directory (/usr/lib/cni on Debian and Arch) than the one into which
//! Kubernetes and weft install plugins (/opt/cni/bin), and then no pod can start.
//!
//! Something is known only if the kubelet of this network namespace names the socket of containerd, a single containerd runs here, and its file says
//! where the plugins are. k3s and rke2 have another socket, Docker may have a containerd of its own, and the default of containerd depends on who
//! built it. A container has other files than containerd, even if it sees the processes of the host.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::cni_files::{CniFiles, Misplaced, is_program};
use crate::processes::{ProcessList, has_our_root};
use crate::sources::CniSources;

/// The socket of containerd, as a kubelet names it.
const SOCKETS: [&str; 2] = ["/run/containerd/containerd.sock", "/var/run/containerd/containerd.sock"];
/// The file of containerd, unless it was started with another one.
const FILE: &str = "/etc/containerd/config.toml";

/// Looks for the plugins of the first configuration of CNI where containerd does.
pub(super) fn read(sources: &CniSources, files: &CniFiles, processes: &ProcessList) -> Option<Misplaced> {
    let wanted = files.confs.first()?.plugins.as_ref().ok()?;
    let [kubelet] = processes.here(&["kubelet"])[..] else { return None };
    let [containerd] = processes.here(&["containerd"])[..] else { return None };
    let have_our_files = has_our_root(kubelet.pid) && has_our_root(containerd.pid);
    if !have_our_files || !names_containerd(&kubelet.words()) {
        return None;
    }
    let file = PathBuf::from(option(&containerd.words(), &["--config", "-c"]).unwrap_or_else(|| FILE.to_owned()));
    let dirs = plugin_dirs(&fs::read_to_string(&file).ok()?, &sources.conf_dir)?;
    misplaced(wanted, file, dirs, &sources.path)
}

/// Returns those of the wanted plugins that are in none of these directories, and in one of the others.
fn misplaced(wanted: &[String], file: PathBuf, dirs: Vec<PathBuf>, others: &[PathBuf]) -> Option<Misplaced> {
    let has = |dir: &PathBuf, plugin: &String| is_program(&dir.join(plugin));
    let place = |plugin: &String| others.iter().find(|dir| has(dir, plugin));
    let is_misplaced = |plugin: &&String| !dirs.iter().any(|dir| has(dir, plugin)) && place(plugin).is_some();
    let place = place(wanted.iter().find(is_misplaced)?)?.clone();
    let plugins = wanted.iter().filter(is_misplaced).filter(|plugin| has(&place, plugin)).cloned().collect();
    let complete = others.iter().find(|dir| wanted.iter().all(|plugin| has(dir, plugin))).cloned();
    Some(Misplaced { file, dirs, plugins, place, complete })
}

/// The part of a kubelet's file that is read.
#[derive(Deserialize)]
struct KubeletFile {
    #[serde(default, rename = "containerRuntimeEndpoint")]
    endpoint: String,
}

/// Returns true if a kubelet with this command line says that it uses containerd, there or in its file.
fn names_containerd(words: &[String]) -> bool {
    let of_file = || {
        let text = fs::read_to_string(option(words, &["--config"])?).ok()?;
        Some(serde_saphyr::from_str::<KubeletFile>(&text).ok()?.endpoint)
    };
    let socket = option(words, &["--container-runtime-endpoint"]).or_else(of_file).unwrap_or_default();
    SOCKETS.contains(&socket.strip_prefix("unix://").unwrap_or(&socket))
}

/// Returns the value of the option with one of these names. The value is the next word, or follows an equals sign.
fn option(words: &[String], names: &[&str]) -> Option<String> {
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        if names.contains(&word.as_str()) {
            return rest.next().cloned();
        }
        if let Some((name, value)) = word.split_once('=')
            && names.contains(&name)
        {
            return Some(value.to_owned());
        }
    }
    None
}

/// The part of containerd's file that is read.
#[derive(Deserialize)]
struct ContainerdFile {
    #[serde(default)]
    imports: Vec<String>,
    #[serde(default)]
    plugins: BTreeMap<String, toml::Value>,
}

/// The part of the plugin for the kubelet that is read.
#[derive(Deserialize)]
struct Cri {
    cni: Cni,
}

#[derive(Deserialize)]
struct Cni {
    conf_dir: Option<PathBuf>,
    bin_dir: Option<PathBuf>,
    #[serde(default)]
    bin_dirs: Vec<PathBuf>,
}

/// Returns the directories of plugins that a file of containerd names for the kubelet. `None` if it names none, if another file may name others, or
/// if it names another directory of configurations than `conf_dir`, so that containerd needs other plugins.
fn plugin_dirs(text: &str, conf_dir: &Path) -> Option<Vec<PathBuf>> {
    let file: ContainerdFile = toml::from_str(text).ok()?;
    if !file.imports.is_empty() {
        return None;
    }
    // The name depends on the version of the file: `cri`, `io.containerd.grpc.v1.cri` or `io.containerd.cri.v1.runtime`.
    let of_kubelet = file.plugins.into_iter().filter(|(name, _)| name.contains("cri"));
    let cni = of_kubelet.filter_map(|(_, plugin)| plugin.try_into::<Cri>().ok()).next()?.cni;
    if cni.conf_dir.is_some_and(|dir| dir != conf_dir) {
        return None;
    }
    let dirs = if cni.bin_dirs.is_empty() { cni.bin_dir.into_iter().collect() } else { cni.bin_dirs };
    let dirs: Vec<PathBuf> = dirs.into_iter().filter(|dir| dir.is_absolute()).collect();
    (!dirs.is_empty()).then_some(dirs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directories_are_those_of_the_file_and_unknown_if_another_file_may_change_them() {
        for (text, wanted) in [
            ("[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = \"/usr/lib/cni\"\n", &["/usr/lib/cni"][..]),
            (
                "imports = []\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dir = '/a'\nbin_dirs = ['/b', '/c']\n",
                &["/b", "/c"],
            ),
            ("[plugins.cri.cni]\nbin_dirs = []\nbin_dir = \"/a\"\n", &["/a"]),
            ("[plugins.cri.cni]\n#bin_dir = \"/a\"\nconf_dir = \"/etc/cni/net.d\"\n", &[]),
            ("[plugins.cri.cni]\n[plugins.cri.containerd]\nbin_dir = \"/a\"\n", &[]),
            ("imports = [\"/etc/containerd/conf.d/*.toml\"]\n[plugins.cri.cni]\nbin_dir = \"/a\"\n", &[]),
            ("imports = [\n", &[]),
            ("[plugins.cri.cni]\nbin_dir = \"\"\n", &[]),
            ("disabled_plugins = [\"cri\"]\n", &[]),
            ("[plugins.cri.cni]\nbin_dir = \"/a\"\nconf_dir = \"/etc/cni/net.d/\"\n", &["/a"]),
            ("[plugins.cri.cni]\nbin_dir = \"/a\"\nconf_dir = \"/etc/cni/net.mk\"\n", &[]),
            ("[plugins.cri.cni]\nbin_dir = \"/a\"\nbin_dirs = [\n\"/b\",\n]\n", &["/b"]),
            ("plugins = {cri = {cni = {bin_dir = \"/a\"}}}\n", &["/a"]),
            ("", &[]),
        ] {
            let found = plugin_dirs(text, Path::new("/etc/cni/net.d")).unwrap_or_default();
            assert_eq!(found, wanted.iter().map(PathBuf::from).collect::<Vec<_>>(), "{text}");
        }
    }

    #[test]
    fn a_kubelet_names_its_runtime_in_its_command_line_or_in_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("config.yaml");
        let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<String>>();
        let with_file = format!("kubelet --config={} --v 2", config.display());
        assert!(!names_containerd(&words(&with_file)), "the default depends on the version");
        for (text, is_containerd) in [
            ("cgroupDriver: systemd\ncontainerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n", true),
            ("containerRuntimeEndpoint: \"unix:///var/run/containerd/containerd.sock\"\n", true),
            ("containerRuntimeEndpoint: unix:///run/k3s/containerd/containerd.sock\n", false),
            ("containerRuntimeEndpoint: \"\"\n", false),
            ("containerRuntimeEndpoint:\n  unix:///run/containerd/containerd.sock # ours\n", true),
            ("other:\n  containerRuntimeEndpoint: unix:///run/containerd/containerd.sock\n", false),
            ("\tnot YAML", false),
        ] {
            fs::write(&config, text).unwrap();
            assert_eq!(names_containerd(&words(&with_file)), is_containerd, "{text}");
        }
        for (line, is_containerd) in [
            ("kubelet --container-runtime-endpoint=unix:///var/run/containerd/containerd.sock", true),
            ("kubelet --container-runtime-endpoint /run/containerd/containerd.sock", true),
            ("kubelet --container-runtime-endpoint=unix:///var/run/crio/crio.sock", false),
            ("kubelet --container-runtime-endpoint", false),
            ("kubelet", false),
        ] {
            assert_eq!(names_containerd(&words(line)), is_containerd, "{line}");
        }
    }
}
