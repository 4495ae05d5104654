// SPDX-License-Identifier: Apache-2.0
//! Leases that are added, removed or wrong in the store, and subnet.env.

use std::fs;

use nix::sys::signal::Signal;
use serde_json::{Value as Json, json};

use crate::site::{BEHIND_A_ROUTER, Kind, Lease, Site, each, ip};

each! {
    peers_removed_while_away: Vxlan VxlanDual HostGw HostGwDual VxlanV6 HostGwV6 DirectDual;
    peers_come_and_go: Vxlan VxlanDual HostGw HostGwDual VxlanV6 HostGwV6 DirectDual;
    another_mac_of_a_peer: Vxlan VxlanDual;
    another_mac_of_a_peer_while_away: Vxlan VxlanDual;
    another_address_of_a_peer: Vxlan HostGw VxlanV6 HostGwV6 DirectDual;
    a_peer_moves_behind_a_router_and_back: DirectDual;
    own_lease_deleted: Vxlan VxlanDual HostGw HostGwDual VxlanV6 HostGwV6 DirectDual;
    unreadable_leases: Vxlan VxlanDual HostGw HostGwDual;
    leases_that_claim_what_is_ours: Vxlan HostGw;
    most_peers_vanish: Vxlan HostGw;
    subnet_env: Vxlan VxlanDual HostGw HostGwDual;
}

fn peers_removed_while_away(kind: Kind) {
    let mut site = Site::running(kind);
    site.stop(Signal::SIGTERM);
    for number in 5..15 {
        site.remove_peer(number);
    }
    site.put_peer(Lease::new(40));
    site.start();
    site.healed("peers removed and added while the agent was away");
}

fn peers_come_and_go(kind: Kind) {
    let mut site = Site::running(kind);
    site.remove_peer(5);
    site.put_peer(Lease::new(40));
    site.put_peer(Lease::new(41));
    site.healed("a peer that left and two that came");
    site.put_peer(Lease::new(5));
    site.healed("a peer that came back");
}

fn another_mac_of_a_peer(kind: Kind) {
    let mut site = Site::running(kind);
    site.put_peer(Lease { mac: 0x77, ..Lease::new(5) });
    site.healed("another MAC of a peer");
}

fn another_mac_of_a_peer_while_away(kind: Kind) {
    let mut site = Site::running(kind);
    site.stop(Signal::SIGKILL);
    site.put_peer(Lease { mac: 0x77, ..Lease::new(5) });
    site.start();
    site.healed("another MAC of a peer while the agent was away");
}

fn another_address_of_a_peer(kind: Kind) {
    let mut site = Site::running(kind);
    site.put_peer(Lease { host: 177, ..Lease::new(5) });
    site.healed("another address of a peer");
}

fn a_peer_moves_behind_a_router_and_back(kind: Kind) {
    let mut site = Site::running(kind);
    site.put_peer(Lease { host: BEHIND_A_ROUTER, ..Lease::new(5) });
    site.put_peer(Lease { host: BEHIND_A_ROUTER + 1, ..Lease::new(40) });
    site.healed("two peers behind a router");
    let before = site.quiet();
    for v6 in kind.families() {
        let family = if *v6 { "-6" } else { "-4" };
        ip(&format!("{family} route del {}", site.peers[&5].net(*v6)));
        ip(&format!("{family} route del {}", site.peers[&6].net(*v6)));
    }
    site.healed_by_entries(&before, "a deleted route over the tunnel and a direct one");
    site.put_peer(Lease::new(5));
    site.healed("one of them on the link again");
}

fn own_lease_deleted(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.own_lease().unwrap();
    let data = |lease: &Json| {
        let mut lease = lease.clone();
        lease["Created"] = json!(0);
        lease
    };
    for _ in 0..2 {
        fs::remove_file(site.lease_file(&site.own.key(kind))).unwrap();
        site.until("the own lease", |site| site.own_lease().is_some());
        assert_eq!(data(&site.own_lease().unwrap()), data(&before), "the same again");
    }
    site.healed("the own lease deleted");
}

fn set_aside(site: &Site) -> Vec<Json> {
    let peers = site.status().map(|status| status["peers"].clone()).unwrap_or_default();
    let wrong = |peer: &&Json| peer["state"] == "set-aside";
    peers.as_array().map(|peers| peers.iter().filter(wrong).cloned().collect()).unwrap_or_default()
}

fn unreadable_leases(kind: Kind) {
    let mut site = Site::running(kind);
    let bad = |n| Lease::new(n).key(kind);
    site.put("not-a-subnet", "{}");
    site.put(&bad(50), "this is no JSON");
    site.put(&bad(51), "[]");
    site.put(&bad(52), "{\"PublicIP\":\"nowhere\"}");
    site.put(&bad(53), "");
    site.until("all five to be set aside", |site| set_aside(site).len() == 5);
    for peer in set_aside(&site) {
        assert!(peer["reason"].as_str().is_some_and(|reason| reason.len() > 10), "{peer}");
    }
    site.healed("unreadable leases");
    site.stop(Signal::SIGTERM);
    site.start();
    site.healed("a start among unreadable leases");
    assert_eq!(set_aside(&site).len(), 5);
    site.put_peer(Lease::new(50));
    site.healed("one of them made readable");
}

