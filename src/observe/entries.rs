// SPDX-License-Identifier: Apache-2.0
//! Entries of the kernel as text for people and for programs.

use std::borrow::Cow;

use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, ObservedValue, Value};

/// Returns a value as text. An entry that has no value besides its key is `present`.
pub fn value(value: &Value) -> String {
    let text = value.to_string();
    if text.is_empty() { "present".to_owned() } else { text }
}

/// Returns what was in the kernel as text. It says whose entry it was if it was not ours.
pub fn seen(key: &Key, seen: &ObservedValue) -> String {
    let text = value(&seen.value);
    match key {
        Key::Route(..) if seen.protocol != PROTOCOL => format!("{text} protocol {}", protocol(seen.protocol)),
        Key::Link(_) if !seen.mark => format!("{text}, not marked as made by this agent"),
        _ => text,
    }
}

/// Returns a change of a value as text. If there is only one of the two values, the text is this one.
pub fn change(before: Option<&str>, after: Option<&str>) -> String {
    match (before, after) {
        (Some(before), Some(after)) => format!("{before} -> {after}"),
        (Some(value), None) | (None, Some(value)) => value.to_owned(),
        (None, None) => String::new(),
    }
}

/// Returns the name of the program that writes routes with this protocol, as `ip route` names it, or the number if it has no name.
/// Source: /etc/iproute2/rt_protos and linux/rtnetlink.h.
pub fn protocol(number: u8) -> Cow<'static, str> {
    let name = match number {
        1 => "redirect",
        2 => "kernel",
        3 => "boot",
        4 => "static",
        8 => "gated",
        9 => "ra",
        10 => "mrt",
        11 => "zebra",
        12 => "bird",
        15 => "ntk",
        16 => "dhcp",
        17 => "mrouted",
        18 => "keepalived",
        42 => "babel",
        PROTOCOL => "weft",
        186 => "bgp",
        187 => "isis",
        188 => "ospf",
        189 => "rip",
        192 => "eigrp",
        _ => return number.to_string().into(),
    };
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An operator looks for the program of this name.
    #[test]
    fn a_program_that_writes_routes_is_named_as_iproute2_names_it() {
        for (number, name) in [
            (1, "redirect"),
            (2, "kernel"),
            (3, "boot"),
            (4, "static"),
            (8, "gated"),
            (9, "ra"),
            (10, "mrt"),
            (11, "zebra"),
            (12, "bird"),
            (15, "ntk"),
            (16, "dhcp"),
            (17, "mrouted"),
            (18, "keepalived"),
            (42, "babel"),
            (PROTOCOL, "weft"),
            (186, "bgp"),
            (187, "isis"),
            (188, "ospf"),
            (189, "rip"),
            (192, "eigrp"),
            (91, "91"),
        ] {
            assert_eq!(protocol(number), name);
        }
        assert_eq!(value(&Value::Addr), "present", "an entry without a value is shown");
    }
}
