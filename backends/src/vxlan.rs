// SPDX-License-Identifier: Apache-2.0
//! vxlan: Ethernet over UDP. There is one device for each family and VNI, and each peer has a neighbour, a forwarding entry and a route.
//! Behaviour and wire format: docs/flannel-formats.md, "Leases in etcd" and "Backends". Unlike in flannel, an IPv6 underlay costs 70 bytes.

mod error;
mod mac;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::{PublicIdentities, PublicIdentity};
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::net_conf::NetConf;
use weft_subnet::text::shown;

use crate::backend::{Backend, BackendType, Planned, Skip, families, of_kind};
use crate::family::{
    data, data_member, host_address, label, public, public_member, publish, published, route, set_data,
};
use crate::host::Host;
use crate::identity::{Found, Identities, Identity, StandingLink};
use crate::link::{Difference, Link, LinkKind, Outer};
use crate::options::{BadOption, Members, Options};
use crate::overhead;
use crate::state::{Key, Mac, Name, State, Value};
use crate::underlay_mtu::UnderlayMtu;
use error::{LongName, NotReached, ReachError, VxlanError};
pub use mac::{VtepMac, parse_mac};
use mac::{lease_macs, vtep_mac};

/// Its type, in net-conf and in leases.
pub(crate) const KIND: &str = "vxlan";
/// The kind of its devices.
pub const DEVICE_KIND: &str = "vxlan";
/// 24 bits.
const MAX_VNI: u32 = 0x00ff_ffff;
/// The VNI unless net-conf names another one.
pub const USUAL_VNI: u32 = 1;
/// The port unless net-conf names another one: the one that Linux uses for port 0. It is older than the 4789 of IANA.
pub const LINUX_PORT: u16 = 8472;
/// The smallest MTU of an underlay. With the overhead over IPv6 it leaves the 68 bytes that IPv4 needs.
const MIN_MTU: u32 = 138;

/// The vxlan backend.
#[derive(Debug)]
pub struct Vxlan {
    families: Vec<Family>,
    vni: u32,
    port: u16,
    mtu: UnderlayMtu,
    gbp: bool,
    learning: bool,
    direct_routing: bool,
    /// The VNI of our own device. `None` in a mixed cluster in which we are of another type. The plans of peers contain any other device.
    own: Option<u32>,
}

/// A vxlan device. Only `learning` and `ttl` can be changed after the device was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VxlanLink {
    /// 24 bits.
    pub vni: u32,
    /// The UDP port. 8472 is the kernel's default.
    pub port: u16,
    /// The outer device.
    pub parent: Name,
    /// The outer source address.
    pub local: IpAddr,
    /// Group based policy extension.
    pub gbp: bool,
    /// True if the device learns forwarding entries from packets. It can be changed in place.
    pub learning: bool,
    /// The TTL of outer packets. 0, the kernel's default, is that of other packets of the host. It can be changed in place.
    pub ttl: u8,
}

impl fmt::Display for VxlanLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VxlanLink { vni, port, parent, local, gbp, learning, ttl } = self;
        let gbp = if *gbp { " gbp" } else { "" };
        let learning = if *learning { "learning" } else { "nolearning" };
        write!(f, "vxlan id {vni} local {local} dev {parent} dstport {port}{gbp} {learning}")?;
        match ttl {
            0 => Ok(()),
            ttl => write!(f, " ttl {ttl}"),
        }
    }
}

impl LinkKind for VxlanLink {
    fn name(&self) -> &'static str {
        DEVICE_KIND
    }

    fn parent(&self) -> Option<Name> {
        Some(self.parent)
    }

    fn outer(&self) -> Option<(Family, Outer)> {
        Some((Family::of(self.local), Outer::Udp(self.port)))
    }

    fn named_after(&self) -> Option<&'static str> {
        Some("Backend.VNI")
    }

    fn compare(&self, have: &dyn LinkKind) -> Difference {
        match have.of::<VxlanLink>() {
            Some(have) if have == self => Difference::None,
            Some(have) if (VxlanLink { learning: self.learning, ttl: self.ttl, ..*have }) == *self => Difference::Alter,
            _ => Difference::Recreate,
        }
    }

    fn is_equal(&self, other: &dyn LinkKind) -> bool {
        other.of() == Some(self)
    }
}

/// `BackendData`.
struct Data {
    vni: u32,
    mac: Mac,
}

impl Vxlan {
    /// Reads the options.
    pub fn new(options: &Options, net_conf: &NetConf) -> Result<Vxlan, BadOption> {
        let port = match options.number("Port", 0..=65535, 0)? {
            0 => u32::from(LINUX_PORT),
            port => port,
        };
        let mtu = UnderlayMtu::read(options, MIN_MTU)?;
        let vni = options.number("VNI", 0..=MAX_VNI, USUAL_VNI)?;
        let vxlan = Vxlan {
            families: families(net_conf),
            vni,
            port: u16::try_from(port).unwrap_or_default(),
            mtu,
            gbp: options.flag("GBP")?,
            learning: options.flag("Learning")?,
            direct_routing: options.flag("DirectRouting")?,
            own: (net_conf.backend_type == KIND).then_some(vni),
        };
        for family in vxlan.families.iter().copied() {
            device_name(vxlan.vni, family).map_err(|long| Skip::new(VxlanError::OwnVni(long)))?;
        }
        Ok(vxlan)
    }

