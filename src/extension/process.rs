// SPDX-License-Identifier: Apache-2.0
//! One run of a command: its words, its environment and its standard input, within a time limit.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe::Receiver;
use tokio::process::{ChildStdin, Command};
use weft_backends::commands::{CommandLine, Variable};
use weft_subnet::text::{sentence, shown};

/// At most this much of the output is kept, in bytes. The rest is read and dropped, so that the command does not wait.
const MAX_OUTPUT: usize = 16 * 1024;
/// When the command has ended, a program that it left in the background may hold its output open. This is how long we wait for that. What it
/// prints later is read and dropped.
const LINGER: Duration = Duration::from_millis(500);

/// Why a command did not do its work. As text it is a sentence that names the key of net-conf.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The program cannot be started.
    #[error("{key}: cannot start {program}: {source}")]
    NotStarted {
        /// The key of net-conf.
        key: &'static str,
        /// The first word of the command.
        program: String,
        /// The reason.
        source: io::Error,
    },
    /// It ended with an error.
    #[error("{key}: {status}: {output}")]
    Failed {
        /// The key of net-conf.
        key: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// What it printed, shortened.
        output: String,
    },
    /// It did not end in time.
    #[error("{key}: not ended after {} s, so it was killed: {output}", limit.as_secs())]
    TooSlow {
        /// The key of net-conf.
        key: &'static str,
        /// The time limit.
        limit: Duration,
        /// What it printed, shortened.
        output: String,
    },
}

/// A process group that is killed when this value goes: the command has not ended, or nobody waits for it any more.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // It may have ended by itself at this moment.
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}

/// Runs a command, and returns what it printed to its standard output and its standard error. Its environment is that of this process
/// with `variables`. Its standard input is `input` and a newline.
///
/// The command and its children form a process group of their own. The group is killed when `limit` is over, or when the future is
/// dropped.
///
/// # Errors
/// The command cannot be started, ends with an error, or does not end in time.
pub async fn run(
    line: &CommandLine,
    variables: &[Variable],
    input: &str,
    limit: Duration,
) -> Result<Vec<u8>, CommandError> {
    let words = words(line, variables);
    let key = line.key;
    let program = shown(&words.first().map(|word| word.to_string_lossy()).unwrap_or_default());
    let (mut child, mut printed) =
        start(&words, variables).map_err(|source| CommandError::NotStarted { key, program, source })?;
    let pid = child.id().and_then(|pid| i32::try_from(pid).ok()).map(Pid::from_raw);
    let mut group = Group(pid);
    let mut output = Vec::new();
    let stdin = child.stdin.take();
    let ended = {
        let mut streams =
            std::pin::pin!(async { tokio::join!(feed(stdin, input), collect(&mut printed, &mut output)) });
        let work = async {
            let mut is_open = true;
            let status = loop {
                tokio::select! {
                    status = child.wait() => break status,
                    _ = &mut streams, if is_open => is_open = false,
                }
            };
            if is_open {
                let _ = tokio::time::timeout(LINGER, &mut streams).await;
            }
            status
        };
        tokio::time::timeout(limit, work).await
    };
    let Ok(ended) = ended else {
        drop(group);
        let _ = child.wait().await;
        return Err(CommandError::TooSlow { key, limit, output: text(&output) });
    };
    // Programs that the command left in the background stay. If nobody read what they print, they would end with SIGPIPE or block.
    group.0 = None;
    tokio::spawn(async move { tokio::io::copy(&mut printed, &mut tokio::io::sink()).await });
    match ended {
        Ok(status) if status.success() => Ok(output),
        Ok(status) => Err(CommandError::Failed { key, status, output: text(&output) }),
        Err(source) => Err(CommandError::NotStarted { key, program: line.text.clone(), source }),
    }
}

/// Returns output as one line for people.
pub fn text(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if text.is_empty() { "no output".to_owned() } else { sentence(&text) }
}

fn words(line: &CommandLine, variables: &[Variable]) -> Vec<OsString> {
    let variable = |name: &[u8]| {
        let added = variables.iter().find(|(added, _)| added.as_bytes() == name);
        let inherited = || std::env::var_os(std::ffi::OsStr::from_bytes(name)).map(OsString::into_vec);
        added.map(|(_, value)| value.clone().into_bytes()).or_else(inherited)
    };
    line.words(variable).into_iter().map(OsString::from_vec).collect()
}

fn start(words: &[OsString], variables: &[Variable]) -> io::Result<(tokio::process::Child, Receiver)> {
    let (program, arguments) = words.split_first().ok_or(io::ErrorKind::NotFound)?;
    let (reader, writer) = io::pipe()?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::piped())
        .stdout(writer.try_clone()?)
        .stderr(writer)
        .process_group(0);
    let child = command.spawn()?;
    Ok((child, Receiver::from_owned_fd(reader.into())?))
}

/// A command need not read its input.
async fn feed(stdin: Option<ChildStdin>, input: &str) {
    let Some(mut stdin) = stdin else { return };
    if stdin.write_all(input.as_bytes()).await.is_ok() {
        let _ = stdin.write_all(b"\n").await;
    }
}

