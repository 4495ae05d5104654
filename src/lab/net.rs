// SPDX-License-Identifier: Apache-2.0
//! Network namespaces and processes of a lab.
//!
//! They belong to a private mount namespace. Each lab therefore has its own names below /run/netns, and any number of
//! labs can run at the same time. When the lab's thread ends, even if it is killed, nothing refers to the namespaces
//! any more. The kernel then removes them with their links, routes and addresses.

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};

use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

/// The directory where `ip netns` keeps the names.
const NAMES: &str = "/run/netns";
/// The processes of a lab get a fixed environment, so that the caller's `FLANNELD_*` variables do not reach the agents.
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Gives the calling thread, and the processes that it starts later, a private directory of namespace names.
///
/// # Errors
/// CAP_SYS_ADMIN is missing, or /run is read-only.
pub fn own_names() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("unshare the mount namespace (the lab needs root)")?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).context("make / private")?;
    fs::create_dir_all(NAMES).with_context(|| format!("create {NAMES}"))?;
    mount(Some("weft-lab"), NAMES, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
        .with_context(|| format!("mount a tmpfs on {NAMES}"))
}

/// A named network namespace.
#[derive(Debug, Clone)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Creates a namespace and sets `lo` up.
    ///
    /// # Errors
    /// `ip netns add` fails.
    pub async fn add(name: &str) -> Result<Netns> {
        checked(Command::new("ip").args(["netns", "add", name])).await?;
        let ns = Netns { name: name.to_owned() };
        ns.ip("link set lo up").await?;
        Ok(ns)
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip -n NAME WORDS` and returns its standard output.
    ///
    /// # Errors
    /// ip fails; the message contains its standard error.
    pub async fn ip(&self, words: &str) -> Result<String> {
        checked(Command::new("ip").args(["-n", &self.name]).args(words.split_whitespace())).await
    }

    /// Runs `bridge -n NAME WORDS` and returns its standard output.
    ///
    /// # Errors
    /// bridge fails; the message contains its standard error.
    pub async fn bridge(&self, words: &str) -> Result<String> {
        checked(Command::new("bridge").args(["-n", &self.name]).args(words.split_whitespace())).await
    }

    /// Runs several `ip` commands, one per line, in one process.
    ///
    /// # Errors
    /// One of the commands fails.
    pub async fn batch(&self, lines: &str) -> Result<()> {
        let mut ip = Command::new("ip");
        ip.args(["-n", &self.name, "-batch", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = ip.kill_on_drop(true).spawn().context("start ip")?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(lines.as_bytes()).await.context("write to ip -batch")?;
        }
        let out = child.wait_with_output().await.context("wait for ip -batch")?;
        accept(&out, &format!("ip -n {} -batch", self.name))
    }

    /// Sets sysctls of this namespace. A setting is `NAME=VALUE`, where the name is a path below /proc/sys/net
    /// (`ipv4/ip_forward=1`).
    ///
    /// # Errors
    /// The kernel refuses a setting.
    pub async fn sysctl(&self, settings: &[&str]) -> Result<()> {
        let line = |text: &&str| text.split_once('=').map(|(k, v)| format!("echo {v} >/proc/sys/net/{k}"));
        let script = settings.iter().filter_map(line).collect::<Vec<_>>().join(" && ");
        checked(self.command("sh").args(["-c", &script])).await.map(drop)
    }

    /// Returns a command that runs inside the namespace. The process is killed when the thread that started it ends.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "ip", "netns", "exec", &self.name]).arg(program.as_ref());
        command.env_clear().env("PATH", SEARCH_PATH).env("RUST_BACKTRACE", "1").env("ETCDCTL_API", "3");
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Starts a command inside the namespace. Its output is appended to a file.
    ///
    /// # Errors
    /// The file cannot be opened, or the command cannot be started.
    pub fn spawn(&self, command: &mut Command, log: &Path) -> Result<Child> {
        let open = fs::OpenOptions::new().create(true).append(true).open(log);
        let file = open.with_context(|| format!("open {}", log.display()))?;
        let twin = file.try_clone().context("duplicate a log file")?;
        command.stdout(twin).stderr(file);
        command.spawn().with_context(|| format!("start a process in {}", self.name))
    }
}

/// Runs a command and returns its standard output.
///
/// # Errors
/// The command cannot be started, or its exit code is not 0. The message contains its standard error.
pub async fn checked(command: &mut Command) -> Result<String> {
    let what = shown(command);
    let out = command.kill_on_drop(true).output().await.with_context(|| format!("start {what}"))?;
    accept(&out, &what)?;
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

fn accept(out: &Output, what: &str) -> Result<()> {
    if !out.status.success() {
        bail!("{what}: {}: {}", out.status, String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(())
}

fn shown(command: &Command) -> String {
    let command = command.as_std();
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
