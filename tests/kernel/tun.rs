// SPDX-License-Identifier: Apache-2.0
//! TUN devices of the kernel adapter, and the tunnel that the agent runs on one.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use tokio::time::Instant;
use weft::data_path::{DataPath, Earlier, Handover, Wanted};
use weft::kernel::{Kernel, LinuxKernel, sysctl};
use weft_backends::diff::Op;
use weft_backends::link::{Foreign, Link};
use weft_backends::state::{Key, Value};
use weft_backends::tunnel::{Tunnel, TunnelPeer};
use weft_backends::udp::TunLink;
use weft_udp::{Descriptors, Device};

use super::adapter_net::{all_done, in_namespace, ip, kernel, name, put, remove};
use crate::patience::PATIENCE;

fn tun(mtu: u32) -> (Key, Value) {
    (Key::Link(name("flannel0")), Value::link(Link { kind: Arc::new(TunLink), mtu, mac: None, up: true }))
}

#[test]
fn a_tun_device_is_created_changed_and_removed() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let (key, value) = tun(1400);
        put(&mut k, &[(key, value.clone())]);
        let seen = k.observe(&[]).unwrap().get(&key).unwrap().clone();
        assert_eq!((&seen.value, seen.mark), (&value, true), "it is found by its alias");
        let shown = ip("-d link show flannel0");
        assert!(
            shown.contains("tun type tun") && shown.contains("persist on") && shown.contains("mtu 1400"),
            "{shown}"
        );
        assert!(shown.contains("addrgenmode none"), "{shown}");
        let accepts = sysctl::read(sysctl::of_interface("ipv6", name("flannel0"), "accept_ra"));
        assert_eq!(
            accepts.unwrap(),
            "0",
            "a router that somebody plays in the pods' network gives the host no address"
        );
        let index = |shown: &str| shown.split(':').next().unwrap().to_owned();
        put(&mut k, &[tun(1300)]);
        let changed = ip("-d link show flannel0");
        assert!(changed.contains("mtu 1300") && index(&changed) == index(&shown), "{changed}");
        remove(&mut k, &[tun(1300)]);
        assert_eq!(k.observe(&[name("flannel0")]).unwrap().get(&key), None);
    });
}

#[test]
fn a_tap_device_is_not_one_and_a_device_of_a_person_is_taken_over() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let (key, value) = tun(1400);
        ip("tuntap add flannel0 mode tap");
        let seen = k.observe(&[name("flannel0")]).unwrap().get(&key).unwrap().clone();
        let Value::Link(link) = &seen.value else { panic!("{seen:?}") };
        assert!(link.kind.of::<Foreign>().is_some(), "{link}");
        let ops = [Op::Recreate(key, value.clone())];
        all_done(&ops, k.apply(&ops));
        assert!(ip("-d link show flannel0").contains("tun type tun"));
        ip("link del flannel0");
        // Without the framing that the tunnel needs: it is chosen when the device is opened.
        ip("tuntap add flannel0 mode tun");
        let seen = k.observe(&[name("flannel0")]).unwrap().get(&key).unwrap().clone();
        assert!(!seen.mark, "{seen:?}");
        put(&mut k, &[(key, value.clone())]);
        assert_eq!(k.observe(&[]).unwrap().get(&key).unwrap().value, value);
        until_running(&mut DataPath::default(), &wanted(1, &Vec::new), Instant::now());
    });
}

fn wanted(version: u64, peers: &dyn Fn() -> Vec<TunnelPeer>) -> Wanted<'_> {
    let (local, subnet) = ("10.0.0.1".parse().unwrap(), "10.5.1.0/24".parse().unwrap());
    let tunnel = Tunnel { device: name("flannel0"), mtu: 1400, local, port: 8285, subnet };
    Wanted { tunnel, more_ports: Vec::new(), version, peers }
}

