// SPDX-License-Identifier: Apache-2.0
//! Why packets do not reach a peer.

/// Why packets do not reach a peer, as far as this node can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// Its published address does not answer either.
    Underlay,
    /// Its published address answers. Through the tunnel nothing comes from it.
    Tunnel,
    /// Its packets arrive here, and it does not answer ours. Its published address answers, or there is no tunnel.
    OneDirection,
    /// Packets of this size in bytes reach it, and larger ones do not.
    Mtu(u16),
}

impl Cause {
    /// All words of [`Cause::word`].
    pub const WORDS: [&str; 4] = ["underlay", "tunnel", "one-direction", "mtu"];

    /// Returns the cause as it is written in JSON and metrics.
    pub fn word(self) -> &'static str {
        match self {
            Cause::Underlay => "underlay",
            Cause::Tunnel => "tunnel",
            Cause::OneDirection => "one-direction",
            Cause::Mtu(_) => "mtu",
        }
    }
}
