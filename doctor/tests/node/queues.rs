// SPDX-License-Identifier: Apache-2.0
//! Queues of netfilter without a program that reads them.

use weft_netlink::rt::PLAIN;
use weft_netlink::socket::Netlink;

use super::firewall::with_peer;
use super::{doctor_with, in_namespace, only_text, shell, until};

/// NETLINK_NETFILTER, and the message that binds a queue (linux/netfilter/nfnetlink_queue.h).
const NETFILTER: isize = 12;
const CONFIG: u16 = (3 << 8) | 2;
const CONFIG_COMMAND: u16 = 1;
const BIND: u8 = 1;

/// Binds this queue. Its packets belong to this process until the socket is closed.
fn reader(queue: u16) -> Netlink {
    let mut netlink = Netlink::open_on(NETFILTER).unwrap();
    let [high, low] = queue.to_be_bytes();
    let bound = netlink.request(|w| {
        w.begin(CONFIG, PLAIN, &[0, 0, high, low]);
        w.attr(CONFIG_COMMAND, &[BIND, 0, 0, 0]);
    });
    bound.unwrap().unwrap();
    netlink
}

#[test]
fn a_queue_that_no_program_reads_drops_packets_and_the_remedy_lets_them_pass() {
    in_namespace(|file| {
        let sources = with_peer(file);
        for (program, table, rule, chain) in [
            ("iptables-nft", "", "INPUT -p udp --dport 8472 -j NFQUEUE --queue-num 5", "INPUT of iptables-nft"),
            ("iptables-legacy", "", "INPUT -p udp -j NFQUEUE --queue-balance 4:6", "INPUT of iptables-legacy"),
            (
                "iptables-nft",
                "-t raw ",
                "OUTPUT -p udp --dport 8472 -j NFQUEUE --queue-num 5",
                "ip raw OUTPUT of nftables",
            ),
        ] {
            shell(&format!("{program} {table}-A {rule}"));
            let words = [chain, "192.0.2.9", "no program reads this queue"];
            let text = only_text(&sources, "firewall", &words);
            let program_that_reads = reader(5);
            assert_eq!(doctor_with(&sources, "firewall"), [], "a program decides: {rule}");
            drop(program_that_reads);
            until("the queue to have no reader", || !doctor_with(&sources, "firewall").is_empty());
            let remedy = text.lines().nth(1).unwrap().split(';').next().unwrap();
            shell(remedy);
            assert_eq!(doctor_with(&sources, "firewall"), [], "after {remedy}");
            shell(&format!("{program} {table}-F"));
        }
        for harmless in
            ["-p udp --dport 8472 -j NFQUEUE --queue-num 5 --queue-bypass", "-p tcp -j NFQUEUE --queue-num 5"]
        {
            for program in ["iptables-nft", "iptables-legacy"] {
                shell(&format!("{program} -A INPUT {harmless} && {program} -t raw -A PREROUTING {harmless}"));
                assert_eq!(doctor_with(&sources, "firewall"), [], "{harmless}");
                shell(&format!("{program} -F && {program} -t raw -F"));
            }
        }
    });
}
