// SPDX-License-Identifier: Apache-2.0
//! Misfortunes of one node: what other programs and the kernel do there.

use std::fs;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use weft_lab::netns::checked;
use weft_lab::node::Node;
use weft_lab::{BackendKind, Lab, LabOptions, Pods, Wiring, wait_for};

use crate::{LIMIT, doctor, exe, gone, named, on_this_thread, options};

/// Runs a program in the namespace of a node.
async fn run(node: &Node, line: &str) -> Result<String> {
    let mut words = line.split_whitespace();
    let program = words.next().context("a program")?;
    checked(node.ns.command(program).args(words)).await
}

/// A sound node has no finding at all, whichever its backend is and however its pods are connected.
#[test]
fn a_sound_lab_has_no_findings() {
    on_this_thread(async {
        let bridge = Pods { count: 2, wiring: Wiring::Bridge };
        let veth = Pods { count: 2, wiring: Wiring::Veth };
        for options in [
            LabOptions { ipv6: true, pods: bridge, ..options() },
            LabOptions { backend: BackendKind::HostGw, pods: veth, ..options() },
            LabOptions { nodes: 3, router: true, direct_routing: true, ..options() },
            LabOptions { backend: BackendKind::Udp, ..options() },
        ] {
            let lab = Lab::start(&options).await?;
            lab.reach_all().await?;
            for node in &lab.nodes {
                let is_sound = async || doctor(node, &[]).await.is_ok_and(|findings| findings.is_empty());
                if wait_for("no findings", LIMIT, is_sound).await.is_err() {
                    bail!("{}: {:#?}", node.name(), doctor(node, &[]).await?);
                }
            }
        }
        Ok(())
    });
}

/// 27 to 29: a firewall of the node itself, without ufw or firewalld. Both sides see it: the other node by its probes.
#[test]
fn a_firewall_of_the_node_drops_the_tunnel() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        let node = &lab.nodes[0];
        lab.reach_all().await?;
        gone(node, "firewall").await?;
        // Images of some clouds have such a last rule.
        run(node, "iptables-nft -A INPUT -p icmp -j ACCEPT").await?;
        run(node, "iptables-nft -A INPUT -j REJECT --reject-with icmp-host-prohibited").await?;
        let remedy = "iptables-nft -I INPUT -s 192.168.77.12 -p udp --dport 8472 -j ACCEPT";
        named(node, "firewall", &["INPUT of iptables-nft", "UDP port 8472", "from 192.168.77.12", "-j REJECT", remedy])
            .await?;
        named(&lab.nodes[1], "agent", &["192.168.77.11", "UDP port 8472"]).await?;
        run(node, remedy).await?;
        gone(node, "firewall").await?;
        gone(&lab.nodes[1], "agent").await?;
        run(node, "iptables-nft -t raw -A OUTPUT -p udp --dport 8472 -j DROP").await?;
        named(node, "firewall", &["ip raw OUTPUT of nftables", "to 192.168.77.12"]).await?;
        run(node, "iptables-nft -t raw -F").await?;
        gone(node, "firewall").await
    });
}

/// 74 and 76, on a node with both families: a rule for IPv6 alone, and one that drops what pods of the other node send.
#[test]
fn a_firewall_drops_one_family_or_one_direction_alone() {
    on_this_thread(async {
        let lab = Lab::start(&LabOptions { ipv6: true, ..options() }).await?;
        let (node, other) = (&lab.nodes[0], &lab.nodes[1]);
        lab.reach_all().await?;
        gone(node, "firewall").await?;
        run(node, "ip6tables-nft -A INPUT -p udp --dport 8472 -j DROP").await?;
        let remedy = "ip6tables-nft -I INPUT -s fd77::12 -p udp --dport 8472 -j ACCEPT";
        named(node, "firewall", &["INPUT of ip6tables-nft", "UDP port 8472", "from fd77:", "-j DROP", remedy]).await?;
        run(node, remedy).await?;
        gone(node, "firewall").await?;
        let pod = other.pods[0].addrs[0];
        let subnet = format!("{}/24", pod.to_string().rsplit_once('.').context("an IPv4 address")?.0.to_owned() + ".0");
        let set = format!("set bl {{ type ipv4_addr; flags interval; elements = {{ {subnet} }}; }};");
        let chain = "chain fw { type filter hook forward priority -10; ip saddr @bl drop; };";
        checked(node.ns.command("nft").arg(format!("table ip c {{ {set} {chain} }}"))).await?;
        let from = format!("from pods of {subnet} to pods of ");
        named(node, "firewall", &["chain ip c fw of nftables", &from, "ip saddr @bl drop"]).await?;
        run(node, "nft delete table ip c").await?;
        gone(node, "firewall").await
    });
}

