// SPDX-License-Identifier: Apache-2.0
//! One client for each endpoint, used until it fails, then the next: etcd-client's own balancer keeps sending calls to
//! endpoints that are dead. Every call has a time limit.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::time::Duration;

use etcd_client::{Client, ConnectOptions, GetOptions, GetResponse, KvClient, TxnResponse};
use tokio::time::timeout;

use crate::source::Error;

use super::tls::Target;

/// How long one call to one endpoint may take.
pub(super) const CALL_LIMIT: Duration = Duration::from_secs(3);

/// 4 MiB, the default, is less than 25,000 leases; values may be 1.5 MiB each.
pub(super) const MESSAGE_LIMIT: usize = 256 << 20;

/// gRPC status codes (the client gives them as numbers).
const CANCELLED: i32 = 1;
const UNKNOWN: i32 = 2;
const DEADLINE_EXCEEDED: i32 = 4;
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
    options: ConnectOptions,
    client: RefCell<Option<Client>>,
}

/// All endpoints, and which one is in use.
pub(super) struct Pool {
    endpoints: Vec<Endpoint>,
    current: Cell<usize>,
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
    pub(super) fn new(targets: Vec<Target>) -> Pool {
        let endpoint = |(url, options)| Endpoint { url, options, client: RefCell::new(None) };
        Pool { endpoints: targets.into_iter().map(endpoint).collect(), current: Cell::new(0) }
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

    /// The endpoint in use; on failure the next one is in use afterwards.
    pub(super) async fn connect(&self) -> Result<Connected, Fault> {
        let index = self.current.get();
        let endpoint = &self.endpoints[index];
        let ready = endpoint.client.borrow().clone();
        if let Some(client) = ready {
            return Ok(Connected { index, client });
        }
        match limited(Client::connect([&endpoint.url], Some(endpoint.options.clone()))).await {
            Ok(client) => {
                *endpoint.client.borrow_mut() = Some(client.clone());
                Ok(Connected { index, client })
            }
            Err(fault) => {
                self.failed(index);
                Err(fault)
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
