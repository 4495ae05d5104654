// SPDX-License-Identifier: Apache-2.0
//! What is read of a Node, and the errors for values that cannot be read.

use super::*;

fn prefix() -> Prefix {
    Prefix::new("flannel.alpha.coreos.com").unwrap()
}

fn node(annotations: &str, spec: &str) -> Node {
    let text = format!(
        r#"{{"kind":"Node","metadata":{{"name":"n1","uid":"u1","resourceVersion":"9",
            "creationTimestamp":"2026-11-21T10:00:00Z","labels":{{"a":"b"}},"managedFields":[{{"x":{{}}}}],
            "annotations":{{{annotations}}}}},"spec":{{{spec}}},"status":{{"images":[{{"names":["a"]}}]}}}}"#
    );
    serde_json::from_str(&text).unwrap()
}

fn ours(pairs: &[(&str, &str)]) -> String {
    let pair = |(name, value): &(&str, &str)| format!("{:?}:{value:?}", prefix().name(name));
    pairs.iter().map(pair).collect::<Vec<_>>().join(",")
}

#[test]
fn a_node_is_a_lease() {
    let data = r#"{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:44"}"#;
    let annotations = ours(&[
        ("kube-subnet-manager", "true"),
        ("backend-type", "VXLAN"),
        ("backend-data", data),
        ("backend-v6-data", "null"),
        ("public-ip", "192.0.2.1"),
    ]);
    let node = node(&annotations, r#""podCIDR":"10.5.1.0/24","podCIDRs":["10.5.1.7/24","fd00:12:0:1::/64"]"#);
    let lease = node.record(&prefix()).unwrap().lease.unwrap();
    assert_eq!((&*lease.id, lease.subnets.to_string().as_str()), ("n1", "10.5.1.0/24,fd00:12:0:1::/64"));
    assert_eq!(lease.age, Age { stamp: 1_795_255_200, tie: "u1".into() });
    let attrs = Attrs {
        public_ip: Some([192, 0, 2, 1].into()),
        backend_type: "vxlan".into(),
        backend_data: Some(data.into()),
        ..Attrs::default()
    };
    assert_eq!(lease.attrs, attrs);
    assert!(
        node.record(&Prefix::new("other.org").unwrap()).is_none(),
        "annotations with another prefix belong to another network"
    );
}

#[test]
fn other_annotations_are_not_kept() {
    let annotations = format!(r#""a/b":"{}",{}"#, "x".repeat(10_000), ours(&[("public-ip", "192.0.2.1")]));
    assert_eq!(node(&annotations, "").metadata.annotations.0.len(), 1);
    let bare: Node = serde_json::from_str(r#"{"metadata":{"name":"n","annotations":null}}"#).unwrap();
    assert!(bare.record(&prefix()).is_none());
}

#[test]
fn annotations_larger_than_any_lease_are_refused() {
    let managed = ("kube-subnet-manager", "true");
    let huge = "x".repeat(200_000);
    for end in ["backend-type", "backend-data", "public-ip", "tunnel-ipv6"] {
        let node = node(&ours(&[managed, (end, &huge)]), r#""podCIDR":"10.5.1.0/24""#);
        let reason = node.record(&prefix()).unwrap().lease.unwrap_err().to_string();
        let wanted = "node n1: annotations flannel.alpha.coreos.com/* are larger than 4096 bytes together";
        assert_eq!(reason, wanted, "{end}");
    }
    // An annotation that is not part of a lease does not count. A message quotes only its beginning.
    let node = node(&ours(&[managed, ("node-public-ip", &huge)]), r#""podCIDR":"10.5.1.0/24""#);
    assert!(node.record(&prefix()).unwrap().lease.is_ok());
    assert!(node.chosen(&prefix()).unwrap_err().to_string().len() < 300);
}

#[test]
fn values_that_cannot_be_read_are_named() {
    let managed = ("kube-subnet-manager", "true");
    let cidr = r#""podCIDR":"10.5.1.0/24""#;
    type Row<'a> = (&'a [(&'a str, &'a str)], &'a str, &'a str);
    let table: [Row; 7] = [
        (&[managed], "", "node n1 has no pod CIDR yet"),
        (&[managed], r#""podCIDR":"10.5.1.0""#, "node n1: pod CIDR 10.5.1.0 is not a network"),
        (
            &[managed],
            r#""podCIDRs":["10.5.1.0/24","10.5.2.0/24"]"#,
            "node n1 has several pod CIDRs of one family: 10.5.1.0/24, 10.5.2.0/24",
        ),
        (&[managed, ("public-ip", "fd00::1")], cidr, "annotation flannel.alpha.coreos.com/public-ip = \"fd00::1\""),
        (
            &[managed, ("public-ipv6", "x")],
            cidr,
            "flannel.alpha.coreos.com/public-ipv6 = \"x\" is not an address of its family",
        ),
        (&[managed, ("backend-data", "{")], cidr, "flannel.alpha.coreos.com/backend-data = \"{\" is not JSON"),
        (&[managed, ("backend-v6-data", "x")], cidr, "backend-v6-data = \"x\" is not JSON"),
    ];
    for (annotations, spec, wanted) in table {
        let record = node(&ours(annotations), spec).record(&prefix()).unwrap();
        let reason = record.lease.unwrap_err().to_string();
        assert!(reason.contains(wanted) && reason.contains("node n1"), "{reason}");
    }
    assert!(node(&ours(&[("kube-subnet-manager", "false")]), cidr).record(&prefix()).is_none());
}

#[test]
fn an_admin_chooses_an_address_of_each_family() {
    let chosen = |pairs: &[(&str, &str)]| node(&ours(pairs), "").chosen(&prefix()).unwrap();
    let (v4, v6) = (("node-public-ip", "192.0.2.7"), ("node-public-ipv6", "2001:db8::7"));
    assert_eq!(chosen(&[v4, v6]), ["192.0.2.7".parse().ok(), "2001:db8::7".parse().ok()]);
    assert_eq!(chosen(&[v6]), [None, "2001:db8::7".parse().ok()]);
    assert_eq!(chosen(&[]), [None, None]);
    assert_eq!(chosen(&[("node-public-ip", ""), v6]), [None, "2001:db8::7".parse().ok()], "an empty one is none");
}

#[test]
fn empty_annotations_are_as_good_as_none() {
    let ends = ["public-ipv6", "backend-data", "backend-v6-data", "tunnel-ip", "tunnel-ipv6"].map(|end| (end, ""));
    let given = [("kube-subnet-manager", "true"), ("backend-type", "host-gw"), ("public-ip", "192.0.2.1")];
    let annotations = ours(&[&given[..], &ends[..]].concat());
    let lease = node(&annotations, r#""podCIDR":"10.5.1.0/24""#).record(&prefix()).unwrap().lease.unwrap();
    let public_ip = Some([192, 0, 2, 1].into());
    assert_eq!(lease.attrs, Attrs { public_ip, backend_type: "host-gw".into(), ..Attrs::default() });
}

/// The agent waits until one of the two fields is there.
#[test]
fn a_pod_cidr_is_assigned_in_either_field() {
    for (spec, is_assigned) in [
        ("", false),
        (r#""podCIDR":"","podCIDRs":[]"#, false),
        (r#""podCIDR":"10.5.1.0/24""#, true),
        (r#""podCIDRs":["10.5.1.0/24"]"#, true),
    ] {
        assert_eq!(node("", spec).assigned(), is_assigned, "{spec}");
    }
}

/// flannel publishes it where a family is not in use.
#[test]
fn the_unspecified_address_is_none() {
    let annotations = ours(&[("kube-subnet-manager", "true"), ("backend-type", "vxlan"), ("public-ip", "0.0.0.0")]);
    let lease = node(&annotations, r#""podCIDR":"10.5.1.0/24""#).record(&prefix()).unwrap().lease.unwrap();
    assert_eq!(lease.attrs.public_ip, None);
}

/// Otherwise a Node whose time nobody knows would push all others aside.
#[test]
fn a_node_without_a_time_of_creation_counts_as_the_youngest() {
    let node: Node = serde_json::from_str(r#"{"metadata":{"name":"n"},"spec":{"podCIDR":"10.5.1.0/24"}}"#).unwrap();
    assert_eq!(node.lease(&prefix()).unwrap().age.stamp, i64::MAX as u64);
}

#[test]
fn data_of_the_own_backend_that_is_larger_than_a_lease_counts_as_none() {
    for (bytes, is_kept) in [(MAX_VALUE_BYTES - 2, true), (MAX_VALUE_BYTES - 1, false)] {
        let data = "x".repeat(bytes);
        let text = format!(r#""{}":"\"{data}\"""#, prefix().name("backend-data"));
        assert_eq!(node(&text, "").attrs_of_backend(&prefix()).backend_data.is_some(), is_kept, "{bytes}");
    }
}
