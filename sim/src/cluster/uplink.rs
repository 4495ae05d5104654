// SPDX-License-Identifier: Apache-2.0
//! What happens to the uplinks of the machines and their addresses.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

use super::{Cluster, Recovery};
use crate::event::Event;
use crate::kernel::PERMANENT;
use crate::machine::{Machine, uplink};

impl Cluster {
    /// Events of the uplink and its addresses.
    pub(super) fn uplink_event(&mut self, now: u64, event: &Event) {
        match *event {
            Event::Renumber(number, seconds) => {
                let ip = self.machines[number].ip;
                // Each machine has two addresses, between which it changes.
                let other = Ipv4Addr::from_bits(ip.to_bits() ^ 128);
                self.take_address(number);
                self.machines[number].ip = other;
                self.later(now + seconds, Recovery::Address(number, other));
            }
            Event::Exchange(one, two) => {
                let (first, second) = (self.machines[one].ip, self.machines[two].ip);
                self.take_address(one);
                self.take_address(two);
                (self.machines[one].ip, self.machines[two].ip) = (second, first);
                self.later(now + 3, Recovery::Address(one, second));
                self.later(now + 3, Recovery::Address(two, first));
            }
            Event::AddressAway(number, seconds) => {
                let ip = self.machines[number].ip;
                self.take_address(number);
                self.later(now + seconds, Recovery::Address(number, ip));
            }
            Event::Vip(number) => {
                let address = IpNet::from(IpAddr::from(Ipv4Addr::from_bits(self.lan.network().to_bits() + 250)));
                if let Some(before) = self.vip.replace(number) {
                    self.machines[before].kernel.remove_address(uplink(), address);
                    self.machines[before].remember_foreign();
                }
                self.machines[number].kernel.add_address(uplink(), address, PERMANENT);
            }
            Event::LinkDown(number, seconds) => {
                self.machines[number].kernel.set_up(uplink(), false);
                self.later(now + seconds, Recovery::Up(number));
            }
            Event::Unplug(number, seconds) => {
                self.machines[number].kernel.set_carrier(uplink(), false);
                self.later(now + seconds, Recovery::Plug(number));
            }
            Event::NewUplink(number, seconds) => {
                self.machines[number].kernel.delete_link(uplink());
                if self.vip == Some(number) {
                    self.vip = None;
                }
                self.later(now + seconds, Recovery::Uplink(number));
            }
            _ => {}
        }
        self.machines.iter_mut().for_each(Machine::remember_foreign);
    }

    fn take_address(&mut self, number: usize) {
        let machine = &mut self.machines[number];
        let net = machine.net(machine.ip);
        // A pending recovery would bring an old address back.
        self.recoveries.retain(|_, recovery| !matches!(recovery, Recovery::Address(of, _) if *of == number));
        machine.kernel.remove_address(uplink(), net);
    }
}
