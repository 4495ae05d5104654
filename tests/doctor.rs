// SPDX-License-Identifier: Apache-2.0
//! `weft doctor pods` on a node in namespaces of the test: leaks are listed with the command that removes them, and nothing of a
//! running pod is touched.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

#[path = "common/exe.rs"]
mod exe;
#[allow(dead_code, reason = "others use more of it")]
#[path = "common/namespace.rs"]
mod namespace;
#[path = "common/program.rs"]
mod program;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use namespace::ip;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use program::write_program;
use serde_json::{Value, json};
use weft_lab::netns::make_names_private;

/// A node in namespaces of the calling thread, with a private directory of namespace names.
struct Node {
    dir: tempfile::TempDir,
    /// Number of the test, so that each test has its own container IDs.
    number: usize,
    running: Vec<Child>,
}

impl Drop for Node {
    fn drop(&mut self) {
        for child in &mut self.running {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Node {
    fn new() -> Node {
        make_names_private().expect("these tests need root");
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>).unwrap();
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let dir = tempfile::Builder::new().prefix("weft-doctor-").tempdir().unwrap();
        let node = Node { dir, number: NUMBER.fetch_add(1, Ordering::Relaxed), running: Vec::new() };
        for dir in ["networks/cbr0", "records", "results", "bin"] {
            fs::create_dir_all(node.path(dir)).unwrap();
        }
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Returns a container ID that no process of this machine mentions.
    fn id(&self, name: &str) -> String {
        format!("doctor{:08x}t{}{name}", std::process::id(), self.number)
    }

    /// Writes a file with a modification time of an hour ago.
    fn old(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
        let file = fs::File::options().write(true).open(self.path(name)).unwrap();
        let before = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
        file.set_modified(before).unwrap();
    }

    fn address(&self, addr: &str, pod: &str) {
        self.old(&format!("networks/cbr0/{addr}"), &format!("{}\r\neth0", self.id(pod)));
    }

    /// Writes a record of a routed pod, as the CNI plugin does.
    fn record(&self, pod: &str) {
        let record = json!({
            "cniVersion": "1.0.0", "name": "cbr0", "type": "weft-veth",
            "ipam": {"type": "host-local", "dataDir": self.path("networks"), "ranges": [[{"subnet": "10.5.1.0/24"}]]},
            "weft": {"ifname": "eth0"},
        });
        self.old(&format!("records/{}", self.id(pod)), &record.to_string());
    }

    /// Creates a namespace with an address. It is connected to the node by a veth pair with the name that the plugin would choose.
    fn namespace(&self, pod: &str, addr: &str) -> String {
        let host = weft_cni::veth::host_name(&self.id(pod), "eth0");
        ip(&format!("netns add {pod}"));
        ip(&format!("link add {host} type veth peer name eth0 netns {pod}"));
        let alias = format!("weft-veth cbr0 {} eth0", self.id(pod));
        assert!(Command::new("ip").args(["link", "set", &host, "alias", &alias]).status().unwrap().success());
        ip(&format!("-n {pod} addr add {addr}/32 dev eth0"));
        host
    }

    fn run_in(&mut self, pod: &str) {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "ip", "netns", "exec", pod, "sleep", "600"]);
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let netns = |path: &str| fs::metadata(path).ok().map(|about| std::os::unix::fs::MetadataExt::ino(&about));
        let begin = std::time::Instant::now();
        while netns(&format!("/proc/{}/ns/net", child.id())) != netns(&format!("/run/netns/{pod}")) {
            assert!(begin.elapsed().as_secs() < 120, "the process does not enter {pod}");
            std::thread::yield_now();
        }
        self.running.push(child);
    }

    /// Runs the program as on a host. If the tests themselves run in a container, it gets a /proc that looks like the host's.
    fn doctor(&self, more: &[&str]) -> Output {
        if is_host(&fs::read_link("/proc/self/ns/pid").unwrap()) {
            return self.run_doctor(Command::new(exe::weft_exe()), more);
        }
        self.make_proc();
        let enter = "mount --bind /proc \"$1/real\" && mount --bind \"$1/host\" /proc && shift && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", enter, "sh"]).arg(self.path("proc")).arg(exe::weft_exe());
        self.run_doctor(command, more)
    }

    /// Runs the program in a PID namespace of its own, where it cannot see every process of the host.
    fn doctor_in_a_container(&self, more: &[&str]) -> Output {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(exe::weft_exe());
        self.run_doctor(command, more)
    }

    /// Creates a directory to be mounted on /proc. It shows all processes, as if their PID namespace were the host's.
    fn make_proc(&self) {
        // The processes have changed since the last call.
        let _ = fs::remove_dir_all(self.path("proc"));
        fs::create_dir_all(self.path("proc/host/self/ns")).unwrap();
        fs::create_dir(self.path("proc/real")).unwrap();
        symlink(HOST_PID_NAMESPACE, self.path("proc/host/self/ns/pid")).unwrap();
        symlink(self.path("proc/real/thread-self"), self.path("proc/host/thread-self")).unwrap();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            if name.bytes().all(|byte| byte.is_ascii_digit()) {
                symlink(self.path("proc/real").join(&name), self.path("proc/host").join(&name)).unwrap();
            }
        }
    }

    fn run_doctor(&self, mut command: Command, more: &[&str]) -> Output {
        command.args(["doctor", "pods", "--netns", "/run/netns"]);
        for dir in ["networks", "records", "results"] {
            command.arg(format!("--{dir}")).arg(self.path(dir));
        }
        command.arg("--cni-path").arg(format!("{}:/usr/lib/cni", self.path("bin").display()));
        command.args(more).output().unwrap()
    }

    fn addresses(&self) -> Vec<String> {
        let files = fs::read_dir(self.path("networks/cbr0")).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.filter(|name| name.starts_with("10.")).collect();
        names.sort();
        names
    }

    fn files(&self, dir: &str) -> usize {
        fs::read_dir(self.path(dir)).unwrap().count()
    }
}

