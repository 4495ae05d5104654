// SPDX-License-Identifier: Apache-2.0
//! The decisions, from facts that no kernel is needed for.

use std::net::IpAddr;

use nix::errno::Errno;
use nix::libc;
use weft_cni::iptables::Saved;
use weft_netlink::nftables::Hook;
use weft_subnet::env::SubnetEnv;

use super::facts::{
    Agent, AgentFacts, Device, DeviceKind, Difference, Ends, Facts, Hop, Lookup, Mac, Neighbour, Packet, Peer, Place,
    Pod, PodGateway, Proto, Read, Route, RouteKind, Tunnel, Way,
};
use super::port_steps::{isolated, no_arp};
use super::rules::ways_of_tunnel;
use super::{Explanation, State, Step, Verdict, decide};
use crate::kernel::rules::{Connection, Tested, follow};
use crate::subnet_file::SubnetFile;

const MAC: Mac = Mac([0xee, 0, 0, 0, 0, 2]);

fn device(index: u32, name: &str, kind: DeviceKind, mtu: u32) -> Device {
    Device { index, name: name.to_owned(), kind, mtu, up: true, carrier: true, ..Device::default() }
}

fn vxlan() -> Device {
    let kind = DeviceKind::Vxlan { vni: 1, port: 8472 };
    Device { of_weft: true, ..device(3, "flannel.1", kind, 1450) }
}

fn packet() -> Packet {
    Packet { from: "10.5.1.2".parse().unwrap(), to: "10.5.2.2".parse().unwrap(), proto: None, port: None }
}

fn route(prefix: &str, via: Option<&str>, device: u32, protocol: u8) -> Route {
    Route {
        prefix: Some(prefix.parse().unwrap()),
        protocol,
        table: u32::from(libc::RT_TABLE_MAIN),
        gateway: via.map(|via| via.parse().unwrap()),
        device,
        ..Route::default()
    }
}

fn neighbour(state: u16) -> Option<Read<Neighbour>> {
    Some(Read::Found(Neighbour { mac: Some(MAC), state }))
}

/// A pod of this node sends to a pod of a peer over vxlan, and everything is in order.
fn healthy() -> Facts {
    let peer = Peer {
        subnets: vec!["10.5.2.0/24".parse().unwrap()],
        public: vec!["192.168.0.2".parse().unwrap()],
        backend: "vxlan".to_owned(),
        state: "programmed".to_owned(),
        ..Peer::default()
    };
    let outer = Hop {
        lookup: Lookup::Route(route("192.168.0.0/24", None, 2, 2)),
        device: Some(device(2, "eth0", DeviceKind::Ethernet, 1500)),
        nexthop: Some("192.168.0.2".parse().unwrap()),
        neighbour: neighbour(libc::NUD_REACHABLE),
    };
    let hop = Hop {
        lookup: Lookup::Route(route("10.5.2.0/24", Some("10.5.2.0"), 3, 90)),
        device: Some(vxlan()),
        nexthop: Some("10.5.2.0".parse().unwrap()),
        neighbour: neighbour(libc::NUD_PERMANENT),
    };
    let remote = "192.168.0.2".parse().unwrap();
    let ends = Ends { from: "192.168.0.1".parse().unwrap(), at: "192.168.0.1".parse().unwrap() };
    let tunnel = Tunnel { fdb: Some(Read::Found(remote)), remote: Some(remote), outer: Some(outer), ends: Some(ends) };
    let way = Way {
        packet: packet(),
        arrives: Some(device(4, "cni0", DeviceKind::Ethernet, 1450)),
        hop,
        tunnel: Some(tunnel),
        route_of_weft: None,
        connection: Connection::New,
        from_pod: None,
        to_pod: None,
        queues: None,
    };
    let agent = AgentFacts {
        backend: "vxlan".to_owned(),
        peers: vec![peer.clone()],
        differences: Some(Vec::new()),
        ..AgentFacts::default()
    };
    Facts {
        packet: packet(),
        from: Place::Pod,
        to: Place::Peer(peer),
        subnet_file: SubnetFile::Missing,
        agent: Agent::Answers(agent),
        ways: vec![way],
        down: Vec::new(),
        forwarding: Some(true),
        bridge: None,
        addrs: Vec::new(),
        absent: Vec::new(),
    }
}

/// Returns the explanation of a healthy node after this fault.
fn explain(fault: impl FnOnce(&mut Facts)) -> Explanation {
    let mut facts = healthy();
    fault(&mut facts);
    decide(&facts, &[], Vec::new())
}

