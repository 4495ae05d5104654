// SPDX-License-Identifier: Apache-2.0
//! `--tx-checksum-off`: the node computes the checksums of packets that leave over its tunnel devices. Without it, the kernel leaves them to the
//! network card, and some cards, hypervisors and kernels spoil those of tunnelled packets.
//!
//! When a device is made again, its checksums are left to the card again, and nobody announces a change of this feature. So the devices are
//! checked regularly. A file beside subnet.env names the devices whose feature this agent turned off. When the flag is gone, only these are
//! turned on again: what an administrator turned off stays off.

use std::collections::BTreeMap;
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
    /// Why the file cannot be used. It stays as it is until the operator removes it.
    damaged: Option<String>,
}

impl ChecksumOffload {
    /// Returns a value that uses the file beside this subnet file. `off` is true with `--tx-checksum-off`.
    pub fn new(subnet_file: &Path, off: bool) -> ChecksumOffload {
        let file = subnet_file.with_added_extension("tx_checksum");
        ChecksumOffload { off, file, turned_off: BTreeMap::new(), saved: BTreeMap::new(), read: false, damaged: None }
    }

    /// Turns the feature off on these devices, or on again on those where this agent turned it off. Returns what the operator should
    /// do.
    pub fn ensure(&mut self, devices: impl Iterator<Item = Name>) -> Vec<Problem> {
        self.read_file();
        let mut problems: Vec<Problem> = Problem::each(ProblemKind::Offload, self.damaged.clone()).collect();
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

    /// Reads the file once. While it is damaged, it is read again each time.
    fn read_file(&mut self) {
        if self.read && self.damaged.is_none() {
            return;
        }
        self.read = true;
        let file = self.file.display();
        self.damaged = match files::read_parsed(&self.file, parse) {
            Ok(found) => {
                self.saved.clone_from(&found);
                for (name, index) in found {
                    self.turned_off.entry(name).or_insert(index);
                }
                None
            }
            Err(why) => Some(format!(
                "{file}: {why}: the agent does not know where an earlier run turned transmit checksum offload off; see \
                 `ethtool -k` for each tunnel device, turn {TX_CHECKSUM} on where it should be on, then remove {file}"
            )),
        };
    }

    /// Writes the file, if it says something else.
    fn save(&mut self) -> Option<String> {
        if self.damaged.is_some() || self.saved == self.turned_off {
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

/// Parses the file. Returns `None` if it is damaged.
fn parse(text: &[u8]) -> Option<BTreeMap<Name, u32>> {
    text.strip_suffix(b"\n")?.split(|byte| *byte == b'\n').map(line).collect()
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
        let [one, other] = ["flannel.1", "flannel-v6.1"].map(|name| Name::new(name).unwrap());
        assert_eq!(parse(b"7 flannel.1\n8 flannel-v6.1\n"), Some(BTreeMap::from([(one, 7), (other, 8)])));
        for damaged in ["", "7 flannel.1", "\n", "7\n", "x flannel.1\n", "7 \n", "7 flannel.1\n7\n"] {
            assert_eq!(parse(damaged.as_bytes()), None, "{damaged:?}");
        }
    }

    #[test]
    fn a_damaged_file_is_a_problem_until_it_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut offload = ChecksumOffload::new(&dir.path().join("subnet.env"), true);
        let file = offload.file.clone();
        std::fs::write(&file, "damaged").unwrap();
        for _ in 0..2 {
            let problems = offload.ensure(std::iter::empty());
            assert!(problems.len() == 1 && problems[0].text.contains(": it is damaged: "), "{problems:?}");
            assert_eq!(std::fs::read_to_string(&file).unwrap(), "damaged", "a person may read it");
        }
        std::fs::remove_file(&file).unwrap();
        assert_eq!(offload.ensure(std::iter::empty()), []);
    }
}
