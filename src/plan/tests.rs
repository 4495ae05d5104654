// SPDX-License-Identifier: Apache-2.0
//! The plan as a whole: what one lease may cost, and what is said of it.

use weft_backends::backend::make;
use weft_backends::host::{OnLink, Uplink};
use weft_backends::state::Mac;

use super::*;

fn lease(third: u8, vni: u32) -> Lease {
    let attrs = Attrs {
        public_ip: Some([192, 168, 0, third].into()),
        backend_type: "vxlan".into(),
        backend_data: Some(format!(r#"{{"VNI":{vni},"VtepMAC":"02:00:00:00:00:{third:02x}"}}"#).into()),
        ..Attrs::default()
    };
    let subnets = Subnets::from_key(&format!("10.5.{third}.0-24")).unwrap();
    Lease { id: subnets.to_key().into(), subnets, attrs, age: Age { stamp: third.into(), tie: "".into() } }
}

fn record(third: u8, vni: u32) -> Record {
    let lease = lease(third, vni);
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

fn plan() -> Plan {
    let network = Network::parse(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan"}}"#).unwrap();
    let uplink = Uplink { name: Name::new("eth0").unwrap(), mtu: 1500, v4: Some([192, 168, 0, 1].into()), v6: None };
    let host = Host {
        public_v4: uplink.v4,
        uplink,
        public_v6: None,
        vtep_mac_v4: Mac([2, 0, 0, 0, 0, 1]),
        vtep_mac_v6: Mac([2, 0, 0, 0, 0, 1]),
        routes: OnLink::default(),
    };
    let backend = make(&network).unwrap();
    Plan::new(network, backend, host, lease(1, 1))
}

fn links(changed: &[Changed]) -> Vec<String> {
    changed.iter().filter(|(key, ..)| matches!(key, Key::Link(_))).map(|(key, ..)| key.to_string()).collect()
}

#[test]
fn devices_are_few_and_one_that_goes_makes_room() {
    let mut plan = plan();
    let last = MOST_DEVICES as u8 + 1;
    // The own device and one for each VNI of a peer.
    for third in 2..last {
        assert_eq!(links(&plan.put(record(third, 100 + u32::from(third)))), [format!("link flannel.{}", 100 + third)]);
    }
    let id: Id = "10.5.200.0-24".into();
    assert_eq!(plan.put(record(200, 77)), []);
    assert!(plan.skipped(&id).unwrap().contains("needs a device of its own"), "{:?}", plan.skipped(&id));
    assert_eq!(plan.put(record(201, 1)).len(), 3, "who uses a device that is there needs no room");
    let changed = plan.remove(&"10.5.2.0-24".into());
    assert_eq!(links(&changed), ["link flannel.102", "link flannel.77"]);
    assert_eq!((plan.skipped(&id), plan.devices().count()), (None, MOST_DEVICES));
}

#[test]
fn planning_again_changes_nothing_and_keeps_what_was_said() {
    let mut plan = plan();
    plan.put(record(2, 1));
    let mut silent = record(3, 1);
    silent.lease.as_mut().unwrap().attrs.backend_data = None;
    plan.put(silent);
    let wanted = |plan: &Plan| plan.difference(&Observed::new(), |_, _| true);
    let (before, id) = (wanted(&plan), Id::from("10.5.3.0-24"));
    let said = plan.skipped(&id).unwrap().to_owned();
    let network = plan.network().clone();
    let (backend, host, own) = (make(&network).unwrap(), plan.host().clone(), plan.own().clone());
    plan.rebase(network, backend, host, own);
    assert_eq!((wanted(&plan), plan.skipped(&id)), (before, Some(said.as_str())));
}
