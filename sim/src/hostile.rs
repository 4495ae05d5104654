// SPDX-License-Identifier: Apache-2.0
//! Writers with the rights of one node who attack the cluster. In etcd they write any key below the leases. In Kubernetes they write the
//! annotations of their own Node, whose pod CIDR the cluster assigns.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};
use weft_subnet::cidr::Subnets;

use crate::chance::Chance;

/// How many leases a writer writes each second in a flood.
const FLOOD: u64 = 40;
/// The subnet that a writer has by right.
const OWN: &str = "10.62.200.0-24";

/// What a writer does. docs/security.md says that none of it changes anything between other nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Attack {
    /// An enormous value.
    Huge,
    /// Another VNI, MAC and address, forty times a second.
    Flood,
    /// The address of another node.
    PeerAddress,
    /// In etcd, the host route of another node's address. In Kubernetes, that address as source of its tunnel packets.
    PeerRoute,
    /// The subnet of another node, in etcd also a larger and smaller ones. In Kubernetes nobody can write this.
    PeerSubnet,
    /// Addresses that no node can have. The number chooses one.
    Address(u8),
    /// Another type of backend, or a text that is none.
    Type(u8),
    /// BackendData of vxlan that are wrong.
    Data(u8),
    /// Many leases, each with a VNI of its own.
    ManyVnis,
    /// A value that is not JSON. The number chooses one.
    NotJson(u8),
    /// Keys that name no subnet.
    Keys,
    /// Other ways that are wrong, or lead to another node.
    OtherWays(u8),
}

/// The node against which an attack is directed.
#[derive(Debug, Clone)]
pub struct Victim {
    /// Its address.
    pub ip: Ipv4Addr,
    /// The subnets of its pods.
    pub pods: Option<Subnets>,
    /// Its BackendData.
    pub data: Option<String>,
    /// The LAN.
    pub lan: Ipv4Net,
    /// True if the writer may use the identity of the victim: docs/security.md says that this cuts off the victim where the newest lease has
    /// an identity, as in etcd.
    pub copies_identity: bool,
}

/// A member of a lease.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its name in etcd.
    pub name: &'static str,
    /// The annotation of the same meaning.
    pub annotation: &'static str,
    /// Its value.
    pub json: String,
}

/// A lease that a writer writes.
#[derive(Debug, Clone)]
pub struct Lie {
    /// The end of the key in etcd.
    pub key: String,
    /// PublicIP.
    pub public: String,
    /// BackendType.
    pub kind: String,
    /// BackendData.
    pub data: String,
    /// Other members.
    pub more: Vec<Member>,
    /// The whole value, in place of the members above.
    pub raw: Option<Vec<u8>>,
}

