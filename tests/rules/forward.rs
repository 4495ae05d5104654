// SPDX-License-Identifier: Apache-2.0
//! Chain FORWARD of iptables drops packets: Docker sets such a policy, and some distributions end the chain with a REJECT. Pods still
//! reach each other and the outside.

use nix::sys::signal::Signal;
use weft_lab::{BackendKind, wait_for};

use crate::flanneld::flanneld;
use crate::packets::{Seen, any, exchange, socket};
use crate::site::{Family, PATIENCE, Site, on_this_thread, straight};

/// Returns the command that sets the policy DROP in this flavour.
fn policy(flavour: &str) -> String {
    ["", "6"].map(|six| format!("ip{six}tables-{flavour} -w 20 -P FORWARD DROP")).join("; ")
}

/// Returns the command that adds the last rule of RHEL's iptables service, in this flavour.
fn reject(flavour: &str) -> String {
    ["", "6"].map(|six| format!("ip{six}tables-{flavour} -w 20 -A FORWARD -j REJECT")).join("; ")
}

fn pods_get_through(site: &Site) {
    for family in Family::BOTH {
        for (from, to, expected) in [("n1-p1", "n2-p1", "n1-p1"), ("n1-p1", "out", "n1"), ("n2-p2", "n1-p2", "n2-p2")] {
            site.until_seen(&straight(from, to), family, expected);
        }
    }
}

/// The chain drops packets before the agents start.
fn before(script: String, flags: &'static [&'static str]) {
    on_this_thread(async move {
        let mut site = Site::build(BackendKind::Vxlan, flags).await;
        site.on_nodes(&script).await;
        site.start().await;
        pods_get_through(&site);
    });
}

#[test]
fn policy_of_nft_flavour() {
    before(policy("nft"), &["--ip-masq"]);
}

#[test]
fn policy_of_legacy_flavour() {
    before(policy("legacy"), &["--ip-masq"]);
}

#[test]
fn reject_of_nft_flavour() {
    before(reject("nft"), &["--ip-masq"]);
}

#[test]
fn reject_of_legacy_flavour() {
    before(reject("legacy"), &["--ip-masq"]);
}

/// kubelet uses one flavour, Docker the other.
#[test]
fn policy_of_the_other_flavour() {
    before(format!("iptables-nft -w 20 -t mangle -N KUBE-IPTABLES-HINT; {}", policy("legacy")), &["--ip-masq"]);
}

#[test]
fn policy_under_nftables() {
    before(policy("nft"), &["--ip-masq", "--firewall=nft"]);
}

#[test]
fn reject_under_nftables() {
    before(reject("nft"), &["--ip-masq", "--firewall=nft"]);
}

/// Packets that a rule of FORWARD drops (a network policy) stay dropped, although our rules accept those that the policy of the chain
/// would drop.
fn rules_of_other_programs_stay_effective(firewall: &'static str) {
    on_this_thread(async move {
        let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq", firewall]).await;
        let rules = ["", "6"].map(|six| {
            format!("ip{six}tables-nft -w 20 -P FORWARD DROP; ip{six}tables-nft -w 20 -A FORWARD -p udp --dport 7099 -j DROP")
        });
        site.on_nodes(&rules.join("; ")).await;
        site.start().await;
        pods_get_through(&site);
        for family in Family::BOTH {
            let addr = site.addr("n2-p1", family);
            let (server, client) = (socket("n2-p1", addr, 7099), socket("n1-p1", any(addr), 0));
            assert_eq!(exchange(&client, (addr, 7099).into(), &server), Seen::Lost, "{family:?}");
        }
    });
}

#[test]
fn rules_of_other_programs_stay_effective_under_nftables() {
    rules_of_other_programs_stay_effective("--firewall=nft");
}

#[test]
fn rules_of_other_programs_stay_effective_under_iptables() {
    rules_of_other_programs_stay_effective("--firewall=iptables");
}

