// SPDX-License-Identifier: Apache-2.0
//! `weft ui`: shows the mesh, the address space, the nodes, the history of this node and what it does with a packet, as a page in a browser.
//!
//! It listens on 127.0.0.1 alone, reads, and never writes. The agent's socket is for root, so the page is not for every user of the host:
//! its address contains a random word. A page of another site cannot read it either, because the Host header must name this host.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::{self, Arc, PoisonError};
use std::time::Duration;

use anyhow::{Context, anyhow};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore};
use tokio::time::Instant;
use weft_doctor::explain::facts::Packet;

use crate::cli::explain::{ExplainTask, packet};
use crate::cli::questions::UiTask;
use crate::commands::{explain, mesh};
use crate::observe::clients_by_age::ClientsByAge;
use crate::observe::history::Query;
use crate::observe::http::{self, RequestLimits};
use crate::observe::mesh::cluster::Cluster;
use crate::observe::mesh::svg::{LOOKS, WayClass};
use crate::observe::socket;
use crate::observe::status::now_ms;

/// A file of the page.
struct PageFile {
    name: &'static str,
    /// Its content type.
    kind: &'static str,
    content: &'static str,
}

/// The files of the page.
const FILES: [PageFile; 5] = [
    PageFile { name: "", kind: "text/html; charset=utf-8", content: include_str!("ui/page.html") },
    script("map.js", include_str!("ui/map.js")),
    script("addresses.js", include_str!("ui/addresses.js")),
    script("page.js", include_str!("ui/page.js")),
    PageFile { name: "page.css", kind: "text/css; charset=utf-8", content: include_str!("ui/page.css") },
];

const fn script(name: &'static str, content: &'static str) -> PageFile {
    PageFile { name, kind: "text/javascript; charset=utf-8", content }
}

/// What a browser may do with an answer. The page needs nothing from elsewhere, and nothing may show it in a frame.
const HEADERS: [(&str, &str); 6] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
];
/// The beginning of a path that asks for an explanation.
const EXPLAIN: &str = "explain/";
/// All nodes are asked at most once in this time, however many pages are open.
const LIFETIME: Duration = Duration::from_secs(5);
/// The limits of a request. A browser sends the cookies of all pages of its host.
const REQUEST: RequestLimits = RequestLimits { time: Duration::from_secs(2), size: 400 << 10 };
/// Time limit for a request and its answer. All nodes may be asked for it.
const LIMIT: Duration = Duration::from_secs(90);
/// Maximum number of clients that are answered at once.
const MAX_CLIENTS: usize = 16;
/// Maximum number of clients that have not shown the word of the page. A further one disconnects the oldest of them.
const MAX_STRANGERS: usize = 32;
/// The page shows the history of this time.
const HISTORY: Duration = Duration::from_hours(24);
/// Maximum number of records that it shows.
const MAX_RECORDS: usize = 500;

/// Serves the page until the process ends.
///
/// # Errors
/// The port is in use, or standard output cannot be written.
pub async fn run(task: UiTask) -> anyhow::Result<ExitCode> {
    let listener = if task.listen_stdin {
        let listener = std::net::TcpListener::from(io::stdin().as_fd().try_clone_to_owned()?);
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener).context("standard input is no listening socket")?
    } else {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, task.port));
        TcpListener::bind(address).await.with_context(|| format!("listen on {address}: choose another --port"))?
    };
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| anyhow!("make the address of the page: {error}"))?;
    let token = format!("{:032x}", u128::from_be_bytes(random));
    let mut out = io::stdout();
    writeln!(out, "http://{}/{token}/", listener.local_addr()?).and_then(|()| out.flush())?;
    eprintln!("weft: open this address in a browser of this host; Ctrl-C ends the page");
    serve(listener, Arc::new(Ui::new(task, token))).await
}

async fn serve(listener: TcpListener, ui: Arc<Ui>) -> anyhow::Result<ExitCode> {
    loop {
        let (stream, _) = http::accept(&listener).await;
        // The lock is held until the client is in the list, so that it cannot leave the list before.
        let mut strangers = ui.strangers.lock().unwrap_or_else(PoisonError::into_inner);
        let ui = ui.clone();
        let client = tokio::spawn(async move {
            let answer = |request: Request<Incoming>| {
                let ui = &ui;
                async move { ui.answer(&request).await }
            };
            let _ = tokio::time::timeout(LIMIT, http::serve(stream, REQUEST, answer)).await;
        });
        strangers.add(client.abort_handle());
    }
}

