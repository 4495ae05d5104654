// SPDX-License-Identifier: Apache-2.0
//! A node as a container runtime sees it: the node and its pods have network namespaces of their own, and the plugins
//! get their parameters from the environment.
//!
//! All namespaces and mounts belong to the test's own thread and disappear with it.

use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde_json::{Value, json};

/// Directory of Debian's package containernetworking-plugins.
pub const PLUGINS: &str = "/usr/lib/cni";

pub struct Site {
    pub dir: tempfile::TempDir,
    /// Additional environment variables for every call.
    pub vars: Vec<(String, String)>,
}

/// The result of a call.
#[derive(Debug)]
pub struct Answer {
    pub ok: bool,
    pub stdout: Vec<u8>,
    pub stderr: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    #[track_caller]
    pub fn success(self) -> Answer {
        assert!(self.ok, "{} / {}", String::from_utf8_lossy(&self.stdout), self.stderr);
        self
    }

    /// The error's code and message.
    #[track_caller]
    pub fn error(&self) -> (u64, String) {
        assert!(!self.ok, "the call succeeded: {self:?}");
        let error = self.json();
        let text = format!("{} {}", error["msg"].as_str().unwrap(), error["details"].as_str().unwrap_or_default());
        (error["code"].as_u64().unwrap(), text)
    }
}

