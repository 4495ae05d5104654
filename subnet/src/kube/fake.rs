// SPDX-License-Identifier: Apache-2.0
//! An API server whose answers the test writes by hand: it sees every request and says what is answered, so that it can do
//! what a real server does only after hours or under load. What a real server does is tested in `subnet/tests/kube.rs`.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::{Access, KubeOptions, KubeStore, Who};

/// Reminder of a test.
pub(super) const LIMIT: Duration = Duration::from_secs(60);

pub(super) const PREFIX: &str = "a.test/";

/// A field of Kubernetes' own encoding that has a length before it.
pub(super) fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![number << 3 | 2];
    prost::encoding::encode_varint(content.len() as u64, &mut bytes);
    bytes.extend_from_slice(content);
    bytes
}

/// An object as it stands alone, in its envelope.
pub(super) fn envelope(object: &[u8]) -> Vec<u8> {
    [b"k8s\0".as_slice(), &field(2, object), &field(3, b""), &field(4, b"")].concat()
}

/// A Node that an agent has published; its pod CIDR is 10.5.LAST.0/24 and its address 192.0.2.LAST.
#[derive(Debug, Clone)]
pub(super) struct FakeNode {
    pub(super) name: String,
    pub(super) uid: String,
    pub(super) version: u64,
    /// Empty where none was assigned yet.
    pub(super) cidr: String,
    /// Whole names.
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

    /// The same without an agent's annotations.
    pub(super) fn bare(last: u8, version: u64) -> FakeNode {
        FakeNode { annotations: Vec::new(), ..FakeNode::new(last, version) }
    }

    /// The same with one annotation added or changed.
    pub(super) fn with(mut self, end: &str, text: &str) -> FakeNode {
        let name = format!("{PREFIX}{end}");
        self.annotations.retain(|(there, _)| *there != name);
        self.annotations.push((name, text.to_owned()));
        self
    }

    /// In Kubernetes' own encoding, without its envelope.
    fn bytes(&self) -> Vec<u8> {
        let mut meta = [
            field(1, self.name.as_bytes()),
            field(5, self.uid.as_bytes()),
            field(6, self.version.to_string().as_bytes()),
            field(8, &[1 << 3, 100]),
        ]
        .concat();
        for (name, text) in &self.annotations {
            meta.extend(field(12, &[field(1, name.as_bytes()), field(2, text.as_bytes())].concat()));
        }
        let spec = [field(1, self.cidr.as_bytes()), field(7, self.cidr.as_bytes())].concat();
        [field(1, &meta), field(2, if self.cidr.is_empty() { b"" } else { &spec })].concat()
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
pub(super) struct Asked {
    pub(super) method: String,
    /// With the query.
    pub(super) path: String,
    /// Of a patch.
    pub(super) body: Value,
    stream: TcpStream,
}

impl Asked {
    async fn read(mut stream: TcpStream) -> std::io::Result<Asked> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let mut words = head.split(' ').map(str::to_owned);
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        let length = head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        stream.read_exact(&mut body).await?;
        Ok(Asked { method, path, body: serde_json::from_slice(&body).unwrap_or_default(), stream })
    }

    /// The value of this parameter in the query.
    pub(super) fn query(&self, name: &str) -> Option<&str> {
        let query = self.path.split_once('?')?.1;
        query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))
    }

    async fn head(&mut self, code: u16, kind: &str) {
        let text = format!("HTTP/1.1 {code} Fake\r\nContent-Type: {kind}\r\nConnection: close\r\n\r\n");
        // A client that has gone gets nothing, as from any server.
        let _ = self.stream.write_all(text.as_bytes()).await;
    }

    async fn whole(mut self, code: u16, kind: &str, body: &[u8]) {
        self.head(code, kind).await;
        let _ = self.stream.write_all(body).await;
    }

    pub(super) async fn json(self, value: &Value) {
        self.whole(200, "application/json", value.to_string().as_bytes()).await;
    }

    /// What the server refuses; lists and watches get it in Kubernetes' own encoding, as from a real server.
    pub(super) async fn refuse(self, code: u16, reason: &str) {
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason,
            "metadata": {},
        });
        let (kind, body) = if self.path.starts_with("/api/v1/nodes?") {
            ("application/vnd.kubernetes.protobuf", envelope(&status_bytes(code, reason)))
        } else {
            ("application/json", status.to_string().into_bytes())
        };
        self.whole(code, kind, &body).await;
    }

    /// One page of a list; `more` is where the next one begins.
    pub(super) async fn page(self, version: u64, more: &str, nodes: &[FakeNode]) {
        let meta = [field(2, version.to_string().as_bytes()), field(3, more.as_bytes())].concat();
        let mut list = field(1, &meta);
        for node in nodes {
            list.extend(field(2, &node.bytes()));
        }
        self.whole(200, "application/vnd.kubernetes.protobuf", &envelope(&list)).await;
    }

    /// Begins a watch, which ends when what is returned is dropped.
    pub(super) async fn stream(mut self) -> Stream {
        self.head(200, "application/vnd.kubernetes.protobuf;stream=watch").await;
        Stream { stream: self.stream }
    }
}

