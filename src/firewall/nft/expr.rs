// SPDX-License-Identifier: Apache-2.0
//! The expressions of nftables that our rules use, encoded and decoded. Rules that are read from the kernel are compared as values,
//! because the kernel adds attributes of its own and counts packets.
//!
//! Numbers are big-endian, and the contents of registers are as they are in the packet (linux/netfilter/nf_tables.h).

use std::net::IpAddr;

use ipnet::IpNet;
use weft_backends::traffic_rules::{Rule, Test, Verdict};
use weft_subnet::cidr::{Family, family};

use weft_netlink::nftables::{DATA_VALUE, DATA_VERDICT, be32_of};
use weft_netlink::wire::{Writer, attr, attrs, octets, text};

const LIST_ELEM: u16 = 1;
const EXPR_NAME: u16 = 1;
const EXPR_DATA: u16 = 2;
const VERDICT_CODE: u16 = 1;
/// The only register that our rules use. It has sixteen bytes.
const REG_1: u32 = 1;
const META_MARK: u32 = 3;
const META_L4PROTO: u32 = 16;
const META_FAMILY: u32 = 15;
/// NF_NAT_RANGE_PROTO_RANDOM_FULLY.
const RANDOM_FULLY: u32 = 1 << 4;
const NF_DROP: i32 = 0;
const NF_ACCEPT: i32 = 1;
const NFT_RETURN: i32 = -5;

/// Where the offset of a payload expression starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    /// The IP header.
    Network,
    /// The UDP or TCP header.
    Transport,
}

/// One expression.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expr {
    /// Loads the mark of the packet, in host byte order.
    Mark,
    /// Loads the number of the transport protocol.
    L4Proto,
    /// Loads the family of the packet (`NFPROTO_*`). Rules in a table of both families test it first.
    Family,
    /// Loads part of the packet.
    Payload {
        /// Where the offset starts.
        base: Base,
        /// Offset in bytes.
        offset: u32,
        /// Length in bytes.
        len: u32,
    },
    /// Applies a mask to the register.
    Mask(Vec<u8>),
    /// Ends the rule unless the register is equal (or not equal) to the data.
    Cmp {
        /// True for equal, false for not equal.
        equal: bool,
        /// What the register is compared with.
        data: Vec<u8>,
    },
    /// Ends the rule unless the register is (or is not) in a set of the table.
    Lookup {
        /// The name of the set.
        set: String,
        /// True for in the set, false for not in the set.
        inside: bool,
    },
    /// Counts packets and bytes.
    Counter,
    /// Verdict NF_ACCEPT.
    Accept,
    /// Verdict NF_DROP.
    Drop,
    /// Verdict NFT_RETURN.
    Return,
    /// Translates the source address to that of the outgoing interface.
    Masquerade {
        /// Source ports are chosen at random.
        fully_random: bool,
    },
    /// An expression that we never write, by its name.
    Other(String),
}

/// The name of the set for [`Test::ToOneOf`].
pub const NODES: &str = "nodes";

/// Returns the expressions of a rule.
pub fn of(rule: &Rule) -> Vec<Expr> {
    let mut all = Vec::with_capacity(8);
    for test in &rule.tests {
        match test {
            Test::Mark(bits) => {
                let bits = bits.to_ne_bytes().to_vec();
                all.extend([Expr::Mark, Expr::Mask(bits.clone()), Expr::Cmp { equal: true, data: bits }]);
            }
            Test::From(net) => inside(&mut all, *net, source, true),
            Test::NotFrom(net) => inside(&mut all, *net, source, false),
            Test::To(net) => inside(&mut all, *net, destination, true),
            Test::NotTo(net) => inside(&mut all, *net, destination, false),
            Test::ToOneOf(nodes) => {
                let this = if nodes.iter().any(IpAddr::is_ipv6) { Family::V6 } else { Family::V4 };
                all.extend([destination(this), Expr::Lookup { set: NODES.to_owned(), inside: true }]);
            }
        }
    }
    all.push(Expr::Counter);
    all.push(match rule.verdict {
        Verdict::Return => Expr::Return,
        Verdict::Accept => Expr::Accept,
        Verdict::Masquerade { fully_random } => Expr::Masquerade { fully_random },
    });
    all
}

/// Returns the expression that loads the source address.
pub fn source(family: Family) -> Expr {
    match family {
        Family::V4 => Expr::Payload { base: Base::Network, offset: 12, len: 4 },
        Family::V6 => Expr::Payload { base: Base::Network, offset: 8, len: 16 },
    }
}

