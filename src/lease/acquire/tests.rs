// SPDX-License-Identifier: Apache-2.0
//! Which uplink a start chooses after an earlier run, with a store that answers and with one that is away.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::LocalSet;
use weft_backends::diff::Op;
use weft_backends::host::Reach;
use weft_backends::identity::Secrets;
use weft_backends::link::Link;
use weft_backends::state::{Key, Mac, Name, Value};
use weft_backends::wireguard::WireGuardLink;
use weft_backends::wireguard_key::{KeyPair, Secret};
use weft_subnet::connected::Connected;
use weft_subnet::lease::Record;
use weft_subnet::saved_peers::{self, Expiry, Head, Uplink};
use weft_subnet::source::{Capabilities, Error, Event, FaultNotice, Local};

use super::*;
use crate::kernel::fake::FakeKernel;
use crate::kernel::{AddrInfo, Creator, LinkInfo, RouteInfo};
use crate::log::tests::{Output, text_of};
use crate::observe::fault_events::EventReporter;
use crate::observe::node_condition::ConditionReporter;
use crate::observe::readiness::Readiness;
use crate::observe::systemd::Notify;
use crate::saved::SavedFile;

const CONFIG: &str = r#"{"Network":"10.5.0.0/16","Backend":{"Type":"ipip"}}"#;
const STORE: &str = "memory";

/// A store in memory.
#[derive(Default)]
pub(super) struct Memories {
    /// net-conf, if it is not [`CONFIG`].
    pub(super) config: Option<String>,
    /// `None` if the store is away.
    pub(super) leases: Option<RefCell<Vec<Lease>>>,
    /// See [`Source::notices_after`].
    pub(super) notices_after: Option<Duration>,
    pub(super) notices: RefCell<Vec<FaultNotice>>,
    /// The networks of the host, as the last call of `acquire` named them.
    pub(super) connected: Rc<RefCell<Connected>>,
}

impl Memories {
    fn leases(&self) -> Result<&RefCell<Vec<Lease>>, Error> {
        let away = || Error::Unavailable { what: "read".into(), source: Some("connection refused".into()) };
        self.leases.as_ref().ok_or_else(away)
    }
}

impl Source for Memories {
    fn describe(&self) -> String {
        STORE.into()
    }
    fn fingerprint(&self) -> Local<'_, Option<String>> {
        Box::pin(async { Some(STORE.into()) })
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { expires: false, assigned: false }
    }
    fn config(&self) -> Local<'_, Result<String, Error>> {
        Box::pin(async { self.leases().map(|_| self.config.clone().unwrap_or(CONFIG.to_owned())) })
    }
    fn own<'a>(&'a self, evidence: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>> {
        Box::pin(async { Ok(evidence.ours(self.leases()?.borrow().iter()).first().map(|lease| (*lease).clone())) })
    }
    fn acquire<'a>(&'a self, request: &'a LeaseRequest) -> Local<'a, Result<Lease, Error>> {
        Box::pin(async {
            let leases = self.leases()?;
            self.connected.borrow_mut().clone_from(&request.connected);
            // What was not found to be ours belongs to another node.
            let is_free = |subnets: &Subnets| {
                request.was.is_some() || leases.borrow().iter().all(|lease| lease.subnets != *subnets)
            };
            let subnets = request.previous.filter(is_free).unwrap_or(Subnets::from_key("10.5.99.0-24").unwrap());
            let lease = Lease { attrs: request.attrs.clone(), ..lease(subnets, "0.0.0.0") };
            leases.borrow_mut().push(lease.clone());
            Ok(lease)
        })
    }
    fn retake<'a>(&'a self, _: &'a Subnets, _: &'a Attrs, _: &'a Attrs) -> Local<'a, Result<Lease, Error>> {
        unreachable!("no part of a start")
    }
    fn release<'a>(&'a self, _: &'a Lease) -> Local<'a, Result<(), Error>> {
        unreachable!("no part of a start")
    }
    fn list(&self) -> Local<'_, Result<Vec<Record>, Error>> {
        unreachable!("no part of a start")
    }
    fn remove<'a>(&'a self, _: &'a str) -> Local<'a, Result<(), Error>> {
        unreachable!("no part of a start")
    }
    fn watch(&self, _: mpsc::Sender<Event>) -> Local<'_, ()> {
        unreachable!("no part of a start")
    }
    fn keep<'a>(&'a self, _: &'a Lease, _: mpsc::Sender<Event>) -> Local<'a, ()> {
        unreachable!("no part of a start")
    }
    fn notices_after(&self) -> Option<Duration> {
        self.notices_after
    }
    fn write_notice<'a>(&'a self, notice: &'a FaultNotice) -> Local<'a, Result<(), Error>> {
        self.notices.borrow_mut().push(notice.clone());
        Box::pin(async { Ok(()) })
    }
}

