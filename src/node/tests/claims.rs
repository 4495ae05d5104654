// SPDX-License-Identifier: Apache-2.0
//! Routes and devices that the node must not change: those of the kernel and those of other programs.

use std::sync::Arc;

use weft_backends::link::{Foreign, Link};
use weft_backends::owner::KERNEL_PROTOCOL;
use weft_backends::state::{Fence, Key, Name, ObservedValue, Route, Value};
use weft_subnet::cidr::Family;
use weft_subnet::source::{Event, RecordChange};

use super::{CONFIG, PROTOCOL, TestNode, lease, local, machine, put, removed, stored};
use crate::kernel::{AddrInfo, LinkInfo, Notice, Outcome};
use crate::observe::status::PeerState;
use crate::options::{OnLostLease, RuleOptions};
use crate::pass::Cause;
use crate::pass::takeover::Takeover;
use crate::subnet_file::Author;

fn route(net: &str, route: Route, protocol: u8) -> (Key, ObservedValue) {
    (Key::Route(net.parse().unwrap(), 0), ObservedValue { value: Value::Route(route), protocol, mark: false })
}

fn eth0() -> Name {
    Name::new("eth0").unwrap()
}

fn of_the_kernel(net: &str) -> (Key, ObservedValue) {
    route(net, Route::Device { dev: eth0() }, KERNEL_PROTOCOL)
}

/// This is so for each way in which a route is written: for a new lease, for an event of the kernel, and in a full pass.
#[tokio::test]
async fn a_route_of_the_kernel_is_never_replaced_and_its_peer_is_shown_as_failed() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let ((new, kernels), (old, seen)) = (of_the_kernel("10.5.3.0/24"), of_the_kernel("10.5.2.0/24"));
        test.kernel.disturb(new, Some(kernels), false);
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.3.0-24", "192.168.0.3")])]).await;
        test.kernel.disturb(old, Some(seen.clone()), false);
        test.node.kernel_changed(vec![Notice::Entry(old, Some(seen))]).await;
        for _ in 0..2 {
            for key in [new, old] {
                assert_eq!(test.kernel.entries().get(&key).map(|seen| seen.protocol), Some(KERNEL_PROTOCOL));
            }
            let peers = test.node.status().peers;
            assert!(peers.iter().all(|peer| peer.state == PeerState::Failed), "{peers:#?}");
            let reason = peers[0].reason.as_deref().unwrap();
            assert!(reason.contains("the kernel has its own route to a directly connected network"), "{reason}");
            test.node.full_pass(Cause::Audit).await;
        }
        test.kernel.disturb(old, None, false);
        test.node.kernel_changed(vec![Notice::Entry(old, None)]).await;
        assert_eq!(
            test.via("10.5.2.0/24"),
            "192.168.0.2".parse().ok(),
            "our route must be written when the address is gone"
        );
    })
    .await;
}

#[tokio::test]
async fn a_peer_whose_subnet_contains_an_address_of_this_node_is_set_aside() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let mut with = machine("192.168.0.1");
        with.addrs.push(AddrInfo { index: 2, net: "10.5.2.77/32".parse().unwrap(), scope: 0, flags: 0x80 });
        test.kernel.set_machine(with);
        test.node.full_pass(Cause::Kernel).await;
        assert_eq!(test.via("10.5.2.0/24"), None);
        let peers = test.node.status().peers;
        let reason = peers[0].reason.as_deref().unwrap();
        assert_eq!(reason, "subnet 10.5.2.0/24 contains 10.5.2.77, an address of this node (eth0)");
        test.kernel.set_machine(machine("192.168.0.1"));
        test.node.full_pass(Cause::Kernel).await;
        assert!(test.via("10.5.2.0/24").is_some());
    })
    .await;
}

