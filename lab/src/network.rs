// SPDX-License-Identifier: Apache-2.0
//! Links, addresses and routes of one network namespace, written with rtnetlink. What is read is in [`tables`].

pub mod tables;

use std::fs::File;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::pin::pin;

use anyhow::{Context, Result};
use futures_util::TryStreamExt;
use ipnet::IpNet;
use netlink_packet_route::address::AddressHeaderFlags;
use netlink_packet_route::link::{InfoData, InfoVeth, LinkAttribute, LinkMessage};
use netlink_packet_route::route::RouteMessage;
use rtnetlink::{
    Handle, LinkBridge, LinkIpIp, LinkMessageBuilder, LinkUnspec, LinkVeth, LinkVxlan, LinkWireguard,
    RouteMessageBuilder, new_connection,
};

use super::backend_kind::BackendKind;

/// A connection to the kernel for the network namespace in which it was opened.
#[derive(Debug, Clone)]
pub struct Network {
    handle: Handle,
}

/// One end of a veth pair.
#[derive(Debug, Clone, Copy)]
pub struct VethEnd<'a> {
    /// The path of the namespace of this end.
    pub ns: &'a Path,
    /// Name of the interface.
    pub name: &'a str,
}

impl Network {
    /// Connects to the kernel in the network namespace of the calling thread. The connection stays in that namespace.
    ///
    /// # Errors
    /// The socket cannot be opened.
    pub fn open() -> Result<Network> {
        let (connection, handle, _) = new_connection().context("open a netlink socket")?;
        // The task ends when the last clone of the handle is dropped.
        tokio::spawn(connection);
        Ok(Network { handle })
    }

    /// Creates a bridge and sets it up. Without an MTU, the kernel chooses it.
    ///
    /// # Errors
    /// The kernel refuses the bridge.
    pub async fn add_bridge(&self, name: &str, mtu: Option<u32>) -> Result<()> {
        let bridge = LinkBridge::new(name);
        let bridge = if let Some(mtu) = mtu { bridge.mtu(mtu) } else { bridge };
        self.handle.link().add(bridge.build()).execute().await.with_context(|| format!("add the bridge {name}"))
    }

    /// Creates a veth pair. The end `name` is in this namespace; it becomes a port of a bridge and is set up. The other
    /// end stays down. Without an MTU, the kernel chooses it.
    ///
    /// # Errors
    /// The kernel refuses the pair, or there is no such bridge.
    pub async fn add_port(&self, name: &str, bridge: &str, far: VethEnd<'_>, mtu: Option<u32>) -> Result<()> {
        let bridge = self.link_index(bridge).await?;
        let name_of_ns = far.ns.file_name().unwrap_or_default().display();
        let ns = File::open(far.ns).with_context(|| format!("open the namespace {name_of_ns}"))?;
        let peer = LinkMessageBuilder::<LinkUnspec>::default().name(far.name).setns_by_fd(ns.as_raw_fd());
        let peer = with_mtu(peer, mtu).build();
        let port = LinkVeth::new(name, far.name).set_info_data(InfoData::Veth(InfoVeth::Peer(peer)));
        let port = with_mtu(port, mtu).controller(bridge).up().build();
        self.handle.link().add(port).execute().await.with_context(|| format!("add the veth pair {name}"))
    }

    /// Creates a tunnel device of a backend, as a probe for the kernel's support. A backend without a device is always
    /// supported.
    ///
    /// # Errors
    /// The kernel refuses the device.
    pub async fn add_tunnel(&self, backend: BackendKind) -> Result<()> {
        let device = match backend {
            BackendKind::HostGw => return Ok(()),
            BackendKind::Udp => {
                // A device of this type belongs to whoever opens this file.
                let tun = File::options().read(true).write(true).open("/dev/net/tun");
                return tun.map(drop).context("open /dev/net/tun");
            }
            BackendKind::Vxlan => LinkVxlan::new("probe", 1).port(8472).build(),
            BackendKind::Ipip => LinkIpIp::new("probe").local(Ipv4Addr::LOCALHOST).build(),
            BackendKind::Wireguard => LinkWireguard::new("probe").build(),
        };
        self.handle.link().add(device).execute().await.with_context(|| format!("add a device of {}", backend.wire()))
    }

    /// Sets a link up.
    ///
    /// # Errors
    /// There is no such link, or the kernel refuses it.
    pub async fn set_up(&self, name: &str) -> Result<()> {
        self.change(LinkUnspec::new_with_name(name).up().build()).await.with_context(|| format!("set {name} up"))
    }

    /// Sets a link down.
    ///
    /// # Errors
    /// As [`Network::set_up`].
    pub async fn set_down(&self, name: &str) -> Result<()> {
        self.change(LinkUnspec::new_with_name(name).down().build()).await.with_context(|| format!("set {name} down"))
    }

    /// Deletes a link.
    ///
    /// # Errors
    /// There is no such link.
    pub async fn delete_link(&self, name: &str) -> Result<()> {
        let index = self.link_index(name).await?;
        self.handle.link().del(index).execute().await.with_context(|| format!("delete the link {name}"))
    }

    /// Adds an address to a link. An IPv6 address can be used at once, because it is not checked for duplicates, which
    /// would take a second.
    ///
    /// # Errors
    /// There is no such link, or the kernel refuses the address.
    pub async fn add_address(&self, link: &str, address: IpNet) -> Result<()> {
        let index = self.link_index(link).await?;
        let mut request = self.handle.address().add(index, address.addr(), address.prefix_len());
        if address.addr().is_ipv6() {
            request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        }
        request.execute().await.with_context(|| format!("add {address} to {link}"))
    }

    /// Adds the default route of a family through a gateway, or replaces it.
    ///
    /// # Errors
    /// There is no such link, or the kernel refuses the route.
    pub async fn replace_default_route(&self, link: &str, gateway: IpAddr) -> Result<()> {
        let index = self.link_index(link).await?;
        let route = default_route(index, gateway);
        let request = self.handle.route().add(route).replace();
        request.execute().await.with_context(|| format!("add the default route through {gateway}"))
    }

    /// Returns the index of a link.
    ///
    /// # Errors
    /// There is no such link.
    pub async fn link_index(&self, name: &str) -> Result<u32> {
        let links = self.handle.link().get().match_name(name).execute();
        let link = pin!(links).try_next().await.with_context(|| format!("read the link {name}"))?;
        Ok(link.with_context(|| format!("no link {name}"))?.header.index)
    }

    async fn change(&self, link: LinkMessage) -> Result<()> {
        Ok(self.handle.link().change(link).execute().await?)
    }
}

fn with_mtu<T>(link: LinkMessageBuilder<T>, mtu: Option<u32>) -> LinkMessageBuilder<T> {
    match mtu {
        Some(mtu) => link.append_extra_attribute(LinkAttribute::Mtu(mtu)),
        None => link,
    }
}

fn default_route(link: u32, gateway: IpAddr) -> RouteMessage {
    match gateway {
        IpAddr::V4(gateway) => RouteMessageBuilder::<Ipv4Addr>::new().gateway(gateway).output_interface(link).build(),
        IpAddr::V6(gateway) => RouteMessageBuilder::<Ipv6Addr>::new().gateway(gateway).output_interface(link).build(),
    }
}
