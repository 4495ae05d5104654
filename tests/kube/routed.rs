// SPDX-License-Identifier: Apache-2.0
//! Routed pods, which have no bridge, with a real container runtime.

use serde_json::json;

use crate::cluster::Cluster;
use crate::fresh::{host_ports_work, pods_leave_nothing, services_reach_every_pod};
use crate::install::{
    assert_mesh, assert_no_sandbox_failed, install_with, three_nodes, wait_for_bare_nodes, wait_for_pods,
};

#[test]
fn a_cluster_of_routed_pods() {
    let cluster = Cluster::start(three_nodes(false));
    wait_for_bare_nodes(&cluster);
    cluster.kubectl("apply -f tests/kube/web.yml");
    install_with(&cluster, |_, cni| cni["plugins"][0]["delegate"] = json!({"type": "weft-veth"}));
    let pods = wait_for_pods(&cluster);
    assert_mesh(&cluster, &pods);
    assert_no_sandbox_failed(&cluster);
    services_reach_every_pod(&cluster, &pods);
    host_ports_work(&cluster);
    for node in cluster.nodes() {
        assert_eq!(cluster.on(&node, "ip -br link show type bridge"), "", "{node} has a bridge");
    }
    pods_leave_nothing(&cluster);
}
