// SPDX-License-Identifier: Apache-2.0
//! The list of all tables in nftables, whichever program made them.

use std::io;

use weft_netlink::nftables::{GETTABLE, NFGENMSG, TABLE_NAME};
use weft_netlink::socket::Netlink;
use weft_netlink::wire::{attr_after, messages, text};
use weft_subnet::cidr::Family;

/// `struct nfgenmsg` with AF_UNSPEC: all families.
const ALL_FAMILIES: [u8; NFGENMSG] = [0; NFGENMSG];
/// The tables that iptables-nft makes.
const IPTABLES: [&str; 5] = ["filter", "nat", "mangle", "raw", "security"];

/// The tables that flannel makes, in the families of their names.
pub const FLANNEL_TABLES: [&str; 2] = ["flannel-ipv4", "flannel-ipv6"];

/// The family and the name of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableName {
    /// `NFPROTO_*`.
    pub family: u8,
    /// Its name.
    pub name: String,
}

impl TableName {
    /// Returns true if iptables-nft reads this table.
    pub fn is_of_iptables(&self, family: Family) -> bool {
        self.family == family.number() && IPTABLES.contains(&self.name.as_str())
    }

    /// Returns true for a table of flannel.
    pub fn is_of_flannel(&self) -> bool {
        FLANNEL_TABLES.contains(&self.name.as_str())
    }
}

/// Returns the tables of all families. Another thread reads them, because to close the socket takes the kernel milliseconds.
///
/// # Errors
/// The kernel has no nftables, or refuses.
pub async fn tables() -> io::Result<Vec<TableName>> {
    tokio::task::spawn_blocking(read).await.map_err(io::Error::other)?
}

fn read() -> io::Result<Vec<TableName>> {
    read_by(&mut super::connection::open()?)
}

/// Reads the same, by a socket that stays open.
///
/// # Errors
/// As [`tables`].
pub fn read_by(netlink: &mut Netlink) -> io::Result<Vec<TableName>> {
    let data = netlink.dump(GETTABLE, |w, kind, flags| w.begin(kind, flags, &ALL_FAMILIES))?;
    let table = |payload: &[u8]| {
        let name = attr_after(payload, NFGENMSG, TABLE_NAME)?;
        Some(TableName { family: *payload.first()?, name: text(name).to_owned() })
    };
    Ok(messages(&data).filter_map(|m| table(m.payload)).collect())
}