fn lease(subnets: Subnets, public: &str) -> Lease {
    let attrs = Attrs { public_ip: public.parse().ok(), backend_type: "ipip".into(), ..Attrs::default() };
    Lease { id: subnets.to_key().into(), subnets, attrs, age: Age::default() }
}

/// Returns a start with this net-conf, on this host and with this lease. The uplink is chosen without flags.
pub(crate) fn start_with(config: &str, host: Host, own: Lease) -> Started {
    let leased = Leased { host, own, was: None, uplink: UplinkChoice::default(), chosen: [None, None] };
    Started::new(ParsedConf::parse(config).unwrap(), Author::Weft, leased)
}

fn own() -> Subnets {
    Subnets::from_key("10.5.7.0-24").unwrap()
}

/// Returns a machine with eth0 192.168.0.1, the uplink so far, which has a default route, and with vpn0 10.8.0.2, which came later and has a
/// better one.
fn machine() -> Machine {
    let name = |text: &str| Name::new(text).unwrap();
    let link = |(index, text): (u32, &str)| LinkInfo {
        index,
        name: name(text),
        mtu: 1500,
        mac: None,
        up: true,
        carrier: true,
        loopback: false,
        creator: Creator::Unknown,
    };
    let addr = |index, net: &str| AddrInfo { index, net: net.parse().unwrap(), scope: 0, flags: 0x80 };
    let route = |net: &str, metric, dev, reach| RouteInfo {
        net: net.parse().unwrap(),
        metric,
        dev: Some(name(dev)),
        via: None,
        reach,
        protocol: 3,
    };
    Machine {
        links: [(2, "eth0"), (3, "vpn0")].map(link).to_vec(),
        addrs: vec![addr(2, "192.168.0.1/24"), addr(3, "10.8.0.2/24")],
        routes: vec![
            route("0.0.0.0/0", 100, "eth0", Reach::Gateway),
            route("0.0.0.0/0", 50, "vpn0", Reach::Gateway),
            route("192.168.0.0/24", 0, "eth0", Reach::Link(name("eth0"))),
        ],
        lookup: None,
    }
}

fn used(flags: &str) -> Option<Uplink> {
    Some(Uplink { name: "eth0".into(), v4: Some([192, 168, 0, 1].into()), v6: None, flags: flags.into() })
}

