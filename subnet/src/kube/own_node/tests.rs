// SPDX-License-Identifier: Apache-2.0
//! Writes of our own Node, request by request: what is written, where, on which condition, and what is never written.

use super::super::annotations::Prefix;
use super::super::fake::{Clock, Fake, FakeNode, LIMIT, PREFIX, Request};
use super::*;
use crate::connected::Connected;
use crate::net_conf::Range;
use crate::source::Source;

const NODE: &str = "/api/v1/nodes/n1";
/// The path of all writes.
const WRITE: &str = "/api/v1/nodes/n1/status?fieldManager=weft";

fn attrs() -> Attrs {
    Attrs {
        public_ip: Some([192, 0, 2, 1].into()),
        backend_type: "vxlan".into(),
        backend_data: Some(r#"{"VNI":1,"VtepMAC":"0e:00:00:00:00:01"}"#.into()),
        ..Attrs::default()
    }
}

fn request() -> LeaseRequest {
    let net = "10.5.0.0/16".parse().unwrap();
    let range = Range { network: net, len: 24, min: "10.5.1.0".parse().unwrap(), max: "10.5.255.0".parse().unwrap() };
    let net_conf = NetConf {
        networks: Subnets { v4: Some(net), v6: None },
        v4: Some(range),
        v6: None,
        nftables: None,
        masquerade: Default::default(),
        backend_type: "vxlan".into(),
        backend: "{}".into(),
        unknown: Vec::new(),
    };
    LeaseRequest { net_conf, attrs: attrs(), previous: None, was: None, connected: Connected::default() }
}

fn lease() -> Lease {
    let node: Node = serde_json::from_value(FakeNode::new(1, 5).json()).unwrap();
    node.lease(&Prefix::new(PREFIX).unwrap()).unwrap()
}

/// Returns the names of the annotations in a patch, without the prefix.
fn named(patch: &Value) -> Vec<&str> {
    let annotations = patch["metadata"]["annotations"].as_object().unwrap();
    annotations.keys().map(|name| name.strip_prefix(PREFIX).unwrap()).collect()
}

async fn reads(fake: &mut Fake, node: FakeNode) {
    let request = fake.request().await;
    assert_eq!((&*request.method, &*request.path), ("GET", NODE));
    request.json(&node.json()).await;
}

async fn writes(fake: &mut Fake) -> Request {
    let request = fake.request().await;
    assert_eq!((&*request.method, &*request.path), ("PATCH", WRITE));
    // A patch of another kind would replace all conditions by the one that it names.
    assert_eq!(request.kind, "application/strategic-merge-patch+json");
    request
}

#[tokio::test]
async fn a_write_that_conflicts_is_repeated_on_the_newer_node() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let serve = async {
        reads(&mut fake, FakeNode::bare(1, 5)).await;
        let request = writes(&mut fake).await;
        assert_eq!(request.body["metadata"]["resourceVersion"], "5");
        assert_eq!(named(&request.body), ["backend-data", "backend-type", "kube-subnet-manager", "public-ip"]);
        assert_eq!(
            request.body.as_object().unwrap().keys().collect::<Vec<_>>(),
            ["metadata"],
            "neither spec nor status"
        );
        request.refuse(409, "Conflict").await;
        // An admin has chosen another address in the meantime.
        reads(&mut fake, FakeNode::bare(1, 6).with("public-ip-overwrite", "198.51.100.7")).await;
        let request = writes(&mut fake).await;
        assert_eq!(request.body["metadata"]["resourceVersion"], "6");
        assert_eq!(request.body["metadata"]["annotations"][format!("{PREFIX}public-ip")], "198.51.100.7");
        let written = FakeNode::new(1, 7).with("public-ip-overwrite", "198.51.100.7").with("public-ip", "198.51.100.7");
        request.json(&written.json()).await;
    };
    let request = request();
    let (lease, ()) = tokio::join!(store.take(&request), serve);
    assert_eq!(lease.unwrap().attrs.public_ip, Some([198, 51, 100, 7].into()));
    assert_eq!(store.own_version(), "7", "no list may be older than the last write");
}

