// SPDX-License-Identifier: Apache-2.0
//! An API server with its etcd in the fabric, on a memory disk, and the Node objects in it.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures_util::future::try_join_all;
use http::{Method, Request};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::peers::{Backend, Peer, STORE};
use crate::process::cpu_of_process;
use crate::site::{MEMORY, command};
use crate::store::runtime;

/// The node that is measured.
pub const OWN: &str = "own";
const PORT: u16 = 6443;
const PATIENCE: Duration = Duration::from_secs(60);
/// Where etcd listens.
const ETCD: &str = "http://127.0.0.1:2379";
/// How many requests are sent at once while nothing is measured.
const CROWD: usize = 32;
/// The annotation that contains the BackendData of a node.
const DATA: &str = "flannel.alpha.coreos.com/backend-data";

/// An API server and its etcd. Both end when this is dropped.
pub struct Cluster {
    children: Vec<Child>,
    runtime: Runtime,
    client: Client,
    /// The directory with the data, the logs, and the files of the agents.
    pub dir: TempDir,
    /// The kubeconfig that agents use.
    pub kubeconfig: PathBuf,
    /// The file with net-conf that agents read.
    pub net_conf: PathBuf,
    /// The program of the API server, and its flags.
    server: (PathBuf, String),
    /// Number of status updates so far. It makes each update differ from the one before, because an equal one would change nothing.
    beats: usize,
}

impl Cluster {
    /// Starts etcd and the API server in the namespace of the calling thread, with one Node: the one that is measured.
    ///
    /// # Errors
    /// The API server does not become ready in time.
    pub fn start(binaries: &Path) -> Result<Cluster> {
        let dir = TempDir::with_prefix_in("weft-bench-", MEMORY).context("create a temporary directory")?;
        let kubeconfig = credentials(dir.path())?;
        let net_conf = dir.path().join("net-conf.json");
        let conf = json!({"Network": "10.0.0.0/8", "Backend": {"Type": "vxlan"}});
        fs::write(&net_conf, conf.to_string()).context("write net-conf")?;
        let etcd = "--data-dir etcd --unsafe-no-fsync --log-level error --quota-backend-bytes 4294967296 \
                    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
                    --listen-peer-urls http://127.0.0.1:2380";
        let api = format!(
            "--etcd-servers http://127.0.0.1:2379 --bind-address {STORE} --secure-port {PORT} --tls-cert-file api.pem \
             --tls-private-key-file api.key --token-auth-file tokens --authorization-mode RBAC \
             --service-cluster-ip-range 10.96.0.0/16 --service-account-issuer https://weft.test \
             --service-account-key-file sa.key --service-account-signing-key-file sa.key \
             --disable-admission-plugins ServiceAccount --endpoint-reconciler-type none"
        );
        let server = (binaries.join("kube-apiserver"), api);
        let children = vec![start(&binaries.join("etcd"), etcd, dir.path())?, start(&server.0, &server.1, dir.path())?];
        let runtime = runtime()?;
        let client = runtime.block_on(connect(&kubeconfig, dir.path()))?;
        let cluster = Cluster { children, runtime, client, dir, kubeconfig, net_conf, server, beats: 0 };
        let node = json!({
            "metadata": {"name": OWN},
            "spec": {"podCIDR": "10.250.0.0/24", "podCIDRs": ["10.250.0.0/24"]},
        });
        cluster.runtime.block_on(post(&cluster.client, &node))?;
        Ok(cluster)
    }

    /// Creates these Nodes. Returns the size of one of them, in bytes of JSON.
    ///
    /// # Errors
    /// The API server refuses a request, or does not answer.
    pub fn fill(&mut self, numbers: Range<usize>) -> Result<usize> {
        let client = &self.client;
        self.runtime.block_on(async {
            for first in numbers.clone().step_by(CROWD) {
                let some = first..numbers.end.min(first + CROWD);
                try_join_all(some.map(|number| async move { post(client, &object(number)).await })).await?;
            }
            let path = format!("/api/v1/nodes/{}", name(numbers.start));
            let text = client.request_text(Request::get(path).body(Vec::new())?).await.context("read a node")?;
            Ok(text.len())
        })
    }

