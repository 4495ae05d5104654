// SPDX-License-Identifier: Apache-2.0
//! What cannot be seen from outside: bytes that are not known, and the edges of ranges. tests/mesh/explain.rs compares the rest with what the
//! kernel does with real packets.

use std::collections::HashMap;
use std::io;
use std::rc::Rc;

use weft_netlink::wire::Writer;

use super::attributes::expr;
use super::decode;
use super::instruction::{Comparison, Destination, Field, Instruction, Rule, Verdict};
use super::set::{Data, Element, Found, Set};
use super::walk::{Table, follow};
use crate::kernel::entries::{Packet, Proto};
use crate::kernel::rules::{Fate, Outcome, Tested};

fn element(key: &[u8]) -> Element {
    Element { key: Some(key.to_vec()), last: None, is_end: false, data: Data::Nothing }
}

fn known(key: &[u8]) -> Vec<Option<u8>> {
    key.iter().copied().map(Some).collect()
}

#[test]
fn a_range_contains_its_first_value_and_not_the_one_behind_its_last() {
    let end = |key: &[u8]| Element { is_end: true, ..element(key) };
    // 3 to 5, and 6 to 9, in no order. The kernel also lists an end before the first range.
    let elements = vec![element(&[6]), end(&[6]), end(&[10]), element(&[3]), end(&[0])];
    let set = Set { elements, has_ranges: true, fields: vec![] };
    for (key, is_inside) in [(2, false), (3, true), (5, true), (6, true), (9, true), (10, false), (255, false)] {
        let wanted = if is_inside { Found::Yes(Data::Nothing) } else { Found::No };
        assert_eq!(set.find(&known(&[key])), wanted, "{key}");
    }
    assert_eq!(set.find(&[None]), Found::Maybe(Data::Nothing));
}

#[test]
fn a_subnet_is_inside_a_range_only_as_a_whole() {
    let end = |key: &[u8]| Element { is_end: true, ..element(key) };
    let of = |ranges: &[[[u8; 2]; 2]]| Set {
        elements: ranges.iter().flat_map(|[first, behind]| [element(first), end(behind)]).collect(),
        has_ranges: true,
        fields: vec![],
    };
    let subnet = [Some(9), None];
    for (ranges, wanted) in [
        (&[[[9, 0], [10, 0]]][..], Found::Yes(Data::Nothing)),
        (&[[[3, 7], [12, 1]]], Found::Yes(Data::Nothing)),
        (&[[[9, 0], [9, 128]]], Found::Maybe(Data::Nothing)),
        (&[[[9, 7], [9, 8]]], Found::Maybe(Data::Nothing)),
        (&[[[8, 0], [9, 0]], [[10, 0], [11, 0]]], Found::No),
    ] {
        assert_eq!(of(ranges).find(&subnet), wanted, "{ranges:?}");
    }
}

#[test]
fn each_field_of_a_joined_key_has_its_own_range() {
    let first = [10, 5, 0, 0, 0, 80, 0, 0];
    let one = Element { last: Some(vec![10, 5, 255, 255, 0, 90, 0, 0]), ..element(&first) };
    let set = Set { elements: vec![one], has_ranges: true, fields: vec![4, 2] };
    let found = |key: [u8; 8]| set.find(&known(&key)) != Found::No;
    assert!(found([10, 5, 7, 7, 0, 85, 0, 0]));
    assert!(!found([10, 5, 7, 7, 0, 91, 0, 0]), "the port is outside");
    assert!(!found([10, 6, 0, 0, 0, 85, 0, 0]), "the address is outside");
    let mut partly = known(&[10, 5, 7, 7]);
    partly.extend([None; 4]);
    assert_eq!(set.find(&partly), Found::Maybe(Data::Nothing), "the port is not known");
    partly[1] = Some(6);
    assert_eq!(set.find(&partly), Found::No, "the address alone excludes it");
}

#[test]
fn the_element_for_everything_else_matches_what_no_other_one_does() {
    let data = |verdict| Data::Verdict(verdict);
    let rest = Element { key: None, data: data(Verdict::Drop), ..element(&[]) };
    let set = Set { elements: vec![rest, Element { data: data(Verdict::Accept), ..element(&[1]) }], ..Set::default() };
    assert_eq!(set.find(&known(&[1])), Found::Yes(data(Verdict::Accept)));
    assert_eq!(set.find(&known(&[2])), Found::Yes(data(Verdict::Drop)));
}

#[derive(Default)]
struct Fake {
    chains: HashMap<&'static str, Vec<Vec<Instruction>>>,
    sets: HashMap<&'static str, Set>,
}

