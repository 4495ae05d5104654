// SPDX-License-Identifier: Apache-2.0
//! What news of the kernel and the clock lead to: a repair of one entry, a look at everything, or nothing.

use std::sync::Arc;

use std::time::{Duration, Instant};

use weft_backends::link::{Foreign, Link};
use weft_backends::state::{Key, Name, Seen, Value};
use weft_subnet::source::Event;

use super::{Bench, CONFIG, VXLAN, local, machine, put};
use crate::kernel::fake::FakeKernel;
use crate::kernel::{AddrInfo, Notice};
use crate::node::{LOOKS, MANY};
use crate::observe::report;
use crate::observe::status::PeerState;
use crate::options::OnLostLease;
use crate::pass::Cause;

const PEER: &str = "10.5.2.0/24";

fn route(net: &str) -> Key {
    Key::Route(net.parse().unwrap(), 0)
}

/// Takes the peer's route away without a word of the kernel.
fn lose(bench: &Bench) {
    bench.kernel.disturb(route(PEER), None, false);
    assert_eq!(bench.via(PEER), None);
}

fn audits(bench: &Bench) -> u64 {
    bench.node.full_passes.get("audit").cloned().unwrap_or(0)
}

#[tokio::test]
async fn the_audit_comes_after_its_interval_and_not_before() {
    local(async {
        let hour = Duration::from_secs(3600);
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        for round in 1..=3 {
            let before = Instant::now();
            bench.node.full(Cause::Kernel).await;
            let due = bench.node.next_audit;
            assert!(before + hour <= due && due <= Instant::now() + hour, "one interval after each look");
            assert!(bench.node.next_wake().is_some_and(|wake| wake <= due));
            lose(&bench);
            let looks = bench.kernel.observations();
            bench.node.tick().await;
            assert_eq!((bench.kernel.observations(), bench.via(PEER)), (looks, None), "it is not due yet");
            // The hour passes.
            bench.node.next_audit = Instant::now();
            bench.node.tick().await;
            assert_eq!((bench.kernel.observations(), audits(&bench)), (looks + 1, round));
            assert!(bench.via(PEER).is_some());
            assert!(bench.node.next_audit >= before + hour, "the next one is an interval away again");
        }
    })
    .await;
}

#[tokio::test]
async fn an_audit_comes_when_stale_peers_need_not_be_kept_any_longer() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        let own = put("10.5.1.0-24", "192.168.0.1").unwrap();
        bench.node.begin(vec![Event::Snapshot { records: vec![own], reset: false }]).await;
        let until = bench.node.passer.keep_stale_until.expect("a first list without peers removes nothing");
        assert_eq!(bench.node.next_audit, until);
        // That time passes.
        let (stale, seen) = (Key::Route("10.5.8.0/24".parse().unwrap(), 0), {
            let (via, dev) = ("192.168.0.8".parse().unwrap(), Name::new("eth0").unwrap());
            let value = Value::Route(weft_backends::state::Route::Unicast { via, dev, onlink: false });
            Seen { value, protocol: super::PROTOCOL, mark: false }
        });
        bench.kernel.disturb(stale, Some(seen), false);
        bench.node.full(Cause::Kernel).await;
        assert!(bench.kernel.entries().contains_key(&stale));
        bench.node.passer.keep_stale_until = Some(Instant::now());
        bench.node.next_audit = Instant::now();
        bench.node.tick().await;
        assert!(!bench.kernel.entries().contains_key(&stale));
        assert_eq!(bench.node.passer.keep_stale_until, None);
    })
    .await;
}

#[tokio::test]
async fn notifications_that_were_lost_lead_to_a_look_at_everything() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        lose(&bench);
        bench.node.noticed(vec![Notice::Lost]).await;
        assert!(bench.via(PEER).is_some());
    })
    .await;
}

