// SPDX-License-Identifier: Apache-2.0
//! weft on a kernel that this machine lacks: Linux 6.1 with ipip, in qemu, one machine per scenario of tests/vm/*.sh.
//!
//! `WEFT_BIN` names a static weft to test instead of this build's. `WEFT_VM_EXTRA` names any test binary to run inside too.
//! Nothing is skipped: no qemu or no kernel package is a failure that says so.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test says what it expected")]
#![allow(clippy::print_stdout, reason = "the figures of a test that passed are in its output")]
#![allow(clippy::disallowed_methods, reason = "a test is told its binaries by the environment")]

#[path = "common/exe.rs"]
mod exe;
#[path = "common/flanneld.rs"]
mod flanneld;
#[path = "vm/image.rs"]
mod image;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{PoisonError, RwLock, mpsc};
use std::time::{Duration, Instant};

/// A scenario with its boot; emulated CPUs on a loaded machine are slow.
const LIMIT: Duration = Duration::from_secs(900);

/// The scenarios that count lost packets need a rate of packets, so they run while no other machine does.
const COUNTING: [&str; 6] = [
    "wireguard-loss.sh",
    "wireguard-rotate.sh",
    "wireguard-options.sh",
    "wireguard-flannel.sh",
    "wireguard-many.sh",
    "change-walk.sh",
];
static MACHINES: RwLock<()> = RwLock::new(());
/// What a scenario says when it did not reach its rate. A machine that was busy with something else may do better the next time.
const TOO_SLOW: &str = "or this machine is too slow";
/// How often such a scenario is run.
const TRIES: usize = 3;

/// A running machine, ended with the test whatever happens.
struct Machine(Child);

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The scenario that gets a network card of VMware, which is connected to nothing.
const WITH_CARD: &str = "explain.sh";
/// The scenario whose kernel is told to have no IPv6.
const WITHOUT_IPV6: &str = "no-ipv6.sh";

/// Boots, runs one scenario, and returns the console, line by line.
fn boot(scenario: &str, env: &str, extra: Option<&Path>) -> Vec<String> {
    let (_alone, _among_others);
    if COUNTING.contains(&scenario) {
        _alone = MACHINES.write().unwrap_or_else(PoisonError::into_inner);
    } else {
        _among_others = MACHINES.read().unwrap_or_else(PoisonError::into_inner);
    }
    let dir = tempfile::tempdir().expect("temporary directory");
    let initrd = image::initrd(dir.path(), scenario, env, extra);
    let child = Command::new("qemu-system-x86_64")
        .args([
            "-accel",
            "tcg",
            "-cpu",
            "max",
            "-m",
            if image::has_etcd(scenario) { "1536" } else { "512" },
            "-nographic",
            "-no-reboot",
            "-nic",
            "none",
        ])
        .args(if scenario == WITH_CARD {
            &["-netdev", "hubport,id=card,hubid=0", "-device", "vmxnet3,netdev=card"][..]
        } else {
            &[]
        })
        // no_timer_check: an emulated timer that a loaded machine delays is no reason to panic.
        .arg("-append")
        .arg(format!(
            "console=ttyS0 quiet panic=-1 random.trust_cpu=on no_timer_check{}",
            if scenario == WITHOUT_IPV6 { " ipv6.disable=1" } else { "" }
        ))
        .arg("-kernel")
        .arg(&image::kernel().image)
        .arg("-initrd")
        .arg(initrd)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("cannot run qemu-system-x86_64 (install the package qemu-system-x86)");
    let mut machine = Machine(child);
    let out = machine.0.stdout.take().expect("stdout");
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(out).split(b'\n').map_while(Result::ok) {
            if tx.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                break;
            }
        }
    });
    let (end, mut console) = (Instant::now() + LIMIT, Vec::new());
    // The channel closes when the machine has powered off.
    loop {
        match rx.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(line) => console.push(line),
            Err(mpsc::RecvTimeoutError::Disconnected) => return console,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                panic!("{scenario} took longer than {LIMIT:?}:\n{}", console.join("\n"))
            }
        }
    }
}

/// Runs a scenario; it must reach its end, without a failure, and have checked at least these.
fn run(scenario: &str, nexthops: &str, checks: &[&str]) {
    run_with(scenario, &format!("NEXTHOPS={nexthops}\n"), checks);
}

/// As [`run`], with these variables for the scenario.
fn run_with(scenario: &str, env: &str, checks: &[&str]) {
    let mut console = boot(scenario, env, None);
    for _ in 1..TRIES {
        if !console.iter().any(|line| line.contains("weft-vm: FAIL") && line.contains(TOO_SLOW)) {
            break;
        }
        println!("{scenario} is run again, because the machine was too slow:\n{}", console.join("\n"));
        console = boot(scenario, env, None);
    }
    judge(scenario, &console, checks);
}