fn broken(because: &str, fault: impl FnOnce(&mut Facts)) -> Explanation {
    let report = explain(fault);
    assert_eq!(report.verdict, Verdict::Broken, "{report:#?}");
    assert!(report.sentence.starts_with("broken here, because ") && report.sentence.contains(because), "{report:#?}");
    assert!(report.remedy.is_some(), "{report:#?}");
    report
}

fn outer(facts: &mut Facts) -> &mut Hop {
    facts.ways[0].tunnel.as_mut().unwrap().outer.as_mut().unwrap()
}

fn outer_route(facts: &mut Facts) -> &mut Route {
    let Lookup::Route(route) = &mut outer(facts).lookup else { unreachable!() };
    route
}

#[test]
fn a_healthy_way_has_every_step_and_its_text_is_for_people() {
    let report = explain(|_| {});
    assert_eq!(report.verdict, Verdict::Works);
    let names: Vec<&str> = report.steps.iter().map(|step| step.step.as_str()).collect();
    assert_eq!(
        names,
        ["source", "lease", "route", "neighbour", "fdb", "tunnel", "underlay route", "underlay neighbour"]
    );
    assert!(report.steps.iter().all(|step| step.state == State::Ok), "{report:#?}");
    let text = report.render();
    assert!(text.starts_with("10.5.1.2 (pod of this node) -> 10.5.2.2 (pod of the node 192.168.0.2)\n"), "{text}");
    assert!(text.contains("10.5.2.0/24 via 10.5.2.0 dev flannel.1 proto 90 (MTU 1450)\n"), "{text}");
    assert!(text.ends_with("\nworks as far as this node can tell\n"), "{text}");
}

#[test]
fn entries_that_are_missing_or_wrong_are_named_with_what_the_plan_wants() {
    let difference =
        |entry: &str, should_be: &str| Difference { entry: entry.to_owned(), should_be: Some(should_be.to_owned()) };
    let report = broken("flannel.1 has no neighbour entry for 10.5.2.0", |facts| {
        facts.ways[0].hop.neighbour = Some(Read::Missing);
        let Agent::Answers(agent) = &mut facts.agent else { unreachable!() };
        agent.differences = Some(vec![difference("neigh 10.5.2.0 dev flannel.1", "lladdr ee:00:00:00:00:02")]);
    });
    let step = report.steps.iter().find(|step| step.state == State::Broken).unwrap();
    assert_eq!(step.should_be.as_deref(), Some("lladdr ee:00:00:00:00:02"));
    // The kernel makes such an entry for the first packet that needs the missing one.
    broken("flannel.1 has no neighbour entry for 10.5.2.0", |facts| {
        facts.ways[0].hop.neighbour = Some(Read::Found(Neighbour { mac: None, state: libc::NUD_FAILED }));
    });
    broken("flannel.1 has no FDB entry for ee:00:00:00:00:02", |facts| {
        let tunnel = facts.ways[0].tunnel.as_mut().unwrap();
        (tunnel.fdb, tunnel.remote, tunnel.outer) = (Some(Read::Missing), None, None);
    });
    broken("sends the packet to 192.168.0.9, and the lease names 192.168.0.2", |facts| {
        facts.ways[0].tunnel.as_mut().unwrap().fdb = Some(Read::Found("192.168.0.9".parse().unwrap()));
    });
    broken("the lease of 10.5.2.2 is not believed: it overlaps", |facts| {
        let Place::Peer(peer) = &mut facts.to else { unreachable!() };
        (peer.state, peer.reason) = ("set-aside".to_owned(), Some("it overlaps".to_owned()));
    });
    broken("no node has a lease for 10.5.2.2", |facts| facts.to = Place::Network);
}

