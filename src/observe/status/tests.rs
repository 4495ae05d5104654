// SPDX-License-Identifier: Apache-2.0
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::lease::{Age, Lease};

use super::super::{Failure, Pass};
use super::*;
use crate::observe::problem::{Problem, ProblemKind};

fn peer(subnet: &str, state: PeerState, reason: Option<&str>) -> Peer {
    let reason = reason.map(str::to_owned);
    let (backend, sessions) = ("vxlan".into(), Vec::new());
    Peer {
        subnet: subnet.into(),
        public: "192.168.64.3".into(),
        backend,
        state,
        not_encrypted: false,
        reason,
        sessions,
        probe: None,
    }
}

fn status() -> Status {
    Status {
        version: "0.1.0".into(),
        node: "node-1".into(),
        ready: true,
        subnet: "10.5.1.0/24".into(),
        lease_ttl_s: Some(86_000),
        public: vec!["192.168.64.2".parse().unwrap()],
        network: "10.5.0.0/16".into(),
        backend: "vxlan".into(),
        other_ways: Vec::new(),
        mtu: 1450,
        uplink: "eth0 192.168.64.2 MTU 1500".into(),
        store: "etcd http://127.0.0.1:2379 /coreos.com/network".into(),
        store_silent_s: 3,
        peers: vec![
            peer("10.5.2.0/24", PeerState::Programmed, None),
            peer("10.5.3.0/24", PeerState::SetAside, Some("VtepMAC 01:00:00:00:00:01 is multicast")),
        ],
        last_pass: Some(Pass { at_ms: 1_000, took_us: 840, writes: 3, failed: 0, cause: "lease".into() }),
        audit_interval_s: 10.0,
        ..Status::default()
    }
}

#[test]
fn the_table_of_a_ready_node() {
    let wanted = "\
node        node-1, ready, weft 0.1.0
lease       10.5.1.0/24, ends in 23 h 53 min unless renewed
network     10.5.0.0/16 by vxlan, MTU 1450
uplink      eth0 192.168.64.2 MTU 1500
public      192.168.64.2
store       etcd http://127.0.0.1:2379 /coreos.com/network, last answer 3 s ago
last pass   4 s ago, lease: 3 writes, 0 failed, took 840 us; audit every 10 s
rules       none yet
peers       1 programmed, 1 set-aside

SUBNET       PUBLIC        BACKEND  STATE
10.5.3.0/24  192.168.64.3  vxlan    set-aside
    VtepMAC 01:00:00:00:00:01 is multicast
10.5.2.0/24  192.168.64.3  vxlan    programmed
";
    assert_eq!(render(&status(), 5_000), wanted);
}

#[test]
fn the_time_between_two_comparisons_of_wireguard_peers_is_shown() {
    let text = render(&Status { wireguard_audit_s: Some(12.4), ..status() }, 5_000);
    assert!(
        text.replace("\n            ", " ").contains("; audit every 10 s, of WireGuard peers every 12 s\n"),
        "{text}"
    );
}