    /// Creates a Node, and returns when it is stored.
    ///
    /// # Errors
    /// The API server refuses a request, or does not answer.
    pub fn create(&mut self, number: usize) -> Result<()> {
        let node = object(number);
        self.runtime.block_on(post(&self.client, &node))
    }

    /// Deletes these Nodes.
    ///
    /// # Errors
    /// The API server refuses a request, or does not answer.
    pub fn remove(&mut self, numbers: Range<usize>) -> Result<()> {
        self.runtime.block_on(async {
            for number in numbers {
                let path = format!("/api/v1/nodes/{}", name(number));
                let request = Request::delete(path).body(Vec::new())?;
                self.client.request::<Value>(request).await.context("delete a node")?;
            }
            Ok(())
        })
    }

    /// Returns the CPU time that the server has used.
    ///
    /// # Errors
    /// It has ended.
    pub fn server_cpu(&self) -> Result<Duration> {
        cpu_of_process(self.children.last().context("no server")?.id())
    }

    /// Updates the status of one node after the other as their kubelets do.
    ///
    /// # Errors
    /// The API server refuses a request, or does not answer.
    pub fn heartbeats(&mut self, nodes: usize, count: usize, rate: u32) -> Result<()> {
        let client = &self.client;
        self.runtime.block_on(async {
            let mut tick = tokio::time::interval(Duration::from_secs(1) / rate);
            for beat in self.beats..self.beats + count {
                tick.tick().await;
                let at = format!("2026-01-01T{:02}:{:02}:{:02}Z", 1 + beat / 3600, beat / 60 % 60, beat % 60);
                let condition = json!({"type": "Ready", "lastHeartbeatTime": at});
                let patch = json!({"status": {"conditions": [condition]}}).to_string().into_bytes();
                let request = Request::builder()
                    .method(Method::PATCH)
                    .uri(format!("/api/v1/nodes/{}/status", name(beat % nodes)))
                    .header("content-type", "application/strategic-merge-patch+json")
                    .body(patch)?;
                client.request::<Value>(request).await.context("update a status")?;
            }
            Ok::<_, anyhow::Error>(())
        })?;
        self.beats += count;
        Ok(())
    }

    /// Replaces the API server by a new one that no longer knows the versions that agents know. Returns when it is ready.
    ///
    /// # Errors
    /// The API server does not become ready in time.
    pub fn restart(&mut self) -> Result<()> {
        if let Some(mut server) = self.children.pop() {
            server.kill().context("end the API server")?;
            server.wait().context("wait for the end of the API server")?;
        }
        // The new server begins with etcd's revision, and nobody has seen this one.
        self.runtime.block_on(async {
            let mut etcd = etcd_client::Client::connect([ETCD], None).await.context("connect to etcd")?;
            etcd.put("/weft-bench", "restart", None).await.context("write to etcd")
        })?;
        self.children.push(start(&self.server.0, &self.server.1, self.dir.path())?);
        self.client = self.runtime.block_on(connect(&self.kubeconfig, self.dir.path()))?;
        Ok(())
    }

    /// Gives a node `backend-data` of this many bytes, which differ from update to update.
    ///
    /// # Errors
    /// The API server refuses a request, or does not answer.
    pub fn fill_annotations(&mut self, number: usize, update: usize, bytes: usize) -> Result<()> {
        let text = format!("{update} {}", "x".repeat(bytes));
        self.patch(number, &json!({"metadata": {"annotations": {DATA: text}}}))
    }

