// SPDX-License-Identifier: Apache-2.0
//! The problems that are reported about sysctls which the agent may not write, for uplinks with and without routes from router
//! advertisements.

use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use nix::net::if_::if_nametoindex;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn6, bind, sendto, setsockopt, socket, sockopt,
};
use weft::kernel::sysctl::ensure;
use weft::observe::problem::{Problem, ProblemKind};
use weft::plan::Plan;
use weft::sysctls;
use weft::sysctls::loosened::{Loosened, Wanted};
use weft_backends::host::{Host, OnLink, Uplink};
use weft_backends::register::make;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::lease::{Age, Lease};
use weft_subnet::net_conf::NetConf;

use crate::patience::PATIENCE;

use super::adapter_net::{add_uplink, alone, ip, name};

const ACCEPT_RA: &str = "net/ipv6/conf/up0/accept_ra";
const FORWARDING: &str = "net/ipv6/conf/all/forwarding";

/// Returns the plan of a node with both families on up0.
fn plan() -> Plan {
    let conf = r#"{"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48","Backend":{"Type":"host-gw"}}"#;
    let net_conf = NetConf::parse(conf).unwrap();
    let uplink = Uplink { name: name("up0"), mtu: 1500, v4: "10.0.0.1".parse().ok(), v6: "fd00::1".parse().ok() };
    let (public_v4, public_v6) = (uplink.v4, uplink.v6);
    let (routes, connected) = (OnLink::default(), Default::default());
    let (wireguard_port, kept_ports, identities) = Default::default();
    let host = Host { uplink, public_v4, public_v6, wireguard_port, kept_ports, identities, routes, connected };
    let subnets = Subnets { v4: "10.5.1.0/24".parse().ok(), v6: "fd05:0:0:1::/64".parse().ok() };
    let own = Lease { id: subnets.to_key().into(), subnets, attrs: Attrs::default(), age: Age::default() };
    let backend = make(&net_conf).unwrap();
    Plan::new(net_conf, backend, host, own)
}

fn set(path: &str, value: &str) {
    ensure(path, value, true).unwrap();
}

/// A router at the other end of a link, `far0` for `up0`.
struct Router {
    socket: OwnedFd,
    index: u32,
}

impl Router {
    fn new(link: &str, far: &str) -> Router {
        ip(&format!("addr add fe80::99/64 dev {far} nodad"));
        // The kernel must accept advertisements that were sent by this host.
        set(&format!("net/ipv6/conf/{link}/accept_ra_from_local"), "1");
        let index = if_nametoindex(far).unwrap();
        let (raw, icmp) = (SockType::Raw, SockProtocol::IcmpV6);
        let socket = socket(AddressFamily::Inet6, raw, SockFlag::SOCK_CLOEXEC, icmp).unwrap();
        let from = SocketAddrV6::new("fe80::99".parse().unwrap(), 0, 0, index);
        bind(socket.as_raw_fd(), &SockaddrIn6::from(from)).unwrap();
        // RFC 4861 section 6.1.2: an advertisement that was forwarded by a router is ignored.
        setsockopt(&socket, sockopt::Ipv6MulticastHops, &255).unwrap();
        Router { socket, index }
    }

    /// Advertises itself as the default router for half an hour, and fd99::/64 as on-link for an hour.
    fn advertise(&self) {
        // RFC 4861 section 4.2: type, code, checksum (by the kernel), hop limit, flags, lifetime, two timers.
        let mut message = vec![134, 0, 0, 0, 64, 0];
        message.extend(1800_u16.to_be_bytes());
        message.extend([0; 8]);
        // Section 4.6.2: type, length, prefix length, on-link and autonomous, valid, preferred, reserved, prefix.
        message.extend([3, 4, 64, 0xc0]);
        message.extend([3600_u32, 3600, 0].map(u32::to_be_bytes).concat());
        message.extend("fd99::".parse::<Ipv6Addr>().unwrap().octets());
        let to = SocketAddrV6::new("ff02::1".parse().unwrap(), 0, 0, self.index);
        sendto(self.socket.as_raw_fd(), &message, &SockaddrIn6::from(to), MsgFlags::empty()).unwrap();
    }
}

fn default_route() -> String {
    ip("-6 route show default dev up0")
}

