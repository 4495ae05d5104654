// SPDX-License-Identifier: Apache-2.0
//! The binary as a user calls it.
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are not inside #[test] themselves

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[path = "cli/doctor.rs"]
mod doctor;
#[path = "cli/explain.rs"]
mod explain;
#[path = "cli/history.rs"]
mod history;
#[allow(dead_code, reason = "others use more of it")]
#[path = "common/namespace.rs"]
mod namespace;
#[path = "cli/output.rs"]
mod output;
#[path = "cli/plan.rs"]
mod plan;
#[path = "cli/state_dir.rs"]
mod state_dir;

/// How long to wait for a condition at most.
const LIMIT: Duration = Duration::from_secs(120);
const NET_CONF: &str = r#"{"Network":"10.244.0.0/16","Backend":{"Type":"host-gw"}}"#;

fn weft(args: &[&str], env: &[(&str, &str)]) -> Output {
    run(Command::new(env!("CARGO_BIN_EXE_weft")).args(args), env)
}

fn run(command: &mut Command, env: &[(&str, &str)]) -> Output {
    command.env_clear().envs(env.iter().copied()).output().expect("start the binary")
}

fn refused(args: &[&str], env: &[(&str, &str)], code: i32, text: &str) {
    let out = weft(args, env);
    let err = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {err}");
    assert!(err.contains(text), "{args:?}: {err}");
    assert!(out.stdout.is_empty(), "{args:?} prints to stdout");
}

#[test]
fn help_goes_to_stdout_and_tells_our_flags_apart() {
    let out = weft(&["agent", "--help"], &[("FLANNELD_RESYNC", "never")]);
    assert_eq!(out.status.code(), Some(0));
    let text = String::from_utf8(out.stdout).unwrap();
    let flags = ["--etcd-endpoints", "Flags that only weft has", "--hold-removals", "--log_backtrace_at"];
    for wanted in flags.into_iter().chain(["FLANNELD_SUBNET_FILE"]) {
        assert!(text.contains(wanted), "{wanted} is missing in\n{text}");
    }
    assert_eq!(weft(&["--help"], &[]).status.code(), Some(0));
}

#[test]
fn bad_usage_is_exit_code_2_and_a_bad_margin_1() {
    refused(&["dance"], &[], 2, "dance");
    refused(&["agent", "-nonsense"], &[], 2, "--nonsense");
    refused(&["agent", "-public-ip=fd00::1"], &[], 2, "--public-ip");
    refused(&["cleanup", "--only=devices"], &[], 2, "[possible values: rules, fence, guard]");
    refused(&["cleanup", "--only=rules", "--flannel-devices"], &[], 2, "cannot be used with");
    let margin = "subnet-lease-renew-margin option, out of acceptable range";
    refused(&["agent", "-subnet-lease-renew-margin", "0"], &[], 1, margin);
    refused(&["agent", "--subnet-lease-renew-margin=1440"], &[], 1, margin);
    refused(&["agent"], &[("FLANNELD_SUBNET_LEASE_RENEW_MARGIN", "2000")], 1, margin);
}

#[test]
fn two_stores_are_refused() {
    let env = [("FLANNELD_KUBE_SUBNET_MGR", "true")];
    if !cfg!(feature = "kube") {
        let lacks = "this weft was built without Kubernetes";
        refused(&["agent", "--store=dir:/x", "--kube-subnet-mgr"], &[], 2, lacks);
        refused(&["agent", "--store=dir:/x"], &env, 2, lacks);
        return;
    }
    refused(&["agent", "--store=dir:/x", "--kube-subnet-mgr"], &[], 2, "are two stores: give one");
    refused(&["agent", "--store=dir:/x"], &env, 2, "environment variable FLANNELD_KUBE_SUBNET_MGR");
}