#[tokio::test]
async fn only_annotations_that_differ_are_written() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let request = request();
    let (lease, ()) = tokio::join!(store.take(&request), reads(&mut fake, FakeNode::new(1, 5)));
    assert_eq!(lease.unwrap(), self::lease());
    let other = Attrs { public_ip: Some([192, 0, 2, 9].into()), ..attrs() };
    let serve = async {
        reads(&mut fake, FakeNode::new(1, 5)).await;
        let request = writes(&mut fake).await;
        assert_eq!(named(&request.body), ["public-ip"], "only the difference");
        request.json(&FakeNode::new(1, 6).with("public-ip", "192.0.2.9").json()).await;
    };
    let (lease, ()) = tokio::join!(store.take_again(&other), serve);
    assert_eq!(lease.unwrap().attrs, other);
    let written: Node = serde_json::from_value(FakeNode::new(1, 6).with("public-ip", "192.0.2.9").json()).unwrap();
    let watched = store.record(&written).unwrap().lease.unwrap();
    assert_eq!(watched.attrs, other, "the watch reports what was published last");
}

#[tokio::test]
async fn our_lease_that_cannot_be_read_is_ours_all_the_same() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let (own, ()) =
        tokio::join!(store.find_own(), reads(&mut fake, FakeNode::new(1, 5).with("public-ip", "no address")));
    let own = own.unwrap().expect("the Node is managed by this agent");
    assert_eq!((own.attrs.backend_type, own.attrs.backend_data), (attrs().backend_type, attrs().backend_data));
    assert_eq!((&*own.id, own.subnets), ("n1", lease().subnets));
    let (own, ()) = tokio::join!(store.find_own(), reads(&mut fake, FakeNode::bare(1, 6)));
    assert_eq!(own.unwrap(), None);
}

#[tokio::test]
async fn endless_conflicts_lead_to_an_error() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let serve = async {
        for version in 0..u64::from(TRIES) {
            reads(&mut fake, FakeNode::bare(1, version)).await;
            writes(&mut fake).await.refuse(409, "Conflict").await;
        }
        reads(&mut fake, FakeNode::bare(1, 99)).await;
    };
    let request = request();
    let (lease, ()) = tokio::join!(store.take(&request), serve);
    let text = lease.unwrap_err().to_string();
    assert!(text.contains("another program also writes the annotations of node n1"), "{text}");
}

#[tokio::test]
async fn two_agents_with_one_name_stop_writing_for_a_minute() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let request = request();
    let (lease, ()) = tokio::join!(store.take(&request), reads(&mut fake, FakeNode::new(1, 5)));
    lease.unwrap();
    let attrs = attrs();
    for version in 0..MAX_WRITES as u64 {
        let serve = async {
            reads(&mut fake, FakeNode::new(1, version).with("public-ip", "192.0.2.99")).await;
            writes(&mut fake).await.json(&FakeNode::new(1, version).json()).await;
        };
        tokio::join!(store.take_again(&attrs), serve).0.unwrap();
    }
    let theirs = FakeNode::new(1, 77).with("public-ip", "192.0.2.99");
    let (lease, ()) = tokio::join!(store.take_again(&attrs), reads(&mut fake, theirs.clone()));
    let text = lease.unwrap_err().to_string();
    assert!(text.contains("do two agents have the same NODE_NAME?"), "{text}");
    let clock = Clock::stop();
    clock.jump(WRITES_WITHIN).await;
    drop(clock);
    let serve = async {
        reads(&mut fake, theirs.clone()).await;
        writes(&mut fake).await.json(&FakeNode::new(1, 78).json()).await;
    };
    tokio::join!(store.take_again(&attrs), serve).0.expect("after a minute the agent must try again");
}

