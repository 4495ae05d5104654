// SPDX-License-Identifier: Apache-2.0
//! What changes in the kernel and the clock lead to: the repair of single entries, a full pass, or nothing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use weft_backends::link::{Foreign, Link};
use weft_backends::state::{Key, Name, ObservedValue, Value};
use weft_subnet::source::{Event, RecordChange};

use super::{CONFIG, TestNode, VXLAN, local, machine, put, stored, vxlan_lease};
use crate::kernel::fake::FakeKernel;
use crate::kernel::{AddrInfo, Notice, Outcome};
use crate::node::passes::MAX_SINGLE_ENTRIES;
use crate::node::schedule::MAX_IN_WINDOW;
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::status::PeerState;
use crate::options::OnLostLease;
use crate::pass::Cause;

const PEER: &str = "10.5.2.0/24";

fn route(net: &str) -> Key {
    Key::Route(net.parse().unwrap(), 0)
}

/// Removes the peer's route without a notification of the kernel.
fn remove_silently(test: &TestNode) {
    test.kernel.disturb(route(PEER), None, false);
    assert_eq!(test.via(PEER), None);
}

fn audits(test: &TestNode) -> u64 {
    test.node.statistics.full_passes.get("audit").cloned().unwrap_or(0)
}

#[tokio::test]
async fn an_audit_runs_after_its_interval_and_not_before() {
    local(async {
        let hour = Duration::from_secs(3600);
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        for round in 1..=3 {
            let before = Instant::now();
            test.node.full_pass(Cause::Kernel).await;
            let due = test.node.schedule.next_audit;
            assert!(before + hour <= due && due <= Instant::now() + hour, "the next audit must be one interval away");
            assert!(test.node.next_wake().is_some_and(|wake| wake <= due));
            remove_silently(&test);
            let passes = test.kernel.observations();
            test.node.tick().await;
            assert_eq!((test.kernel.observations(), test.via(PEER)), (passes, None), "it is not due yet");
            // The hour is over.
            test.node.schedule.next_audit = Instant::now();
            test.node.tick().await;
            assert_eq!((test.kernel.observations(), audits(&test)), (passes + 1, round));
            assert!(test.via(PEER).is_some());
            assert!(test.node.schedule.next_audit >= before + hour, "the next audit must be one interval away again");
        }
    })
    .await;
}

#[tokio::test]
async fn an_audit_runs_when_stale_entries_may_be_removed() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        let own = stored("10.5.1.0-24", "192.168.0.1");
        test.node.start(vec![Event::Snapshot { records: vec![own], reset: false }]).await;
        let until = test.node.passer.keep_stale_until.expect("a first list without peers removes nothing");
        assert_eq!(test.node.schedule.next_audit, until);
        // The grace time is over.
        let (stale, seen) = (Key::Route("10.5.8.0/24".parse().unwrap(), 0), {
            let (via, dev) = ("192.168.0.8".parse().unwrap(), Name::new("eth0").unwrap());
            let value = Value::Route(weft_backends::state::Route::Unicast { via, dev, onlink: false });
            ObservedValue { value, protocol: super::PROTOCOL, mark: false }
        });
        test.kernel.disturb(stale, Some(seen), false);
        test.node.full_pass(Cause::Kernel).await;
        assert!(test.kernel.entries().contains_key(&stale));
        test.node.passer.keep_stale_until = Some(Instant::now());
        test.node.schedule.next_audit = Instant::now();
        test.node.tick().await;
        assert!(!test.kernel.entries().contains_key(&stale));
        assert_eq!(test.node.passer.keep_stale_until, None);
    })
    .await;
}

#[tokio::test]
async fn lost_notifications_lead_to_a_full_pass() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        remove_silently(&test);
        test.node.kernel_changed(vec![Notice::Lost]).await;
        assert!(test.via(PEER).is_some());
    })
    .await;
}

