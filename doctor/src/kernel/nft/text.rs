// SPDX-License-Identifier: Apache-2.0
//! Rules in words that are close to those of `nft list ruleset`. What has no word here stands in angle brackets.

use ipnet::IpNet;
use weft_netlink::wire;

use super::instruction::{Comparison, Destination, Field, Instruction, Rule, Verdict};
use super::registers::Registers;
use crate::kernel::entries::Packet;

/// What a register contains while a rule is written down.
#[derive(Clone)]
struct Content<'a> {
    at: usize,
    field: &'a Field,
    len: usize,
    mask: Option<&'a [u8]>,
}

/// Returns a rule as text. `registers` are those after the rule was evaluated.
pub(super) fn of(rule: &Rule, registers: &Registers, packet: &Packet) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut loaded: Vec<Content<'_>> = Vec::new();
    for instruction in &rule.instructions {
        match instruction {
            Instruction::Load { field, to, len } => {
                loaded.push(Content { at: *to, field, len: *len, mask: None });
            }
            Instruction::Mask { from, to, mask, .. } => {
                if let Some(content) = at_place(&loaded, *from) {
                    loaded.push(Content { at: *to, mask: Some(mask), ..content });
                }
            }
            Instruction::Compare { at, comparison, data } => {
                let content = at_place(&loaded, *at);
                let (name, value) = (name_of(content.as_ref()), content.and_then(|content| value(&content, data)));
                let value = value.unwrap_or_else(|| "<value>".to_owned());
                words.push(format!("{name} {}{value}", sign(*comparison)));
            }
            Instruction::Range { at, inside, first, last } => {
                let content = at_place(&loaded, *at);
                let text = |data| content.as_ref().and_then(|c| value(c, data)).unwrap_or_else(|| "<value>".to_owned());
                let not = if *inside { "" } else { "!= " };
                words.push(format!("{} {not}{}-{}", name_of(content.as_ref()), text(first), text(last)));
            }
            Instruction::Lookup { at, set, inside, into } => {
                // A set may join several fields, which follow each other in the registers.
                let behind = |content: &&Content<'_>| content.at >= *at;
                let names: Vec<String> = loaded.iter().filter(behind).map(|content| name_of(Some(content))).collect();
                let kind = match into {
                    Destination::Verdict => "vmap ",
                    Destination::Register(_) => "map ",
                    Destination::Nothing if *inside => "",
                    Destination::Nothing => "!= ",
                };
                words.push(format!(
                    "{} {kind}@{set}",
                    if names.is_empty() { "<value>".to_owned() } else { names.join(" . ") }
                ));
            }
            other => {
                // What was loaded there before is not what is compared now.
                if let Instruction::Unknown { to: Some(to), .. } = other {
                    loaded.retain(|content| content.at != *to);
                }
                words.extend(word(other, registers, packet));
            }
        }
    }
    words.join(" ")
}

/// Returns what was loaded last into a place.
fn at_place<'a>(loaded: &[Content<'a>], at: usize) -> Option<Content<'a>> {
    loaded.iter().rev().find(|content| content.at == at).cloned()
}

fn sign(comparison: Comparison) -> &'static str {
    match comparison {
        Comparison::Equal => "",
        Comparison::NotEqual => "!= ",
        Comparison::Less => "< ",
        Comparison::LessOrEqual => "<= ",
        Comparison::Greater => "> ",
        Comparison::GreaterOrEqual => ">= ",
    }
}

/// Returns the word of an instruction that tests no field.
fn word(instruction: &Instruction, registers: &Registers, packet: &Packet) -> Option<String> {
    Some(match instruction {
        Instruction::Verdict(Verdict::Accept) => "accept".to_owned(),
        Instruction::Verdict(Verdict::Drop) => "drop".to_owned(),
        Instruction::Verdict(Verdict::Return) => "return".to_owned(),
        Instruction::Verdict(Verdict::Continue) => "continue".to_owned(),
        Instruction::Verdict(Verdict::Jump(to)) => format!("jump {to}"),
        Instruction::Verdict(Verdict::Goto(to)) => format!("goto {to}"),
        Instruction::Nat { source, address, port } => {
            let kind = if *source { "snat" } else { "dnat" };
            let size = if packet.to.is_ipv4() { 4 } else { 16 };
            let address = address.and_then(|at| registers.known(at, size)).and_then(|bytes| wire::ip(&bytes));
            let port = port.and_then(|at| registers.known(at, 2)).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]));
            match (address, port) {
                (Some(address), Some(port)) => format!("{kind} to {}", std::net::SocketAddr::new(address, port)),
                (Some(address), None) => format!("{kind} to {address}"),
                (None, _) => format!("{kind} to <address>"),
            }
        }
        Instruction::Masquerade => "masquerade".to_owned(),
        Instruction::Redirect => "redirect".to_owned(),
        Instruction::Reject => "reject".to_owned(),
        Instruction::SetMark => "meta mark set".to_owned(),
        Instruction::Queue(queue) if queue.first == queue.last => format!("queue to {}", queue.first),
        Instruction::Queue(queue) => format!("queue to {}-{}", queue.first, queue.last),
        Instruction::Untrack => "notrack".to_owned(),
        Instruction::Unknown { name, .. } => format!("<{name}>"),
        _ => return None,
    })
}

