// SPDX-License-Identifier: Apache-2.0
//! Compares the simulated etcd with a real one: the same random requests, by the same client library, must get the same answers and events.

#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests are not inside #[test] themselves

use std::time::Duration;

use etcd_client::{
    Client, Compare, CompareOp, DeleteOptions, Error, GetOptions, KeyValue, PutOptions, Txn, TxnOp, TxnOpResponse,
    WatchOptions, WatchStream,
};
use weft_sim::chance::Chance;
use weft_sim::etcd::Etcd;
use weft_sim::server::Server;
use weft_sim::wire::Wire;

#[path = "../../subnet/tests/store/server.rs"]
#[allow(dead_code)] // the tests of the store use more of it
mod real;

const PREFIX: &str = "/w/";
const REQUESTS: usize = 1500;
/// It only ends a test that hangs.
const LIMIT: Duration = Duration::from_secs(120);

/// Both servers, and a client of each.
struct Pair {
    server: Server,
    simulated: Client,
    real: Client,
    /// The revision of both.
    revision: i64,
    compacted: i64,
}

/// One request. Both servers get the same one.
#[derive(Debug, Clone)]
enum Request {
    Put(String, String, PutOptions),
    Get(String, GetOptions),
    Delete(String, DeleteOptions),
    Txn(Txn),
    Grant(i64, i64),
    Revoke(i64),
    KeepAlive(i64),
    TimeToLive(i64),
}

/// Chooses a key. There are few of them, so that requests meet each other.
fn key(chance: &mut Chance) -> String {
    format!("{PREFIX}k{}", chance.below(6))
}

/// Chooses a lease. Not all of them exist at a time.
fn lease(chance: &mut Chance) -> i64 {
    100 + i64::try_from(chance.below(4)).unwrap()
}

impl Pair {
    fn get_options(&self, chance: &mut Chance, in_txn: bool) -> GetOptions {
        let mut options = GetOptions::new();
        let revision = |chance: &mut Chance| self.revision + 2 - i64::try_from(chance.below(12)).unwrap();
        if chance.percent(60) {
            options = options.with_range(format!("{PREFIX}k{}", chance.below(7)));
        }
        if !in_txn && chance.percent(20) {
            options = options.with_revision(revision(chance).max(0));
        }
        if chance.percent(20) {
            options = options.with_limit(1 + i64::try_from(chance.below(3)).unwrap());
        }
        if chance.percent(15) {
            options = options.with_min_create_revision(revision(chance).max(0));
        }
        if chance.percent(15) {
            options = options.with_max_create_revision(revision(chance).max(0));
        }
        match chance.below(8) {
            0 => options.with_keys_only(),
            1 => options.with_count_only(),
            _ => options,
        }
    }

    fn put(&self, chance: &mut Chance) -> (String, String, PutOptions) {
        let options = match chance.below(4) {
            0 => PutOptions::new().with_lease(lease(chance)),
            1 => PutOptions::new().with_ignore_lease(),
            _ => PutOptions::new(),
        };
        (key(chance), format!("v{}", chance.below(4)), options)
    }

    fn delete(&self, chance: &mut Chance) -> (String, DeleteOptions) {
        let options = DeleteOptions::new();
        let wide = chance.percent(20);
        (key(chance), if wide { options.with_range(format!("{PREFIX}k{}", chance.below(7))) } else { options })
    }

    fn compare(&self, chance: &mut Chance) -> Compare {
        let op = [CompareOp::Equal, CompareOp::Greater, CompareOp::Less, CompareOp::NotEqual][chance.below(4)];
        let (key, small) = (key(chance), i64::try_from(chance.below(4)).unwrap());
        // A revision of zero compares whether the key exists.
        let revision = if chance.percent(50) { 0 } else { self.revision - small };
        match chance.below(5) {
            0 => Compare::version(key, op, small),
            1 => Compare::create_revision(key, op, revision),
            2 => Compare::mod_revision(key, op, revision),
            3 => Compare::lease(key, op, if chance.percent(50) { 0 } else { lease(chance) }),
            _ => Compare::value(key, op, format!("v{small}")),
        }
    }

