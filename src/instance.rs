// SPDX-License-Identifier: Apache-2.0
//! The names by which the agents of one host are told apart. Two agents of one host have two subnet files, so every name and number that
//! an agent uses in the kernel is made from the path of its subnet file.

use std::path::{Path, PathBuf};

use weft_backends::owner::ALIAS;

/// The subnet file of an instance that has the plain names.
const USUAL_FILE: &str = weft_subnet::env::USUAL_FILE;

/// The names of one agent's tables and chains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// `weft`, or `weft-1a2b3c4d` for any subnet file but flannel's usual one. At most 13 bytes, so that it fits into the name
    /// of an iptables chain.
    pub name: String,
    /// The path of the subnet file, for people.
    pub file: String,
}

impl Instance {
    /// Returns the instance that belongs to this subnet file. It has the same name after every restart.
    pub fn new(subnet_file: &Path) -> Instance {
        let file = subnet_file.display().to_string();
        if file == USUAL_FILE {
            return Instance { name: "weft".to_owned(), file };
        }
        let [a, b, c, d, ..] = hash(subnet_file).to_be_bytes();
        Instance { name: format!("weft-{a:02x}{b:02x}{c:02x}{d:02x}"), file }
    }

    /// Returns the instance whose devices have this alias, `weft FILE`.
    pub fn of_alias(alias: &str) -> Instance {
        Instance::new(Path::new(alias.strip_prefix(ALIAS).unwrap_or(alias)))
    }

    /// Returns the mark of our devices and tables: `weft FILE`.
    pub fn alias(&self) -> String {
        format!("{ALIAS}{}", self.file)
    }
}

/// Returns the number from which the names and numbers of this agent in the kernel are made.
pub fn hash(subnet_file: &Path) -> u64 {
    weft_netlink::hash::stable(subnet_file.as_os_str().as_encoded_bytes().iter().copied())
}

/// Returns the path of the file in the state directory in which the agent with this subnet file keeps what `kind` names. Two agents of
/// one host share the directory and have two files of each kind.
pub fn state_file(state_dir: &Path, kind: &str, subnet_file: &Path) -> PathBuf {
    state_dir.join(format!("{kind}-{:016x}", hash(subnet_file)))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{Instance, state_file};

    #[test]
    fn two_subnet_files_have_two_names_and_a_file_keeps_its_name() {
        let usual = Instance::new(Path::new("/run/flannel/subnet.env"));
        assert_eq!(usual.name, "weft");
        let other = Instance::new(Path::new("/run/other/subnet.env"));
        // After an upgrade, the agent finds what the earlier version made by these.
        assert_eq!(other.name, "weft-14594e1e");
        let saved = state_file(Path::new("/state"), "peers", Path::new("/run/other/subnet.env"));
        assert_eq!(saved, Path::new("/state/peers-14594e1e21d08cb7"));
        assert_ne!(other.name, Instance::new(Path::new("/run/third/subnet.env")).name);
        // An iptables chain has at most 28 bytes; `-POSTRTG` is added.
        assert!(other.name.starts_with("weft-") && other.name.len() == 13, "{other:?}");
    }

    #[test]
    fn an_instance_is_known_by_the_alias_of_its_devices() {
        for file in ["/run/flannel/subnet.env", "/run/other/subnet.env", "/run/with space/weft .env"] {
            let instance = Instance::new(Path::new(file));
            assert_eq!(instance.alias(), format!("weft {file}"));
            assert_eq!(Instance::of_alias(&instance.alias()), instance);
        }
    }
}
