// SPDX-License-Identifier: Apache-2.0
//! Measures time and allocations of the plan: one event among N peers, the plan of all leases, and the comparison with everything.

// If one of these calls fails, the bench itself is wrong.
#![allow(clippy::expect_used)]

use std::net::{IpAddr, Ipv4Addr};

use divan::{AllocProfiler, Bencher, black_box};
use ipnet::{IpNet, Ipv4Net};
use weft::plan::Plan;
use weft_backends::diff::Op;
use weft_backends::host::{Host, OnLink, Reach, Uplink};
use weft_backends::owner::PROTOCOL;
use weft_backends::register;
use weft_backends::state::{Mac, Name, Observed, ObservedValue};
use weft_backends::vxlan::VtepMac;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::lease::{Age, Lease, Record};
use weft_subnet::net_conf::NetConf;

#[global_allocator]
static ALLOC: AllocProfiler = AllocProfiler::system();

/// Backends and numbers of peers.
const ALL: [(&str, u32); 4] = [("vxlan", 1000), ("vxlan", 50_000), ("host-gw", 1000), ("host-gw", 50_000)];

fn main() {
    divan::main();
}

fn subnet(number: u32) -> Ipv4Net {
    let first = u32::from(Ipv4Addr::new(10, 1, 0, 0)) + (number << 8);
    Ipv4Net::new(first.into(), 24).expect("a net")
}

fn record(kind: &str, number: u32) -> Record {
    let subnets = Subnets { v4: Some(subnet(number)), v6: None };
    let id = subnets.to_key().into();
    let [_, a, b, c] = number.to_be_bytes();
    let data = format!(r#"{{"VNI":1,"VtepMAC":"02:04:00:{a:02x}:{b:02x}:{c:02x}"}}"#);
    let attrs = Attrs {
        public_ip: Some((u32::from(Ipv4Addr::new(172, 16, 1, 0)) + number).into()),
        backend_type: kind.to_owned(),
        backend_data: (kind == "vxlan").then(|| data.into()),
        ..Attrs::default()
    };
    let age = Age { stamp: u64::from(number), tie: "".into() };
    Record { id: std::sync::Arc::clone(&id), lease: Ok(Lease { id, subnets, attrs, age }) }
}

fn empty(kind: &str) -> Plan {
    let conf = format!(r#"{{"Network":"10.0.0.0/8","Backend":{{"Type":"{kind}"}}}}"#);
    let net_conf = NetConf::parse(&conf).expect("a net-conf");
    let backend = register::make(&net_conf).expect("a backend");
    let (name, address) = (Name::new("eth0").expect("a name"), Ipv4Addr::new(172, 31, 255, 1));
    let on_link = IpNet::new(IpAddr::V4(Ipv4Addr::new(172, 16, 0, 0)), 12).expect("a net");
    let host = Host {
        public_v4: Some(address),
        identities: VtepMac::both(Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2])),
        routes: OnLink::new([(on_link, 0, Reach::Link(name))]),
        ..Host::new(Uplink { name, mtu: 1500, v4: Some(address), v6: None })
    };
    let subnets = Subnets { v4: Some("10.250.0.0/24".parse().expect("a net")), v6: None };
    let own = Lease { id: subnets.to_key().into(), subnets, attrs: Attrs::default(), age: Age::default() };
    Plan::new(net_conf, backend, host, own)
}

fn filled((kind, peers): (&str, u32)) -> Plan {
    let mut plan = empty(kind);
    for number in 0..peers {
        black_box(plan.put(record(kind, number)));
    }
    plan
}

/// Adds and removes one lease among N. The time must not depend on N.
#[divan::bench(args = ALL)]
fn event_add(bencher: Bencher<'_, '_>, at: (&str, u32)) {
    let mut plan = filled(at);
    let mut next = at.1;
    bencher
        .with_inputs(|| {
            next = at.1 + (next + 1) % 1000;
            record(at.0, next)
        })
        .bench_local_values(|record| {
            let id = std::sync::Arc::clone(&record.id);
            let changed = plan.put(record);
            (changed, plan.remove(&id))
        });
}

/// Puts a lease that has not changed, as after a renewal.
#[divan::bench(args = ALL)]
fn event_renewal(bencher: Bencher<'_, '_>, at: (&str, u32)) {
    let mut plan = filled(at);
    bencher.with_inputs(|| record(at.0, at.1 / 2)).bench_local_values(|record| plan.put(record));
}

/// Puts all leases into an empty plan.
#[divan::bench(args = ALL, sample_count = 10, sample_size = 1)]
fn plan_all(bencher: Bencher<'_, '_>, at: (&str, u32)) {
    let records = || (0..at.1).map(|number| record(at.0, number)).collect::<Vec<_>>();
    bencher.counter(at.1).with_inputs(|| (empty(at.0), records())).bench_local_values(|(mut plan, records)| {
        for record in records {
            black_box(plan.put(record));
        }
        plan
    });
}

/// Compares the plan with a kernel that has everything, as an audit does.
#[divan::bench(args = ALL, sample_count = 10, sample_size = 1)]
fn diff_nothing(bencher: Bencher<'_, '_>, at: (&str, u32)) {
    let plan = filled(at);
    let seen = |value| ObservedValue { value, protocol: PROTOCOL, mark: true };
    let ops = plan.difference(&Observed::new(), |_, _| true);
    let entry = |op: &Op| match op {
        Op::Ensure(key, value) | Op::Recreate(key, value) | Op::Remove(key, value) => (*key, seen(value.clone())),
    };
    let observed: Observed = ops.iter().map(entry).collect();
    bencher.counter(at.1).bench_local(|| {
        let ops = plan.difference(&observed, |_, _| true);
        assert!(ops.is_empty());
    });
}
