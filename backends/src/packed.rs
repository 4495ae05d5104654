// SPDX-License-Identifier: Apache-2.0
//! Keys and values of the index in half the space: device names are numbered, rare values boxed.
//! Invariant: packing and unpacking gives the same back.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use weft_subnet::cidr::Family;

use crate::state::{Key, Mac, Name, Route, Value};

/// So many names are kept without a look at which of them are in use: twice as many as devices are wanted at once.
const FEW: usize = 64;

/// Device names, numbered. A handful are in use, but a lease that changes its VNI brings a new one each time.
#[derive(Debug, Default)]
pub(crate) struct Names {
    numbers: HashMap<Name, u32>,
    names: Vec<Option<Name>>,
    free: Vec<u32>,
    /// Names that were in use when that was looked at last.
    in_use: usize,
}

impl Names {
    fn number(&mut self, name: Name) -> u32 {
        if let Some(number) = self.numbers.get(&name) {
            return *number;
        }
        let number = self.free.pop().unwrap_or(self.names.len() as u32);
        match self.names.get_mut(number as usize) {
            Some(place) => *place = Some(name),
            None => self.names.push(Some(name)),
        }
        self.numbers.insert(name, number);
        number
    }

    fn name(&self, number: u32) -> Option<Name> {
        self.names.get(number as usize).copied().flatten()
    }

    /// True when there are so many names that it is worth to forget those that nothing uses: each such look at all entries is paid
    /// for by as many new names as are in use, [`FEW`] at least.
    pub(crate) fn is_crowded(&self) -> bool {
        self.numbers.len() > FEW.max(2 * self.in_use)
    }

    /// Forgets all names but these numbers'.
    pub(crate) fn keep(&mut self, used: &HashSet<u32>) {
        self.numbers.retain(|_, number| used.contains(number));
        for (number, place) in self.names.iter_mut().enumerate() {
            let number = number as u32;
            if !used.contains(&number) && place.take().is_some() {
                self.free.push(number);
            }
        }
        self.in_use = self.numbers.len();
    }

    /// How many are known.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.numbers.len()
    }

    /// The packed key; `None` when its device was never seen, so that nothing can be stored under it.
    pub(crate) fn find(&self, key: &Key) -> Option<PackedKey> {
        let number = |name: &Name| self.numbers.get(name).copied();
        Some(match key {
            Key::Link(name) => PackedKey { tag: LINK, extra: number(name)?, ..PackedKey::default() },
            Key::Addr(name, net) => PackedKey::net(ADDR, net, number(name)?),
            Key::Fdb(name, mac) => PackedKey { tag: FDB, bytes: wide(mac.0), extra: number(name)?, len: 0 },
            Key::Neigh(name, ip) => PackedKey::net(NEIGH, &IpNet::from(*ip), number(name)?),
            Key::Route(net, metric) => PackedKey::net(ROUTE, net, *metric),
            Key::Peer(ip) => PackedKey::net(PEER, &IpNet::from(*ip), 0),
            Key::Guard(Family::V4) => PackedKey { tag: GUARD, ..PackedKey::default() },
            Key::Guard(Family::V6) => PackedKey { tag: GUARD | V6, ..PackedKey::default() },
            Key::Open(ip) => PackedKey::net(OPEN, &IpNet::from(*ip), 0),
            Key::Fence(Family::V4) => PackedKey { tag: FENCE, ..PackedKey::default() },
            Key::Fence(Family::V6) => PackedKey { tag: FENCE | V6, ..PackedKey::default() },
        })
    }

    /// The packed key; numbers its device.
    pub(crate) fn key(&mut self, key: &Key) -> Option<PackedKey> {
        if let Key::Link(name) | Key::Addr(name, _) | Key::Fdb(name, _) | Key::Neigh(name, _) = key {
            self.number(*name);
        }
        self.find(key)
    }

    /// The key back.
    pub(crate) fn unpack(&self, packed: &PackedKey) -> Option<Key> {
        let name = || self.name(packed.extra);
        Some(match packed.tag & !V6 {
            LINK => Key::Link(name()?),
            ADDR => Key::Addr(name()?, packed.to_net()?),
            FDB => {
                let [a, b, c, d, e, f, ..] = packed.bytes;
                Key::Fdb(name()?, Mac([a, b, c, d, e, f]))
            }
            NEIGH => Key::Neigh(name()?, packed.ip()),
            PEER => Key::Peer(packed.ip()),
            GUARD => Key::Guard(packed.family()),
            OPEN => Key::Open(packed.ip()),
            FENCE => Key::Fence(packed.family()),
            _ => Key::Route(packed.to_net()?, packed.extra),
        })
    }

    /// The packed value; numbers its device.
    pub(crate) fn value(&mut self, value: Value) -> PackedValue {
        if let Value::Route(Route::Unicast { dev, .. }) = value {
            self.number(dev);
        }
        self.find_value(value).unwrap_or_else(|| PackedValue::Rare(Box::new(value)))
    }

    /// The packed value; `None` when its device was never seen, so that nobody can have contributed it.
    pub(crate) fn find_value(&self, value: Value) -> Option<PackedValue> {
        Some(match value {
            Value::Addr => PackedValue::Addr,
            Value::Peer => PackedValue::Peer,
            Value::Fdb(ip) => PackedValue::Fdb(ip),
            Value::Neigh(mac) => PackedValue::Neigh(mac),
            Value::Route(Route::Unicast { via, dev, onlink }) => {
                PackedValue::Via(via, onlink, *self.numbers.get(&dev)?)
            }
            rare => PackedValue::Rare(Box::new(rare)),
        })
    }

    /// The value back.
    pub(crate) fn unpack_value(&self, packed: &PackedValue) -> Option<Value> {
        Some(match packed {
            PackedValue::Addr => Value::Addr,
            PackedValue::Peer => Value::Peer,
            PackedValue::Fdb(ip) => Value::Fdb(*ip),
            PackedValue::Neigh(mac) => Value::Neigh(*mac),
            PackedValue::Via(via, onlink, dev) => {
                Value::Route(Route::Unicast { via: *via, dev: self.name(*dev)?, onlink: *onlink })
            }
            PackedValue::Rare(value) => **value,
        })
    }
}

