// SPDX-License-Identifier: Apache-2.0
//! The tunnel guard in the kernel: a table of its own with a set of the peers' addresses, changed one by one, and a chain that drops
//! tunnel packets from anyone else. An open vxlan port gives everyone a place in the pod network.
//!
//! Changes by others are told by nftables: of an element as a notice of its own, of all else as one to look again.
//!
//! Invariant: the table is never replaced as a whole, so that no peer is unknown for a moment.

use std::io;
use std::net::IpAddr;

use ipnet::IpNet;
use nix::errno::Errno;
use weft_backends::diff::Op;
use weft_backends::state::{Guard, Key, Seen, Value};
use weft_subnet::cidr::{Family, family};

use crate::firewall::nft;
use crate::firewall::nft::batch::Batch;
use crate::firewall::nft::expr::{self, Expr};
use crate::firewall::nft::notifications::{News, is_about};
use crate::firewall::nft::table::{self, Chain, INPUT, Set, Table};
use crate::instance::Instance;
use crate::kernel::{Notice, Outcome, errno};
use weft_netlink::socket::{Netlink, Refusal};

const PEERS: &str = "peers";
const CHAIN: &str = "input";
const UDP: u8 = 17;
const IPIP: u8 = 4;
const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// The guard's tables of one agent.
#[derive(Debug)]
pub struct GuardTable {
    name: String,
    comment: String,
    netlink: Option<Netlink>,
}

impl GuardTable {
    /// Of the agent whose links bear this alias, `weft FILE`.
    pub fn new(alias: &str) -> GuardTable {
        GuardTable { name: table_of_alias(alias), comment: alias.to_owned(), netlink: None }
    }

    /// What is there. A kernel without nftables, or one that lets us see nothing of it, has nothing.
    ///
    /// # Errors
    /// A dump failed: what it would have shown is not taken for gone.
    pub fn observe(&mut self) -> io::Result<Vec<(Key, Seen)>> {
        match self.look() {
            Err(error) if nft::lacks(&error) || error.kind() == io::ErrorKind::PermissionDenied => Ok(Vec::new()),
            found => found,
        }
    }

    fn look(&mut self) -> io::Result<Vec<(Key, Seen)>> {
        let name = self.name.clone();
        let netlink = nft::kept(&mut self.netlink)?;
        let mut found = Vec::new();
        for family in FAMILIES {
            let Some((flags, _)) = table::look(netlink, family, &name)? else { continue };
            match table::elements(netlink, family, &name, PEERS) {
                Ok(peers) => found.extend(peers.into_iter().map(|ip| (Key::Peer(ip), seen(Value::Peer)))),
                Err(error) if error.raw_os_error() == Some(Errno::ENOENT as i32) => {}
                Err(error) => return Err(error),
            }
            if table::has_chain(netlink, family, &name, CHAIN)? {
                let value = chain(netlink, &table_of(&name, family, Guard::default()))?
                    .filter(|_| flags == 0)
                    .unwrap_or_default();
                found.push((Key::Guard(family), seen(Value::Guard(value))));
            }
        }
        Ok(found)
    }

    /// Writes operations on peers and guards, one outcome each.
    pub fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let alone = match ops {
            [] => return Vec::new(),
            [op] => return vec![self.write(std::slice::from_ref(op)).unwrap_or_else(|failure| failure.outcome(op))],
            _ => self.write(ops),
        };
        // One that is refused takes all along: then each by itself.
        match alone {
            Ok(done) => vec![done; ops.len()],
            Err(_) => ops
                .iter()
                .map(|op| self.write(std::slice::from_ref(op)).unwrap_or_else(|failure| failure.outcome(op)))
                .collect(),
        }
    }

    fn write(&mut self, ops: &[Op]) -> Result<Outcome, Failure> {
        let (name, comment) = (&self.name, &self.comment);
        let netlink = nft::kept(&mut self.netlink)?;
        let mut there = Vec::new();
        for op in ops {
            let (Op::Ensure(key, _) | Op::Recreate(key, _) | Op::Remove(key, _)) = op;
            if let Key::Guard(family) = *key
                && table::has_chain(netlink, family, name, CHAIN)?
            {
                there.push(family);
            }
        }
        let bare = FAMILIES.map(|family| Table { chains: Vec::new(), ..table_of(name, family, Guard::default()) });
        let mut batch = Batch::new(netlink);
        for table in &bare {
            for (adds, wanted) in [(true, true), (false, false)] {
                let peers = peers(ops, table.family, adds);
                if !peers.is_empty() {
                    if adds {
                        batch.add(table, comment);
                    }
                    batch.elements(table.family, (name, PEERS), &peers, wanted);
                }
            }
        }
        for op in ops {
            match *op {
                Op::Ensure(Key::Guard(family), Value::Guard(guard)) => {
                    if there.contains(&family) {
                        batch.delete_chain(family, (name, CHAIN));
                    }
                    batch.add(&table_of(name, family, guard), comment);
                }
                Op::Remove(Key::Guard(family), _) if there.contains(&family) => {
                    batch.delete_chain(family, (name, CHAIN));
                }
                _ => {}
            }
        }
        match batch.send()? {
            Ok(()) => Ok(Outcome::Done),
            Err(refusal) => Err(Failure::Refused(refusal)),
        }
    }
}