/// 6, 7, 10, 11, 26: one after the other on a node that is sound before and afterwards.
#[test]
fn rules_routes_and_settings_of_other_programs() {
    on_this_thread(async {
        let lab = Lab::start(&LabOptions { nodes: 3, router: true, direct_routing: true, ..options() }).await?;
        let node = &lab.nodes[0];
        for check in ["network", "rp-filter", "bridge-subnet", "br-netfilter", "device", "managed"] {
            ensure!(doctor(node, &["--only", check]).await?.is_empty(), "{check} before");
        }
        // A VPN or a routing daemon.
        run(node, "ip route add 10.244.128.0/17 via 192.168.77.1 dev eth0 proto static").await?;
        named(node, "network", &["10.244.128.0/17", "eth0", "protocol static", "ip route del 10.244.128.0/17"]).await?;
        run(node, "ip route del 10.244.128.0/17").await?;
        gone(node, "network").await?;
        // A VPN with a policy rule: its table is asked first, however wide its routes are.
        run(node, "ip route add 10.0.0.0/8 via 192.168.77.1 dev eth0 table 52").await?;
        run(node, "ip rule add pref 5270 lookup 52").await?;
        named(node, "network", &["table 52", "2 of the subnets of peers", "over eth0", "ip route show table 52"])
            .await?;
        run(node, "ip rule del pref 5270").await?;
        gone(node, "network").await?;
        // The first peer is reached over eth0, and the second one over flannel.1. Both ends choose the same link, so nothing is lost.
        node.ns.sysctl(&["ipv4/conf/all/rp_filter=1"])?;
        lab.reach_all().await?;
        ensure!(doctor(node, &["--only", "rp-filter"]).await?.is_empty(), "all peers are reached");
        node.ns.sysctl(&["ipv4/conf/all/rp_filter=2"])?;
        node.ns.sysctl(&["bridge/bridge-nf-call-iptables=0"])?;
        // kube-proxy has such a table.
        run(node, "nft add table ip kube-proxy").await?;
        named(node, "br-netfilter", &["cni0", "modprobe br_netfilter"]).await?;
        node.ns.sysctl(&["bridge/bridge-nf-call-iptables=1"])?;
        gone(node, "br-netfilter").await?;
        run(node, "nft delete table ip kube-proxy").await?;
        run(node, "ip addr flush dev cni0").await?;
        run(node, "ip addr add 10.99.1.1/24 dev cni0").await?;
        named(node, "bridge-subnet", &["10.99.1.1", "ip link del cni0"]).await?;
        let chain = "add chain inet strict forward { type filter hook forward priority 0; policy drop; }";
        for text in ["add table inet strict", chain] {
            checked(node.ns.command("nft").arg(text)).await?;
        }
        named(node, "agent", &["chain forward of table inet strict drops forwarded packets of pods", "run: nft "])
            .await?;
        run(node, "nft delete table inet strict").await?;
        gone(node, "agent").await
    });
}

/// 6: Docker sets the policy of FORWARD. Nothing has to be named, because the agent lets pods through.
#[test]
fn a_policy_of_forward_as_docker_sets_it_is_healed() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        for node in &lab.nodes {
            run(node, "iptables -w 20 -P FORWARD DROP").await?;
        }
        lab.reach_all().await?;
        for node in &lab.nodes {
            gone(node, "agent").await?;
        }
        Ok(())
    });
}

