// SPDX-License-Identifier: Apache-2.0
//! The invariant of scenarios whose events cost no packet: a packet between any two machines arrives at every moment, also while agents are
//! down, frozen or cut off from the store, and while net-conf changes.

use std::net::IpAddr;

use crate::check::first_pod;
use crate::cluster::Cluster;
use crate::walk::Fabric;

/// Follows the packets of a cluster.
#[derive(Debug, Default)]
pub struct Lossless {
    /// All packets have arrived at some moment. Before that, the cluster begins.
    begun: bool,
    /// The state of all kernels at the last look.
    seen: Option<u64>,
}

impl Lossless {
    /// Returns which packets do not arrive now.
    pub fn look(&mut self, cluster: &Cluster) -> Vec<String> {
        let state = cluster.machines.iter().map(|machine| machine.kernel.version()).sum();
        if self.seen.replace(state) == Some(state) && self.begun {
            return Vec::new();
        }
        let pods: Vec<Option<IpAddr>> =
            cluster.machines.iter().map(|machine| machine.pods().as_ref().and_then(first_pod)).collect();
        let fabric = Fabric::new(&cluster.machines);
        let mut lost = Vec::new();
        for from in 0..pods.len() {
            for (to, pod) in pods.iter().enumerate().filter(|(to, _)| *to != from) {
                let arrived = pod.map(|pod| fabric.send(from, pod));
                match arrived {
                    Some(Ok(at)) if at == to => {}
                    Some(Err(error)) => lost.push(format!("a packet from n{from} to n{to} is lost: {error}")),
                    Some(Ok(at)) => lost.push(format!("a packet from n{from} to n{to} arrives at n{at}")),
                    None => lost.push(format!("n{to} has no subnet.env")),
                }
            }
        }
        let begins = !self.begun;
        self.begun |= lost.is_empty();
        if begins { Vec::new() } else { lost }
    }
}