/// A person cuts a node off with a first rule in FORWARD, while the agent runs. It stays cut off, and the agent reports this.
fn a_node_that_was_cut_off_stays_cut_off(firewall: &'static str) {
    on_this_thread(async move {
        let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq", "--iptables-resync=1", firewall]).await;
        site.on_nodes(&policy("nft")).await;
        site.start().await;
        pods_get_through(&site);
        site.on_nodes(&["", "6"].map(|six| format!("ip{six}tables-nft -w 20 -I FORWARD -j DROP")).join("; ")).await;
        reports(&site, "ip6tables-nft -S FORWARD").await;
        for family in Family::BOTH {
            assert_eq!(site.probe(&straight("n1-p1", "n2-p1"), family), "lost");
        }
        site.on_nodes(&["", "6"].map(|six| format!("ip{six}tables-nft -w 20 -D FORWARD 1")).join("; ")).await;
        pods_get_through(&site);
    });
}

async fn reports(site: &Site, words: &str) {
    let reported = async || match site.lab.nodes[0].status_as::<weft::observe::status::Status>().await {
        Ok(status) => status.problems.iter().any(|problem| problem.text.contains(words)),
        Err(_) => false,
    };
    wait_for("the problem to be reported", PATIENCE, reported).await.unwrap();
}

#[test]
fn a_node_that_was_cut_off_stays_cut_off_under_nftables() {
    a_node_that_was_cut_off_stays_cut_off("--firewall=nft");
}

#[test]
fn a_node_that_was_cut_off_stays_cut_off_under_iptables() {
    a_node_that_was_cut_off_stays_cut_off("--firewall=iptables");
}

/// The agent restarts without the forward rules, or with iptables. No accept of ours stays in FORWARD of iptables-nft.
fn accepts_are_removed_with(flag: &'static str, works: bool) {
    on_this_thread(async move {
        let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq", "--firewall=nft", "--iptables-resync=1"]).await;
        site.on_nodes(&policy("nft")).await;
        site.start().await;
        pods_get_through(&site);
        let forward = async |site: &Site| site.run("n1", &["sh", "-c", "nft list chain ip filter FORWARD"]).await;
        assert!(forward(&site).await.contains("saddr 10."), "{}", forward(&site).await);
        let node = &mut site.lab.nodes[0];
        node.stop(Signal::SIGTERM).await.unwrap();
        node.set_flag(flag);
        node.start().unwrap();
        let gone = async || !forward(&site).await.contains("saddr 10.");
        wait_for("the accepts to be removed", PATIENCE, gone).await.unwrap();
        if works {
            pods_get_through(&site);
        }
    });
}

#[test]
fn accepts_are_removed_with_the_forward_rules() {
    accepts_are_removed_with("--iptables-forward-rules=false", false);
}

#[test]
fn accepts_are_removed_with_the_mode() {
    accepts_are_removed_with("--firewall=iptables", true);
}

/// Docker is installed while the agent runs.
#[test]
fn policy_that_comes_later() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq", "--iptables-resync=1"]).await;
        site.start().await;
        pods_get_through(&site);
        site.on_nodes(&policy("nft")).await;
        pods_get_through(&site);
    });
}

/// The control of the tests above: without our rules, the policy does drop packets.
#[test]
fn policy_drops_without_the_rules() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq", "--iptables-forward-rules=false"]).await;
        site.start().await;
        pods_get_through(&site);
        site.on_nodes(&policy("nft")).await;
        for family in Family::BOTH {
            assert_eq!(site.probe(&straight("n1-p1", "n2-p1"), family), "lost");
        }
    });
}

#[test]
#[ignore = "needs FLANNELD"]
fn policy_under_flanneld() {
    let flanneld = flanneld();
    on_this_thread(async {
        let mut site = Site::for_flanneld(BackendKind::Vxlan, &["--ip-masq"]).await;
        site.on_nodes(&policy("nft")).await;
        site.start_other(&flanneld).await;
        pods_get_through(&site);
    });
}
