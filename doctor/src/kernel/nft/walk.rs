// SPDX-License-Identifier: Apache-2.0
//! Follows a packet through chains of nftables.

use std::io;
use std::net::IpAddr;
use std::rc::Rc;

use weft_netlink::wire::octets;

use super::chance;
use super::instruction::{Comparison, Destination, Field, Instruction, Rule, Verdict};
use super::registers::Registers;
use super::set::{Data, Found, Set};
use super::text;
use crate::kernel::entries::{Packet, Proto};
use crate::kernel::queues::UNREAD;
use crate::kernel::rules::{Connection, End, Fate, MAX_DEPTH, MAX_RULES, Matches, Outcome, Tested};

/// The bits of the state of a connection (linux/netfilter/nf_conntrack_common.h): of its first packet, of an answer, and of a packet that is not
/// tracked.
const NEW: u32 = 1 << 3;
const ESTABLISHED: u32 = 1 << 1;
const UNTRACKED: u32 = 1 << 6;
/// Bytes of the name of a device in a register (IFNAMSIZ).
const NAME: usize = 16;

/// One table.
pub trait Table {
    /// Returns the rules of a chain.
    ///
    /// # Errors
    /// The kernel does not answer.
    fn rules(&mut self, chain: &str) -> io::Result<Rc<Vec<Rule>>>;

    /// Returns a set.
    ///
    /// # Errors
    /// The kernel does not answer.
    fn set(&mut self, name: &str) -> io::Result<Rc<Set>>;

    /// Returns the interface index of a link, if there is such a link.
    fn index(&self, link: &str) -> Option<u32>;
}

/// Follows a packet through a base chain. Without a decision, the outcome has no fate, and the policy decides.
///
/// # Errors
/// The table cannot be read.
pub fn follow(table: &mut dyn Table, chain: &str, tested: Tested<'_>) -> io::Result<Outcome> {
    let mut walk = Walk { table, tested, left: MAX_RULES, outcome: Outcome::default() };
    if let End::Decided(fate, rule) = walk.chain(chain, 0, Matches::Yes)? {
        walk.outcome.fate = Some((fate, rule));
    }
    walk.outcome.may_have_mark = walk.tested.may_have_mark;
    Ok(walk.outcome)
}

/// What a rule does with the packets that match.
enum Action {
    Decides(Fate),
    Goes(Verdict),
    /// Something whose effect is not known here.
    Unknown,
    Nothing,
}

struct Walk<'a> {
    table: &'a mut dyn Table,
    tested: Tested<'a>,
    left: u32,
    outcome: Outcome,
}

