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

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::path::Path;

    use super::*;
    use crate::cli::{Task, parse_from};

    fn task(line: &str) -> Result<ExplainTask, Exit> {
        match parse_from(line.split(' ').map(OsString::from), |_| None)? {
            Task::Explain(task) => Ok(*task),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_flag_reaches_its_own_field_and_a_port_alone_means_tcp() {
        let line =
            "weft explain 10.5.1.2 10.5.2.3 --port 53 --proto udp --probe -o json --socket /s --subnet-file /f.env";
        let all = task(line).unwrap();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let Packet { from, to, proto, port } = all.packet;
        assert_eq!((from, to, proto, port), (ip("10.5.1.2"), ip("10.5.2.3"), Some(Proto::Udp), Some(53)));
        assert_eq!((all.socket.as_path(), all.subnet_file.as_path()), (Path::new("/s"), Path::new("/f.env")));
        assert!(all.probe && all.json);
        for (flags, proto, port) in [
            ("", None, None),
            (" --port 80", Some(Proto::Tcp), Some(80)),
            (" --proto tcp", Some(Proto::Tcp), None),
            (" --proto icmp", Some(Proto::Icmp), None),
        ] {
            let task = task(&format!("weft explain fd00::1 fd00::2{flags}")).unwrap();
            assert_eq!((task.packet.proto, task.packet.port), (proto, port), "{flags}");
            assert!(!task.probe && !task.json);
        }
    }

    #[test]
    fn what_is_no_packet_is_refused_with_the_reason() {
        for (words, reason) in [
            ("10.5.1.2 fd00::2", "10.5.1.2 and fd00::2 are of different families"),
            ("fd00::2 10.5.1.2", "are of different families"),
            ("10.5.1.2 0.0.0.0", "0.0.0.0 is not the address of one machine"),
            ("224.0.0.1 10.5.1.2", "224.0.0.1 is not the address of one machine"),
            ("fd00::1 ff02::1", "ff02::1 is not the address of one machine"),
            ("10.5.1.2 10.5.2.3 --proto icmp --port 7", "ICMP has no ports"),
        ] {
            let exit = task(&format!("weft explain {words}")).unwrap_err();
            assert!(exit.code == USAGE && exit.text.contains(reason), "{words}: {}", exit.text);
        }
    }
}
