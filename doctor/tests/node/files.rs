// SPDX-License-Identifier: Apache-2.0
//! Faults of files: configurations and plugins of CNI, reserved addresses, and room on disks.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sched::{CloneFlags, unshare};
use weft_doctor::finding::NodeFinding;
use weft_doctor::sources::{AgentAnswer, AgentProblem, CniSources, NodeSources};

use super::{ENV, OtherNamespace, doctor_with, in_namespace, ip, only_text, shell, sources, until};

const CONF: &str = r#"{"name":"cbr0","cniVersion":"1.0.0","plugins":[{"type":"flannel","delegate":{"hairpinMode":true}},{"type":"portmap"}]}"#;
const OTHER: &str = r#"{"name":"k8s","cniVersion":"0.3.1","plugins":[{"type":"bridge","ipam":{"type":"host-local"}}]}"#;
const PLUGINS: [&str; 4] = ["flannel", "bridge", "host-local", "portmap"];

fn install(dir: &Path, plugin: &str) {
    program(dir, plugin, b"#!/bin/sh\necho '{\"cniVersion\":\"1.0.0\"}'\n");
}

/// Writes a program with `cp`. If this process had it open for writing, another thread could start a program meanwhile, whose copy of the open file
/// would keep this one from running.
fn program(dir: &Path, name: &str, text: &[u8]) {
    let draft = dir.join("draft");
    fs::write(&draft, text).unwrap();
    shell(&format!("cp {} {1} && chmod 755 {1}", draft.display(), dir.join(name).display()));
}

/// A node with an agent that is ready, and with the files of CNI.
fn with_cni(file: &Path) -> NodeSources {
    let dir = file.parent().unwrap();
    let cni = CniSources {
        conf_dir: dir.join("net.d"),
        path: vec![dir.join("none"), dir.join("bin")],
        networks: dir.join("networks"),
    };
    for dir in [&cni.conf_dir, &cni.path[1], &cni.networks] {
        fs::create_dir(dir).unwrap();
    }
    for plugin in PLUGINS {
        install(&cni.path[1], plugin);
    }
    fs::write(cni.conf_dir.join("10-flannel.conflist"), CONF).unwrap();
    NodeSources { cni, agent: AgentAnswer::Problems(Vec::new()), ..sources(file) }
}

#[test]
fn plugins_that_are_missing_or_cannot_be_run_are_named() {
    in_namespace(|file| {
        let sources = with_cni(file);
        assert_eq!(doctor_with(&sources, "cni"), []);
        let bin = &sources.cni.path[1];
        for plugin in PLUGINS {
            fs::remove_file(bin.join(plugin)).unwrap();
            only_text(
                &sources,
                "cni",
                &["10-flannel.conflist needs the plugins", plugin, "containernetworking-plugins"],
            );
            install(bin, plugin);
        }
        fs::set_permissions(bin.join("flannel"), fs::Permissions::from_mode(0o644)).unwrap();
        only_text(&sources, "cni", &["needs the plugins flannel, and"]);
        fs::remove_dir_all(bin).unwrap();
        assert_eq!(doctor_with(&sources, "cni"), [], "the runtime has another directory, or this is a container");
    });
}

