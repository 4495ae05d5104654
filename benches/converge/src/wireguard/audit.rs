// SPDX-License-Identifier: Apache-2.0
//! The CPU time of a comparison of all WireGuard peers with the plan, on a kernel without the module. The bench builds the answer of the kernel. The
//! agent's own code decodes it and compares it. What the kernel needs for the answer is not a part of it.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ipnet::IpNet;
use nix::time::ClockId;
use weft::kernel::generic;
use weft::kernel::wire::{Writer, octets};
use weft::kernel::wireguard::{Device, KEY, PublicKey, Secret};
use weft::kernel::{Endpoints, wireguard_entries};
use weft::pass::wireguard_difference;
use weft::plan::Plan;
use weft_backends::host::{Host, OnLink, Reach, Uplink};
use weft_backends::register;
use weft_backends::state::Name;
use weft_backends::wireguard_key::KeyPair;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::lease::{Age, Lease, Record};
use weft_subnet::net_conf::NetConf;

use crate::measure::quantile;
use crate::peers::{Backend, NODE, Peer};

/// The number of comparisons: the median counts.
const TIMES: usize = 21;
/// The number of the family in the answer, as a kernel may choose it.
const FAMILY: u16 = 0x1e;
/// The number of peers in one datagram of the answer. The kernel fills 16 KiB.
const PER_DATAGRAM: usize = 80;
const DEVICE: &str = "flannel-wg";
const PORT: u16 = 51820;

// linux/wireguard.h
const WG_CMD_GET_DEVICE: u8 = 0;
const WG_GENL_VERSION: u8 = 1;
const WGDEVICE_A_IFNAME: u16 = 2;
const WGDEVICE_A_PRIVATE_KEY: u16 = 3;
const WGDEVICE_A_PUBLIC_KEY: u16 = 4;
const WGDEVICE_A_LISTEN_PORT: u16 = 6;
const WGDEVICE_A_PEERS: u16 = 8;
const WGPEER_A_PUBLIC_KEY: u16 = 1;
const WGPEER_A_PRESHARED_KEY: u16 = 2;
const WGPEER_A_ENDPOINT: u16 = 4;
const WGPEER_A_PERSISTENT_KEEPALIVE_INTERVAL: u16 = 5;
const WGPEER_A_LAST_HANDSHAKE_TIME: u16 = 6;
const WGPEER_A_RX_BYTES: u16 = 7;
const WGPEER_A_TX_BYTES: u16 = 8;
const WGPEER_A_ALLOWEDIPS: u16 = 9;
const WGPEER_A_PROTOCOL_VERSION: u16 = 10;
const WGALLOWEDIP_A_FAMILY: u16 = 1;
const WGALLOWEDIP_A_IPADDR: u16 = 2;
const WGALLOWEDIP_A_CIDR_MASK: u16 = 3;
const AF_INET: u16 = 2;
const NLM_F_MULTI: u16 = 2;

/// Returns the CPU time of one comparison with this number of peers, none of which differs.
///
/// # Errors
/// The plan and the answer do not agree, so something else would be measured.
pub fn cost(peers: usize) -> Result<Duration> {
    let (plan, name) = (plan(peers)?, name(DEVICE)?);
    let datagrams = dump(peers)?;
    let mut written: Endpoints =
        (0..peers).map(|number| ((name, key(number).id()), (Peer::new(number).outer(false), PORT).into())).collect();
    let cpu = || ClockId::CLOCK_THREAD_CPUTIME_ID.now().map(Duration::from).context("read the CPU clock");
    let mut times = Vec::new();
    for _ in 0..TIMES {
        let begin = cpu()?;
        let mut device = Device::default();
        datagrams.iter().for_each(|datagram| device.add(FAMILY, datagram));
        let observed = wireguard_entries(name, device, &mut written);
        let differing = wireguard_difference(&plan, &observed);
        times.push(cpu()? - begin);
        ensure!(observed.len() == 2 * peers, "{} entries are read", observed.len());
        ensure!(differing.is_empty(), "{} entries differ", differing.len());
    }
    quantile(&times, 0.5).context("nothing was measured")
}

fn name(text: &str) -> Result<Name> {
    Name::new(text).context("the name of a device")
}

/// Returns the public key of a peer. Keys differ in their first half, by which the agent knows a peer.
fn key(number: usize) -> PublicKey {
    let mut bytes = [7; KEY];
    bytes[..8].copy_from_slice(&(number as u64).to_be_bytes());
    PublicKey(bytes)
}

