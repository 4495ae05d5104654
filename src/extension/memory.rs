// SPDX-License-Identifier: Apache-2.0
//! The file with the peers for which a command has run. A peer that leaves while the agent is down gets its last command by it.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use weft_backends::commands::CommandPeer;
use weft_subnet::cidr::Subnets;

use crate::files;
use crate::instance;

/// A peer in the file.
#[derive(Serialize, Deserialize)]
struct Row {
    subnets: (Option<ipnet::Ipv4Net>, Option<ipnet::Ipv6Net>),
    public_ip: Option<Ipv4Addr>,
    public_ipv6: Option<Ipv6Addr>,
    data: Box<str>,
}

/// Returns the path of the file of an instance.
pub fn file(state_dir: &Path, subnet_file: &Path) -> PathBuf {
    instance::state_file(state_dir, "extension", subnet_file)
}

/// Removes the file of an instance, if there is one.
///
/// # Errors
/// The file cannot be removed.
pub fn remove(state_dir: &Path, subnet_file: &Path) -> io::Result<()> {
    files::remove(&file(state_dir, subnet_file))
}

/// Reads the file. A missing file names no peers.
///
/// # Errors
/// It cannot be read, or is damaged.
pub fn read(path: &Path) -> io::Result<Vec<CommandPeer>> {
    let opened: File = match files::open(path) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let rows: Vec<Row> = serde_json::from_reader(BufReader::new(opened))?;
    let peer = |Row { subnets: (v4, v6), public_ip, public_ipv6, data }: Row| {
        let subnets = Subnets { v4, v6 };
        CommandPeer { subnets, public_ip, public_ipv6, data }
    };
    Ok(rows.into_iter().map(peer).collect())
}

/// Replaces the file.
///
/// # Errors
/// It cannot be written. Then the old file stays.
pub fn write(path: &Path, peers: &[Arc<CommandPeer>]) -> io::Result<()> {
    let rows = peers.iter().map(|peer| Row {
        subnets: (peer.subnets.v4, peer.subnets.v6),
        public_ip: peer.public_ip,
        public_ipv6: peer.public_ipv6,
        data: peer.data.clone(),
    });
    files::replace_with(path, 0o600, |file| {
        let mut file = BufWriter::new(file);
        serde_json::to_writer(&mut file, &rows.collect::<Vec<_>>())?;
        file.flush()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_survive_in_the_file_and_a_damaged_one_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/extension");
        assert_eq!(read(&path).unwrap(), []);
        let peer = CommandPeer {
            subnets: Subnets::from_key("10.5.7.0-24").unwrap(),
            public_ip: Some([192, 0, 2, 7].into()),
            public_ipv6: None,
            data: "a\n\"b\"".into(),
        };
        let dual = CommandPeer {
            subnets: Subnets::from_key("10.5.8.0-24&fd05:0:0:8::-64").unwrap(),
            public_ip: None,
            public_ipv6: "2001:db8::8".parse().ok(),
            data: "".into(),
        };
        write(&path, &[Arc::new(peer.clone()), Arc::new(dual.clone())]).unwrap();
        assert_eq!(read(&path).unwrap(), [peer, dual]);
        let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600, "the data of leases may be a secret of the commands");
        std::fs::write(&path, "[{").unwrap();
        assert!(read(&path).is_err());
    }
}
