// SPDX-License-Identifier: Apache-2.0
//! WireGuard: encrypted tunnels over UDP. A device has one peer for each node, found by its public key, with the node's subnet as its
//! allowed IPs; one route sends all of Network to the device. See docs/adr/017-wireguard.md.

mod error;
mod key_file;
mod lease;
mod link;
mod mode;
mod reach;

use std::sync::Arc;

use ipnet::IpNet;
use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::{PublicIdentities, PublicIdentity, PublicPorts};
use weft_subnet::cidr::{Family, Subnets};
use weft_subnet::lease::Lease;
use weft_subnet::net_conf::NetConf;
use weft_subnet::text::Shown;

use crate::backend::{Backend, BackendType, Planned, Skip, families, of_kind};
use crate::family::{host_address, label, publish_ours, set_data};
use crate::host::Host;
use crate::identity::{Found, Identities, Identity};
use crate::link::Link;
use crate::options::{BadOption, Options};
use crate::overhead;
use crate::state::{Key, Name, Route, State, Value, metric};
use crate::underlay_mtu::UnderlayMtu;
use crate::wireguard_key::{DeviceSecrets, KIND, KeyPair, Secret};
use crate::wireguard_peer::WgPeer;
use error::{NotReached, ReachError, WireguardError};
pub use link::{DEVICE_KIND, WireGuardLink};
use mode::Mode;
use reach::Reached;

/// The names of the devices, which are flannel's: that of IPv4, which is the only one unless the mode is `separate`, and that of IPv6.
const DEVICES: [Name; 2] = [Name::constant("flannel-wg"), Name::constant("flannel-wg-v6")];
/// The smallest MTU of an underlay. It leaves the 68 bytes that IPv4 needs.
const MIN_MTU: u32 = 148;

/// wireguard in the register.
pub(crate) const TYPE: BackendType = BackendType {
    identities: |attrs| lease::keys(attrs).map(|key| key.map(|key| PublicIdentity::new(KIND, key))),
    ports: lease::ports,
    device_kind: Some(DEVICE_KIND),
    ..BackendType::new(KIND, make)
};

fn make(options: &Options, net_conf: &NetConf) -> Result<Box<dyn Backend>, BadOption> {
    Ok(Box::new(Wireguard::new(options, net_conf)?))
}

/// The wireguard backend. It has no `Debug`, because it contains the preshared key.
struct Wireguard {
    families: Vec<Family>,
    networks: Subnets,
    mode: Mode,
    /// `ListenPort` and `ListenPortV6`.
    ports: [u16; 2],
    mtu: UnderlayMtu,
    /// The keepalive interval in seconds. 0 means none.
    keepalive: u16,
    preshared: Option<Arc<Secret>>,
    allow_plaintext: bool,
    /// False in a cluster in which we are of another type. Then no peer of this type has our key.
    is_own: bool,
}

/// One of our devices, with the families that it carries.
struct Device {
    name: Name,
    families: Vec<Family>,
}

impl Wireguard {
    fn new(options: &Options, net_conf: &NetConf) -> Result<Wireguard, BadOption> {
        let refused = |error: WireguardError| BadOption::from(Skip::new(error));
        let port = |name: &str, default: u32| -> Result<u16, BadOption> {
            Ok(u16::try_from(options.number(name, 1..=65535, default)?).unwrap_or_default())
        };
        let mtu = UnderlayMtu::read(options, MIN_MTU)?;
        let mode = match options.text("Mode")? {
            None => Mode::Separate,
            Some(text) => Mode::parse(text).ok_or_else(|| refused(WireguardError::Mode(Shown(text).to_string())))?,
        };
        let families = families(net_conf);
        if let Some(family) = mode.needs().filter(|family| !families.contains(family)) {
            return Err(refused(WireguardError::ModeWithout(label(family))));
        }
        let preshared = match options.text("PSK")?.filter(|text| !text.is_empty()) {
            None => None,
            Some(text) => Some(Arc::new(Secret::parse(text).ok_or_else(|| refused(WireguardError::Psk))?)),
        };
        let ports = [port("ListenPort", 51820)?, port("ListenPortV6", 51821)?];
        if mode == Mode::Separate && families.len() > 1 && ports[0] == ports[1] {
            return Err(refused(WireguardError::OnePort(ports[0])));
        }
        let keepalive = options.number("PersistentKeepaliveInterval", 0..=65535, 0)?;
        Ok(Wireguard {
            families,
            networks: net_conf.networks,
            mode,
            ports,
            mtu,
            keepalive: u16::try_from(keepalive).unwrap_or_default(),
            preshared,
            allow_plaintext: options.flag("AllowPlaintext")?,
            is_own: net_conf.backend_type == KIND,
        })
    }

