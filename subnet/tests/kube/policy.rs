// SPDX-License-Identifier: Apache-2.0
//! The admission policy of deploy/kube: with a node's token an agent can do its work and nothing else.

use std::time::Duration;

use http::Request;
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio::time::{Instant, sleep};
use weft_backends::register::TYPES;
use weft_subnet::kube::{Access, KubeOptions, KubeStore, Who};
use weft_subnet::source::{Error, FaultNotice, Source};

use super::contract::request;
use super::manifests::{kubectl, server};
use super::server::{Cluster, Server};

const PREFIX: &str = "flannel.alpha.coreos.com";

/// Returns a token of the agents' account. `bound` is what it is bound to, as flags of kubectl.
fn token(server: &Server, bound: &str) -> String {
    let line = format!("create token weft -n kube-flannel {bound}");
    kubectl(server, line.trim(), "").trim().to_owned()
}

fn of_node(server: &Server, name: &str) -> String {
    token(server, &format!("--bound-object-kind Node --bound-object-name {name}"))
}

/// Creates a pod of the agents' account on a node, and returns the token that the pod would get.
async fn of_pod_on(cluster: &Cluster, last: u8) -> String {
    let name = format!("{}-pod", cluster.node(last));
    let pod = json!({
        "metadata": {"name": name, "namespace": "kube-flannel"},
        "spec": {
            "serviceAccountName": "weft", "nodeName": cluster.node(last), "containers": [{"name": "a", "image": "weft:0.1.0"}],
        },
    });
    cluster.post("/api/v1/namespaces/kube-flannel/pods", &pod).await;
    token(&cluster.server, &format!("--bound-object-kind Pod --bound-object-name {name}"))
}

async fn client(server: &Server, token: &str) -> Client {
    let read = kube::config::Kubeconfig::read_from(server.kubeconfig("admin")).unwrap();
    let mut config = Config::from_custom_kubeconfig(read, &Default::default()).await.unwrap();
    config.auth_info.token = Some(token.to_owned().into());
    Client::try_from(config).unwrap()
}

/// Applies a strategic merge patch to a node's status. The error is the server's message.
async fn patch(client: &Client, name: &str, patch: &Value) -> Result<Value, String> {
    let request = Request::patch(format!("/api/v1/nodes/{name}/status"))
        .header("content-type", "application/strategic-merge-patch+json")
        .body(patch.to_string().into_bytes())
        .unwrap();
    client.request::<Value>(request).await.map_err(|error| error.to_string())
}

fn annotate(end: &str, value: &str) -> Value {
    json!({"metadata": {"annotations": {format!("{PREFIX}/{end}"): value}}})
}

/// Returns a cluster with two Nodes as a kubelet creates them, on a server that enforces the policy.
async fn cluster() -> Cluster {
    static IN_FORCE: OnceCell<()> = OnceCell::const_new();
    let cluster = Cluster::new(server().await).await;
    for last in [1, 2] {
        let annotations = json!({"volumes.kubernetes.io/controller-managed-attach-detach": "true"});
        cluster.create_as(&cluster.node(last), &[&format!("10.5.{last}.0/24")], annotations).await;
        cluster.patch(last, &json!({"metadata": {"labels": {"a": "b"}, "finalizers": ["weft.test/f"]}})).await;
        let condition =
            |kind: &str| json!({"type": kind, "status": "True", "reason": "KubeletReady", "message": "text"});
        let status = json!({"status": {
            "capacity": {"cpu": "2", "memory": "4Gi"},
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
            "conditions": [condition("Ready"), condition("MemoryPressure")],
            // As many images as a kubelet reports, so that the test notices a policy that exceeds its cost limit.
            "images": (0..50).map(|n| json!({"names": [format!("r.test/a{n}@sha256:{n:064}"), format!("r.test/a{n}:1")]})).collect::<Vec<_>>(),
        }});
        patch(&client(&cluster.server, "admin").await, &cluster.node(last), &status).await.unwrap();
    }
    let free = client(&cluster.server, &token(&cluster.server, "")).await;
    let in_force = || async {
        let until = Instant::now() + Duration::from_secs(120);
        loop {
            // Before the server knows the role of the agents, it refuses this, too.
            let written = patch(&free, &cluster.node(1), &annotate("public-ip", "192.0.2.9")).await;
            if written.as_ref().is_err_and(|said| said.contains("weft-own-node")) {
                break;
            }
            assert!(Instant::now() < until, "the server does not enforce the policy: {written:?}");
            sleep(Duration::from_millis(50)).await;
        }
        // The admin may do that: the policy is about the agents' account.
        cluster.patch(1, &json!({"metadata": {"annotations": {format!("{PREFIX}/public-ip"): null}}})).await;
    };
    IN_FORCE.get_or_init(in_force).await;
    cluster
}

