// SPDX-License-Identifier: Apache-2.0
//! The messages of a routed pod (rtnetlink(7), linux/veth.h, linux/if_link.h).

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::RawFd;

use nix::libc;
use weft_netlink::rt::{BESIDE, CREATE, PLAIN, REPLACE, RTNH_F_ONLINK, family, ifaddrmsg, ifinfomsg};
use weft_netlink::wire::Writer;

use super::PROTOCOL;
use super::plan::Plan;
use crate::rtnl::{self, Batch};

/// linux/veth.h.
const VETH_INFO_PEER: u16 = 1;
/// linux/if_link.h.
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
const ADDR_GEN_MODE_NONE: u8 = 1;
const UP: (u32, u32) = (libc::IFF_UP as u32, libc::IFF_UP as u32);

/// The pair: the pod's end is born in the pod's namespace, with its name. It cannot be up before the host's end exists (ENOTCONN).
pub fn pair(batch: &mut Batch<'_>, plan: &Plan<'_>, netns: RawFd) {
    let end = |w: &mut Writer, name: &str, mac: [u8; 6]| {
        w.attr_str(libc::IFLA_IFNAME, name);
        w.attr(libc::IFLA_ADDRESS, &mac);
        if let Some(mtu) = plan.mtu {
            w.attr_u32(libc::IFLA_MTU, mtu);
        }
    };
    batch.push("create the veth pair", |w| {
        w.begin(libc::RTM_NEWLINK, CREATE, &ifinfomsg(0, 0, 0));
        end(w, &plan.host, plan.host_mac);
        w.nest(libc::IFLA_LINKINFO, |w| {
            w.attr_str(libc::IFLA_INFO_KIND, "veth");
            w.nest(libc::IFLA_INFO_DATA, |w| {
                w.nest(VETH_INFO_PEER, |w| {
                    w.fixed(&ifinfomsg(0, 0, 0));
                    end(w, &plan.request.ifname, plan.pod_mac);
                    w.attr(libc::IFLA_NET_NS_FD, &netns.to_ne_bytes());
                });
            });
        });
    });
}

/// The host's end: whose it is, and up. Without a link-local address of its own it says nothing by itself on the link;
/// a kernel without IPv6 knows no such setting.
pub fn host_up(batch: &mut Batch<'_>, plan: &Plan<'_>, ipv6: bool) {
    batch.push("set the host's end up", |w| {
        rtnl::link_by_name(w, libc::RTM_SETLINK, PLAIN, &plan.host, UP);
        w.attr(libc::IFLA_IFALIAS, plan.alias.as_bytes());
        if ipv6 {
            w.nest(libc::IFLA_AF_SPEC, |w| {
                w.nest(libc::AF_INET6 as u16, |w| w.attr(IFLA_INET6_ADDR_GEN_MODE, &[ADDR_GEN_MODE_NONE]));
            });
        }
    });
}

/// The pod's end, up.
pub fn pod_up(batch: &mut Batch<'_>, index: u32) {
    batch.push("set the pod's interface up", |w| w.begin(libc::RTM_NEWLINK, PLAIN, &ifinfomsg(index, UP.0, UP.1)));
}

/// An address. IPv6 is usable at once: there is nobody on the link who could have the same.
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

/// A permanent neighbour.
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

/// The host's way to one address of the pod. It replaces the one of a pod that had the address before.
pub fn host_route(batch: &mut Batch<'_>, index: u32, addr: IpAddr) {
    batch.push("add the host's route", |w| {
        let len = if addr.is_ipv6() { 128 } else { 32 };
        w.begin(libc::RTM_NEWROUTE, REPLACE, &rtmsg(addr, len, PROTOCOL, libc::RT_SCOPE_LINK));
        w.attr_ip(libc::RTA_DST, addr);
        w.attr_u32(libc::RTA_OIF, index);
    });
}

/// What the message of the way to the pod's link-local address is for.
pub const LINK_LOCAL: &str = "add the host's link-local route";

/// The host's way to the pod's link-local address: the route that the kernel adds by itself to a gateway's address as a /64.
/// But to such an address a router also joins the anycast address of its subnet, whose route keeps the link for a grace period
/// longer when it is removed: 8 to 12 ms of every DEL. Every pair has one, so it replaces none.
pub fn link_local(batch: &mut Batch<'_>, index: u32) {
    batch.push(LINK_LOCAL, |w| {
        let prefix = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0));
        w.begin(libc::RTM_NEWROUTE, BESIDE, &rtmsg(prefix, 64, PROTOCOL, libc::RT_SCOPE_LINK));
        w.attr_ip(libc::RTA_DST, prefix);
        w.attr_u32(libc::RTA_OIF, index);
    });
}

/// What the message of a pod's route is for.
pub const POD_ROUTE: &str = "add the pod's route";

/// A route in the pod, over the host.
pub fn pod_route(batch: &mut Batch<'_>, index: u32, dst: (IpAddr, u8), gateway: IpAddr) {
    batch.push(POD_ROUTE, |w| {
        let mut header = rtmsg(dst.0, dst.1, libc::RTPROT_BOOT, libc::RT_SCOPE_UNIVERSE);
        // A link-local IPv6 gateway is on the link anyway.
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

/// A link as it is. Asking has an effect: the end that was set up first gets its carrier in a work of the kernel's own, and
/// drops packets until that has run; RTM_GETLINK waits for it (Linux 6.8, linkwatch_sync_dev).
pub fn read(batch: &mut Batch<'_>, name: &str) {
    batch.push("read the link", |w| rtnl::link_by_name(w, libc::RTM_GETLINK, PLAIN, name, (0, 0)));
}
