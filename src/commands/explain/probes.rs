// SPDX-License-Identifier: Apache-2.0
//! `weft explain --probe`: sends echo requests to the other node, and says where they are lost. One packet proves little, so each answer that matters
//! comes from several of them. All together take about five seconds at most.

mod several;

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use weft_doctor::explain::facts::{Agent, Facts, Lookup, Packet, Place, Way};
use weft_doctor::explain::{State, Step};
use weft_doctor::facts::pod_way::{self, Direct};
use weft_doctor::kernel::Kernel;
use weft_doctor::kernel::entries::unspecified;
use weft_doctor::remedies;

use crate::probe::connection;
use crate::probe::echo::{Echo, EchoError};
use crate::probe::examine::SMALL;
use several::{Answers, several};

/// How long an answer is waited for.
const WAIT: Duration = Duration::from_secs(1);
/// How many requests of one size are sent.
const REQUESTS: u32 = 5;
/// The same where many sizes are tried.
const REQUESTS_OF_MANY: u32 = 2;
/// So many lost requests are no accident. A single one may be.
const MIN_LOST: u32 = 2;
/// The name of the steps.
const NAME: &str = "probe";
/// Sizes of packets that paths carry often: what IPv4 and IPv6 promise, and what remains in tunnels, such as PPPoE, and inside of several.
const SIZES: [u16; 10] = [576, 1280, 1380, 1400, 1420, 1450, 1460, 1480, 1492, 1500];

/// Sends the requests for the way that leads to the other address. If neither address belongs to this node, nothing is sent.
pub async fn send(facts: &Facts) -> Vec<Step> {
    let place_of = |way: &Way| if way.packet.to == facts.packet.to { &facts.to } else { &facts.from };
    let leads_away = facts.ways.iter().find(|way| !place_of(way).is_here());
    let Some(way) = leads_away.or_else(|| facts.ways.last()) else { return Vec::new() };
    let place = place_of(way);
    let asked = answering(way, place);
    match ask(way, place, asked).await {
        Ok(mut steps) => {
            steps.extend(pod_step(facts, way, place).await);
            steps
        }
        Err(error) => vec![Step::unknown(NAME, error.to_string())],
    }
}

/// Asks a node that is reached without a tunnel whether packets for its pods get to it, after it has answered at its own address.
async fn pod_step(facts: &Facts, way: &Way, place: &Place) -> Option<Step> {
    let Place::Peer(peer) = place else { return None };
    // Another router answers for itself, and not for the node.
    let (to, gateway) = (way.packet.to, way.hop.nexthop.filter(|gateway| peer.public.contains(gateway))?);
    let subnet = *peer.subnets.iter().find(|net| net.contains(&to)).filter(|_| way.tunnel.is_none())?;
    let bridge = facts.bridge.as_ref().map(|bridge| bridge.index);
    let direct = Direct::new(gateway, subnet, &facts.subnet_file.subnets(), bridge, &facts.addrs)?;
    let answers = tokio::task::spawn_blocking(move || pod_way::ask_one(direct)).await.ok()?.ok()?;
    let sender = direct.from.map_or_else(String::new, |from| format!(" from {from}"));
    let backend = match &facts.agent {
        Agent::Answers(agent) => agent.backend.as_str(),
        Agent::Silent(_) => "",
    };
    match answers? {
        true => Some(Step::ok(NAME, format!("{gateway} gets packets{sender} for its pods"))),
        false => Some(Step {
            state: State::Doubt,
            because: Some(format!(
                "{gateway} answers at its own address, and no packet{sender} for its pods: the network between the nodes seems to pass only packets \
                 with addresses of nodes"
            )),
            remedy: Some(format!(
                "allow Network on the ports of the nodes (source/destination check of a cloud, port security of a switch), or {}; `weft doctor` \
                 there shows whether that node forwards packets",
                remedies::without_addresses_of_pods(backend)
            )),
            ..Step::ok(NAME, format!("{gateway} answers no packet{sender} for its pods"))
        }),
    }
}

/// Returns the address that answers for the other node. Its pod may not answer echo requests.
fn answering(way: &Way, place: &Place) -> IpAddr {
    let to = way.packet.to;
    match place {
        // The device of a tunnel has the first address of its subnet.
        Place::Peer(peer) if peer.has_pod(to) && way.tunnel.is_some() => {
            peer.subnet(to.is_ipv4()).map_or(to, IpNet::network)
        }
        Place::Peer(peer) if peer.has_pod(to) => way.hop.nexthop.unwrap_or(to),
        Place::Network => way.hop.nexthop.unwrap_or(to),
        _ => to,
    }
}

