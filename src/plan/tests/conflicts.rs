// SPDX-License-Identifier: Apache-2.0
//! What people read about addresses that many nodes publish.

use super::*;

fn at(plan: &mut Plan, third: u8, address: u8) {
    let mut lease = lease(third, 1);
    lease.attrs.public_ip = Some([192, 168, 0, address].into());
    plan.put(Record { id: lease.id.clone(), lease: Ok(lease) });
}

#[test]
fn of_many_leases_with_our_address_the_first_ones_are_described_and_all_are_counted() {
    let mut plan = plan();
    for third in 2..9 {
        at(&mut plan, third, 1);
    }
    let problems = claims::problems(&plan);
    let (rest, described) = problems.split_last().unwrap();
    assert_eq!((described.len(), rest.as_str()), (5, "and 2 more of this kind: see the peers"));
    for (problem, third) in described.iter().zip(2..) {
        assert!(problem.contains(&format!("and lease 10.5.{third}.0-24 (subnet")), "{problem}");
    }
    plan.remove(&lease(8, 1).id);
    plan.remove(&lease(7, 1).id);
    assert_eq!(claims::problems(&plan).len(), 5, "all are described");
}

#[test]
fn of_many_leases_with_one_address_three_are_named() {
    let mut plan = plan();
    for third in 2..5 {
        at(&mut plan, third, 50);
    }
    let said = |plan: &Plan| {
        let [problem] = &claims::problems(plan)[..] else { panic!("{:?}", claims::problems(plan)) };
        (problem.clone(), problem.matches("lease 10.5.").count())
    };
    let (problem, named) = said(&plan);
    assert!(problem.starts_with("3 leases publish 192.168.0.50: ") && !problem.contains("..."), "{problem}");
    assert_eq!(named, 3);
    at(&mut plan, 5, 50);
    let (problem, named) = said(&plan);
    assert!(problem.starts_with("4 leases publish 192.168.0.50: ") && problem.contains(", ...; one of"), "{problem}");
    assert_eq!(named, 3);
}