    /// Gives a node a status of this many bytes.
    ///
    /// # Errors
    /// The API server refuses a request, or does not answer.
    pub fn fill_status(&mut self, number: usize, update: usize, bytes: usize) -> Result<()> {
        let image = json!({"names": [format!("{update} {}", "x".repeat(bytes))], "sizeBytes": 1});
        self.patch(number, &json!({"status": {"images": [image]}}))
    }

    /// Gives a node the annotations and the status again that it was created with.
    ///
    /// # Errors
    /// The API server refuses a request, or does not answer.
    pub fn calm(&mut self, number: usize) -> Result<()> {
        let node = object(number);
        let annotations = json!({DATA: node["metadata"]["annotations"][DATA]});
        let status = json!({"images": node["status"]["images"]});
        self.patch(number, &json!({"metadata": {"annotations": annotations}, "status": status}))
    }

    /// Changes the annotations and the status of a Node.
    fn patch(&self, number: usize, patch: &Value) -> Result<()> {
        let request = Request::builder()
            .method(Method::PATCH)
            .uri(format!("/api/v1/nodes/{}/status", name(number)))
            .header("content-type", "application/merge-patch+json")
            .body(patch.to_string().into_bytes())?;
        self.runtime.block_on(self.client.request::<Value>(request)).map(drop).context("patch a node")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in self.children.iter_mut().rev() {
            // It may have ended already. Its data is deleted anyway.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start(program: &Path, flags: &str, dir: &Path) -> Result<Child> {
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let log = fs::File::create(dir.join(format!("{name}.log"))).context("create a log")?;
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program).args(flags.split_whitespace()).current_dir(dir);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().with_context(|| format!("start {} (make prepare-kube)", program.display()))
}

/// Writes a CA, the certificate of the server, the keys, and the kubeconfig of an administrator.
fn credentials(dir: &Path) -> Result<PathBuf> {
    let file = |name: &str| dir.join(name).display().to_string();
    fs::write(file("san"), format!("subjectAltName=IP:{STORE}\n")).context("write a file")?;
    let ec = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    for words in [
        format!("req -x509 {ec} -keyout {} -out {} -days 2 -subj /CN=ca", file("ca.key"), file("ca.pem")),
        format!("req {ec} -keyout {} -out {} -subj /CN=api", file("api.key"), file("api.csr")),
        format!(
            "x509 -req -in {} -CA {} -CAkey {} -CAcreateserial -days 2 -extfile {} -out {}",
            file("api.csr"),
            file("ca.pem"),
            file("ca.key"),
            file("san"),
            file("api.pem")
        ),
        format!("genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out {}", file("sa.key")),
    ] {
        command("openssl", &words.split(' ').collect::<Vec<_>>())?;
    }
    fs::write(file("tokens"), "admin,admin,1,system:masters\n").context("write a file")?;
    let path = dir.join("config");
    let text = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {
            "server": format!("https://{STORE}:{PORT}"), "certificate-authority": file("ca.pem"),
        }}],
        "users": [{"name": "u", "user": {"token": "admin"}}],
    });
    fs::write(&path, text.to_string()).context("write a kubeconfig")?;
    Ok(path)
}

