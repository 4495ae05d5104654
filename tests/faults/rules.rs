// SPDX-License-Identifier: Apache-2.0
//! The traffic rules and the tunnel guard of an agent: when subnet.env says that they are in place, what happens when another program removes
//! them, and that cleanup removes them.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;

use nix::sys::signal::Signal;
use serde_json::json;
use weft::firewall::nft::batch::Batch;
use weft::firewall::nft::{connection, table};
use weft::instance::Instance;
use weft_subnet::cidr::Family;

use crate::site::{Kind, Site, each, run};

each! {
    masquerading_is_told_when_its_rules_are_in_place_and_they_come_back: Vxlan HostGwDual;
    rules_of_iptables_come_back_and_cleanup_removes_them: HostGw HostGwDual;
    rules_of_the_other_mode_and_of_flannel_go_and_chains_that_drop_are_named: HostGwDual;
    a_removed_tunnel_guard_comes_back: Vxlan VxlanDual;
}

fn families(kind: Kind) -> impl Iterator<Item = Family> {
    kind.families().iter().map(|v6| if *v6 { Family::V6 } else { Family::V4 })
}

fn is_there(family: Family, table: &str) -> bool {
    table::head(&mut connection::open().unwrap(), family, table).unwrap().is_some()
}

/// Removes a table as another program would.
fn remove(family: Family, table: &str) {
    let mut netlink = connection::open().unwrap();
    let mut batch = Batch::new(&mut netlink);
    batch.delete(family, table);
    batch.send().unwrap().unwrap();
}