/// A node may have its default route on another link than the uplink (`--iface`).
#[test]
fn the_default_route_of_another_link_stays_when_forwarding_is_turned_on() {
    alone(|| {
        ip("link set lo up");
        add_uplink();
        for words in ["link add lan0 type veth peer name router0", "link set lan0 up", "link set router0 up"] {
            ip(words);
        }
        let (plan, router) = (plan(), Router::new("lan0", "router0"));
        let (accept_ra, idle) = ("net/ipv6/conf/lan0/accept_ra", "net/ipv6/conf/far0/accept_ra");
        let default_route = || ip("-6 route show default dev lan0");
        set("net/ipv4/ip_forward", "1");
        set(FORWARDING, "0");
        set(ACCEPT_RA, "2");
        set(accept_ra, "1");
        set(idle, "1");
        // The router hears its own advertisements.
        set("net/ipv6/conf/router0/accept_ra", "0");
        let deadline = Instant::now() + PATIENCE;
        while !default_route().contains("proto ra") {
            assert!(Instant::now() < deadline, "no route of a router advertisement:\n{}", ip("-6 route"));
            router.advertise();
        }
        let problems = sysctls::ensure(&plan, false);
        let [first, second] = &problems[..] else { panic!("{problems:?}") };
        assert!(
            first.text.contains(&format!("it is 1; run: sysctl -w {accept_ra}=2 (forwarding makes")),
            "{problems:?}"
        );
        assert!(second.text.contains(&format!("run: sysctl -w {FORWARDING}=1")), "{problems:?}");

        assert_eq!(sysctls::ensure(&plan, true), [], "written");
        let read = |path: &str| std::fs::read_to_string(format!("/proc/sys/{path}")).unwrap().trim().to_owned();
        assert_eq!((read(FORWARDING).as_str(), read(accept_ra).as_str()), ("1", "2"));
        assert!(default_route().contains("proto ra"), "{}", ip("-6 route"));
        assert_eq!(read(idle), "1", "it has no route of a router advertisement");
    });
}

#[test]
fn routes_that_expire_because_of_forwarding_are_reported() {
    alone(|| {
        ip("link set lo up");
        add_uplink();
        let (plan, router) = (plan(), Router::new("up0", "far0"));
        set("net/ipv4/ip_forward", "1");
        set(ACCEPT_RA, "1");
        set(FORWARDING, "1");
        assert_eq!(sysctls::ensure(&plan, false), [], "no route of a router advertisement");

        set(FORWARDING, "0");
        let deadline = Instant::now() + PATIENCE;
        while !default_route().contains("proto ra") {
            assert!(Instant::now() < deadline, "no route of a router advertisement:\n{}", ip("-6 route"));
            router.advertise();
        }
        // Another program turns it on.
        set(FORWARDING, "1");
        assert_eq!(default_route(), "", "the kernel drops it at once, and the prefix when it expires");
        let problems = sysctls::ensure(&plan, false);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].text.contains(&format!("it is 1; run: sysctl -w {ACCEPT_RA}=2 (")), "{problems:?}");
        assert_eq!(problems[0].command, Some(format!("sysctl -w {ACCEPT_RA}=2")), "the reason is no part of it");

        assert_eq!(sysctls::ensure(&plan, true), [], "written");
        while !default_route().contains("proto ra") {
            assert!(Instant::now() < deadline, "still ignored:\n{}", ip("-6 route"));
            router.advertise();
        }
        assert_eq!(sysctls::ensure(&plan, false), [], "the value is right");
        set(ACCEPT_RA, "1");
        assert_eq!(sysctls::ensure(&plan, false), problems, "the route is still there, until it expires");
    });
}

#[test]
fn forwarding_is_turned_on_for_the_families_of_the_network() {
    alone(|| {
        ip("link set lo up");
        add_uplink();
        let (plan, v4) = (plan(), "net/ipv4/ip_forward");
        let read = |path: &str| std::fs::read_to_string(format!("/proc/sys/{path}")).unwrap().trim().to_owned();
        set(v4, "0");
        set(FORWARDING, "0");
        let problems = sysctls::ensure(&plan, false);
        for wanted in [v4, FORWARDING] {
            let command = Some(format!("sysctl -w {wanted}=1"));
            assert!(problems.iter().any(|problem| problem.command == command), "{problems:?}");
            assert_eq!(read(wanted), "0", "only compared");
        }
        assert_eq!(sysctls::ensure(&plan, true), []);
        assert_eq!((read(v4).as_str(), read(FORWARDING).as_str()), ("1", "1"));
    });
}

const FILTER: &str = "net/ipv4/conf/up0/rp_filter";

fn filter() -> String {
    std::fs::read_to_string(format!("/proc/sys/{FILTER}")).unwrap().trim().to_owned()
}