#[tokio::test]
async fn a_release_removes_our_annotations_and_nothing_else() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let serve = async {
        let mut node = FakeNode::new(1, 5).with("public-ip-overwrite", "192.0.2.1").with("node-public-ip", "192.0.2.1");
        node = node.with("tunnel-ip", "192.0.2.1");
        node.annotations.push(("other.test/public-ip".to_owned(), "192.0.2.1".to_owned()));
        reads(&mut fake, node.clone()).await;
        writes(&mut fake).await.refuse(409, "Conflict").await;
        reads(&mut fake, FakeNode { version: 6, ..node }).await;
        let request = writes(&mut fake).await;
        let names = ["backend-data", "backend-type", "kube-subnet-manager", "public-ip", "tunnel-ip"];
        assert_eq!(named(&request.body), names);
        assert!(request.body["metadata"]["annotations"].as_object().unwrap().values().all(Value::is_null));
        assert_eq!(
            request.body["metadata"]["resourceVersion"], "6",
            "the patch must be bound to the version that was read"
        );
        assert_eq!(request.body.as_object().unwrap().len(), 1);
        request.json(&FakeNode::bare(1, 7).json()).await;
    };
    let lease = Lease { attrs: Attrs { tunnel_ip: Some([192, 0, 2, 1].into()), ..attrs() }, ..lease() };
    let (released, ()) = tokio::join!(store.release(&lease), serve);
    released.unwrap();
}

#[tokio::test]
async fn a_release_leaves_the_lease_of_another_agent() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let other = r#"{"VNI":1,"VtepMAC":"0e:00:00:00:00:99"}"#;
    let theirs = FakeNode::new(1, 5).with("backend-data", other).with("public-ip", "192.0.2.99");
    let unreadable = FakeNode::new(1, 5).with("backend-data", "no JSON");
    for node in [theirs, unreadable] {
        let lease = lease();
        let (released, ()) = tokio::join!(store.release(&lease), reads(&mut fake, node.clone()));
        assert!(matches!(released, Err(Error::Taken { .. })), "{released:?}");
    }
    let lease = lease();
    let (released, ()) = tokio::join!(store.release(&lease), reads(&mut fake, FakeNode::bare(1, 5)));
    assert!(matches!(released, Err(Error::Missing(_))), "{released:?}");
}

/// Returns a Node with this condition NetworkUnavailable between two conditions of the kubelet.
fn with_condition(status: &str, reason: &str, message: &str) -> Value {
    let mut node = FakeNode::new(1, 5).json();
    node["status"] = json!({"conditions": [
        {"type": "MemoryPressure", "status": "False", "reason": "KubeletHasSufficientMemory"},
        {"type": "NetworkUnavailable", "status": status, "reason": reason, "message": message},
        {"type": "Ready", "status": "True", "reason": "KubeletReady"},
    ]});
    node
}

#[tokio::test]
async fn the_condition_is_written_only_if_it_differs() {
    let up = ("False", "FlannelIsUp", "Flannel is running on this node");
    let down = ("True", "WeftIsDown", "no uplink");
    // The current condition, the fault to report, and, if a write is expected, whether it is a transition.
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
            let request = fake.expect("GET", NODE).await;
            request.json(&with_condition(there.0, there.1, there.2)).await;
            let Some(transition) = written else { return };
            let request = writes(&mut fake).await;
            let condition = &request.body["status"]["conditions"][0];
            let wanted = fault.map_or(up, |fault| ("True", "WeftIsDown", fault));
            assert_eq!(condition["type"], "NetworkUnavailable");
            assert_eq!(
                [&condition["status"], &condition["reason"], &condition["message"]],
                [wanted.0, wanted.1, wanted.2]
            );
            assert_eq!(!condition["lastTransitionTime"].is_null(), transition, "{there:?} to {fault:?}");
            assert!(condition["lastHeartbeatTime"].is_string());
            let others = json!({"status": {"conditions": [condition]}});
            assert_eq!(request.body, others, "the patch must name no other condition");
            request.json(&FakeNode::new(1, 6).json()).await;
        };
        let (result, ()) = tokio::join!(store.health(fault), serve);
        result.unwrap();
    }
}

