// SPDX-License-Identifier: Apache-2.0
//! The agent's Unix socket. A request is one line of JSON, and so is the answer. The mode is 0600, so only root may ask.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::stat::{Mode, umask};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::observe::history::{HistoryRecord, Query};
use crate::observe::mesh::row::RowAnswer;
use crate::observe::preview::{Operation, Preview, PreviewOp};
use crate::observe::readiness::Readiness;
use crate::observe::status::Status;
use crate::processes::is_stopped;

/// Time limit for a request and its answer.
const LIMIT: Duration = Duration::from_secs(5);
/// Time limit for an answer that may have hundreds of thousands of lines.
const LONG_LIMIT: Duration = Duration::from_secs(60);
/// Number of operations that are written to the socket at once. Other tasks get a turn in between.
const SLICE: usize = 512;
/// If a socket does not answer within this time, an agent holds it that is busy or stopped.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// Time between two looks whether the socket is still there, while nobody asks.
const CHECK: Duration = Duration::from_secs(10);
/// Maximum size of a request in bytes.
const MAX_REQUEST: u64 = 4096;

/// Why the agent cannot say what its next full pass would write. The text goes over the socket.
#[derive(Debug, thiserror::Error)]
pub enum NoPlan {
    /// The agent is starting. This is why it is not ready.
    #[error("there is no plan before the node has its lease: {0}")]
    NoLease(String),
    /// The kernel cannot be read.
    #[error("read the kernel's tables: {0}")]
    Kernel(io::Error),
}

/// Why the node has no new key. The text goes over the socket.
#[derive(Debug, thiserror::Error)]
pub enum NoNewKey {
    /// The agent is starting.
    #[error("the node has no lease yet")]
    NoLease,
    /// The change of the key does not begin, or does not end. The node knows the reasons.
    #[error("{0}")]
    NoChange(Box<dyn std::error::Error + Send + Sync>),
}

