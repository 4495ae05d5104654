// SPDX-License-Identifier: Apache-2.0
//! Generic netlink: the header of its messages, and the number of a family (linux/genetlink.h).

use std::io;

use netlink_sys::protocols::NETLINK_GENERIC;
use nix::errno::Errno;

use super::socket::Netlink;
use super::wire::{attr_after, messages, u16_at};

/// Length of `struct genlmsghdr` in bytes.
pub const HEADER: usize = 4;

/// Message type of the controller, the one family with a fixed number.
const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_VERSION: u8 = 2;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;

/// Returns `struct genlmsghdr` for a command.
pub fn header(command: u8, version: u8) -> [u8; HEADER] {
    [command, version, 0, 0]
}

/// Opens a socket for generic netlink.
///
/// # Errors
/// As [`Netlink::open`].
pub fn open() -> io::Result<Netlink> {
    Netlink::open_on(NETLINK_GENERIC)
}

/// Returns the message type of a family. The kernel chooses it when it loads the module of the family, and the question
/// for it loads the module.
///
/// # Errors
/// `None` means that this kernel does not have the family. An outer error is one of the socket, or an answer without a
/// number.
pub fn family(netlink: &mut Netlink, name: &str) -> io::Result<Option<u16>> {
    let reply = netlink.request(|w| {
        w.begin(GENL_ID_CTRL, 0, &header(CTRL_CMD_GETFAMILY, CTRL_VERSION));
        w.attr_str(CTRL_ATTR_FAMILY_NAME, name);
    })?;
    match reply {
        Ok(data) => family_id(&data)
            .map(Some)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer has no family number")),
        Err(refusal) if refusal.errno == Errno::ENOENT => Ok(None),
        Err(refusal) => Err(refusal.errno.into()),
    }
}

/// Finds the number of the family in the controller's answer.
fn family_id(data: &[u8]) -> Option<u16> {
    let mut answers = messages(data).filter(|message| message.kind == GENL_ID_CTRL);
    let id = answers.find_map(|message| attr_after(message.payload, HEADER, CTRL_ATTR_FAMILY_ID))?;
    (id.len() == 2).then(|| u16_at(id, 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Writer;

    #[test]
    fn the_number_is_found_behind_other_attributes() {
        let mut w = Writer::default();
        w.begin(GENL_ID_CTRL, 0, &header(1, 2));
        w.attr_str(CTRL_ATTR_FAMILY_NAME, "wireguard");
        w.attr(CTRL_ATTR_FAMILY_ID, &0x1eu16.to_ne_bytes());
        w.end(1);
        assert_eq!(family_id(w.bytes()), Some(0x1e));
        assert_eq!(family_id(&[]), None);
    }

    #[test]
    fn the_kernel_knows_its_own_controller() {
        let mut netlink = open().unwrap();
        assert_eq!(family(&mut netlink, "nlctrl").unwrap(), Some(GENL_ID_CTRL));
        assert_eq!(family(&mut netlink, "no-such-family").unwrap(), None);
    }
}
