// SPDX-License-Identifier: Apache-2.0
//! The rules in nftables: `nft` shows what was written, equal rules are not written again, and changes by other programs are found and
//! repaired.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::time::Duration;

use weft::firewall::error::FirewallError;
use weft::firewall::foreign_chains::{self, DroppingChain};
use weft::firewall::iptables_forward;
use weft::firewall::nft::batch::{Batch, InTable, NewRule};
use weft::firewall::nft::table::{Table, rules_of};
use weft::firewall::nft::{self, Nft};
use weft::firewall::packet_filter::{Ensured, PacketFilter};
use weft::instance::Instance;
use weft::kernel::socket::Netlink;
use weft_backends::traffic_rules::{self, FamilyRules, Masquerade, Policy, Rules};
use weft_netlink::nftables::{Hook, base_chains};
use weft_subnet::cidr::{Family, Subnets};

use crate::patience::PATIENCE;

use super::adapter_net::{in_namespace, run};

fn subnets(v4: &str, v6: &str) -> Subnets {
    Subnets { v4: Some(v4.parse().unwrap()), v6: Some(v6.parse().unwrap()) }
}

fn rules(masquerade: Option<Masquerade>, forward: bool) -> Rules {
    let (networks, own) = (subnets("10.5.0.0/16", "fd00:5::/48"), subnets("10.5.1.0/24", "fd00:5:0:1::/64"));
    traffic_rules::rules(&networks, &own, &Policy { masquerade, forward })
}

fn all() -> Rules {
    let nodes = ["192.0.2.7", "192.0.2.8"].map(|ip| ip.parse().unwrap()).to_vec();
    rules(Some(Masquerade { fully_random: true, except: vec!["192.168.0.0/16".parse().unwrap()], nodes }), true)
}

fn plain() -> Rules {
    rules(Some(Masquerade::default()), true)
}

fn instance() -> Instance {
    Instance::new(Path::new("/run/flannel/subnet.env"))
}

fn open() -> Nft {
    Nft::new(&instance())
}

/// Returns the table without counters and handles, with one rule in each line.
fn listing(family: &str) -> Vec<String> {
    let text = run("nft", &format!("-s list table {family} weft"));
    text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty() && line != "}").collect()
}

#[test]
fn nft_shows_what_was_written() {
    in_namespace(|| async {
        let mut nft = open();
        assert_eq!(nft.ensure(&all()).await.unwrap(), Ensured::Written);
        let v4 = [
            "table ip weft {",
            "comment \"weft /run/flannel/subnet.env\"",
            "set nodes {",
            "type ipv4_addr",
            "elements = { 192.0.2.7, 192.0.2.8 }",
            "chain postrouting {",
            "type nat hook postrouting priority srcnat; policy accept;",
            "meta mark & 0x00004000 == 0x00004000 counter return",
            "ip saddr 10.5.1.0/24 ip daddr 10.5.0.0/16 counter return",
            "ip saddr 10.5.0.0/16 ip daddr 10.5.1.0/24 counter return",
            "ip saddr != 10.5.0.0/16 ip daddr 10.5.1.0/24 counter return",
            "ip saddr 10.5.0.0/16 ip daddr 192.168.0.0/16 counter return",
            "ip saddr 10.5.0.0/16 ip daddr @nodes counter return",
            "ip saddr 10.5.0.0/16 ip daddr != 224.0.0.0/4 counter masquerade fully-random",
            "ip saddr != 10.5.0.0/16 ip daddr 10.5.0.0/16 counter masquerade fully-random",
            "chain forward {",
            "type filter hook forward priority filter; policy accept;",
            "ip saddr 10.5.0.0/16 counter accept",
            "ip daddr 10.5.0.0/16 counter accept",
        ];
        assert_eq!(listing("ip"), v4);
        let v6 = listing("ip6").join("\n");
        for line in [
            "ip6 saddr fd00:5:0:1::/64 ip6 daddr fd00:5::/48 counter return",
            "ip6 saddr fd00:5::/48 ip6 daddr != ff00::/8 counter masquerade fully-random",
            "ip6 saddr != fd00:5::/48 ip6 daddr fd00:5::/48 counter masquerade fully-random",
        ] {
            assert!(v6.contains(line), "{line} is missing in\n{v6}");
        }
    });
}

