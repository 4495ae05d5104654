// SPDX-License-Identifier: Apache-2.0
//! vxlan: Ethernet over UDP, one device per family and VNI; per peer a neighbour, a forwarding entry and a route.
//! Behaviour and wire format: docs/flannel-formats.md, "Leases in etcd" and "Backends", except that an IPv6 underlay costs 70 bytes.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::{PublicIdentities, PublicIdentity};
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::network::Network;
use weft_subnet::text::shown;

use crate::backend::{Backend, BackendType, BadOption, Planned, Skip, families, of_kind};
use crate::family::{data, data_member, host_address, label, public, public_member, publish, published, route};
use crate::host::Host;
use crate::identity::{Found, Identities, Identity, StandingLink};
use crate::link::{Difference, Link, LinkKind, Outer};
use crate::options::{Members, Options};
use crate::overhead;
use crate::state::{Key, Mac, Name, State, Value};

/// Its type, in net-conf and in leases.
pub(crate) const KIND: &str = "vxlan";
/// 24 bits.
const MAX_VNI: u32 = 0x00ff_ffff;
/// What Linux takes for port 0 (its own number, older than IANA's 4789).
const LINUX_PORT: u32 = 8472;
/// A smaller underlay leaves less than the 68 bytes that IPv4 asks for, with the overhead of an IPv6 underlay.
const MIN_MTU: u32 = 138;

/// The vxlan backend.
#[derive(Debug)]
pub struct Vxlan {
    families: Vec<Family>,
    vni: u32,
    port: u16,
    /// MTU of the underlay, bytes; `None` = the uplink's, which counts also where it is smaller.
    mtu: Option<u32>,
    gbp: bool,
    learning: bool,
    direct_routing: bool,
    /// VNI of the device that `device` plans; `None` in a mixed cluster where we are of another type. Peers bring any other device.
    own: Option<u32>,
}

/// A vxlan device. All but `learning` is fixed when the device is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VxlanLink {
    /// 24 bits.
    pub vni: u32,
    /// UDP port, host order; 8472 is the kernel's default.
    pub port: u16,
    /// Outer device.
    pub parent: Name,
    /// Outer source address.
    pub local: IpAddr,
    /// Group based policy extension.
    pub gbp: bool,
    /// The device learns forwarding entries from packets. Changed in place.
    pub learning: bool,
}

impl fmt::Display for VxlanLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VxlanLink { vni, port, parent, local, gbp, learning } = self;
        let gbp = if *gbp { " gbp" } else { "" };
        let learning = if *learning { "learning" } else { "nolearning" };
        write!(f, "vxlan id {vni} local {local} dev {parent} dstport {port}{gbp} {learning}")
    }
}

impl LinkKind for VxlanLink {
    fn name(&self) -> &'static str {
        "vxlan"
    }

    fn parent(&self) -> Option<Name> {
        Some(self.parent)
    }

    fn outer(&self) -> Option<(Family, Outer)> {
        let family = if self.local.is_ipv4() { Family::V4 } else { Family::V6 };
        Some((family, Outer::Udp(self.port)))
    }

    fn compare(&self, have: &dyn LinkKind) -> Difference {
        match have.of::<VxlanLink>() {
            Some(have) if have == self => Difference::None,
            Some(have) if (VxlanLink { learning: self.learning, ..*have }) == *self => Difference::Alter,
            _ => Difference::Recreate,
        }
    }

    fn is_equal(&self, other: &dyn LinkKind) -> bool {
        other.of() == Some(self)
    }
}

