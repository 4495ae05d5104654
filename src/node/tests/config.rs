// SPDX-License-Identifier: Apache-2.0
//! Another net-conf while the agent runs.

use tokio::time::Instant;
use weft_subnet::cidr::Family;
use weft_subnet::source::Event;

use super::{CONFIG, TestNode, lease, local, removed, stored};
use crate::options::{OnLostLease, RuleOptions};
use crate::pass::Cause;
use crate::probe::Target;

#[tokio::test]
async fn names_without_an_effect_are_a_remark_of_the_status() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let remarks = test.node.status().remarks;
        let text = r#"{"Network":"10.5.0.0/16","SubnetLength":24,"Backend":{"Type":"host-gw","Directrouting":true}}"#;
        test.node.store_changed(vec![Event::Config(text.to_owned())]).await;
        assert_eq!((&test.node.net_conf.not_applied, test.node.net_conf.text.as_str()), (&None, text));
        let added = "net-conf: these names have no effect, check their spelling: SubnetLength, Backend.Directrouting";
        assert_eq!(test.node.status().remarks, [remarks.clone(), vec![added.to_owned()]].concat());
        test.node.store_changed(vec![Event::Config(CONFIG.to_owned())]).await;
        assert_eq!(test.node.status().remarks, remarks);
    })
    .await;
}

#[tokio::test]
async fn net_conf_keys_that_need_a_restart_are_named() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let rows = [
            (r#"{"Network":"10.5.0.0/16","EnableNFTables":true,"Backend":{"Type":"vxlan"}}"#, "EnableNFTables"),
            (
                r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48","EnableNFTables":true,
                    "SubnetMax":"10.5.9.0","Backend":{"Type":"host-gw"}}"#,
                "EnableIPv6, EnableNFTables",
            ),
            (
                r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48","Backend":{"Type":"host-gw"}}"#,
                "EnableIPv4, EnableIPv6",
            ),
        ];
        for (text, keys) in rows {
            test.node.store_changed(vec![Event::Config(text.to_owned())]).await;
            let wanted = format!("net-conf: restart the agent to apply the change of {keys}");
            assert_eq!(test.node.net_conf.not_applied, Some(wanted), "{text}");
        }
        // The problem ends when the change is taken back. A change of another key needs no restart.
        test.node.store_changed(vec![Event::Config(CONFIG.to_owned())]).await;
        assert_eq!(test.node.net_conf.not_applied, None);
        let text = r#"{"Network":"10.5.0.0/16","SubnetMax":"10.5.9.0","Backend":{"Type":"host-gw"}}"#;
        test.node.store_changed(vec![Event::Config(text.to_owned())]).await;
        assert_eq!((&test.node.net_conf.not_applied, test.node.net_conf.text.as_str()), (&None, text));
    })
    .await;
}

/// The restart that applies `EnableNFTables` may find another backend in net-conf, too. It begins with that of our lease, and with what
/// only a start can apply.
#[tokio::test]
async fn a_start_that_changes_the_backend_asks_for_no_other_restart() {
    local(async {
        let next = CONFIG.replace("host-gw", "ipip").replacen('{', r#"{"EnableNFTables":true,"#, 1);
        let started = |wanted: Option<String>| {
            let own = lease("10.5.1.0-24", "192.168.0.1");
            TestNode::altered((CONFIG, own), OnLostLease::Hold, RuleOptions::default(), |started| {
                (started.net_conf.nftables, started.wanted) = (Some(true), wanted);
            })
        };
        let list = || Event::Snapshot { records: vec![stored("10.5.1.0-24", "192.168.0.1")], reset: false };
        let mut test = started(Some(next.clone()));
        test.node.start(vec![list()]).await;
        assert_eq!((&test.node.net_conf.not_applied, &test.node.net_conf.text), (&None, &next));
        // Net-conf is changed back, and the packet filter is still the other one.
        let mut test = started(None);
        test.node.start(vec![list(), Event::Config(CONFIG.to_owned())]).await;
        let wanted = "net-conf: restart the agent to apply the change of EnableNFTables";
        assert_eq!(test.node.net_conf.not_applied.as_deref(), Some(wanted));
    })
    .await;
}

#[tokio::test]
async fn a_network_that_contains_every_lease_is_followed_and_another_is_refused() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        for network in ["10.6.0.0/16", "10.5.0.0/23"] {
            let text = format!(r#"{{"Network":"{network}","SubnetLen":26,"Backend":{{"Type":"host-gw"}}}}"#);
            test.node.store_changed(vec![Event::Config(text)]).await;
            let problem = test.node.net_conf.not_applied.clone().unwrap();
            let (first, count) = if network == "10.6.0.0/16" { ("10.5.1.0-24", 2) } else { ("10.5.2.0-24", 1) };
            let wanted = format!(
                "net-conf: {count} leases are not inside the new Network, the first is {first}: choose a Network"
            );
            assert!(problem.starts_with(&wanted), "{problem}");
        }
        let text = r#"{"Network":"10.0.0.0/8","Backend":{"Type":"host-gw"}}"#;
        test.node.store_changed(vec![Event::Config(text.to_owned())]).await;
        assert_eq!(test.node.net_conf.not_applied, None);
        let env = std::fs::read_to_string(&test.file).unwrap();
        assert!(env.contains("FLANNEL_NETWORK=10.0.0.0/8\n"), "{env}");
        assert_eq!(test.via("10.5.2.0/24"), "192.168.0.2".parse().ok());
    })
    .await;
}

