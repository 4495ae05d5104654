// SPDX-License-Identifier: Apache-2.0
//! One client for each endpoint, used until it fails, then the next: etcd-client's own balancer keeps sending calls to
//! endpoints that are dead. Every call has a time limit.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, GetOptions, GetResponse, KvClient, TxnResponse};
use tokio::time::{Instant, timeout};

use crate::source::Error;

use super::EtcdOptions;
use super::tls::{self, Stamp};

/// How long one call to one endpoint may take.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(3);

/// Files that changed but do not work are tried again so often while the connection that there is works.
const TRY_FILES_EVERY: Duration = Duration::from_secs(60);

/// The largest answer that is taken into memory. A page of 8,000 leases has 4 MB; whoever may write values may make them so large
/// (etcd takes 1.5 MB each) that a page has gigabytes, and is then asked for in smaller ones.
pub(super) const MESSAGE_LIMIT: usize = 16 << 20;

/// gRPC status codes (the client gives them as numbers).
const CANCELLED: i32 = 1;
const UNKNOWN: i32 = 2;
const DEADLINE_EXCEEDED: i32 = 4;
const OUT_OF_RANGE: i32 = 11;
const INTERNAL: i32 = 13;
const UNAVAILABLE: i32 = 14;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("no answer within {} s", CALL_LIMIT.as_secs())]
    Silent,
    #[error("{}", explain(.0))]
    Etcd(etcd_client::Error),
    #[error("{0}")]
    Stream(String),
}

fn explain(error: &etcd_client::Error) -> String {
    match error {
        etcd_client::Error::GRpcStatus(status) => {
            // The status says "transport error"; what happened stands at the end of its sources.
            let mut text = status.message().to_owned();
            let mut cause = std::error::Error::source(status);
            while let Some(inner) = cause {
                let inner_text = inner.to_string();
                if !text.contains(&inner_text) {
                    text = format!("{text}: {inner_text}");
                }
                cause = inner.source();
            }
            if about_auth(error) {
                text.push_str(" (check --etcd-username and --etcd-password, and the user's role)");
            }
            text
        }
        other => other.to_string(),
    }
}

/// Another endpoint may do better.
fn elsewhere(error: &etcd_client::Error) -> bool {
    match error {
        etcd_client::Error::GRpcStatus(status) => {
            [CANCELLED, UNKNOWN, DEADLINE_EXCEEDED, INTERNAL, UNAVAILABLE].contains(&(status.code() as i32))
        }
        etcd_client::Error::InvalidArgs(_) | etcd_client::Error::InvalidUri(_) => false,
        _ => true,
    }
}

fn about_auth(error: &etcd_client::Error) -> bool {
    let etcd_client::Error::GRpcStatus(status) = error else { return false };
    let text = status.message();
    text.contains("auth") || text.contains("permission denied") || text.contains("user name")
}

struct Endpoint {
    url: String,
    client: RefCell<Option<Held>>,
}

/// A client, and the files that it was made of.
#[derive(Clone)]
struct Held {
    client: Client,
    made_of: Stamp,
    /// Other files that were tried since, and when.
    tried: Option<(Stamp, Instant)>,
}

/// All endpoints, and which one is in use.
pub(super) struct Pool {
    endpoints: Vec<Endpoint>,
    current: Cell<usize>,
    options: EtcdOptions,
    user: Option<(String, String)>,
    /// How to connect to each endpoint, by the files as they last fitted together.
    fitted: RefCell<Vec<ConnectOptions>>,
    /// Why the files do not fit together now: said once.
    unfit: RefCell<Option<String>>,
}

/// A client and the endpoint it talks to.
pub(super) struct Connected {
    pub(super) index: usize,
    pub(super) client: Client,
}

/// A key-value client that takes large answers.
pub(super) fn kv(client: &Client) -> KvClient {
    client.kv_client().max_decoding_message_size(MESSAGE_LIMIT)
}