fn judge(scenario: &str, console: &[String], checks: &[&str]) {
    // The first line after the firmware's may begin with its escape sequences.
    let said: Vec<&str> = console.iter().filter_map(|l| l.split_once("weft-vm: ").map(|(_, s)| s)).collect();
    let whole = console.join("\n");
    // `--show-output` shows the figures of a test that passed.
    println!("{whole}");
    assert!(!said.iter().any(|s| s.starts_with("FAIL")), "{scenario} failed:\n{whole}");
    assert_eq!(said.last(), Some(&"END 0"), "{scenario} did not reach its end:\n{whole}");
    for check in checks {
        assert!(said.contains(&format!("PASS {check}").as_str()), "{scenario} never checked '{check}':\n{whole}");
    }
}

const BOOT: [&str; 6] = [
    "kernel 6.1",
    "link ipip",
    "link vxlan",
    "ip -d shows ipip",
    "route over a nexthop object",
    "ping through the router",
];
const IPIP: [&str; 17] = [
    "n1 route to n3",
    "adopted the device",
    "a device that is bound to a link is made again",
    "stale route removed",
    "pods n3 to n1",
    "route heals",
    "device heals",
    "pod to outside is masqueraded",
    "pod to pod is not masqueraded",
    "node to pod has not the pod's address",
    "spoofed packets arrive without it",
    "spoofed packets are dropped",
    "guarded n3 to n1",
    "bridged n1 to n3",
    "the bridge keeps the device",
    "restart loses no packet",
    "data path outlives the agents",
];
const DIRECT: [&str; 5] =
    ["n1 to n2 direct", "n1 to n3 tunnel", "pods n1 to n3", "tunnel route heals", "restart keeps the device"];
const GATEWAY: [&str; 7] = [
    "n1 to n2",
    "pods n1 to n2",
    "pods n1 to n2 v6",
    "route heals",
    "routes come back with the uplink",
    "flannel's flannel-wg goes",
    "flannel's flannel-wg-v6 goes",
];
const VXLAN: [&str; 6] = [
    "n1 fdb of n3",
    "pods n2 to n3",
    "changed fdb heals",
    "neighbour heals",
    "device heals with its MAC",
    "restart keeps the device",
];
const DUAL: [&str; 5] = [
    "n1 v6 fdb of n2",
    "pods n1 to n3 v6",
    "v6 route heals",
    "v6 device heals with its MAC",
    "restart keeps the device",
];

const WIREGUARD: [&str; 11] = [
    "adopted the device",
    "adopted the key",
    "a handshake without traffic",
    "pods n1 to n3",
    "a removed peer comes back",
    "a removed prefix comes back",
    "a removed route comes back",
    "device heals",
    "restart loses no packet",
    "a kill keeps the device",
    "data path outlives the agents",
];
const WIREGUARD_KEYS: [&str; 6] = [
    "a learned endpoint stays",
    "the key outlives a reboot",
    "one peer for each lease",
    "preshared n1 to n3",
    "the history is saved",
    "no secret is shown",
];
const WIREGUARD_DUAL: [&str; 5] = [
    "separate n1 to n3 v6",
    "vxlan beside wireguard v6",
    "ipv4 n1 to n3 v6",
    "ipv6 n1 to n3",
    "data path outlives the agents",
];

#[test]
fn wireguard() {
    run("wireguard.sh", "yes", &WIREGUARD);
}

#[test]
fn wireguard_keys() {
    run("wireguard-keys.sh", "yes", &WIREGUARD_KEYS);
}

#[test]
fn wireguard_dual_stack() {
    run("wireguard-dual.sh", "yes", &WIREGUARD_DUAL);
}

const WIREGUARD_IPV6: [&str; 4] =
    ["n1 has no IPv4 subnet", "only n1 to n3 v6", "the device outlives kill -9", "again n2 to n1 v6"];

#[test]
fn wireguard_without_ipv4() {
    run("wireguard-ipv6.sh", "yes", &WIREGUARD_IPV6);
}

const WIREGUARD_NAT: [&str; 4] =
    ["three leases", "pods n1 to n2", "pods n2 to n3", "each node has its own lease after it was installed again"];

#[test]
fn wireguard_nat() {
    run("wireguard-nat.sh", "yes", &WIREGUARD_NAT);
}

const WIREGUARD_CHANGE: [&str; 10] = [
    "n1 marks the node that does not follow",
    "the metric of the alert WeftPeersNotEncrypted counts it",
    "a new lease of the earlier type is set aside",
    "packets for its subnet do not leave in clear text",
    "the change loses no packet of n1",
    "clear text ends on n1",
    "the metric counts no node again",
    "packets to the node that does not follow are not sent",
    "followed n1 to n3",
    "flannel's route goes",
];

