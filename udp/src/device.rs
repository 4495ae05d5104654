// SPDX-License-Identifier: Apache-2.0
//! A persistent TUN device, opened or taken over.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::utsname::uname;
use tun_rs::DeviceBuilder;

use super::error::Error;

// Flags of <linux/if_tun.h>, as /sys/class/net/NAME/tun_flags shows them.
const IFF_TUN: u32 = 0x0001;
const IFF_TAP: u32 = 0x0002;
const IFF_NO_PI: u32 = 0x1000;
const IFF_VNET_HDR: u32 = 0x4000;
/// The first kernel that takes several UDP packets at once from a program, as (major, minor).
const UDP_SEGMENTS_SINCE: (u32, u32) = (6, 2);

/// A TUN device that this process reads and writes. When it is dropped, the device stays.
#[derive(Debug)]
pub struct Device {
    file: File,
    name: String,
}

impl Device {
    /// Creates a persistent TUN device in the network namespace of the calling thread, or takes over the one that has the
    /// name and that no process reads. It is not set up, and its MTU, addresses and routes are left as they are.
    ///
    /// # Errors
    /// There is no /dev/net/tun, CAP_NET_ADMIN is missing, another process reads the device, or the name belongs to a
    /// link of another kind.
    pub fn open(name: &str) -> Result<Device, Error> {
        let failed = |source| Error::Open { name: name.to_owned(), source };
        let device =
            DeviceBuilder::new().name(name).offload(true).inherit_enable_state().build_sync().map_err(failed)?;
        device.persist().map_err(failed)?;
        let fd = device.as_fd().try_clone_to_owned().map_err(failed)?;
        Device::new(fd, name.to_owned()).map_err(failed)
    }

    /// Takes over a descriptor of a device that [`Device::open`] created, for example in an earlier process. Packets
    /// that wait in the device's queue are not lost.
    ///
    /// # Errors
    /// The descriptor is not one of a TUN device with the framing of [`Device::open`].
    pub fn adopt(fd: OwnedFd) -> Result<Device, Error> {
        let name = name_of(fd.as_fd()).map_err(Error::Adopt)?;
        let path = format!("/sys/class/net/{name}/tun_flags");
        let text = fs::read_to_string(&path).map_err(|source| Error::Adopt(with_context(&source, &path)))?;
        let flags = u32::from_str_radix(text.trim().trim_start_matches("0x"), 16)
            .map_err(|_| Error::Adopt(io::Error::other(format!("{path} is not a number: {}", text.trim()))))?;
        let wanted = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
        if flags & (wanted | IFF_TAP) != wanted {
            return Err(Error::Framing { name, flags });
        }
        Device::new(fd, name).map_err(Error::Adopt)
    }

    fn new(fd: OwnedFd, name: String) -> io::Result<Device> {
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Device { file: File::from(fd), name })
    }

    /// Returns the name that the device had when it was opened or taken over.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns another descriptor of the device. While it is open, for example with the service manager, the device's
    /// queue keeps packets.
    ///
    /// # Errors
    /// The process has too many descriptors.
    pub fn try_clone_fd(&self) -> io::Result<OwnedFd> {
        self.file.as_fd().try_clone_to_owned()
    }

    pub(crate) fn try_clone(&self) -> io::Result<Device> {
        Ok(Device { file: self.file.try_clone()?, name: self.name.clone() })
    }

    /// Reads one frame: a virtio header and a packet, which may be a whole flow of segments.
    pub(crate) fn read(&self, frame: &mut [u8]) -> io::Result<usize> {
        (&self.file).read(frame)
    }

    /// Writes one frame.
    pub(crate) fn write(&self, frame: &[u8]) -> io::Result<usize> {
        (&self.file).write(frame)
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Returns the name of the device behind a descriptor. Only descriptors of TUN devices have the line `iff:`.
fn name_of(fd: BorrowedFd<'_>) -> io::Result<String> {
    let path = format!("/proc/self/fdinfo/{}", fd.as_raw_fd());
    let text = fs::read_to_string(&path).map_err(|source| with_context(&source, &path))?;
    let name = text.lines().find_map(|line| line.strip_prefix("iff:")).map(str::trim);
    name.filter(|name| !name.is_empty())
        .map(str::to_owned)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the descriptor does not belong to a TUN device"))
}

fn with_context(source: &io::Error, path: &str) -> io::Error {
    io::Error::new(source.kind(), format!("read {path}: {source}"))
}

/// Returns true if the kernel takes several UDP packets of a flow at once.
pub(crate) fn takes_udp_segments() -> bool {
    uname().is_ok_and(|name| name.release().to_str().is_some_and(release_takes_udp_segments))
}

fn release_takes_udp_segments(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse::<u32>().ok());
    let mut next = || numbers.next().flatten();
    next().zip(next()).is_some_and(|version| version >= UDP_SEGMENTS_SINCE)
}

#[cfg(test)]
mod tests {
    use super::release_takes_udp_segments;

    /// An older kernel refuses them, and all packets of the flow would be lost.
    #[test]
    fn several_udp_packets_are_written_at_once_where_the_kernel_takes_them() {
        for release in ["6.2.0", "6.18.44-fc-v657", "7.0.1", "10.1.0"] {
            assert!(release_takes_udp_segments(release), "{release}");
        }
        for release in ["6.1.0-28-amd64", "5.15.0", "4.19.0", "6", "unknown", ""] {
            assert!(!release_takes_udp_segments(release), "{release}");
        }
    }
}