impl Walk<'_> {
    /// Follows the packet through a chain. `certain` is `Unknown` behind a rule that was not evaluated: nothing is decided then.
    fn chain(&mut self, name: &str, depth: u32, mut certain: Matches) -> io::Result<End> {
        if depth > MAX_DEPTH {
            self.outcome.not_followed(format!("chain {name}, which is {MAX_DEPTH} jumps deep"));
            return Ok(End::Goes);
        }
        for rule in self.table.rules(name)?.iter() {
            if self.left == 0 {
                self.outcome.not_followed(format!("everything after {MAX_RULES} rules"));
                return Ok(End::Goes);
            }
            self.left -= 1;
            let mut registers = Registers::unknown();
            let (is_match, action) = self.rule(rule, &mut registers)?;
            let is_match = is_match.and(certain);
            if is_match == Matches::No {
                continue;
            }
            self.outcome.untracked |= is_match == Matches::Yes && rule.instructions.contains(&Instruction::Untrack);
            let quoted = || format!("{} (handle {})", text::of(rule, &registers, self.tested.packet), rule.handle);
            if is_match == Matches::Unknown && chooses_verdict(rule) {
                // Another element of the map may accept the packet, or leave this chain.
                self.outcome.may_pass.get_or_insert_with(quoted);
                certain = Matches::Unknown;
            }
            let fate = match action {
                Action::Nothing | Action::Goes(Verdict::Continue) => continue,
                Action::Unknown => {
                    self.outcome.not_followed(quoted());
                    continue;
                }
                Action::Goes(Verdict::Return) if is_match == Matches::Yes => return Ok(End::Goes),
                // The packet may not come to the rules behind it.
                Action::Goes(Verdict::Return) => {
                    certain = Matches::Unknown;
                    continue;
                }
                Action::Goes(Verdict::Jump(to)) => match self.chain(&to, depth + 1, is_match)? {
                    End::Goes => continue,
                    end => return Ok(end),
                },
                Action::Goes(Verdict::Goto(to)) => match self.chain(&to, depth + 1, is_match)? {
                    End::Goes if is_match == Matches::Unknown => {
                        certain = Matches::Unknown;
                        continue;
                    }
                    end => return Ok(end),
                },
                Action::Goes(Verdict::Accept) => Fate::Accepted,
                Action::Goes(Verdict::Drop) => Fate::Dropped,
                Action::Decides(fate) => fate,
            };
            let quoted = quoted() + unread(rule);
            match is_match {
                Matches::Yes => return Ok(End::Decided(fate, quoted)),
                _ if certain == Matches::Yes && self.is_only_by_chance(rule)? => {
                    self.outcome.doubt_by_chance(fate, quoted);
                }
                _ => self.outcome.doubt(fate, quoted),
            }
        }
        Ok(End::Goes)
    }

    /// Returns true if a rule has tests of a rate or a random number, and all its other tests match.
    fn is_only_by_chance(&mut self, rule: &Rule) -> io::Result<bool> {
        let Some(others) = chance::without(rule) else { return Ok(false) };
        Ok(self.rule(&others, &mut Registers::unknown())?.0 == Matches::Yes)
    }

    /// Runs the instructions of a rule. Returns whether all its tests match, and what it does then.
    fn rule(&mut self, rule: &Rule, registers: &mut Registers) -> io::Result<(Matches, Action)> {
        let mut all = Matches::Yes;
        for instruction in &rule.instructions {
            let (one, action) = self.step(instruction, registers)?;
            all = all.and(one);
            match action {
                _ if all == Matches::No => return Ok((all, Action::Nothing)),
                Action::Nothing => {}
                action => return Ok((all, action)),
            }
        }
        Ok((all, Action::Nothing))
    }

    fn step(&mut self, instruction: &Instruction, registers: &mut Registers) -> io::Result<(Matches, Action)> {
        let mut action = Action::Nothing;
        let mut is_match = Matches::Yes;
        match instruction {
            Instruction::Load { field, to, len } => {
                let bytes = match field {
                    Field::InputIndex => self.index(self.tested.input),
                    Field::OutputIndex => self.index(self.tested.output),
                    field => load(field, *len, self.tested),
                };
                registers.put_some(*to, *len, bytes.as_deref());
            }
            Instruction::Value { to, data } => registers.put(*to, data.len(), Some(data)),
            Instruction::Mask { from, to, mask, xor } => registers.mask(*from, *to, mask, xor),
            Instruction::ByteOrder { from, to, len, size } => registers.reverse(*from, *to, *len, *size),
            Instruction::Compare { at, comparison, data } => is_match = registers.compare(*at, *comparison, data),
            Instruction::Range { at, inside, first, last } => {
                let above = registers.compare(*at, Comparison::GreaterOrEqual, first);
                let within = above.and(registers.compare(*at, Comparison::LessOrEqual, last));
                is_match = within.negated_if(!*inside);
            }
            Instruction::Lookup { at, set, inside, into } => {
                let set = self.table.set(set)?;
                let (found, data) = lookup(&set, registers, *at);
                is_match = found.negated_if(!*inside);
                match (into, data) {
                    (Destination::Verdict, Data::Verdict(verdict)) => action = Action::Goes(verdict),
                    (Destination::Register(to), Data::Value(data)) => {
                        registers.put(
                            *to,
                            data.len(),
                            Some(&data).filter(|_| found == Matches::Yes).map(Vec::as_slice),
                        );
                    }
                    _ => {}
                }
            }
            Instruction::Verdict(verdict) => action = Action::Goes(verdict.clone()),
            Instruction::Nat { source: true, .. } | Instruction::Masquerade => {
                action = Action::Decides(Fate::SourceTranslated);
            }
            Instruction::Nat { .. } | Instruction::Redirect => action = Action::Decides(Fate::DestinationTranslated),
            Instruction::Reject => action = Action::Decides(Fate::Dropped),
            Instruction::Queue(queue) => {
                action = self.tested.queued(*queue).map_or(Action::Unknown, Action::Decides);
            }
            Instruction::SetMark => self.tested.may_have_mark = true,
            Instruction::Untrack | Instruction::Harmless => {}
            Instruction::Unknown { name, .. } if EFFECTS.contains(&name.as_str()) => action = Action::Unknown,
            Instruction::Unknown { to: Some(to), .. } => registers.put(*to, NAME, None),
            Instruction::Unknown { to: None, .. } => is_match = Matches::Unknown,
        }
        Ok((is_match, action))
    }

    /// Returns the bytes of the index of a link. A packet without such a link has 0 there.
    fn index(&self, link: Option<&str>) -> Option<Vec<Option<u8>>> {
        let index = link.map_or(Some(0), |link| self.table.index(link))?;
        Some(index.to_ne_bytes().into_iter().map(Some).collect())
    }
}

