// SPDX-License-Identifier: Apache-2.0
//! Links and addresses are read back as they were written, and an attribute that cannot be parsed hides no other one.

use weft_backends::ipip::IpipLink;
use weft_backends::link::Difference;
use weft_backends::vxlan::VxlanLink;

use super::super::wire::messages;
use super::*;

fn first<T>(w: &mut Writer, read: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
    w.end(1);
    messages(w.bytes()).find_map(|m| read(m.payload))
}

fn created(kind: Arc<dyn LinkKind>, parent: u32) -> LinkFacts {
    let link = Link { kind, mtu: 1450, mac: Some(Mac([2, 0, 0, 0, 0, 1])), up: true };
    let mut w = Writer::default();
    create_link(&mut w, Name::new("flannel.1").unwrap(), &link, parent);
    first(&mut w, read_link).unwrap()
}

fn outer(index: u32, name: Name, facts: &LinkFacts) -> Links {
    let info = LinkInfo { index, name, ..facts.info.clone() };
    HashMap::from([(index, LinkFacts { info, link_type: None, veth: false, alias: String::new() })])
}

/// The machine that runs the kernel tests may lack the ipip module, so this compares the two directions. The link of the host has no address
/// here: a device whose local address is on no link for a moment is known anyway.
#[test]
fn an_ipip_device_is_read_as_it_was_written() {
    let ipip = IpipLink { local: "10.0.0.1".parse().unwrap(), bound: false };
    let facts = created(Arc::new(ipip), 5);
    // IFLA_IPTUN_LOCAL and IFLA_IPTUN_PMTUDISC of linux/if_tunnel.h. IFLA_IPTUN_LINK would bind the device to a link.
    let mut w = Writer::default();
    w.attr_ip(2, ipip.local);
    w.attr(10, &[0]);
    assert_eq!(&facts.link_type.as_ref().unwrap().data[..], w.bytes());
    let links = outer(5, Name::new("eth0").unwrap(), &facts);
    assert_eq!(facts.value(&links).kind.of(), Some(&ipip));
    // The kernel names the link of every device. It is 0 if there is none.
    for (link, bound) in [(0, false), (5, true), (6, true)] {
        let mut w = Writer::default();
        w.attr_u32(1, link);
        w.attr_ip(2, ipip.local);
        let link_type = LinkType::new("ipip", w.bytes());
        let have = LinkFacts { link_type, ..facts.clone() }.value(&links).kind;
        assert_eq!(have.of(), Some(&IpipLink { bound, ..ipip }), "link {link}");
        assert_eq!(ipip.compare(&*have), if bound { Difference::Recreate } else { Difference::None }, "link {link}");
    }
}

/// Such devices carry packets to one end alone, or to a group. The agent never makes one, so it is not one of ours that differs a little.
#[test]
fn devices_with_a_fixed_end_or_a_group_are_foreign() {
    let facts = created(Arc::new(IpipLink { local: "10.0.0.1".parse().unwrap(), bound: false }), 5);
    let links = outer(5, Name::new("eth0").unwrap(), &facts);
    let kind = |name: &str, attributes: &[(u16, &str)], parent: u16| {
        let mut w = Writer::default();
        w.attr_u32(parent, 5);
        for (number, ip) in attributes {
            w.attr_ip(*number, ip.parse().unwrap());
        }
        let link_type = LinkType::new(name, w.bytes());
        LinkFacts { link_type, ..facts.clone() }.value(&links).kind
    };
    // IFLA_IPTUN_LINK, _LOCAL and _REMOTE of linux/if_tunnel.h.
    assert!(kind("ipip", &[(2, "10.0.0.1"), (3, "0.0.0.0")], 1).of::<IpipLink>().is_some());
    assert_eq!(kind("ipip", &[(2, "10.0.0.1"), (3, "10.0.0.2")], 1).of(), Some(&Foreign));
    // IFLA_VXLAN_LINK, _LOCAL, _GROUP and _GROUP6 of linux/if_link.h.
    assert!(kind("vxlan", &[(4, "10.0.0.1")], 3).of::<VxlanLink>().is_some());
    assert_eq!(kind("vxlan", &[(4, "10.0.0.1"), (2, "239.1.1.1")], 3).of(), Some(&Foreign));
    assert_eq!(kind("vxlan", &[(4, "10.0.0.1"), (16, "ff05::1")], 3).of(), Some(&Foreign));
}

