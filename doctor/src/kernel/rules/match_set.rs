// SPDX-License-Identifier: Apache-2.0
//! The test of a rule of iptables whether an address is in a set of ipset: `-m set --match-set NAME src`.

use super::{Matches, Tested};

/// Evaluates the test. `words` are those behind the option: the name of the set, and which fields of the packet are looked up. Only a single address is
/// evaluated.
pub(super) fn test(words: &[String], tested: Tested<'_>) -> Matches {
    let [name, field, ..] = words else { return Matches::Unknown };
    let (address, known_bits) = match field.as_str() {
        "src" => tested.source(),
        "dst" => tested.destination(),
        _ => return Matches::Unknown,
    };
    let found = tested.sets.and_then(|sets| sets.contains(name, address, known_bits));
    found.map_or(Matches::Unknown, Matches::from)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use weft_cni::iptables::words;

    use super::super::{Matches, Tested, matches};
    use crate::kernel::entries::Packet;
    use crate::kernel::ipset::AddressSets;

    /// A set with the name `bad` contains 192.0.2.9, and nothing is known of others.
    #[derive(Debug)]
    struct OneSet;

    impl AddressSets for OneSet {
        fn contains(&self, set: &str, address: IpAddr, known_bits: Option<u8>) -> Option<bool> {
            (set == "bad" && known_bits.is_none()).then(|| address.to_string() == "192.0.2.9")
        }
    }

    #[test]
    fn an_address_in_a_set_is_tested_with_the_other_tests_of_the_rule() {
        let packet = Packet { from: [192, 0, 2, 9].into(), to: [192, 0, 2, 1].into(), proto: None, port: Some(8472) };
        let tested = Tested { sets: Some(&OneSet), ..Tested::new(&packet, Some("eth0"), None) };
        for (rule, wanted) in [
            ("-m set --match-set bad src -j DROP", Matches::Yes),
            ("-m set --match-set bad dst -j DROP", Matches::No),
            ("-m set ! --match-set bad src -j DROP", Matches::No),
            ("-m set ! --match-set bad dst -j DROP", Matches::Yes),
            ("-m set --match-set bad src -i eth1 -j DROP", Matches::No),
            ("-m set --match-set bad src -m udp --dport 8472 -j DROP", Matches::Yes),
            ("-m set --match-set bad src -m udp --dport 53 -j DROP", Matches::No),
            ("-m set --match-set bad dst -m set --match-set bad src -j DROP", Matches::No),
            ("-m set --match-set bad src,dst -j DROP", Matches::Unknown),
            ("-m set --match-set bad src --return-nomatch -j DROP", Matches::Unknown),
            ("-m set --match-set other src -j DROP", Matches::Unknown),
            ("-m set ! --match-set other src -j DROP", Matches::Unknown),
            ("-m set --match-set", Matches::Unknown),
        ] {
            assert_eq!(matches(&words(rule), tested), wanted, "{rule}");
        }
        let rule = words("-m set --match-set bad src -j DROP");
        let of_a_subnet = Tested { known_bits: Some((24, 24)), ..tested };
        assert_eq!(matches(&rule, of_a_subnet), Matches::Unknown);
        assert_eq!(matches(&rule, Tested { sets: None, ..tested }), Matches::Unknown);
    }
}
