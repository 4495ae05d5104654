// SPDX-License-Identifier: Apache-2.0
//! The subnet file of the agent (subnet.env).

use std::fs;
use std::io;
use std::path::Path;

use ipnet::IpNet;
use weft_subnet::env::SubnetEnv;

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
    pub(crate) fn env(&self) -> Option<&SubnetEnv> {
        match self {
            SubnetFile::Good(env) => Some(env),
            SubnetFile::Missing | SubnetFile::Bad(_) => None,
        }
    }

    /// Returns the subnets of this node, if the file names them.
    pub fn subnets(&self) -> Vec<IpNet> {
        self.env().map(|env| env.subnets.iter().collect()).unwrap_or_default()
    }
}

/// Reads the subnet file.
pub(crate) fn read(path: &Path) -> SubnetFile {
    match fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => SubnetFile::Missing,
        Err(error) => SubnetFile::Bad(error.to_string()),
        Ok(text) => match SubnetEnv::parse(&text) {
            Some(env) => SubnetFile::Good(env),
            None => SubnetFile::Bad("it names no valid subnet".to_owned()),
        },
    }
}
