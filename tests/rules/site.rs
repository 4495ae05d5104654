// SPDX-License-Identifier: Apache-2.0
//! A cluster of two nodes with two pods each, and a host outside the cluster on the network of the nodes.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use weft_lab::netns::{Netns, checked};
use weft_lab::store::Store;
use weft_lab::{BackendKind, Lab, LabOptions, StoreKind, wait_for};

use crate::exe::weft_exe;
use crate::packets::{Seen, any, exchange, socket};
pub use crate::patience::PATIENCE;
use crate::thread;

/// The port on which the receivers listen.
pub const PORT: u16 = 7000;

/// Runs a test on this thread, to which the namespaces of the lab belong.
pub fn on_this_thread(test: impl Future<Output = ()>) {
    thread::on_this_thread(async {
        test.await;
        Ok(())
    });
}

/// An address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const BOTH: [Family; 2] = [Family::V4, Family::V6];

    fn index(self) -> usize {
        usize::from(self == Family::V6)
    }

    /// Returns the name of the family in nft.
    pub fn nft(self) -> &'static str {
        if self == Family::V4 { "ip" } else { "ip6" }
    }
}

/// The cluster and the host outside it.
pub struct Site {
    pub lab: Lab,
    pub backend: BackendKind,
    out: Netns,
}

impl Site {
    /// Builds a lab of weft. Its agents do not run yet.
    pub async fn build(backend: BackendKind, flags: &[&str]) -> Site {
        Site::with(LabOptions { backend, ..options(flags) }).await
    }

    /// Builds a lab with the store that flanneld needs.
    pub async fn for_flanneld(backend: BackendKind, flags: &[&str]) -> Site {
        Site::with(LabOptions { backend, store: StoreKind::Etcd, ..options(flags) }).await
    }

    /// Builds a lab with these options, and a host outside.
    pub async fn with(options: LabOptions) -> Site {
        let lab = Lab::build(&options).await.unwrap();
        let out = lab.add_host("out", 200).await.unwrap();
        Site { lab, backend: options.backend, out }
    }

    /// Starts weft on every node, and adds the pods.
    pub async fn start(&mut self) {
        for node in &mut self.lab.nodes {
            node.start().unwrap();
        }
        for node in &mut self.lab.nodes {
            node.ready().await.unwrap();
        }
        self.add_pods().await;
        self.all_reach_all();
    }

    /// Starts another program on every node, and adds the pods.
    pub async fn start_other(&mut self, program: &std::path::Path) {
        for node in &mut self.lab.nodes {
            node.start_other(program).unwrap();
        }
        self.add_pods().await;
        self.lab.reach_all().await.unwrap();
        // The kernel checks that nobody else has the IPv6 address of flanneld's device, and does not use it as a source before.
        for node in &self.lab.nodes {
            let settled = async || node.ns.ip("-6 addr show tentative").await.is_ok_and(|text| text.is_empty());
            wait_for("IPv6 addresses to be usable", PATIENCE, settled).await.unwrap();
        }
    }

    /// Waits until pods and nodes reach all pods. On a new IPv6 link, neighbours answer only after a second.
    pub fn all_reach_all(&self) {
        let deadline = Instant::now() + PATIENCE;
        for family in Family::BOTH {
            let mut places = self.places(family);
            places.retain(|(name, _)| namespace(name) == name && name != "out" && name != "fabric");
            let pods = places.iter().filter(|(name, _)| name.contains("-p"));
            for ((from, _), (to, addr)) in pods.flat_map(|to| places.iter().map(move |from| (from, to))) {
                let server = socket(to, *addr, PORT);
                let client = socket(from, any(*addr), 0);
                while !matches!(exchange(&client, SocketAddr::new(*addr, PORT), &server), Seen::From(_)) {
                    assert!(Instant::now() < deadline, "{from} does not reach {addr} of {to}\n{}", self.lab.logs(20));
                }
            }
        }
    }

    async fn add_pods(&mut self) {
        for node in &mut self.lab.nodes {
            node.add_pods(2).await.unwrap();
        }
    }

    /// Returns all places with their addresses: `n1`, `n1-tunnel`, `n1-bridge`, `n1-p1`, `out`, `fabric`.
    pub fn places(&self, family: Family) -> Vec<(String, IpAddr)> {
        let mut all = Vec::new();
        for node in &self.lab.nodes {
            all.push((node.name().to_owned(), node.uplink[family.index()]));
            for pod in &node.pods {
                all.push((pod.ns.name().to_owned(), pod.addrs[family.index()]));
            }
            let first = node.pods[0].addrs[family.index()];
            all.push((format!("{}-bridge", node.name()), before(first, 0)));
            all.push((format!("{}-tunnel", node.name()), before(first, 1)));
        }
        for (place, addrs) in [("out", ["192.168.77.200", "fd77::200"]), ("fabric", ["192.168.77.1", "fd77::1"])] {
            all.push((place.to_owned(), addrs[family.index()].parse().unwrap()));
        }
        all
    }

