// SPDX-License-Identifier: Apache-2.0
//! Routes that are not ours to touch: the kernel's own, and what others wrote.

use weft_backends::owner::KERNEL_PROTOCOL;
use weft_backends::state::{Key, Name, Route, Seen, Value};
use weft_subnet::source::Event;

use super::{Bench, local, machine, put};
use crate::kernel::{AddrInfo, Notice, Outcome};
use crate::observe::report;
use crate::observe::status::PeerState;
use crate::options::OnLostLease;
use crate::pass::Cause;
use crate::pass::takeover::Takeover;
use crate::subnet_file::Author;

fn route(net: &str, route: Route, protocol: u8) -> (Key, Seen) {
    (Key::Route(net.parse().unwrap(), 0), Seen { value: Value::Route(route), protocol, mark: false })
}

fn eth0() -> Name {
    Name::new("eth0").unwrap()
}

fn of_the_kernel(net: &str) -> (Key, Seen) {
    route(net, Route::Device { dev: eth0() }, KERNEL_PROTOCOL)
}

/// In every way in which a route is written: a new lease, an event of the kernel, a look at everything.
#[tokio::test]
async fn the_kernels_own_route_is_never_replaced_and_the_peer_is_shown_as_failed() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let ((new, kernels), (old, seen)) = (of_the_kernel("10.5.3.0/24"), of_the_kernel("10.5.2.0/24"));
        bench.kernel.disturb(new, Some(kernels), false);
        bench.node.stored(vec![Event::Changes(vec![put("10.5.3.0-24", "192.168.0.3")])]).await;
        bench.kernel.disturb(old, Some(seen.clone()), false);
        bench.node.noticed(vec![Notice::Entry(old, Some(seen))]).await;
        for _ in 0..2 {
            for key in [new, old] {
                assert_eq!(bench.kernel.entries().get(&key).map(|seen| seen.protocol), Some(KERNEL_PROTOCOL));
            }
            let peers = report::status(&bench.node).peers;
            assert!(peers.iter().all(|peer| peer.state == PeerState::Failed), "{peers:#?}");
            let reason = peers[0].reason.as_deref().unwrap();
            assert!(reason.contains("the kernel has its own route to a directly connected network"), "{reason}");
            bench.node.full(Cause::Audit).await;
        }
        bench.kernel.disturb(old, None, false);
        bench.node.noticed(vec![Notice::Entry(old, None)]).await;
        assert_eq!(bench.via("10.5.2.0/24"), "192.168.0.2".parse().ok(), "the address left: ours takes its place");
    })
    .await;
}

#[tokio::test]
async fn a_peer_over_an_address_of_this_node_is_set_aside_while_it_is_there() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let mut with = machine("192.168.0.1");
        with.addrs.push(AddrInfo { index: 2, net: "10.5.2.77/32".parse().unwrap(), scope: 0, flags: 0x80 });
        bench.kernel.set_machine(with);
        bench.node.full(Cause::Kernel).await;
        assert_eq!(bench.via("10.5.2.0/24"), None);
        let peers = report::status(&bench.node).peers;
        let reason = peers[0].reason.as_deref().unwrap();
        assert_eq!(reason, "subnet 10.5.2.0/24 contains 10.5.2.77, an address of this node (eth0)");
        bench.kernel.set_machine(machine("192.168.0.1"));
        bench.node.full(Cause::Kernel).await;
        assert!(bench.via("10.5.2.0/24").is_some());
    })
    .await;
}

/// Services, pods and containers bring addresses and routes all the time; most of them concern no lease.
#[tokio::test]
async fn an_address_or_a_route_plans_only_the_leases_that_it_concerns() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        for third in 10..200 {
            let record = put(&format!("10.5.{third}.0-24"), &format!("192.168.0.{third}"));
            bench.node.stored(vec![Event::Changes(vec![record])]).await;
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
            // The next news is not one too many within a short time.
            bench.node.looks.clear();
            bench.node.plan.planned = 0;
            let looks = bench.kernel.observations();
            bench.kernel.set_machine(machine);
            bench.node.noticed(vec![Notice::Routes]).await;
            assert_eq!(bench.node.plan.planned, planned, "{what}");
            if what.starts_with("an address in") {
                assert_eq!((bench.via("10.5.10.0/24"), bench.kernel.observations()), (None, looks + 1));
            } else {
                assert_eq!(bench.kernel.observations(), looks, "{what}");
            }
        }
        bench.node.looks.clear();
        bench.node.plan.planned = 0;
        bench.kernel.set_machine(machine("192.168.0.1"));
        bench.node.noticed(vec![Notice::Routes]).await;
        assert!(bench.via("10.5.10.0/24").is_some());
        assert!(bench.node.plan.planned <= 3, "{}", bench.node.plan.planned);
    })
    .await;
}

