// SPDX-License-Identifier: Apache-2.0
//! `make kube-demo` as its user sees it: it says when the cluster is ready, the commands that it prints work outside of all namespaces,
//! and Ctrl-C leaves nothing behind.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::Value;

use crate::install::is_ready;
use crate::places::Place;

/// How long to wait for the prompt, and for the end after Ctrl-C. It is far longer than a loaded machine needs.
const PATIENCE: Duration = Duration::from_secs(180);

/// The last line that the demo prints before it waits.
const PROMPT: &str = "Ctrl-C removes everything.";

#[test]
fn the_demo_as_its_user_sees_it() {
    let _place = Place::for_a_cluster();
    let mut demo = Demo::start();
    let said = demo.read_until(PROMPT);
    let kubeconfig = PathBuf::from(after(&said, "export KUBECONFIG="));
    let shell = Shell { kubeconfig: kubeconfig.clone(), kubectl: after(&said, "alias kubectl=") };
    shell.shows_a_cluster();
    let commands: Vec<_> = said.iter().filter_map(|line| line.strip_prefix("    ")).collect();
    assert!(commands.len() > 6, "{said:#?}");
    // The other commands ask the agents, which do not answer during a restart.
    let (restart, look): (Vec<&str>, Vec<_>) = commands.iter().partition(|command| command.contains("rollout restart"));
    for command in look.into_iter().chain(restart) {
        println!("{command}\n{}", shell.run(command));
    }
    let on_a_node = commands.iter().find(|command| command.starts_with("nsenter")).unwrap();
    assert_eq!(shell.type_into(on_a_node, "hostname"), "n1");

    let dir = kubeconfig.ancestors().nth(2).unwrap();
    let traces = Traces::of(demo.child.id(), dir);
    let (status, last) = demo.interrupt();
    assert!(status.success(), "{status}: {last:?}");
    assert_eq!(last, ["removing everything ..."]);
    traces.assert_gone();
}

/// Returns what follows a word in the line that contains it.
fn after(said: &[String], word: &str) -> String {
    let found = said.iter().find_map(|line| line.trim().strip_prefix(word));
    found.unwrap_or_else(|| panic!("no {word} in {said:#?}")).to_owned()
}

/// The demo in its own process group, as a shell would start it.
struct Demo {
    child: Child,
    lines: Receiver<String>,
}

impl Demo {
    fn start() -> Demo {
        let exe = std::env::current_exe().unwrap();
        // TARGET/debug/deps/kube-...
        let path = exe.ancestors().nth(2).unwrap().join("examples/kube-demo");
        assert!(path.is_file(), "{} is missing: cargo build --example kube-demo", path.display());
        let mut child =
            Command::new(path).process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (to, lines) = channel();
        thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| to.send(line)));
        Demo { child, lines }
    }

    fn read_until(&self, last: &str) -> Vec<String> {
        let (mut said, end) = (Vec::new(), Instant::now() + PATIENCE);
        while said.last().is_none_or(|line| line != last) {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => said.push(line),
                Err(error) => panic!("{error} before {last:?}: {said:#?}"),
            }
        }
        said
    }

    /// Sends SIGINT to the whole group, as a terminal does at Ctrl-C.
    fn signal(&self) {
        killpg(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT).unwrap();
    }

    /// Interrupts the demo, and returns its status and the rest of its output.
    fn interrupt(&mut self) -> (ExitStatus, Vec<String>) {
        self.signal();
        let (mut said, end) = (Vec::new(), Instant::now() + PATIENCE);
        loop {
            match self.lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(line) => said.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("it does not end: {said:#?}"),
            }
        }
        (self.child.wait().unwrap(), said)
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            self.signal();
            let _ = self.child.wait();
        }
    }
}

/// The user's shell in the machine's own namespaces.
struct Shell {
    kubeconfig: PathBuf,
    kubectl: String,
}

impl Shell {
    fn command(&self, script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("kubectl() {{ {} \"$@\"; }}; {script}", self.kubectl)]);
        command.env("KUBECONFIG", &self.kubeconfig).stdin(Stdio::null());
        command
    }

    fn run(&self, script: &str) -> String {
        let output = self.command(script).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        assert!(output.status.success(), "{script}: {} {}", text(&output.stdout), text(&output.stderr));
        text(&output.stdout)
    }

    /// Types a line into a command that is a shell, and returns the output.
    fn type_into(&self, shell: &str, line: &str) -> String {
        self.run(&format!("echo {line} | {shell}"))
    }

    fn shows_a_cluster(&self) {
        let items = |words: &str| {
            let list: Value = serde_json::from_str(&self.run(&format!("kubectl get -o json {words}"))).unwrap();
            list["items"].as_array().unwrap().clone()
        };
        let nodes = items("nodes");
        assert_eq!(nodes.len(), 3);
        assert!(nodes.iter().all(is_ready), "{nodes:#?}");
        // There are three agents, and a pod on each node.
        let pods = items("pods --all-namespaces");
        assert_eq!(pods.len(), 6);
        assert!(pods.iter().all(|pod| pod["status"]["phase"] == "Running"), "{pods:#?}");
    }
}

