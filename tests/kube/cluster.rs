// SPDX-License-Identifier: Apache-2.0
//! A cluster that `cluster.sh` runs, and what tests do with it: kubectl, power cycles, and commands on nodes, in pods and outside.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::places::Place;

/// The version that tools/kube-binaries builds.
const VERSION: &str = include_str!("../../tools/kube-version");

/// How long to wait for a condition. It is far longer than a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(300);

/// The pause between two checks of a condition.
const LOOK: Duration = Duration::from_millis(100);

/// The directory of the sources.
const TREE: &str = env!("CARGO_MANIFEST_DIR");

/// How to build a cluster.
pub struct Shape {
    /// The mode of kube-proxy on `n1`, `n2`, ...
    pub proxies: &'static [&'static str],
    /// Which addresses nodes, pods and Services have.
    pub family: Family,
    /// Whether kubelets name the DNS server at [`Family::dns`] to their pods.
    pub dns: bool,
    /// Seconds without a heartbeat after which the control plane marks a node as not ready. Its default is 50.
    pub grace: u32,
    /// Image archives in addition to weft's.
    pub images: Vec<PathBuf>,
}

/// The families of addresses in a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
    Dual,
}

impl Family {
    /// As flags and `cluster.sh` call it.
    pub fn as_str(self) -> &'static str {
        match self {
            Family::V4 => "ipv4",
            Family::V6 => "ipv6",
            Family::Dual => "dual",
        }
    }

    /// Where the cluster's DNS server is.
    pub fn dns(self) -> &'static str {
        if self == Family::V6 { "fd00:10:96::a" } else { "10.96.0.10" }
    }
}

/// A running cluster. It ends when this value is dropped, or with the process.
pub struct Cluster {
    dir: PathBuf,
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    nodes: Vec<String>,
    begin: Instant,
    // The last field, so that it is dropped after everything else.
    _place: Place,
}

/// A pod as the API shows it.
#[derive(Debug, Clone)]
pub struct Pod {
    pub name: String,
    pub node: String,
    /// One address for each family.
    pub addresses: Vec<String>,
}

/// Returns the directory with the programs of Kubernetes.
pub fn binaries() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
    let dir = cache.join("weft").join(format!("kube-{}", VERSION.trim()));
    for name in [
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kube-proxy",
        "kubelet",
        "kubectl",
        "helm",
    ] {
        assert!(dir.join(name).is_file(), "{name} is not in {}: run `make prepare-kube`", dir.display());
    }
    dir
}

/// Returns the archive that `make image` writes, or the one that `WEFT_IMAGE` names, such as that of a release.
fn weft_image() -> PathBuf {
    if let Some(archive) = std::env::var_os("WEFT_IMAGE") {
        return archive.into();
    }
    let exe = std::env::current_exe().unwrap();
    // TARGET/debug/deps/kube-... or TARGET/debug/examples/kube-demo
    let path = exe.ancestors().nth(3).unwrap().join("weft-image.tar");
    assert!(path.is_file(), "{} is missing: run `make image`", path.display());
    path
}

/// The version of Kubernetes.
#[allow(dead_code, reason = "the conformance page alone names it")]
pub fn version() -> &'static str {
    VERSION.trim()
}

fn text(output: &[u8]) -> String {
    String::from_utf8_lossy(output).trim_end().to_owned()
}

/// Returns the output of a command. The error says why it failed.
fn outcome(what: &str, output: &Output) -> Result<String, String> {
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(format!("{what}: {}: {} {}", output.status, text(&output.stdout), text(&output.stderr)))
}

