// SPDX-License-Identifier: Apache-2.0
use weft_backends::host::Reach;
use weft_backends::state::Name;
use weft_subnet::cidr::Subnets;

use super::candidates::{DAD_FAILED, DEPRECATED, PERMANENT, TEMPORARY, TENTATIVE};
use super::*;
use crate::kernel::{AddrInfo, Creator, Machine, RouteInfo, RouteLookup};

/// Chooses without a lease, among all links.
fn pick(choice: &UplinkChoice, machine: &Machine, families: Families) -> Result<Picked, PickError> {
    super::pick(choice, &Candidates::new(machine, families, Subnets::default()))
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// Returns a machine with lo, eth0 with 10.0.0.1, fd00::1 and a default route of metric 100, eth1 with 192.168.1.1 and metric 50, and wlan0
/// without addresses.
fn machine() -> Machine {
    let link = |(index, text): (u32, &str)| LinkInfo {
        index,
        name: name(text),
        mtu: 1500,
        mac: None,
        up: true,
        carrier: true,
        loopback: text == "lo",
        creator: Creator::Unknown,
    };
    let links = [(1, "lo"), (2, "eth0"), (3, "eth1"), (4, "wlan0")].map(link).to_vec();
    let addrs = vec![
        addr(1, "127.0.0.1/8", PERMANENT),
        addr(2, "10.0.0.1/24", PERMANENT),
        addr(2, "fe80::1/64", PERMANENT),
        addr(2, "fd00::1/64", PERMANENT),
        addr(3, "192.168.1.1/24", PERMANENT),
    ];
    let routes = vec![
        route("0.0.0.0/0", 100, "eth0"),
        route("0.0.0.0/0", 50, "eth1"),
        route("::/0", 1024, "eth0"),
        route("10.0.0.0/24", 0, "eth0"),
        route("10.9.0.0/16", 0, "eth0"),
        route("10.9.9.0/24", 7, "eth1"),
        route("10.9.9.0/24", 9, "eth0"),
    ];
    Machine { links, addrs, routes, lookup: None }
}

fn addr(index: u32, net: &str, flags: u32) -> AddrInfo {
    AddrInfo { index, net: net.parse().unwrap(), scope: 0, flags }
}

fn route(net: &str, metric: u32, dev: &str) -> RouteInfo {
    RouteInfo { net: net.parse().unwrap(), metric, dev: Some(name(dev)), via: None, reach: Reach::Gateway, protocol: 3 }
}

fn choice(ifaces: &[&str], regexes: &[&str], can_reach: &str) -> UplinkChoice {
    let own = |list: &[&str]| list.iter().map(|s| (*s).to_owned()).collect();
    UplinkChoice { ifaces: own(ifaces), regexes: own(regexes), can_reach: can_reach.parse().ok(), ..Default::default() }
}

const V4: Families = Families { v4: true, v6: false };
const V6: Families = Families { v4: false, v6: true };
const BOTH: Families = Families { v4: true, v6: true };

#[test]
fn explicit_choices_in_flannels_order() {
    let table: [(&[&str], &[&str], &str, &str); 8] = [
        (&["eth1"], &[], "", "eth1"),
        (&["nope", "eth0"], &[], "", "eth0"),
        (&["192.168.1.1"], &[], "", "eth1"),
        (&["1.1.1.1", "eth0"], &["eth1"], "", "eth0"),
        (&["nope"], &["^eth1$"], "", "eth1"),
        (&[], &["^192\\.168\\."], "", "eth1"),
        (&[], &["zzz", "eth.*"], "", "eth0"),
        (&[], &[], "10.0.0.1", "eth0"),
    ];
    for (ifaces, regexes, reach, wanted) in table {
        let picked = pick(&choice(ifaces, regexes, reach), &machine(), V4);
        assert_eq!(picked.map(|p| p.uplink.name), Ok(name(wanted)), "{ifaces:?} {regexes:?} {reach}");
    }
}

/// Chooses by an address to reach, where the kernel names this way to it.
fn reaching(ip: &str, way: Option<(u32, &str)>, change: impl FnOnce(&mut Machine)) -> Result<Picked, PickError> {
    let mut machine = machine();
    machine.lookup = way.map(|(index, source)| RouteLookup { index, source: source.parse().ok() });
    change(&mut machine);
    pick(&choice(&[], &[], ip), &machine, if ip.contains(':') { V6 } else { V4 })
}

#[test]
fn the_kernel_names_the_uplink_that_reaches_an_address() {
    let chosen = |ip, way| {
        let uplink = reaching(ip, way, |_| {}).unwrap().uplink;
        format!("{} {}", uplink.name, uplink.v4.map(IpAddr::V4).or(uplink.v6.map(IpAddr::V6)).unwrap())
    };
    // The main table has another answer to each of these, because a rule leads to another table.
    assert_eq!(chosen("10.9.9.9", Some((2, ""))), "eth0 10.0.0.1");
    assert_eq!(chosen("10.9.8.8", Some((3, ""))), "eth1 192.168.1.1");
    assert_eq!(chosen("2001:db8::9", Some((2, "fd00::1"))), "eth0 fd00::1");
    let none = reaching("10.9.9.9", None, |_| {}).unwrap_err().to_string();
    assert!(none.starts_with("no interface matches --iface-can-reach 10.9.9.9; there is eth0 "), "{none}");
    assert!(none.ends_with("; `ip route get 10.9.9.9` shows how the kernel reaches 10.9.9.9"), "{none}");
}

#[test]
fn an_address_of_a_pod_is_reached_by_the_routes_of_other_programs() {
    // The kernel reaches the address over a device of ours.
    let tunnel = |machine: &mut Machine| {
        machine.links.push(LinkInfo { index: 9, name: name("flannel.1"), ..machine.links[1].clone() });
    };
    assert_eq!(reaching("10.9.8.8", Some((9, "10.5.1.0")), tunnel).unwrap().uplink.name, name("eth0"));
    // Of two routes to one network, the kernel takes that of the lower metric.
    let reversed = |machine: &mut Machine| {
        tunnel(machine);
        machine.routes.reverse();
    };
    assert_eq!(reaching("10.9.9.9", Some((9, "10.5.1.0")), reversed).unwrap().uplink.name, name("eth1"));
}

#[test]
fn the_source_address_that_the_kernel_chose_is_published() {
    let published = |source, addrs: &'static [(&str, u32)]| {
        let ip = if addrs[0].0.contains(':') { "2001:db8::9" } else { "192.0.2.9" };
        let uplink = reaching(ip, Some((2, source)), |machine| readdress(machine, addrs)).unwrap().uplink;
        uplink.v4.map(IpAddr::V4).or(uplink.v6.map(IpAddr::V6)).unwrap().to_string()
    };
    let both = &[("10.0.0.1/24", PERMANENT), ("10.0.0.7/24", 0)];
    assert_eq!(published("10.0.0.7", both), "10.0.0.7");
    assert_eq!(published("", both), "10.0.0.1");
    assert_eq!(published("192.168.1.1", both), "10.0.0.1", "the source address is on another interface");
    let vip = &[("10.0.0.1/24", PERMANENT), ("10.0.0.100/32", PERMANENT)];
    assert_eq!(published("10.0.0.100", vip), "10.0.0.1", "a single address may be a VIP");
    let temporary = &[("fd00::1/64", 0), ("fd00::77/64", TEMPORARY)];
    assert_eq!(published("fd00::77", temporary), "fd00::1");
    // An address that was in use stays in use.
    let mut machine = machine();
    readdress(&mut machine, both);
    machine.lookup = Some(RouteLookup { index: 2, source: "10.0.0.7".parse().ok() });
    let before = saved(Some("eth0"), "10.0.0.1");
    let candidates = Candidates::new(&machine, V4, Subnets::default()).after(before);
    let picked = super::pick(&choice(&[], &[], "192.0.2.9"), &candidates).unwrap();
    assert_eq!(picked.uplink.v4, Some([10, 0, 0, 1].into()));
}