fn leases_that_claim_what_is_ours(kind: Kind) {
    let mut site = Site::running(kind);
    let value = |lease: Lease| {
        let mut value = lease.value(kind);
        // It is older than all others, and that must not matter.
        value["Created"] = json!(1);
        value.to_string()
    };
    site.put("10.5.0.0-20", &value(Lease { host: 60, mac: 60, ..Lease::new(1) }));
    site.put(&Lease::new(61).key(kind), &value(Lease { host: 1, mac: 1, ..Lease::new(61) }));
    site.put("10.99.0.0-24", &value(Lease { host: 62, ..Lease::new(62) }));
    site.until("all three to be set aside", |site| set_aside(site).len() == 3);
    site.healed("leases that claim our subnet and our address");
    site.stop(Signal::SIGTERM);
    site.start();
    site.until("all three to be set aside", |site| set_aside(site).len() == 3);
    site.healed("a start among such leases");
}

fn most_peers_vanish(kind: Kind) {
    let mut site = Site::running(kind);
    let all: Vec<Lease> = site.peers.values().cloned().collect();
    for lease in &all {
        fs::remove_file(site.lease_file(&lease.key(kind))).unwrap();
    }
    site.until("removals to be held", |site| site.status().is_some_and(|status| status["held"].as_u64() >= Some(10)));
    let still = crate::site::observed().iter().filter(|line| line.starts_with("route")).count();
    assert!(still >= 10, "{still}");
    for lease in all {
        site.put_peer(lease);
    }
    site.healed("all peers gone and back");
    site.until("nothing to be held", |site| site.status().is_some_and(|status| status["held"] == json!(0)));
}

fn subnet_env(kind: Kind) {
    let mut site = Site::running(kind);
    let (file, want) = (site.env_file(), site.expected_env());
    let right = |site: &Site| fs::read_to_string(site.env_file()).is_ok_and(|text| text == want);
    fs::remove_file(&file).unwrap();
    site.until("the file after its removal", right);
    fs::write(&file, "FLANNEL_NETWORK=192.0.2.0/24\n").unwrap();
    site.until("the file after an edit", right);
    fs::write(&file, "").unwrap();
    site.until("the file after its emptying", right);
    fs::rename(&file, site.path("elsewhere")).unwrap();
    site.until("the file after a move", right);
    // The socket is deleted, too, so status does not answer any more.
    fs::rename(site.path("run"), site.path("gone")).unwrap();
    site.until("the file after its directory was moved away", right);
    fs::remove_dir_all(site.path("gone")).unwrap();
    site.stop(Signal::SIGTERM);
    assert!(right(&site), "it stays when the agent ends");
    fs::remove_file(&file).unwrap();
    site.start();
    site.healed("the file removed while the agent was away");
}

/// The variable that tells the test below that it runs in a user namespace, which has limits of its own.
const LIMITED: &str = "WEFT_TEST_LIMITED";

#[test]
fn a_host_without_inotify_instances_has_an_agent_all_the_same() {
    if std::env::var_os(LIMITED).is_none() {
        let this = "store::a_host_without_inotify_instances_has_an_agent_all_the_same";
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--net"]).arg(std::env::current_exe().unwrap());
        let out = unshare.args(["--exact", this, "--nocapture"]).env(LIMITED, "1").output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && said.contains("1 passed"), "{said}\n{}", String::from_utf8_lossy(&out.stderr));
        return;
    }
    let instances = |free: &str| fs::write("/proc/sys/user/max_inotify_instances", free).unwrap();
    let problems = |site: &Site| site.status().map(|status| status["problems"].to_string()).unwrap_or_default();
    crate::site::in_namespace(|| {
        instances("0");
        let mut site = Site::running(Kind::HostGw);
        assert!(problems(&site).contains("fs.inotify.max_user_instances"), "{}", problems(&site));
        site.put_peer(Lease::new(40));
        site.healed("a new peer that nothing tells of");
        site.remove_peer(3);
        site.healed("a peer that went");
        fs::remove_file(site.env_file()).unwrap();
        site.healed("subnet.env deleted");
        let said = site.log().lines().filter(|line| line.contains("cannot be watched")).count();
        assert_eq!(said, 1, "{}", site.log());
        instances("16");
        site.until("the return to inotify", |site| !problems(site).contains("inotify"));
        site.put_peer(Lease::new(41));
        site.healed("a peer that inotify tells of");
    });
}
