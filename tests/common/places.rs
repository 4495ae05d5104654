// SPDX-License-Identifier: Apache-2.0
//! Labs and clusters that run at once: one for each core of a small machine, more would measure the machine, not weft.

use std::sync::{Condvar, Mutex, PoisonError};

static FREE: Mutex<usize> = Mutex::new(2);
static FREED: Condvar = Condvar::new();

/// A place among them; free again when this is dropped.
pub struct Place(());

impl Place {
    /// Waits for one.
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
