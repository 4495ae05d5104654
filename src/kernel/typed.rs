// SPDX-License-Identifier: Apache-2.0
//! Typed messages of the crate netlink-packet-route, in the buffers of weft-netlink. Only rare messages are typed: links,
//! addresses and policy rules. docs/adr/014-typed-messages.md says why.

use netlink_packet_core::{Emitable, NlaBuffer, NlasIterator};

use super::wire::Writer;

/// Begins a message with its fixed header and its attributes. `kind` is the message type (`RTM_*`), `flags` are `NLM_F_*`.
pub(super) fn begin(w: &mut Writer, kind: u16, flags: u16, message: &impl Emitable) {
    // The crate leaves the zero at the end of some strings unwritten, so the buffer must consist of zeros.
    let mut bytes = vec![0; message.buffer_len()];
    message.emit(&mut bytes);
    w.begin(kind, flags, &bytes);
}

/// Iterates over the attributes after a fixed header of `fixed` bytes. They are not parsed yet, so that an attribute that the
/// crate cannot parse does not make the others unreadable. Ends at an attribute whose length is invalid.
pub(super) fn attributes(payload: &[u8], fixed: usize) -> impl Iterator<Item = NlaBuffer<&[u8]>> {
    NlasIterator::new(payload.get(fixed..).unwrap_or_default()).map_while(Result::ok)
}
