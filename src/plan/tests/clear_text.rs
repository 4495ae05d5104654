// SPDX-License-Identifier: Apache-2.0
//! A change to a backend that encrypts: to which leases packets may still go in clear text.

use weft_backends::state::Route;
use weft_backends::wireguard_key::{KeyPair, PublicKey, Secret};

use super::wireguard::with_key;
use super::*;

const VXLAN: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#;

/// Our lease names wireguard with these options from now on, and the backend before it becomes an earlier one.
fn change_to_wireguard(plan: &mut Plan, options: &str) {
    prepare_wireguard(plan, options);
    plan.switch_to_next(VXLAN.to_owned()).unwrap();
}

/// Makes wireguard with these options the next backend.
pub(super) fn prepare_wireguard(plan: &mut Plan, options: &str) {
    let text = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"wireguard"{options}}}}}"#);
    let identities = KeyPair::of(Secret::new([1; 32])).both();
    let host = Host { identities, ..plan.host().clone() };
    plan.prepare(ExtraBackend::new(ParsedConf::parse(&text).unwrap(), host));
}

/// The numbers of the subnets that have a route over flannel.1, which is longer than that of the WireGuard device.
fn in_clear_text(plan: &Plan) -> Vec<u8> {
    let over_vxlan = |third: &u8| {
        let key = Key::Route(format!("10.5.{third}.0/24").parse().unwrap(), 0);
        let route = plan.desired(&key);
        matches!(route, Some(Value::Route(Route::Unicast { dev, .. })) if dev.text() == "flannel.1")
    };
    (2..10).filter(over_vxlan).collect()
}

fn id(third: u8) -> Id {
    format!("10.5.{third}.0-24").into()
}

/// The lease of a node that has followed, and that is reached by its earlier backend, too.
fn followed(third: u8) -> Record {
    let mut record = with_key(third, third, third);
    let attrs = &mut record.lease.as_mut().unwrap().attrs;
    *attrs = attrs.clone().with_other_ways(&[lease(third, 1).attrs]);
    record
}

fn refused(plan: &Plan, third: u8) -> bool {
    plan.unplanned(&id(third)).is_some_and(|reason| reason.contains("this network is encrypted"))
}

#[test]
fn only_peers_that_were_reached_before_the_change_are_reached_in_clear_text() {
    let mut plan = plan();
    plan.put(record(2, 1));
    plan.put(record(3, 1));
    change_to_wireguard(&mut plan, "");
    plan.send_current();
    assert_eq!(in_clear_text(&plan), [2, 3]);
    // Somebody publishes a lease of the earlier type, so that packets to its subnet go out in clear text.
    plan.put(record(4, 1));
    assert_eq!((in_clear_text(&plan), refused(&plan, 4)), (vec![2, 3], true));
    // One node follows. Then somebody writes its old lease again.
    plan.put(with_key(3, 3, 3));
    assert_eq!(in_clear_text(&plan), [2]);
    plan.put(record(3, 1));
    assert_eq!((in_clear_text(&plan), refused(&plan, 3)), (vec![2], true));
    // A lease that was removed and comes back is a new one.
    plan.remove(&id(2));
    plan.put(record(2, 1));
    assert_eq!((in_clear_text(&plan), refused(&plan, 2)), (vec![], true));
}

/// Whoever may write leases could otherwise write a broken one before the change, and the one that draws packets out in clear text after it.
#[test]
fn a_peer_that_was_not_reached_before_the_change_is_not_reached_in_clear_text() {
    let mut plan = plan();
    plan.put(record(2, 1));
    let mut silent = record(3, 1);
    silent.lease.as_mut().unwrap().attrs.backend_data = None;
    plan.put(silent);
    assert!(plan.unplanned(&id(3)).is_some());
    change_to_wireguard(&mut plan, "");
    plan.send_current();
    plan.put(record(3, 1));
    assert_eq!((in_clear_text(&plan), refused(&plan, 3)), (vec![2], true));
}