impl Cluster {
    /// Starts the control plane and the nodes. Use [`Cluster::until`] to wait until they are ready.
    pub fn start(shape: Shape) -> Cluster {
        let (place, begin) = (Place::for_a_cluster(), Instant::now());
        let mut images = shape.images;
        images.push(weft_image());
        let images: Vec<_> = images.iter().map(|path| path.to_str().unwrap()).collect();
        let dir = tempfile::Builder::new().prefix("weft-cluster-").tempdir().unwrap().keep();
        let mut child = Command::new(format!("{TREE}/tests/kube/cluster.sh"))
            .arg(&dir)
            .env("BIN", binaries())
            .env("TREE", TREE)
            .env("PROXIES", shape.proxies.join(" "))
            .env("IMAGES", images.join(" "))
            .env("FAMILY", shape.family.as_str())
            .env("DNS", if shape.dns { shape.family.dns() } else { "" })
            .env("GRACE", shape.grace.to_string())
            .env("HOME", &dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // The shell must not get the interrupt that ends us. It ends when its input does.
            .process_group(0)
            .spawn()
            .unwrap();
        let (orders, answers) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let nodes = (1..=shape.proxies.len()).map(|index| format!("n{index}")).collect();
        let mut cluster = Cluster { dir, child, orders, answers, nodes, begin, _place: place };
        cluster.hear("ready");
        cluster
    }

    fn hear(&mut self, wanted: &str) {
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        assert_eq!(answer.trim_end(), wanted, "cluster.sh ended");
    }

    fn order(&mut self, order: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
        self.hear("done");
    }

    /// Kills all processes of a node and empties its memory disks.
    pub fn power_off(&mut self, node: &str) {
        fs::remove_file(self.kubelet_mark(node)).unwrap();
        self.order(&format!("off {node}"));
    }

    /// Boots a node with its old disk.
    pub fn power_on(&mut self, node: &str) {
        self.order(&format!("on {node}"));
    }

    fn kubelet_mark(&self, node: &str) -> PathBuf {
        self.dir.join(format!("run/{node}.kubelet"))
    }

    /// Returns when the node's kubelet was started; `None` before that.
    pub fn kubelet_start(&self, node: &str) -> Option<std::time::SystemTime> {
        fs::metadata(self.kubelet_mark(node)).and_then(|data| data.modified()).ok()
    }

    /// Returns the path of a file on the disk of a node. The node may be off.
    pub fn on_disk(&self, node: &str, path: &str) -> PathBuf {
        let root = format!("/proc/{}/root", self.child.id());
        PathBuf::from(root + self.dir.to_str().unwrap()).join(format!("mem/{node}/upper/{path}"))
    }

    /// Returns the names of all nodes.
    pub fn nodes(&self) -> Vec<String> {
        self.nodes.clone()
    }

    /// Returns the admin's kubeconfig. Its server address is in the cluster's network namespace.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("pki/admin.conf")
    }

    /// Returns the network namespace of the control plane.
    pub fn netns(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/ns/net", self.child.id()))
    }

