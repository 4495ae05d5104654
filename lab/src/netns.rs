// SPDX-License-Identifier: Apache-2.0
//! Network namespaces of a lab, and the processes inside them.
//!
//! Their names belong to a private mount namespace. Each lab therefore has its own names below /run/netns, and any
//! number of labs can run at the same time. When the lab's thread ends, even if it is killed, nothing refers to the
//! namespaces any more. The kernel then removes them with their links, routes and addresses.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::getppid;
use tokio::process::{Child, Command};

use super::network::Network;

/// The directory of namespace names, as `ip netns` uses it.
pub const NAMES: &str = "/run/netns";
/// The processes of a lab get a fixed environment, so that the caller's `FLANNELD_*` variables do not reach the agents.
const SEARCH_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Gives the calling thread, and the processes that it starts later, a private and empty directory of namespace names.
///
/// # Errors
/// CAP_SYS_ADMIN is missing, or /run is read-only.
pub fn make_names_private() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("unshare the mount namespace (the lab needs root)")?;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, private, None::<&str>).context("make / private")?;
    fs::create_dir_all(NAMES).with_context(|| format!("create {NAMES}"))?;
    mount(Some("weft-lab"), NAMES, Some("tmpfs"), MsFlags::empty(), Some("mode=755"))
        .with_context(|| format!("mount a tmpfs on {NAMES}"))
}

/// Returns true if the kernel of this machine has IPv6. It has none with `ipv6.disable=1` on its command line.
pub fn has_ipv6() -> bool {
    Path::new("/proc/sys/net/ipv6/conf").exists()
}

/// A named network namespace.
#[derive(Debug, Clone)]
pub struct Netns {
    name: String,
    /// The program whose `lab exec` starts processes in the namespace.
    weft: PathBuf,
}

impl Netns {
    /// Creates a namespace and sets `lo` up. `weft` is the path of a weft binary, which starts the namespace's
    /// processes.
    ///
    /// # Errors
    /// The name is in use, or the kernel refuses the namespace.
    pub async fn add(name: &str, weft: &Path) -> Result<Netns> {
        let path = Path::new(NAMES).join(name);
        File::create_new(&path).with_context(|| format!("create {}", path.display()))?;
        // Only the new thread moves to the new namespace. It shares the mounts of this thread.
        in_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).context("create a network namespace")?;
            let own = "/proc/thread-self/ns/net";
            mount(Some(own), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>)
                .with_context(|| format!("mount a network namespace on {}", path.display()))
        })?;
        let ns = Netns { name: name.to_owned(), weft: weft.to_owned() };
        ns.network()?.set_up("lo").await?;
        Ok(ns)
    }

    /// Creates another namespace, whose processes are started by the same program.
    ///
    /// # Errors
    /// As [`Netns::add`].
    pub async fn add_other(&self, name: &str) -> Result<Netns> {
        Netns::add(name, &self.weft).await
    }

    /// Removes the name. The kernel removes the namespace when no process and no socket uses it any more.
    ///
    /// # Errors
    /// The name was removed already.
    pub fn remove(self) -> Result<()> {
        let path = self.path();
        umount2(&path, MntFlags::MNT_DETACH).with_context(|| format!("unmount {}", path.display()))?;
        fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path of the namespace.
    pub fn path(&self) -> PathBuf {
        Path::new(NAMES).join(&self.name)
    }

    /// Connects to the kernel to read and change the links, addresses, routes and neighbours of this namespace. It must
    /// be called in a tokio runtime.
    ///
    /// # Errors
    /// The namespace cannot be entered, or the socket cannot be opened.
    pub fn network(&self) -> Result<Network> {
        let runtime = tokio::runtime::Handle::current();
        self.inside(|| {
            let _entered = runtime.enter();
            Network::open()
        })
    }

    /// Sets sysctls of this namespace. A setting is `NAME=VALUE`, where the name is a path below /proc/sys/net
    /// (`ipv4/ip_forward=1`).
    ///
    /// # Errors
    /// The kernel refuses a setting.
    pub fn sysctl(&self, settings: &[&str]) -> Result<()> {
        self.inside(|| {
            for setting in settings {
                let (name, value) = setting.split_once('=').with_context(|| format!("{setting} has no value"))?;
                let path = Path::new("/proc/sys/net").join(name);
                fs::write(&path, value).with_context(|| format!("write {value} to {}", path.display()))?;
            }
            Ok(())
        })
    }

    /// Runs `ip -n NAME WORDS` and returns its standard output. Only tests use it: a lab itself does not need iproute2.
    ///
    /// # Errors
    /// ip fails; the message contains its standard error.
    pub async fn ip(&self, words: &str) -> Result<String> {
        checked(Command::new("ip").args(["-n", &self.name]).args(words.split_whitespace())).await
    }

    /// Runs `bridge -n NAME WORDS` and returns its standard output. Only tests use it.
    ///
    /// # Errors
    /// bridge fails; the message contains its standard error.
    pub async fn bridge(&self, words: &str) -> Result<String> {
        checked(Command::new("bridge").args(["-n", &self.name]).args(words.split_whitespace())).await
    }

    /// Returns a command that runs inside the namespace. The process is killed when the thread that started it ends.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(&self.weft);
        let parent = std::process::id().to_string();
        command.args(["lab", "exec", &parent, &self.name]).arg(program.as_ref());
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

    /// Runs a function in a thread that is inside the namespace.
    fn inside<T: Send>(&self, function: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        let path = self.path();
        in_thread(|| {
            enter_network(&path)?;
            function()
        })
    }
}

