// SPDX-License-Identifier: Apache-2.0
//! What iptables-save printed goes in, and the text for iptables-restore comes out.

use weft_backends::traffic_rules::{FamilyRules, Masquerade, Policy, rules};
use weft_cni::iptables::Saved;
use weft_subnet::cidr::{Family, Subnets};

use super::{HookedChains, changes, present, removal};

fn part(except: &[&str], nodes: &[&str]) -> FamilyRules {
    let masquerade = Masquerade {
        fully_random: true,
        except: except.iter().map(|net| net.parse().unwrap()).collect(),
        nodes: nodes.iter().map(|ip| ip.parse().unwrap()).collect(),
    };
    let networks = Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: None };
    let own = Subnets { v4: Some("10.5.7.0/24".parse().unwrap()), v6: None };
    let policy = Policy { masquerade: Some(masquerade), forward: true };
    rules(&networks, &own, &policy).of(Family::V4).unwrap().clone()
}

fn ours() -> HookedChains {
    HookedChains::of("weft")
}

/// All rules of one family, as iptables-save 1.8.9 prints them.
const IN_PLACE: &str = "*nat
:POSTROUTING ACCEPT [0:0]
:WEFT-POSTRTG - [0:0]
-A POSTROUTING -j WEFT-POSTRTG
-A WEFT-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN
-A WEFT-POSTRTG -s 10.5.7.0/24 -d 10.5.0.0/16 -j RETURN
-A WEFT-POSTRTG -s 10.5.0.0/16 -d 10.5.7.0/24 -j RETURN
-A WEFT-POSTRTG ! -s 10.5.0.0/16 -d 10.5.7.0/24 -j RETURN
-A WEFT-POSTRTG -s 10.5.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE --random-fully
-A WEFT-POSTRTG ! -s 10.5.0.0/16 -d 10.5.0.0/16 -j MASQUERADE --random-fully
COMMIT
*filter
:FORWARD ACCEPT [0:0]
:WEFT-FWD - [0:0]
-A FORWARD -j WEFT-FWD
-A WEFT-FWD -s 10.5.0.0/16 -j ACCEPT
-A WEFT-FWD -d 10.5.0.0/16 -j ACCEPT
COMMIT
";

#[test]
fn rules_that_are_in_place_are_not_written() {
    assert_eq!(changes(&Saved::parse(IN_PLACE), &ours(), &part(&[], &[]), true), None);
}

#[test]
fn an_empty_system_gets_all_rules_at_once() {
    let text = changes(&Saved::default(), &ours(), &part(&[], &[]), true).unwrap();
    let sorted = |text: &str| {
        let mut lines: Vec<_> = text.lines().filter(|line| !line.contains(" ACCEPT [")).map(str::to_owned).collect();
        lines.sort();
        lines
    };
    assert_eq!(sorted(&text), sorted(IN_PLACE));
    assert!(text.find(":WEFT-POSTRTG") < text.find("-A POSTROUTING"), "filled before it is used: {text}");
}

#[test]
fn only_the_table_that_differs_is_written() {
    let saved = IN_PLACE.replace("-A WEFT-FWD -d 10.5.0.0/16 -j ACCEPT\n", "");
    let text = changes(&Saved::parse(&saved), &ours(), &part(&[], &[]), true).unwrap();
    let expected = "*filter\n:WEFT-FWD - [0:0]\n-A WEFT-FWD -s 10.5.0.0/16 -j ACCEPT\n\
                    -A WEFT-FWD -d 10.5.0.0/16 -j ACCEPT\nCOMMIT\n";
    assert_eq!(text, expected, "the jump is right already");
}

#[test]
fn a_rule_too_many_changed_or_out_of_order_is_seen() {
    let first = "-A WEFT-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN\n";
    for (from, to) in [
        (first, ""),
        (first, "-A WEFT-POSTRTG -m mark --mark 0x8000/0x8000 -j RETURN\n"),
        (first, "-A WEFT-POSTRTG -m mark --mark 0x4000/0x4000 -j RETURN\n-A WEFT-POSTRTG -j RETURN\n"),
        ("-A WEFT-FWD -s 10.5.0.0/16 -j ACCEPT\n", "-A WEFT-FWD -s 10.6.0.0/16 -j ACCEPT\n"),
        ("-s 10.5.7.0/24 -d 10.5.0.0/16 -j RETURN", "-s 10.5.7.0/24 -d 10.5.0.0/16 -j DROP"),
    ] {
        let saved = IN_PLACE.replace(from, to);
        assert_ne!(saved, IN_PLACE);
        assert!(changes(&Saved::parse(&saved), &ours(), &part(&[], &[]), true).is_some(), "{saved}");
    }
}

#[test]
fn a_jump_that_is_missing_doubled_or_in_another_place_is_corrected() {
    for (from, to, expected) in [
        ("-A FORWARD -j WEFT-FWD\n", "", "*filter\n-A FORWARD -j WEFT-FWD\nCOMMIT\n"),
        (
            "-A FORWARD -j WEFT-FWD\n",
            "-A FORWARD -j WEFT-FWD\n-A FORWARD -j WEFT-FWD\n",
            "*filter\n-D FORWARD -j WEFT-FWD\n-D FORWARD -j WEFT-FWD\n-A FORWARD -j WEFT-FWD\nCOMMIT\n",
        ),
        (
            "-A FORWARD -j WEFT-FWD\n",
            "-A FORWARD -i eth1 -j WEFT-FWD\n",
            "*filter\n-D FORWARD -i eth1 -j WEFT-FWD\n-A FORWARD -j WEFT-FWD\nCOMMIT\n",
        ),
        (
            "-A FORWARD -j WEFT-FWD\n",
            "-A FORWARD -j OTHER\n-A FORWARD -j REJECT --reject-with icmp-host-prohibited\n",
            "*filter\n-I FORWARD 2 -j WEFT-FWD\nCOMMIT\n",
        ),
        // A person put this drop there on purpose, so the jump goes behind it.
        ("-A FORWARD -j WEFT-FWD\n", "-A FORWARD -j DROP\n", "*filter\n-A FORWARD -j WEFT-FWD\nCOMMIT\n"),
    ] {
        let saved = Saved::parse(&IN_PLACE.replace(from, to));
        assert_eq!(changes(&saved, &ours(), &part(&[], &[]), true).as_deref(), Some(expected), "{to}");
    }
}

