// SPDX-License-Identifier: Apache-2.0
//! `weft explain` names where a packet is lost. The agent is stopped or killed before each fault, so that it repairs nothing.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use weft_lab::netns::{Netns, checked};
use weft_lab::node::Node;
use weft_lab::{BackendKind, Lab, LabOptions, Pods, Wiring};

use crate::exe::weft_exe;
use crate::{on_this_thread, options};

const WORKS: &str = "works as far as this node can tell";

/// The result of `weft explain`.
struct Explained {
    code: Option<i32>,
    answer: Value,
}

impl Explained {
    /// Checks the end: the exit code, and a part of the sentence.
    fn ends(&self, code: i32, part: &str) -> Result<()> {
        let sentence = self.answer["sentence"].as_str().unwrap_or_default();
        ensure!(self.code == Some(code) && sentence.contains(part), "not {code}, {part}: {:#}", self.answer);
        ensure!(code != 2 || self.answer["remedy"].is_string(), "a remedy: {:#}", self.answer);
        Ok(())
    }

    /// Returns what a step has shown.
    fn step(&self, name: &str) -> Result<&Value> {
        let steps = self.answer["steps"].as_array().context("steps")?;
        let found = steps.iter().find(|step| step["step"] == name);
        found.with_context(|| format!("no step {name}: {:#}", self.answer))
    }
}

async fn explain(node: &Node, from: IpAddr, to: IpAddr, flags: &[&str]) -> Result<Explained> {
    let mut command = node.ns.command(weft_exe());
    command.arg("explain").arg(from.to_string()).arg(to.to_string()).args(["-o", "json"]).args(flags);
    command.arg("--subnet-file").arg(node.subnet_file());
    let output = command.output().await?;
    let error = || format!("{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    let answer = serde_json::from_slice(&output.stdout).with_context(error)?;
    Ok(Explained { code: output.status.code(), answer })
}

/// Pings once from a pod, and returns whether there is an answer. One that is expected ends the wait, so it is waited for as long as a busy
/// machine may need. A lost packet is waited for one second.
async fn is_answered(pod: &Netns, to: IpAddr, expected: bool) -> Result<bool> {
    let limit = if expected { "60" } else { "1" };
    let ping = pod.command("ping").args(["-n", "-c", "1", "-W", limit, &to.to_string()]).output().await?;
    Ok(ping.status.success())
}

/// A lab of two nodes. `weft explain` is called on the first one.
struct Pair {
    lab: Lab,
    from: IpAddr,
    to: IpAddr,
}

impl Pair {
    async fn start(backend: BackendKind) -> Result<Pair> {
        let lab = Lab::start(&LabOptions { nodes: 2, backend, ..options() }).await?;
        lab.reach_all().await?;
        let (from, to) = (lab.nodes[0].pods[0].addrs[0], lab.nodes[1].pods[0].addrs[0]);
        Ok(Pair { lab, from, to })
    }

    /// Starts a lab and kills the agent of the first node. What it wrote into the kernel stays.
    async fn without_agent(backend: BackendKind) -> Result<Pair> {
        let mut pair = Pair::start(backend).await?;
        pair.lab.nodes[0].stop(Signal::SIGKILL).await?;
        Ok(pair)
    }

    fn node(&self) -> &Node {
        &self.lab.nodes[0]
    }

    async fn ip(&self, words: &str) -> Result<String> {
        self.node().ns.ip(words).await
    }

    async fn explain(&self, flags: &[&str]) -> Result<Explained> {
        explain(self.node(), self.from, self.to, flags).await
    }

    /// Returns the subnet of the other node and its first address, which the device has.
    async fn other_subnet(&self) -> Result<(String, String)> {
        let routes = self.ip("route show").await?;
        let net = routes.lines().find(|line| line.contains("proto 90")).and_then(|line| line.split(' ').next());
        let net = net.context("a route of weft")?.to_owned();
        let first = net.split('/').next().unwrap_or_default().to_owned();
        Ok((net, first))
    }
}

#[test]
fn a_healthy_pair_works_over_vxlan_and_every_step_is_shown_in_both_directions() {
    on_this_thread(async {
        let pair = Pair::start(BackendKind::Vxlan).await?;
        let there = pair.explain(&[]).await?;
        there.ends(0, WORKS)?;
        for (step, part) in [
            ("source", "arrive on cni0"),
            ("lease", "belongs to 192.168.77.12 (vxlan)"),
            ("route", "dev flannel.1 proto 90"),
            ("neighbour", "permanent"),
            ("fdb", "192.168.77.12"),
            ("tunnel", "VNI 1, UDP port 8472, to 192.168.77.12"),
            ("underlay route", "dev eth0"),
        ] {
            let found = there.step(step)?;
            ensure!(found["state"] == "ok" && found["is"].as_str().unwrap_or_default().contains(part), "{found}");
        }
        ensure!(there.step("route")?["mtu"] == 1450 && there.step("underlay route")?["mtu"] == 1500);
        let back = explain(pair.node(), pair.to, pair.from, &[]).await?;
        back.ends(0, WORKS)?;
        ensure!(back.step("source")?["is"].as_str().unwrap_or_default().contains("flannel.1"), "{:#}", back.answer);
        back.step("answer: fdb")?;
        let probed = pair.explain(&["--probe"]).await?;
        probed.ends(0, WORKS)?;
        ensure!(probed.step("probe")?["state"] == "ok");
        let mut c = pair.node().ns.command(weft_exe());
        c.arg("explain")
            .arg(pair.from.to_string())
            .arg(pair.to.to_string())
            .arg("--probe")
            .arg("--subnet-file")
            .arg(pair.node().subnet_file());
        let local = explain(pair.node(), pair.node().uplink[0], pair.to, &[]).await?;
        local.ends(0, WORKS)?;
        let elsewhere = explain(pair.node(), pair.to, "192.0.2.1".parse()?, &[]).await?;
        elsewhere.ends(1, "neither address belongs to this node")
    });
}

#[test]
fn a_healthy_pair_works_over_host_gw_with_and_without_an_agent() {
    on_this_thread(async {
        let mut pair = Pair::start(BackendKind::HostGw).await?;
        let with = pair.explain(&[]).await?;
        with.ends(0, WORKS)?;
        ensure!(with.step("route")?["is"].as_str().unwrap_or_default().contains("via 192.168.77.12 dev eth0"));
        pair.lab.nodes[0].stop(Signal::SIGKILL).await?;
        let without = pair.explain(&[]).await?;
        without.ends(0, WORKS)?;
        let lease = without.step("lease")?;
        ensure!(
            lease["state"] == "unknown" && lease["is"].as_str().unwrap_or_default().contains("no agent"),
            "{lease}"
        );
        Ok(())
    });
}

#[test]
fn a_healthy_pair_works_over_udp_and_over_ipv6() {
    on_this_thread(async {
        let pair = Pair::start(BackendKind::Udp).await?;
        let there = pair.explain(&["--probe"]).await?;
        there.ends(0, WORKS)?;
        ensure!(there.step("tunnel")?["is"] == "flannel0: UDP by the agent, to 192.168.77.12", "{:#}", there.answer);
        ensure!(there.step("underlay route")?["mtu"] == 1500);
        Ok(())
    });
    on_this_thread(async {
        let lab = Lab::start(&LabOptions { nodes: 2, only_ipv6: true, ..options() }).await?;
        lab.reach_all().await?;
        let (from, to) = (lab.nodes[0].pods[0].addrs[0], lab.nodes[1].pods[0].addrs[0]);
        let there = explain(&lab.nodes[0], from, to, &["--probe"]).await?;
        there.ends(0, WORKS)?;
        ensure!(there.step("fdb")?["is"].as_str().unwrap_or_default().contains("fd77::"), "{:#}", there.answer);
        let back = explain(&lab.nodes[0], to, from, &[]).await?;
        back.ends(0, WORKS)?;
        let rule = ["-w", "20", "-I", "FORWARD", "-j", "DROP"];
        checked(lab.nodes[0].ns.command("ip6tables-nft").args(rule)).await?;
        let dropped = explain(&lab.nodes[0], from, to, &[]).await?;
        dropped.ends(2, "ip6tables-nft FORWARD drops the packet: -A FORWARD -j DROP")?;
        ensure!(command(&dropped, ";").contains("`ip6tables-nft -S FORWARD`"), "{:#}", dropped.answer);
        Ok(())
    });
}

#[test]
fn an_fdb_entry_that_is_missing_is_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let entries = pair.node().ns.bridge("fdb show dev flannel.1").await?;
        let mac = entries.lines().find(|line| line.contains("192.168.77.12")).and_then(|line| line.split(' ').next());
        let mac = mac.context("an entry")?;
        pair.node().ns.bridge(&format!("fdb del {mac} dev flannel.1")).await?;
        pair.explain(&[]).await?.ends(2, &format!("flannel.1 has no FDB entry for {mac}"))
    });
}

