// SPDX-License-Identifier: Apache-2.0
//! How the rules of a fence are written and read, and the order in which a fence is changed.

use super::*;

fn written(w: &mut Writer) -> Vec<u8> {
    w.end(1);
    w.bytes().to_vec()
}

#[test]
fn rules_are_read_as_they_were_written() {
    let numbers = Numbers::of_alias("weft /run/flannel/subnet.env");
    for (family, net) in [(Family::V4, "100.64.0.0/10"), (Family::V6, "fd00:10::/48")] {
        for zone in [Zone::Own, Zone::Network] {
            for wanted in numbers.rules(zone, net.parse().unwrap()) {
                let mut w = Writer::default();
                messages::add_rule(&mut w, &wanted, family, 90);
                let bytes = written(&mut w);
                let m = all(&bytes).next().unwrap();
                assert_eq!(messages::read_rule(m.payload), Some((wanted, Some(90))));
                assert!(numbers.has_rule(&m));
            }
        }
    }
}

#[test]
fn a_rule_that_tests_something_else_is_not_equal_to_ours() {
    let numbers = Numbers::of_alias("weft /run/flannel/subnet.env");
    let [plain, _] = numbers.rules(Zone::Network, "10.5.0.0/16".parse().unwrap());
    // FRA_FWMARK, and an attribute that the crate does not know.
    for attribute in [10, 99] {
        let mut w = Writer::default();
        messages::add_rule(&mut w, &plain, Family::V4, 90);
        w.attr_u32(attribute, 7);
        let (found, _) = messages::read_rule(all(&written(&mut w)).next().unwrap().payload).unwrap();
        assert!(found.other && found != plain, "attribute {attribute}");
    }
    for len in 0..12 {
        assert_eq!(messages::read_rule(&vec![0; len]), None, "a message of {len} bytes");
    }
}

#[test]
fn two_agents_have_different_numbers_and_the_usual_file_has_the_first() {
    let usual = Numbers::of_alias("weft /run/flannel/subnet.env");
    assert_eq!(usual, Numbers { pref: 30_200, table: 90_000 });
    let other = Numbers::of_alias("weft /run/second/subnet.env");
    assert!(other.pref >= usual.pref + 4 && other.pref + 3 < 32_766 && other.table >= usual.table + 2, "{other:?}");
}

/// Next to the numbers of an agent are those of another one, whose fence must stay.
#[test]
fn an_agent_has_four_preferences_and_two_tables() {
    let numbers = Numbers { pref: 30_204, table: 90_002 };
    let prefs: Vec<u32> = (30_200..30_212).filter(|pref| numbers.has_pref(*pref)).collect();
    let tables: Vec<u32> = (90_000..90_008).filter(|table| numbers.has_table(*table)).collect();
    assert_eq!((prefs, tables), (vec![30_204, 30_205, 30_206, 30_207], vec![90_002, 90_003]));
}

/// `weft doctor` finds the tables of all agents by this range.
#[test]
fn every_table_of_a_fence_is_in_the_range_of_fences() {
    let tables = (0..100).flat_map(|at| {
        let numbers = Numbers::of_alias(&format!("weft /run/{at}/subnet.env"));
        [Zone::Own, Zone::Network].map(|zone| numbers.table(zone))
    });
    let tables: Vec<u32> = tables.collect();
    assert!(tables.iter().all(|table| FENCE_TABLES.contains(table)), "{tables:?}");
    let middle = FENCE_TABLES.start.midpoint(FENCE_TABLES.end);
    assert!(tables.iter().any(|table| *table > middle), "half of the range would be enough: {tables:?}");
}

/// The policy rules and tables of a kernel, as far as a fence needs them, for IPv4. The main table has the routes of `PEERS` and a
/// default route.
#[derive(Debug, Clone, Default)]
struct Model {
    rules: Vec<Rule>,
    routes: Vec<Route>,
}

/// Subnets of peers in the old and in the new Network.
const PEERS: [&str; 3] = ["10.5.2.0/24", "10.6.2.0/24", "10.9.2.0/24"];

#[derive(Debug, PartialEq, Eq)]
enum Lookup {
    Peer,
    Dropped,
    Default,
}

impl Model {
    fn of(table: &FenceTable, fence: &Fence) -> Model {
        let (rules, routes) = table.wanted(fence);
        Model { rules, routes }
    }

    fn present(&self) -> Present {
        let rules = self.rules.iter().map(|rule| (*rule, Vec::new())).collect();
        Present { rules, routes: self.routes.clone(), open: Vec::new() }
    }

