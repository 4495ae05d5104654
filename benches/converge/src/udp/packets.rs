// SPDX-License-Identifier: Apache-2.0
//! Measures what a tunnel carries between two network namespaces that a veth pair connects: weft's udp, flannel's udp, and the kernel's vxlan, in turns.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use weft_lab::netns::{Netns, enter, in_thread, make_names_private};
use weft_udp::{Config, Device, Peer, Routes, Tunnel};

use crate::measure::Who;

const ROUNDS: usize = 3;
const MTU: u16 = 1472;

/// The flows that are measured: the row, and the flags of iperf3's client.
const FLOWS: [(&str, &str); 2] = [("TCP", ""), ("UDP packets of 1,400 bytes", "-u -b 0 -l 1400")];

/// What a tunnel carried: its row, whose tunnel it was, and the Mbit/s of each round. The floor is vxlan, which needs no program.
pub type Rates = Vec<(&'static str, Who, Vec<f64>)>;

/// A process that ends with its tunnel.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What keeps a tunnel up.
enum Alive {
    Weft { _tunnels: [Tunnel; 2] },
    Flannel { _processes: Vec<Running>, _dir: tempfile::TempDir },
    Vxlan,
}

struct Nodes {
    names: [Netns; 2],
}

impl Nodes {
    /// Creates the nodes 192.168.0.1 and 192.168.0.2.
    async fn new(round: &str) -> Result<Nodes> {
        let program = Path::new("/nonexistent");
        let first = Netns::add(&format!("one-{round}"), program).await?;
        let second = Netns::add(&format!("two-{round}"), program).await?;
        first.ip(&format!("link add up0 type veth peer name up0 netns {}", second.name())).await?;
        for (ns, n) in [(&first, 1), (&second, 2)] {
            ns.ip(&format!("addr add 192.168.0.{n}/24 dev up0")).await?;
            ns.ip("link set up0 up").await?;
        }
        Ok(Nodes { names: [first, second] })
    }

    fn inside<T: Send>(&self, node: usize, function: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let path = self.names[node].path();
        in_thread(|| {
            enter(&path)?;
            function()
        })
    }

    fn spawn(&self, node: usize, program: &str, words: &str) -> Result<Running> {
        self.inside(node, || {
            let mut command = Command::new(program);
            command.args(words.split_whitespace()).stdout(Stdio::null()).stderr(Stdio::null());
            Ok(Running(command.spawn().with_context(|| format!("start {program}"))?))
        })
    }

    fn output(&self, node: usize, program: &str, words: &str) -> Result<String> {
        self.inside(node, || {
            let output = Command::new(program).args(words.split_whitespace()).output()?;
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        })
    }

    async fn weft(&self) -> Result<Alive> {
        let mut tunnels = Vec::new();
        for (node, n) in [(0, 1u8), (1, 2)] {
            let device = self.inside(node, || Ok(Device::open("flannel0")?))?;
            let ns = &self.names[node];
            ns.ip(&format!("link set flannel0 mtu {MTU} up")).await?;
            ns.ip(&format!("addr add 10.5.{n}.0/32 dev flannel0")).await?;
            ns.ip("route add 10.5.0.0/16 dev flannel0").await?;
            let (uplink, subnet) = (Ipv4Addr::new(192, 168, 0, n), subnet_of(n)?);
            let config = Config {
                device,
                uplink,
                port: 8285,
                more_ports: Vec::new(),
                subnet,
                mtu: MTU,
                sockets: Vec::new(),
                counters: Default::default(),
            };
            let address = |n| SocketAddrV4::new(Ipv4Addr::new(192, 168, 0, n), 8285);
            let peers = [1, 2].map(|n| Ok(Peer { subnet: subnet_of(n)?, address: address(n), sends_from: None }));
            let routes = Routes::new(peers.into_iter().collect::<Result<Vec<_>>>()?);
            tunnels.push(self.inside(node, || Ok(Tunnel::start(config, routes, || {})?))?);
        }
        let tunnels = tunnels.try_into().ok().context("two tunnels")?;
        Ok(Alive::Weft { _tunnels: tunnels })
    }

    async fn vxlan(&self) -> Result<Alive> {
        for (n, far) in [(1, 2), (2, 1)] {
            let ns = &self.names[n - 1];
            let link = format!(
                "link add flannel.1 address 02:00:00:00:00:0{n} type vxlan id 1 local 192.168.0.{n} dstport 8472 nolearning"
            );
            ns.ip(&link).await?;
            ns.ip("link set flannel.1 mtu 1450 up").await?;
            ns.ip(&format!("addr add 10.5.{n}.0/32 dev flannel.1")).await?;
            ns.bridge(&format!("fdb add 02:00:00:00:00:0{far} dev flannel.1 dst 192.168.0.{far}")).await?;
            ns.ip(&format!("neigh add 10.5.{far}.0 lladdr 02:00:00:00:00:0{far} dev flannel.1")).await?;
            ns.ip(&format!("route add 10.5.{far}.0/24 via 10.5.{far}.0 dev flannel.1 onlink")).await?;
        }
        Ok(Alive::Vxlan)
    }

    fn flannel(&self, program: &str) -> Result<Alive> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().display();
        let urls = "--listen-client-urls http://192.168.0.1:2379 --advertise-client-urls http://192.168.0.1:2379 \
                    --listen-peer-urls http://127.0.0.1:2380";
        let mut processes = vec![self.spawn(0, "etcd", &format!("--data-dir {path}/etcd {urls}"))?];
        for node in [0, 1] {
            let n = node + 1;
            let conf = format!(
                r#"{{"Network":"10.5.0.0/16","SubnetMin":"10.5.{n}.0","SubnetMax":"10.5.{n}.0","Backend":{{"Type":"udp"}}}}"#
            );
            let put = format!("--endpoints http://192.168.0.1:2379 put /coreos.com/network/config {conf}");
            wait_for("etcd", || Ok(self.output(0, "etcdctl", &put)?.contains("OK")))?;
            let flags =
                "-etcd-endpoints=http://192.168.0.1:2379 -iface=up0 -ip-masq=false -iptables-forward-rules=false";
            let file = dir.path().join(format!("subnet-{n}.env"));
            processes.push(self.spawn(node, program, &format!("{flags} -subnet-file={}", file.display()))?);
            wait_for("flanneld", || Ok(file.exists()))?;
        }
        Ok(Alive::Flannel { _processes: processes, _dir: dir })
    }

    /// Returns what arrives at the second node, in Mbit/s.
    fn flow(&self, flags: &str) -> Result<f64> {
        let ping = || Ok(self.output(0, "ping", "-c 1 -W 1 10.5.2.0")?.contains(" 0% packet loss"));
        wait_for("a ping", ping)?;
        let _server = self.spawn(1, "iperf3", "-s -1 -B 10.5.2.0")?;
        let mut rate = None;
        wait_for("iperf3", || {
            let out = self.output(0, "iperf3", &format!("-c 10.5.2.0 -t 3 -f m {flags}"))?;
            let line = out.lines().rev().find(|line| line.contains("receiver"));
            let words: Vec<_> = line.unwrap_or_default().split_whitespace().collect();
            let at = words.iter().position(|word| *word == "Mbits/sec");
            rate = at.and_then(|at| words[at - 1].parse().ok());
            Ok(rate.is_some())
        })?;
        rate.context("iperf3 shows no rate")
    }
}

