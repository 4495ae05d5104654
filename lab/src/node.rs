// SPDX-License-Identifier: Apache-2.0
//! A node of a lab: a namespace with an uplink, an agent process, and pods. The pods get their addresses from
//! subnet.env, as a CNI plugin would assign them.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use nix::sys::signal::Signal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use tokio::process::Child;
use weft_subnet::env::{Value, settings};

use super::cni::Cni;
use super::netns::{Netns, checked};
use super::network::VethEnd;
use super::options::LabOptions;
use super::process::{self, PATIENCE};
use super::wait_for;

/// The bridge of the pods, which has the same name as that of flannel's CNI plugin.
const BRIDGE: &str = "cni0";

/// The values of subnet.env that a CNI plugin uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNet {
    /// The gateway addresses with their prefix lengths, one for each family (FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET).
    pub gateways: Vec<IpNet>,
    /// MTU in bytes.
    pub mtu: u32,
}

impl PodNet {
    /// Parses subnet.env. Returns `None` if it is not complete.
    pub fn parse(text: &str) -> Option<PodNet> {
        let (mut gateways, mut mtu) = (Vec::new(), None);
        for setting in settings(text) {
            match setting.value {
                Value::Subnets(_, nets) => gateways.extend(nets.into_iter().collect::<Option<Vec<_>>>()?),
                Value::Mtu(bytes) => mtu = bytes,
                Value::Networks(..) | Value::Ipmasq(_) => {}
            }
        }
        (!gateways.is_empty()).then_some(PodNet { gateways, mtu: mtu? })
    }
}

/// The part of the agent's status that a lab reads.
#[derive(Debug, Clone, Deserialize)]
pub struct Status {
    /// True if the agent is ready.
    pub ready: bool,
    /// The type of the backend that the node's lease names.
    #[serde(default)]
    pub backend: String,
    /// The types of the earlier backends by which peers still reach the node, while the backend changes.
    #[serde(default)]
    pub other_ways: Vec<String>,
    /// What is wrong, one sentence each.
    #[serde(default, deserialize_with = "texts")]
    pub problems: Vec<String>,
    /// The other nodes.
    pub peers: Vec<PeerStatus>,
}

/// Reads the texts of problems, without their kinds.
fn texts<'de, D: Deserializer<'de>>(problems: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    struct Problem {
        text: String,
    }
    Ok(Vec::<Problem>::deserialize(problems)?.into_iter().map(|problem| problem.text).collect())
}

/// The status of one peer.
#[derive(Debug, Clone, Deserialize)]
pub struct PeerStatus {
    /// `programmed`, if all entries for the peer are in the kernel.
    pub state: String,
}

/// A pod: a namespace that is connected to the node's bridge by a veth pair.
#[derive(Debug, Clone)]
pub struct Pod {
    /// The pod's namespace, which has the pod's name (`n1-p1`).
    pub ns: Netns,
    /// The pod's addresses, IPv4 first.
    pub addrs: Vec<IpAddr>,
}

/// A node of the lab.
#[derive(Debug)]
pub struct Node {
    /// The namespace, which has the node's name (`n1`).
    pub ns: Netns,
    /// Addresses of the uplink, IPv4 first.
    pub uplink: Vec<IpAddr>,
    /// The node's pods.
    pub pods: Vec<Pod>,
    /// Directory of the node's own files, such as subnet.env and the socket.
    dir: PathBuf,
    log: PathBuf,
    exe: PathBuf,
    flags: Vec<String>,
    env: Vec<(String, String)>,
    agent: Option<Child>,
    cni: Option<Cni>,
}

impl Node {
    /// Creates a node in an existing namespace, without starting its agent.
    ///
    /// # Errors
    /// The node's directory cannot be created, or the CNI plugin cannot be installed.
    pub fn new(ns: Netns, uplink: Vec<IpAddr>, lab: &Path, options: &LabOptions) -> Result<Node> {
        let dir = lab.join(ns.name());
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let log = lab.join("logs").join(format!("{}.log", ns.name()));
        let exe = options.agent_exe()?;
        let cni = Cni::install(&dir, &dir.join("subnet.env"), &exe, options.pods.wiring)?;
        Ok(Node { ns, uplink, pods: Vec::new(), dir, log, exe, flags: Vec::new(), env: Vec::new(), agent: None, cni })
    }

    /// Returns the node's name.
    pub fn name(&self) -> &str {
        self.ns.name()
    }

    /// Returns the path of the agent's log.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Returns the path of the node's subnet.env.
    pub fn subnet_file(&self) -> PathBuf {
        self.dir.join("subnet.env")
    }

