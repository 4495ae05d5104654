// SPDX-License-Identifier: Apache-2.0
//! What `weft doctor` finds: each test makes a network namespace of its own, provokes one fault in it for real, and repairs it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "these are tests")]

#[path = "node/direct.rs"]
mod direct;
#[path = "node/files.rs"]
mod files;
#[path = "node/firewall.rs"]
mod firewall;
#[path = "node/links.rs"]
mod links;
#[path = "node/memory.rs"]
mod memory;
#[path = "node/networks.rs"]
mod networks;
#[path = "node/others.rs"]
mod others;
#[path = "node/pods.rs"]
mod pods;
#[path = "node/ports.rs"]
mod ports;
#[path = "node/queues.rs"]
mod queues;
#[path = "node/services.rs"]
mod services;
#[path = "node/sets.rs"]
mod sets;
#[path = "node/translations.rs"]
mod translations;
#[path = "node/underlay.rs"]
mod underlay;

use std::fs;
use std::net::UdpSocket;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Instant;

use nix::sched::{CloneFlags, unshare};
use weft_doctor::examine_node;
use weft_doctor::finding::NodeFinding;
use weft_doctor::sources::NodeSources;

const ENV: &str = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.7.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
const ENV_V6: &str = "FLANNEL_IPV6_NETWORK=fd00:5::/48\nFLANNEL_IPV6_SUBNET=fd00:5:0:7::1/64\n";

/// Runs a test in a thread with a network namespace of its own, which ends with the thread.
fn in_namespace(test: impl FnOnce(&Path) + Send + 'static) {
    let run = move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let dir = tempfile::tempdir().unwrap();
        test(&dir.path().join("subnet.env"));
    };
    thread::spawn(run).join().unwrap();
}

/// Waits for a condition. Another test may be starting a program, and its copy of this process has all sockets until then.
fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed().as_secs() < 120, "{what}");
        thread::yield_now();
    }
}

