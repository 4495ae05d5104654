// SPDX-License-Identifier: Apache-2.0
//! Wrong claims of peers, and entries of other programs in the kernel. Neither breaks the node, and both are reported.

use std::fs;
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::{Value as Json, json};

use crate::site::{Kind, Lease, Site, each, ip};

each! {
    a_lease_over_the_lan: Vxlan HostGw;
    a_lan_that_comes_after_the_lease: Vxlan HostGw;
    foreign_routes_stay_over_a_restart: Vxlan HostGw HostGwDual;
    a_node_that_ran_an_older_weft: Vxlan HostGw;
    a_copied_mac: Vxlan;
    two_nodes_with_one_address: Vxlan HostGw;
    routes_of_others_over_our_device: Vxlan VxlanDual;
}

/// Makes a node whose Network contains its LAN, as Network 10.0.0.0/8 may.
fn around_its_lan(kind: Kind) -> Site {
    let site = Site::new(kind);
    let config = json!({"Network": "10.0.0.0/8", "SubnetLen": 24, "Backend": {"Type": kind.name()}});
    fs::write(site.path("store/config.json"), config.to_string()).unwrap();
    site
}

fn peer<'a>(status: &'a Json, subnet: &str) -> Option<&'a Json> {
    status["peers"].as_array()?.iter().find(|peer| peer["subnet"] == subnet)
}

fn reason(site: &Site, subnet: &str) -> String {
    let status = site.status().unwrap_or_default();
    peer(&status, subnet).and_then(|peer| peer["reason"].as_str()).unwrap_or_default().to_owned()
}

fn problems(site: &Site) -> String {
    site.status().unwrap_or_default()["problems"].to_string()
}

fn connected() -> String {
    ip("-4 route show 10.0.0.0/24 proto kernel").trim_end().to_owned()
}

fn lan_works() -> bool {
    let out = Command::new("ip").args(["route", "get", "10.0.0.77"]).output().unwrap();
    String::from_utf8_lossy(&out.stdout).contains("dev up0 src 10.0.0.1")
}

fn a_lease_over_the_lan(kind: Kind) {
    let mut site = around_its_lan(kind);
    let before = connected();
    assert!(!before.is_empty() && lan_works());
    site.start();
    site.ready();
    let mut lease = Lease::new(99);
    lease.host = 199;
    let value = lease.value(kind).to_string();
    for key in ["10.0.0.0-24", "10.0.0.0-25", "10.0.0.0-16"] {
        site.put(key, &value);
        let subnet = key.replace('-', "/");
        site.until("the lease over the LAN to be set aside", |site| reason(site, &subnet).contains("10.0.0."));
        assert_eq!((connected(), lan_works()), (before.clone(), true), "{key}");
        fs::remove_file(site.lease_file(key)).unwrap();
        site.until("the lease to go", |site| peer(&site.status().unwrap_or_default(), &subnet).is_none());
        assert_eq!((connected(), lan_works()), (before.clone(), true), "{key} is gone");
    }
    // The peers have not changed.
    assert!(ip("-4 route show 10.5.7.0/24").contains("proto 90"));
}

/// The node joins a LAN that overlaps the subnet of a peer. The kernel's route wins, and stays when the lease is removed.
fn a_lan_that_comes_after_the_lease(kind: Kind) {
    let mut site = Site::running(kind);
    let net = site.peers[&7].net(false);
    let kernels = || ip(&format!("-4 route show {net} proto kernel"));
    let ours = || ip(&format!("-4 route show {net} proto 90"));
    ip("link add lan0 type veth peer name lan1");
    ip("link set lan1 up");
    ip("addr add 10.5.7.9/24 dev lan0");
    ip("link set lan0 up");
    site.until("our route to go", |_| ours().is_empty() && kernels().contains("dev lan0"));
    site.until("the reason", |site| reason(site, &net).contains("lan0"));
    site.remove_peer(7);
    site.until("the lease to go", |site| peer(&site.status().unwrap_or_default(), &net).is_none());
    assert!(kernels().contains("dev lan0"));
    site.put_peer(Lease::new(7));
    site.until("the reason again", |site| reason(site, &net).contains("lan0"));
    assert!(kernels().contains("dev lan0") && ours().is_empty());
    ip("link del lan0");
    site.healed("the LAN is gone");
}

const FOREIGN: [&str; 3] = [
    "10.5.200.0/24 via 10.0.0.77 dev up0",
    "10.5.201.128/25 via 10.0.0.77 dev up0",
    "10.5.202.0/24 via 10.0.0.77 dev up0",
];

fn foreign() -> usize {
    FOREIGN.iter().filter(|route| !ip(&format!("-4 route show {route}")).is_empty()).count()
}

