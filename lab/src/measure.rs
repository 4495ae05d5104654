// SPDX-License-Identifier: Apache-2.0
//! `weft lab --measure`: measures TCP throughput, small UDP packets per second, and round-trip time with each backend,
//! and on the bare underlay of the same lab. The results help to choose a backend. Results of different machines are
//! not comparable.

use std::fmt::Write as _;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use super::backend_kind::BackendKind;
use super::cluster::Lab;
use super::cni::Pods;
use super::netns::{Netns, checked, make_names_private};
use super::options::LabOptions;
use super::report::print_line;

/// Duration of each stream in seconds.
const SECONDS: u32 = 3;
/// Number of pings for the round-trip time.
const PINGS: u32 = 500;
/// Time limit for an iperf3 server to listen, and for a stream to end after its duration.
const LIMIT: Duration = Duration::from_secs(20);

/// The backends, in the order of the table.
const BACKENDS: [BackendKind; 5] =
    [BackendKind::HostGw, BackendKind::Ipip, BackendKind::Vxlan, BackendKind::Udp, BackendKind::Wireguard];

/// The results for one path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Path {
    /// Throughput of one TCP stream at the receiver, in Gbit/s.
    pub tcp: f64,
    /// Received UDP packets of 64 bytes, in thousands per second.
    pub udp: f64,
    /// Mean round-trip time of small packets, in microseconds.
    pub trip: f64,
}

/// The results for one backend.
#[derive(Debug, Clone)]
pub struct Row {
    /// The backend.
    pub backend: BackendKind,
    /// The pods' MTU in bytes.
    pub mtu: u32,
    /// The results from pod to pod, and from node to node on the bare underlay; `None` if the kernel does not support
    /// the backend.
    pub paths: Option<(Path, Path)>,
}

/// Measures all backends and prints a table.
///
/// # Errors
/// iperf3 is missing, or a lab cannot be started.
pub async fn run(options: &LabOptions) -> Result<()> {
    checked(Command::new("iperf3").arg("--version")).await.context("iperf3 is needed (apt-get install iperf3)")?;
    let mut rows = Vec::new();
    for backend in BACKENDS {
        print_line(&format!("measuring {} ...", backend.wire()));
        rows.push(measure(options, backend, SECONDS).await?);
    }
    print_line(&table(&rows));
    Ok(())
}

/// Measures one backend with streams of `seconds`.
///
/// # Errors
/// The lab cannot be started, or a stream fails.
pub async fn measure(options: &LabOptions, backend: BackendKind, seconds: u32) -> Result<Row> {
    if !supported(options, backend).await? {
        return Ok(Row { backend, mtu: 0, paths: None });
    }
    let pods = Pods { count: 1, ..options.pods };
    let options = LabOptions { nodes: 2, pods, backend, router: false, ipv6: false, ..options.clone() };
    let mut lab = Lab::start(&options).await?;
    lab.reach_all().await?;
    let mtu = lab.nodes[0].pod_net().await?.mtu;
    let [one, two] = &lab.nodes[..] else { anyhow::bail!("a lab of two nodes has {}", lab.nodes.len()) };
    let (from, to) = (&one.pods[0], &two.pods[0]);
    // The underlay is measured right before the backend, so that the load of the machine is similar for both.
    let bare = path(&one.ns, &two.ns, two.uplink[0], seconds).await.context("the underlay")?;
    let pods = path(&from.ns, &to.ns, to.addrs[0], seconds).await.with_context(|| backend.wire())?;
    let mut namespaces: Vec<Netns> =
        lab.nodes.iter().flat_map(|node| node.pods.iter().map(|pod| &pod.ns).chain([&node.ns])).cloned().collect();
    namespaces.push(lab.fabric.clone());
    drop(lab);
    // The next lab of this thread uses the same names.
    namespaces.into_iter().try_for_each(Netns::remove)?;
    Ok(Row { backend, mtu, paths: Some((pods, bare)) })
}

/// Returns true if the kernel can create the backend's device.
async fn supported(options: &LabOptions, backend: BackendKind) -> Result<bool> {
    make_names_private()?;
    let ns = Netns::add("probe", &options.launcher()?).await?;
    let supported = ns.network()?.add_tunnel(backend).await.is_ok();
    ns.remove()?;
    Ok(supported)
}

async fn path(from: &Netns, to: &Netns, addr: std::net::IpAddr, seconds: u32) -> Result<Path> {
    let tcp = stream(from, to, addr, &["-t", &seconds.to_string(), "-O", "1"]).await?;
    let udp = stream(from, to, addr, &["-t", &seconds.to_string(), "-u", "-b", "0", "-l", "64"]).await?;
    let mut ping = from.command("ping");
    let (count, addr) = (PINGS.to_string(), addr.to_string());
    let output = checked(ping.args(["-n", "-q", "-i", "0.002", "-c", &count, &addr])).await?;
    Ok(Path {
        tcp: tcp_rate(&tcp).context("read the answer of iperf3 (TCP)")?,
        udp: udp_rate(&udp).context("read the answer of iperf3 (UDP)")?,
        trip: round_trip(&output).context("read the answer of ping")?,
    })
}

