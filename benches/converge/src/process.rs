// SPDX-License-Identifier: Apache-2.0
//! The agent that is measured: weft or flanneld, as a process in a node's namespace.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::time::clock_getcpuclockid;
use nix::unistd::Pid;

use crate::site::{Node, pause};
use crate::store::url;

/// The program that is measured.
#[derive(Debug, Clone)]
pub enum Program {
    /// weft's binary, and flags in addition to those of every run.
    Weft(PathBuf, Vec<String>),
    /// flanneld's binary.
    Flanneld(PathBuf),
}

impl Program {
    /// Returns the name for messages and namespaces.
    pub fn name(&self) -> &'static str {
        match self {
            Program::Weft(..) => "weft",
            Program::Flanneld(_) => "flanneld",
        }
    }

    fn command(&self, dir: &Path) -> Command {
        // The process is killed when the bench ends in any way.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        match self {
            Program::Weft(path, flags) => {
                command.arg(path).arg("agent").arg(format!("--socket={}", dir.join("weft.sock").display()));
                // Rows that remove many peers measure the removal, and not the time for which removals are held.
                command
                    .arg("--hold-removals=0")
                    .arg(format!("--state-dir={}", dir.join("state").display()))
                    .args(flags);
            }
            Program::Flanneld(path) => drop(command.arg(path)),
        }
        command.arg("--iface=eth0");
        command.arg(format!("--subnet-file={}", dir.join("subnet.env").display()));
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("NOTIFY_SOCKET", dir.join("notify"));
        command
    }
}

/// How long to wait at most for the end of an agent after SIGTERM.
pub const END: Duration = Duration::from_secs(5);

/// A running agent. It is killed when this is dropped.
pub struct Agent {
    child: Child,
    ready: mpsc::Receiver<Instant>,
    /// The thread that reads its notifications ends when this is dropped.
    _alive: Arc<()>,
    /// The time just before it was started.
    pub started: Instant,
    log: PathBuf,
}

