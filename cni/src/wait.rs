// SPDX-License-Identifier: Apache-2.0
//! Waiting for the agent: its subnet.env, and its word where it has a socket (the agent may be flanneld, which has none).

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use serde::Deserialize;

use crate::conf::Conf;
use crate::spec::{Error, code};
use crate::subnet_env::SubnetEnv;

/// Between two looks.
const STEP: Duration = Duration::from_millis(20);
/// Longest pause between two questions to the agent, doubled from [`STEP`] on: a hundred pods that wait for it must not keep it
/// from becoming ready.
const STEP_MAX: Duration = Duration::from_millis(500);
/// With a subnet.env in place an agent that is not ready is waited for so long, and no pod is refused for it: a store that is
/// down for hours keeps the agent from becoming ready, not the node from running pods.
const WITH_FILE: Duration = Duration::from_secs(3);
/// For one question to the agent.
const ANSWER: Duration = Duration::from_secs(3);

/// What the agent says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Agent {
    /// It is ready, or nobody can be asked: no socket, nobody behind it, an older agent.
    Fine,
    /// It is not ready, for this reason.
    NotReady(String),
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Ready { ready: bool, problems: Vec<String> },
    Error(String),
}

/// Sleeps a little between two looks at a condition.
pub fn pause() {
    pause_for(STEP);
}

#[expect(clippy::disallowed_methods, reason = "the pause between two looks at a condition")]
fn pause_for(step: Duration) {
    std::thread::sleep(step);
}

/// subnet.env, once it is complete and the agent is ready.
///
/// # Errors
/// [`code::TRY_AGAIN`] when it does not come in time.
pub fn for_agent(conf: &Conf) -> Result<SubnetEnv, Error> {
    let begin = Instant::now();
    let (mut said, mut question) = (false, STEP);
    loop {
        let mut step = STEP;
        // Without the file there is nothing to ask for.
        let (why, limit) = match SubnetEnv::load(&conf.subnet_file).map(|env| (env, agent(&conf.socket))) {
            Ok((env, Agent::Fine)) => {
                if said {
                    note!("the agent is ready after {} ms", begin.elapsed().as_millis());
                }
                return Ok(env);
            }
            Ok((env, Agent::NotReady(why))) => {
                if begin.elapsed() >= WITH_FILE.min(conf.wait) {
                    note!("the agent is not ready ({why}): going on with {}", conf.subnet_file.display());
                    return Ok(env);
                }
                step = question;
                question = (question * 2).min(STEP_MAX);
                (format!("the agent is not ready: {why}"), WITH_FILE)
            }
            Err(why) => (why, conf.wait),
        };
        if begin.elapsed() >= limit.min(conf.wait) {
            let waited = begin.elapsed().as_millis();
            let text = format!("{why}. Check the log of the flannel or weft agent of this node (waited {waited} ms)");
            return Err(Error::new(code::TRY_AGAIN, format!("failed to load flannel 'subnet.env' file: {text}")));
        }
        if !said {
            note!("waiting up to {} ms: {why}", limit.min(conf.wait).as_millis());
            said = true;
        }
        pause_for(step.min(limit.min(conf.wait).saturating_sub(begin.elapsed())));
    }
}

/// Asks the agent whether it is ready.
pub fn agent(socket: &Path) -> Agent {
    // A socket that nobody answers on is what a killed agent left: forwarding goes on without it, and so do pods.
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

/// Connects at once or not at all: behind the full queue of an agent that is stopped, connect would wait without end.
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
