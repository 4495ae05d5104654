// SPDX-License-Identifier: Apache-2.0
//! What a backend decides, and the register of backends. A new backend is one file and one line in [`make`].

use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::network::Network;

use crate::host::Host;
use crate::state::State;

/// Why a lease is set aside by a backend, as a sentence for people: names the field and its content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Skip(pub String);

/// Why a net-conf `Backend` object is refused: names the option and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadOption(pub String);

/// Everything a backend decides. No I/O, no clock, no randomness.
pub trait Backend {
    /// `BackendType` on the wire.
    fn kind(&self) -> &'static str;
    /// Bytes that a pod may send in one packet of this family over this backend.
    fn mtu(&self, host: &Host, family: Family) -> u32;
    /// What our lease will say; known before the device exists. Fails when the host cannot serve this backend
    /// (host-gw with a PublicIP that is not the interface's).
    fn advertise(&self, host: &Host) -> Result<Attrs, Skip>;
    /// Links and addresses. `own` is our lease.
    fn device(&self, host: &Host, own: &Lease) -> State;
    /// Entries for one remote lease.
    fn peer(&self, host: &Host, own: &Lease, peer: &Lease) -> Result<State, Skip>;
}

/// The backend of this type with the options of `Backend` in net-conf (raw JSON, keys case-insensitive).
/// `families`: which are on. Errors name the unknown type or option.
pub fn make(network: &Network) -> Result<Box<dyn Backend>, BadOption> {
    make_kind(&network.backend_type, &network.backend, network)
}

/// The backend of a peer's type with that type's defaults (mixed clusters); `{}` as options.
pub fn make_kind(kind: &str, options: &str, network: &Network) -> Result<Box<dyn Backend>, BadOption> {
    let _ = (kind, options, network);
    Err(BadOption(String::new()))
}
