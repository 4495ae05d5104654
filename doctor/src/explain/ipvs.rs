// SPDX-License-Identifier: Apache-2.0
//! Services that IPVS carries. kube-proxy gives their addresses to the link kube-ipvs0, so that the kernel delivers the packets to this
//! host, where IPVS takes them. Its table is not read here.

use std::net::SocketAddr;

use weft_netlink::rtnl::{Error, Rtnl};

use super::explanation::{State, Step};
use super::facts::{Packet, Proto};
use crate::known_links::KUBE_IPVS;

/// Returns a step that leaves the rest open, if the destination of a packet is a service that IPVS carries.
///
/// # Errors
/// The kernel does not list its links or addresses.
pub fn service(packet: &Packet) -> Result<Option<Step>, Error> {
    let mut kernel = Rtnl::open()?;
    let Some(link) = kernel.links()?.into_iter().find(|link| link.name == KUBE_IPVS) else { return Ok(None) };
    let is_there = kernel.addrs()?.iter().any(|addr| addr.index == link.index && addr.addr == packet.to);
    Ok(is_there.then(|| step(packet)))
}

fn step(packet: &Packet) -> Step {
    let table = match (packet.proto, packet.port) {
        (Some(Proto::Udp), Some(port)) => format!("ipvsadm -Ln -u {}", SocketAddr::new(packet.to, port)),
        (_, Some(port)) => format!("ipvsadm -Ln -t {}", SocketAddr::new(packet.to, port)),
        (_, None) => "ipvsadm -Ln".to_owned(),
    };
    let because = format!("IPVS carries the service {} to one of its endpoints, and its table is not read", packet.to);
    Step {
        state: State::Unknown,
        because: Some(because),
        remedy: Some(format!("{table} shows the endpoints; then: weft explain {} ENDPOINT", packet.from)),
        ..Step::ok("service", format!("{} is an address of {KUBE_IPVS}: IPVS carries it: {table}", packet.to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_that_shows_the_endpoints_names_the_service() {
        for (to, proto, port, command) in [
            ("10.96.0.10", None, Some(80), "ipvsadm -Ln -t 10.96.0.10:80"),
            ("10.96.0.10", Some(Proto::Udp), Some(53), "ipvsadm -Ln -u 10.96.0.10:53"),
            ("fd00::10", Some(Proto::Tcp), Some(80), "ipvsadm -Ln -t [fd00::10]:80"),
            ("10.96.0.10", None, None, "ipvsadm -Ln"),
        ] {
            let step = step(&Packet { from: "10.5.1.2".parse().unwrap(), to: to.parse().unwrap(), proto, port });
            assert!(step.is.ends_with(&format!("IPVS carries it: {command}")), "{step:?}");
            let remedy = format!("{command} shows the endpoints; then: weft explain 10.5.1.2 ENDPOINT");
            assert_eq!(step.remedy, Some(remedy));
        }
    }
}
