// SPDX-License-Identifier: Apache-2.0
//! Why the kernel did not do what was asked of a WireGuard device, and what helps.

use std::io;

use nix::errno::Errno;

/// Why a request to a WireGuard device failed.
#[derive(Debug, thiserror::Error)]
pub enum WireGuardError {
    /// The kernel has no family `wireguard`.
    #[error(
        "this kernel has no WireGuard: load the module wireguard on the host (Linux 5.6 or later), or choose another backend"
    )]
    NoFamily,
    /// ENODEV.
    #[error("there is no device {device}")]
    NoDevice {
        /// Its name.
        device: String,
    },
    /// EOPNOTSUPP: the link is of another kind, or a flag is unknown to the kernel.
    #[error("{device} is not a WireGuard device, or the kernel is too old for the request: remove or rename the link")]
    NotWireGuard {
        /// Its name.
        device: String,
    },
    /// EINVAL, ERANGE, EBADR or EPFNOSUPPORT: the kernel does not accept a value.
    #[error("the kernel refused a value for {device} ({errno}): {text}")]
    Invalid {
        /// The device.
        device: String,
        /// The error number.
        errno: Errno,
        /// The kernel's explanation; may be empty.
        text: String,
    },
    /// EADDRINUSE.
    #[error(
        "the UDP port of {device} is taken by another program: find it with `ss -lunp`, or choose another ListenPort"
    )]
    PortTaken {
        /// The device.
        device: String,
    },
    /// ENOMEM.
    #[error("{device}: the kernel has no memory left, or the device has its maximum of 1,048,576 peers")]
    NoMemory {
        /// The device.
        device: String,
    },
    /// EPERM or EACCES.
    #[error("{device}: not permitted; CAP_NET_ADMIN is needed here and in the network namespace that made the device")]
    NotPermitted {
        /// The device.
        device: String,
    },
    /// Any other error number.
    #[error("the kernel refused a request for {device} ({errno}): {text}")]
    Refused {
        /// The device.
        device: String,
        /// The error number.
        errno: Errno,
        /// The kernel's explanation; may be empty.
        text: String,
    },
    /// The socket failed. It is then unknown what was carried out.
    #[error("generic netlink: {0}")]
    Socket(#[from] io::Error),
}

impl WireGuardError {
    /// The meaning of an error number.
    pub(super) fn of(device: &str, errno: Errno, text: String) -> WireGuardError {
        let device = device.to_owned();
        match errno {
            Errno::ENODEV => WireGuardError::NoDevice { device },
            Errno::EOPNOTSUPP => WireGuardError::NotWireGuard { device },
            Errno::EINVAL | Errno::ERANGE | Errno::EBADR | Errno::EPFNOSUPPORT => {
                WireGuardError::Invalid { device, errno, text }
            }
            Errno::EADDRINUSE => WireGuardError::PortTaken { device },
            Errno::ENOMEM => WireGuardError::NoMemory { device },
            Errno::EPERM | Errno::EACCES => WireGuardError::NotPermitted { device },
            _ => WireGuardError::Refused { device, errno, text },
        }
    }

    /// Returns true if the kernel does not know the number of the family any more.
    pub(super) fn is_unknown_family(&self) -> bool {
        match self {
            WireGuardError::Refused { errno, .. } => *errno == Errno::ENOENT,
            WireGuardError::Socket(error) => error.raw_os_error() == Some(nix::libc::ENOENT),
            _ => false,
        }
    }

    /// The meaning of an error of a dump, where the kernel's error numbers are errors of the socket.
    pub(super) fn of_io(device: &str, error: io::Error) -> WireGuardError {
        match error.raw_os_error().map(Errno::from_raw) {
            Some(errno @ (Errno::ENODEV | Errno::EOPNOTSUPP | Errno::EPERM | Errno::EACCES | Errno::EINVAL)) => {
                WireGuardError::of(device, errno, String::new())
            }
            _ => WireGuardError::Socket(error),
        }
    }
}

impl From<WireGuardError> for io::Error {
    fn from(error: WireGuardError) -> io::Error {
        match error {
            WireGuardError::Socket(error) => error,
            error => io::Error::other(error),
        }
    }
}
