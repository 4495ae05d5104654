// SPDX-License-Identifier: Apache-2.0
//! The cluster: its machines and its store, what each event does to them, and how they recover from it.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::Context;
use ipnet::{IpNet, Ipv4Net};
use weft::options::OnLostLease;
use weft_backends::owner::PROTOCOL;
use weft_backends::state::{Key, ObservedValue, Route, Value};

use crate::etcd::Etcd;
use crate::event::{Event, Trouble};
use crate::kernel::{PERMANENT, STATIC, everywhere};
use crate::machine::{Machine, PREFIX, Site, uplink};
use crate::scenario::Scenario;
use crate::server::{Disorder, Server};
use crate::timeline;

/// RTPROT_BOOT, which `ip route add` writes.
const BOOT: u8 = 3;

/// What ends an event that lasts.
#[derive(Debug, Clone)]
enum Recovery {
    Start(usize),
    Thaw(usize),
    Up(usize),
    Plug(usize),
    Uplink(usize),
    Address(usize, Ipv4Addr),
    Hear(usize),
    Wire(usize),
    Lag(usize),
    DeleteKey(String),
}

/// The machines and the store.
#[derive(Debug)]
pub struct Cluster {
    /// The machines, by number.
    pub machines: Vec<Machine>,
    /// The store.
    pub server: Server,
    net_conf: String,
    lan: Ipv4Net,
    backup: Option<Etcd>,
    vip: Option<usize>,
    clusters: u64,
    /// What recovers at which second.
    recoveries: BTreeMap<(u64, u64), Recovery>,
    count: u64,
}

impl From<Trouble> for Disorder {
    fn from(trouble: Trouble) -> Disorder {
        match trouble {
            Trouble::Silence => Disorder::Silence,
            Trouble::Refused => Disorder::Refused,
            Trouble::AnswersLost => Disorder::AnswersLost,
        }
    }
}

impl Cluster {
    /// Returns a cluster in which no agent runs yet.
    pub fn new(scenario: &Scenario) -> anyhow::Result<Cluster> {
        let lan: Ipv4Net = if scenario.lan_inside { "10.128.0.0/16" } else { "192.168.0.0/16" }.parse()?;
        let mut etcd = Etcd::new(0x1000);
        etcd.write(&format!("{PREFIX}/config"), &scenario.net_conf());
        let server = Server::start(etcd);
        let lease_ttl = Duration::from_secs(scenario.lease_ttl);
        let site = Site { lan, lease_ttl, on_lost_lease: OnLostLease::Reacquire };
        let machines = (0..scenario.machines).map(|number| Machine::new(number, site, &server));
        let machines = machines.collect::<Result<_, _>>().context("make the directories of the machines")?;
        let (net_conf, backup, vip) = (scenario.net_conf(), None, None);
        let recoveries = BTreeMap::new();
        Ok(Cluster { machines, server, net_conf, lan, backup, vip, clusters: 0x1000, recoveries, count: 0 })
    }

    fn later(&mut self, at: u64, recovery: Recovery) {
        self.count += 1;
        self.recoveries.insert((at, self.count), recovery);
    }

    /// Lets everything recover whose time has come.
    pub fn recover(&mut self, now: u64) -> anyhow::Result<()> {
        while let Some(entry) = self.recoveries.first_entry().filter(|entry| entry.key().0 <= now) {
            let recovery = entry.remove();
            timeline::note(&format!("recovery: {recovery:?}"));
            self.carry_out(recovery)?;
        }
        Ok(())
    }

    /// Lets everything recover.
    pub fn recover_all(&mut self) -> anyhow::Result<()> {
        self.recover(u64::MAX)?;
        for number in 0..self.machines.len() {
            self.carry_out(Recovery::Start(number))?;
        }
        Ok(())
    }

