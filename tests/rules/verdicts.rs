// SPDX-License-Identifier: Apache-2.0
//! For every way of a datagram, the source that its receiver sees. This is docs/flannel-formats.md, "Traffic rules: iptables", tested with
//! packets. flanneld gives the same answers with iptables.

use std::time::Instant;

use serde_json::json;
use weft_lab::BackendKind;

use crate::flanneld::flanneld;
use crate::packets::{any, receive, socket};
use crate::site::{Family, PATIENCE, PORT, Site, Trip, on_this_thread, straight};

/// The ports of services on n1. They lead to n1-p1 and to n2-p1.
const NEAR: u16 = 30080;
const FAR: u16 = 30081;

/// Returns all ways with the expected source. `tunnel` is the place whose address n1 uses on the way to pods of the other node.
fn table(tunnel: &'static str) -> Vec<(&'static str, Trip, &'static str)> {
    vec![
        ("pod to a pod of the other node", straight("n1-p1", "n2-p1"), "n1-p1"),
        ("pod to a pod of its node", straight("n1-p1", "n1-p2"), "n1-p1"),
        ("pod to the outside", straight("n1-p1", "out"), "n1"),
        ("pod to the other node", straight("n1-p1", "n2"), "n1"),
        ("pod to its own node", straight("n1-p1", "n1"), "n1-p1"),
        ("node to the other node's pod", straight("n1", "n2-p1"), tunnel),
        ("node to the other node's pod, from its uplink's address", straight("n1@n1", "n2-p1"), tunnel),
        ("node to its own pod", straight("n1", "n1-p1"), "n1-bridge"),
        ("node to its own pod, from its uplink's address", straight("n1@n1", "n1-p1"), "n1"),
        ("node to the outside", straight("n1", "out"), "n1"),
        ("outside to a pod through its node", straight("out", "n2-p2"), "out"),
        ("outside to a pod through the other node", straight("out", "n2-p1"), tunnel),
        ("service on n1 to its own pod", service("n1-p1", NEAR), "out"),
        ("service on n1 to the other node's pod", service("n2-p1", FAR), tunnel),
    ]
}

fn service(to: &'static str, port: u16) -> Trip {
    Trip { from: "out", to, via: Some("n1"), port }
}

/// Adds routes to pods on the host outside, and services on n1 as kube-proxy would make them without masquerading.
async fn prepare(site: &Site) {
    for family in Family::BOTH {
        let addr = |place: &str| site.addr(place, family);
        let (bits, ip, l3) = if family == Family::V4 { (32, "-4", "ip") } else { (128, "-6", "ip6") };
        for (pod, node) in [("n1-p1", "n1"), ("n2-p1", "n1"), ("n2-p2", "n2")] {
            let line = format!("{ip} route add {}/{bits} via {}", addr(pod), addr(node));
            let mut words = vec!["ip", "-n", "out"];
            words.extend(line.split(' '));
            site.run("fabric", &words).await;
        }
        let to = |pod: &str| {
            let addr = addr(pod);
            if family == Family::V4 { format!("{addr}:{PORT}") } else { format!("[{addr}]:{PORT}") }
        };
        let chain = "{ type nat hook prerouting priority dstnat; }";
        let table = format!("{l3} services");
        let mut text = format!("add table {table}; add chain {table} pre {chain};");
        for (port, pod) in [(NEAR, "n1-p1"), (FAR, "n2-p1")] {
            text += &format!(" add rule {table} pre {l3} daddr {} udp dport {port} dnat to {};", addr("n1"), to(pod));
        }
        site.nft("n1", &text).await;
    }
}