/// Returns the expression that loads the destination address.
pub fn destination(family: Family) -> Expr {
    match family {
        Family::V4 => Expr::Payload { base: Base::Network, offset: 16, len: 4 },
        Family::V6 => Expr::Payload { base: Base::Network, offset: 24, len: 16 },
    }
}

/// Returns the test for this transport protocol.
pub fn l4proto(number: u8) -> [Expr; 2] {
    [Expr::L4Proto, Expr::Cmp { equal: true, data: vec![number] }]
}

/// Returns the test for this destination port.
pub fn dport(port: u16) -> [Expr; 2] {
    let load = Expr::Payload { base: Base::Transport, offset: 2, len: 2 };
    [load, Expr::Cmp { equal: true, data: port.to_be_bytes().to_vec() }]
}

fn inside(all: &mut Vec<Expr>, net: IpNet, load: fn(Family) -> Expr, equal: bool) {
    all.push(load(family(&net)));
    if net.prefix_len() < net.max_prefix_len() {
        all.push(Expr::Mask(octets(net.netmask())));
    }
    all.push(Expr::Cmp { equal, data: octets(net.network()) });
}

/// Writes a big-endian number.
pub fn be32(w: &mut Writer, kind: u16, value: u32) {
    w.attr(kind, &value.to_be_bytes());
}

impl Expr {
    /// Writes the expression as an element of a rule's list.
    pub fn encode(&self, w: &mut Writer) {
        let one = REG_1;
        element(w, self.name(), |w| match self {
            Expr::Mark => numbers(w, &[(1, one), (2, META_MARK)]),
            Expr::L4Proto => numbers(w, &[(1, one), (2, META_L4PROTO)]),
            Expr::Family => numbers(w, &[(1, one), (2, META_FAMILY)]),
            Expr::Payload { base, offset, len } => {
                let base = if *base == Base::Network { 1 } else { 2 };
                numbers(w, &[(1, one), (2, base), (3, *offset), (4, *len)]);
            }
            Expr::Mask(mask) => {
                numbers(w, &[(1, one), (2, one), (3, u32::try_from(mask.len()).unwrap_or_default())]);
                w.nest(4, |w| w.attr(DATA_VALUE, mask));
                w.nest(5, |w| w.attr(DATA_VALUE, &vec![0; mask.len()]));
            }
            Expr::Cmp { equal, data } => {
                numbers(w, &[(1, one), (2, u32::from(!equal))]);
                w.nest(3, |w| w.attr(DATA_VALUE, data));
            }
            Expr::Lookup { set, inside } => {
                w.attr_str(1, set);
                be32(w, 2, one);
                if !inside {
                    be32(w, 5, 1);
                }
            }
            Expr::Counter | Expr::Other(_) => {}
            Expr::Accept => verdict(w, NF_ACCEPT),
            Expr::Drop => verdict(w, NF_DROP),
            Expr::Return => verdict(w, NFT_RETURN),
            Expr::Masquerade { fully_random } => {
                if *fully_random {
                    be32(w, 1, RANDOM_FULLY);
                }
            }
        });
    }

    /// Reads the list of expressions of a rule.
    pub fn list(bytes: &[u8]) -> Vec<Expr> {
        attrs(bytes).filter(|(kind, _)| *kind == LIST_ELEM).map(|(_, element)| Expr::decode(element)).collect()
    }

    fn decode(element: &[u8]) -> Expr {
        let name = attr(element, EXPR_NAME).map_or("", text);
        let data = attr(element, EXPR_DATA).unwrap_or_default();
        known(name, data).unwrap_or_else(|| Expr::Other(name.to_owned()))
    }

    fn name(&self) -> &str {
        match self {
            Expr::Mark | Expr::L4Proto | Expr::Family => "meta",
            Expr::Payload { .. } => "payload",
            Expr::Mask(_) => "bitwise",
            Expr::Cmp { .. } => "cmp",
            Expr::Lookup { .. } => "lookup",
            Expr::Counter => "counter",
            Expr::Accept | Expr::Drop | Expr::Return => "immediate",
            Expr::Masquerade { .. } => "masq",
            Expr::Other(name) => name,
        }
    }
}

