// SPDX-License-Identifier: Apache-2.0
//! A network namespace for one test, and commands that run in it.

use std::process::Command;
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};

/// Runs a test in a thread with a network namespace of its own. The namespace ends with the thread.
pub fn alone(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let run = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("these tests need CAP_SYS_ADMIN");
            test();
        };
        scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Adds the veth pair up0 (10.0.0.1/24, fd00::1/64) and far0. Both are up.
pub fn add_uplink() {
    for line in [
        "link add up0 type veth peer name far0",
        "link set up0 up",
        "link set far0 up",
        "addr add 10.0.0.1/24 dev up0",
        "addr add fd00::1/64 dev up0 nodad",
    ] {
        ip(line);
    }
    until_local("fd00::1");
}

/// Waits until packets to this IPv6 address of the host stay on it. The kernel adds that route a moment after the address, and sends such
/// packets out of the interface until then.
fn until_local(address: &str) {
    let (wanted, deadline) = (format!("local {address} "), Instant::now() + Duration::from_secs(120));
    while !ip("-6 route show table local").contains(&wanted) {
        assert!(Instant::now() < deadline, "packets to {address} leave this host");
    }
}

pub fn run(program: &str, line: &str) -> String {
    let out = Command::new(program).args(line.split_whitespace()).output().unwrap();
    assert!(out.status.success(), "{program} {line}: {}", String::from_utf8_lossy(&out.stderr));
    // The name of an interface need not be UTF-8.
    String::from_utf8_lossy(&out.stdout).into_owned()
}

pub fn ip(line: &str) -> String {
    run("ip", line)
}

pub fn bridge(line: &str) -> String {
    run("bridge", line)
}
