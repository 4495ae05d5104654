// SPDX-License-Identifier: Apache-2.0
//! The register of backends, and how a backend is made for a net-conf or for the lease of a peer.

use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::BackendTypes;
use weft_subnet::net_conf::NetConf;
use weft_subnet::text::Shown;

use crate::backend::{Backend, BackendType};
use crate::options::{BadOption, BadType, Options};

/// The register of all backends. A new backend is one file, with its `mod` line in `lib.rs`, and one line here.
#[rustfmt::skip]
const REGISTER: &[BackendType] = &[
    crate::vxlan::TYPE,
    crate::host_gw::TYPE,
    crate::ipip::TYPE,
    crate::wireguard::TYPE,
    crate::alloc::TYPE,
    crate::udp::TYPE,
    crate::extension::TYPE,
];

/// What the stores must know about the registered types.
pub const TYPES: BackendTypes = BackendTypes {
    identities: |attrs| of_lease(attrs).map(|known| (known.identities)(attrs)).unwrap_or_default(),
    annotations: |attrs| of_lease(attrs).map(|known| (known.annotations)(attrs)).unwrap_or_default(),
    ports: |attrs| of_lease(attrs).map(|known| (known.ports)(attrs)).unwrap_or_default(),
};

/// Returns the first type that this lease may have. The types without a name in leases have the same annotations.
fn of_lease(attrs: &Attrs) -> Option<&'static BackendType> {
    REGISTER.iter().find(|known| known.lease_type == attrs.backend_type)
}

/// Returns true if the leases of this type have its name. Otherwise a lease without a type may also be a reservation that a person wrote,
/// or a lease of another type without a name.
pub fn names_its_leases(kind: &str) -> bool {
    REGISTER.iter().all(|known| known.kind != kind || !known.lease_type.is_empty())
}

/// Returns false if something else than the agent makes the routes to peers of this type. Of a type that is not in the register this is not
/// known, and it counts as one with routes.
pub fn makes_routes(kind: &str) -> bool {
    REGISTER.iter().all(|known| known.kind != kind || known.makes_routes)
}

/// Returns the kind of the devices of this type, as the kernel names it, which is also the name of the module that makes them. `None` if the
/// type has no devices, or is not in the register.
pub fn device_kind(kind: &str) -> Option<&'static str> {
    REGISTER.iter().find(|known| known.kind == kind)?.device_kind
}

/// A type that weft does not have on purpose.
struct Replaced {
    kind: &'static str,
    /// The type that serves the same purpose.
    by: &'static str,
    /// How to use that.
    instead: &'static str,
}

const REPLACED: &[Replaced] = &[
    Replaced { kind: "ipsec", by: "wireguard", instead: "use wireguard" },
    Replaced { kind: "tencent-vpc", by: "alloc", instead: FOR_CLOUDS },
    Replaced { kind: "aws-vpc", by: "alloc", instead: FOR_CLOUDS },
    Replaced { kind: "gce", by: "alloc", instead: FOR_CLOUDS },
    Replaced { kind: "ali-vpc", by: "alloc", instead: FOR_CLOUDS },
];
const FOR_CLOUDS: &str = "use alloc, and let a controller of the cloud make the routes";

/// Returns why a type that is not in the register is refused.
fn refused(kind: &str) -> BadType {
    let supported = REGISTER.iter().map(|known| known.kind).collect::<Vec<_>>().join(", ");
    let is_registered = |other: &str| REGISTER.iter().any(|known| known.kind == other);
    if let Some(old) = REPLACED.iter().find(|old| old.kind == kind && is_registered(old.by)) {
        return BadType::Replaced { kind: kind.to_owned(), instead: old.instead };
    }
    match kind {
        "" => BadType::NotGiven(supported),
        _ => BadType::Unknown { kind: Shown(kind).to_string(), supported },
    }
}

/// Makes the backend that net-conf names, with its options (`Backend` in net-conf: raw JSON, keys in any case).
///
/// # Errors
/// The type is unknown, or an option is bad. The error names it.
pub fn make(net_conf: &NetConf) -> Result<Box<dyn Backend>, BadOption> {
    make_kind(&net_conf.backend_type, &net_conf.backend, net_conf)
}

/// Makes the backend of this type with these options.
///
/// # Errors
/// As [`make`].
pub fn make_kind(kind: &str, options: &str, net_conf: &NetConf) -> Result<Box<dyn Backend>, BadOption> {
    let options = Options::parse(options)?;
    let known = REGISTER.iter().find(|known| known.kind == kind).ok_or_else(|| refused(kind))?;
    (known.make)(&options, net_conf)
}

/// Returns the first options in net-conf for which its backend does not ask. They have no effect, as with flannel, but may be misspelled.
pub fn unknown_options(net_conf: &NetConf) -> Vec<String> {
    let Ok(options) = Options::parse(&net_conf.backend) else { return Vec::new() };
    let known = REGISTER.iter().find(|known| known.kind == net_conf.backend_type);
    // A backend that is refused may not have asked for all of its options.
    if known.is_some_and(|known| (known.make)(&options, net_conf).is_ok()) { options.unknown() } else { Vec::new() }
}

/// Makes the backend of the type that a peer's lease names, with the defaults of that type, for mixed clusters. If the type is not that of
/// net-conf, the plan of each peer contains the device that it needs.
///
/// # Errors
/// No lease can have this type, or weft cannot reach its nodes.
pub fn make_for_lease(lease_type: &str, net_conf: &NetConf) -> Result<Box<dyn Backend>, BadOption> {
    if lease_type.is_empty() {
        return Err(BadType::LeaseWithout.into());
    }
    let known = REGISTER.iter().find(|known| known.lease_type == lease_type).ok_or_else(|| refused(lease_type))?;
    (known.make)(&Options::parse("{}")?, net_conf)
}
