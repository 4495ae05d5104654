// SPDX-License-Identifier: Apache-2.0
//! Devices: an MTU that the uplink cannot carry, devices of other agents, devices that no lease needs any more, interface names that
//! are not UTF-8, and rp_filter in a cluster with several backend types.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::process::Command;

use nix::net::if_::if_nametoindex;
use nix::sys::signal::{Signal, kill};
use serde_json::{Value as Json, json};
use weft_netlink::ethtool::has_tx_checksum;

use crate::site::{Kind, Lease, Site, array, bridge, devices, each, in_namespace, ip, run};

each! {
    checksum_offload_follows_the_flag: Vxlan VxlanDual;
}

/// Returns the value of a lease that differs from the others by its VNI.
fn with_vni(number: u32, vni: u32) -> Json {
    let mut value = Lease::new(number).value(Kind::Vxlan);
    value["BackendData"]["VNI"] = json!(vni);
    value
}

fn put(site: &Site, number: u32, value: &Json) {
    site.put(&Lease::new(number).key(Kind::Vxlan), &value.to_string());
}

fn remove(site: &Site, number: u32) {
    fs::remove_file(site.lease_file(&Lease::new(number).key(Kind::Vxlan))).unwrap();
}

fn configure(site: &Site, backend: &Json) {
    let config = json!({"Network": "10.5.0.0/16", "Backend": backend});
    fs::write(site.path("store/config.aside"), config.to_string()).unwrap();
    fs::rename(site.path("store/config.aside"), site.path("store/config.json")).unwrap();
}

fn problems(site: &Site) -> String {
    site.status().map(|status| status["problems"].to_string()).unwrap_or_default()
}

/// Returns the state of the peer with this number, and the reason.
fn peer(site: &Site, number: u32) -> (String, String) {
    let status = site.status().unwrap_or_default();
    let net = Lease::new(number).net(false);
    let row = status["peers"].as_array().into_iter().flatten().find(|row| row["subnet"] == json!(net)).cloned();
    let text = |key: &str| row.as_ref().and_then(|row| row[key].as_str()).unwrap_or_default().to_owned();
    (text("state"), text("reason"))
}

/// The flag turns the offload off on all devices, also on those that are made again. A restart without the flag turns it on.
fn checksum_offload_follows_the_flag(kind: Kind) {
    let is_on = |device: &str| has_tx_checksum(if_nametoindex(device).ok()?).ok();
    let all = |on| kind.devices().iter().all(|(device, _)| is_on(device) == Some(on));
    let mut site = Site::new(kind);
    site.flags = vec!["--tx-checksum-off".to_owned()];
    site.start();
    site.healed("the start");
    site.until("the offload to be off", |_| all(false));
    for (device, _) in kind.devices() {
        ip(&format!("link del {device}"));
    }
    site.healed("the devices are made again");
    site.until("the offload of the new devices to be off", |_| all(false));
    site.stop(Signal::SIGTERM);
    assert!(all(false), "the end of the agent changes nothing");
    site.flags.clear();
    site.start();
    site.until("the default to be restored", |_| all(true));
    site.healed("a restart without the flag");
}

/// Returns what an operator can see of a device: the link with its index and alias, addresses, FDB entries, neighbours and routes.
fn everything_of(dev: &str) -> String {
    let link = &array(&run("ip", &format!("-j -d link show {dev}")))[0];
    let link = ["ifindex", "mtu", "address", "ifalias", "flags", "linkinfo"].map(|key| link[key].to_string()).join(" ");
    let mut fdb: Vec<String> = bridge(&format!("fdb show dev {dev}")).lines().map(str::to_owned).collect();
    fdb.sort();
    let rest =
        [format!("-br -4 addr show dev {dev}"), format!("neigh show dev {dev}"), format!("route show dev {dev}")];
    let rest = rest.map(|line| ip(&line));
    format!("{link}\n{fdb:#?}\n{}", rest.join("\n"))
}

