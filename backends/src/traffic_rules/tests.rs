// SPDX-License-Identifier: Apache-2.0

use super::*;

fn subnets(v4: &str, v6: &str) -> Subnets {
    Subnets { v4: Some(v4.parse().unwrap()), v6: Some(v6.parse().unwrap()) }
}

fn both() -> (Subnets, Subnets) {
    (subnets("10.5.0.0/16", "fd00:5::/48"), subnets("10.5.1.0/24", "fd00:5:0:1::/64"))
}

fn all() -> Policy {
    let except = vec!["192.168.0.9/16".parse().unwrap(), "fd01::/64".parse().unwrap(), "10.0.0.0/8".parse().unwrap()];
    let nodes = ["203.0.113.2", "203.0.113.1", "203.0.113.2"].map(|ip| ip.parse().unwrap()).to_vec();
    Policy { masquerade: Some(Masquerade { fully_random: true, except, nodes }), forward: true }
}

#[test]
fn the_rules_are_those_of_flannel_in_its_order() {
    let (networks, own) = both();
    let policy = Policy { masquerade: Some(Masquerade::default()), forward: true };
    let expected = "\
IPv4 masquerade: mark 0x4000/0x4000 return
IPv4 masquerade: from 10.5.1.0/24 to 10.5.0.0/16 return
IPv4 masquerade: from 10.5.0.0/16 to 10.5.1.0/24 return
IPv4 masquerade: from outside 10.5.0.0/16 to 10.5.1.0/24 return
IPv4 masquerade: from 10.5.0.0/16 to outside 224.0.0.0/4 masquerade
IPv4 masquerade: from outside 10.5.0.0/16 to 10.5.0.0/16 masquerade
IPv4 forward: from 10.5.0.0/16 accept
IPv4 forward: to 10.5.0.0/16 accept
IPv6 masquerade: mark 0x4000/0x4000 return
IPv6 masquerade: from fd00:5:0:1::/64 to fd00:5::/48 return
IPv6 masquerade: from fd00:5::/48 to fd00:5:0:1::/64 return
IPv6 masquerade: from outside fd00:5::/48 to fd00:5:0:1::/64 return
IPv6 masquerade: from fd00:5::/48 to outside ff00::/8 masquerade
IPv6 masquerade: from outside fd00:5::/48 to fd00:5::/48 masquerade
IPv6 forward: from fd00:5::/48 accept
IPv6 forward: to fd00:5::/48 accept
";
    assert_eq!(rules(&networks, &own, &policy).to_string(), expected);
}

#[test]
fn exceptions_come_before_masquerade_rules_in_their_family() {
    let (networks, own) = both();
    let text = rules(&networks, &own, &all()).to_string();
    let from = |family: &str| -> Vec<String> {
        let prefix = format!("{family} masquerade: ");
        text.lines().filter_map(|line| line.strip_prefix(&prefix)).map(str::to_owned).skip(4).collect()
    };
    let v4 = [
        "from 10.5.0.0/16 to 10.0.0.0/8 return",
        "from 10.5.0.0/16 to 192.168.0.0/16 return",
        "from 10.5.0.0/16 to one of 203.0.113.1 203.0.113.2 return",
        "from 10.5.0.0/16 to outside 224.0.0.0/4 masquerade fully-random",
        "from outside 10.5.0.0/16 to 10.5.0.0/16 masquerade fully-random",
    ];
    let v6 = [
        "from fd00:5::/48 to fd01::/64 return",
        "from fd00:5::/48 to outside ff00::/8 masquerade fully-random",
        "from outside fd00:5::/48 to fd00:5::/48 masquerade fully-random",
    ];
    assert_eq!(from("IPv4"), v4);
    assert_eq!(from("IPv6"), v6);
}

#[test]
fn each_flag_turns_its_rules_off() {
    let (networks, own) = both();
    for (masq, forward, lines, masquerades) in
        [(true, true, 16, true), (true, false, 12, true), (false, true, 4, false), (false, false, 0, false)]
    {
        let policy = Policy { masquerade: masq.then(Masquerade::default), forward };
        let rules = rules(&networks, &own, &policy);
        let got = (rules.to_string().lines().count(), rules.len(), rules.masquerades(), rules.is_empty());
        assert_eq!(got, (lines, lines, masquerades, lines == 0), "{masq} {forward}");
    }
    let v4 = Subnets { v6: None, ..networks };
    let families = rules(&v4, &own, &all()).families;
    assert_eq!(families.iter().map(|part| part.family).collect::<Vec<_>>(), [Family::V4]);
}

/// Returns whether a packet is masqueraded, by applying the rules as a kernel does.
fn masqueraded(rules: &Rules, from: &str, to: &str, mark: u32) -> bool {
    let (from, to): (IpAddr, IpAddr) = (from.parse().unwrap(), to.parse().unwrap());
    let part = rules.of(family(&IpNet::from(from))).unwrap();
    let holds = |test: &Test| match test {
        Test::Mark(bits) => mark & bits == *bits,
        Test::From(net) => net.contains(&from),
        Test::NotFrom(net) => !net.contains(&from),
        Test::To(net) => net.contains(&to),
        Test::NotTo(net) => !net.contains(&to),
        Test::ToOneOf(nodes) => nodes.contains(&to),
    };
    let hit = part.masquerade.iter().find(|rule| rule.tests.iter().all(holds));
    hit.is_some_and(|rule| matches!(rule.verdict, Verdict::Masquerade { .. }))
}

#[test]
fn the_right_packets_are_masqueraded() {
    let (networks, own) = both();
    let rules = rules(&networks, &own, &all());
    for (name, from, to, mark, expected) in [
        ("pod to own pod", "10.5.1.2", "10.5.1.3", 0, false),
        ("pod to remote pod", "10.5.1.2", "10.5.2.3", 0, false),
        ("remote pod to pod", "10.5.2.3", "10.5.1.2", 0, false),
        ("pod to the world", "10.5.1.2", "198.51.100.1", 0, true),
        ("pod to an exception", "10.5.1.2", "192.168.3.4", 0, false),
        ("pod to a node", "10.5.1.2", "203.0.113.1", 0, false),
        ("pod to multicast", "10.5.1.2", "239.1.2.3", 0, false),
        ("client to own pod", "198.51.100.1", "10.5.1.2", 0, false),
        ("node or NodePort to remote pod", "203.0.113.9", "10.5.2.3", 0, true),
        ("an exception to a remote pod", "192.168.3.4", "10.5.2.3", 0, true),
        ("not ours", "198.51.100.1", "198.51.100.2", 0, false),
        ("marked by kube-proxy", "10.5.1.2", "198.51.100.1", 0x4000, false),
        ("marked by kube-proxy and others", "10.5.1.2", "198.51.100.1", 0x4008, false),
        ("marked by others", "10.5.1.2", "198.51.100.1", 0x8, true),
        ("IPv6 pod to the world", "fd00:5:0:1::2", "2001:db8::1", 0, true),
        ("IPv6 pod to multicast", "fd00:5:0:1::2", "ff02::1", 0, false),
        ("IPv6 node to remote pod", "2001:db8::9", "fd00:5:0:2::2", 0, true),
        ("IPv6 client to own pod", "2001:db8::9", "fd00:5:0:1::2", 0, false),
    ] {
        assert_eq!(masqueraded(&rules, from, to, mark), expected, "{name}");
    }
}
