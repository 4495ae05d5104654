// SPDX-License-Identifier: Apache-2.0
//! Limits how many labs and clusters run at once to two, the number of cores of a small machine. With more, tests would run into their limits
//! because the machine is busy.

use std::sync::{Condvar, Mutex, PoisonError};

static FREE: Mutex<usize> = Mutex::new(2);
static FREED: Condvar = Condvar::new();

/// The right to run a lab or a cluster. It ends when this is dropped.
pub struct Place(());

impl Place {
    /// Waits until fewer than two labs and clusters run.
    pub fn take() -> Place {
        let free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free = FREED.wait_while(free, |free| *free == 0).unwrap_or_else(PoisonError::into_inner);
        *free -= 1;
        Place(())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *FREE.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        FREED.notify_one();
    }
}
