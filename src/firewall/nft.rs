// SPDX-License-Identifier: Apache-2.0
//! The rules in nftables, without the program `nft`: one table for each family and agent, replaced in one transaction.
//!
//! What is in the kernel is read and compared first, so that nothing is written when nothing changed. The socket stays open, because to
//! close one costs the kernel 16 ms.

pub mod accept;
pub mod batch;
pub mod connection;
pub mod expr;
pub mod generation;
pub mod notifications;
pub mod table;
pub mod tables;

use std::io;

use tokio::time::Instant;
use weft_backends::traffic_rules::Rules;
use weft_netlink::socket::{Netlink, Refusal};
use weft_subnet::cidr::Family;
use weft_subnet::source::Local;

use super::error::FirewallError;
use super::packet_filter::{EnsureError, Ensured, PacketFilter};
use crate::instance::Instance;
use crate::log::Reminder;
use batch::{Batch, remove_table};
use generation::{Cached, generation};
use notifications::{Notifications, is_about};
use table::Table;
use tables::FLANNEL_TABLES;

/// The tables of one agent, and the notifications about them.
#[derive(Debug)]
pub struct Nft {
    instance: Instance,
    sockets: Option<Sockets>,
    /// The rules that were found in place.
    in_place: Cached<Rules>,
    /// Limits how often it is logged that notifications cannot be read.
    logged: Reminder,
}

#[derive(Debug)]
struct Sockets {
    netlink: Netlink,
    notifications: Notifications,
}

impl Nft {
    /// Returns the tables of this agent. Sockets are opened at the first use, in the network namespace of the thread that uses them.
    pub fn new(instance: &Instance) -> Nft {
        Nft { instance: instance.clone(), sockets: None, in_place: Cached::default(), logged: Reminder::default() }
    }

    fn bring(&mut self, rules: &Rules) -> io::Result<Result<Ensured, Refusal>> {
        let generation = generation(self.netlink()?);
        if self.in_place.at(generation) == Some(rules) {
            return Ok(Ok(Ensured::Unchanged));
        }
        let mut done = self.write_difference(rules, Sets::ElementByElement)?;
        // Another program may have removed an element after it was read. The kernel then refuses to remove it, and the transaction fails.
        if done.is_err() {
            done = self.write_difference(rules, Sets::WithTheTable)?;
        }
        if done == Ok(Ensured::Unchanged) {
            self.in_place.keep(generation, rules.clone());
        }
        Ok(done)
    }

    fn netlink(&mut self) -> io::Result<&mut Netlink> {
        Ok(match &mut self.sockets {
            Some(sockets) => &mut sockets.netlink,
            none => &mut none.insert(Sockets::open()?).netlink,
        })
    }

    fn write_difference(&mut self, rules: &Rules, sets: Sets) -> io::Result<Result<Ensured, Refusal>> {
        let instance = self.instance.clone();
        let (name, netlink) = (&instance.name, self.netlink()?);
        let (mut replace, mut change, mut delete) = (Vec::new(), Vec::new(), Vec::new());
        for family in Family::BOTH {
            let Some(wanted) = rules.of(family).map(|part| Table::of(part, name)) else {
                if table::head(netlink, family, name)?.is_some() {
                    delete.push(family);
                }
                continue;
            };
            match table::read(netlink, &wanted)? {
                Some(found) if found == wanted => {}
                Some(found) if sets == Sets::ElementByElement && found.chains == wanted.chains => {
                    change.push((found, wanted));
                }
                _ => replace.push(wanted),
            }
        }
        if replace.is_empty() && delete.is_empty() && change.is_empty() {
            return Ok(Ok(Ensured::Unchanged));
        }
        let comment = instance.alias();
        let mut batch = Batch::new(netlink);
        delete.into_iter().for_each(|family| batch.delete(family, name));
        replace.iter().for_each(|table| batch.replace(table, &comment));
        change.iter().for_each(|(found, wanted)| batch.change(found, wanted));
        Ok(batch.send()?.map(|()| Ensured::Written))
    }
}

/// How a table is changed when only the elements of its sets differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sets {
    /// Elements are added and removed, and the rules keep their counters.
    ElementByElement,
    /// The whole table is replaced.
    WithTheTable,
}

impl Sockets {
    /// # Errors
    /// The kernel has no nftables, or there are too many open files.
    fn open() -> io::Result<Sockets> {
        Ok(Sockets { netlink: connection::open()?, notifications: Notifications::open()? })
    }

    /// Waits for a notification about a table of this name.
    async fn notified(&mut self, table: &str) -> io::Result<()> {
        loop {
            self.notifications.ready().await?;
            let mut ours = false;
            let lost = self.notifications.drain(|message| ours |= is_about(message, table))?;
            if ours || lost {
                return Ok(());
            }
        }
    }
}

impl PacketFilter for Nft {
    fn describe(&self) -> String {
        format!("nftables, table {}", self.instance.name)
    }

    fn ensure<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Result<Ensured, EnsureError>> {
        Box::pin(async move {
            match self.bring(rules) {
                Ok(Ok(done)) => Ok(done),
                Ok(Err(refusal)) => Err(EnsureError::Write(FirewallError::Refused(refusal))),
                Err(error) => Err(EnsureError::Read(FirewallError::Nftables(error))),
            }
        })
    }

    fn remove(&mut self) -> Local<'_, Result<bool, FirewallError>> {
        Box::pin(async move { Ok(self.ensure(&Rules::default()).await? == Ensured::Written) })
    }

    fn changed(&mut self) -> Local<'_, ()> {
        Box::pin(async move {
            let notified = match &mut self.sockets {
                Some(sockets) => sockets.notified(&self.instance.name).await,
                None => std::future::pending().await,
            };
            self.in_place = Cached::default();
            if let Err(error) = notified {
                // The caller waits again after each resync.
                if self.logged.due(&error.to_string(), Instant::now()) {
                    tracing::warn!(%error, "read the notifications of nftables: changes are found at the next resync");
                }
                std::future::pending::<()>().await;
            }
        })
    }
}

/// Returns true if the kernel has no nftables.
pub fn is_absent() -> bool {
    connection::open()
        .and_then(|mut netlink| table::head(&mut netlink, Family::V4, "weft"))
        .is_err_and(|error| connection::is_unsupported(&error))
}

/// Removes the tables that flannel makes. Returns what was removed, for people.
///
/// # Errors
/// The kernel has no nftables, or refused.
pub fn remove_flannel_tables() -> Result<Vec<String>, FirewallError> {
    let mut netlink = connection::open()?;
    let mut removed = Vec::new();
    for (family, kind, name) in [(Family::V4, "ip", FLANNEL_TABLES[0]), (Family::V6, "ip6", FLANNEL_TABLES[1])] {
        if remove_table(&mut netlink, family, name)? {
            removed.push(format!("table {kind} {name}"));
        }
    }
    Ok(removed)
}
