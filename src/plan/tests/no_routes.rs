// SPDX-License-Identifier: Apache-2.0
//! A backend that makes no routes: what the plan leaves out because of it, and what it shows anyway.

use weft_backends::backend::Planned;
use weft_backends::state::{Route, State};
use weft_subnet::cidr::Family;

use super::*;
use crate::options::Fences;
use crate::pass::takeover::Takeover;
use crate::subnet_file::Author;

struct NoRoutes(&'static str);

impl Backend for NoRoutes {
    fn kind(&self) -> &'static str {
        self.0
    }
    fn serves(&self, _: &str) -> bool {
        true
    }
    fn makes_routes(&self) -> bool {
        false
    }
    fn mtu(&self, host: &Host, _: Family) -> u32 {
        host.uplink.mtu
    }
    fn advertise(&self, _: &Host) -> Result<Attrs, Skip> {
        Ok(Attrs::default())
    }
    fn device(&self, _: &Host, _: &Lease) -> State {
        State::new()
    }
    fn plan(&self, _: &Host, _: &Lease, _: &Lease) -> Planned {
        Planned::default()
    }
}

fn extra_without_routes() -> ExtraBackend {
    let Plan { net_conf, host, .. } = plan();
    ExtraBackend::new(ParsedConf { text: String::new(), net_conf, backend: Box::new(NoRoutes("none")) }, host)
}

fn without_routes() -> Plan {
    let Plan { net_conf, host, own, .. } = plan();
    Plan::new(net_conf, Box::new(NoRoutes("none")), host, own)
}

#[test]
fn fail_closed_is_left_out_with_its_reason_and_the_blackhole_is_not() {
    let fences = Fences { fail_closed: true, blackhole: true };
    let mut plan = without_routes().with_fences(fences);
    let fence =
        |plan: &Plan| plan.fence_keys().iter().map(|key| plan.desired(key).unwrap().to_string()).collect::<Vec<_>>();
    assert_eq!(fence(&plan), ["blackhole 10.5.1.0/24"]);
    let [problem] = &plan.problems()[..] else { panic!("{:?}", plan.problems()) };
    assert!(problem.starts_with("--fail-closed is left out: the backend none makes no routes"), "{problem}");
    // A node whose address lies inside Network needs no exception.
    let mut inside = lease(2, 1);
    inside.attrs.public_ip = Some([10, 5, 2, 2].into());
    assert_eq!(plan.put(Record { id: inside.id.clone(), lease: Ok(inside) }), []);
    // Another backend needs the fence again, and that node is an exception then.
    let Plan { net_conf, backend, host, own, .. } = self::plan();
    plan.rebase(net_conf, backend, host, own);
    assert_eq!(fence(&plan), ["unreachable 10.5.0.0/16, blackhole 10.5.1.0/24", ""]);
    assert_eq!(plan.problems(), [""; 0]);
    assert_eq!(without_routes().with_fences(Fences { fail_closed: false, blackhole: true }).problems(), [""; 0]);
}

/// Until the last node has followed the change, routes of another program lead to the nodes that have not.
#[test]
fn fail_closed_is_left_out_at_a_start_during_a_change_from_such_a_backend() {
    let fences = Fences { fail_closed: true, blackhole: false };
    let mut plan = plan().with_earlier(vec![extra_without_routes()], false).with_fences(fences);
    assert_eq!(plan.fence_keys(), []);
    let [problem] = &plan.problems()[..] else { panic!("{:?}", plan.problems()) };
    assert!(problem.starts_with("--fail-closed is left out: the backend none makes no routes"), "{problem}");
    let number = plan.earlier().next().unwrap().0;
    plan.drop_earlier(number);
    assert_eq!((plan.fence_keys().len(), plan.problems().len()), (1, 0), "the change has ended");
}

/// Packets may take the default route to the first peers that follow the change.
#[test]
fn fail_closed_is_left_out_while_the_next_backend_makes_no_routes() {
    let mut plan = plan().with_fences(Fences { fail_closed: true, blackhole: false });
    assert_eq!(plan.fence_keys().len(), 1);
    plan.prepare(extra_without_routes());
    assert_eq!((plan.fence_keys().len(), plan.problems().len()), (0, 1), "{:?}", plan.problems());
    plan.give_up_next();
    assert_eq!((plan.fence_keys().len(), plan.problems().len()), (1, 0), "{:?}", plan.problems());
}

#[test]
fn peers_of_any_type_are_believed_and_have_no_entries_and_no_fault() {
    let mut plan = without_routes();
    for (third, kind) in [(2, "vxlan"), (3, "host-gw"), (4, ""), (5, "carrier-pigeon")] {
        let mut lease = lease(third, 1);
        lease.attrs.backend_type = kind.into();
        assert_eq!(plan.put(Record { id: lease.id.clone(), lease: Ok(lease) }), [], "{kind}");
    }
    assert_eq!((plan.peers().len(), plan.set_aside_count(), plan.peers_of_other_backends().count()), (4, 0, 0));
    assert_eq!((plan.mtu(), plan.devices().count()), (1500, 0));
    let mut outside = lease(6, 1);
    outside.subnets = Subnets::from_key("10.6.6.0-24").unwrap();
    plan.put(Record { id: outside.id.clone(), lease: Ok(outside) });
    assert_eq!((plan.peers().len(), plan.set_aside_count()), (4, 1), "they are judged anyway");
}

/// flannel's host-gw and an administrator write the same routes.
#[test]
fn no_route_is_taken_for_flannels() {
    let (eth0, via) = (Name::new("eth0").unwrap(), IpAddr::from([192, 168, 0, 9]));
    let key = Key::Route("10.5.9.0/24".parse().unwrap(), 0);
    let value = Value::Route(Route::Unicast { via, dev: eth0, onlink: false });
    let seen = ObservedValue { value, protocol: 3, mark: false };
    let observed = Observed::from([(key, seen.clone())]);
    let on_link = weft_backends::host::Reach::Link(eth0);
    for (makes_routes, mut plan) in [(true, plan()), (false, without_routes())] {
        plan.host.routes = OnLink::new([("192.168.0.0/24".parse().unwrap(), 0, on_link)]);
        for author in [Author::Another, Author::Unknown] {
            let mut takeover = Takeover::new(author);
            takeover.update(&observed, &plan);
            assert_eq!(takeover.contains(&key, &seen), makes_routes, "{author:?}");
        }
    }
}
