// SPDX-License-Identifier: Apache-2.0
//! wireguard and udp each have one route for all of Network. The kernel can have only one such route, and beside a backend that makes no routes
//! there must be none.

use weft_backends::state::Route;

use super::*;

const UDP: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}"#;

fn udp(third: u8) -> Attrs {
    Attrs { backend_type: String::new(), backend_data: None, ..lease(third, 1).attrs }
}

fn put(plan: &mut Plan, attrs: Attrs) {
    let lease = Lease { attrs, ..lease(2, 1) };
    plan.put(Record { id: lease.id.clone(), lease: Ok(lease) });
}

/// Returns the devices of the route to all of Network and of that to the peer. Empty if there is none.
fn devices(plan: &Plan) -> [String; 2] {
    ["10.5.0.0/16", "10.5.2.0/24"].map(|net| match plan.desired(&Key::Route(net.parse().unwrap(), 0)) {
        Some(Value::Route(Route::Device { dev })) => dev.to_string(),
        _ => String::new(),
    })
}

#[test]
fn every_peer_has_a_route_of_its_own_until_one_of_the_two_is_gone() {
    let net_conf = NetConf::parse(UDP).unwrap();
    let mut plan = plan();
    let (host, own) = (plan.host().clone(), plan.own().clone());
    plan.rebase(net_conf.clone(), make(&net_conf).unwrap(), host, own);
    put(&mut plan, udp(2));
    assert_eq!(devices(&plan), ["flannel0", ""]);
    clear_text::prepare_wireguard(&mut plan, "");
    assert_eq!(devices(&plan), ["flannel0", "flannel0"], "the route is there before the other one leads away");
    plan.switch_to_next(UDP.to_owned()).unwrap();
    let with_key = wireguard::with_key(2, 2, 2).lease.unwrap().attrs;
    put(&mut plan, with_key.with_other_ways(&[udp(2)]));
    assert_eq!(devices(&plan), ["flannel-wg", "flannel0"], "the peer may not know our lease yet");
    plan.send_current();
    assert_eq!(devices(&plan), ["flannel-wg", "flannel-wg"]);
    let earlier = plan.earlier().next().unwrap().0;
    plan.drop_earlier(earlier);
    assert_eq!(devices(&plan), ["flannel-wg", ""], "one route is enough again");
}

/// Only the default route may lead to peers of alloc.
#[test]
fn beside_alloc_no_route_to_all_of_network_takes_the_packets_before_they_may_go_the_new_way() {
    const ALLOC: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"alloc"}}"#;
    let net_conf = NetConf::parse(ALLOC).unwrap();
    for (options, then) in [("", ["flannel-wg", ""]), (r#","AllowPlaintext":true"#, ["", "flannel-wg"])] {
        let mut plan = plan();
        let (host, own) = (plan.host().clone(), plan.own().clone());
        plan.rebase(net_conf.clone(), make(&net_conf).unwrap(), host, own);
        // A lease of alloc has no type, like one of udp.
        put(&mut plan, udp(2));
        clear_text::prepare_wireguard(&mut plan, options);
        assert_eq!(devices(&plan), ["", ""], "the peer has not followed");
        plan.switch_to_next(ALLOC.to_owned()).unwrap();
        let with_key = wireguard::with_key(2, 2, 2).lease.unwrap().attrs;
        put(&mut plan, with_key.with_other_ways(&[udp(2)]));
        assert_eq!(devices(&plan), ["", ""], "the peer may not know our lease yet");
        plan.send_current();
        assert_eq!(devices(&plan), then, "{options}");
        let earlier = plan.earlier().next().unwrap().0;
        plan.drop_earlier(earlier);
        assert_eq!(devices(&plan), ["flannel-wg", ""]);
    }
}

/// The first peers that change may be reached by the default route alone.
#[test]
fn before_our_lease_names_alloc_no_route_to_all_of_network_takes_the_packets_to_peers_that_have_changed() {
    let mut plan = wireguard::wireguard("");
    plan.put(wireguard::with_key(2, 2, 2));
    assert_eq!(devices(&plan), ["flannel-wg", ""]);
    let alloc = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"alloc"}}"#;
    plan.prepare(ExtraBackend::new(ParsedConf::parse(alloc).unwrap(), plan.host().clone()));
    assert_eq!(devices(&plan), ["", "flannel-wg"]);
}

/// The route over the earlier device is longer than that of the tunnel, and its removal may be held.
#[test]
fn the_route_over_the_earlier_device_leads_into_the_tunnel_when_packets_go_there() {
    let mut plan = plan();
    plan.put(record(2, 1));
    plan.prepare(ExtraBackend::new(ParsedConf::parse(UDP).unwrap(), plan.host().clone()));
    plan.switch_to_next("vxlan".to_owned()).unwrap();
    put(&mut plan, udp(2).with_other_ways(&[lease(2, 1).attrs]));
    assert_eq!(devices(&plan), ["flannel0", ""], "over the earlier device to the address of the peer");
    plan.send_current();
    assert_eq!(devices(&plan), ["flannel0", "flannel0"]);
}

