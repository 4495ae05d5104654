// SPDX-License-Identifier: Apache-2.0
//! The fence for forwarded packets (`--fail-closed`): it is repaired, replaces the routes of earlier versions, and is removed when it is not wanted.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::Value as Json;
use weft::firewall::nft::{connection, table};
use weft::instance::Instance;
use weft::saved;
use weft_subnet::cidr::Family;

use crate::site::{Kind, Site, array, each, fence, ip, observed, run};

each! {
    deleted_rules_and_routes_come_back: Vxlan VxlanDual HostGwDual;
    what_others_add_to_the_fence_is_removed: VxlanDual;
    rules_of_others_stay: VxlanDual;
    routes_of_an_earlier_version_are_replaced: VxlanDual HostGw;
    routes_of_an_earlier_version_do_not_wait_for_the_store: VxlanDual;
    the_fence_stays_without_an_agent_and_cleanup_removes_it: VxlanDual;
    parts_are_removed_beside_flanneld_and_not_beside_the_agent: VxlanDual;
    the_fence_is_removed_when_it_is_not_wanted: VxlanDual;
    another_own_subnet_moves_its_fence: Vxlan;
    another_network_moves_its_fence_without_a_gap: Vxlan HostGw;
}

fn families(kind: Kind) -> &'static [&'static str] {
    if kind.dual() { &["-4", "-6"] } else { &["-4"] }
}

/// Returns the preference of the first rule, and the table.
fn numbers(family: &str) -> (u64, String) {
    let rules = array(&run("ip", &format!("{family} -j rule")));
    let ours: Vec<&Json> = rules.iter().filter(|rule| rule["protocol"] == "90").collect();
    let [first, second] = ours[..] else { panic!("{rules:#?}") };
    (first["priority"].as_u64().unwrap(), second["table"].as_str().unwrap().to_owned())
}

fn network(family: &str) -> &'static str {
    if family == "-4" { "10.5.0.0/16" } else { "fd05::/48" }
}

fn fences(lines: &BTreeSet<String>) -> Vec<&String> {
    lines.iter().filter(|line| line.starts_with("fence: ")).collect()
}

fn deleted_rules_and_routes_come_back(kind: Kind) {
    let mut site = Site::running(kind);
    for family in families(kind) {
        let (pref, table) = numbers(family);
        ip(&format!("{family} rule del pref {pref}"));
        site.healed("a deleted first rule");
        ip(&format!("{family} rule del pref {}", pref + 1));
        site.healed("a deleted second rule");
        ip(&format!("{family} route flush table {table}"));
        site.healed("a flushed table");
        ip(&format!("{family} rule del pref {pref}"));
        ip(&format!("{family} rule del pref {}", pref + 1));
        ip(&format!("{family} route flush table {table}"));
        site.healed("all of it deleted");
    }
}

fn what_others_add_to_the_fence_is_removed(kind: Kind) {
    let mut site = Site::running(kind);
    for family in families(kind) {
        let (pref, table) = numbers(family);
        let (addr, net) =
            if *family == "-4" { ("10.5.200.9", "10.5.128.0/17") } else { ("fd05::99", "fd05:0:0:8000::/49") };
        ip(&format!("{family} route add throw {addr} table {table}"));
        site.healed("an exception for somebody");
        ip(&format!("{family} route add throw {net} table {table} proto 90"));
        site.healed("an exception for many");
        ip(&format!("{family} rule add pref {pref} to {net} lookup main proto 90"));
        site.healed("another rule under our number");
    }
}

fn rules_of_others_stay(kind: Kind) {
    let mut site = Site::running(kind);
    for family in families(kind) {
        let (pref, _) = numbers(family);
        let words = |pref| format!("to {} lookup 77 pref {pref} proto static", network(family));
        ip(&format!("{family} rule add {}", words(pref)));
        ip(&format!("{family} rule add {}", words(100)));
        ip(&format!("{family} route add unreachable {} table 77 proto static", network(family)));
        ip(&format!("{family} rule del pref {}", pref + 1));
        site.healed("rules of others");
        let rules = ip(&format!("{family} rule"));
        assert_eq!(rules.matches("lookup 77").count(), 2, "{rules}");
        assert!(ip(&format!("{family} route show table 77")).contains("unreachable"));
        ip(&format!("{family} rule del {}", words(pref)));
    }
}