fn all_seen(site: &Site) {
    let (mut wrong, deadline) = (Vec::new(), Instant::now() + PATIENCE);
    for family in Family::BOTH {
        // Without a tunnel device it is the address of the uplink.
        let tunnel = if site.backend == BackendKind::HostGw { "n1" } else { "n1-tunnel" };
        for (what, trip, expected) in table(tunnel) {
            let mut seen = site.probe(&trip, family);
            // On a busy machine, a packet or its answer may be late. A wrong source counts at once.
            while (seen == "lost" || seen.ends_with(", no answer")) && Instant::now() < deadline {
                seen = site.probe(&trip, family);
            }
            if seen != expected {
                wrong.push(format!("{family:?}: {what}: sees {seen}, not {expected}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", site.lab.logs(20));
}

/// Packets with the mark of kube-proxy (bit 0x4000) are not masqueraded by weft, no matter which other bits are set.
async fn marked_packets_are_not_masqueraded(site: &Site) {
    for family in Family::BOTH {
        let l3 = family.nft();
        let table = format!("{l3} marks");
        let chain = "{ type filter hook prerouting priority mangle; }";
        let source = site.addr("n1-p2", family);
        // There is no answer, because nobody outside has a route to pods.
        for (mark, expected) in [("0x4000", "n1-p2, no answer"), ("0x14001", "n1-p2, no answer"), ("0x8000", "n1")] {
            site.nft(
                "n1",
                &format!(
                    "add table {table}; add chain {table} pre {chain}; flush chain {table} pre; \
                     add rule {table} pre {l3} saddr {source} meta mark set {mark}"
                ),
            )
            .await;
            assert_eq!(site.probe(&straight("n1-p2", "out"), family), expected, "{family:?}, mark {mark}");
        }
        site.nft("n1", &format!("delete table {table}")).await;
    }
}

/// With br_netfilter, bridged packets pass the rules. Multicast between pods of one node keeps its source.
async fn multicast_keeps_its_source(site: &Site) {
    for family in Family::BOTH {
        let group = if family == Family::V4 { "239.1.2.3" } else { "ff15::1:2:3" };
        let group = group.parse().unwrap();
        let listener = socket("n1-p2", any(group), PORT + 1);
        match (group, site.addr("n1-p2", family)) {
            (std::net::IpAddr::V4(group), std::net::IpAddr::V4(addr)) => listener.join_multicast_v4(&group, &addr),
            (std::net::IpAddr::V6(group), _) => listener.join_multicast_v6(&group, 0),
            _ => unreachable!("one family"),
        }
        .unwrap();
        let sender = socket("n1-p1", site.addr("n1-p1", family), 0);
        sender.send_to(b"to all", (group, PORT + 1)).unwrap();
        let seen = receive(&listener, b"to all").map(|source| site.name(source.ip(), family));
        assert_eq!(seen.as_deref(), Some("n1-p1"), "{family:?}");
    }
}

async fn verdicts(site: &Site) {
    prepare(site).await;
    all_seen(site);
    marked_packets_are_not_masqueraded(site).await;
    multicast_keeps_its_source(site).await;
}

fn of_weft(backend: BackendKind, firewall: &str, flavour: Option<&str>) {
    let firewall = format!("--firewall={firewall}");
    on_this_thread(async {
        let mut site = Site::build(backend, &["--ip-masq", &firewall]).await;
        if let Some(flavour) = flavour {
            site.hint(flavour).await;
        }
        site.start().await;
        let status = site.lab.nodes[0].status_as::<weft::observe::status::Status>().await.unwrap();
        let filter = flavour.map_or_else(|| "nftables".to_owned(), |flavour| format!("iptables-{flavour}"));
        assert!(status.rules.filter.contains(&filter) && status.rules.in_place, "{:#?}", status.rules);
        assert_eq!(status.problems, []);
        verdicts(&site).await;
        let after = site.lab.nodes[0].status_as::<weft::observe::status::Status>().await.unwrap();
        assert_eq!((after.rules.writes, after.rules.mended), (1, 0), "written once, never touched again");
    });
}

#[test]
fn of_nft_vxlan() {
    of_weft(BackendKind::Vxlan, "nft", None);
}

#[test]
fn of_nft_host_gw() {
    of_weft(BackendKind::HostGw, "nft", None);
}

#[test]
fn of_iptables_nft_vxlan() {
    of_weft(BackendKind::Vxlan, "iptables", Some("nft"));
}

#[test]
fn of_iptables_legacy_vxlan() {
    of_weft(BackendKind::Vxlan, "iptables", Some("legacy"));
}

#[test]
fn of_iptables_legacy_host_gw() {
    of_weft(BackendKind::HostGw, "iptables", Some("legacy"));
}

/// With `MasqueradeExcept` and `MasqueradeToNodes`, pods keep their addresses.
fn exceptions(firewall: &'static str) {
    on_this_thread(async move {
        let firewall = format!("--firewall={firewall}");
        let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq", &firewall]).await;
        let except = json!(["192.168.77.200/32", "fd77::200/128"]);
        site.configure(&json!({"MasqueradeExcept": except, "MasqueradeToNodes": false}));
        site.start().await;
        prepare(&site).await;
        for family in Family::BOTH {
            site.until_seen(&straight("n1-p1", "out"), family, "n1-p1");
            site.until_seen(&straight("n1-p1", "n2"), family, "n1-p1");
            site.until_seen(&straight("n2-p1", "n1"), family, "n2-p1");
            site.until_seen(&straight("n1-p1", "fabric"), family, "n1");
            site.until_seen(&straight("n1-p1", "n2-p1"), family, "n1-p1");
        }
    });
}

#[test]
fn exceptions_of_nft() {
    exceptions("nft");
}

#[test]
fn exceptions_of_iptables() {
    exceptions("iptables");
}

fn of_flanneld(backend: BackendKind) {
    let flanneld = flanneld();
    on_this_thread(async {
        let mut site = Site::for_flanneld(backend, &["--ip-masq"]).await;
        site.start_other(&flanneld).await;
        verdicts(&site).await;
    });
}

#[test]
#[ignore = "needs FLANNELD"]
fn of_flanneld_vxlan() {
    of_flanneld(BackendKind::Vxlan);
}

#[test]
#[ignore = "needs FLANNELD"]
fn of_flanneld_host_gw() {
    of_flanneld(BackendKind::HostGw);
}