#[test]
fn flanneld_is_the_agent_and_its_version_goes_to_stderr() {
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().join("flanneld");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_weft"), &name).unwrap();
    for flag in ["--version", "-version"] {
        let out = run(Command::new(&name).arg(flag), &[]);
        assert_eq!((out.status.code(), out.stdout.len()), (Some(0), 0));
        assert_eq!(String::from_utf8(out.stderr).unwrap().trim(), env!("CARGO_PKG_VERSION"));
    }
    let out = run(Command::new(&name).args(["-v", "4", "-iface", "eth0", "-store=dir:"]), &[]);
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8(out.stderr).unwrap().contains("--store dir: lacks its directory"));
}

#[test]
fn version_as_json_says_what_the_build_contains() {
    let out = weft(&["version", "--json"], &[]);
    let version: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(version["architecture"], std::env::consts::ARCH);
    let stores = version["stores"].as_array().unwrap();
    assert_eq!(stores.contains(&"kube".into()), cfg!(feature = "kube"), "{version}");
}

/// The image has no other program than weft, so its links are all that flannel's manifests can call.
#[test]
fn links_with_the_names_of_flannels_programs_do_their_work() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    for name in ["cp", "install-conf", "mk-docker-opts.sh"] {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_weft"), path(name)).unwrap();
    }
    let call = |name: &str, args: &[&str]| {
        let out = run(Command::new(path(name)).args(args).current_dir(dir.path()), &[("FLANNEL_MTU", "1400")]);
        assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
    };
    fs::write(path("conf"), "{}").unwrap();
    call("install-conf", &["conf", "10-flannel.conflist"]);
    call("cp", &["-f", "10-flannel.conflist", "second"]);
    assert_eq!(fs::read_to_string(path("second")).unwrap(), "{}");
    call("mk-docker-opts.sh", &["-f", "none", "-d", "docker.env", "-c"]);
    assert_eq!(fs::read_to_string(path("docker.env")).unwrap(), "DOCKER_OPTS=\" --mtu=1400\"\n");
}

/// Docker would make its bridge, and packets to its containers would leave the node.
#[test]
fn a_route_of_the_subnet_to_a_gateway_is_an_error_after_the_options_for_docker_were_written() {
    in_namespace(|| {
        let place = Place::new();
        fs::write(place.path("subnet.env"), "FLANNEL_SUBNET=10.1.74.1/24\nFLANNEL_MTU=1400\n").unwrap();
        let (file, output) = (place.text("subnet.env"), place.text("docker.env"));
        let docker_opts = ["docker-opts", "-f", &file, "-d", &output, "-c"];
        assert_eq!(weft(&docker_opts, &[]).status.code(), Some(0));
        fs::remove_file(&output).unwrap();
        namespace::ip("route add 10.1.74.0/24 via 192.168.64.1");
        refused(&docker_opts, &[], 1, "the routing table sends the subnet 10.1.74.0/24 to 192.168.64.1");
        assert_eq!(fs::read_to_string(&output).unwrap(), "DOCKER_OPTS=\" --bip=10.1.74.1/24 --mtu=1400\"\n");
    });
}

#[test]
fn status_without_an_agent_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("none.sock");
    refused(&["status", "--socket", socket.to_str().unwrap()], &[], 1, "no agent answers on");
}

#[test]
fn a_forgotten_sudo_is_named() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    // The other user may not read the directory of the build. A copy by this process would be open for writing in the children that other tests
    // start meanwhile, and the kernel refuses to run such a file.
    let program = dir.path().join("weft");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_weft")).arg(&program).status().unwrap().success());
    let socket = dir.path().join("weft.sock");
    let store = format!("dir:{}", dir.path().display());
    let agent = ["agent", "--store", &store, "--socket", socket.to_str().unwrap()];
    let out = run(Command::new(program).args(agent).uid(65534).gid(65534), &[]);
    let text = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{text}");
    assert!(text.contains("Permission denied") && text.contains("put sudo before the command"), "{text}");
}