#[test]
fn a_route_that_is_missing_refused_or_of_another_program_is_named() {
    let foreign = || route("10.5.2.0/25", Some("192.168.0.9"), 2, libc::RTPROT_STATIC);
    let report = broken("is used instead of the route of weft for 10.5.2.0/24", |facts| {
        let hop = &mut facts.ways[0].hop;
        hop.lookup = Lookup::Route(foreign());
        hop.device = Some(device(2, "eth0", DeviceKind::Ethernet, 1500));
        facts.ways[0].tunnel = None;
        facts.ways[0].route_of_weft = Some(route("10.5.2.0/24", Some("10.5.2.0"), 3, 90));
    });
    assert!(report.remedy.unwrap().ends_with("ip route del 10.5.2.0/25 via 192.168.0.9 dev eth0 proto static"));
    // The table of a VPN has its default route, without which the VPN does not work.
    let report = broken("table 51820, chosen by a policy rule of another program is used instead", |facts| {
        let hop = &mut facts.ways[0].hop;
        hop.lookup = Lookup::Route(Route { table: 51820, ..route("0.0.0.0/0", None, 9, libc::RTPROT_BOOT) });
        hop.device = Some(device(9, "tun9", DeviceKind::Ethernet, 1420));
        facts.ways[0].tunnel = None;
        facts.ways[0].route_of_weft = Some(route("10.5.2.0/24", Some("10.5.2.0"), 3, 90));
    });
    assert!(
        report
            .remedy
            .unwrap()
            .starts_with("exclude Network in the configuration of the program that makes the policy rule")
    );
    broken("there is no route of weft to 10.5.2.2", |facts| {
        facts.ways[0].hop.lookup = Lookup::Route(route("0.0.0.0/0", Some("192.168.0.1"), 2, libc::RTPROT_BOOT));
        facts.ways[0].tunnel = None;
    });
    let refuse = |facts: &mut Facts, errno| {
        facts.ways[0].hop = Hop { lookup: Lookup::Refused(errno), device: None, nexthop: None, neighbour: None };
        facts.ways[0].tunnel = None;
    };
    broken("the kernel has no route to 10.5.2.2", |facts| refuse(facts, Errno::ENETUNREACH));
    broken("net.ipv4.ip_forward is 0", |facts| {
        facts.forwarding = Some(false);
        refuse(facts, Errno::EHOSTUNREACH);
    });
    broken("its reverse path filter", |facts| refuse(facts, Errno::EXDEV));
    broken("flannel.1 is down", |facts| {
        facts.down = vec![Device { up: false, ..vxlan() }];
        refuse(facts, Errno::ENETUNREACH);
    });
    broken("because weft has no route to it", |facts| {
        let kind = RouteKind::Refuses(libc::RTN_UNREACHABLE);
        facts.ways[0].hop.lookup = Lookup::Route(Route { kind, ..route("10.5.0.0/16", None, 0, 90) });
        facts.ways[0].tunnel = None;
    });
}

#[test]
fn with_a_backend_that_writes_no_routes_those_of_others_are_right() {
    let report = explain(|facts| {
        let hop = &mut facts.ways[0].hop;
        hop.lookup = Lookup::Route(route("10.5.0.0/16", Some("192.168.0.1"), 2, libc::RTPROT_STATIC));
        hop.device = Some(device(2, "eth0", DeviceKind::Ethernet, 1500));
        facts.ways[0].tunnel = None;
        let Agent::Answers(agent) = &mut facts.agent else { unreachable!() };
        agent.backend = "alloc".to_owned();
    });
    assert_eq!(report.verdict, Verdict::Works, "{report:#?}");
}

#[test]
fn the_underlay_must_lead_out_of_the_tunnel_and_take_packets_of_full_size() {
    broken("this node has no route to 192.168.0.2", |facts| outer(facts).lookup = Lookup::Refused(Errno::ENETUNREACH));
    broken("leads back into flannel.1", |facts| outer(facts).device = Some(vxlan()));
    broken("192.168.0.2 does not answer on eth0", |facts| outer(facts).neighbour = neighbour(libc::NUD_FAILED));
    for (mtu, verdict) in [(1500, Verdict::Works), (1499, Verdict::Broken)] {
        let of_device = explain(|facts| outer(facts).device.as_mut().unwrap().mtu = mtu);
        let of_route = explain(|facts| outer_route(facts).mtu = Some(mtu));
        assert_eq!((of_device.verdict, of_route.verdict), (verdict, verdict), "{mtu}");
    }
}