fn ip(args: &str) {
    let done = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(done.status.success(), "ip {args}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Runs one check.
fn doctor(subnet_file: &Path, check: &str) -> Vec<NodeFinding> {
    examine_node(&sources(subnet_file), &[check.to_owned()]).unwrap().findings
}

fn sources(subnet_file: &Path) -> NodeSources {
    let (subnet_file, socket) = (subnet_file.to_owned(), "weft.sock".into());
    NodeSources { subnet_file, socket, port: 8472, ..NodeSources::default() }
}

/// Runs one check with these sources.
fn doctor_with(sources: &NodeSources, check: &str) -> Vec<NodeFinding> {
    examine_node(sources, &[check.to_owned()]).unwrap().findings
}

/// Returns the only finding of one check with these sources as one text, which must contain each of these words.
fn only_text(sources: &NodeSources, check: &str, words: &[&str]) -> String {
    let findings = doctor_with(sources, check);
    assert_eq!(findings.len(), 1, "{findings:?}");
    let text = format!("{}\n{}", findings[0].evidence, findings[0].remedy);
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
    text
}

/// The links of two pods on this host, and their other ends.
const TWO_PODS: [(&str, &str); 2] = [("veth0a1b2c3d", "a0"), ("veth0a1b2c3e", "a1")];

/// Makes the bridge with the links of two pods, which are both in one other namespace.
fn two_pods() -> OtherNamespace {
    let pods = OtherNamespace::new();
    ip("link add cni0 up type bridge");
    ip("addr add 10.5.7.1/24 dev cni0");
    for (name, inside) in TWO_PODS {
        ip(&format!("link add {name} up type veth peer name {inside} netns {}", pods.pid()));
        ip(&format!("link set {name} master cni0"));
    }
    pods
}

/// Another network namespace, which ends with this value.
struct OtherNamespace(std::process::Child);

impl OtherNamespace {
    fn new() -> OtherNamespace {
        OtherNamespace::with_variables(&[])
    }

    /// Makes one whose process has these variables in its environment.
    fn with_variables(variables: &[(&str, &str)]) -> OtherNamespace {
        let mut sleep = Command::new("setpriv");
        sleep.envs(variables.iter().copied());
        let child = sleep.args(["--pdeathsig", "KILL", "unshare", "-n", "sleep", "600"]).spawn().unwrap();
        let own = fs::read_link("/proc/thread-self/ns/net").unwrap();
        let theirs = format!("/proc/{}/ns/net", child.id());
        let comm = format!("/proc/{}/comm", child.id());
        until("the other namespace", || {
            fs::read_link(&theirs).is_ok_and(|netns| netns != own)
                && fs::read_to_string(&comm).is_ok_and(|name| name == "sleep\n")
        });
        OtherNamespace(child)
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Runs a command there.
    fn run(&self, line: &str) {
        shell(&format!("nsenter -t {} -n {line}", self.pid()));
    }
}

impl Drop for OtherNamespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs one check, which must find one thing whose evidence contains each of these words. Returns the remedy.
fn only_finding(subnet_file: &Path, check: &str, words: &[&str]) -> String {
    let findings = doctor(subnet_file, check);
    assert_eq!(findings.len(), 1, "{findings:?}");
    for word in words {
        assert!(findings[0].evidence.contains(word), "{word}: {findings:?}");
    }
    findings[0].remedy.clone()
}

#[test]
fn a_program_on_the_port_of_the_tunnel_is_named_and_a_vxlan_device_is_not() {
    in_namespace(|file| {
        assert_eq!(doctor(file, "port"), []);
        for address in ["0.0.0.0:8472", "[::]:8472"] {
            let socket = UdpSocket::bind(address).unwrap();
            let pid = format!("(pid {})", std::process::id());
            let mut findings = Vec::new();
            until("only this process to have the socket", || {
                findings = doctor(file, "port");
                findings.len() == 1
            });
            assert!(findings[0].evidence.contains("UDP port 8472"), "{findings:?}");
            assert!(findings[0].evidence.contains(&pid) && findings[0].remedy.contains(&pid), "{findings:?}");
            drop(socket);
            let is_open = |file: &str| fs::read_to_string(file).unwrap().contains(":2118 ");
            until("the socket to be closed", || {
                !["/proc/thread-self/net/udp", "/proc/thread-self/net/udp6"].into_iter().any(is_open)
            });
        }
        ip("link add flannel.1 up type vxlan id 1 dstport 8472");
        assert_eq!(doctor(file, "port"), []);
    });
}

#[test]
fn only_the_port_of_the_own_tunnel_matters() {
    in_namespace(|file| {
        let usual = UdpSocket::bind("0.0.0.0:8472").unwrap();
        let host_gw = NodeSources { backend: "host-gw".to_owned(), ..sources(file) };
        assert_eq!(doctor_with(&host_gw, "port"), [], "there is no tunnel");
        let vxlan = NodeSources { backend: "vxlan".to_owned(), ..sources(file) };
        assert_ne!(doctor_with(&vxlan, "port"), []);
        ip("link add flannel.1 type vxlan id 1 dstport 4789");
        assert_eq!(doctor_with(&vxlan, "port"), [], "the device has another port");
        let used = UdpSocket::bind("0.0.0.0:4789").unwrap();
        let findings = doctor_with(&vxlan, "port");
        assert!(findings.iter().any(|found| found.evidence.contains("UDP port 4789")), "{findings:?}");
        drop((usual, used));
    });
}

#[test]
fn a_bridge_with_an_address_of_an_old_subnet_is_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        ip("link add cni0 mtu 1450 type bridge");
        assert_eq!(doctor(file, "bridge-subnet"), [], "a bridge without addresses");
        ip("addr add 10.5.9.1/24 dev cni0");
        let remedy = only_finding(file, "bridge-subnet", &["10.5.9.1", "10.5.7.0/24"]);
        assert!(remedy.contains("ip link del cni0"), "{remedy}");
        assert_eq!(doctor(file, "network"), [], "no other check calls the bridge of the pods a foreign network");
        ip("addr add 10.5.7.1/24 dev cni0");
        assert_eq!(doctor(file, "bridge-subnet"), []);
    });
}

