// SPDX-License-Identifier: Apache-2.0
//! Shows, makes and disturbs WireGuard devices in the test machine, as another program would. The machine has no program `wg`.
//!
//! `wg peers DEVICE FILE` writes the peers of a file, whose lines are a public key, an endpoint and a prefix each. It begins a handshake with
//! each peer of the first [`HANDSHAKES`]. `wg peers-without-handshakes DEVICE FILE` begins none.
//!
//! `wg dump DEVICE TIMES` prints the CPU time of one dump of the device in microseconds, without reading what is in it: the median of TIMES.
//!
//! `wg all-have DEVICE KEY` fails unless each peer of the device has this preshared key.
//!
//! `wg reaches ADDRESS` sends packets until the kernel has a peer for them, and prints the seconds since boot.
//!
//! `wg answers ADDRESS` sends packets until the host with this address refuses one, so that one has passed the tunnel in each direction, and
//! prints the seconds since boot.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::print_stdout, reason = "a test says what it expected")]
#![allow(clippy::disallowed_methods, reason = "packets are sent at fixed times")]

use std::io::ErrorKind;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use nix::time::ClockId;
use weft::kernel::wireguard::{DeviceChange, PeerChange, PublicKey, Secret, WireGuard};
use weft_netlink::generic;
use weft_netlink::wire::Writer;

/// WG_CMD_GET_DEVICE and WGDEVICE_A_IFNAME of linux/wireguard.h.
const GET_DEVICE: u8 = 0;
const IFNAME: u16 = 2;

/// With so many peers the agent begins a handshake at once.
const HANDSHAKES: usize = 256;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut family = WireGuard::open().unwrap();
    let key = |text: &str| PublicKey::parse(text).expect("a public key");
    match words[..] {
        ["show", device] => show(&mut family, device),
        ["remove-peer", device, peer] => family.remove_peers(device, &[key(peer)]).unwrap(),
        ["remove-allowed", device, peer, net] => {
            family.remove_allowed(device, key(peer), net.parse().unwrap()).unwrap();
        }
        ["port", device, port] => {
            let change = DeviceChange { port: Some(port.parse().unwrap()), ..DeviceChange::default() };
            family.set(device, change, &[]).unwrap();
        }
        ["key", device, file] => {
            let secret = Secret::parse(std::fs::read_to_string(file).unwrap().trim()).expect("a private key");
            family.set(device, DeviceChange { private: Some(&secret), ..DeviceChange::default() }, &[]).unwrap();
        }
        ["peers", device, file] => peers(&mut family, device, file, HANDSHAKES),
        ["peers-without-handshakes", device, file] => peers(&mut family, device, file, 0),
        ["all-have", device, preshared] => all_have(&mut family, device, preshared),
        ["dump", device, times] => dump(device, times.parse().unwrap()),
        ["reaches", address] => reaches(address),
        ["answers", address] => answers(address),
        _ => panic!(
            "wg show|remove-peer|remove-allowed|port|key|peers|peers-without-handshakes|all-have|dump DEVICE ... | \
             wg reaches|answers ADDRESS"
        ),
    }
}

/// Writes all peers of a file in as few messages as possible, and begins this number of handshakes as the agent does.
fn peers(family: &mut WireGuard, device: &str, file: &str, handshakes: usize) {
    let text = std::fs::read_to_string(file).unwrap();
    let peer = |(number, line): (usize, &str)| {
        let [key, endpoint, prefix] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("no peer: {line}") };
        PeerChange {
            endpoint: Some(endpoint.parse().unwrap()),
            keepalive: Some(u16::from(number < handshakes)),
            allowed: vec![prefix.parse().unwrap()],
            ..PeerChange::of(PublicKey::parse(key).expect("a public key"))
        }
    };
    let peers: Vec<PeerChange<'_>> = text.lines().enumerate().map(peer).collect();
    family.set(device, DeviceChange::default(), &peers).unwrap();
    let off = |peer: &PeerChange<'_>| PeerChange { update_only: true, keepalive: Some(0), ..PeerChange::of(peer.key) };
    let restore: Vec<PeerChange<'_>> = peers.iter().take(handshakes).map(off).collect();
    family.set(device, DeviceChange::default(), &restore).unwrap();
}

fn all_have(family: &mut WireGuard, device: &str, preshared: &str) {
    let wanted = Secret::parse(preshared).expect("a preshared key");
    let peers = family.get(device).unwrap().peers;
    assert!(!peers.is_empty(), "{device} has no peer");
    for (key, peer) in peers {
        assert!(peer.preshared.as_ref() == Some(&wanted), "peer {key} has another preshared key, or none");
    }
}

fn dump(device: &str, times: usize) {
    let mut netlink = generic::open().unwrap();
    let family = generic::family(&mut netlink, "wireguard").unwrap().expect("a kernel with WireGuard");
    let build = |w: &mut Writer, kind: u16, flags: u16| {
        w.begin(kind, flags, &generic::header(GET_DEVICE, 1));
        w.attr_str(IFNAME, device);
    };
    let cpu = || Duration::from(ClockId::CLOCK_THREAD_CPUTIME_ID.now().unwrap());
    let mut took: Vec<Duration> = (0..times)
        .map(|_| {
            let begin = cpu();
            let bytes = netlink.dump_into(family, build, |bytes: &mut usize, datagram| *bytes += datagram.len());
            assert!(bytes.unwrap() > 0);
            cpu() - begin
        })
        .collect();
    took.sort_unstable();
    println!("{}", took[times / 2].as_micros());
}

fn reaches(address: &str) {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let end = Instant::now() + Duration::from_secs(120);
    while socket.send_to(&[0], (address, 9)).is_err() {
        assert!(Instant::now() < end, "no peer for {address}");
        std::thread::sleep(Duration::from_millis(1));
    }
    print_uptime();
}

/// Each packet has a socket of its own, because a socket keeps the source address that it got before the route into the tunnel.
fn answers(address: &str) {
    let end = Instant::now() + Duration::from_secs(300);
    loop {
        assert!(Instant::now() < end, "no answer from {address}");
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let answer = socket.connect((address, 9)).and_then(|()| socket.send(&[0])).and_then(|_| socket.recv(&mut [0]));
        if answer.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused) {
            return print_uptime();
        }
        // A router that knows no way answers at once.
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn print_uptime() {
    print!("{}", std::fs::read_to_string("/proc/uptime").unwrap().split(' ').next().unwrap());
}

/// One line for the device, and one for each peer.
fn show(family: &mut WireGuard, device: &str) {
    let found = family.get(device).unwrap();
    let key = found.public.map(|key| key.to_string()).unwrap_or_default();
    println!("device {key} port {} peers {}", found.port, found.peers.len());
    for (key, peer) in found.peers {
        let mut allowed: Vec<String> = peer.allowed.iter().map(ToString::to_string).collect();
        allowed.sort();
        let endpoint = peer.endpoint.map(|endpoint| endpoint.to_string()).unwrap_or_default();
        let yes = |is: bool| if is { "yes" } else { "no" };
        println!(
            "peer {key} endpoint {endpoint} allowed {} keepalive {} psk {} handshake {}",
            allowed.join(","),
            peer.keepalive,
            yes(peer.preshared.is_some()),
            yes(peer.handshake.is_some())
        );
    }
}
