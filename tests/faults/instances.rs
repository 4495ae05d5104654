// SPDX-License-Identifier: Apache-2.0
//! Two agents on one host, with two networks in two stores and two subnet files, for vxlan and host-gw.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value as Json, json};

use crate::exe::weft_exe;
use crate::site::{Kind, Lease, PATIENCE, Site, fence, in_namespace, ip, observed};

/// The second agent: host-gw in 10.6.0.0/16, with the files of the first one's directory under other names.
struct Second {
    agent: Option<Child>,
}

impl Second {
    fn new(site: &Site) -> Second {
        fs::create_dir_all(site.path("store2/subnets")).unwrap();
        let config = json!({"Network": "10.6.0.0/16", "Backend": {"Type": "host-gw"}});
        fs::write(site.path("store2/config.json"), config.to_string()).unwrap();
        for number in 1..12 {
            let key = Lease::new(number).key(Kind::HostGw).replace("10.5.", "10.6.");
            let value = Lease::new(number).value(Kind::HostGw).to_string();
            fs::write(site.path("store2/subnets").join(format!("{key}.json")), value).unwrap();
        }
        let mut second = Second { agent: None };
        second.start(site);
        second
    }

    fn start(&mut self, site: &Site) {
        let mut command = site.weft_on("agent", "run/second.sock");
        let (store, file) = (site.path("store2"), site.path("run/second.env"));
        command.args([
            format!("--store=dir:{}", store.display()),
            format!("--subnet-file={}", file.display()),
            "--iface=up0".to_owned(),
            "--resync=1h".to_owned(),
        ]);
        let log = fs::OpenOptions::new().create(true).append(true).open(site.path("log2")).unwrap();
        self.agent = Some(command.stdout(Stdio::null()).stderr(log).spawn().unwrap());
    }

    fn stop(&mut self) {
        let mut agent = self.agent.take().unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(i32::try_from(agent.id()).unwrap()), Signal::SIGTERM)
            .unwrap();
        assert!(agent.wait().unwrap().success());
    }

    fn expected() -> BTreeSet<String> {
        let routes = (2..12).map(|n| format!("route 10.6.{n}.0/24 via 10.0.0.{n} dev up0"));
        routes.chain(fence("10.6.0.0/16")).collect()
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }
}

fn both(site: &Site, want: &BTreeSet<String>, what: &str) {
    let deadline = Instant::now() + PATIENCE;
    let mut seen = observed();
    while seen != *want {
        let log2 = || fs::read_to_string(site.path("log2")).unwrap();
        assert!(
            Instant::now() < deadline,
            "{what}: missing {:#?}, too much {:#?}\n{}\n{}",
            want.difference(&seen).collect::<Vec<_>>(),
            seen.difference(want).collect::<Vec<_>>(),
            site.log(),
            log2()
        );
        seen = observed();
    }
}

#[test]
fn two_agents_do_not_disturb_one_another() {
    in_namespace(|| {
        let mut site = Site::running(Kind::Vxlan);
        let mut second = Second::new(&site);
        let first = site.expected();
        let all: BTreeSet<String> = first.union(&Second::expected()).cloned().collect();
        both(&site, &all, "the start of both");
        site.until("the second subnet.env", |site| site.path("run/second.env").exists());
        let env = fs::read_to_string(site.path("run/second.env")).unwrap();
        assert_eq!(
            env,
            "FLANNEL_NETWORK=10.6.0.0/16\nFLANNEL_SUBNET=10.6.1.1/24\nFLANNEL_MTU=1500\nFLANNEL_IPMASQ=false\n"
        );
        ip("route del 10.5.7.0/24");
        ip("route del 10.6.7.0/24");
        ip("link set flannel.1 down");
        both(&site, &all, "faults of both");
        site.stop(Signal::SIGTERM);
        site.start();
        second.stop();
        second.start(&site);
        ip("link set up0 down");
        ip("link set up0 up");
        both(&site, &all, "a restart of both, and the uplink down and up");
        site.ready();
        second.stop();
        let nexthops = ip("nexthop").lines().count();
        assert_eq!(nexthops, 30, "{}", ip("nexthop"));
        site.stop(Signal::SIGTERM);
        let out = site.cleanup();
        assert!(out.status.success(), "{out:?}");
        both(&site, &Second::expected(), "cleanup of the first");
        assert_eq!(ip("nexthop").lines().count(), 10, "{}", ip("nexthop"));
        site.start();
        second.start(&site);
        both(&site, &all, "the end");
    });
}

