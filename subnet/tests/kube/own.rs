// SPDX-License-Identifier: Apache-2.0
//! Our own Node: what is written to it and what is not, which Node it is, and the condition.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use weft_subnet::attrs::Attrs;
use weft_subnet::connected::Connected;
use weft_subnet::kube::{KubeStore, Who};
use weft_subnet::source::{Error, LeaseRequest, Source};

use super::contract::{attrs, booted, net_conf, request};
use super::server::{Cluster, Server};

fn version(node: &Value) -> &str {
    node["metadata"]["resourceVersion"].as_str().unwrap()
}

/// Returns a request of host-gw in both families.
pub fn dual(last: u8) -> LeaseRequest {
    let net = "fd00:12::/48".parse().unwrap();
    let mut net_conf = net_conf(24, "10.5.255.0");
    net_conf.networks.v6 = Some(net);
    let public_ipv6 = Some(format!("2001:db8::{last}").parse().unwrap());
    let attrs = Attrs { public_ipv6, backend_type: "host-gw".into(), backend_data: None, ..attrs(last) };
    LeaseRequest { net_conf, attrs, previous: None, was: None, connected: Connected::default() }
}

#[tokio::test]
async fn nothing_is_written_when_nothing_changed() {
    let cluster = Cluster::shared().await;
    let lease = cluster.store(1).acquire(&request(1)).await.unwrap();
    assert_eq!(&*lease.id, cluster.node(1));
    let node = cluster.read(1).await;
    let wanted = json!({
        cluster.annotation("backend-data"): r#"{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:44"}"#,
        cluster.annotation("backend-type"): "vxlan",
        cluster.annotation("kube-subnet-manager"): "true",
        cluster.annotation("public-ip"): "192.0.2.1",
    });
    assert_eq!(node["metadata"]["annotations"], wanted);
    let store = cluster.store(1);
    let own = store.own(&booted(1)).await.unwrap().unwrap();
    assert_eq!(own.attrs.backend_data, attrs(1).backend_data, "the VTEP MAC comes back");
    assert_eq!(store.acquire(&request(1)).await.unwrap(), lease);
    store.retake(&lease.subnets, &attrs(1), &attrs(1)).await.unwrap();
    assert_eq!(version(&cluster.read(1).await), version(&node));
}

#[tokio::test]
async fn the_published_mac_is_found_although_other_values_are_wrong() {
    let cluster = Cluster::shared().await;
    let store = cluster.store(1);
    store.acquire(&request(1)).await.unwrap();
    cluster.annotate(1, "public-ip", &json!("nonsense")).await;
    let own = store.own(&booted(1)).await.unwrap().unwrap();
    assert_eq!(own.attrs.backend_data, attrs(1).backend_data, "another annotation cannot be read");
    assert_eq!(store.acquire(&request(1)).await.unwrap().attrs, attrs(1), "the other annotation must be correct again");
    let managed = cluster.annotation("kube-subnet-manager");
    let data = attrs(3).backend_data.unwrap();
    let annotations = json!({managed: "true", cluster.annotation("backend-data"): &*data});
    cluster.create_as(&cluster.node(3), &[], annotations).await;
    let own = cluster.store(3).own(&booted(3)).await.unwrap().unwrap();
    assert_eq!(own.attrs.backend_data, Some(data), "the Node has no pod CIDR yet");
}

#[tokio::test]
async fn the_condition_is_that_of_flannel_and_written_once() {
    let cluster = Cluster::shared().await;
    let store = cluster.store(1);
    store.health(None).await.unwrap();
    let node = cluster.read(1).await;
    let condition = &node["status"]["conditions"][0];
    for (key, wanted) in [
        ("type", "NetworkUnavailable"),
        ("status", "False"),
        ("reason", "FlannelIsUp"),
        ("message", "Flannel is running on this node"),
    ] {
        assert_eq!(condition[key], wanted);
    }
    store.health(None).await.unwrap();
    assert_eq!(version(&cluster.read(1).await), version(&node));
    store.health(Some("vxlan device missing")).await.unwrap();
    let node = cluster.read(1).await;
    let condition = &node["status"]["conditions"][0];
    assert_eq!((&condition["status"], &condition["reason"]), (&json!("True"), &json!("WeftIsDown")));
    let since = condition["lastTransitionTime"].as_str().unwrap().to_owned();
    // The API has times in whole seconds.
    sleep(Duration::from_millis(1100)).await;
    store.health(Some("no uplink")).await.unwrap();
    let node = cluster.read(1).await;
    let condition = &node["status"]["conditions"][0];
    assert_eq!((&condition["status"], &condition["message"]), (&json!("True"), &json!("no uplink")));
    assert_eq!(condition["lastTransitionTime"], since.as_str(), "another message must not count as a transition");
    assert_ne!(condition["lastHeartbeatTime"], since.as_str());
    store.health(None).await.unwrap();
    let node = cluster.read(1).await;
    assert_ne!(node["status"]["conditions"][0]["lastTransitionTime"], since.as_str());
    let mut options = cluster.options(Who::Node(cluster.node(2)), "weft");
    options.set_condition = false;
    KubeStore::new(options).unwrap().health(None).await.unwrap();
    assert!(cluster.read(2).await["status"]["conditions"].is_null(), "the option must switch the condition off");
}