/// Returns all tables with the handles of the rules. A rule that is written again has another handle.
fn handles() -> String {
    run("nft", "-a -s list ruleset")
}

#[test]
fn equal_rules_are_not_written_again() {
    in_namespace(|| async {
        let mut nft = open();
        for (name, rules) in [
            ("all", all()),
            ("plain", plain()),
            ("forward only", rules(None, true)),
            ("masquerade only", rules(Some(Masquerade::default()), false)),
        ] {
            assert_eq!(nft.ensure(&rules).await.unwrap(), Ensured::Written, "{name}");
            let before = handles();
            assert_eq!(nft.ensure(&rules).await.unwrap(), Ensured::Unchanged, "{name}");
            assert_eq!(open().ensure(&rules).await.unwrap(), Ensured::Unchanged, "{name}: another process");
            assert_eq!(handles(), before, "{name}");
        }
        let v4 = Rules { families: plain().families[..1].to_vec() };
        assert_eq!(nft.ensure(&v4).await.unwrap(), Ensured::Written);
        assert!(!handles().contains("table ip6"), "a family that is off has no table");
        assert!(nft.remove().await.unwrap());
        assert_eq!(handles(), "");
        assert!(!nft.remove().await.unwrap());
    });
}

/// When nodes join or leave, only elements change. The rules keep their counters.
#[test]
fn other_nodes_change_only_the_set() {
    in_namespace(|| async {
        let with = |nodes: &[&str]| {
            let nodes = nodes.iter().map(|ip| ip.parse().unwrap()).collect();
            rules(Some(Masquerade { nodes, ..Masquerade::default() }), true)
        };
        let elements = |text: &str| -> Vec<String> {
            let lines = text.lines().map(str::trim).filter(|line| line.starts_with("elements"));
            lines.map(str::to_owned).collect()
        };
        let without =
            |text: String| text.lines().filter(|line| !line.contains("elements")).collect::<Vec<_>>().join("\n");
        let mut nft = open();
        nft.ensure(&with(&["192.0.2.7", "fd00::7"])).await.unwrap();
        let before = without(handles());
        for (nodes, shown) in [
            (
                &["192.0.2.7", "192.0.2.8", "fd00::7"][..],
                ["elements = { 192.0.2.7, 192.0.2.8 }", "elements = { fd00::7 }"],
            ),
            (&["192.0.2.9", "fd00::8"], ["elements = { 192.0.2.9 }", "elements = { fd00::8 }"]),
        ] {
            assert_eq!(nft.ensure(&with(nodes)).await.unwrap(), Ensured::Written);
            assert_eq!(elements(&handles()), shown);
            assert_eq!(without(handles()), before, "the rules are those of before");
            assert_eq!(nft.ensure(&with(nodes)).await.unwrap(), Ensured::Unchanged);
        }
        assert_eq!(nft.ensure(&with(&["fd00::8"])).await.unwrap(), Ensured::Written);
        assert_eq!(elements(&handles()), ["elements = { fd00::8 }"], "without nodes there is no rule");
    });
}

