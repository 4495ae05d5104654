// SPDX-License-Identifier: Apache-2.0
use weft_backends::host::Reach;
use weft_backends::state::Name;
use weft_subnet::cidr::Subnets;

use super::ground::{DAD_FAILED, DEPRECATED, PERMANENT, TEMPORARY, TENTATIVE};
use super::*;
use crate::kernel::{AddrInfo, Machine, Maker, RouteInfo};

/// A choice without a lease, among everything that is there.
fn pick(choice: &UplinkChoice, machine: &Machine, families: (bool, bool)) -> Result<Picked, PickError> {
    super::pick(choice, &Ground::new(machine, families, Subnets::default()))
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// lo; eth0 10.0.0.1 fd00::1 and a default route of metric 100; eth1 192.168.1.1, metric 50; wlan0 without addresses.
fn machine() -> Machine {
    let link = |(index, text): (u32, &str)| LinkInfo {
        index,
        name: name(text),
        mtu: 1500,
        mac: None,
        up: true,
        carrier: true,
        loopback: text == "lo",
        maker: Maker::Unknown,
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
    Machine { links, addrs, routes }
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

const V4: (bool, bool) = (true, false);

#[test]
fn explicit_choices_in_flannels_order() {
    let table: [(&[&str], &[&str], &str, &str); 11] = [
        (&["eth1"], &[], "", "eth1"),
        (&["nope", "eth0"], &[], "", "eth0"),
        (&["192.168.1.1"], &[], "", "eth1"),
        (&["1.1.1.1", "eth0"], &["eth1"], "", "eth0"),
        (&["nope"], &["^eth1$"], "", "eth1"),
        (&[], &["^192\\.168\\."], "", "eth1"),
        (&[], &["zzz", "eth.*"], "", "eth0"),
        (&[], &["zzz"], "10.9.9.9", "eth1"),
        (&[], &[], "10.9.8.8", "eth0"),
        (&[], &[], "10.0.0.1", "eth0"),
        (&[], &[], "8.8.8.8", "eth1"),
    ];
    for (ifaces, regexes, reach, wanted) in table {
        let picked = pick(&choice(ifaces, regexes, reach), &machine(), V4);
        assert_eq!(picked.map(|p| p.uplink.name), Ok(name(wanted)), "{ifaces:?} {regexes:?} {reach}");
    }
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
    let picked = pick(&UplinkChoice::default(), &machine(), (false, true)).unwrap();
    assert_eq!((picked.uplink.name, picked.uplink.v4), (name("eth0"), None));
    assert_eq!(picked.public_v6, Some("fd00::1".parse().unwrap()), "global before link-local");
}

#[test]
fn dual_stack_needs_one_interface() {
    let error = pick(&UplinkChoice::default(), &machine(), (true, true)).unwrap_err();
    assert_eq!(error, PickError::Split { v4: "eth1".to_owned(), v6: "eth0".to_owned() });
    let picked = pick(&choice(&["eth0"], &[], ""), &machine(), (true, true)).unwrap();
    assert_eq!((picked.uplink.v4, picked.uplink.v6), (Some([10, 0, 0, 1].into()), Some("fd00::1".parse().unwrap())));
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
    // (net, flags) of each address in kernel order, and the one wanted.
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
        let picked = pick(&choice(&["wlan0"], &[], ""), &machine, (v4, !v4)).ok();
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

/// What the machine of this test is after a change, and what becomes of eth0 with 10.0.0.1 and fd00::1.
fn after(choice: &UplinkChoice, families: (bool, bool), change: impl FnOnce(&mut Machine)) -> Result<Next, PickError> {
    let mut machine = machine();
    change(&mut machine);
    let v6 = families.1.then(|| "fd00::1".parse().unwrap());
    let now = Uplink { name: name("eth0"), mtu: 1500, v4: Some([10, 0, 0, 1].into()), v6 };
    next(choice, &Ground::new(&machine, families, Subnets::default()), &now)
}

/// `eth0 10.0.0.1` stays; `eth1 192.168.1.1?` takes its place if the loss lasts.
fn words(next: Result<Next, PickError>) -> String {
    let text = |picked: &Picked| format!("{} {}", picked.uplink.name, picked.uplink.v4.unwrap());
    match next {
        Ok(Next::Stay(picked)) => text(&picked),
        Ok(Next::Gone { next, .. }) => text(&next) + "?",
        Err(_) => "-".to_owned(),
    }
}

/// Takes the addresses of eth0 away and gives it others.
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
        // Told to use eth0, there is no other interface: a VIP if it must be, a link-local address never.
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
    let local = after(&choice(&["eth0"], &[], ""), (true, true), |machine| {
        machine.addrs.retain(|addr| addr.net != "fd00::1/64".parse().unwrap())
    });
    assert_eq!(local.unwrap_err().to_string(), "eth0 lost fd00::1 and has only a link-local address");
}

#[test]
fn a_vip_in_use_gives_way_to_an_address_of_a_subnet() {
    let machine = |addrs: &[(&str, u32)]| {
        let mut machine = machine();
        readdress(&mut machine, addrs);
        machine
    };
    let now = Uplink { name: name("eth0"), mtu: 1500, v4: Some([10, 0, 0, 100].into()), v6: None };
    let both = machine(&[("10.0.0.100/32", PERMANENT), ("10.0.0.1/24", 0)]);
    assert_eq!(
        words(next(&UplinkChoice::default(), &Ground::new(&both, V4, Subnets::default()), &now)),
        "eth0 10.0.0.1"
    );
    // A cloud that gives single addresses only.
    let singles = machine(&[("10.0.0.100/32", 0), ("10.0.0.7/32", PERMANENT), ("169.254.0.7/16", PERMANENT)]);
    assert_eq!(
        words(next(&UplinkChoice::default(), &Ground::new(&singles, V4, Subnets::default()), &now)),
        "eth0 10.0.0.100"
    );
    assert_eq!(pick(&choice(&["eth0"], &[], ""), &singles, V4).unwrap().uplink.v4, Some([10, 0, 0, 7].into()));
}

#[test]
fn what_belongs_to_the_pods_is_no_uplink() {
    for (device, maker, net) in [
        ("flannel.1", Maker::Unknown, "10.5.1.0/32"),
        ("flannel-v6.1", Maker::Unknown, "10.5.1.0/32"),
        ("flannel.ipip", Maker::Unknown, "10.7.1.0/32"),
        ("flannel0", Maker::Unknown, "10.7.1.0/16"),
        ("cni0", Maker::Unknown, "10.7.1.1/24"),
        ("bridge0", Maker::Unknown, "10.5.1.1/24"),
        ("anything", Maker::AnotherAgent, "10.7.1.1/24"),
    ] {
        let mut machine = machine();
        machine.links = vec![LinkInfo { index: 9, name: name(device), maker, ..machine.links[1].clone() }];
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
            let got = super::pick(&choice, &Ground::new(&machine, V4, own));
            assert!(got.is_err(), "{device} {choice:?}: {got:?}");
        }
    }
    // An uplink may bear an address of our subnet besides its own.
    let mut machine = machine();
    machine.addrs.insert(0, addr(2, "10.5.1.9/24", PERMANENT));
    let ground = Ground::new(&machine, V4, Subnets { v4: "10.5.1.0/24".parse().ok(), v6: None });
    assert_eq!(super::pick(&choice(&["eth0"], &[], ""), &ground).unwrap().uplink.v4, Some([10, 0, 0, 1].into()));
}
