// SPDX-License-Identifier: Apache-2.0
//! Which address a node publishes, and which lease it takes for its own, while addresses are added, removed and moved to other machines.

use std::fs;

use nix::sys::signal::Signal;
use serde_json::{Value as Json, json};

use crate::site::{Kind, Lease, Site, each, in_namespace, ip};

each! {
    a_vip_on_the_uplink: Vxlan VxlanDual HostGw;
    the_address_comes_back_behind_a_vip: Vxlan VxlanDual HostGw;
    another_lease_with_our_address: Vxlan VxlanDual HostGw;
    a_single_address_in_use_stays_until_a_restart: Vxlan VxlanDual;
}

const VIP: &str = "10.0.0.100/32";

/// Waits until the agent has read everything that `ip` changed so far. The kernel announces another MTU of the uplink after it, and the agent
/// then changes the devices.
fn wait_until_read(site: &mut Site, what: &str) {
    site.mtu = if site.mtu == 1500 { 1480 } else { 1500 };
    ip(&format!("link set up0 mtu {}", site.mtu));
    site.healed(what);
}

fn add_vip(kind: Kind) {
    ip(&format!("addr add {VIP} dev up0"));
    if kind.dual() {
        ip("-6 addr add fd00::64/128 dev up0 nodad");
    }
}

fn a_vip_on_the_uplink(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.own_lease();
    add_vip(kind);
    wait_until_read(&mut site, "a VIP beside a permanent address");
    ip("addr change 10.0.0.1/24 dev up0 valid_lft 3600 preferred_lft 3600");
    wait_until_read(&mut site, "a VIP beside a dynamic address");
    site.stop(Signal::SIGTERM);
    site.start();
    wait_until_read(&mut site, "a start with a VIP beside a dynamic address");
    // A VIP with the prefix of the subnet looks like any other address. The address in use stays.
    ip("addr add 10.0.0.101/24 dev up0");
    wait_until_read(&mut site, "a permanent address of the same subnet");
    site.stop(Signal::SIGTERM);
    site.start();
    wait_until_read(&mut site, "a start with a permanent address of the same subnet");
    assert_eq!(site.own_lease(), before, "nothing else was published");
}

fn the_address_comes_back_behind_a_vip(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.own_lease();
    add_vip(kind);
    ip("addr del 10.0.0.1/24 dev up0");
    site.until("the loss to be told", |site| problems(site).contains("up0 lost 10.0.0.1"));
    assert_eq!(site.own_lease(), before, "the VIP is not published");
    ip("addr add 10.0.0.1/24 dev up0");
    wait_until_read(&mut site, "the address is behind the VIP");
    assert_eq!(site.own_lease(), before, "nor later");
}

/// A cloud gives the node a single address (/32), and somebody adds one with a subnet. The node logs once what a restart will change, and a restart
/// changes it.
fn a_single_address_in_use_stays_until_a_restart(kind: Kind) {
    let mut site = Site::new(kind);
    ip("addr del 10.0.0.1/24 dev up0");
    ip("addr add 10.0.0.1/32 dev up0");
    if kind.dual() {
        ip("-6 addr del fd00::1/64 dev up0");
        ip("-6 addr add fd00::1/128 dev up0 nodad");
    }
    site.start();
    site.healed("the start with a single address");
    let before = site.own_lease();
    ip("addr add 10.0.0.200/24 dev up0");
    if kind.dual() {
        ip("-6 addr add fd00::c8/64 dev up0 nodad");
    }
    (0..3).for_each(|_| wait_until_read(&mut site, "an address of a subnet beside the single one"));
    assert_eq!(site.own_lease(), before, "nothing was published");
    let said = site.log().lines().filter(|line| line.contains("to publish 10.0.0.200")).count();
    assert_eq!(said, 1, "{}", site.log());
    site.stop(Signal::SIGTERM);
    site.start();
    site.own.host = 200;
    site.healed("a restart, which chooses again");
}

