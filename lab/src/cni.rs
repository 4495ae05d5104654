// SPDX-License-Identifier: Apache-2.0
//! Pods that are connected by the CNI plugin, which is called as a container runtime would call it: `weft lab --pods
//! cni`.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use super::netns::Netns;

/// Directories that may contain the delegates of the CNI plugin, besides the lab's own directory.
const PLUGINS: [&str; 2] = ["/opt/cni/bin", "/usr/lib/cni"];
/// Name of weft's plugin, which is in the same directory as the agent's binary.
const PLUGIN: &str = "weft-cni";

/// What connects the pods of a lab to the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wiring {
    /// The lab itself, which reads only subnet.env.
    #[default]
    Lab,
    /// weft's CNI plugin with the bridge plugin as its delegate.
    Bridge,
    /// weft's CNI plugin with `weft-veth` as its delegate.
    Veth,
}

/// The number of pods on each node, and what connects them: `3`, `cni`, `cni:3`, `cni-veth`, `cni-veth:3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pods {
    /// Number of pods on each node, 1 to 100.
    pub count: u8,
    /// What connects them.
    pub wiring: Wiring,
}

impl Default for Pods {
    fn default() -> Pods {
        Pods { count: 2, wiring: Wiring::Lab }
    }
}

/// Why a value of `--pods` is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadPods {
    /// It is neither a number nor one of the names.
    #[error("a number, cni, cni-veth, or one of these with a number: cni:3")]
    Wiring,
    /// The number is out of range.
    #[error("1 to 100 pods on each node")]
    Count,
}

impl FromStr for Pods {
    type Err = BadPods;

    fn from_str(text: &str) -> Result<Pods, BadPods> {
        let (name, count) = match text.split_once(':') {
            Some((name, count)) => (name, Some(count)),
            None if text.starts_with(|c: char| c.is_ascii_digit()) => ("", Some(text)),
            None => (text, None),
        };
        let wiring = match name {
            "" => Wiring::Lab,
            "cni" => Wiring::Bridge,
            "cni-veth" => Wiring::Veth,
            _ => return Err(BadPods::Wiring),
        };
        let count = count.map_or(Ok(Pods::default().count), str::parse).ok().filter(|count| (1..=100).contains(count));
        count.map(|count| Pods { count, wiring }).ok_or(BadPods::Count)
    }
}

/// The CNI plugin of one node.
#[derive(Debug)]
pub struct Cni {
    dir: PathBuf,
    /// The value of CNI_PATH.
    path: String,
    conf: Value,
}

impl Cni {
    /// Installs the plugin in the node's directory as `flannel`. Returns `None` if the lab connects its pods itself.
    ///
    /// # Errors
    /// The plugin or one of its delegates is missing.
    pub fn install(node: &Path, subnet_file: &Path, agent: &Path, wiring: Wiring) -> Result<Option<Cni>> {
        let delegate = match wiring {
            Wiring::Lab => return Ok(None),
            Wiring::Bridge => json!({"hairpinMode": true, "isDefaultGateway": true, "ipMasq": false}),
            Wiring::Veth => json!({"type": "weft-veth"}),
        };
        let plugin = agent.with_file_name(PLUGIN);
        if !plugin.is_file() {
            bail!("{}", missing(&plugin));
        }
        for needed in ["bridge", "host-local"] {
            if !PLUGINS.iter().any(|dir| Path::new(dir).join(needed).is_file()) {
                let dirs = PLUGINS.join(" or ");
                bail!("the CNI plugin {needed} is not in {dirs}: apt install containernetworking-plugins");
            }
        }
        let dir = node.join("cni");
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        symlink(&plugin, dir.join("flannel")).with_context(|| format!("install {}", plugin.display()))?;
        let conf = json!({
            "cniVersion": "1.0.0", "name": "cbr0", "type": "flannel", "subnetFile": subnet_file,
            "dataDir": dir.join("records"), "ipam": {"dataDir": dir.join("networks")}, "delegate": delegate,
        });
        let path = format!("{}:{}", dir.display(), PLUGINS.join(":"));
        Ok(Some(Cni { dir, path, conf }))
    }

    /// Connects a pod and returns its addresses, IPv4 first.
    ///
    /// # Errors
    /// The plugin's error, with its complete output.
    pub async fn add(&self, node: &Netns, pod: &Netns) -> Result<Vec<IpAddr>> {
        let mut command = node.command(self.dir.join("flannel"));
        command.env("CNI_COMMAND", "ADD").env("CNI_CONTAINERID", pod.name()).env("CNI_IFNAME", "eth0");
        command.env("CNI_NETNS", format!("/run/netns/{}", pod.name())).env("CNI_PATH", &self.path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("start the CNI plugin")?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(self.conf.to_string().as_bytes()).await.context("write to the CNI plugin")?;
        }
        let out = child.wait_with_output().await.context("wait for the CNI plugin")?;
        let stdout = String::from_utf8_lossy(&out.stdout);
        if !out.status.success() {
            bail!("CNI ADD of {}: {stdout}\n{}", pod.name(), String::from_utf8_lossy(&out.stderr));
        }
        let result: Value = serde_json::from_str(&stdout).context("read the CNI plugin's result")?;
        let nets = result["ips"].as_array().into_iter().flatten().map(|ip| ip["address"].as_str().unwrap_or_default());
        let mut addrs = nets
            .map(|net| net.parse::<IpNet>().map(|net| net.addr()).with_context(|| format!("read the address {net:?}")))
            .collect::<Result<Vec<_>>>()?;
        addrs.sort_by_key(IpAddr::is_ipv6);
        Ok(addrs)
    }
}

/// Returns the message for a plugin that was not built, because `cargo build` builds only the agent. It names the command that builds the plugin
/// in the directory of this agent.
fn missing(plugin: &Path) -> String {
    let release = plugin.parent().is_some_and(|dir| dir.ends_with("release"));
    let static_build = plugin.components().any(|part| part.as_os_str().to_string_lossy().ends_with("-linux-musl"));
    let build = match (static_build, release) {
        (true, _) => "make static",
        (false, true) => "cargo build --release -p weft-cni",
        (false, false) => "cargo build -p weft-cni",
    };
    format!("the CNI plugin {} is missing: build it with `{build}`", plugin.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_missing_plugin_is_named_with_the_command_that_builds_it() {
        for (dir, build) in [
            ("target/debug", "cargo build -p weft-cni"),
            ("target/release", "cargo build --release -p weft-cni"),
            ("target/x86_64-unknown-linux-musl/release", "make static"),
        ] {
            let text = missing(&Path::new(dir).join(PLUGIN));
            assert!(
                text.contains(&format!("{dir}/weft-cni is missing")) && text.ends_with(&format!("`{build}`")),
                "{text}"
            );
        }
    }

    #[test]
    fn pods_parse_as_a_number_a_wiring_or_both() {
        let rows = [
            ("3", Some((3, Wiring::Lab))),
            ("cni", Some((2, Wiring::Bridge))),
            ("cni:100", Some((100, Wiring::Bridge))),
            ("cni-veth:1", Some((1, Wiring::Veth))),
            ("0", None),
            ("101", None),
            ("cni:", None),
            ("veth", None),
        ];
        for (text, wanted) in rows {
            let read = text.parse::<Pods>().ok().map(|pods| (pods.count, pods.wiring));
            assert_eq!(read, wanted, "{text}");
        }
    }
}
