// SPDX-License-Identifier: Apache-2.0
//! Why a tunnel does not start, or has ended.

use std::io;
use std::net::SocketAddrV4;

/// Why a tunnel does not start, or has ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The TUN device cannot be opened.
    #[error(
        "cannot open the TUN device {name}: {source} (it needs the kernel module tun, /dev/net/tun inside the container \
         or unit, CAP_NET_ADMIN, and that no other process uses the device or has a link of that name)"
    )]
    Open {
        /// Name of the device.
        name: String,
        /// What the kernel says.
        source: io::Error,
    },
    /// A descriptor is not one of a TUN device.
    #[error("cannot take over the TUN device of an earlier process: {0}")]
    Adopt(io::Error),
    /// A TUN device has another framing.
    #[error(
        "cannot take over the TUN device {name}: its flags are {flags:#x}; delete it (ip link del {name}), and it is created again"
    )]
    Framing {
        /// Name of the device.
        name: String,
        /// The flags, as `/sys/class/net/NAME/tun_flags` shows them.
        flags: u32,
    },
    /// The UDP socket cannot be opened.
    #[error(
        "cannot receive tunnel packets on {address}: {source} (is another program, such as flanneld, using the port?)"
    )]
    Socket {
        /// Address and port of the socket.
        address: SocketAddrV4,
        /// What the kernel says.
        source: io::Error,
    },
    /// A thread cannot be started, or cannot wait.
    #[error("cannot run the threads of the tunnel: {0}")]
    Thread(io::Error),
    /// The TUN device is gone.
    #[error("the TUN device {name} was lost: {source}")]
    DeviceLost {
        /// Name of the device.
        name: String,
        /// What the kernel says.
        source: io::Error,
    },
    /// The UDP socket does not work any more.
    #[error("the tunnel's UDP socket does not receive any more: {0}")]
    SocketLost(io::Error),
}