/// Otherwise the agent would not write it again, and the Node would say for ever that its network does not work.
#[tokio::test]
async fn a_condition_that_was_not_written_is_an_error() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    for code in [403, 409, 500] {
        let serve = async {
            let request = fake.expect("GET", NODE).await;
            request.json(&with_condition("True", "WeftIsDown", "no uplink")).await;
            writes(&mut fake).await.refuse(code, "not written").await;
        };
        let (written, ()) = tokio::join!(store.health(None), serve);
        assert!(written.is_err(), "{code}");
    }
}

#[tokio::test]
async fn a_pod_cidr_is_waited_for_until_the_node_has_one() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let without = |version| FakeNode { cidr: String::new(), ..FakeNode::bare(1, version) };
    let serve = async {
        reads(&mut fake, without(5)).await;
        let request = fake.expect("GET", "/api/v1/nodes?watch=true&fieldSelector=metadata.name%3Dn1&").await;
        assert_eq!(request.query("resourceVersion"), Some("5"), "the watch must begin where the Node was read");
        let mut stream = request.stream().await;
        stream.bookmark(6).await;
        stream.event("MODIFIED", &without(7)).await;
        // No request is sent before there is a pod CIDR.
        assert!(tokio::time::timeout(Duration::from_millis(300), fake.request()).await.is_err());
        stream.event("MODIFIED", &FakeNode::bare(1, 8)).await;
        reads(&mut fake, FakeNode::new(1, 8)).await;
    };
    let request = request();
    let (lease, ()) = tokio::join!(store.take(&request), serve);
    assert_eq!(lease.unwrap().subnets.to_string(), "10.5.1.0/24");
}

#[tokio::test]
async fn a_node_that_gets_no_pod_cidr_within_ten_seconds_leads_to_an_error_that_says_what_to_do() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let without = |version| FakeNode { cidr: String::new(), ..FakeNode::bare(1, version) };
    let clock = Clock::stop();
    let serve = async {
        reads(&mut fake, without(5)).await;
        let _stream = fake.expect("GET", "/api/v1/nodes?watch=true&fieldSelector").await.stream().await;
        let began = Instant::now();
        clock.until(reads(&mut fake, without(6))).await;
        // The clock moves on by some seconds while the last request is on its way.
        let waited = began.elapsed();
        assert!((10..=30).contains(&waited.as_secs()), "{waited:?}");
    };
    let request = request();
    let (lease, ()) = tokio::join!(store.take(&request), serve);
    let error = lease.unwrap_err();
    let words = "node n1 has no pod CIDR: does kube-controller-manager run with --allocate-node-cidrs=true";
    assert!(matches!(&error, Error::Unavailable { what, .. } if what.starts_with(words)), "{error}");
}

#[tokio::test]
async fn a_pod_is_asked_on_which_node_it_is_until_it_is_on_one() {
    let mut fake = Fake::start().await;
    let who = Who::Pod { name: "p".to_owned(), namespace: "ns".to_owned() };
    let store = KubeStore { who, ..fake.store() };
    let path = "/api/v1/namespaces/ns/pods/p";
    for spec in [json!({}), json!({"nodeName": ""})] {
        let serve = async { fake.expect("GET", path).await.json(&json!({ "spec": spec })).await };
        let (own, ()) = tokio::join!(store.find_own(), serve);
        let error = own.unwrap_err();
        assert!(matches!(&error, Error::Unavailable { what, .. } if what == "pod ns/p is on no node yet"), "{error}");
    }
    let serve = async {
        fake.expect("GET", path).await.json(&json!({"spec": {"nodeName": "n1"}})).await;
        reads(&mut fake, FakeNode::new(1, 5)).await;
        reads(&mut fake, FakeNode::new(1, 6)).await;
    };
    let twice = async { [store.find_own().await, store.find_own().await] };
    let (found, ()) = tokio::join!(twice, serve);
    assert_eq!(found.map(|own| own.unwrap().unwrap().id.to_string()), ["n1", "n1"], "it stays on that node");
}

