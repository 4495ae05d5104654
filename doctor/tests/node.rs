// SPDX-License-Identifier: Apache-2.0
//! What `weft doctor` finds: each test makes a network namespace of its own, provokes one fault in it for real, and repairs it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "these are tests")]

use std::fs;
use std::net::UdpSocket;
use std::path::Path;
use std::process::Command;
use std::thread;

use nix::sched::{CloneFlags, unshare};
use weft_doctor::examine_node;
use weft_doctor::node::{AgentAnswer, NodeSources};
use weft_doctor::node_findings::NodeFinding;

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

fn ip(args: &str) {
    let done = Command::new("ip").args(args.split(' ')).output().unwrap();
    assert!(done.status.success(), "ip {args}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Runs one check.
fn doctor(subnet_file: &Path, check: &str) -> Vec<NodeFinding> {
    let sources = NodeSources {
        subnet_file: subnet_file.to_owned(),
        socket: "weft.sock".into(),
        port: 8472,
        agent: AgentAnswer::None,
    };
    examine_node(&sources, &[check.to_owned()]).unwrap().findings
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
            let remedy = only_finding(file, "port", &[&pid, "UDP port 8472"]);
            assert!(remedy.contains(&pid), "{remedy}");
            drop(socket);
        }
        ip("link add flannel.1 up type vxlan id 1 dstport 8472");
        assert_eq!(doctor(file, "port"), []);
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
        ip("addr add 10.5.7.1/24 dev cni0");
        assert_eq!(doctor(file, "bridge-subnet"), []);
    });
}

#[test]
fn a_bridge_whose_mtu_is_larger_than_that_of_the_tunnel_is_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        ip("link add cni0 mtu 1500 type bridge");
        only_finding(file, "mtu", &["1500", "1450"]);
        ip("link set cni0 mtu 1450");
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
        let remedy = only_finding(file, "br-netfilter", &["cni0"]);
        assert!(remedy.contains("modprobe br_netfilter"), "{remedy}");
        if sysctl.exists() {
            fs::write(sysctl, "1").unwrap();
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
    });
}
