// SPDX-License-Identifier: Apache-2.0
//! What all readers and writers of nftables share: the kinds of messages, numbers in attributes, and the base chains of the kernel
//! (linux/netfilter/nf_tables.h). Numbers in attributes are big-endian.

pub mod attributes;

use std::io;

use netlink_sys::protocols::NETLINK_NETFILTER;
use nix::errno::Errno;

use attributes::{
    CHAIN_HOOK, CHAIN_NAME, CHAIN_POLICY, CHAIN_TYPE, HOOK_DEVICE, HOOK_DEVICE_NAME, HOOK_DEVICES, HOOK_NUMBER,
    HOOK_PRIORITY, POLICY_DROP,
};

use crate::socket::Netlink;
use crate::wire::{attr, attr_after, attrs, messages, text};

/// NFNL_SUBSYS_NFTABLES, in the upper byte of each kind of message.
pub const SUBSYSTEM: u16 = 10 << 8;
/// NFT_MSG_NEWTABLE.
pub const NEWTABLE: u16 = SUBSYSTEM;
/// NFT_MSG_GETTABLE.
pub const GETTABLE: u16 = SUBSYSTEM | 1;
/// NFT_MSG_DELTABLE.
pub const DELTABLE: u16 = SUBSYSTEM | 2;
/// NFT_MSG_NEWCHAIN.
pub const NEWCHAIN: u16 = SUBSYSTEM | 3;
/// NFT_MSG_GETCHAIN.
pub const GETCHAIN: u16 = SUBSYSTEM | 4;
/// NFT_MSG_DELCHAIN.
pub const DELCHAIN: u16 = SUBSYSTEM | 5;
/// NFT_MSG_NEWRULE.
pub const NEWRULE: u16 = SUBSYSTEM | 6;
/// NFT_MSG_GETRULE.
pub const GETRULE: u16 = SUBSYSTEM | 7;
/// NFT_MSG_DELRULE.
pub const DELRULE: u16 = SUBSYSTEM | 8;
/// NFT_MSG_NEWSET.
pub const NEWSET: u16 = SUBSYSTEM | 9;
/// NFT_MSG_GETSET.
pub const GETSET: u16 = SUBSYSTEM | 10;
/// NFT_MSG_NEWSETELEM.
pub const NEWSETELEM: u16 = SUBSYSTEM | 12;
/// NFT_MSG_GETSETELEM.
pub const GETSETELEM: u16 = SUBSYSTEM | 13;
/// NFT_MSG_DELSETELEM.
pub const DELSETELEM: u16 = SUBSYSTEM | 14;
/// NFT_MSG_NEWGEN.
pub const NEWGEN: u16 = SUBSYSTEM | 15;
/// NFT_MSG_GETGEN.
pub const GETGEN: u16 = SUBSYSTEM | 16;

/// Length of `struct nfgenmsg` in bytes.
pub const NFGENMSG: usize = 4;
/// The attribute that names the table, the same in every kind of message.
pub const TABLE_NAME: u16 = 1;
/// NFTA_DATA_VALUE.
pub const DATA_VALUE: u16 = 1;
/// NFTA_DATA_VERDICT.
pub const DATA_VERDICT: u16 = 2;

/// A point in the kernel that packets pass (`enum nf_inet_hooks`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// Before the routing decision.
    Prerouting = 0,
    /// Packets for this host.
    Input = 1,
    /// Forwarded packets.
    Forward = 2,
    /// Packets of this host.
    Output = 3,
    /// After the routing decision.
    Postrouting = 4,
}

/// Opens a socket for nftables in the network namespace of this thread.
///
/// # Errors
/// The kernel has no nfnetlink, and so no nftables; or there are too many open files.
pub fn open() -> io::Result<Netlink> {
    Netlink::open_on(NETLINK_NETFILTER)
}

/// Returns true if this error means that the kernel has no nftables, so that no rule can be there.
pub fn is_unsupported(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    // A kernel with nfnetlink but without nf_tables answers EINVAL.
    let known = matches!(errno, Some(Errno::EPROTONOSUPPORT | Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT | Errno::EINVAL));
    known || error.kind() == io::ErrorKind::Unsupported
}

