// SPDX-License-Identifier: Apache-2.0
//! The table of IPVS: virtual services, each with its endpoints.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::entries::Proto;

/// Reads the table of this network namespace.
///
/// # Errors
/// There is no IPVS in the kernel, or the table may not be read.
pub fn table() -> io::Result<String> {
    fs::read_to_string("/proc/thread-self/net/ip_vs")
}

/// Returns the endpoints that get packets of a service, or `None` if there is no such service. Without a protocol, the first service of this address
/// and port counts. An endpoint that is to get nothing more has weight 0.
pub fn endpoints(table: &str, at: SocketAddr, proto: Option<Proto>) -> Option<Vec<SocketAddr>> {
    let wanted = match proto {
        Some(Proto::Tcp) => Some("TCP"),
        Some(Proto::Udp) => Some("UDP"),
        _ => None,
    };
    let is_it = |line: &str| {
        let mut words = line.split_whitespace();
        let (proto, address) = (words.next(), words.next().and_then(address));
        proto.is_some_and(|proto| wanted.is_none_or(|wanted| wanted == proto)) && address == Some(at)
    };
    let mut lines = table.lines().skip_while(|line| !is_it(line));
    lines.next()?;
    let endpoint = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["->", place, _, weight, ..] = words[..] else { return None };
        address(place).filter(|_| weight != "0")
    };
    Some(lines.take_while(|line| line.trim_start().starts_with("->")).filter_map(endpoint).collect())
}

/// Reads an address and a port as the table has them: `0A600001:01BB`, or with an IPv6 address in brackets. The port is hexadecimal.
fn address(word: &str) -> Option<SocketAddr> {
    let (address, port) = word.rsplit_once(':')?;
    let address: IpAddr = match address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(six) => six.parse::<Ipv6Addr>().ok()?.into(),
        None => Ipv4Addr::from(u32::from_str_radix(address, 16).ok()?).into(),
    };
    Some(SocketAddr::new(address, u16::from_str_radix(port, 16).ok()?))
}
