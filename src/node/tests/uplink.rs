// SPDX-License-Identifier: Apache-2.0
//! An uplink that is gone, for a moment or for longer.

use std::path::Path;

use tokio::time::Instant;
use weft_backends::state::Name;
use weft_subnet::saved_peers::Uplink;
use weft_subnet::source::Event;

use super::{TestNode, local, machine, stored};
use crate::kernel::{AddrInfo, Machine};
use crate::node::host::UPLINK_WAIT;
use crate::observe::fault::FaultKind;
use crate::observe::problem::ProblemKind;
use crate::options::OnLostLease;
use crate::pass::Cause;
use crate::saved::{SavedFile, Saver};

/// eth0 has these addresses; eth1 has 192.168.9.1 and a default route of a higher metric.
fn two_uplinks(addrs: &[&str]) -> Machine {
    let mut all = machine("192.168.0.1");
    all.addrs.clear();
    let eth1 = Name::new("eth1").unwrap();
    let mut link = all.links[0].clone();
    (link.index, link.name) = (3, eth1);
    all.links.push(link);
    let addr = |index, net: &str| AddrInfo { index, net: net.parse().unwrap(), scope: 0, flags: 0x80 };
    all.addrs.extend(addrs.iter().map(|net| addr(2, net)));
    all.addrs.push(addr(3, "192.168.9.1/24"));
    let mut route = all.routes[0].clone();
    (route.dev, route.metric) = (Some(eth1), 500);
    all.routes.push(route);
    all
}

/// Moves the time of the loss into the past, so that the wait is over.
fn end_wait(test: &mut TestNode) {
    let since = test.node.uplink.gone_since.unwrap() - UPLINK_WAIT;
    (test.node.uplink.gone_since, test.node.uplink.change_due) = (Some(since), Some(Instant::now()));
}

fn uplink(test: &TestNode) -> String {
    let uplink = &test.node.plan.host().uplink;
    format!("{} {}", uplink.name, uplink.v4.unwrap())
}

#[tokio::test]
async fn an_uplink_that_is_gone_for_a_moment_is_kept() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        for (addrs, next) in [(vec![], "eth1 (192.168.9.1)"), (vec!["192.168.0.100/32"], "eth0 (192.168.0.100)")] {
            test.kernel.set_machine(two_uplinks(&addrs));
            test.node.full_pass(Cause::Kernel).await;
            assert_eq!(uplink(&test), "eth0 192.168.0.1");
            let problem = test.node.uplink.problem.clone().unwrap();
            assert_eq!(problem, format!("eth0 lost 192.168.0.1: {next} is used instead if that lasts 10 s"));
            assert_eq!(test.node.uplink.change_due, test.node.uplink.gone_since.map(|since| since + UPLINK_WAIT));
            assert!(test.node.next_wake() <= test.node.uplink.change_due, "the node must wake up for it");
            test.kernel.set_machine(two_uplinks(&["192.168.0.100/32", "192.168.0.1/24"]));
            test.node.full_pass(Cause::Kernel).await;
            assert_eq!((uplink(&test).as_str(), &test.node.uplink.problem), ("eth0 192.168.0.1", &None));
            assert_eq!((test.node.uplink.gone_since, test.node.uplink.change_due), (None, None));
        }
        assert!(test.asked(0).await, "nothing must be published");
    })
    .await;
}

#[tokio::test]
async fn a_link_that_carries_no_packets_is_named_until_it_does() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let mut machine = two_uplinks(&["192.168.0.1/24"]);
        for (up, carrier, words) in [
            (true, true, None),
            (false, false, Some(("uplink: eth0 is down; run: ip link set eth0 up", Some("ip link set eth0 up")))),
            (true, false, Some(("uplink: eth0 has no carrier: ", None))),
            (true, true, None),
        ] {
            // Another link says nothing about the uplink.
            (machine.links[1].up, machine.links[1].carrier) = (!up, !carrier);
            (machine.links[0].up, machine.links[0].carrier) = (up, carrier);
            test.kernel.set_machine(machine.clone());
            test.node.full_pass(Cause::Kernel).await;
            let warnings = test.node.warnings();
            let named = warnings.iter().find(|problem| problem.kind == ProblemKind::Uplink);
            assert_eq!(named.is_some(), words.is_some(), "{warnings:?}");
            if let (Some(problem), Some((text, command))) = (named, words) {
                assert!(problem.text.starts_with(text) && problem.command.as_deref() == command, "{problem:?}");
            }
        }
    })
    .await;
}

