// SPDX-License-Identifier: Apache-2.0
//! `--fail-closed`: packets that a node forwards to a subnet of the network that nobody has are refused at once, and never leave by the
//! default route. The node's own packets are free, and services whose addresses lie inside Network work from pods and nodes.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::json;
use weft_lab::BackendKind;
use weft_lab::store::Store;

use crate::packets::{Seen, any, exchange, inside, receive, socket};
use crate::site::{Family, PATIENCE, PORT, Site, on_this_thread};

/// In the first subnet of each family, which is never leased (SubnetMin is the second).
const NOBODYS: [&str; 2] = ["10.244.0.9", "fd00:10:244::9"];

/// The host outside has the address, and the router knows it: what leaks arrives.
async fn site(backend: BackendKind, flags: &[&str]) -> Site {
    let mut site = Site::build(backend, flags).await;
    site.run("out", &["sh", "-ec", "ip addr add 10.244.0.9/32 dev lo; ip addr add fd00:10:244::9/128 dev lo nodad"])
        .await;
    let routes = "ip route add 10.244.0.9/32 via 192.168.77.200; ip route add fd00:10:244::9/128 via fd77::200";
    site.run("fabric", &["sh", "-ec", routes]).await;
    site.start().await;
    site
}

fn from(place: &str, addr: IpAddr) -> Seen {
    let server = socket("out", addr, PORT);
    let client = socket(place, any(addr), 0);
    exchange(&client, SocketAddr::new(addr, PORT), &server)
}

#[test]
fn it_would_leak_otherwise() {
    on_this_thread(async {
        let site = site(BackendKind::Vxlan, &["--ip-masq", "--fail-closed=false"]).await;
        for (family, addr) in Family::BOTH.into_iter().zip(NOBODYS) {
            let deadline = Instant::now() + PATIENCE;
            // With the pod's own address, in clear.
            while from("n1-p1", addr.parse().unwrap()) != Seen::Unanswered(site.addr("n1-p1", family)) {
                assert!(Instant::now() < deadline, "{family:?}: nothing arrives\n{}", site.lab.logs(20));
            }
        }
    });
}

fn refused_at_once(backend: BackendKind) {
    on_this_thread(async move {
        let site = site(backend, &["--ip-masq"]).await;
        for addr in NOBODYS.map(|addr| addr.parse::<IpAddr>().unwrap()) {
            assert_eq!(from("n1-p1", addr), Seen::Lost, "{addr}");
            let limit = Duration::from_secs(10);
            let connected = inside("n1-p1", || TcpStream::connect_timeout(&(addr, PORT).into(), limit));
            // Not a time-out: an ICMP error.
            let error = connected.unwrap_err().kind();
            assert!(matches!(error, ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable), "{addr}: {error:?}");
        }
        // The node itself is not fenced.
        for (family, addr) in Family::BOTH.into_iter().zip(NOBODYS) {
            let arrives = || from("n2", addr.parse().unwrap()) == Seen::From(site.addr("n2", family));
            until("the node's own packet", arrives, &site);
        }
        // And it is no obstacle to those who are there.
        site.lab.reach_all().await.unwrap();
        let server = socket("n2-p1", site.addr("n2-p1", Family::V4), PORT);
        let client = socket("n1-p1", any(site.addr("n1-p1", Family::V4)), 0);
        client.send_to(b"somebody", server.local_addr().unwrap()).unwrap();
        assert!(receive(&server, b"somebody").is_some());
    });
}

#[test]
fn refused_at_once_vxlan() {
    refused_at_once(BackendKind::Vxlan);
}

#[test]
fn refused_at_once_host_gw() {
    refused_at_once(BackendKind::HostGw);
}

/// Addresses of services in the first subnet of each family, as kops has them inside Network.
const SERVICES: [&str; 2] = ["10.244.0.77", "fd00:10:244::77"];