/// The table is larger than the usual send buffer of a socket (208 KiB).
#[test]
fn the_nodes_of_a_large_cluster_are_written() {
    in_namespace(|| async {
        let with = |count: u32| {
            let v4 = (0..count).map(|n| IpAddr::from(Ipv4Addr::from_bits(0x0a00_0000 + n)));
            let v6 = (0..count).map(|n| IpAddr::from(Ipv6Addr::from_bits((0xfd09 << 112) + u128::from(n))));
            rules(Some(Masquerade { nodes: v4.chain(v6).collect(), ..Masquerade::default() }), true)
        };
        let mut nft = open();
        for count in [5_000, 50_000, 1] {
            assert_eq!(nft.ensure(&with(count)).await.unwrap(), Ensured::Written, "{count}");
            assert_eq!(nft.ensure(&with(count)).await.unwrap(), Ensured::Unchanged, "{count}");
        }
    });
}

#[test]
fn changes_by_other_programs_are_found_and_repaired() {
    in_namespace(|| async {
        let mut nft = open();
        nft.ensure(&all()).await.unwrap();
        let good = listing("ip");
        for change in [
            "flush ruleset",
            "delete table ip weft",
            "flush chain ip weft postrouting",
            "delete chain ip6 weft forward",
            "add rule ip weft forward drop",
            "insert rule ip weft postrouting counter accept",
            "add chain ip weft extra { type filter hook forward priority 1; policy drop; }",
            "add chain ip weft forward { policy drop; }",
            "add table ip weft { flags dormant; }",
            "add element ip weft nodes { 192.0.2.9 }",
            "delete element ip weft nodes { 192.0.2.7 }",
        ] {
            // The notifications of our own write are read first. They are queued before the write returns.
            while tokio::time::timeout(Duration::from_millis(20), nft.changed()).await.is_ok() {}
            let file = format!("/tmp/weft-nft-{}-{:?}", std::process::id(), std::thread::current().id());
            std::fs::write(&file, change).unwrap();
            run("nft", &format!("-f {file}"));
            std::fs::remove_file(&file).unwrap();
            let notified = tokio::time::timeout(PATIENCE, nft.changed()).await;
            assert!(notified.is_ok(), "{change}: no notification");
            assert_eq!(nft.ensure(&all()).await.unwrap(), Ensured::Written, "{change}");
            assert_eq!(listing("ip"), good, "{change}");
        }
    });
}

/// An element cannot be changed if another program has removed it since it was read, or has made the set constant.
#[test]
fn a_set_that_cannot_be_changed_is_replaced_with_its_table() {
    in_namespace(|| async {
        let mut nft = open();
        nft.ensure(&all()).await.unwrap();
        let good = listing("ip");
        let file = format!("/tmp/weft-nft-constant-{}", std::process::id());
        let text = "delete table ip weft; table ip weft {
            set nodes { type ipv4_addr; flags constant; elements = { 192.0.2.8 }; }
            chain postrouting { type nat hook postrouting priority srcnat; }
            chain forward { type filter hook forward priority filter; }
        }";
        std::fs::write(&file, text).unwrap();
        run("nft", &format!("-f {file}"));
        std::fs::remove_file(&file).unwrap();
        let mut netlink = nft::connection::open().unwrap();
        let mut batch = Batch::new(&mut netlink);
        let rules = all();
        for chain in Table::of(rules.of(Family::V4).unwrap(), "weft").chains {
            for exprs in &chain.rules {
                let rule = NewRule { exprs, comment: "", before: None };
                batch.insert_rule(Family::V4, InTable { table: "weft", name: chain.name }, &rule);
            }
        }
        batch.send().unwrap().unwrap();
        assert_eq!(nft.ensure(&all()).await.unwrap(), Ensured::Written);
        assert_eq!(listing("ip"), good);
    });
}

