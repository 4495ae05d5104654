// SPDX-License-Identifier: Apache-2.0
//! Decodes the instructions of a rule. Numbers in attributes are big-endian (linux/netfilter/nf_tables.h).

use nix::libc;
use weft_netlink::nftables::{DATA_VALUE, DATA_VERDICT, be32_of};
use weft_netlink::wire::{attr, attrs, text};

use super::attributes::expr;
use super::chance::BY_CHANCE;
use super::instruction::{Comparison, Destination, Field, Instruction, Verdict};
use crate::kernel::queues::Queue;

/// The register of the verdict (NFT_REG_VERDICT).
const VERDICT_REGISTER: u32 = 0;
/// NFT_BITWISE_MASK_XOR, the operation of `bitwise` without a shift.
const MASK_XOR: i32 = 0;
/// NFT_FIB_RESULT_ADDRTYPE: `fib` loads the kind of an address.
const FIB_RESULT_ADDRTYPE: u32 = 3;
/// NFTA_FIB_F_DADDR: `fib` looks up the destination.
const FIB_DADDR: u32 = 1 << 1;
/// NFT_QUEUE_FLAG_BYPASS.
const QUEUE_BYPASS: u16 = 1;

/// The types of objects that test the packet (`NFT_OBJECT_*`), each with the name of the instruction that does the same.
const TESTING_OBJECTS: [(u32, &str); 4] = [(2, "quota"), (4, "limit"), (5, "connlimit"), (10, "synproxy")];

/// Instructions that change nothing for the packet's way.
const HARMLESS: [&str; 3] = ["counter", "log", "last"];
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

    /// Returns a number with the type that numbers of the kernel have in the crate libc.
    fn signed(&self, kind: u16) -> Option<i32> {
        self.number(kind).map(u32::cast_signed)
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
    Some(match verdict.signed(expr::VERDICT_CODE)? {
        libc::NF_DROP => Verdict::Drop,
        libc::NF_ACCEPT => Verdict::Accept,
        libc::NFT_CONTINUE => Verdict::Continue,
        libc::NFT_JUMP => Verdict::Jump(verdict.text(expr::VERDICT_CHAIN)),
        libc::NFT_GOTO => Verdict::Goto(verdict.text(expr::VERDICT_CHAIN)),
        libc::NFT_RETURN => Verdict::Return,
        _ => return None,
    })
}

/// Reads the list of instructions of a rule.
pub fn list(bytes: &[u8]) -> Vec<Instruction> {
    let decode = |element: &[u8]| {
        let element = Attributes(element);
        let (name, data) = (element.text(expr::NAME), Attributes(element.get(expr::DATA).unwrap_or_default()));
        known(&name, &data).unwrap_or_else(|| Instruction::Unknown { to: written(&name, &data), name })
    };
    attrs(bytes).filter(|(kind, _)| *kind == expr::LIST_ELEM).map(|(_, element)| decode(element)).collect()
}

/// Returns the register that an instruction writes whose meaning is not known here.
fn written(name: &str, data: &Attributes<'_>) -> Option<usize> {
    match name {
        "bitwise" | "byteorder" | "hash" | "socket" | "tunnel" => data.place(expr::SECOND_DREG),
        "fib" | "numgen" | "rt" | "osf" | "xfrm" | "exthdr" | "payload" | "meta" | "ct" => data.place(expr::DREG),
        _ => None,
    }
}

