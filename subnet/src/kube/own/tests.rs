// SPDX-License-Identifier: Apache-2.0
//! Writes of the own Node, request by request: what is written, where, under which condition, and what is never touched.

use super::super::annotations::Prefix;
use super::super::fake::{Asked, Clock, Fake, FakeNode, PREFIX};
use super::*;
use crate::connected::Connected;
use crate::network::Range;

const NODE: &str = "/api/v1/nodes/n1";
/// Where all writes go, and under which name.
const WRITE: &str = "/api/v1/nodes/n1/status?fieldManager=weft";

fn attrs() -> Attrs {
    Attrs {
        public_ip: Some([192, 0, 2, 1].into()),
        backend_type: "vxlan".into(),
        backend_data: Some(r#"{"VNI":1,"VtepMAC":"0e:00:00:00:00:01"}"#.into()),
        ..Attrs::default()
    }
}

fn claim() -> Claim {
    let net = "10.5.0.0/16".parse().unwrap();
    let range = Range { network: net, len: 24, min: "10.5.1.0".parse().unwrap(), max: "10.5.255.0".parse().unwrap() };
    let network = Network {
        networks: Subnets { v4: Some(net), v6: None },
        v4: Some(range),
        v6: None,
        nftables: None,
        masquerade: Default::default(),
        backend_type: "vxlan".into(),
        backend: "{}".into(),
    };
    Claim { network, attrs: attrs(), previous: None, was: None, connected: Connected::default() }
}

fn lease() -> Lease {
    let node: Node = serde_json::from_value(FakeNode::new(1, 5).json()).unwrap();
    node.lease(&Prefix::new(PREFIX).unwrap()).unwrap()
}

/// The names of the annotations in a patch, without the prefix.
fn named(patch: &Value) -> Vec<&str> {
    let annotations = patch["metadata"]["annotations"].as_object().unwrap();
    annotations.keys().map(|name| name.strip_prefix(PREFIX).unwrap()).collect()
}

async fn reads(fake: &mut Fake, node: FakeNode) {
    let asked = fake.asked().await;
    assert_eq!((&*asked.method, &*asked.path), ("GET", NODE));
    asked.json(&node.json()).await;
}

async fn writes(fake: &mut Fake) -> Asked {
    let asked = fake.asked().await;
    assert_eq!((&*asked.method, &*asked.path), ("PATCH", WRITE));
    asked
}

#[tokio::test]
async fn a_write_that_others_got_in_between_is_made_again_on_what_is_there_now() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let serve = async {
        reads(&mut fake, FakeNode::bare(1, 5)).await;
        let asked = writes(&mut fake).await;
        assert_eq!(asked.body["metadata"]["resourceVersion"], "5");
        assert_eq!(named(&asked.body), ["backend-data", "backend-type", "kube-subnet-manager", "public-ip"]);
        assert_eq!(asked.body.as_object().unwrap().keys().collect::<Vec<_>>(), ["metadata"], "neither spec nor status");
        asked.refuse(409, "Conflict").await;
        // The admin has set another address meanwhile.
        reads(&mut fake, FakeNode::bare(1, 6).with("public-ip-overwrite", "198.51.100.7")).await;
        let asked = writes(&mut fake).await;
        assert_eq!(asked.body["metadata"]["resourceVersion"], "6");
        assert_eq!(asked.body["metadata"]["annotations"][format!("{PREFIX}public-ip")], "198.51.100.7");
        let written = FakeNode::new(1, 7).with("public-ip-overwrite", "198.51.100.7").with("public-ip", "198.51.100.7");
        asked.json(&written.json()).await;
    };
    let claim = claim();
    let (lease, ()) = tokio::join!(store.take(&claim), serve);
    assert_eq!(lease.unwrap().attrs.public_ip, Some([198, 51, 100, 7].into()));
    assert_eq!(store.newest(), "7", "no list may be older than the last write");
}

#[tokio::test]
async fn what_stands_there_already_is_not_written() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let claim = claim();
    let (lease, ()) = tokio::join!(store.take(&claim), reads(&mut fake, FakeNode::new(1, 5)));
    assert_eq!(lease.unwrap(), self::lease());
    let other = Attrs { public_ip: Some([192, 0, 2, 9].into()), ..attrs() };
    let serve = async {
        reads(&mut fake, FakeNode::new(1, 5)).await;
        let asked = writes(&mut fake).await;
        assert_eq!(named(&asked.body), ["public-ip"], "only the difference");
        asked.json(&FakeNode::new(1, 6).with("public-ip", "192.0.2.9").json()).await;
    };
    let (lease, ()) = tokio::join!(store.take_again(&other), serve);
    assert_eq!(lease.unwrap().attrs, other);
}

