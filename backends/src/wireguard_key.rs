// SPDX-License-Identifier: Apache-2.0
//! The keys of WireGuard: public keys, which leases contain, and secrets, which are never shown.

use std::fmt;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use weft_subnet::backend_types::PublicIdentity;
use zeroize::Zeroize;

use crate::identity::{Identities, Identity};

/// The type of the backend, in net-conf and in leases. An identity of this type is a public key.
pub(crate) const KIND: &str = "wireguard";
/// Length of every key in bytes.
pub const KEY: usize = 32;
/// Length of a [`PeerId`] in bytes.
const ID: usize = 16;
/// Number of bytes of a [`PeerId`] whose base64 is the beginning of the base64 of the whole key.
const SHOWN: usize = 15;

/// The public key of a node, by which WireGuard names a peer. As text it is base64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey(pub [u8; KEY]);

impl PublicKey {
    /// Reads the 44 characters of base64.
    pub fn parse(text: &str) -> Option<PublicKey> {
        let bytes = STANDARD.decode(text).ok()?;
        bytes.try_into().ok().map(PublicKey)
    }

    /// Returns the part of the key by which entries are found.
    pub fn id(&self) -> PeerId {
        let mut id = [0; ID];
        id.copy_from_slice(&self.0[..ID]);
        PeerId(id)
    }

    /// Returns true for 32 zeros, which is the public key of no private key.
    pub fn is_zero(&self) -> bool {
        self.0 == [0; KEY]
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&STANDARD.encode(self.0))
    }
}

/// The first half of a public key. The keys of entries contain it instead of the whole public key, so that entries of other backends do
/// not become larger. Two leases whose public keys agree in it name the same peer, as with equal keys; one of them is set aside. Nobody
/// gains by publishing such a key, because it costs less to publish the other node's own key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub [u8; ID]);

impl fmt::Display for PeerId {
    /// Writes the first 20 characters of the key's base64.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}...", STANDARD.encode(&self.0[..SHOWN]))
    }
}

/// A private or a preshared key. `Debug` does not print it, and its memory is overwritten when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; KEY]);

impl Secret {
    /// Wraps a key.
    pub fn new(bytes: [u8; KEY]) -> Secret {
        Secret(bytes)
    }

    /// Reads the 44 characters of base64.
    pub fn parse(text: &str) -> Option<Secret> {
        let mut bytes = STANDARD.decode(text).ok()?;
        let key = <[u8; KEY]>::try_from(bytes.as_slice()).ok().map(Secret);
        bytes.zeroize();
        key
    }

    /// Returns the bytes of the key. Do not copy them.
    pub fn expose(&self) -> &[u8; KEY] {
        &self.0
    }

    /// Returns the key as base64 for its file. The caller must overwrite it.
    pub fn to_base64(&self) -> String {
        STANDARD.encode(self.0)
    }

    /// Returns the public key of this private key.
    pub fn public(&self) -> PublicKey {
        PublicKey(x25519_dalek::x25519(self.0, x25519_dalek::X25519_BASEPOINT_BYTES))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(not shown)")
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

/// The identity of a node's WireGuard devices.
#[derive(Debug, Clone)]
pub struct KeyPair {
    private: Arc<Secret>,
    public: PublicKey,
}

impl KeyPair {
    /// What a person must do on a copy of a machine.
    pub const REMEDY: &'static str =
        "delete the WireGuard key (wgkey beside subnet.env, and the one in --state-dir) and restart the agent";

    /// Returns the pair of a private key. The bits that the curve fixes are set, as the program wg does it.
    pub fn of(mut private: Secret) -> KeyPair {
        private.0[0] &= 248;
        private.0[31] = (private.0[31] & 127) | 64;
        let public = private.public();
        KeyPair { private: Arc::new(private), public }
    }

    /// Returns the public key.
    pub fn public_key(&self) -> PublicKey {
        self.public
    }

    /// Returns the private key.
    pub fn private(&self) -> &Arc<Secret> {
        &self.private
    }

    /// Returns this pair for the devices of both families.
    pub fn both(self) -> Identities {
        let pair: Arc<dyn Identity> = Arc::new(self);
        Identities::new(Some(pair.clone()), Some(pair))
    }
}

impl Identity for KeyPair {
    fn public(&self) -> PublicIdentity {
        PublicIdentity::new(KIND, self.public)
    }

    fn name(&self) -> &'static str {
        "PublicKey"
    }

    fn remedy(&self) -> &'static str {
        KeyPair::REMEDY
    }
}

/// The secrets of this node's WireGuard devices. The plan has no entry that contains them: the kernel adapter gets them separately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSecrets {
    /// The private key.
    pub private: Arc<Secret>,
    /// The preshared key of every pair of nodes, if net-conf has one.
    pub preshared: Option<Arc<Secret>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIVATE: &str = "AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyA=";

    /// The expected keys were made with openssl.
    #[test]
    fn the_public_key_belongs_to_the_private_one() {
        let pair = KeyPair::of(Secret::parse(PRIVATE).unwrap());
        assert_eq!(pair.private().to_base64(), "AAIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eH2A=");
        assert_eq!(pair.public_key().to_string(), "B6N8vBQgk8i3VdwbEOhstCY3StFqqFPtC9/AsrhtHHw=");
        assert_eq!(PublicKey::parse(&pair.public_key().to_string()), Some(pair.public_key()));
        assert!(pair.public_key().to_string().starts_with(pair.public_key().id().to_string().trim_end_matches('.')));
    }

    #[test]
    fn only_32_bytes_of_base64_are_a_key() {
        for text in ["", "AQID", &PRIVATE[..43], "!QIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyA=", &PRIVATE.repeat(2)] {
            assert!(Secret::parse(text).is_none() && PublicKey::parse(text).is_none(), "{text}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let private = Arc::new(Secret::parse(PRIVATE).unwrap());
        let secrets = DeviceSecrets { private: private.clone(), preshared: Some(private.clone()) };
        let pair = KeyPair::of(Secret::parse(PRIVATE).unwrap());
        let shown = format!("{secrets:?} {pair:?} {:?}", pair.clone().both());
        assert!(!shown.contains("AQID") && !shown.contains("AAID") && !shown.contains("1, 2, 3"), "{shown}");
    }
}
