// SPDX-License-Identifier: Apache-2.0
//! A real API server with its etcd on loopback ports, without kubelets. A shell that reads from a pipe of ours is its parent. So it ends
//! with the test process, however that ends, and leaves no files behind.

// Each test program uses only a part of this module.
#![allow(dead_code)]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use http::{Method, Request};
use kube::{Client, Config};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};
use weft_backends::register::TYPES;
use weft_subnet::kube::{Access, KubeOptions, KubeStore, Who};

/// The version that tools/kube-binaries builds.
const VERSION: &str = include_str!("../../../tools/kube-version");

const SCRIPT: &str = r#"
api() { "$APISERVER" $API_FLAGS >>api.log 2>&1 & a=$!; }
db() { "$ETCD" --data-dir data --unsafe-no-fsync --log-level error $ETCD_FLAGS >>etcd.log 2>&1 & e=$!; }
db
api
while read -r word; do
    case $word in
    stop) { kill -9 $a; wait $a; } 2>/dev/null ;;
    start) api ;;
    wipe) { kill -9 $a $e; wait $a $e; } 2>/dev/null; rm -rf data; db; api ;;
    pause) kill -STOP $a ;;
    go-on) kill -CONT $a ;;
    esac
    echo done
done
{ kill -9 $a $e; wait; } 2>/dev/null
cd / && rm -rf "$DIR"
"#;

/// A server.
pub struct Server {
    dir: PathBuf,
    port: u16,
    etcd: u16,
    holder: Mutex<Holder>,
}

struct Holder {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// Returns a free port. It is below the ports that outgoing connections use, so it is still free a moment later.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let at = std::process::id().wrapping_mul(97).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 6_000;
        let port = 20_000 + u16::try_from(at).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

pub fn binary(name: &str) -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    let cache = std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
    let path = cache.join("weft").join(format!("kube-{}", VERSION.trim())).join(name);
    assert!(path.is_file(), "{} is missing: run tools/kube-binaries (make prepare-kube), once", path.display());
    path
}

fn openssl(dir: &Path, command: &str) {
    let out = Command::new("openssl").current_dir(dir).args(command.split(' ')).output();
    let out = out.expect("these tests need openssl");
    assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
}

/// Writes a CA, a certificate for 127.0.0.1 and the fabric of labs, the key of service accounts, and the tokens of the users.
fn credentials(dir: &Path) {
    std::fs::write(dir.join("san"), "subjectAltName=IP:127.0.0.1,IP:192.168.77.1,IP:fd77::1\n").unwrap();
    let ec = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(dir, &format!("req -x509 {ec} -keyout ca.key -out ca.pem -days 2 -subj /CN=ca"));
    openssl(dir, &format!("req {ec} -keyout api.key -out api.csr -subj /CN=api"));
    openssl(dir, "x509 -req -in api.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile san -out api.pem");
    openssl(dir, "genpkey -algorithm RSA -pkeyopt rsa_keygen_bits:2048 -out sa.key");
    let tokens = "admin,admin,1,system:masters\nweft,weft,2,\nstranger,stranger,3,\n";
    std::fs::write(dir.join("tokens"), tokens).unwrap();
}

