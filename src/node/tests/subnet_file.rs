// SPDX-License-Identifier: Apache-2.0
//! When subnet.env is written: it tells the container runtime that pods can have a network.

use weft_backends::state::{Key, Name};
use weft_subnet::attrs::Attrs;
use weft_subnet::cache::{Expiry, Head, Saved};
use weft_subnet::lease::Lease;
use weft_subnet::source::Event;

use super::{Bench, CONFIG, VXLAN, lease, local, put};
use crate::kernel::Outcome;
use crate::observe::socket;
use crate::observe::status::Status;
use crate::options::{OnLostLease, RuleOptions};
use crate::pass::Cause;

/// A vxlan node whose own device is flannel.1.
fn vxlan() -> Bench {
    let data = Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}"#.into());
    let plain = lease("10.5.1.0-24", "192.168.0.1");
    let attrs = Attrs { backend_type: "vxlan".into(), backend_data: data, ..plain.attrs.clone() };
    let own = Lease { attrs, ..plain };
    Bench::of((VXLAN, own), OnLostLease::Hold, RuleOptions::default())
}

fn flannel() -> Name {
    Name::new("flannel.1").unwrap()
}

fn own_list() -> Vec<Event> {
    vec![Event::Snapshot { records: vec![put("10.5.1.0-24", "192.168.0.1").unwrap()], reset: false }]
}

fn status(bench: &mut Bench) -> Status {
    bench.node.report();
    let (reply, mut answer) = tokio::sync::oneshot::channel();
    bench.node.answer(socket::Request::Status(reply));
    answer.try_recv().unwrap()
}

#[tokio::test]
async fn it_waits_for_the_device_and_its_address() {
    local(async {
        let addr = Key::Addr(flannel(), "10.5.1.0/32".parse().unwrap());
        let mtu = Outcome::Partly { missing: "mtu 1450: EINVAL".into(), retry: true, works: false };
        for (key, outcome) in [
            (Key::Link(flannel()), Outcome::Retry("not now".into())),
            (Key::Link(flannel()), Outcome::Fatal("not supported".into())),
            (Key::Link(flannel()), mtu),
            (addr, Outcome::Retry("not now".into())),
        ] {
            let mut bench = vxlan();
            bench.kernel.fail(key, Some(outcome.clone()));
            bench.node.begin(own_list()).await;
            assert!(!bench.file.exists(), "{key}: {outcome:?}");
            let said = status(&mut bench);
            assert!(!said.ready && said.problems[0].contains(&key.to_string()), "{key}: {said:?}");
            bench.kernel.fail(key, None);
            bench.node.full(Cause::Retry).await;
            assert!(bench.file.exists() && status(&mut bench).ready, "{key}: {outcome:?}");
        }
    })
    .await;
}

#[tokio::test]
async fn it_does_not_wait_for_what_packets_do_not_need() {
    local(async {
        for retry in [true, false] {
            let mut bench = vxlan();
            let refused = Outcome::Partly { missing: "alias: ERANGE".into(), retry, works: true };
            bench.kernel.fail(Key::Link(flannel()), Some(refused));
            bench.node.begin(own_list()).await;
            assert!(bench.file.exists());
            let said = status(&mut bench);
            assert!(said.ready, "{said:?}");
            let of_device = |status: Status| -> Vec<String> {
                status.problems.into_iter().filter(|text| text.contains("flannel.1")).collect()
            };
            assert_eq!(of_device(said), ["link flannel.1: alias: ERANGE; packets do not need it"]);
            bench.kernel.fail(Key::Link(flannel()), None);
            bench.node.full(Cause::Retry).await;
            assert_eq!(of_device(status(&mut bench)), [""; 0]);
        }
    })
    .await;
}

/// The MTU depends on the backends of the peers, so before they are known the file of an earlier run knows it better.
#[tokio::test]
async fn before_the_peers_are_known_an_earlier_runs_file_stays() {
    local(async {
        let earlier =
            "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1430\nFLANNEL_IPMASQ=false\n";
        let mut bench = Bench::new(OnLostLease::Hold);
        std::fs::write(&bench.file, earlier).unwrap();
        bench.node.begin(Vec::new()).await;
        assert_eq!(std::fs::read_to_string(&bench.file).unwrap(), earlier);
        bench.node.stored(own_list()).await;
        assert!(std::fs::read_to_string(&bench.file).unwrap().contains("FLANNEL_MTU=1500"));
        // A file for another subnet would give pods addresses that are another node's.
        let mut bench = Bench::new(OnLostLease::Hold);
        std::fs::write(&bench.file, earlier.replace("10.5.1.1", "10.5.2.1")).unwrap();
        bench.node.begin(Vec::new()).await;
        assert!(std::fs::read_to_string(&bench.file).unwrap().contains("FLANNEL_SUBNET=10.5.1.1/24"));
        // Peers that were saved are known.
        let mut bench = Bench::new(OnLostLease::Hold);
        std::fs::write(&bench.file, earlier).unwrap();
        let (store, config, own) = (String::new(), CONFIG.to_owned(), lease("10.5.1.0-24", "192.168.0.1"));
        let (public, chosen, uplink) = ((None, None), [None, None], None);
        let head = Head { store, saved: 0, expires: Expiry::Never, config, own, public, chosen, uplink };
        bench.node.resume(Saved { head, peers: Vec::new() });
        bench.node.begin(Vec::new()).await;
        assert!(std::fs::read_to_string(&bench.file).unwrap().contains("FLANNEL_MTU=1500"));
    })
    .await;
}

/// Changes that come before the first whole list say nothing about the rest: they are written with it.
#[tokio::test]
async fn before_the_first_list_no_peer_is_written() {
    local(async {
        let mut bench = Bench::new(OnLostLease::Hold);
        bench.node.begin(Vec::new()).await;
        bench.kernel.take_ops();
        bench.node.stored(vec![Event::Changes(vec![put("10.5.2.0-24", "192.168.0.2")])]).await;
        assert_eq!(bench.kernel.take_ops(), []);
        assert!(!status(&mut bench).ready);
        let records = vec![put("10.5.1.0-24", "192.168.0.1").unwrap(), put("10.5.3.0-24", "192.168.0.3").unwrap()];
        bench.node.stored(vec![Event::Snapshot { records, reset: false }]).await;
        assert_eq!(bench.via("10.5.3.0/24"), "192.168.0.3".parse().ok());
        assert_eq!(bench.via("10.5.2.0/24"), None, "the list does not name it");
        assert!(status(&mut bench).ready);
    })
    .await;
}
