// SPDX-License-Identifier: Apache-2.0
//! Rules and subnet.env: the container runtime hears of masquerading when it is there, never before and never falsely.

use weft_backends::masq::Masquerade;

use super::{Bench, CONFIG, local, put};
use crate::firewall::fake::FakeCarrier;
use crate::firewall::reconciler::{Handle, NoOthers, run};
use crate::kernel::{Notice, Outcome};
use crate::node::tests::lease;
use crate::observe::report;
use crate::observe::status::PeerState;
use crate::options::{Fences, OnLostLease, RuleOptions};
use crate::pass::Cause;
use weft_backends::state::{Fence, Key, Route, Seen, Value};
use weft_subnet::cidr::Family;
use weft_subnet::lease::Record;
use weft_subnet::source::Event;

fn masquerading() -> RuleOptions {
    RuleOptions { masquerade: Some(Masquerade::default()), forward: true, ..RuleOptions::default() }
}

/// A node whose rules a fake carries; not started.
fn bench(rules: RuleOptions) -> (Bench, FakeCarrier) {
    let mut bench = Bench::with(OnLostLease::Hold, rules);
    let (handle, mut port) = Handle::new();
    let fake = FakeCarrier::default();
    let resync = std::time::Duration::from_millis(20);
    let carrier = Box::new(fake.clone());
    tokio::task::spawn_local(async move { run(carrier, Box::new(NoOthers), &mut port, resync).await });
    bench.node.carry(handle);
    (bench, fake)
}

async fn start(bench: &mut Bench) {
    bench.node.full(Cause::Start).await;
    let records = vec![put("10.5.1.0-24", "192.168.0.1").unwrap(), put("10.5.2.0-24", "192.168.0.2").unwrap()];
    bench.node.stored(vec![Event::Snapshot { records, reset: false }]).await;
}

/// Hears the keeper out.
async fn settle(bench: &mut Bench) {
    let mut told = bench.node.rules.as_ref().unwrap().state.clone();
    tokio::time::timeout(std::time::Duration::from_secs(10), told.changed()).await.expect("news").unwrap();
    bench.node.ruled();
}

/// Waits until rules that came too soon are made.
async fn until_made(bench: &mut Bench) {
    while let Some(due) = bench.node.made.due {
        assert!(bench.node.next_wake().unwrap() <= due, "what waits wakes the loop");
        tokio::time::sleep_until(due.into()).await;
        bench.node.tick().await;
    }
}

fn env(bench: &Bench) -> Option<String> {
    std::fs::read_to_string(&bench.file).ok()
}

#[tokio::test]
async fn subnet_env_waits_for_the_rules() {
    local(async {
        let (mut bench, fake) = bench(masquerading());
        fake.fail_writes(Some("no such table"));
        start(&mut bench).await;
        assert_eq!(env(&bench), None, "the rules are not written yet");
        settle(&mut bench).await;
        assert_eq!(env(&bench), None, "the rules cannot be written");
        let status = report::status(&bench.node);
        assert!(
            !status.ready && status.problems.contains(&"rules: run fake: no such table".to_owned()),
            "{:?}",
            status.problems
        );
        fake.fail_writes(None);
        settle(&mut bench).await;
        assert!(env(&bench).unwrap().contains("FLANNEL_IPMASQ=true"));
        assert!(report::status(&bench.node).ready);
        assert!(fake.rules().masquerades());
        // Trouble later does not change what runtimes were told, but readiness.
        fake.fail_writes(Some("flushed, and read-only now"));
        fake.flush();
        settle(&mut bench).await;
        assert!(env(&bench).unwrap().contains("FLANNEL_IPMASQ=true"));
        assert!(!report::status(&bench.node).ready);
    })
    .await;
}

#[tokio::test]
async fn forward_rules_alone_hold_up_nothing() {
    local(async {
        let (mut bench, fake) = bench(RuleOptions { forward: true, ..RuleOptions::default() });
        fake.fail_writes(Some("no such table"));
        start(&mut bench).await;
        assert!(env(&bench).unwrap().contains("FLANNEL_IPMASQ=false"));
        settle(&mut bench).await;
        let status = report::status(&bench.node);
        let said = status.problems.contains(&"rules: run fake: no such table".to_owned());
        assert!(status.ready && said, "{:?}", status.problems);
    })
    .await;
}

