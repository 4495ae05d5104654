// SPDX-License-Identifier: Apache-2.0
//! Runs a thousand ADDs and DELs. Some plugins are killed, some delegates fail, and some calls of DEL are omitted. GC
//! must then remove everything except the pods that are still running.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, RwLock};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::site::{Site, nat_rules, on_a_node, wait_for};

const CYCLES: usize = 1000;
const WORKERS: usize = 4;
/// Number of cycles between two calls of GC.
const GC_EVERY: usize = 125;

/// The bridge plugin, which fails before or after its work if `MOOD` says so.
const FAILING_BRIDGE: &str = r#"
[ "$MOOD-$CNI_COMMAND" != "before-$ON" ] || { echo '{"code":5,"msg":"failed before"}'; exit 1; }
[ "$MOOD-$CNI_COMMAND" != "after-$ON" ] || { /usr/lib/cni/bridge >/dev/null; echo '{"code":5,"msg":"failed after"}'; exit 1; }
exec /usr/lib/cni/bridge
"#;

/// A pseudo-random generator (xorshift). Each worker makes the same choices in every run.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// Creates a pod's namespace as `ip netns add` does, but without starting processes.
fn make_pod(name: &str) {
    let path = format!("/run/netns/{name}");
    let make = move || {
        fs::File::create(&path).unwrap();
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        mount(Some("/proc/thread-self/ns/net"), path.as_str(), None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    };
    std::thread::spawn(make).join().unwrap();
}

fn remove_pod(name: &str) {
    let path = format!("/run/netns/{name}");
    umount2(path.as_str(), MntFlags::MNT_DETACH).unwrap();
    fs::remove_file(path).unwrap();
}

fn start(mut command: Command, conf: &Value) -> Child {
    use std::io::Write;
    let mut child = command.process_group(0).spawn().unwrap();
    // A plugin that ends before it reads causes a broken pipe.
    let _ = child.stdin.take().unwrap().write_all(conf.to_string().as_bytes());
    child
}

/// Runs one call and returns whether it succeeded. The delegate may fail, and the plugin may be killed, alone or with
/// its process group.
fn call(site: &Site, verb: &str, pod: &str, conf: &Value, chance: &mut Chance) -> bool {
    let mut command = site.command(verb, pod, "eth0");
    match chance.below(10) {
        0 => drop(command.env("MOOD", "before").env("ON", verb)),
        1 => drop(command.env("MOOD", "after").env("ON", verb)),
        _ => {}
    }
    let killed = chance.below(4) == 0;
    let mut child = start(command, conf);
    if killed {
        std::thread::sleep(Duration::from_micros(chance.below(30_000)));
        let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
        let target = if chance.below(2) == 0 { pid } else { Pid::from_raw(-pid.as_raw()) };
        // The process may have ended already.
        let _ = kill(target, Signal::SIGKILL);
    }
    child.wait().unwrap().success()
}

fn cycle(site: &Site, number: usize, chance: &mut Chance) {
    let pod = format!("c{number}");
    make_pod(&pod);
    // Masquerading starts a dozen processes, so only one pod in ten uses it.
    let masquerade = chance.below(10) == 0;
    let conf = site.conf(json!({"delegate": {"type": "failing", "isGateway": true, "ipMasq": masquerade}}));
    call(site, "ADD", &pod, &conf, chance);
    let early = chance.below(3) == 0;
    if early {
        remove_pod(&pod);
    }
    // A runtime retries DEL several times, or gives up, or never calls it.
    for _ in 0..chance.below(4) {
        if call(site, "DEL", &pod, &conf, chance) {
            break;
        }
    }
    if !early {
        remove_pod(&pod);
    }
}

fn gc(site: &Site, survivors: &[&str]) {
    let valid: Vec<_> =
        survivors.iter().map(|pod| json!({"containerID": format!("id-{pod}"), "ifname": "eth0"})).collect();
    let more = json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": valid, "delegate": {"type": "failing"}});
    // The delegate of a killed plugin may still be running, which makes GC fail for a while.
    wait_for("GC to succeed", || {
        let answer = site.call("GC", "", &site.conf(more.clone()));
        if !answer.ok {
            eprintln!("GC: {answer:?}");
        }
        answer.ok
    });
}

fn rules() -> Vec<String> {
    nat_rules("iptables").lines().filter(|line| line.contains("id: \\\"id-c")).map(str::to_owned).collect()
}

#[test]
fn gc_removes_everything_that_a_thousand_interrupted_cycles_left() {
    on_a_node(|site| {
        site.script("failing", FAILING_BRIDGE);
        let survivors = ["s1", "s2", "s3"];
        let conf = site.conf(json!({"delegate": {"type": "failing", "isGateway": true, "ipMasq": true}}));
        for pod in survivors {
            site.pod(pod);
            site.call("ADD", pod, &conf).success();
        }
        let expected = (site.files("records"), site.addresses(), site.veths());
        let next = AtomicUsize::new(0);
        let gc_lock = RwLock::new(());
        let collected = Mutex::new(0);
        std::thread::scope(|scope| {
            for worker in 0..WORKERS {
                let (site, next, gc_lock, collected) = (&site, &next, &gc_lock, &collected);
                scope.spawn(move || {
                    let mut chance = Chance(0x9e37_79b9_7f4a_7c15 ^ (worker as u64 + 1));
                    loop {
                        let number = next.fetch_add(1, Ordering::SeqCst);
                        if number >= CYCLES {
                            break;
                        }
                        if number % GC_EVERY == GC_EVERY - 1 {
                            let _exclusive = gc_lock.write().unwrap();
                            gc(site, &survivors);
                            *collected.lock().unwrap() += 1;
                        }
                        let _shared = gc_lock.read().unwrap();
                        cycle(site, number, &mut chance);
                    }
                });
            }
        });
        let left = site.files("records").len() - survivors.len();
        eprintln!("{CYCLES} cycles, GC {} times, {left} records left for the last one", collected.lock().unwrap());
        // GC removes the temporary file of a killed ADD when it is so old that the ADD cannot be writing it any more.
        wait_for("the last temporary file to disappear", || {
            gc(&site, &survivors);
            site.files("records").iter().all(|name| !name.starts_with('.'))
        });
        wait_for("the last veth of the removed pods to disappear", || site.veths() == expected.2);
        assert_eq!((site.files("records"), site.addresses()), (expected.0, expected.1));
        assert_eq!(rules(), Vec::<String>::new());
        for pod in survivors {
            site.call("DEL", pod, &conf).success();
        }
        site.nothing_left();
    });
}
