// SPDX-License-Identifier: Apache-2.0
//! The names of our annotations of a Node, without their prefix (docs/flannel-formats.md, "Nodes in Kubernetes").

use crate::source::Error;

/// `true` in a Node whose agent has published a lease.
pub(super) const MANAGED: &str = "kube-subnet-manager";
/// The backend's type.
pub(super) const TYPE: &str = "backend-type";
/// The backend's data for IPv4 as JSON; `null` for a backend that has none.
pub(super) const DATA: &str = "backend-data";
/// The same for IPv6.
pub(super) const DATA_V6: &str = "backend-v6-data";
/// The published address.
pub(super) const PUBLIC: &str = "public-ip";
/// The same for IPv6.
pub(super) const PUBLIC_V6: &str = "public-ipv6";
/// The source of our tunnel packets, for `--guard-tunnel`. flannel does not have it.
pub(super) const TUNNEL: &str = "tunnel-ip";
/// The same for IPv6.
pub(super) const TUNNEL_V6: &str = "tunnel-ipv6";
/// How else the node is reached while it changes its backend, as JSON. flannel does not have it.
pub(super) const OTHER_WAYS: &str = "other-ways";
/// Written by an admin: the agent publishes this address instead of its own.
pub(super) const OVERWRITE: &str = "public-ip-overwrite";
/// The same for IPv6.
pub(super) const OVERWRITE_V6: &str = "public-ipv6-overwrite";
/// Written by an admin: chooses the uplink, as `--public-ip` does.
pub(super) const CHOSEN: &str = "node-public-ip";
/// The same for IPv6.
pub(super) const CHOSEN_V6: &str = "node-public-ipv6";

/// The ends of all names that we read.
#[rustfmt::skip]
pub(super) const ALL: [&str; 13] = [
    MANAGED, TYPE, DATA, DATA_V6, PUBLIC, PUBLIC_V6, TUNNEL, TUNNEL_V6, OTHER_WAYS, OVERWRITE, OVERWRITE_V6, CHOSEN, CHOSEN_V6,
];

/// The ends of the names whose values make up a lease.
pub(super) const PUBLISHED: [&str; 8] = [TYPE, DATA, DATA_V6, PUBLIC, PUBLIC_V6, TUNNEL, TUNNEL_V6, OTHER_WAYS];

/// The first part of every name. It ends in `/` or `-`.
#[derive(Debug, Clone)]
pub(super) struct Prefix(String);

impl Prefix {
    /// Completes and checks a prefix by flannel's rules: a `/` is added if there is none, then a `-` if the text ends in neither.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the flag and the remedy.
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

    /// Returns the full name of the annotation that ends in `suffix`.
    pub(super) fn name(&self, suffix: &str) -> String {
        format!("{}{suffix}", self.0)
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
