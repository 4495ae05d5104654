// SPDX-License-Identifier: Apache-2.0
//! Runs a program that lists something, and ends it if it takes too long.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

/// The time limit for one program. Another program may hold the lock of iptables meanwhile.
pub const LIMIT: Duration = Duration::from_secs(15);

/// Why the output of a program is not known.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It is not installed.
    #[error("{0} is not installed")]
    NotInstalled(String),
    /// It cannot be started.
    #[error("{program}: {source}")]
    Start { program: String, source: io::Error },
    /// It failed.
    #[error("{program}: {status}: {first_line}")]
    Failed { program: String, status: ExitStatus, first_line: String },
    /// It did not end in time.
    #[error("{program} did not end within {} s", limit.as_secs())]
    Late { program: String, limit: Duration },
}

/// Returns what a program prints.
///
/// # Errors
/// It is not installed, fails, or does not end in time.
pub fn run(program: &str, args: &[&str], limit: Duration) -> Result<String, ProgramError> {
    let mut command = Command::new(program);
    command.args(args);
    let Output { status, stdout, stderr } = output(program, command, "", limit)?;
    if !status.success() {
        let first_line = text(&stderr).lines().next().unwrap_or_default().to_owned();
        return Err(ProgramError::Failed { program: program.to_owned(), status, first_line });
    }
    Ok(text(&stdout))
}

/// Returns what a program prints, and how it ends, when its input is this short text.
///
/// # Errors
/// It is not installed, or does not end in time.
pub fn output(program: &str, mut command: Command, input: &str, limit: Duration) -> Result<Output, ProgramError> {
    let name = || program.to_owned();
    let start = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => ProgramError::NotInstalled(name()),
        _ => ProgramError::Start { program: name(), source },
    };
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(start)?;
    if let Some(mut stdin) = child.stdin.take() {
        // It may have ended without reading.
        let _ = stdin.write_all(input.as_bytes());
    }
    let printed = outcome(&mut child, Instant::now() + limit);
    if !matches!(printed, Ok(Some(_))) {
        // It may have ended just now.
        let _ = child.kill();
    }
    let status = child.wait();
    match printed.map_err(start)? {
        Some((stdout, stderr)) => Ok(Output { status: status.map_err(start)?, stdout, stderr }),
        None => Err(ProgramError::Late { program: name(), limit }),
    }
}

/// Returns what a program has printed when it ends, without waiting for its status. `None` if it does not end in time.
///
/// # Errors
/// There can be no more threads.
fn outcome(child: &mut Child, deadline: Instant) -> io::Result<Option<(Vec<u8>, Vec<u8>)>> {
    let ended = ends(Pid::from_raw(child.id().cast_signed()))?;
    let (stdout, stderr) = (child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from));
    let (stdout, stderr) = (drain(stdout)?, drain(stderr)?);
    if until(deadline, &ended).is_none() {
        return Ok(None);
    }
    Ok(until(deadline, &stdout).zip(until(deadline, &stderr)))
}

/// Does something in a thread of its own, which hands over the result. There is one type of results and of threads, because each further one makes the
/// agent's file some kilobytes larger.
fn apart(work: Box<dyn FnOnce() -> Vec<u8> + Send>) -> io::Result<Receiver<Vec<u8>>> {
    let (sender, receiver) = mpsc::channel();
    thread::Builder::new().spawn(move || {
        // Nobody receives the result once the time is over.
        let _ = sender.send(work());
    })?;
    Ok(receiver)
}

/// Waits for the end of a program, and leaves its status to others. The result is empty.
fn ends(pid: Pid) -> io::Result<Receiver<Vec<u8>>> {
    apart(Box::new(move || {
        let _ = waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
        Vec::new()
    }))
}

/// Reads an output until it is closed. A program that prints much waits for its reader.
fn drain(pipe: Option<OwnedFd>) -> io::Result<Receiver<Vec<u8>>> {
    apart(Box::new(move || {
        let mut data = Vec::new();
        if let Some(pipe) = pipe {
            // What was read before an error is better than nothing.
            let _ = File::from(pipe).read_to_end(&mut data);
        }
        data
    }))
}

/// Returns a result that comes in time.
fn until(deadline: Instant, result: &Receiver<Vec<u8>>) -> Option<Vec<u8>> {
    result.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
}

fn text(output: &[u8]) -> String {
    String::from_utf8_lossy(output).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(line: &str, limit: Duration) -> Result<String, String> {
        run("sh", &["-c", line], limit).map_err(|error| error.to_string())
    }

    #[test]
    fn a_program_that_does_not_end_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let line = format!("echo $$ > {}; exec sleep 2147483647", file.display());
        // A busy machine may need longer to start it.
        for seconds in [3, 30, 120] {
            let limit = Duration::from_secs(seconds);
            assert_eq!(shell(&line, limit), Err(format!("sh did not end within {seconds} s")));
            if std::fs::read_to_string(&file).is_ok_and(|pid| !pid.is_empty()) {
                break;
            }
        }
        let pid = std::fs::read_to_string(file).unwrap();
        assert!(!std::path::Path::new("/proc").join(pid.trim()).exists(), "{pid} still runs");
        let silent = "exec >&- 2>&-; exec sleep 600";
        assert_eq!(shell(silent, Duration::from_millis(100)), Err("sh did not end within 0 s".to_owned()));
    }

    #[test]
    fn everything_that_a_program_prints_is_read_and_its_error_is_quoted() {
        let printed = shell("seq 100000 >&2; seq 100000", LIMIT).unwrap();
        assert_eq!(printed.lines().last(), Some("100000"));
        assert_eq!(shell("echo no; echo bad >&2; exit 3", LIMIT), Err("sh: exit status: 3: bad".to_owned()));
        let missing = run("/nonexistent/program", &[], LIMIT).map_err(|error| error.to_string());
        assert_eq!(missing, Err("/nonexistent/program is not installed".to_owned()));
    }
}