#[test]
fn two_backends_with_one_device_need_no_route_for_each_peer() {
    let mut plan = wireguard::wireguard("");
    plan.put(wireguard::with_key(2, 2, 2));
    clear_text::prepare_wireguard(&mut plan, r#","ListenPort":51999"#);
    assert_eq!((plan.is_changing(), devices(&plan)), (true, ["flannel-wg".to_owned(), String::new()]));
}

/// Its packets may come by the next device before its lease says so.
#[test]
fn the_tunnel_guard_lets_in_who_is_reached_by_the_agents_own_tunnel_while_the_backend_changes() {
    let mut plan = plan_of("udp").with_tunnel_guard(true);
    put(&mut plan, Attrs { tunnel_ip: Some([192, 168, 0, 2].into()), ..udp(2) });
    let vxlan = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#;
    plan.prepare(ExtraBackend::new(ParsedConf::parse(vxlan).unwrap(), plan.host().clone()));
    assert!(plan.desired(&Key::Peer(IpAddr::from([192, 168, 0, 2]))).is_some());
}

/// Net-conf changed twice and is back at the second backend at once. Packets still go by the third one, which peers know.
#[test]
fn packets_go_by_our_backend_when_the_earlier_one_that_they_prefer_is_dropped() {
    let mut plan = plan();
    plan.put(record(2, 1));
    changes_to(&mut plan, r#","VNI":7"#, "VNI 1");
    changes_to(&mut plan, r#","VNI":9"#, "VNI 7");
    let back = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","VNI":7}}"#;
    plan.prepare(ExtraBackend::new(ParsedConf::parse(back).unwrap(), plan.host().clone()));
    plan.switch_to_next("VNI 9".to_owned()).unwrap();
    let earlier: Vec<(u64, String)> = plan.earlier().map(|(number, text)| (number, text.to_owned())).collect();
    let [(preferred, third), (other, first)] = &earlier[..] else { panic!("{earlier:?}") };
    assert_eq!((third.as_str(), first.as_str(), plan.sends_earlier()), ("VNI 9", "VNI 1", true));
    plan.drop_earlier(*preferred);
    assert_eq!((plan.sends_earlier(), plan.is_settling()), (false, true), "VNI 1 comes after ours");
    plan.drop_earlier(*other);
    assert!(!plan.is_settling(), "nothing is waited for any more");
}

/// The port of udp changes, and nodes read net-conf one after the other.
#[test]
fn a_peer_is_sent_to_at_a_port_on_which_it_listens_and_the_earlier_port_stays_until_nobody_needs_it() {
    let mut plan = plan_of("udp");
    let of = |plan: &Plan| {
        let sent_to: Vec<u16> = plan.tunnel_peers().map(|peer| peer.address.port()).collect();
        (plan.tunnel().unwrap().tunnel.port, plan.more_tunnel_ports(), sent_to)
    };
    put(&mut plan, udp(2));
    let next = ParsedConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp","Port":8286}}"#).unwrap();
    assert!(!plan.is_understood_by(&*next.backend), "peers must learn of it");
    let host = plan.host().clone();
    plan.prepare(ExtraBackend::new(next, host));
    assert_eq!(of(&plan), (8285, vec![], vec![8285]));
    assert_eq!(plan.next_tunnel().map(|tunnel| tunnel.port), Some(8286));
    plan.switch_to_next(UDP.to_owned()).unwrap();
    assert_eq!(of(&plan), (8286, vec![8285], vec![8285]));
    let attrs = plan.advertise(plan.host()).unwrap();
    let ways: Vec<_> = attrs.other_ways().into_iter().map(|way| way.backend_data).collect();
    assert_eq!((attrs.backend_data.as_deref(), ways), (Some(r#"{"Port":8286}"#), vec![None]));
    let earlier = plan.earlier().next().unwrap().0;

    let moved = Attrs { backend_data: attrs.backend_data, ..udp(2) };
    put(&mut plan, moved.clone().with_other_ways(&[udp(2)]));
    assert_eq!(of(&plan).2, [8285], "the peer may not know our lease yet");
    plan.send_current();
    assert_eq!(of(&plan), (8286, vec![8285], vec![8286]));
    assert!(!plan.is_earlier_used(earlier));
    put(&mut plan, udp(2));
    assert_eq!(of(&plan).2, [8285], "the peer was started with the earlier net-conf");
    assert!(plan.is_earlier_used(earlier) && plan.is_earlier_guessed(earlier));
    put(&mut plan, moved);
    plan.drop_earlier(earlier);
    assert_eq!(of(&plan), (8286, vec![], vec![8286]));
    put(&mut plan, udp(2));
    assert_eq!(of(&plan).2, [8286], "a node of flannel names no port");
}

/// The peer changes from udp to vxlan, and has another port than this node. Its lease names the port, so it is reached there.
#[test]
fn a_lease_of_which_no_way_is_understood_is_reached_by_the_tunnel_alone() {
    let mut plan = plan_of("udp");
    let other_port = Attrs { backend_data: Some(r#"{"Port":8290}"#.into()), ..udp(2) };
    put(&mut plan, lease(2, 1).attrs.with_other_ways(&[other_port]));
    let sent_to: Vec<u16> = plan.tunnel_peers().map(|peer| peer.address.port()).collect();
    assert_eq!((sent_to, devices(&plan)), (vec![8290], ["flannel0".to_owned(), String::new()]));
    assert!(plan.desired(&Key::Link(Name::new("flannel.1").unwrap())).is_none(), "no device of vxlan is needed");
}