/// Services, pods and containers add addresses and routes all the time. Most of them affect no lease.
#[tokio::test]
async fn a_new_address_or_route_plans_only_the_leases_that_it_affects() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        for third in 10..200 {
            let record = put(&format!("10.5.{third}.0-24"), &format!("192.168.0.{third}"));
            test.node.store_changed(vec![Event::Changes(vec![record])]).await;
        }
        let mut with = machine("192.168.0.1");
        let mut add = |net: &str, routed: bool| {
            let net: ipnet::IpNet = net.parse().unwrap();
            with.addrs.push(AddrInfo { index: 2, net, scope: 0, flags: 0x80 });
            let mut route = with.routes[1].clone();
            route.net = net.trunc();
            with.routes.extend(routed.then_some(route));
            with.clone()
        };
        let rows = [
            ("cni0", add("10.5.1.1/32", false), 0),
            ("a service that nobody has", add("10.5.250.1/32", false), 0),
            ("a bridge of containers", add("172.18.0.1/16", true), 0),
            ("an address in a peer's subnet", add("10.5.10.7/32", false), 0),
            ("a link to two peers", add("192.168.0.10/31", true), 1),
        ];
        for (what, machine, planned) in rows {
            // No pause after many full passes.
            test.node.schedule.recent.clear();
            test.node.plan.planned = 0;
            let passes = test.kernel.observations();
            test.kernel.set_machine(machine);
            test.node.kernel_changed(vec![Notice::Routes]).await;
            assert_eq!(test.node.plan.planned, planned, "{what}");
            if what.starts_with("an address in") {
                assert_eq!((test.via("10.5.10.0/24"), test.kernel.observations()), (None, passes + 1));
            } else {
                assert_eq!(test.kernel.observations(), passes, "{what}");
            }
        }
        test.node.schedule.recent.clear();
        test.node.plan.planned = 0;
        test.kernel.set_machine(machine("192.168.0.1"));
        test.node.kernel_changed(vec![Notice::Routes]).await;
        assert!(test.via("10.5.10.0/24").is_some());
        assert!(test.node.plan.planned <= 3, "{}", test.node.plan.planned);
    })
    .await;
}

#[tokio::test]
async fn rp_filter_is_loosened_only_for_a_programmed_peer_of_another_backend() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let ipip = |third: u8| {
            let mut record = stored(&format!("10.5.{third}.0-24"), &format!("192.168.0.{third}"));
            record.lease.as_mut().unwrap().attrs.backend_type = "ipip".into();
            Event::Changes(vec![RecordChange::Written(record)])
        };
        let by = |test: &mut TestNode| {
            test.node.check_sysctls();
            test.node.sysctls.loosened_for.as_ref().map(|id| id.to_string())
        };
        assert_eq!(by(&mut test), None, "all peers use our backend");
        let refused = Key::Route("10.5.40.0/24".parse().unwrap(), 0);
        test.kernel.fail(refused, Some(Outcome::Fatal("no".into())));
        test.node.store_changed(vec![ipip(40)]).await;
        assert_eq!(by(&mut test), None, "its route is not in the kernel");
        test.node.store_changed(vec![ipip(41)]).await;
        assert_eq!(by(&mut test).as_deref(), Some("10.5.41.0-24"));
        test.kernel.fail(refused, None);
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(by(&mut test).as_deref(), Some("10.5.41.0-24"), "the reason must stay the same");
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.41.0-24")])]).await;
        assert_eq!(by(&mut test).as_deref(), Some("10.5.40.0-24"));
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.40.0-24")])]).await;
        assert_eq!(by(&mut test), None);
    })
    .await;
}

/// They are removed once, by the first pass that may remove anything. If they are written later, another program did it.
#[tokio::test]
async fn entries_of_flannel_are_removed_only_if_they_exist_at_the_first_pass() {
    local(async {
        let left = |net: &str, via: &str| {
            route(net, Route::Unicast { via: via.parse().unwrap(), dev: eth0(), onlink: false }, 3)
        };
        let list = || Event::Snapshot {
            records: vec![stored("10.5.1.0-24", "192.168.0.1"), stored("10.5.2.0-24", "192.168.0.2")],
            reset: false,
        };
        let (unknown, another, weft) = (Author::Unknown, Author::Another, Author::Weft);
        let rows = [(unknown, false), (unknown, true), (weft, false), (another, false), (another, true)];
        for (author, weft_was_here) in rows {
            let start = (CONFIG, lease("10.5.1.0-24", "192.168.0.1"));
            let mut test = TestNode::altered(start, OnLostLease::Hold, RuleOptions::default(), |started| {
                started.author = author;
            });
            let (stale, seen) = left("10.5.8.0/24", "192.168.0.8");
            test.kernel.disturb(stale, Some(seen), false);
            let (own, of_weft) = (Key::Route("10.5.2.0/24".parse().unwrap(), 0), weft_backends::owner::PROTOCOL);
            if weft_was_here {
                let seen = left("10.5.2.0/24", "192.168.0.2").1;
                test.kernel.disturb(own, Some(ObservedValue { protocol: of_weft, ..seen }), false);
            }
            test.node.full_pass(Cause::Start).await;
            assert!(test.kernel.entries().contains_key(&stale), "no list of leases yet");
            // This one is written while weft waits for the list.
            let (late, seen) = left("10.5.9.0/24", "192.168.0.8");
            test.kernel.disturb(late, Some(seen.clone()), true);
            test.node.store_changed(vec![list()]).await;
            // Entries of an earlier run of weft count only if subnet.env does not say who wrote it.
            let is_removed = author == another || (author == unknown && !weft_was_here);
            assert_eq!(test.kernel.entries().contains_key(&stale), !is_removed, "{author:?} {weft_was_here}");
            test.kernel.disturb(stale, Some(seen), true);
            test.node.full_pass(Cause::Audit).await;
            assert!(test.kernel.entries().contains_key(&stale), "an entry that is written later is not flannel's");
            assert!(test.kernel.entries().contains_key(&late));
        }
    })
    .await;
}

