// SPDX-License-Identifier: Apache-2.0
//! What the rules of a firewall do with a packet, as far as it can be decided from their text.
//!
//! Only simple tests are evaluated: addresses and the kind of the destination, sets of addresses, interfaces, protocol and destination port, the
//! state of a new connection, and the mark, which is 0 until a rule of the chain sets it. A rule with another test is not evaluated: then both cases are
//! followed, and the first such rule is quoted.

mod chance;
mod match_set;
mod new_address;
mod outcome;

use std::net::IpAddr;

use ipnet::IpNet;
use nix::libc;
use weft_cni::iptables::{Table, target, words};
use weft_netlink::nftables::Hook;

use super::entries::{Packet, Proto};
use super::ipset::AddressSets;
use super::queues::{Queue, UNREAD};
pub use new_address::{names_source, new_destination, new_source};
pub use outcome::{Fate, Outcome};

/// How deep jumps are followed, as in nftables (NFT_JUMP_STACK_SIZE of the kernel).
pub(crate) const MAX_DEPTH: u32 = 16;
/// How many rules are read. kube-proxy writes a hundred thousand.
pub(crate) const MAX_RULES: u32 = 200_000;

/// Targets with which another program decides about the packet. A queue may have no such program.
const TO_PROGRAMS: [&str; 4] = ["NFQUEUE", "QUEUE", "TPROXY", "SYNPROXY"];

/// The kinds of addresses that are told apart, with the words of iptables.
const ADDRESS_TYPES: [(&str, u8); 4] = [
    ("UNICAST", libc::RTN_UNICAST),
    ("LOCAL", libc::RTN_LOCAL),
    ("BROADCAST", libc::RTN_BROADCAST),
    ("MULTICAST", libc::RTN_MULTICAST),
];

/// What of a packet rules can test.
#[derive(Debug, Clone, Copy)]
pub struct Tested<'a> {
    /// The packet.
    pub packet: &'a Packet,
    /// The device by which it arrives.
    pub input: Option<&'a str>,
    /// The device by which it leaves.
    pub output: Option<&'a str>,
    /// A rule may have given the packet a mark. Without one, its mark is 0.
    pub may_have_mark: bool,
    /// What connection tracking says of the packet.
    pub connection: Connection,
    /// Whether a rule has translated the destination of the packet, if this is known.
    pub is_translated: Option<bool>,
    /// How many bits of the source and of the destination are known, if the packet stands for those between two subnets.
    pub known_bits: Option<(u8, u8)>,
    /// True if the destination is an address of this host, and false if the packet goes on to another one. `None` if this is not known.
    pub to_local: Option<bool>,
    /// The queues that programs read, if they are known.
    pub queues: Option<&'a [u16]>,
    /// Looks addresses up in sets of ipset. Without it, nothing is known of them.
    pub sets: Option<&'a dyn AddressSets>,
}

/// The state of a connection, as rules test it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Connection {
    /// The packet begins a connection.
    #[default]
    New,
    /// It answers another packet.
    Established,
    /// A rule took it out of connection tracking.
    Untracked,
}

impl Connection {
    /// Returns the word of iptables.
    fn word(self) -> &'static str {
        match self {
            Connection::New => "NEW",
            Connection::Established => "ESTABLISHED",
            Connection::Untracked => "UNTRACKED",
        }
    }
}

impl<'a> Tested<'a> {
    /// Returns what rules can test of a packet with these devices that begins a connection.
    pub fn new(packet: &'a Packet, input: Option<&'a str>, output: Option<&'a str>) -> Tested<'a> {
        let connection = Connection::New;
        Tested {
            packet,
            input,
            output,
            may_have_mark: false,
            connection,
            is_translated: None,
            known_bits: None,
            to_local: None,
            queues: None,
            sets: None,
        }
    }

    /// Returns what rules can test of the same packet at a hook. Before the routing decision it is not known by which device the packet leaves.
    pub(crate) fn at(self, hook: Hook) -> Tested<'a> {
        Tested { output: self.output.filter(|_| hook != Hook::Prerouting), ..self }
    }

    /// Returns what kind of address the destination is (`RTN_*` of linux/rtnetlink.h), if this is known.
    pub(crate) fn destination_type(&self) -> Option<u8> {
        match self.packet.to {
            to if to.is_multicast() => Some(libc::RTN_MULTICAST),
            IpAddr::V4(to) if to.is_broadcast() => Some(libc::RTN_BROADCAST),
            _ => self.to_local.map(|local| if local { libc::RTN_LOCAL } else { libc::RTN_UNICAST }),
        }
    }

    /// Returns what becomes of the packet in a queue, if no program decides about it there.
    pub(crate) fn queued(&self, queue: Queue) -> Option<Fate> {
        queue.drops(self.queues).map(|drops| if drops { Fate::Dropped } else { Fate::Accepted })
    }

    /// Returns the source with the number of its bits that are known.
    fn source(&self) -> (IpAddr, Option<u8>) {
        (self.packet.from, self.known_bits.map(|(bits, _)| bits))
    }

