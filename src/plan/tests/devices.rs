// SPDX-License-Identifier: Apache-2.0
//! The devices that a plan needs, and what guards them.

use weft_backends::host::Reach;
use weft_subnet::cidr::Family;

use super::*;

#[test]
fn of_two_earlier_backends_with_one_device_the_later_one_decides_how_it_is_made() {
    let earlier = |mtu: u32| {
        let text = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"vxlan","MTU":{mtu}}}}}"#);
        ExtraBackend::new(ParsedConf::parse(&text).unwrap(), plan().host)
    };
    // The latest comes first.
    let plan = plan_of("host-gw").with_earlier(vec![earlier(1400), earlier(1300)], false);
    match plan.desired(&Key::Link(Name::new("flannel.1").unwrap())) {
        Some(Value::Link(link)) => assert_eq!(link.mtu, 1350, "1400 without the overhead of vxlan"),
        other => panic!("{other:?}"),
    }
}

/// A peer that does not say where its packets come from is reached when a route of the host appears.
#[test]
fn the_tunnel_guard_drops_nothing_after_a_route_of_the_host_makes_a_silent_peer_reachable() {
    let mut plan = plan().with_tunnel_guard(true);
    let mut silent = lease(2, 1);
    silent.attrs.backend_type = "host-gw".into();
    silent.attrs.backend_data = None;
    plan.put(Record { id: silent.id.clone(), lease: Ok(silent) });
    let guards = |plan: &Plan| plan.desired(&Key::Guard(Family::V4)).is_some();
    assert!(guards(&plan), "the peer is not reached, so it sends nothing");
    let link = Reach::Link(Name::new("eth0").unwrap());
    let routes = OnLink::new([("192.168.0.0/24".parse().unwrap(), 0, link)]);
    let host = Host { routes, ..plan.host().clone() };
    let changed = plan.update_host_networks(&host).unwrap();
    assert!(!guards(&plan), "{changed:?}");
}

/// Whoever may write leases could otherwise make the memory of the agent grow.
#[test]
fn nothing_is_kept_of_a_lease_that_waited_for_a_device_and_is_gone() {
    let mut plan = plan();
    plan.put(record(2, 7));
    plan.set_foreign_devices(&[Name::new("flannel.7").unwrap()].into());
    assert!(plan.unplanned(&"10.5.2.0-24".into()).is_some() && !plan.blocked.is_empty());
    plan.remove(&"10.5.2.0-24".into());
    assert!(plan.blocked.is_empty(), "{:?}", plan.blocked);
    assert_eq!((plan.unplanned_count(), plan.set_aside_count()), (0, 0), "nor is it shown any more");
    for third in 2..=MAX_DEVICES as u8 {
        plan.put(record(third, 100 + u32::from(third)));
    }
    let last = record(200, 77);
    plan.put(last.clone());
    assert!(plan.waiting.contains(&last.id), "{:?}", plan.unplanned(&last.id));
    plan.remove(&last.id);
    assert!(!plan.waiting.contains(&last.id));
}

/// The address of another node's lease is our own from now on, so that lease is not believed any more.
#[test]
fn a_lease_that_is_set_aside_does_not_count_among_those_of_other_types() {
    let mut plan = plan();
    let mut other = lease(2, 1);
    (other.attrs.backend_type, other.attrs.backend_data) = ("ipip".into(), None);
    let id = other.id.clone();
    plan.put(Record { id: id.clone(), lease: Ok(other) });
    assert_eq!((plan.other_backend(&id), plan.mtu()), (Some("ipip"), 1450));
    let (host, own) = (plan.host().clone(), plan.own().clone());
    let uplink = Uplink { v4: Some([192, 168, 0, 2].into()), ..host.uplink.clone() };
    let net_conf = plan.net_conf().clone();
    plan.rebase(net_conf.clone(), make(&net_conf).unwrap(), Host { public_v4: uplink.v4, uplink, ..host }, own);
    assert!(plan.peers().reason(&id).is_some(), "it is set aside");
    assert_eq!((plan.other_backend(&id), plan.peers_of_other_backends().count()), (None, 0));
}