    /// Returns our devices.
    fn tunnels(&self) -> Vec<Device> {
        if self.mode != Mode::Separate {
            return vec![Device { name: DEVICES[0], families: self.families.clone() }];
        }
        let device = |family: &Family| Device { name: self.device_of(*family), families: vec![*family] };
        self.families.iter().map(device).collect()
    }

    /// Returns the device that carries this family.
    fn device_of(&self, family: Family) -> Name {
        match (self.mode, family) {
            (Mode::Separate, Family::V6) => DEVICES[1],
            _ => DEVICES[0],
        }
    }

    /// Returns the port that our lease names for this family, which is the one on which the device listens. flannel names ListenPortV6 for
    /// IPv6 in every mode, even if no device listens on it.
    fn published_port(&self, host: &Host, family: Family) -> u16 {
        let kept = host.kept_ports.get(&self.device_of(family));
        kept.copied().unwrap_or(self.wanted_port(host, family))
    }

    /// Returns the port that the device of this family should have. The flag `--wireguard-port` is for the first device alone.
    fn wanted_port(&self, host: &Host, family: Family) -> u16 {
        let of_flag = host.wireguard_port.filter(|_| self.device_of(family) == DEVICES[0]);
        of_flag.unwrap_or(self.usual_port(family))
    }

    /// Returns the port of net-conf for this family, on which a node listens whose lease names none.
    fn usual_port(&self, family: Family) -> u16 {
        match (self.mode, family) {
            (Mode::Separate, Family::V6) => self.ports[1],
            _ => self.ports[0],
        }
    }

    /// Returns the entries by which this device reaches one lease.
    fn entries(&self, device: &Device, reached: Reached, subnets: impl Iterator<Item = IpNet>) -> State {
        let Reached { key, endpoint, assumes_port } = reached;
        let preshared = self.preshared.is_some();
        let peer = WgPeer {
            key,
            endpoint: Some(endpoint),
            keepalive: self.keepalive,
            preshared,
            assumes_port,
            is_live: false,
            written: None,
        };
        let holder = Arc::new(key);
        let allowed = subnets.map(|net| (Key::AllowedIp(device.name, net), Value::AllowedIp(holder.clone())));
        let peer = (Key::WgPeer(device.name, key.id()), Value::peer(peer));
        std::iter::once(peer).chain(allowed).collect()
    }

    /// Returns the entries of one lease on one device. `None` if the lease has no subnet of its families.
    fn on_device(&self, host: &Host, device: &Device, peer: &Lease) -> Option<Result<State, Skip>> {
        let subnets: Vec<IpNet> = device.families.iter().filter_map(|family| peer.subnets.of(*family)).collect();
        if subnets.is_empty() {
            return None;
        }
        let reached = self.reach(host, device, &peer.attrs);
        Some(match reached {
            Ok(reached) => Ok(self.entries(device, reached, subnets.into_iter())),
            Err(reason) => Err(Skip::new(NotReached { subnets, reason })),
        })
    }
}

/// Returns our key pair. `None` if net-conf names another type.
fn pair(host: &Host) -> Option<&KeyPair> {
    pair_of(&host.identities)
}

