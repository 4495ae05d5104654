// SPDX-License-Identifier: Apache-2.0
//! Builds the netlink messages of a routed pod (rtnetlink(7), linux/veth.h, linux/if_link.h).

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::RawFd;

use ipnet::IpNet;
use nix::libc;
use weft_netlink::rt::{CREATE, CREATE_ANOTHER, PLAIN, REPLACE, RTNH_F_ONLINK, family, ifaddrmsg, ifinfomsg};
use weft_netlink::rtnl::{self, Batch, LinkFlags};
use weft_netlink::wire::Writer;

use super::PROTOCOL;
use super::params::Params;

/// The attribute that contains the other end (linux/veth.h).
const VETH_INFO_PEER: u16 = 1;
/// Address generation of IPv6 (linux/if_link.h).
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
const ADDR_GEN_MODE_NONE: u8 = 1;
const UP: LinkFlags = LinkFlags { flags: libc::IFF_UP as u32, mask: libc::IFF_UP as u32 };

/// Creates the pair. The pod's end is created in the pod's namespace under its final name. It must not be set up here:
/// the kernel refuses that with ENOTCONN until the host's end exists.
pub fn pair(batch: &mut Batch<'_>, params: &Params<'_>, netns: RawFd) {
    let end = |w: &mut Writer, name: &str, mac: [u8; 6]| {
        w.attr_str(libc::IFLA_IFNAME, name);
        w.attr(libc::IFLA_ADDRESS, &mac);
        if let Some(mtu) = params.mtu {
            w.attr_u32(libc::IFLA_MTU, mtu);
        }
    };
    batch.push("create the veth pair", |w| {
        w.begin(libc::RTM_NEWLINK, CREATE, &ifinfomsg(0, 0, 0));
        end(w, &params.host, params.host_mac);
        w.nest(libc::IFLA_LINKINFO, |w| {
            w.attr_str(libc::IFLA_INFO_KIND, "veth");
            w.nest(libc::IFLA_INFO_DATA, |w| {
                w.nest(VETH_INFO_PEER, |w| {
                    w.fixed(&ifinfomsg(0, 0, 0));
                    end(w, &params.request.ifname, params.pod_mac);
                    w.attr(libc::IFLA_NET_NS_FD, &netns.to_ne_bytes());
                });
            });
        });
    });
}

/// Sets the alias of the host's end and sets it up. With IPv6, the kernel must not generate a link-local address, so
/// that the host sends nothing on the link on its own. A kernel without IPv6 refuses this setting, so `ipv6` must be
/// false then.
pub fn host_up(batch: &mut Batch<'_>, params: &Params<'_>, ipv6: bool) {
    batch.push("set the host's end up", |w| {
        rtnl::link_by_name(w, libc::RTM_SETLINK, PLAIN, &params.host, UP);
        w.attr(libc::IFLA_IFALIAS, params.alias.as_bytes());
        if ipv6 {
            w.nest(libc::IFLA_AF_SPEC, |w| {
                w.nest(libc::AF_INET6 as u16, |w| w.attr(IFLA_INET6_ADDR_GEN_MODE, &[ADDR_GEN_MODE_NONE]));
            });
        }
    });
}

/// Sets the pod's end up.
pub fn pod_up(batch: &mut Batch<'_>, index: u32) {
    batch.push("set the pod's interface up", |w| {
        w.begin(libc::RTM_NEWLINK, PLAIN, &ifinfomsg(index, UP.flags, UP.mask))
    });
}

/// Adds an address. Duplicate address detection is off for IPv6: no other host is on the link, and the address is
/// usable at once.
pub fn address(batch: &mut Batch<'_>, index: u32, addr: IpAddr, len: u8) {
    batch.push("add an address", |w| {
        w.begin(libc::RTM_NEWADDR, REPLACE, &ifaddrmsg(addr, len, index));
        w.attr_ip(libc::IFA_LOCAL, addr);
        w.attr_ip(libc::IFA_ADDRESS, addr);
        if addr.is_ipv6() {
            w.attr_u32(libc::IFA_FLAGS, libc::IFA_F_NODAD);
        }
    });
}

