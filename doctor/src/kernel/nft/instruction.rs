// SPDX-License-Identifier: Apache-2.0
//! Rules, and the instructions of which they consist.

use std::cmp::Ordering;

use crate::kernel::queues::Queue;

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
    /// The protocol that the Ethernet header names: IPv4 or IPv6.
    EtherType,
    /// The number of the transport protocol.
    L4Proto,
    /// The family of the packet (`NFPROTO_*`).
    Family,
    /// The name of the device by which the packet arrived, in 16 bytes.
    InputName,
    /// The name of the device by which the packet leaves, in 16 bytes.
    OutputName,
    /// The interface index of the device by which the packet arrived, in four bytes.
    InputIndex,
    /// The interface index of the device by which the packet leaves, in four bytes.
    OutputIndex,
    /// What kind of address the destination is (`RTN_*` of linux/rtnetlink.h), in four bytes.
    DestinationType,
    /// The state of the connection, as bits.
    ConnectionState,
    /// What was done with the connection (`IPS_*` of linux/netfilter/nf_conntrack_common.h), as bits.
    ConnectionStatus,
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
    /// Hands the packet to a program.
    Queue(Queue),
    /// Takes the packet out of connection tracking.
    Untrack,
    /// Neither tests nor drops the packet.
    Harmless,
    /// A test whose result is not known here, by its name. It may write to a register.
    Unknown { name: String, to: Option<usize> },
}