/// Returns a client, once the server is ready.
///
/// # Errors
/// The server is not ready in time.
pub async fn connect(kubeconfig: &Path, dir: &Path) -> Result<Client> {
    let read = Kubeconfig::read_from(kubeconfig).context("read the kubeconfig")?;
    let config = Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await;
    let client = Client::try_from(config.context("read the kubeconfig")?).context("make a client")?;
    let deadline = Instant::now() + PATIENCE;
    while client.request_text(Request::get("/readyz").body(Vec::new())?).await.is_err() {
        if Instant::now() >= deadline {
            let log = fs::read_to_string(dir.join("kube-apiserver.log")).unwrap_or_default();
            bail!("the API server does not come up: {}", log.lines().last().unwrap_or_default());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(client)
}

async fn post(client: &Client, object: &Value) -> Result<()> {
    let request = Request::post("/api/v1/nodes").header("content-type", "application/json");
    let body = object.to_string().into_bytes();
    client.request::<Value>(request.body(body)?).await.map(drop).context("create a node")
}

fn name(number: usize) -> String {
    format!("ip-10-{:03}-{:03}.eu-central-1.compute.internal", number / 256, number % 256)
}

/// Returns a Node as the kubelet of a cloud registers it and flannel publishes it: with labels, conditions and fifty images.
fn object(number: usize) -> Value {
    let peer = Peer::new(number);
    let cidr = format!("{}/24", peer.inner(false));
    let lease: Value = serde_json::from_str(&peer.value(Backend::Vxlan)).unwrap_or_default();
    let labels: serde_json::Map<String, Value> = (0..20)
        .map(|n| (format!("topology.example.com/property-{n:02}"), format!("value-of-property-{n:02}").into()))
        .collect();
    json!({
        "metadata": {
            "name": name(number),
            "labels": labels,
            "annotations": {
                "flannel.alpha.coreos.com/kube-subnet-manager": "true",
                "flannel.alpha.coreos.com/backend-type": "vxlan",
                DATA: lease["BackendData"].to_string(),
                "flannel.alpha.coreos.com/public-ip": peer.outer(false).to_string(),
                "node.alpha.kubernetes.io/ttl": "0",
                "volumes.kubernetes.io/controller-managed-attach-detach": "true",
                "csi.volume.kubernetes.io/nodeid": format!("{{\"ebs.csi.aws.com\":\"i-{number:017x}\"}}"),
            },
        },
        "spec": {"podCIDR": cidr, "podCIDRs": [cidr], "providerID": format!("aws:///eu-central-1a/i-{number:017x}")},
        "status": status(number),
    })
}

fn status(number: usize) -> Value {
    let address = Peer::new(number).outer(false).to_string();
    let image = |n: usize| {
        let digest = format!("{:064x}", 0x9e37_79b9_7f4a_7c15_u128 * (n as u128 + 1));
        let repository = format!("123456789012.dkr.ecr.eu-central-1.amazonaws.com/team-{:02}/service-{n:03}", n % 12);
        json!({
            "names": [format!("{repository}@sha256:{digest}"), format!("{repository}:v1.{n}.{}", n % 7)],
            "sizeBytes": 20_000_000 + n * 1_234_567,
        })
    };
    let condition = |kind: &str, status: &str, reason: &str| {
        let at = "2026-01-01T00:00:00Z";
        json!({
            "type": kind, "status": status, "reason": reason, "message": format!("kubelet has {reason} on this node"),
            "lastHeartbeatTime": at, "lastTransitionTime": at,
        })
    };
    let resources = json!({
        "cpu": "16", "memory": "64123456Ki", "pods": "110", "ephemeral-storage": "209702892Ki",
        "hugepages-1Gi": "0", "hugepages-2Mi": "0",
    });
    json!({
        "capacity": resources, "allocatable": resources,
        "conditions": [
            condition("NetworkUnavailable", "False", "FlannelIsUp"),
            condition("MemoryPressure", "False", "KubeletHasSufficientMemory"),
            condition("DiskPressure", "False", "KubeletHasNoDiskPressure"),
            condition("PIDPressure", "False", "KubeletHasSufficientPID"),
            condition("Ready", "True", "KubeletReady"),
        ],
        "addresses": [
            {"type": "InternalIP", "address": address},
            {"type": "Hostname", "address": name(number)},
        ],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
        "nodeInfo": {
            "machineID": format!("{number:032x}"), "systemUUID": format!("{number:032x}"),
            "bootID": format!("{number:032x}"), "kernelVersion": "6.12.0-1-cloud-amd64",
            "osImage": "Debian GNU/Linux 13 (trixie)", "containerRuntimeVersion": "containerd://2.1.4",
            "kubeletVersion": "v1.34.2", "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": "amd64",
        },
        "images": (0..50).map(image).collect::<Vec<_>>(),
    })
}