/// What nftables tells of the guard's tables.
#[derive(Debug)]
pub struct GuardNews {
    news: News,
    table: String,
}

impl GuardNews {
    /// Of the agent whose links bear this alias.
    ///
    /// # Errors
    /// As [`News::open`].
    pub fn open(alias: &str) -> io::Result<GuardNews> {
        Ok(GuardNews { news: News::open()?, table: table_of_alias(alias) })
    }

    /// Waits for news, of whatever table.
    ///
    /// # Errors
    /// As [`News::ready`].
    pub async fn ready(&self) -> io::Result<()> {
        self.news.ready().await
    }

    /// What it was about, in order. Our own writes are told, too: the agent compares.
    ///
    /// # Errors
    /// As [`News::drain`].
    pub fn notices(&mut self) -> io::Result<Vec<Notice>> {
        let (mut notices, mut look) = (Vec::new(), false);
        let table = &self.table;
        look |= self.news.drain(|message| {
            if !is_about(message, table) {
                return;
            }
            match table::elements_told(message, PEERS) {
                Some((there, peers)) => notices
                    .extend(peers.into_iter().map(|ip| Notice::Entry(Key::Peer(ip), there.then(|| seen(Value::Peer))))),
                None => look |= !table::adds_a_set(message),
            }
        })?;
        if look {
            notices.push(Notice::Guard);
        }
        Ok(notices)
    }
}

fn seen(value: Value) -> Seen {
    Seen { value, protocol: 0, mark: false }
}

/// What the chain looks at; `None` when it is not as we write it.
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

enum Failure {
    Refused(Refusal),
    Broken(io::Error),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Broken(error)
    }
}

impl Failure {
    fn outcome(self, op: &Op) -> Outcome {
        match self {
            Failure::Refused(refusal) => errno::outcome(op, &refusal),
            Failure::Broken(error) => errno::retry(op, &error.to_string()),
        }
    }
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
    let chains = vec![Chain { name: CHAIN, place: INPUT, rules: rules(family, guard) }];
    Table { family, name: name.to_owned(), chains, sets: vec![Set { name: PEERS, elements: None }] }
}

/// Packets to this machine alone are looked at; what it forwards costs nothing.
fn rules(family: Family, guard: Guard) -> Vec<Vec<Expr>> {
    let stranger = || {
        let lookup = Expr::Lookup { set: PEERS.to_owned(), inside: false };
        [expr::source(family), lookup, Expr::Counter, Expr::Drop]
    };
    let ports = guard.ports.into_iter().filter(|port| *port != 0);
    let mut all: Vec<Vec<Expr>> =
        ports.map(|port| expr::l4proto(UDP).into_iter().chain(expr::dport(port)).chain(stranger()).collect()).collect();
    if guard.ipip && family == Family::V4 {
        all.push(expr::l4proto(IPIP).into_iter().chain(stranger()).collect());
    }
    all
}

fn table_of_alias(alias: &str) -> String {
    table_name(&Instance::of_alias(alias))
}

fn table_name(instance: &Instance) -> String {
    format!("{}-guard", instance.name)
}

/// Removes the guard of an agent; true when there was one.
///
/// # Errors
/// No nfnetlink, or the kernel refused.
pub fn remove(instance: &Instance) -> io::Result<bool> {
    let name = table_name(instance);
    let mut netlink = nft::socket()?;
    let mut gone = false;
    for family in FAMILIES {
        if table::look(&mut netlink, family, &name)?.is_some() {
            let mut batch = Batch::new(&mut netlink);
            batch.delete(family, &name);
            batch.send()?.map_err(|refusal| io::Error::from(refusal.errno))?;
            gone = true;
        }
    }
    Ok(gone)
}
