// SPDX-License-Identifier: Apache-2.0
//! The instructions of a rule. Numbers in attributes are big-endian (linux/netfilter/nf_tables.h).

use std::cmp::Ordering;

use weft_netlink::nftables::{DATA_VALUE, DATA_VERDICT, be32_of};
use weft_netlink::wire::{attr, attrs, text};

/// NFTA_LIST_ELEM, and the attributes of an instruction in the list.
const ELEMENT: u16 = 1;
const NAME: u16 = 1;
const DATA: u16 = 2;
/// NFTA_VERDICT_CODE and NFTA_VERDICT_CHAIN.
const CODE: u16 = 1;
const CHAIN: u16 = 2;
/// The register of the verdict (NFT_REG_VERDICT).
const VERDICT_REGISTER: u32 = 0;
/// The bytes of all registers together.
pub const REGISTERS: usize = 64;

/// A rule that was read from the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    /// Its instructions, in order.
    pub instructions: Vec<Instruction>,
    /// The number by which the kernel knows it in its table.
    pub handle: u64,
}

/// Where a rule sends the packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The packet passes this base chain.
    Accept,
    /// The packet is dropped.
    Drop,
    /// Back to the chain that jumped here; in a base chain, to its policy.
    Return,
    /// To another chain, and back if that does not decide.
    Jump(String),
    /// To another chain, which returns to the chain before.
    Goto(String),
    /// To the next rule.
    Continue,
}

/// What is loaded into a register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Field {
    /// Bytes of the IP header, from this offset.
    Network(u32),
    /// Bytes of the TCP or UDP header, from this offset.
    Transport(u32),
    /// The mark of the packet.
    Mark,
    /// The number of the transport protocol.
    L4Proto,
    /// The family of the packet (`NFPROTO_*`).
    Family,
    /// The name of the device by which the packet arrived, in 16 bytes.
    InputName,
    /// The name of the device by which the packet leaves, in 16 bytes.
    OutputName,
    /// The state of the connection, as bits.
    ConnectionState,
    /// Something whose value is not known here, by its name.
    Other(String),
}

/// How a register is compared with a value (`enum nft_cmp_ops`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// Equal.
    Equal,
    /// Not equal.
    NotEqual,
    /// Less.
    Less,
    /// Less or equal.
    LessOrEqual,
    /// Greater.
    Greater,
    /// Greater or equal.
    GreaterOrEqual,
}

impl Comparison {
    /// Returns whether a value that compares so fulfils the test.
    pub fn holds(self, ordering: Ordering) -> bool {
        match self {
            Comparison::Equal => ordering.is_eq(),
            Comparison::NotEqual => ordering.is_ne(),
            Comparison::Less => ordering.is_lt(),
            Comparison::LessOrEqual => ordering.is_le(),
            Comparison::Greater => ordering.is_gt(),
            Comparison::GreaterOrEqual => ordering.is_ge(),
        }
    }
}

/// What a lookup does with the data of the element that it finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// Nothing: it only tests.
    Nothing,
    /// The data is a verdict.
    Verdict,
    /// The data goes to this place in the registers.
    Register(usize),
}

/// One instruction. Places in the registers are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    /// Loads a field of this many bytes.
    Load { field: Field, to: usize, len: usize },
    /// Loads a value that the rule contains.
    Value { to: usize, data: Vec<u8> },
    /// Sends the packet somewhere.
    Verdict(Verdict),
    /// Applies a mask, and then an exclusive or.
    Mask { from: usize, to: usize, mask: Vec<u8>, xor: Vec<u8> },
    /// Reverses the bytes of each part of this size, on a little-endian machine.
    ByteOrder { from: usize, to: usize, len: usize, size: usize },
    /// Ends the rule unless the comparison holds.
    Compare { at: usize, comparison: Comparison, data: Vec<u8> },
    /// Ends the rule unless the register is inside (or outside) of a range.
    Range { at: usize, inside: bool, first: Vec<u8>, last: Vec<u8> },
    /// Ends the rule unless the register is (or is not) in a set.
    Lookup { at: usize, set: String, inside: bool, into: Destination },
    /// Translates the source or the destination address. The registers contain the address and the port.
    Nat { source: bool, address: Option<usize>, port: Option<usize> },
    /// Translates the source address to that of the device by which the packet leaves.
    Masquerade,
    /// Translates the destination address to one of this host.
    Redirect,
    /// Drops the packet with an answer.
    Reject,
    /// Sets the mark of the packet.
    SetMark,
    /// Neither tests nor drops the packet.
    Harmless,
    /// A test whose result is not known here, by its name. It may write to a register.
    Unknown { name: String, to: Option<usize> },
}