/// Makes n1 translate the address of a service to this place, like kube-proxy: for packets that arrive, and for its own.
async fn serve(site: &Site, to: &str) {
    for (family, service) in Family::BOTH.into_iter().zip(SERVICES) {
        let (l3, to) = (family.nft(), site.addr(to, family));
        let table = format!("{l3} services");
        let mut text = format!("add table {table}; delete table {table}; add table {table};");
        for (name, hook, priority) in [("pre", "prerouting", "dstnat"), ("out", "output", "-100")] {
            text += &format!(
                " add chain {table} {name} {{ type nat hook {hook} priority {priority}; }}; \
                 add rule {table} {name} {l3} daddr {service} udp dport {PORT} dnat to {to};"
            );
        }
        site.nft("n1", &text).await;
    }
}

/// What becomes of a datagram to the service.
fn to_service(site: &Site, from: &str, backend: &str, family: Family) -> Seen {
    let service: IpAddr = SERVICES[usize::from(family == Family::V6)].parse().unwrap();
    let server = socket(backend, site.addr(backend, family), PORT);
    exchange(&socket(from, any(service), 0), SocketAddr::new(service, PORT), &server)
}

fn services_inside_network(backend: BackendKind, firewall: &'static str) {
    on_this_thread(async move {
        let firewall = format!("--firewall={firewall}");
        let mut site = Site::build(backend, &["--ip-masq", &firewall]).await;
        site.start().await;
        // A pod of the other node, and a host outside, as the API server is one.
        for place in ["n2-p1", "out"] {
            serve(&site, place).await;
            for family in Family::BOTH {
                for from in ["n1", "n1-p1"] {
                    let arrives = || matches!(to_service(&site, from, place, family), Seen::From(_));
                    until(&format!("{family:?}: a packet of {from} to the service of {place}"), arrives, &site);
                }
            }
        }
    });
}

#[test]
fn services_inside_network_are_reached_nft_vxlan() {
    services_inside_network(BackendKind::Vxlan, "nft");
}

#[test]
fn services_inside_network_are_reached_nft_host_gw() {
    services_inside_network(BackendKind::HostGw, "nft");
}

#[test]
fn services_inside_network_are_reached_iptables_vxlan() {
    services_inside_network(BackendKind::Vxlan, "iptables");
}

/// A lease of another node whose address lies inside Network opens that address to pods, and nothing else.
#[test]
fn a_node_inside_network_is_reached_and_disarms_nothing() {
    const INSIDE: &str = "10.244.0.33";
    on_this_thread(async {
        let site = site(BackendKind::Vxlan, &["--ip-masq", "--resync=1h", "--hold-removals=0s"]).await;
        site.run("out", &["ip", "addr", "add", &format!("{INSIDE}/32"), "dev", "lo"]).await;
        site.run("fabric", &["ip", "route", "add", &format!("{INSIDE}/32"), "via", "192.168.77.200"]).await;
        let addrs = [INSIDE, NOBODYS[0]].map(|addr| addr.parse::<IpAddr>().unwrap());
        assert_eq!(addrs.map(|addr| from("n1-p1", addr)), [Seen::Lost; 2]);
        let Store::Dir(path) = &site.lab.store else { panic!("a directory store") };
        let (aside, lease) = (path.join("subnets/.aside"), path.join("subnets/10.244.99.0-24.json"));
        let data = json!({"VNI": 1, "VtepMAC": "02:00:00:00:00:99"});
        let value = json!({"PublicIP": INSIDE, "BackendType": "vxlan", "BackendData": data});
        std::fs::write(&aside, value.to_string()).unwrap();
        std::fs::rename(aside, &lease).unwrap();
        until("the exception", || from("n1-p1", addrs[0]) != Seen::Lost, &site);
        assert_eq!(from("n1-p1", addrs[1]), Seen::Lost);
        let status = site.lab.nodes[0].status_as::<weft::observe::status::Status>().await.unwrap();
        assert_eq!(status.problems, [""; 0]);
        assert!(status.rules.fence.unwrap().ends_with("; 1 nodes inside Network are exceptions"));
        std::fs::remove_file(&lease).unwrap();
        until("the end of the exception", || from("n1-p1", addrs[0]) == Seen::Lost, &site);
    });
}

fn until(what: &str, reached: impl Fn() -> bool, site: &Site) {
    let deadline = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < deadline, "waited for {what}\n{}", site.lab.logs(20));
    }
}