    fn apply(&mut self, step: &Step<'_>) {
        match step {
            Step::AddRule(rule) => self.rules.push(*rule),
            Step::AddRoute(route) => self.routes.push(*route),
            Step::RemoveRule(rule, _) => self.rules.retain(|other| other != rule),
            Step::RemoveRoute(route) => self.routes.retain(|other| other != route),
        }
        // Rules with the same preference stay in the order in which they were added.
        self.rules.sort_by_key(|rule| rule.pref);
    }

    /// Returns what happens to a forwarded packet with this destination.
    fn judge(&self, to: &str) -> Lookup {
        let to: IpAddr = to.parse().unwrap();
        let peer = PEERS.iter().any(|net| net.parse::<IpNet>().unwrap().contains(&to));
        for rule in &self.rules {
            let concerned = rule.to.is_none_or(|net| net.contains(&to));
            if concerned && rule.table == MAIN && peer && rule.suppress < 24 {
                return Lookup::Peer;
            }
            let caught = |route: &Route| route.table == rule.table && route.net.contains(&to);
            if concerned && rule.table != MAIN && self.routes.iter().any(caught) {
                return Lookup::Dropped;
            }
        }
        if peer { Lookup::Peer } else { Lookup::Default }
    }
}

fn table() -> FenceTable {
    FenceTable::new("weft /run/flannel/subnet.env", 90)
}

fn fence(unreachable: Option<&str>, blackhole: Option<&str>) -> Fence {
    let net = |text: Option<&str>| text.map(|text| text.parse().unwrap());
    Fence { unreachable: net(unreachable), blackhole: net(blackhole), whole: true }
}

#[test]
fn a_changed_fence_loses_no_routed_packet_and_has_no_gap() {
    let own = Some("10.5.1.0/24");
    let nothing = fence(None, None);
    let (five, six, wide) =
        (fence(Some("10.5.0.0/16"), own), fence(Some("10.6.0.0/16"), own), fence(Some("10.0.0.0/8"), own));
    let moved = fence(Some("10.5.0.0/16"), Some("10.5.4.0/24"));
    // Addresses that nobody has, in each Network and in the subnet of this node.
    let missing = ["10.5.3.1", "10.6.3.1", "10.9.3.1", "10.5.1.77", "10.5.4.77"];
    for (old, new) in
        [(five, six), (six, five), (five, wide), (wide, five), (nothing, five), (five, nothing), (five, moved)]
    {
        let table = table();
        let mut model = Model::of(&table, &old);
        let target = Model::of(&table, &new);
        let dropped =
            |model: &Model| -> Vec<bool> { missing.iter().map(|to| model.judge(to) == Lookup::Dropped).collect() };
        let (before, after) = (dropped(&model), dropped(&target));
        let present = model.present();
        for step in table.steps(&present, &new).iter().flatten() {
            model.apply(step);
            for peer in ["10.5.2.7", "10.6.2.7", "10.9.2.7"] {
                assert_eq!(model.judge(peer), Lookup::Peer, "{peer}, {old} to {new}, after {step:?}");
            }
            let covers = |wanted: &[bool]| dropped(&model).iter().zip(wanted).all(|(is, wanted)| *is || !wanted);
            assert!(covers(&before) || covers(&after), "{old} to {new}: a gap after {step:?}");
        }
        assert_eq!(dropped(&model), after, "{old} to {new}");
        let same = |one: &Model, other: &Model| one.rules.iter().all(|rule| other.rules.contains(rule));
        assert!(same(&model, &target) && same(&target, &model) && model.routes.len() == target.routes.len());
    }
}

#[test]
fn the_old_fence_stays_where_the_new_one_is_refused() {
    let table = table();
    let present = Model::of(&table, &fence(Some("10.5.0.0/16"), None)).present();
    for refused in [true, false] {
        let mut sent = Vec::new();
        let answer = in_order(table.steps(&present, &fence(Some("10.6.0.0/16"), None)), |steps| {
            sent.extend(steps.iter().map(|step| matches!(step, Step::AddRule(_) | Step::AddRoute(_))));
            let refusal = Refusal { seq: 1, errno: Errno::ENOBUFS, code: Errno::ENOBUFS as i32, text: String::new() };
            Ok(if refused { Err(refusal) } else { Ok(()) })
        });
        assert_eq!(answer.unwrap().is_err(), refused);
        assert_eq!(sent.contains(&false), !refused, "removals are sent only after successful additions");
    }
}
