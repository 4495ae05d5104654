// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets for what arrives from the network: a datagram, and a packet that gets an ICMP answer. Nothing may panic, and
//! nothing may pass that the guard forbids.
//!
//! They run on stable Rust as ordinary tests, for one second each on random input. `WEFT_FUZZ_SECONDS=60 cargo test -p
//! weft-udp --test fuzz` runs all targets for 60 s in total.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests, which clippy does not take for tests")]

use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

use bolero::check;
use weft_udp::icmp::Answer;
use weft_udp::packet::{Header, checksum, checksum_is_right, decrement_ttl};
use weft_udp::{Peer, Routes, judge};

/// Number of targets, which share the time. As many run at once as there are processors.
const TARGETS: u32 = 2;

fn time() -> Duration {
    let seconds = std::env::vars().find(|(name, _)| name == "WEFT_FUZZ_SECONDS").map(|(_, value)| value);
    let all = Duration::from_secs(seconds.map_or(1, |text| text.parse().expect("WEFT_FUZZ_SECONDS is not a number")));
    let at_once = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
    all * at_once.min(TARGETS) / TARGETS
}

/// Random bytes rarely are an IPv4 header. Each bit of `mend` makes one field of it right.
fn mended(mut bytes: Vec<u8>, mend: u8) -> Vec<u8> {
    let length = bytes.len().min(0xffff) as u16;
    if bytes.len() < 20 {
        return bytes;
    }
    if mend & 1 != 0 {
        bytes[0] = 0x40 | (bytes[0] & 0x0f).max(5);
    }
    if mend & 2 != 0 {
        bytes[2..4].copy_from_slice(&length.to_be_bytes());
    }
    if mend & 4 != 0 {
        bytes[12..15].copy_from_slice(&[10, 5, 2]);
    }
    if mend & 8 != 0 {
        bytes[16..19].copy_from_slice(&[10, 5, 1]);
    }
    let header = usize::from(bytes[0] & 0x0f) * 4;
    if mend & 16 != 0 && (20..=bytes.len()).contains(&header) {
        bytes[10..12].fill(0);
        let sum = checksum(&bytes[..header]);
        bytes[10..12].copy_from_slice(&sum.to_be_bytes());
    }
    bytes
}

#[test]
fn fuzz_datagram() {
    let peer = Ipv4Addr::new(192, 168, 0, 2);
    let (own, theirs) = ("10.5.1.0/24".parse().unwrap(), "10.5.2.0/24".parse().unwrap());
    let routes = Routes::new([Peer { subnet: theirs, address: SocketAddrV4::new(peer, 8285), sends_from: None }]);
    let target = |(bytes, mend, stranger): &(Vec<u8>, u8, bool)| {
        let bytes = mended(bytes.clone(), *mend);
        let sender = if *stranger { Ipv4Addr::new(192, 168, 0, 9) } else { peer };
        if let Ok(packet) = judge(&bytes, sender, &routes, own, 1472) {
            let header = Header::parse(packet).expect("a believed packet has a header");
            assert!(!stranger && theirs.contains(&header.source) && own.contains(&header.destination));
            assert!(packet.len() == header.total_length && packet.len() <= 1472 && header.ttl > 0);
            let mut packet = packet.to_vec();
            decrement_ttl(&mut packet);
            assert!(checksum_is_right(&packet, &header));
        }
    };
    check!().with_type().with_test_time(time()).for_each(target);
}

#[test]
fn fuzz_answer() {
    let target = |(bytes, mend): &(Vec<u8>, u8)| {
        let bytes = mended(bytes.clone(), *mend);
        let Ok(header) = Header::parse(&bytes) else { return };
        for kind in [Answer::NetworkUnreachable, Answer::TimeExceeded] {
            if let Some(answer) = kind.to(&bytes, &header, Ipv4Addr::new(10, 5, 1, 0)) {
                let outer = Header::parse(&answer).expect("our own header");
                assert!(checksum_is_right(&answer, &outer) && checksum(&answer[20..]) == 0);
                assert!(outer.destination == header.source && answer.len() <= 20 + 8 + 60 + 8);
                assert_eq!(kind.to(&answer, &outer, Ipv4Addr::LOCALHOST), None, "an answer to an answer");
            }
        }
    };
    check!().with_type().with_test_time(time()).for_each(target);
}
