// SPDX-License-Identifier: Apache-2.0
//! The files in which backends keep their secrets, such as the private key of WireGuard.

use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use weft_backends::identity::Secrets;

use crate::files;
use crate::instance::Instance;

/// Maximum size of a file with a key, in bytes. Another file in its place must not fill the memory.
pub(super) const MAX_SIZE: u64 = 4096;
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
        let kept = self.directory.as_ref().map(|directory| kept_wireguard_key(directory, subnet_file));
        self.wireguard_keys = std::iter::once(flannels.to_path_buf()).chain(kept).collect();
        self
    }
}

/// Returns the place of the private key of WireGuard in this state directory.
pub fn kept_wireguard_key(state_dir: &Path, subnet_file: &Path) -> PathBuf {
    state_dir.join(format!("{}.wireguard.key", Instance::new(subnet_file).name))
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
        opened.take(MAX_SIZE + 1).read_to_end(&mut content)?;
        if content.len() as u64 > MAX_SIZE {
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

    fn warn(&self, problem: &dyn fmt::Display) {
        tracing::warn!("{problem}");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::files::tests::with_fifo;

    #[test]
    fn a_secret_never_replaces_another_one() {
        let dir = tempfile::tempdir().unwrap();
        let (file, secrets) = (dir.path().join("key"), SecretFiles::default());
        secrets.create(&file, b"the private key").unwrap();
        let error = secrets.create(&file, b"another").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(secrets.read(&file).unwrap().as_deref(), Some(&b"the private key"[..]));
        assert_eq!(secrets.directory(), None);
    }

    #[test]
    fn only_root_may_read_a_secret_whether_it_is_the_first_or_replaces_one() {
        let dir = tempfile::tempdir().unwrap();
        let (file, secrets) = (dir.path().join("key"), SecretFiles::default());
        let mode = || std::fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        secrets.create(&file, b"the private key").unwrap();
        assert_eq!(mode(), 0o600);
        secrets.replace(&file, b"another").unwrap();
        assert_eq!((mode(), secrets.read(&file).unwrap().as_deref()), (0o600, Some(&b"another"[..])));
    }

    #[test]
    fn a_file_that_is_not_regular_is_an_error_and_holds_nothing_up() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        let fifo = file.clone();
        let error = with_fifo(&file, move || SecretFiles::default().read(&fifo)).unwrap_err();
        assert_eq!(error.to_string(), "it is not a regular file: remove it");
    }

    /// Two agents of one host share the state directory, and have two keys.
    #[test]
    fn the_key_of_wireguard_has_flannels_place_and_one_that_outlives_a_boot() {
        let key = Path::new("/run/flannel/wgkey");
        let files = |state: Option<&Path>, subnet_file: &str| {
            SecretFiles::new(state).with_wireguard_keys(key, Path::new(subnet_file)).wireguard_key_files()
        };
        let usual = files(Some(Path::new("/state")), "/run/flannel/subnet.env");
        assert_eq!(usual, [key, Path::new("/state/weft.wireguard.key")]);
        assert_ne!(files(Some(Path::new("/state")), "/run/other/subnet.env")[1], usual[1]);
        assert_eq!(files(None, "/run/flannel/subnet.env"), [key]);
    }
}
