// SPDX-License-Identifier: Apache-2.0
//! One node of a lab: a namespace with an uplink, an agent process, and pods addressed the way a CNI plugin does it, from
//! subnet.env alone.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ipnet::IpNet;
use nix::sys::signal::Signal;
use tokio::process::Child;

use super::cni::Cni;
use super::net::{Netns, checked};
use super::options::LabOptions;
use super::{process, wait_for};
use crate::status::Status;

/// How long an agent may take to become ready.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What a CNI plugin reads from subnet.env.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodNet {
    /// Gateway address with prefix length, one per family (FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET).
    pub gateways: Vec<IpNet>,
    /// Bytes.
    pub mtu: u32,
}

impl PodNet {
    /// Reads the text of subnet.env; `None` while it is not complete.
    pub fn parse(text: &str) -> Option<PodNet> {
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let gateways: Vec<IpNet> = ["FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"]
            .iter()
            .filter_map(|key| value(key))
            .map(|text| text.trim().parse().ok())
            .collect::<Option<_>>()?;
        let mtu = value("FLANNEL_MTU")?.trim().parse().ok()?;
        (!gateways.is_empty()).then_some(PodNet { gateways, mtu })
    }
}

/// A pod: a namespace behind a veth on the node's bridge.
#[derive(Debug, Clone)]
pub struct Pod {
    /// Its namespace, named after it (`n1-p1`).
    pub ns: Netns,
    /// Its addresses, IPv4 first.
    pub addrs: Vec<IpAddr>,
}

/// A node.
#[derive(Debug)]
pub struct Node {
    /// `n1`, also the name of its namespace.
    pub ns: Netns,
    /// Addresses of its uplink, IPv4 first.
    pub uplink: Vec<IpAddr>,
    /// Its pods.
    pub pods: Vec<Pod>,
    /// subnet.env, socket: the node's own files.
    dir: PathBuf,
    log: PathBuf,
    exe: PathBuf,
    flags: Vec<String>,
    env: Vec<(String, String)>,
    agent: Option<Child>,
    cni: Option<Cni>,
}

impl Node {
    /// A node whose namespace stands; no agent yet.
    ///
    /// # Errors
    /// When its directory cannot be created.
    pub fn new(ns: Netns, uplink: Vec<IpAddr>, lab: &Path, options: &LabOptions) -> Result<Node> {
        let dir = lab.join(ns.name());
        fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let log = lab.join("logs").join(format!("{}.log", ns.name()));
        let exe = options.agent_exe()?;
        let cni = Cni::install(&dir, &dir.join("subnet.env"), &exe, options.pods.wiring)?;
        Ok(Node { ns, uplink, pods: Vec::new(), dir, log, exe, flags: Vec::new(), env: Vec::new(), agent: None, cni })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.ns.name()
    }

    /// Where its agent logs.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Its subnet.env.
    pub fn subnet_file(&self) -> PathBuf {
        self.dir.join("subnet.env")
    }

    /// Flags of the agent beside those of the node itself.
    pub fn set_flags(&mut self, flags: Vec<String>) {
        self.flags = flags;
    }

    /// A flag for the next start, in the place of an earlier one of the same name.
    pub fn set_flag(&mut self, flag: &str) {
        let name = flag.split('=').next();
        self.flags.retain(|other| other.split('=').next() != name);
        self.flags.push(flag.to_owned());
    }

    /// The program that its agent is from now on.
    pub fn set_exe(&mut self, exe: &Path) {
        self.exe = exe.to_owned();
    }

    /// Forgets a flag, whatever its value.
    pub fn remove_flag(&mut self, name: &str) {
        self.flags.retain(|flag| flag.split('=').next() != Some(name));
    }