/// An administrator's routes inside Network without a protocol of their own look like flannel's. They may count as flannel's only on a node on
/// which flannel ran last.
fn foreign_routes_stay_over_a_restart(kind: Kind) {
    let mut site = Site::running(kind);
    FOREIGN.iter().for_each(|route| drop(ip(&format!("route add {route}"))));
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        site.stop(signal);
        site.start();
        site.healed("a restart");
        assert_eq!(foreign(), FOREIGN.len(), "{}", ip("-4 route"));
    }
    // This leads to a full pass, which removes everything that an earlier run left.
    site.remove_peer(9);
    ip("link set up0 mtu 1400");
    site.mtu = 1400;
    site.healed("another MTU");
    assert_eq!(foreign(), FOREIGN.len(), "{}", ip("-4 route"));
}

/// The mark that a newer weft leaves is missing. The entries in the kernel show who wrote subnet.env.
fn a_node_that_ran_an_older_weft(kind: Kind) {
    let mut site = Site::running(kind);
    site.stop(Signal::SIGTERM);
    // If the program under test is an older one, there is no mark anyway.
    let _ = fs::remove_file(site.path("run/.subnet.env.weft"));
    ip(&format!("route add {}", FOREIGN[0]));
    site.start();
    site.healed("the start after an older weft");
    assert!(!ip(&format!("-4 route show {}", FOREIGN[0])).is_empty(), "{}", ip("-4 route"));
}

/// A newer lease with the MAC of an older one gets the MAC, but not the traffic of the older node. This is reported.
fn a_copied_mac(kind: Kind) {
    let mut site = Site::running(kind);
    let mut copy = Lease::new(60);
    copy.mac = site.peers[&7].mac;
    let victim = site.peers.remove(&7).unwrap();
    site.put_peer(copy);
    site.healed("a copied MAC: the older lease has no entries");
    let reason = reason(&site, &victim.net(false));
    assert!(reason.contains("is also that of the newer lease 10.5.60.0-24 (10.5.60.0/24, 10.0.0.60)"), "{reason}");
    let problems = problems(&site);
    assert!(problems.contains("two nodes have VtepMAC 02:00:00:00:04:07"), "{problems}");
    assert!(problems.contains("10.5.7.0-24") && problems.contains("10.5.60.0-24"), "{problems}");
    assert!(site.log().contains("is also that of the newer lease"));
    site.stop(Signal::SIGTERM);
    site.start();
    site.healed("a restart: the order in which leases are read decides nothing");
    site.remove_peer(60);
    site.peers.insert(7, victim);
    site.healed("the copy is gone");
    site.until("no problem", |site| !self::problems(site).contains("VtepMAC"));
}

/// Two nodes with one address are reported, if one of them is ours and if both are others.
fn two_nodes_with_one_address(kind: Kind) {
    let mut site = Site::running(kind);
    let mut ours = Lease::new(61);
    ours.host = site.own.host;
    site.put(&ours.key(kind), &ours.value(kind).to_string());
    site.until("our address in another lease", |site| problems(site).contains("10.5.61.0-24"));
    let text = problems(&site);
    for part in ["two nodes publish 10.0.0.1", "10.5.1.0-24", "10.5.1.0/24", "10.5.61.0/24", "weft lease rm"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let mut others = Lease::new(62);
    others.host = site.peers[&7].host;
    site.put_peer(others);
    site.until("the address of two others", |site| problems(site).contains("2 leases publish 10.0.0.7"));
    let text = problems(&site);
    assert!(text.contains("10.5.7.0-24") && text.contains("10.5.62.0-24"), "{text}");
    assert!(reason(&site, "10.5.7.0/24").contains("lease 10.5.62.0-24"), "{:?}", site.status());
    assert!(reason(&site, "10.5.62.0/24").contains("lease 10.5.7.0-24"));
    site.healed("both have their entries");
}

/// Other programs, such as Kilo, send traffic of their own through the overlay.
fn routes_of_others_over_our_device(kind: Kind) {
    let mut site = Site::new(kind);
    site.start();
    site.ready();
    let lines =
        ["172.20.0.0/16 via 10.5.7.0 dev flannel.1 onlink proto static", "172.21.0.0/16 dev flannel.1 proto static"];
    lines.iter().for_each(|line| drop(ip(&format!("route add {line}"))));
    let there = || ip("-4 route show proto static dev flannel.1").lines().count();
    site.remove_peer(9);
    ip("link set up0 mtu 1400");
    site.until("a look at everything", |_| ip("link show flannel.1").contains("mtu 1350"));
    site.stop(Signal::SIGTERM);
    site.start();
    site.ready();
    site.put_peer(Lease::new(30));
    site.until("a new peer", |_| ip("-4 route show 10.5.30.0/24").contains("proto 90"));
    assert_eq!(there(), lines.len(), "{}", ip("-4 route"));
    // Inside Network such a route would conflict with ours.
    ip("route add 10.5.99.0/24 via 10.5.7.0 dev flannel.1 onlink proto static");
    site.until("a route inside Network to go", |_| ip("-4 route show 10.5.99.0/24").is_empty());
}
