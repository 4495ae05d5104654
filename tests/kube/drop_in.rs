// SPDX-License-Identifier: Apache-2.0
//! weft's image in a manifest that was written for flannel: only the names of the images are changed.

use std::fs;

use crate::cluster::Cluster;
use crate::install::{
    assert_mesh, assert_no_problems, assert_no_sandbox_failed, three_nodes, wait_for_agents, wait_for_bare_nodes,
    wait_for_pods,
};

/// The image that the other manifests name.
const IMAGE: &str = concat!("weft:", env!("CARGO_PKG_VERSION"));

/// Returns the manifest with weft's image. `FLANNEL_MANIFEST` names another one, such as that of a release of flannel, which brings its own
/// namespace and configuration.
pub fn manifest() -> String {
    let path = std::env::var("FLANNEL_MANIFEST").unwrap_or_else(|_| "tests/kube/drop-in.yml".to_owned());
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let is_flannels = |image: &str| image.contains("/flannel:") || image.contains("/flannel-cni-plugin:");
    let mut changed = 0;
    let lines = text.lines().map(|line| match line.split_once("image: ") {
        Some((before, image)) if is_flannels(image) => {
            changed += 1;
            format!("{before}image: {IMAGE}\n")
        }
        _ => format!("{line}\n"),
    });
    let manifest: String = lines.collect();
    assert!(changed >= 2, "{path} names {changed} images of flannel");
    manifest
}

#[test]
fn weft_in_flannels_manifest() {
    let cluster = Cluster::start(three_nodes(false));
    wait_for_bare_nodes(&cluster);
    cluster.kubectl("apply -f deploy/kube/config.yml");
    cluster.apply(&manifest());
    wait_for_agents(&cluster);
    cluster.kubectl("apply -f tests/kube/web.yml");
    let pods = wait_for_pods(&cluster);
    assert_mesh(&cluster, &pods);
    assert_no_sandbox_failed(&cluster);
    assert_no_problems(&cluster);
    for node in cluster.nodes() {
        let copied = cluster.on(&node, "cd /etc/cni/net.d && ls -A && stat -c %F 10-flannel.conflist");
        assert_eq!(copied, "10-flannel.conflist\nregular file", "{node}");
    }
    weft_s_own_manifest_takes_over(&cluster);
}

/// An operator who tried the image first goes on to weft's own manifest.
fn weft_s_own_manifest_takes_over(cluster: &Cluster) {
    cluster.kubectl("apply -f deploy/kube/weft.yml");
    wait_for_agents(cluster);
    assert_mesh(cluster, &wait_for_pods(cluster));
    for node in cluster.nodes() {
        // The copy shows that the agent has taken over the file of the init container.
        cluster.on(&node, "cmp /etc/cni/net.d/10-flannel.conflist /run/flannel/10-flannel.conflist");
    }
}