/// Makes a vxlan device as another program would, with an address, a neighbour, an FDB entry and a route on it.
fn strangers_device(vni: u32, alias: Option<&str>) -> String {
    let dev = format!("flannel.{vni}");
    ip(&format!(
        "link add {dev} address 02:00:00:00:07:07 mtu 1400 type vxlan id {vni} dev up0 local 10.0.0.1 dstport 8472 nolearning"
    ));
    if let Some(alias) = alias {
        assert!(Command::new("ip").args(["link", "set", &dev, "alias", alias]).status().unwrap().success());
    }
    ip(&format!("addr add 10.77.1.0/32 dev {dev}"));
    ip(&format!("link set {dev} up"));
    ip(&format!("neigh replace 10.77.2.0 lladdr 02:00:00:00:07:08 dev {dev} nud permanent"));
    bridge(&format!("fdb replace 02:00:00:00:07:08 dev {dev} dst 10.0.0.77 self permanent"));
    ip(&format!("route add 10.77.2.0/24 via 10.77.2.0 dev {dev} onlink"));
    dev
}

const ANOTHER: &str = "weft /run/another/subnet.env";

#[test]
fn a_backend_mtu_above_the_uplinks_is_cut_to_it_and_said() {
    in_namespace(|| {
        let mut site = Site::new(Kind::Vxlan);
        configure(&site, &json!({"Type": "vxlan", "MTU": 9000}));
        site.start();
        site.healed("a start with an MTU that the uplink does not carry");
        let said = "Backend.MTU in net-conf is 9000, but the uplink up0 carries 1500";
        assert!(problems(&site).contains(said), "{}", problems(&site));
        assert_eq!(site.log().matches(said).count(), 1, "{}", site.log());
        ip("link set up0 mtu 9000");
        site.mtu = 9000;
        site.healed("an uplink that carries it");
        assert!(!problems(&site).contains("Backend.MTU"), "{}", problems(&site));
    });
}

#[test]
fn an_mtu_that_the_kernel_refuses_holds_nothing_else_back() {
    in_namespace(|| {
        let mut site = Site::running(Kind::Vxlan);
        // An uplink with 100 bytes leaves 50 inside the tunnel. IPv4 needs an MTU of at least 68.
        ip("link set up0 mtu 100");
        site.until("the missing MTU in status", |site| {
            problems(site).contains("link flannel.1") && problems(site).contains("mtu 50")
        });
        let before = site.expected();
        site.put_peer(Lease::new(60));
        ip("link set flannel.1 address 02:00:00:00:44:44");
        // The line of the link is left out, because its MTU is refused.
        let rest =
            |site: &Site| site.expected().into_iter().filter(|line| !line.starts_with("link")).collect::<Vec<_>>();
        site.until("the new peer's entries", |site| {
            let observed = crate::site::observed();
            rest(site).iter().all(|line| observed.contains(line))
        });
        assert_ne!(before, site.expected());
        site.until("the MAC, which is not refused", |site| ip("link show flannel.1").contains(&site.own.mac(false)));
        ip("link set up0 mtu 1500");
        site.healed("an uplink that carries packets again");
    });
}

#[test]
fn a_device_is_made_although_its_mtu_is_refused() {
    in_namespace(|| {
        let mut site = Site::new(Kind::Vxlan);
        ip("link set up0 mtu 100");
        site.start();
        site.until("the entries", |site| {
            let observed = crate::site::observed();
            site.expected().iter().filter(|line| !line.starts_with("link")).all(|line| observed.contains(line))
        });
        site.until("the missing MTU in status", |site| problems(site).contains("mtu 50"));
        ip("link set up0 mtu 1500");
        site.healed("an uplink that carries packets");
    });
}