impl Server {
    /// Starts a server with these additional flags, see [`Server::ready`]. With Debian's etcd (`old_etcd`) it has no streaming lists.
    fn start(flags: &str, old_etcd: bool) -> Server {
        let etcd_binary = if old_etcd { "etcd".into() } else { binary("etcd") };
        let dir = tempfile::Builder::new().prefix("weft-kube-").tempdir().unwrap().keep();
        credentials(&dir);
        let (port, etcd, peer) = (free_port(), free_port(), free_port());
        let client = format!("http://127.0.0.1:{etcd}");
        let mut etcd_flags = format!("--listen-client-urls {client} --advertise-client-urls {client}");
        let _ = write!(etcd_flags, " --listen-peer-urls http://127.0.0.1:{peer}");
        let api_flags = format!(
            "--etcd-servers {client} --allow-privileged=true --bind-address 127.0.0.1 --secure-port {port} --tls-cert-file api.pem \
             --tls-private-key-file api.key --token-auth-file tokens --authorization-mode RBAC \
             --service-cluster-ip-range 10.96.0.0/16 --service-account-issuer https://weft.test \
             --service-account-key-file sa.key --service-account-signing-key-file sa.key \
             --disable-admission-plugins ServiceAccount --endpoint-reconciler-type none {flags}"
        );
        let mut child = Command::new("sh")
            .args(["-c", SCRIPT])
            .current_dir(&dir)
            .env("APISERVER", binary("kube-apiserver"))
            .env("ETCD", etcd_binary)
            .env("API_FLAGS", api_flags)
            .env("ETCD_FLAGS", etcd_flags)
            .env("DIR", &dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let holder = Holder { orders: child.stdin.take(), answers, child };
        Server { dir, port, etcd, holder: Mutex::new(holder) }
    }

    /// Returns the server that tests share. Each test has its own annotation prefix.
    pub async fn shared() -> Arc<Server> {
        static SHARED: OnceLock<Arc<Server>> = OnceLock::new();
        let server = SHARED.get_or_init(|| Arc::new(Server::start("", false))).clone();
        server.ready().await;
        server
    }

    /// Returns a server for one test.
    pub async fn private(flags: &str) -> Arc<Server> {
        let server = Arc::new(Server::start(flags, false));
        server.ready().await;
        server
    }

    /// Returns a server for one test that uses the etcd of Debian 12.
    pub async fn with_old_etcd() -> Arc<Server> {
        let server = Arc::new(Server::start("", true));
        server.ready().await;
        server
    }

    /// Executes `stop`, `start`, `wipe` (which starts again with an empty etcd), `pause` or `go-on`.
    pub fn order(&self, word: &str) {
        let mut holder = self.holder.lock().unwrap();
        writeln!(holder.orders.as_mut().unwrap(), "{word}").unwrap();
        let mut answer = String::new();
        holder.answers.read_line(&mut answer).unwrap();
        assert_eq!(answer, "done\n");
    }

    /// Returns the port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the file with the CA of its certificate.
    pub fn ca(&self) -> PathBuf {
        self.dir.join("ca.pem")
    }

    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Writes a kubeconfig for one of the users.
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        let path = self.dir.join(format!("{user}.conf"));
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url(), "certificate-authority": "ca.pem"}}],
            "users": [{"name": "u", "user": {"token": user}}],
        });
        // Another test may be reading the file.
        let mut aside = tempfile::NamedTempFile::new_in(&self.dir).unwrap();
        aside.write_all(text.to_string().as_bytes()).unwrap();
        aside.persist(&path).unwrap();
        path
    }

    async fn admin(&self) -> Client {
        let read = kube::config::Kubeconfig::read_from(self.kubeconfig("admin")).unwrap();
        Client::try_from(Config::from_custom_kubeconfig(read, &Default::default()).await.unwrap()).unwrap()
    }

    /// Waits until the server answers, and gives our agents the rights that they need and no others.
    pub async fn ready(&self) {
        let client = self.admin().await;
        let until = Instant::now() + Duration::from_secs(120);
        let request = || Request::get("/readyz").body(Vec::new()).unwrap();
        while client.request_text(request()).await.is_err() {
            let log = |name: &str| std::fs::read_to_string(self.dir.join(name)).unwrap_or_default();
            let last = || log("api.log").lines().last().unwrap_or_default().to_owned();
            assert!(Instant::now() < until, "no API server: {}\netcd: {}", last(), log("etcd.log"));
            sleep(Duration::from_millis(100)).await;
        }
        let rules = json!([
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch"]},
            {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
            {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]},
        ]);
        // Not the name in deploy/kube, whose objects other tests create.
        let name = json!({"name": "tests"});
        let role = json!({"metadata": name, "rules": rules});
        let binding = json!({
            "metadata": name, "subjects": [{"kind": "User", "name": "weft"}],
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "tests"},
        });
        let path = "/apis/rbac.authorization.k8s.io/v1";
        for (kind, object) in [("clusterroles", role), ("clusterrolebindings", binding)] {
            // It exists if another test was first.
            let _ = call(&client, Method::POST, &format!("{path}/{kind}"), &object).await;
        }
    }

    /// Restarts the server and compacts etcd, so that every version that a client knows has expired.
    pub async fn forget(&self) {
        self.order("stop");
        let url = format!("http://127.0.0.1:{}", self.etcd);
        let mut client = etcd_client::Client::connect([url], None).await.unwrap();
        let now = client.put("x", "", None).await.unwrap().header().unwrap().revision();
        client.compact(now, None).await.unwrap();
        self.order("start");
        self.ready().await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let holder = self.holder.get_mut().unwrap();
        drop(holder.orders.take());
        let _ = holder.child.wait();
    }
}

