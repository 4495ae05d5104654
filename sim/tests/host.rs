// SPDX-License-Identifier: Apache-2.0
//! Compares the simulated host with Linux. The same random operations on the uplink, its addresses, routes and tunnel must leave the same links,
//! addresses and routes. `tests/kernel/fake.rs` compares the entries of weft in more detail.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are not inside #[test] themselves

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use weft::kernel::{Kernel, LinuxKernel, LinuxOptions, Outcome};
use weft_backends::diff::Op;
use weft_backends::link::Link;
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, Mac, Observed, Route, Value};
use weft_backends::vxlan::VxlanLink;
use weft_sim::chance::Chance;
use weft_sim::kernel::{DHCP, PERMANENT, STATIC, SimKernel, everywhere, name};
use weft_sim::machine::uplink;

#[path = "../../tests/common/namespace.rs"]
#[allow(dead_code)] // the tests of the kernel use more of it
mod namespace;

use namespace::{alone, ip};

const MAC: Mac = Mac([2, 0, 0, 0xee, 0, 1]);
const TUNNEL: &str = "flannel.1";
/// The number of lists. Each has a new namespace.
const LISTS: u64 = 30;
/// The number of operations in a list.
const LENGTH: usize = 15;
/// Linux handles a lost carrier in the background. This only ends a test that fails.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy)]
enum Step {
    /// The uplink gets its address and a default route, as from DHCP.
    Dhcp,
    /// The uplink gets a single address.
    Vip,
    /// One of these two addresses goes.
    AddressGoes(bool),
    Up(bool),
    Carrier(bool),
    NewUplink,
    /// An administrator adds a static route.
    StaticRoute,
    /// weft writes or removes a route to a gateway of the LAN.
    GatewayRoute(bool),
    /// weft writes or removes its tunnel.
    Tunnel(bool),
    /// weft writes or removes a route through its tunnel.
    TunnelRoute(bool),
}

fn step(chance: &mut Chance) -> Step {
    let flag = chance.percent(60);
    match chance.below(16) {
        0..3 => Step::Dhcp,
        3 => Step::Vip,
        4 => Step::AddressGoes(flag),
        5 | 6 => Step::Up(flag),
        7 | 8 => Step::Carrier(flag),
        9 => Step::NewUplink,
        10 => Step::StaticRoute,
        11 | 12 => Step::GatewayRoute(flag),
        13 => Step::Tunnel(flag),
        _ => Step::TunnelRoute(flag),
    }
}

/// Both hosts.
struct Pair {
    linux: LinuxKernel,
    simulated: SimKernel,
}

/// What both hosts must agree on.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    /// Whether the uplink is up and has a carrier.
    uplink: Option<(bool, bool)>,
    addresses: Vec<IpNet>,
    /// Routes of other programs, with gateway and protocol.
    others: BTreeMap<(IpNet, u32), (Option<IpAddr>, u8)>,
    /// What weft has written.
    ours: BTreeMap<Key, Value>,
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn address() -> IpNet {
    net("10.9.0.1/24")
}

fn gateway() -> IpAddr {
    Ipv4Addr::new(10, 9, 0, 254).into()
}

/// Runs a command that Linux may refuse.
fn try_ip(line: &str) {
    Command::new("ip").args(line.split_whitespace()).output().unwrap();
}

fn see(kernel: &mut impl Kernel) -> Seen {
    let machine = kernel.machine().unwrap();
    let link = machine.links.iter().find(|link| link.name == uplink());
    let mut addresses: Vec<IpNet> = machine
        .addrs
        .iter()
        .filter(|addr| Some(addr.index) == link.map(|link| link.index))
        .map(|addr| addr.net)
        .collect();
    addresses.sort_unstable();
    let others = machine.routes.iter().filter(|route| route.dev == Some(uplink()));
    let others = others.map(|route| ((route.net, route.metric), (route.via, route.protocol))).collect();
    let observed: Observed = kernel.observe(&[name(TUNNEL)]).unwrap();
    let ours = observed.iter().filter(|(key, seen)| match key {
        Key::Route(..) => seen.protocol == PROTOCOL,
        Key::Link(_) => seen.mark,
        _ => false,
    });
    let ours = ours.map(|(key, seen)| (*key, seen.value.clone())).collect();
    Seen { uplink: link.map(|link| (link.up, link.carrier)), addresses, others, ours }
}