#[test]
fn a_neighbour_that_is_missing_is_named_while_the_agent_is_stopped() {
    on_this_thread(async {
        let pair = Pair::start(BackendKind::Vxlan).await?;
        pair.node().signal(Signal::SIGSTOP)?;
        let (_, first) = pair.other_subnet().await?;
        pair.ip(&format!("neigh del {first} dev flannel.1")).await?;
        let explained = pair.explain(&[]).await?;
        pair.node().signal(Signal::SIGCONT)?;
        explained.ends(2, &format!("flannel.1 has no neighbour entry for {first}"))?;
        let lease = explained.step("lease")?["is"].as_str().unwrap_or_default().to_owned();
        ensure!(lease.contains("did not answer within"), "{lease}");
        Ok(())
    });
}

#[test]
fn a_neighbour_that_is_missing_is_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let (_, first) = pair.other_subnet().await?;
        pair.ip(&format!("neigh del {first} dev flannel.1")).await?;
        pair.explain(&[]).await?.ends(2, &format!("flannel.1 has no neighbour entry for {first}"))
    });
}

#[test]
fn a_longer_route_of_another_program_is_named_with_the_command_that_removes_it() {
    on_this_thread(async {
        let pair = Pair::start(BackendKind::Vxlan).await?;
        let (net, first) = pair.other_subnet().await?;
        // The agent does not remove this route, because it is not in the place of one that it wants.
        pair.ip(&format!("route add {first}/25 via 192.168.77.99 dev eth0 proto static")).await?;
        let explained = pair.explain(&[]).await?;
        explained.ends(2, &format!("is used instead of the route of weft for {net}"))?;
        let remedy = explained.answer["remedy"].as_str().unwrap_or_default();
        let (_, command) = remedy.split_once("then ip ").context("a command")?;
        pair.ip(command).await?;
        pair.explain(&[]).await?.ends(0, WORKS)
    });
}

#[test]
fn a_device_that_is_down_is_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        pair.ip("link set flannel.1 down").await?;
        let explained = pair.explain(&[]).await?;
        explained.ends(2, "flannel.1 is down")?;
        ensure!(explained.answer["remedy"] == "ip link set flannel.1 up");
        pair.ip("link set cni0 down").await?;
        pair.explain(&[]).await?.ends(2, "no device of this node leads to its pod")?;
        let back = explain(pair.node(), pair.to, pair.from, &[]).await?;
        back.ends(2, "no device of this node leads to its pod")
    });
}

#[test]
fn a_policy_and_a_rule_that_drop_forwarded_packets_are_quoted() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let run = async |words: &str| {
            checked(pair.node().ns.command("iptables-nft").args(["-w", "20"]).args(words.split(' '))).await
        };
        run("-P FORWARD DROP").await?;
        let explained = pair.explain(&[]).await?;
        explained.ends(2, "iptables-nft FORWARD drops the packet: policy DROP of FORWARD")?;
        // A rule before it accepts the packets, and a rule before that one drops a port.
        run("-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT").await?;
        run(&format!("-A FORWARD -s {} -j ACCEPT", pair.from)).await?;
        pair.explain(&[]).await?.ends(0, WORKS)?;
        run("-I FORWARD -p tcp --dport 7099 -j DROP").await?;
        pair.explain(&["--port", "7099"]).await?.ends(2, "-A FORWARD -p tcp -m tcp --dport 7099 -j DROP")?;
        pair.explain(&["--port", "80"]).await?.ends(0, WORKS)?;
        pair.explain(&["--port", "7099", "--proto", "udp"]).await?.ends(0, WORKS)?;
        // A rule that is not evaluated is quoted. It does not count as an accept.
        run("-F FORWARD").await?;
        run("-A FORWARD -m length --length 0:100 -j ACCEPT").await?;
        pair.explain(&[]).await?.ends(1, "which is not evaluated: -A FORWARD -m length --length 0:100 -j ACCEPT")
    });
}

#[test]
fn a_chain_of_nftables_that_drops_forwarded_packets_is_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let chain = "add table inet fw; add chain inet fw way { type filter hook forward priority 0; policy drop; }";
        checked(pair.node().ns.command("nft").arg(chain)).await?;
        let explained = pair.explain(&[]).await?;
        explained.ends(2, "nft chain inet fw way drops the packet: policy drop")?;
        let accept = format!(
            "add rule inet fw way ct state established accept; add rule inet fw way ip saddr {} accept",
            pair.from
        );
        checked(pair.node().ns.command("nft").arg(accept)).await?;
        pair.explain(&[]).await?.ends(0, WORKS)
    });
}

