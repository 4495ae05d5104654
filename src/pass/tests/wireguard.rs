// SPDX-License-Identifier: Apache-2.0
//! The audit of WireGuard peers. The kernel announces nothing about them.

use weft_backends::wireguard_key::PublicKey;
use weft_backends::wireguard_peer::WgPeer;

use super::*;
use crate::plan::tests::wireguard::{wireguard, with_key};

fn peer_key(key: u8) -> Key {
    Key::WgPeer(name("flannel-wg"), PublicKey([key; 32]).id())
}

fn allowed(net: &str) -> Key {
    Key::AllowedIp(name("flannel-wg"), net.parse().unwrap())
}

async fn started() -> (Plan, Passer<FakeKernel>, FakeKernel) {
    let (_, mut passer, kernel) = bench();
    let mut plan = wireguard("");
    plan.put(with_key(2, 2, 2));
    plan.put(with_key(3, 3, 3));
    passer.full(&plan, Cause::Start).await.unwrap();
    kernel.take_ops();
    (plan, passer, kernel)
}

#[tokio::test]
async fn peers_and_prefixes_that_somebody_removed_come_back() {
    let (plan, mut passer, kernel) = started().await;
    assert!(passer.wireguard(&plan).await.unwrap().is_none(), "nothing to write");
    // Linux removes the prefixes together with the peer.
    kernel.disturb(peer_key(2), None, false);
    kernel.disturb(allowed("10.5.2.0/24"), None, false);
    kernel.disturb(allowed("10.5.3.0/24"), None, false);
    assert_eq!(passer.wireguard(&plan).await.unwrap().unwrap().writes(), 3);
    for key in [peer_key(2), allowed("10.5.2.0/24"), allowed("10.5.3.0/24")] {
        assert_eq!(kernel.entries().get(&key).map(|seen| seen.value.clone()), plan.desired(&key));
    }
}

#[tokio::test]
async fn peers_that_nobody_wants_are_removed_after_their_prefixes_and_a_stolen_prefix_moves_back() {
    let (plan, mut passer, kernel) = started().await;
    let thief = WgPeer {
        key: PublicKey([9; 32]),
        endpoint: None,
        keepalive: 0,
        preshared: false,
        assumes_port: false,
        is_live: true,
        written: None,
    };
    let seen = |value| Some(ObservedValue { value, protocol: 0, mark: false });
    let theirs = Value::AllowedIp(Arc::new(thief.key));
    kernel.disturb(peer_key(9), seen(Value::peer(thief)), false);
    kernel.disturb(allowed("10.5.2.0/24"), seen(theirs.clone()), false);
    kernel.disturb(allowed("10.5.77.0/24"), seen(theirs), false);
    passer.wireguard(&plan).await.unwrap().unwrap();
    let written: Vec<String> = kernel.take_ops().iter().map(|op| op.key().to_string()).collect();
    let gone = ["allowed ip 10.5.77.0/24 dev flannel-wg".to_owned(), peer_key(9).to_string()];
    assert_eq!(written[1..], gone, "the prefix that another peer has is moved and not removed");
    assert_eq!(kernel.entries().iter().filter(|(key, _)| key.is_of_wireguard()).count(), 4);
}

#[tokio::test]
async fn an_endpoint_that_works_is_not_written() {
    let (plan, mut passer, kernel) = started().await;
    let Some(Value::WgPeer(wanted)) = plan.desired(&peer_key(2)) else { panic!("no peer") };
    let roamed = |is_live| {
        let endpoint = Some("203.0.113.9:1024".parse().unwrap());
        let value = Value::peer(WgPeer { endpoint, is_live, ..WgPeer::clone(&wanted) });
        Some(ObservedValue { value, protocol: 0, mark: false })
    };
    kernel.disturb(peer_key(2), roamed(true), false);
    assert!(passer.wireguard(&plan).await.unwrap().is_none());
    assert_eq!(passer.full(&plan, Cause::Audit).await.unwrap().writes(), 0);
    kernel.disturb(peer_key(2), roamed(false), false);
    assert_eq!(passer.wireguard(&plan).await.unwrap().unwrap().writes(), 1);
}

/// flannel before 0.26.5 names no port in its lease, and takes another one only when it is restarted.
#[tokio::test]
async fn a_peer_whose_lease_names_no_port_keeps_the_one_at_which_it_is_heard_when_net_conf_names_another() {
    let (_, mut passer, kernel) = bench();
    let put = |plan: &mut Plan| {
        let mut old = with_key(2, 2, 2);
        let data = &mut old.lease.as_mut().unwrap().attrs.backend_data;
        *data = data.take().map(|data| data.replace(",\"Port\":51820", "").into());
        plan.put(old);
        plan.put(with_key(3, 3, 3));
    };
    let mut before = wireguard("");
    put(&mut before);
    passer.full(&before, Cause::Start).await.unwrap();
    for key in [2, 3] {
        let Some(Value::WgPeer(peer)) = before.desired(&peer_key(key)) else { panic!("no peer") };
        let value = Value::peer(WgPeer { is_live: true, written: peer.endpoint, ..WgPeer::clone(&peer) });
        kernel.disturb(peer_key(key), Some(ObservedValue { value, protocol: 0, mark: false }), false);
    }
    kernel.take_ops();
    let mut after = wireguard(r#","ListenPort":51900"#);
    put(&mut after);
    passer.full(&after, Cause::Start).await.unwrap();
    let written: Vec<Key> = kernel.take_ops().iter().map(Op::key).collect();
    assert_eq!(written, [Key::Link(name("flannel-wg"))], "only our own port");
}

#[tokio::test]
async fn entries_are_written_in_an_order_in_which_each_finds_what_it_needs() {
    let (_, mut passer, kernel) = bench();
    let mut plan = wireguard("");
    plan.put(with_key(2, 2, 2));
    passer.full(&plan, Cause::Start).await.unwrap();
    let written: Vec<String> = kernel.take_ops().iter().map(|op| op.key().to_string()).collect();
    let wanted = [
        "link flannel-wg",
        "addr 10.5.1.0/32 dev flannel-wg",
        "wireguard peer AgICAgICAgICAgICAgIC... dev flannel-wg",
        "allowed ip 10.5.2.0/24 dev flannel-wg",
        "route 10.5.0.0/16",
    ];
    assert_eq!(written, wanted);
}

#[tokio::test]
async fn the_audit_writes_nothing_to_a_device_of_another_agent() {
    let (_, mut passer, kernel) = bench();
    let mut plan = wireguard("");
    let (link, own) = (Key::Link(name("flannel-wg")), plan.desired(&Key::Link(name("flannel-wg"))).unwrap());
    let theirs = |protocol, value| Some(ObservedValue { value, protocol, mark: false });
    kernel.disturb(link, theirs(PROTOCOL, own), false);
    plan.put(with_key(9, 9, 9));
    let peer = plan.desired(&peer_key(9)).unwrap();
    plan.remove(&"10.5.9.0-24".into());
    kernel.disturb(peer_key(9), theirs(0, peer), false);
    plan.put(with_key(2, 2, 2));
    passer.full(&plan, Cause::Start).await.unwrap();
    assert_eq!(passer.foreign_devices().iter().copied().collect::<Vec<_>>(), [name("flannel-wg")]);
    assert!(passer.listening().is_empty(), "our lease must not name its port");
    kernel.take_ops();
    assert!(passer.wireguard(&plan).await.unwrap().is_none());
    assert_eq!(kernel.take_ops(), []);
}