async fn ask(way: &Way, place: &Place, asked: IpAddr) -> Result<Vec<Step>, EchoError> {
    // Most nodes answer the first packet. Only if this one does not, more of them are needed to tell loss from silence.
    let mut small = echoes(asked, SMALL, 1).await?;
    if small.answered == 0 {
        small.extend(echoes(asked, SMALL, REQUESTS - 1).await?);
    }
    let Some(step) = answered(asked, SMALL, small, place) else { return Ok(vec![silent(way, place, asked).await?]) };
    let mut steps = vec![step];
    // Where small packets get lost, the loss of large ones says nothing about their size.
    let size = full_size(way, place).filter(|mtu| *mtu > SMALL && small.lost() < MIN_LOST);
    if let Some(mtu) = size {
        let full = echoes(asked, mtu, REQUESTS).await?;
        steps.push(match answered(asked, mtu, full, place) {
            Some(step) => step,
            None if *place == Place::Outside => vanishes(way, asked, mtu).await?,
            None => Step::ok(NAME, format!("{asked} answers none of {REQUESTS} packets of {mtu} bytes")).broken(
                format!("packets of {mtu} bytes to {asked} are lost, and small ones arrive"),
                "the path between the nodes has a smaller MTU: `weft mesh` measures it; lower the MTU of the uplinks to it",
            ),
        });
    }
    Ok(steps)
}

/// Returns the step for an address that answered at least one of these requests. A host outside of the cluster may limit the number of its answers.
/// So lost packets on the way to such a host raise no doubt.
fn answered(asked: IpAddr, size: u16, answers: Answers, place: &Place) -> Option<Step> {
    let (sent, fastest) = (answers.sent, answers.fastest?);
    let lost = answers.lost();
    if lost == 0 {
        return Some(Step::ok(
            NAME,
            match sent {
                1 => format!("{asked} answers a packet of {size} bytes after {fastest:?}"),
                _ => format!("{asked} answers {sent} packets of {size} bytes, the fastest one after {fastest:?}"),
            },
        ));
    }
    let text = format!("{asked} answers {} of {sent} packets of {size} bytes", answers.answered);
    if lost < MIN_LOST || *place == Place::Outside {
        return Some(Step::unknown(NAME, text));
    }
    Some(Step {
        state: State::Doubt,
        because: Some(format!(
            "{lost} of {sent} packets of {size} bytes to {asked} are lost, and the others arrive: something on the way loses packets, or a \
             firewall there limits the number of echo requests"
        )),
        remedy: Some(
            "`weft mesh` shows the loss over a longer time; `ip -s link` on both nodes shows the errors and the drops of their links, \
             and `weft doctor` there rules that drop packets beyond a rate or at random"
                .to_owned(),
        ),
        ..Step::ok(NAME, text)
    })
}

/// Returns the size of the largest packet that is sent this way. To the outside, that is what the sender and the route let pass.
fn full_size(way: &Way, place: &Place) -> Option<u16> {
    let of_device = way.hop.device.as_ref().map(|device| device.mtu);
    let of_sender = way.arrives.as_ref().map(|device| device.mtu);
    let of_route = way.hop.route().and_then(|route| route.mtu);
    let all = if *place == Place::Outside { [of_device, of_sender, of_route] } else { [of_device, None, None] };
    all.into_iter().flatten().min().and_then(|mtu| u16::try_from(mtu).ok())
}

/// The step at an address that answers no small packet.
async fn silent(way: &Way, place: &Place, asked: IpAddr) -> Result<Step, EchoError> {
    if connection::answers(asked).await.is_some() {
        let text = format!(
            "{asked} answers a TCP connection, and no echo request: a firewall drops ICMP, so large packets cannot be tried"
        );
        return Ok(Step::unknown(NAME, text));
    }
    let lost = Step::ok(NAME, format!("{asked} answers none of {REQUESTS} packets of {SMALL} bytes"));
    if *place == Place::Outside {
        // Many hosts answer no echo request at all.
        return Ok(Step { state: State::Unknown, ..lost });
    }
    let Some(remote) = way.tunnel.as_ref().and_then(|tunnel| tunnel.remote) else {
        return Ok(lost.broken(
            format!("{asked} does not answer"),
            "see whether that machine runs, and whether a firewall drops ICMP",
        ));
    };
    Ok(match echoes(remote, SMALL, REQUESTS).await?.fastest {
        Some(_) => lost.broken(
            format!("{remote} answers outside of the tunnel, and {asked} does not inside of it"),
            "a firewall between the nodes drops the packets of the tunnel, or the other node lacks the entries for this one: \
             run weft explain there",
        ),
        None => lost.broken(
            format!("neither {asked} in the tunnel nor {remote} outside of it answers"),
            "the underlay does not carry packets to that node, or it drops ICMP",
        ),
    })
}

