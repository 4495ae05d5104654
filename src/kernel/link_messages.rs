// SPDX-License-Identifier: Apache-2.0
//! Messages about links and addresses, written and read as typed messages of the crate netlink-packet-route.
//!
//! Only the attributes that the agent uses are parsed, each one by itself. The crate's parser of whole messages fails as soon as
//! one attribute fails, for example the name of a link that is not UTF-8. The agent would then not know that link at all.

use std::collections::HashMap;
use std::sync::Arc;

use ipnet::IpNet;
use netlink_packet_core::{DefaultNla, Parseable, ParseableParametrized};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressHeader, AddressMessage};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkExtentMask, LinkFlags, LinkHeader, LinkLayerType,
    LinkMessage,
};
use nix::libc;
use weft_backends::link::{Foreign, Link, LinkKind};
use weft_backends::owner::ALIAS;
use weft_backends::state::{Mac, Name};

use super::kinds::{self, LinkType, Parents};
use super::rt::{CREATE, PLAIN, REPLACE, family};
use super::wire::{Writer, text};
use super::{AddrInfo, Creator, LinkInfo, typed};

/// Length of `struct ifinfomsg` in bytes.
const LINK_HEADER: usize = 16;
/// Length of `struct ifaddrmsg` in bytes.
const ADDRESS_HEADER: usize = 8;
const VETH: &str = "veth";

/// A link, with everything that is needed to compare it with the wanted one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkFacts {
    /// What every link has.
    pub info: LinkInfo,
    /// Its type, if the agent creates devices of this type.
    pub link_type: Option<LinkType>,
    /// True for one end of a veth pair, which mostly belongs to a pod.
    pub veth: bool,
    /// The alias (IFLA_IFALIAS). Empty if there is none, or if it is not UTF-8.
    pub alias: String,
}

/// All links by index.
pub type Links = HashMap<u32, LinkFacts>;

impl LinkFacts {
    /// Returns the link as the backends describe it. The other links of the host show which one is its outer device.
    pub fn value(&self, links: &Links) -> Link {
        Link { kind: self.kind(links), mtu: self.info.mtu, mac: self.info.mac, up: self.info.up }
    }

    /// Returns its type with its attributes.
    pub fn kind(&self, parents: &dyn Parents) -> Arc<dyn LinkKind> {
        self.link_type.as_ref().map_or_else(|| Arc::new(Foreign) as Arc<dyn LinkKind>, |of| of.kind(parents))
    }

    /// Returns true if its FDB may contain entries of the agent.
    pub fn has_fdb(&self) -> bool {
        self.link_type.as_ref().is_some_and(LinkType::has_fdb)
    }
}

impl Parents for Links {
    fn of_index(&self, index: u32) -> Option<Name> {
        self.get(&index).map(|link| link.info.name)
    }
}

/// Returns true if an agent of this host created the device with this alias (`weft FILE`): this agent or another one.
pub(super) fn is_alias_of_weft(alias: &str) -> bool {
    alias.starts_with(ALIAS)
}