fn text(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

/// The host's PID namespace, whose number is fixed in the kernel (PROC_PID_INIT_INO).
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";

fn is_host(namespace: &Path) -> bool {
    namespace == Path::new(HOST_PID_NAMESPACE)
}

fn on_a_node(test: impl FnOnce(Node) + Send + 'static) {
    if let Err(panic) = std::thread::spawn(|| test(Node::new())).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Creates one running pod, and four leaks, of every kind. Returns the veth pairs of the running pod and of a deleted pod.
fn add_pods(node: &mut Node) -> (String, String) {
    node.address("10.5.1.2", "runs");
    node.record("runs");
    let runs = node.namespace("runs", "10.5.1.2");
    node.run_in("runs");
    node.address("10.5.1.3", "gone");
    node.record("gone");
    node.address("10.5.1.4", "left");
    let left = node.namespace("left", "10.5.1.4");
    (runs, left)
}

#[test]
fn leaks_are_listed_and_removed_and_running_pods_stay() {
    on_a_node(|mut node| {
        let (runs, left) = add_pods(&mut node);
        let before = (node.addresses(), node.files("records"), ip("-o link"));
        let listed = node.doctor(&[]);
        let said = text(&listed);
        assert_eq!((node.addresses(), node.files("records"), ip("-o link")), before, "listing changes nothing");
        assert_eq!(listed.status.code(), Some(1), "{said}");
        assert!(said.contains("4 leaked, 0 in doubt; examined 3 addresses, 2 records, 2 veth pairs"), "{said}");
        for command in [format!("ip link del {left}"), format!("rm {}", node.path("networks/cbr0/10.5.1.4").display())]
        {
            assert!(said.lines().any(|line| line.trim() == command), "{command}: {said}");
        }
        assert!(!said.contains(&runs) && !said.contains("10.5.1.2"), "{said}");
        let fixed = node.doctor(&["--fix"]);
        assert!(fixed.status.success(), "{}", text(&fixed));
        assert_eq!(text(&fixed).matches("cleared ").count(), 4, "{}", text(&fixed));
        assert_eq!(node.addresses(), ["10.5.1.2"]);
        assert_eq!(node.files("records"), 1, "the record of the running pod stays");
        let links = ip("-o link");
        assert!(links.contains(&runs) && !links.contains(&left), "{links}");
        let again = node.doctor(&["--fix"]);
        assert!(again.status.success() && text(&again).contains("0 leaked, 0 in doubt"), "{}", text(&again));
    });
}

/// In a container, only some processes are visible. Nothing is certain then, and nothing is removed.
#[test]
fn in_a_container_everything_is_in_doubt_and_stays() {
    on_a_node(|mut node| {
        add_pods(&mut node);
        let before = (node.addresses(), node.files("records"), ip("-o link"));
        let out = node.doctor_in_a_container(&["--fix"]);
        let said = text(&out);
        assert!(said.contains("0 leaked, 7 in doubt") && said.contains("hostPID"), "{said}");
        assert_eq!((node.addresses(), node.files("records"), ip("-o link")), before);
    });
}

#[test]
fn every_command_that_is_printed_clears_its_leak() {
    on_a_node(|mut node| {
        add_pods(&mut node);
        // This script replaces the plugin, whose DEL has tests of its own. It removes the record.
        let script = format!(
            "#!/bin/sh\n[ \"$CNI_COMMAND/$CNI_IFNAME\" = DEL/eth0 ] || exit 1\ncat >{0}/conf\nrm {0}/records/$CNI_CONTAINERID\n",
            node.dir.path().display()
        );
        write_program(&node.path("bin/flannel"), &script);
        let said = text(&node.doctor(&["--older-than", "30m"]));
        let commands: Vec<&str> = said.lines().filter_map(|line| line.strip_prefix("    ")).collect();
        assert_eq!(commands.len(), 4, "{said}");
        for command in commands {
            let done = Command::new("sh").args(["-c", command]).output().unwrap();
            assert!(done.status.success(), "{command}: {}", text(&done));
        }
        let conf: Value = serde_json::from_str(&fs::read_to_string(node.path("conf")).unwrap()).unwrap();
        assert_eq!((&conf["name"], &conf["type"]), (&json!("cbr0"), &json!("flannel")));
        let after = text(&node.doctor(&[]));
        assert!(after.contains("0 leaked, 0 in doubt"), "{after}");
    });
}

#[test]
fn what_may_belong_to_a_running_pod_is_listed_and_stays() {
    on_a_node(|mut node| {
        // The runtime's cache lists it and its namespace exists: the runtime may be about to start it.
        node.address("10.5.1.5", "cached");
        let host = node.namespace("cached", "10.5.1.6");
        let result = json!({"interfaces": [{"name": "eth0", "sandbox": "/run/netns/cached"}]});
        let cached =
            json!({"kind": "cniCacheV1", "containerId": node.id("cached"), "ifName": "eth0", "result": result});
        node.old("results/cbr0-cached-eth0", &cached.to_string());
        // This file was written just now: its pod may be starting.
        fs::write(node.path("networks/cbr0/10.5.1.7"), format!("{}\r\neth0", node.id("young"))).unwrap();
        // A process mentions its ID, as the process of a sandbox that hides its address from the kernel does.
        node.address("10.5.1.8", "sandboxed");
        let mut sandbox = Command::new("setpriv");
        sandbox.args(["--pdeathsig", "KILL", "sh", "-c", "read wait", &node.id("sandboxed")]);
        node.running.push(sandbox.stdin(Stdio::piped()).spawn().unwrap());
        // A torn record: neither valid JSON nor of a known container.
        node.old(&format!("records/{}", node.id("torn")), "{\"name\": \"cbr");
        let fixed = node.doctor(&["--fix"]);
        let said = text(&fixed);
        assert!(fixed.status.success(), "{said}");
        assert!(said.contains("0 leaked, 4 in doubt"), "{said}");
        assert_eq!(node.addresses(), ["10.5.1.5", "10.5.1.7", "10.5.1.8"]);
        assert_eq!(node.files("records"), 1);
        assert!(ip("-o link").contains(&host), "the runtime uses its namespace");
        for why in ["cache lists the container", "it is only", "contains the container's ID", "cannot be read"] {
            assert!(said.contains(why), "{why}: {said}");
        }
    });
}

#[test]
fn a_node_without_pods_is_healthy() {
    on_a_node(|node| {
        let out = node.doctor(&["--networks", "/nonexistent", "--records", "/nonexistent"]);
        assert_eq!(out.status.code(), Some(2), "a flag given twice: {}", text(&out));
        let out = node.doctor(&[]);
        assert!(
            out.status.success() && text(&out).contains("0 leaked, 0 in doubt; examined 0 addresses"),
            "{}",
            text(&out)
        );
    });
}
