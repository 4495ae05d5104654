// SPDX-License-Identifier: Apache-2.0
//! What a backend decides, and the register of backends. A new backend is one file and one line in [`make_kind`].

use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::network::Network;
use weft_subnet::text::Shown;

use crate::host::Host;
use crate::host_gw::HostGw;
use crate::ipip::Ipip;
use crate::options::Options;
use crate::state::State;
use crate::vxlan::Vxlan;

/// Why a lease is set aside by a backend, as a sentence for people: names the field and its content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Skip(pub String);

/// Why a net-conf `Backend` object is refused: names the option and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadOption(pub String);

/// The plan for one remote lease: each family stands alone, so a bad half harms the other one not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Planned {
    /// The entries of the families that can be reached, with the link and address that they stand on when this is not our own
    /// device (another VNI, another backend type): the index merges equal contributions of many peers.
    pub state: State,
    /// One reason for each family that cannot be reached.
    pub skipped: Vec<Skip>,
}

impl Planned {
    /// Nothing can be planned.
    pub(crate) fn none(reason: String) -> Planned {
        Planned { state: State::new(), skipped: vec![Skip(reason)] }
    }

    /// Adds the plan of one family.
    pub(crate) fn take(&mut self, half: Result<State, Skip>) {
        match half {
            Ok(state) if self.state.is_empty() => self.state = state,
            Ok(state) => self.state.extend(state),
            Err(skip) => self.skipped.push(skip),
        }
    }
}

/// Everything a backend decides. No I/O, no clock, no randomness.
pub trait Backend {
    /// `BackendType` on the wire.
    fn kind(&self) -> &'static str;
    /// Bytes that a pod may send in one packet of this family over this backend.
    fn mtu(&self, host: &Host, family: Family) -> u32;
    /// What net-conf asks for and this host cannot do, with what is done instead, for people.
    fn remark(&self, _host: &Host) -> Option<String> {
        None
    }
    /// What our lease will say; known before the device exists. Fails when the host cannot serve this backend
    /// (host-gw with a PublicIP that is not the interface's).
    fn advertise(&self, host: &Host) -> Result<Attrs, Skip>;
    /// Links and addresses. `own` is our lease.
    fn device(&self, host: &Host, own: &Lease) -> State;
    /// Entries for one remote lease, family by family, and what had to be left out.
    fn plan(&self, host: &Host, own: &Lease, peer: &Lease) -> Planned;

    /// Entries for one remote lease; fails only when no family of it can be reached. [`Backend::plan`] tells of a bad half, too.
    fn peer(&self, host: &Host, own: &Lease, peer: &Lease) -> Result<State, Skip> {
        let Planned { state, skipped } = self.plan(host, own, peer);
        if state.is_empty() && !skipped.is_empty() {
            let reasons: Vec<String> = skipped.into_iter().map(|skip| skip.0).collect();
            return Err(Skip(reasons.join("; ")));
        }
        Ok(state)
    }
}

/// Backend types of flannel that weft knows by name only.
const NOT_YET: &[&str] =
    &["udp", "wireguard", "ipsec", "extension", "alloc", "tencent-vpc", "ali-vpc", "aws-vpc", "gce"];

/// What to choose instead.
const SUPPORTED: &str = "supported: vxlan, host-gw, ipip";

/// The backend of this type with the options of `Backend` in net-conf (raw JSON, keys case-insensitive).
/// Errors name the unknown type or option.
pub fn make(network: &Network) -> Result<Box<dyn Backend>, BadOption> {
    make_kind(&network.backend_type, &network.backend, network)
}

/// The backend of a peer's type with that type's defaults (mixed clusters); `{}` as options.
/// Where the type is not our network's own, every peer's plan brings the device that it stands on.
pub fn make_kind(kind: &str, options: &str, network: &Network) -> Result<Box<dyn Backend>, BadOption> {
    let options = Options::parse(options)?;
    match kind {
        "vxlan" => Ok(Box::new(Vxlan::new(&options, network)?)),
        "host-gw" => Ok(Box::new(HostGw::new(network))),
        "ipip" => Ok(Box::new(Ipip::new(&options, network)?)),
        "" => Err(BadOption(format!(
            "no backend type is given (Backend.Type in net-conf, BackendType in a lease); {SUPPORTED}"
        ))),
        _ if NOT_YET.contains(&kind) => {
            Err(BadOption(format!("backend type {kind} is not supported by weft yet; {SUPPORTED}")))
        }
        _ => Err(BadOption(format!("unknown backend type \"{}\"; {SUPPORTED}", Shown(kind)))),
    }
}

/// The families that are on in this network.
pub(crate) fn families(network: &Network) -> Vec<Family> {
    [Family::V4, Family::V6].into_iter().filter(|f| network.networks.of(*f).is_some()).collect()
}

/// The lease must be of this type: its data mean something else otherwise.
pub(crate) fn of_kind(kind: &str, peer: &Lease) -> Result<(), String> {
    if peer.attrs.backend_type == kind {
        return Ok(());
    }
    Err(format!("BackendType is \"{}\", not {kind:?}", Shown(&peer.attrs.backend_type)))
}