    /// Returns the destination with the number of its bits that are known.
    fn destination(&self) -> (IpAddr, Option<u8>) {
        (self.packet.to, self.known_bits.map(|(_, bits)| bits))
    }
}

/// Whether a rule matches a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Matches {
    /// It does.
    Yes,
    /// It does not.
    No,
    /// It has a test that is not evaluated.
    Unknown,
}

impl Matches {
    /// Returns whether two tests match together.
    pub fn and(self, other: Matches) -> Matches {
        match (self, other) {
            (Matches::No, _) | (_, Matches::No) => Matches::No,
            (Matches::Yes, Matches::Yes) => Matches::Yes,
            _ => Matches::Unknown,
        }
    }

    /// Returns the answer of a test with a negation before it, if there is one. What is not known stays so.
    pub fn negated_if(self, is_negated: bool) -> Matches {
        match self {
            Matches::Yes | Matches::No if is_negated => Matches::from(self == Matches::No),
            same => same,
        }
    }

    /// Returns the answer of an evaluated test.
    pub fn from(is_match: bool) -> Matches {
        if is_match { Matches::Yes } else { Matches::No }
    }
}

/// Follows a packet through a chain of iptables.
pub fn follow(table: &Table, chain: &str, tested: Tested<'_>) -> Outcome {
    let mut walk = Walk { table, tested, left: MAX_RULES, outcome: Outcome::default() };
    let decided = walk.chain(chain, 0, Matches::Yes);
    let policy = || match table.get(chain)?.policy.as_deref()? {
        "DROP" => Some((Fate::Dropped, format!("policy DROP of {chain}"))),
        policy => Some((Fate::Accepted, format!("policy {policy} of {chain}"))),
    };
    walk.outcome.fate = match decided {
        End::Decided(fate, rule) => Some((fate, rule)),
        End::Goes => policy(),
    };
    walk.outcome.may_have_mark = walk.tested.may_have_mark;
    walk.outcome
}

/// How a chain ends for a packet.
pub(crate) enum End {
    /// This rule decides.
    Decided(Fate, String),
    /// The packet goes on behind the chain.
    Goes,
}

struct Walk<'a> {
    table: &'a Table,
    tested: Tested<'a>,
    left: u32,
    outcome: Outcome,
}

impl Walk<'_> {
    /// Follows the packet through a chain. `certain` is `Unknown` behind a rule that was not evaluated: nothing is decided then.
    fn chain(&mut self, name: &str, depth: u32, mut certain: Matches) -> End {
        let Some(chain) = self.table.get(name) else { return End::Goes };
        if depth >= MAX_DEPTH {
            self.outcome.not_followed(format!("chain {name}, which is {MAX_DEPTH} jumps deep"));
            return End::Goes;
        }
        for rule in &chain.rules {
            if self.left == 0 {
                self.outcome.not_followed(format!("everything after {MAX_RULES} rules"));
                return End::Goes;
            }
            self.left -= 1;
            let spec = words(rule);
            let is_match = matches(&spec, self.tested).and(certain);
            if is_match == Matches::No {
                continue;
            }
            let (target, is_goto) = target(&spec).unwrap_or(("", false));
            let queued = Queue::of_words(target, &spec).and_then(|queue| self.tested.queued(queue));
            let quoted = format!("-A {name} {rule}{}", queued.map_or("", |_| UNREAD));
            let fate = match (target, fate_of(target).or(queued)) {
                (_, Some(fate)) => fate,
                ("RETURN", _) if is_match == Matches::Yes => return End::Goes,
                // The packet may not come to the rules behind it.
                ("RETURN", _) => {
                    certain = Matches::Unknown;
                    continue;
                }
                ("MARK" | "CONNMARK", _) => {
                    self.tested.may_have_mark = true;
                    continue;
                }
                (other, _) if TO_PROGRAMS.contains(&other) => {
                    self.outcome.not_followed(quoted);
                    continue;
                }
                ("NOTRACK" | "CT", _) if is_match == Matches::Yes => {
                    self.outcome.untracked |= target == "NOTRACK" || spec.iter().any(|word| word == "--notrack");
                    continue;
                }
                (other, _) => match self.chain(other, depth + 1, is_match) {
                    end @ End::Decided(..) => return end,
                    End::Goes if is_goto && is_match == Matches::Yes => return End::Goes,
                    End::Goes => {
                        if is_goto {
                            certain = Matches::Unknown;
                        }
                        continue;
                    }
                },
            };
            if is_match == Matches::Yes {
                return End::Decided(fate, quoted);
            }
            match certain == Matches::Yes && chance::decides(&spec, self.tested) {
                true => self.outcome.doubt_by_chance(fate, quoted),
                false => self.outcome.doubt(fate, quoted),
            }
        }
        End::Goes
    }
}

/// Returns what a target does that decides by itself.
fn fate_of(target: &str) -> Option<Fate> {
    Some(match target {
        "ACCEPT" => Fate::Accepted,
        "DROP" | "REJECT" => Fate::Dropped,
        "MASQUERADE" | "SNAT" => Fate::SourceTranslated,
        "DNAT" | "REDIRECT" => Fate::DestinationTranslated,
        _ => return None,
    })
}