/// weft's plugin contains weft-veth, and what gives the addresses is named beside the delegate.
#[test]
fn routed_pods_need_neither_a_file_of_the_delegate_nor_what_gives_addresses_by_default() {
    in_namespace(|file| {
        let sources = with_cni(file);
        let bin = &sources.cni.path[1];
        let routed = r#""delegate":{"type":"weft-veth"},"ipam":{"type":"static"}"#;
        let conf = CONF.replace(r#""delegate":{"hairpinMode":true}"#, routed);
        fs::write(sources.cni.conf_dir.join("10-flannel.conflist"), conf).unwrap();
        only_text(&sources, "cni", &["10-flannel.conflist needs the plugins static, and"]);
        install(bin, "static");
        for plugin in ["bridge", "host-local"] {
            fs::remove_file(bin.join(plugin)).unwrap();
        }
        assert_eq!(doctor_with(&sources, "cni"), []);
    });
}

/// Starts a process with this name and these words in its command line. It waits for input until it is killed.
fn process_with(file: &Path, name: &str, words: &[&str]) -> Child {
    let (program, script) = (file.with_file_name(name), file.with_file_name("wait.sh"));
    symlink("/bin/sh", &program).unwrap();
    fs::write(&script, "read line\n").unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(&program).arg(&script).args(words).stdin(Stdio::piped());
    let process = command.spawn().unwrap();
    let comm = format!("/proc/{}/comm", process.id());
    until("the process to start", || fs::read_to_string(&comm).unwrap() == format!("{name}\n"));
    process
}

fn end(mut process: Child, file: &Path, name: &str) {
    process.kill().unwrap();
    process.wait().unwrap();
    fs::remove_file(file.with_file_name(name)).unwrap();
}

/// On Debian, containerd has /usr/lib/cni, and weft and Kubernetes install plugins in /opt/cni/bin.
#[test]
fn plugins_that_are_not_where_containerd_looks_for_them_are_named() {
    in_namespace(|file| {
        let sources = with_cni(file);
        let (bin, elsewhere) = (&sources.cni.path[1], file.with_file_name("elsewhere"));
        let toml = file.with_file_name("config.toml");
        let configure = |dir: &Path| {
            let text = format!("[plugins.\"io.containerd.grpc.v1.cri\".cni]\n  bin_dir = \"{}\"\n", dir.display());
            fs::write(&toml, text).unwrap();
        };
        configure(&elsewhere);
        let endpoint = |socket: &str| format!("--container-runtime-endpoint=unix://{socket}");
        let containerd = process_with(file, "containerd", &["--config", toml.to_str().unwrap()]);
        assert_eq!(doctor_with(&sources, "cni"), [], "no kubelet uses it");
        let kubelet = process_with(file, "kubelet", &[&endpoint("/var/run/crio/crio.sock")]);
        assert_eq!(doctor_with(&sources, "cni"), [], "the kubelet uses another runtime");
        end(kubelet, file, "kubelet");
        let kubelet = process_with(file, "kubelet", &[&endpoint("/run/containerd/containerd.sock")]);
        let looks = format!("containerd looks for CNI plugins in {} ({})", elsewhere.display(), toml.display());
        let are = format!("flannel, bridge, host-local, portmap are not there, but in {}", bin.display());
        let named = format!("name {} as the directory of plugins", bin.display());
        only_text(&sources, "cni", &[&looks, &are, &named]);
        configure(bin);
        assert_eq!(doctor_with(&sources, "cni"), []);
        // The package with the other plugins has them elsewhere.
        fs::create_dir(&elsewhere).unwrap();
        for plugin in &PLUGINS[1..] {
            fs::rename(bin.join(plugin), elsewhere.join(plugin)).unwrap();
        }
        let both = CniSources { path: vec![bin.clone(), elsewhere.clone()], ..sources.cni.clone() };
        let sources = NodeSources { cni: both, ..sources.clone() };
        let copy = format!("copy bridge, host-local, portmap from {} to {}", elsewhere.display(), bin.display());
        let text = only_text(&sources, "cni", &["bridge, host-local, portmap are not there", &copy]);
        for plugin in &PLUGINS[1..] {
            shell(&format!("cp {}/{plugin} {}/", elsewhere.display(), bin.display()));
        }
        assert_eq!(doctor_with(&sources, "cni"), [], "after the remedy of {text}");
        end(kubelet, file, "kubelet");
        end(containerd, file, "containerd");
    });
}

#[test]
fn plugins_that_are_there_and_cannot_run_are_named() {
    in_namespace(|file| {
        let sources = with_cni(file);
        let bin = &sources.cni.path[1];
        let path = bin.join("host-local").display().to_string();
        for (text, why) in [
            (&b""[..], " (0 bytes)"),
            (&b"\x7fELF\0\0"[..], " (6 bytes)"),
            (&b"#!/bin/sh\n"[..], "it prints no version"),
            (&b"#!/bin/sh\necho bad >&2; exit 3\n"[..], "exit status: 3: bad"),
        ] {
            program(bin, "host-local", text);
            only_text(&sources, "cni", &[&format!("{path} cannot run: "), why, "noexec"]);
        }
        program(bin, "host-local", b"#!/bin/sh\necho '{\"code\":4}'; exit 1\n");
        assert_eq!(doctor_with(&sources, "cni"), [], "it runs, and refuses the question");
    });
}

#[test]
fn a_plugin_that_reads_another_subnet_file_than_the_agent_writes_is_named() {
    in_namespace(|file| {
        let sources = with_cni(file);
        assert_eq!(doctor_with(&sources, "cni"), [], "the agent has no subnet yet");
        fs::write(file, ENV).unwrap();
        let own = format!("the agent writes {}", file.display());
        only_text(&sources, "cni", &["the plugin reads /run/flannel/subnet.env", &own, "--subnet-file=/run/flannel/"]);
        let conf = |file: &Path| {
            CONF.replace(r#""type":"flannel""#, &format!(r#""type":"flannel","subnetFile":"{}""#, file.display()))
        };
        let place = sources.cni.conf_dir.join("10-flannel.conflist");
        fs::write(&place, conf(&file.with_file_name("other.env"))).unwrap();
        only_text(&sources, "cni", &["other.env", &own, "`subnetFile`"]);
        fs::write(&place, conf(file)).unwrap();
        assert_eq!(doctor_with(&sources, "cni"), []);
    });
}

#[test]
fn a_configuration_of_another_network_that_comes_first_is_named() {
    in_namespace(|file| {
        let sources = with_cni(file);
        let conf = |name: &str, text: &str| fs::write(sources.cni.conf_dir.join(name), text).unwrap();
        conf("87-podman-bridge.conflist", OTHER);
        conf("10-containerd-net.conflist.off", OTHER);
        assert_eq!(doctor_with(&sources, "cni"), [], "it comes later");
        conf("10-containerd-net.conflist", OTHER);
        let text = only_text(
            &sources,
            "cni",
            &["10-containerd-net.conflist comes before 10-flannel.conflist", "bridge, host-local"],
        );
        shell(text.lines().nth(1).unwrap().split(',').next().unwrap());
        assert_eq!(doctor_with(&sources, "cni"), []);
        conf("00-multus.conf", r#"{"name":"m","type":"multus-shim"}"#);
        install(&sources.cni.path[1], "multus-shim");
        assert_eq!(doctor_with(&sources, "cni"), [], "Multus calls the others");
    });
}

#[test]
fn a_configuration_that_cannot_be_used_is_named() {
    in_namespace(|file| {
        let mut sources = with_cni(file);
        let path = sources.cni.conf_dir.join("10-flannel.conflist");
        for (text, words) in [
            ("{", "EOF while parsing"),
            (r#"{"name":"x","plugins":[]}"#, "it has no plugins"),
            (r#"{"name":"x","plugins":[{}]}"#, "a plugin in it has no `type`"),
        ] {
            fs::write(&path, text).unwrap();
            only_text(&sources, "cni", &["10-flannel.conflist", "cannot be used", words]);
        }
        fs::remove_file(&path).unwrap();
        symlink("/nowhere/10-flannel.conflist", &path).unwrap();
        only_text(&sources, "cni", &["a link that leads nowhere"]);
        sources.agent = AgentAnswer::None;
        assert_eq!(doctor_with(&sources, "cni"), [], "the agent makes the file when it is ready");
        sources.agent = AgentAnswer::Problems(vec![AgentProblem::new("waiting")]);
        assert_eq!(doctor_with(&sources, "cni"), []);
    });
}

#[test]
fn a_kubelet_without_any_configuration_is_found_once_the_agent_is_ready() {
    in_namespace(|file| {
        let mut sources = with_cni(file);
        fs::remove_file(sources.cni.conf_dir.join("10-flannel.conflist")).unwrap();
        let before = weft_doctor::facts::read(&sources).unwrap();
        assert!(!before.cni.has_kubelet, "the kubelets of other tests and of this machine are in other namespaces");
        assert_eq!(doctor_with(&sources, "cni"), []);
        let mut process = super::named_process(file, "kubelet");
        only_text(&sources, "cni", &["a kubelet runs", "no CNI configuration", "--cni-conf"]);
        sources.agent = AgentAnswer::None;
        assert_eq!(doctor_with(&sources, "cni"), []);
        sources.agent = AgentAnswer::Problems(Vec::new());
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        assert_eq!(doctor_with(&sources, "cni"), [], "a node in a container has a kubelet of its own");
        process.kill().unwrap();
        process.wait().unwrap();
    });
}

#[test]
fn a_subnet_whose_addresses_are_taken_is_found() {
    in_namespace(|file| {
        let sources = with_cni(file);
        fs::write(file, ENV).unwrap();
        let network = sources.cni.networks.join("cbr0");
        fs::create_dir(&network).unwrap();
        fs::write(network.join("lock"), "").unwrap();
        for host in 2..=241 {
            fs::write(network.join(format!("10.5.7.{host}")), "c\r\neth0").unwrap();
            fs::write(network.join(format!("10.5.8.{host}")), "former subnet").unwrap();
        }
        assert_eq!(doctor_with(&sources, "addresses"), [], "240 of 253");
        fs::write(network.join("10.5.7.242"), "").unwrap();
        only_text(
            &sources,
            "addresses",
            &["241 of the 253 addresses of 10.5.7.0/24", "network cbr0", "weft doctor pods"],
        );
    });
}

#[test]
fn directories_that_cannot_be_written_are_found() {
    in_namespace(|file| {
        let mut sources = with_cni(file);
        sources.state_dir = file.with_file_name("state");
        assert_eq!(doctor_with(&sources, "disk"), [], "there is no such directory yet");
        fs::create_dir(&sources.state_dir).unwrap();
        assert_eq!(doctor_with(&sources, "disk"), []);
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        shell("mount --make-rprivate /");
        for dir in [sources.state_dir.clone(), sources.cni.networks.clone()] {
            shell(&format!("mount -t tmpfs -o ro none {}", dir.display()));
            only_text(&sources, "disk", &[&dir.display().to_string(), "Read-only", "df -i"]);
            shell(&format!("umount {0} && mount -t tmpfs -o nr_inodes=3 none {0} && touch {0}/a {0}/b", dir.display()));
            only_text(&sources, "disk", &[&dir.display().to_string(), "is full"]);
            shell(&format!("umount {}", dir.display()));
        }
        assert_eq!(doctor_with(&sources, "disk"), []);
    });
}

#[test]
fn instances_of_inotify_open_files_and_threads_are_counted() {
    in_namespace(|file| {
        let limits = || weft_doctor::facts::read(&sources(file)).unwrap().limits;
        // Only this process changes what it counts of itself; others come and go, so nothing exact can be said.
        let watch = nix::sys::inotify::Inotify::init(nix::sys::inotify::InitFlags::IN_CLOEXEC).unwrap();
        for path in ["/", "/proc", "/tmp"] {
            watch.add_watch(path, nix::sys::inotify::AddWatchFlags::IN_CREATE).unwrap();
        }
        let (inotify, files) = (limits().inotify.unwrap(), limits().files.unwrap());
        assert!(inotify.entries >= 1 && inotify.max >= inotify.entries, "{inotify:?}");
        let (watches, threads) = (limits().watches.unwrap(), limits().threads.unwrap());
        assert!(watches.entries >= 3 && watches.max > watches.entries, "{watches:?}");
        assert!(threads.entries >= 2 && threads.max > threads.entries, "{threads:?}");
        assert!(files.entries > 0 && files.max > files.entries, "{files:?}");
        let _ = Command::new("true").status();
    });
}

/// Nobody sees from outside why kube-proxy or the plugins of pods do not go on.
#[test]
fn a_lock_that_a_process_does_not_give_back_is_named_with_the_process() {
    in_namespace(|file| {
        let sources = with_cni(file);
        let lock = sources.cni.networks.join("cbr0/lock");
        fs::create_dir_all(lock.parent().unwrap()).unwrap();
        let held = fs::File::create(&lock).unwrap();
        let ours = || {
            let of_ours = |finding: &NodeFinding| finding.evidence.contains(&lock.display().to_string());
            doctor_with(&sources, "locks").into_iter().filter(of_ours).collect::<Vec<_>>()
        };
        assert_eq!(ours(), [], "nobody holds it");
        held.lock().unwrap();
        let found = ours();
        let pid = std::process::id();
        assert!(found.len() == 1 && found[0].evidence.contains(&format!("(pid {pid})")), "{found:?}");
        assert!(found[0].remedy.ends_with(&format!("kill {pid}")), "{found:?}");
        held.unlock().unwrap();
        assert_eq!(ours(), []);
    });
}

/// Without its files, host-local begins again with the first address of the subnet.
#[test]
fn pods_with_one_address_or_with_one_that_is_not_reserved_are_found() {
    in_namespace(|file| {
        fs::write(file, ENV).unwrap();
        let sources = with_cni(file);
        let networks = sources.cni.networks.join("cbr0");
        fs::create_dir_all(&networks).unwrap();
        ip("link add cni0 up type bridge");
        let pods = [OtherNamespace::new(), OtherNamespace::new()];
        for (number, pod) in pods.iter().enumerate() {
            ip(&format!("link add veth0a1b2c3{number} up master cni0 type veth peer name eth0 netns {}", pod.pid()));
            pod.run("ip addr add 10.5.7.2/24 dev eth0");
        }
        // Not a pod: no link leads there.
        let other = OtherNamespace::new();
        other.run("ip addr add 10.5.7.2/24 dev lo");
        only_text(&sources, "addresses", &["2 pods have the address 10.5.7.2"]);
        pods[1].run("ip addr del 10.5.7.2/24 dev eth0");
        pods[1].run("ip addr add 10.5.7.3/24 dev eth0");
        assert_eq!(doctor_with(&sources, "addresses"), [], "something else than host-local gives addresses");
        fs::write(networks.join("10.5.7.2"), "").unwrap();
        only_text(&sources, "addresses", &["1 addresses that host-local has not reserved (10.5.7.3)"]);
        fs::write(networks.join("10.5.7.3"), "").unwrap();
        assert_eq!(doctor_with(&sources, "addresses"), []);
    });
}