/// The rules concern the packets of the tunnel and not those of pods. One of them is in a table that the programs of iptables are not asked for.
#[test]
fn rules_that_drop_packets_of_the_tunnel_are_quoted() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let run = async |words: &str| {
            checked(pair.node().ns.command("iptables-nft").args(["-w", "20"]).args(words.split(' '))).await
        };
        pair.explain(&[]).await?.ends(0, WORKS)?;
        run("-A INPUT -p udp --dport 8472 -j DROP").await?;
        let explained = pair.explain(&[]).await?;
        explained.ends(2, "iptables-nft INPUT drops the packet: -A INPUT -p udp -m udp --dport 8472 -j DROP")?;
        ensure!(explained.step("tunnel rules")?["state"] == "broken");
        run("-F INPUT").await?;
        run("-A OUTPUT -d 192.168.77.0/24 -j DROP").await?;
        pair.explain(&[]).await?.ends(2, "iptables-nft OUTPUT drops the packet")?;
        run("-F OUTPUT").await?;
        pair.explain(&[]).await?.ends(0, WORKS)?;
        run(&format!("-t raw -A PREROUTING -d {} -j DROP", pair.to)).await?;
        pair.explain(&[]).await?.ends(2, "nft chain ip raw PREROUTING drops the packet")?;
        run("-t raw -F").await?;
        pair.explain(&[]).await?.ends(0, WORKS)?;
        // Without -w, it fails if a program of another test has the lock, which is a file of the machine.
        let drop = format!("-w 20 -t mangle -A FORWARD -d {} -j DROP", pair.to);
        checked(pair.node().ns.command("iptables-legacy").args(drop.split(' '))).await?;
        pair.explain(&[]).await?.ends(2, "iptables-legacy mangle FORWARD drops the packet")?;
        checked(pair.node().ns.command("iptables-legacy").args(["-w", "20", "-t", "mangle", "-F"])).await?;
        pair.explain(&[]).await?.ends(0, WORKS)
    });
}

/// The agent carries the packets of this tunnel, so it alone knows their port.
#[test]
fn a_rule_that_drops_packets_of_the_tunnel_of_udp_is_quoted() {
    on_this_thread(async {
        let pair = Pair::start(BackendKind::Udp).await?;
        let drop = async |port: &str| {
            let rule = ["-w", "20", "-A", "INPUT", "-p", "udp", "--dport", port, "-j", "DROP"];
            checked(pair.node().ns.command("iptables-nft").args(rule)).await
        };
        drop("8472").await?;
        pair.explain(&[]).await?.ends(0, WORKS)?;
        drop("8285").await?;
        let explained = pair.explain(&[]).await?;
        explained.ends(2, "iptables-nft INPUT drops the packet: -A INPUT -p udp -m udp --dport 8285 -j DROP")?;
        ensure!(explained.step("tunnel rules")?["state"] == "broken");
        Ok(())
    });
}

/// The explanation of rules is compared with what the kernel does with real packets.
#[test]
fn jumps_sets_and_maps_of_nftables_are_followed_as_the_kernel_does() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let (from, to, node) = (pair.from, pair.to, pair.node());
        let pod = &node.pods[0].ns;
        let filter = "type filter hook forward priority 0; policy accept;";
        let sets = "set three { type ipv4_addr; flags interval; elements = { 10.244.0.0/16 } }; \
                    set one { type ipv4_addr; elements = { 203.0.113.1 } }; \
                    map pairs { type ipv4_addr . ifname : verdict; }";
        let cases: [(&str, bool); 14] = [
            ("ip daddr @three drop", false),
            ("ip daddr != @three drop", true),
            ("ip daddr @one drop", true),
            ("jump other; drop", true),
            ("goto other; drop", true),
            ("jump returns; drop", false),
            ("ct state vmap { established : accept, new : jump other }; drop", true),
            ("ct state vmap { established : accept, invalid : drop }; drop", false),
            ("ct state established,related accept; iifname { lo, cni0 } oifname \"flannel.*\" accept; drop", true),
            ("iifname . oifname { lo . eth0, cni0 . eth0 } drop", true),
            ("ip saddr . ip daddr vmap { FROM . TO : goto refuses }", false),
            ("meta l4proto { tcp, udp } drop", true),
            ("meta l4proto 1-17 ip saddr FROM reject", false),
            ("ip saddr 10.244.0.0-10.244.255.255 ip protocol icmp counter drop", false),
        ];
        for (rules, passes) in cases {
            let rules = rules.replace("FROM", &from.to_string()).replace("TO", &to.to_string());
            let text = format!(
                "table inet fw {{ {sets}; chain other {{ accept; }}; chain returns {{ return; }}; chain refuses {{ reject; }}; \
                 chain way {{ {filter} {rules}; }}; }}"
            );
            checked(node.ns.command("nft").arg(&text)).await?;
            ensure!(is_answered(pod, to, passes).await? == passes, "the kernel with {rules}");
            let explained = pair.explain(&["--proto", "icmp"]).await?;
            let wanted = if passes { (0, WORKS) } else { (2, "nft chain inet fw way drops the packet: ") };
            explained.ends(wanted.0, wanted.1).with_context(|| rules.clone())?;
            checked(node.ns.command("nft").arg("delete table inet fw")).await?;
        }
        pair.explain(&[]).await?.ends(0, WORKS)
    });
}

#[test]
fn chains_of_nftables_at_every_hook_are_read() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let (from, to, node) = (pair.from, pair.to, pair.node());
        // Chains before and after the routing decision, where filters are rare.
        for hook in ["prerouting", "postrouting"] {
            let text = format!(
                "table ip early {{ chain {hook} {{ type filter hook {hook} priority -200; ip daddr {to} drop; }}; }}"
            );
            checked(node.ns.command("nft").arg(&text)).await?;
            pair.explain(&[])
                .await?
                .ends(2, &format!("nft chain ip early {hook} drops the packet: ip daddr {to} drop"))?;
            checked(node.ns.command("nft").arg("delete table ip early")).await?;
        }
        pair.explain(&[]).await?.ends(0, WORKS)?;
        // A packet to this host, and one that this host sends.
        let own: IpAddr = "192.168.77.11".parse()?;
        for (hook, from, to) in [("input", from, own), ("output", own, to)] {
            explain(node, from, to, &[]).await?.ends(0, WORKS)?;
            let text = format!(
                "table ip host {{ chain {hook} {{ type filter hook {hook} priority 0; ip daddr {to} drop; }}; }}"
            );
            checked(node.ns.command("nft").arg(&text)).await?;
            let explained = explain(node, from, to, &[]).await?;
            explained.ends(2, &format!("nft chain ip host {hook} drops the packet: ip daddr {to} drop"))?;
            checked(node.ns.command("nft").arg("delete table ip host")).await?;
        }
        Ok(())
    });
}

