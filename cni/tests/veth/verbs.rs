// SPDX-License-Identifier: Apache-2.0
//! The verbs: repeated, in the wrong order, with what is wrong named.

use serde_json::json;

use crate::node::{addr, call, command, conf, inside, on_a_node, reaches, state};
use crate::site::run;

#[test]
fn a_second_add_adds_nothing() {
    on_a_node(|site| {
        site.pod("p1");
        let conf = conf(&site, json!({}));
        let first = call(&site, "ADD", "p1", &conf).fine().json();
        let before = state(&site, &["p1"]);
        for _ in 0..3 {
            assert_eq!(call(&site, "ADD", "p1", &conf).fine().json(), first);
            assert_eq!(state(&site, &["p1"]), before);
        }
        // What somebody took away in between is put back, and nothing else.
        inside(&site, "p1", "neigh del 169.254.1.1 dev eth0");
        let host = first["interfaces"][0]["name"].as_str().unwrap();
        site.ip(&format!("link set {host} down"));
        assert_eq!(call(&site, "ADD", "p1", &conf).fine().json(), first);
        let mut after = state(&site, &["p1"]);
        let mut before = before;
        after.sort();
        before.sort();
        assert_eq!(after, before);
        reaches(&site, "", &addr(&first, false));
    });
}

#[test]
fn del_leaves_nothing_however_often_and_whenever_it_comes() {
    on_a_node(|site| {
        let conf = conf(&site, json!({}));
        let empty = state(&site, &[]);
        call(&site, "DEL", "p1", &conf).fine();
        site.pod("p1");
        call(&site, "ADD", "p1", &conf).fine();
        for _ in 0..2 {
            assert!(call(&site, "DEL", "p1", &conf).fine().stdout.is_empty());
            assert_eq!(state(&site, &[]), empty);
        }
        assert_eq!(inside(&site, "p1", "-o link").lines().count(), 1, "lo alone");
        // The namespace goes first: its end of the pair goes with it, the address waits for DEL.
        call(&site, "ADD", "p1", &conf).fine();
        site.ip("netns del p1");
        call(&site, "DEL", "p1", &conf).fine();
        assert_eq!(state(&site, &[]), empty);
        let mut bare = command(&site, "DEL", "p1", "eth0");
        bare.env_remove("CNI_NETNS");
        run(bare, &conf).fine();
    });
}

#[test]
fn check_names_what_is_wrong() {
    on_a_node(|site| {
        site.pod("p1");
        let plain = conf(&site, json!({}));
        let result = call(&site, "ADD", "p1", &plain).fine().json();
        let checked = conf(&site, json!({"prevResult": result}));
        let (v4, host) = (addr(&result, false), result["interfaces"][0]["name"].as_str().unwrap());
        call(&site, "CHECK", "p1", &checked).fine();
        let (code, text) = call(&site, "CHECK", "p1", &plain).error();
        assert!(code == 7 && text.contains("prevResult"), "{code} {text}");
        let breaks: [(&str, String, &str); 7] = [
            ("", format!("route del {v4} dev {host}"), "the host's route to"),
            ("", format!("neigh del {v4} dev {host}"), "the host's neighbour"),
            ("p1", "route del default".to_owned(), "default route via 169.254.1.1"),
            ("p1", "neigh del fe80::1 dev eth0".to_owned(), "the pod's neighbour fe80::1"),
            ("p1", format!("addr del {v4}/32 dev eth0"), "has not the address"),
            ("", format!("link set {host} mtu 1280"), "has MTU 1280, not 1450"),
            ("", format!("link set {host} down"), "is down"),
        ];
        for (space, words, said) in breaks {
            let place = if space.is_empty() { String::new() } else { format!("-n {space} ") };
            site.ip(&format!("{place}{words}"));
            let (code, text) = call(&site, "CHECK", "p1", &checked).error();
            assert!(code == 999 && text.contains(said), "{words}: {code} {text}");
        }
        site.ip(&format!("link del {host}"));
        let (_, text) = call(&site, "CHECK", "p1", &checked).error();
        assert!(text.contains("is missing on the host"), "{text}");
    });
}

#[test]
fn check_asks_the_ipam_plugin() {
    on_a_node(|site| {
        site.pod("p1");
        let result = call(&site, "ADD", "p1", &conf(&site, json!({}))).fine().json();
        for v6 in [false, true] {
            std::fs::remove_file(site.path("networks/cbr0").join(addr(&result, v6))).unwrap();
        }
        let (_, text) = call(&site, "CHECK", "p1", &conf(&site, json!({"prevResult": result}))).error();
        assert!(text.contains("id-p1"), "{text}");
    });
}

#[test]
fn results_have_the_form_of_their_version() {
    on_a_node(|site| {
        for (n, version) in ["0.2.0", "0.3.1", "0.4.0", "1.0.0"].into_iter().enumerate() {
            let pod = format!("p{n}");
            site.pod(&pod);
            let result = call(&site, "ADD", &pod, &conf(&site, json!({"cniVersion": version}))).fine().json();
            assert_eq!(result["cniVersion"], version);
            if version == "0.2.0" {
                assert_eq!(result["ip4"]["gateway"], "169.254.1.1", "{result}");
                assert_eq!(result["ip6"]["routes"], json!([{"dst": "::/0", "gw": "fe80::1"}]), "{result}");
            } else {
                let old = version.starts_with('0');
                assert_eq!(result["ips"][0].get("version").is_some(), old, "{result}");
                assert_eq!(result["ips"][1]["interface"], 1, "{result}");
            }
        }
    });
}

#[test]
fn what_cannot_be_done_is_said_and_leaves_nothing() {
    on_a_node(|site| {
        site.pod("p1");
        inside(&site, "p1", "link add eth0 type veth peer name other");
        let plain = conf(&site, json!({}));
        let mut no_ipam = plain.clone();
        no_ipam.as_object_mut().unwrap().remove("ipam");
        let mut full = plain.clone();
        full["ipam"]["ranges"] = json!([[{"subnet": "10.5.1.0/24", "rangeStart": "10.5.1.9", "rangeEnd": "10.5.1.9"}]]);
        let rows = [
            (plain.clone(), 999, "there is an interface eth0 in the pod already"),
            (no_ipam, 7, "`ipam` with a `type` is needed"),
            (conf(&site, json!({"mtu": "big"})), 7, "mtu"),
            (conf(&site, json!({"isDefaultGateway": "no"})), 7, "isDefaultGateway"),
            (conf(&site, json!({"runtimeConfig": {"mac": "01:00:00:00:00:00"}})), 7, "01:00:00:00:00:00"),
        ];
        let before = state(&site, &["p1"]);
        for (conf, code, said) in rows {
            let error = call(&site, "ADD", "p1", &conf).error();
            assert!(error.0 == code && error.1.contains(said), "{said}: {error:?}");
            assert_eq!(state(&site, &["p1"]), before, "{said}");
        }
        inside(&site, "p1", "link del eth0");
        site.pod("p2");
        call(&site, "ADD", "p1", &full).fine();
        let before = state(&site, &["p1", "p2"]);
        let (_, text) = call(&site, "ADD", "p2", &full).error();
        assert!(text.contains("no IP addresses available"), "host-local's own words: {text}");
        assert_eq!(state(&site, &["p1", "p2"]), before);
        let mut own = command(&site, "ADD", "p3", "eth0");
        own.env("CNI_NETNS", "/proc/self/ns/net");
        assert_eq!(run(own, &plain).error().0, 8, "the node's own namespace is refused");
    });
}