/// Nobody has configured such an MTU, so no MTU of this node is to be changed for it.
#[test]
fn an_mtu_that_the_kernel_has_learned_is_told_from_that_of_the_link_and_the_route() {
    let learn = |facts: &mut Facts, mtu, expires_s| {
        let route = outer_route(facts);
        (route.mtu, route.mtu_is_learned, route.expires_s) = (Some(mtu), true, expires_s);
    };
    let underlay = |report: &Explanation| {
        let step = report.steps.iter().find(|step| step.step == "underlay route").unwrap();
        (step.is.clone(), step.mtu)
    };
    let words = "a router has said that the way to 192.168.0.2 takes 1400 bytes";
    let report = broken(words, |facts| learn(facts, 1400, Some(595)));
    let is =
        "192.168.0.0/24 dev eth0 proto kernel; the kernel has learned the MTU from a router and forgets it in 595 s";
    assert_eq!(underlay(&report), (is.to_owned(), Some(1400)));
    let remedy = report.remedy.as_deref().unwrap();
    assert!(remedy.contains("`tracepath -n 192.168.0.2`") && remedy.contains("`ip route flush cache`"), "{remedy}");
    assert!(!remedy.contains("restart the agent"), "{remedy}");
    // The packets fit, and the reader sees nevertheless that the MTU may change by itself.
    let report = explain(|facts| {
        outer(facts).device.as_mut().unwrap().mtu = 9000;
        learn(facts, 1500, Some(7));
    });
    assert_eq!(report.verdict, Verdict::Works, "{report:#?}");
    assert!(underlay(&report).0.ends_with("forgets it in 7 s"), "{report:#?}");
    // The link has become smaller since.
    let report = broken("by eth0 takes 1300 bytes", |facts| {
        outer(facts).device.as_mut().unwrap().mtu = 1300;
        learn(facts, 1400, Some(7));
    });
    assert!(!underlay(&report).0.contains("learned"), "{report:#?}");
    // The route of a router advertisement has an end, too, and nothing was learned.
    let report = explain(|facts| outer_route(facts).expires_s = Some(1800));
    assert!(!underlay(&report).0.contains("1800"), "{report:#?}");
    // Packets of pods themselves, too.
    let report = explain(|facts| {
        let Lookup::Route(route) = &mut facts.ways[0].hop.lookup else { unreachable!() };
        (route.mtu, route.mtu_is_learned, route.expires_s) = (Some(1350), true, Some(60));
    });
    let route = report.steps.iter().find(|step| step.step == "route").unwrap();
    assert!(route.mtu == Some(1350) && route.is.ends_with("forgets it in 60 s"), "{report:#?}");
}

#[test]
fn each_kind_of_tunnel_needs_room_for_its_own_bytes() {
    for (kind, mtu, needed) in [
        (DeviceKind::Ipip, 1480, 1500),
        (DeviceKind::WireGuard, 1420, 1480),
        (DeviceKind::Tun, 1472, 1500),
        (DeviceKind::Vxlan { vni: 1, port: 8472 }, 1450, 1500),
    ] {
        let with = |underlay| {
            explain(|facts| {
                let hop = &mut facts.ways[0].hop;
                hop.neighbour = hop.neighbour.take().filter(|_| matches!(kind, DeviceKind::Vxlan { .. }));
                hop.device = Some(Device { mtu, kind: kind.clone(), ..vxlan() });
                outer(facts).device.as_mut().unwrap().mtu = underlay;
            })
        };
        assert_eq!(with(needed).verdict, Verdict::Works, "{kind:?}");
        let report = with(needed - 1);
        assert_eq!(report.verdict, Verdict::Broken, "{kind:?}");
        assert!(report.sentence.contains(&format!("becomes one of {needed} bytes")), "{report:#?}");
    }
    let report = explain(|facts| {
        facts.ways[0].hop.device.as_mut().unwrap().kind = DeviceKind::WireGuard;
        facts.ways[0].tunnel = Some(Tunnel { fdb: None, remote: None, outer: None, ends: None });
    });
    let tunnel = report.steps.iter().find(|step| step.step == "tunnel").unwrap();
    assert_eq!(tunnel.state, State::Unknown, "without the agent, the other end is not known: {report:#?}");
}

/// Rules of firewalls test these addresses, so a wrong one would quote a rule that sees no packet of the tunnel.
#[test]
fn packets_of_the_tunnel_have_the_addresses_of_this_node_that_the_agent_uses() {
    let mut facts = healthy();
    let address = |text: &str| -> IpAddr { text.parse().unwrap() };
    let remote = address("192.168.0.2");
    // The kernel would choose another source.
    outer_route(&mut facts).source = Some(address("192.168.0.99"));
    let ends = Ends { from: address("192.168.0.5"), at: address("192.168.0.7") };
    facts.ways[0].tunnel.as_mut().unwrap().ends = Some(ends);
    let ways = ways_of_tunnel(&facts.ways[0], None);
    let packets: Vec<_> = ways.iter().map(|way| (way.packet.from, way.packet.to, way.packet.port)).collect();
    assert_eq!(packets, [(ends.from, remote, Some(8472)), (remote, ends.at, Some(8472))]);
    assert!(ways[0].arrives.is_none() && ways[1].arrives.as_ref().is_some_and(|device| device.name == "eth0"));
    facts.ways[0].tunnel.as_mut().unwrap().ends = None;
    assert_eq!(ways_of_tunnel(&facts.ways[0], None), [], "which packets arrive is not known");
}

