// SPDX-License-Identifier: Apache-2.0
//! What the monitor does when it cannot read the links. tests/kernel/adapter_monitor.rs has the rest.

use std::cell::RefCell;
use std::rc::Rc;

use netlink_sys::protocols::NETLINK_USERSOCK;
use weft_backends::owner::PROTOCOL;

use super::super::encode::{self, Exit};
use super::super::nexthop::Nexthops;
use super::super::wire::Writer;
use super::*;

#[tokio::test]
async fn links_that_could_not_be_read_after_lost_notifications_are_read_later() {
    let shared = Rc::new(RefCell::new(Nexthops::new(0)));
    let mut monitor = LinuxMonitor::open(MonitorOptions::new(PROTOCOL, shared)).unwrap();
    monitor.links.clear();
    // In the kernel nobody listens to this protocol.
    let refuses = Netlink::open_on(NETLINK_USERSOCK).unwrap();
    let answers = std::mem::replace(&mut monitor.dumps, refuses);
    for attempt in 1..=2 {
        let mut changes = Changes::default();
        changes.lost |= attempt == 1;
        assert!(monitor.drain(&mut changes).is_err(), "attempt {attempt}");
    }
    monitor.dumps = answers;
    let mut changes = Changes::default();
    monitor.drain(&mut changes).unwrap();
    assert!(!monitor.links.is_empty(), "every namespace has lo");
    assert!(changes.lost, "what was left out meanwhile must be compared");
    let mut changes = Changes::default();
    monitor.drain(&mut changes).unwrap();
    assert!(!changes.lost, "once is enough");
}

fn monitor() -> LinuxMonitor {
    let shared = Rc::new(RefCell::new(Nexthops::new(0)));
    LinuxMonitor::open(MonitorOptions::new(PROTOCOL, shared)).unwrap()
}

/// Passes a notification about a new route of ours over the link with this index to the monitor.
fn note_route(monitor: &mut LinuxMonitor, index: u32, changes: &mut Changes) {
    let mut w = Writer::default();
    let exit = Exit::Gateway { via: "10.5.2.0".parse().unwrap(), index, onlink: true };
    encode::new_route(&mut w, "10.5.2.0/24".parse().unwrap(), 0, exit, PROTOCOL);
    w.end(1);
    messages(w.bytes()).for_each(|m| monitor.note(&m, changes));
}

/// It would look like a route without a device, and would be written again although it is right.
#[tokio::test]
async fn a_route_over_a_link_that_is_not_known_yet_is_not_reported() {
    let mut monitor = monitor();
    let (unknown, known) = (u32::MAX, *monitor.links.keys().next().expect("every namespace has lo"));
    let mut changes = Changes::default();
    note_route(&mut monitor, unknown, &mut changes);
    assert_eq!(changes.notices(), []);
    let mut changes = Changes::default();
    note_route(&mut monitor, known, &mut changes);
    assert!(matches!(changes.notices()[..], [Notice::Entry(Key::Route(..), Some(_))]));
}
