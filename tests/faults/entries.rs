// SPDX-License-Identifier: Apache-2.0
//! Entries and devices are deleted or changed, or the device below an entry vanishes.

use std::fs;

use nix::sys::signal::{Signal, kill};

use crate::site::{Kind, Lease, Site, bridge, each, ip};

each! {
    route_deleted: Vxlan VxlanDual HostGw HostGwDual VxlanV6 HostGwV6 DirectDual;
    route_changed: Vxlan HostGw HostGwDual;
    forwarding_entries_deleted_and_repointed: Vxlan VxlanDual VxlanV6;
    device_deleted: Vxlan VxlanDual VxlanV6 DirectDual;
    device_down_and_up: Vxlan VxlanDual VxlanV6;
    device_mac_rewritten: Vxlan VxlanDual;
    device_mtu_changed: Vxlan VxlanDual;
    device_ttl_changed: Vxlan VxlanDual VxlanV6;
    device_addresses_flushed: Vxlan VxlanDual;
    device_replaced_by_another_kind: Vxlan;
    nexthops_flushed: Vxlan VxlanDual HostGw;
    routes_flushed: Vxlan VxlanDual HostGw HostGwDual VxlanV6 HostGwV6 DirectDual;
    foreign_entries_survive: Vxlan VxlanDual HostGw HostGwDual;
    without_nexthop_objects: Vxlan HostGw;
    notifications_that_the_kernel_drops: Vxlan HostGw;
}

fn family(v6: bool) -> &'static str {
    if v6 { "-6" } else { "-4" }
}

fn route_deleted(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    for v6 in kind.families() {
        for number in [7, 8] {
            ip(&format!("{} route del {}", family(*v6), site.peers[&number].net(*v6)));
        }
    }
    site.healed_by_entries(&before, "deleted routes");
}

fn route_changed(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    let other = |v6: bool| if v6 { "fd00::99" } else { "10.0.0.99" };
    for v6 in kind.families() {
        let net = site.peers[&8].net(*v6);
        ip(&format!("{} route replace {net} via {} dev up0 proto 90", family(*v6), other(*v6)));
    }
    site.healed_by_entries(&before, "changed routes that still bear our protocol number");
    for v6 in kind.families() {
        let net = site.peers[&7].net(*v6);
        ip(&format!("{} route replace {net} via {} dev up0 proto static", family(*v6), other(*v6)));
    }
    // A route of another protocol may change what is on the link, so here a full pass is right, too.
    site.healed("routes that another program put in our place");
}

fn forwarding_entries_deleted_and_repointed(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    for v6 in kind.families() {
        let dev = kind.device(*v6).unwrap().0;
        let (one, two) = (&site.peers[&7], &site.peers[&8]);
        let elsewhere = if *v6 { "fd00::99" } else { "10.0.0.99" };
        bridge(&format!("fdb del {} dev {dev} dst {} self", one.mac(*v6), one.public(*v6)));
        bridge(&format!("fdb replace {} dev {dev} dst {elsewhere} self permanent", two.mac(*v6)));
        ip(&format!("neigh del {} dev {dev}", one.first(*v6)));
        ip(&format!("neigh replace {} dev {dev} lladdr 02:99:99:99:99:99 nud permanent", two.first(*v6)));
        // No lease has this entry, and it is on our device, so the agent removes it.
        bridge(&format!("fdb add 02:99:99:99:99:98 dev {dev} dst {elsewhere} self permanent"));
    }
    site.healed_by_entries(&before, "forwarding entries deleted and pointed elsewhere");
}

fn device_deleted(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    for (dev, _) in kind.devices() {
        ip(&format!("link del {dev}"));
    }
    site.healed_by_links(&before, "deleted devices");
}

fn device_down_and_up(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    for (dev, _) in kind.devices() {
        ip(&format!("link set {dev} down"));
    }
    site.healed_by_links(&before, "devices set down");
    for (dev, _) in kind.devices() {
        ip(&format!("link set {dev} down"));
        ip(&format!("link set {dev} up"));
    }
    site.healed("devices set down and up");
}

fn device_mac_rewritten(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    for (dev, _) in kind.devices() {
        ip(&format!("link set {dev} address 02:99:99:99:99:99"));
    }
    site.healed_by_links(&before, "rewritten MAC addresses");
}

fn device_mtu_changed(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    for (dev, _) in kind.devices() {
        ip(&format!("link set {dev} mtu 1300"));
    }
    site.healed_by_links(&before, "changed MTU");
}

/// With a TTL of 1, the packets of the tunnel pass no router.
fn device_ttl_changed(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    for (dev, _) in kind.devices() {
        ip(&format!("link set {dev} type vxlan ttl 1"));
    }
    site.healed_by_links(&before, "changed TTL");
}

fn device_addresses_flushed(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    for (dev, _) in kind.devices() {
        ip(&format!("addr flush dev {dev}"));
    }
    site.healed_by_links(&before, "flushed addresses");
}

fn device_replaced_by_another_kind(kind: Kind) {
    let mut site = Site::running(kind);
    site.stop(Signal::SIGTERM);
    ip("link del flannel.1");
    ip("link add flannel.1 type bridge");
    site.start();
    site.healed("a device of another kind in the place of ours");
}

