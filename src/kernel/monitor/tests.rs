// SPDX-License-Identifier: Apache-2.0
//! What the monitor does when it cannot read the links. tests/kernel/adapter_monitor.rs has the rest.

use std::cell::RefCell;
use std::rc::Rc;

use netlink_sys::protocols::NETLINK_USERSOCK;
use weft_backends::owner::PROTOCOL;

use super::super::nexthop::Nexthops;
use super::*;

#[tokio::test]
async fn links_that_could_not_be_read_after_lost_notifications_are_read_later() {
    let shared = Rc::new(RefCell::new(Nexthops::new(0)));
    let mut monitor = LinuxMonitor::open(MonitorOptions::new(PROTOCOL, shared)).unwrap();
    monitor.links.clear();
    // In the kernel nobody listens to this protocol.
    let refuses = Netlink::open_on(NETLINK_USERSOCK).unwrap();
    let answers = std::mem::replace(&mut monitor.dumps, refuses);
    let mut lost = Changes { lost: true, ..Changes::default() };
    for attempt in 1..=2 {
        assert!(monitor.drain(&mut lost).is_err(), "attempt {attempt}");
        lost = Changes::default();
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