/// 8: a real systemd-networkd with a configuration that matches every link.
#[test]
fn systemd_networkd_manages_the_device() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        // The lab has a mount namespace of its own, so nothing of this reaches the machine.
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", "mode=755", "weft-test", "/run/systemd"]).status()?;
        ensure!(mounted.success(), "mount /run/systemd");
        fs::create_dir_all("/run/systemd/network")?;
        fs::write(
            "/run/systemd/network/10-all.network",
            "[Match]\nName=flannel.1\n[Network]\nLinkLocalAddressing=no\n",
        )?;
        let node = &lab.nodes[0];
        gone(node, "managed").await?;
        // Where /sys is read-only, as in a container, networkd does not wait for udev.
        let mut networkd = node.ns.command("sh");
        networkd.args(["-ec", "mount -o remount,ro /sys; exec /lib/systemd/systemd-networkd"]);
        let mut networkd = networkd.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        named(node, "managed", &["systemd-networkd manages flannel.1", "Unmanaged=yes"]).await?;
        networkd.kill().await?;
        Ok(())
    });
}

/// 80: a script or a network daemon removes what the agent writes, again and again.
#[test]
fn another_program_deletes_a_route_again_and_again() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        let node = &lab.nodes[0];
        gone(node, "agent").await?;
        let routes = run(node, "ip -o route show proto 90").await?;
        let route = routes.split(' ').next().filter(|route| !route.is_empty()).context("a route of the agent")?;
        let line = format!("while :; do ip route del {route} 2>/dev/null; sleep 0.2; done");
        let mut other = node.ns.command("sh").args(["-c", &line]).spawn()?;
        let evidence = format!("another program repeatedly deletes or replaces route {route}");
        named(node, "agent", &[&evidence, "`ip monitor link address route neigh`", "cron"]).await?;
        other.kill().await?;
        gone(node, "agent").await
    });
}

/// The kernel keeps what the agent wrote for vxlan when the uplink is down, so nothing but the link shows why no packet leaves.
#[test]
fn the_uplink_is_down() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        let node = &lab.nodes[0];
        gone(node, "agent").await?;
        run(node, "ip link set eth0 down").await?;
        named(node, "agent", &["uplink: eth0 is down", "ip link set eth0 up"]).await?;
        run(node, "ip link set eth0 up").await?;
        gone(node, "agent").await
    });
}

/// 41, 64 to 66: the links of pods that the bridge plugin made.
#[test]
fn pods_lose_their_bridge() {
    on_this_thread(async {
        let pods = Pods { count: 2, wiring: Wiring::Bridge };
        let lab = Lab::start(&LabOptions { pods, ..options() }).await?;
        let node = &lab.nodes[0];
        lab.reach_all().await?;
        let ports = run(node, "ip -o link show master cni0").await?;
        let port = ports.split(' ').nth(1).and_then(|name| name.split('@').next()).context("a port of cni0")?;
        gone(node, "bridge").await?;
        run(node, &format!("ip link set {port} nomaster")).await?;
        named(node, "bridge", &["1 veth pair of a pod is connected to no bridge", port]).await?;
        run(node, "ip link add br9 up type bridge").await?;
        run(node, &format!("ip link set {port} master br9")).await?;
        let back = format!("ip link set {port} master cni0");
        named(node, "bridge", &[&format!("{port} leads to a pod and is in br9"), &back]).await?;
        run(node, &back).await?;
        gone(node, "bridge").await?;
        run(node, &format!("bridge link set dev {port} state 0")).await?;
        named(node, "bridge", &["of cni0 forwards no packets", port]).await?;
        run(node, &format!("bridge link set dev {port} state 3")).await?;
        gone(node, "bridge").await?;
        run(node, "ip link set cni0 mtu 1300").await?;
        named(node, "mtu", &["cni0 has MTU 1300", "ip link set cni0 mtu 1450"]).await?;
        run(node, "ip link set cni0 mtu 1450").await?;
        gone(node, "mtu").await?;
        lab.reach_all().await?;
        run(node, "ip link del cni0").await?;
        named(node, "bridge", &["2 veth pairs of pods", port, "delete the pods"]).await
    });
}

