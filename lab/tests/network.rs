// SPDX-License-Identifier: Apache-2.0
//! What the lab writes and reads with netlink, compared with what iproute2 shows and writes. Needs root and iproute2.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy exempts only the tests themselves"
)]

use std::net::IpAddr;
use std::path::Path;

use anyhow::Result;
use nix::mount::{MsFlags, mount};
use weft_lab::cluster::Lab;
use weft_lab::fault::entries;
use weft_lab::netns::{Netns, make_names_private};
use weft_lab::network::VethEnd;
use weft_lab::options::LabOptions;
use weft_lab::store::StoreKind;

/// Runs a test in a thread with a private directory of namespace names.
fn in_private<T: Future<Output = Result<()>>>(test: impl FnOnce() -> T + Send + 'static) {
    let run = || {
        make_names_private().expect("these tests need root");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test()).unwrap();
    };
    if let Err(panic) = std::thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

/// Creates a namespace. These tests start no process inside it, so there is no program for that.
async fn namespace(name: &str) -> Result<Netns> {
    Netns::add(name, Path::new("/nonexistent")).await
}

#[test]
fn links_addresses_and_routes_are_as_iproute2_shows_them() {
    in_private(|| async {
        let (fabric, node) = (namespace("fabric").await?, namespace("node").await?);
        fabric.network()?.add_bridge("br0", Some(1400)).await?;
        // The node has an eth0 already, as a node of a lab has when its pods get theirs.
        fabric.ip("link add eth0 type bridge").await?;
        fabric.network()?.add_port("node", "br0", VethEnd { ns: &node.path(), name: "eth0" }, Some(1400)).await?;
        let port = fabric.ip("-d link show node").await?;
        for word in ["mtu 1400", "master br0", "veth", ",UP"] {
            assert!(port.contains(word), "{word}: {port}");
        }
        let network = node.network()?;
        network.add_address("eth0", "10.9.0.2/24".parse()?).await?;
        network.add_address("eth0", "fd09::2/64".parse()?).await?;
        network.set_up("eth0").await?;
        let addresses = node.ip("addr show dev eth0").await?;
        for word in ["mtu 1400", "inet 10.9.0.2/24", "inet6 fd09::2/64 scope global nodad", ",UP"] {
            assert!(addresses.contains(word), "{word}: {addresses}");
        }
        // The second time replaces the route.
        for gateway in ["10.9.0.3", "10.9.0.1", "fd09::3", "fd09::1"] {
            network.replace_default_route("eth0", gateway.parse()?).await?;
        }
        assert!(node.ip("route show default").await?.starts_with("default via 10.9.0.1 dev eth0"));
        assert!(node.ip("-6 route show default").await?.starts_with("default via fd09::1 dev eth0"));
        node.sysctl(&["ipv4/ip_forward=1"])?;
        assert!(node.sysctl(&["ipv4/no_such_setting=1"]).is_err());
        network.set_down("eth0").await?;
        assert!(!node.ip("link show eth0").await?.contains(",UP"));
        network.delete_link("eth0").await?;
        assert!(network.delete_link("eth0").await.unwrap_err().to_string().contains("eth0"));
        Ok(())
    });
}