#[test]
fn notifications_about_other_tables_are_ignored() {
    in_namespace(|| async {
        // The control is another agent, whose table changes. Both agents get the same notifications. The first agent is polled first, so
        // the second one can be the first to return only if the first one has read the notification and ignored it.
        let instance = Instance::new(Path::new("/run/other/subnet.env"));
        let (mut nft, mut control) = (open(), Nft::new(&instance));
        nft.ensure(&all()).await.unwrap();
        control.ensure(&plain()).await.unwrap();
        for agent in [&mut nft, &mut control] {
            while tokio::time::timeout(Duration::from_millis(20), agent.changed()).await.is_ok() {}
        }
        let others = &instance.name;
        for change in [format!("add chain ip {others} weft"), format!("flush table ip {others}")] {
            run("nft", &change);
            let first = async {
                tokio::select! {
                    biased;
                    () = nft.changed() => "the agent that it does not concern",
                    () = control.changed() => "the other agent",
                }
            };
            assert_eq!(tokio::time::timeout(PATIENCE, first).await, Ok("the other agent"), "{change}");
        }
        // The first agent does get notifications about its own table.
        run("nft", "add chain ip weft extra");
        let notified = tokio::time::timeout(PATIENCE, nft.changed()).await;
        assert!(notified.is_ok(), "no notification about its own table");
    });
}

#[test]
fn two_agents_have_two_tables() {
    in_namespace(|| async {
        let other = Instance::new(Path::new("/run/other/subnet.env"));
        let (mut a, mut b) = (open(), Nft::new(&other));
        a.ensure(&plain()).await.unwrap();
        b.ensure(&all()).await.unwrap();
        assert_eq!(a.ensure(&plain()).await.unwrap(), Ensured::Unchanged);
        assert_eq!(b.ensure(&all()).await.unwrap(), Ensured::Unchanged);
        b.remove().await.unwrap();
        assert_eq!(a.ensure(&plain()).await.unwrap(), Ensured::Unchanged);
        assert!(!handles().contains(&other.name));
    });
}

/// Returns the CPU time of this thread, with that of the kernel for it. Other processes do not change it.
fn cpu_time() -> Duration {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    Duration::from(nix::time::clock_gettime(clock).unwrap())
}

/// Returns the CPU time of twenty comparisons. Before each, another table changes. Otherwise only the generation of the kernel would be
/// read.
fn twenty_comparisons(nft: &mut Nft) -> Duration {
    let mut other = Nft::new(&Instance::new(Path::new("/run/other/subnet.env")));
    let compare = |_| {
        assert_eq!(futures_now(other.ensure(&plain())).unwrap(), Ensured::Written);
        assert!(futures_now(other.remove()).unwrap());
        let start = cpu_time();
        assert_eq!(futures_now(nft.ensure(&all())).unwrap(), Ensured::Unchanged);
        cpu_time() - start
    };
    (0..20).map(compare).sum()
}

/// Another program has ten thousand rules at the same hook. A comparison that read them would need at least the CPU time of reading them.
/// One that does not needs a small part of it.
#[test]
fn a_comparison_does_not_read_the_rules_of_other_programs() {
    in_namespace(|| async {
        let mut nft = open();
        nft.ensure(&all()).await.unwrap();
        let mut text =
            "table ip kube-proxy {\n chain services { type nat hook postrouting priority srcnat; policy accept;\n"
                .to_owned();
        for n in 0..10_000u32 {
            text += &format!("  ip daddr {} tcp dport 80 counter accept\n", std::net::Ipv4Addr::from(0x0a60_0000 + n));
        }
        text += " }\n}\n";
        let file = format!("/tmp/weft-nft-{}-others", std::process::id());
        std::fs::write(&file, text).unwrap();
        run("nft", &format!("-f {file}"));
        std::fs::remove_file(&file).unwrap();
        let comparisons = twenty_comparisons(&mut nft);
        let mut netlink = nft::connection::open().unwrap();
        let read = |_| {
            let start = cpu_time();
            assert_eq!(rules_of(&mut netlink, Family::V4.number(), "kube-proxy", "services").unwrap().len(), 10_000);
            cpu_time() - start
        };
        let reads: Duration = (0..20).map(read).sum();
        assert!(comparisons < reads / 4, "20 comparisons took {comparisons:?}, reading the rules 20 times {reads:?}");
    });
}

