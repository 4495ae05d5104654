// SPDX-License-Identifier: Apache-2.0
//! The tunnel of the backend udp: when a node starts it, and what is said while it carries no packets. The kernel of these tests is in memory,
//! so the device of the tunnel never exists, and a tunnel that is started reports that.

use super::*;
use crate::data_path::{DataPath, Earlier};
use crate::kernel::Outcome;

const UDP: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp"}}"#;
const NO_DEVICE: &str = "the device flannel0 does not exist yet";

fn of_udp(key: &str, ip: &str) -> Lease {
    let mut lease = lease(key, ip);
    lease.attrs.backend_type = String::new();
    lease
}

fn list() -> Vec<Event> {
    let leases = [of_udp("10.5.1.0-24", "192.168.0.1"), of_udp("10.5.2.0-24", "192.168.0.2")];
    let records = leases.into_iter().map(|lease| Record { id: lease.id.clone(), lease: Ok(lease) }).collect();
    vec![Event::Snapshot { records, reset: false }]
}

fn node_of_udp() -> TestNode {
    TestNode::of((UDP, of_udp("10.5.1.0-24", "192.168.0.1")), OnLostLease::Hold, RuleOptions::default())
}

fn tunnel_fault(test: &mut TestNode) -> Option<String> {
    test.node.update_data_path();
    let faults = test.node.state().faults;
    faults.into_iter().find(|fault| fault.kind == FaultKind::Tunnel).map(|fault| fault.text)
}

/// A tunnel without peers would tell pods that their peers cannot be reached.
#[tokio::test]
async fn the_tunnel_starts_when_the_peers_are_known_and_a_failure_is_a_fault_of_the_node() {
    local(async {
        let mut test = node_of_udp();
        test.node.full_pass(Cause::Start).await;
        assert_eq!(tunnel_fault(&mut test), None, "nobody knows the peers yet");
        test.node.store_changed(list()).await;
        assert_eq!(tunnel_fault(&mut test), Some(format!("tunnel: {NO_DEVICE}")));
        test.node.report();
        let reasons = test.node.context.reporter.readiness.reasons();
        assert!(reasons.iter().any(|reason| reason.contains(NO_DEVICE)), "{reasons:?}");
    })
    .await;
}

/// A device that the kernel side refuses may belong to another agent of this host.
#[tokio::test]
async fn the_tunnel_does_not_start_on_a_device_that_was_refused() {
    local(async {
        let mut test = node_of_udp();
        let link = Key::Link(Name::new("flannel0").unwrap());
        test.kernel.fail(link, Some(Outcome::Retry("it is that of another agent".into())));
        test.node.start(list()).await;
        assert_eq!(tunnel_fault(&mut test), None);
        assert!(test.node.device_problem().is_some());
        test.kernel.fail(link, None);
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(tunnel_fault(&mut test), Some(format!("tunnel: {NO_DEVICE}")));
    })
    .await;
}

/// The step of a change that needs the tunnel is taken after a full pass, and nothing leads to another full pass soon.
#[tokio::test]
async fn a_change_to_udp_starts_the_tunnel_before_it_asks_whether_the_tunnel_runs() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.store_changed(vec![Event::Config(UDP.to_owned())]).await;
        let wanted = format!("net-conf: the backend udp cannot work on this node: {NO_DEVICE}. The node stays on host-gw, and tries again");
        assert_eq!(test.node.net_conf.not_applied, Some(wanted));
        assert_eq!(tunnel_fault(&mut test), None, "our lease does not name udp yet");
    })
    .await;
}

/// The lease must not name a port on which nobody listens. The host of these tests has no such address.
#[tokio::test]
async fn another_port_that_cannot_be_opened_is_not_in_our_lease() {
    local(async {
        let mut test = node_of_udp();
        test.node.start(list()).await;
        let moved = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"udp","Port":8286}}"#;
        test.node.store_changed(vec![Event::Config(moved.to_owned())]).await;
        let problem = test.node.net_conf.not_applied.clone().unwrap_or_default();
        let words =
            "net-conf: the backend udp cannot work on this node: cannot receive tunnel packets on 192.168.0.1:8286";
        assert!(problem.starts_with(words), "{problem}");
        assert_eq!(test.node.wanted_attrs().backend_data, None);
        assert_eq!(test.node.plan.tunnel().map(|planned| planned.tunnel.port), Some(8285));
    })
    .await;
}

/// A node whose earlier process had a tunnel, and whose backend has none.
fn without_a_tunnel() -> TestNode {
    let mut test = TestNode::new(OnLostLease::Hold);
    let device = std::fs::File::open("/dev/null").unwrap().into();
    test.node.data_path = DataPath::new(true, Earlier { device: Some(device), sockets: Vec::new() });
    test
}

#[tokio::test]
async fn what_systemd_kept_for_a_tunnel_is_given_up_when_there_will_be_none() {
    local(async {
        let mut test = without_a_tunnel();
        test.node.update_data_path();
        test.node.data_path.forget();
        assert!(test.node.data_path.take_handover().is_none(), "it is told already");
    })
    .await;
}

#[tokio::test]
async fn what_systemd_could_not_be_told_about_the_tunnel_is_told_later() {
    local(async {
        let mut test = without_a_tunnel();
        let path = test.file.with_file_name("notify");
        let reader = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        reader.set_nonblocking(true).unwrap();
        test.node.context.reporter.notify = Notify::to(&path).unwrap();
        // This is more than any queue holds.
        for _ in 0..4096 {
            test.node.context.reporter.notify.ping();
        }
        test.node.update_data_path();
        let mut received = Vec::new();
        let mut buffer = [0; 64];
        let mut read = |received: &mut Vec<String>| {
            while let Ok(size) = reader.recv(&mut buffer) {
                received.push(String::from_utf8_lossy(&buffer[..size]).into_owned());
            }
        };
        read(&mut received);
        assert!(received.iter().all(|text| text == "WATCHDOG=1\n"), "{received:?}");
        received.clear();
        test.node.update_data_path();
        read(&mut received);
        assert_eq!(
            received,
            ["tunnel-device", "tunnel-socket"].map(|name| format!("FDSTOREREMOVE=1\nFDNAME={name}\n"))
        );
    })
    .await;
}