#[test]
fn a_device_of_another_program_that_nobody_needs_is_not_read() {
    let mut plan = plan();
    let [ours, theirs] = ["flannel.1", "flannel.9"].map(|name| Name::new(name).unwrap());
    plan.set_foreign_devices(&BTreeSet::from([theirs]));
    assert_eq!(plan.watched_devices().collect::<Vec<_>>(), [ours]);
}

/// A pod of this node may have an address on it. Other networks of the host are not free for other nodes.
#[test]
fn the_networks_on_devices_of_this_agent_are_free_for_peers() {
    let plan = plan();
    let of = |text: &str| (text.parse().unwrap(), "flannel.2".into());
    let networks = plan.net_conf().networks;
    let connected = Connected::new(&networks, [of("10.5.9.0/24")]);
    let host = Host { connected, ..plan.host().clone() };
    let foreign = |devices: &[&str]| {
        let devices = devices.iter().map(|name| Name::new(name).unwrap()).collect();
        foreign_networks(&host, plan.backend(), plan.own(), &devices).iter().count()
    };
    assert_eq!((foreign(&[]), foreign(&["flannel.3"]), foreign(&["flannel.2"])), (1, 1, 0));
}

/// It would drop the packets of that program.
#[test]
fn the_tunnel_guard_does_not_guard_the_device_of_another_program() {
    let mut plan = plan().with_tunnel_guard(true);
    let mut other = lease(3, 1);
    (other.attrs.backend_type, other.attrs.backend_data) = ("ipip".into(), None);
    other.attrs.tunnel_ip = other.attrs.public_ip;
    plan.put(Record { id: other.id.clone(), lease: Ok(other) });
    let guards_ipip = |plan: &Plan| match plan.desired(&Key::Guard(Family::V4)) {
        Some(Value::Guard(guard)) => Some(guard.ipip),
        _ => None,
    };
    assert_eq!(guards_ipip(&plan), Some(true));
    plan.set_foreign_devices(&[Name::new("flannel.ipip").unwrap()].into());
    assert_eq!(guards_ipip(&plan), Some(false));
}

/// While net-conf changes the backend, peers may still send to the device of the earlier one.
#[test]
fn an_earlier_device_keeps_its_identity_when_something_else_of_the_host_changes() {
    let mut plan = plan();
    plan.put(record(2, 1));
    clear_text::prepare_wireguard(&mut plan, "");
    plan.switch_to_next("vxlan".to_owned()).unwrap();
    for mtu in [1500, 1400] {
        let (mut host, own) = (plan.host().clone(), plan.own().clone());
        host.uplink.mtu = mtu;
        plan.rebase_on(host, own);
        let link = plan.desired(&Key::Link(Name::new("flannel.1").unwrap()));
        let is_same = |link: &Arc<weft_backends::link::Link>| link.mac == Some(Mac([2, 0, 0, 0, 0, 1]));
        assert!(matches!(&link, Some(Value::Link(link)) if link.mtu == mtu - 50 && is_same(link)), "{link:?}");
        let ways = plan.advertise(plan.host()).unwrap().other_ways();
        let data = ways[0].backend_data.as_deref().unwrap_or_default();
        assert!(data.contains("02:00:00:00:00:01"), "peers that have not followed send to this MAC: {ways:?}");
    }
}

/// Our lease must not name it. Nobody would be reached.
#[test]
fn a_next_backend_that_cannot_work_on_this_host_says_why() {
    let mut plan = plan();
    let conf = || ParsedConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"ipip"}}"#).unwrap();
    let problem = |plan: &Plan| plan.next().and_then(|next| next.problem);
    plan.prepare(ExtraBackend::new(conf(), plan.host().clone()));
    assert_eq!(problem(&plan), None);
    plan.host.uplink.v4 = None;
    plan.prepare(ExtraBackend::new(conf(), plan.host().clone()));
    assert_eq!(problem(&plan).as_deref(), Some("eth0 has no IPv4 address, which ipip needs"));
}