/// Adds a permanent neighbour.
pub fn neighbour(batch: &mut Batch<'_>, index: u32, addr: IpAddr, mac: [u8; 6]) {
    batch.push("add a neighbour", |w| {
        let mut ndmsg = [family(addr), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        ndmsg[4..8].copy_from_slice(&index.to_ne_bytes());
        ndmsg[8..10].copy_from_slice(&libc::NUD_PERMANENT.to_ne_bytes());
        w.begin(libc::RTM_NEWNEIGH, REPLACE, &ndmsg);
        w.attr_ip(libc::NDA_DST, addr);
        w.attr(libc::NDA_LLADDR, &mac);
    });
}

/// Adds the host's route to an address of the pod. It replaces the route of a pod that had the address before.
pub fn host_route(batch: &mut Batch<'_>, index: u32, addr: IpAddr) {
    batch.push("add the host's route", |w| {
        let len = IpNet::from(addr).prefix_len();
        w.begin(libc::RTM_NEWROUTE, REPLACE, &rtmsg(addr, len, PROTOCOL, libc::RT_SCOPE_LINK));
        w.attr_ip(libc::RTA_DST, addr);
        w.attr_u32(libc::RTA_OIF, index);
    });
}

/// Purpose of the message that [`link_local`] builds.
pub const LINK_LOCAL: &str = "add the host's link-local route";

/// Adds the host's route to the pod's link-local address. The kernel would add this route itself if the host's address
/// had a prefix length of 64. For such an address, however, a router also joins the subnet's anycast address, and
/// removing that delays the removal of the link by 8 to 12 ms in every DEL.
///
/// Every pair has such a route, so it must not replace another one.
pub fn link_local(batch: &mut Batch<'_>, index: u32) {
    batch.push(LINK_LOCAL, |w| {
        let prefix = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0));
        w.begin(libc::RTM_NEWROUTE, CREATE_ANOTHER, &rtmsg(prefix, 64, PROTOCOL, libc::RT_SCOPE_LINK));
        w.attr_ip(libc::RTA_DST, prefix);
        w.attr_u32(libc::RTA_OIF, index);
    });
}

/// Purpose of the message that [`pod_route`] builds.
pub const POD_ROUTE: &str = "add the pod's route";

/// Adds a route in the pod via the host.
pub fn pod_route(batch: &mut Batch<'_>, index: u32, dst: (IpAddr, u8), gateway: IpAddr) {
    batch.push(POD_ROUTE, |w| {
        let mut header = rtmsg(dst.0, dst.1, libc::RTPROT_BOOT, libc::RT_SCOPE_UNIVERSE);
        // The kernel accepts a link-local IPv6 gateway without this flag.
        if dst.0.is_ipv4() {
            header[8..12].copy_from_slice(&RTNH_F_ONLINK.to_ne_bytes());
        }
        w.begin(libc::RTM_NEWROUTE, CREATE, &header);
        if dst.1 != 0 {
            w.attr_ip(libc::RTA_DST, dst.0);
        }
        w.attr_ip(libc::RTA_GATEWAY, gateway);
        w.attr_u32(libc::RTA_OIF, index);
    });
}

fn rtmsg(dst: IpAddr, len: u8, protocol: u8, scope: u8) -> [u8; 12] {
    [family(dst), len, 0, 0, libc::RT_TABLE_MAIN, protocol, scope, libc::RTN_UNICAST, 0, 0, 0, 0]
}

/// Reads a link. The request also has an effect: the kernel turns on the carrier of the end that was set up first
/// asynchronously, and packets are dropped until then. RTM_GETLINK waits for it (linkwatch_sync_dev, Linux 6.8).
pub fn read(batch: &mut Batch<'_>, name: &str) {
    batch.push("read the link", |w| rtnl::link_by_name(w, libc::RTM_GETLINK, PLAIN, name, LinkFlags::default()));
}
