// SPDX-License-Identifier: Apache-2.0
//! The address that a rule gives a packet instead of its source or its destination.

use std::net::{IpAddr, SocketAddr};

/// The words before the new source, of iptables and of nftables.
const SOURCE: [&str; 2] = ["--to-source ", "snat to "];
/// The words before the new destination.
const DESTINATION: [&str; 2] = ["--to-destination ", "dnat to "];

/// A new address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewAddress {
    /// The address.
    pub addr: IpAddr,
    /// The new port, if that changes, too. It may be the first one of several.
    pub port: Option<u16>,
    /// False if the address is the first one of several.
    pub is_only: bool,
}

/// Returns true if a rule names the new source, which may be one of several.
pub fn names_source(rule: &str) -> bool {
    SOURCE.iter().any(|words| rule.contains(words))
}

/// Returns the new source that a rule names.
pub fn new_source(rule: &str) -> Option<NewAddress> {
    behind(rule, SOURCE)
}

/// Returns the new destination that a rule names.
pub fn new_destination(rule: &str) -> Option<NewAddress> {
    behind(rule, DESTINATION)
}

fn behind(rule: &str, [of_iptables, of_nft]: [&str; 2]) -> Option<NewAddress> {
    let (_, rest) = rule.split_once(of_iptables).or_else(|| rule.split_once(of_nft))?;
    let word = rest.split(' ').next()?;
    // The last address or the last port of a range may follow.
    let (first, last) = word.split_once('-').unwrap_or((word, ""));
    let is_only = last.is_empty() || last.parse::<u16>().is_ok();
    let (addr, port) = match first.parse::<SocketAddr>() {
        Ok(at) => (at.ip(), Some(at.port())),
        Err(_) => (first.trim_matches(['[', ']']).parse().ok()?, None),
    };
    Some(NewAddress { addr, port, is_only })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_new_address_is_read_with_and_without_a_port_and_told_from_the_first_of_several() {
        for (words, wanted) in [
            ("192.0.2.5", Some(("192.0.2.5", None, true))),
            ("192.0.2.5 --random", Some(("192.0.2.5", None, true))),
            ("192.0.2.5 (handle 4)", Some(("192.0.2.5", None, true))),
            ("192.0.2.5:53 (handle 4)", Some(("192.0.2.5", Some(53), true))),
            ("192.0.2.5:4000-5000", Some(("192.0.2.5", Some(4000), true))),
            ("192.0.2.5-192.0.2.9", Some(("192.0.2.5", None, false))),
            ("192.0.2.5-192.0.2.9:4000-5000", Some(("192.0.2.5", None, false))),
            ("fd00::5", Some(("fd00::5", None, true))),
            ("[fd00::5]:4000-5000", Some(("fd00::5", Some(4000), true))),
            ("[fd00::5-fd00::9]:4000", Some(("fd00::5", None, false))),
            (":4000", None),
            ("<address> (handle 4)", None),
            ("somewhere", None),
        ] {
            let wanted = wanted.map(|(addr, port, is_only)| NewAddress { addr: addr.parse().unwrap(), port, is_only });
            assert_eq!(new_source(&format!("-A POSTROUTING -p udp -j SNAT --to-source {words}")), wanted, "{words}");
            assert_eq!(new_source(&format!("oifname eth0 snat to {words}")), wanted, "{words}");
            let destination = format!("-A KUBE-SEP-X -p udp -j DNAT --to-destination {words}");
            assert_eq!(new_destination(&destination), wanted, "{words}");
            assert_eq!(new_destination(&format!("dnat to {words}")), wanted, "{words}");
            assert!(names_source(&format!("snat to {words}")) && !names_source(&destination));
        }
        assert_eq!(new_source("-A POSTROUTING -j MASQUERADE"), None);
    }
}