    /// Sets the agent's flags, in addition to those that depend on the node.
    pub fn set_flags(&mut self, flags: Vec<String>) {
        self.flags = flags;
    }

    /// Sets a flag for the next start. It replaces a flag of the same name.
    pub fn set_flag(&mut self, flag: &str) {
        let name = flag.split('=').next();
        self.flags.retain(|other| other.split('=').next() != name);
        self.flags.push(flag.to_owned());
    }

    /// Sets the program to start as the agent from now on.
    pub fn set_exe(&mut self, exe: &Path) {
        self.exe = exe.to_owned();
    }

    /// Removes a flag, whatever its value is.
    pub fn remove_flag(&mut self, name: &str) {
        self.flags.retain(|flag| flag.split('=').next() != Some(name));
    }

    /// Adds a variable to the agent's environment, which inherits nothing.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.env.push((name.to_owned(), value.to_owned()));
    }

    /// Returns the agent's `--state-dir`.
    pub fn state_dir(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// Starts the agent without waiting for it.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start(&mut self) -> Result<()> {
        let mut command = self.ns.command(&self.exe);
        command.arg("agent").arg("--iface=eth0");
        command.arg(format!("--subnet-file={}", self.subnet_file().display()));
        command.arg(format!("--socket={}", self.socket().display()));
        command.arg(format!("--state-dir={}", self.state_dir().display()));
        command.args(&self.flags).envs(self.env.iter().map(|(name, value)| (name, value)));
        self.agent = Some(self.ns.spawn(&mut command, &self.log)?);
        Ok(())
    }

    /// Starts flanneld in the agent's place. It has neither a subcommand nor a socket.
    ///
    /// # Errors
    /// The process cannot be started.
    pub fn start_other(&mut self, program: &Path) -> Result<()> {
        let mut command = self.ns.command(program);
        command.arg("--iface=eth0").arg(format!("--subnet-file={}", self.subnet_file().display()));
        command.args(self.flags.iter().filter(|flag| flag.starts_with("--etcd") || flag.starts_with("--ip")));
        self.agent = Some(self.ns.spawn(&mut command, &self.log)?);
        Ok(())
    }

    /// Sends the agent a signal, and waits until it has ended.
    ///
    /// # Errors
    /// The agent does not run, or does not end in time.
    pub async fn stop(&mut self, signal: Signal) -> Result<std::process::ExitStatus> {
        process::end(&mut self.agent, signal).await
    }

    /// Waits until the agent has ended by itself.
    ///
    /// # Errors
    /// The agent does not run, or does not end in time.
    pub async fn ended(&mut self) -> Result<std::process::ExitStatus> {
        let mut agent = self.agent.take().context("the agent does not run")?;
        let status = tokio::time::timeout(PATIENCE, agent.wait()).await;
        status.context("the agent does not end by itself")?.context("wait for the agent")
    }

    /// Sends the agent a signal without waiting.
    ///
    /// # Errors
    /// The agent does not run.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        process::signal(self.agent.as_ref(), signal)
    }

    /// Returns the part of the agent's status that a lab reads.
    ///
    /// # Errors
    /// The agent does not answer.
    pub async fn status(&self) -> Result<Status> {
        self.status_as().await
    }

    /// Returns the agent's status as a type of the caller, to which its JSON fits.
    ///
    /// # Errors
    /// The agent does not answer, or its answer does not fit.
    pub async fn status_as<T: DeserializeOwned>(&self) -> Result<T> {
        let mut command = self.ns.command(&self.exe);
        command.arg("status").arg(format!("--socket={}", self.socket().display())).args(["-o", "json"]);
        let text = checked(&mut command).await?;
        serde_json::from_str(&text).context("read the answer of weft status")
    }

    /// Waits until the agent reports that it is ready.
    ///
    /// # Errors
    /// The agent ends, or is not ready in time. The message contains the end of its log.
    pub async fn ready(&mut self) -> Result<()> {
        self.until("to be ready", async |node: &Node| node.status().await.is_ok_and(|status| status.ready)).await
    }

    /// Waits until subnet.env is complete, as a CNI plugin does.
    ///
    /// # Errors
    /// As [`Node::ready`].
    pub async fn pod_net(&mut self) -> Result<PodNet> {
        self.until("to write subnet.env", async |node: &Node| node.read_pod_net().is_some()).await?;
        self.read_pod_net().with_context(|| format!("{} has no subnet.env", self.name()))
    }

    /// Creates the node's bridge and its pods according to subnet.env.
    ///
    /// # Errors
    /// A link, an address or a route is refused.
    pub async fn add_pods(&mut self, count: usize) -> Result<()> {
        if let Some(cni) = &self.cni {
            for number in 1..=count {
                let ns = self.ns.add_other(&format!("{}-p{number}", self.name())).await?;
                let addrs = cni.add(&self.ns, &ns).await?;
                self.pods.push(Pod { ns, addrs });
            }
            return Ok(());
        }
        let net = self.pod_net().await?;
        let network = self.ns.network()?;
        network.add_bridge(BRIDGE, Some(net.mtu)).await?;
        for gateway in &net.gateways {
            network.add_address(BRIDGE, *gateway).await?;
        }
        for number in 1..=count {
            let pod = self.add_pod(&net, number).await?;
            self.pods.push(pod);
        }
        Ok(())
    }

    /// Returns the last lines of the agent's log.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let all: Vec<_> = text.lines().collect();
        all.get(all.len().saturating_sub(lines)..).unwrap_or_default().join("\n")
    }

    async fn add_pod(&self, net: &PodNet, number: usize) -> Result<Pod> {
        let ns = self.ns.add_other(&format!("{}-p{number}", self.name())).await?;
        let far = VethEnd { ns: &ns.path(), name: "eth0" };
        self.ns.network()?.add_port(&format!("pod{number}"), BRIDGE, far, Some(net.mtu)).await?;
        let network = ns.network()?;
        network.set_up("eth0").await?;
        let mut addrs = Vec::new();
        for gateway in &net.gateways {
            let address = IpNet::new(plus(gateway.addr(), number), gateway.prefix_len())?;
            network.add_address("eth0", address).await?;
            network.replace_default_route("eth0", gateway.addr()).await?;
            addrs.push(address.addr());
        }
        Ok(Pod { ns, addrs })
    }

    async fn until(&mut self, what: &str, reached: impl AsyncFn(&Node) -> bool) -> Result<()> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while !reached(self).await {
            let exit_status = self.agent.as_mut().and_then(|child| child.try_wait().ok().flatten());
            if exit_status.is_some() || self.agent.is_none() || tokio::time::Instant::now() >= deadline {
                let how = match (exit_status, &self.agent) {
                    (Some(status), _) => format!("it ended with {status}"),
                    (None, None) => "it does not run".to_owned(),
                    (None, Some(_)) => format!("not within {} s", PATIENCE.as_secs()),
                };
                bail!(
                    "{}: waited for the agent {what}: {how}; {}:\n{}",
                    self.name(),
                    self.log.display(),
                    self.log_tail(15)
                );
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    fn read_pod_net(&self) -> Option<PodNet> {
        PodNet::parse(&fs::read_to_string(self.subnet_file()).ok()?)
    }

    /// Returns the path of the agent's socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("weft.sock")
    }
}