fn status_bytes(code: u16, reason: &str) -> Vec<u8> {
    let mut number = vec![6 << 3];
    prost::encoding::encode_varint(code.into(), &mut number);
    [field(3, reason.as_bytes()), field(4, reason.as_bytes()), number].concat()
}

/// A watch that is open.
pub(super) struct Stream {
    stream: TcpStream,
}

impl Stream {
    async fn object(&mut self, kind: &str, object: &[u8]) {
        let event = [field(1, kind.as_bytes()), field(2, &field(1, &envelope(object)))].concat();
        let _ = self.stream.write_all(&u32::try_from(event.len()).unwrap().to_be_bytes()).await;
        let _ = self.stream.write_all(&event).await;
    }

    /// `ADDED`, `MODIFIED` or `DELETED`.
    pub(super) async fn event(&mut self, kind: &str, node: &FakeNode) {
        self.object(kind, &node.bytes()).await;
    }

    pub(super) async fn bookmark(&mut self, version: u64) {
        self.object("BOOKMARK", &field(1, &field(6, version.to_string().as_bytes()))).await;
    }

    /// The bookmark behind the last node of a list.
    pub(super) async fn list_ends(&mut self, version: u64) {
        let mark = [field(1, b"k8s.io/initial-events-end"), field(2, b"true")].concat();
        let meta = [field(6, version.to_string().as_bytes()), field(12, &mark)].concat();
        self.object("BOOKMARK", &field(1, &meta)).await;
    }

    /// An error in the middle of a watch.
    pub(super) async fn error(&mut self, code: u16, reason: &str) {
        self.object("ERROR", &status_bytes(code, reason)).await;
    }

    /// Some bytes of an event that never comes whole.
    pub(super) async fn half_an_event(&mut self) {
        let _ = self.stream.write_all(&[0, 0, 1, 0, 10, 5, b'A']).await;
    }
}

/// The server. It serves `http`, so that no test waits for TLS.
pub(super) struct Fake {
    port: u16,
    asked: mpsc::UnboundedReceiver<Asked>,
    give: mpsc::UnboundedSender<Asked>,
    door: Option<JoinHandle<()>>,
    dir: TempDir,
}

