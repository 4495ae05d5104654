// SPDX-License-Identifier: Apache-2.0
//! The events of a simulation, and how they are chosen. To add one: a variant of [`Event`], a line in [`random`], and what it does in
//! `cluster.rs`.

use serde::{Deserialize, Serialize};

use crate::chance::Chance;
use crate::hostile::Attack;
use crate::net_conf::{Bad, Edit};

/// What is wrong between a machine and the store, in the list of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Trouble {
    /// No packet arrives.
    Silence,
    /// The server's port is closed.
    Refused,
    /// Requests are carried out, but their answers are lost.
    AnswersLost,
}

/// What happens. A time is how many seconds it lasts. Machines are named by number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The agent is killed, and started again after this time.
    Kill(usize, u64),
    /// The agent is asked to end, and started again after this time.
    Terminate(usize, u64),
    /// The agent is stopped as by SIGSTOP.
    Freeze(usize, u64),
    /// The machine is switched off and on again after this time.
    Reboot(usize, u64),
    /// The machine gets an empty disk and boots.
    NewDisk(usize),
    /// The first machine boots with a copy of the disk of the second one.
    CloneDisk(usize, usize),
    /// The uplink loses its address, and gets another one after this time.
    Renumber(usize, u64),
    /// Two machines exchange their addresses.
    Exchange(usize, usize),
    /// The address is away for this time.
    AddressAway(usize, u64),
    /// The virtual address of the cluster moves to this machine.
    Vip(usize),
    /// The uplink is down for this time.
    LinkDown(usize, u64),
    /// The uplink has no carrier for this time.
    Unplug(usize, u64),
    /// The uplink is deleted, and created again after this time.
    NewUplink(usize, u64),
    /// Somebody deletes weft's devices.
    DeleteDevices(usize),
    /// Somebody deletes weft's routes.
    FlushRoutes(usize),
    /// Somebody deletes one of weft's entries. The second number chooses it.
    DeleteEntry(usize, usize),
    /// Somebody puts a route of another program in the place of one of weft's.
    Hijack(usize, usize),
    /// Somebody adds a static route inside Network. The second number chooses its prefix.
    ForeignRoute(usize, u8),
    /// Somebody makes a vxlan device with the name that weft would give to its device of this VNI.
    ForeignDevice(usize, u32),
    /// Notifications of the kernel are lost for this time.
    Deaf(usize, u64),
    /// The wall clock is set by so many seconds.
    Clock(usize, i64),
    /// The network between the machine and the store fails for this time.
    Wire(usize, Trouble, u64),
    /// The network between all machines and the store fails for this time.
    Outage(Trouble, u64),
    /// The store refuses the requests of the machine for this time, because there are too many.
    Throttle(usize, u64),
    /// The watch cache of the API server is late by so many milliseconds, for so many seconds.
    CacheLag(u64, u64),
    /// Events of the watch are late by so many milliseconds, for so many seconds.
    Lag(usize, u64, u64),
    /// The store loses everything but net-conf. True: it is another cluster with another id.
    Wipe(bool),
    /// Somebody makes a backup of the store.
    Backup,
    /// The store starts again from the last backup.
    Restore,
    /// The store forgets its history.
    Compact,
    /// Somebody deletes the lease of this machine.
    DeleteLease(usize),
    /// Somebody deletes the Node of this machine. Its kubelet creates it again after this time.
    DeleteNode(usize, u64),
    /// For this time the store has a lease that covers addresses of the machines.
    LanLease(u64),
    /// For this time the store has a newer lease with the identity of this machine.
    CopiedIdentity(usize, u64),
    /// For this time the store has a lease with this VNI.
    OtherVni(u32, u64),
    /// The machine loses power, and what was not synced. It is switched on again after this time.
    PowerLoss(usize, u64),
    /// Each write takes so many milliseconds, for so many seconds.
    SlowDisk(usize, u64, u64),
    /// There is no room on the disk for this time.
    FullDisk(usize, u64),
    /// Somebody changes net-conf.
    NetConf(Edit),
    /// For this time net-conf is one that no node may apply.
    BadNetConf(Bad, u64),
    /// For this time somebody with the rights of one node attacks this machine through the store.
    Hostile(Attack, usize, u64),
}