#[tokio::test]
async fn few_entries_are_repaired_one_by_one_and_many_by_a_full_pass() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let gone = |count: usize| {
            let nets = (0..count).map(|n| format!("10.5.{}.{}/32", 100 + n / 256, n % 256));
            let seen = ObservedValue {
                value: Value::Route(weft_backends::state::Route::Blackhole),
                protocol: 90,
                mark: false,
            };
            let mut all: Vec<Notice> = nets.map(|net| Notice::Entry(route(&net), Some(seen.clone()))).collect();
            all.push(Notice::Entry(route(PEER), None));
            all
        };
        let passes = test.kernel.observations();
        for (count, more) in [(0, 0), (MAX_SINGLE_ENTRIES - 1, 0), (MAX_SINGLE_ENTRIES, 1)] {
            remove_silently(&test);
            test.node.kernel_changed(gone(count)).await;
            assert_eq!(test.kernel.observations(), passes + more, "{count} others");
            assert!(test.via(PEER).is_some(), "{count} others");
        }
    })
    .await;
}

#[tokio::test]
async fn notifications_of_our_own_writes_lead_to_nothing() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let seen = test.kernel.entries().get(&route(PEER)).cloned();
        let (passes, unknown) = (test.kernel.observations(), "10.5.77.0/24");
        test.kernel.take_ops();
        // There are more than MAX_SINGLE_ENTRIES notifications, as after a start with many peers. Some are of entries that are
        // gone and not wanted.
        let mut notices: Vec<Notice> =
            (0..=MAX_SINGLE_ENTRIES).map(|n| Notice::Entry(route(&format!("10.7.{}.0/24", n % 256)), None)).collect();
        notices.push(Notice::Entry(route(PEER), seen));
        notices.push(Notice::Entry(route(unknown), None));
        test.node.kernel_changed(notices).await;
        assert_eq!((test.kernel.observations(), test.kernel.take_ops()), (passes, vec![]));
    })
    .await;
}

#[tokio::test]
async fn a_change_of_routes_leads_to_a_full_pass_only_if_the_plan_changes() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let passes = test.kernel.observations();
        test.node.kernel_changed(vec![Notice::Routes]).await;
        assert_eq!(test.kernel.observations(), passes, "the host has not changed");
        let mut with = machine("192.168.0.1");
        with.addrs.push(AddrInfo { index: 2, net: "10.5.2.77/32".parse().unwrap(), scope: 0, flags: 0x80 });
        test.kernel.set_machine(with);
        test.node.kernel_changed(vec![Notice::Routes]).await;
        assert_eq!(test.kernel.observations(), passes + 1);
        assert_eq!(test.via(PEER), None, "the host has an address in that subnet");
    })
    .await;
}

#[tokio::test]
async fn full_passes_pause_when_links_change_all_the_time() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.schedule.recent.clear();
        for pass in 1..=MAX_IN_WINDOW {
            test.node.kernel_changed(vec![Notice::Links]).await;
            assert_eq!(test.node.schedule.recent.len(), pass);
            assert_eq!(
                Some(&test.node.schedule.paused_until),
                test.node.schedule.recent.back(),
                "the pass after number {pass} must not be delayed"
            );
        }
        test.node.kernel_changed(vec![Notice::Links]).await;
        assert!(
            Some(&test.node.schedule.paused_until) > test.node.schedule.recent.back(),
            "the next pass must be delayed"
        );
        // The audit comes after the pause.
        test.node.schedule.paused_until = Instant::now() + Duration::from_secs(60);
        let passes = test.kernel.observations();
        remove_silently(&test);
        test.node.kernel_changed(vec![Notice::Links, Notice::Routes]).await;
        assert_eq!(test.kernel.observations(), passes);
        assert_eq!(test.node.next_wake(), Some(test.node.schedule.paused_until).min(test.node.next_wake()));
        test.node.kernel_changed(vec![Notice::Links, Notice::Entry(route(PEER), None)]).await;
        assert!(test.via(PEER).is_some(), "single entries must be repaired during the pause");
    })
    .await;
}

/// A program that rewrites its routes all the time makes the node read the host again and again, although nothing is to be written.
#[tokio::test]
async fn looks_at_the_host_pause_when_routes_of_others_change_all_the_time() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.schedule.recent.clear();
        let passes = test.kernel.observations();
        for look in 1..=MAX_IN_WINDOW {
            test.node.kernel_changed(vec![Notice::Routes]).await;
            assert_eq!(test.node.schedule.recent.len(), look);
        }
        assert_eq!(
            Some(&test.node.schedule.paused_until),
            test.node.schedule.recent.back(),
            "the next look is not delayed"
        );
        test.node.kernel_changed(vec![Notice::Routes]).await;
        assert!(Some(&test.node.schedule.paused_until) > test.node.schedule.recent.back(), "the next look is delayed");
        assert_eq!(test.kernel.observations(), passes, "the host has not changed");
    })
    .await;
}