/// A base chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseChain {
    /// `ip`, `ip6`, `inet`, `bridge` or `netdev`.
    pub family: &'static str,
    /// The family as the kernel numbers it (`NFPROTO_*`).
    pub number: u8,
    /// The name of its table.
    pub table: String,
    /// Its name.
    pub name: String,
    /// It translates addresses, and sees only the first packet of a connection.
    pub is_nat: bool,
    /// Chains with a smaller number come first.
    pub priority: i32,
    /// Its policy is drop.
    pub drops: bool,
}

impl BaseChain {
    /// Returns true if packets of this family pass the chain.
    pub fn sees(&self, is_ipv4: bool) -> bool {
        self.family != if is_ipv4 { "ip6" } else { "ip" }
    }

    /// Returns family, table and name, as the program `nft` takes them.
    pub fn path(&self) -> String {
        format!("{} {} {}", self.family, self.table, self.name)
    }
}

/// A base chain at a link or in the bridges, where packets pass before and after the hooks of [`Hook`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkChain {
    /// The chain.
    pub chain: BaseChain,
    /// `ingress` or `egress` at a link; `prerouting`, `input`, `forward`, `output` or `postrouting` in bridges.
    pub hook: &'static str,
    /// The links. Empty in bridges, where a chain sees the packets of all of them.
    pub links: Vec<String>,
}

