// SPDX-License-Identifier: Apache-2.0
//! What operators write into net-conf, and what writers with the rights of one node write into the store.

use super::{Cluster, Recovery};
use crate::event::Event;
use crate::hostile::{self, Attack, Victim};

/// A writer that attacks the cluster.
#[derive(Debug)]
pub(super) struct Writer {
    /// The name of its Node.
    name: String,
    attack: Attack,
    victim: usize,
    /// How many seconds it has attacked.
    second: u64,
    /// The keys that it has written.
    keys: Vec<String>,
}

impl Cluster {
    /// Changes net-conf.
    pub(super) fn conf_event(&mut self, now: u64, event: &Event) {
        match event {
            Event::NetConf(edit) => self.net_conf.edit(edit),
            Event::BadNetConf(bad, seconds) => {
                self.net_conf.bad = Some(*bad);
                self.later(now + seconds, Recovery::NetConf);
            }
            _ => {}
        }
        self.store.write_net_conf(&self.net_conf);
        if self.store.has_nodes() {
            // Each kubelet notices at a time of its own.
            for number in 0..self.machines.len() {
                self.later(now + (number as u64 * 17 + now) % 60, Recovery::NetConfFile(number));
            }
        }
    }

    /// Brings a net-conf back that nodes can use.
    pub(super) fn correct_net_conf(&mut self) {
        self.net_conf.bad = None;
        self.store.write_net_conf(&self.net_conf);
        for number in 0..self.machines.len() {
            self.store.write_net_conf_file(number, &self.net_conf);
        }
    }

    /// Begins an attack on a machine.
    pub(super) fn attack_event(&mut self, now: u64, attack: Attack, victim: usize, seconds: u64) {
        let name = format!("evil{}", self.count);
        self.later(now + seconds, Recovery::Attack(name.clone()));
        self.writers.push(Writer { name, attack, victim, second: 0, keys: Vec::new() });
    }

    /// Lets the writers write what they write in this second.
    pub fn attack(&mut self) {
        let mut writers = std::mem::take(&mut self.writers);
        for writer in &mut writers {
            let machine = &self.machines[writer.victim];
            let pods = machine.pods();
            let data = pods.and_then(|pods| self.store.backend_data(writer.victim, &pods));
            let victim = Victim { ip: machine.ip, pods, data, lan: self.lan, copies_identity: self.store.has_nodes() };
            for lie in hostile::lies(writer.attack, writer.second, &victim) {
                self.store.write_lie(&writer.name, &lie);
                writer.keys.push(lie.key);
            }
            writer.keys.sort_unstable();
            writer.keys.dedup();
            writer.second += 1;
        }
        self.writers = writers;
    }

    /// Ends an attack, and removes what was written.
    pub(super) fn end_attack(&mut self, name: &str) {
        let (ended, others) = std::mem::take(&mut self.writers).into_iter().partition(|writer| writer.name == name);
        self.writers = others;
        let ended: Vec<Writer> = ended;
        for writer in ended {
            self.store.remove_lies(&writer.name, &writer.keys);
        }
    }

    /// Returns true if a writer publishes the address of this machine. A machine that knows nothing else of itself then takes another subnet
    /// (docs/security.md).
    pub fn is_claimed(&self, number: usize) -> bool {
        self.writers.iter().any(|writer| writer.attack == Attack::PeerAddress && writer.victim == number)
    }
}
