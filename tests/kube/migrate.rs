// SPDX-License-Identifier: Apache-2.0
//! A cluster moves from flannel to weft and back, node by node, while its pods have traffic. `FLANNELD` names flannel's binary. Our CNI
//! plugin stands for flannel's, because it takes the same configuration.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::cluster::{Cluster, Pod};
use crate::drop_in::manifest;
use crate::flanneld::flanneld;
use crate::install::{assert_mesh, block_after, three_nodes, wait_for_agents, wait_for_bare_nodes, wait_for_pods};
use crate::ping::{Ping, Score};

/// The pods of tests/kube/web.yml. After they were restarted, two of them may be on one node, because the scheduler also counts the old ones.
const WEB: &str = "app=web";
const PAGE: &str = "docs/migrate.md";
/// What stands in this page before the commands for a flannel that was installed with Helm, and before those of the way back.
const FORTH: &str = "## Kubernetes, with Helm\n";
const BACK: &str = "This is the way back, with flannel's chart.";

#[test]
#[ignore = "needs FLANNELD"]
fn flannel_to_weft_and_back() {
    let (_dir, cluster) = with_flannels_image();
    // The configuration that both read, and the rest of flannel's manifest.
    cluster.kubectl("apply -f deploy/kube/config.yml -f tests/kube/flannel.yml");
    let pods = pods_of_flannel(&cluster);

    let scores = under_ping(&cluster, &pods, |cluster| {
        cluster.kubectl("apply -f deploy/kube/weft.yml");
    });
    assert_eq!(agents(&cluster), "weft");
    judge(&scores, "flannel to weft");
    new_pods_work(&cluster);

    let pods = cluster.pods(WEB);
    let scores = under_ping(&cluster, &pods, |cluster| {
        cluster.kubectl("-n kube-flannel rollout undo daemonset kube-flannel-ds");
    });
    assert_eq!(agents(&cluster), "flanneld");
    judge(&scores, "weft to flannel");
    new_pods_work(&cluster);
}

/// The image alone is changed in the manifest of flannel, and changed back.
#[test]
#[ignore = "needs FLANNELD"]
fn flannels_manifest_gets_weft_s_image_and_flannels_again() {
    let (_dir, cluster) = with_flannels_image();
    cluster.kubectl("apply -f deploy/kube/config.yml -f tests/kube/flannel.yml");
    let pods = pods_of_flannel(&cluster);

    let scores = under_ping(&cluster, &pods, |cluster| cluster.apply(&manifest()));
    assert_eq!(agents(&cluster), "opt/bin/flanneld");
    judge(&scores, "flannel to weft's image");
    new_pods_work(&cluster);

    let pods = cluster.pods(WEB);
    let scores = under_ping(&cluster, &pods, |cluster| {
        cluster.kubectl("-n kube-flannel rollout undo daemonset kube-flannel-ds");
    });
    assert_eq!(agents(&cluster), "flanneld");
    judge(&scores, "weft's image to flannel");
    new_pods_work(&cluster);
}

/// The tests that run these commands need flannel's program. This one notices a page that changed before somebody has that.
#[test]
fn the_page_has_the_commands_of_both_ways() {
    for (words, kept, upgrade) in [
        (FORTH, "serviceaccount/flannel", "helm upgrade flannel deploy/helm/weft --namespace kube-flannel"),
        (BACK, "serviceaccount/weft", "helm upgrade flannel flannel/flannel --namespace kube-flannel"),
    ] {
        let block = block_after(PAGE, words);
        assert!(block.contains(kept) && block.contains(upgrade), "{words}: {block}");
    }
}

/// Runs the commands of docs/migrate.md for a flannel that was installed with Helm, word for word.
#[test]
#[ignore = "needs FLANNELD"]
fn flannels_helm_release_to_weft_and_back() {
    let (dir, cluster) = with_flannels_image();
    let chart = chart(dir.path());
    cluster.kubectl("create namespace kube-flannel");
    cluster.kubectl("label namespace kube-flannel pod-security.kubernetes.io/enforce=privileged");
    cluster.helm(&format!("install flannel {} --namespace kube-flannel --set podCidr=10.244.0.0/16", chart.display()));
    let pods = pods_of_flannel(&cluster);

    let forth = block_after(PAGE, FORTH);
    let scores = under_ping(&cluster, &pods, |cluster| println!("{}", cluster.shell(&forth).unwrap()));
    assert_eq!(agents(&cluster), "weft");
    judge(&scores, "flannel's release to weft");
    accounts_are_kept(&cluster);
    new_pods_work(&cluster);

    let pods = cluster.pods(WEB);
    let back = block_after(PAGE, BACK).replace("flannel/flannel", chart.to_str().unwrap());
    let scores = under_ping(&cluster, &pods, |cluster| println!("{}", cluster.shell(&back).unwrap()));
    assert_eq!(agents(&cluster), "flanneld");
    judge(&scores, "weft to flannel's release");
    accounts_are_kept(&cluster);
    new_pods_work(&cluster);
}