/// The file of a lab is below a /run of the test's own. Everybody may write there, so that a deleted file would be seen.
#[test]
fn a_lab_of_root_is_neither_denied_nor_forgotten_by_another_user() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = dir.path().join("weft");
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_weft")).arg(&program).status().unwrap().success());
    let script = r#"mount -t tmpfs none /run && mkdir -m 777 /run/weft-lab || exit 9
        echo "{\"pid\":$$,\"mounts\":\"$(readlink /proc/$$/ns/mnt)\",\"dir\":\"/nonexistent\"}" >/run/weft-lab/$$.json
        setpriv --reuid=65534 --regid=65534 --clear-groups "$@"; code=$?
        ls /run/weft-lab; exit $code"#;
    for words in [&["shell", "n1"][..], &["mesh"], &["ui", "--port=0"]] {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(&program).arg("lab").args(words);
        let out = run(&mut command, &[("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")]);
        let (text, files) = (String::from_utf8(out.stderr).unwrap(), String::from_utf8(out.stdout).unwrap());
        assert_eq!(out.status.code(), Some(1), "{words:?}: {text}");
        assert!(text.contains("put sudo before the command"), "{words:?}: {text}");
        assert!(files.ends_with(".json\n"), "{words:?}: the file is gone: {files}");
    }
}

#[test]
fn a_mistyped_directory_is_not_created() {
    let place = tempfile::tempdir().unwrap();
    let typo = place.path().join("typo");
    let store = format!("dir:{}", typo.display());
    for command in [&["lease", "ls"][..], &["lease", "rm", "10.5.1.0-24"]] {
        refused(&[command, &["--store", &store]].concat(), &[], 1, "is no directory");
    }
    assert!(!typo.exists());
}

#[test]
fn no_command_shows_the_commands() {
    refused(&[], &[], 2, "a command is missing");
    refused(&["agent", "-resync=0s"], &[], 2, "--resync is below one second");
    refused(&["agent", "-iface-regex", "("], &[], 2, "--iface-regex ( is not a regular expression");
    refused(&["agent", "-store", "zookeeper"], &[], 2, "--store zookeeper is unknown: give etcd or dir:PATH");
    refused(&["agent", "-healthz-port=99999"], &[], 2, "--healthz-port");
    refused(&["agent", "more"], &[], 2, "more");
}

/// Runs a test in a thread with a network namespace of its own: lo, and eth0 with 192.168.64.2 and the default route.
fn in_namespace(test: impl FnOnce() + Send) {
    namespace::alone(|| {
        for line in [
            "link set lo up",
            "link add eth0 type veth peer name far0",
            "link set eth0 up",
            "link set far0 up",
            "addr add 192.168.64.2/24 dev eth0",
            "route add default via 192.168.64.1",
        ] {
            namespace::ip(line);
        }
        test();
    });
}

/// Waits until `probe` returns a value.
fn wait_for<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LIMIT;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(Instant::now() < end, "waited {LIMIT:?} for {what}");
        #[allow(clippy::disallowed_methods)] // between two looks at the condition
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A directory store, and the paths of one instance.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        Place { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn store(&self) -> String {
        format!("dir:{}", self.text("store"))
    }

    fn configure(&self) {
        std::fs::create_dir_all(self.path("store")).unwrap();
        std::fs::write(self.path("store/config.json"), NET_CONF).unwrap();
    }

    /// Starts `weft agent` with these additional flags and this environment.
    fn agent(&self, flags: &[&str], env: &[(&str, &Path)]) -> Agent {
        let mut command = self.command();
        if flags.contains(&"--state-dir") {
            command.args(flags);
        } else {
            command.args(flags).args(["--state-dir", &self.text("own-state")]);
        }
        Agent(command.envs(env.iter().copied()).stderr(Stdio::piped()).spawn().expect("start the agent"))
    }

    /// Starts `weft agent`, which logs to this.
    fn agent_with_log(&self, log: Stdio) -> Agent {
        let state = self.text("own-state");
        Agent(self.command().args(["--state-dir", &state]).stderr(log).spawn().expect("start the agent"))
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
        command
            .args(["agent", "--store", &self.store(), "--subnet-file", &self.text("subnet.env")])
            .args(["--socket", &self.text("weft.sock")])
            .env_clear()
            .stdout(Stdio::null());
        command
    }

    /// Waits until `weft status` shows this text.
    fn wait_status(&self, wanted: &str) -> String {
        wait_for(wanted, || {
            let out = weft(&["status", "--socket", &self.text("weft.sock")], &[]);
            Some(String::from_utf8(out.stdout).unwrap()).filter(|text| text.contains(wanted))
        })
    }

    /// Runs weft with the store and the paths of this instance.
    fn weft(&self, args: &[&str]) -> Output {
        let mut all = args.to_vec();
        let (store, file, socket) = (self.store(), self.text("subnet.env"), self.text("weft.sock"));
        all.extend(["--store", &store]);
        if args[0] == "release" {
            all.extend(["--subnet-file", &file, "--socket", &socket]);
        }
        weft(&all, &[])
    }
}