/// Returns the expression, if it is one of those that we write.
fn known(name: &str, data: &[u8]) -> Option<Expr> {
    let get = |kind: u16| attr(data, kind);
    let number = |kind: u16| get(kind).map(be32_of);
    let value = |kind: u16| attr(get(kind)?, DATA_VALUE).map(<[u8]>::to_vec);
    // The kernel reports the first register of four bytes as the register of sixteen bytes that begins there.
    let first = |kind: u16| number(kind) == Some(REG_1);
    Some(match name {
        "meta" if first(1) => match number(2)? {
            META_MARK => Expr::Mark,
            META_L4PROTO => Expr::L4Proto,
            META_FAMILY => Expr::Family,
            _ => return None,
        },
        "payload" if first(1) => {
            let base = match number(2)? {
                1 => Base::Network,
                2 => Base::Transport,
                _ => return None,
            };
            Expr::Payload { base, offset: number(3)?, len: number(4)? }
        }
        "bitwise" if first(1) && first(2) => {
            let (mask, xor) = (value(4)?, value(5)?);
            if number(6).is_some_and(|op| op != 0) || xor.iter().any(|byte| *byte != 0) {
                return None;
            }
            Expr::Mask(mask)
        }
        "cmp" if first(1) => Expr::Cmp { equal: yes_or_no(number(2)?)?, data: value(3)? },
        "lookup" if first(2) && number(3).is_none() => {
            Expr::Lookup { set: text(get(1)?).to_owned(), inside: yes_or_no(number(5).unwrap_or(0))? }
        }
        "counter" => Expr::Counter,
        // A target of iptables has a name of its own.
        "target" => Expr::Other(text(get(1)?).to_owned()),
        "immediate" if number(1) == Some(0) => {
            match be32_of(attr(attr(get(2)?, DATA_VERDICT)?, VERDICT_CODE)?).cast_signed() {
                NF_ACCEPT => Expr::Accept,
                NF_DROP => Expr::Drop,
                NFT_RETURN => Expr::Return,
                _ => return None,
            }
        }
        "masq" => match number(1).unwrap_or(0) {
            0 => Expr::Masquerade { fully_random: false },
            RANDOM_FULLY => Expr::Masquerade { fully_random: true },
            _ => return None,
        },
        _ => return None,
    })
}

/// Operators and flags use 0 for yes and 1 for no.
fn yes_or_no(number: u32) -> Option<bool> {
    match number {
        0 => Some(true),
        1 => Some(false),
        _ => None,
    }
}

fn element(w: &mut Writer, name: &str, data: impl FnOnce(&mut Writer)) {
    w.nest(LIST_ELEM, |w| {
        w.attr_str(EXPR_NAME, name);
        w.nest(EXPR_DATA, data);
    });
}

fn numbers(w: &mut Writer, all: &[(u16, u32)]) {
    for (kind, value) in all {
        be32(w, *kind, *value);
    }
}

fn verdict(w: &mut Writer, code: i32) {
    be32(w, 1, 0);
    w.nest(2, |w| w.nest(DATA_VERDICT, |w| be32(w, VERDICT_CODE, code.cast_unsigned())));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_expression_is_read_back_as_it_was_written() {
        let all = vec![
            Expr::Mark,
            Expr::L4Proto,
            Expr::Family,
            destination(Family::V6),
            dport(8472)[0].clone(),
            Expr::Mask(vec![255, 255, 0, 0]),
            Expr::Cmp { equal: true, data: vec![10, 5, 0, 0] },
            Expr::Cmp { equal: false, data: vec![1; 16] },
            Expr::Lookup { set: "nodes".into(), inside: true },
            Expr::Lookup { set: "peers".into(), inside: false },
            Expr::Counter,
            Expr::Accept,
            Expr::Drop,
            Expr::Return,
            Expr::Masquerade { fully_random: true },
            Expr::Masquerade { fully_random: false },
            Expr::Other("tproxy".into()),
        ];
        let mut w = Writer::default();
        all.iter().for_each(|expr| expr.encode(&mut w));
        assert_eq!(Expr::list(w.bytes()), all);
    }

    #[test]
    fn an_expression_with_other_attributes_is_not_taken_for_ours() {
        let mut w = Writer::default();
        // Random but not fully random ports, a mask with an xor, a jump, and another register.
        element(&mut w, "masq", |w| be32(w, 1, 1 << 2));
        element(&mut w, "bitwise", |w| {
            numbers(w, &[(1, 1), (2, 1), (3, 1)]);
            w.nest(4, |w| w.attr(DATA_VALUE, &[255]));
            w.nest(5, |w| w.attr(DATA_VALUE, &[1]));
        });
        element(&mut w, "immediate", |w| verdict(w, -3));
        element(&mut w, "cmp", |w| numbers(w, &[(1, 2), (2, 0)]));
        // The name of the device by which the packet arrived.
        element(&mut w, "meta", |w| numbers(w, &[(1, 1), (2, 6)]));
        let names: Vec<Expr> =
            ["masq", "bitwise", "immediate", "cmp", "meta"].map(|name| Expr::Other(name.to_owned())).to_vec();
        assert_eq!(Expr::list(w.bytes()), names);
    }
}