fn dropping(netlink: &mut Netlink, rules: &FamilyRules) -> std::io::Result<Vec<DroppingChain>> {
    let chains = base_chains(netlink, Hook::Forward)?;
    foreign_chains::dropping(netlink, &chains, rules, &instance())
}

fn ensure(netlink: &mut Netlink, rules: Option<&FamilyRules>) -> Result<bool, FirewallError> {
    iptables_forward::ensure(netlink, Family::V4, rules, &instance())
}

/// Returns the rules of a chain as iptables-nft prints them.
fn saved(chain: &str) -> Vec<String> {
    run("iptables-nft", &format!("-S {chain}")).lines().skip(1).map(str::to_owned).collect()
}

#[test]
fn pods_are_accepted_where_iptables_drops_and_only_there() {
    in_namespace(|| async {
        let rules = plain();
        let v4 = rules.of(Family::V4).unwrap();
        let mut netlink = nft::connection::open().unwrap();
        assert_eq!(dropping(&mut netlink, v4).unwrap(), []);
        assert!(!ensure(&mut netlink, Some(v4)).unwrap(), "no iptables, no rule");
        run("iptables-nft", "-P FORWARD DROP");
        run("iptables-nft", "-A FORWARD -i docker0 -j ACCEPT");
        let found = dropping(&mut netlink, v4).unwrap();
        assert!(found.len() == 1 && found[0].is_iptables(), "{found:?}");
        assert!(ensure(&mut netlink, Some(v4)).unwrap());
        let expected = [
            "-A FORWARD -i docker0 -j ACCEPT",
            "-A FORWARD -s 10.5.0.0/16 -j ACCEPT",
            "-A FORWARD -d 10.5.0.0/16 -j ACCEPT",
        ];
        assert_eq!(without_comments(&saved("FORWARD")), expected);
        assert_eq!(dropping(&mut netlink, v4).unwrap(), []);
        assert!(!ensure(&mut netlink, Some(v4)).unwrap(), "once is enough");
        assert!(ensure(&mut netlink, None).unwrap());
        assert_eq!(saved("FORWARD"), ["-A FORWARD -i docker0 -j ACCEPT"]);
        assert!(!ensure(&mut netlink, None).unwrap());
        // For a /16, iptables loads two bytes and weft four. The rules are the same.
        run("iptables-nft", "-A FORWARD -s 10.5.0.0/16 -j ACCEPT");
        run("iptables-nft", "-A FORWARD -d 10.5.0.0/16 -j ACCEPT");
        assert_eq!(dropping(&mut netlink, v4).unwrap(), []);
        assert!(!ensure(&mut netlink, Some(v4)).unwrap(), "those of another program are enough");
        // A last rule that rejects everything has the effect of a policy, and ours are written before it.
        run("iptables-nft", "-F FORWARD");
        run("iptables-nft", "-P FORWARD ACCEPT");
        assert_eq!(dropping(&mut netlink, v4).unwrap(), []);
        assert!(!ensure(&mut netlink, Some(v4)).unwrap(), "a chain that drops nothing needs no rule");
        for last in ["-j REJECT", "-j DROP"] {
            run("iptables-nft", "-F FORWARD");
            run("iptables-nft", "-A FORWARD -p tcp -j REJECT");
            run("iptables-nft", &format!("-A FORWARD {last}"));
            assert_eq!(dropping(&mut netlink, v4).unwrap().len(), 1, "{last}");
            assert!(ensure(&mut netlink, Some(v4)).unwrap());
            let rules = without_comments(&saved("FORWARD"));
            assert_eq!(rules[1..3], expected[1..], "{last}");
            assert!(rules.len() == 4 && rules[3].contains(last), "{rules:?}");
            assert_eq!(dropping(&mut netlink, v4).unwrap(), []);
        }
    });
}