impl Table for Fake {
    fn rules(&mut self, chain: &str) -> io::Result<Rc<Vec<Rule>>> {
        let rules = self.chains.get(chain).cloned().unwrap_or_default().into_iter();
        Ok(Rc::new(rules.map(|instructions| Rule { instructions, handle: 4 }).collect()))
    }

    fn set(&mut self, name: &str) -> io::Result<Rc<Set>> {
        Ok(Rc::new(self.sets.get(name).cloned().unwrap_or_default()))
    }

    fn index(&self, link: &str) -> Option<u32> {
        ["lo", "cni0", "flannel.1"].iter().position(|known| *known == link).and_then(|at| u32::try_from(at + 1).ok())
    }
}

fn packet() -> Packet {
    Packet { from: "10.5.1.2".parse().unwrap(), to: "10.5.2.2".parse().unwrap(), proto: Some(Proto::Tcp), port: None }
}

fn outcome(fake: &mut Fake, packet: &Packet) -> Outcome {
    follow(fake, "base", Tested::new(packet, Some("cni0"), Some("flannel.1"))).unwrap()
}

fn port_is(port: u16) -> Vec<Instruction> {
    let load = Instruction::Load { field: Field::Transport(2), to: 0, len: 2 };
    vec![load, Instruction::Compare { at: 0, comparison: Comparison::Equal, data: port.to_be_bytes().to_vec() }]
}

#[test]
fn a_rule_that_tests_an_unknown_port_is_in_doubt_and_one_that_is_known_decides() {
    let rule = [port_is(80), vec![Instruction::Verdict(Verdict::Drop)]].concat();
    let mut fake = Fake { chains: HashMap::from([("base", vec![rule])]), ..Fake::default() };
    let doubt = outcome(&mut fake, &packet());
    assert_eq!(doubt.fate, None);
    assert_eq!(doubt.not_evaluated, Some((Fate::Dropped, "dport 80 drop (handle 4)".to_owned())));
    let decided = outcome(&mut fake, &Packet { port: Some(80), ..packet() });
    assert_eq!(decided.fate, Some((Fate::Dropped, "dport 80 drop (handle 4)".to_owned())));
    assert_eq!(outcome(&mut fake, &Packet { port: Some(81), ..packet() }), Outcome::default());
}

/// At a link, the protocol in the Ethernet header tells the two families apart.
#[test]
fn a_rule_for_one_family_at_a_link_does_not_match_the_other() {
    let load = Instruction::Load { field: Field::EtherType, to: 0, len: 2 };
    let test = Instruction::Compare { at: 0, comparison: Comparison::Equal, data: vec![0x86, 0xdd] };
    let rule = vec![load, test, Instruction::Verdict(Verdict::Drop)];
    let mut fake = Fake { chains: HashMap::from([("base", vec![rule])]), ..Fake::default() };
    assert_eq!(outcome(&mut fake, &packet()), Outcome::default());
    let v6 = Packet { from: "fd00::1".parse().unwrap(), to: "fd00::2".parse().unwrap(), ..packet() };
    let dropped = Some((Fate::Dropped, "meta protocol ip6 drop (handle 4)".to_owned()));
    assert_eq!(outcome(&mut fake, &v6).fate, dropped);
}

/// `iif lo accept` tests the index of the link. Many rulesets begin with this rule.
#[test]
fn a_link_is_known_by_its_index_too() {
    for (field, index, text) in [
        (Field::InputIndex, 2_u32, Some("iif 2 drop (handle 4)")),
        (Field::InputIndex, 1, None),
        (Field::OutputIndex, 3, Some("oif 3 drop (handle 4)")),
        (Field::OutputIndex, 2, None),
    ] {
        let test = Instruction::Compare { at: 0, comparison: Comparison::Equal, data: index.to_ne_bytes().to_vec() };
        let rule = vec![Instruction::Load { field, to: 0, len: 4 }, test, Instruction::Verdict(Verdict::Drop)];
        let mut fake = Fake { chains: HashMap::from([("base", vec![rule])]), ..Fake::default() };
        let wanted = text.map(|text| (Fate::Dropped, text.to_owned()));
        assert_eq!(outcome(&mut fake, &packet()), Outcome { fate: wanted, ..Outcome::default() }, "{index}");
    }
}