#[test]
fn an_address_named_by_the_user_is_the_address() {
    let mut machine = machine();
    machine.addrs.push(addr(2, "10.0.0.7/24", 0));
    for choice in [choice(&["10.0.0.7"], &[], ""), choice(&[], &["0\\.7$"], "")] {
        assert_eq!(pick(&choice, &machine, V4).unwrap().uplink.v4, Some([10, 0, 0, 7].into()));
    }
}

#[test]
fn without_flags_the_default_route_of_lowest_metric() {
    let picked = pick(&UplinkChoice::default(), &machine(), V4).unwrap();
    assert_eq!(picked.uplink.name, name("eth1"));
    assert_eq!((picked.uplink.v6, picked.public_v6), (None, None));
    assert_eq!(picked.public_v4, Some([192, 168, 1, 1].into()));
    let picked = pick(&UplinkChoice::default(), &machine(), V6).unwrap();
    assert_eq!((picked.uplink.name, picked.uplink.v4), (name("eth0"), None));
    assert_eq!(picked.public_v6, Some("fd00::1".parse().unwrap()), "global before link-local");
}

#[test]
fn dual_stack_needs_one_interface() {
    let error = pick(&UplinkChoice::default(), &machine(), BOTH).unwrap_err();
    assert_eq!(error, PickError::Split { v4: "eth1".to_owned(), v6: "eth0".to_owned() });
    let picked = pick(&choice(&["eth0"], &[], ""), &machine(), BOTH).unwrap();
    assert_eq!((picked.uplink.v4, picked.uplink.v6), (Some([10, 0, 0, 1].into()), Some("fd00::1".parse().unwrap())));
}