#[test]
fn a_bridge_whose_mtu_is_larger_than_that_of_the_tunnel_is_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        ip("link add cni0 type bridge");
        ip("link add veth0a1b2c3d mtu 1500 type veth peer name far0");
        ip("link set veth0a1b2c3d master cni0");
        let remedy = only_finding(file, "mtu", &["cni0 has MTU 1500", "1450"]);
        assert!(remedy.contains("ip link del cni0"), "{remedy}");
        ip("link set veth0a1b2c3d mtu 1450");
        assert_eq!(doctor(file, "mtu"), []);
    });
}

/// The kernel gives a bridge the smallest MTU of its ports, and 1500 when the last pod has left.
#[test]
fn a_bridge_whose_last_pod_has_left_has_no_mtu_of_its_own() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        ip("link add cni0 mtu 1450 type bridge");
        ip("link add veth0a1b2c3d mtu 1450 type veth peer name far0");
        ip("link set veth0a1b2c3d master cni0");
        assert_eq!(doctor(file, "mtu"), []);
        ip("link del veth0a1b2c3d");
        assert!(shell_output("ip link show cni0").contains("mtu 1500"), "the kernel has changed it");
        assert_eq!(doctor(file, "mtu"), []);
    });
}

#[test]
fn a_bridge_whose_packets_bypass_the_rules_is_found() {
    in_namespace(|file| {
        let sysctl = Path::new("/proc/sys/net/bridge/bridge-nf-call-iptables");
        if sysctl.exists() {
            fs::write(sysctl, "0").unwrap();
        }
        assert_eq!(doctor(file, "br-netfilter"), [], "a node without the bridge");
        ip("link add cni0 type bridge");
        assert_eq!(doctor(file, "br-netfilter"), [], "no rules carry services");
        shell("nft add table ip kube-proxy");
        let remedy = only_finding(file, "br-netfilter", &["cni0"]);
        assert!(remedy.contains("modprobe br_netfilter"), "{remedy}");
        if sysctl.exists() {
            fs::write(sysctl, "1").unwrap();
            assert_eq!(doctor(file, "br-netfilter"), []);
            let of_ipv6 = sysctl.with_file_name("bridge-nf-call-ip6tables");
            fs::write(&of_ipv6, "0").unwrap();
            assert_eq!(doctor(file, "br-netfilter"), [], "pods have no IPv6 addresses");
            fs::write(file, format!("{ENV_V6}{ENV}")).unwrap();
            let remedy = only_finding(file, "br-netfilter", &["bridge-nf-call-ip6tables is 0"]);
            shell(remedy.split(';').next().unwrap().rsplit("&& ").next().unwrap());
            assert_eq!(doctor(file, "br-netfilter"), []);
        }
    });
}

#[test]
fn ipv6_that_is_switched_off_is_found_only_with_an_ipv6_subnet() {
    in_namespace(|file| {
        let set = |value: &str| fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", value).unwrap();
        set("1");
        fs::write(file, ENV).unwrap();
        assert_eq!(doctor(file, "ipv6"), []);
        fs::write(file, format!("{ENV_V6}{ENV}")).unwrap();
        only_finding(file, "ipv6", &["net.ipv6.conf.default.disable_ipv6"]);
        set("0");
        assert_eq!(doctor(file, "ipv6"), []);
        ip("link add flannel-v6.1 type bridge");
        fs::write("/proc/sys/net/ipv6/conf/flannel-v6.1/disable_ipv6", "1").unwrap();
        only_finding(file, "ipv6", &["net.ipv6.conf.flannel-v6/1.disable_ipv6"]);
    });
}

