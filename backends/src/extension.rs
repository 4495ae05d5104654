// SPDX-License-Identifier: Apache-2.0
//! extension: commands in net-conf make the way to the peers. The agent runs them ([`crate::commands`]), and the kernel has no entries of
//! ours. Behaviour: docs/flannel-formats.md, "Backends", and docs/adr/025-extension.md.

use std::sync::Arc;
use std::time::Duration;

use weft_subnet::attrs::Attrs;
use weft_subnet::backend_types::{Annotations, PublicIdentity};
use weft_subnet::cidr::Family;
use weft_subnet::lease::Lease;
use weft_subnet::net_conf::NetConf;
use weft_subnet::text::shown;

use crate::backend::{Backend, BackendType, Planned, Skip, families};
use crate::commands::{CommandLine, CommandPeer, Commands, Variable, text};
use crate::family::publish_ours;
use crate::host::Host;
use crate::identity::{Found, Identities, Identity};
use crate::options::{BadOption, Options};
use crate::state::State;

/// extension in the register. Its commands make the routes, and weft does not touch these.
pub(crate) const TYPE: BackendType =
    BackendType { annotations, makes_routes: false, ..BackendType::new("extension", make) };

/// The largest data of a lease in bytes, as JSON. The rest of a lease needs space, too.
const MOST_DATA: usize = 3072;
/// The longest time for `Reconcile`, in seconds: a week.
const MOST_RECONCILE: u32 = 7 * 24 * 3600;

/// Why extension cannot work on this host, or does not reach a peer.
#[derive(Debug, thiserror::Error)]
enum ExtensionError {
    #[error("Backend.{0} in net-conf consists of white space: name a program, or leave the key out")]
    Blank(&'static str),
    #[error(
        "Backend.PreStartupCommand printed too much: its output is {bytes} bytes in a lease, and at most {MOST_DATA} fit: let it print less"
    )]
    TooMuch { bytes: usize },
    #[error("BackendData is {0}, not a JSON string: the command for this peer is not run")]
    Data(String),
    #[error("its BackendType is extension, and this node's net-conf names no commands that reach it")]
    OtherNetwork,
    #[error("its BackendType is {0:?}: the commands of extension run for leases of extension only")]
    OtherLease(String),
}

/// Returns the annotations of a Node. As in flannel, the text is empty if there is no data, and it is `null` for IPv6.
fn annotations(attrs: &Attrs) -> Annotations {
    Annotations {
        data: Some(attrs.backend_data.as_deref().unwrap_or_default().to_owned()),
        data_v6: Some("null".to_owned()),
    }
}

/// The output of the first command, as the JSON that our lease contains. The agent keeps it like the identity of a device, because both are found
/// at the start and are in the lease.
struct Output(Box<str>);

impl Identity for Output {
    fn public(&self) -> PublicIdentity {
        PublicIdentity::new(TYPE.kind, &self.0)
    }

    fn name(&self) -> &'static str {
        "BackendData"
    }

    fn remedy(&self) -> &'static str {
        "let PreStartupCommand print something else"
    }
}

/// The extension backend.
#[derive(Debug)]
struct Extension {
    families: Vec<Family>,
    commands: Arc<Commands>,
    /// `NETWORK` of the environment.
    network: String,
}

fn make(options: &Options, net_conf: &NetConf) -> Result<Box<dyn Backend>, BadOption> {
    if net_conf.backend_type != TYPE.kind {
        return Err(Skip::new(ExtensionError::OtherNetwork).into());
    }
    let shell = options.flag("Shell")?;
    let line = |key: &'static str| -> Result<Option<CommandLine>, BadOption> {
        let Some(text) = options.text(key)?.filter(|text| !text.is_empty()) else { return Ok(None) };
        if text.trim().is_empty() {
            return Err(Skip::new(ExtensionError::Blank(key)).into());
        }
        Ok(Some(CommandLine { key, text: text.to_owned(), shell }))
    };
    let repeat = options.number("Reconcile", 0..=MOST_RECONCILE, 0)?;
    let commands = Commands {
        before_lease: line("PreStartupCommand")?,
        after_lease: line("PostStartupCommand")?,
        add: line("SubnetAddCommand")?,
        remove: line("SubnetRemoveCommand")?,
        repeat: (repeat > 0).then(|| Duration::from_secs(repeat.into())),
    };
    let families = families(net_conf);
    let network = net_conf.networks.v4.map_or_else(|| NO_IPV4.to_owned(), |network| network.to_string());
    Ok(Box::new(Extension { families, commands: Arc::new(commands), network }))
}

/// What flannel gives to the command after the lease for a missing IPv4 network.
const NO_IPV4: &str = "0.0.0.0/0";
/// The same for a missing IPv6 network.
const NO_IPV6: &str = "::/0";