/// Returns the pod of this node that sends the packet. The other end of its link is a port of cni0.
fn pod(facts: &mut Facts) -> &mut Pod {
    let host_link = Device { master: 4, ..device(9, "veth9", DeviceKind::Ethernet, 1450) };
    let pod = Pod {
        netns: "/run/netns/pod".into(),
        link: device(2, "eth0", DeviceKind::Ethernet, 1450),
        host_link,
        other_port: None,
        route: Lookup::Route(route("0.0.0.0/0", Some("10.5.1.1"), 2, libc::RTPROT_BOOT)),
        other_link: None,
        gateway: None,
    };
    facts.ways[0].from_pod.insert(pod)
}

#[test]
fn what_is_wrong_inside_of_a_pod_is_named() {
    let sound = explain(|facts| {
        pod(facts);
    });
    assert_eq!(sound.verdict, Verdict::Works, "{sound:#?}");
    broken("the pod 10.5.1.2 has no route to 10.5.2.2", |facts| {
        pod(facts).route = Lookup::Refused(Errno::ENETUNREACH);
    });
    broken("eth0 of the pod 10.5.1.2 is down", |facts| pod(facts).link.up = false);
    broken("veth9 is down", |facts| pod(facts).host_link.up = false);
    broken("more than 1450 bytes, which eth0 of the pod sends", |facts| pod(facts).link.mtu = 1451);
    let other = explain(|facts| pod(facts).other_link = Some("net1".to_owned()));
    assert!(other.verdict == Verdict::Unknown && other.sentence.contains("by net1"), "{other:#?}");
    for (state, mac, verdict) in [
        (libc::NUD_PERMANENT, 9, Verdict::Broken),
        (libc::NUD_PERMANENT, 2, Verdict::Works),
        (libc::NUD_REACHABLE, 9, Verdict::Works),
    ] {
        let report = explain(|facts| {
            let known = Neighbour { mac: Some(Mac([2, 0, 0, 0, 0, mac])), state };
            let address = "10.5.1.1".parse().unwrap();
            pod(facts).gateway = Some(PodGateway { address, neighbour: Read::Found(known) });
            facts.ways[0].arrives.as_mut().unwrap().mac = Some(Mac([2, 0, 0, 0, 0, 2]));
        });
        assert_eq!(report.verdict, verdict, "{state:#x} {mac}: {report:#?}");
    }
}

#[test]
fn a_link_without_arp_matters_for_ipv4_alone() {
    let mut facts = healthy();
    pod(&mut facts).link.no_arp = true;
    let way = facts.ways.remove(0);
    let step = no_arp(&way).unwrap();
    assert!(step.state == State::Broken && step.is.starts_with("eth0 of the pod"), "{step:?}");
    let packet = Packet { from: "fd00::1".parse().unwrap(), to: "fd00::2".parse().unwrap(), ..way.packet };
    assert_eq!(no_arp(&Way { packet, ..way }), None, "IPv6 asks in another way");
}

#[test]
fn only_two_isolated_ports_of_one_bridge_keep_pods_from_each_other() {
    for (from, to, master, is_found) in
        [(true, true, 4, true), (true, false, 4, false), (false, true, 4, false), (true, true, 5, false)]
    {
        let mut facts = healthy();
        let pod = pod(&mut facts).clone();
        let with =
            |isolated, master| Pod { host_link: Device { isolated, master, ..pod.host_link.clone() }, ..pod.clone() };
        let (from_pod, to_pod) = (Some(with(from, 4)), Some(with(to, master)));
        let way = Way { from_pod, to_pod, ..facts.ways.remove(0) };
        assert_eq!(isolated(&way).is_some(), is_found, "{from} {to} {master}");
    }
}

#[test]
fn a_packet_to_the_outside_with_the_address_of_a_pod_is_a_doubt_unless_a_rule_may_masquerade_it() {
    let stays = "iptables-nft nat POSTROUTING: the source address stays";
    let doubtful = "iptables-nft nat POSTROUTING: the source address stays; not evaluated: -m set";
    let translated = "iptables-nft nat POSTROUTING: the source address is translated: -j MASQUERADE";
    let of_agent = "nft chain ip weft masq: the source address stays";
    for (ipmasq, rules, verdict) in [
        (true, &[stays][..], Verdict::Unknown),
        (false, &[stays], Verdict::Works),
        (true, &[stays, translated], Verdict::Works),
        (true, &[doubtful], Verdict::Works),
        (true, &[of_agent], Verdict::Works),
        (true, &[], Verdict::Works),
    ] {
        let text = format!(
            "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ={ipmasq}\n"
        );
        let mut facts = healthy();
        facts.subnet_file = SubnetFile::Good(SubnetEnv::parse(&text).unwrap());
        facts.to = Place::Outside;
        let rules = rules.iter().map(|text| Step::ok("rules", *text)).collect();
        let report = decide(&facts, &[rules], Vec::new());
        assert_eq!(report.verdict, verdict, "{ipmasq}: {report:#?}");
    }
}