#[test]
fn a_subnet_file_that_cannot_be_read_or_written_is_found() {
    in_namespace(|file| {
        assert_eq!(doctor(file, "subnet-file"), [], "a node before the first start");
        fs::write(file, "FLANNEL_MTU=1450\n").unwrap();
        only_finding(file, "subnet-file", &["subnet.env", "names no valid subnet"]);
        fs::write(file, ENV).unwrap();
        assert_eq!(doctor(file, "subnet-file"), []);
        only_finding(file.parent().unwrap(), "subnet-file", &["cannot be used: Is a directory"]);
        let dir = file.parent().unwrap();
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        for args in [vec!["--make-rprivate", "/"], vec!["-t", "tmpfs", "-o", "ro", "none", dir.to_str().unwrap()]] {
            assert!(Command::new("mount").args(args).status().unwrap().success());
        }
        only_finding(file, "subnet-file", &["cannot be written", "Read-only"]);
        assert!(Command::new("umount").arg(dir).status().unwrap().success());
        shell(&format!("mount -t tmpfs -o size=64k none {}", dir.display()));
        assert_eq!(doctor(file, "subnet-file"), []);
        assert!(fs::write(dir.join("log"), [0; 100_000]).is_err(), "this fills the file system");
        only_finding(file, "subnet-file", &["cannot be written", "is full"]);
        shell(&format!("umount {}", dir.display()));
    });
}

#[test]
fn another_vxlan_device_is_found_by_its_vni_and_port() {
    in_namespace(|file| {
        ip("link add vx0 type vxlan id 7 dstport 8472");
        assert_eq!(doctor(file, "device"), [], "another VNI");
        ip("link add vx1 type vxlan id 1 dstport 8472");
        let remedy = only_finding(file, "device", &["vx1", "VNI 1 on UDP port 8472"]);
        assert!(remedy.contains("ip link del vx1"), "{remedy}");
        ip("link add flannel.7 type vxlan id 7 dstport 4789");
        assert_eq!(doctor(file, "device"), [], "the device of weft has another VNI and port");
        ip("link add cilium_vxlan type vxlan external dstport 4789");
        only_finding(file, "device", &["cilium_vxlan", "every VNI on UDP port 4789"]);
    });
}

#[test]
fn routes_and_networks_inside_network_are_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        for line in
            ["link add eth0 up type bridge", "addr add 192.0.2.1/24 dev eth0", "route add 10.5.9.0/24 via 192.0.2.9"]
        {
            ip(line);
        }
        assert_eq!(doctor(file, "network"), [], "flannel may have left the route");
        ip("route add 10.5.128.0/17 via 192.0.2.9 proto static");
        let remedy = only_finding(file, "network", &["10.5.128.0/17", "eth0", "static"]);
        assert!(remedy.contains("ip route del 10.5.128.0/17 dev eth0"), "{remedy}");
        ip("route del 10.5.128.0/17");
        ip("addr add 10.5.200.1/20 dev eth0");
        only_finding(file, "network", &["eth0 is connected to 10.5.192.0/20"]);
        ip("addr flush dev eth0");
        ip("addr add 10.200.0.1/8 dev eth0");
        only_finding(file, "network", &["eth0 is connected to 10.0.0.0/8"]);
    });
}

#[test]
fn a_strict_rp_filter_is_found_if_nodes_are_reached_over_two_links() {
    in_namespace(|file| {
        let lossy = NodeSources { unreachable: 1, ..sources(file) };
        for link in ["eth0", "flannel.1"] {
            ip(&format!("link add {link} up type bridge"));
            fs::write(format!("/proc/sys/net/ipv4/conf/{link}/rp_filter"), "0").unwrap();
        }
        fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "0").unwrap();
        ip("route add 10.5.8.0/24 dev flannel.1 proto 90");
        ip("route add 10.5.9.0/24 dev eth0 proto 90");
        assert_eq!(doctor_with(&lossy, "rp-filter"), []);
        fs::write("/proc/sys/net/ipv4/conf/eth0/rp_filter", "1").unwrap();
        only_text(&lossy, "rp-filter", &["over 2 links", "rp_filter of eth0", "net/ipv4/conf/eth0/rp_filter=2"]);
        assert_eq!(doctor(file, "rp-filter"), [], "all peers are reached, as with DirectRouting of vxlan");
        fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "2").unwrap();
        assert_eq!(doctor_with(&lossy, "rp-filter"), [], "the larger value counts");
    });
}

fn shell(line: &str) {
    shell_output(line);
}

