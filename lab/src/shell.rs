// SPDX-License-Identifier: Apache-2.0
//! `weft lab shell`, `weft lab mesh` and `weft lab ui`: find a running lab by its file below /run/weft-lab, and enter one of its namespaces.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns, unshare};
use serde::{Deserialize, Serialize};

use super::cluster::Lab;
use super::netns::{NAMES, in_thread};

/// Directory with one file for each running lab.
const LABS: &str = "/run/weft-lab";

/// The content of a lab's file.
#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    /// ID of the process whose mount namespace contains the names.
    pid: u32,
    /// That mount namespace. If the process ID was reused, the other process has a different one.
    mounts: PathBuf,
    /// The directory of the lab, which contains a directory for each node.
    dir: PathBuf,
}

/// The file of a running lab. Dropping it removes the file.
#[derive(Debug)]
pub struct Announced(PathBuf);

impl Drop for Announced {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
        // The last lab removes the directory. This fails as long as the directory is not empty.
        let _ = fs::remove_dir(LABS);
    }
}

/// Writes the file of a lab that runs on the first thread of this process.
///
/// # Errors
/// /run cannot be written.
pub fn announce(lab: &Lab) -> Result<Announced> {
    let pid = std::process::id();
    let entry = Entry {
        pid,
        mounts: mounts_of("self").context("read this process's mount namespace")?,
        dir: lab.dir().to_owned(),
    };
    let text = serde_json::to_string(&entry).with_context(|| format!("describe the lab in {}", lab.dir().display()))?;
    fs::create_dir_all(LABS).with_context(|| format!("create {LABS}"))?;
    let path = Path::new(LABS).join(format!("{pid}.json"));
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    Ok(Announced(path))
}

/// Starts a shell in a node or pod of a running lab.
///
/// # Errors
/// No lab is running, or none has a node or pod with this name.
pub fn shell(node: &str) -> Result<ExitCode> {
    let labs = running()?;
    let Some(lab) = labs.iter().find(|lab| has(lab.pid, node)) else {
        bail!("no running lab has {node} (labs running: {}; start one with `weft lab --keep`)", labs.len());
    };
    let program = if Path::new("/bin/bash").exists() { "/bin/bash" } else { "/bin/sh" };
    let mut command = inside(node)?;
    command.arg(program);
    if program.ends_with("bash") {
        command.arg("--norc");
    }
    run_in(lab, command.arg("-i").env("PS1", format!("{node}# ")))
}

/// The node whose agent `weft lab mesh` and `weft lab ui` ask.
const FIRST: &str = "n1";

/// Shows the ways between all nodes of a running lab.
///
/// # Errors
/// No lab is running.
pub fn mesh(output: &str) -> Result<ExitCode> {
    weft_in_first(&["mesh", "--all", &format!("--output={output}")], Stdio::null())
}

/// Serves the page of a running lab. The page is in a namespace of the lab, and its socket in that of the browser.
///
/// # Errors
/// No lab is running, or the port is in use.
pub fn ui(port: u16) -> Result<ExitCode> {
    let address = (Ipv4Addr::LOCALHOST, port);
    let listener =
        TcpListener::bind(address).with_context(|| format!("listen on 127.0.0.1:{port}: choose another --port"))?;
    weft_in_first(&["ui", "--listen-stdin"], OwnedFd::from(listener).into())
}

/// Runs `weft` with these words and the subnet file of the first node in the namespace of that node.
fn weft_in_first(words: &[&str], input: Stdio) -> Result<ExitCode> {
    let labs = running()?;
    let Some(lab) = labs.iter().find(|lab| has(lab.pid, FIRST)) else {
        bail!("no lab is running: start one with `weft lab --keep`");
    };
    let subnet_file = lab.dir.join(FIRST).join("subnet.env");
    let mut command = inside(FIRST)?;
    command.arg(this_program()?);
    run_in(lab, command.args(words).arg(format!("--subnet-file={}", subnet_file.display())).stdin(input))
}

fn this_program() -> Result<PathBuf> {
    std::env::current_exe().context("find this program's own file")
}

/// Returns the beginning of a command that runs a program in the namespace with this name. The caller adds the program and its arguments. The
/// program ends with this process.
fn inside(node: &str) -> Result<Command> {
    let mut command = Command::new(this_program()?);
    command.args(["lab", "exec", &std::process::id().to_string(), node]);
    Ok(command)
}

/// Runs a command of [`inside`] among the names of a lab.
fn run_in(lab: &Entry, command: &mut Command) -> Result<ExitCode> {
    let mounts = File::open(format!("/proc/{}/ns/mnt", lab.pid)).context("open the lab's mount namespace")?;
    let status = in_thread(|| {
        // A thread that shares its root and working directory with others may not enter a mount namespace.
        unshare(CloneFlags::CLONE_FS).context("unshare the root directory")?;
        setns(&mounts, CloneFlags::CLONE_NEWNS).context("enter the lab's mount namespace (root is needed)")?;
        command.status().with_context(|| format!("start {}", command.get_program().display()))
    })?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Returns true if the lab of a process has a namespace with this name.
fn has(pid: u32, name: &str) -> bool {
    let plain = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    plain && Path::new(&format!("/proc/{pid}/root{NAMES}")).join(name).exists()
}

/// Returns the running labs. Files of labs that were killed are removed.
fn running() -> Result<Vec<Entry>> {
    let files = match fs::read_dir(LABS) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        files => files.with_context(|| format!("read {LABS}"))?,
    };
    let mut labs = Vec::new();
    for file in files {
        let path = file.with_context(|| format!("read {LABS}"))?.path();
        let text = match fs::read_to_string(&path) {
            // The lab has ended meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            text => text.with_context(|| format!("read {}", path.display()))?,
        };
        // A lab that is just starting has not written all of its file.
        let Ok(entry) = serde_json::from_str::<Entry>(&text) else { continue };
        match mounts_of(&entry.pid.to_string()) {
            Ok(mounts) if mounts == entry.mounts => labs.push(entry),
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("look for the lab of process {}", entry.pid));
            }
            _ => drop(fs::remove_file(&path)),
        }
    }
    Ok(labs)
}

fn mounts_of(process: &str) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/{process}/ns/mnt"))
}
