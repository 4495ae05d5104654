// SPDX-License-Identifier: Apache-2.0
//! The first start of weft on a node where flannel ran: the routes that flannel wrote for nodes that are gone are on no device of
//! ours and bear no mark, and nobody else would remove them. They are taken for flannel's once, when weft looks for the first time:
//! a route of the same form that appears later is somebody else's.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use weft_backends::diff::Op;
use weft_backends::owner::{self, PROTOCOL};
use weft_backends::state::{Key, Observed, Seen, Value};
use weft_subnet::cidr::family;

use crate::files;
use crate::plan::Plan;

const MARK: &[u8] = b"weft writes the subnet file beside this mark: the routes here are not flannel's\n";

/// Stands beside subnet.env and lives as long: whatever removes the one at a reboot removes the other.
fn mark_of(subnet_file: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(subnet_file.file_name().unwrap_or_default());
    name.push(".weft");
    subnet_file.with_file_name(name)
}

/// Whether weft has written this subnet.env before. A mark that cannot be looked at is taken for one: nothing is removed then.
pub fn is_marked(subnet_file: &Path) -> bool {
    mark_of(subnet_file).try_exists().unwrap_or(true)
}

/// Says that this subnet.env is weft's from now on. To be called before it is written: that brings the directory, and the mark with
/// it, to the disk.
pub fn mark(subnet_file: &Path) -> io::Result<()> {
    let mark = mark_of(subnet_file);
    if mark.try_exists()? {
        return Ok(());
    }
    files::make_directory(&mark)?;
    fs::write(mark, MARK)
}

/// What flannel left, until it is removed.
#[derive(Debug, Default)]
pub enum Takeover {
    /// Nothing was looked at yet; subnet.env was flannel's.
    Undecided,
    /// Routes that were there at the first look.
    Left(HashMap<Key, Value>),
    /// There is nothing to remove, or not any more.
    #[default]
    Over,
}

impl Takeover {
    /// `flannel_was_here`: subnet.env, as found at start, names our Network, and weft did not write it.
    pub fn new(flannel_was_here: bool) -> Takeover {
        if flannel_was_here { Takeover::Undecided } else { Takeover::Over }
    }

    /// The first look decides. Entries of ours say that weft ran here before, whatever became of the mark.
    pub fn look(&mut self, observed: &Observed, plan: &Plan) {
        match self {
            Takeover::Undecided => {}
            Takeover::Left(left) => {
                // One that went by itself, or was removed, is not flannel's when it comes again.
                left.retain(|key, value| observed.get(key).is_some_and(|seen| seen.value == *value));
                if left.is_empty() {
                    *self = Takeover::Over;
                }
                return;
            }
            Takeover::Over => return,
        }
        let (network, own, on_link) = (plan.network(), plan.own().subnets, &plan.host().routes);
        let inside = |net: &ipnet::IpNet| network.networks.of(family(net)).is_some_and(|all| all.contains(net));
        let ours = |(key, seen): (&Key, &Seen)| match key {
            Key::Link(_) => seen.mark,
            Key::Route(net, _) => seen.protocol == PROTOCOL && inside(net),
            // In the place of routes that an earlier version wrote.
            Key::Fence(_) | Key::Open(_) => true,
            _ => false,
        };
        if observed.iter().any(ours) {
            *self = Takeover::Over;
            return;
        }
        let left = observed.iter().filter(|(key, seen)| {
            plan.desired(key).is_none() && owner::is_flannels(network, &own, on_link, (key, seen))
        });
        *self = Takeover::Left(left.map(|(key, seen)| (*key, seen.value.clone())).collect());
    }

    /// True for a route that flannel left, as it was at the first look.
    pub fn left(&self, key: &Key, seen: &Seen) -> bool {
        matches!(self, Takeover::Left(left) if left.get(key) == Some(&seen.value))
    }

    /// These are about to be written. What flannel left and is not removed now is wanted by a lease; what the kernel refuses to remove
    /// is tried again, see [`Takeover::removed`].
    pub fn removing(&mut self, ops: &[Op]) {
        if let Takeover::Left(left) = self {
            let removals: HashSet<Key> = ops.iter().filter(|op| matches!(op, Op::Remove(..))).map(Op::key).collect();
            left.retain(|key, _| removals.contains(key));
            let gone = ops.iter().filter(|op| matches!(op, Op::Remove(..)) && left.contains_key(&op.key()));
            gone.for_each(|op| tracing::info!(%op, "flannel left this route, and no lease asks for it"));
        }
    }

    /// The kernel has removed this entry: the same written later is somebody else's. The takeover ends with the last one.
    pub fn removed(&mut self, key: &Key) {
        if let Takeover::Left(left) = self {
            left.remove(key);
            if left.is_empty() {
                *self = Takeover::Over;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_stands_beside_the_file_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("run/subnet.env");
        assert!(!is_marked(&file));
        mark(&file).unwrap();
        mark(&file).unwrap();
        assert!(is_marked(&file) && dir.path().join("run/.subnet.env.weft").exists());
        assert!(!is_marked(&dir.path().join("run/other.env")), "another agent's file");
    }
}