/// 131: the range of services was chosen without a look at the networks of the nodes.
#[test]
fn services_have_addresses_of_a_network_of_the_node() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        let node = &lab.nodes[0];
        run(node, "ip link add br8 up type bridge").await?;
        run(node, "ip address add 10.96.5.1/16 dev br8").await?;
        gone(node, "services").await?;
        for line in [
            "table ip kube-proxy",
            "chain ip kube-proxy service-A",
            "map ip kube-proxy service-ips { type ipv4_addr . inet_proto . inet_service : verdict; }",
            "element ip kube-proxy service-ips { 10.96.0.1 . tcp . 443 : goto service-A }",
        ] {
            run(node, &format!("nft add {line}")).await?;
        }
        gone(node, "services").await?;
        let said = async || {
            let mut command = node.ns.command(exe::weft_exe());
            command.args(["doctor", "--only", "services"]).arg(format!("--socket={}", node.socket().display()));
            checked(command.arg(format!("--subnet-file={}", node.subnet_file().display()))).await
        };
        let words = "services such as 10.96.0.1 are inside 10.96.0.0/16, the network of br8";
        let text = said().await?;
        ensure!(text.contains(words), "{text}");
        run(node, "ip address del 10.96.5.1/16 dev br8").await?;
        let text = said().await?;
        ensure!(!text.contains("whether a host has the address of a service"), "{text}");
        Ok(())
    });
}

/// 9: the kernel does not let two devices receive one VNI on one port.
#[test]
fn another_vxlan_device_with_the_same_vni_and_port() {
    on_this_thread(async {
        let mut lab = Lab::build(&options()).await?;
        run(&lab.nodes[0], "ip link add vx0 up type vxlan id 1 dstport 8472").await?;
        named(&lab.nodes[0], "device", &["vx0", "VNI 1 on UDP port 8472", "ip link del vx0"]).await?;
        for node in &mut lab.nodes {
            node.start()?;
        }
        named(&lab.nodes[0], "device", &["vx0", "ip link del vx0"]).await?;
        named(&lab.nodes[0], "agent", &["flannel.1"]).await?;
        run(&lab.nodes[0], "ip link del vx0").await?;
        lab.nodes[0].ready().await?;
        gone(&lab.nodes[0], "device").await
    });
}

/// 22: the agent cannot replace the file.
#[test]
fn subnet_env_cannot_be_written() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        let node = &lab.nodes[0];
        let file = node.subnet_file();
        fs::remove_file(&file)?;
        fs::create_dir_all(file.join("occupied"))?;
        let path = file.display().to_string();
        named(node, "subnet-file", &[&path, "cannot be used", "remove the file"]).await?;
        named(node, "agent", &[&path]).await
    });
}

/// 23: a hardening script switched IPv6 off for links that are made later.
#[test]
fn ipv6_is_disabled_on_a_dual_stack_node() {
    on_this_thread(async {
        let lab = Lab::start(&LabOptions { ipv6: true, ..options() }).await?;
        let node = &lab.nodes[0];
        gone(node, "ipv6").await?;
        node.ns.sysctl(&["ipv6/conf/default/disable_ipv6=1"])?;
        named(node, "ipv6", &["net.ipv6.conf.default.disable_ipv6", "sysctl -w"]).await?;
        node.ns.sysctl(&["ipv6/conf/default/disable_ipv6=0", "ipv6/conf/cni0/disable_ipv6=1"])?;
        named(node, "ipv6", &["net.ipv6.conf.cni0.disable_ipv6=0"]).await
    });
}