/// `ct status dnat accept`, as firewalld has it before it refuses everything else.
#[test]
fn a_rule_for_translated_packets_accepts_none_whose_destination_is_the_same() {
    let mask = 0x20_u32.to_ne_bytes().to_vec();
    let accept = vec![
        Instruction::Load { field: Field::ConnectionStatus, to: 0, len: 4 },
        Instruction::Mask { from: 0, to: 0, mask, xor: vec![0; 4] },
        Instruction::Compare { at: 0, comparison: Comparison::NotEqual, data: vec![0; 4] },
        Instruction::Verdict(Verdict::Accept),
    ];
    let base = vec![accept, vec![Instruction::Verdict(Verdict::Drop)]];
    let mut fake = Fake { chains: HashMap::from([("base", base)]), ..Fake::default() };
    let packet = packet();
    for (is_translated, wanted) in [(None, None), (Some(true), None), (Some(false), Some("drop (handle 4)"))] {
        let tested = Tested { is_translated, ..Tested::new(&packet, Some("cni0"), None) };
        let outcome = follow(&mut fake, "base", tested).unwrap();
        assert_eq!(outcome.certainly_dropped(), wanted, "{is_translated:?}");
    }
}

/// nft joins the tests of both addresses of IPv4 to one.
#[test]
fn a_rule_that_tests_both_addresses_at_once_decides() {
    for (to, is_dropped) in [([10, 5, 2, 2], true), ([10, 5, 2, 3], false)] {
        let load = Instruction::Load { field: Field::Network(12), to: 0, len: 8 };
        let data = [[10, 5, 1, 2], to].concat();
        let test = Instruction::Compare { at: 0, comparison: Comparison::Equal, data };
        let rule = vec![load, test, Instruction::Verdict(Verdict::Drop)];
        let mut fake = Fake { chains: HashMap::from([("base", vec![rule])]), ..Fake::default() };
        let text = "ip saddr 10.5.1.2 ip daddr 10.5.2.2 drop (handle 4)";
        let wanted = is_dropped.then(|| (Fate::Dropped, text.to_owned()));
        assert_eq!(outcome(&mut fake, &packet()), Outcome { fate: wanted, ..Outcome::default() }, "{to:?}");
    }
}

/// `limit name "some" drop` drops some packets. `counter name "all"` tests none.
#[test]
fn an_object_with_a_name_tests_the_packet_as_an_instruction_of_its_type_does() {
    let unknown = |name: &str| Instruction::Unknown { name: name.to_owned(), to: None };
    for (of_type, wanted) in [
        (Some(1_u32), Instruction::Harmless),
        (Some(2), unknown("quota")),
        (Some(4), unknown("limit")),
        (Some(5), unknown("connlimit")),
        (Some(10), unknown("synproxy")),
        // A map names the object, and may have none for the packet.
        (None, unknown("objref")),
    ] {
        let mut w = Writer::default();
        w.nest(expr::LIST_ELEM, |w| {
            w.attr_str(expr::NAME, "objref");
            w.nest(expr::DATA, |w| {
                of_type.into_iter().for_each(|number| w.attr(expr::OBJREF_IMM_TYPE, &number.to_be_bytes()));
            });
        });
        assert_eq!(decode::list(w.bytes()), [wanted], "{of_type:?}");
    }
}

#[test]
fn nothing_is_certain_behind_a_jump_that_is_not() {
    let limit = Instruction::Unknown { name: "limit".to_owned(), to: None };
    let base = vec![vec![limit, Instruction::Verdict(Verdict::Jump("other".to_owned()))]];
    let other = vec![vec![Instruction::Verdict(Verdict::Accept)], vec![Instruction::Verdict(Verdict::Drop)]];
    let mut fake = Fake { chains: HashMap::from([("base", base), ("other", other)]), ..Fake::default() };
    let outcome = outcome(&mut fake, &packet());
    assert_eq!(outcome.fate, None);
    assert_eq!(outcome.not_evaluated, Some((Fate::Dropped, "drop (handle 4)".to_owned())), "a drop is the worst");
}

#[test]
fn what_follows_a_rule_that_may_leave_the_chain_is_not_certain() {
    let local = u32::from(nix::libc::RTN_LOCAL).to_ne_bytes().to_vec();
    let fib = || Instruction::Load { field: Field::DestinationType, to: 0, len: 4 };
    let is_local = || Instruction::Compare { at: 0, comparison: Comparison::Equal, data: local.clone() };
    let leave = |verdict: Verdict| {
        vec![vec![fib(), is_local(), Instruction::Verdict(verdict)], vec![Instruction::Verdict(Verdict::Drop)]]
    };
    let packet = packet();
    for verdict in [Verdict::Return, Verdict::Goto("empty".to_owned())] {
        let jump = vec![vec![Instruction::Verdict(Verdict::Jump("other".to_owned()))]];
        let mut fake = Fake { chains: HashMap::from([("base", jump), ("other", leave(verdict))]), ..Fake::default() };
        let mut follow =
            |to_local| follow(&mut fake, "base", Tested { to_local, ..Tested::new(&packet, None, None) }).unwrap();
        let outcome = follow(None);
        assert_eq!(outcome.fate, None, "the kind of the address is not known");
        assert_eq!(outcome.not_evaluated, Some((Fate::Dropped, "drop (handle 4)".to_owned())));
        assert_eq!(follow(Some(true)), Outcome::default());
        assert_eq!(follow(Some(false)).certainly_dropped(), Some("drop (handle 4)"));
    }
}