impl Event {
    /// Makes the time in which an agent does not follow the others at most so many seconds.
    pub fn shorten(&mut self, most: u64) {
        if let Event::Kill(_, seconds)
        | Event::Terminate(_, seconds)
        | Event::Freeze(_, seconds)
        | Event::Wire(_, _, seconds)
        | Event::Outage(_, seconds)
        | Event::Throttle(_, seconds) = self
        {
            *seconds = most.min(*seconds);
        }
    }

    /// Returns true if this event costs no packet between the machines, whatever else happens that costs none. Leases that copy an identity cost
    /// none where the oldest lease has it.
    pub fn is_lossless(&self, oldest_wins: bool) -> bool {
        match self {
            Event::Kill(..)
            | Event::Terminate(..)
            | Event::Freeze(..)
            | Event::Vip(..)
            | Event::ForeignRoute(..)
            | Event::ForeignDevice(..)
            | Event::Deaf(..)
            | Event::Clock(..)
            | Event::Wire(..)
            | Event::Outage(..)
            | Event::Throttle(..)
            | Event::CacheLag(..)
            | Event::Lag(..)
            | Event::Compact
            | Event::LanLease(..)
            | Event::OtherVni(..)
            | Event::SlowDisk(..)
            | Event::FullDisk(..)
            | Event::NetConf(..)
            | Event::BadNetConf(..)
            | Event::Hostile(..) => true,
            Event::CopiedIdentity(..) => oldest_wins,
            _ => false,
        }
    }
}

/// Returns a random event.
pub fn random(chance: &mut Chance, machines: usize, lan_inside: bool) -> Event {
    let machine = chance.below(machines);
    let other = (machine + 1 + chance.below(machines - 1)) % machines;
    let short = chance.between(1, 15);
    let long = chance.between(5, 400);
    let number = chance.below(1000);
    // Few, so that devices and leases often have the same one. Net-conf has VNI 1.
    let vni = [2, 7][number % 2];
    let trouble = [Trouble::Silence, Trouble::Refused, Trouble::AnswersLost][chance.below(3)];
    match chance.below(if lan_inside { 32 } else { 30 }) {
        0 => Event::Kill(machine, short),
        1 => Event::Kill(machine, long),
        2 => Event::Terminate(machine, short),
        3 => Event::Freeze(machine, long),
        4 => Event::Reboot(machine, short),
        5 => Event::Reboot(machine, long),
        6 => Event::NewDisk(machine),
        7 => Event::CloneDisk(machine, other),
        8 => Event::Renumber(machine, short),
        9 => Event::Exchange(machine, other),
        10 => Event::AddressAway(machine, short),
        11 | 12 => Event::Vip(machine),
        13 => Event::LinkDown(machine, short),
        14 => Event::Unplug(machine, short),
        15 => Event::NewUplink(machine, short),
        16 => Event::DeleteDevices(machine),
        17 => Event::FlushRoutes(machine),
        18 => Event::DeleteEntry(machine, number),
        19 => Event::Hijack(machine, number),
        20 if chance.percent(50) => Event::ForeignDevice(machine, vni),
        20 => Event::ForeignRoute(machine, u8::try_from(number % 64).unwrap_or(0)),
        21 => Event::Deaf(machine, short),
        22 => Event::Clock(machine, i64::try_from(number).unwrap_or(0) * 200 - 100_000),
        23 => Event::Wire(machine, trouble, long),
        24 => Event::Outage(trouble, long),
        25 if chance.percent(30) => Event::Throttle(machine, long),
        25 if chance.percent(30) => Event::CacheLag(chance.between(10, 20_000), long),
        25 => Event::Lag(machine, chance.between(10, 5000), long),
        26 if chance.percent(50) => Event::DeleteNode(machine, short),
        26 => Event::Wipe(chance.percent(50)),
        27 => [Event::Backup, Event::Restore][chance.below(2)].clone(),
        28 => [Event::Compact, Event::OtherVni(vni, long)][chance.below(2)].clone(),
        29 => [Event::DeleteLease(machine), Event::CopiedIdentity(machine, long)][chance.below(2)].clone(),
        _ => Event::LanLease(long),
    }
}

/// Returns a random event of a disk.
pub fn random_disk(chance: &mut Chance, machines: usize) -> Event {
    let (machine, long) = (chance.below(machines), chance.between(5, 400));
    match chance.below(3) {
        0 => Event::PowerLoss(machine, chance.between(1, 60)),
        1 => Event::SlowDisk(machine, chance.between(10, 10_000), long),
        _ => Event::FullDisk(machine, long),
    }
}