/// Starts three nodes that have flannel's image and no agent. Returns the directory of the image, too.
fn with_flannels_image() -> (TempDir, Cluster) {
    let flanneld = flanneld();
    let dir = tempfile::tempdir().unwrap();
    let mut shape = three_nodes(false);
    shape.images.push(image(dir.path(), &flanneld));
    let cluster = Cluster::start(shape);
    wait_for_bare_nodes(&cluster);
    (dir, cluster)
}

/// Waits until flannel's agents are ready and the pods reach each other.
fn pods_of_flannel(cluster: &Cluster) -> Vec<Pod> {
    wait_for_agents(cluster);
    cluster.kubectl("apply -f tests/kube/web.yml");
    let pods = wait_for_pods(cluster);
    assert_mesh(cluster, &pods);
    assert_eq!(agents(cluster), "flanneld");
    pods
}

/// Checks that both service accounts exist: during a rolling update, the other agents still use theirs.
fn accounts_are_kept(cluster: &Cluster) {
    cluster.kubectl("-n kube-flannel get serviceaccount flannel weft");
    cluster.kubectl("get clusterrole,clusterrolebinding flannel weft");
}

/// Writes a chart whose objects have the names and selectors of flannel's chart.
fn chart(dir: &Path) -> PathBuf {
    let chart = dir.join("chart");
    std::fs::create_dir_all(chart.join("templates")).unwrap();
    let config = std::fs::read_to_string("deploy/kube/config.yml").unwrap();
    let (_, config) = config.split_once("\n---\n").unwrap();
    std::fs::write(chart.join("Chart.yaml"), "apiVersion: v1\nname: flannel\nversion: 0.0.1\n").unwrap();
    std::fs::write(chart.join("values.yaml"), "podCidr: 10.0.0.0/8\n").unwrap();
    std::fs::write(chart.join("templates/config.yaml"), config).unwrap();
    std::fs::copy("tests/kube/flannel.yml", chart.join("templates/flannel.yaml")).unwrap();
    chart
}

/// Builds an image with flannel's binary. It uses the libraries and tools of the node.
fn image(dir: &Path, flanneld: &Path) -> PathBuf {
    let (root, archive) = (dir.join("root"), dir.join("flannel.tar"));
    std::fs::create_dir_all(root.join("usr")).unwrap();
    std::fs::copy(flanneld, root.join("flanneld")).unwrap();
    for name in ["bin", "sbin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{name}"), root.join(name)).unwrap();
    }
    let done = Command::new("tools/image").arg(&archive).arg("flannel:test").arg(&root).arg("/flanneld").status();
    assert!(done.unwrap().success());
    archive
}

/// Returns the program that all agents run.
fn agents(cluster: &Cluster) -> String {
    const NAMES: [&str; 3] = ["/flanneld", "/opt/bin/flanneld", "/weft"];
    let script = "for p in /proc/[0-9]*; do tr '\\0' '\\n' <$p/cmdline 2>/dev/null | head -n 1; done";
    let of = |node: &String| {
        // A program that an agent is just starting looks like a second agent until it is executed.
        cluster.wait_for(&format!("one agent on {node}"), || {
            let all = cluster.on(node, script);
            let ours: Vec<&str> = all.lines().filter(|line| NAMES.contains(line)).collect();
            (ours.len() == 1).then(|| ours[0].trim_start_matches('/').to_owned())
        })
    };
    let mut names: Vec<_> = cluster.nodes().iter().map(of).collect();
    names.dedup();
    names.join(", ")
}

/// Runs `change` while pods ping each other.
fn under_ping(cluster: &Cluster, pods: &[Pod], change: impl FnOnce(&Cluster)) -> Vec<Score> {
    let pings = Ping::ring(cluster, pods);
    change(cluster);
    wait_for_agents(cluster);
    pings.into_iter().map(Ping::stop).collect()
}

fn judge(scores: &[Score], during: &str) {
    for score in scores {
        score.assert_nothing_lost(during);
    }
}

/// Checks that new pods have a network, too.
fn new_pods_work(cluster: &Cluster) {
    let old: Vec<_> = cluster.pods(WEB).into_iter().map(|pod| pod.name).collect();
    cluster.kubectl("rollout restart deployment web");
    let pods = cluster.wait_for("new pods", || {
        let pods = cluster.pods(WEB);
        let fresh = pods.len() == cluster.nodes().len() && pods.iter().all(|pod| !old.contains(&pod.name));
        fresh.then_some(pods)
    });
    assert_mesh(cluster, &pods);
}
