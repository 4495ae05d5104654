// SPDX-License-Identifier: Apache-2.0
//! What a backend chooses its identities from: the devices of this host, files for secrets, and random bytes.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use weft_backends::backend::{Backend, Skip};
use weft_backends::identity::{Found, Identities, Secrets, StandingLink};
use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::PublicIdentities;
use weft_subnet::outside;

use crate::files;
use crate::instance::Instance;
use crate::kernel::{Creator, Machine};

/// The largest file of a key that is read, in bytes. Another file in its place must not fill the memory.
const MOST_OF_A_SECRET: u64 = 4096;
/// Only root may read a secret.
const MODE: u32 = 0o600;

/// Secrets in files that only root can read.
#[derive(Debug, Clone, Default)]
pub struct SecretFiles {
    directory: Option<PathBuf>,
    wireguard_keys: Vec<PathBuf>,
}

impl SecretFiles {
    /// Returns the places of secrets. `state_dir` is the directory of `--state-dir`, if there is one.
    pub fn new(state_dir: Option<&Path>) -> SecretFiles {
        SecretFiles { directory: state_dir.map(Path::to_path_buf), wireguard_keys: Vec::new() }
    }

    /// Adds the places of the private key of WireGuard: that of flannel, and one in the state directory, which outlives a boot. Each agent
    /// of a host has a key of its own. Its name depends on the subnet file, like all names of an agent's files.
    pub fn with_wireguard_keys(mut self, flannels: &Path, subnet_file: &Path) -> SecretFiles {
        let name = format!("{}.wireguard.key", Instance::new(subnet_file).name);
        let kept = self.directory.as_ref().map(|directory| directory.join(name));
        self.wireguard_keys = std::iter::once(flannels.to_path_buf()).chain(kept).collect();
        self
    }
}

impl Secrets for SecretFiles {
    fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    fn wireguard_key_files(&self) -> Vec<PathBuf> {
        self.wireguard_keys.clone()
    }

    fn read(&self, file: &Path) -> io::Result<Option<Vec<u8>>> {
        let opened = match files::open(file) {
            Ok(opened) => opened,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let mut content = Vec::new();
        opened.take(MOST_OF_A_SECRET + 1).read_to_end(&mut content)?;
        if content.len() as u64 > MOST_OF_A_SECRET {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it is larger than any key"));
        }
        Ok(Some(content))
    }

    fn create(&self, file: &Path, content: &[u8]) -> io::Result<()> {
        files::create(file, content, MODE)
    }

    fn replace(&self, file: &Path, content: &[u8]) -> io::Result<()> {
        files::replace(file, content, MODE)
    }

    fn remove(&self, file: &Path) -> io::Result<()> {
        files::remove(file)
    }

    fn warn(&self, problem: &dyn std::fmt::Display) {
        tracing::warn!("{problem}");
    }
}

/// Returns the devices of this host that may be ours. Those of other weft agents are left out.
fn standing_links(machine: &Machine) -> Vec<StandingLink> {
    let ours = machine.links.iter().filter(|link| link.creator != Creator::AnotherAgent);
    ours.map(|link| StandingLink { name: link.name, mac: link.mac, ours: link.creator == Creator::ThisAgent }).collect()
}

/// What a backend may choose its identities from, besides the devices of this host.
#[derive(Clone, Copy)]
pub(super) struct Kept<'a> {
    /// The files for secrets.
    pub secrets: &'a dyn Secrets,
    /// The output of the backend's command before the lease.
    pub printed: Option<&'a [u8]>,
}

fn with_found<T>(machine: &Machine, kept: Kept<'_>, use_it: impl FnOnce(&Found<'_>) -> T) -> T {
    let random = |buffer: &mut [u8]| match outside::fill_simulated(buffer) {
        true => Ok(()),
        false => getrandom::fill(buffer).map_err(io::Error::other),
    };
    use_it(&Found { links: &standing_links(machine), secrets: kept.secrets, random: &random, printed: kept.printed })
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
pub(super) fn identities(
    backend: &dyn Backend,
    machine: &Machine,
    kept: Kept<'_>,
    lease: Option<&Attrs>,
) -> Result<Identities, Skip> {
    with_found(machine, kept, |found| backend.identities(found, lease))
}

/// Makes identities that are to replace those of this backend. Returns `None` if the backend cannot replace its identities.
pub(super) fn new_identities(
    backend: &dyn Backend,
    machine: &Machine,
    secrets: &dyn Secrets,
) -> Result<Option<Identities>, Skip> {
    with_found(machine, Kept { secrets, printed: None }, |found| backend.new_identities(found))
}

/// The identities that [`new_identities`] made are the ones in use from now on, or are forgotten.
pub(super) fn end_change(
    backend: &dyn Backend,
    machine: &Machine,
    secrets: &dyn Secrets,
    accepted: bool,
) -> Result<(), Skip> {
    with_found(machine, Kept { secrets, printed: None }, |found| backend.end_change(found, accepted))
}

#[cfg(test)]
mod tests;
