// SPDX-License-Identifier: Apache-2.0
//! A packet filter in memory, for tests: it counts what it does, fails on demand, and lets a test change its rules as another program would.

use std::cell::RefCell;
use std::rc::Rc;

use tokio::sync::Notify;
use weft_backends::traffic_rules::Rules;
use weft_subnet::source::Local;

use super::error::{FirewallError, ProgramError};
use super::packet_filter::{EnsureError, Ensured, PacketFilter};

#[derive(Debug, Default)]
struct Content {
    rules: Rules,
    writes: usize,
    reads: usize,
    write_error: Option<String>,
    read_error: Option<String>,
}

/// Clones share one content.
#[derive(Debug, Clone, Default)]
pub struct FakeFilter {
    content: Rc<RefCell<Content>>,
    changed: Rc<Notify>,
}

impl FakeFilter {
    /// Returns the rules that are in place.
    pub fn rules(&self) -> Rules {
        self.content.borrow().rules.clone()
    }

    /// Returns how often rules were written.
    pub fn writes(&self) -> usize {
        self.content.borrow().writes
    }

    /// Returns how often the rules were compared.
    pub fn reads(&self) -> usize {
        self.content.borrow().reads
    }

    /// Lets every write fail with `run fake: TEXT` from now on. With `None`, writes work again.
    pub fn fail_writes(&self, text: Option<&str>) {
        self.content.borrow_mut().write_error = text.map(str::to_owned);
    }

    /// Lets every read fail with `run fake: TEXT` from now on. With `None`, reads work again.
    pub fn fail_reads(&self, text: Option<&str>) {
        self.content.borrow_mut().read_error = text.map(str::to_owned);
    }

    /// Removes all rules as another program would, and sends a notification.
    pub fn flush(&self) {
        self.content.borrow_mut().rules = Rules::default();
        self.changed.notify_one();
    }
}

fn error(text: &str) -> FirewallError {
    ProgramError::Failed { program: "fake".to_owned(), stderr: text.to_owned() }.into()
}

impl PacketFilter for FakeFilter {
    fn describe(&self) -> String {
        "fake".to_owned()
    }

    fn ensure<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Result<Ensured, EnsureError>> {
        Box::pin(async move {
            let mut content = self.content.borrow_mut();
            content.reads += 1;
            if let Some(text) = &content.read_error {
                return Err(EnsureError::Read(error(text)));
            }
            if let Some(text) = &content.write_error {
                return Err(EnsureError::Write(error(text)));
            }
            if content.rules == *rules {
                return Ok(Ensured::Unchanged);
            }
            content.rules = rules.clone();
            content.writes += 1;
            Ok(Ensured::Written)
        })
    }

    fn remove(&mut self) -> Local<'_, Result<bool, FirewallError>> {
        Box::pin(async move {
            let mut content = self.content.borrow_mut();
            if let Some(text) = &content.write_error {
                return Err(error(text));
            }
            Ok(!std::mem::take(&mut content.rules).is_empty())
        })
    }

    fn changed(&mut self) -> Local<'_, ()> {
        Box::pin(self.changed.notified())
    }
}