/// What an earlier run left on the disk, and how the agent is started now.
struct Case {
    choice: UplinkChoice,
    /// The uplink in the file of saved peers. The outer `None` means that there is no such file.
    saved: Option<Option<Uplink>>,
    /// True if the store answers.
    store: bool,
    /// The Network and the first address of the subnet in subnet.env, if that file exists.
    env: Option<[&'static str; 2]>,
    /// The published address of our lease, in the store and in the file.
    published: &'static str,
    /// The other ways to reach this node that our lease in the store names.
    others: Vec<Attrs>,
    /// The net-confs before the present one that the file of saved peers names.
    earlier: Vec<String>,
    /// `--guard-tunnel`.
    guard: bool,
    /// net-conf in the store, if it is not [`CONFIG`].
    config: Option<String>,
    /// The net-conf in the file of saved peers, if it is not [`CONFIG`].
    saved_config: Option<String>,
    /// The type of our lease and its data, in the store and in the file, if it is not one of ipip.
    content: Option<(&'static str, String)>,
    /// The type of our lease and its data in the store, if that is another one than in the file. It alone has the other ways then.
    accepted: Option<(&'static str, String)>,
    /// The earlier run still sent packets by the earlier backends.
    sends_earlier: bool,
    /// The port on which the device flannel-wg listens.
    listens: Option<u16>,
    /// The files with private keys of WireGuard: `flannel`, `kept` for the one in the state directory, and `next` for the one of a change.
    keys: Vec<(&'static str, String)>,
    /// Gets the networks of the host that the store was told.
    connected: Rc<RefCell<Connected>>,
    /// Number of records of our lease in the store: none if it has lost them.
    records: usize,
}

/// What subnet.env says after an earlier run.
const ENV: Option<[&str; 2]> = Some(["10.5.0.0/16", "10.5.7.1/24"]);

impl Default for Case {
    fn default() -> Case {
        let (choice, saved) = (UplinkChoice::default(), Some(used("")));
        let (others, earlier, keys) = (Vec::new(), Vec::new(), Vec::new());
        let (config, saved_config, content, accepted, listens) = Default::default();
        let (store, env, published, guard, sends_earlier) = (true, None, "192.168.0.1", false, false);
        let (connected, records) = (Rc::default(), 1);
        Case {
            choice,
            saved,
            store,
            env,
            published,
            others,
            earlier,
            guard,
            config,
            saved_config,
            content,
            accepted,
            sends_earlier,
            listens,
            keys,
            connected,
            records,
        }
    }
}

fn write_env(subnet_file: &Path, [network, subnet]: [&str; 2]) {
    let text = format!("FLANNEL_NETWORK={network}\nFLANNEL_SUBNET={subnet}\nFLANNEL_MTU=1500\nFLANNEL_IPMASQ=false\n");
    std::fs::write(subnet_file, text).unwrap();
}

/// Writes the keys of a case. Returns the places of secrets, and what is in which file.
fn write_keys(
    keys: Vec<(&'static str, String)>,
    dir: &Path,
    subnet_file: &Path,
) -> (SecretFiles, Vec<(PathBuf, String)>) {
    let state = dir.join("state");
    std::fs::create_dir_all(&state).unwrap();
    let secrets = SecretFiles::new(Some(&state)).with_wireguard_keys(&dir.join("wgkey"), subnet_file);
    let file = |name: &str| match (name, secrets.wireguard_key_files().as_slice()) {
        ("flannel", [flannel, _]) => flannel.clone(),
        ("kept", [_, kept]) => kept.clone(),
        (_, [_, kept]) => kept.with_added_extension(name),
        (_, files) => panic!("{files:?}"),
    };
    let keys: Vec<_> = keys.into_iter().map(|(name, key)| (file(name), key)).collect();
    keys.iter().for_each(|(file, key)| std::fs::write(file, key).unwrap());
    (secrets, keys)
}

/// Returns the kernel of this machine. Its device flannel-wg listens on this port, if there is one.
fn kernel_of(machine: Machine, listens: Option<u16>) -> FakeKernel {
    let mut kernel = FakeKernel::new(machine, 90);
    if let Some(port) = listens {
        let link = Link { kind: Arc::new(WireGuardLink { public: None, port }), mtu: 1420, mac: None, up: true };
        kernel.apply(&[Op::Ensure(Key::Link(Name::new("flannel-wg").unwrap()), Value::link(link))]);
    }
    kernel
}

/// Gives a lease this type and this data, if there are any.
fn set_content(lease: &mut Lease, content: Option<(&'static str, String)>) {
    if let Some((kind, data)) = content {
        (lease.attrs.backend_type, lease.attrs.backend_data) = (kind.into(), Some(data.into()));
    }
}

/// Describes what a start found. The key is shown if `with_key`.
fn shown(started: &Started, with_key: bool) -> String {
    let (host, own) = (&started.host, &started.own);
    let others = own.attrs.other_ways().into_iter().map(|way| format!(", also by {}", way.backend_type));
    let others = others.chain(own.attrs.tunnel_ip.map(|ip| format!(", sends from {ip}")));
    let earlier = started.earlier.iter().map(|extra| format!(", earlier {}", extra.kind()));
    let wanted = started.wanted.iter().map(|text| format!(", then {}", NetConf::parse(text).unwrap().backend_type));
    let [key, _] = host.identities.public();
    let key = key.filter(|_| with_key).map(|key| format!(", key {key}"));
    let [named, _] = (TYPES.ports)(&own.attrs);
    let ports = host.kept_ports.iter().map(|(name, port)| format!(", {name} has {port} and the lease {named:?}"));
    let others: String = others.chain(earlier).chain(wanted).chain(key).chain(ports).collect();
    format!("{} {} {}{others}", host.uplink.name, host.public_v4.unwrap(), own.subnets)
}

/// Returns the uplink of a start, its published address, and the subnet. `None` if the start waits for the store.
async fn starts(case: Case, machine: Machine) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    let subnet_file = dir.path().join("subnet.env");
    if let Some(env) = case.env {
        write_env(&subnet_file, env);
    }
    let saved_file = SavedFile::new(Some(dir.path()), &subnet_file, Some(STORE.into())).unwrap();
    let mut mine = lease(own(), case.published);
    set_content(&mut mine, case.content);
    let in_file = case.accepted.is_some().then(|| mine.clone());
    set_content(&mut mine, case.accepted);
    let is_changing = case.keys.iter().any(|(name, _)| *name == "next");
    let (secrets, keys) = write_keys(case.keys, dir.path(), &subnet_file);
    if !case.others.is_empty() {
        mine.attrs = mine.attrs.with_other_ways(&case.others);
        mine.attrs.tunnel_ip = case.others.iter().find_map(|way| way.tunnel_ip);
    }
    if let Some(uplink) = case.saved {
        let saved = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
        let (public, chosen) = (evidence::public(&mine.attrs), [None, None]);
        let own = in_file.unwrap_or_else(|| mine.clone());
        let (store, config) = (STORE.into(), case.saved_config.unwrap_or(CONFIG.into()));
        let (expires, earlier, sends_earlier, clear_text) = (Expiry::Never, case.earlier, case.sends_earlier, None);
        let head =
            Head { store, saved, expires, config, own, public, chosen, uplink, earlier, sends_earlier, clear_text };
        saved_peers::write(std::fs::File::create(saved_file.file()).unwrap(), &head, []).unwrap();
    }
    let leases = case.store.then(|| RefCell::new(vec![mine; case.records]));
    let (config, connected) = (case.config, case.connected);
    let store: Rc<dyn Source> = Rc::new(Memories { leases, config, connected, ..Memories::default() });
    let mut kernel = kernel_of(machine, case.listens);
    let place = StartContext {
        store: &*store,
        kernel: &mut kernel,
        choice: &case.choice,
        subnet_file: &subnet_file,
        guard: case.guard,
        memory: EarlierRun::new(Some(saved_file)),
        secrets,
        first_command: FirstCommand::default(),
    };
    let (mut notify, readiness) = (Notify::default(), Readiness::new());
    let reports = (&ConditionReporter::new(store.clone(), Duration::from_secs(60)), &EventReporter::new(store.clone()));
    let start = start(place, Waiting::new(&mut notify, readiness.clone(), reports));
    // A start that waits reports that first.
    let waits = async {
        while !readiness.reasons().iter().any(|reason| reason.starts_with("waiting: ")) {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        biased;
        started = start => {
            for (file, key) in &keys {
                assert_eq!(std::fs::read_to_string(file).ok().as_ref(), Some(key), "{}", file.display());
            }
            Some(shown(&started, is_changing))
        }
        () = waits => None,
    }
}

pub(super) async fn local(test: impl Future<Output = ()>) {
    LocalSet::new().run_until(test).await;
}

/// Pods in a network that the host itself is connected to would never be reached from this host.
#[tokio::test]
async fn the_store_is_told_the_networks_of_the_host_that_no_subnet_may_overlap() {
    local(async {
        let mut with = machine();
        with.links.push(LinkInfo { index: 4, name: Name::new("eth1").unwrap(), ..with.links[0].clone() });
        with.addrs.push(AddrInfo { index: 4, net: "10.5.8.9/24".parse().unwrap(), ..with.addrs[0].clone() });
        let connected: Rc<RefCell<Connected>> = Rc::default();
        let case = Case { connected: connected.clone(), ..Case::default() };
        assert_eq!(starts(case, with).await.as_deref(), Some(KEPT));
        let overlapping = |net: &str| connected.borrow().overlapping(net.parse().unwrap()).is_some();
        assert!(overlapping("10.5.8.0/24") && !overlapping("10.5.7.0/24"), "{connected:?}");
    })
    .await;
}

const KEPT: &str = "eth0 192.168.0.1 10.5.7.0/24";

#[tokio::test]
async fn a_vpn_that_came_meanwhile_does_not_take_the_uplink() {
    local(async {
        let rows = [
            // An older weft did not save the name of the uplink, so the address decides.
            (true, Some(used(""))),
            (true, Some(None)),
            (false, Some(used(""))),
            (false, Some(None)),
        ];
        for (store, saved) in rows {
            let what = format!("store {store}, saved {saved:?}");
            assert_eq!(
                starts(Case { store, saved, ..Case::default() }, machine()).await.as_deref(),
                Some(KEPT),
                "{what}"
            );
        }
        // Nothing was saved, because a directory needs no such file. So subnet.env and the lease decide.
        let without = || Case { saved: None, env: ENV, ..Case::default() };
        assert_eq!(starts(without(), machine()).await.as_deref(), Some(KEPT));
        // A node that knows nothing of an earlier run chooses by the default route.
        let new = starts(Case { env: None, ..without() }, machine()).await;
        assert_eq!(new.as_deref(), Some("vpn0 10.8.0.2 10.5.99.0/24"));
        // The same is true if subnet.env is about another cluster.
        let other = starts(Case { env: Some(["10.6.0.0/16", "10.6.7.1/24"]), ..without() }, machine()).await;
        assert_eq!(other.as_deref(), Some("vpn0 10.8.0.2 10.5.99.0/24"));
    })
    .await;
}

/// After a boot there is no subnet.env. With another subnet, the pods of this node would get other addresses.
#[tokio::test]
async fn a_node_whose_lease_is_gone_asks_for_the_subnet_that_an_earlier_run_saved() {
    local(async {
        let case = |saved| Case { saved, records: 0, ..Case::default() };
        assert_eq!(starts(case(Some(used(""))), machine()).await.as_deref(), Some(KEPT));
        let new = starts(case(None), machine()).await;
        assert_eq!(new.as_deref(), Some("vpn0 10.8.0.2 10.5.99.0/24"), "nothing is known of an earlier run");
    })
    .await;
}

#[tokio::test]
async fn with_an_address_to_reach_the_uplink_stays_as_long_as_the_flag_is_the_same() {
    local(async {
        let choice = UplinkChoice { can_reach: "192.0.2.9".parse().ok(), ..UplinkChoice::default() };
        for store in [true, false] {
            let case = |flags| Case { choice: choice.clone(), saved: Some(used(flags)), store, ..Case::default() };
            let same = starts(case("--iface-can-reach 192.0.2.9"), machine()).await;
            assert_eq!(same.as_deref(), Some(KEPT), "{store}");
            // Now the kernel's route decides. Without the store, nothing is known of a node with that address.
            let other = starts(case("--iface-can-reach 192.0.2.10"), machine()).await;
            assert_eq!(other.as_deref(), store.then_some("vpn0 10.8.0.2 10.5.99.0/24"), "{store}");
        }
    })
    .await;
}

#[tokio::test]
async fn flags_of_this_start_win_over_what_was_saved() {
    local(async {
        let vpn = || "vpn0".to_owned();
        let choices = [
            UplinkChoice { ifaces: vec![vpn()], ..UplinkChoice::default() },
            UplinkChoice { regexes: vec![format!("^{}$", vpn())], ..UplinkChoice::default() },
            UplinkChoice { public_ip: "10.8.0.2".parse().ok(), ..UplinkChoice::default() },
        ];
        for choice in choices {
            let got = starts(Case { choice: choice.clone(), ..Case::default() }, machine()).await.unwrap();
            assert!(got.starts_with("vpn0 10.8.0.2"), "{choice:?}: {got}");
        }
        // The flag was removed since then, so the default route decides.
        let got = starts(Case { saved: Some(used("--iface eth0")), ..Case::default() }, machine()).await.unwrap();
        assert!(got.starts_with("vpn0 10.8.0.2"), "{got}");
    })
    .await;
}

/// A flag sets the published address, as behind a NAT. The saved uplink still decides the interface.
#[tokio::test]
async fn behind_a_nat_the_saved_interface_counts() {
    local(async {
        for store in [true, false] {
            let choice = UplinkChoice { public_ip: "203.0.113.9".parse().ok(), ..UplinkChoice::default() };
            let got = starts(Case { choice, store, published: "203.0.113.9", ..Case::default() }, machine()).await;
            assert_eq!(got.as_deref(), Some("eth0 203.0.113.9 10.5.7.0/24"), "{store}");
        }
    })
    .await;
}

/// The published address stays although the interface has a better one, also before the store was asked.
#[tokio::test]
async fn the_saved_address_stays() {
    local(async {
        for store in [true, false] {
            let mut machine = machine();
            machine.addrs[0].flags = 0;
            let better = AddrInfo { net: "192.168.0.50/24".parse().unwrap(), flags: 0x80, ..machine.addrs[0].clone() };
            machine.addrs.insert(0, better);
            assert_eq!(starts(Case { store, ..Case::default() }, machine).await.as_deref(), Some(KEPT), "{store}");
        }
    })
    .await;
}

/// Peers that do not know the type of our lease yet reach this node the other ways. The start must not take these away from them.
#[tokio::test]
async fn the_other_ways_to_reach_this_node_stay_in_its_lease() {
    local(async {
        let others = vec![Attrs { backend_type: "host-gw".into(), ..lease(own(), "192.168.0.1").attrs }];
        let got = starts(Case { others, ..Case::default() }, machine()).await;
        assert_eq!(got, Some(format!("{KEPT}, also by host-gw")));
    })
    .await;
}

/// One of the other ways may be udp. Its peers drop our packets if the lease does not name the address from which they come.
#[tokio::test]
async fn the_address_of_our_packets_stays_in_the_lease_with_the_other_ways() {
    local(async {
        let tunnel_ip = Some([192, 168, 0, 9].into());
        let others = vec![Attrs { backend_type: String::new(), tunnel_ip, ..lease(own(), "192.168.0.1").attrs }];
        let got = starts(Case { others, ..Case::default() }, machine()).await;
        assert_eq!(got, Some(format!("{KEPT}, also by , sends from 192.168.0.9")));
    })
    .await;
}

#[tokio::test]
async fn with_the_tunnel_guard_the_first_lease_says_where_packets_come_from() {
    local(async {
        let got = starts(Case { guard: true, ..Case::default() }, machine()).await;
        assert_eq!(got, Some(format!("{KEPT}, sends from 192.168.0.1")));
    })
    .await;
}

/// An earlier net-conf whose leases are those of the present one would be a second backend with the same device.
#[tokio::test]
async fn only_a_backend_that_the_present_one_does_not_understand_is_an_earlier_one() {
    local(async {
        let way = |kind: &str| Attrs { backend_type: kind.into(), ..lease(own(), "192.168.0.1").attrs };
        let conf = |backend: &str| format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":{backend}}}}}"#);
        let others = vec![way("host-gw"), way("ipip")];
        let earlier = vec![conf(r#""host-gw""#), conf(r#""ipip","DirectRouting":true"#)];
        let got = starts(Case { others, earlier, ..Case::default() }, machine()).await;
        assert_eq!(got, Some(format!("{KEPT}, also by host-gw, also by ipip, earlier host-gw")));
    })
    .await;
}

/// Returns this machine with a device of this name that an earlier run of this agent made.
fn with_device(mut machine: Machine, name: &str, mac: Option<Mac>) -> Machine {
    let name = Name::new(name).unwrap();
    let link = LinkInfo { index: 9, name, mac, creator: Creator::ThisAgent, ..machine.links[0].clone() };
    machine.links.push(link);
    machine
}

fn net_conf(kind: &str) -> String {
    format!(r#"{{"Network":"10.5.0.0/16","Backend":{{"Type":"{kind}"}}}}"#)
}

/// A restart while net-conf changes the backend: the devices of both backends stand, and the lease in the store is still one of the earlier
/// backend.
#[tokio::test]
async fn a_node_whose_backend_changes_keeps_its_subnet() {
    local(async {
        let mac = Mac([2, 0, 0, 0, 0, 1]);
        let key = KeyPair::of(Secret::new([1; 32]));
        let both = || with_device(with_device(machine(), "flannel-wg", None), "flannel.1", Some(mac));
        let before = [
            ("vxlan", format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#)),
            ("wireguard", format!(r#"{{"PublicKey":"{}","Port":51820}}"#, key.public_key())),
        ];
        for (content, next) in before.into_iter().zip(["wireguard", "vxlan"]) {
            let case = || Case {
                config: Some(net_conf(next)),
                env: ENV,
                content: Some(content.clone()),
                keys: vec![("flannel", key.private().to_base64())],
                ..Case::default()
            };
            // Without a saved file, as with a directory store.
            let got = starts(Case { saved: None, ..case() }, both()).await;
            assert_eq!(got.as_deref(), Some(KEPT), "{content:?}");
            // The agent was killed before the next backend was in force, and after that, but before the store accepted the lease.
            let earlier = vec![net_conf(content.0)];
            for (saved_config, earlier) in [(content.0, Vec::new()), (next, earlier)] {
                let saved = Case { saved_config: Some(net_conf(saved_config)), earlier, ..case() };
                let got = starts(saved, both()).await.unwrap();
                assert_eq!(got, format!("{KEPT}, then {next}"), "{content:?} {saved_config}");
            }
        }
    })
    .await;
}

/// The earlier run asked for a lease with the next backend, and ended before the answer. Since then net-conf was changed back to the
/// backend of the lease in the file. Only the store knows which of them the peers use.
#[tokio::test]
async fn a_change_that_was_taken_back_goes_on_from_the_lease_in_the_store() {
    local(async {
        let mac = Mac([2, 0, 0, 0, 0, 1]);
        let key = KeyPair::of(Secret::new([1; 32]));
        let both = || with_device(with_device(machine(), "flannel-wg", None), "flannel.1", Some(mac));
        let vxlan = ("vxlan", format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#));
        let wireguard = ("wireguard", format!(r#"{{"PublicKey":"{}","Port":51820}}"#, key.public_key()));
        for (first, then) in [(&vxlan, &wireguard), (&wireguard, &vxlan)] {
            let case = |now: &str| Case {
                config: Some(net_conf(now)),
                saved_config: Some(net_conf(then.0)),
                earlier: vec![net_conf(first.0)],
                sends_earlier: true,
                env: ENV,
                content: Some(first.clone()),
                keys: vec![("flannel", key.private().to_base64())],
                ..Case::default()
            };
            // The store has not accepted it, so no peer knows the next backend.
            assert_eq!(starts(case(first.0), both()).await.as_deref(), Some(KEPT), "{first:?}");
            // It has.
            let data = Some(first.1.as_str().into());
            let way = Attrs { backend_type: first.0.into(), backend_data: data, ..lease(own(), "192.168.0.1").attrs };
            for now in [first.0, "ipip"] {
                let accepted = Case { accepted: Some(then.clone()), others: vec![way.clone()], ..case(now) };
                let kind = first.0;
                let wanted = format!("{KEPT}, also by {kind}, earlier {kind}, then {now}");
                assert_eq!(starts(accepted, both()).await, Some(wanted), "{first:?}");
            }
        }
    })
    .await;
}

/// While an option changes, another one may have to wait until that has ended. A node that was started again must not hurry it.
#[tokio::test]
async fn a_start_while_an_option_changes_begins_with_the_net_conf_that_was_in_force() {
    local(async {
        let mac = Mac([2, 0, 0, 0, 0, 1]);
        let data = |vni: u32| format!(r#"{{"VNI":{vni},"VtepMAC":"{mac}"}}"#);
        let conf = |options: &str| net_conf("vxlan").replace("}}", &format!("{options}}}}}"));
        let way = Attrs {
            backend_type: "vxlan".into(),
            backend_data: Some(data(1).into()),
            ..lease(own(), "192.168.0.1").attrs
        };
        let case = |now: &str| Case {
            config: Some(conf(now)),
            saved_config: Some(conf(r#","VNI":7"#)),
            earlier: vec![conf("")],
            env: ENV,
            content: Some(("vxlan", data(7))),
            others: vec![way.clone()],
            ..Case::default()
        };
        let with = || with_device(machine(), "flannel.7", Some(mac));
        let goes_on = format!("{KEPT}, also by vxlan, earlier vxlan");
        assert_eq!(starts(case(r#","VNI":7"#), with()).await.as_ref(), Some(&goes_on));
        let other = starts(case(r#","VNI":7,"MTU":1400"#), with()).await;
        assert_eq!(other, Some(format!("{goes_on}, then vxlan")));
    })
    .await;
}

/// Net-conf has named another port before the agent was started. The kernel may refuse it.
#[tokio::test]
async fn the_first_lease_names_the_port_on_which_the_device_listens() {
    local(async {
        let key = KeyPair::of(Secret::new([1; 32]));
        let conf = net_conf("wireguard").replace("}}", r#","ListenPort":4500}}"#);
        let case = |store, listens| Case {
            store,
            config: Some(conf.clone()),
            saved_config: Some(conf.clone()),
            env: ENV,
            content: Some(("wireguard", format!(r#"{{"PublicKey":"{}","Port":51820}}"#, key.public_key()))),
            keys: vec![("flannel", key.private().to_base64())],
            listens,
            ..Case::default()
        };
        let with = || with_device(machine(), "flannel-wg", None);
        for store in [true, false] {
            let got = starts(case(store, Some(51820)), with()).await;
            assert_eq!(got, Some(format!("{KEPT}, flannel-wg has 51820 and the lease Some(51820)")), "{store}");
            assert_eq!(starts(case(store, Some(4500)), with()).await.as_deref(), Some(KEPT), "{store}");
        }
        // The device of another agent of this host is not ours.
        let mut others = with();
        others.links.last_mut().unwrap().creator = Creator::AnotherAgent;
        assert_eq!(starts(case(true, Some(51820)), others).await.as_deref(), Some(KEPT));
    })
    .await;
}

/// Our lease names the port that the device had. After a boot no device shows it, and another port at our address may be that of another
/// node behind the same NAT.
#[tokio::test]
async fn a_node_whose_device_had_kept_its_port_finds_its_lease_after_a_boot() {
    local(async {
        let key = KeyPair::of(Secret::new([1; 32]));
        let conf = net_conf("wireguard").replace("}}", r#","ListenPort":4500}}"#);
        let case = Case {
            config: Some(conf.clone()),
            saved_config: Some(conf),
            content: Some(("wireguard", format!(r#"{{"PublicKey":"{}","Port":51820}}"#, key.public_key()))),
            keys: vec![("flannel", key.private().to_base64())],
            ..Case::default()
        };
        assert_eq!(starts(case, machine()).await.as_deref(), Some(KEPT));
    })
    .await;
}

/// The other way in our lease names the port that the device has.
#[tokio::test]
async fn a_start_finds_the_port_that_a_device_of_an_earlier_backend_keeps() {
    local(async {
        let (mac, key) = (Mac([2, 0, 0, 0, 0, 1]), KeyPair::of(Secret::new([1; 32])));
        let data = format!(r#"{{"PublicKey":"{}","Port":51820}}"#, key.public_key());
        let base = lease(own(), "192.168.0.1").attrs;
        let way = Attrs { backend_type: "wireguard".into(), backend_data: Some(data.into()), ..base };
        for store in [true, false] {
            let case = Case {
                store,
                config: Some(net_conf("vxlan")),
                saved_config: Some(net_conf("vxlan")),
                earlier: vec![net_conf("wireguard").replace("}}", r#","ListenPort":4500}}"#)],
                env: ENV,
                content: Some(("vxlan", format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#))),
                others: vec![way.clone()],
                keys: vec![("flannel", key.private().to_base64())],
                listens: Some(51820),
                ..Case::default()
            };
            let got =
                starts(case, with_device(with_device(machine(), "flannel-wg", None), "flannel.1", Some(mac))).await;
            let kept = "flannel-wg has 51820 and the lease None";
            assert_eq!(got, Some(format!("{KEPT}, also by wireguard, earlier wireguard, {kept}")), "{store}");
        }
    })
    .await;
}

/// Somebody stopped the agent, and changed net-conf and a flag with which the earlier backend cannot work.
#[tokio::test]
async fn a_start_does_not_wait_for_an_earlier_backend_that_cannot_work_here() {
    local(async {
        let choice = UplinkChoice { public_ip: "203.0.113.9".parse().ok(), ..UplinkChoice::default() };
        let case = Case {
            choice,
            config: Some(net_conf("vxlan")),
            saved_config: Some(net_conf("host-gw")),
            env: ENV,
            content: Some(("host-gw", "{}".to_owned())),
            ..Case::default()
        };
        let got = starts(case, machine()).await;
        assert_eq!(got.as_deref(), Some("eth0 203.0.113.9 10.5.7.0/24"));
    })
    .await;
}

/// An agent that was killed while it changed its key finds both keys. The peers know the one in its lease, with which the node also goes on while
/// the store is away. Both stay in their files until the store has accepted a lease, so a second start finds the same.
#[tokio::test]
async fn a_node_whose_key_changes_keeps_its_subnet_and_the_key_of_its_lease() {
    local(async {
        let [one, two] = [1, 2].map(|byte| KeyPair::of(Secret::new([byte; 32])));
        let text = |pair: &KeyPair| pair.private().to_base64();
        for (leased, store) in [(&one, true), (&one, false), (&two, true), (&two, false)] {
            let key = leased.public_key();
            let case = Case {
                store,
                config: Some(net_conf("wireguard")),
                saved_config: Some(net_conf("wireguard")),
                env: ENV,
                content: Some(("wireguard", format!(r#"{{"PublicKey":"{key}","Port":51820}}"#))),
                keys: vec![("flannel", text(&one)), ("kept", text(&one)), ("next", text(&two))],
                ..Case::default()
            };
            let got = starts(case, with_device(machine(), "flannel-wg", None)).await;
            assert_eq!(got, Some(format!("{KEPT}, key {key}")), "store {store}");
        }
    })
    .await;
}

/// After a boot the lease may be gone, and the bridge of the pods may be there already.
#[test]
fn the_network_of_our_own_pods_does_not_keep_us_from_their_subnet() {
    let conf = ParsedConf::parse(CONFIG).unwrap();
    let mut with = machine();
    with.links.push(LinkInfo { index: 4, name: Name::new("cni0").unwrap(), ..with.links[0].clone() });
    with.addrs.push(AddrInfo { index: 4, net: "10.5.7.1/24".parse().unwrap(), ..with.addrs[0].clone() });
    let picked = uplink::pick(&UplinkChoice::default(), &candidates(&with, &conf.net_conf, own())).unwrap();
    let host = host(&picked, &with, &conf.net_conf, Identities::default());
    for (previous, is_occupied) in [(None, true), (Some(own()), false)] {
        let request = request(&host, &conf, previous, None, false).unwrap();
        assert_eq!(
            request.connected.overlapping("10.5.7.0/24".parse().unwrap()).is_some(),
            is_occupied,
            "{previous:?}"
        );
    }
}

#[test]
fn the_addresses_that_an_administrator_wrote_into_the_store_win_over_the_flags() {
    let [v4, v6]: [IpAddr; 2] = ["192.0.2.1", "2001:db8::1"].map(|ip| ip.parse().unwrap());
    let flags = UplinkChoice {
        public_ip: "192.0.2.9".parse().ok(),
        public_ipv6: "2001:db8::9".parse().ok(),
        ..UplinkChoice::default()
    };
    let chosen = |chosen| {
        let choice = with_chosen(&flags, chosen);
        [choice.public_ip.map(IpAddr::V4), choice.public_ipv6.map(IpAddr::V6)]
    };
    assert_eq!(chosen([None, None]), [flags.public_ip.map(IpAddr::V4), flags.public_ipv6.map(IpAddr::V6)]);
    assert_eq!(chosen([Some(v4), Some(v6)]), [Some(v4), Some(v6)]);
}

/// If another machine has the address, both nodes use one subnet from now on, and nothing in the store shows that.
#[test]
fn a_lease_that_only_an_address_proves_is_a_warning_if_this_host_does_not_have_the_address() {
    let is_warned = |address: &str, previous: Option<Subnets>| {
        let lease = lease(own(), address);
        let evidence = Evidence { previous, public: vec![evidence::public(&lease.attrs)], ..Evidence::none(TYPES) };
        let output = Output::default();
        let lines = tracing_subscriber::fmt().with_writer(output.writer()).finish();
        tracing::subscriber::with_default(lines, || warn_of_foreign_address(&evidence, &lease, &machine()));
        text_of(&output).contains("is taken over, because nothing else is known about this node")
    };
    assert!(is_warned("203.0.113.9", None));
    assert!(!is_warned("203.0.113.9", Some(own())), "our pods have its subnet");
    assert!(!is_warned("192.168.0.1", None), "this host has the address");
}

/// What flannel left in another network is not looked for.
#[test]
fn a_subnet_file_of_another_network_says_nothing_about_this_node() {
    let dir = tempfile::tempdir().unwrap();
    let (file, conf) = (dir.path().join("subnet.env"), ParsedConf::parse(CONFIG).unwrap());
    assert_eq!(read_subnet_file(&file, &conf.net_conf), (Author::Weft, None));
    write_env(&file, ["10.6.0.0/16", "10.6.7.1/24"]);
    assert_eq!(read_subnet_file(&file, &conf.net_conf), (Author::Weft, None));
    write_env(&file, ["10.5.0.0/16", "10.5.7.1/24"]);
    assert_eq!(read_subnet_file(&file, &conf.net_conf), (Author::Unknown, Some(own())));
}
