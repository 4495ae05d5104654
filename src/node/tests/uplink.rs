// SPDX-License-Identifier: Apache-2.0
//! An uplink that goes away for a moment, and for good.

use std::path::Path;
use std::time::Instant;

use weft_backends::state::Name;
use weft_subnet::cache::Uplink;
use weft_subnet::source::Event;

use super::{Bench, local, machine, put};
use crate::kernel::{AddrInfo, Machine};
use crate::node::host::UPLINK_AWAY;
use crate::options::OnLostLease;
use crate::pass::Cause;
use crate::saved::{SavedFile, Saver};

/// eth0 has these addresses; eth1 has 192.168.9.1 and a default route of a higher metric.
fn two_uplinks(addrs: &[&str]) -> Machine {
    let mut all = machine("192.168.0.1");
    all.addrs.clear();
    let eth1 = Name::new("eth1").unwrap();
    let mut link = all.links[0].clone();
    (link.index, link.name) = (3, eth1);
    all.links.push(link);
    let addr = |index, net: &str| AddrInfo { index, net: net.parse().unwrap(), scope: 0, flags: 0x80 };
    all.addrs.extend(addrs.iter().map(|net| addr(2, net)));
    all.addrs.push(addr(3, "192.168.9.1/24"));
    let mut route = all.routes[0].clone();
    (route.dev, route.metric) = (Some(eth1), 500);
    all.routes.push(route);
    all
}

/// Moves the moment of the loss into the past.
fn wait(bench: &mut Bench) {
    let since = bench.node.uplink_gone.unwrap() - UPLINK_AWAY;
    (bench.node.uplink_gone, bench.node.uplink_due) = (Some(since), Some(Instant::now()));
}

fn uplink(bench: &Bench) -> String {
    let uplink = &bench.node.plan.host().uplink;
    format!("{} {}", uplink.name, uplink.v4.unwrap())
}

#[tokio::test]
async fn an_uplink_that_is_away_for_a_moment_stays() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        for (addrs, next) in [(vec![], "eth1 (192.168.9.1)"), (vec!["192.168.0.100/32"], "eth0 (192.168.0.100)")] {
            bench.kernel.set_machine(two_uplinks(&addrs));
            bench.node.full(Cause::Kernel).await;
            assert_eq!(uplink(&bench), "eth0 192.168.0.1");
            let problem = bench.node.host_problem.clone().unwrap();
            assert_eq!(problem, format!("eth0 lost 192.168.0.1: {next} is used instead if that lasts 10 s"));
            assert_eq!(bench.node.uplink_due, bench.node.uplink_gone.map(|since| since + UPLINK_AWAY));
            assert!(bench.node.next_wake() <= bench.node.uplink_due, "it is looked at again");
            bench.kernel.set_machine(two_uplinks(&["192.168.0.100/32", "192.168.0.1/24"]));
            bench.node.full(Cause::Kernel).await;
            assert_eq!((uplink(&bench).as_str(), &bench.node.host_problem), ("eth0 192.168.0.1", &None));
            assert_eq!((bench.node.uplink_gone, bench.node.uplink_due), (None, None));
        }
        assert!(bench.asked(0).await, "nothing was published");
    })
    .await;
}

#[tokio::test]
async fn a_node_moves_when_its_uplink_is_gone_for_good() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        bench.kernel.set_machine(two_uplinks(&[]));
        bench.node.full(Cause::Kernel).await;
        wait(&mut bench);
        bench.node.tick().await;
        assert_eq!(uplink(&bench), "eth1 192.168.9.1");
        assert!(bench.asked(1).await, "the lease follows");
        // The old one comes back: the new one stays.
        bench.kernel.set_machine(two_uplinks(&["192.168.0.1/24"]));
        bench.node.full(Cause::Kernel).await;
        assert_eq!((uplink(&bench).as_str(), &bench.node.host_problem), ("eth1 192.168.9.1", &None));
    })
    .await;
}

#[tokio::test]
async fn without_another_choice_a_node_waits() {
    local(async {
        let mut bench = Bench::ready(OnLostLease::Hold).await;
        let mut alone = machine("192.168.0.1");
        alone.addrs.clear();
        bench.kernel.set_machine(alone);
        bench.node.full(Cause::Kernel).await;
        assert!(bench.node.host_problem.is_some());
        wait(&mut bench);
        bench.node.tick().await;
        assert_eq!(uplink(&bench), "eth0 192.168.0.1");
        assert_eq!(bench.node.uplink_due, None, "not looked at again without news");
        bench.node.stored(vec![Event::Word]).await;
        assert!(bench.asked(0).await);
    })
    .await;
}

/// The next start finds in the file which interface was in use, and by which flags.
#[tokio::test]
async fn the_uplink_is_saved_with_the_flags_that_chose_it() {
    local(async {
        let dir = tempfile::tempdir().unwrap();
        let saved_file =
            SavedFile::new(Some(dir.path()), Path::new("/run/x/subnet.env"), Some("script".into())).unwrap();
        let mut bench = Bench::new(OnLostLease::Hold);
        bench.node.world.saver = Saver::new(Some(saved_file.clone()));
        bench.node.world.options.uplink.can_reach = "192.0.2.9".parse().ok();
        bench.node.kept(None);
        bench.node.full(Cause::Start).await;
        let records = vec![put("10.5.1.0-24", "192.168.0.1").unwrap()];
        bench.node.stored(vec![Event::Snapshot { records, reset: false }]).await;
        while saved_file.read_head().is_none() {
            bench.node.save(Instant::now());
            tokio::task::yield_now().await;
        }
        let flags = "--iface-can-reach 192.0.2.9".into();
        let wanted = Uplink { name: "eth0".into(), v4: Some([192, 168, 0, 1].into()), v6: None, flags };
        assert_eq!(saved_file.read_head().unwrap().uplink, Some(wanted));
    })
    .await;
}
