// SPDX-License-Identifier: Apache-2.0
//! The plugin repairs a cni0 that was created for another subnet or MTU.

use serde_json::json;

use crate::site::{V4_TEXT, env_text, on_a_node};

#[test]
fn a_bridge_without_pods_gets_the_new_subnet_and_mtu() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        site.pod("p1");
        site.call("ADD", "p1", &conf).success();
        site.call("DEL", "p1", &conf).success();
        assert!(site.ip("addr show cni0").contains("10.5.1.1/24"), "the bridge plugin must leave the bridge");
        let answer = site.call("ADD", "p1", &conf).success();
        assert!(!answer.stderr.contains("removed"), "these are the addresses of this subnet: {}", answer.stderr);
        site.call("DEL", "p1", &conf).success();
        site.subnet_env(&env_text("10.5.2", "fd05:0:0:2", 1400));
        let answer = site.call("ADD", "p1", &conf).success();
        assert!(answer.stderr.contains("cni0: removed the address 10.5.1.1/24"), "{}", answer.stderr);
        assert!(answer.stderr.contains(" to 1400; no pod is connected"), "{}", answer.stderr);
        let shown = site.ip("addr show cni0");
        for wanted in ["10.5.2.1/24", "fd05:0:0:2::1/64", "mtu 1400"] {
            assert!(shown.contains(wanted), "{wanted}: {shown}");
        }
        for gone in ["10.5.1.1", "fd05:0:0:1::1"] {
            assert!(!shown.contains(gone), "{gone}: {shown}");
        }
        site.call("DEL", "p1", &conf).success();
        site.nothing_left();
    });
}

#[test]
fn a_bridge_with_pods_is_not_changed_and_the_error_names_the_remedy() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        site.pod("p1");
        site.call("ADD", "p1", &conf).success();
        site.pod("p2");
        site.subnet_env(&env_text("10.5.1", "fd05:0:0:1", 1400));
        let answer = site.call("ADD", "p2", &conf).success();
        assert!(answer.stderr.contains("run: ip link set cni0 mtu 1400"), "{}", answer.stderr);
        site.call("DEL", "p2", &conf).success();
        // The bridge may have an IPv6 address of an old subnet beside the new one, so this keeps no pod from being added.
        site.subnet_env(&env_text("10.5.1", "fd05:0:0:2", 1400));
        site.call("ADD", "p2", &conf).success();
        assert!(site.ip("addr show cni0").contains("fd05:0:0:1::1/64"), "p1 still needs it");
        site.call("DEL", "p2", &conf).success();
        site.subnet_env(&env_text("10.5.2", "fd05:0:0:2", 1400));
        let (code, text) = site.call("ADD", "p2", &conf).error();
        let wanted = "cni0 has 10.5.1.1/24, this node's subnet is 10.5.2.0/24,fd05:0:0:2::/64 now, and 1 pods are still connected";
        assert!(code == 999 && text.contains(wanted), "{code} {text}");
        assert!(site.ip("addr show cni0").contains("10.5.1.1/24"));
        site.call("DEL", "p1", &conf).success();
        site.call("ADD", "p2", &conf).success();
        site.call("DEL", "p2", &conf).success();
        site.nothing_left();
    });
}

