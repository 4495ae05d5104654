// SPDX-License-Identifier: Apache-2.0
//! ADD and DEL a thousand times, with plugins that are killed, delegates that fail, calls that never come. After GC nothing of
//! it is left, and the pods that live were not touched.

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

use crate::site::{Site, on_a_node, wait_for};

const CYCLES: usize = 1000;
const WORKERS: usize = 4;
/// Between two GC while pods come and go.
const GC_EVERY: usize = 125;

/// The bridge plugin, but it may fail before or after its work.
const MOODY: &str = r#"
[ "$MOOD-$CNI_COMMAND" != "before-$ON" ] || { echo '{"code":5,"msg":"failed before"}'; exit 1; }
[ "$MOOD-$CNI_COMMAND" != "after-$ON" ] || { /usr/lib/cni/bridge >/dev/null; echo '{"code":5,"msg":"failed after"}'; exit 1; }
exec /usr/lib/cni/bridge
"#;

/// Chance is an input: the same seed gives the same order of choices in a worker.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }
}

/// A pod's namespace, as `ip netns add` makes it but without two processes for each of a thousand.
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
    // A plugin that failed before it read leaves a broken pipe.
    let _ = child.stdin.take().unwrap().write_all(conf.to_string().as_bytes());
    child
}

/// One call; perhaps the delegate fails, perhaps the plugin is killed, alone or with all that it started.
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
        // It may have ended already.
        let _ = kill(target, Signal::SIGKILL);
    }
    child.wait().unwrap().success()
}

fn cycle(site: &Site, number: usize, chance: &mut Chance) {
    let pod = format!("c{number}");
    make_pod(&pod);
    // Masquerading costs a dozen processes: one pod in ten has it.
    let masquerade = chance.below(10) == 0;
    let conf = site.conf(json!({"delegate": {"type": "moody", "isGateway": true, "ipMasq": masquerade}}));
    call(site, "ADD", &pod, &conf, chance);
    let early = chance.below(3) == 0;
    if early {
        remove_pod(&pod);
    }
    // A runtime tries again, some give up, some never call.
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
    let more = json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": valid, "delegate": {"type": "moody"}});
    // A delegate that its killed plugin left at work is waited for, but not for ever.
    wait_for("GC to succeed", || {
        let answer = site.call("GC", "", &site.conf(more.clone()));
        if !answer.ok {
            eprintln!("GC: {answer:?}");
        }
        answer.ok
    });
}

fn rules() -> Vec<String> {
    let out = Command::new("iptables").args(["-t", "nat", "-S"]).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines().filter(|line| line.contains("id: \\\"id-c")).map(str::to_owned).collect()
}

#[test]
fn a_thousand_cycles_leave_nothing_behind() {
    on_a_node(|site| {
        site.script("moody", MOODY);
        let survivors = ["s1", "s2", "s3"];
        let conf = site.conf(json!({"delegate": {"type": "moody", "isGateway": true, "ipMasq": true}}));
        for pod in survivors {
            site.pod(pod);
            site.call("ADD", pod, &conf).fine();
        }
        let before = (site.files("records"), site.addresses(), site.veths());
        let next = AtomicUsize::new(0);
        let quiet = RwLock::new(());
        let collected = Mutex::new(0);
        std::thread::scope(|scope| {
            for worker in 0..WORKERS {
                let (site, next, quiet, collected) = (&site, &next, &quiet, &collected);
                scope.spawn(move || {
                    let mut chance = Chance(0x9e37_79b9_7f4a_7c15 ^ (worker as u64 + 1));
                    loop {
                        let number = next.fetch_add(1, Ordering::SeqCst);
                        if number >= CYCLES {
                            break;
                        }
                        if number % GC_EVERY == GC_EVERY - 1 {
                            let _alone = quiet.write().unwrap();
                            gc(site, &survivors);
                            *collected.lock().unwrap() += 1;
                        }
                        let _others = quiet.read().unwrap();
                        cycle(site, number, &mut chance);
                    }
                });
            }
        });
        let forgotten = site.files("records").len() - survivors.len();
        eprintln!("{CYCLES} cycles, GC {} times, {forgotten} records left for the last one", collected.lock().unwrap());
        gc(&site, &survivors);
        wait_for("the last veth to go", || site.veths() == before.2);
        assert_eq!((site.files("records"), site.addresses()), (before.0, before.1));
        assert_eq!(rules(), Vec::<String>::new());
        for pod in survivors {
            site.call("DEL", pod, &conf).fine();
        }
        site.nothing_left();
    });
}
