// SPDX-License-Identifier: Apache-2.0
//! ADD, DEL, CHECK with Debian's delegates.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use crate::site::{on_a_node, run};

#[test]
fn pods_of_a_bridge_reach_each_other_and_leave_nothing() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        for pod in ["p1", "p2"] {
            site.pod(pod);
            let answer = site.call("ADD", pod, &conf).fine();
            let result = answer.json();
            assert_eq!(result["cniVersion"], "1.0.0");
            assert_eq!(result["ips"].as_array().unwrap().len(), 2, "{result}");
            assert_eq!(result["interfaces"][2]["sandbox"], format!("/run/netns/{pod}"), "{result}");
        }
        assert_eq!(site.files("records"), ["id-p1", "id-p2"], "eth0 has the name that flannel's plugin gives it");
        assert_eq!(site.addresses().len(), 4);
        for addr in ["10.5.1.2", "10.5.1.1", "fd05:0:0:1::2"] {
            site.ip("netns exec p2 true");
            crate::site::wait_for(&format!("an answer from {addr}"), || {
                let mut ping = Command::new("ip");
                ping.args(["netns", "exec", "p2", "ping", "-n", "-c1", "-W1", addr]);
                ping.output().unwrap().status.success()
            });
        }
        assert!(site.ip("link show cni0").contains("mtu 1450"));
        for pod in ["p1", "p2"] {
            site.call("DEL", pod, &conf).fine();
            assert!(site.call("DEL", pod, &conf).fine().stdout.is_empty(), "a second DEL is success");
        }
        site.nothing_left();
    });
}