#[tokio::test]
async fn one_entry_is_repaired_by_itself_and_many_by_a_look_at_everything() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let gone = |count: usize| {
            let nets = (0..count).map(|n| format!("10.5.{}.{}/32", 100 + n / 256, n % 256));
            let seen = Seen { value: Value::Route(weft_backends::state::Route::Blackhole), protocol: 90, mark: false };
            let mut all: Vec<Notice> = nets.map(|net| Notice::Entry(route(&net), Some(seen.clone()))).collect();
            all.push(Notice::Entry(route(PEER), None));
            all
        };
        let looks = bench.kernel.observations();
        for (count, more) in [(0, 0), (MANY - 1, 0), (MANY, 1)] {
            lose(&bench);
            bench.node.noticed(gone(count)).await;
            assert_eq!(bench.kernel.observations(), looks + more, "{count} others");
            assert!(bench.via(PEER).is_some(), "{count} others");
        }
    })
    .await;
}

#[tokio::test]
async fn an_echo_of_what_we_wrote_is_no_news() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let seen = bench.kernel.entries().get(&route(PEER)).cloned();
        let (looks, nobodys) = (bench.kernel.observations(), "10.5.77.0/24");
        bench.kernel.take_ops();
        // More than [`MANY`] of them, as after a start with many peers; and what is gone that nobody wanted.
        let mut echoes: Vec<Notice> =
            (0..=MANY).map(|n| Notice::Entry(route(&format!("10.7.{}.0/24", n % 256)), None)).collect();
        echoes.push(Notice::Entry(route(PEER), seen));
        echoes.push(Notice::Entry(route(nobodys), None));
        bench.node.noticed(echoes).await;
        assert_eq!((bench.kernel.observations(), bench.kernel.take_ops()), (looks, vec![]));
    })
    .await;
}

#[tokio::test]
async fn a_route_that_changes_the_uplink_leads_to_a_look_and_others_do_not() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let looks = bench.kernel.observations();
        bench.node.noticed(vec![Notice::Routes]).await;
        assert_eq!(bench.kernel.observations(), looks, "the host is as it was");
        let mut with = machine("192.168.0.1");
        with.addrs.push(AddrInfo { index: 2, net: "10.5.2.77/32".parse().unwrap(), scope: 0, flags: 0x80 });
        bench.kernel.set_machine(with);
        bench.node.noticed(vec![Notice::Routes]).await;
        assert_eq!(bench.kernel.observations(), looks + 1);
        assert_eq!(bench.via(PEER), None, "the host has an address in that subnet now");
    })
    .await;
}

#[tokio::test]
async fn links_that_never_rest_are_looked_at_less_often() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        bench.node.looks.clear();
        for look in 1..=LOOKS {
            bench.node.noticed(vec![Notice::Links]).await;
            assert_eq!(bench.node.looks.len(), look);
            assert_eq!(
                Some(&bench.node.quiet_until),
                bench.node.looks.back(),
                "look {look}: the next one is not put off"
            );
        }
        bench.node.noticed(vec![Notice::Links]).await;
        assert!(Some(&bench.node.quiet_until) > bench.node.looks.back(), "the next one is put off");
        // It comes all the same, by the clock.
        bench.node.quiet_until = Instant::now() + Duration::from_secs(60);
        let looks = bench.kernel.observations();
        lose(&bench);
        bench.node.noticed(vec![Notice::Links, Notice::Routes]).await;
        assert_eq!(bench.kernel.observations(), looks);
        assert_eq!(bench.node.next_wake(), Some(bench.node.quiet_until).min(bench.node.next_wake()));
        bench.node.noticed(vec![Notice::Links, Notice::Entry(route(PEER), None)]).await;
        assert!(bench.via(PEER).is_some(), "single entries are repaired meanwhile");
    })
    .await;
}

#[tokio::test]
async fn nothing_of_a_lease_is_written_before_the_first_list() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        bench.node.full(Cause::Start).await;
        bench.node.stored(vec![Event::Changes(vec![put("10.5.2.0-24", "192.168.0.2")])]).await;
        assert_eq!(bench.via(PEER), None, "the list may say something else of it");
    })
    .await;
}

fn device(kernel: &FakeKernel, name: &str) -> Option<Seen> {
    kernel.entries().get(&Key::Link(Name::new(name).unwrap())).cloned()
}

