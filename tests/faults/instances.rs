// SPDX-License-Identifier: Apache-2.0
//! Two agents on one host: two networks in two stores, two subnet files, vxlan and host-gw.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;

use crate::site::{Kind, Lease, Site, in_namespace, ip, observed};

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
        routes.chain(["route unreachable 10.6.0.0/16 metric 4294967294".to_owned()]).collect()
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
    let deadline = Instant::now() + Duration::from_secs(15);
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
        site.until("readiness", |site| site.status().is_some_and(|status| status["ready"] == json!(true)));
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
