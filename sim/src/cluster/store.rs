// SPDX-License-Identifier: Apache-2.0
//! What happens to the store, and the false leases in it.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

use super::{Cluster, Recovery};
use crate::event::Event;
use crate::store::FalseLease;

impl Cluster {
    /// Returns an address of the LAN that no machine has.
    fn unused_address(&self, number: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.lan.network().to_bits() + 250 + number)
    }

    fn add_lease(&mut self, until: u64, lease: FalseLease) {
        self.store.add_lease(&lease);
        self.later(until, Recovery::FalseLease(lease));
    }

    /// Events of the store.
    pub(super) fn store_event(&mut self, now: u64, event: &Event) {
        self.interventions += 1;
        match *event {
            Event::Wipe(other) => {
                self.store.wipe(other);
                self.register_all(now + 3);
            }
            Event::Backup => {
                self.store.back_up();
                self.saved_net_conf = Some(self.net_conf.clone());
            }
            Event::Restore => {
                self.store.restore();
                self.net_conf = self.saved_net_conf.clone().unwrap_or_else(|| self.net_conf.clone());
                if self.store.has_nodes() || self.net_conf.bad.is_some() {
                    self.later(now + 3, Recovery::NetConf);
                }
                // A Node may be younger than the backup.
                self.register_all(now + 3);
            }
            Event::Compact => self.store.compact(),
            Event::DeleteLease(number) => self.store.delete_lease(number, self.machines[number].pods().as_ref()),
            Event::DeleteNode(number, seconds) if self.store.has_nodes() => {
                self.store.delete_node(number);
                self.later(now + seconds, Recovery::Register(number));
                self.later(now + seconds + 2, Recovery::Assign(number));
            }
            Event::LanLease(seconds) => {
                let subnet = Ipv4Net::new_assert(self.lan.network(), 24);
                let data = r#"{"VNI":1,"VtepMAC":"0e:66:00:00:00:01"}"#.to_owned();
                self.add_lease(
                    now + seconds,
                    FalseLease { name: "lan".to_owned(), subnet, public: self.unused_address(1), data },
                );
            }
            Event::OtherVni(vni, seconds) => {
                let subnet = Ipv4Net::new_assert(Ipv4Addr::new(10, 62, 254, 0), 24);
                let data = format!(r#"{{"VNI":{vni},"VtepMAC":"0e:66:00:00:00:02"}}"#);
                self.add_lease(
                    now + seconds,
                    FalseLease { name: "vni".to_owned(), subnet, public: self.unused_address(2), data },
                );
            }
            Event::CopiedIdentity(number, seconds) => {
                let pods = self.machines[number].pods();
                let data = pods.and_then(|pods| self.store.backend_data(number, &pods));
                if let Some(data) = data.filter(|_| !self.copied.contains_key(&number)) {
                    let third = u8::try_from(number % 100).unwrap_or(0);
                    let subnet = Ipv4Net::new_assert(Ipv4Addr::new(10, 63, third, 0), 24);
                    let (name, public) = (format!("copy{number}"), self.unused_address(1));
                    let lease = FalseLease { name, subnet, public, data };
                    self.store.add_lease(&lease);
                    self.copied.insert(number, public);
                    self.later(now + seconds, Recovery::Copy(number, lease));
                }
            }
            _ => {}
        }
    }
}