#[tokio::test]
async fn what_is_not_known_or_not_wanted_is_not_asked_for() {
    let fake = Fake::start().await;
    let unknown = KubeStore { who: Who::Unknown, ..fake.store() };
    let error = unknown.find_own().await.unwrap_err();
    assert!(matches!(&error, Error::Invalid(text) if text.contains("set NODE_NAME, or POD_NAME")), "{error}");
    let error = fake.store().take_again(&attrs()).await.unwrap_err();
    assert!(matches!(&error, Error::Invalid(text) if text.contains("has not acquired a lease")), "{error}");
    let silent = KubeStore { writes_condition: false, ..fake.store() };
    silent.set_condition(Some("no uplink")).await.expect("nothing is written, so nothing can fail");
}

#[tokio::test]
async fn an_address_that_the_administrator_chose_and_that_cannot_be_read_is_an_error() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let good = FakeNode::new(1, 5).with("node-public-ip", "192.0.2.7").with("node-public-ipv6", "2001:db8::7");
    let (chosen, ()) = tokio::join!(store.chosen_addresses(), reads(&mut fake, good.clone()));
    assert_eq!(chosen.unwrap(), ["192.0.2.7".parse().ok(), "2001:db8::7".parse().ok()]);
    let bad = good.with("node-public-ip", "eth0");
    let (chosen, ()) = tokio::join!(store.chosen_addresses(), reads(&mut fake, bad));
    let error = chosen.unwrap_err();
    assert!(matches!(&error, Error::Invalid(text) if text.contains("node-public-ip = \"eth0\"")), "{error}");
}