#[test]
fn rp_filter_gets_its_old_value_back_only_if_that_is_known() {
    alone(|| {
        ip("link set lo up");
        add_uplink();
        set("net/ipv4/conf/all/rp_filter", "0");
        set(FILTER, "1");
        let dir = tempfile::tempdir().unwrap();
        let (env, file) = (dir.path().join("subnet.env"), dir.path().join("subnet.env.rp_filter"));
        let wanted = Some(Wanted { names: vec![name("up0"), name("gone0")], why: "lease X uses host-gw".into() });

        let problems = Loosened::new(&env).ensure(wanted.as_ref(), false);
        assert_eq!((filter().as_str(), file.exists()), ("1", false), "only compared");
        assert!(problems[0].text.contains("it is 1; run: sysctl -w net/ipv4/conf/up0/rp_filter=2"), "{problems:?}");

        let problems = Loosened::new(&env).ensure(wanted.as_ref(), true);
        let said = "rp_filter is loosened to 2 while lease X uses host-gw; afterwards the agent sets it back: up0 1";
        let said = Problem::new(ProblemKind::Sysctl, said);
        assert_eq!((problems, filter().as_str()), (vec![said.clone()], "2"));
        // Another program makes it strict again. The old value is still the recorded one.
        set(FILTER, "1");
        assert_eq!(Loosened::new(&env).ensure(wanted.as_ref(), true), [said]);
        assert_eq!(filter(), "2");
        let problems = Loosened::new(&env).ensure(None, false);
        assert!(problems[0].text.contains("it is 2; run: sysctl -w net/ipv4/conf/up0/rp_filter=1"), "{problems:?}");
        assert_eq!(Loosened::new(&env).ensure(None, true), []);
        assert_eq!((filter().as_str(), file.exists()), ("1", false));

        // Another program has chosen another value since then, which stays.
        Loosened::new(&env).ensure(wanted.as_ref(), true);
        set(FILTER, "0");
        assert_eq!(Loosened::new(&env).ensure(None, true), []);
        assert_eq!((filter().as_str(), file.exists()), ("0", false));

        // An interface that was deleted and created again has another filter.
        set(FILTER, "1");
        Loosened::new(&env).ensure(wanted.as_ref(), true);
        ip("link del up0");
        ip("link add between0 type veth peer name between1");
        add_uplink();
        set(FILTER, "2");
        assert_eq!(Loosened::new(&env).ensure(None, true), []);
        assert_eq!((filter().as_str(), file.exists()), ("2", false));

        // If the record is damaged, nothing is set, and the file stays, so that a person can read it.
        std::fs::write(&file, "boot of another kind").unwrap();
        let mut loosened = Loosened::new(&env);
        let problems = loosened.ensure(None, true);
        assert!(
            problems.len() == 1
                && problems[0].text.contains("it is damaged")
                && problems[0].text.contains("then remove"),
            "{problems:?}"
        );
        assert_eq!((filter().as_str(), file.exists()), ("2", true));
        std::fs::remove_file(&file).unwrap();
        assert_eq!(loosened.ensure(None, true), []);

        // If the record cannot be written, this is reported. This agent nevertheless sets the value back.
        set(FILTER, "1");
        let mut loosened = Loosened::new(std::path::Path::new("/proc/no/subnet.env"));
        let problems = loosened.ensure(wanted.as_ref(), true);
        assert!(
            problems.len() == 2 && problems[1].text.contains("write /proc/no/subnet.env.rp_filter"),
            "{problems:?}"
        );
        assert_eq!((filter().as_str(), loosened.ensure(None, true).len()), ("2", 0));
        assert_eq!(filter(), "1");
    });
}

/// The interface is deleted and created again while its filter is loosened.
#[test]
fn rp_filter_is_read_again_if_the_interface_was_created_again() {
    alone(|| {
        ip("link set lo up");
        add_uplink();
        let dir = tempfile::tempdir().unwrap();
        let (env, file) = (dir.path().join("subnet.env"), dir.path().join("subnet.env.rp_filter"));
        let wanted = Some(Wanted { names: vec![name("up0")], why: "lease X uses host-gw".into() });
        set(FILTER, "0");
        set("net/ipv4/conf/all/rp_filter", "1");
        let mut loosened = Loosened::new(&env);
        loosened.ensure(wanted.as_ref(), true);
        assert_eq!(filter(), "2", "the stricter of \"all\" and the interface's own value counts");
        ip("link del up0");
        // The new interface gets another index.
        ip("link add between0 type veth peer name between1");
        add_uplink();
        set(FILTER, "1");
        let problems = loosened.ensure(wanted.as_ref(), true);
        assert!(problems[0].text.ends_with("up0 1") && filter() == "2", "{problems:?}");
        assert_eq!(loosened.ensure(None, true), []);
        assert_eq!((filter().as_str(), file.exists()), ("1", false));

        // A damaged record stays, so that a person can read it, although there is a new value to record.
        std::fs::write(&file, "boot of another kind").unwrap();
        Loosened::new(&env).ensure(wanted.as_ref(), true);
        assert_eq!(
            (filter().as_str(), std::fs::read_to_string(&file).unwrap().as_str()),
            ("2", "boot of another kind")
        );
    });
}