#[test]
fn the_table_of_peers_is_made_once_for_each_version() {
    in_namespace(|| async {
        make(&mut kernel(true)).await;
        let (made, count) = (Cell::new(0), Cell::new(2));
        let peers = || {
            made.set(made.get() + 1);
            let subnet = |third: u32| format!("10.5.{third}.0/24").parse().unwrap();
            let address = "10.0.0.2:8285".parse().unwrap();
            (2..2 + count.get()).map(|third| TunnelPeer { subnet: subnet(third), address, sends_from: None }).collect()
        };
        let mut data_path = DataPath::default();
        let now = Instant::now();
        for _ in 0..3 {
            data_path.update(Some(&wanted(1, &peers)), now);
        }
        assert_eq!((data_path.running().unwrap().1, made.get()), (2, 1));
        // A pause follows each table. Whatever changes within it is in the next one.
        let mut later = now;
        for version in 2..100 {
            data_path.update(Some(&wanted(version, &peers)), now);
        }
        let made_now = made.get();
        assert!(made_now <= 2, "{made_now} tables without a pause");
        count.set(5);
        while let Some(next) = data_path.next() {
            later = next;
            data_path.update(Some(&wanted(100, &peers)), later);
        }
        assert_eq!((made.get(), data_path.running().unwrap().1), (made_now + 1, 5), "the last version is in the table");
        data_path.update(None, later);
        assert!(data_path.running().is_none() && data_path.problem().is_none());
        assert!(ip("link show flannel0").contains("flannel0"), "the device stays");
    });
}

