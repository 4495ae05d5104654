// SPDX-License-Identifier: Apache-2.0
//! Fixed seeds. Their number is bounded, because they run at every test.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are not inside #[test] themselves

use std::io::Write;
use std::process::{Command, Stdio};

use weft_sim::event::{Event, Trouble};
use weft_sim::hostile::Attack;
use weft_sim::net_conf::{Bad, Edit};
use weft_sim::run::Outcome;
use weft_sim::scenario::{Scenario, StoreKind, Timed};
use weft_subnet::old_defects::Defect;

/// Runs a scenario in a process of its own.
fn play(scenario: &Scenario) -> Outcome {
    let mut child = Command::new(env!("CARGO_BIN_EXE_weft-sim"))
        .args(["play", "--outcome"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(serde_json::to_string(scenario).unwrap().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

#[test]
fn the_invariants_hold_for_fixed_seeds() {
    for seed in 1..=6 {
        let outcome = play(&Scenario::of_seed(seed));
        assert!(outcome.wrong.is_empty(), "make sim SEED={seed}: {:?}", outcome.wrong);
    }
}

#[test]
fn a_seed_decides_everything() {
    let scenario = Scenario::of_seed(7);
    assert_eq!(play(&scenario).fingerprint, play(&scenario).fingerprint);
    assert_ne!(play(&scenario).fingerprint, play(&Scenario::of_seed(8)).fingerprint);
}

/// A scenario in which a defect must be found, and which is right without the defect.
fn scenario(events: Vec<Event>, change: impl FnOnce(&mut Scenario)) -> Scenario {
    let events = events.into_iter().zip(1..).map(|(event, number)| Timed { at: 30 * number, event }).collect();
    let (machines, backend, of_seed) = (3, "vxlan".to_owned(), Scenario::of_seed(1));
    let (lan_inside, tight, by_address, store) = (false, false, false, StoreKind::Etcd);
    let mut scenario = Scenario {
        machines,
        backend,
        seconds: 400,
        lease_ttl: 120,
        events,
        lan_inside,
        tight,
        by_address,
        store,
        ..of_seed
    };
    change(&mut scenario);
    scenario
}

/// net-conf changes while agents are down, frozen, cut off from the store, or wait for their disks, and twice it is one that nobody may apply. No
/// packet may be lost meanwhile, and at rest all machines follow.
#[test]
fn changes_of_net_conf_lose_no_packet() {
    let to = |backend: &str| Event::NetConf(Edit::Backend(backend.to_owned()));
    let events = vec![
        Event::Kill(0, 200),
        to("host-gw"),
        Event::Wire(1, Trouble::Silence, 120),
        Event::NetConf(Edit::Vni(9)),
        to("vxlan"),
        Event::Freeze(2, 40),
        Event::NetConf(Edit::Wide(true)),
        Event::SlowDisk(0, 5000, 200),
        to("ipip"),
        Event::Kill(1, 15),
        Event::NetConf(Edit::Wide(false)),
        to("vxlan"),
        Event::NetConf(Edit::Vni(3)),
    ];
    // No agent starts while these are in the store.
    let mistakes = vec![Event::BadNetConf(Bad::OtherNetwork, 20), Event::BadNetConf(Bad::OtherPort, 20)];
    for store in [StoreKind::Etcd, StoreKind::Kube] {
        for events in [&events, &mistakes] {
            let outcome = play(&scenario(events.clone(), |all| {
                (all.store, all.lossless, all.lease_ttl) = (store, true, 86_400);
            }));
            assert_eq!(outcome.wrong, [""; 0], "{store:?}: {events:?}");
        }
    }
}

/// A receiver must know the key of a sender before the first packet, so no agent is away for a tenth of `--change-grace` here, which is 6 s.
#[test]
fn changes_to_wireguard_and_back_lose_no_packet() {
    let to = |backend: &str| Event::NetConf(Edit::Backend(backend.to_owned()));
    let events = vec![
        to("wireguard"),
        Event::Kill(0, 2),
        to("vxlan"),
        Event::Freeze(2, 2),
        to("host-gw"),
        to("wireguard"),
        Event::Deaf(1, 15),
        to("ipip"),
        Event::Kill(1, 2),
        to("wireguard"),
    ];
    for store in [StoreKind::Etcd, StoreKind::Kube] {
        let outcome = play(&scenario(events.clone(), |all| {
            (all.store, all.lossless, all.lease_ttl) = (store, true, 86_400);
        }));
        assert_eq!(outcome.wrong, [""; 0], "{store:?}");
    }
}

/// Without this, a test in which no packet may be lost would say nothing.
#[test]
fn a_packet_that_is_lost_is_found() {
    let outcome = play(&scenario(vec![Event::LinkDown(0, 10)], |all| {
        (all.lossless, all.lease_ttl, all.events[0].at) = (true, 86_400, 200);
    }));
    assert!(outcome.wrong.iter().any(|text| text.starts_with("a packet from n")), "{:?}", outcome.wrong);
}

/// The second machine does not hear that the backend changes, so the first one must keep the earlier backend. It is started again after
/// Network became wider, too.
#[test]
fn a_restart_after_two_changes_of_net_conf_loses_no_packet() {
    let changes = [Event::NetConf(Edit::Backend("host-gw".to_owned())), Event::NetConf(Edit::Wide(true))];
    let mut events = vec![Event::Wire(1, Trouble::Silence, 130)];
    events.extend(changes);
    events.push(Event::Kill(0, 5));
    for store in [StoreKind::Etcd, StoreKind::Kube] {
        let outcome = play(&scenario(events.clone(), |all| {
            (all.store, all.lossless, all.lease_ttl) = (store, true, 86_400);
        }));
        assert_eq!(outcome.wrong, [""; 0], "{store:?}");
    }
}

#[test]
fn attackers_with_the_rights_of_one_node_cost_no_packet() {
    let mut attacks = vec![Attack::Huge, Attack::Flood, Attack::PeerAddress, Attack::PeerRoute, Attack::PeerSubnet];
    attacks.extend([Attack::ManyVnis, Attack::Keys]);
    attacks.extend((0..12).flat_map(|number| [Attack::Address(number), Attack::Type(number), Attack::Data(number)]));
    attacks.extend((0..6).flat_map(|number| [Attack::NotJson(number), Attack::OtherWays(number)]));
    for store in [StoreKind::Etcd, StoreKind::Kube] {
        let events = attacks.iter().map(|attack| Event::Hostile(*attack, 1, 25)).collect();
        let outcome = play(&scenario(events, |all| {
            (all.store, all.lossless, all.lease_ttl, all.lan_inside) = (store, true, 86_400, true);
        }));
        assert_eq!(outcome.wrong, [""; 0], "{store:?}");
    }
}

/// What could not be saved is saved when there is room again. In Kubernetes nothing changes meanwhile, not even the end of the lease.
#[test]
fn what_a_full_disk_refused_is_written_later() {
    let events = vec![Event::FullDisk(0, 300), Event::NewDisk(0)];
    assert_eq!(play(&scenario(events, |all| all.store = StoreKind::Kube)).wrong, [""; 0]);
}

#[test]
fn a_power_loss_takes_back_no_file_that_was_written() {
    let events =
        vec![Event::DeleteLease(0), Event::SlowDisk(0, 4000, 100), Event::PowerLoss(0, 20), Event::PowerLoss(1, 20)];
    assert_eq!(play(&scenario(events, |_| {})).wrong, [""; 0]);
}

/// Nodes that only publish a lease are reached by the machines, which is checked before the cluster counts as at rest.
#[test]
fn nodes_that_only_publish_make_a_cluster_large() {
    for store in [StoreKind::Etcd, StoreKind::Kube] {
        let large = scenario(Vec::new(), |all| (all.store, all.publishers, all.until_rest) = (store, 300, true));
        let outcome = play(&large);
        assert_eq!(outcome.wrong, [""; 0], "{store:?}");
        assert!(outcome.virtual_s < 100, "it ends when it is at rest: {} s", outcome.virtual_s);
        let wrong = play(&Scenario { seconds: 0, ..large }).wrong;
        assert!(wrong.iter().any(|text| text == "100 nodes have not published a lease yet"), "{store:?}: {wrong:?}");
    }
}

/// The next revision after the last one that a node knows deletes its lease, and is compacted before its watch is resumed. Many versions of etcd then
/// tell nobody of the deletion. The node must find out nevertheless.
#[test]
fn a_deletion_that_a_compaction_hides_is_noticed() {
    let events = vec![Event::Wire(0, Trouble::Refused, 300), Event::Compact];
    let outcome = play(&scenario(events, |all| all.events[1].at = 200));
    assert_eq!(outcome.wrong, [""; 0]);
}

/// Each of these events is one that the generator of scenarios makes, too.
#[test]
fn defects_of_the_past_are_found() {
    let foreign = vec![Event::ForeignRoute(0, 7), Event::Terminate(0, 3)];
    // The lease ends while the agent is away, and the store is away when it comes back.
    let ended = vec![Event::Kill(0, 300), Event::Wire(0, Trouble::Silence, 400)];
    // The first machine does not notice that the virtual address leaves it, so its lease still names that address when the second one starts.
    let vip = vec![Event::Vip(0), Event::Kill(0, 100), Event::Vip(1), Event::Kill(1, 3)];
    let device = vec![Event::ForeignDevice(0, 7), Event::OtherVni(7, 60)];
    let copy = vec![Event::CopiedIdentity(0, 200)];
    let table = [
        (Defect::ForeignRoutesRemoved, scenario(foreign, |_| {})),
        (Defect::LanLeasesBelieved, scenario(vec![Event::LanLease(60)], |all| all.lan_inside = true)),
        (Defect::EndedLeasesUsed, scenario(ended, |_| {})),
        (Defect::VirtualAddressesPublished, scenario(vip, |_| {})),
        (Defect::OwnDeviceChosen, scenario(vec![Event::AddressAway(0, 15)], |all| all.by_address = true)),
        (Defect::ForeignDevicesSeized, scenario(device.clone(), |_| {})),
        (Defect::ForeignDevicesSeized, scenario(device, |all| all.store = StoreKind::Kube)),
        (Defect::CopiedMacsBelieved, scenario(copy.clone(), |_| {})),
        (Defect::CopiedMacsBelieved, scenario(copy, |all| all.store = StoreKind::Kube)),
    ];
    for (defect, good) in table {
        let bad = Scenario { defect: Some(defect), ..good.clone() };
        assert_eq!(play(&good).wrong, [""; 0], "{defect:?} is switched off: {good:?}");
        assert!(!play(&bad).wrong.is_empty(), "{defect:?} must be found: {good:?}");
    }
}
