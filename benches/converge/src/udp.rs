// SPDX-License-Identifier: Apache-2.0
//! Measures the backend udp: what its tunnel carries ([`packets`]), and agents with many peers. It has no entries in the kernel, so a peer counts
//! as reached when a packet for its subnet leaves the node in a datagram for its published address.

mod packets;

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::measure::{Cell, Run, Who, quantile};
use crate::options::{Options, Row};
use crate::peers::{Backend, MOST, Peer, by_inner};
use crate::process::{Agent, Program};
use crate::site::{self, Node, pause};
use crate::store::Store;
use crate::table;

/// flannel's port.
const PORT: u16 = 8285;
/// The number of peers that a cold start must reach, spread over all peers.
const PROBES: usize = 32;
/// The number of cold starts.
const STARTS: usize = 3;
/// The number of peers that are added one after the other.
const ADDS: usize = 100;
/// The time between two packets to a peer that is not reached yet.
const AGAIN: Duration = Duration::from_millis(1);
/// How long an idle agent is watched.
const IDLE: Duration = Duration::from_secs(20);

/// Measures everything with this number of peers: with one peer what the tunnel carries, and with more of them what the agents need.
///
/// # Errors
/// A namespace, etcd or a program fails, or an agent does not reach its peers in time.
pub fn all(peers: usize, options: &Options, (run, nodes): (&mut Run, &mut usize)) -> Result<()> {
    if peers == 1 { throughput(options, run) } else { agents(peers, options, (run, nodes)) }
}

/// Measures packets between two nodes, if that row is wanted.
fn throughput(options: &Options, run: &mut Run) -> Result<()> {
    if !options.wants(Row::Packets) {
        return Ok(());
    }
    for (row, who, mut rates) in packets::measure(options.flanneld.clone())? {
        let rounds: Vec<String> = rates.iter().map(|rate| format!("{rate:.0}")).collect();
        eprintln!("   {row}, Mbit/s in each round: {}", rounds.join(", "));
        rates.sort_by(f64::total_cmp);
        table::tell(run, (Backend::Udp.name(), 1), (row, who), Cell::Value(rates[rates.len() / 2]));
    }
    Ok(())
}

/// Measures agents with this number of peers.
fn agents(peers: usize, options: &Options, (run, nodes): (&mut Run, &mut usize)) -> Result<()> {
    anyhow::ensure!(peers >= PROBES && peers + ADDS <= MOST, "between {PROBES} and {} peers", MOST - ADDS);
    published("add")?;
    let fabric = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).context("bind the port of the peers")?;
    fabric.set_read_timeout(Some(AGAIN)).context("bound a read")?;
    let mut store = Store::start(Backend::Udp)?;
    store.put((0..peers).map(Peer::new))?;
    let list = Cell::time(Some(store.list_time()?), Duration::ZERO);
    let mut place = Place { options, store, fabric, peers, run, nodes };
    place.note("list", Who::Floor, list);
    place.program(&Program::Weft(options.weft.clone(), options.agent_flags.clone()), Who::Weft).context("weft")?;
    if let Some(path) = &options.flanneld {
        place.program(&Program::Flanneld(path.clone()), Who::Flanneld).context("flanneld")?;
    }
    published("del")
}

/// Gives the published addresses of all peers to the fabric (`add`), or takes them away again (`del`).
fn published(verb: &str) -> Result<()> {
    site::command("ip", &["route", verb, "local", "172.16.0.0/13", "dev", "lo"]).map(drop)
}

struct Place<'a> {
    options: &'a Options,
    store: Store,
    fabric: UdpSocket,
    peers: usize,
    run: &'a mut Run,
    nodes: &'a mut usize,
}

impl Place<'_> {
    fn note(&mut self, what: &str, who: Who, cell: Cell) {
        table::tell(self.run, (Backend::Udp.name(), self.peers), (what, who), cell);
    }

    fn program(&mut self, program: &Program, who: Who) -> Result<()> {
        let (agent, node) = self.starts(program, who)?;
        pause(Duration::from_secs(1));
        let (now, peak) = agent.memory()?;
        self.note("memory", who, Cell::Value(now));
        self.note("memory, peak", who, Cell::Value(peak));
        if self.options.wants(Row::Event) {
            let adds = self.adds(&node)?;
            for (name, part) in [("add p50", 0.5), ("add p99", 0.99)] {
                self.note(name, who, Cell::time(quantile(&adds, part), Duration::ZERO));
            }
        }
        if self.options.wants(Row::Idle) {
            let (before, begin) = (agent.cpu()?, Instant::now());
            pause(IDLE);
            let share = (agent.cpu()? - before).as_secs_f64() / begin.elapsed().as_secs_f64();
            self.note("CPU idle", who, Cell::Value(share * 100.0));
        }
        agent.stop().map(drop)
    }

    /// Starts a program on fresh nodes. Returns the last agent with its node.
    fn starts(&mut self, program: &Program, who: Who) -> Result<(Agent, Node)> {
        let (mut times, mut cpus, mut last) = (Vec::new(), Vec::new(), None);
        for _ in 0..STARTS {
            // The agent must end before its node is deleted.
            if let Some((agent, node)) = last.take() {
                drop::<Agent>(agent);
                drop::<Node>(node);
            }
            *self.nodes += 1;
            let node = Node::new(&format!("u{}", self.nodes), Backend::Udp)?;
            let agent = Agent::start(program, &node, self.store.dir.path())?;
            let probes = (0..PROBES).map(|n| n * (self.peers - 1) / (PROBES - 1)).collect();
            let reached = self.reached(&node, probes)?;
            times.push(reached - agent.started);
            cpus.push(agent.cpu()?);
            last = Some((agent, node));
        }
        self.note("cold start", who, Cell::time(quantile(&times, 0.5), Duration::ZERO));
        self.note("cold start, CPU", who, Cell::time(quantile(&cpus, 0.5), Duration::ZERO));
        last.context("nothing was started")
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
            forget_arrived(&fabric)?;
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

/// Takes everything out of the queue of a socket. Packets that an earlier agent sent may still be in it, and would count for the next one.
fn forget_arrived(socket: &UdpSocket) -> Result<()> {
    socket.set_nonblocking(true).context("do not wait for packets")?;
    while socket.recv(&mut [0; 2048]).is_ok() {}
    socket.set_nonblocking(false).context("wait for packets")
}

/// Returns the destination of the IPv4 packet in a datagram.
fn destination(packet: &[u8]) -> Option<IpAddr> {
    let address: [u8; 4] = packet.get(16..20)?.try_into().ok()?;
    (packet[0] >> 4 == 4).then(|| Ipv4Addr::from(address).into())
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

    #[test]
    fn packets_that_have_arrived_are_forgotten_and_later_ones_are_not() {
        let receiver = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let sender = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let send = |text: &[u8]| sender.send_to(text, receiver.local_addr().unwrap()).unwrap();
        send(b"earlier");
        send(b"earlier");
        forget_arrived(&receiver).unwrap();
        send(b"now");
        let mut buffer = [0; 16];
        let length = receiver.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"now");
    }
}
