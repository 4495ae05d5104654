// SPDX-License-Identifier: Apache-2.0
//! ADD and DEL that are killed, and what GC and STATUS do.

use std::io::Write;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::node::{addr, call, command, conf, inside, on_a_node, reaches, state};
use crate::site::{Site, wait_for};

/// Starts a call and kills it after this time unless it has ended. Waits for the IPAM plugin that the call may have
/// started.
fn call_and_kill(site: &Site, verb: &str, pod: &str, conf: &Value, after: Duration) {
    let mut child = command(site, verb, pod, "eth0").spawn().unwrap();
    child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
    let begin = Instant::now();
    while begin.elapsed() < after {
        std::hint::spin_loop();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    // The environment of host-local contains the path of this site's plugins.
    let ours = site.path("bin").display().to_string();
    wait_for("the IPAM plugin to end", || !running(&ours));
}

fn running(mark: &str) -> bool {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let mut environments =
        all.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok()).filter_map(|entry| {
            let comm = std::fs::read_to_string(entry.path().join("comm")).ok()?;
            (comm.trim() == "host-local").then(|| std::fs::read(entry.path().join("environ")).unwrap_or_default())
        });
    environments.any(|environment| String::from_utf8_lossy(&environment).contains(mark))
}

#[test]
fn a_killed_add_is_completed_by_add_and_removed_by_del() {
    on_a_node(|site| {
        let conf = conf(&site, json!({}));
        let empty = state(&site, &[]);
        for round in 0..24 {
            site.pod("p1");
            call_and_kill(&site, "ADD", "p1", &conf, Duration::from_micros(400 * round));
            if round % 2 == 0 {
                let result = call(&site, "ADD", "p1", &conf).success().json();
                reaches(&site, "", &addr(&result, false));
                reaches(&site, "", &addr(&result, true));
                assert_eq!(site.addresses().len(), 2, "round {round}: there must be one address of each family");
            }
            call(&site, "DEL", "p1", &conf).success();
            assert_eq!(state(&site, &[]), empty, "round {round}");
            site.ip("netns del p1");
        }
    });
}

#[test]
fn a_killed_del_is_completed_by_the_next_one() {
    on_a_node(|site| {
        let conf = conf(&site, json!({}));
        let empty = state(&site, &[]);
        for round in 0..12 {
            site.pod("p1");
            call(&site, "ADD", "p1", &conf).success();
            call_and_kill(&site, "DEL", "p1", &conf, Duration::from_micros(700 * round));
            call(&site, "DEL", "p1", &conf).success();
            assert_eq!(state(&site, &[]), empty, "round {round}");
            site.ip("netns del p1");
        }
    });
}

/// A wrapper around Debian's host-local, which does not support version 1.1.0. It answers GC and STATUS as a current
/// host-local would.
const IPAM: &str = r#"[ "$CNI_COMMAND" = GC ] || [ "$CNI_COMMAND" = STATUS ] && { cat >>"$here/asked"; exit 0; }
sed 's/"cniVersion":"1.1.0"/"cniVersion":"1.0.0"/; s/"type":"host-new"/"type":"host-local"/' | /usr/lib/cni/host-local"#;

fn newest(site: &Site, more: Value) -> Value {
    site.script("host-new", IPAM);
    let mut conf = conf(site, more);
    conf["cniVersion"] = json!("1.1.0");
    conf["ipam"]["type"] = json!("host-new");
    conf
}