#[test]
fn an_underlay_with_a_smaller_mtu_is_named_with_the_size_that_is_needed() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        pair.ip("link set eth0 mtu 1400").await?;
        let explained = pair.explain(&[]).await?;
        explained.ends(2, "a packet of 1450 bytes becomes one of 1500 bytes in the tunnel")?;
        ensure!(explained.step("underlay route")?["should_be"] == "an MTU of at least 1500");
        pair.ip("link set eth0 mtu 1500").await?;
        pair.explain(&[]).await?.ends(0, WORKS)
    });
}

#[test]
fn packets_that_vanish_on_the_way_are_found_by_a_probe() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let other = &pair.lab.nodes[1].ns;
        let chain = "add table inet test; add chain inet test in { type filter hook input priority -300; }; \
                     add rule inet test in udp dport 8472 drop";
        checked(other.command("nft").arg(chain)).await?;
        pair.explain(&[]).await?.ends(0, WORKS)?;
        pair.explain(&["--probe"]).await?.ends(2, "192.168.77.12 answers outside of the tunnel")
    });
}

/// The other node drops some of the echo requests, which come from `weft explain` alone, because no agent runs on the first node.
#[test]
fn a_probe_says_how_many_packets_are_lost_and_one_lost_packet_is_no_fault() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let (_, first) = pair.other_subnet().await?;
        let other = &pair.lab.nodes[1].ns;
        let chain = "add table inet test; add chain inet test in { type filter hook input priority -300; }";
        checked(other.command("nft").arg(chain)).await?;
        for (rule, code, part) in [
            (
                "numgen inc mod 5 < 3 drop",
                1,
                format!("3 of 5 packets of 84 bytes to {first} are lost, and the others arrive"),
            ),
            (
                "ip length > 1000 numgen inc mod 5 < 3 drop",
                1,
                format!("3 of 5 packets of 1450 bytes to {first} are lost"),
            ),
            ("ip length > 1000 numgen inc mod 5 < 1 drop", 0, WORKS.to_owned()),
            ("ip length > 1000 drop", 2, format!("packets of 1450 bytes to {first} are lost, and small ones arrive")),
        ] {
            // A new rule begins to count again.
            let rule = format!("flush chain inet test in; add rule inet test in icmp type echo-request {rule}");
            checked(other.command("nft").arg(rule)).await?;
            let explained = pair.explain(&["--probe"]).await?;
            explained.ends(code, &part)?;
            if code == 0 {
                let text = format!("{first} answers 4 of 5 packets of 1450 bytes");
                ensure!(explained.answer.to_string().contains(&text), "{:#}", explained.answer);
            }
        }
        Ok(())
    });
}

#[test]
fn a_node_that_does_not_forward_is_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        pair.node().ns.sysctl(&["ipv4/ip_forward=0"])?;
        pair.explain(&[]).await?.ends(2, "this node does not forward packets: net.ipv4.ip_forward is 0")
    });
}

#[test]
fn a_service_is_followed_to_an_endpoint_and_a_packet_to_the_outside_is_masqueraded() {
    on_this_thread(async {
        let flags = vec!["--ip-masq".to_owned(), "--firewall=nft".to_owned()];
        let lab = Lab::start(&LabOptions { nodes: 2, agent_flags: flags, ..options() }).await?;
        lab.reach_all().await?;
        let (node, from, to) = (&lab.nodes[0], lab.nodes[0].pods[0].addrs[0], lab.nodes[1].pods[0].addrs[0]);
        let outside = explain(node, from, "198.51.100.1".parse()?, &[]).await?;
        ensure!(format!("{:#}", outside.answer).contains("the source address is translated: "), "{:#}", outside.answer);
        let service: IpAddr = "10.96.0.10".parse()?;
        let rules = [
            "-N KUBE-SERVICES".to_owned(),
            "-N KUBE-SVC-A".to_owned(),
            "-A PREROUTING -j KUBE-SERVICES".to_owned(),
            format!("-A KUBE-SERVICES -d {service}/32 -p tcp --dport 80 -j KUBE-SVC-A"),
            format!("-A KUBE-SVC-A -p tcp -j DNAT --to-destination {to}:8080"),
        ];
        for rule in &rules {
            let words = ["-w", "20", "-t", "nat"].into_iter().chain(rule.split(' '));
            checked(node.ns.command("iptables-nft").args(words)).await?;
        }
        let explained = explain(node, from, service, &["--port", "80"]).await?;
        explained.ends(0, WORKS)?;
        let step = explained.step("service")?["is"].as_str().unwrap_or_default();
        ensure!(step.contains(&format!("-A KUBE-SVC-A -p tcp -j DNAT --to-destination {to}:8080")), "{step}");
        ensure!(explained.answer["to"] == to.to_string(), "{:#}", explained.answer);
        explained.step("fdb").map(drop)?;
        // Inside of the pod, packets have the address and the port of the service, as its rules for egress expect.
        let egress = format!(
            "table ip egress {{
                 chain o {{ type filter hook output priority 0; policy drop; ip daddr {service} tcp dport 80 accept; }}
                 chain i {{ type filter hook input priority 0; policy drop; ip saddr {service} ct state established accept; }}
             }}"
        );
        let pod = &node.pods[0].ns;
        checked(pod.command("nft").arg(&egress)).await?;
        explain(node, from, service, &["--port", "80"]).await?.ends(0, WORKS)?;
        checked(pod.command("nft").arg("add rule ip egress o accept; insert rule ip egress o tcp dport 80 drop"))
            .await?;
        explain(node, from, service, &["--port", "80"]).await?.ends(2, "nft chain ip egress o drops the packet: ")?;
        checked(pod.command("nft").arg("delete table ip egress")).await?;
        // These rules have the form of those of kube-proxy with nftables.
        let service: IpAddr = "10.96.0.11".parse()?;
        let rules = format!(
            "table ip kube-proxy {{
                 map service-ips {{ type ipv4_addr . inet_proto . inet_service : verdict; elements = {{ {service} . tcp . 80 : goto service }}; }}
                 chain endpoint {{ meta l4proto tcp dnat to {to}:8080; }}
                 chain service {{ ip saddr != 10.244.0.0/16 meta mark set 0x4000; numgen random mod 1 vmap {{ 0 : goto endpoint }}; }}
                 chain services {{ ip daddr . meta l4proto . th dport vmap @service-ips; }}
                 chain nat-prerouting {{ type nat hook prerouting priority dstnat; jump services; }}
             }}"
        );
        checked(node.ns.command("nft").arg(&rules)).await?;
        let explained = explain(node, from, service, &["--port", "80"]).await?;
        explained.ends(0, WORKS)?;
        let step = explained.step("service")?["is"].as_str().unwrap_or_default();
        ensure!(step.contains(&format!("dnat to {to}:8080")), "{step}");
        ensure!(explained.answer["to"] == to.to_string(), "{:#}", explained.answer);
        // No service has this port.
        let explained = explain(node, from, service, &["--port", "81"]).await?;
        ensure!(explained.step("service").is_err(), "{:#}", explained.answer);
        Ok(())
    });
}

