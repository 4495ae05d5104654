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