/// The clock stands still but for what the test lets pass.
#[tokio::test(start_paused = true)]
async fn passes_of_long_ago_cause_no_pause() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        for _ in 0..=MAX_IN_WINDOW {
            test.node.kernel_changed(vec![Notice::Links]).await;
        }
        assert!(test.node.schedule.recent.len() > MAX_IN_WINDOW);
        tokio::time::advance(Duration::from_secs(11)).await;
        test.node.kernel_changed(vec![Notice::Links]).await;
        assert_eq!(test.node.schedule.recent.len(), 1, "the others are older than the window");
    })
    .await;
}

fn device(kernel: &FakeKernel, name: &str) -> Option<ObservedValue> {
    kernel.entries().get(&Key::Link(Name::new(name).unwrap())).cloned()
}

#[tokio::test]
async fn a_device_name_that_another_program_frees_is_used_in_the_same_pass() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let dev = Key::Link(Name::new("flannel.7").unwrap());
        let link = Link { kind: Arc::new(Foreign), mtu: 1400, mac: None, up: true };
        test.kernel.disturb(dev, Some(ObservedValue { value: Value::link(link), protocol: 0, mark: false }), false);
        test.node
            .store_changed(vec![Event::Changes(vec![RecordChange::Written(super::rate_limit::vxlan(
                "10.5.77.0-24",
                7,
            ))])])
            .await;
        let state = |test: &mut TestNode| {
            let peers = test.node.status().peers;
            peers.iter().find(|peer| peer.subnet == "10.5.77.0/24").map(|peer| peer.state)
        };
        assert_eq!(state(&mut test), Some(PeerState::SetAside));
        test.kernel.disturb(dev, None, false);
        test.node.full_pass(Cause::Kernel).await;
        assert!(device(&test.kernel, "flannel.7").is_some_and(|seen| seen.mark));
        assert_eq!(state(&mut test), Some(PeerState::Programmed));
    })
    .await;
}

#[tokio::test]
async fn a_failed_dump_is_a_problem_until_a_later_one_succeeds() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        test.kernel.break_dumps(Some(std::io::ErrorKind::Interrupted));
        test.node.full_pass(Cause::Start).await;
        assert!(test.node.kernel_problem.is_some());
        let status = test.node.status();
        let is_shown = |problem: &Problem| {
            problem.kind == ProblemKind::Kernel && problem.text.starts_with("read the kernel's tables: ")
        };
        assert!(!status.ready && status.problems.iter().any(is_shown), "{:?}", status.problems);
        assert!(!test.file.exists(), "it is not known whether the node can carry packets");
        assert!(test.node.schedule.next_audit < Instant::now() + Duration::from_secs(3));
        test.kernel.break_dumps(None);
        test.node.schedule.next_audit = Instant::now();
        test.node.tick().await;
        assert_eq!(test.node.kernel_problem, None);
        assert!(!test.node.status().problems.iter().any(is_shown));
        assert!(test.file.exists());
    })
    .await;
}

#[tokio::test]
async fn a_device_that_the_kernel_refused_is_made_when_it_is_time_to_try_again() {
    local(async {
        let mut test = TestNode::of_vxlan(vxlan_lease(), OnLostLease::Hold);
        let dev = Key::Link(Name::new("flannel.1").unwrap());
        test.kernel.fail(dev, Some(Outcome::Retry("EADDRINUSE".into())));
        test.node.full_pass(Cause::Start).await;
        assert_eq!(device(&test.kernel, "flannel.1"), None);
        test.kernel.fail(dev, None);
        tokio::time::sleep_until(test.node.passer.next_retry().expect("it is tried again")).await;
        test.node.tick().await;
        assert!(device(&test.kernel, "flannel.1").is_some(), "the retry of a device must be a full pass");
    })
    .await;
}