impl Site {
    /// A node with IPv4 and IPv6 and a subnet.env.
    pub fn new() -> Site {
        assert!(
            Path::new(PLUGINS).join("bridge").is_file(),
            "install Debian's package containernetworking-plugins: {PLUGINS} does not contain the plugin bridge"
        );
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).expect("create namespaces: these tests need root");
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        fs::create_dir_all("/run/netns").unwrap();
        mount(Some("weft-cni"), "/run/netns", Some("tmpfs"), MsFlags::empty(), Some("mode=755")).unwrap();
        // /sys must show the devices of this namespace.
        mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), None::<&str>).unwrap();
        let dir = tempfile::Builder::new().prefix("weft-cni-").tempdir().unwrap();
        fs::create_dir(dir.path().join("bin")).unwrap();
        symlink(env!("CARGO_BIN_EXE_weft-cni"), dir.path().join("bin/flannel")).unwrap();
        symlink(env!("CARGO_BIN_EXE_weft-cni"), dir.path().join("bin/weft-veth")).unwrap();
        let site = Site { dir, vars: Vec::new() };
        site.subnet_env(&env_text("10.5.1", "fd05:0:0:1", 1450));
        site.ip("link set lo up");
        site
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn subnet_env(&self, text: &str) {
        fs::create_dir_all(self.path("run")).unwrap();
        fs::write(self.path("run/.subnet.env"), text).unwrap();
        fs::rename(self.path("run/.subnet.env"), self.path("run/subnet.env")).unwrap();
    }

    /// Installs a shell script as a plugin. `$here` is the directory of this site. A child writes it: a process that another test is just
    /// starting has copies of all files that this one has open for writing, and the kernel refuses to run such a file.
    pub fn script(&self, name: &str, text: &str) {
        let (file, aside) = (self.path("bin").join(name), self.path(name));
        let text = format!("#!/bin/sh\nhere={}\n{text}\n", self.dir.path().display());
        let mut shell = Command::new("sh");
        shell.args(["-c", r#"cat >"$0" && chmod 755 "$0""#]).arg(&aside).stdin(Stdio::piped());
        let mut writes = shell.spawn().unwrap();
        writes.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(writes.wait().unwrap().success(), "{name} is not written");
        fs::rename(aside, file).unwrap();
    }

    /// Returns a network configuration, extended by the members of `more`.
    pub fn conf(&self, more: Value) -> Value {
        let mut conf = json!({
            "cniVersion": "1.0.0", "name": "cbr0", "type": "flannel",
            "subnetFile": self.path("run/subnet.env"), "dataDir": self.path("records"),
            "ipam": {"dataDir": self.path("networks")},
        });
        for (key, value) in more.as_object().unwrap() {
            conf[key] = value.clone();
        }
        conf
    }

    /// Creates a pod's namespace and returns its path.
    pub fn pod(&self, name: &str) -> String {
        self.ip(&format!("netns add {name}"));
        format!("/run/netns/{name}")
    }

    /// Makes `bin/flannel` a link to this plugin.
    pub fn install(&self, plugin: &Path) {
        let file = self.path("bin/flannel");
        fs::remove_file(&file).unwrap();
        symlink(plugin, file).unwrap();
    }

    pub fn command(&self, verb: &str, pod: &str, ifname: &str) -> Command {
        self.command_of("flannel", verb, pod, ifname)
    }

    /// Returns a call of the plugin with this name.
    pub fn command_of(&self, plugin: &str, verb: &str, pod: &str, ifname: &str) -> Command {
        let mut command = Command::new(self.path("bin").join(plugin));
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.env("CNI_COMMAND", verb).env("CNI_PATH", format!("{}:{PLUGINS}", self.path("bin").display()));
        if !pod.is_empty() {
            command.env("CNI_CONTAINERID", format!("id-{pod}")).env("CNI_IFNAME", ifname);
            command.env("CNI_NETNS", format!("/run/netns/{pod}"));
        }
        command.envs(self.vars.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Calls the plugin for `eth0` of a pod.
    pub fn call(&self, verb: &str, pod: &str, conf: &Value) -> Answer {
        run(self.command(verb, pod, "eth0"), conf)
    }

    pub fn ip(&self, words: &str) -> String {
        let out = Command::new("ip").args(words.split_whitespace()).output().unwrap();
        assert!(out.status.success(), "ip {words}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    }

    /// Returns the files of a directory without those of host-local's own bookkeeping. A missing directory is empty.
    pub fn files(&self, dir: &str) -> Vec<String> {
        let Ok(files) = fs::read_dir(self.path(dir)) else { return Vec::new() };
        let mut names: Vec<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != "lock" && !name.starts_with("last_reserved_ip"));
        names.sort();
        names
    }

    pub fn addresses(&self) -> Vec<String> {
        self.files("networks/cbr0")
    }

    pub fn veths(&self) -> usize {
        self.ip("-o link show type veth").lines().count()
    }

    #[track_caller]
    pub fn nothing_left(&self) {
        assert_eq!(self.files("records"), Vec::<String>::new(), "records");
        assert_eq!(self.addresses(), Vec::<String>::new(), "addresses");
        // The kernel removes the veths of a deleted namespace asynchronously.
        wait_for("the last veth to disappear", || self.veths() == 0);
    }
}

/// Returns a subnet.env with these beginnings of the node's subnets.
pub fn env_text(v4: &str, v6: &str, mtu: u32) -> String {
    format!(
        "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET={v4}.1/24\nFLANNEL_IPV6_NETWORK=fd05::/48\n\
         FLANNEL_IPV6_SUBNET={v6}::1/64\nFLANNEL_MTU={mtu}\nFLANNEL_IPMASQ=true\n"
    )
}

/// A subnet.env with IPv4 only. The ptp plugin fails if it looks up a route to an IPv6 address while duplicate address
/// detection is still running.
pub const V4_TEXT: &str =
    "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

/// Returns the NAT rules of one family, as `iptables` or `ip6tables` prints them.
pub fn nat_rules(program: &str) -> String {
    let out = Command::new(program).args(["-t", "nat", "-S"]).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stdout).unwrap()
}

pub fn run(mut command: Command, conf: &Value) -> Answer {
    let mut child = command.spawn().unwrap();
    // A plugin that ends before it reads causes a broken pipe.
    let _ = child.stdin.take().unwrap().write_all(conf.to_string().as_bytes());
    let out = child.wait_with_output().unwrap();
    Answer { ok: out.status.success(), stdout: out.stdout, stderr: String::from_utf8_lossy(&out.stderr).into_owned() }
}

#[track_caller]
pub fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(300), "waited 300 s for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Runs a test in a thread of its own. The tests of one binary share a process, but each thread can have its own
/// namespaces.
pub fn on_a_node(test: impl FnOnce(Site) + Send + 'static) {
    if let Err(panic) = std::thread::spawn(|| test(Site::new())).join() {
        std::panic::resume_unwind(panic);
    }
}
