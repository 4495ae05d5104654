// SPDX-License-Identifier: Apache-2.0
//! The agent's Unix socket: one line of JSON asks, one line answers. Mode 0600: only root asks.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use nix::sys::stat::{Mode, umask};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use crate::observe::health::Readiness;
use crate::observe::status::Status;

/// One question and its answer may take so long.
const LIMIT: Duration = Duration::from_secs(5);
/// A socket that stays silent for so long after a question is held by an agent.
const PROBE: Duration = Duration::from_secs(1);
/// Longest question, bytes.
const QUESTION: u64 = 4096;

/// What the agent is asked. It answers between two passes.
#[derive(Debug)]
pub enum Request {
    /// `weft status`.
    Status(oneshot::Sender<Status>),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Question {
    Status {},
    /// What the CNI plugin asks for every pod: answered without the agent's loop, in the middle of a pass too.
    Ready {},
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Status(Box<Status>),
    Ready { ready: bool, problems: Vec<String> },
    Error(String),
}

/// The listening socket; its file goes when this is dropped.
#[derive(Debug)]
pub struct Admin {
    listener: UnixListener,
    path: PathBuf,
}

impl Admin {
    /// Takes the socket; its directory is made when missing. A file that nobody answers on is what a killed agent left: removed.
    /// `AddrInUse` when another agent answers.
    pub fn bind(path: &Path) -> io::Result<Admin> {
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(dir)?;
        }
        if answers(path) {
            let text = format!(
                "another agent answers on {}: stop it, or give this one a --subnet-file of its own, from which its socket follows",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Never open to others, not even between bind and chmod.
        let before = umask(Mode::from_bits_truncate(0o177));
        let bound = UnixListener::bind(path);
        umask(before);
        Ok(Admin { listener: bound?, path: path.to_owned() })
    }

    /// Answers until dropped.
    pub async fn serve(&self, agent: mpsc::Sender<Request>, readiness: Readiness) {
        let mut clients = tokio::task::JoinSet::new();
        loop {
            while clients.try_join_next().is_some() {}
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let (agent, readiness) = (agent.clone(), readiness.clone());
                    clients.spawn(async move { tokio::time::timeout(LIMIT, client(stream, agent, readiness)).await });
                }
                Err(error) => {
                    tracing::debug!(%error, "accept on the socket");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// True when an agent holds this socket: it answers, or it takes the question and says nothing (stopped, or still starting). A connection that
/// ends without a word is none: the child of a killed agent holds its parent's listener between fork and exec.
pub fn answers(path: &Path) -> bool {
    let ask = || {
        let mut stream = std::os::unix::net::UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PROBE))?;
        stream.write_all(b"{\"ready\":{}}\n")?;
        stream.read(&mut [0])
    };
    match ask() {
        Ok(bytes) => bytes > 0,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

async fn client(mut stream: UnixStream, agent: mpsc::Sender<Request>, readiness: Readiness) -> io::Result<()> {
    let mut line = String::new();
    let (read, mut write) = stream.split();
    BufReader::new(read.take(QUESTION)).read_line(&mut line).await?;
    let answer = match serde_json::from_str(&line) {
        Ok(Question::Status {}) => match status(&agent).await {
            Some(status) => Answer::Status(Box::new(status)),
            None => Answer::Error("the agent is ending".to_owned()),
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
}

async fn status(agent: &mpsc::Sender<Request>) -> Option<Status> {
    let (reply, answer) = oneshot::channel();
    agent.send(Request::Status(reply)).await.ok()?;
    answer.await.ok()
}

/// Asks the agent behind this socket.
pub async fn ask_status(socket: &Path) -> anyhow::Result<Status> {
    let place = socket.display();
    let ask = async {
        let mut stream = UnixStream::connect(socket).await.with_context(|| {
            format!(
                "no agent answers on {place}: is it running (systemctl status weft), and are you root? \
                 If several agents run here, name one with --subnet-file or --socket"
            )
        })?;
        let question = serde_json::to_string(&Question::Status {})? + "\n";
        stream.write_all(question.as_bytes()).await.with_context(|| format!("ask on {place}"))?;
        let mut text = String::new();
        BufReader::new(stream).read_line(&mut text).await.with_context(|| format!("read from {place}"))?;
        match serde_json::from_str(&text).with_context(|| format!("read the answer on {place}"))? {
            Answer::Status(status) => Ok(*status),
            Answer::Error(error) => anyhow::bail!("the agent on {place} says: {error}"),
            Answer::Ready { .. } => anyhow::bail!("the agent on {place} answered another question"),
        }
    };
    let late = || format!("the agent on {place} did not answer within {} s: it is stuck, see its log", LIMIT.as_secs());
    tokio::time::timeout(LIMIT, ask).await.with_context(late)?
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn asks_and_answers_and_takes_over_a_dead_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/weft.sock");
        let error = ask_status(&path).await.expect_err("nobody there");
        assert!(error.to_string().starts_with("no agent answers on"), "{error}");
        fs::create_dir(dir.path().join("run")).unwrap();
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists() && !answers(&path), "a dead socket");
        let admin = Admin::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(Admin::bind(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        let (ask, mut asked) = mpsc::channel(1);
        let server = tokio::spawn(async move { admin.serve(ask, Readiness::new()).await });
        let agent = tokio::spawn(async move {
            while let Some(Request::Status(reply)) = asked.recv().await {
                reply.send(Status { node: "n1".into(), ..Status::default() }).unwrap();
            }
        });
        assert_eq!(ask_status(&path).await.unwrap().node, "n1");
        let mut raw = UnixStream::connect(&path).await.unwrap();
        raw.write_all(b"{\"dance\":{}}\n").await.unwrap();
        let mut text = String::new();
        raw.read_to_string(&mut text).await.unwrap();
        assert!(text.starts_with("{\"error\":\"this version does not know the question"), "{text}");
        let mut plugin = UnixStream::connect(&path).await.unwrap();
        plugin.write_all(b"{\"ready\":{}}\n").await.unwrap();
        let mut text = String::new();
        plugin.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "{\"ready\":{\"ready\":false,\"problems\":[\"the agent is starting\"]}}\n");
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
        assert!(!path.exists(), "the socket goes with its server");
        agent.abort();
    }

    #[test]
    fn a_listener_that_a_killed_agent_s_child_still_holds_is_no_agent() {
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
}
