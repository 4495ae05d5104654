// SPDX-License-Identifier: Apache-2.0
//! Commands that the agent runs because net-conf names them. A backend describes them and their variables with these values, and the
//! agent runs them (`src/extension.rs`).

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use weft_subnet::cidr::Subnets;

/// A variable of the environment of a command: its name and its value.
pub type Variable = (&'static str, String);

/// One command line of net-conf.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    /// The key of net-conf that names it.
    pub key: &'static str,
    /// The text. It contains at least one word.
    pub text: String,
    /// True if a shell reads the text. Otherwise it is split into words, and no word is split again.
    pub shell: bool,
}

impl CommandLine {
    /// Returns the program and its arguments. Without a shell, the text is split at white space, and then `$NAME` and `${NAME}` are
    /// replaced in each word as Go's `os.Expand` does, because flannel uses that. `variable` returns the value of a variable.
    pub fn words(&self, variable: impl Fn(&[u8]) -> Option<Vec<u8>>) -> Vec<Vec<u8>> {
        if self.shell {
            return ["sh", "-c", &self.text].map(|word| word.as_bytes().to_vec()).into();
        }
        self.text.split_whitespace().map(|word| expand(word.as_bytes(), &variable)).collect()
    }
}

/// The commands of a backend.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Commands {
    /// Runs before there is a lease. Its output is published in the lease.
    pub before_lease: Option<CommandLine>,
    /// Runs when the node has its lease, before pods may start.
    pub after_lease: Option<CommandLine>,
    /// Runs for each peer, and again if its lease has changed.
    pub add: Option<CommandLine>,
    /// Runs for each peer that has left.
    pub remove: Option<CommandLine>,
    /// After this time the command for each peer runs again.
    pub repeat: Option<Duration>,
}

impl Commands {
    /// Returns true if a command runs for peers.
    pub fn concern_peers(&self) -> bool {
        self.add.is_some() || self.remove.is_some()
    }
}

/// What the commands get to know of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandPeer {
    /// The subnets of its pods.
    pub subnets: Subnets,
    /// Its published IPv4 address.
    pub public_ip: Option<Ipv4Addr>,
    /// Its published IPv6 address.
    pub public_ipv6: Option<Ipv6Addr>,
    /// The data that the peer has published. It is foreign text, so a command gets it through its standard input only.
    pub data: Box<str>,
}

impl CommandPeer {
    /// Returns the variables for the commands about this peer. A variable without a value is empty.
    pub fn variables(&self) -> Vec<Variable> {
        vec![
            ("SUBNET", text(self.subnets.v4)),
            ("IPV6SUBNET", text(self.subnets.v6)),
            ("PUBLIC_IP", text(self.public_ip)),
            ("PUBLIC_IPV6", text(self.public_ipv6)),
        ]
    }
}

/// Returns the value as text, or an empty text.
pub(crate) fn text(value: Option<impl fmt::Display>) -> String {
    value.map_or_else(String::new, |value| value.to_string())
}

/// Replaces variables as Go's `os.Expand` does. An unknown variable is empty.
fn expand(word: &[u8], variable: &impl Fn(&[u8]) -> Option<Vec<u8>>) -> Vec<u8> {
    let mut expanded = Vec::new();
    let mut rest = word;
    while let Some(at) = rest.iter().position(|byte| *byte == b'$') {
        let after = &rest[at + 1..];
        if after.is_empty() {
            break;
        }
        expanded.extend_from_slice(&rest[..at]);
        let (name, length) = name(after);
        match (name, length) {
            // A dollar without a name stays.
            (b"", 0) => expanded.push(b'$'),
            (b"", _) => {}
            (name, _) => expanded.extend(variable(name).unwrap_or_default()),
        }
        rest = &after[length..];
    }
    expanded.extend_from_slice(rest);
    expanded
}

/// Returns the name at the beginning of a text that follows a dollar, and how many bytes the reference takes. The name is empty if there
/// is none, or if the syntax is bad.
fn name(after: &[u8]) -> (&[u8], usize) {
    let is_special = |byte: u8| b"*#$@!?-".contains(&byte) || byte.is_ascii_digit();
    match after {
        [b'{', special, b'}', ..] if is_special(*special) => (&after[1..2], 3),
        [b'{', ..] => match after.iter().position(|byte| *byte == b'}') {
            // The braces are dropped. If the closing one is missing, only the opening one is.
            Some(1) => (b"", 2),
            Some(end) => (&after[1..end], end + 1),
            None => (b"", 1),
        },
        [special, ..] if is_special(*special) => (&after[..1], 1),
        _ => {
            let end = after.iter().position(|byte| !(byte.is_ascii_alphanumeric() || *byte == b'_'));
            let end = end.unwrap_or(after.len());
            (&after[..end], end)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::CommandLine;

    fn words(text: &str, shell: bool) -> Vec<String> {
        let line = CommandLine { key: "SubnetAddCommand", text: text.to_owned(), shell };
        let variable = |name: &[u8]| match name {
            b"SUBNET" => Some(b"10.5.2.0/24".to_vec()),
            b"SPACES" => Some(b"a b; $SUBNET".to_vec()),
            b"EMPTY" => Some(Vec::new()),
            _ => None,
        };
        line.words(variable).into_iter().map(|word| String::from_utf8(word).unwrap()).collect()
    }

    #[test]
    fn a_command_without_a_shell_is_split_and_expanded_as_flannel_does() {
        for (text, expected) in [
            ("ip route add $SUBNET", &["ip", "route", "add", "10.5.2.0/24"][..]),
            ("  a\t${SUBNET}x \n", &["a", "10.5.2.0/24x"]),
            (r#"a "$SUBNET" 'b c'"#, &["a", r#""10.5.2.0/24""#, "'b", "c'"]),
            ("a $SPACES", &["a", "a b; $SUBNET"]),
            ("a $EMPTY $UNKNOWN b", &["a", "", "", "b"]),
            ("a $(b) `c` | ; > && *", &["a", "$(b)", "`c`", "|", ";", ">", "&&", "*"]),
            ("a $$ $1 $? ${1} ${?}x x$", &["a", "", "", "", "", "x", "x$"]),
            ("a ${} ${SUBNET $SUBNET-1 $.", &["a", "", "SUBNET", "10.5.2.0/24-1", "$."]),
        ] {
            assert_eq!(words(text, false), expected, "{text}");
        }
    }

    #[test]
    fn a_shell_gets_the_whole_text() {
        assert_eq!(words("echo $SUBNET | cat", true), ["sh", "-c", "echo $SUBNET | cat"]);
    }
}