impl Fake {
    pub(super) async fn start() -> Fake {
        let (give, asked) = mpsc::unbounded_channel();
        let mut fake = Fake { port: 0, asked, give, door: None, dir: tempfile::tempdir().unwrap() };
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

    /// The kubeconfig that leads here.
    pub(super) fn kubeconfig(&self) -> PathBuf {
        self.dir.path().join("config")
    }

    /// The file that is mounted from a ConfigMap in a cluster; not there at first.
    pub(super) fn net_conf(&self) -> PathBuf {
        self.dir.path().join("net-conf.json")
    }

    /// A store whose Node is `n1`.
    pub(super) fn store(&self) -> KubeStore {
        let options = KubeOptions {
            access: Access { url: None, kubeconfig: Some(self.kubeconfig()) },
            who: Who::Node("n1".to_owned()),
            prefix: PREFIX.to_owned(),
            net_config: self.net_conf(),
            set_condition: true,
        };
        KubeStore::new(options).unwrap()
    }

    /// Takes connections (again), on the port that it had.
    pub(super) async fn open(&mut self) {
        let listener = TcpListener::bind(("127.0.0.1", self.port)).await.unwrap();
        self.port = listener.local_addr().unwrap().port();
        let give = self.give.clone();
        self.door = Some(tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else { continue };
                // Whoever connects and says nothing is no request.
                if let Ok(asked) = Asked::read(stream).await
                    && give.send(asked).is_err()
                {
                    return;
                }
            }
        }));
    }

    /// Refuses connections; open watches are the test's to drop.
    pub(super) async fn close(&mut self) {
        if let Some(door) = self.door.take() {
            door.abort();
            let _ = door.await;
        }
    }

    /// The next request.
    pub(super) async fn asked(&mut self) -> Asked {
        tokio::time::timeout(LIMIT, self.asked.recv()).await.expect("a request").expect("the server runs")
    }

    /// The next request, which must be this.
    pub(super) async fn expect(&mut self, method: &str, path: &str) -> Asked {
        let asked = self.asked().await;
        assert!(asked.method == method && asked.path.starts_with(path), "{} {}", asked.method, asked.path);
        asked
    }

    /// The next request, which must be a watch that begins at this version, or with a list where there is none.
    pub(super) async fn watch(&mut self, from: Option<u64>) -> Stream {
        let asked = self.expect("GET", "/api/v1/nodes?watch=true&allowWatchBookmarks=true&").await;
        assert_eq!(asked.query("sendInitialEvents"), from.is_none().then_some("true"), "{}", asked.path);
        if let Some(from) = from {
            assert_eq!(asked.query("resourceVersion"), Some(&*from.to_string()), "{}", asked.path);
        }
        asked.stream().await
    }

    /// A watch that begins with the list of these nodes.
    pub(super) async fn list(&mut self, version: u64, nodes: &[FakeNode]) -> Stream {
        let mut stream = self.watch(None).await;
        for node in nodes {
            stream.event("ADDED", node).await;
        }
        stream.list_ends(version).await;
        stream
    }

    /// After a broken connection the store asks which version the cluster has; it knows no Node of its own.
    pub(super) async fn verifies(&mut self, version: u64) {
        let asked = self.expect("GET", "/api/v1/nodes?limit=1").await;
        assert_eq!(asked.path, "/api/v1/nodes?limit=1", "with a version a server may answer from what it remembers");
        asked.page(version, "", &[]).await;
    }
}

/// A clock that the test moves. Sockets work meanwhile, as they do not while tokio moves a paused clock by itself: it would take every
/// wait for the network for a time when nothing happens.
pub(super) struct Clock {
    _hold: std::sync::mpsc::Sender<()>,
}

impl Clock {
    /// The time stands still from now on.
    pub(super) fn stop() -> Clock {
        let (hold, end) = std::sync::mpsc::channel();
        // While a blocking task runs, tokio does not move a paused clock.
        tokio::task::spawn_blocking(move || end.recv());
        tokio::time::pause();
        Clock { _hold: hold }
    }

    /// Moves it, second by second, until this is there.
    pub(super) async fn until<T>(&self, what: impl Future<Output = T>) -> T {
        let mut what = std::pin::pin!(what);
        loop {
            tokio::select! {
                biased;
                there = &mut what => return there,
                () = self.second() => {}
            }
        }
    }

    /// Moves it by so much at once.
    pub(super) async fn jump(&self, time: Duration) {
        tokio::time::advance(time).await;
    }

    #[expect(clippy::disallowed_methods, reason = "sockets need real time while tokio's clock stands still")]
    async fn second(&self) {
        tokio::time::advance(Duration::from_secs(1)).await;
        // What others have to do now is done in real time.
        let _ = tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(3))).await;
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        tokio::time::resume();
    }
}
