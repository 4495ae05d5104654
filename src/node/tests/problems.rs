// SPDX-License-Identifier: Apache-2.0
//! Each thing that can be wrong with a node is shown by `weft status`. A fault keeps the node from being ready, and a warning does not.

use tokio::time::Instant;
use weft_backends::state::Key;

use super::*;
use crate::kernel::{Notice, Outcome};
use crate::observe::problem::{Problem, ProblemKind};
use crate::observe::report::{NodeState, PeerCounts, PeerList};
use crate::options::{CniOptions, Fences};

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

/// It is missing again and again because of the kernel. Nobody would find the other program.
#[tokio::test]
async fn a_route_that_the_kernel_refuses_is_not_blamed_on_another_program() {
    local(async {
        let (mut test, key) = (healthy().await, Key::Route("10.5.2.0/24".parse().unwrap(), 0));
        test.kernel.disturb(key, None, false);
        test.kernel.fail(key, Some(Outcome::Fatal("not permitted".to_owned())));
        for _ in 0..5 {
            test.node.kernel_changed(vec![Notice::Entry(key, None)]).await;
        }
        let status = test.node.status();
        assert_eq!(status.peers[0].reason.as_deref(), Some("not permitted"));
        assert_eq!((status.ready, status.problems), (true, Vec::new()));
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
        let lacks = Problem::new(ProblemKind::Device, "link flannel.1: alias: ERANGE; packets pass meanwhile");
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

#[tokio::test]
async fn what_net_conf_and_flags_ask_for_and_this_node_does_not_do_is_shown() {
    local(async {
        let too_large = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"vxlan","MTU":9000}}"#;
        let cut = "Backend.MTU in net-conf is 9000, but the uplink eth0 carries 1500: this node uses 1500";
        let alloc = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"alloc"}}"#;
        let mut of_alloc = lease("10.5.1.0-24", "192.168.0.1");
        of_alloc.attrs.backend_type = String::new();
        let closed = RuleOptions { fences: Fences { fail_closed: true, blackhole: false }, ..RuleOptions::default() };
        for (conf, own, rules, begins) in [
            (too_large, vxlan_lease(), RuleOptions::default(), cut),
            (alloc, of_alloc, closed, "--fail-closed is left out: the backend alloc makes no routes"),
        ] {
            let mut test = TestNode::of((conf, own.clone()), OnLostLease::Hold, rules);
            let records = vec![Record { id: own.id.clone(), lease: Ok(own) }];
            test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
            let status = test.node.status();
            let left_out = status.problems.iter().filter(|problem| problem.kind == ProblemKind::LeftOut);
            let [problem] = &left_out.collect::<Vec<_>>()[..] else { panic!("{:?}", status.problems) };
            assert!(problem.text.starts_with(begins), "{problem}");
            assert!(test.node.state().problems().all(|fault| fault.kind != ProblemKind::LeftOut), "it is no fault");
        }
    })
    .await;
}

#[tokio::test]
async fn each_peer_is_counted_once_in_the_metrics() {
    local(async {
        let mut test = healthy().await;
        let peers = PeerCounts {
            believed: 20,
            pending: 1,
            failed: 2,
            held: 3,
            set_aside: 4,
            unplanned: 5,
            unreachable: 6,
            in_clear_text: 7,
        };
        let state = NodeState { peers, ..test.node.state() };
        test.node.context.reporter.publish(&state);
        let text = test.node.context.reporter.metrics.render_classic(Instant::now());
        let count =
            |line: &str| text.lines().find_map(|found| found.strip_prefix(line)).map(str::trim).map(str::to_owned);
        let of = |state: &str| count(&format!("weft_peers{{state=\"{state}\"}}"));
        let states = ["pending", "failed", "held", "set-aside", "unreachable", "programmed"];
        // What is set aside is believed or not. The believed part of it has no entries, or not all of them.
        assert_eq!(states.map(of), ["1", "2", "3", "4", "6", "3"].map(|count| Some(count.to_owned())), "{text}");
        assert_eq!(count("weft_peers_not_encrypted").as_deref(), Some("7"));
    })
    .await;
}
