// SPDX-License-Identifier: Apache-2.0
//! ADD, DEL, CHECK and VERSION with Debian's plugins as delegates.

use std::process::Command;

use serde_json::{Value, json};

use crate::site::{PLUGINS, Site, V4_TEXT, nat_rules, on_a_node, run, wait_for};

fn reaches(pod: &str, addr: &str) {
    wait_for(&format!("{pod} to reach {addr}"), || {
        let mut ping = Command::new("ip");
        ping.args(["netns", "exec", pod, "ping", "-n", "-c1", "-W1", addr]);
        ping.output().unwrap().status.success()
    });
}

/// Returns the pod's first address.
pub fn address(result: &Value) -> String {
    result["ips"][0]["address"].as_str().unwrap().split('/').next().unwrap().to_owned()
}

#[test]
fn pods_on_a_bridge_reach_each_other_and_del_removes_everything() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        for pod in ["p1", "p2"] {
            site.pod(pod);
            let result = site.call("ADD", pod, &conf).success().json();
            assert_eq!(result["cniVersion"], "1.0.0");
            assert_eq!(result["ips"].as_array().unwrap().len(), 2, "{result}");
            assert_eq!(result["interfaces"][2]["sandbox"], format!("/run/netns/{pod}"), "{result}");
        }
        assert_eq!(
            site.files("records"),
            ["id-p1", "id-p2"],
            "the record of eth0 must have the same name as in flannel's plugin"
        );
        assert_eq!(site.addresses().len(), 4);
        for addr in ["10.5.1.2", "10.5.1.1", "fd05:0:0:1::2"] {
            reaches("p2", addr);
        }
        assert!(site.ip("link show cni0").contains("mtu 1450"));
        for pod in ["p1", "p2"] {
            site.call("DEL", pod, &conf).success();
            assert!(site.call("DEL", pod, &conf).success().stdout.is_empty(), "a second DEL must succeed");
        }
        site.nothing_left();
    });
}

#[test]
fn ptp_pods_get_the_addresses_that_are_requested() {
    on_a_node(|mut site| {
        let ptp = site.conf(json!({"delegate": {"type": "ptp"}}));
        site.subnet_env(V4_TEXT);
        site.pod("p1");
        site.vars = vec![("CNI_ARGS".into(), "IgnoreUnknown=1;IP=10.5.1.77".into())];
        let result = site.call("ADD", "p1", &ptp).success().json();
        assert_eq!(address(&result), "10.5.1.77", "CNI_ARGS must reach the IPAM plugin");
        reaches("p1", "10.5.1.1");
        site.vars.clear();
        site.pod("p2");
        let asked = json!({"delegate": {"type": "ptp"}, "runtimeConfig": {"ips": ["10.5.1.99"]}});
        let result = site.call("ADD", "p2", &site.conf(asked.clone())).success().json();
        assert_eq!(address(&result), "10.5.1.99", "the capability `ips` must reach the IPAM plugin");
        for pod in ["p1", "p2"] {
            site.call("DEL", pod, &ptp).success();
        }
        site.nothing_left();
    });
}

#[test]
fn all_versions_are_supported_and_results_are_unchanged() {
    on_a_node(|site| {
        let all = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0"];
        for (number, version) in all.iter().enumerate() {
            let pod = format!("p{number}");
            site.pod(&pod);
            let conf = site.conf(json!({"cniVersion": version}));
            let result = site.call("ADD", &pod, &conf).success().json();
            assert_eq!(result["cniVersion"], *version);
            let old = *version < "0.3.0";
            assert_eq!(result["ip4"].is_object(), old, "{version}: {result}");
            assert_eq!(result["ips"].is_array(), !old, "{version}: {result}");
            let checked = site.call("CHECK", &pod, &site.conf(json!({"cniVersion": version, "prevResult": result})));
            if *version >= "0.4.0" {
                checked.success();
            } else {
                assert_eq!(checked.error().0, 1, "{version} has no CHECK");
            }
            for verb in ["GC", "STATUS"] {
                let answer = site.call(verb, &pod, &conf);
                assert_eq!(answer.error().0, 1, "{version} has no {verb}");
                assert_eq!(answer.json()["cniVersion"], *version, "the runtime reads the error in its own version");
            }
            site.call("DEL", &pod, &conf).success();
            let answer = site.call("VERSION", "", &json!({"cniVersion": version})).success().json();
            assert_eq!(answer["cniVersion"], *version);
            let known = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];
            assert_eq!(answer["supportedVersions"], json!(known));
        }
        site.nothing_left();
        site.pod("p9");
        let (code, text) = site.call("ADD", "p9", &site.conf(json!({"cniVersion": "2.0.0"}))).error();
        assert!(code == 1 && text.contains("2.0.0"), "{code} {text}");
    });
}

