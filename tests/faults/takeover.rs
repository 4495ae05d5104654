// SPDX-License-Identifier: Apache-2.0
//! A node where flannel ran before. weft takes over flannel's entries in place, and removes those that no lease needs.

use std::fs;

use nix::sys::signal::Signal;
use serde_json::Value as Json;

use crate::site::{Kind, Lease, Site, array, bridge, each, ip, run};

each! {
    from_flannel_vxlan: Vxlan VxlanDual;
    from_flannel_host_gw: HostGw HostGwDual;
    from_flannel_vxlan_to_host_gw: HostGw HostGwDual;
    routes_stay_if_flannel_had_another_network: HostGw;
    flannel_between_two_runs_of_weft: HostGw HostGwDual;
    routes_of_the_same_form_stay_after_a_plain_restart: HostGw HostGwDual;
}

/// Writes the device and the entries as flannel does, for the first ten peers and for two that have left.
fn flannel_vxlan(site: &Site) {
    let families: &[bool] = if site.kind.dual() { &[false, true] } else { &[false] };
    for v6 in families.iter().copied() {
        let (dev, overhead) = site.kind.devices()[usize::from(v6)];
        let (mac, local, mtu) = (site.own.mac(v6), site.own.public(v6), site.mtu - 50);
        assert!(overhead >= 50);
        ip(&format!(
            "link add {dev} address {mac} mtu {mtu} type vxlan id 1 dev up0 local {local} dstport 8472 nolearning"
        ));
        ip(&format!("addr add {}/{} dev {dev}", site.own.first(v6), if v6 { "128 nodad" } else { "32" }));
        ip(&format!("link set {dev} up"));
        let gone = [70, 71].map(Lease::new);
        for peer in site.peers.values().take(10).chain(&gone) {
            let (net, first, public, mac) = (peer.net(v6), peer.first(v6), peer.public(v6), peer.mac(v6));
            ip(&format!("neigh replace {first} lladdr {mac} dev {dev} nud permanent"));
            bridge(&format!("fdb replace {mac} dev {dev} dst {public} self permanent"));
            let onlink = if v6 { "" } else { "onlink" };
            if v6 {
                // flannel gives IPv6 routes through a gateway on the device, too.
                ip(&format!("-6 route replace {net} via {first} dev {dev} onlink"));
            } else {
                ip(&format!("route replace {net} via {first} dev {dev} {onlink}"));
            }
        }
    }
}

fn index(dev: &str) -> Json {
    array(&run("ip", &format!("-j link show {dev}")))[0]["ifindex"].clone()
}

fn from_flannel_vxlan(kind: Kind) {
    let mut site = Site::new(kind);
    fs::create_dir_all(site.path("run")).unwrap();
    fs::write(site.env_file(), site.expected_env()).unwrap();
    flannel_vxlan(&site);
    let before: Vec<Json> = kind.devices().iter().map(|(dev, _)| index(dev)).collect();
    site.start();
    site.healed("the takeover");
    let after: Vec<Json> = kind.devices().iter().map(|(dev, _)| index(dev)).collect();
    assert_eq!(before, after, "the devices were kept");
    for (dev, _) in kind.devices() {
        let alias = array(&run("ip", &format!("-j -d link show {dev}")))[0]["ifalias"].clone();
        assert!(alias.as_str().is_some_and(|alias| alias.starts_with("weft ")), "{dev} is ours now: {alias}");
    }
    site.stop(Signal::SIGTERM);
    let out = site.cleanup();
    assert!(out.status.success(), "{out:?}");
    assert!(crate::site::observed().is_empty(), "{:#?}", crate::site::observed());
}

fn flannel_host_gw(site: &Site) {
    flannel_routes(site, site.peers.values().take(10));
    flannel_leftovers(site);
}

/// Adds routes for two peers that have left.
fn flannel_leftovers(site: &Site) {
    flannel_routes(site, [70, 71].map(Lease::new).iter());
}

fn flannel_routes<'a>(site: &Site, peers: impl Iterator<Item = &'a Lease>) {
    for peer in peers {
        ip(&format!("route replace {} via {} dev up0", peer.net(false), peer.public(false)));
        if site.kind.dual() {
            ip(&format!("-6 route replace {} via {} dev up0", peer.net(true), peer.public(true)));
        }
    }
}