/// Returns whether all tests of a rule match.
pub fn matches(spec: &[String], tested: Tested<'_>) -> Matches {
    let mut all = Matches::Yes;
    let mut at = 0;
    let mut negated = false;
    while let Some(word) = spec.get(at) {
        let value = spec.get(at + 1).map(String::as_str).unwrap_or_default();
        at += 2;
        let one = match word.as_str() {
            "!" => {
                negated = true;
                at -= 1;
                continue;
            }
            // The options behind the target belong to it.
            "-j" | "-g" | "--jump" | "--goto" => break,
            "-m" | "--comment" => Matches::Yes,
            "--match-set" => {
                at += 1;
                // Each question goes to the kernel.
                let is_asked = all != Matches::No;
                spec.get(at - 2..).filter(|_| is_asked).map_or(Matches::No, |words| match_set::test(words, tested))
            }
            option => test(option, value, tested),
        };
        all = all.and(one.negated_if(negated && !matches!(word.as_str(), "-m" | "--comment")));
        negated = false;
        if one == Matches::Unknown {
            // An option that is not known may have no value or several ones.
            at = next_option(spec, at - 1);
        }
    }
    all
}

fn next_option(spec: &[String], from: usize) -> usize {
    let is_option = |word: &String| word.starts_with('-') || word == "!";
    spec.iter().skip(from).position(is_option).map_or(spec.len(), |more| from + more)
}

/// Evaluates one test.
fn test(option: &str, value: &str, tested: Tested<'_>) -> Matches {
    let packet = tested.packet;
    match option {
        "-s" | "--source" => inside(value, tested.source()),
        "-d" | "--destination" => inside(value, tested.destination()),
        "-i" => Matches::from(tested.input.is_some_and(|name| is_interface(value, name))),
        "-o" => Matches::from(tested.output.is_some_and(|name| is_interface(value, name))),
        "-p" => match packet.proto {
            _ if value == "all" => Matches::Yes,
            None => Matches::Unknown,
            Some(Proto::Tcp) => Matches::from(value == "tcp" || value == "6"),
            Some(Proto::Udp) => Matches::from(value == "udp" || value == "17"),
            Some(Proto::Icmp) => Matches::from(matches!(value, "icmp" | "icmpv6" | "ipv6-icmp" | "1" | "58")),
            // What /etc/protocols calls ipip is another protocol.
            Some(Proto::Ipip) => Matches::from(matches!(value, "4" | "ipencap" | "ipv4")),
        },
        "--dport" | "--dports" => packet.port.map_or(Matches::Unknown, |port| ports(value, port)),
        "--ctstate" | "--state" => {
            let mut states = value.split(',');
            let may_be_translated =
                |state: &str| state == "SNAT" || state == "DNAT" && tested.is_translated != Some(false);
            if states.clone().any(may_be_translated) {
                Matches::Unknown
            } else {
                Matches::from(states.any(|state| state == tested.connection.word()))
            }
        }
        "--dst-type" => tested.destination_type().map_or(Matches::Unknown, |kind| {
            let is_kind = |word: &str| ADDRESS_TYPES.contains(&(word, kind));
            Matches::from(value.split(',').any(is_kind))
        }),
        "--mark" if tested.may_have_mark => Matches::Unknown,
        "--mark" => {
            let number = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok();
            number(value.split('/').next().unwrap_or_default())
                .map_or(Matches::Unknown, |mark| Matches::from(mark == 0))
        }
        _ => Matches::Unknown,
    }
}

fn inside(value: &str, (address, known_bits): (IpAddr, Option<u8>)) -> Matches {
    let Some(net) = net(value) else { return Matches::Unknown };
    match known_bits.and_then(|bits| IpNet::new(address, bits).ok()) {
        Some(all) if !net.contains(&all) && all.contains(&net) => Matches::Unknown,
        _ => Matches::from(net.contains(&address)),
    }
}

/// Returns the addresses for which a word stands that is an address range or an address.
pub(crate) fn net(word: &str) -> Option<IpNet> {
    word.parse().ok().or_else(|| word.parse::<IpAddr>().ok().map(IpNet::from))
}

/// Returns true if an interface has a name that a rule of iptables tests.
pub(crate) fn is_interface(value: &str, name: &str) -> bool {
    match value.strip_suffix('+') {
        Some(beginning) => name.starts_with(beginning),
        None => value == name,
    }
}

fn ports(value: &str, port: u16) -> Matches {
    let one = |text: &str| {
        let (first, last) = text.split_once(':').unwrap_or((text, text));
        let number = |text: &str, none: u16| if text.is_empty() { Some(none) } else { text.parse().ok() };
        Some((number(first, 0)?..=number(last, u16::MAX)?).contains(&port))
    };
    let all: Option<Vec<bool>> = value.split(',').map(one).collect();
    all.map_or(Matches::Unknown, |all| Matches::from(all.contains(&true)))
}
