// SPDX-License-Identifier: Apache-2.0
//! One run: starts a cluster with weft and a DNS server, and runs Kubernetes' tests in it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use crate::cluster::{self, Cluster, Family, Shape, word};
use crate::install::{install_with, is_ready, wait_for_agents, wait_for_bare_nodes};
use crate::report::{self, Ending, Report};
use crate::selection::{LeftOut, Selection, quoted};
use crate::{Kind, Pods};

/// The options of a run.
pub struct Wanted<'a> {
    pub tests: Selection,
    pub only: Option<&'a str>,
    pub procs: usize,
}

/// The file that names the registries of the tests' images.
const REGISTRIES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kube/conformance/registries.yml");
const TREE: &str = env!("CARGO_MANIFEST_DIR");

/// Starts a cluster of this kind, runs the tests in it, and keeps the result.
pub fn run(kind: &Kind, out: &Path, wanted: &Wanted<'_>) -> Report {
    fs::create_dir_all(out).expect("the directory of results is made");
    let (out, commit) = (out.canonicalize().unwrap(), commit());
    let begin = Instant::now();
    let cluster = start(kind, &images(&out));
    println!("the cluster is ready after {:.0} s", begin.elapsed().as_secs_f64());
    let left_out = wanted.tests.left_out(kind.family);
    let begin = Instant::now();
    let suites = report::read(&ginkgo(&cluster, &out, wanted, &left_out));
    let report = Report {
        name: kind.name(),
        kubernetes: cluster::version().to_owned(),
        weft: env!("CARGO_PKG_VERSION").to_owned(),
        commit,
        day: jiff::Timestamp::now().strftime("%F").to_string(),
        seconds: begin.elapsed().as_secs_f64(),
        tests: report::tests_of(&suites, kind.backend, &left_out),
        ending: Ending::of(&suites),
    };
    // A part of the tests must not replace the result of all of them.
    if wanted.only.is_none() && report.ending.is_complete() {
        match wanted.tests {
            Selection::All => report.save(&out),
            Selection::Netpol => report.save(&out.join(report::POLICIES)),
            Selection::Short => {}
        }
    }
    report
}

/// Returns the commit of the sources, such as `52fd08215a3c`, with `-dirty` if files were changed since. Without git the result is empty.
fn commit() -> String {
    let mut git = Command::new("git");
    git.args(["-C", TREE, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]);
    let said = git.output().ok().filter(|said| said.status.success());
    said.map(|said| String::from_utf8_lossy(&said.stdout).trim().to_owned()).unwrap_or_default()
}

/// Makes the archives of the images, which takes seconds.
fn images(out: &Path) -> Vec<PathBuf> {
    let dir = out.join("images");
    let done =
        Command::new(format!("{TREE}/tools/conformance-images")).arg(cluster::binaries()).arg(&dir).status().unwrap();
    assert!(done.success(), "tools/conformance-images failed");
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn start(kind: &Kind, images: &[PathBuf]) -> Cluster {
    let proxies: &'static [&'static str] = match kind.proxy {
        "nftables" => &["nftables"; 3],
        _ => &["iptables"; 3],
    };
    let cluster = Cluster::start(Shape { proxies, family: kind.family, dns: true, grace: 50, images: images.to_vec() });
    wait_for_bare_nodes(&cluster);
    let nodes = cluster.items("nodes");
    nodes.iter().for_each(|node| reach_pods_of(&cluster, node));
    // Tests of traffic that stays in its zone run only with three zones.
    for (number, node) in (1..).zip(cluster.nodes()) {
        cluster.kubectl(&format!("label node {node} topology.kubernetes.io/zone=zone-{number}"));
    }
    install_with(&cluster, |net, cni| configure(kind, net, cni));
    wait_for_agents(&cluster);
    cluster.until("ready nodes", || cluster.items("nodes").iter().all(is_ready));
    cluster.kubectl("apply -f tests/kube/conformance/coredns.yml");
    cluster.apply(&dns_service(kind.family).to_string());
    cluster.until("the DNS server", || {
        let deployment = cluster.get("-n kube-system deployment coredns");
        deployment["status"]["readyReplicas"] == 2
    });
    cluster
}

/// Adds routes to pods on the machine of the API server, which calls pods by their addresses (webhooks, aggregated APIs).
fn reach_pods_of(cluster: &Cluster, node: &Value) {
    let addresses = node["status"]["addresses"].as_array().unwrap();
    let internal =
        addresses.iter().filter(|address| address["type"] == "InternalIP").map(|address| word(&address["address"]));
    let internal: Vec<String> = internal.collect();
    for cidr in node["spec"]["podCIDRs"].as_array().unwrap().iter().map(word) {
        let via = internal
            .iter()
            .find(|via| via.contains(':') == cidr.contains(':'))
            .expect("a node has an address of each family");
        cluster.outside(&format!("ip route replace {cidr} via {via}")).unwrap();
    }
}

fn configure(kind: &Kind, net: &mut Value, cni: &mut Value) {
    net["Backend"] = json!({"Type": kind.backend});
    if kind.family != Family::V4 {
        net["EnableIPv6"] = json!(true);
        net["IPv6Network"] = json!("fd00:10:244::/48");
    }
    if kind.family == Family::V6 {
        net["EnableIPv4"] = json!(false);
        net.as_object_mut().unwrap().remove("Network");
    }
    if kind.pods == Pods::Routed {
        cni["plugins"][0]["delegate"] = json!({"type": "weft-veth"});
    }
}

fn dns_service(family: Family) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system", "labels": {"k8s-app": "kube-dns"}},
        "spec": {
            "clusterIP": family.dns(), "selector": {"k8s-app": "kube-dns"},
            "ports": [
                {"name": "dns", "port": 53, "protocol": "UDP"},
                {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
            ],
        },
    })
}

/// Runs the tests, and writes their output into a log. Returns the path of ginkgo's report.
fn ginkgo(cluster: &Cluster, out: &Path, wanted: &Wanted<'_>, left_out: &[&LeftOut]) -> PathBuf {
    let (binaries, report, log) = (cluster::binaries(), out.join("ginkgo.report"), out.join("e2e.log"));
    let _ = fs::remove_file(&report);
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", cluster.netns().display())).arg(binaries.join("ginkgo"));
    command.args(["--no-color", "--timeout=2h", &format!("--procs={}", wanted.procs)]);
    command.arg("--output-dir").arg(out).arg("--json-report=ginkgo.report");
    let focus = wanted.only.map_or_else(|| wanted.tests.focus(), |only| vec![only.to_owned()]);
    command.args(focus.iter().map(|focus| format!("--focus={focus}")));
    command.args(left_out.iter().map(|one| format!("--skip={}", quoted(one.name))));
    command.arg(binaries.join("e2e.test")).arg("--");
    command.arg(format!("--kubeconfig={}", cluster.kubeconfig().display()));
    command.arg(format!("--kubectl-path={}", binaries.join("kubectl").display()));
    command.args(["--provider=skeleton", "--num-nodes=3", "--dump-logs-on-failure=false", "--disable-log-dump=true"]);
    command.env("KUBE_TEST_REPO_LIST", REGISTRIES).env("KUBECONFIG", cluster.kubeconfig());
    let to = File::create(&log).unwrap();
    command.stdin(Stdio::null()).stdout(to.try_clone().unwrap()).stderr(to);
    println!("running the tests; they say what they do in {}", log.display());
    let status = command.status().unwrap();
    // The exit code does not matter, because the report shows which tests failed and whether the run is complete.
    assert!(report.is_file(), "ginkgo ended with {status} and wrote no report: see {}", log.display());
    report
}