/// Returns the plan of a node with these peers.
fn plan(peers: usize) -> Result<Plan> {
    let net_conf = NetConf::parse(&Backend::Wireguard.net_conf())?;
    let backend = register::make(&net_conf)?;
    let name = name("eth0")?;
    let on_link = IpNet::new(IpAddr::V4(Ipv4Addr::new(172, 16, 0, 0)), 12)?;
    let host = Host {
        public_v4: Some(NODE),
        identities: KeyPair::of(Secret::new([1; KEY])).both(),
        routes: OnLink::new([(on_link, 0, Reach::Link(name))]),
        ..Host::new(Uplink { name, mtu: 1500, v4: Some(NODE), v6: None })
    };
    let subnets = Subnets { v4: Some("10.250.0.0/24".parse()?), v6: None };
    let own = Lease { id: subnets.to_key().into(), subnets, attrs: Attrs::default(), age: Age::default() };
    let mut plan = Plan::new(net_conf, backend, host, own);
    for number in 0..peers {
        plan.put(record(number)?);
    }
    Ok(plan)
}

fn record(number: usize) -> Result<Record> {
    let peer = Peer::new(number);
    let subnets = Subnets::from_key(&peer.id(Backend::Wireguard)).context("the key of a lease")?;
    let data = format!(r#"{{"PublicKey":"{}","Port":{PORT}}}"#, key(number));
    let published = Attrs::from_wire(peer.value(Backend::Wireguard).as_bytes())?;
    let attrs = Attrs { backend_data: Some(data.into()), ..published };
    let id: std::sync::Arc<str> = subnets.to_key().into();
    let age = Age { stamp: number as u64, tie: "".into() };
    Ok(Record { id: id.clone(), lease: Ok(Lease { id, subnets, attrs, age }) })
}

/// Returns what a kernel answers that has these peers, in the order of its attributes.
fn dump(peers: usize) -> Result<Vec<Vec<u8>>> {
    let numbers: Vec<usize> = (0..peers).collect();
    let mut datagrams = Vec::new();
    for part in numbers.chunks(PER_DATAGRAM) {
        let nets = part.iter().map(|number| Peer::new(*number).subnet(false)).collect::<Result<Vec<IpNet>>>()?;
        let mut w = Writer::default();
        w.begin(FAMILY, NLM_F_MULTI, &generic::header(WG_CMD_GET_DEVICE, WG_GENL_VERSION));
        if datagrams.is_empty() {
            w.attr(WGDEVICE_A_LISTEN_PORT, &PORT.to_ne_bytes());
            w.attr_str(WGDEVICE_A_IFNAME, DEVICE);
            w.attr(WGDEVICE_A_PRIVATE_KEY, &[1; KEY]);
            w.attr(WGDEVICE_A_PUBLIC_KEY, &[2; KEY]);
        }
        w.nest(WGDEVICE_A_PEERS, |w| {
            part.iter().zip(&nets).for_each(|(number, net)| w.nest(0, |w| peer(w, *number, *net)));
        });
        w.end(1);
        datagrams.push(w.bytes().to_vec());
    }
    Ok(datagrams)
}

fn peer(w: &mut Writer, number: usize, net: IpNet) {
    w.attr(WGPEER_A_PUBLIC_KEY, &key(number).0);
    w.attr(WGPEER_A_PRESHARED_KEY, &[0; KEY]);
    w.attr(WGPEER_A_LAST_HANDSHAKE_TIME, &[0; 16]);
    w.attr(WGPEER_A_PERSISTENT_KEEPALIVE_INTERVAL, &0_u16.to_ne_bytes());
    w.attr(WGPEER_A_TX_BYTES, &0_u64.to_ne_bytes());
    w.attr(WGPEER_A_RX_BYTES, &0_u64.to_ne_bytes());
    w.attr_u32(WGPEER_A_PROTOCOL_VERSION, 1);
    // struct sockaddr_in
    let address = octets(Peer::new(number).outer(false));
    let endpoint = [&AF_INET.to_ne_bytes()[..], &PORT.to_be_bytes()[..], &address[..], &[0; 8][..]].concat();
    w.attr(WGPEER_A_ENDPOINT, &endpoint);
    w.nest(WGPEER_A_ALLOWEDIPS, |w| {
        w.nest(0, |w| {
            w.attr(WGALLOWEDIP_A_CIDR_MASK, &[net.prefix_len()]);
            w.attr(WGALLOWEDIP_A_FAMILY, &AF_INET.to_ne_bytes());
            w.attr_ip(WGALLOWEDIP_A_IPADDR, net.addr());
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan or an answer that does not fit would make the comparison look cheap or dear.
    #[test]
    fn the_answer_that_is_built_agrees_with_the_plan() {
        assert!(cost(200).unwrap() > Duration::ZERO);
    }

    #[test]
    fn an_answer_without_a_peer_differs_from_the_plan() {
        let (plan, name) = (plan(3).unwrap(), name(DEVICE).unwrap());
        let mut device = Device::default();
        dump(2).unwrap().iter().for_each(|datagram| device.add(FAMILY, datagram));
        assert_eq!((device.port, device.peers.len()), (PORT, 2));
        let observed = wireguard_entries(name, device, &mut Endpoints::new());
        assert_eq!(wireguard_difference(&plan, &observed).len(), 2, "a peer and its allowed IP are missing");
    }
}
