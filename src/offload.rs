// SPDX-License-Identifier: Apache-2.0
//! `--tx-checksum-off`: the node computes the checksums of packets that leave over its tunnel devices. Without it, the kernel leaves them to the
//! network card, and some cards, hypervisors and kernels spoil those of tunnelled packets.
//!
//! When a device is made again, its checksums are left to the card again, and nobody announces a change of this feature. So the devices are
//! checked regularly. A file beside subnet.env names the devices whose feature this agent turned off. When the flag is gone, only these are
//! turned on again: what an administrator turned off stays off.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use weft_backends::state::Name;
use weft_netlink::ethtool::{self, EthtoolError, TX_CHECKSUM};

use crate::files;
use crate::observe::problem::{Problem, ProblemKind};

/// The devices whose transmit checksum offload this agent turned off.
#[derive(Debug)]
pub struct ChecksumOffload {
    /// True with `--tx-checksum-off`.
    off: bool,
    file: PathBuf,
    /// The index of each device. A device that was made again has another one.
    turned_off: BTreeMap<Name, u32>,
    /// What the file says.
    saved: BTreeMap<Name, u32>,
    read: bool,
}

impl ChecksumOffload {
    /// Returns a value that uses the file beside this subnet file. `off` is true with `--tx-checksum-off`.
    pub fn new(subnet_file: &Path, off: bool) -> ChecksumOffload {
        let file = subnet_file.with_added_extension("tx_checksum");
        ChecksumOffload { off, file, turned_off: BTreeMap::new(), saved: BTreeMap::new(), read: false }
    }

    /// Turns the feature off on these devices, or on again on those where this agent turned it off. Returns what the operator should
    /// do.
    pub fn ensure(&mut self, devices: impl Iterator<Item = Name>) -> Vec<Problem> {
        let mut problems: Vec<Problem> = Problem::each(ProblemKind::Offload, self.read_file()).collect();
        let mut turn_on = std::mem::take(&mut self.turned_off);
        if self.off {
            turn_on.retain(|name, index| is_same(*name, *index));
            self.turned_off = turn_on;
            for name in devices {
                let Ok(index) = if_nametoindex(name.as_bytes()) else { continue };
                problems.extend(self.turn_off(name, index));
            }
        } else {
            for (name, index) in turn_on.into_iter().filter(|(name, index)| is_same(*name, *index)) {
                if let Err(error) = ethtool::set_tx_checksum(index, true).or_else(unless_gone) {
                    problems.push(problem(name, &error, true));
                    self.turned_off.insert(name, index);
                } else {
                    tracing::info!(device = %name, "transmit checksum offload is on again");
                }
            }
        }
        problems.extend(Problem::each(ProblemKind::Offload, self.save()));
        problems
    }

    fn turn_off(&mut self, name: Name, index: u32) -> Option<Problem> {
        match ethtool::has_tx_checksum(index) {
            Ok(false) => return None,
            Ok(true) => {}
            Err(error) => return unless_gone(error).err().map(|error| problem(name, &error, false)),
        }
        self.turned_off.insert(name, index);
        // The file is written first, so that it is right after a crash. If it cannot be written, `ensure` says so in the end.
        let _ = self.save();
        match ethtool::set_tx_checksum(index, false).or_else(unless_gone) {
            Ok(()) => {
                tracing::info!(device = %name, "transmit checksum offload is off");
                None
            }
            Err(error) => {
                self.turned_off.remove(&name);
                Some(problem(name, &error, false))
            }
        }
    }

    /// Reads the file once. If it is damaged, the node still works: a device stays as it is until it is made again.
    fn read_file(&mut self) -> Option<String> {
        if std::mem::replace(&mut self.read, true) {
            return None;
        }
        let text = match files::read(&self.file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
            Err(error) => {
                let file = self.file.display();
                return Some(format!(
                    "read {file}: {error}: transmit checksum offload may stay off on a tunnel device"
                ));
            }
        };
        self.turned_off = text.split(|byte| *byte == b'\n').filter_map(line).collect();
        self.saved.clone_from(&self.turned_off);
        None
    }

    /// Writes the file, if it says something else.
    fn save(&mut self) -> Option<String> {
        if self.saved == self.turned_off {
            return None;
        }
        let saved = if self.turned_off.is_empty() {
            files::remove(&self.file)
        } else {
            let mut text = Vec::new();
            for (name, index) in &self.turned_off {
                text.extend_from_slice(format!("{index} ").as_bytes());
                text.extend_from_slice(name.as_bytes());
                text.push(b'\n');
            }
            files::replace(&self.file, &text, 0o644)
        };
        let Err(error) = saved else {
            self.saved.clone_from(&self.turned_off);
            return None;
        };
        let file = self.file.display();
        Some(format!(
            "write {file}: {error}: transmit checksum offload will stay off when --tx-checksum-off is taken away"
        ))
    }
}

/// Parses a line of the file: an index and a name.
fn line(line: &[u8]) -> Option<(Name, u32)> {
    let at = line.iter().position(|byte| *byte == b' ')?;
    let index = std::str::from_utf8(&line[..at]).ok()?.parse().ok()?;
    Some((Name::of_kernel(&line[at + 1..])?, index))
}

fn is_same(name: Name, index: u32) -> bool {
    if_nametoindex(name.as_bytes()).is_ok_and(|now| now == index)
}

/// Returns the error, unless the device is gone: then there is no problem.
fn unless_gone(error: EthtoolError) -> Result<(), EthtoolError> {
    match error {
        EthtoolError::Refused(Errno::ENODEV) => Ok(()),
        error => Err(error),
    }
}

fn problem(name: Name, error: &EthtoolError, on: bool) -> Problem {
    let command = format!("ethtool -K {name} {TX_CHECKSUM} {}", if on { "on" } else { "off" });
    let text = format!("--tx-checksum-off: {name}: {error}; run: {command}");
    Problem::new(ProblemKind::Offload, text).with_command(command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::tests::with_fifo;

    #[test]
    fn a_file_that_is_not_regular_is_a_problem_and_holds_nothing_up() {
        let dir = tempfile::tempdir().unwrap();
        let mut offload = ChecksumOffload::new(&dir.path().join("subnet.env"), false);
        let file = offload.file.clone();
        let problems = with_fifo(&file, move || offload.ensure(std::iter::empty()));
        assert!(problems[0].text.contains(".tx_checksum: it is not a regular file"), "{problems:?}");
    }

    #[test]
    fn a_line_of_the_file_is_an_index_and_a_name() {
        let name = Name::new("flannel.1").unwrap();
        assert_eq!(line(b"7 flannel.1"), Some((name, 7)));
        for damaged in [&b""[..], b"7", b"x flannel.1", b"7 ", b"7 a name that is too long"] {
            assert_eq!(line(damaged), None, "{damaged:?}");
        }
    }
}