/// Instructions that may take the packet away, and are not evaluated. The names in capitals are targets of iptables.
const EFFECTS: [&str; 12] = [
    "queue",
    "tproxy",
    "dup",
    "fwd",
    "synproxy",
    "NFQUEUE",
    "TPROXY",
    "SYNPROXY",
    "DNAT",
    "SNAT",
    "REDIRECT",
    "immediate",
];

/// Returns what is to be said about a rule that decides because no program reads its queue.
fn unread(rule: &Rule) -> &'static str {
    let has_queue = rule.instructions.iter().any(|one| matches!(one, Instruction::Queue(_)));
    if has_queue { UNREAD } else { "" }
}

/// Returns true if a map has the verdict of this rule.
fn chooses_verdict(rule: &Rule) -> bool {
    let is_map = |one: &Instruction| matches!(one, Instruction::Lookup { into: Destination::Verdict, .. });
    rule.instructions.iter().any(is_map)
}

fn lookup(set: &Set, registers: &Registers, at: usize) -> (Matches, Data) {
    let len = set.elements.iter().find_map(|element| element.key.as_ref().map(Vec::len)).unwrap_or(0);
    match set.find(registers.get(at, len)) {
        Found::Yes(data) => (Matches::Yes, data),
        Found::No => (Matches::No, Data::Nothing),
        Found::Maybe(data) => (Matches::Unknown, data),
    }
}

/// Returns the bytes of a field of the packet. `None` is a byte that is not known.
fn load(field: &Field, len: usize, tested: Tested<'_>) -> Option<Vec<Option<u8>>> {
    let packet = tested.packet;
    let (source, size) = if packet.to.is_ipv4() { (12, 4) } else { (8, 16) };
    let bits = tested.known_bits;
    let part = |address: IpAddr, bits: Option<u8>| {
        let is_known = |at: usize| bits.is_none_or(|bits| (at + 1) * 8 <= usize::from(bits));
        let bytes = octets(address).into_iter().enumerate().map(|(at, byte)| is_known(at).then_some(byte));
        bytes.collect::<Vec<_>>()
    };
    let known = match field {
        // The protocol in the header of IPv4, and the next header of IPv6.
        Field::Network(9) if len == 1 && size == 4 => vec![protocol(packet)?],
        Field::Network(6) if len == 1 && size == 16 => vec![protocol(packet)?],
        Field::Network(offset) => {
            // nft loads both addresses at once if a rule tests both.
            let from = (*offset as usize).checked_sub(source)?;
            let both = [part(packet.from, bits.map(|(bits, _)| bits)), part(packet.to, bits.map(|(_, bits)| bits))];
            return both.concat().get(from..from + len).map(<[Option<u8>]>::to_vec);
        }
        Field::Transport(2) if len == 2 => packet.port?.to_be_bytes().to_vec(),
        Field::Mark if tested.may_have_mark => return None,
        Field::Mark => vec![0; 4],
        Field::EtherType if packet.to.is_ipv4() => vec![0x08, 0x00],
        Field::EtherType => vec![0x86, 0xdd],
        Field::L4Proto => vec![protocol(packet)?],
        Field::DestinationType => u32::from(tested.destination_type()?).to_ne_bytes().to_vec(),
        Field::Family => vec![if packet.to.is_ipv4() { 2 } else { 10 }],
        Field::InputName => name(tested.input),
        Field::OutputName => name(tested.output),
        Field::ConnectionState => match tested.connection {
            Connection::New => NEW,
            Connection::Established => ESTABLISHED,
            Connection::Untracked => UNTRACKED,
        }
        .to_ne_bytes()
        .to_vec(),
        Field::ConnectionStatus => return status(tested),
        Field::InputIndex | Field::OutputIndex | Field::Transport(_) | Field::Other(_) => return None,
    };
    Some(known.into_iter().map(Some).collect())
}

/// Returns the status of a connection. The lowest byte says whether an answer was seen, and whether addresses are translated.
fn status(tested: Tested<'_>) -> Option<Vec<Option<u8>>> {
    let is_plain = tested.connection == Connection::New && tested.is_translated == Some(false);
    let lowest = if cfg!(target_endian = "little") { 0 } else { 3 };
    is_plain.then(|| (0..4).map(|byte| (byte == lowest).then_some(0)).collect())
}

fn name(name: Option<&str>) -> Vec<u8> {
    let mut bytes = name.unwrap_or_default().as_bytes().to_vec();
    bytes.resize(NAME, 0);
    bytes
}

fn protocol(packet: &Packet) -> Option<u8> {
    Some(match packet.proto? {
        Proto::Tcp => 6,
        Proto::Udp => 17,
        Proto::Icmp if packet.to.is_ipv4() => 1,
        Proto::Icmp => 58,
        Proto::Ipip => 4,
    })
}
