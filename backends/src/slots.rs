// SPDX-License-Identifier: Apache-2.0
//! The table of the index: who wants what under which key. Nearly every key has one contributor, and nothing longer than an IPv4
//! or Ethernet address in key and value: such an entry takes 24 bytes, any other 56. Invariant: a key is in one of the two maps.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;

use weft_subnet::lease::{Age, Id};

use crate::packed::{NarrowKey, PackedKey, PackedValue};
use crate::state::Mac;

/// Ours (false) before peers', then by age, then by id: total, so that the order of arrival decides nothing.
pub(crate) type Rank = (bool, Age, Id);

/// The contributions to one key.
#[derive(Debug)]
pub(crate) enum Slot {
    /// By the contributor of this number.
    One(u32, PackedValue),
    /// Two or more; a shared device has as many as there are peers on it.
    Many(BTreeMap<Rank, (u32, PackedValue)>),
}

impl Slot {
    /// The contribution that counts.
    fn winner(&self, newest: bool) -> Option<(u32, PackedValue)> {
        self.best_two(newest)[0].clone()
    }

    /// The two contributions that count before all others.
    fn best_two(&self, newest: bool) -> [Option<(u32, PackedValue)>; 2] {
        let mut two = [None, None];
        match self {
            Slot::One(number, value) => two[0] = Some((*number, value.clone())),
            Slot::Many(all) if newest => {
                two.iter_mut().zip(all.values().rev()).for_each(|(at, one)| *at = Some(one.clone()))
            }
            Slot::Many(all) => two.iter_mut().zip(all.values()).for_each(|(at, one)| *at = Some(one.clone())),
        }
        two
    }
}

/// All contributions.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    /// The oldest contribution counts everywhere, for link-layer entries, too.
    pub(crate) oldest_wins: bool,
    narrow: HashMap<NarrowKey, Narrow>,
    wide: HashMap<PackedKey, Slot>,
}

impl Slots {
    /// The contribution to this key that counts.
    pub(crate) fn winner(&self, key: &PackedKey) -> Option<(u32, PackedValue)> {
        let narrow = NarrowKey::of(key).and_then(|key| self.narrow.get(&key));
        narrow.map_or_else(|| self.wide.get(key)?.winner(self.newest_wins(key)), |narrow| Some(narrow.wide()))
    }

    /// True where the newest contribution to this key counts.
    pub(crate) fn newest_wins(&self, key: &PackedKey) -> bool {
        !self.oldest_wins && key.is_link_layer()
    }

    /// The contribution to this key that counts, and the one that would count without it.
    pub(crate) fn best_two(&self, key: &PackedKey) -> [Option<(u32, PackedValue)>; 2] {
        match NarrowKey::of(key).and_then(|key| self.narrow.get(&key)) {
            Some(narrow) => [Some(narrow.wide()), None],
            None => self.wide.get(key).map(|slot| slot.best_two(self.newest_wins(key))).unwrap_or_default(),
        }
    }

    /// Who contributes one of these values to this key.
    pub(crate) fn holders(&self, key: &PackedKey, values: [&PackedValue; 2]) -> Vec<u32> {
        match self.wide.get(key) {
            Some(Slot::Many(all)) => {
                all.values().filter(|(_, value)| values.contains(&value)).map(|(number, _)| *number).collect()
            }
            _ => self
                .winner(key)
                .filter(|(_, value)| values.contains(&value))
                .map(|(number, _)| number)
                .into_iter()
                .collect(),
        }
    }

    /// Takes out what is under this key.
    pub(crate) fn take(&mut self, key: &PackedKey) -> Option<Slot> {
        match NarrowKey::of(key).and_then(|key| self.narrow.remove(&key)) {
            Some(narrow) => {
                let (number, value) = narrow.wide();
                Some(Slot::One(number, value))
            }
            None => self.wide.remove(key),
        }
    }

    /// Puts a slot under a key that has none.
    pub(crate) fn put(&mut self, key: PackedKey, slot: Slot) {
        let narrow = match &slot {
            Slot::One(number, value) => NarrowKey::of(&key).zip(Narrow::of(*number, value)),
            Slot::Many(_) => None,
        };
        match narrow {
            Some((key, narrow)) => drop(self.narrow.insert(key, narrow)),
            None => drop(self.wide.insert(key, slot)),
        }
    }

    /// What counts under every key, in no order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (PackedKey, PackedValue)> {
        let narrow = self.narrow.iter().map(|(key, narrow)| (key.wide(), narrow.wide().1));
        narrow.chain(self.wide.iter().filter_map(|(key, slot)| Some((*key, slot.winner(self.newest_wins(key))?.1))))
    }

    /// The numbers of all devices in keys and values, also in those that do not count now.
    pub(crate) fn devices(&self) -> HashSet<u32> {
        let narrow = self.narrow.iter().flat_map(|(key, narrow)| [key.wide().device(), narrow.wide().1.device()]);
        let values = |slot: &Slot| -> Vec<Option<u32>> {
            match slot {
                Slot::One(_, value) => vec![value.device()],
                Slot::Many(all) => all.values().map(|(_, value)| value.device()).collect(),
            }
        };
        let wide = self.wide.iter().flat_map(|(key, slot)| values(slot).into_iter().chain([key.device()]));
        narrow.chain(wide).flatten().collect()
    }

    /// Bytes that the tables take.
    #[cfg(test)]
    pub(crate) fn size(&self) -> usize {
        let table = |capacity: usize, entry: usize| capacity / 7 * 8 * (entry + 1);
        table(self.narrow.capacity(), size_of::<(NarrowKey, Narrow)>())
            + table(self.wide.capacity(), size_of::<(PackedKey, Slot)>())
    }
}