fn nexthops_flushed(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    assert!(!ip("nexthop").is_empty(), "routes go through nexthop objects");
    ip("nexthop flush proto 90");
    site.healed_by_entries(&before, "flushed nexthops");
    let used = ip("-4 -j route").matches("nhid").count();
    assert_eq!((used, ip("nexthop").lines().count()), (20, 20), "one nexthop for each route");
}

fn routes_flushed(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    for v6 in kind.families() {
        // One by one: `ip route flush` of iproute2 6.1 fails on routes with a nexthop.
        site.peers.values().for_each(|peer| drop(ip(&format!("{} route del {}", family(*v6), peer.net(*v6)))));
    }
    site.healed_by_entries(&before, "flushed routes");
}

fn foreign_entries_survive(kind: Kind) {
    let mut site = Site::new(kind);
    ip("link add other0 type vxlan id 77 dev up0 local 10.0.0.1 dstport 4789 nolearning");
    ip("link set other0 address 02:00:00:00:00:77 mtu 1400 up");
    let foreign = [
        "route add 192.0.2.0/24 via 10.0.0.77 dev up0 proto static",
        "route add 10.5.200.0/24 via 10.0.0.77 dev up0 proto static",
        "route add 10.5.201.0/24 via 10.0.0.77 dev up0 proto 186",
        "route add 10.5.7.0/24 via 10.0.0.77 dev up0 metric 500 proto static",
        "-6 route add fd05:0:0:200::/64 via fd00::77 dev up0 proto static",
        "nexthop add id 4242 via 10.0.0.77 dev up0",
        "neigh add 10.0.0.77 lladdr 02:00:00:00:00:77 dev up0 nud permanent",
        "addr add 198.51.100.1/32 dev other0",
    ];
    foreign.iter().for_each(|line| drop(ip(line)));
    bridge("fdb add 02:00:00:00:00:78 dev other0 dst 10.0.0.78 self permanent");
    let look = || {
        let lines = |text: String, wanted: fn(&&str) -> bool| -> Vec<String> {
            text.lines().filter(wanted).map(|line| line.trim_end().to_owned()).collect()
        };
        let mut all = lines(ip("-4 route show proto static"), |_| true);
        all.extend(lines(ip("-4 route show proto 186"), |_| true));
        all.extend(lines(ip("-6 route show proto static"), |_| true));
        all.extend(lines(ip("nexthop show id 4242"), |_| true));
        all.extend(lines(ip("neigh show dev up0 nud permanent"), |_| true));
        all.extend(lines(ip("addr show dev other0"), |line| line.contains("inet ")));
        all.extend(lines(bridge("fdb show dev other0"), |_| true));
        all
    };
    let before = look();
    assert!(before.len() >= 9, "{before:#?}");
    site.start();
    site.healed("the start");
    site.remove_peer(9);
    site.put_peer(Lease::new(30));
    site.healed("a lease added, another removed");
    assert_eq!(look(), before);
    site.stop(Signal::SIGTERM);
    let out = site.cleanup();
    assert!(out.status.success(), "{out:?}");
    assert_eq!(look(), before, "after cleanup");
}

fn without_nexthop_objects(kind: Kind) {
    let mut site = Site::new(kind);
    site.flags.push("--no-nexthop-objects".to_owned());
    site.start();
    site.healed("the start");
    assert!(ip("nexthop").is_empty());
    let before = site.quiet();
    ip("route del 10.5.7.0/24");
    site.healed_by_entries(&before, "a deleted route");
    ip("route del 10.5.7.0/24");
    ip("link set up0 down");
    ip("link set up0 up");
    site.until("the IPv4 address", |_| ip("-4 addr show dev up0").contains("10.0.0.1"));
    site.healed("a deleted route and the uplink down and up");
}

/// Returns true if the kernel has dropped a notification because a socket of this namespace was full.
fn dropped() -> bool {
    let sockets = fs::read_to_string("/proc/thread-self/net/netlink").unwrap();
    // The columns are sk, Eth, Pid, Groups, Rmem, Wmem, Dump, Locks, Drops and Inode.
    sockets.lines().skip(1).any(|line| line.split_whitespace().nth(8).is_some_and(|drops| drops != "0"))
}

fn notifications_that_the_kernel_drops(kind: Kind) {
    let mut site = Site::running(kind);
    let before = site.quiet();
    kill(site.pid(), Signal::SIGSTOP).unwrap();
    // The agent ignores routes of another table. So only the lost notifications can make it compare everything.
    let adds = (0..20_000).map(|n| format!("route add 198.18.{}.{}/32 dev lo table 77\n", n / 256, n % 256));
    fs::write(site.path("batch"), adds.collect::<String>()).unwrap();
    ip(&format!("-batch {}", site.path("batch").display()));
    assert!(dropped(), "the agent's socket has room for all of them");
    for number in [7, 8] {
        ip(&format!("route del {}", site.peers[&number].net(false)));
    }
    kill(site.pid(), Signal::SIGCONT).unwrap();
    site.healed_by_links(&before, "deleted routes whose notifications were lost");
}