#[tokio::test]
async fn a_pod_cidr_is_waited_for() {
    let cluster = Cluster::new(Server::shared().await).await;
    let store = cluster.store(1);
    let error = store.acquire(&request(1)).await.unwrap_err();
    assert!(matches!(&error, Error::Missing(what) if what.contains(&cluster.node(1))), "{error}");
    cluster.create(1, &[]).await;
    let error = store.acquire(&request(1)).await.unwrap_err();
    assert!(error.to_string().contains("has no pod CIDR: does kube-controller-manager"), "{error}");
    let mut took = vec![lease_of_a_late_pod_cidr(&cluster, 1).await];
    for last in 2..=5 {
        // Without the watch, the next read would be after 10 s. A busy machine may be as slow, but not each time.
        if took.iter().any(|took| *took < Duration::from_secs(10)) {
            return;
        }
        cluster.create(last, &[]).await;
        took.push(lease_of_a_late_pod_cidr(&cluster, last).await);
    }
    panic!("the watch was not used: {took:?}");
}

/// Gives a Node its pod CIDR while its agent waits for that. Returns how long the agent waited, and the longest time if it gave up.
async fn lease_of_a_late_pod_cidr(cluster: &Cluster, last: u8) -> Duration {
    let began = Instant::now();
    let cidr = format!("10.5.{last}.0/24");
    let assign = async {
        sleep(Duration::from_millis(500)).await;
        cluster.patch(last, &json!({"spec": {"podCIDR": cidr, "podCIDRs": [cidr]}})).await;
    };
    let (store, request) = (cluster.store(last), request(last));
    let (lease, ()) = tokio::join!(store.acquire(&request), assign);
    match lease {
        Ok(lease) => {
            assert_eq!(lease.subnets.to_string(), cidr);
            began.elapsed()
        }
        // An agent that did not wait would be here at once.
        Err(error) => {
            assert!(error.to_string().contains("has no pod CIDR"), "{error}");
            Duration::MAX
        }
    }
}

#[tokio::test]
async fn pod_cidrs_outside_of_the_network_are_named() {
    let cluster = Cluster::new(Server::shared().await).await;
    cluster.create(1, &["10.99.1.0/24"]).await;
    let error = cluster.store(1).acquire(&request(1)).await.unwrap_err();
    let wanted = format!("pod CIDR 10.99.1.0/24 of node {} lies outside 10.5.0.0/16", cluster.node(1));
    assert!(matches!(&error, Error::Invalid(text) if text.starts_with(&wanted)), "{error}");
    cluster.create(2, &["10.5.2.0/24"]).await;
    let error = cluster.store(2).acquire(&dual(2)).await.unwrap_err();
    assert!(error.to_string().contains("has no pod CIDR inside fd00:12::/48"), "{error}");
    assert!(cluster.read(2).await["metadata"]["annotations"].is_null(), "annotations were published");
}

#[tokio::test]
async fn both_families_are_published() {
    let cluster = Cluster::new(Server::shared().await).await;
    cluster.create(1, &["10.5.1.0/24", "fd00:12:0:1::/64"]).await;
    let lease = cluster.store(1).acquire(&dual(1)).await.unwrap();
    assert_eq!(lease.subnets.to_string(), "10.5.1.0/24,fd00:12:0:1::/64");
    assert_eq!(lease.attrs, dual(1).attrs);
    let lease = cluster.store(1).acquire(&request(1)).await.unwrap();
    assert_eq!(lease.subnets.to_string(), "10.5.1.0/24", "the lease must have only the family of net-conf");
    assert_eq!(lease.attrs, attrs(1));
}

#[tokio::test]
async fn addresses_of_an_admin_are_published() {
    let cluster = Cluster::shared().await;
    cluster.annotate(1, "node-public-ip", &json!("192.0.2.77")).await;
    cluster.annotate(1, "public-ip-overwrite", &json!("198.51.100.1")).await;
    let store = cluster.store(1);
    assert_eq!(store.chosen().await.unwrap(), [Some([192, 0, 2, 77].into()), None]);
    let lease = store.acquire(&request(1)).await.unwrap();
    assert_eq!(lease.attrs.public_ip, Some([198, 51, 100, 1].into()));
    let before = cluster.read(1).await;
    assert_eq!(store.retake(&lease.subnets, &lease.attrs, &attrs(1)).await.unwrap(), lease);
    assert_eq!(version(&cluster.read(1).await), version(&before));
    store.remove(&lease.id).await.unwrap();
    let left = json!({
        cluster.annotation("node-public-ip"): "192.0.2.77",
        cluster.annotation("public-ip-overwrite"): "198.51.100.1",
    });
    assert_eq!(cluster.read(1).await["metadata"]["annotations"], left, "annotations of the admin must stay");
    cluster.annotate(1, "node-public-ip", &json!("eth0")).await;
    assert!(matches!(store.chosen().await, Err(Error::Invalid(text)) if text.contains("node-public-ip")));
}