fn a_peer_asks_for_a_strangers_device(alias: Option<&str>) {
    let mut site = Site::running(Kind::Vxlan);
    let dev = strangers_device(7, alias);
    let before = everything_of(&dev);
    put(&site, 60, &with_vni(60, 7));
    site.until("the reason", |site| peer(site, 60).0 == "set-aside");
    let reason = peer(&site, 60).1;
    assert!(reason.contains("flannel.7") && reason.contains("not made by this agent"), "{reason}");
    // Neither another change of the lease nor a full pass changes the device.
    put(&site, 60, &with_vni(60, 7));
    ip("link set flannel.1 down");
    site.until("the own device to be mended", |_| ip("link show flannel.1").contains(",UP"));
    assert_eq!(everything_of(&dev), before, "{}", site.log());
    site.stop(Signal::SIGTERM);
    site.start();
    site.until("the reason after a restart", |site| peer(site, 60).0 == "set-aside");
    assert_eq!(everything_of(&dev), before, "after a restart:\n{}", site.log());
    // When its owner has removed it, the agent makes a device for the peer.
    ip("link del flannel.7");
    site.until("the peer to be reached", |site| peer(site, 60).0 == "programmed");
    assert!(ip("route show 10.5.60.0/24").contains("dev flannel.7"), "{}", ip("route"));
    // The device is deleted, and another program makes one with this name before the agent can look.
    kill(site.pid(), Signal::SIGSTOP).unwrap();
    ip("link del flannel.7");
    strangers_device(7, alias);
    put(&site, 61, &with_vni(61, 7));
    kill(site.pid(), Signal::SIGCONT).unwrap();
    site.until("the reason again", |site| peer(site, 60).0 == "set-aside");
    site.until("a full pass", |site| peer(site, 61).0 == "set-aside");
    let lines = |text: &str| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(lines(&everything_of(&dev)), lines(&before), "nothing of ours is on it:\n{}", site.log());
    remove(&site, 60);
    remove(&site, 61);
    ip("link del flannel.7");
    site.healed("the end of both");
}

#[test]
fn a_peer_cannot_seize_another_agents_device() {
    in_namespace(|| a_peer_asks_for_a_strangers_device(Some(ANOTHER)));
}

#[test]
fn a_peer_cannot_seize_a_device_without_any_alias() {
    in_namespace(|| a_peer_asks_for_a_strangers_device(None));
}

#[test]
fn a_device_of_another_agent_in_the_place_of_ours_is_reported_and_not_changed() {
    in_namespace(|| {
        let mut site = Site::new(Kind::Vxlan);
        let dev = strangers_device(1, Some(ANOTHER));
        let before = everything_of(&dev);
        site.start();
        site.until("the reason", |site| problems(site).contains("another weft agent"));
        site.put_peer(Lease::new(60));
        site.remove_peer(5);
        site.until("the new peer to be known", |site| !peer(site, 60).0.is_empty() && peer(site, 5).0.is_empty());
        assert_eq!(everything_of(&dev), before, "{}", site.log());
        let said = problems(&site);
        assert!(said.contains("link flannel.1") && said.contains("/run/another/subnet.env"), "{said}");
        ip("link del flannel.1");
        site.healed("the end of the other agent's device");
    });
}

#[test]
fn a_lease_whose_vni_changes_leaves_no_device_behind() {
    in_namespace(|| {
        let mut site = Site::running(Kind::Vxlan);
        for vni in 100..160 {
            put(&site, 60, &with_vni(60, vni));
            let dev = format!("flannel.{vni}");
            // After ten devices, a lease waits ten seconds for each further one (docs/adr/008-bounds-per-lease.md).
            if vni < 109 {
                site.until("the device of the new VNI", |_| devices().contains(&dev));
            }
        }
        site.until_devices("the devices of the old VNIs to go", &["flannel.1", "flannel.159"]);
        remove(&site, 60);
        site.healed("the end of the lease");
    });
}

#[test]
fn a_restart_finds_devices_that_nobody_wants_any_more() {
    in_namespace(|| {
        let mut site = Site::running(Kind::Vxlan);
        put(&site, 60, &with_vni(60, 7));
        site.until("the peer's device", |site| peer(site, 60).0 == "programmed");
        site.stop(Signal::SIGTERM);
        remove(&site, 60);
        configure(&site, &json!({"Type": "vxlan", "VNI": 2}));
        // The device of the earlier VNI stays for this time after a change.
        site.flags.push("--change-grace=3s".to_owned());
        site.start();
        // The peers' leases still say VNI 1.
        site.until_devices("devices of the new VNI alone", &["flannel.1", "flannel.2"]);
        configure(&site, &json!({"Type": "vxlan", "VNI": 1}));
        site.healed("the first VNI again");
        assert_eq!(devices(), ["flannel.1"]);
    });
}

fn ip_bytes(words: &[&[u8]]) {
    let out = Command::new("ip").args(words.iter().map(|word| OsStr::from_bytes(word))).output().unwrap();
    assert!(out.status.success(), "{words:?}: {out:?}");
}

