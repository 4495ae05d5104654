// SPDX-License-Identifier: Apache-2.0
//! A node loses power and boots again. Its pods must not be started before it has its network, and must then have traffic again. How long
//! that takes is printed and not checked, because it depends on the machine and on the kubelet (docs/bench/method.md).

use std::time::SystemTime;

use crate::cluster::{Cluster, Pod, Shape};
use crate::install::{
    assert_mesh, assert_no_sandbox_failed, install, is_ready, three_nodes, wait_for_agents, wait_for_bare_nodes,
    wait_for_pods,
};

/// A pod without a token. For a pod with a token, the kubelet has to mount it, and while there is no network it waits ever longer between
/// its attempts.
const TOKENLESS: &str = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tokenless", "labels": {"app": "tokenless"}},
    "spec": {"nodeName": "n2", "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 1,
        "containers": [{"name": "web", "image": "weft-test:1", "command": ["sleep", "2147483647"]}]}}"#;

/// How long the node is off.
#[derive(Clone, Copy, PartialEq)]
enum Outage {
    /// Until the control plane has noticed.
    Noticed,
    /// Shorter: the Node is still Ready when the kubelet starts.
    Unnoticed,
}

/// What a boot does with the CNI configuration of the last run.
#[derive(Clone, Copy, PartialEq)]
enum Boot {
    /// The line of `tmpfiles.d` in docs/cni.md is installed: the runtime finds no configuration before the agent is ready.
    RemovesTheConfiguration,
    /// The runtime finds it until the agent starts, and the plugin waits for the agent.
    KeepsTheConfiguration,
}

#[test]
fn a_node_boots_again() {
    // If a machine is off for longer than 50 s, its Node is not ready when it comes back, and its kubelet looks for the network every
    // 0.1 s, otherwise every 5 s. The test uses 20 s instead of 50 s, which are two heartbeats of a kubelet, to save time.
    let mut cluster = Cluster::start(Shape { grace: 20, ..three_nodes(false) });
    wait_for_bare_nodes(&cluster);
    cluster.kubectl("apply -f tests/kube/web.yml");
    cluster.apply(TOKENLESS);
    install(&cluster);
    assert_mesh(&cluster, &wait_for_pods(&cluster));
    wait_for_agents(&cluster);
    cluster.until("the pod without a token", || !cluster.pods("app=tokenless").is_empty());
    power_cycle(&mut cluster, Outage::Noticed, Boot::RemovesTheConfiguration);
    power_cycle(&mut cluster, Outage::Unnoticed, Boot::KeepsTheConfiguration);
}

fn power_cycle(cluster: &mut Cluster, outage: Outage, boot: Boot) {
    let before = wait_for_pods(cluster);
    let (other, lost) = (&before[0], &before[1]);
    assert_eq!(lost.node, "n2");
    let tokenless = cluster.pods("app=tokenless").pop().unwrap();
    let events = |cluster: &Cluster| cluster.items("events -A --field-selector reason=NetworkNotReady");
    let old: Vec<_> = events(cluster).into_iter().map(|event| event["metadata"]["uid"].clone()).collect();

    cluster.power_off("n2");
    let conf = cluster.on_disk("n2", "etc/cni/net.d/10-flannel.conflist");
    assert!(std::fs::symlink_metadata(&conf).unwrap().is_file());
    if boot == Boot::RemovesTheConfiguration {
        std::fs::remove_file(&conf).unwrap();
    }
    let ready = |cluster: &Cluster| is_ready(&cluster.get("node n2"));
    if outage == Outage::Noticed {
        cluster.until("the control plane misses n2", || !ready(cluster));
    }
    cluster.power_on("n2");

    let kubelet = cluster.wait_for("the kubelet of n2", || cluster.kubelet_start("n2"));
    let called = if ready(cluster) { "ready" } else { "not ready" };
    for (token, label, pod) in [("without a token", "app=tokenless", &tokenless), ("with a token", "app=web", lost)] {
        cluster.until(&format!("the pod {token} answers again"), || answers(cluster, other, label, pod));
        let took = SystemTime::now().duration_since(kubelet).unwrap();
        println!(
            "node called {called}: traffic of the pod {token} is back {:.1} s after the start of the kubelet",
            took.as_secs_f64()
        );
    }
    if boot == Boot::RemovesTheConfiguration {
        assert_no_sandbox_failed(cluster);
        let waited: Vec<_> =
            events(cluster).into_iter().filter(|event| !old.contains(&event["metadata"]["uid"])).collect();
        for name in [&tokenless.name, &lost.name] {
            let said = waited.iter().any(|event| event["involvedObject"]["name"] == name.as_str());
            assert!(said, "the runtime of n2 never said to {name} that it had no network");
        }
    }
    assert_mesh(cluster, &wait_for_pods(cluster));
    wait_for_agents(cluster);
}

/// Returns whether a pod answers. It keeps its name, but has another address.
fn answers(cluster: &Cluster, from: &Pod, label: &str, pod: &Pod) -> bool {
    let pods = cluster.pods(label);
    let back = pods.iter().find(|now| now.name == pod.name && now.addresses != pod.addresses);
    back.is_some_and(|now| cluster.exec(&from.name, &format!("ping -c 1 -W 1 {}", now.addresses[0])).is_ok())
}
