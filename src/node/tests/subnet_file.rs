// SPDX-License-Identifier: Apache-2.0
//! When subnet.env is written, which lets the container runtime start pods.

use tokio::time::Instant;
use weft_backends::state::{Key, Name};
use weft_subnet::saved_peers::Saved;
use weft_subnet::source::Event;

use super::wireguard::head;
use super::{TestNode, VXLAN, lease, local, put, stored, vxlan_lease};
use crate::kernel::Outcome;
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::socket;
use crate::observe::status::Status;
use crate::options::{OnLostLease, RuleOptions};
use crate::pass::Cause;

/// A vxlan node whose own device is flannel.1.
fn vxlan() -> TestNode {
    TestNode::of((VXLAN, vxlan_lease()), OnLostLease::Hold, RuleOptions::default())
}

fn flannel() -> Name {
    Name::new("flannel.1").unwrap()
}

fn own_list() -> Vec<Event> {
    vec![Event::Snapshot { records: vec![stored("10.5.1.0-24", "192.168.0.1")], reset: false }]
}

fn status(test: &mut TestNode) -> Status {
    test.node.report();
    let (reply, mut answer) = tokio::sync::oneshot::channel();
    test.node.answer(socket::Request::Status(reply));
    answer.try_recv().unwrap()
}

#[tokio::test]
async fn subnet_env_waits_for_the_device_and_its_address() {
    local(async {
        let addr = Key::Addr(flannel(), "10.5.1.0/32".parse().unwrap());
        let mtu = Outcome::Partly { missing: "mtu 1450: EINVAL".into(), retry: true, works: false };
        for (key, outcome) in [
            (Key::Link(flannel()), Outcome::Retry("not now".into())),
            (Key::Link(flannel()), Outcome::Fatal("not supported".into())),
            (Key::Link(flannel()), mtu),
            (addr, Outcome::Retry("not now".into())),
        ] {
            let mut test = vxlan();
            test.kernel.fail(key, Some(outcome.clone()));
            test.node.start(own_list()).await;
            assert!(!test.file.exists(), "{key}: {outcome:?}");
            let shown = status(&mut test);
            assert!(!shown.ready && shown.problems[0].text.contains(&key.to_string()), "{key}: {shown:?}");
            test.kernel.fail(key, None);
            test.node.full_pass(Cause::Retry).await;
            assert!(test.file.exists() && status(&mut test).ready, "{key}: {outcome:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn subnet_env_does_not_wait_for_attributes_that_packets_do_not_need() {
    local(async {
        for retry in [true, false] {
            let mut test = vxlan();
            let refused = Outcome::Partly { missing: "alias: ERANGE".into(), retry, works: true };
            test.kernel.fail(Key::Link(flannel()), Some(refused));
            test.node.start(own_list()).await;
            assert!(test.file.exists());
            let shown = status(&mut test);
            assert!(shown.ready, "{shown:?}");
            let of_device = |status: Status| -> Vec<String> {
                let texts = status.problems.into_iter().map(|problem| problem.text);
                texts.filter(|text| text.contains("flannel.1")).collect()
            };
            assert_eq!(of_device(shown), ["link flannel.1: alias: ERANGE; packets pass meanwhile"]);
            test.kernel.fail(Key::Link(flannel()), None);
            test.node.full_pass(Cause::Retry).await;
            assert_eq!(of_device(status(&mut test)), [""; 0]);
        }
    })
    .await;
}

/// The MTU depends on the backends of the peers. Before they are known, the file of an earlier run has the better value.
#[tokio::test]
async fn subnet_env_of_an_earlier_run_stays_until_peers_are_known_if_it_names_our_subnet() {
    local(async {
        let earlier =
            "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=false\n";
        let mut test = TestNode::new(OnLostLease::Hold);
        std::fs::write(&test.file, earlier).unwrap();
        test.node.start(Vec::new()).await;
        assert_eq!(std::fs::read_to_string(&test.file).unwrap(), earlier);
        test.node.store_changed(own_list()).await;
        assert_eq!(std::fs::read_to_string(&test.file).unwrap(), earlier.replace("1430", "1500"));
        // With a file for another subnet, pods would get addresses of another node.
        let mut test = TestNode::new(OnLostLease::Hold);
        std::fs::write(&test.file, earlier.replace("10.5.1.1", "10.5.2.1")).unwrap();
        test.node.start(Vec::new()).await;
        assert!(std::fs::read_to_string(&test.file).unwrap().contains("FLANNEL_SUBNET=10.5.1.1/24"));
        // Saved peers are known.
        let mut test = TestNode::new(OnLostLease::Hold);
        std::fs::write(&test.file, earlier).unwrap();
        let head = head(&lease("10.5.1.0-24", "192.168.0.1"));
        test.node.resume(Saved { head, peers: Vec::new() });
        test.node.start(Vec::new()).await;
        assert!(std::fs::read_to_string(&test.file).unwrap().contains("FLANNEL_MTU=1500"));
    })
    .await;
}

#[tokio::test]
async fn a_subnet_env_that_another_program_changed_is_written_again() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        test.node.start(own_list()).await;
        let written = std::fs::read_to_string(&test.file).unwrap();
        std::fs::write(&test.file, written.replace("10.5.1.1", "10.5.8.1")).unwrap();
        test.node.sysctls.next_check = Instant::now();
        test.node.tick().await;
        assert_eq!(std::fs::read_to_string(&test.file).unwrap(), written, "the file must be compared regularly");
    })
    .await;
}

#[tokio::test]
async fn changes_before_the_first_list_are_not_written() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        test.node.start(Vec::new()).await;
        test.kernel.take_ops();
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.2.0-24", "192.168.0.2")])]).await;
        assert_eq!(test.kernel.take_ops(), []);
        assert!(!status(&mut test).ready);
        let records = vec![stored("10.5.1.0-24", "192.168.0.1"), stored("10.5.3.0-24", "192.168.0.3")];
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        assert_eq!(test.via("10.5.3.0/24"), "192.168.0.3".parse().ok());
        assert_eq!(test.via("10.5.2.0/24"), None, "the list lacks this lease");
        assert!(status(&mut test).ready);
    })
    .await;
}

/// Without it no pod can start, so the node says so until it is written.
#[tokio::test]
async fn a_subnet_env_that_cannot_be_written_is_a_fault_until_it_can() {
    local(async {
        let mut test = TestNode::new(OnLostLease::Hold);
        // A file does not replace a directory.
        std::fs::create_dir(&test.file).unwrap();
        test.node.start(own_list()).await;
        let begin = format!("write {}: ", test.file.display());
        let is_it = |problem: &Problem| problem.kind == ProblemKind::SubnetFile && problem.text.starts_with(&begin);
        let shown = status(&mut test);
        assert!(!shown.ready && shown.problems.iter().any(is_it), "{shown:?}");
        std::fs::remove_dir(&test.file).unwrap();
        test.node.write_subnet_file();
        let shown = status(&mut test);
        assert!(shown.ready && !shown.problems.iter().any(is_it), "{shown:?}");
    })
    .await;
}