fn routes_of_an_earlier_version_are_replaced(kind: Kind) {
    let mut site = Site::new(kind);
    for family in families(kind) {
        let metric = if *family == "-4" { "4294967294" } else { "2147483647" };
        let own = if *family == "-4" { site.own.net(false) } else { site.own.net(true) };
        ip(&format!("{family} route add unreachable {} metric {metric} proto 90", network(family)));
        ip(&format!("{family} route add blackhole {own} metric {metric} proto 90"));
    }
    site.start();
    site.healed("the start");
}

/// They may refuse packets to the store itself.
fn routes_of_an_earlier_version_do_not_wait_for_the_store(kind: Kind) {
    let mut site = Site::new(kind);
    std::fs::create_dir_all(site.path("run")).unwrap();
    std::fs::write(site.env_file(), site.expected_env()).unwrap();
    let config = std::fs::read(site.path("store/config.json")).unwrap();
    std::fs::remove_file(site.path("store/config.json")).unwrap();
    for family in families(kind) {
        ip(&format!("{family} route add unreachable {} metric 4294967294 proto 90", network(family)));
    }
    site.start();
    let fenced: BTreeSet<String> = families(kind).iter().flat_map(|family| fence(network(family))).collect();
    site.until("the fences alone", |_| observed() == fenced);
    std::fs::write(site.path("store/config.json"), config).unwrap();
    site.healed("a store that answers late");
}

fn the_fence_stays_without_an_agent_and_cleanup_removes_it(kind: Kind) {
    let mut site = Site::running(kind);
    let before = observed();
    assert_eq!(fences(&before).len(), 6);
    site.stop(Signal::SIGKILL);
    assert_eq!(fences(&observed()), fences(&before));
    site.start();
    site.healed("a restart");
    site.stop(Signal::SIGTERM);
    assert_eq!(fences(&observed()), fences(&before));
    let out = site.cleanup();
    assert!(out.status.success(), "{out:?}");
    assert_eq!(observed(), BTreeSet::new());
}

/// Runs `weft cleanup` with this flag. Returns what it says, or why it refuses.
fn cleanup(site: &Site, flag: &str) -> Result<String, String> {
    let mut weft = site.weft("cleanup");
    weft.arg(format!("--subnet-file={}", site.env_file().display()));
    weft.arg(format!("--state-dir={}", site.path("state").display())).arg(flag);
    let out = weft.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if out.status.success() { Ok(text(out.stdout)) } else { Err(text(out.stderr)) }
}