#[tokio::test]
async fn conflicts_without_end_are_given_up_and_named() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let serve = async {
        for version in 0..u64::from(TRIES) {
            reads(&mut fake, FakeNode::bare(1, version)).await;
            writes(&mut fake).await.refuse(409, "Conflict").await;
        }
        reads(&mut fake, FakeNode::bare(1, 99)).await;
    };
    let claim = claim();
    let (lease, ()) = tokio::join!(store.take(&claim), serve);
    let text = lease.unwrap_err().to_string();
    assert!(text.contains("annotations of node n1 are written by someone else too"), "{text}");
}

#[tokio::test]
async fn two_agents_of_one_name_stop_to_write_for_a_minute() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let claim = claim();
    let (lease, ()) = tokio::join!(store.take(&claim), reads(&mut fake, FakeNode::new(1, 5)));
    lease.unwrap();
    let attrs = attrs();
    for version in 0..MANY as u64 {
        let serve = async {
            reads(&mut fake, FakeNode::new(1, version).with("public-ip", "192.0.2.99")).await;
            writes(&mut fake).await.json(&FakeNode::new(1, version).json()).await;
        };
        tokio::join!(store.take_again(&attrs), serve).0.unwrap();
    }
    let theirs = FakeNode::new(1, 77).with("public-ip", "192.0.2.99");
    let (lease, ()) = tokio::join!(store.take_again(&attrs), reads(&mut fake, theirs.clone()));
    let text = lease.unwrap_err().to_string();
    assert!(text.contains("is NODE_NAME given twice?"), "{text}");
    let clock = Clock::stop();
    clock.jump(CALM).await;
    drop(clock);
    let serve = async {
        reads(&mut fake, theirs.clone()).await;
        writes(&mut fake).await.json(&FakeNode::new(1, 78).json()).await;
    };
    tokio::join!(store.take_again(&attrs), serve).0.expect("a minute later it may be another one's fault no longer");
}

#[tokio::test]
async fn a_release_takes_away_our_annotations_and_nothing_else() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let serve = async {
        let mut node = FakeNode::new(1, 5).with("public-ip-overwrite", "192.0.2.1").with("node-public-ip", "192.0.2.1");
        node = node.with("tunnel-ip", "192.0.2.1");
        node.annotations.push(("other.test/public-ip".to_owned(), "192.0.2.1".to_owned()));
        reads(&mut fake, node.clone()).await;
        writes(&mut fake).await.refuse(409, "Conflict").await;
        reads(&mut fake, FakeNode { version: 6, ..node }).await;
        let asked = writes(&mut fake).await;
        let names = ["backend-data", "backend-type", "kube-subnet-manager", "public-ip", "tunnel-ip"];
        assert_eq!(named(&asked.body), names);
        assert!(asked.body["metadata"]["annotations"].as_object().unwrap().values().all(Value::is_null));
        assert_eq!(asked.body["metadata"]["resourceVersion"], "6", "and only from the Node that was read");
        assert_eq!(asked.body.as_object().unwrap().len(), 1);
        asked.json(&FakeNode::bare(1, 7).json()).await;
    };
    let lease = Lease { attrs: Attrs { tunnel_ip: Some([192, 0, 2, 1].into()), ..attrs() }, ..lease() };
    let (released, ()) = tokio::join!(store.withdraw("n1", Some(&lease)), serve);
    released.unwrap();
}

#[tokio::test]
async fn a_release_leaves_what_another_agent_has_published() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let other = r#"{"VNI":1,"VtepMAC":"0e:00:00:00:00:99"}"#;
    let theirs = FakeNode::new(1, 5).with("backend-data", other).with("public-ip", "192.0.2.99");
    let unreadable = FakeNode::new(1, 5).with("backend-data", "no JSON");
    for node in [theirs, unreadable] {
        let lease = lease();
        let (released, ()) = tokio::join!(store.withdraw("n1", Some(&lease)), reads(&mut fake, node.clone()));
        assert!(matches!(released, Err(Error::Taken { .. })), "{released:?}");
    }
    let lease = lease();
    let (released, ()) = tokio::join!(store.withdraw("n1", Some(&lease)), reads(&mut fake, FakeNode::bare(1, 5)));
    assert!(matches!(released, Err(Error::Missing(_))), "{released:?}");
}

/// A Node with this condition NetworkUnavailable between two of the kubelet's.
fn conditioned(status: &str, reason: &str, message: &str) -> Value {
    let mut node = FakeNode::new(1, 5).json();
    node["status"] = json!({"conditions": [
        {"type": "MemoryPressure", "status": "False", "reason": "KubeletHasSufficientMemory"},
        {"type": "NetworkUnavailable", "status": status, "reason": reason, "message": message},
        {"type": "Ready", "status": "True", "reason": "KubeletReady"},
    ]});
    node
}

