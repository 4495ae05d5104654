// SPDX-License-Identifier: Apache-2.0
//! An API server that the test plays itself: it sees every request and chooses the answer. So it can do what a real server does only
//! after hours or under load. The tests with a real server are in `subnet/tests/kube.rs`.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{Access, KubeOptions, KubeStore, Who};
use crate::backend_types::FOR_TESTS;

/// How long a test waits for anything. It only ends tests that hang.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

pub(super) const PREFIX: &str = "a.test/";

/// A Node with the pod CIDR 10.5.LAST.0/24, whose agent has published the address 192.0.2.LAST.
#[derive(Debug, Clone)]
pub(super) struct FakeNode {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) version: u64,
    /// The pod CIDR. Empty if none is assigned yet.
    pub(super) cidr: String,
    /// Full names and values.
    pub(super) annotations: Vec<(String, String)>,
}

impl FakeNode {
    pub(super) fn new(last: u8, version: u64) -> FakeNode {
        let data = format!(r#"{{"VNI":1,"VtepMAC":"0e:00:00:00:00:{last:02x}"}}"#);
        let pairs = [
            ("kube-subnet-manager", "true".to_owned()),
            ("backend-type", "vxlan".to_owned()),
            ("backend-data", data),
            ("public-ip", format!("192.0.2.{last}")),
        ];
        FakeNode {
            name: format!("n{last}"),
            uid: format!("uid-{last}"),
            version,
            cidr: format!("10.5.{last}.0/24"),
            annotations: pairs.map(|(end, text)| (format!("{PREFIX}{end}"), text)).into(),
        }
    }

    /// Returns the same Node without the annotations of an agent.
    pub(super) fn bare(last: u8, version: u64) -> FakeNode {
        FakeNode { annotations: Vec::new(), ..FakeNode::new(last, version) }
    }

    /// Adds or changes an annotation.
    pub(super) fn with(mut self, end: &str, text: &str) -> FakeNode {
        let name = format!("{PREFIX}{end}");
        self.annotations.retain(|(there, _)| *there != name);
        self.annotations.push((name, text.to_owned()));
        self
    }

    pub(super) fn json(&self) -> Value {
        let annotations: serde_json::Map<String, Value> =
            self.annotations.iter().map(|(name, text)| (name.clone(), text.clone().into())).collect();
        json!({
            "kind": "Node", "apiVersion": "v1",
            "metadata": {
                "name": self.name, "uid": self.uid, "resourceVersion": self.version.to_string(),
                "creationTimestamp": "1970-01-01T00:01:40Z", "annotations": annotations,
            },
            "spec": if self.cidr.is_empty() { json!({}) } else { json!({"podCIDR": self.cidr, "podCIDRs": [self.cidr]}) },
        })
    }
}

/// A request that waits for its answer.
pub(super) struct Request {
    pub(super) method: String,
    /// The path with the query.
    pub(super) path: String,
    /// What the body is, such as `application/json`. Empty without a body.
    pub(super) kind: String,
    /// The body of a patch; null for other requests.
    pub(super) body: Value,
    stream: TcpStream,
}

impl Request {
    async fn read(mut stream: TcpStream) -> std::io::Result<Request> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let mut words = head.split(' ').map(str::to_owned);
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let header = |name: &str| {
            let mut headers = head.lines().filter_map(|line| line.split_once(": "));
            headers.find(|(other, _)| other.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
        };
        let kind = header("content-type").unwrap_or_default();
        let length = header("content-length").and_then(|length| length.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        stream.read_exact(&mut body).await?;
        Ok(Request { method, path, kind, body: serde_json::from_slice(&body).unwrap_or_default(), stream })
    }

    /// Returns a parameter of the query.
    pub(super) fn query(&self, name: &str) -> Option<&str> {
        let query = self.path.split_once('?')?.1;
        query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }

    async fn head(&mut self, code: u16) {
        let text = format!("HTTP/1.1 {code} Fake\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n");
        // The client may have closed the connection. A real server does not mind, either.
        let _ = self.stream.write_all(text.as_bytes()).await;
    }

    async fn answer(mut self, code: u16, body: &Value) {
        self.head(code).await;
        let _ = self.stream.write_all(body.to_string().as_bytes()).await;
    }

    pub(super) async fn json(self, value: &Value) {
        self.answer(200, value).await;
    }

    /// Answers with an error.
    pub(super) async fn refuse(self, code: u16, reason: &str) {
        self.answer(code, &status(code, reason)).await;
    }

    /// Answers with one page of a list. `next` says where the next page begins; it is empty on the last page.
    pub(super) async fn page(self, version: u64, next: &str, nodes: &[FakeNode]) {
        let items: Vec<Value> = nodes.iter().map(FakeNode::json).collect();
        let mut metadata = json!({"resourceVersion": version.to_string()});
        if !next.is_empty() {
            metadata["continue"] = next.into();
        }
        self.json(&json!({"kind": "NodeList", "apiVersion": "v1", "metadata": metadata, "items": items})).await;
    }

    /// Begins a watch. It ends when the returned value is dropped.
    pub(super) async fn stream(mut self) -> Stream {
        self.head(200).await;
        Stream { stream: self.stream }
    }
}

fn status(code: u16, reason: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason,
        "metadata": {},
    })
}

