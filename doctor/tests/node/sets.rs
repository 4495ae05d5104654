// SPDX-License-Identifier: Apache-2.0
//! Rules of iptables that look addresses up in a set of ipset, as blocklists and the firewalls of hosts have them.

use super::firewall::{with_peer, with_pods};
use super::{doctor_with, in_namespace, only_text, shell};

#[test]
fn a_blocklist_with_the_address_of_a_peer_is_found_and_the_remedy_lets_its_packets_pass() {
    in_namespace(|file| {
        let sources = with_peer(file);
        shell("ipset create bad hash:net && ipset create sets list:set && ipset add sets bad");
        for program in ["iptables-nft", "iptables-legacy"] {
            shell(&format!("{program} -A INPUT -m set --match-set bad src -j DROP"));
            shell("ipset flush bad && ipset add bad 198.51.100.0/24");
            assert_eq!(doctor_with(&sources, "firewall"), [], "the set has other addresses: {program}");
            shell("ipset add bad 192.0.2.8/29");
            let chain = format!("INPUT of {program}");
            let words =
                [chain.as_str(), "packets of the tunnel", "from 192.0.2.9", "-m set --match-set bad src -j DROP"];
            let text = only_text(&sources, "firewall", &words);
            let remedy = text.lines().nth(1).unwrap().split(';').next().unwrap();
            shell(remedy);
            assert_eq!(doctor_with(&sources, "firewall"), [], "after {remedy}");
            shell(&format!("{program} -D INPUT 1 && ipset add bad 192.0.2.9 nomatch"));
            assert_eq!(doctor_with(&sources, "firewall"), [], "the peer is an exception: {program}");
            shell(&format!("ipset del bad 192.0.2.9 && {program} -F"));
            shell(&format!("{program} -A INPUT -m set --match-set sets src -j DROP"));
            assert_eq!(doctor_with(&sources, "firewall"), [], "which addresses a set of sets has is not asked");
            shell(&format!("{program} -F"));
        }
    });
}

/// As firewalls that let nothing in but members of a set.
#[test]
fn a_set_that_lets_packets_of_some_nodes_pass_leaves_no_doubt_about_the_others() {
    in_namespace(|file| {
        let sources = with_peer(file);
        shell("ipset create nodes hash:ip && ipset add nodes 192.0.2.9");
        shell("iptables-nft -A INPUT -m set --match-set nodes src -j ACCEPT && iptables-nft -P INPUT DROP");
        assert_eq!(doctor_with(&sources, "firewall"), []);
        shell("ipset del nodes 192.0.2.9");
        only_text(&sources, "firewall", &["INPUT of iptables-nft", "from 192.0.2.9", "policy DROP"]);
        shell("iptables-nft -F && iptables-nft -A INPUT -m set ! --match-set nodes src -j DROP");
        shell("iptables-nft -P INPUT ACCEPT");
        only_text(&sources, "firewall", &["from 192.0.2.9", "! --match-set nodes src -j DROP"]);
        shell("ipset add nodes 192.0.2.9");
        assert_eq!(doctor_with(&sources, "firewall"), []);
    });
}

/// Lists of addresses that nobody on the Internet has contain 10.0.0.0/8.
#[test]
fn a_list_that_contains_the_subnet_of_a_peer_is_found_and_one_with_a_part_of_it_is_not() {
    in_namespace(|file| {
        let (sources, _pods) = with_pods(file);
        shell("ipset create bogons hash:net && ipset create hosts hash:ip");
        shell("iptables-nft -A FORWARD -m set --match-set bogons src -j DROP");
        shell("iptables-nft -A FORWARD -m set --match-set hosts src -j DROP");
        shell("ipset add bogons 10.5.9.0/25 && ipset add bogons 10.5.9.128/26 && ipset add hosts 10.5.9.7");
        assert_eq!(doctor_with(&sources, "firewall"), [], "some pods only");
        shell("ipset add bogons 10.5.8.0/23");
        let words = ["from pods of 10.5.9.0/24 to pods of 10.5.7.0/24", "--match-set bogons src"];
        only_text(&sources, "firewall", &words);
        shell("ipset add bogons 10.5.9.0/24 nomatch");
        assert_eq!(doctor_with(&sources, "firewall"), [], "the subnet is an exception");
    });
}
