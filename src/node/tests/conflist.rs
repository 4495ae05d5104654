// SPDX-License-Identifier: Apache-2.0
//! The CNI configuration, which lets pods start.

use std::time::Duration;

use weft_subnet::source::Event;

use super::tick::wake_ups;
use super::{TestNode, local, stored};
use crate::conflist::{Conflist, NAME};
use crate::options::{CniOptions, OnLostLease};
use crate::pass::Cause;

fn published(test: &TestNode) -> bool {
    test.file.with_file_name("net.d").join(NAME).exists()
}

/// A node after its first pass, without a list from the store.
async fn started() -> TestNode {
    let mut test = TestNode::new(OnLostLease::Hold);
    let conf = test.file.with_file_name("conf.json");
    std::fs::write(&conf, r#"{"name":"cbr0","plugins":[{"type":"flannel"}]}"#).unwrap();
    let options = CniOptions { conf, dir: test.file.with_file_name("net.d") };
    test.node.context.conflist = Conflist::new(Some(options), &test.file);
    test.node.full_pass(Cause::Start).await;
    test.node.report();
    test
}

#[tokio::test]
async fn pods_wait_for_the_first_list_while_the_store_answers() {
    local(async {
        let mut test = started().await;
        assert!(test.file.exists() && !published(&test), "no peer is programmed yet");
        let records = vec![stored("10.5.1.0-24", "192.168.0.1")];
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        test.node.report();
        assert!(published(&test));
    })
    .await;
}

#[tokio::test]
async fn pods_do_not_wait_for_a_store_that_does_not_answer() {
    local(async {
        let mut test = started().await;
        test.node.store_changed(vec![Event::Unreachable("connection refused".into())]).await;
        test.node.report();
        assert!(!test.node.context.reporter.readiness.is_ready() && published(&test));
    })
    .await;
}

#[tokio::test]
async fn pods_wait_while_the_node_has_a_fault() {
    local(async {
        let mut test = started().await;
        test.node.store_changed(vec![Event::Unreachable("connection refused".into())]).await;
        test.node.subnet_file_problem = Some("write subnet.env: no space left on device".into());
        test.node.report();
        assert!(!published(&test));
    })
    .await;
}

/// While the node is ready, the configuration is compared every ten seconds. What is not done while it is not ready is no reason to wake up.
#[tokio::test(start_paused = true)]
async fn a_node_that_may_not_publish_the_configuration_does_not_wake_up_for_it_all_the_time() {
    local(async {
        let mut test = started().await;
        let records = vec![stored("10.5.1.0-24", "192.168.0.1")];
        test.node.store_changed(vec![Event::Snapshot { records, reset: false }]).await;
        test.node.report();
        assert!(published(&test) && test.node.context.conflist.next().is_some());
        // A directory in the place of subnet.env lets every write of it fail.
        std::fs::remove_file(&test.file).unwrap();
        std::fs::create_dir(&test.file).unwrap();
        wake_ups(&mut test, Duration::from_secs(60)).await;
        assert!(test.node.subnet_file_problem.is_some());
    })
    .await;
}