/// A request to the agent. It answers between two passes.
#[derive(Debug)]
pub enum Request {
    /// `weft status`.
    Status(oneshot::Sender<Status>),
    /// `GET /mesh` on the health port.
    Mesh(oneshot::Sender<RowAnswer>),
    /// `weft plan`.
    Plan(oneshot::Sender<Result<Vec<PreviewOp>, NoPlan>>),
    /// `weft history`. The answer is one line of JSON for each record.
    History(Query, oneshot::Sender<Vec<Arc<str>>>),
    /// `weft rotate-key`. The answer is the new public key.
    RotateKey(oneshot::Sender<Result<String, NoNewKey>>),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Question {
    Status {},
    Plan {},
    History(Query),
    RotateKey {},
    /// The request of the CNI plugin for each pod. It is answered without the agent's loop, so also during a pass.
    Ready {},
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Status(Box<Status>),
    Plan(Preview),
    History(Vec<HistoryRecord>),
    NewKey(String),
    Ready { ready: bool, problems: Vec<String> },
    Error(String),
}

/// The listening socket. Its file is removed when this is dropped.
#[derive(Debug)]
pub struct AgentSocket {
    listener: UnixListener,
    path: PathBuf,
    /// An earlier agent left its socket here.
    was_left: bool,
}

impl AgentSocket {
    /// Creates the socket, and its directory if there is none. A file that a killed agent has left is removed.
    ///
    /// # Errors
    /// `AddrInUse`: another agent answers on this socket. Otherwise, the error of the file system.
    pub fn bind(path: &Path) -> io::Result<AgentSocket> {
        if answers(path) {
            let text = format!(
                "another agent answers on {}: stop it, or give this one a --subnet-file of its own, from which its socket follows",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        let was_left = was_left(path);
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        Ok(AgentSocket { listener: listen(path)?, path: path.to_owned(), was_left })
    }

    /// Returns true if the agent before this one left its socket here since the boot: one that is stopped removes it.
    pub fn was_left(&self) -> bool {
        self.was_left
    }

    /// Answers requests until dropped. If somebody deletes the socket, it is made again.
    pub async fn serve(&mut self, agent: mpsc::Sender<Request>, readiness: Readiness) {
        let mut clients = tokio::task::JoinSet::new();
        loop {
            while clients.try_join_next().is_some() {}
            match timeout(CHECK, self.listener.accept()).await {
                Err(_) => self.restore(),
                Ok(Ok((stream, _))) => {
                    let (agent, readiness) = (agent.clone(), readiness.clone());
                    clients.spawn(client(stream, agent, readiness));
                }
                Ok(Err(error)) => {
                    tracing::debug!(%error, "accept on the socket");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// Makes the socket again if its file is gone. Without it, nobody can ask the agent.
    fn restore(&mut self) {
        let is_gone = fs::symlink_metadata(&self.path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if !is_gone {
            return;
        }
        match listen(&self.path) {
            Ok(listener) => {
                tracing::info!(socket = %self.path.display(), "the socket was deleted: it is made again");
                self.listener = listener;
            }
            Err(error) => tracing::debug!(%error, "make the socket again"),
        }
    }
}

/// Returns true if there is a socket of this boot, which is one in a file system that a boot empties. One that is kept on a disk says
/// nothing about the agent, because the machine itself may have lost its power.
fn was_left(path: &Path) -> bool {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|about| about.file_type().is_socket());
    is_socket && statfs(path).is_ok_and(|about| about.filesystem_type() == TMPFS_MAGIC)
}

/// Creates the socket and its directory.
fn listen(path: &Path) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
    }
    // The socket must not be open to other users, not even between bind and chmod.
    let before = umask(Mode::from_bits_truncate(0o177));
    let bound = UnixListener::bind(path);
    umask(before);
    bound
}

impl Drop for AgentSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns true if an agent holds this socket. It answers, or it accepts the request and does not answer, because it is
/// stopped or still starting. If the connection ends without an answer, there is no agent: between fork and exec, the child
/// of a killed agent holds the listener of its parent.
pub fn answers(path: &Path) -> bool {
    let ask = || {
        let mut stream = std::os::unix::net::UnixStream::connect(path)?;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.write_all(b"{\"ready\":{}}\n")?;
        stream.read(&mut [0])
    };
    match ask() {
        Ok(bytes) => bytes > 0,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

impl Question {
    fn limit(&self) -> Duration {
        match self {
            Question::Plan {} | Question::History(_) | Question::RotateKey {} => LONG_LIMIT,
            Question::Status {} | Question::Ready {} => LIMIT,
        }
    }
}

async fn client(mut stream: UnixStream, agent: mpsc::Sender<Request>, readiness: Readiness) -> io::Result<()> {
    let mut line = String::new();
    let (read, mut write) = stream.split();
    let mut read = BufReader::new(read.take(MAX_REQUEST));
    tokio::time::timeout(LIMIT, read.read_line(&mut line)).await??;
    let (limit, question) = match serde_json::from_str::<Question>(&line) {
        Ok(question) => (question.limit(), Ok(question)),
        Err(error) => (LIMIT, Err(error)),
    };
    let answered = async {
        let answer = match question {
            Ok(Question::Status {}) => match ask(&agent, Request::Status).await {
                Some(status) => Answer::Status(Box::new(status)),
                None => Answer::ending(),
            },
            Ok(Question::Plan {}) => match ask(&agent, Request::Plan).await {
                Some(Ok(operations)) => return write_plan(&mut write, operations).await,
                Some(Err(reason)) => Answer::Error(reason.to_string()),
                None => Answer::ending(),
            },
            Ok(Question::History(query)) => match ask(&agent, |reply| Request::History(query, reply)).await {
                Some(lines) => return write_history(&mut write, &lines).await,
                None => Answer::ending(),
            },
            Ok(Question::RotateKey {}) => match ask(&agent, Request::RotateKey).await {
                Some(Ok(key)) => Answer::NewKey(key),
                Some(Err(reason)) => Answer::Error(reason.to_string()),
                None => Answer::ending(),
            },
            Ok(Question::Ready {}) => {
                let problems = readiness.reasons();
                Answer::Ready { ready: problems.is_empty(), problems }
            }
            Err(error) => Answer::Error(format!("this version does not know the question: {error}")),
        };
        let mut text = serde_json::to_string(&answer)?;
        text.push('\n');
        write.write_all(text.as_bytes()).await
    };
    tokio::time::timeout(limit, answered).await?
}

impl Answer {
    fn ending() -> Answer {
        Answer::Error("the agent is ending".to_owned())
    }
}

/// Asks the loop of the agent. Returns `None` if it ends.
async fn ask<T>(agent: &mpsc::Sender<Request>, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    agent.send(request(reply)).await.ok()?;
    answer.await.ok()
}

/// Writes an [`Answer::Plan`] piece by piece, so that the text of all operations is never in memory at once.
async fn write_plan(write: &mut (impl AsyncWriteExt + Unpin), operations: Vec<PreviewOp>) -> io::Result<()> {
    let mut text = "{\"plan\":{\"operations\":[".to_owned();
    for (position, operation) in operations.into_iter().enumerate() {
        if position > 0 {
            text.push(',');
        }
        text.push_str(&serde_json::to_string(&Operation::from(operation))?);
        if position % SLICE == SLICE - 1 {
            write.write_all(text.as_bytes()).await?;
            text.clear();
            tokio::task::yield_now().await;
        }
    }
    text.push_str("]}}\n");
    write.write_all(text.as_bytes()).await
}

/// Writes an [`Answer::History`]. The records are JSON already.
async fn write_history(write: &mut (impl AsyncWriteExt + Unpin), lines: &[Arc<str>]) -> io::Result<()> {
    write.write_all(b"{\"history\":[").await?;
    for (position, line) in lines.iter().enumerate() {
        if position > 0 {
            write.write_all(b",").await?;
        }
        write.write_all(line.as_bytes()).await?;
    }
    write.write_all(b"]}\n").await
}

/// Asks the agent behind this socket for its status.
///
/// # Errors
/// No agent answers, or its answer cannot be read. The error says what to do.
pub async fn ask_status(socket: &Path) -> anyhow::Result<Status> {
    match question(socket, &Question::Status {}).await? {
        Answer::Status(status) => Ok(*status),
        _ => Err(other_answer(socket)),
    }
}

/// Asks the agent behind this socket what its next full pass would write.
///
/// # Errors
/// As [`ask_status`]; or the agent has no lease yet, or cannot read the kernel.
pub async fn ask_plan(socket: &Path) -> anyhow::Result<Preview> {
    match question(socket, &Question::Plan {}).await? {
        Answer::Plan(plan) => Ok(plan),
        _ => Err(other_answer(socket)),
    }
}

/// Asks the agent behind this socket what it changed in the kernel.
///
/// # Errors
/// As [`ask_status`].
pub async fn ask_history(socket: &Path, query: Query) -> anyhow::Result<Vec<HistoryRecord>> {
    match question(socket, &Question::History(query)).await? {
        Answer::History(records) => Ok(records),
        _ => Err(other_answer(socket)),
    }
}

/// Asks the agent behind this socket to change the key of its node. Returns the new public key.
///
/// # Errors
/// As [`ask_status`]; or the key cannot be changed now.
pub async fn rotate_key(socket: &Path) -> anyhow::Result<String> {
    match question(socket, &Question::RotateKey {}).await? {
        Answer::NewKey(key) => Ok(key),
        _ => Err(other_answer(socket)),
    }
}

/// Returns the error for an answer that does not belong to the question.
fn other_answer(socket: &Path) -> anyhow::Error {
    anyhow::anyhow!("the agent on {} answered another question", socket.display())
}

/// Returns the process ID of the agent that holds this socket, if its process is stopped (SIGSTOP). This blocks for a moment.
pub fn stopped_agent(socket: &Path) -> Option<u32> {
    agent_pid(socket).filter(|pid| is_stopped(*pid))
}

/// Returns the process ID of the agent that holds this socket, if it is in our PID namespace. This blocks for a moment.
pub fn agent_pid(socket: &Path) -> Option<u32> {
    let stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    let pid = getsockopt(&stream, PeerCredentials).ok()?.pid().cast_unsigned();
    // In another PID namespace the kernel says 0.
    Some(pid).filter(|pid| *pid != 0)
}

/// Returns why an agent that holds this socket does not answer.
fn why_late(socket: &Path) -> String {
    match stopped_agent(socket) {
        Some(pid) => format!("its process is stopped; run: kill -CONT {pid}"),
        None => "it is stuck, see its log".to_owned(),
    }
}

async fn question(socket: &Path, question: &Question) -> anyhow::Result<Answer> {
    let place = socket.display();
    let ask = async {
        let mut stream = UnixStream::connect(socket).await.with_context(|| {
            format!(
                "no agent answers on {place}: is it running (systemctl status weft), and are you root? \
                 If several agents run here, name one with --subnet-file or --socket"
            )
        })?;
        let text = serde_json::to_string(question)? + "\n";
        stream.write_all(text.as_bytes()).await.with_context(|| format!("ask on {place}"))?;
        let mut text = String::new();
        BufReader::new(stream).read_line(&mut text).await.with_context(|| format!("read from {place}"))?;
        match serde_json::from_str(&text).with_context(|| format!("read the answer on {place}"))? {
            Answer::Error(error) => anyhow::bail!("the agent on {place} says: {error}"),
            answer => Ok(answer),
        }
    };
    let limit = question.limit();
    let late = || format!("the agent on {place} did not answer within {} s: {}", limit.as_secs(), why_late(socket));
    tokio::time::timeout(limit, ask).await.map_err(|_| anyhow::Error::msg(late()))?
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use weft_backends::diff::Op;
    use weft_backends::state::{Key, Route, Value};

    use super::*;

    fn many_operations() -> Vec<PreviewOp> {
        let route = |n: u32| {
            let net = ipnet::Ipv4Net::new((0x0a00_0000 + (n << 8)).into(), 24).unwrap();
            let op = Op::Ensure(Key::Route(net.into(), 0), Value::Route(Route::Blackhole));
            PreviewOp { op, before: None }
        };
        (0..3 * SLICE as u32).map(route).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_socket_that_was_deleted_is_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weft.sock");
        let mut socket = AgentSocket::bind(&path).unwrap();
        let (ask, _asked) = mpsc::channel(1);
        let server = tokio::spawn(async move { socket.serve(ask, Readiness::new()).await });
        fs::remove_file(&path).unwrap();
        let until = tokio::time::Instant::now() + 2 * CHECK;
        while !path.exists() {
            assert!(tokio::time::Instant::now() < until);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::os::unix::net::UnixStream::connect(&path).expect("somebody listens");
        server.abort();
    }

    #[tokio::test]
    async fn requests_are_answered_and_the_socket_of_a_killed_agent_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/weft.sock");
        let error = ask_status(&path).await.expect_err("there is no agent");
        assert!(error.to_string().starts_with("no agent answers on"), "{error}");
        fs::create_dir(dir.path().join("run")).unwrap();
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists() && !answers(&path), "the file exists, and no agent answers");
        let mut socket = AgentSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(AgentSocket::bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let (ask, mut asked) = mpsc::channel(1);
        let server = tokio::spawn(async move { socket.serve(ask, Readiness::new()).await });
        let agent = tokio::spawn(async move {
            while let Some(request) = asked.recv().await {
                match request {
                    Request::Status(reply) => reply.send(Status { node: "n1".into(), ..Status::default() }).unwrap(),
                    Request::Mesh(_) => panic!("the socket has no such question"),
                    Request::Plan(reply) => reply.send(Ok(many_operations())).unwrap(),
                    Request::History(query, reply) => {
                        let record = |seq| {
                            serde_json::to_string(&HistoryRecord { seq, ..HistoryRecord::default() }).unwrap().into()
                        };
                        reply.send((query.after + 1..4).map(record).collect()).unwrap();
                    }
                    Request::RotateKey(reply) => {
                        reply.send(Err(NoNewKey::NoChange("there is no key".into()))).unwrap();
                    }
                }
            }
        });
        assert_eq!(ask_status(&path).await.unwrap().node, "n1");
        let plan = ask_plan(&path).await.unwrap();
        let wanted: Vec<Operation> = many_operations().into_iter().map(Operation::from).collect();
        assert_eq!(plan.operations, wanted, "an answer of several slices arrives as a whole");
        let records = ask_history(&path, Query { after: 1, since_ms: 0 }).await.unwrap();
        assert_eq!(records.iter().map(|record| record.seq).collect::<Vec<_>>(), [2, 3]);
        let error = rotate_key(&path).await.unwrap_err().to_string();
        assert!(error.ends_with("says: there is no key"), "{error}");
        let mut raw = UnixStream::connect(&path).await.unwrap();
        raw.write_all(b"{\"dance\":{}}\n").await.unwrap();
        let mut text = String::new();
        raw.read_to_string(&mut text).await.unwrap();
        assert!(text.starts_with("{\"error\":\"this version does not know the question"), "{text}");
        // A request of any length must not fill the memory.
        let mut long = UnixStream::connect(&path).await.unwrap();
        long.write_all(&vec![b' '; MAX_REQUEST.try_into().unwrap()]).await.unwrap();
        let mut text = String::new();
        long.read_to_string(&mut text).await.unwrap();
        assert!(text.starts_with("{\"error\":"), "{text}");
        let mut plugin = UnixStream::connect(&path).await.unwrap();
        plugin.write_all(b"{\"ready\":{}}\n").await.unwrap();
        let mut text = String::new();
        plugin.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "{\"ready\":{\"ready\":false,\"problems\":[\"the agent is starting\"]}}\n");
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
        assert!(!path.exists(), "the file must be removed with the socket");
        agent.abort();
    }

    /// In a large cluster, an answer with all entries takes longer than one about the state.
    #[test]
    fn only_an_answer_that_may_be_long_is_waited_for_longer() {
        for long in [Question::Plan {}, Question::History(Query::default()), Question::RotateKey {}] {
            assert_eq!(long.limit(), LONG_LIMIT, "{long:?}");
        }
        for short in [Question::Status {}, Question::Ready {}] {
            assert_eq!(short.limit(), LIMIT, "{short:?}");
        }
    }

    /// Each of them would keep a descriptor of the agent.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_asks_nothing_or_whose_question_is_not_answered_is_let_go() {
        let forever = Duration::from_secs(3600);
        let (silent, _other_end) = UnixStream::pair().unwrap();
        let (ask, _asked) = mpsc::channel(1);
        let ended = timeout(forever, client(silent, ask.clone(), Readiness::new())).await;
        assert!(ended.expect("a silent client stays").is_err());
        let (asking, mut other_end) = UnixStream::pair().unwrap();
        other_end.write_all(b"{\"status\":{}}\n").await.unwrap();
        let ended = timeout(forever, client(asking, ask, Readiness::new())).await;
        assert!(ended.expect("a client waits without end").is_err());
    }

    #[tokio::test]
    async fn an_agent_that_ends_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weft.sock");
        let mut socket = AgentSocket::bind(&path).unwrap();
        let (ask, asked) = mpsc::channel(1);
        drop(asked);
        let server = tokio::spawn(async move { socket.serve(ask, Readiness::new()).await });
        for answer in [
            ask_status(&path).await.map(drop),
            ask_plan(&path).await.map(drop),
            ask_history(&path, Query::default()).await.map(drop),
            rotate_key(&path).await.map(drop),
        ] {
            let error = answer.unwrap_err().to_string();
            assert!(error.ends_with("says: the agent is ending"), "{error}");
        }
        server.abort();
    }

    #[test]
    fn a_socket_that_was_left_since_the_boot_is_that_of_a_killed_agent() {
        let memory = Path::new("/dev/shm");
        // The second one is on a disk of most machines.
        for parent in [memory, std::env::temp_dir().as_path()] {
            let dir = tempfile::tempdir_in(parent).unwrap();
            let is_kept = statfs(dir.path()).unwrap().filesystem_type() != TMPFS_MAGIC;
            assert!(parent != memory || !is_kept);
            let path = dir.path().join("weft.sock");
            let is_left = || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async { AgentSocket::bind(&path).unwrap().was_left() })
            };
            assert!(!is_left(), "the first start");
            assert!(!is_left(), "the earlier agent was stopped");
            drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
            assert_eq!(is_left(), !is_kept, "{}", parent.display());
            fs::write(&path, "").unwrap();
            assert!(!is_left(), "it is no socket");
        }
    }

    #[test]
    fn a_listener_that_only_the_child_of_a_killed_agent_holds_is_no_agent() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weft.sock");
        let left = std::os::unix::net::UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            let bound = scope.spawn(|| answers(&path));
            let (asked, _) = left.accept().unwrap();
            drop((asked, left));
            assert!(!bound.join().unwrap());
        });
    }

    /// Such an agent is stopped, or is still starting. A second one must not take its socket away.
    #[test]
    fn an_agent_that_does_not_answer_in_time_holds_its_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weft.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(answers(&path));
    }

    /// Tells a test that it runs in a process of its own, because the umask is that of the whole process.
    const ALONE: &str = "WEFT_TEST_OWN_UMASK";

    /// The agent makes directories and files that other users read, such as subnet.env.
    #[tokio::test]
    async fn files_that_are_made_after_the_socket_have_their_usual_permissions() {
        #[allow(clippy::disallowed_methods, reason = "the parent process sets it for this test")]
        if std::env::var(ALONE).is_ok() {
            let usual = Mode::from_bits_truncate(0o022);
            umask(usual);
            let dir = tempfile::tempdir().unwrap();
            let _socket = AgentSocket::bind(&dir.path().join("weft.sock")).unwrap();
            assert_eq!(umask(usual), usual);
            return;
        }
        let this = "observe::socket::tests::files_that_are_made_after_the_socket_have_their_usual_permissions";
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let out = alone.args(["--exact", this]).env(ALONE, "1").output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && said.contains("1 passed"), "{said}");
    }
}
