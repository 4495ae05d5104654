// SPDX-License-Identifier: Apache-2.0
//! Network cards that are known to spoil the checksums of tunnelled packets.
//!
//! Old kernels that spoil them (docs/messages.md, "Checksums that arrive broken") are not looked for: distributions carry the fix without
//! another version number, so the number does not tell whether a kernel has it.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use weft_netlink::ethtool;
use weft_netlink::rtnl::Link;

use super::path_links::PathLinks;
use crate::known_links::is_ours;

/// The driver of VMware's card.
const VMXNET3: &str = "vmxnet3";
/// Links on top of each other, such as a VLAN on a bond on a card, are followed this far down.
const MAX_DEPTH: usize = 8;

/// A tunnel device that leaves checksums to a card that may spoil them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offloaded {
    /// Name of the tunnel device.
    pub device: String,
    /// Name of the card.
    pub card: String,
}

/// Returns the vxlan devices of weft that leave checksums to such a card. `sysfs` is /sys/class/net.
pub(super) fn read(links: &[Link], path: &PathLinks, sysfs: &Path) -> Vec<Offloaded> {
    let uplinks = path.links.iter().filter(|link| link.is_uplink);
    let cards: BTreeSet<String> = uplinks.flat_map(|link| cards(&link.name, sysfs, MAX_DEPTH)).collect();
    if cards.is_empty() {
        return Vec::new();
    }
    let devices = links.iter().filter(|link| is_ours(link) && link.vxlan.is_some());
    // A kernel without this interface of ethtool does not tell.
    let leaves = |link: &&Link| ethtool::has_tx_checksum(link.index).unwrap_or(false);
    let devices: Vec<&Link> = devices.filter(leaves).collect();
    let pair = |card: &String, device: &Link| Offloaded { device: device.name.clone(), card: card.clone() };
    cards.iter().flat_map(|card| devices.iter().map(|device| pair(card, device))).collect()
}

/// Returns true if the file with the name of the maker of this machine names VMware.
pub(super) fn on_vmware(sys_vendor: &Path) -> bool {
    fs::read_to_string(sys_vendor).is_ok_and(|vendor| vendor.starts_with("VMware"))
}

/// Returns the cards of VMware below a link, or the link itself if it is one.
fn cards(link: &str, sysfs: &Path, depth: usize) -> Vec<String> {
    let dir = sysfs.join(link);
    let driver = fs::read_link(dir.join("device/driver")).ok();
    if driver.is_some_and(|driver| driver.ends_with(VMXNET3)) {
        return vec![link.to_owned()];
    }
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("lower_").map(str::to_owned));
    if depth == 0 { Vec::new() } else { names.flat_map(|lower| cards(&lower, sysfs, depth - 1)).collect() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_machine_of_vmware_is_known_by_its_maker() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("sys_vendor");
        assert!(!on_vmware(&file), "a machine without such a file");
        for (vendor, is_it) in [("VMware, Inc.\n", true), ("QEMU\n", false)] {
            fs::write(&file, vendor).unwrap();
            assert_eq!(on_vmware(&file), is_it, "{vendor}");
        }
    }

    #[test]
    fn a_card_is_found_below_the_links_that_use_it() {
        let sysfs = tempfile::tempdir().unwrap();
        let dir = |name: &str| sysfs.path().join(name);
        for (card, driver) in [("eth0", VMXNET3), ("eth1", "ixgbe"), ("eth2", VMXNET3)] {
            fs::create_dir_all(dir(card).join("device")).unwrap();
            symlink(Path::new("../../bus/pci/drivers").join(driver), dir(card).join("device/driver")).unwrap();
        }
        for (upper, lowers) in [("bond0", ["eth0", "eth1"].as_slice()), ("bond0.7", &["bond0"]), ("loop", &["loop"])] {
            fs::create_dir(dir(upper)).unwrap();
            for lower in lowers {
                symlink(dir(lower), dir(upper).join(format!("lower_{lower}"))).unwrap();
            }
        }
        let found = |link| cards(link, sysfs.path(), MAX_DEPTH);
        assert_eq!(found("eth2"), ["eth2"]);
        assert_eq!(found("eth1"), [""; 0]);
        assert_eq!(found("bond0.7"), ["eth0"]);
        assert_eq!(found("loop"), [""; 0]);
        assert_eq!(found("gone"), [""; 0]);
    }
}
