// SPDX-License-Identifier: Apache-2.0
//! hostPort for routed pods, with Debian's portmap plugin chained behind them.

use std::cell::Cell;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;

use serde_json::{Value, json};
use weft_netlink::rtnl::in_netns;

use crate::site::{Site, nat_rules, on_a_node, wait_for};
use crate::verbs::chain;

const PORT: u16 = 8080;

/// Connects the node to an external host, which has no route to the pods.
fn world(site: &Site) {
    site.pod("world");
    site.ip("link add up0 type veth peer name far0 netns world");
    for (space, link, n) in [("", "up0", 1), ("-n world ", "far0", 2)] {
        site.ip(&format!("{space}addr add 192.0.2.{n}/24 dev {link}"));
        site.ip(&format!("{space}addr add 2001:db8::{n}/64 dev {link} nodad"));
        site.ip(&format!("{space}link set {link} up"));
    }
}

pub fn in_pod<T>(pod: &str, work: impl FnOnce() -> T) -> T {
    let netns = File::open(format!("/run/netns/{pod}")).unwrap();
    in_netns(netns.as_fd(), work).unwrap()
}

/// Connects to a port of the node and returns the client's address as the pod sees it.
#[track_caller]
fn visit(from: Option<&str>, to: &str, server: &TcpListener) -> IpAddr {
    let to = SocketAddr::new(to.parse().unwrap(), PORT);
    let connect = || TcpStream::connect_timeout(&to, Duration::from_secs(10));
    let connected = match from {
        Some(pod) => in_pod(pod, connect),
        None => connect(),
    };
    let mut client = connected.unwrap_or_else(|error| panic!("{from:?} to {to}: {error}"));
    client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let accepted = Cell::new(None);
    wait_for("the pod to get the connection", || server.accept().map(|one| accepted.set(Some(one))).is_ok());
    let (mut served, seen) = accepted.into_inner().unwrap();
    served.write_all(b"here").unwrap();
    drop(served);
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    assert_eq!(text, "here", "{from:?} to {to}");
    seen.ip().to_canonical()
}

/// Returns all rules of both families. The chains that all pods share stay when they are empty.
fn rules() -> Vec<String> {
    let all = ["iptables", "ip6tables"].map(nat_rules);
    all.iter().flat_map(|text| text.lines()).map(str::to_owned).collect()
}

fn plugins(site: &Site, host_port: u16) -> [Value; 2] {
    let ports = json!({"portMappings": [{"hostPort": host_port, "containerPort": 80, "protocol": "tcp"}]});
    [
        site.conf(json!({"delegate": {"type": "weft-veth"}})),
        json!({"type": "portmap", "runtimeConfig": ports, "snat": true}),
    ]
}

fn address(result: &Value, v6: bool) -> IpAddr {
    let mut all = result["ips"].as_array().unwrap().iter().map(|ip| ip["address"].as_str().unwrap());
    all.find(|addr| addr.contains(':') == v6).unwrap().split('/').next().unwrap().parse().unwrap()
}

#[test]
fn a_host_port_is_forwarded_to_a_routed_pod() {
    on_a_node(|site| {
        world(&site);
        // The rules of another pod must not change.
        site.pod("p0");
        let other = address(&chain(&site, "ADD", "p0", &plugins(&site, PORT + 1)), false);
        let before = rules();
        for _ in 0..2 {
            site.pod("p1");
            let plugins = plugins(&site, PORT);
            let result = chain(&site, "ADD", "p1", &plugins);
            let (v4, v6) = (address(&result, false), address(&result, true));
            let server = in_pod("p1", || TcpListener::bind("[::]:80").unwrap());
            server.set_nonblocking(true).unwrap();
            // A client outside the node keeps its address.
            assert_eq!(visit(Some("world"), "192.0.2.1", &server).to_string(), "192.0.2.2");
            assert_eq!(visit(Some("world"), "2001:db8::1", &server).to_string(), "2001:db8::2");
            // The node uses its own address as the source. Connections to loopback, and those of the pod to itself, get
            // the node's address.
            assert_eq!(visit(None, "192.0.2.1", &server).to_string(), "192.0.2.1");
            assert_eq!(visit(None, "127.0.0.1", &server).to_string(), "192.0.2.1");
            assert_eq!(visit(None, "2001:db8::1", &server).to_string(), "2001:db8::1");
            assert_eq!(visit(Some("p1"), "192.0.2.1", &server).to_string(), "192.0.2.1");
            assert_eq!(visit(Some("p0"), "192.0.2.1", &server), other);
            for addr in [v4, v6] {
                assert!(rules().iter().any(|rule| rule.contains(&addr.to_string())), "{addr}: {:#?}", rules());
            }
            chain(&site, "DEL", "p1", &plugins);
            assert_eq!(rules(), before, "DEL must remove the pod's rules");
            let to = SocketAddr::new("192.0.2.1".parse().unwrap(), PORT);
            let refused = in_pod("world", || TcpStream::connect_timeout(&to, Duration::from_secs(10))).unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "the port must be closed after DEL");
            site.ip("netns del p1");
        }
        chain(&site, "DEL", "p0", &plugins(&site, PORT + 1));
        assert!(!rules().iter().any(|rule| rule.contains("CNI-DN-")), "{:#?}", rules());
        assert_eq!(site.files("records"), Vec::<String>::new());
        assert_eq!(site.addresses(), Vec::<String>::new());
    });
}