    /// Returns the address of a place.
    pub fn addr(&self, place: &str, family: Family) -> IpAddr {
        let places = self.places(family);
        places.iter().find(|(name, _)| name == place).unwrap_or_else(|| panic!("no place {place}")).1
    }

    /// Returns the place with this address.
    pub fn name(&self, addr: IpAddr, family: Family) -> String {
        let places = self.places(family);
        places.iter().find(|(_, one)| *one == addr).map_or_else(|| addr.to_string(), |(name, _)| name.clone())
    }

    /// Sends a datagram and its answer. Returns the source that the receiver sees, or what was lost: `n1-p1`, `n1-p1, no answer`,
    /// `lost`.
    pub fn probe(&self, trip: &Trip, family: Family) -> String {
        let (from, to) = (trip.from.split('@').next().unwrap(), trip.via.unwrap_or(trip.to));
        let to = SocketAddr::new(self.addr(to, family), trip.port);
        let server = socket(namespace(trip.to), self.addr(trip.to, family), PORT);
        let bound = trip.from.split_once('@').map_or_else(|| any(to.ip()), |(_, place)| self.addr(place, family));
        let client = socket(namespace(from), bound, 0);
        match exchange(&client, to, &server) {
            Seen::From(addr) => self.name(addr, family),
            Seen::Unanswered(addr) => format!("{}, no answer", self.name(addr, family)),
            Seen::Lost => "lost".to_owned(),
        }
    }

    /// Waits until the receiver sees the expected source.
    pub fn until_seen(&self, trip: &Trip, family: Family, expected: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let seen = self.probe(trip, family);
            if seen == expected {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{family:?}, {trip:?}: sees {seen}, not {expected}\n{}",
                self.lab.logs(20)
            );
        }
    }

    /// Adds members to net-conf. Agents that are started later read them.
    pub fn configure(&self, more: &serde_json::Value) {
        let Store::Dir(path) = &self.lab.store else { panic!("not a directory store") };
        let file = path.join("config.json");
        let mut conf: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        for (key, value) in more.as_object().unwrap() {
            conf[key] = value.clone();
        }
        std::fs::write(file, conf.to_string()).unwrap();
    }

    /// Runs a shell script in every node.
    pub async fn on_nodes(&self, script: &str) {
        for node in &self.lab.nodes {
            self.run(node.name(), &["sh", "-ec", script]).await;
        }
    }

    /// Adds the chain of kubelet that shows which flavour of iptables the nodes use.
    pub async fn hint(&self, flavour: &str) {
        self.on_nodes(&format!("iptables-{flavour} -w 20 -t mangle -N KUBE-IPTABLES-HINT")).await;
    }

    /// Runs `nft` in a namespace.
    pub async fn nft(&self, ns: &str, text: &str) -> String {
        self.run(ns, &["nft", text]).await
    }

    /// Runs a program in a namespace, and returns its standard output.
    pub async fn run(&self, ns: &str, words: &[&str]) -> String {
        let netns = self.netns(ns);
        checked(netns.command(words[0]).args(&words[1..])).await.unwrap()
    }

    fn netns(&self, name: &str) -> Netns {
        let nodes = self.lab.nodes.iter().map(|node| &node.ns);
        let pods = self.lab.nodes.iter().flat_map(|node| node.pods.iter().map(|pod| &pod.ns));
        let mut all = nodes.chain(pods).chain([&self.lab.fabric, &self.out]);
        all.find(|ns| ns.name() == name).unwrap_or_else(|| panic!("no namespace {name}")).clone()
    }
}

/// Returns options with the binary under test and both families.
pub fn options(flags: &[&str]) -> LabOptions {
    let agent_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    LabOptions { exe: Some(weft_exe()), nodes: 2, ipv6: true, agent_flags, ..LabOptions::default() }
}

/// The way of a datagram.
#[derive(Debug, Clone, Copy)]
pub struct Trip {
    /// The sender. In `n1@n1-bridge` it uses the address of another place.
    pub from: &'static str,
    /// The receiver.
    pub to: &'static str,
    /// The place to whose address the datagram is sent, if it is not that of the receiver.
    pub via: Option<&'static str>,
    /// The port to which it is sent.
    pub port: u16,
}

/// Returns the way of a datagram that is sent to the address of its receiver.
pub fn straight(from: &'static str, to: &'static str) -> Trip {
    Trip { from, to, via: None, port: PORT }
}

/// Returns the namespace of a place.
fn namespace(place: &str) -> &str {
    place.strip_suffix("-bridge").or_else(|| place.strip_suffix("-tunnel")).unwrap_or(place)
}

/// Returns the address of the gateway (0) or of the subnet itself (1). `first_pod` is the address of the first pod.
fn before(first_pod: IpAddr, further: u8) -> IpAddr {
    let less = 1 + further;
    match first_pod {
        IpAddr::V4(v4) => IpAddr::V4((u32::from(v4) - u32::from(less)).into()),
        IpAddr::V6(v6) => IpAddr::V6((u128::from(v6) - u128::from(less)).into()),
    }
}