fn problems(site: &Site) -> String {
    site.status().map(|status| status["problems"].to_string()).unwrap_or_default()
}

/// Another node also publishes our address, in a lease that is older than ours and has another subnet and MAC.
fn another_lease_with_our_address(kind: Kind) {
    let mut site = Site::running(kind);
    let mut other = Lease { host: 1, mac: 0x61, ..Lease::new(61) }.value(kind);
    other["Created"] = json!(1);
    let key = Lease::new(61).key(kind);
    site.put(&key, &other.to_string());
    let mine = site.own_lease();
    for restart in [Signal::SIGTERM, Signal::SIGKILL] {
        site.stop(restart);
        site.start();
        site.healed("a restart beside a lease with our address");
        assert_eq!(site.own_lease(), mine);
    }
    // If our lease is deleted while the agent is down, the other lease is still not ours.
    site.stop(Signal::SIGTERM);
    fs::remove_file(site.lease_file(&site.own.key(kind))).unwrap();
    site.start();
    site.healed("a restart after our lease was removed");
    let text = fs::read_to_string(site.lease_file(&key)).unwrap();
    assert_eq!(serde_json::from_str::<Json>(&text).unwrap(), other, "the other lease is as it was");
}

/// The uplink has no address for a while. Neither the bridge of the pods nor a device of weft becomes the uplink.
fn away(uplink: &str) {
    in_namespace(|| {
        let mut site = Site::new(Kind::Vxlan);
        site.uplink = uplink.to_owned();
        ip("route add default via 10.0.0.254 dev up0");
        // Add the bridge of the pods, and the veth of a routed pod.
        ip("link add cni0 type bridge");
        ip("addr add 10.5.1.1/24 dev cni0");
        ip("link set cni0 up");
        site.start();
        site.healed("the start");
        let index = ip("-o link show flannel.1");
        let before = site.own_lease();
        ip("addr del 10.0.0.1/24 dev up0");
        site.until("the loss to be told", |site| problems(site).contains("uplink: "));
        ip("link set cni0 mtu 1400");
        ip("addr add 10.0.0.1/24 dev up0");
        ip("route replace default via 10.0.0.254 dev up0");
        wait_until_read(&mut site, "the address of the uplink away and back");
        assert_eq!(site.own_lease(), before, "nothing was published");
        let same = |text: &str| text.split(':').next().map(str::to_owned);
        assert_eq!(same(&ip("-o link show flannel.1")), same(&index), "the device was not made again");
    });
}

#[test]
fn away_with_a_regex() {
    away("--iface-regex=^10\\.");
}

#[test]
fn away_with_an_address_to_reach() {
    away("--iface-can-reach=10.5.7.1");
}

#[test]
fn away_with_a_default_route() {
    away("--public-ip=10.0.0.1");
}

/// A VPN with a more specific route does not become the uplink, unless the uplink is deleted.
#[test]
fn a_vpn_appears() {
    in_namespace(|| {
        let mut site = Site::new(Kind::Vxlan);
        site.uplink = "--iface-can-reach=192.0.2.9".to_owned();
        ip("route add 192.0.2.0/24 via 10.0.0.254 dev up0");
        site.start();
        site.healed("the start");
        let before = site.own_lease();
        ip("link add vpn0 type veth peer name vpn1");
        ip("link set vpn1 up");
        ip("link set vpn0 up");
        ip("addr add 10.8.0.2/24 dev vpn0");
        ip("route add 192.0.2.9/32 dev vpn0");
        wait_until_read(&mut site, "a VPN with a more specific route");
        assert_eq!(site.own_lease(), before);
        ip("link del up0");
        // The status says so for ten seconds only. A busy machine may look later, and finds it in the log.
        site.until("the loss to be told", |site| {
            problems(site).contains("up0 is gone") || site.log().contains("uplink: up0 is gone")
        });
        site.until("the VPN to be the uplink", |site| {
            site.own_lease().is_some_and(|lease| lease["PublicIP"] == "10.8.0.2")
        });
    });
}