    /// Chooses the operations of a transaction: one write and some reads. etcd refuses two writes of one key.
    fn operations(&self, chance: &mut Chance) -> Vec<TxnOp> {
        let mut all: Vec<TxnOp> =
            (0..chance.below(3)).map(|_| TxnOp::get(key(chance), Some(self.get_options(chance, true)))).collect();
        let write = match chance.below(3) {
            0 => {
                let (key, options) = self.delete(chance);
                Some(TxnOp::delete(key, Some(options)))
            }
            1 => {
                let (key, value, options) = self.put(chance);
                Some(TxnOp::put(key, value, Some(options)))
            }
            _ => None,
        };
        let at = chance.below(all.len() + 1);
        write.into_iter().for_each(|write| all.insert(at, write));
        all
    }

    fn request(&self, chance: &mut Chance) -> Request {
        match chance.below(20) {
            0..6 => {
                let (key, value, options) = self.put(chance);
                Request::Put(key, value, options)
            }
            6..10 => Request::Get(key(chance), self.get_options(chance, false)),
            10..12 => {
                let (key, options) = self.delete(chance);
                Request::Delete(key, options)
            }
            12..16 => {
                let compares: Vec<Compare> = (0..chance.below(3)).map(|_| self.compare(chance)).collect();
                let (then, otherwise) = (self.operations(chance), self.operations(chance));
                Request::Txn(Txn::new().when(compares).and_then(then).or_else(otherwise))
            }
            // None of them ends before the test does.
            16 => Request::Grant(lease(chance), 100_000 + i64::try_from(chance.below(100)).unwrap()),
            17 => Request::Revoke(lease(chance)),
            18 => Request::KeepAlive(lease(chance)),
            _ => Request::TimeToLive(lease(chance)),
        }
    }

    /// Sends a request to both, and compares the answers.
    async fn both(&mut self, request: &Request) {
        let simulated = answer(&mut self.simulated, request.clone()).await;
        let real = answer(&mut self.real, request.clone()).await;
        assert_eq!(simulated.1, real.1, "simulated and real answer to {request:?} at revision {}", self.revision);
        assert_eq!(simulated.0, real.0, "simulated and real revision after {request:?}");
        self.revision = real.0.unwrap_or(self.revision);
    }

    /// Forgets all earlier versions in both. The simulated server has no such request: nothing in weft sends one.
    async fn compact(&mut self) {
        if self.revision > self.compacted {
            self.server.change(Etcd::compact);
            self.real.compact(self.revision, None).await.unwrap();
            self.compacted = self.revision;
        }
    }

    /// Watches the keys in both from this revision on.
    async fn watch(&mut self, from: i64) -> [WatchStream; 2] {
        let options = || Some(WatchOptions::new().with_prefix().with_start_revision(from));
        [self.simulated.watch(PREFIX, options()).await.unwrap(), self.real.watch(PREFIX, options()).await.unwrap()]
    }
}

fn describe(kv: &KeyValue) -> String {
    let (created, modified, version) = (kv.create_revision(), kv.mod_revision(), kv.version());
    format!("{}={}@{created},{modified},{version},{}", kv.key_str().unwrap(), kv.value_str().unwrap(), kv.lease())
}

fn describe_all(kvs: &[KeyValue]) -> String {
    kvs.iter().map(describe).collect::<Vec<_>>().join(" ")
}

/// Returns the revision in the head of the answer, and everything else that both servers must agree on.
async fn answer(client: &mut Client, request: Request) -> (Option<i64>, String) {
    match attempt(client, request).await {
        Ok((revision, text)) => (Some(revision), text),
        Err(Error::GRpcStatus(status)) => (None, format!("{:?} {}", status.code(), status.message())),
        Err(other) => (None, other.to_string()),
    }
}