/// Replaces this process with a program inside a network namespace. `weft lab exec` calls it; it is how a lab starts
/// every process. The program is killed when the thread of `parent` that started this process ends. It has a mount
/// namespace of its own, in which /sys shows the links of the network namespace.
///
/// # Errors
/// The parent has ended already, the namespace does not exist, or the program cannot be started. Without an error, the
/// function does not return.
pub fn exec(parent: u32, netns: &str, words: &[String]) -> Result<std::convert::Infallible> {
    use std::os::unix::process::CommandExt;
    set_pdeathsig(Signal::SIGKILL).context("ask for a signal when the parent ends")?;
    // The parent may have ended before the signal was asked for.
    if u32::try_from(getppid().as_raw()) != Ok(parent) {
        bail!("process {parent}, which started this one, has ended");
    }
    enter(&Path::new(NAMES).join(netns))?;
    let (program, args) = words.split_first().context("no program is given")?;
    Err(std::process::Command::new(program).args(args).exec()).with_context(|| format!("start {program} in {netns}"))
}

/// Moves the calling thread into a network namespace, and into a new mount namespace in which /sys shows the links of the
/// network namespace.
///
/// # Errors
/// The path is not a network namespace, or CAP_SYS_ADMIN is missing.
pub fn enter(path: &Path) -> Result<()> {
    enter_network(path)?;
    unshare(CloneFlags::CLONE_NEWNS).context("unshare the mount namespace")?;
    let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    mount(None::<&str>, "/", None::<&str>, slave, None::<&str>).context("make / a slave mount")?;
    // A container may forbid that /sys is unmounted. The new mount covers the old one then.
    let _ = umount2("/sys", MntFlags::MNT_DETACH);
    mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>).context("mount /sys")
}

fn enter_network(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    setns(file, CloneFlags::CLONE_NEWNET).with_context(|| format!("enter {}", path.display()))
}

/// Runs a function in a thread of its own and returns its result. What it does to its namespaces ends with the thread.
pub fn in_thread<T: Send>(function: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| scope.spawn(function).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// Checks that a program is installed where the processes of a lab find it.
///
/// # Errors
/// It is not. The message names the Debian package to install.
pub fn require(program: &str, package: &str) -> Result<()> {
    if SEARCH_PATH.split(':').any(|dir| Path::new(dir).join(program).is_file()) {
        return Ok(());
    }
    bail!("the program {program} is not in {SEARCH_PATH}: apt-get install {package}")
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
