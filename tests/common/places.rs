// SPDX-License-Identifier: Apache-2.0
//! Limits how many labs and clusters run at once. With more, tests would run into their limits because the machine is busy.
//!
//! A lab waits most of the time, so there are two places for each core. A cluster of Kubernetes computes, and takes two places.

use std::sync::{Condvar, Mutex, PoisonError};

/// More places than this gain nothing, because things like instances of inotify belong to the whole machine.
const MOST_PLACES: usize = 8;

static TAKEN: Mutex<usize> = Mutex::new(0);
static FREED: Condvar = Condvar::new();

/// The right to run a lab or a cluster. It ends when this is dropped.
pub struct Place {
    weight: usize,
}

impl Place {
    /// Waits until there is a place for a lab.
    #[allow(dead_code, reason = "the tests of clusters have no labs")]
    pub fn for_a_lab() -> Place {
        Place::take(1)
    }

    /// Waits until there is room for a cluster of Kubernetes.
    #[allow(dead_code, reason = "the tests of labs have no clusters")]
    pub fn for_a_cluster() -> Place {
        Place::take(2)
    }

    fn take(weight: usize) -> Place {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let places = (2 * cores).min(MOST_PLACES);
        let taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        let mut taken =
            FREED.wait_while(taken, |taken| *taken + weight > places).unwrap_or_else(PoisonError::into_inner);
        *taken += weight;
        Place { weight }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *TAKEN.lock().unwrap_or_else(PoisonError::into_inner) -= self.weight;
        FREED.notify_all();
    }
}
