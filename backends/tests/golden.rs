// SPDX-License-Identifier: Apache-2.0
//! The plan of each case in `golden/*.json` is compared with the expected one, which is the file `.plan` of the same name. `UPDATE_GOLDEN=1`
//! writes the expected plans again.

// Helpers outside test functions panic like the tests themselves.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use serde::Deserialize;
use serde_json::value::RawValue;
use weft_backends::backend::Backend;
use weft_backends::commands::Variable;
use weft_backends::diff::{Op, diff};
use weft_backends::host::{Host, OnLink, Reach, Uplink};
use weft_backends::identity::Identities;
use weft_backends::index::{Index, OWN};
use weft_backends::register::{make, make_for_lease};
use weft_backends::state::{Mac, Name, Observed};
use weft_backends::vxlan::VtepMac;
use weft_backends::wireguard_key::{KeyPair, Secret};
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::{Family, Subnets};
use weft_subnet::lease::{Age, Id, Lease};
use weft_subnet::net_conf::NetConf;

#[derive(Deserialize)]
struct Case {
    networks: Vec<IpNet>,
    backend: Box<RawValue>,
    host: HostIn,
    own: String,
    peers: Vec<(String, Box<RawValue>)>,
}

#[derive(Deserialize)]
struct HostIn {
    mtu: u32,
    v4: Option<std::net::Ipv4Addr>,
    v6: Option<std::net::Ipv6Addr>,
    public_v4: Option<std::net::Ipv4Addr>,
    routes: Vec<(IpNet, Option<String>)>,
}

fn networks(nets: &[IpNet]) -> Subnets {
    let mut subnets = Subnets::default();
    for net in nets {
        match net {
            IpNet::V4(v4) => subnets.v4 = Some(*v4),
            IpNet::V6(v6) => subnets.v6 = Some(*v6),
        }
    }
    subnets
}

fn net_conf(case: &Case) -> NetConf {
    let head: serde_json::Value = serde_json::from_str(case.backend.get()).unwrap();
    NetConf {
        networks: networks(&case.networks),
        v4: None,
        v6: None,
        nftables: None,
        masquerade: Default::default(),
        backend_type: head["Type"].as_str().unwrap().to_lowercase(),
        backend: case.backend.get().into(),
        unknown: Vec::new(),
    }
}

fn identities(kind: &str) -> Identities {
    match kind {
        "wireguard" => KeyPair::of(Secret::new([1; 32])).both(),
        _ => VtepMac::both(Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 6, 1])),
    }
}

fn host(case: &Case) -> Host {
    let reach =
        |dev: &Option<String>| dev.as_deref().map_or(Reach::Gateway, |dev| Reach::Link(Name::new(dev).unwrap()));
    let HostIn { mtu, v4, v6, public_v4, ref routes } = case.host;
    Host {
        public_v4: public_v4.or(v4),
        public_v6: v6,
        identities: identities(&net_conf(case).backend_type),
        routes: OnLink::new(routes.iter().map(|(net, dev)| (*net, 0, reach(dev)))),
        ..Host::new(Uplink { name: Name::new("eth0").unwrap(), mtu, v4, v6 })
    }
}

fn lease(key: &str, value: &str, stamp: u64) -> Lease {
    Lease {
        id: key.into(),
        subnets: Subnets::from_key(key).unwrap(),
        attrs: Attrs::from_wire(value.as_bytes()).unwrap(),
        age: Age { stamp, ..Age::default() },
    }
}

fn variables(all: Vec<Variable>) -> String {
    all.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

/// Returns what the agent itself runs for this backend, as text.
fn run_by_the_agent(backend: &dyn Backend, host: &Host, own: &Lease) -> String {
    let tunnel = backend.tunnel(host, own).map(|tunnel| format!("tunnel {tunnel}\n"));
    let commands = backend.commands().map(|_| format!("own {}\n", variables(backend.own_variables(own))));
    tunnel.into_iter().chain(commands).collect()
}

/// Returns the plan of one case as text.
fn render(case: &Case) -> String {
    let (net_conf, host) = (net_conf(case), host(case));
    let mut text = String::new();
    let own_backend = match make(&net_conf) {
        Ok(backend) => backend,
        Err(refused) => return format!("refused: {refused}\n"),
    };
    for net in &case.networks {
        let family = weft_subnet::cidr::family(net);
        let label = if family == Family::V4 { "IPv4" } else { "IPv6" };
        writeln!(text, "mtu {label} {}", own_backend.mtu(&host, family)).unwrap();
    }
    let wire = match own_backend.advertise(&host) {
        Ok(attrs) => attrs.to_wire(),
        Err(skip) => return format!("{text}refused: {skip}\n"),
    };
    writeln!(text, "advertise {wire}").unwrap();
    let own = lease(&case.own, &wire, 0);
    text.push_str(&run_by_the_agent(&*own_backend, &host, &own));
    let mut index = Index::default();
    index.set(&Id::from(OWN), &Age::default(), own_backend.device(&host, &own));
    let mut others: BTreeMap<String, Box<dyn Backend>> = BTreeMap::new();
    for (stamp, (key, value)) in (1..).zip(&case.peers) {
        let peer = lease(key, value.get(), stamp);
        let kind = peer.attrs.backend_type.clone();
        let backend = if own_backend.serves(&kind) {
            &own_backend
        } else if let Some(refused) = own_backend.refuses(&kind) {
            writeln!(text, "skip {key}: {refused}").unwrap();
            continue;
        } else {
            match make_for_lease(&kind, &net_conf) {
                Ok(backend) => others.entry(kind).or_insert(backend),
                Err(refused) => {
                    writeln!(text, "skip {key}: {refused}").unwrap();
                    continue;
                }
            }
        };
        let planned = backend.plan(&host, &own, &peer);
        for skip in &planned.skipped {
            writeln!(text, "skip {key}: {skip}").unwrap();
        }
        if let Some(peer) = backend.tunnel_peer(&host, &peer) {
            writeln!(text, "peer {peer}").unwrap();
        }
        if let Some(peer) = backend.command_peer(&peer) {
            writeln!(text, "peer {}, data {:?}", variables(peer.variables()), peer.data).unwrap();
        }
        assert_eq!(backend.plan(&host, &own, &peer), planned, "a plan depends on its input alone");
        index.set(&peer.id, &peer.age, planned.state);
    }
    for op in diff(&index.state(), &Observed::new(), |_, _| true) {
        assert!(matches!(op, Op::Ensure(..)));
        writeln!(text, "{op}").unwrap();
    }
    text
}

/// Returns how the plan of this case differs from the expected one.
fn difference(path: &Path) -> Option<String> {
    let name = path.display();
    let case: Case = serde_json::from_str(&read(path)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let (plan, got) = (path.with_extension("plan"), render(&case));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&plan, &got).unwrap();
    }
    let want = read(&plan);
    (want != got).then(|| format!("{name}: the plan differs\n--- expected\n{want}--- got\n{got}"))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn golden() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut cases: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    cases.retain(|path| path.extension().is_some_and(|e| e == "json"));
    cases.sort();
    assert!(cases.len() >= 12, "only {} cases", cases.len());
    let wrong: Vec<String> = cases.iter().filter_map(|path| difference(path)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