/// Waits until the last thread of a tunnel has closed its socket. The agent pauses before it starts the next one, and the test does not.
async fn port_is_free() {
    let end = Instant::now() + PATIENCE;
    while std::net::UdpSocket::bind("10.0.0.1:8285").is_err() {
        assert!(Instant::now() < end, "the port of a tunnel that ended stays in use");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Makes the device, and waits until nobody has it open. A process that another test is just starting has copies of all descriptors until it
/// executes its program, also of the one by which the device was made.
async fn make(kernel: &mut LinuxKernel) {
    put(kernel, &[tun(1400)]);
    let end = Instant::now() + PATIENCE;
    while !ip("-o link show flannel0").contains("NO-CARRIER") {
        assert!(Instant::now() < end, "somebody has the device open");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn a_tunnel_that_ends_is_reported_and_started_again_after_a_pause() {
    in_namespace(|| async {
        let mut k = kernel(true);
        let mut data_path = DataPath::default();
        let mut now = Instant::now();
        let none: &dyn Fn() -> Vec<TunnelPeer> = &Vec::new;
        data_path.update(Some(&wanted(1, none)), now);
        assert_eq!(data_path.problem(), Some("the device flannel0 does not exist yet"));
        assert_eq!(ip("-o link").matches("flannel0").count(), 0, "the data path creates no device");
        let mut pauses = Vec::new();
        for _ in 0..3 {
            make(&mut k).await;
            data_path.update(Some(&wanted(1, none)), now);
            assert!(data_path.running().is_some(), "{:?}", data_path.problem());
            let ended = data_path.ended();
            ip("link del flannel0");
            tokio::time::timeout(PATIENCE, ended.notified()).await.expect("the end is announced");
            data_path.update(Some(&wanted(1, none)), now);
            port_is_free().await;
            let problem = data_path.problem().unwrap().to_owned();
            assert!(problem.contains("the TUN device flannel0 was lost"), "{problem}");
            let next = data_path.next().unwrap();
            pauses.push(next - now);
            data_path.update(Some(&wanted(1, none)), next - Duration::from_millis(1));
            assert!(data_path.running().is_none());
            now = next;
        }
        assert_eq!(pauses, [1, 2, 4].map(Duration::from_secs));
        assert_eq!(data_path.starts(), 3);
        // One that ran for long is started again as soon as its device is there.
        make(&mut k).await;
        data_path.update(Some(&wanted(1, none)), now);
        let ended = data_path.ended();
        ip("link del flannel0");
        tokio::time::timeout(PATIENCE, ended.notified()).await.expect("the end is announced");
        now += Duration::from_secs(60);
        data_path.update(Some(&wanted(1, none)), now);
        port_is_free().await;
        make(&mut k).await;
        data_path.update(Some(&wanted(1, none)), now);
        assert!(data_path.running().is_some(), "{:?}", data_path.problem());
        // Its failures before that count no more: the next pause is that after the second failure.
        let ended = data_path.ended();
        ip("link del flannel0");
        tokio::time::timeout(PATIENCE, ended.notified()).await.expect("the end is announced");
        data_path.update(Some(&wanted(1, none)), now);
        assert_eq!(data_path.next(), Some(now + Duration::from_secs(2)));
        // When no tunnel is wanted any more, nothing is wrong, and a later one does not wait.
        data_path.stop();
        assert_eq!((data_path.problem(), data_path.next()), (None, None));
        make(&mut k).await;
        until_running(&mut data_path, &wanted(1, none), now);
    });
}

/// Updates the data path until its tunnel runs. A process that another test is just starting has copies of all sockets and devices, also of
/// those that were closed, until it executes its program. So the port or the device may be in use for a moment.
fn until_running(data_path: &mut DataPath, wanted: &Wanted<'_>, mut now: Instant) {
    let deadline = std::time::Instant::now() + PATIENCE;
    data_path.update(Some(wanted), now);
    while data_path.running().is_none() {
        assert!(std::time::Instant::now() < deadline, "{:?}", data_path.problem());
        now = data_path.next().expect("it is tried again");
        data_path.update(Some(wanted), now);
    }
}

/// The uplink has another address, or net-conf names another port. A socket cannot be bound to another address.
#[test]
fn another_tunnel_replaces_the_one_that_runs() {
    in_namespace(|| async {
        put(&mut kernel(true), &[tun(1400)]);
        ip("addr add 10.0.0.7/24 dev up0");
        let (mut data_path, now) = (DataPath::default(), Instant::now());
        let first = wanted(1, &Vec::new);
        for (local, port) in [("10.0.0.1", 8285), ("10.0.0.7", 8285), ("10.0.0.7", 8286)] {
            let tunnel = Tunnel { local: local.parse().unwrap(), port, ..first.tunnel };
            until_running(
                &mut data_path,
                &Wanted { tunnel, more_ports: Vec::new(), version: 1, peers: &Vec::new },
                now,
            );
            assert_eq!(data_path.running(), Some((tunnel, 0)));
        }
        assert_eq!((data_path.starts(), data_path.problem()), (3, None));
    });
}

/// Another port in net-conf: peers may send to it as soon as our lease names it, and to the earlier one until they have followed.
#[test]
fn the_next_port_is_open_before_its_tunnel_runs_and_the_earlier_one_stays() {
    in_namespace(|| async {
        put(&mut kernel(true), &[tun(1400)]);
        let (mut data_path, now) = (DataPath::default(), Instant::now());
        let first = wanted(1, &Vec::new);
        until_running(&mut data_path, &first, now);
        let is_open = |port: u16| std::net::UdpSocket::bind(("10.0.0.1", port)).is_err();
        let taken = std::net::UdpSocket::bind("10.0.0.1:8287").unwrap();
        let refused = data_path.reserve(&Tunnel { port: 8287, ..first.tunnel }).unwrap_err().to_string();
        assert!(refused.contains("10.0.0.1:8287"), "{refused}");
        drop(taken);
        let next = Tunnel { port: 8286, ..first.tunnel };
        for _ in 0..2 {
            data_path.reserve(&next).unwrap();
            assert!(is_open(8286) && data_path.running() == Some((first.tunnel, 0)));
        }
        let both = Wanted { tunnel: next, more_ports: vec![8285], version: 1, peers: &Vec::new };
        until_running(&mut data_path, &both, now);
        assert!(data_path.running() == Some((next, 0)) && is_open(8286) && is_open(8285));
        data_path.reserve(&first.tunnel).expect("it listens there already");
        until_running(&mut data_path, &Wanted { more_ports: Vec::new(), ..both }, now);
        port_is_free().await;
        assert!(is_open(8286));
    });
}

#[test]
fn an_earlier_port_that_was_taken_is_named_and_is_opened_when_it_is_free() {
    in_namespace(|| async {
        put(&mut kernel(true), &[tun(1400)]);
        let (mut data_path, now) = (DataPath::default(), Instant::now());
        let taken = std::net::UdpSocket::bind("10.0.0.1:8286").unwrap();
        let both = Wanted { more_ports: vec![8286], ..wanted(1, &Vec::new) };
        until_running(&mut data_path, &both, now);
        let problems: Vec<String> = data_path.port_problems().collect();
        assert!(problems.len() == 1 && problems[0].contains("10.0.0.1:8286"), "{problems:?}");
        let first = data_path.next().expect("the port is tried again");
        data_path.update(Some(&both), first);
        let mut later = data_path.next().expect("it is tried again");
        assert_eq!((later - first, data_path.starts()), (Duration::from_secs(2), 1), "the tunnel goes on meanwhile");
        drop(taken);
        let deadline = std::time::Instant::now() + PATIENCE;
        data_path.update(Some(&both), later);
        while data_path.running().is_none() || data_path.port_problems().next().is_some() {
            assert!(std::time::Instant::now() < deadline, "{:?}", data_path.problem());
            later = data_path.next().expect("it is tried again");
            data_path.update(Some(&both), later);
        }
        assert_eq!((data_path.next(), data_path.problem()), (None, None));
        assert!(std::net::UdpSocket::bind("10.0.0.1:8286").is_err(), "it listens there");
    });
}

/// systemd keeps the descriptors of the tunnel while the agent restarts, and packets wait in them. The device has one descriptor that works, so
/// the next tunnel must take that one.
#[test]
fn the_next_tunnel_takes_over_the_descriptors_that_were_kept() {
    in_namespace(|| async {
        put(&mut kernel(true), &[tun(1400)]);
        let (now, wanted) = (Instant::now(), wanted(1, &Vec::new));
        let mut first = DataPath::new(true, Earlier::default());
        until_running(&mut first, &wanted, now);
        let kept = first.take_handover();
        let Some(Handover::Keep(Descriptors { device, sockets })) = kept else { panic!("{kept:?}") };
        assert!(first.take_handover().is_none(), "it is told once");
        first.stop();
        drop(first);
        // A tunnel that does not know them cannot open the device, and asks systemd to close what it may keep.
        let mut stranger = DataPath::new(true, Earlier::default());
        stranger.update(Some(&wanted), now);
        assert!(stranger.running().is_none() && stranger.problem().is_some(), "somebody else has the device");
        assert!(matches!(stranger.take_handover(), Some(Handover::Forget)));

        let mut second = DataPath::new(true, Earlier { device: Some(device), sockets });
        until_running(&mut second, &wanted, now);
        let told = second.take_handover().expect("the next process gets them, too");
        second.hand_over_later(told);
        assert!(matches!(second.take_handover(), Some(Handover::Keep(_))), "systemd could not be told");
        // Another backend needs no tunnel.
        second.stop();
        second.forget();
        assert!(matches!(second.take_handover(), Some(Handover::Forget)));
        second.forget();
        assert!(second.take_handover().is_none(), "it is told once");
    });
}

/// net-conf names another device since systemd was given the descriptors. The tunnel must not run on the old one.
#[test]
fn a_device_of_another_name_that_was_kept_is_not_used() {
    in_namespace(|| async {
        // The names of TUN devices are read from /sys, which must be that of this namespace.
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).unwrap();
        mount(Some("sysfs"), "/sys", Some("sysfs"), MsFlags::empty(), none).unwrap();
        put(&mut kernel(true), &[tun(1400), (Key::Link(name("flannel1")), tun(1400).1)]);
        let (now, before) = (Instant::now(), wanted(1, &Vec::new));
        let mut first = DataPath::new(true, Earlier::default());
        until_running(&mut first, &before, now);
        let Some(Handover::Keep(Descriptors { device, .. })) = first.take_handover() else { panic!() };
        first.stop();
        drop(first);
        port_is_free().await;
        let mut second = DataPath::new(true, Earlier { device: Some(device), sockets: Vec::new() });
        let tunnel = Tunnel { device: name("flannel1"), ..before.tunnel };
        until_running(&mut second, &Wanted { tunnel, more_ports: Vec::new(), version: 1, peers: &Vec::new }, now);
        assert!(Device::open("flannel1").is_err(), "only one can have it open, and that is the tunnel");
    });
}
