// SPDX-License-Identifier: Apache-2.0
//! The tunnel guard in nftables: a table of its own, with a set of the peers' addresses and a chain that drops tunnel packets from all
//! other addresses. Without it, anyone who reaches the vxlan port can send packets into the pod network.
//!
//! nftables notifies of changes by other programs: [`Change::Peer`] for an element of the set, [`Change::Table`] for everything else.
//!
//! Invariant: the table is never replaced as a whole, because the packets of all peers would be dropped for a moment.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use weft_backends::diff::Op;
use weft_backends::state::{Guard, Key, ObservedValue, Value};
use weft_netlink::socket::{Netlink, Refusal};
use weft_subnet::cidr::{Family, family};

use crate::firewall::error::FirewallError;
use crate::firewall::nft::batch::{Batch, InTable, remove_table};
use crate::firewall::nft::connection;
use crate::firewall::nft::expr::{self, Expr};
use crate::firewall::nft::notifications::{Notifications, is_about};
use crate::firewall::nft::table::{self, Chain, Head, INPUT, Set, Table};
use crate::instance::Instance;

const PEERS: &str = "peers";
const CHAIN: &str = "input";
const UDP: u8 = 17;
const IPIP: u8 = 4;

/// The tables of the tunnel guard of one agent, one for each family.
#[derive(Debug)]
pub struct GuardTable {
    name: String,
    comment: String,
    netlink: Option<Netlink>,
}

impl GuardTable {
    /// Returns the tables of the agent whose devices have this alias, `weft FILE`. Nothing is opened yet.
    pub fn new(alias: &str) -> GuardTable {
        GuardTable { name: table_of_alias(alias), comment: alias.to_owned(), netlink: None }
    }

    /// Returns the chains and peers that are in the kernel. There are none where the kernel has no nftables, or does not let us read it.
    ///
    /// # Errors
    /// The tables could not be read, which does not mean that they are gone.
    pub fn observe(&mut self) -> io::Result<Vec<(Key, ObservedValue)>> {
        match self.read() {
            Err(error) if connection::is_unsupported(&error) || error.kind() == io::ErrorKind::PermissionDenied => {
                Ok(Vec::new())
            }
            found => found,
        }
    }

    fn read(&mut self) -> io::Result<Vec<(Key, ObservedValue)>> {
        let name = self.name.clone();
        let netlink = connection::open_once(&mut self.netlink)?;
        let mut found = Vec::new();
        for family in Family::BOTH {
            let Some(Head { flags, .. }) = table::head(netlink, family, &name)? else { continue };
            match table::elements(netlink, family, &name, PEERS) {
                Ok(peers) => found.extend(peers.into_iter().map(|ip| (Key::Peer(ip), Value::Peer.into()))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            if table::has_chain(netlink, family, &name, CHAIN)? {
                let value = chain(netlink, &table_of(&name, family, Guard::default()))?
                    .filter(|_| flags == 0)
                    .unwrap_or_default();
                found.push((Key::Guard(family), Value::Guard(value).into()));
            }
        }
        Ok(found)
    }

    /// Writes operations on peers and chains of the guard. One result for each operation, in order.
    pub fn apply(&mut self, ops: &[Op]) -> Vec<Result<(), GuardError>> {
        if let [_, _, ..] = ops
            && self.write(ops).is_ok()
        {
            return ops.iter().map(|_| Ok(())).collect();
        }
        // The kernel refuses a transaction as a whole. So that one bad operation does not stop the others, each is written alone.
        ops.iter().map(|op| self.write(std::slice::from_ref(op))).collect()
    }

    fn write(&mut self, ops: &[Op]) -> Result<(), GuardError> {
        let (name, comment) = (&self.name, &self.comment);
        let netlink = connection::open_once(&mut self.netlink)?;
        let mut present = Vec::new();
        for op in ops {
            if let Key::Guard(family) = op.key()
                && table::has_chain(netlink, family, name, CHAIN)?
            {
                present.push(family);
            }
        }
        let bare = Family::BOTH.map(|family| Table { chains: Vec::new(), ..table_of(name, family, Guard::default()) });
        let mut batch = Batch::new(netlink);
        for table in &bare {
            for (adds, wanted) in [(true, true), (false, false)] {
                let peers = peers(ops, table.family, adds);
                if !peers.is_empty() {
                    if adds {
                        batch.add(table, comment);
                    }
                    batch.elements(table.family, InTable { table: name, name: PEERS }, &peers, wanted);
                }
            }
        }
        for op in ops {
            match *op {
                Op::Ensure(Key::Guard(family), Value::Guard(guard)) => {
                    if present.contains(&family) {
                        batch.delete_chain(family, InTable { table: name, name: CHAIN });
                    }
                    batch.add(&table_of(name, family, guard), comment);
                }
                Op::Remove(Key::Guard(family), _) if present.contains(&family) => {
                    batch.delete_chain(family, InTable { table: name, name: CHAIN });
                }
                _ => {}
            }
        }
        batch.send()?.map_err(GuardError::Refused)
    }
}

/// Why an operation on the guard was not done.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The kernel refused it.
    #[error("{}: {}", .0.errno, .0.text)]
    Refused(Refusal),
    /// The netlink socket failed.
    #[error(transparent)]
    Netlink(#[from] io::Error),
}

/// What changed in the guard's tables. Our own writes are among the changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A peer was added (true) or removed.
    Peer(IpAddr, bool),
    /// Something else changed, and the tables must be read again.
    Table,
}

/// The notifications about the guard's tables of one agent.
#[derive(Debug)]
pub struct GuardNotifications {
    notifications: Notifications,
    table: String,
}

impl GuardNotifications {
    /// Opens those for the agent whose devices have this alias.
    ///
    /// # Errors
    /// As [`Notifications::open`].
    pub fn open(alias: &str) -> io::Result<GuardNotifications> {
        Ok(GuardNotifications { notifications: Notifications::open()?, table: table_of_alias(alias) })
    }