impl Agent {
    /// Starts an agent with etcd as its store.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(program: &Program, node: &Node, dir: &Path) -> Result<Agent> {
        let url = format!("--etcd-endpoints={}", url());
        Agent::start_with(program, node, dir, |command| {
            command.arg(url);
        })
    }

    /// Starts an agent with another store, whose flags `store` adds to the command.
    ///
    /// # Errors
    /// As [`Agent::start`].
    pub fn start_with(program: &Program, node: &Node, dir: &Path, store: impl FnOnce(&mut Command)) -> Result<Agent> {
        let dir = dir.join(program.name());
        fs::create_dir_all(&dir).context("create a directory")?;
        let (socket, log) = (dir.join("notify"), dir.join("log"));
        // An earlier run may have left a socket.
        let _ = fs::remove_file(&socket);
        let notify = UnixDatagram::bind(&socket).context("bind the notify socket")?;
        let file = fs::File::options().create(true).append(true).open(&log).context("open a log")?;
        let mut command = program.command(&dir);
        store(&mut command);
        command.stdin(Stdio::null()).stdout(file.try_clone().context("open a log")?).stderr(file);
        let (started, child) = node.run(move || (Instant::now(), command.spawn()))?;
        let child = child.with_context(|| format!("start {}", program.name()))?;
        let alive = Arc::new(());
        Ok(Agent { child, ready: read_notifications(notify, Arc::clone(&alive))?, _alive: alive, started, log })
    }

    /// Waits until the agent sends READY=1 to systemd, and returns when that was. `None` if it did not in time.
    ///
    /// # Errors
    /// The socket fails.
    pub fn ready(&self, limit: Duration) -> Result<Option<Instant>> {
        match self.ready.recv_timeout(limit) {
            Ok(at) => Ok(Some(at)),
            Err(mpsc::RecvTimeoutError::Timeout) => Ok(None),
            Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the notify socket cannot be read"),
        }
    }

    /// Checks that the agent still runs.
    ///
    /// # Errors
    /// It has ended. The error contains the last lines of its log.
    pub fn check(&mut self) -> Result<()> {
        let ended = self.child.try_wait().context("look at the agent")?;
        let log = || fs::read_to_string(&self.log).unwrap_or_default();
        let tail = |text: String| text.lines().rev().take(5).collect::<Vec<_>>().join("\n");
        ensure!(ended.is_none(), "the agent ended: {}", tail(log()));
        Ok(())
    }

    /// Sends SIGTERM, waits for the end, and returns how long it took. `None` if it took too long.
    ///
    /// # Errors
    /// It does not run.
    pub fn stop(mut self) -> Result<Option<Duration>> {
        let begin = Instant::now();
        kill(Pid::from_raw(i32::try_from(self.child.id())?), Signal::SIGTERM).context("end the agent")?;
        loop {
            if self.child.try_wait().context("wait for the agent")?.is_some() {
                return Ok(Some(begin.elapsed()));
            }
            if begin.elapsed() > END {
                return Ok(None);
            }
            pause(Duration::from_millis(5));
        }
    }

    /// Returns the time between two audits of an idle weft, from its status. `None` for flanneld.
    ///
    /// # Errors
    /// The agent does not answer.
    pub fn audit_interval(&self, program: &Program) -> Result<Option<Duration>> {
        let Program::Weft(path, _) = program else { return Ok(None) };
        let socket = format!("--socket={}", self.log.with_file_name("weft.sock").display());
        let said = Command::new(path).args(["status", "-o", "json", &socket]).output().context("ask for its status")?;
        let status: serde_json::Value = serde_json::from_slice(&said.stdout).context("read its status")?;
        Ok(status["audit_interval_s"].as_f64().map(Duration::from_secs_f64))
    }

    /// Waits until weft has saved its peers after this moment, or until the time is over within which it saves changes. Before that, a node
    /// that had events is not idle. A node whose last write was not about its peers has nothing to save.
    ///
    /// # Errors
    /// No peers are saved at all when the time is over.
    pub fn saved(&self, since: Instant, limit: Duration) -> Result<()> {
        let dir = self.log.with_file_name("state");
        let age = || -> Option<Duration> {
            let files = fs::read_dir(&dir).ok()?.flatten();
            let whole = files.filter(|file| file.file_name().to_string_lossy().starts_with("peers-"));
            whole.filter_map(|file| file.metadata().ok()?.modified().ok()?.elapsed().ok()).min()
        };
        loop {
            let (age, waited) = (age(), since.elapsed());
            if age.is_some_and(|age| age <= waited || waited > limit) {
                return Ok(());
            }
            ensure!(waited <= limit, "no peers were saved within {} s", limit.as_secs());
            pause(Duration::from_millis(100));
        }
    }

    /// Returns the resident memory now and at its peak, in MB.
    ///
    /// # Errors
    /// The agent has ended.
    pub fn memory(&self) -> Result<(f64, f64)> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.child.id())).context("read its status")?;
        let field = |name: &str| -> Option<f64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<f64>().ok().map(|kb| kb / 1024.0)
        };
        field("VmRSS:").zip(field("VmHWM:")).context("no memory in its status")
    }

    /// Sets the peak of the resident memory to the present value.
    ///
    /// # Errors
    /// The agent has ended.
    pub fn forget_peak(&self) -> Result<()> {
        fs::write(format!("/proc/{}/clear_refs", self.child.id()), "5").context("reset its peak of memory")
    }

    /// Returns the number of lines of the log that contain these words.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn logged(&self, words: &str) -> Result<usize> {
        let text = fs::read_to_string(&self.log).context("read its log")?;
        Ok(text.lines().filter(|line| line.contains(words)).count())
    }

    /// Returns the size of the log in bytes.
    ///
    /// # Errors
    /// The log cannot be found.
    pub fn log_size(&self) -> Result<u64> {
        Ok(fs::metadata(&self.log).context("look at its log")?.len())
    }

    /// Returns the CPU time of all its threads, including those that have ended.
    ///
    /// # Errors
    /// The agent has ended.
    pub fn cpu(&self) -> Result<Duration> {
        cpu_of_process(self.child.id())
    }

    /// Returns how often it woke up.
    ///
    /// # Errors
    /// The agent has ended.
    pub fn wakeups(&self) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.child.id())).context("read its status")?;
        let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.and_then(|n| n.trim().parse().ok()).context("no switches in its status")
    }
}

/// Reads all notifications of an agent to systemd, because a full socket would block the agent. The channel gets the time of each READY=1.
fn read_notifications(socket: UnixDatagram, alive: Arc<()>) -> Result<mpsc::Receiver<Instant>> {
    let (tell, ready) = mpsc::channel();
    socket.set_read_timeout(Some(Duration::from_millis(200))).context("bound a read")?;
    let read = move || {
        let mut buffer = [0; 4096];
        loop {
            match socket.recv(&mut buffer) {
                Ok(n) if buffer[..n].split(|b| *b == b'\n').any(|line| line == b"READY=1") => {
                    // The agent was dropped, so nobody waits any more.
                    if tell.send(Instant::now()).is_err() {
                        return;
                    }
                }
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock && Arc::strong_count(&alive) > 1 => {}
                Err(_) => return,
            }
        }
    };
    std::thread::Builder::new().name("notify".into()).spawn(read).context("start a thread")?;
    Ok(ready)
}

impl Drop for Agent {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the CPU time of all threads of a process, including those that have ended.
///
/// # Errors
/// The process has ended.
pub fn cpu_of_process(id: u32) -> Result<Duration> {
    let pid = Pid::from_raw(i32::try_from(id).context("a process id")?);
    let clock = clock_getcpuclockid(pid).with_context(|| format!("find the CPU clock of process {id}"))?;
    Ok(Duration::from(clock.now().with_context(|| format!("read the CPU clock of process {id}"))?))
}

/// Returns the CPU time of a task, which is named by its directory in /proc, such as `thread-self`.
///
/// # Errors
/// The kernel has no schedstat.
pub fn cpu_of(task: &str) -> Result<Duration> {
    let text = fs::read_to_string(format!("/proc/{task}/schedstat")).context("read schedstat")?;
    let time = text.split(' ').next().and_then(|time| time.parse().ok()).map(Duration::from_nanos);
    time.context("read schedstat")
}
