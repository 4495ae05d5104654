// SPDX-License-Identifier: Apache-2.0
//! A private etcd on free loopback ports. It is ended when it is dropped.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use etcd_client::Client;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use weft_backends::register::TYPES;
use weft_subnet::etcd::{EtcdOptions, EtcdStore};

pub const PREFIX: &str = "/coreos.com/network";

/// The names of the members of a cluster.
const NAMES: [&str; 2] = ["one", "two"];

pub struct Server {
    child: Child,
    pub dir: tempfile::TempDir,
    pub port: u16,
    peer: u16,
    extra: Vec<String>,
    scheme: &'static str,
}

/// Returns a free port that no other call in this process returns. It is below the ports that outgoing connections use, and above those of
/// kube/server.rs, so it is still free a moment later.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let at = std::process::id().wrapping_mul(97).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 6_000;
        let port = 26_000 + u16::try_from(at).unwrap();
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

fn spawn(dir: &Path, (port, peer): (u16, u16), scheme: &str, extra: &[String]) -> Child {
    let client = format!("{scheme}://127.0.0.1:{port}");
    let peer = format!("http://127.0.0.1:{peer}");
    Command::new("etcd")
        .args([
            "--name",
            NAMES[0],
            "--unsafe-no-fsync",
            "--logger",
            "zap",
            "--log-outputs",
            "stderr",
            "--log-level",
            "error",
        ])
        .args(["--heartbeat-interval", "50", "--election-timeout", "500", "--data-dir"])
        .arg(dir.join("data"))
        .args(["--listen-client-urls", &client, "--advertise-client-urls", &client, "--listen-peer-urls", &peer])
        .args(["--initial-advertise-peer-urls", &peer, "--initial-cluster", &format!("{}={peer}", NAMES[0])])
        .args(extra)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("these tests need etcd (Debian: etcd-server)")
}

impl Server {
    pub async fn start() -> Server {
        let server = Server::start_with("http", |_| Vec::new());
        server.ready().await;
        server
    }

    pub fn start_with(scheme: &'static str, extra: impl Fn(&Path) -> Vec<String>) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let extra = extra(dir.path());
        let (port, peer) = (free_port(), free_port());
        let child = spawn(dir.path(), (port, peer), scheme, &extra);
        Server { child, dir, port, peer, extra, scheme }
    }

    /// Starts two members of one cluster, which need each other for every write.
    pub async fn start_two() -> [Server; 2] {
        let ports = [(); 2].map(|()| (free_port(), free_port()));
        let peer = |place: usize| format!("{}=http://127.0.0.1:{}", NAMES[place], ports[place].1);
        let cluster = [peer(0), peer(1)].join(",");
        let start = |place: usize| {
            // Of a flag that is given twice, the last one counts.
            let extra = ["--name", NAMES[place], "--initial-cluster", &cluster].map(str::to_owned).to_vec();
            let dir = tempfile::tempdir().unwrap();
            let ((port, peer), scheme) = (ports[place], "http");
            let child = spawn(dir.path(), ports[place], scheme, &extra);
            Server { child, dir, port, peer, extra, scheme }
        };
        let both = [start(0), start(1)];
        for server in &both {
            server.ready().await;
        }
        both
    }

    pub fn url(&self) -> String {
        format!("{}://127.0.0.1:{}", self.scheme, self.port)
    }

    pub async fn ready(&self) {
        // On a busy machine etcd needs many seconds to start.
        let end = Instant::now() + Duration::from_secs(180);
        while Instant::now() < end {
            if let Ok(mut client) = Client::connect([self.url()], None).await
                && let Ok(Ok(_)) = tokio::time::timeout(Duration::from_secs(5), client.get("x", None)).await
            {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("etcd does not answer on {}", self.url());
    }

    pub async fn client(&self) -> Client {
        Client::connect([self.url()], None).await.unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    pub fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn again(&mut self) {
        self.child = spawn(self.dir.path(), (self.port, self.peer), self.scheme, &self.extra);
    }

    /// Starts again as another cluster, which has nothing of this one.
    pub fn again_as(&mut self, cluster: &str) {
        self.wipe();
        self.extra.extend(["--initial-cluster-token".to_owned(), cluster.to_owned()]);
        self.again();
    }

    pub fn wipe(&self) {
        std::fs::remove_dir_all(self.dir.path().join("data")).unwrap();
    }

    pub fn store(&self) -> EtcdStore {
        EtcdStore::new(options(vec![self.url()])).unwrap()
    }

    pub fn etcdctl(&self, args: &[&str]) -> Vec<u8> {
        let out = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &self.url()])
            .args(args)
            .output()
            .expect("these tests need etcdctl (Debian: etcd-client)");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        out.stdout
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn options(endpoints: Vec<String>) -> EtcdOptions {
    EtcdOptions {
        endpoints,
        prefix: PREFIX.into(),
        key_file: None,
        cert_file: None,
        ca_file: None,
        username: None,
        password: None,
        lease_ttl: Duration::from_secs(86_400),
        renew_margin: Duration::from_secs(3_600),
        types: TYPES,
    }
}
