// SPDX-License-Identifier: Apache-2.0
//! Which nexthop object carries which route: ids, their owner, and what writer and monitor must tell each other.
//!
//! A nexthop object is a detail of the adapter; the core knows routes. One nexthop serves one route and is never replaced.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::rc::Rc;

use nix::libc;
use weft_backends::state::{Key, Mac};

/// Ids of instance 0 begin here: far from what people and routing daemons number by hand.
const BASE: u32 = 0x5700_0000;
/// Ids per instance, as a power of two: five moves of each of 50,000 routes at a time.
const BITS: u32 = 18;

/// Whether the kernel has nexthop objects, by its answer to a question for all of them. Before Linux 5.3 it does not know the question.
///
/// # Errors
/// Another answer says nothing about it.
pub fn supported(answer: io::Result<()>) -> io::Result<bool> {
    match answer {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Shared between writer and monitor, which live on one thread.
pub type Shared = Rc<RefCell<Index>>;

/// The index.
#[derive(Debug)]
pub struct Index {
    first: u32,
    next: u32,
    ids: HashMap<u32, Key>,
    routes: HashMap<Key, u32>,
    reserved: HashSet<u32>,
    /// FDB entries that were written or observed, by device index.
    pub fdb: HashSet<(u32, Mac)>,
}

impl Index {
    /// An empty index for one instance of the agent.
    pub fn new(instance: u8) -> Index {
        let first = BASE + (u32::from(instance) << BITS);
        Index {
            first,
            next: 0,
            ids: HashMap::new(),
            routes: HashMap::new(),
            reserved: HashSet::new(),
            fdb: HashSet::new(),
        }
    }

    /// True for an id of this instance's range.
    pub fn in_range(&self, id: u32) -> bool {
        id >> BITS == self.first >> BITS
    }

    /// An id that is not in use, bound to this route from now on; `None` when all are. Also the id that it had before.
    pub fn bind(&mut self, key: Key) -> Option<(u32, Option<u32>)> {
        for _ in 0..1 << BITS {
            let id = self.first + self.next;
            self.next = (self.next + 1) & ((1 << BITS) - 1);
            if !self.ids.contains_key(&id) && !self.reserved.contains(&id) {
                self.ids.insert(id, key);
                return Some((id, self.routes.insert(key, id)));
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

    /// The nexthop that a route goes through, ours or not.
    pub fn of(&self, key: &Key) -> Option<u32> {
        self.routes.get(key).copied()
    }

    /// A route was seen to go through this nexthop; `ours` when its protocol is.
    pub fn saw(&mut self, key: Key, id: u32, ours: bool) {
        self.routes.insert(key, id);
        if ours && self.in_range(id) {
            self.ids.insert(id, key);
        }
    }

    /// A route was seen to be without a nexthop, or is gone.
    pub fn saw_plain(&mut self, key: &Key) {
        self.routes.remove(key);
    }

    /// An id of our range that someone else took.
    pub fn reserve(&mut self, id: u32) {
        self.ids.remove(&id);
        self.reserved.insert(id);
    }

    /// The nexthop is gone or about to be deleted by us: the route that it carried, and whether it was ours at all.
    pub fn forget(&mut self, id: u32) -> Option<Key> {
        self.reserved.remove(&id);
        let key = self.ids.remove(&id)?;
        if self.routes.get(&key) == Some(&id) {
            self.routes.remove(&key);
        }
        Some(key)
    }

    /// True when the nexthop is one of ours.
    pub fn owns(&self, id: u32) -> bool {
        self.ids.contains_key(&id)
    }

    /// Our nexthops that none of these routes goes through.
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
    fn a_kernel_that_does_not_know_the_question_has_none() {
        let answer = |errno| supported(Err(io::Error::from_raw_os_error(errno)));
        assert!(supported(Ok(())).unwrap());
        for errno in [libc::EOPNOTSUPP, libc::EINVAL] {
            assert!(!answer(errno).unwrap(), "{errno}: plain routes");
        }
        for errno in [libc::EPERM, libc::EINTR, libc::ENOBUFS] {
            assert_eq!(answer(errno).unwrap_err().raw_os_error(), Some(errno), "it was not answered");
        }
    }

    #[test]
    fn ranges_of_instances_are_apart_and_an_undone_bind_leaves_nothing() {
        let (mut a, mut b) = (Index::new(0), Index::new(255));
        let (first, before) = a.bind(key(1)).unwrap();
        assert_eq!(before, None);
        assert!(a.in_range(first) && !b.in_range(first));
        assert!(b.in_range(b.first) && b.bind(key(1)).unwrap().0 == b.first);
        let (second, before) = a.bind(key(1)).unwrap();
        assert_eq!(before, Some(first));
        a.unbind(key(1), second, before);
        assert_eq!(a.of(&key(1)), Some(first));
        assert_eq!(a.forget(first), Some(key(1)));
        assert_eq!((a.of(&key(1)), a.forget(first)), (None, None));
    }

    #[test]
    fn a_reserved_id_is_not_given_out() {
        let mut index = Index::new(3);
        index.reserve(index.first);
        assert_eq!(index.bind(key(1)).unwrap().0, index.first + 1);
        assert_eq!(index.orphans(&HashSet::new()), vec![index.first + 1]);
    }
}