/// Returns an instruction whose meaning is known here. `meta`, `ct`, `payload` and `exthdr` without a register to write set something instead.
fn known(name: &str, data: &Attributes<'_>) -> Option<Instruction> {
    Some(match name {
        name if HARMLESS.contains(&name) => Instruction::Harmless,
        "notrack" => Instruction::Untrack,
        "dynset" => dynset(data),
        "objref" => object(data.number(expr::OBJREF_IMM_TYPE)?),
        "meta" => return meta(data),
        "ct" | "payload" | "exthdr" if data.get(expr::DREG).is_none() => Instruction::Harmless,
        "ct" => {
            let field = match data.signed(expr::CT_KEY)? {
                libc::NFT_CT_STATE => Field::ConnectionState,
                libc::NFT_CT_STATUS => Field::ConnectionStatus,
                _ => Field::Other("ct".to_owned()),
            };
            Instruction::Load { field, to: data.place(expr::DREG)?, len: 4 }
        }
        "payload" => return payload(data),
        "fib" => return fib(data),
        "immediate" if data.number(expr::DREG)? == VERDICT_REGISTER => {
            Instruction::Verdict(verdict(data.get(expr::IMMEDIATE_DATA)?)?)
        }
        "immediate" => Instruction::Value { to: data.place(expr::DREG)?, data: data.bytes(expr::IMMEDIATE_DATA)? },
        "bitwise" if data.signed(expr::BITWISE_OP).unwrap_or(MASK_XOR) == MASK_XOR => Instruction::Mask {
            from: data.place(expr::SREG)?,
            to: data.place(expr::SECOND_DREG)?,
            mask: data.bytes(expr::BITWISE_MASK)?,
            xor: data.bytes(expr::BITWISE_XOR)?,
        },
        "byteorder" => Instruction::ByteOrder {
            from: data.place(expr::SREG)?,
            to: data.place(expr::SECOND_DREG)?,
            len: data.number(expr::BYTEORDER_LEN)? as usize,
            size: data.number(expr::BYTEORDER_SIZE)? as usize,
        },
        "cmp" => Instruction::Compare {
            at: data.place(expr::SREG)?,
            comparison: comparison(data.number(expr::CMP_OP)?)?,
            data: data.bytes(expr::CMP_DATA)?,
        },
        "range" => Instruction::Range {
            at: data.place(expr::SREG)?,
            inside: data.signed(expr::RANGE_OP)? == libc::NFT_RANGE_EQ,
            first: data.bytes(expr::RANGE_FROM_DATA)?,
            last: data.bytes(expr::RANGE_TO_DATA)?,
        },
        "lookup" => return lookup(data),
        "nat" => Instruction::Nat {
            source: data.signed(expr::NAT_TYPE)? == libc::NFT_NAT_SNAT,
            address: data.place(expr::NAT_REG_ADDR_MIN),
            port: data.place(expr::NAT_REG_PROTO_MIN),
        },
        "masq" => Instruction::Masquerade,
        "match" => return tested(data.text(expr::XT_NAME)),
        "queue" => Instruction::Queue(queue(data)?),
        "redir" => Instruction::Redirect,
        "reject" => Instruction::Reject,
        "target" => target(&data.text(expr::XT_NAME), data.get(expr::XT_INFO)),
        _ => return None,
    })
}

/// `dynset` adds the packet to a set. The element may have an instruction of its own, such as a rate limit, which tests the packet.
fn dynset(data: &Attributes<'_>) -> Instruction {
    let list = attrs(data.get(expr::DYNSET_EXPRESSIONS).unwrap_or_default()).map(|(_, one)| one);
    let all = data.get(expr::DYNSET_EXPR).into_iter().chain(list);
    let mut names = all.map(|one| Attributes(one).text(expr::NAME)).filter(|name| !HARMLESS.contains(&name.as_str()));
    names.next().map_or(Instruction::Harmless, |name| Instruction::Unknown { name, to: None })
}

/// `objref` uses an object of the table, such as a counter.
fn object(of_type: u32) -> Instruction {
    let tests = TESTING_OBJECTS.into_iter().find(|(number, _)| *number == of_type);
    tests.map_or(Instruction::Harmless, |(_, name)| Instruction::Unknown { name: name.to_owned(), to: None })
}

/// `payload` loads a part of a header.
fn payload(data: &Attributes<'_>) -> Option<Instruction> {
    let offset = data.number(expr::PAYLOAD_OFFSET)?;
    let field = match data.signed(expr::PAYLOAD_BASE)? {
        libc::NFT_PAYLOAD_NETWORK_HEADER => Field::Network(offset),
        libc::NFT_PAYLOAD_TRANSPORT_HEADER => Field::Transport(offset),
        libc::NFT_PAYLOAD_LL_HEADER if offset == 12 => Field::EtherType,
        _ => Field::Other("payload".to_owned()),
    };
    Some(Instruction::Load { field, to: data.place(expr::DREG)?, len: data.number(expr::PAYLOAD_LEN)? as usize })
}