    /// Prepares kubectl or helm as the cluster's admin, in the source tree.
    fn client(&self, name: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.netns().display())).arg(binaries().join(name));
        command.arg("--kubeconfig").arg(self.kubeconfig());
        command.current_dir(TREE).env("HOME", &self.dir).stdin(Stdio::null());
        command
    }

    /// Runs kubectl with these arguments.
    pub fn try_kubectl(&self, words: &str) -> Result<String, String> {
        let output = self.client("kubectl").args(words.split_whitespace()).output().unwrap();
        outcome(words, &output)
    }

    pub fn kubectl(&self, words: &str) -> String {
        self.try_kubectl(words).unwrap_or_else(|error| panic!("kubectl {error}"))
    }

    /// Runs helm with these arguments.
    pub fn helm(&self, words: &str) -> String {
        let output = self.client("helm").args(words.split_whitespace()).output().unwrap();
        outcome(words, &output).unwrap_or_else(|error| panic!("helm {error}"))
    }

    /// Runs a shell script of the admin in the source tree, with kubectl and helm in its PATH.
    pub fn shell(&self, script: &str) -> Result<String, String> {
        let path = format!("{}:{}", binaries().display(), std::env::var("PATH").unwrap_or_default());
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.netns().display())).args(["sh", "-ec", script]);
        command.current_dir(TREE).env("HOME", &self.dir).stdin(Stdio::null());
        outcome(script, &command.env("PATH", path).env("KUBECONFIG", self.kubeconfig()).output().unwrap())
    }

    /// Returns the objects of `kubectl get`.
    pub fn get(&self, words: &str) -> Value {
        serde_json::from_str(&self.kubectl(&format!("get -o json {words}"))).unwrap()
    }

    /// Returns the items of a list.
    pub fn items(&self, words: &str) -> Vec<Value> {
        self.get(words)["items"].as_array().unwrap().clone()
    }

    pub fn apply(&self, objects: &str) {
        let mut command = self.client("kubectl");
        let mut child =
            command.args(["apply", "-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(objects.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "kubectl apply: {}\n{objects}", text(&output.stdout));
    }

    /// Returns the first process of a node.
    pub fn pid(&self, node: &str) -> io::Result<String> {
        Ok(fs::read_to_string(self.dir.join(format!("run/{node}.pid")))?.trim().to_owned())
    }

    /// Runs a shell script in all namespaces of a node.
    pub fn try_on(&self, node: &str, script: &str) -> Result<String, String> {
        let pid = self.pid(node).map_err(|error| error.to_string())?;
        let output = Command::new("nsenter").args(["--target", &pid, "--all", "sh", "-c", script]).output().unwrap();
        outcome(&format!("{node}: {script}"), &output)
    }

    pub fn on(&self, node: &str, script: &str) -> String {
        self.try_on(node, script).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Runs a shell script outside of all nodes, on the network between them.
    pub fn outside(&self, script: &str) -> Result<String, String> {
        let netns = format!("--net={}", self.netns().display());
        outcome(script, &Command::new("nsenter").args([&netns, "sh", "-c", script]).output().unwrap())
    }

    /// Runs a shell script in a pod.
    pub fn exec(&self, pod: &str, script: &str) -> Result<String, String> {
        let output = self.client("kubectl").args(["exec", pod, "--", "sh", "-c", script]).output().unwrap();
        outcome(&format!("{pod}: {script}"), &output)
    }

    /// Returns the running pods with a label, sorted by node.
    pub fn pods(&self, label: &str) -> Vec<Pod> {
        let mut pods: Vec<_> = self.items(&format!("pods -l {label}")).iter().filter_map(running).collect();
        pods.sort_by(|a, b| a.node.cmp(&b.node));
        pods
    }

    /// Waits until a condition holds.
    pub fn until(&self, what: &str, reached: impl Fn() -> bool) {
        self.wait_for(what, || reached().then_some(()));
    }

    /// Waits until `poll` returns a value.
    pub fn wait_for<T>(&self, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
        let begin = Instant::now();
        loop {
            if let Some(found) = poll() {
                let (now, took) = (self.begin.elapsed().as_secs_f64(), begin.elapsed().as_secs_f64());
                println!("{now:6.1} s: {what}, after {took:.1} s");
                return found;
            }
            assert!(begin.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}");
            std::thread::sleep(LOOK);
        }
    }

    /// Collects everything that helps to understand a failure.
    fn explain(&self) -> String {
        let mut said = String::new();
        for words in ["get nodes -o wide", "get pods -A -o wide", "get events -A --sort-by=.lastTimestamp"] {
            let _ = writeln!(said, "\n== {words}\n{}", self.try_kubectl(words).unwrap_or_else(|error| error));
        }
        for pod in self.try_kubectl("-n kube-flannel get pods -o name").unwrap_or_default().lines() {
            let words = format!("-n kube-flannel logs --tail 30 {pod}");
            let _ = writeln!(said, "\n== {words}\n{}", self.try_kubectl(&words).unwrap_or_else(|error| error));
        }
        let mut logs: Vec<_> =
            fs::read_dir(self.dir.join("log")).unwrap().flatten().map(|entry| entry.path()).collect();
        logs.sort();
        for log in logs {
            let all = fs::read(&log).unwrap_or_default();
            let all = String::from_utf8_lossy(&all);
            let lines: Vec<_> = all.lines().collect();
            let _ = writeln!(said, "\n== {}", log.display());
            for line in &lines[lines.len().saturating_sub(12)..] {
                let _ = writeln!(said, "{line}");
            }
        }
        said
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.explain());
        }
        if let Some(kept) = std::env::var_os("WEFT_KUBE_LOGS") {
            let from = self.dir.join("log");
            let _ = Command::new("cp").arg("-rT").arg(from).arg(Path::new(&kept)).status();
        }
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

fn running(pod: &Value) -> Option<Pod> {
    let status = &pod["status"];
    let up = status["containerStatuses"][0]["state"]["running"].is_object();
    if !up || !pod["metadata"]["deletionTimestamp"].is_null() {
        return None;
    }
    let addresses = status["podIPs"].as_array()?.iter().map(|ip| word(&ip["ip"])).collect();
    Some(Pod { name: word(&pod["metadata"]["name"]), node: word(&pod["spec"]["nodeName"]), addresses })
}

/// Returns a string of an object.
pub fn word(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Returns a condition of a node.
pub fn condition<'a>(node: &'a Value, kind: &str) -> Option<&'a Value> {
    node["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == kind)
}
