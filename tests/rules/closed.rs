// SPDX-License-Identifier: Apache-2.0
//! Packets to a subnet of the network that nobody has: refused at once, and never out by the default route.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use weft::lab::BackendKind;

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
            for place in ["n1-p1", "n2"] {
                assert_eq!(from(place, addr), Seen::Lost, "{place} to {addr}");
            }
            let limit = Duration::from_secs(10);
            let connected = inside("n1-p1", || TcpStream::connect_timeout(&(addr, PORT).into(), limit));
            // Not a time-out: an ICMP error.
            let error = connected.unwrap_err().kind();
            assert!(matches!(error, ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable), "{addr}: {error:?}");
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
