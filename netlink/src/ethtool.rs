// SPDX-License-Identifier: Apache-2.0
//! One feature of network devices over generic netlink (linux/ethtool_netlink.h, Linux 5.6): whether checksums of sent packets may be left to
//! the device below.

use std::io;

use nix::errno::Errno;

use super::generic;
use super::wire::{Writer, attrs, attrs_after, messages, text};

const FAMILY: &str = "ethtool";
const VERSION: u8 = 1;
/// ETHTOOL_MSG_FEATURES_GET, which is also ETHTOOL_MSG_FEATURES_GET_REPLY, and ETHTOOL_MSG_FEATURES_SET.
const FEATURES_GET: u8 = 11;
const FEATURES_SET: u8 = 12;
/// ETHTOOL_A_FEATURES_*.
const HEADER: u16 = 1;
const WANTED: u16 = 3;
const ACTIVE: u16 = 4;
/// ETHTOOL_A_HEADER_DEV_INDEX.
const DEV_INDEX: u16 = 1;
/// ETHTOOL_A_BITSET_BITS and ETHTOOL_A_BITSET_BITS_BIT.
const BITS: u16 = 3;
const BIT: u16 = 1;
/// ETHTOOL_A_BITSET_BIT_NAME and ETHTOOL_A_BITSET_BIT_VALUE.
const BIT_NAME: u16 = 2;
const BIT_VALUE: u16 = 3;
/// NETIF_F_HW_CSUM as `ethtool -k` names it. All tunnel devices have it.
pub const TX_CHECKSUM: &str = "tx-checksum-ip-generic";

/// Why the feature cannot be read or set.
#[derive(Debug, thiserror::Error)]
pub enum EthtoolError {
    /// The kernel is older than Linux 5.6, or was built without CONFIG_ETHTOOL_NETLINK.
    #[error("this kernel has no netlink interface of ethtool")]
    NoFamily,
    /// The socket cannot be used.
    #[error(transparent)]
    Socket(#[from] io::Error),
    /// The kernel refused the request.
    #[error("{0}")]
    Refused(Errno),
}

/// Returns true if checksums of packets that this device sends may be left to the device below it.
///
/// # Errors
/// The device is gone, or the kernel cannot be asked.
pub fn has_tx_checksum(index: u32) -> Result<bool, EthtoolError> {
    let data = request(FEATURES_GET, index, |_| {})?;
    let replies = messages(&data).filter(|m| m.payload.first() == Some(&FEATURES_GET));
    Ok(replies.into_iter().any(|m| is_active(m.payload)))
}

/// Turns this on or off, and leaves all other features as they are.
///
/// # Errors
/// As [`has_tx_checksum`], or the kernel refused it.
pub fn set_tx_checksum(index: u32, on: bool) -> Result<(), EthtoolError> {
    request(FEATURES_SET, index, |w| {
        w.nest(WANTED, |w| {
            w.nest(BITS, |w| {
                w.nest(BIT, |w| {
                    w.attr_str(BIT_NAME, TX_CHECKSUM);
                    if on {
                        w.attr(BIT_VALUE, &[]);
                    }
                });
            });
        });
    })
    .map(drop)
}

fn request(command: u8, index: u32, body: impl FnOnce(&mut Writer)) -> Result<Vec<u8>, EthtoolError> {
    let mut netlink = generic::open()?;
    let family = generic::family(&mut netlink, FAMILY)?.ok_or(EthtoolError::NoFamily)?;
    let answer = netlink.request(|w| {
        w.begin(family, 0, &generic::header(command, VERSION));
        w.nest(HEADER, |w| w.attr_u32(DEV_INDEX, index));
        body(w);
    })?;
    answer.map_err(|refusal| EthtoolError::Refused(refusal.errno))
}

/// Finds the feature among those that are on. The kernel lists only these.
fn is_active(payload: &[u8]) -> bool {
    let inside = |wanted: u16| move |(kind, value): (u16, _)| (kind == wanted).then_some(value);
    attrs_after(payload, generic::HEADER)
        .filter_map(inside(ACTIVE))
        .flat_map(attrs)
        .filter_map(inside(BITS))
        .flat_map(attrs)
        .filter_map(inside(BIT))
        .flat_map(attrs)
        .any(|(kind, value)| kind == BIT_NAME && text(value) == TX_CHECKSUM)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an answer in which one of the lists of features has these names.
    fn answer(list: u16, names: &[&str]) -> Vec<u8> {
        let mut w = Writer::default();
        w.fixed(&generic::header(FEATURES_GET, VERSION));
        w.nest(list, |w| {
            w.nest(BITS, |w| names.iter().for_each(|name| w.nest(BIT, |w| w.attr_str(BIT_NAME, name))));
        });
        w.bytes().to_vec()
    }

    /// The kernel also lists the features that the device can have, those that are wanted, and those that never change.
    #[test]
    fn a_feature_counts_only_if_it_is_on() {
        const HW: u16 = 2;
        const NOCHANGE: u16 = 5;
        assert!(is_active(&answer(ACTIVE, &["rx-checksum", TX_CHECKSUM])));
        assert!(!is_active(&answer(ACTIVE, &["rx-checksum", "tx-checksum-ipv4"])));
        for list in [HW, WANTED, NOCHANGE] {
            assert!(!is_active(&answer(list, &[TX_CHECKSUM])), "{list}");
        }
        assert!(!is_active(&answer(ACTIVE, &[])) && !is_active(&[]));
    }
}
