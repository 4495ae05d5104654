// SPDX-License-Identifier: Apache-2.0
//! The backends that a lab can have.

/// The backend of every node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum BackendKind {
    /// vxlan, VNI 1.
    #[default]
    Vxlan,
    /// host-gw.
    HostGw,
    /// ipip.
    Ipip,
    /// udp, which the agents carry themselves.
    Udp,
    /// wireguard, encrypted.
    Wireguard,
}

impl BackendKind {
    /// Returns the name in the net-conf.
    pub fn wire(self) -> &'static str {
        match self {
            BackendKind::Vxlan => "vxlan",
            BackendKind::HostGw => "host-gw",
            BackendKind::Ipip => "ipip",
            BackendKind::Udp => "udp",
            BackendKind::Wireguard => "wireguard",
        }
    }
}