#[tokio::test]
async fn a_refused_network_is_followed_when_the_leases_outside_of_it_are_gone() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let text = r#"{"Network":"10.5.0.0/23","SubnetLen":26,"Backend":{"Type":"host-gw"}}"#;
        test.node.store_changed(vec![Event::Config(text.to_owned())]).await;
        let refused = test.node.net_conf.not_applied.clone().unwrap();
        // The next audit finds the lease still there.
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(test.node.net_conf.not_applied, Some(refused));
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.2.0-24")])]).await;
        test.node.schedule.next_audit = Instant::now();
        test.node.tick().await;
        assert_eq!((&test.node.net_conf.not_applied, test.node.net_conf.text.as_str()), (&None, text));
        // The pass with the new Network follows at once.
        test.node.tick().await;
        let env = std::fs::read_to_string(&test.file).unwrap();
        assert!(env.contains("FLANNEL_NETWORK=10.5.0.0/23\n"), "{env}");
    })
    .await;
}

#[tokio::test]
async fn an_option_that_needs_the_device_anew_is_refused_with_the_way() {
    local(async {
        let own = super::lease("10.5.1.0-24", "192.168.0.1");
        let mut test = TestNode::of_vxlan(own, OnLostLease::Hold);
        test.node.full_pass(Cause::Start).await;
        let conf = |options: &str| format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"vxlan"{options}}}}}"#);
        test.node.store_changed(vec![Event::Config(conf(r#","Port":4789"#))]).await;
        let problem = test.node.net_conf.not_applied.clone().unwrap();
        assert!(
            problem.contains("the change of Backend.Port cannot be applied while packets go through flannel.1"),
            "{problem}"
        );
        assert!(problem.contains("change Backend.VNI in the same step"), "{problem}");
        for options in [r#","MTU":1400"#, r#","DirectRouting":true"#, r#","Port":4789,"VNI":7"#] {
            test.node.store_changed(vec![Event::Config(conf(options))]).await;
            assert_eq!(test.node.net_conf.not_applied, None, "{options}");
        }
    })
    .await;
}

/// 1354 bytes are 1404 on the link, whether the uplink or `Backend.MTU` is what the MTU is computed from.
#[tokio::test]
async fn the_remedy_for_a_small_link_names_what_limits_the_mtu() {
    local(async {
        for (option, wanted) in [
            ("", "or set the MTU of the uplink eth0 to 1404 on every node"),
            (r#","MTU":1450"#, "or set Backend.MTU in net-conf to 1404"),
            (r#","MTU":9000"#, "or set the MTU of the uplink eth0 to 1404 on every node"),
        ] {
            let own = super::lease("10.5.1.0-24", "192.168.0.1");
            let conf = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"vxlan"{option}}}}}"#);
            let test = TestNode::of((&conf, own), OnLostLease::Hold, RuleOptions::default());
            let (peer, address) = (super::lease("10.5.2.0-24", "192.168.0.2"), "10.5.2.0".parse().unwrap());
            let mtu = u16::try_from(test.node.plan.mtu()).unwrap();
            let target = Target { place: 0, family: Family::V4, tag: 1, address, published: None, mtu };
            let reason = test.node.unreachable_reason(&peer, &target, crate::probe::cause::Cause::Mtu(1354));
            assert!(reason.ends_with(wanted), "{option}: {reason}");
        }
    })
    .await;
}

/// The agent runs no commands that its start did not read, and nothing would end those that it has run.
#[tokio::test]
async fn commands_in_net_conf_need_a_restart() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let commands = r#""Shell":true,"PostStartupCommand":"true""#;
        let text = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"extension",{commands}}}}}"#);
        test.node.store_changed(vec![Event::Config(text)]).await;
        let problem = test.node.net_conf.not_applied.clone().unwrap_or_default();
        assert!(problem.contains("the commands of the backend extension begin and end with the agent"), "{problem}");
        assert!(test.asked(0).await && !test.node.plan.is_changing(), "the node stays on host-gw");
    })
    .await;
}