#[tokio::test]
async fn a_device_that_a_stranger_gives_free_is_made_in_the_same_look() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let dev = Key::Link(Name::new("flannel.7").unwrap());
        let link = Link { kind: Arc::new(Foreign), mtu: 1400, mac: None, up: true };
        bench.kernel.disturb(dev, Some(Seen { value: Value::link(link), protocol: 0, mark: false }), false);
        bench.node.stored(vec![Event::Changes(vec![Ok(super::churn::vxlan("10.5.77.0-24", 7))])]).await;
        let state = |bench: &Bench| {
            let peers = report::status(&bench.node).peers;
            peers.iter().find(|peer| peer.subnet == "10.5.77.0/24").map(|peer| peer.state)
        };
        assert_eq!(state(&bench), Some(PeerState::SetAside));
        bench.kernel.disturb(dev, None, false);
        bench.node.full(Cause::Kernel).await;
        assert!(device(&bench.kernel, "flannel.7").is_some_and(|seen| seen.mark));
        assert_eq!(state(&bench), Some(PeerState::Programmed));
    })
    .await;
}

#[tokio::test]
async fn a_dump_that_works_again_ends_the_problem_and_one_that_fails_is_repeated_soon() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        bench.kernel.break_dumps(Some(std::io::ErrorKind::Interrupted));
        bench.node.full(Cause::Start).await;
        assert!(bench.node.kernel_problem.is_some());
        assert!(!bench.file.exists(), "nobody knows whether the data path carries what the file promises");
        assert!(bench.node.next_audit < Instant::now() + Duration::from_secs(3));
        bench.kernel.break_dumps(None);
        bench.node.next_audit = Instant::now();
        bench.node.tick().await;
        assert_eq!(bench.node.kernel_problem, None);
        assert!(bench.file.exists());
    })
    .await;
}

#[tokio::test]
async fn subnet_env_waits_until_our_device_is_up() {
    local(async {
        let mut own = super::lease("10.5.1.0-24", "192.168.0.1");
        own.attrs.backend_type = "vxlan".into();
        own.attrs.backend_data = Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}"#.into());
        let mut bench = Bench::of_vxlan(own, OnLostLease::Hold);
        let dev = Key::Link(Name::new("flannel.1").unwrap());
        bench.kernel.fail(dev, Some(crate::kernel::Outcome::Retry("EADDRINUSE".into())));
        bench.node.full(Cause::Start).await;
        assert!(!bench.file.exists(), "pods that started now would have no network");
        bench.kernel.fail(dev, None);
        tokio::time::sleep_until(bench.node.passer.next_retry().expect("it is tried again").into()).await;
        bench.node.tick().await;
        assert!(device(&bench.kernel, "flannel.1").is_some(), "a retry of a device is a look at everything");
        assert!(bench.file.exists());
    })
    .await;
}

#[tokio::test]
async fn another_net_conf_and_another_address_are_published() {
    local(async {
        let mut own = super::lease("10.5.1.0-24", "192.168.0.1");
        own.attrs.backend_type = "vxlan".into();
        own.attrs.backend_data = Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}"#.into());
        let mut bench = Bench::of_vxlan(own, OnLostLease::Hold);
        bench.node.full(Cause::Start).await;
        let text = VXLAN.replace(r#""vxlan""#, r#""vxlan","VNI":7"#);
        bench.node.stored(vec![Event::Config(text.clone())]).await;
        assert!(device(&bench.kernel, "flannel.7").is_some());
        assert!(bench.asked(1).await, "peers must learn the new VNI");
        let said = bench.store.retakes.borrow()[0].backend_data.clone().unwrap();
        assert!(said.contains(r#""VNI":7"#), "{said}");
        // The same again is no change.
        bench.answer().await;
        let looks = bench.kernel.observations();
        bench.node.stored(vec![Event::Config(text)]).await;
        assert_eq!(bench.kernel.observations(), looks);
        assert!(bench.asked(1).await);
    })
    .await;
}

#[tokio::test]
async fn a_net_conf_that_cannot_be_read_is_said_and_changes_nothing() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        bench.node.stored(vec![Event::Config("{".into())]).await;
        let said = bench.node.restart_wanted.clone().expect("a word for people");
        assert!(said.starts_with("the new net-conf"), "{said}");
        assert!(bench.via(PEER).is_some());
        bench.node.stored(vec![Event::Config(CONFIG.into())]).await;
        assert_eq!(bench.node.restart_wanted, None);
    })
    .await;
}