/// flannel leaves the device of one backend when it is started with another one.
#[tokio::test]
async fn a_device_of_flannel_is_removed_only_if_it_has_the_address_of_this_node() {
    local(async {
        // The name, its address, the program that wrote the subnet file, and whether the device is removed.
        for (name, addr, author, is_removed) in [
            ("flannel.1", "10.5.1.0/32", Author::Another, true),
            ("flannel.1", "10.5.1.0/32", Author::Weft, false),
            ("flannel.1", "10.6.1.0/32", Author::Another, false),
            ("flannel.1", "10.5.1.0/24", Author::Another, false),
            ("vpn0", "10.5.1.0/32", Author::Another, false),
        ] {
            let mut test = TestNode::new(OnLostLease::Hold);
            test.node.passer.takeover = Takeover::new(author);
            let device = Name::new(name).unwrap();
            let mut machine = machine("192.168.0.1");
            machine.links.push(LinkInfo { index: 9, name: device, ..machine.links[0].clone() });
            test.kernel.set_machine(machine);
            let link = Link { kind: Arc::new(Foreign), mtu: 1450, mac: None, up: true };
            let seen = |value| Some(ObservedValue { value, protocol: 0, mark: false });
            test.kernel.disturb(Key::Link(device), seen(Value::link(link)), false);
            test.kernel.disturb(Key::Addr(device, addr.parse().unwrap()), seen(Value::Addr), false);
            test.node.full_pass(Cause::Start).await;
            assert!(test.kernel.entries().contains_key(&Key::Link(device)), "no list of leases yet");
            let records = vec![stored("10.5.1.0-24", "192.168.0.1"), stored("10.5.2.0-24", "192.168.0.2")];
            test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
            let there = test.kernel.entries().contains_key(&Key::Link(device));
            assert_eq!(there, !is_removed, "{name} {addr} {author:?}");
        }
    })
    .await;
}

/// Beside a backend that makes no routes, the routes of an administrator look like those that flannel left.
#[tokio::test]
async fn routes_of_flannels_form_are_removed_only_where_this_node_makes_routes_itself() {
    local(async {
        for (kind, stays) in [("host-gw", false), ("alloc", true)] {
            let conf = format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{kind}"}}}}"#);
            let own = super::lease("10.5.1.0-24", "192.168.0.1");
            let mut test = TestNode::of((&conf, own.clone()), OnLostLease::Hold, super::RuleOptions::default());
            test.node.passer.takeover = Takeover::new(Author::Another);
            let via = Route::Unicast { via: [192, 168, 0, 9].into(), dev: eth0(), onlink: false };
            let (key, seen) = route("10.5.9.0/24", via, 3);
            test.kernel.disturb(key, Some(seen), false);
            let records =
                vec![super::Record { id: own.id.clone(), lease: Ok(own) }, stored("10.5.2.0-24", "192.168.0.2")];
            test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
            assert_eq!(test.kernel.entries().contains_key(&key), stays, "{kind}");
        }
    })
    .await;
}

/// flannel leaves entries of weft where they are, so they count only if subnet.env does not say who wrote it.
#[tokio::test]
async fn entries_of_this_agent_in_its_network_show_that_it_ran_here_last() {
    local(async {
        let link = Value::link(Link { kind: Arc::new(Foreign), mtu: 1450, mac: None, up: true });
        let device = ObservedValue { value: link, protocol: PROTOCOL, mark: true };
        let fence = Value::fence(Fence { unreachable: "10.5.0.0/16".parse().ok(), whole: true, ..Fence::default() });
        for ((key, seen), ran_here) in [
            (route("10.9.0.0/24", Route::Blackhole, PROTOCOL), false),
            (route("10.5.7.0/24", Route::Blackhole, PROTOCOL), true),
            ((Key::Link(Name::new("flannel.7").unwrap()), device), true),
            ((Key::Fence(Family::V4), fence.into()), true),
        ] {
            let mut test = TestNode::new(OnLostLease::Hold);
            test.node.passer.takeover = Takeover::new(Author::Unknown);
            let via = Route::Unicast { via: [192, 168, 0, 8].into(), dev: eth0(), onlink: false };
            let (stale, of_flannel) = route("10.5.8.0/24", via, 3);
            test.kernel.disturb(stale, Some(of_flannel), false);
            test.kernel.disturb(key, Some(seen), false);
            let records = vec![stored("10.5.1.0-24", "192.168.0.1"), stored("10.5.2.0-24", "192.168.0.2")];
            test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
            assert_eq!(test.kernel.entries().contains_key(&stale), ran_here, "{key}");
        }
    })
    .await;
}
