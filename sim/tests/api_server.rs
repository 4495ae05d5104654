// SPDX-License-Identifier: Apache-2.0
//! Compares the simulated API server with a real one: the same random requests, by the same client library, must get the same codes,
//! reasons, Nodes and events.
//!
//! The versions of the two servers differ, because a real one writes other objects, too. So the test counts the writes of Nodes, and compares
//! after how many of them a version is.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are not inside #[test] themselves

use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, header};
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use weft_sim::api::ApiServer;
use weft_sim::chance::Chance;
use weft_sim::nodes::Nodes;
use weft_sim::wire::Wire;

#[path = "../../subnet/tests/kube/server.rs"]
mod real;

const NODES: &str = "/api/v1/nodes";
const STEPS: usize = 500;
/// It only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(120);
/// Stands for a version in a request. The two servers have different ones.
const VERSION: &str = "@version";
/// Stands for a token that continues a list.
const TOKEN: &str = "@token";

/// A request. Both servers get the same one, each with its own versions.
#[derive(Debug, Clone)]
struct Asked {
    method: Method,
    path: String,
    body: Value,
    /// The write whose version stands for [`VERSION`].
    write: usize,
}

impl Asked {
    fn get(query: &str, write: usize) -> Asked {
        Asked { method: Method::GET, path: format!("{NODES}{query}"), body: Value::Null, write }
    }
}

/// One of the servers.
struct Side {
    client: Client,
    /// The version after each write. The first one is from before the first write.
    versions: Vec<u64>,
    /// A watch of everything from the beginning on.
    all: Lines,
    /// Where the next page begins.
    token: String,
}

/// The events of a watch.
struct Lines {
    body: Body,
    rest: Vec<u8>,
}

impl Lines {
    /// Returns the next event, or `None` after the last one.
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                return Some(serde_json::from_slice(&line).unwrap());
            }
            let frame = tokio::time::timeout(LIMIT, self.body.frame()).await.expect("the next event comes")?;
            self.rest.extend(frame.unwrap().into_data().unwrap());
        }
    }
}

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().expect("a version").parse().expect("a number")
}

impl Side {
    async fn new(client: Client) -> Side {
        let (body, rest) = (Body::empty(), Vec::new());
        let mut side = Side { client, versions: Vec::new(), all: Lines { body, rest }, token: String::new() };
        side.follow_all().await;
        side
    }

    /// Begins to watch everything that is written from now on.
    async fn follow_all(&mut self) {
        let (_, list) = self.ask(&Asked::get("", 0)).await;
        let version = version(&list);
        if self.versions.is_empty() {
            self.versions.push(version);
        }
        let (code, lines) = self.open(&Asked::get(&format!("?watch=true&resourceVersion={version}"), 0)).await;
        assert_eq!(code, 200);
        self.all = lines.unwrap();
    }

    async fn send(&self, asked: &Asked) -> http::Response<Body> {
        let known = |text: &str| {
            let version = self.versions.get(asked.write).copied().unwrap_or_default().to_string();
            text.replace(VERSION, &version).replace(TOKEN, &self.token)
        };
        let kind = match asked.method {
            Method::PATCH => "application/strategic-merge-patch+json",
            _ => "application/json",
        };
        let body = if asked.body.is_null() { Vec::new() } else { known(&asked.body.to_string()).into_bytes() };
        let request = Request::builder().method(asked.method.clone()).uri(known(&asked.path));
        let request = request.header(header::CONTENT_TYPE, kind).body(Body::from(body)).unwrap();
        let answer = tokio::time::timeout(LIMIT, self.client.send(request)).await;
        answer.unwrap_or_else(|_| panic!("no answer to {asked:?}")).unwrap()
    }

    async fn ask(&self, asked: &Asked) -> (u16, Value) {
        let answer = self.send(asked).await;
        let code = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (code, serde_json::from_slice(&body).unwrap_or_default())
    }

    /// Begins a watch.
    async fn open(&self, asked: &Asked) -> (u16, Result<Lines, Value>) {
        let answer = self.send(asked).await;
        let code = answer.status().as_u16();
        if code == 200 {
            return (code, Ok(Lines { body: answer.into_body(), rest: Vec::new() }));
        }
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (code, Err(serde_json::from_slice(&body).unwrap_or_default()))
    }