/// The step at a host outside of the cluster that answers small packets, and none of this size.
async fn vanishes(way: &Way, asked: IpAddr, full: u16) -> Result<Step, EchoError> {
    // The second one was sent in fragments then, which many hosts ignore.
    if let Some(fits) = learned_mtu(asked).filter(|mtu| *mtu < u32::from(full)) {
        let text = format!(
            "a router on the way to {asked} says that packets of {fits} bytes fit, and those of {full} bytes do not"
        );
        return Ok(Step::ok(NAME, text));
    }
    let answered = largest(asked, full).await?;
    if answered == SMALL {
        let text = format!("{asked} answers packets of {SMALL} bytes, and none of {} bytes or more", SIZES[0]);
        return Ok(Step::unknown(NAME, format!("{text}: it may not answer large echo requests")));
    }
    let via = way.hop.nexthop.filter(|nexthop| *nexthop != asked).map(|nexthop| format!(" via {nexthop}"));
    let device = way.hop.device.as_ref().map(|device| format!(" dev {}", device.name));
    let (ip, host) = (if asked.is_ipv4() { "ip" } else { "ip -6" }, IpNet::from(asked));
    let route = format!("{ip} route replace {host}{}{}", via.unwrap_or_default(), device.unwrap_or_default());
    Ok(Step {
        state: State::Doubt,
        because: Some(format!(
            "packets of {full} bytes to {asked} are lost, those of {answered} bytes are answered, and no router says that they are too \
             large: a firewall on the way drops \"fragmentation needed\", or {asked} does not answer large echo requests"
        )),
        remedy: Some(format!(
            "let ICMP errors pass on that way (type 3 code 4, in IPv6 type 2); until then, `{route} mtu lock {answered}` on this node \
             tells its pods"
        )),
        ..Step::ok(NAME, format!("{asked} answers packets of {answered} bytes, and none of {full} bytes"))
    })
}

/// Returns the size in bytes that the kernel has learned for packets to this address from messages of routers, if there were any.
fn learned_mtu(to: IpAddr) -> Option<u32> {
    let packet = Packet { from: unspecified(to.is_ipv4()), to, proto: None, port: None };
    match Kernel::open().ok()?.route(&packet, None) {
        Lookup::Route(route) => route.mtu.filter(|_| route.mtu_is_learned),
        Lookup::Refused(_) | Lookup::Unreadable(_) => None,
    }
}

/// Returns the largest of the usual sizes below this one that is answered, or else [`SMALL`]. All of them are tried at once: packets that get lost
/// at random would mislead a search, which takes longer, too.
async fn largest(to: IpAddr, below: u16) -> Result<u16, EchoError> {
    let sizes = &SIZES[..SIZES.partition_point(|size| *size < below)];
    let answers = several(sizes, REQUESTS_OF_MANY, |size| round_trip(to, size)).await?;
    let answered = sizes.iter().zip(answers).filter(|(_, answers)| answers.answered > 0);
    Ok(answered.map(|(size, _)| *size).max().unwrap_or(SMALL))
}

/// Sends so many requests of one size.
async fn echoes(to: IpAddr, size: u16, number: u32) -> Result<Answers, EchoError> {
    let answers = several(&[size], number, |size| round_trip(to, size)).await?;
    Ok(answers.into_iter().next().unwrap_or_default())
}

/// Sends one request. Returns the round trip.
async fn round_trip(to: IpAddr, size: u16) -> Result<Option<Duration>, EchoError> {
    Ok(Echo { to, size, wait: WAIT, listen: None }.send().await?.round_trip)
}

#[cfg(test)]
mod tests {
    use weft_doctor::explain::facts::{Device, Hop, Peer, Route, Tunnel};
    use weft_doctor::kernel::rules::Connection;

    use super::*;