/// Only a peer of another backend whose entries are in the kernel is a reason to loosen rp_filter, and the same one while it is there.
#[tokio::test]
async fn rp_filter_is_loosened_for_a_programmed_peer_of_another_backend_alone() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let ipip = |third: u8| {
            let mut record = put(&format!("10.5.{third}.0-24"), &format!("192.168.0.{third}")).unwrap();
            record.lease.as_mut().unwrap().attrs.backend_type = "ipip".into();
            Event::Changes(vec![Ok(record)])
        };
        let by = |bench: &mut Bench| {
            bench.node.look_at_sysctls();
            bench.node.loosened_by.as_ref().map(|id| id.to_string())
        };
        assert_eq!(by(&mut bench), None, "all peers use our backend");
        let refused = Key::Route("10.5.40.0/24".parse().unwrap(), 0);
        bench.kernel.fail(refused, Some(Outcome::Fatal("no".into())));
        bench.node.stored(vec![ipip(40)]).await;
        assert_eq!(by(&mut bench), None, "its route is not in the kernel");
        bench.node.stored(vec![ipip(41)]).await;
        assert_eq!(by(&mut bench).as_deref(), Some("10.5.41.0-24"));
        bench.kernel.fail(refused, None);
        bench.node.full(Cause::Audit).await;
        assert_eq!(by(&mut bench).as_deref(), Some("10.5.41.0-24"), "it stays the same");
        bench.node.stored(vec![Event::Changes(vec![Err("10.5.41.0-24".into())])]).await;
        assert_eq!(by(&mut bench).as_deref(), Some("10.5.40.0-24"));
        bench.node.stored(vec![Event::Changes(vec![Err("10.5.40.0-24".into())])]).await;
        assert_eq!(by(&mut bench), None);
    })
    .await;
}

/// What flannel left goes once, with the first look that may remove anything; the same written later is somebody else's.
#[tokio::test]
async fn flannels_leftovers_are_those_of_the_first_look() {
    local(async {
        let left = |net: &str, via: &str| {
            route(net, Route::Unicast { via: via.parse().unwrap(), dev: eth0(), onlink: false }, 3)
        };
        let list = || Event::Snapshot {
            records: vec![put("10.5.1.0-24", "192.168.0.1").unwrap(), put("10.5.2.0-24", "192.168.0.2").unwrap()],
            reset: false,
        };
        let (unknown, another, weft) = (Author::Unknown, Author::Another, Author::Weft);
        let rows = [(unknown, false), (unknown, true), (weft, false), (another, false), (another, true)];
        for (author, weft_was_here) in rows {
            let mut bench = Bench::new(OnLostLease::Hold);
            bench.node.passer.takeover = Takeover::new(author);
            let (stale, seen) = left("10.5.8.0/24", "192.168.0.8");
            bench.kernel.disturb(stale, Some(seen), false);
            let (own, of_weft) = (Key::Route("10.5.2.0/24".parse().unwrap(), 0), weft_backends::owner::PROTOCOL);
            if weft_was_here {
                let seen = left("10.5.2.0/24", "192.168.0.2").1;
                bench.kernel.disturb(own, Some(Seen { protocol: of_weft, ..seen }), false);
            }
            bench.node.full(Cause::Start).await;
            assert!(bench.kernel.entries().contains_key(&stale), "no list of leases yet");
            // Written while weft waits for the list.
            let (late, seen) = left("10.5.9.0/24", "192.168.0.8");
            bench.kernel.disturb(late, Some(seen.clone()), true);
            bench.node.stored(vec![list()]).await;
            // Entries of ours speak only where the mark does not.
            let is_removed = author == another || (author == unknown && !weft_was_here);
            assert_eq!(bench.kernel.entries().contains_key(&stale), !is_removed, "{author:?} {weft_was_here}");
            bench.kernel.disturb(stale, Some(seen), true);
            bench.node.full(Cause::Audit).await;
            assert!(bench.kernel.entries().contains_key(&stale), "written again: not flannel's");
            assert!(bench.kernel.entries().contains_key(&late));
        }
    })
    .await;
}