/// The address of one family says nothing about that of the other one.
#[test]
fn with_two_families_the_other_address_of_the_interface_is_used_too() {
    let mut machine = machine();
    machine.addrs.push(addr(2, "10.0.0.7/24", 0));
    machine.addrs.push(addr(2, "fd00::7/64", 0));
    for (iface, v4, v6) in [("10.0.0.7", "10.0.0.7", "fd00::1"), ("fd00::7", "10.0.0.1", "fd00::7")] {
        let uplink = pick(&choice(&[iface], &[], ""), &machine, BOTH).unwrap().uplink;
        let ips = [uplink.v4.map(IpAddr::V4), uplink.v6.map(IpAddr::V6)];
        assert_eq!((uplink.name, ips), (name("eth0"), [v4, v6].map(|ip| ip.parse().ok())), "{iface}");
    }
}

#[test]
fn the_public_address_of_a_family_in_use_finds_its_interface() {
    let public = |v4: &str, v6: &str| UplinkChoice {
        public_ip: v4.parse().ok(),
        public_ipv6: v6.parse().ok(),
        ..choice(&[], &[], "")
    };
    let mut machine = machine();
    machine.addrs.push(addr(3, "fd00:9::1/64", PERMANENT));
    let chosen = |choice: &UplinkChoice, families| pick(choice, &machine, families).unwrap().uplink.name;
    // Without the flags it is eth1 for IPv4, and eth0 for IPv6.
    assert_eq!(chosen(&public("", "fd00:9::1"), V6), name("eth1"));
    assert_eq!(chosen(&public("10.0.0.1", "fd00:9::1"), V6), name("eth1"), "IPv4 is not in use");
    assert_eq!(chosen(&public("10.0.0.1", ""), V4), name("eth0"));
    assert_eq!(chosen(&public("", "fd00::1"), V4), name("eth1"), "IPv6 is not in use");
}

#[test]
fn the_public_address_finds_its_interface_and_is_published() {
    let with = |ip: [u8; 4]| UplinkChoice { public_ip: Some(ip.into()), ..Default::default() };
    let picked = pick(&with([10, 0, 0, 1]), &machine(), V4).unwrap();
    assert_eq!(picked.uplink.name, name("eth0"));
    let picked = pick(&with([203, 0, 113, 9]), &machine(), V4).unwrap();
    assert_eq!((picked.uplink.name, picked.uplink.v4), (name("eth1"), Some([192, 168, 1, 1].into())));
    assert_eq!(picked.public_v4, Some([203, 0, 113, 9].into()));
}

