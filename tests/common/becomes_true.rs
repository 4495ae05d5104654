// SPDX-License-Identifier: Apache-2.0
//! The wait of tests without a runtime.

use std::time::{Duration, Instant};

/// Waits until the condition is true, for two minutes at most. Returns whether it is.
pub fn becomes_true(condition: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(120);
    while !condition() && Instant::now() < deadline {
        #[expect(clippy::disallowed_methods, reason = "the condition is looked at again after a moment")]
        std::thread::sleep(Duration::from_millis(10));
    }
    condition()
}