/// Returns the command of a program that ends with the thread of the test, also when the test fails.
fn ends_with_the_test(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// A node goes back to flannel, or its agent is down and somebody has deleted a rule of the fence.
fn parts_are_removed_beside_flanneld_and_not_beside_the_agent(kind: Kind) {
    let mut site = Site::new(kind);
    site.flags.extend(["--ip-masq", "--firewall=nft", "--guard-tunnel"].map(str::to_owned));
    let name = Instance::new(&site.env_file()).name;
    let tables = |suffix: &str| {
        let is_there = |family| table::head(&mut connection::open().unwrap(), family, &format!("{name}{suffix}"));
        Family::BOTH.map(|family| is_there(family).unwrap().is_some())
    };
    // The store of this test is a directory, for which an agent saves nothing.
    let saved = saved::file(&site.path("state"), &site.env_file());
    std::fs::create_dir(site.path("state")).unwrap();
    std::fs::write(&saved, "something").unwrap();
    site.start();
    site.until("the rules and the guard", |_| (tables(""), tables("-guard")) == ([true; 2], [true; 2]));
    site.until("the fence", |_| fences(&observed()).len() == 6);
    let refused = cleanup(&site, "--only=rules,fence,guard").unwrap_err();
    assert!(refused.contains("stop it first"), "{refused}");
    site.stop(Signal::SIGKILL);
    let before = observed();
    let others: BTreeSet<String> = before.iter().filter(|line| !line.starts_with("fence: ")).cloned().collect();
    assert_eq!(fences(&before).len(), 6);
    for family in families(kind) {
        ip(&format!("{family} rule del pref {}", numbers(family).0));
    }
    let flanneld = site.path("flanneld");
    std::os::unix::fs::symlink("/bin/sleep", &flanneld).unwrap();
    let mut flanneld = ends_with_the_test(&flanneld).arg("600").spawn().unwrap();
    let comm = format!("/proc/{}/comm", flanneld.id());
    site.until("its name", |_| std::fs::read_to_string(&comm).unwrap() == "flanneld\n");
    let refused = String::from_utf8(site.cleanup().stderr).unwrap();
    assert!(refused.contains("flanneld (pid"), "{refused}");
    assert_eq!(cleanup(&site, "--only=fence").unwrap(), "removed the fence\n");
    assert_eq!(observed(), others, "devices, routes and the rest stay");
    assert_eq!((tables(""), tables("-guard")), ([true; 2], [true; 2]));
    assert_eq!(cleanup(&site, "--only=guard,rules").unwrap(), "removed the tunnel guard, the traffic rules\n");
    assert_eq!((tables(""), tables("-guard")), ([false; 2], [false; 2]));
    assert_eq!(cleanup(&site, "--only=rules,fence,guard").unwrap(), "removed nothing\n");
    assert_eq!(observed(), others);
    assert!(saved.exists() && site.env_file().exists());
    flanneld.kill().unwrap();
    flanneld.wait().unwrap();
}

fn the_fence_is_removed_when_it_is_not_wanted(kind: Kind) {
    let mut site = Site::running(kind);
    site.stop(Signal::SIGTERM);
    site.flags.push("--fail-closed=false".to_owned());
    site.start();
    site.until("the fence to go", |_| fences(&observed()).is_empty());
    let rules = ip("rule") + &ip("-6 rule");
    assert!(!rules.contains("proto 90"), "{rules}");
}

/// The agent gets another subnet. Nothing of the fence of the earlier one is left.
fn another_own_subnet_moves_its_fence(kind: Kind) {
    let mut site = Site::new(kind);
    site.flags.push("--ip-blackhole-route".to_owned());
    let fenced = |own: &str| {
        let own = fence(own).map(|line| line.replace("unreachable", "blackhole"));
        let all: BTreeSet<String> = own.into_iter().chain(fence("10.5.0.0/16")).collect();
        move |_: &Site| fences(&observed()).into_iter().eq(&all)
    };
    site.start();
    site.until("both fences", fenced("10.5.1.0/24"));
    site.stop(Signal::SIGTERM);
    let (old, new) = (site.own.clone(), crate::site::Lease { number: 60, ..site.own.clone() });
    std::fs::remove_file(site.lease_file(&old.key(kind))).unwrap();
    std::fs::remove_file(site.env_file()).unwrap();
    site.put(&new.key(kind), &new.value(kind).to_string());
    site.start();
    site.until("the fences of the new subnet", fenced("10.5.60.0/24"));
}

/// A restart with a wider Network that contains all leases. The notifications of the kernel show that the old fence is removed last.
fn another_network_moves_its_fence_without_a_gap(kind: Kind) {
    let mut site = Site::running(kind);
    site.stop(Signal::SIGTERM);
    let config = std::fs::read_to_string(site.path("store/config.json")).unwrap();
    std::fs::write(site.path("store/config.json"), config.replace("10.5.0.0/16", "10.4.0.0/15")).unwrap();
    let news = std::fs::File::create(site.path("news")).unwrap();
    let mut monitor = ends_with_the_test("ip").args(["monitor", "rule", "route"]).stdout(news).spawn().unwrap();
    let heard = |site: &Site| std::fs::read_to_string(site.path("news")).unwrap();
    let mut metric = 0;
    site.until("the monitor to listen", |site| {
        // The kernel would not announce the same route again.
        metric += 1;
        ip(&format!("route add unreachable 198.51.100.1 table 77 metric {metric}"));
        heard(site).contains("198.51.100.1 ")
    });
    site.start();
    let wanted: BTreeSet<String> = fence("10.4.0.0/15").into_iter().collect();
    site.until("the fence of the new Network", |_| fences(&observed()).into_iter().eq(&wanted));
    // The rule with the old Network is removed last.
    site.until("the end of the news", |site| heard(site).contains("Deleted 3"));
    monitor.kill().unwrap();
    monitor.wait().unwrap();
    let news = heard(&site);
    let lines: Vec<&str> =
        news.lines().filter(|line| line.contains("10.4.0.0/15") || line.contains("10.5.0.0/16")).collect();
    let words = lines.iter().map(|line| {
        let gone = if line.starts_with("Deleted") { "-" } else { "+" };
        let net = if line.contains("10.4.0.0/15") { "new" } else { "old" };
        format!("{gone}{} {net}", if line.contains("lookup") { "rule" } else { "route" })
    });
    let words: Vec<String> = words.collect();
    assert_eq!(words, ["+rule new", "+route new", "-route old", "-rule old"], "{lines:#?}");
}