#[test]
fn an_interface_name_that_is_not_utf8_stops_nothing() {
    in_namespace(|| {
        let mut site = Site::running(Kind::Vxlan);
        let odd = b"od\xff0";
        ip_bytes(&[b"link", b"add", odd, b"type", b"bridge"]);
        ip_bytes(&[b"link", b"set", odd, b"up"]);
        ip_bytes(&[b"addr", b"add", b"10.99.0.1/24", b"dev", odd]);
        ip_bytes(&[b"route", b"add", b"10.98.0.0/16", b"dev", odd]);
        ip("link del flannel.1");
        site.healed("a deleted device beside an interface with an odd name");
        site.stop(Signal::SIGTERM);
        site.put_peer(Lease::new(60));
        site.start();
        site.healed("a start beside an interface with an odd name");
        // The route to a peer of host-gw names this interface.
        let mut direct = Lease::new(61).value(Kind::HostGw);
        direct["PublicIP"] = json!("10.99.0.61");
        put(&site, 61, &direct);
        site.until("the peer on the odd link", |site| peer(site, 61).0 == "programmed");
        assert!(ip("route show 10.5.61.0/24").contains("via 10.99.0.61"), "{}", ip("route"));
        remove(&site, 61);
        ip_bytes(&[b"link", b"del", odd]);
        site.healed("the end of the interface");
    });
}

#[test]
fn an_uplink_whose_name_is_not_utf8_carries_the_overlay() {
    in_namespace(|| {
        let mut site = Site::new(Kind::Vxlan);
        ip("link set up0 down");
        ip_bytes(&[b"link", b"set", b"up0", b"name", b"up\xff"]);
        ip_bytes(&[b"link", b"set", b"up\xff", b"up"]);
        site.uplink = "--iface=up\\xff".to_owned();
        site.start();
        site.ready();
        assert_eq!(devices(), ["flannel.1"]);
        assert!(site.status().unwrap()["uplink"].as_str().unwrap().starts_with("up\\xff "), "{:?}", site.status());
    });
}

fn rp_filter(dev: &str) -> String {
    fs::read_to_string(format!("/proc/sys/net/ipv4/conf/{dev}/rp_filter")).unwrap().trim().to_owned()
}

fn set_rp_filter(dev: &str, value: &str) {
    fs::write(format!("/proc/sys/net/ipv4/conf/{dev}/rp_filter"), value).unwrap();
}

#[test]
fn rp_filter_is_loosened_for_a_lease_of_another_type_and_put_back_when_it_goes() {
    in_namespace(|| {
        let mut site = Site::running(Kind::Vxlan);
        set_rp_filter("all", "0");
        set_rp_filter("up0", "1");
        set_rp_filter("flannel.1", "1");
        let both = |up: &str, tunnel: &str| rp_filter("up0") == up && rp_filter("flannel.1") == tunnel;
        // A lease of another type loosens nothing if this node cannot reach it. Here its gateway is not on a link.
        let mut far = Lease::new(60).value(Kind::HostGw);
        far["PublicIP"] = json!("203.0.113.9");
        put(&site, 60, &far);
        site.until("the lease that cannot be reached", |site| peer(site, 60).0 == "set-aside");
        ip("link set flannel.1 down");
        site.healed("a full pass");
        assert!(both("1", "1"));
        put(&site, 61, &Lease::new(61).value(Kind::HostGw));
        site.until("loosened filters", |_| both("2", "2"));
        let said = problems(&site);
        assert!(said.contains("rp_filter") && said.contains("10.5.61.0-24") && said.contains("host-gw"), "{said}");
        // The agent keeps the earlier values over a restart.
        site.stop(Signal::SIGTERM);
        site.start();
        site.ready();
        assert!(both("2", "2"));
        remove(&site, 61);
        site.until("the filters as they were found", |_| both("1", "1"));
        site.until("no word of it", |site| !problems(site).contains("rp_filter"));
        // The agent is killed while the filters are loosened, and the lease is removed before it starts again.
        put(&site, 61, &Lease::new(61).value(Kind::HostGw));
        site.until("loosened filters", |_| both("2", "2"));
        site.stop(Signal::SIGKILL);
        remove(&site, 61);
        remove(&site, 60);
        site.start();
        site.until("the filters as they were found, after a restart", |_| both("1", "1"));
        site.healed("the end");
    });
}