/// Runs a line of the shell, and returns what it prints.
fn shell_output(line: &str) -> String {
    let done = Command::new("sh").args(["-ec", line]).output().unwrap();
    assert!(done.status.success(), "{line}: {}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8_lossy(&done.stdout).into_owned()
}

#[test]
fn a_second_masquerade_is_found_in_every_flavour_of_iptables() {
    in_namespace(|file| {
        fs::write(file, format!("{ENV_V6}{ENV}")).unwrap();
        ip("link add flannel.1 type vxlan id 1 dstport 8472");
        assert_eq!(doctor(file, "masquerade"), []);
        assert_eq!(fs::read_to_string("/proc/thread-self/net/ip_tables_names").unwrap(), "", "nothing was made");
        for program in ["iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy"] {
            shell(&format!("{program} -t nat -A POSTROUTING -o eth0 -j MASQUERADE"));
            assert_eq!(doctor(file, "masquerade"), [], "another link");
            shell(&format!("{program} -t nat -A POSTROUTING -o flannel.1 -j MASQUERADE"));
            let remedy = only_finding(file, "masquerade", &[program, "-o flannel.1 -j MASQUERADE"]);
            let command = remedy.split('`').nth(1).unwrap();
            shell(command);
            assert_eq!(doctor(file, "masquerade"), [], "the command of the remedy removes the rule");
        }
    });
}

/// What a rule with a rate limit does is not known, so the rules behind it may never see the packets.
#[test]
fn a_masquerade_of_nftables_behind_a_rule_that_may_accept_is_no_finding() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        ip("link add flannel.1 type vxlan id 1 dstport 8472");
        ip("link set flannel.1 up");
        ip("route add 10.5.9.0/24 dev flannel.1 proto 90");
        shell(
            "nft 'table ip vpn { chain out { type nat hook postrouting priority srcnat; limit rate 1/second accept; masquerade; }; }'",
        );
        assert_eq!(doctor(file, "masquerade"), []);
        shell("nft flush chain ip vpn out && nft add rule ip vpn out masquerade");
        only_finding(file, "masquerade", &["the chain ip vpn out of nftables"]);
    });
}

/// Starts a process with this name, which does nothing.
fn named_process(file: &Path, name: &str) -> std::process::Child {
    let program = file.with_file_name(name);
    std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
    let mut process = Command::new("setpriv");
    let process = process.args(["--pdeathsig", "KILL"]).arg(&program).arg("600").spawn().unwrap();
    let comm = format!("/proc/{}/comm", process.id());
    until("the process to start", || fs::read_to_string(&comm).unwrap() == format!("{name}\n"));
    process
}

fn kube_proxy(file: &Path) -> std::process::Child {
    named_process(file, "kube-proxy")
}

#[test]
fn kube_proxy_without_its_rules_is_found() {
    in_namespace(|file| {
        assert_eq!(doctor(file, "services"), []);
        let mut process = kube_proxy(file);
        let pid = format!("kube-proxy (pid {})", process.id());
        only_finding(file, "services", &[&pid, "KUBE-SERVICES"]);
        shell("iptables-nft -t nat -N KUBE-SERVICES && iptables-nft -t nat -A PREROUTING -j KUBE-SERVICES");
        assert_eq!(doctor(file, "services"), []);
        shell("iptables-nft -t nat -F PREROUTING");
        only_finding(file, "services", &[&pid]);
        shell("nft add table ip kube-proxy");
        assert_eq!(doctor(file, "services"), []);
        process.kill().unwrap();
        process.wait().unwrap();
    });
}

/// The limit belongs to the whole machine, so a test does not reach it. The decision has a unit test.
#[test]
fn the_entries_of_the_connection_tracking_table_are_counted() {
    in_namespace(|file| {
        let fill = || weft_doctor::facts::read(&sources(file)).unwrap().conntrack.unwrap();
        let before = fill();
        assert_eq!(before.entries, 0);
        shell("conntrack -I -s 192.0.2.1 -d 192.0.2.3 -p udp --sport 1 --dport 2 -t 600");
        assert_eq!((fill().entries, fill().max), (1, before.max));
    });
}
