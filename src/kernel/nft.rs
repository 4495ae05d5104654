// SPDX-License-Identifier: Apache-2.0
//! nftables without helpers: one table per family and agent, replaced as a whole in one transaction, by a socket that stays open
//! (closing one costs the kernel 16 ms). What is there is read back and compared first, so that nothing is written for nothing.

pub mod batch;
pub mod expr;
pub mod foreign;
pub mod table;

use std::io;
use std::os::fd::AsRawFd;

use netlink_sys::protocols::NETLINK_NETFILTER;
use netlink_sys::{Socket, SocketAddr};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use tokio::io::unix::AsyncFd;
use weft_backends::masq::Rules;
use weft_subnet::cidr::Family;
use weft_subnet::source::Local;

use super::monitor::wait_on;
use super::socket::{Netlink, Refusal, force_buffer};
use super::wire::{attrs_after, messages, text};
use crate::rules::{Ensured, Firewall, Instance, Trouble};
use batch::Batch;
use table::Table;

/// NFNLGRP_NFTABLES.
const GROUP: u32 = 7;
/// kube-proxy rewrites thousands of rules at once, and tells of each.
const BUFFER: usize = 8 << 20;
const DATAGRAM: usize = 64 << 10;

/// Our tables, and the news about them.
#[derive(Debug)]
pub struct Nft {
    instance: Instance,
    sockets: Option<Sockets>,
}

#[derive(Debug)]
struct Sockets {
    netlink: Netlink,
    news: AsyncFd<Socket>,
    buffer: Vec<u8>,
}

impl Nft {
    /// The tables of this agent. Sockets are opened when they are needed, in the network namespace of the thread that runs then.
    pub fn new(instance: &Instance) -> Nft {
        Nft { instance: instance.clone(), sockets: None }
    }

    fn bring(&mut self, rules: &Rules) -> io::Result<Result<Ensured, Refusal>> {
        let name = &self.instance.name;
        let netlink = match &mut self.sockets {
            Some(sockets) => &mut sockets.netlink,
            none => &mut none.insert(Sockets::open()?).netlink,
        };
        let mut replace = Vec::new();
        let mut delete = Vec::new();
        for family in [Family::V4, Family::V6] {
            let Some(wanted) = rules.of(family).map(|part| Table::of(part, name)) else {
                if table::look(netlink, family, name)?.is_some() {
                    delete.push(family);
                }
                continue;
            };
            if table::read(netlink, &wanted)?.as_ref() != Some(&wanted) {
                replace.push(wanted);
            }
        }
        if replace.is_empty() && delete.is_empty() {
            return Ok(Ok(Ensured::Same));
        }
        let comment = format!("weft {}", self.instance.file);
        let mut batch = Batch::new(netlink);
        delete.into_iter().for_each(|family| batch.delete(family, name));
        replace.iter().for_each(|table| batch.replace(table, &comment));
        Ok(batch.send()?.map(|()| Ensured::Written))
    }
}

impl Sockets {
    /// # Errors
    /// No nfnetlink (a kernel without nftables), or out of descriptors.
    fn open() -> io::Result<Sockets> {
        let netlink = Netlink::open_on(NETLINK_NETFILTER)?;
        let mut news = Socket::new(NETLINK_NETFILTER)?;
        force_buffer(&news, BUFFER);
        news.set_non_blocking(true)?;
        news.bind(&SocketAddr::new(0, 0))?;
        news.add_membership(GROUP)?;
        Ok(Sockets { netlink, news: wait_on(news)?, buffer: vec![0; DATAGRAM] })
    }

    /// Waits for news about a table of ours.
    async fn told(&mut self, table: &str) -> io::Result<()> {
        loop {
            let mut ready = self.news.readable().await?;
            // Cleared before the reading: what arrives meanwhile is read or sets it again.
            ready.clear_ready();
            let mut ours = false;
            loop {
                match recv(self.news.get_ref().as_raw_fd(), &mut self.buffer, MsgFlags::MSG_DONTWAIT) {
                    Ok(n) => ours |= messages(&self.buffer[..n]).any(|m| is_about(m.payload, table)),
                    Err(Errno::EAGAIN) => break,
                    Err(Errno::EINTR) => {}
                    Err(Errno::ENOBUFS) => ours = true,
                    Err(e) => return Err(e.into()),
                }
            }
            if ours {
                return Ok(());
            }
        }
    }
}

fn is_about(payload: &[u8], name: &str) -> bool {
    attrs_after(payload, 4).any(|(kind, value)| kind == table::TABLE_NAME && text(value) == name)
}

impl Firewall for Nft {
    fn describe(&self) -> String {
        format!("nftables, table {}", self.instance.name)
    }

    fn ensure<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Result<Ensured, Trouble>> {
        Box::pin(async move {
            match self.bring(rules) {
                Ok(Ok(done)) => Ok(done),
                Ok(Err(refusal)) => Err(trouble(&refusal.errno.into(), &refusal.text)),
                Err(error) => Err(trouble(&error, "")),
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

/// Removes the tables that flannel makes; their names.
///
/// # Errors
/// No nfnetlink, or the kernel refused.
pub fn remove_flannels() -> io::Result<Vec<String>> {
    let mut netlink = Netlink::open_on(NETLINK_NETFILTER)?;
    let mut gone = Vec::new();
    for (family, kind, name) in [(Family::V4, "ip", "flannel-ipv4"), (Family::V6, "ip6", "flannel-ipv6")] {
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
