// SPDX-License-Identifier: Apache-2.0
//! The reasons of all backends for what they leave out, as one type.

use std::error::Error;
use std::sync::Arc;

/// Why a backend cannot reach one family of a lease, or cannot do its work on this host. Each backend has an enum of its own reasons,
/// and this is any of them. As text it is a sentence for people, which names the field and its content.
#[derive(Debug, Clone, thiserror::Error)]
#[error(transparent)]
pub struct Skip(Arc<dyn Error + Send + Sync>);

impl Skip {
    /// Wraps a reason.
    pub fn new(reason: impl Error + Send + Sync + 'static) -> Skip {
        Skip(Arc::new(reason))
    }
}

impl PartialEq for Skip {
    /// Two reasons are equal if their texts are.
    fn eq(&self, other: &Skip) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for Skip {}
