// SPDX-License-Identifier: Apache-2.0
//! A cache of what was read from nftables. The kernel counts the changes of a network namespace (NFT_MSG_GETGEN,
//! linux/netfilter/nf_tables.h), and to ask for this generation is much cheaper than to read tables. What was read is valid while the
//! generation is the same.

use std::time::{Duration, Instant};

use super::table::REQUEST;
use weft_netlink::nftables::{GETGEN, NEWGEN, NFGENMSG, be32_of};
use weft_netlink::socket::Netlink;
use weft_netlink::wire::{attr_after, messages};

/// NFTA_GEN_ID.
const ID: u16 = 1;

/// The cache is valid for this time at most, because the generation is not exact: the kernel does not count a table that is removed with
/// the socket of its owner, and it counts a transaction just before it takes effect.
const LONGEST: Duration = Duration::from_secs(60);

/// Returns the current generation. `None` if the kernel does not say, so that nothing can be cached.
pub fn generation(netlink: &mut Netlink) -> Option<u32> {
    let data = netlink.request(|w| w.begin(GETGEN, REQUEST, &[0; NFGENMSG])).ok()?.ok()?;
    let m = messages(&data).find(|m| m.kind == NEWGEN)?;
    attr_after(m.payload, NFGENMSG, ID).map(be32_of)
}

/// A value that was read at one generation.
#[derive(Debug)]
pub struct Cached<T>(Option<(u32, Instant, T)>);

impl<T> Default for Cached<T> {
    fn default() -> Cached<T> {
        Cached(None)
    }
}

impl<T> Cached<T> {
    /// Returns the value, if it is still valid.
    pub fn at(&self, generation: Option<u32>) -> Option<&T> {
        let (then, since, value) = self.0.as_ref()?;
        (generation == Some(*then) && since.elapsed() < LONGEST).then_some(value)
    }

    /// Keeps a value. `generation` is the one before the value was read.
    pub fn keep(&mut self, generation: Option<u32>, value: T) {
        self.0 = generation.map(|generation| (generation, Instant::now(), value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_valid_for_its_generation_only() {
        let mut cached = Cached::default();
        cached.keep(Some(7), "all in place");
        assert_eq!(cached.at(Some(7)), Some(&"all in place"));
        assert_eq!(cached.at(Some(8)), None, "another program changed something");
        assert_eq!(cached.at(None), None, "the kernel does not say");
        cached.keep(None, "not cached");
        assert_eq!(cached.at(None), None, "nothing is cached without a generation");
    }

    /// The kernel does not count every change, so the generation alone must not keep a value for ever.
    #[test]
    fn a_value_is_valid_for_a_minute() {
        let kept = |age: Duration| Cached(Instant::now().checked_sub(age).map(|since| (7, since, ())));
        assert!(kept(LONGEST / 2).at(Some(7)).is_some());
        assert!(kept(LONGEST).at(Some(7)).is_none());
    }
}
