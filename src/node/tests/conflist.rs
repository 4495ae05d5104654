// SPDX-License-Identifier: Apache-2.0
//! When pods may start: everything is in place that this node has a say in.

use weft_subnet::source::Event;

use super::{Bench, local, put};
use crate::conflist::{Conflist, NAME};
use crate::options::{CniOptions, OnLostLease};
use crate::pass::Cause;

fn published(bench: &Bench) -> bool {
    bench.file.with_file_name("net.d").join(NAME).exists()
}

/// A node that was looked at once, before the store's first list.
async fn started() -> Bench {
    let mut bench = Bench::new(OnLostLease::Hold);
    let conf = bench.file.with_file_name("conf.json");
    std::fs::write(&conf, r#"{"name":"cbr0","plugins":[{"type":"flannel"}]}"#).unwrap();
    let options = CniOptions { conf, dir: bench.file.with_file_name("net.d") };
    bench.node.world.conflist = Conflist::new(Some(options), &bench.file);
    bench.node.full(Cause::Start).await;
    bench.node.report();
    bench
}

#[tokio::test]
async fn a_list_that_comes_in_a_moment_is_waited_for() {
    local(async {
        let mut bench = started().await;
        assert!(bench.file.exists() && !published(&bench), "no peer is programmed yet");
        let records = vec![put("10.5.1.0-24", "192.168.0.1").unwrap()];
        bench.node.stored(vec![Event::Snapshot { records, reset: false }]).await;
        bench.node.report();
        assert!(published(&bench));
    })
    .await;
}

#[tokio::test]
async fn a_store_that_is_away_does_not_keep_pods_from_running() {
    local(async {
        let mut bench = started().await;
        bench.node.stored(vec![Event::Trouble("connection refused".into())]).await;
        bench.node.report();
        assert!(!bench.node.world.readiness.is_ready() && published(&bench));
    })
    .await;
}

#[tokio::test]
async fn a_fault_of_the_node_does() {
    local(async {
        let mut bench = started().await;
        bench.node.stored(vec![Event::Trouble("connection refused".into())]).await;
        bench.node.env_problem = Some("write subnet.env: no space left on device".into());
        bench.node.report();
        assert!(!published(&bench));
    })
    .await;
}
