// SPDX-License-Identifier: Apache-2.0
//! What several checks read: the subnet file, a sysctl, the bridge, and whether a file could be written.

use std::fs;
use std::io;
use std::path::Path;

use ipnet::IpNet;
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, access};
use weft_subnet::env::SubnetEnv;

/// The bridge of flannel's CNI plugin.
pub const BRIDGE: &str = "cni0";

/// The subnet file.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub enum SubnetFile {
    /// There is no file, as before the first start.
    #[default]
    Missing,
    /// The file cannot be read, or names no subnet. The text says why.
    Bad(String),
    /// The content.
    Good(SubnetEnv),
}

impl SubnetFile {
    /// Returns the content, if there is any.
    pub(super) fn env(&self) -> Option<&SubnetEnv> {
        match self {
            SubnetFile::Good(env) => Some(env),
            SubnetFile::Missing | SubnetFile::Bad(_) => None,
        }
    }

    /// Returns the subnets of this node, if the file names them.
    pub(super) fn subnets(&self) -> Vec<IpNet> {
        self.env().map(|env| env.subnets.iter().collect()).unwrap_or_default()
    }
}

/// How full a table of the kernel is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Fill {
    /// Number of entries that count against the limit.
    pub entries: u64,
    /// The limit.
    pub max: u64,
}

/// Reads a number below /proc/sys/net. The kernel shows the namespace of the calling thread there.
pub(crate) fn sysctl(name: &str) -> Option<u64> {
    fs::read_to_string(Path::new("/proc/sys/net").join(name)).ok()?.trim().parse().ok()
}

/// Reads the subnet file.
pub(crate) fn read_subnet_file(path: &Path) -> SubnetFile {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => SubnetFile::Missing,
        Err(error) => SubnetFile::Bad(error.to_string()),
        Ok(text) => match SubnetEnv::parse(&text) {
            Some(env) => SubnetFile::Good(env),
            None => SubnetFile::Bad("it names no valid subnet".to_owned()),
        },
    }
}

/// Returns why the agent could not write a file. It makes missing directories, so the nearest one that exists counts.
pub(super) fn unwritable(path: &Path) -> Option<String> {
    let mut dirs = path.ancestors().skip(1);
    let dir = dirs.find(|dir| dir.exists()).filter(|dir| !dir.as_os_str().is_empty())?;
    if !dir.is_dir() {
        return Some(format!("{} is not a directory", dir.display()));
    }
    if let Err(error) = access(dir, AccessFlags::W_OK | AccessFlags::X_OK) {
        return Some(format!("{}: {}", dir.display(), error.desc()));
    }
    let space = statvfs(dir).ok()?;
    // A file system without a limit, such as overlayfs on some hosts, reports no blocks and no files at all.
    let is_full = space.blocks() > 0 && space.blocks_available() == 0;
    let lacks_files = space.files() > 0 && space.files_available() == 0;
    (is_full || lacks_files).then(|| format!("{}: the file system is full", dir.display()))
}