/// Network changes, and then the chain no longer drops packets.
#[test]
fn accepts_that_are_no_longer_needed_are_removed() {
    in_namespace(|| async {
        let rules = plain();
        let v4 = rules.of(Family::V4).unwrap();
        let (networks, own) = (subnets("10.6.0.0/16", "fd00:6::/48"), subnets("10.6.1.0/24", "fd00:6:0:1::/64"));
        let moved = traffic_rules::rules(&networks, &own, &Policy { masquerade: None, forward: true });
        let mut netlink = nft::connection::open().unwrap();
        run("iptables-nft", "-P FORWARD DROP");
        run("iptables-nft", "-A FORWARD -s 10.5.0.0/16 -p tcp -j ACCEPT");
        assert!(ensure(&mut netlink, Some(v4)).unwrap());
        assert!(ensure(&mut netlink, moved.of(Family::V4)).unwrap());
        let expected = [
            "-A FORWARD -s 10.5.0.0/16 -p tcp -j ACCEPT",
            "-A FORWARD -s 10.6.0.0/16 -j ACCEPT",
            "-A FORWARD -d 10.6.0.0/16 -j ACCEPT",
        ];
        assert_eq!(without_comments(&saved("FORWARD")), expected, "others stay");
        assert!(!ensure(&mut netlink, moved.of(Family::V4)).unwrap());
        // One of the two is removed by another program. It is written again, and the other one stays.
        run("iptables-nft", "-D FORWARD 2");
        assert!(ensure(&mut netlink, moved.of(Family::V4)).unwrap());
        assert_eq!(saved("FORWARD").len(), 3);
        assert!(!ensure(&mut netlink, moved.of(Family::V4)).unwrap());
        assert!(ensure(&mut netlink, None).unwrap());
        assert_eq!(saved("FORWARD"), expected[..1]);
    });
}

/// A person cuts a node off. It stays cut off, no matter if our accepts are already there.
#[test]
fn nothing_is_written_before_a_drop_that_a_person_put_first() {
    in_namespace(|| async {
        let rules = plain();
        let v4 = rules.of(Family::V4).unwrap();
        let mut netlink = nft::connection::open().unwrap();
        for (default, first) in
            [("-P FORWARD DROP", "-I FORWARD -j DROP"), ("-A FORWARD -j REJECT", "-I FORWARD -j REJECT")]
        {
            run("iptables-nft", default);
            for ours in [Some(v4), None] {
                assert!(ensure(&mut netlink, ours).unwrap());
                run("iptables-nft", first);
                let before = saved("FORWARD");
                assert!(!ensure(&mut netlink, Some(v4)).unwrap(), "{first}");
                assert_eq!(saved("FORWARD"), before, "{first}");
                let named = dropping(&mut netlink, v4).unwrap();
                assert!(named.len() == 1 && named[0].is_iptables() && named[0].blocked, "{named:?}");
                run("iptables-nft", "-D FORWARD 1");
            }
            run("iptables-nft", "-F FORWARD");
            run("iptables-nft", "-P FORWARD ACCEPT");
        }
        // If our rules are not needed, the only rule is no default.
        run("iptables-nft", "-A FORWARD -j DROP");
        assert!(!ensure(&mut netlink, Some(v4)).unwrap());
        assert_eq!(saved("FORWARD"), ["-A FORWARD -j DROP"]);
    });
}

/// Removes the comments, which only some versions of iptables print.
fn without_comments(rules: &[String]) -> Vec<String> {
    rules.iter().map(|rule| rule.replace(" -m comment --comment \"weft forward\"", "")).collect()
}

