// SPDX-License-Identifier: Apache-2.0
//! Text in, text out.

use weft_backends::masq::{FamilyRules, Masquerade, Policy, rules};
use weft_subnet::cidr::{Family, Subnets};

use super::{Places, changes, present, removal};
use crate::firewall::iptables::saved::Saved;

fn part(except: &[&str], nodes: &[&str]) -> FamilyRules {
    let masquerade = Masquerade {
        fully_random: true,
        except: except.iter().map(|net| net.parse().unwrap()).collect(),
        nodes: nodes.iter().map(|ip| ip.parse().unwrap()).collect(),
    };
    let network = Subnets { v4: Some("10.5.0.0/16".parse().unwrap()), v6: None };
    let own = Subnets { v4: Some("10.5.7.0/24".parse().unwrap()), v6: None };
    let policy = Policy { masquerade: Some(masquerade), forward: true };
    rules(&network, &own, &policy).of(Family::V4).unwrap().clone()
}

fn ours() -> Places {
    Places::of("weft")
}

/// All of it, as iptables-save 1.8.9 prints it.
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
fn what_is_in_place_is_left_alone() {
    assert_eq!(changes(&Saved::parse(IN_PLACE), &ours(), &part(&[], &[]), true), None);
}

#[test]
fn nothing_there_is_filled_at_once() {
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
fn a_jump_that_is_missing_double_or_elsewhere_is_made_right() {
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
        // Somebody's will: behind it.
        ("-A FORWARD -j WEFT-FWD\n", "-A FORWARD -j DROP\n", "*filter\n-A FORWARD -j WEFT-FWD\nCOMMIT\n"),
    ] {
        let saved = Saved::parse(&IN_PLACE.replace(from, to));
        assert_eq!(changes(&saved, &ours(), &part(&[], &[]), true).as_deref(), Some(expected), "{to}");
    }
}

#[test]
fn others_before_us_and_after_us_do_not_matter() {
    let jump = "-A FORWARD -j WEFT-FWD\n";
    let busy = "-A FORWARD -j KUBE-FORWARD\n-A FORWARD -j WEFT-FWD\n-A FORWARD -i eth1 -j DROP\n-A FORWARD -j DROP\n";
    let saved = Saved::parse(&IN_PLACE.replace(jump, busy));
    assert_eq!(changes(&saved, &ours(), &part(&[], &[]), true), None);
}

/// A node is cut off by hand: the agent does not put itself before that.
#[test]
fn a_drop_that_someone_put_before_us_stays_before_us() {
    let jump = "-A FORWARD -j WEFT-FWD\n";
    for before in ["-A FORWARD -j DROP\n", "-A FORWARD -j REJECT\n", "-A FORWARD -j OTHER\n-A FORWARD -j DROP\n"] {
        for after in ["", "-A FORWARD -j REJECT\n"] {
            let saved = Saved::parse(&IN_PLACE.replace(jump, &format!("{before}{jump}{after}")));
            assert_eq!(changes(&saved, &ours(), &part(&[], &[]), true), None, "{before}{after}");
        }
    }
}

#[test]
fn exceptions_come_before_what_masquerades() {
    let part = part(&["192.0.2.0/24"], &["10.0.0.1", "10.0.0.2"]);
    let text = changes(&Saved::default(), &ours(), &part, true).unwrap();
    let at = |word: &str| text.find(word).unwrap_or_else(|| panic!("no {word} in {text}"));
    let masquerade = at("-j MASQUERADE");
    for word in ["-d 192.0.2.0/24 -j RETURN", "-d 10.0.0.1/32 -j RETURN", "-d 10.0.0.2/32 -j RETURN"] {
        assert!(at(word) < masquerade, "{text}");
    }
    assert_eq!(text.lines().filter(|line| line.contains("/32")).count(), 2, "one rule for each node");
}

#[test]
fn an_old_iptables_masquerades_without_random_fully() {
    let text = changes(&Saved::default(), &ours(), &part(&[], &[]), false).unwrap();
    assert!(text.contains("-j MASQUERADE\n") && !text.contains("random"), "{text}");
    let saved = Saved::parse(&IN_PLACE.replace(" --random-fully", ""));
    assert_eq!(changes(&saved, &ours(), &part(&[], &[]), false), None);
}

#[test]
fn what_is_not_wanted_any_more_goes() {
    let part = FamilyRules { masquerade: Vec::new(), ..part(&[], &[]) };
    let expected = "*nat\n-D POSTROUTING -j WEFT-POSTRTG\n-F WEFT-POSTRTG\n-X WEFT-POSTRTG\nCOMMIT\n";
    assert_eq!(changes(&Saved::parse(IN_PLACE), &ours(), &part, true).as_deref(), Some(expected));
}

#[test]
fn flannels_chains_go_and_only_they() {
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
    assert_eq!(removal(&saved, &Places::flannels()).as_deref(), Some(expected));
    assert_eq!(present(&saved, &Places::flannels()), ["FLANNEL-POSTRTG"]);
    assert_eq!(removal(&Saved::default(), &Places::flannels()), None);
}

#[test]
fn chains_of_two_agents_differ_and_fit() {
    let places = Places::of("weft-1a2b3c4d");
    assert_eq!(places.masquerade.chain, "WEFT-1A2B3C4D-POSTRTG");
    assert!(places.masquerade.chain.len() <= 28 && places.forward.chain == "WEFT-1A2B3C4D-FWD");
}