    fn carry_out(&mut self, recovery: Recovery) -> anyhow::Result<()> {
        match recovery {
            Recovery::Start(number) => self.machines[number].start()?,
            Recovery::Thaw(number) => self.machines[number].freeze(false),
            Recovery::Hear(number) => self.machines[number].kernel.lose_notifications(false),
            Recovery::Wire(number) => self.machines[number].wire.set(Disorder::None),
            Recovery::Lag(number) => self.machines[number].wire.set_lag(Duration::ZERO),
            Recovery::DeleteKey(key) => self.server.change(|etcd| etcd.delete_prefix(&key)),
            Recovery::Up(number) => {
                let machine = &mut self.machines[number];
                machine.kernel.set_up(uplink(), true);
                let ip = machine.ip;
                machine.set_address(ip);
            }
            Recovery::Plug(number) => {
                self.machines[number].kernel.set_carrier(uplink(), true);
                self.machines[number].remember_foreign();
            }
            Recovery::Uplink(number) => {
                let machine = &mut self.machines[number];
                if !machine.kernel.has_link(uplink()) {
                    machine.add_uplink();
                }
            }
            Recovery::Address(number, ip) => self.machines[number].set_address(ip),
        }
        Ok(())
    }

    /// Carries out an event at this second.
    pub fn event(&mut self, now: u64, event: &Event) -> anyhow::Result<()> {
        timeline::note(&format!("event: {event:?}"));
        match *event {
            Event::Kill(number, seconds) => {
                self.machines[number].kill();
                self.later(now + seconds, Recovery::Start(number));
            }
            Event::Terminate(number, seconds) => {
                self.machines[number].terminate();
                self.later(now + seconds.max(3), Recovery::Start(number));
            }
            Event::Freeze(number, seconds) => {
                self.machines[number].freeze(true);
                self.later(now + seconds, Recovery::Thaw(number));
            }
            Event::Reboot(..) | Event::NewDisk(..) | Event::CloneDisk(..) => self.boot_event(now, event)?,
            Event::Deaf(number, seconds) => {
                self.machines[number].kernel.lose_notifications(true);
                self.later(now + seconds, Recovery::Hear(number));
            }
            Event::Clock(number, by) => self.machines[number].clock.set(by),
            Event::Wire(number, trouble, seconds) => {
                self.machines[number].wire.set(trouble.into());
                self.later(now + seconds, Recovery::Wire(number));
            }
            Event::Outage(trouble, seconds) => {
                for number in 0..self.machines.len() {
                    self.machines[number].wire.set(trouble.into());
                    self.later(now + seconds, Recovery::Wire(number));
                }
            }
            Event::Lag(number, ms, seconds) => {
                self.machines[number].wire.set_lag(Duration::from_millis(ms));
                self.later(now + seconds, Recovery::Lag(number));
            }
            Event::DeleteDevices(number)
            | Event::FlushRoutes(number)
            | Event::DeleteEntry(number, _)
            | Event::Hijack(number, _)
            | Event::ForeignRoute(number, _) => self.entry_event(number, event),
            Event::Renumber(..)
            | Event::Exchange(..)
            | Event::AddressAway(..)
            | Event::Vip(_)
            | Event::LinkDown(..)
            | Event::Unplug(..)
            | Event::NewUplink(..) => self.uplink_event(now, event),
            _ => self.store_event(now, event),
        }
        Ok(())
    }

    /// Events after which a machine boots.
    fn boot_event(&mut self, now: u64, event: &Event) -> anyhow::Result<()> {
        let (number, seconds) = match *event {
            Event::Reboot(number, seconds) => (number, seconds),
            Event::NewDisk(number) | Event::CloneDisk(number, _) => (number, 5),
            _ => return Ok(()),
        };
        self.machines[number].kill();
        match *event {
            Event::NewDisk(_) => self.machines[number].clear_disk()?,
            Event::CloneDisk(_, from) => {
                let (machine, from) = (&self.machines[number], &self.machines[from]);
                machine.copy_disk_of(from)?;
            }
            _ => self.machines[number].clear_run_dir()?,
        }
        if self.vip == Some(number) {
            self.vip = None;
        }
        self.machines[number].boot();
        self.later(now + seconds, Recovery::Start(number));
        Ok(())
    }