#[test]
fn peers_in_clear_text_are_marked_and_come_first() {
    let mut status = status();
    let peer = |number| peer(&format!("10.5.{number}.0/24"), PeerState::Programmed, None);
    status.peers = (2..100).map(peer).collect();
    status.peers[97].not_encrypted = true;
    let text = render(&status, 5_000);
    assert!(text.contains("peers       98 programmed; 1 of them NOT ENCRYPTED\n"), "{text}");
    assert!(
        text.contains("STATE\n10.5.99.0/24  192.168.64.3  vxlan    programmed, NOT ENCRYPTED\n10.5.2.0/24 "),
        "{text}"
    );
    let json = serde_json::to_string(&status.peers[96..]).unwrap();
    assert_eq!(json.matches(r#""not_encrypted":true"#).count(), 1);
    assert_eq!(json.matches("not_encrypted").count(), 1, "it is left out where it is false");
}

#[test]
fn the_tunnel_has_a_line_for_each_direction_with_what_it_dropped() {
    let mut tunnel = TunnelStatus {
        device: "flannel0".into(),
        socket: "192.168.64.2:8285".into(),
        running: true,
        peers: 3,
        starts: 1,
        sent: TunnelCounts { packets: 7, bytes: 700, ..TunnelCounts::default() },
        received: TunnelCounts {
            packets: 5,
            bytes: 500,
            dropped: [("stranger".to_owned(), 2), ("malformed".to_owned(), 1)].into(),
        },
    };
    let lines = |tunnel: &TunnelStatus| {
        let text = render(&Status { tunnel: Some(tunnel.clone()), ..status() }, 5_000);
        text.lines().skip_while(|line| !line.starts_with("tunnel")).take(3).map(str::to_owned).collect::<Vec<_>>()
    };
    let wanted = [
        "tunnel      flannel0 over 192.168.64.2:8285, 3 peers",
        "            sent 7 packets, 700 bytes",
        "            received 5 packets, 500 bytes; dropped: 1 malformed, 2 stranger",
    ];
    assert_eq!(lines(&tunnel), wanted);
    (tunnel.running, tunnel.starts) = (false, 2);
    assert_eq!(lines(&tunnel)[0], "tunnel      flannel0 over 192.168.64.2:8285, NOT RUNNING, started 2 times");
}

#[test]
fn rules_are_counted_in_one_line_and_listed_one_by_one() {
    let rules = RuleStatus {
        filter: "nftables, table weft".into(),
        in_place: true,
        rules: vec!["IPv4 forward: from 10.5.0.0/16 accept".into(), "IPv4 forward: to 10.5.0.0/16 accept".into()],
        writes: 3,
        mended: 2,
        guard: None,
        fence: None,
    };
    let mut status = Status { rules, ..status() };
    let line = "rules       2 in place by nftables, table weft, mended 2 times after others changed them\n";
    assert!(render(&status, 5_000).contains(line), "{}", render(&status, 5_000));
    let wanted = format!("{line}\nIPv4 forward: from 10.5.0.0/16 accept\nIPv4 forward: to 10.5.0.0/16 accept\n");
    assert_eq!(super::rules(&status), wanted);
    (status.rules.in_place, status.rules.mended) = (false, 1);
    let line = "rules       NOT IN PLACE by nftables, table weft, mended once after others changed them\n";
    assert!(super::rules(&status).starts_with(line), "{}", super::rules(&status));
}

#[test]
fn remarks_follow_the_problems() {
    let problems = vec![Problem::new(ProblemKind::Fight, "another program")];
    let text = render(&Status { problems, remarks: vec!["nothing is wrong".into()], ..status() }, 5_000);
    assert!(text.contains("problem     another program\nremark      nothing is wrong\nlease "), "{text}");
}

#[test]
fn an_agent_without_a_lease() {
    let problems = vec![Problem::new(ProblemKind::Start, "no net-conf in the store")];
    let status = Status { node: "n".into(), problems, ..Status::default() };
    let text = render(&status, 0);
    assert!(text.starts_with("node        n, NOT READY, weft"), "{text}");
    assert!(text.contains("problem     no net-conf in the store\nlease       none yet\n"), "{text}");
    assert!(text.ends_with("store\n") && !text.contains("peers"), "{text}");
}

#[test]
fn the_table_has_at_most_100_columns_and_problems_come_first() {
    let mut status = status();
    status.last_error = Some(Failure { at_ms: 2_000, text: format!("write route {} \u{1b}[31m", "x".repeat(250)) });
    status.peers = (0..60).map(|n| peer(&format!("10.5.{n}.0/24"), PeerState::Programmed, None)).collect();
    let long = "10.255.255.0/24,fd00:1111:2222:3333:4444:5555:6666:0/112";
    status.peers.push(peer(long, PeerState::Failed, Some(&"no space left on device ".repeat(9))));
    status.peers[60].public = "2001:1111:2222:3333:4444:5555:6666:7777 10.0.0.1".into();
    status.peers[60].backend = "something-very-long".into();
    let text = render(&status, 5_000);
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert!(text.contains("last error  3 s ago: write route"), "{text}");
    assert!(!text.contains('\u{1b}'));
    let rows: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("SUBNET")).collect();
    assert!(rows[1].ends_with("failed"), "{text}");
    assert!(rows.last().unwrap().starts_with("... and 40 more, programmed"), "{text}");
}

#[test]
fn the_traffic_with_a_peer_has_a_line() {
    let mut status = status();
    let session = |handshake_s, handshake_ahead_s| PeerSession {
        device: "flannel-wg".into(),
        endpoint: Some("203.0.113.9:1024".into()),
        handshake_s,
        handshake_ahead_s,
        received: 2_500_000,
        sent: 999,
    };
    status.peers[0].sessions = vec![session(Some(12), 0), session(None, 0), session(Some(0), 60)];
    let text = render(&status, 5_000);
    let wanted = "\
    flannel-wg: last handshake 12 s ago, received 2.5 MB, sent 999 B, endpoint 203.0.113.9:1024
    flannel-wg: last handshake never, received 2.5 MB, sent 999 B, endpoint 203.0.113.9:1024
    flannel-wg: last handshake 60 s in the future, received 2.5 MB, sent 999 B, endpoint
    203.0.113.9:1024
";
    assert!(text.ends_with(wanted), "{text}");
}

#[test]
fn times_and_bytes_have_the_unit_that_fits() {
    for (seconds, text) in [
        (0, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7_199, "119 min"),
        (7_200, "2 h 0 min"),
        (9_000, "2 h 30 min"),
        (172_799, "47 h 59 min"),
        (172_800, "2 days"),
    ] {
        assert_eq!(duration(seconds), text);
    }
    assert_eq!((short_duration(9_999), short_duration(10_000)), ("9999 us".to_owned(), "10 ms".to_owned()));
    for (count, text) in [
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (999_999, "999.9 kB"),
        (1_000_000, "1.0 MB"),
        (1_250_000_000, "1.2 GB"),
        (3_000_000_000_000, "3.0 TB"),
    ] {
        assert_eq!(bytes(count), text);
    }
}

#[test]
fn the_answer_of_an_agent_that_does_not_name_its_uplink_for_programs_is_read() {
    let new = Status {
        uplink_name: "eth0".into(),
        uplink_addresses: vec!["192.168.64.2".parse().unwrap(), "fd00::2".parse().unwrap()],
        ..status()
    };
    let mut json = serde_json::to_value(&new).unwrap();
    assert_eq!(json["uplink_addresses"], serde_json::json!(["192.168.64.2", "fd00::2"]));
    assert_eq!(json["public"], serde_json::json!(["192.168.64.2"]));
    assert_eq!(serde_json::from_value::<Status>(json.clone()).unwrap(), new);
    for field in ["uplink_name", "uplink_addresses"] {
        assert!(json.as_object_mut().unwrap().remove(field).is_some(), "{field}");
    }
    assert_eq!(serde_json::from_value::<Status>(json).unwrap(), status());
}

#[test]
fn subnets_and_addresses_of_a_peer_can_be_read_from_its_texts() {
    let subnets = Subnets::from_key("10.5.3.0-24&fd00:12:0:3::-64").unwrap();
    let attrs = Attrs {
        public_ip: Some([192, 0, 2, 3].into()),
        public_ipv6: Some("2001:db8::3".parse().unwrap()),
        ..Attrs::default()
    };
    let lease = Lease { id: "n3".into(), subnets, attrs, age: Age::default() };
    let peer = Peer::of(&lease, PeerState::Programmed, None);
    assert_eq!(peer.subnets().collect::<Vec<_>>(), subnets.iter().collect::<Vec<_>>());
    assert_eq!(peer.addresses().collect::<Vec<_>>(), lease.attrs.published().collect::<Vec<_>>());
    assert_eq!((peer.subnets().count(), peer.addresses().count()), (2, 2));
}

#[test]
fn what_is_unusual_has_a_line_of_its_own() {
    let rules = RuleStatus {
        filter: "nftables, table weft".into(),
        in_place: true,
        guard: Some("off: no list of leases yet".into()),
        fence: Some("drops packets for missing peers".into()),
        ..RuleStatus::default()
    };
    let unusual = Status {
        other_ways: vec!["host-gw".into()],
        lease_ttl_s: None,
        store_trouble: Some("connection refused".into()),
        held: 7,
        rules,
        ..status()
    };
    let text = render(&unusual, 5_000);
    for line in [
        "lease       10.5.1.0/24, does not expire",
        "network     10.5.0.0/16 by vxlan (still reached by host-gw, too), MTU 1450",
        "            connection refused",
        "held        7 removals wait, because many leases vanished at once",
        "rules       none wanted",
        "guard       off: no list of leases yet",
        "fence       drops packets for missing peers",
    ] {
        assert!(text.lines().any(|other| other == line), "{line} is missing in\n{text}");
    }
}
