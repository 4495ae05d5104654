// SPDX-License-Identifier: Apache-2.0
//! Services that IPVS carries. kube-proxy gives their addresses to the link kube-ipvs0, so that the kernel delivers the packets to this
//! host, where IPVS takes them. A service with a port of the node has the addresses of the node itself, so only the table of IPVS shows it.

use std::net::SocketAddr;

use weft_netlink::rtnl::{Error, Rtnl};

use super::explanation::{State, Step};
use super::facts::{Packet, Proto};
use super::rules::Endpoint;
use crate::kernel::ipvs::{endpoints, table};
use crate::known_links::KUBE_IPVS;

/// Returns the first endpoint to which IPVS carries a packet, with a step. Without an endpoint, the step says why, or what is not known. `None` if the
/// destination is no service of IPVS.
///
/// # Errors
/// The kernel does not list its links or addresses.
pub fn service(packet: &Packet) -> Result<Option<(Step, Option<Endpoint>)>, Error> {
    let mut kernel = Rtnl::open()?;
    let link = kernel.links()?.into_iter().find(|link| link.name == KUBE_IPVS);
    let addrs = kernel.addrs()?;
    let is_there = link.is_some_and(|link| addrs.iter().any(|addr| addr.index == link.index && addr.addr == packet.to));
    Ok(judge(packet, is_there, table().ok().as_deref()))
}

/// `is_there` says whether [`KUBE_IPVS`] has the destination, and `table` is that of IPVS, if it was read.
fn judge(packet: &Packet, is_there: bool, table: Option<&str>) -> Option<(Step, Option<Endpoint>)> {
    let (Some(table), Some(port)) = (table, packet.port) else {
        return is_there.then(|| (open(packet), None));
    };
    let at = SocketAddr::new(packet.to, port);
    let Some(endpoints) = endpoints(table, at, packet.proto) else {
        return is_there.then(|| {
            let because =
                format!("{} is an address of {KUBE_IPVS}, and IPVS has no service at port {port} of it", packet.to);
            let remedy = format!(
                "`{}` shows the services of this address; see whether the service has this port",
                command(packet)
            );
            (Step::ok("service", because.clone()).broken(because, remedy), None)
        });
    };
    let Some(first) = endpoints.first() else {
        let because = format!("IPVS has no endpoint for the service {at} to which it sends packets");
        let remedy = format!(
            "`{}` shows them; `kubectl get endpointslices -A` shows whether its pods are ready; if they are, restart kube-proxy",
            command(packet)
        );
        return Some((Step::ok("service", because.clone()).broken(because, remedy), None));
    };
    let text = format!("IPVS carries {at} to {first}, one of {} endpoints", endpoints.len());
    Some((Step::ok("service", text), Some((first.ip(), Some(first.port())))))
}

/// Returns the command that shows a service.
fn command(packet: &Packet) -> String {
    match (packet.proto, packet.port) {
        (Some(Proto::Udp), Some(port)) => format!("ipvsadm -Ln -u {}", SocketAddr::new(packet.to, port)),
        (_, Some(port)) => format!("ipvsadm -Ln -t {}", SocketAddr::new(packet.to, port)),
        (_, None) => "ipvsadm -Ln".to_owned(),
    }
}

/// The step of a service of which the rest is left open.
fn open(packet: &Packet) -> Step {
    let table = command(packet);
    let why = if packet.port.is_none() { "no port was named" } else { "its table cannot be read" };
    let because = format!("IPVS carries the service {} to one of its endpoints, and {why}", packet.to);
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

    /// As `ip_vs_info_seq_show` of net/netfilter/ipvs/ip_vs_ctl.c writes it.
    const SERVICES: &str = "IP Virtual Server version 1.2.1 (size=4096)
Prot LocalAddress:Port Scheduler Flags
  -> RemoteAddress:Port Forward Weight ActiveConn InActConn
TCP  0A60000A:0050 rr\x20
  -> 0A050102:1F90      Masq    0      0          0        \x20
  -> 0A050202:1F90      Masq    1      3          0        \x20
  -> 0A050203:1F90      Masq    1      0          0        \x20
UDP  0A60000A:0035 rr\x20
TCP  C0A80001:7530 rr persistent 10800 FFFFFFFF
  -> 0A050202:1F90      Masq    0      0          0        \x20
TCP  [fd00:0000:0000:0000:0000:0000:0000:000a]:0050 rr\x20
  -> [fd00:0005:0000:0000:0000:0000:0000:0002]:1F90      Masq    1      0          0        \x20
";

    fn packet(to: &str, proto: Option<Proto>, port: Option<u16>) -> Packet {
        Packet { from: "10.5.1.2".parse().unwrap(), to: to.parse().unwrap(), proto, port }
    }

    #[test]
    fn a_service_of_ipvs_is_followed_to_an_endpoint_that_gets_packets() {
        for (to, proto, port, endpoint) in [
            ("10.96.0.10", None, 80, "10.5.2.2:8080"),
            ("10.96.0.10", Some(Proto::Tcp), 80, "10.5.2.2:8080"),
            ("fd00::a", None, 80, "[fd00:5::2]:8080"),
        ] {
            let (step, found) = judge(&packet(to, proto, Some(port)), true, Some(SERVICES)).unwrap();
            assert_eq!(step.state, State::Ok, "{step:?}");
            let (address, port) = found.unwrap();
            assert_eq!(SocketAddr::new(address, port.unwrap()), endpoint.parse().unwrap());
        }
    }

    #[test]
    fn a_service_without_an_endpoint_and_a_port_without_a_service_are_broken() {
        let judged = |to, proto, port, is_there| judge(&packet(to, proto, Some(port)), is_there, Some(SERVICES));
        for (to, proto, port, is_there, part) in [
            ("192.168.0.1", None, 30000, false, "no endpoint for the service 192.168.0.1:30000"),
            ("10.96.0.10", Some(Proto::Udp), 53, true, "no endpoint for the service 10.96.0.10:53"),
            ("10.96.0.10", None, 81, true, "IPVS has no service at port 81"),
            ("10.96.0.10", Some(Proto::Udp), 80, true, "IPVS has no service at port 80"),
        ] {
            let (step, endpoint) = judged(to, proto, port, is_there).unwrap();
            assert!(step.state == State::Broken && step.is.contains(part) && endpoint.is_none(), "{step:?}");
        }
        assert_eq!(judged("192.168.0.1", None, 22, false), None, "a port of the node itself");
    }

    #[test]
    fn the_command_that_shows_the_endpoints_names_the_service() {
        for (to, proto, port, command) in [
            ("10.96.0.10", None, Some(80), "ipvsadm -Ln -t 10.96.0.10:80"),
            ("10.96.0.10", Some(Proto::Udp), Some(53), "ipvsadm -Ln -u 10.96.0.10:53"),
            ("fd00::10", Some(Proto::Tcp), Some(80), "ipvsadm -Ln -t [fd00::10]:80"),
            ("10.96.0.10", None, None, "ipvsadm -Ln"),
        ] {
            let (step, endpoint) = judge(&packet(to, proto, port), true, None).unwrap();
            assert!(step.is.ends_with(&format!("IPVS carries it: {command}")) && endpoint.is_none(), "{step:?}");
            let remedy = format!("{command} shows the endpoints; then: weft explain 10.5.1.2 ENDPOINT");
            assert_eq!(step.remedy, Some(remedy));
        }
    }
}