/// The ports of a lease say whether its node has one device for both families. That decides how it is reached, and not whether it encrypts.
#[test]
fn a_lease_that_names_wireguard_in_another_mode_has_followed() {
    let dual = |backend: &str| {
        let families = r#""Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48""#;
        format!(r#"{{{families},"Backend":{{"Type":{backend}}}}}"#)
    };
    let lease = |third: u8, attrs: Attrs| {
        let id: Id = format!("10.5.{third}.0-24&fd05:0:0:{third}::-64").into();
        let subnets = Subnets::from_key(&id).unwrap();
        let addresses = Attrs {
            public_ip: Some([192, 168, 0, third].into()),
            public_ipv6: Some(format!("fd00:1::{third}").parse().unwrap()),
            ..attrs
        };
        Record { id: id.clone(), lease: Ok(Lease { id, subnets, attrs: addresses, ..super::lease(third, 1) }) }
    };
    let mac = |third: u8| Some(format!(r#"{{"VNI":1,"VtepMAC":"02:00:00:00:00:0{third}"}}"#).into_boxed_str());
    let vxlan = |third| Attrs {
        backend_type: "vxlan".into(),
        backend_data: mac(third),
        backend_v6_data: mac(third),
        ..Attrs::default()
    };
    let key = PublicKey([2; 32]);
    let data = |port: u16| Some(format!(r#"{{"PublicKey":"{key}","Port":{port}}}"#).into_boxed_str());
    let wireguard = Attrs {
        backend_type: "wireguard".into(),
        backend_data: data(51820),
        backend_v6_data: data(51821),
        ..Attrs::default()
    };
    let conf = ParsedConf::parse(&dual(r#""vxlan""#)).unwrap();
    let uplink = Uplink { v6: "fd00:1::1".parse().ok(), ..plan().host().uplink.clone() };
    let host = Host { public_v6: uplink.v6, uplink, ..plan().host().clone() };
    let own = lease(1, vxlan(1)).lease.unwrap();
    let mut plan = Plan::new(conf.net_conf, conf.backend, host.clone(), own);
    plan.put(lease(2, vxlan(2)));
    let host = Host { identities: KeyPair::of(Secret::new([1; 32])).both(), ..host };
    plan.prepare(ExtraBackend::new(ParsedConf::parse(&dual(r#""wireguard","Mode":"auto""#)).unwrap(), host));
    plan.switch_to_next(dual(r#""vxlan""#)).unwrap();
    plan.send_current();
    assert_eq!(in_clear_text(&plan), [2]);
    // As flannel writes it in every mode, and as weft does with a device for each family.
    plan.put(lease(2, wireguard));
    assert_eq!(in_clear_text(&plan), [0_u8; 0]);
    // Somebody writes the earlier lease again.
    plan.put(lease(2, vxlan(2)));
    assert_eq!(in_clear_text(&plan), [0_u8; 0]);
}

#[test]
fn a_peer_that_has_followed_is_reached_the_earlier_way_until_peers_know_our_lease() {
    let mut plan = plan();
    plan.put(record(2, 1));
    plan.put(record(3, 1));
    change_to_wireguard(&mut plan, "");
    // A node that joins at this moment was never reached in clear text.
    for third in 2..5 {
        plan.put(followed(third));
    }
    assert_eq!((in_clear_text(&plan), plan.clear_text_count()), (vec![2, 3], 2));
    plan.put(record(3, 1));
    assert_eq!((in_clear_text(&plan), refused(&plan, 3)), (vec![2], true), "it was changed back");
    plan.send_current();
    assert_eq!((in_clear_text(&plan), plan.clear_text_count()), (vec![], 0));
    assert!(plan.unplanned(&id(2)).is_none() && plan.unplanned(&id(4)).is_none());
}

#[test]
fn the_end_of_clear_text_removes_the_earlier_device_and_sets_its_peers_aside() {
    let mut plan = plan();
    plan.put(record(2, 1));
    plan.put(record(3, 1));
    change_to_wireguard(&mut plan, "");
    plan.send_current();
    plan.put(with_key(3, 3, 3));
    assert!(plan.has_clear_text() && plan.is_in_clear_text(&id(2)) && !plan.is_in_clear_text(&id(3)));
    assert_eq!((plan.users(1, 5).count, plan.waiting_in_clear_text().count()), (1, 1));
    plan.end_clear_text();
    assert_eq!((plan.has_clear_text(), plan.is_changing(), plan.clear_text_count()), (false, false, 0));
    assert_eq!(plan.waiting_in_clear_text().count(), 0, "no lease may be reached in clear text any more");
    assert!(refused(&plan, 2) && plan.unplanned(&id(3)).is_none());
    let FirstLeases { count, first } = plan.refused_clear_text(5);
    assert_eq!((count, first[0].id.clone()), (1, id(2)));
    assert_eq!(plan.devices().map(|name| name.to_string()).collect::<Vec<_>>(), ["flannel-wg"]);
    plan.put(with_key(2, 2, 2));
    assert_eq!(plan.refused_clear_text(5).count, 0, "it has followed");
}

/// Other removals wait until the store says which peers are gone.
#[test]
fn what_carries_clear_text_is_removed_at_once_when_its_time_is_over_and_nothing_else_is() {
    let mut plan = plan();
    plan.put(record(2, 1));
    change_to_wireguard(&mut plan, "");
    plan.send_current();
    let link = |name: &str| {
        let key = Key::Link(Name::new(name).unwrap());
        Op::Remove(key, plan.desired(&key).unwrap())
    };
    let route = |name: &str| {
        let (via, dev) = ([10, 5, 2, 0].into(), Name::new(name).unwrap());
        let value = Value::Route(Route::Unicast { via, dev, onlink: true });
        Op::Remove(Key::Route("10.5.2.0/24".parse().unwrap(), 0), value)
    };
    let ops = [link("flannel.1"), route("flannel.1"), link("flannel-wg"), route("flannel-wg")];
    let at_once = |plan: &Plan| ops.each_ref().map(|op| plan.ends_clear_text(op));
    assert_eq!(at_once(&plan), [false; 4], "its time is not over");
    plan.end_clear_text();
    assert_eq!(at_once(&plan), [true, true, false, false]);
    assert_eq!(at_once(&super::wireguard::wireguard("")), [false; 4], "there was no clear text");
}

#[test]
fn net_conf_may_allow_clear_text_and_forbid_it_again() {
    let mut plan = plan();
    plan.put(record(2, 1));
    change_to_wireguard(&mut plan, r#","AllowPlaintext":true"#);
    plan.send_current();
    plan.put(record(4, 1));
    assert_eq!((in_clear_text(&plan), plan.has_clear_text(), plan.clear_text_count()), (vec![2, 4], false, 2));
    let net_conf = NetConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard"}}"#).unwrap();
    let (backend, host, own) = (make(&net_conf).unwrap(), plan.host().clone(), plan.own().clone());
    plan.rebase(net_conf, backend, host, own);
    assert_eq!((in_clear_text(&plan), plan.has_clear_text(), plan.clear_text_count()), (vec![], true, 0));
    assert_eq!(plan.refused_clear_text(1).count, 2);
}

#[test]
fn other_options_of_the_backend_that_encrypts_allow_nothing_more() {
    let mut plan = plan();
    plan.put(record(2, 1));
    plan.put(record(3, 1));
    change_to_wireguard(&mut plan, "");
    plan.send_current();
    plan.put(with_key(3, 3, 3));
    plan.put(record(3, 1));
    plan.put(record(4, 1));
    change_to_wireguard(&mut plan, r#","ListenPort":51999"#);
    plan.send_current();
    assert_eq!(in_clear_text(&plan), [2]);
}

#[test]
fn after_a_restart_only_the_saved_leases_are_reached_in_clear_text() {
    let earlier = ExtraBackend::new(ParsedConf::parse(VXLAN).unwrap(), plan().host);
    let mut plan = super::wireguard::wireguard("")
        .with_earlier(vec![earlier], false)
        .with_clear_text([id(2), id(3)].into_iter(), [].into_iter());
    for third in 2..5 {
        plan.put(record(third, 1));
    }
    assert_eq!((in_clear_text(&plan), refused(&plan, 4)), (vec![2, 3], true));
}

/// The agent itself carries the packets of this backend, and decides from whom it takes them.
#[test]
fn the_tunnel_of_an_earlier_backend_has_no_peer_that_joined_after_the_change() {
    let udp = |third: u8| {
        let attrs = Attrs { backend_type: String::new(), backend_data: None, ..lease(third, 1).attrs };
        Record { id: id(third), lease: Ok(Lease { attrs, ..lease(third, 1) }) }
    };
    let net_conf = NetConf::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}"#).unwrap();
    let mut plan = plan();
    let (host, own) = (plan.host().clone(), plan.own().clone());
    plan.rebase(net_conf.clone(), make(&net_conf).unwrap(), host, own);
    plan.put(udp(2));
    change_to_wireguard(&mut plan, "");
    plan.send_current();
    plan.put(udp(4));
    assert_eq!((plan.tunnel_peers().count(), refused(&plan, 4), refused(&plan, 2)), (1, true, false));
    plan.end_clear_text();
    assert_eq!((plan.tunnel(), refused(&plan, 2)), (None, true));
}

#[test]
fn a_peer_that_has_followed_and_cannot_be_reached_so_is_not_reached_in_clear_text() {
    let mut plan = plan();
    plan.put(record(2, 1));
    change_to_wireguard(&mut plan, "");
    plan.put(followed(2));
    plan.send_current();
    let mut broken = followed(2);
    broken.lease.as_mut().unwrap().attrs.backend_data = Some("{}".into());
    plan.put(broken);
    assert!(in_clear_text(&plan).is_empty() && plan.unplanned(&id(2)).is_some(), "{:?}", plan.unplanned(&id(2)));
}