async fn call(client: &Client, method: Method, path: &str, body: &Value) -> Result<Value, kube::Error> {
    let kind = if method == Method::PATCH { "application/merge-patch+json" } else { "application/json" };
    let request = Request::builder().method(method).uri(path).header("content-type", kind);
    client.request(request.body(body.to_string().into_bytes()).unwrap()).await
}

/// The cluster of one test: nodes `NAME-1` to `NAME-9` with pod CIDRs `10.5.N.0/24` and an annotation prefix of its own.
pub struct Cluster {
    pub server: Arc<Server>,
    pub name: String,
    pub conf: tempfile::TempDir,
    client: Client,
}

impl Cluster {
    pub async fn new(server: Arc<Server>) -> Cluster {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("t{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let client = server.admin().await;
        Cluster { server, name, conf: tempfile::tempdir().unwrap(), client }
    }

    /// Returns a cluster with nodes 1 and 2 on the shared server.
    pub async fn shared() -> Cluster {
        let cluster = Cluster::new(Server::shared().await).await;
        for last in [1, 2] {
            cluster.create(last, &[&format!("10.5.{last}.0/24")]).await;
        }
        cluster
    }

    pub fn node(&self, last: u8) -> String {
        format!("{}-{last}", self.name)
    }

    /// Returns the full name of an annotation.
    pub fn annotation(&self, end: &str) -> String {
        format!("{}.weft.test/{end}", self.name)
    }

    pub fn options(&self, who: Who, user: &str) -> KubeOptions {
        KubeOptions {
            access: Access { kubeconfig: Some(self.server.kubeconfig(user)), ..Access::default() },
            who,
            prefix: format!("{}.weft.test", self.name),
            net_config: self.conf.path().join("net-conf.json"),
            set_condition: true,
            events_after: None,
            types: TYPES,
        }
    }

    pub fn store(&self, last: u8) -> KubeStore {
        KubeStore::new(self.options(Who::Node(self.node(last)), "weft")).unwrap()
    }

    pub async fn create(&self, last: u8, cidrs: &[&str]) {
        self.create_as(&self.node(last), cidrs, json!({})).await;
    }

    pub async fn create_as(&self, name: &str, cidrs: &[&str], annotations: Value) {
        let mut spec = json!({});
        if let Some(first) = cidrs.first() {
            spec = json!({"podCIDR": first, "podCIDRs": cidrs});
        }
        let node = json!({"metadata": {"name": name, "annotations": annotations}, "spec": spec});
        call(&self.client, Method::POST, "/api/v1/nodes", &node).await.unwrap();
    }

    pub async fn delete(&self, last: u8) {
        self.delete_as(&self.node(last)).await;
    }

    pub async fn delete_as(&self, name: &str) {
        self.remove(&format!("/api/v1/nodes/{name}")).await;
    }

    /// Creates any object, and returns it as the server has it.
    pub async fn post(&self, path: &str, object: &Value) -> Value {
        call(&self.client, Method::POST, path, object).await.unwrap()
    }

    /// Deletes any object.
    pub async fn remove(&self, path: &str) {
        call(&self.client, Method::DELETE, path, &json!({})).await.unwrap();
    }

    pub async fn read(&self, last: u8) -> Value {
        let path = format!("/api/v1/nodes/{}", self.node(last));
        call(&self.client, Method::GET, &path, &json!({})).await.unwrap()
    }

    /// Returns the Events about a Node.
    pub async fn events(&self, last: u8) -> Vec<Value> {
        let path = "/apis/events.k8s.io/v1/namespaces/default/events";
        let all = call(&self.client, Method::GET, path, &json!({})).await.unwrap();
        let about = |event: &&Value| event["regarding"]["name"] == self.node(last);
        all["items"].as_array().unwrap().iter().filter(about).cloned().collect()
    }

    /// Applies a merge patch to a Node.
    pub async fn patch(&self, last: u8, patch: &Value) {
        let path = format!("/api/v1/nodes/{}", self.node(last));
        call(&self.client, Method::PATCH, &path, patch).await.unwrap();
    }

    /// Applies a merge patch that the server may refuse.
    pub async fn try_patch(&self, last: u8, patch: &Value) -> Result<Value, kube::Error> {
        call(&self.client, Method::PATCH, &format!("/api/v1/nodes/{}", self.node(last)), patch).await
    }

    /// Sets an annotation as an admin would.
    pub async fn annotate(&self, last: u8, end: &str, value: &Value) {
        let name = self.annotation(end);
        self.patch(last, &json!({"metadata": {"annotations": {name: value}}})).await;
    }
}