    /// Returns after how many writes a version is.
    fn writes_before(&self, version: u64) -> usize {
        self.versions.partition_point(|known| *known <= version)
    }

    /// Returns what both servers must agree on about an object.
    fn describe(&self, object: &Value) -> String {
        let metadata = &object["metadata"];
        match object["kind"].as_str() {
            Some("Status") => {
                let of_success = object["status"] == "Success";
                if of_success { "done".to_owned() } else { format!("{} {}", object["code"], object["reason"]) }
            }
            Some("NodeList") => {
                let items = object["items"].as_array().map_or(&[][..], Vec::as_slice);
                let items: Vec<String> = items.iter().map(|node| self.describe(node)).collect();
                let more = metadata["continue"].as_str().is_some_and(|token| !token.is_empty());
                format!("{} more {more} {}", self.writes_before(version(object)), items.join("\n"))
            }
            // The items of a list do not name their kind.
            _ => {
                let at = self.versions.binary_search(&version(object)).expect("the version of a write");
                let texts = |name: &str| metadata[name].as_object().map_or(String::new(), |all| json!(all).to_string());
                let texts = |name: &str| texts(name).replace("{}", "");
                let spec = format!("{} {}", object["spec"]["podCIDR"], object["spec"]["podCIDRs"]);
                let conditions = object["status"]["conditions"].as_array().map_or(String::new(), |all| {
                    let shown = |it: &Value| {
                        let time = |name: &str| it[name].as_str().unwrap_or("never").to_owned();
                        let (beat, change) = (time("lastHeartbeatTime"), time("lastTransitionTime"));
                        format!("{}={} {} {} {beat} {change}", it["type"], it["status"], it["reason"], it["message"])
                    };
                    // Their order says nothing.
                    let mut shown: Vec<String> = all.iter().map(shown).collect();
                    shown.sort();
                    shown.join(", ")
                });
                let name = &metadata["name"];
                format!("{name}@{at} {} {} {spec} [{conditions}]", texts("labels"), texts("annotations"))
            }
        }
    }

    fn describe_event(&self, event: &Value) -> String {
        let (kind, object) = (event["type"].as_str().unwrap(), &event["object"]);
        if kind != "BOOKMARK" {
            return format!("{kind} {}", self.describe(object));
        }
        let ends_list = &object["metadata"]["annotations"]["k8s.io/initial-events-end"];
        format!("BOOKMARK {} {ends_list}", self.writes_before(version(object)))
    }

    /// Returns the events up to that of this write, or up to the end of the watch.
    async fn events(&self, lines: &mut Lines, last: usize) -> Vec<String> {
        let mut all = Vec::new();
        while let Some(event) = lines.next().await {
            let shown = self.describe_event(&event);
            // A real server sometimes repeats the last bookmark.
            if all.last() != Some(&shown) {
                all.push(shown);
            }
            let is_change = event["type"] != "BOOKMARK" && event["type"] != "ERROR";
            if is_change && version(&event["object"]) >= self.versions[last] {
                break;
            }
        }
        all
    }
}

/// Both servers.
struct Pair {
    model: ApiServer,
    simulated: Side,
    real: Side,
    /// The name of the Node of each write. The first one is no write.
    written: Vec<String>,
    chance: Chance,
    /// Counts patches, so that they differ.
    count: usize,
}

impl Pair {
    fn last(&self) -> usize {
        self.written.len() - 1
    }