#[tokio::test]
async fn an_agent_writes_its_own_node_and_condition() {
    let cluster = cluster().await;
    for (last, token) in [(1, of_node(&cluster.server, &cluster.node(1))), (2, of_pod_on(&cluster, 2).await)] {
        let client = client(&cluster.server, &token).await;
        let name = cluster.node(last);
        // Those for the tunnel guard and for a change of the backend are not flannel's.
        for end in [
            "kube-subnet-manager",
            "backend-type",
            "backend-data",
            "backend-v6-data",
            "public-ip",
            "public-ipv6",
            "tunnel-ip",
            "tunnel-ipv6",
            "other-ways",
        ] {
            patch(&client, &name, &annotate(end, "x")).await.unwrap();
            patch(&client, &name, &annotate(end, "y")).await.unwrap();
            let gone = json!({"metadata": {"annotations": {format!("{PREFIX}/{end}"): null}}});
            let node = patch(&client, &name, &gone).await.unwrap();
            assert!(node["metadata"]["annotations"][format!("{PREFIX}/{end}")].is_null(), "{end}");
        }
        for status in ["False", "True"] {
            let condition = json!({"type": "NetworkUnavailable", "status": status, "reason": "r", "message": "m"});
            let node = patch(&client, &name, &json!({"status": {"conditions": [condition]}})).await.unwrap();
            assert!(node["status"]["conditions"].to_string().contains(r#""NetworkUnavailable""#));
        }
    }
}

#[tokio::test]
async fn an_agent_changes_nothing_else() {
    let cluster = cluster().await;
    let name = cluster.node(1);
    let client = client(&cluster.server, &of_node(&cluster.server, &name)).await;
    let before = cluster.read(1).await;
    let metadata = "changes no labels, finalizers, owners or other metadata";
    let annotations = "changes no annotations but its own";
    let status = "changes no status but the condition NetworkUnavailable";
    let other = "volumes.kubernetes.io/controller-managed-attach-detach";
    let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": "x", "uid": "u"}]);
    let ready = |fields: Value| {
        let mut condition = json!({"type": "Ready"});
        condition.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        json!({"status": {"conditions": [condition]}})
    };
    for (change, why) in [
        (json!({"metadata": {"labels": {"a": "c"}}}), metadata),
        (json!({"metadata": {"labels": {"a": null}}}), metadata),
        (json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}}), metadata),
        (json!({"metadata": {"finalizers": ["weft.test/g"]}}), metadata),
        (json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["weft.test/f"]}}), metadata),
        (json!({"metadata": {"ownerReferences": owner}}), metadata),
        (json!({"metadata": {"annotations": {"new": "x"}}}), annotations),
        (json!({"metadata": {"annotations": {other: "false"}}}), annotations),
        (json!({"metadata": {"annotations": {other: null}}}), annotations),
        (annotate("public-ip-overwrite", "192.0.2.9"), annotations),
        (annotate("node-public-ip", "192.0.2.9"), annotations),
        (json!({"metadata": {"annotations": {format!("{PREFIX}.evil/public-ip"): "x"}}}), annotations),
        (json!({"status": {"capacity": {"cpu": "64"}}}), status),
        (json!({"status": {"capacity": {"weft.test/gpu": "1"}}}), status),
        (json!({"status": {"allocatable": {"cpu": "1"}}}), status),
        (json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.2"}]}}), status),
        (json!({"status": {"images": null}}), status),
        (ready(json!({"status": "False"})), status),
        (ready(json!({"$patch": "delete"})), status),
        (json!({"status": {"conditions": [{"type": "New", "status": "True"}]}}), status),
    ] {
        let said = patch(&client, &name, &change).await.expect_err(&change.to_string());
        assert!(said.contains("weft-own-node") && said.contains(why), "{change}: {said}");
    }
    // An agent may write neither the annotations of an admin nor names that only begin like its own.
    for end in ["tunnel-ip-x", "tunnel", "public-ipv6-overwrite", "node-public-ipv6"] {
        let said = patch(&client, &name, &annotate(end, "192.0.2.9")).await.expect_err(end);
        assert!(said.contains("weft-own-node") && said.contains(annotations), "{end}: {said}");
    }
    // The server ignores the parts of a patch that do not belong to the subresource.
    patch(&client, &name, &json!({"spec": {"unschedulable": true}})).await.unwrap();
    let after = cluster.read(1).await;
    for part in ["metadata", "spec", "status"] {
        assert_eq!(after[part], before[part], "{part}");
    }
}

