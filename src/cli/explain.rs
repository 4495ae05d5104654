// SPDX-License-Identifier: Apache-2.0
//! The flags and the task of `weft explain`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args};
use weft_doctor::explain::facts::{Packet, Proto};

use super::flags::InstanceFlags;
use super::{Exit, USAGE};

/// Exit code of `weft explain` if the packet is lost on this node.
pub const BROKEN: u8 = super::doctor::FINDINGS;
/// Exit code of `weft explain` if it could not be decided.
pub const UNDECIDED: u8 = super::FAILURE;

/// `weft explain`.
#[derive(Debug)]
pub struct ExplainTask {
    /// The packet.
    pub packet: Packet,
    /// The subnet file of the instance.
    pub subnet_file: PathBuf,
    /// The socket on which the agent may answer.
    pub socket: PathBuf,
    /// Send echo requests to the other node.
    pub probe: bool,
    /// Print JSON.
    pub json: bool,
}

/// Flags of `weft explain`.
#[derive(Args)]
pub(super) struct ExplainFlags {
    /// Source address: of a pod, a node, or anything else.
    #[arg(value_name = "FROM")]
    from: IpAddr,
    /// Destination address.
    #[arg(value_name = "TO")]
    to: IpAddr,
    /// Destination port.
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// Transport protocol [default: tcp with --port, else any].
    #[arg(long, value_parser = ["tcp", "udp", "icmp"], value_name = "PROTOCOL")]
    proto: Option<String>,
    /// Also send echo requests to the other node, small ones and large ones.
    #[arg(long, action = ArgAction::SetTrue)]
    probe: bool,
    #[command(flatten)]
    instance: InstanceFlags,
    /// Form of the answer.
    #[arg(long, short = 'o', default_value = "text", value_parser = ["text", "json"], value_name = "FORM")]
    output: String,
}

impl ExplainFlags {
    /// Returns the task that these flags describe.
    pub(super) fn task(self) -> Result<ExplainTask, Exit> {
        let usage = |text: String| Err(Exit::new(USAGE, text));
        if self.from.is_ipv4() != self.to.is_ipv4() {
            return usage(format!(
                "{} and {} are of different families: give two IPv4 or two IPv6 addresses",
                self.from, self.to
            ));
        }
        if let Some(address) = [self.from, self.to].into_iter().find(|ip| ip.is_unspecified() || ip.is_multicast()) {
            return usage(format!(
                "{address} is not the address of one machine: give the address of a pod, a node or a service"
            ));
        }
        let proto = match (self.proto.as_deref(), self.port) {
            (Some("icmp"), Some(_)) => return usage("--port needs --proto tcp or udp: ICMP has no ports".to_owned()),
            (Some("icmp"), None) => Some(Proto::Icmp),
            (Some("udp"), _) => Some(Proto::Udp),
            (Some(_), _) | (None, Some(_)) => Some(Proto::Tcp),
            (None, None) => None,
        };
        Ok(ExplainTask {
            packet: Packet { from: self.from, to: self.to, proto, port: self.port },
            socket: self.instance.socket(),
            subnet_file: self.instance.subnet_file,
            probe: self.probe,
            json: self.output == "json",
        })
    }
}