/// Why vxlan cannot run with these options, or on this host.
#[derive(Debug, thiserror::Error)]
enum VxlanError {
    #[error("Backend.MTU in net-conf is {0}: give the underlay's MTU, at least {MIN_MTU}, or 0 for the interface's")]
    SmallMtu(u32),
    #[error("Backend.VNI in net-conf: {0}; give a smaller one")]
    OwnVni(LongName),
    #[error("{uplink} has no {family} address, which vxlan needs for its {family} device")]
    NoAddress { uplink: Name, family: &'static str },
    #[error("no MAC was chosen for the {0} vxlan device")]
    NoMac(&'static str),
    #[error("choose a MAC for the vxlan device: {0}")]
    Random(io::Error),
}

/// A name of a device that Linux does not take.
#[derive(Debug, thiserror::Error)]
#[error("VNI {vni} makes the device name {name} longer than 15 bytes")]
struct LongName {
    vni: u32,
    name: String,
}

/// Why vxlan does not reach one subnet of a peer.
#[derive(Debug, thiserror::Error)]
#[error("{subnet}: {reason}")]
struct NotReached {
    subnet: IpNet,
    reason: LeaseFault,
}

/// What is wrong with the lease of a peer, or with it on this node.
#[derive(Debug, thiserror::Error)]
enum LeaseFault {
    #[error("the lease has no {0}, which vxlan needs")]
    Missing(&'static str),
    #[error("{member} is not a JSON object ({error})")]
    NoObject { member: &'static str, error: String },
    #[error("VNI {vni} in {member} is not a number of 24 bits")]
    BadVni { vni: String, member: &'static str },
    #[error("{member}: {long}")]
    LongName { member: &'static str, long: LongName },
    #[error("{0} has no VtepMAC")]
    NoMac(&'static str),
    #[error("VtepMAC {mac} in {member} is not an Ethernet address")]
    BadMac { mac: String, member: &'static str },
    #[error("VtepMAC {mac} in {member} is zero")]
    ZeroMac { mac: Mac, member: &'static str },
    #[error("VtepMAC {mac} in {member} is a multicast address")]
    MulticastMac { mac: Mac, member: &'static str },
    #[error("VtepMAC {mac} in {member} is our own: two nodes share it")]
    OurMac { mac: Mac, member: &'static str },
    #[error("this node has no {family} address on {uplink}, or no {family} subnet")]
    NoLocal { family: &'static str, uplink: Name },
}

/// `BackendData`.
struct Data {
    vni: u32,
    mac: Mac,
}

impl Vxlan {
    /// Reads the options.
    pub fn new(options: &Options, network: &Network) -> Result<Vxlan, BadOption> {
        let port = match options.number("Port", 0..=65535, 0)? {
            0 => LINUX_PORT,
            port => port,
        };
        let mtu = match options.number("MTU", 0..=65535, 0)? {
            0 => None,
            mtu if mtu < MIN_MTU => {
                return Err(Skip::new(VxlanError::SmallMtu(mtu)).into());
            }
            mtu => Some(mtu),
        };
        let vni = options.number("VNI", 0..=MAX_VNI, 1)?;
        let vxlan = Vxlan {
            families: families(network),
            vni,
            port: u16::try_from(port).unwrap_or_default(),
            mtu,
            gbp: options.flag("GBP")?,
            learning: options.flag("Learning")?,
            direct_routing: options.flag("DirectRouting")?,
            own: (network.backend_type == KIND).then_some(vni),
        };
        for family in vxlan.families.iter().copied() {
            device_name(vxlan.vni, family).map_err(|long| Skip::new(VxlanError::OwnVni(long)))?;
        }
        Ok(vxlan)
    }

    /// The device of this VNI and family, with our subnet's first address.
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
        });
        let link = Link { kind, mtu: self.mtu(host, family), mac: vtep_mac(host, family), up: true };
        Some(State::from([(Key::Link(name), Value::link(link)), (Key::Addr(name, host_address(subnet)), Value::Addr)]))
    }

    /// The MACs of our devices, as far as they stand and are wanted.
    fn standing_macs(&self, found: &Found<'_>, wanted: impl Fn(&StandingLink) -> bool) -> [Option<Mac>; 2] {
        [Family::V4, Family::V6].map(|family| {
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

    fn reach(&self, host: &Host, own: &Lease, attrs: &Attrs, family: Family) -> Result<How, LeaseFault> {
        let to = public(attrs, family).ok_or(LeaseFault::Missing(public_member(family)))?;
        let data = self.data(attrs, family)?;
        if vtep_mac(host, family) == Some(data.mac) {
            return Err(LeaseFault::OurMac { mac: data.mac, member: data_member(family) });
        }
        if self.direct_routing
            && let Some(dev) = host.routes.on_link(to)
        {
            return Ok(How::Direct { via: to, dev });
        }
        let dev =
            device_name(data.vni, family).map_err(|long| LeaseFault::LongName { member: data_member(family), long })?;
        let device = if self.own == Some(data.vni) {
            (host.uplink.address(family).is_some() && own.subnets.of(family).is_some()).then(State::new)
        } else {
            self.tunnel(host, own, data.vni, family)
        };
        let device = device.ok_or(LeaseFault::NoLocal { family: label(family), uplink: host.uplink.name })?;
        Ok(How::Tunnel { to, data, dev, device })
    }

    /// Reads `BackendData` of one family, names in any case, as Go does. flannel ignores a peer's VNI, and early
    /// versions wrote none: then it is ours.
    fn data(&self, attrs: &Attrs, family: Family) -> Result<Data, LeaseFault> {
        let member = data_member(family);
        let raw = data(attrs, family).ok_or(LeaseFault::Missing(member))?;
        let members: Members = serde_json::from_str(raw)
            .map_err(|e: serde_json::Error| LeaseFault::NoObject { member, error: shown(&e.to_string()) })?;
        let vni = match members.get("VNI") {
            None => self.vni,
            Some(vni) => vni
                .as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .filter(|n| *n <= MAX_VNI)
                .ok_or_else(|| LeaseFault::BadVni { vni: shown(&vni.to_string()), member })?,
        };
        let mac = members.get("VtepMAC").ok_or(LeaseFault::NoMac(member))?;
        let mac = mac
            .as_str()
            .and_then(parse_mac)
            .ok_or_else(|| LeaseFault::BadMac { mac: shown(&mac.to_string()), member })?;
        if mac == Mac([0; 6]) {
            return Err(LeaseFault::ZeroMac { mac, member });
        }
        if mac.0[0] & 1 == 1 {
            return Err(LeaseFault::MulticastMac { mac, member });
        }
        Ok(Data { vni, mac })
    }
}

/// How a peer is reached.
enum How {
    /// On the link: no tunnel.
    Direct { via: IpAddr, dev: Name },
    /// Through a tunnel; `device` is what the peer brings along, empty for our own device.
    Tunnel { to: IpAddr, data: Data, dev: Name, device: State },
}

/// flannel's names. A VNI of eight digits (five with IPv6) makes a name that Linux does not take: flannel fails there, too.
fn device_name(vni: u32, family: Family) -> Result<Name, LongName> {
    let name = match family {
        Family::V4 => format!("flannel.{vni}"),
        Family::V6 => format!("flannel-v6.{vni}"),
    };
    Name::new(&name).ok_or(LongName { vni, name })
}

/// The identity of a vxlan device. The kernel keeps it, as the device's address. Peers learn it from our lease, so a device that is
/// made again gets the MAC that the lease names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VtepMac(pub Mac);

impl Identity for VtepMac {
    fn public(&self) -> PublicIdentity {
        PublicIdentity::new(self.0)
    }

    fn name(&self) -> &'static str {
        "VtepMAC"
    }

    fn remedy(&self) -> &'static str {
        "delete flannel's device and restart the agent"
    }
}

impl VtepMac {
    /// The identities of two devices with these MACs.
    pub fn both(v4: Mac, v6: Mac) -> Identities {
        let identity = |mac| Some(Arc::new(VtepMac(mac)) as Arc<dyn Identity>);
        Identities::new(identity(v4), identity(v6))
    }

    /// A random unicast, locally administered address.
    fn random(found: &Found<'_>) -> io::Result<VtepMac> {
        let mut mac = [0; 6];
        (found.random)(&mut mac)?;
        mac[0] = (mac[0] & 0xfc) | 0x02;
        Ok(VtepMac(Mac(mac)))
    }
}

/// MAC of our vxlan device of this family. There is none where the network's own backend is another one: then peers bring the device,
/// nobody is told its MAC, and the kernel chooses it.
fn vtep_mac(host: &Host, family: Family) -> Option<Mac> {
    host.identities.of(family)?.of::<VtepMac>().map(|identity| identity.0)
}

/// The MACs that a lease names, of the IPv4 device and of the IPv6 device; one that no device can have counts as none.
fn lease_macs(attrs: &Attrs) -> [Option<Mac>; 2] {
    let mac = |data: &Option<Box<str>>| {
        let members: Members = serde_json::from_str(data.as_deref()?).ok()?;
        let mac = parse_mac(members.get("VtepMAC")?.as_str()?)?;
        (mac != Mac([0; 6]) && mac.0[0] & 1 == 0).then_some(mac)
    };
    [mac(&attrs.backend_data), mac(&attrs.backend_v6_data)]
}

/// A MAC in any notation that Go's net.ParseMAC reads: `02:00:00:00:00:01`, `02-00-00-00-00-01` or `0200.0000.0001`.
pub fn parse_mac(text: &str) -> Option<Mac> {
    let separator = text.chars().find(|c| !c.is_ascii_hexdigit())?;
    let width = match separator {
        ':' | '-' => 2,
        '.' => 4,
        _ => return None,
    };
    let groups: Vec<&str> = text.split(separator).collect();
    let is_group = |group: &&str| group.len() == width && group.bytes().all(|b| b.is_ascii_hexdigit());
    if groups.len() * width != 12 || !groups.iter().all(is_group) {
        return None;
    }
    let number = u64::from_str_radix(&groups.concat(), 16).ok()?;
    let [_, _, mac @ ..] = number.to_be_bytes();
    Some(Mac(mac))
}

/// vxlan in the register.
pub(crate) const TYPE: BackendType = BackendType {
    identities: |attrs| lease_macs(attrs).map(|mac| mac.map(PublicIdentity::new)),
    ..BackendType::new(KIND, make)
};

fn make(options: &Options, network: &Network) -> Result<Box<dyn Backend>, BadOption> {
    Ok(Box::new(Vxlan::new(options, network)?))
}

impl Backend for Vxlan {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn mtu(&self, host: &Host, family: Family) -> u32 {
        let underlay = self.mtu.map_or(host.uplink.mtu, |mtu| mtu.min(host.uplink.mtu));
        underlay.saturating_sub(overhead::vxlan(family))
    }

    fn remark(&self, host: &Host) -> Option<String> {
        let (name, carries) = (host.uplink.name, host.uplink.mtu);
        let mtu = self.mtu.filter(|mtu| *mtu > carries)?;
        Some(format!(
            "Backend.MTU in net-conf is {mtu}, but the uplink {name} carries {carries}: this node uses {carries}"
        ))
    }

    fn standing_identities(&self, found: &Found<'_>) -> Result<PublicIdentities, Skip> {
        let macs = self.standing_macs(found, |link| link.ours);
        Ok(macs.map(|mac| mac.map(PublicIdentity::new)))
    }

    /// The lease counts first, then a device that stands, also flannel's: peers know these MACs.
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
            match family {
                Family::V4 => attrs.backend_data = Some(data),
                Family::V6 => attrs.backend_v6_data = Some(data),
            }
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
    use super::{Family, Mac, device_name, parse_mac};

    #[test]
    fn macs_as_go_reads_them() {
        let mac = Mac([0xc6, 0xd2, 0x32, 0x6f, 0x8f, 0x44]);
        for text in ["c6:d2:32:6f:8f:44", "C6-D2-32-6F-8F-44", "c6d2.326f.8f44"] {
            assert_eq!(parse_mac(text), Some(mac), "{text}");
        }
        for text in [
            "",
            "c6d2326f8f44",
            "c6:d2:32:6f:8f",
            "c6:d2:32:6f:8f:4",
            "c6:d2-32:6f:8f:44",
            "c6:d2:32:6f:8f:44:00:01",
            "+6:d2:32:6f:8f:44",
        ] {
            assert_eq!(parse_mac(text), None, "{text}");
        }
    }

    #[test]
    fn names_fit_fifteen_bytes() {
        assert!(device_name(9_999_999, Family::V4).is_ok());
        assert!(device_name(10_000_000, Family::V4).is_err());
        assert!(device_name(9_999, Family::V6).is_ok());
        assert!(device_name(10_000, Family::V6).is_err());
    }
}
