// SPDX-License-Identifier: Apache-2.0
//! The process: it is ended, killed and restarted, and answers requests for its health.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::{Value as Json, json};
use weft::observe::history::recorder;
use weft::saved;

use crate::site::{Kind, Lease, PATIENCE, Site, each, in_namespace, ip, observed};

each! {
    a_signal_ends_it_at_once: Vxlan HostGw;
    a_restart_writes_nothing: Vxlan VxlanDual HostGw HostGwDual VxlanV6 HostGwV6 DirectDual;
    killed_fifty_times: Vxlan HostGw;
    health_answers: Vxlan;
    cleanup_refuses_then_removes_all: Vxlan VxlanDual HostGw HostGwDual VxlanV6 HostGwV6 DirectDual;
}

fn a_signal_ends_it_at_once(kind: Kind) {
    let mut site = Site::running(kind);
    let before = observed();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let said = site.log().lines().count();
        assert_eq!(site.stop(signal), Some(0), "{}", site.log());
        // The bench measures how long the end takes. Here, the agent does nothing else before it ends, such as another pass.
        let log = site.log();
        let rest: Vec<&str> = log.lines().skip(said).collect();
        assert!(matches!(rest[..], [end] if end.contains("weft ends")), "{rest:#?}");
        assert_eq!(observed(), before);
        assert_eq!(fs::read_to_string(site.env_file()).unwrap(), site.expected_env());
        assert!(!site.path("run/weft.sock").exists(), "the socket is gone");
        site.start();
        site.healed("a restart");
    }
}

/// `ip monitor`, which writes into a file until this is dropped.
struct Monitor(Child);

impl Monitor {
    fn start(site: &Site) -> Monitor {
        let file = fs::File::create(site.path("monitor")).unwrap();
        let mut ip = Command::new("setpriv");
        ip.args(["--pdeathsig", "KILL", "ip", "monitor", "link", "address", "route", "neigh", "nexthop"]);
        let monitor = Monitor(ip.stdin(Stdio::null()).stdout(file).stderr(Stdio::null()).spawn().unwrap());
        monitor.mark(site, "192.0.2.1");
        monitor
    }

    /// Adds and deletes a route until the monitor has shown it. Returns everything that the monitor has shown so far.
    fn mark(&self, site: &Site, mark: &str) -> String {
        let mut text = String::new();
        let deadline = Instant::now() + PATIENCE;
        while !text.contains(mark) {
            assert!(Instant::now() < deadline, "ip monitor says nothing: {text}");
            ip(&format!("route replace blackhole {mark}/32"));
            ip(&format!("route del blackhole {mark}/32"));
            text = fs::read_to_string(site.path("monitor")).unwrap();
        }
        text
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn a_restart_writes_nothing(kind: Kind) {
    let mut site = Site::running(kind);
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        site.stop(signal);
        let modified = |site: &Site| fs::metadata(site.env_file()).unwrap().modified().unwrap();
        let (written, lease) = (modified(&site), site.own_lease());
        let monitor = Monitor::start(&site);
        site.start();
        site.healed("a restart");
        let said = monitor.mark(&site, "192.0.2.2");
        let loud: Vec<&str> = said
            .lines()
            .filter(|line| line.contains("10.5.") || line.contains("fd05:") || line.contains("flannel"))
            .collect();
        assert!(loud.is_empty(), "{loud:#?}");
        assert_eq!(site.status().unwrap()["last_pass"], Json::Null, "no pass wrote anything");
        assert_eq!((modified(&site), site.own_lease()), (written, lease), "nor was a file written");
    }
}

fn killed_fifty_times(kind: Kind) {
    let mut site = Site::new(kind);
    // The sequence of events is fixed. Only the moment of each kill depends on the speed of the machine.
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move |limit: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % limit
    };
    for round in 0..50 {
        site.start();
        let number = 100 + u32::try_from(next(20)).unwrap();
        if site.peers.contains_key(&number) {
            site.remove_peer(number);
        } else {
            let other = u32::try_from(next(100)).unwrap();
            site.put_peer(Lease { number, host: 100 + other, mac: number });
        }
        let death = Instant::now() + Duration::from_millis(next(if round % 5 == 0 { 250 } else { 60 }));
        match next(4) {
            0 => drop(Command::new("ip").args(["link", "del", "flannel.1"]).output().unwrap()),
            1 => drop(Command::new("ip").args(["nexthop", "flush", "proto", "90"]).output().unwrap()),
            2 => drop(Command::new("ip").args(["route", "del", "10.5.7.0/24"]).output().unwrap()),
            _ => {}
        }
        while Instant::now() < death {
            std::thread::yield_now();
        }
        site.stop(Signal::SIGKILL);
        if round % 10 == 9 {
            site.start();
            site.healed(&format!("round {round}"));
            site.stop(Signal::SIGKILL);
        }
    }
    site.start();
    site.healed("fifty deaths");
    let used = ip("-4 -j route").matches("nhid").count();
    assert_eq!(used, site.peers.len());
    assert_eq!(ip("nexthop").lines().count(), used, "no nexthop is left over");
}