#[test]
fn a_bridge_without_ports_carries_nothing_and_a_tunnel_needs_no_carrier() {
    broken("cni0 has no carrier", |facts| facts.ways[0].arrives.as_mut().unwrap().carrier = false);
    broken("cni0 is down", |facts| facts.ways[0].arrives.as_mut().unwrap().up = false);
    let tunnel = explain(|facts| facts.ways[0].arrives = Some(Device { carrier: false, ..vxlan() }));
    assert_eq!(tunnel.verdict, Verdict::Works, "{tunnel:#?}");
}

#[test]
fn a_service_without_an_endpoint_ends_the_way_and_one_that_is_left_open_counts_after_a_fault() {
    let (sound, lost) = (explain(|_| {}), explain(|facts| facts.to = Place::Network));
    let known = Step::ok("service", "10.96.0.1 becomes 10.5.2.2");
    let open = Step { state: State::Unknown, ..known.clone() };
    let gone = known.clone().broken("it has no endpoint", "look at its pods");
    for (before, service, verdict, part) in [
        (&sound, &known, Verdict::Works, "works as far"),
        (&sound, &open, Verdict::Unknown, "cannot be decided here, because 10.96.0.1 becomes"),
        (&sound, &gone, Verdict::Broken, "it has no endpoint"),
        (&lost, &open, Verdict::Broken, "no node has a lease"),
        (&lost, &gone, Verdict::Broken, "it has no endpoint"),
    ] {
        let report = before.clone().behind(service.clone());
        assert!(report.verdict == verdict && report.sentence.contains(part), "{report:#?}");
        assert_eq!(report.steps[0], *service);
    }
}

#[test]
fn a_packet_passes_the_hooks_of_its_way_and_before_the_routing_decision_nobody_knows_how_it_leaves() {
    let mut way = healthy().ways.remove(0);
    assert_eq!(way.hooks(), [Hook::Prerouting, Hook::Forward, Hook::Postrouting]);
    for (hook, output) in [(Hook::Prerouting, None), (Hook::Forward, Some("flannel.1"))] {
        let tested = way.tested().at(hook);
        assert_eq!((tested.input, tested.output, tested.to_local), (Some("cni0"), output, Some(false)), "{hook:?}");
    }
    way.hop.device = None;
    assert_eq!(way.hooks(), [Hook::Prerouting, Hook::Input]);
    assert_eq!(way.tested().to_local, Some(true));
    way.arrives = None;
    assert_eq!(way.hooks(), [Hook::Output, Hook::Postrouting]);
}

#[test]
fn without_an_agent_the_kernel_alone_decides_and_what_is_missing_is_said() {
    let silent = |facts: &mut Facts| {
        facts.agent = Agent::Silent("no agent answers on /run/flannel/weft.sock".to_owned());
        facts.to = Place::Network;
    };
    let report = explain(silent);
    assert_eq!(report.verdict, Verdict::Works, "{report:#?}");
    let lease = &report.steps[1];
    assert!(lease.state == State::Unknown && lease.is.contains("weft.sock"), "{lease:?}");
    broken("no FDB entry", |facts| {
        silent(facts);
        facts.ways[0].tunnel.as_mut().unwrap().fdb = Some(Read::Missing);
    });
    let report = explain(|facts| facts.ways.clear());
    assert_eq!(report.verdict, Verdict::Unknown);
    assert_eq!(report.remedy.as_deref(), Some("run on the node 192.168.0.2: weft explain 10.5.1.2 10.5.2.2"));
}

#[test]
fn what_the_probes_of_the_agent_found_counts_after_everything_that_the_kernel_shows() {
    let unreachable = |facts: &mut Facts| {
        let Place::Peer(peer) = &mut facts.to else { unreachable!() };
        (peer.state, peer.reason) = ("unreachable".to_owned(), Some("a firewall drops UDP port 8472".to_owned()));
    };
    broken("a firewall drops UDP port 8472", unreachable);
    // The node itself may be reached anyway: the fault is in the tunnel.
    let to_the_node = explain(|facts| {
        unreachable(facts);
        facts.packet.to = "192.168.0.2".parse().unwrap();
        let way = &mut facts.ways[0];
        way.packet = facts.packet;
        way.hop = way.tunnel.take().unwrap().outer.unwrap();
    });
    assert_eq!(to_the_node.verdict, Verdict::Works, "{to_the_node:#?}");
    // A rule that was read is no guess, although its step comes later.
    let mut facts = healthy();
    unreachable(&mut facts);
    let rule = Step::ok("tunnel rules", "").broken("INPUT drops the packet", "iptables -F INPUT");
    let report = decide(&facts, &[], vec![rule]);
    assert_eq!(report.sentence, "broken here, because INPUT drops the packet");
    assert_eq!(report.remedy.as_deref(), Some("iptables -F INPUT"));
    broken("eth0", |facts| {
        unreachable(facts);
        outer(facts).neighbour = neighbour(libc::NUD_FAILED);
    });
}