/// Where base chains may be, as the kernel names it: the family and the number of the hook.
enum Position {
    Of(Hook),
    Link(&'static str),
}

fn position(family: u8, number: u32) -> Option<Position> {
    const BRIDGE: [&str; 5] = ["prerouting", "input", "forward", "output", "postrouting"];
    let hooks = [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting];
    Some(match (family, number) {
        (INET, 5) | (NETDEV, 0) => Position::Link("ingress"),
        (NETDEV, 1) => Position::Link("egress"),
        (BRIDGE_FAMILY, number) => Position::Link(BRIDGE.get(number as usize)?),
        (_, number) => Position::Of(*hooks.get(number as usize)?),
    })
}

/// NFPROTO_INET, NFPROTO_NETDEV and NFPROTO_BRIDGE.
const INET: u8 = 1;
const NETDEV: u8 = 5;
const BRIDGE_FAMILY: u8 = 7;

/// Returns the base chains of a hook, in the order in which packets pass them. The kernel visits every chain of the network namespace for this.
///
/// # Errors
/// The chains cannot be listed.
pub fn base_chains(netlink: &mut Netlink, hook: Hook) -> io::Result<Vec<BaseChain>> {
    let all = all_chains(netlink)?.into_iter();
    let of_hook = |one: PlacedChain| matches!(one.position, Position::Of(at) if at == hook).then_some(one.chain);
    Ok(all.filter_map(of_hook).collect())
}

/// Returns the base chains at links and in bridges, in the order in which packets pass those of one place.
///
/// # Errors
/// The chains cannot be listed.
pub fn link_chains(netlink: &mut Netlink) -> io::Result<Vec<LinkChain>> {
    let all = all_chains(netlink)?.into_iter();
    let at_link = |PlacedChain { position, chain, links }| match position {
        Position::Link(hook) => Some(LinkChain { chain, hook, links }),
        Position::Of(_) => None,
    };
    Ok(all.filter_map(at_link).collect())
}

/// A base chain, and where it is.
struct PlacedChain {
    position: Position,
    chain: BaseChain,
    /// The links at which it is.
    links: Vec<String>,
}

/// Returns all base chains, those with the smallest priority first.
fn all_chains(netlink: &mut Netlink) -> io::Result<Vec<PlacedChain>> {
    let data = netlink.dump(GETCHAIN, |w, kind, flags| w.begin(kind, flags, &[0; NFGENMSG]))?;
    let chains = messages(&data).filter(|message| message.kind == NEWCHAIN);
    let mut chains: Vec<_> = chains.filter_map(|message| base_chain(message.payload)).collect();
    chains.sort_by_key(|one| one.chain.priority);
    Ok(chains)
}

fn base_chain(payload: &[u8]) -> Option<PlacedChain> {
    let number = *payload.first()?;
    let family = match number {
        INET => "inet",
        2 => "ip",
        NETDEV => "netdev",
        BRIDGE_FAMILY => "bridge",
        10 => "ip6",
        _ => return None,
    };
    let get = |kind: u16| attr_after(payload, NFGENMSG, kind);
    let place = get(CHAIN_HOOK)?;
    let of_hook = |kind: u16| attr(place, kind).map(be32_of);
    let chain = BaseChain {
        family,
        number,
        table: get(TABLE_NAME).map(text).unwrap_or_default().to_owned(),
        name: get(CHAIN_NAME).map(text).unwrap_or_default().to_owned(),
        is_nat: get(CHAIN_TYPE).map(text) == Some("nat"),
        priority: of_hook(HOOK_PRIORITY).unwrap_or(0).cast_signed(),
        drops: get(CHAIN_POLICY).is_some_and(|policy| be32_of(policy) == POLICY_DROP),
    };
    // One link has an attribute of its own, and also stands in the list of newer kernels.
    let list = attrs(attr(place, HOOK_DEVICES).unwrap_or_default()).filter(|(kind, _)| *kind == HOOK_DEVICE_NAME);
    let one = attr(place, HOOK_DEVICE).into_iter();
    let links = one.chain(list.map(|(_, name)| name)).map(|name| text(name).to_owned()).collect();
    Some(PlacedChain { position: position(number, of_hook(HOOK_NUMBER)?)?, chain, links })
}

/// Reads a big-endian number. 0 if the value has another length.
pub fn be32_of(value: &[u8]) -> u32 {
    value.try_into().map_or(0, u32::from_be_bytes)
}

/// Reads the handle of a rule: the number by which the kernel knows it in its table.
pub fn handle_of(value: &[u8]) -> u64 {
    value.first_chunk::<8>().map_or_else(|| u64::from(be32_of(value)), |bytes| u64::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::attributes::POLICY_ACCEPT;
    use super::*;
    use crate::socket::tests::faked;
    use crate::wire::Writer;

    /// Returns the payload of a message about a base chain.
    fn message(family: u8, hook: u32, (kind, policy): (&str, u32), links: &[&str]) -> Vec<u8> {
        let mut w = Writer::default();
        w.fixed(&[family, 0, 0, 0]);
        w.attr_str(TABLE_NAME, "table");
        w.attr_str(CHAIN_NAME, "chain");
        w.nest(CHAIN_HOOK, |w| {
            w.attr(HOOK_NUMBER, &hook.to_be_bytes());
            w.attr(HOOK_PRIORITY, &(-150i32).to_be_bytes());
            match links {
                [] => {}
                [one] => w.attr_str(HOOK_DEVICE, one),
                all => w.nest(HOOK_DEVICES, |w| all.iter().for_each(|link| w.attr_str(HOOK_DEVICE_NAME, link))),
            }
        });
        w.attr(CHAIN_POLICY, &policy.to_be_bytes());
        w.attr_str(CHAIN_TYPE, kind);
        w.bytes().to_vec()
    }

    /// The numbers of hooks mean something else in each family.
    #[test]
    fn a_base_chain_is_at_the_place_that_its_family_gives_to_its_hook() {
        let place = |family, hook| {
            let PlacedChain { position, chain, .. } =
                base_chain(&message(family, hook, ("filter", POLICY_ACCEPT), &[]))?;
            let place = match position {
                Position::Of(hook) => format!("{hook:?}"),
                Position::Link(hook) => hook.to_owned(),
            };
            Some(format!("{} {place}", chain.family))
        };
        for (family, hook, wanted) in [
            (2, 0, "ip Prerouting"),
            (2, 1, "ip Input"),
            (10, 2, "ip6 Forward"),
            (1, 3, "inet Output"),
            (1, 4, "inet Postrouting"),
            (1, 5, "inet ingress"),
            (5, 0, "netdev ingress"),
            (5, 1, "netdev egress"),
            (7, 0, "bridge prerouting"),
            (7, 2, "bridge forward"),
            (7, 4, "bridge postrouting"),
        ] {
            assert_eq!(place(family, hook).as_deref(), Some(wanted));
        }
        for (family, hook) in [(2, 5), (7, 5), (3, 0)] {
            assert_eq!(place(family, hook), None, "family {family}, hook {hook}");
        }
    }

    #[test]
    fn each_part_of_a_base_chain_is_read() {
        let read = |form, links: &[&str]| base_chain(&message(5, 1, form, links)).unwrap();
        let PlacedChain { chain, links, .. } = read(("filter", POLICY_DROP), &["eth0"]);
        assert_eq!((chain.path().as_str(), chain.number, chain.priority), ("netdev table chain", 5, -150));
        assert_eq!((chain.is_nat, chain.drops, links), (false, true, vec!["eth0".to_owned()]));
        let PlacedChain { chain, links, .. } = read(("nat", POLICY_ACCEPT), &["eth0", "eth1"]);
        assert_eq!((chain.is_nat, chain.drops, links), (true, false, vec!["eth0".to_owned(), "eth1".to_owned()]));
        let sees = |family: u8| {
            let chain = base_chain(&message(family, 1, ("filter", POLICY_DROP), &[])).unwrap().chain;
            (chain.sees(true), chain.sees(false))
        };
        assert_eq!([2, 10, 1].map(sees), [(true, false), (false, true), (true, true)]);
        let mut w = Writer::default();
        w.fixed(&[2, 0, 0, 0]);
        w.attr_str(CHAIN_NAME, "chain");
        assert!(base_chain(w.bytes()).is_none(), "a chain that is not at a hook");
    }

    /// Returns the payload of a message about the base chain with this name.
    fn named(name: &str, family: u8, hook: u32, priority: i32) -> Vec<u8> {
        let mut w = Writer::default();
        w.fixed(&[family, 0, 0, 0]);
        w.attr_str(CHAIN_NAME, name);
        w.nest(CHAIN_HOOK, |w| {
            w.attr(HOOK_NUMBER, &hook.to_be_bytes());
            w.attr(HOOK_PRIORITY, &priority.to_be_bytes());
        });
        w.bytes().to_vec()
    }

    /// Returns a socket whose next dump consists of messages about chains, with these payloads.
    fn with_chains(payloads: Vec<Vec<u8>>) -> Netlink {
        const NLMSG_DONE: u16 = 3;
        let (netlink, kernel, own) = faked();
        std::thread::spawn(move || {
            let (request, _) = kernel.recv_from_full().unwrap();
            let seq = messages(&request).next().unwrap().seq;
            let done = (NLMSG_DONE, vec![0; 4]);
            for (kind, payload) in payloads.into_iter().map(|payload| (NEWCHAIN, payload)).chain([done]) {
                let mut w = Writer::default();
                w.begin(kind, 0, &payload);
                w.end(seq);
                kernel.send_to(w.bytes(), &own, 0).unwrap();
            }
        });
        netlink
    }

    /// A chain may drop a packet before a later one accepts it. The kernel lists chains by their tables.
    #[test]
    fn the_chains_of_one_hook_come_in_the_order_in_which_packets_pass_them() {
        let all = || {
            vec![
                named("late", 2, 2, 100),
                named("of input", 2, 1, -300),
                named("early", 2, 2, -150),
                named("of bridges", 7, 2, -200),
                named("usual", 1, 2, 0),
                named("at a link", 5, 0, -500),
            ]
        };
        let names = |chains: Vec<BaseChain>| chains.into_iter().map(|chain| chain.name).collect::<Vec<_>>();
        let forward = base_chains(&mut with_chains(all()), Hook::Forward).unwrap();
        assert_eq!(names(forward), ["early", "usual", "late"]);
        let links = link_chains(&mut with_chains(all())).unwrap();
        assert_eq!(names(links.into_iter().map(|one| one.chain).collect()), ["at a link", "of bridges"]);
    }

    /// Where there is no nftables, no rule of ours can be missing. A question that merely failed must be asked again.
    #[test]
    fn only_a_kernel_without_nftables_counts_as_one() {
        for errno in [Errno::EPROTONOSUPPORT, Errno::EOPNOTSUPP, Errno::EAFNOSUPPORT, Errno::EINVAL] {
            assert!(is_unsupported(&errno.into()), "{errno}");
        }
        assert!(is_unsupported(&io::ErrorKind::Unsupported.into()));
        for errno in [Errno::EPERM, Errno::EMFILE, Errno::ENOBUFS, Errno::EINTR, Errno::ENOENT] {
            assert!(!is_unsupported(&errno.into()), "{errno}");
        }
        assert!(!is_unsupported(&io::ErrorKind::InvalidData.into()));
    }

    #[test]
    fn a_handle_has_eight_bytes_or_four() {
        assert_eq!(handle_of(&[0, 0, 0, 1, 0, 0, 0, 2]), (1 << 32) + 2);
        assert_eq!(handle_of(&[0, 0, 1, 0]), 256);
        assert_eq!((be32_of(&[0, 0, 1, 0]), be32_of(&[1])), (256, 0));
    }
}
