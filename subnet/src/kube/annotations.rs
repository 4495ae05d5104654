// SPDX-License-Identifier: Apache-2.0
//! The names of our annotations on a Node (docs/flannel-formats.md, "Nodes in Kubernetes").

use crate::source::Error;

/// Published by us: `true` says that the node takes part.
pub(super) const MANAGED: &str = "kube-subnet-manager";
/// Published by us.
pub(super) const TYPE: &str = "backend-type";
/// Published by us: JSON, or `null` where a backend has none.
pub(super) const DATA: &str = "backend-data";
/// Published by us: the same for IPv6.
pub(super) const DATA_V6: &str = "backend-v6-data";
/// Published by us.
pub(super) const PUBLIC: &str = "public-ip";
/// Published by us.
pub(super) const PUBLIC_V6: &str = "public-ipv6";
/// Published by us where a tunnel guard wants it said; flannel has none.
pub(super) const TUNNEL: &str = "tunnel-ip";
/// The same for IPv6.
pub(super) const TUNNEL_V6: &str = "tunnel-ipv6";
/// The admin's: published in place of our address.
pub(super) const OVERWRITE: &str = "public-ip-overwrite";
/// The admin's: the same for IPv6.
pub(super) const OVERWRITE_V6: &str = "public-ipv6-overwrite";
/// The admin's: chooses the interface, as `--public-ip` does.
pub(super) const CHOSEN: &str = "node-public-ip";
/// The admin's: the same for IPv6.
pub(super) const CHOSEN_V6: &str = "node-public-ipv6";

/// Ends of every name that is ours to read.
pub(super) const ALL: [&str; 12] =
    [MANAGED, TYPE, DATA, DATA_V6, PUBLIC, PUBLIC_V6, TUNNEL, TUNNEL_V6, OVERWRITE, OVERWRITE_V6, CHOSEN, CHOSEN_V6];

/// Ends of the names whose texts make up a lease.
pub(super) const PUBLISHED: [&str; 7] = [TYPE, DATA, DATA_V6, PUBLIC, PUBLIC_V6, TUNNEL, TUNNEL_V6];

/// What stands before every name: ends in `/` or `-`.
#[derive(Debug, Clone)]
pub(super) struct Prefix(String);

impl Prefix {
    /// flannel's rule: one slash at most, which is added when missing; then a `-` unless it ends in either.
    pub(super) fn new(text: &str) -> Result<Prefix, Error> {
        let mut prefix = text.to_owned();
        if !prefix.contains('/') {
            prefix.push('/');
        }
        if !prefix.ends_with(['/', '-']) {
            prefix.push('-');
        }
        let plain = |part: &str| {
            !part.is_empty()
                && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_' || b == b'-')
        };
        let good = prefix.split_once('/').is_some_and(|(domain, name)| {
            domain.contains('.') && domain.split('.').all(plain) && (name.is_empty() || (plain(name) && name != "-"))
        });
        if !good {
            let text = format!("--kube-annotation-prefix {text}: give a domain, or DOMAIN/NAME, in lower case");
            return Err(Error::Invalid(text));
        }
        Ok(Prefix(prefix))
    }

    /// The whole name of an annotation.
    pub(super) fn name(&self, end: &str) -> String {
        format!("{}{end}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_completed_as_flannel_does() {
        let table = [
            ("flannel.alpha.coreos.com", "flannel.alpha.coreos.com/public-ip"),
            ("a.b/", "a.b/public-ip"),
            ("a.b/net", "a.b/net-public-ip"),
            ("a.b/net-", "a.b/net-public-ip"),
            ("a_b.c-d.e9/n_1", "a_b.c-d.e9/n_1-public-ip"),
        ];
        for (given, wanted) in table {
            assert_eq!(Prefix::new(given).unwrap().name(PUBLIC), wanted);
        }
        for bad in ["", "nodomain", "a.b/c/d", "A.b", "a.b/C", "a..b", "a.b/-", ".a/b", "a.b/n.m"] {
            assert!(matches!(Prefix::new(bad), Err(Error::Invalid(_))), "{bad}");
        }
    }
}
