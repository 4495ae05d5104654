// SPDX-License-Identifier: Apache-2.0
//! IPv4 and IPv6, with Helm: installed, upgraded without a lost packet, and removed completely.

use std::time::Instant;

use serde_json::{Value, json};

use crate::cluster::{Cluster, word};
use crate::fresh::all_answer;
use crate::install::{
    assert_mesh, assert_no_problems, assert_no_sandbox_failed, block_after, three_nodes, wait_for_agents,
    wait_for_bare_nodes, wait_for_pods,
};
use crate::ping::Ping;

/// What stands in docs/install.md before the commands for Helm, and the one value in them.
const HELM: &str = "## Kubernetes, with Helm\n";
const VALUE: &str = "--set podCidr=10.244.0.0/16";
const UPGRADE: &str = "upgrade flannel deploy/helm/weft --namespace kube-flannel --reset-then-reuse-values";

#[test]
fn a_dual_stack_cluster() {
    let cluster = Cluster::start(three_nodes(true));
    wait_for_bare_nodes(&cluster);
    cluster.kubectl("apply -f tests/kube/web.yml");
    // The commands of the page as they stand, and the network of the second family.
    let commands = block_after("docs/install.md", HELM);
    assert!(commands.contains("helm install") && commands.contains(VALUE), "{commands}");
    let commands = commands.replace(VALUE, &format!("{VALUE} --set podCidrv6=fd00:10:244::/48"));
    let said = cluster.shell(&commands).unwrap();
    assert!(!said.contains("WARNING"), "{said}");
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
    assert_no_problems(&cluster);

    let pings = Ping::ring(&cluster, &pods);
    assert_eq!(pings.len(), 6);
    upgrade(&cluster);
    for ping in pings {
        ping.stop().assert_nothing_lost("upgrade");
    }
    assert_no_problems(&cluster);
    uninstall(&cluster);
}

/// Does a rolling update like `kubectl rollout restart`.
fn upgrade(cluster: &Cluster) {
    let notes = cluster.helm(&format!("{UPGRADE} --dry-run=server --set policy.enabled=false"));
    assert!(notes.contains("WARNING: the admission policy weft-own-node was left out"), "{notes}");
    let begin = Instant::now();
    cluster.helm(&format!("{UPGRADE} --set flannel.args={{--ip-masq,--kube-subnet-mgr,-v=1}}"));
    wait_for_agents(cluster);
    println!("all agents upgraded in {:.1} s", begin.elapsed().as_secs_f64());
    let set = cluster.get("-n kube-flannel daemonset kube-flannel-ds");
    let args = set["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap();
    assert!(args.contains(&json!("-v=1")), "{args:?}");
    let conf = cluster.get("-n kube-flannel configmap kube-flannel-cfg");
    let conf: Value = serde_json::from_str(conf["data"]["net-conf.json"].as_str().unwrap()).unwrap();
    assert_eq!(conf["IPv6Network"], "fd00:10:244::/48", "values of the installation stay");
}

/// Prints what a node has of weft: devices, routes, nexthops, rules and the configuration of the runtime.
const REMAINS: &str = "
    ip -o link show type vxlan
    for family in -4 -6; do ip $family route show table all proto 90; done
    ip nexthop
    nft list tables | grep -i -e weft -e flannel
    for program in iptables-nft-save iptables-legacy-save ip6tables-nft-save ip6tables-legacy-save; do $program | grep -i weft; done
    ls -A /etc/cni/net.d
    ls /run/flannel/10-flannel.conflist /run/flannel/weft.sock
    true";

/// Removes weft as docs/operations.md describes it.
fn uninstall(cluster: &Cluster) {
    const CLEANUP: &str = "/opt/cni/bin/weft cleanup";
    for node in cluster.nodes() {
        let had = cluster.on(&node, REMAINS);
        for part in [
            "flannel.1",
            "flannel-v6.1",
            "10.244.",
            "fd00:10:244:",
            "table ip weft",
            "table ip6 weft",
            "10-flannel.conflist",
        ] {
            assert!(had.contains(part), "these looks do not see {part} on {node}: {had}");
        }
        let refused = cluster.try_on(&node, CLEANUP).expect_err("an agent runs");
        assert!(refused.contains("an agent answers on /run/flannel/weft.sock"), "{refused}");
    }
    cluster.kubectl("delete -f tests/kube/web.yml --timeout=300s");
    cluster.helm("uninstall flannel --namespace kube-flannel");
    cluster.until("no agent", || cluster.items("-n kube-flannel pods").is_empty());
    // This way is for nodes without a login. Any image with chroot will do.
    let debug =
        "debug -n kube-system node/n3 --image=weft-test:1 --profile=sysadmin --quiet -- /bin/busybox chroot /host";
    cluster.kubectl(&format!("{debug} {CLEANUP}"));
    for node in cluster.nodes() {
        if node == "n3" {
            cluster.until("nothing left of weft on n3", || cluster.on("n3", REMAINS).is_empty());
        } else {
            let said = cluster.on(&node, CLEANUP);
            assert!(said.contains("and the traffic rules and the CNI configuration"), "{said}");
            assert_eq!(cluster.on(&node, REMAINS), "", "{node}");
        }
    }
}