#[tokio::test]
async fn rules_follow_the_subnet_and_the_nodes_where_they_are_exceptions() {
    local(async {
        let (mut bench, fake) = bench(masquerading());
        start(&mut bench).await;
        settle(&mut bench).await;
        assert_eq!(fake.writes(), 1);
        let conf = CONFIG.replacen('{', r#"{"MasqueradeToNodes":false,"MasqueradeExcept":["172.16.0.0/12"],"#, 1);
        bench.node.stored(vec![Event::Config(conf)]).await;
        settle(&mut bench).await;
        let text = fake.rules().to_string();
        assert!(text.contains("from 10.5.0.0/16 to 172.16.0.0/12 return"), "{text}");
        assert!(text.contains("from 10.5.0.0/16 to one of 192.168.0.2 return"), "{text}");
        bench.node.stored(vec![Event::Changes(vec![put("10.5.3.0-24", "192.168.0.3")])]).await;
        until_made(&mut bench).await;
        settle(&mut bench).await;
        assert!(fake.rules().to_string().contains("to one of 192.168.0.2 192.168.0.3 return"));
        assert_eq!(fake.writes(), 3);
    })
    .await;
}

/// Neither a renewal nor a burst of new nodes makes the rules again each time, and the last of them is not forgotten.
#[tokio::test]
async fn a_burst_of_nodes_makes_the_rules_but_few_times() {
    local(async {
        let (mut bench, fake) = bench(masquerading());
        let conf = CONFIG.replacen('{', r#"{"MasqueradeToNodes":false,"#, 1);
        bench.node.stored(vec![Event::Config(conf)]).await;
        bench.node.full(Cause::Audit).await;
        assert_eq!(bench.node.made.times, 1, "not before the nodes are known");
        start(&mut bench).await;
        let (began, before) = (std::time::Instant::now(), bench.node.made.times);
        for n in 3..250 {
            let (key, ip) = (format!("10.5.{n}.0-24"), format!("192.168.0.{n}"));
            bench.node.stored(vec![Event::Changes(vec![put(&key, &ip)])]).await;
            // Again, with another member: no news for the rules.
            let mut again = put(&key, &ip).unwrap();
            again.lease.as_mut().unwrap().attrs.backend_data = Some("{}".into());
            bench.node.stored(vec![Event::Changes(vec![Ok(again)])]).await;
        }
        let seconds = began.elapsed().as_secs();
        let times = bench.node.made.times - before;
        assert!(times <= seconds + 1, "{times} in {seconds} s");
        until_made(&mut bench).await;
        let all = async {
            while !fake.rules().to_string().contains("to one of 248 nodes return") {
                tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(20), all).await.expect("all nodes are passed on");
        let times = bench.node.made.times;
        bench.node.stored(vec![Event::Changes(vec![put("10.5.9.0-24", "192.168.0.9")])]).await;
        bench.node.full(Cause::Audit).await;
        assert_eq!(bench.node.made.times, times, "nothing changed");
    })
    .await;
}

/// A fence for each family, exceptions for nodes inside Network, and not a single route in the main table.
#[tokio::test]
async fn fences_are_no_routes_and_nodes_inside_network_are_exceptions() {
    local(async {
        let fences = Fences { fail_closed: true, blackhole: true };
        let (mut bench, _) = bench(RuleOptions { fences, ..RuleOptions::default() });
        start(&mut bench).await;
        let key = Key::Fence(Family::V4);
        let net = |text: &str| Some(text.parse().unwrap());
        let fence = Fence { unreachable: net("10.5.0.0/16"), blackhole: net("10.5.1.0/24"), whole: true };
        let seen = |bench: &Bench, key: &Key| bench.kernel.entries().get(key).map(|seen| seen.value.clone());
        assert_eq!(seen(&bench, &key), Some(Value::fence(fence)));
        let drops = |seen: &Seen| matches!(seen.value, Value::Route(Route::Unreachable | Route::Blackhole));
        assert!(!bench.kernel.entries().iter().any(|(_, seen)| drops(seen)));
        // A lease that says that its node is at an address of a pod: that address is open, all else is as before.
        let open = Key::Open("10.5.77.9".parse().unwrap());
        bench.node.stored(vec![Event::Changes(vec![put("10.5.7.0-24", "10.5.77.9")])]).await;
        assert_eq!((seen(&bench, &open), seen(&bench, &key)), (Some(Value::Open), Some(Value::fence(fence))));
        // Two leases with one address: it stays while one of them is there.
        bench.node.stored(vec![Event::Changes(vec![put("10.5.8.0-24", "10.5.77.9")])]).await;
        bench.node.stored(vec![Event::Changes(vec![Err("10.5.7.0-24".into())])]).await;
        assert_eq!(seen(&bench, &open), Some(Value::Open));
        bench.node.stored(vec![Event::Changes(vec![put("10.5.8.0-24", "192.168.0.8")])]).await;
        assert_eq!(seen(&bench, &open), None);
        // Somebody takes the fence, or lets an address through: the news of it lead to a look at the fence alone.
        bench.kernel.disturb(key, None, false);
        bench.kernel.disturb(open, Some(Seen { value: Value::Open, protocol: 0, mark: false }), false);
        bench.node.noticed(vec![Notice::Fence]).await;
        assert_eq!((seen(&bench, &open), seen(&bench, &key)), (None, Some(Value::fence(fence))));
        let status = report::status(&bench.node);
        let text = "forwarded packets without a route of their own: unreachable 10.5.0.0/16, blackhole 10.5.1.0/24";
        assert_eq!(status.rules.fence.as_deref(), Some(text));
    })
    .await;
}

/// A kernel without policy routing: the node works, and says that it has no fence.
#[tokio::test]
async fn a_fence_that_the_kernel_refuses_is_a_problem_and_no_obstacle() {
    local(async {
        let fences = Fences { fail_closed: true, blackhole: false };
        let (mut bench, _) = bench(RuleOptions { fences, ..RuleOptions::default() });
        let key = Key::Fence(Family::V4);
        bench.kernel.fail(key, Some(Outcome::Fatal("not supported".into())));
        start(&mut bench).await;
        report::publish(&mut bench.node);
        let status = report::status(&bench.node);
        let text = "--fail-closed, --ip-blackhole-route: fence for forwarded IPv4 packets: not supported";
        assert!(status.problems.iter().any(|problem| problem == text), "{:?}", status.problems);
        assert_eq!(status.rules.fence.as_deref(), Some(text));
        let states: Vec<PeerState> = status.peers.iter().map(|peer| peer.state).collect();
        assert_eq!((states, bench.node.troubled.1), (vec![PeerState::Programmed], 0));
    })
    .await;
}

#[tokio::test]
async fn the_guard_waits_for_every_lease_and_opens_for_one_that_is_silent() {
    local(async {
        let (mut bench, _) = bench(RuleOptions { guard: true, ..RuleOptions::default() });
        bench.node.full(Cause::Start).await;
        let peers = |bench: &Bench| {
            let entries = bench.kernel.entries();
            entries.keys().filter(|key| matches!(key, Key::Peer(_))).map(|key| key.to_string()).collect::<Vec<_>>()
        };
        let said = |key: &str, ip: &str, tunnel: Option<&str>| {
            let mut lease = lease(key, ip);
            lease.attrs.tunnel_ip = tunnel.map(|ip| ip.parse().unwrap());
            Record { id: lease.id.clone(), lease: Ok(lease) }
        };
        let records = vec![
            said("10.5.1.0-24", "192.168.0.1", Some("192.168.0.1")),
            said("10.5.2.0-24", "192.168.0.2", Some("192.168.0.22")),
        ];
        bench.node.stored(vec![Event::Snapshot { records, reset: false }]).await;
        assert_eq!(peers(&bench), ["tunnel peer 192.168.0.2", "tunnel peer 192.168.0.22"]);
        // host-gw has no tunnel to guard.
        let chains = bench.kernel.entries().keys().filter(|key| matches!(key, Key::Guard(_))).count();
        assert_eq!(chains, 0);
        assert_eq!(bench.node.plan.guard().unwrap(), "on: tunnel packets are taken from peers alone (1 of them)");
        bench.node.stored(vec![Event::Changes(vec![Ok(said("10.5.3.0-24", "192.168.0.3", None))])]).await;
        assert_eq!(peers(&bench).len(), 3);
        assert!(bench.node.plan.guard().unwrap().starts_with("off: 1 of 2 leases"));
        bench.node.stored(vec![Event::Changes(vec![Err("10.5.3.0-24".into())])]).await;
        assert_eq!(peers(&bench), ["tunnel peer 192.168.0.2", "tunnel peer 192.168.0.22"]);
        // Someone empties the table: the news of it lead to a look at the guard alone.
        let (peer, value) = (Key::Peer("192.168.0.22".parse().unwrap()), Value::Peer);
        bench.kernel.disturb(peer, None, false);
        bench.node.noticed(vec![Notice::Guard]).await;
        assert_eq!(bench.kernel.entries().get(&peer).map(|seen| seen.value.clone()), Some(value));
        let attrs = bench.node.plan.advertise(bench.node.plan.host()).unwrap();
        assert_eq!(attrs.tunnel_ip, "192.168.0.1".parse().ok(), "our lease says where our packets come from");
    })
    .await;
}

/// A kernel without nftables: routes work, the guard does not, and nobody is told that it does.
#[tokio::test]
async fn a_guard_that_the_kernel_refuses_is_a_problem_and_no_peers() {
    local(async {
        let (mut bench, _) = bench(RuleOptions { guard: true, ..RuleOptions::default() });
        let key = Key::Peer("192.168.0.2".parse().unwrap());
        bench.kernel.fail(key, Some(Outcome::Fatal("not supported".into())));
        start(&mut bench).await;
        report::publish(&mut bench.node);
        let status = report::status(&bench.node);
        assert!(status.rules.guard.as_deref().unwrap().starts_with("incomplete"), "{:?}", status.rules.guard);
        assert!(status.problems.iter().any(|text| text.starts_with("tunnel guard: ")), "{:?}", status.problems);
        let states: Vec<PeerState> = status.peers.iter().map(|peer| peer.state).collect();
        assert_eq!(states, [PeerState::Programmed], "its routes are there");
        assert_eq!(bench.node.troubled, (bench.node.passer.pending().version(), 0, 0));
        bench.kernel.fail(key, None);
        bench.node.full(Cause::Start).await;
        let status = report::status(&bench.node);
        assert!(!status.problems.iter().any(|text| text.starts_with("tunnel guard: ")), "{:?}", status.problems);
    })
    .await;
}

/// Two leases that name one address: it is let in while one of them is there.
#[tokio::test]
async fn an_address_of_two_peers_is_let_in_until_both_are_gone() {
    local(async {
        let (mut bench, _) = bench(RuleOptions { guard: true, ..RuleOptions::default() });
        start(&mut bench).await;
        let stated = |key: &str, public: &str| {
            let mut lease = lease(key, public);
            lease.attrs.tunnel_ip = "192.168.0.30".parse().ok();
            Ok(Record { id: lease.id.clone(), lease: Ok(lease) })
        };
        let there = |bench: &Bench, ip: &str| bench.kernel.entries().get(&Key::Peer(ip.parse().unwrap())).is_some();
        bench.node.stored(vec![Event::Changes(vec![stated("10.5.3.0-24", "192.168.0.30")])]).await;
        bench.node.stored(vec![Event::Changes(vec![stated("10.5.4.0-24", "192.168.0.40")])]).await;
        assert!(there(&bench, "192.168.0.30") && there(&bench, "192.168.0.40"));
        bench.node.stored(vec![Event::Changes(vec![Err("10.5.3.0-24".into())])]).await;
        assert!(there(&bench, "192.168.0.30"), "the other one still sends from there");
        bench.node.stored(vec![Event::Changes(vec![Err("10.5.4.0-24".into())])]).await;
        assert!(!there(&bench, "192.168.0.30") && !there(&bench, "192.168.0.40"));
    })
    .await;
}
