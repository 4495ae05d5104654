// SPDX-License-Identifier: Apache-2.0
//! Verbs that are repeated, come in an unusual order, or get invalid input.

use std::fs;

use serde_json::{Value, json};

use crate::node::{addr, call, command, conf, inside, on_a_node, reaches, state};
use crate::site::{run, wait_for};

#[test]
fn a_second_add_changes_nothing_and_repairs_what_is_missing() {
    on_a_node(|site| {
        site.pod("p1");
        let conf = conf(&site, json!({}));
        let first = call(&site, "ADD", "p1", &conf).success().json();
        let before = state(&site, &["p1"]);
        for _ in 0..3 {
            assert_eq!(call(&site, "ADD", "p1", &conf).success().json(), first);
            assert_eq!(state(&site, &["p1"]), before);
        }
        // ADD restores what another program has removed, and changes nothing else.
        inside(&site, "p1", "neigh del 169.254.1.1 dev eth0");
        let host = first["interfaces"][0]["name"].as_str().unwrap();
        site.ip(&format!("link set {host} down"));
        assert_eq!(call(&site, "ADD", "p1", &conf).success().json(), first);
        let mut after = state(&site, &["p1"]);
        let mut before = before;
        after.sort();
        before.sort();
        assert_eq!(after, before);
        reaches(&site, "", &addr(&first, false));
    });
}

#[test]
fn del_removes_everything_at_any_time_and_can_be_repeated() {
    on_a_node(|site| {
        let conf = conf(&site, json!({}));
        let empty = state(&site, &[]);
        call(&site, "DEL", "p1", &conf).success();
        site.pod("p1");
        call(&site, "ADD", "p1", &conf).success();
        for _ in 0..2 {
            assert!(call(&site, "DEL", "p1", &conf).success().stdout.is_empty());
            assert_eq!(state(&site, &[]), empty);
        }
        wait_for("the pod to have only lo", || inside(&site, "p1", "-o link").lines().count() == 1);
        // If the namespace is deleted first, the pair is deleted with it, and DEL releases the address.
        call(&site, "ADD", "p1", &conf).success();
        site.ip("netns del p1");
        call(&site, "DEL", "p1", &conf).success();
        assert_eq!(state(&site, &[]), empty);
        let mut bare = command(&site, "DEL", "p1", "eth0");
        bare.env_remove("CNI_NETNS");
        run(bare, &conf).success();
    });
}

#[test]
fn check_names_each_difference() {
    on_a_node(|site| {
        site.pod("p1");
        let plain = conf(&site, json!({}));
        let result = call(&site, "ADD", "p1", &plain).success().json();
        let checked = conf(&site, json!({"prevResult": result}));
        let (v4, host) = (addr(&result, false), result["interfaces"][0]["name"].as_str().unwrap());
        call(&site, "CHECK", "p1", &checked).success();
        let (code, text) = call(&site, "CHECK", "p1", &plain).error();
        assert!(code == 7 && text.contains("prevResult"), "{code} {text}");
        let breaks: [(&str, String, &str); 7] = [
            ("", format!("route del {v4} dev {host}"), "the host's route to"),
            ("", format!("neigh del {v4} dev {host}"), "the host's neighbour"),
            ("p1", "route del default".to_owned(), "default route via 169.254.1.1"),
            ("p1", "neigh del fe80::1 dev eth0".to_owned(), "the pod's neighbour fe80::1"),
            ("p1", format!("addr del {v4}/32 dev eth0"), "does not have the address"),
            ("", format!("link set {host} mtu 1280"), "has MTU 1280, not 1450"),
            ("", format!("link set {host} down"), "is down"),
        ];
        for (space, words, expected) in breaks {
            let in_netns = if space.is_empty() { String::new() } else { format!("-n {space} ") };
            site.ip(&format!("{in_netns}{words}"));
            let (code, text) = call(&site, "CHECK", "p1", &checked).error();
            assert!(code == 999 && text.contains(expected), "{words}: {code} {text}");
        }
        site.ip(&format!("link del {host}"));
        let (_, text) = call(&site, "CHECK", "p1", &checked).error();
        assert!(text.contains("is missing on the host"), "{text}");
    });
}

