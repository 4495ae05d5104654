// SPDX-License-Identifier: Apache-2.0
//! A kernel in memory that knows how many peers it has a route to.

use std::cell::Cell;
use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;

use anyhow::{Context, Result};
use ipnet::{IpNet, Ipv4Net};
use weft::kernel::fake::FakeKernel;
use weft::kernel::{AddrInfo, Creator, Kernel, LinkInfo, Machine, Outcome, RouteInfo, RouteLookup, Session};
use weft_backends::diff::Op;
use weft_backends::host::Reach;
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, Name, Observed, Route, Value};

/// The host's only link.
const UPLINK: &str = "eth0";
/// The flag of an address that is permanent (`IFA_F_PERMANENT`).
const PERMANENT: u32 = 0x80;

/// Returns the address of a node on the network between the nodes.
pub fn address(number: usize) -> Result<Ipv4Addr> {
    let offset = u32::try_from(number + 1).context("too many nodes")?;
    Ok(Ipv4Addr::from(u32::from(Ipv4Addr::new(172, 16, 0, 0)) + offset))
}

/// Returns a host with one uplink, which has the address of this node.
fn machine(number: usize) -> Result<Machine> {
    let name = Name::new(UPLINK).context("a name of a link")?;
    let route =
        |net: Ipv4Net, reach| RouteInfo { net: net.into(), metric: 0, dev: Some(name), via: None, reach, protocol: 2 };
    let link = LinkInfo {
        index: 2,
        name,
        mtu: 1500,
        mac: None,
        up: true,
        carrier: true,
        loopback: false,
        creator: Creator::Unknown,
    };
    let net = Ipv4Net::new(address(number)?, 12).context("an address")?;
    Ok(Machine {
        links: vec![link],
        addrs: vec![AddrInfo { index: 2, net: net.into(), scope: 0, flags: PERMANENT }],
        routes: vec![route(Ipv4Net::default(), Reach::Gateway), route(net.trunc(), Reach::Link(name))],
        lookup: None,
    })
}

/// The kernel of one node.
pub struct CountingKernel {
    inside: FakeKernel,
    routes: HashSet<IpNet>,
    peers: Rc<Cell<usize>>,
}

impl CountingKernel {
    /// Returns an empty kernel, and the number of peers that have a route in it.
    ///
    /// # Errors
    /// The number of the node is too large.
    pub fn new(number: usize) -> Result<(CountingKernel, Rc<Cell<usize>>)> {
        let peers = Rc::new(Cell::new(0));
        let inside = FakeKernel::new(machine(number)?, PROTOCOL);
        Ok((CountingKernel { inside, routes: HashSet::new(), peers: peers.clone() }, peers))
    }
}

impl Kernel for CountingKernel {
    fn machine(&mut self) -> io::Result<Machine> {
        self.inside.machine()
    }

    fn look_up_route(&mut self, to: IpAddr) -> io::Result<Option<RouteLookup>> {
        self.inside.look_up_route(to)
    }

    fn observe(&mut self, devices: &[Name]) -> io::Result<Observed> {
        self.inside.observe(devices)
    }

    fn sessions(&mut self, devices: &[Name]) -> io::Result<Vec<Session>> {
        self.inside.sessions(devices)
    }

    fn apply(&mut self, ops: &[Op]) -> Vec<Outcome> {
        let outcomes = self.inside.apply(ops);
        // The record of all operations would be the larger part of the memory.
        self.inside.take_ops();
        for (op, outcome) in ops.iter().zip(&outcomes) {
            match (op, outcome) {
                (
                    Op::Ensure(Key::Route(net, _), Value::Route(Route::Unicast { .. }))
                    | Op::Recreate(Key::Route(net, _), Value::Route(Route::Unicast { .. })),
                    Outcome::Done,
                ) => {
                    self.routes.insert(*net);
                }
                (Op::Remove(Key::Route(net, _), _), Outcome::Done) => {
                    self.routes.remove(net);
                }
                _ => {}
            }
        }
        self.peers.set(self.routes.len());
        outcomes
    }
}