#[test]
fn the_entries_that_others_add_are_read_and_deleted() {
    in_private(|| async {
        let node = namespace("node").await?;
        for words in [
            "link add flannel.1 type vxlan id 1 dstport 8472 nolearning",
            "link add flannel-v6.1 type vxlan id 1 local fd77::11 dstport 8472 nolearning",
            "link add other type bridge",
            "addr add 10.5.1.0/32 dev flannel.1",
            "link set flannel.1 up",
            "route add 10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink proto 90",
            "nexthop add id 7 via 10.5.3.0 dev flannel.1 onlink",
            "route add 10.5.3.0/24 nhid 7 proto 90",
            "route add fd05:2::/64 via fd05:2:: dev flannel.1 onlink proto 90",
            "route add 10.6.0.0/16 dev flannel.1 table 77",
            "route add default dev flannel.1",
            "neigh add 10.5.2.0 lladdr 0a:00:00:00:00:02 dev flannel.1 nud permanent",
            "neigh add fd05:2:: lladdr 0a:00:00:00:00:02 dev flannel.1 nud permanent",
            "neigh add 10.5.9.0 lladdr 0a:00:00:00:00:09 dev flannel.1 nud reachable",
        ] {
            node.ip(words).await?;
        }
        node.bridge("fdb append 0a:00:00:00:00:02 dev flannel.1 dst 192.168.77.12").await?;
        node.bridge("fdb append 0a:00:00:00:00:03 dev flannel-v6.1 dst fd77::12").await?;
        let found = entries(&node).await?;
        let texts: Vec<&str> = found.iter().map(String::as_str).collect();
        for begin in [
            "fdb 0a:00:00:00:00:02 dev flannel.1 dst 192.168.77.12 permanent",
            "fdb 0a:00:00:00:00:03 dev flannel-v6.1 dst fd77::12 permanent",
            "neigh 10.5.2.0 dev flannel.1 lladdr 0a:00:00:00:00:02",
            "neigh fd05:2:: dev flannel.1 lladdr 0a:00:00:00:00:02",
            "route 10.5.2.0/24 unicast via 10.5.2.0 dev flannel.1",
            "route 10.5.3.0/24 unicast via 10.5.3.0 dev flannel.1",
            "route fd05:2::/64 unicast",
        ] {
            assert_eq!(texts.iter().filter(|text| text.starts_with(begin)).count(), 1, "{begin}: {texts:#?}");
        }
        assert!(!texts.iter().any(|text| text.contains("10.6.0.0") || text.contains("10.5.9.0")), "{texts:#?}");
        assert!(!texts.iter().any(|text| text.contains("nhid") || text.contains("/0 ")), "{texts:#?}");

        let network = node.network()?;
        assert_eq!(network.route_to("10.5.3.9".parse::<IpAddr>()?).await?, "10.5.3.0/24".parse()?);
        assert_eq!(network.route_to("fd05:2::9".parse::<IpAddr>()?).await?, "fd05:2::/64".parse()?);
        for subnet in ["10.5.2.0/24", "10.5.3.0/24", "fd05:2::/64"] {
            network.delete_route(subnet.parse()?).await?;
            assert!(network.delete_route(subnet.parse()?).await.is_err(), "{subnet} was deleted already");
        }
        for entry in network.fdb().await? {
            network.delete_fdb_entry(&entry).await?;
        }
        assert_eq!(network.fdb().await?, []);
        let left = entries(&node).await?;
        assert!(left.iter().all(|text| text.starts_with("neigh ")), "{left:#?}");
        Ok(())
    });
}

#[test]
fn a_machine_without_ipv6_gets_a_lab_of_ipv4_alone() {
    in_private(|| async {
        // What ipv6.disable=1 leaves of this directory.
        mount(Some("none"), "/proc/sys/net/ipv6", Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
        let exe = Some("/nonexistent".into());
        let options = LabOptions { nodes: 2, router: true, store: StoreKind::Dir, exe, ..LabOptions::default() };
        let lab = Lab::build(&options).await?;
        for node in &lab.nodes {
            assert!(matches!(node.uplink[..], [IpAddr::V4(_)]), "{:?}", node.uplink);
            let addresses = node.ns.ip("-6 address show dev eth0 scope global").await?;
            assert_eq!(addresses, "");
            assert_eq!(node.ns.ip("-6 route show default").await?, "");
            assert!(node.ns.ip("route show default").await?.starts_with("default via 192.168.7"));
            let settings = node.ns.ip("-6 netconf show dev eth0").await?;
            assert!(settings.contains("eth0 forwarding off"), "{settings}");
        }
        assert!(!lab.fabric.ip("-6 address show scope global").await?.contains("fd77"));
        let refused = LabOptions { ipv6: true, ..options }.check().unwrap_err().to_string();
        assert!(refused.contains("no IPv6") && refused.contains("leave --ipv6 out"), "{refused}");
        Ok(())
    });
}