/// RBAC does not let agents write the spec. If an admin allows it, for example with a role for all service accounts, the policy still
/// refuses it. In this test the account has all rights and the token of its own node.
#[tokio::test]
async fn an_agent_with_more_rights_does_not_change_the_spec() {
    let cluster = cluster().await;
    let name = cluster.node(1);
    let before = cluster.read(1).await;
    let rights = [
        ("Impersonate-User", "system:serviceaccount:kube-flannel:weft"),
        ("Impersonate-Group", "system:masters"),
        ("Impersonate-Extra-authentication.kubernetes.io%2Fnode-name", &name),
    ];
    let admin = client(&cluster.server, "admin").await;
    let write = async |path: &str, change: &Value| {
        let request = Request::patch(format!("/api/v1/nodes/{name}{path}"));
        let request = rights.iter().fold(request, |request, (header, value)| request.header(*header, *value));
        let request = request.header("content-type", "application/strategic-merge-patch+json");
        admin.request::<Value>(request.body(change.to_string().into_bytes()).unwrap()).await.map_err(|e| e.to_string())
    };
    let taint = json!({"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"});
    for (change, why) in [
        (json!({"spec": {"unschedulable": true}}), "does not change the spec"),
        (json!({"spec": {"taints": [taint]}}), "does not change the spec"),
        (json!({"spec": {"providerID": "theirs://1"}}), "does not change the spec"),
        (json!({"metadata": {"labels": {"a": "c"}}}), "changes no labels"),
        (annotate("public-ip-overwrite", "192.0.2.9"), "changes no annotations but its own"),
    ] {
        let said = write("", &change).await.expect_err(&change.to_string());
        assert!(said.contains("weft-own-node") && said.contains(why), "{change}: {said}");
    }
    assert_eq!(cluster.read(1).await, before);
    // The same requests succeed for the agent's own annotations, so it was the policy that refused.
    write("", &annotate("tunnel-ip", "192.0.2.1")).await.unwrap();
    write("/status", &annotate("tunnel-ip", "192.0.2.2")).await.unwrap();
    let annotations = cluster.read(1).await["metadata"]["annotations"].clone();
    assert_eq!(annotations[format!("{PREFIX}/tunnel-ip")], "192.0.2.2");
}

#[tokio::test]
async fn an_agent_writes_no_other_node() {
    let cluster = cluster().await;
    let mine = "this token is not bound to this node";
    let of_pod = of_pod_on(&cluster, 1).await;
    for token in [of_node(&cluster.server, &cluster.node(1)), of_pod, token(&cluster.server, "")] {
        let client = client(&cluster.server, &token).await;
        let condition = json!({"type": "NetworkUnavailable", "status": "True", "reason": "r", "message": "m"});
        for change in [annotate("public-ip", "192.0.2.9"), json!({"status": {"conditions": [condition]}})] {
            let said = patch(&client, &cluster.node(2), &change).await.expect_err("another node");
            assert!(said.contains(mine), "{said}");
        }
    }
    // A token that is not bound may write no Node.
    let free = client(&cluster.server, &token(&cluster.server, "")).await;
    let said = patch(&free, &cluster.node(1), &annotate("public-ip", "192.0.2.9")).await.expect_err("no node");
    assert!(said.contains(mine), "{said}");
}

/// Returns the store of a node's agent with this token.
fn store(cluster: &Cluster, last: u8, token: &str, prefix: &str) -> (KubeStore, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let read = std::fs::read_to_string(cluster.server.kubeconfig("admin")).unwrap();
    let mut config: Value = serde_json::from_str(&read).unwrap();
    config["users"][0]["user"]["token"] = json!(token);
    let ca = cluster.server.kubeconfig("admin").with_file_name("ca.pem");
    config["clusters"][0]["cluster"]["certificate-authority"] = json!(ca);
    let path = dir.path().join("conf");
    std::fs::write(&path, config.to_string()).unwrap();
    let options = KubeOptions {
        access: Access { kubeconfig: Some(path), ..Access::default() },
        who: Who::Node(cluster.node(last)),
        prefix: prefix.to_owned(),
        net_config: dir.path().join("net-conf.json"),
        set_condition: true,
        events_after: None,
        types: TYPES,
    };
    (KubeStore::new(options).unwrap(), dir)
}

