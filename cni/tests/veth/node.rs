// SPDX-License-Identifier: Apache-2.0
//! A node with routed pods, and functions that compare its state.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::site::{Answer, Site, run, wait_for};

pub fn on_a_node(test: impl FnOnce(Site) + Send + 'static) {
    crate::site::on_a_node(|site| {
        // ADD must enable forwarding, as the bridge and ptp plugins do. An agent in a container may not be able to.
        fs::write("/proc/sys/net/ipv4/ip_forward", "0").unwrap();
        fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "0").unwrap();
        // The node uses these addresses when it sends packets to its pods.
        site.ip("addr add 198.51.100.1/32 dev lo");
        site.ip("addr add 2001:db8:1::1/128 dev lo nodad");
        // Only then does the kernel accept packets for it.
        wait_for("the route to the own address", || {
            site.ip("-6 route show table local").contains("local 2001:db8:1::1 ")
        });
        test(site);
    });
}

/// Returns the configuration that flannel's plugin would pass on, extended by the members of `more`.
pub fn conf(site: &Site, more: Value) -> Value {
    let mut conf = json!({
        "cniVersion": "1.0.0", "name": "cbr0", "type": "weft-veth", "mtu": 1450, "ipMasq": false,
        "ipam": {
            "type": "host-local", "dataDir": site.path("networks"),
            "ranges": [[{"subnet": "10.5.1.0/24"}], [{"subnet": "fd05:0:0:1::/64"}]],
            "routes": [{"dst": "10.5.0.0/16"}, {"dst": "fd05::/48"}],
        },
    });
    for (key, value) in more.as_object().unwrap() {
        conf[key] = value.clone();
    }
    conf
}

pub fn command(site: &Site, verb: &str, pod: &str, ifname: &str) -> Command {
    site.command_of("weft-veth", verb, pod, ifname)
}

pub fn call(site: &Site, verb: &str, pod: &str, conf: &Value) -> Answer {
    run(command(site, verb, pod, "eth0"), conf)
}

/// Runs `ip` in a pod's namespace.
pub fn inside(site: &Site, pod: &str, words: &str) -> String {
    site.ip(&format!("-n {pod} {words}"))
}

/// Returns everything in the kernel that a pod has entries in, and the reservations. Link-local addresses are left out, because they change
/// asynchronously. So does the state of the carrier, which is waited for: the kernel shows it a moment after both ends are up.
pub fn state(site: &Site, pods: &[&str]) -> Vec<String> {
    let begin = Instant::now();
    loop {
        let all = seen(site, pods);
        let is_settled = !all.iter().any(|line| line.contains("NO-CARRIER") || line.contains(" linkdown"));
        if is_settled || begin.elapsed() > Duration::from_secs(60) {
            return all;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn seen(site: &Site, pods: &[&str]) -> Vec<String> {
    let mut all = Vec::new();
    let spaces = std::iter::once(String::new()).chain(pods.iter().map(|pod| format!("-n {pod} ")));
    for space in spaces {
        for words in ["-o link", "-4 -o addr", "-6 -o addr show scope global", "-4 route show table all", "neigh"] {
            let text = site.ip(&format!("{space}{words}"));
            let settled = text.replace(" state UNKNOWN ", " state UP ");
            all.extend(settled.lines().map(|line| format!("{space}{line}")).filter(|line| !line.contains("fe80::")));
        }
        let routes = site.ip(&format!("{space}-6 route"));
        all.extend(routes.lines().map(|line| format!("{space}{line}")).filter(|line| !line.contains("fe80::/64")));
    }
    let reserved = site.addresses().into_iter();
    all.extend(
        reserved.map(|addr| format!("{addr} {}", fs::read_to_string(site.path("networks/cbr0").join(&addr)).unwrap())),
    );
    all
}

#[track_caller]
pub fn reaches(site: &Site, pod: &str, addr: &str) {
    let words = format!("ping -n -c1 -W30 {addr}");
    let mut ping = Command::new(words.split(' ').next().unwrap());
    if !pod.is_empty() {
        ping = Command::new("ip");
        ping.args(["netns", "exec", pod, "ping"]);
    }
    ping.args(words.split(' ').skip(1));
    let out = ping.output().unwrap();
    let stdout = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{pod:?} to {addr}: {stdout}\n{:#?}", state(site, &[]));
}

/// Returns the address of one family in a result, without its prefix length.
pub fn addr(result: &Value, v6: bool) -> String {
    let all = result["ips"].as_array().unwrap().iter().map(|ip| ip["address"].as_str().unwrap());
    let whole = if v6 { "/128" } else { "/32" };
    let one = all.into_iter().find(|addr| addr.contains(':') == v6).unwrap();
    one.strip_suffix(whole).unwrap_or_else(|| panic!("{one} is not {whole}")).to_owned()
}
