// SPDX-License-Identifier: Apache-2.0
//! Measures agents with the backend udp. It has no entries in the kernel, so a peer counts as reached when a packet for its subnet leaves the
//! node in a datagram for its published address.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::measure::quantile;
use crate::options::UdpOptions;
use crate::peers::{Backend, MOST, Peer, by_inner};
use crate::process::{Agent, Program};
use crate::site::{self, Node, pause};
use crate::store::Store;

/// flannel's port.
const PORT: u16 = 8285;
/// The number of peers that a cold start must reach, spread over all peers.
const PROBES: usize = 32;
/// The number of peers that are added one after the other.
const ADDS: usize = 100;
/// The time between two packets to a peer that is not reached yet.
const AGAIN: Duration = Duration::from_millis(1);
/// How long an idle agent is watched.
const IDLE: Duration = Duration::from_secs(20);

/// What was measured of a program: the name with its unit, and the value.
type Figures = Vec<(&'static str, f64)>;

/// Measures, and prints a table for each number of peers.
///
/// # Errors
/// A namespace, etcd or an agent fails, or an agent does not reach its peers in time.
pub fn run(options: &UdpOptions) -> Result<bool> {
    site::build()?;
    // The fabric has the published addresses of all peers.
    site::command("ip", &["route", "add", "local", "172.16.0.0/13", "dev", "lo"])?;
    let fabric = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).context("bind the port of the peers")?;
    fabric.set_read_timeout(Some(AGAIN)).context("bound a read")?;
    let weft = Program::Weft(options.weft.clone(), Vec::new());
    let programs: Vec<Program> = std::iter::once(weft).chain(options.flanneld.clone().map(Program::Flanneld)).collect();
    let mut nodes = 0;
    for peers in options.sizes.iter().copied() {
        anyhow::ensure!(peers >= PROBES && peers + ADDS <= MOST, "between {PROBES} and {} peers", MOST - ADDS);
        let mut store = Store::start(Backend::Udp)?;
        store.put((0..peers).map(Peer::new))?;
        crate::say(&format!("udp, {peers} peers: a list of all leases takes {} ms", ms(store.list_time()?)));
        for program in &programs {
            let mut place = Place { options, store: &mut store, fabric: &fabric, peers };
            let figures = place.measure(program, &mut nodes).with_context(|| program.name().to_owned())?;
            for (what, value) in figures {
                crate::say(&format!("  {:<9} {what}: {value:.2}", program.name()));
            }
        }
    }
    Ok(true)
}

struct Place<'a> {
    options: &'a UdpOptions,
    store: &'a mut Store,
    fabric: &'a UdpSocket,
    peers: usize,
}

impl Place<'_> {
    fn measure(&mut self, program: &Program, nodes: &mut usize) -> Result<Figures> {
        let (mut starts, mut last) = (Vec::new(), None);
        for _ in 0..self.options.repeat.max(1) {
            // The agent must end before its node is deleted.
            if let Some((agent, node)) = last.take() {
                drop::<Agent>(agent);
                drop::<Node>(node);
            }
            *nodes += 1;
            let node = Node::new(&format!("u{nodes}"), Backend::Udp)?;
            let agent = Agent::start(program, &node, self.store.dir.path())?;
            let probes = (0..PROBES).map(|n| n * (self.peers - 1) / (PROBES - 1)).collect();
            let reached = self.reached(&node, probes)?;
            starts.push((reached - agent.started, agent.cpu()?));
            last = Some((agent, node));
        }
        let (agent, node) = last.context("nothing was started")?;
        let median = |times: Vec<Duration>| quantile(&times, 0.5).map_or(0.0, |time| time.as_secs_f64() * 1e3);
        let mut figures = vec![
            ("cold start, ms", median(starts.iter().map(|(took, _)| *took).collect())),
            ("cold start, CPU, ms", median(starts.iter().map(|(_, cpu)| *cpu).collect())),
        ];
        pause(Duration::from_secs(1));
        let (now, peak) = agent.memory()?;
        figures.extend([("memory, MB", now), ("memory, peak, MB", peak)]);
        let adds = self.adds(&node)?;
        figures.push(("add p50, ms", quantile(&adds, 0.5).map_or(0.0, |time| time.as_secs_f64() * 1e3)));
        figures.push(("add p99, ms", quantile(&adds, 0.99).map_or(0.0, |time| time.as_secs_f64() * 1e3)));
        let (before, begin) = (agent.cpu()?, Instant::now());
        pause(IDLE);
        let share = (agent.cpu()? - before).as_secs_f64() / begin.elapsed().as_secs_f64();
        figures.push(("CPU idle, %", share * 100.0));
        agent.stop()?;
        drop(node);
        Ok(figures)
    }

    /// Adds peers one after the other, and removes them together. Returns how long after its lease each was reached.
    fn adds(&mut self, node: &Node) -> Result<Vec<Duration>> {
        let all = self.peers..self.peers + ADDS;
        let mut times = Vec::new();
        for number in all.clone() {
            let begin = Instant::now();
            self.store.put(std::iter::once(Peer::new(number)))?;
            times.push(self.reached(node, BTreeSet::from([number]))? - begin);
        }
        self.store.delete(all.map(Peer::new))?;
        Ok(times)
    }

    /// Sends packets to these peers until each has got one, and returns when that was.
    fn reached(&self, node: &Node, mut missing: BTreeSet<usize>) -> Result<Instant> {
        let (fabric, limit) = (self.fabric.try_clone().context("copy a socket")?, self.options.limit);
        node.run(move || {
            let sender = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).context("bind a socket")?;
            let (end, mut buffer) = (Instant::now() + Duration::from_secs(limit), [0; 2048]);
            while !missing.is_empty() {
                anyhow::ensure!(Instant::now() < end, "{} peers are not reached after {limit} s", missing.len());
                for number in &missing {
                    // Before the agent has its route, there is an error.
                    let _ = sender.send_to(b"weft", (Peer::new(*number).inner(false), 9));
                }
                while let (false, Ok(length)) = (missing.is_empty(), fabric.recv(&mut buffer)) {
                    if let Some(number) = destination(&buffer[..length]).and_then(by_inner) {
                        missing.remove(&number);
                    }
                }
            }
            Ok(Instant::now())
        })?
    }
}

/// Returns the destination of the IPv4 packet in a datagram.
fn destination(packet: &[u8]) -> Option<IpAddr> {
    let address: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
    (packet[0] >> 4 == 4).then(|| Ipv4Addr::from(address).into())
}

fn ms(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_destination_of_a_packet_leads_to_its_peer() {
        let mut packet = [0; 24];
        packet[0] = 0x45;
        packet[16..20].copy_from_slice(&[10, 1, 7, 0]);
        assert_eq!(destination(&packet).and_then(by_inner), Some(7));
        assert_eq!(destination(&packet[..19]), None);
        packet[0] = 0x60;
        assert_eq!(destination(&packet), None);
    }
}
