// SPDX-License-Identifier: Apache-2.0
//! What `weft status` and the metrics say of the node and of its peers.

use weft_backends::state::Mac;

use super::*;
use crate::kernel::Outcome;
use crate::observe::status::PeerState;

fn route(third: u8) -> Key {
    Key::Route(format!("10.5.{third}.0/24").parse().unwrap(), 0)
}

/// The state of each peer, with its reason.
fn states(test: &mut TestNode) -> Vec<(PeerState, Option<String>)> {
    test.node.status().peers.into_iter().map(|peer| (peer.state, peer.reason)).collect()
}

/// How many peers are pending, and how many failed.
fn counts(test: &mut TestNode) -> (usize, usize) {
    test.node.report();
    let peers = test.node.state().peers;
    (peers.pending, peers.failed)
}

#[tokio::test]
async fn a_peer_that_waits_and_one_that_the_kernel_refuses_are_told_apart_until_both_are_reached() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.kernel.fail(route(3), Some(Outcome::Retry("busy".to_owned())));
        test.kernel.fail(route(4), Some(Outcome::Fatal("not permitted".to_owned())));
        let both = vec![put("10.5.3.0-24", "192.168.0.3"), put("10.5.4.0-24", "192.168.0.4")];
        test.node.store_changed(vec![Event::Changes(both)]).await;
        let reason = |text: &str| Some(text.to_owned());
        let wanted = [
            (PeerState::Programmed, None),
            (PeerState::Pending, reason("busy")),
            (PeerState::Failed, reason("not permitted")),
        ];
        assert_eq!((states(&mut test), counts(&mut test)), (wanted.to_vec(), (1, 1)));
        [3, 4].into_iter().for_each(|third| test.kernel.fail(route(third), None));
        test.node.full_pass(Cause::Audit).await;
        assert_eq!((states(&mut test), counts(&mut test)), (vec![(PeerState::Programmed, None); 3], (0, 0)));
    })
    .await;
}

#[tokio::test]
async fn a_peer_of_which_one_entry_waits_and_another_is_refused_is_counted_once() {
    local(async {
        let mut test = TestNode::of_vxlan(vxlan_lease(), OnLostLease::Hold);
        let device = Name::new("flannel.1").unwrap();
        let (waits, refused) = (Key::Neigh(device, [10, 5, 2, 0].into()), Key::Fdb(device, Mac([2, 0, 0, 0, 0, 2])));
        test.kernel.fail(waits, Some(Outcome::Retry("busy".to_owned())));
        test.kernel.fail(refused, Some(Outcome::Fatal("not permitted".to_owned())));
        let own = vxlan_lease();
        let mut peer = lease("10.5.2.0-24", "192.168.0.2");
        peer.attrs.backend_type = "vxlan".into();
        peer.attrs.backend_data = Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:02"}"#.into());
        let records = [own, peer].map(|lease| Record { id: lease.id.clone(), lease: Ok(lease) });
        test.node.start(vec![Event::Snapshot { records: records.to_vec(), reset: false }]).await;
        assert_eq!(states(&mut test), [(PeerState::Failed, Some("not permitted".to_owned()))]);
        assert_eq!(counts(&mut test), (0, 1));
    })
    .await;
}

#[tokio::test]
async fn a_peer_that_is_held_is_shown_as_such() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let records = vec![stored("10.5.1.0-24", "192.168.0.1")];
        // Another store has no leases of the peers, or not yet.
        test.node.store_changed(vec![Event::Snapshot { records, reset: true }]).await;
        let status = test.node.status();
        assert_eq!((status.peers[0].state, status.held), (PeerState::Held, 1));
        assert!(status.peers[0].reason.as_ref().is_some_and(|reason| reason.starts_with("gone from the store")));
        assert_eq!(test.node.state().peers.held, 1);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_status_says_who_the_node_is_how_long_its_lease_lives_and_how_long_the_store_is_silent() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.node.store_changed(vec![Event::Renewed(Some(Duration::from_secs(3600)))]).await;
        tokio::time::advance(Duration::from_secs(600)).await;
        test.node.store_changed(vec![Event::Unreachable("no answer".to_owned())]).await;
        let status = test.node.status();
        assert_eq!((status.lease_ttl_s, status.store_silent_s), (Some(3000), 600));
        assert_eq!(status.store_trouble.as_deref(), Some("no answer"));
        let shown = [&status.subnet, &status.network, &status.backend, &status.uplink, &status.uplink_name];
        let wanted = ["10.5.1.0/24", "10.5.0.0/16", "host-gw", "eth0 192.168.0.1 mtu 1500", "eth0"];
        assert_eq!(shown, wanted.map(str::to_owned).each_ref());
        let address = [std::net::IpAddr::from([192, 168, 0, 1])];
        assert_eq!((status.uplink_addresses.as_slice(), status.public.as_slice()), (&address[..], &address[..]));
        assert_eq!((status.mtu, status.peers.len()), (1500, 1));
    })
    .await;
}

#[tokio::test]
async fn the_last_pass_that_wrote_something_and_the_last_error_are_shown() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        let pass = |test: &mut TestNode| {
            let pass = test.node.status().last_pass.expect("a pass");
            (pass.cause, pass.writes, pass.failed)
        };
        let error = |test: &mut TestNode| test.node.status().last_error.map(|error| error.text).unwrap_or_default();
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(pass(&mut test), ("start".to_owned(), 1, 0), "the audit wrote nothing");
        test.kernel.fail(route(3), Some(Outcome::Fatal("not permitted".to_owned())));
        test.node.store_changed(vec![Event::Changes(vec![put("10.5.3.0-24", "192.168.0.3")])]).await;
        assert_eq!((pass(&mut test), error(&mut test)), (("lease".to_owned(), 1, 1), "not permitted".to_owned()));
        test.kernel.break_dumps(Some(std::io::ErrorKind::Interrupted));
        test.node.full_pass(Cause::Audit).await;
        assert!(error(&mut test).starts_with("read the kernel's tables: "), "{}", error(&mut test));
    })
    .await;
}

/// Alerts depend on them.
#[tokio::test(start_paused = true)]
async fn the_metrics_count_passes_and_operations_and_say_how_long_the_store_is_silent() {
    local(async {
        let mut test = TestNode::ready(OnLostLease::Hold).await;
        test.kernel.fail(route(4), Some(Outcome::Retry("busy".to_owned())));
        let both = vec![put("10.5.3.0-24", "192.168.0.3"), put("10.5.4.0-24", "192.168.0.4")];
        let renewed = Event::Renewed(Some(Duration::from_secs(100)));
        test.node.store_changed(vec![Event::Changes(both), renewed]).await;
        tokio::time::advance(Duration::from_secs(40)).await;
        test.node.store_changed(vec![Event::Unreachable("no answer".to_owned())]).await;
        let text = test.node.context.reporter.metrics.render_classic(tokio::time::Instant::now());
        for line in [
            r#"weft_passes_total{cause="start"} 2"#,
            r#"weft_passes_total{cause="lease"} 1"#,
            r#"weft_full_passes_total{cause="start"} 2"#,
            r#"weft_operations_total{kind="route",result="done"} 2"#,
            r#"weft_operations_total{kind="route",result="failed"} 1"#,
            // An error of the store changes nothing.
            "weft_convergence_seconds_count 2",
            "weft_store_silence_seconds 40",
            "weft_lease_ttl_seconds 60",
        ] {
            assert!(text.lines().any(|found| found.strip_suffix(".0").unwrap_or(found) == line), "{line}: {text}");
        }
    })
    .await;
}
