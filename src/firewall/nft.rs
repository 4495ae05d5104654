// SPDX-License-Identifier: Apache-2.0
//! nftables without helpers: one table per family and agent, replaced as a whole in one transaction, by a socket that stays open
//! (closing one costs the kernel 16 ms). What is there is read back and compared first, so that nothing is written for nothing.

pub mod batch;
pub mod expr;
pub mod foreign_chains;
pub mod generation;
pub mod notifications;
pub mod table;
pub mod tables;

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::errno::Errno;
use weft_backends::masq::Rules;
use weft_subnet::cidr::Family;
use weft_subnet::source::Local;

use crate::firewall::{Ensured, Failed, Firewall, Trouble};
use crate::instance::Instance;
use batch::Batch;
use generation::{Known, generation};
use notifications::{News, is_about};
use table::Table;
use tables::FLANNELS;
use weft_netlink::socket::{Netlink, Refusal};

/// Our tables, and the news about them.
#[derive(Debug)]
pub struct Nft {
    instance: Instance,
    sockets: Option<Sockets>,
    /// What was all in place.
    in_place: Known<Rules>,
}

#[derive(Debug)]
struct Sockets {
    netlink: Netlink,
    news: News,
}

impl Nft {
    /// The tables of this agent. Sockets are opened when they are needed, in the network namespace of the thread that runs then.
    pub fn new(instance: &Instance) -> Nft {
        Nft { instance: instance.clone(), sockets: None, in_place: Known::default() }
    }

    fn bring(&mut self, rules: &Rules) -> io::Result<Result<Ensured, Refusal>> {
        let generation = generation(self.netlink()?);
        if self.in_place.at(generation) == Some(rules) {
            return Ok(Ok(Ensured::Same));
        }
        let mut done = self.bring_by(rules, true)?;
        // An element that others took away meanwhile cannot be removed, and takes the whole batch along.
        if done.is_err() {
            done = self.bring_by(rules, false)?;
        }
        if done == Ok(Ensured::Same) {
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

    /// `elements`: where a set alone differs, its elements are changed one by one; else tables are replaced as a whole.
    fn bring_by(&mut self, rules: &Rules, elements: bool) -> io::Result<Result<Ensured, Refusal>> {
        let instance = self.instance.clone();
        let (name, netlink) = (&instance.name, self.netlink()?);
        let mut replace = Vec::new();
        let mut change = Vec::new();
        let mut delete = Vec::new();
        for family in [Family::V4, Family::V6] {
            let Some(wanted) = rules.of(family).map(|part| Table::of(part, name)) else {
                if table::look(netlink, family, name)?.is_some() {
                    delete.push(family);
                }
                continue;
            };
            match table::read(netlink, &wanted)? {
                Some(found) if found == wanted => {}
                Some(found) if elements && found.chains == wanted.chains => change.push((found, wanted)),
                _ => replace.push(wanted),
            }
        }
        if replace.is_empty() && delete.is_empty() && change.is_empty() {
            return Ok(Ok(Ensured::Same));
        }
        let comment = instance.alias();
        let mut batch = Batch::new(netlink);
        delete.into_iter().for_each(|family| batch.delete(family, name));
        replace.iter().for_each(|table| batch.replace(table, &comment));
        change.iter().for_each(|(found, wanted)| batch.change(found, wanted));
        Ok(batch.send()?.map(|()| Ensured::Written))
    }
}

impl Sockets {
    /// # Errors
    /// No nfnetlink (a kernel without nftables), or out of descriptors.
    fn open() -> io::Result<Sockets> {
        Ok(Sockets { netlink: socket()?, news: News::open()? })
    }

    /// Waits for news about a table of ours.
    async fn told(&mut self, table: &str) -> io::Result<()> {
        loop {
            self.news.ready().await?;
            let mut ours = false;
            let lost = self.news.drain(|message| ours |= is_about(message, table))?;
            if ours || lost {
                return Ok(());
            }
        }
    }
}

impl Firewall for Nft {
    fn describe(&self) -> String {
        format!("nftables, table {}", self.instance.name)
    }

    fn ensure<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Result<Ensured, Failed>> {
        Box::pin(async move {
            match self.bring(rules) {
                Ok(Ok(done)) => Ok(done),
                Ok(Err(refusal)) => Err(Failed::Write(trouble(&refusal.errno.into(), &refusal.text))),
                Err(error) => Err(Failed::Look(trouble(&error, ""))),
            }
        })
    }

    fn remove(&mut self) -> Local<'_, Result<bool, Trouble>> {
        Box::pin(async move { Ok(self.ensure(&Rules::default()).await? == Ensured::Written) })
    }

    fn disturbed(&mut self) -> Local<'_, ()> {
        Box::pin(async move {
            let told = match &mut self.sockets {
                Some(sockets) => sockets.told(&self.instance.name).await,
                None => std::future::pending().await,
            };
            self.in_place = Known::default();
            if let Err(error) = told {
                tracing::warn!(%error, "read the news of nftables: left to the resync");
                std::future::pending::<()>().await;
            }
        })
    }
}

/// The sentence for people, with the remedy.
pub fn trouble(error: &io::Error, text: &str) -> Trouble {
    let said = if text.is_empty() { String::new() } else { format!(": {text}") };
    let remedy = match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EPERM | Errno::EACCES) => "; run as root or with CAP_NET_ADMIN",
        Some(Errno::ENOENT | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT | Errno::EINVAL | Errno::EAFNOSUPPORT) => {
            "; if the kernel lacks nf_tables or nft_masq, load them or give --firewall=iptables"
        }
        _ => "",
    };
    Trouble(format!("write the rules with nftables: {error}{said}{remedy}"))
}

/// A socket for what is not ours.
///
/// # Errors
/// No nfnetlink: a kernel without nftables.
pub fn socket() -> io::Result<Netlink> {
    Netlink::open_on(NETLINK_NETFILTER)
}

/// The same, kept open for the next look: closing one costs the kernel 16 ms.
///
/// # Errors
/// As [`socket`].
pub fn kept(netlink: &mut Option<Netlink>) -> io::Result<&mut Netlink> {
    Ok(match netlink {
        Some(netlink) => netlink,
        none => none.insert(socket()?),
    })
}

/// True when this answer to a plain question means that the kernel has no nftables: nothing of it can be there.
pub fn lacks(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    // nfnetlink without nf_tables says EINVAL.
    let known = matches!(errno, Some(Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT | Errno::EINVAL));
    known || error.kind() == io::ErrorKind::Unsupported
}

/// True when the kernel has no nftables.
pub fn is_absent() -> bool {
    socket().and_then(|mut netlink| table::look(&mut netlink, Family::V4, "weft")).is_err_and(|error| lacks(&error))
}

/// Removes the tables that flannel makes; their names.
///
/// # Errors
/// No nfnetlink, or the kernel refused.
pub fn remove_flannels() -> io::Result<Vec<String>> {
    let mut netlink = socket()?;
    let mut gone = Vec::new();
    for (family, kind, name) in [(Family::V4, "ip", FLANNELS[0]), (Family::V6, "ip6", FLANNELS[1])] {
        if table::look(&mut netlink, family, name)?.is_none() {
            continue;
        }
        let mut batch = Batch::new(&mut netlink);
        batch.delete(family, name);
        batch.send()?.map_err(|refusal| io::Error::from(refusal.errno))?;
        gone.push(format!("table {kind} {name}"));
    }
    Ok(gone)
}