    /// Events of the uplink and its addresses.
    fn uplink_event(&mut self, now: u64, event: &Event) {
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
                let address =
                    IpNet::from(std::net::IpAddr::from(Ipv4Addr::from_bits(self.lan.network().to_bits() + 250)));
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

    /// Events in which somebody changes entries of the kernel.
    fn entry_event(&mut self, number: usize, event: &Event) {
        let gateway = self.machines[number].gateway();
        let machine = &mut self.machines[number];
        let entries = machine.kernel.entries();
        let ours = |key: &Key, seen: &ObservedValue| match key {
            Key::Route(..) => seen.protocol == PROTOCOL,
            _ => true,
        };
        let all: Vec<Key> = entries.iter().filter(|(key, seen)| ours(key, seen)).map(|(key, _)| *key).collect();
        let static_route = |net| {
            let value = Value::Route(Route::Unicast { via: gateway.into(), dev: uplink(), onlink: false });
            (Key::Route(net, 0), Some(ObservedValue { value, protocol: BOOT, mark: false }))
        };
        match *event {
            Event::DeleteDevices(_) => {
                let devices = all.into_iter().filter(|key| matches!(key, Key::Link(_)));
                devices.for_each(|key| machine.kernel.disturb(key, None));
            }
            Event::FlushRoutes(_) => {
                let routes = all.into_iter().filter(|key| matches!(key, Key::Route(..)));
                routes.for_each(|key| machine.kernel.disturb(key, None));
            }
            Event::DeleteEntry(_, which) if !all.is_empty() => machine.kernel.disturb(all[which % all.len()], None),
            Event::Hijack(_, which) => {
                let routes: Vec<IpNet> =
                    all.iter().filter_map(|key| if let Key::Route(net, 0) = key { Some(*net) } else { None }).collect();
                if let (Some(net), true) = (routes.get(which % routes.len().max(1)), machine.kernel.is_up(uplink())) {
                    let (key, mut seen) = static_route(*net);
                    seen.iter_mut().for_each(|seen| seen.protocol = STATIC);
                    machine.kernel.disturb(key, seen);
                    machine.give_up(key);
                }
            }
            Event::ForeignRoute(_, which) if machine.kernel.is_up(uplink()) => {
                let net = Ipv4Net::new_assert(Ipv4Addr::new(10, 100, which, 0), 24);
                let (key, seen) = static_route(net.into());
                machine.kernel.disturb(key, seen);
            }
            _ => {}
        }
        machine.remember_foreign();
    }

    /// Events of the store.
    fn store_event(&mut self, now: u64, event: &Event) {
        match *event {
            Event::Wipe(other) => {
                self.clusters += u64::from(other);
                let mut empty = Etcd::new(self.clusters);
                empty.write(&format!("{PREFIX}/config"), &self.net_conf);
                self.server.restart_with(empty);
            }
            Event::Backup => self.backup = Some(self.server.read(Etcd::clone)),
            Event::Restore => {
                if let Some(backup) = self.backup.clone() {
                    self.server.restart_with(backup);
                }
            }
            Event::Compact => self.server.change(Etcd::compact),
            Event::DeleteLease(number) => {
                let key = self.machines[number].pods().map(|pods| format!("{PREFIX}/subnets/{}", pods.to_key()));
                key.into_iter().for_each(|key| self.server.change(|etcd| etcd.delete_prefix(&key)));
            }
            Event::LanLease(seconds) => {
                let net = Ipv4Net::new_assert(self.lan.network(), 24);
                let key = format!("{PREFIX}/subnets/{}-24", net.network());
                let data = r#"{"VNI":1,"VtepMAC":"0e:66:00:00:00:01"}"#;
                let public = Ipv4Addr::from_bits(net.network().to_bits() + 251);
                let value = format!(r#"{{"PublicIP":"{public}","BackendType":"vxlan","BackendData":{data}}}"#);
                self.server.change(|etcd| etcd.write(&key, &value));
                self.later(now + seconds, Recovery::DeleteKey(key));
            }
            Event::CopiedIdentity(number, seconds) => {
                let prefix = format!("{PREFIX}/subnets/");
                let own = self.machines[number].pods().map(|pods| format!("{prefix}{}", pods.to_key()));
                let value =
                    self.server.read(|etcd| etcd.all(&prefix)).into_iter().find(|(key, _)| Some(key) == own.as_ref());
                if let Some((_, value)) = value {
                    let public = self.machines[number].ip.to_string();
                    let other = Ipv4Addr::from_bits(self.lan.network().to_bits() + 251).to_string();
                    let key = format!("{prefix}10.63.255.0-24");
                    self.server.change(|etcd| etcd.write(&key, &value.replace(&public, &other)));
                    self.later(now + seconds, Recovery::DeleteKey(key));
                }
            }
            _ => {}
        }
    }

    /// Returns true if the host has its default route, for messages.
    pub fn has_default_route(&self, number: usize) -> bool {
        self.machines[number].kernel.with_entries(|entries| entries.contains_key(&Key::Route(everywhere(), 0)))
    }
}