/// A lone contribution: an address of six bytes at most, and above the number of the device the kind of the value.
#[derive(Debug, Clone, Copy)]
struct Narrow {
    number: u32,
    bytes: [u8; 6],
    device_and_kind: u16,
}

/// Devices with higher numbers are left to the wide map.
const DEVICE: u32 = (1 << KIND) - 1;
/// Lowest bit of the kind.
const KIND: u32 = 12;
const ADDR: u16 = 0;
const PEER: u16 = 1;
const FDB: u16 = 2;
const NEIGH: u16 = 3;
const VIA: u16 = 4;
const VIA_ONLINK: u16 = 5;

impl Narrow {
    fn of(number: u32, value: &PackedValue) -> Option<Narrow> {
        let (kind, bytes, device) = match value {
            PackedValue::Addr => (ADDR, [0; 6], 0),
            PackedValue::Peer => (PEER, [0; 6], 0),
            PackedValue::Fdb(IpAddr::V4(ip)) => (FDB, six(ip.octets()), 0),
            PackedValue::Neigh(mac) => (NEIGH, mac.0, 0),
            PackedValue::Via(IpAddr::V4(ip), onlink, device) if *device <= DEVICE => {
                (if *onlink { VIA_ONLINK } else { VIA }, six(ip.octets()), *device as u16)
            }
            _ => return None,
        };
        Some(Narrow { number, bytes, device_and_kind: kind << KIND | device })
    }

    fn wide(&self) -> (u32, PackedValue) {
        let [a, b, c, d, ..] = self.bytes;
        let (ip, device) = (IpAddr::from([a, b, c, d]), u32::from(self.device_and_kind) & DEVICE);
        let value = match self.device_and_kind >> KIND {
            ADDR => PackedValue::Addr,
            PEER => PackedValue::Peer,
            FDB => PackedValue::Fdb(ip),
            NEIGH => PackedValue::Neigh(Mac(self.bytes)),
            VIA => PackedValue::Via(ip, false, device),
            _ => PackedValue::Via(ip, true, device),
        };
        (self.number, value)
    }
}

fn six([a, b, c, d]: [u8; 4]) -> [u8; 6] {
    [a, b, c, d, 0, 0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::Names;
    use crate::state::{Key, Name, Route, Value};

    #[test]
    fn small_and_lossless() {
        assert_eq!(size_of::<(NarrowKey, Narrow)>(), 24);
        let dev = Name::new("flannel.1").unwrap();
        let mut names = Names::default();
        let keys = [
            Key::Link(dev),
            Key::Fdb(dev, Mac([1, 2, 3, 4, 5, 255])),
            Key::Neigh(dev, "10.5.1.0".parse().unwrap()),
            Key::Neigh(dev, "fd00::2".parse().unwrap()),
            Key::Neigh(dev, "::".parse().unwrap()),
            Key::Route("10.5.1.0/24".parse().unwrap(), 7),
            Key::Route("0.0.0.0/0".parse().unwrap(), 0),
            Key::Route("::/0".parse().unwrap(), 0),
        ];
        let via = |via: &str, onlink| Value::Route(Route::Unicast { via: via.parse().unwrap(), dev, onlink });
        let values = [
            Value::Addr,
            Value::Peer,
            Value::Fdb("192.0.2.1".parse().unwrap()),
            Value::Fdb("2001:db8::1".parse().unwrap()),
            Value::Neigh(Mac([9, 8, 7, 6, 5, 4])),
            via("10.5.1.0", true),
            via("192.0.2.1", false),
            via("fe80::1", true),
            Value::Route(Route::Blackhole),
        ];
        let mut slots = Slots::default();
        for (number, value) in values.into_iter().enumerate() {
            for key in &keys {
                let key = names.key(key).unwrap();
                let value = names.value(value);
                let number = number as u32;
                slots.put(key, Slot::One(number, value.clone()));
                assert_eq!(slots.winner(&key), Some((number, value.clone())));
                assert_eq!(slots.iter().collect::<Vec<_>>(), [(key, value)]);
                assert!(matches!(slots.take(&key), Some(Slot::One(got, _)) if got == number));
                assert_eq!(slots.winner(&key), None);
            }
        }
    }

    #[test]
    fn a_device_of_a_high_number_is_kept_as_well() {
        let (mut names, mut slots) = (Names::default(), Slots::default());
        let key = names.key(&Key::Route("10.5.1.0/24".parse().unwrap(), 0)).unwrap();
        for device in [DEVICE, DEVICE + 1] {
            let value = PackedValue::Via("192.0.2.1".parse().unwrap(), true, device);
            slots.put(key, Slot::One(1, value.clone()));
            assert_eq!(slots.winner(&key), Some((1, value)));
            slots.take(&key);
        }
    }
}