#[test]
fn a_vxlan_device_is_read_as_it_was_written() {
    let parent = Name::new("eth0").unwrap();
    for (local, gbp, learning, ttl) in [("10.0.0.1", true, false, 0), ("fd00::1", false, true, 1)] {
        let local = local.parse().unwrap();
        let vxlan = VxlanLink { vni: 0x12_3456, port: 8472, parent, local, gbp, learning, ttl };
        let facts = created(Arc::new(vxlan), 7);
        assert_eq!(facts.value(&outer(7, parent, &facts)).kind.of(), Some(&vxlan));
        assert!(facts.has_fdb());
        assert_eq!((facts.info.mtu, facts.info.name.text().as_ref()), (1450, "flannel.1"));
    }
}

/// An attribute of vxlan that the crate cannot parse leaves the others readable. Otherwise the device would look like one that the
/// agent never creates, and the agent would replace it.
#[test]
fn a_vxlan_device_with_an_unreadable_attribute_is_still_known() {
    let parent = Name::new("eth0").unwrap();
    let vxlan = VxlanLink {
        vni: 7,
        port: 4789,
        parent,
        local: "10.0.0.1".parse().unwrap(),
        gbp: false,
        learning: false,
        ttl: 0,
    };
    let facts = created(Arc::new(vxlan), 7);
    let with = |extra: &[u8]| {
        let data = [&facts.link_type.as_ref().unwrap().data[..], extra].concat();
        let link_type = LinkType::new("vxlan", &data);
        LinkFacts { link_type, ..facts.clone() }.value(&outer(7, parent, &facts))
    };
    // IFLA_VXLAN_AGEING with one byte instead of four, and an attribute that nobody knows.
    assert_eq!(with(&[5, 0, 8, 0, 1, 0, 0, 0]).kind.of(), Some(&vxlan));
    assert_eq!(with(&[8, 0, 250, 0, 1, 2, 3, 4]).kind.of(), Some(&vxlan));
    // IFLA_VXLAN_GPE: the agent never creates such a device.
    assert_eq!(with(&[4, 0, 27, 0]).kind.of(), Some(&Foreign));
}

#[test]
fn a_link_and_an_address_are_known_although_a_name_is_not_text() {
    let name = b"eth\xff0\0";
    let mut w = Writer::default();
    typed::begin(&mut w, libc::RTM_NEWLINK, PLAIN, &header(3));
    w.attr(libc::IFLA_IFNAME, name);
    w.attr(libc::IFLA_IFALIAS, b"caf\xe9");
    w.attr_u32(libc::IFLA_MTU, 1500);
    let facts = first(&mut w, read_link).unwrap();
    assert_eq!(facts.info.name.as_bytes(), b"eth\xff0");
    assert_eq!((facts.info.index, facts.info.mtu, facts.alias.as_str()), (3, 1500, ""));

    let mut w = Writer::default();
    address(&mut w, true, 3, "10.0.0.1/24".parse().unwrap());
    w.attr(libc::IFA_LABEL, name);
    let read = first(&mut w, read_address).unwrap();
    assert_eq!(read.net, "10.0.0.1/24".parse::<IpNet>().unwrap());
    assert_eq!((read.index, read.scope), (3, 0));
}