/// Where the page gets what it shows.
struct Ui {
    task: UiTask,
    token: String,
    mesh: Mutex<Option<(Instant, Bytes)>>,
    /// One packet is explained at a time, because all rules of this node are read for it.
    explaining: Mutex<()>,
    /// The clients that have not shown the word. Every user of the host can be one of them.
    strangers: sync::Mutex<ClientsByAge>,
    /// The room for clients that have shown the word.
    room: Semaphore,
}

impl Ui {
    fn new(task: UiTask, token: String) -> Ui {
        let strangers = sync::Mutex::new(ClientsByAge::new(MAX_STRANGERS));
        Ui {
            task,
            token,
            mesh: Mutex::default(),
            explaining: Mutex::default(),
            strangers,
            room: Semaphore::new(MAX_CLIENTS),
        }
    }

    async fn answer<B>(&self, request: &Request<B>) -> Response<Full<Bytes>> {
        if !request.headers().get(HOST).and_then(|host| host.to_str().ok()).is_some_and(is_this_host) {
            return text(StatusCode::FORBIDDEN, "the Host header must be localhost or 127.0.0.1\n");
        }
        if request.method() != Method::GET && request.method() != Method::HEAD {
            return text(StatusCode::METHOD_NOT_ALLOWED, "this page only reads: use GET\n");
        }
        let path = request.uri().path();
        let Some(name) = path.strip_prefix('/').and_then(|path| path.strip_prefix(&*self.token)?.strip_prefix('/'))
        else {
            return text(StatusCode::NOT_FOUND, "weft ui has printed the address of the page\n");
        };
        // All nodes may be asked for the answer, which takes its time. Strangers must not end that.
        if let Some(id) = tokio::task::try_id() {
            self.strangers.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        }
        let Ok(_permit) = self.room.acquire().await else {
            return text(StatusCode::SERVICE_UNAVAILABLE, "weft ui is ending\n");
        };
        if let Some(PageFile { kind, content, .. }) = FILES.iter().find(|file| file.name == name) {
            return with_headers(http::reply(StatusCode::OK, kind, content.as_bytes()));
        }
        let json = match name {
            "mesh.json" => self.mesh().await,
            "status.json" => self.status().await,
            "history.json" => self.history().await,
            name if name.starts_with(EXPLAIN) => match question(&name[EXPLAIN.len()..]) {
                Ok(packet) => self.explain(packet).await,
                Err(error) => return text(StatusCode::BAD_REQUEST, format!("{error:#}\n")),
            },
            _ => return text(StatusCode::NOT_FOUND, "there is no such file\n"),
        };
        match json {
            Ok(json) => with_headers(http::reply(StatusCode::OK, "application/json", json)),
            Err(error) => text(StatusCode::BAD_GATEWAY, format!("{error:#}\n")),
        }
    }

    async fn mesh(&self) -> anyhow::Result<Bytes> {
        // Others wait here while all nodes are asked, and then get the same answer.
        let mut cached = self.mesh.lock().await;
        if let Some((_, json)) = cached.as_ref().filter(|(made, _)| made.elapsed() < LIFETIME) {
            return Ok(json.clone());
        }
        let status = socket::ask_status(&self.task.socket).await?;
        let port = self.task.peer_port.or(status.health_port);
        let notice = match port {
            Some(_) => "",
            None => "the agent of this node has no --healthz-port: only its own row is known",
        };
        let cluster = mesh::as_far_as_known(status, port).await;
        let json = compact(&cluster, notice)?;
        *cached = Some((Instant::now(), json.clone()));
        Ok(json)
    }

    async fn status(&self) -> anyhow::Result<Bytes> {
        Ok(serde_json::to_vec(&socket::ask_status(&self.task.socket).await?)?.into())
    }

    /// Explains a packet as `weft explain` does on this node, without probes.
    async fn explain(&self, packet: Packet) -> anyhow::Result<Bytes> {
        let _one = self.explaining.lock().await;
        let UiTask { socket, subnet_file, .. } = &self.task;
        let (socket, subnet_file) = (socket.clone(), subnet_file.clone());
        let explanation =
            explain::explanation(&ExplainTask { packet, subnet_file, socket, probe: false, json: true }).await?;
        Ok(serde_json::to_vec(&explanation)?.into())
    }