#[test]
fn check_reports_a_missing_address_and_a_changed_subnet() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        site.pod("p1");
        let result = site.call("ADD", "p1", &conf).success().json();
        let with = |result: &Value| site.conf(json!({"prevResult": result}));
        site.call("CHECK", "p1", &with(&result)).success();
        assert_eq!(site.call("CHECK", "p1", &conf).error().0, 7, "prevResult is missing");
        site.ip("-n p1 addr del 10.5.1.2/24 dev eth0");
        let (_, text) = site.call("CHECK", "p1", &with(&result)).error();
        assert!(text.contains("10.5.1.2"), "{text}");
        site.ip("-n p1 addr add 10.5.1.2/24 dev eth0");
        site.ip("-n p1 route add 10.5.0.0/16 via 10.5.1.1");
        site.call("CHECK", "p1", &with(&result)).success();
        site.subnet_env(&crate::site::env_text("10.5.2", "fd05:0:0:2", 1450));
        let (code, text) = site.call("CHECK", "p1", &with(&result)).error();
        assert!(code == 999 && text.contains("but the node has [[{\"subnet\":\"10.5.2.0/24\"}]"), "{code} {text}");
        site.call("DEL", "p1", &conf).success();
        assert_eq!(site.call("CHECK", "p1", &with(&result)).error().0, 3, "a pod without a record is unknown");
        site.nothing_left();
    });
}

/// Calls the plugins of a list as a runtime does. Each one gets the result of the one before it. Returns the last
/// result.
pub fn chain(site: &Site, verb: &str, pod: &str, plugins: &[Value]) -> Value {
    let mut result = Value::Null;
    let mut all: Vec<&Value> = plugins.iter().collect();
    if verb == "DEL" {
        all.reverse();
    }
    for plugin in all {
        let mut conf = plugin.clone();
        (conf["cniVersion"], conf["name"]) = (json!("1.0.0"), json!("cbr0"));
        if !result.is_null() {
            conf["prevResult"] = result.clone();
        }
        let mut command = site.command(verb, pod, if plugin["type"] == "loopback" { "lo" } else { "eth0" });
        if plugin["type"] != "flannel" {
            let program = format!("{PLUGINS}/{}", plugin["type"].as_str().unwrap());
            let vars: Vec<_> = command.get_envs().filter_map(|(k, v)| Some((k.to_owned(), v?.to_owned()))).collect();
            command = Command::new(program);
            command.env_clear().envs(vars);
            command.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
            command.stderr(std::process::Stdio::piped());
        }
        let answer = run(command, &conf).success();
        if verb == "ADD" && plugin["type"] != "loopback" {
            result = answer.json();
        }
    }
    result
}

#[test]
fn a_list_with_portmap_bandwidth_and_tuning_works() {
    on_a_node(|site| {
        let ports = json!({"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]});
        let limits = json!({"bandwidth": {"ingressRate": 8_000_000, "ingressBurst": 8_000_000}});
        let plugins = [
            json!({"type": "loopback"}),
            site.conf(json!({"delegate": {"hairpinMode": true, "isDefaultGateway": true}})),
            json!({"type": "portmap", "runtimeConfig": ports, "snat": true}),
            json!({"type": "bandwidth", "runtimeConfig": limits}),
            json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}}),
        ];
        site.pod("p1");
        let rules = || nat_rules("iptables");
        let result = chain(&site, "ADD", "p1", &plugins);
        assert_eq!(address(&result), "10.5.1.2");
        assert!(site.ip("-n p1 route").contains("default via 10.5.1.1"));
        assert!(site.ip("netns exec p1 cat /proc/sys/net/core/somaxconn").starts_with("500"));
        assert!(rules().contains("--dport 8080"), "{}", rules());
        chain(&site, "DEL", "p1", &plugins);
        assert!(!rules().contains("--dport 8080"), "{}", rules());
        site.nothing_left();
    });
}

#[test]
fn invalid_calls_are_refused_without_side_effects() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        let refused = |command: Command, conf: &Value, code: u64, text: &str| {
            let error = run(command, conf).error();
            assert!(error.0 == code && error.1.contains(text), "{code} {text}: {error:?}");
        };
        refused(site.command("ADD", "p1", "eth0"), &conf, 8, "netns /run/netns/p1");
        let mut own = site.command("ADD", "p1", "eth0");
        own.env("CNI_NETNS", "/proc/self/ns/net");
        refused(own, &conf, 8, "is the plugin's own");
        site.pod("p1");
        refused(site.command("ADD", "p1", "eth0"), &site.conf(json!({"name": ""})), 7, "missing network name");
        refused(site.command("ADD", "p1", "eth0"), &site.conf(json!({"name": "../x"})), 7, "invalid network name");
        refused(site.command("ADD", "p1", "eth0"), &json!("text"), 6, "read the network configuration");
        let both = json!({"delegate": {"name": "x", "ipam": {}, "type": 1}});
        refused(site.command("ADD", "p1", "eth0"), &site.conf(both), 7, "must not have 'ipam' field");
        let unknown = json!({"delegate": {"type": "nosuch"}});
        refused(site.command("ADD", "p1", "eth0"), &site.conf(unknown), 999, "failed to find plugin \"nosuch\"");
        let path = json!({"delegate": {"type": "../bin/sh"}});
        refused(site.command("ADD", "p1", "eth0"), &site.conf(path), 7, "is not the name of a plugin");
        let routes = json!({"ipam": {"routes": [{"dst": "x"}]}});
        refused(site.command("ADD", "p1", "eth0"), &site.conf(routes), 7, "failed to parse ipam.routes");
        let mut without_command = site.command("ADD", "p1", "eth0");
        without_command.env_remove("CNI_COMMAND");
        let answer = run(without_command, &conf).success();
        assert!(answer.stdout.is_empty() && answer.stderr.contains("protocol versions supported: 0.1.0"), "{answer:?}");
        site.nothing_left();
    });
}