#[test]
fn a_service_with_a_port_of_the_node_is_followed_and_one_of_ipvs_is_left_open() {
    on_this_thread(async {
        let flags = vec!["--firewall=nft".to_owned()];
        let lab = Lab::start(&LabOptions { nodes: 2, agent_flags: flags, ..options() }).await?;
        lab.reach_all().await?;
        let (node, from, to) = (&lab.nodes[0], lab.nodes[0].pods[0].addrs[0], lab.nodes[1].pods[0].addrs[0]);
        let host = node.uplink[0];
        explain(node, from, host, &["--port", "30080"]).await?.ends(0, WORKS)?;
        for rule in [
            "-N KUBE-NODEPORTS",
            "-A PREROUTING -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS",
            &format!("-A KUBE-NODEPORTS -p tcp --dport 30080 -j DNAT --to-destination {to}:8080"),
        ] {
            let words = ["-w", "20", "-t", "nat"].into_iter().chain(rule.split(' '));
            checked(node.ns.command("iptables-nft").args(words)).await?;
        }
        let explained = explain(node, from, host, &["--port", "30080"]).await?;
        explained.ends(0, WORKS)?;
        ensure!(
            text(&explained, "service")?.contains(&format!("--to-destination {to}:8080")),
            "{:#}",
            explained.answer
        );
        ensure!(explained.answer["to"] == to.to_string(), "{:#}", explained.answer);
        explained.step("fdb").map(drop)?;
        for flags in [&["--port", "30081"][..], &[]] {
            let explained = explain(node, from, host, flags).await?;
            ensure!(explained.step("service").is_err(), "no service has this port: {:#}", explained.answer);
        }
        // kube-proxy makes a device of the type dummy, which not every kernel has.
        for line in ["link add kube-ipvs0 type bridge", "addr add 10.96.0.12/32 dev kube-ipvs0"] {
            node.ns.ip(line).await?;
        }
        let explained = explain(node, from, "10.96.0.12".parse()?, &["--port", "80"]).await?;
        explained.ends(1, "IPVS carries the service 10.96.0.12")?;
        ensure!(command(&explained, " shows") == "ipvsadm -Ln -t 10.96.0.12:80", "{:#}", explained.answer);
        ensure!(text(&explained, "service")?.contains("kube-ipvs0"), "{:#}", explained.answer);
        Ok(())
    });
}

/// Returns the text of a step.
fn text<'a>(explained: &'a Explained, step: &str) -> Result<&'a str> {
    Ok(explained.step(step)?["is"].as_str().unwrap_or_default())
}

/// Carries out the remedy up to a word.
async fn remedied(node: &Node, explained: &Explained, end: &str) -> Result<String> {
    checked(node.ns.command("sh").args(["-c", command(explained, end)])).await
}

/// Returns the remedy up to a word.
fn command<'a>(explained: &'a Explained, end: &str) -> &'a str {
    let remedy = explained.answer["remedy"].as_str().unwrap_or_default();
    remedy.split(end).next().unwrap_or_default()
}

#[test]
fn chains_at_links_and_in_the_bridge_that_drop_the_packet_are_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let sound = pair.explain(&[]).await?;
        sound.ends(0, WORKS)?;
        let port = text(&sound, "pod")?.rsplit(' ').next().context("a port")?;
        for (family, chain) in [
            ("netdev", "filter hook ingress device flannel.1"),
            ("netdev", "filter hook ingress device PORT"),
            ("netdev", "filter hook egress device cni0"),
            ("bridge", "filter hook input"),
            ("bridge", "filter hook output"),
        ] {
            let chain = chain.replace("PORT", port);
            let rules = format!("table {family} f {{ chain i {{ type {chain} priority 0; policy drop; }}; }}");
            checked(pair.node().ns.command("nft").arg(&rules)).await?;
            let explained = pair.explain(&[]).await?;
            explained.ends(2, &format!("nft chain {family} f i drops packets ")).with_context(|| rules.clone())?;
            let remedy = explained.answer["remedy"].as_str().unwrap_or_default();
            checked(pair.node().ns.command("sh").args(["-c", remedy])).await?;
            pair.explain(&[]).await?.ends(0, WORKS).with_context(|| rules.clone())?;
            let flush = format!("delete table {family} f");
            checked(pair.node().ns.command("nft").arg(&flush)).await?;
        }
        // The chain at the uplink drops the packets of the tunnel.
        let rules =
            "table netdev f { chain i { type filter hook ingress device eth0 priority 0; udp dport 8472 drop; }; }";
        checked(pair.node().ns.command("nft").arg(rules)).await?;
        let explained = pair.explain(&[]).await?;
        explained
            .ends(2, "nft chain netdev f i drops packets that arrive on eth0: meta l4proto udp dport 8472 drop")?;
        ensure!(explained.step("tunnel rules")?["state"] == "broken");
        Ok(())
    });
}

#[test]
fn a_rule_that_drops_the_answer_is_named_and_one_that_accepts_answers_is_no_fault() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let (from, to) = (pair.from, pair.to);
        let nft = async |rules: String| checked(pair.node().ns.command("nft").arg(&rules)).await;
        let chain = "chain fw { type filter hook forward priority -10;";
        let set = format!("set bl {{ type ipv4_addr; flags interval; elements = {{ {to}/32 }}; }};");
        nft(format!("table ip c {{ {set} {chain} ip saddr @bl drop; }}; }}")).await?;
        let explained = pair.explain(&[]).await?;
        explained.ends(2, "nft chain ip c fw drops the packet: ip saddr @bl drop")?;
        ensure!(explained.step("answer: rules").is_ok(), "{:#}", explained.answer);
        nft("delete table ip c".to_owned()).await?;
        // As a firewall that lets pods of this node begin connections, and no others.
        nft(format!(
            "table ip c {{ {chain} policy drop; ct state established,related accept; ip saddr {from} accept; }}; }}"
        ))
        .await?;
        pair.explain(&[]).await?.ends(0, WORKS)?;
        let back = explain(pair.node(), to, from, &[]).await?;
        back.ends(2, "nft chain ip c fw drops the packet: policy drop")?;
        nft("delete table ip c".to_owned()).await?;
        // What no connection is known of is not new.
        nft(format!(
            "table ip c {{ chain pre {{ type filter hook prerouting priority raw; ip saddr {from} notrack; }}; \
             {chain} ct state untracked drop; }}; }}"
        ))
        .await?;
        pair.explain(&[]).await?.ends(2, "nft chain ip c fw drops the packet: ct state != 0x0/0x40 drop")?;
        Ok(())
    });
}