/// Reads RTM_NEWLINK and RTM_DELLINK. Returns `None` for messages of other families, such as those about the ports of a bridge.
pub fn read_link(payload: &[u8]) -> Option<LinkFacts> {
    let header = LinkHeader::parse(payload).ok()?;
    if header.interface_family != AddressFamily::Unspec {
        return None;
    }
    let (mut name, mut mtu, mut mac, mut alias) = (None, 0, None, String::new());
    let (mut link_type, mut veth) = (None, false);
    for attribute in typed::attributes(payload, LINK_HEADER) {
        match attribute.kind() {
            // The name of a link need not be UTF-8, and the crate parses no other name.
            libc::IFLA_IFNAME => name = Name::of_kernel(attribute.value()),
            libc::IFLA_LINKINFO => (link_type, veth) = read_type(attribute.value()),
            libc::IFLA_MTU | libc::IFLA_ADDRESS | libc::IFLA_IFALIAS => {
                match LinkAttribute::parse_with_param(&attribute, AddressFamily::Unspec) {
                    Ok(LinkAttribute::Mtu(bytes)) => mtu = bytes,
                    // The "address" of an ipip device is the IP address of its local end.
                    Ok(LinkAttribute::Address(bytes)) if header.link_layer_type == LinkLayerType::Ether => {
                        mac = bytes.try_into().ok().map(Mac);
                    }
                    Ok(LinkAttribute::IfAlias(text)) => alias = text,
                    _ => {}
                }
            }
            _ => {}
        }
    }
    let info = LinkInfo {
        index: header.index,
        name: name?,
        mtu,
        mac,
        up: header.flags.contains(LinkFlags::Up),
        carrier: header.flags.contains(LinkFlags::LowerUp),
        loopback: header.flags.contains(LinkFlags::Loopback),
        // The caller knows the alias of this agent, and corrects this for its own devices.
        creator: if is_alias_of_weft(&alias) { Creator::AnotherAgent } else { Creator::Unknown },
    };
    Some(LinkFacts { info, link_type, veth, alias })
}

/// Reads IFLA_LINKINFO: the type, if the agent creates such devices, and whether it is veth.
fn read_type(value: &[u8]) -> (Option<LinkType>, bool) {
    let (mut name, mut data) = (String::new(), Vec::new());
    for attribute in typed::attributes(value, 0) {
        match attribute.kind() {
            libc::IFLA_INFO_KIND => text(attribute.value()).clone_into(&mut name),
            libc::IFLA_INFO_DATA => data = attribute.value().to_vec(),
            _ => {}
        }
    }
    (LinkType::new(&name, &data), name == VETH)
}

/// Reads RTM_NEWADDR and RTM_DELADDR.
pub fn read_address(payload: &[u8]) -> Option<AddrInfo> {
    let header = AddressHeader::parse(payload).ok()?;
    let (mut local, mut peer, mut flags) = (None, None, u32::from(header.flags.bits()));
    for attribute in typed::attributes(payload, ADDRESS_HEADER) {
        // Among the other attributes is the label, which is mostly the name of the link and need not be UTF-8.
        if !matches!(attribute.kind(), libc::IFA_LOCAL | libc::IFA_ADDRESS | libc::IFA_FLAGS) {
            continue;
        }
        match AddressAttribute::parse(&attribute) {
            Ok(AddressAttribute::Local(ip)) => local = Some(ip),
            Ok(AddressAttribute::Address(ip)) => peer = Some(ip),
            Ok(AddressAttribute::Flags(all)) => flags = all.bits(),
            _ => {}
        }
    }
    let net = IpNet::new(local.or(peer)?, header.prefix_len).ok()?;
    Some(AddrInfo { index: header.index, net, scope: header.scope.into(), flags })
}

/// Asks for the link with this name.
pub fn get_link(w: &mut Writer, name: Name) {
    let name = LinkAttribute::Other(DefaultNla::new(libc::IFLA_IFNAME, name.as_bytes().to_vec()));
    typed::begin(w, libc::RTM_GETLINK, PLAIN, &link(LinkHeader::default(), vec![name]));
}

/// Asks for all links, without their statistics.
pub fn dump_links(w: &mut Writer, kind: u16, flags: u16) {
    let attributes = vec![LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])];
    typed::begin(w, kind, flags, &link(LinkHeader::default(), attributes));
}

/// Asks for all addresses.
pub fn dump_addresses(w: &mut Writer, kind: u16, flags: u16) {
    typed::begin(w, kind, flags, &AddressMessage::default());
}

