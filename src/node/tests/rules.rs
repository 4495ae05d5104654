// SPDX-License-Identifier: Apache-2.0
//! The traffic rules, and subnet.env, which announces masquerading to the container runtime only when the rules exist.

use tokio::sync::watch;
use weft_backends::traffic_rules::{Masquerade, Rules};

use super::{CONFIG, TestNode, local, put, removed, stored};
use crate::firewall::fake::FakeFilter;
use crate::firewall::reconciler::{Handle, NoOthers, State, run};
use crate::kernel::{Notice, Outcome};
use crate::node::status::FailureCounts;
use crate::node::tests::lease;
use crate::observe::history::Query;
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::status::PeerState;
use crate::options::{Fences, OnLostLease, RuleOptions};
use crate::pass::Cause;
use weft_backends::state::{Fence, Key, ObservedValue, Route, Value};
use weft_subnet::cidr::Family;
use weft_subnet::lease::Record;
use weft_subnet::source::{Event, RecordChange};

fn masquerading() -> RuleOptions {
    RuleOptions { masquerade: Some(Masquerade::default()), forward: true, ..RuleOptions::default() }
}

/// A node with a packet filter in memory. It is not started yet.
fn with_rules(rules: RuleOptions) -> (TestNode, FakeFilter) {
    let mut test = TestNode::with(OnLostLease::Hold, rules);
    let (handle, mut port) = Handle::new();
    let fake = FakeFilter::default();
    let resync = std::time::Duration::from_millis(20);
    let filter = Box::new(fake.clone());
    tokio::task::spawn_local(async move { run(filter, Box::new(NoOthers), &mut port, resync).await });
    test.node.attach_rules(handle);
    (test, fake)
}

async fn start(test: &mut TestNode) {
    test.node.full_pass(Cause::Start).await;
    let records = vec![stored("10.5.1.0-24", "192.168.0.1"), stored("10.5.2.0-24", "192.168.0.2")];
    test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
}

/// Waits for a new state of the rules.
async fn rules_changed(test: &mut TestNode) {
    let mut state = test.node.rules.reconciler.as_ref().unwrap().state.clone();
    tokio::time::timeout(std::time::Duration::from_secs(10), state.changed()).await.expect("a new state").unwrap();
    test.node.rules_changed();
}

/// Waits until rules that were delayed are computed.
async fn until_computed(test: &mut TestNode) {
    while let Some(due) = test.node.rules.due {
        assert!(test.node.next_wake().unwrap() <= due, "the node must wake up for the rules");
        tokio::time::sleep_until(due).await;
        test.node.tick().await;
    }
}

fn env(test: &TestNode) -> Option<String> {
    std::fs::read_to_string(&test.file).ok()
}

#[tokio::test]
async fn subnet_env_waits_for_the_rules() {
    local(async {
        let (mut test, fake) = with_rules(masquerading());
        fake.fail_writes(Some("no such table"));
        start(&mut test).await;
        assert_eq!(env(&test), None, "the rules are not written yet");
        rules_changed(&mut test).await;
        assert_eq!(env(&test), None, "the rules cannot be written");
        assert!(!test.node.status().rules.in_place);
        let status = test.node.status();
        assert!(
            !status.ready
                && status.problems.contains(&Problem::new(ProblemKind::Rules, "rules: run fake: no such table")),
            "{:?}",
            status.problems
        );
        fake.fail_writes(None);
        rules_changed(&mut test).await;
        assert!(env(&test).unwrap().contains("FLANNEL_IPMASQ=true"));
        assert!(test.node.status().ready);
        assert!(fake.rules().masquerades());
        // A later failure does not change subnet.env, but the node is not ready any more.
        fake.fail_writes(Some("flushed, and read-only now"));
        fake.flush();
        rules_changed(&mut test).await;
        assert!(env(&test).unwrap().contains("FLANNEL_IPMASQ=true"));
        assert!(!test.node.status().ready);
        std::fs::remove_file(&test.file).unwrap();
        test.node.write_subnet_file();
        assert!(env(&test).unwrap().contains("FLANNEL_IPMASQ=true"), "pods that start now get what others have");
    })
    .await;
}

/// The rules of an earlier net-conf may masquerade other packets.
#[tokio::test]
async fn subnet_env_does_not_take_other_rules_for_the_wanted_ones() {
    local(async {
        let mut test = TestNode::with(OnLostLease::Hold, masquerading());
        let ((wanted, asked), (written, state)) = (watch::channel(None), watch::channel(State::default()));
        test.node.attach_rules(Handle { wanted, state });
        start(&mut test).await;
        let status = test.node.status();
        let is_shown = status.problems.contains(&Problem::new(ProblemKind::Rules, "rules: not written yet"));
        assert!(!status.ready && is_shown, "{:?}", status.problems);
        for (in_place, is_announced) in [(Some(Rules::default()), false), (asked.borrow().clone(), true)] {
            written.send(State { in_place, ..State::default() }).unwrap();
            test.node.rules_changed();
            assert_eq!(env(&test).is_some_and(|text| text.contains("FLANNEL_IPMASQ=true")), is_announced);
        }
    })
    .await;
}

