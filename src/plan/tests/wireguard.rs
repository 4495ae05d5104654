// SPDX-License-Identifier: Apache-2.0
//! WireGuard in the plan: who has a key that two leases name, and what an encrypted network does with other types.

use weft_backends::wireguard_key::{KeyPair, PublicKey, Secret};

use super::*;

pub(crate) fn wireguard(options: &str) -> Plan {
    let text = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"wireguard"{options}}}}}"#);
    let net_conf = NetConf::parse(&text).unwrap();
    let Plan { mut host, own, .. } = plan();
    host.identities = KeyPair::of(Secret::new([1; 32])).both();
    let backend = make(&net_conf).unwrap();
    Plan::new(net_conf, backend, host, own)
}

/// A lease of the subnet and the address with these numbers, with this key.
pub(crate) fn with_key(third: u8, address: u8, key: u8) -> Record {
    let mut lease = lease(third, 1);
    lease.attrs.public_ip = Some([192, 168, 0, address].into());
    lease.attrs.backend_type = "wireguard".into();
    let key = PublicKey([key; 32]);
    lease.attrs.backend_data = Some(format!(r#"{{"PublicKey":"{key}","Port":51820}}"#).into());
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

fn entries(plan: &Plan) -> Vec<String> {
    let entries = plan.wireguard_entries();
    entries.map(|(key, value)| format!("{key} {value}").replace(&PublicKey([2; 32]).to_string(), "TWO")).collect()
}

#[test]
fn the_older_of_two_leases_with_one_key_has_the_peer() {
    for assigned in [false, true] {
        let mut plan = wireguard("").with_assigned_subnets(assigned);
        // The age of a lease is its subnet's number here.
        plan.put(with_key(3, 3, 2));
        plan.put(with_key(2, 2, 2));
        let wanted = [
            "wireguard peer AgICAgICAgICAgICAgIC... dev flannel-wg key TWO endpoint 192.168.0.2:51820",
            "allowed ip 10.5.2.0/24 dev flannel-wg key TWO",
        ];
        assert_eq!(entries(&plan), wanted);
        let reason = plan.unplanned(&"10.5.3.0-24".into()).unwrap();
        assert!(reason.contains("is also that of the older lease 10.5.2.0-24"), "{reason}");
        let problems = claims::problems(&plan).join(" ");
        assert!(problems.contains("two nodes have PublicKey") && problems.contains("wgkey"), "{problems}");
        plan.remove(&"10.5.2.0-24".into());
        assert!(entries(&plan)[1].starts_with("allowed ip 10.5.3.0/24"), "{:?}", entries(&plan));
        assert_eq!(plan.unplanned_count(), 0);
    }
}

#[test]
fn two_leases_of_one_node_give_their_prefixes_to_one_peer() {
    let mut plan = wireguard("");
    plan.put(with_key(2, 2, 2));
    plan.put(with_key(3, 2, 2));
    assert_eq!((entries(&plan).len(), plan.unplanned_count()), (3, 0), "{:?}", entries(&plan));
}

/// A lease at our own address or another one, with a port of its own.
fn with_port(third: u8, address: [u8; 4], key: u8, port: u16) -> Record {
    let mut record = with_key(third, 1, key);
    let attrs = &mut record.lease.as_mut().unwrap().attrs;
    attrs.public_ip = Some(address.into());
    attrs.backend_data = attrs.backend_data.take().map(|data| data.replace("51820", &port.to_string()).into());
    record
}

#[test]
fn nodes_behind_one_nat_are_all_reached() {
    // In etcd, and in Kubernetes.
    for assigned in [false, true] {
        reaches_nodes_behind_one_nat(wireguard("").with_assigned_subnets(assigned));
    }
}

fn reaches_nodes_behind_one_nat(mut plan: Plan) {
    let ours = plan.host().public_v4.unwrap().octets();
    let own = Lease { attrs: plan.advertise(plan.host()).unwrap(), ..plan.own().clone() };
    plan.rebase_on(plan.host().clone(), own);
    for (third, address, port) in [(2, ours, 51822), (3, ours, 51823), (4, [192, 0, 2, 9], 1), (5, [192, 0, 2, 9], 2)] {
        plan.put(with_port(third, address, third, port));
    }
    assert_eq!(
        (entries(&plan).len(), plan.unplanned_count(), plan.problems().len()),
        (8, 0, 0),
        "{:?}",
        entries(&plan)
    );
    assert_eq!(claims::problems(&plan), [""; 0]);
    // A copy of the machine publishes our port, too, and a copy of a peer its key with another port.
    plan.put(with_port(6, ours, 6, 51820));
    plan.put(with_port(7, [192, 0, 2, 9], 5, 3));
    let problems = claims::problems(&plan);
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(problems[0].starts_with(&format!("two nodes publish {}", plan.host().public_v4.unwrap())), "{problems:?}");
    assert!(problems[1].contains("two nodes have PublicKey"), "{problems:?}");
    assert_eq!(entries(&plan).len(), 8);
}

/// A person looks for a firewall that drops these packets.
#[test]
fn the_packets_to_a_peer_are_named_by_the_port_of_its_lease() {
    let networks = r#""Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48""#;
    let Plan { host, own, .. } = wireguard("");
    let uplink = Uplink { v6: "2001:db8::1".parse().ok(), ..host.uplink.clone() };
    let host = Host { uplink, ..host };
    let mut peer = with_key(2, 2, 2).lease.unwrap();
    peer.subnets = Subnets::from_key("10.5.2.0-24&fd00:5:0:2::-64").unwrap();
    peer.id = peer.subnets.to_key().into();
    peer.attrs.public_ipv6 = "2001:db8::2".parse().ok();
    let data = |port| Some(format!(r#"{{"PublicKey":"{}","Port":{port}}}"#, PublicKey([2; 32])).into());
    (peer.attrs.backend_data, peer.attrs.backend_v6_data) = (data(51822), data(51823));
    for (mode, wanted) in [("separate", ["UDP port 51822", "UDP port 51823"]), ("ipv4", ["UDP port 51822"; 2])] {
        let text = format!(r#"{{{networks},"Backend":{{"Type":"wireguard","Mode":"{mode}"}}}}"#);
        let net_conf = NetConf::parse(&text).unwrap();
        let backend = make(&net_conf).unwrap();
        let mut plan = Plan::new(net_conf, backend, host.clone(), own.clone());
        plan.put(Record { id: peer.id.clone(), lease: Ok(peer.clone()) });
        assert_eq!(plan.unplanned(&peer.id), None, "{mode}");
        assert_eq!([Family::V4, Family::V6].map(|family| plan.outer_protocol(&peer, family)), wanted, "{mode}");
    }
}

#[test]
fn this_node_listens_on_the_port_of_its_flag() {
    let mut plan = wireguard("");
    let host = Host { wireguard_port: Some(51822), ..plan.host().clone() };
    let own = Lease { attrs: plan.advertise(&host).unwrap(), ..plan.own().clone() };
    assert!(own.attrs.backend_data.as_deref().unwrap().ends_with(r#""Port":51822}"#), "{own:?}");
    plan.rebase_on(host, own);
    let link = plan.desired(&Key::Link(Name::new("flannel-wg").unwrap())).unwrap().to_string();
    assert!(link.contains("wireguard port 51822"), "{link}");
    // A peer whose lease names no port listens where net-conf says.
    let mut old = with_key(2, 2, 2);
    let attrs = &mut old.lease.as_mut().unwrap().attrs;
    attrs.backend_data = attrs.backend_data.take().map(|data| data.replace(",\"Port\":51820", "").into());
    plan.put(old);
    assert!(entries(&plan)[0].ends_with("endpoint 192.168.0.2:51820"), "{:?}", entries(&plan));
}

#[test]
fn a_new_key_of_a_node_takes_its_prefix_along_and_removes_the_old_peer() {
    let mut plan = wireguard("");
    plan.put(with_key(2, 2, 2));
    let changed = plan.put(with_key(2, 2, 3));
    let shown: Vec<(bool, bool)> = changed.iter().map(|one| (one.before.is_some(), one.after.is_some())).collect();
    assert_eq!(shown.len(), 3);
    assert_eq!(
        shown.iter().filter(|all| **all == (true, true)).count(),
        1,
        "the prefix moves in one step: {changed:?}"
    );
}

#[test]
fn an_encrypted_network_sets_other_types_aside_unless_clear_text_is_allowed() {
    let mut plan = wireguard("");
    assert_eq!(plan.put(record(2, 1)), []);
    let reason = plan.unplanned(&"10.5.2.0-24".into()).unwrap();
    assert!(reason.contains("this network is encrypted"), "{reason}");
    assert_eq!(plan.problems(), [""; 0]);
    let mut plan = wireguard(r#","AllowPlaintext":true"#);
    assert!(links(&plan.put(record(2, 1))).contains(&"link flannel.1".to_owned()));
    let problems = plan.problems();
    assert!(problems[0].contains("AllowPlaintext") && problems.len() == 1, "{problems:?}");
}

/// Without it, a route to one subnet, which is longer, would still lead over flannel's old device in clear text.
#[test]
fn routes_over_a_device_of_flannels_earlier_backend_are_flannels() {
    use crate::pass::takeover::Takeover;
    use crate::subnet_file::Author;
    use weft_backends::state::Route;
    let plan = wireguard("");
    let route = |net: &str, dev: &str, protocol| {
        let (via, dev) = ([10, 5, 2, 0].into(), Name::new(dev).unwrap());
        let value = Value::Route(Route::Unicast { via, dev, onlink: true });
        (Key::Route(net.parse().unwrap(), 0), ObservedValue { value, protocol, mark: false })
    };
    let rows = [
        ("10.5.2.0/24", "flannel.1", 3, true),
        ("10.5.3.0/24", "flannel.ipip", 0, true),
        ("10.5.4.0/24", "tun0", 3, false),
        ("10.5.5.0/24", "flannel.1", 4, false),
        ("10.5.1.0/25", "flannel.1", 3, false),
        ("10.6.2.0/24", "flannel.1", 3, false),
    ];
    let observed: Observed = rows.iter().map(|(net, dev, protocol, _)| route(net, dev, *protocol)).collect();
    let mut takeover = Takeover::new(Author::Another);
    takeover.update(&observed, &plan);
    for (net, dev, protocol, left) in rows {
        let (key, seen) = route(net, dev, protocol);
        assert_eq!(takeover.contains(&key, &seen), left, "{net} {dev} {protocol}");
    }
    let mut takeover = Takeover::new(Author::Weft);
    takeover.update(&observed, &plan);
    assert!(!takeover.contains(&route("10.5.2.0/24", "flannel.1", 3).0, &route("10.5.2.0/24", "flannel.1", 3).1));
}

#[test]
fn the_port_that_no_link_shows_is_that_of_wireguard_or_of_the_agents_own_tunnel() {
    let of = |backend_type| plan_of(backend_type).hidden_port();
    assert_eq!([of("vxlan"), of("host-gw"), of("udp")], [None, None, Some(8285)]);
    assert_eq!(wireguard("").hidden_port(), Some(51820));
    let mut plan = wireguard(r#","ListenPort":4500"#);
    assert_eq!(plan.hidden_port(), Some(4500));
    plan.keep_ports([(Name::new("flannel-wg").unwrap(), 51820)].into());
    assert_eq!(plan.hidden_port(), Some(51820), "the device has not got its new port yet");
}

/// The packets of all families go to one address of the peer.
#[test]
fn a_peer_is_asked_at_the_address_to_which_its_packets_go() {
    let mut plan = wireguard(r#","Mode":"auto""#);
    let mut record = with_key(2, 2, 2);
    record.lease.as_mut().unwrap().attrs.public_ipv6 = "fd00:1::2".parse().ok();
    let lease = record.lease.clone().unwrap();
    plan.put(record);
    for (v4, published) in [(plan.host.uplink.v4, "192.168.0.2"), (None, "fd00:1::2")] {
        plan.host.uplink.v4 = v4;
        let targets: Vec<String> =
            plan.probe_targets(&lease).map(|target| target.published.unwrap().to_string()).collect();
        assert_eq!(targets, [published]);
    }
}

/// The kernel cannot use a device without it.
#[test]
fn the_key_is_there_before_and_after_wireguard_is_the_backend_of_our_lease() {
    let mut plan = plan();
    assert!(plan.secrets().is_none());
    clear_text::prepare_wireguard(&mut plan, "");
    assert!(plan.secrets().is_some(), "the next backend has the device");
    plan.switch_to_next("vxlan".to_owned()).unwrap();
    changes_to(&mut plan, "", "wireguard");
    assert_eq!((plan.backend().kind(), plan.earlier_kind(plan.earlier().next().unwrap().0)), ("vxlan", "wireguard"));
    assert!(plan.secrets().is_some(), "an earlier backend has the device");
}

/// A device that is down listens on no port, and may come back with the one that it had.
#[test]
fn a_device_that_does_not_listen_keeps_the_port_that_our_lease_names() {
    let mut plan = wireguard(r#","ListenPort":4500"#);
    let device = Name::new("flannel-wg").unwrap();
    let kept = |plan: &Plan, listening: Option<u16>| {
        let listening = listening.map(|port| (device, port)).into_iter().collect();
        plan.ports_after_pass(&listening).into_iter().collect::<Vec<_>>()
    };
    assert!(kept(&plan, None).is_empty());
    plan.keep_ports([(device, 51820)].into());
    assert_eq!(kept(&plan, None), [(device, 51820)]);
    assert_eq!(kept(&plan, Some(4777)), [(device, 4777)], "somebody gave it another port");
    assert!(kept(&plan, Some(4500)).is_empty(), "it has the port of net-conf");
}