    /// A variable in the environment of its agent, which has no other.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.env.push((name.to_owned(), value.to_owned()));
    }

    /// Directory of what its agent saves.
    pub fn state_dir(&self) -> PathBuf {
        self.dir.join("state")
    }

    /// Starts the agent; does not wait.
    ///
    /// # Errors
    /// When the process cannot be started.
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

    /// Starts another program in the agent's place: flanneld, which has neither a subcommand nor a socket.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn start_other(&mut self, program: &Path) -> Result<()> {
        let mut command = self.ns.command(program);
        command.arg("--iface=eth0").arg(format!("--subnet-file={}", self.subnet_file().display()));
        command.args(self.flags.iter().filter(|flag| flag.starts_with("--etcd") || flag.starts_with("--ip")));
        self.agent = Some(self.ns.spawn(&mut command, &self.log)?);
        Ok(())
    }

    /// Ends the agent with a signal, and waits for its end.
    ///
    /// # Errors
    /// When it does not run or does not end within 5 s.
    pub async fn stop(&mut self, signal: Signal) -> Result<std::process::ExitStatus> {
        process::end(&mut self.agent, signal, Duration::from_secs(5)).await
    }

    /// Sends the agent a signal that does not end it.
    ///
    /// # Errors
    /// When it does not run.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        process::signal(self.agent.as_ref(), signal)
    }

    /// What the agent says of itself.
    ///
    /// # Errors
    /// While it does not answer.
    pub async fn status(&self) -> Result<Status> {
        let mut command = self.ns.command(&self.exe);
        command.arg("status").arg(format!("--socket={}", self.socket().display())).args(["-o", "json"]);
        let text = checked(&mut command).await?;
        serde_json::from_str(&text).context("read the answer of weft status")
    }

    /// Waits until the agent says that it is ready.
    ///
    /// # Errors
    /// When it ends before, or the time is over: with the end of its log.
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

    /// Creates the node's bridge and pods as subnet.env says.
    ///
    /// # Errors
    /// When a link, address or route is refused.
    pub async fn add_pods(&mut self, count: usize) -> Result<()> {
        if let Some(cni) = &self.cni {
            for number in 1..=count {
                let ns = Netns::add(&format!("{}-p{number}", self.name())).await?;
                let addrs = cni.add(&self.ns, &ns).await?;
                self.pods.push(Pod { ns, addrs });
            }
            return Ok(());
        }
        let net = self.pod_net().await?;
        let mut lines = format!("link add cni0 mtu {} type bridge\nlink set cni0 up\n", net.mtu);
        for gateway in &net.gateways {
            lines += &format!("addr add {gateway} dev cni0{}\n", nodad(gateway.addr()));
        }
        self.ns.batch(&lines).await?;
        for number in 1..=count {
            let pod = self.add_pod(&net, number).await?;
            self.pods.push(pod);
        }
        Ok(())
    }

    /// The last lines of the agent's log.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let all: Vec<_> = text.lines().collect();
        all.get(all.len().saturating_sub(lines)..).unwrap_or_default().join("\n")
    }

    async fn add_pod(&self, net: &PodNet, number: usize) -> Result<Pod> {
        let name = format!("{}-p{number}", self.name());
        let ns = Netns::add(&name).await?;
        let (port, mtu) = (format!("pod{number}"), net.mtu);
        self.ns
            .batch(&format!(
                "link add {port} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {name}\nlink set {port} master cni0 up\n"
            ))
            .await?;
        let mut addrs = Vec::new();
        let mut lines = "link set eth0 up\n".to_owned();
        for gateway in &net.gateways {
            let addr = plus(gateway.addr(), number);
            lines += &format!("addr add {addr}/{} dev eth0{}\n", gateway.prefix_len(), nodad(addr));
            lines += &format!("route add default via {} dev eth0\n", gateway.addr());
            addrs.push(addr);
        }
        ns.batch(&lines).await?;
        Ok(Pod { ns, addrs })
    }

    async fn until(&mut self, what: &str, reached: impl AsyncFn(&Node) -> bool) -> Result<()> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        while !reached(self).await {
            let ended = self.agent.as_mut().and_then(|child| child.try_wait().ok().flatten());
            if ended.is_some() || self.agent.is_none() || tokio::time::Instant::now() >= deadline {
                let how = ended.map_or("no".to_owned(), |status| format!("the agent ended with {status}"));
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

    fn socket(&self) -> PathBuf {
        self.dir.join("weft.sock")
    }
}

/// Waits until every node lists `peers` peers, all programmed.
///
/// # Errors
/// When the time is over.
pub async fn all_know(nodes: &[Node], peers: usize) -> Result<()> {
    for node in nodes {
        let what = format!("{} to program {peers} peers", node.name());
        wait_for(&what, PATIENCE, async || {
            let done = |p: &&crate::status::Peer| p.state == crate::status::PeerState::Programmed;
            node.status().await.is_ok_and(|status| status.peers.iter().filter(done).count() == peers)
        })
        .await?;
    }
    Ok(())
}

fn nodad(addr: IpAddr) -> &'static str {
    // Duplicate address detection would hold every IPv6 address back for a second.
    if addr.is_ipv6() { " nodad" } else { "" }
}

fn plus(addr: IpAddr, number: usize) -> IpAddr {
    match addr {
        IpAddr::V4(v4) => IpAddr::V4((u32::from(v4).wrapping_add(number as u32)).into()),
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6).wrapping_add(number as u128)).into()),
    }
}
