// SPDX-License-Identifier: Apache-2.0
//! The content of a simulated server, with notices of its changes and restarts. Clones have the same content.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// The content of a server, which all its connections share.
#[derive(Debug)]
pub struct Shared<T> {
    content: Arc<Mutex<T>>,
    changes: watch::Sender<u64>,
    restarts: watch::Sender<u64>,
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Shared<T> {
        let Shared { content, changes, restarts } = self;
        Shared { content: content.clone(), changes: changes.clone(), restarts: restarts.clone() }
    }
}

impl<T> Shared<T> {
    /// Returns the content of a server that has just started.
    pub fn new(content: T) -> Shared<T> {
        let content = Arc::new(Mutex::new(content));
        Shared { content, changes: watch::Sender::new(0), restarts: watch::Sender::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the content.
    pub fn read<R>(&self, read: impl FnOnce(&T) -> R) -> R {
        read(&self.lock())
    }

    /// Changes the content without a notice to anybody.
    pub fn change_silently<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        change(&mut self.lock())
    }

    /// Changes the content.
    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = self.change_silently(change);
        self.changes.send_modify(|count| *count += 1);
        result
    }

    /// Starts the server again with this content.
    pub fn restart_with(&self, content: T) {
        *self.lock() = content;
        self.restarts.send_modify(|count| *count += 1);
        self.changes.send_modify(|count| *count += 1);
    }

    /// Returns the number of changes, for those who wait for the next one.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Returns the number of restarts, for those who wait for the next one. A restart ends all watches.
    pub fn restarts(&self) -> watch::Receiver<u64> {
        self.restarts.subscribe()
    }
}
