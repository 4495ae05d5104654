// SPDX-License-Identifier: Apache-2.0
//! Other options of wireguard in net-conf while the agent runs: its ports, and whether both families have one device.

use tokio::time::Instant;
use weft_backends::host::Host;
use weft_backends::link::Link;
use weft_backends::state::ObservedValue;
use weft_backends::wireguard::WireGuardLink;
use weft_backends::wireguard_key::PublicKey;

use super::*;
use crate::kernel::Outcome;
use crate::plan::ExtraBackend;

const GRACE: Duration = Duration::from_secs(60);
const OWN: &str = "10.5.1.0-24&fd05:0:0:1::-64";
const PEER: &str = "10.5.2.0-24&fd05:0:0:2::-64";

fn conf(options: &str) -> String {
    format!(
        r#"{{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48","Backend":{{"Type":"wireguard"{options}}}}}"#
    )
}

/// What the lease of the node with this number says, with these ports for IPv4 and IPv6.
fn attrs(node: u8, key: &str, [v4, v6]: [u16; 2]) -> Attrs {
    let data = |port| Some(format!(r#"{{"PublicKey":"{key}","Port":{port}}}"#).into_boxed_str());
    Attrs {
        public_ip: Some([192, 168, 0, node].into()),
        public_ipv6: Some(format!("fd00:1::{node}").parse().unwrap()),
        backend_type: "wireguard".into(),
        backend_data: data(v4),
        backend_v6_data: data(v6),
        ..Attrs::default()
    }
}

fn peer(ports: [u16; 2]) -> Attrs {
    attrs(2, &PublicKey([2; 32]).to_string(), ports)
}

fn record(id: &str, attrs: Attrs) -> Record {
    Record { id: id.into(), lease: Ok(Lease { attrs, ..lease(id, "192.168.0.1") }) }
}

fn key() -> KeyPair {
    KeyPair::of(Secret::new([1; 32]))
}

/// What the lease of this node says.
fn own(ports: [u16; 2]) -> Attrs {
    attrs(1, &key().public_key().to_string(), ports)
}

/// A node that continues from what `alter` makes of a start with this net-conf and this lease, with a file that has its key. It has not
/// started.
fn stopped(conf: &str, own: &Record, alter: impl FnOnce(&mut Started)) -> TestNode {
    let lease = own.lease.clone().unwrap();
    let mut test = TestNode::altered((conf, lease), OnLostLease::Hold, RuleOptions::default(), alter);
    let dir = test.file.parent().unwrap();
    test.node.context.secrets =
        acquire::SecretFiles::new(Some(&dir.join("state"))).with_wireguard_keys(&dir.join("wgkey"), &test.file);
    std::fs::write(dir.join("wgkey"), key().private().to_base64()).unwrap();
    test
}

/// A node of this net-conf, with a file that has its key, and a peer with a device for each family.
async fn node(conf: &str, ports: [u16; 2]) -> TestNode {
    let own = record(OWN, own(ports));
    let mut test = stopped(conf, &own, |_| {});
    let records = vec![own, record(PEER, peer([51820, 51821]))];
    test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
    test
}

fn named(text: &str) -> Name {
    Name::new(text).unwrap()
}

/// The kernel's answer to a port that another program has. The device goes on with the port that it has.
fn port_is_taken() -> Outcome {
    Outcome::Partly { missing: "the port is taken".to_owned(), retry: true, works: true }
}

impl TestNode {
    async fn reads(&mut self, conf: String) {
        self.node.store_changed(vec![Event::Config(conf)]).await;
        self.node.tick().await;
    }

    async fn hears(&mut self, attrs: Attrs) {
        let change = RecordChange::Written(record(PEER, attrs));
        self.node.store_changed(vec![Event::Changes(vec![change])]).await;
        self.node.tick().await;
    }

    /// Lets a device stand that listens on this port.
    fn listens(&self, device: Name, port: u16) {
        let kind = Arc::new(WireGuardLink { public: Some(key().public_key()), port });
        let value = Value::link(Link { kind, mtu: 1420, mac: None, up: true });
        self.kernel.disturb(Key::Link(device), Some(ObservedValue { value, protocol: PROTOCOL, mark: true }), false);
    }

    /// The ports of our devices, by name.
    fn ports(&self) -> Vec<(String, u16)> {
        let port = |(key, seen): (&Key, &weft_backends::state::ObservedValue)| match (key, &seen.value) {
            (Key::Link(name), Value::Link(link)) => Some((name.to_string(), link.kind.of::<WireGuardLink>()?.port)),
            _ => None,
        };
        let mut ports: Vec<(String, u16)> = self.kernel.borrow_entries().iter().filter_map(port).collect();
        ports.sort();
        ports
    }

    /// The ports that the lease names which the node asked for last, and those of its first other way.
    fn asked_ports(&self) -> (PublicPorts, Option<PublicPorts>) {
        let attrs = self.store.retakes.borrow().last().cloned().unwrap();
        let ports = weft_backends::register::TYPES.ports;
        (ports(&attrs), attrs.other_ways().first().map(ports))
    }

    /// The devices that accept packets of the peer's pods over IPv6, and the device by which packets to them leave.
    fn devices_of_ipv6(&self) -> (Vec<String>, String) {
        let entries = self.kernel.borrow_entries();
        let net: ipnet::IpNet = "fd05:0:0:2::/64".parse().unwrap();
        let accepts = |key: &Key| match key {
            Key::AllowedIp(name, of) if *of == net => Some(name.to_string()),
            _ => None,
        };
        let mut accepting: Vec<String> = entries.keys().filter_map(accepts).collect();
        accepting.sort();
        let by = |net| match entries.get(&Key::Route(net, 1024)).map(|seen| &seen.value) {
            Some(Value::Route(Route::Device { dev })) => Some(dev.to_string()),
            _ => None,
        };
        (accepting, by(net).or_else(|| by("fd05::/48".parse().unwrap())).unwrap_or_default())
    }
}

type PublicPorts = weft_subnet::backend_types::PublicPorts;

#[tokio::test(start_paused = true)]
async fn the_lease_names_another_port_when_the_device_has_it() {
    local(async {
        let mut test = node(&conf(""), [51820, 51821]).await;
        let device = Key::Link(Name::new("flannel-wg").unwrap());
        test.kernel.fail(device, Some(Outcome::Retry("the port is taken".into())));
        test.reads(conf(r#","ListenPort":4500"#)).await;
        assert!(test.asked(0).await, "peers would send to a port on which nobody listens");
        // Somebody removes our lease, and then the node gets another address. Both are written, with the port that the device has.
        test.node.store_changed(vec![Event::Changes(vec![RecordChange::Removed(OWN.into())])]).await;
        assert!(test.asked(1).await);
        assert_eq!(test.asked_ports(), ([Some(51820), Some(51821)], None));
        test.answer().await;
        let mut there = host_of(&conf(""));
        there.addrs[0].net = "192.168.0.9/24".parse().unwrap();
        test.kernel.set_machine(there);
        test.node.full_pass(Cause::Kernel).await;
        tokio::time::advance(Duration::from_secs(30)).await;
        test.node.full_pass(Cause::Kernel).await;
        assert!(test.asked(2).await, "{:?}", test.node.uplink.problem);
        assert_eq!(test.asked_ports(), ([Some(51820), Some(51821)], None));
        assert_eq!(test.store.retakes.borrow().last().unwrap().public_ip, Some([192, 168, 0, 9].into()));
        test.answer().await;
        test.kernel.fail(device, None);
        test.node.full_pass(Cause::Audit).await;
        assert_eq!(test.ports(), [("flannel-wg".into(), 4500), ("flannel-wg-v6".into(), 51821)]);
        assert!(test.asked(3).await);
        assert_eq!(test.asked_ports(), ([Some(4500), Some(51821)], None));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_node_waits_for_its_turn_before_it_changes_a_port() {
    local(async {
        let mut test = node(&conf(""), [51820, 51821]).await;
        test.node.context.options.change_grace = GRACE;
        let (before, begin) = (test.ports(), Instant::now());
        for port in [4500, 4501] {
            test.reads(conf(&format!(r#","ListenPortV6":{port}"#))).await;
        }
        assert_eq!(test.ports(), before, "it is not the turn of this node");
        let turn = test.node.change.turn.as_ref().map(crate::node::port::Turn::at).expect("a turn");
        // The net-conf comes again, as it does when the store is read again.
        test.reads(conf(r#","ListenPortV6":4501"#)).await;
        assert_eq!(test.node.change.turn.as_ref().map(crate::node::port::Turn::at), Some(turn));
        tick::wake_ups(&mut test, GRACE / 10).await;
        assert!(turn - begin <= GRACE / 10);
        assert_eq!(test.ports(), [("flannel-wg".into(), 51820), ("flannel-wg-v6".into(), 4501)]);
        assert!(test.node.change.turn.is_none());
        // A change that was taken back, and one of another option.
        test.reads(conf("")).await;
        test.reads(conf(r#","ListenPortV6":4501"#)).await;
        test.reads(conf(r#","ListenPortV6":4501,"PersistentKeepaliveInterval":25"#)).await;
        assert!(test.node.change.turn.is_none());
        assert!(test.node.net_conf.text.contains("Keepalive"));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn both_devices_accept_packets_before_they_move_to_the_device_for_both_families() {
    local(async {
        let mut test = node(&conf(""), [51820, 51821]).await;
        test.node.context.options.change_grace = GRACE;
        let (both, one): (Vec<String>, String) =
            (vec!["flannel-wg".into(), "flannel-wg-v6".into()], "flannel-wg".into());
        let separate = (vec![both[1].clone()], both[1].clone());
        assert_eq!(test.devices_of_ipv6(), separate);
        test.reads(conf(r#","Mode":"ipv4""#)).await;
        assert!(test.asked(1).await);
        let two_ports = Some([Some(51820), Some(51821)]);
        assert_eq!(test.asked_ports(), ([Some(51820); 2], two_ports), "peers that have not followed know the way");
        test.answer().await;
        tick::wake_ups(&mut test, GRACE).await;
        assert_eq!(test.devices_of_ipv6(), separate, "the peer has not read the net-conf");
        test.hears(peer([51820, 51820]).with_other_ways(&[peer([51820, 51821])])).await;
        assert_eq!(test.devices_of_ipv6(), (both, one.clone()), "the peer may still send to the other device");
        tick::wake_ups(&mut test, GRACE + Duration::from_secs(1)).await;
        assert_eq!((test.devices_of_ipv6(), test.ports()), ((vec![one.clone()], one.clone()), vec![(one, 51820)]));
        assert!(test.asked(2).await);
        assert_eq!(test.asked_ports(), ([Some(51820); 2], None));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn the_port_and_the_mode_change_one_after_the_other() {
    local(async {
        let mut test = node(&conf(""), [51820, 51821]).await;
        test.node.context.options.change_grace = GRACE;
        let refused = |test: &TestNode| test.node.net_conf.not_applied.clone().unwrap_or_default();
        test.reads(conf(r#","Mode":"ipv4","ListenPort":4500"#)).await;
        assert!(refused(&test).contains("one after the other"), "{}", refused(&test));
        // Other nodes have had their turn for the port when the mode changes.
        test.reads(conf(r#","ListenPort":4500"#)).await;
        assert!(test.node.change.turn.is_some());
        test.reads(conf(r#","Mode":"ipv4","ListenPort":4500"#)).await;
        tick::wake_ups(&mut test, Duration::from_secs(1)).await;
        assert_eq!((test.ports()[0].1, refused(&test)), (4500, String::new()));
        test.answer().await;
        tick::wake_ups(&mut test, Duration::from_secs(1)).await;
        assert_eq!(test.asked_ports(), ([Some(4500); 2], Some([Some(4500), Some(51821)])));
        test.answer().await;
        // Peers that have not followed still send to the port of the other way.
        test.reads(conf(r#","Mode":"ipv4","ListenPort":4501"#)).await;
        assert!(refused(&test).contains("when the change of the mode has ended"), "{}", refused(&test));
        test.hears(peer([51820, 51820])).await;
        tick::wake_ups(&mut test, GRACE + GRACE / 5).await;
        assert_eq!((test.ports(), refused(&test)), (vec![("flannel-wg".to_owned(), 4501)], String::new()));
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn packets_move_to_a_device_for_each_family_when_the_peer_has_one() {
    local(async {
        let mut test = node(&conf(r#","Mode":"ipv4""#), [51820, 51820]).await;
        test.node.context.options.change_grace = GRACE;
        test.hears(peer([51820, 51820])).await;
        let before = (vec!["flannel-wg".to_owned()], "flannel-wg".to_owned());
        assert_eq!(test.devices_of_ipv6(), before);
        test.reads(conf("")).await;
        test.answer().await;
        tick::wake_ups(&mut test, GRACE).await;
        assert_eq!(test.devices_of_ipv6(), before, "the peer has not read the net-conf");
        test.hears(peer([51820, 51821]).with_other_ways(&[peer([51820, 51820])])).await;
        assert_eq!(test.devices_of_ipv6().1, "flannel-wg-v6");
        tick::wake_ups(&mut test, GRACE + Duration::from_secs(1)).await;
        assert_eq!(test.devices_of_ipv6(), (vec!["flannel-wg-v6".to_owned()], "flannel-wg-v6".to_owned()));
    })
    .await;
}

/// flannel names two ports in every mode, so its lease stays the same when it follows.
#[tokio::test(start_paused = true)]
async fn a_node_that_gives_no_sign_is_reached_as_net_conf_says_after_ten_grace_times() {
    local(async {
        let mut test = node(&conf(""), [51820, 51821]).await;
        test.node.context.options.change_grace = GRACE;
        test.reads(conf(r#","Mode":"ipv4""#)).await;
        test.answer().await;
        tick::wake_ups(&mut test, GRACE * 9).await;
        assert_eq!(test.devices_of_ipv6().1, "flannel-wg-v6");
        assert!(test.node.change_warnings()[0].contains("1 nodes still need the earlier wireguard"));
        assert!(test.node.next_step_of_change().is_some(), "the node wakes up at the end of that time");
        tick::wake_ups(&mut test, GRACE * 2).await;
        assert_eq!(test.devices_of_ipv6(), (vec!["flannel-wg".to_owned()], "flannel-wg".to_owned()));
        assert!(!test.node.plan.is_changing());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_device_that_has_its_port_is_published_although_the_other_one_has_not() {
    local(async {
        let mut test = node(&conf(""), [51820, 51821]).await;
        let device = Key::Link(named("flannel-wg-v6"));
        test.kernel.fail(device, Some(port_is_taken()));
        test.reads(conf(r#","ListenPort":4500,"ListenPortV6":4501"#)).await;
        assert!(test.asked(1).await);
        assert_eq!(test.asked_ports(), ([Some(4500), Some(51821)], None));
        assert_eq!(test.node.device_problem(), None, "peers reach the node at the port of its lease");
        let problems: Vec<String> = test.node.status().problems.into_iter().map(|problem| problem.text).collect();
        let wanted = "link flannel-wg-v6: the port is taken; packets pass meanwhile";
        assert!(problems.iter().any(|problem| problem == wanted), "{problems:?}");
        test.answer().await;
        test.kernel.fail(device, None);
        test.node.full_pass(Cause::Audit).await;
        assert!(test.asked(2).await);
        assert_eq!(test.asked_ports(), ([Some(4500), Some(4501)], None));
    })
    .await;
}

/// A second change of the backend leads back to wireguard, with a third port.
#[tokio::test(start_paused = true)]
async fn no_way_in_the_lease_names_a_port_that_the_device_does_not_have() {
    local(async {
        let mut test = node(&conf(""), [51820, 51821]).await;
        let device = Key::Link(named("flannel-wg"));
        test.kernel.fail(device, Some(port_is_taken()));
        test.reads(conf(r#","ListenPort":4500"#)).await;
        assert!(test.asked(0).await);
        test.node.context.options.change_grace = GRACE;
        let has = [Some(51820), Some(51821)];
        test.reads(conf("").replace("wireguard", "vxlan")).await;
        assert!(test.asked(1).await);
        assert_eq!(test.asked_ports(), ([None, None], Some(has)));
        test.answer().await;
        test.reads(conf(r#","ListenPort":4501"#)).await;
        assert!(test.asked(2).await);
        assert_eq!(test.asked_ports(), (has, Some([None, None])));
        test.answer().await;
        test.kernel.fail(device, None);
        test.node.full_pass(Cause::Audit).await;
        assert!(test.asked(3).await);
        assert_eq!((test.asked_ports().0, test.ports()[0].1), ([Some(4501), Some(51821)], 4501));
    })
    .await;
}

/// Net-conf changed the port while the agent was away, or the kernel refused the port before that.
#[tokio::test(start_paused = true)]
async fn after_a_start_the_lease_names_another_port_when_the_device_has_it() {
    local(async {
        for is_taken in [false, true] {
            let (device, own) = (named("flannel-wg"), record(OWN, own([51820, 51821])));
            let mut test = stopped(&conf(r#","ListenPort":4500"#), &own, |started| {
                started.host.kept_ports.insert(device, 51820);
            });
            test.listens(device, 51820);
            test.kernel.fail(Key::Link(device), is_taken.then(port_is_taken));
            test.node.start(vec![Event::Snapshot { records: vec![own], reset: false }]).await;
            assert!(test.asked(usize::from(!is_taken)).await, "{is_taken}");
            if !is_taken {
                assert_eq!(test.asked_ports(), ([Some(4500), Some(51821)], None));
                continue;
            }
            let problems = test.node.status().problems;
            assert!(problems.iter().any(|problem| problem.text.contains("the port is taken")), "{problems:?}");
            // Other changes of the lease do not wait for it.
            test.node.store_changed(vec![Event::Changes(vec![RecordChange::Removed(OWN.into())])]).await;
            assert!(test.asked(1).await);
            assert_eq!(test.asked_ports(), ([Some(51820), Some(51821)], None));
        }
    })
    .await;
}

/// The device of an earlier backend has kept its port. `is_known` says whether the start has asked for it.
#[tokio::test(start_paused = true)]
async fn after_a_start_an_earlier_way_names_the_port_that_its_device_has() {
    local(async {
        for is_known in [true, false] {
            let device = named("flannel-wg");
            let data: Option<Box<str>> = Some(r#"{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}"#.into());
            let (way, backend_type) = (own([51820, 51821]), "vxlan".to_owned());
            let vxlan = Attrs { backend_type, backend_data: data.clone(), backend_v6_data: data, ..way.clone() };
            let own = record(OWN, vxlan.with_other_ways(&[way]));
            let mut test = stopped(&conf("").replace("wireguard", "vxlan"), &own, |started| {
                let host = Host { identities: key().both(), ..started.host.clone() };
                let earlier = ParsedConf::parse(&conf(r#","ListenPort":4500"#)).unwrap();
                started.earlier = vec![ExtraBackend::new(earlier, host)];
                started.host.kept_ports.extend(is_known.then_some((device, 51820)));
            });
            test.listens(device, 51820);
            test.kernel.fail(Key::Link(device), Some(port_is_taken()));
            let wanted = |test: &TestNode| test.node.plan.advertise(test.node.plan.host()).unwrap().other_ways();
            let ports = weft_backends::register::TYPES.ports;
            assert_eq!(ports(&wanted(&test)[0])[0], Some(if is_known { 51820 } else { 4500 }));
            let records = vec![own, record(PEER, peer([51820, 51821]))];
            test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
            assert_eq!(ports(&wanted(&test)[0]), [Some(51820), Some(51821)], "{is_known}");
        }
    })
    .await;
}

/// Somebody gives the device another port, and another program takes that of net-conf meanwhile.
#[tokio::test(start_paused = true)]
async fn the_lease_follows_a_port_that_somebody_gave_to_the_device() {
    local(async {
        let mut test = node(&conf(""), [51820, 51821]).await;
        let device = named("flannel-wg");
        test.listens(device, 4777);
        test.kernel.fail(Key::Link(device), Some(port_is_taken()));
        test.node.full_pass(Cause::Audit).await;
        assert!(test.asked(1).await);
        assert_eq!(test.asked_ports(), ([Some(4777), Some(51821)], None));
        test.answer().await;
        test.kernel.fail(Key::Link(device), None);
        test.node.full_pass(Cause::Audit).await;
        assert!(test.asked(2).await);
        assert_eq!(test.asked_ports(), ([Some(51820), Some(51821)], None));
        // What a pass repairs is not published.
        test.answer().await;
        test.listens(device, 4777);
        test.node.full_pass(Cause::Audit).await;
        assert!(test.asked(2).await);
    })
    .await;
}

/// A port may be refused for days. Both ways in the lease name the one that the device has.
#[tokio::test(start_paused = true)]
async fn the_mode_changes_although_a_port_is_refused() {
    local(async {
        let mut test = node(&conf(""), [51820, 51821]).await;
        test.kernel.fail(Key::Link(named("flannel-wg")), Some(port_is_taken()));
        test.reads(conf(r#","ListenPort":4500"#)).await;
        assert!(test.asked(0).await);
        test.reads(conf(r#","ListenPort":4500,"Mode":"ipv4""#)).await;
        assert_eq!(test.node.net_conf.not_applied, None);
        assert!(test.asked(1).await);
        assert_eq!(test.asked_ports(), ([Some(51820); 2], Some([Some(51820), Some(51821)])));
    })
    .await;
}

/// The lease of flannel is the same with one device as with two, so it cannot be told that this node has only one
/// (docs/adr/020-live-change.md).
#[tokio::test(start_paused = true)]
async fn towards_a_device_for_each_family_a_node_of_flannel_is_reached_as_net_conf_says_at_once() {
    local(async {
        let mut test = node(&conf(r#","Mode":"ipv4""#), [51820, 51820]).await;
        test.node.context.options.change_grace = GRACE;
        assert_eq!(test.devices_of_ipv6().1, "flannel-wg");
        test.reads(conf("")).await;
        test.answer().await;
        assert_eq!(test.devices_of_ipv6().1, "flannel-wg-v6");
    })
    .await;
}

const OWN_IPV6: &str = "fd05:0:0:1::-64";
const PEER_IPV6: &str = "fd05:0:0:2::-64";

fn conf_of_ipv6(options: &str) -> String {
    let families = r#""EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48""#;
    format!(r#"{{{families},"Backend":{{"Type":"wireguard"{options}}}}}"#)
}

fn of_ipv6(attrs: Attrs) -> Attrs {
    Attrs { public_ip: None, backend_data: None, ..attrs }
}

/// A node without IPv4, and one of flannel. Both have one device. That of flannel names a port on which it does not listen.
async fn node_of_ipv6() -> TestNode {
    let own = record(OWN_IPV6, of_ipv6(own([0, 51820])));
    let mut test = stopped(&conf_of_ipv6(r#","Mode":"ipv6""#), &own, |_| {});
    let records = vec![own, record(PEER_IPV6, of_ipv6(peer([0, 51821])))];
    test.node.start(vec![Event::Snapshot { records, reset: false }]).await;
    test
}

/// flannel names two ports in every mode, so neither the earlier backend nor the next one understands the lease of a node with one device.
#[tokio::test(start_paused = true)]
async fn a_node_of_flannel_with_one_device_is_reached_as_before_when_the_type_changes() {
    local(async {
        let dual = (node(&conf(r#","Mode":"auto""#), [51820, 51820]).await, conf(""));
        let ipv6 = (node_of_ipv6().await, conf_of_ipv6(""));
        for (mut test, conf) in [dual, ipv6] {
            test.node.context.options.change_grace = GRACE;
            let before = (vec!["flannel-wg".to_owned()], "flannel-wg".to_owned());
            assert_eq!(test.devices_of_ipv6(), before);
            test.reads(conf.replace("wireguard", "vxlan")).await;
            assert!(test.asked(1).await);
            assert_eq!(test.devices_of_ipv6(), before, "{conf}");
            test.answer().await;
            tick::wake_ups(&mut test, GRACE * 2).await;
            assert_eq!(test.devices_of_ipv6(), before, "{conf}");
            let warnings = test.node.change_warnings();
            assert!(warnings[0].contains("1 nodes still need the earlier wireguard"), "{warnings:?}");
        }
    })
    .await;
}
