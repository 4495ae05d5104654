// SPDX-License-Identifier: Apache-2.0
//! The backend udp, in which the agents carry the packets of pods themselves. It needs /dev/net/tun in their containers.

use crate::cluster::Cluster;
use crate::install::{
    assert_mesh, assert_no_problems, assert_no_sandbox_failed, three_nodes, wait_for_agents, wait_for_bare_nodes,
    wait_for_pods,
};

/// What docs/configuration.md tells users to do. It is done to a copy of the manifests.
const INSTALL: &str = r#"
    copy=$(mktemp -d)
    trap 'rm -r "$copy"' EXIT
    cp -r deploy/kube deploy/kube-udp "$copy"
    sed -i 's/"Type": "vxlan"/"Type": "udp"/' "$copy/kube/config.yml"
    kubectl apply -k "$copy/kube-udp""#;

#[test]
fn a_cluster_of_udp() {
    let cluster = Cluster::start(three_nodes(false));
    wait_for_bare_nodes(&cluster);
    cluster.kubectl("apply -f tests/kube/web.yml");
    cluster.shell(INSTALL).unwrap();
    let pods = wait_for_pods(&cluster);
    wait_for_agents(&cluster);
    for node in cluster.nodes() {
        let routes = cluster.on(&node, "ip route show dev flannel0");
        assert!(routes.contains("10.244.0.0/16"), "{node}: {routes}");
        // /proc/sys is read-only in a container, so the agent can only name this command in its status.
        cluster.on(&node, "sysctl -w net/ipv4/conf/flannel0/accept_local=1");
    }
    assert_no_problems(&cluster);
    assert_no_sandbox_failed(&cluster);
    assert_mesh(&cluster, &pods);
}