/// Instructions that change nothing for the packet's way.
const HARMLESS: [&str; 6] = ["counter", "log", "notrack", "objref", "last", "dynset"];
/// Targets of iptables that change nothing for the packet's way.
const HARMLESS_TARGETS: [&str; 3] = ["LOG", "NFLOG", "TRACE"];

/// The attributes of one instruction.
struct Attributes<'a>(&'a [u8]);

impl<'a> Attributes<'a> {
    fn get(&self, kind: u16) -> Option<&'a [u8]> {
        attr(self.0, kind)
    }

    fn number(&self, kind: u16) -> Option<u32> {
        self.get(kind).map(be32_of)
    }

    /// Returns the place in the registers that an attribute names.
    fn place(&self, kind: u16) -> Option<usize> {
        place(self.number(kind)?)
    }

    fn bytes(&self, kind: u16) -> Option<Vec<u8>> {
        value(self.get(kind)?)
    }

    fn text(&self, kind: u16) -> String {
        self.get(kind).map(text).unwrap_or_default().to_owned()
    }
}

/// Returns the place of a register in bytes: NFT_REG_1 to NFT_REG_4 have 16 bytes, NFT_REG32_00 (8) and those that follow have 4 bytes.
fn place(register: u32) -> Option<usize> {
    match register {
        1..=4 => Some((register as usize - 1) * 16),
        8..=23 => Some((register as usize - 8) * 4),
        _ => None,
    }
}

/// Returns the bytes of a value in `NFTA_DATA_*`.
pub fn value(data: &[u8]) -> Option<Vec<u8>> {
    attr(data, DATA_VALUE).map(<[u8]>::to_vec)
}

/// Returns the verdict in `NFTA_DATA_*`.
pub fn verdict(data: &[u8]) -> Option<Verdict> {
    let verdict = Attributes(attr(data, DATA_VERDICT)?);
    Some(match verdict.number(CODE)?.cast_signed() {
        0 => Verdict::Drop,
        1 => Verdict::Accept,
        -1 => Verdict::Continue,
        -3 => Verdict::Jump(verdict.text(CHAIN)),
        -4 => Verdict::Goto(verdict.text(CHAIN)),
        -5 => Verdict::Return,
        _ => return None,
    })
}

/// Reads the list of instructions of a rule.
pub fn list(bytes: &[u8]) -> Vec<Instruction> {
    let decode = |element: &[u8]| {
        let element = Attributes(element);
        let (name, data) = (element.text(NAME), Attributes(element.get(DATA).unwrap_or_default()));
        known(&name, &data).unwrap_or_else(|| Instruction::Unknown { to: written(&name, &data), name })
    };
    attrs(bytes).filter(|(kind, _)| *kind == ELEMENT).map(|(_, element)| decode(element)).collect()
}

/// Returns the register that an instruction writes whose meaning is not known here.
fn written(name: &str, data: &Attributes<'_>) -> Option<usize> {
    match name {
        "hash" | "socket" | "tunnel" => data.place(2),
        "fib" | "numgen" | "rt" | "osf" | "xfrm" | "exthdr" | "payload" | "meta" | "ct" => data.place(1),
        "bitwise" | "byteorder" => data.place(2),
        _ => None,
    }
}

