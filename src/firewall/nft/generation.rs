// SPDX-License-Identifier: Apache-2.0
//! What was found in nftables holds until somebody changes anything there: the kernel counts the changes of a network namespace
//! (NFT_MSG_GETGEN, linux/netfilter/nf_tables.h), and to ask for the count is much cheaper than to look.

use std::time::{Duration, Instant};

use super::expr::be32_of;
use super::table::{NFGEN, REQUEST, SUBSYS};
use weft_netlink::socket::Netlink;
use weft_netlink::wire::{attrs_after, messages};

const NEWGEN: u16 = SUBSYS | 15;
const GETGEN: u16 = SUBSYS | 16;
/// NFTA_GEN_ID.
const ID: u16 = 1;

/// What was found is looked at again after this time all the same: a table that goes with the socket of its owner is not counted, and
/// a transaction is counted just before it takes effect.
const AGAIN: Duration = Duration::from_secs(60);

/// How many changes there have been; `None`: the kernel does not say, and everything must be looked at.
pub fn generation(netlink: &mut Netlink) -> Option<u32> {
    let data = netlink.request(|w| w.begin(GETGEN, REQUEST, &[0; NFGEN])).ok()?.ok()?;
    let m = messages(&data).find(|m| m.kind == NEWGEN)?;
    attrs_after(m.payload, NFGEN).find(|(kind, _)| *kind == ID).map(|(_, value)| be32_of(value))
}

/// What was found at a look.
#[derive(Debug)]
pub struct Known<T>(Option<(u32, Instant, T)>);

impl<T> Default for Known<T> {
    fn default() -> Known<T> {
        Known(None)
    }
}

impl<T> Known<T> {
    /// What was found, if it still holds.
    pub fn at(&self, generation: Option<u32>) -> Option<&T> {
        let (then, since, found) = self.0.as_ref()?;
        (generation == Some(*then) && since.elapsed() < AGAIN).then_some(found)
    }

    /// `generation`: as asked before the look.
    pub fn keep(&mut self, generation: Option<u32>, found: T) {
        self.0 = generation.map(|generation| (generation, Instant::now(), found));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_holds_for_its_generation_alone() {
        let mut known = Known::default();
        known.keep(Some(7), "all in place");
        assert_eq!(known.at(Some(7)), Some(&"all in place"));
        assert_eq!(known.at(Some(8)), None, "somebody changed something");
        assert_eq!(known.at(None), None, "the kernel does not say");
        known.keep(None, "perhaps");
        assert_eq!(known.at(None), None, "without a count nothing is known");
    }
}