/// The lease cannot name the address that `--public-ip` wants once the uplink has lost it.
#[tokio::test]
async fn a_lease_that_cannot_be_written_is_a_fault_until_it_can() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.context.options.uplink.public_ip = "192.168.0.1".parse().ok();
        let fault = |test: &TestNode| {
            let faults = test.node.state().faults;
            faults.into_iter().find(|fault| fault.kind == FaultKind::Uplink).map(|fault| fault.text)
        };
        test.kernel.set_machine(two_uplinks(&["192.168.0.6/24"]));
        for pass in ["first", "second"] {
            test.node.full_pass(Cause::Audit).await;
            assert_eq!(uplink(&test), "eth0 192.168.0.6");
            let text = fault(&test).unwrap_or_else(|| panic!("no fault after the {pass} pass"));
            assert!(text.contains("192.168.0.1") && text.contains("192.168.0.6"), "{text}");
        }
        assert!(test.asked(0).await, "nothing must be published");
        // The other address may stay.
        test.kernel.set_machine(two_uplinks(&["192.168.0.6/24", "192.168.0.1/24"]));
        test.node.full_pass(Cause::Audit).await;
        assert_eq!((uplink(&test).as_str(), fault(&test)), ("eth0 192.168.0.1", None));
    })
    .await;
}

#[tokio::test]
async fn another_uplink_is_used_when_the_old_one_stays_away() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.kernel.set_machine(two_uplinks(&[]));
        test.node.full_pass(Cause::Kernel).await;
        end_wait(&mut test);
        test.node.tick().await;
        assert_eq!(uplink(&test), "eth1 192.168.9.1");
        assert!(test.asked(1).await, "the lease must be updated");
        // When the old uplink comes back, the new one stays in use.
        test.kernel.set_machine(two_uplinks(&["192.168.0.1/24"]));
        test.node.full_pass(Cause::Kernel).await;
        assert_eq!((uplink(&test).as_str(), &test.node.uplink.problem), ("eth1 192.168.9.1", &None));
    })
    .await;
}

#[tokio::test]
async fn a_node_without_another_uplink_waits() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let mut alone = machine("192.168.0.1");
        alone.addrs.clear();
        test.kernel.set_machine(alone);
        test.node.full_pass(Cause::Kernel).await;
        assert!(test.node.uplink.problem.is_some());
        end_wait(&mut test);
        test.node.tick().await;
        assert_eq!(uplink(&test), "eth0 192.168.0.1");
        assert_eq!(test.node.uplink.change_due, None, "the host is read again only after a notification");
        test.node.store_changed(vec![Event::Answered]).await;
        assert!(test.asked(0).await);
    })
    .await;
}

/// The next start needs to know which interface was in use, and because of which flags.
#[tokio::test]
async fn the_uplink_is_saved_with_the_flags_that_chose_it() {
    local(async {
        let dir = tempfile::tempdir().unwrap();
        let saved_file =
            SavedFile::new(Some(dir.path()), Path::new("/run/x/subnet.env"), Some("script".into())).unwrap();
        let mut test = TestNode::new(OnLostLease::Hold);
        test.node.context.saver = Saver::new(Some(saved_file.clone()));
        test.node.context.options.uplink.can_reach = "192.0.2.9".parse().ok();
        test.node.lease_renewed(None);
        test.node.full_pass(Cause::Start).await;
        let records = vec![stored("10.5.1.0-24", "192.168.0.1")];
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        while saved_file.read_head().is_none() {
            test.node.save(Instant::now());
            tokio::task::yield_now().await;
        }
        let flags = "--iface-can-reach 192.0.2.9".into();
        let wanted = Uplink { name: "eth0".into(), v4: Some([192, 168, 0, 1].into()), v6: None, flags };
        assert_eq!(saved_file.read_head().unwrap().uplink, Some(wanted));
    })
    .await;
}