/// A running agent. It is killed when this is dropped.
struct Agent(Child);

impl Agent {
    fn term(&mut self) -> ExitStatus {
        kill(Pid::from_raw(i32::try_from(self.0.id()).unwrap()), Signal::SIGTERM).unwrap();
        wait_for("the agent to end", || self.0.try_wait().unwrap())
    }

    /// Returns the log of an agent that has ended.
    fn log(&mut self) -> String {
        let mut text = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn an_agent_that_waits_for_its_config_says_so_and_ends_at_once() {
    in_namespace(|| {
        let place = Place::new();
        let mut agent = place.agent(&[], &[]);
        let text = place.wait_status("config.json does not exist");
        assert!(text.contains("NOT READY") && text.contains("lease       none yet"), "{text}");
        assert_eq!(agent.term().code(), Some(0));
        // The bench measures how long the end takes. Here, the agent does nothing else before it ends, such as asking the store again.
        let log = agent.log();
        assert!(log.contains("WARN waiting: net-conf:"), "{log}");
        let net_conf = r#"'{"Network": "10.244.0.0/16", "Backend": {"Type": "vxlan"}}'"#;
        let command = format!("write it, for example: echo {net_conf} >{}", place.text("store/config.json"));
        assert!(log.contains(&command), "{log}");
        assert!(log.lines().last().is_some_and(|line| line.contains("weft ends; it had no lease yet")), "{log}");
        assert!(!place.path("weft.sock").exists(), "the socket goes with the agent");
    });
}

#[test]
fn every_line_of_a_json_log_is_an_object_up_to_the_error_that_ends_the_agent() {
    refused(&["agent", "--log-format=klog"], &[], 2, "[possible values: text, json]");
    in_namespace(|| {
        let place = Place::new();
        let mut first = place.agent(&[], &[("FLANNELD_LOG_FORMAT", Path::new("json"))]);
        place.wait_status("NOT READY");
        let mut second = place.agent(&["-v", "2", "--log-format", "json"], &[]);
        assert_eq!(wait_for("the second agent to end", || second.0.try_wait().unwrap()).code(), Some(1));
        assert_eq!(first.term().code(), Some(0));
        for (log, level, message) in [
            (first.log(), "INFO", "weft ends; it had no lease yet"),
            (second.log(), "ERROR", "another agent answers on"),
        ] {
            let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
            let lines: Vec<serde_json::Value> = log.lines().map(parse).collect();
            let last = lines.last().unwrap();
            assert!(last["level"] == level && last["message"].as_str().unwrap().contains(message), "{log}");
        }
    });
}

/// Nobody reads the log, and the pipe is full. This keeps the agent's only thread inside a system call, as a disk that hangs would, so that
/// nothing in the agent can act on a signal.
#[test]
fn a_second_signal_ends_an_agent_that_cannot_act_on_the_first() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        let (_unread, mut log) = std::io::pipe().unwrap();
        let size = fcntl(&log, FcntlArg::F_SETPIPE_SZ(4096)).unwrap();
        log.write_all(&vec![b'x'; usize::try_from(size).unwrap()]).unwrap();
        let mut agent = place.agent_with_log(log.into());
        let pid = Pid::from_raw(i32::try_from(agent.0.id()).unwrap());
        let call = format!("{} 0x{:x} ", nix::libc::SYS_write, nix::libc::STDERR_FILENO);
        let hangs = || {
            let now = std::fs::read_to_string(format!("/proc/{pid}/syscall"));
            now.is_ok_and(|now| now.starts_with(&call)).then_some(())
        };
        wait_for("the agent to write its log", hangs);
        kill(pid, Signal::SIGTERM).unwrap();
        // Two signals of one kind that are not handled yet count as one.
        wait_for("the agent to take the signal", || {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
            let pending = status.lines().filter(|line| line.starts_with("SigPnd:") || line.starts_with("ShdPnd:"));
            pending.clone().all(|line| line.ends_with("0000000000000000")).then_some(())
        });
        wait_for("the agent to go on writing", hangs);
        assert!(agent.0.try_wait().unwrap().is_none(), "the first signal asks for an orderly end");
        kill(pid, Signal::SIGINT).unwrap();
        let status = wait_for("the end", || agent.0.try_wait().unwrap());
        assert_eq!(status.code(), Some(1));
    });
}