fn known(name: &str, data: &Attributes<'_>) -> Option<Instruction> {
    Some(match name {
        name if HARMLESS.contains(&name) => Instruction::Harmless,
        "meta" => return meta(data),
        "ct" if data.get(1).is_none() => Instruction::Harmless,
        "ct" => {
            let field = if data.number(2)? == 0 { Field::ConnectionState } else { Field::Other("ct".to_owned()) };
            Instruction::Load { field, to: data.place(1)?, len: 4 }
        }
        "payload" if data.get(1).is_none() => Instruction::Harmless,
        "payload" => {
            let (base, offset, len) = (data.number(2)?, data.number(3)?, data.number(4)?);
            let field = match base {
                1 => Field::Network(offset),
                2 => Field::Transport(offset),
                _ => Field::Other("payload".to_owned()),
            };
            Instruction::Load { field, to: data.place(1)?, len: len as usize }
        }
        "immediate" if data.number(1)? == VERDICT_REGISTER => Instruction::Verdict(verdict(data.get(2)?)?),
        "immediate" => Instruction::Value { to: data.place(1)?, data: data.bytes(2)? },
        "bitwise" if data.number(6).unwrap_or(0) == 0 => {
            Instruction::Mask { from: data.place(1)?, to: data.place(2)?, mask: data.bytes(4)?, xor: data.bytes(5)? }
        }
        "byteorder" => Instruction::ByteOrder {
            from: data.place(1)?,
            to: data.place(2)?,
            len: data.number(4)? as usize,
            size: data.number(5)? as usize,
        },
        "cmp" => {
            Instruction::Compare { at: data.place(1)?, comparison: comparison(data.number(2)?)?, data: data.bytes(3)? }
        }
        "range" => Instruction::Range {
            at: data.place(1)?,
            inside: data.number(2)? == 0,
            first: data.bytes(3)?,
            last: data.bytes(4)?,
        },
        "lookup" => {
            let into = match data.number(3) {
                None => Destination::Nothing,
                Some(VERDICT_REGISTER) => Destination::Verdict,
                Some(register) => Destination::Register(place(register)?),
            };
            let inside = data.number(5).unwrap_or(0) & 1 == 0;
            Instruction::Lookup { at: data.place(2)?, set: data.text(1), inside, into }
        }
        "nat" => Instruction::Nat { source: data.number(1)? == 0, address: data.place(3), port: data.place(5) },
        "masq" => Instruction::Masquerade,
        "exthdr" if data.get(1).is_none() => Instruction::Harmless,
        "match" if data.text(1) == "comment" => Instruction::Harmless,
        "redir" => Instruction::Redirect,
        "reject" => Instruction::Reject,
        "target" => target(&data.text(1)),
        _ => return None,
    })
}

/// Returns what a target of iptables does, which has a name of its own.
fn target(name: &str) -> Instruction {
    match name {
        "REJECT" => Instruction::Reject,
        "MASQUERADE" => Instruction::Masquerade,
        "MARK" | "CONNMARK" => Instruction::SetMark,
        name if HARMLESS_TARGETS.contains(&name) => Instruction::Harmless,
        name => Instruction::Unknown { name: name.to_owned(), to: None },
    }
}

/// `meta` loads a property of the packet, or sets one.
fn meta(data: &Attributes<'_>) -> Option<Instruction> {
    const MARK: u32 = 3;
    let key = data.number(2)?;
    if data.get(1).is_none() {
        return Some(if key == MARK { Instruction::SetMark } else { Instruction::Harmless });
    }
    let (field, len) = match key {
        MARK => (Field::Mark, 4),
        6 => (Field::InputName, 16),
        7 => (Field::OutputName, 16),
        15 => (Field::Family, 1),
        16 => (Field::L4Proto, 1),
        _ => (Field::Other("meta".to_owned()), 4),
    };
    Some(Instruction::Load { field, to: data.place(1)?, len })
}

fn comparison(number: u32) -> Option<Comparison> {
    use Comparison::{Equal, Greater, GreaterOrEqual, Less, LessOrEqual, NotEqual};
    [Equal, NotEqual, Less, LessOrEqual, Greater, GreaterOrEqual].get(number as usize).copied()
}