fn left() -> Vec<Json> {
    let mut routes = array(&run("ip", "-4 -j route show proto boot"));
    routes.extend(array(&run("ip", "-6 -j route show proto boot")));
    routes
}

fn from_flannel_host_gw(kind: Kind) {
    let mut site = Site::new(kind);
    fs::create_dir_all(site.path("run")).unwrap();
    fs::write(site.env_file(), site.expected_env()).unwrap();
    flannel_host_gw(&site);
    site.start();
    site.healed("the takeover");
    site.until("flannel's leftovers to go", |_| left().is_empty());
}

/// When flannel is started with host-gw, the devices of its vxlan stay. weft removes them.
fn from_flannel_vxlan_to_host_gw(kind: Kind) {
    let mut site = Site::new(kind);
    fs::create_dir_all(site.path("run")).unwrap();
    fs::write(site.env_file(), site.expected_env()).unwrap();
    let families: &[bool] = if kind.dual() { &[false, true] } else { &[false] };
    for v6 in families.iter().copied() {
        let (dev, local) = (if v6 { "flannel-v6.1" } else { "flannel.1" }, site.own.public(v6));
        ip(&format!("link add {dev} type vxlan id 1 dev up0 local {local} dstport 8472 nolearning"));
        ip(&format!("addr add {}/{} dev {dev}", site.own.first(v6), if v6 { "128 nodad" } else { "32" }));
        ip(&format!("link set {dev} up"));
    }
    site.start();
    // This also checks that no device of flannel is left.
    site.healed("the takeover");
    assert_eq!(said(&site), families.len(), "{}", site.log());
}

/// If no subnet.env names our Network, the routes need not be flannel's. Those of peers are taken over, and the others stay.
fn routes_stay_if_flannel_had_another_network(kind: Kind) {
    let mut site = Site::new(kind);
    flannel_host_gw(&site);
    site.start();
    site.healed("the start");
    assert_eq!(left().len(), 2, "{:#?}", left());
}

/// Writes subnet.env as flannel does, under another name that is then changed. The content is the same as weft's.
fn flannel_env(site: &Site) {
    let aside = site.path("run/.subnet.env");
    fs::write(&aside, site.expected_env()).unwrap();
    fs::rename(aside, site.env_file()).unwrap();
}

fn said(site: &Site) -> usize {
    site.log().lines().filter(|line| line.contains("flannel left this entry")).count()
}

/// weft ran, then flannel ran again, and then weft starts once more. It removes what flannel left in between, once, and names it.
fn flannel_between_two_runs_of_weft(kind: Kind) {
    let mut site = Site::running(kind);
    site.stop(Signal::SIGTERM);
    flannel_host_gw(&site);
    flannel_env(&site);
    site.start();
    site.healed("the second takeover");
    site.until("flannel's leftovers to go", |_| left().is_empty());
    let count = if kind.dual() { 4 } else { 2 };
    assert_eq!(said(&site), count, "{}", site.log());
    // If the same routes are written later, they belong to another program.
    site.stop(Signal::SIGTERM);
    flannel_leftovers(&site);
    site.start();
    site.healed("a plain restart");
    assert_eq!((left().len(), said(&site)), (count, count), "{}", site.log());
}

/// A person adds routes of the same form on a node where only weft runs. They stay when weft writes subnet.env again.
fn routes_of_the_same_form_stay_after_a_plain_restart(kind: Kind) {
    let mut site = Site::running(kind);
    flannel_leftovers(&site);
    let count = if kind.dual() { 4 } else { 2 };
    for mtu in [1400, 1500, 1400] {
        ip(&format!("link set up0 mtu {mtu}"));
        site.mtu = mtu;
        site.healed("another subnet.env of weft's");
        site.stop(if mtu == 1500 { Signal::SIGKILL } else { Signal::SIGTERM });
        site.start();
        site.healed("a restart");
        site.quiet();
        assert_eq!((left().len(), said(&site)), (count, 0), "{}", site.log());
    }
}
