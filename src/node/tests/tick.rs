// SPDX-License-Identifier: Apache-2.0
//! What a node does when nothing but time passes.

use tokio::time::{Instant, sleep_until};

use super::*;
use crate::kernel::Outcome;

/// Lets the node wake up as the loop of the agent does, until so much time is over.
pub(super) async fn wake_ups(test: &mut TestNode, time: Duration) {
    let end = Instant::now() + time;
    for _ in 0..10_000 {
        let Some(due) = test.node.next_wake().filter(|due| *due <= end) else { return sleep_until(end).await };
        sleep_until(due).await;
        test.node.tick().await;
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