#[test]
fn a_second_agent_on_the_same_socket_is_refused() {
    in_namespace(|| {
        let place = Place::new();
        let mut first = place.agent(&[], &[]);
        place.wait_status("NOT READY");
        let mut second = place.agent(&[], &[]);
        let status = wait_for("the second agent to end", || second.0.try_wait().unwrap());
        assert_eq!(status.code(), Some(1));
        let log = second.log();
        assert!(log.contains("another agent answers on") && log.contains("a --subnet-file of its own"), "{log}");
        place.wait_status("NOT READY");
        assert_eq!(first.term().code(), Some(0));
    });
}

#[test]
fn a_lease_is_listed_released_and_removed() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        let mut agent = place.agent(&[], &[]);
        place.wait_status(", ready, weft");
        let refused = place.weft(&["release"]);
        assert_eq!(refused.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&refused.stderr).contains("stop it first"));
        assert_eq!(agent.term().code(), Some(0));
        let list = String::from_utf8(place.weft(&["lease", "ls"]).stdout).unwrap();
        assert!(list.contains("192.168.64.2") && list.contains("host-gw"), "{list}");

        let released = place.weft(&["release"]);
        assert_eq!(released.status.code(), Some(0), "{}", String::from_utf8_lossy(&released.stderr));
        assert!(String::from_utf8(released.stdout).unwrap().starts_with("released 10.244."));
        let again = place.weft(&["release"]);
        assert_eq!(again.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&again.stderr).contains("there is nothing to release"));

        let other = r#"{"PublicIP":"192.168.64.9","PublicIPv6":null,"BackendType":"host-gw"}"#;
        std::fs::write(place.path("store/subnets/10.244.9.0-24.json"), other).unwrap();
        let removed = place.weft(&["lease", "rm", "10.244.9.0-24"]);
        assert_eq!(String::from_utf8(removed.stdout).unwrap(), "removed 10.244.9.0-24\n");
        let missing = place.weft(&["lease", "rm", "10.244.9.0-24"]);
        assert_eq!(missing.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&missing.stderr).contains("does not exist"));
    });
}

#[test]
fn systemd_is_told_ready_status_and_watchdog() {
    in_namespace(|| {
        let place = Place::new();
        let socket = UnixDatagram::bind(place.path("notify")).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        let next = |wanted: &str| {
            wait_for(wanted, || {
                let mut buffer = [0; 4096];
                let length = socket.recv(&mut buffer).expect("a word to systemd");
                Some(String::from_utf8_lossy(&buffer[..length]).into_owned()).filter(|text| text.contains(wanted))
            })
        };
        let env = [("NOTIFY_SOCKET", &*place.path("notify")), ("WATCHDOG_USEC", Path::new("400000"))];
        let mut agent = place.agent(&[], &env);
        next("STATUS=waiting: net-conf:");
        next("WATCHDOG=1");
        place.configure();
        next("READY=1");
        next("STATUS=subnet 10.244.");
        next("WATCHDOG=1");
        assert_eq!(agent.term().code(), Some(0));
        next("STOPPING=1");
    });
}