/// An open watch.
pub(super) struct Stream {
    stream: TcpStream,
}

impl Stream {
    async fn object(&mut self, kind: &str, object: &Value) {
        let line = format!("{}\n", json!({"type": kind, "object": object}));
        let _ = self.stream.write_all(line.as_bytes()).await;
    }

    /// Sends an event of the type `ADDED`, `MODIFIED` or `DELETED`.
    pub(super) async fn event(&mut self, kind: &str, node: &FakeNode) {
        self.object(kind, &node.json()).await;
    }

    async fn bookmark_with(&mut self, version: u64, annotations: Value) {
        let metadata = json!({
            "resourceVersion": version.to_string(), "creationTimestamp": null, "annotations": annotations,
        });
        let node = json!({"kind": "Node", "apiVersion": "v1", "metadata": metadata, "spec": {}, "status": {}});
        self.object("BOOKMARK", &node).await;
    }

    pub(super) async fn bookmark(&mut self, version: u64) {
        self.bookmark_with(version, json!({})).await;
    }

    /// Sends the bookmark behind the last Node of a streaming list.
    pub(super) async fn list_ends(&mut self, version: u64) {
        self.bookmark_with(version, json!({"k8s.io/initial-events-end": "true"})).await;
    }

    /// Sends an error in the middle of a watch.
    pub(super) async fn error(&mut self, code: u16, reason: &str) {
        self.object("ERROR", &status(code, reason)).await;
    }

    /// Sends an event of this Node with a status of `bytes` bytes.
    pub(super) async fn large_event(&mut self, kind: &str, node: &FakeNode, bytes: usize) {
        let mut node = node.json();
        node["status"] = "x".repeat(bytes).into();
        self.object(kind, &node).await;
    }