#[test]
fn a_rate_limit_that_drops_packets_of_the_tunnel_is_a_doubt() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        for (rule, code, part) in [
            (
                "udp dport 8472 limit rate over 2/second burst 2 packets drop",
                1,
                "nft chain inet f in drops what is beyond a rate",
            ),
            ("tcp dport 22 limit rate over 2/second drop", 0, WORKS),
        ] {
            let rules = format!("table inet f {{ chain in {{ type filter hook input priority 0; {rule}; }}; }}");
            checked(pair.node().ns.command("nft").arg(&rules)).await?;
            pair.explain(&[]).await?.ends(code, part)?;
            checked(pair.node().ns.command("nft").arg("delete table inet f")).await?;
        }
        Ok(())
    });
}

#[test]
fn a_vpn_that_takes_the_underlay_is_a_doubt_and_a_route_that_refuses_it_is_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        for kind in ["blackhole", "unreachable", "prohibit"] {
            pair.ip(&format!("route add {kind} 192.168.77.12/32")).await?;
            let explained = pair.explain(&[]).await?;
            explained.ends(2, &format!("the route {kind} 192.168.77.12/32 "))?;
            remedied(pair.node(), &explained, ";").await?;
            pair.explain(&[]).await?.ends(0, WORKS)?;
        }
        for words in ["tuntap add tun9 mode tun", "link set tun9 up", "addr add 10.9.9.1/24 dev tun9"] {
            pair.ip(words).await?;
        }
        pair.ip("route add 192.168.77.0/25 dev tun9").await?;
        let answered = is_answered(&pair.node().pods[0].ns, pair.to, false).await?;
        ensure!(!answered, "the kernel uses the route of the VPN");
        let explained = pair.explain(&[]).await?;
        explained.ends(1, "packets to 192.168.77.12 leave over tun9, and flannel.1 was made for another link")?;
        ensure!(explained.step("underlay route")?["state"] == "doubt", "{:#}", explained.answer);
        let remedy = explained.answer["remedy"].as_str().unwrap_or_default();
        ensure!(remedy.contains("ip rule add to 192.168.77.12/32 lookup main pref 100"), "{remedy}");
        Ok(())
    });
}

#[test]
fn what_is_wrong_inside_of_a_pod_and_at_its_link_is_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let pod = &pair.node().pods[0].ns;
        let sound = pair.explain(&[]).await?;
        sound.ends(0, WORKS)?;
        let port = text(&sound, "pod")?.rsplit(' ').next().context("a port")?.to_owned();
        let (from, to) = (pair.from, pair.to);
        let gateway = pod.ip("route show default").await?;
        let gateway = gateway.split(' ').nth(2).context("a gateway")?;
        let subnet = pair.ip("route show dev cni0").await?;
        let subnet = subnet.split(' ').next().context("a subnet")?;
        let (range, _) = gateway.rsplit_once('.').context("an IPv4 address")?;
        let unused = format!("{range}.77");
        let wrong = "lladdr 02:00:00:00:00:99 nud permanent";
        for (is_inside, fault, part) in [
            (true, "route del default".to_owned(), format!("the pod {from} has no route to {to}")),
            (
                true,
                format!("neigh replace {gateway} {wrong} dev eth0"),
                format!("a permanent entry for its gateway {gateway}"),
            ),
            (
                true,
                format!("route replace default via {unused}"),
                format!("the pod {from} sends by {unused}, which is no address of cni0"),
            ),
            (false, format!("neigh replace {from} {wrong} dev cni0"), format!("a permanent entry for its pod {from}")),
            (
                false,
                format!("link set {port} nomaster"),
                format!("{port}, which leads to the pod {from}, is no port of cni0"),
            ),
            (false, format!("link set {port} down"), format!("{port} is down")),
            (
                false,
                format!("route del {subnet} dev cni0"),
                format!("no route leads to {subnet} over cni0 although it has {gateway}"),
            ),
        ] {
            if is_inside {
                pod.ip(&fault).await?
            } else {
                pair.ip(&fault).await?
            };
            let explained = pair.explain(&[]).await?;
            explained.ends(2, &part).with_context(|| fault.clone())?;
            remedied(pair.node(), &explained, ", or").await?;
            pair.explain(&[]).await?.ends(0, WORKS).with_context(|| fault.clone())?;
        }
        let absent = explain(pair.node(), unused.parse()?, to, &[]).await?;
        absent.ends(1, &format!("no pod of this node has {unused}"))?;
        packets_of_the_pod_go_elsewhere(&pair, &port).await
    });
}

/// Packets from and to the pod go another way: by a second network, by a route of another program, or through another bridge.
async fn packets_of_the_pod_go_elsewhere(pair: &Pair, port: &str) -> Result<()> {
    let pod = &pair.node().pods[0].ns;
    let (from, to) = (pair.from, pair.to);
    // A second network of the pod.
    pod.ip("link add net1 up type veth peer name net2").await?;
    pod.ip(&format!("route add {to}/32 dev net1")).await?;
    pair.explain(&[]).await?.ends(1, &format!("the packet leaves the pod {from} by net1"))?;
    pod.ip("link del net1").await?;
    pair.explain(&[]).await?.ends(0, WORKS)?;
    // Another program leads the packets for the pod to another host.
    pair.ip(&format!("route add {from}/32 via 192.168.77.12 proto static")).await?;
    let past = explain(pair.node(), to, from, &[]).await?;
    past.ends(2, &format!("dev eth0 proto static of another program leads packets for the pod {from}"))?;
    remedied(pair.node(), &past, ";").await?;
    explain(pair.node(), to, from, &[]).await?.ends(0, WORKS)?;
    pod.ip("link set eth0 down").await?;
    pair.explain(&[]).await?.ends(2, &format!("eth0 of the pod {from} is down"))?;
    // Another bridge has the link.
    pod.ip("link set eth0 up").await?;
    pair.ip("link add br9 up type bridge").await?;
    pair.ip(&format!("link set {port} master br9")).await?;
    let back = explain(pair.node(), to, from, &[]).await?;
    back.ends(2, &format!("{port}, which leads to the pod {from}, is no port of cni0"))
}

/// Another program flushed the rules while no agent runs.
#[test]
fn a_packet_to_the_outside_that_nobody_masquerades_is_a_doubt() {
    on_this_thread(async {
        let flags = vec!["--ip-masq".to_owned(), "--firewall=nft".to_owned()];
        let mut lab = Lab::start(&LabOptions { nodes: 2, agent_flags: flags, ..options() }).await?;
        lab.nodes[0].stop(Signal::SIGKILL).await?;
        let (node, from) = (&lab.nodes[0], lab.nodes[0].pods[0].addrs[0]);
        let outside: IpAddr = "198.51.100.1".parse()?;
        let doubt = format!("leaves with the pod's address {from}");
        let before = explain(node, from, outside, &[]).await?;
        ensure!(!before.answer.to_string().contains(&doubt), "{:#}", before.answer);
        checked(node.ns.command("nft").args(["flush", "ruleset"])).await?;
        explain(node, from, outside, &[]).await?.ends(1, &doubt)
    });
}