/// Runs iperf3 as server and client, and returns the client's report.
async fn stream(from: &Netns, to: &Netns, addr: std::net::IpAddr, words: &[&str]) -> Result<Value> {
    let mut server = to.command("iperf3");
    server.args(["-s", "-1", "--forceflush", "-B", &addr.to_string()]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut server = server.spawn().context("start iperf3")?;
    let mut lines = BufReader::new(server.stdout.take().context("iperf3 without output")?).lines();
    let listening = async {
        while let Some(line) = lines.next_line().await? {
            if line.contains("Server listening") {
                return anyhow::Ok(());
            }
        }
        anyhow::bail!("iperf3 ended")
    };
    timeout(LIMIT, listening).await.context("iperf3 does not listen")??;
    let mut client = from.command("iperf3");
    client.args(["-c", &addr.to_string(), "-J"]).args(words);
    let report = timeout(LIMIT, checked(&mut client)).await.context("iperf3 does not end")??;
    serde_json::from_str(&report).context("read the answer of iperf3")
}

fn tcp_rate(report: &Value) -> Option<f64> {
    report["end"]["sum_received"]["bits_per_second"].as_f64().map(|bits| bits / 1e9)
}

/// Computes the rate from the packets that the receiver got, in thousands per second.
fn udp_rate(report: &Value) -> Option<f64> {
    let sum = &report["end"]["sum"];
    let received = sum["packets"].as_f64()? - sum["lost_packets"].as_f64()?;
    let seconds = sum["seconds"].as_f64().filter(|seconds| *seconds > 0.0)?;
    Some(received / seconds / 1e3)
}

/// Parses the mean of `rtt min/avg/max/mdev = 0.024/0.031/0.104/0.006 ms`, in microseconds. The line of busybox is
/// `round-trip min/avg/max = 0.024/0.031/0.104 ms`.
fn round_trip(output: &str) -> Option<f64> {
    let figures = output.lines().find(|line| line.contains("min/avg/max"))?.split_once("= ")?.1;
    figures.split('/').nth(1)?.parse::<f64>().ok().map(|ms| ms * 1e3)
}

/// Formats the rows as a table, with what else matters for the choice of a backend.
pub fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "\n{:<9} {:>5}  {:>11} {:>5}  {:>9} {:>5}  {:>10} {:>7}  {}\n",
        "backend", "MTU", "TCP Gbit/s", "", "UDP kpps", "", "trip us", "", "carries"
    );
    for row in rows {
        let name = row.backend.wire();
        let Some((pods, bare)) = row.paths else {
            let _ = writeln!(text, "{name:<9} not in this kernel");
            continue;
        };
        let part = |got: f64, of: f64| format!("{:.0}%", 100.0 * got / of);
        let more = format!("+{:.0}", (pods.trip - bare.trip).max(0.0));
        let _ = writeln!(
            text,
            "{name:<9} {:>5}  {:>11.2} {:>5}  {:>9.0} {:>5}  {:>10.0} {:>7}  {}",
            row.mtu,
            pods.tcp,
            part(pods.tcp, bare.tcp),
            pods.udp,
            part(pods.udp, bare.udp),
            pods.trip,
            more,
            carries(row.backend)
        );
    }
    text.push_str("percentages and + are against the bare underlay, measured in the same lab\n");
    text
}

fn carries(backend: BackendKind) -> &'static str {
    match backend {
        BackendKind::HostGw => "IPv4, IPv6; all nodes on one link",
        BackendKind::Ipip => "IPv4; across routers",
        BackendKind::Udp => "IPv4; across routers; by the agent, not the kernel",
        BackendKind::Wireguard => "IPv4, IPv6; across routers and NAT; encrypted",
        BackendKind::Vxlan => "IPv4, IPv6; across routers (with DirectRouting: as host-gw on one link)",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_output_of_iperf3_and_ping_is_parsed() {
        let tcp =
            json!({ "end": { "sum_sent": { "bits_per_second": 9e9 }, "sum_received": { "bits_per_second": 8e9 } } });
        assert_eq!(tcp_rate(&tcp), Some(8.0));
        let udp = json!({ "end": { "sum": { "packets": 900, "lost_packets": 300, "seconds": 2.0 } } });
        assert_eq!(udp_rate(&udp), Some(0.3));
        let output = "--- 10.0.0.1 ping statistics ---\nrtt min/avg/max/mdev = 0.024/0.031/0.104/0.006 ms\n";
        assert_eq!(round_trip(output), Some(31.0));
        assert_eq!(round_trip("round-trip min/avg/max = 0.024/0.031/0.104 ms\n"), Some(31.0));
        let failed = json!({ "error": "unable to connect" });
        assert_eq!((tcp_rate(&failed), udp_rate(&failed), round_trip("100% packet loss")), (None, None, None));
    }

    #[test]
    fn the_table_compares_each_backend_with_the_underlay() {
        let path = |tcp, udp, trip| Path { tcp, udp, trip };
        let rows = [
            Row {
                backend: BackendKind::Vxlan,
                mtu: 1450,
                paths: Some((path(5.0, 100.0, 40.0), path(10.0, 400.0, 30.0))),
            },
            Row { backend: BackendKind::Ipip, mtu: 0, paths: None },
        ];
        let text = table(&rows);
        let words = |name: &str| {
            text.lines().find(|line| line.starts_with(name)).unwrap().split_whitespace().collect::<Vec<_>>()
        };
        assert_eq!(words("vxlan")[..8], ["vxlan", "1450", "5.00", "50%", "100", "25%", "40", "+10"]);
        assert_eq!(words("ipip"), ["ipip", "not", "in", "this", "kernel"]);
    }
}