/// The agent applies a wider Network without a restart. Then the Node is deleted, and registered again with a pod CIDR of the new part.
#[tokio::test]
async fn a_pod_cidr_may_lie_in_a_network_that_became_wider() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    std::fs::write(fake.net_conf(), r#"{"Network":"10.5.0.0/16"}"#).unwrap();
    store.conf.read().unwrap();
    let request = request();
    let (lease, ()) = tokio::join!(store.take(&request), reads(&mut fake, FakeNode::new(1, 5)));
    lease.unwrap();
    let attrs = attrs();
    // net-conf, the pod CIDR, and what is wrong with it.
    let table = [
        (r#"{"Network":"10.5.0.0/16"}"#, "10.6.1.0/24", Err("lies outside 10.5.0.0/16")),
        (r#"{"Network":"10.5.0.0/17"}"#, "10.5.200.0/24", Ok(())),
        (r#"{"Network":"10.6.0.0/16"}"#, "10.6.1.0/24", Err("lies outside 10.5.0.0/16")),
        (r#"{"Network":"10.4.0.0/14"}"#, "10.6.1.0/24", Ok(())),
        ("half a te", "10.6.1.0/24", Ok(())),
        ("half a te", "10.9.1.0/24", Err("lies outside 10.4.0.0/14")),
        // Another family needs a restart.
        (
            r#"{"Network":"10.0.0.0/8","EnableIPv6":true,"IPv6Network":"fd00:12::/48"}"#,
            "10.9.1.0/24",
            Err("lies outside 10.4.0.0/14"),
        ),
    ];
    for (version, (text, cidr, wanted)) in (6..).zip(table) {
        std::fs::write(fake.net_conf(), text).unwrap();
        let node = FakeNode { cidr: cidr.to_owned(), ..FakeNode::new(1, version) };
        let (lease, ()) = tokio::join!(store.take_again(&attrs), reads(&mut fake, node));
        match wanted {
            Ok(()) => assert_eq!(lease.unwrap().subnets.to_string(), cidr, "{text}"),
            Err(words) => {
                let error = lease.unwrap_err().to_string();
                assert!(error.contains(words), "{text}: {error}");
            }
        }
    }
    // The agent must still hear of the change.
    std::fs::write(fake.net_conf(), r#"{"Network":"10.4.0.0/14"}"#).unwrap();
    let (lease, ()) = tokio::join!(store.take_again(&attrs), reads(&mut fake, FakeNode::new(1, 20)));
    lease.unwrap();
    let (out, mut events) = tokio::sync::mpsc::channel(8);
    tokio::select! {
        () = store.conf.follow(&out) => panic!("it ended"),
        event = timeout(LIMIT, events.recv()) => {
            let event = event.expect("the change is reported");
            assert_eq!(event, Some(crate::source::Event::Config(r#"{"Network":"10.4.0.0/14"}"#.to_owned())));
        }
    }
}

#[tokio::test]
async fn each_family_of_net_conf_needs_a_pod_cidr_inside_its_network() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let mut request = request();
    request.net_conf.networks.v6 = Some("fd00:12::/48".parse().unwrap());
    for (cidrs, words) in [
        (json!(["10.5.1.0/24"]), "node n1 has no pod CIDR inside fd00:12::/48"),
        (json!(["fd00:12:0:1::/64"]), "node n1 has no pod CIDR inside 10.5.0.0/16"),
        (
            json!(["10.5.1.0/24", "fd00:13:0:1::/64"]),
            "pod CIDR fd00:13:0:1::/64 of node n1 lies outside fd00:12::/48 of net-conf",
        ),
    ] {
        let mut node = FakeNode::new(1, 5).json();
        node["spec"] = json!({ "podCIDRs": cidrs });
        let serve = async { fake.expect("GET", NODE).await.json(&node).await };
        let (lease, ()) = tokio::join!(store.take(&request), serve);
        let error = lease.unwrap_err();
        assert!(matches!(&error, Error::Invalid(text) if text.starts_with(words)), "{error}");
    }
}

#[tokio::test]
async fn a_lease_has_only_the_families_of_net_conf() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let mut node = FakeNode::new(1, 5).json();
    node["spec"]["podCIDRs"] = json!(["10.5.1.0/24", "fd00:12:0:1::/64"]);
    let serve = async { fake.expect("GET", NODE).await.json(&node).await };
    let request = request();
    let (lease, ()) = tokio::join!(store.take(&request), serve);
    let lease = lease.unwrap();
    assert_eq!(lease.subnets.to_string(), "10.5.1.0/24");
    let own: Node = serde_json::from_value(node.clone()).unwrap();
    assert_eq!(store.record(&own).unwrap().lease.unwrap().subnets.to_string(), "10.5.1.0/24");
    // host-gw has no MAC that would show that the lease is ours, so the subnet must show it.
    let annotations = &mut node["metadata"]["annotations"];
    (annotations[format!("{PREFIX}backend-type")], annotations[format!("{PREFIX}backend-data")]) =
        ("host-gw".into(), "null".into());
    let lease = Lease { attrs: Attrs { backend_type: "host-gw".into(), backend_data: None, ..lease.attrs }, ..lease };
    let serve = async {
        fake.expect("GET", NODE).await.json(&node).await;
        writes(&mut fake).await.json(&FakeNode::bare(1, 7).json()).await;
    };
    let (released, ()) = tokio::join!(store.release(&lease), serve);
    released.expect("the pod CIDR of the other family must not hinder the release");
}

#[tokio::test]
async fn an_address_chosen_by_an_admin_leads_to_a_new_publication() {
    let mut fake = Fake::start().await;
    let store = fake.store();
    let request = request();
    let (lease, ()) = tokio::join!(store.take(&request), reads(&mut fake, FakeNode::new(1, 5)));
    lease.unwrap();
    let lease_of = |node: FakeNode| store.record(&serde_json::from_value(node.json()).unwrap()).unwrap().lease;
    assert!(lease_of(FakeNode::new(1, 6)).is_ok());
    let chosen = lease_of(FakeNode::new(1, 7).with("public-ip-overwrite", "198.51.100.7")).unwrap();
    assert_eq!(chosen.attrs.public_ip, Some([198, 51, 100, 7].into()), "this is not the address of our lease");
    let clone = lease_of(FakeNode::new(1, 7).with("public-ip", "198.51.100.8")).unwrap_err();
    assert_eq!(clone.as_str(), "node n1: somebody else wrote the published address");
    let other = FakeNode::new(2, 8).with("public-ip-overwrite", "198.51.100.7");
    assert!(lease_of(other).is_ok(), "an annotation of another Node concerns that node's agent");
}
