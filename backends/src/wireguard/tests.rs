// SPDX-License-Identifier: Apache-2.0
//! What the golden plans do not show: the key files, and that no secret is shown.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use super::*;
use crate::host::{OnLink, Reach, Uplink};
use crate::identity::{Secrets, StandingLink};
use crate::wireguard_key::PublicKey;

const FLANNELS: &str = "/run/flannel/wgkey";
const KEPT: &str = "/var/lib/weft/weft.wireguard.key";
const NEXT: &str = "/var/lib/weft/weft.wireguard.key.next";
const APPEARS: &[u8] = b"appears ";
const PRIVATE: &str = "AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyA=";
const PUBLIC: &str = "B6N8vBQgk8i3VdwbEOhstCY3StFqqFPtC9/AsrhtHHw=";

/// Files in memory, the warnings, and the files that were replaced, in order. A file with the content `unreadable` cannot be read or written.
/// One with the content `no room` does not exist, and cannot be created. One that begins with `appears ` is created by another process a moment
/// before this one does it.
#[derive(Default)]
struct Files(RefCell<BTreeMap<PathBuf, Vec<u8>>>, RefCell<Vec<String>>, RefCell<Vec<PathBuf>>);

impl Files {
    fn with(files: &[(&str, &str)]) -> Files {
        Files(
            RefCell::new(files.iter().map(|(path, text)| (path.into(), text.as_bytes().to_vec())).collect()),
            RefCell::default(),
            RefCell::default(),
        )
    }

    fn text(&self, file: &str) -> Option<String> {
        self.0.borrow().get(Path::new(file)).map(|content| String::from_utf8(content.clone()).unwrap())
    }
}

impl Secrets for Files {
    fn directory(&self) -> Option<&Path> {
        None
    }

    fn wireguard_key_files(&self) -> Vec<PathBuf> {
        vec![FLANNELS.into(), KEPT.into()]
    }

    fn read(&self, file: &Path) -> io::Result<Option<Vec<u8>>> {
        match self.0.borrow().get(file) {
            Some(content) if content == b"unreadable" => Err(io::ErrorKind::PermissionDenied.into()),
            Some(content) if content == b"no room" || content.starts_with(APPEARS) => Ok(None),
            content => Ok(content.cloned()),
        }
    }