#[test]
fn vxlan_to_wireguard() {
    run("wireguard-change.sh", "yes", &WIREGUARD_CHANGE);
}

const WIREGUARD_FLANNEL: [&str; 11] = [
    "pods n1 to n2",
    "pods n2 to n3 v6",
    "lease bytes are flannel's",
    "flannel killed, then weft loses no packet",
    "flannel killed, then weft under 90 packets per second or more, or this machine is too slow",
    "flannel's device is adopted",
    "with_weft: without a device packets are lost",
    "by_hand: n2 begins the first handshake that is answered",
    "with_weft: n2 begins the first handshake that is answered",
    "with_weft: n2 begins no handshake twice",
    "flannel n1 to n2",
];

#[test]
#[ignore = "needs FLANNELD"]
fn wireguard_with_flanneld() {
    run("wireguard-flannel.sh", "yes", &WIREGUARD_FLANNEL);
}

const MODES_FLANNEL: [&str; 8] = [
    "ipv4: n1 peer n2",
    "ipv4 n2 to n3 v6",
    "ipv6: n2 peer n1",
    "ipv6 n1 to n2",
    "flannel's lease names a port on which it does not listen",
    "weft's lease names its port for both families",
    "auto n2 to n1 v6",
    "ipv6 with one port n3 to n2",
];

#[test]
#[ignore = "needs FLANNELD"]
fn wireguard_modes_with_flanneld() {
    run("wireguard-modes-flannel.sh", "yes", &MODES_FLANNEL);
}

const CHANGE_FLANNEL: [&str; 6] = [
    "n1 marks flannel's node",
    "n1 still reaches flannel's node",
    "after a restart n1 still reaches flannel's node",
    "clear text ends on n1",
    "n1 names flannel's node as set aside",
    "restarted n1 to n2",
];

#[test]
#[ignore = "needs FLANNELD"]
fn vxlan_to_wireguard_with_flanneld() {
    run("wireguard-change-flannel.sh", "yes", &CHANGE_FLANNEL);
}

const LIMITS: [&str; 3] = [
    "a full connection tracking table is named",
    "a full neighbour table is named",
    "a card that may spoil checksums is named",
];

/// Runs the scenario of explain and doctor with a backend.
fn explain(backend: &str, checks: [&str; 3]) {
    let console = boot("explain.sh", &format!("NEXTHOPS=yes\nBACKEND={backend}\n"), None);
    judge("explain.sh", &console, &[&checks[..], &LIMITS].concat());
}

#[test]
fn explain_ipip() {
    let missing = "a route of ipip that is missing is named";
    explain("ipip", ["ipip works", "the tunnel of ipip is shown", missing]);
}

#[test]
fn explain_wireguard() {
    let missing = "a device of wireguard that is missing is named";
    explain("wireguard", ["wireguard works", "the tunnel of wireguard is shown", missing]);
}

#[test]
fn lab_with_wireguard() {
    run("lab.sh", "yes", &["every pod of a lab with wireguard reaches every other one"]);
}

#[test]
fn boots_a_kernel_with_ipip() {
    run("boot.sh", "yes", &BOOT);
}

#[test]
fn ipip() {
    run("ipip.sh", "yes", &IPIP);
}

#[test]
fn ipip_without_nexthop_objects() {
    run("ipip.sh", "no", &IPIP);
}

#[test]
fn ipip_direct_routing() {
    run("ipip-direct.sh", "yes", &DIRECT);
}

#[test]
fn ipip_direct_routing_without_nexthop_objects() {
    run("ipip-direct.sh", "no", &DIRECT);
}

#[test]
fn host_gw() {
    run("host-gw.sh", "yes", &GATEWAY);
}

#[test]
fn host_gw_without_nexthop_objects() {
    run("host-gw.sh", "no", &GATEWAY);
}

#[test]
fn vxlan() {
    run("vxlan.sh", "yes", &VXLAN);
}

#[test]
fn vxlan_without_nexthop_objects() {
    run("vxlan.sh", "no", &VXLAN);
}

const NO_IPV6: [&str; 7] = [
    "the kernel has no IPv6",
    "pods n1 to n3",
    "route heals",
    "the fence was written once",
    "a missing br_netfilter is shown",
    "restart loses no packet",
    "what is missing for IPv6 is said",
];

#[test]
fn vxlan_on_a_kernel_without_ipv6() {
    run("no-ipv6.sh", "yes", &NO_IPV6);
}