    #[test]
    fn the_loss_is_said_when_some_packets_arrive_and_others_do_not() {
        let asked: IpAddr = "10.5.2.0".parse().unwrap();
        let step = |sent, of_them, place: &Place| {
            let fastest = (of_them > 0).then_some(Duration::from_micros(70));
            answered(asked, 1450, Answers { sent, answered: of_them, fastest }, place)
        };
        for (sent, of_them, state, is) in [
            (1, 1, State::Ok, "10.5.2.0 answers a packet of 1450 bytes after 70µs"),
            (5, 5, State::Ok, "10.5.2.0 answers 5 packets of 1450 bytes, the fastest one after 70µs"),
            (5, 4, State::Unknown, "10.5.2.0 answers 4 of 5 packets of 1450 bytes"),
            (5, 3, State::Doubt, "10.5.2.0 answers 3 of 5 packets of 1450 bytes"),
            (5, 1, State::Doubt, "10.5.2.0 answers 1 of 5 packets of 1450 bytes"),
        ] {
            let found = step(sent, of_them, &Place::Network).unwrap();
            assert_eq!((found.state, found.is.as_str()), (state, is));
            assert_eq!(
                (found.because.is_some(), found.remedy.is_some()),
                (state == State::Doubt, state == State::Doubt)
            );
        }
        let lossy = step(5, 2, &Place::Network).unwrap();
        let because = lossy.because.unwrap();
        assert!(
            because.starts_with("3 of 5 packets of 1450 bytes to 10.5.2.0 are lost, and the others arrive"),
            "{because}"
        );
        assert_eq!(step(5, 0, &Place::Network), None, "silence is another step");
        // It may limit the number of its answers.
        assert_eq!(step(5, 1, &Place::Outside).map(|step| step.state), Some(State::Unknown));
    }

    fn device(name: &str, mtu: u32) -> Device {
        Device { name: name.to_owned(), mtu, ..Device::default() }
    }

    /// The way of a packet from a pod with a small MTU, over a route with a smaller one.
    fn way(to: &str) -> Way {
        let packet = Packet { from: "10.5.1.2".parse().unwrap(), to: to.parse().unwrap(), proto: None, port: None };
        let hop = Hop {
            lookup: Lookup::Route(Route { mtu: Some(1380), ..Route::default() }),
            device: Some(device("eth0", 1500)),
            nexthop: "192.0.2.9".parse().ok(),
            neighbour: None,
        };
        Way {
            packet,
            arrives: Some(device("cni0", 1400)),
            hop,
            tunnel: None,
            route_of_weft: None,
            connection: Connection::New,
            from_pod: None,
            to_pod: None,
            queues: None,
        }
    }

    /// Between nodes, the network should carry what the device carries. Outside, nothing larger is ever sent.
    #[test]
    fn the_largest_packet_is_that_of_the_device_and_outside_what_sender_and_route_let_pass() {
        let mut way = way("198.51.100.7");
        assert_eq!((full_size(&way, &Place::Network), full_size(&way, &Place::Outside)), (Some(1500), Some(1380)));
        way.hop.lookup = Lookup::Route(Route::default());
        assert_eq!(full_size(&way, &Place::Outside), Some(1400));
        way.arrives = None;
        assert_eq!(full_size(&way, &Place::Outside), Some(1500));
        way.hop.device = Some(device("lo", 65_536));
        assert_eq!(full_size(&way, &Place::Network), None, "no packet of IP is that large");
    }

    /// A pod may drop echo requests.
    #[test]
    fn the_node_of_a_pod_answers_for_it() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let subnets = ["10.5.2.0/24", "fd05:0:0:2::/64"].map(|net| net.parse::<IpNet>().unwrap());
        let peer = Place::Peer(Peer { subnets: subnets.into(), public: vec![ip("192.0.2.2")], ..Peer::default() });
        let through_tunnel = |to: &str| {
            let tunnel = Some(Tunnel { fdb: None, remote: None, outer: None, ends: None });
            answering(&Way { tunnel, ..way(to) }, &peer)
        };
        assert_eq!(through_tunnel("10.5.2.7"), ip("10.5.2.0"));
        assert_eq!(through_tunnel("fd05:0:0:2::7"), ip("fd05:0:0:2::"));
        assert_eq!(through_tunnel("192.0.2.2"), ip("192.0.2.2"), "it is the node itself");
        for (to, place, wanted) in [
            ("10.5.2.7", &peer, "192.0.2.9"),
            ("10.5.3.7", &Place::Network, "192.0.2.9"),
            ("198.51.100.7", &Place::Outside, "198.51.100.7"),
        ] {
            assert_eq!(answering(&way(to), place), ip(wanted), "{to}");
        }
    }
}
