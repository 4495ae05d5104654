// SPDX-License-Identifier: Apache-2.0
//! `--ip-blackhole-route`: a node drops forwarded packets to addresses of its subnet that no pod has. Its pods are still reached, no
//! matter if they are on a bridge or each has a route. Packets of the node itself are not affected.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use weft_lab::BackendKind;
use weft_lab::node::all_know;

use crate::packets::{Seen, any, exchange, socket};
use crate::site::{Family, PATIENCE, PORT, Site, on_this_thread, straight};

/// Starts agents without pods. Also returns an address of n1's subnet in each family that no pod gets. The host outside has these
/// addresses, and the router knows this. A packet that leaves n1 by its default route arrives there.
async fn site(flags: &[&str]) -> (Site, [IpAddr; 2]) {
    let flags: Vec<&str> = ["--fail-closed=false"].iter().chain(flags).copied().collect();
    let mut site = Site::build(BackendKind::Vxlan, &flags).await;
    for node in &mut site.lab.nodes {
        node.start().unwrap();
    }
    for node in &mut site.lab.nodes {
        node.ready().await.unwrap();
    }
    // A node is ready before it has read the leases that others have just written. Until then, its packets leave by the default route.
    all_know(&site.lab.nodes, 1).await.unwrap();
    let net = site.lab.nodes[0].pod_net().await.unwrap();
    let unused = [0, 1].map(|family| match net.gateways[family].addr() {
        IpAddr::V4(v4) => IpAddr::V4((u32::from(v4) + 70).into()),
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) + 70).into()),
    });
    for (addr, via) in unused.into_iter().zip(["192.168.77.200", "fd77::200"]) {
        let nodad = if addr.is_ipv6() { "nodad" } else { "" };
        site.run("out", &["sh", "-ec", &format!("ip addr add {addr} dev lo {nodad}")]).await;
        site.run("fabric", &["sh", "-ec", &format!("ip route add {addr} via {via}")]).await;
    }
    (site, unused)
}

/// Sends a datagram from a place to this address of the host outside.
fn to(addr: IpAddr, from: &str) -> Seen {
    let server = socket("out", addr, PORT);
    let client = socket(from, any(addr), 0);
    exchange(&client, SocketAddr::new(addr, PORT), &server)
}

/// Asserts that no datagram from these places arrives.
fn dropped(unused: [IpAddr; 2], places: &[&str]) {
    for (addr, place) in unused.into_iter().flat_map(|addr| places.iter().map(move |place| (addr, *place))) {
        assert_eq!(to(addr, place), Seen::Lost, "{addr} from {place}");
    }
}

#[test]
fn without_the_flag_packets_leave_by_the_default_route() {
    on_this_thread(async {
        let (site, unused) = site(&[]).await;
        for (addr, place) in unused.into_iter().flat_map(|addr| ["n1", "n2"].map(|place| (addr, place))) {
            let deadline = Instant::now() + PATIENCE;
            while to(addr, place) == Seen::Lost {
                assert!(Instant::now() < deadline, "{addr} from {place}: nothing arrives\n{}", site.lab.logs(20));
            }
        }
    });
}

#[test]
fn packets_to_unused_addresses_are_dropped_and_pods_are_reached() {
    on_this_thread(async {
        let (mut site, unused) = site(&["--ip-blackhole-route"]).await;
        // There is no bridge and no pod yet, only the fence. It does not affect packets of the node itself.
        dropped(unused, &["n2"]);
        for addr in unused {
            let deadline = Instant::now() + PATIENCE;
            while !matches!(to(addr, "n1"), Seen::From(_)) {
                assert!(
                    Instant::now() < deadline,
                    "{addr} from the node itself: nothing arrives\n{}",
                    site.lab.logs(20)
                );
            }
        }
        for node in &mut site.lab.nodes {
            node.add_pods(2).await.unwrap();
        }
        site.all_reach_all();
        dropped(unused, &["n2", "n1-p2", "n2-p1"]);
        // Each pod has a route, as with the CNI plugin ptp and others.
        let net = site.lab.nodes[0].pod_net().await.unwrap();
        let mut routes = String::new();
        for gateway in &net.gateways {
            routes += &format!("ip route del {} dev cni0; ", gateway.trunc());
        }
        for addr in site.lab.nodes[0].pods.iter().flat_map(|pod| &pod.addrs) {
            routes += &format!("ip route add {addr} dev cni0; ");
        }
        site.run("n1", &["sh", "-ec", &routes]).await;
        for family in Family::BOTH {
            for (from, to) in [("n2-p1", "n1-p1"), ("n1", "n1-p2"), ("n1-p2", "n2-p2")] {
                let seen = if from == "n1" { "n1-bridge" } else { from };
                site.until_seen(&straight(from, to), family, seen);
            }
        }
        dropped(unused, &["n2", "n2-p1"]);
    });
}
