// SPDX-License-Identifier: Apache-2.0
//! Shows and disturbs WireGuard devices in the test machine, as another program would. The machine has no program `wg`.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::print_stdout, reason = "a test says what it expected")]

use weft::kernel::wireguard::{DeviceChange, PublicKey, Secret, WireGuard};

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
        _ => panic!("wg show|remove-peer|remove-allowed|port|key DEVICE ..."),
    }
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