/// Pods without a bridge, nodes behind a router, and both families.
#[test]
fn a_healthy_pair_works_with_routed_pods_and_behind_a_router() {
    on_this_thread(async {
        let veth = Pods { count: 2, wiring: Wiring::Veth };
        for options in [
            LabOptions { nodes: 2, pods: veth, ipv6: true, ..options() },
            LabOptions { nodes: 2, pods: veth, backend: BackendKind::HostGw, ..options() },
            LabOptions { nodes: 3, router: true, direct_routing: true, ipv6: true, ..options() },
        ] {
            let lab = Lab::start(&options).await?;
            lab.reach_all().await?;
            let node = &lab.nodes[0];
            for other in &lab.nodes[1..] {
                for (from, to) in node.pods[0].addrs.iter().zip(&other.pods[0].addrs) {
                    for (from, to) in [(from, to), (to, from)] {
                        let explained = explain(node, *from, *to, &["--probe"]).await?;
                        explained.ends(0, WORKS)?;
                        let steps = explained.answer["steps"].as_array().context("steps")?;
                        let is_ok = |step: &Value| step["state"] == "ok";
                        ensure!(steps.iter().all(is_ok), "{:#}", explained.answer);
                    }
                }
            }
            // Two pods of one node.
            let pods: Vec<IpAddr> = node.pods.iter().map(|pod| pod.addrs[0]).collect();
            if let [first, second, ..] = pods[..] {
                explain(node, first, second, &[]).await?.ends(0, WORKS)?;
            }
        }
        Ok(())
    });
}

#[test]
fn a_queue_that_no_program_reads_is_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        for (program, rule, code, part) in [
            ("iptables-nft", "-A FORWARD -j NFQUEUE --queue-num 7", 2, "(no program reads this queue)"),
            ("iptables-nft", "-t mangle -A FORWARD -j NFQUEUE --queue-num 7", 2, "queue to 7 (handle "),
            ("iptables-legacy", "-A FORWARD -j NFQUEUE --queue-num 7", 2, "(no program reads this queue)"),
            ("iptables-nft", "-A FORWARD -j NFQUEUE --queue-num 7 --queue-bypass", 0, WORKS),
        ] {
            checked(pair.node().ns.command(program).args(["-w", "20"]).args(rule.split(' '))).await?;
            let passes = code == 0;
            let answered = is_answered(&pair.node().pods[0].ns, pair.to, passes).await?;
            ensure!(answered == passes, "the kernel with {rule}");
            pair.explain(&[]).await?.ends(code, part).with_context(|| rule)?;
            for table in ["filter", "mangle"] {
                checked(pair.node().ns.command(program).args(["-w", "20", "-t", table, "-F"])).await?;
            }
        }
        Ok(())
    });
}

#[test]
fn two_pods_behind_isolated_ports_are_named() {
    on_this_thread(async {
        let bridge = Pods { count: 2, wiring: Wiring::Bridge };
        let lab = Lab::start(&LabOptions { nodes: 2, pods: bridge, ..options() }).await?;
        lab.reach_all().await?;
        let node = &lab.nodes[0];
        let (first, second) = (node.pods[0].addrs[0], node.pods[1].addrs[0]);
        explain(node, first, second, &[]).await?.ends(0, WORKS)?;
        let ports = node.ns.ip("-o link show master cni0").await?;
        let ports = ports.lines().filter_map(|line| line.split(' ').nth(1)?.split('@').next());
        let isolate = async |port: &str| node.ns.bridge(&format!("link set dev {port} isolated on")).await;
        let ports: Vec<&str> = ports.collect();
        isolate(ports[0]).await?;
        explain(node, first, second, &[]).await?.ends(0, WORKS)?;
        isolate(ports[1]).await?;
        ensure!(!is_answered(&node.pods[0].ns, second, false).await?, "the kernel passes nothing");
        let explained = explain(node, first, second, &[]).await?;
        explained.ends(2, "are isolated ports of one bridge")?;
        explain(node, first, lab.nodes[1].pods[0].addrs[0], &[]).await?.ends(0, WORKS)?;
        remedied(node, &explained, ";").await?;
        explain(node, first, second, &[]).await?.ends(0, WORKS)
    });
}

#[test]
fn a_larger_mtu_inside_of_a_pod_is_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let (pod, from) = (&pair.node().pods[0].ns, pair.from);
        pair.explain(&[]).await?.ends(0, WORKS)?;
        pod.ip("link set eth0 mtu 1500").await?;
        let explained = pair.explain(&[]).await?;
        explained.ends(2, &format!("drops packets of the pod {from} with more than 1450 bytes"))?;
        remedied(pair.node(), &explained, ";").await?;
        pair.explain(&[]).await?.ends(0, WORKS)
    });
}

#[test]
fn a_pod_without_arp_is_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let (pod, from) = (&pair.node().pods[0].ns, pair.from);
        pair.explain(&[]).await?.ends(0, WORKS)?;
        pod.ip("link set eth0 arp off").await?;
        let explained = pair.explain(&[]).await?;
        explained.ends(2, &format!("eth0 of the pod {from} has the flag NOARP"))?;
        remedied(pair.node(), &explained, ";").await?;
        pair.explain(&[]).await?.ends(0, WORKS)
    });
}

/// No packet corrects such an entry.
#[test]
fn a_static_entry_of_the_bridge_is_named() {
    on_this_thread(async {
        let bridge = Pods { count: 2, wiring: Wiring::Bridge };
        let lab = Lab::start(&LabOptions { nodes: 2, pods: bridge, ..options() }).await?;
        lab.reach_all().await?;
        let (node, to) = (&lab.nodes[0], lab.nodes[1].pods[0].addrs[0]);
        let (pod, from) = (&node.pods[0].ns, node.pods[0].addrs[0]);
        explain(node, to, from, &[]).await?.ends(0, WORKS)?;
        let mac = pod.ip("-o link show eth0").await?;
        let mac = mac.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).context("a MAC address")?;
        let own = explain(node, from, to, &[]).await?;
        let own = text(&own, "pod")?.rsplit(' ').next().context("a port")?.to_owned();
        let ports = node.ns.ip("-o link show master cni0").await?;
        let mut ports = ports.lines().filter_map(|line| line.split(' ').nth(1)?.split('@').next());
        let other = ports.find(|port| *port != own).context("another port")?;
        node.ns.bridge(&format!("fdb replace {mac} dev {own} master static")).await?;
        explain(node, to, from, &[]).await?.ends(0, WORKS)?;
        // Without `sticky`, any packet of the pod would lead the entry back to its own port.
        node.ns.bridge(&format!("fdb replace {mac} dev {other} master static sticky")).await?;
        let explained = explain(node, to, from, &[]).await?;
        explained.ends(2, &format!("a static entry that leads packets for the pod {from} ({mac}) to {other}"))?;
        remedied(node, &explained, ";").await?;
        explain(node, to, from, &[]).await?.ends(0, WORKS)
    });
}