async fn attempt(client: &mut Client, request: Request) -> Result<(i64, String), Error> {
    Ok(match request {
        Request::Put(key, value, options) => {
            (client.put(key, value, Some(options)).await?.header().unwrap().revision(), String::new())
        }
        Request::Get(key, options) => {
            let got = client.get(key, Some(options)).await?;
            let text = format!("{} more {} count {}", describe_all(got.kvs()), got.more(), got.count());
            (got.header().unwrap().revision(), text)
        }
        Request::Delete(key, options) => {
            let deleted = client.delete(key, Some(options)).await?;
            (deleted.header().unwrap().revision(), deleted.deleted().to_string())
        }
        Request::Txn(txn) => {
            let done = client.txn(txn).await?;
            let parts = done.op_responses().into_iter().map(|part| match part {
                TxnOpResponse::Put(_) => "put".to_owned(),
                TxnOpResponse::Get(got) => format!("{} {} {}", describe_all(got.kvs()), got.more(), got.count()),
                TxnOpResponse::Delete(deleted) => deleted.deleted().to_string(),
                TxnOpResponse::Txn(_) => unreachable!("no transaction has another one"),
            });
            let text = format!("{}: {}", done.succeeded(), parts.collect::<Vec<_>>().join(", "));
            (done.header().unwrap().revision(), text)
        }
        Request::Grant(id, ttl) => {
            let options = etcd_client::LeaseGrantOptions::new().with_id(id);
            let granted = client.lease_grant(ttl, Some(options)).await?;
            (granted.header().unwrap().revision(), format!("{} {}", granted.id(), granted.ttl()))
        }
        Request::Revoke(id) => (client.lease_revoke(id).await?.header().unwrap().revision(), String::new()),
        Request::KeepAlive(id) => {
            let (mut keeper, mut answers) = client.lease_keep_alive(id).await?;
            keeper.keep_alive().await?;
            let kept = answers.message().await?.expect("an answer");
            (kept.header().unwrap().revision(), kept.ttl().to_string())
        }
        Request::TimeToLive(id) => {
            let options = etcd_client::LeaseTimeToLiveOptions::new().with_keys();
            let lease = client.lease_time_to_live(id, Some(options)).await?;
            let mut keys: Vec<String> =
                lease.keys().iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect();
            keys.sort_unstable();
            // The rest of the time depends on when each server was asked.
            let text = format!("{} {} {keys:?}", lease.ttl() > 0, lease.granted_ttl());
            (lease.header().unwrap().revision(), text)
        }
    })
}

/// Reads events until one of this revision has come, or the watch ends. Returns each with its revision.
async fn events(watch: &mut WatchStream, last: i64) -> Vec<(i64, String)> {
    let mut all = Vec::new();
    let reading = async {
        while let Some(message) = watch.message().await.unwrap() {
            all.extend(message.events().iter().map(|event| {
                let kv = event.kv().unwrap();
                (kv.mod_revision(), format!("{:?} {}", event.event_type(), describe(kv)))
            }));
            if message.canceled() {
                all.push((i64::MAX, format!("canceled: {}", message.compact_revision())));
            }
            if all.last().is_some_and(|(revision, _)| *revision >= last) {
                return;
            }
        }
    };
    tokio::time::timeout(LIMIT, reading).await.expect("the events come");
    assert!(all.is_sorted_by_key(|(revision, _)| *revision), "{all:?}");
    // Keys that are deleted in one revision have no order.
    all.sort();
    all
}

/// Both watches must show the same events up to this revision.
async fn same_events([simulated, real]: &mut [WatchStream; 2], last: i64) {
    assert_eq!(events(simulated, last).await, events(real, last).await);
}

#[tokio::test]
async fn the_simulated_etcd_answers_as_a_real_one() {
    let process = real::Server::start().await;
    let server = Server::start(Etcd::new(1));
    let simulated = Client::from_channel(server.channel(&Wire::default()), None).await.unwrap();
    let mut pair = Pair { server, simulated, real: process.client().await, revision: 1, compacted: 0 };
    let mut chance = Chance::new(1, 6);
    let mut watches = pair.watch(1).await;
    let (mut last_change, mut seen) = (1, 1);
    for number in 1..=REQUESTS {
        let request = pair.request(&mut chance);
        let before = pair.revision;
        pair.both(&request).await;
        if pair.revision > before {
            last_change = pair.revision;
        }
        if number % 200 == 0 || number == REQUESTS {
            // A watch that is behind a compaction would end.
            assert!(last_change > seen, "some of 200 requests change something");
            same_events(&mut watches, last_change).await;
            seen = last_change;
        }
        if number % 200 == 0 {
            pair.compact().await;
        }
    }

    // A watch that begins after the last compaction, and one that begins too early.
    for from in [pair.compacted + 1, pair.compacted - 1] {
        same_events(&mut pair.watch(from).await, last_change).await;
    }

    // A lease that nobody renews takes its keys along.
    let mut watches = pair.watch(pair.revision + 1).await;
    pair.both(&Request::Grant(200, 10)).await;
    let attached = PutOptions::new().with_lease(200);
    pair.both(&Request::Put(format!("{PREFIX}short"), "v".to_owned(), attached)).await;
    let put = pair.revision;
    same_events(&mut watches, put).await;
    same_events(&mut watches, put + 1).await;
    pair.both(&Request::TimeToLive(200)).await;
}