    fn create(&self, file: &Path, content: &[u8]) -> io::Result<()> {
        let mut files = self.0.borrow_mut();
        if let Some(there) = files.get_mut(file) {
            if there == b"no room" {
                return Err(io::ErrorKind::StorageFull.into());
            }
            if let Some(appeared) = there.strip_prefix(APPEARS) {
                *there = appeared.to_vec();
            }
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        files.insert(file.to_owned(), content.to_vec());
        Ok(())
    }

    fn replace(&self, file: &Path, content: &[u8]) -> io::Result<()> {
        self.read(file)?;
        self.0.borrow_mut().insert(file.to_owned(), content.to_vec());
        self.2.borrow_mut().push(file.to_owned());
        Ok(())
    }

    fn remove(&self, file: &Path) -> io::Result<()> {
        self.0.borrow_mut().remove(file);
        Ok(())
    }

    fn warn(&self, problem: &dyn std::fmt::Display) {
        self.1.borrow_mut().push(problem.to_string());
    }
}

fn net_conf(backend: &str) -> NetConf {
    NetConf::parse(&format!(r#"{{"Network":"10.5.0.0/16","Backend":{backend}}}"#)).unwrap()
}

fn made(options: &str) -> Box<dyn Backend> {
    crate::register::make(&net_conf(&format!(r#"{{"Type":"wireguard"{options}}}"#))).unwrap()
}

/// A backend with these options in a network of both families.
fn dual(options: &str) -> Box<dyn Backend> {
    let families = r#""Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48""#;
    let text = format!(r#"{{{families},"Backend":{{"Type":"wireguard"{options}}}}}"#);
    crate::register::make(&NetConf::parse(&text).unwrap()).unwrap()
}

fn found<'a>(files: &'a Files, links: &'a [StandingLink]) -> Found<'a> {
    let random = &|buffer: &mut [u8]| {
        buffer.fill(0x55);
        Ok(())
    };
    Found { links, secrets: files, random, printed: None }
}

fn public(files: &Files) -> Result<String, Skip> {
    let identities = made("").identities(&found(files, &[]), None)?;
    let [Some(v4), None] = identities.public() else { panic!("the network has no IPv6") };
    Ok(v4.to_string())
}

/// A lease of weft with these ports for IPv4 and IPv6. 0 stands for a lease that does not name one.
fn with_ports(ports: [u16; 2]) -> Attrs {
    let data = |port: u16| {
        let port = if port == 0 { String::new() } else { format!(r#","Port":{port}"#) };
        Some(format!(r#"{{"PublicKey":"{PUBLIC}"{port}}}"#).into_boxed_str())
    };
    let [backend_data, backend_v6_data] = ports.map(data);
    Attrs { backend_type: KIND.into(), backend_data, backend_v6_data, ..Attrs::default() }
}

#[test]
fn the_ports_of_a_lease_show_whether_its_node_has_one_device_for_both_families() {
    let (two, one) = (dual(r#","ListenPort":4500"#), [r#","Mode":"auto""#, r#","Mode":"ipv4""#, r#","Mode":"ipv6""#]);
    for (ports, has_two, has_one) in
        [([51820, 51821], true, false), ([51820, 51820], false, true), ([51820, 0], true, true), ([0, 0], true, true)]
    {
        let lease = with_ports(ports);
        assert_eq!(two.understands(&lease), has_two, "{ports:?}");
        assert!(one.iter().all(|mode| dual(mode).understands(&lease) == has_one), "{ports:?}");
        assert!(made("").understands(&lease) && made(r#","Mode":"ipv4""#).understands(&lease), "one family: {ports:?}");
        assert!(!two.understands(&Attrs { backend_type: "vxlan".into(), ..lease }));
    }
    assert!(!two.knows_options_of_flannel() && made("").knows_options_of_flannel());
}

#[test]
fn our_lease_names_the_port_that_a_device_keeps() {
    let backend = made(r#","ListenPort":4500"#);
    let identities = backend.identities(&found(&Files::default(), &[]), None).unwrap();
    let host = Host { kept_ports: [(Name::new("flannel-wg").unwrap(), 51820)].into(), identities, ..node() };
    let lease = |host: &Host| lease::ports(&backend.advertise(host).unwrap());
    let (subnets, age) = (Subnets::default(), Default::default());
    let own = Lease { id: "".into(), subnets, attrs: Attrs::default(), age };
    let wanted = backend.listen_ports(&host, &own);
    assert_eq!((lease(&host), wanted.into_values().collect::<Vec<_>>()), ([Some(51820), None], vec![4500]));
    assert_eq!(lease(&Host { kept_ports: Default::default(), ..host }), [Some(4500), None]);
}

/// Our lease must not name a port at which nobody answers.
#[test]
fn a_device_that_is_down_listens_on_no_port() {
    let listening = |port, up| {
        let kind = Arc::new(WireGuardLink { public: None, port });
        Link { kind, mtu: 1420, mac: None, up }.listening_port()
    };
    assert_eq!((listening(51820, true), listening(51820, false)), (Some(51820), None));
    assert_eq!(listening(0, true), None, "its port was not read");
}

#[test]
fn flannels_key_is_taken_over_and_outlives_a_boot() {
    let files = Files::with(&[(FLANNELS, PRIVATE)]);
    assert_eq!(public(&files).unwrap(), PUBLIC);
    let kept = files.text(KEPT).unwrap();
    // A boot empties /run.
    let files = Files::with(&[(KEPT, &kept)]);
    assert_eq!(public(&files).unwrap(), PUBLIC);
    assert_eq!(files.text(FLANNELS), Some(kept), "flannel finds the key when the operator goes back");
}

#[test]
fn flannels_key_counts_first_and_no_file_is_replaced() {
    let files = Files::with(&[(FLANNELS, &format!("{PRIVATE}\n")), (KEPT, &PublicKey([9; 32]).to_string())]);
    assert_eq!(public(&files).unwrap(), PUBLIC);
    assert_eq!(files.text(KEPT), Some(PublicKey([9; 32]).to_string()));
}

#[test]
fn a_second_place_without_the_key_is_reported() {
    let warnings = |kept: &str| {
        let files = Files::with(&[(FLANNELS, PRIVATE), (KEPT, kept)]);
        assert_eq!(public(&files).unwrap(), PUBLIC);
        assert_eq!(files.text(KEPT).unwrap(), kept, "it is never replaced");
        files.1.take()
    };
    let [another] = &warnings(&PublicKey([9; 32]).to_string())[..] else { panic!() };
    assert!(another.starts_with(&format!("{KEPT} has another private key of WireGuard than {FLANNELS}")), "{another}");
    let [unusable] = &warnings("unreadable")[..] else { panic!() };
    assert!(unusable.contains("permission denied") && unusable.contains("Delete it"), "{unusable}");
    let clamped = KeyPair::of(Secret::parse(PRIVATE).unwrap()).private().to_base64();
    for copy in [PRIVATE, &clamped] {
        assert_eq!(warnings(copy), [""; 0], "the same key");
    }
}

/// Begins to change the key, and returns the new public key.
fn begin_change(files: &Files) -> String {
    let (found, before) = (found(files, &[]), files.0.borrow().clone());
    let next = made("").new_identities(&found).unwrap().unwrap();
    assert_eq!(*files.0.borrow(), before, "a key that nobody was told of is in no file");
    made("").begin_change(&found, &next).unwrap();
    assert_eq!(made("").next_identities(&found).unwrap().as_ref(), Some(&next));
    let [Some(new), None] = next.public() else { panic!("the network has no IPv6") };
    new.to_string()
}

/// Returns the key that a start uses when our lease names this one.
fn at_start(files: &Files, leased: &str) -> String {
    let data = format!(r#"{{"PublicKey":"{leased}","Port":51820}}"#);
    let lease = Attrs { backend_type: KIND.into(), backend_data: Some(data.into()), ..Attrs::default() };
    let identities = made("").identities(&found(files, &[]), Some(&lease)).unwrap();
    identities.public()[0].as_ref().unwrap().to_string()
}

#[test]
fn a_change_of_the_key_replaces_it_in_all_places() {
    let files = Files::with(&[(FLANNELS, PRIVATE), (KEPT, PRIVATE)]);
    let new = begin_change(&files);
    assert_ne!(new, PUBLIC);
    assert_eq!((files.text(FLANNELS).unwrap(), files.text(KEPT).unwrap()), (PRIVATE.to_owned(), PRIVATE.to_owned()));
    // The change is given up.
    made("").end_change(&found(&files, &[]), false).unwrap();
    assert_eq!((files.text(NEXT), public(&files).unwrap()), (None, PUBLIC.to_owned()));
    assert!(made("").next_identities(&found(&files, &[])).unwrap().is_none());
    // The change is accepted.
    begin_change(&files);
    made("").end_change(&found(&files, &[]), true).unwrap();
    assert_eq!(files.text(NEXT), None);
    assert_eq!(files.text(FLANNELS), files.text(KEPT));
    assert_eq!(public(&files).unwrap(), new);
    let order = [KEPT, FLANNELS].map(PathBuf::from);
    assert_eq!(files.2.take(), order, "an agent that is killed between the two finds the new key after a boot");
}

/// The file of the change is then the only one with the key in use, unless the other place has it.
#[test]
fn the_key_in_use_is_not_lost_if_a_place_cannot_be_written() {
    for unreadable in [FLANNELS, KEPT] {
        let files = Files::with(&[(FLANNELS, PRIVATE), (KEPT, PRIVATE), (unreadable, "unreadable")]);
        let new = begin_change(&files);
        let error = made("").end_change(&found(&files, &[]), true).unwrap_err().to_string();
        assert!(error.contains(unreadable), "{error}");
        let place = if unreadable == KEPT { FLANNELS } else { KEPT };
        assert_eq!(
            files.text(place),
            files.text(NEXT),
            "a place that cannot be written does not keep the other from it"
        );
        assert_eq!(at_start(&files, &new), new);
        // Another change must not replace it.
        let third = KeyPair::of(Secret::new([7; 32])).both();
        assert!(made("").begin_change(&found(&files, &[]), &third).is_err());
        assert_eq!(at_start(&files, &new), new);
        // Somebody corrects the rights.
        files.0.borrow_mut().insert(unreadable.into(), PRIVATE.into());
        assert_eq!(at_start(&files, &new), new);
        made("").end_change(&found(&files, &[]), true).unwrap();
        assert_eq!((files.text(FLANNELS), files.text(NEXT)), (files.text(KEPT), None));
        assert_eq!(public(&files).unwrap(), new);
    }
}

/// During the change, the lease may name either key. So neither key shows whose lease it is, and a start uses the one that the peers know.
#[test]
fn a_change_of_the_key_that_was_interrupted_ends_at_the_next_start() {
    let files = Files::with(&[(FLANNELS, PRIVATE), (KEPT, PRIVATE)]);
    let device = [StandingLink { name: Name::new("flannel-wg").unwrap(), mac: None, ours: true }];
    let standing = || made("").standing_identities(&found(&files, &device)).unwrap();
    assert!(standing()[0].is_some());
    let new = begin_change(&files);
    assert_eq!(standing(), [None, None]);
    let before = files.0.borrow().clone();
    assert_eq!((at_start(&files, PUBLIC), at_start(&files, &new)), (PUBLIC.to_owned(), new.clone()));
    assert_eq!(public(&files).unwrap(), PUBLIC, "without a lease, the key stays");
    assert_eq!((&*files.0.borrow(), standing()), (&before, [None, None]), "the store has not accepted a lease yet");
    made("").end_change(&found(&files, &[]), true).unwrap();
    assert_eq!((at_start(&files, PUBLIC), standing()[0].as_ref().unwrap().to_string()), (new.clone(), new));
    // The agent ended after it had written the new key to the first of two places. So the store had accepted it, although the lease is
    // not known at this start.
    let files = Files::with(&[(FLANNELS, PRIVATE), (KEPT, PRIVATE)]);
    let new = begin_change(&files);
    let accepted = files.text(NEXT).unwrap();
    files.0.borrow_mut().insert(KEPT.into(), accepted.into_bytes());
    assert_eq!(public(&files).unwrap(), new);
    // A place that cannot be read does not keep the node from the key of its lease.
    let files = Files::with(&[(FLANNELS, "unreadable"), (KEPT, PRIVATE)]);
    let new = begin_change(&files);
    assert_eq!(at_start(&files, &new), new);
    // The other files are gone.
    let files = Files::with(&[(KEPT, PRIVATE)]);
    let new = begin_change(&files);
    files.0.borrow_mut().remove(Path::new(KEPT));
    assert_eq!(public(&files).unwrap(), new);
}

/// All nodes without random numbers would have the same key, and everybody would know it.
#[test]
fn without_random_numbers_no_key_is_made() {
    let files = Files::default();
    let random: &dyn Fn(&mut [u8]) -> io::Result<()> = &|_| Err(io::ErrorKind::Unsupported.into());
    let found = Found { random, ..found(&files, &[]) };
    for refused in [made("").identities(&found, None).err(), made("").new_identities(&found).err()] {
        let said = refused.map(|error| error.to_string()).unwrap_or_default();
        assert!(said.starts_with("cannot choose a private key for WireGuard: "), "{said}");
    }
    assert!(files.0.borrow().is_empty());
}

#[test]
fn a_key_is_made_once() {
    let files = Files::default();
    let first = public(&files).unwrap();
    assert_eq!(public(&files).unwrap(), first);
    assert_eq!(files.text(FLANNELS), files.text(KEPT));
    assert_eq!(files.text(KEPT).unwrap().len(), 44, "without a newline, as flannel reads it");
}

/// Peers learn the key of this node. One that is gone after the next boot must not be told to them.
#[test]
fn a_new_key_is_in_the_place_that_outlives_a_boot_before_it_is_used() {
    let files = Files::with(&[(KEPT, "no room")]);
    let said = public(&files).unwrap_err().to_string();
    assert!(said.contains(&format!("to {KEPT}: ")), "{said}");
    assert_eq!(files.text(FLANNELS), None);
    let files = Files::with(&[(FLANNELS, "no room")]);
    let key = public(&files).unwrap();
    let [warning] = &files.1.take()[..] else { panic!("a place without the key is reported") };
    assert!(warning.contains(&format!("to {FLANNELS}: ")), "{warning}");
    let files = Files::with(&[(KEPT, &files.text(KEPT).unwrap())]);
    assert_eq!(public(&files).unwrap(), key);
}

#[test]
fn a_key_that_another_process_made_at_the_same_time_is_used() {
    let files = Files::with(&[(KEPT, &format!("appears {PRIVATE}"))]);
    assert_eq!(public(&files).unwrap(), PUBLIC);
    assert!(files.text(FLANNELS).is_some(), "flannel finds it, too");
}

#[test]
fn a_file_that_cannot_be_read_is_an_error_that_names_it() {
    let said = public(&Files::with(&[(FLANNELS, "unreadable")])).unwrap_err().to_string();
    assert!(said.contains(FLANNELS) && said.contains("permission denied"), "{said}");
    // flannel leaves an empty file when it is killed at the wrong moment.
    for content in ["", "half a key"] {
        let files = Files::with(&[(FLANNELS, content), (KEPT, PRIVATE)]);
        let said = public(&files).unwrap_err().to_string();
        assert!(said.contains(FLANNELS) && said.contains("delete the file"), "{said}");
        assert_eq!(files.text(FLANNELS).unwrap(), content);
    }
}

/// A key that came here with a copy of a disk must not claim the lease of the machine that was copied.
#[test]
fn only_a_device_of_ours_shows_that_the_key_was_published_by_this_machine() {
    let files = Files::with(&[(KEPT, PRIVATE)]);
    let standing = |links: &[StandingLink]| made("").standing_identities(&found(&files, links)).unwrap();
    let link = |ours| StandingLink { name: Name::new("flannel-wg").unwrap(), mac: None, ours };
    assert_eq!(standing(&[]), [None, None]);
    assert_eq!(standing(&[link(false)]), [None, None]);
    assert_eq!(standing(&[link(true)]), [Some(PublicIdentity::new(KIND, PUBLIC)), None]);
}

#[test]
fn no_secret_is_in_a_refusal() {
    let refusal = |options: &str| {
        let net_conf = net_conf(&format!(r#"{{"Type":"wireguard",{options}}}"#));
        crate::register::make(&net_conf).err().unwrap().to_string()
    };
    for options in [r#""PSK":"secretsecret""#, r#""PSK":["secretsecret"]"#] {
        let said = refusal(options);
        assert!(said.contains("Backend.PSK") && !said.contains("secretsecret"), "{said}");
    }
}

/// Two nodes of which only one has the preshared key exchange no packets.
#[test]
fn the_devices_get_the_private_key_and_the_preshared_key_of_net_conf() {
    let secrets = |options: &str| {
        let (backend, files) = (made(options), Files::with(&[(KEPT, PRIVATE)]));
        let identities = backend.identities(&found(&files, &[]), None).unwrap();
        backend.secrets(&Host { identities, ..node() }).unwrap()
    };
    let key = || Secret::parse(PRIVATE).unwrap();
    let private = KeyPair::of(key()).private().clone();
    assert_eq!(secrets(""), DeviceSecrets { private: private.clone(), preshared: None });
    let preshared = Some(Arc::new(key()));
    assert_eq!(secrets(&format!(r#","PSK":"{PRIVATE}""#)), DeviceSecrets { private, preshared });
}

/// Returns the ports that the lease of a node with these facts names. The node has addresses of both families.
fn advertised(backend: &dyn Backend, host: Host) -> Result<PublicPorts, String> {
    let identities = backend.identities(&found(&Files::default(), &[]), None).unwrap();
    let uplink = Uplink { v6: "2001:db8::1".parse().ok(), ..host.uplink.clone() };
    let lease = backend.advertise(&Host { uplink, identities, ..host });
    lease.map(|attrs| lease::ports(&attrs)).map_err(|error| error.to_string())
}

#[test]
fn two_devices_need_two_ports_and_one_device_needs_one() {
    // The refusal of two equal ports of net-conf is a golden plan.
    let equal = r#","ListenPort":51821"#;
    let one = dual(&format!(r#"{equal},"Mode":"auto""#));
    assert_eq!(advertised(&*one, node()), Ok([Some(51821), Some(51821)]));
    assert_eq!(advertised(&*made(equal), node()), Ok([Some(51821), None]));
    let with_flag = || Host { wireguard_port: Some(51821), ..node() };
    let said = advertised(&*dual(""), with_flag()).unwrap_err();
    assert!(said.starts_with("--wireguard-port 51821 is Backend.ListenPortV6 of net-conf, too"), "{said}");
    assert_eq!(advertised(&*dual(r#","Mode":"auto""#), with_flag()), Ok([Some(51821), Some(51821)]));
    assert_eq!(advertised(&*made(""), with_flag()), Ok([Some(51821), None]));
}

#[test]
fn each_of_two_devices_keeps_a_port_of_its_own() {
    let keeps = |name: &str| Host { kept_ports: [(Name::new(name).unwrap(), 4500)].into(), ..node() };
    assert_eq!(advertised(&*dual(""), keeps("flannel-wg")), Ok([Some(4500), Some(51821)]));
    assert_eq!(advertised(&*dual(""), keeps("flannel-wg-v6")), Ok([Some(51820), Some(4500)]));
    assert_eq!(advertised(&*dual(r#","Mode":"auto""#), keeps("flannel-wg")), Ok([Some(4500), Some(4500)]));
}

#[test]
fn a_mode_over_a_family_that_net_conf_does_not_enable_is_refused() {
    let refusal = |family: &str, mode: &str| {
        let text = format!(r#"{{{family},"Backend":{{"Type":"wireguard","Mode":"{mode}"}}}}"#);
        crate::register::make(&NetConf::parse(&text).unwrap()).err().map(|refused| refused.to_string())
    };
    let v4 = r#""Network":"10.5.0.0/16""#;
    let v6 = r#""EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48""#;
    for (family, mode, over) in [(v4, "ipv6", "IPv6"), (v6, "ipv4", "IPv4")] {
        let said = refusal(family, mode).unwrap_or_default();
        assert!(said.starts_with(&format!("Backend.Mode in net-conf reaches peers over {over}")), "{mode}: {said}");
    }
    for (family, mode) in [(v4, "ipv4"), (v6, "ipv6"), (v4, "auto"), (v6, "auto"), (v6, "separate")] {
        assert_eq!(refusal(family, mode), None, "{mode}");
    }
}

/// A node whose uplink carries 1500 bytes.
fn node() -> Host {
    let (v4, v6) = ("192.0.2.1".parse().ok(), None);
    Host::new(Uplink { name: Name::new("eth0").unwrap(), mtu: 1500, v4, v6 })
}

/// The preview of a change, the status and the log show this sentence. An operator must not have to look for either part.
#[test]
fn the_remark_names_what_is_not_encrypted_and_an_mtu_that_the_uplink_does_not_carry() {
    let remark = |options: &str| made(options).remark(&node());
    let (plaintext, mtu) = (r#","AllowPlaintext":true"#, r#","MTU":9000"#);
    let small = "Backend.MTU in net-conf is 9000, but the uplink eth0 carries 1500: this node uses 1500";
    assert_eq!(remark(""), None);
    assert_eq!(remark(r#","MTU":1500"#), None);
    assert_eq!(remark(r#","AllowPlaintext":false"#), None);
    assert_eq!(remark(mtu).as_deref(), Some(small));
    let said = remark(plaintext).unwrap();
    assert!(said.contains("packets to nodes of other backend types are not encrypted"), "{said}");
    assert_eq!(remark(&format!("{plaintext}{mtu}")), Some(format!("{said}; {small}")));
}

#[test]
fn the_remark_names_a_port_of_the_command_line_that_no_device_takes() {
    let remark = |families: &str, mode: &str| {
        let text = format!(r#"{{{families},"Backend":{{"Type":"wireguard","Mode":"{mode}"}}}}"#);
        let backend = crate::register::make(&NetConf::parse(&text).unwrap()).unwrap();
        assert_eq!(backend.remark(&node()), None, "without the flag");
        backend.remark(&Host { wireguard_port: Some(51822), ..node() })
    };
    let v4 = r#""Network":"10.5.0.0/16""#;
    let v6 = r#""EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48""#;
    let both = r#""Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48""#;
    for (families, mode) in [(v4, "separate"), (both, "separate"), (both, "auto"), (v6, "auto"), (v6, "ipv6")] {
        assert_eq!(remark(families, mode), None, "{families} {mode}");
    }
    let said = remark(v6, "separate").unwrap();
    assert!(said.starts_with("--wireguard-port 51822 has no effect"), "{said}");
    assert!(said.contains("flannel-wg-v6 alone") && said.contains("Backend.ListenPortV6"), "{said}");
}

/// A tunnel needs an address of this family on both nodes, and the doctor looks for faults of this family.
#[test]
fn the_mode_says_over_which_family_the_packets_of_a_family_go() {
    use Family::{V4, V6};
    let outer = |mode: &str| {
        let backend = dual(&format!(r#","Mode":"{mode}""#));
        [V4, V6].map(|family| backend.outer_family(family))
    };
    assert_eq!(outer("separate"), [Some(V4), Some(V6)]);
    assert_eq!(outer("auto"), [None, None], "each peer has its own");
    assert_eq!(outer("ipv4"), [Some(V4), Some(V4)]);
    assert_eq!(outer("ipv6"), [Some(V6), Some(V6)]);
}

/// Returns the first byte of the key and the endpoint of the peer with this lease, in a cluster with both families. `Err` says why it is not
/// reached.
fn reached(mode: &str, host: &Host, attrs: Attrs) -> Result<(u8, String), String> {
    let backend = dual(&format!(r#","Mode":"{mode}""#));
    let files = Files::with(&[(KEPT, PRIVATE)]);
    let identities = backend.identities(&found(&files, &[]), None).unwrap();
    let lease = |key: &str, attrs: Attrs| {
        let subnets = Subnets::from_key(key).unwrap();
        Lease { id: key.into(), subnets, attrs, age: Default::default() }
    };
    let (own, peer) = (lease("10.5.1.0-24", Attrs::default()), lease("10.5.2.0-24", attrs));
    let planned = backend.plan(&Host { identities, ..host.clone() }, &own, &peer);
    let mut peers = planned.state.iter().filter_map(|(_, value)| match value {
        Value::WgPeer(peer) => Some((peer.key.0[0], peer.endpoint.unwrap().to_string())),
        _ => None,
    });
    peers.next_back().ok_or_else(|| planned.skipped.iter().map(Skip::to_string).collect::<Vec<_>>().join("; "))
}

/// Returns the lease of a peer with these addresses, and with keys of which each byte is 4 or 6.
fn lease_of_peer(v4: Option<&str>, v6: Option<&str>) -> Attrs {
    let data = |byte| Some(lease::text(PublicKey([byte; 32]), 51820));
    Attrs {
        backend_type: KIND.into(),
        public_ip: v4.map(|ip| ip.parse().unwrap()),
        public_ipv6: v6.map(|ip| ip.parse().unwrap()),
        backend_data: v4.and_then(|_| data(4)),
        backend_v6_data: v6.and_then(|_| data(6)),
        ..Attrs::default()
    }
}

#[test]
fn one_device_for_both_families_takes_the_key_of_ipv6_if_there_is_one() {
    let (v4, v6) = (Some("192.0.2.2"), Some("2001:db8::2"));
    let over_v4 = "192.0.2.2:51820".to_owned();
    assert_eq!(reached("ipv4", &node(), lease_of_peer(v4, v6)), Ok((6, over_v4.clone())));
    assert_eq!(reached("ipv4", &node(), lease_of_peer(v4, None)), Ok((4, over_v4.clone())));
    assert_eq!(reached("separate", &node(), lease_of_peer(v4, v6)), Ok((4, over_v4)));
}

/// If net-conf changes the port, a peer that does not say where it listens may still be at the earlier port.
#[test]
fn the_port_of_a_peer_is_assumed_only_if_its_lease_names_none() {
    let (backend, files) = (made(""), Files::with(&[(KEPT, PRIVATE)]));
    let identities = backend.identities(&found(&files, &[]), None).unwrap();
    let host = Host { identities, ..node() };
    let lease = |key: &str, attrs: Attrs| {
        let subnets = Subnets::from_key(key).unwrap();
        Lease { id: key.into(), subnets, attrs, age: Default::default() }
    };
    for (port, assumed, endpoint) in [
        (r#","Port":7000"#, false, "192.0.2.2:7000"),
        (r#","Port":51820"#, false, "192.0.2.2:51820"),
        (r#","Port":0"#, true, "192.0.2.2:51820"),
        ("", true, "192.0.2.2:51820"),
    ] {
        let data = format!(r#"{{"PublicKey":"{}"{port}}}"#, PublicKey([4; 32]));
        let attrs = Attrs { backend_data: Some(data.into()), ..lease_of_peer(Some("192.0.2.2"), None) };
        let planned = backend.plan(&host, &lease("10.5.1.0-24", Attrs::default()), &lease("10.5.2.0-24", attrs));
        let peer = planned.state.iter().find_map(|(_, value)| match value {
            Value::WgPeer(peer) => Some((peer.assumes_port, peer.endpoint)),
            _ => None,
        });
        assert_eq!(peer, Some((assumed, endpoint.parse().ok())), "{port}");
    }
}

#[test]
fn a_peer_is_left_out_if_this_node_has_no_address_of_the_family_of_the_underlay() {
    let said = reached("ipv6", &node(), lease_of_peer(Some("192.0.2.2"), Some("2001:db8::2"))).unwrap_err();
    assert!(said.contains("eth0"), "{said}");
    let said = reached("ipv6", &node(), lease_of_peer(Some("192.0.2.2"), None)).unwrap_err();
    assert!(said.contains("PublicIPv6"), "{said}");
}

/// The route of Network leads to the device, and so would the packets of the tunnel. A route of a link is longer than that of Network.
#[test]
fn a_peer_inside_network_is_reached_only_on_a_link_of_this_node() {
    let inside = || lease_of_peer(Some("10.5.200.2"), None);
    let said = reached("separate", &node(), inside()).unwrap_err();
    assert!(said.contains("10.5.200.2") && said.contains("inside Network 10.5.0.0/16"), "{said}");
    let link = ("10.5.200.0/24".parse().unwrap(), 0, Reach::Link(Name::new("eth0").unwrap()));
    let host = Host { routes: OnLink::new([link]), ..node() };
    assert_eq!(reached("separate", &host, inside()), Ok((4, "10.5.200.2:51820".to_owned())));
}