const LINK: u8 = 0;
const ADDR: u8 = 1;
const FDB: u8 = 2;
const NEIGH: u8 = 3;
const ROUTE: u8 = 4;
const PEER: u8 = 5;
const GUARD: u8 = 6;
const OPEN: u8 = 7;
const FENCE: u8 = 8;
/// Added to a tag.
const V6: u8 = 0x80;

/// A [`Key`] in 24 bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct PackedKey {
    /// Address (IPv4 in the first four) or MAC.
    bytes: [u8; 16],
    /// Number of the device; metric of a route.
    extra: u32,
    tag: u8,
    /// Prefix length.
    len: u8,
}

impl PackedKey {
    fn net(tag: u8, net: &IpNet, extra: u32) -> PackedKey {
        let len = net.prefix_len();
        match net.addr() {
            IpAddr::V4(v4) => {
                let mut bytes = [0; 16];
                bytes[..4].copy_from_slice(&v4.octets());
                PackedKey { bytes, extra, tag, len }
            }
            IpAddr::V6(v6) => PackedKey { bytes: v6.octets(), extra, tag: tag | V6, len },
        }
    }

    /// The number of the device in the key, if it has one.
    pub(crate) fn device(&self) -> Option<u32> {
        matches!(self.tag & !V6, LINK | ADDR | FDB | NEIGH).then_some(self.extra)
    }

    fn ip(&self) -> IpAddr {
        let [a, b, c, d, ..] = self.bytes;
        if self.tag & V6 == 0 { Ipv4Addr::new(a, b, c, d).into() } else { Ipv6Addr::from(self.bytes).into() }
    }

    fn family(&self) -> Family {
        if self.tag & V6 == 0 { Family::V4 } else { Family::V6 }
    }

    fn to_net(self) -> Option<IpNet> {
        IpNet::new(self.ip(), self.len).ok()
    }

    /// True for link-layer entries: FDB and neighbours.
    pub(crate) fn is_link_layer(&self) -> bool {
        matches!(self.tag & !V6, FDB | NEIGH)
    }
}

/// A [`PackedKey`] in 12 bytes: one whose address has six bytes at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NarrowKey {
    extra: u32,
    bytes: [u8; 6],
    tag: u8,
    len: u8,
}

impl NarrowKey {
    /// `None`: its address is longer.
    pub(crate) fn of(key: &PackedKey) -> Option<NarrowKey> {
        let (bytes, rest) = key.bytes.split_first_chunk::<6>()?;
        let narrow = NarrowKey { extra: key.extra, bytes: *bytes, tag: key.tag, len: key.len };
        rest.iter().all(|byte| *byte == 0).then_some(narrow)
    }

    /// The key back.
    pub(crate) fn wide(&self) -> PackedKey {
        PackedKey { bytes: wide(self.bytes), extra: self.extra, tag: self.tag, len: self.len }
    }
}

fn wide(six: [u8; 6]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..6].copy_from_slice(&six);
    bytes
}

/// A [`Value`] in 24 bytes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PackedValue {
    Addr,
    Peer,
    Fdb(IpAddr),
    Neigh(Mac),
    /// Gateway, onlink, number of the device.
    Via(IpAddr, bool, u32),
    Rare(Box<Value>),
}

impl PackedValue {
    /// The number of the device in the value, if it has one.
    pub(crate) fn device(&self) -> Option<u32> {
        match self {
            PackedValue::Via(_, _, number) => Some(*number),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Names, PackedKey, PackedValue};
    use crate::state::{Key, Mac, Name};
    use weft_subnet::cidr::Family;

    #[test]
    fn small_and_lossless() {
        assert_eq!((size_of::<PackedKey>(), size_of::<PackedValue>()), (24, 24));
        let dev = Name::new("flannel.1").unwrap();
        let mut names = Names::default();
        for key in [
            Key::Link(dev),
            Key::Addr(dev, "10.5.1.7/24".parse().unwrap()),
            Key::Addr(dev, "fd00::1/64".parse().unwrap()),
            Key::Fdb(dev, Mac([1, 2, 3, 4, 5, 6])),
            Key::Neigh(dev, "10.5.1.0".parse().unwrap()),
            Key::Neigh(dev, "fd00::2".parse().unwrap()),
            Key::Route("10.5.1.0/24".parse().unwrap(), 0),
            Key::Route("fd00::/64".parse().unwrap(), 1024),
            Key::Route("0.0.0.0/0".parse().unwrap(), 0),
            Key::Route("::/0".parse().unwrap(), 0),
            Key::Peer("192.0.2.1".parse().unwrap()),
            Key::Peer("fd00::1".parse().unwrap()),
            Key::Guard(Family::V4),
            Key::Guard(Family::V6),
            Key::Open("192.0.2.1".parse().unwrap()),
            Key::Open("fd00::1".parse().unwrap()),
            Key::Fence(Family::V4),
            Key::Fence(Family::V6),
        ] {
            let packed = names.key(&key).unwrap();
            assert_eq!(names.unpack(&packed), Some(key));
            assert_eq!(names.find(&key), Some(packed));
        }
        assert_eq!(names.find(&Key::Link(Name::new("eth9").unwrap())), None);
    }
}