/// While the backend changes, packets of a peer may arrive over the old device when answers to it leave by the new one already.
#[test]
fn rp_filter_is_loosened_while_the_backend_changes() {
    in_namespace(|| {
        let mut site = Site::new(Kind::Vxlan);
        site.flags = vec!["--change-grace=100ms".to_owned()];
        site.start();
        site.healed("the start");
        set_rp_filter("all", "0");
        set_rp_filter("up0", "1");
        configure(&site, &json!({"Type": "host-gw"}));
        site.until("a loosened filter", |_| rp_filter("up0") == "2");
        let said = problems(&site);
        assert!(said.contains("rp_filter is loosened to 2 while the backend changes"), "{said}");
        // The peers follow, so the earlier device and the reason go.
        for number in 2..22 {
            put(&site, number, &Lease::new(number).value(Kind::HostGw));
        }
        site.until("the end of the change", |_| devices() == [""; 0]);
        site.until("the filter as it was found", |_| rp_filter("up0") == "1");
    });
}

#[test]
fn cleanup_puts_rp_filter_back() {
    in_namespace(|| {
        let mut site = Site::running(Kind::Vxlan);
        set_rp_filter("all", "0");
        set_rp_filter("up0", "1");
        put(&site, 61, &Lease::new(61).value(Kind::HostGw));
        site.until("a loosened filter", |_| rp_filter("up0") == "2");
        site.stop(Signal::SIGTERM);
        let out = site.cleanup();
        assert!(out.status.success(), "{out:?}");
        assert_eq!(rp_filter("up0"), "1");
    });
}

#[test]
fn a_peers_device_whose_alias_was_cleared_is_still_ours() {
    in_namespace(|| {
        let mut site = Site::running(Kind::Vxlan);
        put(&site, 60, &with_vni(60, 7));
        site.until("the peer's device", |site| peer(site, 60).0 == "programmed");
        let alias = || array(&run("ip", "-j link show flannel.7"))[0]["ifalias"].as_str().map(str::to_owned);
        let before = alias();
        assert!(before.is_some());
        let all = everything_of("flannel.7");
        ip_bytes(&[b"link", b"set", b"flannel.7", b"alias", b""]);
        site.until("the alias to come back", |_| alias() == before);
        site.until("everything else to be there", |_| everything_of("flannel.7") == all);
        assert_eq!(peer(&site, 60).0, "programmed", "{}", site.log());
        remove(&site, 60);
        site.healed("the end of the lease");
    });
}

#[test]
fn a_device_that_cannot_be_set_up_gets_no_entries_until_it_can() {
    in_namespace(|| {
        let mut site = Site::new(Kind::Vxlan);
        let taken = std::net::UdpSocket::bind("0.0.0.0:8472").unwrap();
        site.start();
        site.until("the reason in the status", |site| problems(site).contains("EADDRINUSE"));
        assert!(!bridge("fdb show dev flannel.1").contains("10.0.0."), "{}", site.log());
        assert!(!site.log().contains("set route 10.5."), "no route is tried on it: {}", site.log());
        drop(taken);
        site.healed("the end of the program that had the port");
    });
}

/// The kernel refuses aliases of more than 255 bytes, and the alias contains the path of subnet.env. Packets do not need the alias. So the node
/// is ready and status names what is missing, also after a restart, which finds a device without its mark.
#[test]
fn a_device_without_its_alias_carries_packets() {
    in_namespace(|| {
        let mut site = Site::new(Kind::Vxlan);
        site.env = format!("{}/{}/subnet.env", "d".repeat(150), "e".repeat(150));
        site.start();
        site.healed("the start");
        assert!(!ip("-d link show flannel.1").contains("alias"), "the test needs a refused alias");
        site.stop(Signal::SIGTERM);
        fs::remove_file(site.env_file()).unwrap();
        site.start();
        site.healed("a restart");
        let said = problems(&site);
        assert!(said.contains("link flannel.1: alias: "), "{said}\n{}", site.log());
        let log = site.log();
        assert!(!log.contains("not ready"), "{log}");
    });
}