#[tokio::test]
async fn a_failure_of_forward_rules_alone_does_not_block_the_node() {
    local(async {
        let (mut test, fake) = with_rules(RuleOptions { forward: true, ..RuleOptions::default() });
        fake.fail_writes(Some("no such table"));
        start(&mut test).await;
        assert!(env(&test).unwrap().contains("FLANNEL_IPMASQ=false"));
        rules_changed(&mut test).await;
        let status = test.node.status();
        let is_shown = status.problems.contains(&Problem::new(ProblemKind::Rules, "rules: run fake: no such table"));
        assert!(status.ready && is_shown, "{:?}", status.problems);
    })
    .await;
}

#[tokio::test]
async fn rules_change_with_net_conf_and_with_the_nodes_that_they_except() {
    local(async {
        let (mut test, fake) = with_rules(masquerading());
        start(&mut test).await;
        rules_changed(&mut test).await;
        assert_eq!(fake.writes(), 1);
        let conf = CONFIG.replacen('{', r#"{"MasqueradeToNodes":false,"MasqueradeExcept":["172.16.0.0/12"],"#, 1);
        test.node.store_changed(vec![Event::Config(conf)]).await;
        rules_changed(&mut test).await;
        let text = fake.rules().to_string();
        assert!(text.contains("from 10.5.0.0/16 to 172.16.0.0/12 return"), "{text}");
        assert!(text.contains("from 10.5.0.0/16 to one of 192.168.0.2 return"), "{text}");
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.3.0-24", "192.168.0.3")])]).await;
        until_computed(&mut test).await;
        rules_changed(&mut test).await;
        assert!(fake.rules().to_string().contains("to one of 192.168.0.2 192.168.0.3 return"));
        assert_eq!(fake.writes(), 3);
        let history = test.node.context.recorder.query(&Query::default());
        let of_rules = history.iter().filter(|line| line.contains(r#""cause":"rules","event":"other traffic rules"#));
        assert_eq!(of_rules.count(), 3, "each write is in the history: {history:#?}");
        fake.flush();
        rules_changed(&mut test).await;
        let history = test.node.context.recorder.query(&Query::default());
        let restored = r#""cause":"rules","event":"another program changed the traffic rules"#;
        assert_eq!(history.iter().filter(|line| line.contains(restored)).count(), 1, "{history:#?}");
        let rules = test.node.status().rules;
        assert_eq!((rules.in_place, rules.writes, rules.mended), (true, 4, 1));
        let text = test.node.context.reporter.metrics.render_classic(tokio::time::Instant::now());
        for line in ["weft_rules_in_place 1", "weft_rules_writes_total 4", "weft_rules_mended_total 1"] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    })
    .await;
}

/// The rules are not computed for each renewal and each new node, and the last change is not forgotten.
#[tokio::test]
async fn many_changes_of_nodes_lead_to_few_computations_of_the_rules() {
    local(async {
        let (mut test, fake) = with_rules(masquerading());
        let conf = CONFIG.replacen('{', r#"{"MasqueradeToNodes":false,"#, 1);
        test.node.store_changed(vec![Event::Config(conf)]).await;
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(test.node.rules.computations, 1, "the rules need the nodes");
        start(&mut test).await;
        let (began, before) = (std::time::Instant::now(), test.node.rules.computations);
        for n in 3..250 {
            let (key, ip) = (format!("10.5.{n}.0-24"), format!("192.168.0.{n}"));
            test.node.store_changed(vec![Event::Changes(vec![put(&key, &ip)])]).await;
            // Another BackendData does not change the rules.
            let mut again = stored(&key, &ip);
            again.lease.as_mut().unwrap().attrs.backend_data = Some("{}".into());
            test.node.store_changed(vec![Event::Changes(vec![RecordChange::Written(again)])]).await;
        }
        let seconds = began.elapsed().as_secs();
        let times = test.node.rules.computations - before;
        assert!(times <= seconds + 1, "{times} in {seconds} s");
        until_computed(&mut test).await;
        let all = async {
            while !fake.rules().to_string().contains("to one of 248 nodes return") {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(20), all).await.expect("the rules must name all nodes");
        let times = test.node.rules.computations;
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.9.0-24", "192.168.0.9")])]).await;
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(test.node.rules.computations, times, "nothing has changed");
    })
    .await;
}

#[tokio::test]
async fn a_fence_needs_no_route_in_the_main_table_and_excepts_nodes_inside_network() {
    local(async {
        let fences = Fences { fail_closed: true, blackhole: true };
        let (mut test, _) = with_rules(RuleOptions { fences, ..RuleOptions::default() });
        start(&mut test).await;
        let key = Key::Fence(Family::V4);
        let net = |text: &str| Some(text.parse().unwrap());
        let fence = Fence { unreachable: net("10.5.0.0/16"), blackhole: net("10.5.1.0/24"), whole: true };
        let seen = |test: &TestNode, key: &Key| test.kernel.entries().get(key).map(|seen| seen.value.clone());
        assert_eq!(seen(&test, &key), Some(Value::fence(fence)));
        let drops = |seen: &ObservedValue| matches!(seen.value, Value::Route(Route::Unreachable | Route::Blackhole));
        assert!(!test.kernel.entries().iter().any(|(_, seen)| drops(seen)));
        // A lease names an address of a pod as that of its node. This address is excepted, and nothing else changes.
        let open = Key::Open("10.5.77.9".parse().unwrap());
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.7.0-24", "10.5.77.9")])]).await;
        assert_eq!((seen(&test, &open), seen(&test, &key)), (Some(Value::Open), Some(Value::fence(fence))));
        // The exception stays while one of two leases names the address.
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.8.0-24", "10.5.77.9")])]).await;
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.7.0-24")])]).await;
        assert_eq!(seen(&test, &open), Some(Value::Open));
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.8.0-24", "192.168.0.8")])]).await;
        assert_eq!(seen(&test, &open), None);
        // Another program removes the fence and adds an exception. The notification leads to a comparison of the fence alone.
        test.kernel.disturb(key, None, false);
        test.kernel.disturb(open, Some(ObservedValue { value: Value::Open, protocol: 0, mark: false }), false);
        test.node.kernel_changed(vec![Notice::Fence]).await;
        assert_eq!((seen(&test, &open), seen(&test, &key)), (None, Some(Value::fence(fence))));
        let status = test.node.status();
        let text = "forwarded packets without a route of their own: unreachable 10.5.0.0/16, blackhole 10.5.1.0/24";
        assert_eq!(status.rules.fence.as_deref(), Some(text));
    })
    .await;
}

/// This happens on a kernel without policy routing.
#[tokio::test]
async fn a_fence_that_the_kernel_refuses_is_a_problem_but_the_node_is_ready() {
    local(async {
        let fences = Fences { fail_closed: true, blackhole: false };
        let (mut test, _) = with_rules(RuleOptions { fences, ..RuleOptions::default() });
        let key = Key::Fence(Family::V4);
        test.kernel.fail(key, Some(Outcome::Fatal("not supported".into())));
        start(&mut test).await;
        test.node.report();
        let status = test.node.status();
        let text = "--fail-closed, --ip-blackhole-route: fence for forwarded IPv4 packets: not supported";
        assert!(status.problems.iter().any(|problem| problem.text == text), "{:?}", status.problems);
        assert_eq!(status.rules.fence.as_deref(), Some(text));
        let states: Vec<PeerState> = status.peers.iter().map(|peer| peer.state).collect();
        assert_eq!((states, test.node.statistics.failure_counts.pending), (vec![PeerState::Programmed], 0));
    })
    .await;
}

#[tokio::test]
async fn the_guard_drops_nothing_until_every_lease_names_its_tunnel_address() {
    local(async {
        let (mut test, _) = with_rules(RuleOptions { guard: true, ..RuleOptions::default() });
        test.node.full_pass(Cause::Start).await;
        let peers = |test: &TestNode| {
            let entries = test.kernel.entries();
            entries.keys().filter(|key| matches!(key, Key::Peer(_))).map(|key| key.to_string()).collect::<Vec<_>>()
        };
        let record = |key: &str, ip: &str, tunnel: Option<&str>| {
            let mut lease = lease(key, ip);
            lease.attrs.tunnel_ip = tunnel.map(|ip| ip.parse().unwrap());
            Record { id: lease.id.clone(), lease: Ok(lease) }
        };
        let records = vec![
            record("10.5.1.0-24", "192.168.0.1", Some("192.168.0.1")),
            record("10.5.2.0-24", "192.168.0.2", Some("192.168.0.22")),
        ];
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        assert_eq!(peers(&test), ["tunnel peer 192.168.0.2", "tunnel peer 192.168.0.22"]);
        // host-gw has no tunnel to guard.
        let chains = test.kernel.entries().keys().filter(|key| matches!(key, Key::Guard(_))).count();
        assert_eq!(chains, 0);
        assert_eq!(test.node.plan.guard().unwrap(), "on: tunnel packets are taken from peers alone (1 of them)");
        test.node
            .store_changed(vec![Event::Changes(vec![RecordChange::Written(record(
                "10.5.3.0-24",
                "192.168.0.3",
                None,
            ))])])
            .await;
        assert_eq!(peers(&test).len(), 3);
        assert!(test.node.plan.guard().unwrap().starts_with("off: 1 of 2 leases"));
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.3.0-24")])]).await;
        assert_eq!(peers(&test), ["tunnel peer 192.168.0.2", "tunnel peer 192.168.0.22"]);
        // Another program empties the table. The notification leads to a comparison of the guard alone.
        let (peer, value) = (Key::Peer("192.168.0.22".parse().unwrap()), Value::Peer);
        test.kernel.disturb(peer, None, false);
        test.node.kernel_changed(vec![Notice::Guard]).await;
        assert_eq!(test.kernel.entries().get(&peer).map(|seen| seen.value.clone()), Some(value));
        let attrs = test.node.plan.advertise(test.node.plan.host()).unwrap();
        assert_eq!(attrs.tunnel_ip, "192.168.0.1".parse().ok(), "our lease must say where our packets come from");
    })
    .await;
}

/// This happens on a kernel without nftables.
#[tokio::test]
async fn a_guard_that_the_kernel_refuses_is_a_problem_of_no_peer() {
    local(async {
        let (mut test, _) = with_rules(RuleOptions { guard: true, ..RuleOptions::default() });
        let key = Key::Peer("192.168.0.2".parse().unwrap());
        test.kernel.fail(key, Some(Outcome::Fatal("not supported".into())));
        start(&mut test).await;
        test.node.report();
        let status = test.node.status();
        assert!(status.rules.guard.as_deref().unwrap().starts_with("incomplete"), "{:?}", status.rules.guard);
        assert!(status.problems.iter().any(|problem| problem.kind == ProblemKind::Guard), "{:?}", status.problems);
        let states: Vec<PeerState> = status.peers.iter().map(|peer| peer.state).collect();
        assert_eq!(states, [PeerState::Programmed], "its routes are in the kernel");
        let version = test.node.passer.pending().version();
        assert_eq!(test.node.statistics.failure_counts, FailureCounts { version, pending: 0, failed: 0 });
        test.kernel.fail(key, None);
        test.node.full_pass(Cause::Start).await;
        let status = test.node.status();
        assert!(!status.problems.iter().any(|problem| problem.kind == ProblemKind::Guard), "{:?}", status.problems);
    })
    .await;
}

#[tokio::test]
async fn the_guard_accepts_an_address_of_two_peers_until_both_are_gone() {
    local(async {
        let (mut test, _) = with_rules(RuleOptions { guard: true, ..RuleOptions::default() });
        start(&mut test).await;
        let change = |key: &str, public: &str| {
            let mut lease = lease(key, public);
            lease.attrs.tunnel_ip = "192.168.0.30".parse().ok();
            RecordChange::Written(Record { id: lease.id.clone(), lease: Ok(lease) })
        };
        let accepts = |test: &TestNode, ip: &str| test.kernel.entries().get(&Key::Peer(ip.parse().unwrap())).is_some();
        test.node.store_changed(vec![Event::Changes(vec![change("10.5.3.0-24", "192.168.0.30")])]).await;
        test.node.store_changed(vec![Event::Changes(vec![change("10.5.4.0-24", "192.168.0.40")])]).await;
        assert!(accepts(&test, "192.168.0.30") && accepts(&test, "192.168.0.40"));
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.3.0-24")])]).await;
        assert!(accepts(&test, "192.168.0.30"), "the other peer still sends from this address");
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.4.0-24")])]).await;
        assert!(!accepts(&test, "192.168.0.30") && !accepts(&test, "192.168.0.40"));
    })
    .await;
}

/// Otherwise connections of two pods could compete for one source port.
#[tokio::test]
async fn source_ports_are_random_unless_the_flag_says_otherwise() {
    local(async {
        for fully_random in [true, false] {
            let how = Masquerade { fully_random, ..Masquerade::default() };
            let (mut test, fake) = with_rules(RuleOptions { masquerade: Some(how), ..RuleOptions::default() });
            start(&mut test).await;
            rules_changed(&mut test).await;
            let text = fake.rules().to_string();
            assert!(text.contains("masquerade"), "{text}");
            assert_eq!(text.contains("masquerade fully-random"), fully_random, "{text}");
        }
    })
    .await;
}
