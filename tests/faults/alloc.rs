// SPDX-License-Identifier: Apache-2.0
//! The backend alloc: something else makes the routes. The agent takes its lease and writes subnet.env, and writes nothing into the kernel.

use std::fs;

use serde_json::json;

use crate::site::{Kind, Lease, Site, each, ip, run};

each! {
    nothing_is_written_beside_foreign_routes: HostGw HostGwDual HostGwV6;
}

/// Returns the routes of both families, without those of link-local addresses, which the kernel adds at any time.
fn routes() -> Vec<String> {
    let all = run("ip", "-4 route show") + &run("ip", "-6 route show");
    all.lines().filter(|line| !line.starts_with("fe80")).map(str::to_owned).collect()
}

fn nothing_is_written_beside_foreign_routes(kind: Kind) {
    let mut site = Site::new(kind);
    let config = fs::read_to_string(site.path("store/config.json")).unwrap();
    fs::write(site.path("store/config.json"), config.replace("host-gw", "alloc")).unwrap();
    // Our own lease is as flannel's alloc wrote it. The peers have the type of another backend, and one has no type.
    let untyped = |lease: &Lease| {
        let mut value = lease.value(kind);
        value.as_object_mut().unwrap().remove("BackendType");
        value
    };
    for lease in [&site.own, &site.peers[&2]] {
        site.put(&lease.key(kind), &untyped(lease).to_string());
    }
    // subnet.env is flannel's, and the routes have the form of flannel's host-gw: one for a peer, and one for which there is no lease.
    fs::create_dir_all(site.path("run")).unwrap();
    fs::write(site.env_file(), site.expected_env()).unwrap();
    for v6 in kind.families().iter().copied() {
        let family = if v6 { "-6" } else { "-4" };
        let via = site.peers[&2].public(v6);
        for number in [2, 99] {
            ip(&format!("{family} route add {} via {via} dev up0", Lease::new(number).net(v6)));
        }
    }
    let before = routes();
    site.start();
    site.ready();
    let status = site.status().unwrap();
    let peers = status["peers"].as_array().unwrap();
    assert_eq!(peers.len(), 20);
    assert!(peers.iter().all(|peer| peer["state"] == json!("programmed")), "{peers:#?}");
    let problems = status["problems"].to_string();
    assert!(problems.contains("--fail-closed is left out: the backend alloc makes no routes"), "{problems}");
    assert_eq!(fs::read_to_string(site.env_file()).unwrap(), site.expected_env(), "with the MTU of the uplink");
    let mut own = untyped(&site.own);
    assert_eq!(site.own_lease(), Some(own.take()), "the lease is as flannel writes it");
    // When a peer leaves, and when the agent compares everything, nothing is written either.
    site.remove_peer(2);
    site.until("the peer to be gone", |site| {
        site.status().is_some_and(|status| status["peers"].as_array().unwrap().len() == 19)
    });
    ip("link set up0 mtu 1400");
    site.mtu = 1400;
    site.until("the new MTU", |site| fs::read_to_string(site.env_file()).is_ok_and(|text| text == site.expected_env()));
    assert_eq!(routes(), before, "{}", site.log());
    assert!(crate::site::observed().is_empty(), "neither a fence nor anything else: {:#?}", crate::site::observed());
}