/// `fib` asks the routing table. Only the question for the kind of the destination is understood here, and only if it names no link.
fn fib(data: &Attributes<'_>) -> Option<Instruction> {
    let is_type = data.number(expr::FIB_RESULT)? == FIB_RESULT_ADDRTYPE;
    let of_destination = data.number(expr::FIB_FLAGS)? == FIB_DADDR;
    let to = data.place(expr::DREG)?;
    (is_type && of_destination).then_some(Instruction::Load { field: Field::DestinationType, to, len: 4 })
}

/// `queue` hands the packet to a program. A number that is in a register is not known here.
fn queue(data: &Attributes<'_>) -> Option<Queue> {
    let number = |kind: u16| Some(u16::from_be_bytes(data.get(kind)?.try_into().ok()?));
    let (first, count) = (number(expr::QUEUE_NUM)?, number(expr::QUEUE_TOTAL).unwrap_or(1).max(1));
    Some(Queue {
        first,
        last: first.checked_add(count - 1)?,
        bypass: number(expr::QUEUE_FLAGS).unwrap_or(0) & QUEUE_BYPASS != 0,
    })
}

/// `lookup` looks for a register in a set, and may use what the set has for it.
fn lookup(data: &Attributes<'_>) -> Option<Instruction> {
    let into = match data.number(expr::LOOKUP_DREG) {
        None => Destination::Nothing,
        Some(VERDICT_REGISTER) => Destination::Verdict,
        Some(register) => Destination::Register(place(register)?),
    };
    let inside = data.signed(expr::LOOKUP_FLAGS).unwrap_or(0) & libc::NFT_LOOKUP_F_INV == 0;
    Some(Instruction::Lookup { at: data.place(expr::LOOKUP_SREG)?, set: data.text(expr::LOOKUP_SET), inside, into })
}

/// Returns what a target of iptables does, which has a name of its own.
fn target(name: &str, info: Option<&[u8]>) -> Instruction {
    if let Some(queue) = info.filter(|_| name == "NFQUEUE").and_then(Queue::of_target) {
        return Instruction::Queue(queue);
    }
    match name {
        "REJECT" => Instruction::Reject,
        "MASQUERADE" => Instruction::Masquerade,
        "MARK" | "CONNMARK" => Instruction::SetMark,
        "NOTRACK" => Instruction::Untrack,
        name if HARMLESS_TARGETS.contains(&name) => Instruction::Harmless,
        name => Instruction::Unknown { name: name.to_owned(), to: None },
    }
}

/// Returns what a match of iptables does, which has a name of its own.
fn tested(name: String) -> Option<Instruction> {
    match name.as_str() {
        "comment" => Some(Instruction::Harmless),
        _ => BY_CHANCE.contains(&name.as_str()).then_some(Instruction::Unknown { name, to: None }),
    }
}

/// `meta` loads a property of the packet, or sets one.
fn meta(data: &Attributes<'_>) -> Option<Instruction> {
    let key = data.signed(expr::META_KEY)?;
    if data.get(expr::DREG).is_none() {
        return Some(if key == libc::NFT_META_MARK { Instruction::SetMark } else { Instruction::Harmless });
    }
    let (field, len) = match key {
        libc::NFT_META_MARK => (Field::Mark, 4),
        libc::NFT_META_PROTOCOL => (Field::EtherType, 2),
        libc::NFT_META_IIF => (Field::InputIndex, 4),
        libc::NFT_META_OIF => (Field::OutputIndex, 4),
        libc::NFT_META_IIFNAME => (Field::InputName, libc::IFNAMSIZ),
        libc::NFT_META_OIFNAME => (Field::OutputName, libc::IFNAMSIZ),
        libc::NFT_META_NFPROTO => (Field::Family, 1),
        libc::NFT_META_L4PROTO => (Field::L4Proto, 1),
        _ => (Field::Other("meta".to_owned()), 4),
    };
    Some(Instruction::Load { field, to: data.place(expr::DREG)?, len })
}

fn comparison(number: u32) -> Option<Comparison> {
    use Comparison::{Equal, Greater, GreaterOrEqual, Less, LessOrEqual, NotEqual};
    [Equal, NotEqual, Less, LessOrEqual, Greater, GreaterOrEqual].get(number as usize).copied()
}