#[test]
fn a_second_agent_on_the_same_socket_is_refused() {
    in_namespace(|| {
        let mut site = Site::running(Kind::Vxlan);
        let mut command = site.weft("agent");
        command.arg(format!("--store=dir:{}", site.path("store").display())).arg("--iface=up0");
        let out = command.arg(format!("--subnet-file={}", site.env_file().display())).output().unwrap();
        assert!(!out.status.success());
        assert!(String::from_utf8(out.stderr).unwrap().contains("another agent answers"));
        site.healed("a second agent that was refused");
    });
}

/// Starts an agent with a subnet file and without a socket, as flannel's users run a second network.
struct Instance<'a> {
    site: &'a Site,
    file: PathBuf,
    agent: Option<Child>,
}

impl<'a> Instance<'a> {
    fn start(site: &'a Site, store: &str, file: &str, flags: &[String]) -> Instance<'a> {
        let mut instance = Instance { site, file: site.path("run").join(file), agent: None };
        let mut command = instance.weft("agent");
        command.arg(format!("--store=dir:{}", site.path(store).display())).args(["--iface=up0", "--resync=1h"]);
        command.args(flags);
        let log = fs::OpenOptions::new().create(true).append(true).open(site.path("log")).unwrap();
        instance.agent = Some(command.stdout(Stdio::null()).stderr(log).spawn().unwrap());
        instance
    }

    fn weft(&self, command: &str) -> Command {
        let mut weft = Command::new("setpriv");
        weft.args(["--pdeathsig", "KILL"]).arg(weft_exe()).arg(command);
        weft.arg(format!("--subnet-file={}", self.file.display())).stdin(Stdio::null());
        weft
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.agent.as_ref().unwrap().id()).unwrap();
        kill(Pid::from_raw(pid), signal).unwrap();
    }

    fn end(&mut self) {
        self.signal(Signal::SIGTERM);
        assert!(self.agent.take().unwrap().wait().unwrap().success());
    }

    fn status(&self) -> Json {
        let out = self.weft("status").args(["-o", "json"]).output().unwrap();
        serde_json::from_slice(&out.stdout).unwrap_or_default()
    }

    fn ready(&self, network: &str) {
        self.site.until("both agents", |_| {
            let status = self.status();
            status["ready"] == json!(true) && status["network"] == json!(network)
        });
    }

    fn cleanup(&self, flags: &[&str]) -> Output {
        self.weft("cleanup")
            .arg(format!("--cni-conf-dir={}", self.site.path("net.d").display()))
            .args(flags)
            .output()
            .unwrap()
    }

    /// Returns what the plugin says about the agent while it adds this pod. Whether the pod gets a network does not matter here.
    fn add(&self, pod: &Pod) -> String {
        let plugin = weft_exe().with_file_name("weft-cni");
        assert!(plugin.is_file(), "{} is missing: cargo build -p weft-cni", plugin.display());
        let conf = json!({
            "cniVersion": "1.0.0", "name": "net", "type": "flannel", "subnetFile": self.file,
            "dataDir": self.site.path("records"), "delegate": {"type": "fine"},
        });
        fs::write(self.site.path("conf"), conf.to_string()).unwrap();
        let mut command = Command::new(plugin);
        command.env("CNI_COMMAND", "ADD").env("CNI_CONTAINERID", "pod").env("CNI_IFNAME", "eth0");
        command.env("CNI_NETNS", &pod.netns).env("CNI_PATH", self.site.path("bin"));
        let out = command.stdin(fs::File::open(self.site.path("conf")).unwrap()).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        let said = String::from_utf8(out.stderr).unwrap();
        said.lines().filter(|line| line.contains("the agent")).collect()
    }
}