fn subnet_of(n: u8) -> Result<ipnet::Ipv4Net> {
    Ok(ipnet::Ipv4Net::new(Ipv4Addr::new(10, 5, n, 0), 24)?)
}

fn wait_for(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(30);
    while !holds()? {
        if Instant::now() > end {
            bail!("{what} did not come in 30 s");
        }
        std::thread::park_timeout(Duration::from_millis(50));
    }
    Ok(())
}

async fn all_rounds(flanneld: Option<&Path>) -> Result<Rates> {
    let subjects = [Who::Weft, Who::Flanneld, Who::Floor];
    let mut rates: Rates = FLOWS.iter().flat_map(|(row, _)| subjects.map(|who| (*row, who, Vec::new()))).collect();
    for round in 0..ROUNDS {
        for who in subjects {
            let nodes = Nodes::new(&format!("{round}-{who:?}")).await?;
            let _alive = match (who, flanneld) {
                (Who::Weft, _) => nodes.weft().await?,
                (Who::Floor, _) => nodes.vxlan().await?,
                (Who::Flanneld, Some(program)) => nodes.flannel(&program.to_string_lossy())?,
                (Who::Flanneld, None) => continue,
            };
            for (row, flags) in FLOWS {
                let rate = nodes.flow(flags)?;
                rates.iter_mut().filter(|(of, by, _)| (*of, *by) == (row, who)).for_each(|(.., all)| all.push(rate));
            }
        }
    }
    rates.retain(|(.., all)| !all.is_empty());
    Ok(rates)
}

/// Measures all tunnels, in [`ROUNDS`] rounds. Without flanneld, its tunnel is left out.
///
/// # Errors
/// A namespace or a program fails, or no packet arrives.
pub fn measure(flanneld: Option<PathBuf>) -> Result<Rates> {
    // The thread has names of namespaces of its own. They and its processes end with it.
    let run = move || {
        make_names_private()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(all_rounds(flanneld.as_deref()))
    };
    std::thread::spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