/// Somebody may give the bridge another address, such as one for a DNS cache of the node. The bridge plugin accepts it beside the gateway.
#[test]
fn an_address_that_somebody_added_stays_and_keeps_no_pod_from_being_added() {
    on_a_node(|site| {
        let conf = site.conf(json!({}));
        site.pod("p1");
        site.pod("p2");
        site.call("ADD", "p1", &conf).success();
        site.call("DEL", "p1", &conf).success();
        // The last one is inside the cluster's network, and is not an address of an earlier subnet either.
        let others = ["169.254.20.10/32", "fd99::53/128", "10.5.9.9/32"];
        for other in others {
            site.ip(&format!("addr add {other} dev cni0"));
        }
        let assert_they_stay = |when: &str| {
            let shown = site.ip("addr show cni0");
            for addr in others.into_iter().chain(["10.5.1.1/24", "fd05:0:0:1::1/64"]) {
                assert!(shown.contains(addr), "{when}: {addr}: {shown}");
            }
        };
        for pod in ["p1", "p2"] {
            site.call("ADD", pod, &conf).success();
            assert_they_stay(pod);
        }
        site.call("DEL", "p1", &conf).success();
        site.call("DEL", "p2", &conf).success();
        // With another subnet and another Network, the old gateways go, and nothing else outside the new Network.
        site.ip("addr del 10.5.9.9/32 dev cni0");
        site.subnet_env(
            &env_text("10.6.2", "fd06:0:0:2", 1450).replace("10.5.0.0", "10.6.0.0").replace("fd05::", "fd06::"),
        );
        site.call("ADD", "p1", &conf).error();
        let shown = site.ip("addr show cni0");
        assert!(shown.contains("169.254.20.10/32") && shown.contains("fd99::53/128"), "{shown}");
        assert!(!shown.contains("10.5.1.1") && !shown.contains("fd05:0:0:1::1"), "{shown}");
        // The bridge plugin does not give the bridge its gateway beside another IPv4 address.
        site.ip("addr del 169.254.20.10/32 dev cni0");
        site.call("ADD", "p1", &conf).success();
        let shown = site.ip("addr show cni0");
        assert!(shown.contains("10.6.2.1/24") && shown.contains("fd99::53/128"), "{shown}");
        site.call("DEL", "p1", &conf).success();
        site.nothing_left();
    });
}

/// Whoever gave the bridge its addresses knows why.
#[test]
fn a_bridge_that_is_no_gateway_keeps_its_addresses() {
    on_a_node(|site| {
        site.subnet_env(V4_TEXT);
        let conf = site.conf(json!({"delegate": {"isGateway": false}}));
        site.pod("p1");
        site.call("ADD", "p1", &conf).success();
        site.call("DEL", "p1", &conf).success();
        // It looks like the gateway of an earlier subnet.
        site.ip("addr add 10.5.9.1/24 dev cni0");
        let answer = site.call("ADD", "p1", &conf).success();
        assert!(site.ip("addr show cni0").contains("10.5.9.1/24"), "{}", answer.stderr);
        site.call("DEL", "p1", &conf).success();
        site.nothing_left();
    });
}

/// host-local chooses the first address of the subnet as gateway. Another IPAM plugin may choose any.
#[test]
fn the_gateway_of_another_ipam_plugin_does_not_count_as_old() {
    on_a_node(|site| {
        site.subnet_env(V4_TEXT);
        let with = |last: u8| {
            let address = json!({"address": format!("10.5.1.{last}/24"), "gateway": "10.5.1.254"});
            site.conf(json!({"ipam": {"type": "static", "addresses": [address]}}))
        };
        for (pod, last) in [("p1", 9), ("p2", 10)] {
            site.pod(pod);
            site.call("ADD", pod, &with(last)).success();
            assert!(site.ip("addr show cni0").contains("10.5.1.254/24"), "{pod}");
        }
        for (pod, last) in [("p1", 9), ("p2", 10)] {
            site.call("DEL", pod, &with(last)).success();
        }
        site.nothing_left();
    });
}

/// So no pod is refused, although others are connected.
#[test]
fn the_bridge_plugin_replaces_the_address_itself_if_it_is_told_to() {
    on_a_node(|site| {
        let conf = site.conf(json!({"delegate": {"forceAddress": true}}));
        site.pod("p1");
        site.call("ADD", "p1", &conf).success();
        site.subnet_env(&env_text("10.5.2", "fd05:0:0:2", 1450));
        site.pod("p2");
        site.call("ADD", "p2", &conf).success();
        let shown = site.ip("addr show cni0");
        assert!(shown.contains("10.5.2.1/24") && !shown.contains("10.5.1.1/24"), "{shown}");
        for pod in ["p1", "p2"] {
            site.call("DEL", pod, &conf).success();
        }
        site.nothing_left();
    });
}
