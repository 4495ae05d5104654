// SPDX-License-Identifier: Apache-2.0
//! Network namespaces and processes of a lab. All of it hangs on one private mount namespace: the names under /run/netns are
//! ours alone, so any number of labs run side by side, and when the lab's thread is gone (killed, even) nothing holds the
//! namespaces any more and the kernel takes them away with their links, routes and addresses.

use std::fs;
use std::path::Path;
use std::process::{Output, Stdio};

use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};

/// Where `ip netns` keeps its names.
const NAMES: &str = "/run/netns";
/// A lab's processes get a known environment: `FLANNELD_*` of the caller must not reach the agents.
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Gives the calling thread (and the processes it starts from now on) names of namespaces that nobody else sees.
///
/// # Errors
/// Without CAP_SYS_ADMIN, or when /run is read-only.
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
    /// Creates it, with `lo` up.
    ///
    /// # Errors
    /// As `ip netns add`.
    pub async fn add(name: &str) -> Result<Netns> {
        checked(Command::new("ip").args(["netns", "add", name])).await?;
        let ns = Netns { name: name.to_owned() };
        ns.ip("link set lo up").await?;
        Ok(ns)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `ip -n NAME WORDS`; its standard output.
    ///
    /// # Errors
    /// When ip says so, with its message.
    pub async fn ip(&self, words: &str) -> Result<String> {
        checked(Command::new("ip").args(["-n", &self.name]).args(words.split_whitespace())).await
    }

    /// `bridge -n NAME WORDS`; its standard output.
    ///
    /// # Errors
    /// When bridge says so, with its message.
    pub async fn bridge(&self, words: &str) -> Result<String> {
        checked(Command::new("bridge").args(["-n", &self.name]).args(words.split_whitespace())).await
    }

    /// Many `ip` commands, one a line, in one process.
    ///
    /// # Errors
    /// When one of them fails.
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

    /// Writes files below /proc/sys/net of this namespace: `name=value` with slashes (`ipv4/ip_forward=1`).
    ///
    /// # Errors
    /// When the kernel refuses one.
    pub async fn sysctl(&self, settings: &[&str]) -> Result<()> {
        let line = |text: &&str| text.split_once('=').map(|(k, v)| format!("echo {v} >/proc/sys/net/{k}"));
        let script = settings.iter().filter_map(line).collect::<Vec<_>>().join(" && ");
        checked(self.command("sh").args(["-c", &script])).await.map(drop)
    }

    /// A command that will run inside. It dies with the thread that starts it, whatever ends that thread.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "ip", "netns", "exec", &self.name]).arg(program.as_ref());
        command.env_clear().env("PATH", SEARCH_PATH).env("RUST_BACKTRACE", "1").env("ETCDCTL_API", "3");
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Starts a command inside, its output appended to a file.
    ///
    /// # Errors
    /// When the file cannot be opened or the command not started.
    pub fn spawn(&self, command: &mut Command, log: &Path) -> Result<Child> {
        let open = fs::OpenOptions::new().create(true).append(true).open(log);
        let file = open.with_context(|| format!("open {}", log.display()))?;
        let twin = file.try_clone().context("duplicate a log file")?;
        command.stdout(twin).stderr(file);
        command.spawn().with_context(|| format!("start a process in {}", self.name))
    }
}

/// Runs a command to its end; standard output.
///
/// # Errors
/// When it cannot be started or ends with another code than 0: the message has what it wrote to standard error.
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
