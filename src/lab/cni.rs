// SPDX-License-Identifier: Apache-2.0
//! Pods wired by the CNI plugin, called as a runtime calls it: `weft lab --pods cni`.

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

use super::net::Netns;

/// Where the plugins that ours delegates to may be, beside those in the lab's own directory.
const PLUGINS: [&str; 2] = ["/opt/cni/bin", "/usr/lib/cni"];
/// Ours, beside the agent's binary.
const OURS: &str = "weft-cni";

/// Who wires the pods of a lab.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wiring {
    /// The lab itself, from subnet.env alone.
    #[default]
    Lab,
    /// Our plugin, by the bridge plugin.
    Bridge,
    /// Our plugin, by `weft-veth`.
    Veth,
}

/// How many pods a node has, and who wires them: `3`, `cni`, `cni:3`, `cni-veth`, `cni-veth:3`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pods {
    /// On each node, 1 to 100.
    pub count: u8,
    /// By whom.
    pub wiring: Wiring,
}

impl Default for Pods {
    fn default() -> Pods {
        Pods { count: 2, wiring: Wiring::Lab }
    }
}

impl FromStr for Pods {
    type Err = String;

    fn from_str(text: &str) -> Result<Pods, String> {
        let (name, count) = match text.split_once(':') {
            Some((name, count)) => (name, Some(count)),
            None if text.starts_with(|c: char| c.is_ascii_digit()) => ("", Some(text)),
            None => (text, None),
        };
        let wiring = match name {
            "" => Wiring::Lab,
            "cni" => Wiring::Bridge,
            "cni-veth" => Wiring::Veth,
            _ => return Err("a number, cni, cni-veth, or one of these with a number: cni:3".to_owned()),
        };
        let count = count.map_or(Ok(Pods::default().count), str::parse).ok().filter(|count| (1..=100).contains(count));
        count.map(|count| Pods { count, wiring }).ok_or_else(|| "1 to 100 pods on each node".to_owned())
    }
}

/// The plugin on one node.
#[derive(Debug)]
pub struct Cni {
    dir: PathBuf,
    /// CNI_PATH.
    path: String,
    conf: Value,
}

impl Cni {
    /// Installs the plugin in the node's directory, as `flannel`; `None` when the lab wires its pods itself.
    ///
    /// # Errors
    /// When the plugin, or one that it delegates to, is not there.
    pub fn install(node: &Path, subnet_file: &Path, agent: &Path, wiring: Wiring) -> Result<Option<Cni>> {
        let delegate = match wiring {
            Wiring::Lab => return Ok(None),
            Wiring::Bridge => json!({"hairpinMode": true, "isDefaultGateway": true, "ipMasq": false}),
            Wiring::Veth => json!({"type": "weft-veth"}),
        };
        let plugin = agent.with_file_name(OURS);
        if !plugin.is_file() {
            bail!("{} is missing: build it with `cargo build -p weft-cni`, or `make static`", plugin.display());
        }
        for needed in ["bridge", "host-local"] {
            if !PLUGINS.iter().any(|dir| Path::new(dir).join(needed).is_file()) {
                let places = PLUGINS.join(" or ");
                bail!("the CNI plugin {needed} is not in {places}: apt install containernetworking-plugins");
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

    /// Wires a pod; its addresses, IPv4 first.
    ///
    /// # Errors
    /// The plugin's own, with all that it said.
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
        let said = String::from_utf8_lossy(&out.stdout);
        if !out.status.success() {
            bail!("CNI ADD of {}: {said}\n{}", pod.name(), String::from_utf8_lossy(&out.stderr));
        }
        let result: Value = serde_json::from_str(&said).context("read the CNI plugin's result")?;
        let nets = result["ips"].as_array().into_iter().flatten().map(|ip| ip["address"].as_str().unwrap_or_default());
        let mut addrs = nets
            .map(|net| net.parse::<IpNet>().map(|net| net.addr()).with_context(|| format!("read the address {net:?}")))
            .collect::<Result<Vec<_>>>()?;
        addrs.sort_by_key(IpAddr::is_ipv6);
        Ok(addrs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_are_a_number_a_wiring_or_both() {
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
