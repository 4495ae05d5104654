// SPDX-License-Identifier: Apache-2.0
//! A node with WireGuard: its peers are compared often, because the kernel does not announce their changes.

use tokio::time::Instant;
use weft_backends::wireguard::key::PublicKey;

use super::*;
use crate::kernel::{Kernel, Session};

const WIREGUARD: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"wireguard"}}"#;

fn with_key(key: &str, ip: &str, public: u8) -> Record {
    let mut lease = lease(key, ip);
    lease.attrs.backend_type = "wireguard".into();
    let public = PublicKey([public; 32]);
    lease.attrs.backend_data = Some(format!(r#"{{"PublicKey":"{public}","Port":51820}}"#).into());
    Record { id: lease.id.clone(), lease: Ok(lease) }
}

async fn ready() -> TestNode {
    let own = with_key("10.5.1.0-24", "192.168.0.1", 1);
    let mut test = TestNode::of((WIREGUARD, own.lease.clone().unwrap()), OnLostLease::Hold, RuleOptions::default());
    let records = vec![own, with_key("10.5.2.0-24", "192.168.0.2", 2)];
    test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
    test
}

fn peer() -> Key {
    Key::WgPeer(Name::new("flannel-wg").unwrap(), PublicKey([2; 32]).id())
}

#[tokio::test]
async fn a_peer_that_somebody_removed_comes_back_when_its_audit_is_due() {
    local(async {
        let mut test = ready().await;
        assert!(test.kernel.entries().contains_key(&peer()));
        test.node.tick().await;
        let due = test.node.wireguard.next().expect("peers are compared from now on");
        assert!(test.node.next_wake().is_some_and(|wake| wake <= due));
        test.kernel.disturb(peer(), None, false);
        test.node.audit_wireguard(due - Duration::from_millis(1)).await;
        assert!(!test.kernel.entries().contains_key(&peer()), "not yet");
        test.node.audit_wireguard(due).await;
        assert!(test.kernel.entries().contains_key(&peer()));
        assert!(test.node.wireguard.next().is_some_and(|next| next > Instant::now()));
    })
    .await;
}

#[tokio::test]
async fn a_node_without_such_a_device_does_not_wake_up_for_it() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.tick().await;
        assert_eq!(test.node.wireguard.next(), None);
    })
    .await;
}

#[tokio::test]
async fn the_traffic_with_a_peer_is_shown_beside_it() {
    local(async {
        let mut test = ready().await;
        let session = Session {
            device: Name::new("flannel-wg").unwrap(),
            peer: PublicKey([2; 32]).id(),
            endpoint: None,
            handshake: None,
            received: 7,
            sent: 8,
        };
        test.kernel.set_sessions(vec![session]);
        let peers = test.node.status().peers;
        let [shown] = &peers[0].sessions[..] else { panic!("{peers:?}") };
        assert_eq!((shown.device.as_str(), shown.handshake_s, shown.received, shown.sent), ("flannel-wg", None, 7, 8));
        assert_eq!(test.node.passer.kernel().sessions(&[]).unwrap(), [], "only of the devices that are asked for");
    })
    .await;
}

/// The plan and everything that is shown of a node contain no secret.
#[tokio::test]
async fn entries_and_status_contain_no_secret() {
    local(async {
        let mut test = ready().await;
        let secrets = test.node.plan.secrets().expect("the kernel side gets them");
        let (hex, base64) = (format!("{:?}", secrets.private.expose()), secrets.private.to_base64());
        let status = format!("{:?}", test.node.status());
        let entries = format!("{:?} {:?}", test.kernel.entries(), test.node.plan.host());
        for shown in [status, entries, format!("{secrets:?}")] {
            assert!(!shown.contains(&hex) && !shown.contains(&base64), "{shown}");
        }
    })
    .await;
}