#[test]
fn rules_inside_of_a_pod_are_named() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let pod = &pair.node().pods[0].ns;
        let (from, to) = (pair.from, pair.to);
        let nft = async |text: String| checked(pod.command("nft").arg(&text)).await;
        for (hook, rule, from, to) in [
            ("output", format!("ip daddr {to} drop"), from, to),
            ("input", "meta l4proto { tcp, udp, icmp } reject".to_owned(), to, from),
        ] {
            let flags = ["--proto", "tcp", "--port", "80"];
            explain(pair.node(), from, to, &flags).await?.ends(0, WORKS)?;
            nft(format!("table inet f {{ chain c {{ type filter hook {hook} priority 0; {rule}; }}; }}")).await?;
            let explained = explain(pair.node(), from, to, &flags).await?;
            explained.ends(2, &format!("inside of the pod {}, nft chain inet f c drops the packet: ", pair.from))?;
            ensure!(command(&explained, ";").contains("nsenter --net="), "{:#}", explained.answer);
            nft("delete table inet f".to_owned()).await?;
        }
        // The rules of iptables-legacy are in no table of nftables.
        for (table, chain, from, to) in [("filter", "OUTPUT", from, to), ("mangle", "INPUT", to, from)] {
            let flags = ["--proto", "tcp", "--port", "80"];
            let rule = ["-t", table, "-A", chain, "-p", "tcp", "--dport", "80", "-j", "DROP"];
            checked(pod.command("iptables-legacy").args(rule)).await?;
            let explained = explain(pair.node(), from, to, &flags).await?;
            let part = format!("inside of the pod {}, iptables-legacy {table} {chain} drops the packet: ", pair.from);
            explained.ends(2, &part)?;
            let look = format!("iptables-legacy -t {table} -S {chain}`");
            let remedy = command(&explained, ";");
            ensure!(remedy.contains("nsenter --net=") && remedy.ends_with(&look), "{:#}", explained.answer);
            checked(pod.command("iptables-legacy").args(["-t", table, "-F"])).await?;
            explain(pair.node(), from, to, &flags).await?.ends(0, WORKS)?;
        }
        // A sidecar redirects what the pod sends, and accepts what it gets.
        nft("table ip s { chain o { type nat hook output priority 0; meta l4proto tcp redirect to 15001; }; \
             chain i { type filter hook input priority 0; ct state established,related,new accept; }; }"
            .to_owned())
        .await?;
        pair.explain(&[]).await?.ends(0, WORKS)
    });
}

/// A router on the way to a host outside of the cluster takes smaller packets, and a firewall drops what it says about larger ones.
#[test]
fn a_way_to_the_outside_on_which_large_packets_vanish_is_found_by_a_probe() {
    on_this_thread(async {
        let pair = Pair::without_agent(BackendKind::Vxlan).await?;
        let (node, fabric, from) = (pair.node(), &pair.lab.fabric, pair.from);
        let outside = pair.lab.add_host("outside", 99).await?;
        let to: IpAddr = "198.51.100.1".parse()?;
        outside.ip("address add 198.51.100.1/32 dev eth0").await?;
        fabric.sysctl(&["ipv4/conf/all/send_redirects=0", "ipv4/conf/br0/send_redirects=0"])?;
        fabric.ip("route add 198.51.100.1/32 via 192.168.77.99 dev br0 mtu lock 1400").await?;
        let quiet = "table ip quiet { chain o { type filter hook output priority 0; icmp type destination-unreachable drop; }; }";
        checked(fabric.command("nft").arg(quiet)).await?;
        explain(node, from, to, &[]).await?.ends(0, WORKS)?;
        let explained = explain(node, from, to, &["--probe"]).await?;
        explained.ends(1, "packets of 1450 bytes to 198.51.100.1 are lost, those of 1400 bytes are answered")?;
        let remedy = explained.answer["remedy"].as_str().unwrap_or_default();
        ensure!(remedy.contains("ICMP errors"), "{remedy}");
        let route = remedy.split('`').nth(1).context("a command")?;
        checked(node.ns.command("sh").args(["-c", route])).await?;
        explain(node, from, to, &["--probe"]).await?.ends(0, WORKS)?;
        pair.ip("route del 198.51.100.1/32").await?;
        checked(fabric.command("nft").arg("delete table ip quiet")).await?;
        explain(node, from, to, &["--probe"]).await?.ends(0, WORKS)?;
        // The router says what fits, and the host ignores the fragments that follow from it.
        let whole = "table ip whole { chain p { type filter hook prerouting priority -450; ip frag-off & 0x3fff != 0 drop; }; }";
        checked(outside.command("nft").arg(whole)).await?;
        node.ns.sysctl(&["ipv4/route/flush=1"])?;
        let told = explain(node, from, to, &["--probe"]).await?;
        told.ends(0, WORKS)?;
        ensure!(told.answer.to_string().contains("says that packets of 1400 bytes fit"), "{:#}", told.answer);
        checked(outside.command("nft").arg("delete table ip whole")).await?;
        // Many hosts answer no echo requests.
        let silent = "table ip quiet { chain i { type filter hook input priority 0; icmp type echo-request drop; }; }";
        checked(outside.command("nft").arg(silent)).await?;
        explain(node, from, to, &["--probe"]).await?.ends(0, WORKS)
    });
}

/// A cloud, or a switch with port security, that knows the addresses of the nodes alone.
#[test]
fn a_network_that_drops_addresses_of_pods_is_found_by_a_probe() {
    on_this_thread(async {
        let pair = Pair::start(BackendKind::HostGw).await?;
        let probed = pair.explain(&["--probe"]).await?;
        probed.ends(0, WORKS)?;
        ensure!(probed.answer.to_string().contains("192.168.77.12 gets packets from 10."), "{:#}", probed.answer);
        let cloud =
            "table bridge cloud { chain w { type filter hook forward priority 0; ip daddr 10.244.0.0/16 drop; }; }";
        checked(pair.lab.fabric.command("nft").arg(cloud)).await?;
        pair.explain(&[]).await?.ends(0, WORKS)?;
        let explained = pair.explain(&["--probe"]).await?;
        explained.ends(1, "192.168.77.12 answers at its own address, and no packet from 10.")?;
        ensure!(command(&explained, ";").contains("Network on the ports of the nodes"), "{:#}", explained.answer);
        // With --ip-blackhole-route, nodes drop packets for unused addresses in silence.
        for line in ["rule add pref 30201 lookup 90001", "route add blackhole 10.244.200.0/24 table 90001"] {
            pair.ip(line).await?;
        }
        pair.explain(&["--probe"]).await?.ends(0, WORKS)?;
        pair.ip("rule del pref 30201").await?;
        checked(pair.lab.fabric.command("nft").arg("delete table bridge cloud")).await?;
        pair.explain(&["--probe"]).await?.ends(0, WORKS)
    });
}