/// Checks that cleanup leaves none of these tables.
fn cleaned_up(site: &mut Site, tables: &[&str]) {
    site.stop(Signal::SIGTERM);
    assert!(tables.iter().all(|table| families(site.kind).all(|family| is_there(family, table))), "pods need them");
    let out = site.cleanup();
    assert!(out.status.success(), "{out:?}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("and the traffic rules"), "{out:?}");
    assert!(!tables.iter().any(|table| families(site.kind).any(|family| is_there(family, table))));
}

/// The resync is an hour away, so only a notification leads to the repair.
fn masquerading_is_told_when_its_rules_are_in_place_and_they_come_back(kind: Kind) {
    let mut site = Site::new(kind);
    site.flags.extend(["--ip-masq", "--firewall=nft", "--iptables-resync=3600"].map(str::to_owned));
    let table = Instance::new(&site.env_file()).name;
    site.start();
    site.until("subnet.env", |site| {
        let Ok(text) = fs::read_to_string(site.env_file()) else { return false };
        assert!(families(kind).all(|family| is_there(family, &table)), "the rules come first");
        assert!(text.contains("FLANNEL_IPMASQ=true"), "the container runtime must not masquerade, too: {text}");
        true
    });
    site.ready();
    for (number, family) in families(kind).enumerate() {
        remove(family, &table);
        site.until("the rules to come back", |_| is_there(family, &table));
        site.until("the repair to be counted", |site| {
            let rules = site.status().unwrap_or_default()["rules"].clone();
            rules["in_place"] == json!(true) && rules["mended"] == json!(number + 1)
        });
    }
    cleaned_up(&mut site, &[&table]);
}

/// Returns our rules in iptables-nft, and the jumps to them.
fn in_iptables(kind: Kind, instance: &str) -> Vec<String> {
    let mut all = Vec::new();
    for v6 in kind.families() {
        let saved = run(if *v6 { "ip6tables-nft-save" } else { "iptables-nft-save" }, "");
        let chain = format!("{}-", instance.to_uppercase());
        all.extend(saved.lines().filter(|line| line.starts_with("-A") && line.contains(&chain)).map(str::to_owned));
    }
    all
}

/// iptables notifies nobody, so what another program removes comes back at the resync.
fn rules_of_iptables_come_back_and_cleanup_removes_them(kind: Kind) {
    let mut site = Site::new(kind);
    site.flags.extend(["--ip-masq", "--firewall=iptables", "--iptables-resync=1"].map(str::to_owned));
    let instance = Instance::new(&site.env_file()).name;
    site.start();
    site.ready();
    let complete = in_iptables(kind, &instance);
    for verdict in ["-j MASQUERADE", "-j ACCEPT"] {
        let lines = complete.iter().filter(|line| line.contains(verdict)).count();
        assert!(lines >= kind.families().len(), "{verdict}: {complete:#?}");
    }
    for v6 in kind.families() {
        let program = if *v6 { "ip6tables-nft" } else { "iptables-nft" };
        for damage in ["-t nat -F", "-F FORWARD"] {
            run(program, &format!("-w 20 {damage}"));
            site.until("the rules to come back", |_| in_iptables(kind, &instance) == complete);
        }
    }
    site.stop(Signal::SIGTERM);
    assert_eq!(in_iptables(kind, &instance), complete, "pods need them");
    let out = site.cleanup();
    assert!(out.status.success(), "{out:?}");
    assert_eq!(in_iptables(kind, &instance), [""; 0]);
}

/// The rules of the other mode go after those of the new one are there, and what nobody has made for pods stays.
fn rules_of_the_other_mode_and_of_flannel_go_and_chains_that_drop_are_named(kind: Kind) {
    let mut site = Site::new(kind);
    let instance = Instance::new(&site.env_file()).name;
    let flags = |mode: &str| ["--ip-masq", "--iptables-resync=1", mode].map(str::to_owned).to_vec();
    site.flags = flags("--firewall=iptables");
    site.start();
    site.ready();
    assert!(!in_iptables(kind, &instance).is_empty());
    site.stop(Signal::SIGTERM);
    for table in ["ip flannel-ipv4", "ip6 flannel-ipv6", "ip other"] {
        run("nft", &format!("add table {table}"));
    }
    site.flags = flags("--firewall=nft");
    site.start();
    site.until("the rules in nftables alone", |_| {
        let is_gone = in_iptables(kind, &instance).is_empty();
        assert!(!is_gone || families(kind).all(|family| is_there(family, &instance)), "the new rules come first");
        is_gone && !is_there(Family::V4, "flannel-ipv4") && !is_there(Family::V6, "flannel-ipv6")
    });
    assert!(is_there(Family::V4, "other"), "nobody knows whose it is");
    run("nft", "add table ip fw");
    run("nft", "add chain ip fw way { type filter hook forward priority 0 ; policy drop ; }");
    let says = |site: &Site| {
        let problems = site.status()?["problems"].to_string();
        Some(problems.contains("chain way of table ip fw drops forwarded packets of pods; run: nft insert rule"))
    };
    site.until("the chain to be named", |site| says(site) == Some(true));
    run("nft", "delete table ip fw");
    site.until("the warning to end", |site| says(site) == Some(false));
}

/// Returns the addresses from which the guard of this family lets packets in, if its chain is there.
fn let_in(family: Family, guard: &str) -> Option<BTreeSet<IpAddr>> {
    let mut netlink = connection::open().unwrap();
    if !table::has_chain(&mut netlink, family, guard, "input").unwrap() {
        return None;
    }
    table::elements(&mut netlink, family, guard, "peers").ok()
}

fn a_removed_tunnel_guard_comes_back(kind: Kind) {
    let mut site = Site::new(kind);
    site.flags.push("--guard-tunnel".to_owned());
    for lease in site.peers.values() {
        let mut value = lease.value(kind);
        for v6 in kind.families() {
            value[if *v6 { "TunnelIPv6" } else { "TunnelIP" }] = json!(lease.public(*v6));
        }
        site.put(&lease.key(kind), &value.to_string());
    }
    let guard = format!("{}-guard", Instance::new(&site.env_file()).name);
    site.start();
    site.healed("the start");
    for v6 in kind.families() {
        let family = if *v6 { Family::V6 } else { Family::V4 };
        let all: BTreeSet<IpAddr> = site.peers.values().map(|peer| peer.public(*v6).parse().unwrap()).collect();
        let is_whole = |_: &Site| let_in(family, &guard).is_some_and(|peers| peers.is_superset(&all));
        site.until("the guard", is_whole);
        let before = site.quiet();
        remove(family, &guard);
        site.until("the guard to come back", is_whole);
        site.healed_by_entries(&before, "a removed tunnel guard");
    }
    cleaned_up(&mut site, &[&guard]);
}
