// SPDX-License-Identifier: Apache-2.0
//! How long tests wait.

use std::time::Duration;

/// How long a test waits for a condition. It is usually true within milliseconds, but the machine may be busy with other tests. The limit
/// may be this long because nothing but the expected cause can end the wait.
pub const PATIENCE: Duration = Duration::from_secs(120);
