// SPDX-License-Identifier: Apache-2.0
//! The exact annotations that are published. Nothing is written if nothing differs.

use super::*;
use crate::backend_types::FOR_TESTS;

const P: &str = "flannel.alpha.coreos.com/";

fn prefix() -> Prefix {
    Prefix::new("flannel.alpha.coreos.com").unwrap()
}

fn node(annotations: &Value) -> Node {
    let meta = json!({"name": "n1", "resourceVersion": "9", "annotations": annotations});
    serde_json::from_str(&json!({ "metadata": meta }).to_string()).unwrap()
}

fn attrs(kind: &str, data: Option<&str>, v6_data: Option<&str>) -> Attrs {
    Attrs {
        public_ip: Some([192, 0, 2, 1].into()),
        public_ipv6: Some("2001:db8::1".parse().unwrap()),
        backend_type: kind.into(),
        backend_data: data.map(Into::into),
        backend_v6_data: v6_data.map(Into::into),
        ..Attrs::default()
    }
}

/// Returns the annotations after these changes.
fn applied(before: &Value, changes: Changes) -> Value {
    let mut all = before.as_object().cloned().unwrap_or_default();
    for (name, value) in changes {
        match value {
            Some(text) => all.insert(name, Value::String(text)),
            None => all.remove(&name),
        };
    }
    Value::Object(all)
}

fn published(attrs: &Attrs, before: &Value) -> Value {
    let after = applied(before, changes(attrs, FOR_TESTS, &node(before), &prefix()));
    assert!(changes(attrs, FOR_TESTS, &node(&after), &prefix()).is_empty(), "a second time there is nothing to write");
    after
}

#[test]
fn backends_publish_what_flannel_publishes() {
    let both = attrs("vxlan", Some(r#"{"VNI":1}"#), Some(r#"{"VNI":2}"#));
    let wanted = json!({
        format!("{P}backend-data"): r#"{"VNI":1}"#, format!("{P}backend-type"): "vxlan",
        format!("{P}backend-v6-data"): r#"{"VNI":2}"#, format!("{P}kube-subnet-manager"): "true",
        format!("{P}public-ip"): "192.0.2.1", format!("{P}public-ipv6"): "2001:db8::1",
    });
    assert_eq!(published(&both, &json!({})), wanted);
    let v4 = json!({
        format!("{P}backend-data"): r#"{"VNI":1}"#, format!("{P}backend-type"): "vxlan",
        format!("{P}kube-subnet-manager"): "true", format!("{P}public-ip"): "192.0.2.1",
    });
    assert_eq!(
        published(&attrs("vxlan", Some(r#"{"VNI":1}"#), None), &wanted),
        v4,
        "annotations that are not valid any more are removed"
    );
    let v6 = published(&attrs("vxlan", None, Some(r#"{"VNI":2}"#)), &json!({}));
    assert!(v6.get(format!("{P}public-ip")).is_none() && v6.get(format!("{P}backend-data")).is_none());
    let host_gw = published(&attrs("host-gw", None, None), &json!({}));
    assert_eq!(
        (&host_gw[format!("{P}backend-data")], &host_gw[format!("{P}backend-v6-data")]),
        (&"null".into(), &"null".into())
    );
    let ipip = published(&attrs("ipip", None, None), &json!({}));
    assert_eq!(ipip[format!("{P}backend-data")], "null");
    assert!(ipip.get(format!("{P}public-ipv6")).is_none());
}

/// flannel's udp and alloc publish an empty annotation for the type, too.
#[test]
fn a_lease_without_a_type_publishes_an_empty_type_and_no_data() {
    let attrs = Attrs { public_ipv6: None, ..attrs("", None, None) };
    let wanted = json!({
        format!("{P}backend-data"): "null", format!("{P}backend-type"): "",
        format!("{P}kube-subnet-manager"): "true", format!("{P}public-ip"): "192.0.2.1",
    });
    assert_eq!(published(&attrs, &json!({})), wanted);
}

#[test]
fn the_source_of_tunnel_packets_is_published_and_removed() {
    let attrs = attrs("host-gw", None, None);
    let with_source = published(&Attrs { tunnel_ip: Some([10, 0, 0, 1].into()), ..attrs.clone() }, &json!({}));
    assert_eq!(with_source[format!("{P}tunnel-ip")], "10.0.0.1");
    assert!(published(&attrs, &with_source).get(format!("{P}tunnel-ip")).is_none());
}

/// Each part of a lease has an annotation of its own, in which the agents of other nodes find it.
#[test]
fn what_is_published_is_read_and_removed() {
    let attrs = Attrs {
        tunnel_ip: Some([10, 0, 0, 1].into()),
        tunnel_ipv6: Some("fd00::1".parse().unwrap()),
        other_ways: Some(r#"[{"BackendType":"host-gw"}]"#.into()),
        ..attrs("vxlan", Some(r#"{"VNI":1}"#), Some(r#"{"VNI":2}"#))
    };
    let all = published(&attrs, &json!({}));
    assert_eq!(all[format!("{P}tunnel-ipv6")], "fd00::1");
    assert_eq!(all[format!("{P}other-ways")], r#"[{"BackendType":"host-gw"}]"#);
    let spec = json!({"podCIDRs": ["10.5.1.0/24", "fd00:12:0:1::/64"]});
    let text = json!({"metadata": {"name": "n1", "annotations": all}, "spec": spec}).to_string();
    let there: Node = serde_json::from_str(&text).unwrap();
    assert_eq!(there.record(&prefix()).unwrap().lease.unwrap().attrs, attrs);
    assert_eq!(applied(&all, removal(&there, &prefix())), json!({}));
}

#[test]
fn the_admins_address_is_published() {
    let attrs = attrs("host-gw", None, None);
    let before = json!({
        format!("{P}public-ip-overwrite"): "198.51.100.7", format!("{P}public-ipv6-overwrite"): "2001:db8::7",
    });
    let after = published(&attrs, &before);
    assert_eq!(after[format!("{P}public-ip")], "198.51.100.7");
    assert_eq!(after[format!("{P}public-ipv6")], "2001:db8::7");
    let differ = |now| addresses(&node(now), &prefix()) != wanted_addresses(&attrs, FOR_TESTS, &node(now), &prefix());
    assert!(!differ(&after));
    let mut gone = after.clone();
    gone.as_object_mut().unwrap().remove(&format!("{P}public-ip-overwrite"));
    assert!(differ(&gone));
    let bad = published(&attrs, &json!({ format!("{P}public-ip-overwrite"): "here" }));
    assert_eq!(
        bad[format!("{P}public-ip")],
        "192.0.2.1",
        "an address that cannot be read does not keep the node from publishing its own"
    );
}

#[test]
fn removal_leaves_the_admins_annotations() {
    let mut before =
        published(&attrs("host-gw", None, None), &json!({ format!("{P}node-public-ip"): "192.0.2.9", "x/y": "z" }));
    before = applied(&before, removal(&node(&before), &prefix()));
    assert_eq!(before, json!({ format!("{P}node-public-ip"): "192.0.2.9", "x/y": "z" }));
}

#[test]
fn the_patch_names_the_version_of_the_node_and_changes_nothing_else() {
    let changes = Changes::from([("a".to_owned(), Some("b".to_owned())), ("c".to_owned(), None)]);
    let wanted = json!({"metadata": {"resourceVersion": "9", "annotations": {"a": "b", "c": null}}});
    assert_eq!(patch(changes, &node(&json!({}))), wanted);
}
