// SPDX-License-Identifier: Apache-2.0
//! Whether the node is ready, and why not.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The reasons why the node is not ready, as sentences. The agent writes them and the server reads them. The node is
/// ready if there are none.
#[derive(Debug, Clone)]
pub struct Readiness {
    reasons: Arc<Mutex<BTreeSet<String>>>,
}

impl Default for Readiness {
    fn default() -> Readiness {
        Readiness::new()
    }
}

impl Readiness {
    /// Creates the state of an agent that is starting, which is not ready.
    pub fn new() -> Readiness {
        let readiness = Readiness { reasons: Arc::default() };
        readiness.set(["the agent is starting".to_owned()]);
        readiness
    }

    /// Replaces the reasons. Returns true if readiness itself has changed.
    pub fn set(&self, reasons: impl IntoIterator<Item = String>) -> bool {
        let new: BTreeSet<String> = reasons.into_iter().collect();
        let mut now = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = now.is_empty() != new.is_empty();
        *now = new;
        changed
    }

    /// Returns the reasons, sorted. The node is ready if there are none.
    pub fn reasons(&self) -> Vec<String> {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    /// Returns true if there are no reasons.
    pub fn is_ready(&self) -> bool {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}