#[test]
fn gc_removes_attachments_that_are_not_valid() {
    on_a_node(|site| {
        let plain = newest(&site, json!({}));
        for pod in ["p1", "p2", "p3"] {
            site.pod(pod);
            call(&site, "ADD", pod, &plain).success();
        }
        let mut other = plain.clone();
        other["name"] = json!("other");
        other["isDefaultGateway"] = json!(false);
        other["ipam"]["ranges"] = json!([[{"subnet": "10.77.1.0/24"}]]);
        other["ipam"]["routes"] = json!([]);
        crate::site::run(command(&site, "ADD", "p3", "net1"), &other).success();
        let (code, text) = call(&site, "GC", "", &plain).error();
        assert!(code == 7 && text.contains("valid-attachments"), "{code} {text}");
        assert_eq!(site.veths(), 4, "GC without a list must not remove anything");
        let known = json!([{"containerID": "id-p2", "ifname": "eth0"}]);
        let list = newest(&site, json!({"cni.dev/valid-attachments": known}));
        for _ in 0..2 {
            call(&site, "GC", "", &list).success();
            // The kernel removes the other ends, in the pods, asynchronously.
            wait_for("the removed pairs to disappear", || site.veths() <= 2);
            assert_eq!(site.veths(), 2, "the pairs of p2 and of the other network must stay: {}", site.ip("-o link"));
            assert_eq!(site.addresses().len(), 2, "{:?}", site.addresses());
        }
        assert!(inside(&site, "p2", "-o link").contains("eth0"));
        assert!(
            std::fs::read_to_string(site.path("asked")).unwrap().contains("valid-attachments"),
            "GC must reach the IPAM plugin"
        );
        // No pod is left. Go encodes an empty list as null. The key is that of an earlier text of the specification.
        call(&site, "GC", "", &newest(&site, json!({"cni.dev/attachments": Value::Null}))).success();
        wait_for("the last pair of this network to disappear", || site.veths() <= 1);
        assert_eq!(site.veths(), 1, "the pair of the other network must stay: {}", site.ip("-o link"));
        assert_eq!(site.addresses().len(), 0, "{:?}", site.addresses());
    });
}

#[test]
fn gc_releases_addresses_without_a_pair() {
    on_a_node(|site| {
        let plain = newest(&site, json!({}));
        site.pod("p1");
        call(&site, "ADD", "p1", &plain).success();
        let orphan = site.path("networks/cbr0/10.5.1.200");
        std::fs::write(&orphan, "id-gone\r\neth0").unwrap();
        // Old versions of host-local named no interface, so this may be the address of a pod that runs.
        std::fs::write(site.path("networks/cbr0/10.5.1.201"), "id-old").unwrap();
        let mut list = plain.clone();
        list["cni.dev/valid-attachments"] = json!([{"containerID": "id-p1", "ifname": "eth0"}]);
        // The IPAM type is host-local here, so the plugin removes the reservations itself.
        list["ipam"]["type"] = json!("host-local");
        site.script("host-local", IPAM);
        call(&site, "GC", "", &list).success();
        assert!(!orphan.exists());
        assert_eq!(site.addresses().len(), 3, "{:?}", site.addresses());
    });
}

/// No other program knows where it keeps them.
#[test]
fn del_lets_another_ipam_plugin_release_the_addresses() {
    on_a_node(|site| {
        let plain = newest(&site, json!({}));
        site.pod("p1");
        call(&site, "ADD", "p1", &plain).success();
        assert_eq!(site.addresses().len(), 2, "{:?}", site.addresses());
        call(&site, "DEL", "p1", &plain).success();
        assert_eq!(site.addresses(), Vec::<String>::new());
    });
}

#[test]
fn status_fails_if_the_ipam_plugin_is_missing_or_fails() {
    on_a_node(|site| {
        let plain = newest(&site, json!({}));
        call(&site, "STATUS", "", &plain).success();
        let mut missing = plain.clone();
        missing["ipam"]["type"] = json!("no-such-plugin");
        let (code, text) = call(&site, "STATUS", "", &missing).error();
        assert!(code == 50 && text.contains("no-such-plugin"), "{code} {text}");
        site.script("host-new", r#"echo '{"code": 51, "msg": "half of it"}'; exit 1"#);
        assert_eq!(call(&site, "STATUS", "", &plain).error().0, 51, "the code must be that of the IPAM plugin");
    });
}

/// Without the rule for the table of local addresses, the kernel delivers no packet to the pod's address.
#[test]
fn an_add_whose_ipv6_address_never_becomes_usable_fails_and_leaves_nothing_behind() {
    on_a_node(|site| {
        site.pod("p1");
        inside(&site, "p1", "-6 rule del pref 0");
        // The kernel asks no rules at all until there is one of its own.
        inside(&site, "p1", "-6 rule add to 2001:db8:9::/48 unreachable pref 5");
        let (plain, before) = (conf(&site, json!({})), state(&site, &["p1"]));
        let (code, text) = call(&site, "ADD", "p1", &plain).error();
        assert!(code == 999 && text.contains("did not make the address fd05:0:0:1:"), "{code} {text}");
        wait_for("the pod's end to disappear", || state(&site, &["p1"]) == before);
        inside(&site, "p1", "-6 rule add lookup local pref 0");
        let result = call(&site, "ADD", "p1", &plain).success().json();
        reaches(&site, "", &addr(&result, true));
    });
}