async fn collect(printed: &mut Receiver, output: &mut Vec<u8>) {
    let mut buffer = [0; 4096];
    while let Ok(count @ 1..) = printed.read(&mut buffer).await {
        let room = MAX_OUTPUT - output.len();
        output.extend_from_slice(&buffer[..count.min(room)]);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn shell(text: &str) -> CommandLine {
        CommandLine { key: "SubnetAddCommand", text: text.to_owned(), shell: true }
    }

    async fn run_it(text: &str, input: &str, limit: Duration) -> Result<String, String> {
        let variables = [("SUBNET", "10.5.2.0/24".to_owned())];
        let done = run(&shell(text), &variables, input, limit).await;
        done.map(|output| String::from_utf8_lossy(&output).into_owned()).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn a_command_gets_variables_and_input_and_both_its_outputs_are_read() {
        let line = CommandLine { shell: false, ..shell("env") };
        let printed = run(&line, &[("SUBNET", "10.5.2.0/24".to_owned())], "", LIMIT).await.unwrap();
        let printed = String::from_utf8(printed).unwrap();
        assert!(printed.contains("SUBNET=10.5.2.0/24\n") && printed.contains("PATH="), "{printed}");
        let done = run_it("cat; echo $SUBNET >&2", "data", LIMIT).await;
        assert_eq!(done.unwrap(), "data\n10.5.2.0/24\n");
    }

    #[tokio::test]
    async fn a_word_may_name_variables_of_the_agent_and_those_of_the_command_come_first() {
        let line = CommandLine { shell: false, ..shell("/bin/echo $PATH $SUBNET") };
        let inherited = std::env::var_os("PATH").unwrap().into_string().unwrap();
        let subnet = || ("SUBNET", "10.5.2.0/24".to_owned());
        let printed = run(&line, &[subnet()], "", LIMIT).await.unwrap();
        assert_eq!(String::from_utf8(printed).unwrap(), format!("{inherited} 10.5.2.0/24\n"));
        let printed = run(&line, &[subnet(), ("PATH", "/nowhere".to_owned())], "", LIMIT).await.unwrap();
        assert_eq!(String::from_utf8(printed).unwrap(), "/nowhere 10.5.2.0/24\n");
    }

    #[tokio::test]
    async fn input_that_is_larger_than_a_pipe_blocks_nothing() {
        let input = "x".repeat(200 * 1024);
        assert_eq!(run_it("wc -c", &input, LIMIT).await.unwrap().trim(), (200 * 1024 + 1).to_string());
        // Nobody reads it.
        assert_eq!(run_it("true", &input, LIMIT).await.unwrap(), "");
        // The output comes back while the input is still being written.
        assert_eq!(run_it("cat", &input, LIMIT).await.unwrap().len(), MAX_OUTPUT);
    }

    #[tokio::test]
    async fn a_failure_names_the_key_and_what_was_printed() {
        let error = run_it("echo File exists >&2; exit 2", "", LIMIT).await.unwrap_err();
        assert_eq!(error, "SubnetAddCommand: exit status: 2: File exists");
        let line = CommandLine { shell: false, ..shell("/nonexistent/program $SUBNET") };
        let error = run(&line, &[], "", LIMIT).await.unwrap_err().to_string();
        assert!(error.starts_with("SubnetAddCommand: cannot start /nonexistent/program: No such file"), "{error}");
    }

    #[tokio::test]
    async fn a_command_that_hangs_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let text = format!("sleep 1000 & echo $! > {}; echo waits; wait", file.display());
        // A busy machine may need longer to start it.
        for seconds in [2, 20, 120] {
            let error = run_it(&text, "", Duration::from_secs(seconds)).await.unwrap_err();
            let killed = format!("SubnetAddCommand: not ended after {seconds} s, so it was killed: ");
            let said = error.strip_prefix(&killed).unwrap_or_else(|| panic!("{error}"));
            if said == "waits" {
                break;
            }
            assert!(seconds < 120, "{error}");
        }
        let pid: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        let began = Instant::now();
        // The child is gone, or waits for its new parent to read its end.
        let is_gone = || match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat.contains(") Z "),
            Err(_) => true,
        };
        while !is_gone() {
            assert!(began.elapsed() < LIMIT, "the child {pid} still runs");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn a_program_in_the_background_delays_nothing_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (fifo, file) = (dir.path().join("fifo"), dir.path().join("read"));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        // It prints more than a pipe holds, after the command has ended.
        let prints = "head -c 200000 /dev/zero";
        let text = format!(
            "{{ read -r line < {} && {prints} && echo $line > {}; }} & echo done",
            fifo.display(),
            file.display()
        );
        assert_eq!(run_it(&text, "", LIMIT).await.unwrap(), "done\n");
        // Opened for both, so that this does not wait for a reader that is gone.
        let mut writer = std::fs::File::options().read(true).write(true).open(&fifo).unwrap();
        std::io::Write::write_all(&mut writer, b"it lives\n").unwrap();
        let began = Instant::now();
        while std::fs::read(&file).unwrap_or_default() != b"it lives\n" {
            assert!(
                began.elapsed() < LIMIT,
                "the program in the background was killed, or waits until somebody reads its output"
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
