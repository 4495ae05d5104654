// SPDX-License-Identifier: Apache-2.0
//! What chains and rules that `iptables-save` printed mean for ours: what FORWARD does with packets, and which rules say the same. Pure
//! functions.

use ipnet::IpNet;
use weft_cni::iptables::{Chain, Saved, Table, target, words};

use crate::firewall::forward_chain::{Ending, Rule};

/// Returns true if FORWARD drops packets that no rule accepts: by its policy, or by a rule that drops every packet.
pub fn forward_drops(saved: &Saved) -> bool {
    let policy = forward(saved).and_then(|chain| chain.policy.as_deref());
    policy == Some("DROP") || forward_ending(saved) != Ending::Policy
}

/// Returns how FORWARD ends, whichever program wrote its rules.
pub fn forward_ending(saved: &Saved) -> Ending {
    let rules = forward(saved).map(|chain| chain.rules.as_slice()).unwrap_or_default();
    Ending::of(&rules.iter().map(|rule| role(rule, "")).collect::<Vec<_>>())
}

fn forward(saved: &Saved) -> Option<&Chain> {
    saved.table("filter").and_then(|table| table.get("FORWARD"))
}

/// Returns the number of rules in the two tables that our rules are in.
pub fn rules(saved: &Saved) -> usize {
    let tables = ["nat", "filter"].into_iter().filter_map(|name| saved.table(name));
    tables.flat_map(Table::values).map(|chain| chain.rules.len()).sum()
}

/// Returns what a rule does, as far as it matters for where ours go. `ours` is the name of our chain.
pub fn role(spec: &str, ours: &str) -> Rule {
    match target(&words(spec)) {
        Some((target, _)) if target == ours => Rule::Ours,
        Some(("DROP", _)) if ends_all(spec) => Rule::DropsAll,
        Some(_) if ends_all(spec) => Rule::RejectsAll,
        _ => Rule::Other,
    }
}

/// Returns true if no packet passes this rule.
fn ends_all(spec: &str) -> bool {
    let tests = options(spec).into_iter().any(|option| {
        let name = option.split(' ').next().unwrap_or_default();
        !matches!(name, "-j" | "--reject-with" | "--comment")
    });
    !tests && target(&words(spec)).is_some_and(|(target, _)| target == "DROP" || target == "REJECT")
}

/// Returns the options of a rule with their values, sorted, because versions of iptables print them in different orders.
pub fn options(spec: &str) -> Vec<String> {
    let mut options: Vec<String> = Vec::new();
    let mut negated = false;
    for word in words(spec) {
        let option = word.starts_with('-') && !word[1..].starts_with(|c: char| c.is_ascii_digit());
        match options.last_mut() {
            _ if word == "!" => negated = true,
            _ if option => {
                options.push(if negated { format!("! {word}") } else { word });
                negated = false;
            }
            Some(last) => {
                last.push(' ');
                last.push_str(&value(word));
            }
            None => options.push(word),
        }
    }
    // `-m NAME` loads a match; the options of the match show which one it is.
    options.retain(|option| !option.starts_with("-m "));
    options.sort();
    options
}

/// Returns an address in one spelling: `192.0.2.1` becomes `192.0.2.1/32`.
fn value(word: String) -> String {
    let net = word.parse::<IpNet>().ok().or_else(|| Some(IpNet::from(word.parse::<std::net::IpAddr>().ok()?)));
    net.map_or(word, |net| net.to_string())
}

#[cfg(test)]
mod tests {
    use super::{Saved, ends_all, forward_drops, options, rules};

    const TEXT: &str = "*mangle
:FORWARD DROP [0:0]
-A FORWARD -i eth1 -j DROP
COMMIT
*nat
:POSTROUTING ACCEPT [3:180]
-A POSTROUTING -j KUBE-POSTROUTING
COMMIT
*filter
:FORWARD DROP [0:0]
-A FORWARD -j DOCKER-USER
COMMIT
";

    #[test]
    fn forward_drops_by_its_policy_or_by_a_rule_and_the_side_tables_do_not_matter() {
        assert!(forward_drops(&Saved::parse(TEXT)));
        let open = TEXT.replace("*filter\n:FORWARD DROP", "*filter\n:FORWARD ACCEPT");
        assert!(!forward_drops(&Saved::parse(&open)));
        let rejects = open.replace("-j DOCKER-USER\n", "-j DOCKER-USER\n-A FORWARD -j REJECT\n");
        assert!(forward_drops(&Saved::parse(&rejects)));
        assert_eq!(rules(&Saved::parse(TEXT)), 2);
    }

    #[test]
    fn the_order_and_spelling_of_options_do_not_matter() {
        let one = "-s 10.5.0.0/16 ! -d 192.0.2.1/32 -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully";
        let two = "-m mark --mark 0x4000/0x4000 ! -d 192.0.2.1 -s 10.5.0.0/16 -j MASQUERADE --random-fully";
        assert_eq!(options(one), options(two));
        for other in [
            "-s 10.5.0.0/16 -d 192.0.2.1/32 -m mark --mark 0x4000/0x4000 -j MASQUERADE --random-fully",
            "-s 10.5.0.0/16 ! -d 192.0.2.1/32 -m mark ! --mark 0x4000/0x4000 -j MASQUERADE --random-fully",
            "-s 10.5.0.0/16 ! -d 192.0.2.1/32 -m mark --mark 0x4000/0x4000 -j MASQUERADE",
            "-s 10.5.0.0/16 ! -d 192.0.2.1/32 -m mark --mark 0x4000/0x4000 -p tcp -j MASQUERADE --random-fully",
        ] {
            assert_ne!(options(one), options(other), "{other}");
        }
    }

    #[test]
    fn only_a_drop_without_a_test_drops_all_packets() {
        for (spec, ends) in [
            ("-j DROP", true),
            ("-j REJECT --reject-with icmp-host-prohibited", true),
            ("-m comment --comment \"the rest\" -j DROP", true),
            ("-j ACCEPT", false),
            ("-i eth1 -j DROP", false),
            ("! -i eth1 -j DROP", false),
            ("-m conntrack --ctstate INVALID -j DROP", false),
        ] {
            assert_eq!(ends_all(spec), ends, "{spec}");
        }
    }
}