    /// Sends a request to both, and compares the answers. Returns the HTTP code.
    async fn both(&mut self, asked: &Asked) -> u16 {
        let (code, answer) = self.simulated.ask(asked).await;
        let (real_code, real_answer) = self.real.ask(asked).await;
        assert_eq!((code, &answer["reason"]), (real_code, &real_answer["reason"]), "{asked:?}: {answer} {real_answer}");
        let newest = |side: &Side, object: &Value| version(object) > *side.versions.last().unwrap();
        let wrote = match asked.method {
            Method::DELETE => code == 200,
            Method::GET => false,
            _ => code < 300 && newest(&self.simulated, &answer),
        };
        if code < 300 && matches!(asked.method, Method::POST | Method::PATCH) {
            assert_eq!(wrote, newest(&self.real, &real_answer), "a new version: {asked:?}: {answer} {real_answer}");
        }
        if wrote {
            self.compare_write(asked).await;
        }
        if code < 300 {
            let (one, other) = (self.simulated.describe(&answer), self.real.describe(&real_answer));
            assert_eq!(one, other, "simulated and real answer to {asked:?}");
            self.simulated.token = answer["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
            self.real.token = real_answer["metadata"]["continue"].as_str().unwrap_or_default().to_owned();
        }
        code
    }

    /// Waits until both report a write, and compares the events.
    async fn compare_write(&mut self, asked: &Asked) {
        let mut shown = Vec::new();
        for side in [&mut self.simulated, &mut self.real] {
            let event = side.all.next().await.expect("the watch goes on");
            side.versions.push(version(&event["object"]));
            shown.push((side.describe_event(&event), event["object"]["metadata"]["name"].as_str().unwrap().to_owned()));
        }
        assert_eq!(shown[0], shown[1], "simulated and real event of {asked:?}");
        self.written.push(shown.remove(0).1);
    }

    /// Chooses a name. There are few of them, so that requests meet each other.
    fn name(&mut self) -> String {
        format!("n{}", self.chance.below(5))
    }

    /// Chooses a write of this Node or another one.
    fn any_write(&mut self, name: &str) -> usize {
        let of_node: Vec<usize> = (1..self.written.len()).filter(|write| self.written[*write] == name).collect();
        match self.chance.below(4) {
            0 => self.chance.below(self.written.len()),
            1 if !of_node.is_empty() => of_node[self.chance.below(of_node.len())],
            _ => of_node.last().copied().unwrap_or(0),
        }
    }

    /// Returns random annotations or labels. Some of them remove a key.
    fn texts(&mut self) -> Value {
        let keys = 1 + self.chance.below(2);
        let mut all = json!({});
        for _ in 0..keys {
            let (key, value) = (self.chance.below(3), self.chance.below(4));
            all[format!("weft.test/k{key}")] =
                if self.chance.percent(25) { Value::Null } else { json!(format!("v{value}")) };
        }
        all
    }

    fn cidr(&mut self) -> Value {
        let net = format!("10.5.{}.0/24", self.chance.below(3));
        json!({"podCIDR": net, "podCIDRs": [net]})
    }

    fn condition(&mut self) -> Value {
        let time = |second: usize| json!(format!("2026-01-01T00:00:0{second}Z"));
        let kind = ["NetworkUnavailable", "Ready", "DiskPressure"][self.chance.below(3)];
        let status = ["True", "False", "Unknown"][self.chance.below(3)];
        let mut condition = json!({"type": kind, "status": status, "lastHeartbeatTime": time(self.chance.below(9))});
        if self.chance.percent(50) {
            condition["reason"] = json!(format!("R{}", self.chance.below(3)));
            condition["message"] = json!("a text");
            condition["lastTransitionTime"] = time(self.chance.below(9));
        }
        condition
    }

    /// Returns a random patch, of a Node or of its status.
    fn patch(&mut self) -> Asked {
        let name = self.name();
        let mut body = json!({});
        match self.chance.below(10) {
            0..5 => body["metadata"] = json!({"annotations": self.texts()}),
            5 => body["metadata"] = json!({"labels": self.texts()}),
            6 | 7 => body["status"] = json!({"conditions": [self.condition()]}),
            8 => {
                body["status"] = json!({"conditions": [self.condition(), self.condition()]});
                if body["status"]["conditions"][0]["type"] == body["status"]["conditions"][1]["type"] {
                    body["status"]["conditions"] = json!([self.condition()]);
                }
            }
            _ => body["spec"] = self.cidr(),
        }
        if self.chance.percent(50) {
            body["metadata"]["resourceVersion"] = json!(VERSION);
        }
        let part = if self.chance.percent(50) { "/status" } else { "" };
        let write = self.any_write(&name);
        Asked { method: Method::PATCH, path: format!("{NODES}/{name}{part}"), body, write }
    }

    fn creation(&mut self) -> Asked {
        let mut body = json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": self.name()}});
        if self.chance.percent(50) {
            let mut texts = self.texts();
            texts.as_object_mut().unwrap().retain(|_, value| !value.is_null());
            body["metadata"]["annotations"] = texts;
        }
        if self.chance.percent(30) {
            body["spec"] = self.cidr();
        }
        Asked { method: Method::POST, path: NODES.to_owned(), body, write: 0 }
    }

    /// Writes to this Node something that no write before has written.
    async fn mark(&mut self, name: &str) {
        self.count += 1;
        let body = json!({"metadata": {"annotations": {"weft.test/mark": self.count.to_string()}}});
        let patch = Asked { method: Method::PATCH, path: format!("{NODES}/{name}"), body, write: 0 };
        if self.both(&patch).await == 404 {
            let body = json!({"kind": "Node", "apiVersion": "v1", "metadata": {"name": name}});
            self.both(&Asked { method: Method::POST, path: NODES.to_owned(), body, write: 0 }).await;
        }
    }

    /// Lists the Nodes, page by page. Writes between the pages must not show.
    async fn list(&mut self) {
        let query = match self.chance.below(9) {
            0 | 1 => "?",
            2 | 3 => "?resourceVersion=0",
            4 => "?resourceVersion=@version",
            5 => "?resourceVersion=@version&resourceVersionMatch=NotOlderThan",
            6 => "?resourceVersion=0&resourceVersionMatch=NotOlderThan",
            _ => "?resourceVersion=@version&resourceVersionMatch=Exact",
        };
        let limit =
            if self.chance.percent(50) { format!("&limit={}", 1 + self.chance.below(4)) } else { String::new() };
        let write = self.chance.below(self.written.len());
        let mut asked = Asked::get(&format!("{query}{limit}"), write);
        while self.both(&asked).await < 300 && !self.simulated.token.is_empty() {
            let tokens = (self.simulated.token.clone(), self.real.token.clone());
            if self.chance.percent(50) {
                let patch = self.patch();
                self.both(&patch).await;
            }
            (self.simulated.token, self.real.token) = tokens;
            asked = Asked::get(&format!("?continue={TOKEN}{limit}"), write);
        }
    }

    /// Watches the Nodes in both, from a version or from the beginning, until a write that follows.
    async fn watch(&mut self) {
        let (name, write) = (self.name(), self.chance.below(self.written.len()));
        let begin = match self.chance.below(10) {
            0 => "resourceVersion=0",
            1 => "resourceVersion=",
            2 => "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=0",
            3 => "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=@version",
            4 => "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=",
            _ => "resourceVersion=@version",
        };
        let mut query = format!("?watch=true&{begin}");
        if self.chance.percent(60) {
            query.push_str("&allowWatchBookmarks=true");
        }
        if self.chance.percent(40) {
            query.push_str(&format!("&fieldSelector=metadata.name%3D{name}"));
        }
        let asked = Asked::get(&query, write);
        let mut streams = self.open_both(&asked).await;
        self.mark(&name).await;
        self.same_events(&asked, &mut streams).await;
    }

    async fn open_both(&self, asked: &Asked) -> [Lines; 2] {
        let [one, other] = [self.simulated.open(asked).await, self.real.open(asked).await];
        assert_eq!((one.0, other.0), (200, 200), "{asked:?}: {:?} {:?}", one.1.err(), other.1.err());
        [one.1.unwrap(), other.1.unwrap()]
    }

    /// Both watches must show the same events up to the last write, or up to their end.
    async fn same_events(&self, asked: &Asked, [simulated, real]: &mut [Lines; 2]) -> Vec<String> {
        let last = self.last();
        let (one, other) = tokio::join!(self.simulated.events(simulated, last), self.real.events(real, last));
        assert_eq!(one, other, "simulated and real events of {asked:?}");
        one
    }

    async fn step(&mut self) {
        match self.chance.below(20) {
            0 | 1 => {
                let creation = self.creation();
                self.both(&creation).await;
            }
            2 => {
                let path = format!("{NODES}/{}", self.name());
                self.both(&Asked { method: Method::DELETE, path, body: Value::Null, write: 0 }).await;
            }
            3 => {
                let name = self.name();
                self.both(&Asked::get(&format!("/{name}"), 0)).await;
            }
            4..14 => {
                let patch = self.patch();
                self.both(&patch).await;
            }
            14..17 => self.list().await,
            _ => self.watch().await,
        }
    }
}

/// Returns a client of the real server with all rights, which sends each request once.
async fn client(server: &real::Server) -> Client {
    let kubeconfig = kube::config::Kubeconfig::read_from(server.kubeconfig("admin")).unwrap();
    let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.unwrap();
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

async fn pair() -> (Arc<real::Server>, Pair) {
    let process = real::Server::private("").await;
    let model = ApiServer::start();
    let simulated = Side::new(model.client(&Wire::default())).await;
    let real = Side::new(client(&process).await).await;
    let (written, chance) = (vec![String::new()], Chance::new(1, 7));
    (process, Pair { model, simulated, real, written, chance, count: 0 })
}

#[tokio::test]
async fn the_simulated_api_server_answers_as_a_real_one() {
    let (_process, mut pair) = pair().await;
    for _ in 0..STEPS {
        pair.step().await;
    }
    assert!(pair.last() > STEPS / 4, "many of the requests write something: {}", pair.last());
}

/// What happens at the edges of the versions that a server has.
#[tokio::test]
async fn versions_that_a_server_does_not_have_are_refused_in_the_same_way() {
    let (process, mut pair) = pair().await;
    for name in ["n0", "n1", "n2", "n0"] {
        pair.mark(name).await;
    }
    for query in [
        "?resourceVersion=x",
        "?resourceVersion=0&resourceVersionMatch=Exact",
        "?resourceVersionMatch=NotOlderThan",
        "?resourceVersion=0&resourceVersionMatch=Never",
        "?watch=true&sendInitialEvents=true",
        "?watch=true&sendInitialEvents=true&resourceVersion=0",
        "?watch=true&resourceVersionMatch=NotOlderThan&resourceVersion=0",
        "?continue=nonsense",
        // A version that the server has not reached.
        "?resourceVersion=9000000",
        "?resourceVersion=9000000&resourceVersionMatch=Exact",
    ] {
        let asked = Asked::get(query, 0);
        let code = pair.both(&asked).await;
        assert!(code >= 400, "{query}: {code}");
    }
    let list = "&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    let asked = Asked::get(&format!("?watch=true{list}&resourceVersion=9000000"), 0);
    let mut streams = pair.open_both(&asked).await;
    assert_eq!(pair.same_events(&asked, &mut streams).await, [r#"ERROR 504 "Timeout""#]);
    // A watch of such a version waits in silence. It ends, like each watch, when its time is over.
    let asked = Asked::get("?watch=true&timeoutSeconds=2&resourceVersion=9000000", 0);
    let mut streams = pair.open_both(&asked).await;
    assert_eq!(pair.same_events(&asked, &mut streams).await, [""; 0]);

    // Shortly before its end, a watch that wants bookmarks gets one. The version in it is the last one, which is of another Node.
    pair.mark("n1").await;
    let only = "&fieldSelector=metadata.name%3Dn2";
    for wanted in ["&allowWatchBookmarks=true", ""] {
        let asked = Asked::get(&format!("?watch=true&timeoutSeconds=10&resourceVersion=@version{only}{wanted}"), 0);
        let mut streams = pair.open_both(&asked).await;
        pair.mark("n0").await;
        let shown = pair.same_events(&asked, &mut streams).await;
        assert_eq!(shown.len(), if wanted.is_empty() { 1 } else { 2 }, "{shown:?}");
    }

    // The rest of a list that begins here comes too late.
    pair.both(&Asked::get("?limit=1", 0)).await;
    let tokens = (pair.simulated.token.clone(), pair.real.token.clone());
    pair.mark("n2").await;
    process.forget().await;
    pair.model.change(Nodes::compact);
    pair.model.restart_with(pair.model.read(Nodes::clone));
    for side in [&mut pair.simulated, &mut pair.real] {
        side.follow_all().await;
    }
    (pair.simulated.token, pair.real.token) = tokens;
    for query in ["?continue=@token&limit=1", "?resourceVersion=@version&resourceVersionMatch=Exact"] {
        assert_eq!(pair.both(&Asked::get(query, 2)).await, 410, "{query}");
    }
    let asked = Asked::get("?watch=true&resourceVersion=@version", 2);
    let mut streams = pair.open_both(&asked).await;
    assert_eq!(pair.same_events(&asked, &mut streams).await, [r#"ERROR 410 "Expired""#]);
    // What is left works on.
    pair.mark("n0").await;
    pair.both(&Asked::get("?resourceVersion=0", 0)).await;
    pair.watch().await;
}