#[tokio::test]
async fn a_change_of_the_vni_in_net_conf_is_applied_and_published() {
    local(async {
        let mut test = TestNode::of_vxlan(vxlan_lease(), OnLostLease::Hold);
        test.node.full_pass(Cause::Start).await;
        let text = VXLAN.replace(r#""vxlan""#, r#""vxlan","VNI":7"#);
        test.node.store_changed(vec![Event::Config(text.clone())]).await;
        assert!(device(&test.kernel, "flannel.7").is_some());
        assert!(test.asked(1).await, "peers must learn the new VNI");
        let data = test.store.retakes.borrow()[0].backend_data.clone().unwrap();
        assert!(data.contains(r#""VNI":7"#), "{data}");
        // The same text again changes nothing.
        test.answer().await;
        let passes = test.kernel.observations();
        test.node.store_changed(vec![Event::Config(text)]).await;
        assert_eq!(test.kernel.observations(), passes);
        assert!(test.asked(1).await);
    })
    .await;
}

#[tokio::test]
async fn a_net_conf_that_cannot_be_read_is_a_problem_and_changes_nothing() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.store_changed(vec![Event::Config("{".into())]).await;
        let problem = test.node.net_conf.not_applied.clone().expect("a problem");
        assert!(problem.starts_with("the new net-conf"), "{problem}");
        assert!(test.via(PEER).is_some());
        test.node.store_changed(vec![Event::Config(CONFIG.into())]).await;
        assert_eq!(test.node.net_conf.not_applied, None);
    })
    .await;
}

#[tokio::test]
async fn a_change_of_links_during_a_pause_leads_to_a_later_audit() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.schedule.paused_until = Instant::now() + Duration::from_secs(60);
        let passes = test.kernel.observations();
        test.node.kernel_changed(vec![Notice::Links]).await;
        assert_eq!(test.kernel.observations(), passes);
        assert_eq!(test.node.schedule.next_audit, test.node.schedule.paused_until);
        assert!(test.node.next_wake() <= Some(test.node.schedule.paused_until));
    })
    .await;
}

#[tokio::test]
async fn the_next_full_pass_is_soon_when_the_kernel_cannot_be_read() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.kernel.break_dumps(Some(std::io::ErrorKind::Interrupted));
        test.node.full_pass(Cause::Kernel).await;
        assert!(test.node.kernel_problem.is_some());
        let wait = test.node.next_wake().unwrap().saturating_duration_since(Instant::now());
        assert!(wait <= Duration::from_secs(2), "{wait:?}");
        test.kernel.break_dumps(None);
        test.node.full_pass(Cause::Audit).await;
        assert!(test.node.kernel_problem.is_none());
    })
    .await;
}

/// The kernel tells of all changes of an entry, and several of them arrive together.
#[tokio::test]
async fn the_last_of_several_notices_about_one_entry_counts() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let entry = |seen: Option<ObservedValue>| Notice::Entry(route(PEER), seen);
        let seen = test.kernel.entries().get(&route(PEER)).cloned();
        test.kernel.take_ops();
        test.node.kernel_changed(vec![entry(None), entry(seen.clone())]).await;
        assert_eq!(test.kernel.take_ops(), [], "it is there again");
        remove_silently(&test);
        test.node.kernel_changed(vec![entry(seen), entry(None)]).await;
        assert!(test.via(PEER).is_some(), "it was gone in the end");
    })
    .await;
}

#[tokio::test]
async fn only_what_was_changed_by_others_is_counted_as_repaired() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let repairs = |test: &TestNode| -> Vec<String> {
            let text = test.node.context.reporter.metrics.render_classic(Instant::now());
            text.lines().filter_map(|line| line.strip_prefix("weft_repairs_total")).map(str::to_owned).collect()
        };
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.3.0-24", "192.168.0.3")])]).await;
        assert_eq!(repairs(&test), [""; 0], "a new lease is no repair");
        remove_silently(&test);
        test.node.kernel_changed(vec![Notice::Entry(route(PEER), None)]).await;
        assert_eq!(repairs(&test), [r#"{cause="kernel"} 1"#]);
        let refused = route("10.5.3.0/24");
        test.kernel.disturb(refused, None, false);
        test.kernel.fail(refused, Some(Outcome::Retry("busy".to_owned())));
        test.node.kernel_changed(vec![Notice::Entry(refused, None)]).await;
        assert_eq!(repairs(&test), [r#"{cause="kernel"} 1"#], "what the kernel refuses is not repaired");
    })
    .await;
}