/// Creates a tunnel device, which is down. `parent` is the index of the outer device, 0 for none. If the MTU is 0 or there is no
/// MAC, the kernel chooses one.
pub fn create_link(w: &mut Writer, name: Name, link_to_create: &Link, parent: u32) {
    let Link { kind, mtu, mac, .. } = link_to_create;
    let mut attributes = vec![LinkAttribute::IfName(name.text().into_owned())];
    attributes.extend((*mtu != 0).then_some(LinkAttribute::Mtu(*mtu)));
    attributes.extend(mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
    let data = kinds::codec(kind.name()).and_then(|codec| codec.create(&**kind, parent));
    attributes.push(LinkAttribute::LinkInfo(kinds::link_info(kind.name(), data)));
    typed::begin(w, libc::RTM_NEWLINK, CREATE, &link(LinkHeader::default(), attributes));
}

/// Changes those attributes of an existing device that belong to its type and can be changed in place.
pub fn alter_kind(w: &mut Writer, index: u32, want: &dyn LinkKind) {
    let data = kinds::codec(want.name()).and_then(|codec| codec.alter(want));
    let attributes = vec![LinkAttribute::LinkInfo(kinds::link_info(want.name(), data))];
    typed::begin(w, libc::RTM_NEWLINK, PLAIN, &link(header(index), attributes));
}

/// Deletes a device.
pub fn delete_link(w: &mut Writer, index: u32) {
    typed::begin(w, libc::RTM_DELLINK, PLAIN, &link(header(index), Vec::new()));
}

/// Sets the alias of a device.
pub fn set_alias(w: &mut Writer, index: u32, alias: &str) {
    // The variant `IfAlias` appends a zero, which counts towards the maximum length of an alias.
    let alias = LinkAttribute::Other(DefaultNla::new(libc::IFLA_IFALIAS, alias.as_bytes().to_vec()));
    typed::begin(w, libc::RTM_SETLINK, PLAIN, &link(header(index), vec![alias]));
}

/// Tells the kernel to give no link-local address to a device.
pub fn set_no_link_local_address(w: &mut Writer, index: u32) {
    let none = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
    let attributes = vec![LinkAttribute::AfSpecUnspec(vec![none])];
    typed::begin(w, libc::RTM_SETLINK, PLAIN, &link(header(index), attributes));
}

/// Sets the MTU of a device in bytes.
pub fn set_mtu(w: &mut Writer, index: u32, mtu: u32) {
    typed::begin(w, libc::RTM_SETLINK, PLAIN, &link(header(index), vec![LinkAttribute::Mtu(mtu)]));
}

/// Sets the MAC of a device.
pub fn set_mac(w: &mut Writer, index: u32, mac: Mac) {
    let attributes = vec![LinkAttribute::Address(mac.0.to_vec())];
    typed::begin(w, libc::RTM_SETLINK, PLAIN, &link(header(index), attributes));
}

/// Sets a device administratively up or down.
pub fn set_up(w: &mut Writer, index: u32, up: bool) {
    let flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
    let header = LinkHeader { flags, change_mask: LinkFlags::Up, ..header(index) };
    typed::begin(w, libc::RTM_SETLINK, PLAIN, &link(header, Vec::new()));
}

/// Adds or deletes an address of a device.
pub fn address(w: &mut Writer, add: bool, index: u32, net: IpNet) {
    let ip = net.addr();
    let mut message = AddressMessage::default();
    message.header =
        AddressHeader { family: family(ip).into(), prefix_len: net.prefix_len(), index, ..AddressHeader::default() };
    message.attributes = vec![AddressAttribute::Local(ip), AddressAttribute::Address(ip)];
    if add && ip.is_ipv6() {
        // Nobody on a tunnel would answer duplicate address detection.
        message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    let (kind, flags) = if add { (libc::RTM_NEWADDR, REPLACE) } else { (libc::RTM_DELADDR, PLAIN) };
    typed::begin(w, kind, flags, &message);
}

fn header(index: u32) -> LinkHeader {
    LinkHeader { index, ..LinkHeader::default() }
}

fn link(header: LinkHeader, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    (message.header, message.attributes) = (header, attributes);
    message
}

#[cfg(test)]
mod tests;