/// Waits until every node has `peers` programmed peers.
///
/// # Errors
/// A node does not have them in time.
pub async fn all_know(nodes: &[Node], peers: usize) -> Result<()> {
    for node in nodes {
        let what = format!("{} to program {peers} peers", node.name());
        wait_for(&what, PATIENCE, async || {
            let done = |peer: &&PeerStatus| peer.state == "programmed";
            node.status().await.is_ok_and(|status| status.peers.iter().filter(done).count() == peers)
        })
        .await?;
    }
    Ok(())
}

fn plus(addr: IpAddr, number: usize) -> IpAddr {
    match addr {
        IpAddr::V4(v4) => IpAddr::V4((u32::from(v4).wrapping_add(number as u32)).into()),
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6).wrapping_add(number as u128)).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::{IpNet, PodNet};

    /// The agent may be just writing it.
    #[test]
    fn a_subnet_file_without_an_mtu_or_a_whole_subnet_is_not_complete() {
        let subnets = "FLANNEL_SUBNET=10.5.7.1/24\nFLANNEL_IPV6_SUBNET=fd05:0:0:7::1/64\n";
        let net = PodNet::parse(&format!("{subnets}FLANNEL_MTU=1450\n")).unwrap();
        let gateways = ["10.5.7.1/24", "fd05:0:0:7::1/64"].map(|net| net.parse::<IpNet>().unwrap());
        assert_eq!(net, PodNet { gateways: gateways.to_vec(), mtu: 1450 });
        for text in [subnets, "FLANNEL_MTU=1450\n", "FLANNEL_SUBNET=10.5.7\nFLANNEL_MTU=1450\n", ""] {
            assert_eq!(PodNet::parse(text), None, "{text}");
        }
    }
}
