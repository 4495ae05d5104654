// SPDX-License-Identifier: Apache-2.0
//! `--fail-closed`: a node rejects packets that it would forward to a part of Network that no node has leased. They never leave by the
//! default route. This does not affect packets of the node itself, nor services whose addresses are inside Network.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Instant;

use serde_json::json;
use weft_lab::BackendKind;
use weft_lab::store::Store;

use crate::packets::{Seen, any, exchange, inside, receive, socket};
use crate::site::{Family, PATIENCE, PORT, Site, on_this_thread};

/// Addresses in the first subnet of each family, which is never leased (SubnetMin is the second).
const UNLEASED: [&str; 2] = ["10.244.0.9", "fd00:10:244::9"];

/// Builds a site in which the host outside has these addresses, and the router knows this. A packet that leaves by the default route
/// arrives there.
async fn site(backend: BackendKind, flags: &[&str]) -> Site {
    let mut site = Site::build(backend, flags).await;
    site.run("out", &["sh", "-ec", "ip addr add 10.244.0.9/32 dev lo; ip addr add fd00:10:244::9/128 dev lo nodad"])
        .await;
    let routes = "ip route add 10.244.0.9/32 via 192.168.77.200; ip route add fd00:10:244::9/128 via fd77::200";
    site.run("fabric", &["sh", "-ec", routes]).await;
    site.start().await;
    site
}

/// Sends a datagram from a place to an address of the host outside.
fn from(place: &str, addr: IpAddr) -> Seen {
    let server = socket("out", addr, PORT);
    let client = socket(place, any(addr), 0);
    exchange(&client, SocketAddr::new(addr, PORT), &server)
}

#[test]
fn without_the_flag_packets_leave_by_the_default_route() {
    on_this_thread(async {
        let site = site(BackendKind::Vxlan, &["--ip-masq", "--fail-closed=false"]).await;
        for (family, addr) in Family::BOTH.into_iter().zip(UNLEASED) {
            let deadline = Instant::now() + PATIENCE;
            // With the address of the pod, and without a tunnel.
            while from("n1-p1", addr.parse().unwrap()) != Seen::Unanswered(site.addr("n1-p1", family)) {
                assert!(Instant::now() < deadline, "{family:?}: nothing arrives\n{}", site.lab.logs(20));
            }
        }
    });
}

fn rejected(backend: BackendKind) {
    on_this_thread(async move {
        let site = site(backend, &["--ip-masq"]).await;
        for addr in UNLEASED.map(|addr| addr.parse::<IpAddr>().unwrap()) {
            assert_eq!(from("n1-p1", addr), Seen::Lost, "{addr}");
            let connected = inside("n1-p1", || TcpStream::connect_timeout(&(addr, PORT).into(), PATIENCE));
            // The kernel answers with an ICMP error, so this is not a time-out.
            let error = connected.unwrap_err().kind();
            assert!(matches!(error, ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable), "{addr}: {error:?}");
        }
        // Packets of the node itself leave.
        for (family, addr) in Family::BOTH.into_iter().zip(UNLEASED) {
            let arrives = || from("n2", addr.parse().unwrap()) == Seen::From(site.addr("n2", family));
            until("the node's own packet", arrives, &site);
        }
        // Pods and nodes reach each other.
        site.lab.reach_all().await.unwrap();
        let server = socket("n2-p1", site.addr("n2-p1", Family::V4), PORT);
        let client = socket("n1-p1", any(site.addr("n1-p1", Family::V4)), 0);
        let to = server.local_addr().unwrap();
        let arrives = || client.send_to(b"somebody", to).is_ok() && receive(&server, b"somebody").is_some();
        until("a packet from a pod to another one", arrives, &site);
    });
}

#[test]
fn packets_to_unleased_addresses_are_rejected_vxlan() {
    rejected(BackendKind::Vxlan);
}

#[test]
fn packets_to_unleased_addresses_are_rejected_host_gw() {
    rejected(BackendKind::HostGw);
}

/// Addresses of services in the first subnet of each family. In clusters of kops they are inside Network, too.
const SERVICES: [&str; 2] = ["10.244.0.77", "fd00:10:244::77"];

/// Makes n1 translate the address of a service to that of a place, as kube-proxy does: for packets that arrive, and for its own.
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

/// Sends a datagram to the service.
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
        // The service is a pod of the other node, or a host outside (such as the API server).
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

/// If the address of another node is inside Network, pods reach that address, and no other one that is not leased.
#[test]
fn pods_reach_the_address_of_a_node_inside_network_and_no_other() {
    const INSIDE: &str = "10.244.0.33";
    on_this_thread(async {
        // The lease below has no node, so nobody would answer probes, and that would be a problem after some seconds.
        let flags = ["--ip-masq", "--resync=1h", "--hold-removals=0s", "--probe=off"];
        let site = site(BackendKind::Vxlan, &flags).await;
        site.run("out", &["ip", "addr", "add", &format!("{INSIDE}/32"), "dev", "lo"]).await;
        site.run("fabric", &["ip", "route", "add", &format!("{INSIDE}/32"), "via", "192.168.77.200"]).await;
        let addrs = [INSIDE, UNLEASED[0]].map(|addr| addr.parse::<IpAddr>().unwrap());
        assert_eq!(addrs.map(|addr| from("n1-p1", addr)), [Seen::Lost; 2]);
        let Store::Dir(path) = &site.lab.store else { panic!("not a directory store") };
        // Nodes get nothing of the first /24 of Network.
        let (aside, lease) = (path.join("subnets/.aside"), path.join("subnets/10.244.0.128-25.json"));
        let data = json!({"VNI": 1, "VtepMAC": "02:00:00:00:00:99"});
        let value = json!({"PublicIP": INSIDE, "BackendType": "vxlan", "BackendData": data});
        std::fs::write(&aside, value.to_string()).unwrap();
        std::fs::rename(aside, &lease).unwrap();
        until("the exception", || from("n1-p1", addrs[0]) != Seen::Lost, &site);
        assert_eq!(from("n1-p1", addrs[1]), Seen::Lost);
        let status = site.lab.nodes[0].status_as::<weft::observe::status::Status>().await.unwrap();
        assert_eq!(status.problems, []);
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
