// SPDX-License-Identifier: Apache-2.0
//! The tunnel guard: a host outside that knows the MAC of a node's tunnel device sends vxlan packets to it. Without the guard
//! they come out of the tunnel as a pod's; with it, only those of peers do.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use weft::lab::{BackendKind, LabOptions};

use crate::packets::{any, socket};
use crate::site::{Family, PORT, Site, on_this_thread, options, straight};

const VXLAN: u16 = 8472;
const SPOOFED: &[u8] = b"spoofed";

/// A vxlan packet (VNI 1) that claims to be a pod of the other node.
fn spoofed(mac: [u8; 6], from: IpAddr, to: IpAddr) -> Vec<u8> {
    let mut packet = vec![0x08, 0, 0, 0, 0, 0, 1, 0];
    packet.extend(mac);
    packet.extend([0x02, 0, 0, 0, 0, 0x99]);
    let mut datagram: Vec<u8> = [9, PORT, 8 + SPOOFED.len() as u16, 0].into_iter().flat_map(u16::to_be_bytes).collect();
    datagram.extend(SPOOFED);
    let length = u16::try_from(datagram.len()).unwrap();
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            packet.extend([0x08, 0x00]);
            let mut header = vec![0x45, 0];
            header.extend((20 + length).to_be_bytes());
            header.extend([0, 1, 0x40, 0, 64, 17, 0, 0]);
            header.extend(from.octets());
            header.extend(to.octets());
            let sum = checksum(&header);
            header[10..12].copy_from_slice(&sum);
            packet.extend(header);
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            packet.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            packet.extend(length.to_be_bytes());
            packet.extend([17, 64]);
            packet.extend(from.octets());
            packet.extend(to.octets());
            // IPv6 takes no datagram without a checksum, over addresses, length and protocol too.
            let mut summed = [from.octets(), to.octets()].concat();
            summed.extend([0, 0, 0, u8::try_from(length).unwrap(), 0, 0, 0, 17]);
            summed.extend(&datagram);
            datagram[6..8].copy_from_slice(&checksum(&summed));
        }
        _ => unreachable!("one family"),
    }
    packet.extend(datagram);
    packet
}

fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!u16::try_from(sum).unwrap()).to_be_bytes()
}

async fn mac(site: &Site, family: Family) -> [u8; 6] {
    let device = if family == Family::V4 { "flannel.1" } else { "flannel-v6.1" };
    let text = site.run("n1", &["cat", &format!("/sys/class/net/{device}/address")]).await;
    let bytes: Vec<u8> = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// Sends three from the host outside, then one that a peer really sends: everything before it has arrived, or never will.
async fn arrive(site: &Site, family: Family) -> Vec<String> {
    let server = socket("n1-p1", site.addr("n1-p1", family), PORT);
    let outside = socket("out", site.addr("out", family), 0);
    let packet = spoofed(mac(site, family).await, site.addr("n2-p1", family), site.addr("n1-p1", family));
    for _ in 0..3 {
        outside.send_to(&packet, SocketAddr::new(site.addr("n1", family), VXLAN)).unwrap();
    }
    let peer = socket("n2-p1", any(site.addr("n2-p1", family)), 0);
    peer.send_to(b"the end", server.local_addr().unwrap()).unwrap();
    until_the_end(&server).into_iter().map(|source| site.name(source, family)).collect()
}

/// Sources of what was spoofed.
fn until_the_end(server: &UdpSocket) -> Vec<IpAddr> {
    let mut sources = Vec::new();
    let mut room = [0; 64];
    loop {
        let (length, source) = server.recv_from(&mut room).expect("a peer's packet arrives");
        match &room[..length] {
            b"the end" => return sources,
            SPOOFED => sources.push(source.ip()),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn without_it_anyone_is_a_pod() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq"]).await;
        site.start().await;
        for family in Family::BOTH {
            assert_eq!(arrive(&site, family).await, ["n2-p1"; 3], "{family:?}");
        }
    });
}

#[test]
fn only_peers_are_heard() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq", "--guard-tunnel"]).await;
        site.start().await;
        for family in Family::BOTH {
            assert_eq!(arrive(&site, family).await, [""; 0], "{family:?}");
        }
        let counted = site.nft("n1", "list ruleset").await;
        assert!(counted.contains("packets 3"), "what is dropped is counted:\n{counted}");
    });
}

/// A node that joins later is a peer from its first packet on.
#[test]
fn a_node_that_joins_is_heard() {
    on_this_thread(async {
        let three = LabOptions { nodes: 3, ..options(&["--ip-masq", "--guard-tunnel"]) };
        let mut site = Site::with(three).await;
        let last = site.lab.nodes.pop().unwrap();
        site.start().await;
        site.lab.nodes.push(last);
        site.lab.nodes[2].start().unwrap();
        site.lab.nodes[2].add_pods(2).await.unwrap();
        for family in Family::BOTH {
            site.until_seen(&straight("n3-p1", "n1-p1"), family, "n3-p1");
            site.until_seen(&straight("n1-p2", "n3-p2"), family, "n1-p2");
            assert_eq!(arrive(&site, family).await, [""; 0], "{family:?}");
        }
    });
}
