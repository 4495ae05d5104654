// SPDX-License-Identifier: Apache-2.0
//! Pods exchange packets with each other, the node and an external host, in both families.

use std::fs;

use serde_json::json;

use crate::node::{addr, call, conf, inside, on_a_node, reaches, state};

#[test]
fn pods_reach_each_other_the_node_and_an_external_host() {
    on_a_node(|site| {
        // An external host with routes to the pods, and the agent's routes for addresses that no pod has.
        site.pod("world");
        site.ip("link add up0 type veth peer name far0 netns world");
        for words in ["addr add 192.0.2.1/24 dev up0", "addr add 2001:db8::1/64 dev up0 nodad", "link set up0 up"] {
            site.ip(words);
        }
        for words in [
            "addr add 192.0.2.2/24 dev far0",
            "addr add 2001:db8::2/64 dev far0 nodad",
            "link set far0 up",
            "route add 10.5.1.0/24 via 192.0.2.1",
            "route add fd05:0:0:1::/64 via 2001:db8::1",
        ] {
            inside(&site, "world", words);
        }
        site.ip("route add unreachable 10.5.1.0/24 metric 4294967294");
        site.ip("-6 route add unreachable fd05:0:0:1::/64 metric 2147483647");
        let conf = conf(&site, json!({}));
        let mut results = Vec::new();
        for pod in ["p1", "p2"] {
            site.pod(pod);
            results.push(call(&site, "ADD", pod, &conf).success().json());
        }
        // ARP requests are not answered, so every packet that arrives was sent without one.
        for (space, link) in
            [("p1", "eth0"), ("p2", "eth0"), ("", results[0]["interfaces"][0]["name"].as_str().unwrap())]
        {
            let file = format!("/proc/sys/net/ipv4/conf/{link}/arp_ignore");
            let write = format!("echo 8 >{file}");
            let words = if space.is_empty() {
                vec!["sh", "-c", &write]
            } else {
                vec!["ip", "netns", "exec", space, "sh", "-c", &write]
            };
            assert!(std::process::Command::new(words[0]).args(&words[1..]).status().unwrap().success());
        }
        for v6 in [false, true] {
            let (one, two) = (addr(&results[0], v6), addr(&results[1], v6));
            reaches(&site, "p1", &two);
            reaches(&site, "p2", &one);
            reaches(&site, "", &one);
            let (node, world) = if v6 { ("2001:db8::1", "2001:db8::2") } else { ("192.0.2.1", "192.0.2.2") };
            reaches(&site, "p1", node);
            reaches(&site, "p1", world);
            reaches(&site, "world", &two);
        }
        let neighbours = inside(&site, "p1", "neigh");
        assert_eq!(neighbours.lines().count(), 2, "the pod must have two neighbours, its gateways: {neighbours}");
        assert!(neighbours.lines().all(|line| line.ends_with("PERMANENT ")), "{neighbours}");
        // An address that no pod has is unreachable.
        let lost = std::process::Command::new("ip").args(["route", "get", "10.5.1.99"]).output().unwrap();
        assert!(String::from_utf8_lossy(&lost.stderr).contains("No route to host"), "{lost:?}");
    });
}

#[test]
fn links_match_the_configuration() {
    on_a_node(|site| {
        site.pod("p1");
        let more =
            json!({"mtu": 1400, "runtimeConfig": {"mac": "02:11:22:33:44:55"}, "dns": {"nameservers": ["10.96.0.10"]}});
        let result = call(&site, "ADD", "p1", &conf(&site, more)).success().json();
        let host = result["interfaces"][0]["name"].as_str().unwrap();
        assert_eq!(
            result["interfaces"][1],
            json!({"name": "eth0", "mac": "02:11:22:33:44:55", "sandbox": "/run/netns/p1"})
        );
        assert_eq!(result["dns"], json!({"nameservers": ["10.96.0.10"]}));
        let routes = json!([{"dst": "0.0.0.0/0", "gw": "169.254.1.1"}, {"dst": "::/0", "gw": "fe80::1"}]);
        assert_eq!(result["routes"], routes);
        let (outer, inner) = (site.ip(&format!("-d link show {host}")), inside(&site, "p1", "link show eth0"));
        assert!(outer.contains("mtu 1400") && outer.contains("addrgenmode none"), "{outer}");
        assert!(outer.contains("alias weft-veth cbr0 id-p1 eth0"), "{outer}");
        assert!(inner.contains("mtu 1400") && inner.contains("02:11:22:33:44:55"), "{inner}");
        let accept =
            fs::read_to_string(format!("/proc/thread-self/root/proc/sys/net/ipv6/conf/{host}/accept_ra")).unwrap();
        assert_eq!(accept.trim(), "0", "the host must ignore router advertisements of the pod");
        // An anycast address on the pair would double the time that the kernel needs for a DEL. The gateway must answer
        // without it.
        let anycast = fs::read_to_string("/proc/thread-self/net/anycast6").unwrap();
        assert!(!anycast.contains(host), "{anycast}");
        reaches(&site, "p1", "fe80::1%eth0");
        let routes = site.ip(&format!("route show dev {host}"));
        assert_eq!(routes.trim(), format!("{} proto 91 scope link", addr(&result, false)));
    });
}

#[test]
fn add_enables_ipv6_on_links_where_it_is_disabled_by_default() {
    on_a_node(|site| {
        site.pod("p1");
        fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1").unwrap();
        let off = "echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6";
        inside_sh("p1", off);
        let result = call(&site, "ADD", "p1", &conf(&site, json!({}))).success().json();
        reaches(&site, "", &addr(&result, true));
        reaches(&site, "", &addr(&result, false));
    });
}

#[test]
fn a_second_interface_gets_the_routes_of_its_network() {
    on_a_node(|site| {
        site.pod("p1");
        call(&site, "ADD", "p1", &conf(&site, json!({}))).success();
        let other = |more| {
            let mut conf = conf(&site, more);
            conf["name"] = json!("storage");
            conf["ipam"]["ranges"] = json!([[{"subnet": "10.77.1.0/24"}]]);
            // The kernel refuses a route with host bits, and the interface has no IPv6 address.
            conf["ipam"]["routes"] = json!([{"dst": "10.77.9.9/16"}, {"dst": "fd77::/48"}]);
            conf
        };
        let before = state(&site, &["p1"]);
        let add = |conf| crate::site::run(crate::node::command(&site, "ADD", "p1", "net1"), &conf);
        let (code, text) = add(other(json!({}))).error();
        assert!(code == 999 && text.contains("0.0.0.0/0") && text.contains("isDefaultGateway"), "{code} {text}");
        assert_eq!(state(&site, &["p1"]), before, "a failed ADD must not change anything");
        let result = add(other(json!({"isDefaultGateway": false}))).success().json();
        assert_eq!(result["routes"], json!([{"dst": "10.77.0.0/16", "gw": "169.254.1.1"}]));
        assert!(inside(&site, "p1", "route").contains("10.77.0.0/16 via 169.254.1.1 dev net1 onlink"));
        reaches(&site, "", &addr(&result, false));
        // CHECK expects no default route over this interface.
        let checked = other(json!({"isDefaultGateway": false, "prevResult": result}));
        crate::site::run(crate::node::command(&site, "CHECK", "p1", "net1"), &checked).success();
    });
}

fn inside_sh(pod: &str, line: &str) {
    let done = std::process::Command::new("ip").args(["netns", "exec", pod, "sh", "-c", line]).status().unwrap();
    assert!(done.success(), "{line}");
}
