// SPDX-License-Identifier: Apache-2.0
//! Rules that match only some packets: up to a rate, beyond it, or at random.

use super::instruction::{Destination, Instruction, Rule};

/// Instructions, and matches of iptables, that choose such packets.
pub(super) const BY_CHANCE: [&str; 4] = ["limit", "numgen", "hashlimit", "statistic"];

/// Returns a rule without its tests of a rate or a random number, if it has such tests.
pub(super) fn without(rule: &Rule) -> Option<Rule> {
    // The place in the registers where a random number is.
    let mut random = None;
    let mut others = Vec::new();
    for one in &rule.instructions {
        match one {
            Instruction::Unknown { name, to } if BY_CHANCE.contains(&name.as_str()) => random = to.or(random),
            Instruction::Mask { from, to, .. } | Instruction::ByteOrder { from, to, .. } if random == Some(*from) => {
                random = Some(*to);
            }
            Instruction::Compare { at, .. }
            | Instruction::Range { at, .. }
            | Instruction::Lookup { at, into: Destination::Nothing, .. }
                if random == Some(*at) => {}
            other => {
                random = random.filter(|place| written(other) != Some(*place));
                others.push(other.clone());
            }
        }
    }
    (others.len() < rule.instructions.len()).then_some(Rule { instructions: others, handle: rule.handle })
}

/// Returns the place in the registers that an instruction writes.
fn written(instruction: &Instruction) -> Option<usize> {
    match instruction {
        Instruction::Load { to, .. }
        | Instruction::Value { to, .. }
        | Instruction::Mask { to, .. }
        | Instruction::ByteOrder { to, .. }
        | Instruction::Lookup { into: Destination::Register(to), .. } => Some(*to),
        Instruction::Unknown { to, .. } => *to,
        _ => None,
    }
}