    /// Sends the first part of an event.
    pub(super) async fn half_an_event(&mut self) {
        let _ = self.stream.write_all(br#"{"type":"MODIFIED","object":{"kind":"No"#).await;
    }
}

/// The server. It serves plain HTTP, because tests of TLS have a real server.
pub(super) struct Fake {
    port: u16,
    requests: mpsc::UnboundedReceiver<Request>,
    sender: mpsc::UnboundedSender<Request>,
    listener: Option<JoinHandle<()>>,
    dir: TempDir,
}

impl Fake {
    pub(super) async fn start() -> Fake {
        let (sender, requests) = mpsc::unbounded_channel();
        let mut fake = Fake { port: 0, requests, sender, listener: None, dir: tempfile::tempdir().unwrap() };
        fake.open().await;
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": fake.url()}}],
            "users": [{"name": "u", "user": {}}],
        });
        std::fs::write(fake.kubeconfig(), kubeconfig.to_string()).unwrap();
        fake
    }

    pub(super) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns a kubeconfig for this server.
    pub(super) fn kubeconfig(&self) -> PathBuf {
        self.dir.path().join("config")
    }

    /// Returns the path of net-conf. The file does not exist at first.
    pub(super) fn net_conf(&self) -> PathBuf {
        self.dir.path().join("net-conf.json")
    }

    /// Returns the store of the agent whose Node is `n1`.
    pub(super) fn store(&self) -> KubeStore {
        let options = KubeOptions {
            access: Access { kubeconfig: Some(self.kubeconfig()), ..Access::default() },
            who: Who::Node("n1".to_owned()),
            prefix: PREFIX.to_owned(),
            net_config: self.net_conf(),
            set_condition: true,
            events_after: None,
            types: FOR_TESTS,
        };
        KubeStore::new(options).unwrap()
    }

    /// Accepts connections, after [`Fake::close`] again on the same port.
    pub(super) async fn open(&mut self) {
        let listener = TcpListener::bind(("127.0.0.1", self.port)).await.unwrap();
        self.port = listener.local_addr().unwrap().port();
        let sender = self.sender.clone();
        self.listener = Some(tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                // A connection that is closed before its request is ignored.
                if let Ok(request) = Request::read(stream).await
                    && sender.send(request).is_err()
                {
                    return;
                }
            }
        }));
    }

    /// Refuses connections. Watches stay open until the test drops them.
    pub(super) async fn close(&mut self) {
        if let Some(listener) = self.listener.take() {
            listener.abort();
            let _ = listener.await;
        }
    }

    /// Waits for the next request.
    pub(super) async fn request(&mut self) -> Request {
        tokio::time::timeout(LIMIT, self.requests.recv()).await.expect("a request").expect("the server runs")
    }

    /// Waits for the next request, whose path must begin like this.
    pub(super) async fn expect(&mut self, method: &str, path: &str) -> Request {
        let request = self.request().await;
        assert!(request.method == method && request.path.starts_with(path), "{} {}", request.method, request.path);
        request
    }

    /// Waits for a watch and begins it. It must begin at this version, or with a list if there is none.
    pub(super) async fn watch(&mut self, from: Option<u64>) -> Stream {
        let request = self.expect("GET", "/api/v1/nodes?watch=true&allowWatchBookmarks=true&").await;
        assert_eq!(request.query("sendInitialEvents"), from.is_none().then_some("true"), "{}", request.path);
        if let Some(from) = from {
            assert_eq!(request.query("resourceVersion"), Some(&*from.to_string()), "{}", request.path);
        }
        request.stream().await
    }

    /// Waits for a watch that begins with a list, and sends these Nodes as the list.
    pub(super) async fn list(&mut self, version: u64, nodes: &[FakeNode]) -> Stream {
        let mut stream = self.watch(None).await;
        for node in nodes {
            stream.event("ADDED", node).await;
        }
        stream.list_ends(version).await;
        stream
    }

    /// Waits for the request with which the store checks the history after a failure, and answers with this version.
    pub(super) async fn history_check(&mut self, version: u64) {
        let request = self.expect("GET", "/api/v1/nodes?limit=1").await;
        let path = "/api/v1/nodes?limit=1";
        assert_eq!(request.path, path, "with a resourceVersion, the server could answer from an old cache");
        request.page(version, "", &[]).await;
    }
}

/// A stopped clock that the test moves on. Sockets work anyway. With tokio's own paused clock they do not: it jumps to the next
/// timeout whenever the program waits for the network.
pub(super) struct Clock {
    _hold: std::sync::mpsc::Sender<()>,
}

impl Clock {
    /// Stops the clock.
    pub(super) fn stop() -> Clock {
        let (hold, end) = std::sync::mpsc::channel();
        // While a blocking task runs, tokio does not move the paused clock by itself.
        tokio::task::spawn_blocking(move || end.recv());
        tokio::time::pause();
        Clock { _hold: hold }
    }

    /// Moves the clock on, second by second, until the future is ready.
    pub(super) async fn until<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        loop {
            tokio::select! {
                biased;
                output = &mut future => return output,
                () = self.second() => {}
            }
        }
    }

    /// Moves the clock on at once.
    pub(super) async fn jump(&self, time: Duration) {
        tokio::time::advance(time).await;
    }

    #[expect(clippy::disallowed_methods, reason = "sockets need real time while tokio's clock stands still")]
    async fn second(&self) {
        tokio::time::advance(Duration::from_secs(1)).await;
        // Gives the other tasks and the sockets some real time.
        let _ = tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(3))).await;
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        tokio::time::resume();
    }
}