#[tokio::test]
async fn the_condition_alone_is_written_and_only_when_it_differs() {
    let up = ("False", "FlannelIsUp", "Flannel is running on this node");
    let down = ("True", "WeftIsDown", "no uplink");
    // What is there, what is to be told, whether it is written, and whether that is a transition.
    let table = [
        (up, None, None),
        (down, Some("no uplink"), None),
        (down, Some("another fault"), Some(false)),
        (("True", "NoRouteCreated", "no uplink"), Some("no uplink"), Some(false)),
        (("False", "RouteCreated", "RouteController created a route"), None, Some(false)),
        (down, None, Some(true)),
        (up, Some("no uplink"), Some(true)),
        (("Unknown", "FlannelIsUp", "Flannel is running on this node"), None, Some(true)),
    ];
    for (there, fault, written) in table {
        let mut fake = Fake::start().await;
        let store = fake.store();
        let serve = async {
            let asked = fake.expect("GET", NODE).await;
            asked.json(&conditioned(there.0, there.1, there.2)).await;
            let Some(transition) = written else { return };
            let asked = writes(&mut fake).await;
            let condition = &asked.body["status"]["conditions"][0];
            let wanted = fault.map_or(up, |fault| ("True", "WeftIsDown", fault));
            assert_eq!(condition["type"], "NetworkUnavailable");
            assert_eq!(
                [&condition["status"], &condition["reason"], &condition["message"]],
                [wanted.0, wanted.1, wanted.2]
            );
            assert_eq!(!condition["lastTransitionTime"].is_null(), transition, "{there:?} to {fault:?}");
            assert!(condition["lastHeartbeatTime"].is_string());
            let others = json!({"status": {"conditions": [condition]}});
            assert_eq!(asked.body, others, "nothing of others is named");
            asked.json(&FakeNode::new(1, 6).json()).await;
        };
        let (told, ()) = tokio::join!(store.condition(fault), serve);
        told.unwrap();
    }
}

#[tokio::test]
async fn a_pod_cidr_is_waited_for_until_the_node_has_one() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let without = |version| FakeNode { cidr: String::new(), ..FakeNode::bare(1, version) };
    let serve = async {
        reads(&mut fake, without(5)).await;
        let asked = fake.expect("GET", "/api/v1/nodes?watch=true&fieldSelector=metadata.name%3Dn1&").await;
        assert_eq!(asked.query("resourceVersion"), Some("5"), "nothing that happened since is missed");
        let mut stream = asked.stream().await;
        stream.bookmark(6).await;
        stream.event("MODIFIED", &without(7)).await;
        // Nothing is asked before there is one.
        assert!(tokio::time::timeout(Duration::from_millis(300), fake.asked()).await.is_err());
        stream.event("MODIFIED", &FakeNode::bare(1, 8)).await;
        reads(&mut fake, FakeNode::new(1, 8)).await;
    };
    let claim = claim();
    let (lease, ()) = tokio::join!(store.take(&claim), serve);
    assert_eq!(lease.unwrap().subnets.to_string(), "10.5.1.0/24");
}

#[tokio::test]
async fn of_both_families_only_the_enabled_one_is_our_lease() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let mut node = FakeNode::new(1, 5).json();
    node["spec"]["podCIDRs"] = json!(["10.5.1.0/24", "fd00:12:0:1::/64"]);
    let serve = async { fake.expect("GET", NODE).await.json(&node).await };
    let claim = claim();
    let (lease, ()) = tokio::join!(store.take(&claim), serve);
    let lease = lease.unwrap();
    assert_eq!(lease.subnets.to_string(), "10.5.1.0/24");
    let own: Node = serde_json::from_value(node.clone()).unwrap();
    assert_eq!(store.judge(&own).unwrap().lease.unwrap().subnets.to_string(), "10.5.1.0/24");
    // host-gw has no MAC that would tell whose it is: the subnet must.
    let annotations = &mut node["metadata"]["annotations"];
    (annotations[format!("{PREFIX}backend-type")], annotations[format!("{PREFIX}backend-data")]) =
        ("host-gw".into(), "null".into());
    let lease = Lease { attrs: Attrs { backend_type: "host-gw".into(), backend_data: None, ..lease.attrs }, ..lease };
    let serve = async {
        fake.expect("GET", NODE).await.json(&node).await;
        writes(&mut fake).await.json(&FakeNode::bare(1, 7).json()).await;
    };
    let (released, ()) = tokio::join!(store.withdraw("n1", Some(&lease)), serve);
    released.expect("the other family is nobody else's");
}

#[tokio::test]
async fn an_address_of_the_admin_asks_for_a_new_publication() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let claim = claim();
    let (lease, ()) = tokio::join!(store.take(&claim), reads(&mut fake, FakeNode::new(1, 5)));
    lease.unwrap();
    let judged = |node: FakeNode| store.judge(&serde_json::from_value(node.json()).unwrap()).unwrap().lease;
    assert!(judged(FakeNode::new(1, 6)).is_ok());
    let asks = judged(FakeNode::new(1, 7).with("public-ip-overwrite", "198.51.100.7")).unwrap_err();
    assert_eq!(asks, "node n1: public address to be published again");
    let other = FakeNode::new(2, 8).with("public-ip-overwrite", "198.51.100.7");
    assert!(judged(other).is_ok(), "what an admin wrote on another node is for that node's agent");
}
