// SPDX-License-Identifier: Apache-2.0
//! Echo requests of probes over real sockets.

use std::time::{Duration, Instant};

use weft::probe::echo::{self, Echo};

use super::adapter_net::{in_namespace, ip};
use crate::patience::PATIENCE;

const WAIT: Duration = Duration::from_millis(300);

fn echo(listen: Option<&str>) -> Echo {
    let listen = listen.map(|ip| ip.parse().unwrap());
    Echo { to: "10.9.9.8".parse().unwrap(), size: 84, wait: WAIT, listen }
}

/// The published address of a peer answers at once. Whether requests come from its tunnel address shows in which direction packets are
/// lost, so the answer must not shorten the time in which they are noticed.
#[test]
fn an_answer_does_not_end_the_time_in_which_requests_of_the_peer_are_noticed() {
    in_namespace(|| async {
        // Both are addresses of this host. Our requests to the first one must not come from it.
        ip("route add local 10.9.9.8/32 dev lo src 10.0.0.1");
        ip("addr add 10.9.9.9/32 dev lo");
        let answered = async {
            loop {
                let began = Instant::now();
                let answer = echo(Some("10.9.9.9")).send().await.unwrap();
                assert!(began.elapsed() >= WAIT && !answer.heard, "{answer:?} after {:?}", began.elapsed());
                // A busy machine may read the answer too late.
                if answer.round_trip.is_some_and(|trip| trip < WAIT) {
                    break;
                }
            }
        };
        tokio::time::timeout(PATIENCE, answered).await.expect("an answer within its time");
        // The peer asks until it is heard. Its requests go to the address from which this host would send to it.
        let asking = async {
            loop {
                ping("10.9.9.9").await;
            }
        };
        let heard = async { while !echo(Some("10.9.9.9")).send().await.unwrap().heard {} };
        let both = async {
            tokio::select! {
                () = heard => {}
                () = asking => {}
            }
        };
        tokio::time::timeout(PATIENCE, both).await.expect("requests of the peer are heard");
    });
}

/// A peer is listened to while a connection to it is waited for, too.
#[test]
fn requests_of_the_peer_are_noticed_during_other_work() {
    in_namespace(|| async {
        ip("addr add 10.9.9.9/32 dev lo");
        let peer = "10.9.9.9".parse().unwrap();
        assert_eq!(echo::hearing(peer, async { 7 }).await, (7, false));
        // The work ends when the request was answered, so the request has arrived by then. The first one may come before the socket is open.
        let heard = async { while echo::hearing(peer, ping("10.9.9.9")).await != ((), true) {} };
        tokio::time::timeout(PATIENCE, heard).await.expect("requests of the peer are heard");
        assert_eq!(
            echo::hearing("10.0.0.1".parse().unwrap(), ping("10.9.9.9")).await,
            ((), false),
            "another peer asks"
        );
    });
}

/// The first address of an IPv6 subnet belongs to every router on a link with this subnet, and such a router answers from another address. The
/// bridge of a peer's pods is such a link.
#[test]
fn an_anycast_address_of_a_router_answers_from_another_address() {
    in_namespace(|| async {
        let echo = Echo { to: "fd00:5:0:2::".parse().unwrap(), size: 1280, wait: WAIT, listen: None };
        assert_eq!(echo.send().await.unwrap().round_trip, None, "nobody has it yet");
        std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        ip("addr add fd00:5:0:2::1/64 dev up0 nodad");
        // The kernel adds the anycast address some time after the address.
        let answered = async { while echo.send().await.unwrap().round_trip.is_none() {} };
        tokio::time::timeout(PATIENCE, answered).await.expect("an answer");
        assert!(ip("-6 route show table local").contains("anycast fd00:5:0:2:: dev up0"));
    });
}

/// Sends an echo request from this address of the host to itself.
async fn ping(address: &str) {
    let mut ping = tokio::process::Command::new("ping");
    let done = ping.args(["-c", "1", "-W", "60", "-I", address, address]).output().await.unwrap();
    assert!(done.status.success(), "{done:?}");
}