fn get(path: &str) -> Option<String> {
    let mut stream = TcpStream::connect("127.0.0.1:8081").ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

fn health_answers(kind: Kind) {
    let mut site = Site::new(kind);
    site.flags.extend(["--healthz-ip=127.0.0.1".to_owned(), "--healthz-port=8081".to_owned()]);
    let config = fs::read(site.path("store/config.json")).unwrap();
    fs::remove_file(site.path("store/config.json")).unwrap();
    site.start();
    let answers = |path: &'static str, code: &'static str, body: &'static str| {
        move |_: &Site| get(path).is_some_and(|text| text.contains(code) && text.contains(body))
    };
    site.until("/healthz", answers("/healthz", " 200 ", "\r\n\r\nflanneld is running"));
    site.until("/readyz not to be", answers("/readyz", " 503 ", "flanneld is not ready yet\n"));
    fs::write(site.path("store/config.json"), config).unwrap();
    site.healed("the start");
    site.until("/readyz", answers("/readyz", " 200 ", "\r\n\r\nflanneld is ready"));
    let done = |kind: &str, count| format!("weft_operations_total{{kind=\"{kind}\",result=\"done\"}} {count}");
    for line in ["weft_peers{state=\"programmed\"} 20".to_owned(), done("route", 20), done("fence", 1)] {
        site.until(&line, |_| get("/metrics").is_some_and(|metrics| metrics.contains(&line)));
    }
    ip("link del up0");
    site.until("/readyz to turn", answers("/readyz", " 503 ", "flanneld is not ready yet\n"));
    crate::site::add_uplink();
    site.until("/readyz to turn back", answers("/readyz", " 200 ", "flanneld is ready"));
    // A node is ready before the carrier of its new uplink is known, for example.
    site.until("no problem", |site| site.status().is_some_and(|status| status["problems"] == json!([])));
}

fn cleanup_refuses_then_removes_all(kind: Kind) {
    let mut site = Site::running(kind);
    let before = observed();
    let out = site.cleanup();
    assert!(!out.status.success());
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(said.contains("stop it first"), "{said}");
    assert_eq!(observed(), before);
    site.stop(Signal::SIGKILL);
    // The nexthop of a deleted route is left alone, and cleanup removes it, too.
    let v6 = kind.families()[0];
    ip(&format!("{} route del {}", if v6 { "-6" } else { "-4" }, site.peers[&7].net(v6)));
    let out = site.cleanup();
    assert!(out.status.success(), "{out:?}");
    assert!(observed().is_empty(), "{:#?}", observed());
    assert_eq!(ip("nexthop"), "", "no nexthop is left over");
    let again = site.cleanup();
    assert!(again.status.success(), "{again:?}");
    assert!(String::from_utf8(again.stdout).unwrap().contains("removed 0 entries"));
    site.start();
    site.healed("a start after cleanup");
}

/// A later agent with this subnet file would go on with what another cluster left in them.
#[test]
fn cleanup_removes_the_files_of_its_instance_and_no_others() {
    in_namespace(|| {
        let site = Site::new(Kind::HostGw);
        let (state, env) = (site.path("state"), site.env_file());
        fs::create_dir(&state).unwrap();
        let files = |env: &Path| {
            [saved::file(&state, env), recorder::file(&state, env), weft::extension::memory::file(&state, env)]
        };
        let (ours, others) = (files(&env), files(&site.path("run/other.env")));
        ours.iter().chain(&others).for_each(|file| fs::write(file, "something").unwrap());
        let mut cleanup = site.weft("cleanup");
        cleanup.arg(format!("--subnet-file={}", env.display())).arg(format!("--state-dir={}", state.display()));
        let out = cleanup.output().unwrap();
        assert!(out.status.success(), "{out:?}");
        assert!(ours.iter().all(|file| !file.exists()), "{ours:?}");
        assert!(others.iter().all(|file| file.exists()), "{others:?}");
    });
}

/// The exit code says that something is left, and an operator reads what it is.
#[test]
fn a_file_that_cleanup_cannot_remove_is_named_and_everything_else_goes() {
    in_namespace(|| {
        let site = Site::new(Kind::HostGw);
        let (state, env) = (site.path("state"), site.env_file());
        let files =
            [saved::file(&state, &env), recorder::file(&state, &env), weft::extension::memory::file(&state, &env)];
        let words =
            ["remove the saved peers: ", "remove the history: ", "remove the peers of the commands of extension: "];
        for (stuck, words) in files.iter().zip(words) {
            fs::create_dir(&state).unwrap();
            files.iter().filter(|file| *file != stuck).for_each(|file| fs::write(file, "something").unwrap());
            fs::create_dir(stuck).unwrap();
            let mut cleanup = site.weft("cleanup");
            cleanup.arg(format!("--subnet-file={}", env.display())).arg(format!("--state-dir={}", state.display()));
            let out = cleanup.output().unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.code() == Some(1) && said.contains(words), "{out:?}");
            assert!(files.iter().all(|file| file.exists() == (file == stuck)), "{out:?}");
            fs::remove_dir_all(&state).unwrap();
        }
    });
}

/// A node goes back to flannel, which may run again already when somebody cleans up.
#[test]
fn cleanup_leaves_a_device_of_flannel_unless_it_is_asked_for() {
    in_namespace(|| {
        let site = Site::new(Kind::HostGw);
        ip("link add flannel.9 type vxlan id 9 dstport 8472");
        ip("link add other9 type vxlan id 19 dstport 8472");
        let cleanup = |flags: &[&str]| {
            let mut cleanup = site.weft("cleanup");
            cleanup.arg(format!("--subnet-file={}", site.env_file().display()));
            let out =
                cleanup.arg(format!("--state-dir={}", site.path("state").display())).args(flags).output().unwrap();
            assert!(out.status.success(), "{out:?}");
            (String::from_utf8(out.stderr).unwrap(), ip("link"))
        };
        let (said, links) = cleanup(&[]);
        assert!(said.contains("flannel.9 was not made by this agent and stays: give --flannel-devices"), "{said}");
        assert!(!said.contains("other9") && links.contains("flannel.9"), "{said}");
        let (said, links) = cleanup(&["--flannel-devices"]);
        assert!(!said.contains("flannel.9") && !links.contains("flannel.9") && links.contains("other9"), "{said}");
    });
}
