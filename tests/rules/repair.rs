// SPDX-License-Identifier: Apache-2.0
//! Rules that another program removes are restored, correct rules are not written again, and there is no moment without them.

use std::path::Path;
use std::time::Instant;

use nix::sys::signal::Signal;
use weft::firewall::nft::table::head;
use weft::firewall::nft::{self, Nft};
use weft::firewall::packet_filter::PacketFilter;
use weft::instance::Instance;
use weft_lab::{BackendKind, LabOptions, wait_for};

use crate::exe::weft_exe;
use crate::flanneld::flanneld;
use crate::packets::inside;
use crate::program::write_program;
use crate::site::{Family, PATIENCE, Site, on_this_thread, options, straight};

async fn running(flags: &[&str], flavour: Option<&str>) -> Site {
    let flags: Vec<&str> = ["--ip-masq"].iter().chain(flags).copied().collect();
    let mut site = Site::build(BackendKind::Vxlan, &flags).await;
    if let Some(flavour) = flavour {
        site.hint(flavour).await;
    }
    site.start().await;
    masqueraded(&site);
    site
}

fn masqueraded(site: &Site) {
    for family in Family::BOTH {
        site.until_seen(&straight("n1-p1", "out"), family, "n1");
    }
}

/// The next resync is an hour away, so only the notifications of nftables can cause the repair.
#[test]
fn rules_of_nftables_are_restored_after_a_notification() {
    on_this_thread(async {
        let site = running(&["--firewall=nft", "--iptables-resync=3600", "--resync=1h"], None).await;
        for damage in ["flush ruleset", "delete table ip weft", "flush table ip6 weft", "flush table ip weft"] {
            // The name of the table depends on the subnet file.
            let weft = table(&site).await;
            site.nft("n1", &damage.replace("weft", &weft)).await;
            masqueraded(&site);
        }
    });
}

/// Resync and audit are an hour away, so only the notifications of nftables can cause the repair.
#[test]
fn rules_of_nftables_are_restored_each_time_they_are_removed() {
    on_this_thread(async {
        let site = running(&["--firewall=nft", "--iptables-resync=3600", "--resync=1h"], None).await;
        let instance = Instance::new(&site.lab.nodes[0].subnet_file());
        for round in 1..=8 {
            inside("n1", || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let gone = async { Nft::new(&instance).remove().await.unwrap() };
                let mut netlink = nft::connection::open().unwrap();
                assert!(runtime.block_on(gone), "the rules were there");
                let start = Instant::now();
                while head(&mut netlink, weft_subnet::cidr::Family::V4, &instance.name).unwrap().is_none() {
                    assert!(start.elapsed() < PATIENCE, "not restored after removal {round}");
                    std::thread::yield_now();
                }
            });
        }
        masqueraded(&site);
    });
}

async fn table(site: &Site) -> String {
    let tables = site.nft("n1", "list tables").await;
    let name = tables.lines().find_map(|line| line.strip_prefix("table ip ")).filter(|name| name.starts_with("weft"));
    name.unwrap_or_else(|| panic!("weft has no table: {tables}")).to_owned()
}

fn iptables_is_restored(flavour: &'static str) {
    on_this_thread(async move {
        let site = running(&["--firewall=iptables", "--iptables-resync=1"], Some(flavour)).await;
        for six in ["", "6"] {
            // Without the rules in FORWARD, packets pass all the same: the policy of the chain accepts them.
            let save = format!("ip{six}tables-{flavour}-save | grep '^-A' || true");
            let saved = async || site.run("n1", &["sh", "-c", &save]).await;
            let complete = saved().await;
            assert!(complete.contains("-A FORWARD -j WEFT"), "{complete}");
            for damage in ["-t nat -F", "-t nat -F POSTROUTING", "-F FORWARD"] {
                site.on_nodes(&format!("ip{six}tables-{flavour} -w 20 {damage}")).await;
                wait_for("the rules to come back", PATIENCE, async || saved().await == complete).await.unwrap();
                masqueraded(&site);
            }
        }
    });
}

#[test]
fn rules_of_iptables_nft_are_restored_at_the_resync() {
    iptables_is_restored("nft");
}

#[test]
fn rules_of_iptables_legacy_are_restored_at_the_resync() {
    iptables_is_restored("legacy");
}

