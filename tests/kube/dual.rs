// SPDX-License-Identifier: Apache-2.0
//! IPv4 and IPv6 at once, and a restart of all agents that no packet notices.

use std::time::Instant;

use serde_json::json;

use crate::cluster::{Cluster, word};
use crate::fresh::all_answer;
use crate::install::{
    assert_mesh, assert_no_sandbox_failed, install_with, three_nodes, wait_for_agents, wait_for_bare_nodes,
    wait_for_pods,
};
use crate::ping::Ping;

#[test]
fn a_dual_stack_cluster() {
    let cluster = Cluster::start(three_nodes(true));
    wait_for_bare_nodes(&cluster);
    cluster.kubectl("apply -f tests/kube/web.yml");
    install_with(&cluster, |net, _| {
        net["EnableIPv6"] = json!(true);
        net["IPv6Network"] = json!("fd00:10:244::/48");
    });
    let pods = wait_for_pods(&cluster);
    for pod in &pods {
        assert!(pod.addresses.len() == 2 && pod.addresses[1].starts_with("fd00:10:244:"), "{pod:?}");
    }
    assert_mesh(&cluster, &pods);
    assert_no_sandbox_failed(&cluster);
    let service = cluster.get("service web");
    let addresses = service["spec"]["clusterIPs"].as_array().unwrap();
    assert_eq!(addresses.len(), 2);
    for pod in &pods {
        let in_pod = |script: &str| cluster.exec(&pod.name, script);
        for address in addresses {
            all_answer(&cluster, &pod.node, &pods, in_pod, (&word(address), 80));
        }
    }
    wait_for_agents(&cluster);

    let pings = Ping::ring(&cluster, &pods);
    assert_eq!(pings.len(), 6);
    let begin = Instant::now();
    cluster.kubectl("-n kube-flannel rollout restart daemonset kube-flannel-ds");
    wait_for_agents(&cluster);
    println!("all agents restarted in {:.1} s", begin.elapsed().as_secs_f64());
    for ping in pings {
        ping.stop().assert_nothing_lost("restart of the DaemonSet");
    }
}