#[test]
fn other_chains_that_drop_are_named() {
    in_namespace(|| async {
        let rules = plain();
        let (v4, v6) = (rules.of(Family::V4).unwrap(), rules.of(Family::V6).unwrap());
        let mut netlink = nft::connection::open().unwrap();
        run("nft", "add table inet fw");
        run("nft", "add chain inet fw way { type filter hook forward priority 0 ; policy drop ; }");
        run("nft", "add table ip6 six");
        run("nft", "add chain ip6 six way { type filter hook forward priority 0 ; policy drop ; }");
        run("nft", "add table ip open");
        run("nft", "add chain ip open way { type filter hook forward priority 0 ; policy accept ; }");
        run("nft", "add chain ip open in { type filter hook input priority 0 ; policy drop ; }");
        let mut names = |part| -> Vec<String> {
            dropping(&mut netlink, part).unwrap().into_iter().map(|chain| chain.table).collect()
        };
        assert_eq!((names(v4), names(v6)), (vec!["fw".to_owned()], vec!["fw".to_owned(), "six".to_owned()]));
        run("nft", "add table inet firewalld");
        run("nft", "add chain inet firewalld filter_FORWARD { type filter hook forward priority 10 ; }");
        run("nft", "add chain inet firewalld filter_FORWARD_ZONES");
        run("nft", "add chain inet firewalld filter_FWD_trusted");
        run("nft", "add rule inet firewalld filter_FORWARD jump filter_FORWARD_ZONES");
        run("nft", "add rule inet firewalld filter_FORWARD reject with icmpx admin-prohibited");
        assert_eq!(names(v4), ["fw", "firewalld"]);
        run("nft", "add rule inet firewalld filter_FORWARD_ZONES ip saddr 10.5.0.0/16 goto filter_FWD_trusted");
        assert_eq!(names(v4), ["fw"], "its zone is trusted");
        run("nft", "delete table inet firewalld");
        run("nft", "add rule ip open way tcp dport 22 drop");
        assert_eq!(names(v4), ["fw"], "not everything is dropped");
        run("nft", "add rule ip open way counter reject");
        assert_eq!(names(v4), ["fw", "open"]);
        run("nft", "flush chain ip open way");
        run("nft", "add rule inet fw way ip saddr 10.5.0.0/16 counter accept");
        assert_eq!(names(v4), ["fw"], "one of two");
        run("nft", "add rule inet fw way ip daddr 10.5.0.0/16 accept");
        assert!(names(v4).is_empty());
        assert_eq!(names(v6), ["fw", "six"]);
    });
}

/// Rules are judged in this order, whichever was made first.
#[test]
fn base_chains_of_a_hook_are_listed_in_the_order_in_which_packets_pass_them() {
    in_namespace(|| async {
        for (table, hook, priority) in [("last", "forward", 20), ("first", "forward", 5), ("other", "input", 1)] {
            run("nft", &format!("add table ip {table}"));
            run("nft", &format!("add chain ip {table} way {{ type filter hook {hook} priority {priority} ; }}"));
        }
        let mut netlink = nft::connection::open().unwrap();
        let chains = base_chains(&mut netlink, Hook::Forward).unwrap();
        let names: Vec<&str> = chains.iter().map(|chain| chain.table.as_str()).collect();
        assert_eq!(names, ["first", "last"]);
    });
}

#[test]
fn flannels_tables_are_removed_and_no_others() {
    in_namespace(|| async {
        for table in ["ip flannel-ipv4", "ip6 flannel-ipv6", "ip flannel-ipv6", "inet flannel-ipv4"] {
            run("nft", &format!("add table {table}"));
        }
        let gone = nft::remove_flannel_tables().unwrap();
        assert_eq!(gone, ["table ip flannel-ipv4", "table ip6 flannel-ipv6"]);
        assert_eq!(nft::remove_flannel_tables().unwrap(), [""; 0]);
        assert_eq!(run("nft", "list tables").trim(), "table ip flannel-ipv6\ntable inet flannel-ipv4");
    });
}

/// Polls a future once. The rules in nftables are written without waiting.
fn futures_now<T>(future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    match future.as_mut().poll(&mut context) {
        std::task::Poll::Ready(value) => value,
        std::task::Poll::Pending => panic!("it waits"),
    }
}