#[test]
fn address_choice() {
    // The addresses in the kernel's order with their flags, and the expected one.
    type Row<'a> = (&'a [(&'a str, u32)], Option<&'a str>);
    let table: [Row; 7] = [
        (&[("169.254.1.1/16", PERMANENT), ("10.1.1.1/24", 0)], Some("10.1.1.1")),
        (&[("10.1.1.1/24", 0), ("10.1.1.2/24", PERMANENT)], Some("10.1.1.2")),
        (&[("10.1.1.1/24", PERMANENT | DEPRECATED), ("10.1.1.2/24", 0)], Some("10.1.1.2")),
        (&[("10.1.1.1/24", PERMANENT | TEMPORARY), ("10.1.1.2/24", PERMANENT)], Some("10.1.1.1")),
        (&[("2001:db8::1/64", TEMPORARY), ("2001:db8::2/64", 0)], Some("2001:db8::2")),
        (&[("2001:db8::1/64", TENTATIVE | PERMANENT), ("2001:db8::2/64", 0)], Some("2001:db8::2")),
        (&[("2001:db8::1/64", DAD_FAILED)], None),
    ];
    for (addrs, wanted) in table {
        let mut machine = machine();
        machine.addrs = addrs.iter().map(|(net, flags)| addr(4, net, *flags)).collect();
        let v4 = machine.addrs[0].net.addr().is_ipv4();
        let picked = pick(&choice(&["wlan0"], &[], ""), &machine, if v4 { V4 } else { V6 }).ok();
        let got = picked.and_then(|p| p.uplink.v4.map(IpAddr::V4).or(p.uplink.v6.map(IpAddr::V6)));
        assert_eq!(got, wanted.map(|ip| ip.parse().unwrap()), "{addrs:?}");
    }
}

#[test]
fn errors_name_what_was_asked_and_what_is_there() {
    let text = |choice: &UplinkChoice, machine: &Machine| pick(choice, machine, V4).unwrap_err().to_string();
    let got = text(&choice(&["bond0"], &["^ens"], ""), &machine());
    assert_eq!(
        got,
        "no interface matches --iface bond0, --iface-regex ^ens; there is eth0 (10.0.0.1 fe80::1 fd00::1), \
         eth1 (192.168.1.1), wlan0 (no address)"
    );
    assert!(text(&choice(&["wlan0"], &[], ""), &machine()).starts_with("interface wlan0 has no usable IPv4 address"));
    let mut bare = machine();
    bare.routes.clear();
    assert!(text(&UplinkChoice::default(), &bare).starts_with("no IPv4 default route"));
    bare.links[1].mtu = 0;
    assert!(text(&choice(&["eth0"], &[], ""), &bare).contains("MTU 0"));
}

/// As on a machine that was booted with ipv6.disable=1.
#[test]
fn a_kernel_without_ipv6_is_named_if_ipv6_is_wanted() {
    let text =
        |machine: &Machine, families| pick(&choice(&["wlan0"], &[], ""), machine, families).unwrap_err().to_string();
    let mut without = machine();
    without.addrs.retain(|addr| addr.net.addr().is_ipv4());
    assert!(text(&without, V6).contains("Is IPv6 switched off by ipv6.disable=1"));
    assert!(!text(&without, V4).contains("ipv6.disable"), "nobody wants IPv6");
    without.addrs.push(addr(1, "::1/128", PERMANENT));
    assert!(!text(&without, V6).contains("ipv6.disable"), "the loopback interface has ::1");
}

/// Returns the outcome for an uplink eth0 with 10.0.0.1 and fd00::1 after a change of the machine.
fn after(choice: &UplinkChoice, families: Families, change: impl FnOnce(&mut Machine)) -> Result<Next, PickError> {
    let mut machine = machine();
    change(&mut machine);
    let v6 = families.v6.then(|| "fd00::1".parse().unwrap());
    let now = Uplink { name: name("eth0"), mtu: 1500, v4: Some([10, 0, 0, 1].into()), v6 };
    next(choice, &Candidates::new(&machine, families, Subnets::default()), &now)
}

/// Writes an outcome as text: `eth0 10.0.0.1` stays in use, and `eth1 192.168.1.1?` is used if the loss lasts.
fn words(next: Result<Next, PickError>) -> String {
    let text = |picked: &Picked| format!("{} {}", picked.uplink.name, picked.uplink.v4.unwrap());
    match next {
        Ok(Next::Stay(picked)) => text(&picked),
        Ok(Next::Gone { next, .. }) => text(&next) + "?",
        Err(_) => "-".to_owned(),
    }
}

/// Replaces the addresses of eth0.
fn readdress(machine: &mut Machine, addrs: &[(&str, u32)]) {
    machine.addrs.retain(|addr| addr.index != 2);
    machine.addrs.extend(addrs.iter().map(|(net, flags)| addr(2, net, *flags)));
}

#[test]
fn an_uplink_in_use_stays_while_it_has_its_address() {
    let choices = [
        UplinkChoice::default(),
        choice(&["eth1", "eth0"], &[], ""),
        choice(&[], &["^192\\."], ""),
        choice(&[], &[], "10.9.9.9"),
    ];
    for choice in choices {
        let stays = |change: &dyn Fn(&mut Machine)| {
            assert_eq!(words(after(&choice, V4, change)), "eth0 10.0.0.1", "{choice:?}")
        };
        stays(&|_| {});
        stays(&|machine| machine.links[1].up = false);
        stays(&|machine| machine.routes.clear());
        stays(&|machine| machine.routes.push(route("10.9.9.9/32", 0, "wlan0")));
        let beside = |net: &str, flags| {
            let dynamic = [(net, flags), ("10.0.0.1/24", 0)];
            stays(&|machine| readdress(machine, &dynamic));
        };
        beside("10.0.0.100/32", PERMANENT);
        beside("10.0.0.100/24", PERMANENT);
        stays(&|machine| readdress(machine, &[("10.0.0.1/24", DEPRECATED)]));
    }
}

#[test]
fn an_uplink_that_lost_its_address() {
    // The addresses of eth0, and the outcome. The default route of the lowest metric is that of eth1.
    type Row<'a> = (&'a [(&'a str, u32)], &'a str);
    let table: [Row; 7] = [
        (&[("10.0.0.7/24", 0)], "eth0 10.0.0.7"),
        (&[("10.0.0.100/32", PERMANENT), ("10.0.0.7/24", 0)], "eth0 10.0.0.7"),
        (&[("10.0.0.1/24", DEPRECATED), ("10.0.0.7/24", 0)], "eth0 10.0.0.7"),
        (&[("10.0.0.1/24", DEPRECATED), ("10.0.0.100/32", 0)], "eth0 10.0.0.1"),
        (&[("10.0.0.100/32", PERMANENT)], "eth1 192.168.1.1?"),
        (&[("169.254.0.7/16", 0)], "eth1 192.168.1.1?"),
        (&[], "eth1 192.168.1.1?"),
    ];
    for (addrs, wanted) in table {
        let got = after(&UplinkChoice::default(), V4, |machine| readdress(machine, addrs));
        assert_eq!(words(got), wanted, "{addrs:?}");
        // A flag names eth0, so no other interface is possible. A VIP is used if there is nothing else, and a link-local address never is.
        let got = words(after(&choice(&["eth0"], &[], ""), V4, |machine| readdress(machine, addrs)));
        let wanted = match addrs {
            [("10.0.0.100/32", _)] => "eth0 10.0.0.100?",
            [] | [("169.254.0.7/16", _)] => "-",
            _ => wanted,
        };
        assert_eq!(got, wanted, "{addrs:?}, --iface=eth0");
    }
    let gone = after(&UplinkChoice::default(), V4, |machine| machine.links.retain(|link| link.index != 2));
    let Ok(Next::Gone { lost, next }) = gone else { panic!("{gone:?}") };
    assert_eq!((lost.as_str(), next.uplink.name), ("eth0 is gone", name("eth1")));
    let local = after(&choice(&["eth0"], &[], ""), BOTH, |machine| {
        machine.addrs.retain(|addr| addr.net != "fd00::1/64".parse().unwrap())
    });
    assert_eq!(local.unwrap_err().to_string(), "eth0 lost fd00::1 and has only a link-local address");
}

/// A cloud may give a node only a single address, and somebody may add another one. That must not change the published address.
#[test]
fn a_single_address_in_use_stays_and_wins_no_choice() {
    let machine = |addrs: &[(&str, u32)]| {
        let mut machine = machine();
        readdress(&mut machine, addrs);
        machine
    };
    let now = Uplink { name: name("eth0"), mtu: 1500, v4: Some([10, 0, 0, 100].into()), v6: None };
    let eth0 = choice(&["eth0"], &[], "");
    let stays = |machine: &Machine| words(next(&eth0, &Candidates::new(machine, V4, Subnets::default()), &now));
    let starts = |machine: &Machine, choice: &UplinkChoice| {
        let saved = Some(UsedUplink { name: Some(name("eth0")), ips: (now.v4, None) });
        let before = EarlierUse { same_flags: true, saved, published: Some((now.v4, None)) };
        super::pick(choice, &Candidates::new(machine, V4, Subnets::default()).after(before)).unwrap().uplink.v4.unwrap()
    };
    let both = machine(&[("10.0.0.100/32", PERMANENT), ("10.0.0.1/24", PERMANENT)]);
    assert_eq!(stays(&both), "eth0 10.0.0.100", "in use");
    assert_eq!(starts(&both, &eth0).to_string(), "10.0.0.1", "a restart heals a node that published a VIP");
    let kept = UplinkChoice { public_ip: now.v4, ..UplinkChoice::default() };
    assert_eq!(starts(&both, &kept).to_string(), "10.0.0.100", "unless the flag names it");
    // The address is gone. A single address does not replace it at once, and one with a subnet does.
    assert_eq!(stays(&machine(&[("10.0.0.7/32", PERMANENT)])), "eth0 10.0.0.7?");
    assert_eq!(stays(&machine(&[("10.0.0.7/32", PERMANENT), ("10.0.0.9/24", 0)])), "eth0 10.0.0.9");
    // The address is deprecated, so it is replaced.
    assert_eq!(stays(&machine(&[("10.0.0.100/32", DEPRECATED), ("10.0.0.1/24", 0)])), "eth0 10.0.0.1");
    let singles = machine(&[("10.0.0.100/32", 0), ("10.0.0.7/32", PERMANENT), ("169.254.0.7/16", PERMANENT)]);
    assert_eq!(
        (stays(&singles).as_str(), starts(&singles, &eth0).to_string().as_str()),
        ("eth0 10.0.0.100", "10.0.0.100")
    );
    assert_eq!(pick(&eth0, &singles, V4).unwrap().uplink.v4, Some([10, 0, 0, 7].into()));
}

/// It may have been away for a while, and the lease names it.
#[test]
fn an_uplink_in_use_takes_its_published_address_back_unless_another_flag_chose_it() {
    let mut machine = machine();
    readdress(&mut machine, &[("10.0.0.7/24", PERMANENT), ("10.0.0.1/24", 0)]);
    let now = Uplink { name: name("eth0"), mtu: 1500, v4: Some([10, 0, 0, 7].into()), v6: None };
    let public = |ip: [u8; 4], ifaces: &[&str]| UplinkChoice { public_ip: Some(ip.into()), ..choice(ifaces, &[], "") };
    let stays = |choice: &UplinkChoice| words(next(choice, &Candidates::new(&machine, V4, Subnets::default()), &now));
    assert_eq!(stays(&public([10, 0, 0, 1], &[])), "eth0 10.0.0.1");
    assert_eq!(stays(&public([10, 0, 0, 1], &["eth0"])), "eth0 10.0.0.7", "the interface was not chosen by it");
    assert_eq!(stays(&public([192, 168, 1, 1], &[])), "eth0 10.0.0.7", "it is on another interface");
}

/// Those that an earlier run may have published. A lease that names one of them may be ours.
#[test]
fn the_addresses_of_an_earlier_run_are_those_of_links_that_it_may_have_chosen() {
    let machine = machine();
    let possible = |families, same_flags| {
        let before = EarlierUse { same_flags, ..EarlierUse::default() };
        Candidates::new(&machine, families, Subnets::default()).after(before).possible_addresses(name("eth0"))
    };
    let [eth0, eth1] =
        [[10, 0, 0, 1], [192, 168, 1, 1]].map(|ip: [u8; 4]| (Some(Ipv4Addr::from(ip)), None::<Ipv6Addr>));
    let ipv6 = (None::<Ipv4Addr>, "fd00::1".parse::<Ipv6Addr>().ok());
    assert_eq!(possible(V4, true), [eth0, eth1]);
    assert_eq!(possible(V4, false), [eth0], "other flags chose another interface");
    assert_eq!(possible(BOTH, true), [eth0], "the other one has no IPv6");
    assert_eq!(possible(V6, true), [ipv6], "not the link-local one");
}

#[test]
fn a_single_address_beside_a_better_one_is_remarked_unless_flags_name_it() {
    let mut both = machine();
    readdress(&mut both, &[("10.0.0.100/32", PERMANENT), ("10.0.0.1/24", PERMANENT), ("fd00::64/128", PERMANENT)]);
    let now = Uplink { name: name("eth0"), mtu: 1500, v4: Some([10, 0, 0, 100].into()), v6: "fd00::64".parse().ok() };
    let said = |choice: &UplinkChoice, machine: &Machine, now: &Uplink| {
        remarks(choice, &Candidates::new(machine, BOTH, Subnets::default()), now)
    };
    let [v4, v6] = said(&UplinkChoice::default(), &both, &now);
    assert_eq!(
        v4.unwrap(),
        "10.0.0.100/32 of eth0 stays the published address although 10.0.0.1/24 is there now: restart the agent to publish \
         10.0.0.1, or give --public-ip=10.0.0.100 to keep 10.0.0.100 over restarts"
    );
    assert_eq!(v6, None, "there is no other");
    both.addrs.push(addr(2, "fd00::1/64", PERMANENT));
    let [_, v6] = said(&UplinkChoice::default(), &both, &now);
    assert!(v6.unwrap().contains("give --public-ipv6=fd00::64"));
    let public_ip = Some([10, 0, 0, 100].into());
    for choice in [choice(&["10.0.0.100"], &[], ""), UplinkChoice { public_ip, ..Default::default() }] {
        assert_eq!(said(&choice, &both, &now)[0], None);
    }
    let usual = Uplink { v4: Some([10, 0, 0, 1].into()), ..now };
    assert_eq!(said(&UplinkChoice::default(), &both, &usual)[0], None);
}

/// Chooses after eth0 was in use and eth1 got a better default route. `saved` is the uplink in the file.
fn restarted(choice: &UplinkChoice, before: EarlierUse, change: impl FnOnce(&mut Machine)) -> String {
    let mut machine = machine();
    change(&mut machine);
    let picked = super::pick(choice, &Candidates::new(&machine, V4, Subnets::default()).after(before));
    picked.map_or("-".to_owned(), |picked| format!("{} {}", picked.uplink.name, picked.uplink.v4.unwrap()))
}

fn saved(link: Option<&str>, ip: &str) -> EarlierUse {
    let used = UsedUplink { name: link.map(name), ips: (ip.parse().ok(), None) };
    EarlierUse { same_flags: true, saved: Some(used), published: None }
}

#[test]
fn a_start_prefers_the_link_that_was_in_use() {
    let (none, eth0) = (UplinkChoice::default(), || saved(Some("eth0"), "10.0.0.1"));
    let (kept, chosen) = ("eth0 10.0.0.1", "eth1 192.168.1.1");
    assert_eq!(restarted(&none, EarlierUse::default(), |_| {}), chosen, "a first start");
    assert_eq!(restarted(&none, eth0(), |_| {}), kept);
    assert_eq!(
        restarted(&none, EarlierUse { same_flags: false, ..eth0() }, |_| {}),
        chosen,
        "other flags choose again"
    );
    // The link that was saved stays, even without a default route.
    assert_eq!(
        restarted(&none, eth0(), |machine| machine.routes.retain(|route| route.dev != Some(name("eth0")))),
        kept
    );
    // The link is down, or does not have the address.
    assert_eq!(restarted(&none, eth0(), |machine| machine.links[1].up = false), chosen);
    assert_eq!(restarted(&none, eth0(), |machine| machine.links[1].carrier = false), chosen);
    assert_eq!(restarted(&none, eth0(), |machine| readdress(machine, &[("10.0.0.7/24", 0)])), chosen);
    assert_eq!(restarted(&none, eth0(), |machine| machine.links.retain(|link| link.index != 2)), chosen);
    assert_eq!(restarted(&none, eth0(), |machine| readdress(machine, &[("10.0.0.1/24", DAD_FAILED)])), chosen);
    // A second address of the same link, and another address that the link has.
    let second = |machine: &mut Machine| readdress(machine, &[("10.0.0.7/24", PERMANENT), ("10.0.0.1/24", 0)]);
    assert_eq!(restarted(&none, eth0(), second), kept);
}

#[test]
fn a_start_follows_an_address_to_another_link_only_where_a_default_route_leads_out() {
    let none = UplinkChoice::default();
    // The interface has another name after the boot, or an older weft did not save the name, or only the lease has the address.
    let lease = EarlierUse { same_flags: true, saved: None, published: Some((Some([10, 0, 0, 1].into()), None)) };
    for before in [saved(Some("ens3"), "10.0.0.1"), saved(None, "10.0.0.1"), lease.clone()] {
        assert_eq!(restarted(&none, before.clone(), |_| {}), "eth0 10.0.0.1", "{before:?}");
        // A VIP that moved to a dummy device, or an address that somebody wrote into the lease, such as that of docker0, which many machines have.
        let inner = |machine: &mut Machine| machine.routes.retain(|route| route.dev != Some(name("eth0")));
        assert_eq!(restarted(&none, before, inner), "eth1 192.168.1.1");
    }
    let loopback = |machine: &mut Machine| {
        readdress(machine, &[("10.0.0.7/24", 0)]);
        machine.addrs.push(addr(1, "10.0.0.1/32", PERMANENT));
    };
    assert_eq!(restarted(&none, lease, loopback), "eth1 192.168.1.1");
    // The file comes before the lease, and the lease before other addresses of the same link.
    let both = EarlierUse { published: Some((Some([192, 168, 1, 1].into()), None)), ..saved(Some("eth0"), "10.0.0.1") };
    assert_eq!(restarted(&none, both, |_| {}), "eth0 10.0.0.1");
    let two = |machine: &mut Machine| readdress(machine, &[("10.0.0.1/24", PERMANENT), ("10.0.0.7/24", 0)]);
    let both = EarlierUse { published: Some((Some([10, 0, 0, 7].into()), None)), ..saved(Some("eth0"), "10.0.0.1") };
    assert_eq!(restarted(&none, both, two), "eth0 10.0.0.7");
}

#[test]
fn flags_win_over_the_link_that_was_in_use() {
    let before = || saved(Some("eth0"), "10.0.0.1");
    let public = |ip: [u8; 4]| UplinkChoice { public_ip: Some(ip.into()), ..UplinkChoice::default() };
    let table = [
        (choice(&["eth1"], &[], ""), "eth1 192.168.1.1"),
        (choice(&["eth1", "eth0"], &[], ""), "eth1 192.168.1.1"),
        (choice(&["192.168.1.1"], &[], ""), "eth1 192.168.1.1"),
        (choice(&[], &["^eth1$"], ""), "eth1 192.168.1.1"),
        (choice(&[], &["^192\\."], ""), "eth1 192.168.1.1"),
        (choice(&[], &["^eth1$", "^eth"], ""), "eth1 192.168.1.1"),
        (public([192, 168, 1, 1]), "eth1 192.168.1.1"),
        (choice(&[], &[], "192.168.1.1"), "eth1 192.168.1.1"),
        // If a flag matches both, the one that was in use is chosen.
        (choice(&[], &["^eth"], ""), "eth0 10.0.0.1"),
        (choice(&[], &["^1"], ""), "eth0 10.0.0.1"),
        (choice(&[], &[], "8.8.8.8"), "eth0 10.0.0.1"),
        (choice(&[], &[], "10.9.9.9"), "eth0 10.0.0.1"),
        // An address that no interface has does not decide the interface.
        (public([203, 0, 113, 9]), "eth0 10.0.0.1"),
    ];
    for (choice, wanted) in table {
        assert_eq!(restarted(&choice, before(), |_| {}), wanted, "{choice:?}");
    }
    // eth1 was in use, and eth0 comes first among the interfaces.
    for choice in [choice(&[], &["^eth"], ""), choice(&[], &["^1"], "")] {
        assert_eq!(restarted(&choice, saved(Some("eth1"), "192.168.1.1"), |_| {}), "eth1 192.168.1.1", "{choice:?}");
    }
    // No route over it leads there.
    let no_default = |machine: &mut Machine| {
        machine.routes.retain(|route| route.dev != Some(name("eth0")) || route.net.prefix_len() != 0);
        machine.lookup = Some(RouteLookup { index: 3, source: None });
    };
    assert_eq!(restarted(&choice(&[], &[], "8.8.8.8"), before(), no_default), "eth1 192.168.1.1");
}

#[test]
fn with_two_families_the_link_in_use_must_have_both() {
    let before = || saved(Some("eth0"), "10.0.0.1");
    let picked = |machine: &Machine, before| {
        super::pick(&UplinkChoice::default(), &Candidates::new(machine, BOTH, Subnets::default()).after(before))
    };
    assert!(matches!(picked(&machine(), EarlierUse::default()), Err(PickError::Split { .. })));
    assert_eq!(picked(&machine(), before()).unwrap().uplink.name, name("eth0"));
    let mut only_v4 = machine();
    readdress(&mut only_v4, &[("10.0.0.1/24", PERMANENT)]);
    assert!(matches!(picked(&only_v4, before()), Err(PickError::Split { .. })));
}

/// A deprecated address is never chosen, even if a regular expression matches it.
#[test]
fn a_regex_finds_no_address_that_is_about_to_end() {
    let with = |regex: &str, addrs: &[(&str, u32)]| {
        let mut machine = machine();
        readdress(&mut machine, addrs);
        pick(&choice(&[], &[regex], ""), &machine, V4).map(|picked| picked.uplink.v4.unwrap().to_string())
    };
    let both = [("10.0.0.1/24", PERMANENT | DEPRECATED), ("10.0.0.7/24", 0)];
    assert_eq!(with("^10\\.0\\.", &both), Ok("10.0.0.7".to_owned()));
    let ending = [("10.0.0.1/24", PERMANENT | DEPRECATED), ("10.7.0.1/24", 0)];
    assert!(matches!(with("^10\\.0\\.", &ending), Err(PickError::NoMatch { .. })));
    // If it is found by its name, it needs an address that is not deprecated.
    assert_eq!(with("^eth0$", &ending), Ok("10.7.0.1".to_owned()));
    assert!(matches!(with("^eth0$", &ending[..1]), Err(PickError::NoAddress { .. })));
}

/// With IPv6 alone. The kernel removes global addresses from a link that is set down. When the link comes up, it has a link-local address at
/// once, and a global one later or never.
#[test]
fn an_ipv6_uplink_that_has_only_a_link_local_address() {
    let used = |ip: &str| Uplink { name: name("eth0"), mtu: 1500, v4: None, v6: ip.parse().ok() };
    let after = |now: &Uplink, addrs: &[(&str, u32)], other: bool| {
        let mut machine = machine();
        readdress(&mut machine, addrs);
        if other {
            machine.addrs.push(addr(3, "fd00:9::1/64", PERMANENT));
            machine.routes.push(route("::/0", 2048, "eth1"));
        }
        next(&UplinkChoice::default(), &Candidates::new(&machine, V6, Subnets::default()), now)
    };
    let (local, global) = (("fe80::1/64", PERMANENT), ("fd00::7/64", 0));
    let of = |picked: &Picked| format!("{} {}", picked.uplink.name, picked.uplink.v6.unwrap());
    // It is not published, whether there is another uplink or not. A global address is used at once.
    let error = after(&used("fd00::1"), &[local], false).unwrap_err();
    assert_eq!(error.to_string(), "eth0 lost fd00::1 and has only a link-local address");
    let Ok(Next::Gone { lost, next }) = after(&used("fd00::1"), &[local], true) else { panic!("another uplink") };
    assert_eq!((lost.as_str(), of(&next).as_str()), ("eth0 lost fd00::1", "eth1 fd00:9::1"));
    let Ok(Next::Stay(picked)) = after(&used("fd00::1"), &[local, global], true) else { panic!("readdressed") };
    assert_eq!(of(&picked), "eth0 fd00::7");
    // A node that never had another address uses it until a global one comes.
    let Ok(Next::Stay(picked)) = after(&used("fe80::1"), &[local], true) else { panic!("in use") };
    assert_eq!(of(&picked), "eth0 fe80::1");
    let Ok(Next::Stay(picked)) = after(&used("fe80::1"), &[local, global], true) else { panic!("a global one") };
    assert_eq!(of(&picked), "eth0 fd00::7");
}

#[test]
fn what_belongs_to_the_pods_is_no_uplink() {
    for (device, creator, net) in [
        ("flannel.1", Creator::Unknown, "10.5.1.0/32"),
        ("flannel-v6.1", Creator::Unknown, "10.5.1.0/32"),
        ("flannel.ipip", Creator::Unknown, "10.7.1.0/32"),
        ("flannel0", Creator::Unknown, "10.7.1.0/16"),
        ("cni0", Creator::Unknown, "10.7.1.1/24"),
        ("bridge0", Creator::Unknown, "10.5.1.1/24"),
        ("anything", Creator::AnotherAgent, "10.7.1.1/24"),
    ] {
        let mut machine = machine();
        machine.links = vec![LinkInfo { index: 9, name: name(device), creator, ..machine.links[1].clone() }];
        machine.addrs = vec![addr(9, net, PERMANENT), addr(9, "fe80::9/64", PERMANENT)];
        machine.routes = vec![route("0.0.0.0/0", 0, device), route("10.5.0.0/16", 0, device)];
        let own = Subnets { v4: "10.5.1.0/24".parse().ok(), v6: None };
        let ip = net.split('/').next().unwrap();
        for choice in [
            UplinkChoice::default(),
            choice(&[device], &[], ""),
            choice(&[ip], &[], ""),
            choice(&[], &["^10\\."], ""),
            choice(&[], &[&format!("^{device}$")], ""),
            choice(&[], &[], "10.5.7.1"),
            UplinkChoice { public_ip: ip.parse().ok(), ..Default::default() },
        ] {
            let got = super::pick(&choice, &Candidates::new(&machine, V4, own));
            assert!(got.is_err(), "{device} {choice:?}: {got:?}");
        }
    }
    // An uplink may have an address of our subnet in addition to its own.
    let mut machine = machine();
    machine.addrs.insert(0, addr(2, "10.5.1.9/24", PERMANENT));
    let candidates = Candidates::new(&machine, V4, Subnets { v4: "10.5.1.0/24".parse().ok(), v6: None });
    assert_eq!(super::pick(&choice(&["eth0"], &[], ""), &candidates).unwrap().uplink.v4, Some([10, 0, 0, 1].into()));
}
