// SPDX-License-Identifier: Apache-2.0
//! The files with the private key of this node. The key in the file decides, and the lease is written to match it. So the public key stays the
//! same over restarts, and with a state directory also over reboots, and no peer has to learn a new one.

use std::io;
use std::path::{Path, PathBuf};

use zeroize::Zeroize;

use crate::identity::Found;
use crate::wireguard_key::{KEY, KeyPair, PublicKey, Secret};

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
    #[error("cannot remove {file}, which has a private key of WireGuard: {error}")]
    Remove { file: String, error: io::Error },
}

/// Why a second file does not contain the key that this node uses. The node works, but the next boot may change its key.
#[derive(Debug, thiserror::Error)]
enum CopyProblem {
    #[error(
        "cannot copy the private key of WireGuard to {to}: {error}. This node uses the key of {from}; without the copy it may get another \
         key after a boot, and flannel would not find it"
    )]
    Write { from: String, to: String, error: io::Error },
    #[error(
        "{to} has another private key of WireGuard than {from}, which this node uses, and gets its key after a boot if {from} is gone then. \
         Delete the file of the key that is not wanted and restart the agent"
    )]
    Another { from: String, to: String },
    #[error(
        "{to} is not a copy of the private key of WireGuard in {from}, which this node uses: {error}. Delete it and restart the agent"
    )]
    Unusable { from: String, to: String, error: KeyError },
}

/// The end of the name of the file with a key that is to replace the one in use.
const NEXT: &str = ".next";

/// Returns the key pair that is kept, if there is one, and its file. flannel's file comes first, then the one in the state directory.
pub(super) fn kept(found: &Found<'_>) -> Result<Option<(KeyPair, PathBuf)>, KeyError> {
    for file in found.secrets.wireguard_key_files() {
        if let Some(pair) = read(found, &file)? {
            return Ok(Some((pair, file)));
        }
    }
    Ok(None)
}

/// Returns the key pair of this node. If there is none, it is made. It is written to every place that has no file yet, so that flannel finds it
/// if the operator goes back to flannel, and so that it outlives a boot. `leased` are the keys that our lease names.
pub(super) fn load(found: &Found<'_>, leased: [Option<PublicKey>; 2]) -> Result<KeyPair, KeyError> {
    // An earlier run ended while it changed the key. The peers know the key that our lease names. The file stays until the store has accepted
    // a lease of this run.
    if let Some(next) = next(found)?
        && (leased.contains(&Some(next.public_key())) || is_in_last_place(found, &next) || kept(found)?.is_none())
    {
        return Ok(next);
    }
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
        // The node works even if a place cannot be written, or already has another key.
        if let Some(problem) = copy_problem(found, &pair, &from, copy) {
            found.secrets.warn(&problem);
        }
    }
    Ok(pair)
}

/// Writes the key to a second place. Returns the reason if that place does not have it afterwards.
fn copy_problem(found: &Found<'_>, pair: &KeyPair, from: &Path, to: &Path) -> Option<CopyProblem> {
    let error = write(found, to, pair).err()?;
    let (from, name) = (from.display().to_string(), to.display().to_string());
    if error.kind() != io::ErrorKind::AlreadyExists {
        return Some(CopyProblem::Write { from, to: name, error });
    }
    match read(found, to) {
        Ok(Some(other)) if other.public_key() == pair.public_key() => None,
        Ok(_) => Some(CopyProblem::Another { from, to: name }),
        Err(error) => Some(CopyProblem::Unusable { from, to: name, error }),
    }
}

/// Returns the file for a key that is to replace the one in use. It is beside the last place, which outlives a boot.
fn next_file(found: &Found<'_>) -> Option<PathBuf> {
    let mut name = found.secrets.wireguard_key_files().pop()?.into_os_string();
    name.push(NEXT);
    Some(name.into())
}

/// Returns the key that is to replace the one in use, if a change of the key was begun and has not ended.
pub(super) fn next(found: &Found<'_>) -> Result<Option<KeyPair>, KeyError> {
    next_file(found).map_or(Ok(None), |file| read(found, &file))
}

/// Returns true if the place that outlives a boot has this key. When the store has accepted a new key, it is written there first.
fn is_in_last_place(found: &Found<'_>, pair: &KeyPair) -> bool {
    let last = found.secrets.wireguard_key_files().pop();
    let kept = last.and_then(|file| read(found, &file).ok().flatten());
    kept.is_some_and(|kept| kept.public_key() == pair.public_key())
}

/// Makes a key that can replace the one in use. No file contains it yet.
pub(super) fn make_next(found: &Found<'_>) -> Result<KeyPair, KeyError> {
    next_file(found).ok_or(KeyError::NoPlace)?;
    generate(found)
}

/// Writes the key that is to replace the one in use to the file for such keys. A file that is there is not replaced, because it may be the only
/// one with the key in use.
pub(super) fn begin_change(found: &Found<'_>, next: &KeyPair) -> Result<(), KeyError> {
    let file = next_file(found).ok_or(KeyError::NoPlace)?;
    write(found, &file, next).map_err(|error| KeyError::Write { file: file.display().to_string(), error })
}

/// Ends a change of the key. If the new key was accepted, it is written to all places, and the file that shows the change is removed when all
/// have the key. Otherwise the file is removed at once.
pub(super) fn end_change(found: &Found<'_>, accepted: bool) -> Result<(), KeyError> {
    let Some(next) = next_file(found) else { return Ok(()) };
    if accepted && let Some(pair) = read(found, &next)? {
        // The last place, which outlives a boot, gets it first. A place that cannot be written does not keep the others from it.
        let files = found.secrets.wireguard_key_files();
        let failed: Vec<KeyError> = files.iter().rev().filter_map(|file| replace(found, file, &pair).err()).collect();
        if let Some(error) = failed.into_iter().next() {
            return Err(error);
        }
    }
    let failed = |error| KeyError::Remove { file: next.display().to_string(), error };
    found.secrets.remove(&next).map_err(failed)
}

fn replace(found: &Found<'_>, file: &Path, pair: &KeyPair) -> Result<(), KeyError> {
    let mut text = pair.private().to_base64();
    let written = found.secrets.replace(file, text.as_bytes());
    text.zeroize();
    written.map_err(|error| KeyError::Write { file: file.display().to_string(), error })
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
