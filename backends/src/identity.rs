// SPDX-License-Identifier: Apache-2.0
//! What distinguishes a node's device from those of all other nodes: a MAC with vxlan, a key pair with WireGuard. The backend chooses it and
//! decides where it is kept (in the device, or in a file). The agent keeps it in [`Host`](crate::host::Host), gives it back, and knows only the
//! public part, which is in the lease. See docs/adr/011-identities.md.

use std::any::Any;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use weft_subnet::backend_types::{PublicIdentities, PublicIdentity};
use weft_subnet::cidr::Family;

use crate::mac::Mac;
use crate::name::Name;

/// The identity of one device. Implemented by a plain struct, next to its backend. There is no `Debug` here on purpose: an identity may
/// contain a secret, and [`Identities`] shows the public part only.
pub trait Identity: Any + Send + Sync {
    /// Returns the part that is in leases and identifies the device.
    fn public(&self) -> PublicIdentity;

    /// Returns its name for people, which is that of the member of the lease, such as `VtepMAC`.
    fn name(&self) -> &'static str;

    /// Returns what a person must do on a copy of this machine so that it gets another identity, such as "delete flannel's device".
    fn remedy(&self) -> &'static str;
}

impl dyn Identity {
    /// Returns this identity as a type that a backend knows.
    pub fn of<I: Identity>(&self) -> Option<&I> {
        (self as &dyn Any).downcast_ref()
    }
}

/// The identities of this node's devices, for both families. Two values are equal if their public parts are, and only those are printed.
#[derive(Clone, Default)]
pub struct Identities([Option<Arc<dyn Identity>>; 2]);

impl Identities {
    /// Returns the identities of the IPv4 device and of the IPv6 device.
    pub fn new(v4: Option<Arc<dyn Identity>>, v6: Option<Arc<dyn Identity>>) -> Identities {
        Identities([v4, v6])
    }

    /// Returns the identity of the device of this family, if it has one.
    pub fn of(&self, family: Family) -> Option<&dyn Identity> {
        let [v4, v6] = &self.0;
        match family {
            Family::V4 => v4.as_deref(),
            Family::V6 => v6.as_deref(),
        }
    }

    /// Returns the public parts.
    pub fn public(&self) -> PublicIdentities {
        self.0.each_ref().map(|identity| identity.as_ref().map(|identity| identity.public()))
    }

    /// Returns the first identity that is also in `other`, which another node published.
    pub fn shared_with(&self, other: &PublicIdentities) -> Option<&dyn Identity> {
        let mut pairs = self.0.iter().zip(other);
        pairs.find_map(|(ours, other)| ours.as_deref().filter(|ours| other.as_ref() == Some(&ours.public())))
    }
}

impl PartialEq for Identities {
    fn eq(&self, other: &Identities) -> bool {
        self.public() == other.public()
    }
}

impl Eq for Identities {}

impl fmt::Debug for Identities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.public()).finish()
    }
}

/// A device that stands on this host and was not made by another weft agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StandingLink {
    /// Its name.
    pub name: Name,
    /// Its Ethernet address, if it has one.
    pub mac: Option<Mac>,
    /// True if its alias says that an earlier run of this agent made it. Otherwise flannel or any other program made it.
    pub ours: bool,
}

/// The files in which secrets are kept. The agent implements this, because backends do no I/O.
pub trait Secrets {
    /// Returns the directory of `--state-dir`, for files that must outlive a boot. `None` if there is none.
    fn directory(&self) -> Option<&Path>;

    /// Returns the places of the private key of WireGuard, in the order in which they are read: that of flannel first, then one that outlives
    /// a boot.
    fn wireguard_key_files(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Returns the content of this file. `None` if it does not exist.
    ///
    /// # Errors
    /// It cannot be read, or is larger than any key.
    fn read(&self, file: &Path) -> io::Result<Option<Vec<u8>>>;

    /// Creates this file with mode 0600, completely or not at all. A missing directory is made.
    ///
    /// # Errors
    /// [`io::ErrorKind::AlreadyExists`] if the file exists, because it is never replaced. Any other error of the file system.
    fn create(&self, file: &Path, content: &[u8]) -> io::Result<()>;

    /// Writes this file with mode 0600, whole or not at all, in the place of the one that is there.
    ///
    /// # Errors
    /// Any error of the file system.
    fn replace(&self, file: &Path, content: &[u8]) -> io::Result<()>;

    /// Removes this file; one that does not exist is no error.
    ///
    /// # Errors
    /// Any other error of the file system.
    fn remove(&self, file: &Path) -> io::Result<()>;

    /// Tells the operator of a problem that does not keep the backend from working.
    fn warn(&self, problem: &dyn fmt::Display);
}

/// What the agent found on its host, from which a backend chooses its identities.
pub struct Found<'a> {
    /// The devices of the host, whatever their names.
    pub links: &'a [StandingLink],
    /// Files for secrets.
    pub secrets: &'a dyn Secrets,
    /// Fills a buffer with random bytes that are good enough for keys.
    pub random: &'a dyn Fn(&mut [u8]) -> io::Result<()>,
    /// The output of the command that this backend lets the agent run before it has a lease
    /// ([`Commands::before_lease`](crate::commands::Commands::before_lease)). `None` if it has not run.
    pub printed: Option<&'a [u8]>,
}

impl Found<'_> {
    /// Returns the device with this name.
    pub fn link(&self, name: Name) -> Option<&StandingLink> {
        self.links.iter().find(|link| link.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct KeyPair {
        private: &'static str,
        public: &'static str,
    }

    impl Identity for KeyPair {
        fn public(&self) -> PublicIdentity {
            PublicIdentity::new("wireguard", self.public)
        }
        fn name(&self) -> &'static str {
            "PublicKey"
        }
        fn remedy(&self) -> &'static str {
            "delete the key file"
        }
    }

    fn identities(private: &'static str, public: &'static str) -> Identities {
        Identities::new(None, Some(Arc::new(KeyPair { private, public })))
    }

    #[test]
    fn only_the_public_part_is_shown_and_compared() {
        let ours = identities("secret", "public");
        assert_eq!(format!("{ours:?}"), r#"[None, Some(PublicIdentity { kind: "wireguard", text: "public" })]"#);
        assert_eq!(ours, identities("another", "public"));
        assert_ne!(ours, identities("secret", "another"));
        let key = ours.of(Family::V6).and_then(|identity| identity.of::<KeyPair>()).unwrap();
        assert_eq!((key.private, ours.of(Family::V4).is_none()), ("secret", true));
    }

    #[test]
    fn an_identity_is_shared_within_one_family() {
        let ours = identities("secret", "public");
        let theirs =
            |v4, v6| [v4, v6].map(|text: Option<&str>| text.map(|text| PublicIdentity::new("wireguard", text)));
        assert_eq!(ours.shared_with(&theirs(None, Some("public"))).map(Identity::name), Some("PublicKey"));
        assert!(ours.shared_with(&theirs(Some("public"), Some("another"))).is_none());
        assert!(Identities::default().shared_with(&theirs(None, None)).is_none());
    }
}
