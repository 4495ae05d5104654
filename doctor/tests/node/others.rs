// SPDX-License-Identifier: Apache-2.0
//! What other networks for pods left behind.

use super::{doctor, in_namespace, ip, only_text, shell, sources};

#[test]
fn rules_and_links_of_a_network_that_does_not_run_are_found() {
    in_namespace(|file| {
        assert_eq!(doctor(file, "leftovers"), []);
        shell("iptables-nft -N cali-FORWARD && iptables-nft -A cali-FORWARD -j DROP");
        assert_eq!(doctor(file, "leftovers"), [], "nothing leads to this chain");
        shell("iptables-nft -A FORWARD -m comment --comment cali:wUHhoiAYhphO9Mso -j cali-FORWARD");
        let text = only_text(&sources(file), "leftovers", &["Calico does not run", "iptables-nft", "-j cali-FORWARD`"]);
        let remedy = text.lines().nth(1).unwrap().split(';').next().unwrap();
        shell(remedy);
        assert_eq!(doctor(file, "leftovers"), [], "after {remedy}");
        ip("link add cilium_host type veth peer name cilium_net");
        only_text(&sources(file), "leftovers", &["Cilium does not run", "cilium_host", "ip link del cilium_host"]);
        let mut process = super::named_process(file, "cilium-agent");
        assert_eq!(doctor(file, "leftovers"), [], "it runs");
        process.kill().unwrap();
        process.wait().unwrap();
    });
}