#[tokio::test]
async fn other_writers_of_the_node_do_not_prevent_a_lease() {
    let cluster = Cluster::shared().await;
    let store = cluster.store(1);
    let kubelet = async {
        for n in 0..40 {
            let began = Instant::now();
            cluster.patch(1, &json!({"metadata": {"labels": {"n": n.to_string()}}})).await;
            // The agent reads the Node and writes it. However slow the server is, it can do both between two of these writes now and then.
            sleep(2 * began.elapsed()).await;
        }
    };
    let agent = async {
        let mut lease = store.acquire(&request(1)).await.unwrap();
        for last in 2..10 {
            lease = store.retake(&lease.subnets, &lease.attrs, &attrs(last)).await.unwrap();
            assert_eq!(lease.attrs, attrs(last));
        }
    };
    tokio::join!(kubelet, agent);
    let node = cluster.read(1).await;
    assert_eq!(node["metadata"]["annotations"][cluster.annotation("public-ip")], "192.0.2.9");
    assert_eq!(node["metadata"]["labels"]["n"], "39");
}

#[tokio::test]
async fn two_agents_with_one_name_stop_writing() {
    let cluster = Cluster::shared().await;
    let (one, other) = (cluster.store(1), cluster.store(1));
    let lease = one.acquire(&request(1)).await.unwrap();
    other.acquire(&request(2)).await.unwrap();
    let mut errors = 0;
    for _ in 0..30 {
        for (store, last) in [(&one, 1), (&other, 2)] {
            match store.retake(&lease.subnets, &lease.attrs, &attrs(last)).await {
                Ok(_) => {}
                Err(error) => {
                    assert!(error.to_string().contains("do two agents have the same NODE_NAME?"), "{error}");
                    errors += 1;
                }
            }
        }
    }
    assert!(errors >= 20, "{errors}");
}

#[tokio::test]
async fn the_node_is_found_by_the_pod() {
    let cluster = Cluster::shared().await;
    let pod = json!({
        "metadata": {"name": cluster.name},
        "spec": {"nodeName": cluster.node(1), "containers": [{"name": "c", "image": "i"}]},
    });
    cluster.post("/api/v1/namespaces/default/pods", &pod).await;
    let who = |name: &str| Who::Pod { name: name.into(), namespace: "default".into() };
    let store = KubeStore::new(cluster.options(who(&cluster.name), "weft")).unwrap();
    assert_eq!(*store.acquire(&request(1)).await.unwrap().id, cluster.node(1));
    let store = KubeStore::new(cluster.options(who("nobody"), "weft")).unwrap();
    assert!(matches!(store.own(&booted(1)).await, Err(Error::Missing(what)) if what == "pod default/nobody"));
    let store = KubeStore::new(cluster.options(Who::Unknown, "weft")).unwrap();
    assert!(matches!(store.own(&booted(1)).await, Err(Error::Invalid(text)) if text.contains("NODE_NAME")));
    store.list().await.unwrap();
}

#[tokio::test]
async fn refusals_name_the_remedy() {
    let cluster = Cluster::shared().await;
    let who = || Who::Node(cluster.node(1));
    let refused = |error: Error| match error {
        Error::Refused { source, .. } => source.to_string(),
        error => panic!("{error}"),
    };
    let stranger = KubeStore::new(cluster.options(who(), "stranger")).unwrap();
    assert!(refused(stranger.list().await.unwrap_err()).contains("RBAC: nodes get, list, watch"));
    // Without an answer, or with rejected credentials, trying again may help.
    let cause = |error: Error| match error {
        Error::Unavailable { source: Some(cause), .. } => cause.to_string(),
        error => panic!("{error}"),
    };
    let nobody = KubeStore::new(cluster.options(who(), "nobody")).unwrap();
    assert!(cause(nobody.list().await.unwrap_err()).contains("credentials are not accepted"));
    let mut options = cluster.options(who(), "weft");
    options.access.kubeconfig = None;
    let outside = KubeStore::new(options.clone()).unwrap();
    assert!(cause(outside.list().await.unwrap_err()).contains("--kubeconfig-file or --kube-api-url"));
    options.access.kubeconfig = Some("/nonexistent/config".into());
    let missing = KubeStore::new(options.clone()).unwrap();
    assert!(cause(missing.list().await.unwrap_err()).contains("--kubeconfig-file /nonexistent/config"));
    options.access.url = Some("https://127.0.0.1:1".into());
    options.access.kubeconfig = Some(cluster.server.kubeconfig("weft"));
    let elsewhere = KubeStore::new(options).unwrap();
    assert!(
        cause(elsewhere.list().await.unwrap_err()).contains("refused"),
        "the URL must count more than the kubeconfig"
    );
}