impl Lie {
    /// Returns the value in etcd.
    pub fn value(&self) -> Vec<u8> {
        let Lie { public, kind, data, more, raw, .. } = self;
        let more: String = more.iter().map(|Member { name, json, .. }| format!(r#","{name}":{json}"#)).collect();
        let kind = serde_json::Value::from(kind.as_str());
        let text = || format!(r#"{{"PublicIP":"{public}","BackendType":{kind},"BackendData":{data}{more}}}"#);
        raw.clone().unwrap_or_else(|| text().into_bytes())
    }

    /// Returns the annotations of the Node, without their prefix.
    pub fn annotations(&self) -> Vec<(&'static str, String)> {
        let Lie { public, kind, data, more, raw, .. } = self;
        let mut all = vec![
            ("kube-subnet-manager", "true".to_owned()),
            ("public-ip", public.clone()),
            ("backend-type", kind.clone()),
            ("backend-data", data.clone()),
        ];
        // Annotations are text, also where a member of the value in etcd is a JSON string.
        let plain = |json: &str| serde_json::from_str::<String>(json).unwrap_or_else(|_| json.to_owned());
        all.extend(more.iter().map(|member| (member.annotation, plain(&member.json))));
        if let Some(raw) = raw {
            let raw = String::from_utf8_lossy(raw);
            all.iter_mut().for_each(|(_, text)| *text = raw.to_string());
        }
        all
    }
}

fn vxlan_data(vni: impl std::fmt::Display, last: u64) -> String {
    format!(r#"{{"VNI":{vni},"VtepMAC":"0e:66:00:00:01:{:02x}"}}"#, last % 256)
}

/// Returns what a writer writes in this second of its attack. Most attacks are one write.
pub fn lies(attack: Attack, second: u64, victim: &Victim) -> Vec<Lie> {
    let lan = victim.lan.network().to_bits();
    let honest = Lie {
        key: OWN.to_owned(),
        public: Ipv4Addr::from_bits(lan + 253).to_string(),
        kind: "vxlan".to_owned(),
        data: vxlan_data(1, 0),
        more: Vec::new(),
        raw: None,
    };
    if attack == Attack::Flood {
        let lie = |number: u64| Lie {
            public: Ipv4Addr::from_bits(lan + 250 + u32::try_from(number % 4).unwrap_or(0)).to_string(),
            data: vxlan_data(20 + number % 30, number),
            ..honest.clone()
        };
        return (second * FLOOD..(second + 1) * FLOOD).map(lie).collect();
    }
    if second > 0 {
        return Vec::new();
    }
    single(attack, victim, honest)
}

/// Returns the writes of an attack that is no flood.
fn single(attack: Attack, victim: &Victim, honest: Lie) -> Vec<Lie> {
    let with = |key: String| Lie { key, ..honest.clone() };
    match attack {
        Attack::Flood => Vec::new(),
        Attack::Huge => {
            let data = format!(r#"{{"VNI":1,"VtepMAC":"0e:66:00:00:01:00","x":"{}"}}"#, "x".repeat(200_000));
            vec![Lie { data, ..honest }]
        }
        Attack::PeerAddress => vec![Lie { public: victim.ip.to_string(), ..honest }],
        Attack::PeerRoute => {
            let json = format!("\"{}\"", victim.ip);
            let more = vec![Member { name: "TunnelIP", annotation: "tunnel-ip", json }];
            vec![
                with(format!("{}-32", victim.ip)),
                with(format!("{}-24", victim.lan.network())),
                Lie { more, ..honest },
            ]
        }
        Attack::PeerSubnet => subnets(victim).into_iter().map(with).collect(),
        Attack::Address(number) => {
            let mut all = addresses(victim);
            vec![Lie { public: all.swap_remove(usize::from(number) % all.len()), ..honest }]
        }
        Attack::Type(number) => {
            let long = "x".repeat(3000);
            let all = ["host-gw", "ipip", "wireguard", "udp", "extension", "alloc", "warp\u{1b}[31m\n", "", &long];
            vec![Lie { kind: all[usize::from(number) % all.len()].to_owned(), ..honest }]
        }
        Attack::Data(number) => vec![Lie { data: data(number), ..honest }],
        Attack::ManyVnis => {
            let lie = |number: u64| Lie {
                key: format!("10.62.{}.0-24", 100 + number),
                data: vxlan_data(100 + number, number),
                ..honest.clone()
            };
            (0..40).map(lie).collect()
        }
        Attack::NotJson(number) => {
            let deep = "[".repeat(4000);
            let all: [&[u8]; 6] = [b"", b"\xff\xfe\x00", b"null", b"[]", deep.as_bytes(), b"{\"PublicIP\":{}}"];
            vec![Lie { raw: Some(all[usize::from(number) % all.len()].to_vec()), ..honest }]
        }
        Attack::Keys => {
            let long = "a".repeat(300);
            let all = [
                "",
                "..",
                "10.62.201.0-33",
                "10.62.202.0-24\u{1b}[2J",
                "0.0.0.0-0",
                "10.0.0.0-8",
                "999.1.1.1-24",
                &long,
            ];
            all.into_iter().map(|key| with(key.to_owned())).collect()
        }
        Attack::OtherWays(number) => {
            let json = other_ways(number, victim);
            vec![Lie { more: vec![Member { name: "OtherWays", annotation: "other-ways", json }], ..honest }]
        }
    }
}

/// Returns addresses that no node can have.
fn addresses(victim: &Victim) -> Vec<String> {
    let pod = victim.pods.and_then(|pods| pods.v4).map_or(Ipv4Addr::UNSPECIFIED, |pods| pods.network());
    let of_lan = [victim.lan.network(), victim.lan.broadcast()].map(|ip| ip.to_string());
    let [base, broadcast] = of_lan;
    let fixed = ["0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "", "::1", "10.62.200.1"];
    let mut all: Vec<String> = fixed.iter().map(|text| (*text).to_owned()).collect();
    all.extend([base, broadcast, pod.to_string(), "x".repeat(3000)]);
    all
}

/// Returns a larger and two smaller subnets than that of the victim.
fn subnets(victim: &Victim) -> Vec<String> {
    let Some(pods) = victim.pods.and_then(|pods| pods.v4) else { return Vec::new() };
    let wide = Ipv4Net::new_assert(pods.network(), 16).trunc();
    let upper = Ipv4Addr::from_bits(pods.network().to_bits() + 128);
    let pod = Ipv4Addr::from_bits(pods.network().to_bits() + 5);
    vec![format!("{}-16", wide.network()), format!("{upper}-25"), format!("{pod}-32")]
}

fn data(number: u8) -> String {
    let mac = |mac: &str| format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#);
    let all = [
        vxlan_data(-1, 1),
        vxlan_data(16_777_216, 2),
        vxlan_data("1e9", 3),
        vxlan_data("\"1\"", 4),
        vxlan_data(0, 5),
        mac("ff:ff:ff:ff:ff:ff"),
        mac("00:00:00:00:00:00"),
        mac("01:00:5e:00:00:01"),
        mac("nonsense"),
        "null".to_owned(),
        "[]".to_owned(),
        "7".to_owned(),
    ];
    all[usize::from(number) % all.len()].clone()
}

fn other_ways(number: u8, victim: &Victim) -> String {
    let stolen = victim.data.clone().filter(|_| victim.copies_identity).unwrap_or_else(|| vxlan_data(1, 9));
    let way = |kind: &str, data: &str| format!(r#"{{"BackendType":"{kind}","BackendData":{data}}}"#);
    let all = [
        format!("[{}]", way("vxlan", &stolen)),
        format!("[{},{}]", way("ipip", "null"), way("host-gw", "null")),
        format!("[{}]", vec![way("vxlan", &vxlan_data(1, 9)); 30].join(",")),
        "{}".to_owned(),
        "[[[[]]]]".to_owned(),
        format!("[{}]", way("wireguard", r#"{"PublicKey":"x"}"#)),
    ];
    all[usize::from(number) % all.len()].clone()
}

/// Returns a random attack.
pub fn random(chance: &mut Chance) -> Attack {
    let number = u8::try_from(chance.below(64)).unwrap_or(0);
    match chance.below(12) {
        0 => Attack::Huge,
        1 => Attack::Flood,
        2 => Attack::PeerAddress,
        3 => Attack::PeerRoute,
        4 => Attack::PeerSubnet,
        5 => Attack::Address(number),
        6 => Attack::Type(number),
        7 => Attack::Data(number),
        8 => Attack::ManyVnis,
        9 => Attack::NotJson(number),
        10 => Attack::Keys,
        _ => Attack::OtherWays(number),
    }
}