/// Returns what FORWARD does with a packet to a TCP port.
fn forward(policy: &str, rules: &[&str]) -> Step {
    forward_to(None, policy, rules)
}

/// Returns what FORWARD does with a packet of which it is known, or not, whether it is for this host.
fn forward_to(to_local: Option<bool>, policy: &str, rules: &[&str]) -> Step {
    let mut text = format!("*filter\n:FORWARD {policy} [0:0]\n");
    for rule in rules {
        let (chain, rule) = rule.split_once(": ").unwrap_or(("FORWARD", rule));
        let name = if chain == "FORWARD" { "FORWARD" } else { "X" };
        text += &format!("-A {name} {rule}\n");
    }
    let packet = Packet { proto: Some(Proto::Tcp), port: Some(80), ..packet() };
    let tested = Tested { to_local, ..Tested::new(&packet, Some("cni0"), Some("flannel.1")) };
    let saved = Saved::parse(&text);
    follow(saved.table("filter").unwrap(), "FORWARD", tested).step("FORWARD", "remedy")
}

#[test]
fn rules_of_iptables_are_followed_as_far_as_they_can_be_evaluated() {
    for (state, policy, rules, quoted) in [
        (State::Ok, "ACCEPT", &[][..], "policy ACCEPT"),
        (State::Broken, "DROP", &[], "policy DROP of FORWARD"),
        (State::Ok, "DROP", &["-s 10.5.0.0/16 -j ACCEPT"], "-A FORWARD -s 10.5.0.0/16 -j ACCEPT"),
        (State::Ok, "DROP", &["-i cni+ -o flannel.1 -j ACCEPT"], "-i cni+"),
        (State::Broken, "DROP", &["! -s 10.5.0.0/16 -j ACCEPT", "-i eth0 -j ACCEPT"], "policy DROP"),
        (State::Broken, "ACCEPT", &["-j X", "X: -p tcp -m tcp --dport 80 -j REJECT --reject-with x"], "-A X -p tcp"),
        (State::Ok, "ACCEPT", &["-p tcp -m multiport --dports 81,90:99 -j DROP", "-p udp -j DROP"], "policy"),
        (State::Ok, "ACCEPT", &["-j X", "X: -j RETURN", "X: -j DROP"], "policy ACCEPT"),
        (State::Broken, "DROP", &["-g X", "-j ACCEPT", "X: -s 10.9.0.0/16 -j ACCEPT"], "policy DROP"),
        (State::Broken, "DROP", &["-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"], "policy DROP"),
        (State::Ok, "ACCEPT", &["-m conntrack --ctstate INVALID -j DROP"], "policy ACCEPT"),
        (State::Ok, "ACCEPT", &["-m comment --comment \"-j DROP all\" -j LOG"], "policy ACCEPT"),
        (State::Unknown, "ACCEPT", &["-m set --match-set bad src -j DROP"], "not evaluated: -A FORWARD -m set"),
        (State::Doubt, "DROP", &["-m set --match-set good src -j ACCEPT"], "not evaluated: -A FORWARD -m set"),
        (State::Broken, "DROP", &["-m mark --mark 0x1/0x1 -j ACCEPT"], "policy DROP"),
        (
            State::Doubt,
            "DROP",
            &["-j MARK --set-xmark 0x1/0x1", "-m mark --mark 0x1/0x1 -j ACCEPT"],
            "not evaluated: -A FORWARD -m mark",
        ),
        (State::Doubt, "DROP", &["-m mark ! --mark 0x1 -m set --match-set a src -j X", "X: -j ACCEPT"], "-A X"),
        // Both rules may match: the packet may pass, or not.
        (
            State::Doubt,
            "DROP",
            &["-m set --match-set a src -j ACCEPT", "-m set --match-set b src -j DROP"],
            "not evaluated: -A FORWARD -m set --match-set a",
        ),
        // What comes after a rule that may have left the chain is not certain. ufw has such rules.
        (
            State::Unknown,
            "ACCEPT",
            &["-j X", "X: -m addrtype --dst-type LOCAL -j RETURN", "X: -j DROP"],
            "not evaluated: -A X -j DROP",
        ),
        (State::Doubt, "DROP", &["-m set --match-set a src -j RETURN", "-j ACCEPT"], "not evaluated: -A FORWARD -j"),
        (
            State::Unknown,
            "ACCEPT",
            &["-m set --match-set a src -g X", "-j DROP", "X: -s 10.9.0.0/16 -j DROP"],
            "-j DROP",
        ),
        // A rule of the chain that called is as certain as before.
        (State::Broken, "ACCEPT", &["-j X", "-j DROP", "X: -m set --match-set a src -j RETURN"], "-A FORWARD -j DROP"),
        // Calico marks the packets that a policy accepts.
        (
            State::Unknown,
            "ACCEPT",
            &[
                "-j X",
                "X: -m mark --mark 0x0/0x20000 -j MARK --set-xmark 0x10000/0x10000",
                "X: -m comment --comment \"Return if profile accepted\" -m mark --mark 0x10000/0x10000 -j RETURN",
                "X: -m comment --comment \"Drop if no profiles matched\" -j DROP",
            ],
            "not evaluated: -A X -m comment --comment \"Drop if no profiles matched\"",
        ),
    ] {
        let step = forward(policy, rules);
        assert_eq!(step.state, state, "{rules:?}: {step:?}");
        assert!(step.is.contains(quoted), "{rules:?}: {step:?}");
    }
}

