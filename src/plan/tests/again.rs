// SPDX-License-Identifier: Apache-2.0
//! Everything is planned again, because this node has another address, net-conf or lease: what must be forgotten, and what must be there again.

use super::*;

/// This node has the address of that peer from now on, so the lease of the peer is set aside.
fn takes_the_address_of(plan: &mut Plan, last: u8) {
    let (host, own) = (plan.host().clone(), plan.own().clone());
    let uplink = Uplink { v4: Some([192, 168, 0, last].into()), ..host.uplink.clone() };
    plan.rebase_on(Host { public_v4: uplink.v4, uplink, ..host }, own);
    assert!(plan.peers().reason(&lease(last, 1).id).is_some(), "it is set aside");
}

fn without_data(third: u8) -> Record {
    let mut silent = record(third, 1);
    silent.lease.as_mut().unwrap().attrs.backend_data = None;
    silent
}

#[test]
fn the_tunnel_guard_is_there_again_and_does_not_wait_for_a_lease_that_is_set_aside() {
    let mut plan = plan().with_tunnel_guard(true);
    let guards = |plan: &Plan| plan.desired(&Key::Guard(Family::V4)).is_some();
    let mut stated = lease(3, 1);
    stated.attrs.tunnel_ip = stated.attrs.public_ip;
    plan.put(Record { id: stated.id.clone(), lease: Ok(stated) });
    assert!(guards(&plan));
    again(&mut plan);
    assert!(guards(&plan), "without its chain, anyone may send tunnel packets");
    plan.put(record(2, 1));
    assert!(!guards(&plan), "the lease does not say where its packets come from");
    takes_the_address_of(&mut plan, 2);
    assert!(guards(&plan) && plan.guard().unwrap().starts_with("on: "), "{:?}", plan.guard());
}

#[test]
fn a_lease_that_is_set_aside_counts_once() {
    let mut plan = plan();
    plan.put(without_data(2));
    assert_eq!((plan.unplanned_count(), plan.set_aside_count()), (1, 1));
    takes_the_address_of(&mut plan, 2);
    assert_eq!((plan.unplanned_count(), plan.set_aside_count()), (0, 1));
}

#[test]
fn a_lease_that_is_set_aside_needs_no_earlier_backend() {
    let mut plan = changed_to_host_gw();
    let number = plan.earlier().next().unwrap().0;
    assert!(plan.is_earlier_used(number));
    takes_the_address_of(&mut plan, 2);
    assert!(!plan.is_earlier_used(number), "the change would never end");
}

#[test]
fn a_lease_that_is_set_aside_is_not_named_among_those_that_are_refused() {
    let mut plan = wireguard::wireguard("");
    plan.put(record(2, 1));
    assert_eq!(plan.refused_clear_text(5).count, 1);
    takes_the_address_of(&mut plan, 2);
    assert_eq!(plan.refused_clear_text(5).count, 0);
}

/// The agent carries the packets of this backend itself, and makes another table of peers only when the leases have changed.
#[test]
fn the_tunnel_gets_another_table_when_its_only_peer_is_set_aside() {
    let mut plan = plan_of("udp");
    let attrs = Attrs { backend_type: String::new(), backend_data: None, ..lease(2, 1).attrs };
    let peer = Lease { attrs, ..lease(2, 1) };
    plan.put(Record { id: peer.id.clone(), lease: Ok(peer) });
    let (version, peers) = (plan.peers_version(), plan.tunnel_peers().count());
    takes_the_address_of(&mut plan, 2);
    assert_eq!((peers, plan.tunnel_peers().count()), (1, 0));
    assert!(plan.peers_version() > version);
}

/// Pods reach them with their own addresses then, and their answers find the way back only if the network of the nodes knows the pods.
#[test]
fn the_addresses_of_nodes_are_exceptions_from_masquerading_only_while_net_conf_says_so() {
    let mut plan = plan();
    plan.put(record(2, 1));
    for (third, to_nodes, wanted) in [(3, true, [0, 0]), (4, false, [2, 3]), (5, true, [0, 0])] {
        let text =
            format!(r#"{{"Network":"10.5.0.0/16","MasqueradeToNodes":{to_nodes},"Backend":{{"Type":"vxlan"}}}}"#);
        let net_conf = NetConf::parse(&text).unwrap();
        let (backend, host, own) = (make(&net_conf).unwrap(), plan.host().clone(), plan.own().clone());
        plan.rebase(net_conf, backend, host, own);
        let before = plan.node_addresses().addresses().count();
        plan.put(record(third, 1));
        assert_eq!([before, plan.node_addresses().addresses().count()], wanted, "MasqueradeToNodes: {to_nodes}");
    }
}

/// In Kubernetes a node chooses its published address, and not its subnet. So it must not take the subnet of a younger one.
#[test]
fn where_subnets_are_assigned_an_address_inside_the_subnet_of_another_node_is_never_believed() {
    for assigned in [false, true] {
        let mut plan = plan().with_assigned_subnets(assigned);
        let mut older = lease(2, 1);
        older.attrs.public_ip = Some([10, 5, 3, 9].into());
        plan.put(Record { id: older.id.clone(), lease: Ok(older) });
        plan.put(record(3, 1));
        let believed = |plan: &Plan| [2, 3].map(|third| plan.peers().get(&lease(third, 1).id).is_some());
        assert_eq!(believed(&plan), [!assigned, assigned]);
        again(&mut plan);
        assert_eq!(believed(&plan), [!assigned, assigned], "planned again");
    }
}