impl Pair {
    fn new() -> Pair {
        // Linux would add IPv6 addresses and routes by itself.
        fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        // Without any address, Linux takes every gateway for a broadcast address. A machine always has lo.
        ip("link set lo up");
        let options =
            LinuxOptions { nexthop_objects: true, instance: 7, protocol: PROTOCOL, alias: "weft test".into() };
        let mut pair = Pair { linux: LinuxKernel::open(options).unwrap(), simulated: SimKernel::default() };
        pair.add_uplink();
        pair
    }

    fn add_uplink(&mut self) {
        ip(&format!("link add {} address {MAC} type veth peer name far0", uplink()));
        ip("link set far0 up");
        ip(&format!("link set {} up", uplink()));
        self.simulated.add_link(uplink(), MAC);
    }

    /// Lets weft write into both, and compares the outcomes.
    fn write(&mut self, write: bool, key: Key, value: Value) {
        let op = if write { Op::Ensure(key, value) } else { Op::Remove(key, value) };
        let kind = |outcomes: Vec<Outcome>| matches!(outcomes[..], [Outcome::Done]);
        let linux = self.linux.apply(std::slice::from_ref(&op));
        let simulated = self.simulated.apply(std::slice::from_ref(&op));
        assert_eq!(kind(linux.clone()), kind(simulated.clone()), "{op}: {linux:?} of Linux, {simulated:?} simulated");
    }

    fn carry_out(&mut self, step: Step) {
        let (dev, vip) = (uplink(), net("10.9.0.250/32"));
        match step {
            Step::Dhcp => {
                try_ip(&format!("addr add {} dev {dev}", address()));
                try_ip(&format!("route replace default via {} dev {dev} proto dhcp", gateway()));
                self.simulated.add_address(dev, address(), PERMANENT);
                self.simulated.add_route(everywhere(), gateway(), dev, DHCP);
            }
            Step::Vip => {
                try_ip(&format!("addr add {vip} dev {dev}"));
                self.simulated.add_address(dev, vip, PERMANENT);
            }
            Step::AddressGoes(first) => {
                let goes = if first { address() } else { vip };
                try_ip(&format!("addr del {goes} dev {dev}"));
                self.simulated.remove_address(dev, goes);
            }
            Step::Up(up) => {
                ip(&format!("link set {dev} {}", if up { "up" } else { "down" }));
                self.simulated.set_up(dev, up);
            }
            Step::Carrier(carrier) => {
                ip(&format!("link set far0 {}", if carrier { "up" } else { "down" }));
                self.simulated.set_carrier(dev, carrier);
            }
            Step::NewUplink => {
                ip(&format!("link del {dev}"));
                self.simulated.delete_link(dev);
                self.add_uplink();
            }
            Step::StaticRoute => {
                try_ip(&format!("route replace 10.100.0.0/24 via {} dev {dev} proto static", gateway()));
                self.simulated.add_route(net("10.100.0.0/24"), gateway(), dev, STATIC);
            }
            Step::GatewayRoute(write) => {
                let route = Route::Unicast { via: Ipv4Addr::new(10, 9, 0, 7).into(), dev, onlink: false };
                self.write(write, Key::Route(net("10.1.2.0/24"), 0), Value::Route(route));
            }
            Step::Tunnel(write) => {
                let local = address().addr();
                let kind = VxlanLink { vni: 1, port: 8472, parent: dev, local, gbp: false, learning: false, ttl: 0 };
                let link = Link { kind: Arc::new(kind), mtu: 1450, mac: Some(MAC), up: true };
                self.write(write, Key::Link(name(TUNNEL)), Value::link(link));
            }
            Step::TunnelRoute(write) => {
                let route = Route::Unicast { via: Ipv4Addr::new(10, 1, 3, 0).into(), dev: name(TUNNEL), onlink: true };
                self.write(write, Key::Route(net("10.1.3.0/24"), 0), Value::Route(route));
            }
        }
    }

    /// Waits until both hosts look the same.
    #[allow(clippy::disallowed_methods, reason = "this is the wait for a condition")]
    fn compare(&mut self, steps: &[Step]) {
        let end = Instant::now() + LIMIT;
        loop {
            let (linux, simulated) = (see(&mut self.linux), see(&mut self.simulated));
            if linux == simulated {
                return;
            }
            assert!(Instant::now() < end, "after {steps:#?}\nLinux: {linux:#?}\nsimulated: {simulated:#?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn the_simulated_host_does_what_linux_does() {
    for seed in 1..=LISTS {
        alone(|| {
            let (mut chance, mut pair, mut steps) = (Chance::new(seed, 7), Pair::new(), Vec::new());
            for _ in 0..LENGTH {
                let step = step(&mut chance);
                steps.push(step);
                pair.carry_out(step);
                pair.compare(&steps);
            }
        });
    }
}
