// SPDX-License-Identifier: Apache-2.0
//! A firewall in memory, for tests: records, fails on demand, and is disturbed on demand.

use std::cell::RefCell;
use std::rc::Rc;

use tokio::sync::Notify;
use weft_backends::masq::Rules;
use weft_subnet::source::Local;

use super::{Ensured, Failed, Firewall, Trouble};

#[derive(Debug, Default)]
struct Inside {
    rules: Rules,
    writes: usize,
    looks: usize,
    trouble: Option<Trouble>,
    blind: Option<Trouble>,
}

/// Clones share one content.
#[derive(Debug, Clone, Default)]
pub struct FakeFirewall {
    inside: Rc<RefCell<Inside>>,
    rings: Rc<Notify>,
}

impl FakeFirewall {
    /// What is in it.
    pub fn rules(&self) -> Rules {
        self.inside.borrow().rules.clone()
    }

    /// How often it was written.
    pub fn writes(&self) -> usize {
        self.inside.borrow().writes
    }

    /// How often it was looked at.
    pub fn looks(&self) -> usize {
        self.inside.borrow().looks
    }

    /// Everything fails so; `None`: works again.
    pub fn fail(&self, trouble: Option<&str>) {
        self.inside.borrow_mut().trouble = trouble.map(|text| Trouble(text.to_owned()));
    }

    /// Nothing can be read, and this is said; `None`: it can be again.
    pub fn blind(&self, trouble: Option<&str>) {
        self.inside.borrow_mut().blind = trouble.map(|text| Trouble(text.to_owned()));
    }

    /// Someone flushes the rules, and it is told.
    pub fn flush(&self) {
        self.inside.borrow_mut().rules = Rules::default();
        self.rings.notify_one();
    }
}

impl Firewall for FakeFirewall {
    fn describe(&self) -> String {
        "fake".to_owned()
    }

    fn ensure<'a>(&'a mut self, rules: &'a Rules) -> Local<'a, Result<Ensured, Failed>> {
        Box::pin(async move {
            let mut inside = self.inside.borrow_mut();
            inside.looks += 1;
            if let Some(trouble) = &inside.blind {
                return Err(Failed::Look(trouble.clone()));
            }
            if let Some(trouble) = &inside.trouble {
                return Err(Failed::Write(trouble.clone()));
            }
            if inside.rules == *rules {
                return Ok(Ensured::Same);
            }
            inside.rules = rules.clone();
            inside.writes += 1;
            Ok(Ensured::Written)
        })
    }

    fn remove(&mut self) -> Local<'_, Result<bool, Trouble>> {
        Box::pin(async move {
            let mut inside = self.inside.borrow_mut();
            if let Some(trouble) = &inside.trouble {
                return Err(trouble.clone());
            }
            Ok(!std::mem::take(&mut inside.rules).is_empty())
        })
    }

    fn disturbed(&mut self) -> Local<'_, ()> {
        Box::pin(self.rings.notified())
    }
}