    async fn history(&self) -> anyhow::Result<Bytes> {
        let records = socket::ask_history(&self.task.socket, Query::of_last(HISTORY)).await?;
        let newest = records.get(records.len().saturating_sub(MAX_RECORDS)..).unwrap_or_default();
        Ok(serde_json::to_vec(newest)?.into())
    }
}

/// Returns the mesh as JSON for the page. Each way is five numbers, because there may be a million: the place of the node that receives,
/// the class of the way ([`WayClass`]), the loss, the round trip in microseconds and the path MTU. -1: unknown.
fn compact(cluster: &Cluster, notice: &str) -> anyhow::Result<Bytes> {
    let nodes = cluster.nodes.iter().map(|node| {
        let numbers = node.ways.iter().flat_map(|(to, way)| {
            let or_unknown = |number: Option<i64>| number.unwrap_or(-1);
            [
                i64::from(*to),
                WayClass::of(Some(way)) as i64,
                or_unknown(way.loss.map(i64::from)),
                or_unknown(way.rtt_us.map(i64::from)),
                or_unknown(way.mtu.map(i64::from)),
            ]
        });
        let mut value = serde_json::to_value(node)?;
        value["ways"] = numbers.collect::<Vec<i64>>().into();
        value["reasons"] = serde_json::to_value(&node.reasons)?;
        serde_json::value::to_raw_value(&value)
    });
    let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
    let meanings = LOOKS.map(|look| look.meaning);
    let value = serde_json::json!({ "at_ms": now_ms(), "notice": notice, "classes": meanings });
    let head = serde_json::to_string(&value)?;
    let nodes = serde_json::to_string(&nodes)?;
    Ok(format!("{},\"nodes\":{nodes}}}", head.trim_end_matches('}')).into())
}

/// Returns the packet that a path describes: `FROM/TO` or `FROM/TO/PORT`.
fn question(path: &str) -> anyhow::Result<Packet> {
    let mut parts = path.split('/');
    let mut address = |name: &str| {
        let text = parts.next().unwrap_or_default();
        text.parse::<IpAddr>().map_err(|_| anyhow!("{name}: give the IP address of a pod, a node or a service"))
    };
    let addresses = (address("From")?, address("To")?);
    let port = parts.next().map(|text| text.parse().map_err(|_| anyhow!("Port: give a number from 0 to 65535")));
    Ok(packet(addresses, None, port.transpose()?)?)
}

/// Returns true if a Host header names this host, with any port: `ssh -L` may lead another port here. A name that belongs to somebody
/// else may lead here, too, and its pages must not read this one (DNS rebinding).
fn is_this_host(host: &str) -> bool {
    let name = host.rsplit_once(':').filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()));
    let name = name.map_or(host, |(name, _)| name);
    ["localhost", "127.0.0.1", "[::1]"].iter().any(|ours| name.eq_ignore_ascii_case(ours))
}

fn text(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    with_headers(http::text(status, body))
}

