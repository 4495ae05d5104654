// SPDX-License-Identifier: Apache-2.0
//! The tunnel guard. A host outside the cluster knows the MAC of a node's tunnel device, and sends vxlan packets to it. Without the
//! guard they leave the tunnel as packets of a pod. With it, only the packets of peers do.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Instant;

use weft::firewall::nft::batch::{Batch, InTable};
use weft::firewall::nft::{self, table};
use weft::instance::Instance;
use weft_lab::store::Store;
use weft_lab::{BackendKind, LabOptions, wait_for};

use crate::packets::{any, inside, socket};
use crate::site::{Family, PATIENCE, PORT, Site, on_this_thread, options, straight};

const VXLAN: u16 = 8472;
const SPOOFED: &[u8] = b"spoofed";

/// Builds a vxlan packet (VNI 1) with the source address of a pod of the other node.
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
            // IPv6 requires a checksum, which also covers the addresses, the length and the protocol.
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

/// Sets the flags of one node, in addition to those of its store.
fn flags(site: &mut Site, node: usize, flags: &[&str]) {
    let mut all = site.lab.store.flags();
    all.extend(flags.iter().map(|flag| (*flag).to_owned()));
    site.lab.nodes[node].set_flags(all);
}

/// Returns what the status of a node says about its guard.
async fn guard_status(site: &Site, node: usize) -> String {
    site.lab.nodes[node].status_as::<weft::observe::status::Status>().await.unwrap().rules.guard.unwrap_or_default()
}

async fn mac(site: &Site, family: Family) -> [u8; 6] {
    let device = if family == Family::V4 { "flannel.1" } else { "flannel-v6.1" };
    let text = site.run("n1", &["cat", &format!("/sys/class/net/{device}/address")]).await;
    let bytes: Vec<u8> = text.trim().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

/// Sends three spoofed packets from the host outside, and then one packet from a peer. When that one has arrived, and as many spoofed ones
/// as are expected, returns the sources of the spoofed ones. On a busy machine, a packet may overtake those that another processor handles.
async fn spoofed_arrivals(site: &Site, family: Family, expected: usize) -> Vec<String> {
    let server = socket("n1-p1", site.addr("n1-p1", family), PORT);
    // The last packet ends the wait.
    server.set_read_timeout(Some(PATIENCE)).unwrap();
    let outside = socket("out", site.addr("out", family), 0);
    let packet = spoofed(mac(site, family).await, site.addr("n2-p1", family), site.addr("n1-p1", family));
    for _ in 0..3 {
        outside.send_to(&packet, SocketAddr::new(site.addr("n1", family), VXLAN)).unwrap();
    }
    let peer = socket("n2-p1", any(site.addr("n2-p1", family)), 0);
    peer.send_to(b"the end", server.local_addr().unwrap()).unwrap();
    read_until_the_end(&server, expected).into_iter().map(|source| site.name(source, family)).collect()
}

/// Reads packets until the last one and this number of spoofed ones have arrived, and returns the sources of the spoofed ones.
fn read_until_the_end(server: &UdpSocket, expected: usize) -> Vec<IpAddr> {
    let (mut sources, mut has_ended) = (Vec::new(), false);
    let mut room = [0; 64];
    while !has_ended || sources.len() < expected {
        let Ok((length, source)) = server.recv_from(&mut room) else {
            panic!("the packet of the peer arrived: {has_ended}; spoofed packets arrived from {sources:?}");
        };
        match &room[..length] {
            b"the end" => has_ended = true,
            SPOOFED => sources.push(source.ip()),
            other => panic!("{other:?}"),
        }
    }
    sources
}

/// Returns how many packets the guard of n1 has dropped.
async fn dropped(site: &Site, family: Family) -> u64 {
    let name = Instance::new(&site.lab.nodes[0].subnet_file()).name;
    let chain = site.nft("n1", &format!("list chain {} {name}-guard input", family.nft())).await;
    let counts = chain.split("counter packets ").skip(1).map(|rest| rest.split(' ').next().unwrap());
    counts.map(|count| count.parse::<u64>().unwrap()).sum()
}

#[test]
fn without_the_guard_spoofed_packets_arrive() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq"]).await;
        site.start().await;
        for family in Family::BOTH {
            assert_eq!(spoofed_arrivals(&site, family, 3).await, ["n2-p1"; 3], "{family:?}");
        }
    });
}

