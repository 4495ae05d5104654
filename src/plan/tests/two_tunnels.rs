// SPDX-License-Identifier: Apache-2.0
//! A change between two backends that each have one route for all of Network: wireguard and udp. The kernel can have only one such route.

use weft_backends::state::Route;

use super::*;

const UDP: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}"#;

fn udp(third: u8) -> Attrs {
    Attrs { backend_type: String::new(), backend_data: None, ..lease(third, 1).attrs }
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
    let network = Network::parse(UDP).unwrap();
    let mut plan = plan();
    let (host, own) = (plan.host().clone(), plan.own().clone());
    plan.rebase(network.clone(), make(&network).unwrap(), host, own);
    let put = |plan: &mut Plan, attrs: Attrs| {
        let lease = Lease { attrs, ..lease(2, 1) };
        plan.put(Record { id: lease.id.clone(), lease: Ok(lease) });
    };
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

const BOTH: &str = r#""Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:5::/48""#;

/// Returns a plan of a dual-stack network with this backend, which knows one peer with vxlan.
fn dual_stack(backend: &str) -> Plan {
    let network = Network::parse(&format!(r#"{{{BOTH},"Backend":{{{backend}}}}}"#)).unwrap();
    let mut plan = plan();
    let mut host = with_key(plan.host());
    host.uplink.v6 = "fd77::1".parse().ok();
    let own =
        Lease { subnets: Subnets { v6: "fd00:5:0:1::/64".parse().ok(), ..plan.own().subnets }, ..plan.own().clone() };
    plan.rebase(network.clone(), make(&network).unwrap(), host, own);
    let mut peer = lease(2, 1);
    peer.subnets.v6 = "fd00:5:0:2::/64".parse().ok();
    peer.attrs.public_ipv6 = "fd77::2".parse().ok();
    peer.attrs.backend_v6_data = Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:06:02"}"#.into());
    plan.put(Record { id: peer.id.clone(), lease: Ok(peer) });
    plan
}

fn with_key(host: &Host) -> Host {
    let identities =
        weft_backends::wireguard::key::KeyPair::of(weft_backends::wireguard::key::Secret::new([1; 32])).both();
    Host { identities, ..host.clone() }
}

/// Returns the devices of the routes to the subnet of the peer and to its gateway. Empty if there is none.
fn devices_v6(plan: &Plan) -> [String; 2] {
    ["fd00:5:0:2::/64", "fd00:5:0:2::/128"].map(|net| match plan.desired(&Key::Route(net.parse().unwrap(), 1024)) {
        Some(Value::Route(Route::Device { dev } | Route::Unicast { dev, .. })) => dev.to_string(),
        _ => String::new(),
    })
}

/// Linux accepts the route to the subnet of a peer only if its gateway is not reached over another device.
#[test]
fn an_ipv6_gateway_has_a_route_of_its_own_while_another_backend_has_the_route_to_network() {
    let mut plan = dual_stack(r#""Type":"vxlan""#);
    assert_eq!(devices_v6(&plan), ["flannel-v6.1", ""]);
    let text = format!(r#"{{{BOTH},"Backend":{{"Type":"wireguard"}}}}"#);
    let wireguard = Network::parse(&text).unwrap();
    let host = with_key(plan.host());
    plan.prepare(Beside::new((text, wireguard.clone()), make(&wireguard).unwrap(), host));
    assert_eq!(devices_v6(&plan), ["flannel-v6.1", "flannel-v6.1"]);
    plan.give_up_next();
    assert_eq!(devices_v6(&plan), ["flannel-v6.1", ""]);
}

#[test]
fn a_peer_with_another_type_than_wireguard_is_reached_over_ipv6_too() {
    let plan = dual_stack(r#""Type":"wireguard","AllowPlaintext":true"#);
    assert_eq!(devices_v6(&plan), ["flannel-v6.1", "flannel-v6.1"]);
}
