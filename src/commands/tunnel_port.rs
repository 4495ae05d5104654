// SPDX-License-Identifier: Apache-2.0
//! The UDP port of a tunnel that routing tables and links do not show.

use crate::kernel::wireguard::WireGuard;
use crate::observe::status::Status;

/// The devices of the backend wireguard.
const DEVICES: [&str; 2] = ["flannel-wg", "flannel-wg-v6"];

/// Returns the port on which this node receives packets of the backends udp and wireguard. The crate `weft-doctor` finds that of a vxlan device.
pub fn tunnel_port(status: &Status) -> Option<u16> {
    match status.backend.as_str() {
        "udp" => status.tunnel.as_ref()?.socket.rsplit(':').next()?.parse().ok(),
        "wireguard" => {
            let mut kernel = WireGuard::open().ok()?;
            DEVICES.iter().find_map(|device| kernel.get(device).ok()).map(|device| device.port)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::status::TunnelStatus;

    #[test]
    fn the_port_of_udp_is_that_of_the_socket_of_the_agent() {
        let tunnel = TunnelStatus { socket: "192.0.2.1:8285".to_owned(), ..TunnelStatus::default() };
        let status = |backend: &str, tunnel| Status { backend: backend.to_owned(), tunnel, ..Status::default() };
        assert_eq!(tunnel_port(&status("udp", Some(tunnel.clone()))), Some(8285));
        assert_eq!(tunnel_port(&status("udp", None)), None, "the tunnel does not run");
        assert_eq!(tunnel_port(&status("vxlan", Some(tunnel))), None);
    }
}
