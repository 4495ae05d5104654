// SPDX-License-Identifier: Apache-2.0
//! Rules of iptables that match only some packets: up to a rate, beyond it, or at random.

use super::{Matches, Tested, matches};

/// The options of the matches `statistic` and `limit`. Those of `hashlimit` begin with its name.
const OPTIONS: [&str; 6] = ["--mode", "--probability", "--every", "--packet", "--limit", "--limit-burst"];
const HASHLIMIT: &str = "--hashlimit-";

/// Returns true if a rule has tests of a rate or a random number, and all its other tests match.
pub(super) fn decides(spec: &[String], tested: Tested<'_>) -> bool {
    let others = others(spec);
    others.len() < spec.len() && matches(&others, tested) == Matches::Yes
}

/// Returns the words of a rule without the options that test a rate or a random number, and without their values.
fn others(spec: &[String]) -> Vec<String> {
    let mut kept: Vec<String> = Vec::new();
    let mut by_chance = false;
    for word in spec {
        if word.starts_with('-') || word == "!" {
            by_chance = OPTIONS.contains(&word.as_str()) || word.starts_with(HASHLIMIT);
            if by_chance && kept.last().is_some_and(|last| last == "!") {
                kept.pop();
            }
        }
        if !by_chance {
            kept.push(word.clone());
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_cni::iptables::words;

    #[test]
    fn the_options_of_a_rate_and_of_chance_are_left_out_with_their_values() {
        for (rule, wanted) in [
            (
                "-p udp -m udp --dport 8472 -m statistic --mode random ! --probability 0.5 -j DROP",
                "-p udp -m udp --dport 8472 -m statistic -j DROP",
            ),
            ("! -s 10.0.0.0/8 -m limit --limit 9/sec --limit-burst 5 -j DROP", "! -s 10.0.0.0/8 -m limit -j DROP"),
            (
                "-m hashlimit --hashlimit-above 9/sec --hashlimit-rate-match --hashlimit-name a -i eth0 -j DROP",
                "-m hashlimit -i eth0 -j DROP",
            ),
            ("-m set ! --match-set bad src -j DROP", "-m set ! --match-set bad src -j DROP"),
        ] {
            assert_eq!(others(&words(rule)).join(" "), wanted);
        }
    }
}
