// SPDX-License-Identifier: Apache-2.0
//! What a node does when nothing but time passes.

use tokio::time::{Instant, sleep_until};
use weft_subnet::hold::Hold;

use super::*;
use crate::kernel::{Notice, Outcome};

/// Lets the node wake up as the loop of the agent does, until so much time is over.
pub(super) async fn wake_ups(test: &mut TestNode, time: Duration) {
    let end = Instant::now() + time;
    for _ in 0..10_000 {
        let Some(due) = test.node.next_wake().filter(|due| *due <= end) else { return sleep_until(end).await };
        sleep_until(due).await;
        test.node.tick().await;
        test.node.report();
    }
    panic!("the node wakes up all the time");
}

#[tokio::test(start_paused = true)]
async fn a_node_with_nothing_to_do_wakes_up_for_its_checks_only() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let passes = test.kernel.observations();
        test.kernel.take_ops();
        wake_ups(&mut test, Duration::from_secs(60)).await;
        assert_eq!((test.kernel.observations(), test.kernel.take_ops()), (passes, vec![]));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn what_the_kernel_refused_is_tried_again_soon() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let key = Key::Route("10.5.3.0/24".parse().unwrap(), 0);
        test.kernel.fail(key, Some(Outcome::Retry("busy".to_owned())));
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.3.0-24", "192.168.0.3")])]).await;
        wake_ups(&mut test, Duration::from_secs(1)).await;
        assert_eq!(test.via("10.5.3.0/24"), None);
        test.kernel.fail(key, None);
        // The pause doubles with each failure.
        wake_ups(&mut test, Duration::from_secs(2)).await;
        assert_eq!(test.via("10.5.3.0/24"), "192.168.0.3".parse().ok());
    })
    .await;
}

/// `ip route flush` deletes what it finds until it finds nothing, so it ends when the agent no longer repairs at once.
#[tokio::test(start_paused = true)]
async fn an_entry_that_another_program_deleted_repeatedly_is_repaired_soon() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let key = Key::Route("10.5.2.0/24".parse().unwrap(), 0);
        let mut deletions = 0;
        while test.via("10.5.2.0/24").is_some() {
            test.kernel.disturb(key, None, false);
            test.node.kernel_changed(vec![Notice::Entry(key, None)]).await;
            deletions += 1;
        }
        assert_eq!(deletions, 4, "the others were repaired at once");
        wake_ups(&mut test, Duration::from_secs(1)).await;
        assert!(test.via("10.5.2.0/24").is_some());
    })
    .await;
}

/// Nothing announces that the kernel would accept it now.
#[tokio::test(start_paused = true)]
async fn a_removal_that_the_kernel_refused_is_tried_again_soon() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let key = Key::Route("10.5.2.0/24".parse().unwrap(), 0);
        test.kernel.fail(key, Some(Outcome::Retry("busy".to_owned())));
        test.node.store_changed(vec![Event::Changes(vec![removed("10.5.2.0-24")])]).await;
        assert!(test.via("10.5.2.0/24").is_some());
        test.kernel.fail(key, None);
        wake_ups(&mut test, Duration::from_secs(2)).await;
        assert_eq!(test.via("10.5.2.0/24"), None);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_node_wakes_up_when_held_peers_are_to_go_and_keeps_those_that_are_back() {
    local(async {
        let list = |peers: &[u8]| {
            let all = std::iter::once(1).chain(peers.iter().copied());
            let records = all.map(|number| stored(&format!("10.5.{number}.0-24"), &format!("192.168.0.{number}")));
            vec![Event::Snapshot { records: records.collect(), reset: false }]
        };
        let mut test = TestNode::new(OnLostLease::Hold);
        // The node looks at files and sysctls every ten seconds, so this is no multiple of them.
        let grace = Duration::from_secs(13);
        test.node.peers.hold = Hold::new(grace);
        test.node.start(list(&[2, 3, 4, 5])).await;
        test.node.store_changed(list(&[])).await;
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.3.0-24", "192.168.0.3")])]).await;
        assert_eq!(test.node.peers.hold.len(), 3);
        wake_ups(&mut test, grace - Duration::from_secs(1)).await;
        assert!(test.via("10.5.2.0/24").is_some(), "the grace time is not over");
        wake_ups(&mut test, Duration::from_secs(2)).await;
        assert_eq!(test.via("10.5.2.0/24"), None);
        assert!(test.via("10.5.3.0/24").is_some(), "its lease is back");
    })
    .await;
}

/// A lease that changes all the time has to wait. Its last value must not be forgotten.
#[tokio::test(start_paused = true)]
async fn a_node_wakes_up_to_apply_a_change_that_had_to_wait() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        for number in 0..100 {
            let change = put("10.5.2.0-24", ["192.168.0.3", "192.168.0.4"][number % 2]);
            test.node.store_changed(vec![Event::Changes(vec![change])]).await;
        }
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.2.0-24", "192.168.0.5")])]).await;
        assert_ne!(test.via("10.5.2.0/24"), "192.168.0.5".parse().ok(), "the lease has changed too often");
        wake_ups(&mut test, Duration::from_secs(3)).await;
        assert_eq!(test.via("10.5.2.0/24"), "192.168.0.5".parse().ok());
    })
    .await;
}

/// Without a free inotify instance nothing tells that the file is gone.
#[tokio::test(start_paused = true)]
async fn a_node_wakes_up_to_compare_subnet_env() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let text = std::fs::read_to_string(&test.file).unwrap();
        std::fs::remove_file(&test.file).unwrap();
        wake_ups(&mut test, Duration::from_secs(11)).await;
        assert_eq!(std::fs::read_to_string(&test.file).ok(), Some(text));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_node_wakes_up_to_save_its_peers() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let _file = test.saves();
        let due = test.node.next_saving(Instant::now()).expect("the peers are not saved yet");
        assert!(test.node.next_wake().is_some_and(|wake| wake <= due));
    })
    .await;
}
