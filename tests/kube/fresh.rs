// SPDX-License-Identifier: Apache-2.0
//! A fresh cluster: nodes become ready after their network and not before, pods reach each other, Services and host ports work, and
//! deleted pods leave nothing behind.

use std::collections::BTreeSet;

use crate::cluster::{Cluster, Pod, condition, word};
use crate::install::{
    ask, assert_mesh, assert_no_problems, assert_no_sandbox_failed, install, is_ready, three_nodes, wait_for_agents,
    wait_for_bare_nodes, wait_for_pods,
};

#[test]
fn a_fresh_cluster() {
    let cluster = Cluster::start(three_nodes(false));
    wait_for_bare_nodes(&cluster);
    // These pods wait for the first node that is ready.
    cluster.kubectl("apply -f tests/kube/web.yml");
    install(&cluster);
    nodes_are_ready_after_their_network(&cluster);
    let pods = wait_for_pods(&cluster);
    assert_mesh(&cluster, &pods);
    assert_no_sandbox_failed(&cluster);
    wait_for_agents(&cluster);
    assert_no_problems(&cluster);
    the_condition_is_ours(&cluster);
    services_reach_every_pod(&cluster, &pods);
    host_ports_work(&cluster);
    pods_leave_nothing(&cluster);
}

/// Returns when a file was last changed, in nanoseconds since 1970. Links are not followed.
fn changed(cluster: &Cluster, node: &str, path: &str) -> u128 {
    let said = cluster.on(node, &format!("stat -c %.9Y {path}"));
    said.replace('.', "").parse().unwrap()
}

fn nodes_are_ready_after_their_network(cluster: &Cluster) {
    let mut seen = BTreeSet::new();
    cluster.wait_for("every node ready", || {
        for node in cluster.items("nodes").iter().filter(|node| is_ready(node)) {
            let name = word(&node["metadata"]["name"]);
            if seen.insert(name.clone()) {
                let env = changed(cluster, &name, "/run/flannel/subnet.env");
                let conf = changed(cluster, &name, "/etc/cni/net.d/10-flannel.conflist");
                assert!(env <= conf, "{name}: the runtime had its configuration before subnet.env");
                assert_eq!(cluster.on(&name, "stat -c %F /etc/cni/net.d/10-flannel.conflist"), "regular file");
            }
        }
        (seen.len() == cluster.nodes().len()).then_some(())
    });
}

fn the_condition_is_ours(cluster: &Cluster) {
    for node in cluster.items("nodes") {
        let name = &node["metadata"]["name"];
        let condition = condition(&node, "NetworkUnavailable").unwrap_or_else(|| panic!("{name} has no condition"));
        assert_eq!(condition["status"], "False", "{name}");
        assert_eq!(condition["reason"], "FlannelIsUp", "{name}");
        let taints = &node["spec"]["taints"];
        assert!(taints.is_null(), "{name} is tainted: {taints}");
    }
}

/// Sends requests with `run` until every pod has answered.
pub fn all_answer(
    cluster: &Cluster,
    what: &str,
    pods: &[Pod],
    run: impl Fn(&str) -> Result<String, String>,
    at: (&str, u16),
) {
    let wanted: BTreeSet<_> = pods.iter().map(|pod| pod.name.clone()).collect();
    let mut answered = BTreeSet::new();
    let many = format!("for i in 1 2 3 4 5 6 7 8 9 10; do {}; done", ask(at.0, at.1));
    cluster.wait_for(&format!("{what}: every pod answers at {}:{}", at.0, at.1), || {
        let said = run(&many).unwrap_or_default();
        answered.extend(said.lines().filter(|line| !line.is_empty()).map(str::to_owned));
        wanted.is_subset(&answered).then_some(())
    });
    assert_eq!(answered, wanted, "{what}");
}

/// Uses a Service from a pod, from a node, and from outside by NodePort. kube-proxy has different modes on the nodes.
pub fn services_reach_every_pod(cluster: &Cluster, pods: &[Pod]) {
    let service = word(&cluster.get("service web")["spec"]["clusterIP"]);
    for (index, pod) in pods.iter().enumerate() {
        let node = &pod.node;
        let in_pod = |script: &str| cluster.exec(&pod.name, script);
        all_answer(cluster, &format!("pod on {node}"), pods, in_pod, (&service, 80));
        let on_node = |script: &str| cluster.try_on(node, &busybox(script));
        all_answer(cluster, node, pods, on_node, (&service, 80));
        let outside = |script: &str| cluster.outside(&busybox(script));
        all_answer(
            cluster,
            &format!("node port of {node}"),
            pods,
            outside,
            (&format!("10.77.0.1{}", index + 1), 30080),
        );
    }
}

/// This uses the tools of the machine, which nodes have, too.
fn busybox(script: &str) -> String {
    script.replace("| nc", "| busybox nc")
}

pub fn host_ports_work(cluster: &Cluster) {
    cluster.apply(
        r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "port", "labels": {"app": "port"}},
            "spec": {"nodeName": "n2", "terminationGracePeriodSeconds": 1, "containers": [{"name": "port",
                "image": "weft-test:1", "ports": [{"containerPort": 8080, "hostPort": 18080}],
                "command": ["sh", "-c", "mkdir /www && hostname >/www/name && exec httpd -f -p 8080 -h /www"]}]}}"#,
    );
    let script = busybox(&ask("10.77.0.12", 18080));
    let answers = |said: Result<String, String>| said.is_ok_and(|name| name == "port");
    cluster.until("the host port from outside", || answers(cluster.outside(&script)));
    for node in cluster.nodes() {
        cluster.until(&format!("the host port from {node}"), || answers(cluster.try_on(&node, &script)));
    }
}

/// Prints what a node has of pods: attachments, addresses, links, namespaces and rules.
const REMAINS: &str = "
    ls -A /var/lib/cni/flannel
    ls -A /var/lib/cni/networks/cbr0 | grep -v -e ^last_reserved_ip -e ^lock
    ip -o link show type veth | grep -v ' eth0@'
    ls -A /run/netns
    iptables-save | grep -e 'CNI-DN-' -e 'CNI-SN-'
    true";

pub fn pods_leave_nothing(cluster: &Cluster) {
    let had = cluster.on("n2", REMAINS);
    assert!(had.contains("CNI-DN-") && had.contains("10.244."), "the search finds nothing of pods that exist: {had}");
    cluster.kubectl("delete -f tests/kube/web.yml --timeout=300s");
    cluster.kubectl("delete pod port --timeout=300s");
    for node in cluster.nodes() {
        cluster.until(&format!("nothing left of pods on {node}"), || cluster.on(&node, REMAINS).is_empty());
        let doctor = cluster.on(&node, "/opt/cni/bin/weft doctor pods");
        assert!(doctor.contains("0 leaked, 0 in doubt"), "{node}: {doctor}");
    }
}