/// Packets are masqueraded while the agent restarts, and an open connection continues.
fn a_connection_continues_during_a_restart(flags: &'static [&'static str], flavour: Option<&'static str>) {
    on_this_thread(async move {
        let mut site = running(flags, flavour).await;
        let mut connections = Vec::new();
        for family in Family::BOTH {
            connections.push(Connection::open(&site, family));
        }
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            let before = written(&site).await;
            site.lab.nodes[0].stop(signal).await.unwrap();
            connections.iter_mut().for_each(Connection::continues);
            masqueraded_at_once(&site);
            site.lab.nodes[0].start().unwrap();
            until(&site, async |site| {
                site.lab.nodes[0].status_as::<weft::observe::status::Status>().await.is_ok_and(|status| status.ready)
            })
            .await;
            connections.iter_mut().for_each(Connection::continues);
            assert_eq!(written(&site).await, before, "a restart writes nothing");
        }
    });
}

#[test]
fn a_connection_continues_with_nft() {
    a_connection_continues_during_a_restart(&["--firewall=nft"], None);
}

#[test]
fn a_connection_continues_with_iptables() {
    a_connection_continues_during_a_restart(&["--firewall=iptables"], Some("legacy"));
}

/// Waits for a condition. Until then, every datagram is masqueraded.
async fn until(site: &Site, reached: impl AsyncFn(&Site) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let done = reached(site).await;
        masqueraded_at_once(site);
        if done {
            return;
        }
        assert!(Instant::now() < deadline, "not reached: {}", site.lab.logs(30));
    }
}

/// Asserts that one datagram is masqueraded, without a second attempt.
fn masqueraded_at_once(site: &Site) {
    for family in Family::BOTH {
        assert_eq!(site.probe(&straight("n1-p1", "out"), family), "n1");
    }
}

/// Returns the rules of nftables with their handles, and those of iptables-legacy. A rule that is written again has another handle.
async fn written(site: &Site) -> String {
    site.run("n1", &["sh", "-ec", "nft -a list ruleset 2>/dev/null | sed 's/packets.*bytes [0-9]*//'; iptables-legacy-save | grep '^-A' || true"]).await
}

/// A TCP connection from a pod to the outside.
struct Connection(std::net::TcpStream, std::net::TcpStream);

impl Connection {
    fn open(site: &Site, family: Family) -> Connection {
        use std::net::{TcpListener, TcpStream};
        let limit = PATIENCE;
        let addr = site.addr("out", family);
        let listener = inside("out", || TcpListener::bind((addr, 7001))).unwrap();
        let client = inside("n1-p1", || TcpStream::connect_timeout(&(addr, 7001).into(), limit)).unwrap();
        let (server, source) = listener.accept().unwrap();
        assert_eq!(site.name(source.ip(), family), "n1");
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(limit)).unwrap();
            stream.set_nodelay(true).unwrap();
        }
        Connection(client, server)
    }

    /// Sends a word in each direction.
    fn continues(&mut self) {
        use std::io::{Read, Write};
        let mut word = [0; 4];
        self.0.write_all(b"ping").unwrap();
        self.1.read_exact(&mut word).unwrap();
        self.1.write_all(b"pong").unwrap();
        self.0.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"pong");
    }
}

/// weft replaces flanneld. No datagram leaves the cluster with the address of a pod, and in the end there is no chain of flannel.
async fn takes_over(flanneld: &Path, flags: &[&str]) {
    let flags: Vec<&str> = ["--ip-masq"].iter().chain(flags).copied().collect();
    let mut site = Site::for_flanneld(BackendKind::Vxlan, &flags).await;
    site.start_other(flanneld).await;
    masqueraded(&site);
    let node = &mut site.lab.nodes[0];
    node.stop(Signal::SIGTERM).await.unwrap();
    node.start().unwrap();
    until(&site, async |site| {
        site.lab.nodes[0].status_as::<weft::observe::status::Status>().await.is_ok_and(|status| status.ready)
            && !has_flannel_rules(site).await
    })
    .await;
    for family in Family::BOTH {
        assert_eq!(site.probe(&straight("n1-p1", "n2-p1"), family), "n1-p1");
    }
}

async fn has_flannel_rules(site: &Site) -> bool {
    let all = "for six in '' 6; do ip${six}tables-nft-save; ip${six}tables-legacy-save; done; nft list tables";
    let text = site.run("n1", &["sh", "-c", all]).await;
    text.contains("FLANNEL") || text.contains("flannel-ipv")
}