/// Bounds one call.
pub(super) async fn limited<T>(call: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, Fault> {
    match timeout(CALL_LIMIT, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(Fault::Etcd(error)),
        Err(_) => Err(Fault::Silent),
    }
}

impl Pool {
    /// Reads the files; connects to nothing yet.
    ///
    /// # Errors
    /// [`Error::Invalid`], naming the flag and the remedy.
    pub(super) fn new(options: EtcdOptions) -> Result<Pool, Error> {
        let user = tls::user(&options)?;
        let targets = tls::endpoints(&options)?;
        tls::warn_of_http(&options, &targets);
        let (endpoints, fitted) =
            targets.into_iter().map(|(url, how)| (Endpoint { url, client: RefCell::new(None) }, how)).unzip();
        let fitted = RefCell::new(fitted);
        Ok(Pool { endpoints, current: Cell::new(0), options, user, fitted, unfit: RefCell::new(None) })
    }

    /// For people.
    pub(super) fn urls(&self) -> String {
        self.endpoints.iter().map(|endpoint| endpoint.url.as_str()).collect::<Vec<_>>().join(",")
    }

    pub(super) fn len(&self) -> usize {
        self.endpoints.len()
    }

    pub(super) fn url(&self) -> &str {
        &self.endpoints[self.current.get()].url
    }

    /// The endpoint in use; on failure the next one is in use afterwards. A new client is made of the files as they are now.
    pub(super) async fn connect(&self) -> Result<Connected, Fault> {
        let index = self.current.get();
        let held = self.endpoints[index].client.borrow().clone();
        if let Some(held) = held {
            let client = self.renewed(index, &held).await.unwrap_or(held.client);
            return Ok(Connected { index, client });
        }
        let made_of = Stamp::of(&self.options);
        self.read_files().await;
        match self.client(index).await {
            Ok(client) => {
                *self.endpoints[index].client.borrow_mut() =
                    Some(Held { client: client.clone(), made_of, tried: None });
                Ok(Connected { index, client })
            }
            Err(fault) => {
                self.failed(index);
                Err(fault)
            }
        }
    }

    async fn client(&self, index: usize) -> Result<Client, Fault> {
        let mut how = self.fitted.borrow()[index].clone();
        if let Some((name, password)) = self.user.clone() {
            how = how.with_user(name, password).with_auto_token_refresh(true);
        }
        limited(Client::connect([&self.endpoints[index].url], Some(how))).await
    }

    /// Reads the files again. Where they do not fit together (a rotation writes one after the other), what fitted last stays in
    /// use. False: it did.
    async fn read_files(&self) -> bool {
        match tls::again(&self.options).await {
            Ok(how) => {
                *self.fitted.borrow_mut() = how;
                self.unfit.replace(None);
                true
            }
            Err(why) => {
                if self.unfit.replace(Some(why.clone())).as_ref() != Some(&why) {
                    tracing::warn!("etcd credentials: {why}; those that were read before stay in use");
                }
                false
            }
        }
    }

    /// A client of the files as they are now, where they are others than those of the client that there is. It must have an
    /// answer from etcd before it takes that one's place: what works is not given up for what may not.
    async fn renewed(&self, index: usize, held: &Held) -> Option<Client> {
        let now = Stamp::of(&self.options);
        let tried = |(files, at): &(Stamp, Instant)| *files == now && at.elapsed() < TRY_FILES_EVERY;
        if now == held.made_of || held.tried.as_ref().is_some_and(tried) {
            return None;
        }
        if let Some(held) = &mut *self.endpoints[index].client.borrow_mut() {
            held.tried = Some((now.clone(), Instant::now()));
        }
        if !self.read_files().await {
            return None;
        }
        let answer = match self.client(index).await {
            Ok(client) => {
                limited(client.maintenance_client().status()).await.map(|_| client.clone()).or_else(|fault| {
                    // etcd answered: to say no to this question takes a connection.
                    if matches!(&fault, Fault::Etcd(error) if !elsewhere(error)) { Ok(client) } else { Err(fault) }
                })
            }
            Err(fault) => Err(fault),
        };
        match answer {
            Ok(client) => {
                tracing::info!("etcd credentials: the files changed and are used from now on");
                let held = Held { client: client.clone(), made_of: now, tried: None };
                *self.endpoints[index].client.borrow_mut() = Some(held);
                Some(client)
            }
            Err(fault) => {
                let why = crate::retry::chain(&fault);
                tracing::warn!(
                    "etcd credentials: the files changed and do not work ({why}); the connection stays as it is"
                );
                None
            }
        }
    }

    /// Leaves this endpoint, if it is still the one in use, and forgets its connection and token.
    pub(super) fn failed(&self, index: usize) {
        *self.endpoints[index].client.borrow_mut() = None;
        if self.current.get() == index {
            self.current.set((index + 1) % self.endpoints.len());
        }
    }

    /// One call, tried on each endpoint once. A write that was cut off may have been carried out all the same: callers
    /// fence their writes and read again on a conflict.
    pub(super) async fn call<T, F, Fut>(&self, what: &str, call: F) -> Result<T, Error>
    where
        F: Fn(Client) -> Fut,
        Fut: Future<Output = Result<T, etcd_client::Error>>,
    {
        let mut left = self.endpoints.len();
        let mut renewed = false;
        loop {
            let url = self.url();
            let tried = match self.connect().await {
                Ok(to) => (limited(call(to.client)).await, Some(to.index)),
                Err(fault) => (Err(fault), None),
            };
            let fault = match tried {
                (Ok(answer), _) => return Ok(answer),
                (Err(fault), Some(index)) => {
                    let stale = matches!(&fault, Fault::Etcd(error) if about_auth(error));
                    if stale && !renewed {
                        // The token may be older than a change of users or a restart: log in again, once, at the same endpoint.
                        renewed = true;
                        *self.endpoints[index].client.borrow_mut() = None;
                        continue;
                    }
                    if matches!(&fault, Fault::Etcd(error) if !elsewhere(error)) {
                        return Err(failure(what, url, fault));
                    }
                    self.failed(index);
                    fault
                }
                (Err(fault), None) => fault,
            };
            left = left.saturating_sub(1);
            if left == 0 {
                return Err(failure(what, url, fault));
            }
        }
    }

    /// Reads a key or a range.
    pub(super) async fn get<K>(&self, what: &str, key: K, options: Option<GetOptions>) -> Result<GetResponse, Error>
    where
        K: AsRef<[u8]>,
    {
        self.call(what, |client| {
            let (key, options) = (key.as_ref().to_vec(), options.clone());
            async move { kv(&client).get(key, options).await }
        })
        .await
    }

    /// A fenced write: one comparison, and what is done together when it holds.
    pub(super) async fn swap(
        &self,
        what: &str,
        when: etcd_client::Compare,
        then: Vec<etcd_client::TxnOp>,
    ) -> Result<TxnResponse, Error> {
        self.call(what, |mut client| {
            let txn = etcd_client::Txn::new().when([when.clone()]).and_then(then.clone());
            async move { client.txn(txn).await }
        })
        .await
    }
}

/// The answer was larger than [`MESSAGE_LIMIT`]: nothing of it was taken into memory, and another endpoint would say the same.
pub(super) fn too_large(error: &Error) -> bool {
    let Error::Unavailable { source: Some(source), .. } = error else { return false };
    matches!(source.downcast_ref::<Fault>(), Some(Fault::Etcd(error)) if message_too_large(error))
}

/// As [`too_large`], of a call or a stream. The code is also etcd's for a revision that was compacted.
pub(super) fn message_too_large(error: &etcd_client::Error) -> bool {
    let etcd_client::Error::GRpcStatus(status) = error else { return false };
    status.code() as i32 == OUT_OF_RANGE && status.message().contains("message length too large")
}

/// The store cannot be reached, or refuses who we are.
pub(super) fn failure(what: &str, url: &str, fault: Fault) -> Error {
    let what = format!("{what} from {url}");
    match &fault {
        Fault::Etcd(error) if about_auth(error) && !elsewhere(error) => {
            Error::Refused { what, source: Box::new(fault) }
        }
        _ => Error::Unavailable { what, source: Some(Box::new(fault)) },
    }
}
