// SPDX-License-Identifier: Apache-2.0
//! The uplink goes down, comes back, is deleted, or gets another address or MTU.

use nix::sys::signal::Signal;
use serde_json::json;

use crate::site::{Kind, Site, add_uplink, each, ip};

each! {
    down_and_up: Vxlan VxlanDual HostGw HostGwDual;
    carrier_lost: Vxlan HostGw HostGwDual;
    deleted_and_created_again: Vxlan VxlanDual HostGw HostGwDual;
    readdressed: Vxlan VxlanDual HostGw HostGwDual;
    another_mtu: Vxlan VxlanDual HostGw;
    a_vpn_does_not_take_the_uplink_at_a_restart: Vxlan HostGw;
    policy_routing_chooses_the_uplink: Vxlan VxlanV6;
}

/// Adds the IPv6 address again, as a network daemon does. Linux removes the IPv6 addresses of a link that goes down.
fn give_back_v6() {
    ip("-6 addr replace fd00::1/64 dev up0 nodad");
}

fn down_and_up(kind: Kind) {
    let mut site = Site::running(kind);
    ip("link set up0 down");
    ip("link set up0 up");
    give_back_v6();
    site.healed("uplink down and up at once");
    ip("link set up0 down");
    let before = site.own_lease();
    if kind == Kind::HostGw {
        site.until("the routes to go", |_| {
            let left = crate::site::observed();
            !left.iter().any(|line| line.starts_with("route "))
        });
    }
    ip("link set up0 up");
    give_back_v6();
    site.healed("uplink down and up");
    assert_eq!(site.own_lease(), before, "nothing was published");
}

fn carrier_lost(kind: Kind) {
    let mut site = Site::running(kind);
    ip("link set far0 down");
    site.until("the loss of the carrier", |_| ip("link show up0").contains("NO-CARRIER"));
    ip("link set far0 up");
    site.healed("carrier lost and back");
    ip("link set far0 down");
    site.stop(Signal::SIGKILL);
    site.start();
    site.until("an answer without carrier", |site| site.status().is_some());
    ip("link set far0 up");
    site.healed("a start without carrier");
}

fn deleted_and_created_again(kind: Kind) {
    let mut site = Site::running(kind);
    ip("link del up0");
    site.until("the node not to be ready", |site| {
        site.status().is_some_and(|status| status["ready"] == json!(false) && status["problems"] != json!([]))
    });
    // The new link has another index and another MAC.
    ip("link add between0 type veth peer name between1");
    add_uplink();
    site.healed("uplink deleted and created again");
}

fn readdressed(kind: Kind) {
    let mut site = Site::running(kind);
    ip("addr add 10.0.0.200/24 dev up0");
    ip("addr del 10.0.0.1/24 dev up0");
    // Linux removes the second address of a subnet together with the first one.
    ip("addr replace 10.0.0.200/24 dev up0");
    if kind.dual() {
        ip("-6 addr add fd00::c8/64 dev up0 nodad");
        ip("-6 addr del fd00::1/64 dev up0");
    }
    site.own.host = 200;
    site.healed("another address of the uplink");
    // With both families, the lease may be written twice.
    let want = site.own.value(kind);
    site.until("the lease to follow, the rest of it unchanged", |site| site.own_lease().as_ref() == Some(&want));
    // The prefix changes, too. It still contains all peers, because host-gw reaches only peers on the link.
    if !kind.dual() {
        ip("addr add 10.0.0.201/16 dev up0");
        ip("addr del 10.0.0.200/24 dev up0");
        site.own.host = 201;
        site.healed("a third address, with another prefix");
    }
}

fn another_mtu(kind: Kind) {
    let mut site = Site::running(kind);
    for mtu in [1400, 1500] {
        ip(&format!("link set up0 mtu {mtu}"));
        site.mtu = mtu;
        site.healed("another MTU of the uplink");
    }
}

/// A VPN comes with a better default route while weft runs. The old uplink still works, so weft keeps it, also over a restart, until the
/// flags name another one.
fn a_vpn_does_not_take_the_uplink_at_a_restart(kind: Kind) {
    let mut site = Site::new(kind);
    // No flag says which uplink to use.
    site.uplink = "--fail-closed=true".to_owned();
    ip("route add default via 10.0.0.254 dev up0 metric 100");
    site.start();
    site.healed("the start");
    let before = site.own_lease();
    ip("link add vpn0 type veth peer name vpn1");
    ip("link set vpn1 up");
    ip("link set vpn0 up");
    ip("addr add 10.8.0.2/24 dev vpn0");
    ip("route add default via 10.8.0.1 dev vpn0 metric 50");
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        site.stop(signal);
        site.start();
        site.healed("a restart beside a VPN");
        assert_eq!(site.own_lease(), before, "nothing else was published");
    }
    site.stop(Signal::SIGTERM);
    site.uplink = "--iface=vpn0".to_owned();
    site.start();
    site.until("the flag to win", |site| {
        let leases = std::fs::read_dir(site.path("store/subnets")).unwrap();
        let texts = leases.map(|lease| std::fs::read_to_string(lease.unwrap().path()).unwrap_or_default());
        texts.filter(|text| text.contains("\"10.8.0.2\"")).count() == 1
    });
}

/// The main table has a default route over another interface than the table to which a rule leads. So only the kernel knows by which
/// interface an address is reached.
fn policy_routing_chooses_the_uplink(kind: Kind) {
    let v6 = kind == Kind::VxlanV6;
    let (option, far) = if v6 { ("-6", "2001:db8::9") } else { ("-4", "192.0.2.9") };
    let route = |via: &str, dev: &str, table: &str| {
        ip(&format!("{option} route add default via {via} dev {dev} table {table}"));
    };
    let rule = |table: u32| ip(&format!("{option} rule add to {far} lookup {table} pref {table}"));
    let address =
        |dev: &str, net: &str| ip(&format!("{option} addr add {net} dev {dev} {}", if v6 { "nodad" } else { "" }));
    let add_link = |dev: &str| {
        ip(&format!("link add {dev} type veth peer name {dev}-far"));
        ip(&format!("link set {dev}-far up"));
        ip(&format!("link set {dev} up"));
    };
    let mut site = Site::new(kind);
    site.uplink = format!("--iface-can-reach={far}");
    add_link("main0");
    address("main0", if v6 { "fd08::2/64" } else { "10.8.0.2/24" });
    route(if v6 { "fd08::1" } else { "10.8.0.1" }, "main0", "main");
    route(if v6 { "fd00::fe" } else { "10.0.0.254" }, "up0", "100");
    rule(100);
    site.start();
    site.healed("a start with a rule and a second table");

    // The uplink is deleted, and its routes with it. There is another interface, but no rule leads to it yet.
    ip(&format!("{option} route del default table main"));
    ip("link del up0");
    site.until("the loss of the uplink to be reported", |site| {
        site.status().is_some_and(|status| status["problems"].to_string().contains("uplink: "))
    });
    add_link("next0");
    let (net, ip_text) = if v6 { ("fd00::c8/64", "fd00::c8") } else { ("10.0.0.200/24", "10.0.0.200") };
    address("next0", net);
    route(if v6 { "fd00::fe" } else { "10.0.0.254" }, "next0", "101");
    rule(101);
    let member = if v6 { "PublicIPv6" } else { "PublicIP" };
    site.until("the interface of the new rule to be the uplink", |site| {
        site.own_lease().is_some_and(|lease| lease[member] == ip_text)
    });
}