#[test]
fn a_rule_that_drops_at_random_or_by_a_rate_is_a_doubt_if_its_other_tests_match() {
    for (state, rule) in [
        (State::Doubt, "-p tcp -m tcp --dport 80 -m statistic --mode random --probability 0.5 -j DROP"),
        (State::Doubt, "-m hashlimit --hashlimit-above 9/sec --hashlimit-mode srcip --hashlimit-name a -j DROP"),
        (State::Doubt, "-s 10.5.0.0/16 -m limit --limit 9/sec -j DROP"),
        (State::Ok, "-p udp -m statistic --mode random ! --probability 0.5 -j DROP"),
        (State::Unknown, "-m set --match-set a src -m limit --limit 9/sec -j DROP"),
    ] {
        let step = forward("ACCEPT", &[rule]);
        assert_eq!(step.state, state, "{rule}: {step:?}");
    }
}

#[test]
fn a_rule_that_hands_packets_to_a_program_is_not_known_to_let_them_pass() {
    for target in ["NFQUEUE --queue-num 1", "TPROXY --on-port 1", "SYNPROXY"] {
        let step = forward("ACCEPT", &[&format!("-i cni0 -j {target}")]);
        assert!(step.state == State::Unknown && step.is.contains(target), "{step:#?}");
        let step = forward("DROP", &[&format!("-i cni0 -j {target}")]);
        assert!(step.state == State::Doubt && step.is.contains(target), "{step:#?}");
        assert_eq!(forward("ACCEPT", &[&format!("-i eth9 -j {target}")]).state, State::Ok);
    }
}

#[test]
fn the_kind_of_the_destination_is_tested_where_it_is_known() {
    let ufw = [
        "-j X",
        "X: -m addrtype --dst-type LOCAL -j RETURN",
        "X: -m addrtype --dst-type MULTICAST,BROADCAST -j RETURN",
        "X: -j DROP",
    ];
    let forwarded = ["-m addrtype ! --dst-type UNICAST -j DROP", "-m addrtype --dst-type LOCAL -j DROP"];
    for (to_local, rules, state) in [
        (true, &ufw[..], State::Ok),
        (false, &ufw, State::Broken),
        (false, &forwarded, State::Ok),
        (true, &forwarded, State::Broken),
    ] {
        let step = forward_to(Some(to_local), "ACCEPT", rules);
        assert_eq!(step.state, state, "{to_local} {rules:?}: {step:?}");
        assert!(!step.is.contains("not evaluated"), "{step:?}");
    }
}

#[test]
fn chains_that_jump_to_themselves_and_very_long_ones_end() {
    assert_eq!(forward("ACCEPT", &["-j X", "X: -j X", "X: -j X"]).state, State::Unknown);
    let many = vec!["-s 10.9.0.0/16 -j DROP"; 200_001];
    let step = forward("ACCEPT", &many);
    assert!(step.state == State::Unknown && step.is.contains("everything after 200000 rules"), "{step:?}");
}