    /// Waits for a notification about any table. Cancel-safe.
    ///
    /// # Errors
    /// As [`Notifications::ready`].
    pub async fn ready(&self) -> io::Result<()> {
        self.notifications.ready().await
    }

    /// Returns the changes that were notified, in order. The last one is [`Change::Table`] when there is more to read.
    ///
    /// # Errors
    /// As [`Notifications::drain`].
    pub fn changes(&mut self) -> io::Result<Vec<Change>> {
        let (mut changes, mut read_again) = (Vec::new(), false);
        let table = &self.table;
        read_again |= self.notifications.drain(|message| {
            if !is_about(message, table) {
                return;
            }
            match table::notified_elements(message, PEERS) {
                Some((added, peers)) => changes.extend(peers.into_iter().map(|ip| Change::Peer(ip, added))),
                None => read_again |= !table::is_new_set(message),
            }
        })?;
        if read_again {
            changes.push(Change::Table);
        }
        Ok(changes)
    }
}

/// Returns the ports and protocols that the chain guards, or `None` if the chain is not as we write it.
fn chain(netlink: &mut Netlink, shape: &Table) -> io::Result<Option<Guard>> {
    let Some(chain) = table::chain(netlink, shape)? else { return Ok(None) };
    let is_port = |expr: &Expr| matches!(expr, Expr::Cmp { equal: true, data } if data.len() == 2);
    let mut guard = Guard::default();
    let mut ports = chain.iter().flatten().filter(|expr| is_port(expr)).filter_map(|expr| match expr {
        Expr::Cmp { data, .. } => Some(u16::from_be_bytes([data[0], data[1]])),
        _ => None,
    });
    guard.ports = [ports.next().unwrap_or(0), ports.next().unwrap_or(0)];
    guard.ports.sort_unstable();
    guard.ipip = chain.iter().any(|rule| rule.contains(&Expr::Cmp { equal: true, data: vec![IPIP] }));
    Ok((chain == rules(shape.family, guard)).then_some(guard))
}

fn peers(ops: &[Op], wanted: Family, adds: bool) -> Vec<IpAddr> {
    let of = |op: &Op| match *op {
        Op::Ensure(Key::Peer(ip), _) | Op::Recreate(Key::Peer(ip), _) if adds => Some(ip),
        Op::Remove(Key::Peer(ip), _) if !adds => Some(ip),
        _ => None,
    };
    ops.iter().filter_map(of).filter(|ip| family(&IpNet::from(*ip)) == wanted).collect()
}

fn table_of(name: &str, family: Family, guard: Guard) -> Table {
    let chains = vec![Chain { name: CHAIN, position: INPUT, rules: rules(family, guard) }];
    Table { family, name: name.to_owned(), chains, sets: vec![Set { name: PEERS, elements: None }] }
}

/// The chain sees only packets to this host, so forwarded packets cost nothing.
fn rules(family: Family, guard: Guard) -> Vec<Vec<Expr>> {
    let drop_unless_peer = || {
        let lookup = Expr::Lookup { set: PEERS.to_owned(), inside: false };
        [expr::source(family), lookup, Expr::Counter, Expr::Drop]
    };
    let ports = guard.ports.into_iter().filter(|port| *port != 0);
    let mut all: Vec<Vec<Expr>> = ports
        .map(|port| expr::l4proto(UDP).into_iter().chain(expr::dport(port)).chain(drop_unless_peer()).collect())
        .collect();
    if guard.ipip && family == Family::V4 {
        all.push(expr::l4proto(IPIP).into_iter().chain(drop_unless_peer()).collect());
    }
    all
}

fn table_of_alias(alias: &str) -> String {
    table_name(&Instance::of_alias(alias))
}

fn table_name(instance: &Instance) -> String {
    format!("{}-guard", instance.name)
}

/// Removes the guard of an agent. Returns true if there was one.
///
/// # Errors
/// The kernel has no nftables, or refused.
pub fn remove(instance: &Instance) -> Result<bool, FirewallError> {
    let name = table_name(instance);
    let mut netlink = connection::open()?;
    let mut removed = false;
    for family in Family::BOTH {
        removed |= remove_table(&mut netlink, family, &name)?;
    }
    Ok(removed)
}
