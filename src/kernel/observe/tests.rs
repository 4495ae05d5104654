// SPDX-License-Identifier: Apache-2.0
//! What an observation makes of links that come and go between its dumps, and of routes with the same key. tests/kernel/adapter.rs has the
//! rest.

use weft_backends::state::Route;

use super::super::linux::LinuxOptions;
use super::*;

/// A link with this index and name.
fn link(index: u32, name: &str) -> (u32, LinkFacts) {
    let (up, carrier, loopback, creator) = (true, true, false, Creator::Unknown);
    let name = Name::new(name).unwrap();
    let info = LinkInfo { index, name, mtu: 1500, mac: None, up, carrier, loopback, creator };
    (index, LinkFacts { info, link_type: None, veth: false, alias: String::new() })
}

/// A route of the agent over the link with this index. 0 stands for none.
fn route(net: &str, index: u32) -> RouteFacts {
    let kind = if index == 0 { libc::RTN_BLACKHOLE } else { libc::RTN_UNICAST };
    let (metric, onlink, nexthop, other_form) = (0, false, 0, false);
    RouteFacts {
        net: net.parse().unwrap(),
        metric,
        kind,
        protocol: PROTOCOL,
        via: None,
        index,
        onlink,
        nexthop,
        other_form,
    }
}

/// A link may appear after the links were read and before the routes are. Its route would look like one without a device, and would be
/// written again although it is right.
#[test]
fn a_route_over_a_link_that_appeared_meanwhile_makes_the_reading_incomplete() {
    let links = Links::from([link(2, "eth0")]);
    let routes = [route("10.5.2.0/24", 2), route("10.5.3.0/24", 0)];
    let before = vec![(Key::Open("192.0.2.1".parse().unwrap()), Value::Open.into())];
    let found = with_routes(before, &routes, &links).unwrap();
    let values: Vec<Value> = found.into_iter().map(|(_, seen)| seen.value).collect();
    let over_eth0 = Value::Route(Route::Device { dev: Name::new("eth0").unwrap() });
    assert_eq!(values, [Value::Open, over_eth0, Value::Route(Route::Blackhole)]);
    for place in 0..=routes.len() {
        let mut routes = routes.to_vec();
        routes.insert(place, route("10.5.4.0/24", 3));
        assert_eq!(with_routes(Vec::new(), &routes, &links), None, "at {place}");
    }
}

#[test]
fn an_incomplete_reading_is_repeated_a_few_times() {
    let read = |complete_at: u32| {
        let mut readings = 0;
        let result = until_complete(|| {
            readings += 1;
            Ok((readings == complete_at).then_some("complete"))
        });
        (result.map_err(|error| error.kind()), readings)
    };
    assert_eq!(read(1), (Ok("complete"), 1));
    assert_eq!(read(TRIES), (Ok("complete"), TRIES));
    assert_eq!(read(TRIES + 1), (Err(io::ErrorKind::Interrupted), TRIES));
    let mut readings = 0;
    let failed = until_complete(|| {
        readings += 1;
        Err::<Option<()>, _>(io::ErrorKind::PermissionDenied.into())
    });
    assert_eq!((failed.unwrap_err().kind(), readings), (io::ErrorKind::PermissionDenied, 1), "an error is no reason");
}

/// A route of the kernel must stay, and a route of ours beside it must be removable. All other routes with one key are deleted before ours is
/// written.
#[test]
fn several_routes_with_one_key_have_one_value_and_those_beside_a_route_of_the_kernel_are_not_deleted() {
    const STATIC: u8 = 4;
    let (nexthop_objects, instance, alias) = (false, 0, "weft test".to_owned());
    let mut kernel = LinuxKernel::open(LinuxOptions { nexthop_objects, instance, protocol: PROTOCOL, alias }).unwrap();
    let key = |third: u8| Key::Route(format!("10.5.{third}.0/24").parse().unwrap(), 0);
    let seen = |(third, protocol): (u8, u8)| {
        (key(third), ObservedValue { value: Value::Route(Route::Blackhole), protocol, mark: false })
    };
    let found = [
        (1, PROTOCOL),
        (2, STATIC),
        (2, PROTOCOL),
        (2, STATIC),
        (3, KERNEL_PROTOCOL),
        (3, PROTOCOL),
        (4, STATIC),
        (4, KERNEL_PROTOCOL),
    ];
    let observed = kernel.one_value_per_key(found.map(seen).to_vec());
    let value_of = |third: u8| observed.get(&key(third)).map(|seen| seen.value.clone());
    assert_eq!(value_of(1), Some(Value::Route(Route::Blackhole)));
    assert!([2, 3, 4].map(value_of).iter().all(|value| *value == Some(Value::Route(Route::Other))), "{observed:?}");
    let protocol_of = |third: u8| observed.get(&key(third)).map(|seen| seen.protocol);
    assert_eq!([3, 4].map(protocol_of), [Some(PROTOCOL), Some(KERNEL_PROTOCOL)]);
    assert_eq!(kernel.doubled, HashMap::from([(key(2), 3)]));
    assert_eq!(kernel.shared_with_kernel, HashSet::from([key(3), key(4)]));
    kernel.one_value_per_key(Vec::new());
    assert!(kernel.doubled.is_empty() && kernel.shared_with_kernel.is_empty(), "the routes are gone");
}
