// SPDX-License-Identifier: Apache-2.0
//! The first steps in every cluster: install weft as deploy/ ships it, start a pod on each node, and check that they reach each other.

use serde_json::{Value, json};

use crate::cluster::{Cluster, Family, Pod, Shape, condition, word};

/// Returns a cluster of three nodes with kube-proxy in both modes.
pub fn three_nodes(dual: bool) -> Shape {
    let family = if dual { Family::Dual } else { Family::V4 };
    Shape { proxies: &["iptables", "nftables", "iptables"], family, dns: false, grace: 50, images: Vec::new() }
}

/// Waits until the nodes have pod CIDRs and are not ready only because they have no network.
pub fn wait_for_bare_nodes(cluster: &Cluster) {
    let names = cluster.nodes();
    cluster.until("nodes that lack only a network", || {
        let nodes = cluster.items("nodes");
        nodes.len() == names.len()
            && nodes.iter().all(|node| node["spec"]["podCIDR"].is_string() && lacks_network(node))
    });
}

/// The message is that of the container runtime, which the kubelet quotes.
fn lacks_network(node: &Value) -> bool {
    condition(node, "Ready")
        .is_some_and(|ready| ready["status"] == "False" && word(&ready["message"]).contains("NetworkReady=false"))
}

pub fn is_ready(node: &Value) -> bool {
    condition(node, "Ready").is_some_and(|ready| ready["status"] == "True")
}

/// Installs weft with the command in the README.
pub fn install(cluster: &Cluster) {
    cluster.kubectl("apply -k deploy/kube");
}

/// Returns the first block of commands in a page of the documentation after these words.
pub fn block_after(page: &str, words: &str) -> String {
    let text = std::fs::read_to_string(page).unwrap();
    let (_, rest) = text.split_once(words).unwrap_or_else(|| panic!("{page} lacks {words:?}"));
    let lines = rest.lines().skip_while(|line| !line.starts_with("    "));
    lines.take_while(|line| line.starts_with("    ")).map(|line| format!("{line}\n")).collect()
}

/// Installs weft after `edit` has changed the net-conf.json and cni-conf.json that deploy/ ships.
pub fn install_with(cluster: &Cluster, edit: impl FnOnce(&mut Value, &mut Value)) {
    cluster.kubectl("apply -f deploy/kube/config.yml");
    let shipped = cluster.get("-n kube-flannel configmap kube-flannel-cfg");
    let read = |name: &str| serde_json::from_str(shipped["data"][name].as_str().unwrap()).unwrap();
    let (mut net, mut cni) = (read("net-conf.json"), read("cni-conf.json"));
    edit(&mut net, &mut cni);
    let changed = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "kube-flannel-cfg", "namespace": "kube-flannel"},
        "data": {"net-conf.json": net.to_string(), "cni-conf.json": cni.to_string()},
    });
    cluster.apply(&changed.to_string());
    cluster.kubectl("apply -f deploy/kube/weft.yml");
}

/// Waits until all pods of the DaemonSet are ready.
pub fn wait_for_agents(cluster: &Cluster) {
    cluster.until("agents on every node", || {
        let set = cluster.get("-n kube-flannel daemonset kube-flannel-ds");
        let (status, generation) = (&set["status"], &set["metadata"]["generation"]);
        let wanted = &json!(cluster.nodes().len());
        status["observedGeneration"] == *generation
            && ["numberReady", "updatedNumberScheduled", "numberAvailable"].iter().all(|name| status[*name] == *wanted)
    });
}

/// Waits until no agent reports a problem.
pub fn assert_no_problems(cluster: &Cluster) {
    for node in cluster.nodes() {
        let field = format!("spec.nodeName={node}");
        let pods = cluster.items(&format!("-n kube-flannel pods -l app=flannel --field-selector {field}"));
        let [pod] = &pods[..] else { panic!("{} agents on {node}", pods.len()) };
        let ask =
            format!("-n kube-flannel exec {} -c kube-flannel -- /weft status -o json", word(&pod["metadata"]["name"]));
        let mut said = Value::Null;
        cluster.wait_for(&format!("no problems on {node}"), || {
            // An agent does not answer during a restart.
            let status: Value = serde_json::from_str(&cluster.try_kubectl(&ask).ok()?).unwrap();
            if said != status["problems"] {
                said = status["problems"].clone();
                println!("problems of {node}: {said}");
            }
            (status["ready"] == true && said == json!([])).then_some(())
        });
    }
}

/// Waits until there is a pod with addresses on each node.
pub fn wait_for_pods(cluster: &Cluster) -> Vec<Pod> {
    let nodes = cluster.nodes();
    cluster.wait_for("a pod on each node", || {
        let pods = cluster.pods("app=web");
        pods.iter().map(|pod| &pod.node).eq(&nodes).then_some(pods)
    })
}

/// Checks that every pod reaches every other pod in every family.
pub fn assert_mesh(cluster: &Cluster, pods: &[Pod]) {
    for from in pods {
        for to in pods.iter().filter(|to| to.name != from.name) {
            for address in &to.addresses {
                cluster.until(&format!("{} on {} to {address} on {}", from.name, from.node, to.node), || {
                    cluster.exec(&from.name, &format!("ping -c 1 -W 2 {address}")).is_ok()
                });
            }
        }
    }
}

/// Checks that no pod failed because there was no network. The kubelet reports that with these events.
pub fn assert_no_sandbox_failed(cluster: &Cluster) {
    let events = cluster.items("events -A --field-selector reason=FailedCreatePodSandBox");
    assert!(events.is_empty(), "pods were started without a network: {events:#?}");
}

/// Returns a shell script that asks `address:port` for the name of the pod that answers.
pub fn ask(address: &str, port: u16) -> String {
    format!("printf 'GET /name HTTP/1.0\\r\\n\\r\\n' | nc -w 10 {address} {port} | tail -n 1")
}
