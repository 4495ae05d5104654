// SPDX-License-Identifier: Apache-2.0
//! The flags and the task of `weft explain`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args};
use weft_doctor::explain::facts::{Packet, Proto};

use super::Exit;
use super::exit::USAGE;
use super::flags::{FormFlags, InstanceFlags};

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
    #[command(flatten)]
    form: FormFlags,
}

/// Why these addresses, port and protocol describe no packet.
#[derive(Debug, thiserror::Error)]
pub enum NoPacket {
    /// One address is of IPv4, the other of IPv6.
    #[error("{0} and {1} are of different families: give two IPv4 or two IPv6 addresses")]
    Families(IpAddr, IpAddr),
    /// An address that no machine has.
    #[error("{0} is not the address of one machine: give the address of a pod, a node or a service")]
    NoMachine(IpAddr),
    /// A port of ICMP.
    #[error("--port needs --proto tcp or udp: ICMP has no ports")]
    NoPorts,
}

/// Returns the packet from one address to another. With a port alone, the protocol is TCP.
///
/// # Errors
/// There is no such packet.
pub fn packet((from, to): (IpAddr, IpAddr), proto: Option<Proto>, port: Option<u16>) -> Result<Packet, NoPacket> {
    if from.is_ipv4() != to.is_ipv4() {
        return Err(NoPacket::Families(from, to));
    }
    if let Some(address) = [from, to].into_iter().find(|ip| ip.is_unspecified() || ip.is_multicast()) {
        return Err(NoPacket::NoMachine(address));
    }
    if proto == Some(Proto::Icmp) && port.is_some() {
        return Err(NoPacket::NoPorts);
    }
    Ok(Packet { from, to, proto: proto.or(port.map(|_| Proto::Tcp)), port })
}

impl ExplainFlags {
    /// Returns the task that these flags describe.
    pub(super) fn task(self) -> Result<ExplainTask, Exit> {
        let proto = self.proto.map(|name| match name.as_str() {
            "icmp" => Proto::Icmp,
            "udp" => Proto::Udp,
            _ => Proto::Tcp,
        });
        Ok(ExplainTask {
            packet: packet((self.from, self.to), proto, self.port)
                .map_err(|error| Exit::new(USAGE, error.to_string()))?,
            socket: self.instance.socket(),
            subnet_file: self.instance.subnet_file,
            probe: self.probe,
            json: self.form.is_json(),
        })
    }
}