#[test]
fn vxlan_dual_stack() {
    run("vxlan-dual.sh", "yes", &DUAL);
}

#[test]
fn vxlan_dual_stack_without_nexthop_objects() {
    run("vxlan-dual.sh", "no", &DUAL);
}

/// The runner for foreign test binaries is proven with a binary that says so itself; `WEFT_VM_EXTRA` puts another in its place.
#[test]
fn runs_an_extra_binary() {
    let extra = std::env::var_os("WEFT_VM_EXTRA").map_or_else(|| PathBuf::from("/bin/true"), PathBuf::from);
    judge("extra.sh", &boot("extra.sh", "NEXTHOPS=yes\n", Some(&extra)), &["extra"]);
}

/// The scenarios that count lost packets. `make test` runs them by themselves, because they need a rate of packets.
mod loss {
    use super::{run, run_with};

    const WIREGUARD_ROTATE: [&str; 5] = [
        "round 2: rotate-key loses no packet",
        "a restart keeps the new key",
        "another preshared key loses no packet",
        "sessions begin with the other preshared key",
        "preshared n1 to n3",
    ];

    #[test]
    fn wireguard_rotate() {
        run("wireguard-rotate.sh", "yes", &WIREGUARD_ROTATE);
    }

    const WIREGUARD_OPTIONS: [&str; 9] = [
        "other ports loses no more than what is on the way",
        "n1 sends as n2 knows it",
        "one device for both families loses no packet",
        "n1 sends as n2 knows it again",
        "a device for each family loses no packet",
        "n1 is ready",
        "a device of n1 that somebody took down comes up with the port that it had",
        "after a restart n1 names the port that it has",
        "n1 names the third port",
    ];

    #[test]
    fn wireguard_options() {
        run("wireguard-options.sh", "yes", &WIREGUARD_OPTIONS);
    }

    const WIREGUARD_LOSS: [&str; 11] = [
        "the count sees packets that are lost",
        "the capture sees vxlan",
        "the capture sees the addresses of pods in vxlan",
        "term loses no packet",
        "term under 90 packets per second or more, or this machine is too slow",
        "kill loses no packet",
        "kill under 90 packets per second or more, or this machine is too slow",
        "upgrade loses no packet",
        "upgrade under 90 packets per second or more, or this machine is too slow",
        "no address of a pod leaves n1 in clear text",
        "no vxlan leaves n1",
    ];

    #[test]
    fn wireguard_restarts_lose_nothing() {
        run_with("wireguard-loss.sh", "NEXTHOPS=yes\nDUAL=no\n", &WIREGUARD_LOSS);
    }

    #[test]
    fn wireguard_restarts_lose_nothing_dual_stack() {
        run_with("wireguard-loss.sh", "NEXTHOPS=yes\nDUAL=yes\n", &WIREGUARD_LOSS);
    }

    const CHANGE_WALK: [&str; 6] = [
        "vxlan to host-gw loses no packet",
        "host-gw to ipip loses no packet",
        "ipip to wireguard loses no packet",
        "wireguard to udp loses no packet",
        "udp to vxlan loses no packet",
        "vxlan to VNI 7 loses no packet",
    ];

    #[test]
    fn five_backends_one_after_the_other() {
        run_with("change-walk.sh", "NEXTHOPS=yes\nDUAL=no\n", &CHANGE_WALK);
    }

    const CHANGE_WALK_DUAL: [&str; 4] = [
        "vxlan to host-gw loses no packet",
        "host-gw to wireguard loses no packet",
        "wireguard to vxlan loses no packet",
        "vxlan to VNI 7 loses no packet",
    ];

    #[test]
    fn backends_one_after_the_other_dual_stack() {
        run_with("change-walk.sh", "NEXTHOPS=yes\nDUAL=yes\n", &CHANGE_WALK_DUAL);
    }
}

/// Figures for the table of `make bench`, and for the documentation.
mod bench {
    use super::{image, run_with};

    /// The bench itself cannot fetch the kernel, because its network namespace has no way to a mirror.
    #[test]
    #[ignore = "make bench runs it"]
    fn the_kernel_is_there() {
        assert!(image::kernel().image.is_file());
    }

    #[test]
    #[ignore = "make bench runs it"]
    fn wireguard_with_many_peers() {
        measure("no");
    }

    #[test]
    #[ignore = "make bench-wireguard runs it"]
    fn wireguard_with_many_peers_and_nothing_to_do() {
        measure("yes");
    }

    fn measure(idle: &str) {
        let checks = ["the floor has all peers", "weft has all peers", "weft has all peers again"];
        run_with("wireguard-many.sh", &format!("NEXTHOPS=yes\nIDLE={idle}\n"), &checks);
    }
}