#[test]
fn addresses_are_read_as_they_were_written() {
    for (net, flags) in [("10.5.1.0/32", 0), ("fd00:10:5::1/128", AddressFlags::Nodad.bits())] {
        let net = net.parse().unwrap();
        let mut w = Writer::default();
        address(&mut w, true, 9, net);
        assert_eq!(first(&mut w, read_address), Some(AddrInfo { index: 9, net, scope: 0, flags }));
    }
}

/// IFA_ADDRESS is the other end of such a link, and IFA_LOCAL our own one.
#[test]
fn the_address_of_a_point_to_point_link_is_that_of_this_host() {
    let mut w = Writer::default();
    let mut message = AddressMessage::default();
    message.header =
        AddressHeader { family: AddressFamily::Inet, prefix_len: 32, index: 9, ..AddressHeader::default() };
    let [other, ours] = ["10.0.9.2", "10.0.9.1"].map(|ip| ip.parse().unwrap());
    message.attributes = vec![AddressAttribute::Address(other), AddressAttribute::Local(ours)];
    typed::begin(&mut w, libc::RTM_NEWADDR, PLAIN, &message);
    assert_eq!(first(&mut w, read_address).unwrap().net, "10.0.9.1/32".parse::<IpNet>().unwrap());
}

/// When a link leaves a bridge, the kernel says that the port is deleted. The link is still there.
#[test]
fn a_message_about_the_port_of_a_bridge_is_not_one_about_the_link() {
    let read = |interface_family| {
        let mut w = Writer::default();
        let of_family = LinkHeader { interface_family, ..header(3) };
        let message = link(of_family, vec![LinkAttribute::IfName("eth0".to_owned())]);
        typed::begin(&mut w, libc::RTM_DELLINK, PLAIN, &message);
        first(&mut w, read_link).map(|facts| facts.info.index)
    };
    assert_eq!(read(AddressFamily::Unspec), Some(3));
    assert_eq!(read(AddressFamily::Bridge), None);
}

/// A link without a carrier is up all the same, if somebody has set it up.
#[test]
fn up_carrier_and_loopback_are_flags_of_their_own() {
    let read = |flags| {
        let mut w = Writer::default();
        let message = link(LinkHeader { flags, ..header(3) }, vec![LinkAttribute::IfName("eth0".to_owned())]);
        typed::begin(&mut w, libc::RTM_NEWLINK, PLAIN, &message);
        let info = first(&mut w, read_link).unwrap().info;
        (info.up, info.carrier, info.loopback)
    };
    assert_eq!(read(LinkFlags::Up), (true, false, false));
    assert_eq!(read(LinkFlags::LowerUp), (false, true, false));
    assert_eq!(read(LinkFlags::Loopback), (false, false, true));
    assert_eq!(read(LinkFlags::Running), (false, false, false));
}

/// Otherwise the monitor would not report that somebody has changed one attribute of a device.
#[test]
fn a_change_of_an_attribute_of_the_type_is_a_change_of_the_link() {
    let parent = Name::new("eth0").unwrap();
    let local = "10.0.0.1".parse().unwrap();
    let vxlan = VxlanLink { vni: 7, port: 4789, parent, local, gbp: false, learning: false, ttl: 0 };
    let before = created(Arc::new(vxlan), 7);
    assert_eq!(before, created(Arc::new(vxlan), 7));
    for after in [VxlanLink { ttl: 1, ..vxlan }, VxlanLink { vni: 8, ..vxlan }, VxlanLink { learning: true, ..vxlan }] {
        assert_ne!(before, created(Arc::new(after), 7), "{after}");
    }
    let data = &before.link_type.as_ref().unwrap().data;
    assert_ne!(LinkType::new("vxlan", data), LinkType::new("ipip", data));
}

#[test]
fn messages_that_are_too_short_are_not_read() {
    for len in 0..LINK_HEADER {
        assert_eq!(read_link(&vec![0; len]), None);
    }
    for len in 0..ADDRESS_HEADER {
        assert_eq!(read_address(&vec![0; len]), None);
    }
}