#[test]
fn a_health_port_that_is_taken_is_tried_again() {
    in_namespace(|| {
        let place = Place::new();
        let taken = TcpListener::bind("127.0.0.1:8081").unwrap();
        let mut agent = place.agent(&["-healthz-ip=127.0.0.1", "-healthz-port=8081"], &[]);
        let mut lines = BufReader::new(agent.0.stderr.take().unwrap()).lines();
        let said = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("listen for health checks")));
        assert!(said.expect("the log says it").unwrap().contains("trying again every 5 s"));
        drop(taken);
        let answer = wait_for("the health port", || {
            let mut stream = TcpStream::connect("127.0.0.1:8081").ok()?;
            stream.write_all(b"GET /readyz HTTP/1.0\r\n\r\n").ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            Some(answer)
        });
        assert!(answer.starts_with("HTTP/1.0 503") && answer.contains("config.json does not exist"), "{answer}");
        assert_eq!(agent.term().code(), Some(0));
    });
}

/// A start without the store would go on with the saved lease, although another node may have it by then.
#[test]
fn what_was_saved_goes_with_the_lease_that_is_released() {
    in_namespace(|| {
        let place = Place::new();
        place.configure();
        fs::create_dir(place.path("store/subnets")).unwrap();
        // The node publishes an address that another machine translates.
        let lease = r#"{"PublicIP":"203.0.113.9","PublicIPv6":null,"BackendType":"host-gw"}"#;
        fs::write(place.path("store/subnets/10.244.7.0-24.json"), lease).unwrap();
        let env = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.7.1/24\nFLANNEL_MTU=1500\n";
        fs::write(place.path("subnet.env"), env).unwrap();
        let saved = weft::saved::file(&place.path("state"), &place.path("subnet.env"));
        fs::create_dir(place.path("state")).unwrap();
        fs::write(&saved, "the lease").unwrap();
        let of_another = place.weft(&["release", "--state-dir", &place.text("state")]);
        let said = String::from_utf8_lossy(&of_another.stderr);
        assert!(of_another.status.code() == Some(1) && said.contains("give --public-ip"), "{said}");
        assert!(saved.exists() && place.path("store/subnets/10.244.7.0-24.json").exists());
        let released = place.weft(&["release", "--state-dir", &place.text("state"), "--public-ip", "203.0.113.9"]);
        assert_eq!(String::from_utf8_lossy(&released.stdout), "released 10.244.7.0/24\n", "{released:?}");
        assert!(!saved.exists() && !place.path("store/subnets/10.244.7.0-24.json").exists());
    });
}

#[cfg(feature = "kube")]
#[test]
fn the_api_server_is_reached_through_the_proxy_of_the_environment() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = format!("http://{}", listener.local_addr().unwrap());
    let connection = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut first = String::new();
        BufReader::new(stream.try_clone().unwrap()).read_line(&mut first).unwrap();
        stream.write_all(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n").unwrap();
        first
    });
    let api = ["lease", "ls", "--kube-subnet-mgr", "--kube-api-url=https://192.0.2.1:6443"];
    let out = weft(&api, &[("HTTPS_PROXY", &proxy)]);
    assert_eq!(out.status.code(), Some(1), "{}", String::from_utf8_lossy(&out.stderr));
    assert_eq!(connection.join().unwrap(), "CONNECT 192.0.2.1:6443 HTTP/1.1\r\n");
    refused(&api, &[("HTTPS_PROXY", "socks5://127.0.0.1:1")], 1, "write http://HOST:PORT");
}