#[test]
fn rules_of_others_before_and_behind_the_jump_do_not_matter() {
    let jump = "-A FORWARD -j WEFT-FWD\n";
    let busy = "-A FORWARD -j KUBE-FORWARD\n-A FORWARD -j WEFT-FWD\n-A FORWARD -i eth1 -j DROP\n-A FORWARD -j DROP\n";
    let saved = Saved::parse(&IN_PLACE.replace(jump, busy));
    assert_eq!(changes(&saved, &ours(), &part(&[], &[]), true), None);
}

/// An operator cuts the node off by hand. The agent does not put its rules before that.
#[test]
fn a_drop_that_someone_put_before_the_jump_stays_before_it() {
    let jump = "-A FORWARD -j WEFT-FWD\n";
    for before in ["-A FORWARD -j DROP\n", "-A FORWARD -j REJECT\n", "-A FORWARD -j OTHER\n-A FORWARD -j DROP\n"] {
        for after in ["", "-A FORWARD -j REJECT\n"] {
            let saved = Saved::parse(&IN_PLACE.replace(jump, &format!("{before}{jump}{after}")));
            assert_eq!(changes(&saved, &ours(), &part(&[], &[]), true), None, "{before}{after}");
        }
    }
}

#[test]
fn exceptions_come_before_the_masquerade_rules() {
    let part = part(&["192.0.2.0/24"], &["10.0.0.1", "10.0.0.2"]);
    let text = changes(&Saved::default(), &ours(), &part, true).unwrap();
    let at = |word: &str| text.find(word).unwrap_or_else(|| panic!("no {word} in {text}"));
    let masquerade = at("-j MASQUERADE");
    for word in ["-d 192.0.2.0/24 -j RETURN", "-d 10.0.0.1/32 -j RETURN", "-d 10.0.0.2/32 -j RETURN"] {
        assert!(at(word) < masquerade, "{text}");
    }
    assert_eq!(text.lines().filter(|line| line.contains("/32")).count(), 2, "one rule for each node");
}

/// iptables-save leaves `-d 0.0.0.0/0` out.
#[test]
fn an_exception_for_all_addresses_is_found_again() {
    let exception = "-A WEFT-POSTRTG -s 10.5.0.0/16 -j RETURN\n";
    let part = part(&["0.0.0.0/0"], &[]);
    let text = changes(&Saved::default(), &ours(), &part, true).unwrap();
    assert!(text.contains(exception), "{text}");
    let masquerade = "-A WEFT-POSTRTG -s 10.5.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE";
    let saved = IN_PLACE.replace(masquerade, &format!("{exception}{masquerade}"));
    assert_eq!(changes(&Saved::parse(&saved), &ours(), &part, true), None);
}

#[test]
fn an_old_iptables_masquerades_without_random_fully() {
    let text = changes(&Saved::default(), &ours(), &part(&[], &[]), false).unwrap();
    assert!(text.contains("-j MASQUERADE\n") && !text.contains("random"), "{text}");
    let saved = Saved::parse(&IN_PLACE.replace(" --random-fully", ""));
    assert_eq!(changes(&saved, &ours(), &part(&[], &[]), false), None);
}

#[test]
fn rules_that_are_no_longer_wanted_are_removed() {
    let part = FamilyRules { masquerade: Vec::new(), ..part(&[], &[]) };
    let expected = "*nat\n-D POSTROUTING -j WEFT-POSTRTG\n-F WEFT-POSTRTG\n-X WEFT-POSTRTG\nCOMMIT\n";
    assert_eq!(changes(&Saved::parse(IN_PLACE), &ours(), &part, true).as_deref(), Some(expected));
}

#[test]
fn the_chains_of_flannel_are_removed_and_no_others() {
    let theirs = "*nat
:POSTROUTING ACCEPT [0:0]
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -m comment --comment \"kubernetes postrouting rules\" -j KUBE-POSTROUTING
-A POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment \"flanneld masq\" -j RETURN
COMMIT
*filter
:FORWARD ACCEPT [0:0]
-A FORWARD -j WEFT-FWD
COMMIT
";
    let saved = Saved::parse(theirs);
    let expected = "*nat\n-D POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG\n\
                    -F FLANNEL-POSTRTG\n-X FLANNEL-POSTRTG\nCOMMIT\n";
    assert_eq!(removal(&saved, &HookedChains::of_flannel()).as_deref(), Some(expected));
    assert_eq!(present(&saved, &HookedChains::of_flannel()), ["FLANNEL-POSTRTG"]);
    assert_eq!(removal(&Saved::default(), &HookedChains::of_flannel()), None);
}

#[test]
fn two_agents_have_chains_of_different_names_that_fit() {
    let chains = HookedChains::of("weft-1a2b3c4d");
    assert_eq!(chains.masquerade.chain, "WEFT-1A2B3C4D-POSTRTG");
    assert!(chains.masquerade.chain.len() <= 28 && chains.forward.chain == "WEFT-1A2B3C4D-FWD");
}
