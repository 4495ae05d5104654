// SPDX-License-Identifier: Apache-2.0
//! Clusters with the backend udp, where the agents themselves carry the packets. So a restart of an agent loses packets. A fault of the
//! tunnel heals.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use tokio::process::Command;
use weft::observe::status::{Status, TunnelCounts, TunnelStatus};
use weft_lab::change::{StreamLoss, Streams};
use weft_lab::netns::{Netns, checked, enter, in_thread};
use weft_lab::node::Node;
use weft_lab::ping::Stream;
use weft_lab::{BackendKind, Lab, LabOptions, StoreKind, wait_for};

use crate::exe::weft_exe;
use crate::flanneld::flanneld;
use crate::{on_this_thread, options};

const LIMIT: Duration = Duration::from_secs(120);
/// How late the answer to a ping may come on a busy machine.
const LATE: Duration = Duration::from_secs(20);
const PORT: u16 = 8285;
const OTHER_PORT: u16 = 8286;
/// The MTU of pods: that of the uplinks less 28.
const MTU: u32 = 1472;

fn udp() -> LabOptions {
    LabOptions { backend: BackendKind::Udp, store: StoreKind::Etcd, ..options() }
}

async fn status(node: &Node) -> Result<(Status, TunnelStatus)> {
    let status: Status = node.status_as().await?;
    let tunnel = status.tunnel.clone().with_context(|| format!("{} has no tunnel", node.name()))?;
    Ok((status, tunnel))
}

/// Waits until the status of the tunnel satisfies this condition.
async fn until(node: &Node, what: &str, holds: impl Fn(&Status, &TunnelStatus) -> bool) -> Result<()> {
    let seen = async || status(node).await.is_ok_and(|(status, tunnel)| holds(&status, &tunnel));
    let shown = format!("{}: {what}", node.name());
    if let Err(error) = wait_for(&shown, LIMIT, seen).await {
        return Err(error.context(format!("{:?}\n{}", status(node).await, node.log_tail(20))));
    }
    Ok(())
}

/// Pings every pod from every other pod with packets of the full MTU, which must not be fragmented.
async fn full_mtu(lab: &Lab) -> Result<()> {
    let size = (MTU - 28).to_string();
    let pods: Vec<_> = lab.nodes.iter().flat_map(|node| &node.pods).collect();
    for from in &pods {
        for to in pods.iter().filter(|to| to.addrs != from.addrs) {
            let mut ping = from.ns.command("ping");
            ping.args(["-n", "-q", "-c1", "-W60", "-M", "do", "-s", &size, &to.addrs[0].to_string()]);
            checked(&mut ping).await?;
        }
    }
    Ok(())
}

fn socket(ns: &Netns, address: &str, port: u16) -> Result<UdpSocket> {
    let address: Ipv4Addr = address.parse()?;
    in_thread(|| {
        enter(&ns.path())?;
        Ok(UdpSocket::bind((address, port))?)
    })
}