impl Backend for Extension {
    fn kind(&self) -> &'static str {
        TYPE.kind
    }

    fn makes_routes(&self) -> bool {
        TYPE.makes_routes
    }

    fn refuses(&self, backend_type: &str) -> Option<Skip> {
        Some(Skip::new(ExtensionError::OtherLease(shown(backend_type))))
    }

    fn mtu(&self, host: &Host, _family: Family) -> u32 {
        host.uplink.mtu
    }

    fn identities(&self, found: &Found<'_>, lease: Option<&Attrs>) -> Result<Identities, Skip> {
        let data = match (&self.commands.before_lease, found.printed) {
            (None, _) => None,
            (Some(_), Some(printed)) => Some(to_json(printed).into_boxed_str()),
            // The command has not run, because this agent continues with a lease for which it ran earlier.
            (Some(_), None) => lease.and_then(|lease| lease.backend_data.clone()),
        };
        if let Some(bytes) = data.as_ref().map(|data| data.len()).filter(|bytes| *bytes > MOST_DATA) {
            return Err(Skip::new(ExtensionError::TooMuch { bytes }));
        }
        Ok(Identities::new(data.map(|data| Arc::new(Output(data)) as Arc<dyn Identity>), None))
    }

    fn advertise(&self, host: &Host) -> Result<Attrs, Skip> {
        let mut attrs = Attrs { backend_type: TYPE.kind.to_owned(), ..Attrs::default() };
        for family in self.families.iter().copied() {
            publish_ours(&mut attrs, host, family, TYPE.kind)?;
        }
        let output = host.identities.of(Family::V4).and_then(|identity| identity.of::<Output>());
        attrs.backend_data = output.map(|output| output.0.clone());
        Ok(attrs)
    }

    fn device(&self, _host: &Host, _own: &Lease) -> State {
        State::new()
    }

    fn plan(&self, _host: &Host, _own: &Lease, peer: &Lease) -> Planned {
        read(peer).err().map_or_else(Planned::default, |error| Planned::none(Skip::new(error)))
    }

    fn commands(&self) -> Option<&Arc<Commands>> {
        Some(&self.commands)
    }

    /// Returns the variables of flannel. The value of a missing address is empty, where flannel writes `<nil>`.
    fn own_variables(&self, own: &Lease) -> Vec<Variable> {
        let subnets = own.subnets;
        vec![
            ("NETWORK", self.network.clone()),
            ("SUBNET", subnets.v4.map_or_else(|| NO_IPV4.to_owned(), |subnet| subnet.to_string())),
            ("IPV6SUBNET", subnets.v6.map_or_else(|| NO_IPV6.to_owned(), |subnet| subnet.to_string())),
            ("PUBLIC_IP", text(own.attrs.public_ip)),
            ("PUBLIC_IPV6", text(own.attrs.public_ipv6)),
        ]
    }

    fn command_peer(&self, peer: &Lease) -> Option<CommandPeer> {
        let data = read(peer).ok()?;
        let Attrs { public_ip, public_ipv6, .. } = peer.attrs;
        Some(CommandPeer { subnets: peer.subnets, public_ip, public_ipv6, data })
    }
}

/// Reads the data of a peer. A lease without data has empty data.
fn read(peer: &Lease) -> Result<Box<str>, ExtensionError> {
    let Some(data) = peer.attrs.backend_data.as_deref() else { return Ok("".into()) };
    serde_json::from_str(data).map_err(|_| ExtensionError::Data(shown(data)))
}

/// Returns the output of a command as flannel writes it into a lease: without white space at both ends, as a JSON string with the escapes
/// of Go. A byte that is no UTF-8 becomes `\ufffd`.
fn to_json(printed: &[u8]) -> String {
    let mut parts: Vec<Result<char, ()>> = Vec::new();
    for chunk in printed.utf8_chunks() {
        parts.extend(chunk.valid().chars().map(Ok));
        parts.extend(chunk.invalid().iter().map(|_| Err(())));
    }
    let is_text = |part: &Result<char, ()>| !part.is_ok_and(char::is_whitespace);
    let begin = parts.iter().position(is_text).unwrap_or(parts.len());
    let end = parts.iter().rposition(is_text).map_or(begin, |at| at + 1);
    let mut json = String::from("\"");
    for part in &parts[begin..end] {
        match part {
            Err(()) => json.push_str("\\ufffd"),
            Ok('"') => json.push_str("\\\""),
            Ok('\\') => json.push_str("\\\\"),
            Ok('\n') => json.push_str("\\n"),
            Ok('\r') => json.push_str("\\r"),
            Ok('\t') => json.push_str("\\t"),
            Ok('\u{8}') => json.push_str("\\b"),
            Ok('\u{c}') => json.push_str("\\f"),
            Ok(c @ ('\0'..='\u{1f}' | '<' | '>' | '&' | '\u{2028}' | '\u{2029}')) => {
                json.push_str(&format!("\\u{:04x}", u32::from(*c)));
            }
            Ok(c) => json.push(*c),
        }
    }
    json.push('"');
    json
}

#[cfg(test)]
pub(crate) mod tests;
