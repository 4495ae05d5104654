// SPDX-License-Identifier: Apache-2.0
//! Each thing that can be wrong with a node is shown by `weft status`. A fault keeps the node from being ready, and a warning does not.

use weft_backends::state::Key;

use super::*;
use crate::kernel::{Notice, Outcome};
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::report::PeerList;
use crate::options::CniOptions;

/// Something that is wrong: how it is set, and the problem that is shown.
type Case = (fn(&mut Node<FakeKernel>, String), ProblemKind, &'static str);

/// The text of each case, from which the node makes a line.
const TEXT: &str = "no such thing";

const FAULTS: [Case; 5] = [
    (|node, text| node.kernel_problem = Some(text), ProblemKind::Kernel, "no such thing"),
    (|node, text| node.subnet_file_problem = Some(text), ProblemKind::SubnetFile, "no such thing"),
    (|node, text| node.uplink.problem = Some(text), ProblemKind::Uplink, "uplink: no such thing"),
    (|node, text| node.own_lease.unwritable = Some(text), ProblemKind::Uplink, "uplink: no such thing"),
    (|node, text| node.own_lease.lost = Some(text), ProblemKind::Lease, "no such thing"),
];

const WARNINGS: [Case; 6] = [
    (
        |node, text| node.uplink.link_problem = Some(Problem::new(ProblemKind::Uplink, text)),
        ProblemKind::Uplink,
        "no such thing",
    ),
    (|node, text| node.peers.list = PeerList::Saved(text), ProblemKind::PeerList, "no such thing"),
    (|node, text| node.own_lease.error = Some(text), ProblemKind::Lease, "own lease: no such thing"),
    (
        |node, text| node.own_lease.not_renewed = Some(text),
        ProblemKind::Lease,
        "own lease is not renewed: no such thing",
    ),
    (|node, text| node.net_conf.not_applied = Some(text), ProblemKind::NetConf, "no such thing"),
    (
        |node, text| node.sysctls.problems.push(Problem::new(ProblemKind::Sysctl, text)),
        ProblemKind::Sysctl,
        "no such thing",
    ),
];

/// A node without any problem, whatever the sysctls of this machine are.
async fn healthy() -> TestNode {
    let mut test = TestNode::ready(OnLostLease::Hold).await;
    test.node.sysctls.problems.clear();
    let status = test.node.status();
    assert!(status.ready && status.problems.is_empty(), "{:?}", status.problems);
    test
}

#[tokio::test]
async fn each_fault_and_each_warning_is_shown_and_only_faults_keep_the_node_from_being_ready() {
    local(async {
        let all = FAULTS.map(|case| (case, false)).into_iter().chain(WARNINGS.map(|case| (case, true)));
        for ((set, kind, line), ready) in all {
            let mut test = healthy().await;
            set(&mut test.node, TEXT.to_owned());
            let status = test.node.status();
            assert_eq!((status.ready, status.problems), (ready, vec![Problem::new(kind, line)]));
        }
    })
    .await;
}

#[tokio::test]
async fn a_route_that_another_program_deletes_again_and_again_is_shown() {
    local(async {
        let (mut test, key) = (healthy().await, Key::Route("10.5.2.0/24".parse().unwrap(), 0));
        // Three repairs are made at once.
        for _ in 0..4 {
            assert_eq!(test.node.status().problems, []);
            test.kernel.disturb(key, None, false);
            test.node.kernel_changed(vec![Notice::Entry(key, None)]).await;
        }
        let status = test.node.status();
        let text = "another program repeatedly deletes or replaces route 10.5.2.0/24";
        assert_eq!((status.ready, status.problems), (true, vec![Problem::new(ProblemKind::Fight, text)]));
    })
    .await;
}

#[tokio::test]
async fn a_device_that_carries_no_packets_keeps_the_node_from_being_ready() {
    local(async {
        let mut test = TestNode::of_vxlan(vxlan_lease(), OnLostLease::Hold);
        let link = Key::Link(Name::new("flannel.1").unwrap());
        test.kernel.fail(link, Some(Outcome::Fatal("the kernel has no vxlan".to_owned())));
        test.node.start(vec![Event::Snapshot { records: Vec::new(), reset: false }]).await;
        let status = test.node.status();
        // The device lacks its address, too, because the link is missing.
        let cause = Problem::new(ProblemKind::Device, "link flannel.1: the kernel has no vxlan");
        assert!(!status.ready && status.problems.contains(&cause), "{:?}", status.problems);
        let alias = Outcome::Partly { missing: "alias: ERANGE".to_owned(), retry: false, works: true };
        test.kernel.fail(link, Some(alias));
        test.node.full_pass(Cause::Audit).await;
        let status = test.node.status();
        let lacks = Problem::new(ProblemKind::Device, "link flannel.1: alias: ERANGE; packets do not need it");
        assert!(status.ready && status.problems.contains(&lacks), "{:?}", status.problems);
    })
    .await;
}

#[tokio::test]
async fn what_is_wrong_with_the_cni_configuration_the_store_and_the_leases_is_shown() {
    local(async {
        let mut test = healthy().await;
        let conf = test.file.with_file_name("conf.json");
        std::fs::write(&conf, "no JSON").unwrap();
        let options = CniOptions { conf, dir: test.file.with_file_name("net.d") };
        test.node.context.conflist = Conflist::new(Some(options), &test.file);
        test.node.report();
        *test.store.remark.borrow_mut() = Some("a remark of the store".to_owned());
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.3.0-24", "192.168.0.2")])]).await;
        let status = test.node.status();
        let shown: Vec<(ProblemKind, &str)> =
            status.problems.iter().map(|problem| (problem.kind, problem.text.as_str())).collect();
        let [(ProblemKind::Cni, _), (ProblemKind::Store, "a remark of the store"), (ProblemKind::Claims, claimed)] =
            shown[..]
        else {
            panic!("{shown:?}")
        };
        assert!(status.ready && claimed.starts_with("2 leases publish 192.168.0.2: "), "{claimed}");
    })
    .await;
}