/// Everything of the cluster that can be seen on the machine.
struct Traces {
    dir: PathBuf,
    /// The start of the youngest process.
    last: u64,
    /// Process ids with the start time, which makes them unique.
    processes: BTreeSet<(u32, u64)>,
    /// Namespaces other than our own.
    namespaces: BTreeSet<PathBuf>,
    cgroups: BTreeSet<PathBuf>,
}

impl Traces {
    /// Finds the traces of what the process `root` has started.
    fn of(root: u32, dir: &Path) -> Traces {
        let all: Vec<_> = processes().collect();
        let ours = family(root, &all);
        let own: BTreeSet<_> = namespaces("self").collect();
        let foreign = ours.iter().flat_map(|number| namespaces(&number.to_string())).filter(|name| !own.contains(name));
        let last = all.iter().map(|process| process.start).max().unwrap_or_default();
        let mine = all.into_iter().filter(|process| ours.contains(&process.number));
        let traces = Traces {
            dir: dir.to_owned(),
            last,
            processes: mine.map(|process| (process.number, process.start)).collect(),
            namespaces: foreign.collect(),
            cgroups: cgroups().filter(|(number, _)| ours.contains(number)).map(|(_, path)| path).collect(),
        };
        // Make sure that the search finds something. Each node has containerd, kubelet, kube-proxy and pods, and several namespaces.
        assert!(traces.processes.len() > 20, "{:?}", traces.processes);
        assert!(traces.namespaces.len() > 3 * 5, "{:?}", traces.namespaces);
        assert!(traces.cgroups.len() >= 3, "{:?}", traces.cgroups);
        assert!(dir.is_dir());
        traces
    }

    fn assert_gone(&self) {
        assert!(!self.dir.exists(), "{} is left", self.dir.display());
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(self.dir.to_str().unwrap()), "{mounts}");
        let all: Vec<_> = processes().collect();
        let others = family(std::process::id(), &all);
        for Process { number, start, .. } in all {
            assert!(!self.processes.contains(&(number, start)), "process {number} is left");
            // The kernel reuses the numbers of namespaces. So only processes that are not younger than the demo's count, and none of our own.
            if start > self.last || others.contains(&number) {
                continue;
            }
            let left = namespaces(&number.to_string()).find(|name| self.namespaces.contains(name));
            assert_eq!(left, None, "process {number} is in a namespace of it");
        }
        for path in &self.cgroups {
            assert!(!path.exists(), "{} is left", path.display());
        }
    }
}

struct Process {
    number: u32,
    parent: u32,
    /// The start time, in ticks since the boot.
    start: u64,
}

/// Returns a process and its descendants. Their parents can be seen from here, whatever namespaces they are in.
fn family(root: u32, all: &[Process]) -> BTreeSet<u32> {
    let mut found = BTreeSet::from([root]);
    loop {
        let before = found.len();
        let children = all.iter().filter(|process| found.contains(&process.parent)).map(|process| process.number);
        let children: Vec<_> = children.collect();
        found.extend(children);
        if found.len() == before {
            return found;
        }
    }
}

/// Returns the processes that have not ended.
fn processes() -> impl Iterator<Item = Process> {
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // The name is in parentheses and may contain anything.
        let fields: Vec<_> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        // proc_pid_stat(5): state, parent ... start.
        (fields[0] != "Z").then_some(())?;
        Some(Process { number, parent: fields[1].parse().ok()?, start: fields[19].parse().ok()? })
    })
}

fn namespaces(process: &str) -> impl Iterator<Item = PathBuf> + use<> {
    let links = fs::read_dir(format!("/proc/{process}/ns")).into_iter().flatten().flatten();
    links.filter_map(|link| fs::read_link(link.path()).ok())
}

/// Returns the control groups that clusters created, with the id of the process that created them.
fn cgroups() -> impl Iterator<Item = (u32, PathBuf)> {
    let output = Command::new("find").args(["/sys/fs/cgroup", "-type", "d", "-name", "weft-kube-*"]).output().unwrap();
    let found = String::from_utf8(output.stdout).unwrap();
    let paths: Vec<_> = found.lines().map(PathBuf::from).collect();
    paths.into_iter().filter_map(|path| {
        let name = path.file_name()?.to_str()?.strip_prefix("weft-kube-")?;
        Some((name.split('-').next()?.parse().ok()?, path))
    })
}
