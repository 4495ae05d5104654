// SPDX-License-Identifier: Apache-2.0
//! Waits for the agent: for its subnet.env and, if it has a socket, until it reports that it is ready. flanneld has no
//! socket.

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use serde::Deserialize;

use crate::conf::Conf;
use crate::spec::{Error, code};
use crate::subnet_env::CheckedSubnetEnv;

/// Time between two checks.
const STEP: Duration = Duration::from_millis(20);
/// Longest time between two questions to the agent. It starts at [`STEP`] and doubles, because a hundred waiting pods
/// must not keep the agent from becoming ready.
const STEP_MAX: Duration = Duration::from_millis(500);
/// How long to wait for an agent that is not ready if there is a subnet.env. After that the pod is added anyway: a
/// store that is down for hours keeps the agent from becoming ready, but it must not keep the node from running pods.
const WITH_FILE: Duration = Duration::from_secs(3);
/// Time limit for one question to the agent.
const ANSWER: Duration = Duration::from_secs(3);

/// The agent's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Agent {
    /// The agent is ready, or cannot be asked: there is no socket, nobody answers on it, or the agent is too old.
    Fine,
    /// The agent is not ready, for this reason.
    NotReady(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Ready { ready: bool, problems: Vec<String> },
    Error(String),
}

/// Sleeps for a short time between two checks of a condition.
pub fn pause() {
    pause_for(STEP);
}

/// Sleeps for this time between two checks of a condition.
#[expect(clippy::disallowed_methods, reason = "the pause between two checks of a condition")]
pub(crate) fn pause_for(step: Duration) {
    std::thread::sleep(step);
}

/// Returns the content of subnet.env once the file is complete and the agent is ready.
///
/// # Errors
/// [`code::TRY_AGAIN`] if there is no valid subnet.env within `conf.wait`.
pub fn for_agent(conf: &Conf) -> Result<CheckedSubnetEnv, Error> {
    let begin = Instant::now();
    let (mut logged, mut question) = (false, STEP);
    loop {
        let mut step = STEP;
        // Without the file there is no reason to ask the agent.
        let answer = CheckedSubnetEnv::load(&conf.subnet_file).map(|env| (env, agent(&conf.socket)));
        // Read once: with two readings, one before and one after the limit, a pod with a subnet.env would fail.
        let waited = begin.elapsed();
        let (why, limit) = match answer {
            Ok((env, Agent::Fine)) => {
                if logged {
                    note!("the agent is ready after {} ms", waited.as_millis());
                }
                return Ok(env);
            }
            Ok((env, Agent::NotReady(why))) => {
                if waited >= WITH_FILE.min(conf.wait) {
                    note!("the agent is not ready ({why}): continuing with {}", conf.subnet_file.display());
                    return Ok(env);
                }
                step = question;
                question = (question * 2).min(STEP_MAX);
                (format!("the agent is not ready: {why}"), WITH_FILE.min(conf.wait))
            }
            Err(error) => (error.to_string(), conf.wait),
        };
        if waited >= limit {
            let waited = waited.as_millis();
            let text = format!("{why}. Check the log of the flannel or weft agent of this node (waited {waited} ms)");
            return Err(Error::new(code::TRY_AGAIN, format!("failed to load flannel 'subnet.env' file: {text}")));
        }
        if !logged {
            note!("waiting up to {} ms: {why}", limit.as_millis());
            logged = true;
        }
        pause_for(step.min(limit.saturating_sub(waited)));
    }
}

/// Asks the agent whether it is ready.
fn agent(socket: &Path) -> Agent {
    // A killed agent leaves a socket on which nobody answers. Forwarding works without the agent, so pods can be added.
    let stream = match open(socket) {
        Ok(stream) => stream,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            note!("the agent on {} takes no calls: its queue is full", socket.display());
            return Agent::Fine;
        }
        Err(_) => return Agent::Fine,
    };
    match ask(stream) {
        Ok(Answer::Ready { ready: true, .. }) => Agent::Fine,
        Ok(Answer::Ready { ready: false, problems }) => Agent::NotReady(problems.join("; ")),
        Ok(Answer::Error(error)) => {
            note!("the agent on {} says: {error}", socket.display());
            Agent::Fine
        }
        Err(error) => {
            note!("ask the agent on {}: {error}", socket.display());
            Agent::Fine
        }
    }
}

/// Connects without waiting. If the agent is stopped and its queue is full, a blocking connect would never return.
fn open(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(stream.as_raw_fd(), &UnixAddr::new(path)?)?;
    let stream = UnixStream::from(stream);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn ask(mut stream: UnixStream) -> io::Result<Answer> {
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    stream.write_all(b"{\"ready\":{}}\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Ok(serde_json::from_str(&line)?)
}