#[test]
fn a_map_of_verdicts_may_let_a_packet_pass_that_it_may_also_drop() {
    let verdict = |port: u8, verdict| Element { data: Data::Verdict(verdict), ..element(&[0, port]) };
    let elements = vec![verdict(22, Verdict::Drop), verdict(80, Verdict::Return)];
    let lookup = Instruction::Lookup { at: 0, set: "ports".to_owned(), inside: true, into: Destination::Verdict };
    let load = Instruction::Load { field: Field::Transport(2), to: 0, len: 2 };
    let mut fake = Fake {
        chains: HashMap::from([("base", vec![vec![load, lookup], vec![Instruction::Verdict(Verdict::Drop)]])]),
        sets: HashMap::from([("ports", Set { elements, ..Set::default() })]),
    };
    let outcome = outcome(&mut fake, &packet());
    assert_eq!(outcome.fate, None, "with port 80, the last rule is not asked");
    assert_eq!(outcome.may_pass.as_deref(), Some("dport vmap @ports (handle 4)"));
}

#[test]
fn chains_that_call_each_other_for_ever_end() {
    let jump = |to: &str| vec![vec![Instruction::Verdict(Verdict::Jump(to.to_owned()))]];
    let mut fake = Fake { chains: HashMap::from([("base", jump("a")), ("a", jump("base"))]), ..Fake::default() };
    let outcome = outcome(&mut fake, &packet());
    assert!(outcome.not_evaluated.is_some_and(|(fate, rule)| fate == Fate::Dropped && rule.contains("jumps deep")));
}

#[test]
fn one_endpoint_of_a_service_is_chosen_at_random_and_quoted_with_its_address() {
    let random = Instruction::Unknown { name: "numgen".to_owned(), to: Some(0) };
    let lookup = Instruction::Lookup { at: 0, set: "endpoints".to_owned(), inside: true, into: Destination::Verdict };
    let dnat = vec![
        Instruction::Value { to: 0, data: vec![10, 5, 2, 3] },
        Instruction::Value { to: 16, data: vec![0, 53] },
        Instruction::Nat { source: false, address: Some(0), port: Some(16) },
    ];
    let to_endpoint = Data::Verdict(Verdict::Goto("endpoint".to_owned()));
    let elements = vec![Element { data: to_endpoint, ..element(&[0; 4]) }];
    let mut fake = Fake {
        chains: HashMap::from([("base", vec![vec![random, lookup]]), ("endpoint", vec![dnat])]),
        sets: HashMap::from([("endpoints", Set { elements, ..Set::default() })]),
    };
    let outcome = outcome(&mut fake, &packet());
    let wanted = (Fate::DestinationTranslated, "dnat to 10.5.2.3:53 (handle 4)".to_owned());
    assert_eq!(outcome.not_evaluated, Some(wanted));
}

/// `numgen random mod 10 < 3`, as nft writes it, beside a test of the port in the same register.
#[test]
fn a_rule_that_drops_at_random_names_what_its_other_tests_match() {
    let number = || Instruction::Unknown { name: "numgen".to_owned(), to: Some(0) };
    let order = || Instruction::ByteOrder { from: 0, to: 0, len: 4, size: 4 };
    let is_less = || Instruction::Compare { at: 0, comparison: Comparison::Less, data: vec![0, 0, 0, 3] };
    let random = || vec![number(), order(), is_less()];
    let drop = || vec![Instruction::Verdict(Verdict::Drop)];
    for (rule, is_named) in [
        ([port_is(80), random(), drop()].concat(), true),
        ([random(), port_is(80), drop()].concat(), true),
        ([port_is(81), random(), drop()].concat(), false),
        ([random(), port_is(81), drop()].concat(), false),
        ([port_is(80), drop()].concat(), false),
    ] {
        let mut fake = Fake { chains: HashMap::from([("base", vec![rule.clone()])]), ..Fake::default() };
        let outcome = outcome(&mut fake, &Packet { port: Some(80), ..packet() });
        assert_eq!(outcome.limited.is_some(), is_named, "{rule:?}: {outcome:?}");
    }
}