#[test]
fn check_compares_macs_and_both_ends_and_accepts_no_neighbour_that_expires() {
    on_a_node(|site| {
        site.pod("p1");
        let plain = conf(&site, json!({}));
        let result = call(&site, "ADD", "p1", &plain).success().json();
        let checked = conf(&site, json!({"prevResult": result}));
        let (v4, ends) = (addr(&result, false), &result["interfaces"]);
        let [host, host_mac, pod_mac] =
            [&ends[0]["name"], &ends[0]["mac"], &ends[1]["mac"]].map(|value| value.as_str().unwrap());
        let of_pod = format!("neigh replace {v4} dev {host} lladdr");
        let of_host = "-n p1 neigh replace 169.254.1.1 dev eth0 lladdr";
        let strange = "02:00:00:00:00:99";
        for (wrong, right, expected) in [
            (format!("{of_pod} {strange} nud permanent"), None, "the host's neighbour"),
            (format!("{of_pod} {pod_mac} nud reachable"), None, "the host's neighbour"),
            (format!("{of_host} {strange} nud permanent"), None, "the pod's neighbour 169.254.1.1"),
            (format!("{of_host} {host_mac} nud reachable"), None, "the pod's neighbour 169.254.1.1"),
            (
                format!("link set {host} address {strange}"),
                Some(format!("link set {host} address {host_mac}")),
                "does not have the MAC address",
            ),
            (
                format!("-n p1 link set eth0 address {strange}"),
                Some(format!("-n p1 link set eth0 address {pod_mac}")),
                "eth0 does not have the MAC address",
            ),
        ] {
            site.ip(&wrong);
            let (code, text) = call(&site, "CHECK", "p1", &checked).error();
            assert!(code == 999 && text.contains(expected), "{wrong}: {code} {text}");
            // With the MAC, the kernel has removed the neighbours of the link. ADD restores them.
            right.into_iter().for_each(|right| drop(site.ip(&right)));
            call(&site, "ADD", "p1", &plain).success();
            call(&site, "CHECK", "p1", &checked).success();
        }
        site.ip(&format!("link del {host}"));
        wait_for("the pod's end to disappear", || !inside(&site, "p1", "-o link").contains("eth0"));
        site.ip(&format!("link add {host} type veth peer name stray0"));
        inside(&site, "p1", "link add eth0 type veth peer name stray1");
        let (_, text) = call(&site, "CHECK", "p1", &checked).error();
        assert!(text.contains("are not the two ends of one pair"), "{text}");
    });
}

#[test]
fn check_calls_the_ipam_plugin() {
    on_a_node(|site| {
        site.pod("p1");
        let result = call(&site, "ADD", "p1", &conf(&site, json!({}))).success().json();
        for v6 in [false, true] {
            std::fs::remove_file(site.path("networks/cbr0").join(addr(&result, v6))).unwrap();
        }
        let (_, text) = call(&site, "CHECK", "p1", &conf(&site, json!({"prevResult": result}))).error();
        assert!(text.contains("id-p1"), "{text}");
    });
}