impl Drop for Instance<'_> {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }
}

/// A pod, which is a process in a network namespace of its own.
struct Pod {
    process: Child,
    netns: PathBuf,
}

impl Pod {
    fn new() -> Pod {
        let mut command = Command::new("setpriv");
        let process = command.args(["--pdeathsig", "KILL", "unshare", "--net", "sleep", "600"]).spawn().unwrap();
        let netns = PathBuf::from(format!("/proc/{}/ns/net", process.id()));
        let ours = fs::read_link("/proc/thread-self/ns/net").unwrap();
        let deadline = Instant::now() + PATIENCE;
        while fs::read_link(&netns).unwrap() == ours {
            assert!(Instant::now() < deadline, "a network namespace");
        }
        Pod { process, netns }
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Two networks of vxlan. The files are beside those that [`Site`] made.
fn two_networks(site: &Site) {
    use std::os::unix::fs::PermissionsExt;
    fs::create_dir_all(site.path("store2/subnets")).unwrap();
    fs::create_dir_all(site.path("bin")).unwrap();
    let config = json!({"Network": "10.6.0.0/16", "Backend": {"Type": "vxlan", "VNI": 2}});
    fs::write(site.path("store2/config.json"), config.to_string()).unwrap();
    let delegate = "#!/bin/sh\ncat >/dev/null\necho '{\"cniVersion\":\"1.0.0\"}'\n";
    fs::write(site.path("bin/fine"), delegate).unwrap();
    fs::set_permissions(site.path("bin/fine"), fs::Permissions::from_mode(0o755)).unwrap();
}

fn refused(out: &Output, why: &str) {
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains(why), "{out:?}");
}

#[test]
fn all_of_an_instance_follows_from_its_subnet_file() {
    in_namespace(|| {
        let site = Site::new(Kind::Vxlan);
        two_networks(&site);
        let first = Instance::start(&site, "store", "subnet.env", &[]);
        let mut second = Instance::start(&site, "store2", "second.env", &[]);
        first.ready("10.5.0.0/16");
        second.ready("10.6.0.0/16");
        for socket in ["run/weft.sock", "run/weft-second.env.sock"] {
            assert!(site.path(socket).exists(), "{socket}");
        }
        // The plugin asks only the agent that writes the subnet file of its network.
        let pod = Pod::new();
        assert_eq!((first.add(&pod), second.add(&pod)), (String::new(), String::new()));
        second.signal(Signal::SIGSTOP);
        assert_eq!(first.add(&pod), "", "the first agent answers");
        let said = second.add(&pod);
        assert!(said.contains("ask the agent on") && said.contains("weft-second.env.sock"), "{said}");
        second.signal(Signal::SIGCONT);
        // Each one is cleaned up separately.
        refused(&second.cleanup(&[]), "an agent answers on");
        second.end();
        first.ready("10.5.0.0/16");
        refused(&second.cleanup(&["--flannel-devices"]), "would take the devices of weft (pid");
        assert!(ip("link").contains("flannel.2"));
        let out = second.cleanup(&[]);
        assert!(out.status.success(), "{out:?}");
        assert_eq!(observed(), site.expected(), "nothing of the second is left, nothing of the first is gone");
        fs::remove_file(&second.file).unwrap();
        refused(&second.cleanup(&[]), "cannot be told from those to remove");
        refused(&first.cleanup(&[]), "an agent answers on");
        assert_eq!(observed(), site.expected());
        first.ready("10.5.0.0/16");
    });
}

/// Its socket has another path, so that only its command line shows its subnet file.
#[test]
fn cleanup_sees_the_agent_of_its_instance_whatever_its_socket() {
    in_namespace(|| {
        let site = Site::new(Kind::HostGw);
        let socket = site.path("elsewhere.sock");
        let mut agent = Instance::start(&site, "store", "subnet.env", &[format!("--socket={}", socket.display())]);
        site.until("subnet.env and socket", |site| site.env_file().exists() && socket.exists());
        refused(&agent.cleanup(&[]), "runs with the subnet file");
        agent.end();
        assert!(agent.cleanup(&[]).status.success());
    });
}