#[tokio::test]
async fn the_store_does_all_its_work_under_the_policy() {
    let cluster = cluster().await;
    let token = of_node(&cluster.server, &cluster.node(1));
    let (own, _dir) = store(&cluster, 1, &token, PREFIX);
    let annotate = json!({"metadata": {"annotations": {format!("{PREFIX}/public-ip-overwrite"): "192.0.2.1"}}});
    cluster.patch(1, &annotate).await;
    let before = cluster.read(1).await;
    let mut request_1 = request(1);
    request_1.attrs.tunnel_ip = Some([192, 0, 2, 1].into());
    request_1.attrs.tunnel_ipv6 = Some("2001:db8::1".parse().unwrap());
    let lease = own.acquire(&request_1).await.unwrap();
    assert_eq!(lease.subnets.to_string(), "10.5.1.0/24");
    assert_eq!(cluster.read(1).await["metadata"]["annotations"][format!("{PREFIX}/tunnel-ip")], "192.0.2.1");
    own.health(None).await.unwrap();
    own.health(Some("the vxlan device is missing")).await.unwrap();
    let node = cluster.read(1).await;
    assert!(node["status"]["conditions"].to_string().contains("WeftIsDown"), "{node}");
    own.release(&lease).await.unwrap();
    let after = cluster.read(1).await;
    for part in ["annotations", "labels", "finalizers"] {
        assert_eq!(after["metadata"][part], before["metadata"][part], "a release must remove only our annotations");
    }
    assert_eq!(after["spec"], before["spec"]);
    for (last, prefix, why) in [
        (2, PREFIX, "this token is not bound to this node (NODE_NAME must be"),
        (1, "a.test", "changes no annotations but its own (--kube-annotation-prefix must be"),
    ] {
        let (other, _dir) = store(&cluster, last, &token, prefix);
        match other.acquire(&request(last)).await {
            Err(Error::Refused { source, .. }) => assert!(source.to_string().contains(why), "{source}"),
            other => panic!("{other:?}"),
        }
    }
    assert!(cluster.read(2).await["metadata"]["annotations"][format!("{PREFIX}/public-ip")].is_null());
}

/// Writes any Event. The error is the server's message.
async fn post_event(client: &Client, namespace: &str, event: &Value) -> Result<Value, String> {
    let request = Request::post(format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events"))
        .header("content-type", "application/json")
        .body(event.to_string().into_bytes())
        .unwrap();
    client.request::<Value>(request).await.map_err(|error| error.to_string())
}

#[tokio::test]
async fn an_agent_writes_events_about_its_own_node_only() {
    let cluster = cluster().await;
    let token = of_pod_on(&cluster, 1).await;
    let (other, _other_dir) = store(&cluster, 2, &token, PREFIX);
    let notice = |text: &str, is_over| FaultNotice { fault: "UplinkFault", text: text.to_owned(), is_over, count: 3 };
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        // Before the server knows the role of the agents, it refuses this, too.
        let written = other.write_notice(&notice("no address", false)).await;
        if let Err(Error::Refused { source, .. }) = &written
            && source.to_string().contains("weft-own-events")
        {
            assert!(source.to_string().contains("about its own node only"), "{source}");
            break;
        }
        assert!(Instant::now() < until, "the policy is not enforced: {written:?}");
        sleep(Duration::from_millis(50)).await;
    }
    let (own, _own_dir) = store(&cluster, 1, &token, PREFIX);
    let uid = cluster.read(1).await["metadata"]["uid"].clone();
    own.chosen().await.unwrap();
    own.write_notice(&notice("no address", false)).await.unwrap();
    own.write_notice(&notice("no address", false)).await.unwrap();
    own.write_notice(&notice(&"no address".repeat(1000), true)).await.unwrap();
    let mut events = cluster.events(1).await;
    events.sort_by_key(|event| event["type"].to_string());
    let seen: Vec<_> =
        events.iter().map(|event| [&event["type"], &event["reason"], &event["series"]["count"]]).collect();
    let (warning, normal) = ((json!("Warning"), json!("UplinkFault")), (json!("Normal"), json!("UplinkFaultEnded")));
    assert_eq!(seen, [[&normal.0, &normal.1, &Value::Null], [&warning.0, &warning.1, &json!(3)]]);
    assert_eq!((&events[1]["note"], &events[1]["regarding"]["uid"]), (&json!("no address"), &uid));

    let client = client(&cluster.server, &token).await;
    let mut event = events[1].clone();
    event["metadata"] = json!({"name": format!("{}.x", cluster.node(1)), "namespace": "default"});
    event.as_object_mut().unwrap().remove("series");
    let changed = |pointer: &str, value: &str| {
        let mut event = event.clone();
        *event.pointer_mut(pointer).unwrap() = json!(value);
        event
    };
    for (event, why) in [
        (changed("/regarding/kind", "Pod"), "about its own node only"),
        (changed("/regarding/name", &cluster.node(2)), "about its own node only"),
        (changed("/reportingController", "kubelet"), "its own events only"),
    ] {
        let said = post_event(&client, "default", &event).await.expect_err(why);
        assert!(said.contains("weft-own-events") && said.contains(why), "{said}");
    }
    let elsewhere = changed("/metadata/namespace", "kube-system");
    assert!(post_event(&client, "kube-system", &elsewhere).await.is_err_and(|said| said.contains("forbidden")));
    // The same request succeeds without these changes, so it was the policy that refused.
    post_event(&client, "default", &event).await.unwrap();
}