#[test]
fn results_have_the_format_of_the_requested_version() {
    on_a_node(|site| {
        for (n, version) in ["0.2.0", "0.3.1", "0.4.0", "1.0.0"].into_iter().enumerate() {
            let pod = format!("p{n}");
            site.pod(&pod);
            let result = call(&site, "ADD", &pod, &conf(&site, json!({"cniVersion": version}))).success().json();
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
fn a_refused_add_names_the_reason_and_changes_nothing() {
    on_a_node(|site| {
        site.pod("p1");
        inside(&site, "p1", "link add eth0 type veth peer name other");
        let plain = conf(&site, json!({}));
        let mut no_ipam = plain.clone();
        no_ipam.as_object_mut().unwrap().remove("ipam");
        let mut full = plain.clone();
        full["ipam"]["ranges"] = json!([[{"subnet": "10.5.1.0/24", "rangeStart": "10.5.1.9", "rangeEnd": "10.5.1.9"}]]);
        let rows = [
            (plain.clone(), 999, "the pod already has an interface eth0"),
            (no_ipam, 7, "`ipam` with a `type` is needed"),
            (conf(&site, json!({"mtu": "big"})), 7, "mtu"),
            (conf(&site, json!({"isDefaultGateway": "no"})), 7, "isDefaultGateway"),
            (conf(&site, json!({"runtimeConfig": {"mac": "01:00:00:00:00:00"}})), 7, "01:00:00:00:00:00"),
        ];
        let before = state(&site, &["p1"]);
        for (conf, code, expected) in rows {
            let error = call(&site, "ADD", "p1", &conf).error();
            assert!(error.0 == code && error.1.contains(expected), "{expected}: {error:?}");
            assert_eq!(state(&site, &["p1"]), before, "{expected}");
        }
        inside(&site, "p1", "link del eth0");
        site.pod("p2");
        call(&site, "ADD", "p1", &full).success();
        let before = state(&site, &["p1", "p2"]);
        let (_, text) = call(&site, "ADD", "p2", &full).error();
        assert!(text.contains("no IP addresses available"), "the error must be host-local's own: {text}");
        assert_eq!(state(&site, &["p1", "p2"]), before);
        let mut own = command(&site, "ADD", "p3", "eth0");
        own.env("CNI_NETNS", "/proc/self/ns/net");
        assert_eq!(run(own, &plain).error().0, 8, "the node's own namespace must be refused");
    });
}

/// Another plugin may have connected the pod before the configuration was changed, and the runtime calls ADD again.
#[test]
fn a_refused_add_keeps_the_address_that_an_earlier_one_has_reserved() {
    on_a_node(|site| {
        site.pod("p1");
        inside(&site, "p1", "link add eth0 type veth peer name other");
        fs::create_dir_all(site.path("networks/cbr0")).unwrap();
        fs::write(site.path("networks/cbr0/10.5.1.7"), "id-p1\r\neth0").unwrap();
        let (_, text) = call(&site, "ADD", "p1", &conf(&site, json!({}))).error();
        assert!(text.contains("the pod already has an interface eth0"), "{text}");
        assert_eq!(site.addresses(), ["10.5.1.7"]);
    });
}

/// The three members that ADD may refuse and that neither DEL nor GC needs.
fn wrong_members() -> [Value; 3] {
    [json!({"mtu": 70000}), json!({"isDefaultGateway": "true"}), json!({"mac": "01:00:5e:00:00:01"})]
}

#[test]
fn an_add_that_is_refused_for_its_configuration_leaves_no_record() {
    on_a_node(|site| {
        site.pod("p1");
        let with = |delegate: &Value| {
            let mut conf = site.conf(json!({"delegate": delegate}));
            conf["delegate"]["type"] = json!("weft-veth");
            conf
        };
        let empty = state(&site, &["p1"]);
        for wrong in wrong_members() {
            assert_eq!(site.call("ADD", "p1", &with(&wrong)).error().0, 7, "{wrong}");
            assert_eq!(site.files("records"), Vec::<String>::new(), "{wrong}");
            site.call("DEL", "p1", &with(&wrong)).success();
            call(&site, "ADD", "p1", &conf(&site, wrong.clone())).error();
            call(&site, "DEL", "p1", &conf(&site, wrong.clone())).success();
            // The kernel removes the pod's end of the pair asynchronously.
            wait_for(&format!("nothing to be left, {wrong}"), || state(&site, &["p1"]) == empty);
        }
        let mut no_ipam = with(&json!({}));
        no_ipam["ipam"]["type"] = json!("nosuch");
        let (code, text) = site.call("ADD", "p1", &no_ipam).error();
        assert!(code == 999 && text.contains("nosuch"), "{code} {text}");
        assert_eq!(site.files("records"), Vec::<String>::new());
    });
}

/// Such a record is from a version that wrote it before it looked at the configuration.
#[test]
fn a_record_with_a_wrong_configuration_is_removed_by_del_and_gc() {
    on_a_node(|site| {
        site.pod("p1");
        let conf = site.conf(json!({"delegate": {"type": "weft-veth"}}));
        let empty = state(&site, &["p1"]);
        for wrong in wrong_members() {
            for verb in ["DEL", "GC"] {
                site.call("ADD", "p1", &conf).success();
                let file = site.path("records/id-p1");
                let mut record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
                for (key, value) in wrong.as_object().unwrap() {
                    record[key] = value.clone();
                }
                fs::write(&file, record.to_string()).unwrap();
                if verb == "DEL" {
                    site.call("DEL", "p1", &conf).success();
                } else {
                    // Debian's host-local refuses version 1.1.0, so this GC is incomplete. The record goes nevertheless.
                    let mut gc = conf.clone();
                    gc["cniVersion"] = json!("1.1.0");
                    gc["cni.dev/valid-attachments"] = json!([]);
                    gc["delegate"] = wrong.clone();
                    gc["delegate"]["type"] = json!("weft-veth");
                    let (_, text) = site.call("GC", "", &gc).error();
                    assert!(text.contains("GC of the IPAM plugin") && !text.contains("id-p1"), "{wrong}: {text}");
                }
                assert_eq!(site.files("records"), Vec::<String>::new(), "{verb} {wrong}");
                wait_for(&format!("nothing to be left, {verb} {wrong}"), || state(&site, &["p1"]) == empty);
            }
        }
    });
}

#[test]
fn an_add_touches_no_link_of_another_attachment() {
    on_a_node(|site| {
        site.pod("p1");
        let plain = conf(&site, json!({}));
        let result = call(&site, "ADD", "p1", &plain).success().json();
        let host = result["interfaces"][0]["name"].as_str().unwrap();
        site.ip(&format!("link set {host} alias somebody"));
        let before = state(&site, &["p1"]);
        let (code, text) = call(&site, "ADD", "p1", &plain).error();
        assert!(code == 999 && text.contains("does not belong to this pod"), "{code} {text}");
        assert_eq!(state(&site, &["p1"]), before);
    });
}

/// The pair that the alias names has its other end elsewhere. It is removed, and the interface of somebody else stays as it is.
#[test]
fn an_add_does_not_take_over_an_interface_that_is_not_the_other_end() {
    on_a_node(|site| {
        site.pod("p1");
        let plain = conf(&site, json!({}));
        call(&site, "ADD", "p1", &plain).success();
        for words in ["link set eth0 down", "link set eth0 name old0", "link add eth0 type veth peer name stray0"] {
            inside(&site, "p1", words);
        }
        let (_, text) = call(&site, "ADD", "p1", &plain).error();
        assert!(text.contains("the pod already has an interface eth0"), "{text}");
        assert_eq!(site.veths(), 0, "the pair is removed");
        assert_eq!(inside(&site, "p1", "-o addr show dev eth0"), "");
    });
}

/// It may be running.
#[test]
fn a_pod_that_an_earlier_add_has_connected_keeps_its_network_when_the_next_one_fails() {
    on_a_node(|site| {
        site.pod("p1");
        let plain = conf(&site, json!({}));
        call(&site, "ADD", "p1", &plain).success();
        for words in ["route del default", "link set lo up", "route add default dev lo"] {
            inside(&site, "p1", words);
        }
        let before = state(&site, &["p1"]);
        let (_, text) = call(&site, "ADD", "p1", &plain).error();
        assert!(text.contains("the pod has a route to 0.0.0.0/0 over another interface"), "{text}");
        assert_eq!(state(&site, &["p1"]), before);
    });
}

/// Another plugin of the list may have added an interface with an address of its own.
#[test]
fn check_compares_the_addresses_of_its_own_interface_alone() {
    on_a_node(|site| {
        site.pod("p1");
        let mut result = call(&site, "ADD", "p1", &conf(&site, json!({}))).success().json();
        let other = json!({"name": "net1", "mac": "02:00:00:00:00:99", "sandbox": "/run/netns/p1"});
        result["interfaces"].as_array_mut().unwrap().push(other);
        // The host's end has the name of no interface of the pod.
        for (interface, address) in [(2, "10.77.1.9/32"), (0, "10.77.1.8/32")] {
            let ips = result["ips"].as_array_mut().unwrap();
            ips.push(json!({"address": address, "interface": interface}));
        }
        call(&site, "CHECK", "p1", &conf(&site, json!({"prevResult": result}))).success();
    });
}

/// host-local refuses a second reservation for one interface. The first one is of a call that was killed.
#[test]
fn an_add_succeeds_although_a_killed_one_has_reserved_an_address() {
    on_a_node(|site| {
        site.pod("p1");
        fs::create_dir_all(site.path("networks/cbr0")).unwrap();
        fs::write(site.path("networks/cbr0/10.5.1.7"), "id-p1\r\neth0").unwrap();
        let result = call(&site, "ADD", "p1", &conf(&site, json!({}))).success().json();
        assert_eq!(site.addresses(), [addr(&result, false), addr(&result, true)], "the first one is released");
        reaches(&site, "", &addr(&result, false));
    });
}

/// The DEL of that pod never came, and host-local has given the address to another one.
#[test]
fn an_add_replaces_a_route_that_an_earlier_pod_left_on_the_host() {
    on_a_node(|site| {
        for words in ["link add old0 type bridge", "link set old0 up", "route add 10.5.1.2/32 dev old0"] {
            site.ip(words);
        }
        site.pod("p1");
        let result = call(&site, "ADD", "p1", &conf(&site, json!({}))).success().json();
        assert_eq!(addr(&result, false), "10.5.1.2");
        let routes = site.ip("route show 10.5.1.2");
        assert!(routes.contains("vethw") && !routes.contains("old0"), "{routes}");
        reaches(&site, "", "10.5.1.2");
    });
}

/// A host that forwards IPv6 packets takes no more router advertisements, and may lose its default route.
#[test]
fn a_pod_without_ipv6_does_not_turn_on_forwarding_of_ipv6() {
    on_a_node(|site| {
        site.pod("p1");
        let mut v4 = conf(&site, json!({}));
        v4["ipam"]["ranges"] = json!([[{"subnet": "10.5.1.0/24"}]]);
        call(&site, "ADD", "p1", &v4).success();
        let read = |file: &str| fs::read_to_string(format!("/proc/sys/net/{file}")).unwrap().trim().to_owned();
        assert_eq!(["ipv4/ip_forward", "ipv6/conf/all/forwarding"].map(read), ["1", "0"]);
    });
}

#[test]
fn del_of_one_interface_keeps_the_addresses_of_the_other() {
    on_a_node(|site| {
        site.pod("p1");
        let first = conf(&site, json!({}));
        let result = call(&site, "ADD", "p1", &first).success().json();
        let before = site.addresses();
        let mut second = conf(&site, json!({"isDefaultGateway": false}));
        second["ipam"]["routes"] = json!([]);
        run(command(&site, "ADD", "p1", "net1"), &second).success();
        assert_eq!(site.addresses().len(), 4, "{:?}", site.addresses());
        run(command(&site, "DEL", "p1", "net1"), &second).success();
        assert_eq!(site.addresses(), before);
        call(&site, "CHECK", "p1", &conf(&site, json!({"prevResult": result}))).success();
        reaches(&site, "", &addr(&result, false));
    });
}