#[test]
#[ignore = "needs FLANNELD"]
fn nft_takes_over_from_flanneld() {
    let flanneld = flanneld();
    on_this_thread(async move { takes_over(&flanneld, &["--firewall=nft"]).await });
}

#[test]
#[ignore = "needs FLANNELD"]
fn iptables_takes_over_from_flanneld() {
    let flanneld = flanneld();
    on_this_thread(async move { takes_over(&flanneld, &["--firewall=iptables"]).await });
}

/// flanneld and weft run on one node by mistake. The rules of flanneld are not removed while it runs, and this is reported. `wrapper` are
/// the words with which the agents are started.
fn rules_of_flannel_stay(wrapper: &'static str) {
    on_this_thread(async move {
        let dir = tempfile::tempdir().unwrap();
        let agent = dir.path().join("agent");
        write_program(&agent, &format!("#!/bin/sh\nexec {wrapper} {} \"$@\"\n", weft_exe().display()));
        let options = options(&["--ip-masq", "--firewall=nft"]);
        let mut site = Site::with(LabOptions { exe: Some(agent), launcher: Some(weft_exe()), ..options }).await;
        let program = dir.path().join("flanneld");
        std::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let command = format!("exec {} 600", program.display());
        let mut flanneld = tokio::process::Command::new("ip");
        flanneld.args(["netns", "exec", "n1", "sh", "-c", &command]).kill_on_drop(true);
        let mut flanneld = flanneld.spawn().unwrap();
        // The agent removes the rules of flannel only while no process has this name.
        let comm = format!("/proc/{}/comm", flanneld.id().unwrap());
        let is_named = async || std::fs::read_to_string(&comm).unwrap() == "flanneld\n";
        wait_for("the name of flanneld", PATIENCE, is_named).await.unwrap();
        site.on_nodes("nft add table ip flannel-ipv4").await;
        site.start().await;
        let reported = async |site: &Site| {
            let status = site.lab.nodes[0].status_as::<weft::observe::status::Status>().await;
            status.is_ok_and(|status| status.problems.iter().any(|problem| problem.text.contains("runs beside weft")))
        };
        until(&site, reported).await;
        assert!(site.nft("n1", "list tables").await.contains("flannel-ipv4"));
        // A flanneld in another network namespace is no reason to keep rules here.
        until(&site, async |site| !site.nft("n2", "list tables").await.contains("flannel-ipv4")).await;
        flanneld.kill().await.unwrap();
    });
}

#[test]
fn rules_of_flannel_stay_while_it_runs() {
    rules_of_flannel_stay("");
}

/// With fewer capabilities than flanneld has, the kernel shows the agent less of it.
#[test]
fn rules_of_flannel_stay_with_the_capabilities_of_the_unit() {
    rules_of_flannel_stay("setpriv --bounding-set=-all,+net_admin,+net_raw");
}

/// `weft cleanup` removes everything that weft wrote.
fn cleanup_removes_all_rules(flags: &'static [&'static str]) {
    on_this_thread(async move {
        let mut site = running(flags, None).await;
        if flags.contains(&"--guard-tunnel") {
            assert!(site.nft("n1", "list tables").await.contains("-guard"), "there is a guard to remove");
        }
        let node = &mut site.lab.nodes[0];
        node.stop(Signal::SIGTERM).await.unwrap();
        let file = node.subnet_file();
        let flag = format!("--subnet-file={}", file.display());
        let socket_flag = format!("--socket={}", file.with_file_name("weft.sock").display());
        site.run("n1", &[weft_exe().to_str().unwrap(), "cleanup", &flag, &socket_flag]).await;
        let all = "nft list ruleset; for six in '' 6; do ip${six}tables-nft-save; ip${six}tables-legacy-save; done";
        let left = site.run("n1", &["sh", "-c", all]).await;
        assert!(!left.to_lowercase().contains("weft"), "{left}");
    });
}

#[test]
fn cleanup_removes_all_of_nft() {
    cleanup_removes_all_rules(&["--firewall=nft", "--guard-tunnel"]);
}

#[test]
fn cleanup_removes_all_of_iptables() {
    cleanup_removes_all_rules(&["--firewall=iptables"]);
}