/// Adds what a browser must know.
fn with_headers(mut response: Response<Full<Bytes>>) -> Response<Full<Bytes>> {
    for (name, value) in HEADERS {
        response.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio::sync::mpsc;

    use super::*;
    use crate::observe::history::HistoryRecord;
    use crate::observe::readiness::Readiness;
    use crate::observe::socket::{AgentSocket, Request as AgentRequest};

    fn ui() -> Ui {
        ui_of("/nonexistent/weft.sock".into())
    }

    /// Returns what serves the page of the agent on this socket.
    fn ui_of(socket: std::path::PathBuf) -> Ui {
        let subnet_file = "/nonexistent/subnet.env".into();
        let task = UiTask { socket, subnet_file, port: 0, peer_port: None, listen_stdin: false };
        Ui::new(task, "abc".to_owned())
    }

    async fn status_of(method: &str, host: &str, path: &str) -> u16 {
        let request = Request::builder().method(method).uri(path).header(HOST, host).body(()).unwrap();
        ui().answer(&request).await.status().as_u16()
    }

    /// Serves the page, and returns its address.
    async fn served(ui: &Arc<Ui>) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, ui.clone()));
        address
    }

    async fn ask(address: SocketAddr, file: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET /abc/{file} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn a_new_client_is_answered_although_many_are_silent() {
        let address = served(&Arc::new(ui())).await;
        let mut silent = Vec::new();
        // So many that waiting for the end of each one's time would take longer than the limit below.
        for _ in 0..20 * MAX_CLIENTS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let answer = tokio::time::timeout(Duration::from_secs(15), ask(address, "")).await;
        assert!(answer.expect("silent clients keep this one out").starts_with("HTTP/1.1 200"));
    }

    #[tokio::test]
    async fn silent_clients_do_not_disconnect_one_that_has_shown_the_word() {
        let ui = Arc::new(ui());
        let address = served(&ui).await;
        let asking_nodes = ui.mesh.lock().await;
        let answer = tokio::spawn(ask(address, "mesh.json"));
        while ui.room.available_permits() == MAX_CLIENTS {
            tokio::task::yield_now().await;
        }
        let mut silent = Vec::new();
        for _ in 0..=MAX_STRANGERS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        // The first one is disconnected when all are in the list.
        assert_eq!(silent[0].read(&mut [0]).await.unwrap_or_default(), 0);
        drop(asking_nodes);
        assert!(answer.await.unwrap().starts_with("HTTP/1.1 502"), "no agent answers");
    }

    #[test]
    fn the_files_are_small_and_name_no_other_site() {
        assert!(FILES.iter().map(|file| file.content.len()).sum::<usize>() <= 150 * 1024);
        assert!(FILES.iter().all(|file| !file.content.contains("://") && !file.content.contains("innerHTML")));
    }

    #[test]
    fn the_page_has_the_numbers_and_the_colours_of_the_classes_of_ways() {
        let content = |name: &str| FILES.iter().find(|file| file.name == name).unwrap().content;
        let names = LOOKS.map(|look| format!("{:?}", look.class).to_uppercase());
        let numbers = format!("const [{}] = Array({}).keys();", names.join(", "), names.len());
        assert!(content("page.js").contains(&numbers), "page.js must have the line\n{numbers}");
        for (number, look) in LOOKS.iter().enumerate() {
            let count = |colour: &str| content("page.css").matches(&format!(" --c{number}: {colour};")).count();
            // Dark is chosen by the browser, or by the user.
            assert_eq!((count(look.light), count(look.dark)), (1, 2), "{:?}", look.class);
        }
    }

    #[tokio::test]
    async fn names_of_others_methods_that_write_and_addresses_without_the_word_are_refused() {
        for host in ["127.0.0.1:8471", "localhost:9", "LOCALHOST", "[::1]:8471"] {
            assert_eq!(status_of("GET", host, "/abc/").await, 200, "{host}");
        }
        for host in
            ["evil.example", "evil.example:8471", "127.0.0.1.evil.example:8471", "", "localhost:8471@evil", "10.0.0.1"]
        {
            assert_eq!(status_of("GET", host, "/abc/").await, 403, "{host}");
        }
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
            assert_eq!(status_of(method, "localhost", "/abc/status.json").await, 405, "{method}");
        }
        for path in ["/", "/abc", "/abd/", "/abcd/", "//abc/", "/abc/../abc/", "/abc/x", "/x/abc/"] {
            assert_eq!(status_of("GET", "localhost", path).await, 404, "{path}");
        }
        assert_eq!(status_of("GET", "localhost", "/abc/status.json").await, 502, "no agent answers");
        assert_eq!(status_of("GET", "evil.example", "/abc/explain/10.5.1.2/10.5.2.2").await, 403);
        assert_eq!(status_of("POST", "localhost", "/abc/explain/10.5.1.2/10.5.2.2").await, 405);
        let without = Request::get("/abc/").body(()).unwrap();
        assert_eq!(ui().answer(&without).await.status(), 403);
    }

    #[tokio::test]
    async fn a_question_that_describes_no_packet_is_refused_with_the_reason() {
        assert_eq!(
            question("fd00::2/fd00:1::2/53").unwrap(),
            packet(("fd00::2".parse().unwrap(), "fd00:1::2".parse().unwrap()), None, Some(53)).unwrap()
        );
        for (path, words) in [
            ("", "From: give the IP address"),
            ("10.5.1.2", "To: give the IP address"),
            ("10.5.1.2/web", "To: give the IP address"),
            ("10.5.1.2/fd00::1", "different families"),
            ("10.5.1.2/224.0.0.1", "224.0.0.1 is not the address of one machine"),
            ("10.5.1.2/10.5.2.2/70000", "Port: give a number"),
            ("10.5.1.2/10.5.2.2/", "Port: give a number"),
        ] {
            let error = question(path).unwrap_err().to_string();
            assert!(error.contains(words), "{path}: {error}");
            assert_eq!(status_of("GET", "localhost", &format!("/abc/explain/{path}")).await, 400, "{path}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn every_answer_forbids_scripts_from_elsewhere_frames_and_copies() {
        let ui = ui();
        *ui.mesh.lock().await = Some((Instant::now(), Bytes::from_static(b"{}")));
        for (path, status) in [("/abc/", 200), ("/abc/mesh.json", 200), ("/abc/status.json", 502), ("/", 404)] {
            let request = Request::get(path).header(HOST, "localhost").body(()).unwrap();
            let answer = ui.answer(&request).await;
            assert_eq!(answer.status(), status, "{path}");
            let policy = answer.headers()["content-security-policy"].to_str().unwrap();
            assert!(policy.starts_with("default-src 'none'; script-src 'self'"), "{path}: {policy}");
            for (name, value) in [("x-content-type-options", "nosniff"), ("x-frame-options", "DENY")] {
                assert_eq!(answer.headers()[name], value, "{path}");
            }
            assert_eq!(answer.headers()["cache-control"], "no-store", "{path}");
        }
    }

    /// Each open page asks again and again, and an answer asks every node of the cluster.
    #[tokio::test(start_paused = true)]
    async fn all_nodes_are_asked_at_most_once_in_five_seconds() {
        let ui = ui();
        *ui.mesh.lock().await = Some((Instant::now(), Bytes::from_static(b"{}")));
        let request = Request::get("/abc/mesh.json").header(HOST, "localhost").body(()).unwrap();
        let moment = Duration::from_millis(1);
        tokio::time::advance(LIFETIME - moment).await;
        assert_eq!(ui.answer(&request).await.status(), 200, "the answer of before");
        tokio::time::advance(moment).await;
        assert_eq!(ui.answer(&request).await.status(), 502, "the agent is asked again, and there is none");
    }

    #[tokio::test]
    async fn of_a_long_history_the_newest_records_of_the_last_day_are_shown() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weft.sock");
        let mut socket = AgentSocket::bind(&path).unwrap();
        let (ask, mut asked) = mpsc::channel(1);
        tokio::spawn(async move { socket.serve(ask, Readiness::new()).await });
        let agent = tokio::spawn(async move {
            let Some(AgentRequest::History(query, reply)) = asked.recv().await else { panic!("another question") };
            let line = |seq| serde_json::to_string(&HistoryRecord { seq, ..HistoryRecord::default() }).unwrap().into();
            reply.send((1..=MAX_RECORDS as u64 + 100).map(line).collect()).unwrap();
            query
        });
        let day_ago = now_ms() - 24 * 3600 * 1000;
        let request = Request::get("/abc/history.json").header(HOST, "localhost").body(()).unwrap();
        let answer = ui_of(path).answer(&request).await;
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let records: Vec<HistoryRecord> = serde_json::from_slice(&body).unwrap();
        assert_eq!((records.len(), records[0].seq, records[MAX_RECORDS - 1].seq), (MAX_RECORDS, 101, 600));
        let page = FILES.iter().find(|file| file.name.is_empty()).unwrap().content;
        assert!(page.contains(&format!("the newest {MAX_RECORDS} records")));
        let Query { since_ms, after } = agent.await.unwrap();
        // Somebody may set the clock meanwhile.
        assert!(after == 0 && since_ms.abs_diff(day_ago) < 3600 * 1000, "{since_ms} instead of {day_ago}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_waits_while_there_is_no_room_for_it() {
        let ui = ui();
        let others = ui.room.acquire_many(MAX_CLIENTS as u32).await.unwrap();
        let request = Request::get("/abc/").header(HOST, "localhost").body(()).unwrap();
        let mut answer = std::pin::pin!(ui.answer(&request));
        assert!(tokio::time::timeout(LIMIT, &mut answer).await.is_err());
        drop(others);
        assert_eq!(answer.await.status(), 200);
    }
}