#[test]
fn only_packets_of_peers_arrive() {
    on_this_thread(async {
        let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq", "--guard-tunnel"]).await;
        site.start().await;
        for family in Family::BOTH {
            // A packet that n2 sent before n1 knew its lease was dropped and counted, too.
            let before = dropped(&site, family).await;
            assert_eq!(spoofed_arrivals(&site, family, 0).await, [""; 0], "{family:?}");
            let counted = async || dropped(&site, family).await == before + 3;
            wait_for("what is dropped to be counted", PATIENCE, counted).await.unwrap();
        }
    });
}

/// The packets of a node that joins later arrive.
#[test]
fn packets_of_a_node_that_joins_later_arrive() {
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
            assert_eq!(spoofed_arrivals(&site, family, 0).await, [""; 0], "{family:?}");
        }
    });
}

/// A change that another program makes to a table.
type Damage<'a> = dyn Fn(&mut Batch<'_>) + Sync + 'a;

/// The next audit is an hour away, so only the notifications of nftables can cause the repair. Removals are not held, because the first
/// list of leases that n1 reads may contain no other node.
#[test]
fn changes_by_another_program_are_repaired_after_a_notification() {
    on_this_thread(async {
        let mut site =
            Site::build(BackendKind::Vxlan, &["--ip-masq", "--guard-tunnel", "--resync=1h", "--hold-removals=0s"])
                .await;
        site.start().await;
        let instance = Instance::new(&site.lab.nodes[0].subnet_file());
        let table = format!("{}-guard", instance.name);
        let good = inside("n1", || read_guard(&table));
        let (v4, v6) = (weft_subnet::cidr::Family::V4, weft_subnet::cidr::Family::V6);
        let (peer, stranger) = (["192.168.77.12".parse().unwrap()], ["fd77::200".parse().unwrap()]);
        let [peers, chain] = ["peers", "input"].map(|name| InTable { table: &table, name });
        let damages: [(&str, &Damage<'_>); 4] = [
            ("a peer is removed", &|batch| batch.elements(v4, peers, &peer, false)),
            ("a stranger is added", &|batch| batch.elements(v6, peers, &stranger, true)),
            ("the chain is removed", &|batch| batch.delete_chain(v4, chain)),
            ("the table is removed", &|batch| batch.delete(v6, &table)),
        ];
        for (name, damage) in damages {
            // After more changes in one minute, the agent would leave the entry to the audit.
            for _ in 0..3 {
                inside("n1", || {
                    let mut netlink = nft::connection::open().unwrap();
                    let mut batch = Batch::new(&mut netlink);
                    damage(&mut batch);
                    batch.send().unwrap().unwrap();
                    let start = Instant::now();
                    while read_guard(&table) != good {
                        assert!(start.elapsed() < PATIENCE, "{name}: not repaired");
                        std::thread::yield_now();
                    }
                });
            }
        }
        for family in Family::BOTH {
            assert_eq!(spoofed_arrivals(&site, family, 0).await, [""; 0], "{family:?}");
        }
    });
}

/// Returns the peers and the number of rules of each family.
fn read_guard(name: &str) -> Vec<Option<(BTreeSet<IpAddr>, usize)>> {
    use weft_subnet::cidr::Family;
    let mut netlink = nft::connection::open().unwrap();
    let one = |family: Family| {
        let peers = table::elements(&mut netlink, family, name, "peers").ok()?;
        let rules = table::rules_of(&mut netlink, family.number(), name, "input").ok()?;
        Some((peers, rules.len()))
    };
    Family::BOTH.map(one).to_vec()
}

/// Builds a site in which n2 publishes addresses that it does not send from, as a node behind a 1:1 address translation does.
async fn behind_other_addresses(guard: &[&str], before: impl AsyncFnOnce(&Site)) -> Site {
    let mut site = Site::build(BackendKind::Vxlan, &["--ip-masq", "--guard-tunnel"]).await;
    site.run("n2", &["sh", "-ec", "ip addr add 192.168.77.112/32 dev lo; ip addr add fd77::112/128 dev lo nodad"])
        .await;
    let routes = "ip route add 192.168.77.112/32 via 192.168.77.12; ip route add fd77::112/128 via fd77::12";
    site.run("n1", &["sh", "-ec", routes]).await;
    flags(&mut site, 1, &[&["--ip-masq", "--public-ip=192.168.77.112", "--public-ipv6=fd77::112"], guard].concat());
    before(&site).await;
    site.start().await;
    site
}

/// Adds no address translation.
async fn no_translation(_: &Site) {}

/// Returns the lease with this published address.
fn lease(site: &Site, public: &str) -> serde_json::Value {
    let Store::Dir(path) = &site.lab.store else { panic!("not a directory store") };
    let files = std::fs::read_dir(path.join("subnets")).unwrap().map(|entry| entry.unwrap());
    // A file that is being written has a hidden name, and may be gone when it is read.
    let files = files.filter(|file| !file.file_name().to_string_lossy().starts_with('.')).map(|file| file.path());
    let mut leases = files.map(|file| serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap());
    leases.find(|lease: &serde_json::Value| lease["PublicIP"] == public).unwrap()
}

#[test]
fn the_lease_of_a_node_with_another_public_address_names_the_source_of_its_packets() {
    on_this_thread(async {
        let site = behind_other_addresses(&["--guard-tunnel"], no_translation).await;
        let lease = lease(&site, "192.168.77.112");
        let stated = ["PublicIPv6", "TunnelIP", "TunnelIPv6"].map(|name| lease[name].as_str().unwrap_or("-"));
        assert_eq!(stated, ["fd77::112", "192.168.77.12", "fd77::12"], "{lease}");
        assert!(guard_status(&site, 0).await.starts_with("on: "), "{}", guard_status(&site, 0).await);
        for family in Family::BOTH {
            site.until_seen(&straight("n2-p1", "n1-p1"), family, "n2-p1");
            site.until_seen(&straight("n1-p2", "n2-p2"), family, "n1-p2");
            assert_eq!(spoofed_arrivals(&site, family, 0).await, [""; 0], "{family:?}");
        }
    });
}

/// Translates the sources of n2's tunnel packets to its published addresses, as a 1:1 address translation at the border of its site does.
async fn translate(site: &Site) {
    let rule = |l3: &str, from: &str, to: &str| {
        let table = format!("{l3} border");
        format!(
            "add table {table}; add chain {table} post {{ type nat hook postrouting priority srcnat; }}; \
             add rule {table} post {l3} saddr {from} udp dport {VXLAN} snat to {to};"
        )
    };
    let both = [("ip", "192.168.77.12", "192.168.77.112"), ("ip6", "fd77::12", "fd77::112")];
    site.nft("n2", &both.map(|(l3, from, to)| rule(l3, from, to)).concat()).await;
}

#[test]
fn packets_of_a_node_behind_an_address_translation_arrive() {
    on_this_thread(async {
        let site = behind_other_addresses(&["--guard-tunnel"], translate).await;
        assert!(guard_status(&site, 0).await.starts_with("on: "), "{}", guard_status(&site, 0).await);
        for family in Family::BOTH {
            site.until_seen(&straight("n2-p1", "n1-p1"), family, "n2-p1");
            assert_eq!(spoofed_arrivals(&site, family, 0).await, [""; 0], "{family:?}");
        }
        let sent = site.nft("n2", "list ruleset").await;
        assert!(sent.contains("snat to 192.168.77.112"), "{sent}");
    });
}

/// The guard would drop its packets like those of a stranger. So the guard stays off, and the status says why.
#[test]
fn the_guard_stays_off_if_a_lease_does_not_name_the_source_of_its_packets() {
    on_this_thread(async {
        let site = behind_other_addresses(&[], no_translation).await;
        assert!(lease(&site, "192.168.77.112").get("TunnelIP").is_none());
        assert!(
            guard_status(&site, 0).await.starts_with("off: 1 of 1 leases do not say"),
            "{}",
            guard_status(&site, 0).await
        );
        for family in Family::BOTH {
            site.until_seen(&straight("n2-p1", "n1-p1"), family, "n2-p1");
            assert_eq!(spoofed_arrivals(&site, family, 3).await, ["n2-p1"; 3], "{family:?}");
        }
    });
}
