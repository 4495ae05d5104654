// SPDX-License-Identifier: Apache-2.0
//! The identities of a backend, such as its MAC or its key. It chooses them from what the agent found: the devices of this host, the files
//! for secrets, the output of its command, and random bytes.

use std::io;

use weft_backends::backend::{Backend, Skip};
use weft_backends::identity::{Found, Identities, Secrets, StandingLink};
use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::PublicIdentities;
use weft_subnet::outside;

use crate::kernel::{Creator, Machine};

/// What a backend may choose its identities from, besides the devices of this host.
#[derive(Clone, Copy)]
pub(super) struct Kept<'a> {
    /// The files for secrets.
    pub secrets: &'a dyn Secrets,
    /// The output of the backend's command before the lease.
    pub printed: Option<&'a [u8]>,
}

/// Returns the identities of this backend that an earlier run left.
pub(super) fn standing(
    backend: &dyn Backend,
    machine: &Machine,
    secrets: &dyn Secrets,
) -> Result<PublicIdentities, Skip> {
    with_found(machine, Kept { secrets, printed: None }, |found| backend.standing_identities(found))
}

/// Returns the identities that this backend uses from now on. `lease` is ours, and `printed` is the output of the backend's command before
/// the lease.
pub(super) fn chosen(
    backend: &dyn Backend,
    machine: &Machine,
    kept: Kept<'_>,
    lease: Option<&Attrs>,
) -> Result<Identities, Skip> {
    with_found(machine, kept, |found| backend.identities(found, lease))
}

/// Returns the identities of a backend that net-conf names while the agent runs. `lease` is what our lease says now.
///
/// # Errors
/// What the backend keeps cannot be read or written.
pub fn of_next_backend(
    backend: &dyn Backend,
    machine: &Machine,
    secrets: &dyn Secrets,
    lease: &Attrs,
) -> Result<Identities, Skip> {
    // A lease of another type says nothing about this backend's devices.
    let lease = Some(lease).filter(|lease| lease.backend_type == backend.kind());
    chosen(backend, machine, Kept { secrets, printed: None }, lease)
}

/// Makes identities that are to replace those of this backend. They are kept nowhere yet. Returns `None` if the backend cannot replace its
/// identities.
///
/// # Errors
/// They cannot be made.
pub fn new_identities(
    backend: &dyn Backend,
    machine: &Machine,
    secrets: &dyn Secrets,
) -> Result<Option<Identities>, Skip> {
    with_found(machine, Kept { secrets, printed: None }, |found| backend.new_identities(found))
}

/// Keeps the identities that [`new_identities`] made where a start finds them.
///
/// # Errors
/// They cannot be kept.
pub fn begin_change(
    backend: &dyn Backend,
    machine: &Machine,
    secrets: &dyn Secrets,
    next: &Identities,
) -> Result<(), Skip> {
    with_found(machine, Kept { secrets, printed: None }, |found| backend.begin_change(found, next))
}

/// Returns the identities of a change that was begun and has not ended.
///
/// # Errors
/// They cannot be read.
pub fn next(backend: &dyn Backend, machine: &Machine, secrets: &dyn Secrets) -> Result<Option<Identities>, Skip> {
    with_found(machine, Kept { secrets, printed: None }, |found| backend.next_identities(found))
}

/// Keeps the identities that [`new_identities`] made as the ones in use if the store has `accepted` them, or forgets them.
///
/// # Errors
/// The files cannot be written. Then a start ends the change.
pub fn end_change(backend: &dyn Backend, machine: &Machine, secrets: &dyn Secrets, accepted: bool) -> Result<(), Skip> {
    with_found(machine, Kept { secrets, printed: None }, |found| backend.end_change(found, accepted))
}

fn with_found<T>(machine: &Machine, kept: Kept<'_>, use_it: impl FnOnce(&Found<'_>) -> T) -> T {
    let random = |buffer: &mut [u8]| match outside::fill_simulated(buffer) {
        true => Ok(()),
        false => getrandom::fill(buffer).map_err(io::Error::other),
    };
    use_it(&Found { links: &standing_links(machine), secrets: kept.secrets, random: &random, printed: kept.printed })
}

/// Returns the devices of this host that may be ours. Those of other weft agents are left out.
fn standing_links(machine: &Machine) -> Vec<StandingLink> {
    let ours = machine.links.iter().filter(|link| link.creator != Creator::AnotherAgent);
    ours.map(|link| StandingLink { name: link.name, mac: link.mac, ours: link.creator == Creator::ThisAgent }).collect()
}

#[cfg(test)]
mod tests;
