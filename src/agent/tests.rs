// SPDX-License-Identifier: Apache-2.0
//! The agent from its start to its end, with a store and a kernel in memory.

use std::cell::Cell;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;
use weft_subnet::attrs::Attrs;
use weft_subnet::cidr::Subnets;
use weft_subnet::evidence::Evidence;
use weft_subnet::lease::{Age, Lease, Record};
use weft_subnet::source::{Capabilities, Error, FaultNotice, LeaseRequest, Local};

use super::*;
use crate::kernel::fake::FakeKernel;
use crate::kernel::fake::tests::machine;

/// A store that does not know at first what identifies it, as one whose kubeconfig is not there yet. A later question has no answer.
struct Late {
    asked: Cell<u32>,
    /// The number of the question that has no answer.
    silent_at: u32,
    is_silent: Notify,
}

impl Source for Late {
    fn describe(&self) -> String {
        "memory".into()
    }
    fn fingerprint(&self) -> Local<'_, Option<String>> {
        self.asked.set(self.asked.get() + 1);
        if self.asked.get() < self.silent_at {
            return Box::pin(async { None });
        }
        self.is_silent.notify_one();
        Box::pin(std::future::pending())
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { expires: false, assigned: false }
    }
    fn config(&self) -> Local<'_, Result<String, Error>> {
        Box::pin(async { Ok(r#"{"Network":"10.5.0.0/16","Backend":{"Type":"ipip"}}"#.to_owned()) })
    }
    fn own<'a>(&'a self, _: &'a Evidence) -> Local<'a, Result<Option<Lease>, Error>> {
        Box::pin(async { Ok(None) })
    }
    fn acquire<'a>(&'a self, request: &'a LeaseRequest) -> Local<'a, Result<Lease, Error>> {
        let subnets = Subnets::from_key("10.5.7.0-24").unwrap();
        let lease = Lease { id: subnets.to_key().into(), subnets, attrs: request.attrs.clone(), age: Age::default() };
        Box::pin(async { Ok(lease) })
    }
    fn retake<'a>(&'a self, _: &'a Subnets, _: &'a Attrs, _: &'a Attrs) -> Local<'a, Result<Lease, Error>> {
        unreachable!("nothing has changed")
    }
    fn release<'a>(&'a self, _: &'a Lease) -> Local<'a, Result<(), Error>> {
        unreachable!("no part of a run")
    }
    fn list(&self) -> Local<'_, Result<Vec<Record>, Error>> {
        unreachable!("no part of a run")
    }
    fn remove<'a>(&'a self, _: &'a str) -> Local<'a, Result<(), Error>> {
        unreachable!("no part of a run")
    }
    fn watch(&self, _: mpsc::Sender<Event>) -> Local<'_, ()> {
        Box::pin(std::future::pending())
    }
    fn write_notice<'a>(&'a self, _: &'a FaultNotice) -> Local<'a, Result<(), Error>> {
        Box::pin(async { Ok(()) })
    }
}

/// Without its identity, nothing would be saved for the next start until the agent is restarted.
#[tokio::test]
async fn a_store_that_did_not_know_its_identity_is_asked_again_when_there_is_a_lease() {
    assert_eq!(asked_until_the_agent_ends(2).await, 2);
}

/// The first question to an API server that does not answer takes long.
#[tokio::test]
async fn an_agent_can_be_stopped_while_its_store_does_not_say_what_identifies_it() {
    assert_eq!(asked_until_the_agent_ends(1).await, 1);
}

/// Runs an agent that is stopped when this question to the store has no answer. Returns how often the store was asked.
async fn asked_until_the_agent_ends(silent_at: u32) -> u32 {
    let dir = tempfile::tempdir().unwrap();
    let store = Rc::new(Late { asked: Cell::new(0), silent_at, is_silent: Notify::new() });
    let (_requests, requests) = mpsc::channel(1);
    let (readiness, metrics) = (Readiness::new(), Arc::new(Metrics::new()));
    let surroundings = Surroundings { requests, readiness, metrics, traffic_rules: false, was_killed: false };
    let kernel = FakeKernel::new(machine(&["192.168.0.1/24"]), PROTOCOL);
    let options = Options { state_dir: Some(dir.path().into()), ..Options::minimal(dir.path()) };
    let asked = store.clone();
    let shutdown = async move { asked.is_silent.notified().await };
    let agent = serve_in(surroundings, options, store.clone(), (kernel.clone(), kernel), shutdown);
    let ended = timeout(Duration::from_secs(30), LocalSet::new().run_until(agent)).await;
    ended.expect("the agent ends").unwrap();
    store.asked.get()
}

#[path = "tests/running.rs"]
mod running;