#[test]
fn pods_reach_each_other_at_the_full_mtu_by_one_device_and_one_route() {
    on_this_thread(async {
        let mut lab = Lab::start(&udp()).await?;
        lab.reach_all().await?;
        full_mtu(&lab).await?;
        for node in &lab.nodes {
            let env = std::fs::read_to_string(node.subnet_file())?;
            ensure!(env.contains(&format!("FLANNEL_MTU={MTU}\n")), "{env}");
            let addresses = node.ns.ip("-o addr show dev flannel0").await?;
            ensure!(addresses.lines().count() == 1 && addresses.contains(".0/32 scope global"), "{addresses}");
            let routes = node.ns.ip("route show dev flannel0").await?;
            ensure!(routes.lines().count() == 1 && routes.starts_with("10.244.0.0/16 "), "{routes}");
            let mut sysctl = node.ns.command("cat");
            sysctl.arg("/proc/sys/net/ipv4/conf/flannel0/accept_local");
            ensure!(checked(&mut sysctl).await?.trim() == "1", "answers of the tunnel are not accepted");
            let (status, tunnel) = status(node).await?;
            ensure!((status.backend.as_str(), status.peers.len(), tunnel.peers) == ("udp", 2, 2), "{status:?}");
            ensure!(tunnel.running && tunnel.sent.packets > 0 && tunnel.received.packets > 0, "{tunnel:?}");
        }
        // Nodes get the subnets from 10.244.1.0 on, so no node has this address.
        let mut ping = lab.nodes[0].pods[0].ns.command("ping");
        let out = ping.args(["-n", "-c1", "-W60", "10.244.0.7"]).output().await?;
        let out = String::from_utf8_lossy(&out.stdout).into_owned();
        ensure!(out.contains("Destination Net Unreachable"), "{out}");
        for lease in lab
            .store
            .etcd()?
            .ctl(&["get", "--prefix", "--print-value-only", "/coreos.com/network/subnets/"])
            .await?
            .lines()
        {
            let flannels =
                lease.starts_with(r#"{"PublicIP":"192.168.77.1"#) && lease.ends_with(r#"","PublicIPv6":null}"#);
            ensure!(flannels, "the lease is as flannel writes it: {lease}");
        }
        Ok(())
    });
}

/// Without `Backend` in net-conf the type is udp, as in flannel.
#[test]
fn a_net_conf_without_a_backend_is_one_of_udp() {
    on_this_thread(async {
        let mut lab = Lab::build(&LabOptions { nodes: 2, ..udp() }).await?;
        let key = "/coreos.com/network/config";
        lab.store.etcd()?.ctl(&["put", key, r#"{"Network":"10.244.0.0/16"}"#]).await?;
        for node in &mut lab.nodes {
            node.start()?;
        }
        lab.settle().await?;
        lab.reach_all().await?;
        let (status, _) = status(&lab.nodes[0]).await?;
        ensure!(status.backend == "udp", "{status:?}");
        Ok(())
    });
}

/// The device, its address and its route stay. Packets are lost only while no agent reads the device.
async fn restarted(signal: Signal) -> Result<()> {
    let mut lab = Lab::start(&LabOptions { nodes: 2, ..udp() }).await?;
    lab.reach_all().await?;
    let (here, there) = (lab.nodes[0].pods[0].clone(), lab.nodes[1].pods[0].clone());
    let mut streams = [Stream::start(&here, there.addrs[0]).await?, Stream::start(&there, here.addrs[0]).await?];
    let node = &mut lab.nodes[0];
    let index = async |node: &Node| -> Result<String> {
        let link = node.ns.ip("-o link show flannel0").await?;
        Ok(link.split(':').next().unwrap_or_default().to_owned())
    };
    let before = index(node).await?;
    node.stop(signal).await?;
    let routes = node.ns.ip("route show dev flannel0").await?;
    ensure!(routes.contains("10.244.0.0/16"), "the route stays without an agent: {routes}");
    node.start()?;
    node.ready().await?;
    for stream in &mut streams {
        stream.answers(50, LIMIT).await?;
    }
    for stream in streams {
        let loss = stream.stop().await?;
        eprintln!("{signal}: {} of {} packets were lost", loss.lost, loss.sent);
        ensure!(loss.lost < loss.sent - 50, "{loss:?}");
    }
    ensure!(index(&lab.nodes[0]).await? == before, "the device is the same one");
    Ok(())
}

/// Stands for systemd: it has the descriptors that an agent gave away under these names.
struct Manager {
    socket: UnixDatagram,
    kept: BTreeMap<String, RawFd>,
}

impl Manager {
    /// Reads what the agent says until this holds.
    async fn until(&mut self, what: &str, holds: impl Fn(&BTreeMap<String, RawFd>) -> bool) -> Result<()> {
        let cell = std::cell::RefCell::new(self);
        wait_for(what, LIMIT, async || {
            while cell.borrow_mut().hear().is_ok() {}
            holds(&cell.borrow().kept)
        })
        .await
    }

    /// Reads one message.
    fn hear(&mut self) -> nix::Result<()> {
        let (mut buffer, mut space) = ([0; 4096], nix::cmsg_space!([RawFd; 1]));
        let mut parts = [std::io::IoSliceMut::new(&mut buffer)];
        let got = recvmsg::<()>(self.socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_DONTWAIT)?;
        let fd = got.cmsgs()?.find_map(|message| match message {
            ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
            _ => None,
        });
        let length = got.bytes;
        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
        let Some(name) = text.lines().find_map(|line| line.strip_prefix("FDNAME=")) else { return Ok(()) };
        if let Some(gone) = self.kept.remove(name) {
            nix::unistd::close(gone)?;
        }
        if let Some(fd) = fd.filter(|_| text.starts_with("FDSTORE=1\n")) {
            self.kept.insert(name.to_owned(), fd);
        }
        Ok(())
    }
}

/// What systemd does: the descriptors are 3 and 4 of the new process, whose number is in the environment.
async fn start_with(kept: &BTreeMap<String, RawFd>, dir: &Path, node: &mut Node) -> Result<()> {
    let script = format!(
        "#!/bin/bash\nexec 3<&{} 4<&{}\nLISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=tunnel-device:tunnel-socket exec {} \"$@\"\n",
        kept["tunnel-device"],
        kept["tunnel-socket"],
        weft_exe().display()
    );
    // A process of its own writes the file. If this process did, the children that other tests start meanwhile would have it open for
    // writing, and the kernel would refuse to run it.
    let start = dir.join("start");
    let write = "printf %s \"$1\" > \"$0\"; chmod 755 \"$0\"";
    checked(Command::new("sh").args(["-ec", write]).arg(&start).arg(script)).await?;
    node.set_exe(&start);
    node.start()
}

/// Returns what the kernel counts wherever a packet may be lost: in the queues of devices and sockets, in those of processors (the second column of
/// `softnet_stat`, of the whole machine), for lack of a neighbour, and in conntrack. The socket of a ping is in `raw`.
async fn losses(ns: &Netns) -> String {
    let show = "ip -s link; cd /proc/net; tail -n +1 udp raw snmp softnet_stat stat/arp_cache stat/nf_conntrack";
    let out = ns.command("sh").args(["-c", show]).output().await;
    out.map_or_else(|error| error.to_string(), |out| String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Returns an error with everything that may say where packets were lost, if requests of these streams are not answered.
async fn all_answered(streams: &mut [(Stream, &str)], lab: &Lab, restart: &str) -> Result<()> {
    let mut lost = String::new();
    for (stream, name) in streams {
        let missing = stream.unanswered(LATE).await?;
        if !missing.is_empty() {
            writeln!(lost, "{name}: {missing:?} of {} are not answered", stream.last())?;
        }
    }
    if lost.is_empty() {
        return Ok(());
    }
    for node in &lab.nodes {
        let tunnel = status(node).await.map(|(_, tunnel)| tunnel);
        writeln!(lost, "--- {}: {tunnel:#?}\n{}", node.name(), losses(&node.ns).await)?;
        for pod in &node.pods {
            writeln!(lost, "--- {}\n{}", pod.ns.name(), losses(&pod.ns).await)?;
        }
    }
    bail!("{lost}{restart}\n{}", lab.logs(20));
}

/// Packets wait in the two descriptors, in both directions, until the next agent takes them.
#[test]
fn a_restart_under_systemd_loses_no_packet() {
    on_this_thread(async {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("notify");
        let mut manager = Manager { socket: UnixDatagram::bind(&path)?, kept: BTreeMap::new() };
        let mut lab = Lab::build(&LabOptions { nodes: 2, ..udp() }).await?;
        lab.nodes[0].set_env("NOTIFY_SOCKET", &path.to_string_lossy());
        lab.nodes[0].set_flag("--change-grace=3s");
        for node in &mut lab.nodes {
            node.start()?;
        }
        lab.settle().await?;
        lab.reach_all().await?;
        manager.until("the agent gives both descriptors away", |kept| kept.len() == 2).await?;
        let (here, there) = (lab.nodes[0].pods[0].clone(), lab.nodes[1].pods[0].clone());
        // The queue of the device has room for 500 packets, and the socket of a ping for about 170 answers, which all come at once after the
        // restart. With more than 10 a second, a restart on a busy machine would overflow them.
        let mut streams = [
            (Stream::with_pause(&here, there.addrs[0], "0.1").await?, "from the restarted node"),
            (Stream::with_pause(&there, here.addrs[0], "0.1").await?, "to the restarted node"),
        ];
        for (stream, _) in &mut streams {
            stream.answers(20, LIMIT).await?;
        }
        let (before, began) = (streams.each_ref().map(|(stream, _)| stream.last()), Instant::now());
        let node = &mut lab.nodes[0];
        node.stop(Signal::SIGTERM).await?;
        manager.until("the agent kept them at its end", |kept| kept.len() == 2).await?;
        start_with(&manager.kept, dir.path(), node).await?;
        node.ready().await?;
        let restart = format!("the restart began after the answers {before:?} and took {:?}", began.elapsed());
        for (stream, _) in &mut streams {
            stream.answers(50, LIMIT).await?;
        }
        all_answered(&mut streams, &lab, &restart).await?;
        for (stream, _) in streams {
            stream.stop().await?;
        }
        until(&lab.nodes[0], "one tunnel was started", |_, tunnel| tunnel.starts == 1).await?;
        // Another backend needs no tunnel. A socket that stays would hold the port.
        lab.store
            .etcd()?
            .ctl(&["put", "/coreos.com/network/config", r#"{"Network":"10.244.0.0/16","Backend":{"Type":"host-gw"}}"#])
            .await?;
        manager.until("systemd closes them", BTreeMap::is_empty).await
    });
}

#[test]
fn a_restart_keeps_the_device_and_its_route() {
    on_this_thread(restarted(Signal::SIGTERM));
}

#[test]
fn a_kill_keeps_the_device_and_its_route() {
    on_this_thread(restarted(Signal::SIGKILL));
}

#[test]
fn a_deleted_device_comes_back_with_its_tunnel() {
    on_this_thread(async {
        let lab = Lab::start(&LabOptions { nodes: 2, ..udp() }).await?;
        lab.reach_all().await?;
        let node = &lab.nodes[0];
        let before = status(node).await?.1;
        for starts in 2..4 {
            node.ns.ip("link del flannel0").await?;
            until(node, "the tunnel to be started again", |status, tunnel| {
                status.ready && tunnel.running && tunnel.starts == starts
            })
            .await?;
            lab.reach_all().await?;
        }
        let after = status(node).await?.1;
        ensure!(after.sent.packets > before.sent.packets, "the counters go on: {before:?} {after:?}");
        Ok(())
    });
}

#[test]
fn a_port_that_is_taken_is_named_and_used_when_it_is_free() {
    on_this_thread(async {
        let mut lab = Lab::build(&LabOptions { nodes: 2, ..udp() }).await?;
        let taken = socket(&lab.nodes[0].ns, "192.168.77.11", PORT)?;
        for node in &mut lab.nodes {
            node.start()?;
        }
        until(&lab.nodes[0], "the problem to be shown", |status, tunnel| {
            let words = "tunnel: cannot receive tunnel packets on 192.168.77.11:8285";
            !status.ready && !tunnel.running && status.problems.iter().any(|problem| problem.text.starts_with(words))
        })
        .await?;
        drop(taken);
        lab.settle().await?;
        lab.reach_all().await?;
        let warnings = std::fs::read_to_string(lab.nodes[0].log())?;
        let count = warnings.matches("the tunnel carries no packets").count();
        ensure!(count == 1, "a failure that lasts is logged once, and not {count} times");
        Ok(())
    });
}

/// Waits until a node has followed a change of the port, and no peer needs the earlier one.
async fn moved(node: &Node, port: u16) -> Result<()> {
    let end = format!(":{port}");
    let what = format!("it uses port {port} alone");
    until(node, &what, |status, tunnel| tunnel.socket.ends_with(&end) && status.other_ways.is_empty()).await
}

/// n2 follows later than the others, because another program has the next port there. Meanwhile it is reached at the earlier one, and sends to the
/// others there.
#[test]
fn another_port_and_back_lose_nothing_although_a_node_follows_later() {
    on_this_thread(async {
        // The other nodes wait for n2 for ten times the grace time. It tries again at each audit.
        let flags = ["--change-grace=10s", "--hold-removals=0s", "--resync=1s"];
        let options = LabOptions { agent_flags: flags.map(str::to_owned).to_vec(), ..udp() };
        let mut lab = Lab::start(&options).await?;
        lab.reach_all().await?;
        let mut streams = Streams::start(&lab.nodes).await?;
        let conf = |port: u16| options.net_conf_with(&serde_json::json!({ "Type": "udp", "Port": port }));
        let taken = socket(&lab.nodes[1].ns, "192.168.77.12", OTHER_PORT)?;
        lab.store.set_net_conf(&conf(OTHER_PORT)).await?;
        until(&lab.nodes[1], "it says that it cannot follow", |status, tunnel| {
            let words = "cannot receive tunnel packets on 192.168.77.12:8286";
            tunnel.running && status.problems.iter().any(|problem| problem.text.contains(words))
        })
        .await?;
        for node in [0, 2] {
            until(&lab.nodes[node], "it names n2, which needs the earlier port", |status, tunnel| {
                let is_named = status.problems.iter().any(|problem| problem.text.contains("1 nodes still need"));
                is_named && tunnel.socket.ends_with(":8286") && status.other_ways.len() == 1
            })
            .await?;
        }
        streams.answers(100).await?;
        drop(taken);
        for port in [OTHER_PORT, PORT] {
            lab.store.set_net_conf(&conf(port)).await?;
            for node in &lab.nodes {
                moved(node, port).await?;
            }
            streams.answers(100).await?;
        }
        let StreamLoss { all: loss, names } = streams.stop().await.with_context(|| lab.logs(20))?;
        ensure!(loss.lost == 0, "{} of {} packets lost: {names:?}\n{}", loss.lost, loss.sent, lab.logs(30));
        lab.reach_all().await?;
        Ok(())
    });
}

/// An ICMP echo request of 28 bytes.
fn echo(source: Ipv4Addr, destination: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 28, 0, 0, 0, 0, 64, 1, 0, 0];
    packet.extend(source.octets());
    packet.extend(destination.octets());
    let sum = weft_udp::packet::checksum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut payload = vec![8, 0, 0, 0, 0, 7, 0, 1];
    let sum = weft_udp::packet::checksum(&payload);
    payload[2..4].copy_from_slice(&sum.to_be_bytes());
    packet.extend(payload);
    packet
}

#[test]
fn only_peers_are_let_in_and_only_with_their_own_sources() {
    on_this_thread(async {
        // The questions of other agents come through the tunnel, too, and would count.
        let lab = Lab::start(&LabOptions { agent_flags: vec!["--probe=off".to_owned()], ..udp() }).await?;
        lab.reach_all().await?;
        let [victim, peer, other] = [0, 1, 2].map(|at: usize| lab.nodes[at].pods[0].addrs[0]);
        let v4 = |address| match address {
            std::net::IpAddr::V4(address) => address,
            std::net::IpAddr::V6(address) => panic!("{address} is no IPv4 address"),
        };
        let (victim, peer, other) = (v4(victim), v4(peer), v4(other));
        let node = &lab.nodes[0];
        let stranger = lab.add_host("stranger", 99).await?;
        let before = status(node).await?.1.received;
        // A stranger pretends to be a pod of n2, and then n3 does. The socket of n3's agent is on the same port.
        let from_stranger = socket(&stranger, "192.168.77.99", PORT)?;
        let from_peer = in_thread(|| {
            enter(&lab.nodes[2].ns.path())?;
            Ok(UdpSocket::bind((Ipv4Addr::new(192, 168, 77, 13), 0))?)
        })?;
        for (from, source, reason) in [(&from_stranger, peer, "stranger"), (&from_peer, peer, "foreign_source")] {
            from.send_to(&echo(source, victim), (Ipv4Addr::new(192, 168, 77, 11), PORT))?;
            // A peer that pinged before n1 knew its lease was a stranger, too, and is in the earlier count.
            let dropped = |counts: &TunnelCounts| counts.dropped.get(reason).copied().unwrap_or(0);
            until(node, reason, |_, tunnel| dropped(&tunnel.received) == dropped(&before) + 1).await?;
        }
        ensure!(status(node).await?.1.received.packets == before.packets, "neither was delivered");
        from_peer.send_to(&echo(other, victim), (Ipv4Addr::new(192, 168, 77, 11), PORT))?;
        until(node, "a packet of its own to be delivered", |_, tunnel| tunnel.received.packets == before.packets + 1)
            .await
    });
}

#[test]
fn a_lease_that_comes_and_goes_is_followed_and_known_without_etcd() {
    on_this_thread(async {
        let mut lab = Lab::build(&udp()).await?;
        for at in [0, 1] {
            lab.nodes[at].start()?;
            lab.nodes[at].ready().await?;
        }
        until(&lab.nodes[0], "one peer", |_, tunnel| tunnel.peers == 1).await?;
        lab.nodes[2].start()?;
        lab.settle().await?;
        lab.reach_all().await?;
        until(&lab.nodes[0], "two peers", |_, tunnel| tunnel.peers == 2).await?;
        // Nodes get the subnets from 10.244.1.0 on, so this one is free.
        let key = "/coreos.com/network/subnets/10.244.0.0-24";
        let lease = r#"{"PublicIP":"192.168.77.250","PublicIPv6":null}"#;
        lab.store.etcd()?.ctl(&["put", key, lease]).await?;
        until(&lab.nodes[0], "the third peer", |_, tunnel| tunnel.peers == 3).await?;
        lab.store.etcd()?.ctl(&["del", key]).await?;
        until(&lab.nodes[0], "the third peer to be gone", |_, tunnel| tunnel.peers == 2).await?;
        // n3 joined after the first list of n1, and has no entries. It is saved nevertheless.
        let saved = async || {
            let files = std::fs::read_dir(lab.nodes[0].state_dir()).into_iter().flatten().flatten();
            // The history in the same directory names the peers earlier.
            let peers = files.filter(|file| file.file_name().to_string_lossy().starts_with("peers-"));
            let texts: Vec<String> = peers.filter_map(|file| std::fs::read_to_string(file.path()).ok()).collect();
            texts.iter().any(|text| text.contains("192.168.77.13") && !text.contains("192.168.77.250"))
        };
        wait_for("n3 to be saved", LIMIT, saved).await?;
        lab.store.etcd()?.kill().await?;
        lab.nodes[0].stop(Signal::SIGKILL).await?;
        lab.nodes[0].start()?;
        lab.nodes[0].ready().await?;
        until(&lab.nodes[0], "two peers that were saved", |_, tunnel| tunnel.peers == 2).await?;
        lab.reach_all().await.map(drop)
    });
}

#[test]
fn cleanup_removes_the_device() {
    on_this_thread(async {
        let mut lab = Lab::start(&LabOptions { nodes: 2, ..udp() }).await?;
        let node = &mut lab.nodes[0];
        node.stop(Signal::SIGTERM).await?;
        let mut cleanup = node.ns.command(weft_exe());
        cleanup.arg("cleanup").arg(format!("--subnet-file={}", node.subnet_file().display()));
        cleanup.arg(format!("--socket={}", node.socket().display()));
        checked(cleanup.arg(format!("--state-dir={}", node.state_dir().display()))).await?;
        let links = node.ns.ip("-o link").await?;
        ensure!(!links.contains("flannel0"), "{links}");
        Ok(())
    });
}

/// n1 runs flannel, and n2 weft. Then each is replaced by the other.
async fn beside_flanneld() -> Result<()> {
    let flanneld = flanneld();
    let mut lab = Lab::build(&LabOptions { nodes: 2, ..udp() }).await?;
    lab.nodes[0].start_other(&flanneld)?;
    lab.nodes[1].start()?;
    for node in &mut lab.nodes {
        node.add_pods(1).await?;
    }
    lab.reach_all().await?;
    full_mtu(&lab).await?;
    let prefix = "/coreos.com/network/subnets/";
    let leases = lab.store.etcd()?.ctl(&["get", "--prefix", prefix]).await?;
    for step in ["weft in flannel's place", "flannel in weft's place"] {
        lab.nodes[0].stop(Signal::SIGTERM).await?;
        if step.starts_with("weft") {
            lab.nodes[0].start()?;
            lab.nodes[0].ready().await?;
        } else {
            // Beside a device of weft, flannel would choose the name flannel1.
            let node = &lab.nodes[0];
            let mut cleanup = node.ns.command(weft_exe());
            cleanup.arg("cleanup").arg(format!("--subnet-file={}", node.subnet_file().display()));
            checked(cleanup.arg(format!("--socket={}", node.socket().display()))).await?;
            lab.nodes[0].start_other(&flanneld)?;
        }
        lab.reach_all().await.context(step)?;
        full_mtu(&lab).await.context(step)?;
        let now = lab.store.etcd()?.ctl(&["get", "--prefix", prefix]).await?;
        ensure!(now == leases, "{step}: leases changed:\n{leases}\n{now}");
    }
    Ok(())
}

#[test]
#[ignore = "needs FLANNELD"]
fn udp_with_flanneld() {
    on_this_thread(beside_flanneld());
}
