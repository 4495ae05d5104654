// SPDX-License-Identifier: Apache-2.0
//! Where the private key of this node is kept. The file is the truth, and the lease follows it: the public key stays the same over
//! restarts, and with a state directory over reboots, too, so no peer has to learn a new one.

use std::io;
use std::path::{Path, PathBuf};

use zeroize::Zeroize;

use super::key::{KEY, KeyPair, Secret};
use crate::identity::Found;

/// Why there is no private key.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeyError {
    #[error("the private key of WireGuard has no place: give --state-dir, or set WIREGUARD_KEY_FILE")]
    NoPlace,
    #[error(
        "cannot read the private key of WireGuard from {file}: {error}; the agent makes no new key while one may be there"
    )]
    Read { file: String, error: io::Error },
    #[error(
        "{0} is not a private key of WireGuard (44 characters of base64): delete the file and restart the agent, and this node gets a \
         new key"
    )]
    NoKey(String),
    #[error("cannot write the private key of WireGuard to {file}: {error}")]
    Write { file: String, error: io::Error },
    #[error("cannot choose a private key for WireGuard: {0}")]
    Random(io::Error),
}

/// The key pair that is kept, if there is one: flannel's file comes first, then that in the state directory.
pub(super) fn kept(found: &Found<'_>) -> Result<Option<(KeyPair, PathBuf)>, KeyError> {
    for file in found.secrets.wireguard_key_files() {
        if let Some(pair) = read(found, &file)? {
            return Ok(Some((pair, file)));
        }
    }
    Ok(None)
}

/// The key pair of this node, which is made when there is none. It is kept in every place where no file is yet: flannel finds it when
/// the operator goes back, and it outlives a boot.
pub(super) fn load(found: &Found<'_>) -> Result<KeyPair, KeyError> {
    let files = found.secrets.wireguard_key_files();
    let (pair, from) = match kept(found)? {
        Some(kept) => kept,
        None => {
            // The last place outlives a boot, if there is one that does.
            let file = files.last().ok_or(KeyError::NoPlace)?;
            let pair = generate(found)?;
            match write(found, file, &pair) {
                Ok(()) => (pair, file.clone()),
                // Another process made one in the meantime.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    (read(found, file)?.ok_or_else(|| KeyError::NoKey(file.display().to_string()))?, file.clone())
                }
                Err(error) => return Err(KeyError::Write { file: file.display().to_string(), error }),
            }
        }
    };
    for copy in files.iter().filter(|file| **file != from) {
        // A place that cannot be written, or that has another key already, does not keep the node from working.
        let _ = write(found, copy, &pair);
    }
    Ok(pair)
}

fn generate(found: &Found<'_>) -> Result<KeyPair, KeyError> {
    let mut bytes = [0; KEY];
    let filled = (found.random)(&mut bytes);
    let secret = Secret::new(bytes);
    bytes.zeroize();
    filled.map_err(KeyError::Random)?;
    Ok(KeyPair::of(secret))
}

fn read(found: &Found<'_>, file: &Path) -> Result<Option<KeyPair>, KeyError> {
    let name = || file.display().to_string();
    let read = found.secrets.read(file).map_err(|error| KeyError::Read { file: name(), error })?;
    let Some(mut content) = read else { return Ok(None) };
    // A person may have written the file with a newline at its end.
    let secret = std::str::from_utf8(&content).ok().and_then(|text| Secret::parse(text.trim_ascii_end()));
    content.zeroize();
    secret.map(|secret| Some(KeyPair::of(secret))).ok_or_else(|| KeyError::NoKey(name()))
}

fn write(found: &Found<'_>, file: &Path, pair: &KeyPair) -> io::Result<()> {
    let mut text = pair.private().to_base64();
    let written = found.secrets.create(file, text.as_bytes());
    text.zeroize();
    written
}