    /// Returns the device of this VNI and family, with the first address of our subnet.
    fn tunnel(&self, host: &Host, own: &Lease, vni: u32, family: Family) -> Option<State> {
        let name = device_name(vni, family).ok()?;
        let local = host.uplink.address(family)?;
        let subnet = own.subnets.of(family)?;
        let kind = Arc::new(VxlanLink {
            vni,
            port: self.port,
            parent: host.uplink.name,
            local,
            gbp: self.gbp,
            learning: self.learning,
            ttl: 0,
        });
        let link = Link { kind, mtu: self.mtu(host, family), mac: vtep_mac(host, family), up: true };
        Some(State::from([(Key::Link(name), Value::link(link)), (Key::Addr(name, host_address(subnet)), Value::Addr)]))
    }

    /// Returns the MACs of our devices that exist and for which `wanted` returns true.
    fn standing_macs(&self, found: &Found<'_>, wanted: impl Fn(&StandingLink) -> bool) -> [Option<Mac>; 2] {
        Family::BOTH.map(|family| {
            let name = self.families.contains(&family).then(|| device_name(self.vni, family).ok())??;
            found.link(name).filter(|link| wanted(link))?.mac
        })
    }

    fn half(&self, host: &Host, own: &Lease, peer: &Lease, family: Family) -> Option<Result<State, Skip>> {
        let subnet = peer.subnets.of(family)?;
        let result =
            self.reach(host, own, &peer.attrs, family).map_err(|reason| Skip::new(NotReached { subnet, reason }));
        Some(result.map(|how| match how {
            How::Direct { via, dev } => route(subnet, via, dev, false),
            How::Tunnel { to, data, dev, mut device } => {
                let first = subnet.network();
                device.insert(Key::Fdb(dev, data.mac), Value::Fdb(to));
                device.insert(Key::Neigh(dev, first), Value::Neigh(data.mac));
                device.extend(route(subnet, first, dev, true));
                device
            }
        }))
    }

    fn reach(&self, host: &Host, own: &Lease, attrs: &Attrs, family: Family) -> Result<How, ReachError> {
        let to = public(attrs, family).ok_or(ReachError::Missing(public_member(family)))?;
        let data = self.data(attrs, family)?;
        if vtep_mac(host, family) == Some(data.mac) {
            return Err(ReachError::OurMac { mac: data.mac, member: data_member(family) });
        }
        if self.direct_routing
            && let Some(dev) = host.routes.on_link(to)
        {
            return Ok(How::Direct { via: to, dev });
        }
        let dev =
            device_name(data.vni, family).map_err(|long| ReachError::LongName { member: data_member(family), long })?;
        let device = if self.own == Some(data.vni) {
            (host.uplink.address(family).is_some() && own.subnets.of(family).is_some()).then(State::new)
        } else {
            self.tunnel(host, own, data.vni, family)
        };
        let device = device.ok_or(ReachError::NoLocal { family: label(family), uplink: host.uplink.name })?;
        Ok(How::Tunnel { to, data, dev, device })
    }

    /// Reads `BackendData` of one family. As in Go, the case of names does not matter. If there is no VNI, as in leases of early versions of
    /// flannel, it is ours.
    fn data(&self, attrs: &Attrs, family: Family) -> Result<Data, ReachError> {
        let member = data_member(family);
        let raw = data(attrs, family).ok_or(ReachError::Missing(member))?;
        let members: Members = serde_json::from_str(raw)
            .map_err(|e: serde_json::Error| ReachError::NoObject { member, error: shown(&e.to_string()) })?;
        let vni = match members.get("VNI") {
            None => self.vni,
            Some(vni) => vni
                .as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .filter(|n| *n <= MAX_VNI)
                .ok_or_else(|| ReachError::BadVni { vni: shown(&vni.to_string()), member })?,
        };
        let mac = members.get("VtepMAC").ok_or(ReachError::NoMac(member))?;
        let mac = mac
            .as_str()
            .and_then(parse_mac)
            .ok_or_else(|| ReachError::BadMac { mac: shown(&mac.to_string()), member })?;
        if mac.is_zero() {
            return Err(ReachError::ZeroMac { mac, member });
        }
        if mac.is_multicast() {
            return Err(ReachError::MulticastMac { mac, member });
        }
        Ok(Data { vni, mac })
    }
}

/// How a peer is reached.
enum How {
    /// Directly on the link, without a tunnel.
    Direct { via: IpAddr, dev: Name },
    /// Through a tunnel. `device` contains the device if it is not our own one.
    Tunnel { to: IpAddr, data: Data, dev: Name, device: State },
}

