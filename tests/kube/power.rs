// SPDX-License-Identifier: Apache-2.0
//! A node loses power and boots again: no pod of it runs before its network, and its traffic is back at once.

use std::time::{Duration, SystemTime};

use crate::cluster::Cluster;
use crate::install::{
    assert_mesh, assert_no_sandbox_failed, install, three_nodes, wait_for_agents, wait_for_bare_nodes, wait_for_pods,
};

/// From the start of the kubelet to the first answer of a pod; flannel's nodes need 16 to 18 s on an idle machine.
const BACK: Duration = Duration::from_secs(15);

#[test]
fn a_node_boots_again() {
    let mut cluster = Cluster::start(three_nodes(false));
    wait_for_bare_nodes(&cluster);
    cluster.kubectl("apply -f tests/kube/web.yml");
    install(&cluster);
    assert_mesh(&cluster, &wait_for_pods(&cluster));
    wait_for_agents(&cluster);
    let before = wait_for_pods(&cluster);
    let (other, lost) = (&before[0], &before[1]);
    assert_eq!(lost.node, "n2");

    cluster.power_off("n2");
    // What is on the disk points to what the boot empties: the runtime will find no network by itself.
    let link = std::fs::read_link(cluster.on_disk("n2", "etc/cni/net.d/10-flannel.conflist")).unwrap();
    assert!(link.starts_with("/run/"), "{}", link.display());
    cluster.power_on("n2");

    let kubelet = cluster.wait_for("the kubelet of n2", || cluster.kubelet_start("n2"));
    cluster.until("the pod of n2 answers again", || {
        let pods = cluster.pods("app=web");
        let back = pods.iter().find(|pod| pod.name == lost.name && pod.addresses != lost.addresses);
        back.is_some_and(|pod| cluster.exec(&other.name, &format!("ping -c 1 -W 1 {}", pod.addresses[0])).is_ok())
    });
    let took = SystemTime::now().duration_since(kubelet).unwrap();
    println!("pod traffic is back {:.1} s after the start of the kubelet", took.as_secs_f64());
    assert!(took < BACK, "{took:?}");
    assert_no_sandbox_failed(&cluster);
    let waited = cluster.items("events -A --field-selector reason=NetworkNotReady");
    let waited = waited.iter().any(|event| event["involvedObject"]["name"] == lost.name.as_str());
    assert!(waited, "the runtime of n2 never said that it had no network");
    assert_mesh(&cluster, &wait_for_pods(&cluster));
}