/// 12, 13: a VPN masquerades what leaves by the tunnel, and a script flushed the rules of kube-proxy.
#[test]
fn pods_are_hidden_and_services_are_flushed() {
    on_this_thread(async {
        let lab = Lab::start(&options()).await?;
        let node = &lab.nodes[0];
        // The lab makes its ports without it.
        run(node, "bridge link set dev pod1 hairpin on").await?;
        for check in ["masquerade", "services", "firewall"] {
            gone(node, check).await?;
        }
        for program in ["iptables-nft", "iptables-legacy"] {
            // Without -w, it fails if a program of another test has the lock, which is a file of the machine.
            let waiting = format!("{program} -w 20");
            run(node, &format!("{waiting} -t nat -A POSTROUTING -o flannel.1 -j MASQUERADE")).await?;
            let remedy = format!("{program} -t nat -D POSTROUTING -o flannel.1 -j MASQUERADE");
            named(node, "masquerade", &["-A POSTROUTING -o flannel.1 -j MASQUERADE", &remedy]).await?;
            run(node, &remedy.replacen(program, &waiting, 1)).await?;
            gone(node, "masquerade").await?;
        }
        let table = "table ip vpn { chain hide { masquerade; }; chain out { type nat hook postrouting priority srcnat; \
                     oifname { \"flannel.1\", \"tun0\" } jump hide; }; }";
        checked(node.ns.command("nft").arg(table)).await?;
        named(node, "masquerade", &["the chain ip vpn out of nftables", "nft -a list chain ip vpn out"]).await?;
        run(node, "nft delete table ip vpn").await?;
        gone(node, "masquerade").await?;
        let program = lab.dir().join("kube-proxy");
        std::os::unix::fs::symlink("/bin/sleep", &program)?;
        let mut process = node.ns.command(&program).arg("600").spawn()?;
        run(node, "iptables-nft -t nat -N KUBE-SERVICES").await?;
        run(node, "iptables-nft -t nat -A PREROUTING -j KUBE-SERVICES").await?;
        gone(node, "services").await?;
        run(node, "iptables-nft -t nat -F").await?;
        named(node, "services", &["kube-proxy (pid ", "KUBE-SERVICES", "restart kube-proxy"]).await?;
        process.kill().await?;
        gone(node, "services").await
    });
}

/// 113: whoever asks later must hear that the agent was away, and not because somebody stopped it.
#[test]
fn an_agent_that_was_killed_is_recorded_by_the_next_one() {
    on_this_thread(async {
        let mut lab = Lab::build(&options()).await?;
        let node = &mut lab.nodes[0];
        let dir = node.socket().parent().context("a directory")?.display().to_string();
        // As /run of a machine, which a boot empties. The lab has a mount namespace of its own.
        let mount = format!("cp -a {dir} {dir}.kept && mount -t tmpfs weft-test {dir} && cp -a {dir}.kept/. {dir}");
        ensure!(Command::new("sh").args(["-ec", &mount]).status()?.success(), "{mount}");
        node.start()?;
        node.ready().await?;
        let times = async |node: &Node, command: &str| -> Result<usize> {
            let mut asked = node.ns.command(exe::weft_exe());
            let text = checked(asked.arg(command).arg(format!("--socket={}", node.socket().display()))).await?;
            // `weft status` breaks lines.
            let words: Vec<&str> = text.split_whitespace().collect();
            Ok(words.join(" ").matches("the agent before this one was killed, crashed, or was ended by").count())
        };
        // The next one does not record it again, and still shows it.
        for (signal, is_said) in [(Signal::SIGTERM, 0), (Signal::SIGKILL, 1), (Signal::SIGTERM, 1)] {
            node.stop(signal).await?;
            node.start()?;
            node.ready().await?;
            for command in ["status", "history"] {
                ensure!(times(node, command).await? == is_said, "{command} after {signal}");
            }
        }
        gone(node, "agent").await?;
        node.stop(Signal::SIGTERM).await?;
        ensure!(Command::new("umount").args(["-l", &dir]).status()?.success(), "umount");
        Ok(())
    });
}