fn name_of(content: Option<&Content<'_>>) -> String {
    let Some(content) = content else { return "<value>".to_owned() };
    let text = match content.field {
        Field::Mark => "meta mark",
        Field::EtherType => "meta protocol",
        Field::L4Proto => "meta l4proto",
        Field::Family => "meta nfproto",
        Field::InputIndex => "iif",
        Field::OutputIndex => "oif",
        Field::InputName => "iifname",
        Field::OutputName => "oifname",
        Field::ConnectionState => "ct state",
        Field::ConnectionStatus => "ct status",
        Field::DestinationType => "fib daddr type",
        Field::Transport(2) => "dport",
        Field::Transport(0) => "sport",
        Field::Network(9) => "ip protocol",
        Field::Network(6) => "ip6 nexthdr",
        Field::Network(12) => "ip saddr",
        Field::Network(16) => "ip daddr",
        Field::Network(8) => "ip6 saddr",
        Field::Network(24) => "ip6 daddr",
        Field::Network(_) | Field::Transport(_) => "<payload>",
        Field::Other(name) => return format!("<{name}>"),
    };
    text.to_owned()
}

/// Returns a compared value as text.
fn value(content: &Content<'_>, data: &[u8]) -> Option<String> {
    Some(match content.field {
        Field::InputName | Field::OutputName => {
            let end = data.iter().position(|byte| *byte == 0);
            let name = String::from_utf8_lossy(&data[..end.unwrap_or(data.len())]).into_owned();
            if end.is_none() && data.len() < 16 { format!("{name}*") } else { name }
        }
        Field::Transport(0 | 2) => u16::from_be_bytes(data.try_into().ok()?).to_string(),
        // Both addresses of IPv4.
        Field::Network(12) if data.len() == 8 => {
            format!("{} ip daddr {}", wire::ip(&data[..4])?, wire::ip(&data[4..])?)
        }
        Field::Network(offset @ (8 | 12 | 16 | 24)) => {
            let size = if matches!(offset, 8 | 24) { 16 } else { 4 };
            let mut bytes = data.to_vec();
            bytes.resize(size, 0);
            let address = wire::ip(&bytes)?;
            let bits = content.mask.map_or(u32::try_from(content.len * 8).ok()?, ones);
            let net = IpNet::new(address, u8::try_from(bits).ok()?).ok()?;
            if net.prefix_len() == net.max_prefix_len() { address.to_string() } else { net.to_string() }
        }
        Field::ConnectionState | Field::ConnectionStatus | Field::Mark => {
            let number = |bytes: &[u8]| Some(u32::from_ne_bytes(bytes.try_into().ok()?));
            match content.mask {
                Some(mask) => format!("{:#x}/{:#x}", number(data)?, number(mask)?),
                None => format!("{:#x}", number(data)?),
            }
        }
        Field::InputIndex | Field::OutputIndex => u32::from_ne_bytes(data.try_into().ok()?).to_string(),
        Field::DestinationType => match u32::from_ne_bytes(data.try_into().ok()?) {
            1 => "unicast".to_owned(),
            2 => "local".to_owned(),
            3 => "broadcast".to_owned(),
            5 => "multicast".to_owned(),
            number => number.to_string(),
        },
        Field::L4Proto | Field::Network(6 | 9) => match data.first()? {
            1 => "icmp".to_owned(),
            6 => "tcp".to_owned(),
            17 => "udp".to_owned(),
            number => number.to_string(),
        },
        Field::EtherType => match data {
            [0x08, 0x00] => "ip".to_owned(),
            [0x08, 0x06] => "arp".to_owned(),
            [0x86, 0xdd] => "ip6".to_owned(),
            _ => return None,
        },
        Field::Family => match data.first()? {
            2 => "ipv4".to_owned(),
            10 => "ipv6".to_owned(),
            number => number.to_string(),
        },
        _ => return None,
    })
}

fn ones(mask: &[u8]) -> u32 {
    mask.iter().map(|byte| byte.count_ones()).sum()
}
