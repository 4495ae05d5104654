// SPDX-License-Identifier: Apache-2.0
//! Which nexthop object belongs to which route. The writer and the monitor share this index.
//!
//! Only the kernel adapter knows nexthop objects. The rest of the agent knows routes. Each nexthop belongs to one route and is never
//! replaced.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::rc::Rc;

use nix::libc;
use weft_backends::state::{Key, Mac};

/// The first id of instance 0. People and routing daemons use much lower ids.
const BASE: u32 = 0x5700_0000;
/// Ids per instance, as a power of two. This is enough for five nexthops of each of 50,000 routes at the same time.
const BITS: u32 = 18;

/// Returns true if the kernel has nexthop objects, which it does since Linux 5.3. `answer` is its answer to a dump of all of them.
///
/// # Errors
/// The dump failed for another reason.
pub fn supported(answer: io::Result<()>) -> io::Result<bool> {
    match answer {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The index as the writer and the monitor share it. Both are on one thread.
pub type Shared = Rc<RefCell<Nexthops>>;

/// A route that got another nexthop.
#[derive(Debug, Clone, Copy)]
pub struct Bound {
    /// The id of its new nexthop.
    pub id: u32,
    /// The id that it had before.
    pub before: Option<u32>,
}

/// Which nexthop belongs to which route, and which FDB entries are known.
#[derive(Debug)]
pub struct Nexthops {
    first: u32,
    next: u32,
    ids: HashMap<u32, Key>,
    routes: HashMap<Key, u32>,
    reserved: HashSet<u32>,
    /// The FDB entries that were written or observed, with the index of their device.
    pub fdb: HashSet<(u32, Mac)>,
}

impl Nexthops {
    /// Returns an empty index for one instance of the agent.
    pub fn new(instance: u8) -> Nexthops {
        let first = BASE + (u32::from(instance) << BITS);
        Nexthops {
            first,
            next: 0,
            ids: HashMap::new(),
            routes: HashMap::new(),
            reserved: HashSet::new(),
            fdb: HashSet::new(),
        }
    }

    /// Returns true for an id in the range of this instance.
    pub fn in_range(&self, id: u32) -> bool {
        id >> BITS == self.first >> BITS
    }

    /// Binds an unused id to this route. Returns `None` if all ids are in use.
    pub fn bind(&mut self, key: Key) -> Option<Bound> {
        for _ in 0..1 << BITS {
            let id = self.first + self.next;
            self.next = (self.next + 1) & ((1 << BITS) - 1);
            if !self.ids.contains_key(&id) && !self.reserved.contains(&id) {
                self.ids.insert(id, key);
                return Some(Bound { id, before: self.routes.insert(key, id) });
            }
        }
        None
    }

    /// Undoes a [`Self::bind`] whose route could not be written.
    pub fn unbind(&mut self, key: Key, id: u32, before: Option<u32>) {
        self.ids.remove(&id);
        if self.routes.get(&key) == Some(&id) {
            match before {
                Some(before) => self.routes.insert(key, before),
                None => self.routes.remove(&key),
            };
        }
    }

    /// Returns the nexthop of a route, even if another program created it.
    pub fn of(&self, key: &Key) -> Option<u32> {
        self.routes.get(key).copied()
    }

    /// Forgets which route has which nexthop. A dump, which names all routes, follows. The ids of this agent stay bound.
    pub fn forget_routes(&mut self) {
        self.routes.clear();
    }

    /// Forgets the FDB entries of devices that do not exist any more. The kernel does not use an index twice.
    pub fn keep_devices(&mut self, exists: impl Fn(u32) -> bool) {
        self.fdb.retain(|(index, _)| exists(*index));
    }

    /// Records the nexthop of an observed route. `ours` is true if the route has the protocol of the agent.
    pub fn saw(&mut self, key: Key, id: u32, ours: bool) {
        self.routes.insert(key, id);
        if ours && self.in_range(id) {
            self.ids.insert(id, key);
        }
    }

    /// Records that a route has no nexthop, or is gone.
    pub fn saw_plain(&mut self, key: &Key) {
        self.routes.remove(key);
    }

    /// Records that another program uses an id of our range.
    pub fn reserve(&mut self, id: u32) {
        self.ids.remove(&id);
        self.reserved.insert(id);
    }

    /// Records that a nexthop is gone, or will be deleted now. Returns its route if the nexthop was ours.
    pub fn forget(&mut self, id: u32) -> Option<Key> {
        self.reserved.remove(&id);
        let key = self.ids.remove(&id)?;
        if self.routes.get(&key) == Some(&id) {
            self.routes.remove(&key);
        }
        Some(key)
    }

    /// Returns true if the nexthop is one of ours.
    pub fn owns(&self, id: u32) -> bool {
        self.ids.contains_key(&id)
    }

    /// Returns our nexthops that are not among these.
    pub fn orphans(&self, in_use: &HashSet<u32>) -> Vec<u32> {
        self.ids.keys().filter(|id| !in_use.contains(id)).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u8) -> Key {
        Key::Route(format!("10.0.{n}.0/24").parse().unwrap(), 0)
    }

    #[test]
    fn a_kernel_that_does_not_know_the_dump_has_no_nexthops() {
        let answer = |errno| supported(Err(io::Error::from_raw_os_error(errno)));
        assert!(supported(Ok(())).unwrap());
        for errno in [libc::EOPNOTSUPP, libc::EINVAL] {
            assert!(!answer(errno).unwrap(), "{errno}: routes get no nexthop objects");
        }
        for errno in [libc::EPERM, libc::EINTR, libc::ENOBUFS] {
            assert_eq!(
                answer(errno).unwrap_err().raw_os_error(),
                Some(errno),
                "{errno}: the question was not answered"
            );
        }
    }

    #[test]
    fn instances_have_different_ids_and_an_undone_bind_has_no_effect() {
        let (mut a, mut b) = (Nexthops::new(0), Nexthops::new(255));
        let Bound { id: first, before } = a.bind(key(1)).unwrap();
        assert_eq!(before, None);
        assert!(a.in_range(first) && !b.in_range(first));
        assert!(b.in_range(b.first) && b.bind(key(1)).unwrap().id == b.first);
        let Bound { id: second, before } = a.bind(key(1)).unwrap();
        assert_eq!(before, Some(first));
        a.unbind(key(1), second, before);
        assert_eq!(a.of(&key(1)), Some(first));
        assert_eq!(a.forget(first), Some(key(1)));
        assert_eq!((a.of(&key(1)), a.forget(first)), (None, None));
        let Bound { id, before } = a.bind(key(2)).unwrap();
        a.unbind(key(2), id, before);
        assert_eq!((a.of(&key(2)), a.owns(id)), (None, false), "the route had none before");
    }

    /// The ids beyond the range belong to another agent of this host.
    #[test]
    fn the_ids_of_the_range_are_bound_again_and_none_beyond_it() {
        let mut index = Nexthops::new(3);
        let (first, last) = (index.first, index.first + (1 << BITS) - 1);
        index.next = last - first;
        assert_eq!([key(1), key(2)].map(|route| index.bind(route).unwrap().id), [last, first]);
        index.reserved.extend(first..=last);
        assert!(index.bind(key(3)).is_none(), "none is free");
        assert_eq!(index.of(&key(3)), None);
    }

    #[test]
    fn a_reserved_id_is_not_bound() {
        let mut index = Nexthops::new(3);
        index.reserve(index.first);
        assert_eq!(index.bind(key(1)).unwrap().id, index.first + 1);
        assert_eq!(index.orphans(&HashSet::new()), vec![index.first + 1]);
    }

    #[test]
    fn a_route_that_is_in_no_dump_is_forgotten_and_its_id_stays_ours() {
        let mut index = Nexthops::new(3);
        let id = index.bind(key(1)).unwrap().id;
        index.saw(key(2), 7, false);
        index.forget_routes();
        assert_eq!((index.of(&key(1)), index.of(&key(2))), (None, None));
        assert_eq!(index.orphans(&HashSet::new()), [id], "it must still be deleted");
        assert!(index.ids.len() == 1 && index.routes.is_empty());
    }

    /// An id that is ours is deleted when no route has it.
    #[test]
    fn only_an_id_of_our_range_on_a_route_of_ours_becomes_ours() {
        let mut index = Nexthops::new(3);
        let in_range = index.first + 9;
        for (id, ours, owns) in [(7, true, false), (in_range, false, false), (in_range, true, true)] {
            index.saw(key(1), id, ours);
            assert_eq!((index.of(&key(1)), index.owns(id)), (Some(id), owns), "{id} {ours}");
        }
        assert_eq!(index.orphans(&HashSet::new()), [in_range]);
    }

    #[test]
    fn the_fdb_entries_of_a_device_that_is_gone_are_forgotten() {
        let mut index = Nexthops::new(3);
        let (gone, there) = ((5, Mac([2; 6])), (6, Mac([2; 6])));
        index.fdb.extend([gone, there]);
        index.keep_devices(|device| device == 6);
        assert_eq!(index.fdb, HashSet::from([there]));
    }
}