/// Returns the name of the device, which is flannel's. With a VNI of eight digits, or five for IPv6, the name is too long for Linux. flannel
/// fails then, too.
fn device_name(vni: u32, family: Family) -> Result<Name, LongName> {
    let name = match family {
        Family::V4 => format!("flannel.{vni}"),
        Family::V6 => format!("flannel-v6.{vni}"),
    };
    Name::new(&name).ok_or(LongName { vni, name })
}

/// vxlan in the register.
pub(crate) const TYPE: BackendType = BackendType {
    identities: |attrs| lease_macs(attrs).map(|mac| mac.map(|mac| PublicIdentity::new(KIND, mac))),
    device_kind: Some(DEVICE_KIND),
    ..BackendType::new(KIND, make)
};

fn make(options: &Options, net_conf: &NetConf) -> Result<Box<dyn Backend>, BadOption> {
    Ok(Box::new(Vxlan::new(options, net_conf)?))
}

impl Backend for Vxlan {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn understands(&self, lease: &Attrs) -> bool {
        let is_ours = |family: &Family| self.data(lease, *family).map_or(true, |data| data.vni == self.vni);
        lease.backend_type == KIND && self.families.iter().all(is_ours)
    }

    fn outer_family(&self, family: Family) -> Option<Family> {
        Some(family)
    }

    fn underlay_mtu(&self, host: &Host) -> u32 {
        self.mtu.on(&host.uplink)
    }

    fn mtu(&self, host: &Host, family: Family) -> u32 {
        self.mtu.on(&host.uplink).saturating_sub(overhead::vxlan(family))
    }

    fn remark(&self, host: &Host) -> Option<String> {
        self.mtu.remark(&host.uplink)
    }

    fn standing_identities(&self, found: &Found<'_>) -> Result<PublicIdentities, Skip> {
        let macs = self.standing_macs(found, |link| link.ours);
        Ok(macs.map(|mac| mac.map(|mac| PublicIdentity::new(KIND, mac))))
    }

    /// Returns the MACs of the lease, or else those of existing devices, also of flannel's, because peers know these MACs.
    fn identities(&self, found: &Found<'_>, lease: Option<&Attrs>) -> Result<Identities, Skip> {
        let standing = self.standing_macs(found, |_| true);
        let leased = lease.map(lease_macs).unwrap_or_default();
        let mac = |at: usize| match leased[at].or(standing[at]) {
            Some(mac) => Ok(mac),
            None => VtepMac::random(found).map(|random| random.0),
        };
        let failed = |error: io::Error| Skip::new(VxlanError::Random(error));
        Ok(VtepMac::both(mac(0).map_err(failed)?, mac(1).map_err(failed)?))
    }

    fn follow(&self, now: &Identities, lease: &Attrs) -> Identities {
        let [v4, v6] = lease_macs(lease);
        let or_now = |mac: Option<Mac>, family| {
            let now = || now.of(family).and_then(|now| now.of::<VtepMac>()).copied();
            mac.map(VtepMac).or_else(now).map(|mac| Arc::new(mac) as Arc<dyn Identity>)
        };
        Identities::new(or_now(v4, Family::V4), or_now(v6, Family::V6))
    }

    fn advertise(&self, host: &Host) -> Result<Attrs, Skip> {
        let mut attrs = Attrs { backend_type: KIND.to_owned(), ..Attrs::default() };
        for family in self.families.iter().copied() {
            let Some(local) = host.uplink.address(family) else {
                let uplink = host.uplink.name;
                return Err(Skip::new(VxlanError::NoAddress { uplink, family: label(family) }));
            };
            publish(&mut attrs, published(host, family).unwrap_or(local));
            let Some(mac) = vtep_mac(host, family) else {
                return Err(Skip::new(VxlanError::NoMac(label(family))));
            };
            let data = format!("{{\"VNI\":{},\"VtepMAC\":\"{mac}\"}}", self.vni).into_boxed_str();
            set_data(&mut attrs, family, data);
        }
        Ok(attrs)
    }

    fn device(&self, host: &Host, own: &Lease) -> State {
        self.families.iter().filter_map(|family| self.tunnel(host, own, self.vni, *family)).flatten().collect()
    }

    fn plan(&self, host: &Host, own: &Lease, peer: &Lease) -> Planned {
        if let Err(reason) = of_kind(KIND, peer) {
            return Planned::none(reason);
        }
        let mut planned = Planned::default();
        let halves = self.families.iter().filter_map(|family| self.half(host, own, peer, *family));
        halves.for_each(|half| planned.take(half));
        planned
    }
}

#[cfg(test)]
mod tests {
    use super::{Family, device_name};

    #[test]
    fn names_fit_fifteen_bytes() {
        assert!(device_name(9_999_999, Family::V4).is_ok());
        assert!(device_name(10_000_000, Family::V4).is_err());
        assert!(device_name(9_999, Family::V6).is_ok());
        assert!(device_name(10_000, Family::V6).is_err());
    }
}
