// SPDX-License-Identifier: Apache-2.0
//! A node loses power and boots again: no pod of it is tried before its network is there, and then its traffic is back.

use std::time::{Duration, SystemTime};

use crate::cluster::Cluster;
use crate::install::{
    assert_mesh, assert_no_sandbox_failed, install, three_nodes, wait_for_agents, wait_for_bare_nodes, wait_for_pods,
};

/// From the start of the kubelet to the first answer of every pod, on a machine that does much else.
const BACK: Duration = Duration::from_secs(40);

#[test]
fn a_node_boots_again() {
    let mut cluster = Cluster::start(three_nodes(false));
    wait_for_bare_nodes(&cluster);
    cluster.kubectl("apply -f tests/kube/web.yml");
    // The kubelet mounts a token, and waits longer and longer between two tries while there is no network.
    cluster.apply(
        r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tokenless", "labels": {"app": "tokenless"}},
            "spec": {"nodeName": "n2", "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 1,
                "containers": [{"name": "web", "image": "weft-test:1", "command": ["sleep", "2147483647"]}]}}"#,
    );
    install(&cluster);
    assert_mesh(&cluster, &wait_for_pods(&cluster));
    wait_for_agents(&cluster);
    let before = wait_for_pods(&cluster);
    let (other, lost) = (&before[0], &before[1]);
    assert_eq!(lost.node, "n2");
    let tokenless = cluster.wait_for("the pod without a token", || cluster.pods("app=tokenless").pop());

    cluster.power_off("n2");
    // What is on the disk points to what the boot empties: the runtime will find no network by itself.
    let link = std::fs::read_link(cluster.on_disk("n2", "etc/cni/net.d/10-flannel.conflist")).unwrap();
    assert!(link.starts_with("/run/"), "{}", link.display());
    cluster.power_on("n2");

    let kubelet = cluster.wait_for("the kubelet of n2", || cluster.kubelet_start("n2"));
    for (what, label, pod) in [("without a token", "app=tokenless", &tokenless), ("with a token", "app=web", lost)] {
        cluster.until(&format!("the pod {what} answers again"), || {
            let pods = cluster.pods(label);
            // It keeps its name, and gets another address.
            let back = pods.iter().find(|now| now.name == pod.name && now.addresses != pod.addresses);
            back.is_some_and(|now| cluster.exec(&other.name, &format!("ping -c 1 -W 1 {}", now.addresses[0])).is_ok())
        });
        let took = SystemTime::now().duration_since(kubelet).unwrap();
        println!("traffic of the pod {what} is back {:.1} s after the start of the kubelet", took.as_secs_f64());
        assert!(took < BACK, "{took:?}");
    }
    assert_no_sandbox_failed(&cluster);
    let waited = cluster.items("events -A --field-selector reason=NetworkNotReady");
    for name in [&tokenless.name, &lost.name] {
        let said = waited.iter().any(|event| event["involvedObject"]["name"] == name.as_str());
        assert!(said, "the runtime of n2 never said to {name} that it had no network");
    }
    assert_mesh(&cluster, &wait_for_pods(&cluster));
}