fn pair_of(identities: &Identities) -> Option<&KeyPair> {
    Family::BOTH.into_iter().find_map(|family| identities.of(family)?.of::<KeyPair>())
}

impl Backend for Wireguard {
    fn kind(&self) -> &'static str {
        KIND
    }

    /// With one device for both families, the lease of a node with weft names one port for both. With a device for each, it names two. A lease
    /// that does not name both says nothing about that, and counts as one of our mode.
    fn understands(&self, lease: &Attrs) -> bool {
        let has_our_devices = match lease::ports(lease) {
            [Some(v4), Some(v6)] if self.families.len() > 1 => (v4 == v6) == (self.mode != Mode::Separate),
            _ => true,
        };
        lease.backend_type == KIND && has_our_devices
    }

    /// flannel names two ports in every mode.
    fn knows_options_of_flannel(&self) -> bool {
        self.families.len() < 2
    }

    fn outer_family(&self, family: Family) -> Option<Family> {
        match self.mode {
            Mode::Separate => Some(family),
            Mode::Auto => None,
            Mode::Ipv4 => Some(Family::V4),
            Mode::Ipv6 => Some(Family::V6),
        }
    }

    fn encrypts(&self) -> bool {
        true
    }

    fn refuses(&self, backend_type: &str) -> Option<Skip> {
        let kind = || Shown(backend_type).to_string();
        (!self.allow_plaintext).then(|| Skip::new(WireguardError::Plaintext(kind())))
    }

    fn secrets(&self, host: &Host) -> Option<DeviceSecrets> {
        Some(DeviceSecrets { private: pair(host)?.private().clone(), preshared: self.preshared.clone() })
    }

    fn underlay_mtu(&self, host: &Host) -> u32 {
        self.mtu.on(&host.uplink)
    }

    fn mtu(&self, host: &Host, _family: Family) -> u32 {
        self.mtu.on(&host.uplink).saturating_sub(overhead::wireguard())
    }

    fn remark(&self, host: &Host) -> Option<String> {
        let plaintext = self.allow_plaintext.then(|| {
            "Backend.AllowPlaintext in net-conf is true: packets to nodes of other backend types are not encrypted; remove it when every \
             node has the type wireguard"
                .to_owned()
        });
        let others = self.port_remark(host).into_iter().chain(self.mtu.remark(&host.uplink));
        let all: Vec<String> = plaintext.into_iter().chain(others).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Returns the key of the file if a device exists that an earlier run of this agent made. The device shows that this machine published
    /// the key. The file alone does not, because it may be part of a copied disk.
    fn standing_identities(&self, found: &Found<'_>) -> Result<PublicIdentities, Skip> {
        let stands = |device: &Device| found.link(device.name).is_some_and(|link| link.ours);
        if !self.tunnels().iter().any(stands) {
            return Ok(PublicIdentities::default());
        }
        // The lease may name either key while they change. The subnet and the address decide then.
        if key_file::next(found).map_err(Skip::new)?.is_some() {
            return Ok(PublicIdentities::default());
        }
        let kept = key_file::kept(found).map_err(Skip::new)?;
        Ok(kept.map(|(pair, _)| self.identities_of(pair).public()).unwrap_or_default())
    }

    fn identities(&self, found: &Found<'_>, lease: Option<&Attrs>) -> Result<Identities, Skip> {
        let leased = lease.filter(|lease| lease.backend_type == KIND).map(lease::keys).unwrap_or_default();
        Ok(self.identities_of(key_file::load(found, leased).map_err(Skip::new)?))
    }

    fn new_identities(&self, found: &Found<'_>) -> Result<Option<Identities>, Skip> {
        key_file::make_next(found).map(|pair| Some(self.identities_of(pair))).map_err(Skip::new)
    }

    fn begin_change(&self, found: &Found<'_>, next: &Identities) -> Result<(), Skip> {
        let pair = pair_of(next).ok_or_else(|| Skip::new(WireguardError::NoKey))?;
        key_file::begin_change(found, pair).map_err(Skip::new)
    }

    fn next_identities(&self, found: &Found<'_>) -> Result<Option<Identities>, Skip> {
        Ok(key_file::next(found).map_err(Skip::new)?.map(|pair| self.identities_of(pair)))
    }

    fn end_change(&self, found: &Found<'_>, accepted: bool) -> Result<(), Skip> {
        key_file::end_change(found, accepted).map_err(Skip::new)
    }

    fn ports(&self, host: &Host) -> PublicPorts {
        let is_on = |family: &Family| self.families.contains(family);
        Family::BOTH.map(|family| is_on(&family).then(|| self.published_port(host, family)))
    }

    fn advertise(&self, host: &Host) -> Result<Attrs, Skip> {
        let pair = pair(host).ok_or_else(|| Skip::new(WireguardError::NoKey))?;
        if let [Some(port), Some(port_v6)] = self.ports(host)
            && self.mode == Mode::Separate
            && port == port_v6
        {
            return Err(Skip::new(WireguardError::OneOwnPort(port)));
        }
        let mut attrs = Attrs { backend_type: KIND.to_owned(), ..Attrs::default() };
        for family in self.families.iter().copied() {
            publish_ours(&mut attrs, host, family, KIND)?;
            let data = lease::text(pair.public_key(), self.published_port(host, family));
            set_data(&mut attrs, family, data);
        }
        Ok(attrs)
    }

    fn device(&self, host: &Host, own: &Lease) -> State {
        let Some(pair) = pair(host) else { return State::new() };
        let mut state = Vec::new();
        for Device { name, families } in self.tunnels() {
            let port = self.wanted_port(host, families[0]);
            let kind = Arc::new(WireGuardLink { public: Some(pair.public_key()), port });
            let link = Link { kind, mtu: self.mtu(host, families[0]), mac: None, up: true };
            state.push((Key::Link(name), Value::link(link)));
            for family in families {
                let (Some(network), Some(subnet)) = (self.networks.of(family), own.subnets.of(family)) else {
                    continue;
                };
                state.push((Key::Addr(name, host_address(subnet)), Value::Addr));
                state.push((Key::Route(network, metric(family)), Value::Route(Route::Device { dev: name })));
            }
        }
        state.into_iter().collect()
    }

    fn plan(&self, host: &Host, _own: &Lease, peer: &Lease) -> Planned {
        if let Err(reason) = of_kind(KIND, peer) {
            return Planned::none(reason);
        }
        if !self.is_own {
            return Planned::none(Skip::new(ReachError::NoOwnKey));
        }
        let mut planned = Planned::default();
        let all = self.tunnels();
        all.iter().filter_map(|device| self.on_device(host, device, peer)).for_each(|half| planned.take(half));
        planned
    }
}

impl Wireguard {
    /// Returns a sentence for people if the flag `--wireguard-port` is given and no device takes it.
    fn port_remark(&self, host: &Host) -> Option<String> {
        let port = host.wireguard_port?;
        let [first, second] = DEVICES;
        let is_used = self.tunnels().iter().any(|device| device.name == first);
        (!is_used).then(|| {
            format!(
                "--wireguard-port {port} has no effect: it is for {first}, and without IPv4 the node has {second} alone; set \
                 Backend.ListenPortV6 in net-conf, or Backend.Mode to ipv6"
            )
        })
    }

    /// Returns the identities of the devices of the enabled families.
    fn identities_of(&self, pair: KeyPair) -> Identities {
        let pair: Arc<dyn Identity> = Arc::new(pair);
        let [v4, v6] = Family::BOTH.map(|family| self.families.contains(&family).then(|| pair.clone()));
        Identities::new(v4, v6)
    }
}

#[cfg(test)]
mod tests;
